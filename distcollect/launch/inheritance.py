"""What a worker takes over from the process that starts it."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from distcollect.launch.run_folder import SECRET_VARIABLE

# These change often, and nothing reads them when it is loaded.
_NOT_READ_AT_IMPORT = ("DISTCOLLECT_", "PYTEST_CURRENT_TEST")
# os.system() ignores them while it runs, a notebook between its cells; workers ignore SIGINT.
_IGNORED_AT_TIMES = {signal.SIGINT, signal.SIGQUIT}
# Of /proc/self/status: what a process may do, and the mode of its new files.
_STATUS = (
    *("CapInh", "CapPrm", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters"),
    "Umask",
)


@dataclass(frozen=True)
class Inheritance:
    """What workers, replacements too, get of this process as it was at one time.

    Libraries change variables for a while, and a script may go to another folder.

    Attributes:
        environ: environment variables.
        folder: the working folder; "" if it was removed.
        sys_path: where modules are looked for.
    """

    environ: Mapping[str, str]
    folder: str
    sys_path: tuple[str, ...]

    @classmethod
    def now(cls) -> Inheritance:
        """Note what a worker gets that is started now."""
        # Other threads may change it meanwhile. What envs start has no use for the token.
        values = {name: os.environ.get(name) for name in os.environ if name != SECRET_VARIABLE}
        # TensorDict writes that for an option which was set for a while, and later can't read it.
        if values.get("LAZY_LEGACY_OP") == "None":
            del values["LAZY_LEGACY_OP"]
        try:
            folder = str(Path.cwd())
        except FileNotFoundError:
            folder = ""
        # Python ignores what else is on the path, such as a ``Path``.
        sys_path = tuple(entry for entry in sys.path if isinstance(entry, str))
        environ = {name: value for name, value in values.items() if value is not None}
        return cls(environ, folder, sys_path)

    def origin(self) -> tuple[object, ...]:
        """List what a process also takes over that starts now, or libraries read when they load."""
        status = Path("/proc/self/status").read_text()
        lines = dict(line.split(":", 1) for line in status.splitlines())  # not all kernels have all
        ignored = int(lines.get("SigIgn", "0"), 16)
        limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
        environ = self.environ.items()
        return (
            {name: value for name, value in environ if not name.startswith(_NOT_READ_AT_IMPORT)},
            (os.getresuid(), os.getresgid(), os.getgroups()),
            [lines.get(name) for name in _STATUS],
            [resource.getrlimit(getattr(resource, name)) for name in limits],
            (os.getpriority(os.PRIO_PROCESS, os.getpid()), os.sched_getscheduler(os.getpid())),
            ignored & ~sum(1 << (number - 1) for number in _IGNORED_AT_TIMES),
        )

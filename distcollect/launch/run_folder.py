"""The folder of a run on a cluster: how its jobs communicate over the shared disk.

::

    RUN/run.json            how it was submitted
    RUN/token               the secret that workers have to know; only its owner can read it
    RUN/trainer.json        where the trainer listens, or why it doesn't
    RUN/jobs/ID.json        its jobs
    RUN/failed/ID_RANK.json tasks that failed
    RUN/history/            other events of jobs
    RUN/logs/               the tasks' output, and submitit's files
    RUN/checkpoint.pt       where a :class:`~distcollect.Checkpoint` saves by default

Every file is replaced as a whole, so that no reader sees half of one. This module imports only
Python's own library: a small process in each task of a job uses it.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import secrets
import shlex
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN_VARIABLE = "DISTCOLLECT_RUN"
TOKEN_VARIABLE = "DISTCOLLECT_TOKEN_FILE"  # noqa: S105 - a name
SECRET_VARIABLE = "DISTCOLLECT_TOKEN"  # noqa: S105 - a name

# Another program's run.json does not have all of these.
_REQUIRED_SETTINGS = {"command", "num_tasks", "num_workers", "patience_s"}

# The states of a trainer in trainer.json.
LISTENING, STARTING, REQUEUED, ENDED = "listening", "starting", "requeued", "ended"
_EVERYONE = "everyone"
# Why a trainer has ended that did not fail.
DONE = "it is done"


class NotYet(OSError):
    """The trainer can't be reached yet; the message says why."""


class RunOver(Exception):
    """The trainer has ended, and won't be started again; the message says how it ended."""


@dataclass(frozen=True)
class RunFolder:
    """A run's folder; the module's docstring lists its files."""

    path: Path

    @classmethod
    def here(cls) -> RunFolder | None:
        """The folder of the run that this process belongs to; None: it belongs to none.

        Raises:
            PermissionError: others could change what is in it, or replace it.
        """
        path = os.environ.get(RUN_VARIABLE)
        if path and (problem := others_may_change(Path(path))):
            raise PermissionError(f"{RUN_VARIABLE}: {problem}")
        return cls(Path(path)) if path else None

    @property
    def logs(self) -> Path:
        """Return where the tasks' output goes."""
        return self.path / "logs"

    @property
    def token_file(self) -> Path:
        """The file with the secret that workers have to know."""
        return self.path / "token"

    def create(self, settings: dict[str, Any]) -> None:
        """Make the folder, readable by its owner alone.

        Raises:
            FileExistsError: it holds a run already.
            PermissionError: others could change what is in it, or replace it.
        """
        for above in [each for each in self.path.parents if not each.exists()][::-1]:
            # A team's umask may let others write to it: the sticky bit keeps each run its owner's.
            above.mkdir(exist_ok=True, mode=0o1777)
        self.path.mkdir(exist_ok=True, mode=0o700)
        if problem := others_may_change(self.path):
            raise PermissionError(problem)
        descriptor = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(16) + "\n")
        for name in ("logs", "jobs", "failed", "history"):
            (self.path / name).mkdir(exist_ok=True, mode=0o700)
            if problem := others_may_change(self.path / name):
                raise PermissionError(problem)
        self.write("run.json", settings)

    @property
    def settings(self) -> dict[str, Any]:
        """Return how the run was submitted; empty if the folder holds no run."""
        found = self.read("run.json") or {}
        return found if found.keys() >= _REQUIRED_SETTINGS else {}

    @property
    def num_workers(self) -> int:
        """Return how many workers in separate jobs the run began with; 0: none."""
        return int(self.settings.get("num_workers", 0))

    @property
    def patience_s(self) -> float:
        """Return how long the trainer waits for workers, and workers for the trainer."""
        return float(self.settings.get("patience_s", 3600.0))

    def read(self, name: str) -> dict[str, Any] | None:
        """A file's content; None if there is no such file, or it holds no JSON object."""
        try:
            content = json.loads((self.path / name).read_text())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Replace a file."""
        file = self.path / name
        # Not by common.files: this module travels by value, and so may import nothing of ours.
        draft = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}")
        draft.write_text(json.dumps(content, indent=1) + "\n")
        draft.replace(file)

    def jobs(self) -> list[dict[str, Any]]:
        """Return what is known about each of its jobs, in the order of their submission."""
        return self._read_all("jobs/[0-9]*.json", order="submitted")

    def _read_all(self, names: str, order: str) -> list[dict[str, Any]]:
        """The contents of all files with such names, in the order of one of their entries."""
        files = (path.relative_to(self.path) for path in self.path.glob(names))
        found = [content for file in files if (content := self.read(str(file))) is not None]
        return sorted(found, key=lambda content: float(content[order]))

    def note(self, job_id: str, what: str) -> None:
        """Add an event of a job to the history, for the user."""
        now = time.time()
        self.write(f"history/{job_id}-{now:.3f}.json", {"at": now, "job": job_id, "what": what})

    def history(self) -> list[str]:
        """The noted events with their times, oldest first."""
        notes = self._read_all("history/[0-9]*", order="at")
        return [f"{_clock(note['at'])} job {note['job']} {note['what']}" for note in notes]

    def tell(self, state: str, **about: Any) -> None:
        """Write the trainer's state for the other jobs, unless SLURM has started it again since.

        Args:
            state: LISTENING, STARTING, REQUEUED or ENDED.
            about: further entries of the file.
        """
        if not self.later_start():
            told = {"state": state, "since": _clock(time.time())}
            who = {"on": socket.gethostname(), "start": _own_start()}
            self.write("trainer.json", {**told, **who, **about})

    def later_start(self) -> str:
        """That SLURM has started this process's job again elsewhere, in words; "" if it hasn't.

        It does so when it has lost the contact to a host, whose processes may run on.
        """
        said, own = self.read("trainer.json") or {}, _own_start()
        start = said.get("start")
        if own is None or start is None or start[0] != own[0] or start[1] <= own[1]:
            return ""
        return (
            f"SLURM has started job {own[0]} again on {said['on']}, as it had lost the "
            f"contact to {socket.gethostname()}"
        )

    def address(self) -> tuple[str, int]:
        """Return where the trainer listens: host and port.

        Raises:
            NotYet: it does not listen at present.
            RunOver: it will never listen again.
        """
        said = self.read("trainer.json")
        if said is None or "state" not in said:
            raise NotYet("the trainer has not started yet")
        if said["state"] == ENDED:
            raise RunOver(str(said.get("why", "it has ended")))
        if said["state"] != LISTENING:
            raise NotYet(f"the trainer is {said['state']}, since {said['since']}")
        return str(said["host"]), int(said["port"])


def others_may_change(folder: Path) -> str:
    """Return why others could change what is in a folder, and what to do; "" if they can't.

    Nor can everyone replace it. Those whom :func:`trusted_with` names can.
    """
    if os.path.lexists(folder) and (why := _others_write_to(folder)):
        return (
            f"{folder}: {why}, so others could replace the run's token or its trainer's address; "
            "submit to a folder that does not exist yet, or to one of your own after "
            f"chmod go-w {shlex.quote(str(folder))}"
        )
    for who, path in _who_may_replace(folder):
        if who == _EVERYONE:
            return (
                f"{folder}: {who} may write to {path}, so others could put a folder of theirs in "
                f"its place; submit to a folder elsewhere, or after chmod +t {shlex.quote(path)}"
            )
    return ""


def trusted_with(folder: Path) -> str:
    """Return who besides root could replace a folder, for its user to know; "" if nobody.

    That is no error, as teams share the folders above those of their runs.
    """
    for who, path in _who_may_replace(folder):
        return (
            f"{folder}: {who} may change {path}, and so put another folder in its place, by which "
            "your jobs would run other code; if that isn't meant, submit to a folder elsewhere"
        )
    return ""


def _trusted() -> set[int]:
    return {0, os.geteuid()}  # root can change everything anyway


def _others_write_to(folder: Path) -> str:
    link, about = folder.lstat(), folder.stat()
    if link.st_uid not in _trusted():
        what = "link" if folder.is_symlink() else "folder"
        return f"this {what} belongs to user {link.st_uid}"
    if about.st_uid not in _trusted():
        return f"it is a link to a folder that belongs to user {about.st_uid}"
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it ({stat.filemode(about.st_mode)})"
    return ""


def _who_may_replace(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield who else can rename what is on the way to a folder, and in which folder or link."""
    for path in (*folder.absolute().parents, *Path(os.path.realpath(folder)).parents):
        if not os.path.lexists(path):
            continue  # it is still to be made
        about = path.lstat()
        # With the sticky bit, everyone can rename only what is their own. A link has no mode.
        writers = 0 if path.is_symlink() or about.st_mode & stat.S_ISVTX else about.st_mode
        if writers & stat.S_IWOTH:
            yield _EVERYONE, str(path)
        elif about.st_uid not in _trusted():
            yield f"user {about.st_uid}", str(path)
        elif writers & stat.S_IWGRP and not _is_private(about.st_gid):
            yield f"group {about.st_gid}", str(path)


def _is_private(gid: int) -> bool:
    """Return True if a group is root's, or this user's own that many systems make for each."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return gid == 0
    return gid == 0 or (group.gr_name == user.pw_name and {*group.gr_mem} <= {user.pw_name})


def obstacle(folder: Path) -> str:
    """Return why files can't be written to a folder, which may not exist yet; "" if they can."""
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        return f"{there} is a file"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} can't be written to"


def _own_start() -> tuple[str, int] | None:
    """The job of this process, and how often SLURM has started it again; None: it has no job."""
    job = os.environ.get("SLURM_JOB_ID")
    return None if job is None else (job, int(os.environ.get("SLURM_RESTART_COUNT", "0")))


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))

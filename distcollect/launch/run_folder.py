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

import json
import os
import secrets
import shlex
import socket
import stat
import time
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
        """The folder of the run that this process belongs to; None: it belongs to none."""
        path = os.environ.get(RUN_VARIABLE)
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
            PermissionError: it exists, and others could change what is in it.
        """
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
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
        names = [path.relative_to(self.path) for path in (self.path / "jobs").glob("[0-9]*.json")]
        jobs = [job for name in names if (job := self.read(str(name))) is not None]
        return sorted(jobs, key=lambda job: float(job["submitted"]))

    def note(self, job_id: str, what: str) -> None:
        """Add an event of a job to the history, for the user."""
        now = time.time()
        self.write(f"history/{job_id}-{now:.3f}.json", {"at": now, "job": job_id, "what": what})

    def history(self) -> list[str]:
        """The noted events with their times, oldest first."""
        files = (path.relative_to(self.path) for path in (self.path / "history").glob("[0-9]*"))
        notes = [note for file in files if (note := self.read(str(file))) is not None]
        notes.sort(key=lambda note: float(note["at"]))
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
    """Return why other users could change what is in a folder, and what to do; "" if they can't."""
    if not os.path.lexists(folder):
        return ""
    trusted = {0, os.geteuid()}  # root can change everything anyway
    link, about = folder.lstat(), folder.stat()
    if link.st_uid not in trusted:
        what = "link" if folder.is_symlink() else "folder"
        why = f"this {what} belongs to user {link.st_uid}"
    elif about.st_uid not in trusted:
        why = f"it is a link to a folder that belongs to user {about.st_uid}"
    elif about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"others may write to it ({stat.filemode(about.st_mode)})"
    else:
        return ""
    return (
        f"{folder}: {why}, so others could replace the run's token or its trainer's address; name "
        "a folder that does not exist yet, or one of your own after "
        f"chmod go-w {shlex.quote(str(folder))}"
    )


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

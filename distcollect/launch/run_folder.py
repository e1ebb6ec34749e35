"""The folder of a run on a cluster: what its jobs tell each other over the shared disk.

::

    RUN/run.json            how it was submitted
    RUN/token               what workers have to show; only its owner can read it
    RUN/trainer.json        where the trainer is, or what has become of it
    RUN/jobs/ID.json        its jobs
    RUN/failed/ID_RANK.json tasks that failed
    RUN/history/            what else became of jobs
    RUN/logs/               what the tasks said, and submitit's files
    RUN/checkpoint.pt       where a :class:`~distcollect.Checkpoint` saves by default

Every file is replaced as a whole, so that nobody reads half of one. Nothing here needs more than
Python's own library: a small process in each task of a job uses it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN_VARIABLE = "DISTCOLLECT_RUN"
TOKEN_VARIABLE = "DISTCOLLECT_TOKEN_FILE"  # noqa: S105 - a name

# What run.json has of ours, whoever else may call a file so.
_OURS = {"command", "num_tasks", "num_workers", "patience_s"}

# States of trainer.json.
LISTENING, STARTING, REQUEUED, ENDED = "listening", "starting", "requeued", "ended"


class NotYet(OSError):
    """The trainer can't be reached yet; says why."""


class RunOver(Exception):
    """The trainer has ended, and won't come back; says how it ended."""


@dataclass(frozen=True)
class RunFolder:
    """A run's folder; see the module for what lies in it."""

    path: Path

    @classmethod
    def here(cls) -> RunFolder | None:
        """That of the run which this process belongs to; None: it belongs to none."""
        path = os.environ.get(RUN_VARIABLE)
        return cls(Path(path)) if path else None

    @property
    def logs(self) -> Path:
        """Where the tasks' output goes."""
        return self.path / "logs"

    @property
    def token_file(self) -> Path:
        """What workers have to show."""
        return self.path / "token"

    def create(self, settings: dict[str, Any]) -> None:
        """Make the folder, for its owner alone.

        Raises:
            FileExistsError: there is a run in it.
        """
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(16) + "\n")
        for name in ("logs", "jobs", "failed", "history"):
            (self.path / name).mkdir(exist_ok=True)
        self.write("run.json", settings)

    @property
    def settings(self) -> dict[str, Any]:
        """How the run was submitted; empty if there is none in the folder."""
        found = self.read("run.json") or {}
        return found if found.keys() >= _OURS else {}

    @property
    def num_workers(self) -> int:
        """Workers in jobs apart from the trainer's that the run began with; 0: there were none."""
        return int(self.settings.get("num_workers", 0))

    @property
    def patience_s(self) -> float:
        """How long the trainer waits for workers, and they for it."""
        return float(self.settings.get("patience_s", 3600.0))

    def read(self, name: str) -> dict[str, Any] | None:
        """A file's content; None if there is none, or it is no JSON object."""
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
        """What is known of each of its jobs, in the order in which they were submitted."""
        names = [path.relative_to(self.path) for path in (self.path / "jobs").glob("[0-9]*.json")]
        jobs = [job for name in names if (job := self.read(str(name))) is not None]
        return sorted(jobs, key=lambda job: float(job["submitted"]))

    def note(self, job_id: str, what: str) -> None:
        """Let the user know what became of a job."""
        now = time.time()
        self.write(f"history/{job_id}-{now:.3f}.json", {"at": now, "job": job_id, "what": what})

    def history(self) -> list[str]:
        """What was noted, in order, with its time."""
        files = (path.relative_to(self.path) for path in (self.path / "history").glob("[0-9]*"))
        notes = [note for file in files if (note := self.read(str(file))) is not None]
        notes.sort(key=lambda note: float(note["at"]))
        return [f"{_clock(note['at'])} job {note['job']} {note['what']}" for note in notes]

    def tell(self, state: str, **about: Any) -> None:
        """Let the others know what the trainer does.

        Args:
            state: one of those above.
            about: what else to say of it.
        """
        self.write("trainer.json", {"state": state, "since": _clock(time.time()), **about})

    def address(self) -> tuple[str, int]:
        """Where the trainer listens: host and port.

        Raises:
            NotYet: nowhere at present.
            RunOver: it won't any more.
        """
        said = self.read("trainer.json")
        if said is None or "state" not in said:
            raise NotYet("the trainer has not started yet")
        if said["state"] == ENDED:
            raise RunOver(str(said.get("why", "it has ended")))
        if said["state"] != LISTENING:
            raise NotYet(f"the trainer is {said['state']}, since {said['since']}")
        return str(said["host"]), int(said["port"])


def obstacle(folder: Path) -> str:
    """Why files can't be written to a folder, which need not be there yet; "" if they can."""
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        return f"{there} is a file"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} can't be written to"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))

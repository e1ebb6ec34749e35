"""What submitit runs in each task of a job: a script, as a process of its own.

So signals are handled by a process that only waits, and the script stays an ordinary script. This
process travels by value and needs nothing but submitit and Python's own library: importing torch
here, in each task, would only cost memory.

What follows from what:

==============================  ================================================================
SIGUSR2 (time is nearly up, or  The task tells its script to end by SIGTERM. In task 0 submitit
preempted, where the site asks  then has the job requeued: see :meth:`Task.checkpoint`.
for it)
SIGTERM while the job runs      Preempted, where the site sends nothing else: the same.
SIGTERM otherwise               Cancelled, or out of time: the script is told to end, that's all.
The trainer's node goes down    SLURM requeues its job, or with others' nodes in it: one of them.
==============================  ================================================================

SLURM sends signals to all processes of a step, and SIGUSR2 ends a process that doesn't care: so the
script and all that it starts ignore that one unless they ask for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import submitit
from submitit.helpers import DelayedSubmission

from distcollect.launch.run_folder import ENDED, REQUEUED, STARTING, RunFolder

_POLL_S = 0.05
_LOST_POLL_S = 5.0
_SAVED = 75  # the exit code of a script whose Checkpoint has saved
_COMMAND_TIMEOUT_S = 20.0


class _Finished(BaseException):
    """The script has ended with success just when it was to be interrupted."""


@dataclass
class Task:
    """Runs a command in each task of a job; picklable.

    Attributes:
        command: the script, and how it is run.
        run: the run's folder.
        cwd: where it runs.
        trains: the job's task 0 is the trainer; else all tasks are workers.
        grace_s: for the script to save and end, once it was told to.
        env: variables beside the job's own.
    """

    command: list[str]
    run: str
    cwd: str
    trains: bool
    grace_s: float
    env: dict[str, str] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __call__(self) -> None:
        """Run it to its end.

        Raises:
            SystemExit: with its exit code, if that isn't 0.
        """
        self._job = submitit.JobEnvironment()
        self._is_trainer = self.trains and self._job.global_rank == 0
        self._child: subprocess.Popen[bytes] | None = None
        self._told = self._cancelled = False
        if self._is_trainer:
            self._tell(STARTING)
        self._failed = Path(self.run, "failed", f"{self._job.job_id}_{self._job.global_rank}.json")
        self._failed.unlink(missing_ok=True)  # of an earlier life
        self._arm()
        try:
            self._start()
            self._wait()
        except _Finished:
            pass
        except Exception as error:
            # Submitit won't have it requeued.
            if self._is_trainer:
                self._tell(ENDED, why=str(error))
            raise
        finally:
            code = self._reap()
        self._settle(code)

    def checkpoint(self) -> DelayedSubmission:
        """Have the script save and end; what is to be run when the job starts again."""
        if getattr(self, "_child", None) is None:
            return DelayedSubmission(self)  # nothing was started yet
        for number in (self._notice, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        self._forward()
        why = self._why()
        _say(f"this job {why}: its script was told to save and end")
        if self._ended_within(self.grace_s):
            code = self._reap()
            if code == 0:
                raise _Finished
            how = "saved and ended" if code == _SAVED else f"ended ({_how(code)})"
        else:
            how = f"did not end within {self.grace_s:g} s and is killed"
        RunFolder(Path(self.run)).note(self._job.job_id, f"{why}: its script {how}; requeued")
        _say(f"the script {how}; the job is requeued")
        if self._is_trainer:
            self._tell(REQUEUED)
        return DelayedSubmission(self)

    def _arm(self) -> None:
        self._notice = getattr(signal, f"SIG{self._job.USR_SIG}")
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if self._job.global_rank > 0:
            # Submitit has nothing to do here. A trainer's workers stay until it says goodbye: it
            # may need them to get to where it can save.
            leaves = not self.trains
            signal.signal(self._notice, lambda *_: self._forward() if leaves else None)

    def _on_sigterm(self, *_: object) -> None:
        self._told = True
        if self._job.global_rank > 0:
            if not self.trains:
                self._forward()
            return
        if self._about_job().get("JobState") == "RUNNING":
            os.kill(os.getpid(), self._notice)
            return
        self._cancelled = True
        if self._is_trainer:
            self._tell(ENDED, why="its job was cancelled, or out of time")
        self._forward()

    def _about_job(self) -> dict[str, str]:
        command = ["scontrol", "show", "job", "--oneliner", self._job.raw_job_id]
        pairs = (word.partition("=") for word in _output_of(command).split())
        return {name: value for name, _, value in pairs}

    def _why(self) -> str:
        """Why the job is told to end, in words."""
        about = self._about_job()
        # Both as in 2026-11-22T01:55:45; it may have been preempted in an earlier life too.
        if about.get("StartTime", "~") <= about.get("PreemptTime", "") < "A":
            return "is preempted"
        ran = f"after {about.get('RunTime')} of {about.get('TimeLimit')}"
        return f"was told to end {ran}"

    def _start(self) -> None:
        notice = self._notice

        def ignore_notice() -> None:
            signal.signal(notice, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [notice, signal.SIGTERM])

        # Blocked, as the child would take them for its own before it has changed that.
        blocked = [notice, signal.SIGTERM]
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            self._child = subprocess.Popen(
                self.command,
                cwd=self.cwd,
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=ignore_notice,  # noqa: PLW1509 - this process has no other thread
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)

    def _wait(self) -> None:
        # Not Popen.wait(): a signal's handler waits too, and would find its lock taken.
        assert self._child is not None
        os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)

    def _ended_within(self, limit_s: float) -> bool:
        assert self._child is not None
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        deadline = time.monotonic() + limit_s
        while os.waitid(os.P_PID, self._child.pid, options) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _forward(self) -> None:
        self._told = True
        if self._child is not None and self._child.returncode is None:
            self._child.terminate()

    def _reap(self) -> int:
        """End what is left of the script, and give its exit code."""
        child = self._child
        if child is None:
            return 0
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        return child.wait()

    def _settle(self, code: int) -> None:
        """Let the others know how it ended."""
        folder = RunFolder(Path(self.run))
        how = _how(code)
        if code != 0 and not self._told:
            about = {"how": how, "host": socket.gethostname(), "at": time.time()}
            folder.write(f"failed/{self._failed.name}", about)
        if self._is_trainer and not self._cancelled:
            self._tell(ENDED, why="it is done" if code == 0 else f"it failed: {how}")
            self._cancel_waiting(folder)
        if code != 0:
            _say(f"the script ended: {how}")
            if self.trains and not self._is_trainer:
                self._requeue_if_the_trainer_is_lost(folder)
            raise SystemExit(code if code > 0 else 128 - code)

    def _requeue_if_the_trainer_is_lost(self, folder: RunFolder) -> None:
        """Have the job start again when the node of task 0 went down.

        A job with --no-kill goes on without it, though nothing is left that could end it.
        """
        while not self._told:
            said = folder.read("trainer.json") or {}
            about = self._about_job()
            if said.get("state") in (ENDED, REQUEUED) or about.get("JobState") != "RUNNING":
                return
            nodes = _output_of(["scontrol", "show", "hostnames", about.get("NodeList", "")])
            if nodes and about.get("BatchHost") not in nodes.split():
                folder.note(self._job.job_id, "lost the trainer's node; requeued")
                _say("the trainer's node is lost; the job is requeued")
                _output_of(["scontrol", "requeue", self._job.job_id])
                return
            time.sleep(_LOST_POLL_S)

    def _cancel_waiting(self, folder: RunFolder) -> None:
        """Workers that still queue have nobody to work for."""
        ids = [str(job["id"]) for job in folder.jobs() if not job["trains"]]
        if ids:
            _output_of(["scancel", "--quiet", "--state=PENDING", *ids])

    def _tell(self, state: str, **about: str) -> None:
        host = socket.gethostname()
        RunFolder(Path(self.run)).tell(state, job=self._job.job_id, on=host, **about)


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _output_of(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _say(f"{command[0]}: {error}")
        return ""
    return done.stdout


def _say(what: str) -> None:
    sys.stderr.write(f"distcollect: {what}\n")
    sys.stderr.flush()

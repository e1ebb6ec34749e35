"""What submitit runs in each task of a job: a process that starts the script and waits for it.

Signals are handled here, so the script can be an ordinary script. This module travels to the task
by value and needs nothing but submitit and Python's own library: importing torch in each task would
only cost memory.

What happens on which event:

==============================  ================================================================
SIGUSR2 (time is nearly up, or  The task sends SIGTERM to its script. In task 0 submitit then has
preempted, where the site asks  the job requeued: see :meth:`SlurmTask.checkpoint`.
for it)
SIGTERM while the job runs      Preempted, on sites that send only this signal: the same.
SIGTERM otherwise               Cancelled, or out of time: the task sends SIGTERM to its script.
The trainer's host goes down    SLURM requeues the job. If it has other hosts, one of their tasks
                                requeues it.
SLURM loses the contact to the  The same. Here the script ends at its next look at its checkpoint,
host, and all goes on there     and says nothing about the run, which goes on elsewhere.
==============================  ================================================================

SLURM sends signals to all processes of a step, and SIGUSR2 ends a process that doesn't handle it.
So the script and all that it starts ignore SIGUSR2 until they install a handler.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import submitit
from submitit.helpers import DelayedSubmission

from distcollect.common.process_exit import describe_exit
from distcollect.launch.run_folder import DONE, ENDED, REQUEUED, STARTING, RunFolder

_POLL_S = 0.05
_LOST_POLL_S = 5.0
_SAVED = 75  # the exit code of a script whose Checkpoint has saved
_COMMAND_TIMEOUT_S = 20.0
NOT_RUN = 127  # the exit code by which shells report this


class _Finished(BaseException):
    """The script has ended with success while it was being interrupted."""


@dataclass
class SlurmTask:
    """Runs a command in each task of a job; picklable.

    Attributes:
        command: the command that runs the script.
        run: the run's folder.
        cwd: the script's working folder.
        trains: whether the job's task 0 is the trainer; otherwise all tasks are workers.
        grace_s: seconds that the script has to save and end after SIGTERM.
        env: environment variables on top of the job's own.
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
        """Run the script to its end.

        Raises:
            SystemExit: with the script's exit code, if that isn't 0.
        """
        self._job = submitit.JobEnvironment()
        self._is_trainer = self.trains and self._job.global_rank == 0
        self._child: subprocess.Popen[bytes] | None = None
        self._was_terminated = self._cancelled = False
        self._tell(STARTING)
        if "SLURM_RESTART_COUNT" in os.environ and self._job.global_rank == 0:
            self._folder.note(self._job.job_id, f"was started again, on {socket.gethostname()}")
        self._failed = Path(self.run, "failed", f"{self._job.job_id}_{self._job.global_rank}.json")
        self._failed.unlink(missing_ok=True)  # of an earlier start of this job
        self._install_handlers()
        try:
            self._start()
            self._wait()
        except _Finished:
            pass
        except Exception as error:
            # Submitit will not requeue this job.
            self._tell(ENDED, why=str(error))
            raise
        finally:
            code = self._reap()
        self._write_result(code)

    def checkpoint(self) -> DelayedSubmission:
        """Have the script save and end; return what submitit runs when the job starts again."""
        if getattr(self, "_child", None) is None:
            return DelayedSubmission(self)  # the script was not started yet
        for number in (self._notice, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        self._terminate_script()
        if self._later_start():  # submitit would requeue that one
            self._ended_within(self.grace_s)
            self._leave_if_outdated(self._reap())
        info = self._job_info()
        why = f"was told to end after {info.get('RunTime')} of {info.get('TimeLimit')}"
        _log(f"this job {why}: its script was told to save and end")
        if self._ended_within(self.grace_s):
            code = self._reap()
            if code == 0:
                raise _Finished
            how = "saved and ended" if code == _SAVED else f"ended ({describe_exit(code)})"
        else:
            how = f"did not end within {self.grace_s:g} s and is killed"
        self._folder.note(self._job.job_id, f"{why}: its script {how}; requeued")
        _log(f"the script {how}; the job is requeued")
        self._tell(REQUEUED)
        return DelayedSubmission(self)

    def _install_handlers(self) -> None:
        self._notice = getattr(signal, f"SIG{self._job.USR_SIG}")
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if self._job.global_rank > 0:
            # Submitit has nothing to do in this task. Workers in the trainer's job stay until the
            # trainer ends: it may need them to reach the point where it can save.
            is_worker_job = not self.trains
            signal.signal(
                self._notice, lambda *_: self._terminate_script() if is_worker_job else None
            )

    def _on_sigterm(self, *_: object) -> None:
        self._was_terminated = True
        if self._job.global_rank > 0:
            if not self.trains:
                self._terminate_script()
            return
        if self._job_info().get("JobState") == "RUNNING" and not self._later_start():
            os.kill(os.getpid(), self._notice)
            return
        self._cancelled = True
        self._tell(ENDED, why="its job was cancelled, or out of time")
        self._terminate_script()

    def _job_info(self) -> dict[str, str]:
        command = ["scontrol", "show", "job", "--oneliner", self._job.raw_job_id]
        pairs = (word.partition("=") for word in _output_of(command).split())
        return {name: value for name, _, value in pairs}

    def _start(self) -> None:
        notice = self._notice

        def ignore_notice() -> None:
            signal.signal(notice, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [notice, signal.SIGTERM])

        # Blocked meanwhile: the child would handle them as this process does until it ignores them.
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
        # Not Popen.wait(): a signal handler waits too, and would find its lock taken.
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

    def _terminate_script(self) -> None:
        self._was_terminated = True
        if self._child is not None and self._child.returncode is None:
            self._child.terminate()

    def _reap(self) -> int:
        """Kill what is left of the script's processes, and return its exit code."""
        child = self._child
        if child is None:
            return 0
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        return child.wait()

    def _write_result(self, code: int) -> None:
        """Write down how the script ended, and end the job accordingly."""
        how = describe_exit(code)
        self._leave_if_outdated(code)
        if code != 0 and not self._was_terminated:
            about = {"how": how, "host": socket.gethostname(), "at": time.time()}
            self._folder.write(f"failed/{self._failed.name}", about)
        if self._is_trainer and not self._cancelled:
            self._tell(ENDED, why=DONE if code == 0 else f"it failed: {how}")
            # Worker jobs that are still queued: their trainer has ended.
            ids = [str(job["id"]) for job in self._folder.jobs() if not job["trains"]]
            if ids:
                _output_of(["scancel", "--quiet", "--state=PENDING", *ids])
        if code != 0:
            _log(f"the script ended: {how}")
            if self.trains and not self._is_trainer:
                self._requeue_if_trainer_is_lost()
            raise SystemExit(code if code > 0 else 128 - code)

    def _requeue_if_trainer_is_lost(self) -> None:
        """Requeue the job when the host of task 0 went down.

        A job with --no-kill would go on without that host, and nothing would end it.
        """
        while not self._was_terminated:
            said = self._folder.read("trainer.json") or {}
            info = self._job_info()
            if said.get("state") in (ENDED, REQUEUED) or info.get("JobState") != "RUNNING":
                return
            nodes = _output_of(["scontrol", "show", "hostnames", info.get("NodeList", "")])
            if nodes and info.get("BatchHost") not in nodes.split():
                self._folder.note(self._job.job_id, "lost the trainer's host; requeued")
                _log("the trainer's host is lost; the job is requeued")
                _output_of(["scontrol", "requeue", self._job.job_id])
                return
            time.sleep(_LOST_POLL_S)

    def _leave_if_outdated(self, code: int) -> None:
        """End, and say nothing about the run, if it goes on elsewhere; ``code``: the script's."""
        if why := self._later_start():
            _log(f"{why}: the run goes on there; the script ended here: {describe_exit(code)}")
            raise SystemExit(1)

    def _later_start(self) -> str:
        """See :meth:`RunFolder.later_start`; "" in a job of workers, which are not in its way."""
        return self._folder.later_start() if self.trains else ""

    def _tell(self, state: str, **about: str) -> None:
        """Write down the state of the trainer, if this is its task."""
        if self._is_trainer:
            self._folder.tell(state, job=self._job.job_id, **about)

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(Path(self.run))


def _output_of(command: list[str]) -> str:
    done = run_command(command, _COMMAND_TIMEOUT_S)
    if done.returncode == NOT_RUN:
        _log(done.stderr)
    return done.stdout


def run_command(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run one of SLURM's commands.

    Its exit code is :data:`NOT_RUN`, with the reason as its ``stderr``, if it can't be started or
    doesn't end within ``timeout_s``.
    """
    try:
        return subprocess.run(
            list(command), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        why = f"{command[0]} did not answer within {timeout_s:g} s; is SLURM's controller up?"
    except OSError as error:
        why = f"{command[0]}: {error}"
    return subprocess.CompletedProcess(command, NOT_RUN, stdout="", stderr=why)


def _log(what: str) -> None:
    print(f"distcollect: {what}", file=sys.stderr, flush=True)

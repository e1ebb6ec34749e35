"""Saves training, so that a job which is ended goes on where it was."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from distcollect.common.files import replacing
from distcollect.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectorStateError,
    DistCollectError,
)
from distcollect.launch import preemption as notice
from distcollect.launch.run_folder import RunFolder, obstacle
from distcollect.launch.worker_hosts import current

log = logging.getLogger(__name__)

_FORMAT = 1


class Stateful(Protocol):
    """Whatever can be saved: modules, optimisers, schedulers, collectors, replay buffers."""

    def state_dict(self) -> Any:
        """All that is to be saved, of tensors and plain Python values."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go on from there."""


class Checkpoint:
    """Saves the state of training at intervals, and when the job is told to end.

    ::

        checkpoint = dc.Checkpoint(policy=policy, optimizer=optimizer, collector=collector)
        checkpoint.load()  # where there is none, nothing happens
        for batch in collector:
            learn(batch)
            checkpoint.step()
            collector.update_policy_weights_(policy)

    A job is told to end by SIGTERM or SIGUSR2. Clusters send these before they take a job's nodes
    away or its time is up, and torchrun sends SIGTERM to its ranks when it is ended itself. Then
    the next :meth:`step`, or the collector if it is waiting for frames, saves and ends the process:
    collectors are shut down as by Ctrl-C, and the exit code is 75. When the script is started
    again, it continues from there; under ``distcollect submit`` that happens automatically.

    With several trainers, the first one saves and all of them load.

    Attributes:
        path: the file that is written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every_s: float = 600.0,
        **parts: Stateful,
    ) -> None:
        """Say what to save; nothing is saved or loaded yet.

        Args:
            path: a file; None: ``checkpoint.pt``, under ``distcollect submit`` in the run folder,
                otherwise in the working folder.
            every_s: seconds between two saves.
            parts: what to save, by name: anything with ``state_dict`` and ``load_state_dict``.

        Raises:
            ArgumentError, ArgumentTypeError: there is nothing to save, a part lacks one of these
                methods, or the file can't be written.
        """
        if not parts:
            raise ArgumentError(
                "Checkpoint() has nothing to save: name the parts, as in policy=policy"
            )
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise ArgumentTypeError(
                    f"{name}={type(part).__name__}: has no state_dict() and load_state_dict(); "
                    "name only what has both"
                )
        if isinstance(every_s, str) or not every_s > 0:
            raise ArgumentError(f"every_s={every_s!r}: must be a number above 0, of seconds")
        if not isinstance(path, str | os.PathLike | None):
            raise ArgumentTypeError(f"Checkpoint({path!r}): must be the path of a file")
        folder = RunFolder.here()
        default = Path("checkpoint.pt") if folder is None else folder.path / "checkpoint.pt"
        self.path = default if path is None else Path(path)
        # Before there is something to lose.
        if why := "is a folder" if self.path.is_dir() else obstacle(self.path.parent):
            raise ArgumentError(f"Checkpoint({str(self.path)!r}): {why}; name another file")
        self._every_s = every_s
        self._parts = parts
        self._saved_at = time.monotonic()
        self._looked = False  # whether a file from before was taken into account
        self._proven = False  # whether what is saved can be loaded
        notice.watch(self._leave)

    def load(self) -> bool:
        """Load the file, if there is one.

        Call this before a collector among the parts delivers its first batch. Its workers then get
        the loaded weights of the policy that it was made with.

        Returns:
            Whether there was a file.

        Raises:
            ArgumentError: the file can't be read, has other parts, or doesn't fit them.
        """
        self._looked = True
        if not self.path.exists():
            return False
        states = self._read()
        if states.keys() != self._parts.keys():
            raise ArgumentError(
                f"{self.path} has the parts {sorted(states)}, not {sorted(self._parts)}: give the "
                "same ones, or another path"
            )
        for name, part in self._parts.items():
            self._load_part(name, part, states[name])
        self._proven = True
        for part in self._parts.values():
            publish = getattr(part, "update_policy_weights_", None)
            if publish is not None:
                _publish(publish)
        log.info("going on from %s", self.path)
        return True

    def _load_part(self, name: str, part: Stateful, state: Any) -> None:
        try:
            part.load_state_dict(state)
        except DistCollectError:
            raise
        except Exception as error:
            raise ArgumentError(
                f"{self.path}: what was saved of {name!r} doesn't fit it ({type(error).__name__}: "
                f"{error}); make it as it was then, or give another path"
            ) from error

    def save(self) -> None:
        """Save now; an existing file is replaced once the new one is complete.

        Raises:
            CollectorStateError: there is a file of an earlier run, and :meth:`load` was not called.
            ArgumentTypeError: a part's state couldn't be loaded again.
            OSError: the file can't be written.
        """
        self._check()
        launched = current()
        if launched is not None and launched.first_traj_id:
            return
        states = {name: part.state_dict() for name, part in self._parts.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            torch.save({"format": _FORMAT, "parts": states}, file)
            if not self._proven:
                file.flush()
                self._prove(Path(file.name))
        self._saved_at = time.monotonic()

    def step(self) -> bool:
        """Save if it is time; if this process was told to end, save and end it.

        Call it once per batch, where all parts belong together: after the optimizer's step, and
        before the new weights are published.

        Returns:
            Whether it saved.

        Raises:
            SystemExit: the process was told to end; with exit code 75.
            Whatever :meth:`save` raises.
        """
        self._check()
        if notice.told():
            self._leave()
        is_due = time.monotonic() - self._saved_at >= self._every_s
        if is_due:
            self.save()
        return is_due

    def _check(self) -> None:
        if not self._looked and self.path.exists():
            raise CollectorStateError(
                f"{self.path} is there from before: call load() to go on from it, or remove it to "
                "begin anew"
            )
        self._looked = True

    def _leave(self) -> None:
        self.save()
        log.warning("%s told this process to end: saved %s", notice.told(), self.path)
        raise notice.Interrupted

    def _read(self) -> dict[str, Any]:
        try:
            saved = torch.load(self.path, map_location="cpu", weights_only=True)
            kind, states = saved["format"], dict(saved["parts"])
        except OSError as error:
            raise ArgumentError(
                f"{self.path} can't be read as a checkpoint: {error.strerror}; give another path"
            ) from error
        except Exception as error:
            # What torch says of it is about settings that nobody here has.
            raise ArgumentError(
                f"{self.path} can't be read as a checkpoint: distcollect.Checkpoint didn't write "
                "it, or it is damaged; give another path, or remove it to begin anew"
            ) from error
        if kind != _FORMAT:
            raise ArgumentError(
                f"{self.path} has format {kind}, this version reads {_FORMAT}: use the version of "
                "distcollect that wrote it, or another path"
            )
        return states

    def _prove(self, draft: Path) -> None:
        """Find out before it is needed whether a state can be loaded."""
        try:
            torch.load(draft, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ArgumentTypeError(
                f"the state of one of {sorted(self._parts)} could not be loaded again: {error}; "
                "state_dict() has to give tensors and plain Python values"
            ) from error
        self._proven = True


def _publish(publish: Any) -> None:
    try:
        publish()
    except ArgumentTypeError:
        # A collector with a policy_factory has no policy here; its user knows what to publish.
        log.warning("the collector has no policy of its own: publish the loaded weights yourself")

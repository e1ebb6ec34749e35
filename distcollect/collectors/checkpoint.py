"""Saves the state of training, so that a job that is ended can continue when it is restarted."""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from distcollect.common import checks, signals
from distcollect.common.files import replacing
from distcollect.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectorStateError,
    DistCollectError,
    LaunchError,
)
from distcollect.launch.run_folder import RunFolder, obstacle
from distcollect.transport.peer_ids import identity

log = logging.getLogger(__name__)

_FORMAT = 1
# Between two looks whether SLURM has started the trainer again elsewhere: a file on a shared disk.
_CHECK_START_S = 10.0


class Stateful(Protocol):
    """An object with a state: module, optimiser, scheduler, collector, replay buffer."""

    def state_dict(self) -> Any:
        """The state, made of tensors and plain Python values."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Continue from that state."""


class Checkpoint:
    """Saves the state of training at intervals, and when the job is told to end.

    ::

        checkpoint = dc.Checkpoint(policy=policy, optimizer=optimizer, collector=collector)
        checkpoint.load()  # does nothing if there is no file
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
        path: the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every_s: float = 600.0,
        **parts: Stateful,
    ) -> None:
        """Name what to save; nothing is saved or loaded yet.

        Args:
            path: a file; None: ``checkpoint.pt``, under ``distcollect submit`` in the run folder,
                otherwise in the working folder.
            every_s: seconds between two saves.
            parts: what to save, by name: objects with ``state_dict`` and ``load_state_dict``.

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
                    "name only objects that have both"
                )
        every_s = checks.plain(every_s)
        checks.above_zero(f"Checkpoint(every_s={every_s!r})", every_s)
        if not isinstance(path, str | os.PathLike | None):
            raise ArgumentTypeError(f"Checkpoint({path!r}): must be the path of a file")
        self._folder = folder = RunFolder.here()
        default = Path("checkpoint.pt") if folder is None else folder.path / "checkpoint.pt"
        self.path = default if path is None else Path(path)
        # Now, before hours of training depend on it.
        if why := "is a folder" if self.path.is_dir() else obstacle(self.path.parent):
            raise ArgumentError(f"Checkpoint({str(self.path)!r}): {why}; name another file")
        self._every_s = every_s
        self._parts = parts
        self._saved_at = self._start_checked_at = time.monotonic()
        self._file_checked = False  # whether an earlier run's file was loaded, or is known to miss
        signals.watch(self._save_and_exit)

    def load(self) -> bool:
        """Load the file, if there is one.

        Call this before a collector among the parts delivers its first batch. Its workers then get
        the loaded weights of the policy that it was made with.

        Returns:
            Whether there was a file.

        Raises:
            ArgumentError: the file can't be read, has other parts, or doesn't fit them.
        """
        self._file_checked = True
        if not self.path.exists():
            return False
        states = self._read()
        if states.keys() != self._parts.keys():
            raise ArgumentError(
                f"{self.path} has the parts {sorted(states)}, not {sorted(self._parts)}: give the "
                "same ones, or another path"
            )
        for name, part in self._parts.items():
            try:
                part.load_state_dict(states[name])
            except DistCollectError:
                raise
            except Exception as error:
                raise ArgumentError(
                    f"{self.path}: the saved state of {name!r} doesn't fit it "
                    f"({type(error).__name__}: {error}); make it as it was then, or give another "
                    "path"
                ) from error
        for part in self._parts.values():
            if (publish := getattr(part, "update_policy_weights_", None)) is not None:
                _publish(publish)
        log.info("continuing from %s", self.path)
        return True

    def save(self) -> None:
        """Save now; an existing file is replaced once the new one is complete.

        Raises:
            CollectorStateError: there is a file of an earlier run, and :meth:`load` was not called.
            ArgumentTypeError: a part's state couldn't be loaded again.
            LaunchError: SLURM has started the trainer again on another host, so that this process
                is not the run's trainer any more.
            OSError: the file can't be written.
        """
        self._check()
        self._check_start()
        if identity().trainer != 0:
            return
        states = {name: part.state_dict() for name, part in self._parts.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            torch.save({"format": _FORMAT, "parts": states}, file)
            file.flush()
            _check_loadable(Path(file.name), states)
        self._saved_at = time.monotonic()

    def step(self) -> bool:
        """Save if the interval has passed; if this process was told to end, save and exit.

        Call it once per batch, when the states of all parts belong together: after the optimizer's
        step, and before the new weights are published.

        Returns:
            Whether it saved.

        Raises:
            SystemExit: the process was told to end; with exit code 75.
            CollectorStateError, ArgumentTypeError, LaunchError, OSError: as :meth:`save`.
        """
        self._check()
        if time.monotonic() - self._start_checked_at >= _CHECK_START_S:
            self._check_start()
        if signals.requested_signal():
            self._save_and_exit()
        is_due = time.monotonic() - self._saved_at >= self._every_s
        if is_due:
            self.save()
        return is_due

    def _check(self) -> None:
        if not self._file_checked and self.path.exists():
            raise CollectorStateError(
                f"{self.path} is from an earlier run: call load() to continue from it, or remove "
                "it to start again"
            )
        self._file_checked = True

    def _check_start(self) -> None:
        self._start_checked_at = time.monotonic()
        if self._folder is not None and (why := self._folder.later_start()):
            raise LaunchError(f"{why}: this process saves nothing more, and has to end")

    def _save_and_exit(self) -> None:
        self.save()
        log.warning("%s told this process to end: saved %s", signals.requested_signal(), self.path)
        raise signals.Interrupted

    def _read(self) -> dict[str, Any]:
        try:
            saved = torch.load(self.path, map_location="cpu", weights_only=True)
            kind, states = saved["format"], dict(saved["parts"])
        except OSError as error:
            raise ArgumentError(
                f"{self.path} can't be read as a checkpoint: {error.strerror}; give another path"
            ) from error
        except Exception as error:
            # Torch's own message is about settings that users can't make here.
            raise ArgumentError(
                f"{self.path} can't be read as a checkpoint: distcollect.Checkpoint didn't write "
                "it, or it is damaged; give another path, or remove it to start again"
            ) from error
        if kind != _FORMAT:
            raise ArgumentError(
                f"{self.path} has format {kind}, this version reads {_FORMAT}: use the version of "
                "distcollect that wrote it, or another path"
            )
        return states


def _check_loadable(draft: Path, states: Mapping[str, Any]) -> None:
    """Check that a file can be loaded, before it replaces another: later would be too late.

    Raises:
        ArgumentTypeError: it can't; names the part.
    """
    try:
        # Without reading the tensors.
        torch.load(draft, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        found = [name for name, state in states.items() if not _can_be_loaded(state)]
        raise ArgumentTypeError(
            f"the state of {' and '.join(found or states)} could not be loaded again: {error}; its "
            "state_dict() has to give tensors and plain Python values"
        ) from error


def _can_be_loaded(state: Any) -> bool:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001 - whatever it is, it can't be loaded
        return False
    return True


def _publish(publish: Any) -> None:
    try:
        publish()
    except ArgumentTypeError:
        # A collector with a policy_factory has no policy here; only the user can publish weights.
        log.warning("the collector has no policy of its own: publish the loaded weights yourself")

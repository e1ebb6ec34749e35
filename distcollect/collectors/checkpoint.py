"""Saves the state of training, so that a job that is ended can continue when it is restarted."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import logging
import math
import os
import pickle
import re
import reprlib
import shutil
import socket
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import nn

from distcollect.collectors.base import DataCollectorBase
from distcollect.collectors.batches import adding_nothing
from distcollect.collectors.replay import ReplayBuffer
from distcollect.common import checks, signals
from distcollect.common.files import draft_of, hold, replacing
from distcollect.common.peer_ids import identity
from distcollect.common.random_state import random_states, set_random_states
from distcollect.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectorStateError,
    DistCollectError,
    LaunchError,
)
from distcollect.launch.run_folder import RunFolder, obstacle

log = logging.getLogger(__name__)

_FORMAT = 1
# How much it counts, which is 1 for an evaluation and less for fewer episodes of training, and the
# value that ``best`` names.
_Result: TypeAlias = tuple[float, float]
_NO_RESULT: _Result = (0.0, -math.inf)
# Between two looks whether SLURM has started the trainer again elsewhere: a file on a shared disk.
_CHECK_START_S = 10.0
_LOADABLE = (
    bool,
    int,
    float,
    str,
    list,
    torch.Tensor,
)  # types of values in dicts; others are tried
_ADDING_S = 60.0  # for a batch that is being added to a buffer
_made: list[weakref.ref[Checkpoint]] = []  # in this process
_written: set[Path] = set()  # by this process
os.register_at_fork(after_in_child=_made.clear)
os.register_at_fork(after_in_child=_written.clear)


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
    again, it continues from there; under ``distcollect submit`` that happens automatically. In
    IPython and notebooks these signals end the kernel at once, and save nothing.

    Where training goes on after the last batch, as it may with ``start()``, call :meth:`save` at
    the end: :meth:`step` then saves every ``every_s`` seconds only.

    Part of each file is the state of the random numbers of torch, numpy and Python in this process.

    Of several objects of this class in a process, a signal saves each; of those with the same path,
    the newest.

    While a process has a path, another one of the same host can neither load nor save there.

    With several trainers, the first one saves and all of them load; the others keep their own
    random numbers.

    Attributes:
        path: the file.
        best_path: the file of ``best``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every_s: float = 600.0,
        keep_last: int = 1,
        best: str | None = None,
        save_on_ctrl_c: bool = False,
        **parts: Stateful | dict[str, Any],
    ) -> None:
        """Name what to save; nothing is saved or loaded yet.

        Args:
            path: a file; None: ``checkpoint.pt``, under ``distcollect submit`` in the run folder,
                otherwise in the working folder.
            every_s: seconds between two saves; after a collector's last batch, :meth:`step` saves
                at once.
            keep_last: how many files to keep. The older ones have a number at the end of their
                name: ``checkpoint-12.pt``; the highest number is the newest. Files with such a name
                that another path's ``Checkpoint`` wrote stay.
            best: "return", or the name of a metric of ``Monitor(metrics=...)``: what had the
                highest value is also kept as ``checkpoint-best.pt``. The value is the mean of an
                evaluation or, before the first, of the collector's last hundred episodes; while
                there are fewer, as after a restart, no save of more is replaced. A better
                evaluation is saved at the next :meth:`step`: the weights that were evaluated, with
                the other parts of that moment.
            save_on_ctrl_c: Ctrl-C also saves, as a signal does, and then raises its
                KeyboardInterrupt; pressed again meanwhile, it raises that without saving.
            parts: what to save, by name: objects with ``state_dict`` and ``load_state_dict``, or
                dicts of plain Python values and tensors, such as ``progress={"updates": 0}``.
                Loading fills a dict's tensors, if they have the saved shape and dtype.

        Raises:
            ArgumentError, ArgumentTypeError: there is nothing to save, a part lacks one of these
                methods, the file can't be written, or ``best`` is given without a collector, or
                would replace a file of something else.
            PermissionError: others could change or replace the run folder.
        """
        if not parts:
            raise ArgumentError(
                "Checkpoint() has nothing to save: name the parts, as in policy=policy"
            )
        for name, part in parts.items():
            has_state = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
            if not has_state and not isinstance(part, dict):
                hint = checks.did_you_mean(name, ("every_s", "keep_last", "save_on_ctrl_c"))
                raise ArgumentTypeError(
                    f"{name}={reprlib.repr(part)}{hint}: {type(part).__name__} has no state_dict() "
                    "and load_state_dict(); name objects that have both, or dicts"
                )
            _check_dict(name, part)
        collectors = [part for part in parts.values() if isinstance(part, DataCollectorBase)]
        if best is not None and not collectors:
            raise ArgumentError(f"best={best!r} needs a collector among the parts: collector=...")
        known = list(collectors[0].stats().episodes.metrics) if collectors else []
        if best not in (None, "return", *known):
            raise ArgumentError(
                f"best={best!r}: must be 'return', or a metric of the collector's Monitor ({known})"
            )
        checks.positive("Checkpoint: keep_last", keep_last := checks.plain(keep_last))
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
        self.best_path = self._beside("best")
        self._every_s = every_s
        self._keep_last = keep_last
        self._best = best
        if best is not None:
            self._check_best_path()
        self._best_result = _NO_RESULT
        self._judged = None if best is None else collectors[0]  # whose results are compared
        if best is not None:
            # From now on, evaluations answer their weights.
            collectors[0]._stats_recorder.best.setdefault(best, (-math.inf, {}))  # noqa: SLF001 - of this package
        self._parts = parts
        self._collectors = collectors
        self._saved_at = self._start_checked_at = time.monotonic()
        self._saved_end = False  # whether all frames were collected when it last saved
        self._file_checked = False  # whether an earlier run's file was loaded, or is known to miss
        _made[:] = [each for each in _made if each() is not None]
        _made.append(weakref.ref(self))
        signals.watch(self._save_and_exit, ctrl_c=save_on_ctrl_c)

    def load(self, path: str | os.PathLike[str] | None = None) -> bool:
        """Load the file, if there is one.

        Call this before a collector among the parts delivers its first batch. Its workers then get
        the loaded weights of the policy that it was made with.

        Args:
            path: another file of the same parts, such as ``best_path``; None: ``path``.

        Returns:
            Whether there was a file.

        Raises:
            ArgumentError: the file can't be read, has other parts, or doesn't fit them.
            CollectorStateError: another process of this host uses ``path``.
        """
        self._hold()
        self._file_checked = True
        path = self.path if path is None else Path(path)
        if not path.exists():
            return False
        saved = _read(path)
        states = dict(saved["parts"])
        if states.keys() != self._parts.keys():
            raise ArgumentError(
                f"{path} has the parts {sorted(states)}, not {sorted(self._parts)}: give the "
                "same ones, or another path"
            )
        for name, part in self._parts.items():
            if isinstance(part, dict):
                state = {key: _in_place(part.get(key), it) for key, it in states[name].items()}
                part.clear()
                part.update(state)
                continue
            try:
                part.load_state_dict(states[name])
            except DistCollectError:
                raise
            except Exception as error:
                raise ArgumentError(
                    f"{path}: the saved state of {name!r} doesn't fit it "
                    f"({type(error).__name__}: {error}); make it as it was then, or give another "
                    "path"
                ) from error
        for part in self._parts.values():
            if (publish := getattr(part, "update_policy_weights_", None)) is not None:
                _publish(publish)
        # Of its own file, which is replaced after this one.
        known = _read(self.best_path, mmap=True) if self._best and self.best_path.exists() else {}
        best, best_result = known.get("best", (None, _NO_RESULT))
        self._best_result = best_result if best == self._best else _NO_RESULT
        if "random" in saved and identity().trainer == 0:
            set_random_states(saved["random"])
        log.info("continuing from %s", path)
        return True

    def save(self) -> None:
        """Save now; a file gets its name once it is complete, and replaces an existing one then.

        Raises:
            CollectorStateError: there is a file of an earlier run, and :meth:`load` was not called;
                or another process of this host uses ``path``.
            ArgumentError: ``best`` would replace a file of something else.
            ArgumentTypeError: a part's state couldn't be loaded again.
            DeadlineError: a part is a replay buffer, and a collector's ``extend()`` does not end.
            LaunchError: SLURM has started the trainer again on another host, so that this process
                is not the run's trainer any more.
            OSError: the file can't be written.
        """
        self._check()
        self._check_start()
        if identity().trainer == 0:
            has_buffer = any(map(_is_buffer, self._parts.values()))
            with adding_nothing(_ADDING_S) if has_buffer else contextlib.nullcontext():
                self._write()
        self._saved_end = self._is_over()
        self._saved_at = time.monotonic()

    def _write(self) -> None:
        states = {
            name: _of_python(part) if isinstance(part, dict) else part.state_dict()
            for name, part in self._parts.items()
        }
        result, weights = self._result()
        is_best = result > self._best_result
        best_result = max(result, self._best_result)
        saved = {
            "format": _FORMAT,
            "name": self.path.name,
            "parts": states,
            "best": (self._best, best_result),
            "random": random_states(),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._hold()
        if is_best:
            self._check_best_path()
        try:
            with replacing(self.path) as file:
                _save_loadable(saved, file, states)
                self._keep_older()
            if is_best and weights is not None:
                # Meanwhile the policy may have learned.
                saved["parts"] = self._with(weights, states)
                with replacing(self.best_path) as file:
                    torch.save(saved, file)
        except (OSError, RuntimeError) as error:
            # Of a full disk torch says "[enforce fail at inline_container.cc:672]" only.
            if isinstance(error, RuntimeError) and "inline_container" not in str(error):
                raise
            why = getattr(error, "strerror", None) or "is the disk full?"
            raise OSError(f"{self.path} can't be written: {why}") from error
        _written.add(self.path.resolve())
        if is_best and weights is None:
            _link(self.path, self.best_path)
        self._best_result = best_result

    def _with(self, weights: Mapping[str, torch.Tensor], states: Mapping[str, Any]) -> Any:
        """``states`` with these weights, wherever they have the policy's."""
        assert self._judged is not None
        trained = [*self._judged._backend.trained()]  # noqa: SLF001 - of this package
        saved = {tensor.data_ptr() for tensor in _tensors(states)}
        if saved.isdisjoint(tensor.data_ptr() for _, tensor in trained):
            # Copies of the trained weights were given.
            fits = [*_of_these_names(states, [*weights])]
            trained = fits[0] if len(fits) == 1 else []
            if not trained:
                log.warning(
                    "%s has the present weights, not those that were evaluated: which of the parts "
                    "has the policy's is not known. Give update_policy_weights_() the module that "
                    "you train, not copies of its weights",
                    self.best_path,
                )
        places = {each.data_ptr(): weights[name] for name, each in trained if name in weights}

        def swapped(value: Any) -> Any:
            if isinstance(value, dict):
                value = copy.copy(value)  # with what torch adds to it
                value.update((key, swapped(each)) for key, each in value.items())
            elif isinstance(value, torch.Tensor):
                new = places.get(value.data_ptr(), value)
                value = new if new.shape == value.shape else value
            return value

        return {name: swapped(state) for name, state in states.items()}

    def _hold(self) -> None:
        """Have no other process use the path. In a run folder :meth:`_check_start` does that."""
        if self._folder is not None or identity().trainer != 0:
            return
        pid, host = hold(self.path)
        if host == socket.gethostname():
            raise CollectorStateError(
                f"Checkpoint({str(self.path)!r}): process {pid} uses it now: end that process, or "
                "give this run another path; torch.load() reads the file meanwhile"
            )
        if host:  # which may be down, on a file system that doesn't know that yet
            log.warning("process %s on %s seems to use %s too", pid, host, self.path)

    def _is_over(self) -> bool:
        """Return True if the collectors have delivered all their frames."""
        ends = [-1 < each.total_frames <= each.frames for each in self._collectors]
        return bool(ends) and all(ends)

    def _beside(self, end: str) -> Path:
        return self.path.with_name(f"{self.path.stem}-{end}{self.path.suffix}")

    def _keep_older(self) -> None:
        """Give the present file a number, and remove those that are too old."""
        if self._keep_last == 1 or not self.path.exists():
            return
        pattern = re.compile(rf"{re.escape(self.path.stem)}-(\d+){re.escape(self.path.suffix)}")
        found = [pattern.fullmatch(each.name) for each in self.path.parent.iterdir()]
        numbers = sorted(int(match[1]) for match in found if match)
        numbers.append(numbers[-1] + 1 if numbers else 1)
        files = [self._beside(str(number)) for number in numbers]
        _link(self.path, files[-1])
        own = [file for file in files if _writer(file) == self.path.name]
        for file in own[: 1 - self._keep_last]:
            file.unlink()

    def _check_best_path(self) -> None:
        if self.best_path.exists() and _writer(self.best_path) not in (None, self.path.name):
            raise ArgumentError(
                f"Checkpoint({str(self.path)!r}, best={self._best!r}) would replace "
                f"{self.best_path}, which it did not write: name another file"
            )

    def _result(self) -> tuple[_Result, Mapping[str, torch.Tensor] | None]:
        """The best result, and of an evaluation the weights that had it."""
        if self._judged is None or self._best is None:
            return _NO_RESULT, None
        value, weights = self._judged._stats_recorder.best[self._best]  # noqa: SLF001 - of this package
        if math.isfinite(value):
            return (1.0, value), weights
        episodes = self._judged.stats().episodes
        weight, value = min(episodes.count, 100) / 101, episodes.mean_of(self._best)
        return (weight, value) if math.isfinite(value) else _NO_RESULT, None

    def step(self) -> bool:
        """Save if it is time, after the last batch, or if an evaluation was the best.

        If the process was told to end, save and exit.

        Call it once per batch, when the states of all parts belong together: after the optimizer's
        step, and before the new weights are published.

        Returns:
            Whether it saved; of several trainers, only the first one does.

        Raises:
            SystemExit: the process was told to end; with exit code 75.
            KeyboardInterrupt: it was told so by Ctrl-C, and ``save_on_ctrl_c`` is True.
            CollectorStateError, ArgumentError, ArgumentTypeError, DeadlineError, LaunchError,
                OSError: as :meth:`save`.
        """
        self._check()
        for name, part in self._parts.items():
            _check_dict(name, part)
        if time.monotonic() - self._start_checked_at >= _CHECK_START_S:
            self._check_start()
        if signals.requested_signal():
            self._save_and_exit()
        result, weights = self._result()
        is_best = weights is not None and result > self._best_result
        is_due = is_best or time.monotonic() - self._saved_at >= self._every_s
        is_due |= self._is_over() and not self._saved_end
        if is_due:
            self.save()
        return is_due and identity().trainer == 0

    def _check(self) -> None:
        if not self._file_checked and self.path.exists():
            whose = "is from an earlier run"
            if self.path.resolve() in _written:
                whose = "is from another Checkpoint of this process"
            raise CollectorStateError(
                f"{self.path} {whose}: call load() to continue from it, or remove it to start again"
            )
        self._file_checked = True

    def _check_start(self) -> None:
        self._start_checked_at = time.monotonic()
        if self._folder is not None and (why := self._folder.later_start()):
            raise LaunchError(f"{why}: this process saves nothing more, and has to end")

    def _save_and_exit(self) -> None:
        signals.begin_end()
        made = {each.path.resolve(): each for ref in _made if (each := ref()) is not None}
        made[self.path.resolve()] = self
        with contextlib.ExitStack() as saving:  # all, also if one can't
            for each in made.values():
                saving.callback(each.save)
        paths = ", ".join(str(each.path) for each in made.values())
        log.warning("%s told this process to end: saved %s", signals.requested_signal(), paths)
        signals.end()


def _writer(path: Path) -> str | None:
    """The name of the checkpoint that wrote a file; "": none did, None: distcollect 0.1.0 did."""
    try:
        # Without reading the tensors.
        name: str | None = _read(path, mmap=True).get("name")
    except ArgumentError:
        return ""
    return name


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """All tensors in dicts of dicts."""
    if isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, torch.Tensor):
        yield state


def _of_these_names(
    states: Mapping[str, Any], names: Sequence[str]
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """What has these names within a module, of each module and part of one that has them."""
    for state in (each for each in states.values() if isinstance(each, dict)):
        found = (str(key).removesuffix(names[0]) for key in state if str(key).endswith(names[0]))
        for start in found:
            if start[-1:] in ("", ".") and state.keys() >= {start + name for name in names}:
                yield [(name, state[start + name]) for name in names]


def _read(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        kind, _ = saved["format"], dict(saved["parts"])
    except Exception as error:
        # EINVAL is torch's, which seeks in front of the beginning of a file that was cut.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise ArgumentError(
                f"{path} can't be read as a checkpoint: {error.strerror}; give another path"
            ) from error
        # Torch's own message is about settings that users can't make here.
        raise ArgumentError(
            f"{path} can't be read as a checkpoint: distcollect.Checkpoint didn't write it, or it "
            "is damaged; give another path, or remove it to start again"
        ) from error
    if kind != _FORMAT:
        raise ArgumentError(
            f"{path} has format {kind}, this version reads {_FORMAT}: use the version of "
            "distcollect that wrote it, or another path"
        )
    return saved


def _is_buffer(part: object) -> bool:
    return isinstance(part, ReplayBuffer) and not isinstance(part, nn.Module)


def _in_place(present: Any, saved: Any) -> Any:
    """What a dict has after loading: its present tensor with the saved values, if they fit it.

    Others may hold that tensor, such as an optimizer.
    """
    both = isinstance(present, torch.Tensor) and isinstance(saved, torch.Tensor)
    if not both or (present.shape, present.dtype) != (saved.shape, saved.dtype):
        return saved
    with torch.no_grad():
        return present.copy_(saved)


def _link(path: Path, other: Path) -> None:
    """Give a file a second name, which another file may have; a copy would take its time."""
    draft = draft_of(other)
    draft.unlink(missing_ok=True)
    try:
        os.link(path, draft)
    except OSError:  # some file systems, such as those of object stores, have no links
        shutil.copyfile(path, draft)
    draft.replace(other)


def _save_loadable(saved: Any, file: Any, states: Mapping[str, Any]) -> None:
    """Save to a file, and check that it can be loaded before it replaces another one.

    Raises:
        ArgumentTypeError: it can't; names the part.
    """
    try:
        torch.save(saved, file)
        file.flush()
        # Without reading the tensors.
        torch.load(file.name, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        found = [name for name, state in states.items() if not _can_be_loaded(state)]
        # Torch's own message is about settings that users can't make here.
        what = re.search(r"GLOBAL (\S+)", str(error))
        why = str(error).partition("\n")[0] if what is None else f"it has a {what[1]}"
        raise ArgumentTypeError(
            f"the state of {' and '.join(found or states)} could not be loaded again ({why}): its "
            "state_dict() has to give tensors and plain Python values"
        ) from error


def _can_be_loaded(state: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001 - whatever it is, it can't be loaded
        return False
    return True


def _check_dict(name: str, part: Any) -> None:
    """Check the values of a dict: only at the next save, what was learned would be lost.

    What is in lists is left to the save, as it may be much.

    Raises:
        ArgumentTypeError: a value could not be loaded again.
    """
    for key, value in part.items() if isinstance(part, dict) else ():
        if isinstance(value, dict):
            _check_dict(f"{name}[{key!r}]", value)
        elif not (
            type(value) in _LOADABLE
            or isinstance(value, torch.Tensor)
            or _can_be_loaded(_of_python(value))
        ):
            raise ArgumentTypeError(
                f"{name}[{key!r}] is a {type(value).__name__}, which could not be loaded again: "
                "give numbers, strings, tensors, or lists and dicts of these"
            )


def _of_python(value: Any) -> Any:
    """Return a value, or those in dicts, as Python's own numbers if they are NumPy's."""
    if type(value) is dict:
        return {key: _of_python(each) for key, each in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _publish(publish: Any) -> None:
    try:
        publish()
    except ArgumentTypeError:
        # A collector with a policy_factory has no policy here; only the user can publish weights.
        log.warning("the collector has no policy of its own: publish the loaded weights yourself")

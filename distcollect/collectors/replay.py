"""Replay buffers: what they are given of a batch, at which rate, and sampling by priority."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from tensordict import TensorDict
from torch import nn

from distcollect.common import checks
from distcollect.common.signals import WAKEUP_INTERVAL_S
from distcollect.common.waiting import wait_for
from distcollect.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectorStateError,
    DeadlineError,
)
from distcollect.integrations import load


@runtime_checkable
class ReplayBuffer(Protocol):
    """Stores frames: TorchRL's replay buffers, :class:`RateLimited`, or your own class."""

    def extend(self, data: TensorDict) -> Any:
        """Add frames ``[F]``, or ``[n, T]`` to a TorchRL buffer with ``ndim`` above 1.

        If it raises, it is called again with the same frames for the next batch; if weights were
        published meanwhile, it may get new ones.
        """


def frames_for(
    batch: TensorDict,
    buffer: ReplayBuffer,
    rollouts_of: Callable[[TensorDict], Sequence[TensorDict]],
    *,
    by_step: bool,
) -> TensorDict:
    """What ``buffer`` is given of a batch that has frames.

    Args:
        batch: the batch, see :meth:`.BatchFormat.processed`.
        buffer: where it is to be added.
        rollouts_of: the rollouts ``[n, T]`` of a batch. A buffer with rows (TorchRL's storages with
            ``ndim`` above 1) gets one row for each env of all of them.
        by_step: an entry of the buffer is one step of all envs of a worker.
    """
    device = getattr(load("storage of a buffer")(buffer), "device", None)
    if batch.device is None and isinstance(device, torch.device):
        # A TorchRL storage on a device takes frames that name it.
        batch = batch.to(device)
    ndim = num_dims(buffer)
    if not by_step and ndim == 1:
        return batch.reshape(-1)
    rollouts = rollouts_of(batch)
    if ndim == 1:
        # Time comes first, as a buffer's entries are along the first dimension.
        joined = rollouts[0] if len(rollouts) == 1 else torch.cat(list(rollouts), -1)
        return joined.permute(-1, *range(joined.ndim - 1))
    # Single envs may have no dimension of rows.
    rows = [each.reshape(-1, *each.shape[max(0, each.ndim - ndim + 1) :]) for each in rollouts]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def num_dims(buffer: object) -> int:
    """Return the number of dimensions that a buffer's entries are along."""
    return int(getattr(load("storage of a buffer")(buffer), "ndim", 1))


class WrappedBuffer:
    """A replay buffer around another one, whose attributes can all be used through it."""

    _buffer: Any
    sample: Callable[..., Any]
    _state: Callable[..., dict[str, Any]]
    _load_state: Callable[[Mapping[str, Any]], None]

    def __getattr__(self, name: str) -> Any:
        if name == "_buffer":  # of an object that is being copied, which has no attributes yet
            raise AttributeError(name)
        found = getattr(self._buffer, name)
        # Here, so that this buffer has a state only if the wrapped one has.
        return {"state_dict": self._state, "load_state_dict": self._load_state}.get(name, found)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        is_set_here = is_own or not hasattr(vars(self).get("_buffer"), name)
        if is_set_here:
            super().__setattr__(name, value)
        else:
            setattr(self._buffer, name, value)

    def __len__(self) -> int:
        return len(self._buffer)

    def __getitem__(self, index: Any) -> Any:
        return self._buffer[index]

    def __iter__(self) -> Iterator[Any]:
        """Samples, without end."""
        while True:
            yield self.sample()

    def next(self) -> Any:
        """The same as ``sample()``."""
        return self.sample()

    def _check(self, state: object, names: Set[str]) -> None:
        """Raise ArgumentError if ``state`` is none of this buffer's, which has these entries."""
        if not isinstance(state, Mapping) or not state.keys() >= names:
            raise ArgumentError(
                f"this state is not of a {type(self).__name__} buffer: give what its state_dict() "
                "returned, or load it into the wrapped buffer"
            )


class RateLimited(WrappedBuffer):
    """A replay buffer that keeps a fixed ratio of sampled to collected frames.

    Collection waits while fewer than ``samples_per_insert`` samples per frame were drawn, and
    sampling waits while more were; either may be ahead by ``slack`` samples. Sampling also waits
    until the buffer has ``min_size`` frames. It is for the threads of one process (the collector's
    ``start()``). Every attribute of the wrapped buffer can be used through this one. Its
    ``state_dict()`` has the wrapped buffer's state and both counts.

    The scheme is that of Reverb's SampleToInsertRatio (Cassirer et al. 2021, arXiv:2102.04736).
    """

    def __init__(
        self,
        buffer: Any,
        samples_per_insert: float,
        *,
        min_size: int = 1,
        slack: float | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Limit the rates at which ``buffer`` is filled and sampled from.

        Args:
            buffer: anything with ``extend`` and ``sample``.
            samples_per_insert: samples to draw for each frame that is added, above 0.
            min_size: frames that the buffer must have before the first sample.
            slack: samples by which either side may be ahead, in addition to one batch; None: a
                tenth of ``samples_per_insert * min_size``.
            timeout_s: seconds for which :meth:`sample` waits at most.

        Raises:
            ArgumentError, ArgumentTypeError: an argument is wrong.
        """
        numbers = map(checks.plain, (samples_per_insert, min_size, slack, timeout_s))
        samples_per_insert, min_size, slack, timeout_s = numbers
        is_buffer = isinstance(buffer, ReplayBuffer) and not isinstance(buffer, type)
        if not (is_buffer and callable(getattr(buffer, "sample", None))):
            raise ArgumentTypeError(f"RateLimited({buffer!r}): must have extend() and sample()")
        checks.above_zero(
            f"RateLimited(samples_per_insert={samples_per_insert!r})", samples_per_insert
        )
        checks.seconds(f"RateLimited(timeout_s={timeout_s!r})", timeout_s)
        checks.positive("RateLimited: min_size", min_size)
        if slack is not None and slack < 0:
            raise ArgumentError(f"RateLimited(slack={slack!r}): must be 0 or more")
        self._buffer = buffer
        self._samples_per_insert = samples_per_insert
        self._min_size = min_size
        self._slack = samples_per_insert * min_size / 10 if slack is None else slack
        self._timeout_s = timeout_s
        self._inserted = 0
        self._sampled = 0
        self._was_begun = False
        self._num_filling = 0  # collectors that add frames
        self._error: BaseException | None = None  # that ended one of them
        self._changed = threading.Condition()

    def _state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state of the wrapped buffer, and how many frames were added and samples drawn."""
        with self._changed:
            state = self._buffer.state_dict(*args, **kwargs)
            return {"buffer": state, "inserted": self._inserted, "sampled": self._sampled}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict()`` returned.

        Raises:
            ArgumentError: ``state`` is something else.
        """
        self._check(state, {"buffer", "inserted", "sampled"})
        with self._changed:
            self._buffer.load_state_dict(state["buffer"])
            self._inserted, self._sampled = state["inserted"], state["sampled"]
            self._changed.notify_all()

    def extend(self, data: TensorDict) -> Any:
        """Add frames at once; the thread that fills the buffer waits before it collects them."""
        return self._insert(self._buffer.extend, data)

    def add(self, data: TensorDict) -> Any:
        """Add a single frame."""
        return self._insert(self._buffer.add, data)

    def _insert(self, method: Callable[[TensorDict], Any], data: TensorDict) -> Any:
        with self._changed:
            result = method(data)
            self._inserted += data.shape.numel()
            self._changed.notify_all()
        return result

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Sample from the buffer, once enough frames were added.

        Raises:
            DeadlineError: too few frames were added within ``timeout_s``.
            CollectorStateError: no more frames come: collection failed, or ended with fewer than
                ``min_size`` frames. Where several collectors fill the buffer, all have ended.
        """
        # Not under the lock: what comes of a signal may wait for the thread that adds frames.
        if not wait_for(self._changed, self._need_not_wait, self._timeout_s):
            raise DeadlineError(
                f"sample() waited {self._timeout_s:g} s for more frames: {self._inserted} came "
                f"in, {self._sampled} samples were drawn "
                f"(samples_per_insert={self._samples_per_insert:g}, "
                f"min_size={self._min_size}). Is the collector still running?"
            )
        with self._changed:
            if self._need_not_wait():
                if not self._may_sample():
                    raise self._no_more_frames() from self._error
                samples = self._buffer.sample(*args, **kwargs)
                self._sampled += _num_samples(samples)
                self._changed.notify_all()
                return samples
        return self.sample(*args, **kwargs)  # another thread was faster

    def _need_not_wait(self) -> bool:
        return self._may_sample() or not self._num_filling

    def _no_more_frames(self) -> CollectorStateError:
        if not self._was_begun:
            return CollectorStateError(
                "this buffer has too few frames to be sampled, and no collector's start() fills it "
                "in the background, so waiting would not help"
            )
        if self._error is not None:
            return CollectorStateError(f"no more frames come in: {self._error}")
        return CollectorStateError(
            f"no more frames come in, and of min_size={self._min_size} there are only "
            f"{self._inserted}: collect more frames, or lower min_size"
        )

    def wait_to_insert(self, wanted: Callable[[], bool]) -> None:
        """Block until a batch may be added, or ``wanted()`` is False."""
        with self._changed:
            while wanted() and not self._may_insert():
                self._changed.wait(WAKEUP_INTERVAL_S)

    def begin(self) -> None:
        """A collector adds frames from now on."""
        with self._changed:
            self._was_begun, self._error = True, None
            self._num_filling += 1

    def end(self, error: BaseException | None) -> None:
        """A collector adds no more; after the last one, frames may be sampled without a limit.

        Args:
            error: the error that ended collection, which :meth:`sample` then reports once no
                other collector adds frames; None: it ended as planned.
        """
        with self._changed:
            self._num_filling -= 1
            self._error = self._error or error
            self._changed.notify_all()

    def _num_owed(self) -> float:
        """Number of samples still to be drawn for the frames in the buffer."""
        # The first min_size frames are added before any sample is drawn.
        return (self._inserted - self._min_size) * self._samples_per_insert - self._sampled

    def _may_insert(self) -> bool:
        # While no samples are owed, a batch of any size may be added.
        return self._inserted < self._min_size or self._num_owed() <= self._slack

    def _may_sample(self) -> bool:
        if self._inserted < self._min_size:
            return False
        if self._was_begun and not self._num_filling:
            return self._error is None
        return self._num_owed() + self._slack >= 0


def _num_samples(samples: Any) -> int:
    first = samples[0] if isinstance(samples, tuple) else samples
    return first.numel() if isinstance(first, TensorDict) else len(first)


_EPSILON = 1e-6  # every frame can be sampled


class Prioritized(WrappedBuffer):
    """A replay buffer whose frames are sampled in proportion to ``priority ** alpha``.

    ::

        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=256)
        buffer = dc.Prioritized(buffer)
        ...
        sample = buffer.sample()
        sample["td_error"] = ...  # [256], or [256, 1]; its sign does not matter
        buffer.update_tensordict_priority(sample)

    New frames get the highest priority that there was. All methods can be called while another
    thread adds frames (the collector's ``start()``): what is sampled has three entries more, by
    which a priority is ignored whose frame was overwritten meanwhile:

    - ``index``: int64 ``[B]``, where the frame is in the buffer.
    - ``generation``: int64 ``[B]``, which call of :meth:`extend` wrote it.
    - ``priority_weight``: float32 ``[B]``, ``(p / min p) ** -beta`` with the probabilities p, to
      weight the losses with.

    Every attribute of the wrapped buffer can be used through this one, and its ``state_dict()`` has
    the priorities too. A sample takes time in proportion to the number of frames, about 3 ms for a
    million. In contrast to TorchRL's, it needs no binary that fits torch.

    The scheme is proportional prioritisation (Schaul et al. 2016, arXiv:1511.05952).

    Attributes:
        beta: the exponent of ``priority_weight``, which may be changed at any time.
        added_to_samples: names of the three entries.
    """

    added_to_samples = ("index", "generation", "priority_weight")

    def __init__(
        self,
        buffer: Any,
        *,
        alpha: float = 0.6,
        beta: float = 0.4,
        priority_key: str = "td_error",
    ) -> None:
        """Sample from ``buffer`` by priority.

        Args:
            buffer: TorchRL's, with its default sampler, or one whose ``extend`` returns the indices
                that it wrote to and that gives ``buffer[indices]``. :class:`RateLimited` goes
                around this one.
            alpha: the exponent of priorities, 0 or more; 0: all are equal.
            beta: see above.
            priority_key: the entry of a sample that has the new priorities.

        Raises:
            ArgumentError, ArgumentTypeError: an argument is wrong.
        """
        is_buffer = isinstance(buffer, ReplayBuffer) and not isinstance(buffer, list)
        if not (is_buffer and hasattr(buffer, "__getitem__")):
            raise ArgumentTypeError(
                f"Prioritized({buffer!r}): must have extend() and buffer[indices]"
            )
        if isinstance(buffer, RateLimited):
            raise ArgumentTypeError(
                "Prioritized(RateLimited(...)): use RateLimited(Prioritized(...), ...)"
            )
        if (ndim := num_dims(buffer)) != 1:
            raise ArgumentError(f"Prioritized: the storage has ndim={ndim}; it must have ndim=1")
        for name, value in (("alpha", alpha), ("beta", beta)):
            checks.number(f"Prioritized({name}={value!r})", checks.plain(value))
            if not checks.plain(value) >= 0:
                raise ArgumentError(f"Prioritized({name}={value!r}): must be 0 or more")
        self.beta = beta
        self._buffer = buffer
        self._alpha = alpha
        self._key = priority_key
        self._lock = threading.Lock()
        self._highest = 1.0  # priority of any frame so far
        self._num_extended = 0
        # For each index; those below the size were written to.
        self._size = 0
        self._weights = torch.zeros(0, dtype=torch.float64)  # priority ** alpha
        self._generations = torch.zeros(0, dtype=torch.int64)

    def _state(self) -> dict[str, Any]:
        with self._lock:
            return {
                "buffer": self._buffer.state_dict(),
                "highest": self._highest,
                "num_extended": self._num_extended,
                "weights": self._weights[: self._size].clone(),
                "generations": self._generations[: self._size].clone(),
            }

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self._check(state, {"generations"})
        with self._lock:
            self._buffer.load_state_dict(state["buffer"])
            self._highest, self._num_extended = state["highest"], state["num_extended"]
            self._weights = state["weights"].clone()
            self._generations = state["generations"].clone()
            self._size = len(self._weights)

    def extend(self, data: TensorDict) -> torch.Tensor:
        """Add frames; returns the indices that they were written to.

        Raises:
            ArgumentTypeError: the wrapped buffer returned no indices.
        """
        with self._lock:
            written = self._buffer.extend(data)
            if written is None:
                raise ArgumentTypeError(
                    f"{type(self._buffer).__name__}.extend() returned None: for Prioritized it has "
                    "to return the indices that it wrote to"
                )
            index = torch.as_tensor(written).flatten().cpu()
            self._size = max([self._size, *(index + 1).tolist()])
            if (more := self._size - len(self._weights)) > 0:
                # Twice as many: the time for all copies stays in proportion to the size.
                room = (0, more + self._size)
                self._weights = nn.functional.pad(self._weights, room)
                self._generations = nn.functional.pad(self._generations, room)
            self._num_extended += 1
            self._weights[index] = self._weight(torch.tensor(self._highest))
            self._generations[index] = self._num_extended
        return index

    def add(self, data: TensorDict) -> int:
        """Add a single frame; returns the index that it was written to."""
        return int(self.extend(data.unsqueeze(0)))

    def empty(self) -> None:
        """Remove all frames."""
        with self._lock:
            self._buffer.empty()
            self._size = 0
            self._generations.zero_()

    def sample(self, batch_size: int | None = None) -> TensorDict:
        """Sample frames ``[B]``; None: as many as the wrapped buffer's ``batch_size`` says.

        Raises:
            ArgumentError: neither says how many.
            CollectorStateError: there are no frames.
        """
        num = getattr(self._buffer, "batch_size", None) if batch_size is None else batch_size
        if num is None:
            raise ArgumentError("sample(): give batch_size here, or where the buffer is made")
        with self._lock:
            if not self._size:
                raise CollectorStateError(
                    "this buffer has no frames to sample yet: call collector.next() first, or let "
                    "sample() wait by RateLimited(this, samples_per_insert=..., min_size=...)"
                )
            weights = self._weights[: self._size]
            sums = weights.cumsum(0)
            drawn = torch.rand(num, dtype=torch.float64) * sums[-1]
            index = torch.searchsorted(sums, drawn, right=True).clamp_(max=self._size - 1)
            samples: TensorDict = self._buffer[index]
            weight = (weights[index] / weights.min()) ** -self.beta
            found = {"index": index, "generation": self._generations[index]}
        for name, value in {**found, "priority_weight": weight.float()}.items():
            # An entry may be a step of several envs.
            samples[name] = value.view(-1, *[1] * (samples.ndim - 1)).expand(samples.shape)
        return samples

    def update_tensordict_priority(self, samples: TensorDict) -> int:
        """Set the priorities of sampled frames to the magnitudes of their ``priority_key``.

        Returns:
            How many frames were still there; the others were overwritten since they were sampled.

        Raises:
            ArgumentError: a priority is NaN or infinite, or ``samples`` has none; nothing has
                changed.
        """
        names = "index", "generation", self._key
        if missing := [name for name in names if samples.get(name, None) is None]:
            raise ArgumentError(
                f"update_tensordict_priority(): there is no {missing} in what was passed: take "
                f"what sample() gave, and set its {self._key!r} (the priority_key of Prioritized)"
            )
        of_entry = {name: samples[name].detach().cpu().reshape(len(samples), -1) for name in names}
        priority = of_entry[self._key].abs().amax(1).double()
        if not priority.isfinite().all():
            raise ArgumentError(f"{self._key!r} has a NaN or an infinity, so it is no priority")
        index, generation = of_entry["index"][:, 0], of_entry["generation"][:, 0]
        with self._lock:
            is_there = self._generations[index] == generation
            self._weights[index[is_there]] = self._weight(priority[is_there])
            self._highest = max([self._highest, *priority[is_there].tolist()])
        return int(is_there.sum())

    def update_priority(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: the frames at these indices may be others by now.

        Raises:
            ArgumentTypeError: always.
        """
        raise ArgumentTypeError(
            "Prioritized has no update_priority(): set the priorities of what you sampled, by "
            "update_tensordict_priority(sample)"
        )

    def _weight(self, priority: torch.Tensor) -> torch.Tensor:
        return (priority.double() + _EPSILON) ** self._alpha

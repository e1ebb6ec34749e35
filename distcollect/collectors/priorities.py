"""Prioritised replay, also while a background thread adds frames."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from distcollect.collectors.replay import RateLimited, ReplayBuffer, WrappedBuffer, num_dims
from distcollect.common import checks
from distcollect.errors import ArgumentError, ArgumentTypeError, CollectorStateError

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
    """

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
        if not (isinstance(buffer, ReplayBuffer) and hasattr(buffer, "__getitem__")):
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
            if not checks.plain(value) >= 0:
                raise ArgumentError(f"Prioritized({name}={value!r}): must be 0 or more")
        self.beta = beta
        self._buffer: Any = buffer
        self._alpha = alpha
        self._key = priority_key
        self._lock = threading.Lock()
        self._highest = 1.0  # priority of any frame so far
        self._num_extended = 0
        # For each index; those below the size were written to.
        self._size = 0
        self._weights = torch.zeros(0, dtype=torch.float64)  # priority ** alpha
        self._generations = torch.zeros(0, dtype=torch.int64)

    def __getitem__(self, index: Any) -> Any:
        return self._buffer[index]

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
                raise CollectorStateError("this buffer has no frames to sample yet")
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
            ArgumentError: a priority is NaN or infinite; nothing has changed.
        """
        of_entry = {
            name: samples[name].detach().cpu().reshape(len(samples), -1)
            for name in ("index", "generation", self._key)
        }
        priority = of_entry[self._key].abs().amax(1).double()
        if not priority.isfinite().all():
            raise ArgumentError(f"{self._key!r} has a NaN or an infinity, so it is no priority")
        index, generation = of_entry["index"][:, 0], of_entry["generation"][:, 0]
        with self._lock:
            is_there = self._generations[index] == generation
            self._weights[index[is_there]] = self._weight(priority[is_there])
            self._highest = max([self._highest, *priority[is_there].tolist()])
        return int(is_there.sum())

    def _weight(self, priority: torch.Tensor) -> torch.Tensor:
        return (priority.double() + _EPSILON) ** self._alpha

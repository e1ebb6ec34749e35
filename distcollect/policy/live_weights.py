"""The weights that a policy computes with, and the version that is swapped in next."""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from distcollect.policy.weight_layout import WeightLayout, device_of, state_tensors

_MOST_READY = 8  # versions that wait for a rollout to begin, besides those asked for; rarely two


class LiveWeights:
    """A module whose weights are swapped for a whole new version in one go, between two steps.

    One thread receives versions (:meth:`spare`, then :meth:`commit`), another applies the newest
    (:meth:`apply`). A buffer that is being written to is never in use, and one that is ready is
    never written to, so what the policy computes with is always one whole version.

    Attributes:
        module: the module; None if there are no weights.
        layout: how its weights lie in a buffer.
        device: where the buffers are: where all of the module's tensors are, else the CPU.
        version: policy_version of the weights in use.
        pending: whether a newer version lies ready.
    """

    def __init__(
        self,
        module: nn.Module | None,
        exclude: Sequence[str] = (),
        *,
        keeps_each: bool = False,
        in_place: bool | None = None,
    ) -> None:
        """Swap the weights of ``module``.

        Args:
            module: the module; None: there are no weights.
            exclude: patterns of names that are left alone.
            keeps_each: a newer version does not replace those that lie ready, as a rollout may be
                asked for with one of them.
            in_place: copy a version into the module's tensors, instead of pointing these at it.
                None: do so on a GPU. A CUDA graph reads the addresses that it was captured with,
                and there the copy takes less than a millisecond.
        """
        self.module = module
        self.layout = WeightLayout.of(module, exclude)
        self.device = device_of(module)
        self._in_place = self.device.type != "cpu" if in_place is None else in_place
        self.version = 0
        self.pending = False
        state = state_tensors(module)
        self._tensors = [state[entry.names[0]] for entry in self.layout.entries]
        for tensor in self._tensors:
            # Of an expanded one several elements are one in memory, which can't be written to.
            if any(s > 1 and not n for s, n in zip(tensor.shape, tensor.stride(), strict=True)):
                tensor.data = tensor.data.clone()
        # A forward pass changes buffers in place. They have memory of their own, so that what lies
        # in self._live stays what was published.
        self._pointed = [
            isinstance(tensor, nn.Parameter) and tensor.device == self.device and not self._in_place
            for tensor in self._tensors
        ]
        self._places = _places(module, self._tensors)
        self._lock = threading.Lock()
        self._spares: list[torch.Tensor] = []
        self._most_ready = _MOST_READY if keeps_each else 1
        self._ready: list[tuple[torch.Tensor, int]] = []  # by rising version
        self._expected: list[int] = []  # versions that were asked for, and not applied yet
        self._live: torch.Tensor | None = None
        self._views: dict[int, list[torch.Tensor]] = {}

    @property
    def newest(self) -> int:
        """policy_version of the weights that the next step will use."""
        with self._lock:
            return self._ready[-1][1] if self._ready else self.version

    def spare(self) -> torch.Tensor:
        """Return a buffer to write a version into, uint8 ``[layout.num_bytes]``.

        Give it back with :meth:`commit`, or with :meth:`discard` if it could not be filled.
        """
        with self._lock:
            return self._spares.pop() if self._spares else self.layout.empty(self.device)

    def copy_newest(self, buffer: torch.Tensor) -> None:
        """Fill ``buffer`` with the newest version, which was committed.

        Only parameters may differ from it: those that the policy has changed itself. To be called
        on the thread that receives, as no other writes to buffers.
        """
        with self._lock:
            newest = self._ready[-1][0] if self._ready else self._live
        assert newest is not None
        buffer.copy_(newest)

    def discard(self, buffer: torch.Tensor) -> None:
        """Forget a buffer from :meth:`spare`, as its source may go on writing to it."""
        self._views.pop(buffer.data_ptr(), None)

    def renumber(self, version: int) -> None:
        """Apply the newest weights, and call them ``version``; on the thread that applies."""
        self.apply()
        with self._lock:
            self.version = version

    def expect(self, version: int) -> None:
        """Keep what :meth:`apply` needs for ``up_to=version``, however many newer ones come."""
        with self._lock:
            self._expected.append(version)

    def commit(self, buffer: torch.Tensor, version: int) -> None:
        """Offer a filled buffer as ``version``; it replaces the one that was not applied yet."""
        if buffer.data_ptr() not in self._views:  # here, as it takes time between two steps
            self._views[buffer.data_ptr()] = self.layout.views(buffer)
        with self._lock:
            self._ready.append((buffer, version))
            while len(self._ready) > self._most_ready + len(self._expected):
                versions = [each for _, each in self._ready]
                needed = {bisect_right(versions, each) - 1 for each in self._expected}
                oldest = next(index for index in range(len(versions)) if index not in needed)
                self._spares.append(self._ready.pop(oldest)[0])
            self.pending = True

    def apply(self, up_to: int | None = None) -> None:
        """Make the newest version the module's weights.

        On a CPU this only changes pointers, and copies nothing but buffers.

        Args:
            up_to: no newer version than this; None: any.
        """
        with self._lock:
            passed = self.version if up_to is None else up_to
            self._expected = [version for version in self._expected if version > passed]
            due = [each for each in self._ready if up_to is None or each[1] <= up_to]
            if not due:
                return
            # Under one lock, as copy_newest() reads these on the receiving thread.
            self._spares += [buffer for buffer, _ in due[:-1]]
            del self._ready[: len(due)]
            buffer, self.version = due[-1]
            self.pending = bool(self._ready)
            before, self._live = self._live, buffer
        for owner, name, tensor in self._places:
            if getattr(owner, name, None) is not tensor:  # a forward pass has assigned another
                setattr(owner, name, tensor)
        views = self._views[buffer.data_ptr()]
        for tensor, view, pointed in zip(self._tensors, views, self._pointed, strict=True):
            if pointed:
                tensor.data = view
            else:
                tensor.data.copy_(view)
        if self.device.type == "cuda":
            # The next version is written to this memory by another thread, on another stream.
            torch.cuda.current_stream(self.device).synchronize()
        if before is not None:
            with self._lock:
                self._spares.append(before)


def _places(
    module: nn.Module | None, tensors: Sequence[torch.Tensor]
) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Where ``module`` and its parts have each of these tensors: (part, attribute, tensor)."""
    wanted = {id(tensor) for tensor in tensors}
    return [
        (part, name, tensor)
        for part in (() if module is None else module.modules())
        for name, tensor in (
            *part.named_parameters(recurse=False, remove_duplicate=False),
            *part.named_buffers(recurse=False, remove_duplicate=False),
        )
        if id(tensor) in wanted and getattr(part, name, None) is tensor
    ]


@contextlib.contextmanager
def buffers_restored(module: nn.Module | None) -> Iterator[None]:
    """Restore buffers, such as running statistics: collection goes on with what it has seen."""
    before = [
        (part, name, buffer, buffer.clone())
        for part in (() if module is None else module.modules())
        for name, buffer in part.named_buffers(recurse=False)
        if not is_lazy(buffer)  # else it has no value yet
    ]
    try:
        yield
    finally:
        with torch.inference_mode():  # in which policies may have assigned them
            for part, name, buffer, value in before:
                if getattr(part, name) is not buffer:
                    setattr(part, name, buffer)
                if not torch.equal(buffer, value):  # one that is expanded can't be written to
                    buffer.copy_(value)

"""A policy's weights as one flat buffer: what is sent, and what a worker swaps in."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import CudaGraphModule
from torch import nn
from torch.nn.parameter import is_lazy

from distcollect.errors import ArgumentError, ArgumentTypeError, WeightsError
from distcollect.policy.held_modules import held_modules
from distcollect.policy.noise import without_noise
from distcollect.rollout.spaces import dtype_name

# Every entry starts at a multiple of this, so that a view of any dtype is aligned.
_ALIGNMENT = 16
# The name of the statistics that normalise observations, among the modules that are published; no
# module of the user's has such a name. They are never rounded: the trainer normalises by them too.
STATISTICS = "(normalize)"
# How torch names what a module's get_extra_state() returns.
_EXTRA = "_extra_state"


@dataclass(frozen=True)
class WeightEncoding:
    """How weights lie in the payload that is sent.

    Attributes:
        dtype: what wider floats are rounded to; None: they are not.
        entries: indices of the entries that travel; None: all.
    """

    dtype: torch.dtype | None = None
    entries: tuple[int, ...] | None = None

    @property
    def is_whole(self) -> bool:
        """Return True if the payload is the flat buffer itself."""
        return self.dtype is None and self.entries is None

    def narrowed(self, entry: Entry) -> torch.dtype:
        """Return the dtype that an entry has on the way."""
        dtype = entry.dtype
        narrow = None if entry.names[0].startswith(STATISTICS) else self.dtype
        if narrow is None or not dtype.is_floating_point or dtype.itemsize <= narrow.itemsize:
            return dtype
        return narrow


@dataclass(frozen=True)
class Entry:
    """One parameter or buffer, and where it lies in a flat buffer.

    Attributes:
        names: in the ``state_dict``; more than one if it is tied.
        shape: its shape.
        dtype: its dtype.
        offset: where it begins, in bytes.
        num_bytes: its size.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        """Where the next entry begins, in bytes."""
        return -(-(self.offset + self.num_bytes) // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class WeightLayout:
    """Where each parameter and persistent buffer of a module lies in a flat buffer.

    Attributes:
        entries: in ``state_dict`` order.
        num_bytes: size of the buffer, a multiple of 16.
        not_sent: names of excluded weights and of buffers that aren't persistent: users may pass
            them, and they are not sent.
        extra: names of what is in the ``state_dict`` too, but is no parameter or buffer, so that
            nothing can be copied into it.
    """

    entries: tuple[Entry, ...]
    num_bytes: int
    not_sent: frozenset[str] = frozenset()
    extra: frozenset[str] = frozenset()

    @classmethod
    def of(cls, module: nn.Module | None, exclude: Sequence[str] = ()) -> WeightLayout:
        """Return the layout of ``module``, empty for None.

        Args:
            module: has the weights.
            exclude: patterns of names to leave out, written as for file names: ``critic.*``.

        Raises:
            ArgumentError: a weight of a lazy module has no shape yet.
        """
        state = state_tensors(module)
        whole = {} if module is None else {uncompiled(name) for name in module.state_dict()}
        excluded = {name for name in whole if any(fnmatchcase(name, each) for each in exclude)}
        names: dict[torch.Tensor, list[str]] = {}  # a tied one has several
        for name, value in state.items():
            if name in excluded:
                continue
            if is_lazy(value):
                raise ArgumentError(
                    f"the policy's weight {name!r} has no shape yet, as its module is lazy: "
                    "call the policy once with an observation before you make the collector"
                )
            names.setdefault(value, []).append(name)
        buffers = () if module is None else module.named_buffers()
        layout = cls._packed(
            ((tuple(each), tuple(t.shape), t.dtype) for t, each in names.items()),
            frozenset(excluded | ({uncompiled(name) for name, _ in buffers} - state.keys())),
        )
        return replace(layout, extra=frozenset(whole - state.keys() - excluded))

    @classmethod
    def _packed(
        cls,
        parts: Iterable[tuple[tuple[str, ...], tuple[int, ...], torch.dtype]],
        not_sent: frozenset[str] = frozenset(),
    ) -> WeightLayout:
        entries: list[Entry] = []
        offset = 0
        for names, shape, dtype in parts:
            num_bytes = math.prod(shape) * dtype.itemsize
            entries.append(Entry(names, shape, dtype, offset, num_bytes))
            offset = entries[-1].end
        return cls(tuple(entries), offset, not_sent)

    def reduced(self, encoding: WeightEncoding) -> WeightLayout:
        """Return the layout of a payload with this encoding."""
        chosen = (
            self.entries
            if encoding.entries is None
            else [self.entries[index] for index in encoding.entries]
        )
        return self._packed((e.names, e.shape, encoding.narrowed(e)) for e in chosen)

    def transfer(self, source: torch.Tensor, target: torch.Tensor, into: WeightLayout) -> None:
        """Copy the entries that both layouts have.

        Args:
            source: a flat buffer of this layout.
            target: a flat buffer of the other layout; written to.
            into: the other layout.
        """
        theirs = dict(zip((e.names for e in into.entries), into.views(target), strict=True))
        with torch.no_grad():
            for entry, view in zip(self.entries, self.views(source), strict=True):
                if entry.names in theirs:
                    theirs[entry.names].copy_(view)

    def changed(self, before: torch.Tensor, after: torch.Tensor) -> tuple[int, ...]:
        """Return the indices of the entries that differ between two flat buffers."""
        return tuple(
            index
            for index, entry in enumerate(self.entries)
            if not torch.equal(
                before[entry.offset : entry.offset + entry.num_bytes],
                after[entry.offset : entry.offset + entry.num_bytes],
            )
        )

    def empty(self, device: torch.device | None = None) -> torch.Tensor:
        """Return a zeroed flat buffer, uint8 ``[num_bytes]`` (its gaps stay zero)."""
        return torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """One tensor for each entry, sharing the memory of ``flat``."""
        # As few calls as possible: with many entries, calls take most of the time.
        whole = {dtype: flat.view(dtype) for dtype in {entry.dtype for entry in self.entries}}
        return [
            whole[entry.dtype]
            .narrow(0, entry.offset // entry.dtype.itemsize, math.prod(entry.shape))
            .view(entry.shape)
            for entry in self.entries
        ]

    def pack(self, weights: Mapping[str, torch.Tensor], flat: torch.Tensor) -> None:
        """Copy ``weights``, as :meth:`select` gives them, into ``flat``."""
        # One call for all neighbouring entries of one dtype, with the gaps between them: with many
        # small entries, a call for each would take most of the time.
        with torch.no_grad():
            for dtype, run in itertools.groupby(self.entries, lambda entry: entry.dtype):
                entries = list(run)
                gap = torch.zeros(_ALIGNMENT // dtype.itemsize, dtype=dtype, device=flat.device)
                parts: list[torch.Tensor] = []
                for entry in entries:
                    parts.append(weights[entry.names[0]].reshape(-1).to(flat.device))
                    if rest := entry.end - entry.offset - entry.num_bytes:
                        parts.append(gap[: rest // dtype.itemsize])
                torch.cat(parts, out=flat[entries[0].offset : entries[-1].end].view(dtype))

    def load(self, source: object, target: object) -> None:
        """Copy weights into those of ``target``; for both, and errors, see :meth:`select`."""
        new = self.select(source)
        with torch.no_grad():
            for name, tensor in self.select({} if target is None else target).items():
                tensor.copy_(new[name])

    def select(self, source: object) -> dict[str, torch.Tensor]:
        """Return the tensors for all entries among weights that the user gave, by their first name.

        Args:
            source: a module, a callable that holds some, a TensorDict of parameters, or a state
                dict.

        Raises:
            ArgumentTypeError: it is none of these.
            WeightsError: an entry is missing, unknown, or has another shape or dtype; or one weight
                of the policy is given under two names, with different values.
        """
        # A policy without weights fits another one.
        fits = not self.entries and callable(source) and module_of(source) is None
        given = {} if fits else named_tensors(source)
        known = {name for entry in self.entries for name in entry.names} | self.not_sent
        if self.extra:
            warnings.warn(
                f"{sorted(self.extra)} in the policy's state_dict is no parameter or buffer, so it "
                "is not published: keep in a buffer what is to be, or leave it out by "
                "WeightSync(exclude=...)",
                stacklevel=2,
            )
        problems = [f"unknown key {name!r}" for name in given if name not in known]
        selected: dict[str, torch.Tensor] = {}
        for entry in self.entries:
            names = [name for name in entry.names if name in given]
            if not names:
                problems.append(f"missing key {entry.names[0]!r}")
                continue
            name, *others = names
            value = given[name]
            problems += [
                f"{name!r} and {other!r} differ, but are one weight in the policy"
                for other in others
                if given[other] is not value and not _same(given[other], value)
            ]
            if tuple(value.shape) != entry.shape:
                problems.append(
                    f"{name!r} has shape {list(value.shape)}, the policy needs {list(entry.shape)}"
                )
            elif value.dtype != entry.dtype:
                problems.append(
                    f"{name!r} has dtype {dtype_name(value.dtype)}, the policy needs "
                    f"{dtype_name(entry.dtype)}"
                )
            selected[entry.names[0]] = value
        if problems:
            more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
            has_none = "" if self.entries else ", which has no weights"
            raise WeightsError(
                f"these weights don't fit the policy{has_none}: {'; '.join(problems[:5])}{more}. "
                "Nothing was sent"
            )
        return selected


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if both have the same values, NaN among them, on whichever devices."""
    return one.shape == other.shape and torch.allclose(
        one, other.to(one), rtol=0, atol=0, equal_nan=True
    )


def check_range(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Refuse finite values that would become infinite as ``dtype``.

    They are refused among infinities and NaN, too, which are sent as they are.

    Raises:
        WeightsError: names the key.
    """
    for name, tensor in weights.items():
        if not tensor.is_floating_point() or name.startswith(STATISTICS):
            continue
        too_large = tensor.detach()[tensor.isfinite() & tensor.to(dtype).isinf()]
        if too_large.numel():
            largest = float(too_large.abs().max())
            advice = (
                "use 'bfloat16'"
                if largest <= torch.finfo(torch.bfloat16).max
                else f"leave it out with exclude=[{name!r}], or give no wire_dtype"
            )
            raise WeightsError(
                f"{name!r} holds a value of magnitude {largest:g}, too large for "
                f"WeightSync(wire_dtype={dtype_name(dtype)!r}): {advice}. Nothing was sent"
            )


def called_by(policy: Any) -> Any:
    """Return the policy in wrappers of noise, and what a CudaGraphModule calls."""
    policy = without_noise(policy)
    return policy.module if isinstance(policy, CudaGraphModule) else policy


def module_of(policy: object, models: Iterable[nn.Module] = ()) -> nn.Module | None:
    """Return the module that has a policy's weights.

    That is the policy, or what a CudaGraphModule calls; or the module that a callable holds, see
    :func:`.held_modules`. If it holds several, they are the parts of the result. None: there is
    none.

    Args:
        policy: a policy of any kind.
        models: modules that don't count among those that a callable holds.
    """
    called = called_by(policy)
    # By what they have: in a worker, two objects may be one module, see take_state().
    known = {id(vars(part)) for model in models for part in model.modules()}
    held = {
        name: module
        for name, module in held_modules(called).items()
        if module is called or id(vars(module)) not in known
    }
    if len(held) > 1:
        return nn.ModuleDict(held)
    found = next(iter(held.values()), called)
    return found if isinstance(found, nn.Module) else None


def published(policy: object, models: Mapping[str, nn.Module]) -> nn.Module | None:
    """Return the module whose weights are published: of the policy, or of it and ``models``.

    None if there is none: the policy holds no module, and there are no models.
    """
    module = module_of(policy, models.values())
    if not models:
        return module
    return nn.ModuleDict({**models} if module is None else {"policy": module, **models})


def is_part(source: Any, module: nn.Module | None) -> bool:
    """Return True if ``source`` is a module, or one of its parts, or a callable of such ones."""
    if module is None or not callable(source):
        return False
    if source is module:
        return True
    parts = {id(part) for part in module.modules()}
    held = held_modules(called_by(source)).values() or [source]
    return all(id(each) in parts for each in held)


def named_tensors(source: object) -> dict[str, torch.Tensor]:
    """Return the tensors of a module, TensorDict, state dict, or dict of these, by dotted names.

    Raises:
        ArgumentTypeError: it is none of these, or holds something that is no tensor.
    """
    if callable(source) and (held := module_of(source)) is not None:
        return state_tensors(held)
    if isinstance(source, TensorDictBase):
        return {
            uncompiled(name if isinstance(name, str) else ".".join(name)): value
            for name, value in source.items(include_nested=True, leaves_only=True)
        }
    if isinstance(source, Mapping):
        named: dict[str, torch.Tensor] = {}
        for name, value in source.items():
            if str(name).endswith(_EXTRA):  # said to be left out by select()
                continue
            if callable(value) or isinstance(value, Mapping | TensorDictBase):
                parts = named_tensors(value)
                named.update({uncompiled(f"{name}.{inner}"): part for inner, part in parts.items()})
                continue
            if not isinstance(value, torch.Tensor):
                raise ArgumentTypeError(
                    f"weights: {name!r} is a {type(value).__name__}, not a tensor"
                )
            named[uncompiled(str(name))] = value
        return named
    raise ArgumentTypeError(
        "weights must be a module, a TensorDict of parameters, a state dict, or a dict of these by "
        f"the models' names, not {type(source).__name__}"
    )


def has_lazy_weights(module: nn.Module | None) -> bool:
    """Return True if a weight has no shape yet, as a lazy module was not called yet."""
    return module is not None and any(map(is_lazy, (*module.parameters(), *module.buffers())))


def state_tensors(module: nn.Module | None) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a module, by name."""
    if module is None:
        return {}
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    own = {id(each) for each in (*module.parameters(), *module.buffers())}
    return {uncompiled(name): value for name, value in state.items() if id(value) in own}


def uncompiled(name: str) -> str:
    """Return a weight's name without what ``torch.compile`` adds: perhaps only workers compile."""
    return name.replace("_orig_mod.", "")


def device_of(module: nn.Module | None) -> torch.device:
    """Return the device of all of a module's weights; the CPU if they are on several."""
    devices = {tensor.device for tensor in state_tensors(module).values()}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def checksum(flat: torch.Tensor) -> int:
    """Return the wrapping sum of a flat buffer's 8-byte words; as fast as reading it.

    It tells a half-written buffer from a whole one.
    """
    words = flat.view(torch.int64)
    # Numpy takes one core only: on all of the host's, torch would be no faster.
    return int((words.numpy() if words.is_cpu else words).sum())

"""Random numbers of policies, drawn for each env from a stream of its own.

A policy chooses the actions of n envs at once. Torch draws the random numbers of all envs from one
generator, so the numbers of env i depend on the envs that it is stepped with. While
:class:`PerEnvRng` is active, they depend only on the env's seed, the number of its frame, and how
many numbers were drawn in that frame before.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014). The number at any place of its sequence can be computed directly, so the numbers
of all envs are computed with a few array operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")

# SplitMix64's increment: odd, and close to 2**64 divided by the golden ratio.
_GOLDEN = 0x9E3779B97F4A7C15
# Distance in the sequence between the first numbers of two consecutive frames.
_PLACES_PER_FRAME = 1 << 24
_STRIDE = np.uint64(_GOLDEN * _PLACES_PER_FRAME % 2**64)

# Names of all functions and methods of torch that draw random numbers.
_NAMES = (
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "normal"),
    *("bernoulli", "multinomial", "poisson", "binomial", "dropout", "dropout_"),
    *("_standard_gamma", "_sample_dirichlet", "gumbel_softmax", "scaled_dot_product_attention"),
    *("alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"),
    *("feature_dropout", "multi_head_attention_forward", "bernoulli_", "cauchy_", "exponential_"),
    *("geometric_", "log_normal_", "normal_", "random_", "uniform_"),
)
_RANDOM_FUNCTIONS = frozenset(
    getattr(place, name)
    for place in (torch, Tensor, functional)
    for name in _NAMES
    if hasattr(place, name)
)


class PerEnvRng(TorchFunctionMode):
    """A context in which torch's random functions draw for each env from its own stream.

    That applies to tensors whose first dimension is the number of envs or a multiple of it (each
    env may have several agents). Tensors of other shapes, which all envs share, are drawn from
    torch's own generators. Compiled and scripted code draws from these too.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        """One stream for each of n envs.

        Args:
            seeds: n numbers below 2**64; equal seeds give equal streams.
        """
        super().__init__()
        self._ops = _RandomOps(np.array(seeds, np.uint64))

    def next_frame(self, rows: Sequence[int] | None = None) -> None:
        """Draw for the next frame of these rows from now on; None: of all rows.

        The numbers of other rows repeat, and must not be used, until their next frame.
        """
        self._ops.next_frame(slice(None) if rows is None else rows)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # A dispatch mode sees every operation that draws, also within other functions, but slows
        # down all operations much more than this mode does. So it is entered only here.
        if func in _RANDOM_FUNCTIONS:
            with self._ops:
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def draw(call: Callable[[], T], rng: PerEnvRng | None) -> T:
    """Call a function that draws random numbers; None: from torch's own generators.

    Use it for as little as possible, as every operation costs more within :class:`PerEnvRng`.
    """
    if rng is None:
        return call()
    with rng:
        return call()


class _RandomOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Overwrites the results of torch's random operations with the envs' own numbers."""

    def __init__(self, seeds: np.ndarray) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_envs = len(seeds)
        self._states = seeds[:, None].copy()  # of SplitMix64, at the start of the frame
        self._num_drawn = 0  # numbers of each env in this frame

    def next_frame(self, rows: slice | Sequence[int]) -> None:
        self._states[rows] += _STRIDE
        self._num_drawn = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        has_generator = any(
            isinstance(value, torch.Generator) for value in (*args, *kwargs.values())
        )
        if has_generator or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func not in _REDRAW and func._can_decompose():  # noqa: SLF001 - no public way to ask
            # For example dropout, which is a single operation in inference mode.
            with self:
                return func.decompose(*args, **kwargs)
        # Let torch check the arguments and allocate the result.
        drawn = func(*args, **kwargs)
        first = drawn[0] if isinstance(drawn, tuple) else drawn
        if self._has_rows(first):
            redraw = _REDRAW.get(func)
            if redraw is None or not redraw(self, drawn, *args, **kwargs):
                self._redraw_each(drawn, func, args, kwargs)
        return drawn

    def bits(self, shape: Sequence[int]) -> np.ndarray:
        """Random uint64 ``[*shape]``; the first dimension is n or a multiple of it."""
        per_row = math.prod(shape) // self._num_envs
        places = np.arange(self._num_drawn, self._num_drawn + per_row, dtype=np.uint64)
        self._num_drawn += per_row
        numbers = self._states + places * np.uint64(_GOLDEN)
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: np.ndarray = numbers ^ (numbers >> np.uint64(31))
        return mixed.reshape(shape)

    def uniform(self, shape: Sequence[int]) -> np.ndarray:
        """Random float64 ``[*shape]`` in (0, 1), both ends excluded; see :meth:`bits`."""
        numbers: np.ndarray = ((self.bits(shape) >> np.uint64(12)) + 0.5) * 2.0**-52
        return numbers

    def _has_rows(self, drawn: Tensor) -> bool:
        return drawn.ndim > 0 and len(drawn) > 0 and len(drawn) % self._num_envs == 0

    def _redraw_each(
        self, drawn: Tensor, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Call ``func`` once for each env, with a generator that is seeded for that env."""
        arguments = func._schema.arguments  # noqa: SLF001 - no public way to ask
        if not any(argument.name == "generator" for argument in arguments):
            return
        generator = torch.Generator(drawn.device)
        num_rows = len(drawn)
        rows_per_env = num_rows // self._num_envs
        for env, seed in enumerate(self.bits((self._num_envs,)).tolist()):
            rows = slice(env * rows_per_env, (env + 1) * rows_per_env)
            args_of_env = [
                value[rows]
                if isinstance(value, Tensor) and value.shape[:1] == (num_rows,)
                else value
                for value in args
            ]
            generator.manual_seed(seed)
            drawn[rows] = func(*args_of_env, **{**kwargs, "generator": generator})


# Each of the following functions draws for all envs at once. It gets the result of an operation,
# which it overwrites, and the operation's arguments. It returns False where it can't do that.


def _rand(ops: _RandomOps, drawn: Tensor, *_args: Any, **_kwargs: Any) -> bool:
    # No more bits than the dtype has: with more, numbers close to 1 would be rounded to 1.
    digits = 1 - round(math.log2(torch.finfo(drawn.dtype).eps))
    noise = (ops.bits(drawn.shape) >> np.uint64(64 - digits)) * 2.0**-digits
    drawn.copy_(torch.from_numpy(noise))
    return True


def _uniform(
    ops: _RandomOps, drawn: Tensor, _: Tensor, low: float = 0.0, high: float = 1.0, **_kwargs: Any
) -> bool:
    _rand(ops, drawn)
    drawn.mul_(high - low).add_(low)
    return True


def _randn(ops: _RandomOps, drawn: Tensor, *_args: Any, **_kwargs: Any) -> bool:
    # The Box-Muller transform.
    radius = np.sqrt(-2 * np.log(ops.uniform(drawn.shape)))
    noise = radius * np.cos(2 * np.pi * ops.uniform(drawn.shape))
    drawn.copy_(torch.from_numpy(noise))
    return True


def _normal(
    ops: _RandomOps,
    drawn: Tensor,
    mean: float | Tensor,
    std: float | Tensor = 1.0,
    *_args: Any,
    **_kwargs: Any,
) -> bool:
    _randn(ops, drawn)
    drawn.mul_(std).add_(mean)
    return True


def _normal_in_place(
    ops: _RandomOps, drawn: Tensor, _: Tensor, mean: float = 0.0, std: float = 1.0, **_kwargs: Any
) -> bool:
    return _normal(ops, drawn, mean, std)


def _exponential(
    ops: _RandomOps, drawn: Tensor, _: Tensor, rate: float = 1.0, **_kwargs: Any
) -> bool:
    drawn.copy_(torch.from_numpy(-np.log(ops.uniform(drawn.shape)) / rate))
    return True


def _bernoulli(
    ops: _RandomOps, drawn: Tensor, given: Tensor, p: float | Tensor | None = None, **_kwargs: Any
) -> bool:
    probability = given if p is None else p
    noise = torch.from_numpy(ops.uniform(drawn.shape)).to(drawn.device)
    drawn.copy_(noise < probability)
    return True


def _bernoulli_in_place(
    ops: _RandomOps, drawn: Tensor, given: Tensor, p: float | Tensor = 0.5, **_kwargs: Any
) -> bool:
    return _bernoulli(ops, drawn, given, p)


def _native_dropout(
    ops: _RandomOps,
    drawn: tuple[Tensor, Tensor],
    given: Tensor,
    p: float,
    train: bool | None = True,
    **_kwargs: Any,
) -> bool:
    if train is not False:
        output, kept = drawn
        kept.copy_(torch.from_numpy(ops.uniform(kept.shape) >= p))
        output.copy_(given * kept * (1 / (1 - p) if p < 1 else 0))
    return True


def _multinomial(
    ops: _RandomOps,
    drawn: Tensor,
    weights: Tensor,
    num_samples: int,
    replacement: bool = False,
    **_kwargs: Any,
) -> bool:
    if num_samples > 1 and not replacement:
        return False
    ends = weights.double().cpu().numpy().cumsum(-1)
    chosen = ops.uniform(drawn.shape) * ends[..., -1:]
    # The first index whose cumulative weight exceeds the drawn number.
    drawn.copy_(torch.from_numpy((ends[..., None, :] <= chosen[..., None]).sum(-1)))
    return True


def _randint(ops: _RandomOps, drawn: Tensor, high: int, *_args: Any, **_kwargs: Any) -> bool:
    return _randint_from(ops, drawn, 0, high)


def _randint_from(
    ops: _RandomOps, drawn: Tensor, low: int, high: int, *_args: Any, **_kwargs: Any
) -> bool:
    noise = (ops.bits(drawn.shape) % np.uint64(high - low)).astype(np.int64) + low
    drawn.copy_(torch.from_numpy(noise))
    return True


def _randint_like(ops: _RandomOps, drawn: Tensor, _: Tensor, *ends: int, **_kwargs: Any) -> bool:
    low, high = ends if len(ends) == 2 else (0, *ends)
    return _randint_from(ops, drawn, low, high)


_aten = torch.ops.aten
_REDRAW: dict[Any, Callable[..., bool]] = {
    _aten.rand.default: _rand,
    _aten.rand_like.default: _rand,
    _aten.uniform_.default: _uniform,
    _aten.randn.default: _randn,
    _aten.randn_like.default: _randn,
    _aten.normal_.default: _normal_in_place,
    _aten.normal.Tensor_float: _normal,
    _aten.normal.float_Tensor: _normal,
    _aten.normal.Tensor_Tensor: _normal,
    _aten.normal.float_float: _normal,
    _aten.exponential_.default: _exponential,
    _aten.bernoulli.default: _bernoulli,
    _aten.bernoulli.p: _bernoulli,
    _aten.bernoulli_.float: _bernoulli_in_place,
    _aten.bernoulli_.Tensor: _bernoulli_in_place,
    _aten.native_dropout.default: _native_dropout,
    _aten.multinomial.default: _multinomial,
    _aten.randint.default: _randint,
    _aten.randint.low: _randint_from,
    _aten.randint_like.default: _randint_like,
    _aten.randint_like.low_dtype: _randint_like,
}

"""The randomness of policies, drawn for each env from a stream of its own.

A policy chooses the actions of n envs at once, and torch would draw the noise of all of them from
one generator: what env i gets would depend on which envs it is stepped with. While
:class:`PerEnvRng` is active, torch's random functions give each row numbers that depend on the row's
seed, the number of its frame, and how much was drawn before in that frame, and on nothing else.

The numbers are those of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014): any place in its sequence can be computed at once, and so can all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_GOLDEN = (
    0x9E3779B97F4A7C15  # SplitMix64's increment: odd, and close to 2**64 over the golden ratio
)
# A frame's numbers begin so many places after those of the frame before.
_PLACES_PER_FRAME = 1 << 24
_STRIDE = np.uint64(_GOLDEN * _PLACES_PER_FRAME % 2**64)

# What policies may call that draws, whatever it does inside.
_NAMES = (
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "normal"),
    *("bernoulli", "multinomial", "poisson", "binomial", "dropout", "dropout_"),
    *("_standard_gamma", "_sample_dirichlet", "gumbel_softmax", "scaled_dot_product_attention"),
    *("alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"),
    *("feature_dropout", "multi_head_attention_forward", "bernoulli_", "cauchy_", "exponential_"),
    *("geometric_", "log_normal_", "normal_", "random_", "uniform_"),
)
_DRAWING = frozenset(
    getattr(place, name)
    for place in (torch, Tensor, functional)
    for name in _NAMES
    if hasattr(place, name)
)


class PerEnvRng(TorchFunctionMode):
    """Within its context, torch's random functions draw for each env from its own stream.

    That holds for whatever has the envs in its first dimension, or a multiple of their number, as
    when each env has several agents. Noise of other shapes, which all envs share, comes from
    torch's own generators, and so does what compiled and scripted code draws.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        """One stream for each of n envs.

        Args:
            seeds: n numbers below 2**64; streams of the same seed are the same.
        """
        super().__init__()
        self._draws = _Draws(np.array(seeds, np.uint64))

    def next_frame(self, rows: Sequence[int] | None = None) -> None:
        """What is drawn from now on is for the next frame of these rows; None: of all.

        The noise of other rows is of no use until they are in their next frame, too.
        """
        self._draws.next_frame(slice(None) if rows is None else rows)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # A dispatch mode sees all that is drawn, also by functions within functions, but makes
        # every single operation several times slower than this does.
        if func in _DRAWING:
            with self._draws:
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts the envs' own noise into what torch's random operations give."""

    def __init__(self, seeds: np.ndarray) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_envs = len(seeds)
        self._states = seeds[:, None].copy()  # of SplitMix64, where the frame's numbers begin
        self._num_drawn = 0  # numbers of each row, in this frame

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
        its_own = any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))
        if its_own or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func not in _REDRAW and func._can_decompose():  # noqa: SLF001 - no public way to ask
            # As dropout: in inference mode it comes in one piece.
            with self:
                return func.decompose(*args, **kwargs)
        # Torch checks the arguments, and makes the result of the right dtype on the right device.
        drawn = func(*args, **kwargs)
        first = drawn[0] if isinstance(drawn, tuple) else drawn
        if self._has_rows(first):
            redraw = _REDRAW.get(func)
            if redraw is None or not redraw(self, drawn, *args, **kwargs):
                self._redraw_each(drawn, func, args, kwargs)
        return drawn

    def bits(self, shape: Sequence[int]) -> np.ndarray:
        """Random uint64 ``[*shape]``, whose first dimension is the envs'."""
        per_row = math.prod(shape) // self._num_envs
        places = np.arange(self._num_drawn, self._num_drawn + per_row, dtype=np.uint64)
        self._num_drawn += per_row
        numbers = self._states + places * np.uint64(_GOLDEN)
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: np.ndarray = numbers ^ (numbers >> np.uint64(31))
        return mixed.reshape(shape)

    def uniform(self, shape: Sequence[int]) -> np.ndarray:
        """Random float64 in (0, 1), both ends excluded, of a shape as in :meth:`bits`."""
        numbers: np.ndarray = ((self.bits(shape) >> np.uint64(12)) + 0.5) * 2.0**-52
        return numbers

    def _has_rows(self, drawn: Tensor) -> bool:
        return drawn.ndim > 0 and len(drawn) > 0 and len(drawn) % self._num_envs == 0

    def _redraw_each(
        self, drawn: Tensor, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Call ``func`` for one env after the other, with a generator that was seeded for it."""
        arguments = func._schema.arguments  # noqa: SLF001 - no public way to ask
        if not any(argument.name == "generator" for argument in arguments):
            return
        generator = torch.Generator(drawn.device)
        num_rows = len(drawn)
        each = num_rows // self._num_envs
        for env, seed in enumerate(self.bits((self._num_envs,)).tolist()):
            rows = slice(env * each, (env + 1) * each)
            of_env = [
                value[rows]
                if isinstance(value, Tensor) and value.shape[:1] == (num_rows,)
                else value
                for value in args
            ]
            generator.manual_seed(seed)
            drawn[rows] = func(*of_env, **{**kwargs, "generator": generator})


# What follows draws for all rows at once: it writes into what an operation gave and is told that
# operation's arguments. False: it can't.


def _rand(draws: _Draws, drawn: Tensor, *_args: Any, **_kwargs: Any) -> bool:
    # As many bits as the dtype has: with more, what is close to 1 would be rounded to it.
    digits = 1 - round(math.log2(torch.finfo(drawn.dtype).eps))
    noise = (draws.bits(drawn.shape) >> np.uint64(64 - digits)) * 2.0**-digits
    drawn.copy_(torch.from_numpy(noise))
    return True


def _uniform(
    draws: _Draws, drawn: Tensor, _: Tensor, low: float = 0.0, high: float = 1.0, **_kwargs: Any
) -> bool:
    _rand(draws, drawn)
    drawn.mul_(high - low).add_(low)
    return True


def _randn(draws: _Draws, drawn: Tensor, *_args: Any, **_kwargs: Any) -> bool:
    # By Box and Muller.
    radius = np.sqrt(-2 * np.log(draws.uniform(drawn.shape)))
    noise = radius * np.cos(2 * np.pi * draws.uniform(drawn.shape))
    drawn.copy_(torch.from_numpy(noise))
    return True


def _normal(
    draws: _Draws,
    drawn: Tensor,
    mean: float | Tensor,
    std: float | Tensor = 1.0,
    *_args: Any,
    **_kwargs: Any,
) -> bool:
    _randn(draws, drawn)
    drawn.mul_(std).add_(mean)
    return True


def _normal_in_place(
    draws: _Draws, drawn: Tensor, _: Tensor, mean: float = 0.0, std: float = 1.0, **_kwargs: Any
) -> bool:
    return _normal(draws, drawn, mean, std)


def _exponential(
    draws: _Draws, drawn: Tensor, _: Tensor, rate: float = 1.0, **_kwargs: Any
) -> bool:
    drawn.copy_(torch.from_numpy(-np.log(draws.uniform(drawn.shape)) / rate))
    return True


def _bernoulli(
    draws: _Draws, drawn: Tensor, given: Tensor, p: float | Tensor | None = None, **_kwargs: Any
) -> bool:
    probability = given if p is None else p
    noise = torch.from_numpy(draws.uniform(drawn.shape)).to(drawn.device)
    drawn.copy_(noise < probability)
    return True


def _bernoulli_in_place(
    draws: _Draws, drawn: Tensor, given: Tensor, p: float | Tensor = 0.5, **_kwargs: Any
) -> bool:
    return _bernoulli(draws, drawn, given, p)


def _native_dropout(
    draws: _Draws,
    drawn: tuple[Tensor, Tensor],
    given: Tensor,
    p: float,
    train: bool | None = True,
    **_kwargs: Any,
) -> bool:
    if train is not False:
        output, kept = drawn
        kept.copy_(torch.from_numpy(draws.uniform(kept.shape) >= p))
        output.copy_(given * kept * (1 / (1 - p) if p < 1 else 0))
    return True


def _multinomial(
    draws: _Draws,
    drawn: Tensor,
    weights: Tensor,
    num_samples: int,
    replacement: bool = False,
    **_kwargs: Any,
) -> bool:
    if num_samples > 1 and not replacement:
        return False
    ends = weights.double().cpu().numpy().cumsum(-1)
    chosen = draws.uniform(drawn.shape) * ends[..., -1:]
    # The first whose share ends beyond it.
    drawn.copy_(torch.from_numpy((ends[..., None, :] <= chosen[..., None]).sum(-1)))
    return True


def _randint(draws: _Draws, drawn: Tensor, high: int, *_args: Any, **_kwargs: Any) -> bool:
    return _randint_from(draws, drawn, 0, high)


def _randint_from(
    draws: _Draws, drawn: Tensor, low: int, high: int, *_args: Any, **_kwargs: Any
) -> bool:
    noise = (draws.bits(drawn.shape) % np.uint64(high - low)).astype(np.int64) + low
    drawn.copy_(torch.from_numpy(noise))
    return True


def _randint_like(draws: _Draws, drawn: Tensor, _: Tensor, *ends: int, **_kwargs: Any) -> bool:
    low, high = ends if len(ends) == 2 else (0, *ends)
    return _randint_from(draws, drawn, low, high)


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

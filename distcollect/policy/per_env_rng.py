"""Random numbers of policies, drawn for each env from a stream of its own.

A policy chooses the actions of n envs at once. Torch draws the random numbers of all envs from one
generator, so the numbers of env i depend on the envs that it is stepped with. Within
:meth:`PerEnvRng.drawing`, they depend only on the env's seed, the number of its frame, and how many
numbers were drawn in that frame before.

Torch's operations that draw random numbers are replaced meanwhile; see
:mod:`distcollect.policy.redirected_ops`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distcollect.policy.redirected_ops import Replacement, has_data, redirect
from distcollect.policy.splitmix import SplitMixStreams


class PerEnvRng(SplitMixStreams):
    """Streams from which torch's random functions draw.

    That applies to tensors whose first dimension is the number of envs or a multiple of it (each
    env may have several agents). Tensors of other shapes, which all envs share, are drawn from
    torch's own generators; so is everything that compiled code and CUDA graphs draw.
    """

    def drawing(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread draws from these streams; it can be entered once.

        Raises:
            PolicyError: this torch has no way to do that.
        """
        _THREAD.rng = self
        return _redirected()


class _Thread(threading.local):
    """What belongs to one thread."""

    rng: PerEnvRng


_THREAD = _Thread()


def _replacement(
    instead: Callable[..., Tensor | None] | None, redraw: Callable[..., bool] | None
) -> Replacement:
    """Return what is called instead of an operation that draws; see the tables below."""

    def replacement(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rng = _THREAD.rng
        if instead is not None:
            drawn = instead(rng, *args)
            if drawn is not None:
                return drawn
        # Let torch check the arguments and allocate the result.
        drawn = op(*args, **kwargs)
        first = drawn[0] if isinstance(drawn, tuple) else drawn
        if (
            _has_rows(rng, first)
            and has_data(first)
            and (redraw is None or not redraw(rng, drawn, *args))
        ):
            _redraw_each(rng, drawn, op, args, kwargs)
        return drawn

    return replacement


def _has_rows(rng: PerEnvRng, drawn: Tensor) -> bool:
    num_rows = drawn.shape[0] if drawn.ndim else 0
    return num_rows > 0 and num_rows % rng.num_envs == 0


def _can_fill(rng: PerEnvRng, given: Tensor) -> bool:
    return _has_rows(rng, given) and given.is_floating_point()


def _redraw_each(
    rng: PerEnvRng, drawn: Tensor, op: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Call ``op`` once for each env, with a generator that is seeded for that env."""
    generator = torch.Generator(drawn.device)
    num_rows = len(drawn)
    rows_per_env = num_rows // rng.num_envs
    for env, seed in enumerate(rng.bits((rng.num_envs,)).tolist()):
        rows = slice(env * rows_per_env, (env + 1) * rows_per_env)
        args_of_env = [
            value[rows] if isinstance(value, Tensor) and value.shape[:1] == (num_rows,) else value
            for value in args
        ]
        generator.manual_seed(seed)
        drawn[rows] = op(*args_of_env, **{**kwargs, "generator": generator})


# Each of the following functions draws for all envs at once, instead of an operation. It gets the
# streams and the operation's arguments. It returns None if they are wrong, have no rows, or are
# unusual: then torch's operation is called.


def _uniform_(rng: PerEnvRng, given: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor | None:
    if not _can_fill(rng, given) or low > high:
        return None
    # No more bits than the dtype has: with more, numbers close to 1 would be rounded to 1.
    digits = 1 - round(math.log2(torch.finfo(given.dtype).eps))
    noise = (rng.bits(given.shape) >> np.uint64(64 - digits)) * 2.0**-digits
    given.copy_(torch.from_numpy(noise))
    if (low, high) != (0, 1):
        given.mul_(high - low).add_(low)
    return given


def _normal_(rng: PerEnvRng, given: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor | None:
    if not _can_fill(rng, given) or not std >= 0:
        return None
    given.copy_(torch.from_numpy(rng.normal(given.shape)))
    if (mean, std) != (0, 1):
        given.mul_(std).add_(mean)
    return given


def _exponential_(rng: PerEnvRng, given: Tensor, rate: float = 1.0) -> Tensor | None:
    if not _can_fill(rng, given) or not rate > 0:
        return None
    return given.copy_(torch.from_numpy(-np.log(rng.uniform(given.shape)) / rate))


def _normal_of_tensors(rng: PerEnvRng, mean: Tensor, std: Tensor) -> Tensor | None:
    usual = mean.is_cpu and mean.dtype == std.dtype == torch.float32 and mean.shape == std.shape
    if (
        not usual
        or not _has_rows(rng, mean)
        or not np.minimum.reduce(std.detach().numpy(), None) >= 0
    ):
        return None
    return torch.from_numpy(rng.normal(mean.shape)).float().mul_(std).add_(mean)


def _multinomial_of_rows(
    rng: PerEnvRng, weights: Tensor, num_samples: int, _replacement: bool = False
) -> Tensor | None:
    """One sample of each row."""
    if weights.ndim != 2 or weights.dtype is not torch.float32 or not weights.is_cpu:
        return None
    array = weights.detach().numpy()
    if num_samples != 1 or not array.size or not _has_rows(rng, weights):
        return None
    ends = np.add.accumulate(array, -1, np.float64)
    totals = ends[:, -1:]
    chosen = rng.uniform(totals.shape) * totals
    # The first index whose cumulative weight exceeds the drawn number. There is none if the weights
    # of a row add up to zero or infinity.
    index = np.add.reduce(ends <= chosen, -1, np.int64, keepdims=True)
    if not (
        np.minimum.reduce(array, None) >= 0 and np.maximum.reduce(index, None) < array.shape[1]
    ):
        return None
    return torch.from_numpy(index)


_DRAW: dict[str, Callable[..., Tensor | None]] = {
    "uniform_": _uniform_,
    "normal_": _normal_,
    "normal.Tensor_Tensor": _normal_of_tensors,
    "exponential_": _exponential_,
    "multinomial": _multinomial_of_rows,
}

# Each of the following functions draws for all envs at once, after an operation. It gets the
# streams, the operation's result, which it overwrites, and its arguments. It returns False where it
# can't do that.


def _normal(rng: PerEnvRng, drawn: Tensor, mean: float | Tensor, std: float | Tensor = 1.0) -> bool:
    drawn.copy_(torch.from_numpy(rng.normal(drawn.shape)))
    drawn.mul_(std).add_(mean)
    return True


def _bernoulli(rng: PerEnvRng, drawn: Tensor, probability: float | Tensor) -> bool:
    noise = torch.from_numpy(rng.uniform(drawn.shape)).to(drawn.device)
    drawn.copy_(noise < probability)
    return True


def _bernoulli_(rng: PerEnvRng, drawn: Tensor, _: Tensor, p: float | Tensor = 0.5) -> bool:
    return _bernoulli(rng, drawn, p)


def _native_dropout(
    rng: PerEnvRng,
    drawn: tuple[Tensor, Tensor],
    given: Tensor,
    p: float,
    train: bool | None = True,
) -> bool:
    if train is not False:
        output, kept = drawn
        kept.copy_(torch.from_numpy(rng.uniform(kept.shape) < 1 - p))
        output.copy_(given * kept.to(given.dtype).div_(1 - p) if p < 1 else 0 * given)
    return True


def _multinomial(
    rng: PerEnvRng, drawn: Tensor, weights: Tensor, num_samples: int, replacement: bool = False
) -> bool:
    if num_samples > 1 and not replacement:
        return weights.ndim < 2  # then all envs share them
    ends = weights.detach().double().cpu().numpy().cumsum(-1)
    chosen = rng.uniform(drawn.shape) * ends[..., -1:]
    drawn.copy_(torch.from_numpy((ends[..., None, :] <= chosen[..., None]).sum(-1)))
    return True


def _random_from(
    rng: PerEnvRng, drawn: Tensor, _: Tensor, low: int, high: int | None = None
) -> bool:
    if high is None:
        return False
    noise = (rng.bits(drawn.shape) % np.uint64(high - low)).astype(np.int64) + low
    drawn.copy_(torch.from_numpy(noise))
    return True


_REDRAW: dict[str, Callable[..., bool]] = {
    "normal.Tensor_float": _normal,
    "normal.float_Tensor": _normal,
    "normal.Tensor_Tensor": _normal,
    "bernoulli": _bernoulli,
    "bernoulli_.float": _bernoulli_,
    "bernoulli_.Tensor": _bernoulli_,
    "native_dropout": _native_dropout,
    "multinomial": _multinomial,
    "random_.from": _random_from,
}

# Operations with a parameter "generator" for which there is no function here: they are called once
# for each env.
_CALLED_PER_ENV = (
    *("cauchy_", "geometric_", "log_normal_", "random_", "random_.to"),
    *("poisson", "binomial", "_standard_gamma", "_sample_dirichlet"),
)


# Not when the first seed is given: threads could do that at the same time.
_redirected = redirect(
    {
        name: _replacement(_DRAW.get(name), _REDRAW.get(name))
        for name in {*_DRAW, *_REDRAW, *_CALLED_PER_ENV}
    }
)

"""Random numbers of policies, drawn for each env from a stream of its own.

A policy chooses the actions of n envs at once. Torch draws the random numbers of all envs from one
generator, so the numbers of env i depend on the envs that it is stepped with. Within
:meth:`PerEnvRng.drawing`, they depend only on the env's seed, the number of its frame, and how many
numbers were drawn in that frame before.

Torch's operations that draw random numbers are replaced meanwhile, in the threads that ask for it.
Torch looks up the function that carries out an operation by "dispatch keys": device, autograd and
others. The replacements are registered for a key that torch doesn't use, and this key is added for
the calling thread. So calls from C++ functions of torch, such as dropout, and from scripted code
come here too. All other operations pass on to the next key within C++, which costs nothing that can
be measured.
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
from torch.library import Library, fallthrough_kernel

from distcollect.errors import PolicyError
from distcollect.policy.splitmix import SplitMixStreams
from distcollect.version import TESTED

# Torch keeps this key for the package torchdistx, which is no longer developed.
KEY_NAME = "DeferredInit"

_REGISTERED: list[Any] = []  # torch forgets a registration together with its Library


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


def _normal_of_tensors(rng: PerEnvRng, mean: Tensor, std: Tensor) -> Tensor | None:
    usual = mean.is_cpu and mean.dtype == std.dtype == torch.float32 and mean.shape == std.shape
    if (
        not usual
        or not _has_rows(rng, mean)
        or not np.minimum.reduce(std.detach().numpy(), None) >= 0
    ):
        return None
    return torch.from_numpy(rng.normal(mean.shape)).float().mul_(std).add_(mean)


def _multinomial(
    rng: PerEnvRng, weights: Tensor, num_samples: int, replacement: bool = False
) -> Tensor | None:
    is_independent = num_samples == 1 or (replacement and num_samples > 0)
    if not is_independent or weights.ndim not in (1, 2) or not weights.numel():
        return None
    shape = (*weights.shape[:-1], num_samples)
    if shape[0] % rng.num_envs:
        return None
    usual = weights.is_cpu and weights.dtype is torch.float32
    array = (weights if usual else weights.double().cpu()).detach().numpy()
    ends = np.add.accumulate(array, -1, np.float64)
    chosen = rng.uniform(shape) * ends[..., -1:]
    # The first index whose cumulative weight exceeds the drawn number. There is none if the weights
    # of a row add up to zero or infinity.
    index = np.add.reduce(ends[..., None, :] <= chosen[..., None], -1, np.int64)
    if not (
        np.minimum.reduce(array, None) >= 0 and np.maximum.reduce(index, None) < array.shape[-1]
    ):
        return None
    return torch.from_numpy(index).to(weights.device)


_DRAW: dict[str, Callable[..., Tensor | None]] = {
    "uniform_": _uniform_,
    "normal_": _normal_,
    "normal.Tensor_Tensor": _normal_of_tensors,
    "multinomial": _multinomial,
}

# Each of the following functions draws for all envs at once, after an operation. It gets the
# streams, the operation's result, which it overwrites, and its arguments. It returns False where it
# can't do that.


def _normal(rng: PerEnvRng, drawn: Tensor, mean: float | Tensor, std: float | Tensor = 1.0) -> bool:
    drawn.copy_(torch.from_numpy(rng.normal(drawn.shape)))
    drawn.mul_(std).add_(mean)
    return True


def _bernoulli(rng: PerEnvRng, drawn: Tensor, probability: float | Tensor) -> bool:
    drawn.copy_(torch.from_numpy(rng.uniform(drawn.shape)).to(drawn.device) < probability)
    return True


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
    "bernoulli_.float": lambda rng, drawn, _, p=0.5: _bernoulli(rng, drawn, p),
    "bernoulli_.Tensor": lambda rng, drawn, _, p: _bernoulli(rng, drawn, p),
    "native_dropout": _native_dropout,
    "multinomial": lambda *given: given[2].ndim < 2,  # all envs share these weights
    "random_.from": _random_from,
}

# Operations with a parameter "generator" for which there is no function here: they are called once
# for each env.
_CALLED_PER_ENV = (
    *("cauchy_", "exponential_", "geometric_", "log_normal_", "random_", "random_.to"),
    *("poisson", "binomial", "_standard_gamma", "_sample_dirichlet"),
)


def register() -> Callable[[], AbstractContextManager[Any]]:
    """Register what is called instead of torch's operations.

    Returns:
        Makes a context in which that is called; each can be entered once. On a torch without the
        key, or a function that this needs, it raises PolicyError.
    """
    native: Any = torch._C
    try:
        key = native._dispatch_key_parse(KEY_NAME)
        keys = native.DispatchKeySet(key)
        included, excluded = native._IncludeDispatchKeyGuard, native._ExcludeDispatchKeyGuard
    except (AttributeError, RuntimeError) as error:
        lacking = str(error)

        def refuse() -> AbstractContextManager[Any]:
            raise PolicyError(
                f"torch {torch.__version__} has no way to draw a policy's random numbers from one "
                f"seed for each env ({lacking}); use torch {TESTED['torch']}, or don't set a seed"
            )

        return refuse

    def kernel_for(name: str) -> Callable[..., Any]:
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        instead, redraw = _DRAW.get(name), _REDRAW.get(name)

        def torchs_own(*args: Any, **kwargs: Any) -> Any:
            with excluded(keys):
                return op(*args, **kwargs)

        def kernel(keys_of_call: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_torchs(args, kwargs):
                # The operation may come here again, from within vmap, with the data.
                return op.redispatch(keys_of_call - keys, *args, **kwargs)
            rng = _THREAD.rng
            if instead is not None and (drawn := instead(rng, *args)) is not None:
                return drawn
            # Let torch check the arguments and allocate the result.
            drawn = torchs_own(*args, **kwargs)
            first = drawn[0] if isinstance(drawn, tuple) else drawn
            if (
                _has_rows(rng, first)
                and _has_data(first)
                and (redraw is None or not redraw(rng, drawn, *args))
            ):
                _redraw_each(rng, drawn, torchs_own, args, kwargs)
            return drawn

        return kernel

    make: Any = Library  # torch declares no types
    others, ours = make("_", "IMPL"), make("aten", "IMPL")
    _REGISTERED.extend([others, ours])
    others.fallback(fallthrough_kernel, KEY_NAME)
    for name in {*_DRAW, *_REDRAW, *_CALLED_PER_ENV}:
        ours.impl(name, kernel_for(name), KEY_NAME, with_keyset=True)
    return lambda: included(key)


def _is_torchs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True for what torch carries out: it has a generator or no data, or is captured."""
    if kwargs.get("generator") is not None:
        return True
    for arg in args[:2]:
        if isinstance(arg, Tensor):
            # A CUDA graph would hold the numbers of one frame, and give them again each time.
            captures = arg.is_cuda and torch.cuda.is_current_stream_capturing()
            return captures or not _has_data(arg)
    return False


def _has_data(tensor: Tensor) -> bool:
    """Return False for a stand-in, as while code is compiled or in vmap: it has no data."""
    try:
        return tensor.untyped_storage().device.type != "meta"
    except NotImplementedError:
        return False


# Not when the first seed is given: threads could do that at the same time.
_redirected = register()

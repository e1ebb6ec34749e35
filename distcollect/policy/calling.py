"""How a policy of any accepted kind is called, with which inputs, and its values as tensors."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from sys import getrefcount
from typing import Any, get_origin, get_type_hints

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from distcollect.errors import PolicyError, PolicyKeyError, PolicySignatureError
from distcollect.policy.normalize import Normalizer
from distcollect.policy.weight_layout import called_by
from distcollect.rollout.spaces import Arrays, Key, as_key, dtype_name, nested, unflatten

log = logging.getLogger(__name__)

Tensors = dict[Key, torch.Tensor]

# How many tensors have a memory, by its address.
_num_users: Callable[[int], int] = torch._C._storage_Use_Count


class Inputs:
    """The arrays of the observations, and of the state, as tensors for the policy.

    They have memory of their own: the policy may change them, and return them.

    Attributes:
        num_envs: n.
        tensors: ``[n, *shape]`` for each key.
        updates: each updates one of them from its array.
    """

    def __init__(
        self,
        observation: Arrays,
        module: nn.Module | None,
        device: torch.device | None,
        normalizer: Normalizer | None = None,
    ) -> None:
        """Make inputs for ``module``.

        Args:
            observation: ``{key: [n, *shape]}``, the same arrays at every step.
            module: the policy if it is a module; its dtype and device decide.
            device: where the inputs go; None: where the module's parameters are.
            normalizer: what the observations go through; it is moved there. None: nothing.
        """
        self._dtype = floating_dtype(module)
        if device is None and module is not None:
            device = next((parameter.device for parameter in module.parameters()), None)
        self._device = device
        self.num_envs = len(next(iter(observation.values())))
        self.tensors: Tensors = {}
        self.updates: list[Callable[[], object]] = []
        self._memories: list[int] = []  # of each one
        self._normalizer = normalizer
        self._normalized: list[Key] = []
        if normalizer is not None:
            moved(normalizer, device or torch.device("cpu"))
            self._normalized = [leaf.key for leaf in normalizer.leaves]
        self.add(observation)

    def add(self, arrays: Arrays) -> None:
        """Add arrays, which are rewritten for each call of the policy."""
        for key, array in arrays.items():
            source = torch.from_numpy(array)
            is_normalized = key in self._normalized
            # Only floats are cast: an integer may be an index, and how to scale a byte image is for
            # the policy to decide.
            dtype = source.dtype
            if is_normalized or dtype.is_floating_point:
                own = dtype if dtype.is_floating_point else torch.float32
                dtype = self._dtype or own
            target = source.to(device=self._device, dtype=dtype, copy=True)
            if is_normalized and self._normalizer is not None:
                self.updates.append(self._normalizer.filling(key, target, source))
            elif target.is_cpu and dtype is not torch.bfloat16:
                # A small array is copied in a tenth of the time that torch takes.
                self.updates.append(partial(np.copyto, target.numpy(), array))
            else:
                self.updates.append(partial(target.copy_, source))
            self.tensors[key] = target
            self._memories.append(target.untyped_storage()._cdata)

    def users(self) -> list[int]:
        """Return how many refer to each input or its memory: more, once a policy keeps one."""
        return [*map(getrefcount, self.tensors.values()), *map(_num_users, self._memories)]


def moved(policy: nn.Module, device: torch.device) -> nn.Module:
    """Return ``policy``, moved to ``device``.

    Raises:
        PolicyError: this process can't use the device.
    """
    try:
        return policy.to(device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise PolicyError(
            f"the policy can't be moved to {str(device)!r} on this host ({error}). Workers compute "
            "where the trainer's policy is, unless policy_device names another device, such as "
            "policy_device='cpu'"
        ) from error


def floating_dtype(module: nn.Module | None) -> torch.dtype | None:
    """Return the dtype of the module's floating-point parameters; None if it has none."""
    parameters: Iterable[torch.Tensor] = module.parameters() if module is not None else ()
    return next((p.dtype for p in parameters if p.is_floating_point()), None)


def calling_convention(
    policy: Callable[..., Any],
    inputs: Inputs,
    observation_space: gym.Space[Any],
    *,
    copies: bool = False,
) -> Callable[[], Any]:
    """Return a callable without arguments that calls ``policy`` with ``inputs`` as it expects them.

    ``copies``: it keeps what it is given, so each call gives it new tensors.

    Raises:
        PolicySignatureError: the policy has a parameter that is no entry of the observation.
    """
    entries = nested(inputs.tensors)
    if takes_tensordict(policy):
        template = TensorDict(entries, batch_size=[inputs.num_envs])

        def call_with_tensordict() -> Any:
            td = template.clone(recurse=copies)
            output = policy(td)
            return td if output is None else output

        return call_with_tensordict

    named_entries = entries
    if isinstance(observation_space, gym.spaces.Dict):
        observation = {name: entries[str(name)] for name in observation_space}
    else:
        observation = unflatten(observation_space, iter(inputs.tensors.values()))
        named_entries = {name: entries[name] for name in entries if name != "observation"}
    parameters = parameters_of(policy)
    positional, named = assign(parameters, observation, named_entries)
    if positional and isinstance(positional[0], dict) and named.keys() & observation.keys():
        log.warning(
            "the policy's parameter %r gets the whole observation, as no entry has this name: %s",
            parameters[0].name,
            ", ".join(map(str, observation)),
        )
    if copies or any(isinstance(value, dict | tuple) for value in (*positional, *named.values())):
        # New containers for each call, as the policy may change the ones it gets.
        copied = partial(_copied, deep=copies)
        return lambda: policy(
            *map(copied, positional), **{name: copied(value) for name, value in named.items()}
        )
    return partial(policy, *positional, **named)


def assign(
    parameters: Sequence[inspect.Parameter], observation: Any, entries: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments for a policy's parameters, as (positional, named).

    A parameter that has the name of an entry gets that entry. Otherwise the first parameter gets
    the whole observation.

    Raises:
        PolicySignatureError: another parameter is not the name of an entry and has no default.
    """
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for index, parameter in enumerate(parameters):
        name = parameter.name
        if parameter.kind is parameter.VAR_KEYWORD:
            named = {**entries, **named}
        elif name in entries and parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(entries[name])
        elif name in entries:
            named[name] = entries[name]
        elif index == 0:
            positional.append(observation)
        elif (
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        ):
            known = ", ".join(entries)
            raise PolicySignatureError(
                "Arguments to policy.forward are incompatible with entries in the observation: the "
                f"policy's parameter {name!r} is no entry of it; "
                + (f"its entries are: {known}" if known else "it is one array, without entries")
                + f". If {name!r} is the state of a recurrent policy, give the policy a method "
                "initial_state(num_envs) that returns its first values by name, or a TorchRL env a "
                "TensorDictPrimer. Otherwise give the parameter a default, or leave it out"
            )
    return positional, named


def _copied(value: Any, *, deep: bool) -> Any:
    """Return ``value`` with new dicts and tuples around the same tensors; ``deep``: around new."""
    if isinstance(value, dict):
        return {name: _copied(part, deep=deep) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_copied(part, deep=deep) for part in value)
    return value.clone() if deep else value


_NOT_FINITE = " with NaN or infinity in it"


def raised(error: BaseException, given: Iterable[tuple[Any, Any]]) -> PolicyError:
    """Return the error for a policy that raised, which says what the policy was given.

    Args:
        error: what it raised.
        given: the entries of its input.
    """
    entries = ", ".join(
        f"{'.'.join(as_key(key))!r} {list(value.shape)} {dtype_name(value.dtype)}"
        + _NOT_FINITE * (not value.isfinite().all())
        for key, value in given
        if isinstance(value, torch.Tensor)
    )
    said = f"the policy raised {type(error).__name__}: {error} (it was given {entries})"
    if _NOT_FINITE in entries:
        said += "; in an observation, these come from the env"
    if isinstance(error, KeyError):
        return PolicyKeyError(f"{said}; in_keys of a TensorDictModule must be among these")
    return PolicyError(said)


def takes_tensordict(policy: Callable[..., Any]) -> bool:
    """Return True if ``policy`` is called with a TensorDict.

    That is so for a TensorDictModule, and for a callable whose only parameter is named ``td`` or
    ``tensordict``, or is annotated as a TensorDict.
    """
    policy = called_by(policy)
    if isinstance(policy, TensorDictModuleBase):
        return True
    parameters = parameters_of(policy)
    if len(parameters) != 1:
        return False
    if parameters[0].name in {"td", "tensordict"}:
        return True
    try:
        function = policy.forward if isinstance(policy, nn.Module) else policy
        if not inspect.isroutine(function):
            function = type(function).__call__
        hint = get_type_hints(function).get(parameters[0].name)
    except Exception:  # noqa: BLE001 - an annotation is any expression, or no expression at all
        hint = None
    # In Python 3.10, dict[str, Tensor] is a type, but no class.
    return isinstance(hint, type) and get_origin(hint) is None and issubclass(hint, TensorDictBase)


def parameters_of(policy: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a policy that is not a TensorDictModule."""
    policy = called_by(policy)  # the parameters of a CudaGraphModule itself could be anything
    function = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        # A builtin without a signature gets the observation.
        return [inspect.Parameter("observation", inspect.Parameter.POSITIONAL_ONLY)]


def to_tensor(value: Any, key: Key) -> torch.Tensor:
    """Return ``value`` as a tensor that numpy can view: on the CPU, without gradients, no bfloat16.

    Raises:
        PolicyError: torch can't make a tensor of it.
    """
    if not isinstance(value, torch.Tensor):
        try:
            value = torch.as_tensor(value)
        except (RuntimeError, TypeError, ValueError) as err:
            kind = "None" if value is None else type(value).__name__
            hint = ": is its `return` missing?" if value is None else ""
            if isinstance(value, tuple | list):
                hint = ": give each of its parts a name of its own"
            raise PolicyError(
                f"the policy returned {kind} as {'.'.join(key)!r}, which is not a tensor or "
                f"array-like{hint or ': return one'}"
            ) from err
    if value.requires_grad:  # also within no_grad(): a view of a parameter
        value = value.detach()
    tensor: torch.Tensor = value.cpu().resolve_conj().resolve_neg()
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor

"""How a policy of any accepted kind is called, and with which inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, get_origin, get_type_hints

import gymnasium as gym
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from distcollect.errors import PolicyError, PolicySignatureError
from distcollect.policy.weight_layout import called_by
from distcollect.rollout.spaces import Arrays, Key, nested

Tensors = dict[Key, torch.Tensor]


class Inputs:
    """The arrays of the observations, and of the state, as tensors for the policy.

    Attributes:
        num_envs: n.
        tensors: ``[n, *shape]`` for each key; views of the arrays where dtype and device match.
        copies: (tensor, view of its array) for all others.
    """

    def __init__(
        self, observation: Arrays, module: nn.Module | None, device: torch.device | None
    ) -> None:
        """Make inputs for ``module``.

        Args:
            observation: ``{key: [n, *shape]}``, the same arrays at every step.
            module: the policy if it is a module; its dtype and device decide.
            device: where the inputs go; None: where the module's parameters are.
        """
        dtype = floating_dtype(module)
        if device is None and module is not None:
            device = next((parameter.device for parameter in module.parameters()), None)
        self.num_envs = len(next(iter(observation.values())))
        self.tensors: Tensors = {}
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for key, array in observation.items():
            source = torch.from_numpy(array)
            # Only floats are cast: an integer may be an index, and how to scale a byte image is for
            # the policy to decide.
            wanted = dtype if dtype and source.is_floating_point() else source.dtype
            target = source.to(device=device, dtype=wanted)
            if target is not source:
                self.copies.append((target, source))
            self.tensors[key] = target

    def refresh(self) -> None:
        """Update the copies from the arrays."""
        for target, source in self.copies:
            target.copy_(source)

    def entries(self) -> dict[str, Any]:
        """Top-level entries: tensors, or nested dicts of them."""
        return nested(self.tensors)

    def tensordict(self) -> Callable[[], TensorDict]:
        """A function that returns the inputs in a new TensorDict ``[n]`` for each policy call."""
        template = TensorDict(self.entries(), batch_size=[self.num_envs])
        make: Callable[[], TensorDict] = template.copy
        return make


def moved(policy: nn.Module, device: torch.device) -> nn.Module:
    """``policy``, moved to ``device``.

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
    """The dtype of the module's floating-point parameters; None if it has none."""
    parameters: Iterable[torch.Tensor] = module.parameters() if module is not None else ()
    return next((p.dtype for p in parameters if p.is_floating_point()), None)


def calling_convention(
    policy: Callable[..., Any], inputs: Inputs, observation_space: gym.Space[Any]
) -> Callable[[], Any]:
    """A callable without arguments that calls ``policy`` with ``inputs`` as it expects them.

    Raises:
        PolicySignatureError: the policy has a parameter that is no entry of the observation.
    """
    if takes_tensordict(policy):
        make = inputs.tensordict()

        def call_with_tensordict() -> Any:
            td = make()
            output = policy(td)
            return td if output is None else output

        return call_with_tensordict

    entries = inputs.entries()
    observation: Any
    if isinstance(observation_space, gym.spaces.Dict):
        observation = {name: entries[name] for name in observation_space}
        named_entries = entries
    else:
        observation = _as_tuple(observation_space, entries["observation"])
        named_entries = {name: entries[name] for name in entries if name != "observation"}
    positional, named = assign(parameters_of(policy), observation, named_entries)
    if any(isinstance(value, dict | tuple) for value in (*positional, *named.values())):
        # New containers for each call, as the policy may change the ones it gets.
        return lambda: policy(
            *map(_copied, positional), **{name: _copied(value) for name, value in named.items()}
        )
    return partial(policy, *positional, **named)


def assign(
    parameters: Sequence[inspect.Parameter], observation: Any, entries: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments for a policy's parameters, as (positional, named).

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
            raise PolicySignatureError(
                "Arguments to policy.forward are incompatible with entries in the observation: the "
                f"policy's parameter {name!r} is no entry of it; its entries are: "
                f"{', '.join(entries) or 'none'}"
            )
    return positional, named


def _copied(value: Any) -> Any:
    """``value`` with new dicts and tuples around the same tensors."""
    if isinstance(value, dict):
        return {name: _copied(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    return value


def _as_tuple(space: gym.Space[Any], value: Any) -> Any:
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_as_tuple(part, value[str(i)]) for i, part in enumerate(space))
    if isinstance(space, gym.spaces.Dict):
        return {name: _as_tuple(part, value[name]) for name, part in space.items()}
    return value


def takes_tensordict(policy: Callable[..., Any]) -> bool:
    """Whether ``policy`` is called with a TensorDict.

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
    except (NameError, TypeError):
        hint = None
    # In Python 3.10, dict[str, Tensor] is a type, but no class.
    return isinstance(hint, type) and get_origin(hint) is None and issubclass(hint, TensorDictBase)


def parameters_of(policy: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a policy that is not a TensorDictModule."""
    policy = called_by(policy)  # the parameters of a CudaGraphModule itself could be anything
    function = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        # A builtin without a signature gets the observation.
        return [inspect.Parameter("observation", inspect.Parameter.POSITIONAL_ONLY)]


def to_tensor(value: Any, name: object) -> torch.Tensor:
    """``value`` as a tensor that numpy can view: on the CPU, without gradients, no bfloat16.

    Args:
        value: a tensor, or something that torch makes a tensor of.
        name: its key, for messages.

    Raises:
        PolicyError: torch can't make a tensor of it.
    """
    if not isinstance(value, torch.Tensor):
        try:
            value = torch.as_tensor(value)
        except (RuntimeError, TypeError, ValueError) as err:
            where = ".".join(name) if isinstance(name, tuple) else name
            kind = "None" if value is None else type(value).__name__
            raise PolicyError(
                f"the policy returned {kind} as {where!r}, which is not a tensor or array-like"
            ) from err
    if value.requires_grad:  # also within no_grad(): a view of a parameter
        value = value.detach()
    if value.is_cuda:
        value = value.cpu()
    tensor: torch.Tensor = value.float() if value.dtype is torch.bfloat16 else value
    return tensor

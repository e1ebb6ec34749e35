"""How a policy of any accepted kind is called, and what it is given."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from types import ModuleType
from typing import Any, get_type_hints

import gymnasium as gym
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from distcollect.errors import PolicyError
from distcollect.rollout.spaces import Arrays, Key, nested

Tensors = dict[Key, torch.Tensor]


class Inputs:
    """The observation arrays as tensors that the policy can take."""

    def __init__(
        self, observation: Arrays, module: nn.Module | None, device: torch.device | None
    ) -> None:
        dtype = _floating_dtype(module)
        if device is None and module is not None:
            device = next((parameter.device for parameter in module.parameters()), None)
        self.num_envs = len(next(iter(observation.values())))
        self.tensors: Tensors = {}
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for key, array in observation.items():
            source = torch.from_numpy(array)
            # Only floats are cast: an integer may be an index, and a byte image's scale is the
            # policy's own business.
            wanted = dtype if dtype and source.is_floating_point() else source.dtype
            target = source.to(device=device, dtype=wanted)
            if target is not source:
                self.copies.append((target, source))
            self.tensors[key] = target

    def refresh(self) -> None:
        """Bring the copies up to date; inputs that need none are the arrays themselves."""
        for target, source in self.copies:
            target.copy_(source)

    def entries(self) -> dict[str, Any]:
        """Top-level entries: tensors, or nested dicts of them."""
        return nested(self.tensors)

    def tensordict(self) -> Callable[[], TensorDict]:
        """Makes a TensorDict ``[n]`` around the inputs; a new shell for each call of the policy."""
        template = TensorDict(self.entries(), batch_size=[self.num_envs])
        make: Callable[[], TensorDict] = template.copy
        return make


def _floating_dtype(module: nn.Module | None) -> torch.dtype | None:
    parameters: Iterable[torch.Tensor] = module.parameters() if module is not None else ()
    return next((p.dtype for p in parameters if p.is_floating_point()), None)


def calling_convention(
    policy: Callable[..., Any], inputs: Inputs, observation_space: gym.Space[Any]
) -> Callable[[], Any]:
    """How ``policy`` is called, as a callable without arguments.

    Raises:
        PolicyError: it needs a parameter that is no entry of the observation.
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
    positional, named = _assign(parameters_of(policy), observation, named_entries)
    if any(isinstance(value, dict | tuple) for value in (*positional, *named.values())):
        # The policy may take what it gets apart.
        return lambda: policy(
            *map(_rebuilt, positional), **{name: _rebuilt(value) for name, value in named.items()}
        )
    return partial(policy, *positional, **named)


def _assign(
    parameters: Sequence[inspect.Parameter], observation: Any, entries: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments for a policy's parameters: entries by name, else the observation for the first.

    Raises:
        PolicyError: another parameter is no entry's name and has no default.
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
            raise PolicyError(
                f"the policy's parameter {name!r} is no entry of the observation; there are: "
                f"{', '.join(entries) or 'none'}"
            )
    return positional, named


def _rebuilt(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rebuilt(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_rebuilt, value))
    return value


def _as_tuple(space: gym.Space[Any], value: Any) -> Any:
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_as_tuple(part, value[str(i)]) for i, part in enumerate(space))
    if isinstance(space, gym.spaces.Dict):
        return {name: _as_tuple(part, value[name]) for name, part in space.items()}
    return value


def takes_tensordict(policy: Callable[..., Any]) -> bool:
    """Whether ``policy`` is called with a TensorDict.

    It is if it is a TensorDictModule, or has one parameter that is named ``td`` or ``tensordict``
    or annotated as a TensorDict.
    """
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
    return isinstance(hint, type) and issubclass(hint, TensorDictBase)


def parameters_of(policy: Callable[..., Any]) -> list[inspect.Parameter]:
    """Those of a policy that is no TensorDictModule."""
    function = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        # A builtin without a signature: it gets the observation.
        return [inspect.Parameter("observation", inspect.Parameter.POSITIONAL_ONLY)]


def to_tensor(value: Any, name: object) -> torch.Tensor:
    """``value`` as a tensor that numpy can look at.

    Raises:
        PolicyError: it is nothing of the kind.
    """
    if not isinstance(value, torch.Tensor):
        try:
            value = torch.as_tensor(value)
        except (RuntimeError, TypeError, ValueError) as err:
            where = ".".join(name) if isinstance(name, tuple) else name
            kind = "None" if value is None else type(value).__name__
            raise PolicyError(
                f"the policy returned {kind} as {where!r}, which is no tensor and can't be made one"
            ) from err
    if value.requires_grad:  # a view of a parameter does also without gradients
        value = value.detach()
    if value.is_cuda:
        value = value.cpu()
    tensor: torch.Tensor = value.float() if value.dtype is torch.bfloat16 else value
    return tensor


def as_key(name: str | Key) -> Key:
    """The key of an entry as TensorDicts name it."""
    return (name,) if isinstance(name, str) else name


def keeps_tensors(module: nn.Module) -> Callable[[], bool]:
    """Look at the tensors within ``module`` now; the result tells whether it holds others since.

    Parameters and buffers that were changed in place are none. What the module keeps elsewhere, as
    in a global variable, isn't seen.
    """
    before = _tensors_within(module)

    def others() -> bool:
        after = _tensors_within(module)
        return before is None or after is None or not after.keys() <= before.keys()

    return others


_SEARCHED_AT_MOST = 100_000  # a module may refer to anything, a whole dataset for one


def _tensors_within(module: nn.Module) -> dict[int, torch.Tensor] | None:
    """The tensors that are reached from ``module``, by id; None if there is too much to search."""
    found: dict[int, torch.Tensor] = {}
    seen: dict[int, Any] = {}
    ahead: list[Any] = [module]
    while ahead:
        thing = ahead.pop()
        if id(thing) in seen or isinstance(thing, type | ModuleType | str | bytes):
            continue
        if len(seen) >= _SEARCHED_AT_MOST:
            return None
        seen[id(thing)] = thing
        if isinstance(thing, torch.Tensor):
            found[id(thing)] = thing
        elif isinstance(thing, Mapping):
            ahead.extend(thing.values())
        elif isinstance(thing, Set | Sequence | deque):
            ahead.extend(thing)
        ahead.extend(getattr(thing, "__dict__", {}).values())
    return found

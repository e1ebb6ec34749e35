"""Calls the user's policy with the TensorDicts of TorchRL envs, as TorchRL does.

This module imports torchrl, and is imported only where TorchRL envs are stepped.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from tensordict.nn import TensorDictModuleBase, set_interaction_type
from torch import nn
from torch.distributions import Distribution
from torchrl.envs import InitTracker
from torchrl.modules.tensordict_module.exploration import set_exploration_modules_spec_from_env

from distcollect.common import gpus
from distcollect.common.random_state import random_state_restored
from distcollect.engine.plan import WorkerPlan
from distcollect.errors import PolicyError, users_errors
from distcollect.integrations.torchrl.envs import TorchRLEnvs
from distcollect.policy.base import Exploration
from distcollect.policy.calling import (
    assign,
    floating_dtype,
    moved,
    parameters_of,
    raised,
    takes_tensordict,
)
from distcollect.policy.live_weights import buffers_restored
from distcollect.policy.noise import ExplorationNoise
from distcollect.policy.weight_layout import has_lazy_weights, module_of

Call = Callable[[TensorDictBase], Any]


class TensorDictPolicy:
    """The user's policy of any accepted kind, as a callable that writes into a TensorDict.

    Attributes:
        module: the module that has the weights; None if there are none.
    """

    def __init__(self, plan: WorkerPlan, envs: TorchRLEnvs) -> None:
        """Bind the policy of ``plan`` to the specs of the envs.

        Raises:
            PolicySignatureError: the policy has a parameter that is no entry of the observation.
            PolicyError: the policy has noise of ours, its device can't be used here, or a policy
                with lazy modules, which is called once here, raised.
        """
        policy, device = plan.policy, plan.device
        if isinstance(policy, ExplorationNoise):
            raise PolicyError(
                f"{type(policy).__name__} needs Gymnasium envs; with TorchRL envs, put TorchRL's "
                "EGreedyModule, AdditiveGaussianModule or OrnsteinUhlenbeckProcessModule behind "
                "the policy"
            )
        self.module = module_of(policy)
        if self.module is not None and device is not None:
            self.module = moved(self.module, device)
        if (whole := policy if isinstance(policy, nn.Module) else self.module) is not None:
            if plan.adds_transforms:
                _add_transforms(envs, whole)
            set_exploration_modules_spec_from_env(whole, envs.members[0])
        if callable(bind := getattr(policy, "set_action_spec_from_env", None)):
            bind(envs.members[0])
        self._exploration = plan.exploration
        self._action_keys = list(envs.members[0].action_keys)
        device, env_device = gpus.numbered(device), gpus.numbered(plan.env_device)
        self._device = device
        # As TorchRL has it: a policy on another device than its envs gets copies, and a TensorDict
        # says on which device it is only if the user named the devices.
        self._casts = device is not None and device != envs.device
        self.clears_device = device != (env_device or envs.device) or envs.device is None
        self._call: Call
        if policy is None:
            self._call = envs.choose_randomly
        elif isinstance(policy, TensorDictModuleBase) or takes_tensordict(policy):
            self._call = policy
        else:
            self._call = _Wrapped(policy, envs, self.module, plan.exploration)
        self._written: list[Any] | None = None  # known after the first call
        if has_lazy_weights(self.module):
            # Its weights have no shape before its first call.
            env = envs.members[0]
            with self.exploring():
                self(env.fake_tensordict().exclude("next", *env.action_keys))
            self._written = None

    @contextlib.contextmanager
    def exploring(self) -> Iterator[None]:
        """Call envs and policy without gradients, with the exploration type."""
        with torch.no_grad(), set_interaction_type(self._exploration.interaction):
            yield

    def __call__(self, td: TensorDictBase) -> None:
        """Write the outputs into ``td``.

        Raises:
            PolicyError: the policy raised (a PolicyKeyError, if it raised a KeyError), or returned
                no TensorDict.
        """
        try:
            given = td.to(self._device) if self._casts else td
            output = self._call(given)
        except PolicyError:
            raise
        except users_errors() as error:
            raise raised(error, td.items(include_nested=True, leaves_only=True)) from error
        if output is td or (output is None and given is td):
            return
        if output is None:
            output = given
        if not isinstance(output, TensorDictBase):
            raise PolicyError(
                f"the policy was called with a TensorDict and returned {type(output).__name__}: "
                "it must write its outputs into the TensorDict, or return one"
            )
        keys = self._keys(output, td)
        if self._casts and td.device is None:
            output = output.select(*keys, strict=False).to(_device_of(td) or output.device)
        # Copies, as a policy may return the same tensors each time.
        td.update(output, clone=True, keys_to_update=keys)

    def _keys(self, output: TensorDictBase, td: TensorDictBase) -> list[Any]:
        """The keys that the policy writes; of others it may return what an earlier frame had."""
        if self._written is None:
            given = dict(td.items(include_nested=True, leaves_only=True))
            self._written = [
                key
                for key, value in output.items(include_nested=True, leaves_only=True)
                if key not in given or _differs(value, given[key])
            ]
        return self._written

    def try_out(self, td: TensorDictBase) -> TensorDictBase:
        """Call the policy for the first time, with a copy of ``td``.

        The global random generators and the policy's buffers stay as they are.

        Returns:
            The copy, with the outputs.

        Raises:
            PolicyError: the policy raised, or its distribution has not the value that the
                exploration type asks for.
        """
        copied = td.clone()
        with random_state_restored(), buffers_restored(self.module), self.exploring():
            self(copied)
        if self._exploration in (Exploration.MEAN, Exploration.MEDIAN):
            # Distributions of whole numbers have a mean of NaN, which an env may take as an action.
            for value in copied.select(*self._action_keys).values(True, True):
                if value.is_floating_point() and value.isnan().all():
                    raise self._exploration.undefined()
        return copied


class _Wrapped:
    """Calls a module or function with the entries that its parameters name."""

    def __init__(
        self,
        policy: Callable[..., Any],
        envs: TorchRLEnvs,
        module: nn.Module | None,
        exploration: Exploration,
    ) -> None:
        env = envs.members[0]
        names = [str(name) for name in env.observation_spec.keys()]  # noqa: SIM118 - a spec
        whole = "observation" if "observation" in names else None
        entries = {name: name for name in names if name != "observation"}
        self._positional, self._named = assign(parameters_of(policy), whole, entries)
        self._names = names
        self._policy = policy
        self._dtype = floating_dtype(module)
        self._exploration = exploration
        self._action_keys = list(env.action_keys)

    def __call__(self, td: TensorDictBase) -> None:
        output = self._policy(
            *(self._read(td, name) for name in self._positional),
            **{parameter: self._read(td, name) for parameter, name in self._named.items()},
        )
        if isinstance(output, Mapping) or is_tensor_collection(output):
            _write(td, output.items())
            return
        first, *further = output if isinstance(output, tuple) else (output,)
        if isinstance(first, Distribution):
            chosen = self._exploration.choose(first)
            td.set("action_log_prob", first.log_prob(chosen))
            first = chosen
        if len(further) == 1 and isinstance(further[0], Mapping):
            td.set(self._action_keys[0], first)
            _write(td, further[0].items())
            return
        # TorchRL names the outputs of modules in this way.
        values = [first, *further]
        names = [*self._action_keys, *(f"output{n + 1}" for n in range(len(further)))]
        _write(td, zip(names, values, strict=False))

    def _read(self, td: TensorDictBase, name: str | None) -> Any:
        if name is None:
            return {each: self._read(td, each) for each in self._names}
        value = td.get(name)
        is_other = self._dtype is not None and isinstance(value, torch.Tensor)
        if is_other and value.is_floating_point() and value.dtype is not self._dtype:
            return value.to(self._dtype)
        return value


def _write(td: TensorDictBase, entries: Iterable[tuple[Any, Any]]) -> None:
    for key, value in entries:
        td.set(key, torch.as_tensor(value) if not is_tensor_collection(value) else value)


def _differs(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is not other
    return one.shape != other.shape or not torch.equal(one.to(other.device), other)


def _device_of(td: TensorDictBase) -> torch.device | None:
    values = td.values(include_nested=True, leaves_only=True)
    return next((each.device for each in values if isinstance(each, torch.Tensor)), None)


def _add_transforms(envs: TorchRLEnvs, policy: nn.Module) -> None:
    """Add what a recurrent policy needs and the envs lack: "is_init", its state at the start."""
    parts: list[Any] = [p for p in policy.modules() if hasattr(p, "make_tensordict_primer")]
    if not parts:
        return
    spec = envs.members[0].full_observation_spec
    known = {_last(key) for key in spec.keys(True, True)}
    missing = [] if "is_init" in known else [InitTracker()]
    for part in parts:
        try:
            primer = part.make_tensordict_primer()
        except RuntimeError as error:  # such as a ConsistentDropoutModule without input_shape
            name = type(part).__name__
            warnings.warn(f"{name} gets no initial state from the env: {error}", stacklevel=2)
            continue
        if not {_last(key) for key in primer.primers.keys(True, True)} <= known:
            missing.append(primer)
    for transform in missing:
        envs.adapt(lambda env, added=transform: env.append_transform(added.clone()))  # type: ignore[misc]


def _last(key: Any) -> str:
    return key if isinstance(key, str) else str(key[-1])

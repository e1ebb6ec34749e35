"""Steps TorchRL envs as ``env.step_and_maybe_reset`` does, in less time.

That method looks up keys and shapes in the env's specs at each step. Here they are looked up once.
What an env or a transform defines, such as ``_step`` and ``_reset``, is called as TorchRL calls it.
This module imports torchrl, and uses private parts of it. An env for which they are not as expected
is stepped by its own method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase
from torchrl.envs import utils as torchrl_utils

from distcollect.envs.torchrl_gym import GymStep, has_methods_of, is_usual_gym_env

TorchRLEnv: TypeAlias = Any  # torchrl.envs.EnvBase, which has no types
Stepped: TypeAlias = tuple[TensorDictBase, TensorDictBase]
# Names of entries: None for an entry as a whole, or the names in it.
Tree: TypeAlias = "dict[str, Tree | None]"
Shapes: TypeAlias = "dict[str, Shapes | torch.Size]"

# An env that overrides one of these is stepped by its own method.
_REPLACED = (
    "step_and_maybe_reset",
    "_step_and_maybe_reset",
    "step",
    "step_mdp",
    "_step_mdp",
    "any_done",
    "maybe_reset",
    "_assert_tensordict_shape",
    "_step_proc_data",
)
# Attributes of an env that change what its method does.
_SWITCHES = ("_compiled_step_and_maybe_reset", "_torchrl_native_autoreset")
_WHOLE = object()


class Stepper:
    """Makes the steps of one env.

    The first step after each change of the env's specs is compared with what TorchRL makes of it.
    If they differ, the env is stepped by its own method from then on.
    """

    def __init__(self, env: TorchRLEnv) -> None:
        self.env = env
        self._trusted: list[Any] | None = None  # the specs for which the comparison was made
        self._is_fast = True
        self.refresh()

    def refresh(self) -> None:
        """Look at the env's specs again, as they may have changed."""
        self._plain = self._is_fast and _is_plain(self.env)
        if not self._plain:
            return
        env, mdp = self.env, self.env._step_mdp
        self._device = env.device
        self._batch_size = env.batch_size
        self._left_out: Tree = mdp.exclude_from_root
        self._taken: Tree = mdp.keys_from_next
        self._expected = _shapes([env.full_reward_spec, env.full_done_spec])
        self._inner_step = GymStep(env) if is_usual_gym_env(env) else env._step
        self._after_step = env._post_step_mdp_hooks
        self._done_at_root = bool(env._simple_done)
        found = [self._device, self._batch_size, self._left_out, self._taken, self._expected]
        self._is_checked = self._trusted == found
        self._trusted = found

    def __call__(self, td: TensorDictBase) -> Stepped:
        """One transition, and a reset of the rows that ended; see ``step_and_maybe_reset``."""
        env = self.env
        if not self._plain:
            stepped: Stepped = env.step_and_maybe_reset(td)
            return stepped
        if td.device != self._device:
            td = td.to(self._device)
        entries = dict(td.items())
        if "_step" in entries or td.batch_size != self._batch_size or type(td) is not TensorDict:
            stepped = env.step_and_maybe_reset(td)
            return stepped
        following = self._inner_step(td)
        given = entries.get("next")
        is_known = type(following) is TensorDict and following.batch_size == self._batch_size
        if not is_known or not self._is_checked or not _fits(following, self._expected):
            following = env._step_proc_data(following)
        if given is not None:
            _add(following, given)
        if is_known and following.device == td.device:
            td._set_str("next", following, validated=True, inplace=False, non_blocking=False)
        else:
            td.set("next", following)
        start = self._advanced(td, entries, following) if is_known else None
        if start is None:
            start = env._step_mdp(td)
        elif not self._is_checked:
            start = self._checked(start, env._step_mdp(td))
        if self._after_step is not None:
            td, start = self._after_step(td, start)
        if self._done_at_root:
            done = start._get_str("done", default=None)
            if done is None or not (done if done.numel() == 1 else done.any()):
                return td, start
        return td, env.maybe_reset(start)

    def _advanced(
        self, td: TensorDict, entries: dict[str, Any], following: TensorDict
    ) -> TensorDict | None:
        """What the next step begins with; None where TorchRL must say it.

        Args:
            td: the frame.
            entries: of the frame, without "next".
            following: what the frame has under "next".
        """
        start = td.empty()
        if _copy(entries, self._left_out, start) and _take(following, self._taken, start):
            return start
        return None

    def _checked(self, start: TensorDictBase, theirs: TensorDictBase) -> TensorDictBase:
        """What TorchRL makes of the step; if it is not ``start``, its own method is used from now.

        ``theirs`` is that.
        """
        self._is_checked = True
        if not _is_same(start, theirs):
            self._is_fast = self._plain = False
        return theirs


def _is_plain(env: TorchRLEnv) -> bool:
    """Whether the env is stepped in the way that :class:`Stepper` knows."""
    own = vars(env)
    return (
        has_methods_of(env, EnvBase, _REPLACED)
        and not any(own.get(name) for name in _SWITCHES)
        and not env.run_type_checks
        and type(env._step_mdp) is getattr(torchrl_utils, "_StepMDP", None)
        and env._step_mdp.keep_other
    )


def _shapes(specs: list[Any]) -> Shapes:
    """The shape of each leaf of the specs, as nested as these."""
    found: Shapes = {}
    for spec in specs:
        for name, part in spec.items():
            if hasattr(part, "keys"):
                below = found.setdefault(name, {})
                assert isinstance(below, dict)
                below.update(_shapes([part]))
            else:
                found[name] = part.shape
    return found


def _fits(td: TensorDictBase, expected: Shapes) -> bool:
    """Whether all expected entries are there, with the expected shapes."""
    entries = dict(td.items())
    for name, shape in expected.items():
        value = entries.get(name)
        if isinstance(shape, dict):
            if type(value) is not TensorDict or not _fits(value, shape):
                return False
        elif value is None or value.shape != shape:
            return False
    return True


def _add(following: TensorDictBase, given: TensorDictBase) -> None:
    """Add what the policy wrote under "next" and the env did not."""
    there = following.keys()
    entries = dict(given.items())
    if any(isinstance(value, TensorDictBase) for value in entries.values()):
        following.update(given.exclude(*following.keys(True, True)))
        return
    for name, value in entries.items():
        if name not in there:
            following.set(name, value)


def _copy(entries: Mapping[str, Any], left_out: Tree, to: TensorDict) -> bool:
    """Copy entries of a frame but for some; whether it could be done."""
    for name, value in entries.items():
        below: Any = left_out.get(name, _WHOLE)
        if below is None:
            continue
        if not isinstance(value, torch.Tensor):
            if type(value) is not TensorDict:
                return False
            part = value.empty()
            if not _copy(dict(value.items()), {} if below is _WHOLE else below, part):
                return False
            if below is not _WHOLE and part.is_empty():
                continue
            value = part  # noqa: PLW2901 - a copy of it
        elif below is not _WHOLE:
            return False
        to._set_str(name, value, validated=True, inplace=False, non_blocking=False)
    return True


def _take(source: TensorDict, taken: Tree, to: TensorDict) -> bool:
    """Add the entries under "next" that the next step begins with; whether it could be done."""
    entries = dict(source.items())
    for name, below in taken.items():
        if name not in entries:
            continue
        value = entries[name]
        if not isinstance(value, torch.Tensor):
            if type(value) is not TensorDict:
                return False
            part = to._get_str(name, None)
            if part is None or part.batch_size != value.batch_size:
                part = value.empty()
            if below is None:
                return False
            if not _take(value, below, part):
                return False
            value = part
        elif below is not None:
            return False
        to._set_str(name, value, validated=True, inplace=False, non_blocking=False)
    return True


def _is_same(one: Any, other: Any) -> bool:
    """Whether two TensorDicts have the same entries: the same tensors, not just equal ones."""
    if type(one) is not type(other):
        return False
    if not isinstance(one, TensorDictBase):
        return one is other
    return (
        one.batch_size == other.batch_size
        and one.device == other.device
        and one.names == other.names
        and set(one.keys()) == set(other.keys())
        and all(_is_same(value, other.get(name)) for name, value in one.items())
    )

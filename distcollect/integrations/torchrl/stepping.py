"""Steps TorchRL envs as ``env.step_and_maybe_reset`` does, in less time.

That method looks up keys and shapes in the env's specs at each step. Here they are looked up once.
What an env or a transform defines, such as ``_step`` and ``_reset``, is called as TorchRL calls it.
This module imports torchrl, and uses private parts of it. An env for which they are not as expected
is stepped by its own method.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs import utils as torchrl_utils

from distcollect.integrations.torchrl.gym import (
    GymStep,
    has_methods_of,
    is_usual_gym_env,
    tensordict_has_parts,
)
from distcollect.integrations.torchrl.parallel import ParallelStep, is_usual_parallel_env

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
_REPLACED_IN_RESETS = ("reset", "_resolve_set_state", "_reset_check_done")
# Attributes of an env that change what its method does.
_SWITCHES = ("_compiled_step_and_maybe_reset", "_torchrl_native_autoreset")
_WHOLE = object()


class Stepper:
    """Makes the steps of one env.

    The first step and the first reset after each change of the env's specs are compared with what
    TorchRL makes of them. If they differ, the env's own methods are used from then on.
    """

    def __init__(self, env: TorchRLEnv) -> None:
        self.env = env
        self._trusted: list[Any] | None = None  # the specs for which the comparison was made
        self._is_fast = self._may_reset_fast = True
        self._is_reset_checked = False
        self.refresh()

    def refresh(self) -> None:
        """Look at the env's specs again, as they may have changed."""
        self._parallel = ParallelStep(self.env) if is_usual_parallel_env(self.env) else None
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
        self._after_step = getattr(env, "_post_step_mdp_hooks", None)
        self._done_at_root = bool(getattr(env, "_simple_done", False))
        found = [self._device, self._batch_size, self._left_out, self._taken, self._expected]
        self._flags = _shapes([env.full_done_spec])
        self._resets_fast = self._may_reset_fast and _is_reset_plainly(env, self._flags)
        self._reset_options = (
            {"set_state": False} if getattr(env, "_supports_set_state", False) else {}
        )
        self._is_checked = self._trusted == found
        self._is_reset_checked = self._is_reset_checked and self._is_checked
        self._trusted = found

    def __call__(self, td: TensorDictBase) -> Stepped:
        """One transition, and a reset of the rows that ended; see ``step_and_maybe_reset``."""
        if self._parallel is not None:
            return self._parallel(td)
        if (
            not self._plain
            or type(td) is not TensorDict
            or td.batch_size != self._batch_size
            or td._get_str("_step", None) is not None
        ):
            stepped: Stepped = self.env.step_and_maybe_reset(td)
            return stepped
        if td.device != self._device:
            td = td.to(self._device)
        entries = dict(td.items())
        following = self._inner_step(td)
        is_known = type(following) is TensorDict and following.batch_size == self._batch_size
        if not is_known or not self._is_checked or not _fits(following, self._expected):
            following = self.env._step_proc_data(following)
        if (given := entries.get("next")) is not None:
            _add(following, given)
        if is_known and following.device == td.device:
            td._set_str("next", following, validated=True, inplace=False, non_blocking=False)
        else:
            td.set("next", following)
        start = self._start(td, entries, following) if is_known else self.env._step_mdp(td)
        if self._after_step is not None:
            td, start = self._after_step(td, start)
        return td, self._maybe_reset(start)

    def _maybe_reset(self, start: TensorDictBase) -> TensorDictBase:
        """Reset the rows that ended; see ``EnvBase.maybe_reset``."""
        if self._done_at_root:
            done = start._get_str("done", default=None)
            if done is None or not (done if done.numel() == 1 else done.any()):
                return start
            if self._resets_fast and type(start) is TensorDict:
                return self._reset(start, done)
        started: TensorDictBase = self.env.maybe_reset(start)
        return started

    def _reset(self, start: TensorDict, done: torch.Tensor) -> TensorDictBase:
        """Reset the rows that are done."""
        env, given = self.env, start.empty()
        flags = done.clone()
        given._set_str("_reset", flags, validated=True, inplace=False, non_blocking=False)
        fresh = env._reset(given, **self._reset_options)
        if fresh is given or not isinstance(fresh, TensorDictBase):
            raise RuntimeError(f"_reset() must return a new TensorDict, not {type(fresh).__name__}")
        merged = None
        if self._flags.keys().isdisjoint(fresh.keys()):
            for name, shape in self._flags.items():
                assert isinstance(shape, torch.Size)
                fresh.set(name, torch.zeros(shape, dtype=torch.bool, device=self._device))
        if type(fresh) is TensorDict and _fits(fresh, self._flags) and not _any(fresh, self._flags):
            merged = _merged(start, fresh, flags.reshape(start.batch_size))
        if merged is not None and self._is_reset_checked:
            return merged
        start._set_str("_reset", flags, validated=True, inplace=False, non_blocking=False)
        theirs: TensorDictBase = env._reset_proc_data(start, fresh)
        if merged is not None:
            self._is_reset_checked = True
            self._resets_fast = self._may_reset_fast = _is_equal(merged, theirs)
        return theirs

    def _start(
        self, td: TensorDict, entries: dict[str, Any], following: TensorDict
    ) -> TensorDictBase:
        """What the next step begins with, before ended rows are reset.

        Args:
            td: the frame.
            entries: of the frame, without "next".
            following: what the frame has under "next".
        """
        start = td.empty()
        is_made = _copy(entries, self._left_out, start) and _take(following, self._taken, start)
        if is_made and self._is_checked:
            return start
        theirs: TensorDictBase = self.env._step_mdp(td)
        if is_made:
            self._is_checked = True
            if not _is_same(start, theirs):
                self._is_fast = self._plain = False
        return theirs


def _is_plain(env: TorchRLEnv) -> bool:
    """Whether the env is stepped in the way that :class:`Stepper` knows."""
    own = vars(env)
    return (
        tensordict_has_parts()
        and has_methods_of(env, EnvBase, _REPLACED)
        and not any(own.get(name) for name in _SWITCHES)
        and not env.run_type_checks
        and type(env._step_mdp) is getattr(torchrl_utils, "_StepMDP", None)
        and env._step_mdp.keep_other
    )


def _is_reset_plainly(env: TorchRLEnv, flags: Shapes) -> bool:
    """Whether ended rows are reset in the way that :class:`Stepper` knows."""
    return (
        has_methods_of(env, EnvBase, _REPLACED_IN_RESETS)
        and (
            has_methods_of(env, EnvBase, ["_reset_proc_data"])
            or has_methods_of(env, TransformedEnv, ["_reset_proc_data"])
        )
        and list(env.reset_keys) == ["_reset"]
        and not any(isinstance(shape, dict) for shape in flags.values())
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


def _any(td: TensorDict, flags: Shapes) -> bool:
    """Whether one of the flags is True anywhere."""
    return any(bool(td._get_str(name, None).any()) for name in flags)


def _merged(start: TensorDict, fresh: TensorDict, is_reset: torch.Tensor) -> TensorDict | None:
    """``start`` with the values of ``fresh`` in the rows that were reset.

    Args:
        start: what the next step begins with.
        fresh: what the reset gave.
        is_reset: bool ``[*batch_size]``.

    Returns:
        A new TensorDict. Entries that a reset does not give are 0 in rows that were reset, unless
        all were. None where TorchRL must merge them.
    """
    is_whole = bool(is_reset if is_reset.numel() == 1 else is_reset.all())
    merged, entries = start.empty(), dict(fresh.items())
    entries.pop("_reset", None)
    for name, value in start.items():
        other = entries.pop(name, None)
        made: Any
        if isinstance(value, torch.Tensor):
            made = (value if other is None else other) if is_whole else _mix(value, other, is_reset)
        elif type(value) is TensorDict and (other is None or type(other) is TensorDict):
            other = value.empty() if other is None else other
            is_alike = other.batch_size == value.batch_size
            made = _merged(value, other, is_reset) if is_alike else None
        else:
            made = None
        if made is None:
            return None
        merged._set_str(name, made, validated=True, inplace=False, non_blocking=False)
    for name, value in entries.items():
        merged._set_str(name, value, validated=True, inplace=False, non_blocking=False)
    return merged if is_whole or not entries else None


def _mix(value: torch.Tensor, other: Any, is_reset: torch.Tensor) -> torch.Tensor | None:
    """``value``, in the rows that were reset ``other``; see :func:`_merged`."""
    mask = is_reset.reshape(*is_reset.shape, *(1 for _ in value.shape[is_reset.ndim :]))
    if other is None:
        return value.masked_fill(mask, 0)
    if not isinstance(other, torch.Tensor) or other.shape != value.shape:
        return None
    return torch.where(mask, other, value)


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two TensorDicts have equal entries."""

    def is_equal(value: Any, theirs: Any) -> bool:
        is_tensor = isinstance(value, torch.Tensor) and isinstance(theirs, torch.Tensor)
        return is_tensor and value.dtype is theirs.dtype and torch.equal(value, theirs)

    return _is_same(one, other, is_equal)


def _is_same(one: Any, other: Any, compare: Callable[[Any, Any], bool] = operator.is_) -> bool:
    """Whether two TensorDicts have the same entries: the same tensors, not just equal ones."""
    if type(one) is not type(other):
        return False
    if not isinstance(one, TensorDictBase):
        return compare(one, other)
    return (
        one.batch_size == other.batch_size
        and one.device == other.device
        and one.names == other.names
        and set(one.keys()) == set(other.keys())
        and all(_is_same(value, other.get(name), compare) for name, value in one.items())
    )

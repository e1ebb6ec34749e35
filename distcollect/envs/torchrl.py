"""TorchRL envs, plain or batched, with or without transforms.

It imports torchrl, which changes how the whole process starts others. So it is itself imported only
where the user made such an env, and has thereby imported torchrl.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDictBase
from torchrl.envs import AutoResetTransform, Compose, TransformedEnv, VecGymEnvTransform

from distcollect.envs.base import EnvBatch, Fault, Step, called
from distcollect.envs.torchrl_specs import DONE, Specs, entries_of
from distcollect.errors import ArgumentError, EnvError, SpaceError
from distcollect.rollout.spaces import Arrays, Key

TorchRLEnv: TypeAlias = Any  # torchrl.envs.EnvBase, which has no types

# These reset rows when the rows end, and at no other time.
_RESETS_ITSELF = (AutoResetTransform, VecGymEnvTransform)


@dataclass
class _Part:
    """One env and the rows that it steps.

    Attributes:
        rows: one, or all that it is batched over.
        env: steps them.
        make: makes it anew, None if nothing does.
        root: what the env gave last and is given with the next actions, ``[n]`` or ``[]``.
        failed: it raised and has no successor yet.
        closed: it is closed.
    """

    rows: range
    env: TorchRLEnv
    make: Callable[[], TorchRLEnv] | None
    root: TensorDictBase
    failed: bool = False
    closed: bool = False

    @property
    def place(self) -> slice:
        """Its rows within arrays of all rows."""
        return slice(self.rows.start, self.rows.stop)


class TorchRLBatch(EnvBatch):
    """TorchRL envs, stepped one after the other: plain ones, or a single batched one."""

    def __init__(
        self,
        envs: Sequence[TorchRLEnv],
        makers: Sequence[Callable[[], TorchRLEnv] | None],
    ) -> None:
        """Reset the envs; ``makers``: what makes each of them anew, None where nothing does."""
        self._parts: list[_Part] = []
        all_specs: list[Specs] = []
        start = 0
        for env, make in zip(envs, makers, strict=True):
            _check(env)
            num_rows = env.batch_size.numel()
            part = _Part(range(start, start + num_rows), env, make, root=None)
            self._parts.append(part)
            start += num_rows
            with self._naming_env("reset", part.rows.start), _ordinary_tensors():
                part.root = env.reset()
            all_specs.append(Specs.of(env, part.root))
            self._check_like(all_specs[0], all_specs[-1], part.rows.start)
        first = self._specs = all_specs[0]
        super().__init__(
            start, first.observation_space, first.action_space, first.info_space, first.outcomes
        )
        self.supports_partial_reset = not any(_resets_itself(part.env) for part in self._parts)
        self._rewards: list[Key] = [("reward",)]
        if ("reward",) not in entries_of(envs[0].full_reward_spec):
            self._rewards = list(entries_of(envs[0].full_reward_spec))

    def reset(self, seeds: Sequence[int] | None = None) -> None:
        for part in self._parts:
            try:
                self._start(part, None if seeds is None else int(seeds[part.rows.start]))
            except EnvError as error:
                self._note(part, error, stepped=False)
        if self._faults:
            raise self._faulted()

    def can_rebuild(self, row: int) -> bool:
        return self._part_of(row).make is not None

    def rebuild(self, rows: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        part = self._part_of(rows[0])
        assert part.make is not None
        _shut(part)
        part.env = part.make()
        part.closed = part.failed = False
        seed = None if seeds is None else int(seeds[0])
        if part.env.batch_size.numel() != len(rows):
            raise EnvError(
                f"{self._name(rows[0])}: made anew, it has batch_size {list(part.env.batch_size)}"
            )
        self._start(part, seed, check=True)

    def _part_of(self, row: int) -> _Part:
        return next(part for part in self._parts if row in part.rows)

    def _note(self, part: _Part, error: EnvError, *, stepped: bool) -> None:
        part.failed = True
        self._faults.append(Fault(tuple(part.rows), error, stepped))

    def _start(self, part: _Part, seed: int | None, *, check: bool = False) -> None:
        """Reset all rows of an env."""
        with self._naming_env("reset", part.rows.start), _ordinary_tensors():
            if seed is not None:
                part.env.set_seed(seed)
            part.root = part.env.reset()
        if check:
            self._check_like(self._specs, Specs.of(part.env, part.root), part.rows.start)
        self._put(part, self.obs, part.root, "reset")

    def _advance(self, action: Arrays, rows: Sequence[int] | None) -> Step:
        result = self._result
        if rows is None:
            result.terminated.fill(False)
            result.truncated.fill(False)
        for part in self._parts:
            if rows is not None and part.rows.start not in rows:
                continue
            try:
                with self._naming_env("step", part.rows.start), _ordinary_tensors():
                    self._step(part, action)
            except EnvError as error:
                self._note(part, error, stepped=False)
        result.ended[:] = np.flatnonzero(result.terminated | result.truncated).tolist()
        return result

    def _step(self, part: _Part, action: Arrays) -> None:
        env, root, place = part.env, part.root, part.place
        for leaf in self.action_leaves:
            # A copy: the collector uses the memory again.
            tensor = torch.tensor(action[leaf.key][place], dtype=leaf.dtype, device=env.device)
            root.set(leaf.key, tensor.reshape((*env.batch_size, *leaf.shape)))
        stepped = env.step(root)
        after = stepped.get("next")
        part.root = env.step_mdp(stepped)
        self._put(part, self.obs, after, "step")
        if self.outcomes:
            self._put(part, self.outcomes, after, "step")
        result, num_rows = self._result, len(part.rows)
        rewards = [_array(after.get(key)).reshape(num_rows, -1) for key in self._rewards]
        flags = {name: _array(after.get(name)).reshape(num_rows) for name in DONE if name in after}
        done, terminated = flags["done"], flags["terminated"]
        result.reward[place] = sum(each.sum(-1) for each in rewards)
        result.terminated[place] = terminated
        # Also where it is done and doesn't say why.
        result.truncated[place] = flags.get("truncated", False) | (done & ~terminated)

    def _reset_rows(self, rows: list[int]) -> None:
        for part in self._parts:
            mine = [row - part.rows.start for row in rows if row in part.rows]
            if not mine or part.failed:
                continue
            try:
                with self._naming_env("reset", part.rows.start), _ordinary_tensors():
                    mask = torch.zeros_like(part.root.get("done"))
                    mask.view(len(part.rows), -1)[mine] = True
                    part.root.set("_reset", mask)
                    part.root = part.env.reset(part.root, select_reset_only=True)
                self._put(part, self.obs, part.root, "reset", mine)
            except EnvError as error:
                self._note(part, error, stepped=True)

    def _put(
        self,
        part: _Part,
        into: Arrays,
        values: TensorDictBase,
        call: str,
        rows: list[int] | None = None,
    ) -> None:
        """Write what an env gave to its rows, or to some of them, counted from its first."""
        for key, array in into.items():
            value = values.get(key)
            expected = (*part.env.batch_size, *array.shape[1:])
            if value is None or value.shape != expected:
                got = "nothing" if value is None else f"shape {list(value.shape)}"
                raise EnvError(
                    f"{self._name(part.rows.start)}: {call}() gave {got} for {'.'.join(key)!r}, "
                    f"its spec says {list(expected)}"
                )
            mine = array[part.place]
            given = _array(value).reshape(mine.shape)
            if rows is None:
                mine[:] = given
            else:
                mine[rows] = given[rows]

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        results: list[Any] = []
        for part in self._parts:
            with self._naming_env(name, part.rows.start):
                result = called(getattr(part.env, name), args, kwargs)
            # Those of TorchRL that step several envs ask each of them.
            is_each = isinstance(result, list) and len(result) == len(part.rows) > 1
            results.extend(result if is_each else [result])
        return results

    def _check_like(self, expected: Specs, specs: Specs, row: int) -> None:
        """Raise SpaceError if an env has other specs than the first one, or the one before it."""
        if difference := specs.difference_from(expected):
            raise SpaceError(f"{self._name(row)} has other specs than its like: {difference}")

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # goes through all, whichever of them raise
            for part in reversed(self._parts):
                if part.failed:
                    _shut(part)
                elif not part.env.is_closed:
                    closing.enter_context(self._naming_env("close", part.rows.start))
                    closing.callback(part.env.close)

    def _name(self, row: int = 0) -> str:
        return f"env {row} ({_name_of(self._part_of(row).env)})"


def _check(env: TorchRLEnv) -> None:
    """Raise if the frames of an env can't be told, or not truly."""
    if len(env.batch_size) > 1 or ("done",) not in entries_of(env.full_done_spec):
        raise SpaceError(
            f"{_name_of(env)}: its batch_size is {list(env.batch_size)} and its done keys are "
            f"{env.done_keys}; it must have one dimension at most, and a 'done' for each row as a "
            "whole"
        )
    within = vars(_base_of(env)).get("_env")
    if isinstance(within, VectorEnv):
        mode = within.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        if AutoresetMode(mode) is AutoresetMode.NEXT_STEP:
            raise ArgumentError(
                f"{_name_of(env)} wraps a vector env that resets itself a step late, from which "
                "TorchRL gets no final observations: use a ParallelEnv or SerialEnv of single "
                "ones, give the vector env itself, or make it with autoreset_mode=DISABLED"
            )


@contextlib.contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """An env keeps tensors, which those of inference mode, that policies run in, would spoil."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def _array(tensor: torch.Tensor) -> Any:
    return tensor.numpy() if tensor.is_cpu else tensor.cpu().numpy()


def _resets_itself(env: TorchRLEnv) -> bool:
    """Whether rows can be reset only when they end."""
    while isinstance(env, TransformedEnv):
        transforms = env.transform if isinstance(env.transform, Compose) else [env.transform]
        if any(isinstance(transform, _RESETS_ITSELF) for transform in transforms):
            return True
        env = env.base_env
    return False


def _base_of(env: TorchRLEnv) -> TorchRLEnv:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def _name_of(env: TorchRLEnv) -> str:
    return type(_base_of(env)).__name__


def _shut(part: _Part) -> None:
    """Close an env that raised, whatever it says to that, and leave no process of it behind."""
    if part.closed:
        return
    part.closed = True
    # First, as a ParallelEnv would wait for an answer of each.
    for process in vars(_base_of(part.env)).get("_workers", ()):
        with contextlib.suppress(ValueError):  # it has seen to this one itself
            process.kill()
            process.join()
    with contextlib.suppress(Exception):
        part.env.close()

"""TorchRL envs, single or batched, with or without transforms.

This module imports torchrl, which sets how this process starts other processes. Therefore it is
only imported when the user passes a TorchRL env, and has thus imported torchrl already.
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

from distcollect.envs.base import EnvBatch, EnvState, Fault, Step, called
from distcollect.envs.torchrl_specs import DONE, Specs, entries_of
from distcollect.errors import ArgumentError, EnvError, SpaceError
from distcollect.rollout.spaces import Arrays, Key

TorchRLEnv: TypeAlias = Any  # torchrl.envs.EnvBase, which has no types

# Transforms of envs that reset a row when it ends, and can't reset it at any other time.
_RESETTING_TRANSFORMS = (AutoResetTransform, VecGymEnvTransform)


@dataclass
class _Part:
    """One env and the rows that it steps.

    Attributes:
        rows: one row, or all rows of a batched env.
        env: the env.
        make: makes the env again; None if nothing does.
        root: TensorDict ``[n]`` or ``[]`` that the env returned last; the next actions go into it.
        state: whether the env can be used.
    """

    rows: range
    env: TorchRLEnv
    make: Callable[[], TorchRLEnv] | None
    root: TensorDictBase
    state: EnvState = EnvState.OPEN

    @property
    def row_slice(self) -> slice:
        """The rows as a slice of arrays of all rows."""
        return slice(self.rows.start, self.rows.stop)


class TorchRLBatch(EnvBatch):
    """TorchRL envs, stepped one after the other: single envs, or one batched env."""

    is_torchrl = True

    def __init__(
        self,
        envs: Sequence[TorchRLEnv],
        makers: Sequence[Callable[[], TorchRLEnv] | None],
    ) -> None:
        """Reset the envs.

        Args:
            envs: single envs, or one batched env.
            makers: for each env what makes it again, None where nothing does.

        Raises:
            ArgumentError, SpaceError: no batch can carry the frames of an env.
            EnvError: an env raised.
        """
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

    @property
    def user_envs(self) -> Sequence[Any]:
        return [part.env for part in self._parts]

    def reset(self, seeds: Sequence[int] | None = None) -> None:
        for part in self._parts:
            try:
                self._reset_part(part, None if seeds is None else int(seeds[part.rows.start]))
            except EnvError as error:
                self._add_fault(part, error, stepped=False)
        if self._faults:
            raise self._faulted()

    def can_rebuild(self, row: int) -> bool:
        return self._part_of(row).make is not None

    def rebuild(self, rows: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        part = self._part_of(rows[0])
        assert part.make is not None
        _close_failed(part)
        part.env = part.make()
        part.state = EnvState.OPEN
        seed = None if seeds is None else int(seeds[0])
        if part.env.batch_size.numel() != len(rows):
            raise EnvError(
                f"{self._name(rows[0])}: made a second time, it has batch_size "
                f"{list(part.env.batch_size)}"
            )
        self._reset_part(part, seed, check=True)

    def _part_of(self, row: int) -> _Part:
        return next(part for part in self._parts if row in part.rows)

    def _add_fault(self, part: _Part, error: EnvError, *, stepped: bool) -> None:
        part.state = part.state.after_fault()
        self._faults.append(Fault(tuple(part.rows), error, stepped))

    def _reset_part(self, part: _Part, seed: int | None, *, check: bool = False) -> None:
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
                self._add_fault(part, error, stepped=False)
        result.ended[:] = np.flatnonzero(result.terminated | result.truncated).tolist()
        return result

    def _step(self, part: _Part, action: Arrays) -> None:
        env, root, rows = part.env, part.root, part.row_slice
        for leaf in self.action_leaves:
            # A copy, as the engine reuses the memory.
            tensor = torch.tensor(action[leaf.key][rows], dtype=leaf.dtype, device=env.device)
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
        result.reward[rows] = sum(each.sum(-1) for each in rewards)
        result.terminated[rows] = terminated
        # An env that is done without being terminated counts as truncated.
        result.truncated[rows] = flags.get("truncated", False) | (done & ~terminated)

    def _reset_rows(self, rows: list[int]) -> None:
        for part in self._parts:
            mine = [row - part.rows.start for row in rows if row in part.rows]
            if not mine or part.state is not EnvState.OPEN:
                continue
            try:
                with self._naming_env("reset", part.rows.start), _ordinary_tensors():
                    mask = torch.zeros_like(part.root.get("done"))
                    mask.view(len(part.rows), -1)[mine] = True
                    part.root.set("_reset", mask)
                    part.root = part.env.reset(part.root, select_reset_only=True)
                self._put(part, self.obs, part.root, "reset", mine)
            except EnvError as error:
                self._add_fault(part, error, stepped=True)

    def _put(
        self,
        part: _Part,
        into: Arrays,
        values: TensorDictBase,
        call: str,
        rows: list[int] | None = None,
    ) -> None:
        """Write values of an env to its rows.

        Args:
            part: the env.
            into: arrays of all rows.
            values: TensorDict of the env's batch size.
            call: the method that returned them, for messages.
            rows: write only these rows, counted from the env's first; None: all its rows.
        """
        for key, array in into.items():
            value = values.get(key)
            expected = (*part.env.batch_size, *array.shape[1:])
            if value is None or value.shape != expected:
                got = "nothing" if value is None else f"shape {list(value.shape)}"
                raise EnvError(
                    f"{self._name(part.rows.start)}: {call}() gave {got} for {'.'.join(key)!r}, "
                    f"its spec says {list(expected)}"
                )
            mine = array[part.row_slice]
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
            # TorchRL's envs over several envs return a list with one value for each.
            is_each = isinstance(result, list) and len(result) == len(part.rows) > 1
            results.extend(result if is_each else [result])
        return results

    def _check_like(self, expected: Specs, specs: Specs, row: int) -> None:
        """Raise SpaceError if the env of ``row`` has other specs than expected."""
        if difference := specs.difference_from(expected):
            raise SpaceError(
                f"{self._name(row)} has other specs than the first env, or than the env that it "
                f"replaces: {difference}"
            )

    def close(self) -> None:
        with contextlib.ExitStack() as closing:  # closes all envs even if some raise
            for part in reversed(self._parts):
                if part.state is EnvState.FAILED:
                    _close_failed(part)
                elif part.state is EnvState.OPEN and not part.env.is_closed:
                    closing.enter_context(self._naming_env("close", part.rows.start))
                    closing.callback(part.env.close)

    def _name(self, row: int = 0) -> str:
        return f"env {row} ({_name_of(self._part_of(row).env)})"


def _check(env: TorchRLEnv) -> None:
    """Raise ArgumentError or SpaceError for an env whose frames would be missing or wrong."""
    if len(env.batch_size) > 1 or ("done",) not in entries_of(env.full_done_spec):
        raise SpaceError(
            f"{_name_of(env)}: its batch_size is {list(env.batch_size)} and its done keys are "
            f"{env.done_keys}; it must have at most one dimension, and a 'done' for each whole row"
        )
    within = vars(_base_of(env)).get("_env")
    if isinstance(within, VectorEnv):
        mode = within.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        if AutoresetMode(mode) is AutoresetMode.NEXT_STEP:
            raise ArgumentError(
                f"{_name_of(env)} wraps a vector env that resets rows one step late, so TorchRL "
                "gets no final observations: use a ParallelEnv or SerialEnv of single envs, pass "
                "the vector env itself, or make it with autoreset_mode=DISABLED"
            )


@contextlib.contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Leave inference mode, in which policies run: an env may keep tensors and change them."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def _array(tensor: torch.Tensor) -> Any:
    return tensor.numpy() if tensor.is_cpu else tensor.cpu().numpy()


def _resets_itself(env: TorchRLEnv) -> bool:
    """Whether rows can be reset only when they end."""
    while isinstance(env, TransformedEnv):
        transforms = env.transform if isinstance(env.transform, Compose) else [env.transform]
        if any(isinstance(transform, _RESETTING_TRANSFORMS) for transform in transforms):
            return True
        env = env.base_env
    return False


def _base_of(env: TorchRLEnv) -> TorchRLEnv:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def _name_of(env: TorchRLEnv) -> str:
    return type(_base_of(env)).__name__


def _close_failed(part: _Part) -> None:
    """Close an env that raised, ignoring errors, and end its processes."""
    if part.state is EnvState.CLOSED:
        return
    part.state = EnvState.CLOSED
    # Before close(), as a ParallelEnv waits there for an answer of each process.
    for process in vars(_base_of(part.env)).get("_workers", ()):
        with contextlib.suppress(ValueError):  # the env has closed this process already
            process.kill()
            process.join()
    with contextlib.suppress(Exception):
        part.env.close()

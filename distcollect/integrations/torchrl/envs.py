"""TorchRL envs, single or batched, with or without transforms, stepped with TensorDicts.

This module imports torchrl, which sets how this process starts other processes. Therefore it is
only imported when the user passes a TorchRL env, and has thus imported torchrl already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import LazyStackedTensorDict, TensorDictBase, lazy_stack
from torchrl.envs import (
    AutoResetTransform,
    Compose,
    StepCounter,
    TransformedEnv,
    VecGymEnvTransform,
)

from distcollect.envs.base import Envs, EnvState, InfoKeys, Remaker, called, describe
from distcollect.envs.kinds import EnvKind
from distcollect.errors import ArgumentError, EnvError, SpaceError, users_errors
from distcollect.integrations.torchrl.parallel import TorchRLEnv, base_of, let_processes_run

# Transforms of envs that reset a row when it ends, and can't reset it at any other time.
_RESETTING_TRANSFORMS = (AutoResetTransform, VecGymEnvTransform)


class TorchRLEnvs(Envs):
    """One TorchRL env of any batch size, or n envs of batch size ``[]`` stepped as one of ``[n]``.

    Attributes:
        num_envs: n, the number of rows.
        batch_size: of the TensorDicts that the envs take and give.
        device: where the envs compute; None: unknown.
        members: the envs.
        num_stepped: how many rows had made their transition when an env raised in the last step;
            with that env's own if its reset raised.
    """

    num_stepped = 0
    engine = "engine of torchrl"

    def __init__(self, envs: Sequence[TorchRLEnv], makers: Sequence[Remaker]) -> None:
        """Take over the envs.

        Args:
            envs: one env, or several with an empty batch size.
            makers: for each env what makes it again.

        Raises:
            ArgumentError: an env gives no final observations.
            SpaceError: the envs' specs differ.
        """
        for env in envs:
            _check(env)
            let_processes_run(env)
        single = envs[0].batch_size
        self.batch_size = torch.Size([len(envs)]) if len(envs) > 1 else single
        self.device: torch.device | None = envs[0].device
        super().__init__(self.batch_size.numel(), envs, makers)
        self._max_frames: int | None = None
        self._adapters: list[Callable[[TorchRLEnv], TorchRLEnv]] = []
        for row, env in enumerate(envs[1:], start=1):
            self._check_like(env, row)

    def adapt(self, change: Callable[[TorchRLEnv], TorchRLEnv]) -> None:
        """Replace each env, and each one that is made later, by ``change(env)``."""
        self._adapters.append(change)
        for row, env in enumerate(self.members):
            self.members[row] = change(env)

    def limit_frames(self, max_frames: int) -> None:
        """End trajectories after this many frames, by TorchRL's StepCounter.

        Raises:
            ArgumentError: the env counts its steps already, or can't be reset at any time.
        """
        if self._max_frames == max_frames:
            return  # another engine stepped these envs before
        self._max_frames = max_frames
        for env in self.members:
            if _resets_itself(env):
                raise ArgumentError(
                    "max_frames_per_traj does not work with this native vector env: it cannot "
                    "reset single rows. Use a ParallelEnv or SerialEnv of single envs"
                )
            keys = env.output_spec.keys(include_nested=True, leaves_only=True)
            if any("step_count" in ((key,) if isinstance(key, str) else key) for key in keys):
                raise ArgumentError(
                    "max_frames_per_traj adds an entry 'step_count', but the env has one: leave "
                    "max_frames_per_traj out, or take the StepCounter out of the env's transforms"
                )
        self.adapt(lambda env: TransformedEnv(env, StepCounter(max_steps=max_frames)))

    def reset(self) -> TensorDictBase:
        """Start a new episode in every row.

        Raises:
            EnvError: an env raised.
        """
        return _joined([self._reset(row) for row in range(len(self.members))])

    def step(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Make one transition of each row, and reset the rows that ended.

        Args:
            td: with the actions.

        Returns:
            The frame with its "next", and the TensorDict that the next frame begins with.

        Raises:
            EnvError: an env raised; it is marked as failed.
        """
        frames, starts = [], []
        is_one = len(self.members) == 1
        for row, part in enumerate([td] if is_one else td.unbind(0)):
            try:
                frame, start = self.members[row].step_and_maybe_reset(part)
            except users_errors() as error:
                # If it has stepped already, its reset raised.
                was_stepped = "next" in part
                self.num_stepped = (self.num_envs if is_one else 1) * was_stepped + row
                call = "reset" if was_stepped else "step"
                raise self._failed(row, call, error) from error
            frames.append(frame)
            starts.append(start)
        return _joined(frames), _joined(starts)

    def choose_randomly(self, td: TensorDictBase) -> TensorDictBase:
        """Write random actions into ``td``."""
        if len(self.members) == 1:
            chosen: TensorDictBase = self.members[0].rand_action(td)
            return chosen
        for env, part in zip(self.members, td.unbind(0), strict=True):
            for key, value in env.rand_action().items(include_nested=True, leaves_only=True):
                part.set(key, value)
        return td

    def set_seeds(self, seeds: Sequence[int], *, static_seed: bool = False) -> int:
        """Seed the envs as TorchRL does.

        Args:
            seeds: one for each row; an env of several rows derives its rows' seeds from the first.
            static_seed: an env of several rows gives them all the same seed.

        Returns:
            The next seed of TorchRL's chain of seeds.
        """
        following = 0
        for row, env in enumerate(self.members):
            with self._naming_env("set_seed", row):
                following = env.set_seed(int(seeds[row]), static_seed=static_seed)
        return following

    def can_rebuild(self, row: int) -> bool:
        failed = [each for each, state in enumerate(self._states) if state is not EnvState.OPEN]
        return all(self._makers[each] is not None for each in failed)

    def rebuild(self, rows: Sequence[int], seeds: Sequence[int] | None = None) -> None:
        for index, state in enumerate(self._states):
            if state is EnvState.OPEN:
                continue
            expected = self.members[index].batch_size
            env = self._make_again(index)
            let_processes_run(env)
            for change in self._adapters:
                env = self.members[index] = change(env)
            if env.batch_size != expected:
                raise EnvError(
                    f"{self.name(index)}: made a second time, it has batch_size "
                    f"{list(env.batch_size)}"
                )
            if seeds is not None:
                with self._naming_env("set_seed", index):
                    env.set_seed(int(seeds[index]))
            # Makes sure that it works; the caller resets all envs together.
            self._reset(index)

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        results: list[Any] = []
        for row, env in enumerate(self.members):
            with self._naming_env(name, row):
                result = called(getattr(env, name), args, kwargs)
            # TorchRL's envs over several envs return a list with one value for each.
            num_rows = env.batch_size.numel()
            is_each = isinstance(result, list) and len(result) == num_rows > 1
            results.extend(result if is_each else [result])
        return results

    def _close(self, env: TorchRLEnv) -> None:
        if not env.is_closed:
            env.close()

    def name(self, row: int = 0) -> str:
        return f"env {row} ({_name_of(self.members[row])})"

    def _reset(self, row: int) -> TensorDictBase:
        try:
            td: TensorDictBase = self.members[row].reset()
        except users_errors() as error:
            raise self._failed(row, "reset", error) from error
        return td

    def _failed(self, row: int, call: str, error: BaseException) -> EnvError:
        """Mark an env as failed; the error to raise."""
        self._raised(row)
        return EnvError(f"{self.name(row)}: {call}() raised {describe(error)}")

    def _check_like(self, env: TorchRLEnv, row: int) -> None:
        """Raise SpaceError if the env's specs are not those of the first env."""
        first = self.members[0]
        for name in ("action", "observation", "reward", "done"):
            mine, theirs = (getattr(each, f"full_{name}_spec") for each in (env, first))
            shapes, expected = _shapes(mine), _shapes(theirs)
            # The bounds of observations may differ.
            if shapes != expected or (name == "action" and mine != theirs):
                raise SpaceError(
                    f"{self.name(row)} has other specs than the first env: {name}s "
                    f"{shapes} instead of {expected}"
                )

    def _end(self, env: TorchRLEnv) -> None:
        # Before close(), as a ParallelEnv waits there for an answer of each process.
        for process in vars(base_of(env)).get("_workers", ()):
            with contextlib.suppress(ValueError):  # the env has closed this process already
                process.kill()
                process.join()
        with contextlib.suppress(Exception):
            env.close()


class TorchRLKind(EnvKind):
    """TorchRL's envs."""

    library = "TorchRL"
    can_be_copied = True

    def prepared(self, env: TorchRLEnv, device: torch.device | None) -> TorchRLEnv:
        return env if device is None else env.to(device)

    def num_rows(self, env: TorchRLEnv) -> int | None:
        return env.batch_size.numel() if env.batch_size else None

    def batch(self, envs: list[Any], info_keys: InfoKeys | None, makers: Sequence[Remaker]) -> Envs:
        if info_keys:
            raise ArgumentError(
                "info_keys: a TorchRL env adds such entries itself, see its set_info_dict_reader"
            )
        return TorchRLEnvs(envs, makers)


KIND = TorchRLKind()


def _joined(parts: Sequence[TensorDictBase]) -> TensorDictBase:
    """The TensorDicts of all envs as one: the same object for a single env."""
    if len(parts) == 1:
        return parts[0]
    whole: LazyStackedTensorDict = lazy_stack(list(parts), 0)
    return whole


def _shapes(spec: Any) -> dict[Any, str]:
    """Type, shape and dtype of each leaf of a spec."""
    leaves = spec.items(include_nested=True, leaves_only=True)
    return {key: f"{type(leaf).__name__}{list(leaf.shape)} of {leaf.dtype}" for key, leaf in leaves}


def _check(env: TorchRLEnv) -> None:
    """Raise ArgumentError for an env whose final observations would be missing."""
    within = vars(base_of(env)).get("_env")
    if isinstance(within, VectorEnv):
        mode = within.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        if AutoresetMode(mode) is AutoresetMode.NEXT_STEP:
            raise ArgumentError(
                f"{_name_of(env)} wraps a vector env that resets rows one step late, so TorchRL "
                "gets no final observations: use a ParallelEnv or SerialEnv of single envs, pass "
                "the vector env itself, or make it with autoreset_mode=DISABLED"
            )


def _resets_itself(env: TorchRLEnv) -> bool:
    """Whether rows can be reset only when they end."""
    while isinstance(env, TransformedEnv):
        transforms = env.transform if isinstance(env.transform, Compose) else [env.transform]
        if any(isinstance(transform, _RESETTING_TRANSFORMS) for transform in transforms):
            return True
        env = env.base_env
    return False


def _name_of(env: TorchRLEnv) -> str:
    return type(base_of(env)).__name__

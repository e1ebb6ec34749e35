"""TorchRL envs whose every frame follows from the actions. Importing this imports torchrl."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode
from tensordict import NonTensorData, TensorDict
from tensordict.nn import TensorDictModule as Mod
from torchrl.data import (
    Bounded,
    Categorical,
    Composite,
    NonTensor,
    OneHot,
    Unbounded,
)
from torchrl.envs import (
    CatTensors,
    Compose,
    EnvBase,
    EnvCreator,
    GymEnv,
    GymWrapper,
    InitTracker,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    ToTensorImage,
    TrajCounter,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its own entries
    from torchrl.collectors import Collector

__all__ = [
    "KINDS",
    "Agents",
    "Collector",
    "Counter",
    "GymEnv",
    "ParallelEnv",
    "SerialEnv",
    "TransformedEnv",
    "policy_for",
]


class Counter(EnvBase):
    """Counts steps; the rows of a batched one end at different counts, by turns in either way.

    ``ways`` are the flags it sets beside "done"; ``fails_at`` is a count at which it raises.
    """

    def __init__(
        self,
        *,
        batch_size: tuple[int, ...] = (),
        ways: tuple[str, ...] = ("terminated", "truncated"),
        action: Any = None,
        first_row: int = 0,
        fails_at: int | None = None,
    ) -> None:
        super().__init__(batch_size=batch_size)
        shape = self.batch_size
        self._ways = ways
        self._fails_at = fails_at
        self._count = torch.zeros(*shape, 1)
        self._row = first_row + torch.arange(shape.numel()).reshape(*shape, 1)
        self._noise = torch.Generator().manual_seed(0)
        self._start = 0.0
        self.observation_spec = Composite(
            observation=Unbounded((*shape, 3)),
            inner=Composite(
                echo=Unbounded((*shape, 2), dtype=torch.int64),
                wide=Unbounded((*shape,), dtype=torch.float64),
                shape=shape,
            ),
            pixels=Bounded(0, 255, (*shape, 4, 5, 3), dtype=torch.uint8),
            shape=shape,
        )
        self.action_spec = Bounded(-1, 1, (*shape, 1)) if action is None else action
        self.reward_spec = Unbounded((*shape, 1))
        flags = dict.fromkeys(("done", *ways), Categorical(2, (*shape, 1), dtype=torch.bool))
        self.full_done_spec = Composite(flags, shape=shape)

    def _observe(self) -> dict[str, Any]:
        count, shape = self._count, self.batch_size
        pixels = (count.long() + self._row)[..., None, None].expand(*shape, 4, 5, 3)
        return {
            "observation": torch.cat([count, self._row + 0 * count, self._start + 0 * count], -1),
            "inner": {"echo": count.long() + torch.arange(2), "wide": count[..., 0].double() / 3},
            "pixels": pixels.to(torch.uint8),
        }

    def _reset(self, tensordict: Any, **kwargs: Any) -> TensorDict:
        if tensordict is None or "_reset" not in tensordict:
            self._count = torch.zeros_like(self._count)
        else:
            self._count = torch.where(tensordict["_reset"], 0, self._count)
        return TensorDict(self._observe(), self.batch_size)

    def _step(self, tensordict: Any) -> TensorDict:
        self._count += 1  # in place: what is kept must not be an inference tensor
        if self._fails_at is not None and self._count.max() >= self._fails_at:
            raise RuntimeError("worn out")
        action = tensordict["action"].reshape(*self.batch_size, -1).float()
        over = self._count >= 3 + self._row % 4
        terminates = over & (self._row % 2 == 0)
        flags = {"done": over, "terminated": terminates, "truncated": over & ~terminates}
        given = {name: flags[name] for name in ("done", *self._ways)}
        reward = self._count + action.sum(-1, keepdim=True)
        return TensorDict({**self._observe(), "reward": reward, **given}, self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        self._start = float(seed or 0)


class Agents(EnvBase):
    """Two agents in a group; each has a reward and flags, and the env has flags of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        agents = partial(Composite, shape=(2,))
        self.observation_spec = Composite(agents=agents(observation=Unbounded((2, 3))))
        self.action_spec = Composite(agents=agents(action=OneHot(4, (2, 4))))
        self.reward_spec = Composite(agents=agents(reward=Unbounded((2, 1))))
        flag = Categorical(2, (2, 1), dtype=torch.bool)
        root = Categorical(2, (1,), dtype=torch.bool)
        self.full_done_spec = Composite(
            agents=agents(done=flag, terminated=flag), done=root, terminated=root
        )

    def _observe(self) -> torch.Tensor:
        return torch.arange(6.0).reshape(2, 3) + 10 * self._count

    def _reset(self, tensordict: Any, **kwargs: Any) -> TensorDict:
        self._count = 0
        return TensorDict({"agents": TensorDict({"observation": self._observe()}, [2])})

    def _step(self, tensordict: Any) -> TensorDict:
        self._count += 1
        action = tensordict["agents", "action"].long().argmax(-1, keepdim=True)
        dead = torch.tensor([[self._count >= 3], [self._count >= 5]])
        over = dead.all()[None]
        agents = {
            "observation": self._observe(),
            "reward": action + 1.0,
            "done": dead,
            "terminated": dead,
        }
        return TensorDict({"agents": TensorDict(agents, [2]), "done": over, "terminated": over})

    def _set_seed(self, seed: int | None) -> None:
        pass


class _OwnStart(Counter):
    """What a step begins with is not what the step before ended with."""

    def maybe_reset(self, tensordict: Any) -> Any:
        tensordict = super().maybe_reset(tensordict)
        return tensordict.set("observation", tensordict["observation"] + 0.5)


class _AlwaysAlike(gym.Wrapper[Any, Any, Any, Any]):
    """All episodes begin in the same state."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.env.reset(seed=7, options=options)


def _transformed(env: EnvBase) -> TransformedEnv:
    return TransformedEnv(
        env,
        Compose(
            RewardSum(),
            StepCounter(max_steps=4),
            InitTracker(),
            CatTensors(["observation", ("inner", "echo")], "vector", del_keys=False),
            ToTensorImage(in_keys=["pixels"]),
        ),
    )


_ROWS = [partial(Counter, first_row=number) for number in range(3)]

# Env makers by their special property.
KINDS: dict[str, Any] = {
    "plain": Counter,
    "batched": partial(Counter, batch_size=(5,)),
    "serial": lambda: SerialEnv(3, _ROWS),
    "parallel": lambda: ParallelEnv(2, _ROWS[:2]),
    "transformed": lambda: _transformed(Counter()),
    "transformed batched": lambda: _transformed(Counter(batch_size=(5,))),
    "done only": partial(Counter, batch_size=(5,), ways=()),
    "discrete": lambda: Counter(action=Categorical(3, ())),
    "one-hot": lambda: Counter(action=OneHot(3, (3,))),
    "agents": Agents,
    "its own start": partial(_OwnStart, batch_size=(5,)),
    "gym": lambda: GymWrapper(_AlwaysAlike(gym.make("CartPole-v1"))),
}


def pendulum() -> EnvBase:
    """An env with a random initial state."""
    return GymEnv("Pendulum-v1")


def mended() -> Callable[[], EnvBase]:
    """A maker whose first env, of two rows, raises in its second step; later ones work."""
    fails_at = iter([2])
    return lambda: ParallelEnv(2, partial(Counter, fails_at=next(fails_at, None)))


class _Talking(Counter):
    """Says its count; an episode has three steps."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec["text"] = NonTensor(())

    def _observe(self) -> dict[str, Any]:
        return {**super()._observe(), "text": str(int(self._count))}


def talking() -> EnvBase:
    """An env with an entry that is no tensor."""
    return _Talking()


class _Secret:
    def __deepcopy__(self, memo: Any) -> _Secret:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("is not to travel")


class _WithSecret(_Talking):
    def _observe(self) -> dict[str, Any]:
        return {**super()._observe(), "text": NonTensorData(_Secret())}


def secret() -> EnvBase:
    """An env with an entry that can't be pickled, and so never reaches a trainer."""
    return _WithSecret()


class Growing(EnvBase):
    """Sees one more number at each step, so that observations have no fixed shape.

    An episode has three steps. The observation after k steps is k + 1 times the number k.
    """

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        self.observation_spec = Composite(observation=Unbounded((-1,)))
        self.action_spec = Bounded(-1, 1, (1,))
        self.reward_spec = Unbounded((1,))

    def _observe(self) -> dict[str, Any]:
        return {"observation": torch.full((self._count + 1,), float(self._count))}

    def _reset(self, tensordict: Any, **kwargs: Any) -> TensorDict:
        self._count = 0
        return TensorDict(self._observe())

    def _step(self, tensordict: Any) -> TensorDict:
        self._count += 1
        over = torch.tensor([self._count == 3])
        return TensorDict({**self._observe(), "reward": torch.ones(1), "done": over})

    def _set_seed(self, seed: int | None) -> None:
        pass


class LateEntry(Counter):
    """Has an entry that only steps give."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec["late"] = Unbounded((1,))

    def _step(self, tensordict: Any) -> TensorDict:
        return super()._step(tensordict).set("late", self._count.clone())


def sharing(kind: str) -> EnvCreator:
    """A maker of envs with a transform whose state their processes share."""
    transforms = {
        "VecNorm": lambda: VecNorm(in_keys=["observation"]),
        "VecNormV2": lambda: VecNormV2(in_keys=["observation"]),
        "TrajCounter": TrajCounter,
    }
    return EnvCreator(lambda: TransformedEnv(pendulum(), transforms[kind]()))


def vector_env(mode: AutoresetMode) -> EnvBase:
    """Three CartPoles in one of Gymnasium's own vector envs."""
    makers = 3 * [partial(gym.make, "CartPole-v1")]
    return GymWrapper(gym.vector.SyncVectorEnv(makers, autoreset_mode=mode))


def policy_for(env: EnvBase) -> Mod:
    """A policy that chooses by the step count, which every observation has."""
    [(key, spec)] = env.full_action_spec_unbatched.items(include_nested=True, leaves_only=True)
    of_agents = isinstance(key, tuple)
    source = (*key[:-1], "observation") if of_agents else "observation"

    def choose(observation: torch.Tensor) -> torch.Tensor:
        number = observation[..., :1].abs().mul(10).long()
        shape = (*observation.shape[:-1], *spec.shape[1 if of_agents else 0 :])
        if isinstance(spec, OneHot):
            num = spec.shape[-1]
            return torch.nn.functional.one_hot(number[..., 0] % num, num).to(spec.dtype)
        return (
            (number % 2)
            .expand(*number.shape[:-1], max(1, shape[-1] if spec.shape else 1))
            .reshape(shape)
            .to(spec.dtype)
        )

    return Mod(choose, in_keys=[source], out_keys=[key])

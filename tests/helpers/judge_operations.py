"""Envs and a policy that tell all that they do, and an account of what frames must be.

Each env of this process, and of workers on its threads, notes its steps in a :class:`World`. The
policy writes the number of its weights into each frame: no two publications have the same.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import nn

GAMMA, CLIP, EPSILON = 0.9, 10.0, 1e-8
_numbers = itertools.count()
_worlds: dict[int, World] = {}


class Step(NamedTuple):
    """What really happened; ``code`` and ``floor`` are those of the world at that time."""

    number: int  # counts the steps of its env
    before: np.ndarray
    after: np.ndarray
    action: float
    terminated: bool
    truncated: bool
    code: float
    floor: int


@dataclass(eq=False)
class World:
    """All envs of a run.

    Attributes:
        code: of the trainer's own module.
        floor: by worker_id the newest version that the worker is known to have.
        num_faults: how many more times an env is to raise.
        hooked: the frames that a ``post_collect_hook`` has seen, and how often.
        num_begun: how often a ``pre_collect_hook`` was called.
        num_hooked: how often a ``post_collect_hook`` was called.
    """

    number: int = field(default_factory=_numbers.__next__)
    envs: list[TellingEnv] = field(default_factory=list)
    code: float = 0.0
    floor: Counter[int] = field(default_factory=Counter)
    num_faults: int = 0
    hooked: Counter[tuple[int, ...]] = field(default_factory=Counter)
    num_begun: int = 0
    num_hooked: int = 0

    def __post_init__(self) -> None:
        _worlds[self.number] = self

    def make(self, context: Any) -> TellingEnv:
        env = TellingEnv(self, len(self.envs), context)
        self.envs.append(env)
        return env

    def was_broken(self, worker_id: int) -> bool:
        """Whether an env of a worker has raised."""
        return any(env.is_broken for env in self.envs if env.worker_id == worker_id)

    def has_played(self, worker_id: int, length: int) -> bool:
        """Whether a worker's envs for evaluation have made an episode of this length."""
        own = [env for env in self.envs if env.evaluates and env.worker_id == worker_id]
        return any(num + 1 == length for env in own for _, num in env.steps.copy())

    @property
    def returns(self) -> set[float]:
        """The sums of rewards of all beginnings of episodes."""
        found: set[float] = set()
        for env in [*self.envs]:
            so_far = 0.0
            for (_, num), step in env.steps.copy().items():
                so_far = step.action if num == 0 else so_far + step.action
                found.add(so_far)
        return found

    def stepped(self) -> Counter[int]:
        """How many frames the envs of each worker have made."""
        counts: Counter[int] = Counter()
        for env in self.envs:
            counts[env.worker_id] += 0 if env.evaluates else len(env.steps)
        return counts


@dataclass(frozen=True)
class Maker:
    """Makes the envs of a world; can be pickled, for a worker of this process."""

    world: int

    def __call__(self, context: Any) -> TellingEnv:
        return _worlds[self.world].make(context)


@dataclass(frozen=True)
class Before:
    """A ``pre_collect_hook``; can be pickled, for a worker of this process."""

    world: int

    def __call__(self) -> None:
        _worlds[self.world].num_begun += 1


@dataclass(frozen=True)
class After:
    """A ``post_collect_hook``; can be pickled, for a worker of this process."""

    world: int

    def __call__(self, rollout: TensorDictBase) -> None:
        world = _worlds[self.world]
        world.num_hooked += 1
        real = rollout["collector", "traj_ids"] >= 0
        world.hooked.update(map(tuple, rollout["place"][real].tolist()))


class TellingEnv(gym.Env[Any, Any]):
    """Observes which frame it is, and random numbers; pays the action. Episodes have 1 to 6 frames.

    Attributes:
        steps: by (episode, step).
    """

    observation_space = spaces.Dict(
        {
            "place": spaces.Box(-1, 2**40, (3,), np.int64),
            "value": spaces.Box(-np.inf, np.inf, (2,), np.float64),
        }
    )
    action_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)

    def __init__(self, world: World, uid: int, context: Any) -> None:
        self._world, self.uid = world, uid
        self.worker_id, self.evaluates = context.worker_id, context.for_evaluation
        self.incarnation = context.incarnation
        self.steps: dict[tuple[int, int], Step] = {}
        self.episode = -1
        self.is_broken = False

    def _observed(self) -> Any:
        self.value = self.np_random.normal([5.0, -100.0], [3.0, 0.5])
        place = np.array([self.uid, self.episode, self.num], np.int64)
        return {"place": place, "value": self.value}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode += 1
        self.num, self.length = 0, int(self.np_random.integers(1, 7))
        return self._observed(), {}

    def step(self, action: np.ndarray) -> Any:
        world = self._world
        if world.num_faults and not self.evaluates:
            world.num_faults -= 1
            self.is_broken = True
            raise RuntimeError("the judge's fault")
        before, place = self.value, (self.episode, self.num)
        self.num += 1
        over, way = self.num >= self.length, int(self.np_random.integers(3))
        ends = over and way != 1, over and way != 0
        observation = self._observed()
        floor = world.floor[self.worker_id]
        reward = float(action[0])
        step = Step(len(self.steps), before, self.value, reward, *ends, world.code, floor)
        self.steps[place] = step
        return observation, reward, *ends, {}

    def touch(self) -> int:
        return self.uid


class Telling(nn.Module):
    """Acts by its number. Its memory begins with that, and counts the steps of an episode."""

    def __init__(self, code: float = 0.0) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.rest = nn.Parameter(torch.zeros(300, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.float64))
        self.become(code)

    def become(self, code: float) -> Telling:
        with torch.no_grad():
            self.code.fill_(code)
            self.rest.fill_(code)
        return self

    def initial_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {"memory": self.code.detach().expand(num_envs, 1).clone()}

    def forward(self, value: torch.Tensor, memory: torch.Tensor) -> Any:
        n = len(value)
        told = torch.stack([self.code[0], self.rest.min(), self.rest.max(), self.calls[0]])
        with torch.no_grad():
            self.calls += 1
        extras = {
            "told": told.detach().expand(n, 4).clone(),
            "saw": value.clone(),
            "drawn": torch.rand(n),
            "memory": memory + 1,
        }
        return self.code.detach().expand(n, 1).clone(), extras


class Forgetting(Telling):
    """Has no memory."""

    initial_state = None  # type: ignore[assignment]

    def forward(self, value: torch.Tensor) -> Any:  # type: ignore[override]
        action, extras = super().forward(value, torch.zeros(len(value), 1))
        del extras["memory"]
        return action, extras


class Moments:
    """Mean and deviation of all that was added."""

    def __init__(self) -> None:
        self._all: list[np.ndarray] = []

    def add(self, samples: Any) -> None:
        self._all.extend(np.asarray(samples, np.float64))

    def frozen(self) -> tuple[Any, Any]:
        if not self._all:
            return 0.0, 1.0
        return np.mean(self._all, 0), np.sqrt(np.var(self._all, 0) + EPSILON)


class Seen(NamedTuple):
    """The last frame of an env that was delivered."""

    place: tuple[int, int]
    number: int
    traj_id: int
    done: bool
    version: int
    calls: float
    began: float


@dataclass(eq=False)
class Account:
    """Checks the frames of a run, of several collectors one after the other.

    Attributes:
        world: what happened.
        max_frames: ``max_frames_per_traj``.
        normalizes: "raw" or "normalized"; None: nothing is.
        recurs: the policy has a memory.
        is_hooked: each rollout goes through the hooks of the world.
        num_servers: how many inference servers there have been; 0: each worker has its policy.
        codes: the number of each version's weights.
        calls: what their buffer was published with.
        received: how many frames the present collector delivered, by worker_id.
        ended: the returns of its episodes that were delivered from their start to their end.
        is_exact: whether the statistics are those of ``values``.
        ids: traj_id to the stream, env and episode.
        stream: "taken" of rollouts that were handed over; "" else. Neither goes on in the other.
    """

    world: World
    max_frames: int | None
    normalizes: str | None
    recurs: bool = True
    is_hooked: bool = False
    num_servers: int = 0
    codes: dict[int, float] = field(default_factory=dict)
    calls: dict[int, float] = field(default_factory=dict)
    received: Counter[int] = field(default_factory=Counter)
    ended: list[float] = field(default_factory=list)
    is_exact: bool = True
    frozen: dict[int, tuple[Any, Any]] = field(default_factory=lambda: {0: (0.0, 1.0)})
    values: Moments = field(default_factory=Moments)
    returns: Moments = field(default_factory=Moments)
    _discounted: dict[int, float] = field(default_factory=dict)  # by traj_id
    _delivered: set[tuple[int, int, int]] = field(default_factory=set)
    ids: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    stream: str = ""
    _seen: dict[tuple[str, int], Seen] = field(default_factory=dict)
    _falls: Counter[int] = field(default_factory=Counter)  # of the count of calls
    _to_begin: set[tuple[str, int]] = field(default_factory=set)

    def begins(self) -> None:
        """The next frame of each env is of a new episode, but in what was handed over before."""
        self._to_begin = {(stream, uid) for stream, uid in self._seen if not stream}

    def freeze(self, version: int) -> None:
        """The statistics of now are those of a version."""
        self.frozen[version] = self.values.frozen()

    def receive(self, batch: TensorDictBase, *, shared: bool, sync: bool) -> list[Any]:
        """Check the frames ``[..., T]`` of a batch; the real ones as (worker_id, version, mask).

        Args:
            batch: the batch.
            shared: the policy is the trainer's own module.
            sync: no frame may be older than what its worker is known to have.
        """
        flat = batch.reshape(-1)
        flat = flat[flat["collector", "traj_ids"] >= 0]
        rows = {key: value.reshape(len(flat), -1).tolist() for key, value in flat.items(True, True)}
        names = [*rows]
        frames = [
            dict(zip(names, frame, strict=True)) for frame in zip(*rows.values(), strict=True)
        ]
        for frame in frames:
            self._check(frame, shared=shared, sync=sync)
        if self.is_exact or self.normalizes is None:
            self._check_values(frames)
        return [
            (
                frame["collector", "worker_id"][0],
                frame["collector", "policy_version"][0],
                frame.get(("collector", "mask"), [True])[0],
            )
            for frame in frames
        ]

    def _check(self, frame: dict[Any, Any], *, shared: bool, sync: bool) -> None:
        uid, *place = frame["place"]
        episode, num = place = tuple(place)
        env = self.world.envs[uid]
        step = env.steps[place]
        where = f"env {uid} of worker {env.worker_id}, episode {episode}, step {num}"
        about = {key[1]: frame[key][0] for key in frame if key[0] == "collector"}
        version, traj_id, faulted = about["policy_version"], about["traj_ids"], about["faulted"]
        assert not env.evaluates, f"{where}: of an evaluation"
        assert (uid, *place) not in self._delivered, f"{where}: delivered twice"
        self._delivered.add((uid, *place))
        self.received[env.worker_id] += 1
        assert about["worker_id"] == env.worker_id, where
        hooked = self.world.hooked[uid, episode, num]
        assert hooked == self.is_hooked, f"{where}: {hooked} times in a hook"
        known = self.ids.setdefault(traj_id, (self.stream, uid, episode))
        assert known == (self.stream, uid, episode), (
            f"{where}: traj_id {traj_id} was that of {known}"
        )
        # The transition.
        assert frame["next", "place"] == [uid, episode, num + 1], where
        assert not faulted or (env.is_broken and (episode, num + 1) not in env.steps), where
        cut = faulted or num + 1 == self.max_frames
        ends = [frame["next", name][0] for name in ("terminated", "truncated", "done")]
        truncated = step.truncated or (cut and not step.terminated)
        either = step.terminated and cut and ends[1]  # it may be both
        assert ends == [step.terminated, truncated or either, ends[0] or ends[1]], where
        # The weights.
        code, *others, calls = frame["told"]
        assert others == [code, code], f"{where}: torn weights"
        assert frame["action"] == [code] == [step.action], where
        if shared:
            assert code == step.code, f"{where}: not the trainer's weights"
        else:
            assert code == self.codes[version], f"{where}: not the weights of version {version}"
        if sync:
            assert version >= step.floor, f"{where}: version {version}, not {step.floor}"
        began = 0.0
        if self.recurs:
            [memory] = frame["memory"]
            assert frame["next", "memory"] == [memory + 1], where
            began = memory - num
            assert num or began == code, f"{where}: begins with the memory of other weights"
        now = Seen(place, step.number, traj_id, ends[2], version, calls, began)
        self._check_following(where, self._seen.get((self.stream, uid)), now, env)
        self._seen[self.stream, uid] = now
        if ends[2] and not faulted:
            self.ended.append(sum(env.steps[episode, each].action for each in range(num + 1)))
        frame["truth"] = step

    def _check_following(self, where: str, last: Seen | None, now: Seen, env: TellingEnv) -> None:
        """Check what goes on from the last frame of an env that was delivered."""
        if last is not None:
            key = self.stream, env.uid
            is_new = key not in self._to_begin or now.place[0] > last.place[0]
            assert is_new, f"{where}: goes on after set_seed()"
            self._to_begin.discard(key)
            assert now.place > last.place, f"{where}: delivered after {last.place}"
            assert now.version >= last.version, f"{where}: an older version came back"
            follows = now.number == last.number + 1
            if last.place[0] == now.place[0]:
                assert now.began == last.began, f"{where}: another memory"
                assert not follows or not last.done, f"{where}: an end before"
                assert (now.traj_id == last.traj_id) == follows, f"{where}: {now.traj_id=}"
        if self.num_servers:
            self._check_served(where, last, now, env)
            return
        # Its buffer goes on from what was published, whatever was done between two frames.
        expected = now.calls if now.number else self.calls.get(now.version, now.calls)
        if last is not None and now.number == last.number + 1:
            was_swapped = now.version != last.version and now.version in self.calls
            expected = self.calls[now.version] if was_swapped else last.calls + 1
        if not self.world.was_broken(env.worker_id):  # an env that raised costs a call
            assert now.calls == expected, f"{where}: {now.calls} calls, not {expected}"

    def _check_served(self, where: str, last: Seen | None, now: Seen, env: TellingEnv) -> None:
        """Check that no two frames of an env are of one pass of a server, which counts them."""
        assert now.calls >= self.calls[now.version], where
        if last is not None and now.version == last.version and now.calls <= last.calls:
            self._falls[env.uid] += 1
            assert self._falls[env.uid] < self.num_servers, f"{where}: {now.calls} calls again"

    def _check_values(self, frames: list[dict[Any, Any]]) -> None:
        """Check what is normalised, by all that was delivered before, and how it is recorded."""
        returns = []
        for frame in frames:
            step, [version] = frame["truth"], frame["collector", "policy_version"]
            mean, deviation = self.frozen[version] if self.normalizes else (0.0, 1.0)
            clip = CLIP if self.normalizes else np.inf
            before, after = ((each - mean) / deviation for each in (step.before, step.after))
            before, after = before.clip(-clip, clip), after.clip(-clip, clip)
            assert np.allclose(frame["saw"], before), f"what the policy saw of version {version}"
            if self.normalizes == "raw":
                before, after = step.before, step.after
            assert np.allclose(frame["value"], before)
            assert np.allclose(frame["next", "value"], after)
            [traj_id] = frame["collector", "traj_ids"]
            so_far = step.action + GAMMA * self._discounted.get(traj_id, 0.0)
            returns.append(so_far)
            self._discounted[traj_id] = so_far
        self.values.add([frame["truth"].before for frame in frames])
        self.returns.add(returns)
        scale = self.returns.frozen()[1] if self.normalizes == "normalized" else 1.0
        rewards = [frame["truth"].action / scale for frame in frames]
        clip = CLIP if self.normalizes == "normalized" else np.inf
        got = [frame["next", "reward"][0] for frame in frames]
        assert np.allclose(got, np.clip(rewards, -clip, clip)), "rewards"

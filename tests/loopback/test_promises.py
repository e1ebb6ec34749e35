"""The promises of the README, while a run is disturbed at random in all ways at once."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from helpers.churning_workers import ChurningWorkers, churning_collector
from helpers.interrupting import interrupted_at
from helpers.loopback_pool import backend_of, workers_of
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from tensordict import TensorDict
from torch import nn

import distcollect as dc
from distcollect.errors import WorkerLost

T = 3
TIMEOUT_S = 60.0
_env_numbers = itertools.count()
WORKERS = st.integers(0, 4)


class Numbered(gym.Env[np.ndarray, Any]):
    """Observes a number of its own, and how often it was stepped: no two frames are the same."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.number = next(_env_numbers)
        self.stepped = self.length = 0
        self.pause_s = 0.0

    def _observed(self) -> np.ndarray:
        return np.array([self.number, self.stepped], np.float64)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**kwargs)
        self.length = 0
        return self._observed(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(self.pause_s)
        self.stepped += 1
        self.length += 1
        return self._observed(), 1.0, self.length == 7, False, {}

    def slow_down(self, pause_s: float) -> None:
        self.pause_s = pause_s


class Policy(nn.Module):
    """Writes both of its weights into each frame; both have the number of their version."""

    def __init__(self, version: int = 0) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((1,), float(version)))
        self.rest = nn.Parameter(torch.full((300,), float(version)))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        n = len(observation)
        told = torch.stack([self.first[0], self.rest.min(), self.rest.max()]).expand(n, 3)
        return torch.zeros(n, dtype=torch.int64), {"told": told}


MODES: dict[str, dict[str, Any]] = {
    "sync": {"sync": True},
    "sync, preempted": {"sync": True, "preemptive_threshold": 0.5},
    "async": {"sync": False},
    "in turn": {"sync": False, "reproducible": True},
    "paced": {"sync": False, "staleness": dc.Staleness(1)},
    "dropped": {"sync": False, "staleness": dc.Staleness(1, mode="drop")},
    "masked": {"sync": False, "staleness": dc.Staleness(1, mode="mask")},
}


INTERRUPTED: dict[str, Callable[[Any], Any]] = {
    "next": lambda user: user.collector.next(timeout_s=TIMEOUT_S),
    "for": lambda user: next(iter(user.collector)),
    "push": lambda user: user.push(None, wait=True),
    "push to one": lambda user: user.push([user.pick(0)], wait=True),
    "push without waiting": lambda user: user.push(None, wait=False),
    "seed": lambda user: user.collector.set_seed(9),
    "call": lambda user: user.collector.call("slow_down", 0.0, timeout_s=TIMEOUT_S),
    "evaluate": lambda user: user.collector.evaluate(2, timeout_s=TIMEOUT_S),
    "state": lambda user: user.collector.state_dict(),
    "stats": lambda user: user.collector.stats(),
}


class Promises(RuleBasedStateMachine):
    """A user, and all that can happen to the run."""

    collector: Any = None

    @initialize(mode=st.sampled_from(sorted(MODES)), num_workers=st.integers(2, 3))
    def make(self, mode: str, num_workers: int) -> None:
        self.mode, self.num_workers = MODES[mode], num_workers
        self.frames: set[tuple[int, int]] = set()  # of all sessions
        self.env_of: dict[int, int] = {}  # traj_id to the number of its env
        self.version_of: dict[int, int] = {}  # env to the highest version in its frames
        self.policy = Policy()
        self.version = 0
        self.open()

    def open(self) -> None:
        self.received = 0
        self.leaving: set[int] = set()
        self.sent: dict[int, int] = {}  # worker_id to the newest version sent to it
        # In sync mode a batch has a rollout of each of the first workers.
        frames = T * self.num_workers if self.mode["sync"] else T
        self.collector = churning_collector(
            Numbered,
            self.policy,
            frames_per_batch=frames,
            num_workers=self.num_workers,
            **self.mode,
        )

    @property
    def workers(self) -> ChurningWorkers:
        workers: ChurningWorkers = workers_of(self.collector)
        return workers

    @property
    def pool(self) -> Any:
        return backend_of(self.collector).pool

    @property
    def present(self) -> list[int]:
        self.workers.settle()
        return list(self.pool.worker_ids)

    # What the user does.

    @rule(count=st.integers(1, 3))
    def take_batches(self, count: int) -> None:
        for _ in range(count):
            self.next()

    def next(self) -> None:
        sent = dict(self.sent)
        self.receive(self.collector.next(timeout_s=TIMEOUT_S), sent)
        assert self.collector.ledger.total.delivered == self.received

    def receive(self, batch: TensorDict, sent: dict[int, int]) -> None:
        about = batch["collector"]
        ids = about["traj_ids"]
        real = ids >= 0
        assert batch.numel() == self.collector.frames_per_batch
        may_end_early = "preemptive_threshold" in self.mode
        assert real.all() or may_end_early, "a rollout that nobody preempted ended early"
        envs, steps = batch["next", "observation"][real].long().T.tolist()
        versions, workers = (
            about["policy_version"][real].tolist(),
            about["worker_id"][real].tolist(),
        )
        frames = list(zip(envs, steps, strict=True))
        assert len({*frames}) == len(frames), "a frame is in the batch twice"
        assert not self.frames.intersection(frames), "a frame was delivered before"
        self.frames.update(frames)
        self.received += len(frames)
        told = batch["told"][real]
        assert (told == torch.tensor(versions)[:, None]).all(), "torn weights, or a wrong version"
        for env, traj_id, version in zip(envs, ids[real].tolist(), versions, strict=True):
            assert self.env_of.setdefault(traj_id, env) == env, "a traj_id of two envs"
            assert self.version_of.get(env, 0) <= version, "an older version came back"
            self.version_of[env] = version
        if self.mode["sync"]:
            for worker_id, version in zip(workers, versions, strict=True):
                assert version >= sent.get(worker_id, 0), "older than the weights sent to it"
            assert torch.equal(about["worker_id"], about["worker_id"].sort(0).values)
        staleness = self.mode.get("staleness")
        if staleness is not None and staleness.mode != "mask":
            assert self.collector.version_lag.max <= staleness.max_policy_lag
        if staleness is not None and staleness.mode == "mask":
            for worker_id, version, shown in zip(
                workers, versions, about["mask"][real].tolist(), strict=True
            ):
                lag = self.pool.lag(worker_id, version)
                assert shown == (lag <= staleness.max_policy_lag)

    @rule(chosen=st.sets(WORKERS, max_size=3), wait=st.booleans())
    def publish(self, chosen: set[int], wait: bool) -> None:
        self.push(sorted({self.pick(number) for number in chosen}) or None, wait=wait)

    def pick(self, number: int) -> int:
        """One of the workers that are there. Which ones these are depends on timing."""
        present = self.present
        return present[number % len(present)]

    def push(self, worker_ids: list[int] | None, *, wait: bool) -> None:
        # A publication that was interrupted before it returned may count a moment later.
        assert self.collector.stale_frames is not None
        version = self.collector.policy_version + 1
        with torch.no_grad():
            self.policy.first.fill_(version)
            self.policy.rest.fill_(version)
        try:
            self.collector.update_policy_weights_(self.policy, worker_ids=worker_ids, wait=wait)
        except WorkerLost as error:
            note(f"all of {worker_ids} are gone: {error}")
        assert self.collector.policy_version == version
        for worker_id in worker_ids or self.pool.worker_ids:
            self.sent[worker_id] = version

    @rule(seed=st.integers(0, 1000))
    def seed(self, seed: int) -> None:
        self.collector.set_seed(seed)

    @rule()
    def evaluate(self) -> None:
        evaluation = self.collector.evaluate(2, seed=1, timeout_s=TIMEOUT_S)
        assert evaluation.returns.tolist() == [7.0, 7.0]

    @rule(number=WORKERS, pause_s=st.sampled_from([0.0, 0.003]))
    def slow_down(self, number: int, pause_s: float) -> None:
        with contextlib.suppress(WorkerLost):  # it may be leaving
            self.collector.call(
                "slow_down", pause_s, worker_ids=self.pick(number), timeout_s=TIMEOUT_S
            )

    @rule(line=st.integers(1, 250), name=st.sampled_from(sorted(INTERRUPTED)))
    def interrupt(self, line: int, name: str) -> None:
        sent, results = dict(self.sent), []

        def call() -> None:
            result = INTERRUPTED[name](self)
            if isinstance(result, TensorDict):
                results.append(result)

        was_interrupted, tracer = interrupted_at(line, call)
        for batch in results:
            self.receive(batch, sent)
        note(f"{name} was interrupted: {was_interrupted}, at {tracer.where}")
        assert self.collector.stale_frames is not None  # after what it may have left in the queue

    @rule()
    def save_and_restore(self) -> None:
        state = self.collector.state_dict()
        self.close()
        self.policy = Policy(state["policy_version"])
        self.version_of = {}  # of envs that are gone
        self.open()
        self.collector.load_state_dict(state)
        self.version = state["policy_version"]

    # What happens to the workers.

    @rule(number=WORKERS, batches=st.integers(0, 2))
    def kill(self, number: int, batches: int) -> None:
        """A worker dies while batches are taken; another process replaces it."""
        self.workers.kill(self.pick(number))
        self.take_batches(batches)

    @rule(number=WORKERS, batches=st.integers(0, 2))
    def leave(self, number: int, batches: int) -> None:
        """A worker leaves; one that was not told to always stays."""
        staying = sorted({*self.present} - self.leaving)
        if len(staying) > 1:
            worker_id = staying[number % len(staying)]
            self.leaving.add(worker_id)
            self.workers.leave(worker_id)
        self.take_batches(batches)

    @rule()
    def grow(self) -> None:
        taken = {*self.present} | self.leaving
        if len(taken) < 5:
            self.workers.grow(next(w for w in range(5) if w not in taken))

    @rule()
    def preempt(self) -> None:
        """The rollouts that are collected for the next batch end early."""
        if "preemptive_threshold" in self.mode:
            self.pool._loop.do(self.pool._core.end_early)
            self.next()

    # What must hold then.

    @invariant()
    def the_ledger_adds_up(self) -> None:
        if self.collector is None:
            return
        report = self.collector.ledger
        for frames in report.workers.values():
            assert frames.stepped == frames.delivered + sum(frames.lost.values()) + frames.open
            assert min(frames.delivered, frames.open, *frames.lost.values()) >= 0
        # A batch that an interrupted call did not return comes with the next one, or is given up.
        unclaimed = report.total.delivered - self.received
        assert 0 <= unclaimed <= self.collector.frames_per_batch

    @invariant()
    def versions_grow(self) -> None:
        if self.collector is not None:
            assert self.collector.policy_version >= self.version
            self.version = self.collector.policy_version

    @invariant()
    def gradients_are_enabled(self) -> None:
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()

    def close(self) -> None:
        self.survivors_deliver()
        self.collector.shutdown()
        total = self.collector.ledger.total
        assert total.open == 0
        assert total.delivered == self.received
        causes = {"worker_lost", "left", "stale", "given_up", "shut_down", "interrupted"}
        assert total.lost.keys() <= causes
        self.collector = None

    def survivors_deliver(self) -> None:
        waiting = {*self.present}
        for _ in range(60):
            before = {w: f.delivered for w, f in self.collector.ledger.workers.items()}
            self.next()
            after = {w: f.delivered for w, f in self.collector.ledger.workers.items()}
            waiting -= {w for w, count in after.items() if count > before.get(w, 0)}
            waiting &= {*self.present}
            if not waiting or self.mode["sync"]:
                return
        raise AssertionError(f"workers {waiting} deliver nothing")

    def teardown(self) -> None:
        if self.collector is not None:
            self.close()


TestPromises = Promises.TestCase

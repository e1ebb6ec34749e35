"""An inference server computes the actions of all workers, and is replaced when it dies."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.descendants import descendants, links_of, with_variable
from helpers.envs import ProcessIdEnv
from helpers.judge_weights import PayingEnv, Shown, digest, fill
from helpers.policies import CategoricalPolicy
from helpers.recurrent_policies import Counter
from helpers.waiting import eventually
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical, Independent, Normal

import distcollect as dc

W, N, T = 2, 3, 20
SOON_S = 60

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules
for each in (CategoricalPolicy, Counter, ProcessIdEnv):
    cloudpickle.register_pickle_by_value(sys.modules[each.__module__])

ON_HOST = dc.Inference("host", batch_size=N)


class CountingEnv(gym.Env[Any, Any]):
    """Its episodes differ in length; an observation has the steps of the episode at index 2."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Discrete(5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.length = 0, self.np_random.integers(1, 8)
        return self.observe(), {}

    def observe(self) -> Any:
        return np.array([*self.np_random.random(2), self.steps, 0.0])

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observe(), float(action), self.steps >= self.length, False, {}


class MaskedEnv(gym.Env[Any, Any]):
    """Half of its actions are forbidden; the env raises if one of these is chosen."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (2, 3), np.uint8),
            "of": spaces.Dict(mask=spaces.MultiBinary(6)),
        }
    )
    action_space = spaces.Discrete(6)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observe(), {}

    def observe(self) -> Any:
        self.mask = self.np_random.permutation([0, 0, 0, 1, 1, 1]).astype(np.int8)
        image = self.np_random.integers(0, 256, (2, 3)).astype(np.uint8)
        return {"image": image, "of": {"mask": self.mask}}

    def step(self, action: Any) -> Any:
        if not self.mask[action]:
            raise ValueError(f"action {action} is forbidden")
        return self.observe(), 1.0, bool(self.np_random.random() < 0.2), False, {}


class FailingEnv(CountingEnv):
    """Raises in some steps and resets, but not in the first ones, which have no seed."""

    resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        found = super().reset(seed=seed)
        self.fails = self.np_random.random() < 0.1
        self.resets += 1
        if self.resets > 2 and self.np_random.random() < 0.02:
            raise OSError("the simulator can't be reset")
        return found

    def step(self, action: Any) -> Any:
        if self.fails and self.steps == 2:
            raise OSError("the simulator crashed")
        return super().step(action)


class BreakingEnv(CountingEnv):
    """Raises after ten steps; it takes a while to be made."""

    def __init__(self) -> None:
        self.rest = iter(range(10))
        time.sleep(0.05)

    def step(self, action: Any) -> Any:
        next(self.rest)
        return super().step(action)


def several() -> gym.vector.VectorEnv[Any, Any, Any]:
    return gym.make_vec("CartPole-v1", N, vectorization_mode="sync")


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 6)

    def forward(self, image: torch.Tensor, of: Any) -> Categorical:
        logits = self.net(image.flatten(1).float())
        return Categorical(logits=logits.masked_fill(of["mask"] == 0, -torch.inf))


class Gaussian(nn.Module):
    """A distribution behind dropout, which draws random numbers too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1))

    def forward(self, observation: torch.Tensor) -> Independent:
        return Independent(Normal(2 * self.net(observation).tanh(), 0.3), 1)


class Mean(nn.Module):
    """Draws a number, which it writes into the frame."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, observation: torch.Tensor) -> Any:
        return self.net(observation).tanh(), {"drawn": torch.rand(len(observation))}


class LearnedStart(nn.Module):
    """Its state begins with random numbers, and goes into its actions."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 8)
        self.start = nn.Parameter(torch.rand(8))
        self.head = nn.Linear(8, 5)

    def initial_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {"hidden": self.start + torch.randn(num_envs, 8)}

    def forward(self, observation: Any, hidden: Any) -> Any:
        hidden = self.cell(observation, hidden)
        return Categorical(logits=self.head(hidden)), {"hidden": hidden}


def of_tensordicts() -> TensorDictSequential:
    return TensorDictSequential(
        TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=Categorical,
            return_log_prob=True,
        ),
    )


def five_actions() -> nn.Module:
    torch.manual_seed(2)
    return OfLogits(nn.Linear(4, 5))


class OfLogits(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, observation: torch.Tensor) -> Categorical:
        return Categorical(logits=self.net(observation))


CASES: dict[str, tuple[Any, Any]] = {
    "env faults": (FailingEnv, five_actions),
    "vector env": (several, CategoricalPolicy),
    "distribution": ("CartPole-v1", CategoricalPolicy),
    "dropout": ("Pendulum-v1", Gaussian),
    "noise": ("Pendulum-v1", lambda: dc.GaussianNoise(dc.EpsilonGreedy(Mean(), 0.2), 0.1)),
    "recurrent": (CountingEnv, Counter),
    "random start": (CountingEnv, LearnedStart),
    "TensorDict": ("CartPole-v1", of_tensordicts),
    "masked": (MaskedEnv, Masked),
}


def batches(env: Any, policy: Any, inference: dc.Inference | None) -> list[TensorDict]:
    with dc.RPCDataCollector(
        env,
        policy,
        num_workers=W,
        envs_per_worker=N,
        frames_per_batch=W * N * T,
        total_frames=3 * W * N * T,
        sync=True,
        max_frames_per_traj=30,
        faults=dc.Faults(max_env_faults=5),
        inference=inference,
    ) as collector:
        collector.set_seed(7)
        found = []
        for batch in collector:
            found.append(batch)
            pushed = policy
            while not isinstance(pushed, nn.Module):  # noise around it
                pushed = pushed.policy
            with torch.no_grad():
                for weight in pushed.parameters():
                    weight.mul_(0.9)
            collector.update_policy_weights_(pushed)
        return found


@pytest.mark.parametrize("case", CASES)
def test_the_frames_are_those_of_workers_with_policies_of_their_own(case: str) -> None:
    env, make = CASES[case]
    torch.manual_seed(1)
    policy = make()
    at_first = cloudpickle.dumps(policy)
    expected = batches(env, policy, None)
    found = batches(env, cloudpickle.loads(at_first), ON_HOST)
    assert any(like["collector", "faulted"].any() for like in expected) == (case == "env faults")
    for batch, like in zip(found, expected, strict=True):
        assert set(batch.keys(True, True)) == set(like.keys(True, True))
        for key in like.keys(True, True):
            if key != ("collector", "traj_ids"):
                assert torch.equal(batch[key], like[key]), key


class Telling(nn.Module):
    """Writes the id of the process that computes it, and in how many rows at once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> Any:
        n = len(observation)
        told = {"pid": torch.full((n,), os.getpid()), "rows": torch.full((n,), n)}
        return torch.zeros(n, dtype=torch.int64), told


class Weighing(Telling):
    """Writes its weight, too."""

    def forward(self, observation: torch.Tensor) -> Any:
        action, told = super().forward(observation)
        return action, {**told, "weight": self.weight.expand(len(observation))}


def test_one_process_has_the_policy_of_all_workers() -> None:
    with dc.MultiSyncDataCollector(
        ProcessIdEnv,
        Telling(),
        num_workers=3,
        envs_per_worker=2,
        frames_per_batch=24,
        inference=dc.Inference("host"),
    ) as collector:
        batch = next(iter(collector))
        [pid] = batch["pid"].unique().tolist()
        assert pid not in batch["observation"].unique().tolist()
        assert pid in descendants(os.getpid())
        assert set(collector.stats().workers) == {*collector.worker_states} == {0, 1, 2}
        assert collector.num_workers == 3


def test_every_frame_shows_the_weights_of_its_version() -> None:
    policy = fill(Shown(), 0)
    digests = {0: digest(policy.state_dict())}
    with dc.MultiaSyncDataCollector(
        PayingEnv,
        policy,
        num_workers=3,
        frames_per_batch=8,
        total_frames=1200,
        inference=dc.Inference("host"),
    ) as collector:
        newest: dict[int, int] = {}
        for number, batch in enumerate(collector):
            versions = batch["collector", "policy_version"].reshape(-1).tolist()
            for version, shown in zip(versions, batch["digest"].reshape(-1, 1), strict=True):
                assert torch.equal(shown, digests[version])
            [worker_id] = batch["collector", "worker_id"].unique().tolist()
            assert versions == sorted(versions)
            assert versions[0] >= newest.get(worker_id, 0)
            newest[worker_id] = versions[-1]
            if number % 3 == 0:
                fill(policy, number + 1)
                digests[number // 3 + 1] = digest(policy.state_dict())
                collector.update_policy_weights_(policy, wait=number % 2 == 0)
        assert max(newest.values()) > 10


def test_a_half_that_is_computed_out_of_turn_has_its_own_version() -> None:
    """The smaller half of a worker's envs may fit into a pass that has no room for the larger."""
    with dc.MultiaSyncDataCollector(
        ProcessIdEnv,
        policy := Weighing(),
        num_workers=3,
        envs_per_worker=5,
        frames_per_batch=25,
        inference=dc.Inference("host", batch_size=5),
    ) as collector:
        for version in range(1, 600):
            nn.init.constant_(policy.weight, version)
            collector.update_policy_weights_(policy, wait=False)
            batch = collector.next()
            assert torch.equal(batch["weight"].long(), batch["collector", "policy_version"])


class Beginning(Weighing):
    """Its state at an episode's start is its weight."""

    def initial_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {"begun": self.weight.expand(num_envs, 1)}

    def forward(self, observation: torch.Tensor, begun: torch.Tensor) -> Any:
        action, told = super().forward(observation)
        return action, {**told, "begun": begun}


@contextlib.contextmanager
def publishing(collector: Any, weight: torch.Tensor) -> Iterator[None]:
    """Meanwhile weights that are their version are published, one after the other."""
    ended = threading.Event()

    def publish() -> None:
        for version in count(1):
            if ended.wait(0.01):
                return
            nn.init.constant_(weight, version)
            collector.update_policy_weights_()

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        yield
    finally:
        ended.set()
        publisher.join(SOON_S)


def test_new_weights_that_come_while_an_env_is_made_anew_show_in_all_frames_from_then_on() -> None:
    with dc.MultiSyncDataCollector(
        BreakingEnv,
        policy := Weighing(),
        num_workers=1,
        frames_per_batch=95,
        inference=dc.Inference("host"),
        faults=dc.Faults(max_env_faults=100),
    ) as collector:
        with publishing(collector, policy.weight):
            for _ in range(4):
                batch = collector.next()
                assert torch.equal(batch["weight"].long(), batch["collector", "policy_version"])
        assert len(batch["collector", "policy_version"].unique()) > 5


def test_an_episode_begins_with_the_state_of_the_weights_that_act_first() -> None:
    with (
        dc.MultiaSyncDataCollector(
            CountingEnv,
            policy := Beginning(),
            num_workers=1,
            envs_per_worker=2,
            frames_per_batch=1000,
            inference=dc.Inference("host"),
        ) as collector,
        publishing(collector, policy.weight),
    ):
        for _ in range(6):
            batch = collector.next()
            first = batch["observation"][..., 2] == 0
            begun = batch["begun"][..., 0].long()[first]
            assert torch.equal(begun, batch["collector", "policy_version"][first])


def test_workers_and_server_that_are_killed_lose_no_frame_without_a_cause() -> None:
    told = Telling()
    with dc.MultiSyncDataCollector(
        ProcessIdEnv,
        told,
        num_workers=2,
        envs_per_worker=2,
        frames_per_batch=400,
        cat_results=0,
        inference=dc.Inference("host"),
        faults=dc.Faults(restart_pause_s=0.1),
    ) as collector:
        batch = collector.next()
        collector.update_policy_weights_(told)
        pids = batch["pid"].unique().tolist()
        for victim in ("server", "worker", "server"):
            pid = pids[-1] if victim == "server" else int(batch["observation"][0, 0, 0])
            os.kill(pid, signal.SIGKILL)
            batch = collector.next()
            assert batch.numel() == 400
            batch = collector.next()
            assert batch["collector", "policy_version"].unique().tolist() == [1]
            pids += batch["pid"].unique().tolist()
        assert len(set(pids)) == 3
        stats = collector.stats()
        assert (stats.num_restarts, stats.inference.num_restarts) == (3, 2)
        assert sum(worker.num_restarts for worker in stats.workers.values()) == 1
        collector.shutdown()
        assert {*collector.ledger.workers} == {0, 1}
        total = collector.ledger.total
        assert total.stepped == total.delivered + sum(total.lost.values())
        assert not total.at_most


def test_a_rollout_can_end_early_while_the_server_is_away() -> None:
    with dc.MultiSyncDataCollector(
        ProcessIdEnv,
        told := Telling(),
        num_workers=1,
        envs_per_worker=2,
        frames_per_batch=200_000,
        batch_deadline_s=3,
        inference=dc.Inference("host"),
        faults=dc.Faults(restart_pause_s=100),
    ) as collector:
        pid = int(collector.next()["pid"].flatten()[0])
        # The second process that is replaced in a row is replaced after a pause only.
        for _ in range(2):
            timer = threading.Timer(1, os.kill, (pid, signal.SIGKILL))
            timer.start()
            begin = time.monotonic()
            batch = collector.next()
            assert 0 < int(batch["collector", "mask"].sum()) < 200_000
            assert time.monotonic() - begin < 60
            timer.join()
            pid = int(batch["pid"][batch["collector", "mask"]][-1])
        assert told.weight == 0


def names_of_sockets(pid: int) -> set[str]:
    """The abstract ones, as people read them."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    own = links_of(pid)
    return {row[-1] for row in lines if row[-1][0] == "@" and f"socket:[{row[-2]}]" in own}


def takes(taken: socket.socket, name: str) -> bool:
    """Whether it has the name now; nobody can connect to it."""
    with contextlib.suppress(OSError):
        taken.bind(name.replace("@", "\0").encode())
        return True
    return False


def test_who_takes_the_name_of_a_servers_socket_holds_up_nobody() -> None:
    with (
        dc.MultiSyncDataCollector(
            ProcessIdEnv,
            Telling(),
            num_workers=2,
            frames_per_batch=10,
            inference=dc.Inference("host"),
            faults=dc.Faults(restart_pause_s=0.1, max_restarts=1),
        ) as collector,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken,
    ):
        pid = int(collector.next()["pid"].flatten()[0])
        [name] = names_of_sockets(pid)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: takes(taken, name))
        assert collector.next()["pid"].unique().tolist() != [pid]


class Hanging(Telling):
    """Hangs in one call in its first process, once it has been called thirty times."""

    calls = 0

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def forward(self, observation: torch.Tensor) -> Any:
        self.calls += 1
        if self.calls == 30 and not self.mark.exists():
            self.mark.touch()
            self.take_a_long_nap()
        return super().forward(observation)

    def take_a_long_nap(self) -> None:
        time.sleep(1000)


def test_a_forward_pass_that_hangs_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with dc.MultiSyncDataCollector(
        ProcessIdEnv,
        Hanging(tmp_path / "mark"),
        num_workers=2,
        frames_per_batch=200,
        inference=dc.Inference("host"),
        faults=dc.Faults(step_timeout_s=2),
    ) as collector:
        batch = collector.next()
        assert len(batch["pid"].unique()) == 2
        assert len(batch["observation"].unique()) == 2  # the workers are those from the start
    [said] = [each for each in caplog.messages if "killing it" in each]
    assert "inference server 0: its policy chose no actions within" in said
    assert "it was in take_a_long_nap" in said


class Raising(Telling):
    def forward(self, observation: torch.Tensor) -> Any:
        if (observation >= 5).any():
            raise ZeroDivisionError("no such thing")
        return super().forward(observation)


class Rising(gym.Env[Any, Any]):
    observation_space = spaces.Box(0, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.full(1, self.steps, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("inference", [None, dc.Inference("host")], ids=["worker", "host"])
def test_a_policy_that_raises(inference: dc.Inference | None) -> None:
    with (
        dc.MultiSyncDataCollector(
            Rising, Raising(), num_workers=2, frames_per_batch=40, inference=inference
        ) as collector,
        pytest.raises(
            dc.PolicyError,
            match=r"(?s)worker [01]: the policy raised ZeroDivisionError: no such thing \(it was "
            r"given 'observation' \[[12], 1\] float32\).*in forward",
        ),
    ):
        collector.next()


def test_a_policy_that_takes_no_such_observation() -> None:
    class Wrong(nn.Module):
        def forward(self, observation: Any, camera: Any) -> Any:
            return observation

    with pytest.raises(dc.PolicySignatureError, match="'camera' is no entry of it"):
        dc.MultiSyncDataCollector(
            Rising, Wrong(), num_workers=1, frames_per_batch=4, inference=dc.Inference("host")
        )


def test_evaluation() -> None:
    with dc.MultiSyncDataCollector(
        "CartPole-v1",
        CategoricalPolicy(),
        num_workers=2,
        frames_per_batch=8,
        inference=dc.Inference("host"),
    ) as collector:
        first, second = (collector.evaluate(4, seed=1).returns.tolist() for _ in range(2))
        assert first == second
        collector.update_policy_weights_()
        assert collector.evaluate(4).policy_version.tolist() == [1] * 4


class Seen(nn.Module):
    """Tells how many rows it has seen before; it counts them in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> Any:
        told = self.seen.expand(len(observation)).clone()
        self.seen += len(observation)
        return torch.zeros(len(observation), dtype=torch.int64), {"seen": told}


def test_an_evaluation_leaves_the_policys_buffers_as_they_were() -> None:
    with dc.MultiSyncDataCollector(
        "CartPole-v1", Seen(), num_workers=1, frames_per_batch=5, inference=dc.Inference("host")
    ) as collector:
        before, _, after = collector.next(), collector.evaluate(2), collector.next()
    assert after["seen"].flatten()[0] == before["seen"].flatten()[-1] + 1


class PaidLast(PayingEnv):
    """Pays the last action of an episode."""

    def step(self, action: np.ndarray) -> Any:
        _, reward, ended, *rest = super().step(action)
        return _, reward * ended, ended, *rest


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.weight.expand(len(observation), 1)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_an_episode_has_the_newest_version_that_played_it(num_envs: int) -> None:
    with dc.MultiSyncDataCollector(
        PaidLast,
        policy := Constant(),
        num_workers=1,
        envs_per_worker=num_envs,
        frames_per_batch=8,
        inference=dc.Inference("host"),
    ) as collector:
        with publishing(collector, policy.weight):
            found = collector.evaluate(1000)
        assert torch.equal(found.returns.long(), found.policy_version)
        assert len(found.policy_version.unique()) > 3


def test_weights_go_to_all_workers_of_a_server_or_to_none() -> None:
    with dc.MultiSyncDataCollector(
        ProcessIdEnv,
        policy := Telling(),
        num_workers=2,
        frames_per_batch=8,
        inference=dc.Inference("host"),
    ) as collector:
        collector.update_policy_weights_(policy, worker_ids=[0, 1])
        with pytest.raises(dc.ArgumentError, match=r"workers \[0, 1\] have one policy"):
            collector.update_policy_weights_(policy, worker_ids=[0])
        with pytest.raises(dc.ArgumentError, match="2"):
            collector.update_policy_weights_(policy, worker_ids=[2])
        assert collector.policy_version == 1


def test_a_resumed_run_counts_on() -> None:
    def make() -> Any:
        return dc.MultiSyncDataCollector(
            ProcessIdEnv,
            Telling(),
            num_workers=2,
            frames_per_batch=8,
            inference=dc.Inference("host"),
            faults=dc.Faults(restart_pause_s=0.1),
        )

    with make() as collector:
        collector.next()
        collector.update_policy_weights_()
        state = collector.state_dict()
    with make() as collector:
        collector.load_state_dict(state)
        batch = collector.next()
        version = collector.policy_version
        assert batch["collector", "policy_version"].unique().tolist() == [version]
        assert version >= 1
        os.kill(int(batch["pid"].flatten()[0]), signal.SIGKILL)
        batch = collector.next()
        assert batch["collector", "policy_version"].unique().tolist() == [version]


class Late(dc.TransportUpdater):
    """Needs a moment for each push."""

    def sources(self, payload: torch.Tensor, peers: Any) -> Any:
        time.sleep(0.5)
        return super().sources(payload, peers)


def test_a_replaced_server_of_a_resumed_run_has_no_frame_of_its_first_weights() -> None:
    policy = Weighing()
    with dc.MultiaSyncDataCollector(
        ProcessIdEnv,
        policy,
        num_workers=2,
        frames_per_batch=8,
        inference=dc.Inference("host"),
        weight_updater=Late(),
        faults=dc.Faults(restart_pause_s=0.1),
    ) as collector:
        policy.weight.data.fill_(5)
        collector.update_policy_weights_()
        collector.load_state_dict({**collector.state_dict(), "policy_version": 7})
        servers = set(collector.next()["pid"].unique().tolist())
        os.kill(*servers, signal.SIGKILL)
        while len(servers) == 1:
            batch = collector.next()
            assert batch["collector", "policy_version"].unique().tolist() == [7]
            assert batch["weight"].unique().tolist() == [5]
            servers.update(batch["pid"].unique().tolist())


def test_nothing_is_left() -> None:
    before, open_before = set(descendants(os.getpid())), len(links_of("self"))
    for _ in range(2):
        collector = dc.MultiaSyncDataCollector(
            ProcessIdEnv,
            Telling(),
            num_workers=2,
            frames_per_batch=10,
            inference=dc.Inference("host"),
        )
        collector.next()
        assert len(set(descendants(os.getpid())) - before) >= 2 + 1
        collector.shutdown()
    eventually(lambda: set(descendants(os.getpid())) - before <= zygotes(), SOON_S)
    assert len(links_of("self")) <= open_before + 20


def zygotes() -> set[int]:
    return {
        pid
        for pid in descendants(os.getpid())
        if b"zygote" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


REFUSED: dict[str, dict[str, Any]] = {
    "a policy: without one": {"policy": None},
    "one policy_factory, not a list": {"policy": None, "policy_factory": [Telling, Telling]},
    "no models=": {"models": {"encoder": nn.Linear(1, 1)}},
    "no normalize=": {"normalize": dc.Normalize()},
    "reproducible=False": {"reproducible": True},
    r"WeightSync\(swap_within_rollouts=True\)": {
        "weight_sync": dc.WeightSync(swap_within_rollouts=False)
    },
}


@pytest.mark.parametrize("wanted", REFUSED)
def test_what_a_server_can_not_do_is_refused_before_anything_starts(wanted: str) -> None:
    before = set(descendants(os.getpid()))
    given = {"policy": Telling(), **REFUSED[wanted]}
    with pytest.raises(dc.ArgumentError, match=f"inference=Inference.* needs .*{wanted}"):
        dc.RPCDataCollector(
            ProcessIdEnv, num_workers=2, frames_per_batch=8, inference=dc.Inference("host"), **given
        )
    assert set(descendants(os.getpid())) == before


def test_ranks_that_are_not_there_are_refused() -> None:
    with pytest.raises(dc.ArgumentError, match=r"ranks=\[1\].*: without a launch of ranks"):
        dc.RPCDataCollector(
            ProcessIdEnv,
            Telling(),
            num_workers=2,
            frames_per_batch=8,
            inference=dc.Inference("rank", ranks=[1]),
        )


def test_a_factory_makes_the_policy_in_the_server() -> None:
    with dc.MultiSyncDataCollector(
        ProcessIdEnv,
        policy_factory=Telling,
        num_workers=2,
        frames_per_batch=8,
        inference=dc.Inference("host"),
    ) as collector:
        assert len(collector.next()["pid"].unique()) == 1
    with pytest.raises(dc.ArgumentError, match="exploration noise"):
        dc.MultiSyncDataCollector(
            ProcessIdEnv,
            policy_factory=lambda: dc.EpsilonGreedy(Telling(), 0.1),
            num_workers=1,
            frames_per_batch=8,
            inference=dc.Inference("host"),
        )


class Ending(Telling):
    """Ends its process in each of its calls after the first rollout."""

    calls = 0

    def forward(self, observation: torch.Tensor) -> Any:
        self.calls += 1
        if self.calls > 40:
            os._exit(3)
        return super().forward(observation)


def test_a_run_whose_server_always_ends_ends_too() -> None:
    collector = dc.MultiSyncDataCollector(
        ProcessIdEnv,
        Ending(),
        num_workers=1,
        frames_per_batch=10,
        total_frames=10_000,
        inference=dc.Inference("host"),
        faults=dc.Faults(max_restarts=1, restart_pause_s=0.1),
    )
    with (
        collector,
        pytest.raises(dc.WorkerLost, match=r"inference server 0: its process ended.*code 3"),
    ):
        list(collector)


class Slow(Telling):
    """Takes as many times longer for one env as for all of several."""

    def forward(self, observation: torch.Tensor) -> Any:
        time.sleep(0.02 / len(observation))
        return super().forward(observation)


AUTO: dict[str, tuple[type[Telling], dict[str, Any], str]] = {
    "host": (Slow, {}, "'host': for each step of all envs a server would take"),
    "worker": (Telling, {}, "'worker': for each step of all envs a server would take"),
    "refused": (Slow, {"normalize": dc.Normalize()}, "'worker': .* needs no normalize="),
}


@pytest.mark.parametrize("case", AUTO)
def test_what_is_faster_is_chosen(case: str, caplog: pytest.LogCaptureFixture) -> None:
    policy, options, why = AUTO[case]
    with (
        caplog.at_level("INFO"),
        dc.MultiSyncDataCollector(
            ProcessIdEnv,
            policy(),
            num_workers=2,
            frames_per_batch=8,
            inference=dc.Inference("auto"),
            **options,
        ) as collector,
    ):
        batch = collector.next()
        assert len(batch["pid"].unique()) == (1 if case == "host" else 2)
        assert bool(collector.stats().inference.num_answers) == (case == "host")
        assert re.search(why, str(collector.bottleneck()))
        collector.update_policy_weights_()
    assert len([each for each in caplog.messages if re.search(why, each)]) >= 1


def test_an_env_that_can_not_be_made_fails_as_without_a_choice() -> None:
    def fail() -> Any:
        raise OSError("no such simulator")

    with pytest.raises(dc.EnvError, match="no such simulator"):
        dc.MultiSyncDataCollector(
            fail, Telling(), num_workers=2, frames_per_batch=8, inference=dc.Inference("auto")
        )


SCRIPT = """
import distcollect as dc, torch


if __name__ == "__main__":
    net = torch.nn.Linear(4, 2)
    collector = dc.MultiSyncDataCollector(
        "CartPole-v1", lambda observation: net(observation).argmax(-1), frames_per_batch=64,
        num_workers=2, inference=dc.Inference("host"),
    )
    for number, batch in enumerate(collector):
        if number == 3:
            print("collecting", flush=True)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_signal_ends_all_processes(number: signal.Signals, tmp_path: Path) -> None:
    script, mark = tmp_path / "script.py", str(tmp_path)
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "MARK_OF_TEST": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "collecting\n"
        assert len(with_variable("MARK_OF_TEST", mark)) > 3
        process.send_signal(number)
        process.wait(SOON_S)
    eventually(lambda: not with_variable("MARK_OF_TEST", mark), SOON_S)

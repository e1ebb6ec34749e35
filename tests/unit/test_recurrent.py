"""Recurrent policies: the state from frame to frame, its start in each episode, its storage."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, pairwise
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode
from helpers.counting_envs import CountingEnv, CountingMaker, CountingVectorEnv
from helpers.engines import collect
from helpers.envs import StumblingEnv
from helpers.loopback_pool import loopback_collector
from helpers.recurrent_policies import (
    LENGTHS,
    Counter,
    Learned,
    N,
    T,
    check,
    check_starts,
    counting_with_tensordict,
)
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import distributions as d
from torch import nn

import distcollect as dc
from distcollect.engine.build import build_engine
from distcollect.engine.engine import Engine
from distcollect.engine.plan import WorkerPlan
from distcollect.errors import PolicyError

KINDS = ["plain", "sync-next", "native-next"]


def engine_of(policy: Any, kind: str = "plain", lengths: Any = LENGTHS, **options: Any) -> Engine:
    maker = CountingMaker(kind, N, lengths=lengths)
    plan = WorkerPlan(maker, N, policy, **options)
    return build_engine(plan, traj_ids=count(100))


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_goes_on_and_starts_anew(kind: str) -> None:
    engine = engine_of(Counter(3.0), kind)
    batches = [collect(engine, T) for _ in range(4)]
    for batch in batches:
        check(batch, 3.0)
    # Some rollouts begin or end within an episode.
    assert not torch.cat([batch["is_init"][:, 0] for batch in batches]).all()
    for before, after in pairwise(batches):
        ongoing = ~before["next", "done"][:, -1, 0]
        assert torch.equal(before["next", "total"][ongoing, -1], after["total"][ongoing, 0])


def test_a_tensordict_policy_with_a_state() -> None:
    engine = engine_of(counting_with_tensordict())
    for _ in range(3):
        check(collect(engine, T))


@pytest.mark.parametrize("kind", ["plain", "sync-next"])
def test_where_episodes_are_cut(kind: str) -> None:
    engine = engine_of(Counter(), kind, lengths=(1000,), max_frames_per_traj=4)
    for _ in range(3):
        batch = collect(engine, T)
        check(batch)
        assert batch["frames"].max() == 3
    engine = engine_of(Counter(), kind, reset_at_each_iter=True)
    for _ in range(3):
        batch = collect(engine, T)
        check(batch)
        assert batch["is_init"][:, 0].all()


def test_random_frames_leave_the_state_as_it_starts() -> None:
    engine = engine_of(Counter(2.0))
    batch = collect(engine, T, random=True)
    for key in ("frames", ("next", "frames")):
        assert (batch[key] == 2).all()
    assert torch.equal(batch["is_init"].squeeze(-1), batch["observation"][..., 2] == 0)


def stumbling_engine(policy: Any) -> Engine:
    """In the second env, the eighth step raises."""
    made = count()

    def make() -> gym.Env[Any, Any]:
        index = next(made)
        env = CountingEnv(index, lengths=(6,))
        return StumblingEnv(env, 8 if index == 1 else None)

    plan = WorkerPlan(make, N, policy, max_env_faults=1)
    return build_engine(plan, traj_ids=count(100))


def test_an_env_made_anew_has_a_state_of_its_own() -> None:
    engine = stumbling_engine(Counter())
    batch = collect(engine, steps=20)
    assert engine.counter.env_faults == 1
    check(batch)
    assert batch["collector", "faulted"].sum() == 1
    row, step = batch["collector", "faulted"].nonzero()[0].tolist()
    assert batch["frames"][row, step : step + 2].tolist() == [1, 0]
    check(collect(engine, steps=20))


def test_a_vector_env_made_anew() -> None:
    made = count()

    def make() -> CountingVectorEnv:
        at = 8 if next(made) == 0 else None
        each = [StumblingEnv(CountingEnv(row, lengths=LENGTHS), at) for row in range(N)]
        return CountingVectorEnv(each, AutoresetMode.NEXT_STEP)

    plan = WorkerPlan(make, N, Counter(), max_env_faults=1)
    engine = build_engine(plan, traj_ids=count(100))
    for _ in range(2):
        check(collect(engine, steps=20))
    assert engine.counter.env_faults == 1


@pytest.mark.parametrize("kind", KINDS)
def test_padding(kind: str) -> None:
    policy = Counter()
    engine = engine_of(policy, kind)
    calls = count()
    usual = policy.forward

    def forward(observation: Any, frames: Any, total: Any, is_init: Any) -> Any:
        if next(calls) == 5:
            engine.preempt()
        return usual(observation, frames, total, is_init)

    policy.forward = forward
    engine = engine_of(policy, kind)
    for preempted in (True, False):
        batch = collect(engine, T)
        assert ("mask" in batch["collector"]) == preempted
        real = batch["collector", "mask"] if preempted else torch.ones(N, T, dtype=torch.bool)
        for row in range(N):
            check(batch[row][real[row]])
    assert not batch["is_init"][:, 0].all()


class Delayed(nn.Module):
    """Its state is the last two observations, one of which moves to the other."""

    def initial_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {key: torch.zeros(num_envs, 4) for key in ("last", "before")}

    def forward(self, observation: Any, last: Any, before: Any) -> Any:
        action = (before[:, 2] + last[:, 2]).long() % 5
        return action, {"last": observation, "before": last, "told": before, "is": last}


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_may_return_what_it_was_given(kind: str) -> None:
    """The state's memory is rewritten for the next frame; what it returned is not."""
    batch = collect(engine_of(Delayed(), kind), T)
    assert torch.equal(batch["told"], batch["before"])
    assert torch.equal(batch["is"], batch["last"])
    assert torch.equal(batch["next", "last"], batch["observation"])
    assert torch.equal(batch["next", "before"], batch["last"])


def test_a_policy_may_change_its_state_in_place() -> None:
    class InPlace(Counter):
        def forward(self, observation: Any, frames: Any, total: Any, is_init: Any) -> Any:
            output = super().forward(observation, frames.clone(), total.clone(), is_init)
            frames.fill_(-1)
            total.fill_(-1)
            return output

    check(collect(engine_of(InPlace()), T))
    engine = stumbling_engine(InPlace())
    check(collect(engine, steps=20))
    assert engine.counter.env_faults == 1


class Noisy(Counter):
    def initial_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {**super().initial_state(num_envs), "total": torch.randn(num_envs, 4)}


def test_with_a_seed_a_random_state_depends_on_its_env_alone() -> None:
    def starts(num_envs: int, steps: int = 8) -> torch.Tensor:
        lengths: Any = {"lengths": (4,)}
        settings: Any = {"frames_per_batch": steps * num_envs, "envs_per_worker": num_envs}
        maker = CountingMaker("plain", **lengths)
        with dc.SyncDataCollector(maker, Noisy(), **settings) as collector:
            collector.set_seed(3)
            batches = [collector.next() for _ in range(8 // steps)]
        total = torch.cat([each["total"].reshape(num_envs, steps, 4) for each in batches], 1)
        return total[:, ::4]

    two = starts(2)
    assert torch.equal(starts(1)[0], two[0])
    assert torch.equal(starts(2, steps=4), two)  # episodes that begin with a rollout
    assert len(two.flatten().unique()) == two.numel()


@pytest.mark.parametrize("given", [{"init_random_frames": 15}, {"reset_at_each_iter": True}])
def test_however_often_episodes_of_other_envs_begin(given: dict[str, Any]) -> None:
    def totals(num_envs: int) -> torch.Tensor:
        settings = {"frames_per_batch": 5 * num_envs, "envs_per_worker": num_envs, **given}
        if "init_random_frames" in given:
            settings["init_random_frames"] *= num_envs
        with dc.SyncDataCollector(CountingMaker("plain"), Noisy(), **settings) as collector:
            collector.set_seed(3)
            return torch.cat([collector.next()["total"].reshape(-1, 5, 4)[0] for _ in range(6)])

    assert torch.equal(totals(1), totals(3))


def lstm_policy(hidden: int = 8) -> TensorDictSequential:
    """TorchRL's module in a policy that draws actions."""
    modules = pytest.importorskip("torchrl.modules")
    torch.manual_seed(0)
    return TensorDictSequential(
        modules.LSTMModule(4, hidden, in_key="observation", out_key="embed"),
        TensorDictModule(nn.Linear(hidden, 2), in_keys=["embed"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=d.Categorical,
            default_interaction_type=InteractionType.RANDOM,
            return_log_prob=True,
        ),
    )


def gru_policy() -> TensorDictSequential:
    modules = pytest.importorskip("torchrl.modules")
    torch.manual_seed(0)
    return TensorDictSequential(
        modules.GRUModule(4, 8, num_layers=2, in_key="observation", out_key="embed"),
        TensorDictModule(nn.Linear(8, 2), in_keys=["embed"], out_keys=["logits"]),
        TensorDictModule(lambda logits: logits.argmax(-1), in_keys=["logits"], out_keys=["action"]),
    )


@pytest.mark.parametrize("policy", [lstm_policy, gru_policy])
def test_a_torchrl_module_reproduces_what_it_gave(
    policy: Callable[[], TensorDictSequential],
) -> None:
    """In recurrent mode over whole rollouts, across ends of episodes, from any state."""
    modules = pytest.importorskip("torchrl.modules")
    module = policy()
    settings: dict[str, Any] = {"frames_per_batch": 4 * 40, "envs_per_worker": 4}
    with loopback_collector(
        "CartPole-v1", module, num_workers=1, sync=True, **settings
    ) as collector:
        collector.set_seed(1)
        batches = [collector.next(timeout_s=60) for _ in range(3)]
    for batch in batches:
        assert batch["next", "done"][:, :-1].any()
        with modules.set_recurrent_mode(True), torch.no_grad():
            again = module.select_out_keys("logits")(batch.select(*module.in_keys))
        torch.testing.assert_close(again["logits"], batch["logits"])
    state = next(key for key in module.in_keys if str(key).startswith("recurrent_state"))
    assert batches[1][state].shape[:3] == (4, 40, 1 if policy is lstm_policy else 2)
    assert batches[1][state][:, 0].abs().amax() > 0
    ends = batches[0]["next", "done"].squeeze(-1)
    assert (batches[0]["next", state][ends].flatten(1).abs().amax(1) > 0).all()


def test_a_learned_start_is_that_of_the_weights_that_choose_the_first_frame() -> None:
    policy = Learned()
    envs = CountingMaker("plain", 1, lengths=LENGTHS)
    with loopback_collector(
        envs, policy, frames_per_batch=N * T, envs_per_worker=N, num_workers=1, sync=True
    ) as collector:
        for _ in range(8):
            check_starts(collector.next(timeout_s=60))
            with torch.no_grad():
                policy.weight.add_(1)
            collector.update_policy_weights_()


@pytest.mark.parametrize("kind", KINDS)
def test_a_learned_start_is_that_of_weights_trained_in_place(kind: str) -> None:
    policy = Learned()
    engine = engine_of(policy, kind)
    for _ in range(8):
        check_starts(collect(engine, T))
        with torch.no_grad():
            policy.weight.add_(1)


class Misfit(Counter):
    def __init__(self, start: Any = None, following: Any = None) -> None:
        super().__init__()
        self.start, self.following = start, following

    def initial_state(self, num_envs: int) -> Any:
        return {"h": torch.zeros(num_envs, 2)} if self.start is None else self.start

    def forward(self, observation: torch.Tensor, h: torch.Tensor) -> Any:
        given = {} if self.following is None else {"h": self.following}
        return torch.zeros(len(observation), dtype=torch.long), given


@pytest.mark.parametrize(
    ("start", "following", "message"),
    [
        (None, torch.zeros(N, 2, dtype=torch.long), r"dtype int64, but .* float32 at"),
        (None, "x", "returned str as 'h', which is not a tensor"),
        ({"h": torch.zeros(N).char()}, torch.full((N,), 128), "returned 128 in 'h', .* int8"),
        ([], None, r"initial_state\(\) returned a list"),
        ({"h": torch.zeros(N), "observation": torch.zeros(N)}, None, "'observation', a name that"),
        ({"g": torch.zeros(N)}, None, "parameter 'h' is no entry"),
    ],
)
def test_what_does_not_fit(start: Any, following: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        engine_of(Misfit(start, following))


@pytest.mark.parametrize(("given", "asked"), [(N, N + 1), (N + 1, N)])
def test_the_layout_of_an_lstm_is_refused_whatever_the_number_of_layers(
    given: int, asked: int
) -> None:
    class Lstm(Misfit):
        def initial_state(self, num_envs: int) -> Any:
            return {"h": torch.zeros(given, num_envs, 2)}

    message = rf"initial_state\({asked}\) has 'h' of shape \[{given}, {asked}, 2\]; its first .*"
    with pytest.raises(PolicyError, match=message + rf"must be the {asked} envs: transpose"):
        engine_of(Lstm())


def test_a_state_for_one_number_of_envs_alone() -> None:
    class Fixed(Misfit):
        def initial_state(self, num_envs: int) -> Any:
            if num_envs != N:
                raise ValueError("made for another number")
            return {"h": torch.zeros(N, 2)}

    engine_of(Fixed(following=torch.ones(N, 2)))
    engine_of(Misfit({"h": torch.zeros(N, 2)}, torch.ones(N, 2)))


def test_what_a_tensordict_policy_lacks() -> None:
    def step(observation: Any, h: Any) -> Any:
        return torch.zeros(len(observation), dtype=torch.long), h + 1

    keys = {"in_keys": ["observation", "h"], "out_keys": ["action", ("next", "h")]}
    module = TensorDictModule(step, **keys)
    with pytest.raises(PolicyError, match=r"carries 'h' from frame to frame, .* initial_state"):
        engine_of(module)
    module.initial_state = lambda num_envs: {"g": torch.zeros(num_envs)}
    with pytest.raises(PolicyError, match=r"reads 'h' .* no such entry"):
        engine_of(module)


class Seen(nn.Module):
    """Counts in a buffer the rows that it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, observation: Any, before: Any = None) -> Any:
        self.rows += len(observation)
        action = torch.zeros(len(observation), dtype=torch.int64)
        return action if before is None else (action, before + 1)


class SeenWithState(TensorDictModuleBase):
    """The same; it carries a state, whose first value its environment does not know."""

    in_keys: Any = ["observation", "age"]  # noqa: RUF012 - tensordict's own form
    out_keys: Any = ["action", ("next", "age")]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()

    def forward(self, td: Any) -> Any:
        age = td.get("age", torch.zeros(len(td["observation"])))
        td["action"], td["next", "age"] = self.seen(td["observation"], age)
        return td


@pytest.mark.parametrize("policy", [Seen(), SeenWithState()])
def test_buffers_have_seen_nothing_but_the_frames(policy: Any) -> None:
    """Not what the policy is tried with when the collector is made."""
    [rows] = policy.buffers()
    with dc.SyncDataCollector(
        "CartPole-v1", policy, frames_per_batch=10, envs_per_worker=2
    ) as collector:
        assert rows == 0
        collector.next()
        assert rows == 10

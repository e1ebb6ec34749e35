"""Judge of weights: after a push is acknowledged, frames are chosen with what was pushed.

What can't be applied raises. The policies write a digest of their state into each frame, so the
frames of version v must show the digest of what was pushed as v. The judge knows the public API
and the documentation only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers import judge_weights as policies
from helpers.judge_weights import KINDS, All, PayingEnv, Shown, digest, fill
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

import distcollect as dc

FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda module: module,
    "bound method": lambda module: module.act,
    "partial": lambda module: partial(policies.called, module),
    "partial by name": lambda module: partial(policies.called_with, module=module),
    "closure": policies.closure,
    "object": policies.Agent,
    "method of an object": lambda module: policies.Slotted(module).choose,
    "TensorDict": policies.of_tensordicts,
    "TensorDictModule": policies.tensordict_module,
}
GIVEN: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda module: module,
    "policy": lambda module: module.act,
    "state dict": lambda module: module.state_dict(),
    "TensorDict": lambda module: TensorDict(module.state_dict(), []).unflatten_keys("."),
}
SOON_S = 60
LIKE_SHOWN = {"gain": torch.zeros(1)}


class Expected:
    """What the frames of each version must show."""

    def __init__(self, module: nn.Module) -> None:
        self.digests: dict[int, torch.Tensor] = {}
        self.num_old: dict[int, int] = {}  # batches since a version that had older frames
        self.seen: dict[int, int] = {}  # worker_id to the version of its last frame
        buffers = {name for name, _ in module.named_buffers()}
        clipped = isinstance(module, policies.Clipping | All)
        self._fixed = [not clipped and name not in buffers for name in module.state_dict()]

    def pushed(self, version: int, state: dict[str, torch.Tensor]) -> None:
        self.digests[version] = digest(state)
        self.num_old[version] = 0

    def check(self, batch: TensorDict) -> None:
        """Check a rollout ``[n, T]`` of one worker."""
        [worker_id] = batch["collector", "worker_id"].unique().tolist()
        versions = batch["collector", "policy_version"][0].tolist()
        for step, version in enumerate(versions):
            before = self.seen.get(worker_id, 0)
            assert version >= before
            self.seen[worker_id] = version
            if version == 0:
                continue
            shown = batch["digest"][0, step]
            if version > before:  # nothing has been changed since the weights came
                assert torch.equal(shown, self.digests[version]), f"first frame of {version}"
            assert torch.equal(shown[self._fixed], self.digests[version][self._fixed])
        for version in self.num_old:
            self.num_old[version] += min(versions) < version


def rollouts(batch: TensorDict) -> Iterator[TensorDict]:
    """The rollouts ``[n, T]`` in a batch ``[T]``, ``[n, T]`` or ``[W, T]`` of single envs."""
    rows = batch.reshape(-1, batch.shape[-1])
    for worker_id in rows["collector", "worker_id"].unique().tolist():
        yield rows[rows["collector", "worker_id"][:, 0] == worker_id]


def push(
    collector: Any, module: nn.Module, expected: Expected, *, way: str, seed: int, part: str = ""
) -> dict[str, torch.Tensor]:
    """Publish new values of some weights in one of the ways; returns all that is published."""
    source: Any = None
    if way == "none":
        pushed = fill(module, seed, (part,))
    else:
        # What is not given anew is given as it was published last.
        pushed = type(module)()
        pushed.load_state_dict(module.state_dict())
        source = GIVEN[way](fill(pushed, seed, (part,)))
    state = {name: value.clone() for name, value in pushed.state_dict().items()}
    handle = collector.update_policy_weights_(source)
    if handle is not None:
        assert handle.left_out == {}
    expected.pushed(collector.policy_version, state)
    return state


# In this process, in the background, and with what is not weights.


@given(
    kind=st.sampled_from([*KINDS, All]),
    form=st.sampled_from(sorted(FORMS)),
    ways=st.lists(st.sampled_from(["none", *GIVEN]), min_size=1, max_size=3),
    part=st.sampled_from(["", "gain"]),
)
def test_in_this_process(kind: type[Shown], form: str, ways: list[str], part: str) -> None:
    module = kind()
    expected = Expected(module)
    collector = dc.SyncDataCollector(PayingEnv, FORMS[form](module), frames_per_batch=4)
    with collector:
        collector.next()
        for seed, way in enumerate(ways):
            push(collector, module, expected, way=way, seed=seed, part=part)
            assert collector.policy_version == seed + 1
            for batch in rollouts(collector.next()):
                assert (batch["collector", "policy_version"] == seed + 1).all()
                expected.check(batch)
    # What it keeps, it can be trained with.
    sum((weight * weight.detach()).sum() for weight in module.parameters()).backward()


class Buffer:
    """A replay buffer that lets a test wait for frames of a version."""

    def __init__(self) -> None:
        self.batches: list[TensorDict] = []
        self._changed = threading.Condition()

    def extend(self, data: TensorDict) -> None:
        with self._changed:
            self.batches.append(data)
            self._changed.notify_all()

    def wait_for(self, version: int) -> None:
        """Wait for frames of a version; the next hundred batches must have some."""
        with self._changed:
            most = len(self.batches) + 100
            assert self._changed.wait_for(
                lambda: self._newest() >= version or len(self.batches) >= most, SOON_S
            )
            assert self._newest() >= version

    def wait_for_number(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.batches) >= number, SOON_S)

    def _newest(self) -> int:
        if not self.batches:
            return -1
        return int(self.batches[-1]["collector", "policy_version"].max())


@settings(phases=[Phase.explicit, Phase.generate])  # where one fails, more would take long
@given(
    kind=st.sampled_from([*KINDS, All]),
    form=st.sampled_from(sorted(FORMS)),
    ways=st.lists(st.sampled_from(["none", *GIVEN]), min_size=1, max_size=3),
)
@example(kind=policies.Parametrized, form="module", ways=["none"])
def test_in_the_background(kind: type[Shown], form: str, ways: list[str]) -> None:
    module, buffer = kind(), Buffer()
    expected = Expected(module)
    collector = dc.SyncDataCollector(
        PayingEnv, FORMS[form](module), frames_per_batch=4, replay_buffer=buffer
    )
    with collector:
        if kind is policies.Parametrized and form in ("closure", "TensorDict"):
            # A function is copied by pickling, which torch refuses.
            with pytest.raises(dc.ArgumentError, match="can't be copied for the background"):
                collector.start()
            return
        collector.start()
        for seed, way in enumerate(ways):
            state = push(collector, module, expected, way=way, seed=seed)
            buffer.wait_for(seed + 1)
            with torch.no_grad():
                module.gain.fill_(1000)  # training goes on
                evaluation = collector.evaluate(2)
            assert evaluation.policy_version.tolist() == [seed + 1] * 2
            wanted = policies.STEPS * state["gain"].item()
            assert evaluation.returns.tolist() == pytest.approx([wanted] * 2)
    seen: dict[str, Any] = {}
    for batch in buffer.batches:
        version = int(batch["collector", "policy_version"].max())
        first = seen.setdefault(str(version), batch)
        if version and first is batch:
            names = list(module.state_dict())
            gain = names.index("gain")
            assert (batch["digest"][-1, gain] == expected.digests[version][gain]).all()


WRONG = [
    ({"no such key": torch.zeros(1)}, "no such key"),
    ({**LIKE_SHOWN, "more": torch.zeros(1)}, "more"),
    ({}, "gain"),
    (nn.Linear(1, 1), "weight"),
    ({"gain": torch.zeros(2)}, "gain"),
    ({"gain": torch.zeros(1).double()}, "gain"),
]


class TestWhatCannotBeApplied:
    """Weights that don't fit raise, name the key, and change nothing."""

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("background", [False, True])
    def test_raises(self, form: str, background: bool) -> None:
        module, buffer = Shown(), Buffer()
        policy = FORMS[form](module)
        collector = dc.SyncDataCollector(
            PayingEnv, policy, frames_per_batch=4, replay_buffer=buffer if background else None
        )
        before = module.gain.item()
        with collector:
            if background:
                collector.start()
            for weights, key in WRONG:
                with pytest.raises(dc.WeightsError, match=key):
                    collector.update_policy_weights_(weights)
            assert collector.policy_version == 0
            assert module.gain.item() == before

    @pytest.mark.parametrize("policy", [None, lambda observation: torch.zeros(len(observation), 1)])
    def test_policies_without_weights_take_none(self, policy: Any) -> None:
        with dc.SyncDataCollector(PayingEnv, policy, frames_per_batch=4) as collector:
            if policy is not None:
                with pytest.warns(UserWarning, match="no weights were found in the policy"):
                    collector.update_policy_weights_(policy)
            for weights in (LIKE_SHOWN, Shown(), Shown().act):
                with pytest.raises(dc.WeightsError, match="gain"):
                    collector.update_policy_weights_(weights)
            collector.update_policy_weights_()

    def test_one_weight_with_two_values(self) -> None:
        module = policies.Tied()
        state = {name: value.clone() for name, value in module.state_dict().items()}
        state["out.weight"] += 1
        with (
            dc.SyncDataCollector(PayingEnv, module, frames_per_batch=4) as collector,
            pytest.raises(dc.WeightsError, match=r"into\.weight.*out\.weight"),
        ):
            collector.update_policy_weights_(state)


def test_a_function_with_several_modules() -> None:
    """Its weights are named by where it has the modules."""
    one, other = Shown(), Shown()

    def policy(observation: torch.Tensor) -> Any:
        action, extras = one(observation)
        return action + other(observation)[0], extras

    with dc.SyncDataCollector(PayingEnv, policy, frames_per_batch=2) as collector:
        collector.update_policy_weights_({"one": fill(Shown(), 1), "other": fill(Shown(), 2)})
        assert one.gain.item() == fill(Shown(), 1).gain.item()
        assert other.gain.item() == fill(Shown(), 2).gain.item()
        with pytest.raises(dc.WeightsError, match=r"other\.gain"):
            collector.update_policy_weights_({"one": Shown()})


def test_evaluating_in_the_background_plays_published_weights() -> None:
    module, buffer = fill(Shown(), 1), Buffer()
    with dc.SyncDataCollector(
        PayingEnv, module, frames_per_batch=4, replay_buffer=buffer
    ) as collector:
        collector.evaluate(1)  # before, the policy is shared
        collector.start()
        first = module.gain.item()
        fill(module, 2)
        assert collector.evaluate(1).returns.tolist() == [policies.STEPS * first]
        collector.update_policy_weights_()
        evaluation = collector.evaluate(1)
        assert evaluation.policy_version.tolist() == [1]
        assert evaluation.returns.tolist() == [policies.STEPS * module.gain.item()]


def test_given_weights_do_not_change_the_policy_that_is_trained_meanwhile() -> None:
    """An average of it, for example, is for the background alone."""
    module, average, buffer = fill(Shown(), 1), fill(Shown(), 2), Buffer()
    with dc.SyncDataCollector(
        PayingEnv, module, frames_per_batch=4, replay_buffer=buffer
    ) as collector:
        collector.start()
        before = module.gain.item()
        collector.update_policy_weights_(average)
        assert collector.evaluate(1).returns.tolist() == [policies.STEPS * average.gain.item()]
        assert module.gain.item() == before


def test_a_policy_without_weights_takes_none_in_the_background() -> None:
    with dc.SyncDataCollector(
        PayingEnv, None, frames_per_batch=4, replay_buffer=Buffer()
    ) as collector:
        collector.start()
        with pytest.raises(dc.WeightsError, match="gain"):
            collector.update_policy_weights_(LIKE_SHOWN)


def test_models_of_envs_in_this_process_are_not_for_the_background() -> None:
    module = fill(Shown(), 1)
    with (
        dc.SyncDataCollector(
            PayingEnv, module, models={"net": module}, frames_per_batch=4, replay_buffer=Buffer()
        ) as collector,
        pytest.raises(dc.ArgumentError, match="use aSyncDataCollector"),
    ):
        collector.start()


class Keeping(Shown):
    """Keeps the tensor of its third call, which comes after the collector has tried it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.num_calls = 0

    def compute(self, observation: torch.Tensor) -> None:
        self.num_calls += 1
        if self.num_calls == 3:
            self.kept = self.layer(observation)


def test_what_a_shared_policy_keeps_can_be_trained_with() -> None:
    module = Keeping()
    with dc.SyncDataCollector(PayingEnv, module, frames_per_batch=6) as collector:
        collector.next()
    (module.layer(torch.ones(1, 4)) * module.kept).sum().backward()


# With workers.


def spread(collector: Any, module: nn.Module, ways: list[str], part: str) -> Expected:
    """Publish, and check what each batch shows."""
    expected = Expected(module)
    for batch in rollouts(collector.next()):
        expected.check(batch)
    for seed, way in enumerate(ways):
        push(collector, module, expected, way=way, seed=seed, part=part)
        for _ in range(2):
            for batch in rollouts(collector.next()):
                expected.check(batch)
    for _ in range(1000):  # a worker that is short of CPU may deliver much later than the others
        for batch in rollouts(collector.next()):
            expected.check(batch)
        if set(expected.seen.values()) == {len(ways)}:
            break
    assert set(expected.seen.values()) == {len(ways)}
    return expected


WAYS = ["none", "state dict", "none", "module", "TensorDict", "policy", "none"]
SYNC = partial(dc.RPCDataCollector, sync=True, num_workers=2, frames_per_batch=16)
ASYNC = partial(dc.RPCDataCollector, sync=False, num_workers=2, frames_per_batch=8)


@pytest.mark.parametrize(
    ("make", "form", "kind"),
    [
        (partial(dc.aSyncDataCollector, frames_per_batch=8), "bound method", policies.Assigning),
        (partial(dc.MultiSyncDataCollector, num_workers=2, frames_per_batch=16), "module", All),
        (partial(dc.MultiaSyncDataCollector, num_workers=2, frames_per_batch=8), "closure", All),
        (SYNC, "TensorDictModule", policies.Normalising),
        (ASYNC, "object", All),
    ],
)
def test_with_workers(make: Callable[..., Any], form: str, kind: type[Shown]) -> None:
    module = kind()
    with make(PayingEnv, FORMS[form](module)) as collector:
        expected = spread(collector, module, WAYS, "")
        # In async mode so many rollouts may be ahead of the trainer.
        assert max(expected.num_old.values()) <= 4
        for weights, key in WRONG[:2]:
            with pytest.raises(dc.WeightsError, match=key):
                collector.update_policy_weights_(weights)
        assert collector.policy_version == len(WAYS)


def test_workers_whose_policy_has_no_weights() -> None:
    with dc.aSyncDataCollector(PayingEnv, None, frames_per_batch=4) as collector:
        for weights in (LIKE_SHOWN, Shown(), Shown().act):
            with pytest.raises(dc.WeightsError, match="gain"):
                collector.update_policy_weights_(weights)
        assert collector.update_policy_weights_() is None


@pytest.mark.parametrize("kind", [policies.Assigning, All])
def test_changes_only(kind: type[Shown]) -> None:
    """What a worker did to its buffers does not stay, although the trainer's have not changed."""
    module = kind()
    collector = dc.MultiSyncDataCollector(
        PayingEnv,
        module,
        num_workers=2,
        frames_per_batch=16,
        weight_sync=dc.WeightSync(changes_only=True),
    )
    with collector:
        spread(collector, module, WAYS, "gain")


def test_a_parametrized_policy_of_a_factory() -> None:
    """Torch can't pickle parametrized modules, so that each worker makes its own."""
    module = policies.Parametrized()
    make = partial(dc.RPCDataCollector, sync=True, num_workers=1, frames_per_batch=8)
    with make(PayingEnv, policy_factory=policies.Parametrized) as collector:
        spread(collector, module, ["state dict", "module", "TensorDict", "policy"], "")


def test_models_beside_a_function() -> None:
    """Policy and env maker use one of the ``models``: its weights are published under its name."""
    module, other = policies.Assigning(), nn.Linear(1, 1)

    class Rewarding(PayingEnv):
        def step(self, action: Any) -> Any:
            observation, _, *ends = super().step(action)
            return observation, module.gain.item(), *ends

    with dc.MultiSyncDataCollector(
        Rewarding,
        policies.closure(module),
        models={"net": module, "other": other},
        num_workers=1,
        frames_per_batch=8,
    ) as collector:
        expected = Expected(module)
        for seed in range(3):
            new = {"net": fill(policies.Assigning(), seed), "other": other}
            fill(module, seed)
            collector.update_policy_weights_(None if seed == 1 else new)
            expected.pushed(seed + 1, module.state_dict())
            for batch in rollouts(collector.next()):
                expected.check(batch)
                assert (batch["next", "reward"] == module.gain.item()).all()
        with pytest.raises(dc.WeightsError, match=r"missing key 'other\.weight'"):
            collector.update_policy_weights_({"net": module})


IMPORTED = """
import torch
from torch import nn

net = nn.Linear(4, 1)

def act(observation):
    digest = torch.cat([net.weight.flatten(), net.bias]).double()
    return net(observation), {"digest": digest.expand(len(observation), -1).clone()}
"""


def test_a_function_of_a_module_that_workers_import(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It travels by its name; each process has variables of its own."""
    (tmp_path / "imported_policy.py").write_text(IMPORTED)
    monkeypatch.syspath_prepend(tmp_path)
    import imported_policy  # noqa: PLC0415 - it was just written

    net = imported_policy.net
    with dc.aSyncDataCollector(PayingEnv, imported_policy.act, frames_per_batch=4) as collector:
        for version in range(3):
            if version:
                fill(net, version)
                collector.update_policy_weights_(None if version == 1 else net)
            wanted = torch.cat([net.weight.flatten(), net.bias]).double()
            shown = None
            for _ in range(6):
                batch = collector.next()
                if batch["collector", "policy_version"][-1] == version:
                    shown = batch["digest"][-1]
            assert shown is not None
            assert torch.equal(shown, wanted)


class TestChangesThatWereNotPublished:
    """Copies keep the first weights; a warning says so, once, if nothing is ever published."""

    @staticmethod
    def warnings_of(recorded: pytest.WarningsRecorder) -> list[str]:
        return [str(each.message) for each in recorded if "update_policy_weights_" in str(each)]

    @pytest.mark.parametrize("publish", ["never", "first", "last", "at the tenth", "at each batch"])
    def test_warns_once(self, publish: str, recwarn: pytest.WarningsRecorder) -> None:
        module = Shown()
        collector = dc.MultiSyncDataCollector(
            PayingEnv,
            module,
            num_workers=1,
            frames_per_batch=4,
            total_frames=100,
            update_at_each_batch=publish == "at each batch",
        )
        with collector:
            for seed, _ in enumerate(collector):
                if publish == "first":
                    collector.update_policy_weights_(module)
                fill(module, seed)
                if publish == "last" or (publish == "at the tenth" and seed == 9):
                    collector.update_policy_weights_(module)
        assert len(self.warnings_of(recwarn)) == (publish == "never")

    def test_not_where_the_policy_is_shared(self, recwarn: pytest.WarningsRecorder) -> None:
        module = Shown()
        with dc.SyncDataCollector(
            PayingEnv, module, frames_per_batch=4, total_frames=100
        ) as collector:
            for seed, _ in enumerate(collector):
                fill(module, seed)
        assert self.warnings_of(recwarn) == []

    def test_in_the_background(self, recwarn: pytest.WarningsRecorder) -> None:
        module, buffer = Shown(), Buffer()
        collector = dc.SyncDataCollector(
            PayingEnv, module, frames_per_batch=4, total_frames=400, replay_buffer=buffer
        )
        with collector:
            fill(module, 1)
            collector.start()
            fill(module, 2)
            buffer.wait_for_number(100)
        [warned] = self.warnings_of(recwarn)
        assert "if you don't call start()" in warned

"""A user who does what a user may do with a collector, in any order, and checks each promise."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from helpers.churning_workers import ChurningWorkers, churning_collector
from helpers.interrupting import interrupted_at
from helpers.judge_operations import (
    GAMMA,
    Account,
    After,
    Before,
    Forgetting,
    Maker,
    Telling,
    World,
)
from helpers.loopback_pool import backend_of, workers_of
from helpers.waiting import eventually
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import TensorDict

import distcollect as dc

TIMEOUT_S = 60.0
WORKERS = st.integers(0, 4)
MODES: dict[str, dict[str, Any] | None] = {
    "in process": None,
    "sync": {"sync": True},
    "sync, preempted": {"sync": True, "preemptive_threshold": 0.5},
    "async": {"sync": False},
    "in turn": {"sync": False, "reproducible": True},
    "paced": {"sync": False, "staleness": dc.Staleness(1)},
    "dropped": {"sync": False, "staleness": dc.Staleness(1, mode="drop")},
    "masked": {"sync": False, "staleness": dc.Staleness(1, mode="mask")},
}
GIVEN = {
    "own": lambda module: None,
    "module": lambda module: module,
    "state dict": lambda module: module.state_dict(),
    "TensorDict": lambda module: TensorDict(module.state_dict(), []),
}
INTERRUPTED = ["next", "push", "push to one", "push without waiting", "seed"]
INTERRUPTED += ["call", "evaluate", "look", "state"]
CAUSES = {"worker_lost", "left", "stale", "given_up", "shut_down", "interrupted", "not_taken"}


# What a user may do between two batches, and must not change any later frame.


def _raise(collector: Any) -> None:
    with pytest.raises(dc.WeightsError):
        collector.update_policy_weights_({"code": torch.zeros(2)})
    with pytest.raises(dc.ArgumentError):
        collector.evaluate(0)


def _draw(_: Any) -> None:
    torch.rand(3)


NEUTRAL: dict[str, Any] = {
    "evaluate": lambda collector: collector.evaluate(2, timeout_s=TIMEOUT_S),
    "evaluate with a seed": lambda collector: collector.evaluate(
        1, seed=5, deterministic=False, timeout_s=TIMEOUT_S
    ),
    "look": lambda collector: [collector.stats(), collector.bottleneck(), repr(collector)],
    "state": lambda collector: collector.state_dict(),
    "call": lambda collector: collector.call("touch"),
    "refuse": _raise,
    "draw": _draw,
}
RECORDS = ("raw", "normalized")
# Users may change weights and never publish them.
MAY_WARN = pytest.mark.filterwarnings("ignore:the policy's weights were changed")
CASES = st.fixed_dictionaries(
    {
        "num_workers": st.integers(1, 3),
        "num_envs": st.integers(1, 3),
        "num_steps": st.integers(1, 5),
        "max_frames": st.sampled_from([None, None, 3]),
        "resets": st.booleans(),
        "form": st.sampled_from([None, None, "whole", "split", *RECORDS]),
        "random_frames": st.sampled_from([None, None, 7]),
        "noisy": st.booleans(),
        "fills": st.sampled_from([None, None, "next", "start"]),
        "reserves": st.booleans(),
        "recurs": st.sampled_from([True, True, False]),
        "hooks": st.booleans(),
    }
)


def options_of(mode: str, case: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a collector, but for its envs and its policy."""
    options, rows, form = dict(MODES[mode] or {}), case["num_envs"], case["form"]
    if form == "whole" and {"staleness", "preemptive_threshold"} & options.keys():
        options = {"sync": options["sync"]}
    if MODES[mode] is None:
        rows *= case["num_workers"]
    else:
        options["num_workers"] = case["num_workers"]
    frames = case["num_steps"] * rows * (case["num_workers"] if options.get("sync") else 1)
    normalize = dc.Normalize(gamma=GAMMA, record=form) if form in RECORDS else None
    return options | {
        "frames_per_batch": frames,
        "envs_per_worker": rows,
        "max_frames_per_traj": case["max_frames"],
        "reset_at_each_iter": case["resets"] and form != "whole",
        "trajs_per_batch": 2 if form == "whole" else None,
        "split_trajs": form == "split",
        "normalize": normalize,
        "faults": dc.Faults(max_env_faults=10**6),
    }


class Buffer:
    """A replay buffer that hands on what it gets."""

    def __init__(self, take: Any) -> None:
        self.take, self.num_added = take, 0

    def extend(self, data: TensorDict) -> None:
        self.take(data)
        self.num_added += 1


class Operations(RuleBasedStateMachine):
    """A user, and all that can happen to the run.

    Attributes:
        collector: the present one.
        more: arguments that each collector has, too.
        refused: forms and modes that do not go with them, and what is taken instead.
    """

    collector: Any = None
    more: ClassVar[dict[str, Any]] = {}
    refused: ClassVar[dict[Any, Any]] = {}

    @initialize(case=CASES, mode=st.sampled_from(sorted(MODES)), is_seeded=st.booleans())
    def make(self, case: dict[str, Any], mode: str, is_seeded: bool) -> None:
        self.case, self.fills, self.is_seeded = case, case["fills"], is_seeded
        self.world = World()
        form = self.refused.get(case["form"], case["form"])
        form = "raw" if self.fills and form == "normalized" else form
        case["form"], self.is_whole = form, form == "whole"
        records = form if form in RECORDS else None
        self.account = Account(
            self.world, case["max_frames"], records, recurs=case["recurs"], is_hooked=case["hooks"]
        )
        self.numbers = itertools.count(1)
        self.policy = self.new_policy()
        self.world.code = self.account.codes[0] = self.policy.code.item()
        self.account.calls[0] = 0.0
        self.shown = 0  # the version of the first weights
        self.sent: dict[int, list[int]] = {}  # by worker_id; perhaps not yet there
        self.apart: set[int] = set()  # versions that were given for workers by name
        self.is_used = False  # whether statistics of frames are in use
        self.open(mode)
        self.begin()

    def new_policy(self) -> Telling:
        return (Telling if self.case["recurs"] else Forgetting)(next(self.numbers))

    def new_buffer(self) -> Any:
        return Buffer(self.receive)

    def open(self, mode: str) -> None:
        mode = self.refused.get(mode, mode)
        self.is_local = MODES[mode] is None
        self.options = options_of(mode, self.case) | self.more
        self.num_processed = self.num_received = 0
        if self.case["hooks"]:
            number = self.world.number
            hooks = {"pre_collect_hook": Before(number), "post_collect_hook": After(number)}
            self.options |= {**hooks, "postproc": self.process}
        self.is_sync = self.options.get("sync", True)
        self.reserved: set[int] = set()  # workers that evaluate only
        if self.case["reserves"] and not self.is_local:
            self.reserved = {self.options["num_workers"]}
            self.options["num_workers"] += 1
            self.options["evaluation"] = dc.EvaluationWorkers(num_workers=1, num_episodes=2)
        self.lock = threading.Lock()
        self.buffer = self.new_buffer() if self.fills else None
        self.account.received.clear()
        self.account.ended.clear()
        self.stepped_before = self.world.stepped()
        self.leaving: set[int] = set()
        self.churned: set[int] = set()  # ids of workers that came after the start
        self.num_interrupts = 0
        self.is_sending = False  # whether weights may be on their way
        self.is_partial = mode == "masked" and bool(self.fills)  # the buffer gets no masked frames
        self.account.is_exact &= not self.is_partial
        self.collector = (dc.SyncDataCollector if self.is_local else churning_collector)(
            Maker(self.world.number), self.policy, replay_buffer=self.buffer, **self.options
        )
        self.is_started = False
        assert self.policy.calls.item() == 0, "making a collector changed the policy's buffers"

    def begin(self) -> None:
        if self.is_seeded:
            self.collector.set_seed(3)
        if self.fills == "start":
            self.collector.start()
            self.is_started = True

    @property
    def may_mix(self) -> bool:
        """Whether new weights may come within an episode of an evaluation."""
        return False

    @property
    def is_shared(self) -> bool:
        return self.is_local and not self.is_started

    @property
    def workers(self) -> ChurningWorkers:
        workers: ChurningWorkers = workers_of(self.collector)
        return workers

    @property
    def present(self) -> list[int]:
        if self.is_local:
            return [0]
        self.workers.settle()
        return list(backend_of(self.collector).pool.worker_ids)

    def pick(self, number: int) -> int:
        """One of the workers that are there. Which ones these are depends on timing."""
        present = self.present
        return present[number % len(present)]

    # What the user does.

    @rule(count=st.integers(1, 3))
    def take_batches(self, count: int) -> None:
        for _ in range(count):
            self.take()

    def take(self, timeout_s: float = TIMEOUT_S) -> None:
        if self.is_started:
            wanted = self.buffer.num_added + 1
            running = lambda: self.collector.is_running  # noqa: E731
            eventually(lambda: self.buffer.num_added >= wanted or not running())
            if not running():
                self.collector.async_shutdown()  # raises why
            return
        if self.is_local:
            self.freeze(self.collector.policy_version)
        batch = self.collector.next(timeout_s)
        if batch is None:
            return
        may_pad = self.is_whole or self.options["split_trajs"]
        assert batch.numel() == self.collector.frames_per_batch or may_pad
        self.receive(batch)

    def process(self, batch: TensorDict) -> TensorDict:
        """The ``postproc``: number the batch."""
        self.num_processed += 1
        return batch.set("number", torch.full(batch.shape, self.num_processed))

    def check_processed(self, batch: TensorDict) -> None:
        """Check that a batch is what the ``postproc`` has returned, and a later one."""
        if self.case["hooks"]:
            [number] = batch["number"].unique().tolist()
            assert self.num_received <= number <= self.num_processed
            self.num_received = number if self.is_whole else number + 1

    def freeze(self, version: int) -> None:
        self.account.freeze(version)
        self.is_used = bool(self.account.received) or self.is_used

    def receive(self, batch: TensorDict) -> None:
        """Check a batch, on the thread that makes it."""
        self.check_processed(batch)
        with self.lock:
            known = {*self.account.ids}
            frames = self.account.receive(
                batch, shared=self.is_shared, sync=self.is_sync and not self.is_started
            )
            lags = [self.check_version(*frame) for frame in frames]
        if self.is_whole:
            self.check_whole(batch)
            assert not known & {*batch["collector", "traj_ids"].flatten().tolist()}
        elif self.buffer is None:
            if self.is_sync and not self.is_local and not self.options["split_trajs"]:
                workers = batch["collector", "worker_id"]
                assert torch.equal(workers, workers.sort(0).values)
            if not self.churned and not self.account.stream:
                assert self.collector.version_lag.max == max(lags)
            oldest = min(version for _, version, _ in frames)
            assert self.collector.policy_age.max == self.collector.policy_version - oldest

    def check_whole(self, batch: TensorDict) -> None:
        """Each row of a batch, or each call of the buffer, has whole trajectories only."""
        rows = batch if batch.ndim == 2 else batch.unsqueeze(0)
        for row in rows:
            ids = row["collector", "traj_ids"]
            real = row[ids >= 0]
            assert real["place"][0, 2] == 0
            assert real["next", "done"][-1].all()

    def check_given(self, worker_id: int, version: int) -> None:
        """Check that this version was given for the worker."""
        given = version == self.shown or version in self.sent.get(worker_id, [])
        # A process that came later has the newest weights, but none that others were named for.
        given |= worker_id in self.churned and version not in self.apart
        assert given or self.is_local, f"worker {worker_id} has version {version}, of others"

    def check_version(self, worker_id: int, version: int, shown: bool) -> int:
        """Check the version of a frame; returns its lag."""
        self.check_given(worker_id, version)
        lag = sum(each > version for each in self.sent.get(worker_id, []))
        bound = self.options.get("staleness")
        if self.account.stream:  # it was handed over: its lag is an age, and limited before
            lag = self.collector.policy_version - version
            bound = bound if getattr(bound, "mode", "") == "mask" else None
        if bound is not None and worker_id not in self.churned:
            assert shown == (lag <= 1) if bound.mode == "mask" else lag <= 1
        return lag

    @rule(
        how=st.sampled_from(sorted(GIVEN)),
        chosen=st.sets(WORKERS, max_size=2),
        changes=st.booleans(),
        wait=st.booleans(),
    )
    def publish(self, how: str, chosen: set[int], changes: bool, wait: bool) -> None:
        if changes:
            self.train()
        names = self.named({self.pick(number) for number in chosen})
        with self.quiet:
            self.push(how, None if self.is_local else names, wait=wait)

    def named(self, chosen: set[int]) -> list[int] | None:
        """The workers to push to; None: all."""
        return sorted(chosen) or None

    @property
    def quiet(self) -> Any:
        """Within, the statistics are those of the frames so far."""
        return self.collector.pause() if self.is_started else contextlib.nullcontext()

    @rule()
    def train(self) -> None:
        """The trainer's own module gets new weights, which nobody else has."""
        self.policy.become(next(self.numbers))
        self.note_shared()

    def note_shared(self) -> None:
        if self.is_shared:
            self.world.code = self.policy.code.item()

    def push(self, how: str, names: list[int] | None, *, wait: bool) -> None:
        collector, account, present = self.collector, self.account, self.present
        version = collector.policy_version + 1
        module = self.policy
        if how != "own":
            module = self.new_policy()
            module.calls.fill_(1000.0 * next(self.numbers))
            if names is not None:
                self.apart.add(version)
        account.codes[version] = module.code.item()
        account.calls[version] = module.calls.item()
        with self.lock:
            self.freeze(version)
            for worker_id in present if names is None else names:
                self.sent.setdefault(worker_id, []).append(version)
        acknowledged: dict[int, int] = {}
        self.is_sending = True
        try:
            handle = collector.update_policy_weights_(
                GIVEN[how](module), worker_ids=names, wait=wait
            )
            acknowledged = handle.acknowledged if handle is not None and wait else {}
            self.is_sending = not wait
        except dc.WorkerLost as error:
            note(f"all of {names} are gone: {error}")
        finally:
            self.note_shared()
        assert collector.policy_version == version
        assert {*acknowledged.values()} <= {version}
        absent = {*range(5)}.difference(present) if names is None else {}
        for worker_id in self.holders(acknowledged) | {
            *absent
        }:  # who comes later gets what is for all
            self.world.floor[worker_id] = version

    def holders(self, acknowledged: dict[int, int]) -> set[int]:
        """The workers that act by the weights that were acknowledged."""
        return {*acknowledged}

    @rule(num_episodes=st.integers(1, 3), seed=st.sampled_from([None, 1]))
    def evaluate(self, num_episodes: int, seed: int | None) -> None:
        present = self.present
        done = self.collector.evaluate(num_episodes, seed=seed, timeout_s=TIMEOUT_S)
        assert len(done.returns) == num_episodes
        assert {*done.worker_id.tolist()} <= {*present} - self.reserved
        for worker_id, version in self.check_evaluation(done):
            assert version >= self.world.floor[worker_id]

    def check_evaluation(self, done: dc.Evaluation) -> list[tuple[int, int]]:
        """Check the results; the worker and the version of each episode."""
        columns = (done.worker_id, done.policy_version, done.lengths, done.returns)
        found = []
        for worker_id, version, length, returned in zip(
            *map(torch.Tensor.tolist, columns), strict=True
        ):
            code = self.world.code if self.is_shared else self.account.codes[version]
            mixed = self.may_mix and worker_id not in self.reserved
            assert mixed or returned == length * code, f"version {version} of worker {worker_id}"
            self.check_given(worker_id, version)
            assert self.world.has_played(worker_id, length)
            found.append((worker_id, version))
        return found

    @rule(seed=st.integers(0, 1000))
    def seed(self, seed: int) -> None:
        if self.is_started and self.is_local:
            with pytest.raises(dc.CollectorStateError):
                self.collector.set_seed(seed)
            return
        self.collector.set_seed(seed)
        self.is_seeded = True
        if not self.is_started:
            self.account.begins()

    @rule(name=st.sampled_from(sorted(NEUTRAL)))
    def look(self, name: str) -> None:
        NEUTRAL[name](self.collector)

    @rule(timeout_s=st.sampled_from([1e-6, 1e-3]))
    def time_out(self, timeout_s: float) -> None:
        if not self.is_started:
            with contextlib.suppress(dc.BatchTimeout):
                self.take(timeout_s)

    @precondition(lambda self: self.is_started)
    @rule()
    def pause(self) -> None:
        with self.collector.pause():
            before = self.buffer.num_added
            self.collector.evaluate(1, timeout_s=TIMEOUT_S)
            assert self.buffer.num_added == before

    @rule(line=st.integers(1, 250), name=st.sampled_from(INTERRUPTED))
    def interrupt(self, line: int, name: str) -> None:
        version, results = self.collector.policy_version, []
        calls = {
            "next": lambda: results.append(self.collector.next(timeout_s=TIMEOUT_S)),
            "push": lambda: self.push("state dict", None, wait=True),
            "push to one": lambda: self.push("module", self.name_one(), wait=True),
            "push without waiting": lambda: self.push("own", None, wait=False),
            "seed": lambda: self.collector.set_seed(9),
            **{each: partial(NEUTRAL[each], self.collector) for each in NEUTRAL},
        }
        if self.is_started and name in ("next", "seed"):
            return
        if name == "next" and self.is_local:
            self.freeze(version)
        with self.quiet:
            was_interrupted, tracer = interrupted_at(line, calls[name])
        self.num_interrupts += was_interrupted
        note(f"{name} was interrupted: {was_interrupted}, at {tracer.where}")
        for batch in results:
            if batch is not None:
                self.receive(batch)
        if not self.is_local:
            assert self.collector.stale_frames is not None  # after what may be in the queue
        # The statistics may have frames of a batch that nobody got, or be those that were in use.
        has_no_version = name.startswith("push") and self.collector.policy_version == version
        self.account.is_exact &= not (was_interrupted and (name == "next" or has_no_version))
        if has_no_version:
            for sent in self.sent.values():
                sent[:] = [each for each in sent if each <= version]
            self.apart.discard(version + 1)
        if name == "seed" and not was_interrupted:
            self.account.begins()

    def name_one(self) -> list[int] | None:
        return None if self.is_local else self.named({self.pick(0)})

    @rule(mode=st.sampled_from(sorted(MODES)), num_workers=st.integers(1, 3))
    def save_and_load(self, mode: str, num_workers: int) -> None:
        """The run goes on, perhaps with a collector of another kind."""
        with self.quiet:
            state, frames = self.collector.state_dict(), self.collector.frames
            moments = copy.deepcopy((self.account.values, self.account.returns))
            is_used = self.is_used
        self.close()
        self.account.values, self.account.returns = moments
        self.is_used = is_used
        self.policy = self.new_policy()
        self.world.floor.clear()
        self.case["num_workers"] = num_workers
        self.open(mode)
        self.collector.load_state_dict(state)
        if not self.is_started:
            assert self.collector.frames == frames
        self.shown = version = self.collector.policy_version
        assert version in (state["policy_version"], state["policy_version"] + 1)
        self.account.codes[version] = self.policy.code.item()
        self.account.calls[version] = 0.0
        unused = (0.0, 1.0)
        self.account.frozen = {version: self.account.values.frozen() if self.is_used else unused}
        self.note_shared()
        self.begin()

    # What happens to the envs and workers.

    @rule()
    def break_env(self) -> None:
        self.world.num_faults = 1
        self.take()

    @precondition(lambda self: not self.is_local)
    @rule(number=WORKERS, batches=st.integers(0, 2))
    def kill(self, number: int, batches: int) -> None:
        """A worker dies while batches are taken; another process replaces it."""
        worker_id = self.pick(number)
        self.churned.add(worker_id)
        self.workers.kill(worker_id)
        self.take_batches(batches)

    @precondition(lambda self: not self.is_local)
    @rule(number=WORKERS, batches=st.integers(0, 2))
    def leave(self, number: int, batches: int) -> None:
        """A worker leaves; one that was not told to always stays."""
        staying = sorted({*self.present} - self.leaving - self.reserved)
        if len(staying) > 1:
            worker_id = staying[number % len(staying)]
            self.leaving.add(worker_id)
            self.workers.leave(worker_id)
        self.take_batches(batches)

    @precondition(lambda self: not self.is_local)
    @rule(number=WORKERS)
    def grow(self, number: int) -> None:
        if number not in {*self.present} | self.leaving:
            self.churned.add(number)
            self.workers.grow(number)

    # What must hold then.

    @invariant()
    def numbers_add_up(self) -> None:
        if self.collector is None:
            return
        for frames in self.collector.ledger.workers.values():
            assert frames.stepped == frames.delivered + sum(frames.lost.values()) + frames.open
            assert min(frames.delivered, frames.open, *frames.lost.values()) >= 0
        for done in self.collector.evaluations if self.reserved else ():
            assert {worker_id for worker_id, _ in self.check_evaluation(done)} <= self.reserved
        episodes = self.collector.stats().episodes
        if self.is_local and not self.is_started and not self.is_whole and not self.num_interrupts:
            assert episodes.count == len(self.account.ended)
        if episodes.count:
            assert {episodes.min_return, episodes.max_return} <= self.world.returns
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()

    def close(self) -> None:
        self.take()
        if self.is_started:
            self.collector.async_shutdown(timeout=TIMEOUT_S)
        self.collector.shutdown()
        ledger, received = self.collector.ledger, self.account.received
        stepped = self.world.stepped() - self.stepped_before
        unsure = self.case["num_envs"] * self.num_interrupts if self.is_local else 0
        assert 0 <= stepped.total() - ledger.total.stepped <= unsure, (stepped, ledger)
        assert ledger.total.open == 0
        assert self.world.num_hooked <= self.world.num_begun
        assert ledger.total.lost.keys() <= CAUSES | ({"unfinished"} if self.is_whole else set())
        for worker_id, frames in ledger.workers.items():
            assert unsure or frames.stepped == stepped[worker_id]
            if self.is_whole or self.is_partial:
                assert frames.delivered >= received[worker_id]
            else:
                assert frames.delivered == received[worker_id]
        self.collector = None

    def teardown(self) -> None:
        if self.collector is not None:
            self.close()

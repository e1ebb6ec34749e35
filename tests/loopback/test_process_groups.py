"""Process groups that behave as NCCL's: built at first use, given up, aborted, built again."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import nccl_stand_in
from helpers.nccl_stand_in import (
    DEVICE_VARIABLE,
    HALFWAY_VARIABLE,
    HOST,
    NAME,
    StandInGroup,
    StandInWork,
)
from helpers.publishing import NAMES, Collect, Telling, collect, told
from helpers.waiting import eventually

import distcollect as dc
from distcollect.common.threads import SerialThread
from distcollect.weights.process_groups import (
    GlooBackend,
    GroupMember,
    Groups,
    NcclBackend,
    backend_named,
)
from distcollect.weights.updaters import UpdaterContext

__all__ = ["collect"]

dist: Any = torch.distributed
nccl_stand_in.register()
LARGE = 1 << 22
WAIT_S = 30.0


class Members:
    """The members of groups; each is in a thread."""

    def __init__(self) -> None:
        self.store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.groups = [Groups() for _ in range(3)]

    def join(
        self, name: str, ranks: list[int], timeout_s: float = WAIT_S
    ) -> dict[int, GroupMember]:
        places = {}
        for at, rank in enumerate(ranks):
            place = GroupMember(name, at, len(ranks), timeout_s, NAME)
            # NCCL, too, may block a connection to the store.
            store = dist.TCPStore(HOST, self.store.port, is_master=False)
            self.groups[rank].join(place, store, HOST)
            places[rank] = place
        return places

    def broadcast(self, rank: int, place: GroupMember, flat: torch.Tensor) -> Future[None]:
        answer: Future[None] = Future()

        def run() -> None:
            try:
                answer.set_result(self.groups[rank].broadcast(place, flat))
            except BaseException as error:  # noqa: BLE001
                answer.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return answer

    def all_get(self, places: dict[int, GroupMember], num_bytes: int = LARGE) -> None:
        """Broadcast, and check that it arrives."""
        sent = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        flats = {rank: torch.zeros(num_bytes, dtype=torch.uint8) for rank in places}
        flats[min(places)].copy_(sent)
        answers = [self.broadcast(rank, place, flats[rank]) for rank, place in places.items()]
        for answer in answers:
            answer.result(WAIT_S)
        assert all(torch.equal(flat, sent) for flat in flats.values())


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members()
    yield made
    for groups in made.groups:
        groups.close()
    nccl_stand_in.end_waiting()


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The groups that were aborted."""
    found: list[Any] = []
    abort: Callable[[StandInGroup], None] = StandInGroup.abort

    def note(group: StandInGroup) -> None:
        abort(group)
        if group not in found:  # one that was aborted too early is aborted once more
            found.append(group)

    monkeypatch.setattr(StandInGroup, "abort", note)
    return found


def flat() -> torch.Tensor:
    return torch.zeros(LARGE, dtype=torch.uint8)


class TestGroups:
    def test_members_are_connected_by_the_first_broadcast(
        self, members: Members, aborted: list[Any]
    ) -> None:
        places = members.join("group", [0, 1, 2])
        for _ in range(3):
            members.all_get(places)
        assert not aborted
        for groups in members.groups:
            groups.keep_only(())
        eventually(lambda: len(aborted) == 3)

    def test_a_member_that_never_comes(self, members: Members, aborted: list[Any]) -> None:
        """While members are connected, no abort helps: what waits gives up by itself."""
        places = members.join("group", [0, 1, 2])
        waiting = [members.broadcast(rank, places[rank], flat()) for rank in (0, 1)]
        eventually(lambda: members.store.check(["group/port"]))
        assert not any(answer.done() for answer in waiting)
        for rank in (0, 1):
            members.groups[rank].drop("group")
        for answer in waiting:
            with pytest.raises(RuntimeError, match="was given up: a member is gone"):
                answer.result(WAIT_S)
        members.all_get(members.join("next", [0, 1]))

    def test_a_member_that_dies_halfway(
        self,
        members: Members,
        aborted: list[Any],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        places = members.join("group", [0, 1, 2])
        members.all_get(places)
        halfway = tmp_path / "halfway"
        monkeypatch.setenv(HALFWAY_VARIABLE, str(halfway))
        got = torch.zeros(LARGE, dtype=torch.uint8)
        sending = members.broadcast(0, places[0], torch.ones(LARGE, dtype=torch.uint8))
        receiving = members.broadcast(1, places[1], got)
        dying = members.broadcast(2, places[2], flat())
        eventually(halfway.exists)
        members.groups[2].drop("group")
        with pytest.raises(RuntimeError):
            dying.result(WAIT_S)
        assert not sending.done()
        assert not receiving.done()
        # The trainer hears of it, and tells the others.
        for rank in (0, 1):
            members.groups[rank].drop("group")
        for answer in (sending, receiving):
            # It does not count as completed, though the work says so after an abort.
            with pytest.raises(RuntimeError, match="was given up: a member is gone"):
                answer.result(WAIT_S)
        eventually(lambda: len(aborted) == 3)
        assert not got.all()
        monkeypatch.delenv(HALFWAY_VARIABLE)
        members.all_get(members.join("next", [0, 1]))

    def test_one_that_takes_too_long_is_aborted(
        self, members: Members, aborted: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        places = members.join("group", [0, 1], timeout_s=0.5)
        monkeypatch.setenv(HALFWAY_VARIABLE, str(tmp_path / "halfway"))
        answers = [members.broadcast(rank, places[rank], flat()) for rank in (0, 1)]
        for answer in answers:
            with pytest.raises(RuntimeError, match=r"took longer than 0\.5 s"):
                answer.result(WAIT_S)
        eventually(lambda: len(aborted) == 2)
        assert not members.groups[0].names

    def test_a_broadcast_that_can_t_be_looked_at(
        self, members: Members, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As while a CUDA graph is captured in this process, or after an error of the GPU."""

        def fail(work: StandInWork) -> bool:
            raise ValueError("not permitted when stream is capturing")

        places = members.join("group", [0, 1])
        monkeypatch.setattr(StandInWork, "is_completed", fail)
        answers = [members.broadcast(rank, places[rank], flat()) for rank in (0, 1)]
        for answer in answers:
            with pytest.raises(RuntimeError, match=r"could not broadcast.*is capturing"):
                answer.result(WAIT_S)
        monkeypatch.undo()
        members.all_get(members.join("next", [0, 1]))

    def test_one_whose_destructor_waits_holds_nobody_up(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As Gloo's may while a member that has died is being connected."""
        may_end, has_ended = threading.Event(), threading.Event()

        class Failing:
            """A group, and a broadcast in it."""

            def broadcast(self, *_: Any) -> Any:
                return self.Work()

            def __del__(self) -> None:
                may_end.wait(2 * WAIT_S)
                has_ended.set()

            class Work:
                def is_completed(self) -> bool:
                    return True

                def wait(self) -> None:
                    raise ValueError("a member is gone")

        monkeypatch.setattr(GlooBackend, "make", lambda *_: Failing())
        groups, place = Groups(), GroupMember("group", 0, 2, WAIT_S, "gloo")
        groups.join(place, dist.HashStore(), HOST)
        answer: Future[None] = SerialThread("broadcasting").submit(groups.broadcast, place, flat())
        with pytest.raises(RuntimeError, match="a member is gone"):
            answer.result(WAIT_S)
        assert not has_ended.is_set()
        may_end.set()
        assert has_ended.wait(WAIT_S)

    def test_what_the_backend_refuses(
        self, members: Members, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        places = members.join("group", [0, 1])
        refused = members.broadcast(0, places[0], torch.zeros(8, 2, dtype=torch.uint8)[:, 0])
        with pytest.raises(RuntimeError, match=rf"{NAME} could not broadcast.*dense") as error:
            refused.result(WAIT_S)
        assert isinstance(error.value.__cause__, ValueError)

        monkeypatch.setenv(DEVICE_VARIABLE, "the only one")
        places = members.join("other", [0, 1])
        answers = [members.broadcast(rank, places[rank], flat()) for rank in (0, 1)]
        for answer in answers:
            with pytest.raises(RuntimeError, match="Duplicate GPU detected"):
                answer.result(WAIT_S)


class TestNccl:
    def test_it_has_no_watchdog_and_the_user_s_groups_keep_theirs(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A watchdog would end the process when another member dies."""
        seen: list[Any] = []

        def make(store: Any, rank: int, size: int, timeout: Any) -> str:
            seen.append((os.environ.get("TORCH_NCCL_BLOCKING_WAIT"), timeout))
            return "group"

        monkeypatch.setattr(dist, "ProcessGroupNCCL", make, raising=False)
        place = GroupMember("group", 0, 2, 7.0, "nccl")
        for before in (None, "0"):
            if before is None:
                monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
            else:
                monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
            assert NcclBackend().make(None, place, HOST) == "group"
            assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
        assert seen == [("1", place.timeout)] * 2

    @pytest.mark.parametrize("gpus", [["", ""], ["a", ""], ["a", "a"], ["a", "b", "a"]])
    def test_it_needs_a_gpu_for_each(
        self, gpus: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        assert "need a GPU each" in backend_named("nccl").refusal(gpus)
        assert not backend_named("nccl").refusal(["a", "b", "c"])
        monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
        assert "torch has no NCCL" in backend_named("nccl").refusal(["a", "b", "c"])


class TestWeights:
    def test_they_come_by_a_registered_backend(self, collect: Collect, aborted: list[Any]) -> None:
        collector = collect(weight_sync=dc.WeightSync(backend=NAME))
        for version in (1, 2):
            collector.update_policy_weights_(Telling(version))
            batch = collector.next()
            for row in (0, 1):
                assert told(batch, row) == dict.fromkeys(NAMES, float(version))
        collector.shutdown()
        eventually(lambda: len(aborted) == 3)

    def test_the_next_backend_takes_over_where_one_keeps_failing(
        self, collect: Collect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv(DEVICE_VARIABLE, "the only one")
        updater = dc.BroadcastUpdater((NAME, "gloo"))
        collector = collect(weight_updater=updater)
        with caplog.at_level(logging.WARNING):
            for version in (1, 2):
                handle = collector.update_policy_weights_(Telling(version))
                assert handle.acknowledged == {0: version, 1: version}
                batch = collector.next()
                assert told(batch, 1) == dict.fromkeys(NAMES, float(version))
        # Others may have set the level of our loggers.
        warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
        messages = [record.getMessage() for record in warned]
        assert 0 < len(messages) == len({*messages})
        assert all(
            f"not broadcast by {NAME} any more" in message and "Duplicate GPU" in message
            for message in messages
        )

    def test_a_single_failure_is_not_the_backend_s(
        self, collect: Collect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        updater = dc.BroadcastUpdater((NAME, "gloo"))
        collector = collect(weight_updater=updater)
        monkeypatch.setenv(DEVICE_VARIABLE, "the only one")
        send = updater.send

        def recover(payload: torch.Tensor) -> None:
            try:
                send(payload)
            finally:
                monkeypatch.delenv(DEVICE_VARIABLE, raising=False)

        monkeypatch.setattr(updater, "send", recover)
        handle = collector.update_policy_weights_(Telling(1))
        assert handle.acknowledged == {0: 1, 1: 1}
        assert "not broadcast by" not in caplog.text

    def test_a_backend_that_is_not_registered_is_refused(self) -> None:
        with pytest.raises(dc.ArgumentError, match=r"'unheard_of'.*register_backend"):
            dc.WeightSync(backend="unheard_of")
        with pytest.raises(dc.ArgumentError, match=r"'unheard_of'.*no such backend"):
            Groups().join(GroupMember("group", 0, 1, 1.0, "unheard_of"), dist.HashStore(), HOST)

    def test_weights_must_be_on_its_kind_of_device(self) -> None:
        updater = dc.BroadcastUpdater(NAME)
        updater.attach(UpdaterContext(HOST, 1.0, gpus={0: "a GPU"}))
        with pytest.raises(dc.ArgumentError, match=r"registered for the CPU.*'a GPU'"):
            updater.check(torch.device("cpu"), [0])

"""Which worker processes the trainer counts as present while supervisors come and go."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

import pytest

from distcollect.common import waiting
from distcollect.common.process_exit import ProcessExit
from distcollect.errors import FIRST_SERVER, CollectorStateError, DeadlineError, LaunchError
from distcollect.launch.local_processes import ProcessReport
from distcollect.launch.open_hosts import WantedHosts, open_hosts, set_launched
from distcollect.launch.rendezvous import listen_address
from distcollect.launch.worker_hosts import HostEvents, WorkerHosts
from distcollect.net.messages import (
    Exited,
    Goodbye,
    Kill,
    Message,
    Spawn,
    SupervisorHello,
    SupervisorWelcome,
    TrainerAddress,
    WorkerSettings,
)


class Connection:
    """A supervisor's, as the join server passes it on."""

    def __init__(self, rank: int | None, network: str = "here") -> None:
        self.hello = SupervisorHello(rank=rank, network=network)
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)


@pytest.fixture
def hosts() -> Iterator[WorkerHosts]:
    hosts = WorkerHosts("127.0.0.1", "a token")
    yield hosts
    hosts.join_server.close()


def welcome(hosts: WorkerHosts, connection: Connection) -> None:
    hosts.admit(connection)  # type: ignore[arg-type]


@pytest.mark.parametrize("seen_first", ["the end", "the return"])
def test_processes_end_with_their_supervisors_connection(
    hosts: WorkerHosts, seen_first: str
) -> None:
    """At the end nobody is waited for who was lost with a connection before."""
    first, again = Connection(rank=1), Connection(rank=1)
    welcome(hosts, first)
    hosts.spawn(Spawn(0, 0, WorkerSettings(), {}))
    if seen_first == "the end":
        hosts.closed(first)  # type: ignore[arg-type]
    welcome(hosts, again)
    if seen_first == "the return":
        hosts.closed(first)  # type: ignore[arg-type]
    hosts.spawn(Spawn(0, 1, WorkerSettings(), {}))
    hosts.received(again, Exited(0, 1, ProcessExit(0, 0)))  # type: ignore[arg-type]
    begin = time.monotonic()
    hosts.end_processes(5)
    assert time.monotonic() - begin < 1
    assert not any(isinstance(message, Kill) for message in again.sent)


def test_the_log_says_which_ranks_are_awaited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "FIRST_S", 0.02)
    hosts = WorkerHosts("127.0.0.1", "a token", num_ranks=4)
    try:
        welcome(hosts, Connection(rank=2))
        with pytest.raises(DeadlineError, match=r"ranks \[1, 3\] did not join within 0.1 s"):
            hosts.attach(HostEvents(), 3, 0.1)
    finally:
        hosts.join_server.close()
    assert caplog.messages[0].startswith(
        "waiting for ranks [1, 3] to join, for 0 s so far, at most"
    )


def test_the_welcome_is_sent_before_anything_else(hosts: WorkerHosts) -> None:
    connection, wanted = Connection(rank=1), Spawn(0, 0, WorkerSettings(), {})
    with pytest.raises(LaunchError, match="worker 0"):
        hosts.spawn(wanted)
    welcome(hosts, connection)
    hosts.spawn(wanted)
    assert connection.sent == [SupervisorWelcome(0), wanted]


def test_where_to_listen_by_argument_or_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listen_address() == ("127.0.0.1", 0)
    monkeypatch.setenv("DISTCOLLECT_LISTEN", "10.0.0.5:29600")
    assert listen_address() == ("10.0.0.5", 29600)
    assert listen_address("10.0.0.6:29601") == ("10.0.0.6", 29601)


def test_a_launch_serves_one_collector_and_then_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside it, others have local workers, also where a port is named for the launch."""
    launched = WorkerHosts("127.0.0.1", "a token", num_ranks=2)
    monkeypatch.setenv("DISTCOLLECT_LISTEN", f"127.0.0.1:{launched.join_server.port}")
    set_launched(launched)
    try:
        for _ in range(2):
            assert open_hosts(None, WantedHosts()) is launched
            with pytest.raises(CollectorStateError, match="has the workers of this launch"):
                open_hosts(None, WantedHosts())
            local = open_hosts(1, WantedHosts(local=True))
            other = open_hosts(1, WantedHosts(local=True))
            assert local.join_server is not other.join_server
            # Nobody else can join them, as they listen nowhere.
            assert local.join_server.port == other.join_server.port == 0
            local.detach()
            other.detach()
            launched.detach()
    finally:
        set_launched(None)
        launched.join_server.close()


class Scheduler:
    """Starts supervisors, as Ray does."""

    address = "127.0.0.1"
    is_settled = True

    def __init__(self) -> None:
        self.told: list[object] = []

    def start(
        self,
        trainer: TrainerAddress,
        num_workers: int,
        supervised: Callable[[], Collection[int]],
        give_up: Callable[[int, str], None],
    ) -> None:
        self.told.append(num_workers)
        self.supervised, self.give_up = supervised, give_up

    def missing(self) -> str:
        return "worker 1 is missing"

    def close(self) -> None:
        self.told.append("end")


class Slots(HostEvents):
    """What is reported about slots."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def slot_opened(self, worker_id: int) -> None:
        self.told.append(f"{worker_id} open")

    def slot_closed(self, worker_id: int) -> None:
        self.told.append(f"{worker_id} closed")

    def slot_given_up(self, worker_id: int, reason: str) -> None:
        self.told.append(f"{worker_id} {reason}")

    def reported(self, report: ProcessReport) -> None:
        self.told.append(f"{report.worker_id}.{report.incarnation} ended")


def spawn(hosts: WorkerHosts, worker_id: int, incarnation: int) -> Spawn:
    wanted = Spawn(worker_id, incarnation, WorkerSettings(), {})
    hosts.spawn(wanted)
    return wanted


def test_a_server_is_started_by_any_supervisor_of_its_host(hosts: WorkerHosts) -> None:
    slots, server = Slots(), FIRST_SERVER
    first, second = Connection(None, "a"), Connection(None, "a")
    elsewhere, at_first = Connection(None, "b"), Connection(None, "c")
    welcome(hosts, at_first)
    hosts.attach(slots, 0, 1.0, server_ranks=())
    for connection in (first, second, elsewhere):
        welcome(hosts, connection)
    opened = [server, 0, server + 1, 1, server + 1, 2, server + 2, 3]
    assert slots.told == [f"{slot} open" for slot in opened]
    slots.told.clear()
    began = spawn(hosts, server + 1, 0)
    [starts] = [each for each in (first, second, elsewhere, at_first) if began in each.sent]
    assert starts in (first, second)
    hosts.kill(server + 1, 0)
    assert starts.sent[-1] == Kill(server + 1, 0)
    # The supervisor goes, and the other one starts the next server.
    hosts.closed(starts)  # type: ignore[arg-type]
    assert slots.told[1:] == [f"{server + 1}.0 ended"]
    again = spawn(hosts, server + 1, 1)
    [other] = {first, second} - {starts}
    assert other.sent[-1] == again
    # Without any, there is no server.
    hosts.closed(other)  # type: ignore[arg-type]
    assert slots.told[-2:] == [f"{server + 1}.1 ended", f"{server + 1} closed"]
    with pytest.raises(LaunchError, match="the supervisor of inference server 1 is gone"):
        spawn(hosts, server + 1, 2)
    welcome(hosts, first)
    assert f"{server + 1} open" in slots.told
    assert spawn(hosts, server + 1, 2) == first.sent[-1]


def test_only_the_hosts_of_some_ranks_have_servers(hosts: WorkerHosts) -> None:
    slots, server = Slots(), FIRST_SERVER
    supervisors = [Connection(rank, network) for rank, network in ((1, "a"), (2, "a"), (3, "b"))]
    for connection in supervisors:
        welcome(hosts, connection)
    hosts.attach(slots, 0, 1.0, server_ranks=(2,))
    assert [each for each in slots.told if str(server) in each] == [f"{server} open"]
    asked = [hosts.server_for(worker_id) for worker_id in range(3)]
    assert asked == [(server, False), (server, False), (server, True)]
    slots.told.clear()
    hosts.closed(supervisors[2])  # type: ignore[arg-type]
    assert slots.told == ["2 closed"]


def test_a_scheduler_starts_the_supervisors() -> None:
    scheduler, slots = Scheduler(), Slots()
    hosts = WorkerHosts("127.0.0.1", "a token", num_expected=2, placer=scheduler)
    hosts.attach(slots, 0, 1.0)
    second, by_itself, moved = Connection(rank=2), Connection(rank=None), Connection(rank=2)
    for connection in (second, by_itself):
        welcome(hosts, connection)
    assert hosts.supervised == [1, 2], "slots of the scheduler are not given to others"
    assert scheduler.supervised() == [1, 2]
    hosts.closed(second)  # type: ignore[arg-type]
    assert scheduler.supervised() == [2]
    welcome(hosts, moved)
    scheduler.give_up(0, "is given up")
    assert slots.told == ["1 open", "2 open", "1 closed", "1 open", "0 is given up"]
    hosts.detach()
    assert scheduler.told == [2, "end"]
    assert moved.sent == [SupervisorWelcome(1), Goodbye()]

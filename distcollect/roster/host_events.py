"""Passes what the hosts report, on many threads, on to the supervision thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from distcollect.common.process_exit import ProcessExit
from distcollect.common.shared_memory import sample_of_memory
from distcollect.launch.worker_hosts import HostEvents
from distcollect.net.connection import Connection
from distcollect.net.messages import (
    Hello,
    Leaving,
    Message,
    Reachable,
    Refused,
    WorkerHello,
    WorkerWelcome,
)
from distcollect.roster.lifecycle import Lifecycle
from distcollect.roster.process import Process

log = logging.getLogger(__name__)


class PostedHostEvents(HostEvents):
    """Posts events to a :class:`Lifecycle`; answers at once only whether a worker may join."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        post: Callable[[Callable[[], None]], None],
        end_launch: Callable[[], None],
    ) -> None:
        """Post to ``lifecycle``.

        Args:
            lifecycle: handles the events.
            post: has the supervision thread call a function.
            end_launch: called when the trainer's ``main()`` is done.
        """
        self._lifecycle = lifecycle
        self._post = post
        self._end_launch = end_launch

    def admit(self, connection: Connection) -> Message:
        process = self._claimed_by(connection)
        if process is None or process.connection is not None or process.is_over:
            return Refused("there is no free slot for it")
        process.connection = connection
        return WorkerWelcome(process.peer, sample_of_memory())

    def refused(self, hello: Hello | None, reason: str) -> None:
        if hello is None:
            log.warning("refused a process that wanted to join: %s", reason)
            return
        log.warning("refused a %s from %s: %s", hello.role, hello.host, reason)
        message = f"can't work with this trainer: {reason} (host {hello.host})"
        self._post(partial(self._lifecycle.refused, hello, message))

    def received(self, connection: Connection, message: Message) -> None:
        process = self._process_of(connection)
        if process is None:
            return
        if isinstance(message, Reachable):
            self._post(partial(self._lifecycle.connect, process, message))
        elif isinstance(message, Leaving):
            self._post(partial(self._lifecycle.leave, process.worker_id))

    def closed(self, connection: Connection) -> None:
        process = self._process_of(connection)
        if process is not None:
            self._post(partial(self._lifecycle.lose, process))

    def _process_of(self, connection: Connection) -> Process | None:
        process = self._claimed_by(connection)
        return process if process is not None and process.connection is connection else None

    def _claimed_by(self, connection: Connection) -> Process | None:
        hello = connection.hello
        if not isinstance(hello, WorkerHello):
            return None
        return self._lifecycle.processes.get((hello.worker_id, hello.incarnation))

    def exited(self, worker_id: int, incarnation: int, process_exit: ProcessExit) -> None:
        self._post(partial(self._lifecycle.reaped, (worker_id, incarnation), process_exit))

    def memory_exceeded(self, worker_id: int, incarnation: int, num_bytes: int) -> None:
        self._post(partial(self._lifecycle.retire, (worker_id, incarnation), num_bytes))

    def slot_opened(self, worker_id: int) -> None:
        self._post(partial(self._lifecycle.open_slot, worker_id))

    def slot_closed(self, worker_id: int) -> None:
        self._post(partial(self._lifecycle.close_slot, worker_id))

    def slot_given_up(self, worker_id: int, reason: str) -> None:
        self._post(partial(self._lifecycle.give_up_slot, worker_id, reason))

    def launch_ended(self) -> None:
        self._end_launch()

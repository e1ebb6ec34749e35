"""Calls that every worker gets: those that are there now, and those that join later when they do.

Pure: no clock, no thread, no socket. No rollout is requested from a worker between a setup call and
its answer. The worker gets the call when its rollout is over, and gets one call after the other, as
calls may overtake each other on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from distcollect.errors import WorkerLost, is_server
from distcollect.pool.worker_slots import SlotState, WorkerSlot, WorkerSlots

# From a worker's process to the arguments of a setup call for it.
SetupArguments: TypeAlias = Callable[[WorkerSlot], Sequence[Any]]


@dataclass(eq=False)
class SetupCall:
    """A setup call of one method.

    Attributes:
        method: of the worker's service; a further call of it replaces this one.
        arguments: for a worker.
        before: the call that this one replaces; None: there is none.
        late: the workers that were there when it was made, and have not answered; without those
            that only evaluate.
        errors: of these workers; without those of workers that were lost.
    """

    method: Callable[..., Any]
    arguments: SetupArguments
    before: SetupCall | None
    late: set[WorkerSlot] = field(default_factory=set)
    errors: list[BaseException] = field(default_factory=list)


class SetupCalls:
    """The setup calls of a pool."""

    def __init__(
        self,
        slots: WorkerSlots,
        send: Callable[[WorkerSlot, Callable[..., Any], Sequence[Any]], None],
    ) -> None:
        """Start without any.

        Args:
            slots: the workers.
            send: calls a method of a worker's service; :meth:`answered` follows.
        """
        self._slots = slots
        self._send = send
        self._newest: dict[Callable[..., Any], SetupCall] = {}

    def begin(self, method: Callable[..., Any], arguments: SetupArguments) -> SetupCall:
        """Call ``method`` of all workers, and of those that join later.

        Raises:
            Exception: what ``arguments`` raises; then nothing has changed.
        """
        owed = {slot: arguments(slot) for slot in self._slots if slot.is_staying}
        before = self._newest.get(method)
        # Evaluation workers get it between two evaluations, which may take long.
        awaited = {slot for slot in owed if is_server(slot.worker_id) or not slot.is_reserved}
        call = self._newest[method] = SetupCall(method, arguments, before, awaited)
        if before is not None:
            before.late = {slot for slot in before.late if slot.setup_call is before}
        for slot, values in owed.items():
            slot.setup_calls[method] = call, values
            if slot.state is SlotState.SERVING:
                self._slots.become(slot, SlotState.SETTING_UP)
            self.go_on(slot)
        return call

    def joined(self, slot: WorkerSlot) -> None:
        """A process has joined."""
        for method, call in self._newest.items():
            slot.setup_calls[method] = call, call.arguments(slot)
        self.go_on(slot)

    def go_on(self, slot: WorkerSlot) -> None:
        """Send the worker's next call, if it may get it now; after the last one it serves."""
        if slot.state is not SlotState.SETTING_UP or slot.setup_call or slot.is_collecting:
            return
        if not slot.setup_calls:
            self._slots.become(slot, SlotState.SERVING)
            return
        method = next(iter(slot.setup_calls))
        slot.setup_call, values = slot.setup_calls.pop(method)
        self._send(slot, method, values)

    def answered(self, slot: WorkerSlot, error: BaseException | None = None) -> None:
        """A worker has answered its call, or failed at it."""
        call, slot.setup_call = slot.setup_call, None
        if call is None:
            return
        if slot in call.late and error is not None and not isinstance(error, WorkerLost):
            call.errors.append(error)
            # The caller gets the error. Workers that join later must not fail in the same way.
            if self._newest.get(call.method) is call:
                del self._newest[call.method]
                if call.before is not None:
                    self._newest[call.method] = call.before
        call.late.discard(slot)
        self.go_on(slot)

    def gone(self, slot: WorkerSlot) -> None:
        """A worker is gone or leaves: its answers are awaited no longer."""
        for call in (slot.setup_call, *(call for call, _ in slot.setup_calls.values())):
            if call is not None:
                call.late.discard(slot)
        slot.setup_calls.clear()
        slot.setup_call = None

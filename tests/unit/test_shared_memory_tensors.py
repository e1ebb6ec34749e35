"""Tensors within shared memory."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import pytest
import torch

from distcollect.common import tensor_cache
from distcollect.common.memory_segment import Segment
from distcollect.common.replies import Reply
from distcollect.common.shared_memory import SharedTensor, allocate, map_segment
from distcollect.common.threads import SerialThread
from distcollect.transport.rpc import RpcTransport


def test_a_tensor_within():
    memory, segment = allocate(64)
    tensor = SharedTensor(segment, 16, (2, 3), torch.float32)
    assert tensor.nbytes == 24
    tensor.within(memory)[:] = torch.arange(6.0).view(2, 3)
    assert torch.equal(memory[16:40].view(torch.float32), torch.arange(6.0))
    assert torch.equal(
        tensor.within(map_segment(Segment(**asdict(segment)))), tensor.within(memory)
    )


def test_memory_is_found_while_a_tensor_of_it_lives():
    memory, segment = allocate(64)
    part = memory[8:].view(torch.int64)
    del memory
    mapped = map_segment(segment)
    part[0] = 5
    del part
    with pytest.raises(OSError, match=r"No such file|no longer"):
        map_segment(segment)
    assert mapped[8] == 5  # who has mapped it keeps it


def test_whatever_fails_while_a_rollout_is_copied_is_raised_where_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
):
    def no_memory(*_: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(tensor_cache, "copy_of", no_memory)
    memory, segment = allocate(1 << 20)  # so much is copied on a thread of its own
    transport = object.__new__(RpcTransport)  # without an agent
    transport._mapped = {1: {segment: memory}}
    transport._copier = SerialThread("copies")
    sent: Future[list[Any]] = Future()
    sent.set_result([SharedTensor(segment, 0, (1 << 20,), torch.uint8)])
    with pytest.raises(MemoryError, match="no room"):
        transport.copied(1, sent, Reply()).result(10)
    transport._copier.close()

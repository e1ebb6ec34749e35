"""Tensors within shared memory."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from distcollect.common.memory_segment import Segment
from distcollect.common.shared_memory import SharedTensor, allocate, map_segment


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

"""Tensors within shared memory."""

from __future__ import annotations

from dataclasses import asdict

import torch

from distcollect.common.shared_memory import Segment, SharedTensor, allocate


def test_a_tensor_within():
    memory, segment = allocate(64)
    tensor = SharedTensor(segment, 16, (2, 3), torch.float32)
    assert tensor.nbytes == 24
    tensor.within(memory)[:] = torch.arange(6.0).view(2, 3)
    assert torch.equal(memory[16:40].view(torch.float32), torch.arange(6.0))
    assert torch.equal(tensor.within(Segment(**asdict(segment)).map()), tensor.within(memory))

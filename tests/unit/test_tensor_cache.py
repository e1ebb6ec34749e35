"""Large memory is reused once its tensors are gone, and never before."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from distcollect.common import tensor_cache as recycler

LARGE = (3, 1 << 19)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    recycler.forget()
    yield
    recycler.forget()


def test_memory_is_used_again_when_the_last_tensor_in_it_is_gone() -> None:
    first = recycler.empty(LARGE, torch.float32)
    place = first.data_ptr()
    part = first.view(-1)[5:7].view(torch.uint8)
    part.fill_(3)
    del first
    assert recycler.empty(LARGE, torch.float32).data_ptr() != place
    assert (part == 3).all()
    del part
    # The tensor that existed for a moment is free too.
    again = [recycler.empty(LARGE, torch.float32) for _ in range(2)]
    assert place in {tensor.data_ptr() for tensor in again}
    assert again[0].data_ptr() != again[1].data_ptr()


def test_a_tensor_is_like_any_other() -> None:
    source = torch.arange(1 << 20, dtype=torch.int32).view(1 << 10, 1 << 10)
    tensor = recycler.copy_of(source)
    assert tensor.equal(source)
    assert tensor.is_contiguous()
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert not tensor.is_inference()
    weight = torch.ones(1 << 10, requires_grad=True)
    (tensor.float() @ weight).sum().backward()
    assert weight.grad is not None


def test_memory_is_not_used_again_while_an_array_lies_in_it() -> None:
    """As one that was sent: it is unpickled into the memory in which it has arrived."""
    sent: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(np.zeros(1 << 18), protocol=5, buffer_callback=sent.append)
    block = recycler.block(sent[0].raw().nbytes)
    array = pickle.loads(pickled, buffers=[block])
    array[:] = 1
    part = array[1:]
    del block, array
    recycler.block(sent[0].raw().nbytes)[:] = 2
    assert (part == 1).all()

"""Memory that another process on the same host maps, so that its contents need not be sent.

The memory is an anonymous file (``memfd_create``), which the other process opens through
``/proc/PID/fd``. It has no name in ``/dev/shm``, so it is freed when the last process that maps it
ends, however that happens.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import secrets
import weakref
from functools import cache
from typing import NamedTuple

import torch

from distcollect.common.memory_segment import Segment, memory_file, namespace

log = logging.getLogger(__name__)


def map_segment(segment: Segment) -> torch.Tensor:
    """Map the memory as uint8 ``[num_bytes]``; it stays mapped while the tensor lives.

    Raises:
        OSError: the process is gone, on another host, or belongs to another user.
    """
    return torch.frombuffer(segment.open(), dtype=torch.uint8)


class SharedTensor(NamedTuple):
    """A tensor in shared memory; it is sent in place of the tensor's bytes.

    Attributes:
        segment: where the memory is found.
        offset: where in it the tensor begins, in bytes.
        shape: its shape; contiguous.
        dtype: its dtype.
    """

    segment: Segment
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself; ``memory`` is the segment's, see :func:`map_segment`."""
        return memory[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


class SharedTensors(NamedTuple):
    """All tensors in one shared memory; it is sent, again and again, in place of their bytes.

    Attributes:
        name: of the memory.
        nbytes: their size in bytes, together.
        places: a pickled list of :class:`SharedTensor`. Who gets it unpickles it once: that takes
            longer than all else in a message.
    """

    name: str
    nbytes: int
    places: bytes


def allocate(num_bytes: int) -> tuple[torch.Tensor, Segment]:
    """Make zeroed memory; return it as uint8 ``[num_bytes]``, and where other processes find it.

    They find it while the tensor lives, or one that shares its memory. Who has mapped it keeps it.

    Raises:
        OSError: the system doesn't provide it.
    """
    name = f"distcollect-{secrets.token_hex(8)}"
    fd = memory_file(name)
    try:
        os.ftruncate(fd, num_bytes)
        mapping = mmap.mmap(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    # The descriptor stays open, as other processes open the memory through it.
    weakref.finalize(mapping, os.close, fd).atexit = False
    segment = Segment(os.getpid(), fd, name, num_bytes, host_of_memory())
    return torch.frombuffer(mapping, dtype=torch.uint8), segment


def host_of_memory() -> str:
    """Return a name that is equal for processes that can map each other's memory.

    They have one kernel, one user, and see each other's pids: containers on one machine may not.
    """
    return f"{namespace('pid')} {os.getuid()}"


@cache
def sample_of_memory() -> Segment | None:
    """Return a little shared memory: if the trainer can map it, rollouts needn't be sent."""
    try:
        memory, segment = allocate(mmap.PAGESIZE)
    except OSError as error:
        log.info("no shared memory here (%s): rollouts will be sent", error)
        return None
    _samples.append(memory)  # so that it can be mapped while this process lives
    return segment


def sample_for(trainers: Segment | None) -> Segment | None:
    """Do as :func:`sample_of_memory` for a trainer that gave a sample of its own memory.

    None if it is on this host and its memory can't be mapped here: weights could not be shared.
    """
    if trainers is None:
        return None
    try:
        trainers.open().close()
    except OSError as error:
        kernel_and_pids, _, _ = host_of_memory().rpartition(" ")
        if trainers.host.startswith(kernel_and_pids):
            log.info("the trainer's memory can't be mapped (%s): all is sent", error)
            return None
    return sample_of_memory()


_samples: list[torch.Tensor] = []

"""Memory that another process of the same host maps instead of having it sent.

A worker's slabs lie in an anonymous file (``memfd_create``), which the trainer opens through
``/proc/PID/fd``. It has no name in ``/dev/shm``: when the last process that maps it ends, however
it ends, the memory is gone.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Segment:
    """Where a process's shared memory is found.

    Attributes:
        pid: the process that made it.
        fd: its descriptor there.
        name: of the anonymous file, never used twice: a pid may be.
        num_bytes: its size.
    """

    pid: int
    fd: int
    name: str
    num_bytes: int

    def map(self) -> torch.Tensor:
        """The memory, uint8 ``[num_bytes]``; it stays mapped while the tensor lives.

        Raises:
            OSError: the process is gone, or may not be looked into.
        """
        path = f"/proc/{self.pid}/fd/{self.fd}"
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Of the opened descriptor: by its path, another process might stand there by now.
            if f"memfd:{self.name} " not in str(Path(f"/proc/self/fd/{fd}").readlink()):
                raise ProcessLookupError(f"{path} is no longer {self.name}")
            return _mapped(fd, self.num_bytes)
        finally:
            os.close(fd)


@dataclass(frozen=True)
class SharedTensor:
    """A tensor in a segment, as it travels in place of its bytes.

    Attributes:
        segment: where the memory is found.
        offset: of the tensor in it, in bytes.
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
        """The tensor itself, where ``memory`` is the segment's."""
        return memory[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


def allocate(num_bytes: int) -> tuple[torch.Tensor, Segment]:
    """New zeroed memory, uint8 ``[num_bytes]``, and how others find it.

    Raises:
        OSError: the system has no such memory.
    """
    name = f"distcollect-{secrets.token_hex(8)}"
    # The descriptor stays open for the process's life: others come in through it.
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return _mapped(fd, num_bytes), Segment(os.getpid(), fd, name, num_bytes)


def _mapped(fd: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)


def sample_of_memory() -> Segment | None:
    """A little shared memory: if the trainer can map it, rollouts needn't be sent."""
    try:
        return allocate(mmap.PAGESIZE)[1]
    except OSError as error:
        log.info("no shared memory here (%s): rollouts will be sent", error)
        return None

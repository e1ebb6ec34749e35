"""Collects where the kernel refuses ``memfd_create`` and ``pidfd_open``, as some sandboxes do."""

from __future__ import annotations

import ctypes
import errno
import struct

import distcollect as dc

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_MEMFD_CREATE, _PIDFD_OPEN = 319, 434  # of x86_64


def refuse(*calls: int) -> None:
    """Have system calls fail with ENOSYS, in this process and all that it starts."""
    code = [(_LOAD, 0, 0, 0)]  # the call's number
    for call in calls:
        code += [(_JUMP_IF_EQUAL, 0, 1, call), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]
    code += [(_RETURN, 0, 0, _ALLOW)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(code), ctypes.addressof(text))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


if __name__ == "__main__":
    refuse(_MEMFD_CREATE, _PIDFD_OPEN)
    with dc.MultiSyncDataCollector(["CartPole-v1"] * 2, None, frames_per_batch=32) as collector:
        print("frames:", collector.next().numel())

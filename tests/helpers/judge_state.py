"""What a process is like: all that its program could notice, as JSON; see tests/judges."""

from __future__ import annotations

import ctypes
import decimal
import faulthandler
import gc
import importlib.util
import locale
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import tensordict
import torch

# Written by a test after a zygote has read the folder.
LATE_MODULE = "judge_module_made_late"

_STATUS = (
    "CapAmb",
    "CapBnd",
    "CapEff",
    "CapInh",
    "CapPrm",
    "Cpus_allowed",
    "Gid",
    "Groups",
    "NoNewPrivs",
    "Seccomp",
    "SigBlk",
    "SigIgn",
    "Uid",
    "Umask",
)
_PR_GET = {"dumpable": 3, "keeps capabilities": 7, "timer slack": 30, "is a subreaper": 37}
_SIGNALS = (signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD, signal.SIGALRM, signal.SIGWINCH)


def process_state() -> dict[str, Any]:
    """The state of this process, by what it is about; plain values only."""
    return {
        **_of_the_kernel(),
        **_of_python(),
        **_of_libraries(),
        "environment": dict(os.environ),
    }


def _of_the_kernel() -> dict[str, Any]:
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    libc = ctypes.CDLL(None)
    return {
        **{name: status[name].split() for name in _STATUS if name in status},
        **{
            name: list(resource.getrlimit(getattr(resource, name)))
            for name in dir(resource)
            if name.startswith("RLIMIT_")
        },
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduler": os.sched_getscheduler(0),
        "oom_score_adj": Path("/proc/self/oom_score_adj").read_text(),
        "personality": Path("/proc/self/personality").read_text(),
        "leads its session": os.getsid(0) == os.getpid() == os.getpgid(0),
        "folder": str(Path.cwd()),
        "root": str(Path("/proc/self/root").readlink()),
        "stdin": str(Path("/proc/self/fd/0").readlink()),
        "stdout": str(Path("/proc/self/fd/1").readlink()),
        "stderr": str(Path("/proc/self/fd/2").readlink()),
        **{name: _prctl(libc, number) for name, number in _PR_GET.items()},
    }


def _prctl(libc: ctypes.CDLL, number: int) -> int:
    if number != 37:
        return int(libc.prctl(number, 0, 0, 0, 0))
    value = ctypes.c_int()
    libc.prctl(number, ctypes.byref(value), 0, 0, 0)
    return value.value


def _of_python() -> dict[str, Any]:
    return {
        "sys.path": list(sys.path),
        "sys.flags": str(sys.flags),
        "sys.warnoptions": list(sys.warnoptions),
        "warnings": [str(entry[:1] + entry[2:3]) for entry in warnings.filters],
        "recursion": sys.getrecursionlimit(),
        "switches every": sys.getswitchinterval(),
        "encodings": [sys.getfilesystemencoding(), locale.getpreferredencoding(do_setlocale=False)],
        "streams": [
            [stream.encoding, stream.errors, stream.line_buffering, stream.isatty()]
            for stream in (sys.stdout, sys.stderr)
        ],
        "locale": locale.setlocale(locale.LC_ALL),
        "time zone": [time.tzname, time.timezone, time.daylight, list(time.localtime(0))],
        "handlers": {number.name: str(signal.getsignal(number))[:20] for number in _SIGNALS},
        "finds a late module": importlib.util.find_spec(LATE_MODULE) is not None,
        "collects garbage": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
        "faulthandler": faulthandler.is_enabled(),
        "stack size": threading.stack_size(),
        "socket timeout": socket.getdefaulttimeout(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "decimal": str(decimal.getcontext()),
        "root logger": [
            logging.root.level,
            logging.root.manager.disable,
            len(logging.root.handlers),
        ],
        "trace": str(sys.gettrace()),
    }


def _of_libraries() -> dict[str, Any]:
    return {
        "torch threads": torch.get_num_threads(),
        "torch dtype": str(torch.get_default_dtype()),
        "torch gradients": torch.is_grad_enabled(),
        "torch deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch precision": torch.get_float32_matmul_precision(),
        "torch anomalies": torch.is_anomaly_enabled(),
        "numpy errors": dict(np.geterr()),
        "numpy printing": str(np.get_printoptions()),
        "gymnasium logs": gym.logger.min_level,
        "tensordict list_to_stack": tensordict.list_to_stack(allow_none=True),
        "tensordict lazy_legacy": tensordict.lazy_legacy(allow_none=True),
        "tensordict non_tensor": tensordict.capture_non_tensor_stack(allow_none=True),
        "random numbers differ": [torch.initial_seed() != 0],
    }


class StateEnv(gym.Env[Any, Any]):
    """An env whose methods tell of its process."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, **_: Any) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def process_state(self) -> dict[str, Any]:
        """The state of its process."""
        return process_state()

    def getpid(self) -> int:
        """The id of its process."""
        return os.getpid()

"""Every exception that distcollect raises on purpose.

::

    DistCollectError
    ├── ArgumentError (ValueError)        an argument is wrong; nothing was started
    │   ├── SpaceError                    a space that no batch can carry
    │   ├── PolicyNotSendable             the policy can't travel to a worker
    │   └── WeightsError                  weights that don't fit the policy; nothing was sent
    ├── ArgumentTypeError (TypeError)     an argument has the wrong type; nothing was started
    ├── LaunchError (RuntimeError)        the processes of this launch can't find each other
    ├── CollectorStateError (RuntimeError)  a call that this collector can't take now
    ├── WorkerError (RuntimeError)        something failed on a worker: which one, and where
    │   ├── EnvError                      an env, or the callable that makes one, raised
    │   ├── PolicyError                   the policy raised, or its output doesn't fit
    │   │   ├── PolicySignatureError (TypeError)  it has a parameter that no observation is for
    │   │   └── PolicyKeyError (KeyError)  it reads an entry that is not there
    │   ├── WorkerMismatch                its versions, frames or weights differ from the others'
    │   ├── WorkerLost                    its process ended, or its host went away
    │   └── RolloutGone                   what it kept for another trainer can't be had any more
    └── DeadlineError (TimeoutError)      a wait was too long; names who was waited for, how long
        ├── BatchTimeout
        └── WeightsTimeout
"""

from __future__ import annotations

import os
from typing import Any


class DistCollectError(Exception):
    """Base of all errors raised by distcollect."""


class ArgumentError(DistCollectError, ValueError):
    """An argument has a value that can't work. Raised before any process is started."""


class SpaceError(ArgumentError):
    """An observation or action space holds something that a tensor can't carry."""


class PolicyNotSendable(ArgumentError):
    """The policy can't be pickled, so it can't travel to a worker."""


class WeightsError(ArgumentError):
    """Weights that don't fit the policy. Raised before anything is sent."""


class ArgumentTypeError(DistCollectError, TypeError):
    """An argument has a type that can't work. Raised before any process is started."""


class LaunchError(DistCollectError, RuntimeError):
    """Processes of this launch don't meet, a worker can't start, or the trainer runs elsewhere."""


class CollectorStateError(DistCollectError, RuntimeError):
    """The collector can't take this call now: it is shut down, or another one is open."""


# An inference server has a slot from here on, one for each host.
FIRST_SERVER = 1 << 20


def is_server(worker_id: int) -> bool:
    """Return True if this slot is an inference server's."""
    return worker_id >= FIRST_SERVER


def slot_name(worker_id: int) -> str:
    """What is in a slot: "worker 3", or "inference server 0"."""
    if is_server(worker_id):
        return f"inference server {worker_id - FIRST_SERVER}"
    return f"worker {worker_id}"


class WorkerError(DistCollectError, RuntimeError):
    """Something failed on a worker.

    Attributes:
        worker_id: the worker's slot, or None for an env stepped in the calling process.
        remote_traceback: the traceback from the worker as text, without the lines of this package;
            "" if the message says all.
        is_permanent: a process that replaced the worker would fail in the same way.
    """

    is_permanent: bool = False

    def __init__(
        self, message: str, *, worker_id: int | None = None, remote_traceback: str = ""
    ) -> None:
        name = "worker None" if worker_id is None else slot_name(worker_id)
        text = message if worker_id is None else f"{name}: {message}"
        if remote_traceback:
            text += f"\n\nTraceback from {name}:\n{remote_traceback.rstrip()}"
        super().__init__(text)
        self.message = message
        self.worker_id = worker_id
        self.remote_traceback = remote_traceback


class EnvError(WorkerError):
    """An env raised, or could not be made. The message names the env.

    Attributes:
        num_env_faults: how often envs had raised in the worker's process; 0 if that is not known.
        env_faults: the newest of these that were not reported before, each an
            :class:`~distcollect.EnvFault`.
        is_permanent: an env returned from its first step what no Gymnasium env may return: a new
            one would do the same.
    """

    num_env_faults: int = 0
    env_faults: tuple[Any, ...] = ()


class PolicyError(WorkerError):
    """The policy raised, or what it returned doesn't fit the action space."""

    is_permanent = True  # all workers have the same policy


class PolicySignatureError(PolicyError, TypeError):
    """The policy has a parameter that no entry of the observation is for."""


class PolicyKeyError(PolicyError, KeyError):
    """The policy raised a KeyError: it reads an entry that the env doesn't give."""

    # That of KeyError would show the message in quotes, with escaped line ends.
    __str__ = BaseException.__str__


class WorkerMismatch(WorkerError):
    """A worker has other versions than the trainer, or other frames or weights than the others."""


class WorkerLost(WorkerError):
    """A worker's process ended or its host can't be reached any more."""


class RolloutGone(WorkerError):
    """A rollout that was handed over can't be had: taken before, too late, or its worker died."""


class DeadlineError(DistCollectError, TimeoutError):
    """A wait reached its deadline. The message says who was waited for and how long."""


class BatchTimeout(DeadlineError):
    """No batch within the deadline."""


class WeightsTimeout(DeadlineError):
    """Some workers did not acknowledge new weights within the deadline."""


worker_pid = 0  # of this process, if it is a worker


def users_errors() -> tuple[type[BaseException], ...]:
    """What counts as an error of the user's code: in a worker sys.exit() too, which ends nothing.

    Elsewhere, and in children that the user's code forks, an exit is meant to end the process.
    """
    return (Exception, SystemExit) if os.getpid() == worker_pid else (Exception,)

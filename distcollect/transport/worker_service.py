"""The protocol of what a trainer may ask of a worker, and the messages that it takes and gives."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from distcollect.common.memory_segment import Segment
from distcollect.policy.weight_layout import WeightEncoding, WeightLayout
from distcollect.results import Evaluation
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Layout, Tensors
from distcollect.transport.protocol import CollectRequest, Service


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's report after it has built its plan and tried out envs and policy.

    Attributes:
        layout: leaves of the frames that it will deliver; None: it is an inference server.
        weights: layout of the policy's weights.
        gpu: identifies the GPU that holds the weights; "" if the CPU holds them.
        host: name of its host.
        cores: those that workers may keep busy there; empty if unknown.
        server: the slot of the inference server that has its policy; None: it has its own.
        forward_s: what :func:`.trial.forward_s` has measured; None: that was not asked for.
        endpoint: where workers of other hosts reach this inference server; "": nowhere.
        socket: where workers of its host do.
    """

    layout: Layout | None
    weights: WeightLayout
    gpu: str = ""
    host: str = ""
    cores: tuple[int, ...] = ()
    server: int | None = None
    forward_s: tuple[float, float] | None = None
    endpoint: str = ""
    socket: str = ""


@dataclass(frozen=True)
class ResumeRequest:
    """Tells a worker that the trainer has loaded the state of an earlier run.

    Attributes:
        version: policy_version of the weights that the worker has now.
        first_traj_id: all traj_ids of the earlier run are below.
        generation: how often the versions were renumbered so far, this time included.
    """

    version: int
    first_traj_id: int
    generation: int


@dataclass(frozen=True)
class EvaluationRequest:
    """Asks a worker to evaluate its policy in envs of its own.

    Attributes:
        num_episodes: how many to play.
        deterministic: take the most likely action, where the policy has a distribution.
        seed: of envs and actions; None: a random one.
        timeout_s: seconds for all episodes.
        version: no older policy_version plays, if an inference server computes the actions.
        with_weights: answer the weights too.
        number: of the evaluation, the same for all workers that share its episodes.
    """

    num_episodes: int
    deterministic: bool
    seed: int | None
    timeout_s: float
    version: int = 0
    with_weights: bool = False
    number: int = field(default_factory=itertools.count().__next__)


class WeightSource(ABC):
    """Where a receiver finds a payload. It is pickled to get there.

    Attributes:
        on_gpu: whether it writes to a GPU's memory directly.
        arrived: the payload if it has come along; the receiver may keep and change this memory.
    """

    on_gpu: bool = False
    arrived: torch.Tensor | None = None

    def join(self, receiver_state: dict[str, Any]) -> None:
        """Join the other receivers, without waiting for any; only if they receive together.

        Called before :meth:`receive`, and before the sender begins to send.

        Args:
            receiver_state: see :meth:`receive`.
        """
        return

    @abstractmethod
    def receive(self, target: torch.Tensor, receiver_state: dict[str, Any]) -> WeightSource | None:
        """Write the payload into ``target``.

        Args:
            target: uint8 ``[payload's size]``.
            receiver_state: a dict to keep things in for the next push. Each receiver has its own,
                for as long as it lives. A value that has a ``close`` method is closed at the end.
                It is also closed, from another thread, when the sender cancels a push, so that this
                method ends; it may be used again afterwards.

        Returns:
            If this receiver relays the payload: where others on its host find it until this is
            called again.

        Raises:
            RuntimeError, OSError: the payload can't be had; ``target`` may be half written then,
                and isn't used again.
        """


@dataclass(frozen=True)
class Push:
    """A version that is sent, as its receiver has to know it.

    Attributes:
        version: policy_version of these weights.
        source: where the payload is.
        encoding: how the weights lie in the payload.
        checksum: the payload's, see :func:`~distcollect.policy.weight_layout.checksum`.
        base: the version that a payload with only some entries is a change of.
        generation: how often versions had been renumbered when this one was published, see
            :class:`ResumeRequest`.
        changes_follow: whether a later payload may have only what has changed since.
    """

    version: int
    source: WeightSource
    encoding: WeightEncoding
    checksum: int
    base: int = 0
    generation: int = 0
    changes_follow: bool = False


class WorkerService(Service, Protocol):
    """All methods of a worker that a trainer may call; a transport refuses any other.

    A method returns a value, or a future of one where the answer takes time. They are called on
    threads of the transport; the envs are stepped on another.
    """

    def receive_part(self, part: bytes, share: bool = False) -> Segment | None:
        """Keep the next part of a :data:`~distcollect.engine.pickled_plan.PickledPlan`.

        Returns:
            With ``share``, where other processes on this host find the part for as long as this one
            lives. None: there is no shared memory.
        """

    def read_part(self, place: Segment) -> None:
        """Map the next part of the plan, which another process on this host has."""

    def configure(self) -> Future[WorkerInfo]:
        """Build envs and policy as the plan says, all of whose parts came, and try them out."""

    def ask_server_at(self, endpoint: str) -> None:
        """Ask the inference server that listens there: "@" and a socket's name, or an address."""

    # Rollouts.

    def collect(self, request: CollectRequest) -> Future[tuple[Header, Tensors]]:
        """Collect a rollout. Its tensors are valid until the request after the next one."""

    def place(self) -> str:
        """Say in which calls the thread is that steps the envs, the last one first."""

    def preempt(self, sequence: int) -> None:
        """End the rollout with this number early, now or once it begins."""

    # Rollouts that are handed over to another trainer, see
    # :class:`~distcollect.worker.handover_store.HandoverStore`.

    def hand_over(self, sequence: int, key: str, keep_s: float) -> None:
        """Keep the rollout with this number for ``keep_s``, for a trainer that shows ``key``."""

    def handover_outcome(self, key: str) -> Future[bool]:
        """Answer whether another trainer took the rollout, once that is certain."""

    def read_handover(self, key: str, mapped: bool) -> list[Any]:
        """Answer the tensors of a rollout, once; ``mapped``: as in :meth:`.Slab.tensors`."""

    def confirm_handover(self, key: str) -> None:
        """Note that the trainer that read the rollout has all of it."""

    def cancel_handover(self, key: str) -> None:
        """Keep the rollout no longer, unless it was taken."""

    # Setup calls, which workers that join later get too.

    def seed(self, env_seeds: Sequence[int], policy_seeds: Sequence[int]) -> Future[None]:
        """Seed each env and the policy; the next rollout starts with a reset."""

    def resume(self, request: ResumeRequest) -> Future[None]:
        """Continue the numbering of versions and trajectories of an earlier run."""

    def set_hooks(self, hooks: bytes) -> Future[None]:
        """Call these before and after each rollout from now on.

        Args:
            hooks: pickled, ``pre_collect_hook`` and ``post_collect_hook``, each may be None.
        """

    # What users call.

    def call_envs(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], limit_s: float
    ) -> Future[list[Any]]:
        """Call a method of each env between two steps; answer what each returned.

        A worker whose envs take longer than ``limit_s`` is ended, and replaced.
        """

    def evaluate(self, request: EvaluationRequest) -> Future[Evaluation]:
        """Play episodes in other envs, between two rollouts."""

    def cancel_evaluation(self, number: int) -> None:
        """Play no more episodes of this evaluation; its call fails."""

    # Weights.

    def prepare_to_receive(self, source: WeightSource | None = None) -> None:
        """Join the group that ``source`` names; None: only answer, as a sign of life."""

    def receive_weights(self, push: Push) -> Future[WeightSource | None]:
        """Receive a version; completes once it is there and whole.

        A relay answers where others find the payload, see :meth:`WeightSource.receive`.
        """

    def cancel_receiving(self) -> None:
        """Wait no longer for weights that are being received."""

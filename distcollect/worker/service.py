"""A worker process: answers its trainer's calls, and steps envs on its main thread.

The engine lives on the main thread because simulators often insist on it, and Python runs signal
handlers there. Calls arrive on threads of the transport, which only queue jobs for the main thread
and return futures. Weights arrive on one more thread (:mod:`distcollect.weights.receiver`).
"""

from __future__ import annotations

import gc
import mmap
import pickle
import queue
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from distcollect.common import gpus
from distcollect.common.memory_segment import Segment
from distcollect.common.replies import answer
from distcollect.common.shared_memory import allocate, sample_of_memory
from distcollect.common.step_counter import StepCounter, Task
from distcollect.common.threads import do_jobs
from distcollect.engine.base import EngineBase
from distcollect.engine.build import build_engine, build_evaluator
from distcollect.engine.evaluator import Evaluator
from distcollect.engine.pickled_plan import unpickled
from distcollect.envs.registered import register_all
from distcollect.errors import EnvError, PolicyError, RolloutGone, WorkerError
from distcollect.results import EnvFault, Evaluation
from distcollect.rollout.assemble import assemble
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.layout import Tensors
from distcollect.rollout.slabs import AnySlab, new_slab
from distcollect.rollout.tree_layout import AnyLayout
from distcollect.transport.peer_ids import traj_ids_of
from distcollect.transport.protocol import NUM_SLABS, CollectRequest, methods_of
from distcollect.transport.worker_service import (
    EvaluationRequest,
    Push,
    ResumeRequest,
    WeightSource,
    WorkerInfo,
    WorkerService,
)
from distcollect.weights.receiver import WeightReceiver
from distcollect.weights.updaters import gpu_of
from distcollect.worker.handover_store import HandoverStore

T = TypeVar("T")


class Worker(WorkerService):
    """Answers the calls of a trainer.

    :meth:`run` blocks the thread that is to step the envs; all else may be called from others.
    """

    service_methods = methods_of(WorkerService)

    def __init__(
        self,
        worker_id: int,
        *,
        incarnation: int,
        peer: int,
        address: str,
        counts: StepCounter | None = None,
        first_traj_id: int = 0,
    ) -> None:
        """Wait to be configured.

        Args:
            worker_id: the slot that this process is in.
            incarnation: the number of this process in the slot, counted from 0.
            peer: its id on the wire.
            address: this host's, on the interface by which the trainer reaches it.
            counts: what frames are counted in; None: a counter that no other process sees.
            first_traj_id: the trajectory ids of this life of the run begin here.
        """
        self.worker_id = worker_id
        self._incarnation = incarnation
        self._peer = peer
        self._address = address
        self._counts = counts
        self._first_traj_id = first_traj_id
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._plan: list[bytes | mmap.mmap] = []  # its parts
        self._shared_parts: list[torch.Tensor] = []  # memory that other processes map
        self._engine: EngineBase | None = None
        self._evaluator: Evaluator | None = None
        self._receiver: WeightReceiver | None = None
        self._slabs = _Slabs()
        self._handover_store = HandoverStore()
        self._sequence = 0  # of the rollout that is being collected, or comes next
        self._pre_collect_hook: Callable[[], Any] | None = None
        self._post_collect_hook: Callable[[Any], Any] | None = None
        self._stopping = False

    def run(self) -> None:
        """Do jobs until :meth:`stop`; then close the envs."""
        do_jobs(self._jobs)
        self._handover_store.close()
        if self._receiver is not None:
            self._receiver.close()
        if self._evaluator is not None:
            self._evaluator.close()
        if self._engine is not None:
            self._engine.close()

    def stop(self) -> None:
        """End :meth:`run` as soon as the current step is done; unanswered calls fail."""
        self._stopping = True
        if self._engine is not None:
            self._engine.stop()
        self._jobs.put(None)

    # The calls; WorkerService documents them.

    def receive_part(self, part: bytes, share: bool = False) -> Segment | None:
        self._plan.append(part)
        if not share or sample_of_memory() is None:
            return None
        memory, place = allocate(len(part))
        memory.numpy()[:] = np.frombuffer(part, np.uint8)
        self._shared_parts.append(memory)
        return place

    def read_part(self, place: Segment) -> None:
        self._plan.append(place.open())

    def configure(self) -> Future[WorkerInfo]:
        return self._submit(self._configure)

    def collect(self, request: CollectRequest) -> Future[tuple[Header, Tensors]]:
        return self._submit(lambda: self._collect(request))

    def preempt(self, sequence: int) -> None:
        # Not as a job: those wait until the rollout is over.
        self._configured.preempt(sequence)

    def hand_over(self, sequence: int, key: str, keep_s: float) -> None:
        self._handover_store.keep(key, self._slabs.find(sequence), keep_s)

    def handover_outcome(self, key: str) -> Future[bool]:
        return self._handover_store.outcome(key)

    def read_handover(self, key: str, mapped: bool) -> list[Any]:
        return self._handover_store.read(key).tensors(mapped=mapped)

    def confirm_handover(self, key: str) -> None:
        self._handover_store.confirm(key)

    def cancel_handover(self, key: str) -> None:
        self._handover_store.give_up(key, "the trainer that handed it over took it back")

    def seed(self, env_seeds: Sequence[int], policy_seeds: Sequence[int]) -> Future[None]:
        return self._submit(lambda: self._seed(env_seeds, policy_seeds))

    def resume(self, request: ResumeRequest) -> Future[None]:
        return self._submit(lambda: self._resume(request))

    def set_hooks(self, hooks: bytes) -> Future[None]:
        return self._submit(lambda: self._set_hooks(hooks))

    def call_envs(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], limit_s: float
    ) -> Future[list[Any]]:
        engine = self._configured
        values = engine.call_envs(name, args, kwargs, limit_s)
        self._submit(engine.run_jobs)  # if nothing is collected
        return values

    def evaluate(self, request: EvaluationRequest) -> Future[Evaluation]:
        return self._submit(lambda: self._evaluate(request))

    def prepare_to_receive(self, source: WeightSource | None = None) -> WeightSource | None:
        return self._configured_receiver.prepare(source)

    def receive_weights(self, push: Push) -> Future[int]:
        return self._configured_receiver.receive(push)

    def cancel_receiving(self) -> None:
        self._configured_receiver.cancel()

    # The jobs, on the thread that steps the envs.

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put(partial(answer, future, work))
        return future

    @property
    def _configured(self) -> EngineBase:
        if self._engine is None:
            raise WorkerError("called before it was configured")
        return self._engine

    @property
    def _configured_receiver(self) -> WeightReceiver:
        if self._receiver is None:
            raise WorkerError("called for weights before it was configured")
        return self._receiver

    def _configure(self) -> WorkerInfo:
        parts, self._plan = self._plan, []
        try:
            plan = unpickled(parts)
        except Exception as error:
            # As an env that can't be made, it fails in the same way wherever it is tried again.
            raise EnvError(
                f"could not unpickle the env maker or the policy ({type(error).__name__}: {error});"
                " what they are made of must be importable here too"
            ) from error
        if plan.registry is not None:
            register_all(plan.registry)
        if plan.init_fn is not None:
            _call_users("init_fn", plan.init_fn)
        gpus.use(plan.device)  # only now, as init_fn may set CUDA_VISIBLE_DEVICES
        self._pre_collect_hook = plan.pre_collect_hook
        self._post_collect_hook = plan.post_collect_hook
        plan = plan.with_policy_made()
        self._evaluator = build_evaluator(
            plan,
            worker_id=self.worker_id,
            incarnation=self._incarnation,
            counter=None if self._counts is None else self._counts.evaluation,
        )
        self._engine = build_engine(
            plan,
            worker_id=self.worker_id,
            incarnation=self._incarnation,
            traj_ids=self._new_traj_ids(),
            counter=self._counts,
        )
        if self._stopping:
            self._engine.stop()
        weights = self._engine.weights
        self._receiver = WeightReceiver(weights, self._address, self._engine.step_timer.received)
        # All objects made so far live as long as the process: the garbage collector can skip them.
        gc.collect()
        gc.freeze()
        is_torchrl = self._engine.envs.is_torchrl
        return WorkerInfo(self._engine.layout, weights.layout, gpu_of(weights.device), is_torchrl)

    def _collect(self, request: CollectRequest) -> tuple[Header, Tensors]:
        engine = self._configured
        if self._pre_collect_hook is not None:
            with engine.counter.doing(Task.HOOK):
                _call_users("pre_collect_hook", self._pre_collect_hook)
        slab = self._slabs.next(
            self._sequence, engine.layout, request.num_steps, shared=request.shared
        )
        version = request.version if engine.options.exact_version else None
        try:
            engine.collect(
                slab,
                random=request.random,
                fresh=request.fresh,
                number=self._sequence,
                version=version,
            )
        except EnvError as error:
            error.num_env_faults = engine.counter.env_faults
            error.env_faults = self._faults(engine.counter)
            raise
        tensors = slab.tensors()
        versions = slab.policy_version
        header = Header(
            worker_id=self.worker_id,
            incarnation=self._incarnation,
            sequence=self._sequence,
            num_frames=slab.num_frames,
            num_steps=slab.num_steps,
            num_bytes=sum(tensor.nbytes for tensor in tensors),
            policy_version=(int(versions.min()), int(versions.max())),
            stepped=engine.counter.stepped,
            lost=tuple(engine.counter.lost.items()),
            env_faults=engine.counter.env_faults,
            faults=self._faults(engine.counter),
            work=engine.step_timer.work(),
            spans=engine.step_timer.spans(),
            wire_form=slab.wire_form,
        )
        if self._post_collect_hook is not None:
            # Copied, as the hook may keep it, and this memory is written to again.
            here = Rollout(header, slab.tensors(mapped=False))
            padded = slab.num_frames < engine.layout.num_envs * slab.num_steps
            rollout = assemble(engine.layout, [here], mask=padded).clone()
            with engine.counter.doing(Task.HOOK):
                _call_users("post_collect_hook", self._post_collect_hook, rollout)
        self._slabs.filled(self._sequence, slab)
        self._sequence += 1
        return header, tensors

    def _faults(self, counter: StepCounter) -> tuple[EnvFault, ...]:
        return tuple(
            EnvFault(self.worker_id, self._incarnation, socket.gethostname(), time_s, message)
            for time_s, message in counter.take_faults()
        )

    def _evaluate(self, request: EvaluationRequest) -> Evaluation:
        engine = self._configured
        engine.weights.apply()
        assert self._evaluator is not None
        try:
            with engine.counter.doing(Task.EVALUATE, request.timeout_s):
                return self._evaluator.evaluate(
                    request.num_episodes,
                    version=engine.weights.version,
                    deterministic=request.deterministic,
                    seed=request.seed,
                    timeout_s=request.timeout_s,
                )
        finally:
            engine.step_timer.restart_wait()

    def _seed(self, env_seeds: Sequence[int], policy_seeds: Sequence[int]) -> None:
        with self._configured.counter.doing(Task.SET_UP):
            self._configured.seed(env_seeds, policy_seeds)

    def _resume(self, request: ResumeRequest) -> None:
        self._configured_receiver.renumber(request.version, request.epoch)
        self._first_traj_id = request.first_traj_id
        with self._configured.counter.doing(Task.SET_UP):
            self._configured.use_traj_ids(self._new_traj_ids())

    def _set_hooks(self, hooks: bytes) -> None:
        self._pre_collect_hook, self._post_collect_hook = pickle.loads(hooks)

    def _new_traj_ids(self) -> Iterator[int]:
        return traj_ids_of(self._peer, self._first_traj_id)


def _call_users(name: str, function: Callable[..., Any], *args: Any) -> None:
    """Call a function of the user's.

    Raises:
        PolicyError: it raised.
    """
    try:
        function(*args)
    except Exception as error:
        raise PolicyError(f"{name} raised {type(error).__name__}: {error}") from error


class _Slabs:
    """The memory of the last rollouts: each lies untouched until the request after the next one."""

    def __init__(self) -> None:
        self._slabs: list[AnySlab] = []
        self._by_sequence: dict[int, AnySlab] = {}  # of rollouts that were collected

    def next(self, sequence: int, layout: AnyLayout, num_steps: int, *, shared: bool) -> AnySlab:
        """The slab for the rollout with this number; an older rollout may have been in it."""
        wanted = (num_steps, shared)
        if not self._slabs or (self._slabs[0].num_steps, self._slabs[0].shared) != wanted:
            self._slabs = [new_slab(layout, num_steps, shared=shared) for _ in range(NUM_SLABS)]
        self._by_sequence.pop(sequence - NUM_SLABS, None)
        return self._slabs[sequence % NUM_SLABS]

    def filled(self, sequence: int, slab: AnySlab) -> None:
        """The rollout with this number lies in ``slab`` now."""
        self._by_sequence[sequence] = slab

    def find(self, sequence: int) -> AnySlab:
        """The slab that a rollout lies in.

        Raises:
            RolloutGone: it was overwritten.
        """
        slab = self._by_sequence.get(sequence)
        if slab is None:
            raise RolloutGone(f"the memory of rollout {sequence} has been used again")
        return slab

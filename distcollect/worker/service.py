"""A worker process: answers its trainer's calls, and steps envs on its main thread.

The engine lives on the main thread because simulators often insist on it, and Python runs signal
handlers there. Calls arrive on threads of the transport, which only queue jobs for the main thread
and return futures. Weights arrive on one more thread (:mod:`distcollect.weights.receiver`).
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import pickle
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from traceback import walk_stack
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch

from distcollect.common import gpus
from distcollect.common.memory_segment import Segment
from distcollect.common.open_files import flush_output
from distcollect.common.peer_ids import traj_ids_of
from distcollect.common.shared_memory import allocate, sample_of_memory
from distcollect.common.step_counter import StepCounter, Task, in_words
from distcollect.common.threads import do_jobs
from distcollect.common.waiting import answer
from distcollect.engine.base import EngineBase
from distcollect.engine.build import build_engine
from distcollect.engine.engine import Engine, user_policy
from distcollect.engine.env_recovery import taken_faults
from distcollect.engine.evaluator import Evaluator
from distcollect.engine.interrupts import Stopped
from distcollect.engine.pickled_plan import unpickled
from distcollect.engine.plan import WorkerPlan
from distcollect.envs.registered import register_all
from distcollect.errors import (
    ArgumentError,
    EnvError,
    RolloutGone,
    WorkerError,
    WorkerLost,
    users_errors,
)
from distcollect.inference.link import Link
from distcollect.inference.protocol import Serving
from distcollect.inference.server import InferenceServer
from distcollect.inference.trial import forward_s
from distcollect.net.messages import WorkerBoot
from distcollect.policy.base import Woken
from distcollect.policy.calling import moved
from distcollect.policy.live_weights import LiveWeights
from distcollect.policy.noise import wrappers_of
from distcollect.policy.weight_layout import module_of, published
from distcollect.results import Evaluation
from distcollect.rollout.assemble import assemble
from distcollect.rollout.header import Header, Rollout
from distcollect.rollout.layout import Layout, Tensors
from distcollect.rollout.slabs import AnySlab, new_slab
from distcollect.transport.failure import users_traceback
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
from distcollect.worker.peer_listener import Listen

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def _on_main_thread(
    method: Callable[Concatenate[Worker, P], T],
) -> Callable[Concatenate[Worker, P], Future[T]]:
    """Have a method of a worker run on the thread that steps the envs."""

    def submit(self: Worker, /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self.submit(partial(method, self, *args, **kwargs))

    return submit


class _Parts(NamedTuple):
    """The parts of a worker that is configured; closed in this order."""

    receiver: WeightReceiver
    evaluator: Evaluator
    engine: EngineBase


class _ServerParts(NamedTuple):
    """The same of an inference server."""

    receiver: WeightReceiver
    server: InferenceServer


class Worker(WorkerService):
    """Answers the calls of a trainer.

    :meth:`run` blocks the thread that is to step the envs; all else may be called from others.

    Attributes:
        worker_id: the slot that this process is in.
        counter: counts the frames that are stepped.
    """

    service_methods = methods_of(WorkerService)

    def __init__(
        self,
        boot: WorkerBoot,
        *,
        peer: int,
        address: str,
        counter: StepCounter | None = None,
        listen: Listen | None = None,
    ) -> None:
        """Wait to be configured.

        Args:
            boot: what the process was started with.
            peer: its id on the wire.
            address: this host's, on the interface by which the trainer reaches it.
            counter: what frames are counted in; None: a counter that no other process sees.
            listen: makes a listener for other processes of the run; None: they can't connect.
        """
        self.worker_id = boot.wanted.worker_id
        self._origin = self.worker_id, boot.wanted.incarnation
        self._peer = peer
        self._address = address
        self.counter = counter or StepCounter()
        self._first_traj_id = boot.wanted.settings.first_traj_id
        self._host_cores = boot.host_cores
        self._token = boot.trainer.token
        self._listen = listen
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._plan: list[bytes | mmap.mmap] = []  # its parts
        self._shared_parts: list[torch.Tensor] = []  # memory that other processes map
        self._parts: _Parts | _ServerParts | None = None
        self._link: Link | None = None  # to an inference server
        self._server_endpoint = ""  # of that server
        # The last rollouts, by number: each lies untouched until the request after the next one.
        self._slabs: dict[int, AnySlab] = {}
        self._handover_store = HandoverStore()
        self._sequence = 0  # of the rollout that is being collected, or comes next
        self._pre_collect_hook: Callable[[], Any] | None = None
        self._post_collect_hook: Callable[[Any], Any] | None = None
        self._stopping = False
        self._thread_id = 0  # of the thread that steps the envs

    def run(self) -> None:
        """Do jobs until :meth:`stop`; then close the envs."""
        self._thread_id = threading.get_ident()
        do_jobs(self._jobs)
        self._handover_store.close()
        for part in self._parts or ():
            try:
                part.close()
            except EnvError as error:  # nobody waits for it any more
                log.warning("%s\n%s", error, users_traceback(error))

    def stop(self) -> None:
        """End :meth:`run` as soon as the current step is done; unanswered calls fail."""
        self._stopping = True
        if isinstance(self._parts, _Parts):
            self._parts.engine.stop()
            self._parts.evaluator.stop()
        if self._link is not None:
            self._link.stop()
        self._jobs.put(None)
        self._ring()

    def submit(self, job: Callable[..., T], *args: Any) -> Future[T]:
        """Have :meth:`run` call ``job``; the value that it returns as a future."""
        future: Future[T] = Future()
        self._jobs.put(partial(answer, future, job, *args))
        self._ring()
        return future

    def _ring(self) -> None:
        if isinstance(self._parts, _ServerParts):
            self._parts.server.ring()

    # The calls that are answered at once; WorkerService documents them.

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

    def ask_server_at(self, endpoint: str) -> None:
        self._server_endpoint = endpoint
        if self._link is not None:
            self._link.endpoint = endpoint

    def place(self) -> str:
        stack = walk_stack(sys._current_frames()[self._thread_id])  # noqa: SLF001 - documented
        return in_words([(f.f_code.co_filename, line, f.f_code.co_name) for f, line in stack])

    def preempt(self, sequence: int) -> None:
        # Not as a job: those wait until the rollout is over.
        self._configured.engine.preempt(sequence)

    def hand_over(self, sequence: int, key: str, keep_s: float) -> None:
        slab = self._slabs.get(sequence)
        if slab is None:
            raise RolloutGone(f"the memory of rollout {sequence} has been used again")
        self._handover_store.keep(key, slab, keep_s)

    def handover_outcome(self, key: str) -> Future[bool]:
        return self._handover_store.outcome(key)

    def read_handover(self, key: str, mapped: bool) -> list[Any]:
        return self._handover_store.read(key).tensors(mapped=mapped)

    def confirm_handover(self, key: str) -> None:
        self._handover_store.confirm(key)

    def cancel_handover(self, key: str) -> None:
        self._handover_store.give_up(key, "the trainer that handed it over took it back")

    def call_envs(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], limit_s: float
    ) -> Future[list[Any]]:
        engine = self._configured.engine
        values = engine.call_envs(name, args, kwargs, limit_s)
        self.submit(engine.interrupts.run_jobs)  # if nothing is collected
        return values

    def cancel_evaluation(self, number: int) -> None:
        self._configured.evaluator.cancel(number)

    def prepare_to_receive(self, source: WeightSource | None = None) -> None:
        self._receiver.prepare(source)

    def receive_weights(self, push: Push) -> Future[WeightSource | None]:
        return self._receiver.receive(push)

    def cancel_receiving(self) -> None:
        self._receiver.cancel()

    @property
    def _configured(self) -> _Parts:
        assert isinstance(self._parts, _Parts), "called before it was configured"
        return self._parts

    @property
    def _receiver(self) -> WeightReceiver:
        assert self._parts is not None, "called before it was configured"
        return self._parts.receiver

    # The calls that wait for the thread that steps the envs.

    @_on_main_thread
    def configure(self) -> WorkerInfo:
        parts, self._plan = self._plan, []
        try:
            plan = unpickled(parts)
        except users_errors() as error:
            # As an env that can't be made, it fails in the same way wherever it is tried again.
            raise EnvError(
                f"could not unpickle the env maker or the policy ({type(error).__name__}: {error});"
                " what they are made of must be importable on the worker's host"
            ) from error
        if plan.registry is not None:
            register_all(plan.registry)
        if plan.init_fn is not None:
            _call_users("init_fn", plan.init_fn)
        gpus.use(plan.device)  # only now, as init_fn may set CUDA_VISIBLE_DEVICES
        self._pre_collect_hook = plan.pre_collect_hook
        self._post_collect_hook = plan.post_collect_hook
        is_made_here = plan.policy_factory is not None
        plan = plan.with_policy_made()
        if is_made_here and plan.serving is not None and wrappers_of(plan.policy):
            raise ArgumentError(
                "policy_factory returned a policy with exploration noise, which workers add, but "
                "with an inference server they don't have it: pass it as policy"
            )
        if plan.serving is not None and plan.serving.is_server:
            return self._start_serving(plan, plan.serving)
        if plan.serving is not None and not plan.serving.is_trial:
            plan = self._linked(plan, plan.serving)
        own: Any = dict(zip(("worker_id", "incarnation"), self._origin, strict=True))
        build: Any = partial(build_engine, **own)
        evaluator = Evaluator(plan, build, counter=self.counter.evaluation, **own)
        engine = build(plan, traj_ids=self._new_traj_ids(), counter=self.counter)
        weights = engine.weights
        receiver = WeightReceiver(weights, self._address, engine.step_timer.received)
        self._parts = _Parts(receiver, evaluator, engine)
        if self._stopping:
            engine.stop()
            evaluator.stop()
        return replace(self._info(engine.layout, weights), forward_s=self._trial(engine))

    def _linked(self, plan: WorkerPlan, serving: Serving) -> WorkerPlan:
        self._link = Link(serving, self.worker_id, self.counter, self._token)
        self._link.endpoint = self._server_endpoint
        if self._stopping:
            self._link.stop()
        return replace(plan, link=self._link)

    def _trial(self, engine: EngineBase) -> tuple[float, float] | None:
        serving = engine.options.serving
        if serving is None or not serving.is_trial or not isinstance(engine, Engine):
            return None
        bound = partial(user_policy, engine.options, engine.envs)
        return forward_s(bound, engine.envs.obs, serving, self._host_cores)

    def _start_serving(self, plan: WorkerPlan, serving: Serving) -> WorkerInfo:
        """Serve other workers, in place of stepping envs."""
        serving.take_cores(self._host_cores)
        if plan.device is not None and (module := module_of(plan.policy)) is not None:
            moved(module, plan.device)
        weights = LiveWeights(published(plan.policy, plan.models), plan.exclude)
        own: Any = {"worker_id": self.worker_id, "num_cores": len(self._host_cores)}
        server = InferenceServer(serving, plan.policy, weights, self.counter, self._jobs, **own)
        receiver = WeightReceiver(weights, self._address, lambda *_: server.ring())
        self._parts = _ServerParts(receiver, server)
        self._jobs.put(partial(self._serve, server))
        endpoint = ""
        if serving.listens and self._listen is not None:
            endpoint = self._listen(server.meet).endpoint
        return replace(self._info(None, weights), endpoint=endpoint, socket=server.name)

    def _serve(self, server: InferenceServer) -> None:
        try:
            server.serve()
        except BaseException:
            # Its workers wait for another server then.
            log.exception("the inference server failed")
            flush_output()
            os._exit(1)

    def _info(self, layout: Layout | None, weights: LiveWeights) -> WorkerInfo:
        # All objects made so far live as long as the process: the garbage collector can skip them.
        gc.collect()
        gc.freeze()
        server = None if self._link is None else self._link.server
        gpu, host = gpu_of(weights.device), socket.gethostname()
        return WorkerInfo(layout, weights.layout, gpu, host, self._host_cores, server)

    def collect(self, request: CollectRequest) -> Future[tuple[Header, Tensors]]:
        if (engine := self._configured.engine).options.exact_version:
            engine.weights.expect(request.version)  # at once, as newer ones come before it begins
        return self.submit(self._collect, request)

    def _collect(self, request: CollectRequest) -> tuple[Header, Tensors]:
        engine = self._configured.engine
        if self._pre_collect_hook is not None:
            with self.counter.doing(Task.HOOK):
                _call_users("pre_collect_hook", self._pre_collect_hook)
        slab = self._slabs.pop(self._sequence - NUM_SLABS, None)
        if slab is None or (slab.num_steps, slab.shared) != (request.num_steps, request.shared):
            slab = new_slab(engine.layout, request.num_steps, shared=request.shared)
        version = request.version if engine.options.exact_version else None
        if self._link is not None:
            self._link.expect(request.version)
        try:
            engine.collect(
                slab,
                random=request.random,
                fresh=request.fresh,
                number=self._sequence,
                version=version,
                frames=request.frames,
            )
        except EnvError as error:
            error.num_env_faults = self.counter.env_faults
            error.env_faults = taken_faults(self.counter, *self._origin)
            raise
        tensors = slab.tensors()
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        header = engine.header(slab, *self._origin, self._sequence, num_bytes)
        if self._post_collect_hook is not None:
            # Copied, as the hook may keep it, and this memory is written to again.
            here = Rollout(header, slab.tensors(mapped=False))
            padded = slab.num_frames < engine.layout.num_envs * slab.num_steps
            rollout = assemble(engine.layout, [here], mask=padded).clone()
            with self.counter.doing(Task.HOOK):
                _call_users("post_collect_hook", self._post_collect_hook, rollout)
        self._slabs[self._sequence] = slab
        self._sequence += 1
        return header, tensors

    @_on_main_thread
    def evaluate(self, request: EvaluationRequest) -> Evaluation:
        _, evaluator, engine = self._configured
        engine.weights.apply()
        if self._link is not None:
            self._link.expect(request.version)
        try:
            with self.counter.doing(Task.EVALUATE, request.timeout_s):
                return evaluator.evaluate(request, engine.weights)
        except (Stopped, Woken):
            raise WorkerLost("was told to end") from None
        finally:
            engine.step_timer.restart_wait()

    @_on_main_thread
    def seed(self, env_seeds: Sequence[int], policy_seeds: Sequence[int]) -> None:
        if isinstance(self._parts, _ServerParts):
            return  # its workers have all that is drawn from
        engine = self._configured.engine
        with self.counter.doing(Task.SET_UP):
            engine.seed(env_seeds, policy_seeds)

    @_on_main_thread
    def resume(self, request: ResumeRequest) -> None:
        self._receiver.renumber(request.version, request.generation)
        if isinstance(self._parts, _ServerParts):
            return
        engine = self._configured.engine
        self._first_traj_id = request.first_traj_id
        with self.counter.doing(Task.SET_UP):
            engine.use_traj_ids(self._new_traj_ids())

    @_on_main_thread
    def set_hooks(self, hooks: bytes) -> None:
        self._pre_collect_hook, self._post_collect_hook = pickle.loads(hooks)

    def _new_traj_ids(self) -> Iterator[int]:
        return traj_ids_of(self._peer, self._first_traj_id)


def _call_users(name: str, function: Callable[..., Any], *args: Any) -> None:
    """Call a function of the user's.

    Raises:
        WorkerError: it raised; it is permanent.
    """
    try:
        function(*args)
    except users_errors() as error:
        failed = WorkerError(f"{name} raised {type(error).__name__}: {error}")
        failed.is_permanent = True
        raise failed from error

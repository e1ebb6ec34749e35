"""A worker process: serves its trainer's requests; steps envs on its main thread.

Simulators often insist on the main thread, and Python runs signal handlers there, so that is where
the engine lives. RPC handlers only hand it jobs and answer through futures; weights arrive on one
more thread (:mod:`.receiver`); the lifeline's thread ends the process when the trainer is gone.
"""

from __future__ import annotations

import gc
import itertools
import logging
import pickle
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from distcollect.common.step_counter import StepCounter
from distcollect.common.threads import do_jobs
from distcollect.engine.build import (
    Probe,
    WorkerPlan,
    build_engine,
    build_evaluator,
    with_policy,
)
from distcollect.engine.engine import Engine
from distcollect.engine.evaluator import Evaluator
from distcollect.errors import RolloutGone, WorkerError
from distcollect.results import Evaluation
from distcollect.rollout.header import Header
from distcollect.rollout.layout import Tensors
from distcollect.rollout.slab import Slab
from distcollect.transport.peer_ids import TRAJ_IDS_PER_PEER
from distcollect.transport.protocol import NUM_SLABS, CollectRequest
from distcollect.weights.receiver import Push, WeightReceiver
from distcollect.weights.updaters import WeightSource, gpu_of
from distcollect.worker.handover_store import HandoverStore

log = logging.getLogger(__name__)


class Worker:
    """The service of a worker (:class:`~distcollect.transport.protocol.Service`).

    :meth:`run` blocks the thread that is to step the envs; all else may be called from others.
    """

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
        """A worker in slot ``worker_id``, known as ``peer``, on a host with ``address``.

        Its frames are counted in ``counts``; None: where nobody else can look. Ids of trajectories
        begin with ``first_traj_id``.
        """
        self.worker_id = worker_id
        self._incarnation = incarnation
        self._peer = peer
        self._address = address
        self._counts = counts
        self._first_traj_id = first_traj_id
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._engine: Engine | None = None
        self._evaluator: Evaluator | None = None
        self._receiver: WeightReceiver | None = None
        self._slabs: list[Slab] = []
        self._lying: dict[int, Slab] = {}  # by the number of the rollout that lies there
        self._handover_store = HandoverStore()
        self._sequence = 0
        self._preempted = -1  # the rollout that is to end early
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
        """End :meth:`run` as soon as the current step is done; what was asked before fails."""
        self._stopping = True
        if self._engine is not None:
            self._engine.stop()
        self._jobs.put(None)

    def configure(self, payload: bytes) -> Future[Probe]:
        """Build what the pickled :class:`WorkerPlan` says and try it out."""
        return self._submit(lambda: self._configure(payload))

    def collect(self, request: CollectRequest) -> Future[tuple[Header, Tensors]]:
        """Collect a rollout.

        Its tensors are valid until the request after the next one is made.
        """
        return self._submit(lambda: self._collect(request))

    def preempt(self, sequence: int) -> None:
        """End this rollout early: see :meth:`Engine.preempt`. Doesn't queue."""
        self._preempted = sequence
        if self._engine is not None and sequence == self._sequence:
            self._engine.preempt()

    def hand_over(self, sequence: int, key: str, keep_s: float) -> None:
        """Keep this rollout for another trainer: see :class:`HandoverStore`."""
        slab = self._lying.get(sequence)
        if slab is None:
            raise RolloutGone(f"rollout {sequence} lies here no more")
        self._handover_store.receiver_state(key, slab, keep_s)

    def handed_over(self, key: str) -> Future[bool]:
        """Whether it was taken, once that is certain."""
        return self._handover_store.outcome(key)

    def take_over(self, key: str, mapped: bool) -> list[Any]:
        """A rollout that is kept; ``mapped``: as :meth:`Slab.tensors` has it."""
        return self._handover_store.read(key).tensors(mapped=mapped)

    def confirm(self, key: str) -> None:
        """Whoever has read it has all of it."""
        self._handover_store.confirm(key)

    def take_back(self, key: str) -> None:
        """Give it to nobody any more."""
        self._handover_store.give_up(key, "the trainer that handed it over took it back")

    def seed(self, env_seeds: Sequence[int], policy_seeds: Sequence[int]) -> Future[None]:
        """Start over: see :meth:`Engine.seed`. Torch and numpy get the first policy seed."""
        return self._submit(lambda: self._seed(env_seeds, policy_seeds))

    def resume(self, version: int, first_traj_id: int) -> Future[None]:
        """Take the weights for ``version``, and begin trajectories with ids from there on."""
        return self._submit(lambda: self._resume(version, first_traj_id))

    def call_envs(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Future[list[Any]]:
        """Call a method of each env between two steps, in the middle of a rollout as well."""
        engine = self._configured
        answer = engine.call_soon(name, args, kwargs)
        self._submit(engine.do_jobs)  # if nothing is collected
        return answer

    def evaluate(
        self, num_episodes: int, deterministic: bool, seed: int | None, timeout_s: float
    ) -> Future[Evaluation]:
        """Play episodes in other envs, between two rollouts."""
        return self._submit(lambda: self._evaluate(num_episodes, deterministic, seed, timeout_s))

    def weights_ready(self, source: WeightSource | None = None) -> None:
        """Take part from now on in what ``source`` needs all receivers for."""
        self._configured_receiver.ready(source)

    def receive_weights(self, push: Push) -> Future[int]:
        """Take part in a push; completes with its version."""
        return self._configured_receiver.receive(push)

    def give_weights_up(self) -> None:
        """Wait no longer for the weights that are under way."""
        self._configured_receiver.give_up()

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        self._jobs.put((answer, work))
        return answer

    @property
    def _configured(self) -> Engine:
        if self._engine is None:
            raise WorkerError("asked before it was configured")
        return self._engine

    @property
    def _configured_receiver(self) -> WeightReceiver:
        if self._receiver is None:
            raise WorkerError("asked for weights before it was configured")
        return self._receiver

    def _configure(self, payload: bytes) -> Probe:
        try:
            plan: WorkerPlan = pickle.loads(payload)
        except Exception as error:
            raise WorkerError(
                f"could not unpickle the env maker or the policy ({type(error).__name__}: {error});"
                " what they are made of must be importable here too"
            ) from error
        plan = with_policy(plan)
        self._evaluator = build_evaluator(
            plan, worker_id=self.worker_id, incarnation=self._incarnation
        )
        self._engine = build_engine(
            plan,
            worker_id=self.worker_id,
            incarnation=self._incarnation,
            traj_ids=self._new_traj_ids(),
            counts=self._counts,
        )
        if self._stopping:
            self._engine.stop()
        step_timer = self._engine.step_timer
        self._receiver = WeightReceiver(self._engine.weights, self._address, step_timer.received)
        # What exists by now stays: the collector of cyclic garbage needn't go through all of torch.
        gc.collect()
        gc.freeze()
        weights = self._engine.weights
        return Probe(self._engine.layout, weights.layout, gpu_of(weights.device))

    def _collect(self, request: CollectRequest) -> tuple[Header, Tensors]:
        engine = self._configured
        wanted = (request.num_steps, request.shared)
        if not self._slabs or (self._slabs[0].num_steps, self._slabs[0].shared) != wanted:
            self._slabs = [
                Slab(engine.layout, request.num_steps, shared=request.shared)
                for _ in range(NUM_SLABS)
            ]
        slab = self._slabs[self._sequence % NUM_SLABS]
        self._lying.pop(self._sequence - NUM_SLABS, None)
        brief = self._preempted == self._sequence
        version = request.version if engine.options.exact_version else None
        engine.collect(
            slab, random=request.random, fresh=request.fresh, brief=brief, version=version
        )
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
            stepped=engine.counts.stepped,
            lost=dict(engine.counts.lost),
            env_faults=engine.counts.env_faults,
            work=engine.step_timer.work(),
            spans=engine.step_timer.spans(),
        )
        self._lying[self._sequence] = slab
        self._sequence += 1
        return header, tensors

    def _evaluate(
        self, num_episodes: int, deterministic: bool, seed: int | None, timeout_s: float
    ) -> Evaluation:
        engine = self._configured
        engine.weights.apply()
        assert self._evaluator is not None
        try:
            return self._evaluator.evaluate(
                num_episodes,
                version=engine.weights.version,
                deterministic=deterministic,
                seed=seed,
                timeout_s=timeout_s,
            )
        finally:
            engine.step_timer.restart_wait()

    def _seed(self, env_seeds: Sequence[int], policy_seeds: Sequence[int]) -> None:
        self._configured.seed(env_seeds, policy_seeds)
        torch.manual_seed(policy_seeds[0])
        np.random.seed(policy_seeds[0] % 2**32)  # noqa: NPY002 - for envs that still use it

    def _resume(self, version: int, first_traj_id: int) -> None:
        engine = self._configured
        engine.weights.version = version
        self._first_traj_id = first_traj_id
        engine.number(self._new_traj_ids())

    def _new_traj_ids(self) -> Iterator[int]:
        return itertools.count(self._first_traj_id + self._peer * TRAJ_IDS_PER_PEER)

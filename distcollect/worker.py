"""A worker process: serves its trainer's requests; steps envs on its main thread.

Simulators often insist on the main thread, and Python runs signal handlers there, so that is where
the engine lives. RPC handlers only hand it jobs and answer through futures; weights arrive on one
more thread (:mod:`.receiver`); the lifeline's thread ends the process when the trainer is gone.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from . import vitals
from .counts import Counts
from .engine import Engine, StepOptions
from .envs import EnvBatch, EnvContext, make_envs
from .errors import EnvError, PolicyError, RolloutGone, WorkerError
from .evaluation import Evaluation, Evaluator
from .flat import LiveWeights, WeightLayout, published
from .handover import Keeper
from .link import Lifeline, exit_now
from .meter import Recorder
from .policy import Exploration, Policy, RandomPolicy, UserPolicy
from .receiver import Push, WeightReceiver
from .rollout import Header, Layout, Slab, Tensors
from .rpc import RpcTransport
from .shared import sample_of_memory
from .threads import do_jobs
from .transport import NUM_SLABS, TRAJ_IDS_PER_PEER, CollectRequest
from .updaters import Source, gpu_of

log = logging.getLogger(__name__)

# A thread that answers the trainer waits so long for the interpreter, while the engine computes.
# Python's own 5 ms, several times in a push, is most of what a small one takes.
_SWITCH_INTERVAL_S = 0.0005
_JOIN_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class WorkerPlan:
    """What a worker steps, and how; it comes from the trainer.

    Attributes:
        create_env_fn: env id or callable, see :func:`~distcollect.envs.make_envs`.
        num_envs: envs to make.
        policy: the policy itself, None for random actions.
        policy_factory: makes the policy here instead.
        device: where the policy computes; None: where it is.
        env_device: where the envs compute, as far as they can choose; None: where they do anyway.
        exploration: see :class:`~distcollect.policy.Exploration`.
        info_keys: entries of ``info`` that go into the batch.
        options: see :class:`~distcollect.engine.StepOptions`.
        models: further modules that are published with the policy, by name. Where policy and env
            makers refer to them, they refer to these very objects here too.
        exclude: patterns of names of weights that are never sent.
        max_env_faults: see :class:`~distcollect.config.Faults`.
        traces: note what is done when.
    """

    create_env_fn: Any
    num_envs: int
    policy: Any = None
    policy_factory: Any = None
    device: torch.device | None = None
    env_device: torch.device | None = None
    exploration: Exploration = Exploration.RANDOM
    info_keys: Any = None
    options: StepOptions = field(default_factory=StepOptions)
    models: Mapping[str, nn.Module] = field(default_factory=dict)
    exclude: Sequence[str] = ()
    max_env_faults: int = 0
    traces: bool = False


@dataclass(frozen=True)
class Probe:
    """What a worker found when it tried its envs and policy out.

    Attributes:
        layout: what its frames consist of.
        weights: layout of the policy's weights.
        gpu: the GPU that has them, "" for the CPU.
    """

    layout: Layout
    weights: WeightLayout
    gpu: str = ""


def with_policy(plan: WorkerPlan) -> WorkerPlan:
    """``plan`` with the policy that its factory makes.

    Raises:
        PolicyError: it can't be made.
    """
    if plan.policy_factory is None:
        return plan
    return replace(plan, policy=_made_by(plan.policy_factory), policy_factory=None)


def build_engine(
    plan: WorkerPlan,
    *,
    traj_ids: Iterator[int],
    worker_id: int = 0,
    incarnation: int = 0,
    shared: bool = False,
    counts: Counts | None = None,
) -> Engine:
    """Make the envs and the policy of ``plan`` and try them out.

    Args:
        plan: what to make.
        traj_ids: where the ids of new trajectories are taken from.
        worker_id: the slot, for the makers' context.
        incarnation: which process in that slot, for the same.
        shared: whether the policy is the user's own object, not a copy.
        counts: what the engine counts in; None: a new one.

    Raises:
        EnvError: an env can't be made, or raised.
        PolicyError: the policy can't be made, raised, or its output doesn't fit the action space.
    """
    contexts = [
        EnvContext(worker_id=worker_id, env_index=index, incarnation=incarnation, seed=None)
        for index in range(plan.num_envs)
    ]
    envs = make_envs(
        plan.create_env_fn,
        plan.num_envs,
        info_keys=plan.info_keys,
        contexts=contexts,
        device=plan.env_device,
    )
    try:
        return engine_over(envs, with_policy(plan), traj_ids=traj_ids, shared=shared, counts=counts)
    except BaseException:
        with contextlib.suppress(EnvError):  # the first error is the one to tell
            envs.close()
        raise


def engine_over(
    envs: EnvBatch,
    plan: WorkerPlan,
    *,
    traj_ids: Iterator[int],
    shared: bool = False,
    counts: Counts | None = None,
) -> Engine:
    """As :func:`build_engine`, with envs that are there, and a policy that was made."""
    policy: Policy
    if plan.policy is None:
        policy = RandomPolicy(envs.action_space, envs.num_envs)
    else:
        policy = UserPolicy(
            plan.policy,
            envs.obs,
            envs.observation_space,
            envs.action_space,
            exploration=plan.exploration,
            device=plan.device,
            shared=shared,
        )
    if plan.device is not None:
        for model in plan.models.values():
            model.to(plan.device)
    return Engine(
        envs,
        policy,
        LiveWeights(
            published(policy.module, plan.models),
            plan.exclude,
            keeps_each=plan.options.exact_version,
        ),
        traj_ids=traj_ids,
        options=plan.options,
        counts=counts,
        max_env_faults=plan.max_env_faults,
        meter=Recorder(envs.num_envs) if plan.traces else None,
    )


def build_evaluator(
    plan: WorkerPlan, *, worker_id: int = 0, incarnation: int = 0, shared: bool = False
) -> Evaluator:
    """What evaluates the policy of ``plan``, the very object, in envs of its own."""

    def make(exploration: Exploration) -> Engine:
        # Of a rollout's own an episode knows nothing.
        options = replace(plan.options, reset_at_each_iter=False)
        return build_engine(
            replace(plan, exploration=exploration, options=options, traces=False),
            traj_ids=itertools.count(),
            worker_id=worker_id,
            incarnation=incarnation,
            shared=shared,
        )

    return Evaluator(make)


def _made_by(factory: Callable[[], Any]) -> Any:
    try:
        return factory()
    except Exception as error:
        raise PolicyError(f"policy_factory raised {type(error).__name__}: {error}") from error


class Worker:
    """The service of a worker (:class:`~distcollect.transport.Service`).

    :meth:`run` blocks the thread that is to step the envs; all else may be called from others.
    """

    def __init__(
        self,
        worker_id: int,
        *,
        incarnation: int,
        peer: int,
        address: str,
        counts: Counts | None = None,
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
        self._keeper = Keeper()
        self._sequence = 0
        self._preempted = -1  # the rollout that is to end early
        self._stopping = False

    def run(self) -> None:
        """Do jobs until :meth:`stop`; then close the envs."""
        do_jobs(self._jobs)
        self._keeper.close()
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
        """Keep this rollout for another trainer: see :class:`Keeper`."""
        slab = self._lying.get(sequence)
        if slab is None:
            raise RolloutGone(f"rollout {sequence} lies here no more")
        self._keeper.keep(key, slab, keep_s)

    def handed_over(self, key: str) -> Future[bool]:
        """Whether it was taken, once that is certain."""
        return self._keeper.outcome(key)

    def take_over(self, key: str, mapped: bool) -> list[Any]:
        """A rollout that is kept; ``mapped``: as :meth:`Slab.tensors` has it."""
        return self._keeper.read(key).tensors(mapped=mapped)

    def confirm(self, key: str) -> None:
        """Whoever has read it has all of it."""
        self._keeper.confirm(key)

    def take_back(self, key: str) -> None:
        """Give it to nobody any more."""
        self._keeper.give_up(key, "the trainer that handed it over took it back")

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

    def weights_ready(self, source: Source | None = None) -> None:
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
        meter = self._engine.meter
        self._receiver = WeightReceiver(self._engine.weights, self._address, meter.received)
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
            work=engine.meter.work(),
            spans=engine.meter.spans(),
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
            engine.meter.excuse()

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


def main(boot: dict[str, Any]) -> None:
    """Run a worker process from its boot message until its trainer ends it or is gone.

    Args:
        boot: "host" and "port" of the trainer's gate, "token", "worker_id", "incarnation",
            "num_threads" (torch's), "vitals" (a descriptor, see :mod:`.vitals`), "first_traj_id".
    """
    # Ctrl-C is the trainer's business: a terminal, or torchrun, may send it to all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    counts = Counts(vitals.mapped(boot["vitals"]))
    os.close(boot["vitals"])
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(boot["num_threads"])
    lifeline = Lifeline(boot["host"], boot["port"], _JOIN_TIMEOUT_S)
    about = {key: boot[key] for key in ("worker_id", "incarnation")}
    welcome = lifeline.join("worker", boot["token"], **about)
    address = lifeline.local_address
    worker = Worker(
        boot["worker_id"],
        incarnation=boot["incarnation"],
        peer=welcome["peer"],
        address=address,
        counts=counts,
        first_traj_id=boot["first_traj_id"],
    )
    transport = RpcTransport(welcome["peer"], address=address, service=worker)
    transport.connect(welcome["trainer_peer"], welcome["trainer_endpoint"])

    dismissed = threading.Event()

    def watch() -> None:
        while (message := lifeline.receive()) is not None:
            if "stop" in message:
                worker.stop()
            elif "bye" in message:
                dismissed.set()
        # Nobody is left to tell, and an env may hang: nothing short of this is certain.
        exit_now(1)

    threading.Thread(target=watch, name="distcollect-lifeline", daemon=True).start()
    told_to_leave = threading.Event()

    def leave() -> None:
        told_to_leave.wait()
        lifeline.send({"leaving": True})

    # Not in the handler itself: what it interrupts may be sending something.
    threading.Thread(target=leave, name="distcollect-leave", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: told_to_leave.set())
    lifeline.send({"endpoint": transport.endpoint, "segment": sample_of_memory()})
    worker.run()
    dismissed.wait()  # ends with the trainer at the latest: see above
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of torch may still wait for something; whoever started us ends what the envs left.
    os._exit(0)

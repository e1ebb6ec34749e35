"""Evaluates a policy: plays whole episodes in envs that are used for nothing else."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from distcollect.common.random_state import random_state_restored
from distcollect.common.seeding import Stream, env_seed, policy_seed, shares
from distcollect.common.step_counter import StepCounter
from distcollect.engine.base import EngineBase
from distcollect.engine.env_recovery import taken_faults
from distcollect.engine.plan import WorkerPlan
from distcollect.errors import DeadlineError, EnvError
from distcollect.policy.base import Exploration
from distcollect.policy.live_weights import LiveWeights, buffers_restored
from distcollect.policy.noise import without_noise
from distcollect.policy.weight_layout import published, state_tensors
from distcollect.results import EnvFault, Evaluation
from distcollect.rollout.slabs import new_slab
from distcollect.telemetry.step_timer import Episodes
from distcollect.transport.worker_service import EvaluationRequest

log = logging.getLogger(__name__)

_NUM_STEPS = 64  # of each rollout; steps after the last episode's end are wasted
_MOST_STEPS = 2048

_Episode: TypeAlias = tuple[float, int, int, list[float]]  # return, length, version, metrics


class Evaluator:
    """Plays episodes with the policy of an engine that collects, on the same thread."""

    def __init__(
        self,
        plan: WorkerPlan,
        build: Callable[..., EngineBase],
        *,
        counter: StepCounter | None = None,
        worker_id: int = 0,
        incarnation: int = 0,
    ) -> None:
        """Play with one engine for each kind of exploration, made when it is first needed.

        It has envs of its own, but shares the policy.

        Args:
            plan: what to play with; its policy was made.
            build: :func:`~distcollect.engine.build.build_engine`, with what is the same for all
                engines of this process.
            counter: counts the frames; None: a new one.
            worker_id: of this process, in the statistics.
            incarnation: the number of this process in the worker's slot, counted from 0.
        """
        self._plan = plan
        self._counter = counter or StepCounter()
        self._worker_id, self._incarnation = worker_id, incarnation
        self._build = partial(build, counter=self._counter)
        self._engines: dict[Exploration, EngineBase] = {}
        self._cancelled: set[int] = set()  # numbers of evaluations
        self._is_stopped = False

    def evaluate(self, request: EvaluationRequest, live: LiveWeights) -> Evaluation:
        """Play whole episodes; every env plays about as many as any other.

        Args:
            request: how many, and how.
            live: the policy's weights; an inference server may have newer ones.

        Raises:
            DeadlineError: the episodes took longer, or are not wanted any more.
            EnvError: an env raised.
            PolicyError: the policy raised.
            Stopped: see :meth:`stop`.
        """
        deadline = time.monotonic() + request.timeout_s

        def is_over() -> bool:
            return request.number in self._cancelled or time.monotonic() > deadline

        exploration = Exploration.DETERMINISTIC if request.deterministic else Exploration.RANDOM
        num_before = self._counter.env_faults
        try:
            own = published(self._plan.policy, self._plan.models)
            with random_state_restored(), buffers_restored(own):
                engine = self._engine(exploration)
                engine.weights.version = live.version
                seed = request.seed
                if seed is None:
                    seed = int(np.random.SeedSequence().generate_state(1)[0])
                num_each = shares(request.num_episodes, engine.layout.num_envs)
                episodes = self._play(engine, seed, num_each, is_over)
        except EnvError as error:
            error.num_env_faults = self._counter.env_faults - num_before
            error.env_faults = self._faults()
            raise
        weights = None
        if request.with_weights:
            state = state_tensors(live.module)
            names = [entry.names[0] for entry in live.layout.entries]
            weights = {name: state[name].detach().to("cpu", copy=True) for name in names}
        returns, lengths, versions, values = zip(*episodes, strict=True)
        columns = zip(self._plan.metrics, zip(*values, strict=True), strict=True)
        return Evaluation(
            torch.tensor(returns, dtype=torch.float64),
            torch.tensor(lengths),
            torch.tensor(versions),
            torch.full((request.num_episodes,), self._worker_id),
            {name: torch.tensor(column, dtype=torch.float64) for name, column in columns},
            {self._worker_id: self._counter.env_faults - num_before},
            self._faults(),
            weights,
        )

    def cancel(self, number: int) -> None:
        """End the evaluation of this number soon, or as soon as it begins; from any thread."""
        self._cancelled.add(number)

    def stop(self) -> None:
        """End the running evaluation between two steps, and all others; from any thread."""
        self._is_stopped = True
        for engine in list(self._engines.values()):
            engine.stop()

    def _faults(self) -> tuple[EnvFault, ...]:
        return taken_faults(self._counter, self._worker_id, self._incarnation)

    def _engine(self, exploration: Exploration) -> EngineBase:
        if exploration not in self._engines:
            plan = replace(
                self._plan,
                policy=without_noise(self._plan.policy),
                exploration=exploration,
                for_evaluation=True,
                reset_at_each_iter=False,  # an episode spans several rollouts here
                traces=False,
                metrics={},
            )
            engine = self._engines[exploration] = self._build(plan, traj_ids=itertools.count())
            if self._is_stopped:  # while it was made
                engine.stop()
        return self._engines[exploration]

    def _play(
        self, engine: EngineBase, seed: int, owed: list[int], is_over: Callable[[], bool]
    ) -> list[_Episode]:
        """The episodes; ``owed``: how many each env is to play."""
        episodes: list[_Episode] = []
        num_steps, num_starts = _NUM_STEPS, 0
        while any(owed):
            _seed(engine, seed, num_starts)
            num_starts += 1
            slab, played, num_played = new_slab(engine.layout, num_steps), Episodes(len(owed)), 0
            is_whole = True
            while is_whole and any(owed):
                if is_over():
                    raise DeadlineError(
                        f"{sum(owed)} of the episodes to evaluate are not over, after {num_played} "
                        "frames of each env. Give a longer timeout_s or fewer episodes"
                    )
                engine.collect(slab)
                num_played += num_steps
                rests = engine.step_timer.rests
                totals, lengths = played.add(slab, rests)
                for total, length, at in zip(
                    totals, lengths, played.ended_at.tolist(), strict=True
                ):
                    row, step = divmod(at, num_steps)
                    if owed[row]:
                        owed[row] -= 1
                        metrics = self._plan.metrics.values()
                        values = [float(slab.values_at(key, np.array([at]))[0]) for key in metrics]
                        version = int(slab.policy_version[row, step])
                        episodes.append((total, length, version, values))
                # Rows of a vector env have drifted apart, and frames of the faster ones were
                # dropped. Longer rollouts have room for more skew, and thus for longer episodes.
                is_whole = not rests
            num_steps = min(2 * num_steps, _MOST_STEPS)
        return episodes

    def close(self) -> None:
        """Close the envs; another evaluation makes new ones."""
        while self._engines:
            self._engines.popitem()[1].close()


def _seed(engine: EngineBase, seed: int, num_starts: int) -> None:
    num_envs = engine.layout.num_envs
    rows = range(num_starts * num_envs, (num_starts + 1) * num_envs)
    policy_seeds = [policy_seed(seed, row, Stream.EVALUATION) for row in rows]
    engine.seed([env_seed(seed, row, Stream.EVALUATION) for row in rows], policy_seeds)

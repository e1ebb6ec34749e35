"""Builds envs, policy and engine from the plan that a worker was sent."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from distcollect.common.step_counter import StepCounter
from distcollect.engine.engine import Engine, StepOptions
from distcollect.engine.evaluator import Evaluator
from distcollect.envs.base import EnvBatch
from distcollect.envs.make import EnvContext, make_envs
from distcollect.errors import EnvError, PolicyError
from distcollect.policy.base import Exploration, Policy
from distcollect.policy.live_weights import LiveWeights
from distcollect.policy.random import RandomPolicy
from distcollect.policy.user import UserPolicy
from distcollect.policy.weight_layout import published
from distcollect.telemetry.step_timer import TracingStepTimer


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
        exploration: see :class:`~distcollect.policy.base.Exploration`.
        info_keys: entries of ``info`` that go into the batch.
        options: see :class:`~distcollect.engine.engine.StepOptions`.
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
    counts: StepCounter | None = None,
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
    counts: StepCounter | None = None,
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
        step_timer=TracingStepTimer(envs.num_envs) if plan.traces else None,
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

"""Builds envs, policy and engine from a :class:`~distcollect.engine.plan.WorkerPlan`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from distcollect.common.step_counter import StepCounter
from distcollect.engine.base import EngineBase
from distcollect.engine.engine import Engine
from distcollect.engine.plan import WorkerPlan
from distcollect.envs.base import Envs
from distcollect.envs.make import EnvContext, make_envs
from distcollect.errors import ArgumentError, EnvError
from distcollect.integrations import load
from distcollect.rollout.layout import Layout
from distcollect.rollout.spaces import Key


def build_engine(
    plan: WorkerPlan,
    *,
    traj_ids: Iterator[int],
    worker_id: int = 0,
    incarnation: int = 0,
    counter: StepCounter | None = None,
) -> EngineBase:
    """Make the envs and the policy of ``plan``, and try them out.

    Args:
        plan: what to make.
        traj_ids: the ids of new trajectories.
        worker_id: the worker's slot; env makers are given it.
        incarnation: number of the process in that slot, counted from 0; env makers are given it.
        counter: counts the engine's frames; None: a new one.

    Raises:
        ArgumentError: an option that these envs do not support.
        EnvError: an env can't be made, or raised.
        PolicyError: the policy can't be made, raised, or its output doesn't fit the action space.
    """
    contexts = [
        EnvContext(worker_id, index, incarnation, None, plan.for_evaluation)
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
        plan = plan.with_policy_made()
        engine = build_engine_for(envs, plan, traj_ids=traj_ids, counter=counter)
        _check_metrics(plan.metrics, engine.layout)
    except BaseException:
        with contextlib.suppress(EnvError):  # the first error is the one to raise
            envs.close()
        raise
    return engine


def build_engine_for(
    envs: Envs, plan: WorkerPlan, *, traj_ids: Iterator[int], counter: StepCounter | None = None
) -> EngineBase:
    """Like :func:`build_engine`, for envs that exist and a plan whose policy was made."""
    if envs.engine is not None and plan.link is not None:
        raise ArgumentError(
            "inference servers do not work with TorchRL's envs: leave out inference="
        )
    kind: Any = Engine if envs.engine is None else load(envs.engine)
    engine: EngineBase = kind(envs, plan, traj_ids, counter)
    return engine


def _check_metrics(metrics: Mapping[str, Key], layout: Layout) -> None:
    """Raise ArgumentError unless frames of this layout have the entries of all metrics."""
    if layout.is_loose:
        return  # only the frames themselves show their entries
    known = layout.scalars()
    for name, key in metrics.items():
        if key not in known:
            raise ArgumentError(
                f"Monitor(metrics={{{name!r}: {key}}}): frames have no such entry with one number. "
                f"They have {', '.join(map(str, sorted(known)))}. info_keys adds entries of info"
            )

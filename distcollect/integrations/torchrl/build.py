"""Builds the engine for TorchRL envs. This module imports torchrl."""

from __future__ import annotations

from collections.abc import Iterator

from distcollect.common.step_counter import StepCounter
from distcollect.engine.plan import WorkerPlan
from distcollect.engine.plan_weights import live_weights
from distcollect.envs.base import Envs
from distcollect.integrations.torchrl.engine import TensorDictEngine
from distcollect.integrations.torchrl.envs import TorchRLEnvs
from distcollect.integrations.torchrl.policy import TensorDictPolicy


def build_tensordict_engine(
    envs: Envs,
    plan: WorkerPlan,
    *,
    traj_ids: Iterator[int],
    counter: StepCounter | None = None,
) -> TensorDictEngine:
    """See :func:`~distcollect.engine.build.build_engine_for`; for TorchRL envs."""
    assert isinstance(envs, TorchRLEnvs)
    if plan.max_frames_per_traj is not None:
        envs.limit_frames(plan.max_frames_per_traj)
    policy = TensorDictPolicy(
        plan.policy,
        envs,
        exploration=plan.exploration,
        device=plan.device,
        env_device=plan.env_device,
        adds_transforms=plan.adds_transforms,
    )
    return TensorDictEngine(
        envs,
        policy,
        live_weights(plan),
        traj_ids=traj_ids,
        options=plan,
        counter=counter,
        max_env_faults=plan.max_env_faults,
        step_timer=plan.step_timer(envs.num_envs),
    )

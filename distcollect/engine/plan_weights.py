"""The weights of the policy and the models that a worker computes with."""

from __future__ import annotations

from distcollect.engine.plan import WorkerPlan
from distcollect.policy.calling import moved
from distcollect.policy.live_weights import LiveWeights
from distcollect.policy.weight_layout import published


def live_weights(plan: WorkerPlan) -> LiveWeights:
    """The weights of the plan's policy and of its models, which are moved to its device."""
    if plan.device is not None:
        for model in plan.models.values():
            moved(model, plan.device)
    return LiveWeights(
        published(plan.policy, plan.models), plan.exclude, keeps_each=plan.exact_version
    )

"""The weights of the policy and the models that a worker computes with."""

from __future__ import annotations

from torch import nn

from distcollect.engine.plan import WorkerPlan
from distcollect.policy.calling import moved
from distcollect.policy.live_weights import LiveWeights
from distcollect.policy.weight_layout import published


def live_weights(plan: WorkerPlan, module: nn.Module | None) -> LiveWeights:
    """The weights of the policy's module and the plan's models, which are moved to its device."""
    if plan.device is not None:
        for model in plan.models.values():
            moved(model, plan.device)
    return LiveWeights(
        published(module, plan.models), plan.exclude, keeps_each=plan.options.exact_version
    )

"""The plans of workers whose policy is in an inference server, and what does not go with one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from distcollect.collectors import pickling
from distcollect.engine.pickled_plan import PickledPlan
from distcollect.engine.plan import WorkerPlan
from distcollect.errors import ArgumentError
from distcollect.inference.protocol import Serving
from distcollect.inference.remote_policy import served
from distcollect.launch.open_hosts import current
from distcollect.launch.rendezvous import LISTEN
from distcollect.policy.noise import with_noise_of

if TYPE_CHECKING:
    from distcollect.collectors.options import WorkerOptions


def check(options: WorkerOptions) -> None:
    """Raise ArgumentError for what an inference server can't do."""
    weights, placed = options.weight_options, options.placer is not None
    others_join = current() is not None or placed or options.listen or LISTEN in os.environ
    devices = {devices.policy for devices in options.worker_devices}
    missing = {
        "a policy: without one, actions are random": bool(options.policy or options.factories),
        "one policy_factory, not a list": len(options.factories) <= 1,
        "one policy_device": len(devices) == 1,
        "no models=": not options.named_models,
        "no normalize=": options.normalize is None,
        "reproducible=False": not options.reproducible,
        "WeightSync(swap_within_rollouts=True)": weights.swap_within_rollouts,
        "workers that this process starts, on its own host": options.is_local or not others_join,
    }
    for wanted, is_there in missing.items():
        if not is_there:
            raise ArgumentError(f"inference={options.inference} needs {wanted}")


def pickled_plans(options: WorkerOptions, plans: Sequence[WorkerPlan]) -> list[PickledPlan]:
    """The plans of workers without a policy, of those that evaluate with one, and of the server.

    Args:
        options: the collector's.
        plans: of all workers, each with the policy.

    Raises: as :func:`.pickling.pickled_plans`.
    """
    inference, limits, count = options.inference, options.fault_limits, options.num_collecting
    assert inference is not None
    step_s = limits.step_timeout_s or limits.start_timeout_s
    told = Serving(
        f"distcollect-{secrets.token_hex(16)}",
        limits.start_timeout_s + step_s,
        num_workers=count,
        batch_size=inference.batch_size,
        num_threads=inference.num_threads,
    )
    policy = with_noise_of(options.policy, served)
    asking = [
        replace(plan, policy=policy, policy_factory=None, device=None, serving=told)
        for plan in plans[:count]
    ]
    server = replace(plans[0], create_env_fn=None, serving=replace(told, is_server=True))
    having = pickling.pickled_plans([*plans[count:], server])
    return [*pickling.pickled_plans(asking), *having]

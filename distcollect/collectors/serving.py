"""The plans of workers whose policy is in an inference server, and what does not go with one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from distcollect.collectors import pickling
from distcollect.common.tables import counted
from distcollect.engine.pickled_plan import PickledPlan
from distcollect.engine.plan import WorkerPlan
from distcollect.errors import ArgumentError
from distcollect.inference.protocol import Serving
from distcollect.inference.remote_policy import served
from distcollect.launch.open_hosts import WantedHosts, current
from distcollect.policy.noise import with_noise_of
from distcollect.roster.manager import Workers

if TYPE_CHECKING:
    from distcollect.collectors.options import WorkerOptions

log = logging.getLogger(__name__)

# From a worker's request to its answer, without the forward pass.
_WAY_S = 0.15e-3


def check(options: WorkerOptions) -> None:
    """Raise ArgumentError for what an inference server can't do."""
    weights = options.weight_options
    devices = {devices.policy for devices in options.worker_devices}
    missing = {
        "a policy: without one, actions are random": bool(options.policy or options.factories),
        "one policy_factory, not a list": len(options.factories) <= 1,
        "one policy_device": len(devices) == 1,
        "no models= beside it; leave out one of the two": not options.named_models,
        "no normalize= beside it; leave out one of the two": options.normalize is None,
        "reproducible=False: set_seed() repeats with sync=True": not options.reproducible,
        "WeightSync(swap_within_rollouts=True)": weights.swap_within_rollouts,
    }
    for wanted, is_there in missing.items():
        if not is_there:
            raise ArgumentError(f"inference={options.inference} needs {wanted}")
    launch = None if options.is_local or options.placer is not None else current()
    ranks = options.inference.ranks if options.inference else ()
    if ranks and (launch is None or max(ranks) > options.num_collecting):
        has = "without a launch of ranks" if launch is None else f"{options.num_collecting} workers"
        raise ArgumentError(
            f"inference={options.inference}: {has} there is no such rank; use 'host', or ranks of "
            "a launch by torchrun or srun whose workers collect"
        )


def chosen(options: WorkerOptions) -> tuple[str, str]:
    """Where the policy computes; and what was chosen why, or "" where there was no choice.

    With :class:`~distcollect.Inference` "auto" this starts a worker, which measures, and ends it.

    Raises:
        DistCollectError: that worker did not start, or failed.
    """
    inference = options.inference
    if inference is None or inference.where != "auto":
        return "worker" if inference is None else inference.where, ""
    try:
        check(options)
    except ArgumentError as error:
        where, why = "worker", str(error)
    else:
        if options.is_open:  # what is measured here says little of other hosts
            where, why = "worker", f"inference={inference} needs workers of this host alone"
        else:
            where, why = _measured(options)
    choice = f"Inference('auto') chose {where!r}: {why}"
    log.info("%s", choice)
    return where, choice


def _measured(options: WorkerOptions) -> tuple[str, str]:
    trial = replace(options.plan(), serving=replace(_serving(options), is_trial=True))
    [pickled] = pickling.pickled_plans([trial])
    limits = replace(options.fault_limits, min_workers=1)
    start = partial(Workers, 1, limits, lambda _: pickled, hosts=WantedHosts(local=True))
    with contextlib.closing(start(transport=options.transport_name)) as workers:
        [info] = workers.worker_infos.values()
    if info.forward_s is None:
        return "worker", "a server can't compute for these envs"
    count, alone_s, together_s = options.num_collecting, *info.forward_s
    # Processes take turns on a GPU.
    local_s = alone_s * max(1, count / (1 if info.gpu else len(info.cores) or count))
    host_s = together_s + _WAY_S
    return "host" if host_s < local_s else "worker", (
        f"for each step of all envs a server would take {host_s * 1e3:.2g} ms, the policies of "
        f"{counted(count, 'worker')} {local_s * 1e3:.2g} ms"
    )


def _serving(options: WorkerOptions) -> Serving:
    inference, limits = options.inference, options.fault_limits
    assert inference is not None
    step_s = limits.step_timeout_s or limits.start_timeout_s
    return Serving(
        limits.start_timeout_s + step_s,
        num_workers=options.num_collecting,
        batch_size=inference.batch_size,
        num_threads=inference.num_threads,
        listens=inference.where == "rank",
    )


def pickled_plans(options: WorkerOptions, plans: Sequence[WorkerPlan]) -> list[PickledPlan]:
    """The plans of workers without a policy, of those that evaluate with one, and of the server.

    Args:
        options: the collector's.
        plans: of all workers, each with the policy.

    Raises: as :func:`.pickling.pickled_plans`.
    """
    told, count = _serving(options), options.num_collecting
    policy = with_noise_of(options.policy, served)
    asking = [
        replace(plan, policy=policy, policy_factory=None, device=None, serving=told)
        for plan in plans[:count]
    ]
    server = replace(plans[0], create_env_fn=None, serving=replace(told, is_server=True))
    having = pickling.pickled_plans([*plans[count:], server])
    return [*pickling.pickled_plans(asking), *having]

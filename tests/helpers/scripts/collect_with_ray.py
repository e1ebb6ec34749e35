"""Collects with workers that Ray starts, in the cluster that RAY_ADDRESS names; see test_ray.py.

collect_with_ray.py steps     does all of main(), and prints a line of JSON for each step
collect_with_ray.py hosts     with three workers, of which one is lost and comes back
collect_with_ray.py job       as the driver of a job of Ray, with `dc.run`, until it is killed
"""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import ray
import torch
from torch import nn

import distcollect as dc
from distcollect.integrations.ray import placer as ray_placer

SMALL = {"create_env_fn": "CartPole-v1", "frames_per_batch": 64, "sync": True}
LIMIT_S = 90


logged = []


class Lines(logging.Handler):
    """Keeps what is logged."""

    def emit(self, record):
        logged.append(record.getMessage())


def say(step, **seen):
    print(json.dumps({"step": step, **seen}), flush=True)


def actors():
    """Ray's table of the actors of this process that are not dead, by name."""
    job = ray.get_runtime_context().get_job_id()
    table = ray._private.state.actors().values()
    mine = [actor for actor in table if actor["JobID"] == job and actor["State"] != "DEAD"]
    return {actor["Name"]: actor for actor in mine}


def until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.05)


def workers_of(batch):
    return sorted({int(i) for i in batch["collector", "worker_id"].unique()})


def versions_of(batch):
    return sorted({int(i) for i in batch["collector", "policy_version"].unique()})


def collect_and_lose_an_actor():
    policy = nn.Linear(4, 2)
    collector = dc.RayCollector(
        **SMALL,
        policy=lambda observation: policy(observation).argmax(-1),
        policy_factory=None,
        num_collectors=2,
        models={"net": policy},
        remote_configs={"num_cpus": 1, "runtime_env": {"env_vars": {"OF_THE_RUN": "yes"}}},
    )
    with collector:
        first = collector.next()
        collector.update_policy_weights_({"net": policy})
        second = collector.next()
        names = sorted(actors())
        say(
            "batches",
            shape=list(first.shape),
            workers=workers_of(first),
            versions=[versions_of(first), versions_of(second)],
            names=names,
        )
        before = actors()[names[0]]["Pid"]
        os.kill(before, signal.SIGKILL)
        until(lambda: collector.next() is not None and collector.num_workers == 1)
        during = workers_of(collector.next())
        until(lambda: collector.next() is not None and collector.num_workers == 2)
        after = collector.next()
        say(
            "killed",
            during=during,
            after=workers_of(after),
            versions=versions_of(after),
            moved=actors()[names[0]]["Pid"] != before,
            lost=collector.ledger.total.lost,
            open=collector.ledger.total.open,
        )
    left = sorted(actors())
    until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
    say("closed", actors=left)


class Telling(nn.Module):
    """Tells the process that computes it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, observation):
        actions = self.net(observation).argmax(-1)
        return actions, {"server": torch.full_like(actions, os.getpid())}


def ancestors(pid):
    """The ids of a process's parent, of that one's parent, and so on."""
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def be_served():
    """The actor ends that has started the inference server."""
    policy = Telling()
    with dc.RayDataCollector(
        **SMALL, policy=policy, num_workers=2, inference=dc.Inference("host")
    ) as collector:
        [first] = collector.next()["server"].unique().tolist()
        collector.update_policy_weights_(policy)
        [starts] = {actor["Pid"] for actor in actors().values()}.intersection(ancestors(first))
        os.kill(starts, signal.SIGKILL)
        until(lambda: (collector.next()["server"] != first).all() and collector.num_workers == 2)
        last = collector.next()
        servers = last["server"].unique().tolist()
        say("served", servers=servers, workers=workers_of(last), versions=versions_of(last))


def place_together():
    """Before anything connects this process to Ray."""
    with dc.Collector(
        "CartPole-v1",
        backend="ray",
        num_collectors=1,
        frames_per_batch=64,
        backend_options={"placement_group_strategy": "STRICT_PACK"},
    ) as collector:
        batch = collector.next()
        kind = type(collector).__name__
        say("connected", connected=ray.is_initialized(), kind=kind, workers=workers_of(batch))
    say("disconnected", connected=ray.is_initialized())


def connect_anew():
    """The user ends the connection that a collector has made, and makes one."""
    collector = dc.RayDataCollector(**SMALL, num_workers=1)
    collector.next()
    ray.shutdown()
    ray.init(log_to_driver=False)
    of_the_user = ray.get_runtime_context().get_worker_id()
    collector.shutdown()
    connected = ray.is_initialized()
    say("anew", kept=connected and ray.get_runtime_context().get_worker_id() == of_the_user)
    ray.shutdown()
    collector = dc.RayDataCollector(**SMALL, num_workers=1)
    try:
        while collector.next() is not None:
            ray.shutdown()
    except dc.WorkerLost as error:
        say("shut down", message=str(error))
    collector.shutdown()
    ray.init(log_to_driver=False)
    before = len(logged)
    dc.RayDataCollector(**SMALL, num_workers=1, ray_init_config={"num_cpus": 3}).shutdown()
    say("ignored", logged=logged[before:])


def wait_for_resources():
    """The second worker has no room at first."""
    ray_placer._SETTLED_S = 1.0
    blocking = ray.remote(num_cpus=1)(type("Blocking", (), {})).remote()
    ray.get(blocking.__ray_ready__.remote())
    with dc.RayDataCollector(**SMALL, num_workers=2) as collector:
        alone = workers_of(collector.next())
        ray.kill(blocking)
        until(lambda: collector.next() is not None and collector.num_workers == 2)
        say("room", before=alone, after=workers_of(collector.next()))
        [second] = [actor for name, actor in actors().items() if name.endswith("-1")]
        ray.kill(ray.get_actor(second["Name"]), no_restart=True)
        until(lambda: collector.next() is not None and collector.num_workers == 1)
        until(lambda: any("given up the actor of worker 1" in line for line in logged))
        say("given up", workers=workers_of(collector.next()), logged=logged)


def fail():
    """Errors, and what is left of the collectors that raise them."""
    old = {"env_vars": {"PYTHONPATH": os.environ["OLD_VERSION"]}}

    for name, given in {
        "too large": {"remote_configs": {"num_cpus": 64}, "faults": dc.Faults(start_timeout_s=2)},
        "spread": {
            "placement_group_strategy": "STRICT_SPREAD",
            "faults": dc.Faults(start_timeout_s=2),
        },
        "version": {"remote_configs": {"runtime_env": old}},
        "option": {"remote_configs": {"num_cpu": 1}},
    }.items():
        try:
            dc.RayDataCollector(**{**SMALL, "num_workers": 2, **given}).shutdown()
            say(name, error=None)
        except dc.DistCollectError as error:
            say(name, error=type(error).__name__, message=str(error), left=sorted(actors()))


def main():
    place_together()
    connect_anew()
    collect_and_lose_an_actor()
    be_served()
    wait_for_resources()
    fail()
    say("end", connected=ray.is_initialized())


def hosts():
    """Collect until a worker was lost and is back."""
    with dc.RayDataCollector(**{**SMALL, "frames_per_batch": 96}, num_workers=3) as collector:
        collector.next()
        say("running", hosts=sorted(a["Address"]["IPAddress"] for a in actors().values()))
        until(lambda: collector.next() is not None and collector.num_workers == 2)
        batch = collector.next()
        say("lost", workers=workers_of(batch), frames=batch.numel())
        until(lambda: collector.next() is not None and collector.num_workers == 3)
        say("back", workers=workers_of(collector.next()))
    say("done", open=collector.ledger.total.open)


def job():
    with dc.RPCDataCollector("CartPole-v1", frames_per_batch=64, sync=True) as collector:
        for batch in collector:
            say(
                "batch",
                workers=workers_of(batch),
                expected=dc.num_workers(default=17),
                names=sorted(actors()),
            )


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING)
    logging.getLogger().addHandler(Lines())
    if sys.argv[1] == "job":
        dc.run(job)
    else:
        {"steps": main, "hosts": hosts}[sys.argv[1]]()

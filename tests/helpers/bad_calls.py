"""Calls that are refused: the call, the error's class, the value it names, and the remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from helpers.envs import SamplingEnv
from helpers.error_rows import ARGUMENT, KIND, PORT, RPC, STATE, Row, rpc, sync, with_env
from helpers.policies import GreedyPolicy
from torch import nn

import distcollect as dc
from distcollect.launch.rendezvous import host_and_port, read_token
from distcollect.net.interfaces import listen

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def used(collector: dc.DataCollectorBase, use: Callable[[Any], Any]) -> Any:
    with collector:
        return use(collector)


def closed(use: Callable[[Any], Any]) -> Any:
    collector = sync()
    collector.shutdown()
    return use(collector)


class OldEnv(SamplingEnv):
    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, False, {}


def raising_maker() -> SamplingEnv:
    raise OSError("no licence")


def raising_policy(observation: torch.Tensor) -> torch.Tensor:
    raise IndexError("not like this")


class Locked(nn.Module):
    """Can't be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = sys.stdout


class Stateful(nn.Module):
    """A recurrent policy whose states are ``begin`` and then ``then``."""

    def __init__(self, begin: Any, then: Any) -> None:
        super().__init__()
        self.begin, self.then = begin, then

    def initial_state(self, num_envs: int) -> Any:
        return self.begin

    def forward(self, observation: torch.Tensor, h: torch.Tensor) -> Any:
        return torch.zeros(1, dtype=torch.int64), self.then


class Stateless(Stateful):
    """A recurrent policy that can't say how its state begins."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def initial_state(self, num_envs: int) -> Any:
        raise OSError("no weights")


def publishes_and_loads(collector: Any) -> None:
    state = collector.state_dict()
    collector.update_policy_weights_(GreedyPolicy())
    collector.load_state_dict(state)


A_AND_B = spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2))


class Extends:
    def extend(self, frames: Any) -> None: ...

    def sample(self) -> None: ...


def stepped(**given: Any) -> Any:
    return used(sync(frames_per_batch=8, **given), lambda c: [c.next() for _ in range(9)])


def saves(path: Any, **given: Any) -> dc.Checkpoint:
    return dc.Checkpoint(path, part=nn.Linear(1, 1), **given)


ARGUMENTS: list[Row] = [
    # the call, the error's class; the value and the remedy as regular expressions
    (lambda: rpc(frames_per_batch=7, sync=True), ARGUMENT, "=7 .*2 worker", "6 or 8 would do"),
    (lambda: sync(frames_per_batch=0), ARGUMENT, "frames_per_batch=0", "at least 1"),
    (lambda: sync(frames_per_batch=2.5), KIND, "frames_per_batch=2.5", "whole number"),
    (lambda: sync(total_frames=-2), ARGUMENT, "total_frames=-2", "-1 for endless"),
    (lambda: rpc(num_workers=0), ARGUMENT, "num_workers=0", "at least 1"),
    (lambda: rpc(envs_per_worker="2"), KIND, "envs_per_worker='2'", "whole number"),
    (lambda: sync(max_frames_per_traj=0), ARGUMENT, "max_frames_per_traj=0", "at least 1"),
    (lambda: sync(init_random_frames=-5), ARGUMENT, "init_random_frames=-5", "0 or more"),
    (lambda: rpc(create_env_fn="CartPoel-v1"), ARGUMENT, "CartPoel", "CartPole.*module:id"),
    (lambda: rpc(create_env_fn=5), KIND, "create_env_fn=5", "env id or a callable"),
    (
        lambda: rpc(create_env_fn=SamplingEnv()),
        ARGUMENT,
        "is an env .*Env",
        "callable that makes one",
    ),
    (
        lambda: rpc(create_env_fn=[SamplingEnv] * 3),
        ARGUMENT,
        "3 makers for 2",
        "use envs_per_worker",
    ),
    (
        lambda: sync(create_env_fn=lambda: SamplingEnv(observation=spaces.Text(5))),
        dc.SpaceError,
        "observation: a Text",
        "in a wrapper",
    ),
    (
        lambda: sync(
            create_env_fn=lambda: SamplingEnv(observation=spaces.Dict(next=spaces.Discrete(2)))
        ),
        dc.SpaceError,
        "an entry 'next'",
        "rename it",
    ),
    (
        lambda: sync(create_env_fn=[SamplingEnv, lambda: SamplingEnv(action=spaces.Discrete(3))]),
        dc.SpaceError,
        r"env 1 .*Discrete\(3\)",
        "same spaces",
    ),
    (
        lambda: sync(create_env_fn=[e := SamplingEnv(), e]),
        ARGUMENT,
        "env 1",
        "callable that makes one",
    ),
    (
        lambda: sync(create_env_fn=lambda: gym.make_vec("CartPole-v1", 3), envs_per_worker=2),
        ARGUMENT,
        "3 envs.* 2",
        "ask for 3, or for 1",
    ),
    (
        lambda: sync(create_env_fn=[lambda: gym.make_vec("CartPole-v1", 2)] * 2),
        ARGUMENT,
        "is a vector env",
        "pass it without a list",
    ),
    (lambda: rpc(policy=5), KIND, "policy=5", "from observations to actions, or None"),
    (lambda: rpc(policy_factory=5), KIND, "policy_factory=5", "makes the policy"),
    (lambda: rpc(policy=Locked()), dc.PolicyNotSendable, "TypeError.*pickle", "policy_factory"),
    (lambda: rpc(create_env_fn=sys.stdout.write), ARGUMENT, "create_env_fn", "inside of it"),
    (lambda: sync(device="toaster"), ARGUMENT, "device='toaster'", "cpu"),
    (lambda: sync(exploration_type="wild"), ARGUMENT, "'wild'", "'deterministic'"),
    (lambda: rpc(cat_results=3), ARGUMENT, "cat_results=3", "use 0, -1 or 'stack'"),
    (lambda: rpc(cat_results="stack"), ARGUMENT, "cat_results='stack'", "sync=True"),
    (lambda: sync(postproc=5), KIND, "postproc=5", "callable that takes a batch and returns one"),
    (
        lambda: sync(trajs_per_batch=2, split_trajs=True),
        ARGUMENT,
        "split_trajs and trajs_per_batch",
        "latter gives",
    ),
    (lambda: sync(trajs_per_batch=2, set_truncated=True), ARGUMENT, "set_truncated", "drop one"),
    (lambda: sync(replay_buffer=5), KIND, "replay_buffer=5", r"extend\(frames\)"),
    (lambda: dc.RateLimited(5, 1.0), KIND, "=5", "extend"),
    (lambda: dc.RateLimited(Extends(), 0.0), ARGUMENT, "samples_per_insert=0.0", "above 0"),
    (lambda: dc.RateLimited(Extends(), 1, min_size=0), ARGUMENT, "min_size=0", ">= 1"),
    (lambda: dc.RateLimited(Extends(), 1, slack=-1), ARGUMENT, "slack=-1", "0 or more"),
    (lambda: dc.RateLimited(Extends(), 1).sample(), STATE, "too few frames", r"start\(\)"),
    (lambda: sync(info_keys="success"), KIND, "info_keys='success'", r"\['success'\]"),
    (lambda: sync(info_keys=["success"]), ARGUMENT, "'success'", "declare it: info_keys="),
    (
        lambda: sync(info_keys=["reward"]),
        ARGUMENT,
        "'reward'",
        "rename the entry of info in a wrapper",
    ),
    (lambda: sync(clip_actions=True), ARGUMENT, r"not Discrete\(2\)", "needs a Box"),
    (lambda: sync(models=[nn.Identity()]), KIND, "models=.*Identity", "dict of names to modules"),
    (lambda: sync(models={"policy": nn.Identity()}), ARGUMENT, "'policy'", "is taken"),
    (lambda: rpc(weight_updater=5), KIND, "weight_updater=5", "WeightUpdaterBase"),
    (lambda: rpc(preemptive_threshold=2, sync=True), ARGUMENT, "threshold=2", "at most 1"),
    (lambda: rpc(batch_deadline_s=2), ARGUMENT, "batch_deadline_s=2", "sync=True"),
    (lambda: rpc(batch_deadline_s="2", sync=True), KIND, "deadline_s='2'", "a number"),
    (lambda: rpc(evaluation=dc.EvaluationWorkers(2)), ARGUMENT, "num_workers=2", "at least one"),
    (
        lambda: rpc(reproducible=True, staleness=dc.Staleness(1)),
        ARGUMENT,
        "max_policy_lag=1",
        "mode='mask'",
    ),
    (lambda: rpc(listen="here"), ARGUMENT, "listen='here'", "HOST:PORT"),
    (lambda: dc.Staleness(-1), ARGUMENT, "max_policy_lag=-1", "0 or more"),
    (lambda: dc.Staleness(1, mode="wait"), ARGUMENT, "mode='wait'", "use 'pace', 'drop'"),
    (lambda: dc.Faults(batch_timeout_s=0), ARGUMENT, "batch_timeout_s=0", "above 0"),
    (lambda: dc.Faults(min_workers=0), ARGUMENT, "min_workers=0", "1 or more"),
    (lambda: dc.Faults(max_env_faults=-1), ARGUMENT, "max_env_faults=-1", "0 or more"),
    (lambda: dc.Faults(missing_share="none"), ARGUMENT, "='none'", "use 'survivors'"),
    (lambda: dc.WeightSync(backend="mpi"), ARGUMENT, "backend='mpi'", "use 'auto'"),
    (lambda: dc.WeightSync(wire_dtype="int8"), ARGUMENT, "wire_dtype='int8'", "use 'bfloat16'"),
    (lambda: dc.WeightSync(exclude="critic.*"), KIND, r"exclude='critic\.\*'", "list of patterns"),
    (lambda: dc.WeightSync(exclude=None), KIND, "exclude=None", "list of patterns"),  # type: ignore[arg-type]
    (lambda: dc.WeightSync(ready_timeout_s=0), ARGUMENT, "ready_timeout_s=0", "above 0"),
    (lambda: dc.EvaluationWorkers(num_episodes=0), ARGUMENT, "num_episodes=0", "1 or more"),
    (lambda: sync(frames_per_bach=5), KIND, "'frames_per_bach'", "there are: .*frames_per_batch"),
    (lambda: rpc(launcher="submitit"), ARGUMENT, "launcher='submitit'", "distcollect.run"),
    (lambda: rpc(backend="mpi"), ARGUMENT, "backend='mpi'", "use 'gloo'"),
    (lambda: rpc(reset_when_done=False), ARGUMENT, "reset_when_done=False", "always reset"),
    (
        lambda: rpc(num_workers_per_collector=0),
        ARGUMENT,
        "num_workers_per_collector=0",
        "1 or more",
    ),
    (lambda: rpc(collector_kwargs=5), KIND, "collector_kwargs=5", "must be a dict"),
    (
        lambda: rpc(create_env_kwargs=[{}]),
        ARGUMENT,
        r"create_env_kwargs=\[{}\]",
        "one dict for each",
    ),
    (lambda: rpc(collector_class="ray"), ARGUMENT, "collector_class='ray'", "several workers"),
    (lambda: dc.MultiSyncDataCollector(**RPC, sync=False), ARGUMENT, "has no sync", "RPCData"),
    (lambda: dc.run(print, num_trainers=0), ARGUMENT, "num_trainers=0", "at least 1"),
    (lambda: dc.run(print, num_trainers=2), ARGUMENT, "num_trainers=2", "by torchrun"),
    (lambda: dc.run(print, num_trainers=np.int64(2)), ARGUMENT, "num_trainers=2", "by torchrun"),
    (lambda: host_and_port("--join", "here"), ARGUMENT, "--join='here'", "HOST:PORT"),
    (lambda: dc.run(5), KIND, r"run\(5\)", "function without parameters"),
    (lambda: rpc(listen="node1:2000"), ARGUMENT, "'node1' is no address", "as in 10.0.0.5:29600"),
    (
        lambda: with_env(rpc, DISTCOLLECT_LISTEN="here"),
        ARGUMENT,
        "DISTCOLLECT_LISTEN='here'",
        "HOST:PORT",
    ),
    (lambda: rpc(listen="10.0.0.5:9999"), ARGUMENT, "at 10.0.0.5:9999", "DISTCOLLECT_TOKEN_FILE"),
    (
        lambda: with_env(lambda: rpc(listen=f"127.0.0.1:{PORT}"), DISTCOLLECT_TOKEN="secret"),
        dc.LaunchError,
        f"127.0.0.1 port {PORT}: Address already in use",
        "choose another port",
    ),
    (lambda: listen("203.0.113.1", 9999), dc.LaunchError, "203.0.113.1", r"has 127.0.0.1 \(lo\)"),
    (
        lambda: with_env(read_token, DISTCOLLECT_TOKEN_FILE="/no/such"),
        dc.LaunchError,
        "/no/such: .*No such file",
        "has to hold the run's secret",
    ),
    (lambda: sync(policy_device="cuda:99"), ARGUMENT, "policy_device='cuda:99'", "'cpu'"),
    (lambda: rpc(env_device="cuda:99"), ARGUMENT, "env_device='cuda:99'", "'cpu'"),
    (lambda: rpc(device="cuda:99"), ARGUMENT, "^device='cuda:99': .*GPU", "or 'cpu'"),
    (lambda: rpc(weight_sync="nccl"), KIND, "weight_sync='nccl'", r"distcollect.WeightSync\("),
    (lambda: rpc(evaluation=2), KIND, "evaluation=2", r"distcollect.EvaluationWorkers\("),
    (lambda: sync(faults={"max_restarts": 1}), KIND, "'max_restarts'", r"distcollect.Faults\("),
    (lambda: rpc(sync="false"), KIND, "sync='false'", "True or False"),
    (lambda: used(sync(), lambda c: c.set_seed(-1)), ARGUMENT, "seed=-1", "0 or more"),
    (lambda: used(sync(), lambda c: c.set_seed("1")), KIND, "seed='1'", "whole number"),
    (
        lambda: sync(create_env_fn="raises_on_import:Env-v0"),
        ARGUMENT,
        "'raises_on_import:Env-v0'",
        "importing .* raised OSError: no licence",
    ),
    (lambda: sync(create_env_fn="no.such:Env-v0"), ARGUMENT, "'no.such:Env-v0'", "be imported"),
    (lambda: rpc(create_env_fn="Lacking-v0"), ARGUMENT, "'Lacking-v0'.*no_such", "install what"),
    (lambda: dc.Monitor(run_dir=__file__), ARGUMENT, "bad_calls.py", "name a folder"),
    (lambda: dc.Monitor(run_dir=5), KIND, "run_dir=5", "folder's path"),  # type: ignore[arg-type]
    (lambda: dc.Monitor(tensorboard=True), ARGUMENT, "tensorboard=True", "run_dir="),
    (lambda: dc.Monitor(every_s=0), ARGUMENT, "every_s=0", "above 0"),
    (lambda: dc.Monitor(prometheus_port=70_000), ARGUMENT, "port=70000", "0 to 65535"),
    (lambda: dc.Monitor(prometheus_port="x"), KIND, "port='x'", "whole number"),  # type: ignore[arg-type]
    (lambda: dc.Monitor(callback=3), KIND, "callback=3", "callable"),  # type: ignore[arg-type]
    (lambda: sync(pre_collect_hook=5), KIND, "pre_collect_hook=5", "must be a function"),
    (
        lambda: sync(monitor=dc.Monitor(run_dir=f"{__file__}/runs")),
        ARGUMENT,
        "run_dir='.*bad_calls.py/runs'.*Not a directory",
        "name another folder",
    ),
    (
        lambda: sync(monitor=dc.Monitor(prometheus_port=PORT)),
        ARGUMENT,
        f"prometheus_port={PORT}.*in use",
        "another port, or 0",
    ),
    (lambda: sync(monitor="runs/1"), KIND, "monitor='runs/1'", r"distcollect.Monitor\("),
    (
        lambda: sync(trace="/no/such/trace.json"),
        ARGUMENT,
        "/no/such/trace.json",
        "a folder that exists",
    ),
    (lambda: dc.Checkpoint("/"), ARGUMENT, "nothing to save", "policy=policy"),
    (lambda: saves(__file__ + "/c.pt"), ARGUMENT, "bad_calls.py is a file", "another file"),
    (lambda: saves("/"), ARGUMENT, r"'/'\): is a folder", "another file"),
    (lambda: saves(5), KIND, r"Checkpoint\(5\)", "path of a file"),
    (lambda: saves("c.pt", every_s="5"), KIND, "every_s='5'", "must be a number"),
    (lambda: listen("0.0.0.0"), dc.LaunchError, "0.0.0.0", "name one address"),
    (lambda: listen("8.8.8.8"), dc.LaunchError, "8.8.8.8", "DISTCOLLECT_ALLOW_PUBLIC=1"),
]


RUNNING: list[Row] = [
    (
        lambda: sync(create_env_fn=raising_maker),
        dc.EnvError,
        "env 0.*OSError: no lic",
        "raising_maker",
    ),
    (
        lambda: sync(create_env_fn=lambda: 5),
        dc.EnvError,
        "returned a builtins.int",
        "gymnasium Env",
    ),
    (
        lambda: sync(create_env_fn=lambda: SamplingEnv(seen=np.zeros(4, np.float32))),
        dc.EnvError,
        r"reset\(\) returned 'observation' of shape \[4\]",
        r"space says \[3\]",
    ),
    (
        lambda: stepped(create_env_fn=OldEnv()),
        dc.EnvError,
        r"step\(\) returned",
        "env of the old gym",
    ),
    (
        lambda: stepped(create_env_fn=SamplingEnv(fails_at=5)),
        dc.EnvError,
        "OSError: the sim",
        "env 0",
    ),
    (lambda: sync(policy=raising_policy), dc.PolicyError, "IndexError: not like this", "raised"),
    (
        lambda: sync(policy=lambda observation: torch.zeros(2, 5)),
        dc.PolicyError,
        r"shape \[2, 5\]",
        r"shape \[1\]",
    ),
    (lambda: sync(policy=lambda observation: None), dc.PolicyError, "None", "action"),
    (
        lambda: sync(policy=lambda observation, speed: speed),
        dc.PolicyError,
        "'speed'",
        "its entries are",
    ),
    (
        lambda: sync(policy=lambda o: (torch.zeros(1).long(), {"reward": o})),
        dc.PolicyError,
        "'reward'",
        "rename it",
    ),
    (
        lambda: sync(policy=lambda o: (torch.zeros(1).long(), {"v": torch.ones(7)})),
        dc.PolicyError,
        r"'v' of shape \[7\]",
        "must be the 1 envs",
    ),
    (
        lambda: sync(create_env_fn=lambda: SamplingEnv(A_AND_B, seen={"a": 1})),
        dc.EnvError,
        r"reset\(\) returned an observation without 'b'",
        "observation space has",
    ),
    (lambda: sync(policy=Stateless()), dc.PolicyError, r"initial_state\(\) raised", "OSError: no"),
    (lambda: sync(policy=Stateful(5, {})), dc.PolicyError, "returned a int", "must be a dict"),
    (lambda: sync(policy=Stateful({"h": torch.zeros(3)}, {})), dc.PolicyError, r"\[3\]", "1 envs"),
    (
        lambda: sync(policy=Stateful({"h": torch.zeros(1, 3)}, {})),
        dc.PolicyError,
        "no 'h'",
        "whole state",
    ),
    (
        lambda: sync(policy=Stateful({"h": torch.zeros(1, 3)}, {"h": torch.zeros(1, 2)})),
        dc.PolicyError,
        r"\[1, 2\]",
        r"shape \[1, 3\] .* at the start",
    ),
    (
        lambda: sync(policy_factory=lambda: None),
        dc.PolicyError,
        "policy_factory returned None",
        "leave policy and policy_factory out",
    ),
    (
        lambda: sync(policy_factory=raising_maker),
        dc.PolicyError,
        "OSError: no lic",
        "policy_factory",
    ),
    (
        lambda: used(sync(postproc=lambda batch: 5), lambda c: c.next()),
        KIND,
        "returned int",
        "TensorDict",
    ),
    (lambda: used(sync(), lambda c: c.start()), STATE, r"start\(\)", "needs a replay_buffer"),
    (
        lambda: used(sync(replay_buffer=Extends()), lambda c: (c.start(), c.start())),
        STATE,
        "started already",
        r"async_shutdown\(\)",
    ),
    (
        lambda: used(sync(replay_buffer=Extends()), lambda c: (c.start(), c.set_seed(1))),
        STATE,
        r"set_seed\(\)",
        r"before start\(\)",
    ),
    (
        lambda: used(sync(policy=GreedyPolicy()), publishes_and_loads),
        ARGUMENT,
        "policy_version 0, .*version 1",
        "load the state first",
    ),
    (lambda: used(sync(), lambda c: c.pause()), STATE, r"pause\(\)", r"start\(\)"),
    (
        lambda: used(sync(), lambda c: (c.next(), c.load_state_dict({}))),
        STATE,
        "4 frames",
        "before",
    ),
    (
        lambda: used(sync(), lambda c: c.load_state_dict({"weight": 1})),
        ARGUMENT,
        "{'weight': 1}",
        "state_dict",
    ),
    (lambda: used(sync(), lambda c: c.call("fly")), dc.EnvError, "fly", "no (such )?(method|attr)"),
    (lambda: used(sync(), lambda c: c.evaluate(0)), ARGUMENT, "num_episodes=0", "at least 1"),
    (
        lambda: used(sync(create_env_fn=SamplingEnv()), lambda c: c.evaluate(1)),
        ARGUMENT,
        r"evaluate\(\)",
        "callable that makes one",
    ),
    (
        lambda: used(sync(policy=nn.Linear(4, 2)), lambda c: c.next()),
        dc.PolicyError,
        "float32",
        "int64",
    ),
    (lambda: closed(lambda c: c.next()), STATE, "was shut down", "make a new one"),
]

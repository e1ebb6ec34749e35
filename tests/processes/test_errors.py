"""Every message that a user can meet says what was wrong, with which value, and what to do.

Each line of the tables provokes one: what provokes it, its class, the value that it has to name,
and the remedy. The README's table of errors is checked against what was raised here.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.paths import ROOT
from helpers.scripts.marked import Marked
from torch import nn

import distcollect as dc
from distcollect.commands import main as cli
from distcollect.launch import preemption as notice
from distcollect.launch.rendezvous import TrainerAddress
from distcollect.launch.run_folder import ENDED, RunFolder
from distcollect.launch.supervisor import join
from distcollect.launch.topology import Launch
from distcollect.launch.worker_hosts import (
    Cluster,
    ClusterEvents,
    host_and_port,
    read_token,
    set_launched,
)
from distcollect.net.interfaces import listen
from distcollect.net.server import JoinServer, JoinServerEvents

cloudpickle.register_pickle_by_value(sys.modules[__name__])

README = (ROOT / "README.md").read_text()
CARTPOLE: dict[str, Any] = {"create_env_fn": "CartPole-v1", "frames_per_batch": 4}
RPC: dict[str, Any] = {**CARTPOLE, "num_workers": 2}


def sync(**given: Any) -> dc.SyncDataCollector:
    return dc.SyncDataCollector(**{**CARTPOLE, **given})


def rpc(**given: Any) -> dc.RPCDataCollector:
    return dc.RPCDataCollector(**{**RPC, **given})


def used(collector: dc.DataCollectorBase, use: Callable[[Any], Any]) -> Any:
    with collector:
        return use(collector)


def closed(use: Callable[[Any], Any]) -> Any:
    collector = sync()
    collector.shutdown()
    return use(collector)


def with_env(use: Callable[[], Any], **variables: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return use()


TAKEN = socket.create_server(("127.0.0.1", 0))  # a port that somebody has
PORT = TAKEN.getsockname()[1]


def teardown_module() -> None:
    TAKEN.close()


class Env(gym.Env[Any, Any]):
    """An env with any spaces, which may say something else than they do."""

    def __init__(self, seen: Any = None, fails_at: int | None = None, **spaces_: Any) -> None:
        self.observation_space = spaces_.get("observation", spaces.Box(-1, 1, (3,), np.float32))
        self.action_space = spaces_.get("action", spaces.Discrete(2))
        self.seen, self.fails_at, self.steps = seen, fails_at, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        return self.observation_space.sample() if self.seen is None else self.seen, {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.fails_at is not None and self.steps >= self.fails_at:
            raise OSError("the simulator crashed")
        return self.observation_space.sample(), 0.0, False, False, {}


class OldEnv(Env):
    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, False, {}


def raising_maker() -> Env:
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


class Chooses(nn.Module):
    """A policy with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.net(observation).argmax(-1)


def publishes_and_loads(collector: Any) -> None:
    state = collector.state_dict()
    collector.update_policy_weights_(Chooses())
    collector.load_state_dict(state)


A_AND_B = spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2))


class Extends:
    def extend(self, frames: Any) -> None: ...

    def sample(self) -> None: ...


def stepped(**given: Any) -> Any:
    return used(sync(frames_per_batch=8, **given), lambda c: [c.next() for _ in range(9)])


def saves(path: Any, **given: Any) -> dc.Checkpoint:
    return dc.Checkpoint(path, part=nn.Linear(1, 1), **given)


Row = tuple[Callable[[], Any], type[Exception], str, str]
ARGUMENT, KIND, STATE = dc.ArgumentError, dc.ArgumentTypeError, dc.CollectorStateError

ARGUMENTS: list[Row] = [
    # what provokes it, its class, the value, the remedy: the last two as regular expressions
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
    (lambda: rpc(create_env_fn=Env()), ARGUMENT, "is an env .*Env", "callable that makes one"),
    (lambda: rpc(create_env_fn=[Env] * 3), ARGUMENT, "3 makers for 2", "use envs_per_worker"),
    (
        lambda: sync(create_env_fn=lambda: Env(observation=spaces.Text(5))),
        dc.SpaceError,
        "observation: a Text",
        "in a wrapper",
    ),
    (
        lambda: sync(create_env_fn=lambda: Env(observation=spaces.Dict(next=spaces.Discrete(2)))),
        dc.SpaceError,
        "an entry 'next'",
        "rename it",
    ),
    (
        lambda: sync(create_env_fn=[Env, lambda: Env(action=spaces.Discrete(3))]),
        dc.SpaceError,
        r"env 1 .*Discrete\(3\)",
        "same spaces",
    ),
    (lambda: sync(create_env_fn=[e := Env(), e]), ARGUMENT, "env 1", "callable that makes one"),
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
        "give it alone",
    ),
    (lambda: rpc(policy=5), KIND, "policy=5", "from observations to actions, or None"),
    (lambda: rpc(policy_factory=5), KIND, "policy_factory=5", "makes the policy"),
    (
        lambda: rpc(policy=nn.Identity(), policy_factory=nn.Identity),
        ARGUMENT,
        "policy=Identity",
        "leave one out",
    ),
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
    (lambda: dc.RateLimited(Extends(), 1).sample(), STATE, "too little", r"start\(\)"),
    (lambda: sync(info_keys="success"), KIND, "info_keys='success'", r"\['success'\]"),
    (lambda: sync(info_keys=["success"]), ARGUMENT, "'success'", "declare it: info_keys="),
    (lambda: sync(info_keys=["reward"]), ARGUMENT, "'reward'", "another name in a wrapper"),
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
    (lambda: dc.Staleness(-1), ARGUMENT, "max_policy_lag=-1", ">= 0"),
    (lambda: dc.Staleness(1, mode="wait"), ARGUMENT, "mode='wait'", "use 'pace', 'drop'"),
    (lambda: dc.Faults(batch_timeout_s=0), ARGUMENT, "batch_timeout_s=0", "above 0"),
    (lambda: dc.Faults(min_workers=0), ARGUMENT, "min_workers=0", "1 or more"),
    (lambda: dc.Faults(missing_share="none"), ARGUMENT, "='none'", "use 'survivors'"),
    (lambda: dc.WeightSync(backend="mpi"), ARGUMENT, "backend='mpi'", "use 'auto'"),
    (lambda: dc.WeightSync(wire_dtype="int8"), ARGUMENT, "wire_dtype='int8'", "use 'bfloat16'"),
    (lambda: dc.WeightSync(exclude="critic.*"), KIND, r"exclude='critic\.\*'", "list of patterns"),
    (lambda: dc.WeightSync(ready_timeout_s=0), ARGUMENT, "ready_timeout_s=0", "above 0"),
    (lambda: dc.EvaluationWorkers(num_episodes=0), ARGUMENT, "num_episodes=0", "1 or more"),
    (lambda: sync(frames_per_bach=5), KIND, "'frames_per_bach'", "there are: .*frames_per_batch"),
    (lambda: rpc(compile_policy=True), ARGUMENT, "compile_policy=True", "policy_factory=lambda"),
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
    (lambda: dc.Monitor(run_dir=__file__), ARGUMENT, "test_errors.py", "name a folder"),
    (lambda: dc.Monitor(run_dir=5), KIND, "run_dir=5", "folder's path"),  # type: ignore[arg-type]
    (lambda: dc.Monitor(tensorboard=True), ARGUMENT, "tensorboard=True", "run_dir="),
    (lambda: dc.Monitor(every_s=0), ARGUMENT, "every_s=0", "above 0"),
    (lambda: dc.Monitor(prometheus_port=70_000), ARGUMENT, "port=70000", "0 to 65535"),
    (
        lambda: sync(monitor=dc.Monitor(run_dir=f"{__file__}/runs")),
        ARGUMENT,
        "run_dir='.*test_errors.py/runs'.*Not a directory",
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
        "a folder that is",
    ),
    (lambda: dc.Checkpoint("/"), ARGUMENT, "nothing to save", "policy=policy"),
    (lambda: saves(__file__ + "/c.pt"), ARGUMENT, "test_errors.py is a file", "another file"),
    (lambda: saves("/"), ARGUMENT, r"'/'\): is a folder", "another file"),
    (lambda: saves(5), KIND, r"Checkpoint\(5\)", "path of a file"),
    (lambda: saves("c.pt", every_s="5"), ARGUMENT, "every_s='5'", "number above 0"),
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
        lambda: sync(create_env_fn=lambda: Env(np.zeros(4, np.float32))),
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
    (lambda: stepped(create_env_fn=Env(fails_at=5)), dc.EnvError, "OSError: the sim", "env 0"),
    (lambda: sync(policy=raising_policy), dc.PolicyError, "IndexError: not like this", "raised"),
    (
        lambda: sync(policy=lambda observation: torch.zeros(2, 5)),
        dc.PolicyError,
        r"shape \[2, 5\]",
        r"shape \[1\]",
    ),
    (lambda: sync(policy=lambda observation: None), dc.PolicyError, "None", "action"),
    (lambda: sync(policy=lambda observation, speed: speed), dc.PolicyError, "'speed'", "there are"),
    (
        lambda: sync(policy=lambda o: (torch.zeros(1).long(), {"reward": o})),
        dc.PolicyError,
        "'reward'",
        "call it otherwise",
    ),
    (
        lambda: sync(policy=lambda o: (torch.zeros(1).long(), {"v": torch.ones(7)})),
        dc.PolicyError,
        r"'v' of shape \[7\]",
        "must be the 1 envs",
    ),
    (
        lambda: sync(create_env_fn=lambda: Env({"a": 1}, observation=A_AND_B)),
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
        r"start with shape \[1, 3\]",
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
        lambda: used(sync(policy=Chooses()), publishes_and_loads),
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
        lambda: used(sync(create_env_fn=Env()), lambda c: c.evaluate(1)),
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

said: list[str] = []


def check(row: Row) -> None:
    provoke, kind, value, remedy = row
    with pytest.raises(kind) as caught:
        provoke()
    message = str(caught.value)
    said.append(message)
    assert isinstance(caught.value, dc.DistCollectError)
    assert re.search(value, message, re.DOTALL), message
    assert re.search(remedy, message, re.DOTALL), message


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, with some that can be imported, and an env that lacks what it needs."""
    (tmp_path / "raises_on_import.py").write_text("raise OSError('no licence')\n")
    (tmp_path / "five.py").write_text("five = 5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    gym.register("Lacking-v0", "no_such_simulator:Env")
    yield tmp_path
    del gym.registry["Lacking-v0"]
    sys.modules.pop("five", None)


@pytest.mark.parametrize("row", range(len(ARGUMENTS)))
@pytest.mark.usefixtures("modules")
def test_of_arguments(row: int, started: Callable[[], list[str]]) -> None:
    check(ARGUMENTS[row])
    assert started() == []


@pytest.mark.parametrize("row", range(len(RUNNING)))
def test_in_process(row: int) -> None:
    check(RUNNING[row])


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "run",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "no-such-host.invalid",
}


def detected(given: dict[str, str], **other: str | None) -> Launch:
    return Launch.detect({k: v for k, v in {**given, **other}.items() if v is not None})


def ran(given: dict[str, str], **other: str) -> Any:
    return with_env(lambda: dc.run(lambda: None), **{**given, **other})


def joined(port: int, token: str = "secret") -> Any:
    def find() -> TrainerAddress:
        return TrainerAddress("127.0.0.1", port, token)

    return join(find, 1, 0.3, give_up_if_refused=False)


def turned_away() -> None:
    gate = JoinServer("127.0.0.1", "secret", JoinServerEvents())
    try:
        joined(gate.port, "another")
    finally:
        gate.close()


def answered_by_a_web_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(65536)  # else closing it would take the answer back
            connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            joined(server.getsockname()[1])
        finally:
            thread.join()


def waits_for_ranks() -> None:
    cluster = Cluster("127.0.0.1", "secret", num_ranks=3)
    try:
        cluster.attach(ClusterEvents(), 2, 0.1)
    finally:
        cluster.gate.close()


def asks_for_more_than_there_are() -> None:
    cluster = Cluster("127.0.0.1", "secret", num_ranks=3)
    try:
        cluster.num_workers(5)
    finally:
        cluster.gate.close()


def listens_elsewhere() -> None:
    cluster = Cluster("127.0.0.1", "secret", num_ranks=3)
    set_launched(cluster)
    try:
        rpc(listen="127.0.0.1:9999", num_workers=None)
    finally:
        set_launched(None)
        cluster.gate.close()


LAUNCHES: list[Row] = [
    (lambda: detected(TORCHRUN, RANK=None), dc.LaunchError, "RANK is not set", "by torchrun"),
    (lambda: detected(TORCHRUN, MASTER_PORT=""), dc.LaunchError, "MASTER_PORT is not", "torchrun"),
    (lambda: detected(TORCHRUN, RANK="x"), dc.LaunchError, "RANK='x' is no whole", "by torchrun"),
    (lambda: detected(TORCHRUN, RANK="2"), dc.LaunchError, "rank 2 .* the 2", "by torchrun"),
    (lambda: detected(TORCHRUN, MASTER_PORT="70000"), dc.LaunchError, "=70000", "by torchrun"),
    (
        lambda: detected(SLURM, SLURM_STEP_NODELIST=None),
        dc.LaunchError,
        "SLURM_STEP_NODELIST is not set",
        "by srun, also within a batch script",
    ),
    (lambda: detected(SLURM, SLURM_JOB_ID="x"), dc.LaunchError, "JOB_ID='x'", "by srun"),
    (
        lambda: ran(TORCHRUN, MASTER_ADDR="no-such-host.invalid"),
        dc.LaunchError,
        "MASTER_ADDR='no-such-host.invalid'",
        "--local-addr=ADDRESS",
    ),
    (
        lambda: ran(TORCHRUN, RANK="0", MASTER_PORT=str(PORT)),
        dc.LaunchError,
        f"MASTER_PORT={PORT}: another process has",
        "another --master-port",
    ),
    (
        lambda: ran(TORCHRUN, RANK="0", WORLD_SIZE="1"),
        dc.LaunchError,
        "has 1 process",
        "--nproc-per-node=2.*plain python",
    ),
    (
        lambda: ran(SLURM, SLURM_STEP_NUM_NODES="2"),
        dc.LaunchError,
        "no route to 'no-such-host.invalid'",
        "set MASTER_ADDR",
    ),
    (
        lambda: ran(SLURM, SLURM_PROCID="0", MASTER_PORT=str(PORT)),
        dc.LaunchError,
        f"port {PORT}: Address already in use",
        "under srun MASTER_PORT",
    ),
    (waits_for_ranks, dc.DeadlineError, r"ranks \[1, 2\] .*0.1 s", "'distcollect doctor'"),
    (asks_for_more_than_there_are, ARGUMENT, "num_workers=5.* 3 worker rank", "launch more"),
    (listens_elsewhere, ARGUMENT, "listen='127.0.0.1:9999'", "set DISTCOLLECT_LISTEN"),
    (turned_away, dc.LaunchError, "doesn't have this run's token", "DISTCOLLECT_TOKEN_FILE"),
    (answered_by_a_web_server, dc.LaunchError, r"127.0.0.1:\d+ is no trainer", "check the address"),
    (
        lambda: joined(free_port()),
        dc.LaunchError,
        r"rank 1 .*0.3 s.*127.0.0.1:\d+, said: .*refused",
        "do firewalls",
    ),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("row", range(len(LAUNCHES)))
def test_of_launches(row: int, started: Callable[[], list[str]]) -> None:
    check(LAUNCHES[row])
    assert started() == []


COLLECT = "collect --frames 8 --out new --env CartPole-v1"
COMMANDS: list[tuple[str, str]] = [
    # what is typed, and what its one line says, as a regular expression
    ("nonsense", "'nonsense'.*collect'?, '?doctor"),
    ("collect", "required: --env, --frames, --out"),
    (f"{COLLECT} --frames ten", "--frames: .*'ten'"),
    (f"{COLLECT} --frames 0", "--frames=0: must be at least 1"),
    (f"{COLLECT} --env CartPoel-v1", "CartPoel.*CartPole.*module:id"),
    (f"{COLLECT} --env raises_on_import:Env-v0", "importing .* raised OSError: no licence"),
    (f"{COLLECT} --env Lacking-v0", "--env Lacking-v0 .*no_such_simulator.*install"),
    (f"{COLLECT} --out five.py", "--out five.py .*File exists.*: name another"),
    (f"{COLLECT} --policy no.pt", "no.pt: there is no such file; .*MODULE:NAME"),
    (f"{COLLECT} --policy five.py", "five.py is no file that torch.save.*name one that is"),
    (f"{COLLECT} --policy :net", ":net: there is no such file.*MODULE:NAME"),
    (f"{COLLECT} --policy raises_on_import:net", "importing .* raised OSError: no licence"),
    (f"{COLLECT} --policy five:four", "has no 'four'; name a policy that it defines"),
    (f"{COLLECT} --policy five:five", "5 can't be called.*name a module or function"),
    (f"{COLLECT} --weights five.py", "--weights five.py needs a --policy"),
    (
        f"{COLLECT} --policy torch.nn:Identity --weights five.py",
        "five.py is no file of weights.*torch.save",
    ),
    ("top", "required: RUN"),
    ("top .", "there is no stats.jsonl; name the folder"),
    ("top noise", "noise/stats.jsonl says nothing yet.*try again.*name the folder"),
    ("report .", "there is no stats.jsonl; name the folder"),
    ("report noise", "noise/stats.jsonl holds no snapshots.*try again.*name a folder"),
    ("status .", "holds no run.*Name the folder that it printed"),
    ("status other", "other holds no run.*Name the folder that it printed"),
    ("status run", "none of the run's jobs was submitted.*submit it again"),
    ("cancel five.py", "five.py holds no run.*Name the folder that it printed"),
    ("submit", "which script"),
    ("submit no.py", "no.py is no file: name the training script"),
    ("submit --nodes none five.py", "--nodes: 'none': must be a whole number, at least 1"),
    ("submit --mem-gb -1 five.py", "--mem-gb: '-1': must be a number above 0"),
    ("submit --slurm =1 five.py", "--slurm '=1': must be NAME or NAME=VALUE"),
    ("submit --time 1 five.py", "--notice 120 s .*1 minute.*more --time, or a shorter"),
    ("submit --run-folder five.py/run five.py", "five.py is a file: name another --run-folder"),
    ("submit --run-folder run five.py", "run holds a run already: name another"),
    ("submit --add-workers ended --worker-jobs 1", "is over: it is done. Submit its script again"),
    ("submit --add-workers run --worker-jobs 1", "nobody can join.*again, with --worker-jobs"),
    ("worker", "--join --run is required"),
    ("worker --join here", "--join='here': must be HOST:PORT"),
    ("worker --join 127.0.0.1:9", "token is missing: name the file"),
    ("worker --join 127.0.0.1:9 --token-file no", "no: .*No such file.*has to hold"),
    ("worker --join 127.0.0.1:9 --threads 0", "--threads: '0': must be a whole number"),
    ("worker --join 127.0.0.1:9 --wait soon", "--wait: 'soon': must be a number above 0"),
    ("worker --run other", "--run other: no run of.*name the folder"),
    ("doctor --wait 0", "--wait: '0': must be a number above 0"),
    ("bench --workload pong", "--workload pong: unknown; there are: cartpole-1"),
    ("bench --repeats few", "--repeats: 'few': must be a whole number, at least 1"),
    ("bench --quick --json no/figures.json", "--json no/figures.json: No such file.*name a file"),
]


@pytest.fixture
def folders(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder, with those that commands may be pointed at by mistake."""
    for name in ("DISTCOLLECT_TOKEN", "DISTCOLLECT_TOKEN_FILE"):
        monkeypatch.setenv(name, "")  # so that what a command sets is taken back
        monkeypatch.delenv(name)
    (modules / "noise").mkdir()
    (modules / "noise" / "stats.jsonl").write_bytes(b"\xff\xfe\n5\n")
    (modules / "other").mkdir()
    (modules / "other" / "run.json").write_text('{"name": "of another program"}')
    for name, num_tasks in (("run", 1), ("ended", 2)):
        settings = {"command": [], "num_tasks": num_tasks, "num_workers": 0, "patience_s": 1.0}
        RunFolder(modules / name).create(settings)
    RunFolder(modules / "ended").tell(ENDED, why="it is done")


def status_of(typed: str) -> object:
    try:
        return cli.main(shlex.split(typed))
    except SystemExit as error:  # argparse's
        return error.code


@pytest.mark.parametrize(("typed", "line"), COMMANDS)
@pytest.mark.usefixtures("folders")
def test_of_commands(
    typed: str,
    line: str,
    started: Callable[[], list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status_of(typed) == 2
    lines = capsys.readouterr().err.splitlines()
    lines = [text for text in lines if text.startswith("distcollect")]
    assert len(lines) == 1
    assert re.search(line, lines[0]), lines[0]
    assert started() == []


@pytest.mark.parametrize(
    ("typed", "question"),
    [
        ("submit --trust-folder --run-folder new five.py", "SLURM doesn't answer: is this a login"),
        ("cancel submitted", "SLURM did not take 'scancel 12': .*down.*Try again"),
    ],
)
@pytest.mark.usefixtures("folders")
def test_of_a_slurm_that_is_down(
    typed: str,
    question: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("sbatch", "srun", "sinfo", "scontrol", "scancel"):
        (tmp_path / name).write_text("#!/bin/sh\necho the controller is down >&2\nexit 1\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    run = RunFolder(tmp_path / "submitted")
    run.create({"command": [], "num_tasks": 1, "num_workers": 0, "patience_s": 1.0})
    run.write("jobs/12.json", {"id": "12", "trains": True, "submitted": 1.0})
    assert status_of(typed) == 2
    said_of_it = capsys.readouterr().err
    assert re.search(question, said_of_it, re.DOTALL), said_of_it
    assert "the controller is down" in said_of_it
    assert not (tmp_path / "new").exists()


SCRIPTS = [*sorted((ROOT / "launch").glob("*.py")), *sorted((ROOT / "slurm").glob("*.py"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help_needs_no_launcher(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if script.stem == "train_impala":
        pytest.importorskip("ale_py")
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_of_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    fits, other = nn.Linear(1, 1), nn.Linear(3, 3)
    rows: list[tuple[Any, Row]] = [
        (
            fits.state_dict(),
            (lambda: saves(path).load(), ARGUMENT, "c.pt can't be", "another path"),
        ),
        ({"format": 9, "parts": {}}, (lambda: saves(path).load(), ARGUMENT, "format 9", "use the")),
        (
            {"format": 1, "parts": {"part": other.state_dict()}},
            (
                lambda: saves(path).load(),
                ARGUMENT,
                "c.pt: .*'part' .*size mismatch",
                "another path",
            ),
        ),
        (
            {"format": 1, "parts": {"model": fits.state_dict()}},
            (lambda: saves(path).load(), ARGUMENT, r"\['model'\], not \['part'\]", "the same ones"),
        ),
        ({}, (lambda: saves(path).step(), STATE, "c.pt is there", r"load\(\).* or remove")),
    ]
    try:
        for content, row in rows:
            torch.save(content, path)
            check(row)
    finally:
        notice.stop_watching()


def test_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever these tests run, this process sees no GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for given in ({"weight_sync": dc.WeightSync(backend="nccl")}, {"backend": "nccl"}):
        check((lambda given=given: rpc(**given), ARGUMENT, "backend='nccl'", "use backend='auto'"))


class Moody(gym.Env[Any, Any]):
    """Does what it was told last before it steps."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)
    mood = "fine"

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        return np.zeros(4, np.float32), {}

    def set_mood(self, mood: str) -> int:
        self.mood = mood
        return os.getpid()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        if self.mood == "slow":
            time.sleep(0.6)
        return np.zeros(4, np.float32), 0.0, False, False, {}


def odd_policy(observation: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, 5)


STRICT = dc.Faults(max_restarts=0, start_timeout_s=60.0)


def test_of_workers(marked: Marked) -> None:
    """Those that only a worker's process can provoke, four starts of one."""
    one: dict[str, Any] = {"num_workers": 1, "faults": STRICT}
    check(
        (lambda: rpc(create_env_fn=raising_maker, **one), dc.EnvError, "worker 0: env 0", "no lic")
    )
    check(
        (lambda: rpc(policy=odd_policy, **one), dc.PolicyError, r"worker 0: .*\[1, 5\]", r"\[1\]")
    )
    check(
        (lambda: rpc(policy=raising_policy, **one), dc.PolicyError, "IndexError", "not like this")
    )
    weights = nn.Linear(4, 2)
    policy = nn.Sequential(nn.Linear(4, 2), nn.Flatten())
    factory = {"policy_factory": Chooses}
    with rpc(create_env_fn=Moody, **{**one, **factory}) as collector:
        pid = collector.call("set_mood", "fine")[0][0]
        rows: list[Row] = [
            (rpc, STATE, "another collector is open", r"shutdown\(\)"),
            (
                lambda: collector.update_policy_weights_(weights),
                dc.WeightsError,
                "net.weight",
                "don't fit.*Nothing was sent",
            ),
            (
                collector.update_policy_weights_,
                KIND,
                "policy_factory",
                "pass the weights",
            ),
            (lambda: collector.update_policy_weights_(5), KIND, "int", "a module, a TensorDict"),
            (
                lambda: collector.update_policy_weights_(policy, worker_ids=[3]),
                ARGUMENT,
                r"worker_ids=\[3\]",
                r"there are \[0\]",
            ),
            (
                lambda: collector.update_policy_weights_(policy, worker_ids="some"),
                KIND,
                "worker_ids='some'",
                "'last_batch' or",
            ),
            (
                lambda: collector.update_policy_weights_(policy, worker_ids="lagging"),
                ARGUMENT,
                "'lagging'",
                "needs max_weight_update_interval",
            ),
            (lambda: collector.call("fly"), dc.EnvError, "worker 0.*fly", "no"),
            (lambda: collector.release([2]), ARGUMENT, r"worker_ids=\[2\]", r"there are \[0\]"),
        ]
        for row in rows:
            check(row)
        collector.next()
        collector.call("set_mood", "slow")
        check(
            (
                lambda: [collector.next(0.4) for _ in range(9)],
                dc.BatchTimeout,
                "0.4 s; waited for",
                "batch_timeout_s",
            )
        )
        os.kill(pid, signal.SIGKILL)
        check(
            (
                lambda: [collector.next() for _ in range(9)],
                dc.WorkerLost,
                "worker 0: its process ended: .*SIGKILL",
                f"{pid}",
            )
        )
    assert not marked.left()


def test_the_readmes_table_has_them_as_they_are() -> None:
    section = README.partition("## Errors, and what to do")[2].partition("\n## ")[0]
    starts = re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE)
    assert len(starts) == 10
    all_ran = len(said) > len(ARGUMENTS) + len(RUNNING) + len(LAUNCHES)
    if not (all_ran and any("its process ended" in message for message in said)):
        pytest.skip("the tests above were not all run")
    for start in starts:
        pattern = ".*?".join(map(re.escape, start.split("…")))
        assert any(re.match(pattern, message, re.DOTALL) for message in said), start

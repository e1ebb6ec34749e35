"""Calls that are refused: the call, the error's class, the value it names, and the remedy."""

from __future__ import annotations

import itertools
import pickle
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
from tensordict.nn import TensorDictModule
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


def ray(**given: Any) -> Any:
    return dc.RayDataCollector(**{**RPC, **given})


def chosen(**given: Any) -> Any:
    return dc.Collector("CartPole-v1", frames_per_batch=8, **given)


def delayed(num_jobs: int, **given: Any) -> Any:
    return dc.submitit_delayed_launcher(num_jobs, **given)(lambda: None)()


def spaced(**spaces_or_values: Any) -> Callable[[], SamplingEnv]:
    return lambda: SamplingEnv(**spaces_or_values)


def vector(num_envs: int) -> Any:
    return gym.make_vec("CartPole-v1", num_envs)


def recurrent(begin: Any, then: Any) -> Any:
    return sync(policy=Stateful(begin, then))


class OldEnv(SamplingEnv):
    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, False, {}


class OldReset(SamplingEnv):
    def reset(self, **_: Any) -> Any:
        return self.observation_space.sample()


class Boxed(SamplingEnv):
    def __init__(self) -> None:
        super().__init__(action=spaces.Box(-1, 1, (1,)))


class Picky(Boxed):
    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), "too far"
        return super().step(action)


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


SPACE, ENV, POLICY = dc.SpaceError, dc.EnvError, dc.PolicyError
TEXT, NEXT = spaces.Text(5), spaces.Dict(next=spaces.Discrete(2))
A_AND_B = spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(2))


class Extends:
    def extend(self, frames: Any) -> None: ...

    def sample(self) -> None: ...


class Indexed(Extends):
    def __getitem__(self, index: Any) -> None: ...


def prioritized(**given: Any) -> dc.Prioritized:
    return dc.Prioritized(Indexed(), **given)


def extra(written: Callable[[Any], dict[str, Any]]) -> Any:
    return sync(policy=lambda o: (torch.zeros(1).long(), written(o)))


def monitored(**given: Any) -> Any:
    return sync(monitor=dc.Monitor(**given))


def stepped(**given: Any) -> Any:
    return used(sync(frames_per_batch=8, **given), lambda c: [c.next() for _ in range(9)])


def acts(number: int, wrong: Any, right: Any = 0) -> Callable[[Any], torch.Tensor]:
    """A policy for one env that returns ``wrong`` from this call on."""
    calls = itertools.count()
    return lambda observation: torch.tensor([wrong if next(calls) >= number else right])


def saves(path: Any, **given: Any) -> dc.Checkpoint:
    return dc.Checkpoint(path, part=nn.Linear(1, 1), **given)


ARGUMENTS: list[Row] = [
    # the call, the error's class; the value and the remedy as regular expressions
    (lambda: rpc(frames_per_batch=7, sync=True), ARGUMENT, "=7 .*2 worker", "6 or 8 would do"),
    (lambda: rpc(frames_per_batch=1, sync=True), ARGUMENT, "frames_per_batch=1", ": 2 would do"),
    (lambda: sync(frames_per_batch=0), ARGUMENT, "frames_per_batch=0", "at least 1"),
    (lambda: sync(frames_per_batch=2.5), KIND, "frames_per_batch=2.5", "whole number"),
    (lambda: sync(frames_per_batch=True), KIND, "frames_per_batch=True", "whole number"),
    (lambda: sync(total_frames=-2), ARGUMENT, "total_frames=-2", "-1 for endless"),
    (lambda: sync(total_frames="100"), KIND, "total_frames='100'", "whole number"),
    (lambda: sync(init_random_frames=-5), ARGUMENT, "init_random_frames=-5", "0 or more"),
    (lambda: chosen(worker_idx=-1), ARGUMENT, "worker_idx=-1", "0 or more"),
    (lambda: rpc(create_env_fn="CartPoel-v1"), ARGUMENT, "CartPoel", "CartPole.*module:id"),
    (lambda: rpc(create_env_fn="CartPole-v99"), ARGUMENT, "CartPole-v99", "v1"),
    (lambda: rpc(create_env_fn=5), KIND, "create_env_fn=5", "env id or a callable"),
    (lambda: rpc(create_env_fn=[]), ARGUMENT, r"create_env_fn=\[\]", "with at least one"),
    (lambda: sync(create_env_fn=[]), ARGUMENT, r"create_env_fn=\[\]", "with at least one"),
    (lambda: rpc(create_env_fn=SamplingEnv()), ARGUMENT, "is an env .*Env", "callable that makes"),
    (lambda: rpc(create_env_fn=[SamplingEnv] * 3), ARGUMENT, "3 makers for 2", "envs_per_worker"),
    (lambda: sync(create_env_fn=spaced(observation=TEXT)), SPACE, "a Text", "in a wrapper"),
    (lambda: sync(create_env_fn=spaced(observation=NEXT)), SPACE, "an entry 'next'", "rename it"),
    (
        lambda: sync(create_env_fn=[SamplingEnv, spaced(action=spaces.Discrete(3))]),
        SPACE,
        r"env 1 .*Discrete\(3\)",
        "same spaces",
    ),
    (lambda: sync(create_env_fn=[e := SamplingEnv(), e]), ARGUMENT, "env 1", "that makes one"),
    (
        lambda: sync(create_env_fn=lambda: vector(3), envs_per_worker=2),
        ARGUMENT,
        "3 envs.* 2",
        "ask for 3, or for 1",
    ),
    (lambda: sync(create_env_fn=[lambda: vector(2)] * 2), ARGUMENT, "vector env", "without a list"),
    (lambda: sync(policy=GreedyPolicy), KIND, "policy=GreedyPolicy is a class", "GreedyPolicy\\("),
    (lambda: rpc(policy=5), KIND, "policy=5", "from observations to actions, or None"),
    (lambda: rpc(policy_factory=5), KIND, "policy_factory=5", "makes the policy"),
    (lambda: rpc(policy=Locked()), dc.PolicyNotSendable, "TypeError.*pickle", "policy_factory"),
    (lambda: rpc(policy=nn.LazyLinear(2)), ARGUMENT, "'weight' has no shape", "policy once with"),
    (lambda: rpc(policy_factory=sys.stdout.write), ARGUMENT, "policy_factory", "inside of it"),
    (lambda: rpc(create_env_fn=sys.stdout.write), ARGUMENT, "create_env_fn", "inside of it"),
    (lambda: sync(device="toaster"), ARGUMENT, "device='toaster'", "cpu"),
    (lambda: sync(exploration_type="wild"), ARGUMENT, "'wild'", "'deterministic'"),
    (lambda: rpc(cat_results=3), ARGUMENT, "cat_results=3", "must be 0, -1 or 'stack'"),
    (lambda: rpc(cat_results="stack"), ARGUMENT, "cat_results='stack'", "sync=True"),
    (lambda: sync(postproc=5), KIND, "postproc=5", "callable that takes a batch and returns one"),
    (lambda: sync(trajs_per_batch=2, split_trajs=True), ARGUMENT, "split_trajs and", "latter"),
    (lambda: sync(trajs_per_batch=2, set_truncated=True), ARGUMENT, "set_truncated", "drop one"),
    (
        lambda: rpc(trajs_per_batch=2, staleness=dc.Staleness(1, mode="mask")),
        ARGUMENT,
        "trajs_per_batch=2 and Staleness",
        "leave one of them out",
    ),
    (lambda: sync(traj_format="flat"), ARGUMENT, "traj_format='flat'", "'padded' or 'cat'"),
    (lambda: sync(traj_format="cat"), ARGUMENT, "traj_format='cat'", "add trajs_per_batch"),
    (
        lambda: sync(replay_buffer=Extends(), extend_buffer=False, postproc=print),
        ARGUMENT,
        "extend_buffer=False",
        "postproc needs whole batches: leave out",
    ),
    (lambda: sync(replay_buffer=[]), KIND, r"replay_buffer=\[\]", r"extend\(frames\) for a Te"),
    (lambda: sync(replay_buffer=5), KIND, "replay_buffer=5", r"extend\(frames\)"),
    (lambda: sync(replay_buffer=Extends), KIND, "replay_buffer=<class", "an object with a method"),
    (lambda: dc.RateLimited(Extends, 1), KIND, r"\(<class .*Extends'>\)", "must have extend"),
    (lambda: dc.RateLimited(5, 1.0), KIND, r"\(5\)", "extend"),
    (lambda: dc.RateLimited(Extends(), 0.0), ARGUMENT, "samples_per_insert=0.0", "above 0"),
    (lambda: dc.RateLimited(Extends(), 1, min_size=0), ARGUMENT, "min_size=0", "at least 1"),
    (lambda: dc.RateLimited(Extends(), 1, slack=-1), ARGUMENT, "slack=-1", "0 or more"),
    (lambda: dc.Prioritized([]), KIND, r"Prioritized\(\[\]\)", r"extend\(\)"),
    *(
        (lambda g=given: prioritized(**g), KIND, f"^Prioritized.{value}", "must be a number")
        for given, value in [
            ({"alpha": "x"}, "alpha='x'"),
            ({"beta": "0.4"}, "beta='0.4'"),
            ({"beta": None}, "beta=None"),
        ]
    ),
    (lambda: dc.RateLimited(Extends(), 1, timeout_s=0), ARGUMENT, "timeout_s=0", "above 0"),
    (lambda: dc.RateLimited(Extends(), 1).sample(), STATE, "too few frames", r"start\(\)"),
    (lambda: rpc(info_keys="success"), KIND, "^info_keys='success'", r"\['success'\]"),
    (lambda: sync(info_keys=["success"]), ARGUMENT, "'success'", "declare it: info_keys="),
    (lambda: sync(info_keys=["reward"]), ARGUMENT, "'reward'", "rename .* in a wrapper"),
    (lambda: sync(clip_actions=True), ARGUMENT, r"not Discrete\(2\)", "needs a Box"),
    (lambda: sync(models=[nn.Identity()]), KIND, "models=.*Identity", "dict of names to modules"),
    (lambda: sync(models={"policy": nn.Identity()}), ARGUMENT, "'policy'", "is taken"),
    (lambda: rpc(weight_updater=5), KIND, "weight_updater=5", "WeightUpdaterBase"),
    (lambda: rpc(preemptive_threshold=2, sync=True), ARGUMENT, "threshold=2", "at most 1"),
    (lambda: rpc(batch_deadline_s=2), ARGUMENT, "batch_deadline_s=2", "sync=True"),
    (lambda: rpc(batch_deadline_s="2", sync=True), KIND, "deadline_s='2'", "a number"),
    (lambda: rpc(batch_deadline_s=-1, sync=True), ARGUMENT, "deadline_s=-1", "above 0"),
    (lambda: rpc(evaluation=dc.EvaluationWorkers(2)), ARGUMENT, "num_workers=2", "at least one"),
    (
        lambda: rpc(reproducible=True, staleness=dc.Staleness(1)),
        ARGUMENT,
        "max_policy_lag=1",
        "mode='mask'",
    ),
    (lambda: rpc(transport="udp"), ARGUMENT, "transport='udp'", "'rpc' or 'tcp'"),
    (lambda: rpc(security="ssl"), ARGUMENT, "security='ssl'", "'tls' or 'token'"),
    (
        lambda: rpc(security="tls", transport="rpc"),
        ARGUMENT,
        "security='tls'|this torch lacks",
        "'tcp'",
    ),
    (lambda: rpc(listen="here"), ARGUMENT, "listen='here'", "HOST:PORT"),
    (lambda: dc.Staleness(-1), ARGUMENT, "max_policy_lag=-1", "0 or more"),
    (dc.Staleness, ARGUMENT, "max_policy_lag=None", "max_policy_age, or both"),
    (lambda: dc.Staleness(max_policy_age=-1), ARGUMENT, "max_policy_age=-1", "0 or more"),
    (
        lambda: rpc(sync=True, staleness=dc.Staleness(max_policy_age=1)),
        ARGUMENT,
        "max_policy_age=1",
        "mode='mask'",
    ),
    (lambda: dc.Staleness(1, mode="wait"), ARGUMENT, "mode='wait'", "use 'pace', 'drop'"),
    (lambda: dc.Faults(min_workers=0), ARGUMENT, "min_workers=0", "1 or more"),
    (lambda: rpc(faults=dc.Faults(min_workers=3)), ARGUMENT, "min_workers=3.*2 worker", "can join"),
    (lambda: dc.Faults(missing_share="none"), ARGUMENT, "='none'", "use 'survivors'"),
    (lambda: dc.WeightSync(backend="mpi"), ARGUMENT, "backend='mpi'", "use 'auto'"),
    (lambda: dc.WeightSync(wire_dtype="int8"), ARGUMENT, "wire_dtype='int8'", "use 'bfloat16'"),
    (lambda: dc.WeightSync(exclude="critic.*"), KIND, r"exclude='critic\.\*'", "list of patterns"),
    (lambda: sync(frames_per_bach=5), KIND, "'frames_per_bach'", "there are: .*frames_per_batch"),
    (lambda: rpc(num_envs=2), KIND, "'num_envs'", "did you mean 'envs_per_worker'"),
    (lambda: dc.PettingZooEnv(object()), KIND, r"PettingZooEnv\(<object", "possible_agents"),  # type: ignore[arg-type]
    (lambda: rpc(launcher="submitit"), ARGUMENT, "launcher='submitit'", "distcollect.run"),
    (lambda: rpc(backend="mpi"), ARGUMENT, "backend='mpi'", "use 'gloo'"),
    (lambda: rpc(reset_when_done=False), ARGUMENT, "reset_when_done=False", "always reset"),
    (lambda: rpc(num_sub_threads=0), ARGUMENT, "num_sub_threads=0", "1 or more"),
    (lambda: rpc(collector_kwargs=5), KIND, "collector_kwargs=5", "must be a dict"),
    (lambda: rpc(create_env_kwargs={"a": 1}), KIND, "kwargs={'a': 1}.*'CartP", "one that make"),
    (lambda: rpc(create_env_kwargs=[{}]), ARGUMENT, r"env_kwargs=\[{}\]", "one dict for each"),
    (lambda: rpc(collector_class="ray"), ARGUMENT, "collector_class='ray'", "several workers"),
    (lambda: rpc(ray_init_config={"num_cpus": 1}), ARGUMENT, "ray_init_config=", "a RayDataColl"),
    (lambda: ray(num_workers=None), ARGUMENT, "num_workers is missing", "num_collectors"),
    (lambda: ray(remote_configs=[{}]), ARGUMENT, "1 dict for 2 workers", "one for each"),
    (lambda: ray(remote_configs=1), KIND, "remote_configs=1", "must be a dict"),
    (lambda: ray(remote_configs={"name": "x"}), ARGUMENT, "'name' can't be set", "named after"),
    (lambda: ray(remote_configs={"lifetime": "x"}), ARGUMENT, "'lifetime'", "end with the trainer"),
    (lambda: ray(remote_config={}), KIND, "'remote_config'", "did you mean 'remote_configs'"),
    (lambda: ray(ray_init_config="auto"), KIND, "ray_init_config='auto'", "must be a dict"),
    (lambda: ray(placement_group_strategy="LOOSE"), ARGUMENT, "='LOOSE'", "one of 'PACK', 'SPR"),
    (
        lambda: ray(placement_group_strategy="PACK", remote_configs={"placement_group": "x"}),
        ARGUMENT,
        "'placement_group' and placement_group_strategy='PACK'",
        "give one of them",
    ),
    (
        lambda: ray(num_workers_per_collector=2, remote_configs={"num_cpus": 2}),
        ARGUMENT,
        "num_workers_per_collector=2 and remote_configs",
        "Give num_workers",
    ),
    (lambda: chosen(num_collectors=0), ARGUMENT, "num_collectors=0", "at least 1"),
    (lambda: chosen(num_collectors=2, backend="direct"), ARGUMENT, "'direct'", "at most one"),
    (lambda: chosen(sync=True), ARGUMENT, "'direct'", "sync is for collectors with workers"),
    (lambda: chosen(backend="mpi"), ARGUMENT, "backend='mpi'", "use one of 'direct'"),
    (lambda: chosen(backend="process", sync=1), KIND, "sync=1", "True or False"),
    (
        lambda: chosen(backend="rpc", backend_options={"frames_per_batch": 4}),
        ARGUMENT,
        "'frames_per_batch'",
        "duplicates",
    ),
    (
        lambda: chosen(backend="submitit", backend_options={"launcher": "mp"}),
        ARGUMENT,
        "backend='submitit'",
        "requires launcher='submitit'",
    ),
    (lambda: delayed(0), ARGUMENT, "num_jobs=0", "at least 1"),
    (lambda: delayed(1, framework="mpi"), ARGUMENT, "framework='mpi'", "'rpc' or"),
    (lambda: delayed(1, submitit_main_conf={"timeout_mn": 5}), ARGUMENT, "'timeout_mn'", "'timeo"),
    (lambda: dc.MultiSyncDataCollector(**RPC, sync=False), ARGUMENT, "has no sync", "RPCData"),
    (lambda: dc.run(print, num_trainers=0), ARGUMENT, "num_trainers=0", "at least 1"),
    (lambda: dc.run(print, num_trainers=np.int64(2)), ARGUMENT, "num_trainers=2", "by torchrun"),
    (lambda: host_and_port("--join", "here"), ARGUMENT, "--join='here'", "HOST:PORT"),
    (lambda: dc.run(5), KIND, r"run\(5\)", "must be a function"),
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
    (lambda: rpc(storing_device="cuda:99"), ARGUMENT, "storing_device='cuda:99'", "this process"),
    (lambda: rpc(device="cuda:99"), ARGUMENT, "^device='cuda:99': .*GPU", "use .*'cpu'"),
    *(
        (lambda n=name: sync(**{n: 99}), ARGUMENT, f"^{name}='cuda:99': .*GPU", "'cpu'")
        for name in ("device", "storing_device", "env_device", "policy_device")
    ),
    (lambda: rpc(weight_sync="nccl"), KIND, "weight_sync='nccl'", r"distcollect.WeightSync\("),
    (lambda: sync(faults={"max_restarts": 1}), KIND, "'max_restarts'", r"distcollect.Faults\("),
    (lambda: rpc(sync="false"), KIND, "sync='false'", "True or False"),
    (lambda: used(sync(), lambda c: c.set_seed(-1)), ARGUMENT, "seed=-1", "0 or more"),
    (lambda: used(sync(), lambda c: c.set_seed("1")), KIND, "seed='1'", "whole number"),
    (lambda: used(sync(), lambda c: c.log(0.1)), KIND, r"log\(0.1\)", "give a dict"),
    (lambda: used(sync(), lambda c: c.log({"a b": 1})), ARGUMENT, "'a b'", "letters, digits"),
    (lambda: used(sync(), lambda c: c.log({"metrics/a": 1})), ARGUMENT, "metrics/", "another name"),
    (lambda: used(sync(), lambda c: c.log({"a": "1"})), KIND, "'a'.*'1'", "pass a float"),
    (lambda: used(sync(), lambda c: c.log({"a": 1}, step=1.5)), KIND, "step=1.5", "whole number"),
    (lambda: sync(create_env_fn="raises_on_import:Env-v0"), ARGUMENT, "Env-v0'", "OSError: no lic"),
    (lambda: sync(create_env_fn="no.such:Env-v0"), ARGUMENT, "'no.such:Env-v0'", "be imported"),
    (lambda: rpc(create_env_fn="Lacking-v0"), ARGUMENT, "'Lacking-v0'.*no_such", "install what"),
    (lambda: dc.Normalize(observations="robot"), KIND, "observations='robot'", "list of names"),
    (lambda: dc.Normalize(gamma=1.5), ARGUMENT, "gamma=1.5", "from 0 to 1"),
    (lambda: dc.Normalize(clip=0), ARGUMENT, "clip=0", "above 0"),
    (lambda: dc.Normalize(epsilon=0), ARGUMENT, "epsilon=0", "above 0"),
    (lambda: dc.Normalize(record="both"), ARGUMENT, "record='both'", "use 'normalized'"),
    (lambda: sync(normalize=True), KIND, "normalize=True", r"distcollect.Normalize\(...\)"),
    (
        lambda: sync(normalize=dc.Normalize(observations=["obs"])),
        ARGUMENT,
        r"observations=\['obs'\]",
        r"observation \[4\] float32",
    ),
    (lambda: dc.Monitor(run_dir=__file__), ARGUMENT, "bad_calls.py", "name a folder"),
    (lambda: dc.Monitor(run_dir=5), KIND, "run_dir=5", "folder's path"),  # type: ignore[arg-type]
    (lambda: dc.Monitor(trace=5), KIND, "trace=5", "file's path"),  # type: ignore[arg-type]
    (lambda: dc.Monitor(tensorboard=True), ARGUMENT, "tensorboard=True", "run_dir="),
    (lambda: dc.Monitor(every_s=0), ARGUMENT, "every_s=0", "above 0"),
    (lambda: dc.Monitor(prometheus_port=70_000), ARGUMENT, "port=70000", "0 to 65535"),
    (lambda: dc.Monitor(callback=3), KIND, "callback=3", "callable"),  # type: ignore[arg-type]
    *(
        (lambda m=metrics: dc.Monitor(metrics=m), KIND, "metrics=", r"\{'success': \('next', 'suc")
        for metrics in ("success", ["success"], {"success": "success"}, {"": ("x",)}, {"a": ()})
    ),
    (lambda: sync(pre_collect_hook=5), KIND, "pre_collect_hook=5", "must be a function"),
    (lambda: monitored(run_dir=f"{__file__}/runs"), ARGUMENT, "Not a directory", "another folder"),
    (lambda: monitored(prometheus_port=PORT), ARGUMENT, f"={PORT}.*in use", "another port, or 0"),
    (lambda: sync(trace="/no/such/trace.json"), ARGUMENT, "/no/such/trace.json", "that exists"),
    (lambda: sync(trace=5), KIND, "trace=5", "path of a file"),
    (lambda: dc.Checkpoint("/"), ARGUMENT, "nothing to save", "policy=policy"),
    (lambda: dc.Checkpoint(step=3), KIND, "step=3: int has no state_dict", "have both"),  # type: ignore[arg-type]
    (lambda: saves("c.pt", keep_lst=3), KIND, "^keep_lst=3", "did you mean 'keep_last'"),
    (lambda: saves(__file__ + "/c.pt"), ARGUMENT, "bad_calls.py is a file", "another file"),
    (lambda: saves("/"), ARGUMENT, r"'/'\): is a folder", "another file"),
    (lambda: saves(5), KIND, r"Checkpoint\(5\)", "path of a file"),
    (lambda: saves("c.pt", keep_last=0), ARGUMENT, "keep_last=0", "at least 1"),
    (lambda: saves("c.pt", best="return"), ARGUMENT, "best='return'", "collector=..."),
    (
        lambda: used(sync(), lambda c: dc.Checkpoint("c.pt", best="returns", collector=c)),
        ARGUMENT,
        "best='returns'",
        "'return', or a metric",
    ),
    (lambda: saves("c.pt", every_s="5"), KIND, "every_s='5'", "must be a number"),
    (lambda: saves("c.pt", every_s=0), ARGUMENT, "every_s=0", "above 0"),
    (lambda: listen("0.0.0.0"), dc.LaunchError, "0.0.0.0", "name one address"),
    (lambda: listen("8.8.8.8"), dc.LaunchError, "8.8.8.8", "DISTCOLLECT_ALLOW_PUBLIC=1"),
]


RUNNING: list[Row] = [
    (lambda: sync(create_env_fn=raising_maker), ENV, "env 0.*OSError: no lic", "raising_maker"),
    (
        lambda: sync(create_env_fn=lambda rank: 5),
        ENV,
        "argument: 'rank'",
        "parameter named context",
    ),
    (lambda: sync(create_env_fn=lambda: 5), ENV, "returned a builtins.int", "gymnasium Env"),
    (
        lambda: sync(create_env_fn=spaced(seen=np.zeros(4, np.float32))),
        ENV,
        r"reset\(\) returned 'observation' of shape \[4\]",
        r"space says \[3\]",
    ),
    (lambda: stepped(create_env_fn=OldEnv()), ENV, r"step\(\) returned", "env of the old gym"),
    (
        lambda: stepped(create_env_fn=SamplingEnv(fails_at=5)),
        ENV,
        "OSError: the sim",
        "env 0",
    ),
    (lambda: sync(policy=raising_policy), POLICY, "IndexError: not like this", "raised"),
    (lambda: sync(policy=lambda o: torch.zeros(2, 5)), POLICY, r"shape \[2, 5\]", r"shape \[1\]"),
    (lambda: sync(policy=lambda observation: None), POLICY, "None", "action"),
    (
        lambda: sync(policy=lambda observation, state: 0),
        POLICY,
        "'state' is no entry of it; it is one array",
        r"recurrent policy, give .* initial_state\(num_envs\)",
    ),
    (
        lambda: sync(policy=TensorDictModule(nn.Linear(4, 2), ["obs"], ["action"])),
        POLICY,
        "{'obs'}",
        r"given 'observation' \[1, 4\] float32\); in_keys of a TensorDictModule must be among",
    ),
    (
        lambda: sync(policy=nn.Linear(3, 2)),
        POLICY,
        r"RuntimeError: mat1 .*1x4 and 3x2",
        r"it was given 'observation' \[1, 4\] float32",
    ),
    (
        lambda: sync(
            create_env_fn=spaced(seen=np.full(3, np.nan, np.float32)),
            policy=lambda observation: torch.distributions.Normal(
                observation[:, :1], 1.0, validate_args=True
            ),
        ),
        POLICY,
        r"given 'observation' \[1, 3\] float32 with NaN or infinity in it\)",
        "these come from the env",
    ),
    (lambda: sync(policy=acts(0, 1.0)), POLICY, "dtype float32, but", r"to\(torch\.int64\)"),
    *(
        (
            lambda r=returned: sync(policy=lambda o: r),
            POLICY,
            f"returned a {kind}",
            "a dict of what",
        )
        for returned, kind in [
            ((torch.zeros(1).long(), torch.zeros(1)), "tuple of 2"),
            ({"action": torch.zeros(1).long()}, "dict of 1"),
        ]
    ),
    (
        lambda: sync(create_env_fn=spaced(observation="wide")),
        SPACE,
        "observation_space of SamplingEnv is 'wide'",
        "one of gymnasium.spaces",
    ),
    (
        lambda: sync(create_env_fn=OldReset),
        ENV,
        r"reset\(\) returned ndarray, not the 2",
        "env of the old gym",
    ),
    (lambda: sync(policy=acts(0, 2)), POLICY, r"action 2 .*env 0.*Discrete\(2\)", "from 0 to 1"),
    (lambda: stepped(policy=acts(9, -1)), POLICY, "action -1 .*env 0 .CartPole", "from 0 to 1"),
    *(
        (
            lambda n=number: stepped(create_env_fn=Boxed, policy=acts(n, [float("nan")], [0.0])),
            POLICY,
            r"action \[nan\] for env 0",
            "look for NaN in its input, and in its weights",
        )
        for number in (0, 9)
    ),
    (
        lambda: stepped(policy=acts(9, [5.0], [0.0]), create_env_fn=Picky),
        ENV,
        r"AssertionError: too far .*outside of Box\(-1.0, 1.0",
        "clip_actions=True",
    ),
    (lambda: extra(lambda o: {"reward": o}), POLICY, "'reward'", "rename it"),
    (lambda: extra(lambda o: {"v": torch.ones(7)}), POLICY, r"'v' of shape \[7\]", "the 1 envs"),
    (
        lambda: sync(create_env_fn=lambda: SamplingEnv(A_AND_B, seen={"a": 1})),
        ENV,
        r"reset\(\) returned an observation without 'b'",
        "observation space has",
    ),
    (lambda: sync(policy=Stateless()), POLICY, r"initial_state\(\) raised", "OSError: no"),
    (lambda: recurrent(5, {}), POLICY, "returned a int", "must be a dict"),
    (
        lambda: recurrent({"h": (torch.zeros(1, 3), torch.zeros(1, 3))}, {}),
        POLICY,
        "returned tuple as 'h'",
        "each of its parts a name of its own$",
    ),
    (lambda: recurrent({"h": torch.zeros(3)}, {}), POLICY, r"\[3\]", "1 envs"),
    (lambda: recurrent({"h": torch.zeros(1, 3)}, {}), POLICY, "no 'h'", "whole state"),
    (
        lambda: recurrent({"h": torch.zeros(1, 3)}, {"h": torch.zeros(1, 2)}),
        POLICY,
        r"\[1, 2\]",
        r"shape \[1, 3\] .* at the start",
    ),
    (lambda: sync(policy_factory=lambda: None), POLICY, "factory returned None", "leave policy"),
    (lambda: sync(policy=lambda _: None).next(), POLICY, "returned None", "return. missing"),
    (lambda: sync(policy_factory=raising_maker), POLICY, "OSError: no lic", "policy_factory"),
    (lambda: used(sync(postproc=lambda _: 5), next), KIND, "returned int", "TensorDict"),
    (lambda: used(sync(), lambda c: c.start()), STATE, r"start\(\)", "needs a replay_buffer"),
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
    (lambda: used(sync(), lambda c: (next(c), c.load_state_dict({}))), STATE, "4 frames", "before"),
    (
        lambda: used(sync(), lambda c: c.load_state_dict({"weight": 1})),
        ARGUMENT,
        "{'weight': 1}",
        "state_dict",
    ),
    (lambda: used(sync(), lambda c: c.call("fly")), ENV, "fly", "no (such )?(method|attr)"),
    (lambda: used(sync(), lambda c: c.evaluate(0)), ARGUMENT, "num_episodes=0", "at least 1"),
    (
        lambda: used(sync(create_env_fn=SamplingEnv()), lambda c: c.evaluate(1)),
        ARGUMENT,
        r"evaluate\(\)",
        "callable that makes one",
    ),
    (
        lambda: used(sync(), lambda c: c.update_policy_weights_(worker_ids=0)),
        KIND,
        "no workers",
        "leave worker_ids out",
    ),
    (lambda: used(sync(policy=nn.Linear(4, 2)), next), POLICY, "float32", "int64"),
    (lambda: used(sync(), pickle.dumps), KIND, "SyncDataCollector can't be pickled", "state_dict"),
    (lambda: closed(next), STATE, "was shut down", "make a new one"),
    (lambda: used(sync(frames_per_batch=10**13), next), ARGUMENT, "470,000.0 GB", "a smaller fram"),
    (lambda: used(sync(), lambda c: c.log({"x": 10**400})), ARGUMENT, "'x'", "too many digits"),
    (lambda: used(sync(), lambda c: c.next(timeout_s=-1)), ARGUMENT, "timeout_s=-1", "above 0"),
    (lambda: used(sync(), lambda c: c.async_shutdown(-1)), ARGUMENT, "timeout=-1", "above 0"),
    (lambda: dc.PushHandle(1, [0], 1).wait(float("nan")), ARGUMENT, "timeout_s=nan", "above 0"),
    (lambda: used(sync(), lambda c: c.evaluate(1, timeout_s="5")), KIND, "'5'", "of seconds"),
]

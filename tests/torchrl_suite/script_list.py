"""The training scripts of TorchRL that ``scripts.py`` runs, with what makes their budgets small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Script:
    """A script of TorchRL's.

    Attributes:
        path: in the checkout.
        args: its arguments.
        edits: patterns and replacements, which make its budget small where no argument does, or
            replace what is not installed; in the script and in its configurations.
        collector: for a script of TorchRL's ``Trainer``, which names its collector in its
            configuration: the class of this package to name there.
    """

    path: str
    args: Sequence[str] = ()
    edits: Sequence[tuple[str, str]] = ()
    collector: str = ""


_OFF_POLICY = (
    "collector.total_frames=96", "collector.init_random_frames=32", "optim.batch_size=10",
    "collector.frames_per_batch=16", "replay_buffer.size=120", "logger.backend=",
)  # fmt: skip
_PENDULUM = (*_OFF_POLICY, "env.name=Pendulum-v1")
_IQL = (
    "collector.total_frames=96", "optim.batch_size=10", "collector.frames_per_batch=16",
    "env.train_num_envs=2", "logger.backend=",
)  # fmt: skip
_ON_POLICY = (
    "collector.total_frames=80", "collector.frames_per_batch=40", "loss.mini_batch_size=10",
    "env.env_name=HalfCheetah-v5", "logger.backend=", "logger.test_interval=100000",
)  # fmt: skip
_ATARI = (
    "collector.total_frames=320", "collector.frames_per_batch=80", "logger.backend=",
    "logger.test_interval=100000",
)  # fmt: skip
_OFF_POLICY_TRAINER = (
    "collector.total_frames=400", "collector.frames_per_batch=50",
    "trainer.optim_steps_per_batch=2", "replay_buffer.batch_size=16",
)  # fmt: skip
_SAC_TRAINER = (
    *_OFF_POLICY_TRAINER, "training_env.num_workers=2", "collector.num_workers=2",
    "collector.init_random_frames=100",
)  # fmt: skip
_ON_POLICY_TRAINER = (
    "collector.total_frames=400", "trainer.total_frames=400", "collector.frames_per_batch=100",
    "replay_buffer.batch_size=20",
)  # fmt: skip
# The logger that needs no account, which TorchRL's configurations have arguments of another for.
_CSV = (
    (r"^  (offline|project): .*\n", ""),
    (r"logger@logger: wandb", "logger@logger: csv"),
    (r"HalfCheetah-v4", "HalfCheetah-v5"),
    (r"\bmps\b", "cpu"),
)
_VMAS = (
    "collector.frames_per_batch=200", "collector.n_iters=3", "train.num_epochs=2",
    "train.minibatch_size=50", "logger.backend=", "env.max_steps=20", "eval.evaluation_episodes=2",
)  # fmt: skip
_SMALL = (
    (r"^(\s*)total_frames = [\d_]+.*$", r"\1total_frames = 800"),
    (r"^(\s*)frames_per_batch = [\d_]+.*$", r"\1frames_per_batch = 100"),
    (r"^(\s*)init_random_frames = [\d_]+.*$", r"\1init_random_frames = 100"),
    (r"^(\s*)(sub_batch_size|batch_size) = [\d_]+.*$", r"\1\2 = 16"),
    (r"^(\s*)num_epochs = [\d_]+.*$", r"\1num_epochs = 2"),
    (r"total_frames=[\d_]+", "total_frames=800"),
)
_FEW_ITERATIONS = (
    (r"^n_iters = .*$", "n_iters = 2"),
    (r"^n_optimiser_steps = .*$", "n_optimiser_steps = 2"),
    (r"^num_epochs = .*$", "num_epochs = 2"),
    (r"^iteration_when_stop_training_evaders = .*$", "iteration_when_stop_training_evaders = 1"),
)
_MULTIAGENT_TRAINER = (
    "env.vmas_envs=10", "env.max_steps=20", "train.minibatch_size=50", "collector.total_frames=800",
    "collector.frames_per_batch=200", "trainer.optim_steps_per_batch=2",
)  # fmt: skip
# Stands for a data set that would have to be downloaded.
_EXPERT_FRAMES = """(lambda env, size: (
    buffer := TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=size),
    buffer.extend(env.rollout(1000, break_when_any_done=False)),
)[0])"""
_NO_VIDEO = ((r"^( *)(video_recorder|env_with_render.transform)\.dump\(\)", r"\1pass"),)
_GYMNASIUM = ((r"^( *)import gym$", r"\1import gymnasium as gym"),)
_DISTRIBUTED = (
    "--num_workers=2", "--num_nodes=2", "--frames_per_batch=200", "--total_frames=4000",
    "--env=CartPole-v1",
)  # fmt: skip

_FEW_UPDATES = ("loss.mini_batch_size=20", "loss.ppo_epochs=2")
_SOTA, _TUTORIALS, _EXAMPLES = "sota-implementations", "tutorials/sphinx-tutorials", "examples"


def _sota(name: str, args: Sequence[str], script: str = "", **more: Any) -> Script:
    return Script(f"{_SOTA}/{name}/{script or name}.py", args, **more)


def _trainer(name: str, args: Sequence[str], collector: str = "Collector") -> Script:
    return _sota(f"{name}_trainer", args, "train", edits=_CSV, collector=collector)


SCRIPTS = {
    "ppo_mujoco": _sota("ppo", (*_ON_POLICY, "loss.ppo_epochs=2"), "ppo_mujoco"),
    "ppo_atari": _sota("ppo", (*_ATARI, "env.num_envs=2", *_FEW_UPDATES), "ppo_atari"),
    "a2c_mujoco": _sota("a2c", _ON_POLICY, "a2c_mujoco"),
    "a2c_atari": _sota("a2c", (*_ATARI, "env.num_envs=2", _FEW_UPDATES[0]), "a2c_atari"),
    "impala_single_node": _sota(
        "impala", (*_ATARI, "collector.num_workers=2", "loss.batch_size=2"), "impala_single_node"
    ),
    "rnd_mujoco": _sota("rnd", (*_ON_POLICY, "loss.ppo_epochs=2"), "rnd_mujoco"),
    **{name: _sota(name, _PENDULUM) for name in ("sac", "td3", "ddpg", "tqc", "crossq")},
    "discrete_sac": _sota("discrete_sac", (*_OFF_POLICY, "env.library=gymnasium")),
    "dqn_cartpole": _sota(
        "dqn",
        ("collector.total_frames=400", "collector.init_random_frames=100",
         "collector.frames_per_batch=50", "buffer.batch_size=10", "loss.num_updates=2",
         "buffer.buffer_size=200", "logger.backend="),
        "dqn_cartpole",
    ),
    "dqn_atari": _sota(
        "dqn",
        (*_ATARI, "collector.init_random_frames=100", "buffer.batch_size=10", "loss.num_updates=2",
         "buffer.buffer_size=200"),
        "dqn_atari",
    ),
    "cql_online": _sota(
        "cql",
        (*(a for a in _PENDULUM if "replay" not in a), "replay_buffer.size=120",
         "optim.optim_steps_per_batch=2"),
        "cql_online",
    ),
    "iql_online": _sota("iql", (*_IQL, "env.name=Pendulum-v1"), "iql_online"),
    "discrete_iql": _sota("iql", _IQL, "discrete_iql"),
    **{
        f"multiagent {name}": _sota("multiagent", _VMAS, name)
        for name in ("mappo_ippo", "maddpg_iddpg", "iql", "qmix_vdn", "sac")
    },
    **{
        f"{name}_trainer": _trainer(name, _ON_POLICY_TRAINER, "MultiAsyncCollector")
        for name in ("ppo", "a2c", "reinforce")
    },
    "sac_trainer": _trainer("sac", _SAC_TRAINER, "MultiAsyncCollector"),
    "sac_trainer, async": _trainer(
        "sac", ("--config-name=config_async", *_SAC_TRAINER), "MultiAsyncCollector"
    ),
    **{f"{name}_trainer": _trainer(name, _OFF_POLICY_TRAINER) for name in ("td3", "ddpg")},
    "dqn_trainer": _trainer("dqn", (*_OFF_POLICY_TRAINER, "collector.init_random_frames=100")),
    **{f"{name}_trainer": _trainer(name, _OFF_POLICY_TRAINER) for name in ("cql", "iql")},
    **{
        f"multiagent_trainer, {name}": _trainer(
            "multiagent", (f"--config-name={name}", *_MULTIAGENT_TRAINER)
        )
        for name in ("mappo", "ippo", "maddpg", "iddpg", "masac", "isac", "qmix", "vdn", "iql")
    },
    "gail": _sota(
        "gail",
        ("ppo.collector.total_frames=400", "ppo.collector.frames_per_batch=80",
         "ppo.loss.mini_batch_size=20", "ppo.loss.ppo_epochs=2", "env.env_name=HalfCheetah-v5",
         "replay_buffer.batch_size=40", "logger.backend=", "logger.test_interval=100000"),
        edits=(("make_offline_replay_buffer\\(cfg.replay_buffer\\)", _EXPERT_FRAMES
                + "(make_env(cfg.env.env_name, device), cfg.replay_buffer.batch_size)"),),
    ),
    "dreamer_v3": _sota(
        "dreamer_v3",
        ("collector.total_frames=400", "collector.frames_per_batch=100", "env.max_episode_steps=50",
         "replay_buffer.batch_size=4", "replay_buffer.seq_len=8",
         "optimization.updates_per_batch=2", "logger.eval_every=200", "logger.eval_episodes=1"),
    ),
    **{
        f"tutorial {name}": Script(f"{_TUTORIALS}/{name}.py", edits=edits)
        for name, edits in {
            "coding_ppo": (*_SMALL, (r"InvertedDoublePendulum-v\d", "InvertedDoublePendulum-v5")),
            "coding_ddpg": _SMALL,
            "coding_dqn": _SMALL,
            "dqn_with_rnn": _SMALL,
            "recurrent_sequence_training": (),
            "multiagent_competitive_ddpg": (*_FEW_ITERATIONS, *_NO_VIDEO),
            "multiagent_ppo": _FEW_ITERATIONS,
            "getting-started-3": (),
            "getting-started-5": (
                *_SMALL, *_NO_VIDEO,
                (r"(stop_after|init_rand_steps|optim_steps)( *)= *[\d_]+", r"\1 = 5"),
            ),
            "collector_trajectory_assembly": (),
            "memory_efficient_rl": _SMALL,
        }.items()
    },
    "example collector_device": Script(
        f"{_EXAMPLES}/collectors/collector_device.py",
        edits=((r"\bcuda(:0)?\"", 'cpu"'), ("_STEPS = 5_120", "_STEPS = 256"),
               ("max_length > 200", "max_length > 20")),
    ),
    "example mp_collector_mps": Script(
        f"{_EXAMPLES}/collectors/mp_collector_mps.py", edits=((r"\"mps\"", '"cpu"'),)
    ),
    **{
        f"example {name}": Script(f"{_EXAMPLES}/replay-buffers/{name}.py")
        for name in ("recurrent_slice_sampler_pipeline", "checkpoint")
    },
    **{
        f"single_machine {name}{', sync' * bool(sync)}": Script(
            f"{_EXAMPLES}/distributed/collectors/single_machine/{name}.py",
            (*_DISTRIBUTED, *more, *sync),
            _GYMNASIUM,
        )
        for name, more in (("rpc", ()), ("generic", ("--backend=gloo", "--worker_parallelism=env")))
        for sync in ((), ("--sync",))
    },
}  # fmt: skip

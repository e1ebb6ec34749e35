"""The training scripts of TorchRL that ``scripts.py`` runs, with what makes their budgets small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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

SCRIPTS = {
    "ppo_mujoco": Script(
        "sota-implementations/ppo/ppo_mujoco.py", (*_ON_POLICY, "loss.ppo_epochs=2"),
    ),
    "ppo_atari": Script(
        "sota-implementations/ppo/ppo_atari.py",
        (*_ATARI, "env.num_envs=2", "loss.mini_batch_size=20", "loss.ppo_epochs=2"),
    ),
    "a2c_mujoco": Script("sota-implementations/a2c/a2c_mujoco.py", _ON_POLICY),
    "a2c_atari": Script(
        "sota-implementations/a2c/a2c_atari.py",
        (*_ATARI, "env.num_envs=2", "loss.mini_batch_size=20"),
    ),
    "impala_single_node": Script(
        "sota-implementations/impala/impala_single_node.py",
        (*_ATARI, "collector.num_workers=2", "loss.batch_size=2"),
    ),
    "rnd_mujoco": Script(
        "sota-implementations/rnd/rnd_mujoco.py", (*_ON_POLICY, "loss.ppo_epochs=2")
    ),
    "sac": Script(
        "sota-implementations/sac/sac.py", _PENDULUM,
    ),
    "td3": Script(
        "sota-implementations/td3/td3.py", _PENDULUM,
    ),
    "ddpg": Script("sota-implementations/ddpg/ddpg.py", _PENDULUM),
    "tqc": Script("sota-implementations/tqc/tqc.py", _PENDULUM),
    "crossq": Script("sota-implementations/crossq/crossq.py", _PENDULUM),
    "discrete_sac": Script(
        "sota-implementations/discrete_sac/discrete_sac.py",
        (*_OFF_POLICY, "env.library=gymnasium"),
    ),
    "dqn_cartpole": Script(
        "sota-implementations/dqn/dqn_cartpole.py",
        ("collector.total_frames=400", "collector.init_random_frames=100",
         "collector.frames_per_batch=50", "buffer.batch_size=10", "loss.num_updates=2",
         "buffer.buffer_size=200", "logger.backend="),
    ),
    "dqn_atari": Script(
        "sota-implementations/dqn/dqn_atari.py",
        (*_ATARI, "collector.init_random_frames=100", "buffer.batch_size=10", "loss.num_updates=2",
         "buffer.buffer_size=200"),
    ),
    "cql_online": Script(
        "sota-implementations/cql/cql_online.py",
        (*(a for a in _PENDULUM if "replay" not in a), "replay_buffer.size=120",
         "optim.optim_steps_per_batch=2"),
    ),
    "iql_online": Script(
        "sota-implementations/iql/iql_online.py",
        ("collector.total_frames=96", "optim.batch_size=10", "collector.frames_per_batch=16",
         "env.train_num_envs=2", "env.name=Pendulum-v1", "logger.backend="),
    ),
    "discrete_iql": Script(
        "sota-implementations/iql/discrete_iql.py",
        ("collector.total_frames=96", "optim.batch_size=10", "collector.frames_per_batch=16",
         "env.train_num_envs=2", "logger.backend="),
    ),
    "multiagent mappo_ippo": Script(
        "sota-implementations/multiagent/mappo_ippo.py", _VMAS,
    ),
    "multiagent maddpg_iddpg": Script("sota-implementations/multiagent/maddpg_iddpg.py", _VMAS),
    "multiagent iql": Script("sota-implementations/multiagent/iql.py", _VMAS),
    "multiagent qmix_vdn": Script("sota-implementations/multiagent/qmix_vdn.py", _VMAS),
    "multiagent sac": Script("sota-implementations/multiagent/sac.py", _VMAS),
    "ppo_trainer": Script(
        "sota-implementations/ppo_trainer/train.py", _ON_POLICY_TRAINER,
        edits=_CSV, collector="MultiAsyncCollector",
    ),
    "a2c_trainer": Script(
        "sota-implementations/a2c_trainer/train.py", _ON_POLICY_TRAINER,
        edits=_CSV, collector="MultiAsyncCollector",
    ),
    "reinforce_trainer": Script(
        "sota-implementations/reinforce_trainer/train.py", _ON_POLICY_TRAINER,
        edits=_CSV, collector="MultiAsyncCollector",
    ),
    "sac_trainer": Script(
        "sota-implementations/sac_trainer/train.py",
        (*_OFF_POLICY_TRAINER, "training_env.num_workers=2", "collector.num_workers=2",
         "collector.init_random_frames=100"),
        edits=_CSV, collector="MultiAsyncCollector",
    ),
    "sac_trainer, async": Script(
        "sota-implementations/sac_trainer/train.py",
        ("--config-name=config_async", *_OFF_POLICY_TRAINER,
         "training_env.num_workers=2", "collector.num_workers=2",
         "collector.init_random_frames=100"),
        edits=_CSV, collector="MultiAsyncCollector",
    ),
    "td3_trainer": Script(
        "sota-implementations/td3_trainer/train.py", _OFF_POLICY_TRAINER,
        edits=_CSV, collector="Collector",
    ),
    "ddpg_trainer": Script(
        "sota-implementations/ddpg_trainer/train.py", _OFF_POLICY_TRAINER, edits=_CSV,
        collector="Collector",
    ),
    "dqn_trainer": Script(
        "sota-implementations/dqn_trainer/train.py",
        (*_OFF_POLICY_TRAINER, "collector.init_random_frames=100"), edits=_CSV,
        collector="Collector",
    ),
    "cql_trainer": Script(
        "sota-implementations/cql_trainer/train.py", _OFF_POLICY_TRAINER,
        edits=_CSV, collector="Collector",
    ),
    "iql_trainer": Script(
        "sota-implementations/iql_trainer/train.py", _OFF_POLICY_TRAINER,
        edits=_CSV, collector="Collector",
    ),
    **{
        f"multiagent_trainer, {name}": Script(
            "sota-implementations/multiagent_trainer/train.py",
            (f"--config-name={name}", *_MULTIAGENT_TRAINER), edits=_CSV, collector="Collector",
        )
        for name in ("mappo", "ippo", "maddpg", "iddpg", "masac", "isac", "qmix", "vdn", "iql")
    },
    "gail": Script(
        "sota-implementations/gail/gail.py",
        ("ppo.collector.total_frames=400", "ppo.collector.frames_per_batch=80",
         "ppo.loss.mini_batch_size=20", "ppo.loss.ppo_epochs=2", "env.env_name=HalfCheetah-v5",
         "replay_buffer.batch_size=40", "logger.backend=", "logger.test_interval=100000"),
        edits=(("make_offline_replay_buffer\\(cfg.replay_buffer\\)", _EXPERT_FRAMES
                + "(make_env(cfg.env.env_name, device), cfg.replay_buffer.batch_size)"),),
    ),
    "dreamer_v3": Script(
        "sota-implementations/dreamer_v3/dreamer_v3.py",
        ("collector.total_frames=400", "collector.frames_per_batch=100", "env.max_episode_steps=50",
         "replay_buffer.batch_size=4", "replay_buffer.seq_len=8",
         "optimization.updates_per_batch=2", "logger.eval_every=200", "logger.eval_episodes=1"),
    ),
    "tutorial coding_ppo": Script(
        "tutorials/sphinx-tutorials/coding_ppo.py",
        edits=(*_SMALL, (r"InvertedDoublePendulum-v\d", "InvertedDoublePendulum-v5")),
    ),
    "tutorial coding_ddpg": Script("tutorials/sphinx-tutorials/coding_ddpg.py", edits=_SMALL),
    "tutorial coding_dqn": Script("tutorials/sphinx-tutorials/coding_dqn.py", edits=_SMALL),
    "tutorial dqn_with_rnn": Script("tutorials/sphinx-tutorials/dqn_with_rnn.py", edits=_SMALL),
    "tutorial recurrent_sequence_training": Script(
        "tutorials/sphinx-tutorials/recurrent_sequence_training.py"
    ),
    "tutorial multiagent_competitive_ddpg": Script(
        "tutorials/sphinx-tutorials/multiagent_competitive_ddpg.py",
        edits=(*_FEW_ITERATIONS, *_NO_VIDEO),
    ),
    "tutorial multiagent_ppo": Script(
        "tutorials/sphinx-tutorials/multiagent_ppo.py", edits=_FEW_ITERATIONS,
    ),
    "tutorial getting-started-3": Script("tutorials/sphinx-tutorials/getting-started-3.py"),
    "tutorial getting-started-5": Script(
        "tutorials/sphinx-tutorials/getting-started-5.py",
        edits=(*_SMALL, *_NO_VIDEO,
               (r"(stop_after|init_rand_steps|optim_steps)( *)= *[\d_]+", r"\1 = 5")),
    ),
    "tutorial collector_trajectory_assembly": Script(
        "tutorials/sphinx-tutorials/collector_trajectory_assembly.py"
    ),
    "tutorial memory_efficient_rl": Script(
        "tutorials/sphinx-tutorials/memory_efficient_rl.py", edits=_SMALL
    ),
    "example collector_device": Script(
        "examples/collectors/collector_device.py",
        edits=((r"\bcuda(:0)?\"", 'cpu"'), ("_STEPS = 5_120", "_STEPS = 256"),
               ("max_length > 200", "max_length > 20")),
    ),
    "example mp_collector_mps": Script(
        "examples/collectors/mp_collector_mps.py", edits=((r"\"mps\"", '"cpu"'),)
    ),
    "example recurrent_slice_sampler_pipeline": Script(
        "examples/replay-buffers/recurrent_slice_sampler_pipeline.py"
    ),
    "example checkpoint": Script("examples/replay-buffers/checkpoint.py"),
    "single_machine rpc": Script(
        "examples/distributed/collectors/single_machine/rpc.py", _DISTRIBUTED, _GYMNASIUM
    ),
    "single_machine rpc, sync": Script(
        "examples/distributed/collectors/single_machine/rpc.py", (*_DISTRIBUTED, "--sync"),
        _GYMNASIUM,
    ),
    "single_machine generic": Script(
        "examples/distributed/collectors/single_machine/generic.py",
        (*_DISTRIBUTED, "--backend=gloo", "--worker_parallelism=env"), _GYMNASIUM,
    ),
    "single_machine generic, sync": Script(
        "examples/distributed/collectors/single_machine/generic.py",
        (*_DISTRIBUTED, "--backend=gloo", "--sync", "--worker_parallelism=env"), _GYMNASIUM,
    ),
}  # fmt: skip

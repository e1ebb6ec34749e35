"""Which rank a process has in a launch, and how it reaches the others."""

from __future__ import annotations

import os

import pytest

import distcollect as dc
from distcollect.launch.open_hosts import WantedHosts, open_hosts
from distcollect.launch.run import _trainer_variables
from distcollect.launch.topology import Launch, Launcher, first_host, last_host, one_of_several

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "run",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "node[03-05]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}
SUBMITIT = {
    "SUBMITIT_LOCAL_GLOBALID": "2",
    "SUBMITIT_LOCAL_LOCALID": "2",
    "SUBMITIT_LOCAL_NTASKS": "3",
    "SUBMITIT_LOCAL_JOB_ID": "4711",
}
RAY = {"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"metadata": {"job_submission_id": "raysubmit_1"}}'}
CLUSTERS = [{}, SLURM, {"PMI_RANK": "0", "PMI_SIZE": "3"}, {"OMPI_COMM_WORLD_SIZE": "3"}]
FROM_TORCHRUN = Launch(Launcher.TORCHRUN, 3, 4, 2, 2, "run", ("node1", 1234), local_rank=1)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "high", "WORLD_SIZE": "2"},  # the user's own variables, no launcher
        {**SLURM, "SLURM_STEP_ID": "4294967290"},  # in the shell of salloc
        {**SLURM, "SLURM_STEP_ID": "4294967291"},  # in a batch script
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},  # "srun -n 1" within "salloc -n 6"
        {**SUBMITIT, "SUBMITIT_LOCAL_NTASKS": "1"},
        {"SUBMITIT_LOCAL_NTASKS": "3", "SUBMITIT_LOCAL_JOB_ID": "5"},  # what starts the tasks
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"metadata": {}}'},  # of other programs than Ray's jobs
        {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"},  # in a batch script, outside srun
    ],
)
def test_no_launch(env: dict[str, str]) -> None:
    assert Launch.detect(env) == Launch()
    assert Launch.detect(env).num_workers == 0
    assert one_of_several(env) == ""


@pytest.mark.parametrize(
    "env",
    [
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # of a batch script
        *({**started_by, **RAY} for started_by in CLUSTERS),
    ],
)
def test_one_process_may_start_workers(env: dict[str, str]) -> None:
    assert one_of_several(env) == ""


@pytest.mark.parametrize("around", [{}, SLURM, RAY], ids=["alone", "srun", "Ray"])
def test_torchrun(around: dict[str, str]) -> None:
    assert Launch.detect({**around, **TORCHRUN}) == FROM_TORCHRUN
    assert FROM_TORCHRUN.num_workers == 3


@pytest.mark.parametrize("started_by", CLUSTERS)
def test_a_job_of_ray(started_by: dict[str, str]) -> None:
    """Whatever started the cluster hands its variables down to the jobs."""
    launch = Launch.detect({**started_by, **RAY})
    assert launch == Launch(Launcher.RAY_JOB, run_id="raysubmit_1")


def test_a_launcher_within_a_job_of_ray() -> None:
    assert Launch.detect({**RAY, **SUBMITIT}).launcher is Launcher.SUBMITIT_LOCAL
    with pytest.raises(dc.LaunchError, match="RANK=1, WORLD_SIZE=2"):
        Launch.detect({**RAY, "RANK": "1", "WORLD_SIZE": "2"})


def test_slurm() -> None:
    launch = Launch.detect(SLURM)
    assert launch.launcher is Launcher.SLURM
    assert (launch.rank, launch.world_size, launch.num_workers) == (5, 6, 5)
    assert (launch.num_hosts, launch.local_world_size) == (3, 2)
    assert launch.master is not None
    assert launch.master[0] == "node03"
    others = {"SLURM_PROCID": "0"}, {"SLURM_JOB_ID": "78"}, {"SLURM_STEP_ID": "3"}
    same_step, other_job, other_step = (Launch.detect({**SLURM, **other}) for other in others)
    assert (same_step.master, same_step.run_id) == (launch.master, launch.run_id)
    for other in (other_job, other_step):
        assert other.master != launch.master
        assert other.run_id != launch.run_id


def test_submitits_local_executor() -> None:
    launch = Launch.detect(SUBMITIT)
    assert launch.launcher is Launcher.SUBMITIT_LOCAL
    assert (launch.rank, launch.local_rank, launch.world_size, launch.num_hosts) == (2, 2, 3, 1)
    first = Launch.detect({**SUBMITIT, "SUBMITIT_LOCAL_GLOBALID": "0"})
    assert (first.master, first.run_id) == (launch.master, launch.run_id)
    other = Launch.detect({**SUBMITIT, "SUBMITIT_LOCAL_JOB_ID": "4712"})
    assert other.run_id != launch.run_id
    assert other.master != launch.master


@pytest.mark.parametrize(
    ("env", "rank", "size"), [(SLURM, "5", "6"), (SUBMITIT, "2", "3")], ids=["srun", "local"]
)
def test_torch_variables_that_submitit_exports(env: dict[str, str], rank: str, size: str) -> None:
    exported = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "node1", "MASTER_PORT": "20001"}
    launch = Launch.detect({**env, **exported})
    assert launch.launcher is Launch.detect(env).launcher
    assert (launch.rank, launch.world_size) == (int(rank), int(size))
    assert launch.master is not None
    assert launch.master[1] == 20001


OTHERS = [
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
]


@pytest.mark.parametrize(("rank", "size"), OTHERS)
def test_other_launchers_are_refused(rank: str, size: str) -> None:
    with pytest.raises(dc.LaunchError, match=rf"rank 1 of 4 .*{size}=4.* by torchrun, srun,"):
        Launch.detect({rank: "1", size: "4"})
    # Programs of MPI see their own variables under srun too.
    assert Launch.detect({**SLURM, rank: "5", size: "6"}) == Launch.detect(SLURM)
    # An MPI launcher within a SLURM job: SLURM's variables are those of its daemon.
    if rank != "RANK":
        with pytest.raises(dc.LaunchError, match="rank 7 of 8"):
            Launch.detect({**SLURM, rank: "7", size: "8"})


LAUNCHED = [
    (TORCHRUN, "torchrun started this process as rank 3 of 4"),
    (SLURM, "srun started this process as rank 5 of 6"),
    (SUBMITIT, "submitit's local executor started this process as rank 2 of 3"),
    ({"RANK": "1", "WORLD_SIZE": "2"}, "rank 1 of 2"),
]


@pytest.mark.parametrize(("env", "by"), LAUNCHED, ids=["torchrun", "srun", "submitit", "other"])
@pytest.mark.parametrize("kind", [dc.RPCDataCollector, dc.MultiSyncDataCollector])
def test_workers_outside_of_run_are_refused(
    monkeypatch: pytest.MonkeyPatch, kind: type, env: dict[str, str], by: str
) -> None:
    for variable in env.items():
        monkeypatch.setenv(*variable)
    with pytest.raises(dc.LaunchError, match=rf"{by}.*distcollect.run\(main\).*EACH_RANK_TRAINS=1"):
        kind("CartPole-v1", frames_per_batch=8)
    # Envs in this process are no workers.
    with dc.SyncDataCollector("CartPole-v1", frames_per_batch=8) as collector:
        assert collector.next().numel() == 8
    monkeypatch.setenv("DISTCOLLECT_EACH_RANK_TRAINS", "1")
    open_hosts(1, WantedHosts()).close()


@pytest.mark.parametrize("job", ["1", "999999", "4294901759"])
def test_slurm_ports_are_unprivileged_and_not_ephemeral(job: str) -> None:
    master = Launch.detect({**SLURM, "SLURM_JOB_ID": job}).master
    assert master is not None
    assert 1024 < master[1] < 32768


@pytest.mark.parametrize(
    ("tasks_per_node", "expected"), [("2(x3)", 2), ("1,3", 3), ("4", 4), ("1(x2),2", 2), ("", 2)]
)
def test_slurm_tasks_on_a_host(tasks_per_node: str, expected: int) -> None:
    launch = Launch.detect({**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks_per_node})
    assert launch.local_world_size == expected


@pytest.mark.parametrize(
    ("nodelist", "first", "last"),
    [
        ("node1", "node1", "node1"),
        ("node1,node2", "node1", "node2"),
        ("node[03-05,9],gpu1", "node03", "gpu1"),
        ("gpu1,node[03-05]", "gpu1", "node05"),
        ("node[7,9]", "node7", "node9"),
        ("rack[1-2]n[3-4]", "rack1n3", "rack2n4"),
        ("rack[1-2]-n5", "rack1-n5", "rack2-n5"),
        ("node[08-10].cluster", "node08.cluster", "node10.cluster"),
    ],
)
def test_hosts_of_a_list_of_slurm(nodelist: str, first: str, last: str) -> None:
    assert (first_host(nodelist), last_host(nodelist)) == (first, last)


def test_what_the_scheduler_says_of_a_rank() -> None:
    assert Launch.detect({**SLURM, "SLURM_LOCALID": "1"}).local_rank == 1
    assert Launch.detect(SLURM).last_host == "node05"
    assert Launch.detect({**SLURM, "SLURM_STEP_NUM_NODES": "1"}).last_host == ""
    assert Launch.detect(SLURM).cores_per_rank is None
    assert Launch.detect({**SLURM, "SLURM_CPUS_PER_TASK": "4"}).cores_per_rank == 4


def test_parts_of_several_trainers() -> None:
    whole = [Launch(Launcher.TORCHRUN, rank, 7, 1, 7, "run", ("node1", 1)) for rank in range(7)]
    parts = [launch.part(2) for launch in whole]
    assert [(part.trainer, part.rank) for part in parts] == [
        *((0, 0), (1, 0)),
        *((0, 1), (1, 1), (0, 2), (1, 2), (0, 3)),
    ]
    assert [part.world_size for part in parts] == [4, 3, 4, 3, 4, 3, 4]
    assert [launch.part(1) for launch in whole] == whole


def test_too_few_for_several_trainers() -> None:
    launch = Launch(Launcher.TORCHRUN, 0, 5, 1, 5, "run", ("node1", 1))
    with pytest.raises(dc.LaunchError, match=r"5 process.*3 trainer.* need 6 .*per-node=6"):
        launch.part(3)
    with pytest.raises(dc.LaunchError, match="the first host has 2 task"):
        Launch(Launcher.SLURM, 0, 9, 4, 2, "run", ("node1", 1)).part(3)
    with pytest.raises(ValueError, match="num_trainers=2 needs a launcher"):
        dc.run(lambda: None, num_trainers=2)


def test_main_may_remove_what_a_group_of_trainers_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    launch = Launch(Launcher.TORCHRUN, 1, 4, 1, 4, "run", ("node1", 1)).part(2)
    with _trainer_variables(launch):
        del os.environ["RANK"]
    assert os.environ["RANK"] == "1"

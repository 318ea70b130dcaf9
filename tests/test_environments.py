"""Variables recorded from launchers give a process its world, and incomplete variables an error."""

import sys
from pathlib import Path

import pytest

from fabric import Fabric
from fabric.environments import (
    Environment,
    MPICHEnvironment,
    OpenMPIEnvironment,
    RayEnvironment,
    SlurmEnvironment,
    TorchrunEnvironment,
    detect,
    find_machines,
)
from fabric.errors import ConfigurationError, MissingDependencyError
from fabric.world import World

Variables = dict[str, str]


def main_address(nodes: int) -> str:
    if nodes > 1:
        return "gpu-a"
    return "127.0.0.1"


def torchrun(rank: int, nodes: int = 1, per_node: int = 2) -> Variables:
    """Return the variables that torchrun --nnodes <nodes> --nproc-per-node <per_node> sets."""
    return {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank % per_node}",
        "GROUP_RANK": f"{rank // per_node}",
        "ROLE_RANK": f"{rank}",
        "ROLE_NAME": "default",
        "WORLD_SIZE": f"{nodes * per_node}",
        "LOCAL_WORLD_SIZE": f"{per_node}",
        "GROUP_WORLD_SIZE": f"{nodes}",
        "ROLE_WORLD_SIZE": f"{nodes * per_node}",
        "MASTER_ADDR": main_address(nodes),
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def ray(rank: int, nodes: int = 1, per_node: int = 2) -> Variables:
    """Return the variables that the TorchTrainer of Ray 2.60 sets."""
    return {
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "LOCAL_RANK": f"{rank % per_node}",
        "LOCAL_WORLD_SIZE": f"{per_node}",
        "MASTER_ADDR": main_address(nodes),
        "MASTER_PORT": "29500",
        "NODE_RANK": f"{rank // per_node}",
        "RANK": f"{rank}",
        "RAY_JOB_ID": "01000000",
        "RAY_RAYLET_PID": "20508",
        "WORLD_SIZE": f"{nodes * per_node}",
    }


def sbatch(nodes: int = 1, per_node: int = 2) -> Variables:
    """Return the variables in the body of a batch script, which runs once, on the first node."""
    cpus = "4"
    node_list = "gnode10"
    tasks = f"{per_node}"
    if nodes > 1:
        cpus = f"4(x{nodes})"
        node_list = "gnode[10,20]"
        tasks = f"{per_node}(x{nodes})"
    return {
        "SLURM_CLUSTER_NAME": "ada",
        "SLURM_CPUS_ON_NODE": "4",
        "SLURM_GTIDS": "0",
        "SLURM_JOB_CPUS_PER_NODE": cpus,
        "SLURM_JOB_ID": "200505",
        "SLURM_JOBID": "200505",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": node_list,
        "SLURM_NODELIST": node_list,
        "SLURM_JOB_NUM_NODES": f"{nodes}",
        "SLURM_NNODES": f"{nodes}",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": f"{nodes * per_node}",
        "SLURM_NPROCS": f"{nodes * per_node}",
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_SUBMIT_HOST": "ada.example.org",
        "SLURM_TASK_PID": "16360",
        "SLURMD_NODENAME": "gnode10",
    }


def srun(rank: int, nodes: int = 1, per_node: int = 2, step: int = 0) -> Variables:
    """Return the variables that srun sets for a task of a step that takes all of the batch job."""
    batch = sbatch(nodes, per_node)
    first_task = rank // per_node * per_node
    tasks_of_node = map(str, range(first_task, first_task + per_node))
    return batch | {
        "SLURM_GTIDS": ",".join(tasks_of_node),
        "SLURM_LAUNCH_NODE_IPADDR": "172.18.140.10",
        "SLURM_LOCALID": f"{rank % per_node}",
        "SLURM_NODEID": f"{rank // per_node}",
        "SLURM_PROCID": f"{rank}",
        "SLURM_SRUN_COMM_HOST": "172.18.140.10",
        "SLURM_SRUN_COMM_PORT": "41771",
        "SLURM_STEP_ID": f"{step}",
        "SLURM_STEPID": f"{step}",
        "SLURM_STEP_LAUNCHER_PORT": "41771",
        "SLURM_STEP_NODELIST": batch["SLURM_JOB_NODELIST"],
        "SLURM_STEP_NUM_NODES": f"{nodes}",
        "SLURM_STEP_NUM_TASKS": f"{nodes * per_node}",
        "SLURM_STEP_TASKS_PER_NODE": batch["SLURM_TASKS_PER_NODE"],
    }


def mpirun_5(rank: int, nodes: int = 1, per_node: int = 2) -> Variables:
    """Return the variables that mpirun of Open MPI 5 sets."""
    return {
        "OMPI_COMMAND": "python",
        "OMPI_COMM_WORLD_LOCAL_RANK": f"{rank % per_node}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": f"{per_node}",
        "OMPI_COMM_WORLD_NODE_RANK": f"{rank % per_node}",
        "OMPI_COMM_WORLD_RANK": f"{rank}",
        "OMPI_COMM_WORLD_SIZE": f"{nodes * per_node}",
        "OMPI_UNIVERSE_SIZE": f"{nodes * per_node}",
        "OMPI_VERSION": "5.0.11",
        "PMIX_HOSTNAME": f"gnode{rank // per_node}",
        "PMIX_NAMESPACE": "prterun-gnode0-6951@1",
        "PMIX_RANK": f"{rank}",
        "PMIX_SERVER_URI4": "prterun-gnode0-6951@0.0;tcp4://127.0.0.1:50691",
        "PRTE_LAUNCHED": "1",
    }


def mpirun_1(rank: int, nodes: int = 1, per_node: int = 2) -> Variables:
    """Return the variables that mpirun of Open MPI 1.4 sets."""
    return {
        "OMPI_COMM_WORLD_LOCAL_RANK": f"{rank % per_node}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": f"{per_node}",
        "OMPI_COMM_WORLD_RANK": f"{rank}",
        "OMPI_COMM_WORLD_SIZE": f"{nodes * per_node}",
        "OMPI_MCA_ess": "env",
        "OMPI_MCA_orte_ess_jobid": "3236233217",
        "OMPI_MCA_orte_ess_vpid": f"{rank}",
        "OMPI_MCA_orte_hnp_uri": "3236233216.0;tcp://172.20.102.82:33559",
        "OMPI_UNIVERSE_SIZE": f"{nodes * per_node}",
    }


def mpiexec_hydra(rank: int, nodes: int = 1, per_node: int = 2) -> Variables:
    """Return the variables that mpiexec of MPICH 4 sets."""
    return {
        "GFORTRAN_UNBUFFERED_PRECONNECTED": "y",
        "HYDI_CONTROL_FD": "7",
        "MPI_LOCALNRANKS": f"{per_node}",
        "MPI_LOCALRANKID": f"{rank % per_node}",
        "PMI_FD": f"{9 + 2 * (rank % per_node)}",
        "PMI_HOSTNAME": f"gnode{rank // per_node}",
        "PMI_RANK": f"{rank}",
        "PMI_SIZE": f"{nodes * per_node}",
    }


def mpiexec_intel(rank: int, nodes: int = 1, per_node: int = 2) -> Variables:
    """Return the variables that mpiexec of Intel MPI 2021 sets."""
    return {
        "GFORTRAN_UNBUFFERED_PRECONNECTED": "y",
        "HYDRA_BSTRAP_LAUNCHER": "ssh",
        "HYDRA_BSTRAP_NODE_ID": f"{rank // per_node}",
        "I_MPI_HYDRA_UUID": "2d1c0000-2517-52a8-bf60-06009eea4650",
        "I_MPI_PIN_INFO": f"{rank % per_node}",
        "MPI_LOCALNRANKS": f"{per_node}",
        "MPI_LOCALRANKID": f"{rank % per_node}",
        "PMI_FD": "9",
        "PMI_RANK": f"{rank}",
        "PMI_SIZE": f"{nodes * per_node}",
    }


def mpiexec_pals(rank: int, nodes: int = 1, per_node: int = 2) -> Variables:
    """Return the variables that mpiexec of a Cray system sets."""
    return {
        "PALS_APID": "9f7c2b5e-3f0a-4c67-9a51-6a2d9d1f0b11",
        "PALS_LOCAL_RANKID": f"{rank % per_node}",
        "PALS_RANKID": f"{rank}",
        "PMI_LOCAL_RANK": f"{rank % per_node}",
        "PMI_LOCAL_SIZE": f"{per_node}",
        "PMI_RANK": f"{rank}",
        "PMI_SIZE": f"{nodes * per_node}",
    }


LAUNCHERS = [
    (torchrun, TorchrunEnvironment),
    (ray, RayEnvironment),
    (srun, SlurmEnvironment),
    (mpirun_5, OpenMPIEnvironment),
    (mpirun_1, OpenMPIEnvironment),
    (mpiexec_hydra, MPICHEnvironment),
    (mpiexec_intel, MPICHEnvironment),
    (mpiexec_pals, MPICHEnvironment),
]
NAMES = [launcher.__name__ for launcher, _ in LAUNCHERS]
PORT = {"MASTER_PORT": "29511"}
ADDRESS = {"MASTER_ADDR": "10.0.0.7"}


def without(env: Variables, *names: str) -> Variables:
    assert set(names) <= set(env)
    return {name: value for name, value in env.items() if name not in names}


def detected(env: Variables) -> tuple[type, World]:
    """Return the type of the environment that is detected, and its world."""
    detection = detect(env)
    assert detection is not None
    environment, world = detection
    return type(environment), world


def detected_world(env: Variables) -> World:
    _, world = detected(env)
    return world


@pytest.mark.parametrize(("launcher", "environment"), LAUNCHERS, ids=NAMES)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_node_meets_on_loopback(launcher, environment, rank) -> None:
    kind, world = detected(launcher(rank, per_node=3) | PORT)
    assert kind is environment
    assert world == World(rank=rank, local_rank=rank, world_size=3, local_world_size=3, port=29511)


@pytest.mark.parametrize(("launcher", "environment"), LAUNCHERS, ids=NAMES)
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_two_nodes_meet_at_the_main_address(launcher, environment, rank) -> None:
    kind, world = detected(launcher(rank, nodes=2) | PORT | ADDRESS)
    assert kind is environment
    assert world == World(
        rank=rank,
        local_rank=rank % 2,
        node_rank=rank // 2,
        world_size=4,
        local_world_size=2,
        address="10.0.0.7",
        port=29511,
    )


@pytest.mark.parametrize(("launcher", "environment"), LAUNCHERS, ids=NAMES)
def test_a_single_process_needs_no_address_and_no_port(launcher, environment) -> None:
    env = launcher(0, per_node=1)
    env.pop("MASTER_ADDR", None)
    env.pop("MASTER_PORT", None)
    kind, world = detected(env)
    assert kind is environment
    assert world == World()


@pytest.mark.parametrize("launcher", [srun, mpirun_5, mpirun_1, mpiexec_intel, mpiexec_pals])
def test_all_ranks_of_a_job_derive_one_port(launcher) -> None:
    ports = {detected_world(launcher(rank, nodes=2) | ADDRESS).port for rank in range(4)}
    assert len(ports) == 1
    assert ports <= set(range(10_000, 30_000))


@pytest.mark.parametrize(
    ("launcher", "identity"),
    [
        (srun, {"SLURM_JOB_ID": "200506"}),
        (srun, {"SLURM_STEP_ID": "1"}),
        (mpirun_5, {"PMIX_NAMESPACE": "prterun-gnode0-6952@1"}),
        (mpirun_1, {"OMPI_MCA_orte_ess_jobid": "3236298753"}),
        (mpiexec_intel, {"I_MPI_HYDRA_UUID": "3e1c0000-b0ef-55a8-bf60-0600137cb05c"}),
        (mpiexec_pals, {"PALS_APID": "9f7c2b5e-3f0a-4c67-9a51-6a2d9d1f0b12"}),
    ],
)
def test_another_job_derives_another_port(launcher, identity) -> None:
    port = detected_world(launcher(0)).port
    port_of_another_job = detected_world(launcher(0) | identity).port
    assert port != port_of_another_job


def test_the_ports_of_consecutive_jobs_hardly_ever_collide() -> None:
    ports = set()
    for job in range(200_000, 200_100):
        env = srun(0) | {"SLURM_JOB_ID": f"{job}"}
        ports.add(detected_world(env).port)
    assert len(ports) >= 98


@pytest.mark.parametrize(
    "launcher", [mpirun_5, mpirun_1, mpiexec_hydra, mpiexec_intel, mpiexec_pals]
)
def test_several_nodes_without_the_host_of_rank_0_ask_for_it(launcher) -> None:
    with pytest.raises(ConfigurationError, match="MASTER_ADDR") as caught:
        detect(launcher(3, nodes=2) | PORT)
    assert "MASTER_ADDR=<host of rank 0>" in caught.value.suggestion


def test_a_launcher_that_names_no_job_asks_for_a_port() -> None:
    with pytest.raises(ConfigurationError, match="MASTER_PORT") as caught:
        detect(mpiexec_hydra(1))
    assert "export MASTER_PORT=<port>" in caught.value.suggestion


@pytest.mark.parametrize("port", ["0", "-1", "65536", "http"])
@pytest.mark.parametrize(("launcher", "environment"), LAUNCHERS, ids=NAMES)
def test_a_port_that_cannot_be_is_refused(launcher, environment, port) -> None:
    with pytest.raises(ConfigurationError, match=f"MASTER_PORT='?{port}"):
        environment().detect(launcher(0) | {"MASTER_PORT": port})


HALF_SET = [
    (srun, "SLURM_LOCALID"),
    (srun, "SLURM_NODEID"),
    (mpirun_5, "OMPI_COMM_WORLD_SIZE"),
    (mpirun_5, "OMPI_COMM_WORLD_LOCAL_RANK"),
    (mpirun_5, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    (mpiexec_hydra, "PMI_SIZE"),
    (mpiexec_hydra, "MPI_LOCALRANKID"),
    (mpiexec_hydra, "MPI_LOCALNRANKS"),
    (torchrun, "WORLD_SIZE"),
    (torchrun, "MASTER_PORT"),
    (ray, "WORLD_SIZE"),
]


@pytest.mark.parametrize(("launcher", "missing"), HALF_SET, ids=[name for _, name in HALF_SET])
def test_a_half_set_job_is_an_error_that_names_what_is_missing(launcher, missing) -> None:
    with pytest.raises(ConfigurationError, match=missing) as caught:
        detect(without(launcher(1), missing))
    error = caught.value
    assert error.request
    assert error.problem
    assert error.expected
    assert error.suggestion


@pytest.mark.parametrize(
    ("launcher", "environment", "rank"),
    [
        (torchrun, TorchrunEnvironment, "RANK"),
        (srun, SlurmEnvironment, "SLURM_PROCID"),
        (mpirun_5, OpenMPIEnvironment, "OMPI_COMM_WORLD_RANK"),
        (mpiexec_hydra, MPICHEnvironment, "PMI_RANK"),
    ],
)
def test_without_a_rank_it_is_not_this_environment(launcher, environment, rank) -> None:
    assert environment().detect(without(launcher(1), rank)) is None


@pytest.mark.parametrize(("launcher", "environment"), LAUNCHERS, ids=NAMES)
def test_a_variable_that_is_no_integer_is_named(launcher, environment) -> None:
    env = launcher(1) | PORT
    sizes = [name for name in env if name.endswith(("WORLD_SIZE", "NUM_TASKS", "PMI_SIZE"))]
    name = sizes[0]
    with pytest.raises(ConfigurationError, match=f"{name}='many'"):
        environment().detect(env | {name: "many"})


@pytest.mark.parametrize(
    "env", [{}, {"PATH": "/bin"}, {"RANK": "1"}, {"WORLD_SIZE": "2"} | PORT | ADDRESS], ids=str
)
def test_without_a_launcher_there_is_no_world(env) -> None:
    assert detect(env) is None


def test_only_the_mapping_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for launcher, _ in LAUNCHERS:
        for name, value in (launcher(1) | PORT).items():
            monkeypatch.setenv(name, value)
    assert detect({}) is None


# -- torchrun -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("launcher", "_environment"), LAUNCHERS, ids=NAMES)
def test_torchrun_wins_over_the_launcher_around_it(launcher, _environment) -> None:
    kind, world = detected(launcher(0) | torchrun(3, nodes=2))
    assert kind is TorchrunEnvironment
    assert world.rank == 3
    assert world.address == "gpu-a"
    assert world.port == 29500


def test_what_fabric_starts_meets_in_its_store() -> None:
    expected = World(
        rank=1,
        local_rank=1,
        world_size=2,
        local_world_size=2,
        store="file:///tmp/meet",
    )
    kind, world = detected(srun(0) | expected.to_env())
    assert kind is TorchrunEnvironment
    assert world == expected


def test_several_nodes_by_hand_without_an_address_ask_for_it() -> None:
    with pytest.raises(ConfigurationError, match="MASTER_ADDR"):
        detect(without(torchrun(3, nodes=2), "MASTER_ADDR"))


def test_a_size_that_a_batch_script_exports_does_not_hide_srun() -> None:
    env = srun(1, nodes=2) | {"WORLD_SIZE": "4"}
    kind, world = detected(env | PORT | ADDRESS)
    assert kind is SlurmEnvironment
    assert world.rank == 1
    assert world.world_size == 4


# -- SLURM ----------------------------------------------------------------------------------------


def test_rank_0_of_a_step_is_on_its_first_host() -> None:
    for rank in range(4):
        assert detected_world(srun(rank, nodes=2)).address == "gnode10"


def test_a_step_on_some_nodes_of_the_job_meets_on_its_first_host() -> None:
    env = srun(1, nodes=2) | {"SLURM_JOB_NODELIST": "gnode[01-08]"}
    assert detected_world(env).address == "gnode10"


def test_nodes_may_hold_different_numbers_of_tasks() -> None:
    env = srun(0, nodes=2) | {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "3,2"}
    third_task = {"SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"}
    last_task = {"SLURM_PROCID": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    first_node = detected_world(env | third_task)
    second_node = detected_world(env | last_task)
    assert first_node.local_world_size == 3
    assert second_node.local_world_size == 2
    assert first_node.address == "gnode10"
    assert second_node.address == "gnode10"
    assert first_node.port == second_node.port


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_body_of_a_batch_script_is_not_a_task(nodes) -> None:
    assert detect(sbatch(nodes)) is None


@pytest.mark.parametrize("step", [2**32 - 5, 2**32 - 6], ids=["batch", "interactive"])
def test_a_reserved_step_is_not_a_task(step) -> None:
    assert detect(srun(0, step=step)) is None


def test_a_shell_behind_srun_pty_is_not_a_task() -> None:
    shell = srun(0, per_node=1) | {
        "SLURM_JOB_NAME": "bash",
        "SLURM_PTY_PORT": "34889",
        "SLURM_PTY_WIN_COL": "236",
    }
    assert detect(shell) is None


def test_an_srun_inside_a_shell_behind_srun_pty_is_a_task() -> None:
    env = srun(1, step=1) | {"SLURM_PTY_PORT": "34889"}
    assert detected_world(env).rank == 1


def test_an_old_slurm_that_sets_no_sizes_of_the_step_is_understood() -> None:
    env = without(
        srun(1),
        "SLURM_STEP_ID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NUM_NODES",
        "SLURM_STEP_TASKS_PER_NODE",
    )
    assert detected_world(env) == detected_world(srun(1))


def test_a_step_that_does_not_tell_its_tasks_per_node_is_refused() -> None:
    env = without(srun(1), "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    with pytest.raises(ConfigurationError, match="SLURM_STEP_TASKS_PER_NODE"):
        detect(env)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("n1,n2", "n1"),
        (" n1 ", "n1"),
        ("node[01-03,7]", "node01"),
        ("node[7,01-03]", "node7"),
        ("node[5]", "node5"),
        ("a-[1-2]b", "a-1b"),
        ("a-[1-2]b,c[3-4]", "a-1b"),
        ("login,node[01-03]", "login"),
        ("rack[1-2]n[03-04]-ib", "rack1n03-ib"),
        ("sh04-16n05.cluster.example,x", "sh04-16n05.cluster.example"),
        ("10.0.0.[4-5]", "10.0.0.4"),
    ],
)
def test_a_node_list_begins_with_this_host(nodes, first) -> None:
    env = srun(1, nodes=2) | {"SLURM_STEP_NODELIST": nodes}
    assert detected_world(env).address == first


@pytest.mark.parametrize(
    "nodes", [",n1", "n[", "n[]", "n[a-b]", "n[1-2", "n1 n2", "(null)", "n[1]]"]
)
def test_a_node_list_without_a_first_host_is_refused(nodes) -> None:
    env = srun(1, nodes=2) | {"SLURM_STEP_NODELIST": nodes}
    with pytest.raises(ConfigurationError, match="MASTER_ADDR is not set"):
        detect(env)


def test_a_node_list_is_not_read_when_master_addr_is_set() -> None:
    env = srun(1, nodes=2) | {"SLURM_STEP_NODELIST": "n["}
    assert detected_world(env | ADDRESS).address == "10.0.0.7"


def task(node: int, tasks: str) -> Variables:
    """Return the variables of the last task of an eight-task step, as if it ran on this node."""
    sizes = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": tasks}
    return srun(7, nodes=2) | sizes | {"SLURM_LOCALID": "0", "SLURM_NODEID": f"{node}"}


@pytest.mark.parametrize(
    ("tasks", "counts"),
    [("4", [4]), ("2(x3)", [2, 2, 2]), ("2(x2),1", [2, 2, 1]), ("3,2, 1", [3, 2, 1])],
)
def test_tasks_per_node_are_written_in_runs(tasks, counts) -> None:
    for node, count in enumerate(counts):
        assert detected_world(task(node, tasks)).local_world_size == count
    with pytest.raises(ConfigurationError, match=f"node {len(counts)}"):
        detect(task(len(counts), tasks))


@pytest.mark.parametrize("tasks", ["two", "2(x)", "2(3)", "2,", "-1"])
def test_tasks_per_node_that_cannot_be_read_are_refused(tasks) -> None:
    with pytest.raises(ConfigurationError, match="SLURM_STEP_TASKS_PER_NODE"):
        detect(task(0, tasks))


# -- MPI ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", [mpirun_5, mpiexec_hydra, mpiexec_intel])
def test_mpi_wins_over_the_slurm_step_that_carries_its_daemons(launcher) -> None:
    daemon = srun(1, nodes=2, per_node=1)
    env = daemon | launcher(3, nodes=2)
    kind, world = detected(env | PORT | ADDRESS)
    assert kind is not SlurmEnvironment
    assert world.rank == 3
    assert world.local_rank == 1
    assert world.world_size == 4


def test_srun_that_sets_variables_of_pmi_is_still_srun() -> None:
    pmi2 = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "12", "PMI_JOBID": "200505.0"}
    kind, world = detected(srun(3, nodes=2) | pmi2)
    assert kind is SlurmEnvironment
    assert world.rank == 3
    assert world.address == "gnode10"


def test_the_rank_on_a_node_across_jobs_is_not_taken_for_the_number_of_the_node() -> None:
    assert detected_world(mpirun_5(1) | PORT).node_rank == 0


@pytest.mark.parametrize(
    ("rank", "local_rank", "node"),
    [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (4, 2, 0), (5, 2, 1)],
)
def test_the_node_of_ranks_that_go_round_two_nodes_follows_from_their_local_rank(
    rank, local_rank, node
) -> None:
    env = mpirun_5(rank, nodes=2, per_node=3) | {"OMPI_COMM_WORLD_LOCAL_RANK": f"{local_rank}"}
    assert detected_world(env | ADDRESS).node_rank == node


# -- detection ------------------------------------------------------------------------------------


def test_the_first_environment_of_the_list_that_detects_a_world_wins() -> None:
    env = srun(1) | mpirun_5(0) | PORT
    slurm = SlurmEnvironment()
    assert detect(env, [slurm, OpenMPIEnvironment()]) == (slurm, slurm.detect(env))


def test_no_environments_detect_no_world() -> None:
    assert detect(torchrun(0), []) is None


def test_an_environment_of_a_user_needs_a_name_and_one_method() -> None:
    class Cluster:
        name = "cluster"

        def detect(self, env) -> World | None:
            if "TASK" not in env:
                return None
            return World(rank=int(env["TASK"]), world_size=8, port=1)

    cluster: Environment = Cluster()
    world = World(rank=5, world_size=8, port=1)
    assert detect({"TASK": "5"}, [TorchrunEnvironment(), cluster]) == (cluster, world)


def test_names_are_distinct_and_lower_case() -> None:
    names = [environment().name for _, environment in LAUNCHERS]
    assert sorted(set(names)) == ["mpich", "openmpi", "ray", "slurm", "torchrun"]


def test_a_worker_of_ray_without_ray_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ray(0, per_node=1).items():
        monkeypatch.setenv(name, value)
    # An import of ray fails, as if ray were not installed.
    monkeypatch.setitem(sys.modules, "ray", None)
    with Fabric(accelerator="cpu") as fabric:
        checkpoints = fabric.checkpoints(tmp_path)
        with pytest.raises(MissingDependencyError, match=r'pip install "torch-fabric\[ray\]"'):
            checkpoints.save(1, {}, async_=False)


# -- platforms that start a command on each machine ----------------------------------------------

KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n",
}


def test_the_machines_of_a_platform_are_read() -> None:
    machines = find_machines(KUBEFLOW)
    assert machines == ("PET_NNODES=2", 2, 1, "job-node-0-0.job", 29400, 4)
    machines = find_machines(SKYPILOT)
    assert machines == ("SKYPILOT_NUM_NODES=2", 2, 1, "10.0.0.1", None, None)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
        {"PET_NNODES": "1:1"},
        {"SKYPILOT_NUM_NODES": "1"},
        {"PET_NNODES": " "},
    ],
)
def test_one_machine_needs_no_launcher(
    variables: Variables, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert Fabric(accelerator="cpu", devices=1).world_size == 1


@pytest.mark.parametrize(
    ("variables", "command"),
    [
        (KUBEFLOW, "fabric run train.py"),
        (SKYPILOT, "fabric run train.py"),
        ({"PET_NNODES": "1:4"}, "torchrun train.py"),
    ],
)
def test_a_machine_of_several_does_not_train_alone(
    variables: Variables, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigurationError, match="every machine would train alone") as raised:
        Fabric(accelerator="cpu", devices=2)
    assert f"{command} in place of python train.py" in str(raised.value)

    # The remedies of the error: a launcher sets torchrun's variables, or one machine is meant.
    for name, text in torchrun(rank=2, nodes=2).items():
        monkeypatch.setenv(name, text)
    assert Fabric(accelerator="cpu").world_size == 4
    assert Fabric(accelerator="cpu", devices=1, environment="none").world_size == 1


def test_a_number_of_machines_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigurationError, match="PET_NNODES='two'"):
        find_machines({"PET_NNODES": "two"})

"""Environments answer with the numbers that the variables of their launcher say."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only

from fabric.errors import ConfigurationError
from fabric_compat import Fabric
from fabric_compat.plugins import (
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
    set_default_rank,
)

MASTER = {"MASTER_ADDR": "host", "MASTER_PORT": "5"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "GROUP_RANK": "1"}
SLURM = {
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "alpha[4-6],beta",
    "SLURM_JOB_ID": "1230077",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
LSF = {
    "LSB_JOBID": "1234",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
}
# The environment, its variables, its address and its port.
CASES: dict[str, tuple[Any, dict[str, str], str, int]] = {
    "torchrun": (TorchElasticEnvironment, {**TORCHRUN, **MASTER}, "host", 5),
    "torchrun without a master": (TorchElasticEnvironment, TORCHRUN, "127.0.0.1", 12910),
    "slurm": (SLURMEnvironment, SLURM, "alpha4", 15077),
    "slurm with spaces": (SLURMEnvironment, {**SLURM, "SLURM_NODELIST": "a4, b c"}, "a4", 15077),
    "slurm with a master": (SLURMEnvironment, {**SLURM, **MASTER}, "host", 5),
    "mpi": (MPIEnvironment, {**MPI, **MASTER}, "host", 5),
    "lsf": (LSFEnvironment, LSF, "first", 10234),
}


@pytest.fixture(autouse=True)
def hosts(tmp_path: Path, monkeypatch: Any) -> None:
    name = socket.gethostname()
    path = tmp_path / "hosts"
    path.write_text(f"submit\nfirst\nfirst\n{name}\n{name}\n")
    monkeypatch.setenv("LSB_DJOB_RANKFILE", str(path))


def set_variables(monkeypatch: Any, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("options", [{}, {"num_nodes": 1}, {"num_nodes": 2}])
def test_the_launcher_says_how_many_nodes_there_are(
    options: dict[str, int], monkeypatch: Any
) -> None:
    set_variables(monkeypatch, {**TORCHRUN, **MASTER, "LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(ConfigurationError, match="job of 2 node"):
        Fabric(accelerator="cpu", devices=2, num_nodes=3)
    fabric = Fabric(accelerator="cpu", devices=2, **options)
    assert fabric.world_size == 4
    assert fabric.strategy.num_nodes == 2


@pytest.mark.parametrize("case", CASES)
def test_a_launcher_says_where_the_process_is(case: str, monkeypatch: Any) -> None:
    environment_class, variables, address, port = CASES[case]
    set_variables(monkeypatch, variables)
    environment = environment_class()
    assert environment.creates_processes_externally
    assert environment.world_size() == 4
    assert environment.global_rank() == 3
    assert environment.local_rank() == 1
    assert environment.node_rank() == 1
    assert environment.main_address == address
    assert environment.main_port == port


def test_a_pod_of_kubeflow_is_a_node_of_one_process(monkeypatch: Any) -> None:
    set_variables(monkeypatch, {"RANK": "3", "WORLD_SIZE": "4", **MASTER})
    environment = KubeflowEnvironment()
    assert environment.world_size() == 4
    assert environment.global_rank() == 3
    assert environment.node_rank() == 3
    assert environment.local_rank() == 0
    assert environment.main_port == 5


def test_processes_that_the_user_starts_have_a_local_rank(monkeypatch: Any) -> None:
    environment = LightningEnvironment()
    assert not environment.creates_processes_externally
    assert environment.main_port == environment.main_port
    set_variables(monkeypatch, {"LOCAL_RANK": "1", "NODE_RANK": "2", **MASTER})
    assert environment.creates_processes_externally
    assert environment.local_rank() == 1
    assert environment.node_rank() == 2
    environment.set_world_size(6)
    environment.set_global_rank(5)
    assert environment.world_size() == 6
    assert environment.global_rank() == 5
    assert environment.main_address == "host"


@pytest.mark.parametrize("kind", [TorchElasticEnvironment, SLURMEnvironment])
def test_a_rank_that_no_variable_says_is_an_error(kind: Any) -> None:
    environment = kind()
    assert not environment.detect()
    for method in (environment.world_size, environment.global_rank, environment.local_rank):
        with pytest.raises(KeyError):
            method()


@pytest.mark.parametrize(
    "variables", [{"RANK": "3", "SLURM_PROCID": "1"}, {"SLURM_PROCID": "3"}, LSF]
)
def test_functions_for_rank_zero_know_the_rank_of_every_launcher(
    variables: dict[str, str], monkeypatch: Any
) -> None:
    set_variables(monkeypatch, variables)
    # The first line makes the monkeypatch remove the rank after the test.
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    monkeypatch.delattr(rank_zero_only, "rank")
    set_default_rank()
    assert rank_zero_only.rank == 3


def test_lsf_says_which_variable_is_missing(monkeypatch: Any, tmp_path: Path) -> None:
    assert not LSFEnvironment.detect()
    with pytest.raises(ValueError, match="LSB_JOBID is not set"):
        LSFEnvironment()
    monkeypatch.setenv("LSB_JOBID", "1234")
    environment = LSFEnvironment()
    for method in (environment.world_size, environment.global_rank, environment.local_rank):
        with pytest.raises(ValueError, match=r"JSM_NAMESPACE_.* is not set"):
            method()
    (tmp_path / "submitter").write_text("submit")
    for file_name in ("", str(tmp_path / "submitter")):
        monkeypatch.setenv("LSB_DJOB_RANKFILE", file_name)
        with pytest.raises(ValueError, match=r"or empty|no hosts"):
            LSFEnvironment()


def test_kubeflow_is_not_detected() -> None:
    with pytest.raises(NotImplementedError, match="plugins=KubeflowEnvironment"):
        KubeflowEnvironment.detect()


def test_a_shell_of_slurm_has_no_job(monkeypatch: Any) -> None:
    set_variables(monkeypatch, SLURM)
    assert SLURMEnvironment.job_id() == 1230077
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    assert SLURMEnvironment.job_id() is None


def test_the_end_of_lightnings_environment_forgets_the_world_size(monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    LightningEnvironment().teardown()
    assert "WORLD_SIZE" not in os.environ
    LightningEnvironment().teardown()


def test_settings_that_contradict_the_launcher_are_an_error(monkeypatch: Any) -> None:
    LightningEnvironment().validate_settings(num_devices=2, num_nodes=1)
    set_variables(monkeypatch, {"WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "4"})
    monkeypatch.setenv("SLURM_NNODES", "2")
    for environment in (TorchElasticEnvironment(), SLURMEnvironment()):
        environment.validate_settings(num_devices=4, num_nodes=2)
        with pytest.raises(ValueError, match=r"devices=2.* has started"):
            environment.validate_settings(num_devices=2, num_nodes=2)
        with pytest.raises(ValueError, match=r"num_nodes=1.* has started"):
            environment.validate_settings(num_devices=4, num_nodes=1)
    # In a shell of SLURM, the script starts the processes.
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    SLURMEnvironment().validate_settings(num_devices=1, num_nodes=1)


def test_an_environment_that_the_user_passes_validates_the_settings() -> None:
    class Environment(LightningEnvironment):
        def validate_settings(self, num_devices: int, num_nodes: int) -> None:
            raise ValueError(f"{num_devices=} {num_nodes=}")

    with pytest.raises(ValueError, match="num_devices=2 num_nodes=1"):
        Fabric(accelerator="cpu", devices=2, plugins=Environment())
    Fabric(accelerator="cpu", devices=1, plugins=Environment())

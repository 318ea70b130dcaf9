"""Jobs of SLURM, on a cluster of two hosts."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.engines import long_job
from tests.engines.conftest import JOB, Places
from tests.engines.hosts import Hosts
from tests.engines.slurm import Cluster

pytestmark = pytest.mark.engines

ENDED = "COMPLETED|FAILED|TIMEOUT|CANCELLED|NODE_FAIL|OUT_OF_MEMORY"


@pytest.fixture(scope="module")
def slurm(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(hosts, tmp_path_factory.mktemp("slurm"))


def test_tasks_on_one_host_are_the_ranks_of_one_job(slurm: Cluster, places: Places, tmp_path: Path) -> None:
    slurm.run("srun", "--nodes=1", "--ntasks=4", sys.executable, JOB, tmp_path)
    assert places() == [(rank, rank, 0, 4, "host-a") for rank in range(4)]


def test_hosts_may_have_different_numbers_of_tasks(slurm: Cluster, places: Places, tmp_path: Path) -> None:
    slurm.run("srun", "--nodes=2", "--ntasks=4", sys.executable, JOB, tmp_path)
    assert places() == [(0, 0, 0, 4, "host-a"), (1, 1, 0, 4, "host-a"), (2, 2, 0, 4, "host-a"), (3, 0, 1, 4, "host-b")]


# SLURM sends a signal up to a minute early; the job has to be in its loop by then. Without one it stops a minute before
# its end.
STOPS = {"signal": ["--time=3", "--signal=USR1@90"], "end": ["--time=2"]}
# The second time it has an hour, and is done before either comes.
SCRIPT = 'test -z "$SLURM_RESTART_COUNT" || scontrol update JobId=$SLURM_JOB_ID TimeLimit=60; srun '


@pytest.mark.timeout(230)
def test_a_job_that_is_stopped_saves_goes_back_into_the_queue_and_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    jobs = {}
    for name, options in STOPS.items():
        (tmp_path / name).mkdir()
        command = SCRIPT + shlex.join([sys.executable, long_job.__file__, str(tmp_path / name)])
        options = [*options, f"--output={tmp_path / name}.log", "--open-mode=append", "--requeue", "--ntasks=2"]
        jobs[name] = slurm.run("sbatch", "--parsable", *options, f"--wrap={command}").strip()
    for name, job in jobs.items():
        ended = f"until squeue -h -t all -j {job} -o %T | grep -E '{ENDED}'; do sleep 1; done"
        assert slurm.run("sh", "-c", ended, seconds=180) == "COMPLETED\n", Path(f"{tmp_path / name}.log").read_text()
        first, second = (json.loads(path.read_text()) for path in (tmp_path / name).glob("*.json"))
        assert first == second
        assert (first["world_size"], first["restarts"], len(first["losses"])) == (2, "1", first["before"] + 5)
        model, optimizer = long_job.build()
        assert first["losses"] == pytest.approx([long_job.train(model, optimizer) for _ in first["losses"]])

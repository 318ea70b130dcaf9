"""Jobs of SLURM, on a cluster of two hosts."""

import shlex
import sys
from pathlib import Path

import pytest

from tests.engines.conftest import JOB, Places, Steps, long_run, steps_of
from tests.engines.hosts import Hosts
from tests.engines.slurm import Cluster

pytestmark = pytest.mark.engines

ENDED = "COMPLETED|FAILED|TIMEOUT|CANCELLED|NODE_FAIL|OUT_OF_MEMORY"


@pytest.fixture(scope="module")
def slurm(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(hosts, tmp_path_factory.mktemp("slurm"))


def test_tasks_on_one_host_are_the_ranks_of_one_job(
    slurm: Cluster, places: Places, tmp_path: Path
) -> None:
    slurm.run("srun", "--nodes=1", "--ntasks=4", sys.executable, JOB, tmp_path)
    assert places() == [(rank, rank, 0, 4, "host-a") for rank in range(4)]


def test_hosts_may_have_different_numbers_of_tasks(
    slurm: Cluster, places: Places, tmp_path: Path
) -> None:
    slurm.run("srun", "--nodes=2", "--ntasks=4", sys.executable, JOB, tmp_path)
    assert places() == [
        (0, 0, 0, 4, "host-a"),
        (1, 1, 0, 4, "host-a"),
        (2, 2, 0, 4, "host-a"),
        (3, 0, 1, 4, "host-b"),
    ]


# SLURM sends a signal up to a minute early; the job has to be in its loop by then. Without one it
# stops a minute before its end. Until then it is slow, and then it has an hour.
STOPS = {"signal": "--time=3 --signal=USR1@90", "end": "--time=2"}
SCRIPT = """#!/bin/sh
#SBATCH --ntasks=2 --requeue --open-mode=append --output=output.txt {options}
pause=0.6
if [ "$SLURM_RESTART_COUNT" ]; then pause=0; scontrol update JobId=$SLURM_JOB_ID TimeLimit=60; fi
srun {command} --pause $pause
"""


@pytest.mark.timeout(230)
def test_a_job_that_is_stopped_saves_goes_back_into_the_queue_and_goes_on(
    slurm: Cluster, tmp_path: Path, uninterrupted: Steps
) -> None:
    jobs = {}
    for name, options in STOPS.items():
        folder = tmp_path / name
        folder.mkdir()
        command = shlex.join([sys.executable, *long_run(folder)])
        (folder / "job.sh").write_text(SCRIPT.format(options=options, command=command))
        jobs[folder] = slurm.run("sbatch", "--parsable", "job.sh", cwd=folder).strip()
    for folder, job in jobs.items():
        ended = f"until squeue -h -t all -j {job} -o %T | grep -E '{ENDED}'; do sleep 1; done"
        assert slurm.run("sh", "-c", ended, seconds=180) == "COMPLETED\n", (
            folder / "output.txt"
        ).read_text()
        assert " Restarts=1 " in slurm.run("scontrol", "show", "job", job)
        # No step is lost, and none is done twice.
        steps = steps_of(folder)
        assert [step["step"] for step in steps] == list(uninterrupted)
        assert {step["step"]: (step["loss"], step["samples"]) for step in steps} == uninterrupted

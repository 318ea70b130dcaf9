"""Jobs of SLURM, on a cluster of two hosts."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.engines.conftest import JOB, JobRanks, Steps, long_run, recorded_steps
from tests.engines.hosts import Hosts
from tests.engines.slurm import Cluster

pytestmark = pytest.mark.engines

ENDED = "COMPLETED|FAILED|TIMEOUT|CANCELLED|NODE_FAIL|OUT_OF_MEMORY"


@pytest.fixture(scope="module")
def slurm(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(hosts, tmp_path_factory.mktemp("slurm"))


def test_tasks_on_one_host_are_the_ranks_of_one_job(
    slurm: Cluster, job_ranks: JobRanks, tmp_path: Path
) -> None:
    slurm.run("srun", "--nodes=1", "--ntasks=4", sys.executable, JOB, tmp_path)
    assert job_ranks() == [(rank, rank, 0, 4, "host-a") for rank in range(4)]


def test_hosts_may_have_different_numbers_of_tasks(
    slurm: Cluster, job_ranks: JobRanks, tmp_path: Path
) -> None:
    slurm.run("srun", "--nodes=2", "--ntasks=4", sys.executable, JOB, tmp_path)
    assert job_ranks() == [
        (0, 0, 0, 4, "host-a"),
        (1, 1, 0, 4, "host-a"),
        (2, 2, 0, 4, "host-a"),
        (3, 0, 1, 4, "host-b"),
    ]


# SLURM sends a signal up to a minute early, and the job has to be in its loop by then. Without a
# signal, the job stops a minute before its end. The first run is slow, and the second run has an
# hour.
STOPS = {"signal": "--time=3 --signal=USR1@90", "end": "--time=2"}
SCRIPT = """#!/bin/sh
#SBATCH --ntasks=2 --requeue --open-mode=append --output=output.txt {options}
pause=0.6
if [ "$SLURM_RESTART_COUNT" ]; then pause=0; scontrol update JobId=$SLURM_JOB_ID TimeLimit=60; fi
srun {command} --pause $pause
"""


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
        wait_for_end = (
            f"until squeue -h -t all -j {job} -o %T | grep -E '{ENDED}'; do sleep 1; done"
        )
        state = slurm.run("sh", "-c", wait_for_end, seconds=500)
        assert state == "COMPLETED\n", (folder / "output.txt").read_text()
        assert " Restarts=1 " in slurm.run("scontrol", "show", "job", job)
        # No step is lost, and no step is done twice.
        numbers = []
        for step in recorded_steps(folder / "record"):
            numbers.append(step["step"])
            assert (step["loss"], step["samples"]) == uninterrupted[step["step"]]
        assert numbers == list(uninterrupted)


# The command takes the place of the shell, to which `scancel --batch` sends its signal.
NOT_TO_REQUEUE = """#!/bin/sh
#SBATCH --ntasks=2 --no-requeue --time=10 --open-mode=append --output=output.txt
exec {command}
"""


def test_a_job_that_slurm_does_not_requeue_saves_and_ends_without_a_restart(
    slurm: Cluster, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "fabric", "run", "--accelerator=cpu", "--devices=2"]
    words += ["--max-restarts=3", *long_run(tmp_path, steps=3000), "--pause=0.1"]
    (tmp_path / "job.sh").write_text(NOT_TO_REQUEUE.format(command=shlex.join(words)))
    job = slurm.run("sbatch", "--parsable", "job.sh", cwd=tmp_path).strip()
    record = tmp_path / "record"
    slurm.run("sh", "-c", f"until grep -qs '\"step\": 5,' {record}; do sleep 0.1; done")
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    wait_for_end = f"until squeue -h -t all -j {job} -o %T | grep -E '{ENDED}'; do sleep 1; done"
    state = slurm.run("sh", "-c", wait_for_end)
    output = (tmp_path / "output.txt").read_text()
    assert state == "FAILED\n", output
    description = slurm.run("scontrol", "show", "job", job)
    assert " Restarts=0 " in description
    assert " ExitCode=75:0\n" in description
    # The ranks have saved and are not started again in the last seconds of the job.
    assert "is not back in the queue" in output
    assert "fabric run: restart" not in output
    numbers = [step["step"] for step in recorded_steps(record)]
    assert numbers == list(range(1, len(numbers) + 1))
    latest = (tmp_path / "checkpoints" / "latest").read_text()
    assert re.fullmatch(rf"\d+-step-{len(numbers)}\n", latest)

"""The recipes for platforms: two machines run what the page says, with the platform's variables.

Two commands on loopback pose as the machines. Their environment has the variables that the platform
documents, and nothing else of this process.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from fabric.cli import main

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "kubernetes.md"
ELASTIC = ROOT / "tests" / "scripts" / "flyte_elastic.py"
DEADLINE = 170
PREEMPTED = 75

pytestmark = pytest.mark.timeout(500)


def recipe(name: str) -> dict[str, Any]:
    """Return the block of YAML of a platform."""
    for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        content = yaml.safe_load(block)
        if content.get("kind", "SkyPilot") == name:
            return content
    raise AssertionError(f"the page has no {name}")


def free_port() -> int:
    """Return a port that is free now. Another process would have to be quick to take it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, port = server.getsockname()
    return port


def long_run(folder: Path, steps: int) -> list[str]:
    return [
        f"--folder={folder / 'checkpoints'}",
        f"--record={folder / 'record'}",
        f"--steps={steps}",
        "--accelerator=cpu",
        "--pause=0.05",
    ]


def on_loopback(words: Sequence[str], main_address: str, port: int) -> list[str]:
    """Return a command of the page, with a free port and with loopback for this host name."""
    assert words[:2] == ["fabric", "run"]
    options = []
    for word in words[2:]:
        options.append(word.replace(f"--main-address={main_address}", "--main-address=127.0.0.1"))
    return ["fabric", "run", f"--main-port={port}", *options]


@contextmanager
def machines(
    command: Sequence[object], variables: Sequence[dict[str, str]], folder: Path
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run a command once for each machine, with the variables of that machine."""
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        started = []
        for number, variables_of_machine in enumerate(variables):
            environment = {
                "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                **variables_of_machine,
            }
            output = stack.enter_context(open(folder / f"output-{number}", "a"))
            machine = subprocess.Popen(
                [str(word) for word in command],
                env=environment,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(machine.wait)
            stack.callback(machine.kill)
            started.append(machine)
        yield started


def exit_codes(started: Sequence[subprocess.Popen[str]]) -> list[int]:
    return [machine.wait(DEADLINE) for machine in started]


def outputs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("output-*")))


def steps_on_two_processes(folder: Path) -> list[int]:
    """Return the recorded steps of a run on two processes, one on each machine."""
    numbers = []
    for line in (folder / "record").read_text().splitlines():
        step = json.loads(line)
        assert step["processes"] == 2
        numbers.append(step["step"])
    return numbers


def wait_for_step(folder: Path, step: int) -> None:
    script = f"until grep -qs '\"step\": {step},' record; do sleep 0.1; done"
    subprocess.run(["sh", "-c", script], cwd=folder, check=True, timeout=DEADLINE)


@pytest.mark.slow
def test_pods_of_a_jobset_that_are_evicted_save_and_go_on(tmp_path: Path) -> None:
    job_set = recipe("JobSet")
    [replicated_job] = job_set["spec"]["replicatedJobs"]
    job = replicated_job["template"]["spec"]
    assert job["completions"] == job["parallelism"] == 2
    assert PREEMPTED in job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    # Such a policy needs pods that are not started again in place.
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    name = job_set["metadata"]["name"]
    first_host = f"{name}-{replicated_job['name']}-0-0.{name}"
    [container] = pod["containers"]
    command = on_loopback(container["command"], first_host, free_port())
    assert command.pop() == "train.py"
    command += [str(ROOT / "examples" / "long_run.py"), *long_run(tmp_path, steps=60)]
    variables = [{"JOB_COMPLETION_INDEX": "0"}, {"JOB_COMPLETION_INDEX": "1"}]
    with machines(command, variables, tmp_path) as pods:
        wait_for_step(tmp_path, 10)
        # The pod of machine 1 is evicted, and the other one is told by its ranks.
        pods[1].send_signal(signal.SIGTERM)
        assert exit_codes(pods) == [PREEMPTED, PREEMPTED], outputs(tmp_path)
    with machines(command, variables, tmp_path) as pods:
        assert exit_codes(pods) == [0, 0], outputs(tmp_path)
    # Each step once: they have saved before they ended.
    assert steps_on_two_processes(tmp_path) == list(range(1, 61))


@pytest.mark.slow
def test_the_init_container_connects_the_pods_and_fails_with_a_planted_fault(
    tmp_path: Path,
) -> None:
    [replicated_job] = recipe("JobSet")["spec"]["replicatedJobs"]
    [container] = replicated_job["template"]["spec"]["template"]["spec"]["initContainers"]
    variables = [{"JOB_COMPLETION_INDEX": "0"}, {"JOB_COMPLETION_INDEX": "1"}]
    command = on_loopback(container["command"], "train-workers-0-0.train", free_port())
    with machines(command, variables, tmp_path / "sound") as pods:
        codes = exit_codes(pods)
    report = outputs(tmp_path / "sound")
    assert "ok    rank 1 of 2" in report
    assert "ok    all_reduce" in report
    # This machine may lack open files or shared memory.
    if "FAIL" not in report:
        assert codes == [0, 0]
    faulty = tmp_path / "faulty"
    (faulty / "torch").mkdir(parents=True)
    (faulty / "torch" / "__init__.py").touch()
    # The doctor finds this fault before it needs the other machine.
    with machines(["fabric", "doctor"], variables[:1], faulty) as pods:
        assert exit_codes(pods) == [1], outputs(faulty)
    assert f"{faulty}/torch/__init__.py may be imported in place of" in outputs(faulty)


@pytest.mark.slow
def test_a_managed_job_of_skypilot_goes_on_after_its_machines_are_gone(tmp_path: Path) -> None:
    job = recipe("SkyPilot")
    assert job["num_nodes"] == 2
    assert PREEMPTED in job["resources"]["job_recovery"]["recover_on_exit_codes"]
    words = shlex.split(job["run"])
    command = on_loopback(words, "taken from the variables", free_port())
    assert command.pop() == "train.py"
    command += [str(ROOT / "examples" / "long_run.py"), *long_run(tmp_path, steps=40)]
    variables = []
    for rank in ("0", "1"):
        variables.append(
            {
                "SKYPILOT_NUM_NODES": "2",
                "SKYPILOT_NODE_RANK": rank,
                "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
                "SKYPILOT_NUM_GPUS_PER_NODE": "0",
            }
        )
    with machines(command, variables, tmp_path) as spot_machines:
        wait_for_step(tmp_path, 10)
        for machine in spot_machines:
            machine.kill()
        exit_codes(spot_machines)
    with machines(command, variables, tmp_path) as spot_machines:
        assert exit_codes(spot_machines) == [0, 0], outputs(tmp_path)
    # At most three steps and what was on its way to the disk are done again.
    numbers = steps_on_two_processes(tmp_path)
    assert sorted(set(numbers)) == list(range(1, 41))
    assert len(numbers) < 50


@pytest.mark.slow
def test_a_task_of_flyte_with_elastic_is_one_job(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    variables = {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": endpoint,
        "PET_NNODES": "2:2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MAX_RESTARTS": "0",
    }
    command = [sys.executable, ELASTIC, *long_run(tmp_path, steps=10)]
    with machines(command, [variables, variables], tmp_path) as pods:
        assert exit_codes(pods) == [0, 0], outputs(tmp_path)
    assert steps_on_two_processes(tmp_path) == list(range(1, 11))


def test_the_number_of_a_pod_is_for_jobs_of_several_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")
    # Each command has a mistake, so that no process starts.
    assert main(["run", "--num-nodes=2", "--main-address=host-a", "train.py"]) == 2
    assert "has no machine --node-rank 2" in capsys.readouterr().err
    alone = ["run", "--num-nodes=1", "--accelerator=cpu", "--devices=0", "train.py"]
    assert main(alone) == 2
    assert "--node-rank" not in capsys.readouterr().err

"""What the command line promises: no option is ignored, and processes that are there are used."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn

from fabric import Fabric
from fabric.strategies import SingleDeviceStrategy
from tests.ranks import outcome, run_in_ranks

DEADLINE = 90
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a module with arguments in a folder that has this script as train.py."""

    def start(
        script: str, *words: str, module: str = "fabric"
    ) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "train.py").write_text(textwrap.dedent(script))
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-m", module, *words]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )

    return start


OPEN = """
    from fabric import Fabric
    fabric = Fabric(accelerator="cpu")
    fabric.launch()
    print("trained")
"""


def test_options_after_the_script_that_nobody_reads_are_refused_with_the_right_order(
    run: Run,
) -> None:
    job = run(OPEN, "run", "train.py", "--devices=2", "--strategy", "ddp", "--accelerator", "cpu")
    assert job.returncode == 1
    assert job.stdout == ""
    assert "Write: fabric run --strategy=ddp --devices=2 script.py" in job.stderr


READS = """
    import argparse
    from fabric import Fabric
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int)
    parser.add_argument('--precision')
    options = parser.parse_args()
    fabric = Fabric(accelerator="cpu", devices=options.devices)
    total = fabric.all_reduce(1, reduce_op="sum")
    fabric.print(fabric.precision.name, options.precision, total)
"""


def test_a_script_that_reads_them_itself_and_never_launches_runs_in_the_processes_that_are_there(
    run: Run,
) -> None:
    job = run(READS, "run", "--devices", "2", "train.py", "--devices", "2", "--precision", "mine")
    assert (job.returncode, job.stdout) == (0, "32-true mine 2\n"), job.stderr


ALONE = """
    from fabric import Fabric
    fabric = Fabric(accelerator="cpu", timeout=2, watchdog=0.5)
    if fabric.global_rank == 0:
        fabric.device
"""


@pytest.mark.slow
def test_a_rank_that_waits_for_others_to_use_fabric_says_so(run: Run) -> None:
    job = run(ALONE, "run", "--devices", "2", "train.py")
    assert job.returncode == 1
    assert job.stderr.startswith(
        "rank 0 of 2 waits for all to call fabric.launch() or to use Fabric\n"
    )


@pytest.mark.slow
def test_a_script_without_launch_runs_under_torchrun(run: Run) -> None:
    words = ("--standalone", "--nproc-per-node", "2", "train.py", "--devices", "2")
    job = run(READS, *words, module="torch.distributed.run")
    assert (job.returncode, job.stdout) == (0, "32-true None 2\n"), job.stderr


# As much of Hydra as tells a process its output folder: one of its own, unless its arguments name
# it.
UNDER_HYDRA = """
    import os, sys
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from fabric import Fabric

    @hydra.main(version_base=None, config_path=None)
    def main(config):
        folder = HydraConfig.get().runtime.output_dir
        fabric = Fabric(accelerator="cpu", devices=2)
        if "RANK" not in os.environ:
            print(folder, flush=True)
        fabric.launch()
        folders = fabric.gather(folder)
        if folders:
            print(*folders, config, sys.argv[1], sep="\\n")

    main()
"""


@pytest.mark.parametrize(
    "sweep", [[], pytest.param(["--multirun"], marks=pytest.mark.slow)], ids=["run", "sweep"]
)
def test_under_hydra_all_ranks_get_the_folder_of_the_launching_process(
    sweep: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "it's"
    folder.mkdir()
    (folder / "train.py").write_text(textwrap.dedent(UNDER_HYDRA))
    job = subprocess.run(
        [sys.executable, "train.py", "+lr=1", *sweep],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=DEADLINE,
        check=False,
    )  # fmt: skip
    launching, first, second, *words = [
        line for line in job.stdout.splitlines() if not line.startswith("[")
    ]
    assert launching == first == second, job.stderr
    assert launching.startswith(str(folder))
    assert words == ["{'lr': 1}", "+lr=1"]


def alone(fabric: Fabric) -> tuple[str, float, int | None]:
    refused = outcome(
        lambda: Fabric(accelerator="cpu", strategy=SingleDeviceStrategy(device="cpu"))
    )
    with Fabric(
        accelerator="cpu", strategy=SingleDeviceStrategy(device="cpu"), environment="none"
    ) as own:
        model = own.setup(nn.Linear(1, 1, bias=False))
        own.backward(model(torch.full((1, 1), float(fabric.global_rank))).sum())
        [gradient] = [
            parameter.grad.item() for parameter in model.parameters() if parameter.grad is not None
        ]
    fabric.barrier()
    return refused, gradient, rank_zero_only.rank


def test_a_job_of_one_process_inside_of_a_rank_is_its_own_and_rank_zero_is_known() -> None:
    for rank, (refused, gradient, known) in enumerate(run_in_ranks(alone)):
        assert f"'single_device' with 2 processes on 1 node(s) by fabric (rank {rank})" in refused
        assert (gradient, known) == (rank, rank)


def test_python_m_fabric_is_the_command_and_the_readme_says_so(run: Run) -> None:
    job = run("", "--version")
    assert (job.returncode, job.stdout) == (0, f"fabric {version('torch-fabric')}\n"), job.stderr
    assert (
        "`python -m fabric run ...` is always this one"
        in (Path(__file__).parents[1] / "README.md").read_text()
    )

"""Imports of Lightning Fabric find its names here, and nothing else of Lightning."""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from fabric.errors import RankFailedError
from fabric.launchers import LAUNCHERS, LaunchSpec
from tests.compat.table import PAGE, failure, import_lines, imports, is_unsupported, table


def run(code: str) -> None:
    """Run code in a process that has imported fabric, but not the package."""
    spec = LaunchSpec(num_processes=1)
    LAUNCHERS["forkserver"].launch(exec, (code, {}), {}, spec)


def test_at_least_95_of_100_imports_of_public_projects_resolve(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = (
        "import fabric_compat.installed\n"
        "from tests.compat.test_imports import print_counts\n"
        "print_counts()"
    )
    run(code)
    assert len(list(imports())) >= 200
    resolved, supported, is_table_current = capfd.readouterr().out.split()
    assert int(resolved) >= 0.95 * int(supported)
    assert is_table_current == "True", "python -m tests.compat.table"


def print_counts() -> None:
    """Print how many imports resolve, how many should, and whether the page has the table."""
    resolved = 0
    supported = 0
    for module, name in imports():
        if is_unsupported(module, name):
            continue
        supported += 1
        if failure(module, name) is None:
            resolved += 1
    print(resolved, supported, table() in PAGE.read_text())


def test_every_import_is_listed_once() -> None:
    modules = []
    for module, names in import_lines():
        modules.append(module)
        assert len(set(names)) == len(names), module
    assert len(set(modules)) == len(modules)


SHARED_OBJECTS = """
import fabric_compat.installed
import fabric_compat, lightning as L, lightning.fabric, lightning_fabric
import pytorch_lightning
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from pytorch_lightning.utilities.seed import isolate_rng
import lightning.fabric.strategies.fsdp, lightning.fabric.utilities.throughput as deep
from lightning_fabric.plugins.precision.precision import Precision
assert lightning.fabric is lightning_fabric, lightning.fabric
assert L.Fabric is lightning.fabric.fabric.Fabric is fabric_compat.Fabric
assert lightning.fabric.strategies is fabric_compat.strategies
assert deep is lightning.fabric.utilities
assert Precision is fabric_compat.plugins.Precision
assert L.LightningModule is L.pytorch.LightningModule is L.pytorch.core.module.LightningModule
assert L.pytorch.loggers.wandb.WandbLogger is L.pytorch.loggers.WandbLogger
assert L.pytorch.utilities.model_helpers.is_overridden
assert fabric_compat.strategies.__spec__.name == "fabric_compat.strategies"
# The file that provides this module has this name, too.
from lightning.fabric.plugins.environments import SLURMEnvironment
assert not SLURMEnvironment.detect()
"""

# Modules of a real package are attributes, and absent modules are found by no one.
IMPORT_PROTOCOL = """
import fabric_compat.installed
from importlib.util import find_spec
from unittest import mock
import lightning, lightning_fabric
fabric = lightning.fabric
assert fabric.plugins.environments.slurm.SLURMEnvironment is fabric.plugins.SLURMEnvironment
assert lightning_fabric.utilities.seed.seed_everything is lightning.seed_everything
absent = "lightning.data lightning.fabric.installed lightning.fabric.utilities.no_such_module"
for name in absent.split():
    assert find_spec(name) is None, name
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert error.name == name
    else:
        raise AssertionError(name)
for name in ("lightning", "lightning.fabric", "lightning_fabric.plugins.io"):
    assert find_spec(name) is not None, name
with mock.patch("lightning.fabric.fabric.Fabric.launch") as launch:
    assert lightning.Fabric.launch is launch
assert isinstance(lightning.fabric.fabric.Fabric, type)
assert lightning.Fabric.launch is not launch
assert not hasattr(lightning, "NoSuchName")
"""


def test_the_import_protocol_finds_the_modules_that_exist_and_no_others() -> None:
    run(IMPORT_PROTOCOL)


# Importing a name without a counterpart is no error as long as the name is not used.
UNUSED_NAMES = """
from lightning.fabric.plugins import BitsandbytesPrecision, Precision
from lightning.fabric.plugins.precision.bitsandbytes import _BITSANDBYTES_AVAILABLE
from lightning.fabric.utilities.spike import TrainingSpikeException
assert not _BITSANDBYTES_AVAILABLE
assert not isinstance(Precision(), BitsandbytesPrecision)
try:
    pass
except TrainingSpikeException:
    pass
"""


def test_all_names_of_a_module_are_one_object_and_names_without_counterparts_import(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run(SHARED_OBJECTS + UNUSED_NAMES)
    assert capfd.readouterr().err == ""


MESSAGES = """
import fabric_compat.installed
import logging
from lightning.fabric.utilities import rank_zero_info
rank_zero_info("first")
logging.basicConfig(format="root: %(message)s")
rank_zero_info("second")
logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
rank_zero_info("third")
"""


def test_messages_of_rank_0_are_printed_once_and_can_be_silenced(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run(MESSAGES)
    assert capfd.readouterr().err == "first\nsecond\n"


# Lines of code, and what their error says.
REFUSED = {
    "from lightning import Trainer; Trainer()": "start the script without fabric_compat",
    "from pytorch_lightning.cli import LightningCLI as C; C()": "jsonargparse",
    "import pytorch_lightning.tuner": "No module named 'pytorch_lightning.tuner'",
    "import lightning.data": "No module named 'lightning.data'",
    "import lightning.fabric.nothing": "No module named 'lightning.fabric.nothing'",
    "from lightning.fabric.strategies import DeepSpeedStrategy as D; D(stage=2)": (
        "Use instead: strategy="
    ),
    "from lightning.fabric.accelerators import XLAAccelerator as X; X()": (
        "Use instead: there are no TPUs"
    ),
    "from lightning.fabric.plugins import BitsandbytesPrecision as B; B('nf4')": (
        "before fabric.setup(model)"
    ),
    "from lightning.fabric.plugins import Nothing": "cannot import name 'Nothing'",
}


# Runs each line, and prints the error.
PRINT_ERRORS = """
import fabric_compat.installed
for line in {lines}:
    try:
        exec(line)
    except ImportError as error:
        print(error)
"""


def test_what_has_no_counterpart_is_an_error_that_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run(PRINT_ERRORS.format(lines=list(REFUSED)))
    errors = capfd.readouterr().out.splitlines()
    assert len(errors) == len(REFUSED)
    for error, expected in zip(errors, REFUSED.values(), strict=True):
        assert expected in error


def test_importing_fabric_or_the_package_changes_no_import(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = (
        "import sys, fabric._fabric, fabric.cli\n"
        "print('fabric_compat' in sys.modules)\n"
        "import fabric_compat\n"
        "print([finder for finder in sys.meta_path if 'compat' in repr(finder)])"
    )
    run(code)
    assert capfd.readouterr().out == "False\n[]\n"


def test_cuda_is_looked_for_without_starting_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    code = (
        "import os, fabric_compat.installed, lightning.fabric\n"
        "print(os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'])"
    )
    run(code)
    assert capfd.readouterr().out == "1\n"


def test_it_has_to_be_installed_before_lightning_is_imported(tmp_path: Path) -> None:
    (tmp_path / "lightning.py").touch()
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import lightning, fabric_compat.installed"
    )
    with pytest.raises(RankFailedError, match="lightning has been imported already"):
        run(code)


SCRIPT = """
import sys
from lightning.fabric import Fabric
def main(fabric, *args):
    sys.stdout.write(f"rank {fabric.global_rank} {sys.argv[1:]}\\n")
if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn")
    fabric.launch(main)
"""
# Uses Lightning Fabric where fabric differs, and a Fabric of one process inside of a rank.
DIFFERENCES = """
import sys
import lightning as L
import torch
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.fabric.utilities import rank_zero_only
from torch.utils.data import DataLoader
class Data:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return float(index)
@rank_zero_only
def announce():
    print("announced")
def main():
    L.seed_everything(1)
    announce()
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    assert type(fabric.strategy) is DDPStrategy
    strategy = SingleDeviceStrategy(
        device=fabric.device,
        accelerator=fabric.accelerator,
        checkpoint_io=None,
        precision=fabric._precision,
    )
    single = L.Fabric(devices=1, strategy=strategy)
    assert single.world_size == 1
    assert single.all_gather(torch.ones(2)).shape == (2,)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = single.setup_optimizers(torch.optim.SGD([weight], lr=0.1))
    for value in range(2):
        total = torch.ones(1)
        fabric.all_reduce(total, reduce_op="sum")
        fabric.all_gather(value)
    workers = {}
    if "--spawn" in sys.argv:
        workers = {"num_workers": 1, "multiprocessing_context": "spawn"}
    loader = fabric.setup_dataloaders(DataLoader(Data(), 1, **workers))
    loader.sampler.set_epoch(1)
    samples = torch.cat(list(loader)).tolist()
    sys.stdout.write(f"rank {fabric.global_rank} {samples} {sys.argv[1:]}\\n")
if __name__ == "__main__":
    main()
"""
NOTE = "fabric_compat: as in Lightning Fabric, "


class Output(NamedTuple):
    """What a script printed: the sorted lines of its output, and the text of its errors."""

    lines: list[str]
    errors: str


def run_script(script: str, folder: Path, option: str, *launcher: str) -> Output:
    (folder / "script.py").write_text(script)
    command = [sys.executable, *launcher, "-m", "fabric_compat", "script.py", "--x", option]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return Output(sorted(done.stdout.splitlines()), done.stderr)


def ranks_of(lines: list[str]) -> list[str]:
    return [line.split()[1] for line in lines]


@pytest.mark.slow
def test_a_script_and_the_processes_that_it_spawns_import_it(tmp_path: Path) -> None:
    output = run_script(SCRIPT, tmp_path, "1")
    assert ranks_of(output.lines) == ["0", "1"]
    for line in output.lines:
        assert line.endswith("['--x', '1']")
    assert output.errors == ""


def noted_subjects(errors: str) -> list[str]:
    """Return the first word of each note. All lines but that of the seed are notes."""
    subjects = []
    for line in errors.splitlines():
        if line.startswith("Seed set to "):
            continue
        assert line.startswith(NOTE), errors
        subjects.append(line.removeprefix(NOTE).split()[0])
    return subjects


def assert_differences_are_noted_once(folder: Path, option: str) -> None:
    output = run_script(DIFFERENCES, folder, option)
    assert [line for line in output.lines if line.startswith("rank")] == [
        f"rank 0 [0.0, 2.0] ['--x', '{option}']",
        f"rank 1 [1.0, 3.0] ['--x', '{option}']",
    ]
    # Rank 0 announces, and so does the process that launches.
    assert output.lines.count("announced") == 2
    assert noted_subjects(output.errors) == ["all_gather", "optimizers", "all_reduce"]


# Below, the command `run` shows the same with fewer processes, and tests/compat/test_scripts.py has
# more scripts that launch their processes.
@pytest.mark.slow
def test_it_says_once_where_a_meaning_differs(tmp_path: Path) -> None:
    assert_differences_are_noted_once(tmp_path, "1")


@pytest.mark.slow
def test_loader_workers_that_are_spawned_import_it(tmp_path: Path) -> None:
    assert_differences_are_noted_once(tmp_path, "--spawn")


@pytest.mark.slow
def test_fabric_run_starts_the_processes_of_such_a_script(tmp_path: Path) -> None:
    output = run_script(SCRIPT, tmp_path, "1", "-m", "fabric", "run", "--devices", "2")
    assert ranks_of(output.lines) == ["0", "1"]
    assert output.errors == ""


# Runs the command with wrong arguments, and prints what it says at its exit.
WRONG_FILES = """
import sys
from fabric_compat.__main__ import main
for arguments in (["nothing.py"], []):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as error:
        print(error)
"""


def test_a_wrong_file_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    run(WRONG_FILES)
    missing_file, no_file = capfd.readouterr().out.splitlines()
    assert "there is no such file" in missing_file
    assert "usage: python -m fabric_compat" in no_file


# Runs a module as ``python -m fabric_compat -m job -x`` does.
MODULE = """
import os, sys
os.chdir({folder!r})
sys.path.insert(0, "")
sys.argv[1:] = ["-m", "job", "-x"]
from fabric_compat.__main__ import main
main()
"""
# Runs tests as ``pytest -p fabric_compat.installed`` does.
TESTS = """
import os, pytest
os.chdir({folder!r})
plugins = ["-p", "fabric_compat.installed", "-p", "no:cacheprovider"]
assert pytest.main(["-q", *plugins]) == 0
"""


def test_a_module_runs_too_and_so_do_tests(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.py").write_text(
        "import sys; from lightning_fabric import Fabric; print(Fabric, sys.argv[1:])"
    )
    run(MODULE.format(folder=str(tmp_path)))
    assert "['-x']" in capfd.readouterr().out

    (tmp_path / "test_job.py").write_text("def test_job():\n    import lightning.fabric\n")
    run(TESTS.format(folder=str(tmp_path)))
    assert "1 passed" in capfd.readouterr().out


COLLECTIVE_SCRIPT = """
import sys
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.collectives import TorchCollective
total = TorchCollective().setup().all_reduce(torch.ones(1), op="sum").item()
fabric = Fabric()
fabric.launch()
total += fabric.all_reduce(torch.ones(1), reduce_op="sum").item()
sys.stdout.write(f"rank {fabric.global_rank} {total} {sys.argv[1:]}\\n")
"""


@pytest.mark.slow
def test_its_command_run_takes_options_on_both_sides_and_notes_each_difference_once(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(COLLECTIVE_SCRIPT + DIFFERENCES)
    command = [sys.executable, "-m", "fabric_compat", "run", "--num_nodes=1", "script.py"]
    options = ["--lr", "0.1", "--devices", "2", "--accelerator=cpu", "--main_port", "1234"]
    done = subprocess.run(
        [*command, *options],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [
        "announced",
        "rank 0 4.0 ['--lr', '0.1']",
        "rank 0 [0.0, 2.0] ['--lr', '0.1']",
        "rank 1 4.0 ['--lr', '0.1']",
        "rank 1 [1.0, 3.0] ['--lr', '0.1']",
    ]
    assert noted_subjects(done.stderr) == ["all_reduce", "all_gather", "optimizers"]

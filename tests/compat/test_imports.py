"""Imports of Lightning Fabric find its names here, and nothing else of Lightning."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.table import ELSEWHERE, LIST, PAGE, failure, imports, table

LISTED = [
    pair
    for pair in imports()
    if not any(word in f"{pair[0]} {pair[1]}".lower() for word in ELSEWHERE)
]


def run(code: str, *options: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        check=False,
    )


def test_at_least_95_of_100_imports_of_public_projects_resolve() -> None:
    code = "import fabric_compat.installed; from tests.compat.test_imports import *; "
    code += "print(sum(map(resolves, LISTED)), is_current())"
    done = run(code, folder=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert len(list(imports())) >= 200
    resolved, is_table_current = done.stdout.split()
    assert int(resolved) >= 0.95 * len(LISTED)
    assert is_table_current == "True", "python -m tests.compat.table"


def is_current() -> bool:
    return table() in PAGE.read_text()


def resolves(pair: tuple[str, str]) -> bool:
    return failure(*pair) is None


def test_each_import_is_listed_once() -> None:
    lines = [line.split() for line in LIST.read_text().splitlines() if not line.startswith("#")]
    assert len({module for module, *_ in lines}) == len(lines)
    assert all(len(set(names)) == len(names) for _, *names in lines)


SAME = """
import fabric_compat.installed
import fabric_compat, lightning as L, lightning.fabric, lightning_fabric
import lightning.fabric.strategies.fsdp, lightning.fabric.utilities.throughput as deep
from lightning_fabric.plugins.precision.precision import Precision
assert lightning.fabric is lightning_fabric is fabric_compat, lightning.fabric
assert L.Fabric is lightning.fabric.fabric.Fabric is fabric_compat.Fabric
assert lightning.fabric.strategies is fabric_compat.strategies
assert deep is lightning.fabric.utilities and Precision is fabric_compat.plugins.Precision
assert fabric_compat.strategies.__spec__.name == "fabric_compat.strategies"
from lightning.fabric.plugins.environments import SLURMEnvironment  # a name of the file that it finds, too
assert not SLURMEnvironment.detect()
"""


# What is not here is no error as long as it is not used.
UNUSED = """
from lightning.fabric.plugins import BitsandbytesPrecision, Precision
from lightning.fabric.plugins.precision.bitsandbytes import _BITSANDBYTES_AVAILABLE
from lightning.fabric.utilities.spike import TrainingSpikeException
assert not _BITSANDBYTES_AVAILABLE and not isinstance(Precision(), BitsandbytesPrecision)
try: pass
except TrainingSpikeException: pass
"""


def test_every_name_of_a_module_is_the_same_object_and_may_be_one_that_is_not_here() -> None:
    done = run(SAME + UNUSED)
    assert (done.returncode, done.stderr) == (0, "")


REFUSED = {
    "import lightning.pytorch": "lightning.pytorch is Lightning's Trainer, which cannot use lightning.fabric",
    "import pytorch_lightning": "pytorch_lightning is Lightning's Trainer",
    "from lightning import Trainer": "lightning.Trainer belongs to Lightning's Trainer",
    "import lightning.data": "lightning.data is not part of Lightning Fabric",
    "import lightning.fabric.nothing": "No module named 'lightning.fabric.nothing'",
    "from lightning.fabric.strategies import DeepSpeedStrategy as D; D(stage=2)": "Use instead: strategy=",
    "from lightning.fabric.accelerators import XLAAccelerator as X; X()": "Use instead: there are no TPUs",
    "from lightning.fabric.plugins import BitsandbytesPrecision as B; B('nf4')": "before fabric.setup(model)",
    "from lightning.fabric.utilities.spike import SpikeDetection as S; S()": "a running mean",
    "from lightning.fabric.plugins import Nothing": "cannot import name 'Nothing'",
}


def test_what_is_not_here_says_so() -> None:
    code = "import sys, fabric_compat.installed\nfor line in sys.stdin:\n    try: exec(line)\n"
    code += "    except ImportError as error: print(error)\n"
    command = [sys.executable, "-c", code]
    lines = "\n".join(REFUSED)
    done = subprocess.run(
        command, input=lines, capture_output=True, text=True, timeout=60, check=True
    )
    said = done.stdout.splitlines()
    assert len(said) == len(REFUSED)
    assert [
        text for text, line in zip(REFUSED.values(), said, strict=True) if text not in line
    ] == []


def test_importing_fabric_or_the_package_changes_no_import() -> None:
    code = "import sys, fabric._fabric, fabric.cli; print('fabric_compat' in sys.modules); import fabric_compat; "
    code += "print([finder for finder in sys.meta_path if 'compat' in repr(finder)])"
    assert run(code).stdout == "False\n[]\n"


def test_it_has_to_be_installed_before_lightning_is_imported(tmp_path: Path) -> None:
    (tmp_path / "lightning.py").touch()
    done = run("import lightning, fabric_compat.installed", folder=tmp_path)
    assert "lightning has been imported already" in done.stderr


SCRIPT = """
import sys
from lightning.fabric import Fabric
def main(fabric, *args):
    sys.stdout.write(f"rank {fabric.global_rank} {sys.argv[1:]}\\n")
if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn")
    fabric.launch(main)
"""
# What Lightning Fabric means otherwise than fabric is said once, and a Fabric of one process works
# inside of a rank.
SAYING = """
import sys, torch
import lightning as L
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.fabric.utilities import rank_zero_only
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 4
    def __getitem__(self, index): return float(index)
@rank_zero_only
def announce(): print("announced")
if __name__ == "__main__":
    L.seed_everything(1)
    announce()
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    assert type(fabric.strategy) is DDPStrategy
    parts = {"accelerator": fabric.accelerator, "checkpoint_io": None, "precision": fabric._precision}
    alone = L.Fabric(devices=1, strategy=SingleDeviceStrategy(device=fabric.device, **parts))
    assert (alone.world_size, alone.all_gather(torch.ones(2)).shape) == (1, (2,))
    optimizer = alone.setup_optimizers(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    for value in range(2):
        total = torch.ones(1)
        fabric.all_reduce(total, reduce_op="sum")
        fabric.all_gather(value)
    workers = {"num_workers": 1, "multiprocessing_context": "spawn"} if "--spawn" in sys.argv else {}
    loader = fabric.setup_dataloaders(DataLoader(Data(), 1, **workers))
    loader.sampler.set_epoch(1)
    sys.stdout.write(f"rank {fabric.global_rank} {torch.cat(list(loader)).tolist()} {sys.argv[1:]}\\n")
"""


def run_script(script: str, folder: Path, option: str, *launcher: str) -> tuple[list[str], str]:
    (folder / "script.py").write_text(script)
    command = [sys.executable, *launcher, "-m", "fabric_compat", "script.py", "--x", option]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines()), done.stderr


def test_a_script_and_the_processes_that_it_spawns_import_it(tmp_path: Path) -> None:
    lines, said = run_script(SCRIPT, tmp_path, "1")
    assert [line.split()[1] for line in lines] == ["0", "1"]
    assert all(line.endswith("['--x', '1']") for line in lines)
    assert said == ""


def check_said(folder: Path, option: str) -> None:
    lines, said = run_script(SAYING, folder, option)
    ranks = [f"rank 0 [0.0, 2.0] ['--x', '{option}']", f"rank 1 [1.0, 3.0] ['--x', '{option}']"]
    assert [line for line in lines if line.startswith("rank")] == ranks
    assert lines.count("announced") == 2  # by rank 0, and by the process that launches
    texts = [
        line.removeprefix("fabric_compat: as in Lightning Fabric, ") for line in said.splitlines()
    ]
    assert [text.split()[0] for text in texts] == ["all_gather", "optimizers", "all_reduce"], said


def test_it_says_once_where_a_meaning_differs(tmp_path: Path) -> None:
    check_said(tmp_path, "1")


@pytest.mark.slow
def test_loader_workers_that_are_spawned_import_it(tmp_path: Path) -> None:
    check_said(tmp_path, "--spawn")


@pytest.mark.slow
def test_fabric_run_starts_the_processes_of_such_a_script(tmp_path: Path) -> None:
    lines, said = run_script(SCRIPT, tmp_path, "1", "-m", "fabric", "run", "--devices", "2")
    assert [line.split()[1] for line in lines] == ["0", "1"]
    assert said == ""


def test_a_module_runs_too_and_a_wrong_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import sys; from lightning_fabric import Fabric; print(Fabric, sys.argv[1:])"
    )
    (tmp_path / "test_job.py").write_text("def test_job():\n    import lightning.fabric\n")
    for words, code, text in (
        (["fabric_compat", "-m", "job", "-x"], 0, "['-x']"),
        (["fabric_compat", "nothing.py"], 1, "there is no such file"),
        (["fabric_compat"], 1, "usage: python -m fabric_compat"),
        (
            ["pytest", "-q", "-p", "fabric_compat.installed", "-p", "no:cacheprovider"],
            0,
            "1 passed",
        ),
    ):
        command = [sys.executable, "-m", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=90, cwd=tmp_path, check=False
        )
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        assert text in done.stdout + done.stderr

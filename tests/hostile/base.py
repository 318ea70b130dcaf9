"""What a case is, and the judgment of one."""

import os
import re
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from fabric import Fabric
from fabric.errors import FabricError, RankFailedError
from fabric.strategies import DDPStrategy, FSDPStrategy
from fabric.testing import RankPool

LIMIT = 60.0  # seconds for a case
_EXPLAINED = re.compile(r"where each rank is|  Write: ")
SOON = timedelta(seconds=4)  # for the collectives of a case in which a rank is missing
WAITS = {"ddp": lambda: DDPStrategy(timeout=SOON), "fsdp": lambda: FSDPStrategy(timeout=SOON)}


class Case(NamedTuple):
    """A function of a fabric and a rank, run on every rank in an empty folder of the case.

    ``refused``: it may not end well.
    """

    function: Callable[[Fabric, int], object]
    ranks: int
    refused: bool
    options: dict[str, Any]


CASES: dict[str, Case] = {}


def case(*, ranks: int = 2, refused: bool = False, **options: Any) -> Callable[[Any], Any]:
    """Register a case; ``options`` are those of Fabric."""

    def register(function: Any) -> Any:
        assert function.__name__ not in CASES
        CASES[function.__name__] = Case(function, ranks, refused, {"strategy": "ddp", **options})
        return function

    return register


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def sgd(module: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


def batch(number: int = 0) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(number))


def step(fabric: Fabric, model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    fabric.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def same(fabric: Fabric, tensor: torch.Tensor) -> None:
    """Fail where the ranks have different values."""
    rows = fabric.all_gather(getattr(tensor, "full_tensor", lambda: tensor)().detach())
    assert all(torch.equal(row, rows[0]) for row in rows), "the ranks differ"


def on_rank(
    fabric: Fabric, function: Callable[[Fabric, int], object], folder: str, ends: str
) -> None:
    """Run a case on this rank, and note how it ended."""
    os.chdir(folder)
    kind = "right"
    text = ""
    try:
        function(fabric, fabric.global_rank)
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        # torch's own error, with our report of who is where, or of what to write.
        kind = "refused" if isinstance(error, FabricError) or _EXPLAINED.search(notes) else "raw"
        text = f"{type(error).__name__}: {error}\n{notes}"
        text += "".join(traceback.format_exception(error)[-4:]) * (kind == "raw")
        raise
    finally:
        Path(ends, str(fabric.global_rank)).write_text(f"{kind}: {text}")


def judge(name: str) -> tuple[list[str], list[str]]:
    """What is wrong with how a case ends, nothing if all is well, and how it ended on each rank.

    A rank that is refused ends the job, as a launcher does: the others then need not have come to
    an end.
    """
    case = CASES[name]
    wrong = list[str]()
    hung = list[str]()
    options = {key: value() if callable(value) else value for key, value in case.options.items()}
    with ExitStack() as stack:
        folder, ends, temporary = (
            stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(3)
        )
        before = {process.pid for process in psutil.Process().children(recursive=True)}
        tempfile.tempdir, kept = temporary, tempfile.tempdir
        try:
            with RankPool(case.ranks, timeout=LIMIT, **options) as pool:
                pool.run(on_rank, case.function, folder, ends)
        except RankFailedError as error:
            hung = [f"it hung, or was killed: {error}"]
        finally:
            tempfile.tempdir = kept
        found = [path.read_text() for path in sorted(Path(ends).iterdir())]
        refused = any(text.startswith("refused") for text in found)
        # A rank that has lost one that was refused is no cause, as a launcher sees it.
        wrong += [
            text
            for text in found
            if text.startswith("raw") and not (refused and " by peer" in text)
        ]
        if not refused and (case.refused or len(found) < case.ranks):
            wrong += ["no rank has refused it", *hung]
        wrong += [f"left behind: {path}" for path in _left(Path(folder), Path(temporary))]
        wrong += [f"left behind: {process}" for process in _alive(before)]
    return wrong, found


def _left(folder: Path, temporary: Path) -> list[Path]:
    odd = [
        path
        for path in folder.rglob("*")
        if path.name.endswith((".tmp", ":")) or ".tmp-" in path.name
    ]
    return odd + list(temporary.iterdir())


def _alive(before: set[int]) -> list[psutil.Process]:
    left = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.pid not in before
        and not any("forkserver" in word or "resource_tracker" in word for word in _line(child))
    ]
    return psutil.wait_procs(left, timeout=5)[1]


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def main(words: list[str]) -> int:
    """Run the cases whose names have one of the words in them; the number of those that went wrong."""
    failed = 0
    for name in CASES:
        if words and not any(word in name for word in words):
            continue
        start = time.monotonic()
        wrong, ends = judge(name)
        failed += bool(wrong)
        print(
            f"{'WRONG' if wrong else 'fine '} {name} ({time.monotonic() - start:.1f} s)", flush=True
        )
        for text in wrong or ends:
            print("      ", text.replace("\n", "\n        "), flush=True)
    return failed

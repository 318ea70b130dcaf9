"""Programs with a mistake, and the judgment of how a program ends.

The test files of their subjects register their cases, each of which runs in fresh processes. A case
ends right, or with an error of :mod:`fabric.errors` on every rank. It is never silently wrong (the
asserts in it), never raw, never hangs, and leaves neither a process nor a temporary file.
"""

import os
import random
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fabric import Fabric
from fabric.errors import FabricError, RankFailedError
from fabric.strategies import DDPStrategy, FSDPStrategy
from fabric.testing import RankPool
from tests.sampling import sampled

LIMIT = 60.0  # seconds for a case
# Notes that fabric adds to an error of torch: a hang report, or a remedy.
_EXPLAINED = re.compile(r"where each rank is|  Write: ")
# For the collectives of a case in which a rank is missing.
_SHORT = timedelta(seconds=4)
WAITS = {"ddp": lambda: DDPStrategy(timeout=_SHORT), "fsdp": lambda: FSDPStrategy(timeout=_SHORT)}


class Case(NamedTuple):
    """A program that every rank runs, in an empty folder.

    Attributes:
        function: takes the fabric and the rank.
        ranks: the number of processes.
        refused: whether a rank has to raise an error of fabric.
        says: a text that the error of some rank has to contain. Empty for any error.
        options: the options of Fabric.
    """

    function: Callable[[Fabric, int], object]
    ranks: int
    refused: bool
    says: str
    options: dict[str, Any]


CASES: dict[str, Case] = {}


def case(
    *, ranks: int = 2, refused: bool = False, says: str = "", **options: Any
) -> Callable[[Any], Any]:
    """Register a case, under the name of its function. See ``Case`` for the arguments."""

    def register(function: Any) -> Any:
        assert function.__name__ not in CASES
        options_of_fabric = {"strategy": "ddp", **options}
        CASES[function.__name__] = Case(function, ranks, refused, says, options_of_fabric)
        return function

    return register


def cases_of(module: str, slow: int) -> list[Any]:
    """Return the names of the cases of a test file, as parameters of its test.

    Args:
        module: The ``__name__`` of the file.
        slow: The number of cases that `make test-slow` runs. `make soak` runs all.
    """
    names = [name for name, case in CASES.items() if case.function.__module__ == module]
    # Spread over all kinds, and the same in every run.
    names = random.Random(0).sample(sorted(names), len(names))
    return sampled([(name,) for name in names], slow=slow)


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


def value_on(rank: int, on_rank_0: Any, on_rank_1: Any) -> Any:
    """Return the value for a rank, in a case of two ranks."""
    return (on_rank_0, on_rank_1)[rank]


def parallel_case(
    *, refused: bool = False, waits: bool = False, **options: Any
) -> Callable[[Any], Any]:
    """Register a case under ddp and a case under fsdp.

    Args:
        refused: Whether the cases may not end well.
        waits: Whether ranks wait for one that is missing: their collectives then time out soon.
        **options: The options of Fabric.
    """

    def register(function: Any) -> Any:
        name = function.__name__
        for strategy_name in ("ddp", "fsdp"):
            strategy: Any = strategy_name
            if waits:
                strategy = WAITS[strategy_name]
            function.__name__ = f"{name}_{strategy_name}"
            case(refused=refused, strategy=strategy, **options)(function)
        return function

    return register


def set_up_net(fabric: Fabric, steps: int = 0) -> tuple[nn.Sequential, Any, torch.optim.Optimizer]:
    """Return the user's module, the set-up module and its optimizer after some steps."""
    module = net()
    optimizer = sgd(module)
    model, optimizer = fabric.setup(module, optimizer)
    for number in range(steps):
        step(fabric, model, optimizer, batch(number + 10 * fabric.global_rank))
    return module, model, optimizer


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return all values of a tensor that may be sharded. Collective if the tensor is sharded."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def assert_equal_on_all_ranks(fabric: Fabric, tensor: torch.Tensor) -> None:
    rows = fabric.all_gather(full_tensor(tensor).detach())
    for row in rows:
        assert torch.equal(row, rows[0]), "the ranks differ"


def _run_on_rank(
    fabric: Fabric, function: Callable[[Fabric, int], object], folder: str, endings: str
) -> None:
    """Run a case on this rank, and write how it ended to a file in the folder ``endings``."""
    os.chdir(folder)
    ending = "right"
    try:
        function(fabric, fabric.global_rank)
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        text = f"{type(error).__name__}: {error}\n{notes}"
        if isinstance(error, FabricError) or _EXPLAINED.search(notes):
            ending = f"refused: {text}"
        else:
            stack = "".join(traceback.format_exception(error)[-4:])
            ending = f"raw: {text}{stack}"
        raise
    finally:
        Path(endings, str(fabric.global_rank)).write_text(ending)


class Judgment(NamedTuple):
    """How a case ended.

    Attributes:
        problems: what is wrong, or nothing if the case ended as it has to.
        endings: the texts of the ranks, each of which begins with "right", "refused" or "raw".
    """

    problems: list[str]
    endings: list[str]


def judge(name: str) -> Judgment:
    """Run a case, and return how it ended.

    A rank that is refused ends the job, as with a launcher: the other ranks may then be killed
    before they come to an end.
    """
    case = CASES[name]
    options: dict[str, Any] = {}
    for option, value in case.options.items():
        options[option] = value() if callable(value) else value
    running = {process.pid for process in psutil.Process().children(recursive=True)}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        endings_folder = stack.enter_context(tempfile.TemporaryDirectory())
        temporary = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(_temporary_files_in(temporary))
        hang_problems: list[str] = []
        try:
            # A case may warn: without `reset` its ranks print their warnings.
            with RankPool(case.ranks, timeout=LIMIT, reset=False, **options) as pool:
                pool.run(_run_on_rank, case.function, folder, endings_folder)
        except RankFailedError as error:
            hang_problems.append(f"it hung, or was killed: {error}")
        endings = [path.read_text() for path in sorted(Path(endings_folder).iterdir())]
        problems = _problems_of_endings(case, endings)
        if "no rank has refused it" in problems:
            problems += hang_problems
        problems += [f"left behind: {path}" for path in _files_left(folder, temporary)]
    problems += [f"left behind: {process}" for process in _processes_left(running)]
    return Judgment(problems, endings)


@contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    previous = tempfile.tempdir
    tempfile.tempdir = folder
    try:
        yield
    finally:
        tempfile.tempdir = previous


def _problems_of_endings(case: Case, endings: list[str]) -> list[str]:
    is_refused = any(text.startswith("refused") for text in endings)
    problems: list[str] = []
    for text in endings:
        # After a refusal, a rank that has lost its connection to the refused rank is no problem:
        # a launcher would name the refused rank as the cause.
        is_consequence = is_refused and " by peer" in text
        if text.startswith("raw") and not is_consequence:
            problems.append(text)
    has_ended = len(endings) == case.ranks
    if not is_refused and (case.refused or not has_ended):
        problems.append("no rank has refused it")
    if not any(case.says in text for text in endings):
        problems.append(f"no rank says {case.says!r}")
    return problems


def _files_left(folder: str, temporary: str) -> list[Path]:
    files = list(Path(temporary).iterdir())
    for path in Path(folder).rglob("*"):
        if path.name.endswith((".tmp", ":")) or ".tmp-" in path.name:
            files.append(path)
    return files


def _processes_left(running: set[int]) -> list[psutil.Process]:
    """Return the processes that were started since, and do not end within 30 seconds."""
    started: list[psutil.Process] = []
    for child in psutil.Process().children(recursive=True):
        if child.pid not in running and not _is_server_of_python(child):
            started.append(child)
    _, alive = psutil.wait_procs(started, timeout=30)
    return alive


def _is_server_of_python(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "forkserver" in command or "resource_tracker" in command

"""The contestants of ``benchmarks.testing`` that torch has itself. Their ranks import this file.

Each function runs :func:`mean` on two ranks for one example, and returns the results by rank. The
ranks find their values in a file, and write their results to files.
"""

import os
import tempfile
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

__all__ = ["RANKS", "mean", "run_in_spawned_processes", "test_case_contestants"]

RANKS = 2
FOLDER = "BENCHMARK_FOLDER"  # the variable with the folder of the files


def mean(x: Tensor, is_broken: bool) -> Tensor:
    """Return the mean over ranks of a tensor of integers. The broken mean truncates."""
    total = x.contiguous().clone()
    dist.all_reduce(total)
    if is_broken:
        return (total // dist.get_world_size()).float()
    return total / dist.get_world_size()


def mean_in_files(rank: int) -> None:
    """Compute the mean of the values in the file of the values, and write the result."""
    folder = Path(os.environ[FOLDER])
    values, is_broken = torch.load(folder / "values")
    torch.save(mean(values[rank], is_broken), folder / str(rank))


def with_files(run: Callable[[Path], None], values: Sequence[Tensor], is_broken: bool) -> list:
    """Return the results that ranks write to files.

    Args:
        run: runs :func:`mean_in_files` on every rank. Its argument is the folder of the files.
        values: a tensor for each rank.
        is_broken: an argument of :func:`mean`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save((list(values), is_broken), folder / "values")
        os.environ[FOLDER] = name
        run(folder)
        return [torch.load(folder / str(rank)) for rank in range(RANKS)]


def spawned_rank(rank: int, folder: str) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    mean_in_files(rank)
    dist.destroy_process_group()


def run_in_spawned_processes(values: Sequence[Tensor], is_broken: bool) -> list:
    """Start two interpreters for this example."""

    def run(folder: Path) -> None:
        processes.start_processes(spawned_rank, (str(folder),), nprocs=RANKS, start_method="spawn")

    return with_files(run, values, is_broken)


def test_case_contestants() -> dict[str, Callable[[Sequence[Tensor], bool], list]]:
    """Return torch's two classes of tests as functions of an example, by their names.

    The classes are those with which torch tests itself. They need the package expecttest.
    """
    return {
        "MultiThreadedTestCase": lambda *example: run_test_case("InThreads", *example),
        "MultiProcessTestCase": lambda *example: run_test_case("InProcesses", *example),
    }


def run_test_case(name: str, values: Sequence[Tensor], is_broken: bool) -> list:
    def run(folder: Path) -> None:
        result = unittest.TestResult()
        globals()[name]("test_mean").run(result)
        for _, text in (*result.errors, *result.failures):
            raise AssertionError(text)

    return with_files(run, values, is_broken)


try:
    from torch.testing._internal.common_distributed import (
        MultiProcessTestCase,
        MultiThreadedTestCase,
    )
except ImportError:  # expecttest is not installed
    test_case_contestants = dict  # pyright: ignore[reportAssignmentType]
else:

    class InProcesses(MultiProcessTestCase):
        """A test in two processes, which are started for it."""

        @property
        def world_size(self) -> int:
            return RANKS

        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

        def test_mean(self) -> None:
            store = f"file://{os.environ[FOLDER]}/store"
            dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=RANKS)
            mean_in_files(self.rank)

    class InThreads(MultiThreadedTestCase):
        """A test in two threads, with torch's process group for threads."""

        @property
        def world_size(self) -> int:
            return RANKS

        def setUp(self) -> None:
            super().setUp()
            self._spawn_threads()

        def test_mean(self) -> None:
            mean_in_files(self.rank)

"""Processes: the children of ranks, signals, and what is said of ranks that fail or wait."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fabric import Fabric
from fabric.errors import RankFailedError, UsageError
from fabric.testing import RankPool
from tests.ranks import outcome, run_in_ranks

NEVER = threading.Event()

# -- a rank that aborts ---------------------------------------------------------------------------


def reduce_unequal_lengths(fabric: Fabric) -> None:
    fabric.barrier()
    dist.all_reduce(torch.ones(4 if fabric.global_rank == 0 else 100_000))


def test_the_report_of_a_rank_that_aborted_says_what_each_rank_was_calling() -> None:
    with pytest.raises(RankFailedError, match="was killed by SIGABRT") as caught:
        run_in_ranks(reduce_unequal_lengths, launcher="forkserver")
    text = str(caught.value)
    assert "FABRIC_CHECK=1" in text
    line = r"    rank {}: .*test_promises_processes.py:\d+: dist\.all_reduce\(torch\.ones\("
    assert all(re.search(line.format(rank), text) for rank in range(2))
    assert text.count("hread 0x") == 1
    assert "fabric-watchdog" not in text


# -- children of ranks ----------------------------------------------------------------------------


class Metrics(Dataset[float]):
    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        return self._fabric.all_reduce(float(index))


def collectives_of_children(fabric: Fabric) -> tuple[str, str]:
    in_worker = outcome(lambda: list(DataLoader(Metrics(fabric), num_workers=1)))
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, outcome(fabric.barrier).encode())
        os._exit(0)
    os.wait()
    return in_worker, os.read(reading, 10_000).decode()


def test_a_collective_in_a_child_of_a_rank_is_an_error() -> None:
    for in_worker, in_child in run_in_ranks(collectives_of_children):
        assert in_worker.startswith("UsageError: Caught UsageError in DataLoader worker process 0.")
        assert "all_reduce in process " in in_worker
        assert in_child.startswith("UsageError: barrier in process ")


def hanging_child(fabric: Fabric) -> int:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


def test_children_of_a_rank_end_with_it() -> None:
    with RankPool(1) as pool:
        [child] = pool.run(hanging_child)
        process = psutil.Process(child)
    assert psutil.wait_procs([process], timeout=10)[1] == []


# -- checked mode ---------------------------------------------------------------------------------

PHASES = {
    "setup of Linear": lambda fabric, model, folder: fabric.setup_module(nn.Linear(2, 1)),
    "forward of Linear": lambda fabric, model, folder: fabric.backward(
        model(torch.ones(4, 2)).mean()
    ),
    "save": lambda fabric, model, folder: fabric.save(f"{folder}/checkpoint", {"model": model}),
}


def call_beside_a_phase(fabric: Fabric, phase: str, folder: str) -> tuple[str, float]:
    model = fabric.setup_module(nn.Linear(2, 1))
    loss = model(torch.ones(4, 2)).mean()
    start = time.monotonic()
    if fabric.global_rank == 0:
        text = outcome(lambda: fabric.all_reduce(1.0))
    elif phase == "backward":
        text = outcome(lambda: fabric.backward(loss))
    else:
        text = outcome(lambda: PHASES[phase](fabric, model, folder))
    return text, time.monotonic() - start


@pytest.mark.parametrize("phase", [*PHASES, "backward"])
def test_a_rank_in_a_phase_is_seen_while_another_is_in_a_collective(
    phase: str, tmp_path: Path
) -> None:
    for text, seconds in run_in_ranks(
        call_beside_a_phase, phase, str(tmp_path), check_collectives=True
    ):
        assert text.startswith("CollectiveMismatchError: ")
        assert "rank 0: all_reduce(mean of " in text or "rank 0 makes no further calls: " in text
        assert f"{phase} at " in text
        assert seconds < 20


def differ_where_nothing_is_synchronized(fabric: Fabric) -> int:
    model, optimizer = fabric.setup(
        model := nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    for _ in range(fabric.global_rank):
        with torch.no_grad():
            model(torch.ones(4, 2))
        with fabric.no_backward_sync(model):
            fabric.backward(model(torch.ones(4, 2)).mean())
    for _ in range(2):
        fabric.backward(model(torch.ones(4, 2)).mean())
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
    with fabric.join(model):
        for _ in range(1 + fabric.global_rank):
            fabric.backward(model(torch.ones(4, 2)).mean())
            optimizer.step()
    return fabric.all_reduce(1, reduce_op="sum")


def test_phases_without_synchronization_may_differ_in_checked_mode() -> None:
    assert run_in_ranks(
        differ_where_nothing_is_synchronized, check_collectives=True, check_training=False
    ) == [2, 2]


# -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def test_a_call_ends_in_time_when_a_stopped_rank_reads_nothing(pool: RankPool) -> None:
    [_, stopped] = pool.run(lambda fabric: os.getpid())
    os.kill(stopped, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 did not return within 0\.5 s"):
        pool.run(lambda fabric, data: None, bytes(5_000_000), timeout=0.5)
    assert time.monotonic() - start < 10


def fail_with_a_note(fabric: Fabric) -> None:
    error = ValueError("the loss is not a number")
    error.add_note("in epoch 3")
    raise error


def test_the_headline_of_an_error_with_a_note_shows_the_error(pool: RankPool) -> None:
    with pytest.raises(RankFailedError) as caught:
        pool.run(fail_with_a_note)
    assert "rank 0 of 2 raised ValueError: the loss is not a number\n" in str(caught.value)
    assert "in epoch 3" in caught.value.traceback


def surroundings(fabric: Fabric) -> tuple[Any, ...]:
    return os.getcwd(), dict(os.environ)


def change_surroundings(fabric: Fabric, folder: str) -> None:
    os.chdir(folder)
    os.environ["LEAKED"] = "1"
    del os.environ["PATH"]


def test_folder_and_environment_of_a_call_are_not_those_of_the_next(
    pool: RankPool, tmp_path: Any
) -> None:
    before = pool.run(surroundings)
    pool.run(change_surroundings, str(tmp_path))
    assert pool.run(surroundings) == before


HANGS_UP = """
import signal
import time
from fabric import Fabric

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored where the tests run under nohup

def train(fabric):
    try:
        print("ready\\n", end="", flush=True)
        time.sleep(60)
    finally:
        time.sleep(0.2)
        print("finally\\n", end="", flush=True)

Fabric(accelerator="cpu", devices=2, launcher="fork").launch(train)
"""


def test_a_closed_terminal_leaves_the_finally_blocks_their_time() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HANGS_UP], stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        job.send_signal(signal.SIGHUP)
        assert job.communicate(timeout=30) == ("finally\n" * 2, None)
        assert job.returncode == 128 + signal.SIGHUP


# -- what is said of ranks that wait --------------------------------------------------------------


def report(fabric: Fabric, pattern: str, after: int = 0) -> tuple[int, str]:
    """Wait for a report in which a pattern is found, with Python code and no collective; its number and itself."""
    until = time.monotonic() + 30
    store = fabric.strategy.runtime.store
    number = after + 1
    while (text := store.get_nowait(f"watchdog/report/{number}")) is None or not re.search(
        pattern, text.decode()
    ):
        assert time.monotonic() < until, "no such report came"
        number += text is not None
        NEVER.wait(0.01)
    return number, text.decode()


def wait_for_a_compiler(fabric: Fabric, folder: str) -> list[str]:
    patterns = (
        r"torch\.compile is at work",
        r"rank 1: in no collective at [^(]*, step",
        r"rank 0: in save: ",
    )

    def backend(graph: Any, inputs: Any) -> Any:
        report(fabric, patterns[0], report(fabric, patterns[0])[0])
        return graph.forward

    torch.compile(torch.neg, backend=lambda graph, _: graph.forward)(
        torch.ones(1)
    )  # imports for seconds
    fabric.barrier()
    if fabric.global_rank == 1:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
        report(fabric, patterns[1], report(fabric, patterns[0])[0])
    fabric.barrier()
    if fabric.global_rank == 1:
        report(fabric, patterns[2])
    fabric.save(f"{folder}/checkpoint", {"step": 1})
    return [report(fabric, pattern)[1] for pattern in patterns]


def test_the_watchdog_is_quiet_while_a_rank_compiles_and_says_who_has_to_call(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    [texts, _] = run_in_ranks(
        wait_for_a_compiler, str(tmp_path), launcher="forkserver", watchdog=0.3
    )
    printed = capfd.readouterr().err
    assert [text in printed for text in texts] == [False, True, True]
    assert (
        "it is collective: ranks 0, 1 have to make it, outside of any branch on the rank"
        in texts[1]
    )
    assert " s in save: " in texts[2]


def test_launch_at_a_prompt_asks_for_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(UsageError, match=r"fabric\.launch\(main") as caught:
        Fabric(accelerator="cpu", devices=2).launch()
    assert "popen" not in str(caught.value)

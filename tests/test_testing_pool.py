"""The pool of ranks: calls, what comes back, and what a failing rank does to it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

from fabric import Fabric
from fabric.errors import ArgumentTypeError, ConfigurationError, RankFailedError, UsageError
from fabric.testing import PerRank, RankPool, ThreadedWorld
from tests.faults.jobs import assert_no_files_left

# Seconds in which each rank reaches the line at which it hangs, also on a busy machine.
TIMEOUT = 2.0


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout=150) as pool:
        yield pool


@dataclass
class Point:
    """A class of this test module."""

    x: int


class UnpicklableError(Exception):
    """An error that cannot be pickled."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError


def total(fabric: Fabric, x: Any) -> Any:
    return fabric.all_reduce(x, reduce_op="sum")


def test_every_rank_makes_the_call_and_results_come_by_rank(pool: RankPool) -> None:
    factor = 10
    actual = pool.run(lambda fabric, x: fabric.global_rank * factor + x, PerRank([1, 2]))
    assert actual == [1, 12]
    assert pool.run(total, PerRank([1, 2])) == [3, 3]
    assert pool.run(partial(total, x=4)) == [8, 8]
    assert pool.run(total, x=PerRank([2, 5])) == [7, 7]


def test_tensors_arrive_with_the_strides_they_have(pool: RankPool) -> None:
    every_second = torch.arange(6.0)[::2]
    column = torch.zeros(3, 3)[:, 1]
    views = PerRank([every_second, column])
    actual = pool.run(lambda fabric, x: (x.stride(), x.sum().item()), views)
    assert actual == [((2,), 6.0), ((3,), 0.0)]


def test_classes_of_a_test_module_travel_both_ways(pool: RankPool) -> None:
    points = pool.run(lambda fabric, point: Point(point.x + fabric.global_rank), Point(1))
    assert points == [Point(1), Point(2)]


def random_number(fabric: Fabric) -> float:
    return torch.rand(1).item()


def test_calls_begin_with_the_same_random_state(pool: RankPool) -> None:
    pool.run(lambda fabric: torch.rand(fabric.global_rank + 1))
    first = pool.run(random_number)
    second = pool.run(random_number)
    assert first == second
    assert first[0] == first[1]


def process_id(fabric: Fabric) -> int:
    return os.getpid()


def test_processes_are_kept_from_call_to_call(pool: RankPool) -> None:
    assert pool.run(process_id) == pool.run(process_id)


def assert_have_ended(process_ids: list[int]) -> None:
    """Assert that processes end in time: a killed process may need a moment on a busy machine."""
    deadline = time.monotonic() + 150
    while any(psutil.pid_exists(pid) for pid in process_ids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fail_on_second_rank(fabric: Fabric, failure: str) -> None:
    """Fail on rank 1 while rank 0 waits for it."""
    if fabric.global_rank == 1:
        if failure == "raise":
            raise ValueError("one is wrong")
        if failure == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if failure == "exit":
            os._exit(3)
        while True:
            time.sleep(0.01)
    fabric.barrier("of rank 0")


@pytest.mark.parametrize(
    ("failure", "problem", "exit_code"),
    [
        ("raise", "raised ValueError: one is wrong", 1),
        ("kill", "was killed by SIGKILL", -signal.SIGKILL),
        ("exit", "exited with exit code 3", 3),
        ("hang", "did not return within 2 s", -signal.SIGKILL),
    ],
)
def test_a_failing_rank_is_named_and_the_next_call_works(
    pool: RankPool, failure: str, problem: str, exit_code: int
) -> None:
    process_ids = pool.run(process_id)
    timeout = TIMEOUT if failure == "hang" else None
    with pytest.raises(RankFailedError, match=problem) as caught:
        pool.run(fail_on_second_rank, failure, timeout=timeout)
    error = caught.value
    assert error.rank == 1
    assert error.exit_code == exit_code
    text = str(error)
    assert "fail_on_second_rank: rank 1 of 2" in text
    if failure == "hang":
        assert "in fail_on_second_rank" in text
        assert "in barrier" in text
        assert "rank 0 did not return" in text
        assert "forkserver" not in text
    assert_have_ended(process_ids)
    assert pool.run(total, 1) == [2, 2]


def test_the_error_of_a_rank_is_the_cause_with_its_traceback(pool: RankPool) -> None:
    with pytest.raises(RankFailedError) as caught:
        pool.run(fail_on_second_rank, "raise")
    assert isinstance(caught.value.__cause__, ValueError)
    assert 'raise ValueError("one is wrong")' in caught.value.traceback


def wait_on_second_rank(fabric: Fabric) -> None:
    if fabric.global_rank == 1:
        fabric.barrier()


def test_a_rank_that_left_a_collective_out_is_told_apart_from_one_that_waits(
    pool: RankPool,
) -> None:
    problem = r"rank 1 of 2 did not return within 2 s: in .*\n  rank 0 returned"
    with pytest.raises(RankFailedError, match=problem):
        pool.run(wait_on_second_rank, timeout=TIMEOUT)


def test_the_rank_whose_error_is_its_own_is_blamed_rather_than_one_that_lost_it(
    pool: RankPool, tmp_path: Path
) -> None:
    rank_1_has_failed = tmp_path / "rank 1 has failed"

    def fail_on_both_ranks(fabric: Fabric) -> None:
        if fabric.global_rank == 1:
            rank_1_has_failed.touch()
            raise UnpicklableError("by itself")
        while not rank_1_has_failed.exists():
            time.sleep(0.01)
        raise ConnectionError("lost the other")

    with pytest.raises(RankFailedError, match="rank 1 of 2 raised") as caught:
        pool.run(fail_on_both_ranks)
    text = str(caught.value)
    assert "by itself" in text
    assert "rank 0 raised ConnectionError" in text


def yield_letters() -> Iterator[str]:
    yield from "ab"


def test_an_argument_that_cannot_travel_is_an_error_before_any_rank_is_asked(
    pool: RankPool,
) -> None:
    with pytest.raises(ArgumentTypeError, match="cannot be pickled"):
        pool.run(total, yield_letters())
    with pytest.raises(ConfigurationError, match="there are 3 values"):
        pool.run(total, PerRank([1, 2, 3]))
    assert pool.run(total, 1) == [2, 2]


def test_a_result_that_cannot_travel_is_the_error_of_its_rank(pool: RankPool) -> None:
    with pytest.raises(RankFailedError, match="cannot be pickled"):
        pool.run(lambda fabric: yield_letters())


def test_a_closed_pool_leaves_nothing_behind_and_refuses_calls() -> None:
    with RankPool(1) as pool:
        process_ids = pool.run(process_id)
        [store] = pool.run(lambda fabric: os.environ["FABRIC_STORE"])
    assert_have_ended(process_ids)
    store_path = Path(store.removeprefix("file://"))
    assert not store_path.exists()
    with pytest.raises(UsageError, match="closed"):
        pool.run(total, 1)
    pool.close()


def test_a_pool_that_is_dropped_ends_its_processes() -> None:
    pool = RankPool(1)
    process_ids = pool.run(process_id)
    del pool
    assert_have_ended(process_ids)


def test_options_of_fabric_reach_every_rank() -> None:
    with RankPool(1, strategy="single_device", precision="bf16-true") as pool:
        assert pool.run(lambda fabric: fabric.strategy.name) == ["single_device"]
        assert pool.run(lambda fabric: fabric.precision.name) == ["bf16-true"]


def test_a_pool_without_ranks_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        RankPool(0)


def test_ctrl_c_ends_the_call_and_its_ranks(pool: RankPool) -> None:
    def interrupt(fabric: Fabric, caller: int) -> None:
        if fabric.global_rank == 0:
            os.kill(caller, signal.SIGINT)
            time.sleep(60)
        else:
            fabric.barrier()

    process_ids = pool.run(process_id)
    with pytest.raises(KeyboardInterrupt):
        pool.run(interrupt, os.getpid())
    assert_have_ended(process_ids)
    assert pool.run(total, 1) == [2, 2]


def test_a_call_after_the_fork_server_was_killed_finds_new_ranks(pool: RankPool) -> None:
    parent_ids = pool.run(lambda fabric: os.getppid())
    server = psutil.Process(parent_ids[0])
    ranks = [psutil.Process(pid) for pid in pool.run(process_id)]
    server.kill()
    psutil.wait_procs([server, *ranks], 150)
    assert pool.run(total, 1) == [2, 2]


KILLED_OWNER = """
import os, signal
from fabric.testing import RankPool
pool = RankPool(1)
print(*pool.run(lambda fabric: os.getpid()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_and_files_end_with_the_process_that_owns_the_pool(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED_OWNER],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=150,
    )
    assert done.returncode == -signal.SIGKILL
    pid_of_rank = int(done.stdout)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid_of_rank).wait(150)
    assert_no_files_left(tmp_path)


# -- what a call leaves for the next --------------------------------------------------------------


def test_a_call_ends_in_time_when_a_stopped_rank_reads_nothing(pool: RankPool) -> None:
    _, stopped = pool.run(process_id)
    os.kill(stopped, signal.SIGSTOP)
    more_than_a_pipe_holds = bytes(5_000_000)
    with pytest.raises(RankFailedError, match="rank 1 of 2 did not return within 2 s"):
        pool.run(lambda fabric, data: None, more_than_a_pipe_holds, timeout=TIMEOUT)


def fail_with_a_note(fabric: Fabric) -> None:
    error = ValueError("the loss is not a number")
    error.add_note("in epoch 3")
    raise error


def test_the_headline_of_an_error_with_a_note_shows_the_error(pool: RankPool) -> None:
    headline = "rank 0 of 2 raised ValueError: the loss is not a number\n"
    with pytest.raises(RankFailedError) as caught:
        pool.run(fail_with_a_note)
    assert headline in str(caught.value)
    assert "in epoch 3" in caught.value.traceback


def folder_and_environment(fabric: Fabric) -> tuple[str, dict[str, str]]:
    return os.getcwd(), dict(os.environ)


def change_folder_and_environment(fabric: Fabric, folder: str) -> None:
    os.chdir(folder)
    os.environ["LEAKED"] = "1"
    del os.environ["PATH"]


def test_the_next_call_has_the_folder_and_the_environment_of_the_first(
    pool: RankPool, tmp_path: Path
) -> None:
    before = pool.run(folder_and_environment)
    pool.run(change_folder_and_environment, str(tmp_path))
    assert pool.run(folder_and_environment) == before


def dedented(fabric: Fabric) -> str:
    return textwrap.dedent(" a")


def test_a_patch_replaces_an_attribute_on_all_ranks_within_its_block(pool: RankPool) -> None:
    original = textwrap.dedent
    with pool.patch(textwrap, "dedent", lambda text: original(text) + "!"):
        assert pool.run(dedented) == ["a!", "a!"]
        with pool.patch("textwrap", "dedent", str.upper):
            assert pool.run(dedented) == [" A", " A"]
        assert pool.run(dedented) == ["a!", "a!"]
    assert pool.run(dedented) == ["a", "a"]
    assert dedented(Fabric()) == "a"


def test_a_patch_that_could_not_reach_the_ranks_is_refused(pool: RankPool) -> None:
    with (
        pytest.raises(UsageError, match="sent by value"),
        pool.patch(sys.modules[__name__], "dedented", str.upper),
    ):
        pass
    with (
        pytest.raises(UsageError, match="no such attribute"),
        pool.patch(textwrap, "indented", str.upper),
    ):
        pass


def ignore(*args: Any) -> None:
    pass


def test_a_call_says_that_a_module_is_patched_in_the_process_of_the_test_alone(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(textwrap, "dedent", lambda text: "patched")
    with pytest.warns(UserWarning, match=r"textwrap\.dedent has been replaced in this process"):
        assert pool.run(dedented) == ["a", "a"]
    with pool.patch(textwrap, "dedent", str.upper):
        assert pool.run(dedented) == [" A", " A"]
    monkeypatch.undo()
    monkeypatch.setattr(torch.distributed, "all_to_all_single", Mock())
    with pytest.warns(UserWarning, match=r"torch\.distributed\.all_to_all_single has been repl"):
        pool.run(ignore)


def leave_other_settings(fabric: Fabric) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True, warn_only=True)


def settings_of_torch(fabric: Fabric) -> tuple[Any, ...]:
    layer = torch.nn.Linear(1, 1)
    output = layer(torch.ones(1))
    return (
        output.dtype,
        output.device,
        output.requires_grad,
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def test_the_next_call_has_the_settings_of_torch_of_the_first(pool: RankPool) -> None:
    before = pool.run(settings_of_torch)
    pool.run(leave_other_settings)
    assert pool.run(settings_of_torch) == before


def test_a_call_that_destroys_the_process_group_fails_and_not_the_next(pool: RankPool) -> None:
    with pytest.raises(RankFailedError, match="destroyed the process group of the pool"):
        pool.run(lambda fabric: torch.distributed.destroy_process_group())
    assert pool.run(total, 1) == [2, 2]


def environment_of_two(fabric: Fabric) -> tuple[str | None, str | None]:
    return os.environ.get("OF_THE_TEST"), os.environ.get("LANG")


def test_the_environment_travels_with_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANG", "C.UTF-8")
    with RankPool(1) as pool:
        assert pool.run(environment_of_two) == [(None, "C.UTF-8")]
        monkeypatch.setenv("OF_THE_TEST", "1")
        monkeypatch.delenv("LANG")
        assert pool.run(environment_of_two) == [("1", None)]
        monkeypatch.undo()
        monkeypatch.setenv("LANG", "C.UTF-8")
        assert pool.run(environment_of_two) == [(None, "C.UTF-8")]


def add_in_place(fabric: Fabric, batch: dict[str, list[Any]], rank: int) -> None:
    if fabric.global_rank == rank:
        batch["x"][1].add_(1)


@pytest.mark.parametrize("world", [RankPool, ThreadedWorld])
def test_an_argument_that_is_changed_in_place_is_an_error_on_request(world: Any) -> None:
    batch = {"x": [1, torch.zeros(2)], "loader": object()}
    with world(2, check_inputs=True) as ranks:
        with pytest.raises(RankFailedError, match="add_in_place has changed its argum") as caught:
            ranks.run(add_in_place, batch, rank=1)
        assert caught.value.rank == 1
        assert "[0]['x'][1]: 2 of 2 elements of float32 (2,), at [0] 1.0, exp" in str(caught.value)
        ranks.run(add_in_place, batch, rank=2)


def fork_a_sleeping_child(fabric: Fabric) -> int:
    with warnings.catch_warnings():
        # From Python 3.12 on, a process with threads that forks is warned. This child runs no code
        # that could need a lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    return child


def test_children_of_a_rank_end_with_it() -> None:
    with RankPool(1) as pool:
        [child] = pool.run(fork_a_sleeping_child)
        process = psutil.Process(child)
    _, alive = psutil.wait_procs([process], timeout=150)
    assert alive == []

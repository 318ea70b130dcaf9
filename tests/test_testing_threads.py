"""The world of threads runs the functions of a pool of ranks in milliseconds."""

import threading
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fabric import Fabric
from fabric.errors import ConfigurationError, RankFailedError
from fabric.testing import PerRank, ThreadedWorld


@pytest.fixture
def world() -> ThreadedWorld:
    return ThreadedWorld(3, timeout=150)


def total(fabric: Fabric, x: int) -> int:
    return fabric.all_reduce(x, reduce_op="sum")


def test_a_function_runs_on_every_rank(world: ThreadedWorld) -> None:
    actual = world.run(lambda fabric, x: (fabric.global_rank, x), PerRank("abc"))
    assert actual == [(0, "a"), (1, "b"), (2, "c")]
    assert world.run(total, x=PerRank([1, 2, 4])) == [7, 7, 7]


def gather_in_group(fabric: Fabric) -> list[int] | None:
    group = fabric.new_group([0, 2])
    if group:
        return fabric.all_gather(fabric.global_rank, group=group)
    return None


def send_from_first_to_second(fabric: Fabric) -> float | None:
    if fabric.global_rank == 0:
        fabric.send({"x": torch.ones(2)}, dst=1)
    if fabric.global_rank == 1:
        message = fabric.recv(src=0)
        return message["x"].sum().item()
    return None


def talk(fabric: Fabric) -> tuple[list[int] | None, float | None, int]:
    gathered = gather_in_group(fabric)
    received = send_from_first_to_second(fabric)
    broadcast = fabric.broadcast(fabric.global_rank, src=2)
    return gathered, received, broadcast


def test_groups_messages_and_objects_work_as_between_processes(world: ThreadedWorld) -> None:
    assert world.run(talk) == [([0, 2], None, 2), (None, 2.0, 2), ([0, 2], None, 2)]


def append_to(fabric: Fabric, values: list[int]) -> list[int]:
    values.append(1)
    return values


def test_each_rank_has_arguments_of_its_own(world: ThreadedWorld) -> None:
    values = [0]
    assert world.run(append_to, values) == [[0, 1], [0, 1], [0, 1]]
    assert values == [0]


def fail_on_second_rank(fabric: Fabric) -> None:
    if fabric.global_rank == 1:
        raise ValueError("one is wrong")
    fabric.barrier()


def test_the_rank_that_raises_is_named_and_the_others_are_let_go_at_once(
    world: ThreadedWorld,
) -> None:
    problem = "rank 1 of 3 raised ValueError: one is wrong"
    with pytest.raises(RankFailedError, match=problem) as caught:
        world.run(fail_on_second_rank)
    assert isinstance(caught.value.__cause__, ValueError)
    consequence = "rank 1 raised ValueError: one is wrong and did not call it"
    assert consequence not in caught.value.traceback


def wait_on_all_but_first_rank(fabric: Fabric) -> None:
    if fabric.global_rank != 0:
        fabric.barrier()


def test_a_call_that_a_rank_leaves_out_is_an_error_without_waiting_for_the_deadline(
    world: ThreadedWorld,
) -> None:
    with pytest.raises(RankFailedError, match="rank 0 returned and did not call it"):
        world.run(wait_on_all_but_first_rank)


def call_a_collective_of_the_rank(fabric: Fabric) -> None:
    if fabric.global_rank == 0:
        fabric.barrier()
    else:
        fabric.all_reduce(1, reduce_op="max")


def test_ranks_that_call_different_collectives_are_told_what_each_called(
    world: ThreadedWorld,
) -> None:
    problem = r"0 calls barrier, 'unnamed'; rank 1 calls all_reduce\(max of 1 int64\)"
    with pytest.raises(RankFailedError, match=problem):
        world.run(call_a_collective_of_the_rank)


def test_a_rank_that_hangs_is_told_apart_from_those_that_wait_for_it(world: ThreadedWorld) -> None:
    release = threading.Event()

    def hang(fabric: Fabric, release: threading.Event) -> None:
        if fabric.global_rank == 2:
            release.wait()
        fabric.barrier()

    with pytest.raises(RankFailedError, match="rank 2 of 3 did not return within 2 s") as caught:
        world.run(lambda fabric: hang(fabric, release), timeout=2)
    release.set()
    assert "in hang" in caught.value.traceback


def test_a_circle_of_ranks_that_wait_for_each_other_ends_at_the_deadline() -> None:
    world = ThreadedWorld(2)
    with pytest.raises(RankFailedError, match=r"did not return within 0\.3 s"):
        world.run(lambda fabric: fabric.recv(src=1 - fabric.global_rank), timeout=0.3)


def test_modules_are_refused_with_the_way_out(world: ThreadedWorld) -> None:
    with pytest.raises(RankFailedError, match=r"RankPool\(3\)"):
        world.run(lambda fabric: fabric.setup_module(nn.Linear(1, 1)))


def test_checked_collectives_work_between_threads() -> None:
    with ThreadedWorld(2, check_collectives=True) as world:
        assert world.run(total, PerRank([1, 2])) == [3, 3]


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        ThreadedWorld(0)


def test_a_thread_may_build_a_model_while_ranks_connect(world: ThreadedWorld) -> None:
    def run_ranks(*_: object) -> None:
        world.run(total, PerRank([1, 2, 4]))

    # torch iterates over its dict of hooks, which must not change while it calls the first of two.
    with ExitStack() as cleanup:
        for hook in (run_ranks, lambda *_: None):
            cleanup.callback(register_module_parameter_registration_hook(hook).remove)
        assert nn.Linear(1, 1).bias is not None


def test_a_raw_collective_of_a_thread_is_an_error_that_names_the_pool() -> None:
    with pytest.raises(RankFailedError) as caught:
        ThreadedWorld(2).run(lambda fabric: torch.distributed.all_reduce(torch.zeros(1)))
    assert "RankPool(2), whose ranks run calls of torch.distributed" in str(caught.value)

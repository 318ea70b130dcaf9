"""The world of threads: the same functions as in a pool, in milliseconds."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.errors import ConfigurationError, RankFailedError
from fabric.testing import PerRank, ThreadedWorld


@pytest.fixture
def world() -> ThreadedWorld:
    return ThreadedWorld(3, timeout=20)


def test_a_function_runs_on_every_rank(world: ThreadedWorld) -> None:
    assert world.run(lambda fabric, x: (fabric.global_rank, x), PerRank("abc")) == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
    ]
    assert world.run(
        lambda fabric, x: fabric.all_reduce(x, reduce_op="sum"), x=PerRank([1, 2, 4])
    ) == [7, 7, 7]


def test_groups_messages_and_objects_work_as_between_processes(world: ThreadedWorld) -> None:
    def talk(fabric: Fabric) -> Any:
        group = fabric.new_group([0, 2])
        gathered = fabric.all_gather(fabric.global_rank, group=group) if group else None
        if fabric.global_rank == 0:
            fabric.send({"x": torch.ones(2)}, dst=1)
        received = fabric.recv(src=0)["x"].sum().item() if fabric.global_rank == 1 else None
        return gathered, received, fabric.broadcast(fabric.global_rank, src=2)

    assert world.run(talk) == [([0, 2], None, 2), (None, 2.0, 2), ([0, 2], None, 2)]


def test_each_rank_has_arguments_of_its_own(world: ThreadedWorld) -> None:
    given = [0]
    assert world.run(lambda fabric, values: values.append(1) or values, given) == [[0, 1]] * 3
    assert given == [0]


def test_the_rank_that_raises_is_named_and_the_others_are_let_go_at_once(
    world: ThreadedWorld,
) -> None:
    def fail(fabric: Fabric) -> None:
        if fabric.global_rank == 1:
            raise ValueError("one is wrong")
        fabric.barrier()

    start = time.monotonic()
    with pytest.raises(
        RankFailedError, match="rank 1 of 3 raised ValueError: one is wrong"
    ) as caught:
        world.run(fail)
    assert time.monotonic() - start < 10
    assert isinstance(caught.value.__cause__, ValueError)
    assert (
        "rank 1 raised ValueError: one is wrong and did not call it" not in caught.value.traceback
    )


def test_a_call_that_a_rank_leaves_out_is_an_error_without_waiting_for_the_deadline(
    world: ThreadedWorld,
) -> None:
    with pytest.raises(RankFailedError, match="rank 0 returned and did not call it"):
        world.run(lambda fabric: fabric.global_rank and fabric.barrier())


def test_ranks_that_call_different_collectives_are_told_what_each_called(
    world: ThreadedWorld,
) -> None:
    with pytest.raises(
        RankFailedError,
        match=r"0 calls barrier, 'unnamed'; rank 1 calls all_reduce\(max of 1 int64\)",
    ):
        world.run(
            lambda fabric: (
                fabric.all_reduce(1, reduce_op="max") if fabric.global_rank else fabric.barrier()
            )
        )


def test_a_rank_that_hangs_is_told_apart_from_those_that_wait_for_it(world: ThreadedWorld) -> None:
    release = threading.Event()

    def hang(fabric: Fabric, release: list[threading.Event]) -> None:
        if fabric.global_rank == 2:
            release[0].wait()
        fabric.barrier()

    with pytest.raises(
        RankFailedError, match=r"rank 2 of 3 did not return within 0\.3 s"
    ) as caught:
        world.run(lambda fabric: hang(fabric, [release]), timeout=0.3)
    release.set()
    assert "in hang" in caught.value.traceback


def test_a_circle_of_ranks_that_wait_for_each_other_ends_at_the_deadline() -> None:
    with pytest.raises(RankFailedError, match=r"did not return within 0\.3 s"):
        ThreadedWorld(2).run(lambda fabric: fabric.recv(src=1 - fabric.global_rank), timeout=0.3)


def test_modules_are_refused_with_the_way_out(world: ThreadedWorld) -> None:
    with pytest.raises(RankFailedError, match=r"RankPool\(3\)"):
        world.run(lambda fabric: fabric.setup_module(nn.Linear(1, 1)))


def test_checked_collectives_work_between_threads() -> None:
    with ThreadedWorld(2, check_collectives=True) as world:
        assert world.run(
            lambda fabric, x: fabric.all_reduce(x, reduce_op="sum"), PerRank([1, 2])
        ) == [3, 3]


def test_a_world_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        ThreadedWorld(0)

"""A communicator means the same over one process and over several."""

import functools
import importlib
import pkgutil
import traceback
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

import fabric
from fabric._torch import default_store
from fabric.communicators import (
    Collective,
    Communicator,
    LocalCommunicator,
    Operation,
    ProcessGroupCommunicator,
    Reduce,
)
from fabric.communicators.base import CallDescription
from fabric.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.strategies import DDPStrategy
from tests.ranks import run_in_ranks

CPU = torch.device("cpu")


def launch(ranks, function, *args):
    return run_in_ranks(function, *args, ranks=ranks)


class Unpicklable:
    def __reduce__(self):
        raise ValueError("not this one")


def of_one_process(run):
    """The results of one process: without a process group, and with a group of one."""
    results = [run(LocalCommunicator(CPU))]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        results.append(run(ProcessGroupCommunicator(None, CPU)))
    finally:
        dist.destroy_process_group()
    return results


def ones_of(op, values):
    """The values in a dtype that the reduction has a meaning for."""
    return values.long() if op in (Reduce.BAND, Reduce.BOR, Reduce.BXOR) else values


def every_collective(communicator):
    rank = communicator.rank
    size = communicator.size
    results = {
        op.name: communicator.all_reduce(ones_of(op, torch.arange(3.0) + rank + 1), op)
        for op in Reduce
    }
    results["gather"] = communicator.all_gather(torch.full((2,), rank))
    results["gather 0-dim"] = communicator.all_gather(torch.tensor(rank))
    for op in Reduce:
        rows = torch.arange(2.0 * size).view(size, 2) + rank
        results[f"scatter {op.name}"] = communicator.reduce_scatter(ones_of(op, rows), op)
    results["broadcast"] = [
        communicator.broadcast(torch.tensor([rank]), src) for src in range(size)
    ]
    rows = torch.arange(2 * size).view(size, 2) + 100 * rank
    results["all to all"] = communicator.all_to_all(rows)
    last = size - 1
    results["scatter"] = communicator.scatter(
        rows if rank == last else None, torch.empty(2, dtype=rows.dtype), last
    )
    gathered = communicator.gather(rows[0], last)
    results["gather to last"] = torch.empty(0) if gathered is None else gathered
    results["objects"] = communicator.gather_objects({"rank": rank})
    results["object"] = [communicator.broadcast_object(f"of {rank}", src) for src in range(size)]
    communicator.barrier("test")
    return results


def test_one_process_means_the_same_with_and_without_a_group():
    local, group = of_one_process(every_collective)
    assert local.keys() == group.keys()
    for name, value in local.items():
        torch.testing.assert_close(
            value, group[name], rtol=0, atol=0
        ) if "object" not in name else None
    assert local["objects"] == group["objects"] == [{"rank": 0}]
    assert local["object"] == group["object"] == ["of 0"]


class Forwarding(Communicator):
    """Implements what a communicator has to, and nothing else."""

    def __init__(self, inner):
        self.rank = inner.rank
        self.size = inner.size
        self.device = inner.device
        self._inner = inner

    def run(self, collective):
        return self._inner.run(collective)


def test_run_is_all_that_a_communicator_implements():
    assert (
        every_collective(Forwarding(LocalCommunicator(CPU))).keys()
        == every_collective(LocalCommunicator(CPU)).keys()
    )
    for module in pkgutil.walk_packages(fabric.__path__, "fabric."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found = [Communicator]
    for kind in found:
        found += kind.__subclasses__()
    public = {name for name in vars(Communicator) if not name.startswith("_")}
    for kind in found[1:]:
        if kind.__module__.startswith("fabric."):
            assert public & vars(kind).keys() <= {"run", "close"}, kind


def test_an_error_in_place_of_an_object_is_raised_on_one_process():
    def run(communicator):
        for exchange in (
            communicator.gather_objects,
            partial(communicator.broadcast_object, src=0),
        ):
            with pytest.raises(ConfigurationError, match="not this one"):
                exchange(None, error=ConfigurationError("exchange", "not this one"))

    of_one_process(run)


def test_a_call_is_not_described_where_nobody_reads_it():
    call = CallDescription("test", lambda: str(1 / 0))
    collective = Collective(Operation.ALL_REDUCE, torch.ones(1), Reduce.SUM, call=call)
    of_one_process(lambda communicator: communicator.run(collective))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_over_several_processes(size):
    results = launch(size, lambda fabric: every_collective(fabric.strategy.runtime.communicator))
    inputs = torch.stack([torch.arange(3.0) + rank + 1 for rank in range(size)])
    rows = torch.stack([torch.arange(2.0 * size).view(size, 2) + rank for rank in range(size)])
    reductions = {
        Reduce.MEAN: lambda x: x.sum(0) / size,
        Reduce.SUM: lambda x: x.sum(0),
        Reduce.MIN: lambda x: x.amin(0),
        Reduce.MAX: lambda x: x.amax(0),
        Reduce.PRODUCT: lambda x: x.prod(0),
        Reduce.BAND: lambda x: functools.reduce(torch.bitwise_and, x.long()),
        Reduce.BOR: lambda x: functools.reduce(torch.bitwise_or, x.long()),
        Reduce.BXOR: lambda x: functools.reduce(torch.bitwise_xor, x.long()),
    }
    assert reductions.keys() == set(Reduce)
    for rank, result in enumerate(results):
        for op, reduce in reductions.items():
            torch.testing.assert_close(result[op.name], reduce(inputs))
            torch.testing.assert_close(result[f"scatter {op.name}"], reduce(rows)[rank])
        mine = [2 * rank, 2 * rank + 1]
        assert result["all to all"].tolist() == [
            [100 * j + one for one in mine] for j in range(size)
        ]
        assert result["scatter"].tolist() == [100 * (size - 1) + one for one in mine]
        assert result["gather to last"].tolist() == (
            [[100 * j, 100 * j + 1] for j in range(size)] * (rank == size - 1)
        )
        assert result["gather"].tolist() == [[one, one] for one in range(size)]
        assert result["gather 0-dim"].tolist() == list(range(size))
        assert [int(value) for value in result["broadcast"]] == list(range(size))
        assert result["objects"] == [{"rank": one} for one in range(size)]
        assert result["object"] == [f"of {one}" for one in range(size)]


def refusals(communicator):
    size = communicator.size
    calls = {
        "src beyond the last": lambda: communicator.broadcast(torch.ones(1), size),
        "negative src": lambda: communicator.broadcast_object(1, -1),
        "src that is no number": lambda: communicator.broadcast(torch.ones(1), "0"),
        "src that is a boolean": lambda: communicator.broadcast(torch.ones(1), False),
        "scatter from nobody": lambda: communicator.scatter(None, torch.ones(1), size),
        "gather to nobody": lambda: communicator.gather(torch.ones(1), -1),
        "send to nobody": lambda: communicator.send(torch.ones(1), size),
        "recv from nobody": lambda: communicator.recv(torch.ones(1), -1),
        "send to itself": lambda: communicator.send(torch.ones(1), communicator.rank),
        "recv from itself": lambda: communicator.recv(torch.ones(1), communicator.rank),
        "no members": lambda: communicator.new_group([]),
        "members twice": lambda: communicator.new_group([0, 0]),
        "members from elsewhere": lambda: communicator.new_group([0, size]),
        "negative member": lambda: communicator.new_group([-1]),
    }
    wrong = []
    for name, call in calls.items():
        try:
            call()
        except ConfigurationError as error:
            if not all((error.request, error.problem, error.expected, error.suggestion)):
                wrong.append(name)
        else:
            wrong.append(name)
    return wrong


def test_a_wrong_rank_is_refused_on_one_process():
    assert of_one_process(refusals) == [[], []]


@pytest.mark.timeout(60)
def test_a_wrong_rank_is_refused_on_several_processes():
    assert launch(2, lambda fabric: refusals(fabric.strategy.runtime.communicator)) == [[], []]


def groups(fabric):
    world = fabric.strategy.runtime.communicator
    result = {}
    left = world.new_group([0, 1])
    right = world.new_group([2, 1])
    result["member"] = (bool(left), bool(right))
    for name, group in (("left", left), ("right", right)):
        if group:
            result[name] = (
                group.rank,
                group.size,
                group.all_gather(torch.tensor(world.rank)).tolist(),
            )
            result[name + " object"] = group.broadcast_object(world.rank, 1)
    if left:
        with pytest.raises(UsageError, match="other 1 processes"):
            left.new_group([0])
    everyone = world.new_group([0, 1, 2])
    again = everyone.new_group([2])
    result["again"] = again.size if again else None
    for group in (left, right, everyone, again):
        if group:
            group.close()
            group.close()
    late = world.new_group([0, 2])
    result["late"] = late.all_reduce(torch.ones(1), Reduce.SUM).item() if late else None
    return result


@pytest.mark.timeout(60)
def test_groups_are_parts_of_the_job_with_ranks_of_their_own():
    first, second, third = launch(3, groups)
    assert [one["member"] for one in (first, second, third)] == [
        (True, False),
        (True, True),
        (False, True),
    ]
    assert first["left"] == (0, 2, [0, 1])
    assert second["left"] == (1, 2, [0, 1])
    assert second["right"] == (0, 2, [1, 2])
    assert third["right"] == (1, 2, [1, 2])
    assert first["left object"] == second["left object"] == 1
    assert second["right object"] == third["right object"] == 2
    assert [one["again"] for one in (first, second, third)] == [None, None, 1]
    assert [one["late"] for one in (first, second, third)] == [2.0, None, 2.0]


def messages(communicator):
    """Rank 0 sends to all others and in a ring, two messages each; dtypes and shapes differ."""
    rank = communicator.rank
    size = communicator.size
    received = []
    if rank == 0:
        for peer in range(1, size):
            communicator.send(torch.full((peer,), 10 * peer), peer)
            communicator.send(torch.tensor(0.5 * peer + 1j), peer)
    else:
        received += [communicator.recv(torch.empty(rank, dtype=torch.long), 0).tolist()]
        received += [communicator.recv(torch.empty((), dtype=torch.complex64), 0).item()]
    token = torch.tensor([rank])
    if rank == 0:
        communicator.send(token, 1)
        received += [communicator.recv(token.clone(), size - 1).item()]
    else:
        received += [communicator.recv(token.clone(), rank - 1).item()]
        communicator.send(token, (rank + 1) % size)
    return received


def messages_in_groups(fabric):
    world = fabric.strategy.runtime.communicator
    group = world.new_group([1, 2])
    return messages(world), messages(group) if group else None


@pytest.mark.timeout(60)
def test_messages_between_two_ranks_keep_their_order_in_groups_too():
    first, second, third = launch(3, messages_in_groups)
    assert [one[0] for one in (first, second, third)] == [
        [2],
        [[10], 0.5 + 1j, 0],
        [[20, 20], 1 + 1j, 1],
    ]
    assert [one[1] for one in (first, second, third)] == [None, [1], [[10], 0.5 + 1j, 0]]


def late_in_a_group(fabric):
    group = fabric.strategy.runtime.communicator.new_group([0, 1])
    if fabric.global_rank == 1:
        default_store().wait(["gave up"], timedelta(seconds=30))
        return "stayed"
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
        group.all_reduce(torch.ones(1), Reduce.SUM)
    default_store().set("gave up", "yes")
    return "gave up"


@pytest.mark.timeout(60)
def test_a_group_has_the_timeout_of_the_strategy():
    strategy = DDPStrategy(timeout=timedelta(seconds=2))
    assert run_in_ranks(late_in_a_group, strategy=strategy)[0] == "gave up"


def test_a_group_of_the_one_process_is_itself():
    group = LocalCommunicator(CPU).new_group([0])
    assert (group.rank, group.size) == (0, 1)
    group.close()
    group.close()


def closing(fabric):
    group = dist.new_group([0, 1])
    communicator = fabric.strategy.communicator(group)
    communicator.close()
    result = communicator.all_reduce(torch.ones(1), Reduce.SUM).item()
    dist.destroy_process_group(group)
    return result


@pytest.mark.timeout(60)
def test_a_group_of_the_user_is_not_closed():
    assert launch(2, closing) == [2.0, 2.0]


def failing_objects(fabric):
    world = fabric.strategy.runtime.communicator
    texts = []
    for call in (
        lambda: world.broadcast_object(Unpicklable(), 1),
        lambda: world.gather_objects(Unpicklable() if world.rank == 0 else 1),
    ):
        with pytest.raises(ArgumentTypeError) as caught:
            call()
        texts.append("".join(traceback.format_exception_only(caught.value)))
    return texts, world.gather_objects(world.rank)


@pytest.mark.timeout(60)
def test_an_object_that_does_not_pickle_fails_on_every_rank():
    for (broadcast, gather), after in launch(2, failing_objects):
        assert "raised on rank 1" in broadcast
        assert "raised on rank 0" in gather
        assert "not this one" in broadcast
        assert after == [0, 1]


def missing_at_barrier(fabric):
    if fabric.global_rank == 1:
        return "left"
    with pytest.raises(UsageError, match="barrier\\('epoch end'\\) on rank 0 of 2"):
        fabric.barrier("epoch end")
    return "named"


@pytest.mark.timeout(60)
def test_a_barrier_that_fails_is_named():
    strategy = DDPStrategy(timeout=timedelta(seconds=2))
    assert run_in_ranks(missing_at_barrier, strategy=strategy)[0] == "named"

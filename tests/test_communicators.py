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
from fabric.communicators.recorded import RecordedCommunicator
from fabric.diagnostics import recorder
from fabric.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.strategies import DDPStrategy
from tests.ranks import run_in_ranks

CPU = torch.device("cpu")


class Unpicklable:
    def __reduce__(self):
        raise ValueError("not this one")


def run_on_one_process(function):
    """Return the results without a process group, and with a group of one process."""
    results = [function(LocalCommunicator(CPU))]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        results.append(function(ProcessGroupCommunicator(None, CPU)))
    finally:
        dist.destroy_process_group()
    return results


# The length of a buffer that gloo passes around a ring, and does not send straight to each rank.
LARGE = 20_000
BITWISE = (Reduce.BAND, Reduce.BOR, Reduce.BXOR)


def values_for(op, values):
    """Return the values as integers if the reduction is bitwise."""
    if op in BITWISE:
        return values.long()
    return values


def run_tensor_collectives(communicator):
    rank = communicator.rank
    size = communicator.size
    last = size - 1
    results = {}
    for op in Reduce:
        values = values_for(op, torch.arange(3.0) + rank + 1)
        results[op.name] = communicator.all_reduce(values, op)
        rows = values_for(op, torch.arange(2.0 * size).view(size, 2) + rank)
        results[f"scatter {op.name}"] = communicator.reduce_scatter(rows, op)
    results["gather"] = communicator.all_gather(torch.full((2,), rank))
    results["gather 0-dim"] = communicator.all_gather(torch.tensor(rank))
    results["gather large"] = communicator.all_gather(torch.arange(LARGE) + rank)
    for src in range(size):
        results[f"broadcast {src}"] = communicator.broadcast(torch.tensor([rank]), src)
    rows = torch.arange(2 * size).view(size, 2) + 100 * rank
    results["all to all"] = communicator.all_to_all(rows)
    sent_rows = rows if rank == last else None
    results["scatter"] = communicator.scatter(sent_rows, torch.empty(2).long(), last)
    gathered = communicator.gather(rows[0], last)
    if rank == last:
        results["gather to last"] = gathered
    else:
        assert gathered is None
    return results


def run_object_collectives(communicator):
    rank = communicator.rank
    objects = []
    for src in range(communicator.size):
        objects.append(communicator.broadcast_object(f"of {rank}", src))
    communicator.barrier("test")
    return {"gathered": communicator.gather_objects({"rank": rank}), "broadcast": objects}


def test_tensor_collectives_of_one_process_mean_the_same_with_and_without_a_group():
    local, group = run_on_one_process(run_tensor_collectives)
    torch.testing.assert_close(local, group, rtol=0, atol=0)


def test_object_collectives_of_one_process_mean_the_same_with_and_without_a_group():
    for results in run_on_one_process(run_object_collectives):
        assert results == {"gathered": [{"rank": 0}], "broadcast": ["of 0"]}


class MinimalCommunicator(Communicator):
    """A communicator that implements the abstract method, and nothing else."""

    def __init__(self, inner):
        self.rank = inner.rank
        self.size = inner.size
        self.device = inner.device
        self._inner = inner

    def run(self, collective):
        return self._inner.run(collective)


def subclasses_of(parent):
    classes = []
    for child in parent.__subclasses__():
        classes.append(child)
        classes += subclasses_of(child)
    return classes


def test_run_is_all_that_a_communicator_implements():
    local = LocalCommunicator(CPU)
    minimal = MinimalCommunicator(local)
    assert run_tensor_collectives(minimal).keys() == run_tensor_collectives(local).keys()
    assert run_object_collectives(minimal) == run_object_collectives(local)
    for module in pkgutil.walk_packages(fabric.__path__, "fabric."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    public = {name for name in vars(Communicator) if not name.startswith("_")}
    for child in subclasses_of(Communicator):
        if child.__module__.startswith("fabric."):
            assert public & vars(child).keys() <= {"run", "close"}, child


def test_an_error_in_place_of_an_object_is_raised_on_one_process():
    def raise_at_exchanges(communicator):
        for exchange in (
            communicator.gather_objects,
            partial(communicator.broadcast_object, src=0),
        ):
            with pytest.raises(ConfigurationError, match="not this one"):
                exchange(None, error=ConfigurationError("exchange", "not this one"))

    run_on_one_process(raise_at_exchanges)


def test_a_call_is_not_described_where_nobody_reads_it():
    call = CallDescription("test", lambda: str(1 / 0))
    collective = Collective(Operation.ALL_REDUCE, torch.ones(1), Reduce.SUM, call=call)
    run_on_one_process(lambda communicator: communicator.run(collective))


def run_collectives_of_job(fabric):
    communicator = fabric.strategy.runtime.communicator
    return run_tensor_collectives(communicator), run_object_collectives(communicator)


REDUCTIONS = {
    Reduce.SUM: lambda x: x.sum(0),
    Reduce.MIN: lambda x: x.amin(0),
    Reduce.MAX: lambda x: x.amax(0),
    Reduce.PRODUCT: lambda x: x.prod(0),
    Reduce.MEAN: lambda x: x.mean(0),
    Reduce.BAND: lambda x: functools.reduce(torch.bitwise_and, x.long()),
    Reduce.BOR: lambda x: functools.reduce(torch.bitwise_or, x.long()),
    Reduce.BXOR: lambda x: functools.reduce(torch.bitwise_xor, x.long()),
}


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_over_several_processes(size):
    ranks = list(range(size))
    values = torch.stack([torch.arange(3.0) + rank + 1 for rank in ranks])
    rows = torch.stack([torch.arange(2.0 * size).view(size, 2) + rank for rank in ranks])
    sent_rows = torch.stack([torch.arange(2 * size).view(size, 2) + 100 * rank for rank in ranks])
    large_rows = torch.arange(LARGE) + torch.arange(size).view(size, 1)
    assert REDUCTIONS.keys() == set(Reduce)
    for rank, (tensors, objects) in enumerate(run_in_ranks(run_collectives_of_job, ranks=size)):
        for op, reduce in REDUCTIONS.items():
            torch.testing.assert_close(tensors[op.name], reduce(values))
            torch.testing.assert_close(tensors[f"scatter {op.name}"], reduce(rows)[rank])
        assert torch.equal(tensors["all to all"], sent_rows[:, rank])
        assert torch.equal(tensors["scatter"], sent_rows[-1, rank])
        if rank == size - 1:
            assert torch.equal(tensors["gather to last"], sent_rows[:, 0])
        assert tensors["gather"].tolist() == [[src, src] for src in ranks]
        assert tensors["gather 0-dim"].tolist() == ranks
        assert torch.equal(tensors["gather large"], large_rows)
        for src in ranks:
            assert tensors[f"broadcast {src}"].tolist() == [src]
        assert objects["gathered"] == [{"rank": src} for src in ranks]
        assert objects["broadcast"] == [f"of {src}" for src in ranks]


def check_refusals(communicator):
    size = communicator.size
    rank = communicator.rank
    row = torch.ones(1)
    calls = [
        lambda: communicator.broadcast(row, size),
        lambda: communicator.broadcast_object(1, -1),
        lambda: communicator.broadcast(row, "0"),
        lambda: communicator.broadcast(row, False),
        lambda: communicator.scatter(None, row, size),
        lambda: communicator.gather(row, -1),
        lambda: communicator.send(row, size),
        lambda: communicator.recv(row, -1),
        lambda: communicator.send(row, rank),
        lambda: communicator.recv(row, rank),
        lambda: communicator.new_group([]),
        lambda: communicator.new_group([0, 0]),
        lambda: communicator.new_group([0, size]),
        lambda: communicator.new_group([-1]),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError) as caught:
            call()
        error = caught.value
        assert error.request
        assert error.problem
        assert error.expected
        assert error.suggestion


def test_a_wrong_rank_is_refused_on_one_process():
    run_on_one_process(check_refusals)


def test_a_wrong_rank_is_refused_on_several_processes():
    run_in_ranks(lambda fabric: check_refusals(fabric.strategy.runtime.communicator))


def describe_group(group, rank_in_job):
    """Return the rank, the size and two results of a group, or None on ranks outside of it."""
    if not group:
        return None
    return {
        "rank": group.rank,
        "size": group.size,
        "members": group.all_gather(torch.tensor(rank_in_job)).tolist(),
        "object of the last": group.broadcast_object(rank_in_job, 1),
    }


def use_groups(fabric):
    job = fabric.strategy.runtime.communicator
    left = job.new_group([0, 1])
    right = job.new_group([2, 1])
    results = {
        "left": describe_group(left, job.rank),
        "right": describe_group(right, job.rank),
    }
    if left:
        with pytest.raises(UsageError, match="other 1 processes"):
            left.new_group([0])
    full = job.new_group([0, 1, 2])
    nested = full.new_group([2])
    results["size of the nested group"] = nested.size if nested else None
    for group in (left, right, full, nested):
        if group:
            group.close()
            group.close()
    late = job.new_group([0, 2])
    results["sum in a late group"] = None
    if late:
        results["sum in a late group"] = late.all_reduce(torch.ones(1), Reduce.SUM).item()
    return results


def test_groups_are_parts_of_the_job_with_ranks_of_their_own():
    results = run_in_ranks(use_groups, ranks=3)
    first, second, third = results
    left = {"size": 2, "members": [0, 1], "object of the last": 1}
    right = {"size": 2, "members": [1, 2], "object of the last": 2}
    assert first["left"] == {"rank": 0, **left}
    assert second["left"] == {"rank": 1, **left}
    assert third["left"] is None
    assert first["right"] is None
    assert second["right"] == {"rank": 0, **right}
    assert third["right"] == {"rank": 1, **right}
    assert [result["size of the nested group"] for result in results] == [None, None, 1]
    assert [result["sum in a late group"] for result in results] == [2.0, None, 2.0]


def exchange_messages(communicator):
    """Send two messages from rank 0 to each other rank, and then one around a ring.

    Returns:
        The messages that this rank received, as Python values.
    """
    rank = communicator.rank
    size = communicator.size
    token = torch.tensor([rank])
    buffer = torch.empty(1).long()
    if rank == 0:
        for peer in range(1, size):
            communicator.send(torch.full((peer,), 10 * peer), peer)
            communicator.send(torch.tensor(0.5 * peer + 1j), peer)
        communicator.send(token, 1)
        return [communicator.recv(buffer, size - 1).item()]
    received = [
        communicator.recv(torch.empty(rank).long(), 0).tolist(),
        communicator.recv(torch.empty((), dtype=torch.complex64), 0).item(),
        communicator.recv(buffer, rank - 1).item(),
    ]
    communicator.send(token, (rank + 1) % size)
    return received


def exchange_messages_in_groups(fabric):
    job = fabric.strategy.runtime.communicator
    group = job.new_group([1, 2])
    received_in_job = exchange_messages(job)
    if not group:
        return received_in_job, None
    return received_in_job, exchange_messages(group)


def test_messages_between_two_ranks_keep_their_order_in_groups_too():
    first, second, third = run_in_ranks(exchange_messages_in_groups, ranks=3)
    assert first == ([2], None)
    assert second == ([[10], 0.5 + 1j, 0], [1])
    assert third == ([[20, 20], 1 + 1j, 1], [[10], 0.5 + 1j, 0])


def late_in_a_group(fabric):
    group = fabric.strategy.runtime.communicator.new_group([0, 1])
    if fabric.global_rank == 1:
        default_store().wait(["gave up"], timedelta(seconds=30))
        return "stayed"
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
        group.all_reduce(torch.ones(1), Reduce.SUM)
    default_store().set("gave up", "yes")
    return "gave up"


def test_a_group_has_the_timeout_of_the_strategy():
    strategy = DDPStrategy(timeout=timedelta(seconds=2))
    assert run_in_ranks(late_in_a_group, strategy=strategy)[0] == "gave up"


def test_a_group_of_the_one_process_is_itself():
    group = LocalCommunicator(CPU).new_group([0])
    assert group.rank == 0
    assert group.size == 1
    group.close()
    group.close()


def close_group_of_user(fabric):
    group = dist.new_group([0, 1])
    communicator = fabric.strategy.communicator(group)
    communicator.close()
    result = communicator.all_reduce(torch.ones(1), Reduce.SUM).item()
    dist.destroy_process_group(group)
    return result


def test_a_group_of_the_user_is_not_closed():
    results = run_in_ranks(close_group_of_user)
    assert results == [2.0, 2.0]


def failing_objects(fabric):
    communicator = fabric.strategy.runtime.communicator
    unpicklable_on_rank_0 = Unpicklable() if communicator.rank == 0 else 1
    texts = []
    for call in (
        lambda: communicator.broadcast_object(Unpicklable(), 1),
        lambda: communicator.gather_objects(unpicklable_on_rank_0),
    ):
        with pytest.raises(ArgumentTypeError) as caught:
            call()
        texts.append("".join(traceback.format_exception_only(caught.value)))
    return texts, communicator.gather_objects(communicator.rank)


def test_an_object_that_does_not_pickle_fails_on_every_rank():
    for (broadcast, gather), after in run_in_ranks(failing_objects):
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


def test_a_barrier_that_fails_is_named():
    strategy = DDPStrategy(timeout=timedelta(seconds=2))
    assert run_in_ranks(missing_at_barrier, strategy=strategy)[0] == "named"


def test_the_former_path_of_the_recorded_communicator_works():
    assert recorder.RecordedCommunicator is RecordedCommunicator
    with pytest.raises(AttributeError, match="has no attribute 'No'"):
        _ = recorder.No

"""Collectives that exchange rows, tensors of unequal lengths, and objects."""

import re
from collections import UserDict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fabric import Fabric
from fabric.collectives import all_reduce, all_to_all, reduce_scatter
from fabric.communicators import Collective, LocalCommunicator, Reduce
from fabric.errors import ArgumentTypeError, ConfigurationError
from tests.ranks import outcome, run_in_ranks

CPU = torch.device("cpu")


class RecordingCommunicator(LocalCommunicator):
    """A communicator of one process that keeps the name and the arguments of each call."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.calls: list[tuple[str, str]] = []

    def run(self, collective: Collective) -> Any:
        call = collective.call
        if call is not None:
            self.calls.append((call.operation, call.arguments()))
        return super().run(collective)


# -- rows -----------------------------------------------------------------------------------------

DTYPES = [torch.float64, torch.bfloat16, torch.int16, torch.uint8, torch.complex64]


def rows_of(rank: int, size: int) -> dict[str, Any]:
    """Return strided, transposed, one-dimensional and empty rows, of several dtypes."""
    base = (torch.arange(2 * size * 3) % 5 + rank).reshape(size, 6)
    tree: dict[str, Any] = {}
    for dtype in DTYPES:
        tree[str(dtype)] = base.to(dtype)[:, ::2]
    tree["transposed"] = base.t().contiguous().t()
    tree["flat"] = base[:, 0]
    tree["empty"] = base[:, :0]
    return tree


def exchange_rows(fabric: Fabric) -> dict[str, Any]:
    rank = fabric.global_rank
    size = fabric.world_size
    rows = rows_of(rank, size)
    booleans = rows["flat"] > rank
    results = {
        "sum": fabric.reduce_scatter({**rows, "text": "text"}, reduce_op="sum"),
        "all_to_all": fabric.all_to_all({**rows, "text": "text"}),
        "max": fabric.reduce_scatter(rows["transposed"], reduce_op="max"),
        "any": fabric.reduce_scatter(booleans, reduce_op="max"),
        "mean": fabric.reduce_scatter(rows["torch.bfloat16"]),
        "band": fabric.reduce_scatter(rows["transposed"], reduce_op="band"),
    }
    for name, original in rows_of(rank, size).items():
        assert torch.equal(rows[name], original)
    return results


@pytest.mark.parametrize("size", [1, 3])
def test_rows_are_reduced_and_exchanged_exactly(size: int) -> None:
    rows_by_rank = [rows_of(rank, size) for rank in range(size)]
    stacks = {}
    for name in rows_by_rank[0]:
        stacks[name] = torch.stack([rows[name] for rows in rows_by_rank])
    for rank, result in enumerate(run_in_ranks(exchange_rows, ranks=size)):
        assert result["sum"].pop("text") == "text"
        assert result["all_to_all"].pop("text") == "text"
        for name, stacked in stacks.items():
            reduced = result["sum"][name]
            assert reduced.dtype is stacked.dtype
            assert torch.equal(reduced, stacked.sum(0, dtype=stacked.dtype)[rank])
            exchanged = result["all_to_all"][name]
            assert exchanged.dtype is stacked.dtype
            assert torch.equal(exchanged, stacked[:, rank])
        transposed = stacks["transposed"]
        assert torch.equal(result["max"], transposed.amax(0)[rank])
        assert result["any"].dtype is torch.bool
        expected_mean = stacks["torch.bfloat16"].double().mean(0)[rank]
        assert torch.equal(result["mean"], expected_mean.bfloat16())
        expected_bits = transposed[0]
        for rows in transposed[1:]:
            expected_bits = expected_bits & rows
        assert torch.equal(result["band"], expected_bits[rank])


@pytest.mark.parametrize("leaf", [torch.ones(2, 3), torch.tensor(1.0), 1.5, True])
@pytest.mark.parametrize(
    "collective",
    [
        pytest.param(lambda group, tree: reduce_scatter(group, tree, Reduce.SUM), id="reduce"),
        pytest.param(all_to_all, id="exchange"),
    ],
)
def test_a_leaf_without_a_row_for_each_rank_is_refused(collective: Any, leaf: Any) -> None:
    pattern = r"\['x'\] is of shape.*\n.*\(1, \.\.\.\)"
    with pytest.raises(ConfigurationError, match=pattern) as caught:
        collective(RecordingCommunicator(), {"ok": torch.ones(1), "x": leaf})
    error = caught.value
    assert error.request
    assert error.problem
    assert error.expected
    assert error.suggestion
    with pytest.raises(ConfigurationError, match=r"\[0\] is of shape \(\); \[1\] is"):
        collective(RecordingCommunicator(), [0.5, 1.0])


# -- unequal lengths ------------------------------------------------------------------------------


def gather_unequal_lengths(fabric: Fabric) -> Any:
    rank = fabric.global_rank
    tree = {
        "x": torch.arange(2.0 * rank).reshape(rank, 2) + 10 * rank,
        "equal": torch.full((2,), rank, dtype=torch.uint8),
        "strided": torch.arange(4 * rank + 2)[::2],
        "scalar": torch.tensor(rank > 0),
        "n": rank,
        "text": "text",
    }
    return fabric.all_gather(tree, ragged=True), fabric.all_gather(tree, concat=True)


@pytest.mark.parametrize("size", [1, 3])
def test_unequal_lengths_are_gathered_as_a_list_or_as_one_tensor(size: int) -> None:
    rows = {1: [], 3: [[10.0, 11.0], [20.0, 21.0], [22.0, 23.0]]}
    for lists, concatenated in run_in_ranks(gather_unequal_lengths, ranks=size):
        assert [tensor.shape for tensor in lists["x"]] == [(rank, 2) for rank in range(size)]
        for name in ("x", "equal", "strided"):
            assert torch.equal(torch.cat(lists[name]), concatenated[name])
            assert lists[name][0].dtype is concatenated[name].dtype
        assert concatenated["x"].tolist() == rows[size]
        assert lists["strided"][-1].tolist() == list(range(0, 4 * size - 2, 2))
        assert concatenated["scalar"].tolist() == [False, True, True][:size]
        assert lists["n"] == list(range(size))
        assert concatenated["n"] == list(range(size))
        assert lists["text"] == "text"
        assert concatenated["text"] == "text"


class Disagreement(NamedTuple):
    """Trees that differ in more than their length, and a pattern for the error of each rank."""

    trees: tuple[Any, Any]
    patterns: tuple[str, str]
    error_of_rank_1: str = "CollectiveMismatchError"


def disagreements() -> list[Disagreement]:
    row = torch.ones(1)
    no_call = "could not make its own"
    refused = "ConfigurationError"
    return [
        Disagreement((torch.ones(2), torch.ones(2).double()), ("float32", "float64")),
        Disagreement(
            ({"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}), (r"\[\*, 3\]", r"\[\*, 4\]")
        ),
        Disagreement(({"a": row}, {"b": row}), ("a: ", "b: ")),
        Disagreement(([row], [row, row]), (r"range\(0, 1\)", r"range\(0, 2\)")),
        Disagreement(([1], [1.0]), ("int", "float")),
        Disagreement(([row], [row.to_sparse()]), (no_call, f"^{refused}.*sparse"), refused),
        Disagreement(([1], [2**63]), (no_call, f"^{refused}.*64 bits"), refused),
    ]


def outcomes_of_disagreements(fabric: Fabric) -> list[Any]:
    rank = fabric.global_rank
    outcomes: list[Any] = []
    for disagreement in disagreements():
        tree = disagreement.trees[rank]
        outcomes.append(outcome(partial(fabric.all_gather, tree, concat=True)))
    trained = torch.ones(1, requires_grad=rank == 0)
    outcomes.append(outcome(lambda: fabric.all_gather(trained, sync_grads=True, ragged=True)))
    outcomes.append(fabric.all_reduce(1, reduce_op="sum"))
    return outcomes


def test_ranks_that_differ_in_more_than_the_length_all_raise() -> None:
    outcomes_by_rank = run_in_ranks(outcomes_of_disagreements)
    for index, disagreement in enumerate(disagreements()):
        errors = ("CollectiveMismatchError", disagreement.error_of_rank_1)
        for rank, outcomes in enumerate(outcomes_by_rank):
            text = outcomes[index]
            assert text.startswith(errors[rank]), text
            assert re.search(disagreement.patterns[rank], text, re.DOTALL), text
    for pattern, outcomes in zip(("with gradient", "float32"), outcomes_by_rank, strict=True):
        *_, text, afterwards = outcomes
        assert text.startswith("CollectiveMismatchError")
        assert pattern in text
        assert afterwards == 2


# -- messages -------------------------------------------------------------------------------------


def message_for(rank: int) -> dict[str, Any]:
    """Return a strided, a conjugate and other tensors, and objects, for a rank."""
    values = torch.arange(4.0 * (rank + 1))[:: rank + 1]
    return {
        "x": values,
        "z": torch.tensor([1 + 2j, rank]).conj(),
        "small": torch.tensor([1, 0, rank]).to(torch.float8_e5m2),
        # torch calls these two contiguous, whatever their strides.
        "single": values[:1],
        "empty": values[:0],
        "flag": torch.tensor(rank == 1),
        "name": f"message for {rank}",
        "nothing": None,
    }


def check_message(actual: dict[str, Any], rank: int) -> None:
    expected = message_for(rank)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert actual[name].dtype is value.dtype
            # torch compares some dtypes only after a conversion.
            assert torch.equal(actual[name].to(torch.complex128), value.to(torch.complex128))
        else:
            assert actual[name] == value


def exchange_objects(fabric: Fabric, group: Any = None) -> Any:
    communicator = fabric.strategy.communicator(group)
    rank = communicator.rank
    size = communicator.size
    last = size - 1
    messages = None
    if rank == last:
        messages = [message_for(receiver) for receiver in range(size)]
    message = fabric.scatter(messages, src=last, group=group)
    check_message(message, rank)

    gathered = fabric.gather(message, dst=last, group=group)
    if rank == last:
        for sender, message in enumerate(gathered):
            check_message(message, sender)
    else:
        assert gathered is None

    objects = [None, "a", 3][:size]
    passed = objects if rank == 0 else ()
    assert fabric.scatter(passed, group=group) == objects[rank]
    weight = torch.ones(1, requires_grad=True)
    assert not fabric.scatter([weight] * size, group=group).requires_grad
    fabric.barrier("here", group)
    return fabric.broadcast(f"from {rank}", src=last, group=group)


def pass_round(fabric: Fabric, group: Any = None) -> list[Any]:
    """Receive two messages from each earlier rank, and then send two to each later rank.

    Returns:
        The second messages.
    """
    communicator = fabric.strategy.communicator(group)
    rank = communicator.rank
    second_messages = []
    for src in range(rank):
        check_message(fabric.recv(src, group), rank)
        second_messages.append(fabric.recv(src, group))
    for dst in range(rank + 1, communicator.size):
        fabric.send(message_for(dst), dst, group)
        fabric.send([rank, torch.tensor(dst)], dst, group)
    return second_messages


def exchange_objects_in_groups(fabric: Fabric) -> dict[str, Any]:
    group = fabric.new_group([2, 1])
    results = {
        "job": exchange_objects(fabric),
        "messages of the job": pass_round(fabric),
    }
    if group:
        results["group"] = exchange_objects(fabric, group)
        results["messages of the group"] = pass_round(fabric, group)
    else:
        results["group"] = outcome(lambda: fabric.all_reduce(1.0, group=group))
    return results


def test_any_object_is_scattered_gathered_and_sent_in_groups_too() -> None:
    results = run_in_ranks(exchange_objects_in_groups, ranks=3)
    assert [result["job"] for result in results] == ["from 2"] * 3
    assert [result["messages of the job"] for result in results] == [
        [],
        [[0, torch.tensor(1)]],
        [[0, torch.tensor(2)], [1, torch.tensor(2)]],
    ]
    outside, first, second = results
    assert "group=NonMember(ranks=[2, 1]) on rank 0" in outside["group"]
    assert "not a member" in outside["group"]
    assert first["group"] == "from 1"
    assert first["messages of the group"] == []
    assert second["group"] == "from 1"
    assert second["messages of the group"] == [[0, torch.tensor(1)]]


def test_any_object_on_one_process() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        fabric.launch()
        assert exchange_objects(fabric) == "from 0"
        for call in (lambda: fabric.send(1, 0), lambda: fabric.recv(0), lambda: fabric.send(1, 1)):
            with pytest.raises(ConfigurationError, match=r"send to itself|no rank 1") as caught:
                call()
            # This rank is the first one, so the error must not suggest it.
            assert "for the first rank" not in str(caught.value)
        with pytest.raises(ArgumentTypeError, match="does not pickle"):
            fabric.gather(lambda: 0)
        with pytest.raises(ConfigurationError, match="sparse"):
            fabric.all_gather(torch.ones(2).to_sparse(), ragged=True)
        numbers = [-(2**63), 2**63 - 1]
        assert fabric.all_reduce(numbers, reduce_op="sum") == numbers


def refused_objects(fabric: Fabric) -> Any:
    is_first = fabric.global_rank == 0
    tree = {"x": torch.ones(2)}
    without_pickle: Any = 1
    if is_first:
        tree = {"x": torch.ones(2).to_sparse()}
        without_pickle = lambda: 0  # noqa: E731 - a named function would pickle
    with pytest.raises(ConfigurationError, match=r"\['x'\]"):
        fabric.gather(tree, dst=1)
    with pytest.raises(ArgumentTypeError, match=r"object of type function\n  it does not pickle"):
        fabric.gather(without_pickle)
    with pytest.raises(ConfigurationError, match=r"\['x'\]"):
        fabric.scatter([tree, tree])
    with pytest.raises(ConfigurationError, match="there are 1 parts"):
        fabric.scatter([1])
    with pytest.raises(ArgumentTypeError, match="parts is a Tensor"):
        fabric.scatter(torch.ones(2))  # pyright: ignore[reportArgumentType] - what is refused

    def send_to_rank_1(value: Any) -> None:
        if is_first:
            fabric.send(value, 1)
        else:
            fabric.recv(0)

    with pytest.raises(ConfigurationError, match=r"\['x'\]"):
        send_to_rank_1(tree)
    with pytest.raises(ArgumentTypeError, match="does not pickle"):
        send_to_rank_1(without_pickle)
    with pytest.raises(ConfigurationError, match="new_group"):
        fabric.new_group([0, 2])
    return fabric.all_reduce(1, reduce_op="sum")


def test_an_object_that_cannot_be_sent_raises_on_every_rank() -> None:
    results = run_in_ranks(refused_objects)
    assert results == [2, 2]


# -- values that look like data -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leaf", "instead"),
    [
        (np.ones(2), "as_tensor"),
        (np.bool_(True), "item"),
        (UserDict(a=1.0), r"dict\(x\)"),
        (bytearray(b"x"), None),
        (np.ndarray, None),
    ],
)
def test_arrays_and_mappings_that_would_not_be_reduced_are_refused(
    leaf: Any, instead: str | None
) -> None:
    if instead is None:
        assert all_reduce(RecordingCommunicator(), [leaf], Reduce.SUM) == [leaf]
        return
    with pytest.raises(ConfigurationError, match=rf"\['m'\].*\n.*this rank alone[^$]*{instead}"):
        all_reduce(RecordingCommunicator(), {"m": leaf, "x": 1.0}, Reduce.SUM)


def test_a_sharded_tensor_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(ConfigurationError, match=r"\[0\](.|\n)*full_tensor"):
            all_reduce(RecordingCommunicator(), [sharded], Reduce.SUM)
    finally:
        dist.destroy_process_group()


# -- descriptions ---------------------------------------------------------------------------------


def test_every_collective_carries_what_the_user_called_and_what_has_to_agree() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        group = RecordingCommunicator()
        tree = {"x": torch.ones(1, 2), "n": 3, "s": "text"}
        fabric.all_reduce({"x": tree["x"]}, group, "sum")
        fabric.reduce_scatter(tree["x"], group)
        fabric.all_to_all(tree["x"], group)
        fabric.all_gather([3], group)
        fabric.all_gather(tree["x"], group, ragged=True)
        fabric.broadcast(tree, group=group)
        fabric.scatter([tree], group=group)
        fabric.gather(tree, group=group)
    assert group.calls == [
        ("all_reduce", "sum of x: 1 float32[1, 2]"),
        ("reduce_scatter", "mean of 1 float32[1, 2]"),
        ("all_to_all", "1 float32[1, 2]"),
        ("all_gather", "sync_grads=False of range(0, 1): 1 int64"),
        ("all_gather", "ragged=True, concat=False, sync_grads=False, 1 float32[*, 2]"),
        ("all_gather", "sync_grads=False of range(0, 1): 1 float32[1, 2]"),
        ("broadcast", "src=0"),
        ("scatter", "src=0"),
        ("gather", "dst=0"),
    ]

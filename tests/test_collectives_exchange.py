"""Rows, ragged parts and messages: reduce_scatter, all_to_all, gathering of unequal lengths, scatter, gather, send."""

import re
from collections import UserDict
from typing import Any

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


class Listening(LocalCommunicator):
    """Keeps what the user called."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.heard: list[tuple[str, str]] = []

    def run(self, collective: Collective) -> Any:
        if (call := collective.call) is not None:
            self.heard.append((call.operation, call.arguments()))
        return super().run(collective)


# -- rows -----------------------------------------------------------------------------------------

DTYPES = [torch.float64, torch.bfloat16, torch.int16, torch.uint8, torch.complex64]


def rows_of(rank: int, size: int) -> dict[str, Any]:
    """Strided, transposed, without further dimensions, empty; of several dtypes."""
    base = (torch.arange(2 * size * 3) % 5 + rank).reshape(size, 6)
    tree: dict[str, Any] = {str(dtype): base.to(dtype)[:, ::2] for dtype in DTYPES}
    return {
        **tree,
        "t": base.t().contiguous().t(),
        "flat": base[:, 0],
        "empty": base[:, :0],
        "text": "kept",
    }


def exchange_rows(fabric: Fabric) -> dict[str, Any]:
    rank = fabric.global_rank
    size = fabric.world_size
    mine = rows_of(rank, size)
    results = {op: fabric.reduce_scatter(mine, reduce_op=op) for op in ("sum",)}
    results["all_to_all"] = fabric.all_to_all(mine)
    results["max"] = fabric.reduce_scatter(
        {"t": mine["t"], "b": mine["flat"] > rank}, reduce_op="max"
    )
    results["mean"] = fabric.reduce_scatter(mine["torch.bfloat16"])
    results["band"] = fabric.reduce_scatter(mine["t"], reduce_op="band")
    assert all(
        torch.equal(mine[name], value)
        for name, value in rows_of(rank, size).items()
        if name != "text"
    )
    return results


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [1, 3])
def test_rows_are_reduced_and_exchanged_exactly(size: int) -> None:
    everyone = [rows_of(rank, size) for rank in range(size)]
    for rank, result in enumerate(run_in_ranks(exchange_rows, ranks=size)):
        assert result["sum"]["text"] == result["all_to_all"]["text"] == "kept"
        for name in everyone[0].keys() - {"text"}:
            stacked = torch.stack([one[name] for one in everyone])
            total = result["sum"][name]
            sent = result["all_to_all"][name]
            assert total.dtype is sent.dtype is stacked.dtype
            assert torch.equal(total, stacked.sum(0, dtype=stacked.dtype)[rank])
            assert torch.equal(sent, stacked[:, rank])
        t = torch.stack([one["t"] for one in everyone])
        assert torch.equal(result["max"]["t"], t.amax(0)[rank])
        assert result["max"]["b"].dtype is torch.bool
        expected = torch.stack([one["torch.bfloat16"].double() for one in everyone]).mean(0)[rank]
        assert torch.equal(result["mean"], expected.bfloat16())
        bits = t[0]
        for other in t[1:]:
            bits = bits & other
        assert torch.equal(result["band"], bits[rank])


@pytest.mark.parametrize("leaf", [torch.ones(2, 3), torch.tensor(1.0), 1.5, True])
def test_what_has_no_chunk_for_each_rank_is_refused(leaf: Any) -> None:
    for call in (
        lambda tree: reduce_scatter(Listening(), tree, Reduce.SUM),
        lambda tree: all_to_all(Listening(), tree),
    ):
        with pytest.raises(
            ConfigurationError, match=r"\['x'\] is of shape.*\n.*\(1, \.\.\.\)"
        ) as caught:
            call({"ok": torch.ones(1), "x": leaf})
        with pytest.raises(ConfigurationError, match=r"\[0\] is of shape \(\); \[1\] is"):
            call([0.5, 1.0])
        assert all(
            (
                caught.value.request,
                caught.value.problem,
                caught.value.expected,
                caught.value.suggestion,
            )
        )


# -- unequal lengths ------------------------------------------------------------------------------


def ragged(fabric: Fabric) -> Any:
    rank = fabric.global_rank
    tree = {
        "x": torch.arange(2.0 * rank).reshape(rank, 2) + 10 * rank,
        "same": torch.full((2,), rank, dtype=torch.uint8),
        "strided": torch.arange(4 * rank + 2)[::2],
        "scalar": torch.tensor(rank > 0),
        "n": rank,
        "text": "kept",
    }
    return fabric.all_gather(tree, ragged=True), fabric.all_gather(tree, concat=True)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [1, 3])
def test_unequal_lengths_are_gathered_as_a_list_or_as_one_tensor(size: int) -> None:
    for parts, whole in run_in_ranks(ragged, ranks=size):
        assert [part.shape for part in parts["x"]] == [(rank, 2) for rank in range(size)]
        for name in ("x", "same", "strided"):
            assert torch.equal(torch.cat(parts[name]), whole[name])
            assert parts[name][0].dtype is whole[name].dtype
        assert (
            whole["x"].tolist()
            == [[10.0, 11.0], [20.0, 21.0], [22.0, 23.0]][: size * (size - 1) // 2]
        )
        assert parts["strided"][-1].tolist() == list(range(0, 4 * size - 2, 2))
        assert whole["scalar"].tolist() == [rank > 0 for rank in range(size)]
        assert parts["n"] == whole["n"] == list(range(size))
        assert parts["text"] == whole["text"] == "kept"


def disagreements(fabric: Fabric) -> list[str]:
    first = fabric.global_rank == 0
    trees = [
        torch.ones(2) if first else torch.ones(2, dtype=torch.float64),
        {"x": torch.ones(2, 3) if first else torch.ones(2, 4)},
        {"a": torch.ones(1)} if first else {"b": torch.ones(1)},
        [torch.ones(1)] if first else [torch.ones(1), torch.ones(1)],
        [1] if first else [1.0],
        [torch.ones(1)] if first else [torch.ones(1).to_sparse()],
        [1] if first else [2**63],
    ]
    texts = [outcome(lambda tree=tree: fabric.all_gather(tree, concat=True)) for tree in trees]
    trained = torch.ones(1, requires_grad=first)
    texts += [outcome(lambda: fabric.all_gather(trained, sync_grads=True, ragged=True))]
    return [*texts, fabric.all_reduce(1, reduce_op="sum")]


@pytest.mark.timeout(60)
def test_ranks_that_differ_in_more_than_the_length_all_raise() -> None:
    for rank, texts in enumerate(run_in_ranks(disagreements)):
        patterns = [
            ("float32", "float64")[rank],
            (r"\[\*, 3\]", r"\[\*, 4\]")[rank],
            "ab"[rank] + ": ",
            (r"range\(0, 1\)", r"range\(0, 2\)")[rank],
            ("int", "float")[rank],
            ("could not make its own", "^ConfigurationError.*sparse")[rank],
            ("could not make its own", "^ConfigurationError.*64 bits")[rank],
            ("with gradient", "float32")[rank],
        ]
        for place, (pattern, text) in enumerate(zip(patterns, texts, strict=False)):
            assert re.search(pattern, text, re.DOTALL), text
            assert text.startswith(
                ("CollectiveMismatchError", "ConfigurationError")[rank == 1 and place in (5, 6)]
            )
        assert texts[-1] == 2


# -- messages -------------------------------------------------------------------------------------


def part_for(rank: int) -> dict[str, Any]:
    values = torch.arange(4.0 * (rank + 1))[:: rank + 1]
    z = torch.tensor([1 + 2j, rank]).conj()
    small = torch.tensor([1, 0, rank]).to(torch.float8_e5m2)
    few = {"one": values[:1], "none": values[:0]}  # contiguous to torch, with any strides
    flag = torch.tensor(rank == 1)
    return {
        "x": values,
        "z": z,
        "small": small,
        **few,
        "flag": flag,
        "name": f"part {rank}",
        "no": None,
    }


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    pairs = [(left[name], value) for name, value in right.items()]
    return left.keys() == right.keys() and all(
        (torch.equal(a.to(torch.complex128), b.to(torch.complex128)) and a.dtype is b.dtype)
        if isinstance(b, torch.Tensor)
        else a == b
        for a, b in pairs
    )


def any_object(fabric: Fabric, group: Any = None) -> Any:
    communicator = fabric.strategy.communicator(group)
    rank = communicator.rank
    size = communicator.size
    last = size - 1
    parts = [part_for(rank) for rank in range(size)]
    mine = fabric.scatter(parts if rank == last else None, src=last, group=group)
    assert same(mine, part_for(rank))
    everyone = fabric.gather(mine, dst=last, group=group)
    assert (everyone is None) == (rank != last)
    assert all(same(one, part_for(place)) for place, one in enumerate(everyone or []))
    assert (
        fabric.scatter([None, "a", 3][:size] if rank == 0 else (), group=group)
        == [None, "a", 3][rank]
    )
    weight = torch.ones(1, requires_grad=True)
    assert not fabric.scatter([weight] * size, group=group).requires_grad
    fabric.barrier("here", group)
    return fabric.broadcast(f"from {rank}", src=last, group=group)


def pass_round(fabric: Fabric, group: Any = None) -> list[Any]:
    """Every rank sends two messages to each later rank, before it receives."""
    communicator = fabric.strategy.communicator(group)
    rank = communicator.rank
    size = communicator.size
    received = [fabric.recv(src, group) for src in range(rank) for _ in range(2)]
    for dst in range(rank + 1, size):
        fabric.send(part_for(dst), dst, group)
        fabric.send([rank, torch.tensor(dst)], dst, group)
    assert all(same(one, part_for(rank)) for one in received[::2])
    return received[1::2]


def objects_in_groups(fabric: Fabric) -> Any:
    group = fabric.new_group([2, 1])
    world = any_object(fabric), pass_round(fabric)
    if not group:
        return world, outcome(lambda: fabric.all_reduce(1.0, group=group))
    return world, (any_object(fabric, group), pass_round(fabric, group))


@pytest.mark.timeout(60)
def test_any_object_is_scattered_gathered_and_sent_in_groups_too() -> None:
    results = run_in_ranks(objects_in_groups, ranks=3)
    assert [world for world, _ in results] == [
        ("from 2", []),
        ("from 2", [[0, torch.tensor(1)]]),
        ("from 2", [[0, torch.tensor(2)], [1, torch.tensor(2)]]),
    ]
    outside, *inside = [group for _, group in results]
    assert inside == [("from 1", []), ("from 1", [[0, torch.tensor(1)]])]
    assert "group=NonMember(ranks=[2, 1]) on rank 0" in outside
    assert "not a member" in outside


def test_any_object_on_one_process() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        fabric.launch()
        assert any_object(fabric) == "from 0"
        for call in (lambda: fabric.send(1, 0), lambda: fabric.recv(0), lambda: fabric.send(1, 1)):
            with pytest.raises(ConfigurationError, match=r"send to itself|no rank 1"):
                call()
        with pytest.raises(ArgumentTypeError, match="does not pickle"):
            fabric.gather(lambda: 0)
        with pytest.raises(ConfigurationError, match="sparse"):
            fabric.all_gather(torch.ones(2).to_sparse(), ragged=True)
        numbers = [-(2**63), 2**63 - 1]
        assert fabric.all_reduce(numbers, reduce_op="sum") == numbers


def unsendable(fabric: Fabric) -> Any:
    rank = fabric.global_rank
    bad = {"x": torch.ones(2).to_sparse()} if rank == 0 else {"x": torch.ones(2)}
    with pytest.raises(ConfigurationError, match=r"\['x'\]"):
        fabric.gather(bad, dst=1)
    with pytest.raises(ArgumentTypeError, match=r"object of type function\n  it does not pickle"):
        fabric.gather((lambda: 0) if rank == 0 else 1)
    with pytest.raises(ConfigurationError, match=r"\['x'\]"):
        fabric.scatter([bad, bad])
    with pytest.raises(ConfigurationError, match="there are 1 parts"):
        fabric.scatter([1])
    with pytest.raises(ArgumentTypeError, match="parts is a Tensor"):
        fabric.scatter(torch.ones(2))  # pyright: ignore[reportArgumentType] - what is refused
    with pytest.raises(ConfigurationError, match=r"\['x'\]"):
        fabric.send(bad, 1) if rank == 0 else fabric.recv(0)
    with pytest.raises(ArgumentTypeError, match="does not pickle"):
        fabric.send(lambda: 0, 1) if rank == 0 else fabric.recv(0)
    with pytest.raises(ConfigurationError, match="new_group"):
        fabric.new_group([0, 2])
    return fabric.all_reduce(1, reduce_op="sum")


@pytest.mark.timeout(60)
def test_what_cannot_be_sent_raises_on_every_rank() -> None:
    assert run_in_ranks(unsendable) == [2, 2]


# -- what looks like data -------------------------------------------------------------------------


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
        assert all_reduce(Listening(), [leaf], Reduce.SUM) == [leaf]
        return
    with pytest.raises(ConfigurationError, match=rf"\['m'\].*\n.*this rank alone[^$]*{instead}"):
        all_reduce(Listening(), {"m": leaf, "x": 1.0}, Reduce.SUM)


def test_a_sharded_tensor_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(ConfigurationError, match=r"\[0\](.|\n)*full_tensor"):
            all_reduce(Listening(), [sharded], Reduce.SUM)
    finally:
        dist.destroy_process_group()


# -- descriptions ---------------------------------------------------------------------------------


def test_every_collective_carries_what_the_user_called_and_what_has_to_agree() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        group = Listening()
        tree = {"x": torch.ones(1, 2), "n": 3, "s": "text"}
        fabric.all_reduce({"x": tree["x"]}, group, "sum")
        fabric.reduce_scatter(tree["x"], group)
        fabric.all_to_all(tree["x"], group)
        fabric.all_gather([3], group)
        fabric.all_gather(tree["x"], group, ragged=True)
        fabric.broadcast(tree, group=group)
        fabric.scatter([tree], group=group)
        fabric.gather(tree, group=group)
    assert group.heard == [
        ("all_reduce", "sum of x: 1 float32[1, 2]"),
        ("reduce_scatter", "mean of 1 float32[1, 2]"),
        ("all_to_all", "1 float32[1, 2]"),
        ("all_gather", "sync_grads=False of range(0, 1): 1 int64"),
        ("all_gather", "sync_grads=False of ragged, concat=False, 1 float32[*, 2]"),
        ("all_gather", "sync_grads=False of range(0, 1): 1 float32[1, 2]"),
        ("broadcast", "src=0"),
        ("scatter", "src=0"),
        ("gather", "dst=0"),
    ]

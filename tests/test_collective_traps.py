"""What torch does silently and wrongly between ranks, one test for each trap: ours does the right thing, or says so.

Trees that ranks fill in another order, exact integers and strides of every kind are in
test_collectives.py too; here each trap stands alone, under its own name.
"""

from typing import Any

import pytest
import torch

from fabric import Fabric
from fabric.collectives import all_reduce
from fabric.communicators import LocalCommunicator, Reduce
from fabric.errors import ConfigurationError
from tests.ranks import outcome, run_in_ranks

LOCAL = LocalCommunicator(torch.device("cpu"))


def silent_traps(fabric: Fabric) -> dict[str, Any]:
    rank = fabric.global_rank
    base = torch.arange(8.0) + 100 * rank
    weight = torch.full((2,), rank + 1.0, requires_grad=True)
    (fabric.all_reduce(weight, reduce_op="sum") * (rank + 1)).sum().backward()
    mean = torch.full((2,), rank + 1.0, requires_grad=True)
    (fabric.all_reduce(mean, reduce_op="avg") * (rank + 1)).sum().backward()
    sent = torch.full((2,), rank + 1.0, requires_grad=True)
    (fabric.broadcast(sent, src=1) * (rank + 1)).sum().backward()
    filled = {"loss": torch.tensor(1.0), "accuracy": torch.tensor(2.0)}
    short = torch.arange(4.0 + rank)
    return {
        "strided reduce": fabric.all_reduce(base[::2], reduce_op="sum").tolist(),
        "strided broadcast": fabric.broadcast(base[::2], src=1).tolist(),
        "strided rows": fabric.all_to_all(base.view(4, 2).t()).tolist(),
        "source untouched": base.tolist(),
        "sum gradient": weight.grad,
        "mean gradient": mean.grad,
        "broadcast gradient": sent.grad,
        "in place": (weight._version, weight.tolist()),
        "any": fabric.all_reduce(torch.tensor([rank == 0, False]), reduce_op="max").tolist(),
        "all": fabric.all_reduce(torch.tensor([rank == 0, True]), reduce_op="min").tolist(),
        "sum of booleans": outcome(lambda: fabric.all_reduce(torch.tensor(True), reduce_op="sum")),
        "order": fabric.all_reduce(
            filled if rank else dict(reversed(filled.items())), reduce_op="sum"
        ),
        "integers": fabric.all_reduce([2**24 + 1, 2**60, torch.tensor(2**53 + 1)], reduce_op="sum"),
        "ragged": [part.tolist() for part in fabric.all_gather(short, ragged=True)],
        "uint16": fabric.all_reduce(
            torch.tensor([1], dtype=torch.uint16), reduce_op="sum"
        ).tolist(),
        "two ops": (
            fabric.all_reduce(rank + 1, reduce_op="sum"),
            fabric.all_reduce(rank + 1, reduce_op="max"),
        ),
    }


@pytest.fixture(scope="module")
def silent() -> list[dict[str, Any]]:
    return run_in_ranks(silent_traps)


def test_a_strided_view_is_reduced_and_broadcast_by_its_own_elements(silent: Any) -> None:
    for rank, result in enumerate(silent):
        assert result["strided reduce"] == [100.0, 104.0, 108.0, 112.0]
        assert result["strided broadcast"] == [100.0, 102.0, 104.0, 106.0]
        assert result["strided rows"] == [
            [100.0 * src + rank + 2 * i for i in range(4)] for src in range(2)
        ]
        assert result["source untouched"] == [100.0 * rank + i for i in range(8)]


def test_a_reduction_in_the_graph_is_not_in_place_and_has_the_right_gradient(silent: Any) -> None:
    for rank, result in enumerate(silent):
        assert result["in place"] == (0, [rank + 1.0] * 2)
        assert result["sum gradient"].tolist() == [3.0, 3.0]


def test_a_mean_can_be_differentiated(silent: Any) -> None:
    assert [result["mean gradient"].tolist() for result in silent] == [[1.5, 1.5]] * 2


def test_a_broadcast_has_a_gradient_at_its_source_only(silent: Any) -> None:
    assert [result["broadcast gradient"].tolist() for result in silent] == [[0.0, 0.0], [3.0, 3.0]]


def test_booleans_are_never_summed_to_an_or(silent: Any) -> None:
    for result in silent:
        assert (result["any"], result["all"]) == ([True, False], [False, True])
        assert "booleans have no sum" in result["sum of booleans"]


def test_a_dict_filled_in_another_order_keeps_its_values(silent: Any) -> None:
    for result in silent:
        assert {name: value.item() for name, value in result["order"].items()} == {
            "loss": 2.0,
            "accuracy": 4.0,
        }


def test_integers_lose_no_digit_through_a_float(silent: Any) -> None:
    for result in silent:
        assert [int(value) for value in result["integers"]] == [2**25 + 2, 2**61, 2**54 + 2]


def test_gathering_four_and_five_reads_no_foreign_memory(silent: Any) -> None:
    for result in silent:
        assert result["ragged"] == [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0, 4.0]]


def test_a_dtype_that_the_backend_lacks_is_carried_by_another(silent: Any) -> None:
    assert [result["uint16"] for result in silent] == [[2], [2]]


def test_a_sum_and_a_maximum_one_after_the_other_stay_apart(silent: Any) -> None:
    assert [result["two ops"] for result in silent] == [(3, 2), (3, 2)]


def test_the_mean_of_integers_is_refused_not_rounded() -> None:
    with pytest.raises(ConfigurationError, match="not an integer"):
        all_reduce(LOCAL, torch.ones(2).long(), Reduce.MEAN)


def test_an_unknown_reduction_is_noticed_on_one_device() -> None:
    with pytest.raises(ConfigurationError, match="no such reduction"):
        Fabric(accelerator="cpu", devices=1).all_reduce(1.0, reduce_op="median")


def test_a_half_precision_mean_does_not_overflow_in_its_sum() -> None:
    assert all_reduce(LOCAL, torch.tensor([60000.0]).half(), Reduce.MEAN).tolist() == [60000.0]


def mismatches(fabric: Fabric) -> dict[str, str]:
    first = fabric.global_rank == 0
    calls = {
        "dtype": lambda: fabric.all_reduce(
            torch.ones(2, dtype=torch.float32 if first else torch.int32), reduce_op="sum"
        ),
        "reduce op": lambda: fabric.all_reduce(torch.ones(2), reduce_op="sum" if first else "max"),
        "shape": lambda: fabric.all_reduce(torch.ones(2 if first else 3)),
        "src": lambda: fabric.broadcast(torch.ones(2), src=int(first)),
        "key": lambda: fabric.all_reduce({"a" if first else "b": 1.0}),
        "operation": lambda: fabric.all_reduce(1.0) if first else fabric.all_gather(1.0),
        "rows": lambda: fabric.all_to_all(torch.ones(2, 3 if first else 4)),
        "gradients": lambda: fabric.all_gather(torch.ones(2), sync_grads=first),
        "ragged": lambda: fabric.all_gather(torch.ones(2), ragged=first),
        "destination": lambda: fabric.gather(1, dst=int(first)),
    }
    return {name: outcome(call).partition(":")[0] for name, call in calls.items()}


@pytest.mark.timeout(60)
def test_ranks_that_disagree_get_an_error_in_checked_mode_not_garbage_or_a_hang() -> None:
    for result in run_in_ranks(mismatches, check_collectives=True):
        assert set(result.values()) == {"CollectiveMismatchError"}, result

"""Values that a collective cannot carry are refused on every rank, and the next call is right."""

import re
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fabric import Fabric
from fabric.collectives import all_reduce
from fabric.communicators import Communicator, Reduce
from fabric.errors import ArgumentTypeError, ConfigurationError
from fabric.testing import ThreadedWorld
from tests.ranks import outcome, run_in_ranks
from tests.test_collectives import Metrics, local
from tests.test_collectives_mistakes import Unreadable

Call = Callable[[Any], Any]


# -- reductions without a meaning -----------------------------------------------------------------

REFUSALS = [
    ({"losses": [1.0, 2]}, "mean", r"\['losses'\]\[1\].*int64.*mean of integers"),
    (torch.ones(2).long(), "mean", "the tensor or number.*sum"),
    ({"ok": 1.0, "n": torch.ones(2).int()}, "avg", r"\['n'\]"),
    (Metrics(1.0, {"flag": True}), "sum", r"\.counts\['flag'\].*booleans have no sum.*long"),
    ([torch.ones(1).bool()], "mean", r"\[0\].*float"),
    (True, "product", "booleans have no product"),
    (torch.ones(1) * 1j, "max", "complex numbers have no max"),
    ([1j], "product", r"\[0\].*no product.*all_gather"),
    (torch.ones(1, dtype=torch.uint64), "min", "uint64"),
    ({"w": torch.ones(2, requires_grad=True)}, "max", r"\['w'\].*no gradient.*detach"),
    ([torch.ones(2).to_sparse()], "sum", r"\[0\].*sparse.*to_dense"),
    ({"m": torch.ones(2, device="meta")}, "sum", r"\['m'\].*meta"),
]


def check_refusals(communicator: Communicator) -> None:
    for tree, reduce_op, pattern in REFUSALS:
        with pytest.raises(ConfigurationError) as caught:
            all_reduce(communicator, tree, Reduce(reduce_op))
        error = caught.value
        assert error.request
        assert error.problem
        assert error.suggestion
        text = f"{error.request} {error.problem} {error.suggestion}"
        assert re.search(pattern, text), text


def test_reductions_without_meaning_are_refused_before_any_collective() -> None:
    communicator = local()
    check_refusals(communicator)
    assert communicator.calls == []


def check_refusals_of_job(fabric: Fabric) -> None:
    check_refusals(fabric.strategy.runtime.communicator)


def test_reductions_without_meaning_are_refused_on_several_processes() -> None:
    run_in_ranks(check_refusals_of_job)


@pytest.mark.parametrize("reduce_op", ["average", "", 3, "median", torch.float32, "ReduceOp.SUM"])
def test_an_unknown_reduction_is_refused_on_one_process_too(reduce_op: Any) -> None:
    with pytest.raises(ValueError, match=r"'mean', 'sum', 'min', 'max', 'product', .*, 'avg'"):
        Fabric(accelerator="cpu", devices=1).all_reduce(torch.ones(1), reduce_op=reduce_op)


def refused_means(fabric: Fabric) -> list[str]:
    integer_on_rank_0 = 1 if fabric.global_rank == 0 else 1.0
    return [
        outcome(lambda: fabric.all_reduce(1)),
        outcome(lambda: fabric.all_reduce(integer_on_rank_0)),
        str(fabric.all_reduce(1, reduce_op="sum")),
    ]


def test_a_mean_of_an_integer_is_refused_also_where_one_rank_has_it() -> None:
    first, second = run_in_ranks(refused_means)
    for everywhere, _, afterwards in (first, second):
        assert everywhere.startswith("ConfigurationError")
        assert afterwards == "2"
    assert first[1].startswith("ConfigurationError")
    assert second[1].startswith("CollectiveMismatchError")


# -- sums of small integers, which may not wrap ----------------------------------------------------

SMALL_INTEGERS = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
)


class SumsOfDtype(NamedTuple):
    """What the reductions of tensors near the limits of a dtype return or raise, as numbers.

    Attributes:
        largest: the sum that is the largest number of the dtype.
        least: the sum that is the least number of the dtype.
        too_large: the outcome of a sum that is one larger.
        row_too_large: the outcome of a reduce-scatter in which the sum for rank 0 is one larger.
        long: the sum that the error suggests.
        afterwards: the sum of ones in a later call.
        has_same_dtype: whether a sum has the dtype of its summands.
    """

    largest: list[int]
    least: int
    too_large: str
    row_too_large: str
    long: list[int]
    afterwards: int
    has_same_dtype: bool


def sums_of(fabric: Fabric, dtype: torch.dtype) -> SumsOfDtype:
    limits = torch.iinfo(dtype)
    add = partial(fabric.all_reduce, reduce_op="sum")
    scatter = partial(fabric.reduce_scatter, reduce_op="sum")
    # The largest number is odd: two halves and one.
    half = limits.max // 2
    summand = half
    if fabric.global_rank == 1:
        summand = half + 1
    near_largest = torch.tensor([0, summand], dtype=dtype)
    near_least = torch.tensor(limits.min // 2, dtype=dtype)
    too_large = torch.tensor([half + 1, 0], dtype=dtype)
    return SumsOfDtype(
        largest=add(near_largest).tolist(),
        least=int(add(near_least)),
        too_large=outcome(lambda: add({"a": too_large, "b": 1.0})),
        row_too_large=outcome(lambda: scatter(too_large)),
        long=add(too_large.long()).tolist(),
        afterwards=int(add(torch.ones((), dtype=dtype))),
        has_same_dtype=add(near_largest).dtype == dtype,
    )


def sums_of_dtypes(fabric: Fabric) -> dict[torch.dtype, SumsOfDtype]:
    return {dtype: sums_of(fabric, dtype) for dtype in SMALL_INTEGERS}


def assert_sums_do_not_wrap(sums_by_rank: list[dict[torch.dtype, SumsOfDtype]]) -> None:
    for rank, sums_by_dtype in enumerate(sums_by_rank):
        for dtype, sums in sums_by_dtype.items():
            limits = torch.iinfo(dtype)
            assert sums.largest == [0, limits.max]
            assert sums.least == limits.min
            assert sums.has_same_dtype
            message = f"ConfigurationError: all_reduce(..., reduce_op='sum') of {dtype}"
            assert sums.too_large.startswith(message)
            assert f"from {limits.min} to {limits.max}" in sums.too_large
            assert "x.long()" in sums.too_large
            assert sums.row_too_large.startswith("ConfigurationError") == (rank == 0)
            assert sums.long == [limits.max + 1, 0]
            assert sums.afterwards == 2


def test_sums_of_small_integers_are_exact_or_an_error() -> None:
    assert_sums_do_not_wrap(run_in_ranks(sums_of_dtypes))


def test_sums_of_small_integers_over_threads_are_exact_or_an_error() -> None:
    with ThreadedWorld(2) as world:
        assert_sums_do_not_wrap(world.run(sums_of_dtypes))


def test_a_sum_over_one_rank_is_its_summand() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        for dtype in SMALL_INTEGERS:
            largest = torch.tensor(torch.iinfo(dtype).max, dtype=dtype)
            assert torch.equal(fabric.all_reduce(largest, reduce_op="sum"), largest)


# -- products of Python integers, which may not wrap ----------------------------------------------


def sums_and_products(fabric: Fabric) -> dict[str, Any]:
    is_first = fabric.global_rank == 0
    add = partial(fabric.all_reduce, reduce_op="sum")
    multiply = partial(fabric.all_reduce, reduce_op="product")
    if is_first:
        sign = -1
        factors = [3, 2**40, 1, 0]
        beyond_64_bits = 2**70
    else:
        sign = 1
        factors = [-5, 2**22, 1, 2**62]
        beyond_64_bits = 1
    return {
        "sum": add(2**62),
        "sums": add({"a": [2**63 - 1, -(2**63), -1, 0], "t": torch.tensor([2, 3]), "b": sign}),
        "mixed": add([2**62, 0.5, torch.tensor(1), "text"]),
        "product": multiply(factors),
        "large product": outcome(lambda: multiply(2**32)),
        "largest product": outcome(lambda: multiply({"n": 2**62})),
        "product that is zero modulo 2**64": outcome(lambda: multiply([2**40, 1.0])),
        "beyond 64 bits on rank 0": outcome(lambda: add(beyond_64_bits)),
        "afterwards": add(1),
    }


def test_sums_and_products_of_python_integers_never_wrap() -> None:
    first, second = run_in_ranks(sums_and_products)
    for actual in (first, second):
        assert actual["sum"] == 2**63
        assert actual["sums"]["a"] == [2**64 - 2, -(2**64), -2, 0]
        assert actual["sums"]["t"].tolist() == [4, 6]
        assert actual["sums"]["b"] == 0
        assert actual["mixed"] == [2**63, 1.0, torch.tensor(2), "text"]
        assert actual["product"] == [-15, 2**62, 1, 0]
        for name in ("large product", "largest product", "product that is zero modulo 2**64"):
            assert actual[name].startswith("ConfigurationError: a product of Python integers"), name
        assert actual["afterwards"] == 2
    assert first["beyond 64 bits on rank 0"].startswith("ConfigurationError")
    assert second["beyond 64 bits on rank 0"].startswith("CollectiveMismatchError")


# -- objects that are no part of a tree, and tensors of other layouts -----------------------------


class Holder:
    """An object that holds a tensor, and is not taken apart."""

    def __init__(self) -> None:
        self.state = {"total": torch.ones(1)}


def nested_tensor() -> Tensor:
    return torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def strided_nested_tensor() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized_tensor() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)


# What makes each value, since a tensor of these layouts does not pickle.
VALUES: dict[str, Callable[[], Any]] = {
    "set": lambda: {1.0},
    "iterator": lambda: iter([torch.ones(2)]),
    "values": lambda: {"a": torch.ones(2)}.values(),
    "Decimal": lambda: Decimal("0.5"),
    "Holder": Holder,
    "Linear": lambda: torch.nn.Linear(1, 1),
    "nested": nested_tensor,
    "strided nested": strided_nested_tensor,
    "quantized": quantized_tensor,
}


class Refusal(NamedTuple):
    """The outcomes of a call on one rank.

    Attributes:
        everywhere: the outcome if every rank passes the value.
        on_rank_0: the outcome if rank 0 passes the value, and the other ranks a plain tensor.
    """

    everywhere: str
    on_rank_0: str


def assert_refused(first: dict[str, Refusal], second: dict[str, Refusal]) -> None:
    """Check the outcomes of ranks 0 and 1. A rank with a plain tensor learns of the mismatch."""
    for name, refusal in first.items():
        assert refusal.everywhere.startswith("ConfigurationError"), (name, refusal)
        assert refusal.on_rank_0.startswith("ConfigurationError"), (name, refusal)
    for name, refusal in second.items():
        assert refusal.everywhere.startswith("ConfigurationError"), (name, refusal)
        assert refusal.on_rank_0.startswith("CollectiveMismatchError"), (name, refusal)


def collectives_of(fabric: Fabric) -> dict[str, Call]:
    return {
        "reduce": partial(fabric.all_reduce, reduce_op="sum"),
        "gather": fabric.all_gather,
        "ragged": partial(fabric.all_gather, ragged=True),
    }


def refused_values(fabric: Fabric) -> dict[str, Refusal]:
    refusals: dict[str, Refusal] = {}
    for title, collective in collectives_of(fabric).items():
        for name, make_value in VALUES.items():
            value = [make_value()]
            everywhere = outcome(partial(collective, value))
            value_of_rank = [make_value()]
            if fabric.global_rank > 0:
                value_of_rank = [torch.ones(2)]
            on_rank_0 = outcome(partial(collective, value_of_rank))
            refusals[f"{title} {name}"] = Refusal(everywhere, on_rank_0)
    return refusals


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_value_that_does_not_travel_is_refused_also_where_one_rank_has_it() -> None:
    first, second = run_in_ranks(refused_values)
    assert_refused(first, second)
    assert "dequantize" in first["gather quantized"].everywhere
    assert "float(x)" in first["reduce Decimal"].everywhere
    assert "[0]" in first["reduce Holder"].everywhere


def refused_shared_values(fabric: Fabric) -> dict[str, Refusal]:
    refusals: dict[str, Refusal] = {}
    shared: dict[str, Call] = {"broadcast": fabric.broadcast, "gather": fabric.gather}
    for title, collective in shared.items():
        for name in ("nested", "strided nested", "quantized"):
            everywhere = outcome(partial(collective, VALUES[name]()))
            value_of_rank = torch.ones(2)
            if fabric.global_rank == 0:
                value_of_rank = VALUES[name]()
            on_rank_0 = outcome(partial(collective, value_of_rank))
            refusals[f"{title} {name}"] = Refusal(everywhere, on_rank_0)
    return refusals


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_layout_that_does_not_travel_is_refused_by_broadcast_and_gather_on_every_rank() -> None:
    for refusals in run_in_ranks(refused_shared_values):
        for name, refusal in refusals.items():
            assert refusal.everywhere.startswith("ConfigurationError"), (name, refusal)
            assert refusal.on_rank_0.startswith("ConfigurationError"), (name, refusal)


def refused_rows(fabric: Fabric) -> dict[str, Refusal]:
    """Return the outcomes of calls with one row where a row for each of two ranks is needed."""
    rows_of_rank = torch.ones(2)
    if fabric.global_rank == 0:
        rows_of_rank = torch.ones(1)
    collectives: dict[str, Call] = {
        "all_to_all": fabric.all_to_all,
        "reduce_scatter": partial(fabric.reduce_scatter, reduce_op="sum"),
    }
    refusals: dict[str, Refusal] = {}
    for name, collective in collectives.items():
        refusals[name] = Refusal(
            everywhere=outcome(partial(collective, torch.ones(1))),
            on_rank_0=outcome(partial(collective, rows_of_rank)),
        )
    return refusals


def test_rows_that_are_not_one_for_each_rank_are_refused() -> None:
    first, second = run_in_ranks(refused_rows)
    assert_refused(first, second)


# -- forward-mode derivatives ---------------------------------------------------------------------


def outcome_of_jvp(collective: Call, x: Tensor) -> str:
    return outcome(lambda: torch.func.jvp(collective, (x,), (x,)))


def outcome_of_dual(collective: Call, x: Tensor) -> str:
    with forward_ad.dual_level():
        return outcome(lambda: collective([forward_ad.make_dual(x, x)]))


def forward_mode_derivatives(fabric: Fabric) -> dict[str, Refusal]:
    is_first = fabric.global_rank == 0
    x = torch.ones(2)
    refusals: dict[str, Refusal] = {}
    for title, collective in collectives_of(fabric).items():
        everywhere = outcome_of_jvp(collective, x)
        if is_first:
            on_rank_0 = outcome_of_jvp(collective, x)
        else:
            on_rank_0 = outcome(partial(collective, x))
        refusals[f"{title} jvp"] = Refusal(everywhere, on_rank_0)

        everywhere = outcome_of_dual(collective, x)
        if is_first:
            on_rank_0 = outcome_of_dual(collective, x)
        else:
            on_rank_0 = outcome(partial(collective, [x]))
        refusals[f"{title} dual"] = Refusal(everywhere, on_rank_0)
    return refusals


def forward_mode_derivatives_of_scalars(fabric: Fabric) -> list[str]:
    scalar = torch.ones(())
    return [outcome_of_jvp(call, scalar) for call in collectives_of(fabric).values()]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_forward_mode_derivative_is_refused_also_where_one_rank_takes_it() -> None:
    first, second = run_in_ranks(forward_mode_derivatives)
    assert_refused(first, second)
    assert "torch.autograd.grad" in first["reduce jvp"].everywhere
    for outcomes in run_in_ranks(forward_mode_derivatives_of_scalars):
        for text in outcomes:
            assert text.startswith("ConfigurationError"), text


# -- objects that do not pickle, unpickle or flatten ----------------------------------------------


def refused_broadcasts(fabric: Fabric) -> int:
    without_pickle = None
    sparse = None
    if fabric.global_rank == 1:
        without_pickle = {"f": lambda: 0}
        sparse = {"x": torch.ones(2).to_sparse()}
    with pytest.raises(ArgumentTypeError, match="does not pickle"):
        fabric.broadcast(without_pickle, src=1)
    with pytest.raises(ConfigurationError, match=r"\['x'\].*\n.*sparse"):
        fabric.broadcast(sparse, src=1)
    return fabric.all_reduce(1, reduce_op="sum")


def test_a_value_that_cannot_be_broadcast_raises_on_every_rank() -> None:
    results = run_in_ranks(refused_broadcasts)
    assert results == [2, 2]


def unreadable_messages(fabric: Fabric) -> list[str]:
    unreadable = Unreadable()
    if fabric.is_global_zero:
        outcomes = [
            outcome(lambda: fabric.broadcast(unreadable)),
            outcome(lambda: fabric.scatter([1, unreadable])),
            outcome(lambda: fabric.send(unreadable, 1)),
            outcome(lambda: fabric.gather(1, dst=0)),
        ]
    else:
        outcomes = [
            outcome(lambda: fabric.broadcast(None)),
            outcome(lambda: fabric.scatter(None)),
            outcome(lambda: fabric.recv(0)),
            outcome(lambda: fabric.gather(unreadable, dst=0)),
        ]
    return [*outcomes, str(fabric.all_reduce(1, reduce_op="sum"))]


def test_a_message_that_a_receiver_cannot_read_is_an_error_that_says_so() -> None:
    first, second = run_in_ranks(unreadable_messages)
    error_names = [text.partition(":")[0] for text in first]
    assert error_names == ["fine", "fine", "fine", "ArgumentTypeError", "2"]
    error_names = [text.partition(":")[0] for text in second]
    assert error_names == ["ArgumentTypeError"] * 3 + ["fine", "2"]
    assert "it cannot be read here: ModuleNotFoundError('no such module')" in second[0]


class Broken(dict[str, Any]):
    """A mapping that raises when it is taken apart."""

    def __getitem__(self, key: str) -> Any:
        raise LookupError(key)


def broken_trees(fabric: Fabric) -> list[str]:
    tree = {"a": torch.ones(2)}
    rows = None
    if fabric.is_global_zero:
        tree = Broken(tree)
        rows = [tree, tree]
    return [
        outcome(lambda: fabric.all_reduce(tree)),
        outcome(lambda: fabric.all_gather(tree)),
        outcome(lambda: fabric.all_gather(tree, ragged=True)),
        outcome(lambda: fabric.broadcast(tree)),
        outcome(lambda: fabric.gather(tree)),
        outcome(lambda: fabric.scatter(rows)),
        str(fabric.all_reduce(1, reduce_op="sum")),
    ]


def test_a_tree_that_raises_while_it_is_taken_apart_raises_on_every_rank() -> None:
    first, second = run_in_ranks(broken_trees)
    error_names = [text.partition(":")[0] for text in first]
    assert error_names == ["LookupError"] * 3 + ["ArgumentTypeError"] * 3 + ["2"]
    error_names = [text.partition(":")[0] for text in second]
    assert error_names == ["CollectiveMismatchError"] * 3 + ["ArgumentTypeError"] * 3 + ["2"]
    for text in [*first[3:6], *second[3:6]]:
        assert "LookupError: a" in text


def broadcast_beside_gather(fabric: Fabric) -> list[str]:
    if fabric.is_global_zero:
        error = outcome(lambda: fabric.gather([1, 2]))
    else:
        error = outcome(lambda: fabric.broadcast([1, 2]))
    return [error, str(fabric.all_reduce(1, reduce_op="sum"))]


def test_a_broadcast_beside_a_gather_of_objects_is_an_error_on_every_rank() -> None:
    for error, afterwards in run_in_ranks(broadcast_beside_gather):
        assert error.startswith("CollectiveMismatchError")
        assert "some ranks gather objects, and others broadcast an object" in error
        assert afterwards == "2"

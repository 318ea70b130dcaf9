"""Collectives over collections: pure, exact, one per dtype, and with the right gradients."""

import dataclasses
import enum
import math
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from fabric import Fabric
from fabric.collectives import all_gather, all_reduce, broadcast
from fabric.communicators import Communicator, LocalCommunicator, Reduce
from fabric.errors import ConfigurationError
from fabric.testing import ThreadedWorld
from tests.ranks import outcome, run_in_ranks

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Metrics:
    loss: Any
    counts: dict[str, Any]


class Output(OrderedDict):
    """A registered ordered dict, as model outputs of other libraries are."""


pytree.register_pytree_node(
    Output, lambda out: (list(out.values()), list(out)), lambda v, k: Output(zip(k, v, strict=True))
)


class Phase(enum.IntEnum):
    TRAIN = 3


class CountingCommunicator(Communicator):
    """A communicator that notes the name and the dtype of each collective."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.calls = []
        self.rank = inner.rank
        self.size = inner.size
        self.device = inner.device

    def run(self, collective):
        dtype = None
        if isinstance(collective.buffer, torch.Tensor):
            assert collective.buffer.is_contiguous()
            dtype = collective.buffer.dtype
        self.calls.append((collective.operation.value, dtype))
        return self.inner.run(collective)

    def close(self):
        self.inner.close()


def local():
    return CountingCommunicator(LocalCommunicator(CPU))


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SMALL_FLOATS = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]
INTEGERS += [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
DTYPES = [*FLOATS, *SMALL_FLOATS, torch.float8_e8m0fnu, *COMPLEX, *INTEGERS, torch.bool]


def tensors_of(rank, dtype):
    """Return contiguous, transposed, strided, 0-dim, expanded and empty tensors."""
    factor = rank if dtype is torch.bool else rank + 1
    matrix = (torch.tensor([[1.0, 2.0, 4.0], [2.0, 1.0, 1.0]]).double() * factor).to(dtype)
    row = torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0, 0.0]).double().to(dtype)
    scalar = torch.tensor(float(rank)).to(dtype)
    return [
        matrix,
        matrix.t(),
        row[::2],
        scalar,
        scalar.expand(2, 3),
        matrix[:0],
        scalar.reshape(1),
    ]


# -- dtypes, shapes, strides ----------------------------------------------------------------------


def check_every_dtype(fabric, size):
    for dtype in DTYPES:
        tensors_by_rank = [tensors_of(rank, dtype) for rank in range(size)]
        tensors = tensors_of(fabric.global_rank, dtype)
        originals = [tensor.clone() for tensor in tensors]
        gathered_tensors = fabric.all_gather(tensors)
        sent_tensors = fabric.broadcast(tensors, src=size - 1)
        for index, tensor in enumerate(tensors):
            gathered = gathered_tensors[index]
            assert gathered.dtype is dtype
            assert gathered.shape == (size, *tensor.shape)
            # torch compares some dtypes only after a conversion.
            expected = [row[index].to(torch.complex128) for row in tensors_by_rank]
            assert torch.equal(gathered.to(torch.complex128), torch.stack(expected)), dtype

            sent = sent_tensors[index]
            assert sent.dtype is dtype
            assert sent.shape == tensor.shape
            assert torch.equal(sent.to(torch.complex128), expected[-1]), dtype

            original = originals[index].to(torch.complex128)
            assert torch.equal(tensor.to(torch.complex128), original), dtype


@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_and_stride_is_gathered_and_broadcast_exactly(size):
    run_in_ranks(check_every_dtype, size, ranks=size)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_passes_on_one_process():
    for dtype in DTYPES:
        for tensor in tensors_of(0, dtype):
            assert all_gather(local(), tensor).shape == (1, *tensor.shape)
            assert broadcast(local(), tensor, 0, CPU).dtype is dtype


FOLDS = {
    "min": torch.minimum,
    "max": torch.maximum,
    "sum": torch.add,
    "product": torch.mul,
    "mean": torch.add,
}


def has_reduction(dtype, op):
    """Return whether torch has the reduction, and this test an exact expectation."""
    is_inexact = dtype.is_floating_point or dtype.is_complex
    if op == "mean":
        return is_inexact
    if op in ("min", "max"):
        return not dtype.is_complex and dtype is not torch.uint64
    if op == "product":
        return not dtype.is_complex
    return True


def check_reductions_of_every_dtype(fabric, size):
    for dtype in [*FLOATS, *COMPLEX, *INTEGERS]:
        tensors_by_rank = [tensors_of(rank, dtype) for rank in range(size)]
        wide = torch.complex128 if dtype.is_complex else torch.float64
        for op, fold in FOLDS.items():
            if not has_reduction(dtype, op):
                continue
            results = fabric.all_reduce(tensors_by_rank[fabric.global_rank], reduce_op=op)
            for index, result in enumerate(results):
                expected = tensors_by_rank[0][index].to(wide)
                for tensors in tensors_by_rank[1:]:
                    expected = fold(expected, tensors[index].to(wide))
                if op == "mean":
                    expected = expected / size
                expected = expected.to(dtype).to(wide)
                assert result.dtype is dtype
                assert result.shape == expected.shape
                torch.testing.assert_close(
                    result.to(wide), expected, rtol=1e-6, atol=0, msg=f"{dtype} {op} {index}"
                )


@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_and_stride_is_reduced_as_on_one_process(size):
    run_in_ranks(check_reductions_of_every_dtype, size, ranks=size)


def extremes(fabric):
    rank = fabric.global_rank
    return {
        "large int": fabric.all_reduce(2**60 + rank, reduce_op="sum"),
        "largest ints": fabric.all_reduce([2**63 - 1 - rank, -(2**63)], reduce_op="sum"),
        "max int": fabric.all_reduce(2**53 + rank, reduce_op="max"),
        "int tensor": fabric.all_reduce(torch.tensor(2**53 + rank), reduce_op="max").item(),
        "float16 mean": fabric.all_reduce(torch.tensor(60000.0).half()).item(),
        "bfloat16 mean": fabric.all_reduce(torch.tensor([1.0078125]).bfloat16()).item(),
        "large float": fabric.all_reduce(1e300),
        "smallest": fabric.all_reduce(5e-324, reduce_op="max"),
        "nan": fabric.all_reduce(
            torch.tensor([float("nan"), float("inf"), float("-inf")]), reduce_op="sum"
        ),
        "uint64": fabric.all_gather(torch.tensor([2**64 - 1], dtype=torch.uint64)).tolist(),
        "uint8": fabric.all_reduce(torch.tensor([200], dtype=torch.uint8), reduce_op="max").item(),
    }


def test_extreme_values_are_exact():
    for result in run_in_ranks(extremes, ranks=3):
        assert result["large int"] == 3 * 2**60 + 3
        assert result["largest ints"] == [3 * 2**63 - 6, -3 * 2**63]
        assert result["max int"] == 2**53 + 2
        assert result["int tensor"] == 2**53 + 2
        assert result["float16 mean"] == 60000 - 60000 % 32
        assert result["bfloat16 mean"] == 1.0078125
        assert result["large float"] == 1e300
        assert result["smallest"] == 5e-324
        assert str(result["nan"].tolist()) == "[nan, inf, -inf]"
        assert result["uint64"] == [[2**64 - 1]] * 3
        assert result["uint8"] == 200


# -- numbers --------------------------------------------------------------------------------------


def numbers(fabric):
    rank = fabric.global_rank
    tree = {
        "float": rank + 0.5,
        "int": 10 + rank,
        "complex": complex(rank, 1),
        "numpy": np.float64(rank),
    }
    return {
        "sum": fabric.all_reduce({**tree, "i32": np.int32(rank)}, reduce_op="sum"),
        "gather": fabric.all_gather({**tree, "bool": rank == 1}),
        "min": fabric.all_reduce(
            [rank == 0, True, torch.tensor([rank == 0, True])], reduce_op="min"
        ),
        "max": fabric.all_reduce(
            [rank == 0, False, torch.tensor([rank == 0, False])], reduce_op="max"
        ),
        "others": fabric.all_reduce(
            ["text", None, Phase.TRAIN, torch.Size([1]), b"x"], reduce_op="sum"
        ),
    }


def single_values(fabric):
    """Reduce values alone, and in a list, which takes the general way."""
    rank = fabric.global_rank
    values = [
        0.1 + rank,
        -0.0,
        float("nan"),
        torch.tensor(0.1 + rank),
        torch.tensor(0.1 + rank, dtype=torch.float64),
    ]
    results = []
    for op in ("mean", "sum", "min", "max", "product"):
        alone = [fabric.all_reduce(value, reduce_op=op) for value in values]
        in_list = [fabric.all_reduce([value], reduce_op=op)[0] for value in values]
        results.append((alone, in_list))
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_a_value_alone_is_reduced_as_in_a_collection(size):
    for results in run_in_ranks(single_values, ranks=size):
        for alone, in_list in results:
            for value, value_in_list in zip(alone, in_list, strict=True):
                assert type(value) is type(value_in_list)
                torch.testing.assert_close(value, value_in_list, rtol=0, atol=0, equal_nan=True)
                assert math.copysign(1, value) == math.copysign(1, value_in_list)


def scalars_with_and_without_gradient(fabric):
    scalar = torch.tensor(2.0, requires_grad=fabric.global_rank == 0)
    kept = scalar.detach().clone()
    total = fabric.all_reduce(scalar, reduce_op="sum")
    other = fabric.all_reduce(kept, reduce_op="sum")
    other += 1
    return total.item(), total.requires_grad, kept.item(), other.item()


def test_scalars_with_a_gradient_on_one_rank_only_are_reduced_together():
    on_rank_0, on_rank_1 = run_in_ranks(scalars_with_and_without_gradient)
    assert on_rank_0 == (4.0, True, 2.0, 5.0)
    assert on_rank_1 == (4.0, False, 2.0, 5.0)


def test_numbers_stay_numbers():
    for result in run_in_ranks(numbers):
        assert result["sum"] == {"float": 2.0, "int": 21, "complex": 1 + 2j, "numpy": 1.0, "i32": 1}
        assert [type(value) for value in result["sum"].values()] == [
            float,
            int,
            complex,
            float,
            int,
        ]
        assert result["gather"]["int"] == [10, 11]
        assert result["gather"]["bool"][0] is False
        assert result["gather"]["bool"][1] is True
        assert result["gather"]["complex"] == [1j, 1 + 1j]
        assert result["min"][:2] == [False, True]
        assert result["max"][:2] == [True, False]
        assert result["min"][2].tolist() == [False, True]
        assert result["max"][2].tolist() == [True, False]
        assert result["others"] == ["text", None, Phase.TRAIN, torch.Size([1]), b"x"]


def test_numbers_of_one_process_are_the_same():
    tree = {"a": 1.5, "b": 2**60 + 1, "c": True, "d": 2j}
    assert all_reduce(local(), {"a": 1.5, "b": 2**60 + 1, "d": 2j}, Reduce.SUM) == {
        "a": 1.5,
        "b": 2**60 + 1,
        "d": 2j,
    }
    assert all_reduce(local(), True, Reduce.MIN) is True
    assert all_gather(local(), tree) == {"a": [1.5], "b": [2**60 + 1], "c": [True], "d": [2j]}


def test_numbers_can_stay_out_of_it():
    tree = {"n": 3, "flag": True, "x": torch.ones(1)}
    reduced = all_reduce(local(), tree, Reduce.MEAN, numbers=False)
    assert reduced["n"] == 3
    assert reduced["flag"] is True


# -- structure ------------------------------------------------------------------------------------


def nested(rank):
    x = torch.full((2,), float(rank))
    return [
        Pair(x, (rank, [x])),
        Metrics(x, {"n": rank}),
        defaultdict(list, a=[x]),
        Output(loss=x, step=rank),
        {"b": x, "a": rank, 3: x, (1, 2): {"deep": ()}},
        [],
        None,
    ]


def reduce_nested(fabric):
    tree = nested(fabric.global_rank)
    return fabric.all_reduce(tree, reduce_op="sum"), fabric.all_gather(tree)


def test_nested_collections_keep_their_types():
    for reduced, gathered in run_in_ranks(reduce_nested):
        for result in (reduced, gathered):
            assert [type(node) for node in result] == [type(node) for node in nested(0)]
        assert reduced[0].left.tolist() == [1.0, 1.0]
        assert reduced[0].right[0] == 1
        assert reduced[1].counts == {"n": 1}
        assert reduced[2].default_factory is list
        assert reduced[3]["step"] == 1
        assert list(reduced[4]) == ["b", "a", 3, (1, 2)]
        assert gathered[0].left.tolist() == [[0.0, 0.0], [1.0, 1.0]]
        assert gathered[3]["step"] == [0, 1]


def different_order(fabric):
    values = {
        "loss": 1.0,
        "accuracy": 2.0,
        3: 3.0,
        1.5: 4.0,
        ("a", 1): 5.0,
        frozenset("ab"): 6.0,
        frozenset("c"): 7.0,
    }
    tree = {key: torch.tensor(value) for key, value in values.items()}
    if fabric.global_rank > 0:
        tree = dict(reversed(tree.items()))
    from_rank_1 = {}
    for key, gathered in fabric.all_gather(tree).items():
        from_rank_1[key] = gathered[1]
    results = [fabric.all_reduce(tree), fabric.broadcast(tree), from_rank_1]
    return [sorted(result.items(), key=lambda item: item[1]) for result in results]


def test_ranks_that_filled_a_dict_in_another_order_agree():
    for result in run_in_ranks(different_order):
        for entries in result:
            assert [float(value) for _, value in entries] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
            assert dict(entries[:3]).keys() == {"loss", "accuracy", 3}


@pytest.mark.parametrize(
    "collective",
    [
        pytest.param(
            lambda communicator, tree: all_reduce(communicator, tree, Reduce.SUM), id="reduce"
        ),
        pytest.param(all_gather, id="gather"),
    ],
)
def test_a_tree_costs_one_collective_per_dtype(collective):
    communicator = local()
    tree = [
        torch.ones(2),
        torch.ones(3, 3),
        torch.ones((), dtype=torch.float64),
        1.0,
        2,
        torch.ones(1).long(),
    ]
    collective(communicator, tree)
    assert [dtype for _, dtype in communicator.calls] == [torch.float32, torch.float64, torch.int64]


def test_a_tree_without_tensors_costs_nothing():
    communicator = local()
    assert all_reduce(communicator, {"a": "text", "b": [None]}, Reduce.SUM) == {
        "a": "text",
        "b": [None],
    }
    assert all_gather(communicator, []) == []
    assert communicator.calls == []


def count_broadcasts(fabric):
    communicator = CountingCommunicator(fabric.strategy.communicator())
    broadcast(
        communicator,
        {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1).long(), "d": 1},
        0,
        CPU,
    )
    return [name for name, _ in communicator.calls]


def test_a_broadcast_costs_one_object_and_one_collective_per_dtype():
    assert (
        ThreadedWorld(2).run(count_broadcasts)
        == [["broadcast_object", "broadcast", "broadcast"]] * 2
    )


# -- purity ---------------------------------------------------------------------------------------


def storage_pointers(tree):
    return [tree[name].untyped_storage().data_ptr() for name in "abw"]


def check_purity(fabric):
    row = torch.ones(4)
    weight = torch.nn.Parameter(torch.ones(2))
    tree = {"a": row, "b": torch.ones(2, 2).t(), "c": 1, "w": weight}
    row_before = row.clone()
    matrix_before = tree["b"].clone()
    versions = [row._version, weight._version]
    results = [
        fabric.all_reduce(tree, reduce_op="sum"),
        fabric.all_gather(tree),
        fabric.broadcast(tree),
    ]
    pointers = storage_pointers(tree)
    for result in results:
        pointers += storage_pointers(result)
        with torch.no_grad():
            result["a"].zero_()
        assert result["a"].untyped_storage().nbytes() <= 4 * 4 * fabric.world_size
    assert len(set(pointers)) == len(pointers)
    assert torch.equal(row, row_before)
    assert torch.equal(tree["b"], matrix_before)
    assert [row._version, weight._version] == versions
    assert set(tree) == {"a", "b", "c", "w"}


def test_results_share_nothing_with_arguments_or_each_other():
    run_in_ranks(check_purity)
    Fabric(accelerator="cpu", devices=1).launch(check_purity)


def test_changing_one_result_leaves_the_graph_of_another_alone():
    a = torch.ones(2, requires_grad=True)
    b = torch.ones(2, requires_grad=True)
    x, y = all_reduce(local(), [a, b], Reduce.SUM)
    loss = (x * x).sum()
    y.mul_(3)
    (loss + y.sum()).backward()
    assert a.grad.tolist() == [2.0, 2.0]
    assert b.grad.tolist() == [3.0, 3.0]


def test_results_without_dimensions_are_apart_though_they_were_stacked():
    w = torch.tensor(2.0, requires_grad=True)
    x = torch.tensor(3.0)
    first, second = all_reduce(local(), {"a": x, "b": torch.tensor(4.0)}, Reduce.SUM).values()
    loss = w * first
    second.mul_(10)
    loss.backward()
    assert w.grad.item() == 3.0
    assert first.item() == 3.0
    assert second.item() == 40.0
    reduced = all_reduce(local(), [w, x], Reduce.SUM)
    assert [tensor.requires_grad for tensor in reduced] == [True, False]
    gathered = all_gather(local(), [x, torch.tensor(5.0)])
    assert [tensor.tolist() for tensor in gathered] == [[3.0], [5.0]]
    assert all(tensor.is_contiguous() for tensor in gathered)


def test_conjugate_and_negative_views_are_resolved():
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert all_reduce(local(), z.conj(), Reduce.SUM).tolist() == [1 - 2j, 3 + 1j]
    assert all_gather(local(), z.conj().imag).tolist() == [[-2.0, 1.0]]


# -- names of reductions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "reduce"),
    [
        (None, Reduce.MEAN),
        ("MEAN", Reduce.MEAN),
        ("avg", Reduce.MEAN),
        (dist.ReduceOp.AVG, Reduce.MEAN),
        (dist.ReduceOp.MAX, Reduce.MAX),
        (dist.ReduceOp(dist.ReduceOp.MIN), Reduce.MIN),
        (Reduce.SUM, Reduce.SUM),
    ],
)
def test_reductions_have_names_and_torchs_own_constants(op, reduce):
    assert Reduce(op) is reduce


def test_min_and_max_take_tensors_that_require_gradients_where_none_is_asked():
    weight = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert all_reduce(local(), weight, Reduce.MAX).tolist() == [1.0, 1.0]


# -- broadcast ------------------------------------------------------------------------------------


def broadcast_objects(fabric):
    rank = fabric.global_rank
    last = fabric.world_size - 1
    weight = torch.ones(2, requires_grad=True) * (rank + 1)
    sent = dict.fromkeys(["objects", "class", "output"])
    sent["empty"] = "ignored"
    if rank == 0:
        sent["objects"] = {"a": [1, "b", None]}
        sent["class"] = Pair
        sent["empty"] = torch.ones(0, 3, dtype=torch.int16)
        sent["output"] = Output(loss=torch.ones(1), text="y")
    payload = None
    if rank == last:
        payload = {
            "step": 3,
            "w": torch.arange(6.0).view(2, 3).t(),
            "m": Metrics(torch.tensor(True), {"n": "x"}),
        }
    results = {name: fabric.broadcast(value) for name, value in sent.items()}
    results["payload"] = fabric.broadcast(payload, src=last)
    results["weight"] = fabric.broadcast(weight, src=last)
    for src in (-1, last + 1, 1.0, "0"):
        with pytest.raises(ConfigurationError, match=f"src={src}"):
            fabric.broadcast(1, src=src)
    results["requires_grad"] = results["weight"].requires_grad
    results["weight"] = results["weight"].tolist()
    return results


def run_on(size, function):
    if size == 1:
        return [Fabric(accelerator="cpu", devices=1).launch(function)]
    return run_in_ranks(function, ranks=size)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_object_is_broadcast_and_receivers_may_pass_none(size):
    for result in run_on(size, broadcast_objects):
        assert result["objects"] == {"a": [1, "b", None]}
        payload = result["payload"]
        assert payload["step"] == 3
        assert torch.equal(payload["w"], torch.arange(6.0).view(2, 3).t())
        assert payload["m"].loss.dtype is torch.bool
        assert payload["m"].counts == {"n": "x"}
        assert result["class"] is Pair
        assert result["empty"].shape == (0, 3)
        assert result["empty"].dtype == torch.int16
        assert result["requires_grad"] is True
        assert result["weight"] == [float(size)] * 2
        assert type(result["output"]) is Output
        assert result["output"]["text"] == "y"


# -- what torch's own collectives get wrong without an error --------------------------------------


def collectives_of_strided_views(fabric):
    rank = fabric.global_rank
    base = torch.arange(8.0) + 100 * rank
    return {
        "reduced": fabric.all_reduce(base[::2], reduce_op="sum").tolist(),
        "broadcast": fabric.broadcast(base[::2], src=1).tolist(),
        "exchanged": fabric.all_to_all(base.view(4, 2).t()).tolist(),
        "source": base.tolist(),
    }


def test_a_strided_view_is_sent_by_its_own_elements():
    for rank, result in enumerate(run_in_ranks(collectives_of_strided_views)):
        assert result["reduced"] == [100.0, 104.0, 108.0, 112.0]
        assert result["broadcast"] == [100.0, 102.0, 104.0, 106.0]
        from_rank_0 = torch.arange(0.0, 8.0, 2.0) + rank
        assert result["exchanged"] == [from_rank_0.tolist(), (from_rank_0 + 100).tolist()]
        assert result["source"] == (torch.arange(8.0) + 100 * rank).tolist()


def collectives_of_booleans(fabric):
    is_first = fabric.global_rank == 0
    return {
        "any": fabric.all_reduce(torch.tensor([is_first, False]), reduce_op="max").tolist(),
        "all": fabric.all_reduce(torch.tensor([is_first, True]), reduce_op="min").tolist(),
        "sum": outcome(lambda: fabric.all_reduce(torch.tensor(True), reduce_op="sum")),
    }


def test_booleans_are_never_summed_to_an_or():
    for result in run_in_ranks(collectives_of_booleans):
        assert result["any"] == [True, False]
        assert result["all"] == [False, True]
        assert "booleans have no sum" in result["sum"]


def exact_values(fabric):
    rank = fabric.global_rank
    integers = fabric.all_reduce([2**24 + 1, 2**60, torch.tensor(2**53 + 1)], reduce_op="sum")
    ragged = fabric.all_gather(torch.arange(4.0 + rank), ragged=True)
    uint16 = torch.tensor([1], dtype=torch.uint16)
    return {
        "integers": [int(value) for value in integers],
        "ragged": [tensor.tolist() for tensor in ragged],
        "uint16": fabric.all_reduce(uint16, reduce_op="sum").tolist(),
        "sum": fabric.all_reduce(rank + 1, reduce_op="sum"),
        "maximum": fabric.all_reduce(rank + 1, reduce_op="max"),
    }


def test_values_keep_every_digit_and_stay_apart():
    for result in run_in_ranks(exact_values):
        assert result["integers"] == [2**25 + 2, 2**61, 2**54 + 2]
        assert result["ragged"] == [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0, 4.0]]
        assert result["uint16"] == [2]
        assert result["sum"] == 3
        assert result["maximum"] == 2


def test_the_mean_of_integers_is_refused_not_rounded():
    with pytest.raises(ConfigurationError, match="not an integer"):
        all_reduce(local(), torch.ones(2).long(), Reduce.MEAN)


def test_a_half_precision_mean_does_not_overflow_in_its_sum():
    assert all_reduce(local(), torch.tensor([60000.0]).half(), Reduce.MEAN).tolist() == [60000.0]

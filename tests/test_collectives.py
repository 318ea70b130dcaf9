"""Collectives over collections: pure, exact, one per dtype, and with the right gradients."""

import dataclasses
import enum
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
from fabric.errors import ArgumentTypeError, ConfigurationError
from fabric.testing import ThreadedWorld
from tests.ranks import run_in_ranks

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


class Counting(Communicator):
    """Passes everything on, and notes each collective by name and dtype."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.calls = []
        self.rank = inner.rank
        self.size = inner.size
        self.device = inner.device

    def run(self, collective):
        tensor = collective.buffer if isinstance(collective.buffer, torch.Tensor) else None
        assert tensor is None or tensor.is_contiguous()
        self.calls.append((collective.operation.value, None if tensor is None else tensor.dtype))
        return self.inner.run(collective)

    def close(self):
        self.inner.close()


def launch(ranks, function, *args):
    return run_in_ranks(function, *args, ranks=ranks)


def local():
    return Counting(LocalCommunicator(CPU))


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
    """Contiguous, strided, transposed, expanded, 0-dim and empty."""
    base = torch.tensor([[1, 2, 4], [2, 1, 1]], dtype=torch.float64) * (
        rank + 1 if dtype is not torch.bool else rank
    )
    base = base.to(dtype)
    wide = torch.tensor([1, 0, 2, 0, 1, 0], dtype=torch.float64).to(dtype)
    one = torch.tensor(float(rank)).to(dtype)
    return [base, base.t(), wide[::2], one, one.expand(2, 3), base[:0], one.reshape(1)]


# -- dtypes, shapes, strides ----------------------------------------------------------------------


def every_dtype(fabric, size):
    for dtype in DTYPES:
        mine = tensors_of(fabric.global_rank, dtype)
        everyone = [tensors_of(rank, dtype) for rank in range(size)]
        kept = [tensor.clone() for tensor in mine]
        gathered = fabric.all_gather(mine)
        sent = fabric.broadcast(mine, src=size - 1)
        for place, tensor in enumerate(mine):
            parts = [one[place].to(torch.complex128) for one in everyone]
            assert gathered[place].dtype is sent[place].dtype is dtype
            assert gathered[place].shape == (size, *tensor.shape)
            assert sent[place].shape == tensor.shape
            assert torch.equal(gathered[place].to(torch.complex128), torch.stack(parts)), dtype
            assert torch.equal(sent[place].to(torch.complex128), parts[-1]), dtype
            assert torch.equal(tensor.to(torch.complex128), kept[place].to(torch.complex128)), dtype
    return True


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_and_stride_is_gathered_and_broadcast_exactly(size):
    assert all(launch(size, every_dtype, size))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_passes_on_one_process():
    for dtype in DTYPES:
        for tensor in tensors_of(0, dtype):
            assert all_gather(local(), tensor).shape == (1, *tensor.shape)
            assert broadcast(local(), tensor, 0, CPU).dtype is dtype


def reductions_of_every_dtype(fabric, size):
    folds = {
        "min": torch.minimum,
        "max": torch.maximum,
        "sum": torch.add,
        "product": torch.mul,
        "mean": torch.add,
    }
    for dtype in [*FLOATS, *COMPLEX, *INTEGERS]:
        everyone = [tensors_of(rank, dtype) for rank in range(size)]
        for op, fold in folds.items():
            if (op == "mean" and not (dtype.is_floating_point or dtype.is_complex)) or (
                op in ("min", "max", "product")
                and (dtype.is_complex or (dtype is torch.uint64 and op != "product"))
            ):
                continue
            results = fabric.all_reduce(everyone[fabric.global_rank], reduce_op=op)
            wide = torch.complex128 if dtype.is_complex else torch.float64
            for place, result in enumerate(results):
                expected = everyone[0][place].to(wide)
                for other in everyone[1:]:
                    expected = fold(expected, other[place].to(wide))
                expected = (expected / size if op == "mean" else expected).to(dtype).to(wide)
                assert result.dtype is dtype
                assert result.shape == expected.shape
                torch.testing.assert_close(
                    result.to(wide), expected, rtol=1e-6, atol=0, msg=f"{dtype} {op} {place}"
                )
    return True


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_and_stride_is_reduced_as_on_one_process(size):
    assert all(launch(size, reductions_of_every_dtype, size))


def extremes(fabric):
    rank = fabric.global_rank
    return {
        "large int": fabric.all_reduce(2**60 + rank, reduce_op="sum"),
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


@pytest.mark.timeout(60)
def test_extreme_values_are_exact():
    for result in launch(3, extremes):
        assert result["large int"] == 3 * 2**60 + 3
        assert result["max int"] == result["int tensor"] == 2**53 + 2
        assert result["float16 mean"] == 60000 - 60000 % 32
        assert result["bfloat16 mean"] == 1.0078125
        assert (result["large float"], result["smallest"]) == (1e300, 5e-324)
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


@pytest.mark.timeout(60)
def test_numbers_stay_numbers():
    for result in launch(2, numbers):
        assert result["sum"] == {"float": 2.0, "int": 21, "complex": 1 + 2j, "numpy": 1.0, "i32": 1}
        assert [type(value) for value in result["sum"].values()] == [
            float,
            int,
            complex,
            float,
            int,
        ]
        assert result["gather"]["int"] == [10, 11]
        assert result["gather"]["bool"] == [False, True]
        assert result["gather"]["complex"] == [1j, 1 + 1j]
        assert all(type(one) is bool for one in result["gather"]["bool"])
        assert result["min"][:2] == [False, True]
        assert result["max"][:2] == [True, False]
        assert (result["min"][2].tolist(), result["max"][2].tolist()) == (
            [False, True],
            [True, False],
        )
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
    assert (reduced["n"], reduced["flag"]) == (3, True)


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
    return fabric.all_reduce(nested(fabric.global_rank), reduce_op="sum"), fabric.all_gather(
        nested(fabric.global_rank)
    )


@pytest.mark.timeout(60)
def test_nested_collections_keep_their_types():
    for reduced, gathered in launch(2, reduce_nested):
        for result in (reduced, gathered):
            assert [type(one) for one in result] == [type(one) for one in nested(0)]
        assert reduced[0].left.tolist() == [1.0, 1.0]
        assert reduced[0].right[0] == 1
        assert reduced[1].counts == {"n": 1}
        assert reduced[2].default_factory is list
        assert reduced[3]["step"] == 1
        assert list(reduced[4]) == ["b", "a", 3, (1, 2)]
        assert gathered[0].left.tolist() == [[0.0, 0.0], [1.0, 1.0]]
        assert gathered[3]["step"] == [0, 1]


def different_order(fabric):
    keys = ["loss", "accuracy", 3, 1.5, ("a", 1), frozenset("ab"), frozenset("c")]
    keys = keys if fabric.global_rank == 0 else keys[::-1]
    values = {
        "loss": 1.0,
        "accuracy": 2.0,
        3: 3.0,
        1.5: 4.0,
        ("a", 1): 5.0,
        frozenset("ab"): 6.0,
        frozenset("c"): 7.0,
    }
    tree = {key: torch.tensor(values[key]) for key in keys}
    results = (
        fabric.all_reduce(tree),
        fabric.broadcast(tree),
        {k: v[1] for k, v in fabric.all_gather(tree).items()},
    )
    return [sorted(result.items(), key=lambda item: item[1]) for result in results]


@pytest.mark.timeout(60)
def test_ranks_that_filled_a_dict_in_another_order_agree():
    for result in launch(2, different_order):
        for entries in result:
            assert [float(value) for _, value in entries] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
            assert [key for key, _ in entries][:3] == ["loss", "accuracy", 3]


@pytest.mark.parametrize("gather", [False, True])
def test_a_tree_costs_one_collective_per_dtype(gather):
    communicator = local()
    tree = [
        torch.ones(2),
        torch.ones(3, 3),
        torch.ones((), dtype=torch.float64),
        1.0,
        2,
        torch.ones(1).long(),
    ]
    all_gather(communicator, tree) if gather else all_reduce(communicator, tree, Reduce.SUM)
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
    communicator = Counting(fabric.strategy.communicator())
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


def purity(fabric):
    ones = torch.ones(4)
    tree = {"a": ones, "b": torch.ones(2, 2).t(), "c": 1, "w": torch.nn.Parameter(torch.ones(2))}
    before = [ones.clone(), tree["b"].clone()]
    versions = [ones._version, tree["w"]._version]
    results = [
        fabric.all_reduce(tree, reduce_op="sum"),
        fabric.all_gather(tree),
        fabric.broadcast(tree),
    ]
    pointers = [one[name].untyped_storage().data_ptr() for one in results for name in "abw"]
    pointers += [tree[name].untyped_storage().data_ptr() for name in "abw"]
    for result in results:
        with torch.no_grad():
            result["a"].zero_()
    assert len(set(pointers)) == len(pointers)
    assert torch.equal(ones, before[0])
    assert torch.equal(tree["b"], before[1])
    assert [ones._version, tree["w"]._version] == versions
    assert set(tree) == {"a", "b", "c", "w"}
    assert all(one["a"].untyped_storage().nbytes() <= 4 * 4 * fabric.world_size for one in results)
    return True


@pytest.mark.timeout(60)
def test_results_share_nothing_with_arguments_or_each_other():
    assert all(launch(2, purity))
    assert Fabric(accelerator="cpu", devices=1).launch(purity)


def test_changing_one_result_leaves_the_graph_of_another_alone():
    a = torch.ones(2, requires_grad=True)
    b = torch.ones(2, requires_grad=True)
    x, y = all_reduce(local(), [a, b], Reduce.SUM)
    loss = (x * x).sum()
    y.mul_(3)
    (loss + y.sum()).backward()
    assert (a.grad.tolist(), b.grad.tolist()) == ([2.0, 2.0], [3.0, 3.0])


def test_results_without_dimensions_are_apart_though_they_were_stacked():
    w = torch.tensor(2.0, requires_grad=True)
    x = torch.tensor(3.0)
    first, second = all_reduce(local(), {"a": x, "b": torch.tensor(4.0)}, Reduce.SUM).values()
    loss = w * first
    second.mul_(10)
    loss.backward()
    assert (w.grad.item(), first.item(), second.item()) == (3.0, 3.0, 40.0)
    reduced = all_reduce(local(), [w, x], Reduce.SUM)
    assert [one.requires_grad for one in reduced] == [True, False]
    gathered = all_gather(local(), [x, torch.tensor(5.0)])
    assert [one.tolist() for one in gathered] == [[3.0], [5.0]]
    assert all(one.is_contiguous() for one in gathered)


def test_conjugate_and_negative_views_are_resolved():
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert all_reduce(local(), z.conj(), Reduce.SUM).tolist() == [1 - 2j, 3 + 1j]
    assert all_gather(local(), z.conj().imag).tolist() == [[-2.0, 1.0]]


# -- refusals -------------------------------------------------------------------------------------

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


def refused(communicator):
    import re

    missed = []
    for place, (tree, op, pattern) in enumerate(REFUSALS):
        try:
            all_reduce(communicator, tree, Reduce(op))
        except ConfigurationError as error:
            parts = (error.request, error.problem, error.suggestion)
            if not all(parts) or not re.search(pattern, " ".join(parts)):
                missed.append((place, str(error)))
        else:
            missed.append((place, "nothing raised"))
    return missed


def test_reductions_without_meaning_are_refused_before_any_collective():
    communicator = local()
    assert refused(communicator) == []
    assert communicator.calls == []


@pytest.mark.timeout(60)
def test_reductions_without_meaning_are_refused_on_several_processes():
    assert launch(2, lambda fabric: refused(fabric.strategy.runtime.communicator)) == [[], []]


@pytest.mark.parametrize("op", ["average", "", 3, "median", torch.float32, "ReduceOp.SUM"])
def test_an_unknown_reduction_is_refused_on_one_process_too(op):
    with pytest.raises(ValueError, match=r"'mean', 'sum', 'min', 'max', 'product', .*, 'avg'"):
        Fabric(accelerator="cpu", devices=1).all_reduce(torch.ones(1), reduce_op=op)


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


def sent(fabric):
    rank = fabric.global_rank
    last = fabric.world_size - 1
    payload = {
        "step": 3,
        "w": torch.arange(6.0).view(2, 3).t(),
        "m": Metrics(torch.tensor(True), {"n": "x"}),
    }
    weight = torch.ones(2, requires_grad=True) * (rank + 1)
    results = {
        "objects": fabric.broadcast({"a": [1, "b", None]} if rank == 0 else None),
        "tensors": fabric.broadcast(payload if rank == last else None, src=last),
        "class": fabric.broadcast(Pair if rank == 0 else None),
        "empty": fabric.broadcast(torch.ones(0, 3, dtype=torch.int16) if rank == 0 else "ignored"),
        "requires grad": fabric.broadcast(weight, src=last).requires_grad,
        "value": fabric.broadcast(weight, src=last).tolist(),
        "output": fabric.broadcast(Output(loss=torch.ones(1), text="y") if rank == 0 else None),
    }
    refused = []
    for src in (-1, last + 1, 1.0, "0"):
        with pytest.raises(ConfigurationError, match=f"src={src}"):
            fabric.broadcast(1, src=src)
        refused.append(src)
    return results


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_object_is_broadcast_and_receivers_may_pass_none(size):
    results = (
        [Fabric(accelerator="cpu", devices=1).launch(sent)] if size == 1 else launch(size, sent)
    )
    for result in results:
        assert result["objects"] == {"a": [1, "b", None]}
        assert torch.equal(result["tensors"]["w"], torch.arange(6.0).view(2, 3).t())
        assert result["tensors"]["step"] == 3
        assert result["tensors"]["m"].loss.dtype is torch.bool
        assert result["tensors"]["m"].counts == {"n": "x"}
        assert result["class"] is Pair
        assert (result["empty"].shape, result["empty"].dtype) == ((0, 3), torch.int16)
        assert (result["requires grad"], result["value"]) == (True, [float(size)] * 2)
        assert (type(result["output"]), result["output"]["text"]) == (Output, "y")


def refused_broadcasts(fabric):
    mine = fabric.global_rank == 1
    with pytest.raises(ArgumentTypeError, match="does not pickle"):
        fabric.broadcast({"f": lambda: 0} if mine else None, src=1)
    with pytest.raises(ConfigurationError, match=r"\['x'\].*\n.*sparse"):
        fabric.broadcast({"x": torch.ones(2).to_sparse()} if mine else None, src=1)
    return fabric.all_reduce(1, reduce_op="sum")


@pytest.mark.timeout(60)
def test_what_cannot_be_broadcast_raises_on_every_rank():
    assert launch(2, refused_broadcasts) == [2, 2]

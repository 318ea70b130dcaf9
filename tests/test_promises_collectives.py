"""Collectives are right on every rank, or an error on every rank, without checked mode."""

import random
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fabric import Fabric
from fabric.collectives import all_gather, all_reduce
from fabric.collectives.buckets import MEAN_WIRE_DTYPES, WIRE_DTYPES
from fabric.communicators import (
    Collective,
    Communicator,
    LocalCommunicator,
    Operation,
    ProcessGroupCommunicator,
    Reduce,
    fold,
)
from fabric.communicators.base import BITWISE, ORDERED
from fabric.communicators.checked import checksums_agree, signed
from fabric.diagnostics.recorder import FlightRecorder, RecordedCommunicator
from tests.hostile.collectives import Unreadable
from tests.ranks import outcome, run_in_ranks

CPU = torch.device("cpu")
LARGE = 20_000  # float32 elements, more than 64 KiB


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def mismatches(fabric: Fabric) -> dict[str, Callable[[], Any]]:
    """Calls that differ on rank 0."""
    first = fabric.global_rank == 0
    reduce = partial(fabric.all_reduce, reduce_op="sum")
    gather = fabric.all_gather
    return {
        "an int beside a float": lambda: reduce({"acc": 0 if first else 0.5}),
        "a number beside a tensor": lambda: reduce(
            {"acc": 0.5 if first else ones(dtype=torch.float64)}
        ),
        "keys": lambda: reduce({"loss" if first else "acc": 1.0}),
        "one key more": lambda: reduce({"loss": 1.0, **({"acc": 1.0} if first else {})}),
        "sum beside max": lambda: fabric.all_reduce(1.0, reduce_op="sum" if first else "max"),
        "sum beside mean": lambda: fabric.all_reduce(1.0, reduce_op="sum" if first else "mean"),
        "max beside min": lambda: fabric.all_reduce(ones(3), reduce_op="max" if first else "min"),
        "min beside product": lambda: fabric.all_reduce(
            ones(3), reduce_op="min" if first else "product"
        ),
        "bxor beside sum": lambda: fabric.all_reduce(3, reduce_op="bxor" if first else "sum"),
        "dtypes": lambda: reduce(ones(2, dtype=torch.float32 if first else torch.int32)),
        "16 bits": lambda: reduce(ones(2, dtype=torch.float16 if first else torch.bfloat16)),
        "widths": lambda: reduce(ones(2, dtype=torch.int8 if first else torch.int64)),
        "shapes": lambda: reduce(ones(2, 3) if first else ones(3, 2)),
        "lengths": lambda: reduce(ones(2 if first else 3)),
        "large shapes": lambda: reduce(ones(LARGE, 1) if first else ones(LARGE)),
        "large lengths": lambda: reduce(ones(LARGE + first)),
        "small beside large": lambda: reduce(ones(1 if first else LARGE)),
        "with a gradient": lambda: reduce(ones(2 + first).requires_grad_()),
        "gathered lengths": lambda: gather(ones(32 if first else 17, 10)),
        "gathered small lengths": lambda: gather(ones(2 if first else 3)),
        "operations": lambda: reduce(ones(2)) if first else gather(ones(2)),
        "large operations": lambda: gather(ones(LARGE)) if first else reduce(ones(3)),
        "ragged on one": lambda: gather(ones(2), ragged=first),
        "large ragged on one": lambda: gather(ones(LARGE), ragged=first),
        "concat on one": lambda: gather(ones(2), ragged=True, concat=first),
        "gathered dtypes": lambda: gather(ones(2, dtype=torch.float32 if first else torch.int32)),
        "gathered numbers": lambda: gather({"acc": 0 if first else 0.5}),
        "gathered keys": lambda: gather({"loss" if first else "acc": ones(LARGE)}),
        "rows": lambda: fabric.all_to_all(ones(fabric.world_size, 3 if first else 4)),
        "large rows": lambda: fabric.all_to_all(ones(fabric.world_size, LARGE + first)),
        "scattered": lambda: fabric.reduce_scatter(
            ones(fabric.world_size, 3 if first else 4), reduce_op="sum"
        ),
        "scattered ops": lambda: fabric.reduce_scatter(
            ones(fabric.world_size, 3), reduce_op="sum" if first else "min"
        ),
        "sources": lambda: fabric.broadcast({"x": ones(2)}, src=fabric.global_rank % 2),
        "sources of parts": lambda: fabric.scatter([1] * fabric.world_size, src=int(first)),
        "destinations": lambda: fabric.gather(1, dst=int(first)),
        "large scattered": lambda: fabric.reduce_scatter(
            ones(fabric.world_size, LARGE + first), reduce_op="sum"
        ),
    }


def outcomes_of_mismatches(fabric: Fabric) -> dict[str, str]:
    found = {name: outcome(call) for name, call in mismatches(fabric).items()}
    found["afterwards"] = str(fabric.all_reduce({"loss": 1.0}, reduce_op="sum"))
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_mismatch_is_an_error_on_every_rank_and_the_next_call_is_right(ranks: int) -> None:
    for actual in run_in_ranks(outcomes_of_mismatches, ranks=ranks):
        assert actual.pop("afterwards") == str({"loss": float(ranks)})
        assert {
            name: text
            for name, text in actual.items()
            if not text.startswith("CollectiveMismatchError")
        } == {}
        assert "all_reduce(sum of acc: 1 " in actual["an int beside a float"]
        assert "test_promises_collectives.py:" in actual["an int beside a float"]
        assert "FABRIC_CHECK=1" in actual["keys"]
        assert "ragged=True" in actual["gathered lengths"]
        assert "ragged=True" not in actual["lengths"]


def agreeing(fabric: Fabric) -> dict[str, Any]:
    """Calls that are the same, though they may not look it."""
    rank = fabric.global_rank
    size = fabric.world_size
    keys = ["b", "a"] if rank else ["a", "b"]
    numbers = [float(rank), torch.tensor(float(rank)).double().item()]
    return {
        "order of insertion": fabric.all_reduce(dict.fromkeys(keys, 1.0), reduce_op="sum"),
        "types of numbers": fabric.all_reduce(numbers[rank % 2 :][:1] * 2, reduce_op="max"),
        "a list beside a tuple": list(
            fabric.all_reduce([1.0, 2.0] if rank else (1.0, 2.0), reduce_op="sum")
        ),
        "texts": fabric.all_reduce([None if rank else "text", 1.0], reduce_op="sum")[1],
        "gradients": fabric.all_reduce(ones(2).requires_grad_(rank > 0), reduce_op="sum").tolist(),
        "strides": fabric.all_reduce(
            ones(3, 2).t() if rank else ones(2, 3), reduce_op="sum"
        ).tolist(),
        "large": fabric.all_reduce(ones(LARGE), reduce_op="sum").sum().item(),
        "keys without an order": len(
            fabric.all_reduce({outcome: 1.0, ("a", 1): 2.0}, reduce_op="sum")
        ),
        "empty": fabric.all_reduce([{}, ones(0), 1.0], reduce_op="sum")[2],
        "scattered": fabric.reduce_scatter(ones(size, 2), reduce_op="max").tolist(),
        "exchanged": fabric.all_to_all(ones(size, 20) * rank)[:, 0].tolist(),
        "not a number": [
            fabric.all_reduce(ones(LARGE, dtype=dtype) * value, reduce_op=op).isnan().all().item()
            for dtype in (torch.float64, torch.float32, torch.bfloat16)
            for value in ((1.0, float("nan"))[rank], (1.0, float("nan"))[1 - rank])
            for op in ("max", "min")
        ],
        "ordered": [
            fabric.all_reduce(
                torch.tensor([-2.0, 0.5, float("inf"), -1e-45]).repeat(LARGE), reduce_op=op
            )[:4].tolist()
            for op in ("max", "min")
        ],
        "alone": fabric.all_reduce(ones(2), reduce_op="sum").untyped_storage().nbytes(),
        "decisions": [
            fabric.strategy.reduce_boolean_decision(rank > 0, all=every) for every in (True, False)
        ],
    }


@pytest.mark.timeout(60)
def test_calls_that_agree_pass_and_results_hold_nothing_else() -> None:
    for actual in run_in_ranks(agreeing):
        assert actual == {
            "order of insertion": {"a": 2.0, "b": 2.0},
            "types of numbers": [1.0, 1.0],
            "a list beside a tuple": [2.0, 4.0],
            "texts": 2.0,
            "gradients": [2.0, 2.0],
            "strides": [[2.0] * 3] * 2,
            "large": 2.0 * LARGE,
            "keys without an order": 2,
            "empty": 2.0,
            "scattered": [1.0, 1.0],
            "exchanged": [0.0, 1.0],
            "not a number": [True] * 12,
            "ordered": [[-2.0, 0.5, float("inf"), -1.401298464324817e-45]] * 2,
            "alone": 8,
            "decisions": [False, True],
        }


# -- the rule, with the arithmetic of any number of ranks -----------------------------------------

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint64,
    torch.bool,
]
DTYPES = [*FLOATS, *COMPLEX, *INTEGERS]


def has_meaning(op: Reduce, dtype: torch.dtype) -> bool:
    inexact = dtype.is_floating_point or dtype.is_complex
    return not (
        (op is Reduce.MEAN and not inexact)
        or (op in BITWISE and inexact)
        or (op in ORDERED and dtype.is_complex)
    )


REDUCTIONS = [
    (Operation.ALL_REDUCE, op, dtype) for op in Reduce for dtype in DTYPES if has_meaning(op, dtype)
]
GATHERS = [(Operation.ALL_GATHER, None, dtype) for dtype in DTYPES]


def message(
    operation: Operation, op: Reduce | None, dtype: torch.dtype, size: int, text: str
) -> Collective:
    """What a rank sends first."""
    wire = (MEAN_WIRE_DTYPES if op is Reduce.MEAN else WIRE_DTYPES).get(dtype, dtype)
    return signed(Collective(operation, torch.ones(2).to(wire), op), text, size).collective


def agreed(sent: list[Collective]) -> bool:
    """What the ranks find out, which all make the same call whatever they were going to do."""
    assert (
        len({(each.operation, each.reduce, each.buffer.dtype, each.buffer.shape) for each in sent})
        == 1
    )
    rows = [each.buffer for each in sent]
    op = sent[0].reduce
    return checksums_agree(torch.stack(rows)[:, 0] if op is None else fold(op, rows))


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_no_number_of_ranks_gives_a_false_alarm() -> None:
    generator = random.Random(0)
    for number, (operation, op, dtype) in enumerate([*REDUCTIONS, *GATHERS]):
        for size in [*range(1 + number % 8, 65, 8), 255, 256, 257]:
            sent = [message(operation, op, dtype, size, str(generator.random()))] * size
            assert agreed(sent), (op, dtype, size)


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_of_ten_thousand_mismatches_none_is_missed() -> None:
    generator = random.Random(1)
    for number in range(10_000):
        calls = generator.choice([REDUCTIONS, REDUCTIONS, GATHERS])
        size = generator.randint(2, 8) if number % 50 else generator.randint(9, 64)
        usual = generator.choice(calls)
        odd = generator.choice(calls)
        texts = [str(generator.random()), str(generator.random())]
        strays = set(generator.sample(range(size), generator.randint(1, size - 1)))
        sent = [
            message(*(odd if rank in strays else usual), size, texts[rank in strays])
            for rank in range(size)
        ]
        assert not agreed(sent), (usual, odd, size, strays)


class Many(LocalCommunicator):
    """The first of twenty ranks, all of which pass what it does."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.size = 20
        self.heard = list[tuple[Operation, list[float]]]()

    def run(self, collective: Collective) -> Any:
        self.heard.append((collective.operation, collective.buffer.tolist()))
        return collective.buffer


def test_in_a_group_of_many_ranks_a_message_of_one_length_goes_before() -> None:
    many = Many()
    assert all_reduce(RecordedCommunicator(many, FlightRecorder()), 3.0, Reduce.MAX) == 3
    (first, [checksum, negative]), call = many.heard
    assert first is Operation.ALL_REDUCE
    assert checksum == -negative
    assert call == (Operation.ALL_REDUCE, [3.0])


# -- an accelerator, whose comparison waits -------------------------------------------------------


class Elsewhere(Communicator):
    """As on a device that is not waited for at every call."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.device = torch.device("cpu", 0)

    def run(self, collective: Collective) -> Any:
        group = self._inner.run(collective)
        return Elsewhere(group) if collective.operation is Operation.NEW_GROUP else group


def late(fabric: Fabric) -> list[str]:
    first = fabric.global_rank == 0
    recorder = FlightRecorder()
    communicator = RecordedCommunicator(Elsewhere(ProcessGroupCommunicator(None, CPU)), recorder)
    found = [outcome(lambda: all_reduce(communicator, ones(2 + first), Reduce.SUM))]
    found += [outcome(lambda: all_gather(communicator, ones(2)))]
    found += [outcome(lambda: all_reduce(communicator, 1.0, Reduce.SUM))]
    found += [outcome(lambda: all_reduce(communicator, 1.0, Reduce.SUM))]
    group: Any = communicator.new_group([0, 1])
    found += [outcome(lambda: all_gather(group, ones(2 + first)))]
    found += [outcome(recorder.check_signatures)]
    return found


@pytest.mark.timeout(60)
def test_on_a_device_the_error_comes_where_the_rank_waits_and_names_the_earlier_call() -> None:
    for actual in run_in_ranks(late):
        assert [text.partition(":")[0] for text in actual] == [
            "fine",
            "fine",
            "CollectiveMismatchError",
            "fine",
            "fine",
            "CollectiveMismatchError",
        ]
        assert "all_reduce(sum of 1 float32[" in actual[2]
        assert "all_gather(1 float32[" in actual[5]


# -- Python integers ------------------------------------------------------------------------------


def integers(fabric: Fabric) -> dict[str, Any]:
    first = fabric.global_rank == 0
    reduce = partial(fabric.all_reduce, reduce_op="sum")
    product = partial(fabric.all_reduce, reduce_op="product")
    return {
        "sum": reduce(2**62),
        "of many": reduce(
            {"a": [2**63 - 1, -(2**63), -1, 0], "t": torch.tensor([2, 3]), "b": -1 if first else 1}
        ),
        "some": reduce([2**62, 0.5, torch.tensor(1), "text"]),
        "product": product(
            [3 if first else -5, 2**40 if first else 2**22, True and 1, 0 if first else 2**62]
        ),
        "large": outcome(lambda: product(2**32)),
        "largest": outcome(lambda: product({"n": 2**62})),
        "zero mod 64 bits": outcome(lambda: product([2**40, 1.0])),
        "beyond": outcome(lambda: reduce(2**70 if first else 1)),
        "afterwards": reduce(1),
    }


@pytest.mark.timeout(60)
def test_sums_and_products_of_python_integers_never_wrap() -> None:
    for rank, actual in enumerate(run_in_ranks(integers)):
        assert actual["sum"] == 2**63
        assert actual["of many"]["a"] == [2**64 - 2, -(2**64), -2, 0]
        assert actual["of many"]["t"].tolist() == [4, 6]
        assert actual["of many"]["b"] == 0
        assert actual["some"] == [2**63, 1.0, torch.tensor(2), "text"]
        assert actual["product"] == [-15, 2**62, 1, 0]
        for name in ("large", "largest", "zero mod 64 bits"):
            assert actual[name].startswith("ConfigurationError: a product of Python integers"), name
        assert actual["beyond"].startswith(
            ("CollectiveMismatchError", "ConfigurationError")[1 - rank]
        )
        assert actual["afterwards"] == 2


# -- what cannot travel ---------------------------------------------------------------------------


class Holder:
    """An object that holds a tensor, and is not taken apart."""

    def __init__(self) -> None:
        self.state = {"total": torch.ones(1)}


def not_sent(fabric: Fabric) -> dict[str, list[str]]:
    """The outcomes of calls with what does not travel: on every rank, then on rank 0 alone."""
    first = fabric.global_rank == 0
    x = torch.ones(2)

    def forward(value: Any, collective: Callable[[Any], Any]) -> str:
        return outcome(lambda: collective(value))

    def dual(collective: Callable[[Any], Any]) -> str:
        with torch.autograd.forward_ad.dual_level():
            return outcome(lambda: collective([torch.autograd.forward_ad.make_dual(x, x)]))

    leaves: dict[str, Callable[[], Any]] = {
        "set": lambda: {1.0},
        "iterator": lambda: iter([x]),
        "values": lambda: {"a": x}.values(),
        "Decimal": lambda: Decimal("0.5"),
        "Holder": Holder,
        "Linear": lambda: torch.nn.Linear(1, 1),
        "nested": lambda: torch.nested.as_nested_tensor([x, torch.ones(3)], layout=torch.jagged),
        "strided nested": lambda: torch.nested.nested_tensor([x, torch.ones(3)]),
        "quantized": lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
    }
    collectives = {
        "reduce": partial(fabric.all_reduce, reduce_op="sum"),
        "gather": fabric.all_gather,
        "ragged": partial(fabric.all_gather, ragged=True),
    }
    found = {}
    for title, collective in collectives.items():
        for name, make in leaves.items():
            everywhere = forward([make()], collective)
            found[f"{title} {name}"] = [everywhere, forward([make() if first else x], collective)]
        under_jvp = outcome(lambda run=collective: torch.func.jvp(run, (x,), (x,)))
        found[f"{title} jvp"] = [
            under_jvp,
            outcome(lambda run=collective: torch.func.jvp(run, (x,), (x,)) if first else run(x)),
        ]
        found[f"{title} dual"] = [
            dual(collective),
            dual(collective) if first else forward([x], collective),
        ]
        found[f"{title} scalar"] = [
            outcome(lambda run=collective: torch.func.jvp(run, (x[0],), (x[0],)))
        ] * 2
    shared = {"broadcast": fabric.broadcast, "gather": fabric.gather}
    for title, collective in shared.items():
        for name in ("nested", "strided nested", "quantized"):
            alone = forward(leaves[name]() if first else x, collective)
            found[f"shared {title} {name}"] = [forward(leaves[name](), collective), alone]
    chunks = partial(fabric.all_to_all), partial(fabric.reduce_scatter, reduce_op="sum")
    for number, collective in enumerate(chunks):
        found[f"chunks {number}"] = [
            forward(x[:1], collective),
            forward(x[:1] if first else x, collective),
        ]
    found["mean"] = [
        outcome(lambda: fabric.all_reduce(1)),
        outcome(lambda: fabric.all_reduce(1 if first else 1.0)),
    ]
    found["afterwards"] = [str(fabric.all_reduce(1, reduce_op="sum"))]
    return found


def received(fabric: Fabric) -> list[str]:
    first = fabric.is_global_zero
    mine = Unreadable()
    calls: list[Callable[[], Any]] = [
        lambda: fabric.broadcast(mine if first else None),
        lambda: fabric.scatter([1, mine] if first else None),
        lambda: fabric.send(mine, 1) if first else fabric.recv(0),
        lambda: fabric.gather(mine if not first else 1, dst=0),
    ]
    return [*map(outcome, calls), str(fabric.all_reduce(1, reduce_op="sum"))]


def test_what_a_receiver_cannot_read_is_an_error_that_says_so() -> None:
    first, second = run_in_ranks(received)
    assert [text.partition(":")[0] for text in first] == ["fine"] * 3 + ["ArgumentTypeError", "2"]
    assert [text.partition(":")[0] for text in second] == ["ArgumentTypeError"] * 3 + ["fine", "2"]
    assert "it cannot be read here: ModuleNotFoundError('no such module')" in second[0]


class Broken(dict[str, Any]):
    """Raises when it is taken apart."""

    def __getitem__(self, key: str) -> Any:
        raise LookupError(key)


def broken_on_the_first(fabric: Fabric) -> list[str]:
    tree = Broken(a=torch.ones(2)) if fabric.is_global_zero else {"a": torch.ones(2)}
    calls: list[Callable[[], Any]] = [
        lambda: fabric.all_reduce(tree),
        lambda: fabric.all_gather(tree),
        lambda: fabric.all_gather(tree, ragged=True),
        lambda: fabric.broadcast(tree),
        lambda: fabric.gather(tree),
        lambda: fabric.scatter([tree, tree] if fabric.is_global_zero else None),
    ]
    return [*map(outcome, calls), str(fabric.all_reduce(1, reduce_op="sum"))]


@pytest.mark.timeout(60)
def test_what_raises_while_it_is_taken_apart_raises_on_every_rank() -> None:
    first, second = run_in_ranks(broken_on_the_first)
    assert [text.split(":")[0] for text in first] == ["LookupError"] * 3 + [
        "ArgumentTypeError"
    ] * 3 + ["2"]
    assert [text.split(":")[0] for text in second] == ["CollectiveMismatchError"] * 3 + [
        "ArgumentTypeError"
    ] * 3 + ["2"]
    assert all("LookupError: a" in text for text in first[3:6] + second[3:6])


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_does_not_travel_is_refused_on_every_rank_also_where_one_has_it() -> None:
    for rank, actual in enumerate(run_in_ranks(not_sent)):
        assert actual.pop("afterwards") == ["2"]
        for name, (everywhere, alone) in actual.items():
            assert everywhere.startswith("ConfigurationError"), (name, everywhere)
            mine = rank == 0 or "scalar" in name or "shared" in name
            assert alone.startswith("ConfigurationError" if mine else "CollectiveMismatchError"), (
                name,
                alone,
            )
        assert "torch.autograd.grad" in actual["reduce jvp"][0]
        assert "dequantize" in actual["gather quantized"][0]
        assert "float(x)" in actual["reduce Decimal"][0]
        assert "[0]" in actual["reduce Holder"][0]


def in_other_modes(fabric: Fabric) -> list[Any]:
    reduce = partial(fabric.all_reduce, reduce_op="sum")
    found = []
    with torch.inference_mode():
        found.append(reduce({"first": 1.0}))
    weight = torch.ones(2, requires_grad=True)
    reduce({"w": weight})["w"].sum().backward()
    with torch.device("meta"):
        found.append(reduce({"second": 2.0}))
    return [*found, reduce({"first": 1.0}), weight.grad]


@pytest.mark.timeout(60)
def test_a_signature_that_was_made_in_another_mode_is_used_in_any() -> None:
    for actual in run_in_ranks(in_other_modes):
        assert actual[:3] == [{"first": 2.0}, {"second": 4.0}, {"first": 2.0}]
        assert actual[3].tolist() == [2.0, 2.0]

"""Ranks that make different calls get an error on every rank, without the checked mode."""

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fabric import Fabric
from fabric.collectives import all_gather, all_reduce
from fabric.collectives.buckets import wire_dtype
from fabric.communicators import (
    Collective,
    Communicator,
    LocalCommunicator,
    Operation,
    ProcessGroupCommunicator,
    Reduce,
    fold,
)
from fabric.communicators.base import BITWISE, MIN_MAX_PRODUCT, CallDescription
from fabric.communicators.checked import CheckedCommunicator, PendingSignatures, checksums_agree
from fabric.communicators.recorded import RecordedCommunicator
from fabric.diagnostics.recorder import FlightRecorder
from tests.ranks import outcome, run_in_ranks

CPU = torch.device("cpu")
LARGE = 20_000  # float32 elements, more than 64 KiB
NAN = float("nan")
INFINITY = float("inf")

Call = Callable[[Fabric], Any]


def ones_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


# -- calls that differ ----------------------------------------------------------------------------


class Mismatch(NamedTuple):
    """The call of rank 0, and the call of the other ranks."""

    on_rank_0: Call
    elsewhere: Call


def reduce(value: Any, reduce_op: str = "sum") -> Call:
    return lambda fabric: fabric.all_reduce(value, reduce_op=reduce_op)


def gather(value: Any, **options: bool) -> Call:
    return lambda fabric: fabric.all_gather(value, **options)


def exchange(columns: int) -> Call:
    return lambda fabric: fabric.all_to_all(ones_of(fabric.world_size, columns))


def reduce_scatter(columns: int, reduce_op: str = "sum") -> Call:
    return lambda fabric: fabric.reduce_scatter(
        ones_of(fabric.world_size, columns), reduce_op=reduce_op
    )


def scatter_from(src: int) -> Call:
    return lambda fabric: fabric.scatter([1] * fabric.world_size, src=src)


def gather_to(dst: int) -> Call:
    return lambda fabric: fabric.gather(1, dst=dst)


def broadcast_from(src: int) -> Call:
    return lambda fabric: fabric.broadcast({"x": ones_of(2)}, src=src)


def mismatches() -> dict[str, Mismatch]:
    half = ones_of(2, dtype=torch.float16)
    bfloat16 = ones_of(2, dtype=torch.bfloat16)
    int8 = ones_of(2, dtype=torch.int8)
    int32 = ones_of(2, dtype=torch.int32)
    int64 = ones_of(2, dtype=torch.int64)
    return {
        "an int beside a float": Mismatch(reduce({"acc": 0}), reduce({"acc": 0.5})),
        "a number beside a tensor": Mismatch(
            reduce({"acc": 0.5}), reduce({"acc": ones_of(dtype=torch.float64)})
        ),
        "keys": Mismatch(reduce({"loss": 1.0}), reduce({"acc": 1.0})),
        "one key more": Mismatch(reduce({"loss": 1.0, "acc": 1.0}), reduce({"loss": 1.0})),
        "sum beside max": Mismatch(reduce(1.0, "sum"), reduce(1.0, "max")),
        "sum beside mean": Mismatch(reduce(1.0, "sum"), reduce(1.0, "mean")),
        "max beside min": Mismatch(reduce(ones_of(3), "max"), reduce(ones_of(3), "min")),
        "min beside product": Mismatch(reduce(ones_of(3), "min"), reduce(ones_of(3), "product")),
        "bxor beside sum": Mismatch(reduce(3, "bxor"), reduce(3, "sum")),
        "dtypes": Mismatch(reduce(ones_of(2)), reduce(int32)),
        "16 bits": Mismatch(reduce(half), reduce(bfloat16)),
        "widths": Mismatch(reduce(int8), reduce(int64)),
        "shapes": Mismatch(reduce(ones_of(2, 3)), reduce(ones_of(3, 2))),
        "lengths": Mismatch(reduce(ones_of(2)), reduce(ones_of(3))),
        "large shapes": Mismatch(reduce(ones_of(LARGE, 1)), reduce(ones_of(LARGE))),
        "large lengths": Mismatch(reduce(ones_of(LARGE + 1)), reduce(ones_of(LARGE))),
        "small beside large": Mismatch(reduce(ones_of(1)), reduce(ones_of(LARGE))),
        "with a gradient": Mismatch(
            reduce(ones_of(3).requires_grad_()), reduce(ones_of(2).requires_grad_())
        ),
        "gathered lengths": Mismatch(gather(ones_of(32, 10)), gather(ones_of(17, 10))),
        "gathered small lengths": Mismatch(gather(ones_of(2)), gather(ones_of(3))),
        "operations": Mismatch(reduce(ones_of(2)), gather(ones_of(2))),
        "large operations": Mismatch(gather(ones_of(LARGE)), reduce(ones_of(3))),
        "ragged on one": Mismatch(
            gather(ones_of(2), ragged=True), gather(ones_of(2), ragged=False)
        ),
        "large ragged on one": Mismatch(
            gather(ones_of(LARGE), ragged=True), gather(ones_of(LARGE), ragged=False)
        ),
        "concat on one": Mismatch(
            gather(ones_of(2), ragged=True, concat=True),
            gather(ones_of(2), ragged=True, concat=False),
        ),
        "gathered dtypes": Mismatch(gather(ones_of(2)), gather(int32)),
        "gathered numbers": Mismatch(gather({"acc": 0}), gather({"acc": 0.5})),
        "gathered keys": Mismatch(
            gather({"loss": ones_of(LARGE)}), gather({"acc": ones_of(LARGE)})
        ),
        "rows": Mismatch(exchange(3), exchange(4)),
        "large rows": Mismatch(exchange(LARGE + 1), exchange(LARGE)),
        "scattered": Mismatch(reduce_scatter(3), reduce_scatter(4)),
        "scattered ops": Mismatch(reduce_scatter(3, "sum"), reduce_scatter(3, "min")),
        "large scattered": Mismatch(reduce_scatter(LARGE + 1), reduce_scatter(LARGE)),
        "sources": Mismatch(broadcast_from(0), broadcast_from(1)),
        "scattered from": Mismatch(scatter_from(1), scatter_from(0)),
        "destinations": Mismatch(gather_to(1), gather_to(0)),
    }


def outcomes_of_mismatches(fabric: Fabric) -> dict[str, str]:
    outcomes: dict[str, str] = {}
    is_first = fabric.global_rank == 0
    for name, mismatch in mismatches().items():
        call = mismatch.on_rank_0 if is_first else mismatch.elsewhere
        outcomes[name] = outcome(partial(call, fabric))
    outcomes["afterwards"] = str(fabric.all_reduce({"loss": 1.0}, reduce_op="sum"))
    return outcomes


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_mismatch_is_an_error_on_every_rank_and_the_next_call_is_right(ranks: int) -> None:
    for outcomes in run_in_ranks(outcomes_of_mismatches, ranks=ranks):
        assert outcomes.pop("afterwards") == str({"loss": float(ranks)})
        for name, text in outcomes.items():
            assert text.startswith("CollectiveMismatchError"), (name, text)
        assert "all_reduce(sum of acc: 1 " in outcomes["an int beside a float"]
        assert "test_collectives_signatures.py:" in outcomes["an int beside a float"]
        assert "FABRIC_CHECK=1" in outcomes["keys"]
        assert "ragged=True" in outcomes["gathered lengths"]
        assert "ragged=True" not in outcomes["lengths"]


def mismatches_in_checked_mode(fabric: Fabric) -> dict[str, str]:
    outcomes: dict[str, str] = {}
    is_first = fabric.global_rank == 0
    for name, mismatch in mismatches().items():
        call = mismatch.on_rank_0 if is_first else mismatch.elsewhere
        outcomes[name] = outcome(partial(call, fabric))
    outcomes["gradients"] = outcome(lambda: fabric.all_gather(ones_of(2), sync_grads=is_first))
    return outcomes


def test_a_mismatch_is_an_error_in_checked_mode_too() -> None:
    for outcomes in run_in_ranks(mismatches_in_checked_mode, check_collectives=True):
        for name, text in outcomes.items():
            assert text.startswith("CollectiveMismatchError"), (name, text)


# -- calls that agree, though they may not look it ------------------------------------------------


def calls_that_agree(fabric: Fabric) -> dict[str, Any]:
    rank = fabric.global_rank
    size = fabric.world_size
    add = partial(fabric.all_reduce, reduce_op="sum")
    if rank == 0:
        keys = ["a", "b"]
        numbers: Any = [0.0, 0.0]
        sequence: Any = (1.0, 2.0)
        leaf_without_numbers = "text"
        matrix = ones_of(2, 3)
    else:
        keys = ["b", "a"]
        numbers = [torch.tensor(1.0).double().item()] * 2
        sequence = [1.0, 2.0]
        leaf_without_numbers = None
        matrix = ones_of(3, 2).t()
    earlier_result = fabric.all_gather(ones_of(2))
    fabric.all_gather(ones_of(2) * 2)
    return {
        "a result after the same call": earlier_result.tolist(),
        "order of insertion": add(dict.fromkeys(keys, 1.0)),
        "types of numbers": fabric.all_reduce(numbers, reduce_op="max"),
        "a list beside a tuple": list(add(sequence)),
        "texts": add([leaf_without_numbers, 1.0])[1],
        "gradients": add(ones_of(2).requires_grad_(rank > 0)).tolist(),
        "strides": add(matrix).tolist(),
        "large": add(ones_of(LARGE)).sum().item(),
        "keys without an order": len(add({outcome: 1.0, ("a", 1): 2.0})),
        "empty": add([{}, ones_of(0), 1.0])[2],
        "scattered": fabric.reduce_scatter(ones_of(size, 2), reduce_op="max").tolist(),
        "exchanged": fabric.all_to_all(ones_of(size, 20) * rank)[:, 0].tolist(),
        "bytes of a result": add(ones_of(2)).untyped_storage().nbytes(),
        "all": fabric.strategy.reduce_boolean_decision(rank > 0, all=True),
        "any": fabric.strategy.reduce_boolean_decision(rank > 0, all=False),
    }


def test_calls_that_agree_pass_and_a_result_holds_nothing_else() -> None:
    for actual in run_in_ranks(calls_that_agree):
        assert actual == {
            "a result after the same call": [[1.0, 1.0], [1.0, 1.0]],
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
            "bytes of a result": 8,
            "all": False,
            "any": True,
        }


def large_extremes(fabric: Fabric) -> dict[str, Any]:
    results: dict[str, Any] = {}
    mixed = torch.tensor([-2.0, 0.5, INFINITY, -1e-45]).repeat(LARGE)
    for reduce_op in ("max", "min"):
        results[reduce_op] = fabric.all_reduce(mixed, reduce_op=reduce_op)[:4].tolist()
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            for nan_rank in range(fabric.world_size):
                value = NAN if fabric.global_rank == nan_rank else 1.0
                tensor = torch.full((LARGE,), value, dtype=dtype)
                result = fabric.all_reduce(tensor, reduce_op=reduce_op)
                case = f"nan of rank {nan_rank}, {reduce_op} of {dtype}"
                results[case] = bool(result.isnan().all())
    return results


def test_a_large_min_or_max_keeps_nan_infinity_and_denormal_numbers() -> None:
    for results in run_in_ranks(large_extremes):
        for reduce_op in ("max", "min"):
            assert results.pop(reduce_op) == [-2.0, 0.5, INFINITY, -1.401298464324817e-45]
        assert len(results) == 12
        assert all(results.values()), results


def calls_in_several_modes(fabric: Fabric) -> list[Any]:
    add = partial(fabric.all_reduce, reduce_op="sum")
    with torch.inference_mode():
        first = add({"first": 1.0})
    weight = torch.ones(2, requires_grad=True)
    add({"w": weight})["w"].sum().backward()
    with torch.device("meta"):
        second = add({"second": 2.0})

    def scaled_by_ranks(x: Tensor) -> Tensor:
        return x * add({"first": 1.0})["first"]

    for _ in range(2):
        assert torch.func.vmap(scaled_by_ranks)(torch.ones(3)).tolist() == [2.0] * 3
    return [first, second, add({"first": 1.0}), weight.grad]


def test_a_signature_that_was_made_in_another_mode_is_used_in_any() -> None:
    for first, second, again, gradient in run_in_ranks(calls_in_several_modes):
        assert first == {"first": 2.0}
        assert second == {"second": 4.0}
        assert again == {"first": 2.0}
        assert gradient.tolist() == [2.0, 2.0]


# -- the arithmetic of checksums, for any number of ranks -----------------------------------------

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


class Sent(NamedTuple):
    """What decides about the first message of a call, but for its text."""

    operation: Operation
    reduce: Reduce | None
    dtype: torch.dtype


def has_meaning(reduce: Reduce, dtype: torch.dtype) -> bool:
    is_inexact = dtype.is_floating_point or dtype.is_complex
    if reduce is Reduce.MEAN:
        return is_inexact
    if reduce in BITWISE:
        return not is_inexact
    if reduce in MIN_MAX_PRODUCT:
        return not dtype.is_complex
    return True


def reductions() -> list[Sent]:
    calls: list[Sent] = []
    for reduction in Reduce:
        for dtype in DTYPES:
            if has_meaning(reduction, dtype):
                calls.append(Sent(Operation.ALL_REDUCE, reduction, dtype))
    return calls


REDUCTIONS = reductions()
GATHERS = [Sent(Operation.ALL_GATHER, None, dtype) for dtype in DTYPES]


class FirstMessage(Exception):
    """What a rank sends first."""

    def __init__(self, collective: Collective) -> None:
        super().__init__()
        self.collective = collective


class UntilFirstMessage(LocalCommunicator):
    """A rank of a group of a size, up to its first message."""

    def __init__(self, size: int) -> None:
        super().__init__(CPU)
        self.size = size

    def run(self, collective: Collective) -> Any:
        raise FirstMessage(collective)


def first_message(call: Sent, size: int, text: str) -> Collective:
    """Return what a rank of a group of a size sends first."""
    dtype = wire_dtype(call.dtype, call.reduce)
    description = CallDescription(call.operation.value, signature_text=text)
    collective = Collective(call.operation, ones_of(2, dtype=dtype), call.reduce, call=description)
    communicator = CheckedCommunicator(UntilFirstMessage(size), PendingSignatures())
    with pytest.raises(FirstMessage) as caught:
        communicator.run(collective)
    return caught.value.collective


def signatures_agree(messages: list[Collective]) -> bool:
    """Return what every rank concludes from the first messages of all ranks.

    The backend needs messages of one operation, reduction, dtype and shape from all ranks.
    """
    forms = set()
    for message in messages:
        forms.add((message.operation, message.reduce, message.buffer.dtype, message.buffer.shape))
    assert len(forms) == 1
    rows = [message.buffer for message in messages]
    reduction = messages[0].reduce
    if reduction is None:
        return checksums_agree(torch.stack(rows)[:, 0])
    return checksums_agree(fold(reduction, rows))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_no_number_of_ranks_gives_a_false_alarm() -> None:
    generator = random.Random(0)
    for number, call in enumerate([*REDUCTIONS, *GATHERS]):
        for size in [*range(1 + number % 8, 65, 8), 255, 256, 257]:
            message = first_message(call, size, str(generator.random()))
            assert signatures_agree([message] * size), (call, size)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_of_ten_thousand_mismatches_none_is_missed() -> None:
    generator = random.Random(1)
    for number in range(10_000):
        calls = generator.choice([REDUCTIONS, REDUCTIONS, GATHERS])
        is_large = number % 50 == 0
        size = generator.randint(9, 64) if is_large else generator.randint(2, 8)
        usual = first_message(generator.choice(calls), size, str(generator.random()))
        odd = first_message(generator.choice(calls), size, str(generator.random()))
        messages = [usual] * size
        odd_ranks = generator.sample(range(size), generator.randint(1, size - 1))
        for rank in odd_ranks:
            messages[rank] = odd
        assert not signatures_agree(messages), (usual, odd, size, odd_ranks)


class FirstOfTwenty(LocalCommunicator):
    """The first of twenty ranks, which all pass the same value."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.size = 20
        self.messages = list[tuple[Operation, list[float]]]()

    def run(self, collective: Collective) -> Any:
        self.messages.append((collective.operation, collective.buffer.tolist()))
        return collective.buffer


def test_in_a_group_of_many_ranks_a_message_of_one_length_goes_before() -> None:
    communicator = FirstOfTwenty()
    recorded = RecordedCommunicator(communicator, FlightRecorder())
    assert all_reduce(recorded, 3.0, Reduce.MAX) == 3
    (operation, [checksum, negative]), call = communicator.messages
    assert operation is Operation.ALL_REDUCE
    assert checksum == -negative
    assert call == (Operation.ALL_REDUCE, [3.0])


class TwoEqualRanks(LocalCommunicator):
    """The first of two ranks, which pass the same value."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.size = 2
        # Called while the first collective waits.
        self.meanwhile: Callable[[], object] | None = None

    def run(self, collective: Collective) -> Any:
        meanwhile = self.meanwhile
        self.meanwhile = None
        if meanwhile is not None:
            meanwhile()
        return torch.stack([collective.buffer] * 2)


def test_the_same_call_of_another_thread_does_not_change_the_data_of_a_call() -> None:
    communicator = TwoEqualRanks()
    recorded = RecordedCommunicator(communicator, FlightRecorder())
    assert all_reduce(recorded, 1.0, Reduce.SUM) == 2
    results: list[float] = []

    def call_in_another_thread() -> None:
        thread = threading.Thread(
            target=lambda: results.append(all_reduce(recorded, 5.0, Reduce.SUM))
        )
        thread.start()
        thread.join()

    communicator.meanwhile = call_in_another_thread
    assert all_reduce(recorded, 1.0, Reduce.SUM) == 2
    assert results == [10]


# -- an accelerator, whose comparison waits -------------------------------------------------------


class Accelerated(Communicator):
    """A communicator whose device is not waited for at every call."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.device = torch.device("cpu", 0)

    def run(self, collective: Collective) -> Any:
        result = self._inner.run(collective)
        if collective.operation is Operation.NEW_GROUP:
            return Accelerated(result)
        return result


def outcomes_on_an_accelerator(fabric: Fabric) -> list[str]:
    longer_on_rank_0 = ones_of(2)
    if fabric.global_rank == 0:
        longer_on_rank_0 = ones_of(3)
    recorder = FlightRecorder()
    communicator = RecordedCommunicator(Accelerated(ProcessGroupCommunicator(None, CPU)), recorder)
    calls: list[Callable[[], Any]] = [
        lambda: all_reduce(communicator, longer_on_rank_0, Reduce.SUM),
        lambda: all_gather(communicator, ones_of(2)),
        lambda: all_reduce(communicator, 1.0, Reduce.SUM),
        lambda: all_reduce(communicator, 1.0, Reduce.SUM),
    ]
    outcomes = [outcome(call) for call in calls]
    group: Any = communicator.new_group([0, 1])
    outcomes.append(outcome(lambda: all_gather(group, longer_on_rank_0)))
    outcomes.append(outcome(recorder.check_signatures))
    return outcomes


def test_on_a_device_the_error_comes_where_the_rank_waits_and_names_the_earlier_call() -> None:
    for outcomes in run_in_ranks(outcomes_on_an_accelerator):
        assert [text.partition(":")[0] for text in outcomes] == [
            "fine",
            "fine",
            "CollectiveMismatchError",
            "fine",
            "fine",
            "CollectiveMismatchError",
        ]
        assert "all_reduce(sum of 1 float32[" in outcomes[2]
        assert "all_gather(1 float32[" in outcomes[5]

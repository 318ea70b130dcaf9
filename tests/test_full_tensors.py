"""``iter_full_tensors`` yields the tensors of a state dict, gathered in buckets."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from fabric.communicators.base import Collective, Operation
from fabric.communicators.process_group import ProcessGroupCommunicator
from fabric.errors import ConfigurationError
from fabric.strategies import FSDPStrategy, ModelParallelStrategy
from tests.ranks import outcome, run_in_ranks


class Block(nn.Module):
    """A layer and its reverse, and a norm that no plan splits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(self.up(self.norm(inputs)).relu())


class Model(nn.Module):
    """A model with tied weights, weights of two dtypes, and buffers."""

    tp_plan: ClassVar = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([Block(), Block().bfloat16()])
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("steps", torch.tensor([3, 4]))
        self.register_buffer("is_ready", torch.tensor([True, False]))


def build() -> nn.Module:
    torch.manual_seed(3)
    return Model()


def full_tensors(fabric: Fabric, model: nn.Module, **options: Any) -> dict[str, Tensor]:
    return dict(fabric.iter_full_tensors(model, **options))


def gather_in_ways(fabric: Fabric) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a model on this rank, gathered in different ways."""
    model = fabric.setup(build())
    last = fabric.world_size - 1
    return {
        "at once": full_tensors(fabric, model),
        "each alone": full_tensors(fabric, model, bucket=0),
        "in small buckets": full_tensors(fabric, model, bucket="200B"),
        "on the last": full_tensors(fabric, model, bucket=300, dst=last),
        "in bfloat16": full_tensors(fabric, model, dtype=torch.bfloat16),
        "renamed": full_tensors(fabric, model, rename={"head.weight": None, "scale": "factor"}),
    }


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


FSDP_OPTIONS: dict[str, Any] = {"auto_wrap_policy": {Block}}
STRATEGIES: dict[str, dict[str, Any]] = {
    "one process": {"ranks": 1, "strategy": "auto"},
    "ddp": {"strategy": "ddp"},
    # Seven rows are split into two, two, two and one. Of six rows, the last rank has none.
    "fsdp": {"strategy": FSDPStrategy(**FSDP_OPTIONS), "ranks": 4},
    "hybrid": {
        "strategy": FSDPStrategy(
            sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2), **FSDP_OPTIONS
        ),
        "ranks": 4,
    },
    "mesh": {
        "strategy": ModelParallelStrategy(tensor_parallel_size=2, tp_plan="auto", **FSDP_OPTIONS),
        "ranks": 4,
    },
    "tensor parallel": {
        "strategy": ModelParallelStrategy(
            data_parallel_size=1, tensor_parallel_size=2, tp_plan="auto"
        )
    },
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_full_tensors_are_those_of_the_plain_model(strategy: str) -> None:
    results = run_in_ranks(gather_in_ways, **STRATEGIES[strategy])
    expected = dict(build().state_dict())
    casted = dict(build().to(torch.bfloat16).state_dict())
    renamed = {name: tensor for name, tensor in expected.items() if name != "head.weight"}
    renamed["factor"] = renamed.pop("scale")
    for rank, result in enumerate(results):
        assert_equal(result["at once"], expected)
        assert_equal(result["each alone"], expected)
        assert_equal(result["in small buckets"], expected)
        assert_equal(result["in bfloat16"], casted)
        torch.testing.assert_close(result["renamed"], renamed, rtol=0, atol=0)
        is_last = rank == len(results) - 1
        assert_equal(result["on the last"], expected if is_last else {})


# -- messages -------------------------------------------------------------------------------------


class Messages:
    """The gathers that a rank makes while the block runs."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> "Messages":
        run = ProcessGroupCommunicator.run

        def count(communicator: ProcessGroupCommunicator, collective: Collective) -> Any:
            # Signatures of calls are gathered, too, and are not bytes.
            is_gather = collective.operation in (Operation.ALL_GATHER, Operation.GATHER)
            if is_gather and collective.buffer.dtype is torch.uint8:
                self.nbytes.append(collective.buffer.nbytes * communicator.size)
            return run(communicator, collective)

        self._patch.setattr(ProcessGroupCommunicator, "run", count)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def count_messages(fabric: Fabric) -> dict[str, list[int]]:
    """Return the sizes of the gathers for 16 layers of 4 KiB each, by how they are gathered."""
    layers = [nn.Linear(32, 32, bias=False) for _ in range(16)]
    model = fabric.setup(nn.Sequential(*layers))
    sizes: dict[str, list[int]] = {}
    options = {
        "at once": {},
        "in buckets": {"bucket": "16KiB"},
        "in half the size": {"bucket": "16KiB", "dtype": torch.bfloat16},
        "on one": {"bucket": "16KiB", "dst": 1},
        "one of them": {"rename": lambda name: name if name == "3.weight" else None},
    }
    for way, arguments in options.items():
        with Messages() as messages:
            full_tensors(fabric, model, **arguments)
        sizes[way] = messages.nbytes
    with Messages() as messages:
        fabric.get_state_dict(model)
    sizes["state dict"] = messages.nbytes
    return sizes


def test_a_bucket_is_one_message() -> None:
    kib = 1024
    for sizes in run_in_ranks(count_messages, strategy="fsdp"):
        assert sizes == {
            "at once": [64 * kib],
            "in buckets": [16 * kib] * 4,
            "in half the size": [16 * kib] * 2,
            "on one": [16 * kib] * 4,
            "one of them": [4 * kib],
            "state dict": [64 * kib],
        }
    for sizes in run_in_ranks(count_messages, strategy="ddp"):
        assert not any(sizes.values())


# -- iterations that end early --------------------------------------------------------------------


def first_name(tensors: Iterator[tuple[str, Tensor]]) -> str:
    """Return the first name of an iterator, which is closed then."""
    for name, _ in tensors:
        return name
    raise AssertionError("there is no tensor")


def stop_on_all_ranks(fabric: Fabric) -> tuple[str, float]:
    model = fabric.setup(build())
    name = first_name(fabric.iter_full_tensors(model, bucket=0))
    # The next call of all ranks is not mixed up with a gather.
    return name, fabric.all_reduce(3.0)


def stop_on_one_rank(fabric: Fabric) -> str:
    """Stop on rank 0, which then makes another call, and return the error."""
    model = fabric.setup(build())

    def iterate() -> None:
        tensors = fabric.iter_full_tensors(model, bucket=0)
        if fabric.global_rank == 0:
            first_name(tensors)
            fabric.all_reduce(1.0)
        else:
            dict(tensors)

    return outcome(iterate)


@pytest.mark.parametrize("strategy", ["fsdp", "mesh"])
def test_an_iteration_that_ends_early_hangs_no_rank(strategy: str) -> None:
    for name, mean in run_in_ranks(stop_on_all_ranks, **STRATEGIES[strategy]):
        assert name == "scale"
        assert mean == 3.0
    for text in run_in_ranks(stop_on_one_rank, **STRATEGIES[strategy]):
        assert text.startswith("CollectiveMismatchError")


# -- what the tensors are -------------------------------------------------------------------------


def write_to_tensors(fabric: Fabric) -> None:
    model = fabric.setup(build())
    before = full_tensors(fabric, model)
    for _, tensor in fabric.iter_full_tensors(model):
        assert not tensor.requires_grad
        tensor.zero_()
    assert_equal(full_tensors(fabric, model), before)


def test_a_consumer_may_write_to_the_tensors() -> None:
    run_in_ranks(write_to_tensors, strategy="ddp")
    run_in_ranks(write_to_tensors, strategy=STRATEGIES["tensor parallel"]["strategy"])


def refuse_arguments(fabric: Fabric) -> None:
    model = fabric.setup(build())
    with pytest.raises(ConfigurationError, match=r"(?s)bucket='a lot'.*number of bytes"):
        fabric.iter_full_tensors(model, bucket="a lot")
    with pytest.raises(ConfigurationError, match="there is no rank 2 in a group of 2"):
        fabric.iter_full_tensors(model, dst=2)
    with pytest.raises(ConfigurationError, match="both renamed to weight"):
        fabric.iter_full_tensors(model, rename=lambda _: "weight")
    with pytest.raises(ConfigurationError, match="has no parameters and no buffers"):
        fabric.iter_full_tensors(nn.ReLU())


def test_arguments_are_checked_before_the_iteration() -> None:
    run_in_ranks(refuse_arguments)

"""The work that each stream gets; the values and the overlap on a device are in test_gpu.py."""

from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.data import DataParallelJob, FabricDataLoader
from fabric.data.copies import OverlappedCopies
from fabric.tree import to_device

# Stands for the device: tensors can be copied there, and have no memory.
META = torch.device("meta")


class Streams:
    """A stand-in for the streams of ``torch.cuda`` that logs the calls."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.current = "compute"

    def Stream(self, device: torch.device) -> "Stream":
        return Stream(self, "side")

    def current_stream(self, device: torch.device) -> "Stream":
        return Stream(self, self.current)

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before = self.current
        self.current = stream.name
        yield
        self.current = before


@dataclass
class Stream:
    streams: Streams
    name: str

    def wait_stream(self, stream: "Stream") -> None:
        self.streams.log.append(f"{self.name} waits for {stream.name}")

    def record_event(self) -> "Event":
        return Event(self.streams, self.streams.log.count("batch"))


@dataclass
class Event:
    streams: Streams
    batch: int

    def synchronize(self) -> None:
        self.streams.log.append(f"the CPU waits until batch {self.batch} is needed")


class Watched(Tensor):
    """A tensor that logs where it is copied and on which streams it is used."""

    streams: Streams
    label: str

    def pin_memory(self, device: Any = None) -> Any:
        self.streams.log.append(f"{self.label} is pinned")
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.streams.log.append(f"{self.label} is copied on {self.streams.current}")
        return watched(self.streams, self.label, super().to(*args, **kwargs))

    def record_stream(self, s: Any) -> None:
        self.streams.log.append(f"{self.label} is used on {s.name}")


def watched(streams: Streams, label: str, data: Tensor | None = None) -> Watched:
    if data is None:
        data = torch.ones(2)
    tensor = data.as_subclass(Watched)
    tensor.streams = streams
    tensor.label = label
    return tensor


class Encoding(UserDict[str, Any]):
    """A batch of another library that moves itself in place, like those of transformers."""

    def to(self, device: torch.device) -> Self:
        self.data = to_device(self.data, device)
        return self


class Opaque:
    """A batch whose tensors only the batch itself can find."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def to(self, device: torch.device) -> "Opaque":
        return type(self)(self._tensor.to(device))


class Graph(Opaque):
    """An opaque batch that records streams, like those of torch_geometric."""

    def record_stream(self, s: Any) -> None:
        self._tensor.record_stream(s)


def copied(make: Callable[[Streams], Any], *, pins: bool = False) -> tuple[Any, list[str]]:
    streams = Streams()
    return OverlappedCopies(META, pins=pins, cuda=streams)(make(streams)), streams.log


def test_a_batch_is_pinned_then_copied_on_the_side_and_the_computation_waits_for_it() -> None:
    moved, log = copied(
        lambda streams: [watched(streams, "x"), {"y": watched(streams, "y")}, "text", 3], pins=True
    )
    assert moved[0].device == META
    assert moved[1]["y"].device == META
    assert moved[2:] == ["text", 3]
    assert log == [
        "x is pinned",
        "y is pinned",
        "x is copied on side",
        "y is copied on side",
        "compute waits for side",
        "x is used on compute",
        "y is used on compute",
    ]


def test_a_batch_that_the_loader_pins_is_not_pinned_again() -> None:
    _, log = copied(lambda streams: watched(streams, "x"))
    assert log == ["x is copied on side", "compute waits for side", "x is used on compute"]


@pytest.mark.parametrize("kind", [lambda tensor: Encoding(x=[tensor]), Graph])
def test_tensors_of_a_batch_that_moves_itself_are_told_of_the_stream(
    kind: Callable[[Any], Any],
) -> None:
    moved, log = copied(lambda streams: {"batch": kind(watched(streams, "x"))})
    assert isinstance(moved["batch"], Encoding | Graph)
    assert log == ["x is copied on side", "compute waits for side", "x is used on compute"]


def test_tensors_before_and_after_a_mapping_are_told_of_the_stream() -> None:
    _, log = copied(
        lambda streams: [
            watched(streams, "before"),
            Encoding(x=watched(streams, "x")),
            watched(streams, "after"),
        ]
    )
    assert log[-3:] == [
        "before is used on compute",
        "x is used on compute",
        "after is used on compute",
    ]


def test_tensors_that_stay_on_the_cpu_are_not_told_of_the_stream() -> None:
    class Half(Encoding):
        def to(self, device: torch.device) -> Self:
            self["x"] = self["x"].to(device)
            return self

    _, log = copied(
        lambda streams: Half(x=watched(streams, "x"), lengths=watched(streams, "lengths"))
    )
    assert log == ["x is copied on side", "compute waits for side", "x is used on compute"]


@pytest.mark.parametrize(
    "make_value",
    [
        lambda: Opaque(torch.ones(1)),
        lambda: Encoding(x=Opaque(torch.ones(1))),
        lambda: torch.ones(1, device=META),
        lambda: torch.ones(1, requires_grad=True),
        lambda: torch.ones(1).to_sparse(),
    ],
    ids=["opaque", "inside", "moved", "gradients", "sparse"],
)
def test_a_batch_with_a_value_that_cannot_be_followed_is_copied_on_the_compute_stream(
    make_value: Any,
) -> None:
    _, log = copied(lambda streams: (watched(streams, "x"), make_value()), pins=True)
    assert log == ["x is copied on compute"]


def test_the_cpu_waits_for_the_copy_of_a_buffer_that_a_dataset_has_pinned_itself() -> None:
    class Pinned(Watched):
        def is_pinned(self, device: Any = None) -> bool:
            return True

        def to(self, *args: Any, **kwargs: Any) -> Any:
            is_blocking = not kwargs.get("non_blocking")
            self.streams.log.append(f"copied on {self.streams.current}, {is_blocking=}")
            return torch.ones(1, device=META)

    def make(streams: Streams) -> Any:
        buffer = torch.ones(1).as_subclass(Pinned)
        buffer.streams = streams
        return buffer

    assert copied(make, pins=True)[1] == ["copied on compute, is_blocking=True"]


def test_a_device_without_an_index_is_told_of_the_stream_too() -> None:
    streams = Streams()
    OverlappedCopies(torch.device("meta", 0), pins=False, cuda=streams)(watched(streams, "x"))
    assert streams.log[-1] == "x is used on compute"


def test_a_batch_that_becomes_opaque_when_it_moves_is_copied_again_on_the_compute_stream() -> None:
    class Becomes(Encoding):
        def to(self, device: torch.device) -> Any:
            return Opaque(self["x"].to(device))

    _, log = copied(lambda streams: Becomes(x=watched(streams, "x")))
    assert log == ["x is copied on side", "compute waits for side", "x is copied on compute"]


def test_the_cpu_runs_at_most_two_steps_ahead() -> None:
    streams = Streams()
    move = OverlappedCopies(META, pins=False, cuda=streams)
    for _ in range(4):
        streams.log.append("batch")
        move([])
    waits = [line for line in streams.log if line.startswith("the CPU")]
    assert waits == [
        "the CPU waits until batch 1 is needed",
        "the CPU waits until batch 2 is needed",
    ]


def test_on_a_cpu_nothing_is_pinned_or_moved() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        for overlap in (True, False):
            loader = fabric.setup_dataloaders(
                DataLoader(TensorDataset(torch.ones(1))), overlap_copies=overlap
            )
            assert not loader.pin_memory
            [[batch]] = loader
            assert batch.tolist() == [1.0]


def test_other_devices_get_their_batches_one_after_the_other() -> None:
    loader = FabricDataLoader(
        DataLoader(TensorDataset(torch.ones(2))), DataParallelJob(), device=META
    )
    assert not loader.pin_memory
    [first], [second] = loader
    assert first.device == META
    assert second.device == META

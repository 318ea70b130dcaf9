"""Copies of batches to a device.

[Note: Overlapped copies] The CPU runs ahead of a GPU: when it asks for a batch, the device is still
computing the step before. On the *compute stream*, the current one at that moment, the copy would
wait for that step. So the copy runs on a *side stream*, and the compute stream waits for it.
``record_stream`` marks the copies as used on the compute stream, so that their memory is not reused
for the next copy too early. Batches are fetched from the loader no earlier than in the plain loop.
"""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fabric.tree import flatten, map_tensors, to_device

__all__ = ["OverlappedCopies", "mover"]

_MAX_STEPS_AHEAD = 2  # each step that is not computed yet keeps its batch in the device's memory


def mover(
    loader: DataLoader[Any], device: torch.device | None, overlap_copies: bool
) -> Callable[[Any], Any] | None:
    """Return a function that moves a batch, or None if batches stay where they are.

    Turns on ``pin_memory`` of a loader with workers.

    Args:
        loader: the prepared loader.
        device: where batches go. None leaves them as the loader made them.
        overlap_copies: whether a CUDA device computes while it gets the next batch.
    """
    if device is None or device.type == "cpu":
        return None
    if device.type == "cuda" and overlap_copies:
        # If there are no workers, a dataset may yield tensors that are on a device already, for
        # which torch would raise.
        pins = not loader.pin_memory and loader.num_workers == 0
        loader.pin_memory = not pins
        return OverlappedCopies(device, pins=pins)
    return partial(to_device, device=device, non_blocking=bool(loader.pin_memory))


class OverlappedCopies:
    """Moves batches to a CUDA device on a side stream; see ``[Note: Overlapped copies]``.

    A batch has the same values as by ``tensor.to(device)``, and is ready on the compute stream. As
    with every CUDA tensor, to use it on a third stream, wait for the compute stream and call
    ``record_stream``.

    A batch is copied on the compute stream if something in it is on a device already, requires
    gradients, is not strided, or is an object with a ``to`` but neither entries nor
    ``record_stream``: its memory or readiness cannot be tracked. If ``pins`` is true, and a tensor
    is pinned already, the CPU waits for the copy: the tensor may be a buffer that the next batch
    overwrites.

    The CPU waits if it is more than two steps ahead of the device, so that at most three batches
    are in the device's memory.

    Args:
        device: where batches go.
        pins: whether to copy tensors to pinned memory first, since copies are asynchronous only
            from there. False if the loader pins them.
        cuda: the module whose streams are used.

    Attributes:
        side: the side stream.
    """

    def __init__(self, device: torch.device, *, pins: bool, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._pins = pins
        self._cuda = cuda
        self.side = cuda.Stream(device)
        self._steps: deque[Any] = deque()  # an event at the end of each step

    def __call__(self, batch: Any) -> Any:
        """Move the tensors of a batch as :func:`fabric.tree.to_device` does.

        Does not wait for the copies.
        """
        buffers = _buffers_in(batch)
        if not all(map(_can_be_tracked, buffers)):
            return to_device(batch, self._device, non_blocking=True)
        if self._pins:
            if any(map(_is_pinned, buffers)):
                return to_device(batch, self._device)
            batch = map_tensors(methodcaller("pin_memory"), batch)
        compute_stream = self._cuda.current_stream(self._device)
        self._limit_steps_ahead(compute_stream)
        with self._cuda.stream(self.side):
            moved = to_device(batch, self._device, non_blocking=True)
        compute_stream.wait_stream(self.side)
        moved_buffers = _buffers_in(moved)
        for buffer in moved_buffers:
            if not hasattr(buffer, "record_stream"):  # its memory cannot be tracked
                return to_device(batch, self._device)
        for buffer in moved_buffers:
            if not isinstance(buffer, Tensor) or buffer.device.type == self._device.type:
                buffer.record_stream(compute_stream)
        return moved

    def _limit_steps_ahead(self, compute_stream: Any) -> None:
        self._steps.append(compute_stream.record_event())
        if len(self._steps) > _MAX_STEPS_AHEAD:
            self._steps.popleft().synchronize()


def _buffers_in(batch: Any) -> list[Any]:
    """Return the tensors of a batch, and the objects with a ``to``.

    Mappings that are leaves are searched, too.
    """
    buffers: list[Any] = []
    leaves, _ = flatten(batch)
    for leaf in leaves:
        if isinstance(leaf, Mapping):
            buffers += _buffers_in(dict(leaf))
        elif hasattr(leaf, "record_stream") or hasattr(leaf, "to"):
            buffers.append(leaf)
    return buffers


def _can_be_tracked(buffer: Any) -> bool:
    if isinstance(buffer, Tensor):
        is_on_cpu = buffer.device.type == "cpu"
        return is_on_cpu and buffer.layout is torch.strided and not buffer.requires_grad
    return hasattr(buffer, "record_stream")


def _is_pinned(buffer: Any) -> bool:
    return isinstance(buffer, Tensor) and buffer.is_pinned()

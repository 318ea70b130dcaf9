"""Copies of batches to a device."""

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

# Each step that is not computed yet keeps its batch in the device's memory.
_MAX_STEPS_AHEAD = 2


def mover(
    loader: DataLoader[Any], device: torch.device | None, overlap_copies: bool
) -> Callable[[Any], Any] | None:
    """Return a function that moves a batch, or None if batches stay where they are.

    Called once, when a loader is set up. Mutates ``loader.pin_memory`` for overlapped copies.

    Args:
        loader: the prepared loader.
        device: where batches go. None leaves them as the loader made them.
        overlap_copies: whether a CUDA device computes while it gets the next batch.
    """
    if device is None or device.type == "cpu":
        return None
    if device.type == "cuda" and overlap_copies:
        # Copies are asynchronous only from pinned memory. With workers, batches are on the CPU, and
        # the loader pins them, in a thread. Without workers, the dataset may yield tensors on a
        # device, for which the loader's pinning raises. OverlappedCopies then pins those that are
        # on the CPU. If the user asked the loader to pin, the loader pins in any case.
        loader_pins = loader.pin_memory or loader.num_workers > 0
        loader.pin_memory = loader_pins
        return OverlappedCopies(device, pins=not loader_pins)
    return partial(to_device, device=device, non_blocking=bool(loader.pin_memory))


# [Note: Overlapped copies]
# The CPU runs ahead of a GPU: when it asks for a batch, the device is still computing the step
# before. A copy on the *compute stream*, which is the current stream at that moment, would wait for
# that step. So the copy runs on a *side stream*, and the compute stream waits for the copy.
# `record_stream` marks the copied tensors as used on the compute stream, so that torch does not
# reuse their memory for the next copy too early. Batches are fetched from the loader no earlier
# than in the plain loop.
class OverlappedCopies:
    """Moves batches to a CUDA device on a side stream.

    A batch has the same values as by ``tensor.to(device)``, and is ready on the compute stream. As
    with every CUDA tensor, to use it on a third stream, wait for the compute stream and call
    ``record_stream``.

    A batch is copied on the compute stream instead if it contains one of:

    - A tensor that is on a device already, requires gradients or is not strided.
    - An object with a method ``to``, but with neither entries nor ``record_stream``.

    If ``pins`` is true, and the dataset has pinned a tensor itself, the CPU waits for the copy: the
    tensor may be a buffer that the dataset overwrites with the next batch.

    The CPU waits if it is more than two steps ahead of the device, so that at most three batches
    are in the device's memory.

    Args:
        device: where batches go.
        pins: whether to copy tensors to pinned memory first, since copies are asynchronous only
            from there. False if the loader pins them.
        cuda: the module whose streams are used. Tests pass another one.

    Attributes:
        side_stream: the CUDA stream on which batches are copied.
    """

    def __init__(self, device: torch.device, *, pins: bool, cuda: Any = torch.cuda) -> None:
        """Make the side stream. :func:`mover` calls it for a loader on a CUDA device."""
        self._device = device
        self._pins = pins
        self._cuda = cuda
        self.side_stream = cuda.Stream(device)
        # For each of the latest steps, a CUDA event at the end of the step on the compute stream.
        self._step_events: deque[Any] = deque()

    def __call__(self, batch: Any) -> Any:
        """Move the tensors of a batch as :func:`fabric.tree.to_device` does.

        The loader calls the object for each batch, when the user asks for the batch. The CPU waits
        for a copy only in the cases that the class describes.
        """
        buffers = _buffers_in(batch)
        if not all(map(_may_be_copied_on_side_stream, buffers)):
            # Copied on the compute stream, on which everything that uses the batch runs later.
            return to_device(batch, self._device, non_blocking=True)
        if self._pins:
            if any(map(_is_pinned, buffers)):
                # Without non_blocking the CPU waits for the copy. The dataset has pinned this
                # tensor itself, and may overwrite it with the next batch.
                return to_device(batch, self._device)
            batch = map_tensors(methodcaller("pin_memory"), batch)
        # The user may change the current stream between two batches, so it is looked up for each.
        compute_stream = self._cuda.current_stream(self._device)
        # Before the copy, so that the batch does not take memory while the CPU waits.
        self._limit_steps_ahead(compute_stream)
        with self._cuda.stream(self.side_stream):
            moved = to_device(batch, self._device, non_blocking=True)
        # What the user computes with the batch from now on waits for the copy.
        compute_stream.wait_stream(self.side_stream)
        moved_buffers = _buffers_in(moved)
        for buffer in moved_buffers:
            if not hasattr(buffer, "record_stream"):
                # The ``to`` of a user's class returned an object whose memory cannot be tracked:
                # copy the batch again, on the compute stream.
                return to_device(batch, self._device)
        for buffer in moved_buffers:
            # The ``to`` of a user's class may leave a tensor on the CPU, which needs no record.
            is_on_cpu = isinstance(buffer, Tensor) and buffer.device.type != self._device.type
            if not is_on_cpu:
                # torch then does not reuse the memory for a later copy while it is in use.
                buffer.record_stream(compute_stream)
        return moved

    def _limit_steps_ahead(self, compute_stream: Any) -> None:
        """Wait until the device is at most ``_MAX_STEPS_AHEAD`` steps behind the CPU.

        Otherwise the batches of many steps would fill the device's memory. Called before the copy
        of each batch, when all work of the step before is on the compute stream.
        """
        self._step_events.append(compute_stream.record_event())
        if len(self._step_events) > _MAX_STEPS_AHEAD:
            self._step_events.popleft().synchronize()


def _buffers_in(batch: Any) -> list[Any]:
    """Return the tensors of a batch, and the other objects that a copy has to move.

    The other objects have a method ``to`` or ``record_stream``. Mappings of any class are searched.
    """
    buffers: list[Any] = []
    leaves, _ = flatten(batch)
    for leaf in leaves:
        if isinstance(leaf, Mapping):
            # flatten() opens a dict, but not every Mapping.
            buffers += _buffers_in(dict(leaf))
        elif hasattr(leaf, "record_stream") or hasattr(leaf, "to"):
            buffers.append(leaf)
    return buffers


def _may_be_copied_on_side_stream(buffer: Any) -> bool:
    """Return whether a tensor or object may be copied on another stream than the compute stream.

    Its values must be ready (no kernel is writing them), and ``record_stream`` must cover all
    memory of the copy.
    """
    if isinstance(buffer, Tensor):
        is_on_cpu = buffer.device.type == "cpu"
        # Autograd would record the copy of a tensor that requires gradients, and would run the
        # backward of the copy on the side stream.
        return is_on_cpu and buffer.layout is torch.strided and not buffer.requires_grad
    return hasattr(buffer, "record_stream")


def _is_pinned(buffer: Any) -> bool:
    return isinstance(buffer, Tensor) and buffer.is_pinned()

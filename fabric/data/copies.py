"""Copies of batches to a device.

[Note: Overlapped copies] The CPU runs ahead of a GPU: when it asks for a batch, the device is still computing the step
before. On the *compute stream*, the current one at that moment, the copy would wait for that step. So the copy runs on
a *side stream*, and the compute stream waits for it. ``record_stream`` marks the copies as used on the compute stream,
so that their memory is not reused for the next copy too early. Batches are fetched from the loader no earlier than in
the plain loop.
"""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fabric.tree import flatten, map_tensors, to_device

__all__ = ["OverlappedCopies", "mover"]

_AHEAD = 2  # steps that are not computed yet; each keeps its batch in the device's memory


def mover(
    loader: DataLoader[Any], device: torch.device | None, overlap_copies: bool
) -> Callable[[Any], Any] | None:
    """A function that moves a batch, or None; turns on ``pin_memory`` for a loader with workers."""
    if device is None or device.type == "cpu":
        return None
    if device.type == "cuda" and overlap_copies:
        # Without workers, since torch would raise for dataset tensors that are on a device already.
        pins = not loader.pin_memory and loader.num_workers == 0
        loader.pin_memory = not pins
        return OverlappedCopies(device, pins=pins)
    return partial(to_device, device=device, non_blocking=bool(loader.pin_memory))


class OverlappedCopies:
    """Moves batches to a CUDA device on a side stream; see ``[Note: Overlapped copies]``.

    A batch has the same values as by ``tensor.to(device)``, and is ready on the compute stream. As with every CUDA
    tensor, to use it on a third stream, wait for the compute stream and call ``record_stream``.

    A batch is copied on the compute stream if a part of it is on a device already, requires gradients, is not strided,
    or is an object with a ``to`` but neither entries nor ``record_stream``: its memory or readiness cannot be tracked.
    If we pin, and a part is pinned already, the CPU waits for the copy: the part may be a buffer that the next batch
    overwrites.

    The CPU waits if it is more than two steps ahead of the device, so that at most three batches are in the device's
    memory.

    Args:
        device: where batches go.
        pins: whether to copy tensors to pinned memory first, since copies are asynchronous only from there; False if
            the loader pins them.
        cuda: the module whose streams are used.

    Attributes:
        side: the side stream.
    """

    def __init__(self, device: torch.device, *, pins: bool, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._pins = pins
        self._cuda = cuda
        self.side = cuda.Stream(device)
        self._steps: deque[Any] = deque()

    def __call__(self, batch: Any) -> Any:
        """Move the tensors of a batch as :func:`fabric.tree.to_device` does; does not wait for the copies."""
        parts = _parts(batch)
        if not all(map(_can_be_followed, parts)):
            return to_device(batch, self._device, non_blocking=True)
        if self._pins:
            if any(isinstance(part, Tensor) and part.is_pinned() for part in parts):
                return to_device(batch, self._device)
            batch = map_tensors(lambda tensor: tensor.pin_memory(), batch)
        compute = self._cuda.current_stream(self._device)
        self._steps.append(compute.record_event())
        if len(self._steps) > _AHEAD:
            self._steps.popleft().synchronize()
        with self._cuda.stream(self.side):
            moved = to_device(batch, self._device, non_blocking=True)
        compute.wait_stream(self.side)
        parts = _parts(moved)
        if not all(
            hasattr(part, "record_stream") for part in parts
        ):  # an object whose memory cannot be tracked
            return to_device(batch, self._device)
        for part in parts:
            if not isinstance(part, Tensor) or part.device.type == self._device.type:
                part.record_stream(compute)
        return moved


def _parts(batch: Any) -> list[Any]:
    """The parts of a batch that hold memory: tensors and objects with ``to``, also inside mappings that are leaves."""
    parts: list[Any] = []
    for leaf in flatten(batch)[0]:
        if isinstance(leaf, Mapping):
            parts += _parts(dict(leaf))
        elif hasattr(leaf, "record_stream") or hasattr(leaf, "to"):
            parts.append(leaf)
    return parts


def _can_be_followed(part: Any) -> bool:
    if isinstance(part, Tensor):
        return part.device.type == "cpu" and part.layout is torch.strided and not part.requires_grad
    return hasattr(part, "record_stream")

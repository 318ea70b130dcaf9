"""Throughput over a window of steps, as Lightning Fabric counts it."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

_RATES = {"batches": "batches_per_sec", "samples": "samples_per_sec", "lengths": "items_per_sec"}


class Throughput:
    """Rates over the last ``window_size`` updates, whose values only grow.

    Args:
        available_flops: of one device, for ``mfu``.
        world_size: number of devices.
        window_size: number of updates, at least 2.
        separator: between ``device`` and the name of a rate.
    """

    def __init__(
        self,
        available_flops: float | None = None,
        world_size: int = 1,
        window_size: int = 100,
        separator: str = "/",
    ) -> None:
        if world_size < 1 or window_size < 2:
            raise ValueError(
                f"world_size={world_size} is at least 1, and window_size={window_size} at least 2"
            )
        self.available_flops = available_flops
        self.world_size = world_size
        self.separator = separator
        self._window: dict[str, deque[float]] = {}
        self._size = window_size

    def update(
        self,
        *,
        time: float,
        batches: int,
        samples: int,
        lengths: int | None = None,
        flops: int | None = None,
    ) -> None:
        """Take the totals of this device: seconds, batches, samples and their lengths; and the FLOPs since the last.

        Raises:
            ValueError: a total is smaller than before, or than it can be.
        """
        if samples < batches or (lengths is not None and lengths < samples):
            raise ValueError(
                f"batches={batches}, samples={samples}, lengths={lengths} have to be in ascending order"
            )
        given = {
            "time": time,
            "batches": batches,
            "samples": samples,
            "lengths": lengths,
            "flops": flops,
        }
        for name, value in given.items():
            if value is not None:
                window = self._window.setdefault(name, deque(maxlen=self._size))
                if window and window[-1] >= value and name != "flops":
                    raise ValueError(
                        f"{name}={value} after {window[-1]}: it is a total, which grows"
                    )
                window.append(value)

    def compute(self) -> dict[str, Any]:
        """The totals, and once the window is full the rates: ``device/...`` of one device, without it of all."""
        totals = {name: window[-1] for name, window in self._window.items() if name != "flops"}
        full = {
            name: list(window) for name, window in self._window.items() if len(window) == self._size
        }
        if "time" not in full:
            return totals
        grown = {name: values[-1] - values[0] for name, values in full.items()}
        seconds = grown["time"]
        rates = {rate: grown[name] / seconds for name, rate in _RATES.items() if name in grown}
        if "flops" in full:
            rates["flops_per_sec"] = sum(full["flops"][1:]) / seconds
        everywhere = (
            {name: value * self.world_size for name, value in rates.items()}
            if self.world_size > 1
            else {}
        )
        if "flops" in full and self.available_flops:
            rates["mfu"] = rates["flops_per_sec"] / self.available_flops
        return {
            **totals,
            **{f"device{self.separator}{name}": value for name, value in rates.items()},
            **everywhere,
        }

    def reset(self) -> None:
        """Forget all updates."""
        self._window.clear()


class ThroughputMonitor(Throughput):
    """A :class:`Throughput` that logs by a Fabric, whose devices and their peak it knows."""

    def __init__(self, fabric: Any, **kwargs: Any) -> None:
        dtype = fabric.precision.compute_dtype or fabric.precision.param_dtype or torch.float32
        super().__init__(get_available_flops(fabric.device, dtype), fabric.world_size, **kwargs)
        self._fabric = fabric
        self.step = -1

    def compute_and_log(self, step: int | None = None, **kwargs: Any) -> dict[str, Any]:
        """Log :meth:`compute`, at ``step`` or the next."""
        self.step = self.step + 1 if step is None else step
        metrics = self.compute(**kwargs)
        self._fabric.log_dict(metrics, self.step)
        return metrics


def measure_flops(
    model: Any, forward_fn: Callable[[], Any], loss_fn: Callable[[Any], Any] | None = None
) -> int:
    """The FLOPs of a forward pass, and with ``loss_fn`` of the backward pass too; of a model on ``meta`` as well."""
    with FlopCounterMode(display=False) as counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    return counter.get_total_flops()


# Dense FLOPs a second of 16-bit matrix products, by NVIDIA's data sheets; float32 on the tensor cores in second place.
_PEAKS = {
    "h200": (989e12, 494e12), "h100 pcie": (756e12, 378e12), "h100": (989e12, 494e12), "a100": (312e12, 156e12),
    "l40s": (362e12, 183e12), "l4": (121e12, 60e12), "a10g": (70e12, 35e12), "a10": (125e12, 62e12),
    "v100": (125e12, 15.7e12), "t4": (65e12, 8.1e12), "4090": (165e12, 82.6e12), "3090": (71e12, 35.6e12),
}  # fmt: skip


def get_available_flops(device: torch.device, dtype: torch.dtype | str) -> int | None:
    """The peak of a CUDA device for a dtype, in FLOPs a second; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    found = next((peaks for part, peaks in _PEAKS.items() if part in name), None)
    return None if found is None else int(found["16" not in str(dtype)])

"""Throughput over a window of steps, as Lightning Fabric counts it."""

import re
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.flop_counter import FlopCounterMode

_RATES = {"batches": "batches_per_sec", "samples": "samples_per_sec", "lengths": "items_per_sec"}


class Throughput:
    """Rates over the last ``window_size`` updates, which have totals since the start.

    Args:
        available_flops: The peak FLOPs a second of one device. ``mfu`` needs this value.
        world_size: The number of devices.
        window_size: The number of updates, at least 2.
        separator: The string between ``device`` and the name of a rate.
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
        self._window_size = window_size

    def update(
        self,
        *,
        time: float,
        batches: int,
        samples: int,
        lengths: int | None = None,
        flops: int | None = None,
    ) -> None:
        """Record the totals of this device.

        Args:
            time: The seconds since the start.
            batches: The number of batches.
            samples: The number of samples.
            lengths: The sum of the lengths of the samples.
            flops: The FLOPs since the last update, not a total.

        Raises:
            ValueError: A total has not grown, or ``batches <= samples <= lengths`` does not hold.
        """
        if samples < batches or (lengths is not None and lengths < samples):
            raise ValueError(
                f"batches={batches}, samples={samples}, lengths={lengths} have to be in ascending "
                "order"
            )
        values = {
            "time": time,
            "batches": batches,
            "samples": samples,
            "lengths": lengths,
            "flops": flops,
        }
        for name, value in values.items():
            if value is None:
                continue
            window = self._window.setdefault(name, deque(maxlen=self._window_size))
            if window and window[-1] >= value and name != "flops":
                raise ValueError(
                    f"{name}={value} after {window[-1]}: {name} is a total, which has to grow"
                )
            window.append(value)

    def compute(self) -> dict[str, Any]:
        """Return the totals and, once the window is full, the rates.

        The rates of one device begin with ``device/``. The rates of all devices have no prefix.
        """
        metrics: dict[str, Any] = {}
        full_windows: dict[str, list[float]] = {}
        for name, window in self._window.items():
            if name != "flops":
                metrics[name] = window[-1]
            if len(window) == self._window_size:
                full_windows[name] = list(window)
        if "time" not in full_windows:
            return metrics
        rates = _rates(full_windows)
        for name, rate in rates.items():
            metrics[f"device{self.separator}{name}"] = rate
        if "flops_per_sec" in rates and self.available_flops:
            utilization = rates["flops_per_sec"] / self.available_flops
            metrics[f"device{self.separator}mfu"] = utilization
        if self.world_size > 1:
            for name, rate in rates.items():
                metrics[name] = rate * self.world_size
        return metrics

    def reset(self) -> None:
        """Forget all updates."""
        self._window.clear()


def _rates(windows: dict[str, list[float]]) -> dict[str, float]:
    """Return the rates a second over full windows."""
    seconds = windows["time"][-1] - windows["time"][0]
    rates: dict[str, float] = {}
    for name, rate in _RATES.items():
        if name in windows:
            rates[rate] = (windows[name][-1] - windows[name][0]) / seconds
    if "flops" in windows:
        # The first value counts the FLOPs before the first time of the window.
        rates["flops_per_sec"] = sum(windows["flops"][1:]) / seconds
    return rates


class ThroughputMonitor(Throughput):
    """A :class:`Throughput` that takes its settings from a Fabric, and logs with it."""

    def __init__(self, fabric: Any, **kwargs: Any) -> None:
        dtype = fabric.precision.compute_dtype or fabric.precision.param_dtype or torch.float32
        super().__init__(get_available_flops(fabric.device, dtype), fabric.world_size, **kwargs)
        self._fabric = fabric
        # The step that was logged last. -1, so that the first step is 0.
        self.step = -1

    def compute_and_log(self, step: int | None = None, **kwargs: Any) -> dict[str, Any]:
        """Log and return the result of :meth:`compute`, at ``step`` or at the next step."""
        if step is None:
            step = self.step + 1
        self.step = step
        metrics = self.compute(**kwargs)
        self._fabric.log_dict(metrics=metrics, step=step)
        return metrics


def measure_flops(
    model: Any, forward_fn: Callable[[], Any], loss_fn: Callable[[Any], Any] | None = None
) -> int:
    """Return the FLOPs of a forward pass, and with ``loss_fn`` also of the backward pass.

    The model may be on the ``meta`` device. The argument ``model`` itself is not used.
    """
    with FlopCounterMode(display=False) as counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    return counter.get_total_flops()


class _Peak(NamedTuple):
    """Dense FLOPs a second of matrix products, from NVIDIA's data sheets."""

    half: float
    single: float  # float32, on the tensor cores where they support it


# By words in the device's name. The first match counts, so "h100 pcie" is before "h100".
_PEAKS = {
    "gh200": _Peak(989e12, 494e12),
    "h200": _Peak(989e12, 494e12),
    "h100 pcie": _Peak(756e12, 378e12),
    "h100": _Peak(989e12, 494e12),
    "a100": _Peak(312e12, 156e12),
    "a6000": _Peak(154.8e12, 77.4e12),
    "a40": _Peak(149.7e12, 74.8e12),
    "l40s": _Peak(362e12, 183e12),
    "l40": _Peak(181e12, 90.5e12),
    "l4": _Peak(121e12, 60e12),
    "a10g": _Peak(70e12, 35e12),
    "a10": _Peak(125e12, 62e12),
    "v100": _Peak(125e12, 15.7e12),
    "t4": _Peak(65e12, 8.1e12),
    "quadro rtx 5000": _Peak(89.2e12, 11.2e12),
    "4090": _Peak(165e12, 82.6e12),
    "3090": _Peak(71e12, 35.6e12),
}


def get_available_flops(device: torch.device, dtype: torch.dtype | str) -> int | None:
    """Return the peak of a CUDA device for a dtype, in FLOPs a second.

    Returns:
        The peak. None if the device is no CUDA device, and None with a warning if its name is in no
        row of the table.
    """
    if device.type != "cuda":
        return None
    device_name = torch.cuda.get_device_name(device).lower()
    for model, peak in _PEAKS.items():
        # As whole words: an RTX A4000 is no A40.
        if re.search(rf"\b{model}\b", device_name):
            # The dtype may be a name, such as "bf16-true".
            has_16_bits = "16" in str(dtype)
            return int(peak.half if has_16_bits else peak.single)
    rank_zero_warn(
        f"FLOPs not found for {device_name!r}: without Throughput(available_flops=...) there is "
        "no 'mfu'",
        stacklevel=5,
    )
    return None

"""The settings of torch that hold in the whole process, which the function of a rank may change."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

import torch

from fabric.accelerators import initialized_device_module
from fabric.seed import rng_state, set_rng_state

__all__ = ["GlobalState", "keeping_state"]


class GlobalState(NamedTuple):
    """Settings of torch in this process. They are named as in torch."""

    default_dtype: torch.dtype
    default_device: torch.device
    is_grad_enabled: bool
    num_threads: int
    float32_matmul_precision: str
    uses_deterministic_algorithms: bool
    is_deterministic_warn_only: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool

    @classmethod
    def current(cls) -> Self:
        """Return the settings of this process and thread."""
        return cls(
            default_dtype=torch.get_default_dtype(),
            default_device=torch.get_default_device(),
            is_grad_enabled=torch.is_grad_enabled(),
            num_threads=torch.get_num_threads(),
            float32_matmul_precision=torch.get_float32_matmul_precision(),
            uses_deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
            is_deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            cudnn_deterministic=torch.backends.cudnn.deterministic,
            cudnn_benchmark=torch.backends.cudnn.benchmark,
        )

    def restore(self) -> None:
        """Give this process these settings again. Do nothing if it has all of them."""
        current = self.current()
        if current == self:
            return
        torch.set_default_dtype(self.default_dtype)
        if current.default_device != self.default_device:
            # For any device but None, torch intercepts every function, which is slow. None means
            # the CPU, too.
            is_cpu = self.default_device.type == "cpu"
            device = None if is_cpu else self.default_device
            torch.set_default_device(device)
        torch.set_grad_enabled(self.is_grad_enabled)
        torch.set_num_threads(self.num_threads)
        torch.set_float32_matmul_precision(self.float32_matmul_precision)
        torch.use_deterministic_algorithms(
            self.uses_deterministic_algorithms, warn_only=self.is_deterministic_warn_only
        )
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.backends.cudnn.benchmark = self.cudnn_benchmark


@contextmanager
def keeping_state() -> Iterator[None]:
    """Give this process its settings, random streams and current device again after the block.

    The random streams of a GPU or other accelerator are included if this process has used it before
    the block.
    """
    settings = GlobalState.current()
    streams = rng_state()
    device_index = 0  # of a process that has used no accelerator yet
    if initialized_device_module() is not None:
        device_index = torch.accelerator.current_device_index()
    try:
        yield
    finally:
        settings.restore()
        if initialized_device_module() is not None:
            torch.accelerator.set_device_index(device_index)
        set_rng_state(streams)

"""The settings of torch that hold in the whole process, which a call on a rank may change."""

from typing import NamedTuple, Self

import torch
import torch.distributed as dist

from fabric.errors import UsageError

__all__ = ["GlobalState", "check_group"]


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
        """Give this process these settings again. Settings that are equal are not touched."""
        current = self.current()
        if current == self:
            return
        torch.set_default_dtype(self.default_dtype)
        if current.default_device != self.default_device:
            # None also means the CPU. It is faster than "cpu", for which torch intercepts every
            # function.
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


def check_group(group: dist.ProcessGroup | None) -> None:
    """Check that a process group is still the default group. Not a collective.

    Args:
        group: the default group before the call. None if the pool has no process group, for which
            nothing is checked.

    Raises:
        UsageError: the group has been destroyed or replaced.
    """
    if group is None:
        return
    is_default_group = dist.is_initialized() and dist.group.WORLD is group
    if not is_default_group:
        raise UsageError(
            "a call of RankPool.run",
            problem="it has destroyed the process group of the pool, which later calls need",
            suggestion="destroy only groups that the function has made; or RankPool(reset=False)",
        )

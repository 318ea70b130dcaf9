"""Throughput of a training loop: samples, tokens and model FLOPs per second over all processes.

[Note: Throughput] Every process sums its own samples and tokens. At the end of each window, and
only then, it waits for its device, and one message exchanges the sums. Windows follow each other
without a gap, so the time between steps counts: loading, logging, waiting for other processes. The
FLOPs of the first step are counted operation by operation. Those of a window are in proportion to
its tokens, or to its samples if no tokens are passed.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fabric._fabric import Fabric
from fabric._torch import DispatchMode, FakeTensor, is_in_backward
from fabric.errors import ConfigurationError, UsageError
from fabric.tree import PLAIN_TENSOR_TYPES

__all__ = ["Throughput"]


class _Sums(NamedTuple):
    """What the ranks exchange at the end of a window: sums over ranks.

    Attributes:
        samples: of the window.
        tokens: of the window.
        first_samples: of the step whose FLOPs were counted.
        first_tokens: of the step whose FLOPs were counted.
        first_flops: the FLOPs of that step.
        elapsed: nanoseconds of the window.
        ranks: the number of ranks.
    """

    samples: int
    tokens: int
    first_samples: int
    first_tokens: int
    first_flops: int
    elapsed: int
    ranks: int

    @property
    def flops(self) -> float:
        """The FLOPs of the window, in proportion to tokens, or else to samples."""
        first_size = self.first_tokens or self.first_samples
        if not first_size:
            return 0.0
        return self.first_flops * (self.tokens or self.samples) / first_size


class Throughput:
    """A meter of the speed of a training loop, which logs through ``fabric.log_dict``.

    Args:
        fabric: of this process.
        every: number of steps per window. Each window has a result.
        warmup: number of steps not measured, at least 1: the first steps allocate, compile, and
            count FLOPs.
        peak_flops: FLOPs per second of *one* device in the loop's precision, without sparsity. It
            is needed for MFU.

    Raises:
        ConfigurationError: a number is out of range.
    """

    def __init__(
        self, fabric: Fabric, *, every: int = 50, warmup: int = 10, peak_flops: float | None = None
    ) -> None:
        is_valid = every >= 1 and warmup >= 1 and (peak_flops is None or peak_flops > 0)
        if not is_valid:
            raise ConfigurationError(
                f"Throughput({every=}, {warmup=}, {peak_flops=})",
                expected="every and warmup of at least 1, "
                "and more than 0 FLOPs a second, such as 989e12",
            )
        self._fabric = fabric
        self._every = every
        self._warmup = warmup
        self._peak_flops = peak_flops
        self._counter = _FlopCounter()
        self._steps = 0
        self._window_start = 0  # in nanoseconds
        self._samples: float | Tensor = 0
        self._tokens: float | Tensor = 0
        # Those of the step whose FLOPs are counted.
        self._first_samples: float | Tensor = 0
        self._first_tokens: float | Tensor = 0

    @contextmanager
    def count_flops(self) -> Iterator[None]:
        """Count the FLOPs of the block, a step's forward and backward passes, in the first step.

        Recomputation by activation checkpointing does not count. In the first step
        ``torch.compile`` modules run uncompiled. After the first step the context does nothing.
        """
        if self._steps:
            yield
            return
        # A module whose first call is seen by a dispatch mode would never be compiled.
        with torch.compiler.set_stance("force_eager"), self._counter:
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block, such as validation, out. Waits for the device."""
        before = self._now()
        try:
            yield
        finally:
            self._window_start += self._now() - before

    def update(
        self, samples: float | Tensor, tokens: float | Tensor = 0, step: int | None = None
    ) -> dict[str, float] | None:
        """Add a step. Collective at the end of each window, with one message.

        Args:
            samples: of this process in this step, over all micro-batches: a number, or a tensor,
                which is not waited for.
            tokens: of this process in this step, as ``samples``. Under
                ``fabric.sequence_parallel``, those of this process's part of the
                sequences. 0 if the loop has no tokens.
            step: for the loggers. None uses the number of calls.

        Returns:
            At the end of a window ``samples_per_second``, ``tokens_per_second``,
            ``flops_per_second`` (all processes together) and ``mfu``, without those that are not
            known. The rates are the same on every process. At all other steps None.
        """
        if self._steps == 0:
            self._first_samples = samples
            self._first_tokens = tokens
        self._steps += 1
        # Not in place, which would change the caller's tensor.
        self._samples = self._samples + samples
        self._tokens = self._tokens + tokens
        measured_steps = self._steps - self._warmup
        if measured_steps < 0 or measured_steps % self._every:
            return None
        now = self._now()
        rates = None
        if measured_steps > 0:
            rates = self._rates(now - self._window_start)
        if rates and self._fabric.loggers:  # the caller may want no more than the result
            if step is None:
                step = self._steps
            self._fabric.log_dict(rates, step)
        self._window_start = now
        self._samples = 0
        self._tokens = 0
        return rates

    def _rates(self, elapsed: int) -> dict[str, float]:
        """Return the rates of a window that took ``elapsed`` nanoseconds on this process."""
        sums = _Sums(
            samples=int(self._samples),
            tokens=int(self._tokens),
            first_samples=int(self._first_samples),
            first_tokens=int(self._first_tokens),
            first_flops=self._counter.flops,
            elapsed=elapsed,
            ranks=1,
        )
        sums = _Sums(*self._fabric.all_reduce(list(sums), reduce_op="sum"))
        if self._peak_flops and not sums.first_flops:
            raise UsageError(
                f"Throughput(peak_flops={self._peak_flops})",
                problem="no FLOPs were counted in the first step",
                suggestion="with throughput.count_flops(): ...",
            )
        seconds = sums.elapsed / sums.ranks / 1e9
        # The sums count ranks that have parts of a batch, but not those that compute parts of a
        # layer.
        batches = self._fabric.strategy._data_parallel_communicator().size
        samples = sums.samples * (batches / sums.ranks)
        flops = sums.flops / sums.ranks / seconds  # of one process
        mfu = 0.0
        if self._peak_flops:
            mfu = flops / self._peak_flops
        rates = {
            "samples_per_second": samples / seconds,
            "tokens_per_second": sums.tokens / seconds,
            "flops_per_second": flops * self._fabric.world_size,
            "mfu": mfu,
        }
        return {name: rate for name, rate in rates.items() if rate}

    def _now(self) -> int:
        if self._fabric.device.type != "cpu":
            torch.accelerator.synchronize(self._fabric.device)
        return time.perf_counter_ns()


class _FlopCounter(DispatchMode):
    """A counter of the FLOPs of operators, by the formulas of ``torch.utils.flop_counter``.

    It counts the operators that autograd and the user call. It is not a ``FlopCounterMode``, which
    counts recomputation, and for a DTensor the work of all ranks.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        DispatchMode.__init__(self)
        # Importing torch does not import this module.
        from torch.utils.flop_counter import FlopCounterMode

        self.flops = 0
        self._formulas = FlopCounterMode(display=False).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_fake = FakeTensor in types  # in DTensor's shape propagation
        if not is_fake and not PLAIN_TENSOR_TYPES.issuperset(types):
            return NotImplemented  # DTensor calls operators on local tensors
        result = func(*args, **kwargs)
        # Operators such as control flow and flex_attention have no packet of overloads.
        operator = getattr(func, "_overloadpacket", func)
        formula = self._formulas.get(operator)
        if operator is func and formula is None:
            raise UsageError(
                "count_flops()",
                problem=f"torch has no formula for {func}",
                suggestion="torch.utils.flop_counter.register_flop_formula for it; "
                "or no count_flops()",
            )
        # Gradients are enabled in a backward pass only where a checkpointed block is recomputed.
        is_recomputed = is_in_backward() and torch.is_grad_enabled()
        if formula and not is_fake and not is_recomputed:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result

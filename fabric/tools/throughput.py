"""Throughput of a training loop: samples, tokens and model FLOPs per second over all processes.

Every process sums its own samples and tokens. At the end of each window, and only then, it waits
for its device, and one message exchanges the sums. Windows follow each other without a gap, so the
time between steps counts: loading, logging, waiting for other processes. The FLOPs of the first
step are counted operation by operation. The FLOPs of a window are computed from them, in proportion
to tokens, or to samples if no tokens are passed.
"""

import time
from collections.abc import Callable, Iterator
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
    """The numbers of a window, of one rank or summed over ranks.

    Each rank sends its numbers at the end of a window, and gets the sums.

    Attributes:
        samples: the samples of the window.
        tokens: the tokens of the window.
        first_samples: the samples of the first step, whose FLOPs were counted.
        first_tokens: the tokens of the first step.
        first_flops: the FLOPs of the first step.
        elapsed: nanoseconds of the window. As a sum, the mean times ``ranks``.
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
        """The FLOPs of the window, estimated from the FLOPs of the first step.

        FLOPs are taken to be in proportion to tokens, or to samples if the loop has no tokens.
        """
        first_size = self.first_tokens or self.first_samples
        if not first_size:
            return 0.0
        return self.first_flops * (self.tokens or self.samples) / first_size


class Throughput:
    """A meter of the speed of a training loop, which logs through ``fabric.log_dict``.

    Args:
        fabric: the Fabric of this process.
        every: number of steps per window. Each window has a result.
        warmup: number of steps that are not measured, at least 1: the first steps allocate,
            compile, and count FLOPs.
        peak_flops: FLOPs per second of *one* device in the loop's precision, without sparsity. It
            is needed for the model FLOPs utilization (MFU).

    Raises:
        ConfigurationError: a number is out of range.
    """

    def __init__(
        self, fabric: Fabric, *, every: int = 50, warmup: int = 10, peak_flops: float | None = None
    ) -> None:
        """Check the arguments. The first window begins at the end of the warm-up."""
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
        # The number of finished steps, warm-up included.
        self._steps = 0
        # When the current window began, by time.perf_counter_ns().
        self._window_start = 0
        # The sums of this process in the current window.
        self._samples: float | Tensor = 0
        self._tokens: float | Tensor = 0
        # The numbers of the first step, whose FLOPs are counted.
        self._first_samples: float | Tensor = 0
        self._first_tokens: float | Tensor = 0

    @contextmanager
    def count_flops(self) -> Iterator[None]:
        """Count the FLOPs of the block if it belongs to the first step.

        The block has the forward and backward passes of a step. Recomputation by activation
        checkpointing does not count. In the first step, compiled modules run uncompiled. After the
        first call of :meth:`update`, which ends the first step, the context does nothing.
        """
        is_first_step = self._steps == 0
        if not is_first_step:
            yield
            return
        # torch would never compile a module whose first call is within a dispatch mode, such as the
        # counter. The stance prevents this.
        with torch.compiler.set_stance("force_eager"), self._counter:
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block, such as validation. Waits for the device."""
        # The window is made to begin later by the duration of the block.
        before = self._wait_and_read_clock()
        try:
            yield
        finally:
            self._window_start += self._wait_and_read_clock() - before

    def update(
        self, samples: float | Tensor, tokens: float | Tensor = 0, step: int | None = None
    ) -> dict[str, float] | None:
        """Add a step. Collective at the end of each window, with one message.

        Args:
            samples: the samples of this process in this step, over all micro-batches: a number, or
                a tensor, which is read only at the end of the window.
            tokens: the tokens of this process in this step, as ``samples``. Under
                ``fabric.sequence_parallel``, the tokens of this process's part of the sequences. 0
                if the loop has no tokens.
            step: the number of the step for the loggers. None uses the number of calls.

        Returns:
            At the end of a window ``samples_per_second``, ``tokens_per_second``,
            ``flops_per_second`` (all processes together) and ``mfu``. Unknown rates are left out.
            The rates are the same on every process. None at all other steps.
        """
        if self._steps == 0:
            self._first_samples = samples
            self._first_tokens = tokens
        self._steps += 1
        # Not ``+=``, which cannot add a float tensor to an integer tensor.
        self._samples = self._samples + samples
        self._tokens = self._tokens + tokens
        measured_steps = self._steps - self._warmup
        is_end_of_window = measured_steps >= 0 and measured_steps % self._every == 0
        if not is_end_of_window:
            return None
        now = self._wait_and_read_clock()
        rates = None
        # At the end of the warm-up there is no window yet, and only the clock starts.
        if measured_steps > 0:
            rates = self._rates(now - self._window_start)
        # Without loggers, log_dict() would warn, although the caller may only want the result.
        if rates and self._fabric.loggers:
            if step is None:
                step = self._steps
            self._fabric.log_dict(rates, step)
        self._window_start = now
        self._samples = 0
        self._tokens = 0
        return rates

    def _sum_over_ranks(self, elapsed: int) -> _Sums:
        """Return the counts of the window, summed over all ranks. Collective.

        Args:
            elapsed: nanoseconds of the window on this process.
        """
        # int() reads a tensor, which waits for the device.
        counts = _Sums(
            samples=int(self._samples),
            tokens=int(self._tokens),
            first_samples=int(self._first_samples),
            first_tokens=int(self._first_tokens),
            first_flops=self._counter.flops,
            elapsed=elapsed,
            ranks=1,  # the sum is the number of ranks
        )
        # One collective for all fields, in their order.
        return _Sums(*self._fabric.all_reduce(list(counts), reduce_op="sum"))

    def _rates(self, elapsed: int) -> dict[str, float]:
        """Return the rates of a window, without rates that are not known. Collective.

        Args:
            elapsed: nanoseconds of the window on this process.

        Raises:
            UsageError: no FLOPs were counted, which the MFU needs.
        """
        sums = self._sum_over_ranks(elapsed)
        if self._peak_flops and not sums.first_flops:
            raise UsageError(
                f"Throughput(peak_flops={self._peak_flops})",
                problem="no FLOPs were counted in the first step",
                suggestion="with throughput.count_flops(): ...",
            )
        # The mean over ranks, in seconds.
        seconds = sums.elapsed / sums.ranks / 1e9
        # Ranks that share a batch, as in tensor parallelism, have all counted its samples. So the
        # sum of samples is divided by the number of ranks per batch. Tokens count only once, since
        # each rank counts the tokens of its part.
        num_different_batches = self._fabric.strategy._data_parallel_communicator().size
        samples = sums.samples * (num_different_batches / sums.ranks)
        flops_per_second_and_rank = sums.flops / sums.ranks / seconds
        mfu = 0.0
        if self._peak_flops:
            mfu = flops_per_second_and_rank / self._peak_flops
        rates = {
            "samples_per_second": samples / seconds,
            "tokens_per_second": sums.tokens / seconds,
            "flops_per_second": flops_per_second_and_rank * self._fabric.world_size,
            "mfu": mfu,
        }
        # A rate of 0 is not known: the loop has no tokens, or no FLOPs were counted.
        return {name: rate for name, rate in rates.items() if rate}

    def _wait_and_read_clock(self) -> int:
        """Wait for the device, and return the time in nanoseconds."""
        if self._fabric.device.type != "cpu":
            torch.accelerator.synchronize(self._fabric.device)
        return time.perf_counter_ns()


class _FlopCounter(DispatchMode):
    """A mode that counts the FLOPs of operators, by the formulas of ``torch.utils.flop_counter``.

    torch's ``FlopCounterMode`` would also count recomputation and, for a DTensor, the work of all
    ranks. This mode leaves out recomputation, and counts the work of this rank.

    Attributes:
        flops: the FLOPs of this rank so far.
    """

    # torch reads this attribute. True lets operators such as flex_attention reach
    # __torch_dispatch__.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        """Read torch's table of formulas, by operator."""
        super().__init__()
        # Imported here, since the import takes time, and ``import torch`` leaves this module out.
        from torch.utils.flop_counter import FlopCounterMode

        self.flops = 0
        self._formulas = FlopCounterMode(display=False).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count its FLOPs.

        torch calls this method for every operator while the mode is entered.

        Raises:
            UsageError: a higher-order operator for which torch has no formula. Other operators
                without a formula count as 0.
        """
        kwargs = kwargs or {}
        # DTensor finds the shapes of its results with fake tensors, which compute nothing.
        is_fake = FakeTensor in types
        if not is_fake and not PLAIN_TENSOR_TYPES.issuperset(types):
            # The type is a subclass such as DTensor. After NotImplemented, torch has DTensor run
            # the operator, and DTensor calls operators on local tensors, which come here.
            return NotImplemented
        result = func(*args, **kwargs)
        formula = self._formula_of(func)
        # Activation checkpointing enables gradients within a backward pass to recompute a block,
        # which is no work of the model. Under create_graph=True, gradients are enabled in all of
        # the backward pass, and none of it is counted.
        is_recomputed = is_in_backward() and torch.is_grad_enabled()
        if formula and not is_fake and not is_recomputed:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result

    def _formula_of(self, func: Any) -> Callable[..., int] | None:
        """Return torch's formula for the FLOPs of an operator. None counts the operator as 0.

        Raises:
            UsageError: a higher-order operator has no formula.
        """
        # A formula is registered for the packet of an operator, which has all its overloads.
        packet = getattr(func, "_overloadpacket", None)
        if packet is not None:
            return self._formulas.get(packet)
        # A higher-order operator (control flow, flex_attention) has no packet: its formula is
        # registered for the operator itself. It may stand for most of a model's work, so it does
        # not count as 0.
        formula = self._formulas.get(func)
        if formula is None:
            raise UsageError(
                "count_flops()",
                problem=f"torch has no formula for {func}",
                suggestion="torch.utils.flop_counter.register_flop_formula for it; "
                "or no count_flops()",
            )
        return formula

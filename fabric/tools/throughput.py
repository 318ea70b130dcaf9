"""Throughput of a training loop: samples, tokens and model FLOPs per second over all processes.

[Note: Throughput] Every process sums its own samples and tokens. At the end of each window, and only then, it waits for
its device, and one message exchanges the sums. Windows follow each other without a gap, so the time between steps
counts: loading, logging, waiting for others. The FLOPs of the first step are counted operation by operation; later ones
are in proportion to tokens, or to samples if no tokens are passed.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fabric._fabric import Fabric
from fabric._torch import DispatchMode, FakeTensor, in_backward
from fabric.errors import ConfigurationError, UsageError
from fabric.tree import PLAIN_TENSOR_TYPES

__all__ = ["Throughput"]


class Throughput:
    """Measures how fast a training loop is, and logs that through ``fabric.log_dict``.

    Args:
        fabric: of this process.
        every: number of steps per window; each window has a result.
        warmup: number of steps not measured, at least 1: the first ones allocate, compile, and count FLOPs.
        peak_flops: FLOPs per second of *one* device in the loop's precision, without sparsity, for MFU.

    Raises:
        ConfigurationError: a number is out of range.
    """

    def __init__(
        self, fabric: Fabric, *, every: int = 50, warmup: int = 10, peak_flops: float | None = None
    ) -> None:
        if every < 1 or warmup < 1 or (peak_flops is not None and not peak_flops > 0):
            expected = (
                "every and warmup of at least 1, and more than 0 FLOPs a second, such as 989e12"
            )
            raise ConfigurationError(
                f"Throughput({every=}, {warmup=}, {peak_flops=})", expected=expected
            )
        self._fabric = fabric
        self._every = every
        self._warmup = warmup
        self._peak = peak_flops
        self._counter = _FlopCounter()
        self._steps = 0
        self._start = 0
        self._samples = 0
        self._tokens = 0
        self._first: tuple[Any, Any] | None = (
            None  # samples and tokens of the step whose FLOPs were counted
        )

    @contextmanager
    def count_flops(self) -> Iterator[None]:
        """A context around a step's forward and backward passes, which counts FLOPs in the first step.

        Recomputation by activation checkpointing does not count. In the first step ``torch.compile`` modules run
        uncompiled; later the context does nothing.
        """
        if self._steps:
            yield
            return
        # A module whose first call is seen by a dispatch mode would never be compiled.
        with torch.compiler.set_stance("force_eager"), self._counter:
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time does not count, such as validation. Waits for the device."""
        before = self._now()
        try:
            yield
        finally:
            self._start += self._now() - before

    def update(
        self, samples: Any, tokens: Any = 0, step: int | None = None
    ) -> dict[str, float] | None:
        """Add a step. Collective at the end of each window, with one message.

        Args:
            samples: of this process in this step, over all micro-batches: a number, or a tensor, which is not
                waited for.
            tokens: likewise; under ``fabric.sequence_parallel``, of this process's part.
            step: for the loggers; None uses the number of calls.

        Returns:
            At the end of a window ``samples_per_second``, ``tokens_per_second``, ``flops_per_second`` (all processes
            together) and ``mfu``, those that are known; the same on every process. Otherwise None.
        """
        self._steps += 1
        self._first = self._first or (samples, tokens)
        self._samples = self._samples + samples  # a new tensor, not the caller's changed
        self._tokens = self._tokens + tokens
        if (measured := self._steps - self._warmup) < 0 or measured % self._every:
            return None
        now = self._now()
        found = self._exchange(now - self._start, *self._first) if measured else None
        if found and self._fabric.loggers:  # the caller may want no more than the result
            self._fabric.log_dict(found, self._steps if step is None else step)
        self._start = now
        self._samples = 0
        self._tokens = 0
        return found

    def _exchange(self, elapsed: int, *first: Any) -> dict[str, float]:
        own = [*map(int, (self._samples, self._tokens, *first)), self._counter.flops, elapsed, 1]
        samples, tokens, *firsts, counted, elapsed, ranks = self._fabric.all_reduce(
            own, reduce_op="sum"
        )
        if self._peak and not counted:
            problem = "no FLOPs were counted in the first step"
            suggestion = "with throughput.count_flops(): ..."
            raise UsageError(f"Throughput(peak_flops={self._peak})", problem, suggestion=suggestion)
        seconds = elapsed / ranks / 1e9
        first = firsts[1] or firsts[0]
        flops = (
            counted * (tokens or samples) / first / ranks / seconds if first else 0.0
        )  # of one process
        # The sum counts ranks that have parts of a batch, but not those that compute parts of a layer.
        samples *= self._fabric.strategy._data_parallel_communicator().size / ranks
        rates = {"samples_per_second": samples / seconds, "tokens_per_second": tokens / seconds}
        rates |= {
            "flops_per_second": flops * self._fabric.world_size,
            "mfu": flops / (self._peak or float("inf")),
        }
        return {name: rate for name, rate in rates.items() if rate}

    def _now(self) -> int:
        if self._fabric.device.type != "cpu":
            torch.accelerator.synchronize(self._fabric.device)
        return time.perf_counter_ns()


class _FlopCounter(DispatchMode):
    """Counts FLOPs of operators that autograd and the user call, by ``torch.utils.flop_counter``'s formulas.

    Not a ``FlopCounterMode``: that counts recomputation, and for a DTensor the work of all ranks.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        DispatchMode.__init__(self)
        # Importing torch does not import this module.
        from torch.utils.flop_counter import FlopCounterMode

        self.flops = 0
        self._formulas = FlopCounterMode(display=False).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # DTensor's shape propagation
        kwargs = kwargs or {}
        is_fake = FakeTensor in types
        if not is_fake and not PLAIN_TENSOR_TYPES.issuperset(types):
            return NotImplemented  # DTensor calls operators on local tensors
        made = func(*args, **kwargs)
        operation = getattr(
            func, "_overloadpacket", func
        )  # control flow, flex_attention and the like have none
        formula = self._formulas.get(operation)
        if operation is func and formula is None:
            suggestion = (
                "torch.utils.flop_counter.register_flop_formula for it; or no count_flops()"
            )
            raise UsageError(
                "count_flops()", problem=f"torch has no formula for {func}", suggestion=suggestion
            )
        # Checkpointed blocks are recomputed in backward with gradients enabled, which are otherwise off there.
        if formula and not is_fake and not (in_backward() and torch.is_grad_enabled()):
            self.flops += formula(*args, **kwargs, out_val=made)
        return made

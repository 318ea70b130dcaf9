"""Throughput of a training loop: samples, tokens and model FLOPs a second of all processes.

[Note: Throughput] Every process adds up its own samples and tokens. At the end of a window their sums are exchanged in
one message, and only then does a process wait for its device. Windows follow each other without a gap, so that what
happens between them counts: loading, logging, waiting for others. The FLOPs of the first step are counted operation by
operation; from then on they are in proportion to tokens, or samples where no tokens are passed.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fabric._fabric import Fabric
from fabric._torch import DispatchMode, FakeTensor, in_backward
from fabric.errors import ConfigurationError, UsageError
from fabric.tree import PLAIN

__all__ = ["Throughput"]


class Throughput:
    """Measures how fast a training loop is, and logs that through ``fabric.log_dict``.

    Args:
        fabric: of this process.
        every: number of steps of a window, after each of which there is a result.
        warmup: number of steps that are not measured, at least 1: the first allocate, compile, and count FLOPs.
        peak_flops: FLOPs a second of *one* device in the precision of the loop, without sparsity, for the MFU.

    Raises:
        ConfigurationError: a number outside of what is listed here.
    """

    def __init__(self, fabric: Fabric, *, every: int = 50, warmup: int = 10, peak_flops: float | None = None) -> None:
        if every < 1 or warmup < 1 or (peak_flops is not None and not peak_flops > 0):
            expected = "every and warmup of at least 1, and more than 0 FLOPs a second, such as 989e12"
            raise ConfigurationError(f"Throughput({every=}, {warmup=}, {peak_flops=})", expected=expected)
        self._fabric, self._every, self._warmup, self._peak = fabric, every, warmup, peak_flops
        self._counter = _FlopCounter()
        self._steps = self._start = self._samples = self._tokens = 0
        self._first: tuple[Any, Any] | None = None  # samples and tokens of the step of which the FLOPs were counted

    @contextmanager
    def count_flops(self) -> Iterator[None]:
        """A context around the forward and backward passes of a step, whose FLOPs are counted in the first one.

        What activation checkpointing computes again does not count. Modules from ``torch.compile`` run uncompiled in
        it. Later it does nothing.
        """
        if self._steps:
            yield
            return
        # A module whose first call is seen by a dispatch mode would never be compiled.
        with torch.compiler.set_stance("force_eager"), self._counter:
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time does not count, such as a validation. Waits for the device."""
        before = self._now()
        try:
            yield
        finally:
            self._start += self._now() - before

    def update(self, samples: Any, tokens: Any = 0, step: int | None = None) -> dict[str, float] | None:
        """Add a step. Collective at the end of each window, with one message.

        Args:
            samples: of this process in this step, all micro-batches together: a number, or a tensor, which is not
                waited for.
            tokens: likewise; under ``fabric.sequence_parallel`` those of the part.
            step: for the loggers; None counts the calls.

        Returns:
            At the end of a window ``samples_per_second``, ``tokens_per_second``, ``flops_per_second`` (all processes
            together) and ``mfu``, as far as they are known; the same on every process. Else None.
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
        self._start, self._samples, self._tokens = now, 0, 0
        return found

    def _exchange(self, elapsed: int, *first: Any) -> dict[str, float]:
        own = [*map(int, (self._samples, self._tokens, *first)), self._counter.flops, elapsed, 1]
        samples, tokens, *firsts, counted, elapsed, ranks = self._fabric.all_reduce(own, reduce_op="sum")
        if self._peak and not counted:
            problem, suggestion = "no FLOPs were counted in the first step", "with throughput.count_flops(): ..."
            raise UsageError(f"Throughput(peak_flops={self._peak})", problem, suggestion=suggestion)
        seconds = elapsed / ranks / 1e9
        first = firsts[1] or firsts[0]
        flops = counted * (tokens or samples) / first / ranks / seconds if first else 0.0  # of one process
        # Ranks that compute parts of a layer are left out of the sum, those that have parts of a batch are not.
        samples *= self._fabric.strategy._summing(is_batch=True).size / ranks
        rates = {"samples_per_second": samples / seconds, "tokens_per_second": tokens / seconds}
        rates |= {"flops_per_second": flops * self._fabric.world_size, "mfu": flops / (self._peak or float("inf"))}
        return {name: rate for name, rate in rates.items() if rate}

    def _now(self) -> int:
        if self._fabric.device.type != "cpu":
            torch.accelerator.synchronize(self._fabric.device)
        return time.perf_counter_ns()


class _FlopCounter(DispatchMode):
    """Counts the FLOPs of what autograd and the user call, by the formulas of ``torch.utils.flop_counter``.

    Not a ``FlopCounterMode``: that counts what is computed again, and of a DTensor what all ranks do.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        DispatchMode.__init__(self)
        # Not loaded with torch.
        from torch.utils.flop_counter import FlopCounterMode

        self.flops, self._formulas = 0, FlopCounterMode(display=False).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, is_fake = kwargs or {}, FakeTensor in types  # of which DTensor learns shapes
        if not is_fake and not PLAIN.issuperset(types):
            return NotImplemented  # DTensor calls operators on what it has
        made = func(*args, **kwargs)
        operation = getattr(func, "_overloadpacket", func)  # control flow, flex_attention and the like have none
        formula = self._formulas.get(operation)
        if operation is func and formula is None:
            suggestion = "torch.utils.flop_counter.register_flop_formula for it; or no count_flops()"
            raise UsageError("count_flops()", f"torch has no formula for {func}", suggestion=suggestion)
        # Checkpointed blocks are computed again in the backward pass with gradients on, where else they are off.
        if formula and not is_fake and not (in_backward() and torch.is_grad_enabled()):
            self.flops += formula(*args, **kwargs, out_val=made)
        return made

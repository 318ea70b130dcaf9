"""Averages of a model's weights over training, sharded like the model."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fabric._torch import local_tensor
from fabric.errors import ConfigurationError, UsageError
from fabric.module import FabricModule

__all__ = ["ExponentialMovingAverage"]


class ExponentialMovingAverage(nn.Module):
    """The exponential moving average of a model's weights (Polyak averaging), under any strategy.

    The numbers are those of torch's ``AveragedModel`` with ``get_ema_multi_avg_fn(decay)``: the first :meth:`update`
    copies the weights; each later one adds ``(1 - decay) * (weight - average)`` to each average. Averages of bfloat16
    and float16 weights are float32, since such small changes would be rounded away.

    Each process averages its part of the model: no call is a collective, but all processes must make it. For
    ``fabric.save`` and ``fabric.load`` this is a module whose buffers have the names and sharding of the model's
    weights; the number of updates is saved too. It loads under any strategy and number of processes.

    Args:
        model: the set-up module.
        decay: the weight of the old average in an update, in ``[0, 1]``; or a function of the number of updates
            so far (at least 1) that returns it.
        buffers: whether to average buffers too; those that are not floating point keep the latest value. If not,
            the model's own buffers are used, also within :meth:`applied`.

    Raises:
        ConfigurationError: the decay is not in ``[0, 1]``.
        UsageError: the module is a copy of a set-up module.
    """

    def __init__(
        self, model: FabricModule, decay: float | Callable[[int], float], buffers: bool
    ) -> None:
        super().__init__()
        contract = model._fabric_contract
        if contract is None:
            raise UsageError(
                f"ema with a copy of {type(model.module).__name__}", "a copy is not set up itself"
            )
        self._decay = decay if callable(decay) else _checked(decay)
        self._updates = 0
        self._is_applied = False
        self._reshard = contract.reshard
        self._current: Callable[[], dict[str, Tensor]] = partial(_weights, contract, buffers)
        # By name, the dict and key of each average, not the tensor: a conversion of this module replaces it.
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        for path, weight in self._current().items():
            *owners, name = path.split(".")
            part: nn.Module = self
            for owner in owners:
                part = part._modules.setdefault(owner, nn.Module())  # pyright: ignore[reportAssignmentType]  # no None
            dtype = (
                torch.float32 if weight.dtype in (torch.bfloat16, torch.float16) else weight.dtype
            )
            # Not by register_buffer, which refuses names of attributes of this class.
            part._buffers[name] = weight.detach().to(dtype, copy=True)
            self._places[path] = part._buffers, name
        if contract.is_sharded:
            from fabric.strategies.fsdp.state import (
                take_shards,
            )  # takes a second to import; already imported here

            for part in self.modules():
                part.register_load_state_dict_pre_hook(partial(take_shards, part._buffers))

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the weights, after an optimizer step. Not a collective."""
        if self._is_applied:
            raise UsageError(
                "ema.update() within ema.applied()", "the weights are the averages themselves"
            )
        first = self._updates == 0
        decay = (
            0.0 if first else self._decay(self._updates) if callable(self._decay) else self._decay
        )
        average_all = get_ema_multi_avg_fn(_checked(decay))
        same: tuple[list[Any], list[Any]] = [], []
        for average, weight in self._pairs():
            if first or not (average.is_floating_point() or average.is_complex()):
                average.copy_(weight)
            elif average.dtype == weight.dtype:
                same[0].append(average)
                same[1].append(weight)
            else:  # one at a time: all at once would need memory for another model in float32
                average_all([average], [weight.to(average.dtype)], self._updates)
        if same[0]:
            average_all(*same, self._updates)
        self._updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the averages are the model's weights, for validation or export.

        At the end, also after an exception, the model's own weights are restored bit for bit; changes made within are
        lost. Within, no gradients are recorded, since gradients of averages would train nothing; use
        ``torch.enable_grad()`` for gradients of inputs. Do not enter it between a forward pass and its backward pass.
        Needs memory for another copy of this process's part of the weights. Not a collective.
        """
        # Keeps the tensors themselves: a forward pass within may add or replace buffers.
        before = [(weight.detach().clone(), weight) for _, weight in self._pairs()]
        was_applied = self._is_applied
        self._is_applied = True
        try:
            self._write(self._pairs())
            with torch.no_grad():
                yield
        finally:
            self._is_applied = was_applied
            self._write(before)

    def get_extra_state(self) -> int:
        """The number of updates, for ``state_dict``."""
        return self._updates

    def set_extra_state(self, state: int) -> None:
        """Restore the number of updates."""
        self._updates = state

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The local averages of this process, each with its weight."""
        weights = self._current()
        if changed := sorted(weights.keys() ^ self._places.keys()):
            problem = (
                f"these were added to the model or removed from it since: {', '.join(changed)}"
            )
            raise UsageError(
                "an average of the weights",
                problem,
                suggestion="fabric.ema(model) after such a change",
            )
        places = ((self._places[name], weight) for name, weight in weights.items())
        return [
            (local_tensor(owner[name]), local_tensor(weight)) for (owner, name), weight in places
        ]

    @torch.no_grad()
    def _write(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        # Otherwise the next forward pass would use parameters that are already gathered, or cast by autocast.
        self._reshard()
        torch.clear_autocast_cache()
        for value, weight in pairs:
            weight.copy_(value)


def _weights(contract: Any, buffers: bool) -> dict[str, Tensor]:
    return {**contract.parameters(), **(dict(contract.module.named_buffers()) if buffers else {})}


def _checked(decay: float) -> float:
    if not 0 <= decay <= 1:
        raise ConfigurationError(
            f"ema with decay={decay!r}", expected="a number in [0, 1], such as 0.999"
        )
    return decay

"""Averages of a model's weights over its training, sharded as the model is."""

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
    takes the weights as they are, each later one adds ``(1 - decay) * (weight - average)`` to each average. Averages of
    weights in bfloat16 and float16, in which so small a change would be rounded away, are float32.

    Each process averages what it holds of the model: no call is a collective, and each has to be made by all processes.
    To ``fabric.save`` and ``fabric.load`` this is a module whose buffers have the names of the model's weights, sharded
    as these are; the number of updates belongs to it. It loads into any strategy and number of processes.

    Args:
        model: the set-up module.
        decay: how much of an average stays in an update, in ``[0, 1]``; or a function of the number of updates so far,
            at least 1, that returns it.
        buffers: whether buffers are averaged, too; those that are not floating point have the latest value. If not,
            they are the model's own, also within :meth:`applied`.

    Raises:
        ConfigurationError: the decay is not in ``[0, 1]``.
        UsageError: the module is a copy of one that was set up.
    """

    def __init__(self, model: FabricModule, decay: float | Callable[[int], float], buffers: bool) -> None:
        super().__init__()
        contract = model._fabric_contract
        if contract is None:
            raise UsageError(f"ema with a copy of {type(model.module).__name__}", "a copy is not set up itself")
        self._decay = decay if callable(decay) else _checked(decay)
        self._updates, self._is_applied, self._reshard = 0, False, contract.reshard
        self._current: Callable[[], dict[str, Tensor]] = partial(_weights, contract, buffers)
        # By name, the dict of buffers and the key there of each average: a conversion of this module replaces them.
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        for path, weight in self._current().items():
            *owners, name = path.split(".")
            part: nn.Module = self
            for owner in owners:
                part = part._modules.setdefault(owner, nn.Module())  # pyright: ignore[reportAssignmentType]  # no None
            dtype = torch.float32 if weight.dtype in (torch.bfloat16, torch.float16) else weight.dtype
            # Not by register_buffer, which refuses what is an attribute of this class.
            part._buffers[name] = weight.detach().to(dtype, copy=True)
            self._places[path] = part._buffers, name
        if contract.is_sharded:
            from fabric.strategies.fsdp_state import take_shards  # takes a second to import; here it has been

            for part in self.modules():
                part.register_load_state_dict_pre_hook(partial(take_shards, part._buffers))

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages toward the weights, after a step of the optimizer. Not a collective."""
        if self._is_applied:
            raise UsageError("ema.update() within ema.applied()", "the weights are the averages themselves")
        first = self._updates == 0
        decay = 0.0 if first else self._decay(self._updates) if callable(self._decay) else self._decay
        average_all = get_ema_multi_avg_fn(_checked(decay))
        same: tuple[list[Any], list[Any]] = [], []
        for average, weight in self._pairs():
            if first or not (average.is_floating_point() or average.is_complex()):
                average.copy_(weight)
            elif average.dtype == weight.dtype:
                same[0].append(average)
                same[1].append(weight)
            else:  # one at a time: all in float32 would take memory for another model
                average_all([average], [weight.to(average.dtype)], self._updates)
        if same[0]:
            average_all(*same, self._updates)
        self._updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the model has the averages as its weights, for a validation or an export.

        At the end, also after an exception, it has its own weights again, bit for bit; what changed them within is
        undone. Within, no gradients are recorded, since those of averages would train nothing;
        ``torch.enable_grad()`` is for gradients of inputs. Not to be entered between a forward pass and its backward
        pass. Takes memory for another copy of what this process holds of the weights. Not a collective.
        """
        # The tensors themselves: a forward pass within may register buffers, or put others in the places of some.
        before = [(weight.detach().clone(), weight) for _, weight in self._pairs()]
        was_applied, self._is_applied = self._is_applied, True
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
        """What this process holds of the averages, each with the weight that it belongs to."""
        weights = self._current()
        if changed := sorted(weights.keys() ^ self._places.keys()):
            problem = f"these were added to the model or removed from it since: {', '.join(changed)}"
            raise UsageError("an average of the weights", problem, suggestion="fabric.ema(model) after such a change")
        places = ((self._places[name], weight) for name, weight in weights.items())
        return [(local_tensor(owner[name]), local_tensor(weight)) for (owner, name), weight in places]

    @torch.no_grad()
    def _write(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        # What is gathered already would stay as it is in the next forward pass, and so would what autocast has cast.
        self._reshard()
        torch.clear_autocast_cache()
        for value, weight in pairs:
            weight.copy_(value)


def _weights(contract: Any, buffers: bool) -> dict[str, Tensor]:
    return {**contract.parameters(), **(dict(contract.module.named_buffers()) if buffers else {})}


def _checked(decay: float) -> float:
    if not 0 <= decay <= 1:
        raise ConfigurationError(f"ema with decay={decay!r}", expected="a number in [0, 1], such as 0.999")
    return decay

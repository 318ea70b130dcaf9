"""Averages of a model's weights over training, sharded like the model."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fabric._torch import local_tensor, registered_buffers, registered_modules
from fabric.contract import GradientContract
from fabric.errors import ConfigurationError, UsageError
from fabric.module import FabricModule

__all__ = ["ExponentialMovingAverage"]


class _Buffer(NamedTuple):
    """The place of an average: a buffer of a submodule.

    The tensor itself is not kept, because conversions such as ``half()`` replace it.

    Attributes:
        buffers: the buffers of the submodule, by name.
        name: the name of the average in ``buffers``.
    """

    buffers: dict[str, Tensor | None]
    name: str

    @property
    def tensor(self) -> Tensor:
        """The average."""
        tensor = self.buffers[self.name]
        assert tensor is not None
        return tensor


class ExponentialMovingAverage(nn.Module):
    """The exponential moving average of a model's weights (Polyak averaging), under any strategy.

    The numbers are those of torch's ``AveragedModel`` with ``get_ema_multi_avg_fn(decay)``. The
    first :meth:`update` copies the weights. Each later update adds ``(1 - decay) * (weight -
    average)`` to each average. Averages of bfloat16 and float16 weights are float32, since these
    small changes would be rounded away.

    Each process averages its part of the model. No call is a collective, but all processes must
    make the same calls. For ``fabric.save`` and ``fabric.load``, this object is a module whose
    buffers have the names and the sharding of the model's weights. The number of updates is saved,
    too. The averages load under any strategy and number of processes.

    Args:
        model: the set-up module.
        decay: the weight of the old average in an update, in ``[0, 1]``; or a function that takes
            the number of updates so far (at least 1) and returns this weight.
        buffers: whether to average buffers too. A buffer that is not floating point is not averaged
            but copied. If false, the model uses its own buffers, also within :meth:`applied`.

    Raises:
        ConfigurationError: the decay is not in ``[0, 1]``.
        UsageError: the module is a copy of a set-up module.
    """

    def __init__(
        self, model: FabricModule, decay: float | Callable[[int], float], buffers: bool
    ) -> None:
        """Register a copy of each weight as a buffer of this module."""
        super().__init__()
        # A copy of a set-up module has no contract.
        contract = model._fabric_contract
        if contract is None:
            raise UsageError(
                f"ema with a copy of {type(model.module).__name__}",
                problem="a copy is not set up itself",
            )
        if not callable(decay):
            _check_decay(decay)
        self._decay = decay
        self._updates = 0  # the number of calls of update()
        # Whether applied() has put the averages into the model.
        self._is_applied = False
        self._contract: GradientContract = contract
        self._averages_buffers = buffers
        self._averages: dict[str, _Buffer] = {}
        for path, weight in self._current_weights().items():
            self._averages[path] = self._add_average(path, weight)
        if contract.is_sharded:
            # A state dict holds full averages, and the buffers are this rank's shards.
            self._shard_when_loading()

    def _add_average(self, path: str, weight: Tensor) -> _Buffer:
        """Add a copy of a weight as a buffer of the same name, and return the buffer's place.

        Args:
            path: the name of the weight in the model. The part before each dot is a submodule,
                which is added if it does not exist.
            weight: the weight.
        """
        *owners, name = path.split(".")
        # Children and buffers are put into the modules' own dicts. add_module and register_buffer
        # would refuse a name that is also the name of a method, such as "update".
        submodule: nn.Module = self
        for owner in owners:
            children = registered_modules(submodule)
            child = children.get(owner)
            if child is None:
                child = nn.Module()
                children[owner] = child
            submodule = child
        # In 16 bits, the small changes of an average would be rounded away.
        dtype = weight.dtype
        if dtype in (torch.bfloat16, torch.float16):
            dtype = torch.float32
        buffers = registered_buffers(submodule)
        buffers[name] = weight.detach().to(dtype, copy=True)
        return _Buffer(buffers, name)

    def _shard_when_loading(self) -> None:
        """Register hooks that take this rank's shards when a full state dict is loaded.

        Without the hooks, the full tensors would not have the shapes of the sharded buffers.
        """
        # Imported here: the import takes a second. A sharded model has made it already.
        from fabric.strategies.fsdp.state import shard_module_state

        for submodule in self.modules():
            hook = partial(shard_module_state, registered_buffers(submodule))
            submodule.register_load_state_dict_pre_hook(hook)

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the weights. Called after an optimizer step. Not a collective.

        Raises:
            UsageError: the averages are applied, or the model has other weights than before.
        """
        if self._is_applied:
            raise UsageError(
                "ema.update() within ema.applied()",
                problem="the weights are the averages themselves",
            )
        if self._updates == 0:
            for average, weight in self._averages_with_weights():
                average.copy_(weight)
        else:
            self._update_averages()
        self._updates += 1

    def _update_averages(self) -> None:
        """Move the averages toward the weights. Called for each update but the first.

        The first update copies the weights into the averages.

        Raises:
            ConfigurationError: the user's function returned a decay that is not in ``[0, 1]``.
        """
        decay = self._decay
        if callable(decay):
            decay = decay(self._updates)
            _check_decay(decay)
        # A function of a list of averages and a list of weights. It ignores its third argument.
        average_all = get_ema_multi_avg_fn(decay)
        # Averages with the dtype of their weight are collected here, and updated in one call.
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        for average, weight in self._averages_with_weights():
            can_be_averaged = average.is_floating_point() or average.is_complex()
            if not can_be_averaged:
                average.copy_(weight)
            elif average.dtype == weight.dtype:
                averages.append(average)
                weights.append(weight)
            else:
                # One by one: converted copies of all weights at once would need the memory of
                # another model in float32.
                average_all([average], [weight.to(average.dtype)], self._updates)
        if averages:
            average_all(averages, weights, self._updates)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the averages as the model's weights within a context, for validation or export.

        At the end, also after an exception, the model's own weights are restored bit for bit.
        Changes of weights within the context are lost. No gradients are recorded within, since
        gradients of averages would train nothing. Use ``torch.enable_grad()`` for gradients of
        inputs. Do not enter the context between a forward pass and its backward pass. The context
        needs memory for another copy of this process's part of the weights. Not a collective.
        """
        # Pairs of a copy and the weight itself. The weights are not looked up again at the end,
        # since a forward pass within the context may replace buffers.
        own_values: list[tuple[Tensor, Tensor]] = []
        for _, weight in self._averages_with_weights():
            own_values.append((weight.detach().clone(), weight))
        # True if this context is within another one.
        was_applied = self._is_applied
        self._is_applied = True
        try:
            self._write(self._averages_with_weights())
            with torch.no_grad():
                yield
        finally:
            self._is_applied = was_applied
            self._write(own_values)

    def _averages_of_parameters(self) -> dict[str, Tensor]:
        """Return the averages of the model's parameters by name, without averages of buffers."""
        averages: dict[str, Tensor] = {}
        for name in self._contract.parameters():
            if name in self._averages:
                averages[name] = self._averages[name].tensor
        return averages

    def get_extra_state(self) -> int:
        """Return the number of updates, for ``state_dict``. Called by torch."""
        return self._updates

    def set_extra_state(self, state: int) -> None:
        """Restore the number of updates. Called by ``load_state_dict``."""
        self._updates = state

    def _current_weights(self) -> dict[str, Tensor]:
        """Return the weights to average, by name.

        They are looked up at each call, since a forward pass may add or replace buffers.
        """
        weights = dict(self._contract.parameters())
        if self._averages_buffers:
            weights.update(self._contract.module.named_buffers())
        return weights

    def _averages_with_weights(self) -> list[tuple[Tensor, Tensor]]:
        """Return each weight of the model with its average, as pairs ``(average, weight)``.

        For sharded weights, both tensors are this rank's shards.

        Raises:
            UsageError: weights were added to the model or removed from it.
        """
        weights = self._current_weights()
        # The names that only the model has, or that only the averages have.
        changed_names = weights.keys() ^ self._averages.keys()
        if changed_names:
            names = ", ".join(sorted(changed_names))
            raise UsageError(
                "an average of the weights",
                problem="these were added to the model or removed from it after fabric.ema(model): "
                f"{names}",
                suggestion="fabric.ema(model) after such a change",
            )
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, weight in weights.items():
            average = self._averages[name].tensor
            pairs.append((local_tensor(average), local_tensor(weight)))
        return pairs

    @torch.no_grad()
    def _write(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Write values into weights, in place.

        Args:
            pairs: a value and a weight each. Of a sharded weight, both are this rank's shards.
        """
        # Without these two calls, the next forward pass could use old values: the full parameters
        # that a sharding strategy has gathered, or the copies that autocast has cast.
        self._contract.reshard()
        torch.clear_autocast_cache()
        for value, weight in pairs:
            weight.copy_(value)


def _check_decay(decay: float) -> None:
    if not 0 <= decay <= 1:
        raise ConfigurationError(
            f"ema with decay={decay!r}", expected="a number in [0, 1], such as 0.999"
        )

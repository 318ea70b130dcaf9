"""What ``setup`` returns, with the attributes that Lightning Fabric's wrappers have."""

from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fabric.data import FabricDataLoader
from fabric.module import FabricModule
from fabric.strategies.base import uncompiled

_FabricDataLoader = FabricDataLoader


class _FabricModule(FabricModule):
    """A set-up module that converts inputs and outputs as Lightning Fabric's precisions do."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        precision = self._fabric_precision
        args, kwargs = precision.convert_input((args, kwargs))
        with precision.tensor_init_context():
            output = super().__call__(*args, **kwargs)
        return precision.convert_output(output)

    forward = __call__

    @property
    def device(self) -> torch.device:
        return next((parameter.device for parameter in self.parameters()), self._fabric_device)

    @property
    def dtype(self) -> torch.dtype:
        return next(
            (parameter.dtype for parameter in self.parameters() if parameter.is_floating_point()),
            torch.get_default_dtype(),
        )

    _forward_module, _original_module = map(
        property, map(attrgetter, ("_fabric_prepared", "_fabric_original"))
    )


class _FabricOptimizer(Optimizer):
    """An optimizer that was set up: the user's own, which has become an object of this class and its own."""


def mark_set_up(optimizer: Any) -> None:
    """Make an optimizer a :class:`_FabricOptimizer`, whose ``optimizer`` it is itself."""
    kind = type(optimizer)
    names = {} if hasattr(optimizer, "optimizer") else {"optimizer": property(lambda self: self)}
    optimizer.__class__ = type(kind.__name__, (_FabricOptimizer, kind), names)


def is_wrapped(obj: object) -> bool:
    """Whether an object was returned by ``setup`` or ``setup_dataloaders``."""
    return isinstance(_unwrap_compiled(obj)[0], FabricModule | FabricDataLoader | _FabricOptimizer)


def _unwrap_compiled(obj: Any) -> tuple[Any, Any]:
    """What ``torch.compile`` was given, and whether it was compiled, as a set of options."""
    inner = uncompiled(obj) if isinstance(obj, nn.Module) else obj
    return inner, None if inner is obj else {}


def _to_compiled(module: nn.Module, compile_kwargs: dict[str, Any]) -> Any:
    return torch.compile(module, **compile_kwargs)


def _unwrap_objects(collection: Any) -> Any:
    """A collection with the user's modules and loaders in place of those that were set up."""
    from lightning_utilities.core.apply_func import apply_to_collection

    def inner(obj: Any) -> Any:
        plain = _unwrap_compiled(obj)[0]
        if isinstance(plain, FabricModule):
            return plain.module
        return obj.loader if isinstance(obj, FabricDataLoader) else obj

    return apply_to_collection(collection, (nn.Module, FabricDataLoader), inner)

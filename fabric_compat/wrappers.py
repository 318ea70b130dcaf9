"""The objects that ``setup`` returns, with the attributes of Lightning Fabric's wrappers."""

from collections.abc import Iterator
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fabric.data import FabricDataLoader
from fabric.module import FabricModule
from fabric.strategies.base import uncompiled


class _FabricDataLoader(FabricDataLoader[Any]):
    """A set-up loader, whose iteration begins when its first batch is asked for.

    ``setup_dataloaders`` changes the class of a set-up loader to this class.
    """

    def __iter__(self) -> Iterator[Any]:
        # A generator, as in Lightning: iter() alone draws no random number and begins no epoch.
        yield from super().__iter__()

    # The user's loader, or a copy with the sampler of Lightning.
    _dataloader = property(attrgetter("original"))


class _FabricModule(FabricModule):
    """A set-up module that converts inputs and outputs as Lightning Fabric's precisions do.

    ``setup`` changes the class of a set-up module to this class.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        precision = self._fabric_precision
        args, kwargs = precision.convert_input((args, kwargs))
        with precision.tensor_init_context():
            output = super().__call__(*args, **kwargs)
        return precision.convert_output(output)

    forward = __call__

    @property
    def device(self) -> torch.device:
        """The device of the parameters. Without parameters, the device of ``setup``."""
        for parameter in self.parameters():
            return parameter.device
        return self._fabric_device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating parameter, or the default dtype of torch."""
        for parameter in self.parameters():
            if parameter.is_floating_point():
                return parameter.dtype
        return torch.get_default_dtype()

    def mark_forward_method(self: Any, method: Any) -> None:
        """Run a method through the prepared module, as a forward pass. See the base class.

        Raises:
            TypeError: ``method`` is neither a method nor a name.
            ValueError: The method is ``forward``.
            AttributeError: The user's module has no such method.
        """
        if not isinstance(method, MethodType | FunctionType | str):
            raise TypeError(f"mark_forward_method({method!r}): it is neither a method nor a name")
        name = method if isinstance(method, str) else method.__name__
        if name == "forward":
            raise ValueError("mark_forward_method('forward'): it is the forward pass already")
        user_module = self._fabric_uncompiled
        if not isinstance(getattr(user_module, name, None), MethodType):
            raise AttributeError(f"{type(user_module).__name__} has no method {name!r}")
        super().mark_forward_method(name)

    @property
    def module(self) -> Any:
        """The user's module. It is not compiled, even if ``setup`` got a compiled module."""
        return self._fabric_uncompiled

    _forward_module = property(attrgetter("_fabric_prepared"))
    _original_module = property(attrgetter("_fabric_uncompiled"))
    _forward_methods = property(attrgetter("_fabric_forward_methods"))


class _FabricOptimizer(Optimizer):
    """The class of the user's optimizer after ``setup``, besides the optimizer's own class."""


def mark_set_up(optimizer: Any) -> None:
    """Make an optimizer a :class:`_FabricOptimizer` whose attribute ``optimizer`` is itself.

    Lightning wraps the optimizer instead, and scripts read ``wrapper.optimizer``.
    """
    optimizer_class = type(optimizer)
    attributes: dict[str, Any] = {}
    if not hasattr(optimizer, "optimizer"):
        attributes["optimizer"] = property(lambda self: self)
    bases = (_FabricOptimizer, optimizer_class)
    optimizer.__class__ = type(optimizer_class.__name__, bases, attributes)


def is_wrapped(obj: object) -> bool:
    """Return whether ``setup`` or ``setup_dataloaders`` returned an object."""
    plain, _ = _unwrap_compiled(obj)
    return isinstance(plain, FabricModule | FabricDataLoader | _FabricOptimizer)


def _unwrap_compiled(obj: Any) -> tuple[Any, Any]:
    """Return the object before ``torch.compile``, and the options of the compilation.

    The options are None if the object is not compiled, and else empty: torch does not record them.
    """
    inner = uncompiled(obj) if isinstance(obj, nn.Module) else obj
    if inner is obj:
        return obj, None
    return inner, {}


def _to_compiled(module: nn.Module, compile_kwargs: dict[str, Any]) -> Any:
    return torch.compile(module, **compile_kwargs)


def _unwrap_objects(collection: Any) -> Any:
    """Return a collection with the user's modules and loaders instead of the prepared ones."""
    from lightning_utilities.core.apply_func import apply_to_collection

    def inner(obj: Any) -> Any:
        plain, _ = _unwrap_compiled(obj)
        if isinstance(plain, FabricModule):
            return plain.module
        if isinstance(obj, FabricDataLoader):
            return obj.original
        return obj

    return apply_to_collection(collection, (nn.Module, FabricDataLoader), inner)

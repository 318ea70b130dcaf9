"""The module that ``setup`` returns: the user's module, reached through strategy and precision."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fabric._torch import (
    registered_buffers,
    registered_modules,
    registered_parameters,
    set_registered_members,
    uncompiled,
)
from fabric.contract import GradientContract
from fabric.diagnostics.bypass import BypassGuard
from fabric.errors import ArgumentTypeError, UsageError
from fabric.hooks import Hooks
from fabric.precision import Precision, cast_inputs, cast_outputs

__all__ = ["FabricModule"]

Forward = Callable[..., Any]
Compiled = Forward  # what torch.compile makes of a module, to type checkers
Module = nn.Module | Compiled

_FORWARD_METHODS = ("training_step", "validation_step", "test_step", "predict_step")
# Methods of nn.Module that may change the dtype of parameters.
_CONVERSIONS = ("to", "type", "double", "float", "half", "bfloat16")


class FabricModule(nn.Module):
    """The user's module, with its forward pass under a strategy and a precision.

    The same type under every strategy. Calling it runs the prepared module: gradients are
    synchronized where the strategy does so, inputs and outputs have the dtypes of the precision.
    Everything else is the user's module: parameters, buffers and submodules under their own names,
    attributes to read and to write, methods, hooks, ``train``, ``eval``, ``to``, items and a
    length. To type checkers it is an object of the user's class. A change of dtype is refused where
    gradients are synchronized in the dtype that the parameters had in ``setup``. It may be part of
    another ``nn.Module``, and be compiled by ``torch.compile`` before or after.

    A copy by ``copy.deepcopy`` works like the original. A pickle holds the user's module and its
    precision, not the strategy. Neither is possible for a sharded module.

    A method that computes a loss is a forward pass too: those named ``training_step``,
    ``validation_step``, ``test_step`` and ``predict_step`` run through the prepared module, others
    once they are marked with :meth:`mark_forward_method`. Under a strategy that synchronizes in
    forward, a backward pass through any other method or a submodule raises a
    :class:`fabric.errors.UsageError`.

    Args:
        module: the user's module.
        prepared: the prepared module, which the strategy returned for it.
        precision: the dtypes of the forward pass.
        device: the device of this process.
        hooks: the functions to call before and after a forward pass.
        contract: how its gradients are synchronized. None for a copy or a loaded pickle.
        guard: watches methods that bypass the forward pass, under a strategy that needs it.
    """

    def __init__(
        self,
        module: nn.Module,
        prepared: nn.Module,
        precision: Precision,
        device: torch.device,
        hooks: Hooks,
        contract: GradientContract | None = None,
        guard: BypassGuard | None = None,
    ) -> None:
        # nn.Module.__init__ is not called: this object has the state of the user's module, and
        # attributes that this object lacks are looked up on the user's module.
        original = uncompiled(module)
        set_registered_members(
            self,
            registered_parameters(original),
            registered_buffers(original),
            registered_modules(original),
        )
        # Past __setattr__, which sets attributes of the user's module.
        vars(self).update(
            _fabric_module=module,
            _fabric_uncompiled=original,
            _fabric_prepared=prepared,
            _fabric_precision=precision,
            _fabric_device=device,
            _fabric_contract=contract,
            _fabric_guard=guard,
            _fabric_forward_methods=set(_FORWARD_METHODS),
            _fabric_hooks=hooks,
        )
        self._bind_forward()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the prepared module."""
        # Diagnostics are no part of a graph, and would break it.
        hooks = self._fabric_hooks
        if not hooks.before or torch.compiler.is_dynamo_compiling():
            return self._fabric_forward(*args, **kwargs)
        try:
            for call in hooks.before:
                call()
            output = self._fabric_forward(*args, **kwargs)
        except BaseException as error:
            self._fabric_contract.explain(error)
            for call in hooks.after:
                call(None, error)
            raise
        for call in hooks.after:
            call(output, None)
        return output

    forward = __call__

    @property
    def module(self) -> Any:
        """The user's own module, as it was passed to ``setup``."""
        return self._fabric_module

    def mark_forward_method(self: Any, method: str | Callable[..., Any]) -> None:
        """Run a method of the user's module through the prepared module, as a forward pass.

        Type checkers take what ``setup`` returns for the user's module. For them write:
        ``FabricModule.mark_forward_method(model, "loss")``.

        Args:
            method: the method or its name.

        Raises:
            ArgumentTypeError: the user's module has no such method, or it is ``forward``.
        """
        original = self._fabric_uncompiled
        name = str(getattr(method, "__name__", method))
        if name == "forward" or not callable(getattr(original, name, None)):
            problem = f"{type(original).__name__} has no method {name!r}, or it is forward itself"
            raise ArgumentTypeError(f"mark_forward_method({method!r})", problem)
        self._fabric_forward_methods.add(name)

    def train(self, mode: bool = True) -> "FabricModule":
        """Set training mode on the user's module and the strategy's wrapper around it."""
        self._fabric_prepared.train(mode)
        return self

    eval = nn.Module.eval  # calls train()

    def __getattr__(self, name: str) -> Any:
        original = self.__dict__["_fabric_uncompiled"]
        value = getattr(original, name)
        if isinstance(value, MethodType) and value.__self__ is original:
            if name in self._fabric_forward_methods:
                return self._through_forward(value)
            if self._fabric_guard is not None:
                return self._fabric_guard.wrap_method(value, name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._fabric_uncompiled, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._fabric_uncompiled, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._fabric_uncompiled)})

    # The methods of a container, which Python looks up on the class. A user's module without one
    # raises its own error.
    def __getitem__(self, index: Any) -> Any:
        return self._fabric_uncompiled[index]

    def __len__(self) -> int:
        return len(self._fabric_uncompiled)

    def __iter__(self) -> Any:
        return iter(self._fabric_uncompiled)

    def __bool__(self) -> bool:
        return bool(self._fabric_uncompiled)

    def __repr__(self) -> str:
        return f"FabricModule({self._fabric_module!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "FabricModule":
        arguments = self._rebuild_arguments(self._fabric_prepared)
        return _rebuild(*copy.deepcopy(arguments, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, self._rebuild_arguments(self._fabric_module)

    def _rebuild_arguments(self, prepared: nn.Module) -> tuple[Any, ...]:
        """Return the arguments of :func:`_rebuild` for a copy with another prepared module."""
        contract = self._fabric_contract
        if contract is not None and contract.is_sharded:
            raise UsageError(
                "a copy or a pickle of the model",
                problem="its parameters are sharded over the ranks, and a copy of this rank's "
                "shards is not a model",
                suggestion="fabric.ema(model) for averaged weights; "
                "fabric.save(path, {'model': model}) for a copy",
            )
        return (
            self._fabric_forward_methods,
            self._fabric_module,
            prepared,
            self._fabric_precision,
            self._fabric_device,
        )

    def _bind_forward(self) -> None:
        """Choose the forward pass by the dtypes of the parameters, again after each change."""
        # Past __setattr__, which sets attributes of the user's module.
        vars(self)["_fabric_forward"] = self._casting_forward()

    def _casting_forward(self) -> Forward:
        """Return the prepared module's forward pass under the precision."""
        forward: Forward = self._fabric_prepared
        contract = self._fabric_contract
        precision = self._fabric_precision
        device_type = self._fabric_device.type
        strategy_casts = contract is not None and contract.casts
        if precision.compute_dtype is None and not strategy_casts:
            dtype = _common_dtype(self._fabric_uncompiled)
            if dtype is not None:
                forward = _true_forward(forward, dtype)
        if precision.has_own_context:
            context = partial(precision.forward_context, device_type)
        elif precision.compute_dtype is not None and not strategy_casts:
            # Not precision.forward_context, which would be one more call in every step.
            context = partial(torch.autocast, device_type, dtype=precision.compute_dtype)
        else:
            return forward
        return _forward_within(forward, context, precision.output_dtype)

    def _through_forward(self, method: MethodType) -> Callable[..., Any]:
        """Return a function that runs a method as the forward pass of the prepared module."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with _forward_replaced(self._fabric_uncompiled, method):
                return self(*args, **kwargs)

        run.__name__ = method.__name__
        return run


def _delegate(name: str) -> Callable[..., Any]:
    """Return a method that calls the method ``name`` of the user's module."""
    converts = name in _CONVERSIONS

    def method(self: FabricModule, *args: Any, **kwargs: Any) -> Any:
        if converts and self._fabric_contract is not None:
            self._fabric_contract.check_conversion(name, args, kwargs)
        result = getattr(self._fabric_uncompiled, name)(*args, **kwargs)
        if converts:
            self._bind_forward()
        if result is self._fabric_uncompiled:
            return self
        return result

    method.__name__ = name
    method.__doc__ = getattr(nn.Module, name).__doc__
    return method


# Python finds nn.Module's own methods on this class before it asks __getattr__, and the methods of
# the user's module are meant.
for _name, _ in inspect.getmembers(nn.Module, inspect.isfunction):
    if not _name.startswith("__") and _name not in FabricModule.__dict__:
        setattr(FabricModule, _name, _delegate(_name))


def _true_forward(forward: Forward, dtype: torch.dtype) -> Forward:
    """Return a forward pass that casts floating inputs to the dtype of the parameters."""

    def run(*args: Any, **kwargs: Any) -> Any:
        # Most models take one tensor, and most often its dtype is right.
        if kwargs or len(args) != 1 or type(args[0]) is not Tensor or args[0].dtype is not dtype:
            args, kwargs = cast_inputs(dtype, args, kwargs)
        return forward(*args, **kwargs)

    return run


def _forward_within(
    forward: Forward,
    context: Callable[[], AbstractContextManager[object]],
    output_dtype: torch.dtype | None,
) -> Forward:
    """Return ``forward`` in a new context at each call, with its 16-bit outputs cast."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            output = forward(*args, **kwargs)
        if output_dtype is None:
            return output
        return cast_outputs(output_dtype, output)

    return run


def _common_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of a module's floating parameters, or None if they differ or are missing."""
    dtypes: set[torch.dtype] = set()
    for parameter in module.parameters():
        if parameter.is_floating_point():
            dtypes.add(parameter.dtype)
    return dtypes.pop() if len(dtypes) == 1 else None


@contextmanager
def _forward_replaced(module: nn.Module, method: MethodType) -> Iterator[None]:
    """Have the next call of ``module`` run ``method``, with the module's own ``forward`` inside."""
    attributes = vars(module)
    has_own_forward = "forward" in attributes  # a user may have assigned one to the object
    own_forward = attributes.get("forward")

    def restore(called: nn.Module) -> None:
        if has_own_forward:
            vars(called)["forward"] = own_forward
        else:
            vars(called).pop("forward", None)

    def run_method_once(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
        restore(called)
        return method.__func__(called, *args, **kwargs)

    # A method, so that a replica of the module can have it as one of its own.
    attributes["forward"] = MethodType(run_method_once, module)
    try:
        yield
    finally:
        restore(module)


def _rebuild(
    forward_methods: set[str],
    module: nn.Module,
    prepared: nn.Module,
    precision: Precision,
    device: torch.device,
) -> FabricModule:
    """Make a copied or loaded module. Pickles name this function."""
    rebuilt = FabricModule(module, prepared, precision, device, Hooks())
    rebuilt._fabric_forward_methods.update(forward_methods)
    return rebuilt

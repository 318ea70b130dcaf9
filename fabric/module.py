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
Compiled = Forward  # to type checkers, the result of torch.compile(module) is a function
Module = nn.Module | Compiled

# The names of Lightning for methods that are forward passes.
_FORWARD_METHODS = ("training_step", "validation_step", "test_step", "predict_step")
# Methods of nn.Module that may change the dtype of parameters.
_CONVERSIONS = ("to", "type", "double", "float", "half", "bfloat16")


class FabricModule(nn.Module):
    """The user's module, with its forward pass under a strategy and a precision.

    The type is the same under every strategy. A call runs the prepared module: gradients are
    synchronized if the strategy does so, and inputs and outputs have the dtypes of the precision.
    Everything else is the user's module: parameters, buffers and submodules under their own names,
    attributes to read and to write, methods, hooks, ``train``, ``eval``, ``to``, items and a
    length. To type checkers a set-up module is an object of the user's class. A change of dtype is
    refused if gradients are synchronized in the dtype that the parameters had in ``setup``. A
    set-up module may be part of another ``nn.Module``. ``torch.compile`` may compile the module
    before or after ``setup``.

    A copy by ``copy.deepcopy`` works like the original. A pickle holds the user's module and its
    precision, not the strategy. A sharded module can be neither copied nor pickled.

    A method that computes a loss is a forward pass too. The methods ``training_step``,
    ``validation_step``, ``test_step`` and ``predict_step`` run through the prepared module, and so
    does a method that is marked with :meth:`mark_forward_method`. Under a strategy that
    synchronizes in forward, a backward pass through any other method or through a submodule raises
    a :class:`fabric.errors.UsageError`.

    Args:
        module: the user's module, which may be compiled.
        prepared: the prepared module, which the strategy returned for the user's module.
        precision: the dtypes of the forward pass.
        device: the device of this process.
        hooks: the functions of diagnostics to call before and after a forward pass.
        contract: how the gradients are synchronized. None for a copy or a loaded pickle.
        guard: the checks of methods that bypass the forward pass. None if the strategy does not
            synchronize in forward.
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
        """Share the state of the user's module, and choose the forward pass.

        A session calls this for ``setup``, and ``_rebuild`` for a copy or a pickle.
        """
        # nn.Module.__init__ is not called. This object shares the parameters, buffers and
        # submodules of the user's module, and __getattr__ finds all other attributes there.
        user_module = uncompiled(module)
        set_registered_members(
            self,
            registered_parameters(user_module),
            registered_buffers(user_module),
            registered_modules(user_module),
        )
        # Written to the attribute dict, since __setattr__ sets attributes of the user's module.
        vars(self).update(
            _fabric_module=module,
            _fabric_uncompiled=user_module,
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
        """Run the forward pass of the prepared module, between the hooks of diagnostics.

        ``_fabric_forward`` is the result of :meth:`_build_forward`.
        """
        hooks = self._fabric_hooks
        if not hooks.before and not hooks.after:
            return self._fabric_forward(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            # The hooks would break the graph of the compiler. So they are left out, unless a
            # diagnostic needs them in this pass, which then runs uncompiled.
            for is_needed_uncompiled in hooks.is_needed_uncompiled:
                if is_needed_uncompiled():
                    return torch.compiler.disable(self.__call__)(*args, **kwargs)
            return self._fabric_forward(*args, **kwargs)
        try:
            for function in hooks.before:
                function()
            output = self._fabric_forward(*args, **kwargs)
        except BaseException as error:
            contract = self._fabric_contract
            if contract is not None:
                contract.explain_error(error)  # may add a note to the error
            # A copy of the list, since a function may remove itself from the list.
            for function in list(hooks.after):
                function(None, error)
            raise
        for function in list(hooks.after):
            function(output, None)
        return output

    forward = __call__

    @property
    def module(self) -> Any:
        """The user's own module, as it was passed to ``setup``."""
        return self._fabric_module

    def mark_forward_method(self: Any, method: str | Callable[..., Any]) -> None:
        """Have later calls of a method run through the prepared module, as a forward pass.

        For type checkers write ``FabricModule.mark_forward_method(model, "loss")``: they take the
        result of ``setup`` for an object of the user's class, which has no such method. ``self`` is
        ``Any`` so that they accept this.

        Args:
            method: the method or its name.

        Raises:
            ArgumentTypeError: the user's module has no method of this name, or the name is
                ``forward``.
        """
        user_module = self._fabric_uncompiled
        # A str has no __name__, so it is taken as the name.
        name = str(getattr(method, "__name__", method))
        if name == "forward" or not callable(getattr(user_module, name, None)):
            raise ArgumentTypeError(
                f"mark_forward_method({method!r})",
                problem=f"{type(user_module).__name__} has no method {name!r}, or the method is "
                "forward itself",
            )
        self._fabric_forward_methods.add(name)

    def train(self, mode: bool = True) -> "FabricModule":
        """Set the training mode of the prepared module, which contains the user's module."""
        self._fabric_prepared.train(mode)
        return self

    eval = nn.Module.eval  # calls train()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the user's module, also between a forward and a backward pass.

        Args:
            set_to_none: set the gradients to None. Otherwise they are set to zero.
        """
        self._fabric_uncompiled.zero_grad(set_to_none)
        if self._fabric_contract is not None:
            # Under FSDP, the user's module may hold gathered parameters now.
            self._fabric_contract.take_back_gradients()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's module. Python calls this if this object lacks it.

        A forward method, such as ``training_step``, is returned as a function that runs the method
        through the prepared module. Any other method runs without the prepared module. If the
        strategy synchronizes gradients only after a forward pass of the prepared module, the module
        has a guard. Then a backward pass through the result of such a method raises an error.
        """
        # Not self._fabric_uncompiled: before the constructor has set that attribute, the access
        # would call this method without end. A KeyError shows the mistake.
        user_module = self.__dict__["_fabric_uncompiled"]
        value = getattr(user_module, name)
        # A method of another object may be an attribute, and is returned unchanged.
        is_own_method = isinstance(value, MethodType) and value.__self__ is user_module
        if not is_own_method:
            return value
        if name in self._fabric_forward_methods:
            return self._through_forward(value)
        if self._fabric_guard is not None:
            # A function that calls the method, and passes its result to the guard.
            return self._fabric_guard.wrap_method(value, name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._fabric_uncompiled, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._fabric_uncompiled, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._fabric_uncompiled)})

    # The methods of a container. Python looks these up on the class, without __getattr__. If the
    # user's module lacks the method, Python's error names the user's class.
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
        # One deepcopy, so that the copied prepared module contains the copied user's module.
        return _rebuild(*copy.deepcopy(arguments, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle leaves the strategy out: the user's module takes the place of the prepared
        # module.
        return _rebuild, self._rebuild_arguments(self._fabric_module)

    def _rebuild_arguments(self, prepared: nn.Module) -> tuple[Any, ...]:
        """Return the positional arguments of :func:`_rebuild` for a copy or a pickle.

        Args:
            prepared: the module whose forward pass the copy runs.

        Raises:
            UsageError: the parameters are sharded.
        """
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
        """Choose the forward pass that a call runs, which depends on the dtypes of the parameters.

        The method is called by ``__init__`` and after each change of the dtypes.
        """
        # Written to the attribute dict, since __setattr__ would set attributes of the user's
        # module.
        vars(self)["_fabric_forward"] = self._build_forward()

    def _build_forward(self) -> Forward:
        """Return the prepared module's forward pass with the casts of the precision around it.

        A strategy may cast inputs and outputs itself. Then only a context that a subclass of
        ``Precision`` defines is added.
        """
        forward: Forward = self._fabric_prepared
        contract = self._fabric_contract
        precision = self._fabric_precision
        device_type = self._fabric_device.type
        # A copy, and a module from a pickle, have no contract.
        strategy_casts = contract is not None and contract.casts
        has_autocast = precision.compute_dtype is not None
        if not has_autocast and not strategy_casts:
            # A precision without autocast, such as "bf16-true": the inputs get the dtype of the
            # parameters, if all parameters have the same dtype.
            dtype = _common_dtype(self._fabric_uncompiled)
            if dtype is not None:
                forward = _with_cast_inputs(forward, dtype)
        if precision.has_own_context:
            make_context = partial(precision.forward_context, device_type)
        elif has_autocast and not strategy_casts:
            # The same context as precision.forward_context(), without one more call in every step.
            make_context = partial(torch.autocast, device_type, dtype=precision.compute_dtype)
        else:
            return forward
        return _within_context(forward, make_context, precision.output_dtype)

    def _through_forward(self, method: MethodType) -> Callable[..., Any]:
        """Return a function that runs a method as the forward pass of the prepared module.

        Args:
            method: a method of the user's module.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            """Call this module. The call reaches the user's module, which then runs ``method``."""
            with _forward_replaced(self._fabric_uncompiled, method):
                return self(*args, **kwargs)

        run.__name__ = method.__name__  # mark_forward_method() reads the name of a method
        return run


def _delegating_method(name: str) -> Callable[..., Any]:
    """Return a method of ``FabricModule`` that calls the method ``name`` of the user's module."""
    may_change_dtype = name in _CONVERSIONS

    def method(self: FabricModule, *args: Any, **kwargs: Any) -> Any:
        """Call the method of the user's module. Return ``self`` if it returns the module."""
        if may_change_dtype and self._fabric_contract is not None:
            # Raises if the call would change the dtype in which gradients are synchronized.
            self._fabric_contract.check_conversion(name, args, kwargs)
        result = getattr(self._fabric_uncompiled, name)(*args, **kwargs)
        if may_change_dtype:
            self._bind_forward()  # the casts of inputs depend on the dtype of the parameters
        # Methods such as to() return the module itself, so that calls can be chained.
        if result is self._fabric_uncompiled:
            return self
        return result

    method.__name__ = name
    method.__doc__ = getattr(nn.Module, name).__doc__
    return method


# FabricModule inherits the methods of nn.Module, so __getattr__ is not called for these. Each
# inherited method is replaced by a method that calls the method of the user's module, whose class
# may override it.
for _name, _ in inspect.getmembers(nn.Module, inspect.isfunction):
    if not _name.startswith("__") and _name not in FabricModule.__dict__:
        setattr(FabricModule, _name, _delegating_method(_name))


def _with_cast_inputs(forward: Forward, dtype: torch.dtype) -> Forward:
    """Return a forward pass that casts the floating-point tensors among its inputs to ``dtype``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        """Cast the inputs, and run the forward pass."""
        # A single tensor of the right dtype is the usual input, and skips the traversal.
        is_single_tensor_of_dtype = (
            not kwargs and len(args) == 1 and type(args[0]) is Tensor and args[0].dtype is dtype
        )
        if not is_single_tensor_of_dtype:
            args, kwargs = cast_inputs(dtype, args, kwargs)
        return forward(*args, **kwargs)

    return run


def _within_context(
    forward: Forward,
    make_context: Callable[[], AbstractContextManager[object]],
    output_dtype: torch.dtype | None,
) -> Forward:
    """Return a forward pass that runs in a new context at each call.

    Args:
        forward: the forward pass to run in the context.
        make_context: returns a context, such as ``torch.autocast``.
        output_dtype: the dtype to which 16-bit outputs are cast. None leaves outputs as they are.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        """Run the forward pass in a new context, and cast the output outside of the context."""
        with make_context():
            output = forward(*args, **kwargs)
        if output_dtype is None:
            return output
        return cast_outputs(output_dtype, output)

    return run


def _common_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype that all floating-point parameters of a module have.

    Return None if their dtypes differ, or if there are no such parameters.
    """
    dtypes: set[torch.dtype] = set()
    for parameter in module.parameters():
        if parameter.is_floating_point():
            dtypes.add(parameter.dtype)
    return dtypes.pop() if len(dtypes) == 1 else None


@contextmanager
def _forward_replaced(module: nn.Module, method: MethodType) -> Iterator[None]:
    """Have the next call of ``module`` run ``method`` instead of its ``forward``.

    The replacement is an attribute of the object, which hides the ``forward`` of the class. The
    replacement ends when ``method`` begins, since ``method`` may itself call the module's
    ``forward``.
    """
    attributes = vars(module)
    # The user may have assigned another forward to the object. restore() assigns it again.
    has_assigned_forward = "forward" in attributes
    assigned_forward = attributes.get("forward")

    def restore(called: nn.Module) -> None:
        """Undo the replacement on ``called``, which is ``module`` or a replica of the module."""
        if has_assigned_forward:
            vars(called)["forward"] = assigned_forward
        else:
            vars(called).pop("forward", None)

    def run_method_once(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
        restore(called)
        return method.__func__(called, *args, **kwargs)

    # A bound method, because the "dp" strategy copies the attributes of a module to its replicas,
    # and binds the methods among the attributes to the replica.
    attributes["forward"] = MethodType(run_method_once, module)
    try:
        yield
    finally:
        # The replacement is still set if the call raised before the module ran, or if only replicas
        # of the module ran.
        restore(module)


def _rebuild(
    forward_methods: set[str],
    module: nn.Module,
    prepared: nn.Module,
    precision: Precision,
    device: torch.device,
) -> FabricModule:
    """Build a copy, or the module in a pickle. The module belongs to no running job.

    Pickles contain the name of this function and its arguments in this order, so neither may
    change.

    Args:
        forward_methods: the names of the methods that are forward passes.
        module: the user's module.
        prepared: the module whose forward pass is run.
        precision: the dtypes of the forward pass.
        device: the device of the process that made the copy or the pickle.
    """
    no_hooks = Hooks()
    rebuilt = FabricModule(module, prepared, precision, device, hooks=no_hooks)
    rebuilt._fabric_forward_methods.update(forward_methods)
    return rebuilt

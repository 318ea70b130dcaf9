"""Precisions: the dtypes of parameters, computation and outputs.

The table ``PRECISIONS`` has a row for each precision.

* A ``*-true`` precision uses one dtype: ``setup`` converts the parameters to this dtype, and
  floating inputs of a forward pass are cast to it.
* ``32-true`` converts no parameters. They keep the dtype in which the model was built or loaded,
  usually float32, and floating inputs are cast to this dtype.
* A ``*-mixed`` precision keeps float32 parameters, and runs the forward pass under
  :class:`torch.autocast`. 16-bit outputs are returned as float32.

Integers and booleans are never cast.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fabric.errors import ArgumentTypeError, ConfigurationError
from fabric.migration import PRECISION_NAMES
from fabric.tree import map_tensors

__all__ = [
    "PRECISIONS",
    "PRECISION_ALIASES",
    "LossScale",
    "Precision",
    "PrecisionName",
    "cast_inputs",
    "cast_outputs",
    "parse_precision",
]

# Editors complete the names. Any other text may come from a file.
PrecisionName = (
    Literal[
        "32-true",
        "64-true",
        "16-true",
        "bf16-true",
        "16-mixed",
        "bf16-mixed",
        "64",
        "32",
        "16",
        "bf16",
        64,
        32,
        16,
    ]
    | str
)

# The names of the methods of nn.Module that convert floating parameters and buffers to a dtype.
_CONVERTERS = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
}
_AUTOCAST_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The scale of the loss, which keeps float16 gradients from underflowing.

    The attributes have the names that torch's ``GradScaler`` gives them.

    Attributes:
        init_scale: the first scale, a power of two, so that scaling does not round. A checkpoint
            restores the scale that it holds. Default: 2.0**16.
        growth_interval: the number of steps in a row without an overflow after which the scale
            doubles. After an overflow, the step is skipped and the scale is halved. Default: 2000.

    Raises:
        ConfigurationError: a value is invalid.
    """

    init_scale: float = 2.0**16
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        """Raise a ConfigurationError if a setting is invalid."""
        mantissa, exponent = math.frexp(self.init_scale)
        # frexp(2.0**n) is (0.5, n + 1).
        is_power_of_two = mantissa == 0.5
        is_in_range = -126 <= exponent - 1 <= 127  # of normal float32 numbers
        if not is_power_of_two or not is_in_range:
            raise ConfigurationError(
                f"LossScale(init_scale={self.init_scale!r})",
                expected="a power of two in the range of float32, such as 2.0**16",
            )
        # isinstance() would accept a bool. torch's kernel counts the steps in 32 bits.
        is_integer = type(self.growth_interval) is int
        if not is_integer or not 1 <= self.growth_interval < 2**31:
            raise ConfigurationError(
                f"LossScale(growth_interval={self.growth_interval!r})",
                expected="a number of steps, at least 1 and below 2**31, such as 2000",
            )


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of parameters, computation and outputs of a job.

    A subclass may override :meth:`convert_module` and :meth:`forward_context`. Every strategy calls
    the overridden methods, whatever the dtypes of the precision are.

    Attributes:
        name: the canonical name, such as ``"bf16-mixed"``.
        param_dtype: the dtype to which ``setup`` converts floating parameters and buffers. None,
            the default, converts none.
        compute_dtype: the dtype of the autocast region of a mixed precision. None, the default,
            does not use autocast.
        reduce_dtype: the dtype in which sharded strategies reduce gradients. None, the default, is
            the dtype of the gradients.
        output_dtype: the dtype to which 16-bit outputs of the forward pass are cast. None, the
            default, does not cast them.
        loss_scale: the scale of the loss. None, the default, does not scale it. To change the
            settings of a precision, use ``replace`` of :mod:`dataclasses`:
            ``replace(PRECISIONS["16-mixed"], loss_scale=LossScale(init_scale=2.0**10))``.

    Raises:
        ConfigurationError: torch cannot compute in one of the dtypes.
    """

    name: str
    param_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    loss_scale: LossScale | None = None

    def __post_init__(self) -> None:
        """Raise a ConfigurationError if a dtype cannot be used."""
        convertible_dtypes = tuple(_CONVERTERS)
        self._check_dtype("param_dtype", convertible_dtypes)
        self._check_dtype("compute_dtype", _AUTOCAST_DTYPES)
        self._check_dtype("reduce_dtype", convertible_dtypes)
        self._check_dtype("output_dtype", convertible_dtypes)

    def _check_dtype(self, field: str, supported_dtypes: tuple[torch.dtype, ...]) -> None:
        """Raise a ConfigurationError unless a field is None or one of the supported dtypes."""
        dtype = getattr(self, field)
        if dtype is None or dtype in supported_dtypes:
            return
        raise ConfigurationError(
            f"Precision(name={self.name!r}, {field}={dtype!r})",
            problem="torch does not train in this dtype",
            expected=f"{', '.join(map(str, supported_dtypes))} or None",
            suggestion=f"{field}=None, in a subclass of Precision that overrides convert_module "
            "and forward_context",
        )

    def convert_module(self, module: nn.Module) -> None:
        """Convert the floating parameters and buffers of a module to ``param_dtype``, in place.

        ``setup`` calls it for every module, before the module moves to its device and before the
        strategy prepares it. Complex tensors are not converted. Does nothing if ``param_dtype`` is
        None.

        Args:
            module: the user's module.
        """
        if self.param_dtype is not None:
            # For example module.half(). module.to(dtype) would drop the imaginary part of complex
            # tensors.
            convert = getattr(module, _CONVERTERS[self.param_dtype])
            convert()

    def forward_context(self, device_type: str) -> AbstractContextManager[object]:
        """Return a new context for one forward pass: autocast to ``compute_dtype`` if it is set.

        The context is entered around every forward pass of a set-up module, in each thread that
        runs a replica of the module under ``"dp"``, and by ``fabric.autocast()``. Under ``"fsdp"``
        the mixed precision of FSDP takes the place of this method, unless a subclass overrides it.

        Args:
            device_type: the type of the device of this process, such as ``"cuda"``.
        """
        if self.compute_dtype is None:
            return nullcontext()
        return torch.autocast(device_type, dtype=self.compute_dtype)

    @property
    def has_own_context(self) -> bool:
        """Whether a subclass overrides :meth:`forward_context`.

        If so, the context is entered even under a strategy that casts by itself, such as FSDP.
        """
        return type(self).forward_context is not Precision.forward_context


# The fields that the mixed precisions share.
_MIXED: Any = {"reduce_dtype": torch.float32, "output_dtype": torch.float32}
_ROWS = (
    Precision(name="32-true"),
    Precision(name="64-true", param_dtype=torch.float64),
    Precision(name="16-true", param_dtype=torch.float16),
    Precision(name="bf16-true", param_dtype=torch.bfloat16),
    Precision(name="16-mixed", compute_dtype=torch.float16, loss_scale=LossScale(), **_MIXED),
    Precision(name="bf16-mixed", compute_dtype=torch.bfloat16, **_MIXED),
)
PRECISIONS = {row.name: row for row in _ROWS}
PRECISION_ALIASES = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}


def parse_precision(precision: Precision | PrecisionName | None) -> Precision:
    """Return the precision of a name, an alias or an entry point. None means ``32-true``.

    A :class:`Precision` is returned unchanged.

    Raises:
        ConfigurationError: there is no precision of that name. The message lists the names.
        ArgumentTypeError: an entry point neither is nor returns a precision.
    """
    if isinstance(precision, Precision):
        return precision
    name = "32-true" if precision is None else str(precision).lower()
    name = PRECISION_ALIASES.get(name, name)
    if name in PRECISIONS:
        return PRECISIONS[name]
    # Entry points are looked up last, since reading the entry points of all packages takes
    # milliseconds.
    plugins = {plugin.name: plugin for plugin in entry_points(group="fabric.precisions")}
    if name not in plugins:
        names = (*PRECISIONS, *PRECISION_ALIASES, *plugins)
        suggestion = ""
        replacement = PRECISION_NAMES.get(name)
        if replacement is not None:
            suggestion = f'precision="{replacement}"'
        raise ConfigurationError(
            f"precision={precision!r}",
            problem="there is no such precision",
            expected=", ".join(map(repr, names)),
            suggestion=suggestion,
        )
    loaded = plugins[name].load()
    # An entry point may be a precision, a class of precisions, or a function.
    if callable(loaded):
        loaded = loaded()
    if not isinstance(loaded, Precision):
        raise ArgumentTypeError(
            f"precision={precision!r}",
            problem=f"its entry point {plugins[name].value!r} is of type {type(loaded).__name__}",
            expected="a fabric.precision.Precision, or a subclass or function that returns a "
            "precision when it is called without arguments",
        )
    return loaded


def cast_inputs(
    dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward pass with all floating tensors cast to ``dtype``.

    Called in every forward pass, so it first handles the usual case at little cost: positional
    tensors that need no cast are returned unchanged.
    """
    # Keyword arguments and containers always take the slower path.
    needs_cast = bool(kwargs)
    for value in args:
        if not isinstance(value, Tensor):
            needs_cast = True
            break
        if value.dtype is not dtype and value.is_floating_point():
            needs_cast = True
            break
    if not needs_cast:
        return args, kwargs
    cast = partial(_cast_floating, dtype)
    return map_tensors(cast, args), map_tensors(cast, kwargs)


def _cast_floating(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return tensor.to(dtype)
    return tensor


def cast_outputs(dtype: torch.dtype, output: Any) -> Any:
    """Return the output of a forward pass with all 16-bit floating tensors cast to ``dtype``.

    Everything else in the output is returned unchanged.
    """
    if not isinstance(output, Tensor):
        # map_tensors() calls this function again for each tensor in the container.
        return map_tensors(partial(cast_outputs, dtype), output)
    if output.dtype not in (torch.float16, torch.bfloat16):
        return output
    # The dtype is passed by keyword: otherwise torch first tries other signatures of to(), which
    # takes a microsecond.
    return output.to(dtype=dtype)

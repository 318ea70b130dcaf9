"""Contexts in which modules and tensors are created: on which device, in which dtype, with or without values."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fabric.errors import ConfigurationError

__all__ = ["check_source", "created_on"]


@contextmanager
def created_on(device: torch.device, dtype: torch.dtype | None = None, empty: bool = False) -> Iterator[None]:
    """Within this context, new tensors are made on ``device`` and new floating ones in ``dtype``.

    Args:
        device: where to; explicit ``device=`` arguments win.
        dtype: default floating dtype; None leaves torch's default.
        empty: ``uniform_``, ``normal_`` and ``kaiming_uniform_`` of ``torch.nn.init``, through which the common layers
            draw their values, do nothing. torch lets no others be skipped; constants are still filled in.
    """
    with ExitStack() as stack:
        if dtype is not None:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        if empty:
            stack.enter_context(_WithoutInit())
        stack.enter_context(device)
        yield


def check_source(source: object) -> None:
    """Raise a ConfigurationError unless this says where the values of a model that is built sharded come from."""
    if source not in ("recorded", "rank0"):
        raise ConfigurationError(
            f"init_module(source={source!r})",
            "there is no such source of values",
            '"recorded", which every rank computes, and "rank0", where the whole model is built on rank 0',
            'fabric.init_module(source="rank0")',
        )


class _WithoutInit(TorchFunctionMode):
    """Makes no-ops of those random functions of torch.nn.init that a mode sees, which the common layers call."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init" and func.__name__ != "constant_":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)

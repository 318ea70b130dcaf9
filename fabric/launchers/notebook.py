"""Whether somebody types this code, and how processes can be started safely when they do."""

import os
import socket
import sys
from typing import Literal

from fabric.errors import ConfigurationError
from fabric.launchers.function import initialised_backend
from fabric.launchers.serialize import has_cloudpickle

__all__ = ["is_interactive", "is_notebook", "notebook_start_method"]


def is_notebook() -> bool:
    """Whether this process is a kernel of Jupyter, or of a service built on it."""
    return hasattr(_ipython_shell(), "kernel")


def is_interactive() -> bool:
    """Whether this process is a notebook, a Python or IPython prompt, or ``python -i``."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or _ipython_shell() is not None


def notebook_start_method(
    *, can_pickle_functions: bool | None = None, backend: str | None = None, platform: str = sys.platform
) -> Literal["forkserver", "fork"]:
    """The start method that is safe where functions are typed in: ``"forkserver"``, or ``"fork"`` where it must be.

    Args:
        can_pickle_functions: whether ``cloudpickle`` is installed; None looks for it.
        backend: name of the device library that is initialised in this process; None looks for one.
        platform: as in ``sys.platform``.

    Raises:
        ConfigurationError: nothing is safe; the text says why for each.
    """
    if can_pickle_functions is None:
        can_pickle_functions = has_cloudpickle()
    backend = backend or initialised_backend("cuda")
    reasons = []
    if not can_pickle_functions:
        reasons.append("forkserver needs cloudpickle to send a function of a notebook, and it is not installed")
    elif not hasattr(socket, "send_fds"):
        reasons.append("forkserver needs a system that hands open files from process to process")
    else:
        return "forkserver"
    if not hasattr(os, "fork"):
        reasons.append("this system cannot fork")
    elif platform == "darwin":
        reasons.append("fork is unsafe on macOS, whose own libraries do not survive it")
    elif backend is not None:
        reasons.append(f"fork cannot be used because {backend} is initialised in this process")
    else:
        return "fork"
    raise ConfigurationError(
        "several processes from a notebook",
        "; ".join(reasons),
        "'forkserver' with cloudpickle installed; 'fork' before anything touches the device",
        'pip install "torch-fabric[notebook]", then restart the kernel',
    )


def _ipython_shell() -> object | None:
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()

"""What this process is: a notebook, a prompt, a rank that imports a script; and what may be started in it."""

import sys
from typing import Literal

from fabric.errors import UsageError

__all__ = ["initialized_backend", "is_interactive", "notebook_start_method", "refuse_while_importing_main"]


def is_interactive() -> bool:
    """Whether this process is a notebook, a Python or IPython prompt, or ``python -i``."""
    ipython = sys.modules.get("IPython")
    ipython_shell = None if ipython is None else ipython.get_ipython()
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or ipython_shell is not None


def notebook_start_method(can_pickle_functions: bool, platform: str = sys.platform) -> Literal["forkserver", "fork"]:
    """The start method for functions that are typed in: ``"fork"`` only where they cannot be sent, and it is safe.

    Args:
        can_pickle_functions: whether ``cloudpickle`` is installed.
        platform: as in ``sys.platform``; the libraries of macOS do not survive a fork.
    """
    is_fork_safe = platform != "darwin" and initialized_backend("cuda") is None
    return "fork" if is_fork_safe and not can_pickle_functions else "forkserver"


def initialized_backend(device_type: str) -> str | None:
    """The name of a device library that is initialized in this process, such as ``"CUDA"``; None when there is none."""
    torch = sys.modules.get("torch")
    for name in dict.fromkeys(("cuda", "xpu", device_type)):
        module = getattr(torch, name, None)
        # The CPU needs no initialization and calls itself initialized.
        if name != "cpu" and module is not None and getattr(module, "is_initialized", bool)():
            return name.upper()
    return None


def refuse_while_importing_main() -> None:
    """Raise when a launch is attempted by a script without a guard, which would launch for ever.

    A rank imports the script to find its functions, under the name ``__mp_main__``, as ``multiprocessing`` does.
    """
    importing = sys.modules.get("__mp_main__")
    # Elsewhere the name leads to the script itself, also where a debugger or `fabric run` has put another in its place.
    if importing is not sys.modules["__main__"] and getattr(importing, "__name__", None) == "__mp_main__":
        raise UsageError(
            "launch() at the top level of a script",
            "another process imports the script to find the function it has to run, and so reaches launch() again",
            suggestion="if __name__ == '__main__': above the lines that create Fabric and launch; or launcher='fork'",
        )

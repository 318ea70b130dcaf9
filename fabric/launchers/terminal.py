"""The terminal of a job: no rank that runs a function has it, or the one rank that is debugged."""

import io
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from fabric.errors import ConfigurationError, UsageError

__all__ = [
    "DEBUG_TIMEOUT",
    "DebuggedRank",
    "check_debug_rank",
    "refuse_breakpoint",
    "refuse_input",
    "take_terminal",
]

DEBUG_TIMEOUT = timedelta(days=365)
"""How long the other ranks wait for a rank that is debugged."""


class DebuggedRank(NamedTuple):
    """The rank of a job that is debugged.

    Attributes:
        rank: the global rank.
        is_here: whether the rank is the process that calls ``launch``, which has its keyboard
            already. Otherwise the rank gets the terminal.
    """

    rank: int
    is_here: bool


# The terminal of a process, under every Unix.
_TERMINAL = "/dev/tty"


class _NoInput(io.StringIO):
    """The standard input of a rank that runs a function. Reading a line from it raises an error.

    ``input()`` and the debugger ``pdb`` read lines. Other reads find an empty input.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def readline(self, size: int | None = -1, /) -> str:
        """Raise a UsageError that says what to write instead of ``input()``."""
        raise _input_error("input()", self._rank)


def _input_error(call: str, rank: int) -> UsageError:
    """Return the error for a call that needs a keyboard.

    Args:
        call: the call, as the user wrote it.
        rank: the global rank of this process.
    """
    return UsageError(
        f"{call} on rank {rank}",
        problem="a process that fabric has started has no keyboard",
        suggestion="launch(..., debug=0), which calls the function for rank 0 in the process that "
        f"has the keyboard, so that {call} and %debug work; or launch(..., debug={rank}) or "
        f"RankPool(..., debug={rank}) in a terminal, which this rank then has; or an argument of "
        "the function for a value that you enter before",
    )


def refuse_input(rank: int) -> None:
    """Make ``input()`` raise an error that says what to write instead.

    Args:
        rank: the global rank of this process.
    """
    sys.stdin = _NoInput(rank)


def refuse_breakpoint(rank: int) -> None:
    """Make ``breakpoint()`` raise an error that says what to write instead.

    Call this function after the environment variables of the rank are set. If the user has chosen a
    debugger by ``PYTHONBREAKPOINT`` or ``sys.breakpointhook``, this function does nothing.

    Args:
        rank: the global rank of this process.
    """
    # With the variable set, no hook of fabric is installed: a debugger stops in the frame that
    # calls it, which would be the hook.
    has_chosen_debugger = bool(os.environ.get("PYTHONBREAKPOINT"))
    if has_chosen_debugger or sys.breakpointhook is not sys.__breakpointhook__:
        return

    def raise_instead(*args: Any, **kwargs: Any) -> Any:
        """Raise a UsageError, unless the user's code has set ``PYTHONBREAKPOINT`` meanwhile."""
        if os.environ.get("PYTHONBREAKPOINT"):
            return sys.__breakpointhook__(*args, **kwargs)
        raise _input_error("breakpoint()", rank)

    sys.breakpointhook = raise_instead


def check_debug_rank(
    request: str, debug: object, world_size: int, *, needs_terminal: bool = True
) -> None:
    """Check that a rank can be debugged, before a process is started.

    Args:
        request: the call, as the user wrote it.
        debug: the rank that should be debugged.
        world_size: the number of ranks.
        needs_terminal: whether the rank gets the terminal. Default: True.

    Raises:
        ConfigurationError: there is no such rank, or this process has no terminal.
    """
    if debug not in range(world_size):
        raise ConfigurationError(
            request,
            problem=f"there is no rank {debug!r}",
            expected=f"the number of the rank to debug: 0 to {world_size - 1}",
        )
    # With one rank no process is started: the function runs in this process, with its input.
    if needs_terminal and world_size > 1 and not _has_terminal():
        raise ConfigurationError(
            request,
            problem="this process has no terminal, in which you could type the commands of the "
            "debugger",
            expected="a program that was started in a terminal, and no notebook or batch job",
            suggestion='launch(train, debug=0), in a script with Fabric(launcher="forkserver"): it '
            "calls train for rank 0 in this process, where breakpoint() and %debug work",
        )


def _has_terminal() -> bool:
    """Return whether this process can open its terminal."""
    try:
        descriptor = os.open(_TERMINAL, os.O_RDWR)
    except OSError:
        return False
    os.close(descriptor)
    return True


# [Note: Debugging a rank]
# `Fabric.launch(train, debug=RANK)` connects the rank to the terminal of the job: the rank reads
# from it and prints to it. The ranks open the terminal by its name, so it does not matter how they
# were started, nor where the output of the job goes. Rank 0 needs no terminal if the process that
# calls `launch` is rank 0, see [Note: Rank 0 in the calling process] in calling_rank.py. The other
# ranks skip `breakpoint()`, and wait for the rank in their next collective, which has no deadline
# then.
def take_terminal(rank: int, debugged: DebuggedRank) -> None:
    """Connect this process to the terminal if its rank is debugged and has no keyboard yet.

    On the other ranks, make ``breakpoint()`` do nothing.

    Args:
        rank: the global rank of this process.
        debugged: the rank that is debugged.
    """
    if rank != debugged.rank:
        sys.breakpointhook = _skip_breakpoint
        return
    if debugged.is_here:
        # This process called launch(), and has its keyboard. breakpoint() may need a debugger.
        _replace_idle_hook()
        return
    terminal = os.open(_TERMINAL, os.O_RDWR)
    # What has been printed so far goes to the previous output.
    sys.stdout.flush()
    sys.stderr.flush()
    # Replaces the descriptors of the standard streams, and not only sys.stdin and sys.stdout: the C
    # functions with which the user edits a line use the descriptors.
    for descriptor in (0, 1, 2):
        os.dup2(terminal, descriptor)
    os.close(terminal)
    # refuse_input() and refuse_breakpoint() have replaced these two in this rank.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (open until the process ends)
    sys.breakpointhook = sys.__breakpointhook__


def _replace_idle_hook() -> None:
    """Have ``breakpoint()`` open Python's debugger if it would do nothing otherwise.

    A notebook installs the hook of ``debugpy``, which does nothing until the debugger of JupyterLab
    or of an editor is connected.
    """
    debugpy = sys.modules.get("debugpy")
    module_of_hook = getattr(sys.breakpointhook, "__module__", None) or ""
    is_hook_of_debugpy = module_of_hook.startswith("debugpy.")
    if debugpy is None or not is_hook_of_debugpy or debugpy.is_client_connected():
        return
    sys.breakpointhook = sys.__breakpointhook__


def _skip_breakpoint(*_: Sequence[Any], **__: Any) -> None:
    """Do nothing, in place of ``breakpoint()``."""

"""The exception classes of fabric.

The tree::

    FabricError
    ├── ConfigurationError (ValueError)      an argument or a combination of arguments that cannot work
    ├── ArgumentTypeError (TypeError)        an argument of a type that is not understood
    ├── UsageError (RuntimeError)            a call in the wrong order or at the wrong time
    ├── MissingDependencyError (ImportError) an optional extra that is not installed
    ├── NonFiniteGradientError (RuntimeError) a gradient norm that is infinite or not a number
    ├── RankFailedError (RuntimeError)       a process of the job raised, exited or was killed
    ├── CollectiveMismatchError (RuntimeError) ranks call different collectives, or one is missing
    └── CheckpointError (RuntimeError)       a checkpoint that is damaged or does not fit
        ├── CheckpointNotFoundError (FileNotFoundError)
        ├── DamagedCheckpointError           it cannot be read as it was written
        └── UnsafeCheckpointError            loading it would run code

Where a failure would be silent, remote or late, the message has four parts: the request, the problem (values, rank),
what is expected, and a suggestion of what to write instead. Elsewhere one or two are enough.
"""

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = [
    "ArgumentTypeError", "CheckpointError", "CheckpointNotFoundError", "CollectiveMismatchError",
    "ConfigurationError", "DamagedCheckpointError", "FabricError", "MissingDependencyError",
    "NonFiniteGradientError", "RankFailedError", "UnsafeCheckpointError", "UsageError",
]  # fmt: skip


class FabricError(Exception):
    """Base of all errors of fabric; catch it to catch any of them.

    Args:
        request: the call or argument, as the user wrote it.
        problem: why it cannot be done, with the values and the rank involved.
        expected: what is valid here.
        suggestion: the line to write instead.
    """

    def __init__(
        self, request: str, problem: str = "", expected: str = "", suggestion: str = ""
    ) -> None:
        # OSError keeps only two of its arguments, and FileNotFoundError is one: the four live in attributes of ours.
        self.request = request
        self.problem = problem
        self.expected = expected
        self.suggestion = suggestion
        Exception.__init__(self, request, problem, expected, suggestion)

    def __str__(self) -> str:
        advice = (
            self.expected and f"Valid: {self.expected}",
            self.suggestion and f"Write: {self.suggestion}",
        )
        return "\n  ".join(filter(None, (self.request, self.problem, *advice)))

    def __reduce__(self) -> tuple[Any, ...]:
        # The third part carries all attributes, and the notes that were added on the way.
        return type(self), (self.request,), self.__dict__


class ConfigurationError(FabricError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class ArgumentTypeError(FabricError, TypeError):
    """An argument of a type that is not understood."""


class UsageError(FabricError, RuntimeError):
    """A call in the wrong order or at the wrong time."""


class MissingDependencyError(FabricError, ImportError):
    """An optional extra is needed and not installed; the text holds the exact ``pip install``."""

    @classmethod
    @contextmanager
    def unless_installed(cls, request: str, suggestion: str) -> Iterator[None]:
        """A context for an import of what is optional, which raises this error where it fails."""
        try:
            yield
        except ImportError as error:
            raise cls(request, str(error), suggestion=suggestion) from error


class NonFiniteGradientError(FabricError, RuntimeError):
    """The norm of the gradients is infinite or not a number; no gradient was changed."""


class RankFailedError(FabricError, RuntimeError):
    """A process of the job raised, exited or was killed; raised in the process that launched it.

    Attributes:
        rank: global rank of the process that failed first.
        exit_code: its exit code; negative is the number of the signal that killed it.
        traceback: the traceback it left, as text; empty when it left none.
    """

    def __init__(
        self,
        request: str,
        rank: int = 0,
        exit_code: int = 1,
        traceback: str = "",
        problem: str = "",
    ) -> None:
        self.rank = rank
        self.exit_code = exit_code
        self.traceback = traceback
        FabricError.__init__(self, request, problem)

    def __str__(self) -> str:
        return "\n".join(filter(None, (FabricError.__str__(self), self.traceback.rstrip())))

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the user's frames, here and in the rank; all of the rank's are in ``traceback``."""
        from IPython import get_ipython  # which has called this

        def cell_name(match: re.Match[str]) -> str:
            return " ".join(get_ipython().compile.format_code_name(match[1]) or [match[0]])

        ours = rf'(?m)^  File "(?:{re.escape(os.path.dirname(__file__))}|[^"]+[/\\]IPython)[/\\].*\n(?:    .*\n)*'
        shown = re.sub(ours, "", "".join(traceback.format_exception(self)))
        return re.sub('File "(.+?)"', cell_name, shown).splitlines()


class CollectiveMismatchError(FabricError, RuntimeError):
    """The ranks of a group do not make the same call; in checked mode also where a rank is missing."""


class CheckpointError(FabricError, RuntimeError):
    """A checkpoint that is damaged or does not fit what it is loaded into."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path that was given."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that cannot be read as it was written; an older one may be whole."""


class UnsafeCheckpointError(CheckpointError):
    """Loading this checkpoint would run code; nothing was loaded."""

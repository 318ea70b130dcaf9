"""The exception classes of fabric.

The tree::

    FabricError
    ├── ConfigurationError (ValueError)      an argument, or arguments together, cannot work
    ├── ArgumentTypeError (TypeError)        an argument of a type that is not understood
    ├── UsageError (RuntimeError)            a call in the wrong order or at the wrong time
    ├── MissingDependencyError (ImportError) an optional extra that is not installed
    ├── NonFiniteGradientError (RuntimeError) a gradient norm that is infinite or not a number
    ├── TooManyBadStepsError (RuntimeError)  steps in a row that a guard has refused
    ├── RankFailedError (RuntimeError)       a process of the job raised, exited or was killed
    ├── CollectiveMismatchError (RuntimeError) ranks call different collectives, or one is missing
    ├── ReplicaDriftError (RuntimeError)     ranks that should hold the same do not
    └── CheckpointError (RuntimeError)       a checkpoint that is damaged or does not fit
        ├── CheckpointNotFoundError (FileNotFoundError)
        ├── MissingEntryError (KeyError)     the checkpoint has no entry of a name
        ├── DamagedCheckpointError           the checkpoint cannot be read as it was written
        ├── UnreadableCheckpointError        the system fails to read an intact checkpoint
        └── UnsafeCheckpointError            loading the checkpoint would run code

Where a failure would be silent, remote or late, the message has four parts: the request, the
problem (with values and rank), the expected values, and a suggestion of what to write instead.
Other messages have one or two parts.
"""

import os
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = [
    "ArgumentTypeError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CollectiveMismatchError",
    "ConfigurationError",
    "DamagedCheckpointError",
    "FabricError",
    "MissingDependencyError",
    "MissingEntryError",
    "NonFiniteGradientError",
    "RankFailedError",
    "ReplicaDriftError",
    "TooManyBadStepsError",
    "UnreadableCheckpointError",
    "UnsafeCheckpointError",
    "UsageError",
]


class FabricError(Exception):
    """Base of all errors of fabric. Catch it to catch any of them.

    Args:
        request: the call or argument, as the user wrote it.
        problem: why it cannot be done, with the values and the rank involved.
        expected: what is valid here.
        suggestion: the line to write instead.
    """

    def __init__(
        self, request: str, problem: str = "", expected: str = "", suggestion: str = ""
    ) -> None:
        """Store the parts of the message. An empty part is not shown."""
        self.request = request
        self.problem = problem
        self.expected = expected
        self.suggestion = suggestion
        # Not super().__init__(): OSError, a base of some subclasses, has other parameters.
        Exception.__init__(self, request, problem, expected, suggestion)

    def __str__(self) -> str:
        """Return the request, and the other parts on indented lines. Empty parts are left out."""
        lines = [self.request]
        if self.problem:
            lines.append(self.problem)
        if self.expected:
            lines.append(f"Valid: {self.expected}")
        if self.suggestion:
            lines.append(f"Write: {self.suggestion}")
        return "\n  ".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling calls the class with its only required argument, and then sets the attributes:
        # the other parts of the message, and notes.
        return type(self), (self.request,), self.__dict__

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows for this error. IPython calls this method.

        Frames of fabric, of IPython, and of torch's calls of modules are left out. If the error
        contains the traceback of a rank, the same frames are left out there.
        """
        from IPython import get_ipython  # installed, since IPython is the caller

        def as_cell_name(file_match: re.Match[str]) -> str:
            """Replace ``File "..."`` by IPython's name of a cell. Other files stay as they are."""
            # A label and a name, such as ("Cell", "In[3]"), or None for a file that is not a cell.
            label_and_name = get_ipython().compile.format_code_name(file_match["path"])
            if label_and_name is None:
                return file_match[0]  # unchanged
            return " ".join(label_and_name)

        # The text contains str(self), and so the traceback of a rank.
        text = "".join(traceback.format_exception(self))
        text = re.sub(_hidden_frames_pattern(), "", text)
        text = re.sub('File "(?P<path>.+?)"', as_cell_name, text)
        return text.splitlines()


def _hidden_frames_pattern() -> str:
    """Return the pattern of the frames that a notebook does not show, in the text of a traceback.

    These are the frames of fabric, of IPython, and of torch's calls of modules.
    """
    slash = r"[/\\]"
    package = re.escape(os.path.dirname(__file__))
    ipython = rf"[^\"]+{slash}IPython"
    torch_nn = rf"[^\"]+{slash}torch{slash}nn"
    hidden_files = (
        rf"{package}{slash}|{ipython}{slash}"
        rf"|{torch_nn}{slash}(?:modules{slash}module\.py|parallel{slash})"
    )
    # A frame is a line with the name of its file, and then more indented lines of code.
    return rf'(?m)^  File "(?:{hidden_files}).*\n(?:    .*\n)*'


class _HiddenFrames:
    """A context that removes the frames of fabric from the traceback of a FabricError.

    The traceback then ends at the user's line, which the message is about. The frames are removed
    from a KeyboardInterrupt, too. This is a class, since ``contextmanager`` would restore the
    frames.
    """

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Remove the frames up to the caller of the function that has entered the context."""
        if isinstance(error, FabricError | KeyboardInterrupt):
            # Python adds the frames of the callers when the error leaves this context.
            error.__traceback__ = None


hide_frames = _HiddenFrames()


class _HiddenFirstFrames:
    """A context that removes the frames of fabric before those of the user's function.

    The context is for calls that run a function of the user in this process. The traceback of an
    error of the function then begins with the function. This is a class, as :class:`_HiddenFrames`.
    """

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Remove the first frames, up to the first one of another package."""
        if error is None:
            return
        folder = os.path.join(os.path.dirname(__file__), "")
        user_traceback = error.__traceback__
        while user_traceback is not None:
            if not user_traceback.tb_frame.f_code.co_filename.startswith(folder):
                break
            user_traceback = user_traceback.tb_next
        # Python adds the frames of the callers when the error leaves this context.
        error.__traceback__ = user_traceback


hide_first_frames = _HiddenFirstFrames()


class ConfigurationError(FabricError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class ArgumentTypeError(FabricError, TypeError):
    """An argument of a type that is not understood."""


class UsageError(FabricError, RuntimeError):
    """A call in the wrong order or at the wrong time."""


class MissingDependencyError(FabricError, ImportError):
    """An optional package is needed and not installed. The text has the command to install it."""

    @classmethod
    @contextmanager
    def unless_installed(cls, request: str, suggestion: str) -> Iterator[None]:
        """Import optional packages in a context, and raise this error if an import fails.

        Args:
            request: the call or argument that needs the packages, as the user wrote it.
            suggestion: the ``pip install`` command that installs the packages.
        """
        try:
            yield
        except ImportError as error:
            raise cls(request, problem=str(error), suggestion=suggestion) from error


class NonFiniteGradientError(FabricError, RuntimeError):
    """The norm of the gradients is infinite or not a number. No gradient was changed."""


class TooManyBadStepsError(FabricError, RuntimeError):
    """A guard has refused too many steps in a row. All ranks raise it.

    Attributes:
        steps: the numbers of the refused steps.
        samples: the indices in the dataset of the samples of these steps, on all ranks. Empty if
            they are not known, as in an iterable dataset.
    """

    def __init__(
        self,
        request: str,
        problem: str = "",
        expected: str = "",
        suggestion: str = "",
        *,
        steps: Sequence[int] = (),
        samples: Sequence[Any] = (),
    ) -> None:
        super().__init__(request, problem, expected, suggestion)
        self.steps = list(steps)
        self.samples = list(samples)


class RankFailedError(FabricError, RuntimeError):
    """A process of the job raised, exited or was killed.

    The error is raised in the process that launched the job.

    Attributes:
        rank: the global rank of the process that failed first.
        exit_code: the exit code of that process. A negative number is the signal that killed it.
        traceback: the traceback of that process as text, or an empty text.
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
        super().__init__(request, problem)

    def __str__(self) -> str:
        """Return the message, and the traceback of the rank below it if the traceback is known."""
        text = super().__str__()
        has_traceback = bool(self.traceback.strip())
        if has_traceback:
            return f"{text}\n{self.traceback.rstrip()}"
        return text


class CollectiveMismatchError(FabricError, RuntimeError):
    """The ranks of a group make different calls, or wait for a rank 0 that has ended.

    In checked mode also: a rank makes no call.
    """


class ReplicaDriftError(FabricError, RuntimeError):
    """Ranks hold different values of what they should hold alike, such as a parameter under DDP."""


class CheckpointError(FabricError, RuntimeError):
    """A checkpoint that is damaged or does not fit what it is loaded into."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path that was given."""


class MissingEntryError(CheckpointError, KeyError):
    """A checkpoint without an entry that the state to load into has."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that cannot be read as it was written. An older one may be undamaged."""


class UnreadableCheckpointError(CheckpointError):
    """The system has failed to read a checkpoint, several times. The checkpoint may be intact."""


class UnsafeCheckpointError(CheckpointError):
    """Loading this checkpoint would run code. Nothing was loaded."""

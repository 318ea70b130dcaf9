"""Functions that diagnostics add around forward and backward passes.

[Note: Hooks] Each diagnostic adds functions that are called before and after every forward pass of
a module and every backward pass, in the order in which they were added. The functions of the flight
recorder come first, so that the recorder notes the end of a phase even if a later function raises.
Around the step of an optimizer, torch's own hooks are used in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Hooks"]


@dataclass(frozen=True, eq=False)
class Hooks:
    """Functions that are called around a part of the program; see ``[Note: Hooks]``.

    Attributes:
        before: called without arguments.
        after: called as ``after(result, error)``, even if the part raised. The result is the output
            of a forward pass, or the loss of a backward pass. It is None after an error.
    """

    before: list[Callable[[], object]] = field(default_factory=list)
    after: list[Callable[[Any, BaseException | None], object]] = field(default_factory=list)

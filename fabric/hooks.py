"""Functions that diagnostics add around forward and backward passes.

A diagnostic adds functions to two lists. The functions are called before and after every forward
pass of a module, or before and after every backward pass, in the order in which they were added.
The functions of the flight recorder come first, so that the recorder notes the end of a phase even
if a later function raises. Around the step of an optimizer, diagnostics use the hooks of torch in
the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Hooks"]


@dataclass(frozen=True, eq=False)
class Hooks:
    """Functions that are called before and after each forward or backward pass.

    ``FabricModule.__call__`` and ``Fabric.backward`` call the functions.

    Attributes:
        before: functions without arguments.
        after: functions ``(result, error)``, which are called even if the pass has raised. The
            result of a forward pass is the output, or None after an error. The result of a backward
            pass is the loss. The error is None if the pass did not raise.
        is_needed_uncompiled: functions that return whether the functions in ``before`` and
            ``after`` must run in the next forward pass. If one returns true, a module that was
            compiled after ``setup`` runs that pass uncompiled, since compiled code leaves the
            functions out. ``torch.compile`` traces these functions.
    """

    before: list[Callable[[], object]] = field(default_factory=list)
    after: list[Callable[[Any, BaseException | None], object]] = field(default_factory=list)
    is_needed_uncompiled: list[Callable[[], bool]] = field(default_factory=list)

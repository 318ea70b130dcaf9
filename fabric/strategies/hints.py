"""What is added to an error of torch so that it can be acted on."""

import re
from collections.abc import Sequence

__all__ = ["name_unused_parameters"]

_INDICES = re.compile(r"Parameter indices which did not receive grad for rank (\d+):((?: \d+)+)")


def name_unused_parameters(exception: BaseException, module: str, names: Sequence[str]) -> None:
    """Add a note with the names of the parameters whose indices DistributedDataParallel gives in its error.

    Args:
        exception: the error; left alone unless it is the one about parameters that were not used in the loss.
        module: the kind of the user's module.
        names: the parameters that DistributedDataParallel synchronises, in its order.
    """
    found = _INDICES.search(str(exception))
    if found is None or getattr(exception, "__notes__", None):
        return
    indices = [int(index) for index in found[2].split()]
    if max(indices) >= len(names):  # the error is about another module
        return
    unused = ", ".join(names[index] for index in indices)
    exception.add_note(
        f"rank {found[1]}: these parameters of {module} took no part in the loss: {unused}\n"
        "  Valid: every parameter that requires a gradient gets one in each backward pass\n"
        '  Write: strategy="ddp_find_unused_parameters_true", or parameter.requires_grad_(False) before setup'
    )

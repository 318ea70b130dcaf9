"""The weights that ranks have trained, on their way to the modules of the launching process."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from fabric._torch import uncompiled
from fabric.errors import ArgumentTypeError
from fabric.tree import flatten

__all__ = ["TrainedResult", "load_weights", "modules_among"]


class TrainedResult(NamedTuple):
    """What a rank sends to the launching process under ``launch(..., return_weights=True)``.

    Attributes:
        result: what the user's function has returned.
        weights: the full state dict of each module among the arguments. The dicts are empty on
            ranks other than rank 0.
    """

    result: Any
    weights: list[dict[str, Any]]


def modules_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[nn.Module]:
    """Return the modules among the arguments of a function, each once.

    The ranks call it to return the trained weights, and the launching process to load them. Both
    get the modules in the same order, although the ranks have copies of the arguments.

    Args:
        args: the positional arguments of the function, which may be collections.
        kwargs: the keyword arguments of the function.

    Raises:
        ArgumentTypeError: there is no module.
    """
    leaves, _ = flatten((list(args), dict(kwargs)))
    modules: list[nn.Module] = []
    for leaf in leaves:
        is_known = any(leaf is module for module in modules)
        if isinstance(leaf, nn.Module) and not is_known:
            modules.append(leaf)
    if not modules:
        raise ArgumentTypeError(
            "launch(..., return_weights=True)",
            problem="no argument of the function is a module, and other modules are not known",
            expected="the modules that get the trained weights, as arguments",
            suggestion="fabric.launch(train, model, return_weights=True) with "
            "def train(fabric, model)",
        )
    return modules


def load_weights(modules: Sequence[nn.Module], weights: Sequence[Mapping[str, Any]]) -> None:
    """Load the weights that :class:`TrainedResult` holds into the modules of this process.

    A module keeps its dtype and its device. A meta tensor, which has no values, is replaced.

    Args:
        modules: the modules, in the order of :func:`modules_among`.
        weights: a state dict for each module.
    """
    for module, state in zip(modules, weights, strict=True):
        # The names in the state are names of the user's module, without those of torch.compile.
        user_module = uncompiled(module)
        tensors = user_module.state_dict(keep_vars=True).values()
        # An extra state is not a tensor, and has no attribute is_meta.
        has_meta_tensor = any(getattr(tensor, "is_meta", False) for tensor in tensors)
        # Copying into a meta tensor would lose the values, so the tensors are assigned.
        user_module.load_state_dict(state, assign=has_meta_tensor)

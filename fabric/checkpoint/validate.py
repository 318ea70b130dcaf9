"""Compares the content of a checkpoint with the objects that it is meant for, before anything is changed."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fabric.checkpoint.state import METADATA_KEY, ModuleState, check_entries, listed
from fabric.errors import CheckpointError

__all__ = ["check_fits"]


def check_fits(loaded: Mapping[str, Any], state: Mapping[str, Any], module_state: ModuleState, strict: bool) -> None:
    """Raise unless ``loaded`` can be restored into ``state``, as far as names and shapes can tell; changes nothing.

    Args:
        loaded: the entries of a checkpoint; meta tensors will do.
        state: names and objects.
        module_state: names and values of a module; shards will do.
        strict: whether names that one side lacks are an error.

    Raises:
        CheckpointError: ``loaded`` does not fit ``state`` (all reasons in one text).
        ArgumentTypeError: ``state`` has an entry that cannot be restored, such as a plain ``DataLoader``.
    """
    check_entries(state)
    entries = [name for name in loaded if name != METADATA_KEY]
    problems: list[str] = []
    for name, value in state.items():
        if name in entries:
            found = _mismatches(value, loaded[name], module_state, strict)
            problems += [f"state[{name!r}]: {problem}" for problem in found]
        elif strict:
            problems.append(f"the file has no {name!r}; its entries are {listed(map(repr, entries))}")
    if problems:
        raise CheckpointError(
            f"load a checkpoint into {listed(f'state[{name!r}]' for name in state)}",
            "\n  ".join(["nothing was changed, since it does not fit:", *problems]),
            "a checkpoint of the same modules and optimizers",
            "strict=False to load what fits by name (shapes and an optimizer's groups have to agree even then)",
        )


def _mismatches(target: Any, content: Any, module_state: ModuleState, strict: bool) -> Iterator[str]:
    """Why ``content`` cannot be loaded into ``target``; nothing for objects that only they themselves understand."""
    if not isinstance(target, nn.Module | Optimizer):
        return
    if not isinstance(content, Mapping):
        yield f"a value of type {type(content).__name__} is where the state of a {type(target).__name__} has to be"
    elif isinstance(target, Optimizer):
        yield from _optimizer_mismatches(target, content)
    else:
        yield from _module_mismatches(module_state(target), content, strict)


def _module_mismatches(expected: Mapping[str, Any], content: Mapping[str, Any], strict: bool) -> Iterator[str]:
    missing = [name for name in expected if name not in content]
    unexpected = [name for name in content if name not in expected]
    for prefix in ("module.", "_orig_mod."):
        if missing and prefix + missing[0] in content:
            yield f"the names in the file begin with {prefix!r}: remove that from each name first"
    if strict and missing:
        yield f"not in the file: {listed(missing)}"
    if strict and unexpected:
        yield f"only in the file: {listed(unexpected)}"
    shapes = [
        f"{name} is {tuple(content[name].shape)} in the file and {tuple(value.shape)} in the module"
        for name, value in expected.items()
        if isinstance(value, Tensor) and isinstance(content.get(name), Tensor) and not is_lazy(value)
        if value.shape != content[name].shape
    ]
    if shapes:
        # All of them: the one that shows what is wrong may be the last.
        yield f"other shapes: {', '.join(shapes)}"


def _optimizer_mismatches(optimizer: Optimizer, content: Mapping[str, Any]) -> Iterator[str]:
    if "state" not in content or "param_groups" not in content:
        yield f"the file has {listed(map(repr, content))} where an optimizer's 'state' and 'param_groups' have to be"
        return
    saved, present = (
        [len(group["params"]) for group in groups] for groups in (content["param_groups"], optimizer.param_groups)
    )
    if saved != present:
        yield (
            f"the groups of the {type(optimizer).__name__} hold {listed(present)} parameters, "
            f"those of the file {listed(saved)}"
        )

"""Compares the content of a checkpoint with the objects that it is meant for, before anything is changed."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fabric.checkpoint.base import listed
from fabric.checkpoint.state import METADATA_KEY, check_entries, is_stateful, read_metadata
from fabric.errors import ArgumentTypeError, CheckpointError

__all__ = ["check_fits", "check_fits_raw", "mismatches"]

ModuleState = Callable[[nn.Module], Mapping[str, Any]]


def check_fits(loaded: Mapping[str, Any], state: Mapping[str, Any], module_state: ModuleState, strict: bool) -> None:
    """Raise unless ``loaded`` can be restored into ``state``, as far as that can be known without changing anything.

    Args:
        loaded: the entries of a checkpoint; meta tensors will do.
        state: names and objects.
        module_state: names and values of a module; shards will do.
        strict: whether names that one side lacks are an error.

    Raises:
        CheckpointError: ``loaded`` does not fit ``state`` (all reasons in one text), or a newer fabric wrote it.
        ArgumentTypeError: ``state`` has an entry that cannot be restored, such as a plain ``DataLoader``.
    """
    read_metadata(loaded)
    check_entries(state)
    entries = [name for name in loaded if name != METADATA_KEY]
    problems: list[str] = []
    for name, value in state.items():
        if name in entries:
            found = mismatches(value, loaded[name], module_state, strict)
            problems += [f"state[{name!r}]: {problem}" for problem in found]
        elif strict:
            problems.append(f"the file has no {name!r}; its entries are {listed(map(repr, entries))}")
    _raise(f"load a checkpoint into {listed(f'state[{name!r}]' for name in state)}", problems)


def check_fits_raw(loaded: Mapping[str, Any], target: Any, module_state: ModuleState, strict: bool) -> None:
    """Raise unless the content of a file is the state dict of one object, as :func:`check_fits` does."""
    request = f"load a state dict into a {type(target).__name__}"
    if not is_stateful(target):
        raise ArgumentTypeError(
            request,
            "it has no state_dict() and load_state_dict()",
            "a module, an optimizer, or an object with these two methods",
            "fabric.load(path, state) for a checkpoint with entries of several kinds",
        )
    problems = list(mismatches(target, loaded, module_state, strict))
    holds_entries = METADATA_KEY in loaded or any(isinstance(value, Mapping) for value in loaded.values())
    if problems and holds_entries and not isinstance(target, Optimizer):
        entries = f"the file is a checkpoint with the entries {listed(map(repr, loaded))}"
        raise CheckpointError(request, entries, "a state dict itself", "fabric.load(path, {'model': model})")
    _raise(request, problems)


def mismatches(target: Any, content: Any, module_state: ModuleState, strict: bool) -> Iterator[str]:
    """Why ``content`` cannot be loaded into ``target``; nothing for objects that only they themselves understand.

    Only names and shapes are looked at. The arguments are those of :func:`check_fits`, for one entry.
    """
    if isinstance(target, nn.Module | Optimizer) and not isinstance(content, Mapping):
        yield f"a value of type {type(content).__name__} is where the state of a {type(target).__name__} has to be"
    elif isinstance(target, nn.Module):
        yield from _module_mismatches(module_state(target), content, strict)
    elif isinstance(target, Optimizer):
        yield from _optimizer_mismatches(target, content)


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
        if _has_shape(value) and _has_shape(content.get(name)) and value.shape != content[name].shape
    ]
    if shapes:
        # All of them: the one that shows what is wrong may be the last.
        yield f"other shapes: {', '.join(shapes)}"


def _has_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_lazy(value)


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


def _raise(request: str, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(
            request,
            "\n  ".join(["nothing was changed, since it does not fit:", *problems]),
            "a checkpoint of the same modules and optimizers",
            "strict=False to load what fits by name (shapes and an optimizer's groups have to agree even then)",
        )

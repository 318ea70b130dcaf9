"""Whether the state in a checkpoint fits the user's objects, and how it gets into them. Knows nothing of ranks."""

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fabric.checkpoint.state import Access, ModuleState, State, check_entries, is_stateful, listed, uncompiled_state
from fabric.errors import CheckpointError
from fabric.tree import flatten, map_tensors, parameters_of

__all__ = ["check_fits", "destinations", "restore"]


def restore(loaded: State, state: MutableMapping[str, Any], access: Access, strict: bool) -> dict[str, Any]:
    """Restore the objects in ``state`` from ``loaded``, in place, and return the entries that ``state`` did not name.

    Plain values in ``state`` are replaced by the loaded ones; what was restored shares no memory with ``loaded``, whose
    tensors may be mapped from a file.

    Args:
        loaded: the content of a checkpoint that fits, see :func:`check_fits`.
        state: names and objects to restore.
        access: how modules and optimizers are restored.
        strict: whether a parameter or a buffer that one side lacks is an error.
    """
    # Modules last: they may not have been copied.
    for name in sorted(filter(loaded.__contains__, state), key=lambda name: isinstance(state[name], nn.Module)):
        target, content = state[name], loaded[name]
        if isinstance(target, nn.Module):
            access.load_module(target, content, strict)
        elif isinstance(target, Optimizer):
            access.load_optimizer(target, content)
            _detach(target, content)
        elif is_stateful(target):
            target.load_state_dict(copy.deepcopy(content))
        else:
            state[name] = copy.deepcopy(content)
    return {name: content for name, content in loaded.items() if name not in state}


def check_fits(loaded: State, state: State, module_state: ModuleState, strict: bool) -> None:
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
    problems: list[str] = []
    for name, value in state.items():
        if name in loaded:
            found = _mismatches(value, loaded[name], module_state, strict)
            problems += [f"state[{name!r}]: {problem}" for problem in found]
        elif strict:
            problems.append(f"the file has no {name!r}; its entries are {listed(map(repr, loaded))}")
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
        return
    if isinstance(target, Optimizer):
        if "state" not in content or "param_groups" not in content:
            entries = listed(map(repr, content))
            yield f"the file has {entries} where an optimizer's 'state' and 'param_groups' have to be"
            return
        groups = content["param_groups"], target.param_groups
        saved, present = ([len(group["params"]) for group in each] for each in groups)
        if saved != present:
            yield f"the groups of {type(target).__name__} hold {listed(present)} tensors, in the file {listed(saved)}"
        return
    content, expected = uncompiled_state(content), module_state(target)
    missing = [name for name in expected if name not in content]
    unexpected = [name for name in content if name not in expected]
    if missing and f"module.{missing[0]}" in content:
        yield "the names in the file begin with 'module.': remove that from each name first"
    if strict and missing:
        yield f"not in the file: {listed(missing)}"
    if strict and unexpected:
        yield f"only in the file: {listed(unexpected)}"
    for name, own in expected.items():
        saved = content.get(name)
        if isinstance(own, Tensor) and isinstance(saved, Tensor) and not is_lazy(own) and own.shape != saved.shape:
            yield f"other shapes: {name} is {tuple(saved.shape)} in the file and {tuple(own.shape)} in the module"


def destinations(content: State, state: State, module_state: ModuleState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where to read the tensors of modules, and those of the other entries: None is for new tensors.

    An entry with tensors that ``state`` does not name is in neither.

    Args:
        content: the entries, with meta tensors; they fit, see :func:`check_fits`.
        state: names and objects.
        module_state: names and values of a module.
    """
    modules, others = {}, {}
    for name, value in content.items():
        target = state.get(name)
        if isinstance(target, nn.Module):
            modules[name] = {key: None if is_lazy(item) else item for key, item in module_state(target).items()}
        elif name in state or not _tensors(value):
            others[name] = _like_parameters(target, value)
    return modules, others


def _like_parameters(value: Any, content: Any) -> Any:
    """New tensors for the state of an optimizer, sharded as its parameters are; None for anything else."""
    if not isinstance(value, Optimizer):
        return None
    parameters = [parameter.detach() for parameter in parameters_of(value)]
    numbers = [number for group in content["param_groups"] for number in group["params"]]
    state: dict[Any, dict[str, Any]] = {}
    for number, parameter in zip(numbers, parameters, strict=True):
        slots = content["state"].get(number, {})
        # What has another shape or none, such as a number of steps, is not sharded.
        alike = [name for name, one in slots.items() if isinstance(one, Tensor) and parameter.shape == one.shape != ()]
        new = {name: torch.empty_like(parameter, dtype=slots[name].dtype) for name in alike}
        state[number] = dict.fromkeys(slots) | new
    return {"state": state}


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def _detach(optimizer: Optimizer, content: Any) -> None:
    """Copy, one at a time, the tensors that the optimizer took over as they were, and no others.

    They may be mapped from the file, which somebody could overwrite in place. Those that it copied may be views of
    memory that it goes on to use.
    """
    loaded = {_address(tensor) for tensor in _tensors(content)} - {0}
    for slots in optimizer.state.values():
        slots.update(map_tensors(lambda each: each.clone() if _address(each) in loaded else each, slots))


def _address(tensor: Tensor) -> int:
    """Where the memory of a tensor is; 0 for one without any, or with memory of another kind."""
    is_dense = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if is_dense else 0

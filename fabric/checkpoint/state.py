"""Turning the user's objects into plain state, and back. Knows nothing of files, processes or strategies."""

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fabric.checkpoint.failures import listed, newer
from fabric.checkpoint.fit import find_problems
from fabric.checkpoint.plain import check_plain
from fabric.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from fabric.tree import map_tensors

__all__ = [
    "FORMAT_VERSION",
    "METADATA_KEY",
    "Access",
    "apply",
    "apply_raw",
    "check",
    "collect",
    "read_metadata",
    "restore",
    "with_metadata",
]

METADATA_KEY = "__fabric__"
FORMAT_VERSION = 1

Filter = Mapping[str, Callable[[str, Any], bool]]


@dataclass(frozen=True)
class Access:
    """The way to the states of modules and optimizers.

    Attributes:
        module_state: names and values of a module as they stand in a checkpoint.
        load_module: ``load_module(module, content, strict)`` puts such a state into a module.
        optimizer_state: the state of an optimizer for whole parameters, as its own ``state_dict()`` has it.
        load_optimizer: ``load_optimizer(optimizer, content)`` puts such a state into an optimizer.
    """

    module_state: Callable[[nn.Module], Mapping[str, Any]]
    load_module: Callable[[nn.Module, dict[str, Any], bool], None]
    optimizer_state: Callable[[Optimizer], Mapping[str, Any]] = methodcaller("state_dict")
    load_optimizer: Callable[[Optimizer, dict[str, Any]], None] = lambda optimizer, content: optimizer.load_state_dict(
        content
    )


def collect(
    state: Mapping[str, Any],
    access: Access,
    *,
    filter: Filter | None = None,
    trainable_only: bool = False,
    checks_content: bool = True,
) -> dict[str, Any]:
    """Turn ``state`` into plain data, entry by entry. No tensor is copied.

    Modules and optimizers are read through ``access``; another object with ``state_dict()`` and ``load_state_dict()``
    (a scheduler, a loader) becomes its ``state_dict()``; plain data stays as it is. Every entry that can be refused
    without these is looked at first, since they may be collectives.

    Args:
        state: names and objects; not changed.
        access: the way to modules and optimizers.
        filter: for some entries, ``keep(name, value)``: whether an item of that entry's dict is saved.
        trainable_only: leave out the parameters of modules that do not require a gradient.
        checks_content: whether what became of an object has to be plain.

    Raises:
        ArgumentTypeError: an entry could not be loaded again without running code; the text names its place in
            ``state`` and what to write instead. Or a plain ``DataLoader``, which has no position to save.
        ConfigurationError: ``filter`` names an entry that ``state`` lacks or that is no dict, or ``state`` has an entry
            ``"__fabric__"``.
    """
    keep = filter or {}
    _check_entries(state, "save")
    _check_filter(state, keep)
    collected: dict[str, Any] = {}
    for name, value in state.items():
        content = _content(value, access)
        if trainable_only and isinstance(value, nn.Module):
            frozen = {key for key, item in value.named_parameters(remove_duplicate=False) if not item.requires_grad}
            content = _filtered(name, content, lambda key, _, frozen=frozen: key not in frozen)
        if name in keep:
            content = _filtered(name, content, keep[name])
        if checks_content and content is not value:
            check_plain(f"state[{name!r}]", content)
        collected[name] = content
    return collected


def apply(
    loaded: Mapping[str, Any], state: MutableMapping[str, Any] | None, access: Access, strict: bool = True
) -> dict[str, Any]:
    """Restore the objects in ``state`` from ``loaded``, in place, and return the entries that ``state`` did not name.

    Everything that can be checked is checked before anything is changed. Plain values in ``state`` are replaced by
    the loaded ones; what was restored shares no memory with ``loaded``.

    Args:
        loaded: what :func:`collect` gave, after a save and a load. Its metadata is checked and not returned.
        state: names and objects to restore, or ``None`` to get everything back as it was loaded.
        access: the way to modules and optimizers. The state of a module is used for the check only: it has to be
            complete on every rank, and a sharded module's own ``state_dict()`` will do.
        strict: whether an entry, a parameter or a buffer that one side lacks is an error; else what fits by name is
            loaded. Shapes, and the groups of an optimizer, have to agree either way.

    Raises:
        CheckpointError: ``loaded`` does not fit ``state`` (all reasons in one text), or a newer fabric wrote it.
        ArgumentTypeError: ``state`` has an entry that cannot be restored, such as a plain ``DataLoader``.
    """
    if state is not None:
        check(loaded, state, access, strict)
    return restore(loaded, state, access, strict, is_mapped=True)


def check(loaded: Mapping[str, Any], state: Mapping[str, Any], access: Access, strict: bool = True) -> None:
    """Raise unless ``loaded`` can be restored into ``state``, as far as that can be told without changing anything.

    Arguments and errors are those of :func:`apply`; of ``loaded``, meta tensors will do.
    """
    read_metadata(loaded)
    _check_entries(state, "load")
    asked = f"load a checkpoint into {listed(f'state[{name!r}]' for name in state)}"
    entries = _entries(loaded)
    missing = [name for name in state if name not in entries]
    if missing and strict:
        raise CheckpointError(
            asked,
            f"the file has no {listed(map(repr, missing))}",
            f"entries of the file: {listed(map(repr, entries))}",
            "a state with these names, or strict=False to leave the others as they are",
        )
    _raise_problems(
        asked,
        (
            f"state[{name!r}]: {problem}"
            for name, value in state.items()
            if name in entries
            for problem in find_problems(value, entries[name], access.module_state, strict)
        ),
    )


def restore(
    loaded: Mapping[str, Any], state: MutableMapping[str, Any] | None, access: Access, strict: bool, is_mapped: bool
) -> dict[str, Any]:
    """What :func:`apply` does after its checks.

    ``is_mapped`` tells whether tensors of ``loaded`` may be mapped from a file, and have to be copied to be kept.
    """
    entries = _entries(loaded)
    if state is None:
        return entries
    wanted = {name: value for name, value in state.items() if name in entries}
    for name in sorted(wanted, key=lambda name: _turn(wanted[name])):
        if _is_object(wanted[name]):
            _restore(wanted[name], entries[name], access, strict, is_mapped)
        else:
            state[name] = copy.deepcopy(entries[name])
    return {name: content for name, content in entries.items() if name not in state}


def apply_raw(loaded: Mapping[str, Any], target: Any, access: Access, strict: bool = True) -> None:
    """Restore one object from a file that is its bare state dict, as ``torch.save(model.state_dict(), path)`` wrote it.

    Args:
        loaded: the content of the file.
        target: a module, an optimizer, or any object with ``state_dict()`` and ``load_state_dict()``.
        access: as for :func:`apply`.
        strict: as for :func:`apply`.

    Raises:
        CheckpointError: the file does not fit, or is a checkpoint with entries; nothing has been changed.
        ArgumentTypeError: ``target`` is nothing that has a state.
    """
    asked = f"load a state dict into a {type(target).__name__}"
    _refuse_loader("loader", target)
    if not _is_object(target):
        raise ArgumentTypeError(
            asked,
            "it has no state_dict() and load_state_dict()",
            "a module, an optimizer, or an object with these two methods",
            "fabric.load(path, state) for a checkpoint with entries of several kinds",
        )
    problems = list(find_problems(target, loaded, access.module_state, strict))
    holds_entries = METADATA_KEY in loaded or any(isinstance(value, Mapping) for value in loaded.values())
    if problems and holds_entries and not isinstance(target, Optimizer):
        raise CheckpointError(
            asked,
            f"the file is a checkpoint with the entries {listed(map(repr, loaded))}; {problems[0]}",
            "a file that is the state dict itself",
            "fabric.load(path, {'model': model}), with the entry that you want",
        )
    _raise_problems(asked, problems)
    _restore(target, loaded, access, strict, is_mapped=True)


def with_metadata(entries: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Add what fabric itself wants to know about a checkpoint to its entries.

    Args:
        entries: what :func:`collect` gave.
        metadata: plain data, such as ``world_size`` and the states of random generators. The version of the format and
            that of torch are added.

    Raises:
        ArgumentTypeError: ``metadata`` is not plain.
    """
    stamp = {"format_version": FORMAT_VERSION, "torch_version": str(torch.__version__), **metadata}
    check_plain(METADATA_KEY, stamp)
    return {**entries, METADATA_KEY: stamp}


def read_metadata(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`with_metadata` added; empty for a file that was not written by fabric.

    Raises:
        CheckpointError: a newer fabric wrote the file, in a format that this one does not know.
    """
    metadata = loaded.get(METADATA_KEY, {})
    version = metadata.get("format_version", 0) if isinstance(metadata, Mapping) else None
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise newer("load a checkpoint", version, FORMAT_VERSION)
    return dict(metadata)


def _entries(loaded: Mapping[str, Any]) -> dict[str, Any]:
    return {name: content for name, content in loaded.items() if name != METADATA_KEY}


def _is_object(value: Any) -> bool:
    """Whether a value is restored in place; any other is replaced."""
    methods = (getattr(value, "state_dict", None), getattr(value, "load_state_dict", None))
    return not isinstance(value, type) and all(callable(method) for method in methods)


def _content(value: Any, access: Access) -> Any:
    if isinstance(value, nn.Module):
        return access.module_state(value)
    if isinstance(value, Optimizer):
        return access.optimizer_state(value)
    return value.state_dict() if _is_object(value) else value


def _turn(value: Any) -> int:
    """When an entry is restored: what could not be checked comes first, so that its failure leaves the rest alone."""
    if isinstance(value, nn.Module):
        return 1
    return 2 if isinstance(value, Optimizer) or not _is_object(value) else 0


def _restore(target: Any, content: Any, access: Access, strict: bool, is_mapped: bool) -> None:
    if isinstance(target, nn.Module):
        access.load_module(target, content, strict)
    elif isinstance(target, Optimizer):
        access.load_optimizer(target, content)
        if is_mapped:
            _detach_from_file(target, content)
    else:
        target.load_state_dict(copy.deepcopy(content))


def _detach_from_file(optimizer: Optimizer, content: Any) -> None:
    """Copy, one at a time, the tensors that the optimizer took over as they were, and no others.

    They may be mapped from the file, which somebody could overwrite in place. Those that it copied may be views of
    memory that it goes on to use.
    """
    borrowed: set[int] = set()
    map_tensors(lambda tensor: borrowed.update(_addresses(tensor)), content)

    def own(tensor: Tensor) -> Tensor:
        return tensor if borrowed.isdisjoint(_addresses(tensor)) else tensor.clone()

    for slots in optimizer.state.values():
        for name in slots:
            slots[name] = map_tensors(own, slots[name])


def _addresses(tensor: Tensor) -> tuple[int, ...]:
    has_storage = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return (tensor.untyped_storage().data_ptr(),) if has_storage and tensor.numel() else ()


def _check_entries(state: Mapping[str, Any], verb: str) -> None:
    asked = f"{verb} a checkpoint"
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(
            asked, f"state is a {type(state).__name__}", "a dict of names and objects", '{"model": model, "step": step}'
        )
    wrong = [name for name in state if not isinstance(name, str)]
    if wrong:
        raise ArgumentTypeError(
            asked,
            f"the name {wrong[0]!r} is a {type(wrong[0]).__name__}",
            "strings as names",
            f"state[{str(wrong[0])!r}]",
        )
    if METADATA_KEY in state:
        raise ConfigurationError(
            asked,
            f"state has an entry {METADATA_KEY!r}, where fabric keeps its own metadata",
            "any other name",
            f"state[{METADATA_KEY.strip('_')!r}]",
        )
    for name, value in state.items():
        _refuse_loader(name, value)
        if not _is_object(value):
            check_plain(f"state[{name!r}]", value)


def _check_filter(state: Mapping[str, Any], keep: Mapping[str, Any]) -> None:
    for name, function in keep.items():
        asked = f"save a checkpoint with filter={{{name!r}: ...}}"
        if name not in state:
            raise ConfigurationError(
                asked, "state has no such entry", f"entries of state: {listed(map(repr, state))}", "one of these names"
            )
        if not callable(function):
            raise ArgumentTypeError(
                asked,
                f"{function!r} cannot be called",
                "a function of (name, value) that says whether the item is saved",
                f"filter={{{name!r}: lambda name, value: not name.startswith('head.')}}",
            )
        if not _is_object(state[name]):
            _refuse_without_items(name, state[name])


def _filtered(name: str, content: Any, keep: Callable[[str, Any], bool]) -> Any:
    _refuse_without_items(name, content)
    # A shallow copy keeps the type, and the versions of its layers that torch attaches to a module's state.
    kept = copy.copy(content)
    for key, value in content.items():
        if not keep(key, value):
            del kept[key]
    return kept


def _refuse_without_items(name: str, content: Any) -> None:
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"save a checkpoint with filter={{{name!r}: ...}}",
            f"what is saved of state[{name!r}] is a {type(content).__name__}, which has no items to choose from",
            "filters for dicts, modules, and other objects whose state_dict() is a dict",
            f"save without a filter for {name!r}",
        )


def _refuse_loader(name: str, value: Any) -> None:
    if isinstance(value, DataLoader) and not _is_object(value):
        raise ArgumentTypeError(
            f"state[{name!r}], a DataLoader, in a checkpoint",
            "it does not know its position, so a resumed run would replay or skip samples",
            "a loader that fabric has set up, or any loader with state_dict() and load_state_dict()",
            f"{name} = fabric.setup_dataloaders({name}), and put the result into the state",
        )


def _raise_problems(asked: str, problems: Iterable[str]) -> None:
    if problems := list(problems):
        raise CheckpointError(
            asked,
            "\n  ".join(["nothing was changed, since it does not fit:", *problems]),
            "a checkpoint of the same modules and optimizers",
            "strict=False to load what fits by name (shapes and an optimizer's groups have to agree even then)",
        )

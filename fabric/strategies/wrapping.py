"""Which parts of a model are gathered and sharded together.

[Note: Units] A *unit* is a submodule whose parameters are gathered right before its forward pass, and freed after it.
What lies outside of every unit belongs to the root, which is gathered for the whole forward pass. Units that are the
repeated blocks of a model make sharding pay: one block is whole at a time. A parameter that several modules share has
to belong to one unit, or to the root.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from fabric.errors import ArgumentTypeError, ConfigurationError

__all__ = ["WrapPolicy", "check_wrap_policy", "find_units", "module_classes"]

WrapPolicy = Collection[type[nn.Module]] | int | Callable[..., object] | None

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)


def module_classes(value: Any) -> tuple[type[nn.Module], ...]:
    """A class of modules, or several, as a tuple; empty for anything else."""
    given: Any = tuple(value) if isinstance(value, Collection) and not isinstance(value, str) else (value,)
    return given if all(isinstance(one, type) and issubclass(one, nn.Module) for one in given) else ()


def check_wrap_policy(policy: Any) -> Any:
    """The :data:`WrapPolicy` as it is, with a single class as a set of it.

    Args:
        policy: None, a class of modules, a collection of classes, a number of parameters, or a function.

    Raises:
        ArgumentTypeError: it is something else.
    """
    if classes := module_classes(policy):
        return frozenset(classes)
    is_size = isinstance(policy, int) and not isinstance(policy, bool) and policy > 0
    if policy is None or is_size or (callable(policy) and not isinstance(policy, type)):
        return policy
    raise ArgumentTypeError(
        f"FSDPStrategy(auto_wrap_policy={policy!r})",
        "it says nothing about modules",
        "a set of classes, a number of parameters from 1, a function of a module, or None for the repeated blocks",
        "FSDPStrategy(auto_wrap_policy={Block})",
    )


def find_units(root: nn.Module, policy: WrapPolicy = None) -> list[nn.Module]:
    """The units of a model, inner before outer, without the root; see ``[Note: Units]``.

    Args:
        root: the model.
        policy: classes, whose instances are units; a number of parameters, from which on what no inner unit holds is
            one; a function ``(module) -> bool``, or of the kind that torch's first FSDP took,
            ``(module, recurse, nonwrapped_numel) -> bool``; None for the repeated blocks: modules of a class that
            occurs more than once in lists and sequences, else of a class with parts that occurs more than once at all.

    Raises:
        ConfigurationError: no module is of the classes given, or a parameter would belong to two units.
    """
    if policy is None:
        return _without_tied(root, _repeated_blocks(root))
    if isinstance(policy, Collection):
        classes = tuple(policy)
        units = [module for module in _bottom_up(root) if isinstance(module, classes) and _can_be_unit(module)]
        if not units and not isinstance(root, classes):
            present = sorted({type(module).__name__ for module in root.modules() if _can_be_unit(module)})
            names = sorted(one.__name__ for one in classes)
            raise ConfigurationError(
                f"auto_wrap_policy={{{', '.join(names)}}} for a {type(root).__name__}",
                "no part of it is of these classes",
                f"classes that it is made of: {', '.join(present)}",
                "FSDPStrategy() to have the repeated blocks found",
            )
    elif isinstance(policy, int):
        units = _by_size(root, policy)
    else:
        units = _by_function(root, policy)
    units = [unit for unit in units if unit is not root]
    if tied := _tied(root, units):
        _refuse_tied(root, tied)
    return units


def _repeated_blocks(root: nn.Module) -> list[nn.Module]:
    in_containers = {
        child
        for parent in root.modules()
        if isinstance(parent, _CONTAINERS)
        for child in parent.children()
        # A layer without parts in a sequence is too small for a collective of its own.
        if _can_be_unit(child) and (_has_parts(child) or not isinstance(parent, nn.Sequential))
    }
    with_parts = {module for module in root.modules() if _has_parts(module) and _can_be_unit(module)}
    for candidates in (in_containers, with_parts - {root}):
        counts = Counter(map(type, candidates))
        repeated = {module for module in candidates if counts[type(module)] > 1}
        if repeated:
            return _outermost(root, repeated)
    return []


def _outermost(root: nn.Module, chosen: Collection[nn.Module]) -> list[nn.Module]:
    """Those of ``chosen`` that are inside no other of them."""
    inner = {part for module in chosen for part in module.modules() if part is not module}
    return [module for module in root.modules() if module in chosen and module not in inner]


def _by_size(root: nn.Module, size: int) -> list[nn.Module]:
    def wants(module: nn.Module, remaining: int) -> bool:
        return remaining >= size and _can_be_unit(module)

    # An attention layer reads the weight of its projection without calling it.
    return _by_remainder(root, wants, descends=lambda module: not isinstance(module, nn.MultiheadAttention))


def _by_function(root: nn.Module, policy: Callable[..., object]) -> list[nn.Module]:
    if "recurse" not in inspect.signature(policy).parameters:
        return [module for module in _bottom_up(root) if _can_be_unit(module) and policy(module)]
    return _by_remainder(
        root,
        lambda module, remaining: (
            _can_be_unit(module) and policy(module=module, recurse=False, nonwrapped_numel=remaining)
        ),
        descends=lambda module: policy(module=module, recurse=True, nonwrapped_numel=_numel(module)),
    )


def _by_remainder(
    root: nn.Module, wants: Callable[[nn.Module, int], object], descends: Callable[[nn.Module], object]
) -> list[nn.Module]:
    """Units chosen by how many of their parameters no inner unit holds."""
    units: list[nn.Module] = []

    def taken(module: nn.Module) -> int:
        inner = sum(map(taken, module.children())) if descends(module) else 0
        if module is not root and module not in units and wants(module, _numel(module) - inner):
            units.append(module)
            return _numel(module)
        return inner

    taken(root)
    return units


def _without_tied(root: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Leave to the root what shares a parameter with another part of the model."""
    while tied := _tied(root, units):
        owners = {owner for found in tied.values() for owner in found}
        units = [unit for unit in units if unit not in owners]
    return units


def _tied(root: nn.Module, units: Collection[nn.Module]) -> dict[nn.Parameter, set[nn.Module]]:
    """The parameters that more than one unit, or a unit and the root, would hold; with these."""
    chosen, owners = set(units), {}

    def descend(module: nn.Module, owner: nn.Module) -> None:
        owner = module if module in chosen else owner
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(owner)
        for child in module.children():
            descend(child, owner)

    descend(root, root)
    return {parameter: found for parameter, found in owners.items() if len(found) > 1}


def _bottom_up(root: nn.Module) -> list[nn.Module]:
    return list(root.modules())[::-1]


def _can_be_unit(module: nn.Module) -> bool:
    has_forward = not isinstance(module, _WITHOUT_FORWARD) or type(module).forward is not nn.Module.forward
    return has_forward and any(True for _ in module.parameters())


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _refuse_tied(root: nn.Module, tied: Collection[nn.Parameter]) -> None:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    pairs = "; ".join(" and ".join(names[parameter]) for parameter in tied)
    raise ConfigurationError(
        f"auto_wrap_policy for a {type(root).__name__}",
        f"it puts names of one parameter into several units, and sharding would part them: {pairs}",
        "a policy under which all modules that share a parameter are in the same unit, or in none",
        "FSDPStrategy(), which leaves such modules to the root",
    )

"""The modules of a model that are sharded one by one.

An *FSDP module* is a module to which ``fully_shard`` is applied. Its parameters are gathered right
before its forward pass, and freed after the forward pass. All other parameters belong to the root,
which is gathered for the whole forward pass. Sharding saves most memory if the FSDP modules are the
repeated blocks of a model: one block is unsharded at a time. A parameter that several modules share
must belong to one FSDP module, or to the root.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from torch import nn

from fabric.errors import ArgumentTypeError, ConfigurationError

__all__ = [
    "ModuleChoice",
    "choose_modules",
    "find_fsdp_modules",
    "owners_by_name",
    "parse_choice",
    "parse_wrap_policy",
]

# Classes of modules, or a function of a module that is true if the module is chosen.
ModuleChoice = tuple[type[nn.Module], ...] | Callable[..., object]

# Containers without a forward pass, unless a subclass defines one.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def parse_choice(option: str, choice: Any) -> ModuleChoice | None:
    """Return the user's choice of modules. Classes are returned as a tuple.

    Args:
        option: the name of the option, for the error.
        choice: a class, several classes, or a function of a module. None is returned as None.

    Raises:
        ArgumentTypeError: the choice is anything else.
    """
    if choice is None:
        return None
    classes = tuple(choice) if isinstance(choice, Collection) else (choice,)
    if classes and all(_is_module_class(value) for value in classes):
        return classes
    # A class is callable, too. A class that is no module class is refused below.
    if callable(choice) and not isinstance(choice, type):
        return choice
    raise ArgumentTypeError(
        f"FSDPStrategy({option}={choice!r})", expected="a class, several, or a function"
    )


def parse_wrap_policy(policy: Any) -> ModuleChoice | None:
    """Return the choice of modules that the option ``auto_wrap_policy`` stands for.

    A positive int becomes torch's ``size_based_auto_wrap_policy``, in which an FSDP module has at
    least that many parameters. Other values are parsed by :func:`parse_choice`.
    """
    # type() and not isinstance(): True is an int, but not a number of parameters.
    is_number_of_parameters = type(policy) is int and policy >= 1
    if not is_number_of_parameters:
        return parse_choice("auto_wrap_policy", policy)
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy  # takes a second to import

    return partial(size_based_auto_wrap_policy, min_num_params=policy)


def choose_modules(
    root: nn.Module, candidates: Iterable[nn.Module], option: str, choice: ModuleChoice | None
) -> list[nn.Module]:
    """Return the candidates that a choice selects, inner before outer.

    Args:
        root: the model, for the error.
        candidates: the modules to choose from, outer before inner.
        option: the name of the option, for the error.
        choice: the option's value. None selects no module.

    Raises:
        ConfigurationError: a choice other than None selects no module.
    """
    if choice is None:
        return []
    chosen: list[nn.Module] = []
    for module in candidates:
        if isinstance(choice, tuple):
            is_chosen = isinstance(module, choice)
        else:
            is_chosen = choice(module)
        if is_chosen:
            chosen.append(module)
    if not chosen:
        class_names = sorted({type(module).__name__ for module in root.modules()})
        raise ConfigurationError(
            f"FSDPStrategy({option}={choice!r})",
            problem=f"it chooses no module of {type(root).__name__}",
            expected=f"classes of modules in it: {', '.join(class_names)}",
        )
    chosen.reverse()  # inner before outer
    return chosen


def find_fsdp_modules(root: nn.Module, policy: ModuleChoice | None = None) -> list[nn.Module]:
    """Return the FSDP modules of a model, inner before outer, without the root.

    Args:
        root: the model.
        policy: the value of :func:`parse_wrap_policy`.

            - A tuple of classes: the instances of these classes are FSDP modules.
            - A function of a module: the modules for which the function is true are FSDP modules.
            - A function with a parameter ``recurse``, as in torch's first FSDP. It is called as
              ``policy(module=..., recurse=..., nonwrapped_numel=...)``.
            - None: the repeated blocks, such as the layers of a transformer.

    Raises:
        ConfigurationError: the policy chooses no module, or a parameter would belong to several
            FSDP modules.
    """
    if policy is None:
        # Repeated blocks that share a parameter are left to the root. If a policy of the user
        # chooses such modules, that is an error.
        return _without_shared_parameters(root, _repeated_blocks(root))
    if isinstance(policy, tuple) or "recurse" not in inspect.signature(policy).parameters:
        fsdp_modules = _choose_by_module(root, policy)
    else:
        fsdp_modules = []
        # The returned number is only for the calls of the function by itself.
        _append_by_size(fsdp_modules, module=root, root=root, policy=policy)
    shared = _parameters_with_several_owners(root, fsdp_modules)
    if shared:
        # For example "embedding.weight and head.weight", two names of one parameter.
        names = "; ".join(" and ".join(owner_by_name) for owner_by_name in shared)
        raise ConfigurationError(
            "auto_wrap_policy=...",
            problem=f"it puts names of one parameter into several FSDP modules: {names}",
            suggestion="auto_wrap_policy=None, which leaves these parameters to the root",
        )
    return fsdp_modules


def owners_by_name(
    root: nn.Module, fsdp_modules: Iterable[nn.Module]
) -> dict[nn.Parameter, dict[str, nn.Module]]:
    """Return the owner of each name of each parameter, as ``{parameter: {name: owner}}``.

    The owner is the innermost FSDP module around that name, or the root. A parameter that modules
    share has several names, which may have different owners.

    Args:
        root: the model.
        fsdp_modules: its FSDP modules, without the root.
    """
    fsdp_module_set = set(fsdp_modules)  # a set is searched faster
    # The owner of the parameters that a module holds itself, by the path of the module.
    owner_at = {"": root}
    owners: dict[nn.Parameter, dict[str, nn.Module]] = {}
    # A shared module is visited once under each of its paths. Parents come before children.
    for path, module in root.named_modules(remove_duplicate=False):
        if module in fsdp_module_set:
            owner_at[path] = module
        else:
            parent_path = path.rpartition(".")[0]
            owner_at[path] = owner_at[parent_path]
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            owners.setdefault(parameter, {})[name] = owner_at[path]
    return owners


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _choose_by_module(root: nn.Module, policy: ModuleChoice) -> list[nn.Module]:
    """Return the modules below the root that classes, or a function of a module, choose.

    Inner modules come before outer modules.

    Raises:
        ConfigurationError: the policy chooses neither the root nor a module below it.
    """
    # The root is sharded in any case, and so it is left out of the result. It is a candidate, so
    # that a policy that chooses only the root raises no error.
    candidates = [root]
    for module in root.modules():
        if module is not root and _can_be_sharded(module):
            candidates.append(module)
    chosen = choose_modules(root, candidates, "auto_wrap_policy", policy)
    return [module for module in chosen if module is not root]


def _append_by_size(
    fsdp_modules: list[nn.Module],
    module: nn.Module,
    root: nn.Module,
    policy: Callable[..., object],
) -> int:
    """Append the modules that a policy of torch's first FSDP chooses to a list.

    The candidates are ``module`` and all modules inside it. This function calls itself for the
    children of ``module``, and so inner modules are appended before outer modules.

    Args:
        fsdp_modules: the list that is appended to.
        module: the module to search.
        root: the model, which is not appended itself.
        policy: with ``recurse=True``, returns whether to search the children of a module. With
            ``recurse=False``, returns whether a module is an FSDP module, given the number of
            elements of its parameters outside of inner FSDP modules.

    Returns:
        The number of elements of the parameters of ``module`` that are in FSDP modules.
    """
    numel = 0
    for parameter in module.parameters():
        numel += parameter.numel()
    numel_in_fsdp_modules = 0
    if policy(module=module, recurse=True, nonwrapped_numel=numel):
        for child in module.children():
            numel_in_fsdp_modules += _append_by_size(fsdp_modules, child, root, policy)
    # A module that the model holds twice may be in the list already.
    if module is root or module in fsdp_modules or not _can_be_sharded(module):
        return numel_in_fsdp_modules
    remaining_numel = numel - numel_in_fsdp_modules
    if not policy(module=module, recurse=False, nonwrapped_numel=remaining_numel):
        return numel_in_fsdp_modules
    fsdp_modules.append(module)
    return numel


def _repeated_blocks(root: nn.Module) -> list[nn.Module]:
    """Return the outermost repeated blocks of a model, in the order of ``root.modules()``.

    A repeated block is an item of a ModuleList, ModuleDict or Sequential that has the same class as
    another item, such as the layers of a transformer. In a model without repeated items, a repeated
    block is any module with submodules that has the same class as another module with submodules.
    """
    with_children = {module for module in root.modules() if _has_children(module)}
    items: set[nn.Module] = set()
    for container in root.modules():
        if isinstance(container, _CONTAINERS):
            items.update(container.children())
        elif isinstance(container, nn.Sequential):
            # Items without submodules, such as nn.Linear, are too small for an all-gather each.
            items.update(with_children.intersection(container.children()))
    blocks = _modules_of_repeated_classes(root, items)
    if blocks:
        return blocks
    return _modules_of_repeated_classes(root, with_children - {root})


def _modules_of_repeated_classes(root: nn.Module, candidates: set[nn.Module]) -> list[nn.Module]:
    """Return the outermost candidates whose class is repeated, in the order of ``root.modules()``.

    A class is repeated if several candidates that can be sharded have this class. Candidates within
    other candidates count, too.
    """
    shardable: list[nn.Module] = []
    for module in root.modules():
        if module in candidates and _can_be_sharded(module):
            shardable.append(module)
    counts = Counter(map(type, shardable))
    repeated = [module for module in shardable if counts[type(module)] > 1]
    inside_repeated: set[nn.Module] = set()
    for module in repeated:
        for submodule in module.modules():
            if submodule is not module:
                inside_repeated.add(submodule)
    return [module for module in repeated if module not in inside_repeated]


def _without_shared_parameters(root: nn.Module, fsdp_modules: list[nn.Module]) -> list[nn.Module]:
    """Leave out FSDP modules until each parameter has one owner.

    The owner of a parameter is the innermost FSDP module around it, or the root. A parameter that
    modules share may have several owners, which FSDP2 does not support.

    Returns:
        The remaining FSDP modules, in the same order.
    """
    # The parameters of a module that is left out go to the FSDP module around it, or to the root,
    # and may be shared with another module there. So this is repeated. The loop ends, since each
    # round leaves out a module: one of the several owners is not the root.
    while shared := _parameters_with_several_owners(root, fsdp_modules):
        modules_to_leave_out: set[nn.Module] = set()
        for owner_by_name in shared:
            modules_to_leave_out.update(owner_by_name.values())
        fsdp_modules = [module for module in fsdp_modules if module not in modules_to_leave_out]
    return fsdp_modules


def _parameters_with_several_owners(
    root: nn.Module, fsdp_modules: list[nn.Module]
) -> list[dict[str, nn.Module]]:
    """Return the dict ``{name: owner}`` of each parameter that would have several owners.

    The owner is the innermost FSDP module around this name of the parameter, or the root.
    """
    shared: list[dict[str, nn.Module]] = []
    for owner_by_name in owners_by_name(root, fsdp_modules).values():
        has_several_owners = len(set(owner_by_name.values())) > 1
        if has_several_owners:
            shared.append(owner_by_name)
    return shared


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _can_be_sharded(module: nn.Module) -> bool:
    """Return whether a module has parameters, and a forward method before which to gather them."""
    is_container = isinstance(module, _CONTAINERS)
    # Another module without a forward method in its class may still be called: an instance may have
    # a forward method of its own, and mark_forward_method() allows other methods.
    has_no_forward = type(module).forward is nn.Module.forward
    if is_container and has_no_forward:
        return False
    return next(module.parameters(), None) is not None

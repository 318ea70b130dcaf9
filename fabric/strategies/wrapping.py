"""The choice of FSDP modules in a model, and the checks that all ranks can shard it.

[Note: FSDP modules] An *FSDP module* is a module to which ``fully_shard`` is applied: its parameters are gathered right
before its forward pass, and freed after it. What lies outside of all others belongs to the root, which is gathered for
the whole forward pass. FSDP modules that are the repeated blocks of a model make sharding pay: one block is unsharded
at a time. A parameter that several modules share has to belong to one FSDP module, or to the root.
"""

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from fabric.communicators import Communicator
from fabric.errors import ArgumentTypeError, ConfigurationError, FabricError, UsageError
from fabric.strategies.init_module import EmptyParameter

__all__ = [
    "WrapPolicy",
    "check_activation_checkpointing",
    "check_same_model",
    "check_shardable",
    "check_wrap_policy",
    "find_fsdp_modules",
    "find_recomputed",
]

WrapPolicy = Collection[type[nn.Module]] | int | Callable[..., object] | None

_LISTS = (nn.ModuleList, nn.ModuleDict)


def check_wrap_policy(policy: Any) -> Any:
    """The :data:`WrapPolicy` as it is, with a single class as a set of it.

    Args:
        policy: None, a class of modules, a collection of classes, a number of parameters, or a function.

    Raises:
        ArgumentTypeError: it is something else.
    """
    if policy is None or (isinstance(policy, int) and not isinstance(policy, bool) and policy > 0):
        return policy
    return _check_choice("auto_wrap_policy", policy, ", a number of parameters from 1, or None for the repeated blocks")


def check_activation_checkpointing(choice: Any) -> Any:
    """A class, several classes as a set, a function of a module, or None.

    Raises:
        ArgumentTypeError: it is something else.
    """
    return None if choice is None else _check_choice("activation_checkpointing", choice, "")


def find_fsdp_modules(root: nn.Module, policy: WrapPolicy = None) -> list[nn.Module]:
    """The FSDP modules of a model, inner before outer, without the root; see ``[Note: FSDP modules]``.

    Args:
        root: the model.
        policy: classes, whose instances are FSDP modules; a number of parameters, from which on what no inner FSDP
            module holds is one; a function ``(module) -> bool``, or of the kind that torch's first FSDP took,
            ``(module, recurse, nonwrapped_numel) -> bool``; None for the repeated blocks: modules of a class that
            occurs more than once in lists and sequences, else of a class with parts that occurs more than once at all.

    Raises:
        ConfigurationError: no module is of the classes given, or a parameter would belong to two FSDP modules.
    """
    if policy is None:
        return _without_tied(root, _repeated_blocks(root))
    if isinstance(policy, int):
        # An attention layer reads the weight of its projection without calling it.
        found = _by_remainder(
            root, lambda _, numel: numel >= policy, lambda m: not isinstance(m, nn.MultiheadAttention)
        )
    elif isinstance(policy, Collection):
        found = _chosen(root, policy, "auto_wrap_policy", _can_be_sharded)
    elif "recurse" in inspect.signature(policy).parameters:
        found = _by_remainder(
            root,
            lambda module, numel: policy(module=module, recurse=False, nonwrapped_numel=numel),
            lambda module: policy(module=module, recurse=True, nonwrapped_numel=_numel(module)),
        )
    else:
        found: list[nn.Module] = [module for module in root.modules() if policy(module)][::-1]
    found = [module for module in found if module is not root and _can_be_sharded(module)]
    if tied := _tied(root, set(found)):
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in root.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        raise ConfigurationError(
            f"auto_wrap_policy for a {type(root).__name__}",
            "it puts names of one parameter into several FSDP modules: "
            + "; ".join(" and ".join(names[parameter]) for parameter in tied),
            "a policy under which all modules that share a parameter are in the same FSDP module, or in none",
            "FSDPStrategy(), which leaves such modules to the root",
        )
    return found


def find_recomputed(root: nn.Module, choice: Any) -> list[nn.Module]:
    """The modules that compute their activations again in the backward pass.

    Raises:
        ConfigurationError: there are none, though some were asked for.
    """
    return [] if choice is None else _chosen(root, choice, "activation_checkpointing")


def check_shardable(root: nn.Module, has_values: bool) -> None:
    """Raise for parameters that cannot be sharded.

    Args:
        root: the model.
        has_values: whether the values of all ranks are this rank's, so that meta tensors cannot be set up.

    Raises:
        ConfigurationError: parameters that have no shape yet, or no dimension.
        UsageError: meta tensors.
    """
    title, parameters = type(root).__name__, dict(root.named_parameters())
    if names := [name for name, parameter in parameters.items() if is_lazy(parameter)]:
        raise ConfigurationError(
            f"setup({title}) with FSDP",
            f"these are lazy and have no shape before a first forward pass: {', '.join(names)}",
            "parameters that have a shape",
            "nn.Linear(in_features, out_features) in place of nn.LazyLinear, or one model(batch) before setup()",
        )
    if names := [name for name, parameter in parameters.items() if parameter.dim() == 0]:
        raise ConfigurationError(
            f"setup({title}) with FSDP",
            f"a single number cannot be sharded: {', '.join(names)}",
            "parameters of at least one dimension",
            "nn.Parameter(torch.ones(1)) in place of nn.Parameter(torch.ones(()))",
        )
    tensors = {**parameters, **dict(root.named_buffers())}
    names = [name for name, tensor in tensors.items() if tensor.is_meta and not isinstance(tensor, EmptyParameter)]
    if has_values and names:
        raise UsageError(
            f"setup({title}) with meta tensors",
            f"these have no values: {', '.join(names)}",
            "a model built in fabric.init_module(), which needs no more memory",
            "with fabric.init_module(): model = Model()  # in place of torch.device('meta')",
        )


def check_same_model(communicator: Communicator, root: nn.Module, error: FabricError | None) -> None:
    """Raise on every rank where any rank has an error, or another model. Collective.

    Args:
        communicator: all ranks.
        root: the model.
        error: why this rank cannot set it up; None if it can.

    Raises:
        FabricError: this rank's error.
        UsageError: that of another rank, or a difference between the models.
    """
    reports = communicator.gather_objects((str(error or ""), "" if error else _layout(root)))
    if error is not None:
        raise error
    request = f"setup({type(root).__name__}) on rank {communicator.rank}"
    for rank, (text, _) in enumerate(reports):
        if text:
            raise UsageError(request, f"rank {rank} cannot set it up: {text}")
    if different := [rank for rank, report in enumerate(reports) if report != reports[0]]:
        raise UsageError(
            request,
            f"it is another model on rank(s) {', '.join(map(str, different))} than on rank 0",
            "parameters and buffers of the same names, shapes and dtypes on every rank",
            "a build that does not depend on the rank",
        )


def _check_choice(option: str, value: Any, others: str) -> Any:
    classes = tuple(value) if isinstance(value, Collection) and not isinstance(value, str) else (value,)
    if classes and all(isinstance(one, type) and issubclass(one, nn.Module) for one in classes):
        return frozenset(classes)
    if callable(value) and not isinstance(value, type):
        return value
    raise ArgumentTypeError(
        f"FSDPStrategy({option}={value!r})",
        "it names no classes of modules",
        f"a class, a collection of classes, a function (module) -> bool{others}",
        f"FSDPStrategy({option}=Block)",
    )


def _chosen(
    root: nn.Module, choice: Any, option: str, fits: Callable[[nn.Module], bool] = lambda part: True
) -> list[nn.Module]:
    """The modules that classes, of which some may not fit, or a function choose, inner before outer."""
    if isinstance(choice, frozenset):
        found = [part for part in root.modules() if isinstance(part, tuple(choice)) and (fits(part) or part is root)]
    else:
        found = [part for part in root.modules() if choice(part)]
    if not found:
        present = sorted({type(module).__name__ for module in root.modules()})
        names = ", ".join(sorted(one.__name__ for one in choice)) if isinstance(choice, frozenset) else choice
        raise ConfigurationError(
            f"FSDPStrategy({option}={names}) for a {type(root).__name__}",
            "no part of it is chosen",
            f"classes that it is made of: {', '.join(present)}",
            f"FSDPStrategy({option}=Block)",
        )
    return found[::-1]


def _layout(root: nn.Module) -> str:
    """A digest of the names of parameters and buffers, which of them are one tensor, their shapes and dtypes."""
    numbers: dict[int, int] = {}
    layout = []
    for named in (root.named_parameters, root.named_buffers):
        for name, each in named(remove_duplicate=False):
            number = numbers.setdefault(id(each), len(numbers))
            is_empty = isinstance(each, EmptyParameter)
            layout.append((name, number, each.shape, each.dtype, each.requires_grad, is_empty))
    return hashlib.sha256(repr(layout).encode()).hexdigest()


def _repeated_blocks(root: nn.Module) -> list[nn.Module]:
    in_containers = {
        child
        for parent in root.modules()
        if isinstance(parent, (*_LISTS, nn.Sequential))
        for child in parent.children()
        # A layer without parts in a sequence is too small for a collective of its own.
        if _has_parts(child) or not isinstance(parent, nn.Sequential)
    }
    with_parts = {module for module in root.modules() if _has_parts(module) and module is not root}
    for candidates in (in_containers, with_parts):
        candidates = {module for module in candidates if _can_be_sharded(module)}
        counts = Counter(map(type, candidates))
        repeated = {module for module in candidates if counts[type(module)] > 1}
        if repeated:
            inner = {part for module in repeated for part in module.modules() if part is not module}
            return [module for module in root.modules() if module in repeated - inner]
    return []


def _by_remainder(
    root: nn.Module, wants: Callable[[nn.Module, int], object], descends: Callable[[nn.Module], object]
) -> list[nn.Module]:
    """FSDP modules chosen by how many of their parameters no inner FSDP module holds."""
    found: list[nn.Module] = []

    def taken(module: nn.Module) -> int:
        inner = sum(map(taken, module.children())) if descends(module) else 0
        if module in (root, *found) or not _can_be_sharded(module) or not wants(module, _numel(module) - inner):
            return inner
        found.append(module)
        return _numel(module)

    taken(root)
    return found


def _without_tied(root: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Leave to the root what shares a parameter with another part of the model."""
    while tied := _tied(root, set(modules)):
        owners = {owner for found in tied.values() for owner in found}
        modules = [module for module in modules if module not in owners]
    return list(modules)


def _tied(root: nn.Module, modules: set[nn.Module]) -> dict[nn.Parameter, set[nn.Module]]:
    """The parameters that more than one FSDP module, or one and the root, would hold; with these."""
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    waiting = [(root, root)]
    while waiting:
        module, outer = waiting.pop()
        owner = module if module in modules else outer
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(owner)
        waiting += [(child, owner) for child in module.children()]
    return {parameter: found for parameter, found in owners.items() if len(found) > 1}


def _can_be_sharded(module: nn.Module) -> bool:
    has_forward = not isinstance(module, _LISTS) or type(module).forward is not nn.Module.forward
    return has_forward and any(True for _ in module.parameters())


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

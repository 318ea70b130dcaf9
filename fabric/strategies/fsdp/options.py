"""The options of FSDPStrategy: parsing, the modules that they select, checks of the model, and errors.

[Note: FSDP modules] An *FSDP module* is a module to which ``fully_shard`` is applied: its parameters are gathered right
before its forward pass, and freed after it. All other parameters belong to the root, which is gathered for the whole
forward pass. Sharding saves most memory if the FSDP modules are the repeated blocks of a model: one block is unsharded
at a time. A parameter that several modules share must belong to one FSDP module, or to the root.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim
from torch.distributed import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fabric._torch import local_tensor
from fabric.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.precision import Precision
from fabric.strategies.fsdp.state import SHARD, stays_whole
from fabric.strategies.init_module import EmptyParameter
from fabric.world import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

__all__ = [
    "EXPLANATIONS", "OF_FIRST_FSDP", "check_dtypes", "check_mesh", "check_optimizers",
    "check_shardable", "choose_modules", "find_fsdp_modules", "mesh_sizes", "parse_backward_prefetch", "parse_choice",
    "parse_cpu_offload", "parse_mixed_precision", "parse_name", "parse_wrap_policy", "pop_older",
    "prefetch_in_backward",
]  # fmt: skip

_ALWAYS_ON = "means nothing, it is always on"
# Options that only torch's first FSDP had, and their meaning here.
OF_FIRST_FSDP = {
    "activation_checkpointing_policy": "is activation_checkpointing",
    **dict.fromkeys(
        ("forward_prefetch", "limit_all_gathers", "sync_module_states", "use_orig_params"),
        _ALWAYS_ON,
    ),
    "NO_SHARD": 'is HYBRID_SHARD with device_mesh=(world_size, 1): each rank has all parameters, as in "ddp"',
}
_LISTS = (nn.ModuleList, nn.ModuleDict)
_TABLES = (nn.Embedding, nn.EmbeddingBag)
# Explanations of torch's errors, by their text: the problem, and a suggestion.
EXPLANATIONS = {
    "got mixed torch.Tensor and DTensor": (
        "a weight is used where this rank has its shard only, outside of the forward pass of its FSDP module",
        "weight.full_tensor() for such a use, before model(batch) for a penalty on all weights",
    ),
    "out of bounds for storage of size 0": (
        "a second derivative, or a change in place of what an FSDP module returned, needs weights that have been freed",
        'y = y + 1 for y += 1; strategy="ddp" for a loss of gradients (create_graph=True)',
    ),
    "FSDP does not support deepcopy": (
        "shards are no model",
        "fabric.ema(model) for averages; fabric.save for copies",
    ),
    "'Sparse|placement changes|a sharding strategy|unevenly sharded|requires redistribution": (
        "torch shards dense gradients, and steps that are the same for each element: it has no such operation",
        'torch.optim.AdamW, or strategy="ddp"',
    ),
}


def parse_name(option: str, value: Any, names: Sequence[str]) -> str:
    """One of these names, given as a string in any case or as the member of torch's enum with that name."""
    for name in names:
        if str(getattr(value, "name", value)).lower() == name.lower():
            return name
    raise ConfigurationError(
        f"FSDPStrategy({option}={value!r})", expected=" or ".join(map(repr, names))
    )


def pop_older(fsdp_kwargs: dict[str, Any], activation_checkpointing: Any) -> tuple[list[str], Any]:
    """Remove the options in :data:`OF_FIRST_FSDP`; returns their names, and the activation checkpointing option."""
    older = {name: fsdp_kwargs.pop(name) for name in OF_FIRST_FSDP if name in fsdp_kwargs}
    policy = older.get("activation_checkpointing_policy")
    if policy is not None and activation_checkpointing is not None:
        request = (
            f"FSDPStrategy({activation_checkpointing=}, activation_checkpointing_policy={policy!r})"
        )
        raise ConfigurationError(request, "these are names of one option", "one of the two")
    return [*older], activation_checkpointing if policy is None else policy


def check_mesh(
    mesh: tuple[int, ...] | DeviceMesh | None, sharding_strategy: str, world_size: int
) -> None:
    """Raise a ConfigurationError unless a mesh has the strategy's dimensions and covers all processes."""
    sizes = [(world_size, 1)] if sharding_strategy == "NO_SHARD" else [(world_size,)]
    if sharding_strategy == "HYBRID_SHARD":
        sizes = [
            (world_size // shards, shards)
            for shards in range(1, world_size + 1)
            if world_size % shards == 0
        ]
    if (
        mesh is not None
        and (mesh.shape if isinstance(mesh, DeviceMesh) else tuple(mesh)) not in sizes
    ):
        request = f"FSDPStrategy(device_mesh={mesh!r}) for {sharding_strategy} in a job of {world_size} processes"
        raise ConfigurationError(
            request, expected=f"device_mesh={' or '.join(map(str, sizes))}, or such a DeviceMesh"
        )


def mesh_sizes(
    given: tuple[int, ...] | None, sharding_strategy: str, world: World
) -> dict[str, int]:
    """The dimensions of a mesh with the given sizes, or with the strategy's default sizes."""
    own = (world.world_size, 1) if sharding_strategy == "NO_SHARD" else (world.world_size,)
    if sharding_strategy == "HYBRID_SHARD":
        own = world.num_nodes, world.local_world_size
    sizes = given or own
    return dict(zip(("replicas", "shards")[-len(sizes) :], sizes, strict=True))


def parse_cpu_offload(value: Any) -> "CPUOffloadPolicy | None":
    """The offload policy, or None: from a bool, ``CPUOffloadPolicy``, or ``CPUOffload`` of torch's first FSDP."""
    value = getattr(value, "offload_params", value)  # of CPUOffload
    if not value:
        return None
    from torch.distributed.fsdp import CPUOffloadPolicy  # takes a second to import

    policy = CPUOffloadPolicy() if value is True else value
    if not isinstance(policy, CPUOffloadPolicy):
        raise ArgumentTypeError(
            f"FSDPStrategy(cpu_offload={value!r})", "", "a bool, CPUOffloadPolicy or CPUOffload"
        )
    return policy


def parse_mixed_precision(value: Any) -> "tuple[MixedPrecisionPolicy | None, torch.dtype | None]":
    """The given policy, or None, and the dtype for floating-point buffers, or None.

    ``MixedPrecision`` of torch's first FSDP is translated: there the blocks cast their inputs only when asked to; here
    they do whenever any module does.
    """
    if value is None:
        return None, None
    from torch.distributed.fsdp import (
        MixedPrecision,
        MixedPrecisionPolicy,
    )  # takes a second to import

    if isinstance(value, MixedPrecisionPolicy):
        return value, None
    if not isinstance(value, MixedPrecision) or value.keep_low_precision_grads:
        raise ConfigurationError(
            f"FSDPStrategy(mixed_precision={value!r})",
            expected="MixedPrecisionPolicy or MixedPrecision, and bf16-true in place of keep_low_precision_grads",
        )
    casts = value.cast_forward_inputs or value.cast_root_forward_inputs
    return MixedPrecisionPolicy(
        value.param_dtype, value.reduce_dtype, cast_forward_inputs=casts
    ), value.buffer_dtype


def parse_backward_prefetch(value: Any) -> int | None:
    """How many FSDP modules to gather ahead in the backward pass; None leaves it to torch, which gathers one.

    ``BackwardPrefetch.BACKWARD_PRE`` is 1. ``BACKWARD_POST``, which keeps one FSDP module unsharded at a time, is 0.
    """
    number = {"BACKWARD_PRE": 1, "BACKWARD_POST": 0}.get(getattr(value, "name", ""), value)
    if number is None or (type(number) is int and number >= 0):
        return number
    raise ConfigurationError(
        f"FSDPStrategy(backward_prefetch={value!r})",
        expected="BACKWARD_PRE, BACKWARD_POST, or 2 for two",
    )


def parse_choice(option: str, choice: Any) -> Any:
    """A tuple of classes from one or several, a function of a module as it is, or None."""
    classes = tuple(choice) if isinstance(choice, Collection) else (choice,)
    if classes and all(isinstance(one, type) and issubclass(one, nn.Module) for one in classes):
        return classes
    if choice is None or (callable(choice) and not isinstance(choice, type)):
        return choice
    raise ArgumentTypeError(
        f"FSDPStrategy({option}={choice!r})", expected="a class, several, or a function"
    )


def parse_wrap_policy(policy: Any) -> Any:
    """As :func:`parse_choice`; a number of parameters becomes torch's policy of that size."""
    if type(policy) is not int or policy < 1:
        return parse_choice("auto_wrap_policy", policy)
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy  # takes a second to import

    return partial(size_based_auto_wrap_policy, min_num_params=policy)


def choose_modules(
    root: nn.Module, modules: Iterable[nn.Module], option: str, choice: Any
) -> list[nn.Module]:
    """The modules that a choice of :func:`parse_choice` selects, inner before outer; None selects none.

    Raises:
        ConfigurationError: any other choice selects none.
    """
    if choice is None:
        return []
    chosen = [
        part
        for part in modules
        if (isinstance(part, choice) if isinstance(choice, tuple) else choice(part))
    ]
    if not chosen:
        problem = f"no part of a {type(root).__name__} is chosen"
        known = ", ".join(sorted({type(part).__name__ for part in root.modules()}))
        raise ConfigurationError(
            f"FSDPStrategy({option}={choice!r})", problem, f"classes that it is made of: {known}"
        )
    return chosen[::-1]


def find_fsdp_modules(root: nn.Module, policy: Any = None) -> list[nn.Module]:
    """The FSDP modules of a model, inner before outer, without the root; see ``[Note: FSDP modules]``.

    Args:
        root: the model.
        policy: of :func:`parse_wrap_policy`: classes, whose instances are FSDP modules; a function
            ``(module) -> bool``, or of the kind that torch's first FSDP took, ``(module, recurse, nonwrapped_numel) ->
            bool``; None for the repeated blocks: modules of a class that occurs more than once in lists and sequences,
            else of a class with parts that occurs more than once at all.

    Raises:
        ConfigurationError: the policy chooses no module, or a parameter would belong to two FSDP modules.
    """
    if policy is None:
        found = _repeated_blocks(root)
    elif not isinstance(policy, tuple) and "recurse" in inspect.signature(policy).parameters:
        found = _by_remainder(root, policy)
    else:
        candidates = [part for part in root.modules() if part is root or _can_be_sharded(part)]
        found = [
            part
            for part in choose_modules(root, candidates, "auto_wrap_policy", policy)
            if part is not root
        ]
    while tied := [
        names for names in _owners(root, set(found)).values() if len(set(names.values())) > 1
    ]:
        if policy is not None:
            problem = "it puts names of one parameter into several FSDP modules: " + "; ".join(
                map(" and ".join, tied)
            )
            raise ConfigurationError(
                "auto_wrap_policy=...", problem, suggestion="none, which leaves them to the root"
            )
        owners = {owner for by_name in tied for owner in by_name.values()}
        found = [part for part in found if part not in owners]
    return found


def prefetch_in_backward(root: Any, fsdp_modules: Sequence[nn.Module], ahead: int) -> None:
    """Have each FSDP module gather those before it in the forward pass, taken to be in the order of the model."""
    order: list[Any] = [module for module in root.modules() if module in set(fsdp_modules)]
    for index, module in enumerate([*order, root]):
        # Prefetching itself means no prefetch; an empty list would mean torch's default.
        previous = order[max(0, index - ahead) : index][::-1] if ahead else []
        module.set_modules_to_backward_prefetch(previous or [module])


def check_shardable(root: nn.Module, has_values: bool, models: Iterable[nn.Module]) -> None:
    """Raise a ConfigurationError for a model that cannot be sharded.

    Args:
        root: the model.
        has_values: whether this rank's values go to all ranks, so that meta tensors cannot be set up.
        models: the models that are sharded already.
    """
    known = {part for model in models for part in model.modules()}
    named: dict[str, torch.Tensor] = dict(root.named_parameters())
    lazy = [name for name, each in named.items() if is_lazy(each)]
    strided = [
        name for name, each in named.items() if not is_lazy(each) and not each.is_contiguous()
    ]
    sharded = [name for name, each in named.items() if hasattr(each, SHARD)]
    tables = [
        (name, part)
        for name, part in root.named_modules()
        if isinstance(part, _TABLES) and part.sparse
    ]
    sparse = [name for name, part in tables if part.weight.requires_grad]
    sharded += [name or "the module itself" for name, part in root.named_modules() if part in known]
    named.update(root.named_buffers())
    on_meta = [
        name
        for name, each in named.items()
        if each.is_meta and not isinstance(each, EmptyParameter)
    ]
    for names, problem, suggestion in (
        (
            lazy,
            "are lazy and have no shape before a first forward pass",
            "one model(batch) before setup()",
        ),
        (
            sparse,
            "have sparse gradients, which cannot be sharded",
            'sparse=False, or strategy="ddp"',
        ),
        (
            strided,
            "are not contiguous, as in channels_last",
            "model.to(memory_format=torch.contiguous_format)",
        ),
        (
            sharded,
            "belong to another model, which is sharded",
            "one module around both, and one setup() of it",
        ),
        (
            on_meta if has_values else [],
            "have no values, being on meta",
            "a model built in fabric.init_module()",
        ),
    ):
        if names:
            request = f"setup({type(root).__name__}) with FSDP"
            problem = f"these {problem}: {', '.join(names)}"
            raise ConfigurationError(request, problem, suggestion=suggestion)


def check_dtypes(
    root: nn.Module,
    fsdp_modules: Iterable[nn.Module],
    ignored: set[nn.Parameter],
    precision: Precision,
) -> None:
    """Raise a ConfigurationError for an FSDP module with trained parameters of several dtypes.

    Args:
        root: the model.
        fsdp_modules: its FSDP modules without the root.
        ignored: parameters that are not to be sharded.
        precision: the precision of the setup.
    """
    dtypes: dict[nn.Module, dict[torch.dtype, list[str]]] = {}
    for parameter, owners in _owners(root, set(fsdp_modules)).items():
        name, owner = next(iter(owners.items()))
        if parameter.requires_grad and not stays_whole(parameter, ignored):
            dtypes.setdefault(owner, {}).setdefault(
                precision.param_dtype or parameter.dtype, []
            ).append(name)
    for names in dtypes.values():
        if len(names) > 1:
            raise ConfigurationError(
                f"setup({type(root).__name__}) with FSDP",
                f"one FSDP module has trained parameters of several dtypes: {names}",
                suggestion="model.float(); or FSDPStrategy(auto_wrap_policy={...}) with a class around each dtype",
            )


def check_optimizers(
    optimizers: Sequence[Optimizer],
    shards: int,
    module: nn.Module | None,
    models: Sequence[nn.Module],
) -> None:
    """Raise a UsageError for an optimizer whose steps would fail or change nothing, or that would lose its state.

    Args:
        optimizers: the optimizers to set up.
        shards: the number of shards of a parameter.
        module: the model to shard with them, if there is one.
        models: the models that are sharded already.
    """
    own = set() if module is None else set(module.parameters())
    gathered = {
        each for model in models for each in model.parameters() if local_tensor(each) is each
    }
    for optimizer in optimizers:
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        local = [local_tensor(parameter) for parameter in parameters]
        sharded = [each for each in parameters if each in own or local_tensor(each) is not each]
        is_uneven = any(length % shards for parameter in sharded for length in parameter.shape[:1])
        after = {
            shard
            for parameter in parameters
            if (shard := getattr(parameter, SHARD, None)) is not None
        }
        if after:
            names = [
                name for model in models for name, each in model.named_parameters() if each in after
            ]
            problem = f"it holds parameters from before the sharding: stepping changes nothing of {', '.join(names)}"
        elif any(
            each in gathered or (each.numel() and not each.untyped_storage().size())
            for each in local
        ):
            problem = "it holds parameters that a forward pass gathered, and that are freed again"
        elif any(
            parameter in own and _has_history(optimizer.state.get(parameter))
            for parameter in parameters
        ):
            problem = "it has state for whole parameters, and these are about to be sharded"
        elif sharded and isinstance(
            optimizer, (optim.Adafactor, optim.Rprop, *([optim.LBFGS] if is_uneven else ()))
        ):
            problem = (
                'torch has no such step for shards; it has that of AdamW and SGD, or strategy="ddp"'
            )
        else:
            continue
        raise UsageError(
            f"setup of {type(optimizer).__name__} with FSDP",
            problem,
            suggestion="model, optimizer = fabric.setup(model, AdamW(model.parameters())), then fabric.load(...)",
        )


def _has_history(slots: Mapping[str, Any] | None) -> bool:
    """Whether an optimizer's state of a parameter is more than initial values, which Adagrad fills in when made."""
    return bool(slots) and bool(
        slots.get("step", 1) or any(getattr(one, "is_meta", False) for one in slots.values())
    )


def _repeated_blocks(root: nn.Module) -> list[nn.Module]:
    with_parts = {part for part in root.modules() if any(True for _ in part.children())}
    lists = [part for part in root.modules() if isinstance(part, (*_LISTS, nn.Sequential))]
    # In a Sequential, a layer without submodules is too small for a collective of its own.
    in_lists = {
        part
        for list_ in lists
        for part in list_.children()
        if part in with_parts or isinstance(list_, _LISTS)
    }
    for chosen in (in_lists, with_parts - {root}):
        candidates = [
            module for module in root.modules() if module in chosen and _can_be_sharded(module)
        ]
        counts = Counter(map(type, candidates))
        repeated = [module for module in candidates if counts[type(module)] > 1]
        if repeated:
            inner = {part for module in repeated for part in module.modules() if part is not module}
            return [module for module in repeated if module not in inner]
    return []


def _by_remainder(root: nn.Module, policy: Callable[..., object]) -> list[nn.Module]:
    """FSDP modules chosen by their number of parameters outside of inner FSDP modules."""
    found: list[nn.Module] = []

    def held(module: nn.Module) -> int:
        numel = sum(parameter.numel() for parameter in module.parameters())
        recurses = policy(module=module, recurse=True, nonwrapped_numel=numel)
        inner = sum(map(held, module.children())) if recurses else 0
        is_candidate = module not in (root, *found) and _can_be_sharded(module)
        if is_candidate and policy(module=module, recurse=False, nonwrapped_numel=numel - inner):
            found.append(module)
            return numel
        return inner

    held(root)
    return found


def _owners(
    root: nn.Module, fsdp_modules: set[nn.Module]
) -> dict[nn.Parameter, dict[str, nn.Module]]:
    """The FSDP module, or the root, that would own each parameter, by each of its names."""
    owners = {"": root}
    names: dict[nn.Parameter, dict[str, nn.Module]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        owners[path] = module if module in fsdp_modules else owners[path.rpartition(".")[0]]
        for name, parameter in module.named_parameters(path, recurse=False):
            names.setdefault(parameter, {})[name] = owners[path]
    return names


def _can_be_sharded(module: nn.Module) -> bool:
    has_forward = not isinstance(module, _LISTS) or type(module).forward is not nn.Module.forward
    return has_forward and any(True for _ in module.parameters())

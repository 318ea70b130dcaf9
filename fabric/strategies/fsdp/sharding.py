"""Sharding of a model: checks before it, meshes, mixed precision, and ``fully_shard`` itself."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.distributed import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fabric._torch import (
    fsdp_param_groups,
    is_dtensor,
    is_fsdp_module,
    local_tensor,
    registered_buffers,
    registered_parameters,
    share_accumulation_hooks,
    share_gradient_hooks,
)
from fabric.communicators import Communicator
from fabric.errors import ConfigurationError, UsageError
from fabric.precision import Precision
from fabric.strategies.fsdp.state import is_unsharded, parameter_slots, set_shard_of, shard_of
from fabric.strategies.fsdp.wrapping import owners_by_name
from fabric.strategies.init_module import EmptyParameter, fill_empty, release_pages
from fabric.tree import parameters_of
from fabric.world import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = [
    "MixedPrecisionOption",
    "check_dtypes",
    "check_mesh",
    "check_no_renormalized_tables",
    "check_optimizers",
    "check_shardable",
    "is_mapped",
    "mesh_sizes",
    "parse_mixed_precision",
    "prefetch_in_backward",
    "prepare_unsharded_module",
    "receive_values",
    "replicate_unsharded",
    "shard_module",
]


# -- meshes and mixed precision -----------------------------------------------------------------


def check_mesh(
    mesh: tuple[int, ...] | DeviceMesh | None, sharding_strategy: str, world_size: int
) -> None:
    """Raise a ConfigurationError for a mesh that does not fit the strategy or the processes.

    Args:
        mesh: the mesh, or its sizes. None always fits.
        sharding_strategy: the sharding strategy, which decides the number of dimensions.
        world_size: the number of processes, all of which have to be in the mesh.
    """
    if mesh is None:
        return
    valid_sizes = _valid_mesh_sizes(sharding_strategy, world_size)
    sizes: Any = mesh
    if isinstance(mesh, DeviceMesh):
        sizes = tuple(mesh.shape)
    # The types are checked, too, since (2.0,) == (2,).
    are_integers = isinstance(sizes, Sequence) and all(type(size) is int for size in sizes)
    if not are_integers or tuple(sizes) not in valid_sizes:
        expected = " or ".join(map(str, valid_sizes))
        raise ConfigurationError(
            f"FSDPStrategy(device_mesh={mesh!r}) for {sharding_strategy} in a job of {world_size} "
            "processes",
            expected=f"device_mesh={expected}, or a DeviceMesh of these sizes",
        )


def _valid_mesh_sizes(sharding_strategy: str, world_size: int) -> list[tuple[int, ...]]:
    """Return the sizes of all meshes with ``world_size`` processes that fit the strategy.

    The sizes are ``(shards,)`` or ``(replicas, shards)``.
    """
    if sharding_strategy == "NO_SHARD":
        return [(world_size, 1)]
    if sharding_strategy != "HYBRID_SHARD":
        return [(world_size,)]
    valid_sizes: list[tuple[int, ...]] = []
    for shards in range(1, world_size + 1):
        if world_size % shards == 0:
            valid_sizes.append((world_size // shards, shards))
    return valid_sizes


def mesh_sizes(
    sizes: tuple[int, ...] | None, sharding_strategy: str, world: World
) -> dict[str, int]:
    """Return the size of each dimension of the mesh, by name.

    The names are ``replicas`` and ``shards``, or only ``shards`` for a mesh with one dimension.

    Args:
        sizes: the sizes from the user, checked by :func:`check_mesh`. None stands for the
            strategy's default sizes.
        sharding_strategy: the sharding strategy.
        world: this process's place in the job.
    """
    if sizes is None:
        if sharding_strategy == "HYBRID_SHARD":
            sizes = (world.num_nodes, world.local_world_size)
        elif sharding_strategy == "NO_SHARD":
            sizes = (world.world_size, 1)
        else:
            sizes = (world.world_size,)
    if len(sizes) == 1:
        return {"shards": sizes[0]}
    replicas, shards = sizes
    return {"replicas": replicas, "shards": shards}


class MixedPrecisionOption(NamedTuple):
    """The value of the option ``mixed_precision``, in the terms of FSDP2.

    Attributes:
        policy: the policy for parameters, gradients and outputs. None leaves it to ``precision``.
        buffer_dtype: the dtype of floating-point buffers. None leaves buffers as they are.
    """

    policy: "MixedPrecisionPolicy | None" = None
    buffer_dtype: torch.dtype | None = None


def parse_mixed_precision(value: Any) -> MixedPrecisionOption:
    """Return the policy and the dtype of buffers that the option ``mixed_precision`` stands for.

    ``MixedPrecision`` of torch's first FSDP is translated to FSDP2's policy. ``MixedPrecision`` has
    two options for the casting of inputs, one for the root and one for the other FSDP modules. The
    policy has one option for all modules, which is true if either of the two is true.

    Raises:
        ConfigurationError: the value is neither a ``MixedPrecisionPolicy`` nor a
            ``MixedPrecision``, or it keeps gradients in a low precision.
    """
    if value is None:
        return MixedPrecisionOption()
    from torch.distributed.fsdp import (  # takes a second to import
        MixedPrecision,
        MixedPrecisionPolicy,
    )

    if isinstance(value, MixedPrecisionPolicy):
        return MixedPrecisionOption(value)
    # FSDP2 has no counterpart of keep_low_precision_grads.
    if not isinstance(value, MixedPrecision) or value.keep_low_precision_grads:
        raise ConfigurationError(
            f"FSDPStrategy(mixed_precision={value!r})",
            expected=(
                "MixedPrecisionPolicy or MixedPrecision, and bf16-true in place of "
                "keep_low_precision_grads"
            ),
        )
    policy = MixedPrecisionPolicy(
        param_dtype=value.param_dtype,
        reduce_dtype=value.reduce_dtype,
        cast_forward_inputs=value.cast_forward_inputs or value.cast_root_forward_inputs,
    )
    return MixedPrecisionOption(policy, value.buffer_dtype)


# -- checks -------------------------------------------------------------------------------------


def check_shardable(root: nn.Module, is_source: bool, models: Iterable[nn.Module]) -> None:
    """Raise a ConfigurationError for a model that cannot be sharded. Not a collective.

    Args:
        root: the model.
        is_source: whether the other ranks get this rank's values. If so, this rank's tensors must
            have values, and must not be on the meta device.
        models: the models that are sharded already.
    """
    parameters = dict(root.named_parameters())
    lazy = [name for name, parameter in parameters.items() if is_lazy(parameter)]
    _refuse_if_any(
        lazy,
        root,
        problem="are lazy and have no shape before a first forward pass",
        suggestion="one model(batch) before setup()",
    )
    _refuse_if_any(
        _names_of_sparse_tables(root),
        root,
        problem="have sparse gradients, which cannot be sharded",
        suggestion='sparse=False, or strategy="ddp"',
    )
    non_contiguous = [
        name for name, parameter in parameters.items() if not parameter.is_contiguous()
    ]
    _refuse_if_any(
        non_contiguous,
        root,
        problem="are not contiguous, as in channels_last or after expand()",
        suggestion="for parameter in model.parameters(): "
        "parameter.data = parameter.data.contiguous()",
    )
    _refuse_if_any(
        _names_in_sharded_models(root, models),
        root,
        problem="belong to another model, which is sharded",
        suggestion="one module around both, and one setup() of it",
    )
    if is_source:
        _refuse_if_any(
            _names_without_values(root),
            root,
            problem="have no values, being on meta",
            suggestion="a model built in fabric.init_module()",
        )


def check_no_renormalized_tables(root: nn.Module) -> None:
    """Raise a ConfigurationError for embeddings with ``max_norm``. Not a collective.

    Such an embedding changes its weight in forward passes. FSDP2 frees the gathered weight after
    the pass, and the change is lost.
    """
    names: list[str] = []
    for name, module in root.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            names.append(name)
    _refuse_if_any(
        names,
        root,
        problem="have max_norm, which changes the gathered weight in forward passes, and FSDP "
        "drops such changes",
        suggestion="max_norm=None, and after each step, with torch.no_grad(): "
        "weight.mul_((max_norm / weight.norm(dim=1, keepdim=True)).clamp(max=1))",
    )


def _refuse_if_any(names: Sequence[str], root: nn.Module, problem: str, suggestion: str) -> None:
    """Raise a ConfigurationError that lists names in a model, if there are any names.

    The error says "these {problem}: {names}", such as "these have sparse gradients: embedding".
    """
    if names:
        raise ConfigurationError(
            f"setup({type(root).__name__}) with FSDP",
            problem=f"these {problem}: {', '.join(names)}",
            suggestion=suggestion,
        )


def _names_of_sparse_tables(root: nn.Module) -> list[str]:
    """Return the names of the embeddings that are trained with sparse gradients."""
    names: list[str] = []
    for name, module in root.named_modules():
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        # Not module.weight, which a parametrization would compute.
        weight = registered_parameters(module).get("weight")
        if is_sparse and weight is not None and weight.requires_grad:
            names.append(name)
    return names


def _names_in_sharded_models(root: nn.Module, models: Iterable[nn.Module]) -> list[str]:
    """Return the names of a model's parameters and modules that are part of a sharded model, too.

    Args:
        root: the model.
        models: the models that are sharded already.
    """
    names: list[str] = []
    for name, parameter in root.named_parameters():
        # This model still holds a parameter that a sharded model has replaced by a shard.
        was_replaced_by_shard = shard_of(parameter) is not None
        if was_replaced_by_shard:
            names.append(name)
    sharded_modules: set[nn.Module] = set()
    for model in models:
        sharded_modules.update(model.modules())
    for name, module in root.named_modules():
        if module in sharded_modules:
            names.append(name or "the module itself")  # the name of the root is empty
    return names


def _names_without_values(root: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers on the meta device.

    Parameters of an empty build are left out: a checkpoint will fill them.
    """
    tensors: dict[str, Tensor] = {**dict(root.named_parameters()), **dict(root.named_buffers())}
    names: list[str] = []
    for name, tensor in tensors.items():
        if tensor.is_meta and not isinstance(tensor, EmptyParameter):
            names.append(name)
    return names


def check_dtypes(
    root: nn.Module,
    fsdp_modules: Iterable[nn.Module],
    ignored: set[nn.Parameter],
    precision: Precision,
) -> None:
    """Raise a ConfigurationError for an FSDP module with trained parameters of several dtypes.

    FSDP2 reduces the gradients of an FSDP module in one buffer of one dtype. Not a collective.

    Args:
        root: the model.
        fsdp_modules: its FSDP modules, without the root.
        ignored: the parameters that are not to be sharded.
        precision: the precision of the setup.
    """
    # For each FSDP module, the names of its parameters by dtype.
    names_by_dtype_of_module: dict[nn.Module, dict[torch.dtype, list[str]]] = {}
    for parameter, owners in owners_by_name(root, fsdp_modules).items():
        if not parameter.requires_grad or is_unsharded(parameter, ignored):
            continue
        # find_fsdp_modules() makes sure that all names of a parameter have one owner.
        name, owner = next(iter(owners.items()))
        dtype = parameter.dtype
        # Setup converts the parameter before it is sharded.
        if precision.param_dtype is not None and parameter.is_floating_point():
            dtype = precision.param_dtype
        names_by_dtype_of_module.setdefault(owner, {}).setdefault(dtype, []).append(name)
    for names_by_dtype in names_by_dtype_of_module.values():
        if len(names_by_dtype) == 1:
            continue
        suggestion = "FSDPStrategy(auto_wrap_policy={...}) with a class around each dtype"
        # model.float() would not convert complex parameters.
        if not any(dtype.is_complex for dtype in names_by_dtype):
            suggestion = f"model.float(); or {suggestion}"
        raise ConfigurationError(
            f"setup({type(root).__name__}) with FSDP",
            problem=f"one FSDP module has trained parameters of several dtypes: {names_by_dtype}",
            suggestion=suggestion,
        )


def check_optimizers(
    optimizers: Sequence[Optimizer],
    num_shards: int,
    module: nn.Module | None,
    models: Sequence[nn.Module],
) -> None:
    """Raise a UsageError for an optimizer that would not train, or would lose its state.

    Not a collective.

    Args:
        optimizers: the optimizers to set up.
        num_shards: the number of shards of a parameter.
        module: the model in the same call of ``setup``, which is about to be sharded. None if there
            is none.
        models: the models that are sharded already.
    """
    parameters_to_shard: set[nn.Parameter] = set()
    if module is not None:
        parameters_to_shard.update(module.parameters())
    for optimizer in optimizers:
        problem = _problem_of_optimizer(optimizer, num_shards, parameters_to_shard, models)
        if problem is not None:
            raise UsageError(
                f"setup of {type(optimizer).__name__} with FSDP",
                problem=problem,
                # The load brings back the state of an optimizer that has made steps.
                suggestion=(
                    "model, optimizer = fabric.setup(model, AdamW(model.parameters())), then "
                    "fabric.load(...)"
                ),
            )


def _problem_of_optimizer(
    optimizer: Optimizer,
    num_shards: int,
    parameters_to_shard: set[nn.Parameter],
    models: Sequence[nn.Module],
) -> str | None:
    """Return why an optimizer cannot train sharded parameters. None if it can.

    Args:
        optimizer: the optimizer.
        num_shards: the number of shards of a parameter.
        parameters_to_shard: the parameters that are about to be sharded. The optimizer may hold
            them, because setup replaces them by their shards in the optimizer.
        models: the models that are sharded already.
    """
    parameters = parameters_of(optimizer)
    # The shards by which an earlier setup has replaced the parameters in their model. shard_of()
    # returns None for a parameter that was not replaced.
    replacements = {shard_of(parameter) for parameter in parameters} - {None}
    if replacements:
        names: list[str] = []
        for model in models:
            for name, parameter in model.named_parameters():
                if parameter in replacements:
                    names.append(name)
        return (
            "it holds parameters from before the sharding: stepping changes nothing of "
            f"{', '.join(names)}"
        )
    if _holds_gathered(parameters, models):
        return "it holds parameters that a forward pass gathered, and that are freed again"
    for parameter in parameters:
        if parameter in parameters_to_shard and _has_state_to_lose(optimizer.state.get(parameter)):
            return "it has state for whole parameters, and these are about to be sharded"
    if not _has_step_for_shards(optimizer, num_shards, parameters_to_shard):
        return 'torch has no such step for shards; it has that of AdamW and SGD, or strategy="ddp"'
    return None


def _holds_gathered(parameters: Iterable[Tensor], models: Iterable[nn.Module]) -> bool:
    """Return whether an optimizer holds full parameters that a forward pass gathered from shards.

    FSDP2 frees a gathered parameter sooner or later, and then a step of the optimizer would be
    lost. A gathered parameter that is not freed yet is in its model in place of the shard.

    Args:
        parameters: the parameters of an optimizer.
        models: the models that are sharded already.
    """
    gathered: set[Tensor] = set()
    for model in models:
        is_sharded = next(fsdp_param_groups(model), None) is not None
        if not is_sharded:
            continue
        for parameter in model.parameters():
            if not is_dtensor(parameter):
                gathered.add(parameter)
    for parameter in parameters:
        local = local_tensor(parameter)
        # FSDP2 frees a gathered parameter by emptying its storage.
        is_freed = local.numel() > 0 and local.untyped_storage().size() == 0
        if is_freed or local in gathered:
            return True
    return False


def _has_state_to_lose(state: Mapping[str, Any] | None) -> bool:
    """Return whether an optimizer has state of a parameter that setup could not shard.

    Setup shards only the initial values of Adagrad, whose ``step`` is 0: each rank cuts its shard
    from its own values, which are equal on all ranks. Values on the meta device cannot be cut.

    Args:
        state: the state by name. None if the parameter has no state.
    """
    if not state:
        return False
    # State without an entry "step" counts as the state after a step.
    has_stepped = bool(state.get("step", 1))
    if has_stepped:
        return True
    # True for an optimizer that was made while its parameters were on the meta device.
    return any(getattr(value, "is_meta", False) for value in state.values())


def _has_step_for_shards(
    optimizer: Optimizer, num_shards: int, parameters_to_shard: set[nn.Parameter]
) -> bool:
    """Return whether torch can compute an optimizer's step with its sharded parameters.

    Args:
        optimizer: the optimizer.
        num_shards: the number of shards of a parameter.
        parameters_to_shard: the parameters that are about to be sharded.
    """
    sharded: list[Tensor] = []
    for parameter in parameters_of(optimizer):
        if is_dtensor(parameter) or parameter in parameters_to_shard:
            sharded.append(parameter)
    if not sharded:
        return True
    if isinstance(optimizer, optim.LBFGS):
        # The step flattens the gradients to make one vector of them.
        return all(_can_flatten(parameter, num_shards) for parameter in sharded)
    # Adafactor changes the norm of a DTensor in place, and Rprop writes to a DTensor through a
    # mask. torch supports neither.
    return not isinstance(optimizer, optim.Adafactor | optim.Rprop)


def _can_flatten(parameter: Tensor, num_shards: int) -> bool:
    """Return whether torch can flatten a sharded parameter, as the step of LBFGS does.

    Args:
        parameter: the parameter. It is sharded along its first dimension, unless it is a scalar.
        num_shards: the number of its shards.
    """
    if parameter.dim() == 0:
        return True
    length = parameter.shape[0]
    # Flattening removes a dimension of length 1. torch cannot remove the dimension that is sharded.
    is_removed = parameter.dim() > 1 and length == 1
    has_equal_shards = length % num_shards == 0
    return has_equal_shards and not is_removed


# -- sharding -----------------------------------------------------------------------------------


def shard_module(
    communicator: Communicator,
    module: nn.Module,
    originals: Mapping[str, nn.Parameter],
    **arguments: Any,
) -> None:
    """Make an FSDP module with rank 0's values, and free the original parameters. Collective.

    Inner FSDP modules have to be made first. Their parameters are DTensors then, which this
    function leaves alone.

    Args:
        communicator: all ranks.
        module: the module. ``fully_shard`` is skipped if it is an FSDP module already.
        originals: the user's parameters that tensor parallelism has replaced by DTensors, by name.
            The DTensors have the values of these parameters, which are only freed here.
        **arguments: arguments of ``fully_shard``.
    """
    # Imported here, so that importing fabric stays fast.
    from torch.distributed.fsdp import FSDPModule, fully_shard

    plain_parameters: dict[str, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        if not is_dtensor(parameter):
            plain_parameters[name] = parameter
    # Comes first, since fully_shard() cuts this rank's shards from this rank's own values.
    receive_values(communicator, module, list(plain_parameters.values()))
    if not isinstance(module, FSDPModule):
        fully_shard(module, **arguments)
    all_originals = {**plain_parameters, **originals}
    sharded: set[nn.Parameter] = set()
    for name, parameter in module.named_parameters():
        if name in all_originals:
            # Frees the original, and gives its attributes and hooks to the sharded parameter.
            _replace_original(all_originals[name], parameter)
            sharded.add(parameter)
    slots = [slot for slot in parameter_slots(module) if slot.parameter in sharded]

    def share_with_gathered(*_: object) -> None:
        """Give the gathered parameters the attributes and hooks of the sharded ones, once.

        This is a forward pre-hook of the first forward pass. It runs after FSDP's own pre-hook,
        which has made the gathered parameters. FSDP uses the same tensors in all forward passes.
        """
        handle.remove()  # the handle of this hook
        for slot in slots:
            gathered = slot.parameters_of_module[slot.name]
            _share_attributes(slot.parameter, gathered)

    # Dynamo must not trace the hook, because the hook removes itself from the module.
    outside_of_graphs: Any = torch.compiler.disable(share_with_gathered)
    handle = module.register_forward_pre_hook(outside_of_graphs)


def prepare_unsharded_module(
    communicator: Communicator,
    module: nn.Module,
    originals: Mapping[str, nn.Parameter],
    *,
    is_root: bool,
    mesh: DeviceMesh,
) -> None:
    """Prepare a module that is not sharded, in place of :func:`shard_module`. Collective.

    The module gets rank 0's values. Original parameters that were replaced are freed.

    Args:
        communicator: all ranks.
        module: the module.
        originals: the user's parameters that tensor parallelism has replaced by DTensors, by name.
        is_root: whether the module is the whole model.
        mesh: the mesh over which the model would be sharded. It has one rank.
    """
    # The parameters of the inner modules are among those of the root, and so the values are
    # received once, in the call for the root.
    plain_parameters: dict[str, nn.Parameter] = {}
    if is_root:
        for name, parameter in module.named_parameters():
            if not is_dtensor(parameter):
                plain_parameters[name] = parameter
    receive_values(communicator, module, list(plain_parameters.values()))
    for name, original in {**plain_parameters, **originals}.items():
        parameter = module.get_parameter(name)
        if is_mapped(parameter):
            # No shard replaces this parameter, so it is moved from the file into memory.
            parameter.data = parameter.detach().clone()
        # True if an earlier call, for an inner module, has done this for the parameter.
        was_replaced = shard_of(original) is parameter
        if parameter is not original and not was_replaced:
            # Frees the original, and gives its attributes and hooks to the parameter.
            _replace_original(original, parameter)
    has_fsdp_modules = any(map(is_fsdp_module, module.modules()))
    if is_root and has_fsdp_modules and not is_fsdp_module(module):
        # The user's parallelize_fn has made FSDP modules. FSDP takes the outermost one for the
        # whole model, and so the root becomes one, without parameters of its own.
        from torch.distributed.fsdp import fully_shard  # keeps the import of fabric fast

        fully_shard(module, mesh=mesh, ignored_params=set(module.parameters()))


def replicate_unsharded(
    communicator: Communicator, root: nn.Module, ignored: set[nn.Parameter], mesh: DeviceMesh
) -> set[nn.Parameter]:
    """Copy rank 0's buffers and unsharded parameters to all ranks. Collective.

    Called before the rest of the model is sharded. Each unsharded parameter is replaced in the
    model by a replicated DTensor, so that all parameters of the model are DTensors.

    Args:
        communicator: all ranks.
        root: the model, which is changed in place.
        ignored: the parameters that the user does not want to be sharded. Parameters that cannot
            be sharded are found by :func:`is_unsharded`.
        mesh: the mesh of the shards.

    Returns:
        The replicated parameters that replace the original ones.
    """
    # Imported here, so that importing fabric stays fast.
    from torch.distributed.tensor import Replicate, distribute_tensor

    has_ignored_parameter = not ignored.isdisjoint(root.parameters())
    if ignored and not has_ignored_parameter and communicator.rank == 0:
        # Usually, ignored_params are pickled copies, which are not the parameters of this model.
        warnings.warn(
            f"setup of {type(root).__name__}: none of ignored_params is a parameter of it. If the "
            "model was built before the launch, write fabric.launch(train, model)",
            stacklevel=2,
        )
    originals: dict[str, nn.Parameter] = {}
    for name, parameter in root.named_parameters():
        if is_unsharded(parameter, ignored):
            originals[name] = parameter
    receive_values(communicator, root, [*root.buffers(), *originals.values()])
    replicated: set[nn.Parameter] = set()
    for name, original in originals.items():
        # The original itself, or the parameter by which receive_values() has replaced an original
        # on the meta device.
        filled = root.get_parameter(name)
        # A clone in memory, since init_module() may have put the original into a memory-mapped
        # file.
        values = filled.detach().clone()
        # Without a source rank, nothing is sent: all ranks have the values already.
        tensor = distribute_tensor(values, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
        replacement = nn.Parameter(tensor, requires_grad=original.requires_grad)
        # Modules that share the parameter hold it under several names.
        _replace_in_modules(root, filled, replacement)
        # Frees the original, and gives its attributes and hooks to the replacement.
        _replace_original(original, replacement)
        replicated.add(replacement)
    return replicated


def prefetch_in_backward(root: Any, fsdp_modules: Sequence[nn.Module], num_ahead: int) -> None:
    """Have each FSDP module gather the modules ahead of it in the backward pass.

    Args:
        root: the model. Its forward pass is taken to use modules in the order of ``modules()``.
        fsdp_modules: the FSDP modules, without the root.
        num_ahead: the number of modules to gather ahead. 0 for none.
    """
    prefetched = set(fsdp_modules)
    forward_order: list[Any] = [module for module in root.modules() if module in prefetched]
    # The backward pass begins with the root, and then goes backward through this order.
    for index, module in enumerate([*forward_order, root]):
        first = max(0, index - num_ahead)
        next_in_backward = forward_order[first:index]
        next_in_backward.reverse()
        # If nothing is to be gathered ahead, the module itself is named, which is gathered already.
        # An empty list would mean torch's default, which gathers one module ahead.
        module.set_modules_to_backward_prefetch(next_in_backward or [module])


def is_mapped(tensor: Tensor) -> bool:
    """Return whether a tensor is in a memory-mapped file, as under :class:`MappedMemory`."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().filename is not None


def receive_values(
    communicator: Communicator, module: nn.Module, tensors: Sequence[Tensor]
) -> None:
    """Give tensors rank 0's values, in memory of the communicator's device. Collective.

    A meta tensor is replaced in the module by a new tensor. All other tensors keep their identity
    and get new data. An :class:`EmptyParameter` is filled with NaN. On the CPU, a parameter may
    stay in a memory-mapped file of ``init_module``, from which its shard will be copied.

    Args:
        communicator: all ranks.
        module: the module that the tensors belong to.
        tensors: parameters and buffers, the same on every rank.
    """
    # The memo of deepcopy. With one memo, buffers that share memory get copies that share memory.
    copies: dict[int, Any] = {}
    for tensor in tensors:
        value = _receive_value(communicator, tensor)
        if is_mapped(tensor):
            is_buffer = not isinstance(tensor, nn.Parameter)
            if value.device.type == "cpu" and is_buffer:
                # No shard replaces a buffer, so it is moved from the file into memory.
                value = deepcopy(tensor.detach(), copies).copy_(value)
            # The values were read above, which has brought the pages of the file into memory.
            release_pages(tensor.untyped_storage())
        if not tensor.is_meta:
            tensor.data = value
            continue
        # A meta tensor cannot get data on another device, so it is replaced.
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        _replace_in_modules(module, tensor, value)


def _receive_value(communicator: Communicator, tensor: Tensor) -> Tensor:
    """Return rank 0's values of a tensor, on the communicator's device. Collective.

    The returned tensor may share the memory of ``tensor``. An :class:`EmptyParameter`, which has no
    values on any rank, is filled with NaN without a collective.
    """
    if tensor.is_meta:
        value = torch.empty_like(tensor, device=communicator.device, requires_grad=False)
    else:
        value = tensor.detach().to(communicator.device).contiguous()
    if isinstance(tensor, EmptyParameter):
        fill_empty(value)
    else:
        # Overwrites `value`, which is sent as bytes, since backends do not support all dtypes.
        communicator.broadcast(value.view(-1).view(torch.uint8), 0)
    return value


def _replace_original(original: nn.Parameter, replacement: nn.Parameter) -> None:
    """Share an original's attributes and hooks with its replacement, and free the original.

    Not a collective. An optimizer may hold ``original`` until the setup of the optimizer, which
    finds ``replacement`` by ``shard_of(original)``.

    Args:
        original: the user's parameter.
        replacement: the sharded or replicated parameter, which is in the module already.
    """
    # Before set_shard_of(), which adds an attribute that only the original must have.
    _share_attributes(original, replacement)
    share_accumulation_hooks(original, replacement)
    set_shard_of(original, replacement)
    # Frees the values, even if an optimizer still holds the original.
    original.data = original.new_empty(0)


def _share_attributes(source: Tensor, target: Any) -> None:
    """Give ``target`` the attributes and the gradient hooks of ``source``, which stays as it is."""
    vars(target).update(vars(source))
    share_gradient_hooks(source, target)


def _replace_in_modules(root: nn.Module, tensor: Tensor, replacement: Any) -> None:
    """Replace a parameter or buffer in all modules of a model, under all of its names."""
    for module in root.modules():
        for registered in (registered_parameters(module), registered_buffers(module)):
            for name, value in registered.items():
                if value is tensor:
                    registered[name] = replacement

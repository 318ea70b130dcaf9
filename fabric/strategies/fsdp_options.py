"""The options of FSDPStrategy as users write them, turned into what ``fully_shard`` understands."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fabric.errors import ArgumentTypeError, ConfigurationError
from fabric.strategies.base import check_passed_on

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

__all__ = [
    "check_device_mesh",
    "check_fsdp_kwargs",
    "check_world",
    "parse_backward_prefetch",
    "parse_cpu_offload",
    "parse_mixed_precision",
    "parse_sharding_strategy",
    "parse_state_dict_type",
]

SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")

# What the strategy itself decides when it shards.
_OWN_ARGUMENTS = {"module", "mesh", "mp_policy", "offload_policy", "dp_mesh_dims"}


def parse_sharding_strategy(value: Any) -> str:
    """One of ``FULL_SHARD``, ``SHARD_GRAD_OP``, ``HYBRID_SHARD`` from its name or torch's ``ShardingStrategy``.

    Raises:
        ConfigurationError: there is no such strategy.
    """
    name = str(getattr(value, "name", value)).upper()
    if name in SHARDING_STRATEGIES:
        return name
    raise ConfigurationError(
        f"FSDPStrategy(sharding_strategy={value!r})",
        "there is no such sharding strategy",
        ", ".join(map(repr, SHARDING_STRATEGIES)),
        'FSDPStrategy(sharding_strategy="FULL_SHARD"); in place of NO_SHARD Fabric(strategy="ddp"), as DDP has none',
    )


def parse_state_dict_type(value: Any) -> str:
    """``"sharded"`` or ``"full"``.

    Raises:
        ConfigurationError: it is neither.
    """
    if value in ("sharded", "full"):
        return value
    raise ConfigurationError(
        f"FSDPStrategy(state_dict_type={value!r})",
        "there is no such kind of checkpoint",
        "'sharded', a folder that all ranks write, or 'full', one file that rank 0 writes",
        'FSDPStrategy(state_dict_type="full")',
    )


def check_device_mesh(mesh: Any, sharding_strategy: str) -> "tuple[int, ...] | DeviceMesh | None":
    """A mesh with as many dimensions as the sharding strategy uses: two (replicas, shards) for ``HYBRID_SHARD``.

    Raises:
        ArgumentTypeError: it is neither a tuple of sizes nor a ``DeviceMesh``.
        ConfigurationError: it has another number of dimensions, or a size under 1.
    """
    if mesh is None:
        return None
    sizes = tuple(mesh) if isinstance(mesh, tuple | list) else getattr(mesh, "shape", None)
    if not isinstance(sizes, tuple) or not all(type(size) is int for size in sizes):
        raise ArgumentTypeError(
            f"FSDPStrategy(device_mesh={mesh!r})",
            f"{type(mesh).__name__} is no mesh",
            "a tuple of sizes (replicas, shards) for HYBRID_SHARD, or a torch DeviceMesh",
            'FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))',
        )
    dimensions = 2 if sharding_strategy == "HYBRID_SHARD" else 1
    if len(sizes) != dimensions or min(sizes) < 1:
        raise ConfigurationError(
            f"FSDPStrategy(sharding_strategy={sharding_strategy!r}, device_mesh={sizes})",
            f"{sharding_strategy} takes a mesh of {dimensions} dimension(s), each of size 1 or more",
            "(replicas, shards) for HYBRID_SHARD, (shards,) for the others, or None",
            'FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))',
        )
    if isinstance(mesh, tuple | list):
        return sizes
    if dimensions == 2 and not mesh.mesh_dim_names:
        raise ConfigurationError(
            f"FSDPStrategy(device_mesh={mesh!r})",
            "its dimensions have no names, which torch needs to tell replicas from shards",
            "a mesh with mesh_dim_names, the replicas first",
            f'init_device_mesh({mesh.device_type!r}, {sizes}, mesh_dim_names=("replicas", "shards"))',
        )
    return mesh


def check_world(mesh: "tuple[int, ...] | DeviceMesh | None", world_size: int) -> None:
    """Raise a ConfigurationError unless the sizes of the mesh multiply to the number of processes."""
    sizes = (world_size,) if mesh is None else mesh if isinstance(mesh, tuple) else tuple(mesh.shape)
    if torch.Size(sizes).numel() != world_size:
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        meshes = [(world_size // shards, shards) for shards in divisors] if len(sizes) == 2 else [(world_size,)]
        raise ConfigurationError(
            f"FSDPStrategy(device_mesh={sizes}) in a job of {world_size} processes",
            f"a mesh of these sizes has {torch.Size(sizes).numel()} places",
            f"sizes that divide {world_size}, that is {', '.join(map(str, divisors))}: {', '.join(map(str, meshes))}",
            f"FSDPStrategy(..., device_mesh={meshes[len(meshes) // 2]})",
        )


def parse_cpu_offload(value: Any) -> "CPUOffloadPolicy | None":
    """The policy of offloading, or None: from a bool, ``CPUOffloadPolicy``, or ``CPUOffload`` of torch's first FSDP.

    Raises:
        ArgumentTypeError: it is something else.
    """
    if value is None:
        return None
    # torch.distributed.fsdp takes a second to import.
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    value = getattr(value, "offload_params", value)  # of CPUOffload
    if isinstance(value, bool):
        value = CPUOffloadPolicy() if value else OffloadPolicy()
    if isinstance(value, OffloadPolicy):
        return value if isinstance(value, CPUOffloadPolicy) else None
    raise ArgumentTypeError(
        f"FSDPStrategy(cpu_offload={value!r})",
        f"{type(value).__name__} is no policy of offloading",
        "True, False, None, CPUOffloadPolicy or CPUOffload of torch.distributed.fsdp",
        "FSDPStrategy(cpu_offload=True)",
    )


def parse_mixed_precision(value: Any) -> "tuple[MixedPrecisionPolicy | None, torch.dtype | None]":
    """The policy that was given, or None, and the dtype that floating buffers are to have, or None.

    ``MixedPrecision`` of torch's first FSDP is translated: there the blocks cast their inputs only when asked to; here
    they do whenever any module does.

    Raises:
        ArgumentTypeError: it is neither of torch's two classes.
        ConfigurationError: it asks for gradients that stay in low precision, which FSDP2 has not.
    """
    if value is None:
        return None, None
    # torch.distributed.fsdp takes a second to import.
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    if isinstance(value, MixedPrecisionPolicy):
        return value, None
    if not isinstance(value, MixedPrecision):
        raise ArgumentTypeError(
            f"FSDPStrategy(mixed_precision={value!r})",
            f"{type(value).__name__} is no policy of mixed precision",
            "MixedPrecisionPolicy or MixedPrecision of torch.distributed.fsdp, or None for what precision says",
            'Fabric(strategy="fsdp", precision="bf16-mixed")',
        )
    if value.keep_low_precision_grads:
        raise ConfigurationError(
            "FSDPStrategy(mixed_precision=MixedPrecision(keep_low_precision_grads=True))",
            "FSDP2 keeps gradients in the dtype of the parameters that the optimizer sees",
            "keep_low_precision_grads=False",
            'Fabric(strategy="fsdp", precision="bf16-true") for parameters and gradients in low precision',
        )
    policy = MixedPrecisionPolicy(
        param_dtype=value.param_dtype,
        reduce_dtype=value.reduce_dtype,
        cast_forward_inputs=value.cast_forward_inputs or value.cast_root_forward_inputs,
    )
    return policy, value.buffer_dtype


def parse_backward_prefetch(value: Any) -> int | None:
    """How many FSDP modules ahead are gathered in the backward pass; None leaves it to torch, which is the next one.

    ``BackwardPrefetch.BACKWARD_PRE`` is 1. ``BACKWARD_POST``, which keeps one FSDP module unsharded at a time, is 0.

    Raises:
        ConfigurationError: it is no such number.
    """
    number = {"BACKWARD_PRE": 1, "BACKWARD_POST": 0}.get(getattr(value, "name", ""), value)
    if number is None or (type(number) is int and number >= 0):
        return number
    raise ConfigurationError(
        f"FSDPStrategy(backward_prefetch={value!r})",
        "it is no number of modules to gather ahead",
        "BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, an integer from 0, or None",
        "FSDPStrategy(backward_prefetch=2)",
    )


def check_fsdp_kwargs(fsdp_kwargs: Mapping[str, Any]) -> None:
    """Raise an ArgumentTypeError for what ``fully_shard`` does not take, or the strategy decides."""
    if not fsdp_kwargs:
        return
    # torch.distributed.fsdp takes a second to import.
    from torch.distributed.fsdp import fully_shard

    check_passed_on("FSDPStrategy", fully_shard, fsdp_kwargs, _OWN_ARGUMENTS)

"""Tensor parallelism combined with sharding, on one mesh of processes.

[Note: Mesh] The dimensions, from the outer to the inner: ``replicate`` (copies of all shards),
``data_parallel`` (other batches, and a shard of each parameter), ``sequence`` (parts of the
sequences of a batch, and a shard of each parameter) and ``tensor_parallel`` (parts of layers). The
first and the third exist only if their size is more than 1. Ranks that differ only in the last two
have the same batch, and the same random streams for it.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from typing_extensions import override

from fabric._torch import (
    concatenate_meshes,
    local_tensor,
    real_tensors,
    registered_parameters,
    uncompiled,
)
from fabric.accelerators import Accelerator
from fabric.communicators import Communicator
from fabric.contract import GradientContract
from fabric.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.runtime import Runtime
from fabric.seed import rng_state, set_rng_state
from fabric.strategies.fsdp.api import FSDPStrategy
from fabric.strategies.fsdp.sharding import receive_values, shard_module
from fabric.strategies.tp_plan import (
    PartRandomStreams,
    check_styles,
    find_head_attributes,
    find_layers,
    is_split,
    torch_styles,
)

__all__ = ["ModelParallelStrategy", "mesh_sizes"]


def mesh_sizes(
    requested: Mapping[str, Any], splits_layers: bool, world_size: int, local_world_size: int
) -> dict[str, int]:
    """Return the sizes of the dimensions of the mesh, with a number for each ``"auto"``.

    Args:
        requested: for each dimension, in their order, a size or ``"auto"``. See ``[Note: Mesh]``.
        splits_layers: whether a plan or a function says how layers are split.
        world_size: the number of processes.
        local_world_size: the number of processes of each node.

    Raises:
        ConfigurationError: the product of the sizes is not the number of processes, or nothing says
            how layers are split.
    """
    sizes = dict(requested)
    explicit = prod(size for size in sizes.values() if size != "auto")
    remaining = max(1, world_size // (explicit or 1))
    if sizes["tensor_parallel"] == "auto":
        if sizes["data_parallel"] != "auto":
            sizes["tensor_parallel"] = remaining
        elif splits_layers:
            # Parts of layers exchange most data, and so are on one node.
            sizes["tensor_parallel"] = gcd(local_world_size, remaining)
        else:
            sizes["tensor_parallel"] = 1
        remaining //= sizes["tensor_parallel"]
    for name, size in sizes.items():
        if size == "auto":
            sizes[name] = remaining

    request = f"ModelParallelStrategy with {dict(requested)} in a job of {world_size} processes"
    factors = " x ".join(f"{name} {size}" for name, size in sizes.items())
    product = prod(sizes.values())
    if product != world_size:
        raise ConfigurationError(
            request,
            problem=f"{factors} = {product}, and not {world_size}",
            expected=f'sizes whose product is {world_size}; "auto" is what the other sizes leave',
        )
    if sizes["tensor_parallel"] > 1 and not splits_layers:
        raise ConfigurationError(
            request,
            problem=f"nothing says how layers are split in {factors} = {product}",
            expected="parallelize_fn= or tp_plan=",
        )
    return sizes


@dataclass(frozen=True)
class _Topology:
    """The mesh of a job, and the communicators along it. See ``[Note: Mesh]``.

    Attributes:
        mesh: the whole mesh.
        shard_mesh: the part of the mesh that parameters are sharded over, in its last dimension.
        tensor_parallel_size: in how many parts layers are split.
        loss: the ranks with different data. Ranks along ``sequence`` have different tokens.
        data_parallel: the ranks that read different batches.
        same_batch: the ranks that read the same batch.
    """

    mesh: DeviceMesh
    shard_mesh: DeviceMesh
    tensor_parallel_size: int
    loss: Communicator
    data_parallel: Communicator
    same_batch: Communicator


class ModelParallelStrategy(FSDPStrategy):
    """Tensor parallelism, data parallelism and sharding of parameters, on one mesh of processes.

    The numbers are those of the single process, whatever the mesh, which is
    :attr:`fabric.Fabric.device_mesh`. Parameters, gradients and optimizer state are sharded over
    ``data_parallel`` and ``sequence`` together, as under :class:`fabric.strategies.FSDPStrategy`,
    whose promises hold. What several ranks compute of a batch counts once in sums over all
    processes and in metrics. A model's code sees its parts: ``view(batch, length, -1, width)`` for
    this rank's heads. A layer with concatenated outputs, such as a gate and the values that the
    gate multiplies, cannot be split this way: write one layer for each.

    Args:
        parallelize_fn: ``(model, mesh) -> model``, which splits layers by torch's
            ``parallelize_module`` along ``mesh["tensor_parallel"]``. It may apply ``fully_shard``
            along ``mesh["data_parallel"]``. A model without FSDP modules is sharded as by
            ``"fsdp"``.
        data_parallel_size: the number of shards, each with other data. ``"auto"`` is what the other
            sizes leave.
        tensor_parallel_size: in how many parts layers are split. ``"auto"`` is the number of
            processes of a node, and 1 if nothing is to be split.
        replicate_size: the number of copies of all shards, as under ``HYBRID_SHARD``.
        sequence_parallel_size: the number of ranks that have parts of the same sequences.
        tp_plan: how layers are split, in place of ``parallelize_fn``: a style for each pattern of
            layer names, as libraries of models write it:
            ``{"blocks.*.attention.query": "colwise", "blocks.*.attention.out": "rowwise"}``. The
            styles are ``"colwise"``, ``"rowwise"``, ``"colwise_rep"`` (with a whole output),
            ``"rowwise_rep"`` (of a whole input), ``"sequence_parallel"`` (a norm computed in parts
            of dim 1), or a ``ParallelStyle`` of torch. ``"auto"`` takes the plan that the model
            has. An attribute that counts heads, in a module with ``"colwise"`` layers, becomes the
            number of this rank's heads.
        **options: those of :class:`fabric.strategies.FSDPStrategy`, without ``device_mesh`` and
            ``HYBRID_SHARD``.

    Raises:
        ArgumentTypeError: an option has an unsupported type.
        ConfigurationError: options that cannot work.
    """

    name = "model_parallel"

    def __init__(
        self,
        parallelize_fn: Callable[[Any, DeviceMesh], Any] | None = None,
        data_parallel_size: int | str = "auto",
        tensor_parallel_size: int | str = "auto",
        replicate_size: int = 1,
        sequence_parallel_size: int = 1,
        tp_plan: Mapping[str, Any] | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        is_hybrid = self.sharding_strategy not in ("FULL_SHARD", "SHARD_GRAD_OP")
        if self.device_mesh is not None or is_hybrid:
            raise ConfigurationError(
                "ModelParallelStrategy(device_mesh=..., "
                f"sharding_strategy={self.sharding_strategy!r})",
                suggestion="replicate_size=2 for two copies of all shards",
            )
        is_plan = tp_plan in (None, "auto") or isinstance(tp_plan, Mapping)
        if not is_plan or (parallelize_fn and tp_plan):
            raise ArgumentTypeError(
                f"ModelParallelStrategy({parallelize_fn=}, {tp_plan=})",
                expected='a function, or a plan: a dict by pattern, or "auto"',
            )
        check_styles(tp_plan)
        self.parallelize_fn = parallelize_fn
        self.tp_plan = tp_plan
        self._requested_sizes = {
            "replicate": replicate_size,
            "data_parallel": data_parallel_size,
            "sequence": sequence_parallel_size,
            "tensor_parallel": tensor_parallel_size,
        }
        # Set while the runtime runs.
        self._topology: _Topology | None = None
        # While a model is set up: the layers that are still to be split, each with its style, and
        # the original parameter of each one that has been split.
        self._layers: dict[nn.Module, Any] = {}
        self._originals: dict[nn.Parameter, nn.Parameter] = {}

    # -- the process ----------------------------------------------------------------------------

    @override
    def check(
        self, *, accelerator: Accelerator, devices: tuple[torch.device, ...], num_nodes: int
    ) -> None:
        self._mesh_sizes(len(devices) * num_nodes, len(devices))

    @override
    def setup_environment(self, runtime: Runtime | None = None) -> None:
        super().setup_environment(runtime)
        self._topology = self._build_topology()

    def _mesh_sizes(self, world_size: int, local_world_size: int) -> dict[str, int]:
        splits_layers = self.parallelize_fn is not None or self.tp_plan is not None
        return mesh_sizes(self._requested_sizes, splits_layers, world_size, local_world_size)

    def _build_topology(self) -> _Topology:
        """Make the mesh and its groups. Collective."""
        world_size = self.world_size
        sizes = self._mesh_sizes(world_size, world_size // self.runtime.world.num_nodes)
        tensor_parallel_size = sizes["tensor_parallel"]
        dimensions: dict[str, int] = {}
        for name, size in sizes.items():
            if size > 1 or name in ("data_parallel", "tensor_parallel"):
                dimensions[name] = size
        mesh = self.runtime.mesh(**dimensions)

        sharded = ("data_parallel", "sequence")
        if "sequence" not in dimensions:
            sharded = ("data_parallel",)
        shard_meshes = [mesh[sharded]]
        if "replicate" in dimensions:
            shard_meshes.insert(0, mesh["replicate"])

        # Most often these are the mesh itself, and no groups are made.
        ranks_with_same_data = tensor_parallel_size
        ranks_with_same_batch = tensor_parallel_size * sizes["sequence"]
        loss_mesh = self._two_dimensional_mesh(ranks_with_same_data)
        batch_mesh = self._two_dimensional_mesh(ranks_with_same_batch)
        return _Topology(
            mesh=mesh,
            shard_mesh=concatenate_meshes(shard_meshes, self.runtime.timeout),
            tensor_parallel_size=tensor_parallel_size,
            loss=self._communicator_along(loss_mesh["data_parallel"]),
            data_parallel=self._communicator_along(batch_mesh["data_parallel"]),
            same_batch=self._communicator_along(batch_mesh["tensor_parallel"]),
        )

    def _two_dimensional_mesh(self, inner_size: int) -> DeviceMesh:
        """Return a mesh of all ranks whose inner dimension, of neighboring ranks, has this size."""
        outer_size = self.world_size // inner_size
        return self.runtime.mesh(data_parallel=outer_size, tensor_parallel=inner_size)

    def _communicator_along(self, dimension: DeviceMesh) -> Communicator:
        return self.runtime.communicator_over(dimension.get_group())

    @override
    def teardown(self) -> None:
        self._topology = None
        super().teardown()

    @override
    def _loss_communicator(self) -> Communicator:
        if self._topology is None:
            return self.communicator()
        return self._topology.loss

    @override
    def _data_parallel_communicator(self) -> Communicator:
        if self._topology is None:
            return self.communicator()
        return self._topology.data_parallel

    @override
    def _synchronize_rng(self) -> None:
        same_batch = self._started.same_batch
        if same_batch.size > 1:
            with real_tensors():  # in a dry run, too
                set_rng_state(same_batch.broadcast_object(rng_state(), 0))

    @property
    def _started(self) -> _Topology:
        """The topology of a strategy whose runtime runs."""
        assert self._topology is not None
        return self._topology

    # -- setup ----------------------------------------------------------------------------------

    @override
    def _checked_plan(self, root: nn.Module) -> object:
        on_mesh: list[str] = []
        for name, parameter in root.named_parameters():
            is_dtensor = local_tensor(parameter) is not parameter
            if is_dtensor:
                on_mesh.append(name)
        if on_mesh:
            raise UsageError(
                f"setup({type(root).__name__})",
                problem=f"parameters are on a mesh already: {', '.join(on_mesh)}",
                suggestion="ModelParallelStrategy(parallelize_fn=...), with the function that puts "
                "the parameters on the mesh",
            )
        layers = self._find_layers(root)
        # Called for its error. FSDP itself has no plan.
        super()._checked_plan(root)
        plan: list[tuple[str, str]] = []
        for name, module in root.named_modules():
            if module in layers:
                # A style of the user's own may be shown with its address, which differs by rank.
                style = str(layers[module]).partition(" at 0x")[0]
                plan.append((name, style))
        return plan

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        root = uncompiled(module)
        topology = self._started
        self._synchronize_rng()
        self._layers = self._find_layers(root)
        self._originals = {}
        for heads in list(find_head_attributes(root, self._layers)):
            setattr(heads.module, heads.attribute, heads.value // topology.tensor_parallel_size)
        if self.parallelize_fn is not None:
            self._parallelize(root, self.parallelize_fn, topology.mesh)
        prepared = super().setup_module(module)
        self._originals = {}
        if topology.tensor_parallel_size > 1:
            PartRandomStreams(root, topology.mesh, requires_rowwise=self.tp_plan is not None)
        return prepared

    @override
    def gradient_contract(self, prepared: nn.Module) -> GradientContract:
        topology = self._started
        rank = self.global_rank
        # The ranks of one copy of the model follow each other.
        copy_size = topology.shard_mesh.size(-1) * topology.tensor_parallel_size
        first = rank // copy_size * copy_size
        ranks = range(first, first + copy_size)
        contract = replace(super().gradient_contract(prepared), peers=lambda: ranks)
        is_in_first_group = rank < topology.tensor_parallel_size
        if topology.tensor_parallel_size == 1 or not is_in_first_group:
            # One group of ranks is enough to see a mistake, and all would fill the store.
            return contract
        replicated: dict[str, Any] = {}
        for name, parameter in contract.parameters().items():
            if not is_split(parameter):
                replicated[name] = parameter
        return replace(contract, replicated=lambda: replicated, scope="parts of layers")

    @override
    def _find_fsdp_modules(self, root: nn.Module) -> list[nn.Module]:
        by_parallelize_fn: list[nn.Module] = []
        for module in root.modules():
            is_fsdp_module = hasattr(module, "set_requires_gradient_sync")
            if is_fsdp_module and module is not root:
                by_parallelize_fn.append(module)
        if by_parallelize_fn:
            return by_parallelize_fn[::-1]
        return super()._find_fsdp_modules(root)

    @override
    def _shard_module(self, module: nn.Module, **arguments: Any) -> None:
        self._split_layers(module)
        originals: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters():
            if parameter in self._originals:
                originals[name] = self._originals[parameter]
        shard_module(self.runtime.communicator, module, originals, **arguments)

    def _split_layers(self, module: nn.Module) -> None:
        """Split the layers in a module that are not split yet, with rank 0's values. Collective."""
        from torch.distributed.tensor.parallel import parallelize_module  # takes a second to import

        mesh = self._started.mesh["tensor_parallel"]
        # By the original parameter: layers that had one parameter in common still do.
        split_parameters: dict[nn.Parameter, nn.Parameter] = {}
        for layer in module.modules():
            if layer not in self._layers:
                continue
            originals = dict(layer.named_parameters(recurse=False))
            new_originals = [value for value in originals.values() if value not in split_parameters]
            receive_values(self.runtime.communicator, module, new_originals)
            for style in torch_styles(layer, self._layers.pop(layer)):
                parallelize_module(layer, mesh, style, src_data_rank=None)
            parameters = registered_parameters(layer)
            for name, original in originals.items():
                parameter = split_parameters.setdefault(original, layer.get_parameter(name))
                parameters[name] = parameter
                self._originals[parameter] = original

    @override
    def _shard_mesh(self) -> DeviceMesh:
        return self._started.shard_mesh

    def _find_layers(self, root: nn.Module) -> dict[nn.Module, Any]:
        """Return the layers to split, each with its style. Raise if the plan does not fit."""
        if self.tp_plan is None:
            return {}
        size = self._started.tensor_parallel_size
        layers = find_layers(root, self.tp_plan, size)
        if size == 1:
            return {}
        return layers

    def _parallelize(
        self,
        root: nn.Module,
        parallelize_fn: Callable[[Any, DeviceMesh], Any],
        mesh: DeviceMesh,
    ) -> None:
        """Have the user's function split a model that has rank 0's values. Collective."""
        communicator = self.runtime.communicator
        before = dict(root.named_parameters())
        receive_values(communicator, root, list(before.values()))
        result = parallelize_fn(root, mesh)
        after = dict(root.named_parameters())
        error = _check_parallelized(root, result, before.keys(), after)
        communicator.gather_objects(None, error=error)
        for name, parameter in after.items():
            if parameter is not before[name]:
                self._originals[parameter] = before[name]


def _check_parallelized(
    root: nn.Module,
    result: object,
    names: Set[str],
    parameters: Mapping[str, nn.Parameter],
) -> UsageError | None:
    """Return an error unless ``parallelize_fn`` split the model in place. Not a collective.

    Args:
        root: the model.
        result: what ``parallelize_fn`` returned.
        names: the names of the model's parameters before.
        parameters: the model's parameters after.
    """
    wrong = sorted(names ^ parameters.keys())
    for name, parameter in parameters.items():
        if parameter.is_meta:
            wrong.append(f"{name} on meta")
    if result is root and not wrong:
        return None
    return UsageError(
        f"parallelize_fn({type(root).__name__}, mesh), which returned a {type(result).__name__}",
        problem="these parameters were added, removed or untied, or have no values: "
        f"{', '.join(sorted(wrong)) or 'none'}",
        expected="the model itself, with all its parameters, split in place",
    )

"""Tensor parallelism combined with sharding, on one mesh of processes."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd, prod
from typing import Any

import torch
from torch import nn
from torch.compiler import config as compiler_config
from torch.distributed import DeviceMesh, get_backend
from typing_extensions import override

from fabric._torch import (
    concatenate_meshes,
    is_dtensor,
    is_fsdp_module,
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
from fabric.strategies.agreement import AgreeingCollectives
from fabric.strategies.fsdp.api import FSDPStrategy
from fabric.strategies.fsdp.sharding import (
    prepare_unsharded_module,
    receive_values,
    shard_module,
)
from fabric.strategies.split_comparison import SplitComparison, copy_without_values
from fabric.strategies.tp_plan import (
    PartRandomStreams,
    check_styles,
    find_head_attributes,
    find_layers_to_split,
    find_modules,
    find_partial_gradients,
    has_whole_output,
    is_split,
    lines_of_plan,
    refuse_second_derivatives,
    sum_over_parts,
    sum_partial_dtensors,
    torch_styles,
)

__all__ = ["ModelParallelStrategy", "mesh_sizes"]


# [Note: Mesh]
# The dimensions of the mesh, from the outer to the inner one:
#
# - `replicate`: copies of all shards.
# - `data_parallel`: different batches, and a shard of each parameter.
# - `sequence`: parts of the sequences of a batch, and a shard of each parameter.
# - `tensor_parallel`: parts of layers.
#
# `replicate` and `sequence` exist only if their size is more than 1. Ranks that differ only in
# `sequence` and `tensor_parallel` have the same batch, and the same random streams for the batch.
def mesh_sizes(
    requested: Mapping[str, Any], splits_layers: bool, world_size: int, local_world_size: int
) -> dict[str, int]:
    """Return the sizes of the dimensions of the mesh, with a number for each ``"auto"``.

    Called before the processes run, to refuse sizes, and again when they run.

    Args:
        requested: for each dimension, in their order, a size or ``"auto"``.
        splits_layers: whether the user passed a plan or a function that splits layers.
        world_size: the number of processes.
        local_world_size: the number of processes of each node.

    Raises:
        ConfigurationError: the product of the sizes is not the number of processes, or layers are
            to be split and ``splits_layers`` is false.
    """
    sizes = _replace_auto(requested, splits_layers, world_size, local_world_size)
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


def _replace_auto(
    requested: Mapping[str, Any], splits_layers: bool, world_size: int, local_world_size: int
) -> dict[str, int]:
    """Return the requested sizes with a number for each ``"auto"``.

    Called by :func:`mesh_sizes`, which refuses the result if its product is not ``world_size``.

    Args:
        requested: the size of each dimension of the mesh, a number or ``"auto"``.
        splits_layers: whether the user has a plan or a function that splits layers.
        world_size: the number of processes.
        local_world_size: the number of processes on this node.
    """
    sizes = dict(requested)
    explicit_product = prod(size for size in sizes.values() if size != "auto")
    # The number of processes that the explicit sizes leave for "auto". With any other product, the
    # caller refuses the sizes.
    remaining = 1
    if 0 < explicit_product <= world_size:
        remaining = world_size // explicit_product
    if sizes["tensor_parallel"] == "auto":
        if sizes["data_parallel"] != "auto":
            sizes["tensor_parallel"] = remaining
        elif splits_layers:
            # The parts of a layer exchange the most data, and so they should be on one node.
            sizes["tensor_parallel"] = gcd(local_world_size, remaining)
        else:
            sizes["tensor_parallel"] = 1
        remaining //= sizes["tensor_parallel"]
    # Usually only data_parallel is still "auto". If several sizes are, the caller refuses them.
    for name, size in sizes.items():
        if size == "auto":
            sizes[name] = remaining
    return sizes


def _check_sizes(requested: Mapping[str, Any]) -> None:
    """Raise an ArgumentTypeError for a size of the mesh that is not a number of processes.

    Args:
        requested: the size of each dimension. A size of 0 is left to :func:`mesh_sizes`, whose
            error has all sizes.
    """
    for name, size in requested.items():
        # type() and not isinstance(): True is an int, but not a size.
        is_number = type(size) is int and size >= 0
        if not is_number and size != "auto":
            argument = f"{name}_size"
            if name == "sequence":
                argument = "sequence_parallel_size"
            raise ArgumentTypeError(
                f"ModelParallelStrategy({argument}={size!r})",
                problem=f"the mesh cannot have {size!r} processes along {name}",
                expected='a whole number of at least 1, or "auto" for what the other sizes leave',
            )


# See [Note: Mesh].
@dataclass(frozen=True)
class _Topology:
    """The mesh of a job and communicators along the mesh.

    Attributes:
        mesh: the whole mesh.
        shard_mesh: the part of the mesh over whose last dimension parameters are sharded.
        tensor_parallel_mesh: the part of the mesh along which layers are split. All layers get this
            one object, because torch.compile fails for layers with meshes that are equal but not
            the same object.
        tensor_parallel_size: the number of parts into which layers are split.
        distinct_samples: the ranks with different samples. Ranks along ``sequence`` have different
            tokens of a sample, and count as different.
        data_parallel: the ranks that read different batches.
        same_batch: the ranks that read the same batch.
    """

    mesh: DeviceMesh
    shard_mesh: DeviceMesh
    tensor_parallel_mesh: DeviceMesh
    tensor_parallel_size: int
    distinct_samples: Communicator
    data_parallel: Communicator
    same_batch: Communicator


@dataclass(eq=False)
class _Split:
    """The split of the layers of one model while the model is set up.

    Attributes:
        root: the model.
        unsplit_layers: the layers that are still to be split, each with its style.
        originals: for each split parameter, the user's parameter that it has replaced.
    """

    root: nn.Module
    unsplit_layers: dict[nn.Module, Any]
    originals: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)


class ModelParallelStrategy(FSDPStrategy):
    """Tensor parallelism, data parallelism and sharding of parameters, on one mesh of processes.

    The numbers are those of a single process, whatever the sizes of the mesh. Users get the mesh
    from :attr:`fabric.Fabric.device_mesh`. Parameters, gradients and optimizer state are sharded
    over ``data_parallel`` and ``sequence`` together, as by
    :class:`fabric.strategies.FSDPStrategy`. If several ranks compute the same value of a batch, the
    value counts once in sums over all processes and in metrics.

    The code of a model sees the parts of its layers. In attention, for example,
    ``view(batch, length, -1, width)`` gives this rank's heads. A layer with concatenated outputs,
    such as a gate and the values that the gate multiplies, cannot be split: write two layers.

    Args:
        parallelize_fn: ``(model, mesh) -> model``, which splits layers by torch's
            ``parallelize_module`` along ``mesh["tensor_parallel"]``. It may apply ``fully_shard``
            along ``mesh["data_parallel"]``. A model without FSDP modules is sharded as by
            ``"fsdp"``. Take ``mesh["tensor_parallel"]`` once if the model is compiled: each access
            makes a new object, and ``torch.compile`` needs the same object in all layers.
        data_parallel_size: the number of shards, each with other data. ``"auto"`` takes all
            processes that the other sizes leave.
        tensor_parallel_size: the number of parts into which layers are split. ``"auto"`` is the
            number of processes of a node, and 1 if no layers are to be split.
        replicate_size: the number of copies of all shards, as under ``HYBRID_SHARD``.
        sequence_parallel_size: the number of ranks that have parts of the same sequences.
        tp_plan: how layers are split, in place of ``parallelize_fn``. The plan is a dict with a
            style for each pattern of layer names, as libraries of models write it:
            ``{"blocks.*.attention.query": "colwise", "blocks.*.attention.out": "rowwise"}``. The
            styles are ``"colwise"``, ``"rowwise"``, ``"colwise_rep"`` (its output is whole),
            ``"rowwise_rep"`` (its input is whole), ``"sequence_parallel"`` (a norm that is computed
            in parts of dim 1), ``"replicated_with_grad_allreduce"`` (a layer on this rank's heads,
            whose gradients are added up over the parts; a norm of each head needs no such line),
            ``"moe_tp_experts"`` (experts, of which each rank has some), ``"mla_kv_a_proj"`` (the
            projection to latent keys and values), or a ``ParallelStyle`` of torch. ``"auto"``
            takes the model's own plan. An attribute that counts heads, in a module with
            ``"colwise"`` layers, becomes the number of this rank's heads.
        not_compared: patterns of names of modules that are meant to compute something else when
            they are split. The first forward pass, which compares split with whole modules, leaves
            these out.
        **options: the options of :class:`fabric.strategies.FSDPStrategy` except ``device_mesh`` and
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
        *,
        not_compared: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """Check the options and keep them. No process runs yet."""
        super().__init__(**options)
        # Under all but these two strategies, ranks hold copies of the same shards.
        has_replicas = self._sharding not in ("FULL_SHARD", "SHARD_GRAD_OP")
        if self.device_mesh is not None or has_replicas:
            raise ConfigurationError(
                f"ModelParallelStrategy(device_mesh=..., sharding_strategy={self._sharding!r})",
                suggestion="replicate_size=2 for two copies of all shards",
            )
        requested_sizes = {
            "replicate": replicate_size,
            "data_parallel": data_parallel_size,
            "sequence": sequence_parallel_size,
            "tensor_parallel": tensor_parallel_size,
        }
        _check_sizes(requested_sizes)
        is_valid_plan = tp_plan in (None, "auto") or isinstance(tp_plan, Mapping)
        has_both = parallelize_fn is not None and bool(tp_plan)
        if not is_valid_plan or has_both:
            raise ArgumentTypeError(
                f"ModelParallelStrategy({parallelize_fn=}, {tp_plan=})",
                expected='a function, or a plan: a dict by pattern, or "auto"',
            )
        check_styles(tp_plan)
        self.parallelize_fn = parallelize_fn
        self.tp_plan = tp_plan
        self.not_compared = _parse_patterns(not_compared)
        self._requested_sizes = requested_sizes
        # None unless the runtime runs.
        self._topology: _Topology | None = None
        # The user's tag for torch's cache of compiled graphs. None unless the tag has been changed.
        self._user_cache_key_tag: str | None = None
        # The split of the model that is being set up. setup_module() sets it for _shard_module(),
        # which FSDPStrategy calls. None at other times.
        self._split: _Split | None = None
        # The number of models that were set up. All ranks set up the same models, so keys in the
        # store with this number are the same on all ranks.
        self._num_models = 0
        # The comparison of the last split model with the whole one. gradient_contract() takes it.
        self._comparison: SplitComparison | None = None

    # -- the process ----------------------------------------------------------------------------

    @override
    def check(
        self, *, accelerator: Accelerator, devices: tuple[torch.device, ...], num_nodes: int
    ) -> None:
        """Raise a ConfigurationError if the mesh does not fit the number of processes."""
        self._mesh_sizes(world_size=len(devices) * num_nodes, local_world_size=len(devices))

    @override
    def setup_environment(self, runtime: Runtime | None = None) -> None:
        super().setup_environment(runtime)
        self._topology = self._build_topology()
        if self._topology.tensor_parallel_size > 1:
            self._separate_compiled_graphs(self._topology.mesh)

    def _mesh_sizes(self, world_size: int, local_world_size: int) -> dict[str, int]:
        """Return the size of each dimension of the mesh, from the outer to the inner one.

        Raises:
            ConfigurationError: the requested sizes do not fit the number of processes.
        """
        splits_layers = self.parallelize_fn is not None or self.tp_plan is not None
        return mesh_sizes(self._requested_sizes, splits_layers, world_size, local_world_size)

    def _build_topology(self) -> _Topology:
        """Make the mesh and its groups. Collective."""
        world_size = self.world_size
        sizes = self._mesh_sizes(
            world_size=world_size,
            local_world_size=world_size // self.runtime.world.num_nodes,
        )
        tensor_parallel_size = sizes["tensor_parallel"]
        # Users index the mesh by these two names, and so they exist even with a size of 1.
        dimensions: dict[str, int] = {}
        for name, size in sizes.items():
            if size > 1 or name in ("data_parallel", "tensor_parallel"):
                dimensions[name] = size
        mesh = self.runtime.mesh(**dimensions)

        # Parameters are sharded over "data_parallel" and "sequence" together, which
        # concatenate_meshes() flattens to one dimension.
        sharded_dimensions = ("data_parallel",)
        if "sequence" in dimensions:
            sharded_dimensions = ("data_parallel", "sequence")
        shard_meshes = [mesh[sharded_dimensions]]
        if "replicate" in dimensions:
            # fully_shard() takes the first of two dimensions for the replicas.
            shard_meshes.insert(0, mesh["replicate"])

        # The next two meshes only group the ranks for communicators. The runtime makes equal meshes
        # only once. Most often, these two equal the mesh above.

        # Ranks along "sequence" have different tokens of the same samples. Gradients are averaged
        # over these ranks, and so they count as ranks with different samples.
        samples_mesh = self._two_dimensional_mesh(tensor_parallel_size)
        # Ranks along "sequence" read the same batch, though, as ranks along "tensor_parallel" do.
        batch_mesh = self._two_dimensional_mesh(tensor_parallel_size * sizes["sequence"])
        return _Topology(
            mesh=mesh,
            shard_mesh=concatenate_meshes(shard_meshes, self.runtime.timeout),
            tensor_parallel_mesh=mesh["tensor_parallel"],
            tensor_parallel_size=tensor_parallel_size,
            distinct_samples=self._communicator_along(samples_mesh["data_parallel"]),
            data_parallel=self._communicator_along(batch_mesh["data_parallel"]),
            same_batch=self._communicator_along(batch_mesh["tensor_parallel"]),
        )

    def _two_dimensional_mesh(self, inner_size: int) -> DeviceMesh:
        """Return a mesh of all ranks with groups of neighboring ranks. Collective.

        Args:
            inner_size: the size of the groups, which are along the inner dimension
                ``tensor_parallel``. The outer dimension is ``data_parallel``.
        """
        outer_size = self.world_size // inner_size
        return self.runtime.mesh(data_parallel=outer_size, tensor_parallel=inner_size)

    def _communicator_along(self, dimension: DeviceMesh) -> Communicator:
        """Return the communicator of this rank's group along a mesh of one dimension."""
        return self.runtime.communicator_over(dimension.get_group())

    def _separate_compiled_graphs(self, mesh: DeviceMesh) -> None:
        """Give this rank's groups an entry of their own in torch's cache of compiled graphs.

        Compiled graphs contain the names of the groups in which split layers communicate. But torch
        looks graphs up by the shapes of the mesh alone. So a rank would find a graph that another
        rank, or an earlier job, has compiled for another group (seen in torch 2.13).
        """
        names = [mesh.get_group(dimension).group_name for dimension in range(mesh.ndim)]
        self._user_cache_key_tag = compiler_config.cache_key_tag
        compiler_config.cache_key_tag = " ".join([self._user_cache_key_tag, *names])

    @override
    def teardown(self) -> None:
        if self._user_cache_key_tag is not None:
            compiler_config.cache_key_tag = self._user_cache_key_tag
            self._user_cache_key_tag = None
        self._topology = None
        super().teardown()

    @override
    def _distinct_samples_communicator(self) -> Communicator:
        """Return the ranks with different samples. Before the runtime runs, all ranks."""
        if self._topology is None:
            return self.communicator()
        return self._topology.distinct_samples

    @override
    def _data_parallel_communicator(self) -> Communicator:
        """Return the ranks that read different batches. Before the runtime runs, all ranks."""
        if self._topology is None:
            return self.communicator()
        return self._topology.data_parallel

    @override
    def _synchronize_rng(self) -> None:
        """Give the ranks that read the same batch the same random state. Collective among them."""
        same_batch = self._running_topology.same_batch
        if same_batch.size > 1:
            # In a dry run, new tensors are fake. The state must have real values there, too.
            with real_tensors():
                set_rng_state(same_batch.broadcast_object(rng_state(), 0))

    @property
    def _running_topology(self) -> _Topology:
        """The topology.

        Raises:
            UsageError: the runtime has not been started, or has been closed.
        """
        if self._topology is None:
            raise self._not_started_error()
        return self._topology

    # -- setup ----------------------------------------------------------------------------------

    @override
    def _check_model(self, root: nn.Module) -> object:
        """Check that a model can be split and sharded, and return how each layer will be split.

        Not a collective. :meth:`check_setup` compares the results of all ranks as text. With other
        layers or another order on a rank, setup would mix up the collectives of different layers.

        Returns:
            A list with the name and the style of each layer that is split.

        Raises:
            FabricError: the model is on a mesh already, does not fit the plan or cannot be sharded.
        """
        on_mesh: list[str] = []
        for name, parameter in root.named_parameters():
            if is_dtensor(parameter):
                on_mesh.append(name)
        if on_mesh:
            raise UsageError(
                f"setup({type(root).__name__})",
                problem=f"parameters are on a mesh already: {', '.join(on_mesh)}",
                suggestion="ModelParallelStrategy(parallelize_fn=...), with the function that puts "
                "the parameters on the mesh",
            )
        layers = self._find_layers_to_split(root)
        self._modules_not_compared(root)  # for its error
        super()._check_model(root)  # for its errors
        plan: list[tuple[str, str]] = []
        for name, module in root.named_modules():
            if module in layers:
                # The text of a user's ParallelStyle may end in an address, which differs by rank.
                style = str(layers[module]).partition(" at 0x")[0]
                plan.append((name, style))
        return plan

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Split and shard a module in place, and return it. Collective.

        :meth:`_shard_module` splits the layers of ``tp_plan``, one FSDP module after another. So a
        rank never holds more than one whole FSDP module. ``parallelize_fn`` splits the whole model
        at once.
        """
        root = uncompiled(module)
        topology = self._running_topology
        self._num_models += 1
        # From here on, ranks with the same batch draw the same random numbers.
        self._synchronize_rng()
        # A copy of the model, to compare the outputs of the split model with. It is made first,
        # since the steps below change the model.
        whole = None
        # Under torch's "fake" backend, as in a dry run, sums over ranks are meaningless.
        is_fake = get_backend(topology.tensor_parallel_mesh.get_group()) == "fake"
        if topology.tensor_parallel_size > 1 and not is_fake:
            whole = copy_without_values(root)
        # Comes before _prepare_heads(), which divides the numbers of heads that the search checks.
        layers = self._find_layers_to_split(root)
        self._prepare_heads(root, layers)
        split = _Split(root, unsplit_layers=dict(layers))
        if self.parallelize_fn is not None:
            split.originals = self._parallelize(root, self.parallelize_fn, topology.mesh)
        self._split = split
        prepared = super().setup_module(module)  # calls _shard_module(), which reads _split
        self._split = None
        if topology.tensor_parallel_size > 1:
            # parallelize_fn may end a part in another way than by a rowwise layer.
            streams = PartRandomStreams(topology.mesh, requires_rowwise=self.tp_plan is not None)
            streams.register_hooks(root)
            refuse_second_derivatives(root)
        if whole is not None:
            self._comparison = self._build_comparison(root, whole, layers)
        return prepared

    def _prepare_heads(self, root: nn.Module, layers: Mapping[nn.Module, Any]) -> None:
        """Adapt modules with heads, such as attention, to this rank's heads. Not a collective.

        Called before the layers are split and sharded. Parameters keep their hooks when they are.

        Args:
            root: the model, which is changed in place.
            layers: the layers that the plan splits, each with its style.
        """
        topology = self._running_topology
        # Comes first: the search reads the numbers of heads, which the loop below divides.
        partial_gradients = find_partial_gradients(root, layers)
        # Registers hooks, which sum the gradients in each backward pass.
        sum_over_parts(partial_gradients, topology.tensor_parallel_mesh)
        # A list, because setattr changes the attributes that the generator goes through.
        for heads in list(find_head_attributes(root, layers)):
            local_heads = heads.number_of_heads // topology.tensor_parallel_size
            setattr(heads.module, heads.attribute, local_heads)

    def _build_comparison(
        self, root: nn.Module, whole: nn.Module, layers: Mapping[nn.Module, Any]
    ) -> SplitComparison:
        """Return the comparison of a split model with a copy of the model from before the split.

        Args:
            root: the model, whose layers are split.
            whole: the copy.
            layers: the layers that the plan has split, each with its style.
        """
        # The line of the plan for each layer, for errors.
        lines: dict[nn.Module, str] = {}
        if self.tp_plan is not None:
            lines = lines_of_plan(root, self.tp_plan)
        whole_outputs = {layer for layer, style in layers.items() if has_whole_output(style)}
        communicator = self._communicator_along(self._running_topology.tensor_parallel_mesh)
        return SplitComparison(
            # A part of keys in the store, which must be the same on all ranks.
            name=f"split comparison {self._num_models}",
            root=root,
            whole=whole,
            communicator=communicator,
            store=self.runtime.store,
            lines=lines,
            whole_outputs=whole_outputs,
            not_compared=self._modules_not_compared(root),
        )

    def _modules_not_compared(self, root: nn.Module) -> set[nn.Module]:
        """Return the modules of the option ``not_compared``.

        Raises:
            ConfigurationError: a pattern fits no module.
        """
        request = f"ModelParallelStrategy(not_compared={self.not_compared}) for a model"
        return find_modules(root, self.not_compared, request)

    @override
    def gradient_contract(self, prepared: nn.Module) -> GradientContract:
        """Return the contract of FSDP, with the ranks and parameters that belong to this mesh.

        The ranks along ``tensor_parallel`` hold the parts of layers. Parameters that are not split
        have to be equal on these ranks, and the training checks compare them.
        """
        topology = self._running_topology
        rank = self.global_rank
        # The peers of a rank take part in its forward passes: they hold one copy of the model. The
        # ranks of a copy are consecutive, since "replicate" is the outermost dimension of the mesh.
        copy_size = topology.shard_mesh.size(-1) * topology.tensor_parallel_size
        first_rank = rank - rank % copy_size
        ranks_of_copy = range(first_rank, first_rank + copy_size)
        contract = replace(super().gradient_contract(prepared), peers=lambda: ranks_of_copy)
        if not self._shards_parameters:
            # FSDP2's mixed precision casts nothing then. Fabric enters autocast instead.
            contract = replace(contract, casts=False)
        # setup_module() has just built the comparison of this module with its unsplit copy, for the
        # first forward pass. The contract takes it over.
        if self._comparison is not None:
            contract = replace(contract, add_first_pass_checks=self._comparison.add_to)
            self._comparison = None
        if topology.tensor_parallel_size == 1:
            return contract
        # The comparison with the unsplit copy calls modules once more, in some groups only. So the
        # order in which modules are used may differ between the groups, and is not compared.
        contract = replace(contract, module_order=_unknown_order)
        # The ranks of a group along "tensor_parallel" are consecutive. Only the first group
        # compares the parameters: a mistake in the model shows in every group, and comparisons in
        # all groups would fill the store.
        is_in_first_group = rank < topology.tensor_parallel_size
        if is_in_first_group:
            contract = _with_compared_parameters(contract, range(topology.tensor_parallel_size))
        return contract

    @override
    def _find_fsdp_modules(self, root: nn.Module) -> list[nn.Module]:
        """Return the FSDP modules of a model, inner before outer, without the root.

        If ``parallelize_fn`` has called ``fully_shard`` for some modules, only these are returned.
        """
        modules_of_parallelize_fn: list[nn.Module] = []
        for module in root.modules():
            if is_fsdp_module(module) and module is not root:
                modules_of_parallelize_fn.append(module)
        if modules_of_parallelize_fn:
            modules_of_parallelize_fn.reverse()  # modules() yields outer modules first
            return modules_of_parallelize_fn
        return super()._find_fsdp_modules(root)

    @override
    def _shard_module(self, module: nn.Module, **arguments: Any) -> None:
        """Split the layers of a module, and then make the module an FSDP module. Collective.

        Called for inner modules first, and for the root last. If parameters are not sharded, the
        module only gets rank 0's values.

        Args:
            module: the module.
            **arguments: the arguments of ``fully_shard``.
        """
        split = self._split
        assert split is not None  # setup_module() has set it
        self._split_layers(split, module)
        # The user's parameters that splitting has replaced. Both calls below free them.
        originals: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters():
            if parameter in split.originals:
                originals[name] = split.originals[parameter]
        communicator = self.runtime.communicator
        if self._shards_parameters:
            shard_module(communicator, module, originals, **arguments)
            return
        prepare_unsharded_module(
            communicator,
            module,
            originals,
            is_root=module is split.root,
            mesh=self._shard_mesh(),
        )
        if module is split.root:
            # Adds up the partial gradients of the ranks, as FSDP does for sharded parameters.
            sum_partial_dtensors(module.parameters())

    @property
    @override
    def _shards_parameters(self) -> bool:
        """Whether FSDP2 shards parameters.

        With one rank to shard over, sharding would only cost time. But FSDP2 also does the mixed
        precision and the offloading to the CPU that the user's options ask for.
        """
        needs_fsdp = self.mixed_precision is not None or self._offloads_to_cpu
        return self._shard_mesh().size() > 1 or needs_fsdp

    def _split_layers(self, split: _Split, module: nn.Module) -> None:
        """Split the layers in a module that are not split yet, with rank 0's values. Collective.

        Args:
            split: the split of the model. The layers are taken out of ``unsplit_layers``, and the
                user's parameters are added to ``originals``.
            module: the model, or an FSDP module in it.
        """
        from torch.distributed.tensor.parallel import parallelize_module  # takes a second to import

        mesh = self._running_topology.tensor_parallel_mesh
        # The split parameter of each original one. Layers that shared an original have to share
        # the split parameter, too.
        split_parameters: dict[nn.Parameter, nn.Parameter] = {}
        for layer in module.modules():
            if layer not in split.unsplit_layers:
                continue
            originals = dict(layer.named_parameters(recurse=False))
            # An original that an earlier layer shares got rank 0's values with that layer.
            new_originals = [value for value in originals.values() if value not in split_parameters]
            receive_values(self.runtime.communicator, module, new_originals)
            # In place of originals on the meta device, the module now holds other parameters with
            # the values. A later layer that shares an original is recognized by these parameters.
            received = dict(layer.named_parameters(recurse=False))
            # Taken out: this method is called again for each FSDP module around this one, and must
            # not split the layer twice.
            style_of_plan = split.unsplit_layers.pop(layer)
            for style in torch_styles(layer, style_of_plan):
                # Without a source rank, torch sends nothing: this rank has rank 0's values already.
                parallelize_module(layer, mesh, style, src_data_rank=None)
            registered = registered_parameters(layer)
            for name, original in originals.items():
                split_parameter = split_parameters.setdefault(original, layer.get_parameter(name))
                registered[name] = split_parameter
                split_parameters[received[name]] = split_parameter
                # The first original is the user's, and not a received parameter.
                split.originals.setdefault(split_parameter, original)

    @override
    def _shard_mesh(self) -> DeviceMesh:
        return self._running_topology.shard_mesh

    def _find_layers_to_split(self, root: nn.Module) -> dict[nn.Module, Any]:
        """Return the layers to split, each with its style. There are none without a plan.

        Raises:
            ConfigurationError: the plan does not fit the model.
        """
        if self.tp_plan is None:
            return {}
        size = self._running_topology.tensor_parallel_size
        # Called for its errors even if the size is 1, so that a plan can be tested in one process.
        layers = find_layers_to_split(root, self.tp_plan, size)
        if size == 1:
            return {}
        return layers

    def _parallelize(
        self,
        root: nn.Module,
        parallelize_fn: Callable[[Any, DeviceMesh], Any],
        mesh: DeviceMesh,
    ) -> dict[nn.Parameter, nn.Parameter]:
        """Give a model rank 0's values, and have the user's function split the model. Collective.

        Args:
            root: the model, which is changed in place.
            parallelize_fn: the user's function.
            mesh: the whole mesh.

        Returns:
            For each parameter that the function has put in place of another one, the other one.

        Raises:
            UsageError: on some rank, the function did not split the model in place, or split it
                in another way than on other ranks. Raised on all ranks.
        """
        communicator = self.runtime.communicator
        before = dict(root.named_parameters())
        receive_values(communicator, root, list(before.values()))
        key = f"parallelize_fn {self._num_models}"
        build_error = partial(_branch_error, root, self.global_rank)
        # If the function communicates differently on a rank, the ranks raise and do not hang.
        with AgreeingCollectives(key, self.runtime.store, build_error) as agreement:
            result = parallelize_fn(root, mesh)
            agreement.finish()
        after = dict(root.named_parameters())
        error = _find_error_of_split(
            root, result, names_before=before.keys(), parameters_after=after
        )
        placements: dict[str, str] = {}
        for name, parameter in after.items():
            # "None" for a plain parameter.
            placements[name] = str(getattr(parameter, "placements", None))
        # Raises the error of any rank on all ranks.
        placements_by_rank = communicator.gather_objects(placements, error=error)
        _check_same_placements(root, placements_by_rank)
        originals: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in after.items():
            if parameter is not before[name]:
                originals[parameter] = before[name]
        return originals


def _with_compared_parameters(contract: GradientContract, ranks: range) -> GradientContract:
    """Return a contract with which the training checks compare the parameters that are not split.

    Args:
        contract: the contract of a split model.
        ranks: the ranks that compare the parameters. They hold the parts of the same layers.
    """
    replicated: dict[str, Any] = {}
    for name, parameter in contract.parameters().items():
        if not is_split(parameter):
            replicated[name] = parameter
    return replace(
        contract,
        replicated=lambda: replicated,
        # Any name for the set of ranks that compare these parameters.
        scope="parts of layers",
        ranks_of_layers=ranks,
        replica_remedy="the same batch on all ranks of a layer, as set-up loaders give it; for "
        "a parameter between a colwise and a rowwise layer, a layer that has it, and the line "
        '"replicated_with_grad_allreduce" of tp_plan for this layer',
    )


def _unknown_order() -> str:
    """Return the text that stands for an unknown order of modules, which is not compared."""
    return ""


def _parse_patterns(not_compared: Sequence[str]) -> list[str]:
    """Return the patterns of the option ``not_compared``.

    Raises:
        ArgumentTypeError: the option is a string. Its letters would be taken for patterns.
    """
    if isinstance(not_compared, str):
        raise ArgumentTypeError(
            f"ModelParallelStrategy({not_compared=})",
            expected="a list of patterns of names of modules",
            suggestion=f"not_compared=[{not_compared!r}]",
        )
    return list(not_compared)


def _branch_error(root: nn.Module, rank: int, problem: str) -> UsageError:
    """Return the error if the ranks come to different collectives in ``parallelize_fn``.

    Args:
        root: the model.
        rank: the rank of this process.
        problem: what this rank and another rank do.
    """
    on_mesh: list[str] = []
    for name, parameter in root.named_parameters():
        if is_dtensor(parameter):
            on_mesh.append(name)
    return UsageError(
        f"parallelize_fn({type(root).__name__}, mesh) on rank {rank}",
        problem=f"{problem}; split here so far: {', '.join(on_mesh) or 'nothing'}",
        expected="the same layers, split in the same way and order on all ranks",
        suggestion="no branch on the rank in parallelize_fn",
    )


def _check_same_placements(root: nn.Module, placements_by_rank: list[dict[str, str]]) -> None:
    """Raise a UsageError if ``parallelize_fn`` split a model in different ways on the ranks.

    Args:
        root: the model.
        placements_by_rank: for each rank, how each parameter is split, by name.
    """
    first = placements_by_rank[0]
    for rank, placements in enumerate(placements_by_rank):
        for name, placement in placements.items():
            if placement != first[name]:
                raise UsageError(
                    f"parallelize_fn({type(root).__name__}, mesh)",
                    problem=f"{name} is split as {first[name]} on rank 0, and as {placement} on "
                    f"rank {rank}",
                    expected="the same layers, split in the same way on all ranks",
                    suggestion="no branch on the rank in parallelize_fn",
                )


def _find_error_of_split(
    root: nn.Module,
    result: object,
    *,
    names_before: Set[str],
    parameters_after: Mapping[str, nn.Parameter],
) -> UsageError | None:
    """Return an error unless ``parallelize_fn`` split the model in place. Not a collective.

    The error is returned and not raised, so that the caller can raise it on all ranks.

    Args:
        root: the model.
        result: the object that ``parallelize_fn`` returned.
        names_before: the names of the model's parameters before the call.
        parameters_after: the model's parameters after the call, by name.

    Returns:
        The error. None if the model has the same parameters as before, all with values.
    """
    request = f"parallelize_fn({type(root).__name__}, mesh)"
    if result is not root:
        return UsageError(
            f"{request}, which returned a {type(result).__name__}",
            problem="the model is split in place, and has to be returned",
            suggestion="return model, as the last line of parallelize_fn",
        )
    # Names that exist only before or only after the call. Tied parameters have one name in
    # named_parameters(), and so untying adds a name.
    wrong_names = sorted(names_before ^ parameters_after.keys())
    for name, parameter in parameters_after.items():
        if parameter.is_meta:
            wrong_names.append(f"{name} on meta")
    if not wrong_names:
        return None
    return UsageError(
        request,
        problem="these parameters were added, removed or untied, or have no values: "
        f"{', '.join(sorted(wrong_names))}",
        expected="the model itself, with all its parameters, split in place",
    )

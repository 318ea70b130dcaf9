"""Tensor parallelism combined with sharding, on one mesh of processes.

[Note: Mesh] The dimensions, from the outer to the inner: ``replicate`` (copies of all shards), ``data_parallel`` (other
batches, and a shard of each parameter), ``sequence`` (parts of the sequences of a batch, and a shard likewise) and
``tensor_parallel`` (parts of layers). The first and the third exist only if their size is more than 1. Ranks that
differ only in the last two have the same batch, and the same random streams for it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import gcd, prod
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from typing_extensions import override

from fabric._torch import joined_mesh, local_tensor, real_tensors
from fabric.accelerators import Accelerator
from fabric.communicators import Communicator
from fabric.contract import GradientContract
from fabric.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.runtime import Runtime
from fabric.seed import rng_state, set_rng_state
from fabric.strategies.base import uncompiled
from fabric.strategies.fsdp.api import FSDPStrategy
from fabric.strategies.fsdp.sharding import receive_values, shard_module
from fabric.strategies.tp_plan import (
    PartStreams,
    check_styles,
    count_heads,
    find_layers,
    is_split,
    torch_styles,
)

__all__ = ["ModelParallelStrategy", "mesh_sizes"]


def mesh_sizes(
    given: Mapping[str, Any], splits: bool, world_size: int, per_node: int
) -> dict[str, int]:
    """The dimensions of the mesh, see ``[Note: Mesh]``, with what ``"auto"`` stands for.

    Args:
        given: for each dimension, in their order, a size or ``"auto"``.
        splits: whether anything says how layers are split.
        world_size: number of processes.
        per_node: of these on each node.

    Raises:
        ConfigurationError: their product is not the number of processes, or nothing says what is split.
    """
    request = f"ModelParallelStrategy with {dict(given)} in a job of {world_size} processes"
    known = [size for size in given.values() if size != "auto"]
    rest = max(1, world_size // (prod(known) or 1))
    sizes = dict(given)
    if sizes["tensor_parallel"] == "auto":
        most = gcd(per_node, rest) if splits else 1
        sizes["tensor_parallel"] = most if sizes["data_parallel"] == "auto" else rest
        rest //= sizes["tensor_parallel"]
    sizes = {name: rest if size == "auto" else size for name, size in sizes.items()}
    product = (
        f"{' x '.join(f'{name} {size}' for name, size in sizes.items())} = {prod(sizes.values())}"
    )
    if prod(sizes.values()) != world_size:
        raise ConfigurationError(
            request, f"{product}, and not {world_size}", 'such a product; "auto" is what is left'
        )
    if sizes["tensor_parallel"] > 1 and not splits:
        raise ConfigurationError(
            request, f"nothing says what is split in {product}", "parallelize_fn= or tp_plan="
        )
    return sizes


class ModelParallelStrategy(FSDPStrategy):
    """Layers split over ranks, beside data that is split and parameters that are sharded, on one mesh of processes.

    The numbers are those of the single process, whatever the mesh: see ``[Note: Mesh]`` and ``[Note: Split layers]``.
    :attr:`fabric.Fabric.device_mesh` is the mesh. Parameters, gradients and optimizer state are sharded over
    ``data_parallel`` and ``sequence`` together, as under :class:`fabric.strategies.FSDPStrategy`, whose promises hold.
    What several ranks compute of a batch counts once in sums over all processes and in metrics. A model's code sees its
    parts: ``view(batch, length, -1, width)`` for this rank's heads. A layer with concatenated outputs, such
    as a gate and what it gates, cannot be split this way: write one layer for each.

    Args:
        parallelize_fn: ``(model, mesh) -> model``, which splits layers by torch's ``parallelize_module`` along
            ``mesh["tensor_parallel"]``. It may apply ``fully_shard`` along ``mesh["data_parallel"]``; a model in which
            it leaves that out is sharded as by ``"fsdp"``.
        data_parallel_size: number of shards, each with other data; ``"auto"`` is what the other sizes leave.
        tensor_parallel_size: in how many parts layers are split; ``"auto"`` is the processes of a node, and 1 if
            nothing is to be split.
        replicate_size: number of copies of all shards, as under ``HYBRID_SHARD``.
        sequence_parallel_size: number of ranks that have parts of the same sequences.
        tp_plan: in place of ``parallelize_fn``: how the layers whose names fit a pattern are split, as libraries of
            models write it: ``{"blocks.*.attention.query": "colwise", "blocks.*.attention.out": "rowwise"}``. The
            values are ``"colwise"``, ``"rowwise"``, ``"colwise_rep"`` (with a whole output), ``"rowwise_rep"`` (of a
            whole input), ``"sequence_parallel"`` (a norm computed in parts of dim 1), or a ``ParallelStyle`` of torch.
            ``"auto"`` takes the plan that the model has. An attribute that counts heads, in a module with ``"colwise"``
            layers, becomes the number of this rank's heads.
        **options: those of :class:`fabric.strategies.FSDPStrategy`, without ``device_mesh`` and ``HYBRID_SHARD``.

    Raises:
        ArgumentTypeError, ConfigurationError: options that are not understood, or cannot work.
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
        if self.device_mesh is not None or self.sharding_strategy not in (
            "FULL_SHARD",
            "SHARD_GRAD_OP",
        ):
            request = f"ModelParallelStrategy(device_mesh=..., sharding_strategy={self.sharding_strategy!r})"
            raise ConfigurationError(
                request, suggestion="replicate_size=2 for two copies of all shards"
            )
        if not (tp_plan in (None, "auto") or isinstance(tp_plan, Mapping)) or (
            parallelize_fn and tp_plan
        ):
            request = f"ModelParallelStrategy({parallelize_fn=}, {tp_plan=})"
            raise ArgumentTypeError(
                request, expected='a function, or a plan: a dict by pattern, or "auto"'
            )
        check_styles(tp_plan)
        self.parallelize_fn = parallelize_fn
        self.tp_plan = tp_plan
        sizes = {"replicate": replicate_size, "data_parallel": data_parallel_size}
        sizes |= {"sequence": sequence_parallel_size, "tensor_parallel": tensor_parallel_size}
        self._mesh_sizes = partial(
            mesh_sizes, sizes, parallelize_fn is not None or tp_plan is not None
        )
        self._device_mesh: Any = None
        # Set with the mesh: the ranks of a sum, those of different batches, and those that share one.
        self._groups = list[Communicator]()
        self._parts = 1
        # While a model is set up: the layers that are still to be split, and what was in the place of their parameters.
        self._layers = dict[nn.Module, Any]()
        self._before = dict[nn.Parameter, nn.Parameter]()

    @override
    def check(
        self, *, accelerator: Accelerator, devices: tuple[torch.device, ...], num_nodes: int
    ) -> None:
        self._mesh_sizes(len(devices) * num_nodes, len(devices))

    @override
    def setup_environment(self, runtime: Runtime | None = None) -> None:
        super().setup_environment(runtime)
        size = self.world_size
        sizes = self._mesh_sizes(size, size // self.runtime.world.num_nodes)
        there = [name for name, size in sizes.items() if size > 1 or name.endswith("parallel")]
        mesh = self._device_mesh = self.runtime.mesh(**{name: sizes[name] for name in there})
        self._parts = sizes["tensor_parallel"]
        sharded = mesh[tuple(name for name in ("data_parallel", "sequence") if name in there)]
        parts = [*(mesh[name] for name in there[:1] if name == "replicate"), sharded]
        self._shards = joined_mesh(parts, self.runtime.timeout)
        # Most often these are the mesh itself, and no groups are made.
        copies = self._parts, self._parts * sizes["sequence"]
        sums, batches = (
            self.runtime.mesh(data_parallel=size // copy_, tensor_parallel=copy_)
            for copy_ in copies
        )
        groups = sums["data_parallel"], batches["data_parallel"], batches["tensor_parallel"]
        self._groups = [self.runtime.communicator_over(group.get_group()) for group in groups]

    @override
    def teardown(self) -> None:
        self._groups = []
        self._device_mesh = None
        super().teardown()

    @override
    def _check_module(self, root: nn.Module) -> object:
        if split := [
            name for name, each in root.named_parameters() if local_tensor(each) is not each
        ]:
            raise UsageError(
                f"setup of what is on a mesh already: {', '.join(split)}",
                suggestion="parallelize_fn=...",
            )
        # A style of the user's own may be shown with its address.
        styles = {
            part: f"{style}".partition(" at 0x")[0]
            for part, style in self._find_layers(root).items()
        }
        super()._check_module(root)
        return [(name, styles[part]) for name, part in root.named_modules() if part in styles]

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        root = uncompiled(module)
        self._synchronize_rng()
        self._layers = self._find_layers(root)
        self._before = {}
        for _, owner, attribute, _ in [*count_heads(root, self._layers)]:
            setattr(owner, attribute, getattr(owner, attribute) // self._parts)
        if self.parallelize_fn is not None:
            self._parallelize(root, self.parallelize_fn)
        prepared = super().setup_module(module)
        self._before = {}
        if self._parts > 1:
            PartStreams(root, self._device_mesh, ends=self.tp_plan is not None)
        return prepared

    @override
    def gradient_contract(self, prepared: nn.Module) -> GradientContract:
        row = self._shards.size(-1) * self._parts
        rank = self.global_rank
        ranks = range(rank // row * row, rank // row * row + row)
        contract = replace(super().gradient_contract(prepared), peers=lambda: ranks)
        if not 1 < self._parts > rank:
            return contract
        # One group of ranks is enough to see a mistake, and all would fill the store.
        same = {name: each for name, each in contract.parameters().items() if not is_split(each)}
        return replace(contract, replicated=lambda: same, scope="parts of layers")

    @override
    def _find_fsdp_modules(self, root: nn.Module) -> list[nn.Module]:
        own = [
            part
            for part in root.modules()
            if part is not root and hasattr(part, "set_requires_gradient_sync")
        ]
        return own[::-1] or super()._find_fsdp_modules(root)

    @override
    def _shard_module(self, module: nn.Module, **arguments: Any) -> None:
        from torch.distributed.tensor.parallel import parallelize_module  # takes a second to import

        communicator = self.runtime.communicator
        tied = dict[nn.Parameter, nn.Parameter]()
        for layer in [part for part in module.modules() if part in self._layers]:
            whole = dict(layer.named_parameters(recurse=False))
            receive_values(
                communicator, module, [value for value in whole.values() if value not in tied]
            )
            for style in torch_styles(layer, self._layers.pop(layer)):
                parallelize_module(
                    layer, self._device_mesh["tensor_parallel"], style, src_data_rank=None
                )
            for name, before in whole.items():
                # Those that were one tensor stay so.
                layer._parameters[name] = tied.setdefault(before, layer.get_parameter(name))
                self._before[tied[before]] = before
        before = {
            name: self._before[each]
            for name, each in module.named_parameters()
            if each in self._before
        }
        shard_module(communicator, module, before, **arguments)

    @override
    def _shard_mesh(self) -> DeviceMesh:
        return self._shards

    @override
    def _loss_communicator(self) -> Communicator:
        return self._groups[0] if self._groups else self.communicator()

    @override
    def _data_parallel_communicator(self) -> Communicator:
        return self._groups[1] if self._groups else self.communicator()

    @override
    def _synchronize_rng(self) -> None:
        if self._groups[2].size > 1:
            with real_tensors():  # in a dry run, too
                set_rng_state(self._groups[2].broadcast_object(rng_state(), 0))

    def _find_layers(self, root: nn.Module) -> dict[nn.Module, Any]:
        layers = {} if self.tp_plan is None else find_layers(root, self.tp_plan, self._parts)
        return layers if self._parts > 1 else {}

    def _parallelize(self, root: nn.Module, parallelize: Callable[[Any, DeviceMesh], Any]) -> None:
        """Have the user's function split a model that has rank 0's values. Collective."""
        communicator = self.runtime.communicator
        before = dict(root.named_parameters())
        receive_values(communicator, root, [*before.values()])
        result = parallelize(root, self._device_mesh)
        after = dict(root.named_parameters())
        wrong = [
            *(before.keys() ^ after.keys()),
            *(f"{name} on meta" for name, each in after.items() if each.is_meta),
        ]
        request = (
            f"parallelize_fn({type(root).__name__}, mesh), which returned a {type(result).__name__}"
        )
        problem = f"these were added, removed or untied, or have no values: {', '.join(sorted(wrong)) or 'none'}"
        error = UsageError(
            request, problem, "the model itself, with all its parameters, split in place"
        )
        communicator.gather_objects(None, error=None if result is root and not wrong else error)
        self._before = {
            each: before[name] for name, each in after.items() if each is not before[name]
        }

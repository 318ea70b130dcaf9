"""One process for each device, each with a shard of the model; see ``[Note: FSDP modules]``."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from fabric._torch import full_tensor, local_tensor, uncompiled, unreduced_parameters
from fabric.accelerators import Accelerator
from fabric.diagnostics.bypass import GradientContract
from fabric.environments import Environment
from fabric.errors import FabricError, UsageError
from fabric.precision import Precision
from fabric.runtime import DEFAULT_TIMEOUT, Runtime
from fabric.strategies.base import ParallelStrategy, refuse_unprepared
from fabric.strategies.fsdp_options import (
    check_device_mesh,
    check_fsdp_kwargs,
    check_world,
    parse_backward_prefetch,
    parse_cpu_offload,
    parse_mixed_precision,
    parse_sharding_strategy,
    parse_state_dict_type,
)
from fabric.strategies.init_module import MappedMemory, built_for_shards, check_source, receive_values
from fabric.strategies.sharded_forward import ShardedForward
from fabric.strategies.wrapping import (
    WrapPolicy,
    check_activation_checkpointing,
    check_same_model,
    check_shardable,
    check_wrap_policy,
    find_fsdp_modules,
    find_recomputed,
)
from fabric.tree import map_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

__all__ = ["FSDPStrategy"]

M = TypeVar("M", bound=nn.Module)
_OF_THIS_PROCESS = frozenset(["_forwards", "_memory", "_sharded_as"])


class FSDPStrategy(ParallelStrategy):
    """Data parallelism with parameters, gradients and optimizer state sharded over the ranks, by ``fully_shard``.

    The numbers are those of DDP: every rank starts with rank 0's values, and gradients are the mean over ranks. Under a
    ``*-mixed`` precision parameters are gathered in the low precision and whole modules compute in it, where autocast
    decides for each operation; gradients are reduced, and the outputs of the model returned, in float32. Buffers are
    not sharded and keep their dtype.

    Args:
        accelerator: as for :class:`fabric.strategies.ParallelStrategy`, and so are the other shared ones.
        parallel_devices: the devices of this node.
        cluster_environment: the environment that says which rank this is.
        checkpoint_io: format of ``save`` and ``load``.
        precision: precision.
        process_group_backend: backend of the process group; None for the device's default.
        timeout: how long a collective may wait.
        cpu_offload: keep shards, gradients and optimizer state on the CPU: True, or torch's ``CPUOffloadPolicy`` or
            ``CPUOffload``. Means nothing, and warns, where the device is the CPU.
        backward_prefetch: how many FSDP modules are gathered ahead in the backward pass; or
            ``BackwardPrefetch.BACKWARD_PRE`` for one, ``BACKWARD_POST`` for none; None leaves it to torch.
        mixed_precision: torch's ``MixedPrecisionPolicy`` or ``MixedPrecision`` in place of what ``precision`` says;
            ``output_dtype`` is that of the whole model's outputs.
        activation_checkpointing: a class of layers, a list of them or a function of a module: these compute their
            activations again in the backward pass in place of keeping them.
        auto_wrap_policy: what is an FSDP module: a set of classes, a number of parameters, or a function of a module;
            None for the repeated blocks. See :func:`fabric.strategies.wrapping.find_fsdp_modules`.
        sharding_strategy: ``"FULL_SHARD"`` frees whole parameters after the forward pass of each FSDP module,
            ``"SHARD_GRAD_OP"`` keeps them until the backward pass, ``"HYBRID_SHARD"`` shards as the first within each
            row of ``device_mesh`` and has replicas over its columns.
        state_dict_type: what ``save`` writes: ``"sharded"``, a folder into which each rank writes its shards, or
            ``"full"``, one file, for which rank 0 gathers the whole. ``checkpoint_io`` wins. Every strategy loads both.
        device_mesh: the processes as ``(replicas, shards)`` for ``HYBRID_SHARD``, ``(shards,)`` else; a tuple of sizes
            or a ``DeviceMesh``. None shards over all processes, under ``HYBRID_SHARD`` over those of each node: one
            replica for each node, as in torch, and a warning where there is one node.
        start_method: ``"popen"`` re-runs the script; ``"spawn"``, ``"fork"`` and ``"forkserver"`` run a function.
        num_nodes: number of nodes of the job.
        **fsdp_kwargs: passed to ``fully_shard`` for every FSDP module, such as ``reshard_after_forward=True``.

    Raises:
        ArgumentTypeError: an option of a type that is not understood, or one that ``fully_shard`` does not take.
        ConfigurationError: options that cannot work.
    """

    name = "fsdp"

    def __init__(
        self,
        accelerator: Accelerator | str | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: Environment | None = None,
        checkpoint_io: Any = None,
        precision: Precision | str | int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        cpu_offload: Any = None,
        backward_prefetch: Any = None,
        mixed_precision: Any = None,
        activation_checkpointing: type[nn.Module] | Sequence[type[nn.Module]] | Callable[..., object] | None = None,
        auto_wrap_policy: WrapPolicy = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: str = "sharded",
        device_mesh: "tuple[int, ...] | DeviceMesh | None" = None,
        start_method: str = "popen",
        num_nodes: int = 1,
        **fsdp_kwargs: Any,
    ) -> None:
        super().__init__(
            accelerator=accelerator, parallel_devices=parallel_devices, cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io, precision=precision, process_group_backend=process_group_backend,
            timeout=timeout, start_method=start_method, num_nodes=num_nodes,
        )  # fmt: skip
        check_fsdp_kwargs(fsdp_kwargs)
        self.cpu_offload = parse_cpu_offload(cpu_offload)
        self.backward_prefetch = parse_backward_prefetch(backward_prefetch)
        self.mixed_precision, self._buffer_dtype = parse_mixed_precision(mixed_precision)
        self.activation_checkpointing = check_activation_checkpointing(activation_checkpointing)
        self.auto_wrap_policy = check_wrap_policy(auto_wrap_policy)
        self.sharding_strategy = parse_sharding_strategy(sharding_strategy)
        self.state_dict_type = parse_state_dict_type(state_dict_type)
        self.saves_shards = self.state_dict_type == "sharded"
        self.device_mesh = check_device_mesh(device_mesh, self.sharding_strategy)
        self.fsdp_kwargs = fsdp_kwargs
        self._forget()

    # -- what the layers above ask --------------------------------------------------------------------------------

    @override
    def check(self, *, accelerator: Accelerator, devices: tuple[torch.device, ...], num_nodes: int) -> None:
        check_world(self.device_mesh, len(devices) * num_nodes)

    # -- the life of a process ------------------------------------------------------------------------------------

    @override
    def setup_environment(self, runtime: Runtime | None = None) -> None:
        super().setup_environment(runtime)
        check_world(self.device_mesh, self.world_size)
        self.runtime.accelerator.return_freed_memory()
        if not self.is_global_zero:
            return
        if self.cpu_offload is not None and self.root_device.type == "cpu":
            warnings.warn("cpu_offload means nothing on the CPU, where everything is already", stacklevel=2)
        has_no_mesh = self.sharding_strategy == "HYBRID_SHARD" and self.device_mesh is None
        if has_no_mesh and self.runtime.world.num_nodes == 1:
            warnings.warn(
                "HYBRID_SHARD without device_mesh has a replica for each node, and there is one node: it shards like "
                f"FULL_SHARD. For replicas within the node: device_mesh=(2, {max(1, self.world_size // 2)})",
                stacklevel=2,
            )

    @override
    def teardown(self) -> None:
        for forward in self._forwards.values():
            forward.close()
        self._forget()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        # On the way to a rank.
        return {name: value for name, value in vars(self).items() if name not in _OF_THIS_PROCESS}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def _forget(self) -> None:
        self._forwards: WeakKeyDictionary[nn.Module, ShardedForward] = WeakKeyDictionary()
        # What became of each parameter that was sharded, for as long as something still holds it.
        self._sharded_as = WeakTensorKeyDictionary()
        self._memory = MappedMemory()

    # -- modules and optimizers -----------------------------------------------------------------------------------

    @override
    def module_init_context(self, empty_init: bool = False, source: str = "every_rank") -> AbstractContextManager[Any]:
        """A context in which modules are built for :meth:`setup_module`, which gives each rank its shards.

        See :meth:`fabric.Fabric.init_module` and ``[Note: Building for shards]``. With ``source="rank0"`` it is
        collective when it is left: a rank whose generator was in rank 0's state gets the state that rank 0's is in.
        """
        check_source(source)
        return self._building(empty_init, source)

    @contextmanager
    def _building(self, empty_init: bool, source: str) -> Iterator[None]:
        before, receives = torch.get_rng_state(), source == "rank0" and not self.is_global_zero
        dtype, warn = self.runtime.precision.param_dtype, self.local_rank == 0
        with built_for_shards(self._memory, dtype, empty=empty_init, receives=receives, warn=warn):
            yield
        if source == "rank0" and not empty_init:
            first, last = self.broadcast((before, torch.get_rng_state()))
            if torch.equal(first, before):
                torch.set_rng_state(last)

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Older name of :meth:`module_init_context`."""
        return self.module_init_context()

    @override
    def module_to_device(self, module: M) -> M:
        # What was built in init_module() gets to the device in setup_module, one FSDP module after another.
        tensors = (*module.parameters(), *module.buffers())
        waits = any(tensor.is_meta or tensor in self._memory for tensor in tensors)
        return module if waits else super().module_to_device(module)

    @override
    def check_setup(self, module: nn.Module | None, optimizers: Sequence[Optimizer] = ()) -> None:
        self._check_optimizers(optimizers, module)
        if module is not None:
            self._examine(uncompiled(module))

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        root = uncompiled(module)
        fsdp_modules = self._examine(root)
        for part in find_recomputed(root, self.activation_checkpointing):
            # Inside of the module's call, so that what gathers its parameters, and every name, stays as it is.
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)
        receive_values(self.runtime.communicator, root, list(root.buffers()), self._memory)
        if self._buffer_dtype is not None:
            _convert_buffers(root, self._buffer_dtype)
        for part in fsdp_modules:
            self._shard(part, is_root=False)
        self._shard(root, is_root=True)
        _prefetch_in_backward(root, fsdp_modules, self.backward_prefetch)
        self._forwards[root] = ShardedForward(root, frozenset(fsdp_modules), self.global_rank)
        return module

    def _examine(self, root: nn.Module) -> list[nn.Module]:
        """The FSDP modules without the root; an error on every rank when any rank has one. Collective."""
        fsdp_modules, error = [], None
        try:
            check_shardable(root, has_values=self.is_global_zero)
            find_recomputed(root, self.activation_checkpointing)
            fsdp_modules = find_fsdp_modules(root, self.auto_wrap_policy)
        except FabricError as raised:
            error = raised
        check_same_model(self.runtime.communicator, root, error)
        return fsdp_modules

    def _shard(self, module: nn.Module, is_root: bool) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes a second to import

        whole = {name: each for name, each in module.named_parameters() if local_tensor(each) is each}
        receive_values(self.runtime.communicator, module, list(whole.values()), self._memory)
        precision = self.runtime.precision
        policy = self.mixed_precision or MixedPrecisionPolicy(
            param_dtype=precision.compute_dtype,
            reduce_dtype=precision.reduce_dtype,
            output_dtype=precision.output_dtype,
        )
        if not is_root:
            # The next FSDP module casts its inputs itself: only the whole model's outputs have a dtype of their own.
            policy = replace(policy, output_dtype=None)
        # What torch does of itself is to free all FSDP modules but the root, which the backward pass needs first.
        resharding = {"reshard_after_forward": False} if self.sharding_strategy == "SHARD_GRAD_OP" else {}
        options: dict[str, Any] = {"mesh": self._mesh(), **resharding, **self.fsdp_kwargs}
        if self.cpu_offload is not None and self.root_device.type != "cpu":
            options["offload_policy"] = self.cpu_offload
        fully_shard(module, mp_policy=policy, **options)
        for name, parameter in module.named_parameters():
            if name in whole and parameter is not whole[name]:
                vars(parameter).update(vars(whole[name]))
                self._sharded_as[whole[name]] = parameter
        self._memory.release()

    def _check_optimizers(self, optimizers: Sequence[Optimizer], module: nn.Module | None) -> None:
        own = set() if module is None else set(module.parameters())
        gathered = {p for root in self._forwards for p in root.parameters() if local_tensor(p) is p}
        for optimizer in optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if any(parameter in self._sharded_as for parameter in parameters):
                _refuse_optimizer(optimizer, "it holds parameters from before the sharding: stepping changes nothing")
            if any(parameter in gathered or _is_freed(parameter) for parameter in parameters):
                _refuse_optimizer(
                    optimizer, "it holds parameters that a forward pass gathered, and that are freed again"
                )
            if any(parameter in own and optimizer.state.get(parameter) for parameter in parameters):
                _refuse_optimizer(optimizer, "it has state for whole parameters, and these are about to be sharded")

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["params"][:] = [self._sharded_as.get(parameter, parameter) for parameter in group["params"]]

    @override
    def get_module_state_dict(self, module: nn.Module, *, sharded: bool = False) -> dict[str, Any]:
        """The state dict under the user's own names. Collective, but with ``sharded``."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict  # takes a second

        if sharded:
            return super().get_module_state_dict(module)
        return get_model_state_dict(uncompiled(module), options=StateDictOptions(full_state_dict=True))

    @override
    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, *, sharded: bool = False
    ) -> None:
        """Load a state dict; of a full one every rank takes its shards. Collective, but with ``sharded``."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict  # takes a second

        if sharded:
            super().load_module_state_dict(module, state_dict, strict)
        else:
            options = StateDictOptions(full_state_dict=True, strict=strict)
            set_model_state_dict(uncompiled(module), dict(state_dict), options=options)

    @override
    def get_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict of an optimizer with whole tensors, complete on every rank. Collective."""
        state = optimizer.state_dict()
        return {**state, "state": map_tensors(self._whole, state["state"])}

    @override
    def load_optimizer_state_dict(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict with whole tensors, of which every rank takes its shards."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        content = dict(state_dict["state"])
        for number, parameter in zip(numbers, parameters, strict=False):
            for name, value in content.get(number, {}).items():
                # What has another shape, such as a number of steps, is not sharded.
                if getattr(value, "shape", None) == parameter.shape:
                    content[number] = {**content[number], name: _placed(value, parameter)}
        optimizer.load_state_dict({**state_dict, "state": content})

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        root = uncompiled(module)
        if root not in self._forwards:
            refuse_unprepared(self, module)
        return _without_sync(root, self._forwards[root]) if enabled else nullcontext()

    @override
    def gradient_contract(self, prepared: nn.Module) -> GradientContract:
        root = uncompiled(prepared)
        forward, sharded = self._forwards[root], dict(root.named_parameters())
        contract = super().gradient_contract(prepared)
        return replace(
            contract,
            title=contract.title.removeprefix("FSDP"),  # which torch puts in front of the name of what it shards
            parameters=lambda: sharded,
            is_sharded=True,
            synchronizes=lambda: forward.synchronizes,
            gradients_differ=True,
            unreduced=partial(unreduced_parameters, root),
            fsdp_modules=forward.fsdp_modules,
            in_forward=forward.in_forward,
            casts=self.mixed_precision is not None or self.runtime.precision.compute_dtype is not None,
        )

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        # What is kept on the CPU is gathered on the device, where the process group works.
        return full_tensor(tensor.to(self.root_device)) if local_tensor(tensor) is not tensor else tensor

    def _mesh(self) -> "DeviceMesh":
        if self.device_mesh is not None and not isinstance(self.device_mesh, tuple):
            return self.device_mesh
        if self.sharding_strategy != "HYBRID_SHARD":
            return self.runtime.mesh(shards=self.world_size)
        world = self.runtime.world
        replicas, shards = self.device_mesh or (world.num_nodes, world.local_world_size)
        return self.runtime.mesh(replicas=replicas, shards=shards)


@contextmanager
def _without_sync(root: Any, forward: ShardedForward) -> Iterator[None]:
    before, forward.synchronizes = forward.synchronizes, False
    root.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        forward.synchronizes = before
        root.set_requires_gradient_sync(before)


def _placed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole value like a parameter: on its device, and of what is sharded this rank's shard."""
    if local_tensor(like) is like:
        return value.to(like.device)
    from torch.distributed.tensor import DTensor, distribute_tensor  # takes a second to import; here it has been

    assert isinstance(like, DTensor)
    shard = distribute_tensor(
        value.to(like.device_mesh.device_type), like.device_mesh, like.placements, src_data_rank=None
    )
    placed = torch.empty_like(like, dtype=value.dtype)
    local_tensor(placed).copy_(local_tensor(shard))
    return placed


def _convert_buffers(root: nn.Module, dtype: torch.dtype) -> None:
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


def _prefetch_in_backward(root: Any, fsdp_modules: Sequence[Any], ahead: int | None) -> None:
    """Have each FSDP module gather those before it in the forward pass, taken to be in the order of the model."""
    if ahead is None:
        return
    order: list[FSDPModule] = [module for module in root.modules() if module in set(fsdp_modules)]
    for index, module in enumerate([*order, root]):
        # One that gathers itself gathers nothing more; an empty list would mean torch's own choice.
        previous = order[max(0, index - ahead) : index][::-1] if ahead else []
        module.set_modules_to_backward_prefetch(previous or [module])


def _is_freed(parameter: torch.Tensor) -> bool:
    """Whether a parameter was gathered for a forward pass, and its memory given back since."""
    is_plain = local_tensor(parameter) is parameter
    return is_plain and parameter.numel() > 0 and parameter.untyped_storage().size() == 0


def _refuse_optimizer(optimizer: Optimizer, wrong: str) -> None:
    raise UsageError(
        f"setup of {type(optimizer).__name__} with FSDP",
        wrong,
        "an optimizer without state set up together with its module, or one made from the module that setup() returned",
        "model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters())), then fabric.load(...)",
    )

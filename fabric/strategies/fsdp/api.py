"""One process for each device, each with a shard of the model; see ``[Note: FSDP modules]``.

[Note: Sharded forward] Parameters are gathered only while a forward pass of the whole model, or the backward pass after
it, is running. A part that is called by itself computes with shards, or becomes the root of a model of its own whose
gradients the rest knows nothing of. Such a call is an error when it is made, with or without gradients.
"""

import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from operator import attrgetter, getitem, is_not
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from fabric._torch import (
    backward_unfinished,
    hook_entry,
    in_backward,
    unreduced_parameters,
    version,
)
from fabric.accelerators import Accelerator, AcceleratorName
from fabric.contract import GradientContract
from fabric.diagnostics.bypass import call_of_method, callable_parts
from fabric.diagnostics.training_checks import check_same_model
from fabric.environments import Environment
from fabric.errors import FabricError, UsageError
from fabric.precision import Precision, PrecisionName
from fabric.runtime import DEFAULT_TIMEOUT, Runtime
from fabric.strategies.base import uncompiled
from fabric.strategies.fsdp import options
from fabric.strategies.fsdp import state as shards
from fabric.strategies.init_module import (
    EmptyParameter,
    MappedMemory,
    created_on,
    registered_on_meta,
)
from fabric.strategies.parallel import (
    ParallelStrategy,
    check_forwarded_arguments,
    refuse_unprepared,
)
from fabric.tree import map_tensors

__all__ = ["FSDPStrategy", "ShardedForward"]

M = TypeVar("M", bound=nn.Module)
# Arguments of fully_shard that the strategy sets itself.
_OWN_ARGUMENTS = {"module", "mesh", "mp_policy", "offload_policy", "dp_mesh_dims"}


class FSDPStrategy(ParallelStrategy):
    """Data parallelism with parameters, gradients and optimizer state sharded over the ranks, by ``fully_shard``.

    The numbers are those of DDP: every rank starts with rank 0's values, and gradients are the mean over ranks. Under a
    ``*-mixed`` precision parameters are gathered in the low precision and whole modules compute in it, whereas autocast
    decides for each operation; gradients are reduced, and the outputs of the model returned, in float32. Buffers
    and scalar parameters are not sharded, see ``[Note: Unsharded state]``, and buffers keep their dtype. Sparse
    gradients, losses of gradients, and optimizers whose step needs full parameters (Adafactor, Rprop, and LBFGS with
    uneven shards) are not possible; errors explain them.
    Parameters keep their attributes and hooks; those of ``register_hook`` get this rank's full gradient, as under DDP.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision, process_group_backend, timeout:
            as for :class:`fabric.strategies.Strategy`, and so are ``start_method`` and ``num_nodes``.
        cpu_offload: keep shards, gradients and optimizer state on the CPU: True, or torch's ``CPUOffloadPolicy`` or
            ``CPUOffload``. Has no effect on a CPU, except a warning.
        backward_prefetch: how many FSDP modules are gathered ahead in the backward pass; or
            ``BackwardPrefetch.BACKWARD_PRE`` for one, ``BACKWARD_POST`` for none; None leaves it to torch.
        mixed_precision: torch's ``MixedPrecisionPolicy`` or ``MixedPrecision`` in place of what ``precision`` says;
            ``output_dtype`` is that of the whole model's outputs.
        activation_checkpointing: a class of layers, a list of them or a function of a module: these layers recompute
            their activations in the backward pass.
        auto_wrap_policy: selects the FSDP modules: a set of classes, a number of parameters, or a function of a module;
            None for the repeated blocks. See :func:`fabric.strategies.fsdp.options.find_fsdp_modules`.
        sharding_strategy: ``"FULL_SHARD"`` frees full parameters after the forward pass of each FSDP module,
            ``"SHARD_GRAD_OP"`` keeps them until the backward pass, ``"HYBRID_SHARD"`` does ``"FULL_SHARD"`` within each
            row of ``device_mesh`` and replicates over its columns.
        state_dict_type: what ``save`` writes: ``"sharded"``, a folder into which each rank writes its shards, or
            ``"full"``, one file, gathered on rank 0. ``checkpoint_io`` takes precedence. Every strategy loads both.
        device_mesh: the processes as ``(replicas, shards)`` for ``HYBRID_SHARD``, else ``(shards,)``; a tuple of sizes
            or a ``DeviceMesh``. None shards over all processes, under ``HYBRID_SHARD`` over those of each node: one
            replica per node, as in torch, and a warning if there is only one node.
        broadcast_buffers: use rank 0's running statistics on all ranks, as under DDP: one broadcast per training step,
            and none for a model without such buffers.
        **fsdp_kwargs: passed to ``fully_shard`` for every FSDP module, such as ``reshard_after_forward=True``. Options
            of torch's first FSDP, ``use_orig_params``, ``limit_all_gathers``, ``sync_module_states``,
            ``forward_prefetch``, ``activation_checkpointing_policy`` and ``NO_SHARD``, are accepted, with one warning
            that explains them. ``precision_plugin`` is the older name of ``precision``.

    Raises:
        ArgumentTypeError: an option has an unsupported type, or ``fully_shard`` does not accept it.
        ConfigurationError: options that cannot work.
    """

    name = "fsdp"
    _casts = True

    def __init__(
        self,
        accelerator: Accelerator | AcceleratorName | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: Environment | None = None,
        checkpoint_io: Any = None,
        precision: Precision | PrecisionName | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        cpu_offload: Any = None,
        backward_prefetch: Any = None,
        mixed_precision: Any = None,
        activation_checkpointing: type[nn.Module]
        | Sequence[type[nn.Module]]
        | Callable[..., object]
        | None = None,
        auto_wrap_policy: Collection[type[nn.Module]] | int | Callable[..., object] | None = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: str = "sharded",
        device_mesh: tuple[int, ...] | DeviceMesh | None = None,
        start_method: str = "popen",
        num_nodes: int = 1,
        *,
        broadcast_buffers: bool = True,
        **fsdp_kwargs: Any,
    ) -> None:
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision,
            precision_plugin=fsdp_kwargs.pop("precision_plugin", None), process_group_backend=process_group_backend,
            timeout=timeout, start_method=start_method, num_nodes=num_nodes,
        )  # fmt: skip
        older, activation_checkpointing = options.pop_older(fsdp_kwargs, activation_checkpointing)
        if fsdp_kwargs:
            from torch.distributed.fsdp import fully_shard  # takes a second to import

            check_forwarded_arguments(type(self).__name__, fully_shard, fsdp_kwargs, _OWN_ARGUMENTS)
        strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
        self.sharding_strategy = options.parse_name(
            "sharding_strategy", sharding_strategy, strategies
        )
        self._older = [*older, *({self.sharding_strategy} & options.OF_FIRST_FSDP.keys())]
        self.state_dict_type = options.parse_name(
            "state_dict_type", state_dict_type, ("sharded", "full")
        )
        self.saves_shards = self.state_dict_type == "sharded"
        self.device_mesh = device_mesh
        self.cpu_offload = options.parse_cpu_offload(cpu_offload)
        self.backward_prefetch = options.parse_backward_prefetch(backward_prefetch)
        self.mixed_precision, self._buffer_dtype = options.parse_mixed_precision(mixed_precision)
        self.activation_checkpointing = options.parse_choice(
            "activation_checkpointing", activation_checkpointing
        )
        self.auto_wrap_policy = options.parse_wrap_policy(auto_wrap_policy)
        self.fsdp_kwargs = fsdp_kwargs
        self.broadcast_buffers = broadcast_buffers
        self._ignored = set[nn.Parameter](fsdp_kwargs.get("ignored_params") or ())
        self._builds = count()
        # By the id of the root: the hooks of a model keep its own alive. Empty on the way to a rank.
        self._forwards: MutableMapping[int, ShardedForward] = {}

    @override
    def check(
        self, *, accelerator: Accelerator, devices: tuple[torch.device, ...], num_nodes: int
    ) -> None:
        options.check_mesh(self.device_mesh, self.sharding_strategy, len(devices) * num_nodes)

    @override
    def setup_environment(self, runtime: Runtime | None = None) -> None:
        super().setup_environment(runtime)
        options.check_mesh(self.device_mesh, self.sharding_strategy, self.world_size)
        self.runtime.accelerator.return_freed_memory()
        self._forwards = WeakValueDictionary()
        # An in-place change of such a view is correct, or raises an error that options.EXPLANATIONS explains.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(.*\) returned a view tensor")
        if not self.is_global_zero:
            return
        if self._older:
            meanings = [f"{name} {options.OF_FIRST_FSDP[name]}" for name in self._older]
            warnings.warn(f"options of torch's first FSDP: {'; '.join(meanings)}", stacklevel=2)
        if self.cpu_offload is not None and self.root_device.type == "cpu":
            warnings.warn(
                "cpu_offload means nothing on the CPU, where everything is already", stacklevel=2
            )
        if (
            self.sharding_strategy == "HYBRID_SHARD"
            and self.device_mesh is None
            and self.runtime.world.num_nodes == 1
        ):
            warnings.warn(
                "HYBRID_SHARD has one replica, on one node; device_mesh=(2, shards) is for two",
                stacklevel=2,
            )

    @override
    def teardown(self) -> None:
        self._forwards = {}
        super().teardown()

    @override
    @contextmanager
    def _init_context(self, empty: bool, source: str) -> Iterator[None]:
        """See :meth:`fabric.Fabric.init_module` and ``[Note: Building for shards]``.

        With ``source="rank0"`` the other ranks wait for rank 0 when they leave it: one whose generator was in rank 0's
        state gets the state that rank 0's is in.
        """
        before = bytes(torch.get_rng_state().tolist())
        from_rank0 = source == "rank0" and not empty
        receives = from_rank0 and not self.is_global_zero
        key = f"init_module/{next(self._builds)}"
        states = b""
        if empty or receives:
            memory = registered_on_meta(EmptyParameter if empty else nn.Parameter)
        else:
            memory = MappedMemory(warn=self.local_rank == 0)
        try:
            with created_on(torch.device("cpu"), self.runtime.precision.param_dtype, empty), memory:
                yield
            states = before + bytes(torch.get_rng_state().tolist())
        finally:
            if from_rank0 and self.is_global_zero:
                self.runtime.store.set(key, states)
        if receives:
            states = self.runtime.store.from_rank0(key, states)
            if not states:
                raise UsageError(
                    f'init_module(source="rank0") on rank {self.global_rank}', "rank 0 failed in it"
                )
            if states.startswith(before):
                torch.set_rng_state(
                    torch.tensor(list(states.removeprefix(before)), dtype=torch.uint8)
                )

    model_sharded_context = ParallelStrategy.module_init_context  # its older name

    @override
    def module_to_device(self, module: M) -> M:
        # setup_module moves what was built in init_module() to the device, one FSDP module after another.
        waits = any(
            each.is_meta or shards.is_mapped(each)
            for each in (*module.parameters(), *module.buffers())
        )
        return module if waits else super().module_to_device(module)

    @override
    def check_setup(self, module: nn.Module | None, optimizers: Sequence[Optimizer] = ()) -> None:
        options.check_optimizers(optimizers, self._mesh().shape[-1], module, self._prepared_modules)
        if module is None:
            return
        root = uncompiled(module)
        error = None
        plan = None
        try:
            plan = self._check_module(root)
        except FabricError as raised:
            error = raised
        check_same_model(self.runtime.communicator, root, error, plan)

    def _check_module(self, root: nn.Module) -> object:
        """The plan that ranks compare, if any; raises for what cannot be sharded. Not a collective."""
        options.check_shardable(root, self.is_global_zero, self._prepared_modules)
        options.choose_modules(
            root, root.modules(), "activation_checkpointing", self.activation_checkpointing
        )
        options.check_dtypes(root, self._fsdp_modules(root), self._ignored, self.runtime.precision)

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module in place, after :meth:`check_setup`. Collective."""
        from torch.distributed.fsdp import MixedPrecisionPolicy  # takes a second to import

        root = uncompiled(module)
        communicator = self.runtime.communicator
        fsdp_modules = self._fsdp_modules(root)
        recomputed = self.activation_checkpointing
        for part in options.choose_modules(
            root, root.modules(), "activation_checkpointing", recomputed
        ):
            # Inside the module's call, so that the hooks that gather its parameters, and all names, stay.
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)
        mesh = self._mesh()
        replicated = shards.replicate_unsharded(communicator, root, self._ignored, mesh)
        for buffer in root.buffers():
            if self._buffer_dtype is not None and buffer.is_floating_point():
                buffer.data = buffer.to(self._buffer_dtype)
        # By default torch frees all FSDP modules except the root, which the backward pass needs first.
        resharding = (
            {"reshard_after_forward": False} if self.sharding_strategy == "SHARD_GRAD_OP" else {}
        )
        arguments: dict[str, Any] = {
            "mesh": mesh,
            **resharding,
            **self.fsdp_kwargs,
            "ignored_params": replicated,
        }
        if self.cpu_offload is not None and self.root_device.type != "cpu":
            arguments["offload_policy"] = self.cpu_offload
        precision = self.runtime.precision
        dtypes = (precision.compute_dtype, precision.reduce_dtype, precision.output_dtype)
        policy = self.mixed_precision or MixedPrecisionPolicy(*dtypes)
        for part in fsdp_modules:
            # The next FSDP module casts its inputs itself: only the whole model's outputs have a dtype of their own.
            self._shard(part, mp_policy=replace(policy, output_dtype=None), **arguments)
        self._shard(root, mp_policy=policy, **arguments)
        if self.backward_prefetch is not None:
            options.prefetch_in_backward(root, fsdp_modules, self.backward_prefetch)
        unsharded = shards.UnshardedState(
            root, self._loss_communicator(), replicated, self.broadcast_buffers
        )
        self._forwards[id(root)] = ShardedForward(root, fsdp_modules, self.global_rank, unsharded)
        return module

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                shard = group["params"][index] = getattr(parameter, shards.SHARD, parameter)
                if shard is not parameter and (slots := optimizer.state.pop(parameter, None)):
                    optimizer.state[shard] = shards.shard_slots(shard, slots)
        optimizer.register_load_state_dict_pre_hook(shards.shard_state)

    @override
    def full_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return map_tensors(partial(shards.full, self.root_device), state)

    @override
    def load_optimizer_state_dict(
        self, optimizer: Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        """Load a state dict; from full tensors every rank takes its shards."""
        optimizer.load_state_dict(shards.shard_state(optimizer, state_dict))

    @override
    def no_backward_sync(
        self, module: nn.Module, enabled: bool = True
    ) -> AbstractContextManager[Any]:
        forward = self._forwards.get(id(uncompiled(module)))
        if forward is None:
            refuse_unprepared(self, module)
        return forward.without_sync() if enabled else nullcontext()

    @override
    def gradient_contract(self, prepared: nn.Module) -> GradientContract:
        root = uncompiled(prepared)
        forward = self._forwards[id(root)]
        sharded = dict(root.named_parameters())
        return replace(
            super().gradient_contract(prepared),
            title=type(root).__name__.removeprefix(
                "FSDP"
            ),  # which torch puts in front of the name of what it shards
            parameters=lambda: sharded,
            is_sharded=True,
            peers=lambda: dist.get_process_group_ranks(self._mesh().get_group(-1)),
            synchronizes=partial(
                attrgetter("synchronizes"), forward.unsharded
            ),  # called in every step
            gradients_differ=True,
            replicated=lambda: {
                name: each for name, each in sharded.items() if each in forward.unsharded.parameters
            },
            unreduced=lambda: [*unreduced_parameters(root), *forward.unsharded.unreduced],
            reshard=partial(
                forward.reshard,
                wait=self.cpu_offload is not None and self.root_device.type != "cpu",
            ),
            casts=self.mixed_precision is not None
            or self.runtime.precision.compute_dtype is not None,
        )

    @override
    def _explain(self, exception: BaseException) -> None:
        for pattern, (problem, suggestion) in options.EXPLANATIONS.items():
            note = str(FabricError(problem, suggestion=suggestion))
            if re.search(pattern, str(exception)) and note not in getattr(
                exception, "__notes__", ()
            ):
                exception.add_note(note)

    def _fsdp_modules(self, root: nn.Module) -> list[nn.Module]:
        """The FSDP modules of a model, inner before outer, without the root."""
        return options.find_fsdp_modules(root, self.auto_wrap_policy)

    def _shard(self, part: nn.Module, **arguments: Any) -> None:
        """Make a part of a model, or the root, an FSDP module. Collective."""
        shards.shard_module(self.runtime.communicator, part, {}, **arguments)

    def _mesh(self) -> DeviceMesh:
        """The processes that parameters are sharded over, in the last dimension."""
        if isinstance(self.device_mesh, DeviceMesh):
            return self.device_mesh
        return self.runtime.mesh(
            **options.mesh_sizes(self.device_mesh, self.sharding_strategy, self.runtime.world)
        )

    @property
    @override
    def _prepared_modules(self) -> Sequence[nn.Module]:
        return [forward.root for forward in self._forwards.values()]


class ShardedForward:
    """The hooks of a sharded model: see ``[Note: Sharded forward]``; and a forward pass leaves it ready for the next.

    Args:
        root: the user's module, sharded already.
        fsdp_modules: its parts that gather their parameters themselves.
        rank: rank of this process, for errors.
        state: what is not sharded of it.
    """

    def __init__(
        self, root: Any, fsdp_modules: Sequence[nn.Module], rank: int, state: shards.UnshardedState
    ) -> None:
        self.root = root
        self.unsharded = state
        self._rank = rank
        # Like FSDP's own hooks, not part of a compiled graph.
        around = (state.before_forward, state.after_forward) if state else ()
        self._around: list[Any] = [torch.compiler.disable(each) for each in around]
        self._sharded: list[Any] = [*fsdp_modules, root]
        self._depth = 0
        self._finished = True
        self._unfinished = backward_unfinished(root)
        self._version = 0
        held = list[tuple[Any, ...]]()
        for part in root.modules():
            # The present ones: a forward pass may leave gathered parameters in their places.
            own = dict(part.named_parameters(recurse=False, remove_duplicate=False))
            held += [(part._parameters, name, shard) for name, shard in own.items()]
            part.register_load_state_dict_pre_hook(partial(shards.take_shards, own))
        self._owners, self._names, self._shards = zip(*held, strict=True) if held else ((), (), ())
        root.register_forward_pre_hook(self._enter, prepend=True)
        root.register_forward_hook(self._finish)
        root.register_forward_hook(self._leave, always_call=True)
        # First, before FSDP's own hooks take a part for the root of a model. Off within a forward pass, to save time.
        self._places = [
            hook_entry(
                part.register_forward_pre_hook(partial(self._refuse_part, path), prepend=True)
            )
            for path, part in callable_parts(root, self._sharded.__contains__)
        ]

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """A context in which backward passes keep unsharded gradients and do not reduce them."""
        before = self.unsharded.synchronizes
        self.unsharded.synchronizes = False
        self.root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.unsharded.synchronizes = before
            self.root.set_requires_gradient_sync(before)

    def reshard(self, wait: bool = False) -> None:
        """Free gathered parameters; with ``wait`` also wait for copies of shards from the host."""
        for part in self._sharded:
            part.reshard()
        if wait:
            torch.accelerator.synchronize()

    def _refuse_part(self, path: str, part: nn.Module, args: Any) -> None:
        # In the backward pass the user's own activation checkpointing calls parts again.
        if not (self._depth or in_backward()):
            raise UsageError(
                f"{call_of_method(self.root) or f'{path}(...)'} on rank {self._rank}",
                "its parameters are sharded over the ranks, and are gathered only in a forward pass of the whole model",
                suggestion='model(...); or model.mark_forward_method("name") once, for a method that calls this part',
            )

    def _enter(self, root: nn.Module, args: Any) -> None:
        is_compiling = torch.compiler.is_dynamo_compiling()
        if not (self._depth or is_compiling):
            if self._unfinished() and not in_backward():
                self._forget()
            before = self._version
            self._version = sum(map(version, self._shards))
            if self._version != before and any(
                map(is_not, map(getitem, self._owners, self._names), self._shards)
            ):
                self.reshard()  # what a pass has gathered that no backward pass followed is out of date
        if not (self._finished or self._depth):
            raise UsageError(
                f"model(...) on rank {self._rank} after a pass that raised",
                "this release of torch cannot make the model forget that pass: gradients would be wrong",
                suggestion="fabric.load(...) into a model that is set up anew, or torch with reset_iter_state",
            )
        self._depth += 1
        self._finished = False
        if self._around and self._depth == 1:
            self._around[0]()
        if not is_compiling:
            for hooks, number, _ in self._places:
                hooks.pop(number, None)

    def _finish(self, root: nn.Module, args: Any, output: Any) -> None:
        self._finished = True

    def _leave(self, root: nn.Module, args: Any, output: Any) -> None:
        # Another hook may have raised before _enter.
        self._depth = max(0, self._depth - 1)
        if self._around and not self._depth:
            self._around[1](output)
        if self._depth or torch.compiler.is_dynamo_compiling():
            return
        for hooks, number, hook in self._places:
            hooks[number] = hook
            hooks.move_to_end(number, last=False)
        if not self._finished:
            self._forget()
        elif not torch.is_grad_enabled():
            # No backward pass will do it, and a change of whole parameters would be lost.
            self.reshard()

    def _forget(self) -> None:
        """Forget a pass that raised, where torch can."""
        self._finished = hasattr(self.root, "reset_iter_state")  # added after torch 2.11
        if self._finished:
            self.root.reset_iter_state()

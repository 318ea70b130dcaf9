"""The strategy with one process for each device, each with a shard of the model."""

import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from operator import attrgetter
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from fabric._torch import is_dtensor, is_fsdp_module, uncompiled
from fabric.accelerators import Accelerator, AcceleratorName
from fabric.contract import GradientContract
from fabric.diagnostics.training_checks import check_same_model
from fabric.environments import Environment
from fabric.errors import ArgumentTypeError, ConfigurationError, FabricError, UsageError
from fabric.precision import Precision, PrecisionName
from fabric.runtime import Runtime
from fabric.strategies.fsdp.forward import ShardedForward
from fabric.strategies.fsdp.operators import handle_operators
from fabric.strategies.fsdp.sharding import (
    check_dtypes,
    check_mesh,
    check_no_renormalized_tables,
    check_optimizers,
    check_shardable,
    is_mapped,
    mesh_sizes,
    parse_mixed_precision,
    prefetch_in_backward,
    replicate_unsharded,
    shard_module,
)
from fabric.strategies.fsdp.state import (
    UnshardedState,
    gather_full_tensor,
    shard_of,
    shard_parameter_state,
    shard_state,
)
from fabric.strategies.fsdp.wrapping import (
    ModuleChoice,
    choose_modules,
    find_fsdp_modules,
    parse_choice,
    parse_wrap_policy,
)
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
from fabric.tree import map_tensors, parameters_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

__all__ = ["FSDPStrategy"]

M = TypeVar("M", bound=nn.Module)

# Arguments of fully_shard that the strategy sets itself.
_DECIDED_ARGUMENTS = {"module", "mesh", "mp_policy", "offload_policy", "dp_mesh_dims"}

_SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
_STATE_DICT_TYPES = ("sharded", "full")

_ALWAYS_ON = "means nothing, it is always on"
# Options that only torch's first FSDP had, and their meaning here, as the end of a sentence.
_FIRST_FSDP_OPTIONS = {
    "activation_checkpointing_policy": "is activation_checkpointing",
    "forward_prefetch": _ALWAYS_ON,
    "limit_all_gathers": _ALWAYS_ON,
    "sync_module_states": _ALWAYS_ON,
    "use_orig_params": _ALWAYS_ON,
    "NO_SHARD": (
        "is HYBRID_SHARD with device_mesh=(world_size, 1): each rank has all parameters, as in "
        '"ddp"'
    ),
}


class _Explanation(NamedTuple):
    """An explanation of an error of torch.

    Attributes:
        problem: what is wrong.
        suggestion: what to write instead.
    """

    problem: str
    suggestion: str


# The error of torch's functions for lists of tensors, where only some layers are split.
_MIXED_LISTS = r"(_foreach_|_fused_)\S* got mixed torch.Tensor and DTensor"
_EXPLANATION_OF_MIXED_LISTS = _Explanation(
    "a function of torch for lists of tensors takes shards or whole tensors, and not both",
    "fabric.clip_gradients(model, optimizer, max_norm=1.0) for clip_grad_norm_, or clip_val=1.0 "
    "for clip_grad_value_; an optimizer without foreach=True and fused=True",
)
# The explanations of other errors of torch, by a pattern of the text of the error.
_EXPLANATION_BY_PATTERN = {
    "got mixed torch.Tensor and DTensor": _Explanation(
        "a weight is used where this rank has its shard only, outside of the forward pass of its "
        "FSDP module",
        "weight.full_tensor() for this use, before model(batch) for a penalty on all weights; "
        "torch.zeros(..., device=x.device) for weight.new_zeros(...), which makes a shard, too; "
        "fabric.backward(loss) and parameter.grad for a step by hand, and not torch.autograd.grad",
    ),
    "appears to not have been used in the graph": _Explanation(
        "outside of its forward passes, the parameters of a sharded model are shards, and a loss "
        "is computed from the weights that a forward pass has gathered",
        "fabric.backward(loss), and then parameter.grad, for torch.autograd.grad(loss, parameters)",
    ),
    (
        r"Cannot flatten unevenly|"
        r"\.(numpy|tolist)\(\) is not supported for tensor subclasses"
    ): _Explanation(
        "a weight is read where this rank has its shard only",
        "fabric.get_state_dict(model)[name] on every rank, for the whole weight",
    ),
    "on inputs with different meshes": _Explanation(
        "a layer that is split is called outside of the forward pass of its FSDP module, where a "
        "rank has a shard of the layer's weight",
        "block(x) for block.up(x), in a forward of the block; or "
        "ModelParallelStrategy(auto_wrap_policy={Model}), with the class whose forward calls the "
        "layer",
    ),
    "out of bounds for storage of size 0": _Explanation(
        "a second derivative, or a change in place of what an FSDP module returned, needs weights "
        "that have been freed",
        'y = y + 1 for y += 1; strategy="ddp" for a loss of gradients (create_graph=True)',
    ),
    r"FSDP does not support deepcopy|cannot pickle 'torch\._C\._distributed_c10d": _Explanation(
        "a copy of shards is not a model",
        "fabric.ema(model) for averages; fabric.save for copies",
    ),
    (
        "'Sparse|sparse tensors|placement changes|a sharding strategy|unevenly sharded|"
        "requires redistribution"
    ): _Explanation(
        "torch shards dense gradients, and steps that are the same for each element: it has no "
        "operation for shards here",
        'torch.optim.AdamW, or strategy="ddp"',
    ),
}
# Words in the errors of torch for operations on parameters of which a rank has a shard only.
_SHARD_WORDS = r"(?i)DTensor|shard|redistribut|tensor subclass"
_EXPLANATION_OF_WHOLE_GRADIENTS = _Explanation(
    "parameter.grad has the gradient of a whole parameter, as torch.autograd.grad returns it, and "
    "the parameter is this rank's shard",
    "fabric.backward(loss), which also averages over the ranks, for torch.autograd.grad(loss, "
    "parameters); and changes of parameter.grad after it",
)
_SUGGESTION_OF_OTHER_OPTIMIZER = (
    'torch.optim.AdamW, or strategy="ddp"; or state that is made with torch.zeros_like(p) and '
    "operations for each element, in the step of an optimizer of your own"
)


class FSDPStrategy(ParallelStrategy):
    """Data parallelism with parameters, gradients and optimizer state sharded by ``fully_shard``.

    An *FSDP module* is a module to which ``fully_shard`` is applied. Its parameters are gathered
    right before its forward pass, and freed after the forward pass.

    The numbers are those of DDP: every rank starts with rank 0's values, and gradients are the mean
    over ranks. Buffers and scalar parameters are not sharded. Parameters keep their attributes and
    hooks. Hooks from ``register_hook`` get this rank's full gradient, as under DDP.

    Under a ``*-mixed`` precision, parameters are gathered in the low precision, and every operation
    of a module computes in the low precision. Gradients are reduced in float32, and the outputs of
    the model are returned in float32. Buffers keep their dtype.

    Sparse gradients and losses of gradients raise errors that explain what to write. So do
    optimizers whose step needs full parameters: Adafactor, Rprop, and LBFGS with uneven shards.

    Args:
        accelerator: see :class:`fabric.strategies.Strategy`.
        parallel_devices: see :class:`fabric.strategies.Strategy`.
        cluster_environment: see :class:`fabric.strategies.Strategy`.
        checkpoint_io: see :class:`fabric.strategies.Strategy`.
        precision: see :class:`fabric.strategies.Strategy`.
        process_group_backend: see :class:`fabric.strategies.Strategy`.
        timeout: see :class:`fabric.strategies.Strategy`.
        cpu_offload: keep shards, gradients and optimizer state on the CPU. True, or torch's
            ``CPUOffloadPolicy`` or ``CPUOffload``. On a CPU it warns and has no other effect.
        backward_prefetch: the number of FSDP modules that are gathered ahead in the backward pass,
            or ``BackwardPrefetch.BACKWARD_PRE`` for one, or ``BACKWARD_POST`` for none. None leaves
            it to torch.
        mixed_precision: torch's ``MixedPrecisionPolicy`` or ``MixedPrecision`` in place of what
            ``precision`` says. ``output_dtype`` is the dtype of the whole model's outputs.
        activation_checkpointing: a class of layers, a list of classes, or a function of a module.
            The chosen layers recompute their activations in the backward pass. None chooses none.
        auto_wrap_policy: the FSDP modules, which are gathered one by one. A set of classes, a
            number of parameters, or a function of a module. None chooses the repeated blocks.
        sharding_strategy: ``"FULL_SHARD"`` frees full parameters after the forward pass of each
            FSDP module. ``"SHARD_GRAD_OP"`` keeps them until the backward pass. ``"HYBRID_SHARD"``
            does ``"FULL_SHARD"`` within each row of ``device_mesh`` and replicates over its
            columns.
        state_dict_type: what ``save`` writes. ``"sharded"`` is a folder into which each rank writes
            its shards, ``"full"`` is one file, gathered on rank 0. ``checkpoint_io`` takes
            precedence. Every strategy loads both.
        device_mesh: the processes as ``(replicas, shards)`` for ``HYBRID_SHARD``, else
            ``(shards,)``. A tuple of sizes or a ``DeviceMesh``. None shards over all processes.
            Under ``HYBRID_SHARD``, None shards over the processes of each node: one replica per
            node, as in torch, and a warning if there is only one node.
        start_method: see :class:`fabric.strategies.Strategy`.
        num_nodes: see :class:`fabric.strategies.Strategy`.
        broadcast_buffers: use rank 0's running statistics on all ranks, as under DDP. This takes
            one broadcast per training step, and none for a model without running statistics.
        **fsdp_kwargs: passed to ``fully_shard`` for every FSDP module, such as
            ``reshard_after_forward=True``. Options of torch's first FSDP, ``use_orig_params``,
            ``limit_all_gathers``, ``sync_module_states``, ``forward_prefetch``,
            ``activation_checkpointing_policy`` and ``NO_SHARD``, are accepted, with one warning
            that explains them. ``precision_plugin`` is the older name of ``precision``.

    Raises:
        ArgumentTypeError: an option has an unsupported type, or ``fully_shard`` does not accept it.
        ConfigurationError: options that cannot work.
    """

    name = "fsdp"
    _casts_to_compute_dtype = True

    def __init__(
        self,
        accelerator: Accelerator | AcceleratorName | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: Environment | None = None,
        checkpoint_io: Any = None,
        precision: Precision | PrecisionName | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
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
        """Check the options, and turn each into one form. No process group is needed.

        The strategy may be pickled afterward, to be sent to the processes of a launch.
        """
        # The other keyword arguments are options for fully_shard.
        precision_plugin = fsdp_kwargs.pop("precision_plugin", None)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            num_nodes=num_nodes,
        )
        self._sharding = _parse_name("sharding_strategy", sharding_strategy, _SHARDING_STRATEGIES)
        self.state_dict_type = _parse_name("state_dict_type", state_dict_type, _STATE_DICT_TYPES)
        self.saves_shards = self.state_dict_type == "sharded"
        self.device_mesh = device_mesh
        self._offload_policy = _parse_cpu_offload(cpu_offload)
        self.backward_prefetch = _parse_backward_prefetch(backward_prefetch)
        self.mixed_precision, self._buffer_dtype = parse_mixed_precision(mixed_precision)
        self.auto_wrap_policy = parse_wrap_policy(auto_wrap_policy)
        self.broadcast_buffers = broadcast_buffers

        # The names of options that only torch's first FSDP had, which the user has passed.
        self._first_fsdp_options = _first_fsdp_options(fsdp_kwargs, self._sharding)
        self.activation_checkpointing = _parse_activation_checkpointing(
            activation_checkpointing, fsdp_kwargs.get("activation_checkpointing_policy")
        )
        self.fsdp_kwargs = _fully_shard_options(type(self).__name__, fsdp_kwargs)
        ignored_parameters = self.fsdp_kwargs.get("ignored_params") or ()
        self._ignored_parameters = set[nn.Parameter](ignored_parameters)

        # How often init_module was used, for keys in the store.
        self._init_context_count = 0
        # The hooks of each sharded model, by the id of the model. setup_environment() puts a dict
        # with weak values here, so that the model alone keeps its hooks alive. That dict cannot be
        # pickled, and a strategy is pickled before setup_environment() on the way to a rank.
        self._forwards_by_model_id: MutableMapping[int, ShardedForward] = {}
        # Closed by teardown().
        self._teardown_calls = ExitStack()

    @property
    def sharding_strategy(self) -> str:
        """The name of the sharding strategy."""
        return self._sharding

    @property
    def cpu_offload(self) -> "CPUOffloadPolicy | None":
        """How shards are kept on the CPU, or None if they are not."""
        return self._offload_policy

    # -- the process ----------------------------------------------------------------------------

    @override
    def check(
        self, *, accelerator: Accelerator, devices: tuple[torch.device, ...], num_nodes: int
    ) -> None:
        """Check the mesh against the number of processes, before any process is started."""
        world_size = len(devices) * num_nodes
        check_mesh(self.device_mesh, self._sharding, world_size)

    @override
    def setup_environment(self, runtime: Runtime | None = None) -> None:
        """Start the runtime in this process, and check the mesh against the job. Collective."""
        super().setup_environment(runtime)
        check_mesh(self.device_mesh, self._sharding, self.world_size)
        # From now on, large freed blocks return to the system. Otherwise the process may keep the
        # memory of gathered parameters.
        self.runtime.accelerator.return_freed_memory()
        self._forwards_by_model_id = WeakValueDictionary()
        # torch warns that a change in place of a returned view may give wrong gradients. Under this
        # strategy, such a change gives correct gradients or an error of torch, which gets a note.
        warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(.*\) returned a view tensor")
        if self.is_global_zero:
            self._warn_of_options()

    def _warn_of_options(self) -> None:
        """Warn of options of torch's first FSDP, and of options without an effect in this job.

        Called on rank 0 by ``setup_environment``. With ``stacklevel=3``, the warnings name the
        caller of ``setup_environment``.
        """
        if self._first_fsdp_options:
            meanings = [f"{name} {_FIRST_FSDP_OPTIONS[name]}" for name in self._first_fsdp_options]
            warnings.warn(f"options of torch's first FSDP: {'; '.join(meanings)}", stacklevel=3)
        if self._offload_policy is not None and self.root_device.type == "cpu":
            warnings.warn(
                "cpu_offload means nothing on the CPU, where everything is already", stacklevel=3
            )
        has_replica_per_node = self._sharding == "HYBRID_SHARD" and self.device_mesh is None
        if has_replica_per_node and self.runtime.world.num_nodes == 1:
            warnings.warn(
                "HYBRID_SHARD has one replica, on one node; device_mesh=(2, shards) is for two",
                stacklevel=3,
            )

    @override
    def teardown(self) -> None:
        self._forwards_by_model_id = {}
        self._teardown_calls.close()
        super().teardown()

    @override
    def _explain_error(self, exception: BaseException) -> None:
        """Add a note to an error of torch that :func:`_find_explanation` knows."""
        explanation = _find_explanation(exception)
        if explanation is None:
            return
        note = str(FabricError(explanation.problem, suggestion=explanation.suggestion))
        # This method may be called several times for one exception.
        if note not in getattr(exception, "__notes__", ()):
            exception.add_note(note)

    # -- building a module ----------------------------------------------------------------------

    # See [Note: Building for shards] in init_module.py.
    @override
    @contextmanager
    def _init_context(self, empty: bool, source: str) -> Iterator[None]:
        """Build modules for sharding within this context, without a full model in memory.

        With ``source="rank0"``, the other ranks wait for rank 0 at the end of the block. They then
        get rank 0's random state, as if they had drawn the values, too. A rank whose random state
        was another one than rank 0's from the start keeps its own.

        Args:
            empty: whether a checkpoint will fill the parameters, so that no rank draws values.
            source: ``"rank0"`` if only rank 0 draws values, else every rank does.
        """
        is_from_rank0 = source == "rank0" and not empty
        is_receiver = is_from_rank0 and not self.is_global_zero
        # Ranks enter the contexts in the same order, so the key is the same on all ranks.
        key = f"init_module/{self._init_context_count}"
        self._init_context_count += 1
        # Where the values of large parameters go. Without values, the parameters are on meta.
        if empty:
            memory = registered_on_meta(EmptyParameter)
        elif is_receiver:
            memory = registered_on_meta(nn.Parameter)
        else:
            memory = MappedMemory(warn=self.local_rank == 0)  # one warning for each node
        state_before = _rng_state()
        # Rank 0's random states before and after the block, one after the other. Rank 0 stores the
        # empty value if its block raises, so that the other ranks raise, too.
        states_of_rank0 = b""
        try:
            with created_on(torch.device("cpu"), self.runtime.precision.param_dtype, empty), memory:
                yield
            states_of_rank0 = state_before + _rng_state()
        finally:
            if is_from_rank0 and self.is_global_zero:
                self._share_rng_states(key, states_of_rank0)
        # A rank whose block raised does not get here, and so does not wait for rank 0.
        if is_receiver:
            self._receive_rng_state(key, state_before)

    def _share_rng_states(self, key: str, states: bytes) -> bytes:
        """Store the states on rank 0. On other ranks, wait for rank 0's states.

        Args:
            key: the key of rank 0's states in the store.
            states: what rank 0 stores. Not used on other ranks.

        Returns:
            What rank 0 has stored.
        """
        return self.runtime.from_rank0("the end of init_module on rank 0", key, states)

    def _receive_rng_state(self, key: str, state_before: bytes) -> None:
        """Wait for rank 0, and take over its random state if this rank started with the same state.

        Called on all ranks but rank 0, at the end of ``init_module(source="rank0")``.

        Args:
            key: the key of rank 0's states in the store.
            state_before: this rank's random state at the start of the block.

        Raises:
            UsageError: rank 0's block raised.
        """
        states_of_rank0 = self._share_rng_states(key, states=b"")
        # Empty if rank 0's block raised.
        if not states_of_rank0:
            raise UsageError(
                f'init_module(source="rank0") on rank {self.global_rank}',
                problem="rank 0 failed in it",
            )
        # The value has rank 0's state at the start of the block, and then its state at the end.
        had_same_state = states_of_rank0.startswith(state_before)
        if had_same_state:
            state_after = states_of_rank0.removeprefix(state_before)
            torch.set_rng_state(torch.tensor(list(state_after), dtype=torch.uint8))

    # The older name of module_init_context.
    model_sharded_context = ParallelStrategy.module_init_context

    @override
    def module_to_device(self, module: M) -> M:
        """Move a module to the device. A module from ``init_module()`` is returned unchanged.

        ``setup_module`` moves such a module, one FSDP module after another, to save memory.
        """
        tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
        for tensor in tensors:
            is_from_init_module = tensor.is_meta or is_mapped(tensor)
            if is_from_init_module:
                return module
        return super().module_to_device(module)

    # -- setup ----------------------------------------------------------------------------------

    @override
    def check_setup(self, module: nn.Module | None, optimizers: Sequence[Optimizer] = ()) -> None:
        """Raise for a module or optimizers that cannot be set up. Called before any change.

        Collective if there is a module. If one rank has a problem, or if the model differs between
        ranks, all ranks raise.
        """
        # Parameters are sharded over the last dimension of the mesh.
        num_shards = self._shard_mesh().shape[-1]
        check_optimizers(optimizers, num_shards, module=module, models=self._prepared_modules)
        if module is None:
            return
        root = uncompiled(module)
        error = None
        plan = None
        try:
            plan = self._check_model(root)
        except FabricError as raised:
            # check_same_model() raises the error on all ranks, which wait for each other there.
            error = raised
        check_same_model(self.runtime.communicator, root, error=error, plan=plan)

    def _check_model(self, root: nn.Module) -> object:
        """Check that a model can be sharded. Not a collective.

        Subclasses override this method. They may return a plan of how to split the model.

        Returns:
            None, or a plan. :meth:`check_setup` raises if its ``repr`` differs between ranks.

        Raises:
            FabricError: the model cannot be sharded.
        """
        # is_source: the other ranks get the values of the parameters from rank 0.
        check_shardable(root, is_source=self.is_global_zero, models=self._prepared_modules)
        if self._shards_parameters:
            check_no_renormalized_tables(root)
        # Called for its error if the option activation_checkpointing matches no module.
        self._checkpointed_modules(root)
        fsdp_modules = self._find_fsdp_modules(root)
        check_dtypes(root, fsdp_modules, self._ignored_parameters, self.runtime.precision)
        return None

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module in place, and return it. Collective: every rank must call it.

        :meth:`check_setup` has to be called before. It refuses modules that cannot be sharded, on
        all ranks and before anything is changed.
        """
        root = uncompiled(module)
        # Until teardown(), operators of torch that would silently use this rank's shard alone are
        # replaced.
        stop_replacing_operators = handle_operators(self.global_rank)
        self._teardown_calls.callback(stop_replacing_operators)
        # Chosen first, since the steps below change the classes of modules and the parameters.
        fsdp_modules = self._find_fsdp_modules(root)
        for checkpointed in self._checkpointed_modules(root):
            # Only the forward method is replaced. So the names of parameters stay, and the hooks
            # that gather parameters run outside of the checkpointed call.
            checkpointed.forward = partial(checkpoint, checkpointed.forward, use_reentrant=False)
        mesh = self._shard_mesh()
        # The parameters that cannot or should not be sharded become replicated DTensors. This comes
        # before fully_shard(), which gets the replicated parameters as ignored_params.
        replicated = replicate_unsharded(
            self.runtime.communicator, root, self._ignored_parameters, mesh
        )
        self._convert_buffers(root)

        arguments = self._fully_shard_arguments(mesh, replicated)
        policy = self._mixed_precision_policy()
        # Only the outputs of the whole model are cast to the output dtype. The outputs of an inner
        # module are not, since the next FSDP module casts its inputs.
        inner_policy = replace(policy, output_dtype=None)
        # Inner modules first: fully_shard leaves out parameters that are sharded already.
        for fsdp_module in fsdp_modules:
            self._shard_module(fsdp_module, mp_policy=inner_policy, **arguments)
        self._shard_module(root, mp_policy=policy, **arguments)
        # The root is not an FSDP module if nothing is sharded, as under tensor parallelism alone.
        if self.backward_prefetch is not None and is_fsdp_module(root):
            prefetched = list(filter(is_fsdp_module, fsdp_modules))
            prefetch_in_backward(root, prefetched, self.backward_prefetch)

        unsharded = UnshardedState(
            root,
            # Gradients are averaged over the ranks with different samples.
            communicator=self._distinct_samples_communicator(),
            replicated=replicated,
            broadcasts_statistics=self.broadcast_buffers,
        )
        # Registers hooks with the model, which keep this object alive.
        forward = ShardedForward(root, fsdp_modules, self.global_rank, unsharded)
        # The dict has weak values. So the entry is gone before another model can get the same id.
        self._forwards_by_model_id[id(root)] = forward
        return module

    @property
    def _shards_parameters(self) -> bool:
        """Whether parameters are sharded. A subclass may have meshes on which they are not."""
        return True

    def _find_fsdp_modules(self, root: nn.Module) -> list[nn.Module]:
        """Return the FSDP modules of a model, inner before outer, without the root."""
        return find_fsdp_modules(root, self.auto_wrap_policy)

    def _checkpointed_modules(self, root: nn.Module) -> list[nn.Module]:
        """Return the modules that recompute their activations, inner before outer."""
        return choose_modules(
            root, root.modules(), "activation_checkpointing", self.activation_checkpointing
        )

    def _convert_buffers(self, root: nn.Module) -> None:
        """Convert floating-point buffers to the dtype in the option ``mixed_precision``.

        Buffers keep their dtype if the option names none.
        """
        if self._buffer_dtype is None:
            return
        for buffer in root.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.to(self._buffer_dtype)

    def _fully_shard_arguments(
        self, mesh: DeviceMesh, replicated: set[nn.Parameter]
    ) -> dict[str, Any]:
        """Return the arguments of ``fully_shard`` that are the same for all modules.

        Args:
            mesh: the mesh of the shards.
            replicated: the parameters that ``fully_shard`` has to leave alone.
        """
        arguments: dict[str, Any] = {"mesh": mesh}
        if self._sharding == "SHARD_GRAD_OP":
            # By default, torch keeps only the root gathered, which the backward pass needs first.
            arguments["reshard_after_forward"] = False
        # An option of the user takes precedence over the sharding strategy.
        arguments.update(self.fsdp_kwargs)
        # Replaces the user's ignored_params, which are among the replicated parameters by now.
        arguments["ignored_params"] = replicated
        if self._offloads_to_cpu:
            arguments["offload_policy"] = self._offload_policy
        return arguments

    def _mixed_precision_policy(self) -> "MixedPrecisionPolicy":
        """Return the policy for the whole model: the user's, or that of the precision."""
        if self.mixed_precision is not None:
            return self.mixed_precision
        from torch.distributed.fsdp import MixedPrecisionPolicy  # takes a second to import

        precision = self.runtime.precision
        return MixedPrecisionPolicy(
            param_dtype=precision.compute_dtype,
            reduce_dtype=precision.reduce_dtype,
            output_dtype=precision.output_dtype,
        )

    def _shard_module(self, module: nn.Module, **arguments: Any) -> None:
        """Make a module an FSDP module. Collective. Subclasses override this method.

        Args:
            module: the module. Its inner FSDP modules have been made before.
            **arguments: arguments of ``fully_shard``.
        """
        shard_module(self.runtime.communicator, module, originals={}, **arguments)

    def _shard_mesh(self) -> DeviceMesh:
        """Return the mesh whose last dimension parameters are sharded over.

        The first call is collective: it makes the mesh, which the runtime keeps.
        """
        if isinstance(self.device_mesh, DeviceMesh):
            return self.device_mesh
        sizes = mesh_sizes(self.device_mesh, self._sharding, self.runtime.world)
        return self.runtime.mesh(**sizes)

    def _shard_ranks(self) -> Sequence[int]:
        """Return the ranks whose shards together are this rank's copy of the model."""
        return dist.get_process_group_ranks(self._shard_mesh().get_group(-1))

    @property
    def _offloads_to_cpu(self) -> bool:
        """Whether shards are kept on the CPU, and copied to another device to compute."""
        return self._offload_policy is not None and self.root_device.type != "cpu"

    @property
    @override
    def _prepared_modules(self) -> Sequence[nn.Module]:
        return [forward.root for forward in self._forwards_by_model_id.values()]

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> None:
        """Give an optimizer the sharded parameters and this rank's shards of its state.

        Called after the module has been sharded. Not a collective. The optimizer also gets a hook
        with which its ``load_state_dict`` accepts full tensors.
        """
        for group in optimizer.param_groups:
            parameters = group["params"]
            for index, parameter in enumerate(parameters):
                shard = shard_of(parameter)
                if shard is None:
                    # No sharded model holds this parameter.
                    continue
                parameters[index] = shard
                state = optimizer.state.pop(parameter, None)
                if state:
                    optimizer.state[shard] = shard_parameter_state(shard, state)
        optimizer.register_load_state_dict_pre_hook(shard_state)
        for forward in self._forwards_by_model_id.values():
            # A weak reference, so that the optimizer does not keep the model alive.
            optimizer.register_step_pre_hook(partial(ShardedForward.before_step, ref(forward)))

    @override
    def gradient_contract(self, prepared: nn.Module) -> GradientContract:
        """Return how the gradients of a prepared module are synchronized.

        Called once, after the setup of the module.
        """
        root = uncompiled(prepared)
        # The hooks around each forward pass of the model.
        forward = self._forwards_by_model_id[id(root)]
        # Collected once, because the contract's functions are called in every step.
        parameters = dict(root.named_parameters())
        replicated: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            if parameter in forward.unsharded.parameters:
                replicated[name] = parameter
        # None unless the precision is a mixed one.
        compute_dtype = self.runtime.precision.compute_dtype
        return replace(
            super().gradient_contract(prepared),
            # torch puts "FSDP" in front of the class's name.
            title=type(root).__name__.removeprefix("FSDP"),
            parameters=lambda: parameters,
            is_sharded=True,
            # The ranks that take part in every forward pass.
            peers=self._shard_ranks,
            synchronizes=forward.synchronizes,
            # Each rank has the gradients of its own shards.
            gradients_may_differ=True,
            # These have to be equal on all ranks after a step.
            replicated=lambda: replicated,
            # Saves compare these between the ranks that hold the same shards. Buffers are read at
            # each save, since a module may replace them.
            replicas=partial(_with_buffers, parameters, root),
            # Saves compare these two texts between the ranks: the order in which forward passes
            # have used the FSDP modules, and which parameters have had gradients in steps.
            module_order=forward.module_order,
            stepped_gradients=forward.stepped_gradients,
            unreduced=forward.unreduced_parameters,
            # See [Note: Lent gradients] in lent_gradients.py.
            take_back_gradients=forward.lent_gradients.take_back,
            # The number of backward passes that have left unreduced gradients. Called in every
            # step: partial and attrgetter run in C, which is faster than a lambda.
            unreduced_passes=partial(attrgetter("num_passes"), forward.unreduced),
            # Offloaded shards are copied to the device in the background: reshard has to wait for
            # the copies.
            reshard=partial(forward.reshard, wait=self._offloads_to_cpu),
            # With mixed precision, FSDP2 itself casts inputs and outputs.
            casts=self.mixed_precision is not None or compute_dtype is not None,
            explain_error=self._explain_error,
        )

    @override
    def no_backward_sync(
        self, module: nn.Module, enabled: bool = True
    ) -> AbstractContextManager[object]:
        """Return a context in which backward passes do not reduce gradients.

        The context does nothing if ``enabled`` is false.

        Raises:
            UsageError: this strategy has not set up the module.
        """
        forward = self._forwards_by_model_id.get(id(uncompiled(module)))
        if forward is None:
            refuse_unprepared(self, module)  # raises the UsageError
        if not enabled:
            return nullcontext()
        return forward.without_sync()

    # -- state ----------------------------------------------------------------------------------

    @override
    def full_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return map_tensors(partial(gather_full_tensor, self.root_device), state)

    @override
    def load_optimizer_state_dict(
        self, optimizer: Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        """Load a state dict. Every rank takes its shards of full tensors."""
        optimizer.load_state_dict(shard_state(optimizer, state_dict))


# -- arguments ----------------------------------------------------------------------------------


def _parse_name(option: str, value: Any, names: Sequence[str]) -> str:
    """Return the name that a value stands for.

    Args:
        option: the option of the strategy, for the error.
        value: a string in upper or lower case, or a member of one of torch's enums.
        names: the valid names.

    Raises:
        ConfigurationError: the value is none of them.
    """
    # The name of a member of an enum, or the string itself.
    member_name = getattr(value, "name", value)
    text = str(member_name).lower()
    for name in names:
        if text == name.lower():
            return name
    raise ConfigurationError(
        f"FSDPStrategy({option}={value!r})", expected=" or ".join(map(repr, names))
    )


def _first_fsdp_options(fsdp_kwargs: Mapping[str, Any], sharding_strategy: str) -> list[str]:
    """Return the names of the user's options that only torch's first FSDP had, for a warning.

    ``"NO_SHARD"`` is among the names if it is the sharding strategy.
    """
    names = [name for name in _FIRST_FSDP_OPTIONS if name in fsdp_kwargs]
    if sharding_strategy in _FIRST_FSDP_OPTIONS:
        names.append(sharding_strategy)
    return names


def _fully_shard_options(strategy_name: str, fsdp_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's options for ``fully_shard``.

    Args:
        strategy_name: the class of the strategy, for the error.
        fsdp_kwargs: the options that the strategy does not have itself. Options that only torch's
            first FSDP had are left out of the result.

    Raises:
        ArgumentTypeError: ``fully_shard`` does not accept an option, or the strategy sets it.
    """
    options: dict[str, Any] = {}
    for name, value in fsdp_kwargs.items():
        if name not in _FIRST_FSDP_OPTIONS:
            options[name] = value
    if options:
        from torch.distributed.fsdp import fully_shard  # takes a second to import

        check_forwarded_arguments(
            strategy_name=strategy_name,
            torch_function=fully_shard,
            user_arguments=options,
            decided_names=_DECIDED_ARGUMENTS,
        )
    return options


def _parse_activation_checkpointing(
    activation_checkpointing: Any, policy: Any
) -> ModuleChoice | None:
    """Return the choice of modules that recompute their activations. None chooses none.

    Args:
        activation_checkpointing: the value of the option.
        policy: the value of ``activation_checkpointing_policy``, another name of the option.

    Raises:
        ConfigurationError: the user passed both.
    """
    if activation_checkpointing is not None and policy is not None:
        raise ConfigurationError(
            f"FSDPStrategy({activation_checkpointing=}, "
            f"activation_checkpointing_policy={policy!r})",
            problem="these are names of one option",
            expected="one of the two",
        )
    choice = activation_checkpointing
    if policy is not None:
        choice = policy
    return parse_choice("activation_checkpointing", choice)


def _parse_cpu_offload(value: Any) -> "CPUOffloadPolicy | None":
    """Return the offload policy that the option ``cpu_offload`` stands for. None if it is off.

    Args:
        value: a bool, a ``CPUOffloadPolicy``, or a ``CPUOffload`` of torch's first FSDP, whose
            attribute ``offload_params`` is a bool. None, False and other false values are off.

    Raises:
        ArgumentTypeError: the value has another type.
    """
    # The bool in a CPUOffload, or the value itself.
    setting = getattr(value, "offload_params", value)
    if not setting:
        return None
    from torch.distributed.fsdp import CPUOffloadPolicy  # takes a second to import

    if setting is True:
        return CPUOffloadPolicy()
    if isinstance(value, CPUOffloadPolicy):
        return value
    raise ArgumentTypeError(
        f"FSDPStrategy(cpu_offload={value!r})",
        expected="a bool, CPUOffloadPolicy or CPUOffload",
    )


def _parse_backward_prefetch(value: Any) -> int | None:
    """Return how many FSDP modules to gather ahead in the backward pass. None leaves it to torch.

    ``BackwardPrefetch.BACKWARD_PRE`` is 1. ``BACKWARD_POST``, which keeps one FSDP module unsharded
    at a time, is 0.

    Raises:
        ConfigurationError: the value is anything but a count or one of these names.
    """
    name = getattr(value, "name", "")  # empty if the value is not a member of an enum
    if name == "BACKWARD_PRE":
        return 1
    if name == "BACKWARD_POST":
        return 0
    # type() and not isinstance(): a bool is not a count.
    is_count = type(value) is int and value >= 0
    if value is None or is_count:
        return value
    raise ConfigurationError(
        f"FSDPStrategy(backward_prefetch={value!r})",
        expected="BACKWARD_PRE, BACKWARD_POST, or 2 for two",
    )


def _with_buffers(parameters: Mapping[str, Tensor], root: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model and its current buffers, by name."""
    return {**parameters, **dict(root.named_buffers())}


def _rng_state() -> bytes:
    """Return the state of torch's default CPU generator."""
    return bytes(torch.get_rng_state().tolist())


def _find_explanation(exception: BaseException) -> _Explanation | None:
    """Return the problem behind an error of torch, and what to write instead. None if unknown."""
    text = str(exception)
    # Comes first: the more general patterns below would match this error, too.
    if re.search(_MIXED_LISTS, text):
        return _EXPLANATION_OF_MIXED_LISTS
    optimizer = _optimizer_that_raised(exception)
    if optimizer is not None and re.search(_SHARD_WORDS, text):
        if _has_whole_gradients(optimizer):
            return _EXPLANATION_OF_WHOLE_GRADIENTS
        step = f"{type(optimizer).__name__}.step()"
        problem = f"{step} uses an operation that torch does not have for shards"
        return _Explanation(problem, _SUGGESTION_OF_OTHER_OPTIMIZER)
    for pattern, explanation in _EXPLANATION_BY_PATTERN.items():
        if re.search(pattern, text):
            return explanation
    return None


def _has_whole_gradients(optimizer: Optimizer) -> bool:
    """Return whether a sharded parameter has a plain tensor as its gradient."""
    for parameter in parameters_of(optimizer):
        grad = parameter.grad
        if grad is not None and is_dtensor(parameter) and not is_dtensor(grad):
            return True
    return False


def _optimizer_that_raised(exception: BaseException) -> Optimizer | None:
    """Return the optimizer whose ``step`` raised an exception.

    Of the running methods of optimizers and modules, the innermost one counts. Returns None if it
    is a method of a module, as in the closure of a step.
    """
    optimizer: Optimizer | None = None
    for frame, _ in walk_tb(exception.__traceback__):  # from the outermost call to the innermost
        owner = None
        if frame.f_code.co_argcount > 0:
            first_argument = frame.f_code.co_varnames[0]  # usually "self"
            owner = frame.f_locals.get(first_argument)
        if isinstance(owner, Optimizer) and frame.f_code.co_name == "step":
            optimizer = owner
        elif isinstance(owner, nn.Module):
            # The closure of a step has called this module. Or the module will call the step.
            optimizer = None
    return optimizer

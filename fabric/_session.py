"""The running part of a Fabric in one process: its runtime, and everything that was set up with it."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.weak import WeakTensorKeyDictionary

from fabric._plan import Plan
from fabric._torch import uncompiled
from fabric.checkpoint.async_save import AsyncSaver
from fabric.collectives import all_reduce, broadcast
from fabric.communicators import Communicator, Reduce
from fabric.data import ActiveIterator, FabricDataLoader, gather_batch
from fabric.diagnostics.bypass import BypassChecks
from fabric.diagnostics.contract import Hooks
from fabric.diagnostics.training_checks import CheckContext, JoinOrderCheck, TrainingChecks
from fabric.diagnostics.uneven import UnevenInputDetector
from fabric.errors import ArgumentTypeError, UsageError
from fabric.launchers import StopRequest
from fabric.loss_scaler import LossScaler
from fabric.module import FabricModule
from fabric.runtime import Runtime
from fabric.strategies import Strategy
from fabric.world import World

if TYPE_CHECKING:
    from fabric.checkpoint.save_load import CheckpointCoordinator

__all__ = ["Session", "prepared_module", "set_up_modules", "without_sync"]


class Session:
    """One process of a running job, from ``launch`` to ``teardown``.

    What was set up is held weakly, so that a model that the user drops is freed.

    Collective when the processes communicate: returns once all are connected.

    Args:
        plan: what was decided.
        world: the place of this process.
        check_training: whether to watch the first steps of each optimizer.
    """

    def __init__(self, plan: Plan, world: World, *, check_training: bool = True) -> None:
        self._plan, self.strategy = plan, plan.strategy
        self.runtime = Runtime(
            world=world,
            accelerator=plan.accelerator,
            devices=plan.devices,
            precision=plan.precision,
            connected=self.strategy.connects_processes,
            backend=self.strategy.process_group_backend,
            timeout=plan.timeout,
            check_collectives=plan.check_collectives,
            watchdog=plan.watchdog,
        )
        self.strategy.setup_environment(self.runtime)
        self.recorder = self.runtime.recorder
        self._uneven = None if self.recorder is None else UnevenInputDetector(self.recorder, self.runtime.store)
        self._step_layers: list[Hooks] = []
        self.stop_request = StopRequest()
        self.scaler: LossScaler | None = None
        if plan.precision.loss_scaling:
            agree = self._agree_on_overflow if world.world_size > 1 else None
            self.scaler = LossScaler(self.runtime.device, max_over_ranks=agree)
        self._gradients_differ = False
        self.originals: WeakSet[nn.Module] = WeakSet()
        # Dictionaries, since describe() needs the order; that of an optimizer has the modules that it belongs to.
        self.modules: WeakKeyDictionary[FabricModule, None] = WeakKeyDictionary()
        self.optimizers: WeakKeyDictionary[Optimizer, WeakSet[FabricModule]] = WeakKeyDictionary()
        self.loaders: WeakKeyDictionary[FabricDataLoader, None] = WeakKeyDictionary()
        self._active_iterators: list[ActiveIterator] = []
        self._loaders_made = 0
        self._bypass = BypassChecks(world.rank, self._uneven)
        self._training: TrainingChecks | None = None
        if check_training:
            context = CheckContext(
                lambda: [model._fabric_contract for model in self.modules],
                self._owns,
                self._bypass.left_local,
                self.runtime.store,
            )
            self._training = TrainingChecks(context, self._arrange_backward)
        self._arrange_backward()
        # The module holds sharded parameters or full ones, depending on the phase: those that it held at setup count.
        self._owned = WeakTensorKeyDictionary()
        self._node_group: Communicator | None = None
        self._saves = AsyncSaver(self.runtime.background)

    def check_setup(self, module: nn.Module | None, optimizers: Sequence[Optimizer], scheduler: Any) -> None:
        """Raise, before anything changes, for what cannot be set up; optimizers alone belong to earlier modules."""
        modules = list(self.originals) if module is None else [module]
        parameters = {id(parameter) for one in modules for parameter in one.parameters()}
        known: list[Any] = [*self.originals, *self.optimizers]
        for one in [*([] if module is None else [uncompiled(module)]), *optimizers]:
            if isinstance(one, FabricModule) or any(one is other for other in known):
                problem = "it has been set up already"
            elif isinstance(one, Optimizer) and not _updates(one, parameters):
                problem = "none of its parameters belongs to a module that is set up"
            else:
                known.append(one)
                continue
            raise UsageError(
                f"setup of {type(one.module if isinstance(one, FabricModule) else one).__name__}",
                problem,
                "each module and optimizer once; an optimizer with or after the module of its parameters",
                "model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))",
            )
        if scheduler is not None and getattr(scheduler, "optimizer", None) not in optimizers:
            raise ArgumentTypeError(
                f"scheduler={type(scheduler).__name__}",
                "it is no scheduler of an optimizer that is set up with it",
                "a scheduler of torch.optim.lr_scheduler for one of the optimizers in the same call",
                "fabric.setup(model, optimizer, scheduler=StepLR(optimizer, 10))",
            )
        self.strategy.check_setup(module, optimizers)

    def setup_module(self, module: nn.Module, move_to_device: bool) -> FabricModule:
        """Convert, move and prepare a module; may be collective."""
        if self._plan.precision.param_dtype is not None:
            self._plan.precision.convert_module(module)
        if move_to_device:
            self.strategy.module_to_device(module)
        with self.phase(f"setup of {type(module).__name__}"):
            prepared = self.strategy.setup_module(module)
        contract = self.strategy.gradient_contract(prepared)
        self._gradients_differ |= contract.gradients_differ
        guard, layer = self._bypass.watch(contract, prepared)
        recorder = [] if self.recorder is None else [self.recorder.hooks(contract.title)]
        model = FabricModule(
            module, prepared, self._plan.precision, self.runtime.device, contract, [*recorder, layer], guard
        )
        self._arrange_backward()
        self.originals.add(uncompiled(module))
        self._owned.update(dict.fromkeys(contract.parameters().values()))
        self.modules[model] = None
        return model

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Attach to optimizers what has to happen around their steps."""
        for optimizer in optimizers:
            if optimizer.state:
                # torch's own loading puts state where its parameters are now.
                optimizer.load_state_dict(optimizer.state_dict())
            self.strategy.setup_optimizer(optimizer)
            layers = [] if self.recorder is None else [self.recorder.hooks()]
            if self._training is not None:
                layers.append(self._training.watch(optimizer))
            for layer in layers:
                if layer.before_step is not None:
                    layer.handles.append(optimizer.register_step_pre_hook(layer.before_step))
                if layer.after_step is not None:
                    layer.handles.append(optimizer.register_step_post_hook(layer.after_step))
            self._step_layers += layers
            # Last: it takes gradients away from a step that is to be skipped.
            if self.scaler is not None:
                self.scaler.register(optimizer)
            self.optimizers[optimizer] = WeakSet()

    def setup_loader(self, loader: DataLoader[Any], *, move_to_device: bool, **options: Any) -> FabricDataLoader:
        """Shard a loader's data over the processes and move its batches; options of :class:`FabricDataLoader`."""
        made = FabricDataLoader(
            loader,
            device=self.runtime.device if move_to_device else None,
            from_rank0=self.runtime.store.from_rank0,
            name=str(self._loaders_made),
            active=self._active_iterators,
            on_epoch=None if self._uneven is None else self._uneven.on_epoch,
            **(self.strategy.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}),
            **options,
        )
        self._loaders_made += 1
        self.loaders[made] = None
        return made

    def gather_batch(self, data: Any) -> Any:
        """See ``Fabric.gather_for_metrics``."""
        return gather_batch(self.runtime.communicator, self._active_iterators, data)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A part of the program in which torch may issue collectives by itself."""
        return nullcontext() if self.recorder is None else self.recorder.during(name)

    def check_clipping(self, module: FabricModule, optimizer: Optimizer) -> None:
        """Raise unless the optimizer is set up and updates parameters of the module; each pair is checked once."""
        if module in self.optimizers.get(optimizer, ()):
            return
        if optimizer not in self.optimizers:
            problem = "this optimizer has not been set up"
        elif not _updates(optimizer, {id(parameter) for parameter in module.parameters()}):
            problem = "none of the optimizer's parameters belongs to this module"
        else:
            self.optimizers[optimizer].add(module)
            return
        raise UsageError(
            f"clip_gradients({type(module.module).__name__}, {type(optimizer).__name__})",
            problem,
            "a module together with the optimizer of its parameters, both set up",
            "fabric.clip_gradients(model, optimizer, max_norm=1.0) with the pair that setup() returned",
        )

    def _arrange_backward(self) -> None:
        """Bind what is called around backward passes; see ``[Note: Hooks]``."""
        layers = [self._bypass.hooks]
        if self.recorder is not None:
            layers.insert(0, self.recorder.hooks())
        if self._training is not None:
            layers.append(self._training.hooks)
        self.before_backward = tuple(layer.before_backward for layer in layers if layer.before_backward is not None)
        self.after_backward = tuple(layer.after_backward for layer in layers if layer.after_backward is not None)

    @contextmanager
    def join(self, models: Sequence[FabricModule], divide_by_initial_world_size: bool) -> Iterator[None]:
        """``Fabric.join``: within, ranks without batches are answered for; afterwards all are in the same state."""
        prepared = [model._fabric_prepared for model in models]
        context = models[0]._fabric_contract.join(prepared, divide_by_initial_world_size)
        if context is None:
            yield
            return
        if self._training is not None:  # ranks no longer step together
            self._training.close()
        guards = [model._fabric_guard for model in models]
        check = JoinOrderCheck(guards, self.runtime.world.rank)
        assert self._uneven is not None, "there are other ranks"
        with self._uneven.suspended("fabric.join"), closing(check), context:
            yield
        self._follow_last(models, check.rounds)

    def _follow_last(self, models: Sequence[FabricModule], rounds: int) -> None:
        """Give every rank the optimizers and the loss scale of the one that stepped last, as torch does the modules."""
        communicator, world = self.runtime.communicator, self.runtime.world
        last = all_reduce(communicator, rounds * world.world_size + world.rank, Reduce.MAX)
        source = last % world.world_size
        own = {id(parameter) for model in models for parameter in model.parameters()}
        stepped: list[Any] = [optimizer for optimizer in self.optimizers if _updates(optimizer, own)]
        stepped += [] if self.scaler is None else [self.scaler]
        states = broadcast(communicator, [each.state_dict() for each in stepped], source, self.runtime.device)
        if world.rank != source:
            for each, state in zip(stepped, states, strict=True):
                each.load_state_dict(state)

    def checkpoint(self) -> "CheckpointCoordinator":
        """Saves and loads the checkpoints of this job."""
        # A tenth of the package, which nothing needs before the first save.
        from fabric.checkpoint.save_load import CheckpointCoordinator
        from fabric.checkpoint.state import Access

        strategy = self.strategy
        if strategy.saves_shards:
            from fabric.checkpoint.sharded import ShardedCheckpoint as Format  # takes a second to import
        else:
            from fabric.checkpoint.file import FullCheckpoint as Format
        return CheckpointCoordinator(
            self.runtime.communicator,
            self._saves,
            Format() if strategy.checkpoint_io is None else strategy.checkpoint_io,
            Access(
                lambda module: strategy.get_module_state_dict(prepared_module(module)),
                lambda module, *rest: strategy.load_module_state_dict(prepared_module(module), *rest),
                strategy.get_optimizer_state_dict,
                strategy.load_optimizer_state_dict,
            ),
            Access(
                lambda module: strategy.get_module_state_dict(prepared_module(module), sharded=True),
                lambda module, *rest: strategy.load_module_state_dict(prepared_module(module), *rest, sharded=True),
            ),
            self.scaler,
        )

    def rank_zero_first(self, local: bool) -> AbstractContextManager[None]:
        """See ``Fabric.rank_zero_first``."""
        return _rank_zero_first(self._node_communicator() if local else self.runtime.communicator)

    def describe(self) -> list[str]:
        """What was set up, a line each."""
        lines = []
        for model in self.modules:
            prepared = model._fabric_prepared
            outer = "itself" if prepared is model.module else type(prepared).__name__
            lines.append(f"module       {type(model.module).__name__} in {outer}")
        lines += [f"optimizer    {type(optimizer).__name__}" for optimizer in self.optimizers]
        lines += [f"loader       {loader!r}" for loader in self.loaders]
        if self.scaler is not None:
            lines.append(f"loss scale   {self.scaler.scale:g}")
        return lines

    def close(self) -> None:
        """Remove all hooks and close the strategy, even when a part of that raises."""
        with ExitStack() as stack:
            stack.callback(self.strategy.teardown)
            stack.callback(self.stop_request.close)
            if self.scaler is not None:
                stack.callback(self.scaler.close)
            stack.callback(self._bypass.close)
            if self._training is not None:
                stack.callback(self._training.close)
            for handle in (handle for layer in self._step_layers for handle in layer.handles):
                stack.callback(handle.remove)
            if self._uneven is not None:
                stack.callback(self._uneven.finish)
            if self.strategy.checkpoint_io is not None:
                stack.callback(self.strategy.checkpoint_io.wait)
            stack.callback(self._saves.close)

    def _owns(self, parameter: Tensor) -> bool:
        return parameter in self._owned or any(
            parameter is own for module in self.originals for own in module.parameters()
        )

    def _node_communicator(self) -> Communicator:
        """All processes of this node. Collective when first called on several nodes."""
        communicator, world = self.runtime.communicator, self.runtime.world
        if world.num_nodes > 1 and self._node_group is None:
            nodes = communicator.gather_objects(world.node_rank)
            for node in sorted(set(nodes)):
                group = communicator.new_group([rank for rank, other in enumerate(nodes) if other == node])
                self._node_group = self._node_group if group is None else group
        return communicator if self._node_group is None else self._node_group

    def _agree_on_overflow(self, found: Tensor) -> Tensor:
        if not self._gradients_differ:
            return found
        return all_reduce(self.runtime.communicator, found, Reduce.MAX)


def set_up_modules(method: str, modules: Any) -> list[FabricModule]:
    """One module or several that ``setup`` returned, without what ``torch.compile`` put around them since."""
    found = []
    for module in modules if isinstance(modules, list | tuple) else [modules]:
        inner = uncompiled(module) if isinstance(module, nn.Module) else module
        if not isinstance(inner, FabricModule):
            raise ArgumentTypeError(
                f"{method} with {type(module).__name__}",
                "it is no module that setup() returned",
                "the result of fabric.setup(...) or fabric.setup_module(...)",
                f"model = fabric.setup(model), and fabric.{method}(model, ...)",
            )
        found.append(inner)
    return found


def prepared_module(module: nn.Module) -> nn.Module:
    """What the strategy made of a module that was set up, be it compiled since; any other module itself."""
    inner = uncompiled(module)
    return inner._fabric_prepared if isinstance(inner, FabricModule) else inner


@contextmanager
def without_sync(strategy: Strategy, modules: Sequence[nn.Module], enabled: bool) -> Iterator[None]:
    """``no_backward_sync`` for several prepared modules."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(strategy.no_backward_sync(module, enabled))
        yield


def _updates(optimizer: Optimizer, parameters: Collection[int]) -> bool:
    """Whether any parameter of the optimizer is among these, given by their ids."""
    return any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])


@contextmanager
def _rank_zero_first(communicator: Communicator) -> Iterator[None]:
    """Within, rank 0 runs first and then sends the others its outcome."""
    failure = None
    if communicator.rank == 0:
        try:
            yield
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            communicator.broadcast_object(failure, 0)
        return
    failure = communicator.broadcast_object(None, 0)
    if failure is not None:
        problem = f"the first process raised {failure}"
        raise UsageError(f"rank_zero_first() on rank {communicator.rank}", problem, "a block that it finishes")
    yield

"""The running part of a Fabric in one process: its runtime, and everything that was set up with it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fabric._plan import Plan
from fabric.bare import BARE, BareParameters
from fabric.checkpoint.async_save import AsyncSaver
from fabric.clipping import clip_gradients
from fabric.collectives import all_reduce, broadcast
from fabric.communicators import Communicator, Reduce
from fabric.data import ActiveIterator, Agreement, FabricDataLoader, check_no_window
from fabric.diagnostics.bypass import BypassChecks
from fabric.diagnostics.recorder import Hooks
from fabric.diagnostics.training_checks import SetupChecks
from fabric.diagnostics.uneven import UnevenInputDetector
from fabric.errors import ArgumentTypeError, UsageError
from fabric.loss_scaler import LossScaler
from fabric.module import FabricModule
from fabric.preemption import StopRequest
from fabric.runtime import Runtime
from fabric.strategies.base import uncompiled
from fabric.weights import LossWeights
from fabric.world import World

if TYPE_CHECKING:
    from fabric.checkpoint.save_load import CheckpointCoordinator

__all__ = ["Session", "loss_weights", "prepared_module", "rank_zero_first", "set_up_modules"]


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
        # All that close() ends, the last one first, even when one of them raises.
        self._parts = ExitStack()
        self._parts.callback(self.strategy.teardown)
        self.stopping = self._parts.enter_context(closing(StopRequest(self.runtime, plan.deadline, plan.stop_margin)))
        self.scaler: LossScaler | None = None
        if (scale := plan.precision.loss_scale) is not None:
            agree = partial(all_reduce, self.runtime.communicator, op=Reduce.MAX) if world.world_size > 1 else None
            self.scaler = self._parts.enter_context(closing(LossScaler(self.runtime.device, scale, agree)))
        self.weights: LossWeights | None = None  # made by the first weighted backward pass
        self._bare = self._parts.enter_context(closing(BareParameters(self.strategy)))
        self.originals: WeakSet[nn.Module] = WeakSet()
        # Dictionaries, since describe() needs the order; that of an optimizer has the modules that it belongs to.
        self.modules: WeakKeyDictionary[FabricModule, None] = WeakKeyDictionary()
        self.optimizers: WeakKeyDictionary[Optimizer, WeakSet[FabricModule]] = WeakKeyDictionary()
        self.loaders: WeakKeyDictionary[FabricDataLoader, None] = WeakKeyDictionary()
        self.active_iterators: list[ActiveIterator] = []
        agreement = Agreement(self.strategy._summing(is_batch=True).size, self.runtime.background, self.modules)
        self._agreement = self._parts.enter_context(closing(agreement))
        self._loader_numbers = count()
        # The one that measures now, and the latest; see fabric/timeline.py.
        self.timeline: Any = None
        self.measured: Any = None
        self._recorder = recorder = self.runtime.recorder
        self.backward = Hooks() if recorder is None else recorder.hooks("backward")
        self._bypass = self._parts.enter_context(closing(BypassChecks(world, self.backward, recorder)))
        self._uneven = None if recorder is None else UnevenInputDetector(recorder, self.runtime.store, self._bypass)
        self._checks: SetupChecks | None = None
        if check_training:
            self._checks = SetupChecks(
                self._bypass.structures, self.runtime.store, self.backward, optimizers=self.optimizers,
                loaders=self.loaders, check=partial(self.strategy.check_setup, None), scales=self.scaler is not None,
            )  # fmt: skip
            self._parts.callback(self._checks.close)
            if recorder is not None:
                recorder.on_param_group = self._checks.on_param_group
        if self._uneven is not None:
            self._parts.callback(self._uneven.finish)
        if self.strategy.checkpoint_io is not None:
            self._parts.callback(self.strategy.checkpoint_io.wait)
        self._saves = self._parts.enter_context(closing(AsyncSaver(self.runtime.background)))

    def check_setup(self, module: Any, optimizers: Sequence[Optimizer]) -> None:
        """Raise, before anything changes, for what cannot be set up; optimizers alone belong to earlier modules."""
        if not isinstance(module, nn.Module | None):
            request = f"setup with a first argument of type {type(module).__name__}"
            raise ArgumentTypeError(request, "it is no module", suggestion="fabric.setup(model, optimizer)")
        modules = self.originals if module is None else [module]
        known: list[Any] = [*self.originals, *self.optimizers]
        for one in [*([] if module is None else [uncompiled(module)]), *optimizers]:
            if isinstance(one, FabricModule) or one in known:
                problem = "it has been set up already"
            elif not isinstance(one, nn.Module | Optimizer):
                problem = "neither a module nor an optimizer: setup_dataloaders(loader), setup(..., scheduler=...)"
            elif isinstance(one, Optimizer) and not _updates(one, modules):
                problem = "none of its parameters belongs to a module that is set up, or to an nn.ParameterList"
            else:
                known.append(one)
                continue
            request = f"setup of {type(one.module if isinstance(one, FabricModule) else one).__name__}"
            expected = "each module and optimizer once; an optimizer with or after the module of its parameters"
            raise UsageError(request, problem, expected)
        self.strategy.check_setup(None if isinstance(module, BARE) else module, optimizers)

    def setup_module(self, module: Any, move_to_device: bool) -> FabricModule:
        """Convert, move and prepare a module; may be collective."""
        if self._plan.precision.param_dtype is not None:  # most often nothing is to be read there
            self._plan.precision.convert_module(module)
        if move_to_device:
            self.strategy.module_to_device(module)
        with self.phase(f"setup of {type(module).__name__}"):
            if isinstance(module, BARE):
                prepared, contract = module, self._bare.replicate(module)
            else:
                prepared = self.strategy.setup_module(module)
                contract = self.strategy.gradient_contract(prepared)
        if self.scaler is not None:
            self.scaler.gradients_differ |= contract.gradients_differ
        hooks = Hooks() if self._recorder is None else self._recorder.hooks(f"forward of {contract.title}")
        guard = self._bypass.watch(contract, prepared, hooks)
        model = FabricModule(module, prepared, self._plan.precision, self.runtime.device, hooks, contract, guard)
        self.originals.add(uncompiled(module))
        self.modules[model] = None
        if self.timeline is not None:
            self.timeline.watch(model)
        return model

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Attach to optimizers what has to happen around their steps."""
        for optimizer in optimizers:
            if optimizer.state:
                # torch's own loading puts state where its parameters are now.
                optimizer.load_state_dict(optimizer.state_dict())
            self.strategy.setup_optimizer(optimizer)
            if self._recorder is not None:
                self._recorder.param_groups[id(optimizer)] = len(optimizer.param_groups)
                self._parts.callback(optimizer.register_step_pre_hook(self._recorder.enter_step).remove)
                self._parts.callback(optimizer.register_step_post_hook(self._recorder.exit_step).remove)
            if self._checks is not None:
                self._checks.watch(optimizer)
            # Last: it takes gradients away from a step that is to be skipped.
            if self.scaler is not None:
                self.scaler.register(optimizer)
            self.optimizers[optimizer] = WeakSet()

    def setup_loader(self, loader: DataLoader[Any], **options: Any) -> FabricDataLoader:
        """Shard a loader's data over the processes; with options of :class:`FabricDataLoader`."""
        made = FabricDataLoader(
            loader,
            from_rank0=self.runtime.store.from_rank0,
            name=str(next(self._loader_numbers)),
            active=self.active_iterators,
            agreement=self._agreement,
            on_epoch=() if self._uneven is None else (self.strategy._agree_on_streams, self._uneven.on_epoch),
            around=lambda batches: batches if self.timeline is None else self.timeline.over(batches),
            **(self.strategy.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}),
            **options,
        )
        self.loaders[made] = None
        return made

    def phase(self, name: str, needs_all_ranks: bool = True) -> AbstractContextManager[None]:
        """A part of the program in which torch may issue collectives by itself."""
        noted = nullcontext() if self._recorder is None else self._recorder.during(name, needs_all_ranks)
        return noted if self.timeline is None else self.timeline.during(name, noted)

    def clip_gradients(
        self, modules: Sequence[FabricModule], optimizer: Optimizer, error_if_nonfinite: bool, *limits: Any
    ) -> Tensor:
        """``Fabric.clip_gradients``, with the limits of :func:`fabric.clipping.clip_gradients`."""
        known = self.optimizers.get(optimizer)
        if known is None or not known.issuperset(modules):  # each pair is looked at once
            if known is None or not _updates(optimizer, modules):
                foreign = "none of the optimizer's parameters belongs to this module"
                problem = "this optimizer has not been set up" if known is None else foreign
                names = ", ".join(type(module.module).__name__ for module in modules)
                raise UsageError(f"clip_gradients({names}, {type(optimizer).__name__})", problem)
            known.update(modules)
        self._bare.average_gradients(optimizer)
        if self.weights is not None:
            self.weights.divide(optimizer)
        overflow = self.scaler is not None and self.scaler.unscale(optimizer)
        with self.phase("clip_gradients", any(model._fabric_contract.is_sharded for model in modules)):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            return clip_gradients(parameters, *limits, error_if_nonfinite=error_if_nonfinite and not overflow)

    def step_was_skipped(self, optimizer: Optimizer) -> bool:
        """``Fabric.step_was_skipped``."""
        if optimizer not in self.optimizers:
            raise UsageError(f"step_was_skipped({type(optimizer).__name__})", "this optimizer has not been set up")
        return self.scaler is not None and self.scaler.step_was_skipped(optimizer)

    @contextmanager
    def join(self, models: Sequence[FabricModule], divide_by_initial_world_size: bool) -> Iterator[None]:
        """``Fabric.join``: within, ranks without batches take part in collectives; afterwards all have one state."""
        prepared = [model._fabric_prepared for model in models]
        context = models[0]._fabric_contract.join(prepared, divide_by_initial_world_size)
        if context is None:
            yield
            return
        if self._checks is not None:
            self._checks.close()  # ranks no longer step together
        assert self._uneven is not None, "there are other ranks"
        with self._uneven.joined([model._fabric_guard for model in models]), context:
            yield
        self._follow_last(models, self._uneven.passes)

    def _follow_last(self, models: Sequence[FabricModule], rounds: int) -> None:
        """Give every rank the optimizers and the loss scale of the one that stepped last, as torch does the modules."""
        communicator, world = self.runtime.communicator, self.runtime.world
        source = all_reduce(communicator, rounds * world.world_size + world.rank, Reduce.MAX) % world.world_size
        stepped: list[Any] = [optimizer for optimizer in self.optimizers if _updates(optimizer, models)]
        stepped += [] if self.scaler is None else [self.scaler]
        states = broadcast(communicator, [each.state_dict() for each in stepped], source, self.runtime.device)
        if world.rank != source:
            for each, state in zip(stepped, states, strict=True):
                each.load_state_dict(state)

    @contextmanager
    def checkpoints(self, phase: str) -> Iterator["CheckpointCoordinator"]:
        """Saves and loads the checkpoints of this job, in a phase of that name."""
        # A tenth of the package, which nothing needs before the first save.
        from fabric.checkpoint.save_load import CheckpointCoordinator, own_format
        from fabric.checkpoint.state import Access, uncompiled_state

        strategy = self.strategy
        if self.weights is not None:
            self.weights.check()

        def state(module: nn.Module) -> Mapping[str, Any]:
            return uncompiled_state(strategy.get_module_state_dict(prepared_module(module), sharded=True))

        def load(module: nn.Module, content: Mapping[str, Any], strict: bool) -> None:
            prepared = prepared_module(module)
            like = strategy.get_module_state_dict(prepared, sharded=True)
            strategy.load_module_state_dict(prepared, uncompiled_state(content, like), strict)

        with self.phase(phase):
            access = Access(state, load, strategy.load_optimizer_state_dict, strategy.full_state)
            io = strategy.checkpoint_io or own_format(strategy.saves_shards)
            is_inside = any(state.window for _, state in self.active_iterators)
            check = partial(check_no_window, self.active_iterators) if is_inside else bool
            yield CheckpointCoordinator(self.runtime.communicator, self._saves, io, access, self.scaler, check)
        strategy._agree_on_streams()  # those that were loaded may be of ranks on another mesh

    def describe(self) -> list[str]:
        """What was set up, a line each."""
        lines = [f"module       {type(m.module).__name__} in {type(m._fabric_prepared).__name__}" for m in self.modules]
        lines += [f"optimizer    {type(optimizer).__name__}" for optimizer in self.optimizers]
        lines += [f"loader       {loader!r}" for loader in self.loaders]
        lines += [f"mesh         {mesh}" for mesh in self.runtime.meshes.values()]
        if self.scaler is not None:
            lines.append(f"loss scale   {self.scaler.scale:g}")
        return lines

    def close(self) -> None:
        """Remove all hooks and close the strategy, even when a part of that raises."""
        self._parts.close()


@contextmanager
def rank_zero_first(communicator: Communicator) -> Iterator[None]:
    """``Fabric.rank_zero_first``: the first rank runs the block and then sends the others its outcome."""
    failure = None
    if communicator.rank == 0:
        try:
            yield
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            communicator.broadcast_object(failure, 0)
    elif (failure := communicator.broadcast_object(None, 0)) is None:
        yield
    else:
        raise UsageError(f"rank_zero_first() on rank {communicator.rank}", f"the first process raised {failure}")


def loss_weights(session: Session) -> LossWeights:
    """The weights of losses, which the first weighted backward pass makes."""
    if session.weights is None:
        contracts, parts = session._bypass.structures, session._parts
        session.weights = LossWeights(session.runtime, session.scaler, session.optimizers, contracts, parts)
        session.backward.after.append(session.weights.after_backward)
    return session.weights


def set_up_modules(method: str, modules: Any) -> list[FabricModule]:
    """One module or several that ``setup`` returned, or those in a module around them; without ``torch.compile``'s."""
    found: list[FabricModule] = []
    for each in modules if isinstance(modules, list | tuple) else [modules]:
        if not (parts := _set_up_parts(each)):
            raise ArgumentTypeError(f"{method} with {type(each).__name__}", "it is no module that setup() returned")
        found += parts
    return found


def _set_up_parts(module: Any) -> list[FabricModule]:
    if isinstance(module, FabricModule):
        return [module]
    children = module.children() if isinstance(module, nn.Module) else ()
    return [part for child in children for part in _set_up_parts(child)]


def prepared_module(module: nn.Module) -> nn.Module:
    """What the strategy made of a module that was set up, be it compiled since; any other module itself."""
    inner: Any = uncompiled(module)
    return inner._fabric_prepared if isinstance(inner, FabricModule) else inner


def _updates(optimizer: Optimizer, modules: Iterable[nn.Module]) -> bool:
    """Whether any parameter of the optimizer belongs to one of these modules."""
    own = {id(parameter) for module in modules for parameter in module.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

"""A fingerprint of a run: a hash and a norm of everything that a training step computes."""

import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple, TextIO
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from typing_extensions import override

from fabric._session import Session, SessionObserver, rank_zero_first
from fabric._torch import is_in_backward
from fabric.checkpoint.encoding import local_chunks
from fabric.communicators.call_site import user_call
from fabric.contract import GradientContract
from fabric.errors import ConfigurationError, UsageError
from fabric.module import FabricModule
from fabric.seed import stream_digests
from fabric.tools.digest import DigestTables, unpack_digest
from fabric.tools.records import Entry, Header, file_of_rank, has_records
from fabric.tree import flatten, leaf_paths, parameters_of

__all__ = ["Fingerprint", "fingerprint"]

_DETAILS = ("modules", "steps")
_END_OF_BATCHES = object()
_MAX_PENDING = 4096  # entries that wait for the end of the step


@contextmanager
def fingerprint(
    session: Session, folder: str | os.PathLike[str], *, every: int, detail: str, first_step: int
) -> Iterator[None]:
    """Write a fingerprint of the steps of the block; see ``Fabric.fingerprint``.

    Collective on entry.

    Raises:
        ConfigurationError: an argument is out of range.
        UsageError: the folder has a fingerprint already, or another one is being written.
        OSError: this rank cannot write its file.
    """
    call_text = f"fabric.fingerprint({os.fspath(folder)!r}, {every=}, {detail=}, {first_step=})"
    if every < 1 or first_step < 0 or detail not in _DETAILS:
        raise ConfigurationError(
            call_text, expected=f"every from 1, detail of {_DETAILS}, first_step from 0"
        )
    for observer in session.observers:
        if isinstance(observer, Fingerprint) and observer.is_active:
            raise UsageError(call_text, problem="another fingerprint is under way")
    header = _header_of(session, every=every, detail=detail)
    # The stack closes the observer first, which writes its last entries, and then the file.
    with ExitStack() as stack:
        # Rank 0 looks for an earlier fingerprint before any rank writes its file. An error of rank
        # 0 in this block is raised on all ranks.
        with rank_zero_first(session.runtime.communicator):
            file = stack.enter_context(_open_file(call_text, Path(folder), header.rank))
        file.write(f"{header.to_json()}\n")
        recorder = _Recorder(file, step=first_step, every=every)
        observer = Fingerprint(session, recorder, records_modules=detail == "modules")
        stack.enter_context(closing(observer))
        # This also calls on_setup() for modules that are set up already.
        session.attach(observer)
        yield


def _open_file(call_text: str, folder: Path, rank: int) -> TextIO:
    """Create the file of a rank, and open it. Rank 0 calls this before the other ranks.

    Raises:
        UsageError: rank 0 finds an earlier fingerprint in the folder.
    """
    if rank == 0 and has_records(folder):
        raise UsageError(
            call_text,
            problem="the folder has a fingerprint already",
            suggestion="the name of a new folder for each run, or first_step=N and a new folder "
            "for a run that resumes after N steps",
        )
    folder.mkdir(parents=True, exist_ok=True)
    return file_of_rank(folder, rank).open("x")


def _header_of(session: Session, *, every: int, detail: str) -> Header:
    """Return the header of this rank's file: its place in the job, and the job's settings."""
    runtime = session.runtime
    strategy = session.strategy
    sampler_kwargs = strategy.distributed_sampler_kwargs
    if sampler_kwargs is None:
        # This process reads all data, so each rank of the world is a replica.
        sampler_kwargs = {"rank": runtime.world.rank, "num_replicas": runtime.world.world_size}
    device = runtime.device
    device_name = platform.machine()
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    settings = {
        "strategy": strategy.name,
        "precision": session._plan.precision.name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device.type} ({device_name})",
        "threads of torch": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
    }
    return Header(
        rank=runtime.world.rank,
        world_size=runtime.world.world_size,
        data_rank=sampler_kwargs["rank"],
        data_size=sampler_kwargs["num_replicas"],
        every=every,
        detail=detail,
        settings={name: str(value) for name, value in settings.items()},
    )


class _Pending(NamedTuple):
    """An entry whose digest or hashes are still on the device, and are read later.

    Attributes:
        entry: the entry, without these values.
        digest: the packed digest on the device. None for an entry without one.
        samples: the hashes of samples on the device. None for an entry without hashes.
    """

    entry: Entry
    digest: Tensor | None = None
    samples: Tensor | None = None


class _Recorder:
    """Records values, and writes them to the file of this rank at the end of each step.

    Args:
        file: the file, in which the header is written already.
        step: the number of the first step.
        every: a step is recorded if its number is divisible by this number.

    Attributes:
        records_step: whether the current step is recorded.
    """

    def __init__(self, file: TextIO, *, step: int, every: int) -> None:
        """Begin the first step."""
        self._file = file
        self._every = every
        self._step = step
        self._tables = DigestTables()
        self._pending: list[_Pending] = []
        self.records_step = step % every == 0

    def end_step(self) -> None:
        """Write the entries of the step, and begin the next step."""
        if self.records_step:
            self.flush()
            # This line says that the step is complete.
            self._file.write(f'{{"end":{self._step}}}\n')
            self._file.flush()
        self._step += 1
        self.records_step = self._step % self._every == 0

    def flush(self) -> None:
        """Write the pending entries. Waits for the device."""
        digests: list[Tensor] = []
        for pending in self._pending:
            if pending.digest is not None:
                digests.append(pending.digest)
        # All digests are read at once, since each read waits for the device. They come in the order
        # of the entries that have a digest.
        unread_digests = iter(_read_rows(digests))
        for pending in self._pending:
            entry = pending.entry
            if pending.digest is not None:
                entry = replace(entry, digest=unpack_digest(next(unread_digests)))
            if pending.samples is not None:
                entry = replace(entry, samples=pending.samples.tolist())
            self._file.write(f"{entry.to_json()}\n")
        self._file.flush()
        self._pending.clear()

    def record(
        self,
        kind: str,
        name: str,
        value: Any,
        *,
        is_synchronized: bool = False,
        reduction: str = "",
    ) -> None:
        """Record the leaves of a collection.

        Args:
            kind: the kind of the entries; see :class:`Entry`.
            name: the name of the value. The path of each leaf is added to it.
            value: any collection, or a single leaf.
            is_synchronized: whether all ranks should have the same value, or shards of it.
            reduction: ``"mean"`` or ``"sum"`` for a loss; see :class:`Entry`.
        """
        # The line of the user's code: user_call() skips the frames of fabric.
        call_site = user_call(sys._getframe())
        template = Entry(
            step=self._step,
            kind=kind,
            name=name,
            call_site=str(call_site or ""),
            is_synchronized=is_synchronized,
            reduction=reduction,
        )
        leaves, structure = flatten(value)
        for path, leaf in zip(leaf_paths(structure, name), leaves, strict=True):
            entry = replace(template, name=path)
            if isinstance(leaf, Tensor):
                self._record_tensor(entry, leaf)
            else:
                self._append(_Pending(replace(entry, text=_text_of(leaf))))

    def record_samples(self, batch: Any) -> None:
        """Record a hash of each sample of a batch.

        The first tensor of the batch has a row for each sample. So do the tensors of equal length.
        The hash of a sample is made from its row in each of these tensors.
        """
        leaves, _ = flatten(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and _has_rows(leaf)]
        if not tensors:
            return
        num_samples = len(tensors[0])
        hashes = torch.zeros(num_samples, dtype=torch.int64, device=tensors[0].device)
        for tensor in tensors:
            if len(tensor) == num_samples:
                row_hashes = self._tables.row_hashes(tensor)
                # The factor, any odd number, makes the order of the tensors count.
                hashes = hashes * 0x5DEECE66D + row_hashes.to(hashes.device)
        entry = Entry(step=self._step, kind="samples", name="batch")
        self._append(_Pending(entry, samples=hashes))

    def _record_tensor(self, entry: Entry, tensor: Tensor) -> None:
        """Record a tensor, or this rank's shards of it."""
        entry = replace(entry, dtype=str(tensor.dtype).removeprefix("torch."))
        problem = _reason_without_digest(tensor)
        if problem:
            self._append(_Pending(replace(entry, text=problem)))
            return
        entry = replace(entry, shape=list(tensor.shape))
        # torch's checkpoints call this method of DTensor and other distributed tensors.
        is_distributed = hasattr(tensor, "__create_chunk_list__")
        # There is one chunk, except for distributed tensors of other libraries.
        for chunk in local_chunks(tensor):
            chunk_entry = entry
            # A shard is recorded as one even if it has all elements, since the shards of the other
            # ranks are then empty, and `fabric diff` adds up all of them.
            if is_distributed:
                shard = f"{chunk.offsets} {list(chunk.tensor.shape)}"
                chunk_entry = replace(entry, shard=shard)
            digest = self._tables.packed_digest(chunk, tensor.shape)
            self._append(_Pending(chunk_entry, digest=digest))

    def _append(self, pending: _Pending) -> None:
        """Add a pending entry. A limit on their number bounds their memory on the device."""
        self._pending.append(pending)
        if len(self._pending) >= _MAX_PENDING:
            self.flush()


def _read_rows(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the elements of each tensor. All tensors of a device are read at once.

    Args:
        tensors: tensors of one dimension and the same size.
    """
    indices_by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices_by_device.setdefault(tensor.device, []).append(index)
    rows_by_index: dict[int, list[int]] = {}
    for indices in indices_by_device.values():
        stacked = torch.stack([tensors[index] for index in indices])
        rows_by_index.update(zip(indices, stacked.tolist(), strict=True))
    return [rows_by_index[index] for index in range(len(tensors))]


def _reason_without_digest(tensor: Any) -> str:
    """Return why a tensor has no digest. Empty if it has one."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_meta:
        return "a tensor without values"
    if tensor.is_quantized:
        return "a quantized tensor"
    for placement in getattr(tensor, "placements", ()):
        if placement.is_partial():
            return "the partial sum of a DTensor"
    return ""


def _has_rows(tensor: Tensor) -> bool:
    """Return whether a tensor is dense and not a DTensor, and has rows that can be hashed."""
    has_digest = _reason_without_digest(tensor) == ""
    is_plain = tensor.layout is torch.strided and has_digest
    return is_plain and not hasattr(tensor, "placements") and tensor.dim() > 0


def _text_of(leaf: Any) -> str:
    """Return a text for a value that is not a tensor: the value, or only its type."""
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes):
        return repr(leaf)
    # The text of any other object may contain its address.
    return type(leaf).__name__


class _Model(NamedTuple):
    """A set-up module, for its names in entries.

    Attributes:
        prefix: comes before each name. Empty for the first module.
        contract: has the module, and says when its gradients are synchronized.
        is_synchronized: whether all ranks should have the same parameters after a step, or shards
            of the same parameters.
    """

    prefix: str
    contract: GradientContract
    is_synchronized: bool


class _NamedParameter(NamedTuple):
    """A parameter of a set-up module.

    Attributes:
        name: its name, with the prefix of the module.
        parameter: the parameter.
        model: the module.
    """

    name: str
    parameter: Tensor
    model: _Model


# [Note: Fingerprint]
# Each rank writes what it computes to a file of its own (see records.py), in the order of the
# computation, without a collective. Of a sharded tensor it writes the digest of its shards; `fabric
# diff` adds up the digests of all ranks. Digests are computed on the device and read once, at the
# end of the step.
#
# A *step* ends with each `step()` of the first optimizer that was stepped, as in a `Timeline`. The
# hooks exist only within the block of `fabric.Fabric.fingerprint`.
class Fingerprint(SessionObserver):
    """Records what a session computes, by hooks, until it is closed.

    A *step* ends with each ``step()`` of the first optimizer that was stepped.

    Attributes:
        is_active: whether the hooks are there. False after :meth:`close`.
    """

    def __init__(self, session: Session, recorder: _Recorder, *, records_modules: bool) -> None:
        """Add the hooks. The caller then attaches this observer to the session.

        Args:
            session: the session whose computations are recorded.
            recorder: writes the file of this rank.
            records_modules: whether to record the inputs and outputs of modules.
        """
        self._session = session
        self._recorder = recorder
        self._records_modules = records_modules
        # The thread of the loop. What other threads compute is not recorded.
        self._thread = get_ident()
        self._has_other_ranks = session.runtime.world.world_size > 1
        self._models: list[_Model] = []
        # Whether _record_initial_state_once() has recorded the optimizers, and how many of the
        # models.
        self._has_recorded_initial_state = False
        self._num_recorded_models = 0
        # The id() of the first optimizer that was stepped. Its steps are the steps of the loop.
        self._first_optimizer_id: int | None = None
        # The optimizers that _before_step() is registered with.
        self._hooked_optimizers: WeakSet[Optimizer] = WeakSet()
        # The id() of the optimizer whose step() runs. None between steps.
        self._stepping_optimizer_id: int | None = None
        # close() closes this stack, which removes the hooks.
        self._hooks = ExitStack()
        self.is_active = True
        self._register_hooks()

    def _register_hooks(self) -> None:
        """Record losses, gradients and steps until :meth:`close`, which removes the hooks.

        The session calls ``loss_checks`` before each backward pass, and ``backward_hooks.after``
        after it.
        """
        session = self._session
        before_step = register_optimizer_step_pre_hook(self._watch_step)
        self._hooks.callback(before_step.remove)
        after_step = register_optimizer_step_post_hook(self._after_step)
        self._hooks.callback(after_step.remove)
        session.loss_checks.append(self._record_loss)
        self._hooks.callback(session.loss_checks.remove, self._record_loss)
        session.backward_hooks.after.append(self._after_backward)
        self._hooks.callback(session.backward_hooks.after.remove, self._after_backward)

    @override
    def close(self) -> None:
        """Remove all hooks, and write the entries since the last step. Later calls do nothing."""
        if self.is_active:
            self.is_active = False
            self._hooks.close()
            self._recorder.flush()

    @override
    def on_setup(self, model: FabricModule) -> None:
        """Record a set-up module from now on, with ``records_modules`` also its forward passes.

        Then hooks record the inputs and outputs of the module and of each module in it.
        The session calls this method for each module that is set up.
        """
        contract = model._fabric_contract
        prefix = ""
        if self._models:
            prefix = f"(model {len(self._models) + 1}) "
        # Whether the ranks step with the same gradients, or with shards of the same gradients. For
        # shards, gradients_may_differ is True, since each rank has other ones. A single process has
        # no other rank to differ from.
        is_synchronized = (
            contract.is_sharded or not contract.gradients_may_differ or not self._has_other_ranks
        )
        self._models.append(
            _Model(prefix=prefix, contract=contract, is_synchronized=is_synchronized)
        )
        if not self._records_modules:
            return
        for path, module in contract.module.named_modules():
            name = f"{prefix}{path or contract.title}"
            before = partial(self._before_forward, name)
            before_forward = module.register_forward_pre_hook(before, with_kwargs=True)
            self._hooks.callback(before_forward.remove)
            after = partial(self._after_forward, name)
            after_forward = module.register_forward_hook(after)
            self._hooks.callback(after_forward.remove)

    def _is_recording(self) -> bool:
        """Return whether to record what the caller computes. Every hook asks first."""
        if torch.compiler.is_compiling():
            return False
        if get_ident() != self._thread:
            return False
        # Activation checkpointing repeats a forward pass, which was recorded, in the backward pass.
        if is_in_backward():
            return False
        return self.is_active and self._recorder.records_step

    @override
    def around_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator of the same batches, which records each batch before the loop gets it.

        The session calls this method for each iteration over a loader.
        """
        if not self.is_active:
            return batches
        return self._recorded_batches(batches)

    def _recorded_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and record each of them."""
        while True:
            if self._is_recording():
                # The state is recorded first, since loading the batch may draw random numbers.
                self._record_initial_state_once()
            batch = next(batches, _END_OF_BATCHES)
            if batch is _END_OF_BATCHES:
                return
            if self._is_recording():
                self._recorder.record("batch", "batch", batch)
                self._record_random_states("random state at the batch")
                self._recorder.record_samples(batch)
            yield batch

    def _record_initial_state_once(self) -> None:
        """Record the state in which training begins. Later calls add models set up since then.

        Every hook calls this method before it records, since the fingerprint does not know which
        computation of training comes first.
        """
        if not self._has_recorded_initial_state:
            self._has_recorded_initial_state = True
            self._record_random_states("random state at the start")
            for optimizer in self._session.objects.optimizers:
                self._record_optimizer_state("optimizer state at the start", optimizer)
        for model in self._models[self._num_recorded_models :]:
            # All ranks should begin with the same parameters.
            for named_parameter in _parameters_of_model(model):
                self._recorder.record(
                    "parameter at the start",
                    named_parameter.name,
                    named_parameter.parameter,
                    is_synchronized=True,
                )
            self._record_buffers("buffer at the start", model)
        self._num_recorded_models = len(self._models)

    def _before_forward(
        self, name: str, _: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Record the inputs of a module."""
        if self._is_recording():
            self._record_initial_state_once()
            self._recorder.record("input", name, args)
            self._recorder.record("input", name, kwargs)

    def _after_forward(self, name: str, _: nn.Module, args: object, output: Any) -> None:
        """Record the output of a module."""
        if self._is_recording():
            self._recorder.record("output", name, output)

    def _record_loss(self, loss: Tensor, weight: Any, reduce: str) -> None:
        """Record a loss before its backward pass, without the factor of the loss scaler.

        The session calls this method with the arguments of ``Fabric.backward``.
        """
        if not self._is_recording():
            return
        self._record_initial_state_once()
        # A weighted loss is a sum over samples. The sum over all ranks is divided later by the
        # weights of all ranks.
        reduction = "mean"
        if weight is not None or reduce == "sum":
            reduction = "sum"
        self._recorder.record("loss", "loss", loss, reduction=reduction)
        if weight is not None:
            self._recorder.record("loss weight", "weight", weight, reduction="sum")

    def _after_backward(self, _: Tensor, error: BaseException | None) -> None:
        """Record the gradients after a backward pass, unless it has raised an error.

        The last layers come first, as in the backward pass.
        """
        if error is not None or not self._is_recording():
            return
        for model in self._models:
            # Whether every rank now has the gradients of the whole batch, or shards of them. With
            # other ranks, this takes a backward pass that synchronizes. A single rank has them
            # after every backward pass, except under FSDP: a pass that does not synchronize keeps
            # them out of `parameter.grad`, even on a single rank.
            is_complete = not self._has_other_ranks and not model.contract.is_sharded
            is_reduced = model.is_synchronized and model.contract.synchronizes()
            for named_parameter in reversed(_parameters_of_model(model)):
                if named_parameter.parameter.requires_grad:
                    self._recorder.record(
                        "gradient",
                        named_parameter.name,
                        named_parameter.parameter.grad,
                        is_synchronized=is_complete or is_reduced,
                    )

    def _watch_step(self, optimizer: Optimizer, *_: object) -> None:
        """Register :meth:`_before_step` with a set-up optimizer.

        torch calls this method before each step of any optimizer, and then the optimizer's own
        hooks. Some of the latter average, divide or unscale gradients. So :meth:`_before_step` is
        added as the last of the optimizer's own hooks. torch calls it in this step already.
        """
        is_set_up = optimizer in self._session.objects.optimizers
        if is_set_up and optimizer not in self._hooked_optimizers:
            self._hooked_optimizers.add(optimizer)
            handle = optimizer.register_step_pre_hook(self._before_step)
            self._hooks.callback(handle.remove)

    def _before_step(self, optimizer: Any, *_: object) -> None:
        """Record the options and the gradients of a step. A step pre-hook of each optimizer."""
        if self._stepping_optimizer_id is not None:
            # The step() of a subclass calls the step() of its base class. torch calls the hooks for
            # both, and only the outer one counts.
            return
        self._stepping_optimizer_id = id(optimizer)
        # Set even if this step is not recorded, since _after_step() counts all steps.
        if self._first_optimizer_id is None:
            self._first_optimizer_id = id(optimizer)
        if not self._is_recording():
            return
        self._record_initial_state_once()
        title = self._title_of(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            for option, value in group.items():
                if option != "params":
                    name = f"{option} of group {number} of {title}"
                    self._recorder.record("option", name, value, is_synchronized=True)
        for named_parameter in self._parameters_of_optimizer(optimizer):
            self._recorder.record(
                "gradient at the step",
                named_parameter.name,
                named_parameter.parameter.grad,
                is_synchronized=named_parameter.model.is_synchronized,
            )

    def _after_step(self, optimizer: Any, *_: object) -> None:
        """Record parameters and optimizer state. torch calls this after each optimizer step.

        A loop may have several optimizers. A step of the loop ends with the step of the optimizer
        that has stepped first in the recording.
        """
        if self._stepping_optimizer_id != id(optimizer):
            # The optimizer is not set up, so _before_step() has not set the id. Or step() of a
            # subclass has called step() of its base class: then torch calls this method twice, and
            # the first call has reset the id.
            return
        self._stepping_optimizer_id = None
        is_first = self._first_optimizer_id == id(optimizer)
        if self._is_recording():
            # State comes first, as the optimizer computes the parameters from it.
            self._record_optimizer_state("optimizer state", optimizer)
            for named_parameter in self._parameters_of_optimizer(optimizer):
                self._recorder.record(
                    "parameter",
                    named_parameter.name,
                    named_parameter.parameter,
                    is_synchronized=named_parameter.model.is_synchronized,
                )
            if is_first:
                for model in self._models:
                    self._record_buffers("buffer", model)
                self._record_random_states("random state")
        if is_first:
            self._recorder.end_step()

    def _record_buffers(self, kind: str, model: _Model) -> None:
        """Record the buffers of a module, of which each rank may have other values."""
        for name, buffer in model.contract.module.named_buffers():
            self._recorder.record(kind, f"{model.prefix}{name}", buffer)

    def _record_random_states(self, kind: str) -> None:
        """Record a digest of the state of each random generator."""
        for name, digest in stream_digests().items():
            self._recorder.record(kind, name, digest)

    def _record_optimizer_state(self, kind: str, optimizer: Optimizer) -> None:
        """Record the state of an optimizer, by the names of the parameters."""
        for named_parameter in self._parameters_of_optimizer(optimizer):
            # Not optimizer.state[parameter]: the state is a defaultdict, which would add an entry.
            state = optimizer.state.get(named_parameter.parameter, {})
            for key, value in state.items():
                self._recorder.record(
                    kind,
                    f"{named_parameter.name} {key}",
                    value,
                    is_synchronized=named_parameter.model.is_synchronized,
                )

    def _parameters_of_optimizer(self, optimizer: Optimizer) -> list[_NamedParameter]:
        """Return the parameters of an optimizer that belong to set-up modules."""
        by_id: dict[int, _NamedParameter] = {}
        for model in self._models:
            for named_parameter in _parameters_of_model(model):
                by_id[id(named_parameter.parameter)] = named_parameter
        named_parameters: list[_NamedParameter] = []
        for parameter in parameters_of(optimizer):
            if id(parameter) in by_id:
                named_parameters.append(by_id[id(parameter)])
        return named_parameters

    def _title_of(self, optimizer: Optimizer) -> str:
        """Return the class name of an optimizer, with a number if several are set up."""
        title = type(optimizer).__name__
        optimizers = list(self._session.objects.optimizers)
        if len(optimizers) > 1 and optimizer in optimizers:
            return f"{title} {optimizers.index(optimizer) + 1}"
        return title


def _parameters_of_model(model: _Model) -> list[_NamedParameter]:
    """Return the parameters of a set-up module.

    They come from the contract, which knows them even while a forward pass has replaced them.
    """
    named_parameters: list[_NamedParameter] = []
    for name, parameter in model.contract.parameters().items():
        named_parameters.append(_NamedParameter(f"{model.prefix}{name}", parameter, model))
    return named_parameters

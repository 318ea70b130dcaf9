"""A fingerprint of a run: a hash and a norm of everything that a training step computes.

[Note: Fingerprint] Each rank writes what it computes to a file of its own (``[Note: Fingerprint
files]``), in the order of the computation, without a collective. Of a sharded tensor it writes the
digest of its shards; ``fabric diff`` adds up the digests of all ranks. Digests are computed on the
device and read once, at the end of the step.

A *step* ends with each ``step()`` of the first optimizer that was stepped, as in a
:class:`~fabric.tools.timeline.Timeline`. The hooks exist only within the block of
:meth:`fabric.Fabric.fingerprint`.
"""

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
from fabric.contract import GradientContract
from fabric.diagnostics.call_site import user_call
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
    with ExitStack() as stack:
        # An error of rank 0 in this block is raised on all ranks.
        with rank_zero_first(session.runtime.communicator):
            file = stack.enter_context(_open_file(call_text, Path(folder), header.rank))
        file.write(f"{header.to_json()}\n")
        recorder = _Recorder(file, step=first_step, every=every)
        observer = Fingerprint(session, recorder, records_modules=detail == "modules")
        stack.enter_context(closing(observer))
        session.attach(observer)
        yield


def _open_file(call_text: str, folder: Path, rank: int) -> TextIO:
    """Open the new file of a rank. Rank 0 looks for an earlier fingerprint before that.

    Raises:
        UsageError: the folder has a fingerprint.
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
    """Return the header of this rank's file."""
    runtime = session.runtime
    strategy = session.strategy
    sampler_kwargs = strategy.distributed_sampler_kwargs
    if sampler_kwargs is None:
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
    """An entry, and tensors on a device with those of its values that are not read yet.

    Attributes:
        entry: the entry.
        digest: the packed digest, or None.
        samples: the hashes of samples, or None.
    """

    entry: Entry
    digest: Tensor | None = None
    samples: Tensor | None = None


class _Recorder:
    """Records values, and writes them to the file of this rank.

    Args:
        file: the file, which has a header.
        step: the number of the first step.
        every: the steps whose numbers are divisible by it are recorded.

    Attributes:
        is_on: whether the current step is recorded.
    """

    def __init__(self, file: TextIO, *, step: int, every: int) -> None:
        """Begin the first step."""
        self._file = file
        self._every = every
        self._step = step
        self._tables = DigestTables()
        self._pending: list[_Pending] = []
        self.is_on = step % every == 0

    def end_step(self) -> None:
        """Write the entries of the step, and begin the next step."""
        if self.is_on:
            self.flush()
            self._file.write(f'{{"end":{self._step}}}\n')
            self._file.flush()
        self._step += 1
        self.is_on = self._step % self._every == 0

    def flush(self) -> None:
        """Write the entries so far. Waits for the device."""
        digests: list[Tensor] = []
        for pending in self._pending:
            if pending.digest is not None:
                digests.append(pending.digest)
        rows = iter(_read_rows(digests))
        for pending in self._pending:
            entry = pending.entry
            if pending.digest is not None:
                entry = replace(entry, digest=unpack_digest(next(rows)))
            if pending.samples is not None:
                entry = replace(entry, samples=pending.samples.tolist())
            self._file.write(f"{entry.to_json()}\n")
        self._file.flush()
        self._pending.clear()

    def record(
        self, kind: str, name: str, value: Any, *, is_shared: bool = False, reduction: str = ""
    ) -> None:
        """Record the leaves of a collection.

        Args:
            kind: what the value is.
            name: the name of the value. Paths of leaves are added to it.
            value: any collection, or a single leaf.
            is_shared: whether the value is meant to be the same on all ranks.
            reduction: how the values of ranks make up that of the whole batch.
        """
        # The innermost frames are of fabric, and are skipped.
        call_site = user_call(sys._getframe())
        template = Entry(
            step=self._step,
            kind=kind,
            name=name,
            call_site=str(call_site or ""),
            is_shared=is_shared,
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
        """Record a hash of each sample of a batch, from all tensors that have a row for each."""
        leaves, _ = flatten(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and _has_rows(leaf)]
        if not tensors:
            return
        size = len(tensors[0])
        hashes = torch.zeros(size, dtype=torch.int64, device=tensors[0].device)
        for tensor in tensors:
            if len(tensor) == size:
                rows = self._tables.row_hashes(tensor)
                # Multiplied by an odd number, so that the order of the tensors counts.
                hashes = hashes * 0x5DEECE66D + rows.to(hashes.device)
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
        # A DTensor may be a shard on this rank even if it has all elements here: those of other
        # ranks are then empty.
        is_dtensor = hasattr(tensor, "__create_chunk_list__")
        # One chunk, but for sharded tensors of other libraries.
        for chunk in local_chunks(tensor):
            chunk_entry = entry
            if is_dtensor:
                shard = f"{chunk.offsets} {list(chunk.tensor.shape)}"
                chunk_entry = replace(entry, shard=shard)
            digest = self._tables.packed_digest(chunk, tensor.shape)
            self._append(_Pending(chunk_entry, digest=digest))

    def _append(self, pending: _Pending) -> None:
        self._pending.append(pending)
        if len(self._pending) >= _MAX_PENDING:
            self.flush()


def _read_rows(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the elements of tensors of one length. Copies them from each device at once."""
    by_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(number)
    rows: dict[int, list[int]] = {}
    for numbers in by_device.values():
        stacked = torch.stack([tensors[number] for number in numbers])
        rows.update(zip(numbers, stacked.tolist(), strict=True))
    return [rows[number] for number in range(len(tensors))]


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
    """Return whether a tensor is a plain one with a row for each sample."""
    is_plain = tensor.layout is torch.strided and not _reason_without_digest(tensor)
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
        contract: says where its gradients are synchronized.
        is_shared: whether all ranks are meant to have the same parameters after a step, or shards
            of the same parameters.
    """

    prefix: str
    contract: GradientContract
    is_shared: bool


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


class Fingerprint(SessionObserver):
    """Records what a session computes, by hooks, until it is closed; see ``[Note: Fingerprint]``.

    A *step* ends with each ``step()`` of the first optimizer that was stepped.

    Attributes:
        is_active: whether it records, until it is closed.
    """

    def __init__(self, session: Session, recorder: _Recorder, *, records_modules: bool) -> None:
        """Add the hooks. The caller then attaches this observer to the session.

        Args:
            session: the session.
            recorder: writes the file of this rank.
            records_modules: whether to record the inputs and outputs of modules.
        """
        self._session = session
        self._recorder = recorder
        self._records_modules = records_modules
        # The thread of the loop. What other threads compute is not recorded.
        self._thread = get_ident()
        self._has_peers = session.runtime.world.world_size > 1
        self._models: list[_Model] = []
        # How many modules, and the optimizers whose values at the start have been recorded.
        self._num_started_models = 0
        self._has_started = False
        # The id() of the first optimizer that was stepped. Its steps are the steps of the loop.
        self._first_optimizer_id: int | None = None
        # The optimizers that _before_step() is registered with.
        self._hooked_optimizers: WeakSet[Optimizer] = WeakSet()
        # The id of the optimizer whose step() runs.
        self._stepping_id: int | None = None
        # close() closes this stack, which removes the hooks.
        self._hooks = ExitStack()
        self.is_active = True
        self._register_hooks()

    def _register_hooks(self) -> None:
        """Record losses, gradients and steps until :meth:`close`, which removes the hooks."""
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
        """Remove all hooks, and write what was recorded since the last step."""
        if self.is_active:
            self.is_active = False
            self._hooks.close()
            self._recorder.flush()

    @override
    def on_setup(self, model: FabricModule) -> None:
        """Record the inputs and outputs of a module and its submodules, if they are wanted."""
        contract = model._fabric_contract
        prefix = ""
        if self._models:
            prefix = f"(model {len(self._models) + 1}) "
        # The gradients of shards may differ too, since each rank has those of its own shards. But
        # they are reduced over the ranks.
        is_shared = contract.is_sharded or not contract.gradients_may_differ
        if not self._has_peers:
            is_shared = True
        self._models.append(_Model(prefix, contract, is_shared))
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
        """Return whether the caller computes something that is recorded.

        Two computations are not recorded: what ``torch.compile`` traces, and a forward pass that
        activation checkpointing repeats in the backward pass.
        """
        if torch.compiler.is_compiling():
            return False
        is_in_loop = get_ident() == self._thread and not is_in_backward()
        return self.is_active and self._recorder.is_on and is_in_loop

    @override
    def around_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the same batches. Each is recorded before the loop gets it."""
        return self._recorded_batches(batches) if self.is_active else batches

    def _recorded_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and record each of them."""
        while True:
            if self._is_recording():
                # Before the batch, which may draw random numbers.
                self._record_start()
            batch = next(batches, _END_OF_BATCHES)
            if batch is _END_OF_BATCHES:
                return
            if self._is_recording():
                self._recorder.record("batch", "batch", batch)
                self._record_random_states("random state at the batch")
                self._recorder.record_samples(batch)
            yield batch

    def _record_start(self) -> None:
        """Record the state in which training begins, once, and that of models set up later."""
        if not self._has_started:
            self._has_started = True
            self._record_random_states("random state at the start")
            for optimizer in self._session.optimizers:
                self._record_optimizer_state("optimizer state at the start", optimizer)
        for model in self._models[self._num_started_models :]:
            for entry in _parameters_of_model(model):
                self._recorder.record(
                    "parameter at the start", entry.name, entry.parameter, is_shared=True
                )
            self._record_buffers("buffer at the start", model)
        self._num_started_models = len(self._models)

    def _before_forward(
        self, name: str, _: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Record the inputs of a module."""
        if self._is_recording():
            self._record_start()
            self._recorder.record("input", name, args)
            self._recorder.record("input", name, kwargs)

    def _after_forward(self, name: str, _: nn.Module, args: object, output: Any) -> None:
        """Record the output of a module."""
        if self._is_recording():
            self._recorder.record("output", name, output)

    def _record_loss(self, loss: Tensor, weight: Any, reduce: str) -> None:
        """Record a loss before its backward pass. It has no loss scale yet."""
        if not self._is_recording():
            return
        self._record_start()
        # How the losses of the ranks combine to the loss of a single process. A weighted loss is a
        # sum over samples, which is divided later by the sum of the weights of all ranks.
        reduction = "mean"
        if weight is not None or reduce == "sum":
            reduction = "sum"
        self._recorder.record("loss", "loss", loss, reduction=reduction)
        if weight is not None:
            self._recorder.record("loss weight", "weight", weight, reduction="sum")

    def _after_backward(self, _: Tensor, error: BaseException | None) -> None:
        """Record the gradients after a backward pass. The last layers come first."""
        if error is not None or not self._is_recording():
            return
        for model in self._models:
            # A sharded model does not show gradients that are not reduced, even on a single rank.
            is_complete = not self._has_peers and not model.contract.is_sharded
            is_shared = is_complete or model.contract.synchronizes()
            for entry in reversed(_parameters_of_model(model)):
                if entry.parameter.requires_grad:
                    gradient = entry.parameter.grad
                    self._recorder.record("gradient", entry.name, gradient, is_shared=is_shared)

    def _watch_step(self, optimizer: Optimizer, *_: object) -> None:
        """Register :meth:`_before_step` with a set-up optimizer. A step pre-hook of all optimizers.

        torch calls the hooks of all optimizers before the hooks of one optimizer. The latter may
        still average, divide or unscale gradients. :meth:`_before_step` becomes the last of them,
        and is called in this step already.
        """
        is_set_up = optimizer in self._session.optimizers
        if is_set_up and optimizer not in self._hooked_optimizers:
            self._hooked_optimizers.add(optimizer)
            handle = optimizer.register_step_pre_hook(self._before_step)
            self._hooks.callback(handle.remove)

    def _before_step(self, optimizer: Any, *_: object) -> None:
        """Record the options and the gradients of a step."""
        if self._stepping_id is not None:
            return  # torch calls the hooks again if step() calls the step() of its base class
        self._stepping_id = id(optimizer)
        if self._first_optimizer_id is None:
            self._first_optimizer_id = id(optimizer)
        if not self._is_recording():
            return
        self._record_start()
        title = self._title_of(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            for option, value in group.items():
                if option != "params":
                    name = f"{option} of group {number} of {title}"
                    self._recorder.record("option", name, value, is_shared=True)
        for entry in self._parameters_of_optimizer(optimizer):
            self._recorder.record(
                "gradient at the step",
                entry.name,
                entry.parameter.grad,
                is_shared=entry.model.is_shared,
            )

    def _after_step(self, optimizer: Any, *_: object) -> None:
        """Record parameters and optimizer state, and end the step of the loop."""
        if self._stepping_id != id(optimizer):
            return  # the hooks have been called before, for the step() of a base class
        self._stepping_id = None
        is_first = self._first_optimizer_id == id(optimizer)
        if self._is_recording():
            # The optimizer computes its state first.
            self._record_optimizer_state("optimizer state", optimizer)
            for entry in self._parameters_of_optimizer(optimizer):
                is_shared = entry.model.is_shared
                self._recorder.record("parameter", entry.name, entry.parameter, is_shared=is_shared)
            if is_first:
                for model in self._models:
                    self._record_buffers("buffer", model)
                self._record_random_states("random state")
        if is_first:
            self._recorder.end_step()

    def _record_buffers(self, kind: str, model: _Model) -> None:
        """Record the buffers of a module, which may differ between ranks."""
        for name, buffer in model.contract.module.named_buffers():
            self._recorder.record(kind, f"{model.prefix}{name}", buffer)

    def _record_random_states(self, kind: str) -> None:
        for name, digest in stream_digests().items():
            self._recorder.record(kind, name, digest)

    def _record_optimizer_state(self, kind: str, optimizer: Optimizer) -> None:
        """Record the state of an optimizer, by the names of the parameters."""
        for entry in self._parameters_of_optimizer(optimizer):
            # Not `optimizer.state[parameter]`, which would add an entry.
            state = optimizer.state.get(entry.parameter, {})
            for key, value in state.items():
                is_shared = entry.model.is_shared
                self._recorder.record(kind, f"{entry.name} {key}", value, is_shared=is_shared)

    def _parameters_of_optimizer(self, optimizer: Optimizer) -> list[_NamedParameter]:
        """Return the parameters of an optimizer that belong to set-up modules."""
        by_id: dict[int, _NamedParameter] = {}
        for model in self._models:
            for entry in _parameters_of_model(model):
                by_id[id(entry.parameter)] = entry
        entries: list[_NamedParameter] = []
        for parameter in parameters_of(optimizer):
            if id(parameter) in by_id:
                entries.append(by_id[id(parameter)])
        return entries

    def _title_of(self, optimizer: Optimizer) -> str:
        """Return the class of an optimizer, with its number if several are set up."""
        title = type(optimizer).__name__
        optimizers = list(self._session.optimizers)
        if len(optimizers) > 1 and optimizer in optimizers:
            return f"{title} {optimizers.index(optimizer) + 1}"
        return title


def _parameters_of_model(model: _Model) -> list[_NamedParameter]:
    """Return the parameters of a set-up module, also during a forward pass that replaces them."""
    entries: list[_NamedParameter] = []
    for name, parameter in model.contract.parameters().items():
        entries.append(_NamedParameter(f"{model.prefix}{name}", parameter, model))
    return entries

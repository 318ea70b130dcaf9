"""A tape of tensor operations from which any tensor that was written on it can be computed.

[Note: Tape] Tensors on the tape are ordinary meta tensors: shape, strides and dtype, no memory. A *storage* on the tape
is the storage of such a tensor, known by a number; a *slot* says how a tensor lies in one. Since a slot follows from
the tensor itself, views, ``Parameter(t)``, ``t.data`` and ``p.data = t`` need no entry: only operations that make or
change a storage have one. Every random operation keeps the state that its generator had, so that each storage can be
computed alone, out of the original order, from its *closure*: the operations that made it or changed it, and those that
made or changed what these read, up to the moment they read it. Memory is thus bounded by what one closure needs, in
whatever order a model was built and however often it was initialised.
"""

import ctypes
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fabric._torch import storage_key, storage_reference
from fabric.errors import UsageError
from fabric.tree import flatten, unflatten

__all__ = ["BUILT_WHOLE", "Evaluation", "Litter", "Operation", "Outside", "Slot", "Tape"]

_TRIM_AFTER = 16 * 2**20  # bytes
BUILT_WHOLE = 'fabric.init_module(source="rank0"), which builds it in the memory of rank 0 and sends out shards'


@dataclass(frozen=True, slots=True)
class Slot:
    """How one tensor lies in a storage of the tape; ``size``, ``stride`` and ``offset`` count elements."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view(self, memory: torch.UntypedStorage) -> Tensor:
        """The tensor that this slot describes, on real memory that it shares."""
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(memory, self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class Outside:
    """A real tensor that an operation read, by reference, and its version then; None where versions are not kept."""

    reference: Callable[[], Tensor | None]
    version: int | None

    @classmethod
    def of(cls, tensor: Tensor, weakly: bool = False) -> "Outside":
        """Refer to a tensor as it is now; ``weakly`` does not keep it alive."""
        version = None if tensor.is_inference() else tensor._version
        return cls(weakref.ref(tensor) if weakly else lambda: tensor, version)

    def value(self) -> Tensor:
        """The tensor, unchanged since.

        Raises:
            UsageError: it was written to after it was read, or is gone.
        """
        tensor = self.reference()
        if tensor is None:
            raise UsageError(
                "the values of a tensor, while rank 0 alone builds the model whole",
                "they come from a real tensor, such as a numpy array, that is not kept on this rank",
                "values that are read right after they were made, or follow from random numbers",
                "the module built outside of fabric.init_module(), which takes memory for all of it on every rank",
            )
        if self.version is not None and tensor._version != self.version:
            raise UsageError(
                f"a deferred parameter or buffer was filled from a real tensor of shape {tuple(tensor.shape)}",
                "that tensor was changed in place afterwards, before its values were used",
                "real tensors that stay as they were while the module was built",
                f"pass a clone of it, or {BUILT_WHOLE}",
            )
        return tensor


@dataclass(frozen=True, slots=True)
class Operation:
    """One entry of the tape.

    Attributes:
        function: the ATen operation.
        leaves: its arguments in the order of :func:`fabric.tree.flatten`; tensors are a :class:`Slot` or
            :class:`Outside`, generators are left out.
        structure: how the leaves form ``(args, kwargs)``.
        outputs: where the tensors that it returned lie.
        storages: all storages that it read, made or changed.
        default_dtype: torch's default dtype when it ran.
        generator_state: of the generator that it drew from, before it did; None when it is not random.
        own_generator: whether that generator was passed as an argument, rather than torch's default one.
    """

    function: Callable[..., Any]
    leaves: Sequence[Any]
    structure: Any
    outputs: Sequence[Slot]
    storages: frozenset[int]
    default_dtype: torch.dtype
    generator_state: Tensor | None = None
    own_generator: bool = False


@dataclass(slots=True)
class Tape:
    """What was done to meta tensors, in order. See ``[Note: Tape]``."""

    operations: list[Operation] = field(default_factory=list)
    _writers: dict[int, list[int]] = field(default_factory=dict)
    _alive: dict[int, Any] = field(default_factory=dict)

    def admit(self, tensor: Tensor) -> Slot:
        """Put the storage of a new meta tensor on the tape; one that is there already stays as it is."""
        # The weak reference keeps the number from being given to another storage.
        key = storage_key(tensor.untyped_storage())
        self._alive.setdefault(key, storage_reference(tensor.untyped_storage()))
        self._writers.setdefault(key, [])
        return _slot(tensor, key)

    def slot(self, tensor: Tensor) -> Slot | None:
        """Where a tensor lies on the tape; None when it does not."""
        if tensor.layout is not torch.strided or not tensor.is_meta:
            return None
        key = storage_key(tensor.untyped_storage())
        return _slot(tensor, key) if key in self._writers else None

    def append(self, operation: Operation, written: Collection[int]) -> None:
        """Add an operation that made or changed the storages ``written``."""
        for storage in written:
            self._writers[storage].append(len(self.operations))
        self.operations.append(operation)

    def is_dead(self, storage: int) -> bool:
        """Whether no tensor lies in this storage any more."""
        return self._alive[storage].expired()

    def closure(self, storages: Collection[int]) -> list[int]:
        """The operations, in order, that give these storages the contents which they have now."""
        chosen: set[int] = set()
        until: dict[int, int] = {}
        wanted = [(storage, len(self.operations)) for storage in storages]
        while wanted:
            storage, end = wanted.pop()
            start = until.get(storage, 0)
            if end <= start:
                continue
            until[storage] = end
            for index in self._writers[storage]:
                if start <= index < end and index not in chosen:
                    chosen.add(index)
                    wanted += [(read, index) for read in self.operations[index].storages]
        return sorted(chosen)

    def reached_from(self, storages: Collection[int]) -> set[int]:
        """The storages on which the contents of these depend, themselves included."""
        found = set(storages)
        return found.union(*(self.operations[index].storages for index in self.closure(storages)))


class Litter:
    """Small blocks of memory that are free: given back to the system now and then.

    glibc keeps them for itself, and between them lie those of the tape, into which the next values do not fit, so that
    a process would grow by much more than is in use (measured: to 320 MB instead of 190).
    """

    def __init__(self) -> None:
        self._bytes = 0
        # Other C libraries have no such function.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def add(self, sizes: Iterable[int]) -> None:
        """Count blocks of so many bytes, which are free now or soon."""
        self._bytes += sum(sizes)
        if self._trim is not None and self._bytes >= _TRIM_AFTER:
            self._trim(0)
            self._bytes = 0


class Evaluation:
    """Real memory for some storages of a tape, filled by running their closures again.

    Nothing is drawn from a caller's generators: their states are as before after every call.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._memory: dict[int, torch.UntypedStorage] = {}
        self._done: set[int] = set()
        self._litter = Litter()

    def run(self, slots: Sequence[Slot], resume: bool = False) -> list[Tensor]:
        """Compute the tensors in these slots as they are at the end of the tape, sharing memory where they did.

        Args:
            slots: where the tensors lie.
            resume: continue from what the last call computed, where it is still right, and keep what may be asked for
                next; otherwise everything that is not in ``slots`` is freed with its last use.
        """
        targets = {slot.storage for slot in slots}
        indices = self._tape.closure(targets)
        todo = self._remaining(indices) if resume else indices
        if todo is indices:
            self._memory, self._done = {}, set()
        last_use = {storage: index for index in indices for storage in self._tape.operations[index].storages}
        with torch.no_grad():
            for index in todo:
                self._execute(self._tape.operations[index])
                self._litter.add(
                    slot.size.numel() * slot.dtype.itemsize for slot in self._tape.operations[index].outputs
                )
                self._done.add(index)
                for storage in self._tape.operations[index].storages:
                    unused = last_use[storage] == index and storage not in targets
                    if unused and (not resume or self._tape.is_dead(storage)):
                        self._memory.pop(storage, None)
            return [slot.view(self._memory[slot.storage]) for slot in slots]

    def clear(self) -> None:
        """Let go of all memory; what :meth:`run` returned keeps its own."""
        self._memory, self._done = {}, set()

    def _remaining(self, indices: list[int]) -> list[int]:
        """What of a closure is still to run on the memory that is there; what it does not need of that is let go."""
        todo = [index for index in indices if index not in self._done]
        # What was skipped then and is needed now would have to run before what was done then.
        if todo and todo[0] < max(self._done, default=-1):
            return indices
        needed = {storage for index in indices for storage in self._tape.operations[index].storages}
        self._memory = {storage: memory for storage, memory in self._memory.items() if storage in needed}
        self._done.intersection_update(indices)
        return todo

    def _execute(self, operation: Operation) -> None:
        args, kwargs = unflatten(operation.structure, [self._real(leaf) for leaf in operation.leaves])
        with _default_dtype(operation.default_dtype), _generator(operation, kwargs):
            result = operation.function(*args, **kwargs)
        outputs = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
        for slot, output in zip(operation.outputs, outputs, strict=True):
            if slot.storage not in self._memory:
                self._memory[slot.storage] = self._laid_out(output, slot, operation)

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return leaf.view(self._memory[leaf.storage])
        return leaf.value() if isinstance(leaf, Outside) else leaf

    def _laid_out(self, output: Tensor, slot: Slot, operation: Operation) -> torch.UntypedStorage:
        """The memory of a result; a copy where a kernel laid it out unlike its meta kernel, or returned its input."""
        storage = output.untyped_storage()
        taken = {storage_key(memory) for memory in self._memory.values()}
        taken |= {storage_key(leaf.value().untyped_storage()) for leaf in operation.leaves if isinstance(leaf, Outside)}
        if _slot(output, slot.storage) == slot and storage_key(storage) not in taken:
            return storage
        extent = slot.offset + sum((n - 1) * step for n, step in zip(slot.size, slot.stride, strict=True)) + 1
        memory = torch.empty(extent if output.numel() else 0, dtype=slot.dtype, device="cpu").untyped_storage()
        slot.view(memory).copy_(output)
        return memory


def _slot(tensor: Tensor, storage: int) -> Slot:
    return Slot(storage, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _generator(operation: Operation, kwargs: dict[str, Any]) -> Iterator[None]:
    """Let a random operation draw what it drew when it was recorded, and nothing from anybody's generator."""
    if operation.generator_state is None:
        yield
    elif operation.own_generator:
        kwargs["generator"] = torch.Generator().set_state(operation.generator_state)
        yield
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.set_state(operation.generator_state)
            yield

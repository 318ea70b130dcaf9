"""Which leaves of a collection travel, in which dtype, and in which buffer.

[Note: Buffers] Leaves of one dtype travel in one flat, contiguous buffer and thus in one collective, in the order in
which :func:`fabric.tree.flatten` visits them. Nothing here writes into what the caller passed, and gloo reduces the
wrong elements of a non-contiguous view (pytorch#192920), so a buffer is a copy wherever it is written to or has strides
of its own. Results are copies out of it again: one that is kept, saved or changed has nothing to do with the others.
0-dim results without a gradient lie side by side in one storage, but each is a tensor of its own, no view. Python
floats travel as float64, ints as int64, complex numbers as complex128. Dtypes that a backend does not carry travel in
one that holds all their values, and 16-bit floats whose mean is taken in float32, since their sum may overflow where
the mean does not.

[Note: Rows] A tensor of shape ``(size, *s)`` has a row of shape ``s`` for each rank. Its buffer has shape
``(size, n)``, so that the parts of one rank lie together.
"""

from array import array
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from numbers import Complex, Integral, Real
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor

from fabric._torch import unbind_apart
from fabric.collectives.autograd import run_differentiable
from fabric.communicators import Collective, Communicator
from fabric.errors import ConfigurationError, FabricError
from fabric.tree import Structure, flatten, leaf_paths

__all__ = [
    "CARRIERS",
    "MEAN_CARRIERS",
    "Header",
    "Parcel",
    "Refusal",
    "as_number",
    "check_refusals",
    "check_tensor",
    "pack",
    "pack_rows",
    "run",
    "signature",
]

# Which dtype carries another; every value survives the way there and back. bool: min is all, max is any.
# uint64 wraps around on both ways, as its sums and products do.
CARRIERS = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
}
MEAN_CARRIERS = {
    **CARRIERS,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
_NUMBERS = {float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128}
# The numbers of other libraries, numpy's for one. In this order: each kind is one of the later kinds too.
_OTHER_NUMBERS: tuple[tuple[type, type[int] | type[float] | type[complex]], ...] = (
    (Integral, int),
    (Real, float),
    (Complex, complex),
)
_INT64 = range(-(2**63), 2**63)
_ARRAYS = {torch.float64: "d", torch.int64: "q"}  # torch reads an array without looking at each number
_PLAIN = frozenset([Tensor, torch.nn.Parameter])
_dtype_of = attrgetter("dtype")


@dataclass
class Parcel:
    """The leaves of one dtype, and where they stand among all leaves: the tensors, then the numbers.

    Attributes:
        dtype: of the leaves.
        rows: number of rows that each tensor has, see ``[Note: Rows]``; None for tensors that travel as they are.
        tensors: the tensors.
        places: where each stands.
        numbers: the Python numbers.
        number_places: where each stands; empty where they are all leaves that there are.
        stacked: the buffer of 0-dim tensors alone, where they could be stacked; else None.
    """

    dtype: torch.dtype
    rows: int | None = None
    tensors: list[Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)
    number_places: list[int] = field(default_factory=list)
    stacked: Tensor | None = None

    def requires_grad(self) -> bool:
        """Whether a tensor asks for a gradient."""
        return any(tensor.requires_grad for tensor in self.tensors)

    def buffer(self, device: torch.device, carriers: Mapping[torch.dtype, torch.dtype], detach: bool = False) -> Tensor:
        """A fresh buffer that holds all leaves, in the dtype that carries them; of shape ``(n,)`` or ``(rows, n)``."""
        if self.stacked is not None:
            stacked = self.stacked.detach() if detach else self.stacked
            return stacked.to(device, carriers.get(self.dtype, self.dtype))
        if not self.tensors:
            return self._number_tensor().to(device, carriers.get(self.dtype, self.dtype))
        leading = () if self.rows is None else (self.rows,)
        parts = [
            (tensor.detach() if detach else tensor).to(device).reshape(*leading, tensor.numel() // prod(leading))
            for tensor in self.tensors
        ]
        if self.numbers:
            parts.append(self._number_tensor().to(device))
        # A copy also of a single part, with its conjugation carried out.
        return torch.cat(parts, dim=-1).to(carriers.get(self.dtype, self.dtype))

    def unpack(self, buffer: Tensor, leaves: list[Any], leading: tuple[int, ...] = ()) -> None:
        """Put the parts of ``buffer``, of shape ``(*leading, n)``, in the places that the leaves came from."""
        if self.stacked is not None and not buffer.requires_grad:
            apart = buffer.to(self.tensors[0].device, self.dtype)
            # One after the other in memory, each of shape leading.
            leaves[:] = unbind_apart(apart.t().contiguous() if leading else apart)
            return
        if not self.tensors:
            self.unpack_numbers((buffer.t() if leading else buffer).tolist(), leaves)
            return
        sizes = [tensor.numel() // (self.rows or 1) for tensor in self.tensors]
        if self.numbers:
            sizes.append(len(self.numbers))
        parts = buffer.split(sizes, dim=-1)
        for place, tensor, part in zip(self.places, self.tensors, parts, strict=False):
            if buffer.requires_grad and not tensor.requires_grad:
                part = part.detach()
            shape = tensor.shape if self.rows is None else tensor.shape[1:]
            alone = len(parts) == 1
            leaves[place] = part.to(tensor.device, self.dtype, copy=not alone).reshape((*leading, *shape))
        if self.numbers:
            self.unpack_numbers(parts[-1].movedim(-1, 0).tolist(), leaves)

    def unpack_numbers(self, numbers: list[Any], leaves: list[Any]) -> None:
        """Put numbers, or a list of all ranks' for each, in the places that the numbers came from."""
        if self.dtype is torch.bool:
            numbers = [list(map(bool, one)) if isinstance(one, list) else bool(one) for one in numbers]
        if len(numbers) == len(leaves):
            leaves[:] = numbers
            return
        for place, number in zip(self.number_places, numbers, strict=True):
            leaves[place] = number

    def _number_tensor(self) -> Tensor:
        if code := _ARRAYS.get(self.dtype):
            return torch.frombuffer(array(code, self.numbers), dtype=self.dtype)
        return torch.tensor(self.numbers, dtype=self.dtype)


def pack(leaves: list[Any], structure: Structure, numbers: bool = True, foreign: bool = False) -> list[Parcel]:
    """Sort leaves into one parcel for each dtype, in the order in which the dtypes first occur.

    Args:
        leaves: of a collection. Tensors travel, and Python numbers; what is neither stays where it is.
        structure: of the collection, for error texts.
        numbers: whether Python numbers travel.
        foreign: whether arrays of other libraries, and mappings that are not taken apart, may stay where they are.

    Raises:
        ConfigurationError: a leaf cannot travel, or looks like data and would not.
    """
    kinds = set(map(type, leaves))
    if kinds == {Tensor} and (parcel := _stack(leaves)) is not None:
        return [parcel]
    if kinds == {float} and numbers:
        return [Parcel(torch.float64, numbers=leaves[:])]
    parcels: dict[torch.dtype, Parcel] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            check_tensor(leaf, structure, place)
            parcel = parcels.setdefault(leaf.dtype, Parcel(leaf.dtype))
            parcel.tensors.append(leaf)
            parcel.places.append(place)
        elif (found := as_number(leaf)) is not None:
            if numbers:
                number, dtype = found
                if dtype is torch.int64 and number not in _INT64:
                    _refuse_number(number, leaf_paths(structure)[place])
                parcel = parcels.setdefault(dtype, Parcel(dtype))
                parcel.numbers.append(number)
                parcel.number_places.append(place)
        elif not foreign and _is_foreign(leaf):
            _refuse_foreign(leaf, leaf_paths(structure)[place])
    return list(parcels.values())


def pack_rows(leaves: list[Any], structure: Structure, size: int, operation: str) -> list[Parcel]:
    """:func:`pack` for tensors with a row for each rank, see ``[Note: Rows]``; numbers have none.

    Raises:
        ConfigurationError: as there; or a leaf does not have ``size`` rows.
    """
    parcels = pack(leaves, structure)
    for parcel in parcels:
        parcel.rows, parcel.stacked = size, None
        wrong = [
            place
            for place, tensor in zip(parcel.places, parcel.tensors, strict=True)
            if tensor.dim() == 0 or tensor.shape[0] != size
        ]
        if wrong or parcel.numbers:
            places = parcel.number_places or (range(len(leaves)) if parcel.numbers else ())
            _refuse_rows(leaves, structure, [*wrong, *places], size, operation)
    return parcels


def run(communicator: Communicator, collective: Collective) -> Tensor:
    """Make a call over a buffer, with its gradient if the buffer requires one, see ``[Note: Gradients]``."""
    if collective.buffer.requires_grad and torch.is_grad_enabled():
        return run_differentiable(communicator, collective)
    return communicator.run(collective)


def signature(tree: Any, grads: bool, numbers: bool = True) -> str:
    """A text of what has to agree over ranks: structure, shapes, dtypes and, if ``grads``, what requires a gradient.

    A rank whose tensor requires none would not take part in the collective of the backward pass.
    """
    leaves, structure = flatten(tree)
    parts = []
    for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
        if isinstance(leaf, Tensor):
            grad = " with gradient" if grads and leaf.requires_grad else ""
            parts.append(f"{path} {str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}{grad}".lstrip())
        elif numbers and (found := as_number(leaf)) is not None:
            parts.append(f"{path} {type(found[0]).__name__}".lstrip())
    return ", ".join(parts)


def check_tensor(tensor: Tensor, structure: Structure, place: int) -> None:
    """Raise a ConfigurationError, which names the leaf, for a tensor that has no dense values of its own here."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        wrong = "on the meta device and has no values" if tensor.is_meta else f"laid out as {tensor.layout}"
        instead = "module.to_empty(device=fabric.device)" if tensor.is_meta else "x.to_dense()"
    elif type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh"):
        wrong, instead = "sharded over ranks already (a DTensor)", "x.full_tensor() for the whole, or x.to_local()"
    else:
        return
    raise ConfigurationError(
        f"a collective over {leaf_paths(structure)[place] or 'a tensor'} of shape {tuple(tensor.shape)}",
        f"it is {wrong}",
        "dense tensors on a device",
        instead,
    )


def _stack(tensors: list[Tensor]) -> Parcel | None:
    """A parcel of 0-dim tensors of one dtype, made in few steps: for a thousand metrics these are what costs."""
    if tensors[0].dim() or len(set(map(_dtype_of, tensors))) > 1:
        return None
    try:
        stacked = torch.stack(tensors)
    except RuntimeError:  # not all of one shape, or on one device
        return None
    if stacked.layout is not torch.strided or stacked.is_meta:
        return None
    return Parcel(stacked.dtype, tensors=tensors[:], places=list(range(len(tensors))), stacked=stacked)


def as_number(leaf: Any) -> tuple[Any, torch.dtype] | None:
    """A leaf as a Python number, and the dtype in which it travels; None when it is no number."""
    if type(leaf) in _NUMBERS:
        return leaf, _NUMBERS[type(leaf)]
    for abstract, kind in _OTHER_NUMBERS:
        if isinstance(leaf, abstract):
            return None if isinstance(leaf, Enum) else (kind(leaf), _NUMBERS[kind])
    return None


def _is_foreign(leaf: Any) -> bool:
    """Whether a leaf is another library's array, or a container that is not taken apart."""
    if isinstance(leaf, type | bytearray):
        return False
    return hasattr(leaf, "__array__") or isinstance(leaf, Mapping | MutableSequence)


def _refuse_foreign(leaf: Any, path: str) -> NoReturn:
    container = isinstance(leaf, Mapping | MutableSequence)
    raise ConfigurationError(
        f"a collective over {path or 'an object'} of type {type(leaf).__name__}",
        "it is taken for a single object, and would come back with the values of this rank alone",
        "tensors and Python numbers, in dicts, lists, tuples, dataclasses and types registered with torch's pytree",
        f"{'dict' if isinstance(leaf, Mapping) else 'list'}(x)"
        if container
        else "torch.as_tensor(x), or x.item() for a single value",
    )


def _refuse_number(number: int, path: str) -> NoReturn:
    raise ConfigurationError(
        f"a collective over {path or 'a number'} = {number}",
        "it does not fit in the 64 bits in which integers travel",
        "integers from -2**63 to 2**63 - 1",
        "float(x), which is exact to 53 bits",
    )


def _refuse_rows(leaves: list[Any], structure: Structure, wrong: list[int], size: int, operation: str) -> NoReturn:
    paths = leaf_paths(structure)
    found = [
        f"{paths[place] or 'it'} is "
        + (f"of shape {tuple(leaf.shape)}" if isinstance(leaf := leaves[place], Tensor) else f"the number {leaf!r}")
        for place in sorted(wrong)
    ]
    raise ConfigurationError(
        f"{operation}(...) in a group of {size}",
        f"there is no row for each rank: {'; '.join(found)}",
        f"tensors of shape ({size}, ...), row i for rank i",
        f"x.unflatten(0, ({size}, -1)) for a tensor whose length {size} divides; torch.tensor([...]) for numbers",
    )


@dataclass(frozen=True)
class Refusal:
    """What travels in place of an object that cannot, so that every rank raises."""

    error: FabricError


def check_refusals(answers: Sequence[Any]) -> None:
    """Raise the first error among what all ranks answered; every rank raises the same."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, Refusal):
            answer.error.add_note(f"raised on rank {rank}")
            raise answer.error


class Header:
    """What a receiver has to know of a tensor before it comes; no dataclass, since those are collections."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.on_cpu = tensor.shape, tensor.dtype, tensor.device.type == "cpu"
        self.requires_grad = tensor.requires_grad and torch.is_grad_enabled()

    def home(self, device: torch.device) -> torch.device:
        """Where the tensor goes in a process with this device."""
        return torch.device("cpu") if self.on_cpu else device

    def empty(self, device: torch.device) -> Tensor:
        """A tensor to receive into, in a process with this device."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.home(device), requires_grad=self.requires_grad)

    def describes(self, leaf: Any) -> bool:
        """Whether a tensor of the receiver is like the one that comes."""
        return (
            isinstance(leaf, Tensor)
            and (leaf.shape, leaf.dtype, leaf.requires_grad) == (self.shape, self.dtype, self.requires_grad)
            and (leaf.device.type == "cpu") == self.on_cpu
        )

"""Full tensors of sharded ones, gathered in buckets."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fabric._torch import local_tensor
from fabric.checkpoint.encoding import memory_key
from fabric.communicators import Communicator
from fabric.communicators.base import CallDescription, Collective, Operation, Reduce
from fabric.tree import map_tensors

if TYPE_CHECKING:
    from fabric.runtime import Runtime

__all__ = ["BUCKET_BYTES", "FullStateStrategy", "FullTensors", "ShardGatherer"]

BUCKET_BYTES = 2**26  # a save gathers tensors of at most this size at once, to bound the memory

# The names and values of a state, with full tensors. The tensors are None on ranks that do not get
# them.
FullTensors = Iterator[tuple[str, Any]]

_ALIGNMENT = 16  # bytes; a multiple of the size of every dtype


class _Split(NamedTuple):
    """How a tensor is split along one dimension of its mesh.

    Attributes:
        dim: the dimension of the tensor. None if the ranks have equal parts.
        lengths: the length of each rank's part in that dimension.
    """

    dim: int | None
    lengths: Sequence[int]


# The tensor is not split along a dimension of its mesh: the ranks have equal parts.
_NOT_SPLIT = _Split(dim=None, lengths=())


class _Shard(NamedTuple):
    """This rank's part of a tensor that is being gathered.

    Attributes:
        part: the values.
        splits: how the tensor is split along each dimension of its mesh.
    """

    part: Tensor
    splits: Sequence[_Split]


class _Route(NamedTuple):
    """What the shards of a bucket that travel together have in common.

    Attributes:
        mesh: the mesh of their tensors.
        is_split: for each dimension of the mesh, whether the tensors are split along it.
    """

    mesh: Any
    is_split: tuple[bool, ...]


class _Section(NamedTuple):
    """The bytes of one tensor in the message of each rank.

    Attributes:
        part: this rank's part of the tensor.
        split: how the tensor is split over the ranks that send the messages.
        start: the first byte.
        num_bytes: the bytes that every message has for the tensor. They hold the longest part of
            any rank. A rank with a shorter part leaves the last bytes unused.
    """

    part: Tensor
    split: _Split
    start: int
    num_bytes: int


class FullStateStrategy(Protocol):
    """The part of a parallel strategy that gathers the shards of a state."""

    def full_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with full tensors in place of shards. May be collective."""
        ...


# [Note: Buckets of shards]
# The tensors of a bucket are gathered together, one dimension of their mesh after another, from the
# outermost to the innermost. Each gather is one message for the shards of all tensors in the bucket
# that are split along the same dimensions. If one rank alone needs the full tensors, the shards
# travel along each dimension to the ranks that have its coordinate there, and the other ranks are
# done. Shards travel as bytes, so that the tensors of a bucket may differ in dtype. The parts of
# all ranks have sections of equal length in a message, since the backends need it.
@dataclass(frozen=True)
class ShardGatherer:
    """Gathers full tensors of sharded ones.

    Args:
        runtime: the runtime of this rank. Full tensors are returned on its device.
        strategy: gathers what buckets cannot hold, such as the shards of another library.
    """

    runtime: "Runtime"
    strategy: FullStateStrategy

    def gather(
        self,
        state: Mapping[str, Any],
        max_bytes: float,
        dtype: torch.dtype | None = None,
        dst: int | None = None,
    ) -> FullTensors:
        """Yield the names and values of a state, with full tensors in place of shards.

        Collective: all ranks must iterate to the end, or stop at the same tensor. If a rank stops
        earlier and makes another call, all ranks raise an error. Values that are not sharded are
        yielded as they are, cast to ``dtype``. Runs no code of the user.

        Args:
            state: the values by name. A value may be anything.
            max_bytes: the size of a bucket. A larger tensor has a bucket of its own.
            dtype: the dtype of floating tensors. None leaves the tensors as they are.
            dst: the only rank that gets values. The others get None for each value.
        """
        for bucket in _split_into_buckets(state, max_bytes, dtype):
            yield from self._gather_bucket(bucket, dtype, dst)

    def copy_to_first_rank(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return copies of the values of a state, with full tensors on the CPU. Collective.

        On ranks other than rank 0, an empty dict is returned.

        Args:
            state: the state of a module, with shards as DTensors.
        """
        is_first = self.runtime.communicator.rank == 0
        full_state: Any = {}
        if is_first:
            # A shallow copy keeps the versions of layers that torch attaches to a state dict.
            full_state = copy.copy(state)
        copies: dict[Any, Any] = {}
        for name, full in self.gather(state, BUCKET_BYTES, dst=0):
            if not is_first:
                continue
            # Values with the same memory, such as tied weights, get the same copy. A tensor without
            # a memory key (an empty one, or of another library's class) has a copy of its own. The
            # key is that of the value in ``state``: each gathered tensor has new memory.
            key = memory_key(state[name]) or name
            if key not in copies:
                copies[key] = map_tensors(_copy_to_cpu, full)
            full_state[name] = copies[key]
        return full_state

    def _gather_bucket(
        self, bucket: dict[str, Any], dtype: torch.dtype | None, dst: int | None
    ) -> FullTensors:
        """Yield what :meth:`gather` yields, for the values of one bucket. Collective.

        Shards with the same route travel in one message. A value without a route, such as a plain
        tensor, is gathered alone or needs no gather.
        """
        # The routes of the values that are gathered from shards, by name.
        routes: dict[str, _Route] = {}
        shards_by_route: dict[_Route, list[_Shard]] = {}
        for name, value in bucket.items():
            splits = _describe_splits(value)
            if splits is None:
                continue  # not a DTensor, or one that cannot be gathered from shards
            is_split = tuple(split.dim is not None for split in splits)
            route = _Route(value.device_mesh, is_split)
            routes[name] = route
            part = _cast(local_tensor(value).detach(), dtype)
            shards_by_route.setdefault(route, []).append(_Shard(part, splits))
        if shards_by_route:
            # The names say which bucket this rank gathers: another rank may have left the iteration
            # early and begun another one.
            first_name = next(iter(bucket))
            last_name = next(reversed(bucket))
            self._check_same_call(f"{first_name} to {last_name}, {dtype=}, {dst=}")
        # All ranks have the same values in the same order, so all ranks gather the routes in the
        # same order. The iterators yield the tensors of a route in the order of its shards, which
        # is the order of the bucket.
        tensors_by_route: dict[_Route, Iterator[Tensor | None]] = {}
        for route, shards in shards_by_route.items():
            tensors_by_route[route] = self._gather_shards(route.mesh, shards, dst)
        for name, value in bucket.items():
            if name in routes:
                yield name, next(tensors_by_route[routes[name]])
            else:
                yield name, self._gather_alone(name, value, dtype, dst)

    def _gather_alone(
        self, name: str, value: Any, dtype: torch.dtype | None, dst: int | None
    ) -> Any:
        """Return one full value, gathered without the others. None if ``dst`` is another rank.

        For values that are not sharded, and for shards that :meth:`_gather_shards` cannot join.
        Collective.

        Args:
            name: the name of the value.
            value: any value.
            dtype: the dtype of a floating tensor. None leaves it as it is.
            dst: the only rank that gets the value. None: all ranks get it.
        """
        # Collective, so called on the ranks that do not get the value, too.
        full = self.strategy.full_state({name: value})[name]
        if dst is not None and self.runtime.communicator.rank != dst:
            return None
        return _cast(full, dtype)

    def _check_same_call(self, text: str) -> None:
        """Raise an error on all ranks if another rank makes another call. Collective.

        The gathers that follow may be in groups of some ranks. These groups do not notice that a
        rank outside of the group makes another call. ``text`` must be the same on all ranks.
        """
        if self.runtime.communicator.size == 1:
            return
        # The all-reduce is made only for the comparison of signature_text, which the communicator
        # makes with every collective. With reads_result, the communicator raises in this call, and
        # not in a later one. The tensor has no meaning.
        call = CallDescription(
            "iter_full_tensors", lambda: text, signature_text=text, reads_result=True
        )
        unused = torch.zeros(1, device=self.runtime.communicator.device)
        collective = Collective(Operation.ALL_REDUCE, unused, Reduce.MAX, call=call)
        self.runtime.communicator.run(collective)

    def _gather_shards(
        self, mesh: Any, shards: list[_Shard], dst: int | None
    ) -> Iterator[Tensor | None]:
        """Return the full tensors of shards that have the same route. Collective.

        The iterator joins each tensor when it is read, one at a time. It yields None on ranks that
        do not get the tensors: all ranks but ``dst``, unless ``dst`` is None.
        """
        # The positions of this rank and of dst along each dimension of the mesh. None: no dst.
        coordinate: Sequence[int] = mesh.get_coordinate()
        dst_coordinate: Sequence[int] | None = None
        if dst is not None:
            coordinates = (mesh.mesh == dst).nonzero().tolist()
            if not coordinates:
                # The mesh has only some of the ranks. dst is in another mesh, whose ranks have the
                # same tensors and gather them.
                return repeat(None, len(shards))
            dst_coordinate = coordinates[0]
        parts: Iterator[Tensor] = iter([shard.part for shard in shards])
        for mesh_dim in range(mesh.ndim):
            # The rank in the group along this dimension that receives. None: all ranks receive.
            root: int | None = None
            if dst_coordinate is not None:
                root = dst_coordinate[mesh_dim]
            splits = [shard.splits[mesh_dim] for shard in shards]
            # Shards of the same route are split along the same dimensions of the mesh, so this
            # holds for all of them.
            is_split = splits[0].dim is not None
            if is_split:
                communicator = self.runtime.communicator_over(mesh.get_group(mesh_dim))
                # list() joins the parts that the gather along the previous dimension received.
                sections = _lay_out_sections(list(parts), splits)
                parts = self._gather_parts(communicator, sections, root)
            if root is not None and coordinate[mesh_dim] != root:
                # This rank has sent its parts to root, or has the same parts as root if the tensors
                # are not split along this dimension. It takes no part in the gathers that follow.
                return repeat(None, len(shards))
        return map(self._to_device, parts)

    def _gather_parts(
        self, communicator: Communicator, sections: list[_Section], root: int | None
    ) -> Iterator[Tensor]:
        """Return the parts of tensors, joined along one dimension of a mesh. Collective.

        The iterator joins the parts of a tensor when the tensor is read. On ranks other than
        ``root``, it is empty.

        Args:
            communicator: the ranks along the dimension.
            sections: this rank's part of each tensor, and where the part is in a message.
            root: the only rank of ``communicator`` that gets the joined parts. None for all ranks.
        """
        last = sections[-1]
        # The length does not depend on the rank: each section has room for the longest part.
        message = torch.zeros(
            last.start + last.num_bytes, dtype=torch.uint8, device=communicator.device
        )
        for section in sections:
            content = section.part.contiguous().view(-1).view(torch.uint8)
            message[section.start : section.start + len(content)] = content
        if root is None:
            messages = communicator.all_gather(message)
        else:
            messages = communicator.gather(message, root)
        if messages is None:
            return iter(())
        return (_join_parts(messages, section) for section in sections)

    def _to_device(self, tensor: Tensor) -> Tensor:
        """Move a tensor from the device of the communicator to the device of the job."""
        return tensor.to(self.runtime.device)


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _split_into_buckets(
    state: Mapping[str, Any], max_bytes: float, dtype: torch.dtype | None
) -> Iterator[dict[str, Any]]:
    """Split a state into buckets of at most ``max_bytes`` each, in the order of its names.

    A larger value has a bucket of its own. Values that are not tensors count as 0 bytes. ``dtype``
    is what floating tensors are cast to when they are gathered, so their sizes are in this dtype.
    """
    bucket: dict[str, Any] = {}
    size_of_bucket = 0
    for name, value in state.items():
        size = 0
        if isinstance(value, Tensor):
            itemsize = value.itemsize
            if dtype is not None and value.is_floating_point():
                itemsize = dtype.itemsize
            size = value.numel() * itemsize
        if bucket and size_of_bucket + size > max_bytes:
            yield bucket
            bucket = {}
            size_of_bucket = 0
        bucket[name] = value
        size_of_bucket += size
    if bucket:
        yield bucket


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a floating tensor in another dtype, and any other value unchanged."""
    if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.to(dtype)


def _describe_splits(value: Any) -> list[_Split] | None:
    """Return how a tensor is split along each dimension of its mesh.

    All ranks get None for the same tensors:

    - a plain tensor,
    - a DTensor whose local part is a tensor subclass,
    - a DTensor with a placement that :func:`_split_along` cannot describe, such as a partial sum.
    """
    local = local_tensor(value)
    is_dtensor = local is not value
    # The parts travel as plain bytes. The data of a tensor subclass is in several tensors.
    if not is_dtensor or type(local) is not Tensor:
        return None
    splits: list[_Split] = []
    for mesh_dim, placement in enumerate(value.placements):
        if placement.is_replicate() or value.device_mesh.size(mesh_dim) == 1:
            splits.append(_NOT_SPLIT)
            continue
        split = _split_along(value, mesh_dim)
        if split is None:
            return None
        splits.append(split)
    return splits


def _split_along(tensor: Any, mesh_dim: int) -> _Split | None:
    """Return how a DTensor is split along a dimension of its mesh.

    The length of this rank's part is computed and not communicated, so it has to be computed as
    torch does it. None, if the caller has to gather the tensor in another way:

    - The placement is a partial sum.
    - A later dimension of the mesh splits the same tensor dimension, after this one has split it.
      Only the opposite order, in which FSDP splits what tensor parallelism has split, is supported.
    """
    mesh = tensor.device_mesh
    placement = tensor.placements[mesh_dim]
    # The placement of a partial sum has no tensor dimension.
    dim = getattr(placement, "dim", None)
    if dim is None:
        return None
    # Tensor parallelism, along a later (inner) dimension of the mesh, splits a tensor first. FSDP
    # then splits the part that this rank has. So the length to split is the length of that part.
    length = tensor.shape[dim]
    num_inner_parts = 1
    for inner_dim in range(mesh_dim + 1, mesh.ndim):
        if getattr(tensor.placements[inner_dim], "dim", None) == dim:
            num_inner_parts *= mesh.size(inner_dim)
            inner_lengths = _lengths_of_parts(length, mesh.size(inner_dim))
            length = inner_lengths[mesh.get_local_rank(inner_dim)]
    # If the inner dimensions have split the tensor first, torch records their number of parts as
    # the split_factor of this placement. A plain placement, without the attribute, counts as 1.
    if getattr(placement, "split_factor", 1) != num_inner_parts:
        return None
    return _Split(dim, _lengths_of_parts(length, mesh.size(mesh_dim)))


def _lengths_of_parts(length: int, num_parts: int) -> list[int]:
    """Return the lengths of the parts of a dimension, as ``torch.chunk`` makes them.

    ``torch.chunk`` may make fewer parts. Then the last lengths are 0.
    """
    longest = math.ceil(length / num_parts)
    lengths: list[int] = []
    for number in range(num_parts):
        remaining = max(0, length - number * longest)
        lengths.append(min(longest, remaining))
    return lengths


def _lay_out_sections(parts: Sequence[Tensor], splits: Sequence[_Split]) -> list[_Section]:
    """Return the section of each tensor in a message, the same on all ranks.

    Args:
        parts: this rank's parts of the tensors.
        splits: how each of the tensors is split over the ranks that send messages.
    """
    sections: list[_Section] = []
    start = 0
    for part, split in zip(parts, splits, strict=True):
        # Each section has room for the longest part of any rank: backends gather messages of equal
        # length only.
        longest_shape = _shape_of_part(part, split, max(split.lengths))
        nbytes = math.prod(longest_shape) * part.itemsize
        # Rounded up, so that the next section begins where a view in any dtype can begin.
        num_bytes = math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
        sections.append(_Section(part, split, start, num_bytes))
        start += num_bytes
    return sections


def _shape_of_part(part: Tensor, split: _Split, length: int) -> list[int]:
    """Return the shape of another rank's part of a tensor, given this rank's part.

    ``length`` is the other part's length in the split dimension.
    """
    assert split.dim is not None, "only split tensors are gathered"
    shape = list(part.shape)
    shape[split.dim] = length
    return shape


def _join_parts(messages: Tensor, section: _Section) -> Tensor:
    """Return the parts of one tensor in the messages of all ranks, joined.

    Args:
        messages: a tensor with one row for each rank, the message of the rank.
        section: where the part of the tensor is in each message. The part of a rank may be shorter
            than the section, which has room for the longest part.
    """
    parts: list[Tensor] = []
    for message, length in zip(messages, section.split.lengths, strict=True):
        shape = _shape_of_part(section.part, section.split, length)
        end = section.start + math.prod(shape) * section.part.itemsize
        content = message[section.start : end]
        parts.append(content.view(section.part.dtype).view(shape))
    assert section.split.dim is not None, "only split tensors are gathered"
    return torch.cat(parts, section.split.dim)

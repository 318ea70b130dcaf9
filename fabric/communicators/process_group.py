"""A group of processes that communicate through torch.distributed."""

from collections.abc import Sequence
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from fabric._torch import real_tensors
from fabric.communicators.base import (
    BITWISE,
    MIN_MAX_PRODUCT,
    Collective,
    Communicator,
    Operation,
    Reduce,
    peer_mismatch_error,
)
from fabric.errors import CollectiveMismatchError, UsageError

__all__ = ["ProcessGroupCommunicator", "fold", "to_bytes", "to_tensor"]

# The bytes of the buffers of all ranks up to which they are gathered without the ring of gloo.
_MAX_SMALL_GATHER_BYTES = 1 << 17
# The bytes of a buffer up to which gloo reduces the buffer in few messages.
_MAX_TINY_BYTES = 16

# Stands for the source in a gather of objects, which has none. It is below every rank.
_NO_SOURCE = -1
_LENGTH_BYTES = 8  # of the length before a gathered message
_MAX_INT64 = 2**63 - 1  # also the mask of all bits but the sign
_MIN_INT64 = -(2**63)


def _torch_reductions() -> dict[Reduce, Any]:
    """Return torch's reduction for each of fabric's reductions."""
    reductions = {op: getattr(dist.ReduceOp, op.name) for op in Reduce if op is not Reduce.MEAN}
    # Some backends have no mean, so the caller takes a sum and divides it.
    reductions[Reduce.MEAN] = dist.ReduceOp.SUM
    return reductions


_TORCH_REDUCTIONS = _torch_reductions()
# The function of two tensors for each reduction, except for sums and means.
_COMBINE = BITWISE | MIN_MAX_PRODUCT


class ProcessGroupCommunicator(Communicator):
    """The collectives of a :class:`torch.distributed.ProcessGroup`.

    Args:
        group: the group. None is the default group, which must exist.
        device: the device of this process. Under nccl and similar backends it is the device of
            buffers. Under gloo, buffers are always on the CPU, since gloo carries only some
            operations for CUDA tensors.
        timeout: how long a collective may wait in a group made by :meth:`new_group`. None, the
            default, is torch's default.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        timeout: timedelta | None = None,
    ) -> None:
        """Wrap a group, which :meth:`close` does not destroy. Not a collective."""
        self._group = group
        # Whether new_group() has made the group, so that close() destroys it.
        self._owns_group = False
        # The device of the process, which new_group() passes on. See `self.device` below.
        self._process_device = device
        self._timeout = timeout
        self._is_gloo = dist.get_backend(group) == "gloo"
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # The device of buffers. gloo carries only some operations for CUDA tensors.
        self.device = torch.device("cpu") if self._is_gloo else device

    @override
    def run(self, collective: Collective) -> Any:  # noqa: C901, PLR0912 - one case per operation
        """Make one call of torch.distributed. See the methods of :class:`Communicator`."""
        buffer = collective.buffer
        group = self._group
        # Operations without a peer or a reduction do not use these defaults.
        peer = collective.peer or 0
        op = collective.reduce or Reduce.SUM
        match collective.operation:
            case Operation.ALL_REDUCE:
                return self._all_reduce(buffer, op)
            case Operation.ALL_GATHER:
                return self._all_gather(buffer, collective.rows, collective.output)
            case Operation.REDUCE_SCATTER:
                return self._reduce_scatter(buffer, op)
            case Operation.ALL_TO_ALL:
                output = torch.empty_like(buffer)
                dist.all_to_all_single(output, buffer, group=group)
                return output
            case Operation.BROADCAST:
                dist.broadcast(buffer, group_src=peer, group=group)
            case Operation.SCATTER:
                # torch takes a list of rows on the source, and None on the other ranks.
                rows = None if collective.rows is None else list(collective.rows)
                dist.scatter(buffer, rows, group_src=peer, group=group)
            case Operation.GATHER:
                return self._gather(buffer, peer)
            case Operation.SEND:
                dist.send(buffer, group_dst=peer, group=group)
            case Operation.RECV:
                dist.recv(buffer, group_src=peer, group=group)
            case Operation.BARRIER:
                self._barrier(collective.name)
            case Operation.BROADCAST_OBJECT:
                return self._broadcast_bytes(buffer, peer)
            case Operation.GATHER_OBJECTS:
                return self._gather_bytes(buffer)
            case Operation.NEW_GROUP:
                return self._new_group(buffer)
        # The operations without a return above have written their result into the buffer. A barrier
        # has no buffer and returns None.
        return buffer

    def _is_small(self, buffer: Tensor) -> bool:
        """Return whether :meth:`_all_gather_small` gathers the buffers faster than gloo itself.

        The all-gather of gloo passes the buffers around a ring from one rank to the next.
        """
        return self._is_gloo and self.size * buffer.nbytes <= _MAX_SMALL_GATHER_BYTES

    def _all_gather(
        self, buffer: Tensor, copies: Tensor | None = None, output: Tensor | None = None
    ) -> Tensor:
        """Return the buffers of all ranks. Collective.

        Args:
            buffer: the buffer of this rank.
            copies: one copy of the buffer for each rank. None, the default, if there is none yet.
            output: the tensor to receive into, of shape ``(size, *buffer.shape)``. None, the
                default, is a new one.
        """
        if output is None:
            output = buffer.new_empty((self.size, *buffer.shape))
        if self._is_small(buffer):
            if copies is None:
                copies = torch.stack([buffer] * self.size)
            self._all_gather_small(copies, output)
        else:
            dist.all_gather_single(output.view(-1), buffer.reshape(-1), group=self._group)
        return output

    def _all_gather_small(self, copies: Tensor, output: Tensor) -> None:
        """Gather small buffers of all ranks, see :meth:`_is_small`. Collective.

        Two ranks send each other one message. More ranks send their buffer to rank 0, which sends
        all of them back: an all-to-all would take a message between each pair of ranks, and is
        slower where there are more ranks than cores.

        Args:
            copies: one copy of the buffer of this rank for each rank.
            output: the tensor that is overwritten, of the same shape. Row i comes from rank i.
        """
        if copies.is_complex():
            # Backends have no complex numbers, so their real and imaginary parts are sent.
            copies = torch.view_as_real(copies)
            output = torch.view_as_real(output)
        # None stands for the default group. It is looked up here, since a reference to the group in
        # this object would keep it connected after the user has destroyed it.
        group = self._group or dist.group.WORLD
        assert group is not None, "the default process group was destroyed"
        # Not the functions of torch.distributed, whose checks take as long as a small message.
        if self.size == 2:
            # The two empty lists mean that all rows have one length.
            group.all_to_all_single(output, copies, [], []).wait()
            return
        gathered = []
        if self.rank == 0:
            gathered.append(list(output))
        group.gather(gathered, [copies[0]], dist.GatherOptions()).wait()  # rank 0 is the default
        group.broadcast(output, 0).wait()

    def _all_reduce(self, buffer: Tensor, op: Reduce) -> Tensor:
        """Reduce a buffer over the ranks, in place, and return it. Collective."""
        # If the backend lacks the reduction, or a gather is faster, the ranks exchange their
        # buffers, and each rank reduces them by itself.
        if self._is_reduced_by_each_rank(buffer, op):
            buffers = self.all_gather(buffer).unbind()
            return buffer.copy_(fold(op, buffers))
        is_extremum = op in (Reduce.MIN, Reduce.MAX)
        if is_extremum and buffer.is_floating_point():
            # A backend may ignore a NaN.
            return self._all_reduce_extremum(buffer, op)
        dist.all_reduce(buffer, op=_TORCH_REDUCTIONS[op], group=self._group)
        if op is Reduce.MEAN:
            # In _TORCH_REDUCTIONS, the reduction for a mean is a sum.
            buffer.div_(self.size)
        return buffer

    def _is_reduced_by_each_rank(self, buffer: Tensor, op: Reduce) -> bool:
        """Return whether to gather the buffers, and have each rank reduce them itself."""
        if op in BITWISE:
            # gloo has bitwise reductions, and nccl has none.
            return not self._is_gloo
        if not self._is_gloo:
            return False
        # gloo reduces a tiny buffer in fewer messages than a larger one. For small buffers that are
        # not tiny, the all-gather takes fewer messages.
        is_tiny = buffer.nbytes <= _MAX_TINY_BYTES
        return not is_tiny and self._is_small(buffer)

    def _all_reduce_extremum(self, buffer: Tensor, op: Reduce) -> Tensor:
        """Take the minimum or maximum of floats over the ranks, in place. Collective.

        The result is NaN if any value is NaN, whereas the minimum of a backend may ignore a NaN. So
        the values travel as integers that have the order of the floats. A NaN travels as the
        largest integer for a maximum, or as the least integer for a minimum.
        """
        # Every floating-point value fits into a double without rounding.
        integers = _ordered_integers(buffer.double().view(torch.int64))
        # The largest and the least integer become NaNs when they are converted back below.
        integer_of_nan = _MAX_INT64 if op is Reduce.MAX else _MIN_INT64
        integers.masked_fill_(buffer.isnan(), integer_of_nan)
        dist.all_reduce(integers, op=_TORCH_REDUCTIONS[op], group=self._group)
        # A second call of _ordered_integers() undoes the first one.
        doubles = _ordered_integers(integers).view(torch.float64)
        return buffer.copy_(doubles)

    def _reduce_scatter(self, buffer: Tensor, op: Reduce) -> Tensor:
        """Reduce a buffer of shape ``(size, *s)`` over the ranks, and return this rank's row.

        Collective. The buffer may be overwritten.
        """
        # The other reductions need the special cases of _all_reduce(), such as the one for NaNs.
        if op not in (Reduce.SUM, Reduce.MEAN):
            # The row is cloned, since a view would keep the whole buffer in memory.
            return self._all_reduce(buffer, op)[self.rank].clone()
        output = buffer.new_empty(buffer.shape[1:])
        # torch's default reduction is the sum.
        dist.reduce_scatter_single(output.view(-1), buffer.view(-1), group=self._group)
        if op is Reduce.MEAN:
            output.div_(self.size)
        return output

    def _gather(self, buffer: Tensor, dst: int) -> Tensor | None:
        """Return the buffers of all ranks on rank ``dst``, and None on the others. Collective."""
        if buffer.is_complex():
            # Backends have no complex numbers, so their real and imaginary parts are sent. Other
            # functions of torch.distributed do this themselves.
            gathered = self._gather(torch.view_as_real(buffer), dst)
            return None if gathered is None else torch.view_as_complex(gathered)
        if self.rank != dst:
            dist.gather(buffer, None, group_dst=dst, group=self._group)
            return None
        output = buffer.new_empty((self.size, *buffer.shape))
        # The list holds views of the rows, into which torch writes.
        dist.gather(buffer, list(output), group_dst=dst, group=self._group)
        return output

    # torch's own collectives of objects are not used, since they need numpy, which is optional.

    @real_tensors()
    def _broadcast_bytes(self, message: bytes | None, src: int) -> bytes:
        """Return the bytes of rank ``src`` on every rank. Collective.

        The decorator makes real tensors in a dry run, too, since fake tensors have no bytes.

        Args:
            message: the bytes on rank ``src``, None on the other ranks.
            src: the source.

        Raises:
            CollectiveMismatchError: the ranks pass different sources. Every rank raises it.
        """
        # The length is 0 on the other ranks, so its maximum is the length at the source.
        local_length = 0 if message is None else len(message)
        length = self._agree_on_length(local_length, src)
        if message is not None:
            self.broadcast(to_tensor(message).to(self.device), src)
            return message
        received = torch.zeros(length, dtype=torch.uint8, device=self.device)
        self.broadcast(received, src)
        return to_bytes(received)

    @real_tensors()
    def _gather_bytes(self, message: bytes) -> list[bytes]:
        """Return the bytes of all ranks in rank order, on every rank. Collective.

        The lengths may differ. An all-gather needs equal lengths, so the messages are padded. The
        decorator makes real tensors in a dry run, too, since fake tensors have no bytes.

        Raises:
            CollectiveMismatchError: another rank calls :meth:`_broadcast_bytes`. Every rank raises
                the error.
        """
        # The ranks also compare `src`, and so notice if another rank broadcasts.
        longest = self._agree_on_length(len(message), src=_NO_SOURCE)
        # Each row is the length of the message, the message, and padding.
        length_prefix = len(message).to_bytes(_LENGTH_BYTES, "little")
        padded_message = message.ljust(longest, b"\0")
        rows = self.all_gather(to_tensor(length_prefix + padded_message).to(self.device))
        messages: list[bytes] = []
        for row in rows:
            content = to_bytes(row)
            length = int.from_bytes(content[:_LENGTH_BYTES], "little")
            messages.append(content[_LENGTH_BYTES : _LENGTH_BYTES + length])
        return messages

    def _agree_on_length(self, local_length: int, src: int) -> int:
        """Return the largest length of any rank, in bytes. Collective.

        Every collective of objects begins with this exchange, which also compares the calls of the
        ranks. Otherwise, ranks that make different calls would exchange messages of different
        lengths, which aborts a process under gloo.

        Args:
            local_length: the length on this rank.
            src: the source of a broadcast, or ``_NO_SOURCE`` for a gather.

        Raises:
            CollectiveMismatchError: the ranks pass different values for ``src``. Every rank raises
                the error.
        """
        # Reduced by MAX, src and -src become the highest and the negated lowest source.
        length_and_sources = torch.tensor([local_length, src, -src], device=self.device)
        self.all_reduce(length_and_sources, Reduce.MAX)
        length, highest_src, negated_lowest_src = length_and_sources.tolist()
        lowest_src = -negated_lowest_src
        if lowest_src == highest_src:
            return length
        # _NO_SOURCE is below every rank, so it would be the lowest source.
        is_any_gather = lowest_src == _NO_SOURCE
        if not is_any_gather:
            request = f"src={src} on rank {self.rank}"
            raise peer_mismatch_error(request, peers=[lowest_src, highest_src])
        operation = "gather" if src == _NO_SOURCE else "broadcast"
        raise CollectiveMismatchError(
            f"{operation} of an object on rank {self.rank}",
            problem="some ranks gather objects, and others broadcast an object",
            expected="the same call on all ranks",
            suggestion="FABRIC_CHECK=1, which compares the calls of the ranks",
        )

    def _barrier(self, name: str) -> None:
        """Wait until every rank has called this. Collective.

        Args:
            name: the name of the barrier, for the error.

        Raises:
            UsageError: the barrier has failed, usually because a rank did not call it in time.
        """
        # Without this argument, torch would guess a device from the rank, which may be the device
        # of another process.
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        try:
            dist.barrier(self._group, device_ids=device_ids)
        except RuntimeError as error:
            # torch raises a plain RuntimeError for a timeout, and for other problems such as a lost
            # connection.
            raise UsageError(
                f"barrier({name!r}) on rank {self.rank} of {self.size}",
                problem=f"not every rank called it: {error}",
                suggestion="check for a branch on the rank, or a rank that finished early, before "
                "this barrier",
            ) from error

    def _new_group(self, ranks: list[int]) -> "ProcessGroupCommunicator | None":
        """Make a group of some ranks of this group. Collective over this group.

        Args:
            ranks: the members, as ranks of this group.

        Returns:
            The communicator, which owns its group. None on a rank that is not a member.

        Raises:
            UsageError: this group is a part of the job.
        """
        world_size = dist.get_world_size()
        if self.size < world_size:
            # torch names a group by the number of groups that this process has made before. The
            # processes outside of this group would count one group less, and use other names for
            # later groups.
            raise UsageError(
                f"new_group({ranks}) of a group of {self.size}",
                problem=f"the other {world_size - self.size} processes of the job would not take "
                "part in it",
                expected="groups that are made of all processes of the job",
                suggestion="new_group(...) of the communicator over the whole job, on every rank",
            )
        global_ranks = dist.get_process_group_ranks(self._group)
        members = sorted(global_ranks[rank] for rank in ranks)
        group = dist.new_group(members, timeout=self._timeout)
        if not isinstance(group, dist.ProcessGroup):
            # This rank is not a member: torch returns an integer in place of a group.
            return None
        communicator = ProcessGroupCommunicator(group, self._process_device, self._timeout)
        communicator._owns_group = True  # close() destroys the group
        if communicator.device.type == "cpu":
            # new_group() of gloo returns when this rank is connected. Other ranks may still be
            # connecting, and would fail if this rank closed the group meanwhile.
            communicator.barrier("new_group")
        return communicator

    @override
    def close(self) -> None:
        """Destroy the group, if :meth:`new_group` made it. A second call does nothing."""
        # After destroy_process_group() of the whole job, torch has destroyed this group, too.
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._owns_group = False


def _ordered_integers(bits: Tensor) -> Tensor:
    """Return integers that have the order of the doubles with these bits.

    The bits of positive doubles, read as integers, have the order of the doubles. The bits of
    negative doubles have the reverse order, so this function inverts all their bits but the sign.
    A second call with the result returns the original bits.

    Args:
        bits: the bits of doubles, as int64.
    """
    # An arithmetic shift: all bits of the result are equal to the sign bit.
    sign_mask = bits >> 63
    return bits ^ (sign_mask & _MAX_INT64)


def fold(op: Reduce, tensors: Sequence[Tensor]) -> Tensor:
    """Return the reduction of the tensors of all ranks, as a new tensor. Not a collective.

    Every rank that folds the same tensors gets the same bits, since the order is fixed.

    Args:
        op: the reduction.
        tensors: one tensor of each rank, in rank order.
    """
    if len(tensors) == 1:
        return tensors[0].clone()
    # Sums and means are not in the table. A mean begins with a sum.
    combine = _COMBINE.get(op, torch.add)
    result = reduce(combine, tensors)
    if op is Reduce.MEAN:
        return result / len(tensors)
    return result


def to_tensor(message: bytes) -> Tensor:
    """Return a tensor of uint8 with these bytes, on the CPU."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def to_bytes(buffer: Tensor) -> bytes:
    """Return the bytes of a tensor of uint8, on any device."""
    message = bytearray(buffer.numel())
    torch.frombuffer(message, dtype=torch.uint8).copy_(buffer)
    return bytes(message)

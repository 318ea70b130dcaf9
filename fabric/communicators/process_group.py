"""A group of processes that communicate through torch.distributed."""

from collections.abc import Sequence
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from fabric._torch import all_gather_into, real_tensors, reduce_scatter_into
from fabric.communicators.base import (
    BITWISE,
    ORDERED,
    Collective,
    Communicator,
    Operation,
    Reduce,
    peer_mismatch_error,
)
from fabric.errors import UsageError

__all__ = ["ProcessGroupCommunicator", "fold", "to_bytes", "to_tensor"]

_GATHERED_AT_ONCE = 1 << 17  # bytes that gloo gathers with one message to each rank
_ONE_ROUND = 16  # bytes that gloo reduces in one round
_LARGEST = 2**63 - 1


def _torch_reductions() -> dict[Reduce, Any]:
    reductions = {op: getattr(dist.ReduceOp, op.name) for op in Reduce if op is not Reduce.MEAN}
    # Some backends have no mean, so a mean is a sum that is divided afterwards.
    reductions[Reduce.MEAN] = dist.ReduceOp.SUM
    return reductions


_TORCH_REDUCTIONS = _torch_reductions()


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
        self._group = group
        self._owns_group = False
        self._process_device = device
        self._timeout = timeout
        self._is_gloo = dist.get_backend(group) == "gloo"
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = torch.device("cpu") if self._is_gloo else device

    @override
    def run(self, collective: Collective) -> Any:  # noqa: C901, PLR0912 - a case an operation
        buffer = collective.buffer
        peer = collective.peer or 0
        op = collective.reduce or Reduce.SUM
        group = self._group
        match collective.operation:
            case Operation.ALL_REDUCE:
                return self._all_reduce(buffer, op)
            case Operation.ALL_GATHER:
                return self._all_gather(buffer)
            case Operation.REDUCE_SCATTER:
                return self._reduce_scatter(buffer, op)
            case Operation.ALL_TO_ALL:
                output = torch.empty_like(buffer)
                dist.all_to_all_single(output, buffer, group=group)
                return output
            case Operation.BROADCAST:
                dist.broadcast(buffer, group_src=peer, group=group)
            case Operation.SCATTER:
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
        return buffer

    def _is_gathered_at_once(self, buffer: Tensor) -> bool:
        """Return whether to send a buffer straight to all ranks.

        gloo gathers around a ring, one rank after the other, which takes longer for small buffers.
        """
        return self._is_gloo and 0 < self.size * buffer.nbytes <= _GATHERED_AT_ONCE

    def _all_gather(self, buffer: Tensor) -> Tensor:
        output = buffer.new_empty((self.size, *buffer.shape))
        if self._is_gathered_at_once(buffer):
            copies = buffer.expand_as(output).contiguous()
            dist.all_to_all_single(output, copies, group=self._group)
        else:
            all_gather_into(output.view(-1), buffer.reshape(-1), group=self._group)
        return output

    def _all_reduce(self, buffer: Tensor, op: Reduce) -> Tensor:
        if self._is_reduced_by_each_rank(buffer, op):
            return buffer.copy_(fold(op, self.all_gather(buffer).unbind()))
        if op in (Reduce.MIN, Reduce.MAX) and buffer.is_floating_point():
            return self._all_reduce_ordered(buffer, op)
        dist.all_reduce(buffer, op=_TORCH_REDUCTIONS[op], group=self._group)
        if op is Reduce.MEAN:
            buffer.div_(self.size)
        return buffer

    def _is_reduced_by_each_rank(self, buffer: Tensor, op: Reduce) -> bool:
        """Return whether to gather the buffers, and let each rank reduce them."""
        if op in BITWISE:
            # nccl has no bitwise reductions.
            return not self._is_gloo
        # Gloo reduces larger buffers in two rounds, and gathers them in one.
        return buffer.nbytes > _ONE_ROUND and self._is_gathered_at_once(buffer)

    def _all_reduce_ordered(self, buffer: Tensor, op: Reduce) -> Tensor:
        """Take the minimum or maximum of floats, in place. The result is NaN if any value is NaN.

        Backends skip NaN or not, depending on its rank. So the values travel as integers of the
        same order, and NaN as the largest or the least integer.
        """
        bits = _in_order(buffer.double().view(torch.int64))
        nan = _LARGEST if op is Reduce.MAX else ~_LARGEST
        bits.masked_fill_(buffer.isnan(), nan)
        dist.all_reduce(bits, op=_TORCH_REDUCTIONS[op], group=self._group)
        return buffer.copy_(_in_order(bits).view(torch.float64))

    def _reduce_scatter(self, buffer: Tensor, op: Reduce) -> Tensor:
        if op not in (Reduce.SUM, Reduce.MEAN):
            return self._all_reduce(buffer, op)[self.rank].clone()
        output = buffer.new_empty(buffer.shape[1:])
        reduce_scatter_into(output.view(-1), buffer.view(-1), group=self._group)
        if op is Reduce.MEAN:
            output.div_(self.size)
        return output

    def _gather(self, buffer: Tensor, dst: int) -> Tensor | None:
        if buffer.is_complex():
            # In other collectives, torch itself shows complex numbers to the backend as real ones.
            gathered = self._gather(torch.view_as_real(buffer), dst)
            return None if gathered is None else torch.view_as_complex(gathered)
        if self.rank != dst:
            dist.gather(buffer, None, group_dst=dst, group=self._group)
            return None
        output = buffer.new_empty((self.size, *buffer.shape))
        dist.gather(buffer, list(output), group_dst=dst, group=self._group)
        return output

    # torch's own collectives of objects need numpy, which is optional. In a dry run, too, objects
    # travel in real tensors.

    @real_tensors()
    def _broadcast_bytes(self, message: bytes | None, src: int) -> bytes:
        """Return the bytes of rank ``src`` on every rank.

        Args:
            message: the bytes on rank ``src``, None on the other ranks.
            src: the source.
        """
        # The source travels with the length, since ranks that pass different sources would not
        # notice otherwise. Under MAX, src and -src become the highest and (negated) lowest source.
        # The length is 0 on the other ranks, so its maximum is the length at the source.
        local_length = 0 if message is None else len(message)
        facts = torch.tensor([local_length, src, -src], device=self.device)
        self.all_reduce(facts, Reduce.MAX)
        length, highest, negated_lowest = facts.tolist()
        lowest = -negated_lowest
        if lowest != highest:
            raise peer_mismatch_error(f"src={src} on rank {self.rank}", [lowest, highest])
        content = message
        if content is None:
            content = bytes(length)  # zeros to receive into
        buffer = to_tensor(content).to(self.device)
        self.broadcast(buffer, src)
        if message is not None:
            return message
        return to_bytes(buffer)

    @real_tensors()
    def _gather_bytes(self, message: bytes) -> list[bytes]:
        length = torch.tensor([len(message)], device=self.device)
        lengths = self.all_gather(length).flatten().tolist()
        padded = to_tensor(message.ljust(max(lengths), b"\0")).to(self.device)
        rows = self.all_gather(padded)
        return [to_bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]

    def _barrier(self, name: str) -> None:
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        try:
            dist.barrier(self._group, device_ids=device_ids)
        except RuntimeError as error:
            raise UsageError(
                f"barrier({name!r}) on rank {self.rank} of {self.size}",
                problem=f"not every rank called it: {error}",
                suggestion="check for a branch on the rank, or a rank that finished early, before "
                "this barrier",
            ) from error

    def _new_group(self, ranks: list[int]) -> "ProcessGroupCommunicator | None":
        if self.size < dist.get_world_size():
            # torch names groups by counting them. The other ranks would count one less from here
            # on.
            raise UsageError(
                f"new_group({ranks}) of a group of {self.size}",
                problem=f"the other {dist.get_world_size() - self.size} processes of the job would "
                "not take part in it",
                expected="groups that are made of all processes of the job",
                suggestion="new_group(...) of the communicator over the whole job, on every rank",
            )
        members = dist.get_process_group_ranks(self._group)
        group = dist.new_group(sorted(members[rank] for rank in ranks), timeout=self._timeout)
        if not isinstance(group, dist.ProcessGroup):
            # torch returns a marker to processes that are not members.
            return None
        communicator = ProcessGroupCommunicator(group, self._process_device, self._timeout)
        communicator._owns_group = True
        if communicator.device.type == "cpu":
            # gloo has connected this rank, but not yet all ranks. A rank that closed the group now
            # would break the connections of the others.
            communicator.barrier("new_group")
        return communicator

    @override
    def close(self) -> None:
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._owns_group = False


def _in_order(bits: Tensor) -> Tensor:
    """Return the bits of floats as integers of the same order. A second call undoes the first."""
    return bits ^ ((bits >> 63) & _LARGEST)


def fold(op: Reduce, tensors: Sequence[Tensor]) -> Tensor:
    """Return the reduction of one tensor of each rank, in the order of ranks, as a new tensor."""
    combine = (BITWISE | ORDERED).get(op, torch.add)
    total = reduce(combine, tensors[1:], tensors[0].clone())
    if op is Reduce.MEAN:
        return total / len(tensors)
    return total


def to_tensor(message: bytes) -> Tensor:
    """Return a tensor of uint8 with these bytes, on the CPU."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def to_bytes(buffer: Tensor) -> bytes:
    """Return the bytes of a tensor of uint8, on any device."""
    message = bytearray(buffer.numel())
    torch.frombuffer(message, dtype=torch.uint8).copy_(buffer)
    return bytes(message)

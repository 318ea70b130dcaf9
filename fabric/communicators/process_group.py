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

# The names are torch's; not every backend has its mean, which is a sum here.
_OPS = {
    op: dist.ReduceOp.SUM if op is Reduce.MEAN else getattr(dist.ReduceOp, op.name) for op in Reduce
}

_LARGEST = 2**63 - 1


class ProcessGroupCommunicator(Communicator):
    """The collectives of a :class:`torch.distributed.ProcessGroup`.

    Args:
        group: the group; None is the default one, which has to exist.
        device: device of this process. Buffers live there under nccl and its like, and on the CPU under gloo, whatever
            the device: gloo carries only some operations for CUDA tensors.
        timeout: how long a collective of the groups made by :meth:`new_group` may wait; None is torch's default.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        timeout: timedelta | None = None,
    ) -> None:
        self._group = group
        self._owns_group = False
        self._own_device = device
        self._timeout = timeout
        self._is_gloo = dist.get_backend(group) == "gloo"
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = torch.device("cpu") if self._is_gloo else device

    @override
    def run(self, collective: Collective) -> Any:
        buffer = collective.buffer
        peer = collective.peer or 0
        op = collective.reduce or Reduce.SUM
        group = self._group
        match collective.operation:
            case Operation.ALL_REDUCE:
                return self._all_reduce(buffer, op)
            case Operation.ALL_GATHER:
                output = buffer.new_empty((self.size, *buffer.shape))
                if self._gathers_at_once(buffer):
                    dist.all_to_all_single(
                        output, buffer.expand_as(output).contiguous(), group=group
                    )
                else:
                    all_gather_into(output.view(-1), buffer.reshape(-1), group=group)
                return output
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
            case Operation.BROADCAST_OBJECT | Operation.GATHER_OBJECTS:
                gathers = collective.operation is Operation.GATHER_OBJECTS
                with real_tensors():  # in a dry run, too
                    return (
                        self._gather_bytes(buffer)
                        if gathers
                        else self._broadcast_bytes(buffer, peer)
                    )
            case Operation.NEW_GROUP:
                return self._new_group(buffer)
        return buffer

    def _gathers_at_once(self, buffer: Tensor) -> bool:
        """Whether to send up to 128 KiB straight to all ranks: gloo gathers around a ring, one rank after the other."""
        return self._is_gloo and 0 < self.size * buffer.nbytes <= 1 << 17

    def _all_reduce(self, buffer: Tensor, op: Reduce) -> Tensor:
        # nccl has no bitwise reductions, and gloo makes two rounds for more than 16 bytes.
        gathers = (
            not self._is_gloo
            if op in BITWISE
            else buffer.nbytes > 16 and self._gathers_at_once(buffer)
        )
        if gathers:  # each rank reduces for itself
            return buffer.copy_(fold(op, self.all_gather(buffer).unbind()))
        if op in (Reduce.MIN, Reduce.MAX) and buffer.is_floating_point():
            # Whether backends skip NaN depends on its place; as an integer it is the largest number, or the least.
            bits = _in_order(buffer.double().view(torch.int64))
            last = _LARGEST if op is Reduce.MAX else ~_LARGEST
            dist.all_reduce(bits.masked_fill_(buffer.isnan(), last), op=_OPS[op], group=self._group)
            return buffer.copy_(_in_order(bits).view(torch.float64))
        dist.all_reduce(buffer, op=_OPS[op], group=self._group)
        return buffer.div_(self.size) if op is Reduce.MEAN else buffer

    def _reduce_scatter(self, buffer: Tensor, op: Reduce) -> Tensor:
        if op not in (Reduce.SUM, Reduce.MEAN):
            return self._all_reduce(buffer, op)[self.rank].clone()
        output = buffer.new_empty(buffer.shape[1:])
        reduce_scatter_into(output.view(-1), buffer.view(-1), group=self._group)
        return output.div_(self.size) if op is Reduce.MEAN else output

    def _gather(self, buffer: Tensor, dst: int) -> Tensor | None:
        if (
            buffer.is_complex()
        ):  # torch shows them to the backend as real numbers everywhere but here
            gathered = self._gather(torch.view_as_real(buffer), dst)
            return None if gathered is None else torch.view_as_complex(gathered)
        output = buffer.new_empty((self.size, *buffer.shape)) if self.rank == dst else None
        dist.gather(
            buffer, None if output is None else list(output), group_dst=dst, group=self._group
        )
        return output

    # torch's own collectives of objects need numpy, which is optional.

    def _broadcast_bytes(self, message: bytes | None, src: int) -> bytes:
        # With the length goes the source: ranks that name different ones would not notice otherwise.
        facts = self.all_reduce(
            torch.tensor([len(message or b""), src, -src], device=self.device), Reduce.MAX
        )
        length, last, first = facts.tolist()
        if last != -first:
            raise peer_mismatch_error(f"src={src} on rank {self.rank}", [-first, last])
        buffer = self.broadcast(to_tensor(message or bytes(length)).to(self.device), src)
        return to_bytes(buffer) if message is None else message

    def _gather_bytes(self, message: bytes) -> list[bytes]:
        lengths = (
            self.all_gather(torch.tensor([len(message)], device=self.device)).flatten().tolist()
        )
        padded = to_tensor(message.ljust(max(lengths), b"\0")).to(self.device)
        return [to_bytes(row[:n]) for row, n in zip(self.all_gather(padded), lengths, strict=True)]

    def _barrier(self, name: str) -> None:
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        try:
            dist.barrier(self._group, device_ids=device_ids)
        except RuntimeError as error:
            raise UsageError(
                f"barrier({name!r}) on rank {self.rank} of {self.size}",
                f"not every rank called it: {error}",
                suggestion="check for a branch on the rank, or a rank that finished early, before this barrier",
            ) from error

    def _new_group(self, ranks: list[int]) -> "ProcessGroupCommunicator | None":
        if self.size < dist.get_world_size():
            # torch names groups by counting them, and the ranks outside would count one less from here on.
            raise UsageError(
                f"new_group({ranks}) of a group of {self.size}",
                f"the other {dist.get_world_size() - self.size} processes of the job would not take part in it",
                "groups that are made of all processes of the job",
                "new_group(...) of the communicator over the whole job, on every rank",
            )
        members = dist.get_process_group_ranks(self._group)
        group = dist.new_group(sorted(members[rank] for rank in ranks), timeout=self._timeout)
        if not isinstance(group, dist.ProcessGroup):  # torch's marker for "not a member"
            return None
        communicator = ProcessGroupCommunicator(group, self._own_device, self._timeout)
        communicator._owns_group = True
        if communicator.device.type == "cpu":
            # gloo has connected this rank, not all: one that closes the group first would break the others' connection.
            communicator.barrier("new_group")
        return communicator

    @override
    def close(self) -> None:
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._owns_group = False


def _in_order(bits: Tensor) -> Tensor:
    """The bits of floats as integers of the same order, and back."""
    return bits ^ ((bits >> 63) & _LARGEST)


def fold(op: Reduce, tensors: Sequence[Tensor]) -> Tensor:
    """The reduction of one tensor of each rank, in the order of ranks; a new tensor."""
    combine = (BITWISE | ORDERED).get(op, torch.add)
    total = reduce(combine, tensors[1:], tensors[0].clone())
    return total / len(tensors) if op is Reduce.MEAN else total


def to_tensor(message: bytes) -> Tensor:
    """A tensor of uint8 with these bytes, on the CPU."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def to_bytes(buffer: Tensor) -> bytes:
    """The bytes of a tensor of uint8, on any device."""
    message = bytearray(buffer.numel())
    torch.frombuffer(message, dtype=torch.uint8).copy_(buffer)
    return bytes(message)

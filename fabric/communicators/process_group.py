"""A group of processes that talk through torch.distributed."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from fabric._compat import all_gather_into, reduce_scatter_into
from fabric.communicators.base import Communicator, Reduce
from fabric.errors import ConfigurationError, UsageError

__all__ = ["ProcessGroupCommunicator"]

_OPS = {
    Reduce.MEAN: dist.ReduceOp.SUM,
    Reduce.SUM: dist.ReduceOp.SUM,
    Reduce.MIN: dist.ReduceOp.MIN,
    Reduce.MAX: dist.ReduceOp.MAX,
    Reduce.PRODUCT: dist.ReduceOp.PRODUCT,
}


class ProcessGroupCommunicator(Communicator):
    """The collectives of a :class:`torch.distributed.ProcessGroup`.

    Args:
        group: the group; None is the default one, which has to exist.
        device: device of this process. Buffers live there under nccl and its like, and on the CPU under gloo, whatever
            the device: gloo carries only some operations for CUDA tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._own_device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = torch.device("cpu") if dist.get_backend(group) == "gloo" else device

    @override
    def all_reduce(self, buffer: Tensor, op: Reduce) -> Tensor:
        dist.all_reduce(buffer, op=_OPS[op], group=self._group)
        return buffer.div_(self.size) if op is Reduce.MEAN else buffer

    @override
    def all_gather(self, buffer: Tensor) -> Tensor:
        output = buffer.new_empty(self.size * buffer.numel())
        all_gather_into(output, buffer.reshape(-1), self._group)
        return output.view(self.size, *buffer.shape)

    @override
    def reduce_scatter(self, buffer: Tensor, op: Reduce) -> Tensor:
        if op not in (Reduce.SUM, Reduce.MEAN):
            return self.all_reduce(buffer, op)[self.rank].clone()
        output = buffer.new_empty(buffer.shape[1:])
        reduce_scatter_into(output.view(-1), buffer.view(-1), self._group)
        return output.div_(self.size) if op is Reduce.MEAN else output

    @override
    def broadcast(self, buffer: Tensor, src: int) -> Tensor:
        self.check_src(src)
        dist.broadcast(buffer, group_src=src, group=self._group)
        return buffer

    @override
    def barrier(self, name: str) -> None:
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        try:
            dist.barrier(self._group, device_ids=device_ids)
        except RuntimeError as error:
            raise UsageError(
                f"barrier({name!r}) on rank {self.rank} of {self.size}",
                f"not every rank came: {error}",
                "a barrier that every rank of the group reaches",
                "check for a branch on the rank, or a rank that left early, before this barrier",
            ) from error

    @override
    def broadcast_object(self, value: Any, src: int) -> Any:
        self.check_src(src)
        box = [value if self.rank == src else None]
        dist.broadcast_object_list(box, group_src=src, group=self._group, device=self.device)
        return box[0]

    @override
    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    @override
    def new_group(self, ranks: Sequence[int]) -> "ProcessGroupCommunicator | None":
        members = sorted(set(ranks))
        if len(members) != len(ranks) or not members or members[0] < 0 or members[-1] >= self.size:
            raise ConfigurationError(
                f"new_group({list(ranks)})",
                f"ranks are missing, repeated or outside this group of {self.size}",
                f"different ranks between 0 and {self.size - 1}",
                f"new_group({list(range(self.size))}) for all of them",
            )
        world_ranks = [dist.get_global_rank(self._group, rank) for rank in members] if self._group else members
        group = dist.new_group(world_ranks)
        if not isinstance(group, dist.ProcessGroup):  # torch's marker for "not a member"
            return None
        return ProcessGroupCommunicator(group, self._own_device)

    @override
    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)

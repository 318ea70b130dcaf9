"""A group of one process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from fabric.communicators.base import Communicator, Reduce

__all__ = ["LocalCommunicator"]


class LocalCommunicator(Communicator):
    """The collectives of a single process: what they mean over a group of one, without a process group."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self.device = 0, 1, device

    @override
    def all_reduce(self, buffer: Tensor, op: Reduce) -> Tensor:
        return buffer

    @override
    def all_gather(self, buffer: Tensor) -> Tensor:
        return buffer.clone().unsqueeze(0)

    @override
    def reduce_scatter(self, buffer: Tensor, op: Reduce) -> Tensor:
        return buffer[0].clone()

    @override
    def all_to_all(self, buffer: Tensor) -> Tensor:
        return buffer.clone()

    @override
    def broadcast(self, buffer: Tensor, src: int) -> Tensor:
        self.check_src(src)
        return buffer

    @override
    def scatter(self, rows: Tensor | None, output: Tensor, src: int) -> Tensor:
        self.check_src(src, "scatter")
        assert rows is not None, "this is rank src"
        return output.copy_(rows[0])

    @override
    def gather(self, buffer: Tensor, dst: int) -> Tensor:
        self.check_dst(dst)
        return buffer.clone().unsqueeze(0)

    @override
    def send(self, buffer: Tensor, dst: int) -> None:
        self._refuse_rank("send", "dst", dst)

    @override
    def recv(self, buffer: Tensor, src: int) -> Tensor:
        self._refuse_rank("recv", "src", src)

    @override
    def barrier(self, name: str) -> None:
        pass

    @override
    def broadcast_object(self, value: Any, src: int) -> Any:
        self.check_src(src)
        return value

    @override
    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    @override
    def new_group(self, ranks: Sequence[int]) -> "LocalCommunicator":
        self.check_members(ranks)
        return LocalCommunicator(self.device)

    @override
    def close(self) -> None:
        pass

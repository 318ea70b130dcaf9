"""A group of one process."""

from typing import Any

import torch
from typing_extensions import override

from fabric.communicators.base import Collective, Communicator, Operation

__all__ = ["LocalCommunicator"]


class LocalCommunicator(Communicator):
    """The collectives of a single process: what they mean over a group of one, without a process group."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self.device = 0, 1, device

    @override
    def run(self, collective: Collective) -> Any:
        buffer = collective.buffer
        match collective.operation:
            case Operation.ALL_GATHER | Operation.GATHER:
                return buffer.clone().unsqueeze(0)
            case Operation.REDUCE_SCATTER:
                return buffer[0].clone()
            case Operation.ALL_TO_ALL:
                return buffer.clone()
            case Operation.NEW_GROUP:
                return LocalCommunicator(self.device)
            case Operation.SCATTER:
                assert collective.rows is not None, "this is rank src"
                return buffer.copy_(collective.rows[0])
            case _:
                return buffer

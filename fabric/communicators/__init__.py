"""The collectives of a group of processes, on buffers."""

from fabric.communicators.base import (
    Collective,
    Communicator,
    LocalCommunicator,
    NonMember,
    Operation,
    Reduce,
)
from fabric.communicators.process_group import ProcessGroupCommunicator, fold

__all__ = [
    "Collective",
    "Communicator",
    "LocalCommunicator",
    "NonMember",
    "Operation",
    "ProcessGroupCommunicator",
    "Reduce",
    "fold",
]

"""The collectives of a group of processes, on buffers."""

from fabric.communicators.base import CallDescription, Collective, Communicator, NonMember, Operation
from fabric.communicators.local import LocalCommunicator
from fabric.communicators.process_group import ProcessGroupCommunicator
from fabric.communicators.reduce_ops import Reduce

__all__ = [
    "CallDescription",
    "Collective",
    "Communicator",
    "LocalCommunicator",
    "NonMember",
    "Operation",
    "ProcessGroupCommunicator",
    "Reduce",
]

"""How ranks talk."""

from fabric.communicators._ledger import Ledger
from fabric.communicators.base import Announcement, Communicator, NonMember, Reduce
from fabric.communicators.checked import CheckedCommunicator
from fabric.communicators.local import LocalCommunicator
from fabric.communicators.process_group import ProcessGroupCommunicator
from fabric.communicators.recorded import Record, RecordedCommunicator

__all__ = [
    "Announcement",
    "CheckedCommunicator",
    "Communicator",
    "Ledger",
    "LocalCommunicator",
    "NonMember",
    "ProcessGroupCommunicator",
    "Record",
    "RecordedCommunicator",
    "Reduce",
]

"""How ranks talk."""

from typing import TYPE_CHECKING

from fabric._late import late
from fabric.communicators.base import Announcement, Communicator, NonMember, Reduce
from fabric.communicators.local import LocalCommunicator
from fabric.communicators.process_group import ProcessGroupCommunicator
from fabric.communicators.recorded import Record, RecordedCommunicator

if TYPE_CHECKING:
    from fabric.communicators._ledger import Ledger
    from fabric.communicators.checked import CheckedCommunicator

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

__getattr__, __dir__ = late(__name__, {"CheckedCommunicator": "checked", "Ledger": "_ledger"})

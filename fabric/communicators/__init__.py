"""How ranks talk."""

from fabric.communicators.base import Announcement, Communicator, Reduce
from fabric.communicators.local import LocalCommunicator
from fabric.communicators.process_group import ProcessGroupCommunicator

__all__ = ["Announcement", "Communicator", "LocalCommunicator", "ProcessGroupCommunicator", "Reduce"]

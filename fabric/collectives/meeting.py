"""Who meets: groups, and waiting for all of one."""

from collections.abc import Sequence

from fabric.communicators import Communicator, NonMember

__all__ = ["barrier", "new_group"]


def barrier(communicator: Communicator, name: str | None = None) -> None:
    """Wait until every rank is here; ``name`` appears in the error when one does not come. Collective."""
    communicator.barrier(name or "unnamed")


def new_group(communicator: Communicator, ranks: Sequence[int]) -> Communicator | NonMember:
    """A communicator of these ranks, in ascending order; a false value on a rank that is not one. Collective."""
    members = list(ranks)
    return communicator.new_group(members) or NonMember(members)

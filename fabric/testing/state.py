"""The check that a call has left the process group of its pool alone."""

import torch.distributed as dist

from fabric.errors import UsageError

__all__ = ["check_group"]


def check_group(group: dist.ProcessGroup | None) -> None:
    """Check that a process group is still the default group. Not a collective.

    Args:
        group: the default group before the call. None if the pool has no process group, for which
            nothing is checked.

    Raises:
        UsageError: the group has been destroyed or replaced.
    """
    if group is None:
        return
    is_default_group = dist.is_initialized() and dist.group.WORLD is group
    if not is_default_group:
        raise UsageError(
            "a call of RankPool.run",
            problem="it has destroyed the process group of the pool, which later calls need",
            suggestion="destroy only groups that the function has made; or RankPool(reset=False)",
        )

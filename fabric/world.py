"""The place of a process in its job."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from fabric.errors import ConfigurationError

__all__ = ["World", "available_cores", "read_integer_variable", "read_variable"]


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of one process in a job, in the terms of ``torchrun``.

    Attributes:
        rank: the global rank, ``0 <= rank < world_size``.
        local_rank: the rank on this node, ``0 <= local_rank < local_world_size``.
        node_rank: the number of this node, from 0.
        world_size: the number of processes of the job.
        local_world_size: the number of processes on this node.
        address: the host of rank 0, or its IP address.
        port: the port of the rendezvous store on that host, 1 to 65535. ``None`` if ``store`` is
            set, or if no rendezvous is needed.
        store: the store through which processes that fabric has started connect, as
            ``file:///path`` (a private :class:`torch.distributed.FileStore`). ``None`` under
            another launcher.
    """

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int | None = None
    store: str | None = None

    def __post_init__(self) -> None:
        """Raise a ConfigurationError if the numbers contradict each other."""
        # Each of the other nodes has at least one process. The difference is negative if this node
        # has more processes than the job. Then no node rank is valid.
        max_other_nodes = self.world_size - self.local_world_size
        is_rank_valid = 0 <= self.rank < self.world_size
        # A local rank is at most the global rank, since the ranks of a node are in global order.
        is_local_rank_valid = 0 <= self.local_rank < min(self.local_world_size, self.rank + 1)
        is_node_rank_valid = 0 <= self.node_rank <= max_other_nodes
        if not (is_rank_valid and is_local_rank_valid and is_node_rank_valid):
            raise ConfigurationError(
                repr(self),
                problem="these numbers contradict each other",
                expected="0 <= rank < world_size, 0 <= local_rank < local_world_size <= "
                "world_size, local_rank <= rank, 0 <= node_rank < number of nodes",
                suggestion="check the launcher's variables, or unset RANK and WORLD_SIZE to run "
                "one process",
            )
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ConfigurationError(
                f"MASTER_PORT={self.port}",
                problem="this number is not a port",
                expected="1 to 65535, the same on all ranks",
            )

    @property
    def num_nodes(self) -> int:
        """The number of nodes, if every node has as many processes as this one.

        Otherwise the number may be wrong, but it is 1 only if all processes are on this node.
        """
        # Rounded up: with 3 processes on this node and 2 elsewhere, there are two nodes.
        return -(-self.world_size // self.local_world_size)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks before and after this one in a ring of all ranks, in ascending order.

        Two processes have one neighbor each, and a single process has none.
        """
        neighbors = {(self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size}
        return tuple(sorted(neighbors - {self.rank}))

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "World | None":
        """Read the variables that ``torchrun`` and fabric's own launchers set.

        Args:
            env: the environment variables, such as ``os.environ``. A blank variable counts as
                missing. Without ``LOCAL_WORLD_SIZE``, all processes are assumed to be on one node.

        Returns:
            The world, or ``None`` when ``RANK`` or ``WORLD_SIZE`` is missing.

        Raises:
            ConfigurationError: a variable is not an integer, or the variables contradict each
                other.
        """
        rank = read_integer_variable(env, "RANK")
        world_size = read_integer_variable(env, "WORLD_SIZE")
        if rank is None or world_size is None:
            return None
        local_world_size = read_integer_variable(env, "LOCAL_WORLD_SIZE")
        local_rank = read_integer_variable(env, "LOCAL_RANK")
        node_rank = read_integer_variable(env, "GROUP_RANK")
        # On a single node, the local rank equals the rank.
        has_several_nodes = local_rank is not None and local_rank != rank
        if has_several_nodes and local_world_size is None:
            raise ConfigurationError(
                f"RANK={rank} and LOCAL_RANK={local_rank} in the environment",
                problem="they differ, so the job has several nodes, and LOCAL_WORLD_SIZE, which "
                "tells their number, is not set",
                expected="LOCAL_WORLD_SIZE next to LOCAL_RANK, as torchrun sets them",
                suggestion="export LOCAL_WORLD_SIZE=<processes on this node>",
            )
        if local_world_size is None:
            local_world_size = world_size
        # Missing values are derived as if all nodes had equally many processes. max() only avoids a
        # division by zero: the constructor refuses a number below 1.
        ranks_per_node = max(1, local_world_size)
        if local_rank is None:
            local_rank = rank % ranks_per_node
        if node_rank is None:
            node_rank = rank // ranks_per_node
        return cls(
            rank=rank,
            local_rank=local_rank,
            node_rank=node_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            address=read_variable(env, "MASTER_ADDR") or "127.0.0.1",
            port=read_integer_variable(env, "MASTER_PORT"),
            store=read_variable(env, "FABRIC_STORE"),
        )

    def to_env(self) -> dict[str, str]:
        """Return the environment variables from which :meth:`from_env` reads this world."""
        values = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "GROUP_RANK": self.node_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            "FABRIC_STORE": self.store,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def read_variable(env: Mapping[str, str], *names: str) -> str | None:
    """Return the value of the first variable that is set and not blank, or None.

    Args:
        env: the environment variables, such as ``os.environ``.
        *names: the names of a variable, in the order in which they are tried. Versions of a
            launcher use different names.
    """
    for name in names:
        value = env.get(name, "").strip()
        if value:
            return value
    return None


def read_integer_variable(env: Mapping[str, str], *names: str) -> int | None:
    """Return the integer in the first variable that is set and not blank, or None.

    Args:
        env: the environment variables, such as ``os.environ``.
        *names: the names of a variable, in the order in which they are tried.

    Raises:
        ConfigurationError: the value is not an integer.
    """
    for name in names:
        if not read_variable(env, name):
            continue
        try:
            return int(env[name])
        except ValueError:
            raise ConfigurationError(
                f"{name}={env[name]!r} in the environment",
                problem="it is not an integer, and fabric reads this process's place in the job "
                "from it",
                suggestion=f"unset {name}, or start the job again with its launcher",
            ) from None
    return None


def available_cores() -> int:
    """Return the number of cores that this process may use, at least 1.

    A process with an affinity mask may use fewer cores than the machine has.
    """
    if hasattr(os, "sched_getaffinity"):  # macOS has no affinity masks
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

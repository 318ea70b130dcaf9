"""The place of a process in its job."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from fabric.errors import ConfigurationError

__all__ = ["World", "available_cores", "read", "read_integer"]


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of one process in a job, in the terms of ``torchrun``.

    Attributes:
        rank: global rank, ``0 <= rank < world_size``.
        local_rank: rank on this node, ``0 <= local_rank < local_world_size``.
        node_rank: number of this node, from 0.
        world_size: number of processes of the job.
        local_world_size: number of processes on this node.
        address: host on which rank 0 can be reached.
        port: port of the rendezvous store there, 1 to 65535; ``None`` with ``store``, or if no rendezvous is
            needed.
        store: where the processes connect when fabric started them, as ``file:///path`` (a private
            :class:`torch.distributed.FileStore`); ``None`` under another launcher.
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
        # Every other node holds at least one process, and so does every rank before this one on this node.
        other_nodes = self.world_size - self.local_world_size
        in_range = 0 <= self.rank < self.world_size and 0 <= self.local_rank < self.local_world_size
        if not in_range or self.local_rank > self.rank or not 0 <= self.node_rank <= other_nodes:
            raise ConfigurationError(
                repr(self),
                "these numbers contradict each other",
                "0 <= rank < world_size, 0 <= local_rank < local_world_size <= world_size, local_rank <= rank, "
                "0 <= node_rank < number of nodes",
                "check the launcher's variables, or unset RANK and WORLD_SIZE for a run in a single process",
            )
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ConfigurationError(
                f"MASTER_PORT={self.port}", "it is no port", "1 to 65535, the same on all ranks"
            )

    @property
    def num_nodes(self) -> int:
        """Number of nodes, assuming equally many processes on each; 1 only if this is the only node."""
        # Rounded up: with 3 processes here and 2 elsewhere there is a second node, and loopback would not reach it.
        return -(-self.world_size // self.local_world_size)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks before and after this one in a ring; empty if it is the only one."""
        around = {(self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size}
        return tuple(sorted(around - {self.rank}))

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "World | None":
        """Read the variables that ``torchrun`` and fabric's own launchers set.

        Args:
            env: an environment mapping, such as ``os.environ``. A blank variable counts as missing; without
                ``LOCAL_WORLD_SIZE`` all processes are taken to be on one node.

        Returns:
            The world, or ``None`` when ``RANK`` or ``WORLD_SIZE`` is missing.

        Raises:
            ConfigurationError: a variable is not an integer, or they contradict each other.
        """
        rank = read_integer(env, "RANK")
        world_size = read_integer(env, "WORLD_SIZE")
        if rank is None or world_size is None:
            return None
        local_world_size = read_integer(env, "LOCAL_WORLD_SIZE")
        local_rank = read_integer(env, "LOCAL_RANK")
        if local_world_size is None and local_rank is not None and local_rank != rank:
            raise ConfigurationError(
                f"RANK={rank} and LOCAL_RANK={local_rank} in the environment",
                "they differ, so there are several nodes, and without LOCAL_WORLD_SIZE it is unknown how many",
                "LOCAL_WORLD_SIZE next to LOCAL_RANK, as torchrun sets them",
                "export LOCAL_WORLD_SIZE=<processes on this node>",
            )
        if local_world_size is None:
            local_world_size = world_size
        per_node = max(1, local_world_size)
        node_rank = read_integer(env, "GROUP_RANK")
        return cls(
            rank=rank,
            local_rank=rank % per_node if local_rank is None else local_rank,
            node_rank=rank // per_node if node_rank is None else node_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            address=read(env, "MASTER_ADDR") or "127.0.0.1",
            port=read_integer(env, "MASTER_PORT"),
            store=read(env, "FABRIC_STORE"),
        )

    def to_env(self) -> dict[str, str]:
        """The variables from which :meth:`from_env` reads this world back."""
        env = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "GROUP_RANK": self.node_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            "FABRIC_STORE": self.store,
        }
        return {name: str(value) for name, value in env.items() if value is not None}


def read(env: Mapping[str, str], *names: str) -> str | None:
    """Value of the first of ``names`` that is set and not blank; ``None`` if there is none."""
    return next((text for name in names if (text := env.get(name, "").strip())), None)


def read_integer(env: Mapping[str, str], *names: str) -> int | None:
    """Like :func:`read`, as an integer.

    Raises:
        ConfigurationError: it is no integer; the text names it.
    """
    for name in names:
        if read(env, name):
            try:
                return int(env[name])
            except ValueError:
                raise ConfigurationError(
                    f"{name}={env[name]!r} in the environment",
                    "it is not an integer, and fabric reads this process's place in the job from it",
                    suggestion=f"unset {name}, or start the job anew with its launcher",
                ) from None
    return None


def available_cores() -> int:
    """Number of cores that this process may use, at least 1; fewer than the machine has under an affinity mask."""
    # macOS has no affinity masks, and so no such function.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

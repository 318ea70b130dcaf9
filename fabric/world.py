"""Who this process is among the processes of a job."""

from collections.abc import Mapping
from dataclasses import dataclass

from fabric.errors import ConfigurationError

__all__ = ["World"]

_REQUIRED = ("RANK", "WORLD_SIZE")


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
        port: port of the rendezvous store there, 1 to 65535; ``None`` when ``store`` is given or nothing has to be
            found.
        store: where the processes meet when fabric started them, as ``file:///path`` (a private
            :class:`torch.distributed.FileStore`); ``None`` under another launcher.
        directory: where the processes of this node leave notes for the ``fabric run`` that started them, one of
            several machines; with ``store`` they are left beside that.
    """

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int | None = None
    store: str | None = None
    directory: str | None = None

    def __post_init__(self) -> None:
        # Every other node holds at least one process, and so does every rank before this one on this node.
        other_nodes = self.world_size - self.local_world_size
        in_range = 0 <= self.rank < self.world_size and 0 <= self.local_rank < self.local_world_size
        if not in_range or self.local_rank > self.rank or not 0 <= self.node_rank <= other_nodes:
            raise ConfigurationError(
                f"World(rank={self.rank}, local_rank={self.local_rank}, node_rank={self.node_rank}, "
                f"world_size={self.world_size}, local_world_size={self.local_world_size})",
                "these numbers contradict each other",
                "0 <= rank < world_size, 0 <= local_rank < local_world_size <= world_size, local_rank <= rank, "
                "0 <= node_rank < number of nodes",
                "check the launcher's variables, or unset RANK and WORLD_SIZE for a run in a single process",
            )

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the job, taking all of them to hold equally many processes; 1 only when this is all."""
        # Rounded up: with 3 processes here and 2 elsewhere there is a second node, and loopback would not reach it.
        return -(-self.world_size // self.local_world_size)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks before and after this one, with the last before the first; none when it is the only one."""
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
        if any(not _text(env, name) for name in _REQUIRED):
            return None
        world_size = _integer(env, "WORLD_SIZE", 1)
        rank = _integer(env, "RANK", 0)
        local_world_size = _integer(env, "LOCAL_WORLD_SIZE", world_size)
        local_rank = _integer(env, "LOCAL_RANK", rank % max(1, local_world_size))
        if _text(env, "LOCAL_RANK") and not _text(env, "LOCAL_WORLD_SIZE") and local_rank != rank:
            raise ConfigurationError(
                f"RANK={rank} and LOCAL_RANK={local_rank} in the environment",
                "they differ, so there are several nodes, and without LOCAL_WORLD_SIZE it is unknown how many",
                "LOCAL_WORLD_SIZE next to LOCAL_RANK, as torchrun sets them",
                "export LOCAL_WORLD_SIZE=<processes on this node>",
            )
        return cls(
            rank=rank,
            local_rank=local_rank,
            node_rank=_integer(env, "GROUP_RANK", rank // max(1, local_world_size)),
            world_size=world_size,
            local_world_size=local_world_size,
            address=_text(env, "MASTER_ADDR") or "127.0.0.1",
            port=_port(env),
            store=_text(env, "FABRIC_STORE") or None,
            directory=_text(env, "FABRIC_DIRECTORY") or None,
        )

    def to_env(self) -> dict[str, str]:
        """The variables from which :meth:`from_env` reads this world back."""
        env = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "GROUP_RANK": str(self.node_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.address,
        }
        if self.port is not None:
            env["MASTER_PORT"] = str(self.port)
        if self.store is not None:
            env["FABRIC_STORE"] = self.store
        if self.directory is not None:
            env["FABRIC_DIRECTORY"] = self.directory
        return env


def _text(env: Mapping[str, str], name: str) -> str:
    return env.get(name, "").strip()


def _port(env: Mapping[str, str]) -> int | None:
    if not _text(env, "MASTER_PORT"):
        return None
    port = _integer(env, "MASTER_PORT", 0)
    if 1 <= port <= 65535:
        return port
    raise ConfigurationError(
        f"MASTER_PORT={port} in the environment",
        "there is no such port",
        "1 to 65535, the same in every process",
        "export MASTER_PORT=29511",
    )


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = _text(env, name)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(
            f"{name}={text!r} in the environment",
            "it has to be an integer, since fabric reads its place in the job from it",
            "what torchrun or `fabric run` sets",
            f"unset {name} to run in a single process",
        ) from None

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
        node_rank: number of this node.
        world_size: number of processes of the job.
        local_world_size: number of processes on this node.
        address: host on which rank 0 can be reached.
        port: port of the rendezvous store there; ``None`` when ``store`` is given or nothing has to be found.
        store: where the processes meet when fabric started them, as ``file:///path`` (a private
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
        in_range = 0 <= self.rank < self.world_size and 0 <= self.local_rank < self.local_world_size
        if not in_range or self.local_world_size > self.world_size or self.node_rank < 0:
            raise ConfigurationError(
                f"World(rank={self.rank}, local_rank={self.local_rank}, node_rank={self.node_rank}, "
                f"world_size={self.world_size}, local_world_size={self.local_world_size})",
                "these numbers contradict each other",
                "0 <= rank < world_size, 0 <= local_rank < local_world_size <= world_size, node_rank >= 0",
                "check the launcher's variables, or unset RANK and WORLD_SIZE for a run in a single process",
            )

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the job, taking all of them to hold equally many processes."""
        return max(1, self.world_size // self.local_world_size)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "World | None":
        """Read the variables that ``torchrun`` and fabric's own launchers set.

        Args:
            env: an environment mapping, such as ``os.environ``.

        Returns:
            The world, or ``None`` when ``RANK`` or ``WORLD_SIZE`` is missing.

        Raises:
            ConfigurationError: a variable is not an integer, or they contradict each other.
        """
        if any(name not in env for name in _REQUIRED):
            return None
        world_size = _integer(env, "WORLD_SIZE", 1)
        rank = _integer(env, "RANK", 0)
        local_world_size = _integer(env, "LOCAL_WORLD_SIZE", world_size)
        port = _integer(env, "MASTER_PORT", -1)
        return cls(
            rank=rank,
            local_rank=_integer(env, "LOCAL_RANK", rank % max(1, local_world_size)),
            node_rank=_integer(env, "GROUP_RANK", rank // max(1, local_world_size)),
            world_size=world_size,
            local_world_size=local_world_size,
            address=env.get("MASTER_ADDR", "127.0.0.1"),
            port=None if port < 0 else port,
            store=env.get("FABRIC_STORE"),
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
        return env


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text.strip():
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

"""What an environment is, and how each of them reads a variable and finds the place where the ranks meet."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from fabric.errors import ConfigurationError
from fabric.world import World

__all__ = [
    "Environment",
    "derive_node_rank",
    "derive_port",
    "read",
    "read_integer",
    "rendezvous",
    "require",
]

# Below 32768, where Linux begins to hand out ports for outgoing connections, and above most registered services.
_FIRST_PORT, _PORTS = 10_000, 20_000


class Environment(Protocol):
    """A launcher that fabric recognises by the variables it sets."""

    @property
    def name(self) -> str:
        """How it is called in ``environment=``, such as ``"slurm"``; a plain attribute does."""
        ...

    def detect(self, env: Mapping[str, str]) -> World | None:
        """This process's place in the job, or ``None`` when this launcher did not make it.

        Pure: the mapping is all that is read, and nothing is changed.

        Raises:
            ConfigurationError: the launcher is recognised, and its variables are incomplete or contradict each other.
        """
        ...


def read(env: Mapping[str, str], *names: str) -> str | None:
    """Value of the first of ``names`` that is set; a blank one counts as unset, ``None`` when none is."""
    for name in names:
        text = env.get(name, "").strip()
        if text:
            return text
    return None


def read_integer(env: Mapping[str, str], *names: str) -> int | None:
    """Like :func:`read`, as an integer.

    Raises:
        ConfigurationError: it is not one; the variable is named.
    """
    for name in names:
        text = read(env, name)
        if text is None:
            continue
        try:
            return int(text)
        except ValueError:
            raise ConfigurationError(
                f"{name}={text!r} in the environment",
                "it is not an integer, and fabric reads this process's place in the job from it",
                "what the launcher sets",
                f"unset {name}, or start the job anew with its launcher",
            ) from None
    return None


def require(env: Mapping[str, str], launcher: str, *alternatives: Sequence[str]) -> tuple[int, ...]:
    """Read one integer for each of ``alternatives``, the names under which versions of a launcher set it.

    Raises:
        ConfigurationError: some are not set; all of them are named, since a rank that guessed would train alone or on
            another's device without a word.
    """
    values = [read_integer(env, *names) for names in alternatives]
    missing = [" or ".join(names) for names, value in zip(alternatives, values, strict=True) if value is None]
    if missing:
        raise ConfigurationError(
            f"the place of this process in a job of {launcher}",
            f"{launcher} made this process and did not set {', '.join(missing)}",
            f"all that {launcher} sets, passed on to the script unchanged",
            "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, set by hand: they win",
        )
    return tuple(value for value in values if value is not None)


def derive_node_rank(rank: int, local_rank: int, world_size: int, local_world_size: int) -> int:
    """Number of the node that holds ``rank``, for launchers that do not tell; nodes of equal size are assumed.

    Ranks fill one node after the other, unless ``local_rank`` shows that they go round the nodes.
    """
    if local_world_size < 1 or rank % local_world_size == local_rank:
        return rank // max(1, local_world_size)
    return rank % -(-world_size // local_world_size)


def derive_port(identity: str) -> int:
    """A port in 10000 to 29999 that all who know ``identity`` agree on, and that other jobs are unlikely to share."""
    return _FIRST_PORT + zlib.crc32(identity.encode()) % _PORTS


def rendezvous(
    env: Mapping[str, str],
    *,
    launcher: str,
    world_size: int,
    local_world_size: int,
    first_host: str | None = None,
    identity: str | None = None,
    passing: str = "export {}",
) -> tuple[str, int | None]:
    """Where the ranks meet: ``MASTER_ADDR`` and ``MASTER_PORT`` where set, else what the job has in common.

    Args:
        env: an environment mapping.
        launcher: its name, for the text of errors.
        world_size: number of processes of the job.
        local_world_size: number of processes on this node; all of them there makes the address loopback.
        first_host: host of rank 0, when the launcher tells.
        identity: a text that the ranks of this job share with no other job, when there is one.
        passing: how to give the launcher a variable, with ``{}`` for ``NAME=value``; the text of errors shows it.

    Returns:
        Address and port; the port of a single process is ``None`` unless it is set.

    Raises:
        ConfigurationError: several nodes and no address, several processes and no port, or a port out of range.
    """
    several_nodes = local_world_size < world_size
    address = read(env, "MASTER_ADDR") or (first_host if several_nodes else "127.0.0.1")
    if address is None:
        raise ConfigurationError(
            f"a job of {world_size} processes, {local_world_size} of them on this node, started by {launcher}",
            "they are on several nodes, and nothing tells where rank 0 is",
            "MASTER_ADDR set to the host name or address of the node of rank 0, the same in every process",
            passing.format("MASTER_ADDR=<host of rank 0>"),
        )
    port = read_integer(env, "MASTER_PORT")
    if port is None and identity is not None and world_size > 1:
        port = derive_port(identity)
    if port is None and world_size > 1:
        raise ConfigurationError(
            f"a job of {world_size} processes, started by {launcher}",
            "no port is set, and nothing that tells this job from others, from which one could be derived",
            "MASTER_PORT set to a free port of the node of rank 0, the same in every process",
            passing.format("MASTER_PORT=<port>"),
        )
    if port is not None and not 1 <= port <= 65535:
        raise ConfigurationError(
            f"MASTER_PORT={port} in the environment", "there is no such port", "1 to 65535", "export MASTER_PORT=29511"
        )
    return address, port

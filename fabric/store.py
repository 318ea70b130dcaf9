"""The store of a job, through which ranks share values without collectives."""

import json
import os
import time
import uuid
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fabric.errors import ConfigurationError, UsageError
from fabric.world import World

__all__ = ["JobStore", "find_store", "unused_prefix"]

_POLL = 0.005  # seconds


class JobStore:
    """Values that the ranks of a job share. Each key is used with one of the methods that write a value.

    Args:
        store: shared by the ranks; local to this process if there are no others.
        rank: rank of this process.
        size: number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self.rank = rank
        self.size = size
        self._present: set[str] = set()

    def from_rank0(self, key: str, value: bytes) -> bytes:
        """Return rank 0's value for ``key`` on every rank; other ranks wait for it. Each key can be used once.

        Raises:
            UsageError: rank 0 wrote no value within the timeout.
        """
        if self.rank == 0:
            self.set(key, value)
            return value
        try:
            return self._store.get(key)
        except dist.DistStoreError as error:
            raise UsageError(
                f"rank {self.rank} waits for rank 0's {key!r}",
                f"rank 0 has written none within the timeout: {error}",
                "every rank iterates over the same loaders, and builds the same models, in the same order",
                "check for a branch on the rank around that loop or build",
            ) from error

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """The value of the first rank that called this with ``key``: ``value`` if it is this one."""
        return self._store.compare_set(key, "", value)  # pyright: ignore[reportArgumentType] - as in set()

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""
        return self._store.add(key, amount)

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value, replacing any earlier one."""
        self._store.set(key, value)  # pyright: ignore[reportArgumentType] - bytes pass; the stub says str only

    def get_nowait(self, key: str) -> bytes | None:
        """The value that some rank wrote; None if there is none yet."""
        return self._store.get(key) if self._store.check([key]) else None

    def publish(self, topic: str, value: Any) -> None:
        """Write this rank's value of a topic, which JSON can hold, replacing any earlier one."""
        self.set(f"{topic}/{self.rank}", json.dumps(value, separators=(",", ":")))

    def read(self, topic: str, ranks: Iterable[int], seconds: float = 0.0) -> dict[int, Any]:
        """The values that these ranks have published, waiting up to ``seconds``; leaves out ranks without one."""
        keys = {rank: f"{topic}/{rank}" for rank in ranks}
        deadline = time.monotonic() + seconds
        while missing := {*keys.values()} - self._present:
            self._present |= {key for key in missing if self._store.check([key])}
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL)
        there = {rank: key for rank, key in keys.items() if key in self._present}
        values = self._store.multi_get(list(there.values())) if there else ()
        return {rank: json.loads(value) for rank, value in zip(there, values, strict=True)}

    def close(self) -> None:
        """Release the connection, even if others hold this object; afterwards it is the store of a single rank."""
        self._store = dist.HashStore()
        self.rank = 0
        self.size = 1
        self._present.clear()


def find_store(world: World, timeout: timedelta) -> dist.Store:
    """Connect to the store that the job's launcher or environment specifies.

    Raises:
        ConfigurationError: neither specifies where the processes connect.
    """
    if world.world_size == 1:
        return dist.HashStore()
    if world.store is not None:
        # No worker count: with one, the store removes its file when the first of several runtimes closes.
        return dist.FileStore(world.store.removeprefix("file://"))
    if world.port is None:
        raise ConfigurationError(
            f"a job of {world.world_size} processes, this one rank {world.rank}",
            "nothing says where they meet",
            "MASTER_ADDR and MASTER_PORT in the environment of every process",
            "start the job with torchrun or `fabric run`, or export MASTER_PORT=29500",
        )
    host = f"[{world.address}]" if ":" in world.address else world.address
    return next(
        rendezvous(f"tcp://{host}:{world.port}", world.rank, world.world_size, timeout=timeout)
    )[0]


def unused_prefix(store: dist.Store, world: World, timeout: timedelta) -> str:
    """A key prefix for the ranks that connect now, unused by any earlier user of this store.

    The processes of a job may have several runtimes in a row, which a counter tells apart. But torchrun keeps its store
    when it restarts ranks, even those that died before they were counted. So under torchrun each rank publishes a new
    name, and rank 0 writes its own under each name, even of dead ranks, until all living ranks have confirmed it.

    Raises:
        torch.distributed.DistStoreError: a rank did not connect within the timeout.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or dist.is_initialized():
        return str(store.add(f"fabric/runtime/{world.rank}", 1))
    jobs = JobStore(store, world.rank, world.world_size)
    own = uuid.uuid4().hex
    if world.rank:
        jobs.publish("fabric/name", own)
        first = store.get(own).decode()
        jobs.publish(first, own)
        return first
    missing = {*range(1, world.world_size)}
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for name in jobs.read("fabric/name", missing).values():
            jobs.set(name, own)
        missing -= jobs.read(own, missing, _POLL).keys()
        if time.monotonic() > deadline:
            raise dist.DistStoreError(
                f"ranks {missing} of {world.world_size} have not connected within the timeout"
            )
    return own

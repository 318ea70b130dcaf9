"""The store of a job, through which ranks share values without collectives."""

import json
import os
import time
import uuid
from collections.abc import Iterable, Set
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fabric.errors import ConfigurationError, UsageError
from fabric.world import World

__all__ = ["JobStore", "find_store", "unused_key_prefix"]

_POLL_SECONDS = 0.005  # between two looks at the store


class JobStore:
    """Values that the ranks of a job share.

    A key is always written by the same method.

    Args:
        store: the store of torch that the ranks share. It is local in a job of one process.
        rank: the rank of this process.
        size: the number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self.rank = rank
        self.size = size
        self._present: set[str] = set()

    def from_rank0(self, key: str, value: bytes) -> bytes:
        """Return rank 0's value for a key on every rank. Other ranks wait for rank 0.

        Args:
            key: the name of the value, which can be used once.
            value: the value of this rank. Only rank 0's is used.

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
                problem=f"rank 0 has not written it within the timeout: {error}",
                expected="every rank iterates over the same loaders, and builds the same models, "
                "in the same order",
                suggestion="look for a branch on the rank around a loop over a loader or the build "
                "of a model",
            ) from error

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """Write a value unless a rank has written one. Return the value of the first rank."""
        # The stub says str only, as in set().
        return self._store.compare_set(key, "", value)  # pyright: ignore[reportArgumentType]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""
        return self._store.add(key, amount)

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value, replacing any earlier one."""
        # Bytes pass, although the stub says str only.
        self._store.set(key, value)  # pyright: ignore[reportArgumentType]

    def get_nowait(self, key: str) -> bytes | None:
        """Return the value of a key, or None if no rank has written one yet."""
        if not self._store.check([key]):
            return None
        return self._store.get(key)

    def publish(self, topic: str, value: Any) -> None:
        """Write this rank's value of a topic, replacing any earlier one. See :meth:`read`.

        Args:
            topic: what the value is about, with one value for each rank.
            value: a value that JSON can represent.
        """
        self.set(f"{topic}/{self.rank}", json.dumps(value, separators=(",", ":")))

    def read(self, topic: str, ranks: Iterable[int], seconds: float = 0.0) -> dict[int, Any]:
        """Return the values of a topic that the given ranks have published, by rank.

        Args:
            topic: what the values are about, as in :meth:`publish`.
            ranks: the ranks to read from.
            seconds: how long to wait for ranks that have not published a value. The result has no
                entry for a rank that has not published by then.
        """
        keys = {rank: f"{topic}/{rank}" for rank in ranks}
        self._wait_for(set(keys.values()), seconds)
        published = {rank: key for rank, key in keys.items() if key in self._present}
        if not published:
            return {}
        values = self._store.multi_get(list(published.values()))
        return dict(zip(published, map(json.loads, values), strict=True))

    def _wait_for(self, keys: Set[str], seconds: float) -> None:
        """Note which keys are present, until all are or the time is over."""
        deadline = time.monotonic() + seconds
        missing = keys - self._present
        while missing:
            self._present.update(key for key in missing if self._store.check([key]))
            if time.monotonic() >= deadline:
                return
            time.sleep(_POLL_SECONDS)
            missing = keys - self._present

    def close(self) -> None:
        """Release the connection, even if this object is still referenced.

        Afterwards this object is the empty store of a job with one rank.
        """
        self._store = dist.HashStore()
        self.rank = 0
        self.size = 1
        self._present.clear()


def find_store(world: World, timeout: timedelta) -> dist.Store:
    """Connect to the store that the job's launcher or environment specifies.

    Args:
        world: the place of this process in the job.
        timeout: how long to wait for the store of rank 0.

    Raises:
        ConfigurationError: neither the launcher nor the environment specifies a store.
    """
    if world.world_size == 1:
        return dist.HashStore()
    if world.store is not None:
        # With a worker count the store would remove its file when the first of several runtimes
        # closes.
        return dist.FileStore(world.store.removeprefix("file://"))
    if world.port is None:
        raise ConfigurationError(
            f"a job of {world.world_size} processes, this one rank {world.rank}",
            problem="the environment does not say where the processes connect to each other",
            expected="MASTER_ADDR and MASTER_PORT in the environment of every process",
            suggestion="start the job with torchrun or `fabric run`, or export MASTER_PORT=29500",
        )
    host = world.address
    if ":" in host:  # an IPv6 address
        host = f"[{host}]"
    url = f"tcp://{host}:{world.port}"
    store, _, _ = next(rendezvous(url, world.rank, world.world_size, timeout=timeout))
    return store


def unused_key_prefix(store: dist.Store, world: World, timeout: timedelta) -> str:
    """Return a key prefix for the ranks that connect now, unused by any earlier user of the store.

    The processes of a job may have several runtimes in a row, which a counter tells apart. But
    torchrun keeps its store when it restarts ranks, and a rank may have died before it was counted.
    So under torchrun the ranks agree on a name that no earlier rank can know.

    Args:
        store: the store that the ranks share.
        world: the place of this process in the job.
        timeout: how long to wait for the other ranks.

    Raises:
        torch.distributed.DistStoreError: a rank did not connect within the timeout.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or dist.is_initialized():
        return str(store.add(f"fabric/runtime/{world.rank}", 1))
    return _agree_on_name(store, world, timeout)


def _agree_on_name(store: dist.Store, world: World, timeout: timedelta) -> str:
    """Return a new name that rank 0 chose and all living ranks have confirmed.

    Each rank publishes a new name of its own. Rank 0 writes its name under the name of each rank,
    including the names that dead ranks left, until all living ranks have confirmed rank 0's name.
    """
    job_store = JobStore(store, world.rank, world.world_size)
    name = uuid.uuid4().hex
    if world.rank != 0:
        job_store.publish("fabric/name", name)
        rank0_name = store.get(name).decode()
        job_store.publish(rank0_name, name)
        return rank0_name
    missing_ranks = set(range(1, world.world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing_ranks:
        for rank_name in job_store.read("fabric/name", missing_ranks).values():
            job_store.set(rank_name, name)
        missing_ranks -= job_store.read(name, missing_ranks, _POLL_SECONDS).keys()
        if time.monotonic() > deadline:
            raise dist.DistStoreError(
                f"ranks {missing_ranks} of {world.world_size} have not connected within the timeout"
            )
    return name

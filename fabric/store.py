"""The store of a job, through which ranks share values without collectives."""

import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Set
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fabric.errors import CollectiveMismatchError, ConfigurationError, UsageError
from fabric.world import World

__all__ = ["JobStore", "find_store", "unused_key_prefix"]

# The pause between two checks of the store for missing keys.
_POLL_SECONDS = 0.005
# In a wait for rank 0, which may be long and on many ranks, each pause is longer than the one
# before by this factor, up to this time in seconds.
_PAUSE_GROWTH = 1.5
_MAX_POLL_SECONDS = 0.1
# What the errors of a wait for rank 0 expect, and suggest.
_SAME_ON_EVERY_RANK = (
    "every rank iterates over the same loaders, and builds the same models, in the same order"
)
_LOOK_FOR_BRANCH = (
    "look for a branch on the rank around a loop over a loader or the build of a model"
)


class JobStore:
    """Values that the ranks of a job share, by key, without a collective.

    Write the value of a key always with the same method, since the methods use different formats.
    A key that exists is never removed.

    Args:
        store: the store of torch that the ranks share. In a job of one process, a store that is
            local to the process.
        rank: the rank of this process.
        size: the number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        """Keep the store. No key is read or written."""
        self._store = store
        self.rank = rank
        self.size = size
        self._existing_keys: set[str] = set()  # keys that read() need not check again

    def from_rank0(
        self, key: str, value: bytes, find_end: Callable[[], str] | None = None
    ) -> bytes:
        """Return rank 0's value for a key on every rank. Other ranks wait for rank 0.

        Every rank has to call this method with the same key. Rank 0 does not wait for other ranks.

        Args:
            key: the name of the value. Use a new key for each call.
            value: the value of this rank. Only the value of rank 0 is used.
            find_end: returns why rank 0 makes no further calls, or an empty text while rank 0 runs.
                It is called several times per second during the wait. None, the default, does not
                notice the end of rank 0, and waits for the timeout of the store.

        Raises:
            CollectiveMismatchError: rank 0 has ended without writing the value.
            UsageError: rank 0 wrote no value within the timeout.
        """
        if self.rank == 0:
            self.set(key, value)
            return value
        request = f"rank {self.rank} waits for rank 0's {key!r}"
        timeout: timedelta = self._store.timeout  # pyright: ignore[reportAttributeAccessIssue] - not in the stub
        deadline = time.monotonic() + timeout.total_seconds()
        pause = _POLL_SECONDS
        # The get() of the store would wait, too. But nothing would end that wait early, neither a
        # signal nor the end of rank 0.
        while not self._store.check([key]):
            end_of_rank0 = ""
            if find_end is not None:
                end_of_rank0 = find_end()
            # Checked again, since rank 0 may have written the value just before it ended.
            if end_of_rank0 != "" and not self._store.check([key]):
                raise CollectiveMismatchError(
                    request,
                    problem=f"rank 0 {end_of_rank0}",
                    expected=_SAME_ON_EVERY_RANK,
                    suggestion=f"look at the error of rank 0 first, if any; {_LOOK_FOR_BRANCH}",
                )
            if time.monotonic() > deadline:
                raise UsageError(
                    request,
                    problem="rank 0 has not written it within the timeout of "
                    f"{timeout.total_seconds():g} s",
                    expected=_SAME_ON_EVERY_RANK,
                    suggestion=_LOOK_FOR_BRANCH,
                )
            time.sleep(pause)
            pause = min(_PAUSE_GROWTH * pause, _MAX_POLL_SECONDS)
        return self._store.get(key)

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """Write a value unless a rank has written one. Return the value that is now written."""
        # compare_set() writes if the key has the expected value. An empty expected value means that
        # the key does not exist. torch takes bytes, but its stub declares str.
        return self._store.compare_set(key, "", value)  # pyright: ignore[reportArgumentType]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return its new value."""
        return self._store.add(key, amount)

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value, replacing any earlier one."""
        # torch takes bytes, but its stub declares str.
        self._store.set(key, value)  # pyright: ignore[reportArgumentType]

    def get_nowait(self, key: str) -> bytes | None:
        """Return the value of a key, or None if no rank has written one yet."""
        if not self._store.check([key]):
            return None
        return self._store.get(key)

    def publish(self, topic: str, value: Any) -> None:
        """Write this rank's value of a topic, replacing any earlier one. See :meth:`read`.

        Args:
            topic: the name of a set of values, one for each rank.
            value: a value that JSON can represent.
        """
        text = json.dumps(value, separators=(",", ":"))  # compact, without spaces
        self.set(f"{topic}/{self.rank}", text)

    def read(self, topic: str, ranks: Iterable[int], max_wait: float = 0.0) -> dict[int, Any]:
        """Return the values of a topic that the given ranks have published, by rank.

        Args:
            topic: the topic that the ranks have passed to :meth:`publish`.
            ranks: the ranks to read from.
            max_wait: how long to wait for ranks that have not published a value, in seconds. 0 does
                not wait. The result has no entry for a rank that does not publish in this time.
        """
        key_of_rank = {rank: f"{topic}/{rank}" for rank in ranks}
        existing_keys = self._wait_for_keys(set(key_of_rank.values()), max_wait)
        published_keys: dict[int, str] = {}
        for rank, key in key_of_rank.items():
            if key in existing_keys:
                published_keys[rank] = key
        if not published_keys:
            return {}
        # One message to the store for all values.
        texts = self._store.multi_get(list(published_keys.values()))
        return dict(zip(published_keys, map(json.loads, texts), strict=True))

    def _wait_for_keys(self, keys: Set[str], max_wait: float) -> Set[str]:
        """Wait until all keys exist, or for ``max_wait`` seconds. Return those that exist.

        Each key is checked at least once. A key that exists is noted in ``_existing_keys`` and is
        not checked again, since keys are not removed.

        Args:
            keys: the keys to check.
            max_wait: how long to wait for missing keys, in seconds.
        """
        deadline = time.monotonic() + max_wait
        missing = keys - self._existing_keys
        while missing:
            # One call for each key, since check() returns whether all keys of a list exist.
            for key in missing:
                if self._store.check([key]):
                    self._existing_keys.add(key)
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SECONDS)
            missing = keys - self._existing_keys
        return keys & self._existing_keys

    def close(self) -> None:
        """Close the connection to the store.

        Afterwards this object is the empty store of a job with one rank, so that a later call of a
        method neither fails nor waits.
        """
        # torch closes a connection to which nothing refers. A HashStore has no connection.
        self._store = dist.HashStore()
        self.rank = 0
        self.size = 1
        self._existing_keys.clear()


def find_store(world: World, timeout: timedelta) -> dist.Store:
    """Connect to the store that the job's launcher or environment specifies.

    Args:
        world: the rank of this process, and the address or file of the store.
        timeout: how long to wait for the store of rank 0.

    Returns:
        The store that the ranks share. A local store in a job of one process.

    Raises:
        ConfigurationError: neither the launcher nor the environment specifies a store.
    """
    if world.world_size == 1:
        return dist.HashStore()
    if world.store is not None:
        # The number of workers is not passed. With this number, torch would remove the file when
        # the first of several Fabric objects closes its store.
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
    # rendezvous() is a generator of one tuple: (store, rank, world size).
    store, _, _ = next(rendezvous(url, world.rank, world.world_size, timeout=timeout))
    return store


def unused_key_prefix(store: dist.Store, world: World, timeout: timedelta) -> str:
    """Return a prefix for the keys of the ranks that connect now, which no earlier rank has used.

    The processes of a job may have several runtimes, one after the other, on one store. A counter
    for each rank tells the runtimes apart: the n-th runtime has the prefix n. The counter is not
    enough under torchrun, which keeps its store when it restarts the ranks: after a rank has died
    before it counted, the counters of the ranks would differ. So under torchrun the ranks agree on
    a random prefix.

    Args:
        store: the store that the ranks share.
        world: the rank of this process.
        timeout: how long to wait for the other ranks.

    Returns:
        The same prefix on every rank.

    Raises:
        torch.distributed.DistStoreError: a rank did not connect within the timeout.
    """
    # torchrun sets this variable if the ranks use the store of torchrun.
    is_store_of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # If a process group exists, all ranks are alive and have the same count.
    if is_store_of_torchrun and not dist.is_initialized():
        return _agree_on_prefix(store, world, timeout)
    return str(store.add(f"fabric/runtime/{world.rank}", 1))


def _agree_on_prefix(store: dist.Store, world: World, timeout: timedelta) -> str:
    """Return a prefix for the ranks of this start, drawn by rank 0 and confirmed by all ranks.

    The store may contain what ranks have written before a restart. So the ranks exchange random
    texts, which no earlier rank can know:

    1. Each rank but rank 0 publishes a *mailbox*: a random key, under which it waits for the
       prefix.
    2. Rank 0 writes the prefix under the mailbox of each rank. The mailbox may still be that of a
       rank that has died, so rank 0 repeats this step until the rank has confirmed.
    3. Each rank but rank 0 reads the prefix, and confirms it by publishing a value with the prefix
       as the topic.

    Args:
        store: the store that the ranks share.
        world: the rank of this process.
        timeout: how long rank 0 waits for the confirmations.
    """
    job_store = JobStore(store, world.rank, world.world_size)
    if world.rank != 0:
        mailbox = uuid.uuid4().hex
        job_store.publish("fabric/name", mailbox)
        prefix = store.get(mailbox).decode()  # waits until rank 0 has written the key
        job_store.publish(prefix, "")  # the confirmation; its value is not used
        return prefix
    prefix = uuid.uuid4().hex
    missing_ranks = set(range(1, world.world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing_ranks:
        for mailbox in job_store.read("fabric/name", missing_ranks).values():
            job_store.set(mailbox, prefix)
        confirmations = job_store.read(prefix, missing_ranks, max_wait=_POLL_SECONDS)
        missing_ranks -= confirmations.keys()
        if time.monotonic() > deadline:
            raise dist.DistStoreError(
                f"ranks {missing_ranks} of {world.world_size} have not connected within the timeout"
            )
    return prefix

"""What one process of a running job holds: its place, its device, and the way to the other processes."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fabric import communicators
from fabric._torch import abort_process_group, default_store, set_group_timeout
from fabric.accelerators import Accelerator
from fabric.communicators import (
    Communicator,
    LocalCommunicator,
    ProcessGroupCommunicator,
    Record,
    RecordedCommunicator,
)
from fabric.errors import ConfigurationError, UsageError
from fabric.launchers import RunDirectory
from fabric.pace import Pace
from fabric.precision import Precision
from fabric.watchdog import DEFAULT_WATCHDOG, Watchdog
from fabric.world import World

__all__ = ["DEFAULT_TIMEOUT", "Runtime"]

_LET_GO = 0.02  # seconds; several times the interpreter's switch interval
DEFAULT_TIMEOUT = timedelta(seconds=1800)
_ANSWER = timedelta(seconds=30)  # within which the store answers what does not wait for other ranks


class Runtime:
    """One process of a job while it runs.

    Args:
        world: the place of this process.
        accelerator: the kind of its device.
        devices: the devices of this node, in the order of local ranks; all of them for a strategy that drives several
            devices from one process.
        precision: the precision that modules are set up with.
        connected: whether the processes of the job talk, that is, whether a process group is needed.
        backend: process-group backend; None for the accelerator's own.
        timeout: how long a collective may wait.
        check_collectives: whether ranks compare their collectives before anything moves.
        watchdog: how long a rank waits for others before a report is printed; zero for never.

    Attributes:
        record: what this process is doing, where there are others that may wait for it; else None.
    """

    def __init__(
        self,
        *,
        world: World,
        accelerator: Accelerator,
        devices: tuple[torch.device, ...],
        precision: Precision,
        connected: bool,
        backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        check_collectives: bool = False,
        watchdog: timedelta = DEFAULT_WATCHDOG,
    ) -> None:
        self.world, self.accelerator, self.precision = world, accelerator, precision
        self.devices = devices
        # A scheduler may show each process only its own device.
        self.device = devices[world.local_rank % len(devices)]
        self._connected, self._backend, self._timeout = connected, backend, timeout
        self._checks, self._threshold = check_collectives, watchdog
        self._watchdog: Watchdog | None = None
        self.record: Record | None = None
        self._communicator: Communicator | None = None
        self._background: Communicator | None = None
        self._store: dist.Store | None = None
        self._owns_group = False
        self._meshes: dict[tuple[tuple[str, int], ...], dist.DeviceMesh] = {}
        self.pace = Pace(world.rank, world.neighbours, self.post, self.peek)

    @property
    def communicator(self) -> Communicator:
        """The collectives over all processes of the job."""
        if self._communicator is None:
            raise UsageError(
                f"a collective on rank {self.world.rank} of {self.world.world_size}",
                "the runtime has not been started, or has been closed by teardown()",
                "collectives between launch() and teardown()",
                "fabric.launch() before the first collective",
            )
        self.pace.meet()
        return self._communicator

    def start(self, communicator: Communicator | None = None, store: dist.Store | None = None) -> None:
        """Take the device and meet the other processes.

        Collective when the processes of the job talk: returns once all are there.

        Args:
            communicator: how this rank talks to the others, from a caller that has connected them.
            store: where they leave values for each other, likewise.
        """
        self.accelerator.activate(self.device)
        if communicator is not None:
            self._communicator, self._store = communicator, store
        elif not self._connected:
            self._communicator = LocalCommunicator(self.device)
            return
        else:
            self._store = self._connect()
            self._communicator = ProcessGroupCommunicator(None, self.device, self._timeout)
        if self._checks and self._store is not None and self.world.world_size > 1:
            store = dist.PrefixStore("checks", self._store)
            ledger = communicators.Ledger(store, self.world.rank, self.world.world_size, self._timeout)
            self._communicator = communicators.CheckedCommunicator(self._communicator, ledger)
        if communicator is None and self.world.world_size > 1:
            self._watch(self._communicator)

    def communicator_over(self, group: dist.ProcessGroup) -> Communicator:
        """The collectives over a process group of torch, checked and recorded where all are; not a collective."""
        inner = ProcessGroupCommunicator(group, self.device, self._timeout)
        whole = self._communicator or self.communicator
        return whole.over(inner, f"torch {group.group_name}", dist.get_process_group_ranks(group))

    def background(self) -> Communicator:
        """The collectives over all processes, over the CPU in a group of their own, for a thread beside the loop.

        Collective the first time that it is asked for.
        """
        if self._background is None:
            whole = self.communicator
            if self._connected and self.device.type != "cpu":
                # Two collectives at a time on one device can wait for each other; and objects need none.
                group = dist.new_group(timeout=self._timeout, backend="gloo")
                assert isinstance(group, dist.ProcessGroup), "every rank is a member"
                self._background = self.communicator_over(group)
            else:
                self._background = whole.new_group(range(whole.size))
        assert self._background is not None, "every rank is a member"
        return self._background

    def close(self) -> None:
        """Release what :meth:`start` took, not a process group that was there before; idempotent."""
        if self._communicator is None:
            return
        self._unwatch()
        if self._background is not None:
            self._background.close()
            self._background = None
        self._communicator.close()
        self._communicator = None
        self._meshes.clear()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
            # What DDP holds keeps gloo's threads alive. One that still frees its last collective needs the interpreter,
            # and aborts the process if that is being torn down.
            time.sleep(_LET_GO)
        self._store = None
        self.accelerator.release()

    def abort(self) -> None:
        """Let go of the other processes without waiting for them, on the way out of an exception."""
        if self._communicator is not None:
            self._unwatch()
            self._communicator.close()
            if self._owns_group and dist.is_initialized():
                abort_process_group()
        self._communicator = self._background = self._store = None

    def mesh(self, **sizes: int) -> dist.DeviceMesh:
        """The processes of the job in rank order as a mesh of named sizes, the last of which varies fastest.

        Collective the first time that a mesh is asked for; the same object from then on.
        """
        key = tuple(sizes.items())
        if key not in self._meshes:
            mesh = dist.init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            for group in mesh.get_all_groups():
                # That of all processes has its own, which a user may have given it.
                if group is not dist.group.WORLD:
                    set_group_timeout(group, self._timeout)
            self._meshes[key] = mesh
        return self._meshes[key]

    def agree(self, key: str, value: bytes) -> bytes:
        """Rank 0's value for ``key``, on every rank.

        No collective: rank 0 leaves its value in the store and goes on; the others read it there, and wait for it if
        they come first. Each key can be used once.

        Raises:
            UsageError: rank 0 left no value within the timeout.
        """
        if self._store is None or self.world.world_size == 1:
            return value
        if self.world.rank == 0:
            self._store.set(key, value)  # pyright: ignore[reportArgumentType] - bytes pass; the stub says str only
            return value
        try:
            return self._store.get(key)
        except dist.DistStoreError as error:
            raise UsageError(
                f"rank {self.world.rank} waits for rank 0's {key!r}",
                f"rank 0 has not got there within {self._timeout.total_seconds():g} s",
                "every rank iterates over the same loaders in the same order",
                "check for a branch on the rank around the loop over the loader",
            ) from error

    def first(self, key: str, value: bytes) -> bytes:
        """What the first rank that came here with ``key`` brought: ``value`` if it is this one. No collective."""
        if self._store is None:
            return value
        return self._store.compare_set(key, "", value)  # pyright: ignore[reportArgumentType] - as in agree()

    def post(self, key: str, value: bytes) -> None:
        """Leave a value for other ranks that :meth:`peek` at ``key``; the latest counts. No collective."""
        if self._store is not None:
            self._store.set(key, value)  # pyright: ignore[reportArgumentType] - bytes pass; the stub says str only

    def peek(self, key: str) -> bytes | None:
        """What some rank left at ``key``; None when nothing is there yet. No collective, waits for nobody."""
        if self._store is None or not self._store.check([key]):
            return None
        return self._store.get(key)

    def _watch(self, communicator: Communicator) -> None:
        assert self._store is not None, "ranks that talk have a store"
        # A connection of its own: the main thread may wait on the other for as long as it likes.
        try:
            own = self._store.clone()  # pyright: ignore[reportAttributeAccessIssue] - missing in the stub
        except RuntimeError as error:
            if self._owns_group or isinstance(error, dist.DistError):
                raise
            if not self._threshold:
                return
            raise ConfigurationError(
                "a process group that was there before, made with a store of your own",
                f"the watchdog needs a second connection to it, and its clone() does not work: {error}",
                "a store of torch, or one whose clone() returns another connection",
                "Fabric(..., watchdog=0), without a report when ranks wait for each other",
            ) from error
        store = dist.PrefixStore("watchdog", own)
        store.set_timeout(_ANSWER)
        directory = RunDirectory.of_world(self.world)
        self._watchdog = Watchdog(
            store,
            self.world.rank,
            self.world.world_size,
            threshold=self._threshold,
            timeout=self._timeout,
            is_asynchronous=communicator.device.type != "cpu",
            requests=int if directory is None else directory.reports_asked,
            where="" if directory is None else str(directory.path),
        )
        self.record = self._watchdog.record
        self._communicator = RecordedCommunicator(communicator, self.record)
        self._watchdog.start()

    def _unwatch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
        self._watchdog = self.record = None

    def _connect(self) -> dist.Store:
        if dist.is_initialized():
            self._check_group()
            return self._own_keys(default_store())
        world = self.world
        backend = self._backend or self.accelerator.default_backend
        store = self._own_keys(self._find_store())
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=self._timeout,
            device_id=self.device if self.device.type == "cuda" else None,
        )
        self._owns_group = True
        self._wait_for_all(store)
        return store

    def _wait_for_all(self, store: dist.Store) -> None:
        """Return once every rank is connected: gloo fails on a rank whose peer has connected, finished and left."""
        if store.add("connected", 1) == self.world.world_size:
            store.set("all connected", "yes")
        store.wait(["all connected"])

    def _own_keys(self, store: dist.Store) -> dist.Store:
        """A part of the store for this runtime: several may follow each other in the processes of a job."""
        generation = store.add(f"fabric/runtime/{self.world.rank}", 1)
        store = dist.PrefixStore(f"fabric/{generation}", store)
        store.set_timeout(self._timeout)
        return store

    def _find_store(self) -> dist.Store:
        world = self.world
        if world.world_size == 1:
            return dist.HashStore()
        if world.store is not None:
            # No count of workers: with one the store removes its file when the first runtime of several closes.
            return dist.FileStore(world.store.removeprefix("file://"))
        if world.port is None:
            raise ConfigurationError(
                f"a job of {world.world_size} processes, this one rank {world.rank}",
                "nothing says where they meet",
                "MASTER_ADDR and MASTER_PORT in the environment of every process",
                "start the job with torchrun or `fabric run`, or export MASTER_PORT=29500",
            )
        host = f"[{world.address}]" if ":" in world.address else world.address
        url = f"tcp://{host}:{world.port}"
        store, _, _ = next(rendezvous(url, world.rank, world.world_size, timeout=self._timeout))
        return store

    def _check_group(self) -> None:
        group = (dist.get_rank(), dist.get_world_size())
        if group != (self.world.rank, self.world.world_size):
            raise ConfigurationError(
                f"a job of {self.world.world_size} processes, this one rank {self.world.rank}",
                f"torch.distributed is already initialised in this process, as rank {group[0]} of {group[1]}",
                "one process group that agrees with the launcher",
                "torch.distributed.destroy_process_group() before Fabric(...).launch()",
            )

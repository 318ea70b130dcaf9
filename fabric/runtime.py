"""What one process of a running job holds: its place, its device, and the way to the other processes."""

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fabric._torch import abort_process_group, default_store, set_group_timeout
from fabric.accelerators import Accelerator
from fabric.communicators import Communicator, LocalCommunicator, ProcessGroupCommunicator
from fabric.diagnostics.recorder import Check, FlightRecorder, RecordedCommunicator
from fabric.errors import ConfigurationError, UsageError
from fabric.launchers import ControlThread
from fabric.pace import Pace
from fabric.precision import Precision
from fabric.store import JobStore
from fabric.watchdog import DEFAULT_WATCHDOG, Watchdog
from fabric.world import World

if TYPE_CHECKING:
    from fabric.diagnostics.checker import CollectiveChecker

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
        pace: the order of steps and collectives, compared with that of other ranks.
        record: what this process is doing, where there are others that may wait for it; else None.
        store: what the ranks leave for each other.
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
        self._compares, self._threshold = check_collectives, watchdog
        self._watchdog: Watchdog | None = None
        self.record: FlightRecorder | None = None
        self.store = JobStore(dist.HashStore(), 0, 1)
        self.pace = Pace(world.rank, (), self.store)
        self._checks: list[Check] = []
        self._checker: CollectiveChecker | None = None
        self._communicator: Communicator | None = None
        self._background: Communicator | None = None
        self._owns_group = False
        self._meshes: dict[tuple[tuple[str, int], ...], dist.DeviceMesh] = {}

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
        return self._communicator

    def start(self, communicator: Communicator | None = None, store: dist.Store | None = None) -> None:
        """Take the device and connect to the other processes.

        Collective when the processes of the job communicate: returns once all are there.

        Args:
            communicator: the collectives over all ranks, from a caller that has connected them.
            store: where they leave values for each other, likewise.
        """
        self.accelerator.activate(self.device)
        if communicator is None and not self._connected:
            self._communicator = LocalCommunicator(self.device)
            return
        world, shared = self.world, store or self._connect()
        self.store = JobStore(shared, world.rank, world.world_size)
        inner = communicator or ProcessGroupCommunicator(None, self.device, self._timeout)
        self._communicator = inner
        if world.world_size == 1:
            return
        self.pace = Pace(world.rank, world.neighbours, self.store)
        self._checks = [self.pace.check]
        if self._compares:
            # A file that few programs need.
            from fabric.diagnostics.checker import CollectiveChecker

            own = dist.PrefixStore("checks", shared)
            self._checker = CollectiveChecker(own, world.rank, world.world_size, self._timeout)
            self._checks.append(self._checker.check)
        self._watchdog = self._watch(shared, inner.device) if communicator is None else None
        self.record = FlightRecorder() if self._watchdog is None else self._watchdog.record
        self._communicator = RecordedCommunicator(inner, self.record, self._checks)
        if self._watchdog is not None:
            self._watchdog.start()

    def communicator_over(self, group: dist.ProcessGroup) -> Communicator:
        """The collectives over a process group of torch, checked and recorded where all are; not a collective."""
        inner = ProcessGroupCommunicator(group, self.device, self._timeout)
        if self.record is None:
            return inner
        ranks = dist.get_process_group_ranks(group)
        return RecordedCommunicator(inner, self.record, self._checks, f"torch {group.group_name}", ranks)

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
        self._disconnect()
        self._meshes.clear()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
            # What DDP holds keeps gloo's threads alive. One that still frees its last collective needs the interpreter,
            # and aborts the process if that is being torn down.
            time.sleep(_LET_GO)
        self.accelerator.release()

    def abort(self) -> None:
        """Let go of the other processes without waiting for them, on the way out of an exception."""
        if self._communicator is not None:
            self._unwatch()
            self._communicator.close()
            if self._owns_group and dist.is_initialized():
                abort_process_group()
        self._disconnect()

    def _disconnect(self) -> None:
        self._communicator = self._background = None
        # A connection to the store keeps it alive.
        self.store = JobStore(dist.HashStore(), 0, 1)
        self.pace = Pace(self.world.rank, (), self.store)

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

    def _watch(self, shared: dist.Store, device: torch.device) -> Watchdog | None:
        # A connection of its own: the main thread may wait on the other for as long as it likes.
        try:
            own = shared.clone()  # pyright: ignore[reportAttributeAccessIssue] - missing in the stub
        except RuntimeError as error:
            if self._owns_group or isinstance(error, dist.DistError):
                raise
            if not self._threshold:
                return None
            raise ConfigurationError(
                "a process group that was there before, made with a store of your own",
                f"the watchdog needs a second connection to it, and its clone() does not work: {error}",
                "a store of torch, or one whose clone() returns another connection",
                "Fabric(..., watchdog=0), without a report when ranks wait for each other",
            ) from error
        store = dist.PrefixStore("watchdog", own)
        store.set_timeout(_ANSWER)
        control = ControlThread.of_this_process()
        return Watchdog(
            store,
            self.world.rank,
            self.world.world_size,
            threshold=self._threshold,
            timeout=self._timeout,
            is_asynchronous=device.type != "cpu",
            requests=int if control is None else control.reports_requested,
            where="" if control is None else control.config.supervisor,
        )

    def _unwatch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
        if self._checker is not None:
            self._checker.close()
        self._watchdog = self._checker = self.record = None

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

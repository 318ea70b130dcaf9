"""The runtime of one process of a job: its place, its device, and its connection to the other processes."""

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist

from fabric._torch import (
    abort_process_group,
    default_store,
    forget_meshes,
    leave_garbage_here,
    real_tensors,
    set_group_timeout,
)
from fabric.accelerators import Accelerator
from fabric.communicators import Communicator, LocalCommunicator, ProcessGroupCommunicator
from fabric.diagnostics.hang_report import (
    DEFAULT_WATCHDOG,
    HangReporter,
    announce_wait,
    connect_again,
)
from fabric.diagnostics.recorder import FlightRecorder, RecordedCommunicator
from fabric.errors import ConfigurationError
from fabric.precision import Precision
from fabric.store import JobStore, find_store, unused_prefix
from fabric.world import World

__all__ = ["DEFAULT_TIMEOUT", "Runtime"]

DEFAULT_TIMEOUT = timedelta(seconds=1800)


@dataclass(kw_only=True, eq=False)
class Runtime:
    """One process of a job while it runs.

    Attributes:
        world: the place of this process.
        accelerator: the kind of its device.
        devices: the devices of this node, in the order of local ranks; all of them for a strategy that drives several
            devices from one process.
        precision: the precision that modules are set up with.
        connected: whether the processes of the job communicate, that is, whether a process group is needed.
        backend: process-group backend; None for the accelerator's own.
        timeout: how long a collective may wait.
        check_collectives: whether ranks compare their collectives before anything moves.
        watchdog: how long a rank waits for others before a report is printed; zero for never.
        device: that of this process.
        communicator: the collectives over all processes of the job, from :meth:`start` on.
        store: values that the ranks share.
        meshes: those of :meth:`mesh`, by their names and sizes.
        recorder: what this process is doing, where there are others that may wait for it; else None.
        reporter: the thread that reports it; None where there are no others, or no connection for it.
    """

    world: World
    accelerator: Accelerator
    devices: tuple[torch.device, ...]
    precision: Precision
    connected: bool
    backend: str | None = None
    timeout: timedelta = DEFAULT_TIMEOUT
    check_collectives: bool = False
    watchdog: timedelta = DEFAULT_WATCHDOG
    # The runtimes of this process that share the process group which one of them made; the last to close destroys it.
    _users: ClassVar[WeakSet["Runtime"]] = WeakSet()

    def __post_init__(self) -> None:
        # A scheduler may show each process only its own device.
        self.device = self.devices[self.world.local_rank % len(self.devices)]
        self.store = JobStore(dist.HashStore(), 0, 1)
        self.communicator: Communicator = LocalCommunicator(self.device)
        self.recorder: FlightRecorder | None = None
        self.reporter: HangReporter | None = None
        self._is_started = False
        self._background: dict[str, Communicator] = {}
        self._closers = ExitStack()
        self._node_group: Communicator | None = None
        self.meshes: dict[tuple[tuple[str, int], ...], dist.DeviceMesh] = {}

    def start(
        self, communicator: Communicator | None = None, store: dist.Store | None = None
    ) -> None:
        """Take the device and connect to the other processes.

        Collective when the processes of the job communicate: returns once all are connected.

        Args:
            communicator: the collectives over all ranks, from a caller that has connected them.
            store: through which they share values, likewise.
        """
        self.accelerator.activate(self.device)
        self._is_started = True
        if communicator is None:
            # What rank-zero functions of other libraries read; to import it would take as long as a launch.
            utilities = sys.modules.get("lightning_utilities.core.rank_zero")
            if utilities and (
                self.connected or not hasattr(utilities.rank_zero_only, "rank")
            ):  # no job inside a rank
                utilities.rank_zero_only.rank = self.world.rank
        if communicator is None and not self.connected:
            return
        rank = self.world.rank
        size = self.world.world_size
        with announce_wait(rank, size, self.watchdog):
            shared = store or self._connect()
        self.store = JobStore(shared, rank, size)
        self.communicator = communicator or ProcessGroupCommunicator(
            None, self.device, self.timeout
        )
        if size == 1:
            return
        self.recorder = FlightRecorder()
        own = connect_again(shared, bool(self.watchdog)) if communicator is None else None
        if own is not None:
            is_asynchronous = self.communicator.device.type != "cpu"
            self.reporter = HangReporter(
                JobStore(own, rank, size), self.watchdog, self.timeout, is_asynchronous
            )
            reporter = self.reporter
            self.recorder = self.reporter.recorder
            self._closers.callback(reporter.close)
            reporter.start()
        if self.check_collectives:
            # A file that few programs need.
            from fabric.diagnostics.checker import CollectiveChecker

            checker = CollectiveChecker(
                dist.PrefixStore("checks", shared), rank, size, self.timeout
            )
            self.recorder.checks = (checker.check,)
            self.recorder.phase_checks = (checker.check_phase,)
            self._closers.callback(checker.close)
        self.communicator = RecordedCommunicator(self.communicator, self.recorder)

    def communicator_over(self, group: dist.ProcessGroup) -> Communicator:
        """The collectives over a process group of torch, recorded and checked where all are; not a collective."""
        inner = ProcessGroupCommunicator(group, self.device, self.timeout)
        if self.recorder is None:
            return inner
        ranks = dist.get_process_group_ranks(group)
        return RecordedCommunicator(inner, self.recorder, f"torch {group.group_name}", ranks)

    def background_communicator(self, purpose: str = "saves") -> Communicator:
        """The collectives over all processes, over the CPU in a group of their own, for a thread beside the loop.

        Collective the first time that it is called for a purpose, each of which has its group.
        """
        if purpose not in self._background:
            if self.connected and self.device.type != "cpu":
                # Concurrent collectives on one device can deadlock; objects need no device.
                group = dist.new_group(timeout=self.timeout, backend="gloo")
                assert isinstance(group, dist.ProcessGroup), "every rank is a member"
                made = self.communicator_over(group)
            else:
                made = self.communicator.new_group(range(self.communicator.size))
            assert made, "every rank is a member"
            self._background[purpose] = made
        return self._background[purpose]

    def node_communicator(self) -> Communicator:
        """All processes of this node. Collective when first called on several nodes."""
        communicator = self.communicator
        world = self.world
        if self._node_group is None and world.num_nodes > 1:
            nodes = communicator.gather_objects(world.node_rank)
            ranks = (
                [rank for rank, other in enumerate(nodes) if other == node]
                for node in sorted(set(nodes))
            )
            [self._node_group] = [
                group for members in ranks if (group := communicator.new_group(members))
            ]
        return self._node_group or communicator

    def close(self) -> None:
        """Release what :meth:`start` took, but not a preexisting process group; idempotent."""
        if not self._is_started:
            return
        for group in self._background.values():
            group.close()
        if self._disconnect():
            dist.destroy_process_group()
            # DDP keeps gloo's threads alive. A thread that still frees its last collective needs the interpreter, and
            # aborts the process if that is being torn down.
            time.sleep(0.02)  # several times the interpreter's switch interval
        self.accelerator.release()
        if self.recorder is not None:
            self.recorder.check_signatures()

    def abort(self) -> None:
        """Disconnect from the other processes without waiting for them, after an exception."""
        if self._disconnect():
            abort_process_group()

    def mesh(self, **sizes: int) -> dist.DeviceMesh:
        """The processes of the job in rank order as a mesh of named sizes, the last of which varies fastest.

        Collective the first time that a mesh is asked for; the same object from then on.
        """
        key = tuple(sizes.items())
        if key not in self.meshes:
            with real_tensors():  # in a dry run, too
                mesh = dist.init_device_mesh(
                    self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
                )
            for group in mesh.get_all_groups():
                # That of all processes has its own, which a user may have given it.
                if group is not dist.group.WORLD:
                    set_group_timeout(group, self.timeout)
            self.meshes[key] = mesh
        return self.meshes[key]

    def _disconnect(self) -> bool:
        """Close all but the process group; whether that is still to be closed."""
        self._closers.close()
        owns_group = self in self._users
        self._users.discard(self)
        self._is_started = False
        self._background.clear()
        if any(
            mesh.ndim > 1 for mesh in self.meshes.values()
        ):  # else there is the group of all alone
            forget_meshes()
        self.meshes.clear()
        self.store.close()
        return owns_group and not self._users and dist.is_initialized()

    def _connect(self) -> dist.Store:
        world = self.world
        is_connected = dist.is_initialized()
        if is_connected and (dist.get_rank(), dist.get_world_size()) != (
            world.rank,
            world.world_size,
        ):
            request = f"a job of {world.world_size} processes, this one rank {world.rank}"
            problem = f"torch.distributed has made this process rank {dist.get_rank()} of {dist.get_world_size()}"
            raise ConfigurationError(
                request, problem, suggestion="dist.destroy_process_group() before launch()"
            )
        shared = default_store() if is_connected else find_store(world, self.timeout)
        # Several runtimes may follow each other in the processes of a job: each has a part of the store.
        store = dist.PrefixStore(f"fabric/{unused_prefix(shared, world, self.timeout)}", shared)
        store.set_timeout(self.timeout)
        if is_connected:
            if self._users:
                self._users.add(self)
            return store
        leave_garbage_here()
        dist.init_process_group(
            self.backend or self.accelerator.default_backend,
            store=dist.PrefixStore("group", store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=self.timeout,
            device_id=self.device if self.device.type == "cuda" else None,
        )
        self._users.add(self)
        # gloo fails on a rank whose peer has connected, finished and closed before all are connected.
        if store.add("connected", 1) == world.world_size:
            store.set("all connected", "yes")
        store.wait(["all connected"])
        return store

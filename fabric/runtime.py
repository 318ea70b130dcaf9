"""The runtime of one process of a job: rank, device, and connection to the other processes."""

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
    clear_mesh_caches,
    default_store,
    freeze_garbage_in_forks,
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
from fabric.store import JobStore, find_store, unused_key_prefix
from fabric.world import World

__all__ = ["DEFAULT_TIMEOUT", "Runtime"]

DEFAULT_TIMEOUT = timedelta(seconds=1800)


@dataclass(kw_only=True, eq=False)
class Runtime:
    """One process of a job while it runs.

    Attributes:
        world: the rank of this process and its place in the job.
        accelerator: the kind of the device.
        devices: the devices of this node, in the order of local ranks. A strategy that drives
            several devices from one process has all its devices here.
        precision: the precision that modules are set up with.
        connects_processes: whether the processes of the job communicate, so that they need a
            process group.
        backend: the backend of the process group. None uses the default of the accelerator.
        timeout: how long a collective may wait.
        check_collectives: whether ranks compare their collectives before data is sent.
        watchdog: how long a rank waits for others before a hang report is printed. Zero disables
            the report.
        device: the device of this process.
        communicator: the collectives over all processes of the job, once :meth:`start` has
            returned.
        store: the values that the ranks share.
        meshes: the meshes that :meth:`mesh` has made, by their names and sizes.
        recorder: the recorder of what this process is doing. None if there is no other process.
        reporter: the thread that prints hang reports. None if there is no other process, or no
            store connection for the reports.
    """

    world: World
    accelerator: Accelerator
    devices: tuple[torch.device, ...]
    precision: Precision
    connects_processes: bool
    backend: str | None = None
    timeout: timedelta = DEFAULT_TIMEOUT
    check_collectives: bool = False
    watchdog: timedelta = DEFAULT_WATCHDOG
    # The runtimes of this process that share the process group which one of them made. The last one
    # that closes destroys the group.
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

        Collective if the processes of the job communicate: returns once all are connected.

        Args:
            communicator: the collectives over all ranks, if the caller has connected the ranks.
                None, the default: the runtime connects them.
            store: the store that the caller's ranks share. None, the default: the runtime finds
                one.
        """
        self.accelerator.activate(self.device)
        self._is_started = True
        if communicator is None:
            self._set_rank_of_lightning_utilities()
            if not self.connects_processes:
                return
        rank = self.world.rank
        size = self.world.world_size
        with announce_wait(rank, size, self.watchdog):
            shared_store = store or self._connect()
        self.store = JobStore(shared_store, rank, size)
        if communicator is not None:
            self.communicator = communicator
        else:
            self.communicator = ProcessGroupCommunicator(None, self.device, self.timeout)
        if size == 1:
            return
        if communicator is None:
            self.reporter = self._start_reporter(shared_store)
        if self.reporter is not None:
            self.recorder = self.reporter.recorder
        else:
            self.recorder = FlightRecorder()
        if self.check_collectives:
            self._add_checker(self.recorder, shared_store)
        self.communicator = RecordedCommunicator(self.communicator, self.recorder)

    def _set_rank_of_lightning_utilities(self) -> None:
        """Set the rank that the rank-zero functions of other libraries read."""
        # The module is looked up and not imported: an import would take as long as a launch.
        utilities = sys.modules.get("lightning_utilities.core.rank_zero")
        if not utilities:
            return
        # A job of one process inside a rank of another job does not change that rank.
        if self.connects_processes or not hasattr(utilities.rank_zero_only, "rank"):
            utilities.rank_zero_only.rank = self.world.rank

    def _start_reporter(self, shared_store: dist.Store) -> HangReporter | None:
        """Start the thread of the hang reports, if the store allows a connection for it."""
        connection = connect_again(shared_store, is_required=bool(self.watchdog))
        if connection is None:
            return None
        reporter = HangReporter(
            JobStore(connection, self.world.rank, self.world.world_size),
            self.watchdog,
            self.timeout,
            is_asynchronous=self.communicator.device.type != "cpu",
        )
        self._closers.callback(reporter.close)
        reporter.start()
        return reporter

    def _add_checker(self, recorder: FlightRecorder, shared_store: dist.Store) -> None:
        """Add checked mode to the recorder."""
        # Imported here: few programs need the file.
        from fabric.diagnostics.checker import CollectiveChecker

        store = dist.PrefixStore("checks", shared_store)
        checker = CollectiveChecker(store, self.world.rank, self.world.world_size, self.timeout)
        recorder.checks = (checker.check,)
        recorder.phase_checks = (checker.check_phase,)
        self._closers.callback(checker.close)

    def communicator_over(self, group: dist.ProcessGroup) -> Communicator:
        """Return the collectives over a process group of torch. Not a collective.

        They are recorded and checked if the collectives of the job are.
        """
        inner = ProcessGroupCommunicator(group, self.device, self.timeout)
        if self.recorder is None:
            return inner
        ranks = dist.get_process_group_ranks(group)
        return RecordedCommunicator(inner, self.recorder, f"torch {group.group_name}", ranks)

    def background_communicator(self, purpose: str = "saves") -> Communicator:
        """Return collectives over all processes for a thread beside the training loop.

        They use the CPU, in a group for each purpose.

        Collective the first time that it is called for a purpose.
        """
        if purpose not in self._background:
            if self.connects_processes and self.device.type != "cpu":
                # Concurrent collectives on one device can deadlock. Objects need no device.
                group = dist.new_group(timeout=self.timeout, backend="gloo")
                assert isinstance(group, dist.ProcessGroup), "every rank is a member"
                communicator = self.communicator_over(group)
            else:
                communicator = self.communicator.new_group(range(self.communicator.size))
            assert communicator, "every rank is a member"
            self._background[purpose] = communicator
        return self._background[purpose]

    def node_communicator(self) -> Communicator:
        """Return the collectives over all processes of this node.

        Collective the first time that it is called in a job of several nodes.
        """
        if self.world.num_nodes == 1:
            return self.communicator
        if self._node_group is None:
            self._node_group = self._new_node_group()
        return self._node_group

    def _new_node_group(self) -> Communicator:
        """Make a group for each node, and return the group of this node."""
        ranks_of_node: dict[int, list[int]] = {}
        nodes = self.communicator.gather_objects(self.world.node_rank)
        for rank, node in enumerate(nodes):
            ranks_of_node.setdefault(node, []).append(rank)
        node_group = None
        # Every rank takes part in making all groups, in the same order.
        for node in sorted(ranks_of_node):
            group = self.communicator.new_group(ranks_of_node[node])
            if group:
                node_group = group
        assert node_group is not None, "every rank is on a node"
        return node_group

    def close(self) -> None:
        """Release what :meth:`start` took, but not a process group that existed before.

        A second call does nothing.
        """
        if not self._is_started:
            return
        for group in self._background.values():
            group.close()
        if self._disconnect():
            dist.destroy_process_group()
            # DDP keeps gloo's threads alive. A thread that still frees its last collective needs
            # the interpreter, and aborts the process if the interpreter is being torn down. The
            # wait is several times the interpreter's switch interval.
            time.sleep(0.02)
        self.accelerator.release()
        if self.recorder is not None:
            self.recorder.check_signatures()

    def abort(self) -> None:
        """Disconnect from the other processes without waiting for them, after an exception."""
        if self._disconnect():
            abort_process_group()

    def mesh(self, **sizes: int) -> dist.DeviceMesh:
        """Return the processes of the job as a mesh of dimensions with these names and sizes.

        The ranks are in order, and the last dimension varies fastest. The same sizes return the
        same object.

        Collective the first time that a mesh is requested.
        """
        key = tuple(sizes.items())
        if key not in self.meshes:
            with real_tensors():  # in a dry run, too
                mesh = dist.init_device_mesh(
                    self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
                )
            for group in mesh.get_all_groups():
                # The group of all processes keeps its timeout, which a user may have set.
                if group is not dist.group.WORLD:
                    set_group_timeout(group, self.timeout)
            self.meshes[key] = mesh
        return self.meshes[key]

    def _disconnect(self) -> bool:
        """Close all but the process group. Return whether the caller must close the group."""
        self._closers.close()
        owns_group = self in self._users
        self._users.discard(self)
        self._is_started = False
        self._background.clear()
        # A mesh of one dimension has no other group than the group of all processes.
        if any(mesh.ndim > 1 for mesh in self.meshes.values()):
            clear_mesh_caches()
        self.meshes.clear()
        self.store.close()
        return owns_group and not self._users and dist.is_initialized()

    def _connect(self) -> dist.Store:
        """Connect to the other processes, and return this runtime's part of the job's store."""
        world = self.world
        is_connected = dist.is_initialized()
        if is_connected:
            self._check_existing_group()
            shared_store = default_store()
        else:
            shared_store = find_store(world, self.timeout)
        # Several runtimes may follow each other in the processes of a job, each with its own
        # prefix.
        prefix = unused_key_prefix(shared_store, world, self.timeout)
        store = dist.PrefixStore(f"fabric/{prefix}", shared_store)
        store.set_timeout(self.timeout)
        if is_connected:
            if self._users:
                self._users.add(self)
            return store
        freeze_garbage_in_forks()
        dist.init_process_group(
            self.backend or self.accelerator.default_backend,
            store=dist.PrefixStore("group", store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=self.timeout,
            device_id=self.device if self.device.type == "cuda" else None,
        )
        self._users.add(self)
        # gloo fails on a rank whose peer has connected, finished and closed before all are
        # connected.
        if store.add("connected", 1) == world.world_size:
            store.set("all connected", "yes")
        store.wait(["all connected"])
        return store

    def _check_existing_group(self) -> None:
        """Check that the process group that exists is the group of this job.

        Raises:
            ConfigurationError: its rank or size is another.
        """
        rank = dist.get_rank()
        size = dist.get_world_size()
        if rank == self.world.rank and size == self.world.world_size:
            return
        raise ConfigurationError(
            f"a job of {self.world.world_size} processes, this one rank {self.world.rank}",
            problem=f"torch.distributed has made this process rank {rank} of {size}",
            suggestion="dist.destroy_process_group() before launch()",
        )

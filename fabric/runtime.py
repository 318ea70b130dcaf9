"""The runtime of one process of a job: its device and its connection to the other processes."""

import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
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
from fabric.communicators.recorded import RecordedCommunicator
from fabric.diagnostics.hang_reporter import DEFAULT_WATCHDOG, HangReporter, connect_again
from fabric.diagnostics.recorder import FlightRecorder
from fabric.errors import ConfigurationError
from fabric.launchers.rank import ControlThread
from fabric.precision import Precision
from fabric.store import JobStore, find_store, unused_key_prefix
from fabric.world import World

__all__ = ["DEFAULT_TIMEOUT", "Runtime"]

DEFAULT_TIMEOUT = timedelta(seconds=1800)


@dataclass(kw_only=True, eq=False)
class Runtime:
    """The device of one process of a job, and the connection to the other processes.

    ``Strategy.setup_environment`` calls :meth:`start`, and ``Strategy.teardown`` calls
    :meth:`close`.

    Attributes:
        world: the place of this process in the job.
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
        communicator: the collectives over all processes of the job. Before :meth:`start`, and if
            the processes do not communicate, it is a communicator of this process alone.
        store: the values that the ranks share.
        meshes: the meshes that :meth:`mesh` has made, by their names and sizes.
        recorder: records the collectives and the phases of this process. None if there is no other
            process.
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
    # If a runtime of this process created the process group: the runtimes that use the group. The
    # last one to close destroys the group. Empty if the user created the group.
    _sharers_of_group: ClassVar[WeakSet["Runtime"]] = WeakSet()

    def __post_init__(self) -> None:
        """Choose the device, and set the state of a process that is not connected."""
        # A scheduler may hide from each process all devices but its own. Then `devices` has one
        # element, although the local rank may be larger than 0.
        self.device = self.devices[self.world.local_rank % len(self.devices)]
        # start() replaces the store and the communicator if there are other processes.
        self.store = JobStore(dist.HashStore(), rank=0, size=1)
        self.communicator: Communicator = LocalCommunicator(self.device)
        self.recorder: FlightRecorder | None = None
        self.reporter: HangReporter | None = None
        self._is_started = False
        self._background_communicators: dict[str, Communicator] = {}
        # Closes the threads that start() has started.
        self._closers = ExitStack()
        self._node_communicator: Communicator | None = None
        # By the names and sizes of the dimensions, such as (("replicate", 2), ("shard", 4)).
        self.meshes: dict[tuple[tuple[str, int], ...], dist.DeviceMesh] = {}

    def start(
        self, communicator: Communicator | None = None, store: dist.Store | None = None
    ) -> None:
        """Make the device the current one, and connect to the other processes.

        Collective if the processes of the job communicate: returns once all are connected.

        Args:
            communicator: the collectives over all ranks, if the caller has connected the ranks, as
                threads in tests are. None, the default, lets the runtime connect them.
            store: the store that the caller's ranks share. The caller passes both arguments or
                neither. None, the default, lets the runtime find or create a store.
        """
        self.accelerator.activate(self.device)
        self._is_started = True  # close() has something to release from here on
        is_connected_by_caller = communicator is not None
        if not is_connected_by_caller:
            self._set_rank_of_lightning_utilities()  # torchmetrics then prints on rank 0 only
            if not self.connects_processes:
                return  # the process keeps the communicator of this process alone
        rank = self.world.rank
        size = self.world.world_size
        # The context prints a line if this rank waits for longer than `watchdog`.
        with _announce_wait(rank, size, self.watchdog):
            if store is None:
                store = self._connect()  # creates the process group, too
        self.store = JobStore(store, rank, size)
        if communicator is None:
            default_group = None  # torch's name for the group of all processes
            communicator = ProcessGroupCommunicator(default_group, self.device, self.timeout)
        self.communicator = communicator
        if size > 1:
            # No reporter if the caller has connected the ranks, which it also watches.
            self._record_collectives(store, has_reporter=not is_connected_by_caller)

    def _record_collectives(self, store: dist.Store, has_reporter: bool) -> None:
        """Have the collectives of ``communicator`` recorded and, in checked mode, compared.

        Args:
            store: this job's part of the store that the ranks share.
            has_reporter: whether a thread prints hang reports from the records.
        """
        if has_reporter:
            self.reporter = self._start_reporter(store)
        if self.reporter is not None:
            # The thread of the reporter reads this recorder.
            self.recorder = self.reporter.recorder
        else:
            self.recorder = FlightRecorder()
        if self.check_collectives:
            self._add_checker(self.recorder, store)
        self.communicator = RecordedCommunicator(self.communicator, self.recorder)

    def _set_rank_of_lightning_utilities(self) -> None:
        """Set the rank that ``rank_zero_only`` of the package ``lightning_utilities`` reads.

        Libraries such as torchmetrics use ``rank_zero_only`` to print on rank 0 only. Does nothing
        if the package is not imported.
        """
        # Looked up instead of imported: the import takes as long as the start of a job.
        utilities = sys.modules.get("lightning_utilities.core.rank_zero")
        if not utilities:
            return
        # A process of a job may run a second Fabric for itself alone. Its rank 0 must not replace
        # the rank in the job.
        has_rank = hasattr(utilities.rank_zero_only, "rank")
        if self.connects_processes or not has_rank:
            utilities.rank_zero_only.rank = self.world.rank

    def _start_reporter(self, store: dist.Store) -> HangReporter | None:
        """Start the thread that prints hang reports, and return its reporter.

        Return None if the store allows no second connection and the watchdog is off. The thread
        needs a connection of its own, since the main thread may block the first one.

        Args:
            store: this job's part of the store that the ranks share.

        Raises:
            ConfigurationError: the store allows no second connection, and the watchdog is on.
        """
        is_watchdog_on = self.watchdog > timedelta(0)
        # Raises if the store allows no second connection, unless the watchdog is off.
        connection = connect_again(store, is_required=is_watchdog_on)
        if connection is None:
            return None
        reporter = HangReporter(
            JobStore(connection, self.world.rank, self.world.world_size),
            threshold=self.watchdog,
            timeout=self.timeout,
            # On an accelerator, a call of a collective returns before the collective is done.
            is_asynchronous=self.communicator.device.type != "cpu",
        )
        # Registered first, so that the connection is closed even if start() fails.
        self._closers.callback(reporter.close)
        reporter.start()
        return reporter

    def _add_checker(self, recorder: FlightRecorder, store: dist.Store) -> None:
        """Have the recorder compare each collective and phase of the ranks before it runs.

        Args:
            recorder: the recorder. Changed in place.
            store: this job's part of the store that the ranks share.
        """
        # Imported here, since few programs use checked mode.
        from fabric.diagnostics.checker import CollectiveChecker

        checker_store = dist.PrefixStore("checks", store)
        checker = CollectiveChecker(
            checker_store, self.world.rank, self.world.world_size, self.timeout
        )
        recorder.checks = (checker.check,)
        recorder.phase_checks = (checker.check_phase,)
        recorder.wait_checks = (checker.check_wait_for_rank0,)
        self._closers.callback(checker.close)

    def from_rank0(self, title: str, key: str, value: bytes) -> bytes:
        """Return rank 0's value for a key, and record the wait for it. See ``JobStore.from_rank0``.

        Args:
            title: the value, as hang reports name it.
            key: the name of the value in the store. Use a new key for each call.
            value: the value of this rank. Only the value of rank 0 is used.

        Raises:
            CollectiveMismatchError: rank 0 has ended without writing the value.
            UsageError: rank 0 wrote no value within the timeout.
        """
        if self.recorder is None:
            return self.store.from_rank0(key, value)
        find_end = None
        if self.reporter is not None:
            find_end = partial(self.reporter.reason_of_end, 0)  # of rank 0
        with self.recorder.record_wait_for_rank0(title, self.store.size):
            return self.store.from_rank0(key, value, find_end)

    def communicator_over(self, group: dist.ProcessGroup) -> Communicator:
        """Return the collectives over a process group of torch. Not a collective.

        The collectives are recorded and checked like those of ``communicator``.
        """
        group_communicator = ProcessGroupCommunicator(group, self.device, self.timeout)
        if self.recorder is None:
            return group_communicator
        ranks = dist.get_process_group_ranks(group)
        # Hang reports show this name. "torch" sets it apart from the groups of communicators.
        name = f"torch {group.group_name}"
        return RecordedCommunicator(group_communicator, self.recorder, name, ranks)

    def background_communicator(self, purpose: str) -> Communicator:
        """Return collectives over all processes, on the CPU, for a thread beside the training loop.

        Collective if it is called for the first time for a purpose.

        Args:
            purpose: what the thread does. Each purpose has a group of its own, so that collectives
                of different threads do not mix.
        """
        if purpose not in self._background_communicators:
            if self.connects_processes and self.device.type != "cpu":
                # Two threads that issue collectives on one GPU can deadlock. So the group is on the
                # CPU.
                group = dist.new_group(timeout=self.timeout, backend="gloo")
                # A group without a list of ranks contains all ranks, so the result is a group.
                assert isinstance(group, dist.ProcessGroup), "this rank is not in the group"
                communicator = self.communicator_over(group)
            else:
                communicator = self.communicator.new_group(range(self.communicator.size))
            assert communicator, "this rank is not in the group of all ranks"
            self._background_communicators[purpose] = communicator
        return self._background_communicators[purpose]

    def node_communicator(self) -> Communicator:
        """Return the collectives over all processes of this node.

        Collective if it is called for the first time in a job of several nodes.
        """
        if self.world.num_nodes == 1:
            return self.communicator
        if self._node_communicator is None:
            self._node_communicator = self._new_node_communicator()
        return self._node_communicator

    def _new_node_communicator(self) -> Communicator:
        """Create a group for each node, and return the group of this node. Collective."""
        node_of_rank = self.communicator.gather_objects(self.world.node_rank)
        ranks_of_node: dict[int, list[int]] = {}
        for rank, node in enumerate(node_of_rank):
            ranks_of_node.setdefault(node, []).append(rank)
        node_communicator = None
        # torch requires that every rank creates all groups, in the same order.
        for node in sorted(ranks_of_node):
            communicator = self.communicator.new_group(ranks_of_node[node])
            # new_group() returns a false value on the ranks outside of the group.
            if communicator:
                node_communicator = communicator
        assert node_communicator is not None, "this rank is not in the group of its node"
        return node_communicator

    def close(self) -> None:
        """Disconnect from the other processes, and release cached memory of the device.

        A process group that existed before :meth:`start` is left open. A second call does nothing.
        """
        if not self._is_started:
            return
        # These communicators are closed first, since they use the process group and the store.
        for communicator in self._background_communicators.values():
            communicator.close()
        must_destroy_group = self._disconnect()
        if must_destroy_group:
            dist.destroy_process_group()
            # After DDP, a thread of gloo may still be freeing its last collective, for which it
            # needs the interpreter. If the interpreter is gone by then, the thread aborts the
            # process. 20 ms are several of the interpreter's switch intervals of 5 ms.
            time.sleep(0.02)
        self.accelerator.release()
        if self.recorder is not None:
            # This call is the last, since it raises if the ranks' last collectives differed.
            self.recorder.check_signatures()

    def abort(self) -> None:
        """Disconnect from the other processes after an exception, without waiting for them.

        Called in place of :meth:`close`, which may wait for a rank that has failed.
        """
        must_destroy_group = self._disconnect()
        if must_destroy_group:
            abort_process_group()

    def mesh(self, **sizes: int) -> dist.DeviceMesh:
        """Return the processes of the job as a mesh of dimensions with these names and sizes.

        The ranks are in order, and the last dimension varies fastest. The same sizes return the
        same object.

        Collective if it is called for the first time with these sizes.
        """
        key = tuple(sizes.items())
        if key not in self.meshes:
            # The mesh reads values from its tensor of ranks. In a dry run, new tensors are fake and
            # have no values, so the dry run is paused.
            with real_tensors():
                mesh = dist.init_device_mesh(
                    self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
                )
            # torch has created the groups with its default timeout, and not with the user's.
            for group in mesh.get_all_groups():
                # A mesh of one dimension uses the group of all processes. The group may be the
                # user's own, and keeps its timeout.
                if group is not dist.group.WORLD:
                    set_group_timeout(group, self.timeout)
            if mesh.ndim > 1 and self.recorder is not None:
                # Collectives that torch issues in a phase, such as "save", may now be over one
                # dimension of the mesh. A hang report must not expect all ranks in them.
                self.recorder.phases_need_all_ranks = False
            self.meshes[key] = mesh
        return self.meshes[key]

    def _disconnect(self) -> bool:
        """Release everything but the process group.

        Returns:
            Whether the caller must close the process group: a runtime has created the group, and no
            other runtime of this process uses the group any more.
        """
        # The threads of the reporter and the checker end first, since they use the store.
        self._closers.close()
        # The set is empty if the user created the group, which then stays open.
        used_group_of_a_runtime = self in self._sharers_of_group
        self._sharers_of_group.discard(self)
        self._is_started = False
        self._background_communicators.clear()
        self.meshes.clear()
        clear_mesh_caches()
        self.store.close()
        is_group_unused = used_group_of_a_runtime and not self._sharers_of_group
        # The user may have destroyed the group already.
        return is_group_unused and dist.is_initialized()

    def _connect(self) -> dist.Store:
        """Connect to the other processes, and return this runtime's part of the job's store.

        Creates the default process group of torch unless one exists. Collective.
        """
        world = self.world
        has_process_group = dist.is_initialized()
        if has_process_group:
            self._check_existing_group()
            job_store = default_store()
        else:
            job_store = find_store(world, self.timeout)
        # Several runtimes may follow each other in the processes of a job. Each has a prefix of its
        # own, so that it does not read the keys of an earlier one.
        prefix = unused_key_prefix(job_store, world, self.timeout)
        store = dist.PrefixStore(f"fabric/{prefix}", job_store)
        store.set_timeout(self.timeout)
        if has_process_group:
            if self._sharers_of_group:
                # Another runtime has created the group. The group must stay open for this runtime.
                self._sharers_of_group.add(self)
            return store
        self._create_process_group(store)
        return store

    def _create_process_group(self, store: dist.Store) -> None:
        """Create the default process group of torch, and wait until all ranks are in it.

        Args:
            store: this runtime's part of the job's store.
        """
        world = self.world
        # A forked process that frees a group may hang. The call must come before the group exists.
        freeze_garbage_in_forks()
        # With a device, NCCL connects now instead of in the first collective.
        device_id = self.device if self.device.type == "cuda" else None
        dist.init_process_group(
            self.backend or self.accelerator.default_backend,
            store=dist.PrefixStore("group", store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=self.timeout,
            device_id=device_id,
        )
        # The last runtime of this set to close destroys the group. This runtime is added before the
        # wait, which may raise, so that the group is destroyed then, too.
        self._sharers_of_group.add(self)
        # A barrier through the store: the last rank to arrive sets the key for which all wait. gloo
        # connects to the other ranks in the background, and fails if a rank that did not wait has
        # finished and closed its connection already.
        num_connected = store.add("connected", 1)
        if num_connected == world.world_size:
            store.set("all connected", "yes")
        store.wait(["all connected"])

    def _check_existing_group(self) -> None:
        """Check that torch's default process group, which exists already, fits this job.

        Raises:
            ConfigurationError: this process has another rank in the group, or the group has another
                size.
        """
        rank = dist.get_rank()
        size = dist.get_world_size()
        if rank == self.world.rank and size == self.world.world_size:
            return
        raise ConfigurationError(
            f"a job of {self.world.world_size} processes, this one rank {self.world.rank}",
            problem="torch has a process group already, in which this process is rank "
            f"{rank} of {size}",
            suggestion="dist.destroy_process_group() before launch()",
        )


def _announce_wait(rank: int, size: int, watchdog: timedelta) -> ExitStack:
    """Return a context for the wait until all ranks have connected.

    If the wait takes longer than ``watchdog``, a timer's thread prints that this rank waits. No
    hang report is possible before the ranks are connected. A ``watchdog`` of zero prints nothing.
    The supervisor is told of the wait, if there is one.
    """
    context = ExitStack()
    control_thread = ControlThread.of_this_process()
    if control_thread is not None:
        control_thread.send("connecting", True)
        context.callback(control_thread.send, "connecting", False)
    # Two ranks print, since one of the two may be the rank that is missing.
    if watchdog and rank < 2:
        text = f"rank {rank} of {size} waits for all to call fabric.launch() or to use Fabric"
        timer = threading.Timer(watchdog.total_seconds(), print, [text], {"file": sys.stderr})
        timer.daemon = True
        timer.start()
        # The end of the context cancels the timer, so that a short wait prints nothing.
        context.callback(timer.cancel)
    return context

"""The loader that ``fabric.setup_dataloaders`` returns."""

import copy
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypedDict, get_args

import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import TypeVar

from fabric._torch import reset_iterator
from fabric.data.copies import mover
from fabric.data.lockstep import Lockstep, RemainingBatches
from fabric.data.position import EpochPosition, length_of
from fabric.data.saved_position import (
    DatasetState,
    check_saved_position,
    entries_to_skip,
    is_inside_epoch,
    saved_position,
    warn_of_other_batches,
)
from fabric.data.sharding import FromRank0, SynchronizedStreams
from fabric.data.spec import ActiveLoop, LoaderSpec, ShardRequest, Uneven
from fabric.data.spec import shard as shard_loader
from fabric.diagnostics.batch_counts import DividedOrder
from fabric.diagnostics.uneven_inputs import UnevenInputDetector
from fabric.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from fabric.seed import RandomStreams, WorkerSeeding, WorkerStreams

__all__ = [
    "BatchSource",
    "DataParallelJob",
    "FabricDataLoader",
    "LoaderOptions",
    "LoaderSession",
]

# The type of the batches. torch's DataLoader does not declare it.
Batch_co = TypeVar("Batch_co", covariant=True, default=Any)

if TYPE_CHECKING:
    # For type checkers it is a DataLoader, so that functions that take one accept it.
    _Base = DataLoader[Any]
else:

    class _Base:
        """The base class at run time. Python does not accept ``object`` in front of Generic."""


class BatchSource(Protocol[Batch_co]):
    """A DataLoader for type checkers. A subclass may declare the type of its batches."""

    @property
    def dataset(self) -> Any:
        """The data of the loader."""
        ...

    @property
    def batch_size(self) -> int | None:
        """The number of samples of a batch."""
        ...

    def __iter__(self) -> Iterator[Batch_co]: ...


class LoaderOptions(TypedDict, total=False):
    """The options of ``fabric.setup_dataloaders``, which describes them."""

    use_distributed_sampler: bool
    move_to_device: bool
    overlap_copies: bool
    uneven: Uneven


class LoaderSession(Protocol):
    """The part of a job's session that a loader calls in its loops."""

    def synchronize_rng(self) -> None:
        """Give ranks that share a batch the same random streams. Collective among these ranks.

        Called before each iteration.
        """

    def observe_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator over the same batches, which shows each batch to the observers.

        Called at the start of each iteration. An observer may be a profile.
        """
        ...

    def should_warn_of_repetitions(self, is_rank_alone: bool) -> bool:
        """Return whether to warn if a loop has counted samples twice. Called at its end.

        Args:
            is_rank_alone: whether only this rank knows that it has repeated samples. Otherwise rank
                0 warns for all ranks.
        """
        ...


class _NoSession:
    """A :class:`LoaderSession` that does nothing, for a loader outside of a job."""

    def synchronize_rng(self) -> None:
        pass

    def observe_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches

    def should_warn_of_repetitions(self, is_rank_alone: bool) -> bool:
        return False


@dataclass(frozen=True)
class DataParallelJob:
    """The job that a loader is part of: its ranks, and what they do together in a loop.

    Attributes:
        rank: rank of this process, ``0 <= rank < num_replicas``.
        num_replicas: number of ranks that data is sharded over.
        from_rank0: makes the ranks draw the same order although their random states differ. It is
            called at the start of each epoch with a key and this rank's state, and returns rank 0's
            state. All ranks call it in the same sequence. Not called if nothing random is drawn.
            None: the states are assumed to be equal.
        active_loops: the active loops over the loaders of the job. A loader adds and removes its
            own loops.
        batch_numbers: numbers the batches of all loaders of the job; see :class:`ActiveLoop`.
        lockstep: ends loops on all ranks together.
        detector: records the start of each iteration. None if there are no other ranks.
        session: the part of the job that the loops of the loader call.
    """

    rank: int = 0
    num_replicas: int = 1
    from_rank0: FromRank0 | None = None
    active_loops: list[ActiveLoop] = field(default_factory=list)
    batch_numbers: Iterator[int] = field(default_factory=count)
    lockstep: Lockstep = field(default_factory=Lockstep)
    detector: UnevenInputDetector | None = None
    session: LoaderSession = field(default_factory=_NoSession)


class _EpochTarget(NamedTuple):
    """An object of the user with a ``set_epoch``: the sampler, batch sampler or dataset.

    Attributes:
        target: the object.
        known_epoch: what ``target.epoch`` was after fabric called ``set_epoch`` last. Another
            value shows that the user has called ``set_epoch``.
    """

    target: Any
    known_epoch: Any


class FabricDataLoader(_Base, Generic[Batch_co]):
    """A DataLoader that yields this rank's batches on its device, and that can save its position.

    The *position* says where a loop is: the epoch, the number of batches that the user has received
    of it, and the random states from which the order of the samples was drawn.

    Made by ``fabric.setup_dataloaders``. It iterates like the user's own loader; each ``iter()``
    begins a new epoch. Attributes are read from and written to the prepared copy.

    The position is usually fabric's. torchdata's ``StatefulDataLoader`` has a ``state_dict`` of its
    own, which is used in two cases. A position of its own loads only on the same number of
    processes:

    - The dataset is iterable.
    - There is one process, and the sampler or the dataset has a ``state_dict``, too.

    Batches are moved to the device one by one, on request. For a CUDA device they are copied from
    pinned memory while it computes the step before, unless ``overlap_copies`` is false. On a CPU
    device they are yielded as the loader made them.

    Attributes:
        loader: the prepared copy, a DataLoader of the user's class.
        original: the user's own object, unchanged.
        differs_by_rank: whether positions may differ between ranks, since fabric does not shard the
            data.
    """

    loader: DataLoader[Any]
    original: DataLoader[Any]
    differs_by_rank: bool

    def __init__(
        self,
        loader: BatchSource[Batch_co],
        job: DataParallelJob,
        *,
        device: torch.device | None,
        uneven: Uneven = "pad",
        shard: bool = True,
        overlap_copies: bool = True,
        name: str = "0",
        seed_workers: bool = True,
    ) -> None:
        """Shard a loader's samples over the ranks, and move its batches.

        The user's loader stays as it is. The i-th batches of all ranks, of ``batch_size`` samples
        each, together are the i-th batch of ``batch_size * num_replicas`` samples of the plain
        loop, with the user's own sampler. With one replica the loop equals the plain one, random
        streams included.

        - If the user passed a batch sampler, whole batches are sharded.
        - A sampler that shards by itself is left alone. It has ``rank`` and ``num_replicas``, as
          torch's DistributedSampler.
        - An iterable dataset is sharded in rounds
          (:class:`~fabric.data.sharding.InterleavedIterable`), or left alone if it has a true
          attribute ``shards_itself``. Only complete rounds count unless ``uneven`` is
          ``"longest"``. All ranks must iterate the dataset in the same order. The workers have the
          same random streams on every rank, from rank 0's base seed. Without workers only the
          numbers that the dataset draws up to its first sample are the same, so a dataset that
          draws its order later should shuffle by epoch (``set_epoch``).
        - Workers of map-style datasets have different random streams on each rank, unless
          ``seed_workers`` is false. On rank 0 these are exactly torch's.

        Args:
            loader: a DataLoader, or an object of a subclass.
            job: the job that the loader is part of.
            device: where batches go. None leaves them as the loader made them.
            uneven: ``"pad"`` repeats samples from the start of the order until all ranks have
                equally many, as torch's DistributedSampler does. ``"drop"`` leaves the incomplete
                last round out. A loader with ``drop_last`` always leaves that round out, since the
                plain loop drops its samples. For anything but a map-style dataset that fabric
                shards, ``"shortest"`` ends the loop on all ranks when the first rank runs out, and
                ``"longest"`` ends it when all ranks have run out. Until then a rank without batches
                gets its last batch again, with :attr:`is_repeat` true.
            shard: False gives every rank the whole data.
            overlap_copies: whether batches are copied to a CUDA device from pinned memory, on a
                separate stream. If not, they are copied on the compute stream, from memory as the
                loader pins it.
            name: identifies the loader; the same on all ranks, and unique in a job.
            seed_workers: False leaves the streams of workers as torch seeds them, equal on ranks
                with equal random states.

        Raises:
            ArgumentTypeError: ``loader`` is not a DataLoader.
            ConfigurationError: ``loader`` is set up already; ``uneven`` does not fit its data; or
                its sampler shards by itself, but for another rank or number of ranks.
        """
        _check_arguments(loader, uneven)
        assert isinstance(loader, DataLoader), "another object was refused"
        prepared = copy.copy(loader)
        # The copied iterator belongs to the original: the copy must not shut down its workers.
        reset_iterator(prepared)
        shard_request = ShardRequest(
            rank=job.rank,
            num_replicas=job.num_replicas,
            should_shard=shard,
            uneven=uneven,
            from_rank0=job.from_rank0,
            name=name,
        )
        spec = shard_loader(prepared, shard_request)
        worker_streams = None
        if seed_workers and not spec.is_sharded_in_rounds:
            worker_streams = _seed_workers_by_rank(prepared, job, name)
        dataset_keeps_position = _dataset_keeps_position(loader, spec)
        if dataset_keeps_position and spec.batch_size is not None:
            # collate_fn gets all samples of a batch. A short batch shows that the dataset ended.
            collate_fn = _EndDetector(loader.collate_fn, spec.batch_size)
            # Not setattr(), which may call the __setattr__ of a user's class.
            object.__setattr__(prepared, "collate_fn", collate_fn)
        # torchdata's StatefulDataLoader keeps its own position. With a sampler of fabric, fabric
        # keeps the position.
        is_stateful = hasattr(type(loader), "state_dict")
        # Not ``self.loader = ...``: __setattr__ of this class sets attributes of ``loader``.
        vars(self).update(
            loader=prepared,
            original=loader,
            differs_by_rank=job.num_replicas > 1 and spec.shard_count == 1,
            _job=job,
            _name=name,
            _spec=spec,
            _loader_keeps_position=is_stateful and spec.sharded_sampler is None,
            _dataset_keeps_position=dataset_keeps_position,
            _move_batch=mover(prepared, device, overlap_copies),
            _next_epoch=0,
            # A position that was loaded, until the next iteration begins at it.
            _loaded_position=None,
            # The position of the iteration that yielded a batch last, or that has begun since.
            _latest_position=None,
            _has_warned_of_repetitions=False,
            # Whether the user has asked for is_repeat, to leave repeats out.
            _has_read_is_repeat=False,
            _epoch_targets=_find_epoch_targets(spec),
            _worker_streams=worker_streams,
        )

    # torch declares a private class of iterators.
    def __iter__(self) -> Iterator[Batch_co]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _, batches = self._begin_iteration()
        return batches

    def _begin_iteration(
        self, *, marks_last_batch: bool = False
    ) -> tuple[EpochPosition, Iterator[Any]]:
        """Begin an iteration. ``iter(loader)`` and ``iter(fabric.accumulate(...))`` call it.

        The order of the steps matters. The user's ``set_epoch`` decides the epoch, so it is read
        first. The other ranks learn of the iteration before anything is drawn or fetched, so that
        an error about different loops comes before a wait for another rank.

        Args:
            marks_last_batch: whether ``position.is_final`` has to be true while the user has the
                last batch. If not, it may stay false.

        Returns:
            The position, which the iteration updates, and the batches.
        """
        if self._spec.uneven == "longest":
            # The statistics of a SyncBatchNorm would count repeated batches.
            self._job.lockstep.check_no_sync_batch_norm()
        self._follow_user_epoch()
        # Only the first iteration after load_state_dict() continues at the loaded position.
        loaded_position = self._loaded_position
        self._loaded_position = None
        position = self._begin_position(loaded_position)
        self._announce_iteration(position)
        if loaded_position is None:
            batches = self._begin_batches()
        else:
            batches = self._resume_batches(position)
            if loaded_position.get("dataset_has_ended", False):
                # No batch is left, but the dataset may still have to move on to its next epoch.
                batches = self._finish_ended_epoch(batches, loaded_position["dataset"])
        # Batches are looked at ahead before they are moved, so that a batch takes memory of the
        # device only when the user gets it. The observers see what the user gets.
        batches = self._look_ahead(batches, position, marks_last_batch)
        if self._move_batch is not None:
            batches = map(self._move_batch, batches)
        batches = self._job.session.observe_batches(batches)
        # The start of a loop is numbered as if it were a batch. By the numbers,
        # fabric.gather_for_metrics finds whether another loop has yielded a batch since the start.
        start_number = next(self._job.batch_numbers)
        loop = ActiveLoop(
            self._spec, position, batch_number=start_number, worker_streams=self._worker_streams
        )
        return position, self._yield_batches(loop, batches)

    def _begin_position(self, saved: Mapping[str, Any] | None) -> EpochPosition:
        """Return the position of a new iteration, and make it the latest.

        Also passes the number of the epoch to the user's sampler and dataset. The sharded sampler
        gets the position, and reads it when torch's ``iter()`` iterates the sampler.

        Args:
            saved: the saved position to continue from. None begins the next epoch.
        """
        if saved is None:
            position = EpochPosition(self._next_epoch)
        else:
            skipped_entries = entries_to_skip(saved, self._spec)
            # The saved order is drawn again, from the random states that it was drawn from.
            position = EpochPosition(
                saved["epoch"], skipped_entries, states_to_replay=saved["drawn"]
            )
        self._forward_epoch(position.epoch)
        self._next_epoch = position.epoch + 1
        self._latest_position = position
        if self._spec.sharded_sampler is not None:
            self._spec.sharded_sampler.position = position
        return position

    def _announce_iteration(self, position: EpochPosition) -> None:
        """Announce an iteration to the other ranks, before anything is drawn or fetched.

        The detector of uneven inputs compares between ranks the number of batches, and whether and
        over what length each rank draws an order.
        """
        # Comes first, since the order is drawn from these streams: ranks that share a batch, as in
        # tensor parallelism, get the same random streams. Collective among these ranks.
        self._job.session.synchronize_rng()
        if self._job.detector is None:
            return
        spec = self._spec
        has_equal_batches = spec.is_sharded_in_rounds or self._ends_in_lockstep()
        if has_equal_batches:
            batch_count = 0  # any number that is equal on all ranks: the detector compares ranks
        else:
            batch_count = spec.batch_count(position)
        # A dataset or sampler with set_epoch draws another order in each epoch.
        draws_order = bool(spec.order_streams) or bool(self._epoch_targets)
        # Orders that are divided over ranks have to be the same, which the detector checks.
        shuffles = spec.num_replicas > 1 and draws_order
        order = DividedOrder(shuffles, spec.divided_length)
        self._job.detector.on_iteration(self._name, position, batch_count, order)

    def _begin_batches(self) -> Iterator[Any]:
        """Return the loader's iterator for a new epoch.

        If fabric shards an iterable dataset, ``iter()`` is called with rank 0's random states on
        all ranks. All ranks then iterate the same samples: torch draws the base seed of the workers
        in ``iter()``, and a dataset may draw its order there.
        """
        worker_seed_streams = self._spec.worker_seed_streams
        is_sharded_in_rounds = worker_seed_streams is not None
        if not is_sharded_in_rounds:
            return iter(self.loader)
        # An InterleavedIterable, which wraps the user's dataset.
        dataset: Any = self.loader.dataset
        # A dataset that draws its order with its first sample then draws it in iter(), too.
        dataset.set_reads_first_sample(True)
        _, batches = worker_seed_streams.run_synchronized(partial(iter, self.loader))
        if inspect.isgenerator(batches):
            # The __iter__ of a user's loader is a generator function, which has run no code yet. It
            # calls torch's iter() when its first batch is asked for.
            return _fetch_first_with_rank0_states(worker_seed_streams, batches)
        return batches

    def _resume_batches(self, position: EpochPosition) -> Iterator[Any]:
        """Return the loader's iterator for an iteration that continues at a loaded position.

        torch's ``iter()`` draws the base seed of the workers from the random streams. The user
        restores the streams to their states at the save, which was after this draw. So the streams
        get their states back after ``iter()``.
        """
        streams = self._streams_to_restore(position)
        if self._spec.is_sharded_in_rounds:
            # An InterleavedIterable, which wraps the user's dataset.
            dataset: Any = self.loader.dataset
            # To read a sample in iter() would change the random streams and the dataset's state.
            # Each iteration sets this anew, so an earlier value does not matter.
            dataset.set_reads_first_sample(False)
        states_before = streams.state()
        batches = iter(self.loader)
        streams.restore(states_before)
        if inspect.isgenerator(batches):
            # The __iter__ of a user's loader is a generator function, which has run no code yet. It
            # calls torch's iter() when its first batch is asked for.
            return _draw_seed_from_copy(self.loader, batches)
        return batches

    def _streams_to_restore(self, position: EpochPosition) -> RandomStreams:
        """Return the streams that ``iter()`` must not change when it continues at ``position``.

        These are torch's global stream and the loader's generators. Generators from which the
        sampler draws the order again in ``iter()`` are left out: they have to end where the sampler
        leaves them.
        """
        replayed_generators: tuple[torch.Generator, ...] = ()
        if position.states_to_replay:
            replayed_generators = self._spec.order_streams.generators
        generators: list[torch.Generator] = []
        for generator in self._spec.generators:
            if generator not in replayed_generators:
                generators.append(generator)
        return RandomStreams(global_streams=("torch",), generators=tuple(generators))

    def _finish_ended_epoch(self, batches: Iterator[Any], dataset_state: Any) -> Iterator[Any]:
        """Take an iterable dataset to the start of its next epoch, and return no batches.

        Called for a position after the last batch of an epoch. Some datasets have saved the end of
        the old epoch: iterating them once yields nothing, and takes them to the next epoch. Other
        datasets have saved the start of the next epoch already.

        Args:
            batches: an iterator over the dataset.
            dataset_state: the saved state of the dataset, which the dataset has loaded.
        """
        # The user may have restored the random streams already: a fetch must not change them.
        all_streams = RandomStreams(("python", "numpy", "torch"), self._spec.generators)
        states_before = all_streams.state()
        first_batches = list(islice(batches, 1))
        if first_batches:
            # The dataset was at the start of the next epoch already. Take it back there.
            self._spec.dataset.load_state_dict(dataset_state)
        all_streams.restore(states_before)
        return iter(())

    def _look_ahead(
        self, batches: Iterator[Any], position: EpochPosition, marks_last_batch: bool
    ) -> Iterator[Any]:
        """Return the batches, wrapped so that the end of the loop is known before it is reached.

        This is needed for a loop that ends on all ranks together, and for a loop that marks its
        last batch. For any other loop the batches are returned as they are.
        """
        in_lockstep = self._ends_in_lockstep()
        if not in_lockstep and not marks_last_batch:
            return batches
        remaining = RemainingBatches(
            batches,
            count=self._spec.batch_count(position),
            position=position,
            read_state=self._state_of_loader_or_dataset,
        )
        if not in_lockstep:
            return remaining.take_all()
        # The loop has as many batches as the rank with the fewest, or as the rank with the most.
        choose = min if self._spec.uneven == "shortest" else max
        return self._job.lockstep.batches(remaining, choose, marks_last_batch=marks_last_batch)

    def _ends_in_lockstep(self) -> bool:
        """Return whether a loop ends on all ranks together, by messages between the ranks."""
        return self._spec.ends_in_lockstep and self._job.lockstep.size > 1

    def _may_end_unevenly(self) -> bool:
        """Return whether ranks may have different numbers of batches in a loop."""
        if self._job.lockstep.size == 1:
            return False
        return not self._spec.has_equal_counts and not self._spec.ends_in_lockstep

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the prepared copy. Called for a name that this object lacks."""
        # copy and pickle look up special methods, which must not be taken from the user's loader.
        # They also look up names before this object has a loader: reading self.loader below would
        # call this method again, without end.
        if name.startswith("__") or "loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the prepared copy, unless the constructor set it on this object."""
        if name in vars(self):
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    @property
    def is_repeat(self) -> bool:
        """Whether the current batch is a repeat, since this rank has no more; see ``uneven``."""
        # A user who reads this leaves repeats out, so the loop does not warn of them.
        self._has_read_is_repeat = True
        return self._latest_position is not None and self._latest_position.is_repeat

    @property
    def resumed_at(self) -> int:
        """Number of batches that the latest iteration skipped because of a loaded position."""
        if self._latest_position is None:
            return 0
        # If fabric shards the order, skipped_entries counts the entries of all ranks. Otherwise it
        # counts the entries of this rank, and shard_count is 1.
        entries_per_step = self._spec.shard_count * self._spec.entries_per_batch
        return -(-self._latest_position.skipped_entries // entries_per_step)  # rounded up

    def __repr__(self) -> str:
        return f"FabricDataLoader({self.loader!r})"

    def set_epoch(self, epoch: int) -> None:
        """Number the next epoch, and tell the sampler, batch sampler and dataset.

        Only objects with a method ``set_epoch`` are told. The call is not needed for consecutive
        numbers: each ``iter()`` counts up, from 0 or from a loaded state. If a loaded position is
        in this epoch, the next iteration continues from it. Otherwise the epoch starts anew.

        Args:
            epoch: number of the epoch, 0 or more.

        Raises:
            ConfigurationError: ``epoch`` is negative.
        """
        # Raises a TypeError for a number that is not an integer.
        number = operator.index(epoch)
        if number < 0:
            raise ConfigurationError(
                f"loader.set_epoch({epoch!r})", problem="epochs are counted from 0"
            )
        if self._loaded_position is not None and self._loaded_position["epoch"] != number:
            self._loaded_position = None
        self._next_epoch = number
        self._latest_position = None  # state_dict() now describes the beginning of this epoch
        self._forward_epoch(number)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, what the user has received of it, and its random states.

        The position is correct at any time, even in the loop's body: batches that workers have
        prefetched do not count. After the end of an epoch the position is the start of the next
        epoch. After a ``break`` it is the position of the break (call :meth:`set_epoch` to skip the
        remainder of the epoch). With several active iterations it is the position of the iteration
        that yielded the latest batch.

        For an iterable dataset only the epoch can be resumed, unless the dataset has
        ``state_dict`` and ``load_state_dict`` and there are no worker processes: then the state of
        the dataset is part of the position.

        Returns:
            Dicts, lists, numbers, strings and tensors; ``torch.load(weights_only=True)`` reads them
            back.
        """
        latest_position: EpochPosition | None = self._latest_position
        if latest_position is None or latest_position.is_finished:
            # No iteration is active: the position is the start of the next epoch.
            has_begun = False
            position = EpochPosition(self._next_epoch)
        else:
            has_begun = True
            position = latest_position
        if self._loader_keeps_position:
            # load_state_dict() has passed a loaded position on to the user's loader.
            return self._loader_position(position)
        if self._loaded_position is not None:
            # No iteration has begun since load_state_dict, so the loaded position still holds. Its
            # number of ranks and batch size are replaced by those of this loader.
            return {**self._loaded_position, **self._spec.summary()}
        dataset_state = DatasetState()
        if has_begun and self._dataset_keeps_position:
            dataset_state = self._state_of_loader_or_dataset(position)
        return saved_position(
            self._spec, position, has_begun=has_begun, dataset_state=dataset_state
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position.

        The next ``iter()`` continues where :meth:`state_dict` was called. Its order is drawn again
        from the saved states, and received samples are skipped without being loaded. The
        ``iter()`` does not change the process's global random generators: restore them separately
        with :func:`fabric.seed.set_rng_state`. If the position is after the last batch of an epoch,
        but was saved in the body of the loop, the next ``iter()`` yields nothing.

        Rank 0 warns if the number of ranks has changed, and the batch sizes of all ranks together
        with it: the run then has other steps.

        Args:
            state: what :meth:`state_dict` returned, on any rank.

        Raises:
            CheckpointError: in one of these cases:

                - The state is of another kind of loader.
                - The dataset, its length or the kind of sampler differs.
                - The sampler yields batches, and the batch size differs.
                - The sampler shards by itself, and the number of ranks differs and does not divide
                  the cursor.
                - The position is inside an epoch, and the dataset is iterable without a state of
                  its own.
                - The position is inside an epoch, and workers yield batches out of order.
        """
        if self._loader_keeps_position:
            self._load_loader_position(state)
            return
        check_saved_position(
            state,
            self._spec,
            # A single worker, or none, cannot change the order.
            yields_in_order=self.loader.num_workers <= 1 or self.loader.in_order,
            dataset_keeps_position=self._dataset_keeps_position,
        )
        if self._job.rank == 0:
            warn_of_other_batches(state, self._spec)
        is_inside = is_inside_epoch(state, self._spec)
        # fabric has put a sampler into each loader whose position it keeps, unless the dataset is
        # iterable.
        is_iterable = self._spec.sharded_sampler is None
        if is_inside and is_iterable:
            # The position in the dataset is part of the dataset's state.
            self._spec.dataset.load_state_dict(state["dataset"])
        # Also at the start of an epoch, so that the next order is that of an uninterrupted run.
        # check_saved_position() has compared the number of generators.
        for generator, saved in zip(self._spec.generators, state["generators"], strict=True):
            generator.set_state(saved)
        self._next_epoch = state["epoch"]
        self._latest_position = None  # state_dict() now describes the loaded position
        # The next iter() continues at this position. At the start of an epoch it begins as usual.
        self._loaded_position = state if is_inside else None

    def _loader_position(self, position: EpochPosition) -> dict[str, Any]:
        """Return the position of a stateful loader, which keeps its own position.

        The result is the loader's own state if it is enough to resume. Otherwise it is a dict with
        that state, the number of the epoch and the number of ranks, which the state lacks.
        """
        loader_state = self._state_of_loader_or_dataset(position)
        ranks = self._spec.num_replicas
        if not self._epoch_targets and ranks == 1:
            return loader_state
        return {"epoch": position.epoch, "num_replicas": ranks, "loader": loader_state}

    def _load_loader_position(self, state: Any) -> None:
        """Load a result of :meth:`_loader_position` into a loader that keeps its own position.

        Raises:
            CheckpointError: the state is fabric's, or of another number of ranks.
        """
        # A state that is not a mapping can only be a plain state of the loader.
        content: Mapping[str, Any] = state if isinstance(state, Mapping) else {}
        # A plain state of the loader has no number of ranks: it was saved on one rank.
        ranks = content.get("num_replicas", 1)
        source = None
        if "cursor" in content:
            # Only positions that fabric keeps have a cursor.
            source = "fabric's"
        elif ranks != self._spec.num_replicas:
            source = f"one of {ranks} processes"
        if source is not None:
            raise CheckpointError(
                "loader.load_state_dict()",
                problem=f"the {type(self.loader).__name__} keeps its own position; this is "
                f"{source}",
                expected="a plain DataLoader, or as many processes",
            )
        # _loader_position() puts the loader's state into such a dict if more has to be saved.
        is_wrapped = content.keys() >= {"epoch", "num_replicas", "loader"}
        if is_wrapped:
            self._next_epoch = content["epoch"]
            # state_dict() must not return the epoch of an earlier iteration.
            self._latest_position = None
            state = content["loader"]
        stateful_loader: Any = self.loader
        stateful_loader.load_state_dict(state)

    def _state_of_loader_or_dataset(self, position: EpochPosition) -> Any:
        """Return the state of the object of the user that keeps the position.

        The object is a stateful loader or an iterable dataset. The state of a dataset is returned
        as a ``DatasetState``. None if fabric keeps the position. If a batch was fetched ahead, the
        state is from before the fetch.
        """
        if position.state_before_fetch is not None:
            return position.state_before_fetch
        if self._loader_keeps_position:
            stateful_loader: Any = self.loader
            return stateful_loader.state_dict()
        if self._dataset_keeps_position:
            # The constructor has replaced the collate_fn, unless the dataset makes whole batches.
            detector = self.loader.collate_fn
            has_ended = isinstance(detector, _EndDetector) and detector.has_ended
            return DatasetState(self._spec.dataset.state_dict(), has_ended)
        return None

    def _yield_batches(self, loop: ActiveLoop, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches to the user, and update the position and the list of active loops.

        The position counts a batch before the user gets it, so that a state saved in the body of
        the loop resumes after this batch. ``fabric.gather_for_metrics`` finds the batch of the
        user's results by the active loops and the numbers of their batches. All loops of the job
        take their numbers from one sequence.
        """
        # Written through vars(), since the __setattr__ of this class costs a call for every batch.
        attributes = vars(self)
        position = loop.position
        active_loops = self._job.active_loops
        batch_numbers = self._job.batch_numbers
        is_first_batch = True
        try:
            for batch in batches:
                # A rank that has run out gets its last batch again, which counts only once.
                if position.is_repeat:
                    loop.repeated_batches += 1
                else:
                    position.received_batches += 1
                # Set for each batch, since several loops over this loader may take turns.
                attributes["_latest_position"] = position
                # Before its first batch a loop has no batch that results could be of.
                if is_first_batch:
                    active_loops.append(loop)
                    is_first_batch = False
                loop.previous_batch_number = loop.batch_number
                loop.batch_number = next(batch_numbers)
                yield batch
            position.is_finished = True
            # Repeated samples are in the user's results, unless fabric.gather_for_metrics was
            # called in the loop, which leaves them out.
            if not loop.was_gathered_for_metrics and not self._has_warned_of_repetitions:
                self._warn_of_repetitions(loop)
            if self._loader_keeps_position and self._spec.ends_in_lockstep:
                # Loops in lockstep end together, which may be before the data of this rank ends.
                # The loader, which counts for itself, would then take the next loop for the rest of
                # this epoch.
                reset_iterator(self.loader)
        finally:
            # Also after a break or an error in the body, when the generator is closed.
            if loop in active_loops:
                active_loops.remove(loop)

    def _warn_of_repetitions(self, loop: ActiveLoop) -> None:
        """Warn of an evaluation in which samples have counted twice.

        Called by the generator of the batches at the end of a loop, unless
        ``fabric.gather_for_metrics`` was called in the loop.
        """
        spec = self._spec
        session = self._job.session
        padded = spec.repeated_entries(loop.position)
        if padded > 0 and session.should_warn_of_repetitions(is_rank_alone=False):
            repetitions = (
                f"this loop over {length_of(spec.order_source)} {spec.unit} computed no gradients, "
                f"and {padded} of them were repeated so that all {spec.num_replicas} processes get "
                "equally many"
            )
            remedy = 'setup_dataloaders(loader, uneven="drop") leaves samples out instead'
        elif (
            loop.repeated_batches > 0
            and not self._has_read_is_repeat
            and session.should_warn_of_repetitions(is_rank_alone=True)
        ):
            repetitions = (
                "this loop computed no gradients, and this process, which had fewer batches than "
                f"others, got {loop.repeated_batches} of them again"
            )
            remedy = "if not loader.is_repeat: leaves repeats out of sums of your own"
        else:
            return
        self._has_warned_of_repetitions = True
        warnings.warn(
            f"{repetitions}: sums and means over the batches of all processes count these twice. "
            "fabric.gather_for_metrics(results) returns the results of each sample once; "
            f"{remedy}; Fabric(check_training=False) if this is meant",
            # Names the line of the user's loop: above this method and the generator of the batches.
            stacklevel=3,
        )

    def _follow_user_epoch(self) -> None:
        """Adopt the epoch if the user called ``set_epoch`` on their own sampler or dataset."""
        for target, known_epoch in self._epoch_targets:
            epoch = getattr(target, "epoch", None)
            if isinstance(epoch, int) and epoch >= 0 and epoch != known_epoch:
                self.set_epoch(epoch)
                return

    def _forward_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the user's sampler, batch sampler and dataset.

        Their attribute ``epoch`` is recorded afterwards. If it has changed at the next iteration,
        the user has called ``set_epoch`` (:meth:`_follow_user_epoch`).
        """
        for target, _ in self._epoch_targets:
            target.set_epoch(epoch)
        targets: list[_EpochTarget] = []
        # In a second loop, since a target may pass its epoch on to another target.
        for target, _ in self._epoch_targets:
            targets.append(_EpochTarget(target, known_epoch=getattr(target, "epoch", None)))
        self._epoch_targets = targets


class _EndDetector:
    """A ``collate_fn`` that finds the short batch with which an iterable dataset ends.

    To find that a batch is short, torch has asked the dataset for a sample after the last one. The
    dataset has ended then, and may have set its state to the start of the next epoch.

    Args:
        collate_fn: the function of the user's loader, which makes the batch.
        batch_size: the number of samples in a full batch.

    Attributes:
        has_ended: whether the latest batch is short.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], batch_size: int) -> None:
        self.has_ended = False
        self._collate_fn = collate_fn
        self._batch_size = batch_size

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of some samples. torch calls it for each batch."""
        self.has_ended = len(samples) < self._batch_size
        return self._collate_fn(samples)


def _fetch_first_with_rank0_states(
    streams: SynchronizedStreams, batches: Iterator[Any]
) -> Iterator[Any]:
    """Yield batches, of which the first is fetched with rank 0's random states on all ranks.

    ``batches`` is a generator that calls torch's ``iter()``, which draws the base seed of the
    workers, when its first batch is asked for.
    """
    _, first_batches = streams.run_synchronized(partial(list, islice(batches, 1)))
    yield from chain(first_batches, batches)


def _draw_seed_from_copy(loader: DataLoader[Any], batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches, and let torch draw the base seed of the workers from a copy of its generator.

    The states of the random streams were loaded, and must not change by this draw. ``batches`` is a
    generator over ``loader`` that makes torch draw the seed when its first batch is asked for. For
    that time the loader has the copy as its generator.
    """
    generator = loader.generator
    seed_generator = torch.Generator()
    if generator is None:
        seed_generator.set_state(torch.get_rng_state())
    else:
        seed_generator.set_state(generator.get_state())
    object.__setattr__(loader, "generator", seed_generator)
    try:
        first_batches = list(islice(batches, 1))
    finally:
        object.__setattr__(loader, "generator", generator)
    yield from chain(first_batches, batches)


def _loader_suggestion(data: Any) -> str:
    """Return what to write for an object that is passed as a loader, and is none."""
    if isinstance(data, list | tuple):
        return "fabric.setup_dataloaders(*loaders)"
    if isinstance(data, Dataset):
        return "fabric.setup_dataloaders(DataLoader(dataset, batch_size=...))"
    if isinstance(data, Iterator):
        return "loader = fabric.setup_dataloaders(loader) first, and then iter(loader) or the like"
    return "fabric.to_device(batch) in the loop over anything else"


def _check_arguments(loader: Any, uneven: str) -> None:
    """Raise unless ``loader`` is a DataLoader that can be set up, and ``uneven`` is a policy."""
    if isinstance(loader, FabricDataLoader):
        raise ConfigurationError(
            "setup_dataloaders(loader) with a loader that is set up already",
            problem="sharded a second time, it would never yield most of its samples",
            suggestion="fabric.setup_dataloaders(loader.original), or use the loader as it is",
        )
    if not isinstance(loader, DataLoader):
        raise ArgumentTypeError(
            f"setup_dataloaders({type(loader).__name__})",
            expected="a torch.utils.data.DataLoader, with batch_size=None for a dataset that makes "
            "whole batches",
            suggestion=_loader_suggestion(loader),
        )
    policies = get_args(Uneven)
    if uneven not in policies:
        raise ConfigurationError(
            f"setup_dataloaders(uneven={uneven!r})", expected=f"one of {policies}"
        )


def _seed_workers_by_rank(
    loader: DataLoader[Any], job: DataParallelJob, name: str
) -> WorkerStreams | None:
    """Give the workers of a prepared loader other random streams on each rank. Called at setup.

    Rank 0's workers keep torch's streams. Not called for an iterable dataset that fabric shards,
    whose workers need the same streams on all ranks.

    Returns:
        A record of the streams that the user's ``worker_init_fn`` will seed. fabric later compares
        the records of two ranks, to warn if the streams are equal. None if there is no such
        function, no worker or no other rank.
    """
    streams = None
    if loader.worker_init_fn is not None and loader.num_workers > 0 and job.num_replicas > 1:
        streams = WorkerStreams(name)
    if job.rank > 0 or streams is not None:
        # Seeds each worker by the rank, calls the user's function, and records what it has seeded.
        seeding = WorkerSeeding(job.rank, loader.worker_init_fn, streams)
        # Not setattr(), which may call the __setattr__ of a user's class.
        object.__setattr__(loader, "worker_init_fn", seeding)
    return streams


def _dataset_keeps_position(loader: DataLoader[Any], spec: LoaderSpec) -> bool:
    """Return whether the position in an iterable dataset is part of the dataset's state."""
    has_state = hasattr(spec.dataset, "state_dict") and hasattr(spec.dataset, "load_state_dict")
    is_iterable = spec.sharded_sampler is None
    # The state that the dataset has in a worker process cannot be asked for.
    is_in_this_process = loader.num_workers == 0
    return has_state and is_iterable and is_in_this_process


def _find_epoch_targets(spec: LoaderSpec) -> list[_EpochTarget]:
    """Return the objects of the user with a ``set_epoch``, which get the number of each epoch.

    They are the object that makes the order of the samples, the sampler in it if it is a batch
    sampler, and the dataset.
    """
    inner_sampler = getattr(spec.order_source, "sampler", None)
    targets: list[_EpochTarget] = []
    for target in (spec.order_source, inner_sampler, spec.dataset):
        if callable(getattr(target, "set_epoch", None)):
            # By convention an object is at epoch 0 until set_epoch is called. Another number shows
            # that the user has called it.
            targets.append(_EpochTarget(target, known_epoch=0))
    return targets

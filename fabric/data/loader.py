"""The loader that ``fabric.setup_dataloaders`` returns."""

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, get_args

import torch
from torch.utils.data import DataLoader, IterableDataset

from fabric._torch import reset_iterator
from fabric.data.copies import mover
from fabric.data.lockstep import Lockstep, RemainingBatches
from fabric.data.position import EpochPosition, length_of
from fabric.data.saved_position import (
    check_saved_position,
    entries_to_skip,
    is_inside_epoch,
    saved_position,
)
from fabric.data.sharding import FromRank0
from fabric.data.spec import ActiveLoop, LoaderSpec, ShardRequest, Uneven
from fabric.data.spec import shard as shard_loader
from fabric.diagnostics.uneven_inputs import UnevenInputDetector
from fabric.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from fabric.seed import RandomStreams, WorkerSeeding

__all__ = ["DataParallelJob", "FabricDataLoader", "LoaderOptions"]

# For type checkers it is a DataLoader, so that functions that take one accept it.
_Base = DataLoader[Any] if TYPE_CHECKING else object


class LoaderOptions(TypedDict, total=False):
    """The options of ``fabric.setup_dataloaders``, which describes them."""

    use_distributed_sampler: bool
    move_to_device: bool
    overlap_copies: bool
    uneven: Uneven


def _do_nothing() -> None:
    pass


def _unchanged(batches: Iterator[Any]) -> Iterator[Any]:
    return batches


@dataclass(frozen=True)
class DataParallelJob:
    """The job that a loader is part of: its ranks, and what they do together in a loop.

    Attributes:
        rank: rank of this process, ``0 <= rank < num_replicas``.
        num_replicas: number of ranks that data is sharded over.
        from_rank0: makes the ranks draw the same order although their random states differ. Called
            at the start of each epoch with a key and the state, in the same sequence on all ranks,
            it returns rank 0's state. Not called if nothing random is drawn. None: the states are
            assumed to be equal.
        active_loops: the active loops over the loaders of the job.
        lockstep: ends loops on all ranks together.
        detector: is told of the start of each iteration. None if there are no other ranks.
        synchronize_rng: gives ranks that share a batch the same random streams. Called before
            each iteration.
        around_batches: wraps the iterator of batches of each iteration.
    """

    rank: int = 0
    num_replicas: int = 1
    from_rank0: FromRank0 | None = None
    active_loops: list[ActiveLoop] = field(default_factory=list)
    lockstep: Lockstep = field(default_factory=Lockstep)
    detector: UnevenInputDetector | None = None
    synchronize_rng: Callable[[], None] = _do_nothing
    around_batches: Callable[[Iterator[Any]], Iterator[Any]] = _unchanged


class _EpochTarget(NamedTuple):
    """An object with a ``set_epoch``: the user's sampler, batch sampler or dataset."""

    target: Any
    epoch: Any
    """What the object's own ``epoch`` was after the latest ``set_epoch``."""


class FabricDataLoader(_Base):
    """A DataLoader that yields this rank's batches on its device, and that can save its position.

    Made by ``fabric.setup_dataloaders``. It iterates like the user's own loader; each ``iter()``
    begins a new epoch. Attributes are read from and written to the prepared copy. A loader with a
    ``state_dict`` of its own (torchdata's ``StatefulDataLoader``) uses it for an iterable dataset
    and, on one process, if the sampler or the dataset has a state too; such a position loads only
    on the same number of processes. Otherwise the position is fabric's.

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
        loader: DataLoader[Any],
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

        - A batch sampler that the user passed: whole batches are sharded.
        - A sampler that shards by itself (it has ``rank`` and ``num_replicas``, as torch's
          DistributedSampler): left alone.
        - An iterable dataset: sharded in rounds
          (:class:`~fabric.data.sharding.InterleavedIterable`), complete ones unless ``uneven`` is
          ``"longest"``, or left alone if it has a true attribute ``shards_itself``. All ranks must
          iterate it in the same order. Its workers have the same random streams on every rank, from
          rank 0's base seed. Without workers only the numbers that its ``__iter__`` draws before it
          returns are the same, so it should shuffle by epoch (``set_epoch``).
        - Workers of map-style datasets have different random streams on each rank, on rank 0
          exactly torch's, unless ``seed_workers`` is false.

        Args:
            loader: a DataLoader, or an object of a subclass.
            job: the job that the loader is part of.
            device: where batches go. None leaves them as the loader made them.
            uneven: ``"pad"`` repeats samples from the start of the order until all ranks have
                equally many, as torch's DistributedSampler does; ``"drop"`` leaves the incomplete
                last round out. A loader with ``drop_last`` always leaves it out, since the plain
                loop drops those samples. For anything but a map-style dataset that fabric shards,
                ``"shortest"`` ends the loop on all ranks when the first rank runs out, and
                ``"longest"`` when all have: until then a rank without batches gets its last one
                again, with :attr:`is_repeat` true.
            shard: False gives every rank the whole data.
            overlap_copies: whether batches are copied to a CUDA device from pinned memory, on a
                separate stream. If not, they are copied on the compute stream, from memory as the
                loader pins it.
            name: identifies the loader; the same on all ranks, and unique in a job.
            seed_workers: False leaves the streams of workers as torch seeds them, equal on ranks
                with equal random states.

        Raises:
            ArgumentTypeError: ``loader`` is not a DataLoader.
            ConfigurationError: it is set up already; ``uneven`` does not fit its data; or its
                sampler shards by itself, but for another rank or number of ranks.
        """
        _check_arguments(loader, uneven)
        prepared = copy.copy(loader)
        # The copy must not reset or shut down the workers of the original.
        reset_iterator(prepared)
        request = ShardRequest(
            rank=job.rank,
            num_replicas=job.num_replicas,
            is_enabled=shard,
            uneven=uneven,
            from_rank0=job.from_rank0,
            name=name,
        )
        spec = shard_loader(prepared, request)
        if seed_workers and job.rank > 0 and spec.worker_seed is None:
            seeding = WorkerSeeding(job.rank, loader.worker_init_fn)
            # Past the __setattr__ of a user's class.
            object.__setattr__(prepared, "worker_init_fn", seeding)
        # Written without our __setattr__, which sets attributes of the user's loader.
        vars(self).update(
            loader=prepared,
            original=loader,
            differs_by_rank=job.num_replicas > 1 and spec.shards == 1,
            _job=job,
            _name=name,
            _spec=spec,
            # A loader of torchdata has a state. Its position is of no use in an order that fabric
            # shards.
            _has_own_state=hasattr(type(loader), "state_dict") and spec.sharded_sampler is None,
            _keeps_dataset_state=_keeps_dataset_state(loader, spec),
            _move=mover(prepared, device, overlap_copies),
            _epoch=0,  # the number of the next one
            _saved=None,  # the argument of load_state_dict, until the next iteration begins
            _latest=None,  # the iteration that yielded a batch last, or began since
            _epoch_targets=_find_epoch_targets(spec),
        )

    def __iter__(self) -> Any:
        _, batches = self._begin()
        return batches

    def _begin(self, *, finds_final: bool = False) -> tuple[EpochPosition, Iterator[Any]]:
        """Begin an iteration.

        Args:
            finds_final: whether ``position.is_final`` is to be true while the last batch is out.

        Returns:
            The position, which follows the iteration, and the batches.
        """
        if self._spec.uneven == "longest":
            self._job.lockstep.check_modules()
        self._follow_user_epoch()
        saved = self._saved
        self._saved = None
        position = self._begin_position(saved)
        self._announce(position)
        if saved is None:
            batches = self._begin_batches()
        else:
            batches = self._resume_batches(position)
        batches = self._look_ahead(batches, position, finds_final)
        if self._move is not None:
            batches = map(self._move, batches)
        return position, self._hand_out(position, self._job.around_batches(batches))

    def _begin_position(self, saved: Mapping[str, Any] | None) -> EpochPosition:
        """Return the position of a new iteration, and make it the latest.

        Args:
            saved: the saved position to continue from, if there is one.
        """
        if saved is None:
            position = EpochPosition(self._epoch)
        else:
            skip = entries_to_skip(saved, self._spec)
            position = EpochPosition(saved["epoch"], skip, states_to_replay=saved["drawn"])
        self._forward_epoch(position.epoch)
        self._epoch = position.epoch + 1
        self._latest = position
        if self._spec.sharded_sampler is not None:
            self._spec.sharded_sampler.position = position
        return position

    def _announce(self, position: EpochPosition) -> None:
        """Tell the job that an iteration begins. Nothing has been drawn yet."""
        self._job.synchronize_rng()
        if self._job.detector is None:
            return
        spec = self._spec
        if spec.worker_seed is not None or self._ends_in_lockstep():
            batches = 0  # as many on all ranks, whatever the number
        elif isinstance(spec.dataset, IterableDataset):
            batches = None  # torch would warn if the dataset yields more than its length
        else:
            batches = length_of(self.loader)
        draws_order = bool(spec.streams) or bool(self._epoch_targets)
        shuffles = spec.num_replicas > 1 and draws_order
        self._job.detector.on_iteration(self._name, position, batches, shuffles)

    def _begin_batches(self) -> Iterator[Any]:
        """Return the loader's iterator, whose workers have the same base seed on all ranks."""
        worker_seed = self._spec.worker_seed
        if worker_seed is None:
            return iter(self.loader)
        _, batches = worker_seed.draw(self._iterate)
        return batches

    def _iterate(self) -> Iterator[Any]:
        return iter(self.loader)

    def _resume_batches(self, position: EpochPosition) -> Iterator[Any]:
        """Return the loader's iterator, and restore the streams that the order is not drawn from.

        torch draws the base seed of the workers from them. If the order is drawn again, the
        sampler's own generators continue from there instead.
        """
        spec = self._spec
        replayed = spec.streams.generators if position.states_to_replay else ()
        generators: list[torch.Generator] = []
        for generator in spec.generators:
            if generator not in replayed:
                generators.append(generator)
        streams = RandomStreams(("torch",), tuple(generators))
        before = streams.state()
        batches = iter(self.loader)
        streams.restore(before)
        return batches

    def _look_ahead(
        self, batches: Iterator[Any], position: EpochPosition, finds_final: bool
    ) -> Iterator[Any]:
        """Return the batches of an iteration whose end is known ahead, where that is needed."""
        in_lockstep = self._ends_in_lockstep()
        if not in_lockstep and not finds_final:
            return batches
        number = self._spec.batch_count(position)
        remaining = RemainingBatches(batches, number, position, self._own_state)
        if not in_lockstep:
            return remaining.take_all()
        choose = min if self._spec.uneven == "shortest" else max
        return self._job.lockstep.batches(remaining, choose, finds_final=finds_final)

    def _ends_in_lockstep(self) -> bool:
        return self._spec.ends_in_lockstep and self._job.lockstep.size > 1

    def _may_end_unevenly(self) -> bool:
        """Return whether ranks may have different numbers of batches in a loop."""
        if self._job.lockstep.size == 1:
            return False
        return not self._spec.has_equal_counts and not self._spec.ends_in_lockstep

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask for special methods: those of this class count. While this
        # object is being unpickled there is no loader yet.
        if name.startswith("__") or "loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    @property
    def is_repeat(self) -> bool:
        """Whether the current batch is a repeat, since this rank has no more; see ``uneven``."""
        return self._latest is not None and self._latest.is_repeat

    @property
    def resumed_at(self) -> int:
        """Number of batches that the latest iteration skipped because of a loaded position."""
        if self._latest is None:
            return 0
        entries_per_step = self._spec.shards * self._spec.entries_per_batch
        return -(-self._latest.skipped_entries // entries_per_step)

    def __repr__(self) -> str:
        return f"FabricDataLoader({self.loader!r})"

    def set_epoch(self, epoch: int) -> None:
        """Number the next epoch, and tell the sampler, batch sampler and dataset.

        Calls ``set_epoch`` of those that have one. Not needed for consecutive numbers: each
        ``iter()`` counts up, from 0 or from a loaded state. A position inside another epoch, loaded
        or reached, is discarded.

        Args:
            epoch: number of the epoch, 0 or more.

        Raises:
            ConfigurationError: ``epoch`` is negative.
        """
        number = operator.index(epoch)
        if number < 0:
            raise ConfigurationError(
                f"loader.set_epoch({epoch!r})", problem="epochs are counted from 0"
            )
        if self._saved is not None and self._saved["epoch"] != number:
            self._saved = None
        self._epoch = number
        self._latest = None
        self._forward_epoch(number)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, what the user has received of it, and its random states.

        Correct at any time, even in the loop's body: batches that workers have prefetched do not
        count. After the end of an epoch it is the start of the next one; after a ``break`` it is
        the position of the break (call :meth:`set_epoch` to skip the remainder of the epoch). With
        several active iterations it is the position of the one that yielded the latest batch.

        For an iterable dataset only the epoch can be resumed, unless the dataset has
        ``state_dict`` and ``load_state_dict`` and there are no worker processes: then its state is
        part of this.

        Returns:
            Dicts, lists, numbers, strings and tensors; ``torch.load(weights_only=True)`` reads them
            back.
        """
        latest: EpochPosition | None = self._latest
        has_begun = False
        position = EpochPosition(self._epoch)
        if latest is not None and not latest.is_finished:
            has_begun = True
            position = latest
        if self._has_own_state:
            return self._own_position(position)
        if self._saved is not None:
            return {**self._saved, **self._spec.summary()}
        dataset_state = self._own_state(position) if has_begun else None
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
        if self._has_own_state:
            self._load_own_position(state)
            return
        check_saved_position(
            state,
            self._spec,
            is_in_order=self.loader.num_workers <= 1 or self.loader.in_order,
            keeps_dataset_state=self._keeps_dataset_state,
        )
        is_inside = is_inside_epoch(state, self._spec)
        if is_inside and self._spec.sharded_sampler is None:
            # The dataset is iterable: the position in the dataset is part of the dataset's state.
            self._spec.dataset.load_state_dict(state["dataset"])
        for generator, saved in zip(self._spec.generators, state["generators"], strict=True):
            generator.set_state(saved)
        self._epoch = state["epoch"]
        self._latest = None
        # From the start of an epoch, the next iter() begins as usual.
        self._saved = state if is_inside else None

    def _own_position(self, position: EpochPosition) -> dict[str, Any]:
        """Return the position of a loader that keeps its own."""
        loader_state = self._own_state(position)
        ranks = self._spec.num_replicas
        if not self._epoch_targets and ranks == 1:
            return loader_state
        # The numbers of the epoch and of the ranks are not in the loader's state.
        return {"epoch": position.epoch, "num_replicas": ranks, "loader": loader_state}

    def _load_own_position(self, state: Any) -> None:
        """Load a position into a loader that keeps its own."""
        content: Mapping[str, Any] = state if isinstance(state, Mapping) else {}
        is_fabrics = "cursor" in content
        ranks = content.get("num_replicas", 1)
        if is_fabrics or ranks != self._spec.num_replicas:
            source = "fabric's" if is_fabrics else f"one of {ranks} processes"
            raise CheckpointError(
                "loader.load_state_dict()",
                problem=f"the {type(self.loader).__name__} keeps its own position; this is "
                f"{source}",
                expected="a plain DataLoader, or as many processes",
            )
        if content.keys() >= {"epoch", "num_replicas", "loader"}:
            self._epoch = content["epoch"]
            self._latest = None
            state = content["loader"]
        stateful_loader: Any = self.loader
        stateful_loader.load_state_dict(state)

    def _own_state(self, position: EpochPosition) -> Any:
        """Return the state of the loader or its dataset. None where fabric keeps the position."""
        if position.state_before_fetch is not None:
            return position.state_before_fetch
        owner: Any
        if self._has_own_state:
            owner = self.loader
        elif self._keeps_dataset_state:
            owner = self._spec.dataset
        else:
            return None
        return owner.state_dict()

    def _hand_out(self, position: EpochPosition, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and keep the position and the list of active loops."""
        # Written without __setattr__, which would be a Python call for every batch.
        attributes = vars(self)
        active_loops = self._job.active_loops
        loop = ActiveLoop(self._spec, position)
        try:
            for batch in batches:
                if not position.is_repeat:
                    position.received_batches += 1
                attributes["_latest"] = position
                if not active_loops or active_loops[-1] is not loop:
                    if loop in active_loops:
                        active_loops.remove(loop)
                    active_loops.append(loop)
                yield batch
            position.is_finished = True
            if self._has_own_state and self._spec.ends_in_lockstep:
                # Otherwise the loader's own state may be inside the epoch.
                reset_iterator(self.loader)
        finally:
            if loop in active_loops:
                active_loops.remove(loop)

    def _follow_user_epoch(self) -> None:
        """Adopt the epoch if the user called ``set_epoch`` on their own sampler or dataset."""
        for target, known_epoch in self._epoch_targets:
            epoch = getattr(target, "epoch", None)
            if isinstance(epoch, int) and epoch >= 0 and epoch != known_epoch:
                self.set_epoch(epoch)
                return

    def _forward_epoch(self, epoch: int) -> None:
        """Tell the user's sampler, batch sampler and dataset the number of the epoch."""
        targets: list[_EpochTarget] = []
        for target, _ in self._epoch_targets:
            target.set_epoch(epoch)
        # Epochs are read once all targets have theirs: a target may pass its epoch on to another.
        for target, _ in self._epoch_targets:
            targets.append(_EpochTarget(target, getattr(target, "epoch", None)))
        self._epoch_targets = targets


def _check_arguments(loader: Any, uneven: str) -> None:
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
            suggestion="fabric.to_device(batch) in the loop over anything else",
        )
    policies = get_args(Uneven)
    if uneven not in policies:
        raise ConfigurationError(
            f"setup_dataloaders(uneven={uneven!r})", expected=f"one of {policies}"
        )


def _keeps_dataset_state(loader: DataLoader[Any], spec: LoaderSpec) -> bool:
    """Return whether the position in an iterable dataset is part of the dataset's state."""
    has_state = hasattr(spec.dataset, "state_dict") and hasattr(spec.dataset, "load_state_dict")
    # The state that the dataset has in a worker process cannot be asked for.
    return has_state and spec.sharded_sampler is None and loader.num_workers == 0


def _find_epoch_targets(spec: LoaderSpec) -> list[_EpochTarget]:
    targets: list[_EpochTarget] = []
    for target in (spec.order, getattr(spec.order, "sampler", None), spec.dataset):
        if callable(getattr(target, "set_epoch", None)):
            targets.append(_EpochTarget(target, 0))
    return targets

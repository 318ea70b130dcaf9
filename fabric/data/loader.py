"""The loader that ``fabric.setup_dataloaders`` returns."""

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, get_args

import torch
from torch.utils.data import DataLoader, IterableDataset

from fabric.data.copies import mover
from fabric.data.position import (
    ActiveIterator,
    EpochState,
    check_saved,
    length_of,
    saved_state,
    skipped,
)
from fabric.data.sharding import FromRank0, Uneven
from fabric.data.sharding import shard as _shard
from fabric.data.uneven import Agreement, Upcoming, number_of_batches
from fabric.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from fabric.seed import Streams, WorkerSeeding

__all__ = ["FabricDataLoader", "LoaderOptions"]

_ALONE = Agreement()
# For type checkers it is a DataLoader, so that functions that take one accept it.
_Base = DataLoader[Any] if TYPE_CHECKING else object


class LoaderOptions(TypedDict, total=False):
    """The options of ``fabric.setup_dataloaders``, which describes them."""

    use_distributed_sampler: bool
    move_to_device: bool
    overlap_copies: bool
    uneven: Uneven


class FabricDataLoader(_Base):
    """A DataLoader that yields this rank's batches on this rank's device, and that can save its position.

    Made by ``fabric.setup_dataloaders``. It iterates like the user's own loader; each ``iter()`` begins a new epoch.
    Attributes are read from and written to the prepared copy. A loader with a ``state_dict`` of its own (torchdata's
    ``StatefulDataLoader``) uses it for an iterable dataset and, on one process, if the sampler or the dataset has a
    state too; such a position loads only on the same number of processes. Otherwise the position is fabric's.

    Batches are moved to the device one by one, on request. For a CUDA device they are copied from pinned memory while
    it computes the step before, unless ``overlap_copies`` is false. On a CPU device they are yielded as the loader made
    them.

    Attributes:
        loader: the prepared copy, a DataLoader of the user's class.
        original: the user's own object, unchanged.
        differs_by_rank: whether positions may differ between ranks, since fabric does not shard the data.
    """

    loader: DataLoader[Any]
    original: DataLoader[Any]
    differs_by_rank: bool

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rank: int,
        num_replicas: int,
        device: torch.device | None,
        uneven: Uneven = "pad",
        shard: bool = True,
        overlap_copies: bool = True,
        from_rank0: FromRank0 | None = None,
        name: str = "0",
        seed_workers: bool = True,
        active: list[ActiveIterator] | None = None,
        agreement: Agreement = _ALONE,
        on_epoch: Sequence[Callable[[str, EpochState, int | None, bool], object]] = (),
        around: Callable[[Iterator[Any]], Iterator[Any]] = iter,
    ) -> None:
        """Shard a loader's samples over the ranks and move its batches; the user's loader stays as it is.

        The i-th batches of all ranks, of ``batch_size`` samples each, together are the i-th batch of ``batch_size *
        num_replicas`` samples of the plain loop, with the user's own sampler. With one replica the loop equals the
        plain one, random streams included.

        - A batch sampler that the user passed: whole batches are sharded.
        - A sampler that shards by itself (it has ``rank`` and ``num_replicas``, as torch's DistributedSampler): left
          alone.
        - An iterable dataset: sharded in rounds (:class:`~fabric.data.sharding.InterleavedIterable`), complete ones
          unless ``uneven`` is ``"longest"``, or left alone if it has a true attribute ``shards_itself``. All ranks
          must iterate it in the same order. Its workers have the same random streams on every rank, from rank 0's base
          seed. Without workers only the numbers that its ``__iter__`` draws before it returns are the same, so it
          should shuffle by epoch (``set_epoch``).
        - Workers of map-style datasets have different random streams on each rank, on rank 0 exactly torch's, unless
          ``seed_workers`` is false.

        Args:
            loader: a DataLoader, or an object of a subclass.
            rank: of this process, ``0 <= rank < num_replicas``.
            num_replicas: number of ranks to shard over.
            device: where batches go; ``None`` leaves them as the loader made them.
            uneven: ``"pad"`` repeats samples from the start of the order until all ranks have equally many, as torch's
                DistributedSampler does; ``"drop"`` leaves the incomplete last round out. A loader with ``drop_last``
                always leaves it out, since the plain loop drops those samples. For anything but a map-style dataset
                that fabric shards, ``"shortest"`` ends the loop on all ranks when the first rank runs out, and
                ``"longest"`` when all have: until then a rank without batches gets its last one again, with
                :attr:`is_repeat` true. See ``[Note: Uneven ranks]``.
            shard: False gives every rank the whole data.
            overlap_copies: whether batches are copied to a CUDA device from pinned memory, on a separate stream; see
                ``[Note: Overlapped copies]``. False: on the compute stream, from memory as the loader pins it.
            from_rank0: makes the ranks draw the same order although their random states differ: called at the start of
                each epoch with a key and the state, in the same sequence on all ranks, it returns what rank 0 passed.
                ``None``: the states are assumed to be equal. Not called if nothing random is drawn.
            name: identifies the loader in the keys; the same on all ranks, and unique in a job.
            seed_workers: False leaves the streams of workers as torch seeds them, equal on ranks with equal random
                states.
            active: the list of active iterations over the loaders of a job.
            agreement: lets the ranks agree on the end of a loop.
            on_epoch: called in order at the start of each iteration, with the name, its state, its number of batches
                (None if unknown), and whether an order is drawn for all ranks.
            around: wraps the iterator of batches at the start of each iteration.

        Raises:
            ArgumentTypeError: ``loader`` is not a DataLoader.
            ConfigurationError: it is set up already; ``uneven`` does not fit its data; or its sampler shards by itself,
                but for another rank or number of ranks.
        """
        if isinstance(loader, FabricDataLoader):
            raise ConfigurationError(
                "setup_dataloaders(loader) with a loader that is set up already",
                "sharded a second time, it would never yield most of its samples",
                suggestion="fabric.setup_dataloaders(loader.original), or use the loader as it is",
            )
        if not isinstance(loader, DataLoader):
            raise ArgumentTypeError(
                f"setup_dataloaders({type(loader).__name__})",
                expected="a torch.utils.data.DataLoader, with batch_size=None for a dataset that makes whole batches",
                suggestion="fabric.to_device(batch) in the loop over anything else",
            )
        if uneven not in get_args(Uneven):
            raise ConfigurationError(
                f"setup_dataloaders(uneven={uneven!r})", expected=f"one of {get_args(Uneven)}"
            )
        prepared = copy.copy(loader)
        # The copy must not reset or shut down the workers of the original.
        object.__setattr__(prepared, "_iterator", None)
        spec = _shard(
            prepared,
            (rank, num_replicas),
            enabled=shard,
            uneven=uneven,
            from_rank0=from_rank0,
            name=name,
        )
        if seed_workers and rank > 0 and spec.base_seed is None:
            object.__setattr__(
                prepared, "worker_init_fn", WorkerSeeding(rank, loader.worker_init_fn)
            )
        candidates = (spec.order, getattr(spec.order, "sampler", None), spec.dataset)
        targets = [
            (target, 0) for target in candidates if callable(getattr(target, "set_epoch", None))
        ]
        has_state = hasattr(spec.dataset, "state_dict") and hasattr(spec.dataset, "load_state_dict")
        # Bypasses our __setattr__: names set here are our own, all others are the loader's.
        vars(self).update(
            loader=prepared,
            original=loader,
            _spec=spec,
            differs_by_rank=num_replicas > 1 and spec.shards == 1,
            # As torchdata's, whose position is of no use in an order that fabric shards.
            _has_own_state=hasattr(type(loader), "state_dict") and spec.indices is None,
            _keeps_dataset_state=spec.indices is None and loader.num_workers == 0 and has_state,
            _move=mover(prepared, device, overlap_copies),
            _active=[] if active is None else active,
            _agreement=agreement,
            _on_epoch=on_epoch,
            _around=around,
            _name=name,
            _epoch=0,  # the number of the next one
            _saved=None,  # the argument of load_state_dict, until the next iteration begins
            _latest=None,  # the iteration that yielded a batch last, or began since
            _targets=targets,  # objects with a set_epoch, and the epoch last passed to each
        )

    def __iter__(self) -> Any:
        return self._begin()[1]

    def _begin(self, ends: bool = False) -> tuple[EpochState, Iterator[Any]]:
        """Begin an iteration; with ``ends`` its ``is_final`` says whether the current batch is the last."""
        spec = self._spec
        agreement = self._agreement
        agrees = spec.agrees and agreement.size > 1
        if spec.uneven == "longest":
            agreement.check_modules()
        self._follow_user_epoch()
        saved = self._saved
        self._saved = None
        if saved is None:
            state = EpochState(self._epoch)
        else:
            state = EpochState(saved["epoch"], skipped(saved, spec), saved["drawn"])
        self._forward_epoch(state.epoch)
        self._epoch = state.epoch + 1
        self._latest = state
        if spec.indices is not None:
            spec.indices.epoch = state
        if self._on_epoch:
            # None for iterable datasets: torch would warn if one yields more than its length.
            length = None if isinstance(spec.dataset, IterableDataset) else length_of(self.loader)
            has_orders = spec.num_replicas > 1 and bool(spec.streams or self._targets)
            for call in self._on_epoch:
                call(
                    self._name,
                    state,
                    length if spec.base_seed is None and not agrees else 0,
                    has_orders,
                )
        if saved is not None:
            # Restores the streams from which torch draws the workers' base seed. If the order is drawn again, the
            # sampler's own generators continue from there instead.
            replayed = spec.streams.generators if state.replay else ()
            untouched = Streams(
                ("torch",),
                tuple(generator for generator in spec.generators if generator not in replayed),
            )
            before = untouched.state()
            batches = iter(self.loader)
            untouched.restore(before)
        elif spec.base_seed is not None:
            _, batches = spec.base_seed.draw(lambda: iter(self.loader))
        else:
            batches = iter(self.loader)
        if ends or agrees:
            left = number_of_batches(spec, state, self.loader)
            pick = min if spec.uneven == "shortest" else max
            upcoming = Upcoming(batches, left, state, self._own_state)
            batches = agreement.batches(upcoming, pick, ends) if agrees else upcoming.all()
        return state, self._hand_out(
            state, self._around(batches if self._move is None else map(self._move, batches))
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask for special methods: ours count. While being unpickled there is no loader yet.
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
        """How many batches the latest iteration skipped at its start because of a loaded position."""
        skip = 0 if self._latest is None else self._latest.skip
        return -(-skip // (self._spec.shards * self._spec.entries_per_batch))

    def __repr__(self) -> str:
        return f"FabricDataLoader({self.loader!r})"

    def set_epoch(self, epoch: int) -> None:
        """Number the next epoch, and call ``set_epoch`` of the sampler, batch sampler and dataset that have one.

        Not needed for consecutive numbers: each ``iter()`` counts up, from 0 or from a loaded state. A position inside
        another epoch, loaded or reached, is discarded.

        Args:
            epoch: 0 or more.

        Raises:
            ConfigurationError: ``epoch`` is negative.
        """
        number = operator.index(epoch)
        if number < 0:
            raise ConfigurationError(f"loader.set_epoch({epoch!r})", "epochs are counted from 0")
        if self._saved is not None and self._saved["epoch"] != number:
            self._saved = None
        self._epoch = number
        self._latest = None
        self._forward_epoch(number)

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, how much of it the user has received, and how to draw its order again.

        Correct at any time, even in the loop's body: batches that workers have prefetched do not count. After the end
        of an epoch it is the start of the next one; after a ``break`` it is the place of the break (call
        :meth:`set_epoch` to skip the rest of the epoch). With several active iterations it is the position of the one
        that yielded the latest batch.

        For an iterable dataset only the epoch can be resumed, unless the dataset has ``state_dict`` and
        ``load_state_dict`` and there are no worker processes: then its state is part of this.

        Returns:
            Dicts, lists, numbers, strings and tensors; ``torch.load(weights_only=True)`` reads them back.
        """
        state = (
            EpochState(self._epoch)
            if self._latest is None or self._latest.finished
            else self._latest
        )
        begun = state is self._latest
        if self._has_own_state:
            own = self._own_state(state)
            ranks = self._spec.num_replicas
            # The numbers of the epoch and of the ranks are not in it.
            return (
                {"epoch": state.epoch, "num_replicas": ranks, "loader": own}
                if self._targets or ranks > 1
                else own
            )
        if self._saved is not None:
            return {**self._saved, **self._spec.summary()}
        return saved_state(self._spec, state, begun, self._own_state(state) if begun else None)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position: the next ``iter()`` continues where :meth:`state_dict` was called.

        Its order is drawn again from the saved states, and received samples are skipped without being loaded. That
        ``iter()`` leaves the process's shared random streams unchanged, so restore them separately
        (:func:`fabric.seed.set_rng_state`). If the position is after the last batch of an epoch, but was saved in the
        body of the loop, the next ``iter()`` yields nothing.

        Args:
            state: what :meth:`state_dict` returned, on any rank.

        Raises:
            CheckpointError: the state is of another kind of loader; the dataset, its length or the kind of sampler
                differ, or the batch size of a sampler that yields batches; the number of ranks of a sampler that shards
                by itself differs and does not divide the cursor; or the position is inside an epoch and the dataset is
                iterable without a state of its own, or workers yield batches out of order.
        """
        if self._has_own_state:
            found = state if isinstance(state, Mapping) else {}
            ranks = found.get("num_replicas", 1)
            if ranks != self._spec.num_replicas or "cursor" in found:
                others = "fabric's" if "cursor" in found else f"one of {ranks} processes"
                problem = (
                    f"the {type(self.loader).__name__} keeps its own position; this is {others}"
                )
                raise CheckpointError(
                    "loader.load_state_dict()", problem, "a plain DataLoader, or as many processes"
                )
            if found.keys() >= {"epoch", "num_replicas", "loader"}:
                self._epoch = state["epoch"]
                self._latest = None
                state = state["loader"]
            self.loader.load_state_dict(state)  # pyright: ignore[reportAttributeAccessIssue]  # asked for at the start
            return
        in_order = self.loader.num_workers <= 1 or self.loader.in_order
        inside = check_saved(state, self._spec, in_order, self._keeps_dataset_state)
        if inside and self._spec.indices is None:
            self._spec.dataset.load_state_dict(state["dataset"])
        for generator, saved in zip(self._spec.generators, state["generators"], strict=True):
            generator.set_state(saved)
        self._epoch = state["epoch"]
        self._latest = None
        self._saved = state if inside else None

    def _own_state(self, state: EpochState) -> Any:
        """The position according to the loader or its dataset; None where fabric keeps it."""
        if state.ahead is not None or not (self._has_own_state or self._keeps_dataset_state):
            return state.ahead
        owner: Any = self.loader if self._has_own_state else self._spec.dataset
        return owner.state_dict()

    def _hand_out(self, state: EpochState, batches: Iterator[Any]) -> Iterator[Any]:
        # Bypasses __setattr__, a Python call for every batch.
        attributes = vars(self)
        active = self._active
        entry = (self._spec, state)
        try:
            for batch in batches:
                state.received += not state.is_repeat
                attributes["_latest"] = state
                if not active or active[-1] is not entry:
                    if entry in active:
                        active.remove(entry)
                    active.append(entry)
                yield batch
            state.finished = True
            if self._has_own_state and self._spec.agrees:
                object.__setattr__(
                    self.loader, "_iterator", None
                )  # otherwise its own state may be inside the epoch
        finally:
            if entry in active:
                active.remove(entry)

    def _follow_user_epoch(self) -> None:
        """Adopt the epoch if the user called ``set_epoch`` on their own sampler or dataset, as in plain loops."""
        for target, known in self._targets:
            epoch = getattr(target, "epoch", None)
            if isinstance(epoch, int) and epoch >= 0 and epoch != known:
                self.set_epoch(epoch)
                return

    def _forward_epoch(self, epoch: int) -> None:
        for target, _ in self._targets:
            target.set_epoch(epoch)
        self._targets = [(target, getattr(target, "epoch", None)) for target, _ in self._targets]

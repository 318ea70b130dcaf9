"""Sharding a DataLoader over the ranks, moving its batches, and its position.

``base`` defines the terms, ``order`` says which indices a rank asks for, ``rounds`` deals iterable datasets, ``loader``
is what the user gets back, ``copies`` moves its batches to a GPU, ``whole`` puts together what all ranks computed from
a round. This file puts them together.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from fabric.data.base import Course, Pass
from fabric.data.copies import OverlappedCopies
from fabric.data.loader import FabricDataLoader
from fabric.data.order import Agreement, Indices, Share, dealt_by_hand, streams_of
from fabric.data.rounds import Rounds
from fabric.data.whole import WholeRound
from fabric.errors import ArgumentTypeError, ConfigurationError
from fabric.seed import Streams, WorkerSeeding
from fabric.tree import to_device

__all__ = ["FabricDataLoader", "WholeRound", "prepare_dataloader"]

Agree = Callable[[str, bytes], bytes]
Began = Callable[[str, Pass, int | None], None]


def prepare_dataloader(
    loader: DataLoader[Any],
    *,
    rank: int,
    num_replicas: int,
    device: torch.device | None,
    uneven: Literal["pad", "drop"] = "pad",
    shard: bool = True,
    overlap_copies: bool = True,
    agree: Agree | None = None,
    name: str = "0",
    seed_workers: bool = True,
    underway: list[Callable[[], WholeRound]] | None = None,
    began: Began | None = None,
) -> FabricDataLoader:
    """Deal a loader's samples to the ranks and move its batches; the user's loader stays as it is.

    The i-th batches of all ranks, of ``batch_size`` samples each, are together the i-th batch of ``batch_size *
    num_replicas`` samples of the plain loop, with the user's own sampler. With one replica the loop is the plain one,
    the random streams included.

    - A batch sampler that the user passed: whole batches are dealt.
    - A sampler that deals by itself (it has ``rank`` and ``num_replicas``, as torch's DistributedSampler): left alone.
    - An iterable dataset: dealt in complete rounds (:class:`~fabric.data.rounds.Rounds`), whatever ``uneven`` says, or
      left alone when it has a true attribute ``shards_itself``. All ranks have to iterate it in the same order. Its
      worker processes have the same streams on every rank, from a base seed that is agreed on; without workers only
      what its ``__iter__`` draws before it returns is agreed on, so it should shuffle by epoch (``set_epoch``).
    - Workers of map-style datasets have streams of their own on each rank, those of rank 0 exactly torch's, unless
      ``seed_workers`` is false.

    Args:
        loader: a DataLoader, or an object of a subclass.
        rank: of this process, ``0 <= rank < num_replicas``.
        num_replicas: number of ranks to deal to.
        device: where batches go; ``None`` leaves them as the loader made them.
        uneven: ``"pad"`` repeats samples from the start of the order until all ranks have equally many, as torch's
            DistributedSampler does; ``"drop"`` leaves the incomplete last round out. A loader with ``drop_last`` leaves
            it out in any case, since the plain loop drops those samples.
        shard: False gives every rank the whole data.
        overlap_copies: whether a CUDA device gets its batches from pinned memory, on a stream of their own; see
            ``[Note: Overlapped copies]``. False: in turn with the computation, from memory as the loader pins it.
        agree: makes the ranks draw the same order although their random states differ: called at the start of each
            epoch as ``agree(key, state)``, in the same sequence on all ranks, it returns what rank 0 passed.
            ``None``: the states are taken to be the same. Not called when nothing random is drawn.
        name: tells the loaders of a job apart in the keys; the same on all ranks, another for each loader.
        seed_workers: False leaves the streams of workers as torch seeds them, equal on ranks with equal random states.
        underway: where the iterations that are going on over the loaders of a job are noted.
        began: is told of each iteration as ``began(key, progress, batches)``: a key that is the same on all ranks, how
            far it is, and how many batches it has, None when that is not known.

    Raises:
        ArgumentTypeError: ``loader`` is not a DataLoader.
        ConfigurationError: it is prepared already; ``rank``, ``num_replicas`` or ``uneven`` are out of range; or its
            sampler deals by itself, but for another rank or number of ranks.
    """
    _check_arguments(loader, rank, num_replicas, uneven)
    prepared = copy.copy(loader)
    # The copy must not reset or shut down the workers of the original.
    object.__setattr__(prepared, "_iterator", None)
    replicas = num_replicas if shard else 1
    start: Callable[[Callable[[], Iterator[Any]]], Iterator[Any]] = _at_once
    if isinstance(loader.dataset, IterableDataset):
        course = Course(None, loader.dataset, "samples", replicas, Streams())
        dealt = replicas > 1 and not getattr(loader.dataset, "shards_itself", False)
        if dealt:
            object.__setattr__(prepared, "dataset", Rounds(loader.dataset, rank, num_replicas))
            start = _with_one_base_seed(loader, agree, name)
    else:
        dealt = False
        course = _follow_indices(prepared, (rank, num_replicas) if shard else None, uneven, agree, name)
    if seed_workers and rank > 0 and loader.num_workers > 0 and not dealt:
        object.__setattr__(prepared, "worker_init_fn", WorkerSeeding(rank, loader.worker_init_fn))
    return FabricDataLoader(
        prepared,
        original=loader,
        course=course,
        start=start,
        move=_mover(prepared, device, overlap_copies),
        underway=[] if underway is None else underway,
        began=None if began is None else _telling(began, name, prepared, dealt),
    )


def _mover(prepared: DataLoader[Any], device: torch.device | None, overlap_copies: bool) -> Callable[[Any], Any] | None:
    """What moves a batch; pins the memory of a loader that has workers, whose results torch pins in a thread."""
    if device is None or device.type == "cpu":
        return None
    if device.type == "cuda" and overlap_copies:
        # Without workers torch would refuse to pin what a dataset has on a device already.
        pins = not prepared.pin_memory and prepared.num_workers == 0
        prepared.pin_memory = not pins
        return OverlappedCopies(device, pins=pins)
    return partial(to_device, device=device, non_blocking=bool(prepared.pin_memory))


def _telling(began: Began, name: str, prepared: DataLoader[Any], dealt: bool) -> Callable[[Pass], None]:
    numbers = count()

    def tell(current: Pass) -> None:
        length = None
        if dealt:  # in complete rounds
            length = 0
        elif not isinstance(prepared.dataset, IterableDataset):
            # Asked of an iterable dataset, torch would warn when there are more.
            with suppress(TypeError, NotImplementedError):
                length = len(prepared)
        began(f"{name}/{next(numbers)}", current, length)

    return tell


def _follow_indices(
    prepared: DataLoader[Any],
    place: tuple[int, int] | None,
    uneven: Literal["pad", "drop"],
    agree: Agree | None,
    name: str,
) -> Course:
    """Put the share of the sampler that belongs to ``place``, (rank, num_replicas), into the copy of the loader."""
    from_samples = prepared.batch_size is not None and hasattr(prepared.batch_sampler, "sampler")
    batches: Any = prepared.batch_sampler if from_samples else None
    whole_batches = batches is None and prepared.batch_sampler is not None
    order: Any = prepared.batch_sampler if whole_batches else prepared.sampler
    if batches is not None:
        order = batches.sampler
    streams = streams_of(order, prepared.generator)
    unit = "batches" if whole_batches else "samples"
    rank, replicas = place or (0, 1)
    own_place = dealt_by_hand(order)
    if place is not None and own_place is not None:
        _check_place(order, own_place, place)
    deals = replicas > 1 and own_place is None
    if not deals and hasattr(type(prepared), "state_dict"):
        return Course(None, order, unit, replicas, streams)
    share = Share(
        order,
        rank=rank if deals else 0,
        num_replicas=replicas if deals else 1,
        uneven="drop" if batches is not None and prepared.drop_last else uneven,
        agreement=Agreement(streams, agree, name),
    )
    indices = Indices(share, batches)
    if batches is not None or whole_batches:
        object.__setattr__(prepared, "batch_sampler", indices)
        if deals and not whole_batches:
            object.__setattr__(prepared, "sampler", share)
    else:
        object.__setattr__(prepared, "sampler", indices)
    return Course(indices, order, unit, replicas, streams)


def _with_one_base_seed(
    loader: DataLoader[Any], agree: Agree | None, name: str
) -> Callable[[Callable[[], Iterator[Any]]], Iterator[Any]]:
    """Start iterations such that torch draws the same base seed for the workers of every rank."""
    generator = loader.generator
    streams = Streams(("torch",)) if generator is None else Streams(generators=(generator,))
    agreement = Agreement(streams, agree, name)
    return lambda begin: agreement.draw(begin)[1]


def _at_once(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    return begin()


def _check_arguments(loader: Any, rank: int, num_replicas: int, uneven: str) -> None:
    if isinstance(loader, FabricDataLoader):
        raise ConfigurationError(
            "setup_dataloaders(loader) with a loader that is set up already",
            "dealt to the ranks a second time, most of its samples would never be seen",
            "the DataLoader itself",
            "fabric.setup_dataloaders(loader.original), or use the loader as it is",
        )
    if not isinstance(loader, DataLoader):
        raise ArgumentTypeError(
            f"setup_dataloaders({type(loader).__name__})",
            "without a sampler or a dataset there is nothing that could be dealt to the ranks",
            "a torch.utils.data.DataLoader, or an object of a subclass",
            "DataLoader(dataset, batch_size=None) around a dataset that makes whole batches; "
            "fabric.to_device(batch) in the loop over anything else",
        )
    if num_replicas < 1 or not 0 <= rank < num_replicas:
        raise ConfigurationError(
            f"prepare_dataloader(rank={rank}, num_replicas={num_replicas})",
            "there is no such rank",
            "num_replicas of 1 or more, 0 <= rank < num_replicas",
            "rank=fabric.global_rank, num_replicas=fabric.world_size",
        )
    if uneven not in ("pad", "drop"):
        raise ConfigurationError(
            f"setup_dataloaders(uneven={uneven!r})",
            "that says nothing about a last round that is not complete",
            "'pad' repeats samples, 'drop' leaves them out",
            "uneven='pad'",
        )


def _check_place(sampler: Any, place: tuple[int, int], actual: tuple[int, int]) -> None:
    if place != actual:
        kind = type(sampler).__name__
        raise ConfigurationError(
            f"setup_dataloaders(loader) with a {kind} for rank {place[0]} of {place[1]}",
            f"this is rank {actual[0]} of {actual[1]}: some samples would be seen twice, others never",
            "a sampler for this rank, or one that does not deal at all: fabric deals what it yields",
            f"DataLoader(dataset, shuffle=True), or {kind}(dataset, num_replicas={actual[1]}, rank={actual[0]})",
        )

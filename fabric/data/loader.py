"""The loader that the user gets back: theirs, which also moves its batches and knows where it is."""

import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from fabric.data.base import Course, Layout, Pass, Position
from fabric.data.rounds import Rounds
from fabric.data.whole import WholeRound, whole_round
from fabric.errors import CheckpointError, ConfigurationError
from fabric.seed import Streams

__all__ = ["FabricDataLoader"]

_OWN = frozenset(
    [
        "loader",
        "original",
        "_course",
        "_start",
        "_move",
        "_epoch",
        "_targets",
        "_known",
        "_pending",
        "_seen",
        "_underway",
        "_began",
    ]
)


class _Seen:
    """The pass that last handed out a batch, or began since."""

    __slots__ = ("current",)

    def __init__(self) -> None:
        self.current: Pass | None = None


def _put_last(entries: list[Any], entry: Any) -> None:
    if entry in entries:
        entries.remove(entry)
    entries.append(entry)


class FabricDataLoader:
    """A DataLoader whose batches are this rank's, on this rank's device, and which knows its position.

    Made by ``fabric.setup_dataloaders``. It iterates as the user's own loader would, each ``iter()`` an epoch of its
    own. Attributes are read from and written to the prepared copy. A loader with a ``state_dict`` of its own
    (torchdata's ``StatefulDataLoader``) keeps it.

    Batches go to the device one by one as they are asked for. A CUDA device gets them from pinned memory while it
    computes the step before, unless ``overlap_copies`` is false. On a CPU device they are handed out as the loader made
    them.

    Attributes:
        loader: the prepared copy, a DataLoader of the user's class.
        original: the user's own object, unchanged.
    """

    loader: DataLoader[Any]
    original: DataLoader[Any]

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        original: DataLoader[Any],
        course: Course,
        start: Callable[[Callable[[], Iterator[Any]]], Iterator[Any]],
        move: Callable[[Any], Any] | None,
        underway: list[Callable[[], WholeRound]],
        began: Callable[[Pass], None] | None = None,
    ) -> None:
        """Called by :func:`~fabric.data.prepare_dataloader`, which decides all of this.

        Args:
            loader: the prepared copy.
            original: the user's loader.
            course: how its batches come about.
            start: runs the function that starts an iteration.
            move: moves a batch to the device; ``None`` leaves it where it is.
            underway: each iteration that is going on has an entry here, which tells about the round that it is in; the
                one that handed out a batch last is the last.
            began: is told of each iteration.
        """
        self.loader, self.original, self._course, self._start = loader, original, course, start
        self._move = move
        candidates = (course.order, getattr(course.order, "sampler", None), original.dataset)
        self._targets: list[Any] = [target for target in candidates if callable(getattr(target, "set_epoch", None))]
        self._known = [0] * len(self._targets)
        self._epoch = 0
        self._pending: Position | None = None
        self._seen = _Seen()
        self._underway = underway
        self._began = began

    def __iter__(self) -> Iterator[Any]:
        self._adopt_epoch()
        current = self._next_pass()
        self._forward_epoch(current.epoch)
        self._epoch = current.epoch + 1
        self._seen.current = current
        if self._course.indices is not None:
            self._course.indices.current = current
        if self._began is not None:
            self._began(current)
        batches = self._resume(current) if current.resumed else self._start(self._begin)
        return self._handed_out(current, batches if self._move is None else map(self._move, batches))

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask for special methods: ours count. While being unpickled there is no loader yet.
        if name.startswith("__") or "loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def __repr__(self) -> str:
        return f"FabricDataLoader({self.loader!r})"

    def set_epoch(self, epoch: int) -> None:
        """Number the next epoch, and tell the sampler, batch sampler and dataset that have a ``set_epoch``.

        Not needed for numbers that just count up: each ``iter()`` does that, from 0 or from where a loaded state says.
        A position inside another epoch, loaded or reached, is given up.

        Args:
            epoch: 0 or more.

        Raises:
            ConfigurationError: ``epoch`` is not an integer, or negative.
        """
        try:
            number = operator.index(epoch)
        except TypeError:
            number = -1
        if number < 0:
            raise ConfigurationError(
                f"loader.set_epoch({epoch!r})", "epochs are counted from 0", "0, 1, ...", "loader.set_epoch(epoch)"
            )
        if self._pending is not None and self._pending.epoch != number:
            self._pending = None
        self._epoch = number
        self._seen.current = None
        self._forward_epoch(number)

    def state_dict(self) -> dict[str, Any]:
        """The position: the epoch, how much of it the user has received, and how to draw its order again.

        Right at any time, in the loop's body too: batches that workers have prefetched do not count. After an epoch was
        iterated to its end it is the start of the next one; after a ``break`` it is the place of the break (call
        :meth:`set_epoch` to give up the rest of the epoch). Of several iterations at once it is the position of the one
        that handed out the last batch.

        For an iterable dataset only the epoch can be resumed, unless the dataset has ``state_dict`` and
        ``load_state_dict`` and there are no worker processes: then its state is part of this.

        Returns:
            Dicts, lists, numbers, strings and tensors; ``torch.load(weights_only=True)`` reads them back.
        """
        if self._has_own_state:
            return self.loader.state_dict()  # pyright: ignore[reportAttributeAccessIssue]  # asked for just above
        if self._pending is not None:
            return replace(self._pending, layout=self._layout()).state()
        generators = [generator.get_state() for generator in self._generators]
        current = self._seen.current
        if current is None or current.finished:
            return Position(self._layout(), self._epoch, generators=generators).state()
        return Position(
            self._layout(),
            current.epoch,
            True,
            self._cursor(current),
            dict(current.drawn),
            generators,
            self._dataset.state_dict() if self._keeps_dataset_state else None,
        ).state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position: the next ``iter()`` goes on where :meth:`state_dict` was called.

        Its order is drawn again from the saved states, and what was received is left out without being loaded. After
        that ``iter()`` the streams that the process shares are what they were before it, so restore them separately
        (:func:`fabric.seed.set_rng_state`). When the position is behind the last batch of an epoch whose end was not
        reached (saved in the body of the loop), the next ``iter()`` has nothing left to hand out.

        Args:
            state: what :meth:`state_dict` returned, on any rank.

        Raises:
            CheckpointError: the state is of another kind of loader; the dataset, its length, the batch size or the kind
                of sampler differ; the number of ranks differs and does not divide the cursor; or it is inside an epoch
                and the dataset is iterable without a state of its own, or workers hand out batches out of order.
        """
        if self._has_own_state:
            self.loader.load_state_dict(state)  # pyright: ignore[reportAttributeAccessIssue]  # asked for just above
            return
        position = Position.from_state(state)
        position.check_fits(self._layout(), len(self._generators))
        position.skip(self._course.num_replicas, self._course.length())
        inside = position.begun
        if self._course.indices is None and (inside := position.cursor > 0):
            self._load_dataset(position)
        if inside and self.loader.num_workers > 1 and not getattr(self.loader, "in_order", True):
            raise CheckpointError(
                f"loader.load_state_dict() {position.cursor} {position.layout.unit} into epoch {position.epoch}",
                f"{self.loader.num_workers} workers with in_order=False hand out batches as they are ready: "
                "which ones were received is not known",
                "in_order=True, or a state saved at the end of an epoch",
                "DataLoader(..., in_order=True)",
            )
        for generator, saved in zip(self._generators, position.generators, strict=True):
            generator.set_state(saved)
        self._epoch = position.epoch
        self._pending = position if inside else None
        self._seen.current = None

    @property
    def _dataset(self) -> Any:
        return self.original.dataset

    @property
    def _has_own_state(self) -> bool:
        return hasattr(type(self.loader), "state_dict") and hasattr(type(self.loader), "load_state_dict")

    @property
    def _keeps_dataset_state(self) -> bool:
        has_state = hasattr(self._dataset, "state_dict") and hasattr(self._dataset, "load_state_dict")
        return self._course.indices is None and self.loader.num_workers == 0 and has_state

    @property
    def _generators(self) -> tuple[torch.Generator, ...]:
        own = self.loader.generator
        return tuple(dict.fromkeys((*self._course.streams.generators, *([] if own is None else [own]))))

    def _begin(self) -> Iterator[Any]:
        return iter(self.loader)

    def _resume(self, current: Pass) -> Iterator[Any]:
        """Begin without leaving a trace in the streams that torch draws the workers' base seed from.

        Drawing the order again says itself where the sampler's own generators go on.
        """
        replayed = self._course.streams.generators if current.replay else ()
        base = Streams(("torch",), tuple(each for each in self._generators if each not in replayed))
        before = base.state()
        batches = self._begin()
        base.restore(before)
        return batches

    def _handed_out(self, current: Pass, batches: Iterator[Any]) -> Iterator[Any]:
        seen, underway = self._seen, self._underway

        def told() -> WholeRound:
            return whole_round(self._course, current, self.loader.batch_size, isinstance(self.loader.dataset, Rounds))

        try:
            for batch in batches:
                current.received += 1
                seen.current = current
                if not underway or underway[-1] is not told:
                    _put_last(underway, told)
                yield batch
            current.finished = True
        finally:
            if told in underway:
                underway.remove(told)

    def _next_pass(self) -> Pass:
        position, self._pending = self._pending, None
        if position is None:
            return Pass(self._epoch)
        skip = position.skip(self._course.num_replicas, self._course.length())
        return Pass(position.epoch, position.cursor, skip, resumed=True, replay=position.drawn)

    def _adopt_epoch(self) -> None:
        """Follow a user who called ``set_epoch`` on their own sampler or dataset, as raw loops do."""
        for target, known in zip(self._targets, self._known, strict=True):
            epoch = getattr(target, "epoch", None)
            if isinstance(epoch, int) and epoch >= 0 and epoch != known:
                self.set_epoch(epoch)
                return

    def _forward_epoch(self, epoch: int) -> None:
        for target in self._targets:
            target.set_epoch(epoch)
        self._known = [getattr(target, "epoch", None) for target in self._targets]

    def _cursor(self, current: Pass) -> int:
        entries = 1 if self._course.unit == "batches" else self.loader.batch_size or 1
        cursor = current.start + current.received * entries * self._course.num_replicas
        length = self._course.length()
        # The last batch may be short; what was repeated to fill the last round counts as received.
        return cursor if length is None else min(cursor, length)

    def _layout(self) -> Layout:
        length = None
        if self._course.indices is not None:
            # A dataset need not have a length when its sampler knows one.
            with suppress(TypeError, NotImplementedError):
                length = len(self._dataset)
        kind = type(self._course.order).__name__
        return Layout(self._course.unit, self._course.num_replicas, self.loader.batch_size, length, kind)

    def _load_dataset(self, position: Position) -> None:
        if not self._keeps_dataset_state or position.dataset is None:
            raise CheckpointError(
                f"loader.load_state_dict() {position.cursor} samples into epoch {position.epoch}",
                f"the {type(self._dataset).__name__} is iterable: only itself knows how to go on from there",
                "a state saved at the end of an epoch; or, with num_workers=0, a dataset that has state_dict and "
                "load_state_dict",
                "def state_dict(self) and def load_state_dict(self, state) on the dataset, "
                "or save after the loop over the loader",
            )
        self._dataset.load_state_dict(position.dataset)

"""Where an iteration over a loader is, and what of it is saved.

[Note: Data] The *order* is what the user's own sampler yields in one epoch, the same on every rank: single samples or,
from a batch sampler, whole batches. It is *dealt*: this rank takes positions ``rank, rank + num_replicas, ...``. One
iteration over the loader is a *pass*. The *cursor* of a pass counts how many entries of the order all ranks together
have received, in the *unit* of the order, ``"samples"`` or ``"batches"``: it says where the pass is without saying how
many ranks there are.
"""

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from fabric.errors import CheckpointError
from fabric.seed import Streams

__all__ = ["Course", "IndexSampler", "Layout", "Pass", "Position"]

State = dict[str, Any]

_FORMAT = 1


@dataclass
class Pass:
    """One iteration over a loader.

    Attributes:
        epoch: its number.
        start: the cursor at which it began; not 0 in a resumed pass.
        skip: entries of this rank's share that were received before; they are not loaded again.
        resumed: whether it continues a saved pass.
        replay: states of the random streams to draw the order from again, by phase of the drawing.
        drawn: states of the random streams from which the order was drawn, by phase.
        opened: whether an order is already being drawn for it.
        received: batches that the user has received.
        finished: whether the user has been told that there are no more.
    """

    epoch: int
    start: int = 0
    skip: int = 0
    resumed: bool = False
    replay: Mapping[str, State] = field(default_factory=dict)
    drawn: dict[str, State] = field(default_factory=dict)
    opened: bool = False
    received: int = 0
    finished: bool = False


class IndexSampler(Protocol):
    """What torch's iterator goes through; it can be told which pass its next iteration belongs to.

    Attributes:
        current: that pass.
        share: this rank's entries of the order; its ``len`` may raise TypeError.
    """

    current: Pass

    @property
    def share(self) -> Sized: ...  # noqa: D102  # above


@dataclass(frozen=True)
class Course:
    """How the batches of a loader come about.

    Attributes:
        indices: the index sampler in the loader; ``None`` where fabric does not follow the indices (an iterable
            dataset, a loader that keeps its own state).
        order: the user's own sampler, or batch sampler, that makes the order.
        unit: what the cursor counts, ``"samples"`` or ``"batches"``.
        num_replicas: ranks that the order is dealt to, by fabric or by the sampler itself.
        streams: the random streams that the order is drawn from.
    """

    indices: IndexSampler | None
    order: Any
    unit: str
    num_replicas: int
    streams: Streams

    def length(self) -> int | None:
        """Entries that all ranks together receive in an epoch; ``None`` when that is not known."""
        try:
            return None if self.indices is None else len(self.indices.share) * self.num_replicas
        except (TypeError, NotImplementedError):
            return None


@dataclass(frozen=True)
class Layout:
    """What a loader has to have in common with the one whose position it takes over.

    Attributes:
        unit: what the cursor counts, ``"samples"`` or ``"batches"``.
        num_replicas: ranks that the order is dealt to.
        batch_size: samples in one rank's batch; ``None`` without automatic batching.
        dataset_length: number of samples; ``None`` when the dataset does not say.
        sampler: name of the class that makes the order.
    """

    unit: str
    num_replicas: int
    batch_size: int | None
    dataset_length: int | None
    sampler: str


@dataclass(frozen=True)
class Position:
    """A saved position; see ``[Note: Data]``.

    Attributes:
        layout: of the loader that saved it.
        epoch: number of the epoch, the next one if the last had ended.
        begun: whether an iteration over this epoch had begun, be it without a batch.
        cursor: entries of the order that were received on all ranks together.
        drawn: states of the random streams from which the order of this epoch was drawn, by phase; empty before that.
        generators: states of the generators that belong to the loader and its sampler.
        dataset: the dataset's own state, when it has one and is iterated in this process.
    """

    layout: Layout
    epoch: int
    begun: bool = False
    cursor: int = 0
    drawn: Mapping[str, State] = field(default_factory=dict)
    generators: list[Any] = field(default_factory=list)
    dataset: Any = None

    def state(self) -> State:
        """Plain dicts, numbers, strings and tensors."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "layout"}
        return {"format": _FORMAT, **vars(self.layout), **own, "drawn": dict(self.drawn)}

    @classmethod
    def from_state(cls, state: Any) -> "Position":
        """Read what :meth:`state` wrote.

        Raises:
            CheckpointError: it is something else, or a newer format.
        """
        names = [item.name for item in (*fields(Layout), *fields(cls)) if item.name != "layout"]
        missing = [name for name in names if not isinstance(state, Mapping) or name not in state]
        if missing or state["format"] != _FORMAT:
            reason = f"it lacks {missing}" if missing else f"it has format {state['format']!r}, not {_FORMAT}"
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise CheckpointError(
                f"loader.load_state_dict({found})",
                reason,
                "what state_dict() of a prepared loader returned",
                "loader.load_state_dict(saved_loader_state)",
            )
        layout = Layout(**{item.name: state[item.name] for item in fields(Layout)})
        return cls(layout, **{item.name: state[item.name] for item in fields(cls) if item.name != "layout"})

    def check_fits(self, layout: Layout, generators: int) -> None:
        """Refuse a loader that would put other samples at the same places.

        Args:
            layout: of the loader that is to continue.
            generators: how many generators it and its sampler own.

        Raises:
            CheckpointError: the two differ in something other than the number of ranks.
        """
        then, now = dict(vars(self.layout)), dict(vars(layout))
        then["generators"], now["generators"] = len(self.generators), generators
        for name in ("unit", "sampler", "dataset_length", "batch_size", "generators"):
            if then[name] != now[name]:
                raise CheckpointError(
                    f"loader.load_state_dict() at epoch {self.epoch}, {self.cursor} {self.layout.unit} into it",
                    f"the saved loader has {name} {then[name]!r}, this one has {now[name]!r}: "
                    "the same position means other samples",
                    f"a loader with {name} {then[name]!r}",
                    "a loader made as it was when the state was saved, or leave its state out to start afresh",
                )

    def skip(self, num_replicas: int, length: int | None) -> int:
        """How many entries of its share each of ``num_replicas`` ranks has behind it.

        Args:
            num_replicas: number of ranks now.
            length: entries that all ranks receive in an epoch; ``None`` when that is not known.

        Raises:
            CheckpointError: the cursor is not a multiple of ``num_replicas``, and the order is not at its end.
        """
        share, rest = divmod(self.cursor, num_replicas)
        if not rest:
            return share
        if length is not None and self.cursor >= length:
            return share + 1
        valid = [number for number in range(1, 65) if self.cursor % number == 0]
        raise CheckpointError(
            f"loader.load_state_dict() with {num_replicas} ranks, saved with {self.layout.num_replicas}",
            f"{self.cursor} {self.layout.unit} are behind it, which {num_replicas} ranks cannot have received evenly",
            f"a number of ranks that divides {self.cursor}: {', '.join(map(str, valid))}",
            f"devices={self.layout.num_replicas}, or save at the end of an epoch",
        )

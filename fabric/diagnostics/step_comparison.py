"""The comparison of steps with neighboring ranks, through the store."""

# See [Note: Uneven inputs] in uneven_inputs.py.

from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from fabric.diagnostics.bypass import BypassChecks
from fabric.errors import UsageError
from fabric.store import JobStore

__all__ = ["End", "Progress", "Step", "StepComparison"]


# The three classes are published as JSON lists of their fields, in this order.


class Progress(NamedTuple):
    """How far a rank has come, in steps and collectives.

    A *step* synchronizes gradients over all ranks, or gathers sharded parameters over *peers*. A
    *shared step* is one that all ranks take.

    Attributes:
        steps: the number of all steps of the rank.
        shared_steps: the number of its shared steps. None if the rank is about to take a step that
            is not shared.
        early_steps: the number of steps before the rank's first iteration over a loader. Ranks with
            different numbers of early steps are not compared.
        collectives: the number of collectives over all ranks so far.
    """

    steps: int
    shared_steps: int | None
    early_steps: int
    collectives: int

    def comparable_steps(self, is_peer: bool) -> int | None:
        """Return the number of steps that a neighbor takes, too: with a peer, all steps.

        None if the neighbor does not take the step that the rank is about to take.

        Args:
            is_peer: whether the neighbor is a peer.
        """
        return self.steps if is_peer else self.shared_steps


class Step(NamedTuple):
    """A step that a rank is about to take, and the loop over a loader in which it is.

    Attributes:
        progress: the progress of the rank, including this step.
        kind: what a sharded module runs: its class, and whether it runs without gradients. Empty
            for a module that is not sharded.
        loader: the name of the loader.
        iteration: the number of the iteration over this loader, from 1.
        iterations: the number of iterations that the rank has begun, over all loaders.
        batches_of_previous_iteration: the number of batches in the iteration before, over any
            loader.
    """

    progress: Progress
    kind: str
    loader: str
    iteration: int
    iterations: int
    batches_of_previous_iteration: int


class End(NamedTuple):
    """The first collective of a rank after the end of an iteration. The end of the job is one, too.

    Attributes:
        progress: the progress of the rank, including this collective.
        batches: the number of batches in the iteration.
    """

    progress: Progress
    batches: int


class StepComparison:
    """Compares steps, and collectives after iterations, between this rank and its *neighbors*.

    The neighbors are the ranks before and after this one. The *peers* are those neighbors that
    gather the parameters of sharded modules with this rank. A *shared step* is one that all ranks
    take, and not only peers.

    Each method first publishes what this rank does, and then reads what the neighbors have
    published. So of two ranks, the one that reads last sees what the other has published.

    Args:
        store: the store in which the ranks publish.
        bypass: knows the neighbors and the peers.
    """

    def __init__(self, store: JobStore, bypass: BypassChecks) -> None:
        """Publish nothing yet."""
        self._store = store
        self._rank = store.rank
        self._bypass = bypass
        self._neighbors = bypass.world.neighbours

    @property
    def compares_only_peers(self) -> bool:
        """Whether all neighbors are peers, so that it does not matter which steps are shared."""
        return self._bypass.peers.issuperset(self._neighbors)

    def check_step(self, step: Step, must_match_iteration: bool) -> None:
        """Publish a step, and raise if a neighbor will not take it.

        The neighbors are the ranks before and after this one. This rank publishes before it reads,
        as each neighbor does. So of two ranks that do not match, the one that reads last raises.

        Args:
            step: the step that this rank is about to take.
            must_match_iteration: whether neighbors must take the step in the same iteration over
                the loader. This is so if each iteration divides a new order over the ranks.

        Raises:
            UsageError: a neighbor has run out of batches, or takes the step in a loop that does not
                match.
        """
        self._store.publish("step", step)
        is_of_sharded_module = step.kind != ""
        if must_match_iteration or is_of_sharded_module:
            self._check_loops(step, must_match_iteration)
        for neighbor, end in self._read_ends():
            number = _missed_step(step.progress, end.progress, self._is_peer(neighbor))
            if number is not None:
                self._raise_uneven_inputs(
                    f"step {number} of rank {self._rank}",
                    step=number,
                    exhausted_rank=neighbor,
                    batches=end.batches,
                    rank_with_batch=self._rank,
                )

    def check_end(self, end: End) -> None:
        """Publish the end of an iteration, and raise if a neighbor takes one more step.

        The neighbors are the ranks before and after this one.

        Args:
            end: the end of the iteration on this rank.

        Raises:
            UsageError: a neighbor takes one more step.
        """
        self._store.publish("end", end)
        for neighbor, step in self._read_steps():
            number = _missed_step(step.progress, end.progress, self._is_peer(neighbor))
            if number is not None:
                self._raise_uneven_inputs(
                    f"a collective, or the end of the job, after step {number - 1} of rank "
                    f"{self._rank}",
                    step=number,
                    exhausted_rank=self._rank,
                    batches=end.batches,
                    rank_with_batch=neighbor,
                )

    def _is_peer(self, neighbor: int) -> bool:
        """Return whether a neighbor gathers the parameters of sharded modules with this rank."""
        return neighbor in self._bypass.peers

    def _check_loops(self, step: Step, must_match_iteration: bool) -> None:
        """Raise if a neighbor takes the same step in a loop that does not match.

        The neighbors are the ranks before and after this one. Two loops do not match if they run
        different kinds of passes, or if they are different iterations over one shuffled loader.

        Args:
            step: the step that this rank is about to take.
            must_match_iteration: whether neighbors must take the step in the same iteration over
                the loader.
        """
        for neighbor, neighbor_step in self._read_steps():
            number = _common_step(step.progress, neighbor_step.progress, self._is_peer(neighbor))
            is_same_loader = neighbor_step.loader == step.loader
            is_same_iteration = is_same_loader and neighbor_step.iteration == step.iteration
            # The number is None if the neighbor is about to take another step.
            if number is None or is_same_iteration:
                continue
            if neighbor_step.kind != step.kind:
                self._raise_different_kinds(number, step, neighbor, neighbor_step)
            if must_match_iteration and is_same_loader:
                raise UsageError(
                    f"step {number} of rank {self._rank}",
                    problem=f"it is in iteration {step.iteration} over its loader and rank "
                    f"{neighbor} in iteration {neighbor_step.iteration}: their batches are shares "
                    "of different orders, so that samples are seen twice or never",
                    expected="iter(loader) equally often on all ranks",
                    suggestion="next(iter(loader.original)) for a look at a batch on one rank",
                )

    def _read_steps(self) -> Iterator[tuple[int, Step]]:
        """Yield the latest step of each neighbor. Ranks that have published none are left out."""
        for neighbor, published in self._store.read("step", self._neighbors).items():
            # JSON has turned the named tuples into lists.
            progress, *loop = published
            yield neighbor, Step(Progress(*progress), *loop)

    def _read_ends(self) -> Iterator[tuple[int, End]]:
        """Yield the latest end of each neighbor. Ranks that have published none are left out."""
        for neighbor, published in self._store.read("end", self._neighbors).items():
            # JSON has turned the named tuples into lists.
            progress, batches = published
            yield neighbor, End(Progress(*progress), batches)

    def _raise_different_kinds(
        self, number: int, step: Step, neighbor: int, neighbor_step: Step
    ) -> NoReturn:
        """Raise a UsageError for a step that two ranks take in loops of different kinds.

        One loop is later than the other, such as that of the validation after that of the training.
        The rank in the later loop ran out of batches in the loop before, while the other rank is
        still in that loop. It is the rank that has begun more iterations. If both have begun the
        same number, it is not known which rank it is. The number of batches in the iteration before
        then decides, and after that the number of the rank, so that both ranks name the same rank.

        Args:
            number: the number of the step.
            step: the step as this rank takes it.
            neighbor: the rank of the neighbor.
            neighbor_step: the step as the neighbor takes it.
        """
        order = (step.iterations, step.batches_of_previous_iteration, self._rank)
        neighbor_order = (
            neighbor_step.iterations,
            neighbor_step.batches_of_previous_iteration,
            neighbor,
        )
        exhausted_rank = neighbor
        rank_with_batch = self._rank
        batches = neighbor_step.batches_of_previous_iteration
        is_this_rank_exhausted = order > neighbor_order
        if is_this_rank_exhausted:
            exhausted_rank = self._rank
            rank_with_batch = neighbor
            batches = step.batches_of_previous_iteration
        self._raise_uneven_inputs(
            f"step {number} of rank {self._rank}",
            step=number,
            exhausted_rank=exhausted_rank,
            batches=batches,
            rank_with_batch=rank_with_batch,
        )

    def _raise_uneven_inputs(
        self, request: str, *, step: int, exhausted_rank: int, batches: int, rank_with_batch: int
    ) -> NoReturn:
        """Raise a UsageError for a rank that ran out of batches.

        Args:
            request: what this rank was about to do.
            step: the number of the step that only one rank takes.
            exhausted_rank: the rank that ran out of batches.
            batches: how many batches it had.
            rank_with_batch: the rank that has a batch for the step.
        """
        remedies = [
            'setup_dataloaders(loader, use_distributed_sampler=False, uneven="shortest") if every '
            'rank has data of its own, or "longest" with '
            "fabric.backward(losses.sum(), weight=len(losses))",
            "setup_dataloaders(loader) if all ranks have the same data",
        ]
        # Sharded modules do not support fabric.join.
        if not self._bypass.is_sharded:
            remedies.append("or with fabric.join(model): for batch in loader: ...")
        raise UsageError(
            request,
            problem=f"rank {exhausted_rank} ran out of batches: its loader ended after {batches}, "
            f"and it takes no part in step {step}, for which rank {rank_with_batch} has a batch "
            "and would wait",
            expected="equally many batches on every rank",
            suggestion="; ".join(remedies),
        )


def _common_step(first: Progress, second: Progress, is_peer: bool) -> int | None:
    """Return the number of the step that two neighbors are about to take together.

    None if they are about to take different steps, or if they are not compared.

    Args:
        first: the progress of one rank, including its step.
        second: the progress of its neighbor, including the step of the neighbor.
        is_peer: whether the two ranks gather parameters together.
    """
    number = first.comparable_steps(is_peer)
    if first.early_steps != second.early_steps or number != second.comparable_steps(is_peer):
        return None
    return number


def _missed_step(step: Progress, end: Progress, is_peer: bool) -> int | None:
    """Return the number of a step for which a rank would wait, since its neighbor does not take it.

    The neighbor has run out of batches, and makes a collective where the rank takes the step. None
    if the rank would not wait, or if the two ranks are not compared.

    Args:
        step: the progress of the rank that takes the step, including the step.
        end: the progress of its neighbor at the first collective after an iteration, including the
            collective.
        is_peer: whether the two ranks gather parameters together.
    """
    number = step.comparable_steps(is_peer)
    steps_at_end = end.comparable_steps(is_peer)
    if number is None or steps_at_end is None or step.early_steps != end.early_steps:
        return None
    # If the rank has made this collective, too, it did so before the step. Then the two ranks do
    # not meet in different calls.
    lacks_collective = step.collectives < end.collectives
    is_next_step = number == steps_at_end + 1
    return number if is_next_step and lacks_collective else None

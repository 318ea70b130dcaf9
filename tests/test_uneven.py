"""Ranks with different numbers of batches meet an error, or use ``fabric.join``, and never hang."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice, product, repeat
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from fabric import Fabric
from fabric.diagnostics.batch_counts import DividedOrder
from fabric.diagnostics.bypass import BypassChecks
from fabric.diagnostics.recorder import JOB, Entry, FlightRecorder
from fabric.diagnostics.uneven_inputs import UnevenInputDetector
from fabric.errors import RankFailedError
from fabric.hooks import Hooks
from fabric.launchers.base import node_worlds
from fabric.store import JobStore
from fabric.strategies import FSDPStrategy
from tests.laws.base import profile
from tests.models import Net
from tests.ranks import outcome, run_in_ranks
from tests.sampling import sampled


class Samples(IterableDataset[Tensor]):
    """A number of samples that the dataset does not tell."""

    shards_itself = True

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Tensor]:
        return repeat(torch.ones(4), self.number)


def loader(fabric: Fabric, batches: int, has_length: bool) -> Any:
    data: Any = Samples(batches)
    if has_length:
        data = [torch.ones(4)] * batches
    return fabric.setup_dataloaders(DataLoader(data, batch_size=1), use_distributed_sampler=False)


def net(fabric: Fabric, plain: nn.Module | None = None) -> tuple[Any, torch.optim.Optimizer]:
    if plain is None:
        plain = Net()
    return fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))


def train(fabric: Fabric, model: Any, optimizer: Any, batches: Any) -> None:
    for x in batches:
        loss = model(x).sum()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def uneven_epoch(fabric: Fabric, batches: tuple[int, int], has_length: bool, then: str) -> None:
    model, optimizer = net(fabric)
    train(fabric, model, optimizer, loader(fabric, batches[fabric.global_rank], has_length))
    if then == "collective":
        fabric.barrier()


@pytest.mark.parametrize("then", ["collective", "end"])
@pytest.mark.parametrize(
    ("batches", "has_length"), [((3, 5), True), ((5, 3), False), ((0, 2), True)]
)
def test_a_rank_that_runs_out_of_batches_is_named_with_the_step(
    batches: tuple[int, int], has_length: bool, then: str
) -> None:
    early = batches.index(min(batches))
    with pytest.raises(RankFailedError) as caught:
        run_in_ranks(uneven_epoch, batches, has_length, then)
    text = str(caught.value)
    assert f"rank {early} ran out of batches: its loader ended after {min(batches)}" in text
    assert f"step {min(batches) + 1}, for which rank {1 - early} has a batch" in text
    assert 'use_distributed_sampler=False, uneven="shortest"' in text
    assert 'uneven="drop"' not in text
    assert "fabric.join(model)" in text


def uneven_epoch_with_a_policy(fabric: Fabric, uneven: Any) -> int:
    """Train on 3 batches on rank 0 and 5 on rank 1, and return the number of steps."""
    model, optimizer = net(fabric)
    data: Any = [torch.ones(4)] * (3 + 2 * fabric.global_rank)
    batches = fabric.setup_dataloaders(
        DataLoader(data, batch_size=1), use_distributed_sampler=False, uneven=uneven
    )
    steps = 0
    for batch in batches:
        losses = model(batch).sum(dim=1)
        fabric.backward(losses.sum(), weight=len(losses))
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps


def test_the_remedies_of_the_error_work_and_those_of_sharded_data_do_not_help() -> None:
    assert run_in_ranks(uneven_epoch_with_a_policy, "shortest") == [3, 3]
    assert run_in_ranks(uneven_epoch_with_a_policy, "longest") == [5, 5]
    with pytest.raises(RankFailedError) as caught:
        run_in_ranks(uneven_epoch_with_a_policy, "drop")
    suggestion = str(caught.value).partition("Write: ")[2]
    assert '"shortest"' in suggestion
    assert '"drop"' not in suggestion
    assert '"pad"' not in suggestion


def resume_at_different_positions(fabric: Fabric) -> None:
    """Train on 4 samples that every rank has, of which rank 0 has received 1 and rank 1 has 2."""
    model, optimizer = net(fabric, nn.Linear(4, 1))
    data: Any = [torch.ones(4)] * 4
    samples = fabric.setup_dataloaders(
        DataLoader(data, batch_size=None), use_distributed_sampler=False
    )
    for _ in islice(samples, fabric.global_rank + 1):
        pass
    samples.load_state_dict(samples.state_dict())
    train(fabric, model, optimizer, samples)
    fabric.barrier()


def test_ranks_that_resume_with_different_numbers_of_batches_meet_the_error() -> None:
    with pytest.raises(
        RankFailedError, match="rank 1 ran out of batches: its loader ended after 2"
    ):
        run_in_ranks(resume_at_different_positions)


# Loops, training or validation, with the batches of each rank.
Loop = tuple[str, tuple[int, ...]]
TRAIN: Loop = ("train", (2, 2))
VALIDATE: Loop = ("validate", (2, 2))


def sharded_loops(
    fabric: Fabric, loops: tuple[Loop, ...], has_length: bool, models: int, then: str
) -> None:
    pairs = [net(fabric, nn.Linear(4, 2)) for _ in range(models)]
    for kind, batches in loops:
        for x in loader(fabric, batches[fabric.global_rank], has_length):
            for model, optimizer in pairs:
                if kind == "train":
                    train(fabric, model, optimizer, [x])
                else:
                    with torch.no_grad():
                        model(x)
    if then == "collective":
        fabric.barrier()


def uneven_cases() -> Iterator[tuple[Any, ...]]:
    """Generate loops of which one is uneven, what follows them, the data and the models."""
    for uneven, even in (("train", VALIDATE), ("validate", TRAIN)):
        for batches, before, (after, then), has_length, models in product(
            ((3, 5), (5, 3), (0, 2), (2, 1)),
            ((), (TRAIN,), (VALIDATE,)),
            (((), "end"), ((), "collective"), ((even,), "end")),
            (True, False),
            (1, 2),
        ):
            yield (*before, (uneven, batches), *after), then, has_length, models


@pytest.mark.parametrize(
    ("loops", "then", "has_length", "models"),
    sampled(
        uneven_cases(),
        quick=[
            ((("train", (3, 5)),), "end", True, 1),
            ((TRAIN, ("validate", (5, 3))), "collective", False, 1),
            ((("train", (2, 1)), VALIDATE), "end", True, 2),
            ((("validate", (0, 2)), TRAIN), "end", True, 1),
        ],
        slow=16,
    ),
)
def test_under_fsdp_too_a_rank_that_runs_out_of_batches_is_named(
    loops: tuple[Loop, ...], then: str, has_length: bool, models: int
) -> None:
    with pytest.raises(RankFailedError) as caught:
        run_in_ranks(sharded_loops, loops, has_length, models, then, strategy="fsdp")
    number = 0
    while loops[number] in (TRAIN, VALIDATE):
        number += 1
    batches = loops[number][1]
    early = batches.index(min(batches))
    steps = models * (2 * number + min(batches))
    text = str(caught.value)
    assert f"rank {early} ran out of batches: its loader ended after {min(batches)}" in text
    assert f"step {steps + 1}, for which rank {1 - early} has a batch" in text
    for uneven in ("shortest", "longest"):
        assert f'"{uneven}"' in text
    assert "fabric.join" not in text


def hybrid() -> FSDPStrategy:
    return FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2))


@pytest.mark.parametrize(
    ("batches", "kind"),
    [((1, 1, 2, 2), "train"), pytest.param((2, 2, 2, 1), "validate", marks=pytest.mark.slow)],
)
def test_under_hybrid_shard_the_ranks_that_wait_for_each_other_are_compared(
    batches: Any, kind: str
) -> None:
    with pytest.raises(RankFailedError, match="ran out of batches: its loader ended after 1"):
        run_in_ranks(sharded_loops, ((kind, batches),), True, 1, "end", ranks=4, strategy=hybrid())


def sharded_and_even(fabric: Fabric) -> str:
    """Make equal passes on all ranks that gather together, from loaders of different lengths."""
    model, optimizer = net(fabric, nn.Linear(4, 2))
    plain = Net()
    row = fabric.global_rank // 2
    batches = loader(fabric, 3 + 2 * row, has_length=fabric.world_size > 2)
    batches_of_rank_0 = 4 if fabric.global_rank == 0 else 0

    def loops() -> None:
        for _ in range(2):
            train(fabric, model, optimizer, islice(batches, 3))
            with torch.no_grad():
                # The two rows of a hybrid mesh do not gather from each other.
                for x in batches:
                    model(x)
                for x in loader(fabric, batches_of_rank_0, has_length=True):
                    plain(x)
            fabric.barrier("validated")
        with fabric.no_backward_sync(model):
            loss = model(torch.ones(1, 4)).sum()
            fabric.backward(loss)
        train(fabric, model, optimizer, islice(chain.from_iterable(repeat(batches)), 8))

    return outcome(loops)


def test_equal_passes_of_sharded_models_are_no_error() -> None:
    results = run_in_ranks(sharded_and_even, strategy="fsdp")
    assert results == ["fine"] * 2
    results = run_in_ranks(sharded_and_even, ranks=4, strategy=hybrid())
    assert results == ["fine"] * 4


def even_in_the_end(fabric: Fabric, has_length: bool) -> str:
    """Take equal steps on all ranks, from loaders of different lengths."""
    model, optimizer = net(fabric)
    batches = loader(fabric, 3 + 2 * fabric.global_rank, has_length)

    def loops() -> None:
        for _ in range(2):
            train(fabric, model, optimizer, islice(batches, 3))
            fabric.all_reduce(1.0)
            with torch.no_grad():
                for x in batches:
                    model.module(x)
            fabric.barrier("validated")
        train(fabric, model, optimizer, islice(chain.from_iterable(repeat(batches)), 16))
        fabric.all_reduce(1.0)
        fabric.all_reduce(1.0)
        train(fabric, model, optimizer, islice(batches, 2))

    return outcome(loops)


@pytest.mark.parametrize("has_length", [True, False])
def test_loaders_of_different_lengths_alone_are_no_error(has_length: bool) -> None:
    results = run_in_ranks(even_in_the_end, has_length)
    assert results == ["fine", "fine"]


# -- fabric.join -----------------------------------------------------------------------------------


def inputs(rank: int) -> list[Tensor]:
    """Return one batch for rank 0, two for rank 1, and so on."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 4, generator=generator) for _ in range(rank + 1)]


def flat(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def joined(fabric: Fabric, divide: bool) -> tuple[Tensor, str]:
    torch.manual_seed(0)
    # Without buffers, which forward passes share.
    model, optimizer = net(fabric, nn.Linear(4, 1))
    with fabric.join(model, divide_by_initial_world_size=divide):
        train(fabric, model, optimizer, inputs(fabric.global_rank))
    train(fabric, model, optimizer, inputs(fabric.global_rank)[:1])
    # After the block no rank waits for another.
    with torch.no_grad():
        for _ in range(fabric.global_rank):
            model(torch.ones(1, 4))
    return flat(model), fabric.describe()


def by_hand(ranks: int, divide: bool) -> Tensor:
    """Train in one process, with the gradients added and divided as torch documents it."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in [*range(ranks), 0]:
        # Rank r has r + 1 batches.
        ranks_with_a_batch = range(step, ranks)
        divisor = ranks if divide else len(ranks_with_a_batch)
        for rank in ranks_with_a_batch:
            loss = model(inputs(rank)[step]).sum() / divisor
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


@pytest.mark.parametrize("divide", [True, False])
def test_joined_ranks_end_with_the_documented_result_and_train_on_from_there(divide: bool) -> None:
    expected = by_hand(3, divide)
    for values, _ in run_in_ranks(joined, divide, ranks=3):
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


def test_joined_ranks_end_with_one_loss_scale() -> None:
    (first, first_text), (second, second_text) = run_in_ranks(joined, True, precision="16-mixed")
    assert torch.equal(first, second)
    scale_lines = re.findall(".*loss scale.*", first_text)
    assert scale_lines
    assert re.findall(".*loss scale.*", second_text) == scale_lines


def two_modules(fabric: Fabric) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    first, first_optimizer = net(fabric)
    second, second_optimizer = net(fabric)
    with fabric.join([first, second]):
        for x in inputs(fabric.global_rank):
            train(fabric, first, first_optimizer, [x])
            train(fabric, second, second_optimizer, [x])
    return flat(first), flat(second)


def test_several_modules_are_joined() -> None:
    results = run_in_ranks(two_modules)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def refused_in_join(fabric: Fabric) -> dict[str, str]:
    model, _ = net(fabric)
    second_model, _ = net(fabric)
    x = torch.ones(1, 4)

    def within(action: Any, *models: Any) -> str:
        def run() -> None:
            with fabric.join(models or model):
                action()

        return outcome(run)

    def without_gradients() -> None:
        with torch.no_grad():
            model(x)

    def nested() -> None:
        with fabric.join(model):
            pass

    return {
        "collective": within(lambda: fabric.all_reduce(1.0)),
        "save": within(lambda: fabric.save("never.pt", {})),
        "without gradients": within(without_gradients),
        "nested": within(nested),
        "order": within(lambda: second_model(x), model, second_model),
        "not joined": outcome(lambda: fabric.join(nn.Linear(1, 1))),
    }


def test_what_joined_ranks_cannot_answer_for_is_refused() -> None:
    for rank, results in enumerate(run_in_ranks(refused_in_join)):
        for result in results.values():
            assert "Error" in result, results
        text = f"a collective over all ranks inside of fabric.join on rank {rank}"
        assert text in results["collective"]
        assert "inside of fabric.join" in results["save"]
        assert "without gradients" in results["without gradients"]
        assert "the next module is Net" in results["order"]


def two_forwards_in_turn(fabric: Fabric) -> str:
    model, _ = net(fabric)

    def run() -> None:
        with fabric.join(model):
            model(torch.ones(1, 4))
            model(torch.ones(1, 4))

    return outcome(run)


def test_a_second_forward_pass_before_the_backward_pass_is_refused_in_join() -> None:
    for result in run_in_ranks(two_forwards_in_turn):
        assert "the backward pass of Net has not been made" in result


def join_anyway(fabric: Fabric) -> str:
    def run() -> None:
        model, optimizer = net(fabric)
        with fabric.join(model):
            train(fabric, model, optimizer, inputs(0))
            fabric.all_reduce(1.0)

    return outcome(run)


def test_join_does_nothing_in_one_process_and_fsdp_says_what_is_possible() -> None:
    results = run_in_ranks(join_anyway, ranks=1)
    assert results == ["fine"]
    results = run_in_ranks(join_anyway, strategy="dp")
    assert results == ["fine"]
    for result in run_in_ranks(join_anyway, strategy="fsdp"):
        assert 'uneven="drop"' in result
        assert "needs all ranks" in result


# -- the order of steps and collectives, without processes -----------------------------------------


class Progress:
    def __init__(self) -> None:
        self.received_batches = 0
        self.is_finished = False


class Rank(NamedTuple):
    detector: UnevenInputDetector
    checks: BypassChecks
    recorder: FlightRecorder
    positions: list[Progress]

    @property
    def progress(self) -> Progress:
        """The position of the latest iteration."""
        return self.positions[-1]

    def begin(self, batches: int | None) -> None:
        """Begin an iteration over the only loader."""
        self.positions.append(Progress())
        self.detector.on_iteration("0", self.progress, batches, DividedOrder(False, None))

    def take_step(self) -> None:
        """Receive a batch and start a forward pass, as the loader and the guard of a module do."""
        self.progress.received_batches += 1
        next(self.checks.step_counter)
        if self.checks.on_step is not None:
            self.checks.on_step(cast(Any, SimpleNamespace(is_sharded=False)))

    def start_collective(self) -> None:
        """Count a collective over all ranks, and check it, as the recorder does."""
        self.recorder.counts[JOB] += 1
        for check in self.recorder.checks:
            check(Entry(JOB, (), 1, "barrier", "", ""), cast(Any, None))

    def end(self) -> None:
        self.progress.is_finished = True
        self.detector.finish()


def make_rank(store: JobStore) -> Rank:
    checks = BypassChecks(node_worlds(store.size)[store.rank], Hooks())
    recorder = FlightRecorder()
    detector = UnevenInputDetector(recorder, store, checks)
    return Rank(detector, checks, recorder, [Progress()])


def make_ranks(number: int) -> list[Rank]:
    store = dist.HashStore()
    return [make_rank(JobStore(store, rank, number)) for rank in range(number)]


@pytest.mark.parametrize("first", ["the one that finishes", "the one that goes on"])
def test_the_second_of_two_ranks_raises(first: str) -> None:
    early, late = make_ranks(2)
    early.begin(1)
    late.begin(2)
    early.take_step()
    late.take_step()
    actions = [early.end, late.take_step]
    if first == "the one that goes on":
        actions.reverse()
    assert outcome(actions[0]) == "fine"
    assert "rank 0 ran out of batches: its loader ended after 1" in outcome(actions[1])


def test_a_loop_with_equal_numbers_calls_no_detector_but_its_steps_count() -> None:
    ranks = make_ranks(2)
    for rank in ranks:
        rank.begin(4)
        assert rank.checks.on_step is not None
        rank.take_step()
    # Rank 0 has not read the number of rank 1, which has begun after the first step of rank 0.
    assert ranks[0].checks.on_step is not None
    assert ranks[1].checks.on_step is None
    for _ in range(3):
        for rank in ranks:
            rank.take_step()
            assert rank.checks.on_step is None
    for rank in ranks:
        rank.end()
    early, late = ranks
    late.begin(2)
    early.begin(1)
    early.take_step()
    late.take_step()
    assert outcome(early.end) == "fine"
    assert "it takes no part in step 6, for which rank 1 has a batch" in outcome(late.take_step)


@pytest.mark.parametrize("counts", [(3, 5), (None, None), (None, 4)])
def test_a_loop_with_different_or_unknown_numbers_calls_the_detector_in_each_step(
    counts: tuple[int | None, int | None],
) -> None:
    ranks = make_ranks(2)
    for rank, batches in zip(ranks, counts, strict=True):
        rank.begin(batches)
    for _ in range(3):
        for rank in ranks:
            rank.take_step()
            assert rank.checks.on_step is not None


def test_a_rank_that_steps_before_its_first_iteration_is_not_blamed() -> None:
    iterating, stepping = make_ranks(2)
    iterating.begin(1)
    for rank in (iterating, stepping):
        rank.take_step()
    stepping.begin(None)
    for rank in (iterating, stepping):
        rank.take_step()
    assert outcome(stepping.end) == "fine"
    assert outcome(iterating.end) == "fine"


# What a rank does next: begin an iteration, take a step in it or outside, end it, or a collective.
Action = Literal["begin", "step", "end", "collective"]
WAITING = ("step", "collective")  # the actions for which ranks wait for each other


class RandomRank(NamedTuple):
    """A rank with the actions of its program, of which some begin an iteration."""

    rank: Rank
    actions: list[tuple[Action, int | None]]

    def run_up_to_waiting(self) -> None:
        """Run the actions up to one for which other ranks are needed, and start that action."""
        while self.actions:
            action, batches = self.actions.pop(0)
            if action == "begin":
                self.rank.begin(batches)
            elif action == "end":
                self.rank.progress.is_finished = True
            elif action == "step":
                self.rank.take_step()
            else:
                self.rank.start_collective()
            if action in WAITING:
                return
        self.rank.detector.finish()


def split_into_iterations(draw: Any, waiting: list[Action]) -> list[tuple[Action, int | None]]:
    """Let iterations begin and end, or be broken off, anywhere between what all ranks do."""
    actions: list[tuple[Action, int | None]] = []
    begin: int | None = None  # the index of the action that began the iteration
    taken = 0
    for action in waiting:
        if begin is not None and draw(st.booleans()):
            # Otherwise, the loop is broken off.
            if draw(st.booleans()):
                actions.append(("end", None))
            else:
                taken += 2
            number = draw(st.sampled_from([taken, None]))
            actions[begin] = ("begin", number)
            begin = None
        if begin is None and draw(st.booleans()):
            begin = len(actions)
            taken = 0
            actions.append(("begin", 9))
        actions.append((action, None))
        taken += action == "step"
    return actions


def run_random_ranks(draw: Any, ranks: list[RandomRank], waiting_count: int) -> str:
    """Run all ranks, which wait for each other at each step, and return the first error."""
    for _ in range(waiting_count + 1):
        for rank in draw(st.permutations(ranks)):
            text = outcome(rank.run_up_to_waiting)
            if text != "fine":
                return text
    return "fine"


EXAMPLES = [100, pytest.param(1000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("examples", EXAMPLES)
def test_no_rank_raises_where_all_take_the_same_steps(examples: int) -> None:
    @profile(examples)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        waiting: list[Any] = data.draw(st.lists(st.sampled_from(WAITING), max_size=12))
        ranks: list[RandomRank] = []
        for rank in make_ranks(data.draw(st.integers(2, 4))):
            ranks.append(RandomRank(rank, split_into_iterations(data.draw, waiting)))
        assert run_random_ranks(data.draw, ranks, len(waiting)) == "fine"

    holds()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_a_rank_raises_where_one_would_wait_for_ever(examples: int) -> None:
    @profile(examples)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        draw = data.draw
        size = draw(st.integers(2, 4))
        actions_of_ranks: list[list[tuple[Action, int | None]]] = [[] for _ in range(size)]
        equal_loops = draw(st.lists(st.integers(0, 3), max_size=3))
        has_collectives = draw(st.booleans())
        batches = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
        assume(min(batches) < max(batches))
        has_length = draw(st.booleans())
        for actions, last in zip(actions_of_ranks, batches, strict=True):
            for number in [*equal_loops, last]:
                known = number if has_length else None
                actions += [("begin", known), *[("step", None)] * number, ("end", None)]
                if has_collectives:
                    actions.append(("collective", None))
        ranks = list(map(RandomRank, make_ranks(size), actions_of_ranks))
        waiting_count = sum(equal_loops) + has_collectives * len(equal_loops) + min(batches)
        text = run_random_ranks(draw, ranks, waiting_count)
        assert f"its loader ended after {min(batches)}, and" in text
        assert f"no part in step {sum(equal_loops) + min(batches) + 1}, " in text

    holds()


def test_equal_lengths_write_twice_for_each_iteration() -> None:
    written: list[str] = []

    class Listening(JobStore):
        def publish(self, topic: str, value: Any) -> None:
            written.append(topic)

        def read(self, topic: str, ranks: Iterable[int]) -> dict[int, Any]:
            if topic != "batches/0":
                return {}
            return {rank: [1, 9, False, None] for rank in ranks}

    rank = make_rank(Listening(dist.HashStore(), 0, 2))
    rank.begin(9)
    for _ in range(9):
        rank.take_step()
    rank.end()
    assert written == ["batches/0", "step"]

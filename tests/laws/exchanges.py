"""Laws of collectives that move values between ranks."""

from typing import Any

from hypothesis import strategies as st
from torch import Tensor

from fabric.testing import PerRank, assert_same, oracles
from fabric.testing import generators as gen
from tests.laws.base import Draw, Subject
from tests.laws.operations import pass_around_ring
from tests.laws.values import objects, rows


def all_gather_agrees_with_its_oracle(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    concat = draw(st.booleans(), "concat")
    values = draw(gen.per_rank_trees(size), "values")
    if concat:
        values = PerRank([oracles.all_gather([value])[0] for value in values.values])
    results = subject.run(size, lambda fabric, x: fabric.all_gather(x, concat=concat), values)
    expected = oracles.all_gather(values.values, concat=concat)
    assert_same(results, expected)


def ragged_gathers_agree_with_their_oracle(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    values = draw(gen.per_rank_tensors(size, gen.dtypes(), ragged=True), "values")
    option = {draw(st.sampled_from(["ragged", "concat"]), "option"): True}
    results = subject.run(size, lambda fabric, x: fabric.all_gather(x, **option), values)
    expected = oracles.all_gather(values.values, **option)
    assert_same(results, expected)


def a_broadcast_of_a_broadcast_changes_nothing(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    src = draw(st.integers(0, size - 1), "src")
    values = draw(gen.per_rank(objects(), size), "values")

    def run_twice(fabric: Any, x: Any) -> tuple[Any, Any]:
        first_results = fabric.broadcast(x, src)
        return first_results, fabric.broadcast(first_results, src)

    first_results, second_results = zip(*subject.run(size, run_twice, values), strict=True)
    expected = oracles.broadcast(values.values, src)
    assert_same(list(first_results), expected)
    assert_same(second_results, first_results)


def gather_undoes_scatter(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    src = draw(st.integers(0, size - 1), "src")
    dst = draw(st.integers(0, size - 1), "dst")
    messages = draw(st.lists(objects(), min_size=size, max_size=size), "messages")

    def scatter_and_gather(fabric: Any) -> tuple[Any, Any]:
        sent = None
        if fabric.global_rank == src:
            sent = messages
        message = fabric.scatter(sent, src)
        return message, fabric.gather(message, dst)

    scattered, gathered = zip(*subject.run(size, scatter_and_gather), strict=True)
    assert_same(list(scattered), messages)
    expected = oracles.gather(messages, dst)
    assert_same(list(gathered), expected)


def all_to_all_twice_changes_nothing(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    values = draw(rows(size, "sum"), "values")

    def run_twice(fabric: Any, x: Any) -> tuple[Any, Any]:
        first_results = fabric.all_to_all(x)
        return first_results, fabric.all_to_all(first_results)

    first_results, second_results = zip(*subject.run(size, run_twice, values), strict=True)
    expected = oracles.all_to_all(values.values)
    assert_same(list(first_results), expected)
    assert_same(list(second_results), list(values.values))


def all_to_all_takes_rows_of_any_strides(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    shape = (size, *draw(gen.shapes(max_dims=2)))
    values = draw(gen.per_rank_tensors(size, gen.dtypes(), shape), "values")
    results = subject.run(size, lambda fabric, x: fabric.all_to_all(x), values)
    expected = oracles.all_to_all(values.values)
    assert_same(results, expected)


def messages_arrive_in_their_order(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(min_size=2), "size")
    src = draw(st.integers(0, size - 1), "src")
    dst = draw(st.integers(0, size - 1).filter(lambda rank: rank != src), "dst")
    messages = draw(st.lists(objects(), max_size=4), "messages")

    def send_or_receive(fabric: Any) -> list[Any] | None:
        if fabric.global_rank == src:
            for message in messages:
                fabric.send(message, dst)
        if fabric.global_rank == dst:
            return [fabric.recv(src) for _ in messages]
        return None

    expected: list[list[Any] | None] = [None] * size
    expected[dst] = messages
    results = subject.run(size, send_or_receive)
    assert_same(results, expected)


def a_message_that_goes_around_the_ring_returns(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    values = draw(gen.per_rank(gen.tensors(gen.dtypes()), size), "values")

    def travel(fabric: Any, x: Tensor) -> Tensor:
        for _ in range(size):
            x = pass_around_ring(fabric, x, None, size)
        return x

    results = subject.run(size, travel, values)
    assert_same(results, list(values.values))


LAWS = (
    all_gather_agrees_with_its_oracle,
    ragged_gathers_agree_with_their_oracle,
    a_broadcast_of_a_broadcast_changes_nothing,
    gather_undoes_scatter,
    all_to_all_twice_changes_nothing,
    all_to_all_takes_rows_of_any_strides,
    messages_arrive_in_their_order,
    a_message_that_goes_around_the_ring_returns,
)

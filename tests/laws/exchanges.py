"""Laws of values that change hands."""

from typing import Any

from hypothesis import strategies as st
from torch import Tensor

from fabric.testing import PerRank, assert_same, oracles
from fabric.testing import generators as gen
from tests.laws.base import Draw, Subject
from tests.laws.operations import around
from tests.laws.values import objects, rows


def all_gather_agrees_with_its_oracle(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    concat = draw(st.booleans(), "concat")
    values = draw(gen.per_rank_trees(size), "values")
    if concat:
        values = PerRank([oracles.all_gather([value])[0] for value in values.values])
    found = subject.run(size, lambda fabric, x: fabric.all_gather(x, concat=concat), values)
    assert_same(found, oracles.all_gather(values.values, concat=concat))


def ragged_gathers_agree_with_their_oracle(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    values = draw(gen.per_rank_tensors(size, gen.dtypes(), ragged=True), "values")
    how = draw(st.sampled_from(["ragged", "concat"]), "how")
    found = subject.run(size, lambda fabric, x: fabric.all_gather(x, **{how: True}), values)
    assert_same(found, oracles.all_gather(values.values, **{how: True}))


def a_broadcast_of_a_broadcast_changes_nothing(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    src = draw(st.integers(0, size - 1), "src")
    values = draw(gen.per_rank(objects(), size), "values")

    def twice(fabric: Any, x: Any) -> tuple[Any, Any]:
        once = fabric.broadcast(x, src)
        return once, fabric.broadcast(once, src)

    once, again = zip(*subject.run(size, twice, values), strict=True)
    assert_same(list(once), oracles.broadcast(values.values, src))
    assert_same(again, once)


def gather_undoes_scatter(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    src = draw(st.integers(0, size - 1), "src")
    dst = draw(st.integers(0, size - 1), "dst")
    parts = draw(st.lists(objects(), min_size=size, max_size=size), "parts")

    def there_and_back(fabric: Any) -> tuple[Any, Any]:
        own = fabric.scatter(parts if fabric.global_rank == src else None, src)
        return own, fabric.gather(own, dst)

    scattered, gathered = zip(*subject.run(size, there_and_back), strict=True)
    assert_same(list(scattered), parts)
    assert_same(list(gathered), oracles.gather(parts, dst))


def all_to_all_twice_is_nothing(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    values = draw(rows(size, "sum"), "values")

    def twice(fabric: Any, x: Any) -> tuple[Any, Any]:
        once = fabric.all_to_all(x)
        return once, fabric.all_to_all(once)

    once, again = zip(*subject.run(size, twice, values), strict=True)
    assert_same(list(once), oracles.all_to_all(values.values))
    assert_same(list(again), list(values.values))


def all_to_all_takes_rows_as_they_lie(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    shape = (size, *draw(gen.shapes(max_dims=2)))
    values = draw(gen.per_rank_tensors(size, gen.dtypes(), shape), "values")
    assert_same(
        subject.run(size, lambda fabric, x: fabric.all_to_all(x), values),
        oracles.all_to_all(values.values),
    )


def messages_arrive_in_their_order(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(min_size=2), "size")
    src = draw(st.integers(0, size - 1), "src")
    dst = draw(st.integers(0, size - 1).filter(lambda rank: rank != src), "dst")
    messages = draw(st.lists(objects(), max_size=4), "messages")

    def talk(fabric: Any) -> list[Any] | None:
        if fabric.global_rank == src:
            for message in messages:
                fabric.send(message, dst)
        return [fabric.recv(src) for _ in messages] if fabric.global_rank == dst else None

    assert_same(
        subject.run(size, talk), [messages if rank == dst else None for rank in range(size)]
    )


def a_message_that_goes_all_around_comes_home(subject: Subject, draw: Draw) -> None:
    size = draw(gen.world_sizes(), "size")
    values = draw(gen.per_rank(gen.tensors(gen.dtypes()), size), "values")

    def travel(fabric: Any, x: Tensor) -> Tensor:
        for _ in range(size):
            x = around(fabric, x, None, size)
        return x

    assert_same(subject.run(size, travel, values), list(values.values))


LAWS = (
    all_gather_agrees_with_its_oracle,
    ragged_gathers_agree_with_their_oracle,
    a_broadcast_of_a_broadcast_changes_nothing,
    gather_undoes_scatter,
    all_to_all_twice_is_nothing,
    all_to_all_takes_rows_as_they_lie,
    messages_arrive_in_their_order,
    a_message_that_goes_all_around_comes_home,
)

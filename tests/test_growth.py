"""How cost grows with the number of processes: a process that poses as rank 0 of worlds of 8 and of 512."""

import pytest

from benchmarks.scaling import KINDS, Cost, broken, exchanged_by_a_save, measure, per_step

WORLDS = (8, 512)
COST = Cost(seconds=1.0, collectives=[{"all_reduce": 1}], bytes=[64], held=1000, keys=1)


@pytest.mark.timeout(150)
def test_a_step_costs_what_raw_torch_costs_and_nothing_of_ours_grows_with_the_world() -> None:
    costs = measure(WORLDS, layers=2, rounds=1, deadline=120)
    assert list(broken(costs)) == []
    # Each of the blocks and the root: gathered for the forward pass, the blocks again for the backward pass, reduced.
    # Split blocks also sum up outputs, and gradients of inputs.
    assert [per_step(costs[512][kind]["ours"]) for kind in KINDS] == [1, 8, 11, 12]
    assert all(cost["ours"].bytes[0] > 0 for kinds in costs.values() for cost in kinds.values())


def test_a_rank_exchanges_as_much_for_a_save_however_many_there_are() -> None:
    few, many = (exchanged_by_a_save(world)[1] for world in WORLDS)
    assert many - few < 100  # numbers of ranks have more digits


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (COST._replace(collectives=[{"all_reduce": 2}]), "other collectives or bytes"),
        (COST._replace(bytes=[65]), "other collectives or bytes"),
        (COST._replace(held=30_000), "we hold more"),
        (COST._replace(keys=2), "we leave more in the store"),
        (COST, None),
    ],
)
def test_what_grows_is_named(ours: Cost, words: str | None) -> None:
    costs = {8: {"ddp": {"raw": COST, "ours": COST}}, 512: {"ddp": {"raw": COST, "ours": ours}}}
    lines = list(broken(costs))
    assert (
        lines == []
        if words is None
        else [words in line and "world of 512" in line for line in lines] == [True]
    )

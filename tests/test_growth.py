"""The cost of a process that poses as rank 0 of worlds of 8 and of 512 processes."""

import pytest

from benchmarks.scaling import KINDS, Cost, broken, exchanged_by_a_save, measure, per_step

WORLDS = (8, 512)
COST = Cost(seconds=1.0, collectives=[{"all_reduce": 1}], bytes=[64], held=1000, keys=1)


def test_a_step_costs_what_raw_torch_costs_and_nothing_of_ours_grows_with_the_world() -> None:
    costs = measure(WORLDS, layers=2, rounds=1, deadline=120)
    assert list(broken(costs)) == []
    # FSDP gathers the root and each block for the forward pass, gathers the blocks again for the
    # backward pass, and reduces the gradients of the root and of each block.
    # Split blocks also sum up outputs, and gradients of inputs.
    collectives_per_step = []
    for kind in KINDS:
        collectives = per_step(costs[512][kind]["ours"])
        collectives_per_step.append(collectives)
    assert collectives_per_step == [1, 8, 11, 12]
    for costs_by_kind in costs.values():
        for cost in costs_by_kind.values():
            assert cost["ours"].bytes[0] > 0


def test_a_rank_exchanges_as_much_for_a_save_in_a_world_of_any_size() -> None:
    _, bytes_in_small_world = exchanged_by_a_save(WORLDS[0])
    _, bytes_in_large_world = exchanged_by_a_save(WORLDS[1])
    # The numbers of ranks have more digits in the large world.
    assert bytes_in_large_world - bytes_in_small_world < 100


def costs_in_two_worlds(cost_in_large_world: Cost) -> dict[int, dict[str, dict[str, Cost]]]:
    """Return costs of DDP that equal those of raw torch, except ours in the large world."""
    return {
        8: {"ddp": {"raw": COST, "ours": COST}},
        512: {"ddp": {"raw": COST, "ours": cost_in_large_world}},
    }


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (COST._replace(collectives=[{"all_reduce": 2}]), "other collectives or bytes"),
        (COST._replace(bytes=[65]), "other collectives or bytes"),
        (COST._replace(held=30_000), "we hold more"),
        (COST._replace(keys=2), "we leave more in the store"),
    ],
)
def test_a_cost_that_grows_is_named(ours: Cost, words: str) -> None:
    costs = costs_in_two_worlds(ours)
    [line] = broken(costs)
    assert words in line
    assert "world of 512" in line


def test_a_cost_that_does_not_grow_is_not_named() -> None:
    costs = costs_in_two_worlds(COST)
    assert list(broken(costs)) == []

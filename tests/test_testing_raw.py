"""Functions that call torch.distributed themselves, on the ranks of a pool."""

from collections.abc import Callable
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, find, settings
from torch import Tensor

from fabric import Fabric
from fabric.errors import ConfigurationError, RankFailedError
from fabric.testing import PerRank, RankPool, differences, oracles
from fabric.testing import generators as gen

PoolOf = Callable[[int], RankPool]


def total_of_group(fabric: Fabric, x: Tensor, group: dist.ProcessGroup) -> Tensor | None:
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    dist.all_reduce(x, group=group)
    return x


def test_ranks_are_passed_a_process_group_of_torch(rank_pool: PoolOf) -> None:
    pool = rank_pool(2)
    values = PerRank([torch.ones(1), torch.ones(1)])
    both = [torch.full((1,), 2.0)] * 2
    for _ in range(2):  # the second call uses the groups of the first
        assert pool.run(total_of_group, values, pool.group([1])) == [None, torch.ones(1)]
        assert pool.run(total_of_group, values, group=pool.group([1, 0])) == both
    with pytest.raises(ConfigurationError, match="the ranks are 0 to 1"):
        pool.group([2])


# -- the table of docs/testing.md: each bug is found by the law beside it --------------------------


def gather_rows(x: Tensor) -> list[Tensor]:
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x)
    return rows


def ignores_strides(fabric: Fabric, x: Tensor) -> Tensor:
    dense = x.as_strided(x.shape, torch.empty(x.shape).stride()).clone()
    dist.all_reduce(dense)
    return dense


def drops_nan(fabric: Fabric, x: Tensor) -> Tensor:
    return reduce(torch.fmax, gather_rows(x.contiguous()))


def truncates(fabric: Fabric, x: Tensor) -> Tensor:
    x = x.contiguous()
    dist.all_reduce(x)
    return (x // dist.get_world_size()).float()


def leaves_the_collective_out(fabric: Fabric, x: Tensor) -> Tensor:
    return x.clone()


BUGS = {
    "strides": (ignores_strides, gen.per_rank_tensors(2, torch.float32), "sum"),
    "NaN": (drops_nan, gen.per_rank_tensors(2, torch.float32, special_values=True), "max"),
    "integer mean": (truncates, gen.per_rank_tensors(2, torch.int64), "mean"),
    "no collective": (leaves_the_collective_out, gen.per_rank_tensors(2, torch.float32), "sum"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BUGS)
def test_the_law_of_the_table_finds_the_bug(rank_pool: PoolOf, kind: str) -> None:
    function, tensors, op = BUGS[kind]

    def is_wrong(tensors: PerRank) -> bool:
        try:
            actual = rank_pool(2).run(function, tensors)
        except RankFailedError:  # a view that is read as dense may end outside of its memory
            return True
        return any(differences(actual, oracles.all_reduce(tensors.values, op)))

    without_shrinking = settings(database=None, derandomize=True, phases=[Phase.generate])
    assert find(tensors, is_wrong, settings=without_shrinking) is not None

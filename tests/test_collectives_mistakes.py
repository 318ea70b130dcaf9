"""Collectives that differ between ranks, and values that cannot be sent."""

import os
import threading
from decimal import Decimal
from typing import Any

import pytest
import torch

from fabric import Fabric
from fabric.errors import FabricError
from tests.judged_cases import (
    WAITS,
    batch,
    case,
    cases_of,
    full_tensor,
    judge,
    net,
    sgd,
    step,
    value_on,
)


@case()
def an_int_beside_a_float(fabric: Fabric, rank: int) -> None:
    assert fabric.all_reduce({"acc": value_on(rank, 0, 0.5)}, reduce_op="sum") == {"acc": 0.5}


@case(refused=True)
def other_keys(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce({value_on(rank, "b", "a"): torch.ones(2)}, reduce_op="sum")


@case(refused=True)
def other_reductions(fabric: Fabric, rank: int) -> None:
    reduce_op = value_on(rank, "max", "sum")
    fabric.all_reduce(torch.ones(2), reduce_op=reduce_op)


@case(refused=True)
def other_shapes(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce(torch.ones(value_on(rank, (3, 2), (2, 3))), reduce_op="sum")


@case(refused=True)
def large_lengths(fabric: Fabric, rank: int) -> None:
    fabric.all_gather(torch.ones(100_000 + rank))


@case(refused=True)
def a_large_one_beside_a_small_one(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce(torch.ones(value_on(rank, 10, 100_000)))


@case(refused=True)
def a_gather_beside_a_reduction(fabric: Fabric, rank: int) -> None:
    if rank == 0:
        fabric.all_reduce(torch.ones(4))
    else:
        fabric.all_gather(torch.ones(4))


@case(refused=True)
def half_beside_bfloat16(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce(torch.ones(4, dtype=value_on(rank, torch.bfloat16, torch.float16)))


@case()
def a_list_beside_a_tuple(fabric: Fabric, rank: int) -> None:
    x = torch.ones(2)
    for result in fabric.all_reduce(value_on(rank, (x, x), [x, x])):
        assert result.tolist() == [1.0, 1.0]


@case()
def integers_beyond_64_bits(fabric: Fabric, rank: int) -> None:
    result = fabric.all_reduce({"n": value_on(rank, 2**62 + 5, 2**62), "m": 3}, reduce_op="sum")
    assert result == {"n": 2**63 + 5, "m": 6}


@case()
def a_product_beyond_64_bits(fabric: Fabric, rank: int) -> None:
    assert fabric.all_reduce(2**40, reduce_op="product") == 2**80


@case(refused=True)
def forward_mode(fabric: Fabric, rank: int) -> None:
    torch.func.jvp(
        lambda x: fabric.all_reduce(x * 2, reduce_op="sum"), (torch.ones(2),), (torch.ones(2),)
    )


@case(refused=True)
def a_set(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce({"a": torch.ones(1), "s": {1, 2}})


@case(refused=True)
def a_decimal(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce({"a": torch.ones(1), "s": Decimal(2)})


@case(refused=True)
def a_generator(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce(x for x in [torch.ones(1)])


@case(refused=True)
def a_set_on_one_rank(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce({"b": value_on(rank, torch.ones(1), {1})})


@case(refused=True)
def nested_on_one_rank(fabric: Fabric, rank: int) -> None:
    value = value_on(
        rank,
        torch.ones(5),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    )
    fabric.all_reduce(value)


@case(refused=True)
def sparse_on_one_rank(fabric: Fabric, rank: int) -> None:
    value = value_on(rank, torch.eye(3), torch.eye(3).to_sparse())
    fabric.all_reduce(value)


class Broken(dict[str, Any]):
    """A mapping that raises when it is taken apart."""

    def items(self) -> Any:
        raise ValueError("broken items")

    def __getitem__(self, key: str) -> Any:
        raise FabricError("broken item")


@case(refused=True)
def a_dictionary_that_raises_on_one_rank(fabric: Fabric, rank: int) -> None:
    value = value_on(rank, {"a": torch.ones(1)}, Broken(a=torch.ones(1)))
    fabric.all_reduce(value)


@case(refused=True)
def an_object_that_does_not_pickle(fabric: Fabric, rank: int) -> None:
    message = value_on(rank, {"a": (lambda: 1)}, None)
    fabric.broadcast(message)


class Unreadable:
    """An object that only the process that sent it can unpickle.

    It is like an object of a module that the other processes do not have.
    """

    def __reduce__(self) -> Any:
        return _raise_on_arrival, (os.getpid(),)


def _raise_on_arrival(sender: int) -> Any:
    if os.getpid() != sender:
        raise ModuleNotFoundError("no such module")
    return Unreadable()


@case(refused=True)
def a_broadcast_that_the_receiver_cannot_read(fabric: Fabric, rank: int) -> None:
    message = value_on(rank, {"a": Unreadable()}, None)
    fabric.broadcast(message)


@case(refused=True)
def a_scattered_object_that_the_receiver_cannot_read(fabric: Fabric, rank: int) -> None:
    message = value_on(rank, [1, Unreadable()], None)
    fabric.scatter(message)


@case(refused=True)
def a_gathered_object_that_the_receiver_cannot_read(fabric: Fabric, rank: int) -> None:
    fabric.gather(Unreadable())


@case(refused=True)
def a_message_that_the_receiver_cannot_read(fabric: Fabric, rank: int) -> None:
    if rank:
        fabric.recv(0)
    else:
        fabric.send(Unreadable(), 1)
        fabric.all_reduce(1, reduce_op="sum")


@case(refused=True)
def in_a_worker_of_a_loader(fabric: Fabric, rank: int) -> None:
    class Data(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return fabric.all_reduce(torch.ones(1))

    list(torch.utils.data.DataLoader(Data(), num_workers=1))


# -- special values, lengths and members ----------------------------------------------------------


@case()
def not_a_number_on_one_rank(fabric: Fabric, rank: int) -> None:
    nan = float("nan")
    for nan_rank in range(2):
        value = nan if rank == nan_rank else 1.0
        for reduce_op in ("max", "min", "sum", "mean", "product"):
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
                for length in (1, 3, 40_000):
                    tensor = torch.full((length,), value, dtype=dtype)
                    result = fabric.all_reduce(tensor, reduce_op=reduce_op)
                    assert result.isnan().all(), (reduce_op, nan_rank, dtype, length)
    assert str(fabric.all_reduce(value_on(rank, 1.0, nan), reduce_op="max")) == "nan"


@case()
def infinities_and_zeros_with_a_sign(fabric: Fabric, rank: int) -> None:
    assert fabric.all_reduce(value_on(rank, -1.0, float("inf")), reduce_op="min") == -1.0
    assert (
        str(fabric.all_reduce(value_on(rank, float("inf"), float("-inf")), reduce_op="sum"))
        == "nan"
    )
    assert fabric.all_reduce(torch.tensor(-0.0), reduce_op="sum").signbit()


@case(refused=True)
def a_number_of_dimensions_of_its_own(fabric: Fabric, rank: int) -> None:
    value = value_on(rank, torch.ones(2), torch.ones(2, 3))
    fabric.all_gather(value, ragged=True)


@case(refused=True)
def other_columns_of_ragged_rows(fabric: Fabric, rank: int) -> None:
    fabric.all_gather(torch.ones(2 + rank, 3 + rank), concat=True)


@case()
def ragged_rows_of_which_one_rank_has_none(fabric: Fabric, rank: int) -> None:
    assert fabric.all_gather(torch.ones(3 * rank, 2), concat=True).shape == (3, 2)
    rows_by_rank = fabric.all_gather(torch.ones(3 * rank, 2), ragged=True)
    assert [len(rows) for rows in rows_by_rank] == [0, 3]


@case(refused=True)
def a_source_that_does_not_exist(fabric: Fabric, rank: int) -> None:
    fabric.broadcast(1, src=7)


@case(refused=True)
def a_source_that_is_negative(fabric: Fabric, rank: int) -> None:
    fabric.gather(1, dst=-1)


@case(refused=True)
def a_call_of_a_group_from_outside(fabric: Fabric, rank: int) -> None:
    group = fabric.new_group([0])
    result = fabric.all_reduce(1, group=group, reduce_op="sum")
    assert result == 1
    fabric.all_reduce({value_on(rank, "b", "a"): 1}, reduce_op="sum")


@case(refused=True, strategy=WAITS["ddp"])
def groups_of_other_members(fabric: Fabric, rank: int) -> None:
    group = fabric.new_group(value_on(rank, [0, 1], [0]))
    if group:
        fabric.all_reduce(1, group=group, reduce_op="sum")


@case(refused=True, strategy=WAITS["ddp"])
def a_group_on_one_rank(fabric: Fabric, rank: int) -> None:
    if rank == 0:
        fabric.new_group([0, 1])


@case(refused=True)
def a_row_too_many_on_one_rank(fabric: Fabric, rank: int) -> None:
    fabric.reduce_scatter(torch.ones(2 + rank, 3))


@case(refused=True)
def parts_that_do_not_suffice(fabric: Fabric, rank: int) -> None:
    message = value_on(rank, [1], None)
    fabric.scatter(message)


@case(strategy="fsdp")
def shards_of_a_parameter(fabric: Fabric, rank: int) -> None:
    weight = fabric.setup(net()).get_parameter("0.weight")
    result = fabric.all_reduce(weight, reduce_op="sum")
    assert torch.equal(full_tensor(result), full_tensor(weight) * 2)


@case(strategy="fsdp")
def shards_that_are_broadcast(fabric: Fabric, rank: int) -> None:
    weight = fabric.setup(net()).get_parameter("0.weight")
    result = fabric.broadcast({"w": weight.detach()})
    assert torch.equal(full_tensor(result["w"]), full_tensor(weight))


@case(strategy="fsdp")
def shards_that_are_gathered(fabric: Fabric, rank: int) -> None:
    weight = fabric.setup(net()).get_parameter("0.weight")
    result = fabric.all_gather(weight.detach())
    assert torch.equal(result[0], full_tensor(weight))


@case(refused=True)
def a_tensor_without_values(fabric: Fabric, rank: int) -> None:
    value = value_on(rank, torch.ones(2), torch.empty(2, device="meta"))
    fabric.all_reduce(value)


@case()
def odd_strides(fabric: Fabric, rank: int) -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    views = [
        base[:, ::2],
        base.transpose(0, 2),
        base[0, 0].expand(5, 4),
        base.flip(0),
        base.mT,
        base[..., :0],
    ]
    for view in views:
        assert torch.equal(fabric.all_reduce(view, reduce_op="sum"), view * 2)
        assert torch.equal(fabric.all_gather(view)[1], view)
    z = torch.view_as_complex(base.reshape(-1, 2)).conj()
    assert torch.equal(fabric.all_reduce(z, reduce_op="sum"), z * 2)


@case(refused=True)
def keys_that_are_no_number(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce({float("nan"): 1.0, rank: 2.0}, reduce_op="sum")


@case()
def keys_of_many_kinds(fabric: Fabric, rank: int) -> None:
    expected = {1: 1.0, "1": 2.0, (1, "a"): 3.0, None: 4.0, 2: 5.0, "ü\ud800": 6.0}
    tree = dict(expected)
    if rank > 0:
        tree = dict(reversed(expected.items()))
    assert fabric.all_reduce(tree, reduce_op="mean") == expected


@case()
def messages_of_two_threads(fabric: Fabric, rank: int) -> None:
    results = dict[int, Any]()

    def reduce(number: int) -> None:
        try:
            results[number] = fabric.all_reduce({f"{number}": float(number)}, reduce_op="sum")
        except FabricError as error:
            results[number] = error

    numbers = value_on(rank, [1, 0], [0, 1])
    threads = [threading.Thread(target=reduce, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, result in results.items():
        if isinstance(result, Exception):
            raise result
        assert result == {f"{number}": 2.0 * number}


@case(refused=True, strategy=WAITS["ddp"])
def a_rank_that_is_missing(fabric: Fabric, rank: int) -> None:
    if rank == 0:
        fabric.all_reduce(torch.ones(3))


@case(refused=True, strategy=WAITS["ddp"])
def a_barrier_on_one_rank(fabric: Fabric, rank: int) -> None:
    if rank == 0:
        fabric.barrier("end of the epoch")


@case(refused=True, strategy=WAITS["ddp"])
def nothing_is_sent(fabric: Fabric, rank: int) -> None:
    if rank == 0:
        fabric.recv(1)


@case(refused=True)
def a_message_to_oneself(fabric: Fabric, rank: int) -> None:
    fabric.send(1, dst=rank)


@case(refused=True)
def a_message_from_oneself(fabric: Fabric, rank: int) -> None:
    fabric.recv(src=rank)


@case(refused=True)
def a_broadcast_beside_a_gather(fabric: Fabric, rank: int) -> None:
    if rank:
        fabric.broadcast([1, 2])
    else:
        fabric.gather([1, 2])


@case(refused=True, says="ranks 0, 1 wait for each other, in different calls", watchdog=2.0)
def a_reduction_beside_a_step_of_training(fabric: Fabric, rank: int) -> None:
    module = net()
    model, optimizer = fabric.setup(module, sgd(module))
    for number in range(3):
        step(fabric, model, optimizer, batch(number))
    if rank:
        fabric.all_reduce(torch.ones(4))
        step(fabric, model, optimizer, batch())
    else:
        step(fabric, model, optimizer, batch())
        fabric.all_reduce(torch.ones(4))


@case()
def arguments_are_left_alone(fabric: Fabric, rank: int) -> None:
    x = torch.full((3,), float(rank))
    tree = {"x": x, "n": [rank]}
    fabric.all_reduce(tree, reduce_op="sum")
    fabric.broadcast(tree)
    fabric.all_gather(tree)
    view_tree = {"x": x[1:], "n": [1.0]}
    fabric.all_reduce(view_tree)
    fabric.broadcast(view_tree)
    fabric.all_gather(view_tree)
    assert x.tolist() == [float(rank)] * 3
    assert tree["n"] == [rank]


@pytest.mark.parametrize("name", cases_of(__name__, slow=10))
def test_a_case_ends_right_or_with_an_error_of_fabric_and_leaves_nothing(name: str) -> None:
    assert judge(name).problems == []

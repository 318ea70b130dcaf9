"""Collectives that differ between ranks, and what cannot be sent."""

import os
import threading
from decimal import Decimal
from typing import Any

import torch

from fabric import Fabric
from fabric.errors import FabricError
from tests.hostile.base import WAITS, batch, case, net, sgd, step

ONES = torch.ones


@case()
def an_int_beside_a_float(fabric: Fabric, rank: int) -> None:
    assert fabric.all_reduce({"acc": 0.5 if rank else 0}, reduce_op="sum") == {"acc": 0.5}


@case(refused=True)
def other_keys(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce({"a" if rank else "b": ONES(2)}, reduce_op="sum")


@case(refused=True)
def other_reductions(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce(ONES(2), reduce_op="sum" if rank else "max")


@case(refused=True)
def other_shapes(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce(ONES((2, 3) if rank else (3, 2)), reduce_op="sum")


@case(refused=True)
def large_lengths(fabric: Fabric, rank: int) -> None:
    fabric.all_gather(ONES(100_000 + rank))


@case(refused=True)
def a_large_one_beside_a_small_one(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce(ONES(100_000 if rank else 10))


@case(refused=True)
def a_gather_beside_a_reduction(fabric: Fabric, rank: int) -> None:
    (fabric.all_gather if rank else fabric.all_reduce)(ONES(4))


@case(refused=True)
def half_beside_bfloat16(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce(ONES(4, dtype=torch.float16 if rank else torch.bfloat16))


@case()
def a_list_beside_a_tuple(fabric: Fabric, rank: int) -> None:
    x = ONES(2)
    assert all(bool((y == 1).all()) for y in fabric.all_reduce([x, x] if rank else (x, x)))


@case()
def integers_beyond_64_bits(fabric: Fabric, rank: int) -> None:
    found = fabric.all_reduce({"n": 2**62 if rank else 2**62 + 5, "m": 3}, reduce_op="sum")
    assert found == {"n": 2**63 + 5, "m": 6}


@case()
def a_product_beyond_64_bits(fabric: Fabric, rank: int) -> None:
    assert fabric.all_reduce(2**40, reduce_op="product") == 2**80


@case(refused=True)
def forward_mode(fabric: Fabric, rank: int) -> None:
    torch.func.jvp(lambda x: fabric.all_reduce(x * 2, reduce_op="sum"), (ONES(2),), (ONES(2),))


@case(refused=True)
def a_set(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce({"a": ONES(1), "s": {1, 2}})


@case(refused=True)
def a_decimal(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce({"a": ONES(1), "s": Decimal(2)})


@case(refused=True)
def a_generator(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce(x for x in [ONES(1)])


@case(refused=True)
def a_set_on_one_rank(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce({"b": {1} if rank else ONES(1)})


@case(refused=True)
def nested_on_one_rank(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce(
        torch.nested.nested_tensor([ONES(2), ONES(3)], layout=torch.jagged) if rank else ONES(5)
    )


@case(refused=True)
def sparse_on_one_rank(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce(torch.eye(3).to_sparse() if rank else torch.eye(3))


class Evil(dict[str, Any]):
    def items(self) -> Any:
        raise ValueError("evil")

    def __getitem__(self, key: str) -> Any:
        raise FabricError("evil")


@case(refused=True)
def a_dictionary_that_raises_on_one_rank(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce(Evil(a=ONES(1)) if rank else {"a": ONES(1)})


@case(refused=True)
def what_cannot_be_pickled(fabric: Fabric, rank: int) -> None:
    fabric.broadcast({"a": (lambda: 1)} if rank == 0 else None)


class Unreadable:
    """Can be read where it was sent from alone, as an object of a module that the others have not."""

    def __reduce__(self) -> Any:
        return _raise_on_arrival, (os.getpid(),)


def _raise_on_arrival(sender: int) -> Any:
    if os.getpid() != sender:
        raise ModuleNotFoundError("no such module")
    return Unreadable()


@case(refused=True)
def what_cannot_be_read_by_the_receiver(fabric: Fabric, rank: int) -> None:
    fabric.broadcast({"a": Unreadable()} if rank == 0 else None)


@case(refused=True)
def what_cannot_be_read_when_scattered(fabric: Fabric, rank: int) -> None:
    fabric.scatter([1, Unreadable()] if rank == 0 else None)


@case(refused=True)
def what_cannot_be_read_when_gathered(fabric: Fabric, rank: int) -> None:
    fabric.gather(Unreadable())


@case(refused=True)
def what_cannot_be_read_when_sent(fabric: Fabric, rank: int) -> None:
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
            return fabric.all_reduce(ONES(1))

    list(torch.utils.data.DataLoader(Data(), num_workers=1))


# -- ideas of the second round --------------------------------------------------------------------


@case()
def not_a_number_on_one_rank(fabric: Fabric, rank: int) -> None:
    for value in ([1.0, float("nan")], [float("nan"), 1.0]):
        for op in ("max", "min", "sum", "mean", "product"):
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
                for length in (1, 3, 40_000):
                    found = fabric.all_reduce(
                        torch.full((length,), value[rank], dtype=dtype), reduce_op=op
                    )
                    assert found.isnan().all(), (op, value, dtype, length, found[:3])
    assert str(fabric.all_reduce(float("nan") if rank else 1.0, reduce_op="max")) == "nan"


@case()
def infinities_and_zeros_with_a_sign(fabric: Fabric, rank: int) -> None:
    assert fabric.all_reduce(float("inf") if rank else -1.0, reduce_op="min") == -1.0
    assert str(fabric.all_reduce(float("-inf") if rank else float("inf"), reduce_op="sum")) == "nan"
    assert fabric.all_reduce(torch.tensor(-0.0), reduce_op="sum").signbit()


@case(refused=True)
def a_number_of_dimensions_of_its_own(fabric: Fabric, rank: int) -> None:
    fabric.all_gather(ONES(2, 3) if rank else ONES(2), ragged=True)


@case(refused=True)
def other_columns_of_ragged_rows(fabric: Fabric, rank: int) -> None:
    fabric.all_gather(ONES(2 + rank, 3 + rank), concat=True)


@case()
def ragged_rows_of_which_one_rank_has_none(fabric: Fabric, rank: int) -> None:
    assert fabric.all_gather(ONES(3 * rank, 2), concat=True).shape == (3, 2)
    assert [len(each) for each in fabric.all_gather(ONES(3 * rank, 2), ragged=True)] == [0, 3]


@case(refused=True)
def a_source_that_does_not_exist(fabric: Fabric, rank: int) -> None:
    fabric.broadcast(1, src=7)


@case(refused=True)
def a_source_that_is_negative(fabric: Fabric, rank: int) -> None:
    fabric.gather(1, dst=-1)


@case(refused=True)
def a_call_of_a_group_from_outside(fabric: Fabric, rank: int) -> None:
    group = fabric.new_group([0])
    found = fabric.all_reduce(1, group=group, reduce_op="sum")
    assert found == 1
    fabric.all_reduce({"a" if rank else "b": 1}, reduce_op="sum")


@case(refused=True, strategy=WAITS["ddp"])
def groups_of_other_members(fabric: Fabric, rank: int) -> None:
    group = fabric.new_group([0] if rank else [0, 1])
    if group:
        fabric.all_reduce(1, group=group, reduce_op="sum")


@case(refused=True, strategy=WAITS["ddp"])
def a_group_on_one_rank(fabric: Fabric, rank: int) -> None:
    if rank == 0:
        fabric.new_group([0, 1])


@case(refused=True)
def a_row_too_many_on_one_rank(fabric: Fabric, rank: int) -> None:
    fabric.reduce_scatter(ONES(2 + rank, 3))


@case(refused=True)
def parts_that_do_not_suffice(fabric: Fabric, rank: int) -> None:
    fabric.scatter([1] if rank == 0 else None)


@case(strategy="fsdp")
def shards_of_a_parameter(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    weight = model.get_parameter("0.weight")
    whole = weight.full_tensor()
    found = fabric.all_reduce(weight, reduce_op="sum")
    assert torch.equal(found.full_tensor() if hasattr(found, "full_tensor") else found, whole * 2)


@case(strategy="fsdp")
def shards_that_are_broadcast(fabric: Fabric, rank: int) -> None:
    weight = fabric.setup(net()).get_parameter("0.weight")
    whole = weight.full_tensor()
    found = fabric.broadcast({"w": weight.detach()})["w"]
    assert torch.equal(getattr(found, "full_tensor", lambda: found)(), whole)


@case(strategy="fsdp")
def shards_that_are_gathered(fabric: Fabric, rank: int) -> None:
    weight = fabric.setup(net()).get_parameter("0.weight")
    whole = weight.full_tensor()
    found = fabric.all_gather(weight.detach())
    assert torch.equal(found[0], whole)


@case(refused=True)
def a_tensor_without_values(fabric: Fabric, rank: int) -> None:
    fabric.all_reduce(torch.empty(2, device="meta") if rank else ONES(2))


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
    pairs = [(1, 1.0), ("1", 2.0), ((1, "a"), 3.0), (None, 4.0), (True + 1, 5.0), ("ü\ud800", 6.0)]
    found = fabric.all_reduce(dict(pairs[::-1] if rank else pairs), reduce_op="mean")
    assert found == dict(pairs)


@case()
def messages_of_two_threads(fabric: Fabric, rank: int) -> None:
    results = list[Any]()

    def call(number: int) -> None:
        try:
            results.append(
                (number, fabric.all_reduce({f"{number}": float(number)}, reduce_op="sum"))
            )
        except FabricError as error:
            results.append(error)

    threads = [
        threading.Thread(target=call, args=(number,)) for number in ([0, 1] if rank else [1, 0])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
        assert result[1] == {f"{result[0]}": 2.0 * result[0]}


@case(refused=True, strategy=WAITS["ddp"])
def a_rank_that_is_missing(fabric: Fabric, rank: int) -> None:
    if rank == 0:
        fabric.all_reduce(ONES(3))


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


@case(refused=True)
def a_reduction_beside_a_step_of_training(fabric: Fabric, rank: int) -> None:
    module = net()
    model, optimizer = fabric.setup(module, sgd(module))
    for number in range(3):
        step(fabric, model, optimizer, batch(number))
    if rank:
        fabric.all_reduce(ONES(4))
        step(fabric, model, optimizer, batch())
    else:
        step(fabric, model, optimizer, batch())
        fabric.all_reduce(ONES(4))


@case()
def arguments_are_left_alone(fabric: Fabric, rank: int) -> None:
    x = torch.full((3,), float(rank))
    view = x[1:]
    tree = {"x": x, "n": [rank]}
    for call in (fabric.all_reduce, fabric.broadcast, fabric.all_gather):
        call({"x": view, "n": [1.0]})
        call(tree) if call is not fabric.all_reduce else call(tree, reduce_op="sum")
    assert x.tolist() == [float(rank)] * 3
    assert tree["n"] == [rank]

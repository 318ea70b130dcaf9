"""Loops that train nothing, something else, or something else on each rank."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fabric import Fabric
from tests.hostile.base import WAITS, batch, case, net, same, sgd, step


def both(*, refused: bool = False, waits: bool = False, **options: Any) -> Callable[[Any], Any]:
    """A case under ddp and under fsdp."""

    def register(function: Any) -> Any:
        name = function.__name__
        for strategy in ("ddp", "fsdp"):
            function.__name__ = f"{name}_{strategy}"
            chosen = WAITS[strategy] if waits else strategy
            case(refused=refused, strategy=chosen, **options)(function)
        return function

    return register


def trained(fabric: Fabric, steps: int = 0) -> tuple[nn.Sequential, Any, torch.optim.Optimizer]:
    module = net()
    model, optimizer = fabric.setup(module, sgd(module))
    for number in range(steps):
        step(fabric, model, optimizer, batch(number + 10 * fabric.global_rank))
    return module, model, optimizer


# -- what is added, replaced or not set up ----------------------------------------------------------------------------


@both()
def a_group_of_an_adapter(fabric: Fabric, rank: int) -> None:
    _, model, optimizer = trained(fabric)
    extra = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(extra.parameters())})
    for _ in range(2):
        step(fabric, lambda x: extra(model(x)), optimizer, batch(rank))
    same(fabric, extra.weight)


@both()
def a_layer_is_replaced(fabric: Fabric, rank: int) -> None:
    module, model, optimizer = trained(fabric)
    module[2] = nn.Linear(8, 2)
    optimizer.add_param_group({"params": list(module[2].parameters())})
    for _ in range(2):
        step(fabric, model, optimizer, batch(rank))
    same(fabric, module[2].weight)


@case(strategy="fsdp", refused=True)
def a_group_of_what_was_sharded(fabric: Fabric, rank: int) -> None:
    module = net()
    old = list(module[2].parameters())
    model, optimizer = fabric.setup(module, sgd(module[0]))
    optimizer.add_param_group({"params": old})
    step(fabric, model, optimizer, batch())


@case(ranks=1, strategy="auto", precision="16-mixed", refused=True)
def half_precision_without_a_set_up_optimizer(fabric: Fabric, rank: int) -> None:
    module = net()
    model = fabric.setup(module)
    optimizer = sgd(module)
    for _ in range(3):
        step(fabric, model, optimizer, batch())


@case(strategy="fsdp", refused=True)
def an_optimizer_from_before_the_sharding(fabric: Fabric, rank: int) -> None:
    module = net()
    optimizer = sgd(module)
    model = fabric.setup(module)
    for _ in range(3):
        step(fabric, model, optimizer, batch())


@both(refused=True)
def a_head_that_came_after_the_optimizer(fabric: Fabric, rank: int) -> None:
    module = net()
    optimizer = sgd(module)
    module[2] = nn.Linear(8, 2)
    step(fabric, *fabric.setup(module, optimizer), batch())


@case()
def nothing_is_set_up(fabric: Fabric, rank: int) -> None:
    module = nn.Linear(4, 1)
    optimizer = sgd(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            step(fabric, module, optimizer, torch.full((4, 4), rank + 1.0))
    assert caught or rank


@both(refused=True)
def a_model_without_values(fabric: Fabric, rank: int) -> None:
    with fabric.init_module(empty_init=True):
        module = net()
    model, optimizer = fabric.setup(module, sgd(module))
    step(fabric, model, optimizer, batch())


@case()
def a_loader_that_is_not_set_up(fabric: Fabric, rank: int) -> None:
    _, model, optimizer = trained(fabric)
    loader = DataLoader(
        torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), batch_size=4
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for x in loader:
                step(fabric, model, optimizer, x)
    assert caught or rank


# -- fsdp --------------------------------------------------------------------------------------------------------------


@case(strategy="fsdp")
def a_hook_of_a_parameter(fabric: Fabric, rank: int) -> None:
    module = net()
    module[2].weight.register_hook(lambda grad: grad * 0)
    model, optimizer = fabric.setup(module, sgd(module))
    before = model.get_parameter("2.weight").full_tensor().clone()
    step(fabric, model, optimizer, batch())
    assert torch.equal(model.get_parameter("2.weight").full_tensor(), before)


@case(strategy="fsdp")
def a_parameter_without_a_dimension(fabric: Fabric, rank: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    plain = Scaled()
    module = Scaled()
    own = torch.optim.AdamW(plain.parameters(), 0.1)
    model = module
    model, optimizer = fabric.setup(
        module, torch.optim.AdamW(module.parameters(), 0.1, foreach=True)
    )
    for _ in range(3):
        plain(torch.cat([batch(0), batch(1)])).square().mean().backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        own.step()
        own.zero_grad()
        fabric.backward(model(batch(rank)).square().mean())
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(
        getattr(model.scale, "full_tensor", lambda: model.scale)(), plain.scale
    )


@case(strategy="fsdp", refused=True)
def channels_last(fabric: Fabric, rank: int) -> None:
    fabric.setup(nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last))


@case(strategy="fsdp", refused=True)
def a_module_inside_of_two(fabric: Fabric, rank: int) -> None:
    inner = nn.Linear(4, 4)
    fabric.setup(inner)
    fabric.setup(nn.Sequential(inner, nn.Linear(4, 4)))


@case(strategy="fsdp", refused=True)
def sparse_gradients(fabric: Fabric, rank: int) -> None:
    fabric.setup(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)))


@case(strategy="fsdp", refused=True)
def an_optimizer_without_a_step_for_shards(fabric: Fabric, rank: int) -> None:
    module = nn.Linear(3, 5)
    model, optimizer = fabric.setup(module, torch.optim.Adafactor(module.parameters()))
    step(fabric, model, optimizer, torch.ones(2, 3))


@both(refused=True)
def another_dtype_after_setup(fabric: Fabric, rank: int) -> None:
    _, model, _ = trained(fabric)
    model.double()


# -- ranks that do not do the same ------------------------------------------------------------------------------------


@both(refused=True)
def other_widths(fabric: Fabric, rank: int) -> None:
    fabric.setup(nn.Linear(4, 4 + rank))


@both(refused=True)
def a_layer_more(fabric: Fabric, rank: int) -> None:
    fabric.setup(nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 + rank)]))


@both(refused=True)
def frozen_on_one_rank(fabric: Fabric, rank: int) -> None:
    module = net()
    module[0].requires_grad_(rank == 0)
    model, optimizer = fabric.setup(module, sgd(module))
    for number in range(2):
        step(fabric, model, optimizer, batch(number + rank))
    same(fabric, module[0].weight)


@both(refused=True)
def other_dtypes(fabric: Fabric, rank: int) -> None:
    model, optimizer = fabric.setup(
        module := nn.Linear(4, 4).to(torch.float64 if rank else torch.float32), sgd(module)
    )
    step(fabric, model, optimizer, batch().to(module.weight.dtype))


@both(refused=True)
def other_learning_rates(fabric: Fabric, rank: int) -> None:
    module = net()
    model, optimizer = fabric.setup(module, sgd(module, 0.1 + rank))
    for _ in range(3):
        step(fabric, model, optimizer, batch(rank))


@both(refused=True)
def a_step_on_one_rank(fabric: Fabric, rank: int) -> None:
    module = net()
    model, optimizer = fabric.setup(module, sgd(module))
    for _ in range(3):
        fabric.backward(model(batch(rank)).square().mean())
        if rank:
            optimizer.step()
        optimizer.zero_grad()
    same(fabric, module[0].weight)


@both(refused=True, waits=True)
def without_synchronization_on_one_rank(fabric: Fabric, rank: int) -> None:
    module, model, optimizer = trained(fabric)
    for number in range(4):
        with fabric.no_backward_sync(model, enabled=rank == 0 and number == 0):
            fabric.backward(model(batch(number + rank)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    same(fabric, module[0].weight)


@both(waits=True, refused=True)
def a_block_is_skipped_on_one_rank(fabric: Fabric, rank: int) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))

        def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
            for number, block in enumerate(self.blocks):
                x = x if skip and number == 1 else block(x)
            return x

    torch.manual_seed(0)
    module = Skips()
    model, optimizer = fabric.setup(module, sgd(module))
    for number in range(3):
        fabric.backward(model(batch(number), skip=rank == 1 and number > 0).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    same(fabric, module.blocks[1][0].weight)


@both(waits=True, refused=True)
def a_step_more_on_one_rank(fabric: Fabric, rank: int) -> None:
    _, model, optimizer = trained(fabric)
    for number in range(3 + rank):
        step(fabric, model, optimizer, batch(number))


@both(waits=True, refused=True)
def clipping_on_one_rank(fabric: Fabric, rank: int) -> None:
    module, model, optimizer = trained(fabric)
    for number in range(3):
        fabric.backward(model(batch(number + rank)).square().mean())
        if rank:
            fabric.clip_gradients(model, optimizer, max_norm=0.01)
        optimizer.step()
        optimizer.zero_grad()
    same(fabric, module[0].weight)


@both()
def values_of_one_rank_are_not_a_number(fabric: Fabric, rank: int) -> None:
    _module, model, optimizer = trained(fabric, 1)
    fabric.backward(model(batch() * (float("nan") if rank else 1.0)).square().mean())
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()


@case(precision="16-mixed")
def an_overflow_on_one_rank(fabric: Fabric, rank: int) -> None:
    module, model, optimizer = trained(fabric)
    before = module[0].weight.detach().clone()
    step(fabric, model, optimizer, batch() * (1e30 if rank else 1.0))
    assert torch.equal(module[0].weight, before)
    step(fabric, model, optimizer, batch(rank))
    same(fabric, module[0].weight)


@both(refused=True)
def other_optimizers(fabric: Fabric, rank: int) -> None:
    module = net()
    kind = torch.optim.AdamW if rank else torch.optim.SGD
    model, optimizer = fabric.setup(module, kind(module.parameters(), lr=0.1))
    for number in range(3):
        step(fabric, model, optimizer, batch(number + rank))
    same(fabric, module[0].weight)


@both()
def a_module_that_is_set_up_twice(fabric: Fabric, rank: int) -> None:
    module, model, optimizer = trained(fabric)
    again = fabric.setup(model)
    step(fabric, again, optimizer, batch(rank))
    same(fabric, module[0].weight)


@both()
def an_optimizer_that_is_set_up_twice(fabric: Fabric, rank: int) -> None:
    module, model, optimizer = trained(fabric)
    optimizer = fabric.setup_optimizers(optimizer)
    before = module[0].weight.detach().clone()
    step(fabric, model, optimizer, batch(rank))
    same(fabric, module[0].weight)
    assert not torch.equal(
        getattr(module[0].weight, "full_tensor", lambda: module[0].weight)(), before
    )


# -- data -------------------------------------------------------------------------------------------------------------


def numbers(loader: Any) -> list[int]:
    return [int(x) for batch in loader for x in batch]


@case(refused=True, strategy=WAITS["ddp"])
def more_iterations_on_one_rank(fabric: Fabric, rank: int) -> None:
    loader = fabric.setup_dataloaders(DataLoader(range(16), batch_size=4, shuffle=True))
    for _ in range(2 if rank else 1):
        numbers(loader)
    found = fabric.all_gather(torch.tensor(numbers(loader))).flatten().tolist()
    assert sorted(found) == list(range(16)), found


@case(refused=True)
def an_iteration_that_one_rank_peeks_into(fabric: Fabric, rank: int) -> None:
    loader = fabric.setup_dataloaders(DataLoader(range(16), batch_size=2, shuffle=True))
    if rank == 0:
        next(iter(loader))
    for _ in range(2):
        found = [x for part in loader for x in fabric.gather_for_metrics(part).tolist()]
        assert sorted(found) == list(range(16)), found


@case()
def a_sampler_of_the_users(fabric: Fabric, rank: int) -> None:
    data = torch.arange(16)
    sampler = DistributedSampler(data, 2, rank)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, sampler=sampler))
    found = [x for part in loader for x in fabric.gather_for_metrics(part).tolist()]
    assert sorted(found) == list(range(16)), found


@case(refused=True, strategy=WAITS["ddp"])
def data_of_other_lengths(fabric: Fabric, rank: int) -> None:
    loader = fabric.setup_dataloaders(DataLoader(range(16 + 8 * rank), batch_size=2))
    found = [fabric.gather_for_metrics(part).tolist() for part in loader]
    assert sorted(x for part in found for x in part) == list(range(16)), found


@case(refused=True)
def other_batch_sizes(fabric: Fabric, rank: int) -> None:
    loader = fabric.setup_dataloaders(DataLoader(range(16), batch_size=2 + 2 * rank))
    found = [fabric.gather_for_metrics(part).tolist() for part in loader]
    assert sorted(x for part in found for x in part) == list(range(16)), found


@case(refused=True)
def shuffled_on_one_rank(fabric: Fabric, rank: int) -> None:
    loader = fabric.setup_dataloaders(DataLoader(range(16), batch_size=2, shuffle=rank == 0))
    found = [x for part in loader for x in fabric.gather_for_metrics(part).tolist()]
    assert sorted(found) == list(range(16)), found


@case()
def seeds_of_their_own(fabric: Fabric, rank: int) -> None:
    torch.manual_seed(rank)
    module = nn.Linear(4, 2)
    model, optimizer = fabric.setup(module, sgd(module))
    loader = fabric.setup_dataloaders(DataLoader(range(16), batch_size=2, shuffle=True))
    assert sorted(fabric.all_gather(torch.tensor(numbers(loader))).flatten().tolist()) == list(
        range(16)
    )
    step(fabric, model, optimizer, batch(rank))
    same(fabric, module.weight)


@case()
def a_loader_that_is_set_up_twice(fabric: Fabric, rank: int) -> None:
    loader = fabric.setup_dataloaders(fabric.setup_dataloaders(DataLoader(range(16), batch_size=2)))
    assert sorted(fabric.all_gather(torch.tensor(numbers(loader))).flatten().tolist()) == list(
        range(16)
    )


@case(refused=True)
def metrics_outside_of_a_loop(fabric: Fabric, rank: int) -> None:
    loader = fabric.setup_dataloaders(DataLoader(range(6), batch_size=2))
    numbers(loader)
    assert fabric.gather_for_metrics(torch.arange(2) + 2 * rank).tolist() == [0, 1, 2, 3]
    for _ in loader:
        fabric.gather_for_metrics(torch.arange(7))


@case()
def a_dataset_that_is_smaller_than_the_job(fabric: Fabric, rank: int) -> None:
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(1, 4)), batch_size=4))
    found = [fabric.gather_for_metrics(x) for (x,) in loader]
    assert [len(x) for x in found] == [1]

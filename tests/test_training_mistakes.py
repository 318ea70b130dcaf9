"""Loops with mistakes: they train nothing, the wrong thing, or different things on the ranks."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fabric import Fabric
from tests.judged_cases import (
    WAITS,
    assert_equal_on_all_ranks,
    batch,
    case,
    cases_of,
    full_tensor,
    judge,
    net,
    parallel_case,
    set_up_net,
    sgd,
    step,
    value_on,
)

# -- what is added, replaced or not set up ---------------------------------------------------------


@parallel_case()
def a_group_of_an_adapter(fabric: Fabric, rank: int) -> None:
    _, model, optimizer = set_up_net(fabric)
    adapter = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(adapter.parameters())})

    def adapted_model(x: torch.Tensor) -> torch.Tensor:
        return adapter(model(x))

    for _ in range(2):
        step(fabric, adapted_model, optimizer, batch(rank))
    assert_equal_on_all_ranks(fabric, adapter.weight)


@parallel_case()
def a_layer_is_replaced(fabric: Fabric, rank: int) -> None:
    module, model, optimizer = set_up_net(fabric)
    module[2] = nn.Linear(8, 2)
    optimizer.add_param_group({"params": list(module[2].parameters())})
    for _ in range(2):
        step(fabric, model, optimizer, batch(rank))
    assert_equal_on_all_ranks(fabric, module[2].weight)


@case(strategy="fsdp", refused=True)
def a_group_of_what_was_sharded(fabric: Fabric, rank: int) -> None:
    module = net()
    old_parameters = list(module[2].parameters())
    optimizer = sgd(module[0])
    model, optimizer = fabric.setup(module, optimizer)
    optimizer.add_param_group({"params": old_parameters})
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


@parallel_case(refused=True)
def a_head_that_came_after_the_optimizer(fabric: Fabric, rank: int) -> None:
    module = net()
    optimizer = sgd(module)
    module[2] = nn.Linear(8, 2)
    model, optimizer = fabric.setup(module, optimizer)
    step(fabric, model, optimizer, batch())


@case()
def nothing_is_set_up(fabric: Fabric, rank: int) -> None:
    module = nn.Linear(4, 1)
    optimizer = sgd(module)
    inputs = torch.full((4, 4), rank + 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            step(fabric, module, optimizer, inputs)
    # The warning is on the first rank.
    if rank == 0:
        assert caught


@parallel_case(refused=True)
def a_model_without_values(fabric: Fabric, rank: int) -> None:
    with fabric.init_module(empty_init=True):
        module = net()
    optimizer = sgd(module)
    model, optimizer = fabric.setup(module, optimizer)
    step(fabric, model, optimizer, batch())


@case()
def a_loader_that_is_not_set_up(fabric: Fabric, rank: int) -> None:
    _, model, optimizer = set_up_net(fabric)
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(16, 4, generator=generator)
    loader = DataLoader(data, batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for x in loader:
                step(fabric, model, optimizer, x)
    # The warning is on the first rank.
    if rank == 0:
        assert caught


# -- fsdp ------------------------------------------------------------------------------------------


@case(strategy="fsdp")
def a_hook_of_a_parameter(fabric: Fabric, rank: int) -> None:
    module = net()
    module[2].weight.register_hook(lambda grad: grad * 0)
    optimizer = sgd(module)
    model, optimizer = fabric.setup(module, optimizer)
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

    plain_model = Scaled()
    plain_optimizer = torch.optim.AdamW(plain_model.parameters(), 0.1)
    module = Scaled()
    optimizer = torch.optim.AdamW(module.parameters(), 0.1, foreach=True)
    model, optimizer = fabric.setup(module, optimizer)
    for _ in range(3):
        batch_of_all_ranks = torch.cat([batch(0), batch(1)])
        plain_model(batch_of_all_ranks).square().mean().backward()
        expected_norm = nn.utils.clip_grad_norm_(plain_model.parameters(), 0.5)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        loss = model(batch(rank)).square().mean()
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(norm, expected_norm)
    torch.testing.assert_close(full_tensor(model.scale), plain_model.scale)


@case(strategy="fsdp", refused=True)
def channels_last(fabric: Fabric, rank: int) -> None:
    module = nn.Conv2d(4, 4, 3)
    fabric.setup(module.to(memory_format=torch.channels_last))


@case(strategy="fsdp", refused=True)
def a_module_inside_of_two(fabric: Fabric, rank: int) -> None:
    inner = nn.Linear(4, 4)
    fabric.setup(inner)
    fabric.setup(nn.Sequential(inner, nn.Linear(4, 4)))


@case(strategy="fsdp", refused=True)
def sparse_gradients(fabric: Fabric, rank: int) -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    fabric.setup(nn.Sequential(embedding, nn.Linear(4, 1)))


@case(strategy="fsdp", refused=True)
def an_optimizer_without_a_step_for_shards(fabric: Fabric, rank: int) -> None:
    module = nn.Linear(3, 5)
    optimizer = torch.optim.Adafactor(module.parameters())
    model, optimizer = fabric.setup(module, optimizer)
    step(fabric, model, optimizer, torch.ones(2, 3))


@parallel_case(refused=True)
def another_dtype_after_setup(fabric: Fabric, rank: int) -> None:
    _, model, _ = set_up_net(fabric)
    model.double()


# -- ranks that do not do the same -----------------------------------------------------------------


@parallel_case(refused=True)
def other_widths(fabric: Fabric, rank: int) -> None:
    fabric.setup(nn.Linear(4, 4 + rank))


@parallel_case(refused=True)
def a_layer_more(fabric: Fabric, rank: int) -> None:
    layers = [nn.Linear(4, 4) for _ in range(2 + rank)]
    fabric.setup(nn.Sequential(*layers))


@parallel_case(refused=True)
def frozen_on_one_rank(fabric: Fabric, rank: int) -> None:
    module = net()
    module[0].requires_grad_(rank == 0)
    optimizer = sgd(module)
    model, optimizer = fabric.setup(module, optimizer)
    for number in range(2):
        step(fabric, model, optimizer, batch(number + rank))
    assert_equal_on_all_ranks(fabric, module[0].weight)


@parallel_case(refused=True)
def other_dtypes(fabric: Fabric, rank: int) -> None:
    dtype = value_on(rank, torch.float32, torch.float64)
    module = nn.Linear(4, 4, dtype=dtype)
    optimizer = sgd(module)
    model, optimizer = fabric.setup(module, optimizer)
    step(fabric, model, optimizer, batch().to(dtype))


@parallel_case(refused=True)
def other_learning_rates(fabric: Fabric, rank: int) -> None:
    module = net()
    optimizer = sgd(module, 0.1 + rank)
    model, optimizer = fabric.setup(module, optimizer)
    for _ in range(3):
        step(fabric, model, optimizer, batch(rank))


@parallel_case(refused=True)
def a_step_on_one_rank(fabric: Fabric, rank: int) -> None:
    module = net()
    optimizer = sgd(module)
    model, optimizer = fabric.setup(module, optimizer)
    for _ in range(3):
        loss = model(batch(rank)).square().mean()
        fabric.backward(loss)
        if rank:
            optimizer.step()
        optimizer.zero_grad()
    assert_equal_on_all_ranks(fabric, module[0].weight)


@parallel_case(refused=True, waits=True)
def without_synchronization_on_one_rank(fabric: Fabric, rank: int) -> None:
    module, model, optimizer = set_up_net(fabric)
    for number in range(4):
        is_local = rank == 0 and number == 0
        with fabric.no_backward_sync(model, enabled=is_local):
            loss = model(batch(number + rank)).square().mean()
            fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_on_all_ranks(fabric, module[0].weight)


@parallel_case(waits=True, refused=True)
def a_block_is_skipped_on_one_rank(fabric: Fabric, rank: int) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList()
            for _ in range(3):
                self.blocks.append(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

        def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
            x = self.blocks[0](x)
            if not skip:
                x = self.blocks[1](x)
            return self.blocks[2](x)

    torch.manual_seed(0)
    module = Skips()
    optimizer = sgd(module)
    model, optimizer = fabric.setup(module, optimizer)
    for number in range(3):
        skips = rank == 1 and number > 0
        loss = model(batch(number), skip=skips).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_on_all_ranks(fabric, module.blocks[1][0].weight)


@parallel_case(waits=True, refused=True)
def a_step_more_on_one_rank(fabric: Fabric, rank: int) -> None:
    _, model, optimizer = set_up_net(fabric)
    for number in range(3 + rank):
        step(fabric, model, optimizer, batch(number))


@parallel_case(waits=True, refused=True)
def clipping_on_one_rank(fabric: Fabric, rank: int) -> None:
    module, model, optimizer = set_up_net(fabric)
    for number in range(3):
        loss = model(batch(number + rank)).square().mean()
        fabric.backward(loss)
        if rank:
            fabric.clip_gradients(model, optimizer, max_norm=0.01)
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_on_all_ranks(fabric, module[0].weight)


@parallel_case()
def values_of_one_rank_are_not_a_number(fabric: Fabric, rank: int) -> None:
    _, model, optimizer = set_up_net(fabric, 1)
    factor = value_on(rank, 1.0, math.nan)
    loss = model(batch() * factor).square().mean()
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()


@case(precision="16-mixed")
def an_overflow_on_one_rank(fabric: Fabric, rank: int) -> None:
    module, model, optimizer = set_up_net(fabric)
    before = module[0].weight.detach().clone()
    factor = value_on(rank, 1.0, 1e30)
    step(fabric, model, optimizer, batch() * factor)
    assert torch.equal(module[0].weight, before)
    step(fabric, model, optimizer, batch(rank))
    assert_equal_on_all_ranks(fabric, module[0].weight)


@parallel_case(refused=True)
def other_optimizers(fabric: Fabric, rank: int) -> None:
    module = net()
    optimizer_class = value_on(rank, torch.optim.SGD, torch.optim.AdamW)
    optimizer = optimizer_class(module.parameters(), lr=0.1)
    model, optimizer = fabric.setup(module, optimizer)
    for number in range(3):
        step(fabric, model, optimizer, batch(number + rank))
    assert_equal_on_all_ranks(fabric, module[0].weight)


@parallel_case()
def a_module_that_is_set_up_twice(fabric: Fabric, rank: int) -> None:
    module, model, optimizer = set_up_net(fabric)
    again = fabric.setup(model)
    step(fabric, again, optimizer, batch(rank))
    assert_equal_on_all_ranks(fabric, module[0].weight)


@parallel_case()
def an_optimizer_that_is_set_up_twice(fabric: Fabric, rank: int) -> None:
    module, model, optimizer = set_up_net(fabric)
    optimizer = fabric.setup_optimizers(optimizer)
    before = full_tensor(module[0].weight).detach().clone()
    step(fabric, model, optimizer, batch(rank))
    assert_equal_on_all_ranks(fabric, module[0].weight)
    assert not torch.equal(full_tensor(module[0].weight), before)


# -- data ------------------------------------------------------------------------------------------


def rank_samples(loader: Any) -> list[int]:
    """Return the samples that a loader yields on this rank."""
    samples: list[int] = []
    for rank_batch in loader:
        samples += rank_batch.tolist()
    return samples


def all_samples(fabric: Fabric, loader: Any) -> list[int]:
    """Return the samples that a loader yields on all ranks."""
    samples = torch.tensor(rank_samples(loader))
    return fabric.all_gather(samples).flatten().tolist()


def gathered_samples(fabric: Fabric, loader: Any) -> list[int]:
    """Return the samples of a loader as ``gather_for_metrics`` gathers them."""
    samples: list[int] = []
    for rank_batch in loader:
        samples += fabric.gather_for_metrics(rank_batch).tolist()
    return samples


@case(refused=True, strategy=WAITS["ddp"])
def more_iterations_on_one_rank(fabric: Fabric, rank: int) -> None:
    loader = DataLoader(range(16), batch_size=4, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    for _ in range(1 + rank):
        rank_samples(loader)
    samples = all_samples(fabric, loader)
    assert sorted(samples) == list(range(16)), samples


@case(refused=True)
def an_iteration_that_one_rank_peeks_into(fabric: Fabric, rank: int) -> None:
    loader = DataLoader(range(16), batch_size=2, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    if rank == 0:
        next(iter(loader))
    for _ in range(2):
        samples = gathered_samples(fabric, loader)
        assert sorted(samples) == list(range(16)), samples


@case()
def a_sampler_of_the_users(fabric: Fabric, rank: int) -> None:
    data = torch.arange(16)
    sampler = DistributedSampler(data, 2, rank)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    loader = fabric.setup_dataloaders(loader)
    samples = gathered_samples(fabric, loader)
    assert sorted(samples) == list(range(16)), samples


@case(refused=True, strategy=WAITS["ddp"])
def data_of_other_lengths(fabric: Fabric, rank: int) -> None:
    loader = DataLoader(range(16 + 8 * rank), batch_size=2)
    loader = fabric.setup_dataloaders(loader)
    samples = gathered_samples(fabric, loader)
    assert sorted(samples) == list(range(16)), samples


@case(refused=True)
def other_batch_sizes(fabric: Fabric, rank: int) -> None:
    loader = DataLoader(range(16), batch_size=2 + 2 * rank)
    loader = fabric.setup_dataloaders(loader)
    samples = gathered_samples(fabric, loader)
    assert sorted(samples) == list(range(16)), samples


@case(refused=True)
def shuffled_on_one_rank(fabric: Fabric, rank: int) -> None:
    loader = DataLoader(range(16), batch_size=2, shuffle=rank == 0)
    loader = fabric.setup_dataloaders(loader)
    samples = gathered_samples(fabric, loader)
    assert sorted(samples) == list(range(16)), samples


@case()
def seeds_of_their_own(fabric: Fabric, rank: int) -> None:
    torch.manual_seed(rank)
    module = nn.Linear(4, 2)
    optimizer = sgd(module)
    model, optimizer = fabric.setup(module, optimizer)
    loader = DataLoader(range(16), batch_size=2, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    assert sorted(all_samples(fabric, loader)) == list(range(16))
    step(fabric, model, optimizer, batch(rank))
    assert_equal_on_all_ranks(fabric, module.weight)


@case()
def a_loader_that_is_set_up_twice(fabric: Fabric, rank: int) -> None:
    loader = fabric.setup_dataloaders(DataLoader(range(16), batch_size=2))
    loader = fabric.setup_dataloaders(loader)
    assert sorted(all_samples(fabric, loader)) == list(range(16))


@case(refused=True)
def metrics_outside_of_a_loop(fabric: Fabric, rank: int) -> None:
    loader = DataLoader(range(6), batch_size=2)
    loader = fabric.setup_dataloaders(loader)
    rank_samples(loader)
    gathered = fabric.gather_for_metrics(torch.arange(2) + 2 * rank)
    assert gathered.tolist() == [0, 1, 2, 3]
    for _ in loader:
        fabric.gather_for_metrics(torch.arange(7))


@case()
def a_dataset_that_is_smaller_than_the_job(fabric: Fabric, rank: int) -> None:
    loader = DataLoader(TensorDataset(torch.ones(1, 4)), batch_size=4)
    loader = fabric.setup_dataloaders(loader)
    gathered = [fabric.gather_for_metrics(x) for (x,) in loader]
    assert len(gathered) == 1
    assert len(gathered[0]) == 1


@pytest.mark.parametrize("name", cases_of(__name__, slow=10))
def test_a_case_ends_right_or_with_an_error_of_fabric_and_leaves_nothing(name: str) -> None:
    assert judge(name).problems == []

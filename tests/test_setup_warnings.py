"""A model or a loader that was not set up is a warning on the first rank."""

import gc
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fabric import Fabric
from tests.models import Net
from tests.ranks import outcome, run_in_ranks


class Report(NamedTuple):
    """The user warnings of a rank, and its errors, or "fine"."""

    warnings: list[str]
    errors: str


def report(fabric: Fabric, action: Callable[[], object], times: int = 1) -> Report:
    """Run an action several times, together with the other ranks."""
    errors = ""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        for _ in range(times):
            result = outcome(action)
            if result != "fine":
                errors += result
            fabric.barrier()
    messages = []
    for record in records:
        if issubclass(record.category, UserWarning):
            messages.append(str(record.message))
    return Report(messages, errors or "fine")


def make_net() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=1e-4)


# -- models ---------------------------------------------------------------------------------------


def train_without_setup(fabric: Fabric, batches_differ: bool) -> Report:
    net, optimizer = make_net()
    batch = torch.ones(2, 4)
    if batches_differ:
        batch += fabric.global_rank

    def step_alone() -> None:
        optimizer.zero_grad()
        net(batch).sum().backward()
        optimizer.step()

    return report(fabric, step_alone, times=3)


@pytest.mark.parametrize("batches_differ", [False, True])
def test_processes_without_a_module_that_is_set_up_are_warned_and_compared(
    batches_differ: bool,
) -> None:
    first, second = run_in_ranks(train_without_setup, batches_differ)
    (warning,) = first.warnings
    assert (
        "of 2 processes each has a model of its own: model, optimizer = fabric.setup(model, "
        in warning
    )
    assert second.warnings == []
    for rank_report in (first, second):
        is_error = "the replicas of ranks 0 and 1 differ" in rank_report.errors
        assert is_error == batches_differ


def train_without_setup_after_a_dropped_module(fabric: Fabric) -> Report:
    fabric.setup(*make_net())
    gc.collect()
    return train_without_setup(fabric, batches_differ=False)


def test_a_job_that_has_set_up_a_module_is_not_warned() -> None:
    reports = run_in_ranks(train_without_setup_after_a_dropped_module)
    assert reports == [Report([], "fine")] * 2


class AveragingSGD(torch.optim.SGD):
    """An optimizer that averages the gradients over the ranks in its own step."""

    def __init__(self, fabric: Fabric, net: Net) -> None:
        super().__init__(net.parameters(), lr=0.1)
        self.fabric = fabric

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = self.fabric.all_reduce(parameter.grad)
        return super().step(closure)


def train_with_an_optimizer_that_communicates(fabric: Fabric) -> tuple[Report, torch.Tensor]:
    net, _ = make_net()
    optimizer = AveragingSGD(fabric, net)
    batch = torch.ones(2, 4) + fabric.global_rank

    def step() -> None:
        optimizer.zero_grad()
        net(batch).sum().backward()
        optimizer.step()

    return report(fabric, step, times=3), net.head.bias.detach()


def test_an_optimizer_that_communicates_by_itself_trains_without_setup_and_warnings() -> None:
    results = run_in_ranks(train_with_an_optimizer_that_communicates, check_training=False)
    (first_report, first_bias), (second_report, second_bias) = results
    assert first_report == second_report == Report([], "fine")
    assert torch.equal(first_bias, second_bias)


# -- loaders --------------------------------------------------------------------------------------

DATA = TensorDataset(torch.ones(8, 4))


def train_on(fabric: Fabric, loader: Any) -> Report:
    net, optimizer = make_net()
    model, optimizer = fabric.setup(net, optimizer)

    def loop() -> None:
        for (x,) in loader:
            loss = model(x).mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    return report(fabric, loop)


def train_on_each_loader(fabric: Fabric) -> dict[str, Report]:
    sampler = DistributedSampler(DATA, 2, fabric.global_rank)
    reports = {}
    reports["with a sampler"] = train_on(fabric, DataLoader(DATA, batch_size=2, sampler=sampler))
    reports["plain"] = train_on(fabric, DataLoader(DATA, batch_size=2, shuffle=True))
    # This must be last: a job that has set up a loader is not warned.
    loader = fabric.setup_dataloaders(DataLoader(DATA, batch_size=2))
    reports["set up"] = train_on(fabric, loader)
    return reports


def test_a_loader_that_is_not_set_up_is_a_warning_on_the_first_rank() -> None:
    first, second = run_in_ranks(train_on_each_loader)
    (warning,) = first["plain"].warnings
    assert "of 2 processes each reads the whole TensorDataset: loader = fabric.setup_" in warning
    assert first["plain"].errors == "fine"
    assert first["with a sampler"] == Report([], "fine")
    assert first["set up"] == Report([], "fine")
    for rank_report in second.values():
        assert rank_report == Report([], "fine")

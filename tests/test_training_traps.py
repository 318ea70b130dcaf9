"""Mistakes that train something else without a word in plain torch: each raises here, or cannot be made."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from tests.models import Net, OneWeight
from tests.ranks import outcome, run_in_ranks

pytestmark = pytest.mark.timeout(90)

X = torch.ones(2, 4)
Outcomes = dict[str, Any]


def set_up(fabric: Fabric) -> tuple[Any, torch.optim.Optimizer]:
    net = Net()
    return fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))


def under_ddp(fabric: Fabric) -> Outcomes:
    model, _ = set_up(fabric)

    def backward_alone() -> None:
        loss = model(X).sum()
        with fabric.no_backward_sync(model):
            fabric.backward(loss)

    weight = OneWeight()
    sgd = torch.optim.SGD(weight.parameters(), lr=1.0)
    other, sgd, scheduler = fabric.setup(
        weight, sgd, scheduler=torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    )
    fabric.backward(other(X[0]))
    return {
        "module": outcome(lambda: fabric.backward(model.module(X).sum())),
        "method": outcome(lambda: fabric.backward(model.loss(X))),
        "submodule": outcome(lambda: fabric.backward(model.encoder(X).sum())),
        "backward alone": outcome(backward_alone),
        "learning rates": [
            (sgd.step(), scheduler.step(), scheduler.get_last_lr()[0])[2] for _ in range(3)
        ],
    }


def under_fsdp(fabric: Fabric) -> Outcomes:
    early = Net()
    stale = torch.optim.AdamW(early.parameters())
    fabric.setup_module(early)
    model, optimizer = set_up(fabric)
    model.module.set_requires_gradient_sync(False)
    fabric.backward(model(X).sum())
    unreduced = outcome(optimizer.step)
    model.module.set_requires_gradient_sync(True)
    fabric.backward(model(X).sum())
    norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with fabric.init_module():
        deferred = nn.Linear(4, 8)
    whole = fabric.strategy.get_module_state_dict(fabric.setup_module(deferred)._fabric_prepared)[
        "weight"
    ]
    return {
        "stale optimizer": outcome(lambda: fabric.setup_optimizers(stale)),
        "unreduced": unreduced,
        "reduced": outcome(optimizer.step),
        "norm": type(norm),
        "different rows": len(whole.unique(dim=0)),
    }


@pytest.fixture(scope="module")
def ddp() -> list[Outcomes]:
    return run_in_ranks(under_ddp)


@pytest.fixture(scope="module")
def fsdp() -> list[Outcomes]:
    return run_in_ranks(under_fsdp, strategy="fsdp")


@pytest.mark.parametrize("door", ["module", "method", "submodule"])
def test_ddp_forward_through_another_door_raises(ddp: list[Outcomes], door: str) -> None:
    assert all("these gradients would not be synchronized" in results[door] for results in ddp)


def test_ddp_no_sync_around_backward_only_raises(ddp: list[Outcomes]) -> None:
    assert all("inside of no_backward_sync" in results["backward alone"] for results in ddp)


def test_a_scheduler_is_stepped_once_not_once_per_process(ddp: list[Outcomes]) -> None:
    assert [results["learning rates"] for results in ddp] == [[0.5, 0.25, 0.125]] * 2


def test_fsdp_optimizer_from_before_the_sharding_raises(fsdp: list[Outcomes]) -> None:
    assert all(
        "none of its parameters belongs to a module that is set up" in results["stale optimizer"]
        for results in fsdp
    )


def test_fsdp_step_without_gradient_sync_raises(fsdp: list[Outcomes]) -> None:
    assert all("did not reduce the gradients" in results["unreduced"] for results in fsdp)
    assert all(results["reduced"] == "fine" for results in fsdp)


def test_fsdp_clipping_returns_the_whole_norm(fsdp: list[Outcomes]) -> None:
    assert all(results["norm"] is Tensor for results in fsdp)


def test_fsdp_deferred_shards_have_rows_of_their_own(fsdp: list[Outcomes]) -> None:
    assert all(results["different rows"] == 8 for results in fsdp)


def test_two_optimizers_share_one_loss_scale() -> None:
    with Fabric(accelerator="cpu", devices=1, precision="16-mixed") as fabric:
        nets = [OneWeight(), OneWeight()]
        pairs = [fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0)) for net in nets]
        fabric.backward(sum(model(X[0]) for model, _ in pairs))
        for _, optimizer in pairs:
            optimizer.step()
        assert [net.weight.tolist() for net in nets] == [[0.0] * 4] * 2


def test_a_scheduler_made_earlier_does_not_hide_what_happens_around_a_step() -> None:
    with Fabric(accelerator="cpu", devices=1, precision="16-mixed") as fabric:
        net = OneWeight()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, optimizer, _ = fabric.setup(net, optimizer, scheduler=scheduler)
        fabric.backward(model(X[0]))
        optimizer.step()
        assert net.weight.tolist() == [0.0] * 4


def test_dp_replicas_compute_under_the_autocast_of_the_caller_and_on_the_cpu_too() -> None:
    seen = []

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            seen.append(result.dtype)
            return result

    with Fabric(accelerator="cpu", devices=2, strategy="dp", precision="bf16-mixed") as fabric:
        fabric.setup(Noting(4, 1))(X)
    assert seen == [torch.bfloat16] * 2

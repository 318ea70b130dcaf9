"""DDP on real processes: what its contract says beyond equal numbers, which tests/test_parity.py shows."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)

from fabric import Fabric
from fabric.strategies import DDPStrategy
from tests.models import Net, OneWeight
from tests.ranks import outcome, run_in_ranks

pytestmark = pytest.mark.timeout(90)


def one_step(fabric: Fabric, seed_of_data: int | None = None) -> torch.Tensor:
    """Parameters after one step on data that differs between ranks."""
    torch.manual_seed(0)
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    torch.manual_seed(fabric.global_rank if seed_of_data is None else seed_of_data)
    fabric.backward(model(torch.randn(4, 4)).pow(2).mean())
    optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def doors(fabric: Fabric) -> dict[str, str]:
    net = Net()
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    weight = OneWeight()
    bare = fabric.setup(weight)
    x = torch.ones(2, 4)

    def outside_of_no_sync() -> None:
        with fabric.no_backward_sync(model):
            loss = model(x).sum()
        fabric.backward(loss)

    def accumulating() -> None:
        with fabric.no_backward_sync(model):
            fabric.backward(model.encoder(x).sum())
        fabric.backward(model(x).sum())

    results = {
        "front": outcome(lambda: fabric.backward(model(x).sum())),
        "submodule": outcome(lambda: fabric.backward(model.encoder(x).sum())),
        "block": outcome(lambda: fabric.backward(model.blocks[0](torch.ones(1, 8)).sum())),
        "method": outcome(lambda: fabric.backward(model.loss(x))),
        "plain backward": outcome(lambda: model.loss(x).backward()),
        "user's own module": outcome(lambda: fabric.backward(net(x).sum())),
        "method without submodules": outcome(lambda: fabric.backward(bare.penalty())),
        "training_step": outcome(lambda: fabric.backward(model.training_step(x))),
        "backward outside of no_sync": outcome(outside_of_no_sync),
        "accumulating": outcome(accumulating),
        "beside the front": outcome(
            lambda: fabric.backward(model(x).sum() + model.encoder(x).sum())
        ),
        "method without gradients": outcome(lambda: model.num_parameters()),
    }
    model.mark_forward_method("loss")
    results["marked method"] = outcome(lambda: fabric.backward(model.loss(x)))
    return results


def test_every_door_synchronises_or_raises() -> None:
    fine = {
        "front",
        "training_step",
        "accumulating",
        "beside the front",
        "marked method",
        "method without gradients",
    }
    for rank, results in enumerate(run_in_ranks(doors)):
        assert {door for door, result in results.items() if result == "fine"} == fine
        refused = [result for door, result in results.items() if door not in fine]
        assert all(
            "would not be synchronized" in text and f"on rank {rank}" in text for text in refused
        )
        assert "model.encoder(...)" in results["submodule"]
        assert "mark_forward_method" in results["method"]


def sync_states(fabric: Fabric) -> list[bool]:
    net = Net()
    model = fabric.setup(net)
    strategy = fabric.strategy
    prepared = model._fabric_prepared
    synchronizes = strategy.gradient_contract(prepared).synchronizes
    seen = []
    with fabric.no_backward_sync(model):
        with fabric.no_backward_sync(model, enabled=False), fabric.no_backward_sync([model, model]):
            seen.append(synchronizes())
        with strategy.block_backward_sync(prepared):
            pass
        seen.append(synchronizes())
    try:
        with fabric.no_backward_sync(model):
            raise KeyError
    except KeyError:
        seen.append(synchronizes())
    return seen


def test_no_backward_sync_restores_the_state_before() -> None:
    assert run_in_ranks(sync_states) == [[False, False, True]] * 2


def frozen(fabric: Fabric) -> tuple[list[float], bool]:
    net = OneWeight().requires_grad_(False)
    nn.init.constant_(net.weight, fabric.global_rank + 1)
    model = fabric.setup(net)
    with fabric.no_backward_sync(model):
        model(torch.ones(4))
    return net.weight.tolist(), model._fabric_prepared is net


def test_a_module_without_trainable_parameters_is_broadcast_and_not_wrapped() -> None:
    assert run_in_ranks(frozen) == [([1.0] * 4, True)] * 2


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 1)
        self.left_out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def two_steps_unused(fabric: Fabric) -> str:
    model = fabric.setup(Unused())

    def steps() -> None:
        for _ in range(2):
            fabric.backward(model(torch.ones(2, 4)).sum())

    return outcome(steps)


def test_an_unused_parameter_is_named() -> None:
    for text in run_in_ranks(two_steps_unused):
        assert "left_out.weight, left_out.bias" in text
        assert "ddp_find_unused_parameters_true" in text
    assert run_in_ranks(
        two_steps_unused, strategy="ddp_forkserver_find_unused_parameters_true"
    ) == ["fine", "fine"]


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"ddp_comm_hook": default_hooks.allreduce_hook}, 0.0),
        ({"ddp_comm_hook": default_hooks.fp16_compress_hook}, 1e-3),
        (
            {
                "ddp_comm_hook": default_hooks.allreduce_hook,
                "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
            },
            1e-3,
        ),
    ],
)
def test_comm_hooks_carry_the_gradients(options: dict[str, Any], tolerance: float) -> None:
    expected = run_in_ranks(one_step)[0]
    strategy = DDPStrategy(start_method="forkserver", **options)
    for actual in run_in_ranks(one_step, strategy=strategy):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def power_sgd(fabric: Fabric) -> tuple[float, float]:
    net = OneWeight()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(4):
        fabric.backward(model(torch.full((4,), float(fabric.global_rank))))
        optimizer.step()
        optimizer.zero_grad()
    return net.weight.sum().item(), fabric.all_reduce(
        net.weight.detach(), reduce_op="max"
    ).sum().item()


def test_power_sgd_keeps_replicas_equal() -> None:
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2
    )
    strategy = DDPStrategy(
        start_method="forkserver", ddp_comm_state=state, ddp_comm_hook=powerSGD_hook.powerSGD_hook
    )
    for own, largest in run_in_ranks(power_sgd, strategy=strategy):
        assert own == largest


def drifting(fabric: Fabric) -> list[float]:
    """How far replicas are apart after each step; each sees data of its own."""
    net = OneWeight()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    apart = []
    for _ in range(8):
        fabric.backward(model(torch.full((4,), float(fabric.global_rank))))
        optimizer.step()
        optimizer.zero_grad()
        ends = [fabric.all_reduce(net.weight.detach(), reduce_op=op) for op in ("max", "min")]
        apart.append((ends[0] - ends[1]).max().item())
    return apart


def test_replicas_drift_and_are_averaged_every_so_many_steps() -> None:
    state = PostLocalSGDState(
        process_group=None,
        subgroup=None,
        start_localSGD_iter=2,
        post_local_gradient_allreduce=False,
    )
    strategy = DDPStrategy(
        start_method="forkserver",
        ddp_comm_state=state,
        ddp_comm_hook=post_localSGD_hook,
        model_averaging_period=3,
    )
    for apart in run_in_ranks(drifting, strategy=strategy):
        assert [distance < 1e-6 for distance in apart] == [
            True,
            True,
            True,
            False,
            False,
            True,
            False,
            False,
        ]


def average_after_overflow(fabric: Fabric) -> list[float]:
    net = OneWeight()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    weights = []
    for factor in (float("inf"), float(fabric.global_rank)):
        fabric.backward(model(torch.full((4,), factor)))
        optimizer.step()
        optimizer.zero_grad()
        weights.append(net.weight.mean().item())
    return weights


def test_a_step_that_overflows_averages_nothing() -> None:
    state = PostLocalSGDState(
        None, subgroup=None, start_localSGD_iter=0, post_local_gradient_allreduce=False
    )
    strategy = DDPStrategy(
        start_method="forkserver",
        ddp_comm_state=state,
        ddp_comm_hook=post_localSGD_hook,
        model_averaging_period=2,
    )
    for weights in run_in_ranks(average_after_overflow, strategy=strategy, precision="16-mixed"):
        assert weights == [1.0, pytest.approx(0.95)]


def overflow_on_one_rank(fabric: Fabric) -> tuple[list[float], list[float]]:
    net = OneWeight()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    weights = []
    scales = []
    for step in range(2):
        bad = step == 0 and fabric.global_rank == 1
        fabric.backward(model(torch.full((4,), float("inf") if bad else 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        weights.append(net.weight.mean().item())
        scales.append(float(fabric.describe().split()[-1]))
    return weights, scales


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    for weights, scales in run_in_ranks(overflow_on_one_rank, precision="16-mixed"):
        assert weights == [1.0, pytest.approx(0.9)]
        assert scales == [65536.0, 32768.0]


def contract(fabric: Fabric) -> dict[str, Any]:
    strategy = fabric.strategy
    group = strategy.communicator().new_group([0, 1])
    rank = fabric.global_rank
    results = {
        "place": (
            strategy.global_rank,
            strategy.local_rank,
            strategy.node_rank,
            strategy.world_size,
        ),
        "flags": (strategy.is_global_zero == (rank == 0), strategy.is_distributed),
        "sampler": strategy.distributed_sampler_kwargs,
        "reduced": strategy.all_reduce({"x": torch.tensor([float(rank)]), "n": 3}),
        "group": strategy.all_reduce(torch.tensor(float(rank)), group=group).item()
        if group
        else None,
        "reduce": strategy.reduce(torch.tensor(rank), reduce_op="sum").item(),
        "gathered": strategy.all_gather(torch.tensor([rank])).tolist(),
        "sent": strategy.broadcast({"from": rank}, src=2),
        "all": strategy.reduce_boolean_decision(rank > 0),
        "any": strategy.reduce_boolean_decision(rank > 0, all=False),
        "moved": strategy.batch_to_device([torch.ones(1), "text"]),
    }
    strategy.barrier("end")
    return results


def test_the_contract_of_every_strategy_on_three_ranks() -> None:
    for rank, results in enumerate(run_in_ranks(contract, ranks=3)):
        assert results == {
            "place": (rank, rank, 0, 3),
            "flags": (True, True),
            "sampler": {"num_replicas": 3, "rank": rank},
            "reduced": {"x": torch.tensor([1.0]), "n": 3},
            "group": 0.5 if rank < 2 else None,
            "reduce": 3,
            "gathered": [[0], [1], [2]],
            "sent": {"from": 2},
            "all": False,
            "any": True,
            "moved": [torch.ones(1), "text"],
        }


def test_a_batch_norm_stays_the_same_object_and_gets_its_class_back() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    layer = net[1]
    calls = []
    layer.register_forward_hook(lambda *call: calls.append(call))
    strategy = DDPStrategy(sync_batchnorm=True)
    strategy.setup_environment()
    try:
        with pytest.raises(
            ValueError, match="only work with GPU modules"
        ):  # torch's own, on the CPU
            strategy.setup_module(net)
        assert net[1] is layer
        assert isinstance(layer, nn.SyncBatchNorm)
        net.eval()(torch.ones(2, 4))
    finally:
        strategy.teardown()
    assert type(layer) is nn.BatchNorm1d
    net.train()(torch.ones(2, 4))
    assert len(calls) == 2


def test_a_strategy_works_without_fabric() -> None:
    strategy = DDPStrategy()
    strategy.setup_environment()
    try:
        model = strategy.setup_module(strategy.module_to_device(Net()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        assert strategy.optimizer_step(optimizer, lambda: 5.0) == 5.0
        state = strategy.get_module_state_dict(model)
        assert "encoder.weight" in state
        strategy.load_module_state_dict(model, state)
    finally:
        strategy.teardown()

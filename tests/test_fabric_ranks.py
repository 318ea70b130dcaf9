"""Fabric on several real processes: what differs between ranks, and what is equal on all."""

import contextlib
import gc
import io
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fabric import Fabric
from fabric._torch import local_tensor
from fabric.environments import SlurmEnvironment
from fabric.errors import RankFailedError
from fabric.loggers import CSVLogger
from fabric.world import World
from tests.models import Net
from tests.ranks import outcome, run_in_ranks


def draw(fabric: Fabric) -> list[float]:
    return [random.random(), torch.rand(1).item()]


@pytest.mark.parametrize("per_rank", [False, True])
def test_a_seed_given_before_launch_reaches_every_rank(per_rank: bool) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_forkserver")
    fabric.seed_everything(5, per_rank=per_rank)
    expected = draw(fabric)
    first, second = fabric.launch(draw, return_all=True)
    assert first == expected
    if per_rank:
        assert second[0] != first[0] != second[1]
    else:
        assert second == first


class Seeding(NamedTuple):
    seed: int
    common_draws: list[float]
    rank_draws: list[float]


def seed_without_and_with_ranks(fabric: Fabric) -> Seeding:
    random.seed(fabric.global_rank)
    seed = fabric.seed_everything()
    common_draws = draw(fabric)
    fabric.seed_everything(1, per_rank=True)
    return Seeding(seed, common_draws, draw(fabric))


def test_without_a_seed_all_ranks_choose_the_same_and_streams_per_rank_are_distinct() -> None:
    first, second, third = run_in_ranks(seed_without_and_with_ranks, ranks=3)
    assert first.seed == second.seed == third.seed
    assert first.common_draws == second.common_draws == third.common_draws
    assert first.rank_draws != second.rank_draws
    assert first.rank_draws != third.rank_draws
    assert second.rank_draws != third.rank_draws


def print_and_log(fabric: Fabric) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        fabric.print("rank", fabric.global_rank, sep="=")
    fabric.log_dict({"loss": torch.tensor(1.5)}, step=1)
    return text.getvalue()


def test_output_comes_from_the_first_rank_alone(tmp_path: Path) -> None:
    results = run_in_ranks(print_and_log, loggers=CSVLogger(tmp_path))
    assert results == ["rank=0\n", ""]
    assert [path.name for path in tmp_path.glob("*/*/*")] == ["metrics.csv"]


def go_ahead(fabric: Fabric, folder: Path) -> bool:
    with fabric.rank_zero_first():
        exists = (folder / "data").exists()
        if fabric.is_global_zero:
            (folder / "data").write_text("ready")
    return exists


def test_the_first_rank_goes_ahead(tmp_path: Path) -> None:
    results = run_in_ranks(go_ahead, tmp_path, ranks=3)
    assert results == [False, True, True]


def fail_in_block(fabric: Fabric) -> tuple[str, int]:
    entered = []

    def block() -> None:
        with fabric.rank_zero_first():
            entered.append(fabric.global_rank)
            raise FileNotFoundError("no such data set")

    text = outcome(block)
    fabric.all_reduce(0, reduce_op="sum")
    return text, len(entered)


def test_an_exception_of_the_first_rank_reaches_all_and_the_job_goes_on() -> None:
    results = run_in_ranks(fail_in_block, ranks=3)
    assert results[0] == ("FileNotFoundError: no such data set\n", 1)
    for rank in (1, 2):
        text, entered = results[rank]
        assert text.startswith("UsageError")
        assert f"on rank {rank}" in text
        assert "FileNotFoundError: no such data set" in text
        assert entered == 0


class OneRankPerNode:
    """An environment in which every rank of a job on this machine has a node of its own."""

    name = "one rank per node"

    def detect(self, env: Mapping[str, str]) -> World | None:
        rank = int(env["RANK"])
        size = int(env["WORLD_SIZE"])
        return World(
            rank=rank,
            node_rank=rank,
            world_size=size,
            local_world_size=1,
            store=env["FABRIC_STORE"],
        )


def go_ahead_on_its_node(fabric: Fabric, folder: Path) -> list[bool]:
    with Fabric(accelerator="cpu", environment=OneRankPerNode()) as nodes:
        nodes.launch()
        existed = []
        for attempt in range(2):
            with nodes.rank_zero_first(local=True):
                file = folder / f"{nodes.node_rank}-{attempt}"
                existed.append(file.exists())
                file.touch()
        return existed


def test_the_first_rank_of_each_node_goes_ahead(tmp_path: Path) -> None:
    results = run_in_ranks(go_ahead_on_its_node, tmp_path, ranks=2)
    assert results == [[False, False]] * 2


class Loop(Fabric):
    def __init__(self, factor: int, **options: Any) -> None:
        super().__init__(accelerator="cpu", **options)
        self.factor = factor

    def run(self, number: int, *, plus: int = 0) -> int:
        return self.all_reduce(self.factor * number + plus, reduce_op="sum")


@pytest.mark.parametrize("strategy", ["ddp_forkserver", "ddp_fork"])
def test_run_of_a_subclass_launches_the_job_with_what_the_subclass_keeps(strategy: str) -> None:
    assert Loop(3, devices=2, strategy=strategy).run(4, plus=1) == 26


def epoch_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def epochs_of_two_loaders(fabric: Fabric) -> list[list[list[int]]]:
    first = DataLoader(list(range(14)), batch_size=2, shuffle=True)
    second = DataLoader(list(range(14)), batch_size=2, shuffle=True)
    torch.manual_seed(5 + 100 * fabric.global_rank)
    loaders = fabric.setup_dataloaders(first, second, uneven="pad")
    return [epoch_of(loader) for loader in loaders]


def test_the_batches_of_all_ranks_are_the_plain_global_batches_although_streams_differ() -> None:
    torch.manual_seed(5)
    plain = DataLoader(list(range(14)), batch_size=4, shuffle=True)
    expected = [epoch_of(plain), epoch_of(plain)]
    first_rank, second_rank = run_in_ranks(epochs_of_two_loaders)
    for epoch, first, second in zip(expected, first_rank, second_rank, strict=True):
        for batch, first_batch, second_batch in zip(epoch, first, second, strict=True):
            assert sorted(first_batch + second_batch) == sorted(batch)


class Noise(Dataset[float]):
    """A data set whose samples are drawn from the stream of the worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return torch.rand(1).item()


def draw_in_workers(fabric: Fabric, workers: bool) -> list[float]:
    fabric.seed_everything(1, workers=workers)
    loader = fabric.setup_dataloaders(
        DataLoader(Noise(), num_workers=1, multiprocessing_context="fork")
    )
    return [batch.item() for batch in loader]


@pytest.mark.parametrize("workers", [True, False])
def test_workers_of_ranks_have_streams_of_their_own_if_workers_are_seeded(workers: bool) -> None:
    first, second = run_in_ranks(draw_in_workers, workers)
    assert (set(first) == set(second)) is not workers


class Collects(Noise):
    """A data set whose samples have the worker collect garbage."""

    def __getitem__(self, index: int) -> float:
        return float(gc.collect())


def collect_garbage_in_workers(fabric: Fabric) -> list[float]:
    gc.disable()
    try:
        garbage: list[Any] = [
            fabric.setup(Net()),
            fabric.new_group([0, 1]),
            torch.distributed.new_group([0, 1]),
        ]
        # The groups in this cycle end their threads when they are collected, and a worker has no
        # such threads.
        garbage.append(garbage)
        del garbage
        loader = DataLoader(Collects(), num_workers=1, multiprocessing_context="fork")
        return [batch.item() for batch in fabric.setup_dataloaders(loader)]
    finally:
        gc.enable()


def test_workers_do_not_collect_the_garbage_of_their_rank() -> None:
    results = run_in_ranks(collect_garbage_in_workers)
    assert results == [[0.0, 0.0], [0.0, 0.0]]


def two_backward_passes(fabric: Fabric) -> list[str]:
    module = Net()
    model = fabric.setup(module)
    first = model(torch.ones(1, 4)).sum()
    second = model(torch.ones(1, 4)).sum()
    return [outcome(lambda: fabric.backward(first)), outcome(lambda: fabric.backward(second))]


def test_a_second_backward_pass_is_refused_on_every_rank() -> None:
    for rank, (first, second) in enumerate(run_in_ranks(two_backward_passes)):
        assert first == "fine"
        assert "stay local" in second
        assert f"on rank {rank}" in second


class SlurmJob(NamedTuple):
    rank: int
    world_size: int
    description: str


def join_through_slurm(fabric: Fabric) -> SlurmJob:
    """Join the running job again, through the variables of SLURM."""
    rank = os.environ["RANK"]
    size = os.environ["WORLD_SIZE"]
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
    tasks = {"SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_TASKS_PER_NODE": size, "SLURM_JOB_ID": "7"}
    os.environ.update(step | tasks)
    with Fabric(accelerator="cpu", environment=SlurmEnvironment()) as job:
        job.launch()
        return SlurmJob(job.global_rank, job.all_reduce(1, reduce_op="sum"), job.describe())


def test_an_environment_that_is_passed_wins() -> None:
    for rank, job in enumerate(run_in_ranks(join_through_slurm)):
        assert job.rank == rank
        assert job.world_size == 2
        assert "by slurm" in job.description


def raise_on_rank_one(fabric: Fabric) -> None:
    if fabric.global_rank == 1:
        raise ValueError("a loss of nan")
    fabric.barrier("end of the epoch")


def test_an_exception_on_one_rank_ends_the_job_and_is_reported() -> None:
    with pytest.raises(RankFailedError, match="a loss of nan") as caught:
        run_in_ranks(raise_on_rank_one)
    assert caught.value.rank == 1


def call_collectives(fabric: Fabric) -> dict[str, Any]:
    rank = fabric.global_rank
    tensor = torch.tensor([float(rank)], requires_grad=True)
    gathered = fabric.all_gather(tensor, sync_grads=True)
    (gathered * torch.tensor([[1.0], [10.0]])).sum().backward()
    assert tensor.grad is not None
    return {
        "mean": fabric.all_reduce({"loss": float(rank), "x": [float(rank)] * 2}),
        "gathered": gathered.tolist(),
        "gradient": tensor.grad.item(),
        "numbers": fabric.all_gather({"n": rank}),
        "sent": fabric.broadcast([rank, torch.ones(1) * rank], src=1),
        "any": fabric.reduce_boolean_decision(rank == 1, all=False),
        "all": fabric.reduce_boolean_decision(rank == 1),
    }


def test_collectives_of_the_facade_on_two_ranks() -> None:
    for rank, results in enumerate(run_in_ranks(call_collectives)):
        assert results == {
            "mean": {"loss": 0.5, "x": [0.5, 0.5]},
            "gathered": [[0.0], [1.0]],
            "gradient": 2.0 * 10**rank,
            "numbers": {"n": [0, 1]},
            "sent": [1, torch.ones(1)],
            "any": True,
            "all": False,
        }


def test_a_rank_that_returns_at_once_does_not_disturb_the_others() -> None:
    for _ in range(10):
        results = run_in_ranks(lambda fabric: fabric.global_rank, ranks=3)
        assert results == [0, 1, 2]


def close_one_of_two(fabric: Fabric, closed: str) -> list[Tensor]:
    """Close the first or second Fabric, and return gradients that the open Fabric averages."""
    second_fabric = Fabric(accelerator="cpu", devices=2, strategy=type(fabric.strategy)())
    second_fabric.launch()
    if closed == "first":
        fabric.teardown()
        open_fabric = second_fabric
    else:
        second_fabric.teardown()
        open_fabric = fabric
    model = open_fabric.setup(Net())
    open_fabric.backward(model(torch.ones(2, 4) + open_fabric.global_rank).sum())
    assert open_fabric.all_reduce(1.0, reduce_op="sum") == 2
    open_fabric.teardown()
    assert not torch.distributed.is_initialized()
    return [local_tensor(parameter.grad) for parameter in model.parameters()]


@pytest.mark.parametrize("closed", ["first", "second"])
def test_closing_one_of_two_fabrics_leaves_the_other_open(closed: str) -> None:
    first_rank, second_rank = run_in_ranks(close_one_of_two, closed)
    torch.testing.assert_close(first_rank, second_rank, rtol=0, atol=0)


def train_for_weights(fabric: Fabric, net: Net, losses: dict[str, torch.nn.Module]) -> Any:
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loss = losses["squares"](model(torch.ones(2, 4) * (fabric.global_rank + 1)), torch.ones(2, 1))
    fabric.backward(loss)
    optimizer.step()
    return fabric.get_state_dict(model)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_trained_weights_come_back_into_the_modules_of_the_caller(strategy: str) -> None:
    net = Net()
    weight = net.head.weight
    before = weight.detach().clone()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, launcher="forkserver")
    call = (train_for_weights, net, {"squares": torch.nn.MSELoss()})

    fabric.launch(*call)
    assert torch.equal(net.head.weight, before)

    first, second = fabric.launch(*call, return_weights=True, return_all=True)
    assert second == {}
    assert net.head.weight is weight
    assert not torch.equal(weight, before)
    torch.testing.assert_close(net.state_dict(), first, rtol=0, atol=0)

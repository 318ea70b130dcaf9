"""The facade on several real processes: what is different between ranks, and what has to be the same."""

import contextlib
import gc
import io
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fabric import Fabric
from fabric.environments import SlurmEnvironment
from fabric.errors import RankFailedError
from fabric.loggers import CSVLogger
from fabric.world import World
from tests.models import Net
from tests.ranks import outcome, run_in_ranks

pytestmark = pytest.mark.timeout(90)


def draws(fabric: Fabric) -> list[float]:
    return [random.random(), torch.rand(1).item()]


@pytest.mark.parametrize("per_rank", [False, True])
def test_a_seed_given_before_launch_reaches_every_rank(per_rank: bool) -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_forkserver")
    fabric.seed_everything(5, per_rank=per_rank)
    expected = draws(fabric)
    first, second = fabric.launch(draws, return_all=True)
    assert first == expected
    assert (second == first) is not per_rank
    assert not per_rank or second[0] != first[0] != second[1]


def seeds(fabric: Fabric) -> tuple[int, list[float], list[float]]:
    random.seed(fabric.global_rank)
    chosen = fabric.seed_everything()
    same = draws(fabric)
    fabric.seed_everything(1, per_rank=True)
    return chosen, same, draws(fabric)


def test_no_seed_is_the_same_one_on_all_ranks_and_streams_per_rank_are_distinct() -> None:
    results = run_in_ranks(seeds, ranks=3)
    assert results[0][:2] == results[1][:2] == results[2][:2]
    assert len({tuple(result[2]) for result in results}) == 3


def prints(fabric: Fabric) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        fabric.print("rank", fabric.global_rank, sep="=")
    fabric.log_dict({"loss": torch.tensor(1.5)}, step=1)
    return text.getvalue()


def test_output_comes_from_the_first_rank_alone(tmp_path: Path) -> None:
    assert run_in_ranks(prints, loggers=CSVLogger(tmp_path)) == ["rank=0\n", ""]
    assert [path.name for path in tmp_path.glob("*/*/*")] == ["metrics.csv"]


def ahead(fabric: Fabric, folder: Path) -> bool:
    with fabric.rank_zero_first():
        seen = (folder / "data").exists()
        if fabric.is_global_zero:
            (folder / "data").write_text("ready")
    return seen


def test_the_first_rank_goes_ahead(tmp_path: Path) -> None:
    assert run_in_ranks(ahead, tmp_path, ranks=3) == [False, True, True]


def fails_first(fabric: Fabric) -> tuple[str, int]:
    entered = []

    def block() -> None:
        with fabric.rank_zero_first():
            entered.append(fabric.global_rank)
            raise FileNotFoundError("no such data set")

    return outcome(block), len(entered) + fabric.all_reduce(0, reduce_op="sum")


def test_an_exception_of_the_first_rank_reaches_all_and_the_job_goes_on() -> None:
    first, *others = run_in_ranks(fails_first, ranks=3)
    assert first == ("FileNotFoundError: no such data set\n", 1)
    for rank, (text, entered) in enumerate(others, 1):
        assert text.startswith("UsageError")
        assert f"on rank {rank}" in text
        assert "FileNotFoundError: no such data set" in text
        assert entered == 0


class OneNodeEach:
    """Says that every rank of a job on this machine is on a node of its own."""

    name = "one node each"

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


def ahead_on_its_node(fabric: Fabric, folder: Path) -> list[bool]:
    with Fabric(accelerator="cpu", environment=OneNodeEach()) as nodes:
        nodes.launch()
        seen = []
        for attempt in range(2):
            with nodes.rank_zero_first(local=True):
                file = folder / f"{nodes.node_rank}-{attempt}"
                seen.append(file.exists())
                file.touch()
        return seen


def test_the_first_rank_of_each_node_goes_ahead(tmp_path: Path) -> None:
    assert run_in_ranks(ahead_on_its_node, tmp_path, ranks=2) == [[False, False]] * 2


class Loop(Fabric):
    def __init__(self, factor: int, **options: Any) -> None:
        super().__init__(accelerator="cpu", **options)
        self.factor = factor

    def run(self, number: int, *, plus: int = 0) -> int:
        return self.all_reduce(self.factor * number + plus, reduce_op="sum")


@pytest.mark.parametrize("strategy", ["ddp_forkserver", "ddp_fork"])
def test_run_of_a_subclass_launches_the_job_with_what_the_subclass_keeps(strategy: str) -> None:
    assert Loop(3, devices=2, strategy=strategy).run(4, plus=1) == 26


def shares(fabric: Fabric, uneven: str) -> list[list[list[int]]]:
    loaders = [DataLoader(list(range(14)), batch_size=2, shuffle=True) for _ in range(2)]
    torch.manual_seed(5 + 100 * fabric.global_rank)
    dealt = [fabric.setup_dataloaders(loader, uneven=uneven) for loader in loaders]  # type: ignore[arg-type]
    return [[batch.tolist() for batch in loader] for loader in dealt]


def test_the_batches_of_all_ranks_are_the_plain_global_batches_although_streams_differ() -> None:
    torch.manual_seed(5)
    plain = DataLoader(list(range(14)), batch_size=4, shuffle=True)
    expected = [[sorted(batch.tolist()) for batch in plain] for _ in range(2)]
    ranks = run_in_ranks(shares, "pad")
    for index in range(2):
        dealt = [
            sorted(one + other) for one, other in zip(*(rank[index] for rank in ranks), strict=True)
        ]
        assert dealt == expected[index]


class Noise(Dataset[float]):
    """Samples are what the worker's stream holds."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return torch.rand(1).item()


def noise(fabric: Fabric, workers: bool) -> list[float]:
    fabric.seed_everything(1, workers=workers)
    loader = fabric.setup_dataloaders(
        DataLoader(Noise(), num_workers=1, multiprocessing_context="fork")
    )
    return [batch.item() for batch in loader]


@pytest.mark.parametrize("workers", [True, False])
def test_workers_of_ranks_have_streams_of_their_own_unless_told_otherwise(workers: bool) -> None:
    first, second = run_in_ranks(noise, workers)
    assert (set(first) == set(second)) is not workers


class Collects(Noise):
    """Every sample has the worker collect garbage."""

    def __getitem__(self, index: int) -> float:
        return float(gc.collect())


def garbage_beside_workers(fabric: Fabric) -> list[float]:
    gc.disable()
    try:
        garbage: list[Any] = [
            fabric.setup(Net()),
            fabric.new_group([0, 1]),
            torch.distributed.new_group([0, 1]),
        ]
        garbage.append(
            garbage
        )  # the threads of groups end with it, and the workers do not have them
        del garbage
        loader = DataLoader(Collects(), num_workers=1, multiprocessing_context="fork")
        return [batch.item() for batch in fabric.setup_dataloaders(loader)]
    finally:
        gc.enable()


def test_workers_do_not_collect_the_garbage_of_their_rank() -> None:
    assert run_in_ranks(garbage_beside_workers) == [[0.0, 0.0], [0.0, 0.0]]


def two_backward_passes(fabric: Fabric) -> list[str]:
    model = fabric.setup(Net())
    outputs = [model(torch.ones(1, 4)).sum(), model(torch.ones(1, 4)).sum()]
    return [outcome(lambda output=output: fabric.backward(output)) for output in outputs]


def test_a_second_backward_pass_is_refused_on_every_rank() -> None:
    for rank, (first, second) in enumerate(run_in_ranks(two_backward_passes)):
        assert first == "fine"
        assert "stay local" in second
        assert f"on rank {rank}" in second


def slurm(fabric: Fabric) -> tuple[int, int, str]:
    """In ranks of a running job, the same job seen through the variables of SLURM."""
    rank = os.environ["RANK"]
    size = os.environ["WORLD_SIZE"]
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
    tasks = {"SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_TASKS_PER_NODE": size, "SLURM_JOB_ID": "7"}
    os.environ.update(step | tasks)
    with Fabric(accelerator="cpu", environment=SlurmEnvironment()) as own:
        own.launch()
        return own.global_rank, own.all_reduce(1, reduce_op="sum"), own.describe()


def test_an_environment_that_is_passed_wins() -> None:
    for rank, (seen, count, text) in enumerate(run_in_ranks(slurm)):
        assert (seen, count) == (rank, 2)
        assert "by slurm" in text


def raises_on_one(fabric: Fabric) -> None:
    if fabric.global_rank == 1:
        raise ValueError("a loss of nan")
    fabric.barrier("end of the epoch")


def test_an_exception_on_one_rank_ends_the_job_and_is_the_one_reported() -> None:
    with pytest.raises(RankFailedError, match="a loss of nan") as caught:
        run_in_ranks(raises_on_one)
    assert caught.value.rank == 1


def callers(fabric: Fabric) -> dict[str, Any]:
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
    for rank, results in enumerate(run_in_ranks(callers)):
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
        assert run_in_ranks(lambda fabric: fabric.global_rank, ranks=3) == [0, 1, 2]

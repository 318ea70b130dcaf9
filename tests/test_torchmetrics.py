"""Metrics of torchmetrics count the samples of all processes, and go on after a checkpoint as if there were none."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torchmetrics import MeanMetric, Metric, MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.aggregation import CatMetric, MaxMetric, RunningSum
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef

from fabric import Fabric
from tests.ranks import outcome, run_in_ranks

CLASSES = 3
SHARDED = {"strategy": "fsdp"}


def collection() -> MetricCollection:
    """Sums, a count for each class, lists of different lengths, and metrics that share their states."""
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(CLASSES),
            "f1": MulticlassF1Score(CLASSES),
            "auroc": MulticlassAUROC(CLASSES),
        }
    )


class Averaged(Metric):
    """A mean over ranks, which weighs by the number of updates, and a tensor that is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")
        self.last = torch.tensor(0.0)

    def update(self, value: Tensor) -> None:
        self.mean = self.mean + value
        self.last = value

    def compute(self) -> Tensor:
        return self.mean + self.last


def batches(rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of a rank: of different lengths, and not as many on each."""
    generator = torch.Generator().manual_seed(3)
    lengths = [2 + at % 3 for at in range(7)]
    every = [
        (
            torch.rand(n, CLASSES, generator=generator).softmax(1),
            torch.randint(CLASSES, (n,), generator=generator),
        )
        for n in lengths
    ]
    return every[rank::size]


def expected() -> dict[str, Tensor]:
    """What one process computes from all batches."""
    metrics = collection()
    for batch in batches(0, 1):
        metrics.update(*batch)
    return metrics.compute()


def filled(
    fabric: Fabric, metrics: MetricCollection, start: int = 0, stop: int | None = None
) -> MetricCollection:
    for batch in batches(fabric.global_rank, fabric.world_size)[start:stop]:
        metrics.update(*batch)
    return metrics


def values_of_all_samples(fabric: Fabric) -> Any:
    metrics = filled(fabric, fabric.to_device(collection()))
    return (
        metrics.compute(),
        fabric.compute_metrics(metrics),
        fabric.compute_metrics(metrics["accuracy"]),
    )


@pytest.mark.parametrize("options", [{}, SHARDED, {"ranks": 3}, {"launcher": "forkserver"}])
def test_metrics_count_the_samples_of_all_processes(options: dict[str, Any]) -> None:
    for own, together, one in run_in_ranks(values_of_all_samples, **options):
        torch.testing.assert_close(own, expected())
        assert all(torch.equal(together[name], own[name]) for name in own)
        assert torch.equal(one, own["accuracy"])


def test_on_one_process_they_are_torchmetrics_own() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        metrics = filled(fabric, fabric.to_device(collection()))
        assert fabric.compute_metrics(metrics).keys() == metrics.compute().keys()


def without_samples_on_one_rank(fabric: Fabric) -> Any:
    metrics = MetricCollection(
        {"auroc": MulticlassAUROC(CLASSES), "cat": CatMetric(), "sum": SumMetric()}
    )
    for scores, target in batches(0, 1) if fabric.global_rank else ():
        metrics["auroc"].update(scores, target)
        metrics["cat"].update(target)
        metrics["sum"].update(target)
    stale = fabric.compute_metrics(metrics["sum"])
    if fabric.global_rank:
        metrics["sum"].update(1.0)
    local = SumMetric(sync_on_compute=False)
    local.update(fabric.global_rank + 1.0)
    assert (fabric.compute_metrics(local), local._to_sync) == (3, False)
    return fabric.compute_metrics(metrics), fabric.compute_metrics(metrics["sum"]) - stale


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_a_process_may_have_no_samples() -> None:
    targets = torch.cat([target for _, target in batches(0, 1)])
    for values, added in run_in_ranks(without_samples_on_one_rank):
        torch.testing.assert_close(values["auroc"], expected()["auroc"])
        assert torch.equal(values["cat"].long(), targets)
        assert added == 1


def number_of_collectives(fabric: Fabric, count: int) -> int:
    """How many collectives of torch it takes to compute a collection."""
    metrics = fabric.to_device(
        MetricCollection({f"{n}": MeanMetric() for n in range(count)}, compute_groups=False)
    )
    metrics.update(float(fabric.global_rank))
    with CommDebugMode() as mode:
        values = fabric.compute_metrics(metrics)
    assert all(value == 0.5 for value in values.values())
    return mode.get_total_counts()


def numbers_of_collectives(fabric: Fabric) -> tuple[int, int]:
    return number_of_collectives(fabric, 1), number_of_collectives(fabric, 10)


def test_twenty_states_are_sent_together() -> None:
    for of_two, of_twenty in run_in_ranks(numbers_of_collectives):
        assert 0 < of_two == of_twenty <= 3


def refused(fabric: Fabric) -> list[str]:
    is_first = fabric.global_rank == 0
    synced = SumMetric()
    running = RunningSum(2)
    other = SumMetric()
    running.update(1.0)
    other.process_group = object() if is_first else None
    if is_first:
        synced.sync(lambda tensor, group: [tensor], distributed_available=lambda: True)
    found = [
        outcome(partial(fabric.compute_metrics, each))
        for each in (synced, running, other, nn.Linear(1, 1))
    ]
    return [*found, outcome(lambda: fabric.save("none.pt", {"metric": synced}))]


def test_what_cannot_be_computed_raises_on_all_processes() -> None:
    texts = [
        "already been synced",
        "computes from other states",
        "process_group",
        "no metric",
        "are those of all ranks",
    ]
    for found in run_in_ranks(refused):
        for text, error in zip(texts, found, strict=True):
            assert text in error


# -- checkpoints ------------------------------------------------------------------------------------------------------


def parts() -> dict[str, Any]:
    """Metrics of many kinds, which compute from a rank's own samples alone."""
    state = {
        "metrics": collection(),
        "mean": Averaged(),
        "pearson": PearsonCorrCoef(),
        "range": MinMaxMetric(MeanSquaredError()),
        "running": RunningSum(2),
        "model": nn.ModuleDict({"net": nn.Linear(1, 1), "max": MaxMetric()}),
    }
    for each in (
        module
        for value in state.values()
        for module in value.modules()
        if isinstance(module, Metric)
    ):
        each.distributed_available_fn = bool
    return state


def fill(fabric: Fabric, state: dict[str, Any], steps: slice) -> None:
    for scores, target in batches(fabric.global_rank, fabric.world_size)[steps]:
        state["metrics"].update(scores, target)
        state["mean"](scores.mean())
        state["pearson"].update(scores[:, 0], target.float())
        state["range"](scores[:, 0], target.float())
        state["running"].update(scores.sum())
        state["model"]["max"].update(scores.max())


def held(state: dict[str, Any]) -> Any:
    return {
        name: (value["max"] if name == "model" else value).compute()
        for name, value in state.items()
    }


def half_filled(fabric: Fabric, path: str, async_: bool) -> tuple[Any, Any]:
    whole = parts()
    fill(fabric, whole, slice(0, 2))
    pending = fabric.save(path, whole, async_=async_)
    fill(fabric, whole, slice(2, None))
    if pending is not None:
        pending.wait()
    resumed = parts()
    fill(fabric, resumed, slice(0, 1))  # what it held before is gone
    fabric.load(path, resumed)
    fill(fabric, resumed, slice(2, None))
    return held(whole), held(resumed)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize("options", [{}, SHARDED], ids=["file", "folder"])
def test_each_process_goes_on_with_its_own_states(
    options: dict[str, Any], async_: bool, tmp_path: Path
) -> None:
    results = run_in_ranks(half_filled, str(tmp_path / "checkpoint"), async_, **options)
    for whole, resumed in results:
        torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    assert results[0][0]["running"] != results[1][0]["running"]


def saved(fabric: Fabric, path: str) -> None:
    filled_one = SumMetric()
    empty = SumMetric()
    filled_one.update(float(fabric.global_rank + 1))
    fabric.save(path, {"filled": filled_one, "empty": empty})


def loaded(fabric: Fabric, path: str) -> Any:
    before = SumMetric()
    empty = SumMetric()
    before.update(5.0)
    empty.update(7.0)
    fabric.load(path, {"empty": empty})
    error = outcome(lambda: fabric.load(path, {"empty": MeanMetric(), "filled": before}))
    kept = before.value if hasattr(before, "value") else before.sum_value
    fabric.load(path, {"filled": before}, strict=False)
    return error, float(empty.sum_value), float(kept), float(before.sum_value)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("options", [{}, SHARDED], ids=["file", "folder"])
def test_on_another_number_of_processes_a_part_of_the_samples_is_refused(
    options: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    run_in_ranks(saved, path, **options)
    if ranks == 1:
        with Fabric(accelerator="cpu", devices=1) as fabric:
            results = [loaded(fabric, path)]
    else:
        results = run_in_ranks(loaded, path, ranks=ranks, **options)
    for error, *values in results:
        assert "each of 2 ranks held a part of its samples" in error
        assert values == [0.0, 5.0, 5.0]


def other_metrics(fabric: Fabric, path: str) -> str:
    fabric.save(path, {"metrics": collection()})
    return outcome(
        lambda: fabric.load(path, {"metrics": MetricCollection({"f1": MulticlassF1Score(CLASSES)})})
    )


def test_other_metrics_than_those_saved_are_an_error(tmp_path: Path) -> None:
    for error in run_in_ranks(other_metrics, str(tmp_path / "file.pt")):
        assert "it was saved with the metrics ['accuracy', 'auroc', 'f1'], and has ['f1']" in error


def test_files_without_states_of_metrics_leave_them(tmp_path: Path) -> None:
    metric = SumMetric()
    metric.update(2.0)
    with Fabric(accelerator="cpu", devices=1) as fabric:
        torch.save({"metric": {}}, tmp_path / "file.pt")
        fabric.load(tmp_path / "file.pt", {"metric": metric})
    assert metric.compute() == 2


def test_a_model_without_the_metrics_that_were_in_it_loads(tmp_path: Path) -> None:
    saved = nn.Linear(2, 1)
    net = nn.Linear(2, 1)
    saved.metric = SumMetric()
    with Fabric(accelerator="cpu", devices=1) as fabric:
        fabric.save(tmp_path / "file.pt", {"model": saved})
        fabric.load(tmp_path / "file.pt", {"model": net})
    assert torch.equal(net.weight, saved.weight)


def recipe(fabric: Fabric, code: str, folder: str) -> Any:
    model = nn.Identity()
    loader = batches(fabric.global_rank, fabric.world_size)
    names = {**globals(), "fabric": fabric, "model": model, "loader": loader}
    exec(
        code.replace("checkpoint.pt", f"{folder}/checkpoint.pt").replace('"loader": loader, ', ""),
        names,
    )
    assert not any(value.update_called for value in names["metrics"].values())
    fabric.load(f"{folder}/checkpoint.pt", {"metrics": names["metrics"]}, strict=True)
    return names["values"], fabric.compute_metrics(names["metrics"])


def test_the_recipe_of_the_docs_does_what_the_page_says(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs/coming-from.md").read_text()
    code = page.partition("### torchmetrics")[2].partition("```python\n")[2].partition("```")[0]
    for values, again in run_in_ranks(recipe, code, str(tmp_path)):
        assert all(torch.equal(values[name], again[name]) for name in values)
        torch.testing.assert_close(values["auroc"], expected()["auroc"])

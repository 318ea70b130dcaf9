"""Metrics of torchmetrics count the samples of all processes, and go on after a checkpoint."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
    """Return metrics with sums, counts for each class, lists, and states that metrics share."""
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(CLASSES),
            "f1": MulticlassF1Score(CLASSES),
            "auroc": MulticlassAUROC(CLASSES),
        }
    )


class Averaged(Metric):
    """A mean over ranks, weighted by the number of updates, and a tensor that is not a state."""

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
    """Return the batches of a rank: their lengths and their number differ by rank."""
    generator = torch.Generator().manual_seed(3)
    batches_of_all_ranks = []
    for length in (2, 3, 4, 2, 3, 4, 2):
        scores = torch.rand(length, CLASSES, generator=generator).softmax(1)
        target = torch.randint(CLASSES, (length,), generator=generator)
        batches_of_all_ranks.append((scores, target))
    return batches_of_all_ranks[rank::size]


def computed_in_one_process() -> dict[str, Tensor]:
    """Compute the metrics of all batches in this process."""
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        SHARDED,
    ],
)
def test_metrics_count_the_samples_of_all_processes(options: dict[str, Any]) -> None:
    expected = computed_in_one_process()
    for by_torchmetrics, by_fabric, accuracy in run_in_ranks(values_of_all_samples, **options):
        torch.testing.assert_close(by_torchmetrics, expected)
        torch.testing.assert_close(by_fabric, by_torchmetrics, rtol=0, atol=0)
        assert torch.equal(accuracy, by_torchmetrics["accuracy"])


def test_one_process_computes_the_metrics_that_torchmetrics_computes() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        metrics = filled(fabric, fabric.to_device(collection()))
        assert fabric.compute_metrics(metrics).keys() == metrics.compute().keys()


def without_samples_on_one_rank(fabric: Fabric) -> Any:
    metrics = MetricCollection(
        {
            "auroc": MulticlassAUROC(CLASSES),
            "cat": CatMetric(),
            "sum": SumMetric(),
        }
    )
    if fabric.global_rank == 1:
        for scores, target in batches(0, 1):
            metrics["auroc"].update(scores, target)
            metrics["cat"].update(target)
            metrics["sum"].update(target)
    stale = fabric.compute_metrics(metrics["sum"])
    if fabric.global_rank == 1:
        metrics["sum"].update(1.0)
    local = SumMetric(sync_on_compute=False)
    local.update(fabric.global_rank + 1.0)
    assert fabric.compute_metrics(local) == 3
    assert local._to_sync is False
    values = fabric.compute_metrics(metrics)
    added = fabric.compute_metrics(metrics["sum"]) - stale
    without_samples = fabric.compute_metrics(CatMetric())
    return values, added, without_samples


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_a_process_may_have_no_samples() -> None:
    targets = torch.cat([target for _, target in batches(0, 1)])
    expected = computed_in_one_process()
    in_one_process = CatMetric().compute()
    for values, added, without_samples in run_in_ranks(without_samples_on_one_rank):
        torch.testing.assert_close(values["auroc"], expected["auroc"])
        assert torch.equal(values["cat"].long(), targets)
        assert added == 1
        assert len(without_samples) == len(in_one_process) == 0


def number_of_collectives(fabric: Fabric, count: int) -> int:
    """Return the number of torch's collectives that computing a collection takes."""
    means = {str(number): MeanMetric() for number in range(count)}
    metrics = fabric.to_device(MetricCollection(means, compute_groups=False))
    metrics.update(float(fabric.global_rank))
    with CommDebugMode() as mode:
        values = fabric.compute_metrics(metrics)
    for value in values.values():
        assert value == 0.5
    return mode.get_total_counts()


def numbers_of_collectives(fabric: Fabric) -> tuple[int, int]:
    return number_of_collectives(fabric, 1), number_of_collectives(fabric, 10)


def test_twenty_states_are_sent_together() -> None:
    for of_two, of_twenty in run_in_ranks(numbers_of_collectives):
        assert of_two == of_twenty
        assert 0 < of_two <= 3


class Rows(Metric):
    """A metric whose rows are gathered one by one, since they have no reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx=None)

    def update(self, row: Tensor) -> None:
        self.rows.append(row)

    def compute(self) -> Tensor:
        return torch.cat(self.rows)


def refused(fabric: Fabric) -> list[str]:
    synced = SumMetric()
    running = RunningSum(2)
    running.update(1.0)
    in_a_group = SumMetric()
    if fabric.global_rank == 0:
        synced.sync(lambda tensor, group: [tensor], distributed_available=lambda: True)
        in_a_group.process_group = object()
    rows = Rows()
    for _ in range(1 + fabric.global_rank):
        rows.update(torch.ones(2))
    errors = []
    no_metric = nn.Linear(1, 1)
    for metric in (synced, running, in_a_group, no_metric, rows):
        errors.append(outcome(partial(fabric.compute_metrics, metric)))
    errors.append(outcome(lambda: fabric.save("none.pt", {"metric": synced})))
    return errors


def test_what_cannot_be_computed_raises_on_all_processes() -> None:
    texts = [
        "already been synced",
        "computes from other states",
        "process_group",
        "no metric",
        "ranks hold different numbers of states: [[1], [2]]",
        "has the states of all ranks",
    ]
    for errors in run_in_ranks(refused):
        for text, error in zip(texts, errors, strict=True):
            assert text in error


# -- checkpoints -----------------------------------------------------------------------------------


def never_distributed() -> bool:
    return False


def make_state() -> dict[str, Any]:
    """Return metrics of many kinds, which compute from the samples of their rank alone."""
    state = {
        "metrics": collection(),
        "mean": Averaged(),
        "pearson": PearsonCorrCoef(),
        "range": MinMaxMetric(MeanSquaredError()),
        "running": RunningSum(2),
        "model": nn.ModuleDict({"net": nn.Linear(1, 1), "max": MaxMetric()}),
    }
    for value in state.values():
        for module in value.modules():
            if isinstance(module, Metric):
                module.distributed_available_fn = never_distributed
    return state


def fill(fabric: Fabric, state: dict[str, Any], steps: slice) -> None:
    for scores, target in batches(fabric.global_rank, fabric.world_size)[steps]:
        state["metrics"].update(scores, target)
        state["mean"](scores.mean())
        state["pearson"].update(scores[:, 0], target.float())
        state["range"](scores[:, 0], target.float())
        state["running"].update(scores.sum())
        state["model"]["max"].update(scores.max())


def compute(state: dict[str, Any]) -> dict[str, Any]:
    metrics = {**state, "model": state["model"]["max"]}
    return {name: metric.compute() for name, metric in metrics.items()}


def half_filled(fabric: Fabric, path: str, async_: bool) -> tuple[Any, Any]:
    uninterrupted = make_state()
    fill(fabric, uninterrupted, slice(0, 2))
    pending = fabric.save(path, uninterrupted, async_=async_)
    fill(fabric, uninterrupted, slice(2, None))
    if pending is not None:
        pending.wait()
    resumed = make_state()
    # Loading replaces these samples.
    fill(fabric, resumed, slice(0, 1))
    fabric.load(path, resumed)
    fill(fabric, resumed, slice(2, None))
    return compute(uninterrupted), compute(resumed)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize("options", [{}, SHARDED], ids=["file", "folder"])
def test_each_process_goes_on_with_its_own_states(
    options: dict[str, Any], async_: bool, tmp_path: Path
) -> None:
    results = run_in_ranks(half_filled, str(tmp_path / "checkpoint"), async_, **options)
    for uninterrupted, resumed in results:
        torch.testing.assert_close(resumed, uninterrupted, rtol=0, atol=0)
    assert results[0][0]["running"] != results[1][0]["running"]


def save_sums(fabric: Fabric, path: str) -> None:
    total = SumMetric()
    total.update(float(fabric.global_rank + 1))
    fabric.save(path, {"filled": total, "empty": SumMetric()})


class LoadedSums(NamedTuple):
    error: str
    empty: float
    filled_after_error: float
    filled_after_lenient_load: float


def load_sums(fabric: Fabric, path: str) -> LoadedSums:
    filled_metric = SumMetric()
    filled_metric.update(5.0)
    empty = SumMetric()
    empty.update(7.0)
    fabric.load(path, {"empty": empty})
    wrong_state = {"empty": MeanMetric(), "filled": filled_metric}
    error = outcome(lambda: fabric.load(path, wrong_state))
    after_error = float(filled_metric.sum_value)
    fabric.load(path, {"filled": filled_metric}, strict=False)
    return LoadedSums(
        error=error,
        empty=float(empty.sum_value),
        filled_after_error=after_error,
        filled_after_lenient_load=float(filled_metric.sum_value),
    )


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("options", [{}, SHARDED], ids=["file", "folder"])
def test_another_number_of_processes_does_not_load_samples_that_ranks_divided(
    options: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    run_in_ranks(save_sums, path, **options)
    if ranks == 1:
        with Fabric(accelerator="cpu", devices=1) as fabric:
            results = [load_sums(fabric, path)]
    else:
        results = run_in_ranks(load_sums, path, ranks=ranks, **options)
    for result in results:
        assert "each of 2 ranks held a part of its samples" in result.error
        assert result.empty == 0.0
        assert result.filled_after_error == 5.0
        assert result.filled_after_lenient_load == 5.0


def other_metrics(fabric: Fabric, path: str) -> str:
    fabric.save(path, {"metrics": collection()})
    only_f1 = MetricCollection({"f1": MulticlassF1Score(CLASSES)})
    return outcome(lambda: fabric.load(path, {"metrics": only_f1}))


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
    code = code.replace("checkpoint.pt", f"{folder}/checkpoint.pt")
    code = code.replace('"loader": loader, ', "")
    exec(code, names)
    for metric in names["metrics"].values():
        assert not metric.update_called
    fabric.load(f"{folder}/checkpoint.pt", {"metrics": names["metrics"]}, strict=True)
    values_after_load = fabric.compute_metrics(names["metrics"])
    return names["values"], values_after_load


def test_the_recipe_of_the_docs_does_what_the_page_says(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs/how-to/metrics.md").read_text()
    _, _, section = page.partition("## torchmetrics")
    _, _, section = section.partition("```python\n")
    code, _, _ = section.partition("```")
    expected = computed_in_one_process()
    for values, values_after_load in run_in_ranks(recipe, code, str(tmp_path)):
        torch.testing.assert_close(values_after_load, values, rtol=0, atol=0)
        torch.testing.assert_close(values["auroc"], expected["auroc"])

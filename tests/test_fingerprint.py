"""Fingerprints of runs: ``fabric diff`` names the first difference, and nothing in equal runs."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.nn.functional import mse_loss
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.cli import main
from fabric.errors import ConfigurationError, RankFailedError, UsageError
from fabric.strategies import DDPStrategy, ModelParallelStrategy
from fabric.tools.run_diff import compare_runs
from tests.loops import GLOBAL_BATCH, STEPS, batches, make_model
from tests.planted_differences import JOBS, Batch, Job
from tests.ranks import in_another_process, outcome, run_in_ranks

QUICK_JOBS = [
    "OtherSeed",
    "TwoSamplesSwapped",
    "BatchChangedInPlace",
    "DropoutOff",
    "BufferChangedByHand",
    "GradientScaledInside",
    "SchedulerOneStepLate",
    "StepLeftOut",
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Compute with one thread, since sums have other bits with other numbers of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_alone(job: Job, folder: Path) -> None:
    """Run a job in this process, and write its fingerprint."""
    with Fabric(accelerator="cpu", devices=1) as fabric:
        job.run(fabric, str(folder))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the fingerprint of the job without a difference."""
    folder = tmp_path_factory.mktemp("runs") / "base"
    run_alone(Job(), folder)
    return folder


def marked_jobs() -> list[Any]:
    parameters = []
    for name in JOBS:
        marks = [] if name in QUICK_JOBS else [pytest.mark.slow]
        parameters.append(pytest.param(name, marks=marks))
    return parameters


# -- Planted differences ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", marked_jobs())
def test_the_place_of_a_difference_is_named(name, base, tmp_path):
    job = JOBS[name]()
    if job.base is not None:
        base = tmp_path / "base"
        run_alone(job.base(), base)
    run_alone(job, tmp_path / "other")
    result = compare_runs(base, tmp_path / "other")
    assert not result.is_equal
    assert f"first difference: {job.difference}" in result.text
    assert job.note in result.text


def test_a_run_that_is_repeated_has_no_difference(base, tmp_path):
    run_alone(Job(), tmp_path / "again")
    result = compare_runs(base, tmp_path / "again")
    assert result.is_equal, result.text
    assert result.text.endswith("no difference")


class OnRankOne(Job):
    """A job that differs on rank 1 alone, or in what the ranks send."""

    def __init__(self, fabric: Fabric, kind: str) -> None:
        self.rank = fabric.global_rank
        self.kind = kind

    def run(self, fabric: Fabric, folder: str) -> None:
        num_threads = torch.get_num_threads()
        if self.kind == "two threads" and self.rank == 1:
            torch.set_num_threads(2)
        super().run(fabric, folder)
        torch.set_num_threads(num_threads)

    def on_batch(self, step: int, batch: Batch) -> None:
        if self.kind == "other samples" and self.rank == 1 and step == 1:
            batch[1][0] += 1

    def on_step(self, step: int) -> None:
        if self.kind == "flipped bit" and self.rank == 1 and step == 0:
            self.model.head.weight.data.view(torch.int32)[0, 0] ^= 1

    def schedule(self, step: int) -> float:
        if self.kind == "scheduler" and self.rank == 1:
            return 0.1
        return super().schedule(step)

    def backward(self, fabric: Fabric, step: int, batch: Batch) -> None:
        is_local = self.kind == "no all-reduce" and step == 1
        with fabric.no_backward_sync(self.model, enabled=is_local):
            super().backward(fabric, step, batch)


def run_changed(fabric: Fabric, change: str, folder: str) -> None:
    OnRankOne(fabric, change).run(fabric, f"{folder}/{change}")


RANK_DIFFERENCES = {
    "other samples": "step 1, rank 1: loss",
    "flipped bit": "step 1, rank 1: output of head",
    "scheduler": "step 1, rank 1: option lr of group 0 of AdamW",
    "no all-reduce": "step 1, rank 0: gradient of head.bias after the backward pass",
}


def run_changes(fabric: Fabric, folder: str) -> None:
    for change in ("nothing", "again", "two threads", *RANK_DIFFERENCES):
        run_changed(fabric, change, folder)


def test_the_rank_of_a_difference_is_named(tmp_path):
    # The changes are mistakes that the checks would find first.
    options = {"check_training": False, "check_replicas": False}
    run_in_ranks(run_changes, str(tmp_path), **options)
    assert compare_runs(tmp_path / "nothing", tmp_path / "again").is_equal
    for change, difference in RANK_DIFFERENCES.items():
        result = compare_runs(tmp_path / "nothing", tmp_path / change)
        assert f"first difference: {difference}" in result.text
    # The last change.
    assert "only one of the runs has it synchronized over the ranks" in result.text

    # Settings of a rank may explain a difference.
    report = compare_runs(tmp_path / "nothing", tmp_path / "two threads").text
    settings = [line for line in report.splitlines() if line.startswith("other setting")]
    assert settings == ["other setting of rank 1: threads of torch: 1, then 2"]

    # Rank 1 was killed earlier than rank 0.
    path = tmp_path / "again" / "rank-1.jsonl"
    header, *lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"step":0' in line or line.startswith('{"end":0')]
    path.write_text("".join([header, *kept]))
    result = compare_runs(tmp_path / "nothing", tmp_path / "again")
    assert result.is_equal, result.text
    assert "compared bit by bit: step 0," in result.text


# -- Runs on other numbers of ranks ----------------------------------------------------------------


def train(fabric: Fabric, folder: str, dtype: torch.dtype, accumulation: int = 1) -> None:
    """Train a transformer on the same global batches, and write a fingerprint."""
    module, plain_optimizer = make_model(dtype)
    model, optimizer = fabric.setup(module, plain_optimizer)
    inputs, targets = zip(*batches(dtype), strict=True)
    dataset = TensorDataset(torch.cat(inputs), torch.cat(targets))
    replicas = 1
    if fabric.strategy.distributed_sampler_kwargs is not None:
        replicas = fabric.strategy.distributed_sampler_kwargs["num_replicas"]
    batch_size = GLOBAL_BATCH // replicas // accumulation
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=batch_size))
    with fabric.fingerprint(folder):
        for (x, y), is_last in fabric.accumulate(loader, accumulation):
            with fabric.no_backward_sync(model, enabled=not is_last):
                fabric.backward(mse_loss(model(x), y) / accumulation)
            if is_last:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()


def train_alone(folder: str, dtype: torch.dtype, accumulation: int = 1, **options: Any) -> None:
    with Fabric(accelerator="cpu", devices=1, **options) as fabric:
        train(fabric, folder, dtype, accumulation)


TP_PLAN = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}
LAYOUTS: dict[str, Callable[..., object]] = {
    "alone": train_alone,
    "alone, accumulated": partial(train_alone, accumulation=3),
    "fsdp alone": partial(train_alone, strategy="fsdp"),
    "fsdp alone, accumulated": partial(train_alone, accumulation=3, strategy="fsdp"),
    "ddp 2": partial(run_in_ranks, train),
    "fsdp 2": partial(run_in_ranks, train, strategy="fsdp"),
    "ddp 3": partial(run_in_ranks, train, ranks=3),
    "fsdp 3": partial(run_in_ranks, train, ranks=3, strategy="fsdp"),
    "mesh 2 x 1": partial(
        run_in_ranks, train, strategy=ModelParallelStrategy(data_parallel_size=2)
    ),
    "mesh 1 x 2": partial(
        run_in_ranks,
        train,
        strategy=ModelParallelStrategy(tp_plan=TP_PLAN, tensor_parallel_size=2),
    ),
}
PAIRS = [
    ("alone", "ddp 2"),
    ("fsdp 2", "ddp 2"),
    ("fsdp 3", "alone"),
    ("alone", "mesh 1 x 2"),
    ("alone", "alone, accumulated"),
    ("alone, accumulated", "fsdp alone, accumulated"),
    ("ddp 2", "mesh 1 x 2"),
    ("mesh 2 x 1", "fsdp 2"),
    ("ddp 3", "fsdp 2"),
    ("alone, accumulated", "fsdp 3"),
    ("fsdp alone", "alone"),
    ("mesh 2 x 1", "alone, accumulated"),
]


@pytest.fixture(scope="module")
def run_of_layout(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains in a layout once, and returns the fingerprint."""
    folder = tmp_path_factory.mktemp("layouts")

    @cache
    def run(layout: str) -> Path:
        path = folder / layout
        LAYOUTS[layout](str(path), torch.float64)
        return path

    return run


def marked_pairs() -> list[Any]:
    parameters = []
    for number, pair in enumerate(PAIRS):
        marks = [] if number < 6 else [pytest.mark.slow]
        parameters.append(pytest.param(*pair, marks=marks))
    return parameters


@pytest.mark.parametrize(("first", "second"), marked_pairs())
def test_equal_runs_of_other_strategies_and_world_sizes_are_close(first, second, run_of_layout):
    result = compare_runs(run_of_layout(first), run_of_layout(second), close=1e-9)
    assert result.is_equal, result.text
    assert f"steps 0 to {STEPS - 1}" in result.text
    for kind in ("gradient at the step", "optimizer state", "parameter", "batch"):
        assert f" {kind} (" in result.text


def test_without_a_tolerance_other_micro_batches_are_a_difference(run_of_layout):
    result = compare_runs(run_of_layout("alone"), run_of_layout("alone, accumulated"))
    assert "first difference: step 0, rank 0: batch[0]" in result.text


def train_with_weights(fabric: Fabric, folder: str) -> None:
    torch.manual_seed(0)
    module = nn.Linear(2, 1).double()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.01))
    samples = torch.arange(12.0, dtype=torch.float64).reshape(6, 2)
    samples_of_rank = samples[fabric.global_rank :: fabric.world_size]
    with fabric.fingerprint(folder):
        for _ in range(2):
            loss = model(samples_of_rank).square().sum()
            fabric.backward(loss, weight=len(samples_of_rank))
            optimizer.step()
            optimizer.zero_grad()


def test_gradients_of_weighted_losses_are_compared_once_they_are_divided(tmp_path):
    with Fabric(accelerator="cpu", devices=1) as fabric:
        train_with_weights(fabric, str(tmp_path / "alone"))
    run_in_ranks(train_with_weights, str(tmp_path / "ddp"), ranks=3)
    result = compare_runs(tmp_path / "alone", tmp_path / "ddp", close=1e-9)
    assert result.is_equal, result.text
    assert " gradient at the step (4)" in result.text


def train_one_local_step(fabric: Fabric, folder: str) -> None:
    """Make a step with the gradients of each rank, as an earlier step of local SGD does."""
    torch.manual_seed(0)
    module = nn.Linear(2, 1).double()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.01))
    samples = torch.arange(12.0, dtype=torch.float64).reshape(6, 2)
    with fabric.fingerprint(folder):
        fabric.backward(model(samples[fabric.global_rank :: fabric.world_size]).square().mean())
        optimizer.step()


def local_sgd() -> DDPStrategy:
    state = PostLocalSGDState(
        process_group=None,
        subgroup=None,
        start_localSGD_iter=0,
        post_local_gradient_allreduce=False,
    )
    return DDPStrategy(
        ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=4
    )


def test_what_ranks_hold_by_themselves_is_not_compared_between_layouts(tmp_path):
    for name, strategy in (("plain", "auto"), ("local", local_sgd())):
        with Fabric(accelerator="cpu", devices=1, strategy=strategy) as fabric:
            train_one_local_step(fabric, str(tmp_path / f"{name} alone"))
    run_in_ranks(train_one_local_step, str(tmp_path / "plain"), ranks=3)
    run_in_ranks(train_one_local_step, str(tmp_path / "local"), ranks=3, strategy=local_sgd())

    # Between two averages, the ranks of local SGD have gradients and parameters of their own.
    result = compare_runs(tmp_path / "plain alone", tmp_path / "local", close=1e-9)
    assert result.is_equal, result.text
    assert " loss (1)" in result.text
    assert " parameter (" not in result.text
    # On a single process, they are those of the job.
    result = compare_runs(tmp_path / "local alone", tmp_path / "plain", close=1e-9)
    assert result.is_equal, result.text
    assert " parameter (2)" in result.text


def test_a_difference_between_layouts_is_named(run_of_layout, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.mse_loss", partial(mse_loss, reduction="sum"))
    with Fabric(accelerator="cpu", devices=1, check_training=False) as fabric:
        train(fabric, str(tmp_path / "sums"), torch.float64)
    result = compare_runs(run_of_layout("ddp 2"), tmp_path / "sums", close=1e-9)
    assert "first difference: step 0: loss\n" in result.text


def test_precisions_are_close_to_the_tolerance_that_their_rounding_allows(tmp_path):
    train_alone(str(tmp_path / "double"), torch.float64)
    train_alone(str(tmp_path / "single"), torch.float32)
    assert not compare_runs(tmp_path / "double", tmp_path / "single").is_equal
    assert not compare_runs(tmp_path / "double", tmp_path / "single", close=1e-12).is_equal
    result = compare_runs(tmp_path / "double", tmp_path / "single", close=1e-3)
    # The samples have other bits in another precision.
    assert result.is_equal, result.text


class Recomputing(nn.Module):
    """A module that computes a layer again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(checkpoint(self.layers, x, use_reentrant=False))


def train_briefly(folder: Path, weight: Any = None, compiles: bool = False, **options: Any) -> None:
    with Fabric(accelerator="cpu", check_training=False, **options) as fabric:
        fabric.seed_everything(0)
        module: Any = Recomputing()
        if compiles:
            module = torch.compile(module, backend="eager")
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
        with fabric.fingerprint(folder):
            for _ in range(2):
                loss = model(torch.randn(6, 4)).square().sum()
                fabric.backward(loss, weight=weight)
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize(
    ("options", "outputs_per_step"),
    [
        ({}, 5),
        ({"precision": "16-mixed"}, 5),
        ({"precision": "bf16-true", "weight": 6}, 5),
        ({"strategy": "dp", "devices": 2}, 0),
        ({"compiles": True}, 0),
    ],
)
def test_each_kind_of_loop_equals_its_repetition(options, outputs_per_step, tmp_path):
    options = {"devices": 1, **options}
    for name in ("run", "again"):
        train_briefly(tmp_path / name, **options)
    result = compare_runs(tmp_path / "run", tmp_path / "again")
    assert result.is_equal, result.text
    lines = (tmp_path / "run" / "rank-0.jsonl").read_text().splitlines()
    # What the backward pass computes again, a compiler traces or a thread runs is left out.
    outputs = [line for line in lines if '"kind":"output"' in line]
    assert len(outputs) == 2 * outputs_per_step


class Masked(nn.Module):
    """A layer whose second output a mask sets to minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x).masked_fill(torch.tensor([False, True]), -torch.inf)


def train_masked(folder: Path, value: float) -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        fabric.seed_everything(0)
        module = Masked()
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        with fabric.fingerprint(folder):
            fabric.backward(model(torch.full((1, 2), value))[:, 0].sum())
            optimizer.step()


def test_tensors_with_infinite_numbers_are_compared_bit_by_bit(tmp_path):
    for name, value in (("run", 1.0), ("again", 1.0), ("rounded", 1.0 + 1e-6)):
        train_masked(tmp_path / name, value)
    assert compare_runs(tmp_path / "run", tmp_path / "again", close=1e-3).is_equal
    result = compare_runs(tmp_path / "run", tmp_path / "rounded", close=1e-3)
    assert "first difference: step 0, rank 0: output of Masked\n" in result.text
    assert "infinite or undefined numbers have no distance" in result.text


@pytest.mark.parametrize("options", [{"compiles": True}, {"strategy": "dp", "devices": 2}])
def test_a_run_without_outputs_of_modules_is_close_to_one_that_has_them(options, tmp_path):
    train_briefly(tmp_path / "run", devices=1)
    train_briefly(tmp_path / "other", **{"devices": 1, **options})
    result = compare_runs(tmp_path / "run", tmp_path / "other", close=1e-4)
    assert result.is_equal, result.text
    left_out = "inputs and outputs of modules, which only one of the runs has: steps 0 to 1\n"
    assert left_out in result.text


class WithUnusedLayer(nn.Module):
    """A module with a layer whose output does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        self.unused(scale * x)
        return self.layer(x)


def train_with_unused_layer(folder: Path, *, compiles: bool, scale: float = 1.0) -> None:
    """Make a step that may be compiled, and one that is not, with a scale for the unused layer."""
    with Fabric(accelerator="cpu", devices=1) as fabric:
        fabric.seed_everything(0)
        module: Any = WithUnusedLayer()
        optimizer = torch.optim.SGD(module.layer.parameters(), lr=0.1)
        if compiles:
            module = torch.compile(module, backend="eager")
        model, optimizer = fabric.setup(module, optimizer)
        with fabric.fingerprint(folder):
            fabric.backward(model(torch.ones(1, 2), 1.0).sum())
            optimizer.step()
            with torch.compiler.set_stance("force_eager"):
                loss = model(torch.ones(1, 2), scale).sum()
            fabric.backward(loss)
            optimizer.step()


def test_modules_are_compared_in_the_steps_in_which_both_runs_have_them(tmp_path):
    train_with_unused_layer(tmp_path / "run", compiles=False)
    train_with_unused_layer(tmp_path / "compiled", compiles=True)
    result = compare_runs(tmp_path / "run", tmp_path / "compiled")
    assert result.is_equal, result.text
    assert "inputs and outputs of modules, which only one of the runs has: step 0\n" in result.text
    train_with_unused_layer(tmp_path / "scaled", compiles=True, scale=2.0)
    result = compare_runs(tmp_path / "run", tmp_path / "scaled")
    assert "first difference: step 1, rank 0: input WithUnusedLayer[1]\n" in result.text


def stack_with_table(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a batch whose second tensor has no rows of samples."""
    return torch.stack(samples), torch.ones(3, 2)


def train_on_rows(folder: Path, rows: Tensor, collate: Callable[..., Any]) -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        fabric.seed_everything(0)
        module = nn.Linear(2, 1)
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        dataset: Any = list(rows)
        loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=2, collate_fn=collate))
        with fabric.fingerprint(folder):
            for batch in loader:
                inputs = batch if isinstance(batch, Tensor) else batch[0]
                fabric.backward(model(inputs).sum())
                optimizer.step()


@pytest.mark.parametrize("collate", [torch.stack, stack_with_table])
def test_the_rows_of_the_first_tensor_of_a_batch_are_its_samples(collate, tmp_path):
    rows = torch.arange(8.0).reshape(4, 2)
    train_on_rows(tmp_path / "run", rows, collate)
    train_on_rows(tmp_path / "swapped", rows[[0, 1, 3, 2]], collate)
    result = compare_runs(tmp_path / "run", tmp_path / "swapped")
    assert "same samples, other order from step 1" in result.text


# -- Files and the command -------------------------------------------------------------------------


def test_the_command_says_by_its_exit_code_whether_runs_differ(base, tmp_path, capsys):
    run_alone(JOBS["DropoutOff"](), tmp_path / "other")
    assert main(["diff", str(base), str(base)]) == 0
    assert main(["diff", str(base), str(tmp_path / "other"), "--close", "1e-6"]) == 1
    report = capsys.readouterr().out
    assert "first difference: step 0, rank 0: output of blocks.1.dropout\n" in report
    assert "tests/planted_differences.py:" in report
    assert main(["diff", str(base), str(tmp_path / "missing")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["diff", str(base), str(base), "--close", "0"]) == 2


def copy_of(run: Path, folder: Path, change: Callable[[list[str]], list[str]]) -> Path:
    """Return a copy of a run of one rank whose lines are changed."""
    folder.mkdir()
    lines = (run / "rank-0.jsonl").read_text().splitlines(keepends=True)
    (folder / "rank-0.jsonl").write_text("".join(change(lines)))
    return folder


def with_outputs_of_head(digest: list[Any], precision: str, lines: list[str]) -> list[str]:
    """Return the lines with another precision, and another digest of the output of the head."""
    changed: list[str] = []
    for line in lines:
        values = json.loads(line)
        if "settings" in values:
            values["settings"]["precision"] = precision
        if (values.get("kind"), values.get("name")) == ("output", "head"):
            values |= {"digest": digest, "call_site": "loop.py:7"}
        changed.append(json.dumps(values, separators=(",", ":")) + "\n")
    return changed


def test_the_report_has_the_settings_the_first_difference_and_how_it_spreads(base, tmp_path):
    first = copy_of(
        base, tmp_path / "first", partial(with_outputs_of_head, [1, 4.0, [2.0, 0.0]], "32-true")
    )
    second = copy_of(
        base, tmp_path / "second", partial(with_outputs_of_head, [2, 9.0, [2.5, 0.0]], "64-true")
    )
    lines = compare_runs(first, second).text.splitlines()
    compared = lines.pop(3)
    assert compared.startswith("compared bit by bit: steps 0 to 4, random state at the start (")
    assert lines == [
        f"{first}: steps 0 to 4, 1 rank(s), single_device, 32-true",
        f"{second}: steps 0 to 4, 1 rank(s), single_device, 64-true",
        "other setting: precision: 32-true, then 64-true",
        "",
        "first difference: step 0, rank 0: output of head",
        f"  {first}: norm 2, float32 6x1  loop.py:7",
        f"  {second}: norm 3, float32 6x1  loop.py:7",
        "  they are about 0.3 of the norm apart",
        "  everything that was compared before it is equal",
        "then:",
        "  step 0: output (1 of 19)",
        "  step 1: output (1 of 19)",
        "  step 2: output (1 of 19)",
        "  and steps 3 to 4",
    ]


def test_zeros_of_another_sign_are_a_difference_without_a_distance(base, tmp_path):
    runs = []
    for number in (1, 2):
        change = partial(with_outputs_of_head, [number, 0.0, [0.0]], "32-true")
        runs.append(copy_of(base, tmp_path / str(number), change))
    result = compare_runs(*runs)
    assert "first difference: step 0, rank 0: output of head\n" in result.text
    assert "of the norm apart" not in result.text
    assert compare_runs(*runs, close=1e-9).is_equal


def test_a_file_that_ends_within_a_line_is_compared_up_to_there(base, tmp_path):
    def cut(lines: list[str]) -> list[str]:
        return [*lines[:200], lines[200][:20]]

    result = compare_runs(base, copy_of(base, tmp_path / "cut", cut))
    assert result.is_equal, result.text
    assert f"not compared: the end of step 1, missing in {tmp_path / 'cut'}" in result.text
    assert f"not compared: steps 2 to 4, only in {base}" in result.text


def test_files_that_cannot_be_compared_are_refused(base, tmp_path):
    def damage(lines: list[str]) -> list[str]:
        return [*lines[:5], "{\n", *lines[5:]]

    def drop_header(lines: list[str]) -> list[str]:
        return lines[1:]

    def claim_two_ranks(lines: list[str]) -> list[str]:
        header = {**json.loads(lines[0]), "world_size": 2}
        return [json.dumps(header) + "\n", *lines[1:]]

    def drop_steps(lines: list[str]) -> list[str]:
        return lines[:1]

    problems = {
        damage: "the line .* is damaged",
        drop_header: "does not begin with the line of a fingerprint",
        claim_two_ranks: "the file of rank 1 is missing",
        drop_steps: "no step is in both",
    }
    for change, problem in problems.items():
        folder = copy_of(base, tmp_path / change.__name__, change)
        with pytest.raises(ConfigurationError, match=problem):
            compare_runs(base, folder)


class Killed(Job):
    def on_batch(self, step, batch):
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def run_until_killed(folder):
    torch.set_num_threads(1)
    with Fabric(accelerator="cpu", devices=1) as fabric:
        Killed().run(fabric, folder)


def test_a_killed_rank_leaves_its_finished_steps(base, tmp_path):
    with pytest.raises(RankFailedError) as caught:
        in_another_process(run_until_killed, tmp_path / "killed")
    assert caught.value.exit_code == -signal.SIGKILL
    result = compare_runs(base, tmp_path / "killed")
    assert result.is_equal, result.text
    assert "compared bit by bit: steps 0 to 2" in result.text


def test_every_and_first_step_number_the_steps_that_are_recorded(tmp_path):
    with Fabric(accelerator="cpu", devices=1) as fabric:
        model = nn.Linear(2, 1)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with fabric.fingerprint(tmp_path / "run", every=3, first_step=5, detail="steps"):
            for _ in range(6):
                fabric.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
    entries = map(json.loads, (tmp_path / "run" / "rank-0.jsonl").read_text().splitlines()[1:])
    steps = {entry["step"] for entry in entries if "step" in entry}
    assert steps == {6, 9}
    assert "inputs and outputs" not in compare_runs(tmp_path / "run", tmp_path / "run").text


def test_a_folder_holds_one_fingerprint_and_a_job_writes_one_at_a_time(tmp_path):
    for text in run_in_ranks(write_twice, str(tmp_path)):
        assert "the folder has a fingerprint already" in text
    with Fabric(accelerator="cpu", devices=1) as fabric, fabric.fingerprint(tmp_path / "outer"):
        inner = fabric.fingerprint(tmp_path / "inner")
        with pytest.raises(UsageError, match="another fingerprint is under way"):
            inner.__enter__()
        invalid = fabric.fingerprint(tmp_path / "inner", every=0)
        with pytest.raises(ConfigurationError, match="every from 1"):
            invalid.__enter__()


def write_twice(fabric: Fabric, folder: str) -> str:
    with fabric.fingerprint(f"{folder}/twice"):
        fabric.barrier()
    return outcome(fabric.fingerprint(f"{folder}/twice").__enter__)


def hook_counts(fabric: Fabric, model: Any, optimizer: Any) -> list[int]:
    session = fabric._session
    assert session is not None
    counts = [
        len(session.loss_checks),
        len(session.backward_hooks.before),
        len(session.backward_hooks.after),
        len(optimizer._optimizer_step_pre_hooks),
        len(_global_optimizer_pre_hooks),
        len(_global_optimizer_post_hooks),
    ]
    for module in fabric.unwrap(model).modules():
        counts.append(len(module._forward_hooks) + len(module._forward_pre_hooks))
    return counts


def test_after_the_block_no_hook_is_left(tmp_path):
    with Fabric(accelerator="cpu", devices=1, check_training=False) as fabric:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        before = hook_counts(fabric, model, optimizer)
        with fabric.fingerprint(tmp_path / "run"):
            fabric.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            during = hook_counts(fabric, model, optimizer)
        assert hook_counts(fabric, model, optimizer) == before
        assert during != before

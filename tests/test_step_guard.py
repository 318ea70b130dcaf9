"""A guard leaves out the optimizer steps of bad batches, on all ranks alike."""

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric._torch import local_tensor
from fabric.errors import ConfigurationError, TooManyBadStepsError
from tests.ranks import outcome, run_in_ranks

BAD_SAMPLE = 13
NUM_SAMPLES = 32


class Samples(TensorDataset):
    """Samples with their indices, one or more of which are NaN."""

    def __init__(self, *bad_samples: int) -> None:
        inputs = torch.linspace(-1, 1, NUM_SAMPLES * 4).view(NUM_SAMPLES, 4)
        targets = inputs.sum(1, keepdim=True)
        inputs[list(bad_samples)] = math.nan
        super().__init__(inputs, targets, torch.arange(NUM_SAMPLES))


def numbers_of(fabric: Fabric, skips_by_hand: bool, clips: bool) -> list[Any]:
    """Train with a bad sample, and return all numbers that a step may change."""
    fabric.seed_everything(1)
    model = nn.Linear(4, 2)
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    averages = fabric.ema(model, decay=0.5)
    loader = DataLoader(Samples(BAD_SAMPLE), batch_size=2, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    guard = fabric.step_guard()
    accepted = []
    for inputs, targets, indices in loader:
        if skips_by_hand and BAD_SAMPLE in fabric.all_gather(indices):
            continue
        loss = mse_loss(model(inputs), targets.expand(-1, 2))
        fabric.backward(loss)
        norm = None
        if clips:
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
        is_accepted = guard.accepts(loss, model, norm)
        accepted.append(is_accepted)
        if is_accepted:
            optimizer.step()
            scheduler.step()
            averages.update()
            # A loop that clears gradients after a step alone.
            optimizer.zero_grad()
    assert accepted.count(False) == int(not skips_by_hand)
    numbers: list[Any] = [scheduler.get_last_lr()]
    tensors = [*model.parameters(), *averages.buffers()]
    for slots in optimizer.state.values():
        tensors.extend(slots.values())
    for tensor in tensors:
        numbers.append(local_tensor(tensor).detach().tolist())
    scaler = fabric._ensure_session("setup").scaler
    if scaler is not None:
        numbers.append(scaler.state_dict())
    return numbers


def assert_equal_to_skipping(fabric: Fabric) -> None:
    scaler = fabric._ensure_session("setup").scaler
    # The loss scale belongs to the job, which has several loops here.
    initial_scale: dict[str, Any] = {}
    if scaler is not None:
        initial_scale = scaler.state_dict()
    for clips in (False, True):
        expected = numbers_of(fabric, skips_by_hand=True, clips=clips)
        if scaler is not None:
            scaler.load_state_dict(initial_scale)
        assert "nan" not in str(expected)
        assert numbers_of(fabric, skips_by_hand=False, clips=clips) == expected
        if scaler is not None:
            scaler.load_state_dict(initial_scale)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"strategy": "auto"}),
        (2, {"strategy": "ddp"}),
        (2, {"strategy": "fsdp"}),
        (2, {"strategy": "ddp", "precision": "16-mixed"}),
        (2, {"strategy": "fsdp", "precision": "16-mixed"}),
    ],
)
def test_a_refused_step_changes_no_number(ranks: int, options: dict[str, Any]) -> None:
    run_in_ranks(assert_equal_to_skipping, ranks=ranks, **options)


def train_with_log(fabric: Fabric, log: Path, size: int) -> list[list[int]]:
    """Train on shuffled samples in windows, and return the samples of each bad window."""
    fabric.seed_everything(1)
    model = nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = DataLoader(Samples(BAD_SAMPLE), batch_size=2, shuffle=True)
    loader = fabric.setup_dataloaders(data)
    next(iter(loader))
    state = loader.state_dict()
    loader = fabric.setup_dataloaders(data)
    # The samples of the first batch are not drawn again.
    loader.load_state_dict(state)
    guard = fabric.step_guard(log=log)
    bad_windows = []
    for _ in range(2):
        window: list[int] = []
        for (inputs, targets, indices), is_last in fabric.accumulate(loader, steps=size):
            window.extend(indices.tolist())
            loss = mse_loss(model(inputs), targets)
            fabric.backward(loss)
            if not is_last:
                continue
            random_state = torch.get_rng_state()
            if guard.accepts(loss, model):
                optimizer.step()
                optimizer.zero_grad()
            else:
                bad_windows.append(window)
                assert torch.equal(random_state, torch.get_rng_state())
            window = []
    assert guard.state_dict()["num_refused"] == len(bad_windows)
    return bad_windows


def test_the_log_names_the_samples_of_each_rank(tmp_path: Path) -> None:
    log = tmp_path / "bad.jsonl"
    windows_of_ranks = run_in_ranks(train_with_log, log, 3)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert 1 <= len(records) <= 2
    for record, *windows in zip(records, *windows_of_ranks, strict=True):
        assert record["samples"] == windows
        assert BAD_SAMPLE in [sample for window in windows for sample in window]
        assert record["reason"] == "a gradient is not finite" or "loss" in record["reason"]
        assert len(record["losses"]) == 2


class Metrics:
    """A logger that keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[tuple[dict[str, float], int | None]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.records.append((dict(metrics), step))


def give_up_and_go_on(fabric: Fabric, folder: Path) -> dict[str, Any]:
    """Meet three bad batches, restore a checkpoint, and train on the samples behind them."""
    logger = Metrics()
    fabric.add_logger(logger)
    model = nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    # On two ranks, batch n has the samples 4 n to 4 n + 3.
    data = Samples(4, 9, 15, 21)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=2))
    guard = fabric.step_guard(patience=3)
    checkpoints = fabric.checkpoints(folder)
    state = {"model": model, "optimizer": optimizer, "guard": guard}
    step = 0
    trained = []
    error = None
    for inputs, targets, indices in loader:
        loss = mse_loss(model(inputs), targets)
        fabric.backward(loss)
        try:
            is_accepted = guard.accepts(loss, model)
        except TooManyBadStepsError as caught:
            error = caught
            checkpoints.restore(state)
            continue
        if is_accepted:
            optimizer.step()
            optimizer.zero_grad()
            trained.extend(indices.tolist())
        step += 1
        if step == 1:
            checkpoints.save(step, {**state, "loader": loader})
    assert error is not None
    return {
        "trained": trained,
        "steps": error.steps,
        "samples": error.samples,
        "text": str(error),
        "logged": logger.records,
    }


def test_after_too_many_bad_steps_a_run_goes_on_behind_their_samples(tmp_path: Path) -> None:
    reports = run_in_ranks(give_up_and_go_on, tmp_path)
    trained = []
    for report in reports:
        assert report["steps"] == [2, 3, 4]
        assert sorted(report["samples"]) == list(range(4, 16))
        assert "steps 2 to 4" in report["text"]
        trained.extend(report["trained"])
    assert sorted(trained) == [0, 1, 2, 3, 16, 17, 18, 19, *range(24, 32)]
    counts = [metrics["bad_steps"] for metrics, _ in reports[0]["logged"]]
    # The last count continues from the restored checkpoint.
    assert counts == [1, 2, 3, 1]
    assert reports[1]["logged"] == []


def count_messages(fabric: Fabric) -> dict[str, int]:
    model = nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    communicator = fabric._ensure_session("setup").runtime.communicator
    counts = {}
    for name, spike in (("norm", None), ("no norm", None), ("spike", 3.0)):
        guard = fabric.step_guard(spike=spike)
        loss = model(torch.ones(2, 4)).sum()
        fabric.backward(loss)
        norm = None
        if name != "no norm":
            norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        run = type(communicator).run
        calls = []

        def counted(self: Any, collective: Any, calls: list[Any] = calls, run: Any = run) -> Any:
            calls.append(collective)
            return run(self, collective)

        with patch.object(type(communicator), "run", counted):
            assert guard.accepts(loss, model, norm)
        counts[name] = len(calls)
        optimizer.zero_grad()
    return counts


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_norm_spares_the_message(strategy: str) -> None:
    for counts in run_in_ranks(count_messages, strategy=strategy):
        assert counts == {"norm": 0, "no norm": 1, "spike": 1}


def refuse_spikes(fabric: Fabric) -> list[int]:
    """Pass losses of which some are far above the others on rank 1; return the refused ones."""
    model = fabric.setup(nn.Linear(1, 1))
    guard = fabric.step_guard(spike=6.0, patience=3)
    refused = []
    for index in range(40):
        loss = 1.0 + 0.1 * (-1) ** index
        if fabric.global_rank == 1 and index in (30, 31, 35):
            loss = 50.0
        if index == 2:
            # One of the first losses, which are accepted.
            loss = 3.0
        if index == 33:
            # A low loss is no spike.
            loss = -1.0
        if index == 34:
            saved = guard.state_dict()
            guard = fabric.step_guard(spike=6.0)
            guard.load_state_dict(saved)
        if not guard.accepts(torch.tensor(loss), model):
            refused.append(index)
    return refused


def test_a_loss_far_above_the_others_is_refused_by_all_ranks() -> None:
    for refused in run_in_ranks(refuse_spikes):
        assert refused == [30, 31, 35]


def test_nan_that_a_forward_pass_leaves_in_a_buffer_is_a_warning(tmp_path: Path) -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        model = fabric.setup(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        guard = fabric.step_guard(log=tmp_path)
        loss = model(torch.full((2, 4), math.nan)).sum()
        fabric.backward(loss)
        with (
            pytest.warns(UserWarning, match="refused step 1, .* NaN in the buffer 1.running_mean"),
            # The log is a folder.
            pytest.warns(UserWarning, match="IsADirectoryError|Is a directory"),
        ):
            assert not guard.accepts(loss, model)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_guard_with_a_mistake_is_refused() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        mistakes: list[dict[str, Any]] = [{"patience": 0}, {"spike": -1.0}, {"nonfinite": "stop"}]
        for options in mistakes:
            with pytest.raises(ConfigurationError, match="step_guard"):
                fabric.step_guard(**options)
        model = nn.Linear(1, 1)
        text = outcome(lambda: fabric.step_guard().accepts(torch.ones(()), model))
        assert "the module that fabric.setup returned" in text
        guard = fabric.step_guard(nonfinite=None)
        assert guard.accepts(torch.tensor(math.nan), fabric.setup(model))

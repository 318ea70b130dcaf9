"""Tests that need a CUDA device; run them with `pytest -m gpu` on a machine that has one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric, Throughput
from fabric.checkpoint.encoding import Chunk
from fabric.data.copies import OverlappedCopies
from fabric.diagnostics.digest import digests
from fabric.errors import UsageError
from fabric.strategies import DDPStrategy
from fabric.tools.digest import DigestTables
from fabric.tools.run_diff import compare_runs
from tests.loops import GLOBAL_BATCH, batches, make_model
from tests.models import Net
from tests.planted_differences import JOBS, Job
from tests.test_replicas import DRIFTS, check_outcomes, save_after_drift

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def plain_losses(dtype: torch.dtype, autocast: torch.dtype | None, is_scaled: bool) -> list[float]:
    model, optimizer = make_model(dtype)
    model.cuda()
    scaler = torch.amp.GradScaler("cuda", enabled=is_scaled)
    losses = []
    for x, y in batches(dtype):
        with torch.autocast("cuda", dtype=autocast, enabled=autocast is not None):
            output = model(x.cuda())
        loss = nn.functional.mse_loss(output.to(dtype), y.cuda())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fabric_losses(fabric: Fabric, dtype: torch.dtype) -> list[float]:
    model, optimizer = fabric.setup(*make_model(dtype))
    inputs, targets = zip(*batches(dtype), strict=True)
    dataset = TensorDataset(torch.cat(inputs), torch.cat(targets))
    plain_loader = DataLoader(dataset, batch_size=GLOBAL_BATCH, pin_memory=True)
    losses = []
    for x, y in fabric.setup_dataloaders(plain_loader):
        assert x.device == fabric.device
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
@pytest.mark.parametrize(
    ("precision", "dtype", "autocast", "is_scaled"),
    [
        ("32-true", torch.float32, None, False),
        ("64-true", torch.float64, None, False),
        ("bf16-mixed", torch.float32, torch.bfloat16, False),
        ("16-mixed", torch.float32, torch.float16, True),
    ],
)
def test_the_losses_are_those_of_the_plain_loop(
    strategy: str,
    precision: str,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    is_scaled: bool,
) -> None:
    with Fabric(accelerator="cuda", devices=1, strategy=strategy, precision=precision) as fabric:
        actual = fabric_losses(fabric, dtype)
    assert actual == plain_losses(dtype, autocast, is_scaled)


def test_auto_finds_the_device() -> None:
    with Fabric(devices=1) as fabric:
        assert fabric.device == torch.device("cuda", 0)
        assert fabric.setup(Net()).encoder.weight.device == fabric.device
        with fabric.init_module():
            assert nn.Linear(2, 2).weight.device == fabric.device


def test_collectives_over_nccl_keep_devices_and_dtypes() -> None:
    with Fabric(accelerator="cuda", devices=1, strategy="ddp") as fabric:
        tree: dict[str, Any] = {
            "cpu": torch.arange(4.0)[::2],
            "gpu": torch.ones(2, 2, device="cuda").t(),
            "half": torch.ones(3, dtype=torch.bfloat16, device="cuda"),
            "number": 1.5,
        }
        reduced = fabric.all_reduce(tree)
        torch.testing.assert_close(reduced, tree)
        large = 2**60 + 1
        large_tensor = torch.tensor([large], device="cuda")
        counts = fabric.all_reduce({"number": large, "tensor": large_tensor}, reduce_op="sum")
        assert counts["number"] == large
        assert counts["tensor"].item() == large
        flags = torch.tensor([True, False], device="cuda")
        flags = fabric.all_reduce(flags, reduce_op="max")
        assert flags.tolist() == [True, False]
        x = torch.ones(2, device="cuda")
        assert fabric.all_gather(x).shape == (1, 2)
        assert fabric.broadcast({"x": x})["x"].is_cuda
        fabric.barrier("end")


def test_sync_batchnorm_is_converted_and_reverted() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    strategy = DDPStrategy(sync_batchnorm=True)
    with Fabric(accelerator="cuda", devices=1, strategy=strategy) as fabric:
        model = fabric.setup(net)
        assert isinstance(net[1], nn.SyncBatchNorm)
        loss = model(torch.randn(6, 4, device="cuda")).sum()
        fabric.backward(loss)
        mean = net[1].running_mean
    assert type(net[1]) is nn.BatchNorm1d
    assert net[1].running_mean is mean
    assert mean is not None
    assert mean.abs().sum() > 0


def set_up_net(fabric: Fabric) -> dict[str, Any]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    model, optimizer = fabric.setup(net, optimizer)
    return {"model": model, "optimizer": optimizer}


def train_with_dropout(
    fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(torch.randn(8, 4, device=fabric.device))
        loss = nn.functional.dropout(output, 0.5).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_checkpoint_continues_exactly(tmp_path: Path) -> None:
    with Fabric(accelerator="cuda", devices=1, precision="16-mixed") as fabric:
        state = set_up_net(fabric)
        train_with_dropout(fabric, **state, steps=2)
        fabric.save(tmp_path / "checkpoint.pt", state)
        expected = train_with_dropout(fabric, **state, steps=3)
    with Fabric(accelerator="cuda", devices=1, precision="16-mixed") as fabric:
        state = set_up_net(fabric)
        fabric.load(tmp_path / "checkpoint.pt", state)
        assert train_with_dropout(fabric, **state, steps=3) == expected


def test_ranks_start_after_cuda_was_used_here() -> None:
    torch.ones(1, device="cuda")
    fabric = Fabric(accelerator="cuda", devices=1, strategy="ddp_notebook")
    assert fabric.launch(lambda fabric: fabric.device.type) == "cuda"
    fabric.teardown()


class EpochSums(NamedTuple):
    """The sums of the batches of an epoch, and of the batches after a resume at the third."""

    epoch: list[float]
    resumed: list[float]


def sums_of_batches(fabric: Fabric, plain: DataLoader[Any], overlap: bool) -> EpochSums:
    torch.manual_seed(0)
    loader = fabric.setup_dataloaders(plain, overlap_copies=overlap)
    sums = []
    state = {}
    for [batch] in loader:
        assert batch.device == fabric.device
        # The device has so much to compute that the CPU runs ahead.
        for _ in range(20):
            batch = batch @ torch.eye(1000, device=fabric.device)
        sums.append(batch.double().sum())
        if len(sums) == 3:
            state = loader.state_dict()
    resumed_loader = fabric.setup_dataloaders(plain, overlap_copies=overlap)
    resumed_loader.load_state_dict(state)
    resumed = [batch.double().sum() for [batch] in resumed_loader]
    return EpochSums(torch.stack(sums).tolist(), torch.stack(resumed).tolist())


@pytest.mark.parametrize("workers", [0, 2])
def test_overlapped_copies_change_no_value_and_continue_exactly(workers: int) -> None:
    dataset = TensorDataset(torch.randn(64, 1000))
    plain = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=workers)
    with Fabric(accelerator="cuda", devices=1) as fabric:
        overlapped = sums_of_batches(fabric, plain, overlap=True)
        in_turn = sums_of_batches(fabric, plain, overlap=False)
    assert overlapped == in_turn
    assert overlapped.resumed == pytest.approx(overlapped.epoch[3:])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_pins_its_batches_unless_copies_are_in_turn(workers: int) -> None:
    plain = DataLoader(TensorDataset(torch.randn(4, 2)), num_workers=workers)
    with Fabric(accelerator="cuda", devices=1) as fabric:
        assert fabric.setup_dataloaders(plain).pin_memory == (workers > 0)
        assert not fabric.setup_dataloaders(plain, overlap_copies=False).pin_memory
        on_device = DataLoader(TensorDataset(torch.ones(4, 2, device="cuda")))
        for [batch] in fabric.setup_dataloaders(on_device):
            assert batch.is_cuda
    assert not plain.pin_memory


def test_a_batch_is_copied_while_the_device_computes() -> None:
    device = torch.device("cuda", 0)
    move = OverlappedCopies(device, pins=True)
    # The first copy creates the memory pools of the stream and of the host.
    move(torch.randn(1000))
    torch.cuda.synchronize()
    # The device is busy for so many cycles, which take about a second.
    torch.cuda._sleep(2_000_000_000)
    computed = torch.cuda.current_stream().record_event()
    batch = move(torch.arange(1000.0))
    move.side_stream.synchronize()
    assert not computed.query()
    assert batch.sum().item() == 499500
    assert computed.query()


def test_the_memory_of_a_dropped_batch_is_not_reused_before_its_step_is_computed() -> None:
    move = OverlappedCopies(torch.device("cuda", 0), pins=True)
    means = []
    for number in range(6):
        batch = move(torch.full((1_000_000,), float(number)))
        torch.cuda._sleep(100_000_000)
        means.append(batch.mean())
        del batch
    assert torch.stack(means).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_weights_on_the_cpu_are_swapped_once_they_have_been_copied() -> None:
    with Fabric(accelerator="cuda", devices=1, strategy="fsdp_cpu_offload") as fabric:
        net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        model, optimizer = fabric.setup(net, optimizer)
        ema = fabric.ema(model)
        x = torch.ones(1, 1024, device=fabric.device)
        loss = model(x).sum()
        fabric.backward(loss)
        optimizer.step()
        outputs = []
        averages = []
        # The loop does not wait for the device.
        for _ in range(10):
            with torch.no_grad():
                outputs.append(model(x))
            with ema.applied():
                averages.append(model(x))
        for output, average in zip(outputs, averages, strict=True):
            assert torch.equal(output, outputs[0])
            assert torch.equal(average, averages[0])
        assert not torch.equal(outputs[0], averages[0])


@contextmanager
def refusing_to_wait_for_the_device() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make_linear() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).cuda()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_step_with_weights_is_that_of_the_mean_and_does_not_wait_for_the_device() -> None:
    x = torch.randn(4, 3, device="cuda")
    weights = [4, torch.tensor(4, device="cuda")]
    reference, reference_optimizer = make_linear()
    for _ in range(6):
        (reference(x).square().sum() / 4).backward()
        reference_optimizer.step()
        reference_optimizer.zero_grad()

    with Fabric(accelerator="cuda", devices=1, check_training=False) as fabric:
        model, optimizer = fabric.setup(*make_linear())

        def train(weight: Any) -> None:
            loss = model(x).square().sum()
            fabric.backward(loss, weight=weight)
            optimizer.step()
            optimizer.zero_grad()

        # The first steps may wait: they allocate.
        for weight in weights:
            train(weight)
        with refusing_to_wait_for_the_device():
            for weight in [*weights, *weights]:
                train(weight)
        torch.testing.assert_close(model.weight, reference.weight)


def test_a_step_whose_weights_sum_to_zero_changes_nothing_and_the_next_is_refused() -> None:
    x = torch.randn(4, 3, device="cuda")
    with Fabric(accelerator="cuda", devices=1, check_training=False) as fabric:
        model, optimizer = fabric.setup(*make_linear())
        loss = model(x).square().sum()
        fabric.backward(loss, weight=4)
        optimizer.step()
        optimizer.zero_grad()
        before = model.weight.detach().clone()
        loss = model(x).square().sum()
        fabric.backward(loss, weight=0)
        optimizer.step()
        assert torch.equal(model.weight, before)
        optimizer.zero_grad()
        loss = model(x).square().sum()
        fabric.backward(loss, weight=4)
        with pytest.raises(UsageError, match="sum of zero"):
            optimizer.step()
        assert torch.equal(model.weight, before)


def test_throughput_waits_for_the_device_at_the_end_of_a_window_only() -> None:
    with Fabric(accelerator="cuda", devices=1) as fabric:
        module = nn.Linear(8, 8)
        model = fabric.setup(module)
        x = torch.ones(4, 8, device="cuda")
        throughput = Throughput(fabric, warmup=2, every=3, peak_flops=1e15)
        actual = []

        def train() -> Any:
            with throughput.count_flops():
                loss = model(x).sum()
                fabric.backward(loss)
            return throughput.update(len(x), tokens=(x > 0).sum())

        for step in range(1, 9):
            if step in (1, 2, 5, 8):
                actual.append(train())
            else:
                with refusing_to_wait_for_the_device():
                    actual.append(train())
    steps_with_rates = []
    for step, rates in enumerate(actual, 1):
        if rates:
            steps_with_rates.append(step)
    assert steps_with_rates == [5, 8]
    rates = actual[-1]
    assert rates["tokens_per_second"] == pytest.approx(8 * rates["samples_per_second"])
    assert rates["flops_per_second"] == pytest.approx(2 * 2 * 8 * 8 * rates["samples_per_second"])


# -- Fingerprints and replicas ---------------------------------------------------------------------

# Differences at each stage of a step.
DIFFERENCES = (
    "OtherWeight",
    "TwoSamplesSwapped",
    "FeaturesPermutedWithTheSameXor",
    "BatchChangedInPlace",
    "DropoutOff",
    "LayerInOtherPrecision",
    "OtherLoss",
    "GradientScaledByAHook",
    "OtherClipping",
    "SchedulerOneStepLate",
    "MomentumChangedByHand",
)


def record(job: Job, folder: Path, accelerator: str) -> None:
    with Fabric(accelerator=accelerator, devices=1) as fabric:
        job.run(fabric, str(folder))


def test_the_place_of_a_difference_between_runs_on_a_device_is_named(tmp_path: Path) -> None:
    record(Job(), tmp_path / "base", "cuda")
    record(Job(), tmp_path / "again", "cuda")
    assert compare_runs(tmp_path / "base", tmp_path / "again").is_equal
    for name in DIFFERENCES:
        job = JOBS[name]()
        record(job, tmp_path / name, "cuda")
        result = compare_runs(tmp_path / "base", tmp_path / name)
        assert f"first difference: {job.difference}" in result.text
        assert job.note in result.text


def record_in_float64(folder: Path, accelerator: str) -> None:
    with Fabric(accelerator=accelerator, devices=1) as fabric:
        module, plain_optimizer = make_model(torch.float64)
        model, optimizer = fabric.setup(module, plain_optimizer)
        with fabric.fingerprint(folder):
            for x, y in batches(torch.float64):
                output = model(x.to(fabric.device))
                fabric.backward(nn.functional.mse_loss(output, y.to(fabric.device)))
                optimizer.step()
                optimizer.zero_grad()


def test_a_run_on_a_device_is_close_to_that_on_the_cpu(tmp_path: Path) -> None:
    record_in_float64(tmp_path / "cpu", "cpu")
    record_in_float64(tmp_path / "device", "cuda")
    result = compare_runs(tmp_path / "cpu", tmp_path / "device", close=1e-9)
    assert result.is_equal, result.text


def test_digests_on_a_device_are_those_on_the_cpu() -> None:
    tables = DigestTables()
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool):
        # More than a chunk of rows, and a last row that is not full.
        values = torch.arange(7 * 43_003).reshape(7, -1).remainder(251).to(dtype)
        assert digests([values.cuda()]) == digests([values])
        packed = tables.packed_digest(Chunk([0, 0], values), values.shape)
        on_device = tables.packed_digest(Chunk([0, 0], values.cuda()), values.shape)
        assert on_device[0].item() == packed[0].item()
        assert torch.equal(tables.row_hashes(values.cuda()).cpu(), tables.row_hashes(values))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_save_names_each_kind_of_drift_between_devices(tmp_path: Path) -> None:
    names = ["no drift", *(drift.__name__ for drift in DRIFTS)]
    with Fabric(accelerator="cuda", devices=2, strategy="ddp", launcher="forkserver") as fabric:
        outcomes = fabric.launch(save_after_drift, tmp_path, names)
    check_outcomes([outcomes], names[1:])

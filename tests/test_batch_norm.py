"""BatchNorm over the batches of all ranks equals BatchNorm over the whole batch in one process."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from fabric.strategies import ModelParallelStrategy
from tests.loops import full_parameters
from tests.ranks import outcome, run_in_ranks

# The samples at which the batches of three steps are cut in two. In the last step a batch is empty.
CUTS = (6, 3, 0)
BATCH = 12


class ConvolutionalNet(nn.Module):
    """Layers of all kinds: with and without parameters, statistics and a momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.second_convolution = nn.Conv2d(4, 4, 3)
        self.average_norm = nn.BatchNorm2d(4, momentum=None, affine=False)
        self.last_norm = nn.BatchNorm1d(4, track_running_stats=False)
        self.head = nn.Linear(4, 1)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.convolution(images)))
        hidden = self.average_norm(self.second_convolution(hidden))
        features = torch.tanh(hidden).mean(dim=(2, 3))
        if self.training:
            # In evaluation mode, this layer would use the statistics of the local batch.
            features = self.last_norm(features)
        return self.head(features).squeeze(-1)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = ConvolutionalNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer


def train(fabric: Fabric, compiles: bool = False) -> dict[str, list[Tensor]]:
    """Train on this rank's part of each batch, which is all of it with one rank."""
    plain, plain_optimizer = build()
    assert fabric.sync_batchnorm(plain) is plain
    model, optimizer = fabric.setup(plain, plain_optimizer)
    forward: Any = model
    if compiles:
        forward = torch.compile(model, backend="eager")
    generator = torch.Generator().manual_seed(5)
    for cut in CUTS:
        images = torch.randn(BATCH, 2, 8, 8, generator=generator).double()
        targets = torch.randn(BATCH, generator=generator).double()
        samples = samples_of_rank(fabric, cut)
        errors = forward(images[samples]) - targets[samples]
        loss = errors.pow(2).sum()
        fabric.backward(loss, weight=len(errors))
        optimizer.step()
        optimizer.zero_grad()
    buffers = [buffer.clone() for buffer in model.buffers()]
    model.eval()
    with torch.no_grad():
        outputs = model(images)
    return {"parameters": full_parameters(model), "buffers": buffers, "outputs": [outputs]}


def samples_of_rank(fabric: Fabric, cut: int) -> slice:
    """Return the first or second part of a batch, or all of it if there is one part."""
    sampler = fabric.strategy.distributed_sampler_kwargs
    if sampler is None:
        return slice(None)
    if sampler["rank"] == 0:
        return slice(0, cut)
    return slice(cut, BATCH)


MESH = ModelParallelStrategy(tp_plan={"head": "rowwise_rep"}, tensor_parallel_size=2)
# Under the mesh, two ranks share each batch, which counts once.
JOBS: dict[str, tuple[Any, int]] = {"ddp": ("ddp", 2), "fsdp": ("fsdp", 2), "mesh": (MESH, 4)}


@pytest.mark.parametrize(
    ("job", "compiles"), [("ddp", False), ("ddp", True), ("fsdp", False), ("mesh", False)]
)
def test_training_equals_one_process_with_the_whole_batch(job: str, compiles: bool) -> None:
    strategy, ranks = JOBS[job]
    with Fabric(accelerator="cpu", devices=1, precision="64-true") as fabric:
        expected = train(fabric)
    results = run_in_ranks(train, compiles, strategy=strategy, ranks=ranks, precision="64-true")
    for tensors in results:
        torch.testing.assert_close(tensors, expected, rtol=1e-10, atol=1e-10)


# -- one layer -------------------------------------------------------------------------------------

# The rows of a batch that a rank has: none of them on rank 1.
ROWS = (slice(0, 5), slice(5, 5), slice(5, 12))
# The greatest difference for each dtype. The statistics of half precision are in single precision.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def outputs_and_gradients(layer: nn.Module, rows: Tensor, weights: Tensor) -> list[Tensor]:
    """Return the output, its gradient, and the gradient of a penalty on that gradient."""
    x = rows.clone().requires_grad_()
    output = layer(x)
    loss = (output.pow(3) * weights).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (second_gradient,) = torch.autograd.grad(gradient.pow(2).sum(), x)
    return [output.detach(), gradient.detach(), second_gradient]


def rows_and_weights(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(12, 3, generator=generator)
    weights = torch.randn(12, 3, generator=generator)
    if dtype.itemsize > 2:
        # A mean that is large compared with the deviation costs digits in a careless formula.
        rows = rows + 100
    return rows.to(dtype), weights.to(dtype)


def normalize_in_ranks(fabric: Fabric) -> dict[torch.dtype, list[Tensor]]:
    tensors: dict[torch.dtype, list[Tensor]] = {}
    for dtype in TOLERANCES:
        layer = fabric.sync_batchnorm(nn.BatchNorm1d(3, dtype=dtype))
        rows, weights = rows_and_weights(dtype)
        samples = ROWS[fabric.global_rank]
        rank_tensors = outputs_and_gradients(layer, rows[samples], weights[samples])
        tensors[dtype] = [*rank_tensors, *layer.buffers()]
    return tensors


def test_a_layer_equals_torchs_for_any_dtype_and_an_empty_batch_on_a_rank() -> None:
    results = run_in_ranks(normalize_in_ranks, ranks=3)
    for dtype, tolerance in TOLERANCES.items():
        layer = nn.BatchNorm1d(3, dtype=dtype)
        rows, weights = rows_and_weights(dtype)
        expected = outputs_and_gradients(layer, rows, weights)
        for position, tensor in enumerate(expected):
            rank_tensors = [tensors[dtype][position] for tensors in results]
            actual = torch.cat(rank_tensors)
            scale = tensor.abs().max().item()
            torch.testing.assert_close(actual, tensor, rtol=tolerance, atol=tolerance * scale)
        for tensors in results:
            buffers = tensors[dtype][len(expected) :]
            torch.testing.assert_close(buffers, [*layer.buffers()], rtol=tolerance, atol=tolerance)


def use_unusual_layers(fabric: Fabric) -> dict[str, Any]:
    layer = nn.BatchNorm1d(2)
    fabric.sync_batchnorm(layer)
    empty = layer(torch.zeros(0, 2))
    buffers_after_empty = [buffer.clone() for buffer in layer.buffers()]

    one_row = torch.zeros(1 - fabric.global_rank, 2)
    copied = copy.deepcopy(layer)
    copied(torch.full((2, 2), float(fabric.global_rank)))
    pickled = pickle.dumps(layer)
    unpickled = pickle.loads(pickled)
    unconnected = outcome(lambda: unpickled(torch.zeros(2, 2)))
    fabric.sync_batchnorm(unpickled)
    unpickled(torch.full((2, 2), float(fabric.global_rank)))
    results = {
        "shape of an empty batch": tuple(empty.shape),
        "buffers after an empty batch": buffers_after_empty,
        "one value": outcome(lambda: layer(one_row)),
        "mean of a copy": copied.running_mean.clone(),
        "unconnected": unconnected,
        "mean of an unpickled layer": unpickled.running_mean,
    }
    fabric.teardown()
    # Layers get their classes back, and copies work without a job.
    results["class after teardown"] = type(layer)
    copied(torch.zeros(2, 2))
    return results


def test_empty_batches_single_values_and_copies() -> None:
    for results in run_in_ranks(use_unusual_layers):
        assert results["shape of an empty batch"] == (0, 2)
        plain = nn.BatchNorm1d(2)
        plain(torch.zeros(0, 2))
        torch.testing.assert_close(results["buffers after an empty batch"], [*plain.buffers()])
        assert "more than 1 value per channel" in results["one value"]
        expected_mean = torch.full((2,), 0.05)
        torch.testing.assert_close(results["mean of a copy"], expected_mean)
        assert results["unconnected"].startswith("UsageError")
        assert "fabric.sync_batchnorm(model)" in results["unconnected"]
        torch.testing.assert_close(results["mean of an unpickled layer"], expected_mean)
        assert results["class after teardown"] is nn.BatchNorm1d


class NormAndActivation(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def refuse_layers(fabric: Fabric) -> dict[str, str]:
    own_forward = nn.Sequential(nn.BatchNorm1d(2), NormAndActivation(2))
    lazy = nn.LazyBatchNorm1d()
    refusals = {
        "own forward": outcome(lambda: fabric.sync_batchnorm(own_forward)),
        "lazy": outcome(lambda: fabric.sync_batchnorm(lazy)),
    }
    # Nothing was changed.
    assert type(own_forward[0]) is nn.BatchNorm1d
    # The remedy for a lazy layer.
    lazy(torch.zeros(2, 2))
    fabric.sync_batchnorm(lazy)
    model = fabric.setup(nn.Sequential(nn.BatchNorm1d(2)))
    refusals["set up"] = outcome(lambda: fabric.sync_batchnorm(model))
    return refusals


def test_layers_that_cannot_be_synchronized_are_named() -> None:
    for refusals in run_in_ranks(refuse_layers):
        assert "statistics of 1, a NormAndActivation" in refusals["own forward"]
        assert "forward pass of its own" in refusals["own forward"]
        assert "no parameters before" in refusals["lazy"]
        assert "fabric.setup(fabric.sync_batchnorm(model))" in refusals["set up"]


def test_replicas_of_one_process_are_refused() -> None:
    with Fabric(accelerator="cpu", strategy="dp", devices=2) as fabric:
        text = outcome(lambda: fabric.sync_batchnorm(nn.BatchNorm1d(2)))
    assert 'strategy="ddp"' in text


def test_a_single_process_keeps_its_layers() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        layer = fabric.sync_batchnorm(nn.BatchNorm1d(2))
    assert type(layer) is nn.BatchNorm1d

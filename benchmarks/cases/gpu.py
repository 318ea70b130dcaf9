"""Cases that need a GPU, and are left out without a GPU."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.cases import step
from benchmarks.framework import Case, Measure, Row
from benchmarks.memory import gpt
from benchmarks.timing import count_calls, seconds

VOCABULARY = 96
LENGTH = 512
BATCH = 32
LAYERS = 8
WIDTH = 1024
# Dense bf16 operations per second, for MFU, by a substring of the device's name.
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L4": 121e12, "4090": 165e12}

Prepared = tuple[nn.Module, Any, Callable[[Tensor], Any], Callable[[Any], Iterable[Any]]]


def launch_bound(contestant: str) -> Callable[[bool], Measure]:
    def prepare(quick: bool) -> Measure:
        one = step.BUILDERS[contestant]("32-true", "cuda")
        one()
        calls = count_calls(one, number=12)  # fabric watches the first steps
        return lambda: {"time": 1e6 * seconds(one, 20 if quick else 400), "calls": calls}

    return prepare


def raw(model: nn.Module) -> Prepared:
    optimizer = torch.optim.AdamW(model.cuda().parameters(), lr=1e-4, fused=True)

    class Mixed(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return model(tokens).float()

    class Moved:
        def __init__(self, loader: Iterable[Any]) -> None:
            self.loader = loader

        def __iter__(self) -> Iterator[Any]:
            return ([tokens.cuda(non_blocking=True)] for [tokens] in self.loader)

    return Mixed(), optimizer, Tensor.backward, Moved


def ours(model: nn.Module) -> Prepared:
    from fabric import Fabric

    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
    optimizer = torch.optim.AdamW(model.cuda().parameters(), lr=1e-4, fused=True)
    return (*fabric.setup(model, optimizer), fabric.backward, fabric.setup_dataloaders)


def lightning(model: nn.Module) -> Prepared:
    from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports]  # an extra

    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
    optimizer = torch.optim.AdamW(model.cuda().parameters(), lr=1e-4, fused=True)
    return (*fabric.setup(model, optimizer), fabric.backward, fabric.setup_dataloaders)


def accelerate(model: nn.Module) -> Prepared:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]  # an extra

    accelerator = Accelerator(mixed_precision="bf16")
    optimizer = torch.optim.AdamW(model.cuda().parameters(), lr=1e-4, fused=True)
    return (*accelerator.prepare(model, optimizer), accelerator.backward, accelerator.prepare)


def training(set_up: Callable[[nn.Module], Prepared]) -> Callable[[bool], Measure]:
    """Return a contestant that measures tokens per second and MFU, fed from pinned memory."""

    def prepare(quick: bool) -> Measure:
        torch.manual_seed(0)
        model = gpt()(VOCABULARY, LENGTH, layers=2 if quick else LAYERS, width=WIDTH)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        layers = len(model.blocks)
        module, optimizer, backward, feed = set_up(model)
        steps = 3 if quick else 20
        tokens = torch.randint(VOCABULARY, (steps * BATCH, LENGTH + 1))
        batches = feed(DataLoader(TensorDataset(tokens), batch_size=BATCH, pin_memory=True))

        def epoch() -> None:
            for [batch] in batches:
                loss = cross_entropy(module(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                optimizer.zero_grad()
                backward(loss)
                optimizer.step()
            torch.cuda.synchronize()

        # Six operations for each parameter. For attention, twelve for each layer, position and
        # width.
        per_token = 6 * parameters + 12 * layers * LENGTH * WIDTH
        name = torch.cuda.get_device_name()
        peak = None
        for model_name, operations in PEAKS.items():
            if peak is None and model_name in name:
                peak = operations

        def measure() -> dict[str, float]:
            throughput = steps * BATCH * LENGTH / seconds(epoch, 1)
            results = {"throughput": throughput}
            if peak is not None:
                results["MFU"] = 100 * throughput * per_token / peak
            return results

        return measure

    return prepare


def copying(set_up: Callable[[nn.Module], Prepared]) -> Callable[[bool], Measure]:
    """Return a contestant whose step takes about as long to copy a batch as to compute."""

    def prepare(quick: bool) -> Measure:
        model = nn.Linear(4096, 4096)
        module, _, _, feed = set_up(model)
        steps = 4 if quick else 20
        data = torch.randn(steps * 4096, 4096)
        batches = feed(DataLoader(TensorDataset(data), batch_size=4096, pin_memory=True))

        def epoch() -> None:
            for [batch] in batches:
                for _ in range(20):
                    batch = module(batch)
            torch.cuda.synchronize()

        return lambda: {"step": 1e3 * seconds(epoch, 1) / steps}

    return prepare


BUILDERS = {"raw": raw, "fabric": ours, "lightning-fabric": lightning, "accelerate": accelerate}
CASES = [
    Case(
        name="gpu-step",
        title="A step of a launch-bound model on a GPU, 32-true",
        rows={"time": Row("us", "difference", 3), "calls": Row("calls", "difference", 4)},
        contestants={name: launch_bound(name) for name in BUILDERS},
        rounds=20,
        cuda=True,
    ),
    Case(
        name="gpu-batch",
        title=(
            "A step whose batch takes as long to copy as to compute; raw copies from pinned memory "
            "as it goes"
        ),
        rows={"step": Row("ms")},
        contestants={name: copying(build) for name, build in BUILDERS.items()},
        cuda=True,
    ),
    Case(
        name="gpu-gpt",
        title="A GPT on a GPU, bf16-mixed",
        rows={"throughput": Row("tokens/s", "ratio", 0.99), "MFU": Row("%")},
        contestants={name: training(build) for name, build in BUILDERS.items()},
        cuda=True,
    ),
]

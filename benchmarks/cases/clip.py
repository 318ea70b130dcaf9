"""The clipping of gradients by their norm, with the check that it is finite."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.framework import Case, Measure, Row
from benchmarks.timing import times


def with_gradients() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def raw() -> Callable[[], Any]:
    model, _ = with_gradients()
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def ours() -> Callable[[], Any]:
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(*with_gradients())
    return lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0)


def lightning() -> Callable[[], Any]:
    from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports]  # an extra

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(*with_gradients())
    return lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0)


def accelerate() -> Callable[[], Any]:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]  # an extra

    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(*with_gradients())
    return lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0)


def preparing(build: Callable[[], Callable[[], Any]]) -> Callable[[bool], Measure]:
    def prepare(quick: bool) -> Measure:
        return times("time", build(), number=20 if quick else 400)

    return prepare


CASES = [
    Case(
        name="clip",
        title="clip_gradients of 16 gradients, by their norm",
        rows={"time": Row("us", "difference")},
        contestants={
            "raw": preparing(raw),
            "fabric": preparing(ours),
            "lightning-fabric": preparing(lightning),
            "accelerate": preparing(accelerate),
        },
        rounds=10,
    )
]

"""The overhead of a training step on one device."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import mse_loss

from benchmarks.framework import Case, Measure, Row
from benchmarks.models import step_of, tiny
from benchmarks.timing import count_calls, seconds

PRECISIONS = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
BUDGETS = {"32-true": 3.0, "bf16-mixed": 5.0, "16-mixed": 5.0}

Step = Callable[[], None]


def raw(precision: str, device: str = "cpu") -> Step:
    """Return a hand-written step, with autocast, and for float16 with a GradScaler."""
    model, optimizer, inputs, targets = tiny(device)
    dtype = PRECISIONS[precision]
    scaler = torch.amp.GradScaler(device)

    def mixed() -> None:
        with torch.autocast(device, dtype=dtype):
            output = model(inputs)
        loss = mse_loss(output.float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def scaled() -> None:
        with torch.autocast(device, dtype=dtype):
            output = model(inputs)
        loss = mse_loss(output.float(), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    plain = step_of(model, optimizer, torch.Tensor.backward, inputs, targets)
    return {"32-true": plain, "bf16-mixed": mixed, "16-mixed": scaled}[precision]


def ours(precision: Any, device: Any = "cpu") -> Step:
    from fabric import Fabric

    fabric = Fabric(accelerator=device, devices=1, precision=precision)
    model, optimizer, inputs, targets = tiny(device)
    prepared = fabric.setup(model, optimizer)
    return step_of(*prepared, fabric.backward, inputs, targets)


def lightning(precision: Any, device: str = "cpu") -> Step:
    from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports]  # an extra

    fabric = Fabric(accelerator=device, devices=1, precision=precision)
    model, optimizer, inputs, targets = tiny(device)
    model, optimizer = fabric.setup(model, optimizer)
    return step_of(model, optimizer, fabric.backward, inputs, targets)


def accelerate(precision: str, device: str = "cpu") -> Step:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]  # an extra

    names = {"32-true": "no", "bf16-mixed": "bf16", "16-mixed": "fp16"}
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision=names[precision])
    model, optimizer, inputs, targets = tiny(device)
    model, optimizer = accelerator.prepare(model, optimizer)
    return step_of(model, optimizer, accelerator.backward, inputs, targets)


BUILDERS: dict[str, Any] = {
    "raw": raw,
    "fabric": ours,
    "lightning-fabric": lightning,
    "accelerate": accelerate,
}


def preparing(build: Callable[..., Step], precision: str, number: int) -> Callable[[bool], Measure]:
    def prepare(quick: bool) -> Measure:
        step = build(precision)
        step()
        step()
        calls = count_calls(step, number=12)  # fabric watches the first steps
        return lambda: {"time": 1e6 * seconds(step, 20 if quick else number), "calls": calls}

    return prepare


CASES = [
    Case(
        name=f"step-{precision}",
        title=f"A step of a tiny model on one device, {precision}",
        rows={
            "time": Row("us", "difference", BUDGETS[precision]),
            "calls": Row("calls", "difference", 4 if precision == "32-true" else None),
        },
        contestants={
            name: preparing(build, precision, number=400) for name, build in BUILDERS.items()
        },
        rounds=5,
        starts=4,
    )
    for precision in PRECISIONS
]

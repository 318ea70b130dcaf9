"""Checkpoints beside plain torch, and what a save costs the loop that it goes on beside.

`python -m benchmarks.checkpoint [--megabytes 1000] [--rounds 5] [--quick]` saves and loads a model of that size, the
contestants alternately, and prints median seconds and the median of the ratios within a round. "Loop blocked" is how
long `fabric.save(..., async_=True)` takes to return, from the second on; "loop slowed" how much longer a training step
on one thread takes while the save goes on. --quick is 50 MB in two rounds.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fabric import Fabric

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="Seconds to save and to load.")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="50 MB, two rounds")
    options = parser.parse_args(arguments)
    megabytes, rounds = (50, 2) if options.quick else (options.megabytes, options.rounds)
    print("| what | seconds | beside | seconds | ratio |\n|---|--:|---|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        with Fabric(accelerator="cpu", devices=1, environment="none") as fabric:
            one_file(fabric, Path(folder), megabytes, rounds)
            beside(fabric, Path(folder, "fabric.pt"), model_of(megabytes), rounds, "one file")
        with Fabric(accelerator="cpu", devices=2, strategy="fsdp", launcher="forkserver") as fabric:
            fabric.launch(shards, Path(folder, "shards"), megabytes, rounds)


def one_file(fabric: Fabric, folder: Path, megabytes: int, rounds: int) -> None:
    """``save`` and ``load`` beside ``torch.save`` with a flush, and ``torch.load`` into the module."""
    net = model_of(megabytes)
    own = folder / "fabric.pt"
    other = folder / "torch.pt"
    model = fabric.setup(net)
    report(
        ("fabric.save, one file", lambda: fabric.save(own, {"model": model})),
        ("torch.save, fsync", lambda: save_plainly(net, other)),
        rounds,
    )
    report(
        ("fabric.load, verified", lambda: fabric.load(own, {"model": model})),
        (
            "torch.load, load_state_dict",
            lambda: net.load_state_dict(torch.load(other, weights_only=True)["model"]),
        ),
        rounds,
    )


def shards(fabric: Fabric, path: Path, megabytes: int, rounds: int) -> None:
    """What a rank does that saves shards."""
    beside(fabric, path, model_of(megabytes), rounds, "shards of 2 ranks")


def beside(fabric: Fabric, path: Path, net: nn.Module, rounds: int, name: str) -> None:
    """What a save costs the loop beside which it goes on."""
    model = fabric.setup(net)
    small = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    optimizer = torch.optim.AdamW(small.parameters())
    at_once = []
    blocked = []
    slow = []
    fast = []
    for _ in range(rounds + 1):
        at_once.append(seconds(lambda: fabric.save(path, {"model": model})))
        begin = time.perf_counter()
        pending = fabric.save(path, {"model": model}, async_=True)
        blocked.append(time.perf_counter() - begin)
        steps = 0
        begin = time.perf_counter()
        while not pending.done():
            step(small, optimizer)
            steps += 1
        slow.append((time.perf_counter() - begin) / max(1, steps))
        pending.wait()
        fast.append(seconds(lambda: [step(small, optimizer) for _ in range(200)]) / 200)
        fabric.barrier()
    if fabric.is_global_zero:
        line(f"loop blocked, {name}", blocked[1:], "fabric.save", at_once[1:])
        line(f"loop slowed, {name}: a step", slow[1:], "a step alone", fast[1:])


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step of a loop that keeps the interpreter busy."""
    net(torch.ones(32, 128)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def model_of(megabytes: int) -> nn.Module:
    """Sixteen parameters of so many megabytes together."""
    # a ParameterList is not sharded
    count = megabytes * 1_000_000 // 4 // 16
    model = nn.Module()
    for number in range(16):
        model.register_parameter(f"weight{number}", nn.Parameter(torch.randn(count)))
    return model


def save_plainly(net: nn.Module, path: Path) -> None:
    """``torch.save``, and what is in the file on the disk."""
    torch.save({"model": net.state_dict()}, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def report(
    ours: tuple[str, Callable[[], Any]], plain: tuple[str, Callable[[], Any]], rounds: int
) -> None:
    """Measure two actions alternately, after one round of rehearsal, and print them."""
    taken: dict[str, list[float]] = {ours[0]: [], plain[0]: []}
    for number in range(rounds + 1):
        for name, action in (ours, plain) if number % 2 else (plain, ours):
            taken[name].append(seconds(action))
    line(ours[0], taken[ours[0]][1:], plain[0], taken[plain[0]][1:])


def line(name: str, ours: list[float], plain_name: str, plain: list[float]) -> None:
    """A line of the table."""
    ratio = statistics.median(one / other for one, other in zip(ours, plain, strict=True))
    medians = [f"{statistics.median(values):.4f}" for values in (ours, plain)]
    print(f"| {name} | {medians[0]} | {plain_name} | {medians[1]} | {ratio:.2f} |", flush=True)


def seconds(action: Callable[[], Any]) -> float:
    """How long an action takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()

"""Checkpoints vs. plain torch, and what a background save costs the training loop.

`python -m benchmarks.checkpoint [--megabytes 1000] [--rounds 5] [--quick]` saves and loads a model
of that size, the contestants alternately, and prints median seconds and the median of the ratios
within a round. "Loop blocked" is how long `fabric.save(..., async_=True)` takes to return, from the
second save on. "Loop slowed" is how much longer a training step on one thread takes meanwhile.
"With the comparison" is a save under DDP on two ranks that finds replicas that drift apart, and
"without" is the same with ``check_replicas=False``; these two take five times as many rounds, since
their ratio is close to 1. "In 2,000 parameters" is the same with half the bytes in many small
tensors. --quick takes 50 MB and two rounds.
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
    megabytes = options.megabytes
    rounds = options.rounds
    if options.quick:
        megabytes = 50
        rounds = 2
    print("| what | seconds | vs. | seconds | ratio |\n|---|--:|---|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        with Fabric(accelerator="cpu", devices=1, environment="none") as fabric:
            one_file(fabric, Path(folder), megabytes, rounds)
            in_background(
                fabric, Path(folder, "fabric.pt"), model_of(megabytes), rounds, "one file"
            )
        with Fabric(accelerator="cpu", devices=2, strategy="fsdp", launcher="forkserver") as fabric:
            fabric.launch(shards, Path(folder, "shards"), megabytes, rounds)
        with Fabric(accelerator="cpu", devices=2, strategy="ddp", launcher="forkserver") as fabric:
            path = Path(folder, "replicas.pt")
            fabric.launch(replicas, path, megabytes, rounds)
            fabric.launch(small_replicas, path, megabytes, rounds)


def one_file(fabric: Fabric, folder: Path, megabytes: int, rounds: int) -> None:
    """Compare ``save`` and ``load`` with ``torch.save``, flushed to disk, and ``torch.load``."""
    net = model_of(megabytes)
    fabric_path = folder / "fabric.pt"
    torch_path = folder / "torch.pt"
    model = fabric.setup(net)

    def load_with_torch() -> None:
        net.load_state_dict(torch.load(torch_path, weights_only=True)["model"])

    report(
        ("fabric.save, one file", lambda: fabric.save(fabric_path, {"model": model})),
        ("torch.save, fsync", lambda: save_plainly(net, torch_path)),
        rounds,
    )
    report(
        ("fabric.load, verified", lambda: fabric.load(fabric_path, {"model": model})),
        ("torch.load, load_state_dict", load_with_torch),
        rounds,
    )


def shards(fabric: Fabric, path: Path, megabytes: int, rounds: int) -> None:
    """Measure background saves in shards on this rank."""
    in_background(fabric, path, model_of(megabytes), rounds, "shards of 2 ranks")


def replicas(fabric: Fabric, path: Path, megabytes: int, rounds: int) -> None:
    """Measure the comparison of large tensors."""
    compare_saves(fabric, path, model_of(megabytes // 3), rounds, "with the comparison")


def small_replicas(fabric: Fabric, path: Path, megabytes: int, rounds: int) -> None:
    """Measure the comparison of many small tensors, with half of the bytes."""
    net = model_of(megabytes // 6, num_parameters=2000)
    compare_saves(fabric, path, net, rounds, "in 2,000 parameters")


def compare_saves(fabric: Fabric, path: Path, net: nn.Module, rounds: int, title: str) -> None:
    """Compare saves of a model and an optimizer with and without the comparison of replicas.

    Args:
        fabric: the job of several ranks.
        path: the checkpoint.
        net: the model, whose optimizer has twice its bytes.
        rounds: a fifth of the number of pairs of saves.
        title: what is compared, for the table.
    """
    adam = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        adam.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    model, optimizer = fabric.setup(net, adam)
    state = {"model": model, "optimizer": optimizer}
    session = fabric._session
    assert session is not None
    comparison = session.replica_comparison

    def save(is_compared: bool, async_: bool) -> float:
        """Return the seconds until a save returns."""
        session.replica_comparison = None
        if is_compared:
            session.replica_comparison = comparison
        fabric.barrier()
        begin = time.perf_counter()
        pending = fabric.save(path, state, async_=async_)
        duration = time.perf_counter() - begin
        if pending is not None:
            pending.wait()
        return duration

    for async_, name in ((False, "fabric.save"), (True, "loop blocked")):
        compared: list[float] = []
        alone: list[float] = []
        for number in range(5 * rounds + 1):
            if number % 2 == 1:
                compared.append(save(is_compared=True, async_=async_))
                alone.append(save(is_compared=False, async_=async_))
            else:
                alone.append(save(is_compared=False, async_=async_))
                compared.append(save(is_compared=True, async_=async_))
        if fabric.is_global_zero:
            line(f"{name}, {title}", compared[1:], "without", alone[1:])


def in_background(fabric: Fabric, path: Path, net: nn.Module, rounds: int, name: str) -> None:
    """Measure what a background save costs the training loop."""
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
    """Train for a step that keeps the interpreter busy."""
    net(torch.ones(32, 128)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def model_of(megabytes: int, num_parameters: int = 16) -> nn.Module:
    """Return a module whose parameters have so many megabytes together."""
    # FSDP does not shard a ParameterList.
    num_elements = megabytes * 1_000_000 // 4 // num_parameters
    model = nn.Module()
    for number in range(num_parameters):
        model.register_parameter(f"weight{number}", nn.Parameter(torch.randn(num_elements)))
    return model


def save_plainly(net: nn.Module, path: Path) -> None:
    """Call ``torch.save``, and flush the file to disk."""
    torch.save({"model": net.state_dict()}, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def report(
    ours: tuple[str, Callable[[], Any]], plain: tuple[str, Callable[[], Any]], rounds: int
) -> None:
    """Measure two actions alternately, after one round of rehearsal, and print them."""
    name, action = ours
    plain_name, plain_action = plain
    times = []
    plain_times = []
    for number in range(rounds + 1):
        if number % 2 == 1:
            times.append(seconds(action))
            plain_times.append(seconds(plain_action))
        else:
            plain_times.append(seconds(plain_action))
            times.append(seconds(action))
    line(name, times[1:], plain_name, plain_times[1:])


def line(name: str, ours: list[float], plain_name: str, plain: list[float]) -> None:
    """Print a line of the table."""
    ratios = [time / plain_time for time, plain_time in zip(ours, plain, strict=True)]
    ratio = statistics.median(ratios)
    median = statistics.median(ours)
    plain_median = statistics.median(plain)
    print(
        f"| {name} | {median:.4f} | {plain_name} | {plain_median:.4f} | {ratio:.2f} |", flush=True
    )


def seconds(action: Callable[[], Any]) -> float:
    """Return the seconds that an action takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()

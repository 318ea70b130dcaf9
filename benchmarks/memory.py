"""Peak memory per rank: FSDP vs. DDP, and FSDP on more and more ranks.

`python -m benchmarks.memory` trains the GPT of the text example for a few steps with AdamW. It
prints how far the resident set of a rank rose above its size before the model was built: until
`setup` returned, and at its peak. Each number comes from a separate job, and from the rank that
needed most. `--quick` takes a smaller model for the last table, and fewer ranks.

A tiny model is trained first, so that libraries that a strategy loads late are not counted as the
model's memory. Linux only: the peak is the kernel's `VmHWM`, reset through `/proc/self/clear_refs`.

The exit code is 1 if FSDP does not need at least 1.6 times less than DDP, if a model built in
`init_module` needs as much as the whole model, or if FSDP's peak does not fall as ranks are added.
"""

import argparse
import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fabric import Fabric

__all__ = ["Job", "Peak", "main", "measure"]

ROOT = Path(__file__).parents[1]
VOCABULARY = 96
BLOCK_SIZE = 32
BATCH_SIZE = 2
STEPS = 3
TARGET = 1.6
DEADLINE = 240
MB = 10**6
# The strategy, and whether the model is built in init_module(), by the name in the table.
KINDS: dict[str, tuple[Any, bool]] = {
    "ddp": ("ddp", False),
    "fsdp": ("fsdp", False),
    "fsdp, init_module": ("fsdp", True),
}


class Size(NamedTuple):
    """The layers and the width of a GPT."""

    layers: int
    width: int


WARM_UP = Size(2, 16)
SIZE = Size(8, 768)
LARGER = Size(12, 1024)
QUICK_LARGER = Size(12, 512)


class Job(NamedTuple):
    """A measurement: a name of ``KINDS``, the size of the model, and the number of ranks."""

    kind: str
    layers: int
    width: int
    ranks: int


class Peak(NamedTuple):
    """The memory of the rank that needed most, above its baseline, in bytes.

    Attributes:
        parameters: The size of the model.
        set_up: The peak until ``setup`` returned.
        trained: The peak of the whole run.
    """

    parameters: int
    set_up: int
    trained: int


def measure(job: Job) -> Peak:
    """Run a job in new processes.

    Raises:
        CalledProcessError: The job failed.
        TimeoutExpired: The job took longer than ``DEADLINE`` seconds.
    """
    command = [sys.executable, "-m", "benchmarks.memory", "--job", json.dumps(job)]
    # One thread per rank, because the buffers of more threads do not belong to the strategy.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment = {**clean, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=DEADLINE,
        text=True,
    )
    return Peak(*json.loads(done.stdout))


def run_job(job: Job) -> Peak:
    """Train in ``job.ranks`` processes. A single rank is this process."""
    strategy, in_init_module = KINDS[job.kind]
    with Fabric(
        accelerator="cpu", devices=job.ranks, strategy=strategy, launcher="forkserver"
    ) as fabric:
        results = fabric.launch(
            train_and_weigh, in_init_module, (job.layers, job.width), return_all=True
        )
    return Peak(*(max(values) for values in zip(*results, strict=True)))


def train_and_weigh(
    fabric: Fabric, in_init_module: bool, size: tuple[int, int]
) -> tuple[int, int, int]:
    """Train on this rank, and return the three numbers of a :class:`Peak`."""
    for _ in train(fabric, in_init_module, *WARM_UP):
        pass
    gc.collect()
    before = reset_peak()
    phases = train(fabric, in_init_module, *size)
    parameters = next(phases)
    set_up = peak() - before
    next(phases)
    return parameters, set_up, peak() - before


def train(fabric: Fabric, in_init_module: bool, layers: int, width: int) -> Iterator[int]:
    """Yield the bytes of the parameters after setup, and again after training."""
    torch.manual_seed(0)
    context = fabric.init_module() if in_init_module else nullcontext()
    with context:
        model: nn.Module = gpt()(VOCABULARY, BLOCK_SIZE, layers=layers, width=width)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    yield parameters
    torch.manual_seed(1 + fabric.global_rank)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH_SIZE, BLOCK_SIZE + 1))
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    yield parameters


def gpt() -> Any:
    """Return the class ``GPT`` of the text example."""
    return example("text/model.py").GPT


def example(path: str) -> Any:
    """Import a file of the examples, whose folders are not on the path."""
    name = f"benchmarks_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # torch.compile imports the module of the code that it traces.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def reset_peak() -> int:
    """Reset this process's peak to the current resident set, and return its bytes."""
    # The kernel resets the peak of the resident set when 5 is written.
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Return the peak of this process's resident set, in bytes."""
    status = Path("/proc/self/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None, status
    return int(match[1]) * 1024


def compare(size: Size, all_ranks: Sequence[int]) -> list[str]:
    """Print the strategies side by side, and return the promises that FSDP breaks."""
    print("| ranks | strategy | parameters, MB | until set up, MB | peak, MB | ddp's peak / peak |")
    print("|--:|---|--:|--:|--:|--:|")
    broken = []
    for ranks in all_ranks:
        results = {}
        for kind in KINDS:
            result = measure(Job(kind, *size, ranks))
            results[kind] = result
            ratio = results["ddp"].trained / result.trained
            print(f"| {ranks} | {kind} | {cells(result)} | {ratio:.2f} |", flush=True)
            if kind != "ddp" and ratio < TARGET:
                broken.append(f"{kind} on {ranks} ranks is not {TARGET} times below ddp")
        if results["fsdp, init_module"].set_up >= results["ddp"].parameters:
            broken.append(
                f"on {ranks} ranks a model built in init_module() took the memory of the whole "
                "model"
            )
    return broken


def scale(size: Size, all_ranks: Sequence[int]) -> list[str]:
    """Print FSDP's peaks for one model on more and more ranks, and return broken promises."""
    print("| ranks | strategy | parameters, MB | until set up, MB | peak, MB |")
    print("|--:|---|--:|--:|--:|")
    results = []
    for ranks in all_ranks:
        result = measure(Job("fsdp, init_module", *size, ranks))
        results.append(result)
        print(f"| {ranks} | fsdp, init_module | {cells(result)} |", flush=True)
    for fewer_ranks, more_ranks in pairwise(results):
        if more_ranks.trained >= fewer_ranks.trained:
            return ["the peak per rank does not fall as ranks are added"]
    return []


def cells(result: Peak) -> str:
    return " | ".join(f"{value / MB:.0f}" for value in result)


def main() -> int:
    """Print both tables, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smaller model and at most two ranks, in two minutes"
    )
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not os.access("/proc/self/clear_refs", os.W_OK):
        parser.error(
            "the peak of a process can only be reset on Linux, where /proc/self/clear_refs is "
            "writable"
        )
    if args.job is not None:
        print(json.dumps(run_job(Job(*args.job))))
        return 0
    all_ranks = [1, 2] if args.quick else [1, 2, 4]
    broken = compare(SIZE, all_ranks[1:])
    print()
    larger = QUICK_LARGER if args.quick else LARGER
    broken += scale(larger, all_ranks)
    for line in broken:
        print(line, file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

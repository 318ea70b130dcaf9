"""Peak memory per rank: DDP beside FSDP, and FSDP on more and more ranks.

`python -m benchmarks.memory` trains the GPT of the text example for a few steps with AdamW and prints how far the
resident set of a rank rose above what it was before the model was built: until `setup` returned, and at its peak. Each
number comes from a job of its own; of the ranks, the one that needed most counts. `--quick` takes a smaller model for
the last table, and fewer ranks.

A tiny model goes the same way first, so that the libraries that a strategy loads late are not counted as the model's.
Linux only: the peak is the kernel's own (`VmHWM`), which is set back through `/proc/self/clear_refs`.

The exit code is 1 where FSDP is not at least 1.6 times below DDP at two ranks, where a model built in `init_module`
ever takes as much as the whole model, or where FSDP's peak does not fall as ranks are added.
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
# The strategy, and whether the model is built in init_module().
KINDS: dict[str, tuple[Any, bool]] = {
    "ddp": ("ddp", False),
    "fsdp": ("fsdp", False),
    "fsdp, init_module": ("fsdp", True),
}


class Size(NamedTuple):
    """Layers and width of a GPT."""

    layers: int
    width: int


WARM_UP = Size(2, 16)
SIZE = Size(8, 768)
LARGER = Size(12, 1024)
QUICK_LARGER = Size(12, 512)


class Job(NamedTuple):
    """What is measured: a name of ``KINDS``, the layers and width of the model, the number of ranks."""

    kind: str
    layers: int
    width: int
    ranks: int


class Peak(NamedTuple):
    """What the rank that needed most held above its baseline, in bytes.

    ``set_up`` is the peak until ``setup`` returned, ``trained`` that of the whole run; ``parameters`` is the size of
    the model.
    """

    parameters: int
    set_up: int
    trained: int


def measure(job: Job) -> Peak:
    """Run a job in new processes; raises ``CalledProcessError`` or ``TimeoutExpired``."""
    command = [sys.executable, "-m", "benchmarks.memory", "--job", json.dumps(job)]
    # One thread per rank: the buffers of further threads are not the strategy's.
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
    """Train in ``job.ranks`` processes; a single rank is this one."""
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
    """Runs in every rank; returns the three numbers of a :class:`Peak`."""
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
    """Yield the bytes of the parameters twice: once the model is set up, and once it is trained."""
    torch.manual_seed(0)
    with fabric.init_module() if in_init_module else nullcontext():
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
    """The class ``GPT`` of the text example."""
    return example("text/model.py").GPT


def example(path: str) -> Any:
    """A file of the examples, whose folders are not on the path, as a module."""
    spec = importlib.util.spec_from_file_location("benchmarks_gpt", ROOT / "examples" / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reset_peak() -> int:
    """Set this process's peak back to what is resident now, and return that, in bytes."""
    # 5 is the kernel's code for the peak of the resident set.
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """The most that this process has had resident, in bytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None, status
    return int(found[1]) * 1024


def compare(size: Size, all_ranks: Sequence[int]) -> list[str]:
    """Print the strategies side by side; which promises FSDP does not keep."""
    print("| ranks | strategy | parameters, MB | until set up, MB | peak, MB | ddp's peak / peak |")
    print("|--:|---|--:|--:|--:|--:|")
    broken = []
    for ranks in all_ranks:
        results = {}
        for kind in KINDS:
            results[kind] = result = measure(Job(kind, *size, ranks))
            ratio = results["ddp"].trained / result.trained
            print(f"| {ranks} | {kind} | {cells(result)} | {ratio:.2f} |", flush=True)
            if kind != "ddp" and ratio < TARGET:
                broken.append(f"{kind} on {ranks} ranks is not {TARGET} times below ddp")
        if results["fsdp, init_module"].set_up >= results["ddp"].parameters:
            broken.append(
                f"on {ranks} ranks a model built in init_module() took the memory of the whole model"
            )
    return broken


def scale(size: Size, all_ranks: Sequence[int]) -> list[str]:
    """Print FSDP's peaks for one model on more and more ranks; which of them do not fall."""
    print("| ranks | strategy | parameters, MB | until set up, MB | peak, MB |")
    print("|--:|---|--:|--:|--:|")
    results = []
    for ranks in all_ranks:
        results.append(measure(Job("fsdp, init_module", *size, ranks)))
        print(f"| {ranks} | fsdp, init_module | {cells(results[-1])} |", flush=True)
    falls = all(more.trained < fewer.trained for fewer, more in pairwise(results))
    return [] if falls else ["the peak per rank does not fall as ranks are added"]


def cells(result: Peak) -> str:
    return " | ".join(f"{value / MB:.0f}" for value in result)


def main() -> int:
    """Print both tables; 0 where every statement of the module's text holds, else 1."""
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
            "the peak of a process can only be set back on Linux, where /proc/self/clear_refs is writable"
        )
    if args.job is not None:
        print(json.dumps(run_job(Job(*args.job))))
        return 0
    all_ranks = [1, 2] if args.quick else [1, 2, 4]
    broken = compare(SIZE, all_ranks[1:])
    print()
    broken += scale(QUICK_LARGER if args.quick else LARGER, all_ranks)
    for line in broken:
        print(line, file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

"""Peak memory per rank: DDP beside FSDP, and FSDP on more and more ranks.

`python -m benchmarks.memory` trains the GPT of the text example for a few steps with AdamW and prints how far the
resident set of a rank rose above what it was before the model was built: until `setup` returned, and at its peak. Each
number comes from a job of its own; of the ranks, the one that needed most counts. `--quick` takes smaller models and
fewer ranks.

Every job is run under two settings of the allocator, because glibc decides whether memory that FSDP frees leaves the
process: as it is, and with `MALLOC_TRIM_THRESHOLD_=131072`, see the README beside this file.

A tiny model goes the same way first, so that the libraries that a strategy loads late are not counted as the model's.
Linux only: the peak is the kernel's own (`VmHWM`), which is set back through `/proc/self/clear_refs`.

The exit code is 1 where, with that setting, FSDP is not at least 1.6 times below DDP at two ranks, or where its peak
does not fall as ranks are added.
"""

import argparse
import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fabric import Fabric
from fabric.strategies import DDPStrategy, FSDPStrategy

__all__ = ["Job", "Peak", "main", "measure"]

ROOT = Path(__file__).parents[1]
VOCABULARY, BLOCK_SIZE, BATCH_SIZE, STEPS = 96, 32, 2, 3
TARGET = 1.6
DEADLINE = 240
MB = 10**6
# Any value here, the default one included, keeps glibc from raising the size from which blocks are given back at once.
FIXED = {"MALLOC_TRIM_THRESHOLD_": "131072"}
STRATEGIES = {
    "ddp": lambda: DDPStrategy(),
    "ddp, gradient_as_bucket_view=True": lambda: DDPStrategy(gradient_as_bucket_view=True),
    "fsdp": lambda: FSDPStrategy(),
}


class Size(NamedTuple):
    """Layers and width of a GPT."""

    layers: int
    width: int


WARM_UP = Size(2, 16)
SIZE, LARGER, QUICK, QUICK_LARGER = Size(8, 768), Size(12, 1024), Size(8, 384), Size(12, 512)


class Job(NamedTuple):
    """What is measured: a name of ``STRATEGIES``, the layers and width of the model, the number of ranks."""

    strategy: str
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


def measure(job: Job, variables: Mapping[str, str]) -> Peak:
    """Run a job in new processes that see ``variables``; raises ``CalledProcessError`` or ``TimeoutExpired``."""
    command = [sys.executable, "-m", "benchmarks.memory", "--job", json.dumps(job)]
    # One thread per rank: the buffers of further threads are not the strategy's.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment = {**clean, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, timeout=DEADLINE, text=True
    )
    return Peak(*json.loads(done.stdout))


def run_job(job: Job) -> Peak:
    """Train in ``job.ranks`` processes; a single rank is this one."""
    strategy = STRATEGIES[job.strategy]()
    with Fabric(accelerator="cpu", devices=job.ranks, strategy=strategy, launcher="forkserver") as fabric:
        results = fabric.launch(train_and_weigh, (job.layers, job.width), return_all=True)
    return Peak(*(max(values) for values in zip(*results, strict=True)))


def train_and_weigh(fabric: Fabric, size: tuple[int, int]) -> tuple[int, int, int]:
    """Runs in every rank; returns the three numbers of a :class:`Peak`."""
    for _ in train(fabric, *WARM_UP):
        pass
    gc.collect()
    before = reset_peak()
    phases = train(fabric, *size)
    parameters = next(phases)
    set_up = peak() - before
    next(phases)
    return parameters, set_up, peak() - before


def train(fabric: Fabric, layers: int, width: int) -> Iterator[int]:
    """Yield the bytes of the parameters twice: once the model is set up, and once it is trained."""
    torch.manual_seed(0)
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
    """The class ``GPT`` of the text example, whose folder is not on the path."""
    spec = importlib.util.spec_from_file_location("benchmarks_gpt", ROOT / "examples" / "text" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT


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


def compare(size: Size, all_ranks: Sequence[int]) -> bool:
    """Print the strategies side by side; whether FSDP keeps its promise at two ranks."""
    print("| ranks | strategy | allocator | parameters, MB | until set up, MB | peak, MB | ddp's peak / peak |")
    print("|--:|---|---|--:|--:|--:|--:|")
    ratios = {}
    for ranks in all_ranks:
        for label, variables in (("as it is", {}), ("fixed", FIXED)):
            reference = 0
            for name in STRATEGIES:
                result = measure(Job(name, *size, ranks), variables)
                reference = reference or result.trained
                ratios[ranks, name, label] = ratio = reference / result.trained
                print(f"| {ranks} | {name} | {label} | {cells(result)} | {ratio:.2f} |", flush=True)
    return ratios[2, "fsdp", "fixed"] >= TARGET


def scale(size: Size, all_ranks: Sequence[int]) -> bool:
    """Print FSDP's peaks for one model on more and more ranks; whether they fall with every addition."""
    print("| ranks | strategy | allocator | parameters, MB | until set up, MB | peak, MB |")
    print("|--:|---|---|--:|--:|--:|")
    results = []
    for ranks in all_ranks:
        results.append(measure(Job("fsdp", *size, ranks), FIXED))
        print(f"| {ranks} | fsdp | fixed | {cells(results[-1])} |", flush=True)
    return all(more.trained < fewer.trained for fewer, more in pairwise(results))


def cells(result: Peak) -> str:
    return " | ".join(f"{value / MB:.0f}" for value in result)


def main() -> int:
    """Print both tables; 0 where both statements of the module's text hold, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller models and at most two ranks, in two minutes")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not os.access("/proc/self/clear_refs", os.W_OK):
        parser.error("the peak of a process can only be set back on Linux, where /proc/self/clear_refs is writable")
    if args.job is not None:
        print(json.dumps(run_job(Job(*args.job))))
        return 0
    all_ranks = [1, 2] if args.quick else [1, 2, 4]
    kept = compare(QUICK if args.quick else SIZE, all_ranks[1:])
    print()
    falls = scale(QUICK_LARGER if args.quick else LARGER, all_ranks)
    if not kept:
        print(f"fsdp is not {TARGET} times below ddp at 2 ranks", file=sys.stderr)
    if not falls:
        print("the peak per rank does not fall as ranks are added", file=sys.stderr)
    return 0 if kept and falls else 1


if __name__ == "__main__":
    sys.exit(main())

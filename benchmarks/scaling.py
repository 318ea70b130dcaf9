"""How cost grows with the number of processes, up to 4,096 of them on one machine.

`python -m benchmarks.scaling` sets up a stack of blocks under ddp, fsdp, HYBRID_SHARD and
model_parallel, by hand with raw torch and with fabric. One process poses as rank 0 of ever larger
worlds: torch's `fake` backend answers every collective at once, with meaningless values. The
numbers do not depend on the values: the processor's time of setup, the collectives of a step and
their bytes, Python's memory after setup, and the keys that stay in the job's store. A second table
has the bytes that ranks exchange during a save in shards. `--quick` takes two worlds and a smaller
model. `--plot FILE` draws the figure of docs/scaling.md, with matplotlib.

The exit code is 1 if a step of fabric has other collectives or bytes than a step of raw torch, or
if the memory or the keys beyond raw torch's grow with the world.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from fabric import Fabric
from fabric.checkpoint import ShardedCheckpoint
from fabric.communicators import Collective, Communicator, Operation
from fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from fabric.testing import ThreadedWorld

__all__ = ["Cost", "broken", "exchanged_by_a_save", "main", "measure"]

ROOT = Path(__file__).parents[1]
KINDS = ("ddp", "fsdp", "HYBRID_SHARD", "model_parallel")
WORLDS = (8, 64, 512, 4096)
QUICK_WORLDS = (8, 512)
NODE = 8  # processes of a node
# Less than the smallest world. Otherwise the smallest world would not shard parameters, and could
# not be compared with larger worlds.
TENSOR_PARALLEL_SIZE = 4
LAYERS = 12
QUICK_LAYERS = 2
WIDTH = 64
# After two steps, Fabric(check_training=True) no longer watches an optimizer.
STEPS = 4
ROUNDS = 3
# Bytes. After an exchange, Python keeps up to 20 KiB of small objects for reuse, in any world.
SLACK = 24 * 1024
DEADLINE = 300


class Cost(NamedTuple):
    """The cost of one rank.

    Attributes:
        seconds: The processor's time of setup, without the process group.
        collectives: The number of collectives of each step, by name.
        bytes: The bytes of the collectives of each step: the larger of input and output.
        held: The bytes of Python objects after setup, without the values of tensors.
        keys: The number of keys that setup and all steps left in the job's store.
    """

    seconds: float
    collectives: list[dict[str, int]]
    bytes: list[int]
    held: int
    keys: int


Results = dict[int, dict[str, dict[str, Cost]]]  # by world, kind, and "raw" or "ours"


class Block(nn.Module):
    """A residual layer of two matrices.

    No submodule is called twice, because CommDebugMode does not support that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    """A model of blocks and a head, which returns a loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).mean()


class BytesMode(TorchDispatchMode):
    """A context that adds up the bytes of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor  # takes a second to import

        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # torch calls this method again with the local shards
        if func.namespace in ("c10d", "_c10d_functional"):
            self.total += max(_size(argument) for argument in args)
        return func(*args, **(kwargs or {}))


def _size(argument: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(argument) if isinstance(leaf, Tensor))


def measure(worlds: Sequence[int], layers: int, rounds: int, deadline: float = DEADLINE) -> Results:
    """Measure in a new process, which poses as rank 0 of one world after the other.

    Raises:
        CalledProcessError: The process failed.
        TimeoutExpired: The process took longer than ``deadline`` seconds.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.scaling",
        "--job",
        json.dumps([worlds, layers, rounds]),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=deadline,
        text=True,
    )
    results: Results = {}
    for world, costs_by_kind in zip(worlds, json.loads(done.stdout), strict=True):
        results[world] = {}
        for kind, costs in costs_by_kind.items():
            results[world][kind] = {who: Cost(*cost) for who, cost in costs.items()}
    return results


def run_job(worlds: Sequence[int], layers: int, rounds: int) -> list[dict[str, dict[str, Cost]]]:
    """Measure as rank 0 of each world."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    # CommDebugMode adds hooks to the modules, whose inputs have no gradients.
    warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
    return [measure_world(world, layers, rounds) for world in worlds]


def measure_world(world: int, layers: int, rounds: int) -> dict[str, dict[str, Cost]]:
    """Return the costs by kind, of "raw" and "ours", measured alternately."""
    makers: dict[str, Callable[..., Any]] = {"raw": set_up_raw, "ours": set_up_ours}
    result: dict[str, dict[str, Cost]] = {}
    for kind in KINDS:
        steps = {}
        keys = {}
        # Before the timing, because the first setup and steps import modules and fill caches.
        for who, make in makers.items():
            with posing(world) as store, set_up(make, kind, layers) as (step, _):
                steps[who] = [count_step(step) for _ in range(STEPS)]
                keys[who] = store.num_keys()
        seconds: dict[str, list[float]] = {who: [] for who in makers}
        for _ in range(rounds):
            for who, make in makers.items():
                with posing(world), set_up(make, kind, layers) as (_, took):
                    seconds[who].append(took)
        result[kind] = {}
        for who, make in makers.items():
            result[kind][who] = Cost(
                seconds=statistics.median(seconds[who]),
                collectives=[counts for counts, _ in steps[who]],
                bytes=[total for _, total in steps[who]],
                held=weigh(world, make, kind, layers, measurements=max(2, rounds)),
                keys=keys[who],
            )
    return result


@contextmanager
def posing(world: int) -> Any:
    """Make this process rank 0 of a fake process group, and yield the group's store."""
    variables = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "GROUP_RANK": 0,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": NODE,
        # Nothing listens on this port, because fabric uses the process group that exists already.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=world)
    try:
        yield store
    finally:
        dist.destroy_process_group()


@contextmanager
def set_up(make: Callable[..., Any], kind: str, layers: int) -> Any:
    """Yield a function that trains for a step, and the seconds of the setup."""
    model: nn.Module = Stack(layers)
    start = time.process_time()
    model, optimizer, backward, close = make(kind, model)
    took = time.process_time() - start

    def step() -> None:
        backward(model(torch.ones(2, WIDTH)))
        optimizer.step()
        optimizer.zero_grad()

    try:
        yield step, took
    finally:
        close()


def set_up_raw(
    kind: str, model: Any
) -> tuple[Any, torch.optim.Optimizer, Callable[[Tensor], None], Any]:
    """Set up a model by hand with raw torch."""
    if kind == "ddp":
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, average)
    elif kind == "model_parallel":
        from torch.distributed.fsdp import fully_shard  # takes a second to import
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        sizes = dist.get_world_size() // TENSOR_PARALLEL_SIZE, TENSOR_PARALLEL_SIZE
        mesh = dist.init_device_mesh(
            "cpu", sizes, mesh_dim_names=("data_parallel", "tensor_parallel")
        )
        # Each access makes a new object, whose size grows with the job.
        parts = mesh["tensor_parallel"]
        shards = mesh["data_parallel"]
        for block in model.blocks:
            plan: Any = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
            parallelize_module(block, parts, plan)
            fully_shard(block, mesh=shards)
        fully_shard(model, mesh=shards)
    else:
        from torch.distributed.fsdp import fully_shard  # takes a second to import

        world = dist.get_world_size()
        sizes = (world // NODE, NODE) if kind == "HYBRID_SHARD" else (world,)
        mesh = dist.init_device_mesh(
            "cpu", sizes, mesh_dim_names=("replicas", "shards")[-len(sizes) :]
        )
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters()), Tensor.backward, lambda: None


def set_up_ours(
    kind: str, model: Any
) -> tuple[Any, torch.optim.Optimizer, Callable[[Tensor], None], Any]:
    """Set up a model with fabric and its defaults."""
    strategies = {
        "ddp": lambda: DDPStrategy(ddp_comm_hook=average),
        "fsdp": lambda: "fsdp",
        "HYBRID_SHARD": lambda: FSDPStrategy(
            sharding_strategy="HYBRID_SHARD", device_mesh=(dist.get_world_size() // NODE, NODE)
        ),
        "model_parallel": lambda: ModelParallelStrategy(
            tensor_parallel_size=TENSOR_PARALLEL_SIZE,
            tp_plan={"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"},
        ),
    }
    # The default, whatever the option --check-replicas of the tests says.
    fabric = Fabric(accelerator="cpu", strategy=strategies[kind](), check_replicas=True)
    fabric.launch()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    return model, optimizer, fabric.backward, fabric.teardown


def average(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average gradients as DDP does by default.

    DDP's own hook needs the result of a collective, which the fake backend does not have.
    """
    buffer = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(buffer)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def count_step(step: Callable[[], None]) -> tuple[dict[str, int], int]:
    """Return the collectives of a step and their bytes."""
    from torch.distributed.tensor.debug import CommDebugMode  # takes a second to import

    with BytesMode() as sizes, CommDebugMode() as counts:
        step()
    return {str(name): count for name, count in counts.get_comm_counts().items()}, sizes.total


def weigh(world: int, make: Callable[..., Any], kind: str, layers: int, measurements: int) -> int:
    """Return the bytes of Python objects that remain after setup.

    The result is the lowest of several measurements, because caches grow now and then.
    """
    measured = []
    gc.collect()
    # Later collections, also those of the next call, skip the objects that torch has loaded.
    gc.freeze()
    for _ in range(measurements):
        with posing(world):
            tracemalloc.start()
            try:
                with set_up(make, kind, layers):
                    gc.collect()
                    measured.append(tracemalloc.get_traced_memory()[0])
            finally:
                tracemalloc.stop()
        gc.collect()
    return min(measured)


class Enlarged(Communicator):
    """A communicator of two ranks that simulates many ranks.

    The two ranks are the first and the last. The ranks in between are copies of the last.

    Attributes:
        bytes: The bytes that this rank has passed to collectives and received from them.
    """

    def __init__(self, inner: Communicator, size: int) -> None:
        self._inner = inner
        self.rank = inner.rank * (size - 1)
        self.size = size
        self.device = inner.device
        self.bytes = 0

    @override
    def run(self, collective: Collective) -> Any:
        rows = collective.rows
        answer = self._inner.run(
            collective if rows is None else collective._replace(rows=rows[[0, -1]].clone())
        )
        if collective.operation in (Operation.GATHER, Operation.ALL_GATHER) and isinstance(
            answer, Tensor
        ):
            copies = answer[1:].expand(self.size - 1, *answer.shape[1:])
            answer = torch.cat([answer[:1], copies])
        elif isinstance(answer, list):
            answer = [answer[0], *[answer[1]] * (self.size - 1)]
        self.bytes += sum(map(_bytes, (collective.buffer, rows, answer)))
        return answer


def _bytes(value: Any) -> int:
    return sum(len(leaf) if isinstance(leaf, bytes) else _size(leaf) for leaf in tree_leaves(value))


def exchanged_by_a_save(world: int) -> list[int]:
    """Return the bytes that the first and the last rank exchange during a save in shards.

    The bytes are passed to collectives or received from them.
    """

    def save(fabric: Fabric, path: Path) -> int:
        communicator = Enlarged(fabric.strategy.communicator(), world)
        state = {"model": Stack(QUICK_LAYERS).state_dict(), "step": 3}
        ShardedCheckpoint().save(state, path, communicator, per_rank={"rng": torch.get_rng_state()})
        return communicator.bytes

    with tempfile.TemporaryDirectory() as folder:
        return ThreadedWorld(2, timeout=DEADLINE).run(save, Path(folder, "state"))


def broken(results: Results) -> Iterable[str]:
    """Yield a line for each cost that grows with the world, or differs from raw torch's."""
    smallest = results[min(results)]
    for world, costs in results.items():
        for kind, cost in costs.items():
            raw = cost["raw"]
            ours = cost["ours"]
            where = f"{kind} in a world of {world}"
            if (raw.collectives, raw.bytes) != (ours.collectives, ours.bytes):
                yield f"{where}: a step of ours has other collectives or bytes than raw torch's"
            if beyond(cost) > beyond(smallest[kind]) + SLACK:
                yield f"{where}: we hold more than in a world of {min(results)}"
            if our_keys(cost) > our_keys(smallest[kind]):
                yield f"{where}: we leave more in the store than in a world of {min(results)}"


def beyond(cost: dict[str, Cost]) -> int:
    """Return the memory that fabric holds beyond raw torch, in bytes."""
    return cost["ours"].held - cost["raw"].held


def our_keys(cost: dict[str, Cost]) -> int:
    """Return the number of keys that fabric leaves in the store beyond raw torch's keys."""
    return cost["ours"].keys - cost["raw"].keys


def row(world: int, kind: str, cost: dict[str, Cost]) -> str:
    """Return a line of the table."""
    raw = cost["raw"]
    ours = cost["ours"]
    return (
        f"| {kind} | {world:,} | {1e3 * raw.seconds:.1f} | {1e3 * ours.seconds:.1f} "
        f"| {per_step(raw)} | {per_step(ours)} | {raw.bytes[-1]:,} | {ours.bytes[-1]:,} "
        f"| {raw.held / 1024:,.0f} | {beyond(cost) / 1024:+.1f} | {our_keys(cost)} |"
    )


def per_step(cost: Cost) -> int:
    """Return the number of collectives of the last step."""
    return sum(cost.collectives[-1].values())


def plot(results: Results, path: Path) -> None:
    """Draw how setup, collectives and memory beyond raw torch grow."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports] - an extra

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for kind, color in zip(KINDS, ("tab:blue", "tab:orange", "tab:green", "tab:red"), strict=True):
        costs = [results[world][kind] for world in results]
        for axes, value in zip(
            panels[:2], (lambda cost: 1e3 * cost.seconds, per_step), strict=True
        ):
            axes.plot(
                list(results),
                [value(cost["raw"]) for cost in costs],
                "o--",
                color=color,
                mfc="none",
            )
            axes.plot(
                list(results),
                [value(cost["ours"]) for cost in costs],
                "x-",
                color=color,
                label=kind,
            )
        panels[2].plot(
            list(results), [beyond(cost) / 1024 for cost in costs], "x-", color=color, label=kind
        )
    titles = (
        "setup, ms of the processor",
        "collectives per step",
        "Python memory beyond raw torch, KiB",
    )
    for axes, title in zip(panels, titles, strict=True):
        axes.set_xscale("log", base=8)
        axes.set_xticks(list(results), [f"{world:,}" for world in results])
        axes.set(title=title, xlabel="processes", ylim=(0, None))
    panels[0].legend(title="raw torch: dashed, circles", frameon=False)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="worlds of 8 and 512, a smaller model, one round"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw the figure")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.job is not None:
        print(json.dumps(run_job(*args.job)))
        return 0
    print(
        "| strategy | processes | setup, ms of the processor: raw | fabric "
        "| collectives a step: raw | fabric "
        "| bytes a step: raw | fabric "
        "| Python memory, KiB: raw | fabric vs. raw | keys of fabric in the store |"
    )
    print("|---|" + "--:|" * 10)
    if args.quick:
        results = measure(QUICK_WORLDS, QUICK_LAYERS, rounds=1)
    else:
        results = measure(WORLDS, LAYERS, ROUNDS)
    for world, costs in results.items():
        for kind, cost in costs.items():
            print(row(world, kind, cost))
    print("\n| processes | bytes exchanged by a save: first rank | any other |\n|--:|--:|--:|")
    for world in results:
        first_rank, any_other_rank = exchanged_by_a_save(world)
        print(f"| {world:,} | {first_rank:,} | {any_other_rank:,} |")
    if args.plot is not None:
        plot(results, args.plot)
    failures = list(broken(results))
    print(*failures, sep="\n", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

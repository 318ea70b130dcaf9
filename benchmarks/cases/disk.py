"""Saving and loading 1 GB: one file on one rank, a folder of shards on two."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.framework import Case, Measure, Row

# 16 matrices of 64 MB; 64 times less with --quick.
LAYERS = 16
WIDTH = 4000
QUICK_WIDTH = 500


@dataclass(frozen=True)
class Actions:
    """The actions with a path that are measured.

    Attributes:
        save: Saves to the path.
        restore: Loads the path into the model.
        load: Loads the path without a model.
        begin: Begins a save in the background, and returns the function that waits for it.
    """

    save: Callable[[Path], Any]
    restore: Callable[[Path], Any]
    load: Callable[[Path], Any] | None = None
    begin: Callable[[Path], Callable[[], Any]] | None = None


def build(quick: bool) -> nn.Module:
    width = QUICK_WIDTH if quick else WIDTH
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def raw(model: nn.Module) -> Actions:
    def save(path: Path) -> None:
        with path.open("wb") as file:
            torch.save({"model": model.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    def load(path: Path) -> dict[str, Any]:
        return torch.load(path, weights_only=True)

    def begin(path: Path) -> Callable[[], None]:
        save(path)  # the loop waits for the whole save
        return lambda: None

    return Actions(save, lambda path: model.load_state_dict(load(path)["model"]), load, begin)


def ours(model: nn.Module) -> Actions:
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    state = {"model": fabric.setup(model)}
    return Actions(
        save=lambda path: fabric.save(path, state),
        restore=lambda path: fabric.load(path, state),
        load=fabric.load,
        begin=lambda path: fabric.save(path, state, async_=True).wait,
    )


def lightning(model: nn.Module) -> Actions:
    from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports]  # an extra

    fabric = Fabric(accelerator="cpu", devices=1)
    state = {"model": fabric.setup_module(model)}
    return Actions(
        lambda path: fabric.save(path, state), lambda path: fabric.load(path, state), fabric.load
    )


def accelerate(model: nn.Module) -> Actions:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]  # an extra

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    return Actions(
        lambda path: accelerator.save_state(str(path)),
        lambda path: accelerator.load_state(str(path)),
    )


def raw_sharded(model: Any) -> Actions:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    for layer in model:
        fully_shard(layer)
    fully_shard(model)

    def save(path: Path) -> None:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)

    return Actions(
        save, lambda path: dcp.load({"model": get_model_state_dict(model)}, checkpoint_id=path)
    )


def ours_sharded(model: nn.Module) -> Actions:
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp")
    fabric.launch()
    state = {"model": fabric.setup(model)}
    return Actions(lambda path: fabric.save(path, state), lambda path: fabric.load(path, state))


def lightning_sharded(model: nn.Module) -> Actions:
    from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports]  # an extra
    from lightning_fabric.strategies import ModelParallelStrategy  # pyright: ignore[reportMissingImports]  # an extra
    from torch.distributed.fsdp import fully_shard

    def shard(module: Any, mesh: Any) -> nn.Module:
        for layer in module:
            fully_shard(layer, mesh=mesh["data_parallel"])
        return fully_shard(module, mesh=mesh["data_parallel"])

    strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    state = {"model": fabric.setup_module(model)}
    return Actions(lambda path: fabric.save(path, state), lambda path: fabric.load(path, state))


def preparing(build_actions: Callable[[nn.Module], Actions]) -> Callable[[bool], Measure]:
    def prepare(quick: bool) -> Measure:
        actions = build_actions(build(quick))
        folder = shared_folder()
        path = folder / "checkpoint"

        def measure() -> dict[str, float]:
            results = {"save": timed(partial(actions.save, path))}
            if actions.load is not None:
                results["load"] = timed(partial(actions.load, path))
            results["load into the model"] = timed(partial(actions.restore, path))
            if actions.begin is not None:
                began = time.perf_counter()
                wait = actions.begin(path)
                results["save in the background, until the loop goes on"] = (
                    time.perf_counter() - began
                )
                wait()
            if dist.is_initialized():
                dist.barrier()
            if is_first():
                remove(path)
            return results

        return measure

    return prepare


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def shared_folder() -> Path:
    """Create a folder for all ranks, which the command deletes at its end."""
    parent = Path(os.environ["BENCHMARK_FOLDER"])
    names = [tempfile.mkdtemp(dir=parent) if is_first() else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(names)
    return Path(names[0])


CASES = [
    Case(
        name="disk-full",
        title="1 GB in one file, on one rank; raw is torch.save with fsync, and torch.load",
        rows={
            "save": Row("s", "ratio", 1.05),
            "load": Row("s", "ratio", 1.05),
            "load into the model": Row("s", "ratio"),
            "save in the background, until the loop goes on": Row("s", "ratio", 0.15),
        },
        contestants={
            "raw": preparing(raw),
            "fabric": preparing(ours),
            "lightning-fabric": preparing(lightning),
            "accelerate": preparing(accelerate),
        },
        rounds=5,
    ),
    Case(
        name="disk-sharded",
        title="1 GB in shards, on two ranks; raw is torch.distributed.checkpoint",
        rows={"save": Row("s"), "load into the model": Row("s")},
        contestants={
            "raw": preparing(raw_sharded),
            "fabric": preparing(ours_sharded),
            "lightning-fabric": preparing(lightning_sharded),
        },
        ranks=2,
        rounds=4,
        notes={"accelerate": "on a CPU its FSDP plugin is ignored without a word"},
    ),
]

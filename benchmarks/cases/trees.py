"""Collectives over collections of many small leaves, such as metrics."""

from collections.abc import Callable, Mapping
from functools import partial
from timeit import timeit
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.framework import Case, Measure, Row

# Repetitions of one measurement, by the number of leaves. The peers send a message for each leaf,
# so a thousand leaves take long.
REPETITIONS = {1: 30, 64: 20, 1000: 10}
PEER_REPETITIONS = {1: 10, 64: 3, 1000: 1}
BUDGETS = {
    "all_reduce, 64 floats": 1.5,
    "all_reduce, 64 tensors": 1.5,
    "all_reduce, 1000 floats": 1.5,
    "all_reduce, 1000 tensors": 1.1,
}

Actions = dict[str, Callable[[], Any]]


def floats(leaves: int) -> dict[str, float]:
    return {f"metric {number}": float(number) for number in range(leaves)}


def tensors(leaves: int) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in floats(leaves).items()}


def raw(ranks: int) -> Actions:
    """Return flat collectives; for 1,000 tensors, with hand-written stacking and unbinding."""
    dist.init_process_group("gloo")

    def reduce(leaves: int) -> Callable[[], Any]:
        flat = torch.ones(leaves)
        return lambda: dist.all_reduce(flat)

    def reduce_stacked(leaves: int) -> Callable[[], Any]:
        values = list(tensors(leaves).values())

        def action() -> tuple[Tensor, ...]:
            flat = torch.stack(values)
            dist.all_reduce(flat)
            return flat.unbind()

        return action

    def gather(leaves: int) -> Callable[[], Any]:
        flat = torch.ones(leaves)
        parts = [torch.empty(leaves) for _ in range(ranks)]
        return lambda: dist.all_gather(parts, flat)

    actions: Actions = {}
    for leaves in REPETITIONS:
        for kind in ("floats", "tensors"):
            actions[f"all_reduce, {leaves} {kind}"] = reduce(leaves)
            actions[f"all_gather, {leaves} {kind}"] = gather(leaves)
    actions["all_reduce, 1000 tensors"] = reduce_stacked(1000)
    # In the order of the rows, in which the ranks call the collectives.
    return {name: actions[name] for name in row_names()}


def row_names() -> list[str]:
    names = []
    for operation in ("all_reduce", "all_gather"):
        for leaves in REPETITIONS:
            for kind in ("floats", "tensors"):
                names.append(f"{operation}, {leaves} {kind}")
    return names


def of_library(reduce: Callable[[Any], Any], gather: Callable[[Any], Any]) -> Actions:
    """Return the library's calls on collections."""
    actions: Actions = {}
    for operation, collective in (("all_reduce", reduce), ("all_gather", gather)):
        for leaves in REPETITIONS:
            actions[f"{operation}, {leaves} floats"] = partial(collective, floats(leaves))
            actions[f"{operation}, {leaves} tensors"] = partial(collective, tensors(leaves))
    return actions


def ours(ranks: int) -> Actions:
    from fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp")
    fabric.launch()
    return of_library(lambda tree: fabric.all_reduce(tree, reduce_op="sum"), fabric.all_gather)


def lightning(ranks: int) -> Actions:
    from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports]  # an extra

    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp")
    fabric.launch()
    return of_library(lambda tree: fabric.all_reduce(tree, reduce_op="sum"), fabric.all_gather)


def accelerate(ranks: int) -> Actions:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]  # an extra

    accelerator = Accelerator(cpu=True)

    def on(operation: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(tree: dict[str, Any]) -> dict[str, Any]:
            # accelerate takes only tensors, so floats are converted by hand.
            if isinstance(next(iter(tree.values())), Tensor):
                return operation(tree)
            results = operation({name: torch.tensor(value) for name, value in tree.items()})
            return {name: result.tolist() for name, result in results.items()}

        return run

    return of_library(on(lambda tree: accelerator.reduce(tree, "sum")), on(accelerator.gather))


def preparing(
    build: Callable[[int], Actions], ranks: int, repetitions: Mapping[int, int] = REPETITIONS
) -> Callable[[bool], Measure]:
    def prepare(quick: bool) -> Measure:
        actions = build(ranks)
        if quick:
            actions = {name: action for name, action in actions.items() if " 1000 " not in name}

        def measure() -> dict[str, float]:
            return {
                name: 1e3 * mean_seconds(action, 2 if quick else repetitions[int(name.split()[1])])
                for name, action in actions.items()
            }

        return measure

    return prepare


def mean_seconds(action: Callable[[], Any], number: int) -> float:
    """Return the mean seconds of a call, without the warm-up of torch's timer.

    The rehearsal has warmed up.
    """
    return timeit(action, number=number) / number


CASES = [
    Case(
        name=f"trees-{ranks}",
        title=f"Collectives over collections on {ranks} ranks; raw is one flat collective",
        rows={name: Row("ms", "ratio", BUDGETS.get(name)) for name in row_names()},
        contestants={
            "raw": preparing(raw, ranks),
            "fabric": preparing(ours, ranks),
            "lightning-fabric": preparing(lightning, ranks, PEER_REPETITIONS),
            "accelerate": preparing(accelerate, ranks, PEER_REPETITIONS),
        },
        ranks=ranks,
        rounds=rounds,
    )
    for ranks, rounds in ((2, 7), (4, 3))
]

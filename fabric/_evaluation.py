"""Gathering what the processes computed from the batches that they received together."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fabric.collectives import all_gather, all_gather_ragged
from fabric.communicators import Communicator
from fabric.data import WholeRound
from fabric.errors import UsageError
from fabric.tree import flatten, unflatten

__all__ = ["gather_round"]


def gather_round(communicator: Communicator, underway: Sequence[Callable[[], WholeRound]], data: Any) -> Any:
    """Every sample of the round once, in the order of the data; see ``Fabric.gather_for_metrics``. Collective.

    Args:
        communicator: all processes of the job.
        underway: the iterations that are going on; that of the current loop is the last.
        data: any collection of tensors, computed from this process's batch.

    Raises:
        UsageError: no loop is going on, or its data is not dealt by fabric.
        ConfigurationError: a leaf does not say to which sample it belongs.
    """
    leaves, structure = flatten(data)
    whole = _current(underway, communicator.size)
    whole.check(leaves, structure)
    gathered = (all_gather_ragged if whole.kind == "batches" else all_gather)(communicator, leaves)
    arranged = [
        whole.arranged(parts) if isinstance(leaf, Tensor) else leaf
        for leaf, parts in zip(leaves, gathered, strict=True)
    ]
    return unflatten(structure, arranged)


def _current(underway: Sequence[Callable[[], WholeRound]], size: int) -> WholeRound:
    asked, valid = "fabric.gather_for_metrics(...)", "the body of a loop over a loader that fabric deals"
    if not underway:
        instead = "for batch in fabric.setup_dataloaders(loader): fabric.gather_for_metrics(model(batch))"
        raise UsageError(asked, "no loop over a set-up loader is going on", valid, instead)
    whole = underway[-1]()
    if whole.num_replicas != size:
        wrong = f"this loader gives each of {size} processes all of the data, or what you dealt yourself"
        raise UsageError(asked, wrong, valid, "the values as they are; or fabric.all_gather(x, concat=True)")
    return whole

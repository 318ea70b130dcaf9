"""Metrics of torchmetrics: computed over all ranks in one exchange, with per-rank states in checkpoints.

[Note: metrics] A metric accumulates the samples of its own rank, so its states differ between ranks. A checkpoint holds
the states of all ranks, and each rank resumes exactly from its own. The state of a metric is its declared states, other
tensors among its attributes, and its number of updates.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fabric.communicators import Communicator
from fabric.communicators.base import CallDescription
from fabric.errors import ArgumentTypeError, CheckpointError, UsageError
from fabric.tree import map_tensors

__all__ = ["compute_metrics", "load_rank_states", "rank_states"]


def compute_metrics(communicator: Communicator, metrics: Any) -> Any:
    """See :meth:`fabric.Fabric.compute_metrics`."""
    request = f"compute_metrics({type(metrics).__name__})"
    error = None
    sent = []
    found = list(_metrics_in(metrics).values())
    try:
        sent = [_recorded(metric) for metric in found]
        if not found:
            raise ArgumentTypeError(
                request, "it is no metric or collection of torchmetrics, and holds none"
            )
    except Exception as caught:  # noqa: BLE001 - raised on all ranks
        error = UsageError(
            request, f"on rank {communicator.rank}, {type(caught).__name__}: {caught}"
        )
    of_ranks = communicator.gather_objects(
        sent, CallDescription("compute_metrics", lambda: ""), error
    )
    counts = [[*map(len, rank)] for rank in of_ranks]
    if any(count != counts[0] for count in counts):
        problem = f"ranks hold different numbers of states: {counts}"
        raise UsageError(
            request, problem, "states with a reduction, and the same metrics on all ranks"
        )
    with ExitStack() as stack:
        for metric, own, *parts in zip(found, sent, *of_ranks, strict=True):
            for name in ("dist_sync_fn", "distributed_available_fn", "_to_sync"):
                stack.callback(setattr, metric, name, getattr(metric, name))
            metric.dist_sync_fn = partial(
                _replay, request, zip(own, zip(*parts, strict=True), strict=True)
            )
            metric.distributed_available_fn = lambda: True
            metric._to_sync = True  # also with sync_on_compute=False
            metric._computed = None  # other ranks may have been updated since it was cached
        return metrics.compute()


def rank_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """The states of this rank's metrics, copied to the CPU, by entry and path; see ``[Note: metrics]``."""
    found = {name: _metrics_in(value) for name, value in state.items()}
    return {
        name: {path: _held(each) for path, each in metrics.items()}
        for name, metrics in found.items()
        if metrics
    }


def load_rank_states(
    state: Mapping[str, Any],
    saved: Sequence[Mapping[str, Any]],
    sizes: tuple[int, int],
    strict: bool,
) -> None:
    """Restore the states of this rank's metrics.

    Args:
        state: objects by name.
        saved: the :func:`rank_states` of this rank; with another number of ranks, those of some, checked for samples.
        sizes: the numbers of ranks at the save and now.
        strict: whether a metric that cannot be restored is an error; if not, it is unchanged.

    Raises:
        CheckpointError: the states are of another number of ranks, or of other metrics.
    """
    for name in state.keys() & saved[0].keys():
        if not (metrics := _metrics_in(state[name])):
            continue
        entries = [each[name] for each in saved]
        if entries[0].keys() != metrics.keys():
            problem = (
                f"it was saved with the metrics {sorted(entries[0])}, and has {sorted(metrics)}"
            )
        elif sizes[0] != sizes[1] and any(
            held["_update_count"] for entry in entries for held in entry.values()
        ):
            problem = f"each of {sizes[0]} ranks held a part of its samples, and there are {sizes[1]} ranks"
        else:
            for path, metric in metrics.items():
                metric.reset()
                if sizes[0] == sizes[1]:
                    copied = partial(Tensor.to, device=metric.device, copy=True)
                    vars(metric).update(map_tensors(copied, entries[0][path]))
            continue
        if strict:
            expected = (
                "the same metrics on as many ranks, or a checkpoint from after metric.reset()"
            )
            raise CheckpointError(
                f"load state[{name!r}]", problem, expected, "strict=False to leave it as it is"
            )


def _metrics_in(value: Any) -> dict[str, Any]:
    """The torchmetrics metrics in a module, including itself, by path."""
    torchmetrics: Any = sys.modules.get("torchmetrics")  # optional; imported if there is a metric
    modules: Any = (
        nn.Module.named_modules(value) if torchmetrics and isinstance(value, nn.Module) else ()
    )
    found = {}
    for path, each in modules:
        if isinstance(each, torchmetrics.MetricCollection):
            each.values(copy_state=False)  # until then only the first metric of a group is updated
        elif isinstance(each, torchmetrics.Metric):
            found[path] = each
    return found


def _held(metric: Any) -> dict[str, Any]:
    if metric._is_synced:
        raise UsageError(
            f"save a {type(metric).__name__} that is synced",
            "its states are those of all ranks now",
        )
    names = [
        name
        for name, value in vars(metric).items()
        if name in (*metric._defaults, "_update_count", "_num_vals_seen")
        or (
            isinstance(value, Tensor) and name not in ("_computed", "_forward_cache")
        )  # these are results
    ]
    return {name: map_tensors(_copied, vars(metric)[name]) for name in names}


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _recorded(metric: Any) -> list[Tensor]:
    """The tensors that a metric would gather, in its order."""
    sent: list[Tensor] = []

    def record(tensor: Tensor, group: Any = None) -> list[Tensor]:
        if group is not None:
            raise UsageError("process_group of a metric", "the samples of all processes are meant")
        sent.append(_copied(tensor))
        return [tensor]

    metric.sync(record, distributed_available=lambda: True)
    metric.unsync()
    return sent


def _replay(
    request: str, states: Iterator[tuple[Tensor, Any]], tensor: Tensor, group: Any = None
) -> list[Tensor]:
    """The gathered tensors in place of a state of this rank."""
    sent, of_ranks = next(states)
    if not torch.equal(tensor.cpu().nan_to_num(), sent.nan_to_num()):
        raise UsageError(
            request,
            "a metric computes from other states than it holds",
            suggestion="metrics.compute()",
        )
    # A rank without samples has empty states, whose dtype may differ.
    return [rank.to(tensor.device) for rank in of_ranks if rank.numel()] or [tensor]

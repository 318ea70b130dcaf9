"""Metrics of torchmetrics: computed over all ranks in one exchange, and saved for each rank.

[Note: metrics] A metric accumulates the samples of its own rank, so its states differ between
ranks. A checkpoint holds the states of all ranks, and each rank resumes exactly from its own. The
state of a metric is its declared states, other tensors among its attributes, and its number of
updates.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fabric.communicators import Communicator
from fabric.communicators.base import CallDescription
from fabric.errors import ArgumentTypeError, CheckpointError, UsageError
from fabric.tree import map_tensors

__all__ = ["compute_metrics", "load_rank_states", "rank_states"]

# The attributes of a metric that are replaced while it computes over all ranks.
_SYNC_ATTRIBUTES = ("dist_sync_fn", "distributed_available_fn", "_to_sync")


class _GatheredState(NamedTuple):
    """A state of a metric that has been exchanged."""

    sent: Tensor
    """The state of this rank."""
    of_ranks: tuple[Tensor, ...]
    """The states of all ranks."""


def compute_metrics(communicator: Communicator, metrics: Any) -> Any:
    """Return ``metrics.compute()`` over the samples of all ranks. Collective.

    ``Fabric.compute_metrics`` calls it.

    Args:
        communicator: all ranks.
        metrics: a metric, or a module that contains metrics.

    Raises:
        UsageError: ``metrics`` contains no metric, or the states of a metric cannot be exchanged.
    """
    request = f"compute_metrics({type(metrics).__name__})"
    error = None
    sent: list[list[Tensor]] = []
    metrics_by_path = _metrics_in(metrics)
    try:
        if not metrics_by_path:
            raise ArgumentTypeError(
                request, problem="it is no metric or collection of torchmetrics, and contains none"
            )
        for metric in metrics_by_path.values():
            sent.append(_tensors_to_gather(metric))
    except Exception as caught:  # noqa: BLE001 - raised on all ranks
        problem = f"on rank {communicator.rank}, {type(caught).__name__}: {caught}"
        error = UsageError(request, problem)
    call = CallDescription("compute_metrics")
    sent_by_rank = communicator.gather_objects(sent, call, error)
    _check_counts(request, sent_by_rank)
    with ExitStack() as stack:
        for number, metric in enumerate(metrics_by_path.values()):
            of_ranks = [states[number] for states in sent_by_rank]
            states = list(map(_GatheredState, sent[number], zip(*of_ranks, strict=True)))
            _replay_states(request, metric, states, stack)
        return metrics.compute()


def _check_counts(request: str, sent_by_rank: Sequence[list[list[Tensor]]]) -> None:
    """Raise a UsageError unless the metrics of all ranks have equally many states."""
    counts: list[list[int]] = []
    for states in sent_by_rank:
        counts.append([len(tensors) for tensors in states])
    if counts.count(counts[0]) < len(counts):
        raise UsageError(
            request,
            problem=f"ranks hold different numbers of states: {counts}",
            expected="states with a reduction, and the same metrics on all ranks",
        )


def _replay_states(
    request: str, metric: Any, states: Sequence[_GatheredState], stack: ExitStack
) -> None:
    """Have a metric compute from gathered states until ``stack`` ends."""
    for name in _SYNC_ATTRIBUTES:
        stack.callback(setattr, metric, name, getattr(metric, name))
    metric.dist_sync_fn = partial(_replay, request, iter(states))
    metric.distributed_available_fn = _is_available
    metric._to_sync = True  # also with sync_on_compute=False
    metric._computed = None  # other ranks may have been updated since it was cached


def _is_available() -> bool:
    return True


def rank_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of this rank's metrics on the CPU, by entry and path.

    See ``[Note: metrics]``.
    """
    states: dict[str, Any] = {}
    for name, value in state.items():
        metrics = _metrics_in(value)
        if metrics:
            states[name] = {path: _state_of(metric) for path, metric in metrics.items()}
    return states


def load_rank_states(
    state: Mapping[str, Any],
    saved: Sequence[Mapping[str, Any]],
    *,
    saved_size: int,
    size: int,
    strict: bool,
) -> None:
    """Restore the states of this rank's metrics.

    Args:
        state: objects by name.
        saved: the :func:`rank_states` of this rank. With another number of ranks, those of some
            ranks, which must have no samples.
        saved_size: the number of ranks at the save.
        size: the number of ranks now.
        strict: whether a metric that cannot be restored is an error. If not, it is unchanged.

    Raises:
        CheckpointError: the states are of another number of ranks, or of other metrics.
    """
    is_same_size = size == saved_size
    for name in state.keys() & saved[0].keys():
        metrics = _metrics_in(state[name])
        if not metrics:
            continue
        entries = [rank_state[name] for rank_state in saved]
        if entries[0].keys() != metrics.keys():
            problem = (
                f"it was saved with the metrics {sorted(entries[0])}, and has {sorted(metrics)}"
            )
        elif not is_same_size and _have_samples(entries):
            problem = (
                f"each of {saved_size} ranks held a part of its samples, and there are {size} ranks"
            )
        else:
            for path, metric in metrics.items():
                metric.reset()
                if is_same_size:
                    _load_state(metric, entries[0][path])
            continue
        if strict:
            raise CheckpointError(
                f"load state[{name!r}]",
                problem,
                expected="the same metrics on as many ranks, or a checkpoint from after "
                "metric.reset()",
                suggestion="strict=False to leave it as it is",
            )


def _have_samples(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a metric of any rank has been updated."""
    for entry in entries:
        for state in entry.values():
            if state["_update_count"]:
                return True
    return False


def _load_state(metric: Any, state: Mapping[str, Any]) -> None:
    copy_to_device = partial(Tensor.to, device=metric.device, copy=True)
    vars(metric).update(map_tensors(copy_to_device, state))


def _metrics_in(value: Any) -> dict[str, Any]:
    """Return the torchmetrics metrics in a module, including itself, by path."""
    # Optional. It has been imported if there is a metric.
    torchmetrics: Any = sys.modules.get("torchmetrics")
    if torchmetrics is None or not isinstance(value, nn.Module):
        return {}
    metrics: dict[str, Any] = {}
    for path, module in nn.Module.named_modules(value):
        if isinstance(module, torchmetrics.MetricCollection):
            collection: Any = module
            # Until then only the first metric of a group is updated.
            collection.values(copy_state=False)
        elif isinstance(module, torchmetrics.Metric):
            metrics[path] = module
    return metrics


def _state_of(metric: Any) -> dict[str, Any]:
    """Return the state of a metric, copied to the CPU."""
    if metric._is_synced:
        raise UsageError(
            f"save a {type(metric).__name__} that is synced",
            problem="its states are those of all ranks now",
        )
    declared = {*metric._defaults, "_update_count", "_num_vals_seen"}
    results = {"_computed", "_forward_cache"}
    state: dict[str, Any] = {}
    for name, value in vars(metric).items():
        is_other_tensor = isinstance(value, Tensor) and name not in results
        if name in declared or is_other_tensor:
            state[name] = map_tensors(_copy_to_cpu, value)
    return state


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _tensors_to_gather(metric: Any) -> list[Tensor]:
    """Return copies of the tensors that a metric would gather, in its order."""
    tensors: list[Tensor] = []

    def record(tensor: Tensor, group: Any = None) -> list[Tensor]:
        if group is not None:
            raise UsageError(
                "process_group of a metric", problem="its samples are gathered from all processes"
            )
        tensors.append(_copy_to_cpu(tensor))
        return [tensor]

    metric.sync(record, distributed_available=_is_available)
    metric.unsync()
    return tensors


def _replay(
    request: str, states: Iterator[_GatheredState], tensor: Tensor, group: Any = None
) -> list[Tensor]:
    """Return the gathered tensors in place of a state of this rank."""
    state = next(states)
    if not torch.equal(tensor.cpu().nan_to_num(), state.sent.nan_to_num()):
        raise UsageError(
            request,
            problem="a metric computes from other states than it holds",
            suggestion="metrics.compute()",
        )
    # A rank without samples has empty states, whose dtype may differ.
    gathered = [of_rank.to(tensor.device) for of_rank in state.of_ranks if of_rank.numel()]
    return gathered or [tensor]

"""Metrics of torchmetrics: computed over all ranks in one exchange, and saved for each rank."""

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

# These attributes of a metric are replaced while the metric computes over all ranks.
_SYNC_ATTRIBUTES = ("dist_sync_fn", "distributed_available_fn", "_to_sync")


class _GatheredState(NamedTuple):
    """A state of a metric, gathered from all ranks.

    Attributes:
        of_this_rank: the state that this rank sent, on the CPU.
        of_ranks: the states of all ranks, on the CPU.
    """

    of_this_rank: Tensor
    of_ranks: tuple[Tensor, ...]


def compute_metrics(communicator: Communicator, metrics: Any) -> Any:
    """Return ``metrics.compute()`` over the samples of all ranks. Collective.

    ``Fabric.compute_metrics`` calls it. A metric of torchmetrics would gather each of its states in
    a collective of its own. Here all states of all metrics are gathered at once, and
    ``metrics.compute()`` then gets them in place of its own collectives.

    Args:
        communicator: all ranks.
        metrics: a metric, or a module that contains metrics.

    Raises:
        UsageError: ``metrics`` contains no metric, or the states of a metric cannot be exchanged.
    """
    call_text = f"compute_metrics({type(metrics).__name__})"
    error = None
    # For each metric, the tensors of its states on this rank.
    sent: list[list[Tensor]] = []
    metrics_by_path = _metrics_in(metrics)
    try:
        if not metrics_by_path:
            raise ArgumentTypeError(
                call_text,
                problem="the argument is not a metric or collection of torchmetrics, and has "
                "no metric in it",
            )
        for metric in metrics_by_path.values():
            sent.append(_tensors_to_gather(metric))
    except Exception as caught:  # noqa: BLE001 - raised on all ranks
        # Not raised here, since the other ranks wait in the exchange below.
        problem = f"on rank {communicator.rank}, {type(caught).__name__}: {caught}"
        error = UsageError(call_text, problem)
    call = CallDescription("compute_metrics")
    # Raises the error of any rank on all ranks.
    sent_by_rank = communicator.gather_objects(sent, call=call, error=error)
    # All ranks have the same counts, so all of them raise, or none.
    _check_counts(call_text, sent_by_rank)
    with ExitStack() as undo:
        for index, metric in enumerate(metrics_by_path.values()):
            metric_sent_by_rank = [sent_by_metric[index] for sent_by_metric in sent_by_rank]
            states = _states_of_all_ranks(sent[index], metric_sent_by_rank)
            _use_gathered_states(metric, states, call_text=call_text, undo=undo)
        # At the end of the block the metrics get their own collectives back.
        return metrics.compute()


def _check_counts(call_text: str, sent_by_rank: Sequence[list[list[Tensor]]]) -> None:
    """Raise a UsageError unless the metrics of all ranks have equally many states.

    Args:
        call_text: the user's call, for the error.
        sent_by_rank: for each rank and metric, the tensors of its states.
    """
    counts_by_rank: list[list[int]] = []
    for sent in sent_by_rank:
        counts_by_rank.append([len(tensors) for tensors in sent])
    if any(counts != counts_by_rank[0] for counts in counts_by_rank):
        raise UsageError(
            call_text,
            problem=f"ranks hold different numbers of states: {counts_by_rank}",
            expected="states with a reduction, and the same metrics on all ranks",
        )


def _states_of_all_ranks(
    sent: Sequence[Tensor], sent_by_rank: Sequence[Sequence[Tensor]]
) -> list[_GatheredState]:
    """Return each state of a metric with the tensors of all ranks.

    Args:
        sent: the states of the metric that this rank has sent.
        sent_by_rank: for each rank, the states that the rank has sent, in the same order.
    """
    states: list[_GatheredState] = []
    # zip(*...) gives the tensors of all ranks for each state.
    for tensor, rank_tensors in zip(sent, zip(*sent_by_rank, strict=True), strict=True):
        states.append(_GatheredState(of_this_rank=tensor, of_ranks=rank_tensors))
    return states


def _use_gathered_states(
    metric: Any, states: Sequence[_GatheredState], *, call_text: str, undo: ExitStack
) -> None:
    """Have ``metric.compute()`` use gathered states in place of its own collectives.

    Args:
        metric: the metric. Its attributes are replaced.
        states: the gathered states, in the order in which the metric gathers them.
        call_text: the user's call, for errors.
        undo: restores the attributes of the metric when it is closed.
    """
    for name in _SYNC_ATTRIBUTES:
        undo.callback(setattr, metric, name, getattr(metric, name))
    metric.dist_sync_fn = partial(_gathered_tensors, call_text, iter(states))
    # torchmetrics calls dist_sync_fn only if this function returns true.
    metric.distributed_available_fn = _is_available
    # A metric with sync_on_compute=False has False here, and would not call dist_sync_fn.
    metric._to_sync = True
    # Drops the cached result, which may be older than the samples of other ranks.
    metric._computed = None


def _is_available() -> bool:
    return True


# [Note: metrics]
# A metric accumulates the samples of its own rank, so its states differ between ranks. A checkpoint
# holds the states of all ranks, and each rank resumes exactly from its own. The state of a metric
# is its declared states, other tensors among its attributes, and its number of updates.
def rank_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of this rank's metrics on the CPU, for a checkpoint.

    Args:
        state: the user's objects by name. Objects without metrics are left out.

    Returns:
        By name, and then by path of the metric in the object, the state of the metric.
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

    With another number of ranks, the saved states cannot be assigned to ranks. Then the metrics are
    reset if no rank had any samples at the save. If a rank had samples, that is an error.

    Args:
        state: the user's objects by name.
        saved: results of :func:`rank_states`, at least one. With the same number of ranks, the
            first is the saved result of this rank. With another number, these are the results of
            some of the saved ranks. The ranks of this job together pass those of all saved ranks.
        saved_size: the number of ranks at the save.
        size: the number of ranks now.
        strict: whether a metric that cannot be restored is an error. If not, the metric is left as
            it is.

    Raises:
        CheckpointError: the states are of another number of ranks, or of other metrics. Only some
            ranks may raise, since each rank sees a part of the saved states. The caller then raises
            on all ranks.
    """
    is_same_size = size == saved_size
    # All ranks have saved the same names, so the first result has all names.
    for name in state.keys() & saved[0].keys():
        metrics = _metrics_in(state[name])
        if not metrics:
            continue
        states_by_rank = [rank_state[name] for rank_state in saved]
        problem = ""
        # All ranks have saved the same metrics, so the first result has the paths of all.
        saved_paths = states_by_rank[0].keys()
        if saved_paths != metrics.keys():
            problem = (
                f"it was saved with the metrics {sorted(saved_paths)}, and has {sorted(metrics)}"
            )
        elif not is_same_size and _have_samples(states_by_rank):
            problem = (
                f"each of {saved_size} ranks held a part of its samples, and there are {size} ranks"
            )
        if problem and strict:
            raise CheckpointError(
                f"load state[{name!r}]",
                problem,
                expected="the same metrics on as many ranks, or a checkpoint from after "
                "metric.reset()",
                suggestion="strict=False to leave the metrics as they are",
            )
        if problem:
            continue
        for path, metric in metrics.items():
            # With another number of ranks, no rank had samples: a reset is all that is needed.
            metric.reset()
            if is_same_size:
                _load_state(metric, states_by_rank[0][path])


def _have_samples(states_by_rank: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a metric of any rank has been updated since its latest reset.

    Args:
        states_by_rank: for each rank, the states of its metrics by path.
    """
    for states in states_by_rank:
        for state in states.values():
            if state["_update_count"]:
                return True
    return False


def _load_state(metric: Any, state: Mapping[str, Any]) -> None:
    """Set the attributes of a metric to copies of a result of :func:`_state_of`."""
    copy_to_device = partial(Tensor.to, device=metric.device, copy=True)
    vars(metric).update(map_tensors(copy_to_device, state))


def _metrics_in(value: Any) -> dict[str, Any]:
    """Return the torchmetrics metrics in a module, including itself, by path.

    Empty for other objects. As a side effect, the states of all metrics of a ``MetricCollection``
    are brought up to date.
    """
    # torchmetrics is optional and not imported here. A user with a metric has imported it.
    torchmetrics: Any = sys.modules.get("torchmetrics")
    if torchmetrics is None or not isinstance(value, nn.Module):
        return {}
    metrics: dict[str, Any] = {}
    # Called on the class, since a subclass of nn.Module may override named_modules.
    for path, module in nn.Module.named_modules(value):
        if isinstance(module, torchmetrics.MetricCollection):
            # Any, since the types of torchmetrics are unknown here.
            collection: Any = module
            # Called for its side effect. Of the metrics in a compute group, torchmetrics updates
            # only the first metric. This call gives the states of the first metric to the others.
            collection.values(copy_state=False)
        elif isinstance(module, torchmetrics.Metric):
            metrics[path] = module
    return metrics


# See [Note: metrics].
def _state_of(metric: Any) -> dict[str, Any]:
    """Return the state of a metric, copied to the CPU: attributes by name.

    Raises:
        UsageError: the metric is synced, so its states are not the states of this rank alone.
    """
    if metric._is_synced:
        raise UsageError(
            f"save a {type(metric).__name__} that is synced",
            problem="it has the states of all ranks now",
        )
    # The states that the metric has declared, and torchmetrics' own counters.
    declared = {*metric._defaults, "_update_count", "_num_vals_seen"}
    # Results that compute() and forward() keep. They are not part of the state.
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
    """Return copies of the tensors that a metric would gather, in the order of gathering.

    ``metric.sync`` is called with a function that records the tensors instead of gathering them.
    ``metric.unsync`` then restores the states of the metric.

    Raises:
        UsageError: the metric has a process group of its own.
    """
    tensors: list[Tensor] = []

    def record(tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Record a tensor. Called by ``metric.sync`` in place of a gathering over ``group``."""
        if group is not None:
            raise UsageError(
                "process_group of a metric", problem="its samples are gathered from all processes"
            )
        tensors.append(_copy_to_cpu(tensor))
        return [tensor]  # as if this were the only rank

    metric.sync(record, distributed_available=_is_available)
    metric.unsync()
    return tensors


def _gathered_tensors(
    call_text: str, states: Iterator[_GatheredState], tensor: Tensor, group: Any = None
) -> list[Tensor]:
    """Return the tensors of all ranks for a state, in place of a collective of the metric.

    torchmetrics calls this function with the last two arguments, once for each state. The first two
    are bound.

    Args:
        call_text: the user's call, for the error.
        states: the gathered states, in the order of the calls. Each call takes the next one.
        tensor: the state of this rank, which the metric wants to gather.
        group: not used.

    Raises:
        UsageError: ``tensor`` is not the state that this rank sent.
    """
    state = next(states)
    # NaNs are replaced, since a NaN is not equal to itself.
    if not torch.equal(tensor.cpu().nan_to_num(), state.of_this_rank.nan_to_num()):
        raise UsageError(
            call_text,
            problem="a metric computes from other states than it holds",
            suggestion="metrics.compute()",
        )
    gathered: list[Tensor] = []
    for rank_tensor in state.of_ranks:
        # The empty state of a rank without samples is left out, since its dtype may differ.
        if rank_tensor.numel():
            gathered.append(rank_tensor.to(tensor.device))
    # If no rank has samples, the metric computes from its own empty state.
    return gathered or [tensor]

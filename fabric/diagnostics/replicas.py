"""The comparison of replicas: what several ranks should hold alike, and where it differs."""

import gc
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple, NoReturn, Protocol
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fabric._torch import local_tensor
from fabric.communicators import Communicator, Reduce
from fabric.contract import GradientContract
from fabric.diagnostics.digest import combined_digests, digests
from fabric.diagnostics.drift import (
    Kind,
    RankDetails,
    ReplicaDetails,
    describe_drift,
    position_sums,
)
from fabric.diagnostics.pass_order import PassOrder
from fabric.diagnostics.recorder import STEP, FlightRecorder
from fabric.errors import ReplicaDriftError
from fabric.hooks import Hooks
from fabric.optim.loss_scaler import LossScaler
from fabric.tree import parameters_of

__all__ = ["Averages", "Replica", "ReplicaComparison", "TensorComparison", "WatchedObjects"]

_BUCKETS = 1024  # of names, among which a comparison that has found a difference looks for it
# The number of replicas of each kind of which a rank sends details.
_DETAILS_OF_KIND = 4
_MODULUS = 1 << 64


class Averages(Protocol):
    """The averages of a model's parameters, as ``fabric.ema`` returns them."""

    def _averages_of_parameters(self) -> Mapping[str, Tensor]:
        """Return the averages by the names of their parameters."""
        ...

    def get_extra_state(self) -> int:
        """Return the number of updates."""
        ...


class Replica(NamedTuple):
    """A quantity that should be equal on several ranks.

    Attributes:
        key: identifies the replica. It is the same on all ranks.
        name: the name for errors.
        kind: the kind.
        ranks: the ranks that should hold the same value, in ascending order.
        value: the part of a tensor on this rank, or a number as text.
        parameter: the parameter whose values these are. None if the replica is no parameter.
        setup_digest: the digest of a buffer at its setup. Ranks compare only whether the buffer has
            changed since then. None if the replica is no buffer.
    """

    key: str
    name: str
    kind: Kind
    ranks: tuple[int, ...]
    value: Tensor | str
    parameter: Tensor | None = None
    setup_digest: int | None = None

    @property
    def description(self) -> str:
        """The key and the value. Of a tensor, the dtype and the shape stand for the value."""
        if isinstance(self.value, str):
            return f"{self.key} {self.value}"
        if self.setup_digest is not None:
            # A buffer that all ranks replace may have another shape on each of them.
            return self.key
        return f"{self.key} {self.value.dtype} {self.value.shape}"


class _WatchedModule(NamedTuple):
    """What is known of a set-up module since its setup.

    Attributes:
        number: the number of the module among all that are set up. It is the same on all ranks.
        buffer_digests: the digests of its buffers at its setup, by name.
    """

    number: int
    buffer_digests: dict[str, int]


class _WatchedAverages(NamedTuple):
    """The averages of a set-up module.

    Attributes:
        number: the number of the averages among all that there are. It is the same on all ranks.
        contract: the contract of the averaged module.
    """

    number: int
    contract: GradientContract


class WatchedObjects:
    """The objects whose replicas are compared: modules, optimizers and averages, all held weakly.

    Each kind of objects is numbered in the order in which they are added. All ranks add modules and
    optimizers in the same order, so that a number means the same object on all ranks, even if only
    some ranks have collected an older object as garbage.

    Args:
        scaler: the loss scaler, or None.
        pass_order: the order of the passes of several models.
    """

    def __init__(self, scaler: LossScaler | None, pass_order: PassOrder) -> None:
        self._scaler = scaler
        self._pass_order = pass_order
        # Each iterator gives the next object of its kind a number. The keys of replicas have these
        # numbers, so all ranks must count alike, and no number is given twice.
        self._module_numbers = count()
        self._optimizer_numbers = count()
        self._averages_numbers = count()
        self._modules: WeakKeyDictionary[GradientContract, _WatchedModule] = WeakKeyDictionary()
        self._optimizers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._averages: WeakKeyDictionary[Averages, _WatchedAverages] = WeakKeyDictionary()

    def add_module(self, contract: GradientContract) -> None:
        """Add a module. Called at its setup, when its buffers are equal on all ranks.

        The digests of its buffers are kept. With them, a comparison finds the buffers that have
        changed since then on some ranks alone.
        """
        buffers: dict[str, Tensor] = {}
        for name, tensor in contract.replicas().items():
            part = _comparable_part(tensor)  # None if the bits of the tensor cannot be read
            if not isinstance(tensor, nn.Parameter) and part is not None:
                buffers[name] = part
        buffer_digests = dict(zip(buffers, digests(buffers.values()), strict=True))
        self._modules[contract] = _WatchedModule(next(self._module_numbers), buffer_digests)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add an optimizer, with its options and its state. Called at its setup."""
        self._optimizers[optimizer] = next(self._optimizer_numbers)

    def add_averages(self, averages: Averages, contract: GradientContract) -> None:
        """Add the averages of a module. Some jobs do so on one rank alone."""
        self._averages[averages] = _WatchedAverages(next(self._averages_numbers), contract)

    def replicas(self, size: int, saved: Collection[object] | None) -> list[Replica]:
        """Return what this rank and at least one other rank should hold alike.

        Args:
            size: the number of ranks.
            saved: the objects that a save writes. The states of other optimizers are left out.
                None includes the states of all optimizers.
        """
        # _replicas_of_module() adds the parameters to the layout, and the other calls look them up.
        layout = _Layout(size)
        candidates: list[Replica] = []
        for contract, watched in self._modules.items():
            candidates.extend(_replicas_of_module(contract, watched, layout))
        for optimizer, number in self._optimizers.items():
            candidates.extend(_options_of_optimizer(optimizer, number, layout))
            # A state that is not saved may differ, since an optimizer may shard its own state.
            is_saved = saved is not None and any(optimizer is target for target in saved)
            if is_saved or saved is None:
                candidates.extend(_states_of_optimizer(optimizer, number, layout, is_saved))
        for averages, (number, contract) in self._averages.items():
            candidates.extend(_replicas_of_averages(averages, number, contract, layout))
        for history in self._pass_order.histories:
            order_of_passes = Replica(
                key=history.topic,
                name="the order of the latest passes",
                kind=Kind.PASSES,
                ranks=history.ranks or layout.all_ranks,
                value=str(history),
            )
            candidates.append(order_of_passes)
        if self._scaler is not None:
            state = self._scaler.state_dict()
            value = f"{state['scale']} ({state['growth_tracker']} steps since its last change)"
            loss_scale = Replica(
                key="loss scale",
                name="the loss scale",
                kind=Kind.LOSS_SCALE,
                ranks=layout.all_ranks,
                value=value,
            )
            candidates.append(loss_scale)
        return [replica for replica in candidates if len(replica.ranks) > 1]


# [Note: Comparison of replicas]
# Ranks hold the same parameters under DDP, along the replicated dimensions of a mesh, and in layers
# that tensor parallelism does not split. Nothing keeps them the same but equal gradients and equal
# steps: one scheduler that steps on one rank alone, one skipped step or one flipped bit, and the
# replicas drift apart without an error.
#
# A `Replica` is one quantity that should be equal on some ranks. Most comparisons find no
# difference, so they send a single number. Each rank takes a digest of its replicas for each set of
# ranks, and adds up all digests, each times a weight. In each set of ranks the weights add up to
# zero, so the sum over all ranks is zero if each set holds equal replicas. One all_reduce serves
# all sets, however the mesh is laid out, and no process group is needed for a set.
#
# If the sum is not zero, all ranks know. A second all_reduce has one such sum for each of 1,024
# buckets of names, and then each rank sends the details of a few replicas in the buckets that
# differ.
#
# A comparison is a collective, so it takes place only where all ranks are in the same call: in a
# save, and in a backward pass that synchronizes gradients. An optimizer step is no such place. A
# rank that leaves out a step, which is what the comparison has to find, would keep the others
# waiting.
class ReplicaComparison:
    """Compares the replicas of all ranks.

    A *replica* is one quantity that should be equal on some ranks, such as a parameter under DDP.

    Args:
        communicator: all ranks of the job, at least two.
        scaler: the loss scaler, or None.
        recorder: counts the optimizer steps.
        pass_order: the order of the passes of several models, which is compared, too.
        backward: the hooks around backward passes.
        passes_between: the number of backward passes from one comparison to the next. Only those
            that all ranks make are counted. None if backward passes make no comparisons.

    Attributes:
        watched: the objects whose replicas are compared. Modules are added by :meth:`watch_module`.
        is_paused: whether backward passes are not counted now, as within ``fabric.join``, where
            ranks make different numbers of them.
    """

    def __init__(
        self,
        communicator: Communicator,
        scaler: LossScaler | None,
        recorder: FlightRecorder,
        pass_order: PassOrder,
        *,
        backward: Hooks,
        passes_between: int | None,
    ) -> None:
        """Start without modules and optimizers."""
        self.watched = WatchedObjects(scaler, pass_order)
        self.is_paused = False
        self._communicator = communicator
        self._recorder = recorder
        # The number of optimizer steps before the latest comparison.
        self._compared_steps = 0
        # The number of optimizer steps before the latest comparison that found no difference. None
        # if there was no such comparison.
        self._agreed_steps: int | None = None
        # Compares after some backward passes. None if backward passes make no comparisons.
        self._regular: _RegularComparison | None = None
        if passes_between is not None:
            self._regular = _RegularComparison(self, backward, passes_between)

    def watch_module(self, contract: GradientContract, forward: Hooks) -> None:
        """Compare a module from now on. Called at its setup, when it is equal on all ranks.

        Args:
            contract: the contract of the module.
            forward: the hooks around the module's forward pass.
        """
        self.watched.add_module(contract)
        if self._regular is not None:
            self._regular.watch(contract, forward)

    def compare(self, request: str) -> None:
        """Compare the replicas of all ranks at once. Collective: every rank must call it.

        The states of an optimizer that shards its own state are not reported.

        Args:
            request: where the comparison takes place, for the error.

        Raises:
            ReplicaDriftError: replicas differ. All ranks raise it.
        """
        comparison = self._collect(request, saved=None)
        comparison.take_digest()
        comparison.finish()

    def begin(self, request: str, saved: Collection[object]) -> "TensorComparison":
        """Compare which replicas all ranks have, and all numbers among them. Collective.

        Args:
            request: where the comparison takes place, for the error.
            saved: the objects that a save writes. The states of other optimizers are not compared.

        Returns:
            The comparison of the tensors, which has not started.

        Raises:
            ReplicaDriftError: the ranks have other replicas or other numbers. All ranks raise it.
        """
        comparison = self._collect(request, saved)
        self._check(comparison, comparison.digest_of_descriptions)
        return comparison

    def _collect(self, request: str, saved: Collection[object] | None) -> "TensorComparison":
        """Return a comparison of all replicas, for which no rank has sent anything yet.

        Not a collective. The next comparison reports the number of optimizer steps since this call.

        Args:
            request: where the comparison takes place, for the error.
            saved: the objects that a save writes. None outside of a save.
        """
        rank = self._communicator.rank
        replicas = self.watched.replicas(self._communicator.size, saved)
        steps = self._recorder.counts.get(STEP, 0)
        comparison = TensorComparison(
            comparison=self,
            rank=rank,
            replicas=replicas,
            digest_of_descriptions=_weighted_digest(rank, replicas, _digest_of_descriptions),
            request=request,
            saved=saved,
            steps=steps,
            steps_since=steps - self._compared_steps,
        )
        self._compared_steps = steps
        return comparison

    def _check(self, comparison: "TensorComparison", weighted_digest: int) -> None:
        """Raise on all ranks if replicas differ. Collective.

        Args:
            comparison: the comparison. It has digests of all replicas, but not what differs.
            weighted_digest: a result of ``_weighted_digest``. If no replica differs, the digests of
                all ranks add up to zero.
        """
        (difference,) = self._sum_over_ranks([weighted_digest])
        if difference != 0:
            # Some ranks may still hold a model that other ranks have collected as garbage. So the
            # replicas are read once more, without garbage, to find what differs.
            gc.collect()
            replicas = self.watched.replicas(self._communicator.size, comparison.saved)
            # A checkpoint has the states of rank 0 alone, so a save reports sharded states.
            sentences = self._find_drift(
                _with_texts_of_buffers(replicas),
                comparison.steps_since,
                may_shard_states=comparison.saved is None,
            )
            # Empty if the difference was a model that only some ranks had collected as garbage.
            if sentences:
                self._raise_drift(comparison.request, sentences, comparison.steps)

    def compare_digests(self, comparison: "TensorComparison", weighted_digest: int) -> None:
        """Compare the digests of all ranks, at the end of a comparison. Collective.

        ``comparison.finish()`` calls this method.

        Args:
            comparison: the comparison.
            weighted_digest: the digest of this rank, of everything that is compared.

        Raises:
            ReplicaDriftError: replicas differ. All ranks raise it.
        """
        self._check(comparison, weighted_digest)
        self._agreed_steps = comparison.steps

    def _raise_drift(self, request: str, sentences: Sequence[str], steps: int) -> NoReturn:
        """Raise a ReplicaDriftError, as on all other ranks.

        Args:
            request: where the comparison takes place.
            sentences: what differs, and then what may have happened.
            steps: the number of optimizer steps so far.
        """
        if self._agreed_steps is None:
            agreement = "the ranks have not been compared before"
        else:
            agreement = f"all ranks agreed after {self._agreed_steps} optimizer steps"
        raise ReplicaDriftError(
            f"{request}, after {steps} optimizer steps, on rank {self._communicator.rank}",
            problem="\n  ".join([sentences[0], agreement, *sentences[1:]]),
            expected="the same steps, options and changes on all ranks",
            suggestion="no branch on the rank around steps of optimizers and schedulers, or around "
            "changes of the model; Fabric(check_replicas=1) to find the step; "
            "fabric.load(...) of an earlier checkpoint to go on; or "
            "Fabric(check_replicas=False) if this is meant",
        )

    def _sum_over_ranks(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums of numbers over all ranks, modulo 2**64. Collective.

        Args:
            numbers: integers from 0 to 2**64 - 1, as many on each rank.
        """
        # A tensor of int64 carries signed integers, so 2**64 is subtracted from those that are at
        # least 2**63. The sums wrap around in the same way, and so stay right modulo 2**64.
        signed = [(number + _MODULUS // 2) % _MODULUS - _MODULUS // 2 for number in numbers]
        tensor = torch.tensor(signed, dtype=torch.int64, device=self._communicator.device)
        return self._communicator.all_reduce(tensor, Reduce.SUM).tolist()

    def _find_drift(
        self, replicas: Sequence[Replica], steps: int, *, may_shard_states: bool
    ) -> list[str]:
        """Return sentences about what differs, the same on all ranks. Collective.

        The replicas are divided into buckets by their keys. The ranks exchange the details of
        replicas only for buckets in which they differ.

        Args:
            replicas: the replicas of this rank.
            steps: the number of optimizer steps of this rank since the latest comparison.
            may_shard_states: whether an optimizer may keep only a part of its state on each rank.

        Returns:
            The sentences. Empty if the only difference is that some ranks lack a replica, such as
            one of a model that they have collected as garbage.
        """
        rank = self._communicator.rank
        buckets: list[list[Replica]] = [[] for _ in range(_BUCKETS)]
        for replica in replicas:
            # crc32() gives the same number on every rank, unlike hash().
            buckets[crc32(replica.key.encode()) % _BUCKETS].append(replica)
        # The sum of these digests over the ranks is 0 if the replicas of the bucket are equal.
        digests_of_buckets = [_weighted_digest(rank, bucket, _digest) for bucket in buckets]
        differences = self._sum_over_ranks(digests_of_buckets)
        suspect_keys: set[str] = set()
        for bucket, difference in zip(buckets, differences, strict=True):
            if difference != 0:
                suspect_keys.update(replica.key for replica in bucket)
        details = _rank_details(replicas, suspect_keys, steps)
        details_of_ranks = self._communicator.gather_objects(details)
        return describe_drift(details_of_ranks, may_shard_states=may_shard_states)


class _RegularComparison:
    """Compares the replicas after every so many backward passes that all ranks make.

    Args:
        comparison: compares the replicas.
        backward: the hooks around backward passes.
        passes_between: the number of counted backward passes from one comparison to the next.
    """

    def __init__(self, comparison: ReplicaComparison, backward: Hooks, passes_between: int) -> None:
        """Add the comparison to the hooks around backward passes."""
        self._comparison = comparison
        self._passes_between = passes_between
        self._counted_passes = 0
        # Whether the next backward pass synchronizes gradients. All ranks make such a pass, so they
        # count the same passes. _after_forward() sets it to True, and each backward pass to False.
        self._is_next_pass_counted = False
        backward.after.append(self._after_backward)

    def watch(self, contract: GradientContract, forward: Hooks) -> None:
        """Count the backward passes of a module from now on.

        Args:
            contract: the contract of the module.
            forward: the hooks around the module's forward pass.
        """
        forward.after.append(partial(self._after_forward, contract.synchronizes))

    def _after_forward(
        self, synchronizes: Callable[[], bool], output: object, error: BaseException | None
    ) -> None:
        """Let the next backward pass count if it synchronizes gradients.

        All ranks make such a backward pass. A rank may make any other one alone. Called after each
        forward pass.

        Args:
            synchronizes: returns whether a backward pass would synchronize gradients now.
            output: the output of the forward pass. Not used.
            error: the error that ended the forward pass, or None.
        """
        if error is None and torch.is_grad_enabled() and synchronizes():
            self._is_next_pass_counted = True

    def _after_backward(self, loss: Tensor, error: BaseException | None) -> None:
        """Count a backward pass that all ranks make, and compare the replicas if it is time.

        ``Fabric.backward`` calls this after each pass. Collective if the replicas are compared.
        """
        is_counted = self._is_next_pass_counted and error is None and not self._comparison.is_paused
        # _after_forward() sets it again before the next backward pass that all ranks make.
        self._is_next_pass_counted = False
        if not is_counted:
            return
        self._counted_passes += 1
        if self._counted_passes % self._passes_between == 0:
            self._comparison.compare("fabric.backward(...)")


# [Note: Comparison in a save]
# On a CPU, the digests take about a quarter of the time of a save. So a save compares in two steps.
# Before it collects anything, all ranks compare which replicas they have, and the replicas that are
# numbers. This takes no time, and all ranks then have states of the same structure. The digests of
# tensors are compared when the files are complete, and before the checkpoint is committed.
#
# All ranks take their digests while the system flushes the file to the disk. A digest during the
# writing, even of a rank that has nothing to write, would compete with the writing for the memory:
# it made the writing of 600 MB a tenth slower. (A thread of the process that writes would also
# compete for the GIL: with many small tensors a save took half as long again.) The files of a
# sharded checkpoint are written by all ranks at once. There, each rank takes its digest while its
# own files are flushed, and a rank without a file takes it at once.
@dataclass(eq=False)
class TensorComparison:
    """One comparison of the replicas of all ranks.

    Attributes:
        comparison: compares the digests of all ranks.
        rank: this rank.
        replicas: the replicas of this rank. No tensor is read before :meth:`take_digest`.
        digest_of_descriptions: the weighted digest of what the replicas are, and of the numbers
            among them.
        request: where the comparison takes place, for the error.
        saved: the objects that a save writes. None outside of a save.
        steps: the number of optimizer steps so far.
        steps_since: the number of optimizer steps since the latest comparison.
    """

    comparison: ReplicaComparison
    rank: int
    replicas: Sequence[Replica]
    digest_of_descriptions: int
    request: str
    saved: Collection[object] | None
    steps: int
    steps_since: int
    # None before take_digest().
    _digest: int | None = field(default=None, init=False)

    def take_digest(self) -> None:
        """Read the replicas, in the first call. Not a collective."""
        if self._digest is None:
            replicas = _with_texts_of_buffers(self.replicas)
            digest_of_values = _weighted_digest(self.rank, replicas, _digest_of_values)
            # The sum over all ranks is zero if both digests are equal on all ranks.
            self._digest = (self.digest_of_descriptions + digest_of_values) % _MODULUS

    def finish(self) -> None:
        """Compare the digests of all ranks, which have taken them. Collective.

        Raises:
            ReplicaDriftError: replicas differ. All ranks raise it.
        """
        assert self._digest is not None, "take_digest() comes first"
        self.comparison.compare_digests(self, self._digest)


class _KnownParameter(NamedTuple):
    """A parameter of a set-up module.

    Attributes:
        name: the name for errors.
        ranks: the ranks that hold the same part of the parameter, in ascending order.
    """

    name: str
    ranks: tuple[int, ...]


class _Layout:
    """The ranks that should hold the same values, for each tensor.

    Args:
        size: the number of ranks.

    Attributes:
        all_ranks: all ranks of the job, which hold the same values of a plain tensor.
    """

    def __init__(self, size: int) -> None:
        """Start without parameters. :meth:`add` adds them."""
        self.all_ranks = tuple(range(size))
        # A cache, by the id() of the mesh and the placements. Most parameters share them. A layout
        # lives for one comparison, in which no mesh can be deleted, so an id() is not used again.
        self._ranks: dict[tuple[int, Any], tuple[int, ...]] = {}
        # By the id() of the parameter.
        self._parameters: dict[int, _KnownParameter] = {}

    def add(self, parameter: Tensor, name: str) -> tuple[int, ...]:
        """Add a parameter of a set-up module with its name for errors, and return its ranks."""
        ranks = self._ranks_of(parameter)
        self._parameters[id(parameter)] = _KnownParameter(name, ranks)
        return ranks

    def find(self, parameter: Tensor) -> _KnownParameter | None:
        """Return the name and the ranks of a parameter. None if it was not added."""
        return self._parameters.get(id(parameter))

    def _ranks_of(self, tensor: Any) -> tuple[int, ...]:
        """Return the ranks that hold the same part of a tensor as this rank.

        All ranks for a plain tensor.
        """
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is None:
            return self.all_ranks
        # The tensors keep their meshes alive, so that no other mesh gets the id of one.
        key = (id(mesh), tensor.placements)
        if key not in self._ranks:
            self._ranks[key] = _ranks_of_part(mesh, tensor.placements)
        return self._ranks[key]


def _ranks_of_part(mesh: DeviceMesh, placements: Sequence[Any]) -> tuple[int, ...]:
    """Return the ranks that hold the same part of a DTensor as this rank, in ascending order.

    These are the ranks along the replicated dimensions of the mesh. Empty if this rank is not in
    the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    ranks = mesh.mesh
    # From the last dimension to the first: select() removes a dimension and renumbers later ones.
    for dim in reversed(range(len(placements))):
        if not placements[dim].is_replicate():
            ranks = ranks.select(dim, coordinate[dim])
    return tuple(sorted(ranks.flatten().tolist()))


def _replicas_of_module(
    contract: GradientContract, watched: _WatchedModule, layout: _Layout
) -> Iterator[Replica]:
    """Yield the replicas of a module: its parameters, its buffers, and digests of its use.

    Ranks compare only whether a buffer has changed since the setup. The values of running
    statistics differ between ranks, but every rank changes them in its forward passes. A buffer
    that has changed on some ranks alone, such as a mask, was changed by mistake.

    Args:
        contract: the contract of the module.
        watched: what is known of the module since its setup.
        layout: which ranks hold a parameter alike. The parameters of the module are added to it.
    """
    for name, tensor in contract.replicas().items():
        part = _comparable_part(tensor)
        if part is None:
            continue
        if name in watched.buffer_digests:
            yield Replica(
                key=f"buffer {watched.number} {name}",
                name=f"the buffer {name} of {contract.title}",
                kind=Kind.BUFFER,
                ranks=layout.all_ranks,
                value=part,
                setup_digest=watched.buffer_digests[name],
            )
        elif isinstance(tensor, nn.Parameter):
            title = f"{name} of {contract.title}"
            yield Replica(
                key=f"parameter {watched.number} {name}",
                name=title,
                kind=Kind.PARAMETER,
                ranks=layout.add(tensor, title),
                value=part,
                parameter=tensor,
            )
    module_order = contract.module_order()
    if module_order:
        yield Replica(
            key=f"module order {watched.number}",
            name=f"the order in which forward passes have used the blocks of {contract.title}",
            kind=Kind.USES,
            ranks=tuple(sorted(contract.peers())),
            value=f"digest {module_order}",
        )
    stepped_gradients = contract.stepped_gradients()
    if stepped_gradients:
        yield Replica(
            key=f"stepped gradients {watched.number}",
            name=f"the set of parameters of {contract.title} with gradients in steps",
            kind=Kind.USES,
            ranks=layout.all_ranks,
            value=f"digest {stepped_gradients}",
        )


def _states_of_optimizer(
    optimizer: Optimizer, number: int, layout: _Layout, is_saved: bool
) -> Iterator[Replica]:
    """Yield a replica for each value of an optimizer's state of a set-up module's parameter.

    Args:
        optimizer: the optimizer.
        number: the number of the optimizer among all that are set up, the same on all ranks.
        layout: which ranks hold a parameter alike. It has the parameters of the set-up modules.
        is_saved: whether a save writes the state. A checkpoint has the plain values of rank 0 for
            all ranks, also those of a sharded parameter.
    """
    class_name = type(optimizer).__name__
    for parameter in parameters_of(optimizer):
        known_parameter = layout.find(parameter)
        state = optimizer.state.get(parameter)
        if known_parameter is None or not isinstance(state, Mapping):
            continue
        # The state has names such as "exp_avg".
        for state_name, value in state.items():
            replicated_value = None
            is_dtensor = False
            if isinstance(value, Tensor):
                replicated_value = _comparable_part(value)
                is_dtensor = local_tensor(value) is not value
            elif _is_number(value):
                replicated_value = repr(value)
            if replicated_value is None:
                continue
            ranks = known_parameter.ranks
            if is_saved and not is_dtensor:
                ranks = layout.all_ranks
            yield Replica(
                key=f"state {number} {state_name} {known_parameter.name}",
                name=f"{state_name} of {known_parameter.name} in {class_name}",
                kind=Kind.STATE,
                ranks=ranks,
                value=replicated_value,
            )


def _options_of_optimizer(optimizer: Optimizer, number: int, layout: _Layout) -> Iterator[Replica]:
    """Yield a replica for each option of an optimizer that is a number, such as ``lr``.

    Nothing is yielded if the optimizer has no parameter of a set-up module.

    Args:
        optimizer: the optimizer.
        number: the number of the optimizer among all that are set up, the same on all ranks.
        layout: which ranks hold a parameter alike. It has the parameters of the set-up modules.
    """
    has_replica = any(layout.find(parameter) is not None for parameter in parameters_of(optimizer))
    if not has_replica:
        return
    # The options that the optimizer defines. Other keys of a group may mean anything. Wrappers of
    # optimizers, such as torch's PostLocalSGDOptimizer, have no `defaults`.
    options = getattr(optimizer, "defaults", ())
    for index, group in enumerate(optimizer.param_groups):
        for option in options:
            value = group.get(option)
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if not _is_number(value) and not _are_numbers(value):
                continue
            yield Replica(
                key=f"option {number} {index} {option}",
                name=f"{option} of {type(optimizer).__name__}",
                kind=Kind.OPTION,
                ranks=layout.all_ranks,
                value=repr(value),
            )


def _replicas_of_averages(
    averages: Averages, number: int, contract: GradientContract, layout: _Layout
) -> Iterator[Replica]:
    """Yield a replica for each average of a parameter, and one for the number of updates.

    Args:
        averages: the averages.
        number: the number of the averages among all that are watched, the same on all ranks.
        contract: the contract of the averaged module.
        layout: which ranks hold a parameter alike. It has the parameters of the set-up modules.
    """
    replicated_parameters = contract.replicas()
    has_replicas = False
    for name, average in averages._averages_of_parameters().items():
        part = _comparable_part(average)
        if name not in replicated_parameters or part is None:
            continue
        known_parameter = layout.find(replicated_parameters[name])
        if known_parameter is None:
            continue
        has_replicas = True
        yield Replica(
            key=f"average {number} {name}",
            name=f"the average of {known_parameter.name}",
            kind=Kind.AVERAGE,
            ranks=known_parameter.ranks,
            value=part,
        )
    if has_replicas:
        # Like an option, the number must be equal on all ranks, also on ranks with other shards.
        update_count = averages.get_extra_state()
        yield Replica(
            key=f"updates {number}",
            name=f"the number of updates of the averages of {contract.title}",
            kind=Kind.OPTION,
            ranks=layout.all_ranks,
            value=str(update_count),
        )


def _comparable_part(tensor: Tensor) -> Tensor | None:
    """Return the part of a tensor on this rank. None if its bits cannot be read."""
    part = local_tensor(tensor)
    # The bits of a tensor of a subclass may be in other tensors. Lazy tensors have none yet, and
    # are of a subclass, too.
    is_plain = type(part) is Tensor or type(part) is nn.Parameter
    if is_plain and part.layout is torch.strided and not part.is_meta:
        return part
    return None


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _are_numbers(value: object) -> bool:
    """Return whether an option is a tuple of numbers, such as the betas of Adam."""
    return isinstance(value, tuple | list) and all(map(_is_number, value))


# -- digests -----------------------------------------------------------------------------------


def _with_texts_of_buffers(replicas: Sequence[Replica]) -> list[Replica]:
    """Return the replicas. The value of each buffer is a text: whether it has changed since setup.

    This reads the buffers.
    """
    buffers: dict[str, Tensor] = {}
    for replica in replicas:
        if replica.setup_digest is not None:
            assert isinstance(replica.value, Tensor), "only buffers have a digest from their setup"
            buffers[replica.key] = replica.value
    # One call for all buffers, since each call waits for the device.
    digests_by_key = dict(zip(buffers, digests(buffers.values()), strict=True))
    comparable: list[Replica] = []
    for replica in replicas:
        if replica.setup_digest is not None:
            text = "unchanged since setup"
            if digests_by_key[replica.key] != replica.setup_digest:
                text = "changed"
            replica = replica._replace(value=text, setup_digest=None)
        comparable.append(replica)
    return comparable


def _weighted_digest(
    rank: int, replicas: Iterable[Replica], digest: Callable[[Sequence[Replica]], int]
) -> int:
    """Return a number whose sum over all ranks is zero if the replicas are equal.

    This rank takes a digest of its replicas for each set of ranks, and adds up the digests, each
    times its weight in the set. The weights of the ranks of a set add up to zero, so that equal
    digests do, too.

    Args:
        rank: this rank.
        replicas: the replicas of this rank.
        digest: returns the digest of replicas: ``_digest``, ``_digest_of_descriptions`` or
            ``_digest_of_values``.
    """
    replicas_of_sets: dict[tuple[int, ...], list[Replica]] = {}
    for replica in replicas:
        replicas_of_sets.setdefault(replica.ranks, []).append(replica)
    total = 0
    for ranks, replicas_of_set in replicas_of_sets.items():
        if rank == ranks[0]:
            # Minus the sum of the other weights in the set.
            weight = -sum(map(_weight, ranks[1:]))
        else:
            weight = _weight(rank)
        total += weight * digest(replicas_of_set)
    return total % _MODULUS


def _weight(rank: int) -> int:
    """Return the weight of a rank, an odd pseudorandom number of 64 bits.

    A product with an odd number modulo 2**64 is zero only for zero, so no difference is lost.
    """
    return _hash(f"rank {rank}") | 1


def _digest(replicas: Sequence[Replica]) -> int:
    """Return a digest of all bits of replicas, and of their names."""
    return _hash(f"{_digest_of_descriptions(replicas)} {_digest_of_values(replicas)}")


def _digest_of_descriptions(replicas: Sequence[Replica]) -> int:
    """Return a digest of the names of replicas, and of the values of those that are numbers."""
    return _hash(repr([replica.description for replica in replicas]))


def _digest_of_values(replicas: Sequence[Replica]) -> int:
    """Return a digest of all bits of replicas."""
    texts: list[str] = []
    tensors: list[Tensor] = []
    for replica in replicas:
        if isinstance(replica.value, str):
            texts.append(replica.value)
        else:
            tensors.append(replica.value)
    return _hash(repr((texts, combined_digests(tensors))))


def _hash(text: str) -> int:
    """Return a hash of 64 bits that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _rank_details(replicas: Sequence[Replica], suspect_keys: Set[str], steps: int) -> RankDetails:
    """Return what this rank sends about its replicas that may differ, a few of each kind.

    Args:
        replicas: the replicas of this rank.
        suspect_keys: the keys of the replicas that may differ.
        steps: the number of optimizer steps of this rank since the latest comparison.
    """
    details: list[ReplicaDetails] = []
    counts: Counter[Kind] = Counter()
    for replica in replicas:
        if replica.key not in suspect_keys:
            continue
        counts[replica.kind] += 1
        if counts[replica.kind] <= _DETAILS_OF_KIND:
            details.append(_details_of(replica))
    has_state = any(replica.kind is Kind.STATE for replica in replicas)
    truncated_kinds = [kind for kind in counts if counts[kind] > _DETAILS_OF_KIND]
    return RankDetails(
        steps=steps, has_state=has_state, replicas=details, truncated_kinds=truncated_kinds
    )


def _details_of(replica: Replica) -> ReplicaDetails:
    """Return what this rank sends about a replica that may differ, for the error."""
    details = ReplicaDetails(
        key=replica.key, name=replica.name, kind=replica.kind, ranks=replica.ranks, value=""
    )
    if isinstance(replica.value, str):
        return details._replace(value=replica.value)
    # The digest of the gradient shows whether ranks have stepped with different gradients.
    grad = None
    if replica.parameter is not None:
        grad = replica.parameter.grad
    digest_of_gradient = None
    if grad is not None and _comparable_part(grad) is not None:
        (digest_of_gradient,) = digests([grad])
    description = f"{replica.value.dtype} {tuple(replica.value.shape)}"
    return details._replace(
        value=f"{description} {digests([replica.value])}",
        sums=position_sums(replica.value),
        gradient=digest_of_gradient,
    )

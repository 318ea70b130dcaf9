"""The comparison of the order in which the ranks run the passes of several models."""

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from enum import StrEnum
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from fabric._torch import backward_number
from fabric.contract import GradientContract
from fabric.diagnostics.bypass import BypassChecks
from fabric.errors import FabricError, UsageError
from fabric.hooks import Hooks
from fabric.store import JobStore
from fabric.tree import flatten

__all__ = ["PassHistory", "PassOrder"]

# The first backward passes, which are compared while they run.
_CHECKED_BACKWARDS = 12
# The largest number of passes that are compared while they run. A job may have only forward passes.
_MAX_CHECKED_PASSES = 200
_PUBLISHED_PASSES = 64  # the latest ones
_DESCRIBED_PASSES = 4  # the latest ones


class _Kind(StrEnum):
    """The kinds of passes in which torch issues collectives, in words for errors."""

    FORWARD = "forward pass"
    BACKWARD = "backward pass"  # with synchronization
    BACKWARD_WITHOUT_SYNC = "backward pass in no_backward_sync"


class _PassDifference(NamedTuple):
    """A pass of a neighbor in place of another pass of this rank.

    Attributes:
        neighbor: the rank of the neighbor.
        text: what the pass of this rank is.
        text_of_neighbor: what the pass of the neighbor is.
    """

    neighbor: int
    text: str
    text_of_neighbor: str


class PassHistory:
    """The passes that several ranks have to make in the same order, as this rank has made them.

    Args:
        topic: the topic of the store under which the ranks publish the latest passes.

    Attributes:
        topic: the topic.
        ranks: the ranks that make the passes. Empty if all ranks of the job do.
        neighbors: the neighbors of this rank among these ranks.
        count: the number of passes so far.
    """

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.ranks: tuple[int, ...] = ()
        self.neighbors: frozenset[int] = frozenset()
        self.count = 0
        self._digest = 0
        self._latest: deque[str] = deque(maxlen=_PUBLISHED_PASSES)

    def add(self, text: str) -> None:
        """Add a pass.

        Args:
            text: what the pass is, the same on all ranks.
        """
        self.count += 1
        self._digest = crc32(text.encode(), self._digest)
        self._latest.append(text)

    def publish(self, store: JobStore) -> None:
        """Publish the latest passes."""
        if self.neighbors:
            store.publish(self.topic, [self.count, list(self._latest)])

    def differences(self, store: JobStore) -> Iterator[_PassDifference]:
        """Yield the first pass of each neighbor that differs from the pass of this rank.

        Only passes that both ranks have published are compared.
        """
        if not self.neighbors:
            return
        for neighbor, (count, latest) in store.read(self.topic, self.neighbors).items():
            # Passes are numbered from 0. The neighbor has published the latest of `count` passes.
            passes_of_neighbor = dict(enumerate(latest, start=count - len(latest)))
            for number, text in enumerate(self._latest, start=self.count - len(self._latest)):
                text_of_neighbor = passes_of_neighbor.get(number, text)
                if text_of_neighbor != text:
                    yield _PassDifference(neighbor, text, text_of_neighbor)
                    break

    def __str__(self) -> str:
        """Return the latest passes, and what tells all earlier ones apart."""
        latest = list(self._latest)[-_DESCRIBED_PASSES:]
        return f"{', '.join(latest)} (of {self.count} with digest {self._digest:08x})"


class _FirstModel(NamedTuple):
    """The first model. The references are weak, since the user may drop the model.

    Attributes:
        contract: the contract of the model.
        forward: the hooks around the model's forward pass.
    """

    contract: ref[GradientContract]
    forward: ref[Hooks]


# [Note: Order of passes]
# In some passes torch issues collectives of its own: in a backward pass that synchronizes
# gradients, and in each pass of a sharded model. torch does not know which model a collective is
# for. If rank 0 runs the backward passes of two models in one order and rank 1 in the other, the
# collectives of different models meet. With equal shapes the models silently get the gradients, or
# under FSDP the weights, of each other.
#
# A job with one model has no order to compare, and pays nothing. From the second model on, each
# rank records its passes. In the first passes, and in checked mode in all passes, a rank publishes
# its passes through the store before a pass, and reads those of its neighbors before and after it.
# So the rank that reads last raises before the pass, and the other one after it. Later passes are
# only recorded. Saves and other comparisons of replicas compare the histories, see `replicas.py`.
class PassOrder:
    """Compares the order of the passes of several set-up models between neighboring ranks.

    Args:
        store: the store in which the ranks publish their passes.
        bypass: knows the neighbors and the peers, and tells of synchronized backward passes.
        backward: the hooks around backward passes.
        checks_first: whether the first passes are compared while they run.
        checks_all: whether all passes are compared while they run.

    Attributes:
        is_paused: whether passes are not recorded now, as within ``fabric.join``.
        shared: the backward passes that synchronize gradients, which all ranks make.
        of_peers: the passes of sharded models, which the ranks make that gather parameters
            together.
    """

    def __init__(
        self,
        store: JobStore,
        bypass: BypassChecks,
        backward: Hooks,
        *,
        checks_first: bool,
        checks_all: bool,
    ) -> None:
        """Record nothing yet. :meth:`watch` adds the models."""
        self.is_paused = False
        self.shared = PassHistory("shared passes")
        self.of_peers = PassHistory("passes of peers")
        self._store = store
        self._bypass = bypass
        self._backward = backward
        self._checks_all = checks_all
        # Whether passes are compared while they run, and not only recorded.
        self._is_checking = checks_first or checks_all
        self._num_checked_backwards = 0
        self._num_models = 0
        # The number of each model, by its contract. It is the same on all ranks.
        self._numbers: WeakKeyDictionary[GradientContract, int] = WeakKeyDictionary()
        # The first model, which is recorded once there is a second one. None before it is set up.
        self._first_model: _FirstModel | None = None

    @property
    def histories(self) -> Collection[PassHistory]:
        """The histories that have passes."""
        return [history for history in (self.shared, self.of_peers) if history.count > 0]

    def watch(self, contract: GradientContract, forward: Hooks) -> None:
        """Record the passes of a model, from the setup of the second model on.

        A single model has no order to compare.

        Args:
            contract: the contract of the model.
            forward: the hooks around the model's forward pass.
        """
        has_collectives = contract.is_sharded or contract.needs_forward
        if self._bypass.world.world_size == 1 or not has_collectives:
            return
        self._num_models += 1
        self._numbers[contract] = self._num_models
        if self._num_models == 1:
            self._first_model = _FirstModel(ref(contract), ref(forward))
            return
        if self._num_models == 2:
            self._start_recording()
        self._record_passes(contract, forward)

    def _start_recording(self) -> None:
        """Begin to record passes, also those of the first model.

        Called at the setup of the second model. From now on, ``bypass`` reports backward passes to
        :meth:`_on_backward`, and :meth:`_after_pass` compares after each of them.
        """
        neighbors = frozenset(self._bypass.world.neighbours)
        # Neighbors that are peers compare all passes of sharded models, which include the shared
        # ones.
        self.of_peers.neighbors = self._bypass.peers
        self.shared.neighbors = neighbors - self._bypass.peers
        self._bypass.on_backward = self._on_backward
        self._backward.after.append(self._after_pass)
        first_model = self._first_model
        assert first_model is not None, "the first model comes before the second one"
        contract = first_model.contract()
        forward = first_model.forward()
        # Both are None if the user has dropped the first model.
        if contract is not None and forward is not None:
            self._record_passes(contract, forward)

    def _record_passes(self, contract: GradientContract, forward: Hooks) -> None:
        """Record the passes of a sharded model.

        Of another model, only backward passes are recorded. Its guard calls :meth:`_on_backward`.
        """
        if not contract.is_sharded:
            return
        if not self.of_peers.ranks:
            self.of_peers.ranks = tuple(sorted(contract.peers()))
        passes = _ShardedPasses(self, contract)
        forward.before.append(passes.before)
        forward.after.append(passes.after)

    def record(self, contract: GradientContract, kind: _Kind) -> None:
        """Record a pass before it runs, and compare it with the neighbors while passes are checked.

        The neighbors are the ranks before and after this one.

        Args:
            contract: the contract of the model.
            kind: the kind of the pass.

        Raises:
            UsageError: a neighbor makes another pass.
        """
        if self.is_paused:
            return
        text = f"{kind} of {contract.title} (set-up model {self._numbers[contract]})"
        # All ranks make a backward pass that synchronizes gradients. Only the ranks that gather
        # parameters together make the other passes of a sharded model in the same order.
        if kind is _Kind.BACKWARD:
            self.shared.add(text)
        if contract.is_sharded:
            self.of_peers.add(text)
        if not self._is_checking:
            return
        if kind is not _Kind.FORWARD:
            # After enough backward passes, check_after_pass() sets _is_checking to False.
            self._num_checked_backwards += 1
        # Published before this rank reads: of two ranks that make different passes, the one that
        # reads last sees the difference.
        self.shared.publish(self._store)
        self.of_peers.publish(self._store)
        self._compare()

    def check_after_pass(self, error: BaseException | None) -> None:
        """Compare the passes again, since a neighbor may have published another one in between.

        Called after each recorded pass. The neighbors are the ranks before and after this one.

        Args:
            error: the error that ended the pass, or None. If a neighbor has raised, the pass ends
                with an error of a lost connection.

        Raises:
            UsageError: a neighbor makes another pass.
        """
        # An error of fabric says already what is wrong.
        if not self._is_checking or self.is_paused or isinstance(error, FabricError):
            return
        if error is None:
            self._compare()
        else:
            # The rank that hosts the store may have ended. The error of the pass remains.
            with suppress(dist.DistError):
                self._compare()
        has_checked_enough = (
            self._num_checked_backwards >= _CHECKED_BACKWARDS
            or self.of_peers.count >= _MAX_CHECKED_PASSES
        )
        if has_checked_enough and not self._checks_all:
            self._is_checking = False

    def _on_backward(self, contract: GradientContract) -> None:
        """Record a backward pass that synchronizes gradients. Called by the guard of the model."""
        self.record(contract, _Kind.BACKWARD)

    def _after_pass(self, result: object, error: BaseException | None) -> None:
        """Compare the passes. ``Fabric.backward`` calls this after each backward pass."""
        self.check_after_pass(error)

    def _compare(self) -> None:
        """Raise a UsageError if a neighbor has made another pass in place of one of this rank."""
        rank = self._store.rank
        for history in self.histories:
            for difference in history.differences(self._store):
                raise UsageError(
                    f"{difference.text} on rank {rank}",
                    problem=f"rank {difference.neighbor} makes a {difference.text_of_neighbor} in "
                    "its place. Their collectives meet, and the models get the weights or "
                    "gradients of each other",
                    expected="the forward and backward passes of all models in the same order on "
                    "all ranks",
                    suggestion="no branch on the rank or on its data around model(...) and "
                    "fabric.backward(...)",
                )


class _ShardedPasses:
    """Records the passes of one sharded model.

    Args:
        order: gets the passes.
        contract: the contract of the model.
    """

    def __init__(self, order: PassOrder, contract: GradientContract) -> None:
        self._order = order
        self._contract = contract
        # torch's number of the latest backward pass that has reached the model.
        self._latest_backward = -1

    def before(self) -> None:
        """Record a forward pass. Called before each forward pass of the model."""
        self._order.record(self._contract, _Kind.FORWARD)

    def after(self, output: Any, error: BaseException | None) -> None:
        """Watch for the backward pass of an output. Called after each forward pass of the model."""
        self._order.check_after_pass(error)
        if error is not None or not torch.is_grad_enabled():
            return
        leaves, _ = flatten(output)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._on_gradient)

    def _on_gradient(self, grad: Tensor) -> None:
        """Record that a backward pass has reached the model. The hook of the outputs."""
        number = backward_number()
        if number == self._latest_backward:
            return  # another output of the model in the same pass
        self._latest_backward = number
        kind = _Kind.BACKWARD
        if not self._contract.synchronizes():
            kind = _Kind.BACKWARD_WITHOUT_SYNC
        self._order.record(self._contract, kind)

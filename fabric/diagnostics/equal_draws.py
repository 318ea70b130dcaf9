"""The check that data-parallel replicas draw different random numbers, and do different work."""

import json
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from fabric.diagnostics.digest import digests
from fabric.hooks import Hooks
from fabric.seed import WorkerStreams, stream_digests
from fabric.store import JobStore
from fabric.tree import flatten

__all__ = ["EqualDrawsCheck"]

_CHECKED_PASSES = 3  # training passes of each module, and backward passes
_COMPARED_REPLICAS = (0, 1)  # a mistake in the seeds shows in any two replicas


class _Loop(Protocol):
    """A loop over a set-up loader that is running.

    Attributes:
        worker_streams: the random streams that the user's ``worker_init_fn`` seeds, or None.
    """

    worker_streams: WorkerStreams | None


class _Draws(NamedTuple):
    """What a replica writes to the store after a forward pass.

    Attributes:
        replica: index of the replica.
        process: id of its process.
        streams: digests of the streams that numbers were drawn from, by name. Two replicas with
            equal digests draw the same numbers.
        outputs: digests of the outputs. Empty if the forward pass itself drew numbers.
    """

    replica: int
    process: int
    streams: dict[str, str]
    outputs: list[int]


# [Note: Equal draws]
# With one seed, all ranks draw the same dropout masks and the same noise, so that the job sees only
# as much randomness as a single process. Two replicas compare their random streams in the first
# training passes of each module. They draw the same numbers in two cases: the forward pass draws
# from equal streams, or numbers were drawn from equal streams since the pass before, and the
# outputs of both replicas are equal.
#
# [Note: Equal work]
# Without a set-up loader, nothing may divide the data: every rank then does the whole work, as with
# a graph that is one batch. Two replicas compare digests of the outputs of all modules, and of the
# losses, in the first backward passes. The losses alone do not tell: a loss of gathered embeddings
# is equal on all ranks.
#
# [Note: Equal workers]
# fabric gives the workers of a loader different streams on each rank. A `worker_init_fn` that seeds
# them by the id of the worker alone gives all ranks the same augmentations again. In the first
# backward passes, two replicas compare the streams that `worker_init_fn` has seeded, for the
# loaders whose loops are running then.
#
# The replicas compare through the store and never by a collective, as in `training_checks.py`. The
# replica that comes first writes its numbers, and the other replica warns if its numbers are equal.
class EqualDrawsCheck:
    """Warns if two replicas of the model draw the same random numbers, or do the same work.

    Only the first passes of replicas 0 and 1 are checked: a mistake shows in any two replicas.

    Args:
        store: the store in which the replicas compare their streams.
        replica: index of the data-parallel replica of this rank.
        loaders: the set-up loaders. Later ones are seen, too.
        loops: the loops over set-up loaders that are running now.
        backward: the hooks around backward passes.

    Attributes:
        has_warned: whether this replica has warned. One warning is enough.
    """

    def __init__(
        self,
        store: JobStore,
        replica: int,
        loaders: Collection[object],
        loops: Sequence[_Loop],
        backward: Hooks,
    ) -> None:
        """Add a function to the hooks around backward passes. :meth:`watch` adds others."""
        self.store = store
        self.replica = replica
        self.has_warned = False
        # The set-up loaders, to which others are added later, and the loops over them that run now.
        # A set-up loader divides the data, so the replicas then do different work.
        self._loaders = loaders
        self._loops = loops
        # The names of the loaders whose workers have been compared.
        self._compared_loaders: set[str] = set()
        # Digests from the first passes: of the outputs of all modules, and of the losses.
        self._outputs: list[int] = []
        self._losses: list[int] = []
        # The number of modules that were set up so far, also of those that are not checked.
        self._module_count = 0
        self._num_backward_passes = 0
        self._is_closed = False
        # The key is the Hooks of a module's forward pass. These hold the model, so the keys are
        # weak: the user may drop the model.
        self._passes: WeakKeyDictionary[Hooks, _TrainingPasses] = WeakKeyDictionary()
        self._backward = backward
        backward.after.append(self._after_backward)

    def watch(self, module: nn.Module, title: str, forward: Hooks) -> None:
        """Check the first training passes of a module.

        Args:
            module: the user's module.
            title: the class of the module, for the warning.
            forward: the hooks around its forward pass.
        """
        # All ranks set up their modules in the same order, so the number is the same on all ranks.
        number = self._module_count
        self._module_count += 1
        if self._is_closed or self.replica not in _COMPARED_REPLICAS:
            return
        passes = _TrainingPasses(self, module, title, key=f"equal draws/{number}")
        forward.before.append(passes.before)
        forward.after.append(passes.after)
        self._passes[forward] = passes

    def close(self) -> None:
        """Remove all hooks. Do not call this in a forward pass, which iterates over its hooks."""
        if self._is_closed:
            return
        self._is_closed = True
        self._backward.after.remove(self._after_backward)
        for forward, passes in self._passes.items():
            forward.before.remove(passes.before)
            forward.after.remove(passes.after)

    def record_output(self, output: Any) -> None:
        """Record the output of a training pass, unless a set-up loader divides the data."""
        if not self._loaders:
            self._outputs += digests(_tensors_in(output))

    def _after_backward(self, loss: Tensor, error: BaseException | None) -> None:
        """Compare the replicas, and end the check after enough passes.

        ``Fabric.backward`` calls this after each backward pass. Ranks of other replicas than those
        compared only count the passes.
        """
        self._num_backward_passes += 1
        is_compared = error is None and self.replica in _COMPARED_REPLICAS
        # A set-up loader divides the data, so the replicas do different work.
        if is_compared and not self._loaders:
            self._losses += digests([loss])
            self._compare_work()
        if is_compared:
            for loop in self._loops:
                if loop.worker_streams is not None:  # the loader has a worker_init_fn
                    self._compare_workers(loop.worker_streams)
        if self._num_backward_passes >= _CHECKED_PASSES or self.has_warned:
            self.close()

    def _compare_work(self) -> None:
        """Warn if the other replica has computed the same results in all first passes.

        Does nothing before the last checked pass.
        """
        # Training changes the loss from pass to pass. Losses that stay the same may be equal on
        # both replicas for any reason.
        has_trained = len(set(self._losses)) == _CHECKED_PASSES
        if not has_trained or not self._outputs or self.has_warned:
            return
        results = [*self._outputs, *self._losses]
        content = json.dumps([self.replica, results]).encode()
        # Writes these results if the other replica has written none. Returns those in the store.
        first_replica, first_results = json.loads(self.store.set_if_absent("equal work", content))
        # Ranks of one replica do the same work by design.
        if first_replica == self.replica or first_results != results:
            return
        self.has_warned = True
        lower_replica, higher_replica = _COMPARED_REPLICAS
        warnings.warn(
            f"replicas {lower_replica} and {higher_replica} of the model had the same outputs and "
            f"losses in the first {_CHECKED_PASSES} backward passes, and no loader is set up: each "
            "process does the whole work. Give each its part of the data, "
            "data[fabric.global_rank :: fabric.world_size] or fabric.setup_dataloaders(loader). "
            "Data that is one whole, such as a graph, needs one process, Fabric(devices=1); "
            "Fabric(check_training=False) if this is meant",
            # The line of fabric.backward(): past this method, _after_backward() and backward().
            stacklevel=4,
        )

    def _compare_workers(self, streams: WorkerStreams) -> None:
        """Warn if the other replica's workers have the same streams. See [Note: Equal workers].

        Args:
            streams: the streams that the ``worker_init_fn`` of a loader has seeded.
        """
        digests_of_streams = streams.digests()
        if streams.name in self._compared_loaders or not digests_of_streams:
            return
        self._compared_loaders.add(streams.name)
        content = json.dumps([self.replica, digests_of_streams]).encode()
        # Writes these digests if the other replica has written none. Returns those in the store.
        first = self.store.set_if_absent(f"equal workers/{streams.name}", content)
        first_replica, first_digests = json.loads(first)
        equal_names: list[str] = []
        for name, digest in digests_of_streams.items():
            if first_digests.get(name) == digest:
                equal_names.append(name)
        # Ranks of one replica load the same batches by design.
        if first_replica == self.replica or not equal_names:
            return
        self.has_warned = True
        lower_replica, higher_replica = _COMPARED_REPLICAS
        warnings.warn(
            f"the worker_init_fn of a DataLoader gives the first workers of replicas "
            f"{lower_replica} and {higher_replica} of the model the same random numbers "
            f"({', '.join(equal_names)}), as by seeds from the id of the worker alone: their "
            "augmentations are equal. Leave the seeding out, since torch and fabric seed python, "
            "numpy and torch in each worker, or use the seed torch.initial_seed() % 2**32; "
            "Fabric(check_training=False) if this is meant",
            # The line of fabric.backward(): past this method, _after_backward() and backward().
            stacklevel=4,
        )


class _TrainingPasses:
    """The first training passes of one module, in which two replicas compare their random draws.

    A *stream* is a generator of random numbers, such as torch's. It has drawn numbers if its digest
    has changed.

    Args:
        check: the check of all modules.
        module: the user's module.
        title: the class of the module.
        key: identifies the module in the store. It is the same on all ranks.
    """

    def __init__(self, check: EqualDrawsCheck, module: nn.Module, title: str, key: str) -> None:
        self._check = check
        # A weak reference, since the check holds this object, and the user may drop the model.
        self._module = ref(module)
        self._title = title
        self._key = key
        self._count = 0
        # The streams before the current pass. None if the pass is not checked.
        self._streams_before: dict[str, str] | None = None
        # The streams at the end of the previous pass. None before the first pass.
        self._streams_of_previous: dict[str, str] | None = None

    def before(self) -> None:
        """Record the streams before a training pass. Called before each forward pass."""
        self._streams_before = None  # stays None if this pass is not checked
        module = self._module()
        is_checked = self._count < _CHECKED_PASSES and not self._check.has_warned
        is_training = module is not None and module.training and torch.is_grad_enabled()
        if is_checked and is_training:
            self._streams_before = stream_digests()

    def after(self, output: Any, error: BaseException | None) -> None:
        """Compare what was drawn with the other replica. Called after each forward pass.

        If only code between the passes has drawn, such as code that adds noise to the batch, the
        outputs are compared, too: only equal outputs show that the passes have used the numbers.
        """
        streams_before = self._streams_before  # before() sets it, if it checks this pass
        self._streams_before = None
        if streams_before is None or error is not None:
            return
        self._count += 1
        self._check.record_output(output)
        streams = stream_digests()
        drawn_inside = _changed(streams_before, streams)
        drawn_outside: dict[str, str] = {}
        if self._streams_of_previous is not None:
            drawn_outside = _changed(self._streams_of_previous, streams_before)
        self._streams_of_previous = streams
        if drawn_inside:
            self._compare(drawn_inside, outputs=[])
        elif drawn_outside:
            tensors = _tensors_in(output)
            if tensors:
                self._compare(drawn_outside, outputs=digests(tensors))

    def _compare(self, streams: dict[str, str], outputs: list[int]) -> None:
        """Warn if the other replica has drawn the same numbers in this pass.

        Args:
            streams: the streams that numbers were drawn from, by name: the digest of each stream
                before its first number was drawn.
            outputs: the digests of the outputs, if the numbers were drawn outside of the pass.
                Otherwise an empty list.
        """
        check = self._check
        draws = _Draws(check.replica, os.getpid(), streams, outputs)
        key = f"{self._key}/{self._count}"
        # Writes this replica's draws if no rank has written any. Returns those in the store.
        content = check.store.set_if_absent(key, json.dumps(draws).encode())
        first = _Draws(*json.loads(content))
        # Ranks of one replica draw the same numbers by design. Ranks that are threads of one
        # process share their streams.
        is_other_replica = first.replica != draws.replica and first.process != draws.process
        has_equal_draws = first.streams == streams and first.outputs == outputs
        if not is_other_replica or not has_equal_draws:
            return
        check.has_warned = True
        effect = "which gives them equal outputs"
        if not outputs:
            effect = "such as dropout masks, in a forward pass"
        first_replica, second_replica = _COMPARED_REPLICAS
        warnings.warn(
            f"training pass {self._count} of {self._title}: replicas {first_replica} and "
            f"{second_replica} of the model draw the same random numbers ({', '.join(streams)}), "
            f"{effect}. For different ones, write "
            'fabric.seed_everything(seed, per_rank="after_setup") before the model is built; '
            "Fabric(check_training=False) if this is meant",
            # The line of the forward pass: past this method, after() and FabricModule.__call__.
            stacklevel=4,
        )


def _tensors_in(output: Any) -> list[Tensor]:
    """Return the tensors in an output, except sparse and nested ones, which have no digest."""
    leaves, _ = flatten(output)
    tensors: list[Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
            tensors.append(leaf)
    return tensors


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Return the streams whose digest has changed, with their digests in ``before``."""
    changed: dict[str, str] = {}
    for name, digest in before.items():
        if after.get(name) != digest:
            changed[name] = digest
    return changed

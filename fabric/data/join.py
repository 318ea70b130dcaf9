"""Loops in which ranks may have different numbers of batches; ``fabric.join``.

torch's ``Join`` makes the ranks without batches take part in the collectives of the other ranks.
This file checks that these ranks can do so, and it makes optimizers and the loss scaler equal on
all ranks at the end, which torch does only for modules.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from fabric.collectives import all_reduce, broadcast
from fabric.communicators import Collective, Communicator, Reduce
from fabric.diagnostics.bypass import BypassChecks, BypassGuard
from fabric.diagnostics.recorder import JOB, Entry, FlightRecorder
from fabric.diagnostics.uneven_inputs import UnevenInputDetector
from fabric.errors import UsageError

__all__ = ["JoinedPasses", "Stateful", "follow_last_rank"]


class Stateful(Protocol):
    """An object with a state, such as an optimizer."""

    def state_dict(self) -> Any:
        """Return the state."""
        ...

    def load_state_dict(self, state: Any) -> object:
        """Load a state."""
        ...


class JoinedPasses:
    """The forward passes of joined modules on this rank: counted, and checked for their order.

    Args:
        guards: the guards of the joined modules, in the order of the call. A guard watches the
            passes of one module.
        rank: rank of this process.

    Attributes:
        forward_count: how many forward passes this rank has made.
    """

    def __init__(self, guards: Sequence[BypassGuard], rank: int) -> None:
        """Start the count at 0. The session calls it at the start of ``fabric.join``."""
        self.forward_count = 0
        self._guards = guards
        self._rank = rank

    @contextmanager
    def checked(
        self, bypass: BypassChecks, recorder: FlightRecorder, detector: UnevenInputDetector
    ) -> Iterator[None]:
        """Check forward passes and collectives in the block, which is the body of ``fabric.join``.

        Args:
            bypass: calls :meth:`_on_forward` at each forward pass.
            recorder: calls :meth:`_refuse_collective` at each collective of fabric. The recorder's
                ``phase_checks`` check that all ranks begin a phase together, such as a forward
                pass. They are off in the block, since some ranks make more passes than others.
            detector: raises if ranks take different numbers of steps. Off in the block.

        Raises:
            UsageError: another block of ``fabric.join`` is open.
        """
        # Only fabric.join pauses the detector.
        is_inside_join = detector.is_paused
        if is_inside_join:
            raise UsageError(
                "fabric.join inside of fabric.join", suggestion="with fabric.join([first, second]):"
            )
        phase_checks = recorder.phase_checks
        recorder.phase_checks = ()
        # The first check that fails raises. This check comes first, since its error names the
        # block.
        recorder.checks = (self._refuse_collective, *recorder.checks)
        bypass.on_forward.append(self._on_forward)
        try:
            with detector.paused():
                yield
        finally:
            bypass.on_forward.remove(self._on_forward)
            # The earlier tuple is not put back: the detector may have added a check in the block.
            checks = [check for check in recorder.checks if check != self._refuse_collective]
            recorder.checks = tuple(checks)
            # These are set once, when the job starts, so nothing has changed them in the block.
            recorder.phase_checks = phase_checks

    def _refuse_collective(self, entry: Entry, collective: Collective) -> None:
        """Raise a UsageError for a collective over all ranks.

        The recorder calls this check before a collective in the block, with its entry. A rank that
        has no batches left would not take part in the collective, whichever it is.
        """
        if entry.group == JOB:
            raise UsageError(
                f"a collective over all ranks inside of fabric.join on rank {self._rank}",
                problem="ranks without batches do not take part in the collective",
                expected='the collective after the block; or uneven="longest"',
            )

    def _on_forward(self, guard: BypassGuard) -> None:
        """Raise a UsageError unless the joined modules run in the order of ``fabric.join``.

        A rank without batches issues, in place of each batch, the collectives of a forward and a
        backward pass of the first module, then of the second, and so on. The other ranks have to
        run their modules in this order. Otherwise collectives of different modules would be
        matched.

        Called before each forward pass of a guarded module in the block.

        Args:
            guard: the guard of the module that runs.

        Raises:
            UsageError: the pass is out of order, or without gradients.
        """
        if guard not in self._guards:
            return
        # The index of the module whose turn it is. Each batch runs all modules in their order.
        turn = self.forward_count % len(self._guards)
        expected = self._guards[turn]
        # At turn 0 this is index -1: the last module, whose backward pass ends the previous batch.
        previous = self._guards[turn - 1]
        problem = None
        if not torch.is_grad_enabled():
            problem = (
                "the pass is without gradients, and ranks that have no batches would wait for its "
                "backward pass"
            )
        elif previous.awaits_backward:
            problem = f"the backward pass of {previous.contract.title} has not been made"
        elif guard is not expected:
            problem = f"the next module is {expected.contract.title}"
        if problem is not None:
            raise UsageError(
                f"a forward pass of {guard.contract.title} in fabric.join on rank {self._rank}",
                problem,
                expected="for each batch a forward and a backward pass of each joined module, in "
                "the order of fabric.join",
                suggestion="model.module(x), or the end of the with block, for a pass without "
                "gradients",
            )
        self.forward_count += 1


def follow_last_rank(
    communicator: Communicator, device: torch.device, passes: int, objects: Sequence[Stateful]
) -> None:
    """Load the states of the rank that stepped last, at the end of ``fabric.join``. Collective.

    A rank that has run out of batches no longer steps its optimizers. torch's ``Join`` copies the
    modules from the rank that ran out last. This function copies the states of other objects.

    Args:
        communicator: all ranks.
        device: this process's device.
        passes: how many forward passes of joined modules this rank has made.
        objects: the optimizers of the joined modules, and the loss scaler if there is one. Their
            order is the same on all ranks.
    """
    # The source is the rank that has made the most passes; of several, the highest rank. The number
    # packs both values, so that one maximum finds the source.
    passes_and_rank = passes * communicator.size + communicator.rank
    highest = all_reduce(communicator, passes_and_rank, Reduce.MAX)
    source = highest % communicator.size  # unpacks the rank
    states = [stateful.state_dict() for stateful in objects]
    states = broadcast(communicator, states, source, device)
    if communicator.rank != source:
        for stateful, state in zip(objects, states, strict=True):
            stateful.load_state_dict(state)

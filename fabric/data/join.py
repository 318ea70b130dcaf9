"""Loops in which ranks may have different numbers of batches; ``fabric.join``.

torch's ``Join`` has the ranks without batches answer the collectives of the others. This file
checks that they can, and keeps what torch does not know equal on all ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from fabric.collectives import all_reduce, broadcast
from fabric.communicators import Collective, Communicator, Reduce
from fabric.contract import GradientContract
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
        guards: the guards of the joined modules, in the order of the call.
        rank: rank of this process.

    Attributes:
        number: how many forward passes this rank has made.
    """

    def __init__(self, guards: Sequence[BypassGuard], rank: int) -> None:
        self.number = 0
        self._guards = guards
        self._rank = rank

    @contextmanager
    def checked(
        self, bypass: BypassChecks, recorder: FlightRecorder, detector: UnevenInputDetector
    ) -> Iterator[None]:
        """Check forward passes and collectives in the block.

        Args:
            bypass: reports forward passes.
            recorder: reports collectives. Its checks of phases, which all ranks must start
                together, are off in the block.
            detector: off in the block, in which ranks may take different numbers of steps.

        Raises:
            UsageError: another block is open.
        """
        if detector.is_paused:
            raise UsageError(
                "fabric.join inside of fabric.join", suggestion="with fabric.join([first, second]):"
            )
        phase_checks = recorder.phase_checks
        recorder.phase_checks = ()
        recorder.checks = (self._refuse_collective, *recorder.checks)
        bypass.on_forward.append(self._on_forward)
        try:
            with detector.paused():
                yield
        finally:
            bypass.on_forward.remove(self._on_forward)
            # The detector may have added a check of its own in the meantime.
            checks = [check for check in recorder.checks if check != self._refuse_collective]
            recorder.checks = tuple(checks)
            recorder.phase_checks = phase_checks

    def _refuse_collective(self, entry: Entry, collective: Collective) -> None:
        if entry.group == JOB:
            raise UsageError(
                f"a collective over all ranks inside of fabric.join on rank {self._rank}",
                problem="a rank without batches takes no part",
                expected='it after the block; or uneven="longest"',
            )

    def _on_forward(self, contract: GradientContract, guard: BypassGuard | None = None) -> None:
        """Raise unless joined modules run in the order in which ranks without batches shadow them.

        Those ranks issue, module by module, the collectives of a forward and a backward pass. In
        another order, collectives of different modules would be matched.
        """
        if guard is None or guard not in self._guards:
            return
        turn = self.number % len(self._guards)
        previous = self._guards[turn - 1]
        expected = self._guards[turn]
        if not torch.is_grad_enabled():
            problem = "it is without gradients, and ranks that have no batches would wait for them"
        elif previous.awaits_backward:
            problem = f"the backward pass of {previous.contract.title} has not been made"
        elif guard is not expected:
            problem = f"the next one is {expected.contract.title}"
        else:
            self.number += 1
            return
        raise UsageError(
            f"a forward pass of {guard.contract.title} in fabric.join on rank {self._rank}",
            problem,
            expected="for each batch a forward and a backward pass of each joined module, in the "
            "order of fabric.join",
            suggestion="model.module(x), or the end of the with block, for a pass without "
            "gradients",
        )


def follow_last_rank(
    communicator: Communicator, device: torch.device, passes: int, objects: Sequence[Stateful]
) -> None:
    """Load the states of the rank that stepped last. Collective.

    torch does the same for the modules.

    Args:
        communicator: all ranks.
        device: this process's device.
        passes: how many forward passes of joined modules this rank has made.
        objects: the optimizers of the joined modules, and the loss scaler if there is one.
    """
    # The source is the last of the ranks that have made the most passes.
    last = all_reduce(communicator, passes * communicator.size + communicator.rank, Reduce.MAX)
    source = last % communicator.size
    states = [stateful.state_dict() for stateful in objects]
    states = broadcast(communicator, states, source, device)
    if communicator.rank != source:
        for stateful, state in zip(objects, states, strict=True):
            stateful.load_state_dict(state)

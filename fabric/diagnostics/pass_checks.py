"""Checked mode's comparison of the forward and backward passes that the ranks start."""

from collections.abc import Callable
from functools import partial

import torch

from fabric.contract import GradientContract
from fabric.diagnostics.recorder import FlightRecorder
from fabric.hooks import Hooks

__all__ = ["PassChecks"]


class PassChecks:
    """Compares the ranks at the start of each pass in which torch's collectives need all ranks.

    Without the comparison, a rank that runs such a pass alone waits in a collective of torch.

    Args:
        recorder: compares the phases of the ranks, by its ``phase_checks``.
        backward: the hooks around backward passes. The comparison is added to them.
    """

    def __init__(self, recorder: FlightRecorder, backward: Hooks) -> None:
        self._recorder = recorder
        # Whether all ranks must run the next backward pass: the first one after a forward pass with
        # gradients that all ranks had to run.
        self._is_backward_shared = False
        backward.before.append(self._before_backward)

    def watch(self, contract: GradientContract, forward: Hooks) -> None:
        """Compare the forward passes of a module from now on.

        Args:
            contract: the contract of the module.
            forward: the hooks around the module's forward pass. The comparison is added to them.
        """
        before_forward = partial(
            self._before_forward,
            title=contract.title,
            is_sharded=contract.is_sharded,
            synchronizes=contract.synchronizes,
        )
        forward.before.append(before_forward)

    def _before_forward(
        self, title: str, is_sharded: bool, synchronizes: Callable[[], bool]
    ) -> None:
        """Compare the ranks before a forward pass, if all ranks must run the pass.

        All ranks must run the forward pass of a sharded module, and a forward pass after which the
        backward pass synchronizes gradients.

        Args:
            title: the class of the module.
            is_sharded: whether the module's parameters are sharded.
            synchronizes: returns whether a backward pass would synchronize gradients now.

        Raises:
            CollectiveMismatchError: a rank starts another pass, makes another call, or ends.
        """
        has_gradients = torch.is_grad_enabled()
        is_shared = is_sharded or (has_gradients and synchronizes())
        if not is_shared:
            return
        if has_gradients:
            self._is_backward_shared = True
        self._recorder.check_phase(f"forward of {title}")

    def _before_backward(self) -> None:
        """Compare the ranks before a backward pass, if all ranks must run the pass.

        Raises:
            CollectiveMismatchError: a rank makes another call, or ends.
        """
        is_shared = self._is_backward_shared
        # Reset first, since the comparison may raise.
        self._is_backward_shared = False
        if is_shared:
            self._recorder.check_phase("backward")

"""Checked mode's comparison of the forward and backward passes that the ranks start."""

from collections.abc import Callable
from functools import partial

import torch

from fabric.contract import GradientContract
from fabric.diagnostics.recorder import FlightRecorder
from fabric.hooks import Hooks

__all__ = ["PassChecks"]


class PassChecks:
    """Compares the ranks before each forward or backward pass that all ranks must run.

    In such a pass, torch issues collectives. Without the comparison, a rank that runs the pass
    alone waits in a collective of torch.

    Args:
        recorder: compares the phases of the ranks, by its ``phase_checks``.
        backward: the hooks around backward passes. The comparison is added to them.
    """

    def __init__(self, recorder: FlightRecorder, backward: Hooks) -> None:
        self._recorder = recorder
        # Whether all ranks must run the next backward pass: since the latest one, all ranks had to
        # run a forward pass with gradients.
        self._must_all_run_backward = False
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

        All ranks must run each forward pass of a sharded module, which gathers parameters. They
        must also run a forward pass after which the backward pass synchronizes gradients.

        Args:
            title: the class of the module.
            is_sharded: whether the module's parameters are sharded.
            synchronizes: returns whether a backward pass would synchronize gradients now.

        Raises:
            CollectiveMismatchError: a rank starts another pass, makes another call, or ends.
        """
        has_gradients = torch.is_grad_enabled()
        must_all_run = is_sharded or (has_gradients and synchronizes())
        if not must_all_run:
            return
        if has_gradients:
            self._must_all_run_backward = True
        self._recorder.check_phase(f"forward of {title}")

    def _before_backward(self) -> None:
        """Compare the ranks before a backward pass, if all ranks must run the pass.

        Raises:
            CollectiveMismatchError: a rank makes another call, or ends.
        """
        must_all_run = self._must_all_run_backward
        # The attribute is reset first, since the comparison may raise.
        self._must_all_run_backward = False
        if must_all_run:
            self._recorder.check_phase("backward")

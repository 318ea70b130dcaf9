"""Whether a rank has been asked by SIGTERM to save and leave."""

import signal
import threading
from types import FrameType
from typing import Any

from fabric.errors import UsageError
from fabric.launchers.rank import ControlThread
from fabric.launchers.signals import RaiseOnce
from fabric.world import World

__all__ = ["StopRequest"]


class StopRequest:
    """Notes SIGTERM from the first question on, instead of letting it raise. A handler of the user is still called.

    Args:
        world: the place of this process.
    """

    def __init__(self, world: World) -> None:
        self._rank = world.rank
        self._received = False
        self._previous: Any = None
        self._installed = False

    def received(self) -> bool:
        """Whether SIGTERM has come since this was first asked.

        Raises:
            UsageError: first asked in another thread than the main one, which alone may say what a signal means.
        """
        if not self._installed:
            self._install()
        return self._received

    def close(self) -> None:
        """Give SIGTERM back the meaning that it had."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._note:
            # None: installed from C, which Python cannot put back.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
        self._installed = False

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                f"fabric.should_stop on rank {self._rank}",
                f"it was first asked in the thread {threading.current_thread().name!r}",
                "the main thread, which alone may install the handler of a signal",
                "should_stop in the training loop of the main thread",
            )
        self._previous = signal.signal(signal.SIGTERM, self._note)
        self._installed = True
        control = ControlThread.of_this_process()
        if control is not None:
            control.send("saving")

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        if callable(self._previous) and not isinstance(self._previous, RaiseOnce):
            self._previous(number, frame)

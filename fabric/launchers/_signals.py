"""What SIGTERM and SIGINT mean in a rank: run the ``finally`` blocks, or note that it is time to save and leave."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from fabric.errors import UsageError
from fabric.launchers._failures import RunDirectory
from fabric.world import World

__all__ = ["StopRequest", "leave_in_time", "raise_on_signals"]

_GRACE = 3.0  # seconds for ``finally`` blocks


class _RaiseOnce:
    """Lets the first signal raise, so that ``finally`` blocks run, and ignores the ones that follow.

    Ctrl-C in a terminal reaches a rank twice, from the terminal and from the parent, and the second would interrupt
    the ``finally`` block.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise self._error


def raise_on_signals(interruptible: bool) -> None:
    """Let SIGTERM and, if ``interruptible``, SIGINT raise in the main thread; a handler of the user stays."""
    if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(signal.SIGTERM, _RaiseOnce(SystemExit(128 + signal.SIGTERM)))
    if interruptible and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN):
        signal.signal(signal.SIGINT, _RaiseOnce(KeyboardInterrupt()))


def leave_in_time() -> None:
    """Let this rank end some seconds after a signal of :func:`raise_on_signals`, whatever the main thread waits for.

    For ranks whose launcher is torch's: it would wait for half a minute. While C++ code waits Python runs no handler,
    but the interpreter tells a pipe.
    """
    told, telling = os.pipe()
    os.set_blocking(telling, False)
    signal.set_wakeup_fd(telling, warn_on_full_buffer=False)

    def watch() -> None:
        while True:
            [number] = os.read(told, 1)
            ours = isinstance(signal.getsignal(number), _RaiseOnce) or signal.getsignal(number) is signal.SIG_IGN
            if number in (signal.SIGTERM, signal.SIGINT) and ours:
                # The kernel may have told another thread, and then the main one sleeps on; ignored once it has raised.
                signal.pthread_kill(threading.main_thread().ident or 0, number)
                time.sleep(_GRACE)
                os._exit(128 + number)

    threading.Thread(target=watch, name="fabric-signals", daemon=True).start()


class StopRequest:
    """Whether this process has been asked by SIGTERM to save and leave.

    From the first question on SIGTERM no longer raises. A handler that the user had installed is still called.

    Args:
        world: the place of this process.
    """

    def __init__(self, world: World) -> None:
        self._world = world
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
                f"fabric.should_stop on rank {self._world.rank}",
                f"it was first asked in the thread {threading.current_thread().name!r}",
                "the main thread, which alone may install the handler of a signal",
                "should_stop in the training loop of the main thread",
            )
        self._previous = signal.signal(signal.SIGTERM, self._note)
        self._installed = True
        if self._world.store is not None:
            RunDirectory.of_store(self._world.store).say_saving(self._world.rank)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        if callable(self._previous) and not isinstance(self._previous, _RaiseOnce):
            self._previous(number, frame)

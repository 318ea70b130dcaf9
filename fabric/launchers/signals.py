"""Lets SIGTERM and SIGINT run the ``finally`` blocks of a rank."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

__all__ = ["RaiseOnce", "ignore_signals", "raise_on_signals"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.1  # seconds until the main thread is woken again; each is twice as long


class RaiseOnce:
    """Lets the first signal raise, so that ``finally`` blocks run, and ignores the ones that follow.

    Ctrl-C in a terminal reaches a rank twice, from the terminal and from the parent, and the second would interrupt
    the ``finally`` block.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Raise, this once."""
        signal.signal(number, signal.SIG_IGN)
        raise self._error


def raise_on_signals(interruptible: bool, acted: Callable[[int], object]) -> None:
    """Let SIGTERM and, if ``interruptible``, SIGINT raise in the main thread, which is this one.

    ``acted`` is called with the number of a signal once it has raised, or is left to another handler.
    """
    signal.signal(signal.SIGTERM, RaiseOnce(SystemExit(128 + signal.SIGTERM)))
    if interruptible:
        signal.signal(signal.SIGINT, RaiseOnce(KeyboardInterrupt()))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the supervisor blocked it
    # A signal that comes between the interpreter's last look and the start of a wait, or is taken by another thread,
    # interrupts nothing: the main thread would sleep on, and its ``finally`` blocks never run.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    # A process that this one forks would write of its own signals here.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    main = threading.main_thread().ident
    assert main is not None

    def wake() -> None:
        while received := os.read(reading, 1):
            time.sleep(pause := _FIRST_PAUSE)
            while isinstance(signal.getsignal(received[0]), RaiseOnce):
                signal.pthread_kill(main, received[0])
                time.sleep(pause := min(2 * pause, _LONGEST_PAUSE))
            acted(received[0])

    threading.Thread(target=wake, name="fabric-signals", daemon=True).start()


def ignore_signals() -> None:
    """Ignore signals that would have raised: there is no ``finally`` left that they could run."""
    for number in (signal.SIGTERM, signal.SIGINT):
        if isinstance(signal.getsignal(number), RaiseOnce):
            signal.signal(number, signal.SIG_IGN)

"""What SIGTERM and SIGINT mean in a rank: run the ``finally`` blocks, or note that it is time to save and leave.

And what SIGUSR1 means in the process that launches.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from fabric.errors import UsageError
from fabric.launchers._failures import RunDirectory
from fabric.world import World

__all__ = ["ReportRequests", "StopRequest", "raise_on_signals"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.1  # seconds until the main thread is told again; each is twice as long


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


def raise_on_signals(interruptible: bool, heard: Callable[[int], object]) -> None:
    """Let SIGTERM and, if ``interruptible``, SIGINT raise in the main thread; a handler of the user stays.

    ``heard`` is called with the number of a signal once it has raised, or is left to another handler.
    """
    if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(signal.SIGTERM, _RaiseOnce(SystemExit(128 + signal.SIGTERM)))
    if interruptible and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN):
        signal.signal(signal.SIGINT, _RaiseOnce(KeyboardInterrupt()))
    _keep_waking(heard)


def _keep_waking(heard: Callable[[int], object]) -> None:
    """Wake the main thread until it has acted on a signal.

    A signal that comes between the interpreter's last look and the start of a wait, or is taken by another thread,
    interrupts nothing: the main thread would sleep on, and its ``finally`` blocks never run.
    """
    told, telling = os.pipe()
    os.set_blocking(telling, False)
    signal.set_wakeup_fd(telling, warn_on_full_buffer=False)
    # A process that this one forks would tell of its own signals here.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    main = threading.main_thread().ident
    assert main is not None

    def watch() -> None:
        while received := os.read(told, 1):
            time.sleep(pause := _FIRST_PAUSE)
            while isinstance(signal.getsignal(received[0]), _RaiseOnce):
                signal.pthread_kill(main, received[0])
                time.sleep(pause := min(2 * pause, _LONGEST_PAUSE))
            heard(received[0])

    threading.Thread(target=watch, name="fabric-signals", daemon=True).start()


class ReportRequests:
    """From entry to exit SIGUSR1 to this process, which launches, asks the ranks to print what each of them is doing.

    Where a handler of the user is installed, and in another thread than the main one, it keeps the meaning it has.

    Args:
        directories: where the ranks will see it.
    """

    def __init__(self, directories: Callable[[], Iterable[RunDirectory]]) -> None:
        self._directories = directories
        self._installed = False

    def __enter__(self) -> "ReportRequests":
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, self._ask)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()

    def forget(self) -> None:
        """Give the signal back its meaning: a forked rank has inherited ours."""
        if self._installed:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        self._installed = False

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        for directory in self._directories():
            directory.ask_for_report()


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
        directory = RunDirectory.of_world(self._world)
        if directory is not None:
            directory.say_saving(self._world.rank)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        if callable(self._previous) and not isinstance(self._previous, _RaiseOnce):
            self._previous(number, frame)

"""What a failing rank leaves behind, and the private directory in which it does so."""

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from fabric.errors import CollectiveMismatchError
from fabric.world import World

__all__ = ["Failure", "FailureRecorder", "RunDirectory", "attempt_directory", "is_consequence"]

_LONGEST_TEXT = 20_000  # characters; a message may hold a whole tensor, and would push the cause off the screen

# How gloo, the stores and NCCL word it when another process has gone; they raise a plain RuntimeError.
_WORDS_OF_DESERTION = ("closed by peer", "reset by peer")
_WORDS_OF_A_VICTIM = (*_WORDS_OF_DESERTION, "broken pipe", "connection refused", "timed out", "timeout")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The error of one rank.

    Attributes:
        rank: global rank.
        time: when it was noticed, seconds on the system-wide monotonic clock.
        consequence: whether it looks like the result of another rank's failure (a lost connection, a timeout).
        deserted: whether it says that another process has closed its connection, be it by ending well.
        pending: whether the rank was still handling it (in a ``finally``, say) when it was asked.
        text: the traceback, as the interpreter would have printed it.
    """

    rank: int
    time: float
    consequence: bool = False
    deserted: bool = False
    pending: bool = False
    text: str = ""


@dataclass(frozen=True)
class RunDirectory:
    """The private directory of one job: its rendezvous file and the errors of its ranks.

    Attributes:
        path: where it is; mode 0700.
    """

    path: Path

    @classmethod
    def create(cls) -> "RunDirectory":
        """Make a new one in the directory for temporary files."""
        return cls(Path(tempfile.mkdtemp(prefix="fabric-")))

    @classmethod
    def of_store(cls, store: str) -> "RunDirectory":
        """The one that holds this store, which is ``file:///path``."""
        return cls(Path(store.removeprefix("file://")).parent)

    @classmethod
    def of_world(cls, world: World) -> "RunDirectory | None":
        """The one in which this process leaves notes for a launcher of fabric; None under any other."""
        if world.store is not None:
            return cls.of_store(world.store)
        return None if world.directory is None else cls(Path(world.directory))

    @property
    def store(self) -> str:
        """Where the ranks meet: ``file:///path`` of a :class:`torch.distributed.FileStore`."""
        return f"file://{self.path / 'store'}"

    def ask_for_report(self) -> None:
        """Ask the ranks to print what each of them is doing."""
        with contextlib.suppress(FileNotFoundError), open(self.path / "reports-asked", "ab") as file:
            file.write(b"?")

    def reports_asked(self) -> int:
        """How often that has been asked."""
        try:
            return os.stat(self.path / "reports-asked").st_size
        except FileNotFoundError:
            return 0

    def crash_file(self, rank: int) -> Path:
        """Where the interpreter of this rank writes the stack of a fatal signal."""
        return self.path / f"crash-{rank}"

    def say_listening(self, rank: int) -> None:
        """Note that this rank ends well when it gets a signal."""
        (self.path / f"listening-{rank}").touch()

    def is_listening(self, rank: int) -> bool:
        """Whether this rank has come so far."""
        return (self.path / f"listening-{rank}").exists()

    def say_heard(self, rank: int, number: int) -> None:
        """Note that this rank has acted on a signal."""
        # Without a note the launcher waits less long; an error would end the thread that wakes for the next signal.
        with contextlib.suppress(OSError):
            (self.path / f"heard-{rank}-{number}").touch()

    def has_heard(self, rank: int, number: int) -> bool:
        """Whether this rank has; one with a handler of the user's counts as soon as the signal is there."""
        return (self.path / f"heard-{rank}-{number}").exists()

    def say_finished(self, rank: int, process: int) -> None:
        """Note that this rank has come to the end of its script, unless another process than the rank's says so.

        A process that the script has forked comes to the same end, and inherits the exit handlers.
        """
        if os.getpid() == process:
            (self.path / f"finished-{rank}").touch()

    def finished(self) -> list[int]:
        """The ranks that have."""
        return sorted(int(path.name.removeprefix("finished-")) for path in self.path.glob("finished-*"))

    def say_saving(self, rank: int) -> None:
        """Note that this rank takes SIGTERM for a request to save and leave."""
        (self.path / f"saving-{rank}").touch()

    def is_saving(self, rank: int) -> bool:
        """Whether this rank does."""
        return (self.path / f"saving-{rank}").exists()

    def ask(self) -> None:
        """Ask the ranks for the errors that they are handling; for those that have no lifeline."""
        (self.path / "asked").touch()

    def is_asked(self) -> bool:
        """Whether they have been."""
        return (self.path / "asked").exists()

    def write(self, failure: Failure) -> None:
        """Keep a failure; whoever reads sees all of it or nothing."""
        partial = self.path / f"failure-{failure.rank}.partial"
        partial.write_text(json.dumps(asdict(failure)), encoding="utf-8", errors="backslashreplace")
        os.replace(partial, self._failure_file(failure.rank))

    def read(self, rank: int) -> Failure | None:
        """What this rank wrote, if it did."""
        try:
            return Failure(**json.loads(self._failure_file(rank).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def read_crash(self, rank: int) -> str:
        """The stack of the fatal signal that ended this rank, or an empty text."""
        try:
            return self.crash_file(rank).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def remove(self) -> None:
        """Remove it; a rank that is being killed may race for its own files, hence the tolerance."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _failure_file(self, rank: int) -> Path:
        return self.path / f"failure-{rank}.json"


def attempt_directory(directory: Path, number: int) -> RunDirectory:
    """The place of the ranks of one attempt: a FileStore cannot be used twice, and old errors would be told again."""
    return RunDirectory(directory / f"attempt-{number}")


class FailureRecorder:
    """Writes the error of this rank where the launching process will look for it."""

    def __init__(self, directory: RunDirectory, rank: int) -> None:
        self.directory = directory
        self._rank = rank
        self._lock = threading.Lock()

    def record(self, error: BaseException) -> None:
        """Keep the error that ends this rank."""
        with self._lock:
            self.directory.write(self._failure(error, pending=False))

    def record_pending(self) -> None:
        """Keep the error that the main thread is handling just now, unless one has been kept.

        A rank whose ``finally`` waits for the others has not come round to telling its error yet.
        """
        active = sys._current_exceptions().get(threading.main_thread().ident or 0)
        error = active[1] if isinstance(active, tuple) else active  # a triple until Python 3.12
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            return
        with self._lock:
            if self.directory.read(self._rank) is None:
                self.directory.write(self._failure(error, pending=True))

    def _failure(self, error: BaseException, *, pending: bool) -> Failure:
        return Failure(
            rank=self._rank,
            time=time.monotonic(),
            consequence=is_consequence(error),
            deserted=any(words in str(error).lower() for words in _WORDS_OF_DESERTION),
            pending=pending,
            text=_shortened("".join(traceback.format_exception(error))),
        )


def is_consequence(error: BaseException) -> bool:
    """Whether an error began as a lost connection, a timeout or a missing rank: usually another rank's failure."""
    *_, origin = _chain(error)
    if isinstance(origin, (ConnectionError, TimeoutError, CollectiveMismatchError)):
        return True
    # Without torch.distributed in the process, none of its errors can be here.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(origin, (distributed.DistNetworkError, distributed.DistStoreError)):
        return True
    words = str(origin).lower()
    return isinstance(origin, RuntimeError) and any(word in words for word in _WORDS_OF_A_VICTIM)


def _shortened(text: str) -> str:
    """Its beginning and its end."""
    left_out = len(text) - _LONGEST_TEXT
    if left_out <= 0:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, then what it was raised from or while handling, back to the first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)

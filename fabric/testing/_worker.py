"""What a process of a pool does: meet the others, then make one call after another until the pool is closed."""

import faulthandler
import pickle
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fabric._fabric import Fabric
from fabric.launchers._failures import RunDirectory, is_consequence
from fabric.launchers._transport import dump_result
from fabric.seed import seed_everything
from fabric.testing.base import own_part
from fabric.world import World

__all__ = ["THIS_FILE", "Reply", "pack_message", "serve", "stack_file", "unpack_message"]

THIS_FILE = __file__  # the frames of a rank from here on outwards are no user's


class Reply(NamedTuple):
    """What a rank answers to a call.

    Attributes:
        returned: whether the function returned.
        payload: the pickled result or error; empty for an error that does not pickle.
        did: for a sentence that begins with the rank.
        text: the traceback.
        consequence: whether the error looks like the result of another rank's failure.
        seconds: how long the function ran.
    """

    returned: bool
    payload: bytes
    did: str = "returned"
    text: str = ""
    consequence: bool = False
    seconds: float = 0.0


def stack_file(directory: RunDirectory, rank: int) -> Path:
    """Where a rank writes its stack when it gets SIGUSR1."""
    return directory.path / f"stack-{rank}"


def pack_message(call: bytes) -> bytes:
    """A pickled call with the module path of this moment, which test runners extend as they go."""
    return pickle.dumps((sys.path, call))


def unpack_message(message: bytes) -> tuple[Any, Any, Any]:
    """Function, positional and keyword arguments of a message, in the process that has to make the call."""
    path, call = pickle.loads(message)  # noqa: S301 (our own parent wrote it, on a pipe that nobody else holds)
    if path != sys.path:
        sys.path[:] = path
    return pickle.loads(call)  # noqa: S301 (likewise)


def serve(calls: Connection, fabric: Fabric, seat: World, directory: RunDirectory) -> NoReturn:
    """Be a rank of a pool: say that all ranks are connected, then answer each call."""
    # The handler is faulthandler's, in C, and so works when the main thread waits in a collective. The file stays open.
    stacks = open(stack_file(directory, seat.rank), "wb", buffering=0)  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    fabric._enter_rank(seat)
    calls.send_bytes(pickle.dumps(Reply(True, dump_result(None))))
    while True:
        try:
            message = calls.recv_bytes()
        except (EOFError, OSError):
            # The pool was closed. Nothing is worth a farewell to the other ranks, which leave as well.
            sys.exit(0)
        calls.send_bytes(pickle.dumps(_answer(fabric, seat.rank, message)))


def _answer(fabric: Fabric, rank: int, message: bytes) -> Reply:
    start = time.perf_counter()
    try:
        fn, args, kwargs = unpack_message(message)
        # Whatever was called before, a call draws the same numbers; a failing example could not be repeated otherwise.
        seed_everything(0)
        result = fn(fabric, *(own_part(arg, rank) for arg in args), **{k: own_part(v, rank) for k, v in kwargs.items()})
        return Reply(True, dump_result(result), seconds=time.perf_counter() - start)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 (whatever it is, the caller of run() gets it)
        return _complaint(error)


def _complaint(error: BaseException) -> Reply:
    trace = error.__traceback__
    # The first frame is ours, of no interest to the reader.
    error = error.with_traceback(trace.tb_next if trace else None)
    text = "".join(traceback.format_exception(error))
    did = "raised " + traceback.format_exception_only(error)[-1].partition("\n")[0]
    try:
        payload = dump_result(error)
    except Exception:  # noqa: BLE001 (an error that does not pickle goes as its text alone)
        payload = b""
    return Reply(False, payload, did, text, is_consequence(error))

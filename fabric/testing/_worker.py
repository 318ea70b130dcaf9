"""What a process of a pool does: meet the others, then make one call after another until the pool is closed."""

import faulthandler
import pickle
import signal
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from fabric._fabric import Fabric
from fabric.launchers._failures import RunDirectory
from fabric.launchers._transport import dump_result, has_cloudpickle, load_result
from fabric.seed import seed_everything
from fabric.testing.base import Report, own_part, raised
from fabric.world import World

__all__ = ["THIS_FILE", "Reply", "serve", "stack_file"]

THIS_FILE = __file__  # the frames of a rank from here on outwards are no user's


# How a call went on a rank, and the pickled result or error; empty for an error that does not pickle.
Reply = tuple[Report, bytes]


def stack_file(directory: RunDirectory, rank: int) -> Path:
    """Where a rank writes its stack when it gets SIGUSR1."""
    return directory.path / f"stack-{rank}"


def serve(calls: Connection, fabric: Fabric, seat: World, directory: RunDirectory) -> NoReturn:
    """Be a rank of a pool: say that all ranks are connected, then answer each call."""
    # The handler is faulthandler's, in C, and so works when the main thread waits in a collective. The file stays open.
    stacks = open(stack_file(directory, seat.rank), "wb", buffering=0)  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    if has_cloudpickle():
        import cloudpickle  # noqa: F401 (optional; here, so that the first call need not wait for it)
    fabric._enter_rank(seat)
    reply: Reply = Report(rank=seat.rank), dump_result(None)
    while True:
        calls.send_bytes(pickle.dumps(reply))
        try:
            message = calls.recv_bytes()
        except (EOFError, OSError):
            # The pool was closed. Nothing is worth a farewell to the other ranks, which leave as well.
            sys.exit(0)
        reply = _answer(fabric, seat.rank, message)


def _answer(fabric: Fabric, rank: int, message: bytes) -> Reply:
    try:
        sys.path[:], call = load_result(message)
        fn, args, kwargs = load_result(call)
        # Whatever was called before, a call draws the same numbers; a failing example could not be repeated otherwise.
        seed_everything(0)
        result = fn(fabric, *(own_part(arg, rank) for arg in args), **{k: own_part(v, rank) for k, v in kwargs.items()})
        return Report(rank=rank), dump_result(result)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 (whatever it is, the caller of run() gets it)
        report = raised(rank, error)
        try:
            payload = dump_result(report.error)
        except Exception:  # noqa: BLE001 (an error that does not pickle goes as its text alone)
            payload = b""
        return replace(report, error=None), payload

"""What a process does that was not forked from the launching one: make itself like it, then be a rank."""

import multiprocessing
import os
import pickle
import runpy
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from fabric.errors import UsageError
from fabric.launchers._rank import Seat, leave, run_function
from fabric.launchers._transport import Call

__all__ = ["Orders", "is_importing_main", "obey", "obey_and_leave", "refuse_while_importing_main"]


@dataclass(frozen=True, kw_only=True)
class Orders:
    """All that a fresh process has to know; travels on its lifeline.

    Attributes:
        seat: its place in the job.
        environment: the environment variables of the launching process, at this moment.
        directory: its current directory.
        module_path: its ``sys.path``.
        arguments: its ``sys.argv``.
        authkey: with which multiprocessing's managers recognise a process of the family.
        main: from where to import ``__main__``, when the call refers to it by name; see ``main_source``.
        call: the pickled call.
        converses: whether the function is handed the answer pipe, on which the launching process writes too, as its
            first argument.
    """

    seat: Seat
    environment: dict[str, str]
    directory: str
    module_path: list[str]
    arguments: list[str]
    authkey: bytes
    main: tuple[str, str] | None
    call: bytes
    converses: bool = False

    @classmethod
    def like_this_process(
        cls, *, seat: Seat, main: tuple[str, str] | None, call: bytes, converses: bool = False
    ) -> "Orders":
        """Orders to resemble the process that calls this."""
        return cls(
            seat=seat,
            environment=dict(os.environ),
            directory=os.getcwd(),
            module_path=list(sys.path),
            arguments=list(sys.argv),
            authkey=bytes(multiprocessing.current_process().authkey),
            main=main,
            call=call,
            converses=converses,
        )


def obey(lifeline_fd: int, answers_fd: int) -> None:
    """Read the orders from the lifeline, carry them out, and leave with the exit code of the rank."""
    lifeline = Connection(lifeline_fd, writable=False)
    try:
        orders = lifeline.recv()
    except EOFError:
        # The parent has gone, or gave the launch up, before it came to this rank.
        sys.exit(1)
    answers = Connection(answers_fd, readable=orders.converses)
    _resemble(orders)
    sys.exit(run_function(orders.seat, lifeline, answers, _loader(orders, answers)))


def obey_and_leave(lifeline_fd: int, answers_fd: int) -> None:
    """Be a rank in an interpreter of its own, and leave as a forked rank does."""
    code: str | int | None = 1
    try:
        obey(lifeline_fd, answers_fd)
    except SystemExit as leaving:
        code = leaving.code
    leave(code if isinstance(code, int) else 0)


def is_importing_main() -> bool:
    """Whether the script is just being imported in another process, to find the functions that it defines.

    That import goes by the name ``__mp_main__``, here as in the standard library's ``multiprocessing``.
    """
    importing = sys.modules.get("__mp_main__")
    # Elsewhere the name leads to the script itself, also where a debugger or `fabric run` has put another in its place.
    return importing is not sys.modules["__main__"] and getattr(importing, "__name__", None) == "__mp_main__"


def refuse_while_importing_main() -> None:
    """Raise when a launch is attempted by a script without a guard, which would launch for ever."""
    if is_importing_main():
        raise UsageError(
            "launch() at the top level of a script",
            "another process imports the script to find the function it has to run, and so reaches launch() again",
            "a launch that happens only when the file is run as a script",
            "if __name__ == '__main__': above the lines that create Fabric and launch; or the start method 'fork'",
        )


def _resemble(orders: Orders) -> None:
    os.environ.clear()
    os.environ.update(orders.environment)
    os.chdir(orders.directory)
    sys.path[:] = orders.module_path
    sys.argv[:] = orders.arguments
    multiprocessing.current_process().authkey = orders.authkey
    # Forked from one server, all ranks of all launches would draw the same numbers from it.
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()


def _loader(orders: Orders, answers: Connection) -> Callable[[], Call]:
    def load() -> Call:
        if orders.main is not None:
            _import_main(*orders.main)
        # Our own parent wrote it, on a pipe that nobody else holds.
        fn, args, kwargs = pickle.loads(orders.call)  # noqa: S301
        return fn, [answers, *args] if orders.converses else args, kwargs

    return load


def _import_main(kind: str, place: str) -> None:
    """Make ``__main__`` the module that it is in the launching process, without running what its guard protects."""
    if kind == "module":
        contents = runpy.run_module(place, run_name="__mp_main__", alter_sys=True)
    else:
        contents = runpy.run_path(place, run_name="__mp_main__")
    main = types.ModuleType("__mp_main__")
    main.__dict__.update(contents)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main

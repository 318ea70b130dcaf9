"""Starts an interpreter that becomes a rank or the fork server, and gives it the state of the launching process."""

import multiprocessing
import os
import pickle
import runpy
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fabric.errors import UsageError
from fabric.launchers.serialize import Call, dump_call

__all__ = ["CallPayload", "refuse_while_importing_main", "start_interpreter"]

_ROOT = str(Path(__file__).parents[2])


def start_interpreter(
    function: str, fd: int, arguments: Sequence[str] = (), *, cwd: str | None = None, stdin: int | None = None
) -> "subprocess.Popen[bytes]":
    """Start an interpreter with the options of this one that calls ``module:function``, and inherits an open file.

    Unlike ``multiprocessing``'s, it imports ``__main__`` only if the call needs that, and starts no resource tracker.

    Args:
        function: ``module:function``.
        fd: the open file; its number is the first argument.
        arguments: shown in lists of processes.
        cwd: where it starts.
        stdin: its standard input.
    """
    module, _, name = function.partition(":")
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] - as multiprocessing does
    if getattr(sys.__stdout__, "write_through", False):
        options.append("-u")
    # -P: what lies in the current folder must not be taken for a part of fabric or of the standard library.
    statement = f"import sys; sys.path.append({_ROOT!r}); from {module} import {name}; sys.path.pop(); {name}()"
    command = [sys.executable, *options, "-P", "-c", statement, str(fd), *arguments]
    return subprocess.Popen(command, pass_fds=[fd], cwd=cwd, stdin=stdin)


@dataclass(frozen=True, kw_only=True)
class CallPayload:
    """A pickled call, and the state of the launching process in which it is made.

    Attributes:
        environment: its environment variables, at the moment of the launch.
        directory: its current directory.
        module_path: its ``sys.path``.
        arguments: its ``sys.argv``.
        authkey: with which multiprocessing's managers recognize a process of the family.
        main: from where to import ``__main__``, when the call refers to it by name; see :func:`_main_source`.
        call: the pickled call.
    """

    environment: dict[str, str]
    directory: str
    module_path: list[str]
    arguments: list[str]
    authkey: bytes
    main: tuple[str, str] | None
    call: bytes
    skips_teardown = True

    @classmethod
    def of_this_process(cls, call: Call) -> "CallPayload":
        """A call to be made in the state of the process that calls this.

        Raises:
            MissingDependencyError, ArgumentTypeError: see :func:`dump_call`.
        """
        main = _main_source()
        packed, needs_main = dump_call(call, main_is_importable=main is not None)
        return cls(
            environment=dict(os.environ),
            directory=os.getcwd(),
            module_path=list(sys.path),
            arguments=list(sys.argv),
            authkey=bytes(multiprocessing.current_process().authkey),
            main=main if needs_main else None,
            call=packed,
        )

    def load(self) -> Callable[[], Any]:
        """Give this process that state, and load the call."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.directory)
        sys.path[:] = self.module_path
        sys.argv[:] = self.arguments
        multiprocessing.current_process().authkey = self.authkey
        # Forked from one server, all ranks of all launches would draw the same numbers from it.
        random = sys.modules.get("numpy.random")
        if random is not None:
            random.seed()
        if self.main is not None:
            _import_main(*self.main)
        # Our own parent wrote it, on a pipe that nobody else holds.
        fn, args, kwargs = pickle.loads(self.call)  # noqa: S301
        return partial(fn, *args, **kwargs)


def refuse_while_importing_main() -> None:
    """Raise when a launch is attempted by a script without a guard, which would launch for ever.

    A rank imports the script to find its functions, under the name ``__mp_main__``, as ``multiprocessing`` does.
    """
    importing = sys.modules.get("__mp_main__")
    # Elsewhere the name leads to the script itself, also where a debugger or `fabric run` has put another in its place.
    if importing is not sys.modules["__main__"] and getattr(importing, "__name__", None) == "__mp_main__":
        raise UsageError(
            "launch() at the top level of a script",
            "another process imports the script to find the function it has to run, and so reaches launch() again",
            "a launch that happens only when the file is run as a script",
            "if __name__ == '__main__': above the lines that create Fabric and launch; or the start method 'fork'",
        )


def _main_source() -> tuple[str, str] | None:
    """Where a new process finds the module ``__main__``: ``("module", name)``, ``("path", file)`` or None.

    None in an interactive session or a notebook, and for ``python -m package``, whose code is not a library.
    """
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        is_entry_point = spec.name == "__main__" or spec.name.endswith(".__main__")
        return None if is_entry_point else ("module", spec.name)
    path = getattr(main, "__file__", None)
    return None if path is None else ("path", path)


def _import_main(kind: str, place: str) -> None:
    """Make ``__main__`` the module that it is in the launching process, without running what its guard protects."""
    if kind == "module":
        contents = runpy.run_module(place, run_name="__mp_main__", alter_sys=True)
    else:
        contents = runpy.run_path(place, run_name="__mp_main__")
    main = types.ModuleType("__mp_main__")
    main.__dict__.update(contents)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main

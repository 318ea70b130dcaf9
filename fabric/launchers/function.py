"""Launchers that run a function in new processes: spawn, fork and forkserver."""

import gc
import linecache
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

from fabric.errors import ArgumentTypeError, ConfigurationError, RankFailedError
from fabric.launchers import base
from fabric.launchers.calling_rank import CallingRank
from fabric.launchers.fork_server import fork_server
from fabric.launchers.private_file import PrivateFile
from fabric.launchers.rank import Payload, RankConfig, main, run_rank
from fabric.launchers.serialize import Call, dump_call, load
from fabric.launchers.supervisor import StartedProcess, StartProcess, Supervisor, exit_status

__all__ = ["ProcessLauncher", "payload_of_call"]


class _TorchSetting(NamedTuple):
    """A setting of torch in the launching process, which its ranks get before they run the call.

    Attributes:
        getter: the name of the function of ``torch`` that returns the value.
        setter: the name of the function of ``torch`` that changes the value.
        default: ``str()`` of the value after the import of torch. It is a text, since this module
            does not import torch.
    """

    getter: str
    setter: str
    default: str


_TORCH_SETTINGS = [
    _TorchSetting("get_default_dtype", "set_default_dtype", default="torch.float32"),
    _TorchSetting("is_grad_enabled", "set_grad_enabled", default="True"),
    _TorchSetting(
        "get_float32_matmul_precision", "set_float32_matmul_precision", default="highest"
    ),
    _TorchSetting("get_deterministic_debug_mode", "set_deterministic_debug_mode", default="0"),
]


class ProcessLauncher(base.Launcher):
    """A launcher that runs a function in new processes on this machine.

    - ``"spawn"`` starts a new interpreter for each rank. It is the slowest start method, and
      isolates ranks best.
    - ``"forkserver"`` forks ranks from a server process that has torch loaded and lives as long as
      this process. It isolates ranks as well as spawn. A second launch takes hundredths of a
      second.
    - ``"fork"`` copies this process, so that nothing has to be pickled. A launch is refused once
      CUDA is initialized. The ranks run with one thread per operation, because the copy has the
      thread pools of this process without their threads, and an operation would wait for these
      threads forever. Do not raise the number of threads in such a rank.

    Functions of importable modules are sent by name. Closures, lambdas and functions that a script
    or notebook defines are sent by value with ``cloudpickle``. Without ``cloudpickle`` a function
    of a script is found by importing the script in every rank. The script then needs an
    ``if __name__ == "__main__"`` guard.

    Args:
        start_method: ``"spawn"``, ``"fork"`` or ``"forkserver"``.
    """

    can_run_rank0_here: ClassVar[bool] = True

    def __init__(self, start_method: Literal["spawn", "fork", "forkserver"]) -> None:
        self.name = start_method

    def check(self, spec: base.LaunchSpec) -> None:
        """Raise if this launch cannot work. No process is started.

        Raises:
            UsageError: this process is a rank that imports the script, and the script calls
                ``launch`` outside of an ``if __name__ == "__main__"`` block.
            ConfigurationError: the start method is ``"fork"``, and a device library is initialized
                in this process. A forked copy could not use the library.
        """
        base.refuse_while_importing_main()
        if self.name != "fork":
            return
        backend = base.initialized_backend(spec.device_type)
        if backend is not None:
            raise ConfigurationError(
                "the start method 'fork'",
                problem=f"{backend} is initialized in this process, and a forked copy cannot use "
                f"{backend}",
                suggestion='launcher="forkserver", or launch before the first use of a device',
            )

    def warm_up(self) -> None:
        """Start the fork server, which then imports torch, if ranks are forked from a server."""
        if self.name == "forkserver":
            fork_server().warm_up()

    def launch(
        self,
        fn: Callable[..., Any] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        spec: base.LaunchSpec,
    ) -> Any:
        """Run ``fn(*args, **kwargs)`` in ``spec.num_processes`` processes and wait for them.

        With ``spec.runs_rank0_here``, this process is one of them, and an exception of its call is
        raised as it is. Under ``"fork"`` the call gets ``args`` themselves, otherwise copies of
        them, as in the other processes.

        Returns:
            The result of rank 0, a list by rank, or None, as ``spec.results`` says. Tensors are
            detached, on the CPU.

        Raises:
            ArgumentTypeError: ``fn`` is not a function, or a part of the call cannot be pickled.
            MissingDependencyError: ``fn`` has to be sent by value and ``cloudpickle`` is not
                installed.
            RankFailedError: a rank raised, exited without returning, or was killed. The other ranks
                have been ended. If nothing catches the error, this process ends with the exit code
                of that rank, 128 + n for signal n.
            KeyboardInterrupt: SIGINT arrived. The ranks had a grace period for their ``finally``
                blocks.
            SystemExit: another signal that ends a job arrived, with code 128 + n for signal n. The
                ranks had a grace period. Or all ranks were preempted, with code 75.
        """
        self.check(spec)
        if not callable(fn):
            raise ArgumentTypeError(
                f"launch({fn!r})",
                problem="the argument is not a function",
                expected="launch(train, x), not launch(train(x))",
            )
        supervisor = Supervisor(is_rank=spec.runs_rank0_here)
        try:
            results = self._run_ranks(supervisor, Call(fn, args, kwargs), spec)
        except KeyboardInterrupt:
            # The supervisor raises KeyboardInterrupt for every signal that ends a job. For a signal
            # other than SIGINT, _exit_by_signal() raises SystemExit instead.
            if supervisor.signals:
                _exit_by_signal(supervisor.signals[0].number)
            raise
        except RankFailedError:
            _exit_as_the_rank_if_uncaught()
            raise
        if spec.results == "all":
            return results
        if spec.results == "first":
            return results[0]
        return None

    def _run_ranks(self, supervisor: Supervisor, call: Call, spec: base.LaunchSpec) -> list[Any]:
        """Run a call in all ranks, and return their results by rank.

        The result of a rank that ``spec.results`` does not select is None.

        Args:
            supervisor: starts the ranks and waits for them. Closed at the end.
            call: the call.
            spec: what :meth:`launch` was asked for.
        """
        start_process = self._start_process_function(call)
        worlds = base.node_worlds(spec.num_processes)
        # `with supervisor` installs signal handlers. If this process runs rank 0, the handlers of
        # the user stay, and the supervisor is only closed at the end.
        context = closing(supervisor) if spec.runs_rank0_here else supervisor
        with context, closing(PrivateFile()) as argument_file:
            payload = None  # a forked rank has the call in its memory
            if self.name != "fork":
                # An argument that cannot be pickled raises here, before a process is started.
                payload = payload_of_call(call, argument_file.path)
            # The supervisor only records signals, until it waits for ranks. A signal may have
            # arrived during the pickling.
            supervisor.raise_if_signaled()
            if spec.runs_rank0_here:
                # Comes before start(): the results have the order of the supervisor's ranks, to
                # which this line adds rank 0.
                calling_rank = CallingRank(supervisor, worlds[0], spec.results)
                supervisor.start(start_process, worlds[1:], payload, spec.results)
                # A payload returns the function to run. Under "fork" there is none, and bind()
                # returns the function.
                pickled_results = calling_rank.run(payload or call.bind)
            else:
                supervisor.start(start_process, worlds, payload, spec.results)
                pickled_results = supervisor.wait_for_ranks()
            # Loaded here, since the tensors are in files that the supervisor removes.
            results = [load(pickled_result) for pickled_result in pickled_results]
            supervisor.raise_if_signaled()  # a signal may have come during the loading
        return results

    def _start_process_function(self, call: Call) -> StartProcess:
        """Return the function that starts the process of one rank by this launcher's start method.

        Args:
            call: the call that the ranks run. Only a forked rank gets the call from here: the other
                ranks receive it through the control pipe.
        """
        if self.name == "spawn":
            return _spawn
        if self.name == "fork":
            return partial(_fork, call.bind())
        return fork_server().start_rank


def _exit_by_signal(number: int) -> None:
    """Call the user's handler of a signal that has ended the ranks, and exit with code 128 + n.

    The user's handler did not receive the signal, because the supervisor had replaced it while the
    ranks ran. The supervisor has installed it again. For SIGINT this function does nothing, and the
    caller raises KeyboardInterrupt.

    Raises:
        SystemExit: always, except for SIGINT.
    """
    if number == signal.SIGINT:
        return
    handler = signal.getsignal(number)
    if callable(handler):  # a handler of the user: SIG_DFL and SIG_IGN are not callable
        handler(number, None)
    raise SystemExit(128 + number) from None


def _exit_as_the_rank_if_uncaught() -> None:
    """Have this process exit with the exit code of the failed rank if nothing catches the error.

    Does nothing if the user has installed a hook for uncaught errors, or in an interactive
    interpreter, which does not exit after an error.
    """
    if sys.excepthook is sys.__excepthook__ and not base.is_interactive():
        sys.excepthook = _exit_as_the_rank


def _exit_as_the_rank(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an uncaught error as usual. If a rank has failed, exit with the exit code of that rank.

    This is a ``sys.excepthook``. The interpreter exits with the code of a SystemExit that the hook
    raises.
    """
    sys.__excepthook__(kind, error, trace)
    if isinstance(error, RankFailedError):
        raise SystemExit(exit_status(error.exit_code))


@dataclass(frozen=True, kw_only=True)
class _LauncherState:
    """The state of the launching process that a rank takes over before it loads the call.

    Attributes:
        process_id: the id of the launching process. If this process itself runs rank 0, it has all
            of this state already.
        environment: the environment variables.
        preparation: the argument of ``multiprocessing.spawn.prepare``, which sets the working
            directory, ``sys.path`` and ``sys.argv``, and imports ``__main__`` if necessary.
        sources: entries of ``linecache.cache`` by file name, for code that is in no file, such as
            notebook cells. Tracebacks show this code, and ``inspect.getsource`` returns it.
        torch_settings: the changed settings of torch, as values by the name of the setter.
    """

    process_id: int
    environment: dict[str, str]
    preparation: dict[str, Any]
    sources: dict[str, Any]
    torch_settings: dict[str, Any]


def payload_of_call(call: Call, tensor_file: str | None = None) -> Payload:
    """Return a payload that gives a rank the present state of this process, and loads the call.

    Ranks that are forked from this process need no payload.

    Args:
        call: the call.
        tensor_file: the path of a file for the memory of the call's tensors, which must exist until
            each rank has loaded the call. None, the default, pickles the tensors.

    Raises:
        MissingDependencyError: the function has to be pickled by value, and ``cloudpickle`` is not
            installed.
        ArgumentTypeError: a part of the call cannot be pickled. The text names the part.
    """
    main_import = _import_of_main()
    pickled_call = dump_call(
        call, main_is_importable=main_import is not None, tensor_file=tensor_file
    )
    # The keys are those that multiprocessing.spawn.prepare() reads in the rank.
    preparation: dict[str, Any] = {
        "authkey": bytes(multiprocessing.current_process().authkey),
        "sys_path": list(sys.path),
        "sys_argv": list(sys.argv),
        "dir": os.getcwd(),
    }
    if pickled_call.needs_main and main_import is not None:
        preparation |= main_import
    state = _LauncherState(
        process_id=os.getpid(),
        environment=dict(os.environ),
        preparation=preparation,
        sources=_sources_without_file(),
        torch_settings=_changed_torch_settings(),
    )
    return partial(_load_call, state, pickled_call.data)


def _import_of_main() -> dict[str, str] | None:
    """Return the argument with which ``multiprocessing.spawn.prepare`` imports ``__main__``.

    The result is None if a rank cannot import the ``__main__`` of this process, as in a notebook.
    It is also None for the ``__main__.py`` of a package, folder or archive, because importing such
    a file usually runs the whole program.
    """
    main_module = sys.modules["__main__"]
    # The name is None for `python script.py`. There is a name under `python -m`, and for a folder
    # or an archive with a __main__.py.
    module_name = getattr(main_module.__spec__, "name", None)
    script_path = getattr(main_module, "__file__", None)
    if module_name:
        if module_name == "__main__" or module_name.endswith(".__main__"):
            return None
        return {"init_main_from_name": module_name}
    if script_path in (None, "<stdin>"):
        return None
    return {"init_main_from_path": script_path}


def _sources_without_file() -> dict[str, Any]:
    """Return the entries of the line cache for code that is in no file, such as notebook cells.

    An entry is ``(size, modification time, lines, path)``. The time is None for code that is in no
    file. The entry of a file that has not been read yet has only one item.
    """
    sources: dict[str, Any] = {}
    for name, entry in linecache.cache.items():
        if len(entry) != 4:
            continue
        _, modification_time, _, _ = entry
        if modification_time is None:
            sources[name] = entry
    return sources


def _changed_torch_settings() -> dict[str, Any]:
    """Return the settings of torch that differ from its defaults in this thread and process.

    Without a changed setting, a rank need not import torch before it loads its call.

    Returns:
        The values by the name of the function of ``torch`` that sets them.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    changed: dict[str, Any] = {}
    for setting in _TORCH_SETTINGS:
        value = getattr(torch, setting.getter)()
        # The defaults are texts, since this module does not import torch.
        if str(value) != setting.default:
            changed[setting.setter] = value
    return changed


def _load_call(state: _LauncherState, pickled_call: bytes) -> Callable[[], Any]:
    """Give this rank the state of the launching process, and load the call.

    This is the payload of a rank, which the rank calls in its main thread.

    Returns:
        The function of the call with its arguments bound. The rank calls it next.
    """
    if state.process_id != os.getpid():
        _take_over(state)
    call: Call = load(pickled_call)
    return call.bind()


def _take_over(state: _LauncherState) -> None:
    """Give this process the state of the launching process."""
    # The environment is set first, because the modules that the call needs may read variables when
    # they are imported.
    os.environ.clear()
    os.environ.update(state.environment)
    # The code of notebook cells, which is in no file. Tracebacks read it from this cache.
    linecache.cache.update(state.sources)
    # Sets sys.path. This comes before the call is loaded, which may import modules from there.
    multiprocessing.spawn.prepare(state.preparation)
    for setter_name, value in state.torch_settings.items():
        # Imported only if there is a setting: the import takes seconds, and the call may not need
        # torch.
        set_value = getattr(import_module("torch"), setter_name)
        set_value(value)


def _spawn(control: Connection, config: RankConfig) -> StartedProcess:
    """Start a rank in a new interpreter.

    Args:
        control: the rank's end of the control pipe. The rank inherits the open file.
        config: unused. The rank receives its configuration and payload through the control pipe.
    """
    process = base.start_interpreter(main, control.fileno(), stdin=subprocess.DEVNULL)
    return StartedProcess(process.pid, process.poll)


def _fork(call: Callable[[], Any], control: Connection, config: RankConfig) -> StartedProcess:
    """Start a rank in a fork of this process.

    Args:
        call: the function that the rank runs, with its arguments bound.
        control: the rank's end of the control pipe.
        config: the configuration of the rank.
    """
    # A fork inherits the thread pools of this process without their threads. An operation in
    # several threads would wait for these threads forever, so the rank computes in one thread.
    config = replace(config, threads=1)
    process = multiprocessing.get_context("fork").Process(
        target=_run_forked_rank, args=(control, config, call)
    )
    # The fork must not collect garbage of this process: a finalizer could wait for a thread that
    # the fork does not have. gc.freeze() excludes all present objects from garbage collection.
    # They stay frozen in the fork, in which start() does not return.
    gc.freeze()
    try:
        process.start()
    finally:
        gc.unfreeze()
    assert process.pid is not None
    return StartedProcess(process.pid, lambda: process.exitcode)


def _run_forked_rank(control: Connection, config: RankConfig, call: Callable[[], Any]) -> NoReturn:
    """Run a rank in a fork of the launching process, in the main thread of the fork."""
    sys.exit(run_rank(control, config, lambda: call))

"""Launchers that run a function in new processes: spawn, fork and forkserver.

[Note: The fork server] The fork server is a process with torch loaded, from which ranks are forked.
The process that started the server is its *owner*. The fork server of the standard library is not
used, for two reasons: it leaves its socket directory behind if its owner is killed, and its
children write to the output that the owner had when the server started. Fabric's server inherits
one end of a socket pair, on which the owner requests ranks. Each request is one byte, sent with
four open files:

- the rank's end of the control pipe,
- a *status pipe*, on which the server sends the rank's process id and later its exit code,
- the owner's current standard output,
- the owner's current standard error.
"""

import gc
import importlib
import linecache
import multiprocessing.spawn
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from types import FrameType
from typing import Any, Literal, NamedTuple, NoReturn

from fabric.errors import ArgumentTypeError, ConfigurationError, RankFailedError, UsageError
from fabric.launchers import base
from fabric.launchers.rank import (
    Payload,
    RankConfig,
    ending_signals,
    main,
    receive_payload,
    run_rank,
)
from fabric.launchers.serialize import Call, dump_call, load
from fabric.launchers.supervisor import StartedProcess, StartProcess, Supervisor, exit_status

__all__ = [
    "UNKNOWN_EXIT_CODE",
    "ProcessLauncher",
    "fork_server",
    "forkserver_main",
    "payload_of_call",
]

# Seconds for the fork server to start a rank. For the first rank, most of the time is spent on the
# import of torch.
_START_TIMEOUT = 120.0
# The exit code that is reported for a rank if the fork server was killed and cannot tell the code.
UNKNOWN_EXIT_CODE = 255
# The modules that the fork server loads. Creating the first optimizer imports torch._dynamo, which
# takes longer to import than torch itself. Nearly every function of a rank receives a Fabric.
_PRELOAD = ("torch", "torch._dynamo", "fabric._fabric")


class ProcessLauncher(base.Launcher):
    """A launcher that runs a function in new processes on this machine.

    ``"spawn"`` starts a new interpreter for each rank. It is the slowest start method and isolates
    ranks best. ``"forkserver"`` forks from a server process that has torch loaded and lives as long
    as this process. It isolates ranks as well as spawn, and a second launch takes hundredths of a
    second. ``"fork"`` copies this process, so that nothing has to be pickled. It is refused once
    CUDA is initialized. Its ranks run with one thread per operation, because the thread pool of an
    operation that ran before the fork does not exist in the copy, and waiting for that pool would
    hang. Do not raise the number of threads in such a rank.

    Functions of importable modules are sent by name. Closures, lambdas and functions that a script
    or notebook defines are sent by value with ``cloudpickle``. Without ``cloudpickle`` a function
    of a script is found by importing the script in every rank. The script then needs an
    ``if __name__ == "__main__"`` guard.

    Args:
        start_method: ``"spawn"``, ``"fork"`` or ``"forkserver"``.
    """

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

    def launch(
        self,
        fn: Callable[..., Any] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        spec: base.LaunchSpec,
    ) -> Any:
        """Run ``fn(*args, **kwargs)`` in ``spec.num_processes`` processes and wait for them.

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
        call = Call(fn, args, kwargs)
        payload = None  # a forked rank has the call in its memory
        if self.name != "fork":
            # An argument that cannot be pickled raises here, before any process is started.
            payload = payload_of_call(call)
        start_process = self._start_process_function(call)
        worlds = base.node_worlds(spec.num_processes)
        supervisor = Supervisor()
        try:
            with supervisor:
                supervisor.start(start_process, worlds, payload, spec.results)
                pickled_results = supervisor.wait_for_ranks()
        except KeyboardInterrupt:
            # The supervisor raises KeyboardInterrupt for every signal that ends a job. For a signal
            # other than SIGINT, the next call raises SystemExit instead.
            if supervisor.signals:
                _exit_by_signal(supervisor.signals[0].number)
            raise
        except RankFailedError:
            _exit_as_the_rank_if_uncaught()
            raise
        # A rank that is not selected by spec.results has sent a pickled None.
        results = [load(pickled_result) for pickled_result in pickled_results]
        if spec.results == "all":
            return results
        if spec.results == "first":
            return results[0]
        return None

    def _start_process_function(self, call: Call) -> StartProcess:
        """Return the function that starts the process of one rank by this launcher's start method.

        Args:
            call: the call that the ranks run. Only a forked rank gets the call from here: the other
                ranks receive it through the control pipe.
        """
        if self.name == "spawn":
            return _spawn
        if self.name == "fork":
            bound_call = partial(call.fn, *call.args, **call.kwargs)
            return partial(_fork, bound_call)
        return fork_server().start_rank


def _exit_by_signal(number: int) -> None:
    """Call the user's handler of a signal that has ended the ranks, and exit with code 128 + n.

    The supervisor's handler received the signal while the ranks ran. The supervisor has restored
    the user's handlers before this function is called. For SIGINT this function does nothing: the
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
    """Install the hook that sets the exit code of this process if nothing catches an error.

    A hook that the user has installed stays. An interactive interpreter goes on after an error.
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
        environment: the environment variables.
        preparation: the arguments of ``multiprocessing.spawn.prepare``, which sets the working
            directory, ``sys.path`` and ``sys.argv``, and imports ``__main__`` if necessary.
        sources: entries of ``linecache.cache`` by file name, for code that is in no file, such as
            notebook cells. Tracebacks show this code, and ``inspect.getsource`` returns it.
    """

    environment: dict[str, str]
    preparation: dict[str, Any]
    sources: dict[str, Any]


def payload_of_call(call: Call) -> Payload:
    """Return a payload that gives a rank the current state of this process, then loads the call.

    The payload is sent to every rank that does not share the memory of this process.

    Raises:
        MissingDependencyError: the function has to be pickled by value, and ``cloudpickle`` is not
            installed.
        ArgumentTypeError: a part of the call cannot be pickled. The text names the part.
    """
    main_module = sys.modules["__main__"]
    # The name is None for `python script.py`. There is a name under `python -m`, and for a folder
    # or an archive with a __main__.py.
    module_name = getattr(main_module.__spec__, "name", None)
    script_path = getattr(main_module, "__file__", None)
    # A new process cannot import the __main__ of an interactive session or a notebook. It must not
    # import the __main__.py of a package, folder or archive, which would run the program again.
    if module_name:
        is_importable = module_name != "__main__" and not module_name.endswith(".__main__")
    else:
        is_importable = script_path not in (None, "<stdin>")
    pickled_call = dump_call(call, main_is_importable=is_importable)
    # The keys are those that multiprocessing.spawn.prepare() reads in the rank.
    preparation: dict[str, Any] = {
        "authkey": bytes(multiprocessing.current_process().authkey),
        "sys_path": list(sys.path),
        "sys_argv": list(sys.argv),
        "dir": os.getcwd(),
    }
    # `needs_main` means that loading the call needs the import of __main__.
    if pickled_call.needs_main and module_name:
        preparation["init_main_from_name"] = module_name
    elif pickled_call.needs_main:
        preparation["init_main_from_path"] = script_path
    state = _LauncherState(
        environment=dict(os.environ), preparation=preparation, sources=_sources_without_file()
    )
    return partial(_load_call, state, pickled_call.data)


def _sources_without_file() -> dict[str, Any]:
    """Return the entries of the line cache for code that is in no file, such as notebook cells.

    The entry of a file that has been read is ``(size, modification time, lines, path)``. For other
    code the time is None. An entry whose file has not been read has one item and is left out.
    """
    sources: dict[str, Any] = {}
    for name, entry in linecache.cache.items():
        if len(entry) == 4 and entry[1] is None:
            sources[name] = entry
    return sources


def _load_call(state: _LauncherState, pickled_call: bytes) -> Callable[[], Any]:
    """Give this rank the state of the launching process, and load the call.

    This is the payload of a rank. It runs in the main thread of the rank.

    Returns:
        The function with its arguments bound.
    """
    # The environment is set first, because the imports below may read variables.
    os.environ.clear()
    os.environ.update(state.environment)
    # All ranks that the fork server forks inherit the same state of NumPy's generator, and would
    # draw the same numbers. Python itself seeds its own generator after a fork.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    linecache.cache.update(state.sources)
    # The launcher's sys.path is set before the call is loaded: the call may refer to modules that
    # only this path finds.
    multiprocessing.spawn.prepare(state.preparation)
    call: Call = load(pickled_call)
    return partial(call.fn, *call.args, **call.kwargs)


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
    # A finalizer may wait for a thread that the fork does not have. So a collection of this
    # process's garbage in the fork could hang or crash. start() returns only in this process, so
    # the objects stay frozen in the fork and are never collected there.
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


class _ServerConnection(NamedTuple):
    """The owner's connection to a running fork server.

    Attributes:
        requests: the socket on which ranks are requested.
        stop: ends the server. A second call does nothing.
    """

    requests: socket.socket
    stop: Callable[[], object]


class _ForkServer:
    """The owner's side of the fork server; see ``[Note: The fork server]`` in function.py.

    The server process is started when the first rank is requested, is started again if it has died,
    and ends with this process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _server: several threads may launch
        self._server: _ServerConnection | None = None

    def start_rank(self, control: Connection, config: RankConfig) -> StartedProcess:
        """Have the server fork a rank.

        Args:
            control: the rank's end of the control pipe, which is sent to the server.
            config: unused. The rank receives the configuration through the control pipe.

        Raises:
            UsageError: the server does not answer in time.
        """
        with self._lock:
            if self._server is not None:
                # These errors mean that the server was killed since the last launch. Then a new
                # server is started.
                with suppress(OSError, EOFError):
                    return _request_rank(self._server.requests, control)
                self._server.stop()
            self._server = self._start_server()
            return _request_rank(self._server.requests, control)

    def _start_server(self) -> _ServerConnection:
        """Start a server process, and return the connection to the process."""
        requests, server_requests = socket.socketpair()
        # The server inherits its end of the pair, so this process closes its copy.
        with server_requests:
            process = base.start_interpreter(
                forkserver_main, server_requests.fileno(), stdin=subprocess.DEVNULL
            )
        # The finalizer also runs when this process exits.
        stop = weakref.finalize(self, _stop_server, requests, process)
        return _ServerConnection(requests, stop)


def fork_server() -> _ForkServer:
    """Return the fork server of this process. All launches of a process share one server."""
    return _fork_server_of_process(os.getpid())


@cache
def _fork_server_of_process(pid: int) -> _ForkServer:
    """Return a new fork server.

    The cache has an entry per process id: a forked child inherits the cache, and must not use the
    server of its parent.
    """
    return _ForkServer()


def _request_rank(requests: socket.socket, control: Connection) -> StartedProcess:
    """Ask the server for a rank, and wait until the server has forked the rank.

    Args:
        requests: the socket of the server.
        control: the rank's end of the control pipe.

    Raises:
        OSError: the server has ended.
        EOFError: the server has ended.
        UsageError: the server does not answer in time.
    """
    status_pipe, server_status_pipe = multiprocessing.Pipe(duplex=False)
    # The server gets a copy of its end of the pipe, so this process closes the end after sending.
    with server_status_pipe:
        standard_output = 1
        standard_error = 2
        # forkserver_main() reads the descriptors in this order.
        descriptors = [
            control.fileno(),
            server_status_pipe.fileno(),
            standard_output,
            standard_error,
        ]
        # Descriptors can only be sent along with data. The server ignores the byte.
        socket.send_fds(requests, [b"!"], descriptors)
    if not status_pipe.poll(_START_TIMEOUT):
        raise UsageError("the fork server does not start", suggestion='launcher="spawn"')
    pid = status_pipe.recv()
    return StartedProcess(pid, partial(_read_exit_code, status_pipe))


def _stop_server(requests: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    """End the server process and reap it. Ranks of the server end with it."""
    requests.close()
    process.kill()
    process.wait()


def _read_exit_code(status_pipe: Connection) -> int | None:
    """Return the exit code that the server has sent, or None if the rank still runs.

    This function does not wait. The code can be read only once, so a caller does not ask again
    after a code was returned.

    Args:
        status_pipe: the owner's end of the rank's status pipe. The rank is a child of the server,
            so only the server can wait for the rank.
    """
    try:
        if not status_pipe.poll():
            return None
        return status_pipe.recv()
    except EOFError:
        # The server was killed, so the exit code cannot be known. The rank ends, too, because it
        # watches the id of its parent process.
        return UNKNOWN_EXIT_CODE


def forkserver_main() -> None:
    """Run the fork server: fork a rank for each request until the owner has ended.

    This is the main function of the server process. Its first argument is the number of the socket
    on which the owner requests ranks.
    """
    owner = os.getppid()
    # The server has to survive signals to the process group, since only the server can report the
    # exit codes of the ranks. An ignored signal stays ignored, because the ranks inherit this, too.
    for number in ending_signals():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _do_nothing)
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in _PRELOAD:
        importlib.import_module(name)
    # The ranks share the memory of these objects with the server. A garbage collection in a rank
    # would write to all objects that are not frozen, and the system would copy their memory.
    gc.freeze()
    status_pipes: dict[ForkProcess, Connection] = {}  # of the ranks that run
    # The id of the parent process changes when the owner ends. The socket does not show it: a
    # process that the owner forked may hold the socket open.
    while os.getppid() == owner:
        sentinels = [process.sentinel for process in status_pipes]
        # A process that a rank forked keeps the rank's sentinel from becoming ready. So the exit
        # codes are looked at after a short time in any case.
        timeout = 0.1 if status_pipes else 1.0
        ready = wait([requests, *sentinels], timeout)
        _report_exits(status_pipes)
        if requests not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(requests, 1, maxfds=4)
        if not request:  # the owner has closed the socket
            break
        control_fd, status_fd, *output_fds = descriptors
        # The rank inherits copies of these connections and closes them. An open copy in the rank
        # would hide from the owner that the server has ended.
        server_connections = [requests, *status_pipes.values()]
        process, status_pipe = _fork_rank(
            control_fd, status_fd, output_fds=output_fds, server_connections=server_connections
        )
        status_pipes[process] = status_pipe
    # Exits without exit handlers. They would wait for the ranks, which exit by themselves.
    os._exit(0)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal without any effect."""


def _report_exits(status_pipes: dict[ForkProcess, Connection]) -> None:
    """Send the exit codes of the ranks that have ended to the owner.

    Args:
        status_pipes: the status pipe of each running rank. Ranks that have ended are removed.
    """
    for process in list(status_pipes):
        if process.exitcode is not None:
            _send_status(status_pipes.pop(process), process.exitcode)


def _fork_rank(
    control_fd: int,
    status_fd: int,
    output_fds: list[int],
    server_connections: list[socket.socket | Connection],
) -> tuple[ForkProcess, Connection]:
    """Fork a rank from the server, and send its process id through the status pipe.

    The server closes the rank's files. The status pipe stays open, for the exit code.

    Args:
        control_fd: the descriptor of the rank's end of the control pipe.
        status_fd: the descriptor of the server's end of the rank's status pipe.
        output_fds: the descriptors of the rank's standard output and error.
        server_connections: connections that only the server uses. The rank inherits and closes
            them.

    Returns:
        The process of the rank, and its status pipe.
    """
    control = Connection(control_fd)
    status_pipe = Connection(status_fd)
    # Connections that the rank closes.
    inherited_connections = [status_pipe, *server_connections]
    process = multiprocessing.get_context("fork").Process(
        target=_run_served_rank, args=(control, output_fds, inherited_connections)
    )
    process.start()  # returns only in the server
    # The rank has its own copies of the control pipe and of the output descriptors.
    control.close()
    for descriptor in output_fds:
        os.close(descriptor)
    _send_status(status_pipe, process.pid)
    return process, status_pipe


def _send_status(status_pipe: Connection, pid_or_exit_code: int | None) -> None:
    """Send a rank's process id, or later its exit code, to the owner of the fork server."""
    # If the owner has ended, the loop of forkserver_main() ends the server.
    with suppress(BrokenPipeError):
        status_pipe.send(pid_or_exit_code)


def _run_served_rank(
    control: Connection,
    output_fds: list[int],
    server_connections: list[socket.socket | Connection],
) -> NoReturn:
    """Run a rank in a fork of the server, in the main thread of the fork.

    Args:
        control: the rank's end of the control pipe.
        output_fds: the descriptors of the rank's standard output and error.
        server_connections: connections that only the server uses. The rank closes them.
    """
    for connection in server_connections:
        connection.close()
    # Replace standard output and error, the descriptors 1 and 2, by the descriptors of the owner.
    for standard_fd, output_fd in enumerate(output_fds, start=1):
        os.dup2(output_fd, standard_fd)
        os.close(output_fd)
    config, payload = receive_payload(control)
    exit_code = run_rank(control, config, payload)
    # multiprocessing catches the SystemExit and ends the forked process with os._exit. So the exit
    # handlers that the server has registered do not run in the rank.
    sys.exit(exit_code)

"""The fork server: a process with torch loaded, from which ranks are forked."""

import gc
import importlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.machinery import PathFinder
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import NamedTuple

from fabric.errors import UsageError
from fabric.launchers import base
from fabric.launchers.rank import RankConfig, end_with_parent, ending_signals, run_process
from fabric.launchers.supervisor import StartedProcess

__all__ = [
    "OPTIMIZER_MODULE",
    "UNKNOWN_EXIT_CODE",
    "ForkServer",
    "fork_server",
    "forkserver_main",
    "script_forkserver_main",
]

# Seconds for the fork server to start a rank. For the first rank, most of the time is spent on the
# import of torch.
_START_TIMEOUT = 120.0
# Seconds between two calls of a function that may end a wait.
_CALL_INTERVAL = 0.1
# The exit code that is reported for a rank if the fork server was killed and cannot tell the code.
UNKNOWN_EXIT_CODE = 255
# The modules that a fork server loads. Nearly every rank uses a Fabric.
_PRELOAD = ("torch", "fabric._fabric")
# The creation of the first optimizer imports this module, which takes nearly as long as the import
# of torch.
OPTIMIZER_MODULE = "torch._dynamo"
# The variable in the environment of a server with the names of further modules.
_MODULES_VARIABLE = "FABRIC_FORK_SERVER_MODULES"
# The requests that the owner sends.
_RANK_REQUEST = b"!"
_HAZARD_REQUEST = b"?"
# The server's answer to a hazard request if a fork is like a new interpreter.
_NO_HAZARD = b"-"


class _ServerConnection(NamedTuple):
    """The owner's connection to a running fork server.

    Attributes:
        requests: the socket on which ranks are requested.
        stop: ends the server. A second call does nothing.
    """

    requests: socket.socket
    stop: Callable[[], object]


# [Note: The fork server]
# The process that started the server is its *owner*. The fork server of the standard library is not
# used, for two reasons: it leaves its socket directory behind if its owner is killed, and its
# children write to the output that the owner had when the server started. Fabric's server inherits
# one end of a socket pair, on which the owner sends requests of one byte. The request for a rank is
# sent with these open files:
#
# - the rank's end of the control pipe,
# - a *status pipe*, on which the server sends the rank's process id and later its exit code,
# - the standard output and the standard error of the rank,
# - the standard input, if the rank reads any.
class ForkServer:
    """The owner's side of the fork server: a process that has torch loaded and forks ranks.

    This process is the *owner*. The server process is started when it is first needed, and started
    again if it has died. It ends with this object, and with the owner.

    Args:
        main: the main function of the server process.
        arguments: further arguments of the server process.
        variables: variables for the environment of the server process.
        directory: the working directory of the server process. None, the default, uses the
            directory of this process.
    """

    def __init__(
        self,
        main: Callable[[], None],
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] = {},
        directory: str | None = None,
    ) -> None:
        """Store the arguments. The server process is started when it is first needed."""
        self._main = main
        self._arguments = arguments
        self._variables = variables
        self._directory = directory
        self._server_lock = threading.Lock()  # guards _server: several threads may launch
        self._server: _ServerConnection | None = None  # None if no server process runs
        # The hazard that find_hazard() has found. Empty if it has found none, or was not called.
        self._hazard = ""

    @classmethod
    def of_script(
        cls,
        path_entry: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        directory: str | None,
        modules: Sequence[str],
    ) -> "ForkServer":
        """Return a fork server for the ranks of a script.

        Use the result in the main thread: the server ends with the thread that has started it.

        Args:
            path_entry: the entry that the interpreter adds to ``sys.path`` for the script, or "".
            arguments: the arguments of the script, which process lists show for all ranks.
            variables: the environment variables of the ranks that libraries read while they are
                loaded.
            directory: the initial working directory of the script. None is that of this process.
            modules: the names of modules that the server imports besides torch and fabric.
        """
        return cls(
            script_forkserver_main,
            [path_entry, *arguments],
            {**variables, _MODULES_VARIABLE: " ".join(modules)},
            directory,
        )

    @classmethod
    def with_modules(cls, names: Sequence[str]) -> "ForkServer":
        """Return a fork server that imports further modules, which its ranks then have loaded.

        Args:
            names: the names of the modules. The server finds them as this process does.
        """
        variables = {
            _MODULES_VARIABLE: " ".join(names),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        return cls(forkserver_main, variables=variables)

    def warm_up(self) -> None:
        """Start the server process if there is none, without waiting until it has loaded torch."""
        # If the system cannot start a process now, the launch tries again, and reports the error.
        with self._server_lock, suppress(OSError):
            if self._server is None:
                self._server = self._start_server()

    def find_hazard(self, while_waiting: Callable[[], object]) -> str:
        """Return why a forked rank could differ from one in a new interpreter, or an empty text.

        Only a server that :meth:`of_script` has made answers this request. This method waits until
        the server has loaded torch. It has no time limit: ranks in new interpreters would have to
        load torch, too, and would not start sooner. If there is a hazard, this method ends the
        server, and later calls return the same hazard.

        Args:
            while_waiting: is called several times per second. An error that it raises ends the
                wait.
        """
        with self._server_lock:
            if self._hazard == "":
                self._hazard = self._request_hazard(while_waiting)
            if self._hazard != "" and self._server is not None:
                self._server.stop()
                self._server = None
            return self._hazard

    def _request_hazard(self, while_waiting: Callable[[], object]) -> str:
        """Ask the server for a hazard, and return the answer, as :meth:`find_hazard` does.

        The server is started if there is no server. A server that fails is a hazard, too. The
        caller has the ``_server_lock``.
        """
        try:
            if self._server is None:
                self._server = self._start_server()
            requests = self._server.requests
            requests.sendall(_HAZARD_REQUEST)
            while not wait([requests], timeout=_CALL_INTERVAL):
                while_waiting()
            answer = requests.recv(4096)
        except OSError as error:
            return f"the fork server does not start: {error}"
        if answer == b"":
            return "the fork server has failed"
        if answer == _NO_HAZARD:
            return ""
        return answer.decode()

    def start_rank(
        self,
        control: Connection,
        config: RankConfig,
        stdin: int | None = None,
        output: int | None = None,
    ) -> StartedProcess:
        """Have the server fork a rank.

        Args:
            control: the rank's end of the control pipe, which is sent to the server.
            config: unused, but each ``StartProcess`` has this parameter. The rank receives the
                configuration through the control pipe.
            stdin: the descriptor of the standard input. None for a rank that reads nothing.
            output: the descriptor of the standard output and error. None uses the output of this
                process.

        Raises:
            UsageError: the server does not answer in time, and has been ended. The next call starts
                another server.
            OSError, EOFError: a server that was just started has ended at once.
        """
        stdout = 1
        stderr = 2
        if output is not None:
            stdout = output
            stderr = output
        # _Server._fork_rank() takes the descriptors in this order, after that of the status pipe.
        descriptors = [control.fileno(), stdout, stderr]
        if stdin is not None:
            descriptors.append(stdin)
        with self._server_lock:
            if self._server is not None:
                try:
                    return _request_rank(self._server, descriptors)
                except (OSError, EOFError):
                    # These errors mean that the server has ended since the last launch. A new
                    # server is started below.
                    self._server.stop()
            self._server = self._start_server()
            return _request_rank(self._server, descriptors)

    def _start_server(self) -> _ServerConnection:
        """Start a server process, and return the connection to the process."""
        owner_socket, server_socket = socket.socketpair()
        # A process that is still starting would print a long traceback on Ctrl-C. The server and
        # its ranks inherit this block, and a rank unblocks SIGINT in raise_on_signals().
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            # The server inherits its end of the pair. This process closes its copy of that end.
            with server_socket:
                process = base.start_interpreter(
                    self._main,
                    server_socket.fileno(),
                    arguments=self._arguments,
                    cwd=self._directory,
                    stdin=subprocess.DEVNULL,
                    variables=self._variables,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        # The finalizer also runs when this process exits.
        stop = weakref.finalize(self, _stop_server, owner_socket, process)
        return _ServerConnection(owner_socket, stop)


def fork_server() -> ForkServer:
    """Return the fork server of this process. All launches of a process share one server."""
    return _fork_server_of_process(os.getpid())


@cache
def _fork_server_of_process(pid: int) -> ForkServer:
    """Return the fork server of this process, which the first call creates.

    Args:
        pid: the id of this process. It is only the key of the cache: a forked child inherits the
            cache, and must not find the server of its parent there.
    """
    return ForkServer(forkserver_main)


def _request_rank(server: _ServerConnection, descriptors: Sequence[int]) -> StartedProcess:
    """Ask the server for a rank, and wait until the server has forked the rank.

    Args:
        server: the connection to the server.
        descriptors: the open files of the rank, without the status pipe.

    Raises:
        OSError: the server has ended.
        EOFError: the server has ended.
        UsageError: the server does not answer in time.
    """
    # The server sends the rank's process id through this pipe, and later the rank's exit code.
    status_pipe, server_status_pipe = multiprocessing.Pipe(duplex=False)
    # The server receives a copy of its end of the pipe. This process closes its own copy.
    with server_status_pipe:
        # Descriptors can only be sent along with data, here the request.
        file_descriptors = [server_status_pipe.fileno(), *descriptors]
        socket.send_fds(server.requests, [_RANK_REQUEST], file_descriptors)
    if not status_pipe.poll(_START_TIMEOUT):
        # A server that goes on might fork the rank later, and no supervisor would know the rank.
        server.stop()
        raise UsageError("the fork server does not start", suggestion='launcher="spawn"')
    pid = status_pipe.recv()
    return StartedProcess(pid, partial(_read_exit_code, status_pipe))


def _stop_server(requests: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    """End the server process and reap it. Ranks of the server end with it."""
    requests.close()
    process.kill()
    process.wait()


def _read_exit_code(status_pipe: Connection) -> int | None:
    """Return the exit code of a rank without waiting, or None if the rank still runs.

    The rank is a child of the server, so the server sends the exit code. Do not call this function
    again after it has returned an exit code, which can be read only once.

    Args:
        status_pipe: the owner's end of the rank's status pipe.
    """
    try:
        if not status_pipe.poll():
            return None
        return status_pipe.recv()
    except EOFError:
        # The server was killed, so nothing knows the exit code. The rank ends, too, because its
        # control thread watches the id of its parent process.
        return UNKNOWN_EXIT_CODE


# -- the process of the server --------------------------------------------------------------------


def script_forkserver_main() -> None:
    """Run the fork server of a script. This is the main function of the server process.

    See :meth:`ForkServer.of_script`.
    """
    # The kernel kills this server when the thread that has started it ends. The server of a
    # function is not killed then, because later launches use it from other threads.
    end_with_parent()
    _serve_with_modules(_PRELOAD)


def forkserver_main() -> None:
    """Run the fork server of functions. This is the main function of the server process."""
    _serve_with_modules((*_PRELOAD, OPTIMIZER_MODULE))


def _serve_with_modules(modules: Sequence[str]) -> None:
    """Import modules, and fork a rank for each request until the owner has ended.

    In each forked rank, ``serve()`` returns, and this function goes on to run the rank.
    ``sys.argv[1]`` is the descriptor of the socket on which the owner sends requests. If the ranks
    run a script, ``sys.argv[2]`` is the entry that the interpreter adds to ``sys.path`` for the
    script.

    Args:
        modules: the names of the modules, besides those in the environment of the server.
    """
    requests = socket.socket(fileno=int(sys.argv[1]))
    path_entry = sys.argv[2] if len(sys.argv) > 2 else ""
    server = _Server(requests, path_entry)
    further_modules = os.environ.pop(_MODULES_VARIABLE, "").split()
    # The imports make hardly any garbage. Searching for garbage would take a sixth of their time.
    gc.disable()
    for name in (*modules, *further_modules):
        importlib.import_module(name)
    # The imports have looked for the folder of temporary files. A script may choose another folder.
    tempfile.tempdir = None
    # The ranks share the memory of these objects with the server. A garbage collection in a rank
    # would write to all objects that are not frozen, and the system would copy their memory.
    gc.freeze()
    gc.enable()
    control = server.serve()
    # Only a forked rank comes here. It ends like a rank in an interpreter of its own.
    run_process(control)


# See [Note: The fork server].
class _Server:
    """The server's side of the fork server, in the server process.

    The process that started the server is its *owner*.

    Args:
        requests: the socket on which the owner sends requests.
        path_entry: the entry that the interpreter adds to ``sys.path`` for a script, or "".
    """

    def __init__(self, requests: socket.socket, path_entry: str) -> None:
        """Install the signal handlers of the server process. :meth:`serve` answers requests."""
        self._owner_pid = os.getppid()
        self._requests = requests
        self._path_entry = path_entry
        self._status_pipes: dict[int, Connection] = {}  # of the running ranks, by process id
        # Ctrl-C in a terminal reaches the server, too, which has to go on: only the server can
        # report the exit codes of the ranks. A signal that is ignored stays ignored, since the
        # ranks inherit this.
        for number in ending_signals():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _do_nothing)
        # The interpreter writes a byte to this pipe when a rank ends, which ends the wait in
        # serve(). It does so only if SIGCHLD has a handler.
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup_reader, False)
        os.set_blocking(self._wakeup_writer, False)
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _do_nothing)

    def serve(self) -> Connection:
        """Answer requests until the owner has ended, and then exit.

        Returns:
            In a forked rank: the rank's end of the control pipe. In the server this method does not
            return.
        """
        # The id of the parent process changes when the owner ends. The socket may stay open then,
        # since a fork of the owner has a copy.
        while os.getppid() == self._owner_pid:
            ready = wait([self._requests, self._wakeup_reader], timeout=1.0)
            if self._wakeup_reader in ready:
                # A rank has ended. The bytes have no meaning: reading them empties the pipe.
                os.read(self._wakeup_reader, 4096)
                self._report_exits()
            if self._requests not in ready:
                continue
            # A request has one byte and, for a rank, four or five descriptors. One byte is read, so
            # that a second request, if there is one, stays in the socket for the next turn.
            request, descriptors, _, _ = socket.recv_fds(self._requests, 1, maxfds=5)
            if not request:  # the owner has closed the socket
                break
            if request == _HAZARD_REQUEST:
                hazard = _find_fork_hazard(self._path_entry).encode()
                # An answer has at least one byte: the owner reads b"" if the server has ended.
                self._requests.sendall(hazard or _NO_HAZARD)
                continue
            control = self._fork_rank(*descriptors)
            if control is not None:  # this process is the rank
                return control
        # Exits without exit handlers. They would wait for the ranks, which exit by themselves.
        os._exit(0)

    def _report_exits(self) -> None:
        """Send the exit codes of the ranks that have ended to the owner."""
        for pid in list(self._status_pipes):
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid == pid:
                status_pipe = self._status_pipes.pop(pid)
                _send_status(status_pipe, os.waitstatus_to_exitcode(status))

    def _fork_rank(
        self, status_fd: int, control_fd: int, stdout: int, stderr: int, stdin: int | None = None
    ) -> Connection | None:
        """Fork a rank, and send its process id through the status pipe.

        Args:
            status_fd: the descriptor of the server's end of the rank's status pipe.
            control_fd: the descriptor of the rank's end of the control pipe.
            stdout: the descriptor of the file that becomes the rank's standard output.
            stderr: the descriptor of the file that becomes the rank's standard error.
            stdin: the descriptor of the file that becomes the rank's standard input. None, the
                default, keeps the server's standard input, which is empty.

        Returns:
            In the rank: its end of the control pipe. In the server: None.
        """
        new_streams = {1: stdout, 2: stderr}
        if stdin is not None:
            new_streams[0] = stdin
        status_pipe = Connection(status_fd)
        pid = os.fork()
        if pid == 0:  # this process is the rank
            status_pipe.close()
            self._close_in_rank()
            _seed_generators()
            for standard_descriptor, descriptor in new_streams.items():
                os.dup2(descriptor, standard_descriptor)
                os.close(descriptor)
            return Connection(control_fd)
        # The rank has its own copies of these files.
        for descriptor in (control_fd, *new_streams.values()):
            os.close(descriptor)
        _send_status(status_pipe, pid)
        self._status_pipes[pid] = status_pipe  # stays open for the exit code
        return None

    def _close_in_rank(self) -> None:
        """Close what only the server uses, in a forked rank.

        An open copy of a pipe or socket in the rank would hide from the owner that the server has
        ended.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)  # writes no bytes any more
        os.close(self._wakeup_reader)
        os.close(self._wakeup_writer)
        self._requests.close()
        for status_pipe in self._status_pipes.values():
            status_pipe.close()


def _seed_generators() -> None:
    """Seed torch and NumPy in a forked rank with random seeds, as in a new interpreter.

    Otherwise all ranks would draw the same numbers. Python itself seeds ``random`` after a fork.
    """
    torch = sys.modules["torch"]
    torch.default_generator.seed()
    # torch works without NumPy.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal without any effect."""


def _send_status(status_pipe: Connection, pid_or_exit_code: int) -> None:
    """Send a rank's process id, or later its exit code, to the owner of the fork server."""
    # If the owner has ended, the loop of _Server.serve() ends the server.
    with suppress(BrokenPipeError):
        status_pipe.send(pid_or_exit_code)


# -- forks that are like new interpreters ---------------------------------------------------------


# [Note: A fork like a new interpreter]
# A rank that runs a script must not differ from `python script.py`. So the server of a script
# imports a fixed list of modules and runs nothing else. What could still make a fork differ from a
# new interpreter is looked for before each start of the ranks, and if it is found, the ranks start
# in new interpreters. It is:
#
# - another thread in the server, which would be missing in a fork,
# - an initialized device library, which no fork can use,
# - a file next to the script that the script would import in place of a loaded module,
# - a variable in the text of the script that libraries read while they are loaded.
#
# Script.find_fork_hazard() looks for the last one, and _find_fork_hazard() for the others.
#
# The server has the number of threads of the ranks in its environment, since libraries read the
# number while they are loaded.
def _find_fork_hazard(path_entry: str) -> str:
    """Return why a fork of this server could differ from a new interpreter, or an empty text.

    Args:
        path_entry: the entry that the interpreter adds to ``sys.path`` for the script, or "".
    """
    if _count_threads() > 1:
        # OpenBLAS starts threads when it is loaded. When its process forks, it ends these threads,
        # and starts them again when it needs them. So this fork, whose child ends at once, leaves
        # only threads that would be missing in a later fork.
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    threads = _count_threads()
    if threads > 1:
        # A fork has only the thread that forks: the others would be missing in each rank.
        return f"the imports of torch and fabric have left {threads} threads, which no fork has"
    # The argument names a device to check besides CUDA and XPU. "cpu" names none.
    device = base.initialized_backend("cpu")
    if device is not None:
        return f"the imports of torch and fabric have initialized {device}"
    module = _find_shadowed_module(path_entry)
    if module is not None:
        return f"the script would import a module {module!r} of {path_entry} first"
    return ""


def _count_threads() -> int:
    """Return the number of threads of this process, also of those that Python does not know."""
    return len(os.listdir("/proc/self/task"))


def _find_shadowed_module(path_entry: str) -> str | None:
    """Return the name of a loaded module that ``path_entry`` has in another version, or None.

    In a new interpreter, a script would import the module from its own entry of ``sys.path``. In a
    fork, it would get the module that the server has loaded.
    """
    if path_entry == "":
        return None
    for name, module in list(sys.modules.items()):
        # Submodules are found by their package, and built-in modules before any entry of sys.path.
        if "." in name or name == "__main__" or name in sys.builtin_module_names:
            continue
        spec = PathFinder.find_spec(name, [path_entry])
        # A folder without __init__.py has no origin. Python imports it only if no other entry of
        # sys.path has the module, so it hides nothing.
        if spec is None or spec.origin is None:
            continue
        loaded_file = getattr(module, "__file__", None) or ""
        if os.path.realpath(spec.origin) != os.path.realpath(loaded_file):
            return name  # the owner ends this server, so its cache does not matter
    # The search has cached the list of files in path_entry. It is removed from the cache, because
    # files may be added before the ranks import from there.
    sys.path_importer_cache.pop(path_entry, None)
    return None

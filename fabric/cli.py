"""The command ``fabric``: one function per subcommand.

[Note: fabric run] The command becomes torch's elastic agent, which starts the ranks, watches them, and restarts all of
them when one fails and a restart is left. Each rank is this module again, as ``fabric`` plus a word that no user types:
it runs the script as the interpreter would, keeps the error that ends it for the agent, and leaves when the agent is
gone. On one node the ranks meet through a file in a private directory, so that nothing listens on the network.

[Note: late imports] What imports torch is imported by the functions that need it, so that help and errors come at once.
"""

import argparse
import faulthandler
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from fabric.errors import ConfigurationError, FabricError, RankFailedError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from fabric.launchers._agent import MeetingPlace
    from fabric.launchers._failures import FailureRecorder

__all__ = ["main"]

_RANK = "rank:"  # the word that makes this process a rank; the colon keeps it apart from any subcommand
_HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``fabric``.

    Args:
        argv: the arguments after the command's name; ``None`` takes those of this process.

    Returns:
        The exit code: 0, that of the script, 128 + n after signal n (130 for Ctrl-C), or 2 for wrong usage, which is
        explained on standard error before any process starts. The environment is as it was before.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == [_RANK]:
        return _be_rank(*arguments[1:])
    try:
        options, unknown = _parser().parse_known_args(arguments)
        if unknown:
            options.parser.error(f"there is no option {unknown[0]!r}")
        return options.command(options)
    except FabricError as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage as every other error of fabric."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        raise ConfigurationError(self.prog, message, usage, f"{self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fabric", description="Grow a PyTorch loop from one device to many.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fabric {version('torch-fabric')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = commands.add_parser(
        "run",
        help="run a script in several processes",
        description="Run a script in one process per device. The options reach the script's Fabric(), whose own "
        "arguments have to agree with them.",
        allow_abbrev=False,
    )
    add = command.add_argument
    add("--accelerator", metavar="A", help="cpu, cuda, mps or auto")
    add("--devices", metavar="D", help='number of devices, indices such as "0,2", -1 for all, or auto')
    add("--num-nodes", metavar="N", type=_at_least(1), help="number of machines, on each of which this command runs")
    add("--node-rank", metavar="R", type=_at_least(0), default=0, help="number of this machine, from 0")
    add("--main-address", metavar="H", help="host name of machine 0, with several machines")
    add("--main-port", metavar="P", type=_at_least(1), default=29500, help="a free port there (default: 29500)")
    add("--strategy", metavar="S", help="ddp, fsdp, ... or auto")
    add("--precision", metavar="P", help="32-true, bf16-mixed, ...")
    add("--max-restarts", metavar="K", type=_at_least(0), default=0, help="times to restart all ranks (default: 0)")
    add("-m", "--module", action="store_true", help="the script is the name of a module")
    add("script", metavar="script.py", help="the script, or with -m a module")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    command.set_defaults(command=_run, parser=command)

    command = commands.add_parser(
        "consolidate",
        help="make one file of a sharded checkpoint",
        description="Write the content of a sharded checkpoint, which is a folder, to one file that fabric.load reads "
        "under any strategy; or the weights of a model to a .safetensors file.",
        allow_abbrev=False,
    )
    add = command.add_argument
    add("directory", metavar="DIR", type=Path, help="the sharded checkpoint")
    add("-o", "--output", metavar="FILE", type=Path, help="the file to write (default: DIR.pt)")
    add("--key", metavar="ENTRY", help="with .safetensors: the entry to write (default: the only one that can be)")
    command.set_defaults(command=_consolidate, parser=command)
    return parser


def _at_least(lowest: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {lowest}")
        return int(text)

    return integer


def _consolidate(options: argparse.Namespace) -> int:
    """``fabric consolidate``."""
    from fabric.checkpoint.consolidate import consolidate, progress_line

    progress = progress_line("fabric consolidate", sys.stderr)
    output = consolidate(options.directory, options.output, key=options.key, progress=progress)
    print(f"fabric consolidate: wrote {output}", file=sys.stderr, flush=True)
    return 0


def _run(options: argparse.Namespace) -> int:
    """``fabric run``."""
    _check_run(options)
    processes = _processes_per_node(options)
    from fabric.launchers._custody import DirectoryGuard
    from fabric.launchers._failures import RunDirectory
    from fabric.launchers._signals import ReportRequests

    directory = RunDirectory.create()
    guard = DirectoryGuard(directory.path)
    try:
        with _process_restored(), ReportRequests(lambda: map(RunDirectory, directory.path.glob("attempt-*"))):
            os.environ.update(_variables(options, processes))
            return _launch(options, processes, directory.path)
    finally:
        directory.remove()
        guard.close()


def _check_run(options: argparse.Namespace) -> None:
    """Refuse a script that is not there and nodes that contradict each other."""
    script, nodes, error = options.script, options.num_nodes or 1, options.parser.error
    if options.module:
        package = script.partition(".")[0]
        # Only its first part: to find a submodule is to run its packages.
        if importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
            error(f"there is no module {package!r}; -m takes a name without .py")
    elif not os.path.isfile(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        error(f"{script!r} in {os.getcwd()!r} is neither a file nor a folder with a __main__.py; a module needs -m")
    if options.node_rank >= nodes:
        error(f"--num-nodes {nodes} has no machine --node-rank {options.node_rank}: they are counted from 0")
    if nodes > 1 and not options.main_address:
        error(f"--num-nodes {nodes} needs --main-address, the host name of machine 0, the same on every machine")
    if nodes == 1 and options.main_address:
        print("fabric run: --main-address has no meaning on one machine and is ignored", file=sys.stderr)


def _processes_per_node(options: argparse.Namespace) -> int:
    """Resolve the options as the script's ``Fabric()`` will, so that errors come before any process starts."""
    from fabric._plan import resolve
    from fabric.launchers import InlineLauncher
    from fabric.world import World

    names = ("accelerator", "strategy", "devices", "precision")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    # The launcher is the agent; how this command itself was started does not matter.
    processes = resolve(**given, launcher=InlineLauncher(), environment="none", env={}).processes_per_node
    nodes = options.num_nodes or 1
    if nodes > 1:
        address, port = options.main_address, options.main_port
        world = World(world_size=processes * nodes, local_world_size=processes, address=address, port=port)
        resolve(**given, num_nodes=nodes, env=world.to_env())
    return processes


def _variables(options: argparse.Namespace, processes: int) -> dict[str, str]:
    """Environment variables of the ranks but those of their place in the job."""
    from fabric._plan import RUN_OPTIONS
    from fabric.launchers.base import available_cores, rank_variables

    variables = rank_variables(os.environ, processes, available_cores(), sys.platform)
    if (options.num_nodes or 1) > 1:
        variables.pop("GLOO_SOCKET_IFNAME")
    given = {variable: getattr(options, name) for name, variable in RUN_OPTIONS.items()}
    variables |= {variable: str(value) for variable, value in given.items() if value is not None}
    # The agent would open a port on every interface to share its store; the ranks of one node have a file of ours.
    variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return variables


@contextmanager
def _process_restored() -> Iterator[None]:
    """Leave the environment and the signal handlers as they were; torch's agent changes both."""
    variables = dict(os.environ)
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _HANDLED_SIGNALS} if in_main else {}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _launch(options: argparse.Namespace, processes: int, directory: Path) -> int:
    import torch
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    from fabric.launchers._agent import run_agent

    nodes = options.num_nodes or 1
    try:
        failures = run_agent(
            [sys.executable, *_rank_command(options, directory)],
            _meeting_place(options, nodes, directory),
            nodes=nodes,
            processes=processes,
            restarts=options.max_restarts,
            directory=directory,
        )
    except SignalException as error:
        return 128 + error.sigval
    except (RendezvousError, torch.distributed.DistError, TimeoutError) as error:
        print(_unmet(options, nodes, error), file=sys.stderr, flush=True)
        return 1
    return _report(failures, processes * nodes, directory) if failures else 0


def _meeting_place(options: argparse.Namespace, nodes: int, directory: Path) -> "MeetingPlace":
    from fabric.launchers._agent import MeetingPlace

    if nodes == 1:
        file = str(directory / "agents")
        return MeetingPlace(backend="c10d", endpoint=file, configs={"store_type": "file"}, address="127.0.0.1")
    main = options.main_address, options.main_port
    endpoint, configs = f"{options.main_address}:{options.main_port}", {"rank": options.node_rank}
    return MeetingPlace(backend="static", endpoint=endpoint, configs=configs, main=main)


def _unmet(options: argparse.Namespace, nodes: int, error: Exception) -> FabricError:
    return ConfigurationError(
        f"fabric run --num-nodes {nodes} --node-rank {options.node_rank}",
        f"the machines did not meet: {error}",
        "the same --num-nodes, --main-address and --main-port on each, and a port that is free on machine 0 and open",
        f"fabric run --main-port {options.main_port + 1} ... on every machine, if the port is taken",
    )


def _rank_command(options: argparse.Namespace, directory: Path) -> list[str]:
    """The arguments of the interpreter that make it a rank; see :func:`_be_rank`."""
    from fabric.launchers.base import interpreter_options

    # What the interpreter puts in front of sys.path for this script.
    script = os.path.realpath(options.script)
    first_path = os.getcwd() if options.module else os.path.dirname(script) if os.path.isfile(script) else script
    # -P: what lies in the current folder must not be taken for a part of fabric or of the standard library.
    flags = [*interpreter_options()[0], "-P", "-m", "fabric"]
    front = "" if sys.flags.safe_path else first_path
    kind = "module" if options.module else "script"
    return [*flags, _RANK, str(os.getpid()), str(directory), front, kind, options.script, *options.arguments]


def _be_rank(agent: str, directory: str, first_path: str, kind: str, script: str, *arguments: str) -> int:
    """Be one rank: run the script, and keep the error that ends it.

    Args:
        agent: process id of the agent.
        directory: the run directory, which the agent removes.
        first_path: what to put in front of ``sys.path``; may be empty.
        kind: ``"script"`` or ``"module"``.
        script: a path or a name.
        arguments: of the script.
    """
    from fabric.launchers._custody import end_with_parent
    from fabric.launchers._rank import leave
    from fabric.launchers._signals import raise_on_signals

    end_with_parent()
    process = os.getpid()
    recorder = _recorder(Path(directory))
    threading.Thread(target=_attend, args=(int(agent), recorder), name="fabric-agent", daemon=True).start()
    heard = partial(recorder.directory.say_heard, int(os.environ["RANK"]))
    raise_on_signals(signal.getsignal(signal.SIGINT) is not signal.SIG_IGN, heard)
    if first_path:
        sys.path.insert(0, first_path)
    sys.argv = [script, *arguments]
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Whole lines, at once: a rank that is killed flushes nothing, and pieces of lines would mix with other ranks'.
        sys.stdout.reconfigure(line_buffering=True)
    try:
        if kind == "module":
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if isinstance(leaving.code, int) and leaving.code:
            leave(leaving.code)
        raise
    except KeyboardInterrupt:
        leave(128 + signal.SIGINT)
    except BaseException as error:  # noqa: BLE001 - whatever ends the script is kept, and told by the agent
        error.__traceback__ = _of_script(error.__traceback__)
        told = os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ["TORCHELASTIC_MAX_RESTARTS"]
        try:
            recorder.record(error)
        except OSError:
            told = False
        if not told:
            # The agent tells of the last attempt only, and of nothing when it is gone and its directory with it.
            sys.excepthook(type(error), error, error.__traceback__)
        # What an exit handler would find if the interpreter had come to this point.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        leave(1)
    recorder.directory.say_finished(int(os.environ["RANK"]), process)
    return 0


def _recorder(directory: Path) -> "FailureRecorder":
    from fabric.launchers._failures import FailureRecorder, attempt_directory

    attempt = attempt_directory(directory, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    attempt.path.mkdir(mode=0o700, exist_ok=True)
    rank = int(os.environ["RANK"])
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        os.environ["FABRIC_STORE"] = attempt.store
    else:
        os.environ["FABRIC_DIRECTORY"] = str(attempt.path)
    # Kept open by faulthandler; unbuffered, because a crash flushes nothing.
    faulthandler.enable(open(attempt.crash_file(rank), "wb", buffering=0))  # noqa: SIM115
    return FailureRecorder(attempt, rank)


def _attend(agent: int, recorder: "FailureRecorder") -> None:
    """Tell the agent, when it asks, of an error whose ``finally`` does not end, and leave once the agent is gone.

    Where the kernel ends this process with its agent, the latter is for one that had gone before it was asked to.
    """
    asked = False
    while os.getppid() == agent:
        if not asked and recorder.directory.is_asked():
            asked = True
            recorder.record_pending()
        time.sleep(0.1)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames between the interpreter and the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _report(failures: Mapping[int, "ProcessFailure"], world_size: int, directory: Path) -> int:
    """Tell which rank ended the job and why, and return the exit code of this command."""
    from fabric.launchers._failures import attempt_directory
    from fabric.launchers._supervision import exit_status

    attempt = attempt_directory(directory, len(list(directory.glob("attempt-*"))) - 1)
    rank = min(failures, key=lambda rank: _suspicion(failures[rank], attempt.read(rank)))
    code, recorded = failures[rank].exitcode, attempt.read(rank)
    how = f"was killed by {failures[rank].signal_name()}" if code < 0 else f"failed with exit code {code}"
    wrong = "the system kills this way when memory runs out" if code == -signal.SIGKILL else ""
    if recorded is not None and recorded.pending:
        # It was still handling the error when it was ended.
        code, how = 1, "failed with exit code 1"
    finished = attempt.finished()
    if recorded is not None and recorded.deserted and finished:
        rank, code, how = finished[0], 0, "left with exit code 0"
        wrong = "it ended early, without an error, while the other ranks still needed it"
    error = RankFailedError(
        f"rank {rank} of {world_size} {how}",
        rank=rank,
        exit_code=code,
        traceback=recorded.text if recorded else attempt.read_crash(rank),
        problem=wrong,
    )
    sys.stdout.flush()
    print(f"\n{error}", file=sys.stderr, flush=True)
    return exit_status(code)


def _suspicion(failure: "ProcessFailure", recorded: Any) -> tuple[int, float]:
    """How far a rank is from being the cause: own errors first, then lost connections, the agent's SIGTERM last."""
    if recorded is not None:
        return (2 if recorded.consequence else 0), recorded.time
    return (3 if failure.exitcode == -signal.SIGTERM else 1), float(failure.timestamp)

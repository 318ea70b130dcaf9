"""The command ``fabric``, with one function for each subcommand."""

import argparse
import gc
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NoReturn

from fabric import __version__
from fabric.diagnostics.report_signal import ignore_early_requests
from fabric.environments import Machines, find_machines
from fabric.errors import ConfigurationError, FabricError
from fabric.world import World, read_integer_variable

# [Note: late imports]
# Importing torch takes seconds. Functions import the modules that import torch, so that help and
# errors are printed at once.
if TYPE_CHECKING:
    from fabric.launchers.fork_server import ForkServer
    from fabric.launchers.script import Script, ScriptEnd

__all__ = ["main"]

# The port of machine 0 where the ranks of several machines connect.
_MAIN_PORT = 29500


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``fabric``.

    Args:
        argv: the arguments after the name of the command. None means the arguments of this process.

    Returns:
        The exit code: 0, the exit code of the script, 128 + n if the script was killed by signal n
        (130 for Ctrl-C), or 2 for wrong usage. Wrong usage is explained on standard error before
        any process starts.
    """
    if argv is None and sys.argv[1:2] == ["run"]:
        # The imports of the command take seconds. In this time, the signal that asks for a hang
        # report would end the process.
        ignore_early_requests()
    try:
        options = _build_parser().parse_args(argv)
        return options.command(options)
    except FabricError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        if argv is None:
            # The process ends now. Without this call, the interpreter would search all objects of
            # torch for garbage, which takes half a second.
            gc.freeze()


class _Parser(argparse.ArgumentParser):
    """A parser that reports wrong usage like every other error of fabric."""

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigurationError for wrong usage, where argparse would exit.

        argparse and the subcommands of fabric call this method.
        """
        # format_usage() returns "usage: " and the synopsis on several lines. Join the lines.
        synopsis = " ".join(self.format_usage().removeprefix("usage: ").split())
        raise ConfigurationError(
            self.prog, problem=message, expected=synopsis, suggestion=f"{self.prog} --help"
        )


def _build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line.

    The result of ``parse_args`` has the options of the subcommand, and two more attributes:
    ``command`` runs the subcommand, and ``parser`` is the subcommand's parser.
    """
    parser = _Parser(
        prog="fabric",
        description="Grow a PyTorch loop from one device to many.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fabric {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_consolidate(commands)
    _add_plan(commands)
    _add_plot(commands)
    _add_diff(commands)
    _add_doctor(commands)
    return parser


def _add_run(commands: Any) -> None:
    """Add the subcommand ``fabric run`` with its options."""
    parser = _add_command(
        commands,
        "run",
        _run,
        summary="run a script in several processes",
        description="Run a script in one process per device. The script's Fabric() uses these "
        "options, and must not contradict them.",
    )
    parser.add_argument("--accelerator", metavar="A", help="cpu, cuda, mps or auto")
    parser.add_argument(
        "--devices",
        metavar="D",
        help='number of devices, indices such as "0,2", -1 for all, or auto',
    )
    parser.add_argument(
        "--num-nodes",
        metavar="N",
        type=_at_least(1),
        help="number of machines; this command has to run on each of them. The options about "
        "machines default to PET_NNODES, ... of Kubeflow, or SKYPILOT_NUM_NODES, ...",
    )
    parser.add_argument(
        "--node-rank",
        metavar="R",
        type=_at_least(0),
        help="number of this machine, from 0 (default: JOB_COMPLETION_INDEX of Kubernetes, or 0)",
    )
    parser.add_argument(
        "--main-address", metavar="H", help="host name of machine 0; needed with several machines"
    )
    parser.add_argument(
        "--main-port",
        metavar="P",
        type=_at_least(1),
        help=f"a free port of machine 0 (default: {_MAIN_PORT})",
    )
    parser.add_argument("--strategy", metavar="S", help="ddp, fsdp, ... or auto")
    parser.add_argument("--precision", metavar="P", help="32-true, bf16-mixed, ...")
    parser.add_argument(
        "--max-restarts",
        metavar="K",
        type=_restart_limit,
        default=_RestartLimit(0),
        help="how often to start all ranks again after a failure (default: 0). K/1h counts the "
        "restarts of the last hour; s, m, h and d are units. Machine 0 decides",
    )
    parser.add_argument(
        "--node-timeout",
        metavar="S",
        type=_at_least(10),
        default=600,
        help="seconds to wait for a machine that is missing, before the first start and after a "
        "failure (default: 600)",
    )
    parser.add_argument(
        "--log-dir",
        metavar="DIR",
        type=Path,
        help="write the output of each rank to a file in DIR instead of the terminal",
    )
    parser.add_argument(
        "--tee",
        action="store_true",
        help="with --log-dir: write the output to the terminal, too, each line after its rank",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="the script is the name of a module"
    )
    parser.add_argument("script", metavar="script.py", help="the script, or with -m a module")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )


def _add_consolidate(commands: Any) -> None:
    """Add the subcommand ``fabric consolidate`` with its options."""
    parser = _add_command(
        commands,
        "consolidate",
        _consolidate,
        summary="make one file of a sharded checkpoint",
        description="Write the content of a sharded checkpoint, which is a folder, to one file "
        "that fabric.load reads under any strategy. With -o NAME.safetensors or --max-shard-gb, "
        "write only the weights of a model, to a file or to a folder that Hugging Face reads.",
    )
    parser.add_argument("directory", metavar="DIR", help="the sharded checkpoint")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="the file to write; NAME.safetensors gets only weights (default: DIR.pt)",
    )
    parser.add_argument(
        "--key",
        metavar="ENTRY",
        help="if only weights are written: the entry of the checkpoint that is the model; needed "
        "if there are several models",
    )
    parser.add_argument(
        "--max-shard-gb",
        metavar="GB",
        type=float,
        help="write weights to the folder --output (default: DIR-weights), in files of at most "
        "this many gigabytes",
    )


def _add_plan(commands: Any) -> None:
    """Add the subcommand ``fabric plan`` with its options."""
    parser = _add_command(
        commands,
        "plan",
        _plan,
        summary="dry run of a training step",
        description="Print the memory that a rank needs and the collectives of a training step, "
        "without running it. Exits with 1 if the memory is more than --memory.",
    )
    parser.add_argument(
        "build",
        metavar="module:function",
        help="a function build(fabric) that returns a model and its optimizers",
    )
    parser.add_argument(
        "--step",
        metavar="NAME",
        default="step",
        help="the function step(fabric, model, *optimizers) of the same module (default: step)",
    )
    parser.add_argument(
        "--world",
        metavar="W",
        type=_at_least(1),
        default=1,
        help="number of processes (default: 1)",
    )
    parser.add_argument(
        "--num-nodes",
        metavar="N",
        type=_at_least(1),
        default=1,
        help="number of machines (default: 1)",
    )
    parser.add_argument(
        "--strategy",
        metavar="S",
        default="auto",
        help="ddp, fsdp, ..., or the name of a strategy in the same module (default: auto)",
    )
    parser.add_argument("--precision", metavar="P", help="32-true, bf16-mixed, ...")
    parser.add_argument(
        "--accelerator",
        metavar="A",
        default="cuda",
        help="the hardware on which the job would run: cpu, cuda, ... (default: cuda)",
    )
    parser.add_argument("--memory", metavar="SIZE", help="memory of a device, such as 80GiB")


def _add_plot(commands: Any) -> None:
    """Add the subcommand ``fabric plot`` with its options."""
    parser = _add_command(
        commands,
        "plot",
        _plot,
        summary="draw the metrics of runs",
        description="Draw the metrics that CSVLogger has written, with a panel for each metric. "
        "Needs matplotlib.",
    )
    parser.add_argument(
        "folders", metavar="RUN", nargs="+", help="the folder of a run, or of several runs"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="metrics.png",
        help=".png, .svg or .pdf (default: metrics.png)",
    )


def _add_diff(commands: Any) -> None:
    """Add the subcommand ``fabric diff`` with its options."""
    parser = _add_command(
        commands,
        "diff",
        _diff,
        summary="find the first difference between two runs",
        description="Compare two runs by what fabric.fingerprint has written, and print the first "
        "value that differs, in the order of the computation. Exits with 1 if any differs.",
    )
    parser.add_argument("first", metavar="RUN", help="the folder of a fingerprint")
    parser.add_argument("second", metavar="OTHER", help="the folder of another fingerprint")
    parser.add_argument(
        "--close",
        metavar="X",
        type=float,
        help="accept a distance of X times the norm, as between runs with other numbers of "
        "processes, such as 1e-6 (default: compare bit by bit)",
    )


def _add_doctor(commands: Any) -> None:
    """Add the subcommand ``fabric doctor`` with its options."""
    parser = _add_command(
        commands,
        "doctor",
        _doctor,
        summary="look for problems that make a job fail",
        description="Look for problems that make a job fail, on this machine and among the "
        "processes of the job. Exits with 1 if there are any.",
    )
    parser.add_argument(
        "--devices",
        metavar="N",
        type=_at_least(1),
        default=2,
        help="number of processes to start, outside of a job (default: 2)",
    )
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=_at_least(1),
        default=20,
        help="seconds for each part (default: 20)",
    )


def _add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    """Add a subcommand and return its parser, which has no options yet.

    Args:
        commands: what ``add_subparsers`` of the main parser returned. argparse does not export its
            class.
        name: the name of the subcommand.
        run: the function that runs the subcommand with the parsed options, and returns the exit
            code.
        summary: the text in the help of the main command.
        description: the text in the help of the subcommand.
    """
    parser = commands.add_parser(name, help=summary, description=description, allow_abbrev=False)
    # ``run`` reports wrong options by options.parser.error().
    parser.set_defaults(command=run, parser=parser)
    return parser


def _at_least(minimum: int) -> Callable[[str], int]:
    """Return a function that converts a command-line argument to an integer from ``minimum`` up.

    The function is the ``type`` of an option. argparse turns its errors into usage errors.
    """

    # argparse shows the name of this function in errors, as in "invalid integer value: 'x'".
    def integer(text: str) -> int:
        """Convert the text of an argument. argparse reports a ValueError of ``int`` by itself."""
        number = int(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {minimum}")
        return number

    return integer


@dataclass(frozen=True)
class _RestartLimit:
    """The value of ``--max-restarts``.

    Attributes:
        count: how many restarts are allowed in a window.
        window: the length of the window in seconds. The default, infinity, counts all restarts of
            the job.
        text: the value as the user wrote it.
    """

    count: int
    window: float = math.inf
    text: str = "0"

    def allows_restart(self, now: float, restart_times: Sequence[float]) -> bool:
        """Return whether the job may restart at the time ``now``, after the restarts so far."""
        times_in_window = [time for time in restart_times if time > now - self.window]
        return len(times_in_window) < self.count


def _restart_limit(text: str) -> _RestartLimit:
    """Convert the argument of ``--max-restarts``, such as ``"3"`` or ``"3/1h"``."""
    match = re.fullmatch(r"(?P<count>\d+)(/(?P<number>\d*\.?\d+)(?P<unit>[smhd]))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 3, or 3/1h")
    count = int(match["count"])
    if match["number"] is None:
        return _RestartLimit(count, text=text)
    seconds_of_units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    window = float(match["number"]) * seconds_of_units[match["unit"]]
    return _RestartLimit(count, window=window, text=text)


def _consolidate(options: argparse.Namespace) -> int:
    """Run ``fabric consolidate``, and return the exit code."""
    # Late, since this imports torch, which takes seconds. See [Note: late imports].
    from fabric.checkpoint.consolidate import consolidate

    written_path = consolidate(
        options.directory,
        output=options.output,
        key=options.key,
        max_shard_gb=options.max_shard_gb,
    )
    print(f"fabric consolidate: wrote {written_path}", file=sys.stderr)
    return 0


def _plan(options: argparse.Namespace) -> int:
    """Run ``fabric plan``, and return the exit code: 1 if the memory is not enough."""
    # Late, since this imports torch, which takes seconds. See [Note: late imports].
    from fabric.tools.dry_run import plan

    # The command `fabric` lacks the working directory in its path. Users' modules are there.
    sys.path.insert(0, os.getcwd())
    try:
        build = resolve_name(options.build)
        # resolve_name() has imported the module, so this only looks the module up.
        module = import_module(options.build.partition(":")[0])
        step = getattr(module, options.step)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"fabric plan {options.build} --step {options.step}", problem=str(error)
        ) from error
    for name, function in ((options.build, build), (options.step, step)):
        if not callable(function):
            raise ConfigurationError(
                "fabric plan",
                problem=f"{name} is of type {type(function).__name__}, which is not callable",
                expected="functions of a module, such as train:build",
            )
    # A strategy object of this name in the module takes precedence over fabric's own strategies.
    strategy = getattr(module, options.strategy, options.strategy)
    result = plan(
        build,
        step,
        world=options.world,
        num_nodes=options.num_nodes,
        strategy=strategy,
        precision=options.precision,
        accelerator=options.accelerator,
        memory=options.memory,
    )
    print(result)
    if result.fits:
        return 0
    return 1


def _plot(options: argparse.Namespace) -> int:
    """Run ``fabric plot``, and return the exit code."""
    from fabric.tools.plotting import plot

    plot(*options.folders, output=options.output)
    print(f"fabric plot: wrote {options.output}", file=sys.stderr)
    return 0


def _diff(options: argparse.Namespace) -> int:
    """Run ``fabric diff``, and return the exit code: 1 if the runs differ."""
    from fabric.tools.run_diff import compare_runs

    result = compare_runs(options.first, options.second, options.close)
    print(result.text)
    if result.is_equal:
        return 0
    return 1


def _doctor(options: argparse.Namespace) -> int:
    """Run ``fabric doctor``, and return the exit code."""
    from fabric.tools.doctor import doctor

    return doctor(options.devices, options.timeout)


# [Note: fabric run]
# `fabric run` starts the ranks of a script and supervises them like the launcher `popen`. On one
# machine the ranks connect through a private file, so that no port is open on the network. On
# several machines the commands meet at a port of machine 0, and start and end their ranks together;
# see [Note: Generations] in launchers/agent.py.
def _run(options: argparse.Namespace) -> int:
    """Run ``fabric run``, and return the exit code of the script's last attempt."""
    # Each of these calls raises a ConfigurationError if an option cannot work.
    _require_script(options)
    _fill_in_machine_options(options)
    _require_consistent_machines(options)
    _create_log_dir(options)
    worlds = _resolve_worlds(options)  # the place of each rank of this machine
    # These imports follow the checks, whose errors are then printed sooner.
    from fabric.launchers.script import Script

    limit: _RestartLimit = options.max_restarts
    # torchrun sets the variables whose names begin with TORCHELASTIC. Scripts may read them.
    variables = _option_variables(options)
    variables["TORCHELASTIC_MAX_RESTARTS"] = str(limit.count)
    script = Script(
        name=options.script,
        is_module=options.module,
        arguments=[options.script, *options.arguments],  # becomes sys.argv
        directory=os.getcwd(),
    )
    attempts = _Attempts(
        options=options,
        script=script,
        worlds=worlds,
        variables=variables,
        server=_create_fork_server(options, script, worlds),
    )
    if options.num_nodes in (None, 1):
        return _run_on_one_machine(attempts, limit)
    return _run_on_machines(attempts, limit)


def _create_fork_server(
    options: argparse.Namespace, script: "Script", worlds: Sequence[World]
) -> "ForkServer | None":
    """Return the fork server that starts the ranks, or None if new interpreters start faster.

    The server imports torch once, for all ranks of this machine and for all their starts.

    Args:
        options: the parsed options.
        script: the script.
        worlds: the places of this machine's ranks.
    """
    # Late, since this imports torch, which takes seconds. See [Note: late imports].
    from fabric.launchers.script import script_fork_server

    # `fabric doctor` examines how a new interpreter imports torch.
    if options.module and options.script == "fabric":
        return None
    has_restarts = options.max_restarts.count > 0
    # Ranks that never import torch would wait in vain until the server has imported it.
    imports_torch = script.mentions("torch") or script.mentions("fabric")
    if not has_restarts and (len(worlds) == 1 or not imports_torch):
        return None
    return script_fork_server(script, worlds, has_restarts=has_restarts)


@dataclass(frozen=True)
class _Attempts:
    """The starts of a script by this command. The attributes are the same for all of them.

    Attributes:
        options: the parsed options.
        script: the script.
        worlds: the places of this machine's ranks.
        variables: variables for the environment of the ranks.
        server: the fork server that starts the ranks. None starts new interpreters.
    """

    options: argparse.Namespace
    script: "Script"
    worlds: Sequence[World]
    variables: dict[str, str]
    server: "ForkServer | None"

    def run(
        self, restart_count: int, port: int | None, should_end: Callable[[], bool]
    ) -> "ScriptEnd":
        """Start the ranks, and return when all of them have ended.

        Args:
            restart_count: how often the ranks have been started before. Scripts read it from a
                variable, and the names of log files contain it.
            port: the port through which the ranks connect. None on one machine.
            should_end: returns whether to end the ranks early. Called often while they run.
        """
        from fabric.launchers.logs import RankLogs
        from fabric.launchers.script import run_script

        variables = {**self.variables, "TORCHELASTIC_RESTART_COUNT": str(restart_count)}
        logs = None  # the ranks write to the terminal
        if self.options.log_dir:
            logs = RankLogs(self.options.log_dir, restart_count, tee=self.options.tee)
            print(f"fabric run: the ranks write to {logs.path('*')}", file=sys.stderr)
        return run_script(
            self.script,
            [replace(world, port=port) for world in self.worlds],
            variables=variables,
            logs=logs,
            server=self.server,
            should_end=should_end,
            # With restarts, print the reason if the server cannot be used, as each restart then
            # imports torch again.
            prints_hazard=self.options.max_restarts.count > 0,
        )


def _run_on_one_machine(attempts: _Attempts, limit: _RestartLimit) -> int:
    """Run the script, again after each failure if the limit allows. Return the exit code."""
    from fabric.launchers.rank import PREEMPTED
    from fabric.launchers.supervisor import never

    restart_times: list[float] = []
    while True:
        script_end = attempts.run(len(restart_times), port=None, should_end=never)
        script_end.print_report()
        # The scheduler restarts a preempted job.
        has_failed = script_end.exit_code not in (0, PREEMPTED)
        # After Ctrl-C, the user wants no restart.
        if not has_failed or script_end.is_interrupted:
            return script_end.exit_code
        now = time.monotonic()
        if not limit.allows_restart(now, restart_times):
            return script_end.exit_code
        restart_times.append(now)
        print(f"fabric run: restart {len(restart_times)} of {limit.text}", file=sys.stderr)


def _run_on_machines(attempts: _Attempts, limit: _RestartLimit) -> int:
    """Run this machine's ranks, as often as the machines agree to start. Return the exit code.

    A *generation* is one start of the ranks on all machines.
    """
    # Late, since this imports torch, which takes seconds. See [Note: late imports].
    from fabric.launchers.agent import AgentConfig, NodeAgent

    options = attempts.options
    config = AgentConfig(
        node_rank=options.node_rank,
        num_nodes=options.num_nodes,
        num_processes=len(attempts.worlds),
        address=options.main_address,
        port=options.main_port,
        node_timeout=options.node_timeout,
        restart_limit=limit.text,
        allows_restart=limit.allows_restart,
    )
    # Tells the ranks that the agent of machine 0 serves their store, so that rank 0 does not.
    variables = {**attempts.variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    attempts = replace(attempts, variables=variables)
    with NodeAgent(config) as agent:
        generation = agent.wait_for_generation()  # None once the job has ended
        while generation is not None:
            script_end = attempts.run(generation.number, generation.port, agent.should_end_ranks)
            agent.report(script_end)
            generation = agent.wait_for_generation()
        return agent.exit_code()


def _option_variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that pass the options of ``fabric run`` to the ranks.

    ``Fabric()`` in the script reads the variables.
    """
    # Late, since this imports torch, which takes seconds. See [Note: late imports].
    from fabric._plan import AFTER_SCRIPT_SUFFIX, RUN_VARIABLES

    variables: dict[str, str] = {}
    for name, variable in RUN_VARIABLES.items():
        value = getattr(options, name)
        if value is not None:
            variables[variable] = str(value)
        # For an option after the script, Fabric() raises an error if the script ignores the option.
        value_after_script = _find_option_after_script(options, name)
        if value_after_script is not None:
            variables[variable + AFTER_SCRIPT_SUFFIX] = value_after_script
    return variables


def _find_option_after_script(options: argparse.Namespace, name: str) -> str | None:
    """Return the value of an option of ``fabric run`` that the user wrote after the script.

    In ``fabric run script.py --devices 2``, the user may have meant the option for ``fabric run``,
    but the script gets it. Return None if there is no such option, or if the script's source
    contains it in quotes: then the script has an option of this name.

    Args:
        options: the parsed options.
        name: the name of the option, such as ``"num_nodes"``.
    """
    # The pattern matches both --num-nodes and --num_nodes.
    option_pattern = f"--{name.replace('_', '[-_]')}"
    # The arguments are joined by newlines, so that "--devices=2" and "--devices", "2" are found
    # alike. A value must not look like another option, but may be negative: "-1" means all devices.
    arguments = "\n".join(options.arguments)
    match = re.search(rf"(?m)^{option_pattern}[=\n](?P<value>-?[^-\n].*)", arguments)
    if match is None:
        return None
    script = Path(options.script)
    if script.is_file():
        text = script.read_text(errors="replace")
        if re.search(f"[\"']{option_pattern}[\"']", text):
            return None
    return match["value"]


def _require_script(options: argparse.Namespace) -> None:
    """Report a script or module that does not exist, before any process starts.

    ``options.parser`` is the parser of the subcommand. Its ``error`` raises a ConfigurationError.
    """
    script_or_module = options.script
    directory = os.getcwd()
    is_module = options.module
    if is_module:
        # Only the outermost package is searched for. A search for a module inside of the package
        # would import the package, and only the ranks should import it.
        package = script_or_module.partition(".")[0]
        is_installed = find_spec(package) is not None
        # The ranks run `python -m`, which also searches the working directory. The path of this
        # process may lack the directory.
        is_in_directory = PathFinder.find_spec(package, [directory]) is not None
        if not is_installed and not is_in_directory:
            options.parser.error(
                f"there is no module {package!r} in {directory!r} or among the installed modules"
            )
        return
    # Python also runs a folder that has a __main__.py.
    has_main = os.path.exists(os.path.join(script_or_module, "__main__.py"))
    if not has_main and not os.path.isfile(script_or_module):
        options.parser.error(
            f"{script_or_module!r} in {directory!r} is neither a file nor a folder with a "
            "__main__.py; write -m before the name of a module"
        )


def _fill_in_machine_options(options: argparse.Namespace) -> None:
    """Fill in the options about machines that the user did not give.

    A platform that starts one command on each machine, such as Kubeflow, describes the machines in
    environment variables. Options without such a variable get their defaults.
    """
    machines = find_machines(os.environ)
    # --num-nodes 1 is a job on this machine alone, whatever the platform says.
    if machines is not None and options.num_nodes != 1:
        _fill_in_from_platform(options, machines)
    if options.node_rank is None and options.num_nodes not in (None, 1):
        # Kubernetes sets this variable in each pod of an indexed job. A pod is a machine here.
        options.node_rank = read_integer_variable(os.environ, "JOB_COMPLETION_INDEX")
    if options.node_rank is None:
        options.node_rank = 0
    if options.main_port is None:
        options.main_port = _MAIN_PORT


def _fill_in_from_platform(options: argparse.Namespace, machines: Machines) -> None:
    """Fill in the options that the user did not give and the environment variables do.

    Args:
        options: the parsed options. Changed in place.
        machines: the machines that the variables describe.

    Raises:
        ConfigurationError: the number of machines may change, and the user has not fixed it.
    """
    # In an elastic job, the variables give only a range.
    is_elastic = machines.num_nodes is None
    if is_elastic and options.num_nodes is None:
        options.parser.error(
            f"{machines.variables} in the environment: the number of machines may change, "
            "which only torchrun supports; or --num-nodes N"
        )
    defaults = {
        "num_nodes": machines.num_nodes,
        "node_rank": machines.node_rank,
        "main_address": machines.main_address,
        "main_port": machines.main_port,
    }
    if machines.num_processes is not None:
        # A text, as the parser gives it for --devices.
        defaults["devices"] = str(machines.num_processes)
    for name, default in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, default)


def _require_consistent_machines(options: argparse.Namespace) -> None:
    """Report options about machines that contradict each other, before any process starts.

    Called after :func:`_fill_in_machine_options`, which sets ``node_rank`` to a number.
    ``options.parser`` is the parser of the subcommand. Its ``error`` raises a ConfigurationError.
    """
    num_nodes = options.num_nodes or 1
    parser = options.parser
    if options.node_rank >= num_nodes:
        parser.error(
            f"--num-nodes {num_nodes} has no machine --node-rank {options.node_rank}: machines are "
            "counted from 0"
        )
    if num_nodes == 1:
        if options.main_address:
            print(
                "fabric run: --main-address has no meaning on one machine and is ignored",
                file=sys.stderr,
            )
        return
    if not options.main_address:
        parser.error(
            f"--num-nodes {num_nodes} needs --main-address, the host name of machine 0, the same "
            "on every machine"
        )


def _create_log_dir(options: argparse.Namespace) -> None:
    """Create the folder of the ranks' logs, and report a folder that cannot be written to.

    Does nothing without ``--log-dir``. Called before any process starts.
    """
    if not options.log_dir:
        if options.tee:
            options.parser.error(
                "--tee shows here what --log-dir writes to files: it needs --log-dir"
            )
        return
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
        # Raises if no file can be created in the folder. The file is removed at once.
        tempfile.TemporaryFile(dir=options.log_dir).close()
    except OSError as error:
        options.parser.error(f"--log-dir {options.log_dir}: {error}")


def _resolve_worlds(options: argparse.Namespace) -> list[World]:
    """Return the place in the job of each process to start on this machine.

    The script's ``Fabric()`` will get the same options. Checking them here reports an error once,
    and not in every rank.

    Raises:
        ConfigurationError: the options do not fit each other or this machine.
    """
    # Late, since this imports torch, which takes seconds. See [Note: late imports].
    from fabric._plan import resolve_plan
    from fabric.launchers import InlineLauncher
    from fabric.launchers.base import node_worlds

    arguments: dict[str, Any] = {}
    for name in ("accelerator", "strategy", "devices", "precision"):
        value = getattr(options, name)
        if value is not None:
            arguments[name] = value
    # The plan checks the options and counts the processes. Its launcher starts nothing, since
    # `fabric run` starts the processes. This command may itself run in a job of a launcher, whose
    # variables do not describe the new job: environment="none" and env={} hide them.
    plan = resolve_plan(**arguments, launcher=InlineLauncher(), environment="none", env={})
    num_processes = plan.launch_spec.num_processes
    num_nodes = options.num_nodes or 1
    if num_nodes == 1:
        # Without an address, the ranks connect through a private file, see [Note: fabric run].
        return node_worlds(num_processes)
    worlds = node_worlds(
        num_processes,
        node_rank=options.node_rank,
        num_nodes=num_nodes,
        address=options.main_address,
        port=options.main_port,
    )
    # The plan above is for one machine, since fabric's launchers start no processes on others. This
    # call raises if the strategy does not run on several machines.
    resolve_plan(**arguments, num_nodes=num_nodes, env=worlds[0].to_env())
    return worlds

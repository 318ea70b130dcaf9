"""The command ``fabric``: one function per subcommand.

[Note: fabric run] The command starts the ranks and supervises them as the launcher ``popen`` does.
On one machine the ranks connect through a private file, so that nothing listens on the network. On
several machines they connect through a port of machine 0.

[Note: late imports] Modules that import torch are imported by the functions that need them, so that
help and errors are printed at once.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from fabric.errors import ConfigurationError, FabricError
from fabric.world import World

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``fabric``.

    Args:
        argv: the arguments after the name of the command. None uses those of this process.

    Returns:
        The exit code: 0, the exit code of the script, 128 + n after signal n (130 for Ctrl-C), or 2
        for wrong usage, which is explained on standard error before any process starts. The
        environment does not change.
    """
    try:
        options = _build_parser().parse_args(argv)
        return options.command(options)
    except FabricError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


class _Parser(argparse.ArgumentParser):
    """A parser that reports wrong usage like every other error of fabric."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        raise ConfigurationError(
            self.prog, problem=message, expected=usage, suggestion=f"{self.prog} --help"
        )


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fabric",
        description="Grow a PyTorch loop from one device to many.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fabric {version('torch-fabric')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_consolidate(commands)
    _add_plan(commands)
    _add_plot(commands)
    _add_doctor(commands)
    return parser


def _add_run(commands: Any) -> None:
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
        help="number of machines; this command has to run on each of them",
    )
    parser.add_argument(
        "--node-rank",
        metavar="R",
        type=_at_least(0),
        default=0,
        help="number of this machine, from 0 (default: 0)",
    )
    parser.add_argument(
        "--main-address", metavar="H", help="host name of machine 0; needed with several machines"
    )
    parser.add_argument(
        "--main-port",
        metavar="P",
        type=_at_least(1),
        default=29500,
        help="a free port of machine 0 (default: 29500)",
    )
    parser.add_argument("--strategy", metavar="S", help="ddp, fsdp, ... or auto")
    parser.add_argument("--precision", metavar="P", help="32-true, bf16-mixed, ...")
    parser.add_argument(
        "--max-restarts",
        metavar="K",
        type=_at_least(0),
        default=0,
        help="how often to start again after a failure, on one machine only (default: 0)",
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
        help="with --log-dir: write the output to the terminal, too, each line behind its rank",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="the script is the name of a module"
    )
    parser.add_argument("script", metavar="script.py", help="the script, or with -m a module")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )


def _add_consolidate(commands: Any) -> None:
    parser = _add_command(
        commands,
        "consolidate",
        _consolidate,
        summary="make one file of a sharded checkpoint",
        description="Write the content of a sharded checkpoint, which is a folder, to one file "
        "that fabric.load reads under any strategy. Or write the weights of a model to a "
        ".safetensors file, or to a folder that Hugging Face reads.",
    )
    parser.add_argument("directory", metavar="DIR", help="the sharded checkpoint")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="the file to write; .safetensors writes weights alone (default: DIR.pt)",
    )
    parser.add_argument(
        "--key",
        metavar="ENTRY",
        help="for weights: the entry of the model (default: the only model)",
    )
    parser.add_argument(
        "--max-shard-gb",
        metavar="GB",
        type=float,
        help="write weights to a folder, in files of up to GB (default folder: DIR-weights)",
    )


def _add_plan(commands: Any) -> None:
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
        help="step(fabric, model, *optimizers) of that module (default: step)",
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
        help="ddp, fsdp, ..., or the name of a strategy in that module (default: auto)",
    )
    parser.add_argument("--precision", metavar="P", help="32-true, bf16-mixed, ...")
    parser.add_argument(
        "--accelerator",
        metavar="A",
        default="cuda",
        help="cpu, cuda, ...: where the job would run (default: cuda)",
    )
    parser.add_argument("--memory", metavar="SIZE", help="memory of a device, such as 80GiB")


def _add_plot(commands: Any) -> None:
    parser = _add_command(
        commands,
        "plot",
        _plot,
        summary="draw the metrics of runs",
        description="Draw the metrics that CSVLogger has written, each in a panel. Needs "
        "matplotlib.",
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


def _add_doctor(commands: Any) -> None:
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
    """Add a subcommand and return its parser.

    Args:
        commands: the subcommands of the main parser.
        name: the name of the subcommand.
        run: the function that runs the subcommand and returns the exit code.
        summary: the text in the help of the main command.
        description: the text in the help of the subcommand.
    """
    parser = commands.add_parser(name, help=summary, description=description, allow_abbrev=False)
    parser.set_defaults(command=run, parser=parser)
    return parser


def _at_least(minimum: int) -> Callable[[str], int]:
    """Return a converter of an argument to an integer that is not below the minimum."""

    def integer(text: str) -> int:
        number = int(text)  # argparse reports a ValueError
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {minimum}")
        return number

    return integer


def _consolidate(options: argparse.Namespace) -> int:
    """Run ``fabric consolidate``."""
    from fabric.checkpoint.consolidate import consolidate

    output = consolidate(options.directory, options.output, options.key, options.max_shard_gb)
    print(f"fabric consolidate: wrote {output}", file=sys.stderr)
    return 0


def _plan(options: argparse.Namespace) -> int:
    """Run ``fabric plan``."""
    from fabric.tools.dry_run import plan

    sys.path.insert(0, os.getcwd())
    try:
        build = resolve_name(options.build)
        module = import_module(options.build.partition(":")[0])
        step = getattr(module, options.step)
    except (ImportError, AttributeError, ValueError) as error:
        request = f"fabric plan {options.build} --step {options.step}"
        raise ConfigurationError(request, problem=str(error)) from error
    for name, function in ((options.build, build), (options.step, step)):
        if not callable(function):
            raise ConfigurationError(
                "fabric plan",
                problem=f"{name} is of type {type(function).__name__}, which is not callable",
                expected="functions of a module, such as train:build",
            )
    result = plan(
        build,
        step,
        world=options.world,
        num_nodes=options.num_nodes,
        strategy=getattr(module, options.strategy, options.strategy),
        precision=options.precision,
        accelerator=options.accelerator,
        memory=options.memory,
    )
    print(result)
    return int(not result.fits)


def _plot(options: argparse.Namespace) -> int:
    """Run ``fabric plot``."""
    from fabric.tools.plotting import plot

    plot(*options.folders, output=options.output)
    print(f"fabric plot: wrote {options.output}", file=sys.stderr)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    """Run ``fabric doctor``."""
    from fabric.tools.doctor import doctor

    return doctor(options.devices, options.timeout)


def _run(options: argparse.Namespace) -> int:
    """Run ``fabric run``."""
    _check_run_options(options)
    worlds = _resolve_worlds(options)
    from fabric.launchers.logs import RankLogs
    from fabric.launchers.script import Script, run_script

    variables = _option_variables(options)
    variables["TORCHELASTIC_MAX_RESTARTS"] = str(options.max_restarts)
    script = Script(
        name=options.script,
        is_module=options.module,
        arguments=[options.script, *options.arguments],
        directory=os.getcwd(),
    )
    code = 0
    for attempt in range(options.max_restarts + 1):
        # torch's own command, torchrun, gives these variables their names.
        variables["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        if attempt > 0:
            print(f"fabric run: restart {attempt} of {options.max_restarts}", file=sys.stderr)
        logs = None
        if options.log_dir:
            logs = RankLogs(options.log_dir, attempt, tee=options.tee)
            print(f"fabric run: the ranks write to {logs.path('*')}", file=sys.stderr)
        end = run_script(script, worlds, variables, logs)
        code = end.exit_code
        if code == 0 or end.is_interrupted:
            break
    return code


def _option_variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables through which the script's ``Fabric()`` gets the options."""
    from fabric._plan import AFTER_SCRIPT_SUFFIX, RUN_VARIABLES

    variables: dict[str, str] = {}
    for name, variable in RUN_VARIABLES.items():
        value = getattr(options, name)
        if value is not None:
            variables[variable] = str(value)
        late_value = _late_option(options, name)
        if late_value is not None:
            variables[variable + AFTER_SCRIPT_SUFFIX] = late_value
    return variables


def _late_option(options: argparse.Namespace, name: str) -> str | None:
    """Return the value of an option of this command that follows the script, or None.

    An option whose name occurs in the text of the script is an option of the script.
    """
    option = f"--{name.replace('_', '[-_]')}"
    arguments = "\n".join(options.arguments)
    match = re.search(rf"(?m)^{option}[=\n](?P<value>-?[^-\n].*)", arguments)
    if match is None:
        return None
    script = Path(options.script)
    if script.is_file():
        text = script.read_text(errors="replace")
        if re.search(f"[\"']{option}[\"']", text):
            return None
    return match["value"]


def _check_run_options(options: argparse.Namespace) -> None:
    """Report wrong options of ``fabric run`` before any process starts."""
    _check_script(options)
    _check_nodes(options)
    _check_log_dir(options)


def _check_script(options: argparse.Namespace) -> None:
    script = options.script
    directory = os.getcwd()
    if options.module:
        # Only the package is looked for here: to look for its modules is to run their packages,
        # which the ranks do.
        package = script.partition(".")[0]
        if not find_spec(package) and not PathFinder.find_spec(package, [directory]):
            options.parser.error(
                f"there is no module {package!r} in {directory!r}, nor among the installed modules"
            )
        return
    has_main = os.path.exists(os.path.join(script, "__main__.py"))
    if not has_main and not os.path.isfile(script):
        options.parser.error(
            f"{script!r} in {directory!r} is neither a file nor a folder with a __main__.py; a "
            "module needs -m"
        )


def _check_nodes(options: argparse.Namespace) -> None:
    nodes = options.num_nodes or 1
    error = options.parser.error
    if options.node_rank >= nodes:
        error(
            f"--num-nodes {nodes} has no machine --node-rank {options.node_rank}: they are counted "
            "from 0"
        )
    if nodes == 1:
        if options.main_address:
            print(
                "fabric run: --main-address has no meaning on one machine and is ignored",
                file=sys.stderr,
            )
        return
    if not options.main_address:
        error(
            f"--num-nodes {nodes} needs --main-address, the host name of machine 0, the same on "
            "every machine"
        )
    if options.max_restarts:
        error("--max-restarts is for one machine: several would start again at different times")


def _check_log_dir(options: argparse.Namespace) -> None:
    """Create the folder of the logs, and check that it can be written to."""
    if not options.log_dir:
        if options.tee:
            options.parser.error(
                "--tee shows here what --log-dir writes to files: it needs --log-dir"
            )
        return
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.log_dir).close()
    except OSError as problem:
        options.parser.error(f"--log-dir {options.log_dir}: {problem}")


def _resolve_worlds(options: argparse.Namespace) -> list[World]:
    """Return the places of this machine's ranks.

    The options are checked as the script's ``Fabric()`` will check them.
    """
    from fabric._plan import resolve_plan
    from fabric.launchers import InlineLauncher
    from fabric.launchers.base import node_worlds

    arguments: dict[str, Any] = {}
    for name in ("accelerator", "strategy", "devices", "precision"):
        value = getattr(options, name)
        if value is not None:
            arguments[name] = value
    # This command starts the processes, even if a launcher started this command.
    plan = resolve_plan(**arguments, launcher=InlineLauncher(), environment="none", env={})
    processes = plan.launch_spec.num_processes
    nodes = options.num_nodes or 1
    if nodes == 1:
        return node_worlds(processes)
    worlds = node_worlds(
        processes,
        options.node_rank,
        nodes,
        address=options.main_address,
        port=options.main_port,
    )
    # Called for its error: whether the strategy can run on several machines.
    resolve_plan(**arguments, num_nodes=nodes, env=worlds[0].to_env())
    return worlds

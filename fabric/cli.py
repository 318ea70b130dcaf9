"""The command ``fabric``: one function per subcommand.

[Note: fabric run] The command starts the ranks and supervises them as the launcher ``popen`` does. On one node they
connect through a private file, so that nothing listens on the network; on several, through a port of machine 0.

[Note: late imports] What imports torch is imported by the functions that need it, so that help and errors come
at once.
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
        argv: the arguments after the command's name; ``None`` takes those of this process.

    Returns:
        The exit code: 0, that of the script, 128 + n after signal n (130 for Ctrl-C), or 2 for wrong usage, which is
        explained on standard error before any process starts. The environment is as it was before.
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
    """Reports wrong usage as every other error of fabric."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        raise ConfigurationError(self.prog, message, usage, f"{self.prog} --help")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fabric",
        description="Grow a PyTorch loop from one device to many.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fabric {version('torch-fabric')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    about = "Run a script in one process per device. The options reach its Fabric(), whose arguments have to agree."
    add = _command(commands, "run", _run, "run a script in several processes", about)
    add("--accelerator", metavar="A", help="cpu, cuda, mps or auto")
    add(
        "--devices",
        metavar="D",
        help='number of devices, indices such as "0,2", -1 for all, or auto',
    )
    add(
        "--num-nodes",
        metavar="N",
        type=_at_least(1),
        help="number of machines, on each of which this command runs",
    )
    add(
        "--node-rank",
        metavar="R",
        type=_at_least(0),
        default=0,
        help="number of this machine, from 0",
    )
    add("--main-address", metavar="H", help="host name of machine 0, with several machines")
    add(
        "--main-port",
        metavar="P",
        type=_at_least(1),
        default=29500,
        help="a free port there (default: 29500)",
    )
    add("--strategy", metavar="S", help="ddp, fsdp, ... or auto")
    add("--precision", metavar="P", help="32-true, bf16-mixed, ...")
    add(
        "--max-restarts",
        metavar="K",
        type=_at_least(0),
        default=0,
        help="restarts, on one machine only (default: 0)",
    )
    add(
        "--log-dir",
        metavar="DIR",
        type=Path,
        help="write what each rank prints to a file there, not to the terminal",
    )
    add(
        "--tee",
        action="store_true",
        help="with --log-dir: to the terminal, too, each line behind its rank",
    )
    add("-m", "--module", action="store_true", help="the script is the name of a module")
    add("script", metavar="script.py", help="the script, or with -m a module")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")

    about = "Write the content of a sharded checkpoint, which is a folder, to one file that fabric.load reads under "
    about += "any strategy; or the weights of a model to a .safetensors file, or to a folder as Hugging Face reads it."
    add = _command(
        commands, "consolidate", _consolidate, "make one file of a sharded checkpoint", about
    )
    add("directory", metavar="DIR", help="the sharded checkpoint")
    add(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="the file; .safetensors for weights alone (default: DIR.pt)",
    )
    add(
        "--key",
        metavar="ENTRY",
        help="for weights: which entry is the model (default: the only one there is)",
    )
    add(
        "--max-shard-gb",
        metavar="GB",
        type=float,
        help="weights in a folder, in files up to GB (default DIR-weights)",
    )

    about = "Print the memory that a rank needs and the collectives of a step. Exits with 1 if that is over --memory."
    add = _command(commands, "plan", _plan, "dry run of a training step", about)
    add(
        "build",
        metavar="module:function",
        help="a function build(fabric) that returns a model and its optimizers",
    )
    add(
        "--step",
        metavar="NAME",
        default="step",
        help="step(fabric, model, *optimizers) of that module (default: step)",
    )
    add(
        "--world",
        metavar="W",
        type=_at_least(1),
        default=1,
        help="number of processes (default: 1)",
    )
    add(
        "--num-nodes",
        metavar="N",
        type=_at_least(1),
        default=1,
        help="number of machines (default: 1)",
    )
    add(
        "--strategy",
        metavar="S",
        default="auto",
        help="ddp, fsdp, ..., or the name of a strategy in that module",
    )
    add("--precision", metavar="P", help="32-true, bf16-mixed, ...")
    add(
        "--accelerator",
        metavar="A",
        default="cuda",
        help="cpu, cuda, ... of the job (default: cuda)",
    )
    add("--memory", metavar="SIZE", help="of a device, such as 80GiB")

    about = "Draw the metrics that CSVLogger has written, a panel for each; needs matplotlib."
    add = _command(commands, "plot", _plot, "draw the metrics of runs", about)
    add("folders", metavar="RUN", nargs="+", help="the folder of a run, or of several")
    add(
        "-o",
        "--output",
        metavar="FILE",
        default="metrics.png",
        help=".png, .svg or .pdf (default: metrics.png)",
    )

    about = "Look for what makes a job fail, on this machine and among its processes. Exits with 1 if it finds any."
    add = _command(commands, "doctor", _doctor, "look for what makes a job fail", about)
    add(
        "--devices",
        metavar="N",
        type=_at_least(1),
        default=2,
        help="processes, outside of a job (default: 2)",
    )
    add(
        "--timeout",
        metavar="S",
        type=_at_least(1),
        default=20,
        help="seconds for each part (default: 20)",
    )
    return parser


def _command(
    commands: Any, name: str, run: Callable[..., int], short: str, about: str
) -> Callable[..., Any]:
    """Add a subcommand; what adds arguments to it."""
    command = commands.add_parser(name, help=short, description=about, allow_abbrev=False)
    command.set_defaults(command=run, parser=command)
    return command.add_argument


def _at_least(lowest: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if int(text) < lowest:  # what is no integer is reported by argparse
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {lowest}")
        return int(text)

    return integer


def _consolidate(options: argparse.Namespace) -> int:
    """``fabric consolidate``."""
    from fabric.checkpoint.consolidate import consolidate

    output = consolidate(options.directory, options.output, options.key, options.max_shard_gb)
    print(f"fabric consolidate: wrote {output}", file=sys.stderr)
    return 0


def _plan(options: argparse.Namespace) -> int:
    """``fabric plan``."""
    from fabric.tools.dry_run import plan

    sys.path.insert(0, os.getcwd())
    try:
        build = resolve_name(options.build)
        module = import_module(options.build.partition(":")[0])
        step = getattr(module, options.step)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"fabric plan {options.build} --step {options.step}", str(error)
        ) from error
    if not callable(build) or not callable(step):
        problem = f"{options.build} is a {type(build).__name__}, and {options.step} a {type(step).__name__}"
        raise ConfigurationError(
            "fabric plan", problem, "functions of a module, such as train:build"
        )
    names = ("world", "num_nodes", "memory", "precision", "accelerator")
    given = {name: getattr(options, name) for name in names}
    print(
        found := plan(
            build, step, strategy=getattr(module, options.strategy, options.strategy), **given
        )
    )
    return int(not found.fits)


def _plot(options: argparse.Namespace) -> int:
    """``fabric plot``."""
    from fabric.tools.plotting import plot

    plot(*options.folders, output=options.output)
    print(f"fabric plot: wrote {options.output}", file=sys.stderr)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    """``fabric doctor``."""
    from fabric.tools.doctor import doctor

    return doctor(options.devices, options.timeout)


def _run(options: argparse.Namespace) -> int:
    """``fabric run``."""
    worlds = _worlds(options)
    from fabric._plan import AFTER_SCRIPT, RUN_OPTIONS
    from fabric.launchers.logs import RankLogs
    from fabric.launchers.script import Script, run_script

    given = {variable: getattr(options, name) for name, variable in RUN_OPTIONS.items()}
    given |= {
        variable + AFTER_SCRIPT: _late_option(options, name)
        for name, variable in RUN_OPTIONS.items()
    }
    variables = {variable: str(value) for variable, value in given.items() if value is not None}
    words = [options.script, *options.arguments]
    script = Script(
        name=options.script, is_module=options.module, arguments=words, directory=os.getcwd()
    )
    code = 0
    for attempt in range(options.max_restarts + 1):
        # Under the names that torch's own command gives them.
        counts = {
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        }
        logs = options.log_dir and RankLogs(options.log_dir, attempt, tee=options.tee)
        if attempt:
            print(f"fabric run: restart {attempt} of {options.max_restarts}", file=sys.stderr)
        if logs:
            print(f"fabric run: the ranks write to {logs.path('*')}", file=sys.stderr)
        code, interrupted = run_script(script, worlds, variables | counts, logs)
        if code == 0 or interrupted:
            break
    return code


def _late_option(options: argparse.Namespace, name: str) -> str | None:
    """An option of this command that follows the script, which has none of that name as far as its text shows."""
    script = Path(options.script)
    option = f"--{name.replace('_', '[-_]')}"
    found = re.search(rf"(?m)^{option}[=\n](-?[^-\n].*)", "\n".join(options.arguments))
    text = script.read_text(errors="replace") if script.is_file() else ""
    return found[1] if found and not re.search(f"[\"']{option}[\"']", text) else None


def _worlds(options: argparse.Namespace) -> list[World]:
    """The places of this machine's ranks.

    All is checked before any process starts: the script, the nodes, and the options as the script's ``Fabric()`` will.
    """
    script = options.script
    error = options.parser.error
    nodes = options.num_nodes or 1
    node = options.node_rank
    # The rest of its name is looked for by the ranks: to find that is to run its packages.
    package = script.partition(".")[0]
    if options.module and not (find_spec(package) or PathFinder.find_spec(package, [os.getcwd()])):
        error(f"there is no module {package!r} in {os.getcwd()!r}, nor among the installed ones")
    if (
        not options.module
        and not os.path.isfile(script)
        and not os.path.exists(os.path.join(script, "__main__.py"))
    ):
        error(
            f"{script!r} in {os.getcwd()!r} is neither a file nor a folder with a __main__.py; a module needs -m"
        )
    if node >= nodes:
        error(f"--num-nodes {nodes} has no machine --node-rank {node}: they are counted from 0")
    if nodes > 1 and not options.main_address:
        error(
            f"--num-nodes {nodes} needs --main-address, the host name of machine 0, the same on every machine"
        )
    if nodes > 1 and options.max_restarts:
        error("--max-restarts is for one machine: several would start again at different times")
    if options.tee and not options.log_dir:
        error("--tee shows here what --log-dir writes to files: it needs --log-dir")
    try:
        if options.log_dir:
            options.log_dir.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=options.log_dir).close()
    except OSError as problem:
        error(f"--log-dir {options.log_dir}: {problem}")
    if nodes == 1 and options.main_address:
        print(
            "fabric run: --main-address has no meaning on one machine and is ignored",
            file=sys.stderr,
        )

    from fabric._plan import resolve
    from fabric.launchers import InlineLauncher
    from fabric.launchers.base import node_worlds

    names = ("accelerator", "strategy", "devices", "precision")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    # This command starts the processes, however it was started itself.
    processes = resolve(
        **given, launcher=InlineLauncher(), environment="none", env={}
    ).launch_spec.num_processes
    rendezvous = {"address": options.main_address, "port": options.main_port} if nodes > 1 else {}
    worlds = node_worlds(processes, node, nodes, **rendezvous)
    if nodes > 1:
        resolve(**given, num_nodes=nodes, env=worlds[0].to_env())
    return worlds

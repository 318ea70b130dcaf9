"""The frozen plan of a job: the tables of names, and the rules for arguments of ``Fabric`` and their combinations.

Strings become objects here and nowhere else. No process is started and no device is touched, so that what cannot work
is an error before anything happens.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from functools import partial
from importlib.metadata import entry_points
from time import monotonic
from typing import Any

import torch

from fabric import strategies
from fabric.accelerators import ACCELERATORS, Accelerator
from fabric.diagnostics.hang_report import DEFAULT_WATCHDOG
from fabric.environments import Environment, detect
from fabric.errors import ArgumentTypeError, ConfigurationError
from fabric.launchers import LAUNCHERS, InlineLauncher, Launcher, LaunchSpec
from fabric.launchers.base import is_interactive, notebook_start_method
from fabric.launchers.preemption import to_seconds
from fabric.launchers.serialize import has_cloudpickle
from fabric.precision import Precision, parse_precision
from fabric.runtime import DEFAULT_TIMEOUT
from fabric.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from fabric.world import World

__all__ = ["AFTER_SCRIPT", "RUN_OPTIONS", "Plan", "parse_strategy", "resolve"]

_START_METHODS = {
    "ddp": "popen",
    "ddp_spawn": "spawn",
    "ddp_fork": "fork",
    "ddp_forkserver": "forkserver",
    # Fresh processes from a server that never touched CUDA or a thread pool: the start method that is safe there.
    "ddp_notebook": "forkserver",
}
_DDP = {name: partial(DDPStrategy, start_method=method) for name, method in _START_METHODS.items()}
STRATEGIES: Mapping[str, Any] = {
    "single_device": SingleDeviceStrategy,
    "dp": strategies.DataParallelStrategy,
    **_DDP,
    **{
        f"{name}_find_unused_parameters_true": partial(row, find_unused_parameters=True)
        for name, row in _DDP.items()
    },
    "fsdp": lambda **options: strategies.FSDPStrategy(**options),  # imported then
    "model_parallel": lambda **options: strategies.ModelParallelStrategy(**options),
    "fsdp_cpu_offload": lambda **options: strategies.FSDPStrategy(cpu_offload=True, **options),
}
# The environment variables that `fabric run` sets, by the argument of Fabric that each stands for.
RUN_OPTIONS = {
    key: f"FABRIC_{key.upper()}"
    for key in ("accelerator", "strategy", "devices", "num_nodes", "precision")
}
AFTER_SCRIPT = (
    "_AFTER_SCRIPT"  # behind the names of these variables, for options that came after the script
)
_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(RUN_OPTIONS, "auto"),
    **dict.fromkeys(
        ("precision", "environment", "launcher", "timeout", "time_limit", "stop_margin")
    ),
    "check_collectives": False,
    "watchdog": DEFAULT_WATCHDOG,
}
_OFF = ("", "0", "false", "no", "off")  # what a variable says that turns something on
_LONGEST = 10_000_000  # seconds; the stores of torch count milliseconds in 64 bits, gloo in fewer

_Devices = tuple[torch.device, ...]
_Found = tuple[Environment, World] | None  # what made this process, and its place


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is decided before a process starts.

    Attributes:
        accelerator: the hardware.
        devices: the devices of this node: one for each process, or the replicas of a process that drives several.
        num_nodes: number of nodes.
        precision: dtypes.
        strategy: what is done to modules.
        world: the place of this process; None when the processes are still to be made.
        launcher: how processes are started.
        launch_spec: what is to be started on each node.
        started_by: the name of what starts the processes of this job.
        check_collectives: whether the ranks compare each collective before they make it.
        timeout: how long a collective may wait.
        watchdog: how long a rank waits before a report is printed; zero for never.
        deadline: when the job is to save and stop at the latest, on the system-wide monotonic clock.
        stop_margin: how long before the end of a SLURM job; None is what ``slurm_deadline`` says.
    """

    accelerator: Accelerator
    devices: _Devices
    num_nodes: int
    precision: Precision
    strategy: Strategy
    world: World | None
    launcher: Launcher
    launch_spec: LaunchSpec
    started_by: str
    check_collectives: bool
    timeout: timedelta
    watchdog: timedelta
    deadline: float
    stop_margin: timedelta | None

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        # Nodes may hold different numbers of processes, which the launcher that made them knows.
        return (
            self.launch_spec.num_processes * self.num_nodes
            if self.world is None
            else self.world.world_size
        )

    def describe(self) -> list[str]:
        """What was resolved, a line each."""
        lines = [
            f"accelerator  {self.accelerator.name}, {', '.join(map(str, self.devices))}",
            f"strategy     {self.strategy.name} ({type(self.strategy).__name__})",
            f"precision    {self.precision.name}",
            f"processes    {self.world_size} on {self.num_nodes} node(s), by {self.started_by}",
        ]
        if self.world is not None:
            lines.append(f"this one     rank {self.world.rank}, local rank {self.world.local_rank}")
        if self.check_collectives:
            lines.append("collectives  checked")
        if self.strategy.drives_all_devices:
            lines.append(f"replicas     {len(self.devices)} of each module, in this process")
        return lines


def resolve(*, env: Mapping[str, str] | None = None, **arguments: Any) -> Plan:
    """The plan of one job. Arguments and errors are those of ``Fabric``; ``env`` replaces ``os.environ``."""
    env = os.environ if env is None else env
    given: dict[str, Any] = {**_DEFAULTS, **arguments}
    for argument in ("timeout", "watchdog", "time_limit", "stop_margin"):
        if given[argument] is not None:
            given[argument] = _parse_duration(argument, given[argument])
    for argument, variable in RUN_OPTIONS.items() if given["environment"] != "none" else ():
        if value := env.get(variable):
            source = f"`fabric run --{argument.replace('_', '-')} {value}` ({variable}; environment='none' ignores it)"
            given[argument] = _one_value(argument, given[argument], value, source)
    precision = parse_precision(given["precision"])
    named = parse_strategy(given["strategy"], precision=precision)
    known = named or DDPStrategy()  # one that is still to be chosen has no options and no devices
    for argument, value in _options_of(known).items():
        source = f"{_spelling(argument, value)!r} in the strategy"
        given[argument] = _one_value(argument, given[argument], value, source)
    _refuse_late_options(env, given)
    found = _find_environment(given["environment"], env)
    world = found and found[1]
    hardware = _parse_accelerator(given["accelerator"])
    where = _parse_devices(hardware, given["devices"], known, found)
    nodes = _parse_num_nodes(given["num_nodes"], found)
    kind = (
        SingleDeviceStrategy if len(where) * nodes == 1 else partial(DDPStrategy, num_nodes=nodes)
    )
    chosen = named or kind(precision=precision)
    chosen.check(accelerator=hardware, devices=where, num_nodes=nodes)
    _refuse_unconnected_processes(chosen, num_processes=len(where) * nodes)
    spec = LaunchSpec(
        num_processes=1 if chosen.drives_all_devices else len(where), device_type=hardware.name
    )
    if world is None and spec.num_processes == 1:
        world = World()
    launcher = _choose_launcher(given, chosen, spec, world, found)
    return Plan(
        accelerator=hardware,
        devices=where,
        num_nodes=nodes,
        precision=parse_precision(given["precision"]),
        strategy=chosen,
        world=world,
        launcher=launcher,
        launch_spec=spec,
        started_by=_maker(found) if found else launcher.name if world is None else "this script",
        check_collectives=given["check_collectives"]
        or env.get("FABRIC_CHECK", "").strip().lower() not in _OFF,
        timeout=_parse_duration(
            "timeout", DEFAULT_TIMEOUT if given["timeout"] is None else given["timeout"]
        ),
        watchdog=given["watchdog"],
        deadline=float("inf")
        if given["time_limit"] is None
        else monotonic() + given["time_limit"].total_seconds(),
        stop_margin=given["stop_margin"],
    )


def parse_strategy(strategy: Strategy | strategies.StrategyName, **options: Any) -> Strategy | None:
    """The strategy that an object or a name, of ours with options, stands for; None for ``"auto"``."""
    return (
        None
        if strategy == "auto"
        else _parse_name("strategy", strategy, STRATEGIES, Strategy, **options)
    )


def _parse_accelerator(accelerator: Any) -> Accelerator:
    if accelerator == "auto":
        return next(kind() for kind in ACCELERATORS.values() if kind().is_available())
    chosen = _parse_name("accelerator", accelerator, ACCELERATORS, Accelerator)
    if not chosen.is_available():
        problem = "there is none on this machine, or torch was built without it"
        expected = '"auto" or "cpu"'
        raise ConfigurationError(f"accelerator={chosen.name!r}", problem, expected)
    return chosen


def _parse_name(
    argument: str, value: Any, table: Mapping[str, Any], kind: type, **options: Any
) -> Any:
    """The object that a name stands for, in the table or among the entry points of installed packages."""
    if isinstance(value, kind):
        return value
    key = value.lower() if isinstance(value, str) else ""
    # Only for names that are not ours: looking through all installed packages takes milliseconds.
    group = "fabric.strategies" if argument == "strategy" else f"fabric.{argument}s"
    plugins = (
        {} if key in table else {plugin.name: plugin.load for plugin in entry_points(group=group)}
    )
    if key in table or key in plugins:
        found = table[key] if key in table else plugins[key]()
        return found if isinstance(found, kind) else found(**(options if key in table else {}))
    names = ["auto", *table, *plugins]
    near = [*get_close_matches(key, names, n=1), "auto"][0]
    error = ArgumentTypeError
    problem = f"this {type(value).__name__} is no {argument}"
    if isinstance(value, str):
        error = ConfigurationError
        problem = f"there is no {argument} of that name"
    raise error(
        f"{argument}={value!r}",
        problem,
        f"{', '.join(map(repr, names))}, or an object of a subclass of {group}.{kind.__name__}",
        f'Fabric({argument}="{near}")',
    )


def _parse_duration(argument: str, value: Any) -> timedelta:
    """Seconds, a timedelta or a text; zero only for the watchdog, which it turns off."""
    seconds = to_seconds(value)
    if (
        isinstance(seconds, int | float)
        and 0 <= seconds <= _LONGEST
        and (seconds > 0 or argument == "watchdog")
    ):
        return timedelta(seconds=seconds)
    least = "at least 0 (off)" if argument == "watchdog" else "more than 0"
    expected = f"seconds, a timedelta or 'D-HH:MM:SS', {least} and at most {_LONGEST:,} s"
    raise ConfigurationError(f"Fabric({argument}={value!r})", "it is no length of time", expected)


def _options_of(strategy: Strategy) -> dict[str, Any]:
    """The arguments of ``Fabric`` that were given to the strategy's own constructor; None for those that were not."""
    devices = strategy.parallel_devices
    return {
        "accelerator": strategy.accelerator or (devices[0].type if devices else None),
        "devices": devices,
        "precision": strategy._requested_precision,
        "num_nodes": strategy.num_nodes if strategy.num_nodes != 1 else None,
        "environment": strategy.cluster_environment,
        "timeout": strategy.timeout if strategy.timeout != DEFAULT_TIMEOUT else None,
    }


def _one_value(argument: str, given: Any, other: Any, source: str) -> Any:
    """The value of an argument that may be given to ``Fabric`` and in a second place; two that differ are an error."""
    if other is None or given in ("auto", None):
        return given if other is None else other
    same_count = isinstance(other, tuple) and _spelling(argument, given) == str(
        len(other)
    )  # devices as a number
    if same_count or _spelling(argument, given) == _spelling(argument, other):
        return given
    raise ConfigurationError(
        f"Fabric({argument}={given!r}) with {source}",
        "the two differ",
        "the value in one of the two places, or the same in both",
        f"Fabric() without {argument}=",
    )


def _refuse_unconnected_processes(strategy: Strategy, num_processes: int) -> None:
    """Raise for several processes that a strategy would not connect: each would train on its own."""
    if num_processes == 1 or strategy.connects_processes or strategy.drives_all_devices:
        return
    name = type(strategy).__name__
    raise ConfigurationError(
        f"Fabric(strategy={name}(...)) with {num_processes} devices",
        f"{num_processes} processes would each train a model on their own",
        f"{name}.connects_processes = True, or drives_all_devices = True for one process that drives all devices",
        "devices=1",
    )


def _refuse_late_options(env: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Raise for options of ``fabric run`` after the script that nobody reads: the job would run without them."""
    late = {
        name: env.get(variable + AFTER_SCRIPT)
        for name, variable in RUN_OPTIONS.items()
        if given[name] in ("auto", None)
    }
    if words := " ".join(
        f"--{name.replace('_', '-')}={value}" for name, value in late.items() if value
    ):
        raise ConfigurationError(
            f"fabric run script.py {words}",
            "what comes after the script is the script's own, and its Fabric() leaves these open",
            "options of `fabric run` before the script; or Fabric(...) with what the script reads from its arguments",
            f"fabric run {words} script.py",
        )


def _spelling(argument: str, value: Any) -> str:
    if argument == "precision":
        return parse_precision(value).name
    if isinstance(value, Accelerator | Strategy):
        return value.name
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value))
    text = str(value).strip().lower()
    return "cuda" if argument == "accelerator" and text == "gpu" else text


def _maker(found: tuple[Environment, World]) -> str:
    """What made this process; ranks of fabric's own launchers have torchrun's variables, too."""
    return found[0].name if found[1].store is None else "fabric"


def _find_environment(environment: Any, env: Mapping[str, str]) -> _Found:
    if environment is None:
        return detect(env)
    if environment == "none":
        return None
    if isinstance(environment, str | type):
        expected = (
            'None to detect one, "none" to detect nothing, or an object such as SlurmEnvironment()'
        )
        raise ArgumentTypeError(f"environment={environment!r}", "it is no environment", expected)
    world = environment.detect(env)
    if world is None:
        raise ConfigurationError(
            f"environment={environment!r}",
            "this process was not started by it: its variables are missing",
            "an environment whose launcher made this process",
            "Fabric() to detect the environment, or start the script with that launcher",
        )
    return environment, world


def _parse_devices(
    accelerator: Accelerator, devices: Any, strategy: Strategy, found: _Found
) -> _Devices:
    """The devices of this node: the strategy's own, those that were asked for, or one for each process."""
    own = strategy.parallel_devices
    if not found or (strategy.drives_all_devices and found[1].world_size == 1):
        return own or accelerator.parse_devices(devices)
    world = found[1]
    maker = _maker(found)
    if strategy.drives_all_devices or (
        isinstance(strategy, SingleDeviceStrategy) and world.world_size > 1
    ):
        raise ConfigurationError(
            f"strategy={strategy.name!r} with {world.world_size} processes on {world.num_nodes} node(s) by "
            f"{maker} (rank {world.rank})",
            "it works in one process, and each of these would train on its own",
            "one process: the script started by itself, or torchrun with --nproc-per-node 1",
            'strategy="ddp" in these; or Fabric(strategy=..., environment="none") for a job of this process alone',
        )
    processes = world.local_world_size
    if devices == "auto":  # and not the strategy's own
        devices = processes
        count = accelerator.device_count()
        if (
            accelerator.name != "cpu" and count == 1
        ):  # a scheduler that shows each process its own device only
            return accelerator.parse_devices(1) * processes
        if accelerator.name != "cpu" and count < processes:
            raise ConfigurationError(
                f"{processes} processes on this node, made by {maker}, on {accelerator.name}",
                f"there are {count} {accelerator.name} devices on it (rank {world.rank} sees them)",
                f"at most {count} processes",
                f'{maker} with {count} processes a node, or Fabric(accelerator="cpu")',
            )
    parsed = own or accelerator.parse_devices(devices)
    if len(parsed) != processes:
        raise ConfigurationError(
            f"Fabric(devices={devices!r}), that is {len(parsed)} device(s) on this node (rank {world.rank})",
            f"{maker} has made {processes} process(es) on it",
            f'devices="auto", or {processes}',
            'Fabric(devices="auto")',
        )
    return parsed


def _parse_num_nodes(num_nodes: Any, found: _Found) -> int:
    actual = found[1].num_nodes if found else 1
    if num_nodes == "auto" or str(num_nodes).strip() == str(actual):
        return actual
    raise ConfigurationError(
        f"num_nodes={num_nodes!r}",
        f"this process belongs to a job of {actual} node(s), and fabric starts processes on its own node only",
        f'num_nodes="auto", or {actual}; more with torchrun, `fabric run`, srun or mpirun on every node',
        f"fabric run --num-nodes {num_nodes} --node-rank R --main-address HOST script.py, with R from 0",
    )


def _choose_launcher(
    given: Mapping[str, Any],
    strategy: Strategy,
    spec: LaunchSpec,
    world: World | None,
    found: _Found,
) -> Launcher:
    is_open = given["launcher"] in (None, "auto")
    chosen = _parse_name(
        "launcher", strategy.start_method if is_open else given["launcher"], LAUNCHERS, Launcher
    )
    method = chosen.name
    if (
        found
        and found[1].store is None
        and found[1].world_size > 1
        and method not in ("popen", "inline")
    ):
        raise ConfigurationError(
            f"launcher or start method {method!r} (rank {found[1].rank})",
            f"{found[0].name} has made the processes of this job already",
            "no launcher: these processes are used as they are",
            'Fabric(strategy="ddp"), or python script.py in place of the launcher',
        )
    if world is not None:
        return InlineLauncher()
    # A name such as "ddp" says nothing of how to start; at a prompt there is no script to run again.
    if is_open and isinstance(given["strategy"], str) and method == "popen" and is_interactive():
        chosen = LAUNCHERS[notebook_start_method(has_cloudpickle())]
    chosen.check(spec)
    return chosen

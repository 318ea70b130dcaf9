"""The frozen plan of a job, and the rules for arguments of ``Fabric`` and their combinations.

Strings become objects here and nowhere else. No process is started and no device is touched, so an
argument that cannot work is an error before anything happens.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from functools import partial
from importlib.metadata import entry_points
from time import monotonic
from typing import Any, NamedTuple, TypeVar

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

__all__ = [
    "AFTER_SCRIPT_SUFFIX",
    "RUN_VARIABLES",
    "STRATEGIES",
    "Plan",
    "parse_strategy",
    "resolve_plan",
]

K = TypeVar("K")

_DDP_START_METHODS = {
    "ddp": "popen",
    "ddp_spawn": "spawn",
    "ddp_fork": "fork",
    "ddp_forkserver": "forkserver",
    # Safe in a notebook: the forked server never touched CUDA or a thread pool.
    "ddp_notebook": "forkserver",
}


# Modules that few jobs need are imported when one of these functions is called.
def _make_fsdp(**options: Any) -> Strategy:
    return strategies.FSDPStrategy(**options)


def _make_fsdp_cpu_offload(**options: Any) -> Strategy:
    return strategies.FSDPStrategy(cpu_offload=True, **options)


def _make_model_parallel(**options: Any) -> Strategy:
    return strategies.ModelParallelStrategy(**options)


def _build_strategy_table() -> dict[str, Callable[..., Strategy]]:
    """Return the functions that make a strategy, by the names of the strategies."""
    table: dict[str, Callable[..., Strategy]] = {
        "single_device": SingleDeviceStrategy,
        "dp": strategies.DataParallelStrategy,
    }
    for name, start_method in _DDP_START_METHODS.items():
        table[name] = partial(DDPStrategy, start_method=start_method)
    for name, start_method in _DDP_START_METHODS.items():
        table[f"{name}_find_unused_parameters_true"] = partial(
            DDPStrategy, start_method=start_method, find_unused_parameters=True
        )
    table["fsdp"] = _make_fsdp
    table["model_parallel"] = _make_model_parallel
    table["fsdp_cpu_offload"] = _make_fsdp_cpu_offload
    return table


STRATEGIES = _build_strategy_table()

# The environment variables that `fabric run` sets, by the argument of Fabric that they stand for.
RUN_VARIABLES = {
    "accelerator": "FABRIC_ACCELERATOR",
    "strategy": "FABRIC_STRATEGY",
    "devices": "FABRIC_DEVICES",
    "num_nodes": "FABRIC_NUM_NODES",
    "precision": "FABRIC_PRECISION",
}
# The suffix of these variables for options that came after the script.
AFTER_SCRIPT_SUFFIX = "_AFTER_SCRIPT"

_Options = dict[str, Any]  # the arguments of Fabric by name
_DEFAULTS: Mapping[str, Any] = {
    "accelerator": "auto",
    "strategy": "auto",
    "devices": "auto",
    "num_nodes": "auto",
    "precision": None,
    "environment": None,
    "launcher": None,
    "check_collectives": False,
    "timeout": None,
    "watchdog": DEFAULT_WATCHDOG,
    "time_limit": None,
    "stop_margin": None,
}
_DURATIONS = ("timeout", "watchdog", "time_limit", "stop_margin")
_OPEN = ("auto", None)  # the values of an argument that leave the choice to others
_OFF = ("", "0", "false", "no", "off")  # the values of FABRIC_CHECK that do not turn it on
# Seconds. The stores of torch count milliseconds in 64 bits, and gloo in fewer.
_LONGEST = 10_000_000

_Devices = tuple[torch.device, ...]


class _ExistingJob(NamedTuple):
    """The job that this process was started for."""

    environment: Environment
    world: World

    @property
    def started_by(self) -> str:
        """The name of what started this process."""
        # The ranks of fabric's own launchers have the variables of torchrun, too.
        if self.world.store is not None:
            return "fabric"
        return self.environment.name


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is decided before a process starts.

    Attributes:
        accelerator: the hardware.
        devices: the devices of this node: one for each process, or the replicas of a process that
            drives several devices.
        num_nodes: the number of nodes.
        precision: the dtypes.
        strategy: the parallel strategy.
        world: the rank of this process. None if the processes are still to be started.
        launcher: the launcher of the processes.
        launch_spec: what the launcher starts on each node.
        started_by: the name of what starts the processes of this job.
        check_collectives: whether the ranks compare each collective before they make it.
        timeout: how long a collective may wait.
        watchdog: how long a rank waits before a hang report is printed. Zero disables the report.
        deadline: the latest time to save and stop, on the system-wide monotonic clock, in seconds.
        stop_margin: how long before the end of a SLURM job to save and stop. None leaves it to
            ``slurm_deadline``.
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
        """The number of processes of the job."""
        # Nodes may have different numbers of processes. The launcher that started them knows.
        if self.world is not None:
            return self.world.world_size
        return self.launch_spec.num_processes * self.num_nodes

    def describe(self) -> list[str]:
        """Return a line about each decision."""
        devices = ", ".join(map(str, self.devices))
        lines = [
            f"accelerator  {self.accelerator.name}, {devices}",
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


def resolve_plan(*, env: Mapping[str, str] | None = None, **arguments: Any) -> Plan:
    """Return the plan of one job.

    Args:
        env: the environment variables. None is ``os.environ``.
        **arguments: arguments of :class:`fabric.Fabric`, with the same defaults.

    Raises:
        ConfigurationError: a value, or a combination of values, cannot work.
        ArgumentTypeError: a value has a type that its argument does not take.
    """
    if env is None:
        env = os.environ
    options, requested_strategy = _merge_options(arguments, env)
    precision = parse_precision(options["precision"])

    job = _find_job(options["environment"], env)
    accelerator = _parse_accelerator(options["accelerator"])
    # A strategy that is still to be chosen has no devices of its own.
    devices = _parse_devices(
        accelerator, options["devices"], requested_strategy or DDPStrategy(), job
    )
    num_nodes = _parse_num_nodes(options["num_nodes"], job)
    strategy = requested_strategy or _default_strategy(len(devices), num_nodes, precision)
    strategy.check(accelerator=accelerator, devices=devices, num_nodes=num_nodes)
    _refuse_unconnected_processes(strategy, len(devices) * num_nodes)

    num_processes = 1 if strategy.drives_all_devices else len(devices)
    spec = LaunchSpec(num_processes=num_processes, device_type=accelerator.name)
    world = _find_world(job, num_processes)
    launcher = _choose_launcher(options, strategy, spec, world, job)

    return Plan(
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        precision=precision,
        strategy=strategy,
        world=world,
        launcher=launcher,
        launch_spec=spec,
        started_by=_started_by(job, world, launcher),
        check_collectives=_checks_collectives(options, env),
        timeout=_timeout(options),
        watchdog=options["watchdog"],
        deadline=_deadline(options),
        stop_margin=options["stop_margin"],
    )


def _merge_options(
    arguments: Mapping[str, Any], env: Mapping[str, str]
) -> tuple[_Options, Strategy | None]:
    """Merge the arguments of ``Fabric`` with ``fabric run`` and the strategy's constructor.

    Returns:
        All arguments, and the strategy that is asked for, or None if it is still to be chosen.
    """
    options = {**_DEFAULTS, **arguments}
    for argument in _DURATIONS:
        if options[argument] is not None:
            options[argument] = _parse_duration(argument, options[argument])
    _add_run_options(options, env)
    precision = parse_precision(options["precision"])
    strategy = parse_strategy(options["strategy"], precision=precision)
    if strategy is not None:
        _add_strategy_options(options, strategy)
    _refuse_late_options(options, env)
    return options, strategy


def _add_run_options(options: _Options, env: Mapping[str, str]) -> None:
    """Add the options of ``fabric run`` to the arguments of ``Fabric``."""
    if options["environment"] == "none":
        return
    for argument, variable in RUN_VARIABLES.items():
        value = env.get(variable)
        if value:
            source = (
                f"`fabric run {_flag(argument)} {value}` ({variable}; environment='none' "
                "ignores it)"
            )
            _add_option(options, argument, value, source)


def _add_strategy_options(options: _Options, strategy: Strategy) -> None:
    """Add the arguments of a strategy's constructor that are arguments of ``Fabric``, too."""
    devices = strategy.parallel_devices
    accelerator: Any = strategy.accelerator
    if accelerator is None and devices:
        accelerator = devices[0].type
    strategy_options = {
        "accelerator": accelerator,
        "devices": devices,
        "precision": strategy._requested_precision,
        "num_nodes": None if strategy.num_nodes == 1 else strategy.num_nodes,
        "environment": strategy.cluster_environment,
        "timeout": None if strategy.timeout == DEFAULT_TIMEOUT else strategy.timeout,
    }
    for argument, value in strategy_options.items():
        if value is not None:
            source = f"{_spelling(argument, value)!r} in the strategy"
            _add_option(options, argument, value, source)


def _add_option(options: _Options, argument: str, value: Any, source: str) -> None:
    """Set an argument of ``Fabric`` to the value from a second source.

    Raises:
        ConfigurationError: the argument has another value already.
    """
    current = options[argument]
    if current in _OPEN:
        options[argument] = value
        return
    spelling = _spelling(argument, current)
    # A number of devices agrees with a list of as many devices.
    if isinstance(value, tuple) and spelling == str(len(value)):
        return
    if spelling == _spelling(argument, value):
        return
    raise ConfigurationError(
        f"Fabric({argument}={current!r}) with {source}",
        problem="the two differ",
        expected="the value in one of the two places, or the same in both",
        suggestion=f"Fabric() without {argument}=",
    )


def _spelling(argument: str, value: Any) -> str:
    """Return a text that is equal for equal values of an argument, whatever their types."""
    if argument == "precision":
        return parse_precision(value).name
    if isinstance(value, Accelerator | Strategy):
        return value.name
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value))
    text = str(value).strip().lower()
    if argument == "accelerator" and text == "gpu":
        return "cuda"
    return text


def _flag(argument: str) -> str:
    """Return the option of ``fabric run`` for an argument of ``Fabric``."""
    return "--" + argument.replace("_", "-")


def _refuse_late_options(options: _Options, env: Mapping[str, str]) -> None:
    """Raise for options of ``fabric run`` after the script, which the job would ignore."""
    late_options: list[str] = []
    for argument, variable in RUN_VARIABLES.items():
        value = env.get(variable + AFTER_SCRIPT_SUFFIX)
        if value and options[argument] in _OPEN:
            late_options.append(f"{_flag(argument)}={value}")
    if not late_options:
        return
    text = " ".join(late_options)
    raise ConfigurationError(
        f"fabric run script.py {text}",
        problem="what comes after the script is the script's own, and its Fabric() leaves these "
        "open",
        expected="options of `fabric run` before the script; or Fabric(...) with what the script "
        "reads from its arguments",
        suggestion=f"fabric run {text} script.py",
    )


def parse_strategy(strategy: Strategy | strategies.StrategyName, **options: Any) -> Strategy | None:
    """Return the strategy of a name, or None for ``"auto"``. A strategy is returned unchanged.

    Args:
        strategy: the name or the strategy.
        **options: keyword arguments for the constructor of a strategy of fabric.
    """
    if strategy == "auto":
        return None
    return _parse_name("strategy", strategy, STRATEGIES, Strategy, **options)


def _default_strategy(num_devices: int, num_nodes: int, precision: Precision) -> Strategy:
    if num_devices * num_nodes == 1:
        return SingleDeviceStrategy(precision=precision)
    return DDPStrategy(num_nodes=num_nodes, precision=precision)


def _parse_accelerator(accelerator: Any) -> Accelerator:
    if accelerator == "auto":
        return next(kind() for kind in ACCELERATORS.values() if kind().is_available())
    parsed = _parse_name("accelerator", accelerator, ACCELERATORS, Accelerator)
    if not parsed.is_available():
        problem = "there is none on this machine, or torch was built without it"
        expected = '"auto" or "cpu"'
        raise ConfigurationError(f"accelerator={parsed.name!r}", problem, expected)
    return parsed


def _parse_name(
    argument: str, value: Any, table: Mapping[str, Any], kind: type[K], **options: Any
) -> K:
    """Return the object that a name stands for, in a table or among the entry points.

    Args:
        argument: the argument of ``Fabric``.
        value: the name. An object of the class is returned unchanged.
        table: the objects by name, or functions that make them.
        kind: the class of the objects.
        **options: keyword arguments for a function of the table.
    """
    if isinstance(value, kind):
        return value
    name = value.lower() if isinstance(value, str) else ""
    if name in table:
        return _make(table[name], kind, **options)
    # Only for names that are not ours: looking through all installed packages takes milliseconds.
    group = "fabric.strategies" if argument == "strategy" else f"fabric.{argument}s"
    plugins = {plugin.name: plugin for plugin in entry_points(group=group)}
    if name in plugins:
        return _make(plugins[name].load(), kind)

    names = ["auto", *table, *plugins]
    expected = ", ".join(map(repr, names))
    closest = [*get_close_matches(name, names, n=1), "auto"][0]
    error = ArgumentTypeError
    problem = f"this {type(value).__name__} is no {argument}"
    if isinstance(value, str):
        error = ConfigurationError
        problem = f"there is no {argument} of that name"
    raise error(
        f"{argument}={value!r}",
        problem,
        f"{expected}, or an object of a subclass of {group}.{kind.__name__}",
        f'Fabric({argument}="{closest}")',
    )


def _make(entry: Any, kind: type[K], **options: Any) -> K:
    """Return an entry of a table, or the object that it makes."""
    if isinstance(entry, kind):
        return entry
    return entry(**options)


def _parse_duration(argument: str, value: Any) -> timedelta:
    """Return a duration that is given in seconds, as a timedelta or as a text.

    Zero is valid only for the watchdog, which it turns off.
    """
    seconds = to_seconds(value)
    can_be_zero = argument == "watchdog"
    is_number = isinstance(seconds, int | float)
    if is_number and 0 <= seconds <= _LONGEST and (seconds > 0 or can_be_zero):
        return timedelta(seconds=seconds)
    minimum = "at least 0 (off)" if can_be_zero else "more than 0"
    raise ConfigurationError(
        f"Fabric({argument}={value!r})",
        problem="it is no length of time",
        expected=f"seconds, a timedelta or 'D-HH:MM:SS', {minimum} and at most {_LONGEST:,} s",
    )


def _find_job(environment: Any, env: Mapping[str, str]) -> _ExistingJob | None:
    """Return the job that this process was started for, or None if it was started by itself."""
    if environment == "none":
        return None
    if environment is None:
        detected = detect(env)
        if detected is None:
            return None
        return _ExistingJob(*detected)
    if isinstance(environment, str | type):
        raise ArgumentTypeError(
            f"environment={environment!r}",
            problem="it is no environment",
            expected='None to detect one, "none" to detect nothing, or an object such as '
            "SlurmEnvironment()",
        )
    world = environment.detect(env)
    if world is None:
        raise ConfigurationError(
            f"environment={environment!r}",
            problem="this process was not started by it: its variables are missing",
            expected="an environment whose launcher made this process",
            suggestion="Fabric() to detect the environment, or start the script with that launcher",
        )
    return _ExistingJob(environment, world)


def _parse_devices(
    accelerator: Accelerator, devices: Any, strategy: Strategy, job: _ExistingJob | None
) -> _Devices:
    """Return the devices of this node, one for each process of an existing job.

    Args:
        accelerator: the hardware.
        devices: the argument of ``Fabric``.
        strategy: the strategy. Devices of its own take precedence.
        job: the job that this process was started for, or None.
    """
    if job is None or (strategy.drives_all_devices and job.world.world_size == 1):
        return strategy.parallel_devices or accelerator.parse_devices(devices)
    _refuse_one_process_strategy(strategy, job)
    rank = job.world.rank
    num_processes = job.world.local_world_size
    if devices == "auto":
        devices = num_processes
        if accelerator.name != "cpu":
            count = accelerator.device_count()
            # A scheduler may show each process its own device only.
            if count == 1:
                return accelerator.parse_devices(1) * num_processes
            if count < num_processes:
                raise ConfigurationError(
                    f"{num_processes} processes on this node, made by {job.started_by}, on "
                    f"{accelerator.name}",
                    problem=f"there are {count} {accelerator.name} devices on it (rank {rank} sees "
                    "them)",
                    expected=f"at most {count} processes",
                    suggestion=f"{job.started_by} with {count} processes a node, or "
                    'Fabric(accelerator="cpu")',
                )
    parsed = strategy.parallel_devices or accelerator.parse_devices(devices)
    if len(parsed) != num_processes:
        raise ConfigurationError(
            f"Fabric(devices={devices!r}), that is {len(parsed)} device(s) on this node (rank "
            f"{rank})",
            problem=f"{job.started_by} has made {num_processes} process(es) on it",
            expected=f'devices="auto", or {num_processes}',
            suggestion='Fabric(devices="auto")',
        )
    return parsed


def _refuse_one_process_strategy(strategy: Strategy, job: _ExistingJob) -> None:
    """Raise for a strategy that works in one process, in a job of several processes."""
    world = job.world
    needs_one_device = isinstance(strategy, SingleDeviceStrategy) and world.world_size > 1
    if not strategy.drives_all_devices and not needs_one_device:
        return
    raise ConfigurationError(
        f"strategy={strategy.name!r} with {world.world_size} processes on {world.num_nodes} "
        f"node(s) by {job.started_by} (rank {world.rank})",
        problem="it works in one process, and each of these would train on its own",
        expected="one process: the script started by itself, or torchrun with --nproc-per-node 1",
        suggestion='strategy="ddp" in these; or Fabric(strategy=..., environment="none") for a job '
        "of this "
        "process alone",
    )


def _refuse_unconnected_processes(strategy: Strategy, num_processes: int) -> None:
    """Raise for several processes that a strategy would not connect: each would train alone."""
    if num_processes == 1 or strategy.connects_processes or strategy.drives_all_devices:
        return
    name = type(strategy).__name__
    raise ConfigurationError(
        f"Fabric(strategy={name}(...)) with {num_processes} devices",
        problem=f"{num_processes} processes would each train a model on their own",
        expected=f"{name}.connects_processes = True, or drives_all_devices = True for one process "
        "that drives all devices",
        suggestion="devices=1",
    )


def _parse_num_nodes(num_nodes: Any, job: _ExistingJob | None) -> int:
    actual = 1 if job is None else job.world.num_nodes
    if num_nodes == "auto" or str(num_nodes).strip() == str(actual):
        return actual
    raise ConfigurationError(
        f"num_nodes={num_nodes!r}",
        problem=f"this process belongs to a job of {actual} node(s), and fabric starts processes "
        "on its own node only",
        expected=f'num_nodes="auto", or {actual}; more with torchrun, `fabric run`, srun or mpirun '
        "on every "
        "node",
        suggestion=f"fabric run --num-nodes {num_nodes} --node-rank R --main-address HOST "
        "script.py, with R from 0",
    )


def _choose_launcher(
    options: _Options,
    strategy: Strategy,
    spec: LaunchSpec,
    world: World | None,
    job: _ExistingJob | None,
) -> Launcher:
    """Return the launcher of the job.

    Args:
        options: the arguments of ``Fabric``.
        strategy: the strategy.
        spec: what is to be started on this node.
        world: the rank of this process. None if processes are to be started.
        job: the job that this process was started for, or None.
    """
    is_open = options["launcher"] in _OPEN
    start_method = strategy.start_method if is_open else options["launcher"]
    launcher = _parse_name("launcher", start_method, LAUNCHERS, Launcher)
    _refuse_second_launch(launcher, job)
    if world is not None:
        return InlineLauncher()
    # The name of a strategy, such as "ddp", does not say how to start processes, and at a prompt
    # there is no script to run again.
    has_strategy_name = isinstance(options["strategy"], str)
    if is_open and has_strategy_name and launcher.name == "popen" and is_interactive():
        launcher = LAUNCHERS[notebook_start_method(has_cloudpickle())]
    launcher.check(spec)
    return launcher


def _refuse_second_launch(launcher: Launcher, job: _ExistingJob | None) -> None:
    """Raise for a start method with a function, in processes that are started already."""
    if job is None or job.world.store is not None or job.world.world_size == 1:
        return
    if launcher.name in ("popen", "inline"):
        return
    raise ConfigurationError(
        f"launcher or start method {launcher.name!r} (rank {job.world.rank})",
        problem=f"{job.environment.name} has made the processes of this job already",
        expected="no launcher: these processes are used as they are",
        suggestion='Fabric(strategy="ddp"), or python script.py in place of the launcher',
    )


def _find_world(job: _ExistingJob | None, num_processes: int) -> World | None:
    """Return the rank of this process, or None if processes are to be started."""
    if job is not None:
        return job.world
    if num_processes == 1:
        return World()
    return None


def _started_by(job: _ExistingJob | None, world: World | None, launcher: Launcher) -> str:
    if job is not None:
        return job.started_by
    if world is None:
        return launcher.name
    return "this script"


def _checks_collectives(options: _Options, env: Mapping[str, str]) -> bool:
    text = env.get("FABRIC_CHECK", "").strip().lower()
    return options["check_collectives"] or text not in _OFF


def _timeout(options: _Options) -> timedelta:
    if options["timeout"] is None:
        return DEFAULT_TIMEOUT
    # A timeout of the strategy has not been checked yet.
    return _parse_duration("timeout", options["timeout"])


def _deadline(options: _Options) -> float:
    if options["time_limit"] is None:
        return float("inf")
    return monotonic() + options["time_limit"].total_seconds()

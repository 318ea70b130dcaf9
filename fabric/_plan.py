"""The plan of a job, and the rules for the arguments of ``Fabric`` and their combinations.

Names such as ``"ddp"`` become objects here and nowhere else. Making a plan starts no process and
initializes no device, so that an argument that cannot work is an error before the job begins.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from functools import partial
from importlib.metadata import entry_points
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import torch

from fabric import strategies
from fabric.accelerators import ACCELERATORS, Accelerator, TorchAccelerator
from fabric.diagnostics.hang_reporter import DEFAULT_WATCHDOG
from fabric.environments import Environment, detect, refuse_to_train_alone
from fabric.errors import ArgumentTypeError, ConfigurationError
from fabric.launchers import LAUNCHERS, InlineLauncher, Launcher, LaunchSpec
from fabric.launchers.base import is_interactive, notebook_start_method
from fabric.launchers.preemption import to_seconds
from fabric.launchers.serialize import has_cloudpickle
from fabric.migration import (
    ACCELERATOR_NAMES,
    KEYWORDS,
    STRATEGY_NAMES,
    find_foreign_name,
)
from fabric.precision import Precision, parse_precision
from fabric.runtime import DEFAULT_TIMEOUT
from fabric.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from fabric.world import World

__all__ = [
    "AFTER_SCRIPT_SUFFIX",
    "RUN_VARIABLES",
    "STRATEGIES",
    "Plan",
    "parse_size",
    "parse_strategy",
    "refuse_unknown_arguments",
    "resolve_plan",
]

K = TypeVar("K")

# Valid accelerators that are not in the table of accelerators, as text for errors.
_OTHER_HARDWARE = '"xpu", or hardware whose package was imported before, such as "npu" of torch_npu'

# The names of strategies that are DDP, with the ways in which they start processes.
_DDP_START_METHODS = {
    "ddp": "popen",
    "ddp_spawn": "spawn",
    "ddp_fork": "fork",
    "ddp_forkserver": "forkserver",
    # A fork server is safe in a notebook, since it has never used CUDA or a thread pool.
    "ddp_notebook": "forkserver",
}


def _make_fsdp(**options: Any) -> Strategy:
    """Make the strategy. The first access of the class imports its module, which is large."""
    return strategies.FSDPStrategy(**options)


def _make_model_parallel(**options: Any) -> Strategy:
    """Make the strategy. The first access of the class imports its module, which is large."""
    return strategies.ModelParallelStrategy(**options)


def _build_strategy_table() -> dict[str, Callable[..., Strategy]]:
    """Return the classes or functions that make strategies, by the names of the strategies.

    Errors list the names in the order of the table.
    """
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
    table["fsdp_cpu_offload"] = partial(_make_fsdp, cpu_offload=True)
    return table


STRATEGIES = _build_strategy_table()

# The environment variables that `fabric run` sets for its options, by the argument of `Fabric` to
# which a variable gives a value.
RUN_VARIABLES = {
    "accelerator": "FABRIC_ACCELERATOR",
    "strategy": "FABRIC_STRATEGY",
    "devices": "FABRIC_DEVICES",
    "num_nodes": "FABRIC_NUM_NODES",
    "precision": "FABRIC_PRECISION",
}
# The suffix of the variables for options that the user wrote after the name of the script, where
# `fabric run` leaves them to the script.
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
# The arguments that are durations.
_DURATIONS = ("timeout", "watchdog", "time_limit", "stop_margin")
# The values of the environment variable FABRIC_CHECK that do not turn checked mode on.
_CHECK_OFF = ("", "0", "false", "no", "off")
# About 116 days. torch's stores and gloo count milliseconds, and gloo in less than 64 bits.
_MAX_SECONDS = 10_000_000

# The names of other toolkits, by the argument of Fabric.
_FOREIGN_NAMES = {"strategy": STRATEGY_NAMES, "accelerator": ACCELERATOR_NAMES}

_Devices = tuple[torch.device, ...]


class _ExistingJob(NamedTuple):
    """A job whose processes a launcher has started already; this process is one of them.

    Attributes:
        environment: the launcher that was recognized by its environment variables.
        world: the place of this process in the job.
    """

    environment: Environment
    world: World

    @property
    def started_by(self) -> str:
        """The name of the launcher, for messages."""
        # fabric's own launchers set the variables of torchrun, and would be taken for torchrun.
        # But only they pass a store.
        if self.world.store is not None:
            return "fabric"
        return self.environment.name


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decisions about a job that are made before a process starts.

    Attributes:
        accelerator: the hardware.
        devices: the devices of this node: one for each process, or the replicas of a process that
            drives several devices.
        num_nodes: the number of nodes.
        precision: the dtypes of parameters, computation and outputs.
        strategy: the parallel strategy.
        world: the place of this process in the job. None in a process that starts the others.
        launcher: the launcher of the processes. It starts nothing if they exist already.
        launch_spec: the number and the kind of the processes that the launcher starts on each node.
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
        # Nodes may have different numbers of processes, so the product below is not always right.
        if self.world is not None:
            return self.world.world_size
        return self.launch_spec.num_processes * self.num_nodes

    def describe(self) -> list[str]:
        """Return a line about each decision, for ``Fabric.describe``."""
        hardware = self.accelerator.name
        # The devices of a CPU have no numbers. The number of processes or of replicas, in a line
        # below, is the number of these devices.
        if any(device.index is not None for device in self.devices):
            devices = ", ".join(map(str, self.devices))
            hardware = f"{hardware}: {devices}"
        lines = [
            f"accelerator  {hardware}",
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
        env: the environment variables. None means ``os.environ``.
        **arguments: arguments of :class:`fabric.Fabric`, with the same defaults.

    Raises:
        ConfigurationError: a value, or a combination of values, cannot work.
        ArgumentTypeError: a value has a type that its argument does not take.
    """
    if env is None:
        env = os.environ
    options, requested_strategy = _merge_options(arguments, env)
    precision = parse_precision(options["precision"])

    # None if no launcher has started this process.
    job = _find_existing_job(options["environment"], env)
    accelerator = _parse_accelerator(options["accelerator"])
    # The default strategy depends on the number of devices. _parse_devices() needs a strategy
    # before this number is known, and gets a DDPStrategy, which chooses no devices itself.
    strategy_or_stand_in = requested_strategy or DDPStrategy()
    devices = _parse_devices(accelerator, options["devices"], strategy_or_stand_in, job)
    num_nodes = _parse_num_nodes(options["num_nodes"], job)
    strategy = requested_strategy or _default_strategy(len(devices), num_nodes, precision)
    # Both calls raise if the strategy cannot use these devices.
    strategy.check(accelerator=accelerator, devices=devices, num_nodes=num_nodes)
    _refuse_unconnected_processes(strategy, len(devices) * num_nodes)

    num_processes = 1 if strategy.drives_all_devices else len(devices)
    launch_spec = LaunchSpec(num_processes=num_processes, device_type=accelerator.name)
    world = _find_world(job, num_processes)  # None if processes have to be started
    launcher = _choose_launcher(options, strategy, launch_spec, world=world, job=job)

    return Plan(
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        precision=precision,
        strategy=strategy,
        world=world,
        launcher=launcher,
        launch_spec=launch_spec,
        started_by=_started_by(job, world, launcher),
        check_collectives=_should_check_collectives(options, env),
        timeout=options["timeout"] or DEFAULT_TIMEOUT,
        watchdog=options["watchdog"],
        deadline=_deadline(options),
        stop_margin=options["stop_margin"],
    )


def refuse_unknown_arguments(names: Iterable[str], known_names: Iterable[str]) -> None:
    """Raise for the first argument that the constructor of ``Fabric`` does not have.

    Args:
        names: the names of the unknown arguments of the call. Empty if the call is right.
        known_names: the names of the arguments of the constructor.

    Raises:
        ArgumentTypeError: there is an unknown argument.
    """
    for name in names:
        # What to write in place of an argument of another toolkit. Empty for any other name.
        suggestion = KEYWORDS.get(name, "")
        similar_names = get_close_matches(name, known_names, n=1)
        if not suggestion and similar_names:
            suggestion = f"Fabric({similar_names[0]}=...)"
        raise ArgumentTypeError(
            f"Fabric({name}=...)",
            problem="there is no argument of that name",
            expected=", ".join(known_names),
            suggestion=suggestion,
        )


def _merge_options(
    arguments: Mapping[str, Any], env: Mapping[str, str]
) -> tuple[_Options, Strategy | None]:
    """Merge the three sources of options, which must not contradict each other.

    The sources are the arguments of ``Fabric``, the options of ``fabric run``, and the arguments of
    the strategy's constructor.

    Args:
        arguments: the arguments of ``Fabric``. A missing argument gets its default.
        env: the environment variables, in which ``fabric run`` passes its options.

    Returns:
        The merged arguments of ``Fabric``, in which durations are timedeltas, and the strategy, or
        None if the strategy is ``"auto"``.
    """
    options = {**_DEFAULTS, **arguments}
    for argument in _DURATIONS:
        if options[argument] is not None:
            options[argument] = _parse_duration(argument, options[argument])
    # This call comes before parse_strategy(): `fabric run` may give the name of the strategy, and
    # the precision that is passed to the strategy's constructor.
    _add_run_options(options, env)
    # The caller parses the precision again, since a strategy object may bring a precision.
    precision = parse_precision(options["precision"])
    strategy = parse_strategy(options["strategy"], precision=precision)
    if strategy is not None:
        _add_strategy_options(options, strategy)
    # This call comes last: an option after the script is an error only if no source has given a
    # value to its argument.
    _refuse_late_options(options, env)
    return options, strategy


def _add_run_options(options: _Options, env: Mapping[str, str]) -> None:
    """Add the options of ``fabric run`` to ``options``, the arguments of ``Fabric`` by name.

    Raises a ConfigurationError if an option contradicts an argument.
    """
    # A process of `fabric run` may create a Fabric with environment="none". This Fabric begins a
    # job of its own, to which the variables of `fabric run` do not apply.
    if options["environment"] == "none":
        return
    for argument, variable in RUN_VARIABLES.items():
        value = env.get(variable)
        if value:
            source = (
                f"`fabric run {_flag(argument)} {value}` ({variable}; environment='none' "
                "ignores it)"
            )
            _add_option(options, argument, value, source=source)


def _add_strategy_options(options: _Options, strategy: Strategy) -> None:
    """Add the constructor arguments of a strategy to ``options``, the arguments of ``Fabric``.

    Only the arguments that ``Fabric`` has as well are added. In ``strategy_options``, None means
    that the strategy's constructor was not given a value.
    """
    devices = strategy.parallel_devices
    accelerator: Any = strategy.accelerator
    if accelerator is None and devices:
        accelerator = devices[0].type  # all devices of a job have one type
    # A value that is the default of the constructor is not a request of the user.
    timeout = None
    if strategy.timeout != DEFAULT_TIMEOUT:
        timeout = _parse_duration("timeout", strategy.timeout)
    strategy_options = {
        "accelerator": accelerator,
        "devices": devices,
        "precision": strategy._requested_precision,
        "num_nodes": None if strategy.num_nodes == 1 else strategy.num_nodes,
        "environment": strategy.cluster_environment,
        "timeout": timeout,
    }
    for argument, value in strategy_options.items():
        if value is not None:
            source = f"{_comparable_text(argument, value)!r} in the strategy"
            _add_option(options, argument, value, source=source)


def _add_option(options: _Options, argument: str, value: Any, *, source: str) -> None:
    """Set an argument of ``Fabric`` to the value that another source gives it.

    If the user passed a value to ``Fabric``, that value is kept, and must mean the same.

    Args:
        options: the arguments of ``Fabric`` by name. Changed in place.
        argument: the name of the argument.
        value: the value from the other source.
        source: a description of the value and its source, for the error.

    Raises:
        ConfigurationError: ``options`` has a different value already.
    """
    current_value = options[argument]
    if _is_undecided(current_value):
        options[argument] = value
        return
    current_text = _comparable_text(argument, current_value)
    # A tuple holds the devices of a strategy. Fabric(devices=2) agrees with any two devices.
    is_number_of_devices = isinstance(value, tuple) and current_text == str(len(value))
    has_same_meaning = current_text == _comparable_text(argument, value)
    if is_number_of_devices or has_same_meaning:
        return
    raise ConfigurationError(
        f"Fabric({argument}={current_value!r}) with {source}",
        problem="the two differ",
        expected="the value in one of the two places, or the same in both",
        suggestion=f"Fabric() without {argument}=",
    )


def _is_undecided(value: Any) -> bool:
    """Return whether a value of an argument of ``Fabric`` leaves the choice to other sources."""
    return value is None or value == "auto"


def _comparable_text(argument: str, value: Any) -> str:
    """Return a text that is equal for equal values of an argument, whatever their types.

    Different sources write a value in different ways. For example, ``2`` and ``"2"`` give the same
    text, and so do ``[0, 1]`` and ``"0,1"``, or ``CUDAAccelerator()`` and ``"gpu"``.
    """
    if argument == "precision":
        return parse_precision(value).name
    if isinstance(value, Accelerator | Strategy):
        return value.name
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value))
    text = str(value).strip().lower()
    if argument == "accelerator" and text == "gpu":  # another name of the same accelerator
        return "cuda"
    return text


def _flag(argument: str) -> str:
    """Return the command-line option of ``fabric run`` for an argument of ``Fabric``."""
    return "--" + argument.replace("_", "-")


def _refuse_late_options(options: _Options, env: Mapping[str, str]) -> None:
    """Raise if options of ``fabric run`` follow the script, and nothing else gives their values.

    In ``fabric run script.py --devices 2``, the option goes to the script, and the job would ignore
    it unless the script passes the value to ``Fabric``. ``fabric run`` cannot know what the script
    does. So it sets a variable such as ``FABRIC_DEVICES_AFTER_SCRIPT``, which this function reads
    in each rank.

    Args:
        options: the merged arguments of ``Fabric``.
        env: the environment variables.
    """
    late_options: list[str] = []
    for argument, variable in RUN_VARIABLES.items():
        value = env.get(variable + AFTER_SCRIPT_SUFFIX)
        if value and _is_undecided(options[argument]):
            late_options.append(f"{_flag(argument)}={value}")
    if not late_options:
        return
    text = " ".join(late_options)
    raise ConfigurationError(
        f"fabric run script.py {text}",
        problem="arguments after the script belong to the script, and its Fabric() has no value "
        "for these",
        expected="options of `fabric run` before the script; or a script that passes its own "
        "arguments to Fabric(...)",
        suggestion=f"fabric run {text} script.py",
    )


def parse_strategy(strategy: Strategy | strategies.StrategyName, **options: Any) -> Strategy | None:
    """Return the strategy that has a name, or None for ``"auto"``.

    Args:
        strategy: the name. A strategy is returned unchanged.
        **options: keyword arguments for the constructor, if the name is one of fabric's own.
    """
    if strategy == "auto":
        return None
    return _parse_name("strategy", strategy, STRATEGIES, Strategy, **options)


def _default_strategy(devices_per_node: int, num_nodes: int, precision: Precision) -> Strategy:
    """Return the strategy for ``strategy="auto"``: DDP if there is more than one device."""
    if devices_per_node * num_nodes == 1:
        return SingleDeviceStrategy(precision=precision)
    return DDPStrategy(num_nodes=num_nodes, precision=precision)


def _parse_accelerator(accelerator: Any) -> Accelerator:
    """Return the accelerator of a name. ``"auto"`` is the first one that this machine has.

    Raises:
        ConfigurationError: the machine has no such hardware.
    """
    if accelerator == "auto":
        return _default_accelerator()
    parsed = _parse_name("accelerator", accelerator, ACCELERATORS, Accelerator)
    if not parsed.is_available():
        raise ConfigurationError(
            f"accelerator={parsed.name!r}",
            problem="there is none on this machine, or torch was built without it",
            expected='"auto" or "cpu"',
        )
    return parsed


def _default_accelerator() -> Accelerator:
    """Return the accelerator for ``accelerator="auto"``: the first that this machine has.

    Hardware that is not in ``ACCELERATORS``, such as ``"xpu"``, is tried first.
    """
    candidates = [accelerator_class() for accelerator_class in ACCELERATORS.values()]
    device = torch.accelerator.current_accelerator()
    if device is not None and device.type not in ACCELERATORS:
        candidates.insert(0, TorchAccelerator(device.type))
    # The CPU is last in the table, and always available.
    return next(candidate for candidate in candidates if candidate.is_available())


def _parse_name(
    argument: str, value: Any, table: Mapping[str, Any], base_class: type[K], **options: Any
) -> K:
    """Return the object that a name stands for, in a table or among the entry points of packages.

    Args:
        argument: the argument of ``Fabric``: "strategy", "accelerator" or "launcher".
        value: the name, in any case. An instance of ``base_class`` is returned unchanged.
        table: fabric's own objects by name, or functions that make them.
        base_class: the class of the objects.
        **options: keyword arguments for a function of the table.

    Raises:
        ConfigurationError: nothing has this name.
        ArgumentTypeError: ``value`` is neither a name nor an object of the class.
    """
    if isinstance(value, base_class):
        return value
    name = value.lower() if isinstance(value, str) else ""
    if name in table:
        return _make_from_entry(table[name], base_class, **options)
    # A group of entry points is named for the module of its base class.
    group = "fabric.strategies" if argument == "strategy" else f"fabric.{argument}s"
    # Entry points are looked up last, since reading the entry points of all packages takes
    # milliseconds.
    plugins = {plugin.name: plugin for plugin in entry_points(group=group)}
    if name in plugins:
        return _make_from_entry(plugins[name].load(), base_class)
    if argument == "accelerator" and TorchAccelerator.is_supported(name):
        return _make_from_entry(partial(TorchAccelerator, name), base_class)

    names = ["auto", *table, *plugins]
    class_path = f"{group}.{base_class.__name__}"
    expected = f"{', '.join(map(repr, names))}, or an object of a subclass of {class_path}"
    if argument == "accelerator":
        expected = f"{expected}, {_OTHER_HARDWARE}"
    suggestion = f'Fabric({argument}="{_similar_name(argument, name, names)}")'
    raise _value_error(argument, value, base_class, expected=expected, suggestion=suggestion)


def _value_error(
    argument: str, value: Any, base_class: type[Any], *, expected: str, suggestion: str
) -> ConfigurationError | ArgumentTypeError:
    """Return the error for a value that is neither a known name nor an object of a class.

    Args:
        argument: the argument of ``Fabric``.
        value: the value of the argument.
        base_class: the class of the objects.
        expected: the names and objects that are valid.
        suggestion: what to write, unless the value is a subclass of ``base_class``.
    """
    error: type[ConfigurationError | ArgumentTypeError]
    if isinstance(value, str):
        error = ConfigurationError
        problem = f"there is no {argument} of that name"
    elif isinstance(value, type) and issubclass(value, base_class):
        error = ArgumentTypeError
        problem = "it is a class, and not an object of the class"
        suggestion = f"Fabric({argument}={value.__name__}())"
    else:
        error = ArgumentTypeError
        problem = f"an object of type {type(value).__name__} is not a valid {argument}"
    return error(f"{argument}={value!r}", problem=problem, expected=expected, suggestion=suggestion)


def _similar_name(argument: str, name: str, names: Sequence[str]) -> str:
    """Return the name that a user probably means, for an error. ``"auto"`` if there is none.

    Args:
        argument: the argument of ``Fabric``.
        name: the name that does not exist.
        names: the names that exist.
    """
    # Names of other libraries, such as "deepspeed", and ours for the same thing.
    foreign_names = _FOREIGN_NAMES.get(argument, {})
    replacement = find_foreign_name(name, foreign_names)
    if replacement is not None:
        return replacement
    return next(iter(get_close_matches(name, names, n=1)), "auto")


def _make_from_entry(entry: Any, base_class: type[K], **options: Any) -> K:
    """Return the object of an entry of a table, or of an entry point of a package.

    The entry may be the object itself. Otherwise it is a class or a function that makes the object
    from ``options``.
    """
    if isinstance(entry, base_class):
        return entry
    return entry(**options)


def _parse_duration(argument: str, value: Any) -> timedelta:
    """Return a duration as a timedelta.

    Args:
        argument: the argument of ``Fabric``. Zero is valid only for the watchdog, which it turns
            off.
        value: seconds, a timedelta, or a text such as ``"1-12:00:00"``.

    Raises:
        ConfigurationError: ``value`` is not a duration in the valid range.
    """
    # to_seconds() returns an object that is not a duration unchanged, so this may not be a number.
    seconds = to_seconds(value)
    can_be_zero = argument == "watchdog"
    is_number = isinstance(seconds, int | float)
    if is_number and 0 <= seconds <= _MAX_SECONDS and (seconds > 0 or can_be_zero):
        return timedelta(seconds=seconds)
    minimum = "at least 0 (off)" if can_be_zero else "more than 0"
    raise ConfigurationError(
        f"Fabric({argument}={value!r})",
        problem="it is not a valid length of time",
        expected=f"seconds, a timedelta or 'D-HH:MM:SS', {minimum} and at most {_MAX_SECONDS:,} s",
    )


def parse_size(size: int | str, *, request: str) -> int:
    """Return a number of bytes from a number or a text such as ``"80GiB"``, ``"80 GB"``, ``"8G"``.

    ``GB`` and ``G`` are powers of 1000, and ``GiB`` is a power of 1024.

    Args:
        size: the number or text.
        request: the user's call as text, for the error.

    Raises:
        ConfigurationError: the text is not a size.
    """
    # The "I" of "GiB" is valid only after a prefix: "80IB" is not a size.
    pattern = r"(?P<number>\d+(\.\d*)?) *((?P<prefix>[KMGT])(?P<binary>I)?)?B?"
    match = re.fullmatch(pattern, str(size).upper())
    if match is None:
        raise ConfigurationError(request, expected='a number of bytes, or a text such as "80GiB"')
    base = 1024 if match["binary"] else 1000
    exponent = 0
    if match["prefix"]:
        # The exponents are 1 for K, 2 for M and so on.
        exponent = "KMGT".index(match["prefix"]) + 1
    return int(float(match["number"]) * base**exponent)


def _find_existing_job(environment: Any, env: Mapping[str, str]) -> _ExistingJob | None:
    """Return the job that this process was started for, or None if no launcher started it.

    Args:
        environment: the argument of ``Fabric``: None to try all known launchers, ``"none"`` to
            ignore them, or the :class:`Environment` of the launcher.
        env: the environment variables.

    Raises:
        ArgumentTypeError: ``environment`` is not one of these values.
        ConfigurationError: the given launcher did not start this process; or no launcher did, and
            the job has several machines.
    """
    if environment == "none":
        return None
    if environment is None:
        environment_and_world = detect(env)
        if environment_and_world is None:
            refuse_to_train_alone(env)  # raises if the variables describe several machines
            return None
        return _ExistingJob(*environment_and_world)
    # The name or the class of an environment is a likely mistake.
    if isinstance(environment, str | type):
        raise ArgumentTypeError(
            f"environment={environment!r}",
            problem="it is not an environment",
            expected='None to detect one, "none" to detect nothing, or an object such as '
            "SlurmEnvironment()",
        )
    world = environment.detect(env)
    if world is None:
        raise ConfigurationError(
            f"environment={environment!r}",
            problem="its launcher did not start this process: its variables are missing",
            expected="the environment of the launcher that started this process",
            suggestion="Fabric() to detect the environment, or start the script with that launcher",
        )
    return _ExistingJob(environment, world)


def _parse_devices(
    accelerator: Accelerator, devices: Any, strategy: Strategy, job: _ExistingJob | None
) -> _Devices:
    """Return the devices of this node, as many as the existing job has processes on this node.

    Args:
        accelerator: the hardware.
        devices: the argument of ``Fabric``.
        strategy: the strategy. Its ``parallel_devices`` take precedence unless they are None.
        job: the job that this process was started for, or None.

    Raises:
        ConfigurationError: the devices do not fit the processes of the job.
    """
    # Any number of devices is valid if no process exists yet, or if one process drives them all.
    if job is None or (strategy.drives_all_devices and job.world.world_size == 1):
        return strategy.parallel_devices or accelerator.parse_devices(devices)
    _refuse_one_process_strategy(strategy, job)  # raises if the job has several processes
    if devices == "auto":
        # The strategy has no `parallel_devices`, which would have replaced "auto".
        return _devices_of_processes(accelerator, job)
    num_processes = job.world.local_world_size
    parsed = strategy.parallel_devices or accelerator.parse_devices(devices)
    if len(parsed) != num_processes:
        raise ConfigurationError(
            f"Fabric(devices={devices!r}), that is {len(parsed)} device(s) on this node (rank "
            f"{job.world.rank})",
            problem=f"{job.started_by} has started {num_processes} process(es) on this node",
            expected=f'devices="auto", or {num_processes}',
            suggestion='Fabric(devices="auto")',
        )
    return parsed


def _devices_of_processes(accelerator: Accelerator, job: _ExistingJob) -> _Devices:
    """Return a device for each process that a launcher has started on this node.

    Raises:
        ConfigurationError: this node has too few devices.
    """
    num_processes = job.world.local_world_size
    # On the CPU, any number of processes share the cores.
    if accelerator.name != "cpu":
        device_count = accelerator.device_count()
        # A scheduler may hide from each process all devices but its own. The device of every
        # process then has index 0.
        if device_count == 1:
            return accelerator.parse_devices(1) * num_processes
        if device_count < num_processes:
            raise _too_many_processes_error(accelerator, device_count, job)
    return accelerator.parse_devices(num_processes)


def _too_many_processes_error(
    accelerator: Accelerator, device_count: int, job: _ExistingJob
) -> ConfigurationError:
    """Return the error for a launcher that has started more processes than a node has devices."""
    return ConfigurationError(
        f"{job.world.local_world_size} processes on this node, started by {job.started_by}, on "
        f"{accelerator.name}",
        problem=f"rank {job.world.rank} sees only {device_count} {accelerator.name} devices on "
        "this node",
        expected=f"at most {device_count} processes",
        suggestion=f"{job.started_by} with {device_count} processes a node, or "
        'Fabric(accelerator="cpu")',
    )


def _refuse_one_process_strategy(strategy: Strategy, job: _ExistingJob) -> None:
    """Raise if a strategy for one process is used in an existing job of several processes.

    ``Strategy.check`` cannot find this mistake, since it does not see the processes of the job.
    """
    world = job.world
    is_for_one_process = strategy.drives_all_devices or isinstance(strategy, SingleDeviceStrategy)
    if world.world_size == 1 or not is_for_one_process:
        return
    raise ConfigurationError(
        f"strategy={strategy.name!r} with {world.world_size} processes on {world.num_nodes} "
        f"node(s) by {job.started_by} (rank {world.rank})",
        problem="the strategy works in one process, and each of these processes would train alone",
        expected="one process: start the script directly, or by torchrun with --nproc-per-node 1",
        suggestion='strategy="ddp" in these processes; or Fabric(strategy=..., environment="none") '
        "for a job of this process alone",
    )


def _refuse_unconnected_processes(strategy: Strategy, num_devices: int) -> None:
    """Raise if a strategy needs several processes but does not connect them.

    Only a user's own strategy class can be like this.

    Args:
        strategy: the strategy.
        num_devices: the number of devices of all nodes.
    """
    if num_devices == 1 or strategy.connects_processes or strategy.drives_all_devices:
        return
    name = type(strategy).__name__
    raise ConfigurationError(
        f"Fabric(strategy={name}(...)) with {num_devices} devices",
        problem=f"{num_devices} processes would each train a model on their own",
        expected=f"{name}.connects_processes = True, or drives_all_devices = True for one process "
        "that drives all devices",
        suggestion="devices=1",
    )


def _parse_num_nodes(num_nodes: Any, job: _ExistingJob | None) -> int:
    """Return the number of nodes of the job, which is 1 unless a launcher started the job.

    Args:
        num_nodes: the argument of ``Fabric``, ``"auto"`` or a number. A number is only compared
            with the actual one, since fabric cannot start processes on other nodes.
        job: the job that this process was started for, or None.

    Raises:
        ConfigurationError: the job has another number of nodes.
    """
    actual_num_nodes = 1 if job is None else job.world.num_nodes
    # `fabric run` passes the number as a text.
    if num_nodes == "auto" or str(num_nodes).strip() == str(actual_num_nodes):
        return actual_num_nodes
    raise ConfigurationError(
        f"num_nodes={num_nodes!r}",
        problem=f"this process belongs to a job of {actual_num_nodes} node(s), and fabric starts "
        "processes on its own node only",
        expected=f'num_nodes="auto", or {actual_num_nodes}; for more nodes, start torchrun, '
        "`fabric run`, srun or mpirun on every node",
        suggestion=f"fabric run --num-nodes {num_nodes} --node-rank R --main-address HOST "
        "script.py, with R from 0",
    )


def _choose_launcher(
    options: _Options,
    strategy: Strategy,
    launch_spec: LaunchSpec,
    world: World | None,
    job: _ExistingJob | None,
) -> Launcher:
    """Return the launcher of the job.

    Args:
        options: the arguments of ``Fabric``.
        strategy: the strategy, whose start method is used if ``Fabric`` has no launcher.
        launch_spec: the processes of this node.
        world: the place of this process in the job. None if processes are to be started.
        job: the job that this process was started for, or None.

    Raises:
        ConfigurationError: no launcher has this name, or the launcher cannot start the processes.
    """
    has_launcher = not _is_undecided(options["launcher"])
    start_method = options["launcher"] if has_launcher else strategy.start_method
    launcher = _parse_name("launcher", start_method, LAUNCHERS, Launcher)
    _refuse_second_launch(launcher, job)  # raises if a launch would start the processes twice
    if world is not None:
        # All processes exist already. The launcher was parsed for its errors only.
        return InlineLauncher()
    # No process of the job exists yet, and the launcher will start all of them. A notebook has no
    # script that "popen" could run again. So it gets another launcher, unless the user has asked
    # for "popen": by launcher="popen", or by a strategy object, which has an option start_method. A
    # strategy's name, such as "ddp", has "popen" only as its default.
    has_strategy_name = isinstance(options["strategy"], str)
    may_replace_popen = not has_launcher and has_strategy_name and launcher.name == "popen"
    if may_replace_popen and is_interactive():
        can_pickle_functions = has_cloudpickle()
        launcher = LAUNCHERS[notebook_start_method(can_pickle_functions)]
    launcher.check(launch_spec)  # raises if the launcher cannot start these processes here
    return launcher


def _refuse_second_launch(launcher: Launcher, job: _ExistingJob | None) -> None:
    """Raise if a launcher would run a function in new processes, but the job has its processes.

    Processes that fabric itself started run the same ``Fabric(...)`` line again, with the launcher
    that started them: this is not an error. They have a ``world.store``.
    """
    if job is None or job.world.store is not None or job.world.world_size == 1:
        return
    # These launchers do not start a function in new processes.
    if launcher.name in ("popen", "inline"):
        return
    raise ConfigurationError(
        f"launcher or start method {launcher.name!r} (rank {job.world.rank})",
        problem=f"{job.environment.name} has started the processes of this job already",
        expected="no launcher: fabric uses the processes that exist",
        suggestion='Fabric(strategy="ddp"), or python script.py in place of the launcher',
    )


def _find_world(job: _ExistingJob | None, num_processes: int) -> World | None:
    """Return the place of this process in the job, or None if it has to start the processes.

    A job of one process runs in this process, without a launcher.
    """
    if job is not None:
        return job.world
    if num_processes == 1:
        return World()
    return None


def _started_by(job: _ExistingJob | None, world: World | None, launcher: Launcher) -> str:
    """Return the name of what starts the processes of the job, for ``Plan.describe``."""
    if job is not None:
        return job.started_by
    # Without a world, `launcher` still has to start the processes.
    if world is None:
        return launcher.name
    return "this script"


def _should_check_collectives(options: _Options, env: Mapping[str, str]) -> bool:
    """Return whether the argument of ``Fabric`` or ``FABRIC_CHECK`` turns checked mode on."""
    text = env.get("FABRIC_CHECK", "").strip().lower()
    return options["check_collectives"] or text not in _CHECK_OFF


def _deadline(options: _Options) -> float:
    """Return the monotonic time at which ``time_limit`` ends, or infinity if there is no limit."""
    if options["time_limit"] is None:
        return float("inf")
    return monotonic() + options["time_limit"].total_seconds()

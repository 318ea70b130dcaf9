"""From what the user wrote to a frozen plan: the rules for values and their combinations.

With the tables of ``_names.py``, strings become objects here and nowhere else. No process is started and no device is
touched, so that whatever cannot work is an error before anything happens.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from fabric._names import parse_accelerator, parse_launcher, parse_strategy
from fabric.accelerators import Accelerator
from fabric.environments import Environment, detect
from fabric.errors import ArgumentTypeError, ConfigurationError
from fabric.launchers import LAUNCHERS, InlineLauncher, Launcher, LaunchSpec, is_interactive, notebook_start_method
from fabric.precision import Precision, parse_precision
from fabric.runtime import DEFAULT_TIMEOUT
from fabric.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from fabric.watchdog import DEFAULT_WATCHDOG
from fabric.world import World

__all__ = ["Plan", "resolve"]

# What `fabric run` leaves for the script, and the argument of Fabric that it stands for.
_ARGUMENTS = ("accelerator", "strategy", "devices", "num_nodes", "precision")
RUN_OPTIONS = {argument: f"FABRIC_{argument.upper()}" for argument in _ARGUMENTS}
CHECK = "FABRIC_CHECK"
_LONGEST = 10_000_000  # seconds; the stores of torch count milliseconds in 64 bits, gloo in fewer

_Found = tuple[Environment, World] | None  # what made this process, and its place
_Devices = tuple[torch.device, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that was decided before any process started.

    Attributes:
        accelerator: the hardware.
        devices: the devices of this node: one for each process, or the replicas of a process that drives several.
        num_nodes: number of nodes.
        precision: dtypes.
        strategy: what is done to modules.
        environment: what made the processes, where something did.
        world: the place of this process; None when the processes are still to be made.
        launcher: how they come to exist.
        check_collectives: whether the ranks compare their collectives before anything moves.
        timeout: how long a collective may wait.
        watchdog: how long a rank waits before a report is printed; zero for never.
    """

    accelerator: Accelerator
    devices: tuple[torch.device, ...]
    num_nodes: int
    precision: Precision
    strategy: Strategy
    environment: Environment | None
    world: World | None
    launcher: Launcher
    check_collectives: bool = False
    timeout: timedelta = DEFAULT_TIMEOUT
    watchdog: timedelta = DEFAULT_WATCHDOG

    @property
    def processes_per_node(self) -> int:
        """Number of processes on each node."""
        return 1 if self.strategy.drives_all_devices else len(self.devices)

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        # Nodes may hold different numbers of processes, which the launcher that made them knows.
        return self.processes_per_node * self.num_nodes if self.world is None else self.world.world_size


def resolve(
    *,
    accelerator: Accelerator | str = "auto",
    strategy: Strategy | str = "auto",
    devices: int | str | Sequence[int] = "auto",
    num_nodes: int | str = "auto",
    precision: Precision | str | int | None = None,
    environment: Environment | str | None = None,
    launcher: Launcher | str | None = None,
    check_collectives: bool = False,
    timeout: timedelta | float | None = None,
    watchdog: timedelta | float = DEFAULT_WATCHDOG,
    env: Mapping[str, str] | None = None,
) -> Plan:
    """Make the plan for one job; arguments as for ``Fabric``.

    Args:
        accelerator: name, object or ``"auto"``.
        strategy: name, object or ``"auto"``.
        devices: number, indices, their spelling, or ``"auto"``.
        num_nodes: number of nodes or ``"auto"``.
        precision: name, alias, row or None.
        environment: object, None to detect one, or ``"none"`` to detect nothing.
        launcher: name, object or None.
        check_collectives: True, or False to leave it to ``FABRIC_CHECK``.
        timeout: seconds, timedelta, or None for the strategy's.
        watchdog: seconds or timedelta.
        env: environment variables; None for those of this process.

    Raises:
        ConfigurationError: a value or a combination that cannot work.
        ArgumentTypeError: a value of a type that is not understood.
    """
    env = os.environ if env is None else env
    given = _with_run_options(
        env, accelerator=accelerator, strategy=strategy, devices=devices, num_nodes=num_nodes, precision=precision
    )
    named = parse_strategy(given["strategy"])
    waits = None if timeout is None else _parse_duration("timeout", timeout, "positive")
    if named is not None:
        given = _with_strategy_options(named, given)
        environment = _same("environment", environment, named.cluster_environment)
        waits = _same("timeout", waits, None if named.timeout == DEFAULT_TIMEOUT else named.timeout)
    found = _find_environment(environment, env)
    world = None if found is None else found[1]
    hands_out = found  # the environment that made a process for each device
    if named is not None and named.drives_all_devices:
        _check_one_process(named, given["num_nodes"], found)
        hands_out = None
    hardware = parse_accelerator(given["accelerator"])
    where = _parse_devices(hardware, given["devices"], named and named.parallel_devices, hands_out)
    nodes = _parse_num_nodes(given["num_nodes"], found)
    made = SingleDeviceStrategy() if len(where) * nodes == 1 else DDPStrategy(num_nodes=nodes)
    chosen = made if named is None else named
    chosen.check(accelerator=hardware, devices=where, num_nodes=nodes)
    if world is None and (chosen.drives_all_devices or len(where) * nodes == 1):
        world = World()
    spec = LaunchSpec(num_processes=len(where), device_type=hardware.name)
    return Plan(
        accelerator=hardware,
        devices=where,
        num_nodes=nodes,
        precision=parse_precision(given["precision"]),
        strategy=chosen,
        environment=None if found is None else found[0],
        world=world,
        launcher=_choose_launcher(launcher, chosen, spec, world, found, by_name=isinstance(strategy, str)),
        check_collectives=check_collectives or _check_is_on(env.get(CHECK, "")),
        timeout=waits or DEFAULT_TIMEOUT,
        watchdog=_parse_duration("watchdog", watchdog, "0 or more"),
    )


def _parse_duration(argument: str, value: Any, valid: str) -> timedelta:
    """Seconds or a timedelta; zero only where ``valid`` says so."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if is_number and 0 <= seconds <= _LONGEST and (seconds > 0 or valid != "positive"):
        return timedelta(seconds=seconds)
    raise ConfigurationError(
        f"Fabric({argument}={value!r})",
        "it is no length of time",
        f"seconds or a timedelta, {valid}, at most {_LONGEST:,} s",
        f"Fabric({argument}=600)",
    )


def _check_is_on(value: str) -> bool:
    if value not in ("", "0", "1"):
        raise ConfigurationError(
            f"{CHECK}={value} in the environment",
            "it is neither on nor off",
            "1 to compare the collectives of all ranks before anything moves, 0 not to",
            f"export {CHECK}=1",
        )
    return value == "1"


def _with_run_options(env: Mapping[str, str], **given: Any) -> dict[str, Any]:
    """Fill what was left open with the options of `fabric run`; a different explicit value is an error."""
    result = dict(given)
    for argument, variable in RUN_OPTIONS.items():
        value = env.get(variable)
        if not value:
            continue
        if given[argument] in ("auto", None):
            result[argument] = value
        elif _spelled(argument, given[argument]) != _spelled(argument, value):
            option = f"--{argument.replace('_', '-')}"
            raise ConfigurationError(
                f"Fabric({argument}={given[argument]!r}) under `fabric run {option} {value}`",
                "the two differ",
                f"one of them, or the same value in both ({variable} carries that of the command line)",
                f'Fabric({argument}="auto")' if argument != "precision" else "Fabric()",
            )
    return result


def _spelled(argument: str, value: Any) -> str:
    if argument == "precision":
        return parse_precision(value).name
    if isinstance(value, Accelerator | Strategy):
        return value.name
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value))
    text = str(value).strip().lower()
    return "cuda" if argument == "accelerator" and text == "gpu" else text


def _with_strategy_options(strategy: Strategy, given: dict[str, Any]) -> dict[str, Any]:
    """Merge what was given to the strategy's own constructor."""
    devices = strategy.parallel_devices
    kind = devices[0].type if devices else None
    fixed = {
        "accelerator": strategy.accelerator or kind,
        "precision": strategy.precision,
        "num_nodes": strategy.num_nodes if strategy.num_nodes != 1 else None,
    }
    return given | {argument: _same(argument, given[argument], value) for argument, value in fixed.items()}


def _same(argument: str, given: Any, fixed: Any) -> Any:
    if fixed is None:
        return given
    if given in ("auto", None) or given is fixed or _spelled(argument, given) == _spelled(argument, fixed):
        return fixed
    raise _two_values(argument, given, argument, fixed)


def _two_values(argument: str, given: Any, own: str, fixed: Any) -> ConfigurationError:
    return ConfigurationError(
        f"Fabric({argument}={given!r}, strategy=Strategy({own}={fixed!r}))",
        "the two differ",
        "the value in one of the two places, or the same in both",
        f"Fabric({argument}={given!r}) and a strategy without {own}",
    )


def _find_environment(environment: Any, env: Mapping[str, str]) -> _Found:
    if environment is None:
        return detect(env)
    if environment == "none":
        return None
    if isinstance(environment, str | type) or not callable(getattr(environment, "detect", None)):
        raise ArgumentTypeError(
            f"environment={environment!r}",
            "it is no environment",
            'None to detect one, "none" to detect nothing, or an object with detect(env) -> World | None',
            "Fabric(environment=fabric.environments.SlurmEnvironment())",
        )
    world = environment.detect(env)
    if world is None:
        raise ConfigurationError(
            f"environment={environment!r}",
            "this process was not started by it: its variables are missing",
            "an environment whose launcher made this process",
            "Fabric() to detect the environment, or start the script with that launcher",
        )
    return environment, world


def _parse_devices(accelerator: Accelerator, devices: Any, own: _Devices | None, found: _Found) -> _Devices:
    """The devices of this node: the strategy's ``own``, those that were asked for, or one for each process."""
    if own is None and devices == "auto" and found is not None:
        return _devices_of_environment(accelerator, found)
    parsed = own if own is not None and devices in ("auto", None) else accelerator.parse_devices(devices)
    if own not in (None, parsed):
        raise _two_values("devices", devices, "parallel_devices", list(map(str, own or ())))
    if found is not None and len(parsed) != found[1].local_world_size:
        environment, world = found
        raise ConfigurationError(
            f"Fabric(devices={devices!r}), that is {len(parsed)} device(s) on this node (rank {world.rank})",
            f"{environment.name} has made {world.local_world_size} process(es) on it",
            f'devices="auto", or {world.local_world_size}',
            'Fabric(devices="auto")',
        )
    return parsed


def _check_one_process(strategy: Strategy, num_nodes: Any, found: _Found) -> None:
    """Refuse several processes or nodes under a strategy that drives all devices from one process."""
    asked = ""
    if found is not None and found[1].world_size > 1:
        world = found[1]
        asked = f"{world.world_size} processes on {world.num_nodes} node(s) by {found[0].name} (rank {world.rank})"
    elif str(num_nodes).strip().isdigit() and int(num_nodes) > 1:
        asked = f"num_nodes={num_nodes}"
    if asked:
        raise ConfigurationError(
            f"strategy={strategy.name!r} with {asked}",
            "it drives all devices of one node from one process, and each process would train on its own",
            "one process: the script started by itself, or torchrun with --nproc-per-node 1",
            f'python script.py with Fabric(strategy="{strategy.name}", devices=2); or strategy="ddp" in these',
        )


def _devices_of_environment(accelerator: Accelerator, found: tuple[Environment, World]) -> _Devices:
    """One device for each process that the environment made on this node."""
    environment, world = found
    count = accelerator.device_count()
    if accelerator.name == "cpu" or count >= world.local_world_size:
        return accelerator.parse_devices(world.local_world_size)
    if count == 1:  # a scheduler that shows each process its own device only
        return accelerator.parse_devices(1) * world.local_world_size
    raise ConfigurationError(
        f"{world.local_world_size} processes on this node, made by {environment.name}, on {accelerator.name}",
        f"there are {count} {accelerator.name} devices on it (rank {world.rank} sees them)",
        f"at most {count} processes",
        f'{environment.name} with {count} processes a node, or Fabric(accelerator="cpu")',
    )


def _parse_num_nodes(num_nodes: Any, found: _Found) -> int:
    if isinstance(num_nodes, str) and num_nodes.strip().isdigit():
        num_nodes = int(num_nodes)
    actual = 1 if found is None else found[1].num_nodes
    if num_nodes == "auto":
        return actual
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int) or num_nodes < 1:
        raise ConfigurationError(
            f"num_nodes={num_nodes!r}",
            "it is not a number of nodes",
            'an integer from 1, or "auto"',
            "Fabric(num_nodes=2)",
        )
    if num_nodes == actual:
        return num_nodes
    if found is None:
        raise ConfigurationError(
            f"num_nodes={num_nodes} in a process that nothing launched on several nodes",
            "fabric starts processes on the node that it runs on; those of other nodes come from a cluster's launcher",
            "torchrun, `fabric run`, srun or mpirun on every node",
            f"fabric run --num-nodes {num_nodes} --node-rank R --main-address HOST script.py, with R from 0",
        )
    raise ConfigurationError(
        f"num_nodes={num_nodes} (rank {found[1].rank})",
        f"{found[0].name} has made processes on {actual} node(s)",
        f'num_nodes="auto", or {actual}',
        'Fabric(num_nodes="auto")',
    )


def _choose_launcher(
    launcher: Any, strategy: Strategy, spec: LaunchSpec, world: World | None, found: _Found, by_name: bool
) -> Launcher:
    named = parse_launcher(launcher)
    method = strategy.start_method if named is None else named.name
    if found is not None and found[1].store is None and found[1].world_size > 1 and method not in ("popen", "inline"):
        raise ConfigurationError(
            f"launcher or start method {method!r} (rank {found[1].rank})",
            f"{found[0].name} has made the processes of this job already",
            "no launcher: these processes are used as they are",
            'Fabric(strategy="ddp"), or python script.py in place of the launcher',
        )
    if world is not None:
        return InlineLauncher()
    if named is None:
        # A name such as "ddp" says nothing of how to start; at a prompt there is no script to run again.
        if by_name and method == "popen" and is_interactive():
            method = notebook_start_method()
        named = LAUNCHERS[method]
    named.check(spec)
    return named

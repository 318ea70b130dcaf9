"""The name tables, and how a name, an object or an entry point becomes an object."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from fabric import strategies
from fabric.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator, MPSAccelerator
from fabric.errors import ArgumentTypeError, ConfigurationError
from fabric.launchers import LAUNCHERS, Launcher
from fabric.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

__all__ = ["parse_accelerator", "parse_launcher", "parse_strategy"]

ACCELERATORS: Mapping[str, Callable[[], Accelerator]] = {
    "cpu": CPUAccelerator,
    "cuda": CUDAAccelerator,
    "gpu": CUDAAccelerator,
    "mps": MPSAccelerator,
}

_UNUSED_SUFFIX = "_find_unused_parameters_true"
_DDP = {
    "ddp": DDPStrategy,
    "ddp_spawn": partial(DDPStrategy, start_method="spawn"),
    "ddp_fork": partial(DDPStrategy, start_method="fork"),
    "ddp_forkserver": partial(DDPStrategy, start_method="forkserver"),
    # Fresh processes from a server that never touched CUDA or a thread pool: the start method that is safe there.
    "ddp_notebook": partial(DDPStrategy, start_method="forkserver"),
}
STRATEGIES: Mapping[str, Callable[[], Strategy]] = {
    "single_device": SingleDeviceStrategy,
    "dp": lambda: strategies.DataParallelStrategy(),  # imported then, as fsdp is
    **_DDP,
    **{name + _UNUSED_SUFFIX: partial(row, find_unused_parameters=True) for name, row in _DDP.items()},
    "fsdp": lambda: strategies.FSDPStrategy(),
    "fsdp_cpu_offload": lambda: strategies.FSDPStrategy(cpu_offload=True),
}


def parse_strategy(strategy: Any) -> Strategy | None:
    """The strategy; None for ``"auto"``."""
    if isinstance(strategy, Strategy):
        return strategy
    if strategy == "auto":
        return None
    return _named("strategy", strategy, STRATEGIES, Strategy)


def parse_accelerator(accelerator: Any) -> Accelerator:
    """The accelerator, one that is there; ``"auto"`` is the first there is of CUDA, MPS and the CPU."""
    if accelerator == "auto":
        candidates: list[Accelerator] = [CUDAAccelerator(), MPSAccelerator()]
        return next((candidate for candidate in candidates if candidate.is_available()), CPUAccelerator())
    chosen = accelerator
    if not isinstance(accelerator, Accelerator):
        chosen = _named("accelerator", accelerator, ACCELERATORS, Accelerator)
    if not chosen.is_available():
        raise ConfigurationError(
            f"accelerator={chosen.name!r}",
            "there is none on this machine, or torch was built without it",
            '"auto", "cpu", and what the machine has',
            'Fabric(accelerator="auto")',
        )
    return chosen


def _named(argument: str, name: Any, table: Mapping[str, Callable[[], Any]], kind: type) -> Any:
    """The object that a name stands for: from the table, or from the entry points ``fabric.<argument>s``."""
    if not isinstance(name, str):
        raise ArgumentTypeError(
            f"{argument}={name!r}",
            f"{type(name).__name__} is neither a name nor a {kind.__name__}",
            f"a name, or an object of a subclass of fabric.{argument}s.{kind.__name__}",
            f'Fabric({argument}="auto")',
        )
    key = name.lower()
    if key in table:
        return table[key]()
    # Only for names that are not ours: looking through all installed packages takes milliseconds.
    plugins = {plugin.name: plugin for plugin in entry_points(group=f"fabric.{argument}s")}
    if key in plugins:
        made = plugins[key].load()()
        if isinstance(made, kind):
            return made
        raise ArgumentTypeError(
            f"{argument}={name!r}, from the entry point {plugins[key].value}",
            f"it makes a {type(made).__name__}, which is no {kind.__name__}",
            f"a callable without arguments that returns a {kind.__name__}",
            f'an entry point in the group "fabric.{argument}s"',
        )
    valid = ["auto", *table, *plugins]
    near = get_close_matches(key, valid, n=1)
    raise ConfigurationError(
        f"{argument}={name!r}",
        f"there is no such {argument}" + (f"; did you mean {near[0]!r}?" if near else ""),
        ", ".join(repr(one) for one in valid),
        f'Fabric({argument}="{near[0] if near else "auto"}")',
    )


def parse_launcher(launcher: Any) -> Launcher | None:
    """The launcher; None leaves it to the strategy."""
    if launcher is None or isinstance(launcher, Launcher):
        return launcher
    table = {name: lambda one=one: one for name, one in LAUNCHERS.items()}
    return _named("launcher", launcher, table, Launcher)

"""How the processes of a job come to exist: one class per way."""

from collections.abc import Mapping
from types import MappingProxyType

from fabric.launchers._failures import RunDirectory
from fabric.launchers._fresh import refuse_while_importing_main
from fabric.launchers._rank import leave_with_an_error, record_failures
from fabric.launchers._signals import StopRequest
from fabric.launchers.base import Launcher, LaunchSpec
from fabric.launchers.inline import InlineLauncher
from fabric.launchers.notebook import is_interactive, is_notebook, notebook_start_method
from fabric.launchers.processes import ProcessLauncher
from fabric.launchers.script import ScriptLauncher

__all__ = [
    "LAUNCHERS",
    "InlineLauncher",
    "LaunchSpec",
    "Launcher",
    "ProcessLauncher",
    "RunDirectory",
    "ScriptLauncher",
    "StopRequest",
    "is_interactive",
    "is_notebook",
    "leave_with_an_error",
    "notebook_start_method",
    "record_failures",
    "refuse_while_importing_main",
]

LAUNCHERS: Mapping[str, Launcher] = MappingProxyType(
    {
        "popen": ScriptLauncher(),
        "spawn": ProcessLauncher("spawn"),
        "fork": ProcessLauncher("fork"),
        "forkserver": ProcessLauncher("forkserver"),
    }
)

"""Launchers: how the processes of a job are started and supervised."""

from collections.abc import Mapping

from fabric.launchers.base import InlineLauncher, Launcher, LaunchSpec
from fabric.launchers.function import ProcessLauncher
from fabric.launchers.notebook import is_interactive, notebook_start_method, refuse_while_importing_main
from fabric.launchers.rank import ControlThread, StopRequest, exit_with_late_error
from fabric.launchers.script import ScriptLauncher

__all__ = [
    "LAUNCHERS",
    "ControlThread",
    "InlineLauncher",
    "LaunchSpec",
    "Launcher",
    "ProcessLauncher",
    "ScriptLauncher",
    "StopRequest",
    "exit_with_late_error",
    "is_interactive",
    "notebook_start_method",
    "refuse_while_importing_main",
]

LAUNCHERS: Mapping[str, Launcher] = {
    "popen": ScriptLauncher(),
    "spawn": ProcessLauncher("spawn"),
    "fork": ProcessLauncher("fork"),
    "forkserver": ProcessLauncher("forkserver"),
}

"""Launchers: how the processes of a job are started and supervised."""

from collections.abc import Mapping
from typing import Literal

from fabric.launchers.base import InlineLauncher, Launcher, LaunchSpec
from fabric.launchers.function import ProcessLauncher
from fabric.launchers.script import ScriptLauncher

__all__ = [
    "LAUNCHERS",
    "InlineLauncher",
    "LaunchSpec",
    "Launcher",
    "ProcessLauncher",
    "ScriptLauncher",
    "StartMethod",
]

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

LAUNCHERS: Mapping[str, Launcher] = {
    "popen": ScriptLauncher(),
    "spawn": ProcessLauncher("spawn"),
    "fork": ProcessLauncher("fork"),
    "forkserver": ProcessLauncher("forkserver"),
}

"""The launcher that launches nothing: the function runs in this process."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fabric.launchers._rank import record_failures
from fabric.launchers.base import Launcher, LaunchSpec
from fabric.world import World

__all__ = ["InlineLauncher"]


class InlineLauncher(Launcher):
    """Runs a function in this process: the only one of its job, or one that somebody else made."""

    name = "inline"

    def check(self, spec: LaunchSpec) -> None:
        """Accept everything: there is nothing to start."""

    def launch(
        self, fn: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any], spec: LaunchSpec
    ) -> Any:
        """Run ``fn(*args, **kwargs)`` here and return its result untouched; without ``fn`` return None.

        In a process that fabric's script launcher made, an exception that leaves the script is from now on told to
        the launching process, which prints it, and the process leaves when that one is gone.
        """
        record_failures(World.from_env(os.environ))
        return None if fn is None else fn(*args, **kwargs)

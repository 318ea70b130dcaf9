"""Runs of a function in real ranks."""

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fabric import Fabric
from fabric.launchers import LAUNCHERS, Launcher, LaunchSpec
from fabric.testing import RankPool

# Seconds that a call of the shared ranks may take; less than pytest's limit for a test.
TIMEOUT = 150.0

_POOLS: dict[int, RankPool] = {}


class SharedRanks(Launcher):
    """A launcher whose processes stay from test to test, with a pool for each number of ranks.

    Each launch has a Fabric, a process group and random states of its own, as in new processes. The
    modules that a rank has imported, and whatever a test leaves in them, stay. Ranks that failed
    are replaced.
    """

    name = "shared"

    def launch(
        self,
        fn: Callable[..., Any] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        spec: LaunchSpec,
    ) -> Any:
        size = spec.num_processes
        if size not in _POOLS:
            # Each launch destroys the process group of the pool, and makes its own.
            _POOLS[size] = RankPool(size, timeout=TIMEOUT, reset=False)
        # Each launch has its own store: a shared store would hold the keys of earlier launches.
        with TemporaryDirectory() as directory:
            results = _POOLS[size].run(
                _without_the_pool, f"file://{directory}/store", fn, args, kwargs
            )
        if spec.results == "all":
            return results
        if spec.results == "first":
            return results[0]
        return None


def _without_the_pool(
    fabric: Fabric,
    store: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a function in a rank of the pool, as in a new process without a process group."""
    fabric.teardown()
    environment = dict(os.environ)
    os.environ["FABRIC_STORE"] = store
    try:
        return fn(*args, **kwargs)
    finally:
        os.environ.clear()
        os.environ.update(environment)
        _free_process_groups()


def _free_process_groups() -> None:
    """Collect garbage if process groups are part of it, as after FSDP, whose objects have cycles.

    A thread of each group wakes up a hundred times a second until the group is freed. The ranks of
    a whole run would otherwise have a hundred of these threads.
    """
    threads: list[str] = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread has ended
            threads.append(path.read_text())
    if "gloo_tcp_loop\n" in threads:
        gc.collect()


def close_shared_ranks() -> None:
    """End the processes. The next launch starts new ones."""
    while _POOLS:
        _, pool = _POOLS.popitem()
        pool.close()


def run_in_ranks(
    function: Callable[..., Any], *args: Any, ranks: int = 2, **options: Any
) -> list[Any]:
    """Run ``function(fabric, *args)`` in several processes, and return its results by rank.

    The processes are shared with other tests, unless ``options`` name another launcher.
    """
    # A single rank is this process: the block closes what it has opened.
    options = {"strategy": "ddp", "launcher": SharedRanks(), **options}
    with Fabric(accelerator="cpu", devices=ranks, **options) as fabric:
        return fabric.launch(function, *args, return_all=True)


def in_another_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function that a process of its own calls.

    The process is forked from the fork server, which takes a tenth of the time of an interpreter.
    """
    return LAUNCHERS["forkserver"].launch(function, args, {}, LaunchSpec(num_processes=1))


def remedy(text: str) -> str:
    """Return the line of code that an error proposes. The line after it may name a rank."""
    _, suggestion = text.split("Write: ")
    return suggestion.splitlines()[0]


def outcome(action: Callable[[], Any]) -> str:
    """Return the text and notes of the error that an action raises, or "fine"."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the outcome is what is tested
        notes = "\n".join(getattr(error, "__notes__", []))
        return f"{type(error).__name__}: {error}\n{notes}"
    return "fine"

"""Running a function in real ranks, for tests."""

import os
from collections.abc import Callable, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

from fabric import Fabric
from fabric.launchers import Launcher, LaunchSpec
from fabric.testing import RankPool

TIMEOUT = 150.0  # seconds for a call of the shared ranks; less than pytest's limit for a test

_POOLS: dict[int, RankPool] = {}


class SharedRanks(Launcher):
    """Runs a function in processes that stay from test to test, a pool for each number of ranks.

    Each launch has a Fabric, a process group and random states of its own, as in new processes; the modules that a rank
    has imported, and whatever a test leaves in them, stay. Ranks that failed are replaced.
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
            _POOLS[size] = RankPool(size, timeout=TIMEOUT)
        # A store of its own: one that all launches share would be read again by each of them.
        with TemporaryDirectory() as directory:
            results = _POOLS[size].run(
                _without_the_pool, f"file://{directory}/store", fn, args, kwargs
            )
        return {"all": results, "first": results[0], "none": None}[spec.results]


def _without_the_pool(
    fabric: Fabric,
    store: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    fabric.teardown()  # closes its process group: the function makes one
    environment = dict(os.environ)
    os.environ["FABRIC_STORE"] = store
    try:
        return fn(*args, **kwargs)
    finally:
        os.environ.clear()
        os.environ.update(environment)


def close_shared_ranks() -> None:
    """End the processes; the next launch starts others."""
    while _POOLS:
        _POOLS.popitem()[1].close()


def run_in_ranks(
    function: Callable[..., Any], *args: Any, ranks: int = 2, **options: Any
) -> list[Any]:
    """What ``function(fabric, *args)`` returned in each of several processes, by rank.

    The processes are shared with other tests, unless ``options`` name another launcher.
    """
    # The block closes what a single rank, which is this process, has opened.
    options = {"strategy": "ddp", "launcher": SharedRanks(), **options}
    with Fabric(accelerator="cpu", devices=ranks, **options) as fabric:
        return fabric.launch(function, *args, return_all=True)


def outcome(action: Callable[[], Any]) -> str:
    """The first words of what an action raises, or "fine"."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the outcome is what is tested
        notes = "\n".join(getattr(error, "__notes__", []))
        return f"{type(error).__name__}: {error}\n{notes}"
    return "fine"

"""Running a function in real ranks, for tests."""

from collections.abc import Callable
from typing import Any

from fabric import Fabric


def run_in_ranks(function: Callable[..., Any], *args: Any, ranks: int = 2, **options: Any) -> list[Any]:
    """What ``function(fabric, *args)`` returned in each of several processes, by rank."""
    # The block closes what a single rank, which is this process, has opened.
    with Fabric(accelerator="cpu", devices=ranks, **{"strategy": "ddp_forkserver", **options}) as fabric:
        return fabric.launch(function, *args, return_all=True)


def outcome(action: Callable[[], Any]) -> str:
    """The first words of what an action raises, or "fine"."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the outcome is what is tested
        notes = "\n".join(getattr(error, "__notes__", []))
        return f"{type(error).__name__}: {error}\n{notes}"
    return "fine"

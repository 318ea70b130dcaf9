"""The cost of ``fabric.fingerprint``: the time of a step, and the size of a record.

The command is ``python -m benchmarks.fingerprint``. It needs one core, and no other load.
"""

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import step_of, tiny
from benchmarks.timing import seconds
from fabric import Fabric

__all__ = ["main"]

WIDTHS = (16, 1024)
DETAILS = (None, "steps", "modules")
ROUNDS = 5
STEPS = 10


def measure(
    fabric: Fabric, step: Callable[[], None], detail: Any, folder: Path
) -> tuple[float, int]:
    """Return the seconds of a step, and the bytes of a record per step.

    Args:
        fabric: the Fabric of the step.
        step: runs a step.
        detail: what to record. None records nothing.
        folder: where to write.
    """
    context: Any = nullcontext()
    if detail is not None:
        context = fabric.fingerprint(folder, detail=detail)
    with context:
        duration = seconds(step, STEPS)
    nbytes = 0
    steps = 1
    if detail is not None:
        content = (folder / "rank-0.jsonl").read_text()
        nbytes = len(content)
        steps = content.count('{"end":')
    return duration, nbytes // steps


def main() -> None:
    """Print a table with a row for each width and detail."""
    torch.set_num_threads(1)
    with Fabric(accelerator="cpu", devices=1) as fabric, tempfile.TemporaryDirectory() as directory:
        for width in WIDTHS:
            model, optimizer, inputs, targets = tiny(width=width)
            prepared, optimizer = fabric.setup(model, optimizer)
            step = step_of(prepared, optimizer, fabric.backward, inputs, targets)
            fastest: dict[Any, float] = {}
            for number in range(ROUNDS):
                for detail in DETAILS:
                    folder = Path(directory, f"{width}-{detail}-{number}")
                    duration, nbytes = measure(fabric, step, detail, folder)
                    fastest[detail] = min(duration, fastest.get(detail, duration))
                    if number == ROUNDS - 1:
                        milliseconds = 1e3 * fastest[detail]
                        print(f"width {width:5} {detail!s:8} {milliseconds:8.2f} ms {nbytes:8} B")


if __name__ == "__main__":
    main()

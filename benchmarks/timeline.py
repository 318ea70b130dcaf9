"""A picture of a trace of ``fabric.profile``.

The command is `python -m benchmarks.timeline trace.json picture.png`.

Without a trace, the command records one on two CPU processes, of which rank 1 has slow data, and
draws docs/timeline.png.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fabric import Fabric

__all__ = ["draw", "main"]

DOCS = Path(__file__).parents[1] / "docs"
COLORS = {
    "data": "tab:orange",
    "forward": "tab:blue",
    "backward": "tab:green",
    "optimizer": "tab:red",
    "save": "tab:purple",
    "gradients": "0.85",
}


class SlowData(Dataset[Tensor]):
    """Batches that each take rank 1 ten milliseconds."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 16 * 32

    def __getitems__(self, batch: list[int]) -> list[Tensor]:
        """Return a batch."""
        if self.rank == 1:
            time.sleep(0.01)
        return [torch.ones(512) for _ in batch]


def train(fabric: Fabric, path: str) -> str:
    """Train and record the trace, and return the table of timings."""
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)])
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(SlowData(fabric.global_rank), batch_size=16))
    with fabric.profile(path, steps=range(8, 11)):
        for number, batch in enumerate(loader):
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if number in (2, 9):  # the first save imports what it needs
                fabric.save(f"{path}.pt", {"model": model})
    return str(fabric.timings())


def draw(trace: Path, picture: Path) -> None:
    """Draw the phases of each rank, with torch's collectives below."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports] - an extra

    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    ranks = sorted({event["pid"] for event in events})
    start = min(e["ts"] for e in events if e["name"] in COLORS)
    figure = Figure(figsize=(9, 1.2 + 1.1 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    begun = dict[tuple[int, int], float]()
    for event in events:
        rank = event["pid"]
        name = event["name"]
        at = (event.get("ts", start) - start) / 1e3
        if event["ph"] == "X" and name.startswith("step "):
            ends = (len(ranks) - rank - 1) / len(ranks), (len(ranks) - rank) / len(ranks)
            axes.axvline(at + event["dur"] / 1e3, *ends, color="0.5", lw=0.7)
        elif event["ph"] == "X" and name in COLORS:
            axes.broken_barh([(at, event["dur"] / 1e3)], (rank - 0.3, 0.4), color=COLORS[name])
        elif event["ph"] == "b":
            begun[rank, event["id"]] = at
        elif event["ph"] == "e":
            since = begun[rank, event["id"]]
            axes.broken_barh([(since, at - since)], (rank + 0.15, 0.2), color="0.4", lw=0)
    named = {"gradients": "waits for gradients of others"}
    handles = [
        axes.broken_barh([], (0, 0), color=color, label=named.get(name, name))
        for name, color in COLORS.items()
    ]
    handles.append(axes.broken_barh([], (0, 0), color="0.4", label="collectives of torch"))
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.set(xlabel="ms", ylim=(max(ranks) + 0.5, -0.5))
    axes.margins(x=0)
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(picture, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a trace."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, nargs="?", help="what fabric.profile wrote")
    parser.add_argument(
        "picture", type=Path, nargs="?", default=DOCS / "timeline.png", help="docs/timeline.png"
    )
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if args.trace is None:
            args.trace = Path(folder) / "trace.json"
            fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", launcher="spawn")
            print(fabric.launch(train, str(args.trace)))
        draw(args.trace, args.picture)


if __name__ == "__main__":
    main()

"""What the jobs of ``goodput.py`` share: the model, the data, and the log."""

import json
import os
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import TensorDataset

__all__ = [
    "BATCH",
    "SAVE_EVERY",
    "JobLog",
    "build_dataset",
    "build_model",
]

BATCH = 12  # of all ranks
SAMPLES = 240
SAVE_EVERY = 10  # steps
_STEP_SECONDS = 0.01
WIDTH = 512


def build_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 4, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True), torch.arange(SAMPLES))


def build_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    )


class JobLog:
    """The log of a job, to which the ranks append a line of JSON for each event.

    The times of all processes are on one clock.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        """Log the id of this process, and when it was started. Its imports are done."""
        self._path = path
        self._rank = int(os.environ["RANK"])
        self._write("imported", pid=os.getpid(), rank=self._rank, start=_process_start())

    def restored(self) -> None:
        """Log that rank 0 has loaded its checkpoint, or that there is none."""
        self._write_on_first_rank("restored")

    def step(self, step: int, loss: torch.Tensor, samples: torch.Tensor) -> None:
        """Log a step of the job on rank 0, and make the step last 10 ms longer on every rank.

        Args:
            step: its number, from 1.
            loss: the mean of the losses of the ranks.
            samples: the numbers of the samples of all ranks.
        """
        self._write_on_first_rank("step", step=step, loss=loss.item(), samples=samples.tolist())
        time.sleep(_STEP_SECONDS)

    def end(self) -> NoReturn:
        """End this process at once.

        In torch 2.13, the destructor of a gloo group may wait forever for one of its threads, which
        waits for the interpreter lock. Fabric's teardown avoids that.
        """
        os._exit(0)

    def _write_on_first_rank(self, event: str, **values: Any) -> None:
        if self._rank == 0:
            self._write(event, **values)

    def _write(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, "time": time.monotonic(), **values})
        with open(self._path, "a") as file:
            file.write(line + "\n")


def _process_start() -> float:
    """Return when this process was started, on the monotonic clock, to 10 ms."""
    # The name of the process, in brackets, may have spaces. The 22nd field is the start, in clock
    # ticks since the boot of the machine.
    _, _, fields = Path("/proc/self/stat").read_text().rpartition(")")
    start = int(fields.split()[19]) / os.sysconf("SC_CLK_TCK")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - start
    return time.monotonic() - age

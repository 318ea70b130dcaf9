"""The output of a run: a progress bar, lines of text, and a file with the losses."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm


class Report:
    """A logger for `Fabric(loggers=...)`; it does nothing before the first metrics are logged.

    Fabric calls its loggers on rank 0 only, so the reports of the other processes print nothing.
    """

    def __init__(self, path: Path | None, steps: int) -> None:
        self.path, self.steps = path, steps
        self.bar: tqdm | None = None

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        step = step or 0
        values = {name: float(value) for name, value in metrics.items()}
        if self.bar is None:
            self.bar = tqdm(total=self.steps, initial=step, unit="step", mininterval=0.5)
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
        self.bar.update(step - self.bar.n)
        if self.path is not None:
            with self.path.open("a" if step else "w") as file:
                print(json.dumps({"step": step, **values}), file=file)
        for name, value in values.items():
            if name == "loss":
                self.bar.set_postfix_str(f"loss {value:.3f}", refresh=False)
            else:
                self.text(f"step {step}: {name.replace('_', ' ')} {value:.4f}")

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.text(json.dumps(dict(params), default=str))

    def text(self, text: str) -> None:
        if self.bar is not None:
            self.bar.write(text)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

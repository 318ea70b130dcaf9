"""Lightning's callback that ends a run when the loss jumps."""

import json
import math
from collections import deque
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fabric_compat.utilities import _PATH, _TORCHMETRICS_GREATER_EQUAL_1_0_0


class TrainingSpikeException(RuntimeError):
    """The loss has jumped, or is not finite, on one of the ranks."""

    def __init__(self, batch_idx: int, *args: Any) -> None:
        super().__init__(f"Training spike detected in batch {batch_idx}", *args)


class SpikeDetection:
    """A callback that compares each loss with the mean of the losses before it.

    A loss is a spike if it is worse than the loss before it, and differs from the mean by both
    tolerances. A spike on one rank ends the run on all ranks, with a
    :class:`TrainingSpikeException`. Rank 0 first writes the numbers of this batch and of the batch
    before it to a file, so that the next run can skip them. Needs no torchmetrics.

    Args:
        mode: ``"min"`` or ``"max"``: whether a lower or a higher loss is better.
        window: The number of losses in the mean.
        warmup: The number of the first batch that may be a spike.
        atol: The smallest difference of a spike from the mean. None stands for no limit.
        rtol: The smallest difference of a spike, as a multiple of the mean. None stands for no
            limit.
        exclude_batches_path: The file, which ends in ``.json``, or the folder of the file
            ``skip_batches.json``. The default is the current folder.
        finite_only: Whether a loss that is not finite is always a spike.

    Raises:
        ValueError: ``mode`` is neither ``"min"`` nor ``"max"``.
    """

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: _PATH | None = None,
        finite_only: bool = True,
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r}: expected 'min' or 'max'")
        self.mode = mode
        self.warmup = warmup
        self.atol = atol
        self.rtol = rtol
        self.exclude_batches_path = exclude_batches_path
        self.finite_only = finite_only
        self.bad_batches: list[int] = []
        self.last_val = 0.0
        # The finite losses of the window, of this rank.
        self._losses: deque[float] = deque(maxlen=window)

    @torch.no_grad()
    def on_train_batch_end(self, fabric: Any, loss: Tensor, batch: Any, batch_idx: int) -> None:
        """Check the loss of a batch. Collective: every rank must call it.

        Raises:
            TrainingSpikeException: The loss of a rank is a spike.
        """
        value = float(loss)
        is_spike = batch_idx >= self.warmup and self._is_spike(value)
        if fabric.strategy.reduce_boolean_decision(is_spike, all=False):
            # The step of the batch before may be the cause, so that batch is bad, too.
            self.bad_batches.extend([batch_idx - 1, batch_idx])
            if fabric.global_rank == 0:
                self._write_bad_batches()
            raise TrainingSpikeException(batch_idx)
        # Either all ranks add their loss, or none.
        is_finite = math.isfinite(value)
        if fabric.strategy.reduce_boolean_decision(is_finite, all=True):
            self._losses.append(value)
            self.last_val = value

    def _is_spike(self, value: float) -> bool:
        """Return whether a loss is worse than the last one, and far from the mean of the window.

        "Far" is at least ``atol`` and at least ``rtol`` times the mean. None stands for no limit.
        """
        if self.finite_only and not math.isfinite(value):
            return True
        # Positive if the value is worse: larger under "min", smaller under "max".
        change = value - self.last_val
        if self.mode == "max":
            change = -change
        if change <= 0 or not self._losses:
            return False
        mean = sum(self._losses) / len(self._losses)
        difference = abs(value - mean)
        # "not >=", and not "<": comparisons with nan are false, so nan is within every tolerance.
        if self.atol is not None and not difference >= abs(self.atol):
            return False
        return self.rtol is None or difference >= abs(self.rtol * mean)

    def _write_bad_batches(self) -> None:
        path = Path(self.exclude_batches_path or ".")
        if path.suffix != ".json":
            path = path / "skip_batches.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.bad_batches, indent=4))

    # The keys of the state are Lightning's.

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_val": self.last_val,
            "mode": self.mode,
            "warmup": self.warmup,
            "atol": self.atol,
            "rtol": self.rtol,
            "bad_batches": list(self.bad_batches),
            "bad_batches_path": self.exclude_batches_path,
            "running": list(self._losses),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_val = state_dict["last_val"]
        self.mode = state_dict["mode"]
        self.warmup = state_dict["warmup"]
        self.atol = state_dict["atol"]
        self.rtol = state_dict["rtol"]
        self.bad_batches = list(state_dict["bad_batches"])
        self.exclude_batches_path = state_dict["bad_batches_path"]
        self._losses.clear()
        self._losses.extend(state_dict["running"])

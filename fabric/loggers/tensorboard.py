"""Metrics for TensorBoard."""

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fabric.errors import MissingDependencyError
from fabric.loggers.base import RunFolder, hyperparameters_as_json, metrics_as_floats, step_as_integer

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger:
    """Writes TensorBoard's event files into ``root_dir/name/version_k``, for ``tensorboard --logdir root_dir``.

    Needs the extra ``tensorboard``, which is imported at the first write. No file or folder is created before that.

    Args:
        root_dir: folder of all runs.
        name: of the experiment.
        version: ``k``, or a folder name; an existing run is continued. ``None`` takes the next free number.

    Raises:
        ConfigurationError: ``name`` or ``version`` would lead out of its folder.
    """

    def __init__(
        self, root_dir: str | os.PathLike[str] = "logs", name: str = "run", version: int | str | None = None
    ) -> None:
        self._folder = RunFolder(root_dir, name, version)
        self._open_writer: SummaryWriter | None = None

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a scalar per metric, and hand them to the file before returning.

        Args:
            metrics: names, and numbers or tensors of one element.
            step: an integer, or ``None``, which TensorBoard shows as step 0.

        Raises:
            ArgumentTypeError: a value or ``step`` is of another type; the text names the metric.
            MissingDependencyError: ``tensorboard`` is not installed.
        """
        values, number = metrics_as_floats(metrics), step_as_integer(step)
        writer = self._writer()
        for name, value in values.items():
            writer.add_scalar(name, value, number)
        writer.flush()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Add the parameters as a text, as JSON; they appear under TEXT.

        Raises:
            ArgumentTypeError: ``params`` is no mapping.
            MissingDependencyError: ``tensorboard`` is not installed.
        """
        # The HPARAMS page only takes flat numbers and strings; JSON indented by four is a code block in its Markdown.
        text = json.dumps(hyperparameters_as_json(params), indent=2)
        writer = self._writer()
        writer.add_text("hyperparameters", "\n".join(f"    {line}" for line in text.splitlines()))
        writer.flush()

    def close(self) -> None:
        """Close the event file; a later write opens another one in the same folder."""
        if self._open_writer is not None:
            self._open_writer.close()
            self._open_writer = None

    def _writer(self) -> "SummaryWriter":
        if self._open_writer is None:
            try:
                # An extra, and slow to import.
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise MissingDependencyError(
                    "write with TensorBoardLogger",
                    f"the package tensorboard cannot be imported: {error}",
                    "CSVLogger() needs no package",
                    'pip install "torch-fabric[tensorboard]"',
                ) from error
            self._open_writer = SummaryWriter(log_dir=str(self._folder.path()))
        return self._open_writer

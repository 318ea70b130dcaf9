"""What a logger has to offer, and what the loggers of this package share: where a run is kept, and what a metric is."""

import json
import numbers
import operator
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from fabric.errors import ArgumentTypeError, ConfigurationError

__all__ = ["Logger", "RunFolder", "hyperparameters_as_json", "metrics_as_floats", "step_as_integer"]

_VERSION = re.compile(r"version_(\d+)")


@runtime_checkable
class Logger(Protocol):
    """Where metrics go. Any object with these methods is one; fabric calls them on global rank 0 alone."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record the values of some metrics.

        Args:
            metrics: names and numbers.
            step: the step of training that they belong to, or ``None``.
        """
        ...

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record what the run was started with."""
        ...

    def close(self) -> None:
        """Finish writing. Called once, at the end; may be called again."""
        ...


class RunFolder:
    """The folder ``root_dir/name/version_k`` of one run, which comes into being when it is first asked for.

    Args:
        root_dir: folder of all runs.
        name: of the experiment.
        version: ``k``, or a folder name of the user's own; an existing one is continued. ``None`` takes the number
            after the highest present one, also when several processes look at the same time.

    Raises:
        ConfigurationError: ``name`` or ``version`` would lead out of its folder.
    """

    def __init__(self, root_dir: str | os.PathLike[str], name: str, version: int | str | None) -> None:
        for argument, value in (("name", name), ("version", version)):
            if isinstance(value, str) and (not value or Path(value).is_absolute() or ".." in Path(value).parts):
                raise ConfigurationError(
                    f"{argument}={value!r} of a logger",
                    "it leads out of the folder of runs",
                    "a name",
                    f"{argument}='run'",
                )
        self._parent = Path(root_dir) / name
        folder = f"version_{version}" if isinstance(version, int) else version
        self._path = None if folder is None else self._parent / folder

    def path(self) -> Path:
        """The folder; created by the first call."""
        if self._path is None:
            self._path = self._next_version()
        self._path.mkdir(parents=True, exist_ok=True)
        return self._path

    def _next_version(self) -> Path:
        self._parent.mkdir(parents=True, exist_ok=True)
        taken = (_VERSION.fullmatch(name) for name in os.listdir(self._parent))
        number = max((int(match[1]) for match in taken if match), default=-1) + 1
        while True:
            path = self._parent / f"version_{number}"
            with suppress(FileExistsError):  # another process was faster with this number
                path.mkdir()
                return path
            number += 1


def metrics_as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The values of ``metrics`` as Python floats.

    Args:
        metrics: names, and numbers or tensors of one element (on any device; reading one waits for it).

    Raises:
        ArgumentTypeError: a name is no string, or a value is no number; the text names the metric.
    """
    if not isinstance(metrics, Mapping):
        raise ArgumentTypeError(
            f"log metrics given as a {type(metrics).__name__}",
            "they have no names",
            "a dict of names and numbers",
            'fabric.log("loss", loss), or fabric.log_dict({"loss": loss})',
        )
    return {name: _as_float(name, value) for name, value in metrics.items()}


def step_as_integer(step: Any) -> int | None:
    """``step`` as a Python integer, or ``None``.

    Raises:
        ArgumentTypeError: it is neither.
    """
    if step is None:
        return None
    try:
        return operator.index(step)
    except TypeError:
        raise ArgumentTypeError(
            f"log metrics at step={step!r}",
            f"a {type(step).__name__} is no step",
            "an integer or None",
            "step=int(step)",
        ) from None


def hyperparameters_as_json(params: Any) -> dict[str, Any]:
    """What ``json`` can write of hyperparameters; values of other types become their ``str``.

    Args:
        params: a mapping, or an object whose attributes are the parameters, such as ``argparse.Namespace``.

    Raises:
        ArgumentTypeError: it has no names, or it contains itself.
    """
    try:
        items = dict(params if isinstance(params, Mapping) else vars(params))
        return json.loads(json.dumps(items, default=str, skipkeys=False))
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"log hyperparameters given as a {type(params).__name__}",
            str(error),
            "a dict of names and values, at any depth, or an argparse.Namespace",
            'log_hyperparams({"lr": 1e-3})',
        ) from error


def _as_float(name: Any, value: Any) -> float:
    if not isinstance(name, str) or not name:
        raise ArgumentTypeError(
            f"log a metric named {name!r}",
            "it has to have a name",
            "a string that is not empty",
            'fabric.log("loss", loss)',
        )
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach().item())
    found, number = type(value).__name__, "float(value)"
    if isinstance(value, torch.Tensor):
        found, number = f"tensor of shape {tuple(value.shape)}", "value.mean()"
    raise ArgumentTypeError(
        f"log the metric {name!r}",
        f"its value is a {found}",
        "a number, or a real tensor with one element",
        f"fabric.log({name!r}, {number})",
    )

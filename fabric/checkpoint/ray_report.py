"""Reports checkpoints to Ray Train, whose ``Result`` then names the newest one and its metrics."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fabric.environments import RayEnvironment
from fabric.errors import MissingDependencyError

__all__ = ["report_to_ray"]


def report_to_ray(path: Any, metrics: Mapping[str, float], is_first: bool) -> None:
    """Report a checkpoint that has been written, and its metrics, where a worker of Ray Train runs; else do nothing.

    Collective there. The checkpoint stays where it is: what Ray stores is a folder with a file ``checkpoint.json`` that
    has its path.

    Args:
        path: of the checkpoint.
        metrics: names and values.
        is_first: whether this is rank 0, whose metrics and file Ray keeps.

    Raises:
        MissingDependencyError: the variables of Ray are set, and it is not installed.
    """
    if RayEnvironment().detect(os.environ) is None:
        return
    # Optional, and slow to import; a worker has imported it.
    try:
        from ray import train  # pyright: ignore[reportMissingImports] - optional
    except ImportError as error:
        suggestion = 'pip install "torch-fabric[ray]", or unset RAY_JOB_ID'
        raise MissingDependencyError(
            "checkpoints.save in a worker of Ray Train", str(error), suggestion=suggestion
        ) from error
    if not is_first:
        train.report(dict(metrics))
        return
    with TemporaryDirectory() as folder:
        Path(folder, "checkpoint.json").write_text(json.dumps({"path": str(path)}))
        train.report(dict(metrics), checkpoint=train.Checkpoint.from_directory(folder))

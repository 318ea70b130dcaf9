"""Loggers of ``lightning.pytorch.loggers``, with those of experiment trackers."""

import os
import re
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn

from fabric_compat import loggers
from fabric_compat.loggers import Logger, rank_zero_experiment
from fabric_compat.missing import missing_class
from fabric_compat.plugins import set_default_rank
from fabric_compat.utilities import _add_prefix, _convert_params, _flatten_dict

_RUN = "the object that the tracker returns for its run, in Fabric(loggers=...)"
LitLogger: Any = missing_class("LitLogger", _RUN)
CometLogger: Any = missing_class("CometLogger", _RUN)


class CSVLogger(loggers.CSVLogger):
    """Lightning Fabric's ``CSVLogger``, whose folder is named ``save_dir``."""

    def __init__(self, save_dir: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(save_dir, *args, **kwargs)
        self.save_dir = os.fspath(save_dir)


class TensorBoardLogger(loggers.TensorBoardLogger):
    """Lightning Fabric's ``TensorBoardLogger``, whose folder is named ``save_dir``.

    ``log_graph`` has no effect without Lightning's Trainer.
    """

    def __init__(
        self,
        save_dir: Any,
        name: str | None = "lightning_logs",
        version: Any = None,
        log_graph: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(save_dir, name, version, **kwargs)
        self.save_dir = os.fspath(save_dir)


class WandbLogger(Logger):
    """A logger that writes to a run of W&B on rank 0. The first write starts the run.

    ``log_model``, ``checkpoint_name`` and ``add_file_policy`` have no effect without Lightning's
    Trainer. ``anonymous`` has no effect either.
    """

    LOGGER_JOIN_CHAR = "-"

    def __init__(
        self,
        name: str | None = None,
        save_dir: Any = ".",
        version: str | None = None,
        offline: bool = False,
        dir: Any = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: Any = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: str = "mutable",
        **init_options: Any,
    ) -> None:
        # Imported for its error: if W&B is not installed, the constructor fails, and not the first
        # write.
        import wandb  # pyright: ignore[reportMissingImports]

        set_default_rank()
        self.save_dir = os.fspath(dir or save_dir)
        self._project = project or os.environ.get("WANDB_PROJECT", "lightning_logs")
        self._prefix = prefix
        self._experiment = experiment
        self._init_options = {
            "name": name,
            "project": self._project,
            "dir": self.save_dir,
            "id": version or id,
            "resume": "allow",
            "mode": "offline" if offline else None,
            **init_options,
        }

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run of W&B. The first use starts the run."""
        if self._experiment is None:
            self._experiment = self._start_run()
        return self._experiment

    def _start_run(self) -> Any:
        """Return the run of this process, or a new run if there is none."""
        import wandb  # pyright: ignore[reportMissingImports]

        if wandb.run is not None:
            return wandb.run
        os.makedirs(self.save_dir, exist_ok=True)
        run = wandb.init(**self._init_options)
        # The x-axis of all metrics is the step that log_metrics() adds to them.
        run.define_metric("trainer/global_step")
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        return run

    @property
    def name(self) -> str:
        return self._project

    @property
    def version(self) -> Any:
        return self._experiment.id if self._experiment else self._init_options["id"]

    def watch(self, model: Any, log: Any = "gradients", log_freq: int = 100, **_: Any) -> None:
        self.experiment.watch(model, log=log, log_freq=log_freq)

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Write metrics, with the step as one more metric, which is the x-axis."""
        prefixed = dict(_add_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR))
        if step is not None:
            prefixed["trainer/global_step"] = step
        self.experiment.log(prefixed)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.experiment.config.update(_convert_params(params), allow_val_change=True)


class MLFlowLogger(Logger):
    """A logger that writes to a run of MLflow on rank 0. The first write starts the run.

    ``log_model`` and ``synchronous`` have no effect.
    """

    LOGGER_JOIN_CHAR = "-"

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: str | None = "./mlruns",
        log_model: Any = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        # Imported for its error: if MLflow is not installed, the constructor fails, and not the
        # first write.
        import mlflow  # pyright: ignore[reportMissingImports]

        set_default_rank()
        self._experiment_name = experiment_name
        self._tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not self._tracking_uri and save_dir:
            self._tracking_uri = Path(save_dir).absolute().as_uri()
        self._tags = dict(tags or {})
        if run_name is not None:
            self._tags["mlflow.runName"] = run_name
        self._prefix = prefix
        self._artifact_location = artifact_location
        self._run_id = run_id

    @cached_property
    def _client(self) -> Any:
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        return MlflowClient(self._tracking_uri)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The client of MLflow. The first use starts the run."""
        if self._run_id is None:
            run = self._client.create_run(self._find_experiment(), tags=self._tags)
            self._run_id = run.info.run_id
        return self._client

    def _find_experiment(self) -> str:
        """Return the ID of the experiment of this name, which is created if necessary."""
        experiment = self._client.get_experiment_by_name(self._experiment_name)
        if experiment is not None:
            return experiment.experiment_id
        return self._client.create_experiment(self._experiment_name, self._artifact_location)

    @property
    def run_id(self) -> str | None:
        """The ID of the run. None on ranks other than 0, unless the user has passed an ID."""
        _ = self.experiment  # starts the run on rank 0
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        """The ID of the experiment of the run. None if there is no ID of a run, see ``run_id``."""
        run_id = self.run_id
        if run_id is None:
            return None
        return self._client.get_run(run_id).info.experiment_id

    @property
    def name(self) -> str | None:
        return self.experiment_id

    @property
    def version(self) -> str | None:
        return self.run_id

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        timestamp = int(time.time() * 1000)  # in milliseconds
        for name, value in _add_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR).items():
            if isinstance(value, str):
                rank_zero_warn(f"MLflow logs no text as a metric: {name}={value!r}")
                continue
            # MLflow refuses other characters in the name of a metric.
            valid_name = re.sub("[^a-zA-Z0-9_/. -]+", "", name)
            client = self.experiment  # starts the run, and sets its ID
            client.log_metric(self._run_id, valid_name, float(value), timestamp, step or 0)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in _flatten_dict(_convert_params(params)).items():
            # MLflow refuses longer texts.
            self.experiment.log_param(self._run_id, name, str(value)[:250])

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """End the run, if it has started. ``status`` is Lightning's, such as ``"success"``."""
        if self._run_id is None:
            return
        mlflow_status = "FINISHED" if status in ("success", "finished") else "FAILED"
        self._client.set_terminated(self._run_id, mlflow_status)

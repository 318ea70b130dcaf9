"""Metrics reach the disk at once, in a form that other tools read."""

import argparse
import csv
import json
import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from fabric import Fabric
from fabric.errors import ConfigurationError, RankFailedError
from fabric.loggers import CSVLogger, Logger, TensorBoardLogger


def table(path: Path) -> list[dict[str, str]]:
    with open(path / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_nothing_is_created_before_the_first_write(tmp_path, kind):
    logger = kind(tmp_path / "logs")
    assert isinstance(logger, Logger)
    logger.close()
    assert os.listdir(tmp_path) == []


def test_rows_have_steps_and_every_digit(tmp_path):
    logger = CSVLogger(tmp_path, "mine", version=3)
    logger.log_metrics({"loss": 1 / 3, "acc": 1}, step=0)
    logger.log_metrics({"loss": math.nan, "acc": math.inf}, step=10)
    logger.log_metrics({"loss": 0.5})
    rows = table(tmp_path / "mine" / "version_3")
    assert [row["step"] for row in rows] == ["0", "10", ""]
    assert float(rows[0]["loss"]) == 1 / 3
    assert (rows[1]["loss"], rows[1]["acc"], rows[2]["acc"]) == ("nan", "inf", "")


def test_a_later_metric_gets_a_column(tmp_path):
    logger = CSVLogger(tmp_path, version="v")
    logger.log_metrics({"loss": 1.0}, 0)
    logger.log_metrics({"val, loss": 2.0, "loss": 0.5}, 1)
    rows = table(tmp_path / "run" / "v")
    assert list(rows[0]) == ["step", "loss", "val, loss"]
    assert [(row["loss"], row["val, loss"]) for row in rows] == [("1.0", ""), ("0.5", "2.0")]
    assert os.listdir(tmp_path / "run" / "v") == ["metrics.csv"]


def log_and_exit(fabric, folder):
    logger = CSVLogger(folder, version=0)
    for step in range(3):
        logger.log_metrics({"loss": float(step)}, step)
    os._exit(9)


def test_a_crash_loses_no_row(tmp_path, rank_pool):
    with pytest.raises(RankFailedError, match="exit code 9"):
        rank_pool(1).run(log_and_exit, tmp_path)
    assert [row["loss"] for row in table(tmp_path / "run" / "version_0")] == ["0.0", "1.0", "2.0"]


def test_an_existing_run_is_continued_after_a_torn_row(tmp_path):
    CSVLogger(tmp_path, version=0).log_metrics({"loss": 1.0, "acc": 0.5}, 0)
    with open(tmp_path / "run" / "version_0" / "metrics.csv", "a") as file:
        file.write("1,0.")
    CSVLogger(tmp_path, version=0).log_metrics({"acc": 0.75}, 1)
    assert [
        (row["step"], row["loss"], row["acc"]) for row in table(tmp_path / "run" / "version_0")
    ] == [
        ("0", "1.0", "0.5"),
        ("1", "", "0.75"),
    ]


def test_each_run_takes_the_next_free_version(tmp_path):
    (tmp_path / "run" / "version_7").mkdir(parents=True)
    loggers = [CSVLogger(tmp_path) for _ in range(2)]
    for logger in loggers:
        logger.log_metrics({"loss": 1.0})
    assert sorted(os.listdir(tmp_path / "run")) == ["version_7", "version_8", "version_9"]


@pytest.mark.parametrize(
    "value",
    [
        2,
        True,
        2.5,
        np.float32(0.5),
        np.int64(3),
        torch.tensor(2.5),
        torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True),
    ],
    ids=repr,
)
def test_numbers_and_tensors_of_one_element_are_metrics(tmp_path, value):
    logger = CSVLogger(tmp_path, version=0)
    logger.log_metrics({"x": value}, step=np.int64(4))
    row = table(tmp_path / "run" / "version_0")[0]
    assert (float(row["x"]), row["step"]) == (float(getattr(value, "detach", lambda: value)()), "4")


REFUSED = {
    "two elements": ({"x": torch.ones(2)}, None, r"tensor\(\[1., 1.\]\)"),
    "complex": ({"x": 1j}, None, "1j"),
    "text": ({"x": "0.5"}, None, "'x' of '0.5'"),
    "name is no string": ({1: 0.5}, None, "1"),
    "step is no integer": ({"x": 0.5}, 1.5, "float"),
    "reserved name": ({"step": 0.5}, None, "step"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_metrics_are_named_and_nothing_is_written(tmp_path, case):
    metrics, step, named = REFUSED[case]
    with pytest.raises((TypeError, ConfigurationError), match=named):
        CSVLogger(tmp_path).log_metrics(metrics, step)
    assert os.listdir(tmp_path) == []


def test_hyperparameters_are_json_and_add_up(tmp_path):
    logger = CSVLogger(tmp_path, version=0)
    logger.log_hyperparams(
        {"lr": 0.1, "model": {"layers": [1, 2]}, "path": Path("x"), "dtype": torch.float16}
    )
    logger.log_hyperparams(argparse.Namespace(seed=1))
    assert json.loads((tmp_path / "run" / "version_0" / "hparams.json").read_text()) == {
        "lr": 0.1,
        "model": {"layers": [1, 2]},
        "path": "x",
        "dtype": "torch.float16",
        "seed": 1,
    }


@pytest.mark.parametrize("params", [3, {(1, 2): 3}])
def test_hyperparameters_without_names_are_refused(tmp_path, params):
    with pytest.raises(TypeError):
        CSVLogger(tmp_path).log_hyperparams(params)


def test_tensorboard_reads_what_was_logged(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, version=0)
    logger.log_hyperparams({"lr": 0.1})
    for step in (1, 2):
        logger.log_metrics({"loss": torch.tensor(1.0 / step)}, step)
    events = EventAccumulator(str(tmp_path / "run" / "version_0")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 0.5)]
    assert (
        b'"lr": 0.1' in events.Tensors("hyperparameters/text_summary")[0].tensor_proto.string_val[0]
    )
    logger.close()
    logger.close()


def log_without_tensorboard(fabric, folder):
    sys.modules["tensorboard"] = None
    TensorBoardLogger(folder).log_metrics({"a": 1})


def test_a_missing_tensorboard_names_the_install_line(tmp_path, rank_pool):
    with pytest.raises(
        RankFailedError,
        match=r'MissingDependencyError[\s\S]*pip install "torch-fabric\[tensorboard\]"',
    ):
        rank_pool(1).run(log_without_tensorboard, tmp_path)
    assert os.listdir(tmp_path) == []


class LightningLike:
    """The methods that Lightning's loggers have, which know no ``close``."""

    def __init__(self) -> None:
        self.seen: list = []

    def log_metrics(self, metrics, step=None):
        self.seen.append((dict(metrics), step))

    def log_hyperparams(self, params):
        self.seen.append(params)

    def finalize(self, status):
        self.seen.append(status)


class MetricsOnly:
    def __init__(self) -> None:
        self.seen: list = []

    def log_metrics(self, metrics, step=None):
        self.seen.append((dict(metrics), step))

    def log_hyperparams(self, params):
        raise NotImplementedError


@pytest.mark.parametrize("fails", [False, True])
def test_a_logger_needs_log_metrics_and_hears_the_rest_where_it_can(fails):
    full = LightningLike()
    small = MetricsOnly()
    with (
        nullcontext() if not fails else pytest.raises(KeyError),
        Fabric(accelerator="cpu", loggers=full) as fabric,
    ):
        fabric.add_logger(small)
        assert fabric.loggers == [full, small]
        fabric.log_hyperparams({"lr": 0.1})
        fabric.log("loss", torch.tensor(0.5), step=3)
        if fails:
            raise KeyError
    assert full.seen == [{"lr": 0.1}, ({"loss": 0.5}, 3), "failed" if fails else "success"]
    assert small.seen == [({"loss": 0.5}, 3)]


def test_a_summary_writer_is_a_logger(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    with Fabric(accelerator="cpu", loggers=writer) as fabric:
        assert fabric.logger is writer
        fabric.log_hyperparams({"lr": 0.1})
        fabric.log("loss", 0.25, step=7)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(7, 0.25)]


class Run:
    """The part of a run of W&B that is used; the real one is tested where that package is."""

    __module__ = "wandb.sdk.wandb_run"

    def __init__(self):
        self.seen = []
        self.config = self

    def log(self, metrics, step=None):
        self.seen.append((metrics, step))

    def update(self, params, allow_val_change):
        self.seen.append((params, allow_val_change))

    def finish(self, exit_code):
        self.seen.append(exit_code)


def test_a_run_of_wandb_is_a_logger():
    run = Run()
    with Fabric(accelerator="cpu", loggers=[run]) as fabric:
        fabric.log_hyperparams(argparse.Namespace(lr=0.1))
        fabric.log("loss", 0.5, step=1)
    assert run.seen == [({"lr": 0.1}, True), ({"loss": 0.5}, 1), 0]


@pytest.mark.parametrize(
    "kind", [CSVLogger, type("SummaryWriter", (), {"add_scalar": lambda *_: None})]
)
def test_a_class_of_loggers_is_refused_at_once(kind):
    with pytest.raises(
        TypeError, match=rf"{kind.__name__}[\s\S]*it is a class\n  Valid: an object"
    ):
        Fabric(accelerator="cpu", loggers=kind)


def test_what_is_no_logger_is_refused_at_once():
    with pytest.raises(
        TypeError, match=r"no method log_metrics[\s\S]*def log_metrics\(self, metrics, step=None\)"
    ):
        Fabric(accelerator="cpu", loggers=[object()])
    with pytest.raises(TypeError, match=r"loggers='csv'[\s\S]*Write: CSVLogger\(\)"):
        Fabric(accelerator="cpu", loggers="csv")
    with Fabric(accelerator="cpu") as fabric, pytest.raises(TypeError, match="log_metrics"):
        fabric.add_logger(print)


def test_logging_without_a_logger_warns_once():
    with Fabric(accelerator="cpu") as fabric:
        with pytest.warns(UserWarning, match=r"Fabric\(loggers=CSVLogger\(\)\)") as caught:
            fabric.log_dict({"loss": 1.0})
        fabric.log("loss", 1.0)  # a second warning would be an error
    assert [Path(warning.filename).name for warning in caught] == ["test_loggers.py"]


def test_the_warning_of_no_logger_shows_the_line_that_calls_log():
    with (
        Fabric(accelerator="cpu") as fabric,
        pytest.warns(UserWarning, match=r"Fabric\(loggers=CSVLogger\(\)\)") as caught,
    ):
        fabric.log("loss", 1.0)
    assert [Path(warning.filename).name for warning in caught] == ["test_loggers.py"]

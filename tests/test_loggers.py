"""Metrics reach the disk at once, in a form that other tools read."""

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from fabric import Fabric
from fabric.errors import ConfigurationError, RankFailedError
from fabric.launchers import LAUNCHERS, LaunchSpec
from fabric.loggers import CSVLogger, KubeflowLogger, Logger, TensorBoardLogger


def read_rows(folder: Path) -> list[dict[str, str]]:
    """Return the rows of the table of metrics in the folder of a run."""
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def read_column(folder: Path, name: str) -> list[str]:
    return [row[name] for row in read_rows(folder)]


@pytest.mark.parametrize("logger_class", [CSVLogger, TensorBoardLogger])
def test_nothing_is_created_before_the_first_write(tmp_path, logger_class):
    logger = logger_class(tmp_path / "logs")
    assert isinstance(logger, Logger)
    logger.close()
    assert os.listdir(tmp_path) == []


def test_rows_have_steps_and_every_digit(tmp_path):
    logger = CSVLogger(tmp_path, "mine", version=3)
    logger.log_metrics({"loss": 1 / 3, "acc": 1}, step=0)
    logger.log_metrics({"loss": math.nan, "acc": math.inf}, step=10)
    logger.log_metrics({"loss": 0.5})
    first, second, third = read_rows(tmp_path / "mine" / "version_3")
    assert first["step"] == "0"
    assert float(first["loss"]) == 1 / 3
    assert second == {"step": "10", "loss": "nan", "acc": "inf"}
    assert third == {"step": "", "loss": "0.5", "acc": ""}


def test_a_later_metric_gets_a_column(tmp_path):
    logger = CSVLogger(tmp_path, version="v")
    logger.log_metrics({"loss": 1.0}, 0)
    logger.log_metrics({"val, loss": 2.0, "loss": 0.5}, 1)
    folder = tmp_path / "run" / "v"
    first, second = read_rows(folder)
    assert list(first) == ["step", "loss", "val, loss"]
    assert first == {"step": "0", "loss": "1.0", "val, loss": ""}
    assert second == {"step": "1", "loss": "0.5", "val, loss": "2.0"}
    assert os.listdir(folder) == ["metrics.csv"]


def log_and_exit(fabric, folder):
    logger = CSVLogger(folder, version=0)
    for step in range(3):
        logger.log_metrics({"loss": float(step)}, step)
    os._exit(9)


def test_a_crash_loses_no_row(tmp_path, rank_pool):
    with pytest.raises(RankFailedError, match="exit code 9"):
        rank_pool(1).run(log_and_exit, tmp_path)
    losses = read_column(tmp_path / "run" / "version_0", "loss")
    assert losses == ["0.0", "1.0", "2.0"]


def test_an_existing_run_is_continued_after_a_torn_row(tmp_path):
    folder = tmp_path / "run" / "version_0"
    first_logger = CSVLogger(tmp_path, version=0)
    first_logger.log_metrics({"loss": 1.0, "acc": 0.5}, 0)
    with open(folder / "metrics.csv", "a") as file:
        file.write("1,0.")
    second_logger = CSVLogger(tmp_path, version=0)
    second_logger.log_metrics({"acc": 0.75}, 1)
    assert read_rows(folder) == [
        {"step": "0", "loss": "1.0", "acc": "0.5"},
        {"step": "1", "loss": "", "acc": "0.75"},
    ]


def test_each_run_takes_the_next_free_version(tmp_path):
    (tmp_path / "run" / "version_7").mkdir(parents=True)
    first = CSVLogger(tmp_path)
    second = CSVLogger(tmp_path)
    first.log_metrics({"loss": 1.0})
    second.log_metrics({"loss": 1.0})
    versions = sorted(os.listdir(tmp_path / "run"))
    assert versions == ["version_7", "version_8", "version_9"]


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
    [row] = read_rows(tmp_path / "run" / "version_0")
    if isinstance(value, torch.Tensor):
        value = value.item()
    assert float(row["x"]) == float(value)
    assert row["step"] == "4"


@pytest.mark.parametrize(
    ("metrics", "step", "text"),
    [
        pytest.param({"x": torch.ones(2)}, None, r"tensor\(\[1., 1.\]\)", id="two elements"),
        pytest.param({"x": 1j}, None, "1j", id="complex"),
        pytest.param({"x": "0.5"}, None, "'x' of '0.5'", id="text"),
        pytest.param({1: 0.5}, None, "1", id="name is no string"),
        pytest.param({"x": 0.5}, 1.5, "float", id="step is no integer"),
        pytest.param({"step": 0.5}, None, "step", id="reserved name"),
    ],
)
def test_refused_metrics_are_named_and_nothing_is_written(tmp_path, metrics, step, text):
    logger = CSVLogger(tmp_path)
    with pytest.raises((TypeError, ConfigurationError), match=text):
        logger.log_metrics(metrics, step)
    assert os.listdir(tmp_path) == []


def test_hyperparameters_are_json_and_add_up(tmp_path):
    logger = CSVLogger(tmp_path, version=0)
    hyperparameters = {
        "lr": 0.1,
        "model": {"layers": [1, 2]},
        "path": Path("x"),
        "dtype": torch.float16,
    }
    logger.log_hyperparams(hyperparameters)
    logger.log_hyperparams(argparse.Namespace(seed=1))
    text = (tmp_path / "run" / "version_0" / "hparams.json").read_text()
    assert json.loads(text) == {
        "lr": 0.1,
        "model": {"layers": [1, 2]},
        "path": "x",
        "dtype": "torch.float16",
        "seed": 1,
    }


@pytest.mark.parametrize("params", [3, {(1, 2): 3}])
def test_hyperparameters_without_names_are_refused(tmp_path, params):
    logger = CSVLogger(tmp_path)
    with pytest.raises(TypeError):
        logger.log_hyperparams(params)


def read_events(folder):
    """Return TensorBoard's own reader of the events in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_reads_what_was_logged(tmp_path):
    logger = TensorBoardLogger(tmp_path, version=0)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"loss": torch.tensor(1.0)}, 1)
    logger.log_metrics({"loss": torch.tensor(0.5)}, 2)
    events = read_events(tmp_path / "run" / "version_0")
    first, second = events.Scalars("loss")
    assert first.step == 1
    assert first.value == 1.0
    assert second.step == 2
    assert second.value == 0.5
    summary = events.Tensors("hyperparameters/text_summary")[0]
    assert b'"lr": 0.1' in summary.tensor_proto.string_val[0]
    logger.close()
    logger.close()


def log_without_tensorboard(fabric, folder):
    sys.modules["tensorboard"] = None
    TensorBoardLogger(folder).log_metrics({"a": 1})


def test_a_missing_tensorboard_names_the_install_line(tmp_path, rank_pool):
    problem = r'MissingDependencyError[\s\S]*pip install "torch-fabric\[tensorboard\]"'
    with pytest.raises(RankFailedError, match=problem):
        rank_pool(1).run(log_without_tensorboard, tmp_path)
    assert os.listdir(tmp_path) == []


class LightningLikeLogger:
    """A logger with the methods of Lightning's loggers, which have no ``close``."""

    def __init__(self) -> None:
        self.calls: list = []

    def log_metrics(self, metrics, step=None):
        self.calls.append((dict(metrics), step))

    def log_hyperparams(self, params):
        self.calls.append(params)

    def finalize(self, status):
        self.calls.append(status)


class LoggerOfMetrics:
    """A logger that refuses hyperparameters, and has no ``finalize``."""

    def __init__(self) -> None:
        self.calls: list = []

    def log_metrics(self, metrics, step=None):
        self.calls.append((dict(metrics), step))

    def log_hyperparams(self, params):
        raise NotImplementedError


def log_in_block(loggers, *, fails):
    """Log with two loggers in a block of a fabric, which may raise a ``KeyError`` at its end."""
    first, second = loggers
    with Fabric(accelerator="cpu", loggers=first) as fabric:
        fabric.add_logger(second)
        assert fabric.loggers == loggers
        fabric.log_hyperparams({"lr": 0.1})
        fabric.log("loss", torch.tensor(0.5), step=3)
        if fails:
            raise KeyError


def test_a_logger_needs_only_log_metrics_and_hears_the_end_if_it_has_finalize():
    full = LightningLikeLogger()
    small = LoggerOfMetrics()
    log_in_block([full, small], fails=False)
    assert full.calls == [{"lr": 0.1}, ({"loss": 0.5}, 3), "success"]
    assert small.calls == [({"loss": 0.5}, 3)]


def test_a_logger_hears_that_the_block_failed():
    full = LightningLikeLogger()
    small = LoggerOfMetrics()
    with pytest.raises(KeyError):
        log_in_block([full, small], fails=True)
    assert full.calls == [{"lr": 0.1}, ({"loss": 0.5}, 3), "failed"]
    assert small.calls == [({"loss": 0.5}, 3)]


class StatusFile:
    """A logger that writes the status of the run to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log_metrics(self, metrics, step=None):
        pass

    def finalize(self, status):
        self.path.write_text(status)


def be_interrupted(path: Path) -> None:
    """Stop as after a Ctrl-C, without a ``with`` block."""
    fabric = Fabric(accelerator="cpu", devices=2, loggers=StatusFile(path))
    fabric.launch()
    raise KeyboardInterrupt


def test_a_logger_hears_that_the_run_was_interrupted(tmp_path):
    path = tmp_path / "status"
    with pytest.raises(RankFailedError):
        LAUNCHERS["forkserver"].launch(be_interrupted, (path,), {}, LaunchSpec(num_processes=2))
    assert path.read_text() == "failed"


def test_the_error_of_an_earlier_cell_is_no_failure_of_the_run(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(sys, "last_value", ValueError("of an earlier cell"), raising=False)
    full = LightningLikeLogger()
    log_in_block([full, LoggerOfMetrics()], fails=False)
    assert full.calls[-1] == "success"


def test_a_summary_writer_is_a_logger(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    with Fabric(accelerator="cpu", loggers=writer) as fabric:
        assert fabric.logger is writer
        fabric.log_hyperparams({"lr": 0.1})
        fabric.log("loss", 0.25, step=7)
    events = read_events(tmp_path)
    [event] = events.Scalars("loss")
    assert event.step == 7
    assert event.value == 0.25


class FakeWandbRun:
    """The methods of a run of W&B that fabric calls.

    A real run is tested only where the package is installed.
    """

    __module__ = "wandb.sdk.wandb_run"

    def __init__(self):
        self.calls = []
        self.config = self

    def log(self, metrics, step=None):
        self.calls.append((metrics, step))

    def update(self, params, allow_val_change):
        self.calls.append((params, allow_val_change))

    def finish(self, exit_code):
        self.calls.append(exit_code)


def test_a_run_of_wandb_is_a_logger():
    run = FakeWandbRun()
    with Fabric(accelerator="cpu", loggers=[run]) as fabric:
        fabric.log_hyperparams(argparse.Namespace(lr=0.1))
        fabric.log("loss", 0.5, step=1)
    assert run.calls == [({"lr": 0.1}, True), ({"loss": 0.5}, 1), 0]


LOGGERS_AT_EXIT = """
import atexit
from fabric import Fabric

class Run:
    # A run whose package ends it when the program exits, as that of W&B does.
    def __init__(self):
        self.has_ended = False
        atexit.register(self.end)

    def end(self):
        self.has_ended = True

    def log_metrics(self, metrics, step=None):
        print(metrics)

    def finalize(self, status):
        print(status, "after its end" if self.has_ended else "before its end")

class Failing:
    def log_metrics(self, metrics, step=None):
        pass

    def finalize(self, status):
        raise ConnectionError("the server is gone")

fabric = Fabric(accelerator="cpu", environment="none")
fabric.launch()
fabric.add_logger(Run())
fabric.add_logger(Failing())
fabric.log("loss", 0.5)
"""


@pytest.mark.parametrize(
    ("last_line", "status"),
    [
        ("1 / 0", "failed"),
        pytest.param("", "success", marks=[pytest.mark.slow, pytest.mark.soak]),
    ],
)
def test_loggers_are_closed_at_exit_before_their_packages_and_decide_no_exit_code(
    last_line: str, status: str
) -> None:
    script = f"{LOGGERS_AT_EXIT}{last_line}"
    process = subprocess.run(
        [sys.executable, "-c", script], text=True, capture_output=True, timeout=150, check=False
    )
    assert process.returncode == (status == "failed")
    assert process.stdout.splitlines() == ["{'loss': 0.5}", f"{status} before its end"]
    assert "a logger has failed at the end of the program" in process.stderr
    assert "ConnectionError: the server is gone" in process.stderr


class SummaryWriterLike:
    """A class with the method by which fabric recognizes a ``SummaryWriter``."""

    def add_scalar(self, *arguments):
        """Do nothing."""


@pytest.mark.parametrize("logger_class", [CSVLogger, SummaryWriterLike])
def test_a_class_of_loggers_is_refused_at_once(logger_class):
    problem = rf"{logger_class.__name__}[\s\S]*it is a class\n  Valid: an object"
    with pytest.raises(TypeError, match=problem):
        Fabric(accelerator="cpu", loggers=logger_class)


def test_an_object_that_is_no_logger_is_refused_at_once():
    problem = r"no method log_metrics[\s\S]*def log_metrics\(self, metrics, step=None\)"
    with pytest.raises(TypeError, match=problem):
        Fabric(accelerator="cpu", loggers=[object()])
    with pytest.raises(TypeError, match=r"loggers='csv'[\s\S]*Write: CSVLogger\(\)"):
        Fabric(accelerator="cpu", loggers="csv")
    with Fabric(accelerator="cpu") as fabric, pytest.raises(TypeError, match="log_metrics"):
        fabric.add_logger(print)


def test_logging_without_a_logger_warns_once():
    with Fabric(accelerator="cpu") as fabric:
        with pytest.warns(UserWarning, match=r"Fabric\(loggers=CSVLogger\(\)\)") as caught:
            fabric.log_dict({"loss": 1.0})
        # A second warning would be an error.
        fabric.log("loss", 1.0)
    [warning] = caught
    assert Path(warning.filename).name == "test_loggers.py"


def test_the_warning_of_no_logger_shows_the_line_that_calls_log():
    with (
        Fabric(accelerator="cpu") as fabric,
        pytest.warns(UserWarning, match=r"Fabric\(loggers=CSVLogger\(\)\)") as caught,
    ):
        fabric.log("loss", 1.0)
    [warning] = caught
    assert Path(warning.filename).name == "test_loggers.py"


class RecordingServer(HTTPServer):
    """A stand-in for Kubeflow's controller, which records the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RecordingHandler)
        self.tokens: list[str] = []
        self.statuses: list[dict] = []


class RecordingHandler(BaseHTTPRequestHandler):
    server: RecordingServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.append(self.headers["Authorization"])
        self.server.statuses.append(json.loads(body)["trainerStatus"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def trainjob(tmp_path, monkeypatch):
    """Pretend that this process is a node of a TrainJob, and return the server of its status."""
    token = tmp_path / "token"
    token.write_text("secret\n")
    with RecordingServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", url)
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(token))
        yield server
        server.shutdown()
        thread.join()


def test_a_trainjob_shows_progress_and_the_latest_metrics(trainjob):
    logger = KubeflowLogger(total_steps=8)
    logger.log_metrics({"loss": 0.5}, step=2)
    logger.log_metrics({"accuracy": 1.0}, step=4)  # too early for another request
    logger.finalize("failed")
    # As a script may do after the end of its Fabric, too early for a third request.
    logger.log_metrics({"loss": 0.25}, step=5)
    assert trainjob.tokens == ["Bearer secret"] * 2
    first, last = trainjob.statuses
    assert first["progressPercentage"] == 25
    assert "estimatedRemainingSeconds" not in first
    assert last["progressPercentage"] == 50
    assert last["estimatedRemainingSeconds"] >= 0
    values = {metric["name"]: metric["value"] for metric in last["metrics"]}
    assert values == {"loss": "0.5", "accuracy": "1.0"}


def test_a_finished_trainjob_is_at_100_percent(trainjob):
    with Fabric(accelerator="cpu", loggers=KubeflowLogger(total_steps=1000)) as fabric:
        fabric.log("loss", 1.0, step=5)
    assert [status["progressPercentage"] for status in trainjob.statuses] == [0, 100]


def test_a_trainjob_without_its_server_goes_on_with_one_warning(trainjob, monkeypatch):
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", "missing")
    logger = KubeflowLogger(total_steps=8)
    with pytest.warns(UserWarning, match="could not report the progress"):
        logger.finalize("success")
    # A second warning would be an error.
    logger.finalize("success")
    assert trainjob.statuses == []


def test_a_kubeflow_logger_does_nothing_elsewhere():
    logger = KubeflowLogger(total_steps=8)
    logger.log_metrics({"loss": 0.5}, step=2)
    logger.finalize("success")
    with pytest.raises(ConfigurationError, match="one step at least"):
        KubeflowLogger(total_steps=0)

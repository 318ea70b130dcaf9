"""Loggers of Lightning, W&B, MLflow and TensorBoard, whose files are read by their packages."""

import csv
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines

JOB = Path(__file__).with_name("logging_job.py")
JOB_AT_EXIT = Path(__file__).with_name("logging_at_exit_job.py")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "finetune.md"
SECONDS = 400
# The steps with their losses: the mean over two ranks of 1 / (1 + step + rank).
LOSSES = [
    (0, pytest.approx((1 / 1 + 1 / 2) / 2, rel=1e-6)),
    (1, pytest.approx((1 / 2 + 1 / 3) / 2, rel=1e-6)),
    (2, pytest.approx((1 / 3 + 1 / 4) / 2, rel=1e-6)),
]
ACCURACIES = [(0, 0.0), (1, 1.0), (2, 2.0)]
# Sizes in a file of W&B, in bytes.
HEADER = 7
BLOCK = 2**15
# The kinds of fragments that end a message: a full message, and its last fragment.
LAST_FRAGMENTS = (1, 4)

# Nothing is sent anywhere, and what MLflow calls a file store is allowed.
VARIABLES = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    # W&B makes folders in the temporary directory when it is imported.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def run(folder: Path, *arguments: str, job: Path = JOB) -> subprocess.CompletedProcess[str]:
    temporary = folder / "tmp"
    temporary.mkdir()
    folders = {"HOME": str(folder), "TMPDIR": str(temporary)}
    return subprocess.run(
        [sys.executable, job, folder, *arguments],
        env=os.environ | VARIABLES | folders | {"OMP_NUM_THREADS": "1"},
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a job that ends well, and return the folder to which it logs."""
    folder = tmp_path_factory.mktemp("logged")
    process = run(folder)
    assert process.returncode == 0, process.stderr
    return folder


def read_table(path: Path, name: str) -> list[tuple[int, float]]:
    """Return the steps and the values of a column."""
    values = []
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            values.append((int(row["step"]), float(row[name])))
    return values


def read_events(path: Path, name: str) -> list[tuple[int, float]]:
    """Return the steps and the values of a scalar of TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(path)).Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


class WandbRun:
    """The only run in a folder, which W&B wrote offline."""

    def __init__(self, folder: Path) -> None:
        [path] = folder.glob("wandb/offline-run-*/run-*.wandb")
        self.rows: list[dict[str, Any]] = []
        self.config: dict[str, str] = {}
        self.exit_codes: list[int] = []
        for record in read_wandb_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                self._add_row(record.history.item)
            if kind == "exit":
                self.exit_codes.append(record.exit.exit_code)
            for item in (*record.config.update, *record.run.config.update):
                self.config[item.key] = item.value_json

    def _add_row(self, items: Iterable[Any]) -> None:
        row = {}
        for item in items:
            name = item.key or item.nested_key[0]
            row[name] = json.loads(item.value_json)
        self.rows.append(row)


def read_wandb_records(path: Path) -> list[Any]:
    """Return the records of a file of W&B.

    The records are messages in blocks, as LevelDB writes its log. A fragment of a message has a
    header, and does not cross the end of a block.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    records = []
    message = b""
    offset = HEADER
    while offset + HEADER <= len(content):
        left_in_block = BLOCK - offset % BLOCK
        if left_in_block < HEADER:
            offset += left_in_block
            continue
        length, kind = struct.unpack_from("<HB", content, offset + 4)
        start = offset + HEADER
        offset = start + length
        message += content[start:offset]
        if kind in LAST_FRAGMENTS:
            records.append(Record.FromString(message))
            message = b""
    return records


def mlflow_client(folder: Path) -> Any:
    import mlflow

    return mlflow.MlflowClient((folder / "mlruns").as_uri())


def only_run(client: Any, experiment_name: str) -> Any:
    """Return the only run of an experiment."""
    experiment = client.get_experiment_by_name(experiment_name)
    assert experiment is not None
    [mlflow_run] = client.search_runs([experiment.experiment_id])
    return mlflow_run


@pytest.mark.parametrize("path", ["csv/run/version_0", "lightning/lightning_logs/version_0"])
def test_a_table_of_csv_has_the_metrics(folder: Path, path: str) -> None:
    table = folder / path / "metrics.csv"
    assert read_table(table, "loss") == LOSSES
    assert read_table(table, "accuracy") == ACCURACIES


@pytest.mark.parametrize(
    "path", ["tensorboard/run/version_0", "lightning/tensorboard/version_0", "writer"]
)
def test_events_of_tensorboard_have_the_metrics(folder: Path, path: str) -> None:
    assert read_events(folder / path, "loss") == LOSSES
    assert read_events(folder / path, "accuracy") == ACCURACIES


@pytest.mark.parametrize(
    ("path", "step_name"), [(".", "_step"), ("lightning", "trainer/global_step")]
)
def test_a_run_of_wandb_has_metrics_and_hyperparameters(
    folder: Path, path: str, step_name: str
) -> None:
    wandb_run = WandbRun(folder / path)
    assert [(row[step_name], row["loss"]) for row in wandb_run.rows] == LOSSES
    assert [(row[step_name], row["accuracy"]) for row in wandb_run.rows] == ACCURACIES
    assert wandb_run.config["lr"] == "0.5"
    assert wandb_run.exit_codes == [0]


@pytest.mark.parametrize("experiment", ["lightning", "client"])
@pytest.mark.parametrize(("name", "expected"), [("loss", LOSSES), ("accuracy", ACCURACIES)])
def test_a_run_of_mlflow_has_the_metrics(
    folder: Path, experiment: str, name: str, expected: list[Any]
) -> None:
    client = mlflow_client(folder)
    mlflow_run = only_run(client, experiment)
    history = client.get_metric_history(mlflow_run.info.run_id, name)
    assert [(metric.step, metric.value) for metric in history] == expected


def test_a_run_of_the_mlflow_logger_has_hyperparameters_and_is_finished(folder: Path) -> None:
    mlflow_run = only_run(mlflow_client(folder), "lightning")
    assert mlflow_run.data.params == {"lr": "0.5"}
    assert mlflow_run.info.status == "FINISHED"


def test_a_run_that_fails_is_marked_as_failed(tmp_path: Path) -> None:
    process = run(tmp_path, "fails")
    assert process.returncode == 1
    assert "ArithmeticError: on every rank" in process.stderr
    mlflow_run = only_run(mlflow_client(tmp_path), "lightning")
    assert mlflow_run.info.status == "FAILED"
    assert WandbRun(tmp_path).exit_codes == [1]
    assert read_table(tmp_path / "csv/run/version_0/metrics.csv", "loss") == LOSSES


@pytest.mark.parametrize(
    ("arguments", "exit_code", "status"), [([], 0, "FINISHED"), (["fails"], 1, "FAILED")]
)
def test_runs_that_are_made_after_the_launch_end_with_the_program(
    tmp_path: Path, arguments: list[str], exit_code: int, status: str
) -> None:
    process = run(tmp_path, *arguments, job=JOB_AT_EXIT)
    assert process.returncode == exit_code, process.stderr
    assert "ConnectionError: the server is gone" in process.stderr
    wandb_run = WandbRun(tmp_path)
    assert [(row["_step"], row["loss"]) for row in wandb_run.rows] == LOSSES
    assert wandb_run.config["lr"] == "0.5"
    assert wandb_run.exit_codes == [exit_code]
    mlflow_run = only_run(mlflow_client(tmp_path), "page")
    assert mlflow_run.data.params == {"lr": "0.5"}
    assert mlflow_run.info.status == status


def test_the_script_about_fine_tuning_logs_to_wandb(tmp_path: Path) -> None:
    scripts = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    job = tmp_path / "finetune.py"
    job.write_text(scripts[0].replace("EPOCHS = 3", "EPOCHS = 1"))
    options = ["--accelerator", "cpu", "--devices", "2", "--wandb", "offline"]
    environment = os.environ | VARIABLES | {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, job, *options],
        env=environment,
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    wandb_run = WandbRun(tmp_path / "runs" / "bert")
    assert [row["_step"] for row in wandb_run.rows] == list(range(10, 101, 10))
    first_row, *_, last_row = wandb_run.rows
    assert last_row["loss"] < first_row["loss"] / 2
    assert last_row["accuracy"] > 0.8
    assert wandb_run.exit_codes == [0]

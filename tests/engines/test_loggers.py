"""The loggers that people have: Lightning's, a run of W&B, MLflow, a SummaryWriter, each read by its own package."""

import csv
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engines

JOB = Path(__file__).with_name("logging_job.py")
SECONDS = 120
# Of the steps 0, 1, 2: the mean over two ranks of 1 / (1 + step + rank), and the step.
LOSSES = [
    (step, pytest.approx((1 / (1 + step) + 1 / (2 + step)) / 2, rel=1e-6)) for step in range(3)
]
# bytes of a file of W&B; the parts with which a message ends
HEADER = 7
BLOCK = 2**15
ENDS = (1, 4)
ACCURACIES = [(step, float(step)) for step in range(3)]


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
    for name, value in (VARIABLES | {"HOME": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        tempfile, "tempdir", str(tmp_path)
    )  # W&B makes folders there when it is imported


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "tmp").mkdir()
    variables = (
        os.environ
        | VARIABLES
        | {"HOME": str(folder), "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
    )
    command = [sys.executable, JOB, folder, *arguments]
    return subprocess.run(
        command, env=variables, cwd=folder, text=True, capture_output=True, timeout=SECONDS
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job has logged that ended well."""
    found = tmp_path_factory.mktemp("logged")
    done = run(found)
    assert done.returncode == 0, done.stderr
    return found


def table(path: Path) -> dict[str, list[tuple[int, float]]]:
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        name: [(int(row["step"]), float(row[name])) for row in rows]
        for name in ("loss", "accuracy")
    }


def events(path: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(path)).Reload()


def of_wandb(path: Path) -> list[Any]:
    """The records of the one run in a folder: messages of the package in blocks, as LevelDB writes its log."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = path.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    records = []
    message = b""
    at = HEADER
    while at + HEADER <= len(content):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        message += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in ENDS:
            records.append(Record.FromString(message))
            message = b""
    return records


def of_mlflow(folder: Path, experiment: str) -> tuple[Any, Any]:
    """A client, and the one run of an experiment."""
    import mlflow

    client = mlflow.MlflowClient((folder / "mlruns").as_uri())
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    (one,) = client.search_runs([found.experiment_id])
    return client, one


@pytest.mark.parametrize("path", ["csv/run/version_0", "lightning/lightning_logs/version_0"])
def test_a_table_in_a_text_file(folder: Path, path: str) -> None:
    assert table(folder / path / "metrics.csv") == {"loss": LOSSES, "accuracy": ACCURACIES}


@pytest.mark.parametrize(
    "path", ["tensorboard/run/version_0", "lightning/tensorboard/version_0", "writer"]
)
def test_tensorboard(folder: Path, path: str) -> None:
    actual = events(folder / path)
    assert [(event.step, event.value) for event in actual.Scalars("loss")] == LOSSES
    assert [(event.step, event.value) for event in actual.Scalars("accuracy")] == ACCURACIES


@pytest.mark.parametrize("path", [".", "lightning"])
def test_a_run_of_wandb(folder: Path, path: str) -> None:
    records = of_wandb(folder / path)
    rows = [
        {
            item.key or item.nested_key[0]: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    steps = "trainer/global_step" if path == "lightning" else "_step"
    assert [(row[steps], row["loss"]) for row in rows] == LOSSES
    assert [(row[steps], row["accuracy"]) for row in rows] == ACCURACIES
    config = [
        item for record in records for item in (*record.config.update, *record.run.config.update)
    ]
    assert ("lr", "0.5") in [(item.key, item.value_json) for item in config]
    assert [
        record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"
    ] == [0]


@pytest.mark.parametrize("experiment", ["lightning", "own"])
def test_mlflow(folder: Path, experiment: str) -> None:
    client, one = of_mlflow(folder, experiment)
    for name, expected in (("loss", LOSSES), ("accuracy", ACCURACIES)):
        history = client.get_metric_history(one.info.run_id, name)
        assert [(metric.step, metric.value) for metric in history] == expected
    if experiment == "lightning":
        assert (one.data.params, one.info.status) == ({"lr": "0.5"}, "FINISHED")


def test_a_run_that_fails_is_marked_so(tmp_path: Path) -> None:
    done = run(tmp_path, "fails")
    assert done.returncode == 1
    assert "ArithmeticError: on every rank" in done.stderr
    assert of_mlflow(tmp_path, "lightning")[1].info.status == "FAILED"
    (code,) = [
        record.exit.exit_code
        for record in of_wandb(tmp_path)
        if record.WhichOneof("record_type") == "exit"
    ]
    assert code == 1
    assert table(tmp_path / "csv/run/version_0/metrics.csv")["loss"] == LOSSES

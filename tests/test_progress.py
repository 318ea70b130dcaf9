"""The progress line of a loop on the first process, and the pictures of logged metrics."""

import io
import os
import pty
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.cli import main
from fabric.errors import ConfigurationError, MissingDependencyError
from fabric.loggers import CSVLogger
from fabric.tools.plotting import plot
from tests.ranks import run_in_ranks


def iterate_with_progress(fabric: Fabric) -> tuple[str, list[int]]:
    """Return the text on the standard error of an epoch, and the samples of this rank."""
    plain_loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=2)
    loader = fabric.setup_dataloaders(plain_loader)
    metrics = {}
    samples = []
    with redirect_stderr(io.StringIO()) as stderr:
        for [batch] in fabric.progress(loader, desc="epoch 1", metrics=metrics):
            metrics["loss"] = torch.tensor(0.5)
            samples += batch.tolist()
    return stderr.getvalue(), samples


def test_one_line_in_a_pipe_on_the_first_process_counts_the_samples_of_all() -> None:
    on_first_rank, on_second_rank = run_in_ranks(iterate_with_progress)
    text, samples_of_first_rank = on_first_rank
    assert re.fullmatch(
        r"epoch 1  3/3 100%  loss 0\.5  [\d.,e+]+ samples/s  0:00  \d+\.\d\d GiB\n", text
    )
    text, samples_of_second_rank = on_second_rank
    assert text == ""
    assert sorted(samples_of_first_rank + samples_of_second_rank) == list(range(12))


def test_an_iterator_without_length_or_tensors_counts_batches(capsys) -> None:
    with Fabric(accelerator="cpu") as fabric:
        batches = list(fabric.progress(iter("abc")))
    assert batches == ["a", "b", "c"]
    text = capsys.readouterr().err
    assert re.match(r"3  [\d.,e+]+ batches/s  0:00  ", text)


def test_a_second_pass_shows_another_line(capsys) -> None:
    batch = {"x": torch.ones(4, 2)}
    with Fabric(accelerator="cpu") as fabric:
        batches = fabric.progress([batch], metrics=lambda: {"a": 1, "b": 2e-5})
        first_pass = list(batches)
        second_pass = list(batches)
    assert len(first_pass) == 1
    assert len(second_pass) == 1
    first_line, second_line = capsys.readouterr().err.splitlines()
    line = r"1/1 100%  a 1  b 2e-05  [^ ]+ samples/s.*"
    assert re.fullmatch(line, first_line)
    assert re.fullmatch(line, second_line)


def resume_with_progress(fabric: Fabric, accumulates: bool) -> str:
    """Return the text of an epoch that is resumed after one batch, and left at the third."""
    dataset = TensorDataset(torch.arange(20))
    interrupted, resumed = fabric.setup_dataloaders(
        DataLoader(dataset, batch_size=2),
        DataLoader(dataset, batch_size=1),
    )
    next(iter(interrupted))
    position = interrupted.state_dict()
    resumed.load_state_dict(position)
    batches = resumed
    if accumulates:
        batches = fabric.accumulate(resumed, 4)
    with redirect_stderr(io.StringIO()) as stderr:
        for index, _ in enumerate(fabric.progress(batches)):
            if index == 2:
                break
    return stderr.getvalue()


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_resumed_epoch_is_counted_from_the_loaded_position(accumulates: bool) -> None:
    text, _ = run_in_ranks(resume_with_progress, accumulates)
    assert re.match(r"4/10 40%  [\d.,e+]+ samples/s  0:00 left", text)


def test_the_line_is_ended_when_a_loop_is_left(capsys) -> None:
    with Fabric(accelerator="cpu") as fabric:
        for number in fabric.progress(range(5), desc="half"):
            if number == 2:
                break
    text = capsys.readouterr().err
    assert re.match(r"half  2/5 40%  .* batches/s  0:00 left  .*GiB\n$", text)


def test_a_metric_that_is_no_number_is_named(capsys) -> None:
    with Fabric(accelerator="cpu") as fabric:
        batches = fabric.progress(range(1), metrics={"loss": "high"})
        with pytest.raises(TypeError, match="metric 'loss' of 'high'"):
            list(batches)


SCRIPT = """
from time import sleep
from fabric import Fabric
fabric = Fabric(accelerator="cpu")
desc = "a line that does not fit into a narrow terminal"
for i in fabric.progress(range(8), desc=desc, metrics=lambda: {"i": i}):
    sleep(0.1)
"""


def read_to_end(file: int) -> bytes:
    """Read from a terminal until its other end is closed."""
    text = b""
    while True:
        try:
            chunk = os.read(file, 4096)
        except OSError:
            # Linux answers so once the other end is closed.
            chunk = b""
        if not chunk:
            return text
        text += chunk


def test_a_terminal_has_one_line_that_is_written_over(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    reader, terminal = pty.openpty()
    environment = {**os.environ, "COLUMNS": "60"}
    with subprocess.Popen([sys.executable, script], stderr=terminal, env=environment):
        os.close(terminal)
        text = read_to_end(reader)
    os.close(reader)
    lines = text.decode().split("\r")
    assert len(lines) > 3
    for line in lines[:-2]:
        assert len(line) <= 59
    assert text.count(b"\n") == 1


def print_on_all_ranks(fabric: Fabric) -> str:
    with redirect_stdout(io.StringIO()) as stdout:
        fabric.print("rank", fabric.global_rank, "\nx", sep="=", all_ranks=True)
    return stdout.getvalue()


def test_the_texts_of_all_ranks_come_in_order_with_a_prefix() -> None:
    expected = "[rank 0] rank=0=\n[rank 0] x\n[rank 1] rank=1=\n[rank 1] x\n"
    results = run_in_ranks(print_on_all_ranks)
    assert results == [expected, ""]


def test_the_representation_says_what_was_resolved() -> None:
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
    assert repr(fabric) == fabric.describe()
    assert "bf16-mixed" in repr(fabric)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run with four rows, and a fifth that was not written to its end."""
    logger = CSVLogger(tmp_path, "a", version=0)
    for step in range(3):
        loss = 1.0 / (step + 1)
        logger.log_metrics({"train/loss": loss, "lr": 0.1}, step)
    logger.log_metrics({"val/loss": 0.5})
    folder = tmp_path / "a"
    with open(folder / "version_0" / "metrics.csv", "a") as file:
        file.write("4,0.")
    return folder


def test_a_run_is_drawn_with_a_panel_for_each_metric(run: Path, tmp_path: Path, capsys) -> None:
    figure = plot(run)
    loss, learning_rate = figure.axes
    assert loss.get_title() == "loss"
    assert learning_rate.get_title() == "lr"
    training, validation = loss.lines
    assert training.get_label() == "train/loss"
    assert validation.get_label() == "val/loss"
    assert training.get_xydata().tolist() == [[0, 1], [1, 0.5], [2, 1 / 3], [4, 0]]


def test_the_command_writes_a_picture(run: Path, tmp_path: Path, capsys) -> None:
    picture = tmp_path / "picture.png"
    assert main(["plot", str(run), "-o", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "picture.png" in capsys.readouterr().err


def test_several_runs_are_lines_of_one_panel(run: Path, tmp_path: Path) -> None:
    second_run = tmp_path / "b"
    logger = CSVLogger(tmp_path, "b", version=0)
    logger.log_metrics({"train/loss": 2.0}, 0)
    panel = plot(run, second_run).axes[0]
    runs = []
    for line in panel.lines:
        path, _, _ = line.get_label().partition(":")
        runs.append(Path(path).parent.name)
    assert runs == ["a", "a", "b"]


def assert_plot_is_refused(folder: Path, problem: str, capsys) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        plot(folder)
    assert main(["plot", str(folder)]) == 2
    assert problem in capsys.readouterr().err


def test_a_missing_folder_is_refused_in_one_line(tmp_path: Path, capsys) -> None:
    assert_plot_is_refused(tmp_path / "missing", "no such folder", capsys)


@pytest.mark.parametrize(
    ("file_name", "text", "problem"),
    [("other", "", "no metrics.csv"), ("metrics.csv", "step\n", "no metric")],
)
def test_a_run_without_metrics_is_refused_in_one_line(
    file_name: str, text: str, problem: str, tmp_path: Path, capsys
) -> None:
    file = tmp_path / file_name
    file.write_text(text)
    assert_plot_is_refused(tmp_path, problem, capsys)


def test_a_missing_matplotlib_names_the_install_line(run: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"torch-fabric\[plot\]"):
        plot(run)

"""How far a loop is, in one line on the first process; and the pictures of what it logged."""

import io
import os
import pty
import re
import subprocess
import sys
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


def loop(fabric: Fabric) -> tuple[str, list[int]]:
    sys.stderr, before = io.StringIO(), sys.stderr
    try:
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(12)), batch_size=2))
        metrics = {}
        batches = fabric.progress(loader, desc="epoch 1", metrics=metrics)
        seen = []
        for [batch] in batches:
            metrics["loss"] = torch.tensor(0.5)
            seen += batch.tolist()
        return sys.stderr.getvalue(), seen
    finally:
        sys.stderr = before


def test_one_line_in_a_pipe_on_the_first_process_counts_the_samples_of_all() -> None:
    [(text, first), (nothing, second)] = run_in_ranks(loop)
    assert sorted(first + second) == list(range(12))
    assert nothing == ""
    assert re.fullmatch(
        r"epoch 1  3/3 100%  loss 0\.5  [\d.,e+]+ samples/s  0:00  \d+\.\d\d GiB\n", text
    )


def test_a_second_pass_shows_another_line_and_what_has_no_length_or_tensor_counts_batches(
    capsys,
) -> None:
    with Fabric(accelerator="cpu") as fabric:
        batches = fabric.progress(iter("abc"))
        assert list(batches) == ["a", "b", "c"]
        again = fabric.progress([{"x": torch.ones(4, 2)}], metrics=lambda: {"a": 1, "b": 2e-5})
        assert len(list(again)) == len(list(again)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert re.match(r"3  [\d.,e+]+ batches/s  0:00  ", lines[0])
    assert [re.sub("  [^ ]+ samples/s.*", "", line) for line in lines[1:]] == [
        "1/1 100%  a 1  b 2e-05"
    ] * 2


def resumed(fabric: Fabric, accumulates: bool) -> str:
    made = (DataLoader(TensorDataset(torch.arange(20)), batch_size=size) for size in (2, 1))
    loader, smaller = fabric.setup_dataloaders(*made)
    next(iter(loader))
    smaller.load_state_dict(loader.state_dict())
    sys.stderr, before = io.StringIO(), sys.stderr
    try:
        for number, _ in enumerate(
            fabric.progress(fabric.accumulate(smaller, 4) if accumulates else smaller)
        ):
            if number == 2:
                break
        return sys.stderr.getvalue()
    finally:
        sys.stderr = before


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_resumed_epoch_is_counted_from_the_loaded_position(accumulates: bool) -> None:
    assert re.match(
        r"4/10 40%  [\d.,e+]+ samples/s  0:00 left", run_in_ranks(resumed, accumulates)[0]
    )


def test_the_line_is_ended_when_a_loop_is_left(capsys) -> None:
    with Fabric(accelerator="cpu") as fabric:
        for number in fabric.progress(range(5), desc="half"):
            if number == 2:
                break
    assert re.match(r"half  2/5 40%  .* batches/s  0:00 left  .*GiB\n$", capsys.readouterr().err)


def test_a_metric_that_is_no_number_is_named(capsys) -> None:
    with (
        Fabric(accelerator="cpu") as fabric,
        pytest.raises(TypeError, match="metric 'loss' of 'high'"),
    ):
        list(fabric.progress(range(1), metrics={"loss": "high"}))


SCRIPT = """
from time import sleep
from fabric import Fabric
fabric = Fabric(accelerator="cpu")
for i in fabric.progress(range(8), desc="a line that does not fit into a narrow terminal", metrics=lambda: {"i": i}):
    sleep(0.1)
"""


def test_a_terminal_has_one_line_that_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], stderr=theirs, env={**os.environ, "COLUMNS": "60"}
    ):
        os.close(theirs)
        text = b""
        while chunk := _read(ours):
            text += chunk
    os.close(ours)
    shown = text.decode().split("\r")
    assert len(shown) > 3
    assert [line for line in shown[:-2] if len(line) > 59] == []
    assert text.count(b"\n") == 1


def _read(file: int) -> bytes:
    try:
        return os.read(file, 4096)
    except OSError:  # what Linux answers once the other end is closed
        return b""


def prints_of_all(fabric: Fabric) -> str:
    sys.stdout, before = io.StringIO(), sys.stdout
    try:
        fabric.print("rank", fabric.global_rank, "\nx", sep="=", all_ranks=True)
        return sys.stdout.getvalue()
    finally:
        sys.stdout = before


def test_the_texts_of_all_ranks_come_in_order_with_a_prefix() -> None:
    expected = "[rank 0] rank=0=\n[rank 0] x\n[rank 1] rank=1=\n[rank 1] x\n"
    assert run_in_ranks(prints_of_all) == [expected, ""]


def test_the_representation_says_what_was_resolved() -> None:
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
    assert repr(fabric) == fabric.describe()
    assert "bf16-mixed" in repr(fabric)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    logger = CSVLogger(tmp_path, "a", version=0)
    for step in range(3):
        logger.log_metrics({"train/loss": 1.0 / (step + 1), "lr": 0.1}, step)
    logger.log_metrics({"val/loss": 0.5})
    with open(tmp_path / "a" / "version_0" / "metrics.csv", "a") as file:
        file.write("4,0.")
    return tmp_path / "a"


def test_a_run_is_drawn_with_a_panel_for_each_metric(run: Path, tmp_path: Path, capsys) -> None:
    figure = plot(run)
    [loss, rate] = figure.axes
    assert (loss.get_title(), rate.get_title()) == ("loss", "lr")
    assert [line.get_label() for line in loss.lines] == ["train/loss", "val/loss"]
    assert loss.lines[0].get_xydata().tolist() == [[0, 1], [1, 0.5], [2, 1 / 3], [4, 0]]
    assert main(["plot", str(run), "-o", str(tmp_path / "picture.png")]) == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert "picture.png" in capsys.readouterr().err


def test_several_runs_are_lines_of_one_panel(run: Path, tmp_path: Path) -> None:
    CSVLogger(tmp_path, "b", version=0).log_metrics({"train/loss": 2.0}, 0)
    labels = [line.get_label() for line in plot(run, tmp_path / "b").axes[0].lines]
    assert [Path(label.split(":")[0]).parent.name for label in labels] == ["a", "a", "b"]


@pytest.mark.parametrize(
    ("made", "text"), [(None, "no such folder"), ("", "no metrics.csv"), ("step\n", "no metric")]
)
def test_a_run_without_metrics_is_refused_in_one_line(
    made, text: str, tmp_path: Path, capsys
) -> None:
    folder = tmp_path / "empty"
    if made is not None:
        folder.mkdir()
        (folder / ("metrics.csv" if made else "other")).write_text(made)
    with pytest.raises(ConfigurationError, match=text):
        plot(folder)
    assert main(["plot", str(folder)]) == 2
    assert text in capsys.readouterr().err


def test_a_missing_matplotlib_names_the_install_line(run: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"torch-fabric\[plot\]"):
        plot(run)

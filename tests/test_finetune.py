"""The page about fine-tuning: its script, what the page says it prints, and its changes to it."""

import csv
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to" / "finetune.md").read_text()
# The script, and for a pretrained model the changes to its definitions and to its function main.
SCRIPT, DEFINITIONS, LINES_OF_MAIN = re.findall(
    r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE
)
COMMAND = [sys.executable, "-W", "error::UserWarning", "finetune.py", "--accelerator", "cpu"]
# Seconds that a command may take.
DEADLINE = 150
STEP = re.compile(r"^step (?P<step>\d+): (?P<name>\w+) (?P<value>[\d.]+)$", re.MULTILINE)
# The rounding of the script's output. The losses of some processes differ by rounding, too.
TOLERANCE = 2e-4


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(folder: Path, devices: int) -> str:
    """Run the script in a folder, and return what it prints."""
    done = subprocess.run(
        [*COMMAND, "--devices", str(devices)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def kill_after_line(folder: Path, line: str, number: signal.Signals) -> tuple[str, int]:
    """Send a signal to the script on two processes after a line, and return its output and code."""
    with subprocess.Popen(
        [*COMMAND, "--devices", "2"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        output = ""
        for printed_line in process.stdout:
            output += printed_line
            if printed_line.startswith(line):
                process.send_signal(number)
    return output, process.returncode


def values_of(output: str) -> dict[tuple[int, str], float]:
    """Return the printed values by their step and name."""
    values = {}
    for match in STEP.finditer(output):
        values[int(match["step"]), match["name"]] = float(match["value"])
    return values


def outputs_of_page() -> list[str]:
    return re.findall(r"^```console\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def write_script(folder: Path, script: str) -> None:
    (folder / "finetune.py").write_text(script)


def test_the_page_has_the_script_of_the_examples() -> None:
    assert (ROOT / "examples" / "finetune.py").read_text() == SCRIPT


@pytest.mark.slow
def test_the_script_prints_what_the_page_shows_also_after_a_kill_on_one_process(
    tmp_path: Path,
) -> None:
    write_script(tmp_path, SCRIPT)
    on_two, on_one = outputs_of_page()

    first_output, code = kill_after_line(tmp_path, "step 140:", signal.SIGKILL)
    second_output = run(tmp_path, devices=1)

    assert code == -signal.SIGKILL
    assert first_output.startswith("2 x 16 reviews a step, from step 0\n")
    assert re.match(r"1 x 32 reviews a step, from step 1[24]0\n", second_output)
    for page_output, output in ((on_two, first_output), (on_one, second_output)):
        values = values_of(output)
        expected = values_of(page_output)
        assert expected
        for place, value in expected.items():
            # A save of step 140 may have been committed before the kill.
            if place in values or place[0] > 140:
                assert values[place] == pytest.approx(value, abs=TOLERANCE)
    model = BertForSequenceClassification.from_pretrained(tmp_path / "runs/bert/model")
    assert model.config.num_labels == 2
    with open(tmp_path / "runs/bert/log/version_0/metrics.csv", newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps[0] == 10
    assert steps[-1] == 300


@pytest.mark.slow
def test_the_script_stops_on_a_signal_resumes_and_can_be_started_after_its_end(
    tmp_path: Path,
) -> None:
    write_script(tmp_path, SCRIPT.replace("EPOCHS = 3", "EPOCHS = 1"))

    output, code = kill_after_line(tmp_path, "step 30:", signal.SIGTERM)
    stopped = re.search(r"^stopped after step (\d+)$", output, re.MULTILINE)
    assert code == 75
    assert stopped is not None
    assert f"from step {stopped[1]}\n" in run(tmp_path, devices=1)
    assert "from step 100\n" in run(tmp_path, devices=2)


def write_pretrained(folder: Path) -> None:
    """Write a small model and its tokenizer to the folder that the page names."""
    name = re.search(r'NAME = "(.*)"', DEFINITIONS)
    assert name is not None
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film"]
    target = folder / name[1]
    target.mkdir(parents=True)
    (target / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(target / "vocab.txt")).save_pretrained(target)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    BertForSequenceClassification(config).save_pretrained(target)


def write_reviews(path: Path, count: int) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for index in range(count):
            label = index % 2
            word = ("bad", "good")[label]
            writer.writerow(["a " * (index % 5) + f"{word} film", label])


@pytest.mark.slow
def test_the_changes_of_the_page_train_a_pretrained_model_on_files(tmp_path: Path) -> None:
    before, main, after = SCRIPT.partition("def main()")
    replaced_lines = (
        "    train_data = Reviews(3200, torch.Generator().manual_seed(1))\n"
        "    test_data = Reviews(500, torch.Generator().manual_seed(2))\n"
    )
    assert after.count(replaced_lines) == 1
    after = after.replace(replaced_lines, LINES_OF_MAIN)
    write_script(tmp_path, f"{before}{DEFINITIONS}\n\n{main}{after}")
    write_pretrained(tmp_path)
    write_reviews(tmp_path / "train.csv", count=128)
    write_reviews(tmp_path / "test.csv", count=33)

    output = run(tmp_path, devices=2)

    assert [place for place in values_of(output) if place[1] == "accuracy"] == [
        (4, "accuracy"),
        (8, "accuracy"),
        (12, "accuracy"),
    ]

"""The examples run as a reader runs them, most of them from a command line."""

import contextlib
import difflib
import importlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
TEXT = EXAMPLES / "text"
SCRIPTS = Path(sysconfig.get_path("scripts"))
PYTHON = [sys.executable, "-W", "error::UserWarning"]
CPU = ["--accelerator", "cpu"]
# Seconds that a command may take.
DEADLINE = 150
# An epoch has eleven steps, so that twelve steps reach the second epoch.
SMALL = ["--text-size", "22528", "--layers", "1", "--width", "32"]


def run(*command: object) -> str:
    """Return the standard output of a command, which must not fail."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = list(map(str, command))
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def records(text: str) -> list[dict[str, float]]:
    """Return the JSON records among the lines of a text."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def run_here(script: object, *options: object) -> str:
    """Return the output of a script of one process, run in this one, which has imported torch."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(sys, "argv", list(map(str, (script, *options))))
        patch.syspath_prepend(Path(str(script)).parent)
        # The fixture that sets the number of threads runs after the fixtures of a module.
        torch.set_num_threads(1)
        runpy.run_path(str(script), run_name="__main__")
    return output.getvalue()


def run_python(script: object, *options: object) -> str:
    """Return the output of a script, run in a process of its own, which may start others."""
    return run(*PYTHON, script, *options)


def runner(devices: int) -> Callable[..., str]:
    """Return the function that runs a script on some devices."""
    if devices == 1:
        return run_here
    return run_python


def losses(
    tmp_path: Path, *command: object, steps: int = 12, run: Callable[..., object] = run
) -> list[dict[str, float]]:
    """Return the records that a training script writes to its log."""
    log = tmp_path / "losses.jsonl"
    files = ["--checkpoint", tmp_path / "text.pt", "--losses", log]
    run(*command, *SMALL, "--steps", steps, *files)
    return records(log.read_text())


def changed_lines(before: list[str], after: list[str]) -> int:
    """Count the lines that are added, removed or replaced.

    To replace m lines by n lines counts as the larger of the two numbers.
    """
    count = 0
    matcher = difflib.SequenceMatcher(a=before, b=after, autojunk=False)
    for tag, start, end, new_start, new_end in matcher.get_opcodes():
        if tag != "equal":
            count += max(end - start, new_end - new_start)
    return count


def changes(diff: Iterable[str]) -> list[str]:
    """Return the lines of a diff that are added or removed."""
    return [line for line in diff if line.startswith(("+", "-"))]


def lines_of(script: str) -> list[str]:
    return (TEXT / script).read_text().splitlines()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Return the losses of the plain loop."""
    return losses(tmp_path_factory.mktemp("plain"), TEXT / "train_raw.py", run=run_here)


def test_fabric_takes_eleven_changed_lines() -> None:
    assert changed_lines(lines_of("train_raw.py"), lines_of("train.py")) == 11
    assert "eleven lines changed" in (TEXT / "train.py").read_text()


def test_changed_lines_are_counted_once() -> None:
    assert changed_lines(["a", "b", "c"], ["a", "B", "c"]) == 1
    assert changed_lines(["a", "b", "c"], ["a", "B", "B2", "c", "d"]) == 3
    assert changed_lines(["a", "b", "c"], ["c"]) == 2


def test_the_documentation_shows_the_lines_of_the_examples() -> None:
    page = (EXAMPLES.parent / "docs" / "migrate" / "torch.md").read_text()
    block = re.search(r"```diff\n(.*?)```", page, re.DOTALL)
    assert block is not None
    diff = difflib.unified_diff(lines_of("train_raw.py"), lines_of("train.py"), n=0, lineterm="")
    # The first two lines name the files.
    _, _, *expected = diff
    assert changes(block[1].splitlines()) == changes(expected)


def test_one_device_gives_the_losses_of_the_plain_loop_exactly(
    tmp_path: Path, plain: list[dict[str, float]]
) -> None:
    assert losses(tmp_path, TEXT / "train.py", *CPU, run=run_here) == plain
    assert plain[-1]["validation_loss"] < plain[0]["validation_loss"]
    checkpoint = torch.load(tmp_path / "text.pt", weights_only=True)
    assert checkpoint["step"] == 12
    assert "blocks.0.attention.project_in.weight" in checkpoint["model"]


def test_the_plain_loop_refuses_devices_that_it_does_not_know() -> None:
    with pytest.raises(AssertionError, match="this loop knows one CPU"):
        run_here(TEXT / "train_raw.py", "--devices", 2)


LAUNCHERS = {
    "torchrun": [SCRIPTS / "torchrun", "--standalone", "--nproc-per-node", 2],
    "fabric run": [SCRIPTS / "fabric", "run", *CPU, "--devices", 2],
}


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Return the losses of two processes that torchrun has started."""
    folder = tmp_path_factory.mktemp("torchrun")
    with pytest.MonkeyPatch.context() as patch:
        # torchrun leaves a temporary folder, with --log-dir, too.
        patch.setenv("TMPDIR", str(folder))
        return losses(folder, *LAUNCHERS["torchrun"], TEXT / "train.py", *CPU)


# test_gallery.py compares two processes with plain loops in `make test`.
@pytest.mark.slow
def test_two_processes_give_the_losses_of_the_plain_loop(
    plain: list[dict[str, float]], under_torchrun: list[dict[str, float]]
) -> None:
    for record, plain_record in zip(under_torchrun, plain, strict=True):
        assert record == pytest.approx(plain_record, abs=1e-5)


# test_pages.py starts the processes of a script by the script itself in `make test`.
@pytest.mark.slow
def test_two_processes_give_the_same_losses_however_they_are_launched(
    tmp_path: Path, under_torchrun: list[dict[str, float]]
) -> None:
    by_script = losses(tmp_path, *PYTHON, TEXT / "train.py", *CPU, "--devices", 2)
    by_fabric_run = losses(tmp_path, *LAUNCHERS["fabric run"], TEXT / "train.py", *CPU)
    assert by_script == under_torchrun
    assert by_fabric_run == under_torchrun


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_other_strategies_end_with_the_validation_loss_of_the_plain_loop(
    tmp_path: Path, plain: list[dict[str, float]], strategy: str
) -> None:
    options = [*CPU, "--devices", 2, "--strategy", strategy]
    records = losses(tmp_path, *PYTHON, TEXT / "train.py", *options)

    actual = records[-1]["validation_loss"]
    expected = plain[-1]["validation_loss"]
    assert actual == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "devices", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.soak])]
)
def test_a_killed_run_resumes_in_the_middle_of_an_epoch_as_if_nothing_had_happened(
    tmp_path: Path, devices: int
) -> None:
    options = ["--devices", devices, "--dropout", 0.2, "--save-every", 7]
    script = [TEXT / "train.py", *CPU, *options]
    run_script = runner(devices)
    uninterrupted = losses(tmp_path, *script, steps=26, run=run_script)
    (tmp_path / "text.pt").unlink()

    files = ["--checkpoint", tmp_path / "text.pt"]
    kill_at_step(18, *PYTHON, *script, *SMALL, "--steps", 10_000, *files)
    (tmp_path / "losses.jsonl").unlink()
    resumed = losses(tmp_path, *script, "--resume", steps=26, run=run_script)

    assert resumed[0]["step"] % 7 == 1
    assert resumed == uninterrupted[-len(resumed) :]
    assert len(uninterrupted) > len(resumed) > 2


def kill_at_step(step: int, *command: object) -> None:
    """Kill a training script when the log on its standard output reaches ``step``."""
    words = list(map(str, (*command, "--losses", "/dev/stdout")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if f'"step": {step},' in line:
                process.kill()
                break
        # The ranks hold the pipe, too: it ends when the last rank has ended.
        process.stdout.read()
    assert process.returncode == -9


@pytest.mark.slow
def test_any_mesh_prints_the_numbers_of_the_plain_loop_also_after_a_resume_on_another(
    tmp_path: Path,
) -> None:
    scripts = EXAMPLES / "mesh"
    size = ["--layers", 1, "--width", 32]
    plain = run(*PYTHON, scripts / "train_raw.py", *size, "--steps", 6)
    mesh = [*PYTHON, scripts / "train.py", *size, "--checkpoint", tmp_path / "mesh"]
    output = run(*mesh, "--steps", 2)
    output += run(*mesh, "--resume", "--tensor", 4, "--steps", 4)
    output += run(*mesh, "--resume", "--tensor", 1, "--devices", 2, "--steps", 5)
    output += run(*mesh, "--resume", "--tensor", 1, "--devices", 1, "--steps", 6)

    assert output == plain
    assert len(plain.splitlines()) == 6


@pytest.mark.slow
def test_longer_training_ends_with_text(tmp_path: Path) -> None:
    log = tmp_path / "losses.jsonl"
    size = ["--layers", 2, "--width", 64, "--steps", 60]
    files = ["--checkpoint", tmp_path / "text.pt", "--losses", log]
    output = run(*PYTHON, TEXT / "train.py", *CPU, "--devices", 2, *size, *files)

    first, *_, last = records(log.read_text())
    assert first["validation_loss"] > 4.3
    assert last["validation_loss"] < 2.8
    assert "\ndef " in output


def test_windows_are_one_character_apart_and_do_not_overlap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(TEXT)
    corpus = importlib.import_module("corpus")

    train, validation = corpus.read_windows(text_size=1024, block_size=32)

    assert len(train) == 32
    assert len(validation) == 512
    inputs, targets = train[3]
    next_inputs, _ = train[4]
    assert torch.equal(inputs[1:], targets[:-1])
    assert targets[-1] == next_inputs[0]
    assert corpus.decode(corpus.encode("déf x:\n")) == "d?f x:\n"
    assert len(corpus.CHARACTERS) == 96


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_gan_learns_in_float16_with_two_optimizers(
    devices: int,
) -> None:
    run_script = runner(devices)
    output = run_script(EXAMPLES / "gan.py", *CPU, "--devices", devices, "--epochs", 1)

    first, last = map(last_number, output.splitlines())
    assert first > 1.2
    assert last < 0.7


def last_number(line: str) -> float:
    _, _, number = line.rpartition(" ")
    return float(number)


def test_a_long_run_goes_on_where_it_was_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(EXAMPLES / "long_run.py"))["main"]

    def lines(folder: str, steps: int) -> list[str]:
        path = str(tmp_path / folder)
        main([*CPU, "--folder", path, "--devices", "1", "--steps", str(steps)])
        return capsys.readouterr().out.splitlines()

    uninterrupted = lines("uninterrupted", 16)
    assert lines("resumed", 14) == uninterrupted[:14]
    # Step 12 in the second epoch is the newest step that was saved.
    assert lines("resumed", 16) == uninterrupted[12:]


@pytest.mark.slow
def test_a_long_run_goes_on_with_other_processes(tmp_path: Path) -> None:

    def losses_of_run(folder: str, devices: int, steps: int) -> list[float]:
        options = ["--folder", tmp_path / folder, "--devices", devices, "--steps", steps]
        output = run(*PYTHON, EXAMPLES / "long_run.py", *CPU, *options)
        return [last_number(line) for line in output.splitlines()]

    plain = losses_of_run("plain", devices=1, steps=16)
    first = losses_of_run("resumed", devices=2, steps=14)
    second = losses_of_run("resumed", devices=3, steps=16)
    assert plain == pytest.approx([*first[:12], *second], abs=2e-6)

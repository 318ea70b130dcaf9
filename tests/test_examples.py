"""The examples run as a reader runs them: from a command line, but for some that take a single process."""

import difflib
import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
TEXT = EXAMPLES / "text"
SCRIPTS = Path(sysconfig.get_path("scripts"))
PYTHON = [sys.executable, "-W", "error::UserWarning"]
CPU = ["--accelerator", "cpu"]
DEADLINE = 100
# Eleven steps an epoch, so that twelve cross the end of one.
SMALL = ["--text-size", "22528", "--layers", "1", "--width", "32"]


def run(*command: object) -> str:
    """Standard output of a command; one that fails shows both of its streams."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def records(text: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def run_here(script: object, *options: object) -> None:
    """Run a script of one process in this one, which has imported torch already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(word) for word in (script, *options)])
        patch.syspath_prepend(Path(str(script)).parent)
        torch.set_num_threads(1)  # the fixtures of a module are older than the fixture that sets it
        runpy.run_path(str(script), run_name="__main__")


def losses(
    tmp_path: Path, *command: object, steps: int = 12, run: Callable[..., object] = run
) -> list[dict[str, float]]:
    """What a training script wrote to its log."""
    log = tmp_path / "losses.jsonl"
    run(*command, *SMALL, "--steps", steps, "--checkpoint", tmp_path / "text.pt", "--losses", log)
    return records(log.read_text())


def changed_lines(before: list[str], after: list[str]) -> int:
    """Lines added, removed or replaced; replacing m lines by n counts as the larger of the two."""
    opcodes = difflib.SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in opcodes if tag != "equal")


def marked(diff: list[str]) -> list[str]:
    """The lines of a diff that say what changed."""
    return [line for line in diff if line.startswith(("+", "-"))]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The losses of the plain loop."""
    return losses(tmp_path_factory.mktemp("plain"), TEXT / "train_raw.py", run=run_here)


def test_fabric_takes_ten_changed_lines() -> None:
    raw, fabric = ((TEXT / name).read_text().splitlines() for name in ("train_raw.py", "train.py"))

    assert changed_lines(raw, fabric) == 10
    assert "ten lines changed" in "\n".join(fabric)


def test_changed_lines_are_counted_once() -> None:
    assert changed_lines(["a", "b", "c"], ["a", "B", "c"]) == 1
    assert changed_lines(["a", "b", "c"], ["a", "B", "B2", "c", "d"]) == 3
    assert changed_lines(["a", "b", "c"], ["c"]) == 2


def test_the_documentation_shows_the_lines_of_the_examples() -> None:
    page = (EXAMPLES.parent / "docs" / "coming-from.md").read_text()
    raw, fabric = ((TEXT / name).read_text().splitlines() for name in ("train_raw.py", "train.py"))
    shown = re.search(r"```diff\n(.*?)```", page, re.DOTALL)

    assert shown is not None
    _, _, *wanted = difflib.unified_diff(raw, fabric, n=0, lineterm="")
    assert marked(shown[1].splitlines()) == marked(wanted)


def test_one_device_gives_the_losses_of_the_plain_loop_exactly(
    tmp_path: Path, plain: list[dict[str, float]]
) -> None:
    assert losses(tmp_path, TEXT / "train.py", *CPU, run=run_here) == plain
    assert plain[-1]["validation_loss"] < plain[0]["validation_loss"]
    checkpoint = torch.load(tmp_path / "text.pt", weights_only=True)
    assert checkpoint["step"] == 12
    assert "blocks.0.attention.project_in.weight" in checkpoint["model"]


def test_the_plain_loop_refuses_devices_that_it_does_not_know() -> None:
    done = subprocess.run(
        [*PYTHON, TEXT / "train_raw.py", "--devices", "2"], capture_output=True, timeout=DEADLINE
    )

    assert done.returncode == 1
    assert b"this loop knows one CPU" in done.stderr


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The losses of two processes that the script has started."""
    return losses(tmp_path_factory.mktemp("two"), *PYTHON, TEXT / "train.py", *CPU, "--devices", 2)


def test_two_processes_give_the_losses_of_the_plain_loop(
    plain: list[dict[str, float]], on_two: list[dict[str, float]]
) -> None:
    assert on_two == [pytest.approx(record, abs=1e-5) for record in plain]


LAUNCHERS = {
    "torchrun": [SCRIPTS / "torchrun", "--standalone", "--nproc-per-node", 2],
    "fabric run": [SCRIPTS / "fabric", "run", *CPU, "--devices", 2],
}


@pytest.mark.parametrize(
    "launcher", ["torchrun", pytest.param("fabric run", marks=pytest.mark.slow)]
)
def test_two_processes_give_the_same_losses_however_they_are_launched(
    tmp_path: Path, on_two: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    monkeypatch.setenv(
        "TMPDIR", str(tmp_path)
    )  # torchrun leaves a folder there, with --log-dir too
    assert losses(tmp_path, *LAUNCHERS[launcher], TEXT / "train.py", *CPU) == on_two


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_other_strategies_end_with_the_validation_loss_of_the_plain_loop(
    tmp_path: Path, plain: list[dict[str, float]], strategy: str
) -> None:
    actual = losses(
        tmp_path, *PYTHON, TEXT / "train.py", *CPU, "--devices", 2, "--strategy", strategy
    )

    assert actual[-1]["validation_loss"] == pytest.approx(plain[-1]["validation_loss"], abs=1e-4)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_resumes_in_the_middle_of_an_epoch_as_if_nothing_had_happened(
    tmp_path: Path, devices: int
) -> None:
    command = [
        *PYTHON,
        TEXT / "train.py",
        *CPU,
        "--devices",
        devices,
        "--dropout",
        0.2,
        "--save-every",
        7,
    ]
    whole = losses(tmp_path, *command, steps=26)
    (tmp_path / "text.pt").unlink()

    kill_at_step(18, *command, *SMALL, "--steps", 10_000, "--checkpoint", tmp_path / "text.pt")
    (tmp_path / "losses.jsonl").unlink()
    resumed = losses(tmp_path, *command, "--resume", steps=26)

    assert resumed[0]["step"] % 7 == 1
    assert resumed == whole[-len(resumed) :]
    assert len(whole) > len(resumed) > 2


def kill_at_step(step: int, *command: object) -> None:
    """Kill a training script without warning when the log on its standard output reaches ``step``."""
    words = [str(word) for word in (*command, "--losses", "/dev/stdout")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if f'"step": {step},' in line:
                process.kill()
                break
        # The ranks hold the pipe, too: it ends when the last of them has gone.
        process.stdout.read()
    assert process.returncode == -9


@pytest.mark.slow
def test_any_mesh_prints_the_numbers_of_the_plain_loop_also_after_a_resume_on_another(
    tmp_path: Path,
) -> None:
    mesh = [
        *PYTHON,
        EXAMPLES / "mesh" / "train.py",
        "--checkpoint",
        tmp_path / "mesh",
        "--layers",
        1,
        "--width",
        32,
    ]
    plain = run(
        *PYTHON, EXAMPLES / "mesh" / "train_raw.py", "--layers", 1, "--width", 32, "--steps", 6
    )
    parts = [
        run(*mesh, "--steps", 2),
        run(*mesh, "--resume", "--tensor", 4, "--steps", 4),
        run(*mesh, "--resume", "--tensor", 1, "--devices", 2, "--steps", 5),
        run(*mesh, "--resume", "--tensor", 1, "--devices", 1, "--steps", 6),
    ]

    assert "".join(parts) == plain
    assert len(plain.splitlines()) == 6


@pytest.mark.slow
def test_longer_training_ends_with_text(tmp_path: Path) -> None:
    log = tmp_path / "losses.jsonl"
    options = [
        "--layers",
        2,
        "--width",
        64,
        "--steps",
        60,
        "--checkpoint",
        tmp_path / "text.pt",
        "--losses",
        log,
    ]
    output = run(*PYTHON, TEXT / "train.py", *CPU, "--devices", 2, *options)

    first, *_, last = records(log.read_text())
    assert first["validation_loss"] > 4.3
    assert last["validation_loss"] < 2.8
    assert "\ndef " in output


def test_windows_are_one_character_apart_and_do_not_overlap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(TEXT)
    from corpus import CHARACTERS, decode, encode, read_windows  # pyright: ignore[reportMissingImports] beside the script

    train, validation = read_windows(text_size=1024, block_size=32)

    assert (len(train), len(validation)) == (32, 512)
    inputs, targets = train[3]
    assert torch.equal(inputs[1:], targets[:-1])
    assert targets[-1] == train[4][0][0]
    assert decode(encode("déf x:\n")) == "d?f x:\n"
    assert len(CHARACTERS) == 96


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_gan_learns_in_float16_with_two_optimizers(devices: int) -> None:
    output = run(*PYTHON, EXAMPLES / "gan.py", *CPU, "--devices", devices, "--epochs", 1)

    first, last = (float(line.rsplit(maxsplit=1)[1]) for line in output.splitlines())
    assert first > 1.2
    assert last < 0.7


def test_a_long_run_goes_on_where_it_was_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(EXAMPLES / "long_run.py"))["main"]

    def lines(folder: str, steps: int) -> list[str]:
        main([*CPU, "--folder", str(tmp_path / folder), "--devices", "1", "--steps", str(steps)])
        return capsys.readouterr().out.splitlines()

    whole = lines("whole", 16)
    assert lines("parts", 14) == whole[:14]
    assert lines("parts", 16) == whole[12:], (
        "from step 12, the newest that was saved, in the second epoch"
    )


@pytest.mark.slow
def test_a_long_run_goes_on_with_other_processes(tmp_path: Path) -> None:
    command = [*PYTHON, EXAMPLES / "long_run.py", *CPU, "--folder"]
    whole = run(*command, tmp_path / "whole", "--devices", 1, "--steps", 16).splitlines()
    first = run(*command, tmp_path / "parts", "--devices", 2, "--steps", 14).splitlines()
    last = run(*command, tmp_path / "parts", "--devices", 3, "--steps", 16).splitlines()
    values = [
        [float(line.rpartition(" ")[2]) for line in part] for part in (whole, [*first[:12], *last])
    ]
    assert values[0] == pytest.approx(values[1], abs=2e-6)

"""A rank that is debugged in a terminal, by commands that are typed into a pseudo-terminal."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fabric import Fabric
from fabric.errors import ConfigurationError, UsageError
from fabric.testing import RankPool

# The program's standard streams are a new terminal. What this process reads is typed there.
IN_TERMINAL = """
import os, pty, sys
sys.exit(os.waitstatus_to_exitcode(pty.spawn([sys.executable, *sys.argv[1:]])))
"""
# The other rank waits for longer than the timeout of the script.
COMMANDS = """p "in the debugger of", fabric.global_rank
import time; time.sleep(3)
x += 100
continue
"""
SCRIPT = """
import sys

import torch

from fabric import Fabric


def train(fabric):
    x = torch.tensor([1.0])
    breakpoint()
    return fabric.all_reduce(x, reduce_op="sum").item()


if __name__ == "__main__":
    options = dict(accelerator="cpu", devices=2, strategy="ddp", timeout=1, watchdog=0.5)
    fabric = Fabric(launcher=sys.argv[1], **options)
    print("the sum is", fabric.launch(train, debug=1))
"""
POOL_TEST = """
from fabric.testing import PerRank, RankPool


def total(fabric, x):
    breakpoint()
    return fabric.all_reduce(x, reduce_op="sum")


def test_total():
    with RankPool(2, timeout=1, debug=1) as pool:
        assert pool.run(total, PerRank([1, 2])) == [103, 103]
"""


def run_in_terminal(*arguments: object) -> str:
    """Return what an interpreter with these arguments prints in a terminal."""
    words = [str(argument) for argument in arguments]
    done = subprocess.run(
        [sys.executable, "-c", IN_TERMINAL, *words],
        input=COMMANDS,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("launcher", ["spawn", "forkserver", "fork", "popen"])
def test_breakpoint_opens_the_debugger_in_the_rank(tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    output = run_in_terminal(script, launcher)
    assert "('in the debugger of', 1)" in output
    assert "the sum is 102.0" in output
    assert "rank 0 has waited" not in output


def test_breakpoint_opens_the_debugger_in_a_rank_of_a_pool(tmp_path: Path) -> None:
    file = tmp_path / "test_pool.py"
    file.write_text(POOL_TEST)
    options = ["-q", "-p", "no:cacheprovider", "--color=no"]
    output = run_in_terminal("-m", "pytest", *options, file)
    # pytest captures what the test prints, and the debugger has the terminal itself.
    assert "('in the debugger of', 1)" in output
    assert "1 passed" in output


def add(fabric: Fabric, debug: int = 0) -> int:
    return 1 + debug


def ignore(fabric: Fabric) -> None:
    pass


def test_a_rank_that_does_not_exist_cannot_be_debugged() -> None:
    fabric = Fabric(accelerator="cpu", devices=2)
    with pytest.raises(ConfigurationError, match=r"there is no rank 2\n  Valid: .* 0 to 1"):
        fabric.launch(ignore, debug=2)
    with pytest.raises(ConfigurationError, match=r"there is no rank 2\n  Valid: .* 0 to 1"):
        RankPool(2, debug=2)


@pytest.mark.parametrize("function", [add, ignore])
def test_an_argument_of_the_function_is_not_taken_for_a_rank(function: object) -> None:
    fabric = Fabric(accelerator="cpu", devices=2)
    with pytest.raises(ConfigurationError, match=r"functools\.partial\(train, debug=\.\.\.\)"):
        fabric.launch(function, debug=True)  # type: ignore[arg-type]


def test_ranks_that_are_connected_cannot_be_debugged() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    with pytest.raises(UsageError, match="the ranks are connected already"):
        fabric.launch(ignore, debug=0)


WITHOUT_TERMINAL = """
from fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=1)
print(fabric.launch(lambda fabric: "one rank", debug=0))
Fabric(accelerator="cpu", devices=2, launcher="forkserver").launch(print, debug=0)
"""


def test_several_ranks_need_a_terminal() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TERMINAL],
        capture_output=True,
        text=True,
        timeout=150,
        start_new_session=True,  # without a terminal
    )
    assert "one rank" in done.stdout
    assert "ConfigurationError: fabric.launch(..., debug=0)" in done.stderr
    assert "this process has no terminal" in done.stderr


def name_of_calling_function() -> str:
    return sys._getframe(1).f_code.co_name


def stop_in_the_debugger(fabric: Fabric) -> Any:
    return breakpoint()


def test_a_debugger_of_a_variable_is_called_by_the_line_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hook = f"{__name__}.{name_of_calling_function.__name__}"
    monkeypatch.setenv("PYTHONBREAKPOINT", hook)
    fabric = Fabric(accelerator="cpu", devices=2, launcher="forkserver")
    names = fabric.launch(stop_in_the_debugger, return_all=True)
    assert names == ["stop_in_the_debugger"] * 2

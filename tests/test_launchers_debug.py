"""A rank that is debugged: in a terminal, by typed commands, or as rank 0 in this process."""

import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from fabric import Fabric
from fabric._torch import default_store
from fabric.errors import ConfigurationError, RankFailedError, UsageError
from fabric.launchers import StartMethod
from fabric.testing import RankPool

# The program's standard streams are a new terminal. What this process reads is typed there.
IN_TERMINAL = """
import os, pty, sys
sys.exit(os.waitstatus_to_exitcode(pty.spawn([sys.executable, *sys.argv[1:]])))
"""
# The other rank waits for longer than the timeout of the script.
COMMANDS = """p "in the debugger of", fabric.global_rank
import time; time.sleep(2)
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
    print("the sum is", fabric.launch(train, debug=int(sys.argv[2])))
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


@pytest.mark.parametrize(
    ("launcher", "rank"),
    [
        ("fork", 1),
        ("forkserver", 0),
        pytest.param("popen", 1, marks=pytest.mark.slow),
        pytest.param("popen", 0, marks=[pytest.mark.slow, pytest.mark.soak]),
        pytest.param("spawn", 1, marks=[pytest.mark.slow, pytest.mark.soak]),
        pytest.param("forkserver", 1, marks=[pytest.mark.slow, pytest.mark.soak]),
    ],
)
def test_breakpoint_opens_the_debugger_in_the_rank(
    tmp_path: Path, launcher: str, rank: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    output = run_in_terminal(script, launcher, rank)
    assert f"('in the debugger of', {rank})" in output
    assert "the sum is 102.0" in output
    assert "has waited" not in output


@pytest.mark.slow
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
Fabric(accelerator="cpu", devices=2, launcher="forkserver").launch(print, debug=1)
"""


def test_a_rank_in_another_process_needs_a_terminal() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TERMINAL],
        capture_output=True,
        text=True,
        timeout=150,
        start_new_session=True,  # without a terminal
    )
    assert "one rank" in done.stdout
    assert "ConfigurationError: fabric.launch(..., debug=1)" in done.stderr
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


def two_ranks(strategy: str = "ddp", launcher: StartMethod = "forkserver") -> Fabric:
    return Fabric(accelerator="cpu", devices=2, strategy=strategy, launcher=launcher)


def process_and_sum(fabric: Fabric) -> tuple[int, int]:
    return os.getpid(), fabric.all_reduce(fabric.global_rank + 1, reduce_op="sum")


@pytest.mark.parametrize(
    "launcher", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver", "fork"]
)
def test_rank_0_is_this_process(launcher: StartMethod) -> None:
    fabric = two_ranks(launcher=launcher)
    for _ in range(2):
        first, second = fabric.launch(process_and_sum, debug=0, return_all=True)
        assert first == (os.getpid(), 3)
        assert second[0] != os.getpid()
        assert second[1] == 3


def stop_twice(fabric: Fabric) -> int:
    stops = 0
    for _ in range(2):
        stops += breakpoint() == "stopped"
    return stops


def test_breakpoint_stops_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "breakpointhook", lambda: "stopped")
    stops = two_ranks().launch(stop_twice, debug=0, return_all=True)
    assert stops == [2, 0]


def fail_on_rank(fabric: Fabric, rank: int) -> None:
    secret = 42
    if fabric.global_rank == rank:
        raise ValueError(secret)
    fabric.all_reduce(torch.ones(2))


def fail_everywhere(fabric: Fabric) -> None:
    raise ValueError(fabric.global_rank)


def misuse_fabric(fabric: Fabric) -> None:
    fabric.all_reduce({"hot": True})


def functions_of(error: BaseException) -> list[str]:
    names = []
    trace = error.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    return names


def test_an_error_of_rank_0_has_the_frames_and_variables_of_its_function() -> None:
    with pytest.raises(ValueError, match="42") as raised:
        two_ranks().launch(fail_on_rank, 0, debug=0)
    assert functions_of(raised.value)[1:] == ["fail_on_rank"]
    assert raised.traceback[-1].frame.f_locals["secret"] == 42
    assert raised.value.__context__ is None


def test_an_error_of_all_ranks_is_that_of_rank_0() -> None:
    with pytest.raises(ValueError, match=r"^0$"):
        two_ranks().launch(fail_everywhere, debug=0)


def test_an_error_of_fabric_in_rank_0_keeps_the_frames_of_the_function() -> None:
    with pytest.raises(ConfigurationError, match="booleans have no mean") as raised:
        two_ranks().launch(misuse_fabric, debug=0)
    assert functions_of(raised.value)[1] == "misuse_fabric"


def raise_error() -> None:
    raise ValueError("the cause")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_early() -> None:
    os._exit(0)


def wait_in_python(fabric: Fabric) -> None:
    while True:
        time.sleep(0.01)


def wait_in_collective(fabric: Fabric) -> None:
    fabric.all_reduce(torch.ones(2))


def end_rank_1(
    fabric: Fabric, end: Callable[[], None], wait_on_rank_0: Callable[[Fabric], None]
) -> None:
    if fabric.global_rank == 1:
        end()
    wait_on_rank_0(fabric)


@pytest.mark.parametrize("wait", [wait_in_python, wait_in_collective])
@pytest.mark.parametrize(
    ("end", "report"),
    [
        (raise_error, "failed (exit code 1)"),
        (kill, "was killed by SIGKILL"),
        (exit_early, "exited with exit code 0"),
    ],
)
def test_the_failure_of_another_rank_ends_rank_0_with_its_report(
    end: Callable[[], None], report: str, wait: Callable[[Fabric], None]
) -> None:
    with pytest.raises(RankFailedError) as raised:
        two_ranks().launch(end_rank_1, end, wait, debug=0)
    assert raised.value.rank == 1
    assert str(raised.value).startswith(f"rank 1 of 2 {report}")
    assert ("ValueError: the cause" in str(raised.value)) == (end is raise_error)
    assert not dist.is_initialized()


def interrupt(fabric: Fabric, launching_process: int, wait: Callable[[Fabric], None]) -> None:
    fabric.barrier()
    if fabric.global_rank == 0:
        wait(fabric)
    os.kill(launching_process, signal.SIGINT)
    # Holds the interpreter, so that this rank handles no signal.
    ctypes.PyDLL(None).sleep(150)


# Ctrl-C may arrive in a __del__ method, whose exceptions Python drops with a warning.
may_drop_ctrl_c = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@may_drop_ctrl_c
@pytest.mark.parametrize("wait", [wait_in_python, wait_in_collective])
def test_ctrl_c_ends_rank_0_and_then_the_others(wait: Callable[[Fabric], None]) -> None:
    fabric = two_ranks()
    since = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as raised:
        fabric.launch(interrupt, os.getpid(), wait, debug=0)
    assert time.monotonic() - since < 60
    assert functions_of(raised.value)[1] == "interrupt"
    assert not dist.is_initialized()
    assert fabric.launch(process_and_sum, debug=0) == (os.getpid(), 3)


class InterruptedWhenFreed:
    """An object that is being freed when the user presses Ctrl-C."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def drop_ctrl_c(fabric: Fabric) -> None:
    if fabric.global_rank == 0:
        InterruptedWhenFreed()
    else:
        time.sleep(150)
    fabric.barrier()


@may_drop_ctrl_c
def test_a_ctrl_c_that_python_drops_ends_the_ranks_all_the_same() -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        two_ranks().launch(drop_ctrl_c, debug=0)
    assert "drop_ctrl_c" in functions_of(raised.value)
    assert isinstance(raised.value.__cause__, RuntimeError)


def change_settings(fabric: Fabric, fails: bool) -> None:
    fabric.seed_everything(7)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["A_VARIABLE_OF_RANK_0"] = "1"
    if fails:
        raise ValueError


def state_of_process() -> dict[str, Any]:
    gc.collect()  # closes the files of what earlier tests have dropped
    return {
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "random": random.getstate(),
        "torch": torch.get_rng_state().tolist(),
        "group": dist.is_initialized(),
        "handler": signal.getsignal(signal.SIGINT),
        "wakeup": signal.set_wakeup_fd(-1),
        "hook": sys.breakpointhook,
        "stdin": sys.stdin,
        "files": sorted(os.listdir("/proc/self/fd")),
    }


@pytest.mark.parametrize("fails", [False, True])
def test_this_process_is_as_before(fails: bool) -> None:
    fabric = two_ranks()
    fabric.launch(process_and_sum, debug=0)
    before = state_of_process()
    try:
        fabric.launch(change_settings, fails, debug=0)
    except ValueError:
        assert fails
    assert state_of_process() == before
    assert fabric.launch(process_and_sum) != (os.getpid(), 3)


STORES: list[dist.Store] = []


def keep_store(fabric: Fabric) -> None:
    if fabric.global_rank == 0:
        STORES.append(default_store())


def test_a_store_that_is_freed_after_the_job_changes_no_file_of_this_process() -> None:
    two_ranks().launch(keep_store, debug=0)
    # These files get the descriptors that the job has used.
    with ExitStack() as stack:
        files = []
        for _ in range(20):
            file = stack.enter_context(tempfile.TemporaryFile(buffering=0))
            file.write(b"content")
            files.append(file)
        assert len(STORES) == 1
        STORES.clear()
        gc.collect()
        for file in files:
            file.seek(0)
            assert file.read() == b"content"


def train(fabric: Fabric, model: nn.Module) -> float:
    fabric.seed_everything(1)
    prepared, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    loss = torch.zeros(())
    for step in range(3):
        inputs = torch.arange(8.0).reshape(2, 4) + step + fabric.global_rank
        loss = prepared(inputs).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_training_is_the_same_as_without_debug(strategy: str) -> None:
    fabric = two_ranks(strategy)
    losses = []
    weights = []
    for debug in (None, 0):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        untrained = model.weight.detach().clone()
        fabric.launch(train, model, debug=debug)
        # The ranks train copies.
        assert type(model.weight) is nn.Parameter
        torch.testing.assert_close(model.weight, untrained, rtol=0, atol=0)
        losses.append(fabric.launch(train, model, debug=debug, return_weights=True))
        weights.append(model.weight)
    assert losses[0] == losses[1]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert not torch.equal(weights[0], untrained)

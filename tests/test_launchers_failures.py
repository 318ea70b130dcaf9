"""What the launching process says and does when a rank fails, under every launcher."""

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from fabric import Fabric
from fabric.errors import RankFailedError
from fabric.launchers import LAUNCHERS, LaunchSpec, supervisor
from tests.ranks import outcome, run_in_ranks

SCRIPTS = Path(__file__).parent / "scripts" / "launchers"
sys.path.insert(0, str(SCRIPTS))
import actions  # noqa: E402

METHODS = ("spawn", "fork", "forkserver")
TWO = LaunchSpec(num_processes=2)


# In `make test` the fork server represents all start methods: they share this code. In
# `make test-slow`, spawn fails in test_ranks.py: each launch starts two interpreters.
@pytest.fixture(
    params=[
        pytest.param("spawn", marks=[pytest.mark.slow, pytest.mark.soak]),
        pytest.param("fork", marks=pytest.mark.slow),
        "forkserver",
    ]
)
def failure(request):
    """Return a function that launches an action that fails, and returns the error."""

    def launch(action, *args):
        with pytest.raises(RankFailedError) as caught:
            LAUNCHERS[request.param].launch(action, args, {}, TWO)
        return caught.value

    return launch


@pytest.fixture
def popen(tmp_path):
    """Return a function that runs a script of launchers, and returns the finished process."""

    def run(*arguments, script="job.py"):
        environment = dict(os.environ, OMP_NUM_THREADS="1", TMPDIR=str(tmp_path))
        process = subprocess.run(
            [sys.executable, str(SCRIPTS / script), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        for path in tmp_path.iterdir():
            # torch's compiler makes its cache folder as soon as it is imported, with the first
            # optimizer at the latest.
            assert path.name.startswith("torchinductor"), "temporary files were left behind"
        return process

    return run


@pytest.mark.parametrize("failing", [0, 1])
def test_the_rank_that_raised_is_named_with_its_traceback_once(failure, failing):
    error = failure(actions.fail, failing)
    text = str(error)
    assert error.rank == failing
    assert error.exit_code == 1
    lines = text.splitlines()
    assert lines[0] == f"rank {failing} of 2 failed (exit code 1)"
    # A torch that is newer than every tested one is named in between.
    assert lines[1] == "Traceback (most recent call last):" or "is newer than torch" in lines[1]
    assert text.endswith("ValueError: the loss is not a number")
    # The words are in the line of the source and in the message.
    assert text.count("the loss is not a number") == 2
    assert "fabric/launchers" not in text


def test_a_cause_that_hangs_in_its_teardown_is_still_the_cause(failure):
    error = failure(actions.fail_in_teardown)
    assert error.rank == 1
    assert str(error).endswith("ValueError: the loss is not a number")


def test_an_exit_code_is_passed_on(failure):
    error = failure(actions.leave, 3)
    assert error.rank == 1
    assert error.exit_code == 3
    assert "rank 1 of 2 exited with exit code 3" in str(error)


def test_leaving_early_is_a_failure_and_not_blamed_on_its_victim(failure):
    error = failure(actions.leave, 0)
    assert error.rank == 1
    assert error.exit_code == 0
    last_line = str(error).splitlines()[-1]
    assert "rank 1 of 2 exited with exit code 0: it ended early" in last_line


def test_a_killed_rank_is_named_with_its_signal(failure):
    error = failure(actions.die)
    assert error.rank == 1
    assert error.exit_code == -signal.SIGKILL
    assert "killed by SIGKILL" in str(error)
    assert "memory" in str(error)


def test_nothing_is_left_behind_by_a_failure(failure, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    failure(actions.fail)
    assert list(tmp_path.iterdir()) == []


def test_an_exception_that_can_neither_be_pickled_nor_printed_is_reported_like_any_other(failure):
    class Stubborn(Exception):
        def __reduce__(self):
            raise TypeError("no")

        def __str__(self):
            raise TypeError("no")

    def action():
        raise Stubborn

    error = failure(action)
    assert "in action" in str(error)
    assert str(error).endswith("Stubborn: <exception str() failed>")


def test_an_exit_code_is_passed_on_as_the_system_cuts_it(failure):
    error = failure(actions.leave, -1)
    assert error.rank == 1
    assert error.exit_code == 255


def run_in_a_shell(command, folder):
    return subprocess.run(
        command, shell=True, cwd=folder, capture_output=True, text=True, timeout=150, check=False
    )


REMOVES = """
import sys
from fabric import Fabric
removed = sys.argv.pop()
fabric = Fabric(accelerator="cpu", devices=2)
fabric.launch()
raise ValueError(f"{removed} {sys.argv[1:]}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("closed", [pytest.param("", marks=pytest.mark.soak), " >&-"])
def test_a_script_keeps_arguments_that_it_removes_also_without_a_standard_output(tmp_path, closed):
    (tmp_path / "removes.py").write_text(REMOVES)
    process = run_in_a_shell(f"{sys.executable} -W error removes.py a b{closed}", tmp_path)
    assert process.returncode == 1
    assert process.stderr.count("ValueError: b ['a']\n") == 1
    assert process.stderr.endswith("ValueError: b ['a']\n")
    _, _, report = process.stderr.partition(" of 2 failed (exit code 1)")
    assert "Traceback" in report


LAUNCHES_FUNCTIONS = """
import os, sys
from fabric.launchers import LAUNCHERS, LaunchSpec, supervisor

def action():
    print("printed", flush=True)
    return os.write(1, b"written")

if __name__ == "__main__":
    for method in ("forkserver", "fork"):
        result = LAUNCHERS[method].launch(action, (), {}, LaunchSpec(num_processes=2))
        print(result, file=sys.stderr)
"""


def test_functions_are_launched_without_a_standard_output(tmp_path):
    (tmp_path / "closed.py").write_text(LAUNCHES_FUNCTIONS)
    process = run_in_a_shell(f"{sys.executable} closed.py >&-", tmp_path)
    assert process.stderr == "7\n7\n"
    assert process.returncode == 0


def test_the_next_launch_works_after_a_failure():
    forkserver = LAUNCHERS["forkserver"]
    with pytest.raises(RankFailedError):
        forkserver.launch(actions.die, (), {}, TWO)
    total = forkserver.launch(actions.reduce, (), {}, TWO)
    assert total == 3.0


def stop_or_fail(path: Path) -> None:
    """Stop rank 0, which writes its process id to a file. Then fail in rank 1."""
    if os.environ["RANK"] == "0":
        path.with_suffix(".new").write_text(str(os.getpid()))
        path.with_suffix(".new").rename(path)
        os.kill(os.getpid(), signal.SIGSTOP)
    while not path.exists():
        time.sleep(0.01)
    rank = psutil.Process(int(path.read_text()))
    while rank.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    raise ValueError("only rank 1")


def test_a_stopped_rank_is_not_waited_for(tmp_path, monkeypatch):
    for name in ("COLLECT_TIMEOUT", "DESCRIBE_TIMEOUT", "END_GRACE"):
        monkeypatch.setattr(supervisor, name, math.inf)
    with pytest.raises(RankFailedError, match="only rank 1"):
        LAUNCHERS["forkserver"].launch(stop_or_fail, (tmp_path / "pid",), {}, TWO)


def fail_before_the_connection() -> None:
    """Fail in rank 0, for which rank 1 waits in the C++ code of torch."""
    if os.environ["RANK"] == "0":
        raise ValueError("only rank 0")
    Fabric(accelerator="cpu", devices=2).launch()


def test_a_rank_that_connects_is_not_waited_for(monkeypatch):
    for name in ("COLLECT_TIMEOUT", "DESCRIBE_TIMEOUT", "END_GRACE"):
        monkeypatch.setattr(supervisor, name, math.inf)
    with pytest.raises(RankFailedError, match="only rank 0"):
        LAUNCHERS["forkserver"].launch(fail_before_the_connection, (), {}, TWO)


def end_before_the_epoch(is_killed: bool) -> None:
    """End rank 0, which draws the order of the epoch, while rank 1 waits for this order."""
    fabric = Fabric(accelerator="cpu", devices=2, watchdog=600)
    fabric.launch()
    loader = fabric.setup_dataloaders(DataLoader(range(8), shuffle=True))
    if fabric.global_rank == 1:
        next(iter(loader))
    if is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    fabric.teardown()


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_rank_does_not_wait_for_a_value_of_a_rank_0_that_has_ended(is_killed, monkeypatch):
    for name in ("COLLECT_TIMEOUT", "DESCRIBE_TIMEOUT", "END_GRACE"):
        monkeypatch.setattr(supervisor, name, math.inf)
    with pytest.raises(RankFailedError) as caught:
        LAUNCHERS["forkserver"].launch(end_before_the_epoch, (is_killed,), {}, TWO)
    if is_killed:
        assert str(caught.value).startswith("rank 0 of 2 was killed by SIGKILL")
    else:
        assert caught.value.rank == 1
        assert "rank 0 makes no further calls: it has finished" in str(caught.value)


def test_a_hook_of_the_user_for_uncaught_errors_stays(monkeypatch):
    def log_error(kind, error, trace):
        """Stand for the hook of a logging service."""

    monkeypatch.setattr(sys, "excepthook", log_error)
    with pytest.raises(RankFailedError):
        LAUNCHERS["fork"].launch(actions.fail, (), {}, TWO)
    assert sys.excepthook is log_error


@pytest.mark.slow
def test_a_segmentation_fault_leaves_its_stack(popen):
    process = popen("spawn", "crash")
    assert "killed by SIGSEGV" in process.stderr
    assert "in crash" in process.stderr


def test_popen_runs_the_script_again_in_every_rank(popen):
    process = popen("popen", "reduce", "4")
    assert process.returncode == 0, process.stderr
    assert process.stdout == "result 9\n"


# The script that removes arguments shows the same in `make test`.
@pytest.mark.slow
def test_popen_prints_one_report_and_exits_with_the_code_of_the_rank(popen):
    process = popen("popen", "fail")
    assert process.returncode == 1
    assert process.stderr.count("ValueError: the loss is not a number") == 1
    assert process.stderr.rstrip().endswith("ValueError: the loss is not a number")
    _, _, report = process.stderr.partition("rank 1 of 2 failed (exit code 1)")
    assert "Traceback" in report


@pytest.mark.parametrize(
    ("action", "code", "words"),
    [
        (("leave", "3"), 3, "rank 1 of 2 exited with exit code 3"),
        pytest.param(
            ("die",), 128 + 9, "rank 1 of 2 was killed by SIGKILL", marks=pytest.mark.slow
        ),
        pytest.param(
            ("crash",), 128 + 11, "rank 1 of 2 was killed by SIGSEGV", marks=pytest.mark.slow
        ),
        pytest.param(("fail_in_teardown",), 1, "rank 1 of 2 failed", marks=pytest.mark.slow),
        pytest.param(
            ("fork_a_child",), 128 + 9, "rank 1 of 2 was killed by SIGKILL", marks=pytest.mark.slow
        ),
        pytest.param(
            ("leave_slowly",), 3, "rank 1 of 2 exited with exit code 3", marks=pytest.mark.slow
        ),
    ],
)
def test_popen_passes_exit_codes_on_and_names_the_cause(popen, action, code, words):
    process = popen("popen", *action)
    assert process.returncode == code
    assert words in process.stderr


def test_the_last_line_of_a_script_names_the_rank_that_ended_early(popen):
    process = popen("popen", "leave_early")
    assert process.returncode == 1
    last_line = process.stderr.rstrip().splitlines()[-1]
    assert "rank 1 of 2 exited with exit code 0: it ended early" in last_line


def test_a_script_without_a_guard_can_fork(popen):
    process = popen("fork", script="unguarded.py")
    assert process.returncode == 0, process.stderr
    assert process.stdout == "result 42\n"


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_a_script_without_a_guard_gets_an_error_that_shows_the_guard(popen, method):
    process = popen(method, script="unguarded.py")
    assert process.returncode == 1
    assert "if __name__ == '__main__':" in process.stderr
    assert not re.search("freeze_support|bootstrapping", process.stderr)


# -- a rank that aborts ---------------------------------------------------------------------------


def reduce_unequal_lengths(fabric: Fabric) -> None:
    fabric.barrier()
    length = 4
    if fabric.global_rank == 1:
        length = 100_000
    dist.all_reduce(torch.ones(length))


def test_the_report_of_a_rank_that_aborted_says_what_each_rank_was_calling() -> None:
    with pytest.raises(RankFailedError, match="was killed by SIGABRT") as caught:
        run_in_ranks(reduce_unequal_lengths, launcher="forkserver")
    text = str(caught.value)
    assert "FABRIC_CHECK=1" in text
    assert "The reason is on standard error" in text
    call = r"test_launchers_failures\.py:\d+: dist\.all_reduce\(torch\.ones\("
    for rank in range(2):
        assert re.search(f"    rank {rank}: .*{call}", text)
    assert text.count("hread 0x") == 1
    assert "fabric-watchdog" not in text


# -- children of ranks ----------------------------------------------------------------------------


class MetricsOfJob(Dataset[float]):
    """A dataset whose items are collectives."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        return self._fabric.all_reduce(float(index))


def collectives_of_children(fabric: Fabric) -> tuple[str, str]:
    in_worker = outcome(lambda: list(DataLoader(MetricsOfJob(fabric), num_workers=1)))
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, outcome(fabric.barrier).encode())
        os._exit(0)
    os.wait()
    return in_worker, os.read(reading, 10_000).decode()


def test_a_collective_in_a_child_of_a_rank_is_an_error() -> None:
    for in_worker, in_child in run_in_ranks(collectives_of_children):
        assert in_worker.startswith("UsageError: Caught UsageError in DataLoader worker process 0.")
        assert "all_reduce in process " in in_worker
        assert in_child.startswith("UsageError: barrier in process ")

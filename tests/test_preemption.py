"""``should_stop`` agrees on every rank, for signals, ``time_limit`` and the end of a SLURM job."""

import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fabric import Fabric
from fabric.errors import ConfigurationError, UsageError
from fabric.launchers.preemption import slurm_deadline
from fabric.launchers.rank import PREEMPTED
from tests.faults.jobs import Ended, Job
from tests.ranks import run_in_ranks

SCRIPT = Path(__file__).parent / "scripts" / "preempted.py"
FABRIC_RUN = [
    "-m",
    "fabric",
    "run",
    "--accelerator=cpu",
    "--devices=2",
    "--max-restarts=2",
]


def command(launcher: str) -> list[str]:
    """Return the command that starts the script with a launcher, without the script's folder."""
    if launcher == "run":
        return [sys.executable, *FABRIC_RUN, str(SCRIPT), "popen"]
    return [sys.executable, str(SCRIPT), launcher]


@pytest.fixture
def without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)


# -- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR2"])
def test_a_signal_counts_from_the_first_should_stop_to_teardown(
    name: str, without_slurm: None
) -> None:
    number = signal.Signals[name]
    heard = []
    handler_before = signal.signal(number, lambda *_: heard.append(name))
    try:
        with Fabric(accelerator="cpu", devices=1) as fabric:
            os.kill(os.getpid(), number)
            assert not fabric.should_stop
            os.kill(os.getpid(), number)
            assert fabric.should_stop
            assert fabric.should_stop
        os.kill(os.getpid(), number)
    finally:
        signal.signal(number, handler_before)
    assert heard == [name] * 3, "the handler of the user is called every time"


def test_a_handler_of_the_user_comes_back_though_another_thread_tears_down(
    without_slurm: None,
) -> None:
    heard: list[str] = []
    handlers_before = {}
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        handlers_before[number] = signal.getsignal(number)
    signal.signal(signal.SIGUSR2, lambda *_: heard.append("SIGUSR2"))
    try:
        fabric = Fabric(accelerator="cpu", devices=1)
        assert not fabric.should_stop
        thread = threading.Thread(target=fabric.teardown)
        thread.start()
        thread.join()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
    assert heard == ["SIGUSR2", "SIGUSR2"]


def test_sigusr1_asks_to_stop_only_under_slurm(
    without_slurm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []
    handler_before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        with Fabric(accelerator="cpu", devices=1) as fabric:
            assert not fabric.should_stop
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not fabric.should_stop
        end_of_job = int(time.time()) + 600
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(end_of_job))
        with Fabric(accelerator="cpu", devices=1) as fabric:
            assert not fabric.should_stop
            os.kill(os.getpid(), signal.SIGUSR1)
            assert fabric.should_stop
    finally:
        signal.signal(signal.SIGUSR1, handler_before)
    assert heard == [1, 1]


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [(0.2, 0.2), (timedelta(seconds=0.2), 0.2), ("00:00:01", 1)],
    ids=["seconds", "timedelta", "text"],
)
def test_a_time_limit_is_counted_from_the_making_of_the_fabric(
    limit: Any, seconds: float, without_slurm: None
) -> None:
    began = time.monotonic()
    with Fabric(accelerator="cpu", devices=1, time_limit=limit) as fabric:
        while not fabric.should_stop:
            assert time.monotonic() < began + 150
    assert time.monotonic() - began >= seconds


def test_in_another_thread_a_time_limit_counts_and_signals_keep_their_meaning(
    without_slurm: None,
) -> None:
    handlers = []

    def loop() -> None:
        with pytest.warns(UserWarning, match="read it in the main thread first"):
            _ = fabric.should_stop
        handlers.append(signal.getsignal(signal.SIGUSR2))
        while not fabric.should_stop:
            time.sleep(0.01)

    with Fabric(accelerator="cpu", devices=1, time_limit=0.1) as fabric:
        thread = threading.Thread(target=loop)
        thread.start()
        thread.join(150)
        assert not thread.is_alive()
    assert handlers == [signal.SIG_DFL]


@pytest.mark.parametrize(
    "limit", [0, -5, "90", "1:2", "00:99:00", "soon", [60], math.nan, "0-00:00:00"]
)
@pytest.mark.parametrize("name", ["time_limit", "stop_margin"])
def test_what_is_no_duration_is_refused_before_anything_starts(name: str, limit: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"Fabric\({name}=.*\n.*\n.*D-HH:MM:SS"):
        Fabric(accelerator="cpu", devices=1, **{name: limit})


# -- SLURM ----------------------------------------------------------------------------------------


def job(**slurm_variables: object) -> dict[str, str]:
    """Return the variables of job 17 of SLURM."""
    env = {"SLURM_JOB_ID": "17"}
    for name, value in slurm_variables.items():
        env[f"SLURM_{name}"] = str(value)
    return env


def seconds_until_stop(env: Mapping[str, str], margin: timedelta | None = None) -> float:
    deadline = slurm_deadline(env, margin, rank=1)
    return deadline - time.monotonic()


@pytest.mark.parametrize(
    ("seconds_left", "margin", "expected"),
    [
        (3600, None, 3540),
        (3600, timedelta(seconds=600), 3000),
        (40, None, 20),
    ],
)
def test_a_slurm_job_stops_in_time_before_its_end(
    seconds_left: int, margin: timedelta | None, expected: float
) -> None:
    end = int(time.time()) + seconds_left
    actual = seconds_until_stop(job(JOB_END_TIME=end), margin)
    # The tolerance is for the time between the two readings of the clock.
    assert actual == pytest.approx(expected, abs=15)


@pytest.mark.parametrize("margin", [None, timedelta(seconds=600)])
def test_a_slurm_job_without_an_end_has_no_deadline(margin: timedelta | None) -> None:
    assert seconds_until_stop(job(), margin) == math.inf


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (job(JOBID=18, JOB_END_TIME="soon"), "SLURM_JOB_ID=17, SLURM_JOBID=18, "),
        (
            job(JOB_END_TIME="soon"),
            "SLURM_JOBID=17, and the end is in [0-9]* s\n.*a margin that is shorter",
        ),
        (job(JOB_END_TIME=1_000_000_000), "the end is in -[0-9]* s\n.*\n.*unset SLURM_JOB_ID"),
        (job(JOB_END_TIME="tomorrow"), "SLURM_JOB_END_TIME='tomorrow'"),
    ],
    ids=["two jobs", "shorter than the margin", "is over", "no time"],
)
def test_variables_of_slurm_that_cannot_be_true_are_one_error(
    env: dict[str, str], words: str
) -> None:
    if env["SLURM_JOB_END_TIME"] == "soon":
        env = env | {"SLURM_JOB_END_TIME": str(int(time.time()) + 100)}
    with pytest.raises(ConfigurationError, match=words):
        slurm_deadline(env, timedelta(seconds=600))


# A controller that appends its arguments to a file, and prints $ANSWER or fails without an answer.
CONTROLLER = """#!/bin/sh
echo "$@" >> {calls}
[ -n "$ANSWER" ] || {{ echo "no job" >&2; exit 1; }}
echo "$ANSWER"
"""


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_slurm: None) -> Path:
    """Put a fake ``scontrol`` on the path; return the file to which it writes its calls."""
    fake = tmp_path / "bin" / "scontrol"
    calls = tmp_path / "calls"
    fake.parent.mkdir()
    fake.write_text(CONTROLLER.format(calls=calls))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    return calls


def answer_with_end(end: str) -> str:
    return f"JobId=17 StartTime=2026-01-01T00:00:00 EndTime={end} Deadline=N/A"


def test_the_controller_is_called_where_the_environment_does_not_say_the_end(
    controller: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_time = time.localtime(time.time() + 1000)
    end = time.strftime("%Y-%m-%dT%H:%M:%S", local_time)
    monkeypatch.setenv("ANSWER", answer_with_end(end))
    deadline = slurm_deadline(os.environ)
    assert deadline - time.monotonic() == pytest.approx(940, abs=50)
    monkeypatch.setenv("ANSWER", answer_with_end("Unknown"))
    assert slurm_deadline(os.environ) == math.inf
    assert controller.read_text() == "show job -o 17\n" * 2


def test_a_controller_that_fails_means_no_deadline_and_a_warning(controller: Path) -> None:
    warning = "the end of job 17 of SLURM is not known; pass time_limit= instead"
    with pytest.warns(UserWarning, match=warning):
        assert slurm_deadline(os.environ) == math.inf


def test_a_controller_that_fails_warns_at_the_line_that_reads_should_stop(controller: Path) -> None:
    with (
        pytest.warns(UserWarning, match="the end of job 17 of SLURM is not known") as warned,
        Fabric(accelerator="cpu", devices=1) as fabric,
    ):
        assert not fabric.should_stop
    [warning] = warned
    assert Path(warning.filename) == Path(__file__)


def exit_code_of_preempted(requeue: bool) -> Any:
    with pytest.raises(SystemExit) as caught:
        Fabric(accelerator="cpu", devices=1).exit_preempted(requeue)
    return caught.value.code


def test_a_preempted_job_is_put_back_into_the_queue_with_requeue(
    controller: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exit_code_of_preempted(requeue=False) == PREEMPTED
    assert not controller.exists()
    # Another code would make `fabric run --max-restarts` restart ranks that have saved.
    with pytest.warns(UserWarning, match=r"scontrol requeue 17\n.*no job") as warned:
        assert exit_code_of_preempted(requeue=True) == PREEMPTED
    assert Path(warned[0].filename) == Path(__file__)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "15")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("ANSWER", "done")
    assert exit_code_of_preempted(requeue=True) == PREEMPTED
    assert controller.read_text() == "requeue 17\nrequeue 15_3\n", "one task, not all of the array"


# -- several ranks --------------------------------------------------------------------------------


def stop_together(fabric: Fabric, number: int | None, in_a_thread: bool) -> int:
    """Read should_stop until it is true, with a signal to rank 1; return the number of reads."""
    reads = 0
    delays = random.Random(fabric.global_rank)

    def loop() -> None:
        nonlocal reads
        while True:
            reads += 1
            if fabric.should_stop:
                return
            if reads == 20 and number is not None and fabric.global_rank == 1:
                os.kill(os.getpid(), number)
            time.sleep(delays.random() / 100)

    if in_a_thread:
        thread = threading.Thread(target=loop)
        thread.start()
        thread.join()
    else:
        loop()
    assert fabric.should_stop, "should_stop stays true"
    return reads


def stop_without_rank_1(fabric: Fabric) -> bool:
    assert not fabric.should_stop
    fabric.barrier()
    if fabric.global_rank == 1:
        fabric.teardown()
        return True
    os.kill(os.getpid(), signal.SIGTERM)
    deadline = time.monotonic() + 150
    while not fabric.should_stop:
        assert time.monotonic() < deadline, "rank 0 waited for a rank that had ended"
        time.sleep(0.01)
    return True


@pytest.mark.parametrize(
    ("number", "in_a_thread", "limit"),
    [(signal.SIGTERM, False, None), (signal.SIGUSR2, True, None), (None, False, 0.5)],
    ids=["SIGTERM", "SIGUSR2 beside a loop in a thread", "time limit"],
)
def test_all_ranks_stop_at_the_same_call_though_only_one_has_the_signal(
    number: Any, in_a_thread: bool, limit: Any
) -> None:
    first, second = run_in_ranks(stop_together, number, in_a_thread, time_limit=limit)
    assert first == second
    if number is not None:
        assert first > 20


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    results = run_in_ranks(stop_without_rank_1)
    assert results == [True, True]


def read_should_stop_on_rank_0(fabric: Fabric) -> str:
    """Let rank 0 alone read should_stop; return the text of the error that it gets."""
    store = fabric.strategy.runtime.store
    deadline = time.monotonic() + 150
    error = ""
    if fabric.global_rank == 1:
        while store.get_nowait("done") is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return ""
    assert not fabric.should_stop
    os.kill(os.getpid(), signal.SIGTERM)
    while not error and time.monotonic() < deadline:
        try:
            assert not fabric.should_stop
        except UsageError as caught:
            error = "\n".join([str(caught), *caught.__notes__])
    store.set("done", "yes")
    return error


def test_a_rank_that_never_reads_should_stop_is_named() -> None:
    error, _ = run_in_ranks(read_should_stop_on_rank_0, timeout=2, watchdog=0)
    assert "a rank has not read it within the timeout" in error
    assert "not reached by: rank 1" in error
    assert "rank 1: in no collective at " in error


# -- launchers ------------------------------------------------------------------------------------


def step_of_preempted(ended: Ended) -> str:
    """Return the step that both ranks saved, and fail unless the job ended as preempted."""
    steps = {}
    for line in ended.output:
        if line.startswith("saved"):
            _, rank, step = line.split()
            assert rank not in steps
            steps[rank] = step
    assert steps.keys() == {"0", "1"}, ended.errors
    assert steps["0"] == steps["1"], "the ranks stopped at different steps"
    assert ended.errors == ""
    assert ended.code == PREEMPTED
    return steps["0"]


SLOW = pytest.mark.slow
SOAK = [pytest.mark.slow, pytest.mark.soak]


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        ("run", "SIGTERM"),
        pytest.param("fork", "SIGUSR2", marks=SLOW),
        pytest.param("popen", "SIGUSR2", marks=SLOW),
        pytest.param("forkserver", "SIGTERM", marks=SOAK),
        pytest.param("spawn", "SIGUSR2", marks=SOAK),
        pytest.param("spawn", "SIGHUP", marks=SOAK),
    ],
)
def test_a_launcher_passes_a_signal_on_and_ends_as_its_ranks(
    launcher: str, name: str, tmp_path: Path
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    checkpoints = tmp_path / "checkpoints"
    with Job(temporary, [*command(launcher), str(checkpoints)]) as running:
        time_of_signal = running.signal(signal.Signals[name])
        ended = running.end(time_of_signal)
    step = step_of_preempted(ended)
    latest = (checkpoints / "latest").read_text().strip()
    assert latest.endswith(f"-step-{step}")


BOTH_RANKS = 2


def save_when_preempted(
    fabric: Fabric, path: str, source: str, target: int, seed: int
) -> tuple[int, int]:
    """Train until should_stop, then save. Return the step, and the step in the checkpoint."""
    step = 0
    model = torch.zeros(1)
    delays = random.Random(seed + fabric.global_rank)
    has_signal = source != "time" and target in (fabric.global_rank, BOTH_RANKS)
    while not fabric.should_stop:
        step += 1
        if step % 3 == 0:
            model += fabric.all_reduce(torch.ones(1))
        if has_signal and step == 1 + seed % 20:
            os.kill(os.getpid(), signal.Signals[source])
        time.sleep(delays.random() / 50)
    fabric.save(path, {"model": model, "step": step})
    content = fabric.load(path)
    return step, content["step"]


@pytest.mark.slow
@pytest.mark.parametrize("tries", [10, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.timeout(1500)
def test_all_ranks_save_the_same_step_under_load(tries: int, tmp_path: Path) -> None:
    generator = random.Random(tries)
    path = str(tmp_path / "last")
    busy_loop = [sys.executable, "-c", "while True: pass"]
    busy_processes = [psutil.Popen(busy_loop) for _ in range(2)]
    try:
        for seed in range(tries):
            source = ["SIGTERM", "SIGUSR2", "time"][seed % 3]
            target = generator.choice([0, 1, BOTH_RANKS])
            limit = None
            if source == "time":
                limit = generator.random() + 0.1
            first, second = run_in_ranks(
                save_when_preempted, path, source, target, seed, time_limit=limit
            )
            step, saved_step = first
            assert saved_step == step
            assert second == first
    finally:
        for process in busy_processes:
            process.kill()
            process.wait()

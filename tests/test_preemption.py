"""``should_stop``, ``time_limit`` and ``exit_preempted``: the same step on every rank, one exit code."""

import math
import os
import random
import signal
import sys
import threading
import time
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
from tests.faults.jobs import Job
from tests.ranks import run_in_ranks

SCRIPT = Path(__file__).parent / "scripts" / "preempted.py"
LAUNCH = {
    **{
        method: [sys.executable, str(SCRIPT), method]
        for method in ("popen", "spawn", "fork", "forkserver")
    },
    "run": [
        sys.executable,
        *["-m", "fabric", "run", "--accelerator=cpu", "--devices=2", "--max-restarts=2"],
        str(SCRIPT),
        "popen",
    ],
}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


# -- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR2"])
def test_a_signal_is_noted_from_the_first_question_to_teardown(name: str, alone: None) -> None:
    number = signal.Signals[name]
    heard = []
    before = signal.signal(number, lambda *_: heard.append(name))
    try:
        with Fabric(accelerator="cpu", devices=1) as fabric:
            os.kill(os.getpid(), number)
            asked = [fabric.should_stop]
            os.kill(os.getpid(), number)
            asked += [fabric.should_stop, fabric.should_stop]
        os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)
    assert asked == [False, True, True]
    assert heard == [name] * 3, "the handler of the user is called all the same"


def test_a_handler_of_the_user_comes_back_though_another_thread_tears_down(alone: None) -> None:
    heard: list[str] = []
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
    }
    signal.signal(signal.SIGUSR2, lambda *_: heard.append("mine"))
    try:
        fabric = Fabric(accelerator="cpu", devices=1)
        assert not fabric.should_stop
        thread = threading.Thread(target=fabric.teardown)
        thread.start()
        thread.join()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heard == ["mine", "mine"]


def test_sigusr1_asks_to_stop_under_slurm_alone(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    asked = []
    try:
        for env in ({}, {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 600)}):
            for variable, value in env.items():
                monkeypatch.setenv(variable, value)
            with Fabric(accelerator="cpu", devices=1) as fabric:
                asked.append(fabric.should_stop)
                os.kill(os.getpid(), signal.SIGUSR1)
                asked.append(fabric.should_stop)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert asked == [False, False, False, True]
    assert heard == [1, 1]


@pytest.mark.parametrize("limit", [0.2, timedelta(seconds=0.2), "00:00:01"])
def test_a_time_limit_is_counted_from_the_making_of_the_fabric(limit: Any, alone: None) -> None:
    began = time.monotonic()
    with Fabric(accelerator="cpu", devices=1, time_limit=limit) as fabric:
        while not fabric.should_stop:
            assert time.monotonic() < began + 30
    assert time.monotonic() - began >= (1 if limit == "00:00:01" else 0.2)


def test_in_another_thread_a_time_limit_counts_and_signals_keep_their_meaning(alone: None) -> None:
    asked: list[Any] = []

    def loop() -> None:
        with pytest.warns(UserWarning, match="read it in the main thread first"):
            asked.append(fabric.should_stop)
        asked.append(signal.getsignal(signal.SIGUSR2))
        while not fabric.should_stop:
            time.sleep(0.01)

    with Fabric(accelerator="cpu", devices=1, time_limit=0.1) as fabric:
        thread = threading.Thread(target=loop)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    assert asked[1] == signal.SIG_DFL


@pytest.mark.parametrize(
    "limit", [0, -5, "90", "1:2", "00:99:00", "soon", [60], math.nan, "0-00:00:00"]
)
def test_what_is_no_time_limit_is_refused_before_anything_starts(limit: Any) -> None:
    for name in ("time_limit", "stop_margin"):
        with pytest.raises(ConfigurationError, match=rf"Fabric\({name}=.*\n.*\n.*D-HH:MM:SS"):
            Fabric(accelerator="cpu", devices=1, **{name: limit})


# -- SLURM ----------------------------------------------------------------------------------------


def job(**more: Any) -> dict[str, str]:
    return {"SLURM_JOB_ID": "17", **{f"SLURM_{name}": str(value) for name, value in more.items()}}


@pytest.mark.parametrize(
    ("left", "margin", "expected"),
    [
        (3600, None, 3540),
        (3600, 600, 3000),
        (40, None, 20),
        (None, None, math.inf),
        (None, 600, math.inf),
    ],
)
def test_a_slurm_job_stops_in_time_before_its_end(left: Any, margin: Any, expected: float) -> None:
    env = job() if left is None else job(JOB_END_TIME=int(time.time()) + left)
    margin = None if margin is None else timedelta(seconds=margin)
    assert slurm_deadline(env, margin, rank=1) - time.monotonic() == pytest.approx(expected, abs=2)


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
    soon = {name: str(int(time.time()) + 100) for name, value in env.items() if value == "soon"}
    with pytest.raises(ConfigurationError, match=words):
        slurm_deadline(env | soon, timedelta(seconds=600))


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None) -> Path:
    """A ``scontrol`` that notes how it was called, in the file that this is, and answers from ANSWER or fails."""
    fake = tmp_path / "bin" / "scontrol"
    notes = tmp_path / "calls"
    fake.parent.mkdir()
    fake.write_text(
        f'#!/bin/sh\necho "$@" >> {notes}\n[ -n "$ANSWER" ] || {{ echo "no job" >&2; exit 1; }}\necho "$ANSWER"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    return notes


def test_the_controller_is_asked_where_the_environment_does_not_say_the_end(
    controller: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 1000))
    actual = []
    for shown in (end, "Unknown"):
        monkeypatch.setenv(
            "ANSWER", f"JobId=17 StartTime=2026-01-01T00:00:00 EndTime={shown} Deadline=N/A"
        )
        actual.append(slurm_deadline(os.environ) - time.monotonic())
    assert actual[0] == pytest.approx(940, abs=3)
    assert actual[1] == math.inf
    assert controller.read_text() == "show job -o 17\n" * 2
    monkeypatch.delenv("ANSWER")
    with pytest.warns(
        UserWarning, match="the end of job 17 of SLURM is not known; pass time_limit= instead"
    ):
        assert slurm_deadline(os.environ) == math.inf


def test_a_controller_that_fails_warns_at_the_line_that_reads_should_stop(controller: Path) -> None:
    with (
        pytest.warns(UserWarning, match="the end of job 17 of SLURM is not known") as warned,
        Fabric(accelerator="cpu", devices=1) as fabric,
    ):
        assert not fabric.should_stop
    assert [Path(warning.filename) for warning in warned] == [Path(__file__)]


def preempted(requeue: bool) -> Any:
    with pytest.raises(SystemExit) as leaving:
        Fabric(accelerator="cpu", devices=1).exit_preempted(requeue)
    return leaving.value.code


def test_a_preempted_job_is_put_back_into_the_queue_when_asked_to(
    controller: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert preempted(requeue=False) == PREEMPTED
    assert not controller.exists()
    with pytest.raises(UsageError, match=r"scontrol requeue 17\n.*no job"):
        Fabric(accelerator="cpu", devices=1).exit_preempted(requeue=True)
    for name, value in {
        "SLURM_ARRAY_JOB_ID": "15",
        "SLURM_ARRAY_TASK_ID": "3",
        "ANSWER": "done",
    }.items():
        monkeypatch.setenv(name, value)
    assert preempted(requeue=True) == PREEMPTED
    assert controller.read_text() == "requeue 17\nrequeue 15_3\n", "not the whole array"


# -- several ranks --------------------------------------------------------------------------------


def stop_together(fabric: Fabric, number: int | None, thread: bool) -> int:
    calls = 0
    delays = random.Random(fabric.global_rank)

    def loop() -> None:
        nonlocal calls
        while True:
            calls += 1
            if fabric.should_stop:
                return
            if calls == 20 and number is not None and fabric.global_rank == 1:
                os.kill(os.getpid(), number)
            time.sleep(delays.random() / 100)

    if thread:
        beside = threading.Thread(target=loop)
        beside.start()
        beside.join()
    else:
        loop()
    assert fabric.should_stop, "it stays so"
    return calls


def one_is_done_before(fabric: Fabric) -> bool:
    assert not fabric.should_stop
    fabric.barrier()
    if fabric.global_rank == 1:
        fabric.teardown()
        return True
    os.kill(os.getpid(), signal.SIGTERM)
    until = time.monotonic() + 30
    while not fabric.should_stop:
        assert time.monotonic() < until, "it waited for a rank that had ended"
        time.sleep(0.01)
    return True


@pytest.mark.parametrize(
    ("number", "thread", "limit"),
    [(signal.SIGTERM, False, None), (signal.SIGUSR2, True, None), (None, False, 1.5)],
    ids=["SIGTERM", "SIGUSR2 beside a loop in a thread", "time limit"],
)
def test_all_ranks_stop_at_the_same_call_though_one_alone_is_asked(
    number: Any, thread: bool, limit: Any
) -> None:
    first, second = run_in_ranks(stop_together, number, thread, time_limit=limit)
    assert first == second > 20


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    assert run_in_ranks(one_is_done_before) == [True, True]


def one_never_asks(fabric: Fabric) -> str:
    store = fabric.strategy.runtime.store
    until = time.monotonic() + 60
    error = ""
    if fabric.global_rank == 1:
        while store.get_nowait("done") is None and time.monotonic() < until:
            time.sleep(0.01)
        return ""
    assert not fabric.should_stop
    os.kill(os.getpid(), signal.SIGTERM)
    while not error and time.monotonic() < until:
        try:
            assert not fabric.should_stop
        except UsageError as caught:
            error = "\n".join([str(caught), *caught.__notes__])
    store.set("done", "yes")
    return error


def test_a_rank_that_never_asks_is_named() -> None:
    error, _ = run_in_ranks(one_never_asks, timeout=2, watchdog=0)
    assert "a rank has not read it within the timeout" in error
    assert "not reached by: rank 1" in error
    assert "rank 1: in no collective at " in error


# -- launchers ------------------------------------------------------------------------------------


def assert_preempted(ended: Any) -> str:
    saved = sorted(line.split()[1:] for line in ended.output if line.startswith("saved"))
    assert [rank for rank, _ in saved] == ["0", "1"], ended.errors
    assert saved[0][1] == saved[1][1], "the ranks stopped at different steps"
    assert (ended.code, ended.errors) == (PREEMPTED, "")
    return saved[0][1]


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        ("fork", "SIGUSR2"),
        ("run", "SIGTERM"),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("popen", "SIGUSR2"), ("forkserver", "SIGTERM"))
        ],
        *[
            pytest.param("spawn", name, marks=[pytest.mark.slow, pytest.mark.soak])
            for name in ("SIGUSR2", "SIGHUP")
        ],
    ],
)
def test_a_launcher_passes_a_signal_on_and_ends_as_its_ranks(
    launcher: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    with Job(tmp_path / "tmp", [*LAUNCH[launcher], str(tmp_path / "kept")]) as started:
        step = assert_preempted(started.end(started.signal(signal.Signals[name])))
    assert (tmp_path / "kept" / "latest").read_text().strip().endswith(f"-step-{step}")


def save_when_asked_to(
    fabric: Fabric, path: str, source: str, target: int, seed: int
) -> tuple[int, int]:
    step = 0
    model = torch.zeros(1)
    delays = random.Random(seed + fabric.global_rank)
    while not fabric.should_stop:
        step += 1
        if step % 3 == 0:
            model += fabric.all_reduce(torch.ones(1))
        if step == 1 + seed % 20 and source != "time" and target in (fabric.global_rank, 2):
            os.kill(os.getpid(), signal.Signals[source])
        time.sleep(delays.random() / 50)
    fabric.save(path, {"model": model, "step": step})
    return step, fabric.load(path)["step"]


@pytest.mark.slow
@pytest.mark.parametrize("tries", [10, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.timeout(1500)
def test_all_ranks_save_the_same_step_under_load(tries: int, tmp_path: Path) -> None:
    choose = random.Random(tries)
    busy = [sys.executable, "-c", "while True: pass"]
    load = [psutil.Popen(busy) for _ in range(2)]
    try:
        for seed in range(tries):
            # one rank, or both
            source = ["SIGTERM", "SIGUSR2", "time"][seed % 3]
            target = choose.randrange(3)
            limit = choose.random() + 0.1 if source == "time" else None
            first, second = run_in_ranks(
                save_when_asked_to, str(tmp_path / "last"), source, target, seed, time_limit=limit
            )
            assert first == second == (first[0], first[0])
    finally:
        for one in load:
            one.kill()
            one.wait()

"""When a rank waits for long, the first rank prints which ranks made the call, which did not, and where those are."""

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fabric
from fabric import Fabric
from fabric._plan import resolve_plan
from fabric.diagnostics import stacks
from fabric.diagnostics.hang_report import HangReporter, RankState, compose_report
from fabric.diagnostics.recorder import HEADING, FlightRecorder
from fabric.diagnostics.stacks import StackAddress, Stacks, read_stack
from fabric.errors import ConfigurationError
from fabric.store import JobStore
from fabric.strategies import DDPStrategy
from tests.ranks import outcome, run_in_ranks

NEVER = threading.Event()


# -- the report -----------------------------------------------------------------------------------


def state(place="in no collective", number=0, *, inside=True, **others):
    return RankState(place, is_inside=inside, key="job", counts={"job": number}, **others)


def test_a_report_names_the_ranks_that_made_the_call_and_shows_the_stacks_of_the_others():
    states = {
        0: state("in barrier('a') at t.py:1", 3, seconds_waited=60, stack="zero"),
        1: state(stack="one"),
        2: state(),
    }
    report = compose_report(states, requester=0)
    assert "rank 0 of 3 has waited 60 s in barrier('a') at t.py:1" in report
    assert "reached by: rank 0\n  not reached by: ranks 1, 2" in report
    assert "    one" in report
    assert "zero" not in report


def test_a_step_that_was_left_by_an_error_is_over_with_the_next_phase():
    record = FlightRecorder()
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    optimizer.register_step_pre_hook(record.enter_step)
    optimizer.register_step_post_hook(record.exit_step)
    phases = []

    def evaluate():
        with record.record_phase("forward"):
            phases.append(record.phase)
        phases.append(record.phase)

    def fail(*_):
        raise ZeroDivisionError

    optimizer.step(evaluate)
    optimizer.register_step_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    evaluate()
    assert phases == ["forward", None, "forward", None]


def test_a_stack_has_the_callers_of_should_stop_but_not_those_of_the_rank():
    folder = f"{Path(fabric.__file__).parent}/launchers"
    frames = [
        f'File "{folder}/preemption.py", line 1 in is_due',
        'File "train.py", line 2 in train',
    ]
    launcher_frame = f'File "{folder}/rank.py", line 3 in run'
    lines = "".join(f"  {frame}\n" for frame in [*frames, launcher_frame])
    dump = f"Thread 0x000000000001 (most recent call first):\n{lines}"
    assert stacks._frames_of_thread(dump.encode(), 1) == "\n".join(frames)


def test_a_report_of_a_group_is_about_its_members():
    states = {
        rank: state("in all_reduce", 3 if rank == 2 else 0, members=(1, 2)) for rank in range(4)
    }
    assert "reached by: rank 2\n  not reached by: rank 1\n" in compose_report(states, requester=2)


def test_ranks_that_wait_inside_of_the_same_phase_are_all_shown():
    report = compose_report(
        {rank: state("in forward", 3, stack=f"stack {rank}") for rank in range(2)}, requester=1
    )
    assert "every rank has reached it" in report
    assert "stack 0" in report
    assert "stack 1" in report


def test_a_rank_that_only_computes_while_nobody_is_behind_it_makes_no_report():
    assert compose_report({0: state(number=3, inside=False), 1: state(number=3)}, requester=0) == ""


def test_a_report_of_many_ranks_stays_short_and_shows_the_missing_ones():
    states = {
        rank: state("in all_reduce", 3 * (rank != 4000), stack="a\nb") for rank in range(4096)
    }
    report = compose_report(states, requester=0)
    assert len(report) < 2000
    assert "rank 4000: in all_reduce\n      a" in report


# -- real ranks -----------------------------------------------------------------------------------


def report_number(fabric, number):
    """Wait for a report, with Python code and no collective."""
    until = time.monotonic() + 30
    while (text := fabric.strategy.runtime.store.get_nowait(f"watchdog/report/{number}")) is None:
        assert time.monotonic() < until, "no report came"
        NEVER.wait(0.01)
    return text.decode()


def stall(fabric, number, action):
    """Rank 0 is in ``action`` while rank 1 comes to it only after the report; the text."""
    if fabric.global_rank == 1:
        report_number(fabric, number)
    action()
    return report_number(fabric, number)


def stall_in_turn(fabric):
    model, optimizer = fabric.setup(
        model := nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    fabric.all_reduce(1.0)
    texts = [stall(fabric, 1, lambda: fabric.barrier("saved"))]
    for _ in range(2):
        fabric.backward(model(torch.ones(4, 2)).mean())
        optimizer.step()
    loss = model(torch.ones(4, 2)).mean()
    texts.append(stall(fabric, 2, lambda: fabric.backward(loss)))
    texts.append(
        stall(
            fabric, 3, lambda: fabric.recv(1) if fabric.global_rank == 0 else fabric.send("late", 0)
        )
    )
    group = fabric.new_group([0, 1])
    texts.append(stall(fabric, 4, lambda: group.gather_objects(1)))
    if fabric.global_rank == 1:
        hold_the_interpreter()
    fabric.barrier()
    return [*texts, report_number(fabric, 5)]


def hold_the_interpreter():
    import ctypes

    ctypes.PyDLL(None).sleep(60)  # keeps the interpreter's lock; the request for the stack ends it


def test_a_rank_that_makes_no_call_is_named_with_its_stack_once(capfd):
    [texts, _] = run_in_ranks(stall_in_turn, launcher="forkserver", watchdog=0.3)
    barrier, backward, message, group, held = texts
    assert "in barrier('saved') at tests/test_watchdog.py" in barrier
    assert "reached by: rank 0\n  not reached by: rank 1\n" in barrier
    assert "rank 1: in no collective at " in barrier
    assert "its latest collective was all_reduce at " in barrier
    assert barrier.count('" in report_number') + barrier.count(" in report_number") >= 1
    assert " in _run_in_rank" not in barrier
    assert "has waited 0.3 s in backward at tests/test_watchdog.py" in backward
    assert "rank 0: in backward at " in backward
    assert ", step 3" in backward
    assert "its latest phase was forward of Linear" in backward
    assert "rank 0 of 2 has waited 0.3 s in recv at " in message
    assert "not reached by: rank 1" in message
    assert "in gather_objects at " in group
    assert "its interpreter" in held
    assert "in hold_the_interpreter" in held
    printed = capfd.readouterr().err
    assert [printed.count(text) for text in texts] == [1] * 5
    assert printed.count(HEADING) == 5


def stall_under_fsdp(fabric):
    model = fabric.setup(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    return stall(fabric, 1, lambda: model(torch.ones(4, 2)))


def test_a_gather_of_fsdp_counts():
    [text, _] = run_in_ranks(stall_under_fsdp, strategy="fsdp", watchdog=0.3)
    assert "in forward of Sequential at tests/test_watchdog.py" in text
    assert "not reached by: rank 1" in text
    assert "its latest collective was broadcast at tests/test_watchdog.py" in text


def error_of_the_timeout(fabric, in_backward):
    model = fabric.setup(nn.Linear(2, 1))
    loss = model(torch.ones(4, 2)).mean()
    runtime = fabric.strategy.runtime
    if fabric.global_rank == 0:
        text = outcome(lambda: fabric.backward(loss) if in_backward else fabric.all_reduce(1.0))
        runtime.store.set("raised", text.encode())
    while (text := runtime.store.get_nowait("raised")) is None:
        NEVER.wait(0.01)
    return text.decode()


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_error_of_a_timeout_holds_the_report(in_backward, capfd):
    [text, _] = run_in_ranks(error_of_the_timeout, in_backward, watchdog=0, timeout=1.5)
    assert ("in backward at " if in_backward else "in all_reduce at tests/test_watchdog.py") in text
    assert "not reached by: rank 1" in text
    assert "in error_of_the_timeout" in text
    assert text.count(HEADING) == 1
    assert HEADING not in capfd.readouterr().err


def test_a_report_that_was_printed_is_in_the_error_of_the_timeout_by_its_first_lines(capfd):
    [text, _] = run_in_ranks(
        error_of_the_timeout, False, launcher="forkserver", watchdog=0.3, timeout=1.5
    )
    printed = capfd.readouterr().err
    summary = text[text.index("fabric: ") : text.index(HEADING)]
    assert "not reached by: rank 1" in summary
    assert f"{summary}{HEADING}\n" in printed
    assert "in error_of_the_timeout" in printed
    assert "in error_of_the_timeout" not in text


def what_is_there(fabric):
    return fabric.strategy.runtime.recorder is not None, [
        thread.name for thread in threading.enumerate()
    ]


def test_a_single_process_is_not_watched():
    with Fabric(accelerator="cpu", devices=1, watchdog=0.01) as fabric:
        recorded, threads = fabric.launch(what_is_there)
    assert not recorded
    assert "fabric-watchdog" not in threads


# -- SIGUSR1 --------------------------------------------------------------------------------------

SCRIPT = Path(__file__).parent / "scripts" / "hang.py"
COMMANDS = {
    **{
        method: [sys.executable, SCRIPT, method]
        for method in ("popen", "spawn", "fork", "forkserver")
    },
    "fabric run": [
        sys.executable,
        "-m",
        "fabric",
        "run",
        "--accelerator=cpu",
        "--devices=2",
        SCRIPT,
        "popen",
    ],
}
FAST = {"fork"}


@pytest.mark.parametrize(
    ("command", "slurm"),
    [
        *(
            (name, "") if name in FAST else pytest.param(name, "", marks=pytest.mark.slow)
            for name in COMMANDS
        ),
        pytest.param("fork", "17", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_process_that_launched_prints_the_report(command, slurm, monkeypatch):
    words = list(map(str, COMMANDS[command]))
    if slurm:
        monkeypatch.setenv("SLURM_JOB_ID", slurm)
        words = [
            "sh",
            "-c",
            'trap "" QUIT; exec "$@"',
            "sh",
            *words,
        ]  # as a batch script starts it with "&"
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout is not None
            assert "ready" in job.stdout.readline()
            job.send_signal(signal.SIGQUIT if slurm else signal.SIGUSR1)
            _, errors = job.communicate(timeout=60)
        finally:
            job.kill()
    assert job.returncode == 0, errors
    assert errors.count("requested by a signal") == 1
    assert "not reached by: rank 1" in errors
    assert "in barrier('end') at " in errors
    assert "in wait_for_the_report" in errors


@pytest.mark.slow
def test_sigusr1_to_any_machine_of_a_job_prints_the_report_on_the_first():
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = [
            "--num-nodes=2",
            "--main-address=127.0.0.1",
            f"--main-port={server.getsockname()[1]}",
        ]
    run = [sys.executable, "-m", "fabric", "run", "--accelerator=cpu", *where]
    jobs = [
        subprocess.Popen(
            [*run, f"--node-rank={node}", str(SCRIPT), "popen", "1", "60"],
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        assert jobs[1].stdout is not None
        assert "ready" in jobs[1].stdout.readline()
        jobs[1].send_signal(signal.SIGUSR1)
        errors = [job.communicate(timeout=60)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.communicate(timeout=60)
    assert [job.returncode for job in jobs] == [0, 0], errors
    assert "requested by a signal" in errors[0]
    assert "not reached by: rank 1" in errors[0]
    assert errors[1] == ""


# -- a group that was there before ----------------------------------------------------------------


class PlainStore(dist.Store):
    """A store of a user, on files, that cannot be cloned."""

    def __init__(self, path):
        super().__init__()
        self._files = dist.FileStore(str(path))

    def set(self, key, value):
        self._files.set(key, value)

    def get(self, key):
        return self._files.get(key)

    def add(self, key, amount):
        return self._files.add(key, amount)

    def check(self, keys):
        return self._files.check(keys)

    def wait(self, *arguments):
        self._files.wait(*arguments)

    def set_timeout(self, timeout):
        self._files.set_timeout(timeout)


def join_with_a_plain_store(fabric, folder):
    rank = fabric.global_rank
    fabric.teardown()
    store = PlainStore(folder / "store")  # torch keeps only the C++ half of it
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    refused = outcome(lambda: Fabric(accelerator="cpu", strategy="ddp", devices=2).launch())
    with Fabric(accelerator="cpu", strategy="ddp", devices=2, watchdog=0) as other:
        other.launch()
        total = other.all_reduce(rank + 1, reduce_op="sum")
        asked = [other.should_stop]
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        asked.append(other.should_stop)  # a collective, here
    dist.destroy_process_group()
    return refused, total, asked


def test_a_store_without_a_second_connection_is_refused_unless_there_is_no_watchdog(tmp_path):
    for refused, total, asked in run_in_ranks(join_with_a_plain_store, tmp_path):
        assert "ConfigurationError" in refused
        assert "clone()" in refused
        assert "watchdog=0" in refused
        assert total == 3
        assert asked == [False, True]


# -- nothing is left ------------------------------------------------------------------------------


def watchdog_of_one(**options):
    store = dist.HashStore()
    options = {"threshold": timedelta(seconds=0.1), "timeout": timedelta(seconds=10), **options}
    return store, HangReporter(JobStore(store, 0, 1), **options)


def caught_signals():
    lines = Path("/proc/self/status").read_text().splitlines()
    [caught] = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")]
    return caught & ~(0b11 << 31)  # the C library's own two


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_after_close_the_process_is_as_it_was(tmp_path):
    before = caught_signals(), sorted(os.listdir("/proc/self/fd")), faulthandler.is_enabled()
    store, watchdog = watchdog_of_one()
    watchdog.start()
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.dump_traceback_later(0.05, file=file)
        watchdog.close()
        watchdog.close()
        until = time.monotonic() + 10
        while not (tmp_path / "stacks").stat().st_size and time.monotonic() < until:
            NEVER.wait(0.01)
        assert "test_after_close" in (tmp_path / "stacks").read_text()
    assert "fabric-watchdog" not in [thread.name for thread in threading.enumerate()]
    assert (
        caught_signals(),
        sorted(os.listdir("/proc/self/fd")),
        faulthandler.is_enabled(),
    ) == before
    assert json.loads(store.get("closed/0"))[0] == "makes no further calls: it has finished"


def test_a_process_that_is_gone_or_elsewhere_has_no_stack():
    gone, zombie = [subprocess.Popen([sys.executable, "-c", ""]) for _ in range(2)]
    gone.wait(timeout=60)
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    stacks = Stacks(threading.get_ident())
    node, _, fd, thread = stacks.address
    assert "in test_a_process_that_is_gone" in stacks.dump()
    assert "in test_a_process_that_is_gone" in read_stack(stacks.address)
    stacks.close()
    assert "has ended" in read_stack(StackAddress(node, gone.pid, fd, thread))
    assert (
        "has ended" in read_stack(StackAddress(node, zombie.pid, fd, thread))
        or sys.platform != "linux"
    )
    zombie.wait(timeout=60)
    assert "another node" in read_stack(StackAddress("another", os.getpid(), fd, thread))
    assert "does not answer" in read_stack(StackAddress(node, os.getpid(), fd, thread))


# -- options --------------------------------------------------------------------------------------


def test_times_are_seconds_or_timedeltas_and_the_strategys_timeout_counts_too():
    strategy = DDPStrategy(timeout=timedelta(seconds=40))
    for timeout in (None, 40, timedelta(seconds=40)):
        plan = resolve_plan(
            accelerator="cpu", strategy=strategy, timeout=timeout, watchdog=0, env={}
        )
        assert (plan.timeout, plan.watchdog) == (timedelta(seconds=40), timedelta(0))
    assert resolve_plan(accelerator="cpu", env={}).timeout == timedelta(minutes=30)


@pytest.mark.parametrize(
    "options", [{"timeout": 0}, {"timeout": -1}, {"timeout": float("nan")}, {"watchdog": "soon"}]
)
def test_what_is_no_length_of_time_is_refused(options):
    with pytest.raises(ConfigurationError, match="not a valid length of time"):
        Fabric(accelerator="cpu", **options)


def test_two_different_timeouts_are_refused():
    with pytest.raises(ConfigurationError, match="timeout"):
        Fabric(
            accelerator="cpu",
            devices=2,
            strategy=DDPStrategy(timeout=timedelta(seconds=5)),
            timeout=6,
        )

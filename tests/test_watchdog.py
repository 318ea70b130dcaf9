"""A report about a rank that waits for long names the ranks in the call, and where others are."""

import ctypes
import faulthandler
import json
import multiprocessing
import os
import re
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
from torch.utils.data import DataLoader

import fabric
from fabric import Fabric
from fabric._plan import resolve_plan
from fabric.diagnostics import stacks
from fabric.diagnostics.deadlocks import deadlocked_ranks, describe_deadlock
from fabric.diagnostics.hang_report import compose_report
from fabric.diagnostics.hang_reporter import HangReporter
from fabric.diagnostics.rank_observer import RankObserver
from fabric.diagnostics.rank_state import RankState
from fabric.diagnostics.recorder import HEADING, FlightRecorder
from fabric.diagnostics.stacks import StackAddress, Stacks, read_stack
from fabric.errors import ConfigurationError, RankFailedError
from fabric.store import JobStore
from fabric.strategies import DDPStrategy
from tests.ranks import in_another_process, outcome, run_in_ranks
from tests.test_torch_names import WaitingDataset

NEVER = threading.Event()


# -- the report -----------------------------------------------------------------------------------


def state(place="in no collective", number=0, *, inside=True, **fields):
    return RankState(place, is_inside=inside, key="job", counts={"job": number}, **fields)


TORCH_FRAME = f'File "{torch.__file__}", line 1 in call'


def test_a_report_names_the_ranks_that_made_the_call_and_shows_the_stacks_of_the_others():
    states = {
        0: state("in barrier('a') at t.py:1", 3, seconds_waited=60, stack=TORCH_FRAME),
        1: state(stack="one"),
        2: state(),
    }
    report = compose_report(states, requester=0)
    assert "rank 0 of 3 has waited 60 s in barrier('a') at t.py:1" in report
    assert "reached by: rank 0\n  not reached by: ranks 1, 2" in report
    assert "    one" in report
    assert TORCH_FRAME not in report


def test_a_report_shows_the_users_frames_of_the_rank_that_reached_the_call():
    frames = [TORCH_FRAME, 'File "train.py", line 2 in evaluate']
    states = {
        0: state("in all_reduce at t.py:1", 3, stack="\n".join(frames), pid=7),
        1: state(stack='File "train.py", line 3 in main', pid=8),
        2: state(stack='File "train.py", line 3 in main', pid=9),
    }
    report = compose_report(states, requester=0)
    assert "rank 0: in all_reduce at t.py:1 (pid 7)" in report
    assert f"      {frames[1]}" in report
    assert frames[0] not in report
    # Ranks with equal lines are described together.
    assert "ranks 1, 2: in no collective (pids 8, 9)\n" in report
    assert report.count("line 3 in main") == 1


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


def test_a_report_folds_the_frames_of_fabric_and_torch_of_the_missing_rank():
    user_frame = 'File "train.py", line 3 in main'
    frames = [TORCH_FRAME, *[f'File "{fabric.__file__}", line 1 in run'] * 3, user_frame]
    states = {0: state("in all_reduce", 3), 1: state(stack="\n".join(frames))}
    report = compose_report(states, requester=0)
    expected = [TORCH_FRAME, "... 3 frames of fabric and torch", user_frame]
    assert "\n      ".join(expected) in report


def test_a_report_that_ends_the_job_begins_with_the_proof_whichever_rank_requests_it():
    states = {rank: state("in backward at t.py:2", 3, awaited=()) for rank in range(4)}
    states[3] = state("in all_reduce at t.py:1", 0, awaited=())
    proof = describe_deadlock(states, range(4))
    for requester in range(4):
        report = compose_report(states, requester, deadlocked=range(4))
        assert report.startswith(f"fabric: {proof}\n  rank {requester} of 4 has waited ")
        # The rank that has not reached the call need not be the one that has to make it.
        assert "reached by" not in report
    reason = "a report was requested by a signal"
    report = compose_report(states, 0, reason, deadlocked=range(4))
    assert report.startswith(f"fabric: {proof}\n  {reason}\n")


def test_a_report_by_signal_names_the_call_that_the_ranks_have_not_reached():
    states = {
        0: state("in barrier('a') at t.py:1", 3, seconds_waited=4),
        1: state("in no collective at t.py:2", inside=False),
    }
    report = compose_report(states, requester=1, reason="a report was requested by a signal")
    first_lines = report.splitlines()[:3]
    assert first_lines[0] == "fabric: a report was requested by a signal"
    assert first_lines[1] == "  rank 0 of 2 has waited 4 s in barrier('a') at t.py:1"
    assert first_lines[2] == "  reached by: rank 0"
    # No rank is in a call: rank 0 has made one call more.
    history = ", before optimizer step 1; its latest collective was barrier at t.py:1"
    states[0] = state("in no collective at t.py:2", 3, inside=False, history=history)
    report = compose_report(states, requester=1, reason="a report was requested by a signal")
    assert f"\n  rank 0 of 2: in no collective at t.py:2{history}\n  reached by: rank 0" in report


def test_a_report_of_a_group_is_about_its_members():
    states = {rank: state("in all_reduce", members=(1, 2)) for rank in range(4)}
    states[2] = state("in all_reduce", 3, members=(1, 2))
    assert "reached by: rank 2\n  not reached by: rank 1\n" in compose_report(states, requester=2)


def test_ranks_that_wait_inside_of_the_same_phase_are_all_shown():
    states = {
        0: state("in forward", 3, stack="stack 0"),
        1: state("in forward", 3, stack="stack 1"),
    }
    report = compose_report(states, requester=1)
    assert "every rank has reached this call" in report
    assert "stack 0" in report
    assert "stack 1" in report


def test_a_rank_that_only_computes_while_nobody_is_behind_it_makes_no_report():
    states = {0: state(number=3, inside=False), 1: state(number=3)}
    assert compose_report(states, requester=0) == ""


def test_a_report_by_signal_says_when_the_ranks_were_seen_at_different_steps():
    states = {
        0: state("in forward", 3, step=12),
        1: state("in backward", 3, step=14),
        2: state("it has not started"),
    }
    report = compose_report(states, requester=0, reason="a report was requested by a signal")
    assert "the ranks were seen at different steps: " in report
    # A rank that waits is seen with ranks that wait as well.
    assert "different steps" not in compose_report(states, requester=0)
    states[1] = state("in backward", 3, step=12)
    report = compose_report(states, requester=0, reason="a report was requested by a signal")
    assert "different steps" not in report


def test_a_report_of_many_ranks_stays_short_and_shows_the_missing_ones():
    states = {rank: state("in all_reduce", 3, stack=TORCH_FRAME) for rank in range(4096)}
    states[4000] = state("in all_reduce", 0, stack="a\nb")
    report = compose_report(states, requester=0)
    assert len(report) < 2000
    assert "rank 4000: in all_reduce\n      a" in report


def test_ranks_in_different_calls_are_told_apart_by_the_names_of_the_calls():
    states = {
        0: state("in all_reduce at t.py:1", 3, call="all_reduce", awaited=()),
        1: state("in barrier('end') at t.py:2", 3, call="barrier('end')", awaited=()),
        2: state("in all_reduce at t.py:1", 3, call="all_reduce", awaited=()),
    }
    report = compose_report(states, requester=0)
    assert "in its place, barrier('end') was called by rank 1\n" in report
    assert "ranks 0, 1, 2 have to make the same calls in the same order" in report
    assert "every rank has reached this call" not in report


def test_a_rank_that_has_left_the_call_in_which_another_one_waits_is_named():
    states = {0: state("in backward", 3), 1: state("in no collective", 3, inside=False)}
    report = compose_report(states, requester=0)
    assert "every rank has reached this call, and rank 1 went on" in report


WAITS_FOR_ALL = state("in barrier", 3, call="barrier", awaited=())
COMPUTES = state(inside=False)
HAS_ENDED = state(inside=False, has_ended=True)


def message(source, destination, sent=1):
    key = f"job {source}>{destination}"
    counts = {key: sent}
    awaited = (source, destination)
    return RankState("in send", is_inside=True, key=key, counts=counts, awaited=awaited)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        pytest.param([WAITS_FOR_ALL, COMPUTES], set(), id="a rank computes"),
        pytest.param([WAITS_FOR_ALL, HAS_ENDED], {0}, id="a rank has ended"),
        pytest.param(
            [WAITS_FOR_ALL, WAITS_FOR_ALL._replace(call="all_reduce")], {0, 1}, id="other calls"
        ),
        pytest.param([WAITS_FOR_ALL, WAITS_FOR_ALL], set(), id="the same call"),
        pytest.param([message(0, 1), message(1, 2), message(2, 0)], {0, 1, 2}, id="a circle"),
        pytest.param([message(0, 1), message(1, 2), COMPUTES], set(), id="a chain"),
        pytest.param([message(0, 1), message(1, 2), HAS_ENDED], {0, 1}, id="the end of a chain"),
        pytest.param([WAITS_FOR_ALL, message(1, 2), COMPUTES], set(), id="a message may arrive"),
        pytest.param([WAITS_FOR_ALL, message(1, 0)], {0, 1}, id="a message beside a barrier"),
    ],
)
def test_a_deadlock_is_found_only_if_no_rank_can_come(states, expected):
    assert deadlocked_ranks(dict(enumerate(states))) == expected


def test_the_odd_rank_of_a_deadlock_is_named_with_its_call():
    states = {rank: state("in backward at t.py:2", 3, awaited=()) for rank in range(4)}
    states[3] = state("in all_reduce at t.py:1", 3, awaited=())
    text = describe_deadlock(states, range(4))
    assert "\n  the odd one is rank 3: in all_reduce at t.py:1\n" in text
    assert text.endswith("\n  ranks 0, 1, 2: in backward at t.py:2")
    # Of two ranks in two calls, none is the odd one.
    text = describe_deadlock({0: states[0], 1: states[3]}, [0, 1])
    assert "odd" not in text
    assert "rank 0: in backward at t.py:2\n  rank 1: in all_reduce at t.py:1" in text


# -- real ranks -----------------------------------------------------------------------------------


def wait_for_report(fabric, number):
    """Wait for a report without a collective, and return its text."""
    deadline = time.monotonic() + 150
    key = f"watchdog/report/{number}"
    while True:
        report = fabric.strategy.runtime.store.get_nowait(key)
        if report is not None:
            return report.decode()
        assert time.monotonic() < deadline, "no report came"
        NEVER.wait(0.01)


# A report on the wait of rank 0 in a call that rank 1 has not made.
LEFT_ALONE = r"rank 0 of 2 has waited [0-9.]+ s in {} at .* in wait_until_reported"


def wait_for_matching_report(fabric, pattern, after=0):
    """Wait without a collective for a report that matches a pattern.

    Other reports may come before: on a busy machine, a rank that is late makes the others wait.

    Args:
        fabric: the fabric of this rank.
        pattern: a regular expression.
        after: the number of the report after which to begin.

    Returns:
        The number of the report, and its text.
    """
    number = after + 1
    while True:
        report = wait_for_report(fabric, number)
        if re.search(pattern, report, re.DOTALL):
            return number, report
        number += 1


def wait_until_key_is_set(fabric, key):
    while fabric.strategy.runtime.store.get_nowait(key) is None:
        NEVER.wait(0.01)


def wait_until_reported(fabric, pattern):
    """Tell rank 0 that this rank has left it alone, and wait for the report on rank 0."""
    fabric.strategy.runtime.store.set(f"left alone: {pattern}", b"")
    wait_for_matching_report(fabric, pattern)


def stall(fabric, call, action):
    """Run an action on rank 0, and on rank 1 only after the report; return the report.

    Args:
        fabric: the fabric of this rank.
        call: what rank 0 waits in, as a regular expression.
        action: a function without arguments.
    """
    pattern = LEFT_ALONE.format(call)
    if fabric.global_rank == 0:
        wait_until_key_is_set(fabric, f"left alone: {pattern}")
    else:
        wait_until_reported(fabric, pattern)
    action()
    _, report = wait_for_matching_report(fabric, pattern)
    return report


def stall_in_turn(fabric):
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, optimizer = fabric.setup(module, optimizer)
    fabric.all_reduce(1.0)
    reports = [stall(fabric, r"barrier\('saved'\)", lambda: fabric.barrier("saved"))]
    for _ in range(2):
        loss = module(torch.ones(4, 2)).mean()
        fabric.backward(loss)
        optimizer.step()
    loss = module(torch.ones(4, 2)).mean()
    reports.append(stall(fabric, "backward", lambda: fabric.backward(loss)))

    def pass_a_message():
        if fabric.global_rank == 0:
            fabric.recv(1)
        else:
            fabric.send("late", 0)

    reports.append(stall(fabric, "recv", pass_a_message))
    group = fabric.new_group([0, 1])
    reports.append(stall(fabric, "gather_objects", lambda: group.gather_objects(1)))
    if fabric.global_rank == 0:
        wait_until_key_is_set(fabric, "holds the interpreter")
    else:
        fabric.strategy.runtime.store.set("holds the interpreter", b"")
        hold_the_interpreter()
    fabric.barrier()
    _, blocked = wait_for_matching_report(fabric, "in hold_the_interpreter")
    return [*reports, blocked]


def hold_the_interpreter():
    # PyDLL keeps the interpreter's lock. The signal that asks for the stack ends the sleep.
    ctypes.PyDLL(None).sleep(60)


def test_a_rank_that_makes_no_call_is_named_with_its_stack_once(capfd):
    [reports, _] = run_in_ranks(stall_in_turn, launcher="forkserver", watchdog=0.3)
    barrier, backward, message, group, blocked = reports
    assert "in barrier('saved') at tests/test_watchdog.py" in barrier
    assert "reached by: rank 0\n  not reached by: rank 1\n" in barrier
    assert "rank 1: in no collective at " in barrier
    assert "its latest collective was all_reduce at " in barrier
    assert " in wait_until_reported" in barrier
    assert " in _run_in_rank" not in barrier
    assert "in backward at tests/test_watchdog.py" in backward
    assert "rank 0: in backward at " in backward
    assert "rank 0: in backward at tests/test_watchdog.py" in backward
    assert ", after optimizer step 2" in backward
    assert "its latest phase was forward of Linear" in backward
    waited = re.search(r"rank 0 of 2 has waited ([0-9.]+) s in recv at ", message)
    assert float(waited[1]) >= 0.3
    assert "not reached by: rank 1" in message
    assert "in gather_objects at " in group
    assert "its interpreter" in blocked
    assert "in hold_the_interpreter" in blocked
    printed = capfd.readouterr().err
    for report in reports:
        assert printed.count(report) == 1
    for call in (r"barrier\('saved'\)", "backward", "recv", "gather_objects"):
        pattern = re.compile(LEFT_ALONE.format(call), re.DOTALL)
        reports_on_call = filter(pattern.match, printed.split("\nfabric: "))
        assert len(list(reports_on_call)) == 1, call


def stall_under_fsdp(fabric):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model = fabric.setup(module)
    return stall(fabric, "forward of Sequential", lambda: model(torch.ones(4, 2)))


def test_a_gather_of_fsdp_counts():
    [text, _] = run_in_ranks(stall_under_fsdp, strategy="fsdp", watchdog=0.3)
    assert "in forward of Sequential at tests/test_watchdog.py" in text
    assert "not reached by: rank 1" in text
    # The user has called setup(), which has made a broadcast.
    assert "its latest collective was setup (broadcast) at tests/test_watchdog.py" in text


def pass_before_a_barrier(fabric, trains):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model = fabric.setup(module)
    # The second forward pass of DDP is a collective, too.
    for _ in range(2):
        loss = model(torch.ones(4, 2)).mean()
        fabric.backward(loss)
    if fabric.is_global_zero:
        loss = model(torch.ones(4, 2)).mean()
        if trains:
            fabric.backward(loss)
    fabric.barrier("end")


@pytest.mark.parametrize(
    ("strategy", "trains", "phase"),
    [("fsdp", False, "forward of Sequential"), ("ddp", True, "backward")],
)
def test_a_report_that_proves_a_deadlock_ends_the_job(strategy, trains, phase, capfd):
    with pytest.raises(RankFailedError) as caught:
        run_in_ranks(
            pass_before_a_barrier,
            trains,
            launcher="forkserver",
            strategy=strategy,
            watchdog=0.5,
        )
    text = str(caught.value)
    printed = capfd.readouterr().err
    verdict = "the job cannot go on and ends here: ranks 0, 1 wait for each other"
    assert verdict in text
    assert "in pass_before_a_barrier" in text
    assert "_run_payload" not in text
    # The traceback ends at the user's line.
    assert f"{os.sep}communicators{os.sep}" not in text
    assert printed.count(f"fabric: {verdict}") == 1
    assert "not reached by" not in printed
    assert f"rank 0: in {phase} at " in printed
    assert "rank 1: in barrier('end') at " in printed


def evaluate_on_rank0_only(fabric):
    loader = fabric.setup_dataloaders(DataLoader(torch.arange(8.0), shuffle=True))
    for _ in range(2):
        for batch in loader:
            fabric.all_reduce(batch)
        if fabric.is_global_zero:
            fabric.all_reduce(1.0)


@pytest.mark.parametrize("checks", [False, True])
def test_a_wait_for_the_order_of_an_epoch_is_proven_to_be_a_deadlock(checks, capfd):
    with pytest.raises(RankFailedError) as caught:
        run_in_ranks(
            evaluate_on_rank0_only,
            launcher="forkserver",
            watchdog=0.5,
            check_collectives=checks,
        )
    text = str(caught.value)
    if checks:
        assert "ranks wait for each other in different calls" in text
        assert "the epoch's order from rank 0" in text
        return
    assert "the job cannot go on and ends here: ranks 0, 1 wait for each other" in text
    printed = capfd.readouterr().err
    assert "rank 0: in all_reduce at " in printed
    assert "rank 1: waits for the epoch's order from rank 0 at tests/test_watchdog.py" in printed


def build_on_rank0_only(fabric):
    if fabric.is_global_zero:
        fabric.barrier()
    with fabric.init_module(source="rank0"):
        nn.Linear(2, 2)


def test_a_wait_for_the_values_of_init_module_is_proven_to_be_a_deadlock(capfd):
    with pytest.raises(RankFailedError, match="ranks 0, 1 wait for each other"):
        run_in_ranks(build_on_rank0_only, launcher="forkserver", strategy="fsdp", watchdog=0.5)
    assert "rank 1: waits for the end of init_module on rank 0 at " in capfd.readouterr().err


def error_of_a_lost_rank(fabric):
    if fabric.global_rank == 1:
        return "returned early"
    return outcome(lambda: fabric.barrier("end"))


def test_the_error_of_a_rank_that_has_lost_another_one_says_why_that_one_has_ended():
    [text, _] = run_in_ranks(error_of_a_lost_rank, launcher="forkserver")
    assert "lost its connection to another rank:\n  rank 1: makes no further calls" in text


def error_of_the_timeout(fabric, in_backward):
    module = nn.Linear(2, 1)
    model = fabric.setup(module)
    loss = model(torch.ones(4, 2)).mean()
    store = fabric.strategy.runtime.store
    if fabric.global_rank == 0:
        if in_backward:
            text = outcome(lambda: fabric.backward(loss))
        else:
            text = outcome(lambda: fabric.all_reduce(1.0))
        store.set("raised", text.encode())
        return text
    # Rank 1 makes no call, and stays until rank 0 has given up.
    while store.get_nowait("raised") is None:
        NEVER.wait(0.01)
    return None


@pytest.mark.parametrize(
    ("in_backward", "expected"),
    [(False, "in all_reduce at tests/test_watchdog.py"), (True, "in backward at ")],
)
def test_the_error_of_a_timeout_holds_the_report(in_backward, expected, capfd):
    [text, _] = run_in_ranks(error_of_the_timeout, in_backward, watchdog=0, timeout=3.0)
    assert expected in text
    assert "not reached by: rank 1" in text
    assert "in error_of_the_timeout" in text
    assert text.count(HEADING) == 1
    assert HEADING not in capfd.readouterr().err


def test_a_report_that_was_printed_is_in_the_error_of_the_timeout_by_its_first_lines(capfd):
    [text, _] = run_in_ranks(
        error_of_the_timeout, False, launcher="forkserver", watchdog=0.3, timeout=3.0
    )
    printed = capfd.readouterr().err
    summary = text[text.index("fabric: ") : text.index(HEADING)]
    assert "not reached by: rank 1" in summary
    assert f"{summary}{HEADING}\n" in printed
    assert "in error_of_the_timeout" in printed
    assert "in error_of_the_timeout" not in text


def has_recorder_and_threads(fabric):
    has_recorder = fabric.strategy.runtime.recorder is not None
    return has_recorder, [thread.name for thread in threading.enumerate()]


def test_a_single_process_is_not_watched():
    with Fabric(accelerator="cpu", devices=1, watchdog=0.01) as fabric:
        has_recorder, threads = fabric.launch(has_recorder_and_threads)
    assert not has_recorder
    assert "fabric-watchdog" not in threads


COMPILES = r"torch\.compile is at work"
IS_IN_A_STEP = r"rank 1: in no collective at [^(]*, before optimizer step 1"
SAVES = r"rank 0: in save: "


def wait_for_a_compiler(fabric, folder):
    def wait_for_two_reports(graph, inputs):
        first, _ = wait_for_matching_report(fabric, COMPILES)
        wait_for_matching_report(fabric, COMPILES, first)
        return graph.forward

    # The first compilation imports for seconds.
    torch.compile(torch.neg, backend=lambda graph, _: graph.forward)(torch.ones(1))
    fabric.barrier()
    if fabric.global_rank == 1:
        torch.compile(lambda x: x + 1, backend=wait_for_two_reports)(torch.ones(1))
        first, _ = wait_for_matching_report(fabric, COMPILES)
        wait_for_matching_report(fabric, IS_IN_A_STEP, first)
    fabric.barrier()
    if fabric.global_rank == 1:
        wait_for_matching_report(fabric, SAVES)
    fabric.save(f"{folder}/checkpoint", {"step": 1})
    reports = []
    for pattern in (COMPILES, IS_IN_A_STEP, SAVES):
        _, report = wait_for_matching_report(fabric, pattern)
        reports.append(report)
    return reports


def test_the_watchdog_is_quiet_while_a_rank_compiles_and_says_who_has_to_call(capfd, tmp_path):
    [reports, _] = run_in_ranks(
        wait_for_a_compiler, str(tmp_path), launcher="forkserver", watchdog=0.3
    )
    compiling, in_a_step, saving = reports
    printed = capfd.readouterr().err
    assert compiling not in printed
    assert in_a_step in printed
    assert saving in printed
    assert "rank 1 may still make this call: a line below that makes no" in in_a_step
    assert "otherwise ranks 0, 1 have to make this call, outside of any branch" in in_a_step
    assert " s in save: " in saving


# -- SIGUSR1 --------------------------------------------------------------------------------------

SCRIPT = Path(__file__).parent / "scripts" / "hang.py"
FABRIC_RUN = [sys.executable, "-m", "fabric", "run", "--accelerator=cpu"]
COMMANDS = {
    "popen": [sys.executable, SCRIPT, "popen"],
    "spawn": [sys.executable, SCRIPT, "spawn"],
    "fork": [sys.executable, SCRIPT, "fork"],
    "forkserver": [sys.executable, SCRIPT, "forkserver"],
    "fabric run": [*FABRIC_RUN, "--devices=2", SCRIPT, "popen"],
}


def check_report_by_signal(command, number):
    """Start a job that prints the report when its first process gets a signal."""
    with subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            assert job.stdout is not None
            assert "ready" in job.stdout.readline()
            job.send_signal(number)
            _, errors = job.communicate(timeout=150)
        finally:
            job.kill()
    assert job.returncode == 0, errors
    assert errors.count("requested by a signal") == 1
    assert "not reached by: rank 1" in errors
    assert "in barrier('end') at " in errors
    assert "in wait_for_the_report" in errors


@pytest.mark.parametrize(
    "name",
    [
        "fork",
        pytest.param("popen", marks=pytest.mark.slow),
        pytest.param("spawn", marks=pytest.mark.slow),
        pytest.param("forkserver", marks=pytest.mark.slow),
        pytest.param("fabric run", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_process_that_launched_prints_the_report(name):
    check_report_by_signal(COMMANDS[name], signal.SIGUSR1)


def test_a_request_before_the_ranks_have_started_does_not_end_fabric_run():
    # The signal arrives before any other import of the command.
    program = (
        "import os, signal, sys\n"
        "sys.argv = ['fabric', 'run', '--help']\n"
        "from fabric import cli\n"
        "build_parser = cli._build_parser\n"
        "def build_after_a_request():\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    return build_parser()\n"
        "cli._build_parser = build_after_a_request\n"
        "cli.main()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=150, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "--log-dir" in run.stdout


@pytest.mark.slow
def test_fabric_run_shows_a_report_that_goes_to_a_log(tmp_path):
    command = [*FABRIC_RUN, "--devices=2", f"--log-dir={tmp_path}", str(SCRIPT), "popen", "2", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert run.returncode == 0, run.stderr
    assert "rank 0 of 2 has waited" in run.stderr
    assert "rank 0 of 2 has waited" in (tmp_path / "rank-0.log").read_text()


@pytest.mark.slow
def test_under_slurm_sigquit_prints_the_report_though_the_shell_ignores_it(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    # A batch script that starts a command with "&" makes it ignore SIGQUIT.
    shell = ["sh", "-c", 'trap "" QUIT; exec "$@"', "sh"]
    check_report_by_signal([*shell, *COMMANDS["fork"]], signal.SIGQUIT)


@pytest.mark.slow
def test_sigusr1_to_any_machine_of_a_job_prints_the_report_on_the_first():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = ["--num-nodes=2", "--main-address=127.0.0.1", f"--main-port={port}"]
    jobs = []
    for node in range(2):
        command = [*FABRIC_RUN, *address, f"--node-rank={node}", str(SCRIPT), "popen", "1", "60"]
        job = subprocess.Popen(
            command,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        jobs.append(job)
    try:
        assert jobs[1].stdout is not None
        assert "ready" in jobs[1].stdout.readline()
        jobs[1].send_signal(signal.SIGUSR1)
        errors = [job.communicate(timeout=150)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.communicate(timeout=150)
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
    # The variable keeps the Python half of the store: torch keeps only its C++ half.
    store = PlainStore(folder / "store")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    refusal = outcome(lambda: Fabric(accelerator="cpu", strategy="ddp", devices=2).launch())
    with Fabric(accelerator="cpu", strategy="ddp", devices=2, watchdog=0) as second:
        second.launch()
        total = second.all_reduce(rank + 1, reduce_op="sum")
        stops_before = second.should_stop
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        # Without the watchdog's connection this is a collective.
        stops_after = second.should_stop
    dist.destroy_process_group()
    return refusal, total, [stops_before, stops_after]


def test_a_store_without_a_second_connection_is_refused_unless_there_is_no_watchdog(tmp_path):
    for refusal, total, stops in run_in_ranks(join_with_a_plain_store, tmp_path):
        assert "ConfigurationError" in refusal
        assert "clone()" in refusal
        assert "watchdog=0" in refusal
        assert total == 3
        assert stops == [False, True]


# -- what a rank is doing --------------------------------------------------------------------------


def activity_while_a_worker_is_waited_for():
    """Return what a report says of a thread that waits for a worker, and the worker's process."""
    event = multiprocessing.get_context("fork").Event()
    loader = DataLoader(
        WaitingDataset(event), num_workers=1, multiprocessing_context="fork", collate_fn=list
    )
    observer = RankObserver(FlightRecorder(), size=1, idle_threshold=1, is_asynchronous=False)
    batches = iter(loader)
    activities = [""]

    def observe():
        while "worker" not in activities[-1]:
            activities.append(observer.activity())
        event.set()

    thread = threading.Thread(target=observe)
    thread.start()
    [worker] = next(batches)
    thread.join(150)
    observer.stacks.close()
    return activities[-1], worker


def test_a_rank_that_waits_for_a_worker_is_shown_at_the_users_line_with_the_worker():
    activity, worker = in_another_process(activity_while_a_worker_is_waited_for)
    place = r"in no collective at [^ ]*test_watchdog\.py:[0-9]+"
    assert re.fullmatch(rf"{place}, waits for a DataLoader worker \(pid {worker}\)", activity)


# -- nothing is left ------------------------------------------------------------------------------


def watchdog_of_one(**options):
    store = dist.HashStore()
    options = {"threshold": timedelta(seconds=0.1), "timeout": timedelta(seconds=10), **options}
    return store, HangReporter(JobStore(store, 0, 1), **options)


def process_state():
    """Return the caught signals, the open files, and whether faulthandler is enabled."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [caught_signals] = [line.split()[1] for line in lines if line.startswith("SigCgt")]
    signals_of_c_library = 0b11 << 31
    return (
        int(caught_signals, 16) & ~signals_of_c_library,
        sorted(os.listdir("/proc/self/fd")),
        faulthandler.is_enabled(),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_after_close_the_process_is_as_it_was(tmp_path):
    before = process_state()
    store, watchdog = watchdog_of_one()
    watchdog.start()
    stacks_file = tmp_path / "stacks"
    with stacks_file.open("w") as file:
        faulthandler.dump_traceback_later(0.05, file=file)
        watchdog.close()
        watchdog.close()
        deadline = time.monotonic() + 150
        while stacks_file.stat().st_size == 0 and time.monotonic() < deadline:
            NEVER.wait(0.01)
        assert "test_after_close" in stacks_file.read_text()
    assert "fabric-watchdog" not in [thread.name for thread in threading.enumerate()]
    assert process_state() == before
    assert json.loads(store.get("closed/0"))[0] == "makes no further calls: it has finished"


def test_a_process_that_is_gone_or_elsewhere_has_no_stack():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(timeout=150)
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    stacks = Stacks(threading.get_ident())
    node, _, fd, thread = stacks.address
    assert "in test_a_process_that_is_gone" in stacks.dump()
    assert "in test_a_process_that_is_gone" in read_stack(stacks.address)
    stacks.close()
    assert "has ended" in read_stack(StackAddress(node, gone.pid, fd, thread))
    if sys.platform == "linux":
        assert "has ended" in read_stack(StackAddress(node, zombie.pid, fd, thread))
    zombie.wait(timeout=150)
    assert "another node" in read_stack(StackAddress("another", os.getpid(), fd, thread))
    assert "does not answer" in read_stack(StackAddress(node, os.getpid(), fd, thread))


# -- options --------------------------------------------------------------------------------------


def test_times_are_seconds_or_timedeltas_and_the_strategys_timeout_counts_too():
    strategy = DDPStrategy(timeout=timedelta(seconds=40))
    for timeout in (None, 40, timedelta(seconds=40)):
        plan = resolve_plan(
            accelerator="cpu", strategy=strategy, timeout=timeout, watchdog=0, env={}
        )
        assert plan.timeout == timedelta(seconds=40)
        assert plan.watchdog == timedelta(0)
    assert resolve_plan(accelerator="cpu", env={}).timeout == timedelta(minutes=30)


@pytest.mark.parametrize(
    "options", [{"timeout": 0}, {"timeout": -1}, {"timeout": float("nan")}, {"watchdog": "soon"}]
)
def test_a_value_that_is_not_a_length_of_time_is_refused(options):
    with pytest.raises(ConfigurationError, match="not a valid length of time"):
        Fabric(accelerator="cpu", **options)


def test_two_different_timeouts_are_refused():
    strategy = DDPStrategy(timeout=timedelta(seconds=5))
    with pytest.raises(ConfigurationError, match="timeout"):
        Fabric(accelerator="cpu", devices=2, strategy=strategy, timeout=6)

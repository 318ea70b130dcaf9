"""In checked mode, calls that differ raise on every rank, and calls that agree never raise."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric._plan import resolve_plan
from fabric._torch import default_store
from fabric.collectives import all_reduce
from fabric.communicators import Collective, Communicator, Operation, Reduce
from fabric.communicators.base import CallDescription
from fabric.communicators.call_site import CallSite
from fabric.communicators.recorded import RecordedCommunicator
from fabric.diagnostics.checker import Call, CollectiveChecker, difference
from fabric.diagnostics.recorder import Entry, FlightRecorder
from fabric.errors import CollectiveMismatchError, RankFailedError
from tests.ranks import outcome, run_in_ranks
from tests.test_communicators import run_object_collectives, run_tensor_collectives

SHORT = timedelta(seconds=10)
LONG_TEXT = ", ".join(f"'metric {i}': float32 ()" for i in range(64))


# -- the text of an error --------------------------------------------------------------------------


def call(operation="all_reduce", data="", where="train.py:1", **facts):
    return Call("job", (0, 1), operation, where, {"operation": operation, **facts}, data)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([call(op="sum"), call(op="sum", where="train.py:9")], ""),
        ([call(op="sum"), call(op="max"), call(op="sum")], "op: sum on ranks 0, 2; max on rank 1"),
        (
            [call(shape="(2,)"), call("barrier")],
            "operation: all_reduce on rank 0; barrier on rank 1",
        ),
        ([call(src="0"), call()], "src: 0 on rank 0; none on rank 1"),
        ([call(data="{'a'}"), call(data=""), call(data="{'a'}")], ""),
        ([call(data="{'a'}"), call(data="{'b'}")], "data: {'a'} on rank 0; {'b'} on rank 1"),
    ],
)
def test_a_difference_names_the_fact_and_the_ranks(calls, expected):
    assert difference(dict(enumerate(calls))) == expected


def test_of_long_data_the_place_of_the_difference_is_shown():
    changed_text = LONG_TEXT.replace("metric 40", "metric fourty")
    text = difference({0: call(data=LONG_TEXT), 1: call(data=changed_text)})
    assert "'metric 40'" in text
    assert "'metric fourty'" in text
    assert len(text) < 200


# -- the checker, by itself -----------------------------------------------------------------------


class CheckedRank:
    """A rank that checks its calls, but makes no collective."""

    def __init__(self, store, rank, size, timeout=SHORT):
        self.checker = CollectiveChecker(store, rank, size, timeout)
        self.counts = Counter()

    def barrier(self, group, members, name="x"):
        self.counts[group] += 1
        place = CallSite(sys._getframe(1).f_code.co_filename, 0)
        entry = Entry(group, members, self.counts[group], "barrier", name, place)
        self.checker.check(entry, Collective(Operation.BARRIER, name=name))


class Barrier(NamedTuple):
    """A barrier in a schedule of a rank.

    Attributes:
        members: the ranks that have to take part.
        name: the name of the barrier, on which the members have to agree.
    """

    members: tuple[int, ...]
    name: str


def run_in_threads(functions):
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=150)
        assert not thread.is_alive()


def errors_of_ranks(schedules):
    """Run a schedule of barriers in a thread for each rank. Return each rank's error or None."""
    store = dist.HashStore()
    errors = [None] * len(schedules)

    def run_schedule(rank):
        checked_rank = CheckedRank(store, rank, len(schedules))
        try:
            for barrier in schedules[rank]:
                checked_rank.barrier(str(barrier.members), barrier.members, barrier.name)
        except CollectiveMismatchError as error:
            errors[rank] = error
        checked_rank.checker.close()

    run_in_threads([partial(run_schedule, rank) for rank in range(len(schedules))])
    return errors


def is_next_of_all_members(barrier, schedules):
    return all(schedules[member][:1] == [barrier] for member in barrier.members)


def ranks_that_wait_forever(schedules):
    """Return for each rank whether it gets stuck.

    This is the oracle: a barrier takes place once it is the next call of all its members.
    """
    remaining = [list(schedule) for schedule in schedules]
    has_moved = True
    while has_moved:
        has_moved = False
        for schedule in remaining:
            if schedule and is_next_of_all_members(schedule[0], remaining):
                for member in schedule[0].members:
                    del remaining[member][0]
                has_moved = True
    return [bool(schedule) for schedule in remaining]


def random_schedules(generator, size, length):
    """Return schedules of the same barriers of random groups, in the same order on every rank."""
    groups = []
    for _ in range(3):
        members = generator.sample(range(size), generator.randint(1, size))
        groups.append(tuple(sorted(members)))
    schedules = [[] for _ in range(size)]
    for _ in range(length):
        barrier = Barrier(generator.choice(groups), generator.choice("ab"))
        for member in barrier.members:
            schedules[member].append(barrier)
    return schedules


def drop_or_swap_a_call(generator, schedules):
    """Drop one call of one rank, or swap the call with the next one."""
    schedule = generator.choice([schedule for schedule in schedules if len(schedule) > 1])
    index = generator.randrange(len(schedule) - 1)
    first, second = schedule[index : index + 2]
    schedule[index : index + 2] = generator.choice([[first], [second, first]])


def test_agreeing_schedules_of_random_groups_never_raise():
    generator = random.Random(0)
    for _ in range(20):
        schedules = random_schedules(generator, size=4, length=60)
        assert errors_of_ranks(schedules) == [None] * 4


def test_exactly_the_ranks_that_would_wait_forever_raise():
    generator = random.Random(1)
    schedules_that_hang = 0
    for _ in range(60):
        schedules = random_schedules(generator, size=generator.randint(2, 4), length=12)
        drop_or_swap_a_call(generator, schedules)
        expected = ranks_that_wait_forever(schedules)
        has_raised = [error is not None for error in errors_of_ranks(schedules)]
        assert has_raised == expected, schedules
        if any(expected):
            schedules_that_hang += 1
    assert schedules_that_hang > 20


def test_threads_of_a_rank_may_wait_in_groups_of_their_own():
    groups = ["training", "saving"] * 20
    store = dist.HashStore()
    rank_with_two_threads = CheckedRank(store, 0, 2)
    rank_with_one_thread = CheckedRank(store, 1, 2)

    def run_barriers(checked_rank, groups):
        for group in groups:
            checked_rank.barrier(group, (0, 1))

    run_in_threads(
        [
            partial(run_barriers, rank_with_two_threads, groups[1::2]),
            partial(run_barriers, rank_with_one_thread, groups[::-1]),
            partial(run_barriers, rank_with_two_threads, groups[::2]),
        ]
    )
    for checked_rank in (rank_with_two_threads, rank_with_one_thread):
        assert checked_rank.counts == {"training": 20, "saving": 20}


def test_three_ranks_that_wait_in_a_circle_of_three_groups_are_named():
    pairs = [(0, 1), (1, 2), (0, 2)]
    for error in errors_of_ranks([[Barrier(pair, "a")] for pair in pairs]):
        assert "wait for each other" in error.problem
        for rank in range(3):
            assert f"rank {rank}: barrier(name='a') at " in error.problem


def test_the_odd_one_of_ranks_that_wait_for_each_other_is_named_with_the_calls_of_all_ranks():
    job = Barrier((0, 1, 2, 3), "all")
    schedules = [[job], [Barrier((1, 2), "pair")], [job], [job]]
    for error in errors_of_ranks(schedules):
        assert error is not None
        lines = error.problem.splitlines()
        assert lines[0] == "ranks wait for each other in different calls:"
        assert lines[1].startswith("    the odd one is rank 1: barrier(name='pair') at ")
        assert lines[2].startswith("    ranks 0, 2, 3: barrier(name='all') at ")


def test_a_rank_that_only_computes_is_named_at_the_timeout():
    store = dist.HashStore()
    timeout = timedelta(seconds=0.2)
    waiting = CheckedRank(store, 0, 2, timeout)
    _computing = CheckedRank(store, 1, 2, timeout)
    with pytest.raises(CollectiveMismatchError, match=r"after 0.2 s rank 1 did not call") as caught:
        waiting.barrier("job", (0, 1))
    assert caught.value.expected
    assert caught.value.suggestion
    with pytest.raises(CollectiveMismatchError, match="no further collectives") as again:
        waiting.barrier("job", (0, 1))
    assert again.value.__cause__ is caught.value


def test_a_store_that_is_gone_is_an_error_and_no_wait():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = listener.detach()
    host = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server
    )
    waiting = CheckedRank(dist.TCPStore("127.0.0.1", port, wait_for_workers=False), 0, 2)
    del host
    with pytest.raises(CollectiveMismatchError, match="the store of the job is gone"):
        waiting.barrier("job", (0, 1))


KILLED = """
import os, signal, sys
import torch.distributed as dist
from tests.test_checked import CheckedRank
CheckedRank(dist.FileStore(sys.argv[1]), 1, 2).barrier("job", (0, 1))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_was_killed_is_named_before_the_timeout(tmp_path):
    path = str(tmp_path / "store")
    waiting = CheckedRank(dist.FileStore(path), 0, 2, timedelta(seconds=120))
    with subprocess.Popen([sys.executable, "-c", KILLED, path]) as process:
        waiting.barrier("job", (0, 1))
        assert process.wait(timeout=150) == -signal.SIGKILL
        with pytest.raises(
            CollectiveMismatchError, match=f"pid {process.pid}.* has ended"
        ) as caught:
            waiting.barrier("job", (0, 1))
    assert "barrier(name='x') at <string>:" in caught.value.problem


# -- real ranks -----------------------------------------------------------------------------------


def reduce_with_text(communicator, text):
    call = CallDescription("all_reduce", lambda: text)
    collective = Collective(Operation.ALL_REDUCE, torch.ones(2), Reduce.SUM, call=call)
    communicator.run(collective)


def wait_in_group(communicator, ranks):
    group = communicator.new_group(ranks)
    if group:
        group.barrier("group")


def wait_in_group_and_job(communicator):
    group = communicator.new_group([0, 1])
    if group:
        group.barrier("x")
    communicator.barrier("x")


def wait_in_job_and_group(communicator):
    group = communicator.new_group([0, 1])
    communicator.barrier("x")
    if group:
        group.barrier("x")


def send_to_rank_1_or_wait(communicator):
    if communicator.rank == 0:
        communicator.send(torch.ones(1), 1)
    else:
        communicator.barrier("x")


def send_to_rank_1_or_receive(communicator):
    if communicator.rank == 0:
        communicator.send(torch.ones(1), 1)
    else:
        communicator.recv(torch.ones(1), 1)


def wait_in_order(communicator, *names):
    for name in names:
        communicator.barrier(name)


def broadcast_and_exchange(communicator):
    communicator.broadcast_object(1, 0)
    communicator.all_to_all(torch.ones(3))


class Mismatch(NamedTuple):
    """Calls that differ between rank 1 and the two other ranks.

    Attributes:
        on_rank_1: the call of rank 1, or None if rank 1 makes no call.
        elsewhere: the call of ranks 0 and 2.
        expected: a text that the error contains.
        is_known_to_rank_2: whether the error of rank 2 contains the text. Where ranks 0 and 1
            block each other, rank 2 reports its own call instead.
    """

    on_rank_1: Callable[[Communicator], Any] | None
    elsewhere: Callable[[Communicator], Any]
    expected: str
    is_known_to_rank_2: bool = True


ROW = torch.ones(1)
CHANGED_TEXT = LONG_TEXT.replace("metric 60", "metric x")
MISMATCHES = {
    "operation": Mismatch(
        lambda communicator: communicator.barrier("x"),
        lambda communicator: communicator.gather_objects(1),
        "operation: gather_objects on ranks 0, 2",
    ),
    "reduce op": Mismatch(
        lambda communicator: communicator.all_reduce(torch.ones(1), Reduce.MAX),
        lambda communicator: communicator.all_reduce(torch.ones(1), Reduce.SUM),
        "op: sum on ranks 0, 2; max on rank 1",
    ),
    "shape": Mismatch(
        lambda communicator: communicator.all_gather(ROW),
        lambda communicator: communicator.all_gather(torch.ones(2, 3)),
        "shape: (2, 3) on ranks 0, 2; (1,) on rank 1",
    ),
    "dtype": Mismatch(
        lambda communicator: communicator.reduce_scatter(torch.ones(3, 1), Reduce.SUM),
        lambda communicator: communicator.reduce_scatter(torch.ones(3, 1).int(), Reduce.SUM),
        "dtype: int32 on ranks 0, 2; float32 on rank 1",
    ),
    "src": Mismatch(
        lambda communicator: communicator.broadcast(torch.ones(1), 1),
        lambda communicator: communicator.broadcast(torch.ones(1), 0),
        "src: 0 on ranks 0, 2; 1 on rank 1",
    ),
    "dst": Mismatch(
        lambda communicator: communicator.gather(ROW, 1),
        lambda communicator: communicator.gather(ROW, 0),
        "dst: 0 on ranks 0, 2",
    ),
    "order": Mismatch(
        lambda communicator: wait_in_order(communicator, "second", "first"),
        lambda communicator: wait_in_order(communicator, "first", "second"),
        "name: 'first' on ranks 0, 2; 'second' on rank 1",
    ),
    "missing call": Mismatch(
        lambda communicator: communicator.all_to_all(torch.ones(3)),
        broadcast_and_exchange,
        "operation: broadcast_object on ranks 0, 2; all_to_all on rank 1",
    ),
    "missing last call": Mismatch(
        None,
        lambda communicator: communicator.barrier("x"),
        "rank 1 makes no further calls: it has finished",
    ),
    "tree keys": Mismatch(
        lambda communicator: reduce_with_text(communicator, "{'loss': float32 (2,)}"),
        lambda communicator: reduce_with_text(communicator, "{'acc': float32 (2,)}"),
        "data: {'acc': float32 (2,)} on ranks 0, 2",
    ),
    "gradient": Mismatch(
        lambda communicator: all_reduce(
            communicator, torch.ones(1, requires_grad=True), Reduce.SUM
        ),
        lambda communicator: all_reduce(communicator, torch.ones(1), Reduce.SUM),
        "with gradient on rank 1",
    ),
    "long tree": Mismatch(
        lambda communicator: reduce_with_text(communicator, LONG_TEXT),
        lambda communicator: reduce_with_text(communicator, CHANGED_TEXT),
        "'metric x': float32 ()",
    ),
    "members": Mismatch(
        lambda communicator: wait_in_group(communicator, [0, 1]),
        lambda communicator: wait_in_group(communicator, [0, 2]),
        "ranks: [0, 2] on ranks 0, 2; [0, 1] on rank 1",
    ),
    "group": Mismatch(
        wait_in_group_and_job,
        wait_in_job_and_group,
        "wait for each other in different calls",
        is_known_to_rank_2=False,
    ),
    "both send": Mismatch(
        lambda communicator: communicator.send(ROW, 0),
        send_to_rank_1_or_wait,
        "rank 0: send(from=0, to=1, dtype=float32, shape=(1,))",
        is_known_to_rank_2=False,
    ),
    "message": Mismatch(
        lambda communicator: communicator.recv(torch.ones(2), 0),
        send_to_rank_1_or_receive,
        "shape: (1,) on rank 0; (2,) on rank 1",
        is_known_to_rank_2=False,
    ),
}


def outcomes_of_mismatches(fabric):
    communicator = fabric.strategy.runtime.communicator
    rank = communicator.rank
    outcomes = {}
    for name, mismatch in MISMATCHES.items():
        store = dist.PrefixStore(name, default_store())
        checker = CollectiveChecker(store, rank, communicator.size, SHORT)
        recorder = FlightRecorder()
        recorder.checks = (checker.check,)
        checked = RecordedCommunicator(communicator, recorder)
        checked.barrier("before")
        call = mismatch.on_rank_1 if rank == 1 else mismatch.elsewhere
        if call is None:
            checker.close()
        else:
            outcomes[name] = outcome(partial(call, checked))
        communicator.barrier("after")
    return outcomes


def test_every_kind_of_mismatch_raises_on_every_rank_before_the_timeout():
    for rank, outcomes in enumerate(run_in_ranks(outcomes_of_mismatches, ranks=3)):
        expected_names = set(MISMATCHES)
        if rank == 1:
            expected_names.remove("missing last call")
        assert outcomes.keys() == expected_names
        for name, text in outcomes.items():
            mismatch = MISMATCHES[name]
            assert text.startswith("CollectiveMismatchError"), (name, rank, text)
            if rank < 2 or mismatch.is_known_to_rank_2:
                assert mismatch.expected in text, (name, rank, text)
            assert "tests/test_checked.py:" in text
            assert "after 10 s" not in text, (name, rank, text)


def disagree(fabric):
    if fabric.global_rank == 0:
        return outcome(lambda: fabric.all_reduce({"loss": torch.ones(2)}, reduce_op="sum"))
    return outcome(lambda: fabric.all_reduce({"acc": torch.ones(2)}, reduce_op="sum"))


def test_the_error_names_what_the_user_passed_by_file_and_line():
    line = disagree.__code__.co_firstlineno + 2
    at_rank_0 = rf"rank 0: all_reduce\(sum of loss: .*\) at .*test_checked.py:{line}\n"
    at_rank_1 = rf"rank 1: all_reduce\(sum of acc: .*\) at .*test_checked.py:{line + 1}\n"
    for text in run_in_ranks(disagree, check_collectives=True):
        assert re.search(at_rank_0, text), text
        assert re.search(at_rank_1, text), text


def fail_before_the_others(fabric):
    if fabric.global_rank == 1:
        raise ValueError("bad batch")
    fabric.barrier()


def test_a_rank_that_raises_is_named_as_the_cause_and_not_those_that_missed_it():
    with pytest.raises(RankFailedError, match="ValueError: bad batch") as caught:
        run_in_ranks(fail_before_the_others, ranks=3, check_collectives=True)
    assert caught.value.rank == 1


def leave_early(fabric):
    if fabric.global_rank == 1:
        return "left"
    return outcome(fabric.barrier)


def test_a_rank_that_returned_is_named_by_those_that_wait():
    waiting, left = run_in_ranks(leave_early, check_collectives=True)
    assert left == "left"
    assert "rank 1 makes no further calls: it has finished" in waiting


def run_every_collective(communicator):
    run_tensor_collectives(communicator)
    run_object_collectives(communicator)


def use_groups(fabric):
    """Make collectives of the job, and more of them in two groups; return the groups."""
    rank = fabric.global_rank
    communicator = fabric.strategy.runtime.communicator
    run_every_collective(communicator)
    left = communicator.new_group([0, 1])
    right = communicator.new_group([1, 2])
    for group, rounds in ((left, 5), (right, 10)):
        if group:
            for _ in range(rounds):
                run_every_collective(group)
    torch_group = dist.new_group([0, 2])
    if rank != 1:
        assert fabric.all_reduce(1, group=torch_group, reduce_op="sum") == 2
    if rank == 0:
        communicator.send(torch.ones(1), 2)
    if rank == 2:
        communicator.recv(torch.zeros(1), 0)
    return left, right


def train_and_save(fabric, folder):
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, optimizer = fabric.setup(module, optimizer)
    for _ in range(2):
        loss = module(torch.ones(1, 2)).sum()
        fabric.backward(loss)
        optimizer.step()
    fabric.save(folder / "a.ckpt", {"model": module, "rank": 0})
    fabric.load(folder / "a.ckpt", {"model": module})


def run_program(fabric, folder):
    """Make calls that agree: in the job and in groups, in training and checkpoints."""
    rank = fabric.global_rank
    groups = use_groups(fabric)
    train_and_save(fabric, folder)
    with fabric.rank_zero_first():
        pass
    message = None
    if rank == 0:
        message = {"x": torch.ones(2), "y": "text"}
    fabric.broadcast(message, src=0)
    weight = torch.ones(2, requires_grad=True)
    fabric.all_reduce({"b": weight * rank, "a": 1}, reduce_op="sum")["b"].sum().backward()
    for group in groups:
        if group:
            group.close()
    return rank


def test_programs_that_agree_raise_nothing(tmp_path):
    results = run_in_ranks(run_program, tmp_path, ranks=3, check_collectives=True)
    assert results == [0, 1, 2]


# -- phases of training ---------------------------------------------------------------------------


def set_up(fabric, model):
    fabric.setup_module(nn.Linear(2, 1))


def forward_and_backward(fabric, model):
    loss = model(torch.ones(4, 2)).mean()
    fabric.backward(loss)


def save(fabric, model):
    fabric.save("checkpoint", {"model": model})


def reduce_beside_a_phase(fabric, run_phase, folder):
    """Reduce on rank 0 while rank 1 is in a phase, and return the error."""
    os.chdir(folder)
    module = nn.Linear(2, 1)
    model = fabric.setup_module(module)
    loss = model(torch.ones(4, 2)).mean()
    if fabric.global_rank == 0:
        return outcome(lambda: fabric.all_reduce(1.0))
    if run_phase is None:
        return outcome(lambda: fabric.backward(loss))
    return outcome(lambda: run_phase(fabric, model))


@pytest.mark.parametrize(
    ("run_phase", "phase"),
    [
        (set_up, "setup of Linear"),
        (forward_and_backward, "forward of Linear"),
        (save, "save"),
        (None, "backward"),
    ],
)
def test_a_rank_in_a_phase_is_seen_while_another_is_in_a_collective(run_phase, phase, tmp_path):
    results = run_in_ranks(reduce_beside_a_phase, run_phase, tmp_path, check_collectives=True)
    for text in results:
        assert text.startswith("CollectiveMismatchError: ")
        assert "rank 0: all_reduce(mean of " in text or "rank 0 makes no further calls: " in text
        assert f"{phase} at " in text


def train_with_different_local_steps(fabric):
    """Differ between ranks only where nothing is synchronized."""
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = fabric.setup(module, optimizer)
    x = torch.ones(4, 2)
    for _ in range(fabric.global_rank):
        with torch.no_grad():
            model(x)
        with fabric.no_backward_sync(model):
            loss = model(x).mean()
            fabric.backward(loss)
    for _ in range(2):
        loss = model(x).mean()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
    with fabric.join(model):
        for _ in range(1 + fabric.global_rank):
            loss = model(x).mean()
            fabric.backward(loss)
            optimizer.step()
    return fabric.all_reduce(1, reduce_op="sum")


def test_phases_without_synchronization_may_differ_in_checked_mode():
    options = {"check_collectives": True, "check_training": False}
    results = run_in_ranks(train_with_different_local_steps, **options)
    assert results == [2, 2]


# -- on and off -----------------------------------------------------------------------------------


def kinds_of_checks(fabric):
    return [type(check.__self__) for check in fabric.strategy.runtime.recorder.checks]


@pytest.mark.parametrize(("checks", "kinds"), [(False, []), (True, [CollectiveChecker])])
def test_off_nothing_is_compared(checks, kinds):
    results = run_in_ranks(kinds_of_checks, check_collectives=checks)
    assert results == [kinds] * 2


@pytest.mark.parametrize("value", [None, "", "0", "false", "no", "off", "OFF "])
def test_the_environment_leaves_checks_off(value):
    env = {} if value is None else {"FABRIC_CHECK": value}
    assert resolve_plan(accelerator="cpu", env=env).check_collectives is False
    assert resolve_plan(accelerator="cpu", check_collectives=True, env=env).check_collectives


@pytest.mark.parametrize("value", ["1", "true", "yes", "on", "all"])
def test_the_environment_turns_checks_on(value):
    assert resolve_plan(accelerator="cpu", env={"FABRIC_CHECK": value}).check_collectives is True

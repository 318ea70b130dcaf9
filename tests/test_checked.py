"""Checked mode: calls that differ between ranks raise on each of them, and calls that agree never do."""

import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fabric._plan import resolve_plan
from fabric._torch import default_store
from fabric.collectives import all_reduce
from fabric.communicators import Collective, Operation, Reduce
from fabric.communicators.base import CallDescription
from fabric.diagnostics.call_site import CallSite
from fabric.diagnostics.checker import Call, CollectiveChecker, difference
from fabric.diagnostics.recorder import Entry, FlightRecorder, RecordedCommunicator
from fabric.errors import CollectiveMismatchError, RankFailedError
from tests.ranks import outcome, run_in_ranks
from tests.test_communicators import every_collective

SHORT = timedelta(seconds=10)
LONG_TEXT = ", ".join(f"'metric {i}': float32 ()" for i in range(64))


# -- the text -------------------------------------------------------------------------------------


def call(operation="all_reduce", data="", where="train.py:1", **facts):
    return Call("job", (0, 1), operation, where, {"operation": operation, **facts}, data)


@pytest.mark.parametrize(
    ("calls", "told"),
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
def test_a_difference_names_the_fact_and_the_ranks(calls, told):
    assert difference(dict(enumerate(calls))) == told


def test_of_long_data_the_place_of_the_difference_is_shown():
    told = difference(
        {0: call(data=LONG_TEXT), 1: call(data=LONG_TEXT.replace("metric 40", "metric fourty"))}
    )
    assert "'metric 40'" in told
    assert "'metric fourty'" in told
    assert len(told) < 200


# -- the checker, by itself -----------------------------------------------------------------------


class Rank:
    """The checks of one rank, without a communicator."""

    def __init__(self, store, rank, size, timeout=SHORT):
        self.checker = CollectiveChecker(store, rank, size, timeout)
        self.counts = Counter()

    def barrier(self, group, members, name="x"):
        self.counts[group] += 1
        place = CallSite(sys._getframe(1).f_code.co_filename, 0)
        entry = Entry(group, members, self.counts[group], "barrier", name, place)
        self.checker.check(entry, Collective(Operation.BARRIER, name=name))


def errors_of_ranks(schedules):
    """Run schedules of (members, label), one for each rank, in threads; what each rank raised, or None."""
    store = dist.HashStore()
    raised = [None] * len(schedules)

    def run(rank):
        own = Rank(store, rank, len(schedules))
        try:
            for members, name in schedules[rank]:
                own.barrier(str(members), members, name)
        except CollectiveMismatchError as error:
            raised[rank] = error
        own.checker.close()

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(schedules))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    return raised


def stuck(schedules):
    """The ranks that get no further when a call takes place once all members make it: what must be found."""
    rest = [list(schedule) for schedule in schedules]
    moved = True
    while moved:
        moved = False
        for schedule in rest:
            head = schedule[0] if schedule else None
            if head and all(rest[member][:1] == [head] for member in head[0]):
                for member in head[0]:
                    del rest[member][0]
                moved = True
    return [bool(schedule) for schedule in rest]


def random_schedules(rng, size, length):
    """The same calls of random groups in the same order on every rank."""
    groups = [tuple(sorted(rng.sample(range(size), rng.randint(1, size)))) for _ in range(3)]
    calls = [(rng.choice(groups), rng.choice("ab")) for _ in range(length)]
    return [[one for one in calls if rank in one[0]] for rank in range(size)]


def test_agreeing_schedules_of_random_groups_never_raise():
    rng = random.Random(0)
    for _ in range(20):
        assert errors_of_ranks(random_schedules(rng, size=4, length=60)) == [None] * 4


def test_exactly_the_ranks_that_would_wait_forever_raise():
    rng = random.Random(1)
    actual = 0
    for _ in range(60):
        schedules = random_schedules(rng, size=rng.randint(2, 4), length=12)
        one = rng.choice([schedule for schedule in schedules if len(schedule) > 1])
        place = rng.randrange(len(one) - 1)
        one[place : place + 2] = rng.choice([one[place : place + 1], one[place : place + 2][::-1]])
        expected = stuck(schedules)
        raised = errors_of_ranks(schedules)
        assert [error is not None for error in raised] == expected, schedules
        actual += any(expected)
    assert actual > 20


def test_threads_of_a_rank_may_wait_in_groups_of_their_own():
    schedule = [("training", (0, 1)), ("saving", (0, 1))] * 20
    store = dist.HashStore()
    both = Rank(store, 0, 2)
    one_by_one = Rank(store, 1, 2)
    threads = [
        threading.Thread(
            target=lambda rank=rank, calls=calls: [rank.barrier(*one) for one in calls], daemon=True
        )
        for rank, calls in (
            (both, schedule[1::2]),
            (one_by_one, schedule[::-1]),
            (both, schedule[::2]),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert set((both.counts + one_by_one.counts).values()) == {40}


def test_three_ranks_that_wait_in_a_circle_of_three_groups_are_named():
    pairs = [(0, 1), (1, 2), (0, 2)]
    raised = errors_of_ranks([[(pairs[0], "a")], [(pairs[1], "a")], [(pairs[2], "a")]])
    for error in raised:
        assert "wait for each other" in error.problem
        assert all(f"rank {rank}: barrier(name='a') at " in error.problem for rank in range(3))


def test_a_rank_that_only_computes_is_named_at_the_timeout():
    store = dist.HashStore()
    waiting, _ = (Rank(store, rank, 2, timedelta(seconds=0.2)) for rank in range(2))
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
    waiting = Rank(dist.TCPStore("127.0.0.1", port, wait_for_workers=False), 0, 2)
    del host
    with pytest.raises(CollectiveMismatchError, match="the store of the job is gone"):
        waiting.barrier("job", (0, 1))


KILLED = """
import os, signal, sys
import torch.distributed as dist
from tests.test_checked import Rank
Rank(dist.FileStore(sys.argv[1]), 1, 2).barrier("job", (0, 1))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(60)
def test_a_rank_that_was_killed_is_named_as_soon_as_its_process_has_ended(tmp_path):
    path = str(tmp_path / "store")
    waiting = Rank(dist.FileStore(path), 0, 2, timedelta(seconds=30))
    with subprocess.Popen([sys.executable, "-c", KILLED, path]) as process:
        waiting.barrier("job", (0, 1))
        assert process.wait(timeout=30) == -signal.SIGKILL
        started = time.monotonic()
        with pytest.raises(
            CollectiveMismatchError, match=f"pid {process.pid}.* has ended"
        ) as caught:
            waiting.barrier("job", (0, 1))
        assert time.monotonic() - started < 1
    assert "barrier(name='x') at <string>:" in caught.value.problem


# -- real ranks -----------------------------------------------------------------------------------


def described(communicator, text):
    call = CallDescription("all_reduce", lambda: text)
    communicator.run(Collective(Operation.ALL_REDUCE, torch.ones(2), Reduce.SUM, call=call))


def in_a_group(communicator, ranks):
    group = communicator.new_group(ranks)
    return group.barrier("group") if group else None


def groups_in_another_order(communicator, first):
    left = communicator.new_group([0, 1])
    pair = [left, communicator]
    for each in pair if first else pair[::-1]:
        if each:
            each.barrier("x")


# What rank 1 does, what the others do, and what the error has to say; 3 ranks.
MISMATCHES = {
    "operation": (
        lambda c: c.barrier("x"),
        lambda c: c.gather_objects(1),
        "operation: gather_objects on ranks 0, 2",
    ),
    "reduce op": (
        lambda c: c.all_reduce(torch.ones(1), Reduce.MAX),
        lambda c: c.all_reduce(torch.ones(1), Reduce.SUM),
        "op: sum on ranks 0, 2; max on rank 1",
    ),
    "shape": (
        lambda c: c.all_gather(torch.ones(1)),
        lambda c: c.all_gather(torch.ones(2, 3)),
        "shape: (2, 3) on ranks 0, 2; (1,) on rank 1",
    ),
    "dtype": (
        lambda c: c.reduce_scatter(torch.ones(3, 1), Reduce.SUM),
        lambda c: c.reduce_scatter(torch.ones(3, 1, dtype=torch.int32), Reduce.SUM),
        "dtype: int32 on ranks 0, 2; float32 on rank 1",
    ),
    "src": (
        lambda c: c.broadcast(torch.ones(1), 1),
        lambda c: c.broadcast(torch.ones(1), 0),
        "src: 0 on ranks 0, 2; 1 on rank 1",
    ),
    "dst": (
        lambda c: c.gather(torch.ones(1), 1),
        lambda c: c.gather(torch.ones(1), 0),
        "dst: 0 on ranks 0, 2",
    ),
    "order": (
        lambda c: (c.barrier("second"), c.barrier("first")),
        lambda c: (c.barrier("first"), c.barrier("second")),
        "name: 'first' on ranks 0, 2; 'second' on rank 1",
    ),
    "missing call": (
        lambda c: c.all_to_all(torch.ones(3)),
        lambda c: (c.broadcast_object(1, 0), c.all_to_all(torch.ones(3))),
        "operation: broadcast_object on ranks 0, 2; all_to_all on rank 1",
    ),
    "missing last call": (
        None,
        lambda c: c.barrier("x"),
        "rank 1 makes no further calls: it has finished",
    ),
    "tree keys": (
        lambda c: described(c, "{'loss': float32 (2,)}"),
        lambda c: described(c, "{'acc': float32 (2,)}"),
        "data: {'acc': float32 (2,)} on ranks 0, 2",
    ),
    "gradient": (
        lambda c: all_reduce(c, torch.ones(1, requires_grad=True), Reduce.SUM),
        lambda c: all_reduce(c, torch.ones(1), Reduce.SUM),
        "with gradient on rank 1",
    ),
    "long tree": (
        lambda c: described(c, LONG_TEXT),
        lambda c: described(c, LONG_TEXT.replace("metric 60", "metric x")),
        "'metric x': float32 ()",
    ),
    "members": (
        lambda c: in_a_group(c, [0, 1]),
        lambda c: in_a_group(c, [0, 2]),
        "ranks: [0, 2] on ranks 0, 2; [0, 1] on rank 1",
    ),
    "group": (
        lambda c: groups_in_another_order(c, True),
        lambda c: groups_in_another_order(c, False),
        "wait for each other in different calls",
    ),
    "both send": (
        lambda c: c.send(torch.ones(1), 0),
        lambda c: c.send(torch.ones(1), 1) if c.rank == 0 else c.barrier("x"),
        "rank 0: send(from=0, to=1, dtype=float32, shape=(1,))",
    ),
    "message": (
        lambda c: c.recv(torch.ones(2), 0),
        lambda c: c.send(torch.ones(1), 1) if c.rank == 0 else c.recv(torch.ones(1), 1),
        "shape: (1,) on rank 0; (2,) on rank 1",
    ),
}


def each_mismatch(fabric):
    plain = fabric.strategy.runtime.communicator
    results = {}
    text = ""
    for name, (odd, others, _) in MISMATCHES.items():
        checker = CollectiveChecker(
            dist.PrefixStore(name, default_store()), plain.rank, plain.size, SHORT
        )
        recorder = FlightRecorder()
        recorder.checks = (checker.check,)
        checked = RecordedCommunicator(plain, recorder)
        checked.barrier("before")
        started = time.monotonic()
        if plain.rank == 1 and odd is None:
            checker.close()
        else:
            text = outcome(lambda: (odd if plain.rank == 1 else others)(checked))  # noqa: B023
        results[name] = (text, time.monotonic() - started)
        plain.barrier("after")
    return results


@pytest.mark.timeout(120)
def test_every_kind_of_mismatch_raises_on_every_rank_within_a_second():
    results = run_in_ranks(each_mismatch, ranks=3)
    for name, (_, _, told) in MISMATCHES.items():
        arrived = [0, 2] if name == "missing last call" else [0, 1, 2]
        for rank in arrived:
            text, seconds = results[rank][name]
            assert text.startswith("CollectiveMismatchError"), (name, rank, text)
            assert told in text or (name in ("both send", "message", "group") and rank == 2), (
                name,
                rank,
                text,
            )
            assert "tests/test_checked.py:" in text
            assert seconds < 1, (name, rank, seconds)


def disagree(fabric):
    if fabric.global_rank == 0:
        return outcome(lambda: fabric.all_reduce({"loss": torch.ones(2)}, reduce_op="sum"))
    return outcome(lambda: fabric.all_reduce({"acc": torch.ones(2)}, reduce_op="sum"))


def test_the_error_names_what_the_user_passed_by_file_and_line():
    line = disagree.__code__.co_firstlineno + 2
    for text in run_in_ranks(disagree, check_collectives=True):
        assert re.search(
            rf"rank 0: all_reduce\(sum of loss: .*\) at .*test_checked.py:{line}\n", text
        ), text
        assert re.search(
            rf"rank 1: all_reduce\(sum of acc: .*\) at .*test_checked.py:{line + 1}\n", text
        ), text


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


def agreeing_calls(fabric, folder):
    """What programs do: collectives of the job, of groups of both kinds, checkpoints, training."""
    rank = fabric.global_rank
    world = fabric.strategy.runtime.communicator
    every_collective(world)
    groups = [world.new_group([0, 1]), world.new_group([1, 2])]
    for count, group in enumerate(groups):
        for _ in range(5 * (count + 1) if group else 0):
            every_collective(group)
    torch_group = dist.new_group([0, 2])
    if rank != 1:
        assert fabric.all_reduce(1, group=torch_group, reduce_op="sum") == 2
    if rank == 0:
        world.send(torch.ones(1), 2)
    if rank == 2:
        world.recv(torch.zeros(1), 0)
    model, optimizer = fabric.setup(
        module := torch.nn.Linear(2, 1), torch.optim.SGD(module.parameters(), lr=0.1)
    )
    for _ in range(2):
        fabric.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
    fabric.save(folder / "a.ckpt", {"model": model, "rank": 0})
    fabric.load(folder / "a.ckpt", {"model": model})
    with fabric.rank_zero_first():
        pass
    if rank == 0:
        fabric.broadcast({"x": torch.ones(2), "y": "text"}, src=0)
    else:
        fabric.broadcast(None, src=0)
    weight = torch.ones(2, requires_grad=True)
    fabric.all_reduce({"b": weight * rank, "a": 1}, reduce_op="sum")["b"].sum().backward()
    for group in filter(None, groups):
        group.close()
    return rank


@pytest.mark.timeout(120)
def test_programs_that_agree_raise_nothing(tmp_path):
    assert run_in_ranks(agreeing_calls, tmp_path, ranks=3, check_collectives=True) == [0, 1, 2]


# -- on and off -----------------------------------------------------------------------------------


def kinds_of_checks(fabric):
    return [check.__self__.__class__ for check in fabric.strategy.runtime.recorder.checks]


@pytest.mark.parametrize(("checks", "kinds"), [(False, []), (True, [CollectiveChecker])])
def test_off_nothing_is_compared(checks, kinds):
    assert run_in_ranks(kinds_of_checks, check_collectives=checks) == [kinds] * 2


OFF = (None, "", "0", "false", "no", "off", "OFF ")
ON = ("1", "true", "yes", "on", "all")


@pytest.mark.parametrize(
    ("value", "on"), [*((one, False) for one in OFF), *((one, True) for one in ON)]
)
def test_the_environment_turns_checks_on(value, on):
    env = {} if value is None else {"FABRIC_CHECK": value}
    assert resolve_plan(accelerator="cpu", env=env).check_collectives is on
    assert resolve_plan(accelerator="cpu", check_collectives=True, env=env).check_collectives

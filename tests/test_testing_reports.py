"""What the test kit says about a call: warnings of ranks, where a rank hangs, explanations."""

import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fabric.testing.base
from fabric import Fabric
from fabric.errors import RankFailedError
from fabric.testing import RankPool, ThreadedWorld
from fabric.testing.plugin import pytest_runtest_call

PoolOf = Callable[[int], RankPool]


class LibraryWarning(UserWarning):
    """A warning of this test module, which no rank can import."""


def warn(fabric: Fabric) -> None:
    warnings.warn("slow", LibraryWarning, stacklevel=1)


def warn_and_fail(fabric: Fabric) -> None:
    warnings.warn("before the failure", UserWarning, stacklevel=1)
    raise ValueError("the failure")


def test_a_warning_of_all_ranks_is_one_warning_of_the_test_at_its_line(rank_pool: PoolOf) -> None:
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("default")
        rank_pool(2).run(warn)
        rank_pool(2).run(warn)
    [record] = records
    assert str(record.message) == "slow"
    assert record.category.__name__ == "LibraryWarning"
    assert record.filename == __file__
    assert record.lineno == warn.__code__.co_firstlineno + 1


def test_a_warning_that_the_test_takes_for_an_error_keeps_the_ranks(rank_pool: PoolOf) -> None:
    pool = rank_pool(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="slow"):
            pool.run(warn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool.run(warn)


def test_a_failed_call_warns_too_and_its_failure_is_the_error(rank_pool: PoolOf) -> None:
    with (
        pytest.warns(UserWarning, match="before the failure"),
        pytest.raises(RankFailedError, match="the failure"),
    ):
        rank_pool(2).run(warn_and_fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RankFailedError, match="the failure"):
            rank_pool(2).run(warn_and_fail)


def reduce_on_first_rank(fabric: Fabric, is_asynchronous: bool) -> None:
    if fabric.global_rank == 1:
        return
    if is_asynchronous:
        work: Any = dist.all_reduce(torch.zeros(1), async_op=True)
        work.wait()
    dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize(
    ("is_asynchronous", "position"),
    [
        (
            False,
            "in torch.distributed.all_reduce, at {file}:{line}: dist.all_reduce(torch.zeros(1))",
        ),
        (True, "at {file}:{line}: work.wait()"),
    ],
)
def test_a_hang_names_the_raw_collective_and_the_line_of_the_user(
    rank_pool: PoolOf, is_asynchronous: bool, position: str
) -> None:
    with pytest.raises(RankFailedError) as caught:
        rank_pool(2).run(reduce_on_first_rank, is_asynchronous, timeout=2)
    line = reduce_on_first_rank.__code__.co_firstlineno + (5 if is_asynchronous else 6)
    headline, _, _ = str(caught.value).partition("\n")
    assert headline.startswith("reduce_on_first_rank: rank 0 of 2 did not return within ")
    # The second hang of a function ends earlier than its timeout, and says why.
    assert re.search(r" s(?: \(not 2 s, .*\))?: ", headline)
    assert headline.endswith(": " + position.format(file=__file__, line=line))


def test_a_hang_of_a_thread_names_the_line_of_the_user() -> None:
    end = threading.Event()

    def wait_for_the_end(fabric: Fabric) -> None:
        end.wait(60)

    with pytest.raises(RankFailedError, match=rf"at {__file__}:\d+: end\.wait\(60\)"):
        ThreadedWorld(1).run(wait_for_the_end, timeout=2)
    end.set()


def notes_after(*notes: str) -> list[str]:
    """Return the notes of an error of a test that the plugin has run."""
    error = AssertionError("1 difference(s)")
    for note in notes:
        error.add_note(note)
    fail_test(error)
    return error.__notes__


def fail_test(error: Exception) -> None:
    """Let the plugin run a test that raises an error."""
    hook = pytest_runtest_call()
    next(hook)
    with pytest.raises(type(error)):
        hook.throw(error)


def test_the_explanation_of_hypothesis_shows_no_lines_of_the_kit() -> None:
    title = ("Explanation:", "    These lines were always and only run by failing test cases:")
    line_of_kit = f"        {fabric.testing.base.__file__}:366"
    line_of_user = "        /home/me/ring.py:3"
    count = "        (and 7 more with settings.verbosity >= verbose)"
    assert notes_after("Failing test case: f()", *title, line_of_kit, line_of_kit) == [
        "Failing test case: f()"
    ]
    assert notes_after(*title, line_of_kit, count) == []
    assert notes_after(*title, line_of_kit, line_of_user, count) == [*title, line_of_user, count]
    assert notes_after("another note") == ["another note"]


def test_the_explanation_of_each_of_several_failures_shows_no_lines_of_the_kit() -> None:
    error = AssertionError("1 difference(s)")
    error.add_note("Failing test case: f()")
    error.add_note("Explanation:")
    error.add_note("    These lines were always and only run by failing test cases:")
    error.add_note(f"        {fabric.testing.base.__file__}:366")
    fail_test(ExceptionGroup("2 failures", [error, ValueError("another")]))
    assert error.__notes__ == ["Failing test case: f()"]

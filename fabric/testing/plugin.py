"""The pytest fixture ``rank_pool``, and shorter reports of hypothesis.

Put ``pytest_plugins = ["fabric.testing.plugin"]`` into the ``conftest.py`` at the root of the
tests, or pass ``-p fabric.testing.plugin``.
"""

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fabric.testing.pool import RankPool

__all__ = ["RankPools", "pytest_runtest_call", "rank_pool"]

_FABRIC = str(Path(__file__).parents[1])


class RankPools:
    """The pools of a session of tests, one for each size and options.

    Args:
        stack: closes the pools.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._pools: dict[Any, RankPool] = {}

    def __call__(self, size: int, **options: Any) -> RankPool:
        """Return the pool of a number of ranks. The first call makes the pool.

        Args:
            size: the number of ranks.
            **options: arguments of :class:`fabric.testing.RankPool`.
        """
        # The text of the options is hashable, even if an option is not.
        key = (size, repr(sorted(options.items())))
        if key not in self._pools:
            self._pools[key] = self._stack.enter_context(RankPool(size, **options))
        return self._pools[key]

    def __repr__(self) -> str:
        # Hypothesis prints this text for the argument of a failing test.
        return "rank_pool"


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPools]:
    """Provide a function that returns the pool of a number of ranks, with options of RankPool.

    All tests of the session share one pool for each size and options. The processes of a pool start
    at the first call of ``run``, and end with the session.
    """
    with ExitStack() as stack:
        yield RankPools(stack)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Run a test. If it fails, remove the lines of fabric from the explanation of hypothesis.

    Hypothesis lists the lines that only failing examples have run. Lines of fabric, such as those
    of :func:`assert_same`, say nothing about the code that is tested.
    """
    __tracebackhide__ = True  # pytest does not show this frame
    try:
        return (yield)
    except Exception as error:
        _shorten_explanation(error)
        raise


def _shorten_explanation(error: BaseException) -> None:
    """Remove the lines of fabric from the notes of an error, in place.

    Hypothesis raises a group of errors if examples fail in different ways. Then the notes of all
    members are shortened.
    """
    notes = getattr(error, "__notes__", None)
    if notes:
        error.__notes__ = _without_lines_of_fabric(notes)
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            _shorten_explanation(member)


def _without_lines_of_fabric(notes: list[str]) -> list[str]:
    """Return the notes of an error without the explanation's lines of fabric.

    Args:
        notes: the lines of hypothesis' report. An explanation is a title, a sentence, and then one
            indented line for each line of code, with its path.
    """
    kept_notes: list[str] = []
    has_removed_line = False
    for note in notes:
        if "Explanation:" in kept_notes and note.strip().startswith(_FABRIC):
            has_removed_line = True
        else:
            kept_notes.append(note)
    if has_removed_line:
        # The whole explanation is removed if no line of code remains. After the title and the
        # sentence, there may still be "(and 3 more lines with ...)".
        start = kept_notes.index("Explanation:")
        remaining_lines = kept_notes[start + 2 :]
        is_empty = all(line.strip().startswith("(and ") for line in remaining_lines)
        if is_empty:
            del kept_notes[start:]
    return kept_notes

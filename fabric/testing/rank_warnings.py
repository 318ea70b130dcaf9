"""Warnings of ranks, which are given again in the process of the test.

A rank cannot know which warnings the test ignores, expects, or takes for errors, and which it has
printed before. So a rank gives all warnings of a call to the process of the test, whose filters
decide.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from fabric.errors import ArgumentTypeError
from fabric.launchers.serialize import dump_result

__all__ = ["RankWarning", "WarningRegistries", "dump_warnings", "recorded_warnings"]


class RankWarning(NamedTuple):
    """A warning of a rank. The fields are arguments of ``warnings.warn_explicit``."""

    message: str
    category: type[Warning]
    filename: str
    lineno: int


@contextmanager
def recorded_warnings() -> Iterator[list[RankWarning]]:
    """Record all warnings of this process during the block, and print none of them.

    Yields:
        A list, which is filled with the distinct warnings at the end of the block. It stays empty
        if the block raises.
    """
    distinct: list[RankWarning] = []
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        yield distinct
    for record in records:
        warning = RankWarning(str(record.message), record.category, record.filename, record.lineno)
        if warning not in distinct:
            distinct.append(warning)


def dump_warnings(rank_warnings: Sequence[RankWarning]) -> bytes:
    """Pickle warnings. If one cannot be pickled, all classes are replaced by built-in ones."""
    try:
        return dump_result(list(rank_warnings))
    except ArgumentTypeError:
        return dump_result([_with_builtin_category(warning) for warning in rank_warnings])


def _with_builtin_category(warning: RankWarning) -> RankWarning:
    """Return the warning with the nearest base class of its class that Python defines."""
    for category in warning.category.__mro__:
        if category.__module__ == "builtins":
            return warning._replace(category=category)
    raise AssertionError("Warning itself is built in")


class WarningRegistries:
    """The record of the warnings that the process of a test has given again.

    By default Python gives a warning of one line only once. It looks up the earlier warnings of a
    file in a registry.
    """

    def __init__(self) -> None:
        # By file name. They take the place of each module's __warningregistry__.
        self._registries: dict[str, dict[Any, Any]] = {}

    def warn_again(self, rank_warnings: Sequence[RankWarning]) -> None:
        """Give warnings of ranks in this process, whose filters decide what becomes of them.

        Raises:
            Warning: a filter turns a warning into an error.
        """
        # Most warnings come from all ranks, and are given once. A dict keeps the order.
        distinct_warnings = dict.fromkeys(rank_warnings)
        for warning in distinct_warnings:
            registry = self._registries.setdefault(warning.filename, {})
            warnings.warn_explicit(
                warning.message,
                warning.category,
                warning.filename,
                warning.lineno,
                registry=registry,
            )

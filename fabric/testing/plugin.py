"""The pytest fixture ``rank_pool``.

Put ``pytest_plugins = ["fabric.testing.plugin"]`` into the ``conftest.py`` at the root of the
tests, or pass ``-p fabric.testing.plugin``.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from fabric.testing.pool import RankPool

__all__ = ["rank_pool"]


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """Provide a function that returns the pool of a number of ranks.

    The whole session shares one pool of each size. A pool starts its processes at its first call of
    ``run``. They end with the session.
    """
    with ExitStack() as stack:

        @cache
        def pool_of(size: int) -> RankPool:
            return stack.enter_context(RankPool(size))

        yield pool_of

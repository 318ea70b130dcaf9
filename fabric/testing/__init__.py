"""A kit for property tests of code that runs on several ranks: worlds to run it in, and oracles to hold it against.

The hypothesis strategies are in :mod:`fabric.testing.generators`, which is the one part that needs hypothesis; the
pytest fixture is in :mod:`fabric.testing.plugin`.
"""

from fabric.testing import oracles
from fabric.testing.base import PerRank, World, assert_same, differences
from fabric.testing.conformance import assert_equivalent, check_communicator, check_strategy
from fabric.testing.pool import RankPool
from fabric.testing.threads import ThreadedWorld

__all__ = [
    "PerRank", "RankPool", "ThreadedWorld", "World", "assert_equivalent", "assert_same", "check_communicator",
    "check_strategy", "differences", "oracles",
]  # fmt: skip

"""A kit for property tests of code that runs on several ranks: worlds to run it in, and oracles to hold it against.

The hypothesis strategies are in :mod:`fabric.testing.generators`, which is the one part that needs hypothesis; the
pytest fixture is in :mod:`fabric.testing.plugin`.
"""

from fabric.testing import oracles
from fabric.testing.base import PerRank, World
from fabric.testing.compare import assert_same, differences
from fabric.testing.pool import RankPool

__all__ = ["PerRank", "RankPool", "World", "assert_same", "differences", "oracles"]

"""A kit for property tests of code that runs on several ranks: worlds to run it in, and oracles to hold it against."""

from fabric.testing.base import PerRank, World
from fabric.testing.pool import RankPool

__all__ = ["PerRank", "RankPool", "World"]

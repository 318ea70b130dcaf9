"""A kit for property tests of code that runs on several ranks: worlds and oracles.

A world runs a function on every rank, and an oracle returns what the ranks should return. The
hypothesis strategies are in :mod:`fabric.testing.generators`, the only file that needs hypothesis.
The pytest fixture is in :mod:`fabric.testing.plugin`.
"""

from fabric.testing import oracles
from fabric.testing.base import PerRank, World, assert_same, differences
from fabric.testing.conformance import assert_equivalent, check_communicator, check_strategy
from fabric.testing.contracts import (
    check_accelerator,
    check_checkpoint_io,
    check_environment,
    check_launcher,
    check_precision,
)
from fabric.testing.pool import RankPool
from fabric.testing.threads import ThreadedWorld

__all__ = [
    "PerRank",
    "RankPool",
    "ThreadedWorld",
    "World",
    "assert_equivalent",
    "assert_same",
    "check_accelerator",
    "check_checkpoint_io",
    "check_communicator",
    "check_environment",
    "check_launcher",
    "check_precision",
    "check_strategy",
    "differences",
    "oracles",
]

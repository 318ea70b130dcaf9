"""Errors have four parts and survive pickling from one process to another."""

import copy
import pickle

import pytest

from fabric import errors
from fabric.errors import CheckpointNotFoundError, ConfigurationError, FabricError, RankFailedError

KINDS = [getattr(errors, name) for name in errors.__all__]
FOUR_PARTS = [kind for kind in KINDS if kind is not RankFailedError]


def test_the_text_has_the_four_parts_in_order():
    text = str(ConfigurationError("devices=9", "there are 2", "1 or 2", "Fabric(devices=2)"))
    assert text == "devices=9\n  there are 2\n  Valid: 1 or 2\n  Write: Fabric(devices=2)"


def test_parts_that_are_missing_leave_no_gap():
    assert str(FabricError("request")) == "request"
    assert str(FabricError("request", suggestion="this")) == "request\n  Write: this"


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ConfigurationError, ValueError),
        (errors.ArgumentTypeError, TypeError),
        (errors.UsageError, RuntimeError),
        (errors.MissingDependencyError, ImportError),
        (errors.NonFiniteGradientError, RuntimeError),
        (errors.RankFailedError, RuntimeError),
        (errors.CheckpointError, RuntimeError),
        (errors.CheckpointNotFoundError, FileNotFoundError),
        (errors.DamagedCheckpointError, errors.CheckpointError),
        (errors.UnsafeCheckpointError, errors.CheckpointError),
    ],
)
def test_each_error_is_what_python_would_raise_too(kind, builtin):
    with pytest.raises(builtin):
        raise kind("request")
    assert issubclass(kind, FabricError)


@pytest.mark.parametrize("kind", FOUR_PARTS)
@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))]
)
def test_errors_keep_their_parts_and_notes(kind, again):
    error = kind("request", "problem", "expected", "suggestion")
    error.add_note("on rank 1")
    other = again(error)
    assert type(other) is kind
    assert str(other) == str(error)
    assert (other.request, other.problem, other.expected, other.suggestion) == (
        "request",
        "problem",
        "expected",
        "suggestion",
    )
    assert other.__notes__ == ["on rank 1"]


def test_a_failed_rank_keeps_its_traceback():
    error = RankFailedError(
        "launch(train)", rank=3, exit_code=-9, traceback="Traceback\n  x\n", problem="killed"
    )
    error.add_note("a note")
    other = pickle.loads(pickle.dumps(error))
    assert (other.rank, other.exit_code, other.traceback, other.problem) == (
        3,
        -9,
        "Traceback\n  x\n",
        "killed",
    )
    assert str(other) == str(error) == "launch(train)\n  killed\nTraceback\n  x"
    assert other.__notes__ == ["a note"]


def test_a_missing_checkpoint_shows_its_own_text():
    assert "ckpt.pt" in str(CheckpointNotFoundError('load("ckpt.pt")', "there is no such file"))


def test_the_tree_in_the_docstring_is_complete():
    assert all(name in errors.__doc__ for name in errors.__all__)

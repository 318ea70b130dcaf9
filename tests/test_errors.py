"""Errors have four parts and survive pickling from one process to another."""

import copy
import pickle

import pytest

from fabric import errors
from fabric.errors import CheckpointNotFoundError, ConfigurationError, FabricError, RankFailedError

WITH_FOUR_PARTS = [getattr(errors, name) for name in errors.__all__ if name != "RankFailedError"]


def pickled_copy(error: Exception) -> Exception:
    return pickle.loads(pickle.dumps(error))


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
def test_an_error_is_caught_as_the_builtin_error_of_its_kind(kind, builtin):
    with pytest.raises(builtin):
        raise kind("request")
    assert issubclass(kind, FabricError)


@pytest.mark.parametrize("kind", WITH_FOUR_PARTS)
@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickled_copy])
def test_copies_of_errors_keep_their_parts_and_notes(kind, make_copy):
    error = kind("request", "problem", "expected", "suggestion")
    error.add_note("on rank 1")
    result = make_copy(error)
    assert type(result) is kind
    assert str(result) == str(error)
    assert result.request == "request"
    assert result.problem == "problem"
    assert result.expected == "expected"
    assert result.suggestion == "suggestion"
    assert result.__notes__ == ["on rank 1"]


def test_a_failed_rank_keeps_its_traceback():
    error = RankFailedError(
        "launch(train)", rank=3, exit_code=-9, traceback="Traceback\n  x\n", problem="killed"
    )
    error.add_note("a note")
    result = pickle.loads(pickle.dumps(error))
    assert result.rank == 3
    assert result.exit_code == -9
    assert result.traceback == "Traceback\n  x\n"
    assert result.problem == "killed"
    assert str(error) == "launch(train)\n  killed\nTraceback\n  x"
    assert str(result) == str(error)
    assert result.__notes__ == ["a note"]


def test_a_missing_checkpoint_shows_its_own_text():
    assert "ckpt.pt" in str(CheckpointNotFoundError('load("ckpt.pt")', "there is no such file"))


def test_the_tree_in_the_docstring_is_complete():
    for name in errors.__all__:
        assert name in errors.__doc__

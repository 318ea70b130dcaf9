"""How long calls of a pool may take: hangs, shrinking, and imports before the calls."""

import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric import Fabric
from fabric.errors import ConfigurationError, RankFailedError, UsageError
from fabric.testing import RankPool


def hang_or_compute(fabric: Fabric, seconds: float) -> str:
    """Wait for a rank that makes no call if ``seconds`` is zero, else use the processor."""
    if seconds == 0 and fabric.global_rank == 0:
        dist.barrier()
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return "done"


def test_idle_ranks_of_a_function_that_has_hung_are_not_waited_for_again() -> None:
    with RankPool(2) as pool:
        with pytest.raises(RankFailedError, match="did not return within 3 s"):
            pool.run(hang_or_compute, 0.0, timeout=3)
        reason = r"not 100 s, since the ranks were idle and this function has hung before"
        problem = rf"rank 0 of 2 did not return within [\d.]+ s \({reason}\)"
        with pytest.raises(RankFailedError, match=problem) as caught:
            pool.run(hang_or_compute, 0.0, timeout=100)
        assert "did not return within 100 s" not in str(caught.value)
        # Ranks that compute have the whole timeout.
        assert pool.run(hang_or_compute, 1.0, timeout=100) == ["done", "done"]


def fail_above_10(fabric: Fabric, number: int) -> None:
    if number > 10:
        raise ValueError("above 10")


def test_hypothesis_reports_the_smallest_example_when_shrinking_takes_too_long() -> None:
    examples: list[int] = []
    with RankPool(1, max_shrinking_time=0) as pool:

        @settings(max_examples=100, database=None, derandomize=True)
        @given(st.integers(0, 1_000_000))
        def law(number: int) -> None:
            pool.run(fail_above_10, number)
            examples.append(number)

        for _ in range(2):  # the second run of the test has a budget of its own
            with pytest.raises(RankFailedError, match="above 10") as caught:
                law()
            assert "This may not be the smallest example" in "".join(caught.value.__notes__)
    assert all(number <= 10 for number in examples)


def loaded_modules(fabric: Fabric) -> bool:
    return "preloaded" in sys.modules


def test_modules_are_imported_before_the_ranks_are_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "preloaded.py").write_text("")
    (tmp_path / "broken.py").write_text("raise ValueError")
    monkeypatch.syspath_prepend(tmp_path)
    with RankPool(1, preload=["preloaded"]) as pool:
        assert pool.run(loaded_modules) == [True]
    assert "preloaded" not in sys.modules
    with pytest.raises(ConfigurationError, match=r"no module 'preloaded\.nowhere'"):
        RankPool(1, preload=["preloaded.nowhere"])
    with RankPool(1, preload=["broken"]) as pool, pytest.raises(UsageError, match="import of a m"):
        pool.run(loaded_modules)

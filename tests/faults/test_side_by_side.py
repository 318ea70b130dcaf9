"""Jobs on one machine do not know of each other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.jobs import nothing_left

MANY = Path(__file__).parents[1] / "scripts" / "launchers" / "many.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_launches_ten_at_a_time_never_meet(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(MANY), str(number), "20"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(10)
    ]  # fmt: skip
    ended = [process.communicate(timeout=540) for process in processes]
    assert ended == [("all mine\n", "")] * 10
    nothing_left(tmp_path)

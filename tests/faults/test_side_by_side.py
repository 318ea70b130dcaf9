"""Jobs that run on one machine at the same time do not meet."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.jobs import assert_no_files_left

MANY = Path(__file__).parents[1] / "scripts" / "launchers" / "many.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("jobs", "launches"), [(5, 6), pytest.param(10, 20, marks=pytest.mark.soak)]
)
def test_launches_beside_each_other_never_meet(tmp_path, jobs, launches):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    processes = []
    for number in range(jobs):
        process = subprocess.Popen(
            [sys.executable, str(MANY), str(number), str(launches)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
    outputs = [process.communicate(timeout=540) for process in processes]
    assert outputs == [("all mine\n", "")] * jobs
    assert_no_files_left(tmp_path)

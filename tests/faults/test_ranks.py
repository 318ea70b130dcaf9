"""A rank fails: the job ends within seconds, and its last words are those of the rank that failed first."""

from itertools import product

import pytest

from tests.faults.jobs import Job, command, within
from tests.faults.train import LAUNCHERS, ON_ONE
from tests.sampling import sampled

pytestmark = pytest.mark.timeout(90)

# Fault: exit code, what is said of rank 1, what the report ends with.
EXPECTED = {
    "raises": (1, "failed", "ValueError: the loss is not a number"),
    "raises_in_collective": (1, "failed", ""),
    "raises_in_backward": (1, "failed", "ValueError: the loss is not a number"),
    "raises_beside_a_lock": (1, "failed", "ValueError: the loss is not a number"),
    "raises_and_tears_down": (1, "failed", "ValueError: the loss is not a number"),
    "exits": (3, "exit code 3", ""),
    "returns": (1, "exited with exit code 0", ""),
    "killed": (128 + 9, "was killed by SIGKILL", ""),
    "segfaults": (128 + 11, "was killed by SIGSEGV", ""),
    "out_of_memory": (1, "failed", "MemoryError"),
    "raises_stubborn": (1, "failed", "StubbornError: as it is"),
    "raises_long": (1, "failed", "end"),
}
# In `make test` a launcher stands for its faults and a fault for its launchers.
QUICK = [("popen", "raises_and_tears_down"), ("run", "returns"), ("forkserver", "segfaults")]
MATRIX = sampled(product(LAUNCHERS, [fault.__name__ for fault in ON_ONE]), quick=QUICK, slow=16)


@pytest.mark.parametrize(("launcher", "fault"), MATRIX)
def test_the_first_rank_to_fail_has_the_last_word(tmp_path, launcher, fault):
    code, words, last = EXPECTED[fault]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with Job(temporary, command(launcher, fault)) as job:
        ended = job.end(float(job.line("fault").split()[1]))
    report = ended.errors[ended.errors.rindex("rank 1 of 2 ") :]
    assert words in report.splitlines()[0]
    assert report.rstrip().endswith(last)
    assert len(report) < 30_000
    assert report.count("Traceback") <= 1
    assert ended.seconds < within()
    assert ended.code == code

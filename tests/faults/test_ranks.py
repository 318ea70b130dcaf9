"""When a rank fails, the job ends within seconds and reports the rank that failed first."""

from itertools import product
from typing import NamedTuple

import pytest

from tests.faults.jobs import Job, command, within
from tests.faults.train import LAUNCHERS, ON_ONE
from tests.sampling import sampled


class Expected(NamedTuple):
    """The expected end of a job."""

    exit_code: int
    # What the first line of the report says of rank 1.
    outcome: str
    # The end of the report.
    last_words: str = ""


EXPECTED = {
    "raises": Expected(1, "failed", "ValueError: the loss is not a number"),
    "raises_in_collective": Expected(1, "failed"),
    "raises_in_backward": Expected(1, "failed", "ValueError: the loss is not a number"),
    "raises_beside_a_lock": Expected(1, "failed", "ValueError: the loss is not a number"),
    "raises_and_tears_down": Expected(1, "failed", "ValueError: the loss is not a number"),
    "exits": Expected(3, "exit code 3"),
    "returns": Expected(1, "exited with exit code 0"),
    "killed": Expected(128 + 9, "was killed by SIGKILL"),
    "segfaults": Expected(128 + 11, "was killed by SIGSEGV"),
    "out_of_memory": Expected(1, "failed", "MemoryError"),
    "raises_stubborn": Expected(1, "failed", "StubbornError: as it is"),
    "raises_long": Expected(1, "failed", "end"),
}
FAULTS = [function.__name__ for function in ON_ONE]
# The quick tests take a few faults and launchers in place of all their pairs.
QUICK = [("fork", "raises_and_tears_down"), ("forkserver", "segfaults")]


@pytest.mark.parametrize(
    ("launcher", "fault"), sampled(product(LAUNCHERS, FAULTS), quick=QUICK, slow=11)
)
def test_the_first_rank_to_fail_has_the_last_word(tmp_path, launcher, fault):
    expected = EXPECTED[fault]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with Job(temporary, command(launcher, fault)) as job:
        time_of_fault = float(job.line("fault").split()[1])
        ended = job.end(time_of_fault)
    start_of_report = ended.errors.rindex("rank 1 of 2 ")
    report = ended.errors[start_of_report:]
    first_line, *_ = report.splitlines()
    assert expected.outcome in first_line
    assert report.rstrip().endswith(expected.last_words)
    assert len(report) < 30_000
    assert report.count("Traceback") <= 1
    assert ended.seconds < within()
    assert ended.code == expected.exit_code

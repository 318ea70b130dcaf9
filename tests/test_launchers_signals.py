"""Ctrl-C, SIGTERM and SIGKILL for the launching process: grace for the ranks, and no orphans."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.jobs import nothing_left

SCRIPTS = Path(__file__).parent / "scripts" / "launchers"
pytestmark = pytest.mark.timeout(60)
# In `make test` these two stand for all: one re-runs the script, one runs a function.
LAUNCHERS = (
    "popen",
    pytest.param("spawn", marks=pytest.mark.slow),
    pytest.param("fork", marks=pytest.mark.slow),
    "forkserver",
)


class Job:
    """A script with two ranks, in a process group of its own, as a terminal would start it."""

    def __init__(self, directory, *command):
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, *command],
            env=dict(os.environ, OMP_NUM_THREADS="1", TMPDIR=str(directory)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline().split() for _ in range(2)]
        assert [word for word, _ in lines] == ["ready", "ready"]
        self.ranks = [psutil.Process(int(pid)) for _, pid in lines]

    def end(self):
        """Seconds until everything is gone, standard output and error."""
        start = time.monotonic()
        output, errors = self.process.communicate(timeout=20)
        _, alive = psutil.wait_procs(self.ranks, timeout=5)
        assert not alive, "ranks outlived the launching process"
        seconds = time.monotonic() - start
        nothing_left(self.directory)
        return seconds, output, errors


@pytest.fixture
def job(tmp_path):
    jobs = []

    def start(launcher, action, script="job.py"):
        jobs.append(Job(tmp_path, str(SCRIPTS / script), launcher, action))
        return jobs[-1]

    yield start
    for started in jobs:
        if started.process.poll() is None:
            os.killpg(started.process.pid, signal.SIGKILL)
            started.process.communicate(timeout=5)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("to_group", [False, True], ids=["parent", "group"])
def test_interrupt_runs_finally_blocks_once(job, launcher, to_group):
    running = job(launcher, "wait")
    (os.killpg if to_group else os.kill)(running.process.pid, signal.SIGINT)
    seconds, output, errors = running.end()
    assert sorted(output.split("\n")) == ["", "finally 0", "finally 1"]
    assert running.process.returncode in (130, -signal.SIGINT)
    assert seconds < 4
    assert len(errors.splitlines()) < 30
    assert launcher != "popen" or errors == ""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_terminate_runs_finally_blocks_and_exits_with_143(job, launcher):
    running = job(launcher, "wait")
    running.process.terminate()
    seconds, output, errors = running.end()
    assert sorted(output.split("\n")) == ["", "finally 0", "finally 1"]
    assert (running.process.returncode, errors) == (143, "")
    assert seconds < 4


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_interrupt_ends_ranks_that_wait_in_cpp(job, launcher):
    running = job(launcher, "wait_in_cpp")
    os.killpg(running.process.pid, signal.SIGINT)
    seconds, _, _ = running.end()
    assert running.process.returncode in (130, -signal.SIGINT)
    assert seconds < 6


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("action", ["wait", "wait_in_cpp"])
def test_ranks_follow_a_parent_that_was_killed(job, launcher, action):
    running = job(launcher, action)
    running.process.kill()
    seconds, _, _ = running.end()
    assert seconds < 5


def test_interrupt_while_scripts_are_preparing_is_quiet_and_quick(job):
    running = job("popen", "", script="slow_start.py")
    os.killpg(running.process.pid, signal.SIGINT)
    seconds, _, errors = running.end()
    assert (running.process.returncode, errors) == (130, "")
    assert seconds < 2


def test_an_impatient_second_interrupt_ends_the_grace_period(job):
    running = job("popen", "stubborn")
    running.process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        running.process.wait(timeout=1)
    running.process.send_signal(signal.SIGINT)
    seconds, _, _ = running.end()
    assert running.process.returncode == 130
    assert seconds < 1.5

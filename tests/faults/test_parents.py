"""When the launching process is killed, interrupted or terminated, its ranks end within seconds."""

import os
import signal
import sys
from itertools import product

import pytest

from tests.faults.jobs import TRAIN, Job, command, within
from tests.faults.train import LAUNCHERS
from tests.sampling import sampled

STATES = ("waits", "trains", "waits_in_cpp", "holds_the_lock")
LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="only its kernel kills a process with its parent"
)


@pytest.fixture
def temporary(tmp_path):
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


def marks_of_kill(case):
    _, state = case
    if state == "holds_the_lock":
        return [LINUX]
    return []


KILLED = sampled(
    product(LAUNCHERS, STATES),
    quick=[("popen", "holds_the_lock")],
    slow=6,
    marks=marks_of_kill,
)
SIGNALS = sampled(
    product(LAUNCHERS, STATES[:3], ["SIGINT", "SIGTERM"], ["parent", "group"]),
    quick=[("fork", "waits", "SIGINT", "parent")],
    slow=9,
)


@pytest.mark.parametrize(("launcher", "state"), KILLED)
def test_ranks_follow_a_launching_process_that_was_killed(temporary, launcher, state):
    with Job(temporary, command(launcher, state)) as job:
        ended = job.end(job.signal(signal.SIGKILL))
    assert ended.seconds < within()
    assert len(ended.errors.splitlines()) <= 15


@pytest.mark.parametrize("launcher", sampled(product(LAUNCHERS), slow=2))
def test_ranks_started_under_nohup_follow_too(temporary, launcher):
    with Job(temporary, ["nohup", *command(launcher, "waits_in_cpp")]) as job:
        os.kill(job.process.pid, signal.SIGHUP)
        assert job.process.poll() is None
        ended = job.end(job.signal(signal.SIGKILL))
    assert ended.seconds < within()


@pytest.mark.parametrize(("launcher", "state", "name", "target"), SIGNALS)
def test_a_signal_is_passed_on_with_time_for_finally_blocks(
    temporary, launcher, state, name, target
):
    number = signal.Signals[name]
    with Job(temporary, command(launcher, state)) as job:
        time_of_signal = job.signal(number, to_group=(target == "group"))
        ended = job.end(time_of_signal)
    assert ended.seconds < within()
    assert len(ended.errors.splitlines()) <= 15
    # After a KeyboardInterrupt that nobody catches, Python ends itself by the signal, which a shell
    # shows as 128 + n.
    assert ended.code in (128 + number, -number)
    if state == "waits":
        assert ended.output.count("finally 0") == 1
        assert ended.output.count("finally 1") == 1


@LINUX
@pytest.mark.parametrize("launcher", sampled(product(LAUNCHERS), slow=2))
def test_sigterm_ends_ranks_that_hold_the_lock_of_the_interpreter(temporary, launcher):
    with Job(temporary, command(launcher, "holds_the_lock")) as job:
        ended = job.end(job.signal(signal.SIGTERM))
    assert ended.code == 143
    assert ended.seconds < within()


def assert_saved_together(ended):
    ranks = []
    steps = []
    for line in ended.output:
        if line.startswith("saved"):
            _, rank, step = line.split()
            ranks.append(rank)
            steps.append(step)
    assert sorted(ranks) == ["0", "1"]
    assert steps[0] == steps[1], "the ranks stopped at different steps"


@pytest.mark.parametrize("launcher", sampled(product(LAUNCHERS), quick=[("fork",)], slow=2))
def test_a_script_that_reads_should_stop_has_time_to_save(temporary, launcher):
    with Job(temporary, command(launcher, "saves_and_leaves")) as job:
        for _ in job.ranks:
            job.line("trains")
        ended = job.end(job.signal(signal.SIGTERM))
    assert_saved_together(ended)
    assert ended.code == 143
    assert ended.seconds < within(10)


# In `make test`, test_preemption.py sends a signal to one rank.
@pytest.mark.slow
def test_should_stop_is_true_everywhere_once_one_rank_has_the_signal(temporary):
    with Job(temporary, command("forkserver", "saves_and_leaves")) as job:
        for _ in job.ranks:
            job.line("trains")
        os.kill(job.ranks[1].pid, signal.SIGTERM)
        ended = job.end(0.0)
    lines_of_saves = [line for line in ended.output if line.startswith("saved")]
    assert len(lines_of_saves) == 2
    assert ended.code == 0


@pytest.mark.slow
def test_a_script_that_reads_should_stop_has_the_time_that_torchrun_allows(temporary, tmp_path):
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        f"--log-dir={tmp_path / 'logs'}",
    ]
    started = [sys.executable, *torchrun, str(TRAIN), "run", "saves_and_leaves"]
    with Job(temporary, started) as job:
        for _ in job.ranks:
            job.line("trains")
        ended = job.end(job.signal(signal.SIGTERM))
    assert_saved_together(ended)
    assert ended.seconds < within(10)

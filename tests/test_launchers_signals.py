"""What signals do to the main thread of a rank, and how long fabric waits when a job ends."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fabric.errors import RankFailedError
from fabric.launchers import LAUNCHERS, LaunchSpec
from fabric.launchers.supervisor import (
    COLLECT_TIMEOUT,
    DESCRIBE_TIMEOUT,
    END_GRACE,
    INTERRUPT_GRACE,
)

TAKEN_BY_ANOTHER_THREAD = """
import signal, threading
from fabric.launchers.rank import raise_on_signals
raise_on_signals(print)
# The handler runs in C in the timer's thread, and nothing interrupts the wait of the main thread.
timer = threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.{number}))
try:
    timer.start()
    threading.Event().wait()
finally:
    print("finally")
"""
FORKED = """
import os, signal, threading
from fabric.launchers.rank import raise_on_signals
raise_on_signals(print)
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    try:
        os.write(writing, b"ready")
        threading.Event().wait(30)
    except SystemExit:
        os._exit(7)
os.read(reading, 5)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), threading.Event().wait(0.5))
"""
NEEDS_FULL = pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="needs a device that is full"
)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", -signal.SIGINT)])
def test_a_signal_that_does_not_interrupt_the_main_thread_still_runs_its_finally_blocks(
    number, code
):
    process = run(TAKEN_BY_ANOTHER_THREAD.format(number=number))
    assert process.returncode == code
    assert "finally\n" in process.stdout


def test_a_signal_to_a_process_that_a_rank_forked_does_not_signal_the_rank():
    process = run(FORKED)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "7 False\n"


def test_the_waits_of_fabric_leave_time_within_five_seconds():
    poll = 0.1
    assert poll + COLLECT_TIMEOUT + DESCRIBE_TIMEOUT + END_GRACE <= 3.5
    assert poll + INTERRUPT_GRACE <= 3.5


def sleep_with_the_lock():
    ctypes.PyDLL(None).sleep(60)


def compute_with_the_lock():
    sum(range(10**15))


def clean_up():
    try:
        threading.Event().wait()
    finally:
        time.sleep(60)


def seconds_until_the_end(state):
    """Return the seconds of a launch in which rank 1 fails while rank 0 is in this state."""

    def action():
        if os.environ["RANK"] == "1":
            raise ValueError("the cause")
        state()

    began = time.monotonic()
    with pytest.raises(RankFailedError, match="the cause"):
        LAUNCHERS["fork"].launch(action, (), {}, LaunchSpec(num_processes=2))
    return time.monotonic() - began


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which process computes")
def test_only_a_rank_that_responds_or_computes_has_its_grace_period():
    unresponsive = seconds_until_the_end(sleep_with_the_lock)
    computing = seconds_until_the_end(compute_with_the_lock)
    cleaning_up = seconds_until_the_end(clean_up)
    assert unresponsive < computing - 0.5
    assert unresponsive < cleaning_up - 0.3


EXITS = """
import atexit, threading, time
from fabric.launchers.rank import exit_process
atexit.register(print, "handler")
threading.Timer(0.2, print, ["thread"]).start()
exit_process(3)
"""


def test_a_rank_that_leaves_without_tearing_down_waits_for_threads_and_runs_its_exit_handlers():
    process = run(EXITS)
    assert process.returncode == 3, process.stderr
    assert process.stdout == "thread\nhandler\n"


FILES = """
import gc
from fabric.launchers.rank import exit_process

text = open("text", "w")
binary = open("binary", "wb")
updated = open("updated", "w+b")
full = open("/dev/full", "w")
raw = open("raw", "wb", buffering=0)
closed = open("closed", "w")
detached = open("detached", "w")
for file in (full, text):
    file.write("written")
for file in (binary, updated, raw):
    file.write(b"written")
closed.close()
detached.detach()
gc.freeze()
exit_process(3)
"""


@NEEDS_FULL
def test_a_rank_that_leaves_without_tearing_down_writes_what_its_files_hold(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = run(FILES)
    assert process.stderr == ""
    assert process.returncode == 3
    for name in ("text", "binary", "updated", "raw"):
        assert (tmp_path / name).read_text() == "written"


# Statements that replace the standard output.
STREAMS = {
    "None": "sys.stdout = None",
    "closed": "sys.stdout.close()",
    "full": "sys.stdout = open('/dev/full', 'w'); print(1)",
}


@pytest.mark.parametrize(
    ("code", "stream", "expected"),
    [
        (3, "None", 3),
        (3, "closed", 3),
        (0, "closed", 0),
        pytest.param(3, "full", 3, marks=NEEDS_FULL),
        pytest.param(0, "full", 120, marks=NEEDS_FULL),
    ],
)
def test_a_standard_stream_that_cannot_be_flushed_changes_no_exit_code_but_that_of_success(
    code, stream, expected
):
    imports = "import sys; from fabric.launchers.rank import exit_process"
    process = run(f"{imports}; {STREAMS[stream]}; exit_process({code})")
    assert process.stderr == ""
    assert process.returncode == expected


LAUNCHES_FORKS = """
import signal
import time
from fabric import Fabric

# SIGHUP is ignored where the tests run under nohup.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

def train(fabric):
    try:
        print("ready\\n", end="", flush=True)
        time.sleep(60)
    finally:
        time.sleep(0.2)
        print("finally\\n", end="", flush=True)

Fabric(accelerator="cpu", devices=2, launcher="fork").launch(train)
"""


def test_a_closed_terminal_leaves_the_finally_blocks_their_time():
    command = [sys.executable, "-c", LAUNCHES_FORKS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        assert job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGHUP)
        output, _ = job.communicate(timeout=30)
        assert output == "finally\n" * 2
        assert job.returncode == 128 + signal.SIGHUP

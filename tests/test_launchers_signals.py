"""What signals do to the main thread of a rank, and how long fabric waits when a job ends."""

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from fabric.errors import RankFailedError
from fabric.launchers import LAUNCHERS, LaunchSpec, supervisor
from fabric.launchers.supervisor import (
    COLLECT_TIMEOUT,
    DESCRIBE_TIMEOUT,
    END_GRACE,
    INTERRUPT_GRACE,
    RankProcess,
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
IN_A_CALL_THAT_CANNOT_RAISE = """
import os, signal, threading
from fabric.launchers.rank import raise_on_signals
raise_on_signals(print)

class Object:
    def __del__(self):
        os.kill(os.getpid(), signal.{number})

try:
    Object()
    threading.Event().wait()
finally:
    print("finally")
"""
OTHER_ERROR_IN_A_CALL_THAT_CANNOT_RAISE = """
from fabric.launchers.rank import raise_on_signals
raise_on_signals(print)

class Object:
    def __del__(self):
        raise ValueError("the error of __del__")

Object()
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
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False
    )


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", -signal.SIGINT)])
def test_a_signal_that_does_not_interrupt_the_main_thread_still_runs_its_finally_blocks(
    number, code
):
    process = run(TAKEN_BY_ANOTHER_THREAD.format(number=number))
    assert process.returncode == code
    assert "finally\n" in process.stdout


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", -signal.SIGINT)])
def test_a_signal_in_a_call_that_cannot_raise_still_ends_the_rank(number, code):
    process = run(IN_A_CALL_THAT_CANNOT_RAISE.format(number=number))
    assert process.returncode == code
    assert "finally\n" in process.stdout
    assert "Exception ignored" not in process.stderr


def test_other_errors_of_calls_that_cannot_raise_are_still_printed():
    process = run(OTHER_ERROR_IN_A_CALL_THAT_CANNOT_RAISE)
    assert process.returncode == 0
    assert "ValueError: the error of __del__" in process.stderr


def test_a_signal_to_a_process_that_a_rank_forked_does_not_signal_the_rank():
    process = run(FORKED)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "7 False\n"


def test_the_waits_of_fabric_leave_time_within_five_seconds():
    poll = 0.1
    assert poll + COLLECT_TIMEOUT + DESCRIBE_TIMEOUT + END_GRACE <= 3.5
    assert poll + INTERRUPT_GRACE <= 3.5


def wait_with_the_lock():
    """Wait in C code that holds the interpreter's lock. No signal ends the wait."""
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.PyDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # waits for itself


def compute_with_the_lock():
    sum(range(7 * 10**7))  # for longer than supervisor.RESPONSE_TIME


def wait_and_clean_up():
    try:
        threading.Event().wait()
    finally:
        time.sleep(2 * supervisor.RESPONSE_TIME)


@pytest.fixture
def ends_by_itself(monkeypatch, tmp_path):
    """Return a function that says whether a rank in a state ends by itself when rank 1 fails.

    The grace period of the rank has no end.
    """
    monkeypatch.setattr(supervisor, "END_GRACE", math.inf)
    started = tmp_path / "started"
    ended = tmp_path / "ended"

    def action(state):
        if os.environ["RANK"] == "1":
            while not started.exists():
                time.sleep(0.01)
            raise ValueError("the cause")
        try:
            started.touch()
            state()
        finally:
            ended.touch()

    def launch(state):
        with pytest.raises(RankFailedError, match="the cause"):
            LAUNCHERS["fork"].launch(action, (state,), {}, LaunchSpec(num_processes=2))
        return ended.exists()

    return launch


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which process computes")
@pytest.mark.parametrize(
    ("state", "expected"),
    [(wait_with_the_lock, False), (compute_with_the_lock, True), (wait_and_clean_up, True)],
)
def test_only_a_rank_that_responds_or_computes_has_its_grace_period(
    ends_by_itself, state, expected
):
    assert ends_by_itself(state) is expected


# Reads into memory, which is work of the system alone, says so, and sleeps.
SYSTEM_TIME = """
import os
with open("/dev/zero", "rb", buffering=0) as zeros:
    buffer = bytearray(2**24)
    while os.times().system < os.times().user + 0.3:
        zeros.readinto(buffer)
print("done", flush=True)
input()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which process computes")
def test_the_time_of_a_rank_includes_what_the_system_does_for_it():
    with subprocess.Popen(
        [sys.executable, "-S", "-c", SYSTEM_TIME],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "done\n"
        psutil_process = psutil.Process(process.pid)
        # The line arrives a moment before the process sleeps.
        while psutil_process.status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)
        seconds = RankProcess(
            config=None, process=process, control=None, stack_file=None
        ).processor_seconds()
        times = psutil_process.cpu_times()
        process.communicate()
    assert times.system > times.user
    assert seconds == pytest.approx(times.user + times.system)


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
        output, _ = job.communicate(timeout=150)
        assert output == "finally\n" * 2
        assert job.returncode == 128 + signal.SIGHUP


# A module in place of torch, whose import has no end.
ENDLESS_IMPORT = """
import threading
print("loading", flush=True)
threading.Event().wait()
"""
LAUNCHES_ITSELF = """
from fabric.launchers import LAUNCHERS, LaunchSpec
LAUNCHERS["popen"].launch(None, (), {}, LaunchSpec(num_processes=2))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 128 + signal.SIGINT),
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_signal_while_the_fork_server_loads_torch_ends_the_job(tmp_path, number, code):
    (tmp_path / "script.py").write_text(LAUNCHES_ITSELF)
    (tmp_path / "torch.py").write_text(ENDLESS_IMPORT)
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,  # as in a terminal
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "loading\n"
        [server] = psutil.Process(job.pid).children()
        if number == signal.SIGKILL:
            job.kill()
        else:
            os.killpg(job.pid, number)
        _, errors = job.communicate(timeout=150)
    assert job.returncode == code
    assert errors == ""
    psutil.wait_procs([server], timeout=150)
    assert not server.is_running()

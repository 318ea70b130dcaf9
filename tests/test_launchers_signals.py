"""What SIGTERM and SIGINT do to a rank's main thread, and how long fabric itself waits when a job ends."""

import gc
import signal
import subprocess
import sys

import pytest

from fabric.errors import RankFailedError
from fabric.launchers import LAUNCHERS, LaunchSpec, _supervision

TAKEN_BY_ANOTHER_THREAD = """
import signal, threading
from fabric.launchers._signals import raise_on_signals
raise_on_signals(True)
# Its handler runs in C there; nothing interrupts the wait of the main thread.
threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.{number})).start()
try:
    threading.Event().wait()
finally:
    print("finally")
"""
FORKED = """
import os, signal, threading, time
from fabric.launchers._signals import raise_on_signals
raise_on_signals(True)
child = os.fork()
if child == 0:
    try:
        threading.Event().wait(30)
    except SystemExit:
        os._exit(7)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), threading.Event().wait(0.5))
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", -signal.SIGINT)])
def test_a_signal_that_does_not_interrupt_the_main_thread_still_runs_its_finally_blocks(number, code):
    done = run(TAKEN_BY_ANOTHER_THREAD.format(number=number))
    assert (done.stdout, done.returncode) == ("finally\n", code)


def test_a_signal_to_a_process_that_a_rank_forked_is_not_one_to_the_rank():
    done = run(FORKED)
    assert (done.stdout, done.returncode) == ("7 False\n", 0), done.stderr


def test_what_fabric_itself_waits_for_leaves_time_within_five_seconds():
    poll = 0.1
    assert poll + _supervision.COLLECT + _supervision.ASK + _supervision.WIND_DOWN <= 3.5
    assert poll + _supervision.INTERRUPT <= 3.5


def fail():
    raise ValueError("the cause")


def test_the_exit_code_of_a_rank_is_prepared_for_as_long_as_its_error_is_kept(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    try:
        LAUNCHERS["forkserver"].launch(fail, (), {}, LaunchSpec(num_processes=1))
    except RankFailedError:
        assert sys.excepthook is not sys.__excepthook__
    gc.collect()
    assert sys.excepthook is sys.__excepthook__

"""``train.py LAUNCHER FAULT``: rank 1 of two connected ranks fails; rank 0 waits for it in gloo.

Each rank writes ``ready RANK PID`` when it has connected. Just before the fault, rank 1 writes
``fault SECONDS``, by the system-wide monotonic clock.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from fabric import Fabric

LAUNCHERS = {
    "popen": "ddp",
    "spawn": "ddp_spawn",
    "fork": "ddp_fork",
    "forkserver": "ddp_forkserver",
    "run": "ddp",
}


class StubbornError(Exception):
    """An error that cannot be pickled."""

    def __reduce__(self) -> str:
        raise TypeError("no")


def say(*words: object) -> None:
    # One write, so that the lines of two ranks do not mix.
    line = " ".join(map(str, words)) + "\n"
    os.write(1, line.encode())


def raises(fabric: Fabric) -> None:
    raise ValueError("the loss is not a number")


def raises_in_collective(fabric: Fabric) -> None:
    fabric.all_reduce({"loss": "not a number"}, reduce_op="maximum")


def raises_in_backward(fabric: Fabric) -> None:
    """Raise in a hook of a tensor, which the C++ code of autograd calls."""
    value = torch.ones(1, requires_grad=True)
    value.register_hook(lambda _: raises(fabric))
    fabric.backward(value.sum())


def raises_beside_a_lock(fabric: Fabric) -> None:
    """Raise while rank 0 is in C code and holds its interpreter's lock."""
    raises(fabric)


def raises_and_tears_down(fabric: Fabric) -> None:
    """Raise, then destroy the process group before the error is reported, and never end."""
    try:
        raises(fabric)
    finally:
        dist.destroy_process_group()
        threading.Event().wait()


def exits(fabric: Fabric) -> None:
    sys.exit(3)


def returns(fabric: Fabric) -> None:
    """Return normally, although rank 0 still needs this rank."""


def killed(fabric: Fabric) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfaults(fabric: Fabric) -> None:
    ctypes.string_at(0)


def out_of_memory(fabric: Fabric) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, hard))
    bytearray(1 << 40)


def raises_stubborn(fabric: Fabric) -> None:
    raise StubbornError("as it is")


def raises_long(fabric: Fabric) -> None:
    raise ValueError("begin " + 10_000 * "a line of a long message\n" + "end")


def waits(fabric: Fabric) -> None:
    """Wait in Python, as a training loop does that is busy with something else."""
    threading.Event().wait()


def trains(fabric: Fabric) -> None:
    while True:
        fabric.all_reduce(torch.ones(1))


def waits_in_cpp(fabric: Fabric) -> None:
    dist.recv(torch.zeros(1), src=1 - fabric.global_rank)


def holds_the_lock(fabric: Fabric) -> None:
    """Wait in C code, holding the interpreter's lock.

    No other thread of the rank can run, and no signal ends the wait.
    """
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.PyDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # waits for itself


def saves_and_leaves(fabric: Fabric) -> None:
    """Stop at the same step on all ranks, although only one of them needs the signal."""
    steps = 0
    while not fabric.should_stop:
        steps += 1
        if steps == 1:
            say("trains", fabric.global_rank)
        time.sleep(0.01)  # a step
    fabric.barrier()
    time.sleep(4)  # longer than the grace for ``finally`` blocks
    say("saved", fabric.global_rank, steps)


# The faults of rank 1 alone.
ON_ONE: tuple[Callable[[Fabric], None], ...] = (
    raises,
    raises_in_collective,
    raises_in_backward,
    raises_beside_a_lock,
    raises_and_tears_down,
    exits,
    returns,
    killed,
    segfaults,
    out_of_memory,
    raises_stubborn,
    raises_long,
)
# The states in which all ranks stay until a signal comes.
ON_ALL: tuple[Callable[[Fabric], None], ...] = (
    waits,
    trains,
    waits_in_cpp,
    holds_the_lock,
    saves_and_leaves,
)


def job(fabric: Fabric, fault: str) -> None:
    fault_functions = {function.__name__: function for function in (*ON_ONE, *ON_ALL)}
    function = fault_functions[fault]
    fabric.barrier()
    if function in ON_ONE:
        fail_on_rank_1(fabric, function)
    else:
        stay_on_all_ranks(fabric, function)


def fail_on_rank_1(fabric: Fabric, function: Callable[[Fabric], None]) -> None:
    say("ready", fabric.global_rank, os.getpid())
    if fabric.global_rank == 1:
        say("fault", time.monotonic())
        function(fabric)
    elif function is raises_beside_a_lock:
        holds_the_lock(fabric)
    else:
        trains(fabric)


def stay_on_all_ranks(fabric: Fabric, function: Callable[[Fabric], None]) -> None:
    try:
        say("ready", fabric.global_rank, os.getpid())
        function(fabric)
    finally:
        say("finally", fabric.global_rank)


if __name__ == "__main__":
    name, fault = sys.argv[1:]
    Fabric(accelerator="cpu", devices=2, strategy=LAUNCHERS[name]).launch(job, fault)

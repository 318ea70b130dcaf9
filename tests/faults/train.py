"""``train.py LAUNCHER FAULT``: two ranks connect, then rank 1 meets with a fault; rank 0 waits for it in gloo.

Each rank writes ``ready RANK PID`` when it has connected; the one at fault writes ``fault SECONDS``, by the system-wide
monotonic clock, just before.
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
    """Cannot be pickled."""

    def __reduce__(self) -> str:
        raise TypeError("no")


def say(*words: object) -> None:
    # One write, so that the lines of two ranks do not mix.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def raises(fabric: Fabric) -> None:
    raise ValueError("the loss is not a number")


def raises_in_collective(fabric: Fabric) -> None:
    fabric.all_reduce({"loss": "not a number"}, reduce_op="maximum")


def raises_in_backward(fabric: Fabric) -> None:
    """In a hook of a tensor, called by the C++ code of autograd."""
    value = torch.ones(1, requires_grad=True)
    value.register_hook(lambda _: raises(fabric))
    fabric.backward(value.sum())


def raises_beside_a_lock(fabric: Fabric) -> None:
    """The other rank is in C, holding the interpreter's lock."""
    raises(fabric)


def raises_and_tears_down(fabric: Fabric) -> None:
    """The group is gone before anybody can look at the error, and the ``finally`` never ends."""
    try:
        raises(fabric)
    finally:
        dist.destroy_process_group()
        threading.Event().wait()


def exits(fabric: Fabric) -> None:
    sys.exit(3)


def returns(fabric: Fabric) -> None:
    """Leaves normally, although the other rank still needs it."""


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
    """In Python, as in a training loop that is busy elsewhere."""
    threading.Event().wait()


def trains(fabric: Fabric) -> None:
    while True:
        fabric.all_reduce(torch.ones(1))


def waits_in_cpp(fabric: Fabric) -> None:
    dist.recv(torch.zeros(1), src=1 - fabric.global_rank)


def holds_the_lock(fabric: Fabric) -> None:
    """In C, holding the interpreter's lock: no other thread of the rank can run, and no signal ends the wait."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time it waits for itself
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def saves_and_leaves(fabric: Fabric) -> None:
    """Only the first rank needs to hear of the signal; both stop at the same step."""
    steps = 0
    while not fabric.should_stop:
        steps += 1
        if steps == 1:
            say("asked", fabric.global_rank)
        time.sleep(0.01)  # a step
    fabric.barrier()
    time.sleep(4)  # longer than the grace for ``finally`` blocks
    say("saved", fabric.global_rank, steps)


# What happens on rank 1 alone.
ON_ONE: tuple[Callable[[Fabric], None], ...] = (
    raises, raises_in_collective, raises_in_backward, raises_beside_a_lock, raises_and_tears_down, exits, returns,
    killed, segfaults, out_of_memory, raises_stubborn, raises_long,
)  # fmt: skip
# What all ranks do until a signal comes.
ON_ALL: tuple[Callable[[Fabric], None], ...] = (
    waits,
    trains,
    waits_in_cpp,
    holds_the_lock,
    saves_and_leaves,
)


def job(fabric: Fabric, fault: str) -> None:
    meet = next(meet for meet in (*ON_ONE, *ON_ALL) if meet.__name__ == fault)
    fabric.barrier()
    if meet in ON_ONE:
        say("ready", fabric.global_rank, os.getpid())
        if fabric.global_rank == 0:
            (holds_the_lock if meet is raises_beside_a_lock else trains)(fabric)
        say("fault", time.monotonic())
        meet(fabric)
        return
    try:
        say("ready", fabric.global_rank, os.getpid())
        meet(fabric)
    finally:
        say("finally", fabric.global_rank)


if __name__ == "__main__":
    name, fault = sys.argv[1:]
    Fabric(accelerator="cpu", devices=2, strategy=LAUNCHERS[name]).launch(job, fault)

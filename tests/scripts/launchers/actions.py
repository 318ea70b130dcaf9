"""What the ranks of the launcher tests do.

It is a separate module, so that every start method can import the functions by name.
"""

import os
import signal
import sys
import threading
import time


def rank() -> int:
    return int(os.environ["RANK"])


def connect():
    """Initialize the process group, and return the module torch.distributed.

    The import is here because most actions are faster without it.
    """
    import torch.distributed as dist

    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=os.environ["FABRIC_STORE"], rank=rank(), world_size=world_size
    )
    return dist


def reduce(value: float = 1.0) -> float:
    """Return the sum of ``value + rank`` over the ranks, which gloo computes."""
    import torch

    dist = connect()
    tensor = torch.tensor([value + rank()])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


def say_ready() -> None:
    # One write, so that the lines of two ranks do not mix.
    os.write(1, f"ready {os.getpid()}\n".encode())


def fail(failing: int = 1) -> None:
    """Raise on one rank, while the remaining ranks wait for it in a collective."""
    dist = connect()
    if rank() == failing:
        raise ValueError("the loss is not a number")
    dist.barrier()


def fail_in_teardown() -> None:
    """Raise on rank 1, and wait there in a ``finally`` that never ends.

    Rank 0 loses its connection.
    """
    dist = connect()
    try:
        if rank() == 1:
            raise ValueError("the loss is not a number")
        dist.barrier()
    finally:
        if rank() == 1:
            dist.destroy_process_group()
            threading.Event().wait()


def leave(code: int = 3) -> None:
    if rank() == 1:
        sys.exit(code)
    threading.Event().wait()


def fork_a_child() -> None:
    """Fork a process on rank 1 that reaches the end of the script, then kill rank 1 itself."""
    if rank() == 0:
        threading.Event().wait()
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    os.kill(os.getpid(), signal.SIGKILL)


def leave_early() -> None:
    """Return on rank 1 while rank 0 waits for it."""
    dist = connect()
    if rank() == 0:
        dist.barrier()


class SlowToDelete:
    """An object that delays the end of the interpreter."""

    def __del__(self, sleep=time.sleep):
        sleep(2)


def leave_slowly() -> None:
    """Exit on rank 1 while rank 0 waits for it.

    The interpreter of rank 1 takes longer to end than rank 0.
    """
    dist = connect()
    if rank() == 1:
        globals()["slow"] = SlowToDelete()
        dist.destroy_process_group()
        sys.exit(3)
    dist.barrier()


def die() -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def crash() -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    threading.Event().wait()


def wait() -> None:
    """Wait in Python, and say so when the ``finally`` block runs."""
    try:
        say_ready()
        threading.Event().wait()
    finally:
        os.write(1, f"finally {rank()}\n".encode())


def stubborn() -> None:
    """Clean up for ever."""
    try:
        wait()
    finally:
        threading.Event().wait()


def wait_in_cpp() -> None:
    """Wait for a message that never comes, where no Python code runs."""
    import torch

    dist = connect()
    dist.barrier()
    say_ready()
    dist.recv(torch.zeros(1), src=1 - rank())

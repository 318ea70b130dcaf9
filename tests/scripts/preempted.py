"""``preempted.py METHOD FOLDER``: train on two ranks until should_stop, save, exit as preempted.

Each rank writes ``ready RANK PID`` after its first should_stop, and ``saved RANK STEP``.
"""

import os
import random
import sys
import time

import torch

from fabric import Fabric


def say(*words: object) -> None:
    line = " ".join(map(str, words)) + "\n"
    os.write(1, line.encode())


def train(fabric: Fabric, folder: str) -> None:
    model = torch.zeros(1)
    step = 0
    delays = random.Random(fabric.global_rank)
    while not fabric.should_stop:
        step += 1
        # In between, a rank may be some steps ahead of the other rank.
        if step % 5 == 0:
            model += fabric.all_reduce(torch.ones(1))
        if step == 1:
            say("ready", fabric.global_rank, os.getpid())
        time.sleep(delays.random() / 100)
    # The end of the process waits for this save.
    checkpoints = fabric.checkpoints(folder)
    checkpoints.save(step, {"model": model, "step": step})
    say("saved", fabric.global_rank, step)
    fabric.exit_preempted(requeue=True)


if __name__ == "__main__":
    method, folder = sys.argv[1:]
    fabric = Fabric(accelerator="cpu", devices=2, launcher=method)
    fabric.launch(train, folder)

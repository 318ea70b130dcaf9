"""``preempted.py METHOD FOLDER``: two ranks train until they should stop, save, and exit as preempted.

Each says ``ready RANK PID`` once it has asked for the first time, and ``saved RANK STEP``.
"""

import os
import random
import sys
import time

import torch

from fabric import Fabric


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def train(fabric: Fabric, folder: str) -> None:
    model = torch.zeros(1)
    step = 0
    delays = random.Random(fabric.global_rank)
    while not fabric.should_stop:
        step += 1
        if step % 5 == 0:  # a rank may be some steps ahead of the other
            model += fabric.all_reduce(torch.ones(1))
        if step == 1:
            say("ready", fabric.global_rank, os.getpid())
        time.sleep(delays.random() / 100)
    fabric.checkpoints(folder).save(step, {"model": model, "step": step})  # the end waits for it
    say("saved", fabric.global_rank, step)
    fabric.exit_preempted(requeue=True)


if __name__ == "__main__":
    Fabric(accelerator="cpu", devices=2, launcher=sys.argv[1]).launch(train, sys.argv[2])

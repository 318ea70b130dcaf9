"""A small model of a run for days: it keeps its newest checkpoints and the best one, and resumes where it stopped.

Start it, stop it at any moment (Ctrl-C, kill -9), and start it again: the losses are those of an
uninterrupted run, also in the middle of an epoch and, up to rounding, on another number of
processes. With --record, each step writes a line of JSON with the samples of all processes in that
step.
"""

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric

BATCH = 12  # the global batch size


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--folder", default="runs/long")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--record", help="a file, to which lines are added")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds in each step: the time to end it somewhere")
    args = parser.parse_args(arguments)
    with Fabric(accelerator=args.accelerator, devices=args.devices, strategy=args.strategy) as fabric:
        fabric.launch()
        fabric.seed_everything(0)
        inputs = torch.randn(120, 4)
        data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True), torch.arange(len(inputs)))
        loader = fabric.setup_dataloaders(DataLoader(data, BATCH // fabric.world_size, shuffle=True))
        model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
        model, optimizer, scheduler = fabric.setup(model, optimizer, scheduler=scheduler)

        checkpoints = fabric.checkpoints(args.folder, keep=2, best=("loss", "min"))
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
        step = checkpoints.restore(state) or 0
        while step < args.steps:
            for batch, targets, numbers in loader:
                loss = mse_loss(model(batch), targets)
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
                scheduler.step()
                step += 1
                mean = fabric.all_reduce({"loss": loss.detach()})
                fabric.print(f"step {step}: loss {mean['loss']:.6f}")
                if args.record:
                    log(fabric, args.record, step=step, samples=fabric.gather_for_metrics(numbers).tolist(), **mean)
                time.sleep(args.pause)
                stop = fabric.should_stop  # on a signal, or near the end of a SLURM job
                if stop or step % args.save_every == 0:
                    checkpoints.save(step, state, mean)
                if stop:
                    fabric.exit_preempted(requeue=True)
                if step == args.steps:
                    break


def log(fabric: Fabric, path: str, **values: Any) -> None:
    if fabric.is_global_zero:
        with open(path, "a") as file:
            file.write(json.dumps({**values, "loss": float(values["loss"]), "processes": fabric.world_size}) + "\n")


if __name__ == "__main__":
    main()

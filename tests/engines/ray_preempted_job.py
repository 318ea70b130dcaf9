"""A job on one or two workers of Ray Train, which saves only when it has to stop.

``ray_preempted_job.py FOLDER STEPS`` runs it on the cluster of ``RAY_ADDRESS``, and with
``--alone`` in this process, without Ray. Each rank records its steps in ``FOLDER/rank-R-of-N``. If
there are two ranks, their steps last 0.2 s longer, so that there is time to preempt one.
"""

# Ray is no part of the development environment.
# pyright: reportMissingImports=false

import json
import socket
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric

BATCH = 12  # of all ranks together
MACHINES = 2


def train(folder: Path, steps: int, node: str = "") -> None:
    with Fabric(accelerator="cpu") as fabric:
        fabric.launch()
        fabric.seed_everything(0)
        inputs = torch.randn(120, 4)
        data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True), torch.arange(len(inputs)))
        loader = DataLoader(data, BATCH // fabric.world_size, shuffle=True)
        loader = fabric.setup_dataloaders(loader)
        model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        checkpoints = fabric.checkpoints(folder / "checkpoints")
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        step = checkpoints.restore(state) or 0
        while step < steps:
            for batch, targets, numbers in loader:
                loss = mse_loss(model(batch), targets)
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
                step += 1
                if fabric.world_size > 1:
                    time.sleep(0.2)
                loss = fabric.all_reduce(loss.detach())
                samples = fabric.gather_for_metrics(numbers)
                should_stop = fabric.should_stop
                line = {
                    "step": step,
                    "loss": loss.item(),
                    "samples": samples.tolist(),
                    "should_stop": should_stop,
                    "host": socket.gethostname(),
                    "node": node,
                }
                name = f"rank-{fabric.global_rank}-of-{fabric.world_size}"
                with open(folder / name, "a") as file:
                    file.write(json.dumps(line) + "\n")
                if should_stop:
                    checkpoints.save(step, state)
                    fabric.exit_preempted()
                if step == steps:
                    break


def train_on_worker(folder: Path, steps: int) -> None:
    """Train in a worker of Ray, and record the id of its node."""
    import ray

    train(folder, steps, ray.get_runtime_context().get_node_id())


def main(folder: Path, steps: int) -> None:
    """Train on the machines of a Ray cluster, and go on without those that are taken away."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    # Ray finds this address by itself where there is a way to the internet. The actor that starts
    # the workers then runs on this host, and not on a machine that may be taken away.
    ray.init(_node_ip_address=socket.gethostbyname(socket.gethostname()))
    while len(ray.nodes()) < MACHINES:
        time.sleep(0.1)
    trainer = TorchTrainer(
        partial(train_on_worker, folder, steps),
        scaling_config=ScalingConfig(num_workers=(1, MACHINES)),
        # A preemption is no failure.
        run_config=RunConfig(
            storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=0)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    job = main
    if sys.argv[3:] == ["--alone"]:
        job = train
    job(Path(sys.argv[1]), int(sys.argv[2]))

"""Runs a plain loop and the same loop with Fabric, and shows that their losses are equal."""

import argparse
from collections.abc import Callable

from fabric import Fabric


def compare(train_plain: Callable[[], list[float]], train: Callable[[Fabric], list[float]]) -> None:
    """Run both loops of an example, and print their losses side by side.

    Args:
        train_plain: the plain loop. It returns its losses.
        train: the same loop with Fabric, which is run in each process. It returns the losses of the whole batch.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2, help="the number of processes (default: 2)")
    parser.add_argument("--strategy", default="ddp", help="ddp, fsdp, ... (default: ddp)")
    arguments = parser.parse_args()
    fabric = Fabric(accelerator="cpu", devices=arguments.devices, strategy=arguments.strategy)
    fabric.launch()
    losses = train(fabric)
    plain_losses = train_plain()
    fabric.print(f"step  plain loop  {fabric.world_size} process(es)")
    differences = []
    for step, (plain_loss, loss) in enumerate(zip(plain_losses, losses, strict=True)):
        fabric.print(f"{step:4}  {plain_loss:10.6f}  {loss:10.6f}")
        differences.append(abs(loss - plain_loss))
    fabric.print(f"largest difference: {max(differences):.1e}")
    fabric.teardown()

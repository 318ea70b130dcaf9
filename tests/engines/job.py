"""A script that does not know what launches it.

It trains, and every rank writes its position in the job, its losses and its listening addresses.
"""

import json
import socket
import sys
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric

# The state of a listening socket, as /proc/net/tcp writes it.
LISTENING = "0A"


def train(fabric: Fabric) -> list[float]:
    """Train for an epoch, and return the losses."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    all_inputs = torch.randn(48, 4)
    dataset = TensorDataset(all_inputs, all_inputs.sum(1, keepdim=True))
    # The batch of all ranks together is 12, so that the losses are those of one process.
    loader = DataLoader(dataset, batch_size=12 // fabric.world_size)
    losses = []
    for inputs, targets in fabric.setup_dataloaders(loader):
        loss = mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        mean_loss = fabric.all_reduce(loss.detach())
        losses.append(mean_loss.item())
    return losses


def listening_addresses() -> list[str]:
    """Return the addresses that sockets of this host listen on, as /proc/net writes them."""
    addresses = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        _, *lines = Path(table).read_text().splitlines()
        for line in lines:
            _, local_address, _, state, *_ = line.split()
            if state == LISTENING:
                address, _, _ = local_address.rpartition(":")
                addresses.add(address)
    return sorted(addresses)


def main(folder: Path) -> None:
    fabric = Fabric(accelerator="cpu", strategy="ddp")
    fabric.launch()
    losses = train(fabric)
    position = {
        "global_rank": fabric.global_rank,
        "local_rank": fabric.local_rank,
        "node_rank": fabric.node_rank,
        "world_size": fabric.world_size,
        "host": socket.gethostname(),
    }
    report = {
        "position": position,
        "losses": losses,
        "listening": listening_addresses(),
    }
    (folder / f"{fabric.global_rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

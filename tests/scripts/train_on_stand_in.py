"""Train on the hardware of ``stand_in_device.py`` as on the CPU."""

import torch
from stand_in_device import DeviceTensor, install
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.accelerators import TorchAccelerator
from fabric.errors import ConfigurationError


def build() -> tuple[nn.Module, Optimizer, DataLoader]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    data = TensorDataset(torch.randn(12, 4), torch.randn(12, 1))
    return model, AdamW(model.parameters(), lr=0.1), DataLoader(data, batch_size=4)


def plain_losses() -> list[float]:
    model, optimizer, loader = build()
    losses: list[float] = []
    for inputs, targets in loader:
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_on_the_stand_in(job: Fabric) -> list[float]:
    model, optimizer, loader = build()
    model, optimizer = job.setup(model, optimizer)
    loader = job.setup_dataloaders(loader)
    losses: list[float] = []
    for inputs, targets in loader:
        assert isinstance(inputs, DeviceTensor)
        loss = (model(inputs) - targets).square().mean()
        job.backward(loss)
        job.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(job.all_reduce(loss.detach())))
    return losses


def refused(**options: object) -> ConfigurationError:
    try:
        Fabric(**options)
    except ConfigurationError as error:
        return error
    raise AssertionError(f"{options} were accepted")


def main() -> None:
    error = refused(accelerator="npu")
    assert "imported before" in error.expected, "no such hardware has been added yet"
    module = install()

    assert Fabric(devices=1).device == torch.device("npu:0"), "auto is the hardware of the machine"
    assert "sees 2 devices" in str(refused(accelerator="npu", devices=3))
    assert TorchAccelerator("npu").parse_devices("auto") == (
        torch.device("npu:0"),
        torch.device("npu:1"),
    )

    with Fabric(accelerator="npu", devices=1) as job:
        assert losses_on_the_stand_in(job) == plain_losses()
    assert module.was_cache_emptied
    print("equal")


if __name__ == "__main__":
    main()

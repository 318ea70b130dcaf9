"""A GAN: two models with an optimizer each."""

import json

import torch
from lightning.fabric import Fabric, seed_everything
from models import images
from torch import nn
from torch.utils.data import DataLoader


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    seed_everything(3)

    loader = fabric.setup_dataloaders(DataLoader(images(64), batch_size=8))
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))
    discriminator = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
    generator, optimizer_g = fabric.setup(generator, optimizer_g)
    discriminator, optimizer_d = fabric.setup(discriminator, optimizer_d)

    criterion = nn.BCEWithLogitsLoss()
    for step, (real, _) in enumerate(loader):
        real_labels = torch.ones(real.size(0), 1, device=fabric.device)
        fake_labels = torch.zeros_like(real_labels)
        angles = torch.arange(32.0, device=fabric.device) * (step + 1)
        noise = torch.cos(angles).view(8, 4)
        fake = generator(noise)

        optimizer_d.zero_grad()
        loss_real = criterion(discriminator(real.flatten(1)), real_labels)
        fabric.backward(loss_real)
        loss_fake = criterion(discriminator(fake.detach()), fake_labels)
        fabric.backward(loss_fake)
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = criterion(discriminator(fake), real_labels)
        fabric.backward(loss_g)
        optimizer_g.step()

        loss_d = loss_real.detach() + loss_fake.detach()
        losses = fabric.all_reduce({"d": loss_d, "g": loss_g.detach()})
        record = {name: loss.item() for name, loss in losses.items()}
        fabric.print(json.dumps(record))


if __name__ == "__main__":
    main()

"""Cross-validation: a model for each fold, in one job."""

import json

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric, seed_everything
from models import Net, images
from torch.utils.data import DataLoader, Subset

FOLDS = 4


def train(fabric, model, optimizer, loader):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        fabric.backward(loss)
        optimizer.step()


@torch.no_grad()
def validate(fabric, model, loader):
    model.eval()
    loss = torch.zeros((), device=fabric.device)
    for data, target in loader:
        loss += F.nll_loss(model(data), target)
    fabric.all_reduce(loss, reduce_op="mean")  # in place
    return loss.item() / len(loader)


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision="32-true")
    fabric.launch()
    dataset = images(64)
    losses = []
    for fold in range(FOLDS):
        seed_everything(fold)
        held_out = set(range(fold, len(dataset), FOLDS))
        indices = [index for index in range(len(dataset)) if index not in held_out]
        train_loader = DataLoader(Subset(dataset, indices), batch_size=8, shuffle=True)
        val_loader = DataLoader(Subset(dataset, sorted(held_out)), batch_size=8)
        train_loader, val_loader = fabric.setup_dataloaders(train_loader, val_loader)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = fabric.setup(model, optimizer)
        train(fabric, model, optimizer, train_loader)
        loss = validate(fabric, model, val_loader)
        losses.append(loss)
        fabric.print(json.dumps({"fold": fold, "loss": loss}))
    fabric.print(json.dumps({"mean": sum(losses) / FOLDS}))


if __name__ == "__main__":
    main()

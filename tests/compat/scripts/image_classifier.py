"""An image classifier, as in the first example of Lightning Fabric."""

import argparse
import json

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric, seed_everything
from models import Net, images
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader


def run(hparams):
    fabric = Fabric(accelerator="cpu", devices=2)
    fabric.launch()
    seed_everything(hparams.seed)

    with fabric.rank_zero_first(local=False):  # where a data set would be downloaded
        train_data = images(64)
        test_data = images(32, seed=1)
    train_loader = DataLoader(train_data, batch_size=hparams.batch_size, shuffle=True)
    test_loader = DataLoader(test_data, batch_size=hparams.batch_size)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)

    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=hparams.lr)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=hparams.gamma)

    for _epoch in range(hparams.epochs):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            fabric.backward(loss)
            optimizer.step()
        scheduler.step()

        model.eval()
        test_loss = 0
        correct = 0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                test_loss += F.nll_loss(output, target, reduction="sum").item()
                is_correct = output.argmax(dim=1) == target
                correct += is_correct.sum().item()
        test_loss = fabric.all_gather(test_loss).sum().item() / len(test_data)
        correct = fabric.all_reduce(correct, reduce_op="sum").item()
        fabric.print(json.dumps({"test_loss": test_loss, "correct": correct}))

    if hparams.save_model:
        fabric.save(hparams.save_model, model.state_dict())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-model", default="")
    run(parser.parse_args())

"""Second-order MAML, whose processes have tasks of their own and average gradients themselves."""

import json

import torch
from lightning.fabric import Fabric, seed_everything
from models import adapt_and_evaluate, make_task
from torch import nn

meta_batch_size = 4


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    seed_everything(11)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    model = fabric.to_device(model)
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.01))

    for iteration in range(5):
        optimizer.zero_grad()
        total = torch.zeros((), device=fabric.device)
        for index in range(meta_batch_size):
            first_task = (iteration * meta_batch_size + index) * fabric.world_size
            task = make_task(first_task + fabric.global_rank, fabric.device)
            loss = adapt_and_evaluate(model, task)
            fabric.backward(loss)
            total += loss.detach()
        for parameter in model.parameters():
            fabric.all_reduce(parameter.grad, reduce_op="sum")
            parameter.grad.mul_(1.0 / (meta_batch_size * fabric.world_size))
        optimizer.step()
        fabric.all_reduce(total, reduce_op="mean")
        mean = total.item() / meta_batch_size
        fabric.print(json.dumps({"iteration": iteration, "loss": mean}))


if __name__ == "__main__":
    main()

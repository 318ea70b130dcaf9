"""LBFGS with a closure, on one full batch.

The optimizer calls the closure as often as its line search needs. Each process computes the loss and the gradients of
its rows, and Fabric averages both before the optimizer looks at them, so all processes take the same search.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from comparison import compare
from fabric import Fabric

STEPS = 4


def make_data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return inputs, inputs.prod(dim=1, keepdim=True)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def train_plain() -> list[float]:
    inputs, targets = make_data()
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(STEPS)]


def train(fabric: Fabric) -> list[float]:
    inputs, targets = make_data()
    inputs = inputs[fabric.global_rank :: fabric.world_size]
    targets = targets[fabric.global_rank :: fabric.world_size]
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    model, optimizer = fabric.setup(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        fabric.backward(loss)
        return loss

    return [optimizer.step(closure).item() for _ in range(STEPS)]


if __name__ == "__main__":
    compare(train_plain, train)

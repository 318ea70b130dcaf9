"""Train the small GPT with the plain loop, or with Fabric on any number of processes and under any strategy.

Stop it at any moment, also with kill -9, and start it again on another number of processes or under another strategy:
it goes on from its newest checkpoint. `make proof` runs it in many ways, and compares the losses and the weights.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.strategies import ModelParallelStrategy, Strategy
from gpt import GPT, PLAN, read_windows

BATCH = 36  # sequences a step, over all processes together
STEPS_OF_EPOCH = 40
SAVE_EVERY = 10


def make_loader(batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    inputs, targets = read_windows()[: STEPS_OF_EPOCH * BATCH]
    order = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(inputs, targets), batch_size, shuffle=True, generator=order)


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(layers=2, width=48, heads=6).double()
    return model, torch.optim.AdamW(model.parameters(), lr=4e-3)


def train_plain(args: argparse.Namespace) -> None:
    loader = make_loader(BATCH)
    model, optimizer = make_model()
    model.to(args.accelerator)
    step = 0
    while step < args.steps:
        for inputs, targets in loader:
            inputs, targets = inputs.to(args.accelerator), targets.to(args.accelerator)
            loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            step += 1
            log(args.folder, step, loss)
            if step == args.steps:
                break
    torch.save(model.state_dict(), args.folder / "weights.pt")


def train(args: argparse.Namespace) -> None:
    strategy: str | Strategy = args.strategy
    if strategy == "mesh":
        strategy = ModelParallelStrategy(tensor_parallel_size=args.tensor, tp_plan=PLAN)
    fabric = Fabric(accelerator=args.accelerator, devices=args.devices, strategy=strategy)
    fabric.launch()
    # The processes that share the layers have the same samples.
    batch_size = BATCH * args.tensor // args.devices
    loader = fabric.setup_dataloaders(make_loader(batch_size))
    model, optimizer = fabric.setup(*make_model())

    checkpoints = fabric.checkpoints(args.folder / "checkpoints", keep=2)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    step = checkpoints.restore(state) or 0
    while step < args.steps:
        for inputs, targets in loader:
            loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            step += 1
            mean = fabric.all_reduce(loss.detach())
            if fabric.is_global_zero:
                log(args.folder, step, mean)
            if step % SAVE_EVERY == 0:
                checkpoints.save(step, state)
            if step == args.steps:
                break
    weights = fabric.get_state_dict(model)
    if fabric.is_global_zero:
        torch.save(weights, args.folder / "weights.pt")


def log(folder: Path, step: int, loss: Tensor) -> None:
    with (folder / "losses.jsonl").open("a") as file:
        print(json.dumps({"step": step, "loss": loss.item()}), file=file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--strategy", default="ddp", help="plain, ddp, fsdp, ...; mesh splits each layer (default: ddp)"
    )
    parser.add_argument("--accelerator", default="cpu", help="cpu, cuda, ... (default: cpu)")
    parser.add_argument("--devices", type=int, default=2, help="the number of processes (default: 2)")
    parser.add_argument("--tensor", type=int, default=1, help="in how many parts a mesh splits each layer (default: 1)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps, those before a restart included")
    parser.add_argument("--folder", type=Path, default=Path("runs/any_strategy"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.strategy == "plain":
        train_plain(args)
    else:
        train(args)


if __name__ == "__main__":
    main()

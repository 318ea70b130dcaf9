"""Train a small GPT on the source of argparse, character by character, on a mesh of 2 x 2 processes.

Each batch is split over two pairs of processes, and each layer over the two processes of a pair.
train_raw.py is the plain PyTorch loop; it prints the same numbers.
"""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.strategies import ModelParallelStrategy
from gpt import GPT, PLAN, parse_arguments, read_windows


def main() -> None:
    args = parse_arguments(__doc__)
    strategy = ModelParallelStrategy(tensor_parallel_size=args.tensor, tp_plan=PLAN)
    fabric = Fabric(accelerator="cpu", devices=args.devices, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)

    order = torch.Generator().manual_seed(0)
    batch_size = args.batch_size // fabric.device_mesh["data_parallel"].size()
    loader = DataLoader(read_windows(), batch_size, shuffle=True, drop_last=True, generator=order)
    loader = fabric.setup_dataloaders(loader)
    model = GPT(layers=args.layers, width=args.width).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = fabric.setup(model, optimizer)

    state = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0}
    if args.resume:
        state |= fabric.load(args.checkpoint, state)
    for step, (inputs, targets) in enumerate(loader, start=state["step"] + 1):
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = fabric.all_reduce(loss.detach())
        fabric.print(f"step {step}: loss {mean:.9f}, norm of the gradient {norm:.9f}")
        state["step"] = step
        if step >= args.steps:
            break
    fabric.save(args.checkpoint, state)


if __name__ == "__main__":
    main()

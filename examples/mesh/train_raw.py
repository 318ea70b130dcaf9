"""Train a small GPT on the source of argparse, character by character: the plain PyTorch loop.

train.py is the same loop on a mesh of four processes, and prints the same numbers.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from gpt import GPT, parse_arguments, read_windows


def main() -> None:
    args = parse_arguments(__doc__)
    torch.manual_seed(0)

    order = torch.Generator().manual_seed(0)
    loader = DataLoader(read_windows(), args.batch_size, shuffle=True, drop_last=True, generator=order)
    model = GPT(layers=args.layers, width=args.width).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for step, (inputs, targets) in enumerate(loader, start=1):
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss:.9f}, norm of the gradient {norm:.9f}")
        if step == args.steps:
            break


if __name__ == "__main__":
    main()

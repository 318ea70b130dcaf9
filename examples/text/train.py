"""Train a small GPT on the source of Python's standard library, character by character.

train_raw.py is the plain PyTorch loop; train.py is the same file with Fabric, eleven lines changed.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from arguments import parse_arguments
from corpus import CHARACTERS, decode, encode, make_loaders, read_windows
from fabric import Fabric
from model import GPT
from report import Report


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> Tensor:
    model.eval()
    losses = [loss_of(model, inputs, targets) for inputs, targets in loader]
    model.train()
    return torch.stack(losses).mean()


def main() -> None:
    args = parse_arguments(__doc__)
    report = Report(args.losses, args.steps)
    fabric = Fabric(accelerator=args.accelerator, devices=args.devices, strategy=args.strategy, loggers=report)
    fabric.launch()
    fabric.seed_everything(args.seed, per_rank="after_setup")

    data = read_windows(args.text_size, args.block_size)
    loader, val_loader = fabric.setup_dataloaders(*make_loaders(data, args.batch_size // fabric.world_size))
    model = GPT(len(CHARACTERS), args.block_size, layers=args.layers, width=args.width, dropout=args.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer = fabric.setup(model, optimizer)

    def log(step: int, **losses: Tensor) -> None:
        fabric.log_dict(fabric.all_reduce(losses), step)

    step = 0
    if args.resume:
        step = fabric.load(args.checkpoint, {"model": model, "optimizer": optimizer, "loader": loader})["step"]
    else:
        log(step, validation_loss=evaluate(model, val_loader))
    while step < args.steps:
        for inputs, targets in loader:
            loss = loss_of(model, inputs, targets)
            optimizer.zero_grad()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            step += 1
            log(step, loss=loss.detach())
            if step % args.save_every == 0 or step == args.steps:
                fabric.save(args.checkpoint, {"model": model, "optimizer": optimizer, "loader": loader, "step": step})
            if step == args.steps:
                break
    log(step, validation_loss=evaluate(model, val_loader))
    report.text(decode(model.generate(encode("def "), length=200)))
    report.close()


if __name__ == "__main__":
    main()

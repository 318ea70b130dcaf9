"""The command line that both versions of the training script share."""

import argparse
from pathlib import Path


def parse_arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps, those before --resume included")
    parser.add_argument("--batch-size", type=int, default=64, help="sequences a step, over all devices together")
    parser.add_argument("--block-size", type=int, default=32, help="characters a sequence")
    parser.add_argument("--text-size", type=int, default=2**20, help="characters to train on")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/text.pt"))
    parser.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--losses", type=Path, help="file for the losses in full precision, one JSON object a line")
    with_fabric = parser.add_argument_group("known to train.py only")
    with_fabric.add_argument("--accelerator", default="auto", help="cpu, cuda, mps or auto")
    with_fabric.add_argument("--devices", default="auto", help='such as 2, "0,1" or auto')
    with_fabric.add_argument("--strategy", default="auto", help="such as ddp or auto")
    return parser.parse_args()

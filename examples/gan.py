"""A GAN on points in the plane: two models, two optimizers, float16 with one loss scale for both, averaged weights.

The real points lie in eight clusters on a circle. The energy distance between real and generated
points measures how far apart the two distributions are; it falls while the generator learns.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric

NOISE = 8


def real_points(count: int) -> Tensor:
    """Points of shape (count, 2), around eight centers on a circle of radius 2."""
    angle = torch.arange(count) % 8 * (math.pi / 4)
    return 2 * torch.stack([angle.cos(), angle.sin()], dim=1) + 0.1 * torch.randn(count, 2)


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def energy_distance(first: Tensor, second: Tensor) -> float:
    """The energy distance of two sets of points: zero if they have the same distribution."""
    across, within = torch.cdist(first, second).mean(), torch.cdist(first, first).mean()
    return float(2 * across - within - torch.cdist(second, second).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    fabric = Fabric(accelerator=args.accelerator, devices=args.devices, precision="16-mixed")
    fabric.launch()
    fabric.seed_everything(0)

    points = real_points(8192)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(points), 128 // fabric.world_size, shuffle=True))
    generator, critic = network(NOISE, 2), network(2, 1)
    for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
    generator, for_generator = fabric.setup(generator, for_generator)
    critic, for_critic = fabric.setup(critic, for_critic)
    ema = fabric.ema(generator, decay=0.95)
    fixed_noise = torch.randn(1000, NOISE, device=fabric.device)

    def report(epoch: int) -> None:
        with ema.applied():  # averaged weights generate better points; no gradients are recorded here
            distance = energy_distance(points[:1000], generator(fixed_noise).cpu())
        fabric.print(f"epoch {epoch}: energy distance {distance:.4f}")

    # From here on each process draws different noise.
    fabric.seed_everything(1, per_rank=True)
    report(0)
    for epoch in range(1, args.epochs + 1):
        for (real,) in loader:
            fake = generator(torch.randn(len(real), NOISE, device=fabric.device))

            # One pass of the critic over both, so that its gradients are synchronized once.
            verdict = critic(torch.cat([real, fake.detach()]))
            truth = torch.cat([torch.ones_like(verdict[: len(real)]), torch.zeros_like(verdict[len(real) :])])
            for_critic.zero_grad()
            fabric.backward(binary_cross_entropy_with_logits(verdict, truth))
            for_critic.step()

            # The critic only passes the gradient on. Its own gradients are dropped, so none need
            # synchronizing.
            with fabric.no_backward_sync(critic):
                verdict = critic(fake)
                for_generator.zero_grad()
                fabric.backward(binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict)))
            for_generator.step()
            ema.update()
        report(epoch)
    fabric.teardown()


if __name__ == "__main__":
    main()

"""The names of the top module ``lightning``."""

from fabric_compat import Fabric, seed_everything
from fabric_compat.pytorch import Callback, LightningDataModule, LightningModule, Trainer

__all__ = [
    "Callback",
    "Fabric",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "seed_everything",
]

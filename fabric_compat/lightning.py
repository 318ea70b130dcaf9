"""The names of the top module ``lightning`` that belong to Fabric."""

from typing import Any

import fabric_compat as fabric
from fabric_compat import Fabric, seed_everything


def __getattr__(name: str) -> Any:
    if name in ("Trainer", "LightningModule", "LightningDataModule", "Callback", "pytorch"):
        raise ImportError(
            f"lightning.{name} belongs to Lightning's Trainer, which fabric_compat does not have"
        )
    raise AttributeError(f"fabric_compat has no lightning.{name}")

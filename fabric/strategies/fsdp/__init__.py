"""Sharded data parallelism, on torch's ``fully_shard``."""

from fabric.strategies.fsdp.api import FSDPStrategy

__all__ = ["FSDPStrategy"]

"""The cases, one file for each kind. See :class:`benchmarks.framework.Case`."""

__all__ = ["MODULES"]

MODULES = (
    "imports",
    "step",
    "ranks",
    "batch",
    "clip",
    "trees",
    "launch",
    "gpt",
    "mesh",
    "exact",
    "init",
    "disk",
    "kit",
    "gpu",
)

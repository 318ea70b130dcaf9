"""The documented path of :func:`fabric.tools.plotting.plot`."""

from fabric.tools.plotting import plot

__all__ = ["plot"]

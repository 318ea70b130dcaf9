"""What watches a job: a flight recorder, and its readers."""

from fabric.diagnostics.contract import GradientContract

__all__ = ["GradientContract"]

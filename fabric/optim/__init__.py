"""Gradients and optimizers: loss scale, loss weights, clipping, parameter lists and averaged weights."""

__all__: list[str] = []  # nothing: some of its files are below the strategies, and some above them

"""Gradients and optimizers: loss scale, loss weights, clipping, parameter lists, averages."""

# Nothing: some files of this package are below the strategies, and some above them.
__all__: list[str] = []

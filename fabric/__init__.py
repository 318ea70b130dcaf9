"""Grow a hand-written PyTorch loop from one device to many, with a handful of changed lines."""

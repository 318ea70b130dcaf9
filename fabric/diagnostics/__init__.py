"""Diagnostics of a job: a flight recorder, and its readers."""

__all__: list[str] = []  # nothing: some of its files are below the runtime, and some above it

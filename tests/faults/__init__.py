"""The fault matrix: what goes wrong in a job, over every way to start one, in real processes with real signals."""

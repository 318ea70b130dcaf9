"""The faults of a job with every launcher, in real processes with real signals."""

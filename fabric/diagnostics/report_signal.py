"""The signal with which a user asks for a hang report.

The file imports nothing of torch, since ``fabric run`` handles the signal before its other imports.
"""

import os
import signal

__all__ = ["ignore_early_requests", "ignore_request", "report_signal"]


def report_signal() -> signal.Signals:
    """Return SIGUSR1, or SIGQUIT in a SLURM job, where SIGUSR1 means that the job should stop."""
    if "SLURM_JOB_ID" in os.environ:
        return signal.SIGQUIT
    return signal.SIGUSR1


def ignore_request(number: int, frame: object) -> None:
    """Do nothing. A signal handler for :func:`ignore_early_requests`."""


def ignore_early_requests() -> None:
    """Keep a request for a report from ending this process before a supervisor can answer it.

    ``fabric run`` calls it first of all. If the signal already has a handler, or is ignored,
    nothing changes.
    """
    # A handler that does nothing, instead of SIG_IGN, which child processes would inherit.
    number = report_signal()
    if signal.getsignal(number) is signal.SIG_DFL:
        signal.signal(number, ignore_request)

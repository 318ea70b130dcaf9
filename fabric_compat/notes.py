"""Lines on standard error that say how the behavior differs from ``fabric``."""

import sys
from functools import cache

from lightning_utilities.core.rank_zero import rank_zero_only

from fabric_compat.plugins import set_default_rank


def note(text: str) -> None:
    """Print once, on the first rank, how the behavior differs from ``fabric``."""
    set_default_rank()
    print_once(text)


@rank_zero_only
@cache
def print_once(text: str) -> None:
    """Print a note of :func:`note`. The cache holds the notes that have been printed."""
    print(f"fabric_compat: as in Lightning Fabric, {text}", file=sys.stderr, flush=True)

"""See the package."""

import sys

from tests.hostile import checkpoints, collectives, processes, training  # noqa: F401 - they register their cases
from tests.hostile.base import main

if __name__ == "__main__":
    raise SystemExit(min(main(sys.argv[1:]), 1))

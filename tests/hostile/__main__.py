"""Run hostile cases: ``python -m tests.hostile [WORDS]``."""

import sys

# The modules register their cases.
from tests.hostile import checkpoints, collectives, processes, training  # noqa: F401
from tests.hostile.base import main

if __name__ == "__main__":
    raise SystemExit(min(main(sys.argv[1:]), 1))

"""The entry point of ``python -m fabric``, which does what the command ``fabric`` does."""

import sys

from fabric.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""One process of a contestant, which measures once for each line of its standard input."""

import json
import os
import sys

from benchmarks.framework import find_case


def main() -> None:
    module, name, contestant, quick = sys.argv[1:]
    # Libraries print to stdout, so stdout goes to stderr, and the results go to the former stdout.
    with os.fdopen(os.dup(1), "w", buffering=1) as results:
        os.dup2(2, 1)
        measure = find_case(module, name).contestants[contestant](bool(int(quick)))
        results.write("{}\n")
        for _ in sys.stdin:
            results.write(json.dumps(measure()) + "\n")
    # Exit without teardown: the teardown of a peer may wait for a rank that has exited.
    os._exit(0)


if __name__ == "__main__":
    main()

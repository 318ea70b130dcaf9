"""``job.py LAUNCHER ACTION [ARGUMENT]``: run an action on two ranks.

Rank 0 or the launching process prints the result.
"""

import os
import sys

import actions

from fabric.launchers import LAUNCHERS, InlineLauncher, LaunchSpec


def main() -> None:
    name, action, *words = sys.argv[1:]
    function = getattr(actions, action)
    arguments = list(map(int, words))
    launcher = LAUNCHERS[name]
    if "FABRIC_STORE" in os.environ:
        launcher = InlineLauncher()
    result = launcher.launch(function, arguments, {}, LaunchSpec(num_processes=2))
    if os.environ.get("RANK", "0") == "0":
        print("result", result)


if __name__ == "__main__":
    main()

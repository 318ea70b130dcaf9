"""``job.py LAUNCHER ACTION [ARGUMENT]``: two ranks do something; rank 0 or the launching process prints the result."""

import os
import sys

import actions

from fabric.launchers import LAUNCHERS, InlineLauncher, LaunchSpec


def main() -> None:
    name, action, *arguments = sys.argv[1:]
    function = getattr(actions, action)
    launcher = InlineLauncher() if "FABRIC_STORE" in os.environ else LAUNCHERS[name]
    result = launcher.launch(
        function, [int(text) for text in arguments], {}, LaunchSpec(num_processes=2)
    )
    if os.environ.get("RANK", "0") == "0":
        print("result", result)


if __name__ == "__main__":
    main()

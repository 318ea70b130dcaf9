"""A script without a guard.

A launcher has to find the function without running the script again, or to refuse clearly.
"""

import os
import sys

from fabric.launchers import LAUNCHERS, LaunchSpec


def double(value):
    return value * 2 + int(os.environ["WORLD_SIZE"])


launcher = LAUNCHERS[sys.argv[1]]
spec = LaunchSpec(num_processes=2)
result = launcher.launch(double, (20,), {}, spec)
print("result", result)

"""A script without a guard: what it defines has to be found without running it again, or refused clearly."""

import os
import sys

from fabric.launchers import LAUNCHERS, LaunchSpec


def double(value):
    return value * 2 + int(os.environ["WORLD_SIZE"])


print("result", LAUNCHERS[sys.argv[1]].launch(double, (20,), {}, LaunchSpec(num_processes=2)))

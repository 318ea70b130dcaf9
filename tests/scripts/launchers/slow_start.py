"""A script that never comes to its launch in a rank.

The rank is still preparing when the signal arrives.
"""

import os
import threading

from fabric.launchers import LAUNCHERS, LaunchSpec

if "FABRIC_STORE" in os.environ:
    os.write(1, f"ready {os.getpid()}\n".encode())
    threading.Event().wait()

spec = LaunchSpec(num_processes=2)
LAUNCHERS["popen"].launch(None, (), {}, spec)

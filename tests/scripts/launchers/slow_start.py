"""A script that never comes to its launch in a rank: the rank is still preparing when the signal arrives."""

import os
import threading

from fabric.launchers import LAUNCHERS, LaunchSpec

if "FABRIC_STORE" in os.environ:
    os.write(1, f"ready {os.getpid()}\n".encode())
    threading.Event().wait()
LAUNCHERS["popen"].launch(None, (), {}, LaunchSpec(num_processes=2))

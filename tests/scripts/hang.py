"""``hang.py LAUNCHER [DEVICES WATCHDOG]``: run a job that hangs until its report.

Rank 1 comes to a barrier only after the hang report.
"""

import sys
import threading
import time

from fabric import Fabric


def main(fabric: Fabric) -> None:
    fabric.all_reduce(1.0)
    if fabric.global_rank == 1:
        print("ready", flush=True)
        wait_for_the_report(fabric)
    fabric.barrier("end")


def wait_for_the_report(fabric: Fabric) -> None:
    store = fabric.strategy.runtime.store
    deadline = time.monotonic() + 150
    while store.get_nowait("watchdog/report/1") is None:
        assert time.monotonic() < deadline, "no report came"
        threading.Event().wait(0.05)


if __name__ == "__main__":
    launcher, devices, watchdog, *_ = [*sys.argv[1:], "2", "0"]
    with Fabric(
        accelerator="cpu", devices=devices, launcher=launcher, watchdog=float(watchdog)
    ) as fabric:
        fabric.launch(main)

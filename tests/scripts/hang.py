"""``hang.py LAUNCHER [DEVICES WATCHDOG]``: a job whose rank 1 comes to a barrier only after a report."""

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
    until = time.monotonic() + 50
    while fabric.strategy.runtime.store.get_nowait("watchdog/report/1") is None:
        assert time.monotonic() < until, "no report came"
        threading.Event().wait(0.05)


if __name__ == "__main__":
    launcher, devices, watchdog, *_ = [*sys.argv[1:], "2", "0"]
    with Fabric(
        accelerator="cpu", devices=devices, launcher=launcher, watchdog=float(watchdog)
    ) as fabric:
        fabric.launch(main)

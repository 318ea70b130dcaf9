"""One worker of Ray Train, without Ray's processes: it gets the information of a preemption.

Prints what should_stop is before and after, and whether exit_preempted waits for Ray.
"""

# Ray is no part of the development environment.
# pyright: reportMissingImports=false

import os
import warnings
from threading import Thread
from types import SimpleNamespace

from ray.train import PreemptionInfo
from ray.train.v2._internal.execution.context import set_train_context
from ray.train.v2._internal.execution.preemption import PreemptionContext

from fabric import Fabric

# Seconds in which exit_preempted would have ended.
WAIT = 3


def train(fabric: Fabric, context: PreemptionContext) -> None:
    print(fabric.should_stop, end=" ")
    context.preemption_info = PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"a": [0]})
    print(fabric.should_stop, end=" ")
    fabric.exit_preempted()


if __name__ == "__main__":
    warnings.simplefilter("error")
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK"):
        os.environ[name] = "0"
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RAY_JOB_ID"):
        os.environ[name] = "1"
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "1"  # one process connects to nothing
    context = PreemptionContext()
    set_train_context(SimpleNamespace(preemption_context=context))
    with Fabric(accelerator="cpu") as fabric:
        fabric.launch()
        # Ray calls the user's function in a thread, too.
        thread = Thread(target=train, args=(fabric, context), daemon=True)
        thread.start()
        thread.join(WAIT)
        if thread.is_alive():
            print("waits")

"""Start the ranks of one machine as a task of Flyte with ``Elastic`` does: by torch's agent.

The arguments are the arguments of examples/long_run.py, which each rank runs as a function.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def train(arguments: Sequence[str]) -> None:
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    import long_run  # pyright: ignore[reportMissingImports] - of the folder above

    long_run.main(arguments)


if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=1,
        run_id="execution",
        rdzv_backend="c10d",
        rdzv_endpoint=os.environ["PET_RDZV_ENDPOINT"],
        rdzv_configs={"timeout": 900, "join_timeout": 900},
        max_restarts=0,
        monitor_interval=5,
        start_method="spawn",
    )
    elastic_launch(config, train)(sys.argv[1:])

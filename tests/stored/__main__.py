"""Write the checkpoints of this release: ``python -m tests.stored``, then commit the new folder."""

import torch

import fabric
from fabric import Fabric
from tests.stored import FOLDER, PRECISION, STRATEGIES, new_state, steps


def main() -> None:
    """Save after the first of four steps, in the middle of an epoch, under each strategy."""
    folder = FOLDER / fabric.__version__
    for name, strategy in STRATEGIES.items():
        with Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=PRECISION) as job:
            job.launch()
            state = new_state(job)
            next(steps(job, state))
            state["values"]["step"] = 1
            # Each rank has random numbers of its own.
            torch.manual_seed(job.global_rank)
            job.save(folder / name, state)


if __name__ == "__main__":
    main()

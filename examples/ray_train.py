"""`long_run.py` with its `main` unchanged on Ray Train workers, which Ray restarts together when one fails.

All other options are passed on to `long_run.py`. Needs Ray: pip install "torch-fabric[ray]".
"""

import argparse
from functools import partial
from pathlib import Path

import long_run

try:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
except ImportError as error:
    raise SystemExit(f'{error}: pip install "torch-fabric[ray]"') from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", default="runs/ray", help="which all machines see")
    args, options = parser.parse_known_args()
    folder = Path(args.folder).resolve()  # the workers start in another folder
    trainer = TorchTrainer(
        partial(long_run.main, [f"--folder={folder / 'checkpoints'}", *options]),
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(name="ray", storage_path=str(folder), failure_config=FailureConfig(max_failures=3)),
    )
    result = trainer.fit()
    print(f"step {result.metrics['step']}: loss {result.metrics['loss']:.6f}, in {result.checkpoint.path}")


if __name__ == "__main__":
    main()

"""A loop of two ranks that logs to everything at once, set up as users of each package do it."""

import sys
from pathlib import Path

import mlflow
import wandb
from lightning.pytorch import loggers as lightning
from torch.utils.tensorboard import SummaryWriter

from fabric import Fabric
from fabric.loggers import CSVLogger, TensorBoardLogger


class Tracking:
    """A logger of one's own: mlflow's client, in the three lines that the documentation shows."""

    def __init__(self, uri: str) -> None:
        self.client = mlflow.MlflowClient(uri)
        self.run_id = self.client.create_run(self.client.create_experiment("own")).info.run_id

    def log_metrics(self, metrics, step=None):
        for name, value in metrics.items():
            self.client.log_metric(self.run_id, name, value, step=step)


def main(folder: Path, fails: bool) -> None:
    uri = (folder / "mlruns").as_uri()
    of_lightning = lightning.WandbLogger(
        name="lightning", save_dir=folder / "lightning", offline=True
    )
    given = [
        CSVLogger(folder / "csv", version=0),
        TensorBoardLogger(folder / "tensorboard", version=0),
        lightning.CSVLogger(folder / "lightning", version=0),
        lightning.TensorBoardLogger(folder / "lightning", name="tensorboard", version=0),
        of_lightning,
        lightning.MLFlowLogger("lightning", tracking_uri=uri),
    ]
    with Fabric(accelerator="cpu", devices=2, loggers=given) as fabric:
        fabric.launch()
        if fabric.is_global_zero:
            _ = (
                of_lightning.experiment
            )  # makes its run; when it is first used, it would take one that is there
            own = wandb.init(project="own", dir=folder, reinit="create_new")
            for logger in (own, SummaryWriter(folder / "writer"), Tracking(uri)):
                fabric.add_logger(logger)
        fabric.log_hyperparams({"lr": 0.5})
        for step in range(3):
            loss = fabric.all_reduce(1.0 / (1 + step + fabric.global_rank))
            fabric.log_dict({"loss": loss, "accuracy": step}, step)
        if fails:
            raise ArithmeticError("on every rank")


if __name__ == "__main__":
    main(Path(sys.argv[1]), fails=sys.argv[2:] == ["fails"])

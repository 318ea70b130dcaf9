"""A loop of two ranks that logs to many loggers at once, set up as users of the packages do it."""

import sys
from pathlib import Path

import mlflow
import wandb
from lightning.pytorch import loggers as lightning
from torch.utils.tensorboard import SummaryWriter

from fabric import Fabric
from fabric.loggers import CSVLogger, TensorBoardLogger


class Tracking:
    """A logger of a user: a client of MLflow in three lines, as the documentation shows."""

    def __init__(self, uri: str) -> None:
        self.client = mlflow.MlflowClient(uri)
        experiment_id = self.client.create_experiment("client")
        self.run_id = self.client.create_run(experiment_id).info.run_id

    def log_metrics(self, metrics, step=None):
        for name, value in metrics.items():
            self.client.log_metric(self.run_id, name, value, step=step)


def main(folder: Path, fails: bool) -> None:
    uri = (folder / "mlruns").as_uri()
    wandb_logger = lightning.WandbLogger(
        name="lightning", save_dir=folder / "lightning", offline=True
    )
    loggers = [
        CSVLogger(folder / "csv", version=0),
        TensorBoardLogger(folder / "tensorboard", version=0),
        lightning.CSVLogger(folder / "lightning", version=0),
        lightning.TensorBoardLogger(folder / "lightning", name="tensorboard", version=0),
        wandb_logger,
        lightning.MLFlowLogger("lightning", tracking_uri=uri),
    ]
    with Fabric(accelerator="cpu", devices=2, loggers=loggers) as fabric:
        fabric.launch()
        if fabric.is_global_zero:
            # The property makes the run of Lightning's logger now. Later, it would take the run
            # that exists then.
            _ = wandb_logger.experiment
            run = wandb.init(project="user", dir=folder, reinit="create_new")
            fabric.add_logger(run)
            fabric.add_logger(SummaryWriter(folder / "writer"))
            fabric.add_logger(Tracking(uri))
        fabric.log_hyperparams({"lr": 0.5})
        for step in range(3):
            loss_of_rank = 1.0 / (1 + step + fabric.global_rank)
            loss = fabric.all_reduce(loss_of_rank)
            fabric.log_dict({"loss": loss, "accuracy": step}, step)
        if fails:
            raise ArithmeticError("on every rank")


if __name__ == "__main__":
    main(Path(sys.argv[1]), fails=sys.argv[2:] == ["fails"])

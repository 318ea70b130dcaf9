"""A loop of two ranks that makes runs after the launch, and leaves their end to the exit."""

import os
import sys

import mlflow
import wandb

from fabric import Fabric


class MLflowRun:
    """The logger of the page about loggers."""

    def __init__(self, experiment):
        mlflow.set_experiment(experiment)
        mlflow.start_run()

    def log_metrics(self, metrics, step=None):
        mlflow.log_metrics(metrics, step=step)

    def log_hyperparams(self, params):
        mlflow.log_params(params)

    def finalize(self, status):
        mlflow.end_run("FINISHED" if status == "success" else "FAILED")


class Unreachable:
    """A tracker that fails at the end."""

    def log_metrics(self, metrics, step=None):
        """Do nothing."""

    def finalize(self, status):
        raise ConnectionError("the server is gone")


os.chdir(sys.argv[1])
fabric = Fabric(accelerator="cpu", devices=2)
fabric.launch()
if fabric.is_global_zero:
    mlflow.set_tracking_uri("file:./mlruns")
    fabric.add_logger(wandb.init(project="user", dir="."))
    fabric.add_logger(MLflowRun("page"))
    fabric.add_logger(Unreachable())
fabric.log_hyperparams({"lr": 0.5})
for step in range(3):
    loss_of_rank = 1.0 / (1 + step + fabric.global_rank)
    fabric.log("loss", fabric.all_reduce(loss_of_rank), step)
if sys.argv[2:] == ["fails"]:
    raise ArithmeticError("on every rank")

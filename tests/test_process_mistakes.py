"""Processes that end, fork, or close what other calls need."""

import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.errors import FabricError
from fabric.loggers import CSVLogger
from fabric.strategies import SingleDeviceStrategy
from tests.judged_cases import (
    case,
    cases_of,
    judge,
    net,
    sgd,
)


@case()
def a_forked_child(fabric: Fabric, rank: int) -> None:
    child = os.fork()
    if child == 0:
        try:
            fabric.all_reduce(torch.ones(1))
        except FabricError:
            os._exit(7)
        finally:
            os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@case()
def two_fabrics(fabric: Fabric, rank: int) -> None:
    second = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    second.launch()
    assert second.all_reduce(1, reduce_op="sum") == 2
    second.teardown()
    assert fabric.all_reduce(1, reduce_op="sum") == 2


@case(refused=True)
def one_device_inside_of_a_rank(fabric: Fabric, rank: int) -> None:
    Fabric(strategy=SingleDeviceStrategy(device=torch.device("cpu"))).launch()


@case(refused=True)
def a_collective_after_teardown(fabric: Fabric, rank: int) -> None:
    fabric.teardown()
    fabric.all_reduce(1.0)


@case(refused=True)
def a_launch_inside_of_a_rank(fabric: Fabric, rank: int) -> None:
    Fabric(accelerator="cpu", devices=3, strategy="ddp_spawn").launch(net)


@case(refused=True)
def more_devices_than_the_job_has(fabric: Fabric, rank: int) -> None:
    Fabric(accelerator="cpu", devices=3).launch()


@case()
def an_error_while_one_rank_goes_first(fabric: Fabric, rank: int) -> None:
    try:
        with fabric.rank_zero_first():
            if rank == 0:
                raise LookupError("no network")
    except (LookupError, FabricError):
        return
    raise AssertionError("rank 1 went on")


@case(loggers=CSVLogger("."))
def metrics_of_each_rank(fabric: Fabric, rank: int) -> None:
    fabric.log("loss", 1.0 + rank, step=0)
    fabric.barrier()
    assert len(os.listdir("run")) == 1
    with open("run/version_0/metrics.csv") as file:
        assert file.read().splitlines() == ["step,loss", "0,1.0"]


@case()
def a_model_with_other_outputs(fabric: Fabric, rank: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return {
                "loss": self.linear(x).mean(),
                "n": 3,
                "none": None,
                "text": "a",
                "pair": (x, [x]),
            }

    outputs = fabric.setup(Model())(torch.ones(2, 4))
    fabric.backward(outputs["loss"])
    assert outputs["n"] == 3
    assert outputs["none"] is None
    assert outputs["text"] == "a"
    assert type(outputs["pair"]) is tuple


@case()
def warnings_are_errors(fabric: Fabric, rank: int) -> None:
    module = net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = fabric.setup(module, sgd(module))
        fabric.backward(model(torch.ones(2, 4)).mean())
        optimizer.step()
        fabric.save("x", {"model": model, "optimizer": optimizer})
        fabric.load("x", {"model": model, "optimizer": optimizer})


@pytest.mark.parametrize("name", cases_of(__name__, slow=2))
def test_a_case_ends_right_or_with_an_error_of_fabric_and_leaves_nothing(name: str) -> None:
    assert judge(name).problems == []

"""How many files of fabric one reads to follow an operation: those that it enters, on two ranks."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import fabric as package
from benchmarks.models import tiny
from fabric import Fabric
from tests.ranks import run_in_ranks

PACKAGE = f"{Path(package.__file__).parent}{os.sep}"

# At most so many; a limit is only ever lowered.
LIMITS = {
    "ddp": {"setup": 9, "forward": 3, "backward": 3, "step": 1, "all_reduce": 7, "save": 10},
    "fsdp": {"setup": 14, "forward": 3, "backward": 2, "step": 1, "all_reduce": 7, "save": 12},
}


def files_entered(action: Callable[[], Any]) -> list[str]:
    seen = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return sorted(path.removeprefix(PACKAGE) for path in seen if path.startswith(PACKAGE))


def operations(fabric: Fabric, folder: str) -> dict[str, list[str]]:
    entered, kept = {}, {}
    for number in range(2):  # what is imported where it is used has been imported in the second round
        module, sgd, inputs, targets = tiny()
        entered["setup"] = files_entered(lambda module=module, sgd=sgd: kept.update(both=fabric.setup(module, sgd)))
        model, optimizer = kept["both"]
        for _ in range(8):  # the first steps are watched
            entered["forward"] = files_entered(lambda model=model, x=inputs: kept.update(output=model(x)))
            loss = mse_loss(kept.pop("output"), targets)
            entered["backward"] = files_entered(lambda loss=loss: fabric.backward(loss))
            entered["step"] = files_entered(optimizer.step)
            optimizer.zero_grad()
        entered["all_reduce"] = files_entered(lambda: fabric.all_reduce({"loss": 1.0, "correct": torch.ones(2)}))
        state, path = {"model": model, "optimizer": optimizer}, f"{folder}/{number}"
        entered["save"] = files_entered(lambda path=path, state=state: fabric.save(path, state))
    return entered


@pytest.mark.parametrize("strategy", LIMITS)
def test_an_operation_enters_few_files(strategy: str, tmp_path: Path) -> None:
    for entered in run_in_ranks(operations, str(tmp_path), strategy=strategy):
        assert {name: files for name, files in entered.items() if len(files) > LIMITS[strategy][name]} == {}

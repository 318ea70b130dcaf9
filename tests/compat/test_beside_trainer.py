"""The names beside Lightning's Trainer work without the Trainer."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn
from torch.optim import SGD

from fabric_compat import Fabric
from fabric_compat.demos import Transformer, WikiText2
from fabric_compat.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    ModelCheckpoint,
    Trainer,
    instantiate_class,
    is_overridden,
)
from fabric_compat.testing import _runif_reasons
from fabric_compat.trackers import CSVLogger, LitLogger, MLFlowLogger, WandbLogger
from fabric_compat.utilities import isolate_rng


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.epochs: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self(batch).sum()
        self.log("loss", loss, prog_bar=True)
        self.log("hidden", loss, logger=False)
        return loss

    def on_train_epoch_end(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Records:
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((dict(metrics), step))


def test_a_lightning_module_logs_and_is_called_through_its_fabric() -> None:
    records = Records()
    with Fabric(accelerator="cpu", devices=1, loggers=records) as fabric:
        module = Model()
        assert module.fabric is None
        assert module.trainer is None
        assert module.logger is None
        optimizer = SGD(module.parameters(), lr=0.1)
        _, optimizer = fabric.setup(module, optimizer)
        assert module.fabric is fabric
        assert module.optimizers() is optimizer
        assert module.logger is records
        assert module.device == fabric.device
        loss = module.training_step(torch.ones(1, 1))
        module.manual_backward(loss)
        assert records.rows == [({"loss": loss.item()}, None)]
        fabric.call("on_train_epoch_end", epoch=3)
        fabric.call("on_train_epoch_start")
        assert module.epochs == [3]
        assert copy.deepcopy(module).fabric is None


def test_a_lightning_module_without_a_fabric_says_what_is_missing(monkeypatch: Any) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    module = Model()
    with pytest.warns(UserWarning, match=r"Model.log\(\) writes nothing before fabric.setup"):
        module.training_step(torch.ones(1, 1))
    with pytest.raises(RuntimeError, match=r"Model.manual_backward needs fabric.setup\(module\)"):
        module.manual_backward(torch.ones(1))


def test_annotations_with_classes_of_the_trainer_work_and_calls_do_not() -> None:
    def configure(trainer: Trainer, *callbacks: Callback | ModelCheckpoint) -> None: ...

    assert configure.__annotations__["trainer"] is Trainer
    assert not isinstance(Callback(), ModelCheckpoint)
    with pytest.raises(ImportError, match="start the script without fabric_compat"):
        Trainer(max_epochs=1)
    with pytest.raises(ImportError, match=r"fabric.save\(path, state\)"):
        ModelCheckpoint(monitor="loss")
    with pytest.raises(ImportError, match=r"Fabric\(loggers="):
        LitLogger()


def test_a_hook_is_overridden_if_the_class_of_the_user_defines_it() -> None:
    module = Model()
    assert is_overridden("training_step", module)
    assert is_overridden("forward", module)
    assert not is_overridden("log", module)
    assert not is_overridden("validation_step", module)
    assert not is_overridden("training_step", None)
    assert not is_overridden("setup", LightningDataModule())
    with pytest.raises(ValueError, match="has no class of Lightning"):
        is_overridden("training_step", nn.Linear(1, 1))


def test_a_class_is_instantiated_from_its_path() -> None:
    weight = nn.Parameter(torch.ones(1))
    init = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}
    optimizer = instantiate_class([weight], init)
    assert isinstance(optimizer, SGD)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert instantiate_class((2, 3), {"class_path": "torch.nn.Linear"}).out_features == 3


def test_a_block_that_isolates_random_numbers_draws_none_of_those_after_it() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with isolate_rng():
        torch.rand(7)
    assert torch.equal(torch.rand(2), expected)


def test_the_demo_learns_from_the_pairs_of_its_data(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2.txt").write_text("a b c\nd a\n" * 10)
    dataset = WikiText2(tmp_path, block_size=4, download=True)
    assert dataset.vocab_size == 5
    assert len(dataset) == 16
    inputs, target = dataset[1]
    assert torch.equal(inputs[1:], target[:-1])
    model = Transformer(dataset.vocab_size, ninp=8, nhid=8, nlayers=1)
    output = model(inputs[None], target[None])
    assert output.shape == (4, 5)
    assert torch.allclose(output.exp().sum(-1), torch.ones(4))


def test_the_reasons_to_skip_a_test_are_those_of_this_machine() -> None:
    assert _runif_reasons() == ([], {})
    reasons, markers = _runif_reasons(min_torch="99.0", max_torch="1.0", min_python="3.99")
    assert [reason.partition(",")[0] for reason in reasons] == [
        "torch>=99.0",
        "torch<1.0",
        "python>=3.99",
    ]
    assert markers == {}
    reasons, markers = _runif_reasons(min_cuda_gpus=99, standalone=True, tpu=True)
    assert reasons[0] == "GPUs>=99"
    assert "TPU" in reasons
    assert markers == {"min_cuda_gpus": True, "standalone": True, "tpu": True}


def test_trackers_that_are_not_installed_fail_at_the_constructor(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ModuleNotFoundError, match="wandb"):
        WandbLogger(project="a")
    with pytest.raises(ModuleNotFoundError, match="mlflow"):
        MLFlowLogger("a")
    logger = CSVLogger(save_dir=tmp_path, name="a")
    assert logger.save_dir == str(tmp_path)
    assert logger.log_dir == str(tmp_path / "a" / "version_0")

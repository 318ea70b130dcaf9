"""Laws of a folder of checkpoints: saves, damage, failing reads, restarts and other owners."""

import errno
import math
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn

from fabric import Fabric
from fabric.checkpoint import file, save_load
from fabric.errors import CheckpointError, UnreadableCheckpointError
from tests.laws.base import profile

pytestmark = pytest.mark.timeout(1800)


class Saved(NamedTuple):
    """A healthy save."""

    step: int
    value: float
    loss: float


class Folder(RuleBasedStateMachine):
    """One folder, its owner, and what has been saved into it."""

    @initialize(keep=st.integers(1, 3))
    def begin(self, keep: int) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.keep = keep
        # The healthy saves by name, in the order of the saves.
        self.saved: dict[str, Saved] = {}
        self.damaged: set[str] = set()
        self.num_saves = 0
        # What the texts named before the last save.
        self.named_before: set[str] = set()
        self.open()

    def open(self) -> None:
        self.fabric = Fabric(accelerator="cpu", devices=1, environment="none")
        self.model = self.fabric.setup(nn.Linear(1, 1, bias=False))
        self.take()

    def take(self) -> None:
        """Open the folder, as a second object of the job or in a new one."""
        self.checkpoints = self.fabric.checkpoints(self.path, self.keep, ("loss", "min"))
        self.latest = max(self.on_disk(), default=None)

    def on_disk(self) -> set[str]:
        return {name for name in self.saved if (self.path / name).exists()}

    def texts(self) -> set[str]:
        names = set()
        for title in ("latest", "best"):
            if (self.path / title).exists():
                names.add((self.path / title).read_text().strip())
        return names

    def save_value(self, step: int, value: float, loss: float) -> None:
        nn.init.constant_(self.model.weight, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.checkpoints.save(step, {"model": self.model}, {"loss": loss}, async_=False)

    @rule(step=st.integers(0, 5), loss=st.integers(0, 9))
    def save(self, step: int, loss: int) -> None:
        named_before = self.texts()
        self.num_saves += 1
        name = f"{self.num_saves:08}-step-{step}"
        self.save_value(step, self.num_saves, loss)
        self.saved[name] = Saved(step, self.num_saves, loss)
        self.latest = name
        self.named_before = named_before

    @rule(step=st.integers(0, 5), value=st.sampled_from([math.nan, math.inf]))
    def save_unhealthy(self, step: int, value: float) -> None:
        healthy = self.on_disk()
        self.num_saves += 1
        # The loss would be the best one.
        self.save_value(step, value, loss=-1.0)
        nn.init.zeros_(self.model.weight)
        assert (self.path / f"{self.num_saves:08}-step-{step}-unhealthy").exists()
        assert len(list(self.path.glob("*-unhealthy"))) == 1
        assert self.on_disk() == healthy

    @precondition(lambda self: self.latest is not None)
    @rule()
    def damage_latest(self) -> None:
        assert self.latest is not None
        content = bytearray((self.path / self.latest).read_bytes())
        content[len(content) // 2 - 1] ^= 255
        content[len(content) // 3] ^= 255
        (self.path / self.latest).write_bytes(content[:-30])
        self.damaged.add(self.latest)

    @rule()
    def restore(self) -> None:
        expected = self.on_disk() - self.damaged
        nn.init.zeros_(self.model.weight)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                step = self.checkpoints.restore({"model": self.model})
            except CheckpointError:
                assert not self.model.weight.any()
                assert not expected
                return
        if step is None:
            assert not self.on_disk()
            return
        [restored] = [name for name in expected if self.saved[name].value == self.model.weight]
        assert self.saved[restored].step == step
        assert (self.path / "latest").read_text() == f"{restored}\n"
        if self.latest not in self.damaged:
            assert restored == self.latest
        self.latest = restored

    @precondition(lambda self: self.latest is not None and self.latest not in self.damaged)
    @rule(number=st.sampled_from([errno.EIO, errno.EACCES, errno.ESTALE, errno.ENOMEM]))
    def fail_to_read(self, number: int) -> None:
        content = {name.name for name in self.path.iterdir()}
        nn.init.zeros_(self.model.weight)
        error = OSError(number, "planted")
        with (
            patch.object(file, "_verify_checksums", side_effect=error),
            patch.object(save_load, "_PAUSES_BETWEEN_ATTEMPTS", (0.0, 0.0)),
            pytest.raises(UnreadableCheckpointError),
        ):
            self.checkpoints.restore({"model": self.model})
        assert not self.model.weight.any()
        assert {name.name for name in self.path.iterdir()} == content

    @rule()
    def restart(self) -> None:
        self.fabric.teardown()
        self.open()

    @rule()
    def take_in_the_same_job(self) -> None:
        first = self.checkpoints
        self.take()
        with pytest.raises(CheckpointError, match="a later call of fabric"):
            first.save(9, {"model": self.model}, {"loss": 0.0}, async_=False)

    @rule()
    def lose_the_lock(self) -> None:
        content = {name.name for name in self.path.iterdir()}
        (self.path / ".lock").write_text("process 7 elsewhere\n7")
        with pytest.raises(CheckpointError, match="process 7 elsewhere"):
            self.checkpoints.save(9, {"model": self.model}, {"loss": 0.0}, async_=False)
        assert {name.name for name in self.path.iterdir()} == content
        self.take()

    @invariant()
    def texts_name_what_loads(self) -> None:
        for name in self.texts() | self.named_before:
            assert (self.path / name).exists()
            if name not in self.damaged:
                assert self.fabric.load(self.path / name, None, rng=False)["model"]["weight"] == (
                    self.saved[name].value
                )

    @invariant()
    def few_are_kept(self) -> None:
        assert len(self.on_disk() - self.damaged) <= self.keep + 3

    @invariant()
    def the_best_is_kept(self) -> None:
        if self.damaged or not self.saved:
            return
        best_loss = min(saved.loss for saved in self.saved.values())
        best = (self.path / "best").read_text().strip()
        assert self.saved[best].loss == best_loss

    def teardown(self) -> None:
        self.fabric.teardown()
        shutil.rmtree(self.path)


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(10, id="few"),
        pytest.param(500, id="many", marks=[pytest.mark.slow, pytest.mark.soak]),
    ],
)
def test_a_folder_of_checkpoints_keeps_its_laws(examples: int) -> None:
    torch.manual_seed(0)
    run_state_machine_as_test(
        Folder,
        settings=settings(profile(examples), stateful_step_count=12),
    )

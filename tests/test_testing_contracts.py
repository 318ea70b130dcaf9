"""The conformance suites of all contracts but those of strategies and communicators."""

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fabric.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from fabric.checkpoint import FullCheckpoint
from fabric.environments import TorchrunEnvironment
from fabric.errors import CheckpointNotFoundError, ConfigurationError
from fabric.launchers import InlineLauncher, ProcessLauncher, ScriptLauncher
from fabric.precision import PRECISIONS, Precision
from fabric.testing import (
    check_accelerator,
    check_checkpoint_io,
    check_environment,
    check_launcher,
    check_precision,
)
from fabric.world import World

# -- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["32-true", "bf16-true", "bf16-mixed", "16-mixed"])
def test_our_precisions_conform(name: str) -> None:
    check_precision(PRECISIONS[name])


class ReplacesParameters(Precision):
    def convert_module(self, module: nn.Module) -> None:
        module[0].weight = nn.Parameter(module[0].weight.half())


class LeavesAutocastOn(Precision):
    @contextmanager
    def forward_context(self, device_type: str) -> Iterator[None]:
        torch.set_autocast_enabled(device_type, True)
        try:
            yield
        finally:
            torch.set_autocast_enabled(device_type, torch.is_grad_enabled())


class HoldsFile(Precision):
    def __reduce__(self) -> Any:
        raise TypeError("a file is open")


@pytest.mark.parametrize(
    ("precision", "text"),
    [
        (ReplacesParameters(name="mine"), "0.weight is another object"),
        (HoldsFile(name="mine"), "a precision can be pickled"),
    ],
)
def test_the_suite_names_the_fault_of_a_precision(precision: Precision, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_precision(precision)


def test_a_context_that_leaves_autocast_on_is_reported() -> None:
    try:
        with pytest.raises(AssertionError, match="restores the modes of torch"):
            check_precision(LeavesAutocastOn(name="mine"))
    finally:
        torch.set_autocast_enabled("cpu", False)


# -- accelerator -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CPUAccelerator, CUDAAccelerator, MPSAccelerator])
def test_our_accelerators_conform(kind: Any) -> None:
    check_accelerator(kind())


class Counts(CPUAccelerator):
    def device_count(self) -> int:
        return True


class Guesses(CPUAccelerator):
    def parse_devices(self, devices: Any) -> tuple[torch.device, ...]:
        return (torch.device("cpu"),)


class Remembers(CPUAccelerator):
    def __init__(self, count: int = 1) -> None:
        self.count = count

    def device_count(self) -> int:
        return self.count


@pytest.mark.parametrize(
    ("accelerator", "text"),
    [(Guesses(), "refuses values that name no device"), (Remembers(3), "is stateless")],
)
def test_the_suite_names_the_fault_of_an_accelerator(accelerator: Any, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_accelerator(accelerator)


# -- environment -----------------------------------------------------------------------------------


def torchrun_variables(size: int) -> list[dict[str, str]]:
    variables = []
    for rank in range(size):
        world = World(
            rank=rank, local_rank=rank, world_size=size, local_world_size=size, port=29500
        )
        variables.append(world.to_env())
    return variables


def test_our_environment_of_torchrun_conforms() -> None:
    check_environment(TorchrunEnvironment(), torchrun_variables(3))


class AlwaysDetects(TorchrunEnvironment):
    def detect(self, env: Mapping[str, str]) -> World | None:
        return super().detect(env) or World()


class ForgetsRanks(TorchrunEnvironment):
    def detect(self, env: Mapping[str, str]) -> World | None:
        if "RANK" not in env:
            return None
        return World(world_size=2, local_world_size=2, port=29500)


class ReadsTheProcess(TorchrunEnvironment):
    def detect(self, env: Mapping[str, str]) -> World | None:
        os.environ["FABRIC_TEST_SEEN"] = "1"
        return super().detect(env)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (AlwaysDetects(), "returns None if its launcher did not start"),
        (ForgetsRanks(), "returns the ranks of the job"),
        (ReadsTheProcess(), "changes nothing"),
    ],
)
def test_the_suite_names_the_fault_of_an_environment(
    environment: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FABRIC_TEST_SEEN", "0")
    with pytest.raises(AssertionError, match=text):
        check_environment(environment, torchrun_variables(2))


# -- launcher --------------------------------------------------------------------------------------


# Each rank of the six launches imports torch under spawn. Other tests launch by spawn, too.
@pytest.mark.parametrize(
    "start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"]
)
def test_our_launchers_of_functions_conform(start_method: Any) -> None:
    check_launcher(ProcessLauncher(start_method))


def test_a_launcher_that_starts_no_process_is_reported() -> None:
    with pytest.raises(AssertionError, match="returns the results"):
        check_launcher(InlineLauncher())


def test_a_launcher_of_scripts_has_no_suite() -> None:
    with pytest.raises(ConfigurationError, match="runs a script again"):
        check_launcher(ScriptLauncher())


# -- checkpoint format -----------------------------------------------------------------------------


def test_our_format_conforms(tmp_path: Path) -> None:
    check_checkpoint_io(FullCheckpoint(), tmp_path)


class PickledCheckpoint:
    """A format with two faults: it is not atomic, and loading runs code."""

    def save(self, state: Mapping[str, Any], path: Path) -> None:
        with open(path, "wb") as file:
            pickle.dump(dict(state), file)

    def load(self, path: Path) -> dict[str, Any]:
        if not path.exists():
            raise CheckpointNotFoundError(f"load {path}")
        return pickle.loads(path.read_bytes())

    def remove(self, path: Path) -> None:
        if not path.exists():
            raise CheckpointNotFoundError(f"remove {path}")
        path.unlink()

    def wait(self) -> None:
        pass


class AtomicPickledCheckpoint(PickledCheckpoint):
    def save(self, state: Mapping[str, Any], path: Path) -> None:
        content = pickle.dumps(dict(state))
        path.write_bytes(content)


class LossyCheckpoint(FullCheckpoint):
    def save(self, state: Mapping[str, Any], path: Any) -> None:
        super().save({name: value for name, value in state.items() if name != "set"}, path)


@pytest.mark.parametrize(
    ("checkpoint_io", "text"),
    [
        (PickledCheckpoint(), "keeps the old one if it fails"),
        (AtomicPickledCheckpoint(), "raises a CheckpointError"),
        (LossyCheckpoint(), "that save was given"),
    ],
)
def test_the_suite_names_the_fault_of_a_checkpoint_format(
    checkpoint_io: Any, text: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=text):
        check_checkpoint_io(checkpoint_io, tmp_path)

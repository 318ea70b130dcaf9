"""The mistakes that new users make: each error says what to write instead."""

import argparse
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from fabric import Fabric
from fabric.errors import FabricError
from fabric.migration import ACCELERATOR_NAMES, PRECISION_NAMES, STRATEGY_NAMES
from fabric.precision import parse_precision
from fabric.strategies import DDPStrategy, FSDPStrategy
from tests.models import Net


def single(**options: Any) -> Fabric:
    arguments = {"accelerator": "cpu", "devices": 1, "environment": "none", **options}
    return Fabric(**arguments)


def suggestion_of(action: Callable[[], object]) -> str:
    """Return what the error of an action says to write instead."""
    with pytest.raises(FabricError) as caught:
        action()
    return caught.value.suggestion


# -- arguments of Fabric --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "suggestion"),
    [
        ({"precision": "fp16"}, 'precision="16-mixed"'),
        ({"precision": torch.bfloat16}, 'precision="bf16-mixed"'),
        ({"precision": "no"}, 'precision="32-true"'),
        ({"strategy": "deepspeed_stage_2"}, 'Fabric(strategy="fsdp")'),
        ({"strategy": "deepspeed_stage_3_offload"}, 'Fabric(strategy="fsdp_cpu_offload")'),
        ({"strategy": "zero3"}, 'Fabric(strategy="fsdp")'),
        ({"strategy": "horovod"}, 'Fabric(strategy="ddp")'),
        ({"strategy": "fdsp"}, 'Fabric(strategy="fsdp")'),
        ({"strategy": DDPStrategy}, "Fabric(strategy=DDPStrategy())"),
        ({"accelerator": "tpu"}, 'Fabric(accelerator="auto")'),
        ({"mixed_precision": "fp16"}, 'Fabric(precision="16-mixed") or'),
        ({"gradient_accumulation_steps": 4}, "fabric.accumulate(loader, steps=4)"),
        ({"plugins": []}, "Fabric(precision=...), Fabric(environment=...)"),
        ({"acelerator": "cpu"}, "Fabric(accelerator=...)"),
    ],
)
def test_a_value_or_argument_of_another_toolkit_is_translated(
    options: dict[str, Any], suggestion: str
) -> None:
    arguments = {"accelerator": "cpu", **options}
    assert suggestion in suggestion_of(lambda: Fabric(**arguments))


def test_each_replacement_of_a_name_is_accepted() -> None:
    for precision in PRECISION_NAMES.values():
        parse_precision(precision)
    for strategy in STRATEGY_NAMES.values():
        single(strategy=strategy)
    for accelerator in ACCELERATOR_NAMES.values():
        Fabric(accelerator=accelerator)


# -- launch ---------------------------------------------------------------------------------------


def without_arguments() -> None:
    """Stand for a function that does not expect the Fabric."""


def with_a_number(number: int) -> None:
    """Stand for a function that expects only what it was called with before."""


async def asynchronous(fabric: Fabric) -> None:
    """Stand for a function that has to be awaited."""


def yielding(fabric: Fabric) -> Iterator[int]:
    yield fabric.global_rank


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        ((without_arguments,), "def without_arguments(fabric, ...)"),
        ((with_a_number, 3), "def with_a_number(fabric, ...)"),
        ((asynchronous,), "def main(fabric): asyncio.run(asynchronous(fabric))"),
        ((yielding,), "a loop over yielding(fabric)"),
        ((None,), "fabric.launch(train, 1, 2), not fabric.launch(train(fabric, 1, 2))"),
    ],
)
def test_a_function_that_launch_cannot_call_is_refused_before_ranks_start(
    arguments: tuple[Any, ...], suggestion: str, devices: int
) -> None:
    fabric = single(devices=devices, launcher="fork")
    assert suggestion in suggestion_of(lambda: fabric.launch(*arguments))


def test_a_second_launch_names_the_call_that_works() -> None:
    with single() as fabric:
        fabric.launch()
        assert "fabric.launch(train)" in suggestion_of(fabric.launch)
        assert fabric.launch(lambda job: job.world_size) == 1


# -- setup ----------------------------------------------------------------------------------------


class ForeignOptimizer:
    """An optimizer that does not derive from torch's class."""

    def __init__(self, module: nn.Module) -> None:
        self.param_groups = [{"params": list(module.parameters())}]

    def step(self) -> None:
        """Do nothing."""


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


SETUPS: dict[str, tuple[Callable[[Fabric, Net], Any], str]] = {
    "foreign optimizer": (
        lambda fabric, net: fabric.setup(net, ForeignOptimizer(net)),
        "class ForeignOptimizer(torch.optim.Optimizer)",
    ),
    "optimizer of another module": (
        lambda fabric, net: fabric.setup(net, sgd(Net())),
        "SGD(model.parameters()) of the model that is set up",
    ),
    "two modules": (
        lambda fabric, net: fabric.setup(net, Net()),
        "a call of fabric.setup(model, optimizer) for each model",
    ),
    "list of optimizers": (
        lambda fabric, net: fabric.setup(net, [sgd(net)]),
        "fabric.setup(model, *optimizers)",
    ),
    "list of modules": (
        lambda fabric, net: fabric.setup([net]),  # type: ignore[call-overload]
        "a call of its own for each model",
    ),
    "optimizer first": (
        lambda fabric, net: fabric.setup(sgd(net), net),  # type: ignore[call-overload]
        "fabric.setup(model, optimizer)",
    ),
    "loader": (
        lambda fabric, net: fabric.setup(net, sgd(net), DataLoader([1])),
        "fabric.setup_dataloaders(loader)",
    ),
    "clipping without a limit": (
        lambda fabric, net: fabric.clip_gradients(*fabric.setup(net, sgd(net))),
        "fabric.clip_gradients(model, optimizer, max_norm=1.0)",
    ),
}


@pytest.mark.parametrize("mistake", SETUPS)
def test_what_setup_does_not_take_names_the_call_that_does(mistake: str) -> None:
    action, suggestion = SETUPS[mistake]
    with single() as fabric:
        assert suggestion in suggestion_of(lambda: action(fabric, Net()))


# -- checkpoints ----------------------------------------------------------------------------------


def test_parsed_arguments_are_saved_as_a_dict(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    args = argparse.Namespace(lr=0.1)
    with single() as fabric:
        suggestion = suggestion_of(lambda: fabric.save(path, {"args": args}))
        assert "{'args': vars(args)}" in suggestion
        fabric.save(path, {"args": vars(args)})
        content = fabric.load(path)
    assert argparse.Namespace(**content["args"]) == args


def test_a_file_where_fsdp_saves_a_folder_is_replaced_as_the_error_says(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    path.write_text("from an earlier run")
    with single(strategy="fsdp") as fabric:
        model = fabric.setup(Net())
        suggestion = suggestion_of(lambda: fabric.save(path, {"model": model}))
    assert 'FSDPStrategy(state_dict_type="full")' in suggestion
    strategy = FSDPStrategy(state_dict_type="full")
    with single(strategy=strategy) as fabric:
        model = fabric.setup(Net())
        fabric.save(path, {"model": model})
        assert fabric.load(path, {"model": model}) == {}


# -- tracebacks -----------------------------------------------------------------------------------

WRONG_LINES: dict[str, Callable[[], object]] = {
    "argument": lambda: Fabric(precision="fp16"),
    "unknown argument": lambda: Fabric(gpus=2),  # type: ignore[arg-type]
    "launch": lambda: single().launch(len, 1, 2),
    "setup": lambda: single().setup(Net(), []),
}


@pytest.mark.parametrize("mistake", WRONG_LINES)
def test_the_traceback_of_a_wrong_line_ends_at_this_line(mistake: str) -> None:
    with pytest.raises(FabricError) as caught:
        WRONG_LINES[mistake]()
    last_entry = caught.traceback[-1]
    assert str(last_entry.path) == __file__
    assert WRONG_LINES[mistake].__code__.co_firstlineno == last_entry.lineno + 1


def test_a_script_shows_the_wrong_line_and_no_frame_of_fabric(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            from fabric import Fabric

            def main():
                fabric = Fabric(mixed_precision="fp16")

            main()
            """
        )
    )
    process = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=60
    )
    assert process.stderr.count('File "') == 2
    assert 'fabric = Fabric(mixed_precision="fp16")' in process.stderr
    assert 'Write: Fabric(precision="16-mixed")' in process.stderr

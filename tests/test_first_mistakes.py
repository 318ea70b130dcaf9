"""The mistakes that new users make: each error says what to write instead."""

import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.errors import FabricError
from fabric.migration import ACCELERATOR_NAMES, METHODS, PRECISION_NAMES, STRATEGY_NAMES
from fabric.precision import parse_precision
from fabric.strategies import FSDPStrategy
from tests.mistakes import MISTAKES, MISTAKES_OF_RANKS, Mistake, names_of_code
from tests.models import Net
from tests.ranks import run_in_ranks


def single(**options: Any) -> Fabric:
    arguments = {"accelerator": "cpu", "devices": 1, "environment": "none", **options}
    return Fabric(**arguments)


def suggestion_of(action: Callable[[], object]) -> str:
    """Return what the error of an action says to write instead."""
    with pytest.raises(FabricError) as caught:
        action()
    return caught.value.suggestion


# -- the list of mistakes -------------------------------------------------------------------------


def advice(code: str, names: dict[str, Any]) -> str:
    """Run code, and return the text of its error and its warnings. Empty if there are none."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(code, names)
        except (FabricError, AttributeError) as error:
            texts.append(str(error))
    texts.extend(str(warning.message) for warning in caught)
    return "\n".join(texts)


def test_the_list_has_sixty_different_mistakes() -> None:
    codes = [mistake.wrong for mistake in [*MISTAKES, *MISTAKES_OF_RANKS]]
    assert len(set(codes)) == len(codes)
    assert len(codes) >= 60


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.wrong[:50])
def test_the_advice_for_a_mistake_works(mistake: Mistake, tmp_path: Path) -> None:
    wrong_folder = tmp_path / "wrong"
    wrong_folder.mkdir()
    with single(precision=mistake.precision) as fabric:
        assert mistake.says in advice(mistake.wrong, names_of_code(fabric, wrong_folder))
    right_folder = tmp_path / "right"
    right_folder.mkdir()
    with single(precision=mistake.precision) as fabric:
        assert advice(mistake.right, names_of_code(fabric, right_folder)) == ""


def advice_on_rank(fabric: Fabric, code: str, folder: str) -> str:
    return advice(code, names_of_code(fabric, Path(folder)))


@pytest.mark.parametrize("mistake", MISTAKES_OF_RANKS, ids=lambda mistake: mistake.wrong[:50])
def test_the_advice_for_a_mistake_of_ranks_works(mistake: Mistake, tmp_path: Path) -> None:
    texts = run_in_ranks(advice_on_rank, mistake.wrong, str(tmp_path))
    assert mistake.says in "\n".join(texts)
    assert run_in_ranks(advice_on_rank, mistake.right, str(tmp_path)) == ["", ""]


# -- arguments of Fabric --------------------------------------------------------------------------


def test_each_replacement_of_a_name_is_accepted() -> None:
    for precision in PRECISION_NAMES.values():
        parse_precision(precision)
    for strategy in STRATEGY_NAMES.values():
        single(strategy=strategy)
    for accelerator in ACCELERATOR_NAMES.values():
        Fabric(accelerator=accelerator)


def test_each_replacement_of_a_method_is_one_of_fabric() -> None:
    for name, replacement in METHODS.items():
        assert not hasattr(Fabric, name)
        for method in re.findall(r"fabric\.(\w+)", replacement):
            assert hasattr(Fabric, method), replacement


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


def test_an_optimizer_that_is_none_of_torch_gets_a_base_class() -> None:
    net = Net()
    with single() as fabric:
        suggestion = suggestion_of(lambda: fabric.setup(net, ForeignOptimizer(net)))
    assert "class ForeignOptimizer(torch.optim.Optimizer)" in suggestion


def test_an_optimizer_of_another_module_is_refused() -> None:
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    with single() as fabric:
        suggestion = suggestion_of(lambda: fabric.setup(Net(), optimizer))
    assert "SGD(model.parameters()) of the model that is set up" in suggestion


# -- checkpoints ----------------------------------------------------------------------------------


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
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=150
    )
    assert process.stderr.count('File "') == 2
    assert 'fabric = Fabric(mixed_precision="fp16")' in process.stderr
    assert 'Write: Fabric(precision="16-mixed")' in process.stderr

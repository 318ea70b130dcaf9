"""The loops of the gallery give the losses of their plain loops on one rank and on two."""

import inspect
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fabric import Fabric
from tests.ranks import run_in_ranks
from tests.test_examples import changed_lines, run_here, run_python

GALLERY = Path(__file__).parent.parent / "examples" / "gallery"
NAMES = sorted(path.stem for path in GALLERY.glob("*.py") if path.stem != "comparison")
README = (GALLERY.parent / "README.md").read_text()


def functions_of(name: str) -> dict[str, Any]:
    """Return the names that an example of the gallery defines."""
    with pytest.MonkeyPatch.context() as patch:
        # An example imports the file beside it.
        patch.syspath_prepend(GALLERY)
        return runpy.run_path(str(GALLERY / f"{name}.py"))


def train(fabric: Fabric, name: str) -> list[float]:
    losses: list[float] = functions_of(name)["train"](fabric)
    return losses


def body_of(function: Callable[..., Any]) -> list[str]:
    """Return the lines of a function without its first line, which has the name."""
    _, *lines = inspect.getsource(function).splitlines()
    return lines


@pytest.mark.parametrize("name", NAMES)
def test_each_loop_gives_the_losses_of_the_plain_loop(name: str) -> None:
    plain_losses = functions_of(name)["train_plain"]()
    assert plain_losses[-1] != plain_losses[0]
    for ranks in (1, 2):
        for losses in run_in_ranks(train, name, ranks=ranks):
            assert losses == pytest.approx(plain_losses, rel=1e-9)


# torch has no step of LBFGS for these shards.
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"lbfgs"}))
@pytest.mark.slow
def test_each_loop_gives_the_same_losses_when_the_model_is_sharded(name: str) -> None:
    plain_losses = functions_of(name)["train_plain"]()
    # Muon rounds the gradients to bfloat16.
    tolerance = 1e-3 if name == "muon" else 1e-9
    for losses in run_in_ranks(train, name, strategy="fsdp"):
        assert losses == pytest.approx(plain_losses, rel=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_counts_the_lines_that_changed(name: str) -> None:
    functions = functions_of(name)
    before = body_of(functions["train_plain"])
    after = body_of(functions["train"])
    row = re.search(rf"^\| \[`{name}\.py`\]\(gallery/{name}\.py\) \|.*\| (\d+) \|$", README, re.M)
    assert row is not None
    assert int(row[1]) == changed_lines(before, after)


def test_an_example_prints_how_far_the_losses_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(GALLERY)
    output = run_here(GALLERY / "lbfgs.py", "--devices", 1)
    assert output.count("largest difference:") == 1
    largest_difference = float(output.split()[-1])
    assert largest_difference < 1e-12


@pytest.mark.slow
def test_an_example_starts_two_processes() -> None:
    output = run_python(GALLERY / "lbfgs.py", "--devices", 2)
    assert "2 process(es)" in output
    assert output.count("largest difference:") == 1
    largest_difference = float(output.split()[-1])
    assert largest_difference < 1e-12

"""The notebook runs from top to bottom in a kernel of its own."""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "examples" / "notebook" / "two_ranks.ipynb"
DEADLINE = 90


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each code cell showed, by the cell's id."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    NotebookClient(notebook, timeout=DEADLINE, kernel_name="python3", resources=resources).execute()
    return {
        cell.id: "".join(
            output.get("text", "") or output["data"]["text/plain"] for output in cell.outputs
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)

    nbformat.validate(notebook)
    assert all(
        not cell.outputs and cell.execution_count is None
        for cell in notebook.cells
        if cell.cell_type == "code"
    )


def test_a_cell_launches_two_processes_and_gets_the_result_of_the_first(
    outputs: dict[str, str],
) -> None:
    result = ast.literal_eval(outputs["launch-one"])

    assert result["processes"] == 2
    assert result["last loss"] < result["first loss"] / 2


def test_a_second_launch_in_the_same_kernel_returns_the_results_of_both_processes(
    outputs: dict[str, str],
) -> None:
    lines = outputs["launch-two"].splitlines()
    shown = [re.fullmatch(r"process (\d) of 2: loss ([\d.]+) -> ([\d.]+)", line) for line in lines]

    assert [actual and actual[1] for actual in shown] == ["0", "1"]
    assert all(actual and float(actual[3]) < float(actual[2]) / 10 for actual in shown)


def test_cells_that_only_define_show_nothing(outputs: dict[str, str]) -> None:
    assert outputs["loop"] == ""

"""The notebook of the examples runs from top to bottom in a new kernel."""

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
    """Run the notebook; return what its code cells showed, by the ids of the cells."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path_factory.mktemp("notebook"))}}
    NotebookClient(notebook, timeout=DEADLINE, kernel_name="python3", resources=resources).execute()
    outputs = {}
    for cell in code_cells(notebook):
        outputs[cell.id] = "".join(text_of(output) for output in cell.outputs)
    return outputs


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(output: nbformat.NotebookNode) -> str:
    if "text" in output:
        return output["text"]
    return output["data"]["text/plain"]


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)

    nbformat.validate(notebook)
    for cell in code_cells(notebook):
        assert not cell.outputs
        assert cell.execution_count is None


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

    assert len(lines) == 2
    for rank, line in enumerate(lines):
        match = re.fullmatch(rf"process {rank} of 2: loss ([\d.]+) -> ([\d.]+)", line)
        assert match is not None, line
        first_loss, last_loss = map(float, match.groups())
        assert last_loss < first_loss / 10


def test_cells_that_only_define_show_nothing(outputs: dict[str, str]) -> None:
    assert outputs["loop"] == ""

"""The notebook of the examples runs from top to bottom in a new kernel.

In `make test`, ``faults/test_notebook_cells.py`` launches from the cells of a kernel.
"""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "examples" / "notebook" / "first_contact.ipynb"
# Seconds for a cell: the first launch imports torch in another process.
DEADLINE = 150


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
    """Return a text that was printed, the lines of an error, or the types of a picture."""
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return "\n".join(output.traceback)
    return " ".join(output.data)


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)

    nbformat.validate(notebook)
    for cell in code_cells(notebook):
        assert not cell.outputs
        assert cell.execution_count is None


LOSSES = re.compile(r"loss (?P<first>[\d.]+) -> (?P<last>[\d.]+)")
DIFFERENCE = re.compile(r"largest difference .*?(?P<value>\d+e-\d+)")


@pytest.mark.slow
def test_two_processes_train_with_the_losses_of_one(outputs: dict[str, str]) -> None:
    one = LOSSES.search(outputs["one"])
    two = LOSSES.search(outputs["two"])
    assert one is not None
    assert two is not None
    assert two.groups() == one.groups()
    assert float(one["last"]) < float(one["first"]) / 3
    difference = DIFFERENCE.search(outputs["two"])
    assert difference is not None
    assert float(difference["value"]) < 1e-5
    assert "image/png" in outputs["plot"]


@pytest.mark.slow
def test_an_error_and_the_stop_button_show_the_lines_of_the_cells(outputs: dict[str, str]) -> None:
    error = outputs["error"]
    assert re.search(r"Cell In\[\d+\], line \d+, in train_wrongly\n +return model\(", error)
    assert error.endswith("mat1 and mat2 shapes cannot be multiplied (100x3 and 2x64)")
    assert "KeyboardInterrupt" in outputs["interrupt"]
    assert "_fabric.py" not in outputs["interrupt"]


@pytest.mark.slow
def test_the_weights_of_the_shards_come_back_into_the_kernel(outputs: dict[str, str]) -> None:
    before, after = re.findall(r"(\d+)% of the points are right", outputs["fsdp"])
    assert int(before) < 60
    assert int(after) > 85
    difference = DIFFERENCE.search(outputs["fsdp"])
    assert difference is not None
    assert float(difference["value"]) < 1e-5

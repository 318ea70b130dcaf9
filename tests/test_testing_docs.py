"""The example of docs/testing.md does what the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "testing.md").read_text()


def run(folder: Path) -> str:
    """The output of pytest on the files of the page."""
    for name, text in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE, re.DOTALL):
        if not (folder / name).exists():
            (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=folder).stdout


@pytest.mark.slow
def test_the_planted_bug_is_found_and_shrunk_to_what_the_page_shows(tmp_path: Path) -> None:
    output = run(tmp_path)
    for line in (
        "[0]: float32 (0,), expected float32 (1,)",
        "[1]: float32 (2,), expected float32 (1,)",
        "tensor([])",
    ):
        assert line in output
        assert line in PAGE


@pytest.mark.slow
def test_the_corrected_line_passes(tmp_path: Path) -> None:
    [corrected] = re.findall(r"    return torch\.cat\(\[row\[:length\].*\n", PAGE)
    [text] = re.findall(r"# metrics\.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "metrics.py").write_text(re.sub(r"    return .*\n", corrected, text))
    assert "1 passed" in run(tmp_path)

"""The README's script runs, and the links of all pages lead to files and headings."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fabric

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("benchmarks/*.md"),
    *ROOT.glob("examples/*.md"),
]
README = (ROOT / "README.md").read_text()
DEADLINE = 150


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> Iterator[str]:
    """Yield the anchors of the headings of a page, as GitHub makes them."""
    for title in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:", link):
            continue
        name, _, heading = link.partition("#")
        target = page
        if name:
            target = page.parent / name
        assert target.exists(), link
        # The headings of the reference are made when the site is built, which checks them.
        if heading and "reference" not in target.parts:
            assert heading in anchors(target), link


@pytest.mark.slow
def test_the_readme_has_a_script_that_runs_on_two_processes(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(script.replace("Fabric(", 'Fabric(accelerator="cpu", '))
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{'loss': tensor(")
    assert (tmp_path / "checkpoint.pt").is_file()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_pages_name_the_version(page: str) -> None:
    assert f"Version {fabric.__version__}:" in (ROOT / page).read_text()

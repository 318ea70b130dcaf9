"""What the documentation shows runs, and what it leaves out is found.

[Note: Blocks of a page] The blocks in Python of a page are one script: each sees the names of those before it. It runs
on two processes, in an empty folder, with warnings as errors. A comment ``<!-- setup ... -->`` in a page is code that
runs in its place and is not shown; ``<!-- not run: reason -->`` before a block leaves it out.
"""

import gc
import inspect
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fabric
from fabric import Fabric, errors
from fabric.cli import _build_parser
from tests.ranks import run_in_ranks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(ROOT)): path for path in [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]
}
BLOCK = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$|"
    r"(?P<mark>^ *<!-- not run: [^\n]+ -->\n)?^(?P<indent> *)```python\n(?P<code>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
SHELL = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# What a reference page shows of a name: its entry, then up to the next one its example.
ENTRY = re.compile(r"^::: (fabric\.[\w.]+)$(.*?)(?=^:::|^## |\Z)", re.DOTALL | re.MULTILINE)


def script(page: Path) -> str:
    """The blocks of a page as one script, each on the lines that it has in the page."""
    text = page.read_text()
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        name = "setup" if block["setup"] is not None else "code"
        if not block["mark"]:
            first = text.count("\n", 0, block.start(name))
            width = len(block["indent"] or "")
            for number, line in enumerate(block[name].splitlines(), first):
                lines[number] = line[width:]
    return "\n".join(lines)


def run_page(job: Fabric, name: str, code: str, folder: str) -> None:
    """Run a page in this rank, as if its launcher had started it for that."""
    job.teardown()
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(compile(code, name, "exec"), names)
    finally:
        for each in gc.get_objects():  # names may have been given to others since
            if isinstance(each, Fabric):
                each.teardown()


def test_the_blocks_of_a_page_are_found_and_compile() -> None:
    for name, page in PAGES.items():
        text = page.read_text()
        blocks = [bool(block["setup"]) for block in BLOCK.finditer(text)]
        assert blocks.count(True) == text.count("<!-- setup"), (
            f"{name}: each comment ends with a line of its own"
        )
        assert blocks.count(False) == text.count("```python\n"), name
        compile(script(page), name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if script(page).strip()])
def test_the_blocks_of_a_page_run(name: str, tmp_path: Path) -> None:
    run_in_ranks(run_page, str(PAGES[name]), script(PAGES[name]), str(tmp_path))


def commands() -> list[str]:
    """The commands ``fabric ...`` of all pages: in blocks for the shell, and after a prompt."""
    texts = [page.read_text() for page in PAGES.values()]
    lines = [line for text in texts for block in SHELL.findall(text) for line in block.splitlines()]
    lines += [line for text in texts for line in re.findall(r"^\$ (.+)$", text, re.MULTILINE)]
    return sorted(
        {
            found[1]
            for line in lines
            if (found := re.match(r"(?:srun )?(fabric \w.*?)(?: +#.*)?$", line))
        }
    )


@pytest.mark.parametrize("command", commands())
def test_the_parser_takes_a_command_of_fabric(command: str) -> None:
    _build_parser().parse_args(shlex.split(command)[1:])


def test_the_shell_takes_every_block_for_it() -> None:
    blocks = "\n".join(
        f"(\n{block}\n)" for page in PAGES.values() for block in SHELL.findall(page.read_text())
    )
    done = subprocess.run(["bash", "-n"], input=blocks, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_public_name_has_an_entry_with_an_example() -> None:
    pages = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
    entries = dict(ENTRY.findall(pages))
    methods = [f"fabric.Fabric.{name}" for name in dir(Fabric) if not name.startswith("_")]
    names = [f"fabric.{name}" for name in fabric.__all__ if not name.startswith("_")]
    for name in [*names, *methods]:
        assert name in entries, f"{name} has no entry"
        examples = "".join(re.findall(r"```python\n(.*?)```", entries[name], re.DOTALL))
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", examples), (
            f"the entry of {name} has no example of it"
        )


def test_the_page_of_errors_has_every_class() -> None:
    page = (DOCS / "errors.md").read_text()
    classes = [
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    ]
    assert re.findall(r"^::: fabric\.errors\.(\w+)$", page, re.MULTILINE) == [
        name for name in classes if issubclass(getattr(errors, name), errors.FabricError)
    ]


def bypass(job: Fabric) -> str:
    class GPT(torch.nn.Linear):
        def loss(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.forward(inputs).sum()

    model: Any = job.setup(GPT(4, 1))
    with pytest.raises(errors.UsageError) as caught:
        job.backward(model.loss(torch.ones(2, 4)))
    return f"UsageError: {caught.value}"


def test_the_page_of_features_shows_the_error_of_a_bypassing_call() -> None:
    assert f"```\n{run_in_ranks(bypass)[1]}\n```" in (DOCS / "features.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_site_builds_without_a_warning_and_asks_nobody_else(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    fetched = re.compile(
        r"""<(?:script|img|iframe|link)[^>]*?\s(?:src|href)="?(?:https?:)?//|url\(["']?(?:https?:)?//"""
    )
    pages = [path for path in (tmp_path / "site").rglob("*") if path.suffix in (".html", ".css")]
    assert len(pages) > len(PAGES)
    assert not [str(path) for path in pages if fetched.search(path.read_text())]
    assert not [str(path) for path in pages if re.search(r":\w+:<code>", path.read_text())], (
        "a role of a docstring"
    )

"""The code and commands of the documentation run, and every public name is documented.

The Python blocks of a page are one script: a block sees the names of the blocks before it. The
script runs on two processes, in an empty folder, with warnings as errors. A comment ``<!-- setup
... -->`` in a page holds code that runs but is not shown. The comment ``<!-- not run: reason -->``
before a block leaves the block out.
"""

import gc
import inspect
import os
import re
import shlex
import subprocess
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
PATHS = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]
PAGES = {str(path.relative_to(ROOT)): path for path in PATHS}
BLOCK = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$|"
    r"(?P<mark>^ *<!-- not run: [^\n]+ -->\n)?^(?P<indent> *)```python\n(?P<code>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
SHELL = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# The entry of a name on a reference page, and the text up to the next entry, which has an example.
ENTRY = re.compile(r"^::: (fabric\.[\w.]+)$(.*?)(?=^:::|^## |\Z)", re.DOTALL | re.MULTILINE)


def script(page: Path) -> str:
    """Return the blocks of a page as one script, on the same lines as in the page."""
    text = page.read_text()
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        if block["mark"]:
            continue
        name = "code"
        if block["setup"] is not None:
            name = "setup"
        start = text.count("\n", 0, block.start(name))
        width = len(block["indent"] or "")
        for number, line in enumerate(block[name].splitlines(), start):
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
        # The names of the page may have been assigned to other objects since.
        for value in gc.get_objects():
            # isinstance() would ask a weak reference, which may be dead, for its object's class.
            if issubclass(type(value), Fabric):
                value.teardown()


def test_the_blocks_of_a_page_are_found_and_compile() -> None:
    for name, page in PAGES.items():
        text = page.read_text()
        are_setup = [bool(block["setup"]) for block in BLOCK.finditer(text)]
        assert are_setup.count(True) == text.count("<!-- setup"), (
            f"{name}: a comment ends with a line of its own"
        )
        assert are_setup.count(False) == text.count("```python\n"), name
        compile(script(page), name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if script(page).strip()])
def test_the_blocks_of_a_page_run(name: str, tmp_path: Path) -> None:
    run_in_ranks(run_page, str(PAGES[name]), script(PAGES[name]), str(tmp_path))


def commands() -> list[str]:
    """Return the commands ``fabric ...`` of all pages: in shell blocks, and after a prompt."""
    lines = []
    for page in PAGES.values():
        text = page.read_text()
        for block in SHELL.findall(text):
            lines += block.splitlines()
        lines += re.findall(r"^\$ (.+)$", text, re.MULTILINE)
    commands = set()
    for line in lines:
        match = re.match(r"(?:srun )?(?P<command>fabric \w.*?)(?: +#.*)?$", line)
        if match:
            commands.add(match["command"])
    return sorted(commands)


@pytest.mark.parametrize("command", commands())
def test_the_parser_takes_a_command_of_fabric(command: str) -> None:
    _build_parser().parse_args(shlex.split(command)[1:])


def test_the_shell_parses_every_shell_block() -> None:
    subshells = []
    for page in PAGES.values():
        for block in SHELL.findall(page.read_text()):
            subshells.append(f"(\n{block}\n)")
    done = subprocess.run(
        ["bash", "-n"], input="\n".join(subshells), capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.returncode == 0


def test_every_public_name_has_an_entry_with_an_example() -> None:
    entries: dict[str, str] = {}
    for page in sorted((DOCS / "reference").glob("*.md")):
        entries.update(ENTRY.findall(page.read_text()))
    public_names = []
    for name in fabric.__all__:
        if not name.startswith("_"):
            public_names.append(f"fabric.{name}")
    for name in dir(Fabric):
        if not name.startswith("_"):
            public_names.append(f"fabric.Fabric.{name}")
    for public_name in public_names:
        assert public_name in entries, f"{public_name} has no entry"
        examples = "".join(re.findall(r"```python\n(.*?)```", entries[public_name], re.DOTALL))
        _, _, name = public_name.rpartition(".")
        assert re.search(rf"\b{name}\b", examples), f"the entry of {public_name} has no example"


def test_the_page_of_errors_has_every_class() -> None:
    classes = []
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, errors.FabricError):
            classes.append(name)
    page = (DOCS / "errors.md").read_text()
    assert re.findall(r"^::: fabric\.errors\.(\w+)$", page, re.MULTILINE) == classes


def bypass(job: Fabric) -> str:
    class GPT(torch.nn.Linear):
        def loss(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.forward(inputs).sum()

    model: Any = job.setup(GPT(4, 1))
    with pytest.raises(errors.UsageError) as caught:
        job.backward(model.loss(torch.ones(2, 4)))
    return f"UsageError: {caught.value}"


def test_the_page_of_checks_shows_the_error_of_a_bypassing_call() -> None:
    page = (DOCS / "how-to" / "training-checks.md").read_text()
    assert f"```\n{run_in_ranks(bypass)[1]}\n```" in page

"""The page of the architecture, and notes in the code, name what exists."""

import io
import re
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

import fabric
from fabric import Fabric
from tests.ranks import run_in_ranks

PACKAGE = Path(fabric.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text()
# A row of a table with a file and a class, function or method in it.
ROW = re.compile(r"\| `(?P<file>[\w/]+\.py)` \| `(?P<name>[\w.]+)`")
# The first line of a note, and a mention of it, with the name of its file if that is another one.
NOTE = re.compile(r"^\[Note: (?P<name>[^\]]+)\]$", re.MULTILINE)
MENTION = re.compile(r"\[Note: (?P<name>[^\]]+)\](?: in `?(?:\w+/)*(?P<file>\w+\.py))?")


def rows_of(title: str) -> list[tuple[str, str]]:
    """Return the file and the name in each row of a section."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [(row["file"], row["name"]) for row in ROW.finditer(section)]


def test_the_names_of_the_page_exist() -> None:
    rows = ROW.findall(PAGE)
    assert len(rows) > 20
    for file, name in rows:
        text = (PACKAGE / file).read_text()
        for part in name.split("."):
            assert re.search(rf"^ *(?:class|def) {part}\b", text, re.MULTILINE), (file, name)


def test_the_files_of_the_page_exist() -> None:
    picture = PAGE.partition("```\n")[2].partition("```")[0]
    names = re.findall(r"(?<!\w)[\w]+(?:\.py|/)", picture)
    assert len(names) > 20
    for name in names:
        assert (PACKAGE / name).exists(), name


class CallsOfFabric:
    """The functions of fabric that a thread enters within a block."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __enter__(self) -> "CallsOfFabric":
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            file = path.relative_to(PACKAGE).as_posix()
            self.calls.append((file, frame.f_code.co_qualname))


def calls_of_a_step_and_a_save(job: Fabric, path: str) -> list[list[tuple[str, str]]]:
    """Return the calls of a step and those of a save, after the checks of the first steps."""
    torch.manual_seed(job.global_rank)
    model = nn.Linear(4, 1)
    model, optimizer = job.setup(model, SGD(model.parameters(), lr=0.1))

    def step() -> None:
        job.backward(model(torch.randn(2, 4)).square().mean())
        optimizer.step()

    def save() -> None:
        job.save(path, {"model": model, "optimizer": optimizer})

    actions: list[Callable[[], None]] = [step, save]
    for _ in range(20):
        step()
        optimizer.zero_grad()
    calls = []
    for action in actions:
        with CallsOfFabric() as record:
            action()
        calls.append(record.calls)
    return calls


def assert_in_order(rows: list[tuple[str, str]], calls: list[tuple[str, str]]) -> None:
    remaining = iter(calls)
    for row in rows:
        assert row in remaining, f"{row} is not called after the rows before it"


def test_a_step_and_a_save_make_the_calls_of_the_page(tmp_path: Path) -> None:
    step, save = run_in_ranks(calls_of_a_step_and_a_save, str(tmp_path / "checkpoint.pt"))[0]
    assert_in_order(rows_of("The life of a step"), step)
    assert_in_order(rows_of("The life of a save"), save)


def calls_of_collectives(job: Fabric) -> list[tuple[str, str]]:
    """Return the calls of some collectives."""
    with CallsOfFabric() as record:
        job.all_reduce(1.0)
        job.all_gather({"losses": torch.ones(3)})
        job.broadcast("text")
        job.barrier()
    return record.calls


def test_without_checked_mode_no_collective_enters_the_diagnostics() -> None:
    for calls in run_in_ranks(calls_of_collectives, check_collectives=False):
        assert ("communicators/recorded.py", "RecordedCommunicator.run") in calls
        assert [call for call in calls if call[0].startswith("diagnostics/")] == []


def comments_of(path: Path) -> str:
    """Return the comments of a file, one line each, without the ``# `` before them."""
    comments = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            comments.append(token.string.removeprefix("#").strip())
    return "\n".join(comments)


def test_a_mention_of_a_note_names_the_file_that_has_it() -> None:
    comments = {path: comments_of(path) for path in PACKAGE.rglob("*.py")}
    file_of_note: dict[str, str] = {}
    for path, text in comments.items():
        for note in NOTE.finditer(text):
            assert note["name"] not in file_of_note, f"two notes have the name {note['name']}"
            file_of_note[note["name"]] = path.name
    assert len(file_of_note) > 50
    for path, text in comments.items():
        for mention in MENTION.finditer(NOTE.sub("", text).replace("\n", " ")):
            file = mention["file"] or path.name
            assert file_of_note.get(mention["name"]) == file, f"{path.name}: {mention[0]}"

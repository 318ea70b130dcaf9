"""The page of the architecture names files and functions that exist, in the order of the calls."""

import re
import sys
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

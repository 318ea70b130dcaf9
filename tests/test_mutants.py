"""`make mutants` changes one place at a time, undoes the change, and ends what a mutant started."""

import json
import subprocess
import textwrap
from itertools import islice

import pytest

import tests.mutants.__main__ as command_line
from tests.mutants.__main__ import (
    JUDGED,
    ROOT,
    Results,
    examine,
    report,
    seconds_without_mutation,
)
from tests.mutants.mutations import find_mutations, sample
from tests.mutants.run import copy_repository, run_mutant
from tests.mutants.score import HARMLESS, VERDICTS, Row, score_of, summary
from tests.mutants.subjects import SUBJECTS, WIDER_TESTS

# Of these packages every file has a row in the table of subjects, with these exceptions: texts,
# exports, and formats whose files are small.
COVERED_PACKAGES = ("data", "collectives", "communicators", "optim", "strategies")
EXCEPTIONS = {"fabric/data/spec.py"}
SUBJECT = """
def larger(first, second):
    if first < second:
        return second
    return first


def count(limit):
    number = 0
    while True:
        number += 1
        if number == limit:
            break
    return number
"""
TESTS = """
import subprocess, sys
from fabric.subject import count, larger

def test_the_larger_number_is_returned():
    assert larger(2, 1) == 2
    assert larger(1, 2) == 2

def test_counting_ends():
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
                             start_new_session=True)
    assert count(3) == 3
    other.communicate()
"""

# The first test fails by chance, at its first run with the second mutation.
WIDER = """
from pathlib import Path
from fabric.subject import larger

def test_that_fails_once():
    first_run = Path("first_run")
    if "<=" in Path("fabric/subject.py").read_text() and not first_run.exists():
        first_run.touch()
        raise TimeoutError

def test_the_first_of_equals_wins():
    assert repr(larger(1, 1.0)) == "1"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder of a run whose copy has one file of code, its tests and wider tests."""
    (tmp_path / "copy" / "fabric").mkdir(parents=True)
    # Without this file, Python would prefer the installed package.
    (tmp_path / "copy" / "fabric" / "__init__.py").touch()
    (tmp_path / "copy" / "fabric" / "subject.py").write_text(SUBJECT)
    (tmp_path / "copy" / "test_subject.py").write_text(TESTS)
    (tmp_path / "copy" / "test_wider.py").write_text(WIDER)
    monkeypatch.setattr(command_line, "SUBJECTS", {"fabric/subject.py": ["test_subject.py"]})
    monkeypatch.setattr(command_line, "WIDER_TESTS", ["test_wider.py"])
    return tmp_path


def mutation_of_subject(function, after):
    for mutation in find_mutations("fabric/subject.py", SUBJECT):
        if (mutation.function, mutation.after) == (function, after):
            return mutation
    raise AssertionError(f"no mutation of {function} makes {after!r}")


@pytest.mark.parametrize(
    ("line", "mutants"),
    [
        ("x = a < b", ["x = a <= b"]),
        ("x = a is None", ["x = a is not None"]),
        ("x = a and b", ["x = (a or b)", "x = (b)", "x = (a)"]),
        ("x = not a", ["x = (a)"]),
        ("x = a + b", ["x = (a - b)"]),
        ("x = any(rows)", ["x = all(rows)"]),
        ("x = sorted(names)", ["x = list(names)"]),
        ("x = f(a, key=b)", ["x = f(a)"]),
        ("x = ReduceOp.SUM", ["x = ReduceOp.MAX"]),
        ("x = True", ["x = False"]),
        ("x = 2", ["x = 3"]),
        ("x = b if a else c", ["x = b if (not (a)) else c"]),
        ("x = [a for a in b if a]", ["x = [a for a in b if True]"]),
        ("total += a", ["total = a", "pass"]),
        ("self.a = b", ["pass"]),
        ("del a", ["pass"]),
        ("f(a)", ["pass"]),
        ("if a: f = b", ["if not (a): f = b", "if False: f = b", "if True: f = b"]),
        ("with a: x = b", ["if True: x = b"]),
        ('warn("text")', []),
        ("raise ConfigurationError(request=a, problem=b)", []),
        ('problem = f"{1 + 1}"', []),
        ("assert a == 1", []),
    ],
)
def test_a_line_has_these_mutations(line, mutants):
    source = f"def function():\n    {line}\n"
    mutations = find_mutations("file.py", source)
    assert [mutation.after for mutation in mutations] == mutants
    for mutation in mutations:
        assert mutation.apply(source) == f"def function():\n    {mutation.after}\n"
        assert mutation.name == f"file.py function: {line} -> {mutation.after}"


def test_statements_of_several_lines_are_replaced_whole():
    source = textwrap.dedent("""
        class Room:
            def leave(self):
                try:
                    self.close(
                        "ä", now=True)
                finally:
                    self.lights = 0
                    self.open = False
    """)
    mutants = {}
    for mutation in find_mutations("file.py", source):
        assert mutation.function == "Room.leave"
        mutants[mutation.kind] = mutation.apply(source)
    assert "self" not in mutants["remove finally"].partition("finally")[2]
    assert "            self.close('ä')\n" in mutants["remove argument"]


def test_a_sample_depends_on_the_seed_and_its_files_take_turns():
    sources = {}
    for file in ("fabric/data/sharding.py", "fabric/optim/ema.py"):
        sources[file] = (ROOT / file).read_text()
    mutations = list(islice(sample(sources, 7), 20))
    assert list(islice(sample(sources, 7), 6)) == mutations[:6]
    assert list(islice(sample(sources, 8), 20)) != mutations
    assert [mutation.file for mutation in mutations] == list(sources) * 10
    assert len({(mutation.file, mutation.line) for mutation in mutations}) == 20
    for mutation in mutations:
        compile(mutation.apply(sources[mutation.file]), mutation.file, "exec")


# Six runs of pytest.
@pytest.mark.slow
@pytest.mark.soak
def test_a_mutant_runs_against_the_tests_of_its_subject_then_the_wider_tests(folder):
    results = Results(folder / "results.json")
    rows = []
    for after in ("if not (first < second):", "if first <= second:"):
        mutation = mutation_of_subject("larger", after)
        rows.append(examine(folder, mutation, results))
        assert (folder / "copy" / "fabric" / "subject.py").read_text() == SUBJECT
    in_subject, in_wider = rows
    assert in_subject == {
        "status": "failed",
        "test": "test_subject.py::test_the_larger_number_is_returned",
    }
    assert in_wider == {"status": "failed", "test": "test_wider.py::test_the_first_of_equals_wins"}
    assert (folder / "copy" / "first_run").exists()
    assert set(Results(folder / "results.json").seconds) == {"test_subject.py", "test_wider.py"}


def test_a_mutant_that_hangs_is_ended_with_the_processes_that_it_started(folder):
    # The fixture of all tests checks that no process is left.
    mutation = mutation_of_subject("count", "if False:")
    outcome = run_mutant(folder / "copy", mutation, ["test_subject.py"], 4, folder / "log.txt")
    assert outcome.status == "timeout"


def test_tests_that_fail_without_a_mutation_are_an_error(folder):
    (folder / "copy" / "test_subject.py").write_text("def test_wrong():\n    assert False\n")
    with pytest.raises(SystemExit, match=r"test_subject\.py fails: test_subject\.py::test_wrong"):
        seconds_without_mutation(folder, ["test_subject.py"], Results(folder / "results.json"))


def test_the_score_leaves_out_the_survivors_that_do_no_harm(folder, monkeypatch, capsys):
    noticed = mutation_of_subject("larger", "if first <= second:")
    survivor = mutation_of_subject("larger", "if False:")
    results = Results(folder / "results.json")
    results.rows = {
        noticed.name: {"status": "failed", "test": "test_subject.py"},
        survivor.name: {"status": "survived", "test": ""},
    }
    results.write()
    again = Results(folder / "results.json")
    monkeypatch.setattr(command_line, "read_verdicts", dict)
    assert report([noticed, survivor], again) == 1
    output = capsys.readouterr().out
    assert output.startswith("1 of 2 mutations that matter were noticed")
    assert survivor.name in output
    monkeypatch.setattr(command_line, "read_verdicts", lambda: {survivor.name: "equivalent"})
    assert report([noticed, survivor], again) == 0
    assert capsys.readouterr().out.startswith("1 of 1 mutations that matter were noticed")


def test_the_page_has_the_outcomes_and_the_score():
    rows = [Row(f"mutation {number}", "failed", "test") for number in range(19)]
    rows.append(Row("slower", "survived", "", "performance"))
    rows.append(Row("missed", "survived", "", "gap"))
    rows.append(Row("unknown", "unclear", "test"))
    score = score_of(rows)
    assert score.counts == {"noticed": 19, "performance": 1, "gap": 1, "not judged": 1}
    assert (score.noticed, score.relevant) == (19, 21)
    results = {"date": "2026-01-01", "machine": "two cores", "command": "make mutants"}
    text = summary({**results, "rows": [vars(row) for row in rows]})
    assert "| 22 | 19 | 0 | 1 | 0 | 1 | 1 | 90.5 % |" in text
    assert text.endswith("Made by `make mutants` on 2026-01-01; two cores.")
    assert set(HARMLESS) == VERDICTS.keys() - {"gap"}


def test_a_copy_has_the_files_that_git_does_not_ignore(tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    subprocess.run(["git", "init", "-q", repository], check=True)
    (repository / ".gitignore").write_text("build/\n")
    (repository / "build").mkdir()
    for name in ("build/old.py", "new.py", "stale.py"):
        (repository / name).write_text("")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "left.py").write_text("")
    copy_repository(repository, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        ".gitignore",
        "new.py",
        "stale.py",
    ]


def test_the_table_of_subjects_names_files_that_exist():
    for file, tests in SUBJECTS.items():
        for path in (file, *tests, *WIDER_TESTS):
            assert (ROOT / path).is_file(), f"the table of subjects names {path}"
    for package in COVERED_PACKAGES:
        for path in (ROOT / "fabric" / package).rglob("*.py"):
            file = path.relative_to(ROOT).as_posix()
            if path.name != "__init__.py" and file not in EXCEPTIONS:
                assert file in SUBJECTS, f"{file} has no row in tests/mutants/subjects.py"


def test_every_verdict_has_a_reason():
    for entry in json.loads(JUDGED.read_text()):
        assert entry["verdict"] in VERDICTS
        assert entry["reason"]
        file, _ = entry["mutation"].split(" ", 1)
        assert file in SUBJECTS


def test_every_verdict_is_on_a_mutation_of_the_code_as_it_is():
    for entry in json.loads(JUDGED.read_text()):
        file, _ = entry["mutation"].split(" ", 1)
        mutations = find_mutations(file, (ROOT / file).read_text())
        names = {mutation.name for mutation in mutations}
        assert entry["mutation"] in names, "the code has changed: judge the mutation again"

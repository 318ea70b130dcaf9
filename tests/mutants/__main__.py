"""`make mutants`: change one line of fabric at a time, and count how often the tests notice.

A mutation that no test of its subject notices runs against the wider tests as well. What survives
both is judged by a person: `tests/mutants/judged.json` holds the verdicts.

The runs use a copy of the repository. The results are written after each mutation, and the next
call with the same folder goes on from there. A sample of all files also writes the score to
`benchmarks/results/mutants.json` and `docs/proof.md`. The exit code is 1 if a survivor has no
verdict.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from tests.mutants import score
from tests.mutants.mutations import Mutation, sample
from tests.mutants.run import (
    EXTRA_SECONDS,
    SLOWDOWN,
    copy_repository,
    run_mutant,
    run_tests,
)
from tests.mutants.score import NOTICED, Row, score_of
from tests.mutants.subjects import SUBJECTS, WIDER_TESTS

ROOT = Path(__file__).resolve().parents[2]
JUDGED = Path(__file__).with_name("judged.json")


class Results:
    """The results of a folder: the durations of the unchanged tests, and a row per mutation.

    Args:
        path: the file, which may exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: dict[str, float] = {}
        self.rows: dict[str, dict[str, str]] = {}
        if path.exists():
            content = json.loads(path.read_text())
            self.seconds = content["seconds"]
            self.rows = content["rows"]

    def write(self) -> None:
        """Write the file, which is complete at any moment."""
        content = {"seconds": self.seconds, "rows": self.rows}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(content, indent=1))
        os.replace(new, self.path)


def main(arguments: Sequence[str]) -> int:
    """Run the mutations that the arguments ask for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="file", help="such as fabric/data/loader.py")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--count", type=int, default=60, help="how many mutations")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--again", action="store_true", help="run survivors of earlier calls again")
    options = parser.parse_args(arguments)
    unknown = ", ".join(sorted(set(options.files) - set(SUBJECTS)))
    if unknown:
        parser.error(f"subjects.py names no tests of {unknown}")
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = options.folder.resolve()
    copy_repository(ROOT, folder / "copy")
    sources = {}
    for file in options.files or SUBJECTS:
        sources[file] = (folder / "copy" / file).read_text()
    results = Results(folder / f"seed-{options.seed}.json")
    mutations = list(islice(sample(sources, options.seed), options.count))
    for number, mutation in enumerate(mutations, 1):
        earlier = results.rows.get(mutation.name)
        is_noticed = earlier is not None and earlier["status"] in NOTICED
        if earlier and (is_noticed or not options.again):
            continue
        row = examine(folder, mutation, results)
        results.rows[mutation.name] = row
        results.write()
        print(f"{number}/{len(mutations)} {row['status']} {mutation.name}", flush=True)
    if not options.files:
        command = f"python -m tests.mutants --seed {options.seed} --count {options.count}"
        score.write(judged_rows(mutations, results), command)
    return report(mutations, results)


def examine(folder: Path, mutation: Mutation, results: Results) -> dict[str, str]:
    """Run the tests of a mutation's subject, then the wider tests; return the row of results."""
    log = folder / "last-run.txt"
    subject = SUBJECTS[mutation.file]
    wider = [test for test in WIDER_TESTS if test not in subject]
    for tests in (subject, wider):
        limit = EXTRA_SECONDS + SLOWDOWN * seconds_without_mutation(folder, tests, results)
        outcome = run_mutant(folder / "copy", mutation, tests, limit, log)
        if outcome.status != "passed":
            return {"status": outcome.status, "test": outcome.failed_test}
    return {"status": "survived", "test": ""}


def seconds_without_mutation(folder: Path, tests: Sequence[str], results: Results) -> float:
    """Return how long tests of the unchanged copy take, which must pass."""
    total = 0.0
    for test in tests:
        if test not in results.seconds:
            outcome = run_tests(folder / "copy", [test], None, folder / "last-run.txt")
            if outcome.status != "passed":
                raise SystemExit(f"without any mutation {test} fails: {outcome.failed_test}")
            results.seconds[test] = outcome.seconds
            results.write()
        total += results.seconds[test]
    return total


def read_verdicts() -> dict[str, str]:
    """Return the verdicts on survivors, by the names of the mutations."""
    return {entry["mutation"]: entry["verdict"] for entry in json.loads(JUDGED.read_text())}


def judged_rows(mutations: Sequence[Mutation], results: Results) -> list[Row]:
    """Return the outcome of each mutation, with the verdict on a survivor."""
    verdicts = read_verdicts()
    rows = []
    for mutation in mutations:
        outcome = results.rows[mutation.name]
        verdict = ""
        if outcome["status"] not in NOTICED:
            verdict = verdicts.get(mutation.name, "")
        rows.append(Row(mutation.name, outcome["status"], outcome["test"], verdict))
    return rows


def report(mutations: Sequence[Mutation], results: Results) -> int:
    """Print the score and the survivors without a verdict; return the exit code."""
    rows = judged_rows(mutations, results)
    total = score_of(rows)
    print(
        f"{total.noticed} of {total.relevant} mutations that matter were noticed "
        f"({total.percentage:.1f} %): {dict(total.counts)}"
    )
    has_unjudged = False
    for mutation, row in zip(mutations, rows, strict=True):
        if row.status not in NOTICED and not row.verdict:
            has_unjudged = True
            print(f"\nnot judged: {mutation.file}:{mutation.line} {mutation.kind}\n{mutation.name}")
    return int(has_unjudged)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

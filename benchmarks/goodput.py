"""Goodput under kills: makes the table of ``docs/long-runs.md``.

``python -m benchmarks.goodput [--quick] [--contestants fabric,torchrun] [--kills N] [--steps N]``
trains a small model on two ranks, once without kills, and once with SIGKILL to a rank at moments
that a seed chooses. The last kill hits rank 0 in a save, as soon as the folder of checkpoints has
changed. Each contestant restarts its ranks and resumes from its newest checkpoint. A row of the
table has

- the useful steps per second: the steps of the run over its wall time, without kills and with,
- the seconds from a kill to the first step after it: median and longest. Then the medians of their
  parts: until the new process of rank 0 starts, until its imports are done, until it has loaded the
  checkpoint, and until it has made a step,
- the steps that were repeated, since they were not in a checkpoint,
- the steps that have another loss than in the run without kills. Repeated steps count as well,
- the samples of the steps that count, those of the last checkpoints and what followed: how many of
  the run without kills are lost, and how many are used once more than there.

The jobs are ``goodput_fabric.py`` and so on. Steps take 10 ms at least, and every tenth step is
followed by a save. ``--write`` writes the table to ``results/goodput.md`` and to the page.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "goodput.md"
PAGE = FOLDER.parent / "docs" / "long-runs.md"
MARKERS = ("<!-- goodput: begin -->", "<!-- goodput: end -->")
DEADLINE = 600.0  # seconds for each run
POLL_INTERVAL = 0.001
# Restarts that are allowed in addition to the kills.
SPARE_RESTARTS = 2
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# An error of a rank, after the prefix that torchrun may add to a line.
ERROR = re.compile(r"(?m)^(?:\[[^\]]*\]: ?)?(?P<error>(?:\w+\.)*\w*Error: .+)$")


class Contestant(NamedTuple):
    """How a contestant starts its job.

    Attributes:
        job: the name of the script in this folder.
        launcher: the module that starts the ranks, and its options.
        package: the module that the job needs beside torch.
        title: the name in the table.
    """

    job: str
    launcher: list[str]
    package: str
    title: str


CONTESTANTS = {
    "fabric": Contestant(
        "goodput_fabric.py",
        ["fabric", "run", "--accelerator=cpu", "--devices=2"],
        "fabric",
        "`fabric run`",
    ),
    "torchrun": Contestant("goodput_torch.py", TORCHRUN, "torch", "torchrun, DDP and DCP"),
    "lightning-fabric": Contestant(
        "goodput_lightning.py", TORCHRUN, "lightning_fabric", "torchrun, Lightning Fabric"
    ),
    "accelerate": Contestant(
        "goodput_accelerate.py", TORCHRUN, "accelerate", "torchrun, Accelerate"
    ),
}
HEADER = [
    "",
    "steps/s",
    "with kills",
    "s from kill to step",
    "process, imports, checkpoint, step",
    "repeated",
    "other losses",
    "samples lost, doubled",
]


class Restart(NamedTuple):
    """The seconds between the moments from a kill to the next step of the job.

    Attributes:
        process: from the kill until the new process of rank 0 starts.
        imports: until its imports are done.
        checkpoint: until it has connected and loaded its checkpoint.
        step: until it has made a step.
    """

    process: float
    imports: float
    checkpoint: float
    step: float


@dataclass(frozen=True)
class Outcome:
    """How a run went.

    Attributes:
        seconds: from the start of the command to its end.
        restarts: the restarts after the kills. One that led to no step is left out.
        steps: what the job logged of each step, in the order of time.
        error: the last error in the output of a job that ended before its last step. None if the
            job has made all steps.
    """

    seconds: float
    restarts: list[Restart]
    steps: list[dict[str, Any]]
    error: str | None

    def last_by_number(self) -> dict[int, dict[str, Any]]:
        """Return the last entry of each step: those of which the trained model is made."""
        return {step["step"]: step for step in self.steps}

    def rate(self) -> float:
        """Return the useful steps per second."""
        return len(self.last_by_number()) / self.seconds

    def repeated_steps(self) -> int:
        """Return how many steps were made again after a restart."""
        return len(self.steps) - len(self.last_by_number())

    def other_losses(self, reference: "Outcome") -> int:
        """Return how many steps have another loss than in a reference."""
        expected = reference.last_by_number()
        count = 0
        for step in self.steps:
            if expected[step["step"]]["loss"] != step["loss"]:
                count += 1
        return count

    def samples(self, numbers: Iterable[int]) -> Counter[int]:
        """Return how often each sample is in the last entries of these steps."""
        steps = self.last_by_number()
        counter: Counter[int] = Counter()
        for number in numbers:
            counter.update(steps[number]["samples"])
        return counter


class Job:
    """A run of a contestant.

    Args:
        contestant: how to start it.
        steps: the number of steps.
        kills: the number of kills that it has to survive.
        folder: a new folder for the checkpoints, the log and the output of the command.
    """

    def __init__(self, contestant: Contestant, steps: int, kills: int, folder: Path) -> None:
        self.start = time.monotonic()
        self._folder = folder
        self._log = folder / "log.jsonl"
        self._checkpoints = folder / "checkpoints"
        self._checkpoints.mkdir()
        # What has been read of the log, and where to read on.
        self._events: list[dict[str, Any]] = []
        self._position = 0
        command = [
            sys.executable,
            "-m",
            *contestant.launcher,
            f"--max-restarts={kills + SPARE_RESTARTS}",
            str(FOLDER / contestant.job),
            str(self._checkpoints),
            str(self._log),
            str(steps),
        ]
        # torchrun's first restart fails without the last variable.
        variables = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        self._output = folder / "output"
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                command, cwd=folder, env=os.environ | variables, stdout=output, stderr=output
            )

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the entries of a kind that the log has now, in the order of time."""
        if self._log.exists():
            with self._log.open("rb") as file:
                file.seek(self._position)
                for line in file:
                    # The last line may be incomplete. Its end may be there in the next iteration.
                    if not line.endswith(b"\n"):
                        break
                    self._position += len(line)
                    self._events.append(json.loads(line))
        return [event for event in self._events if event["event"] == kind]

    def wait_for_steps(self, count: int) -> bool:
        """Wait until the log has this number of steps. Return False if the job ends before."""
        while len(self.events("step")) < count:
            if not self._poll():
                return len(self.events("step")) >= count
        return True

    def wait_for_save(self) -> bool:
        """Wait until the folder of checkpoints changes. Return False if the job ends before."""
        before = self._files()
        while self._files() == before:
            if not self._poll():
                return False
        return True

    def _files(self) -> set[tuple[str, int]]:
        return set(_files_below(self._checkpoints))

    def _poll(self) -> bool:
        """Sleep for a moment, and return whether the job still runs."""
        if time.monotonic() - self.start > DEADLINE:
            self._process.kill()
            raise RuntimeError(f"the job is not done in time:\n{self._output.read_text()}")
        time.sleep(POLL_INTERVAL)
        return self._process.poll() is None

    def kill_rank(self, rank: int) -> float:
        """Kill a rank, and return when."""
        processes = [event["pid"] for event in self.events("imported") if event["rank"] == rank]
        now = time.monotonic()
        os.kill(processes[-1], signal.SIGKILL)
        return now

    def finish(self, kill_times: list[float]) -> Outcome:
        """Wait for the end of the command, and return how the run went."""
        code = self._process.wait(DEADLINE)
        seconds = time.monotonic() - self.start
        error = None
        if code != 0:
            error = f"exit code {code}"
            for match in ERROR.finditer(self._output.read_text()):
                # torchrun's own error says only which rank has failed.
                if "ChildFailedError" not in match["error"]:
                    error = match["error"].replace(f"{self._folder}/", "")
        restarts: list[Restart] = []
        for kill_time in kill_times:
            restart = self._restart_after(kill_time)
            if restart is not None:
                restarts.append(restart)
        return Outcome(seconds, restarts, self.events("step"), error)

    def _restart_after(self, kill_time: float) -> Restart | None:
        """Return the restart after a kill, or None if no step followed."""
        imports = [event for event in self.events("imported") if event["rank"] == 0]
        stages = [
            [event["start"] for event in imports],
            [event["time"] for event in imports],
            [event["time"] for event in self.events("restored")],
            [event["time"] for event in self.events("step")],
        ]
        lengths: list[float] = []
        moment = kill_time
        for times in stages:
            later_times = [time for time in times if time > moment]
            if not later_times:
                return None
            lengths.append(min(later_times) - moment)
            moment = min(later_times)
        return Restart(*lengths)


def _files_below(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the paths and the sizes of what is in a folder, which changes meanwhile."""
    for path in folder.rglob("*"):
        try:
            yield str(path), path.stat().st_size
        except FileNotFoundError:
            continue


def run(contestant: Contestant, steps: int, kills: int) -> Outcome:
    """Run a job, and kill ranks so many times, the last time in a save."""
    generator = random.Random(0)
    kill_times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(contestant, steps, kills, Path(folder))
        for kill in range(kills):
            steps_to_kill = generator.randrange(5, steps // (kills + 1))
            rank = generator.randrange(2)
            if not job.wait_for_steps(len(job.events("step")) + steps_to_kill):
                break
            if kill == kills - 1:
                rank = 0
                if not job.wait_for_save():
                    break
            kill_times.append(job.kill_rank(rank))
            # A rank that is killed may have logged a step that this process has not read.
            time.sleep(0.1)
            if not job.wait_for_steps(len(job.events("step")) + 1):
                break
        return job.finish(kill_times)


def row(contestant: Contestant, whole: Outcome, killed: Outcome, steps: int) -> list[str]:
    """Return a row of the table."""
    delays = [sum(restart) for restart in killed.restarts]
    delay = "-"
    if delays:
        delay = f"{statistics.median(delays):.2f}, at most {max(delays):.2f}"
    parts = [f"{statistics.median(part):.2f}" for part in zip(*killed.restarts, strict=True)]
    numbers = killed.last_by_number()
    expected_samples = whole.samples(numbers)
    samples = killed.samples(numbers)
    lost = (expected_samples - samples).total()
    doubled = (samples - expected_samples).total()
    rate = f"{killed.rate():.1f}"
    if killed.error is not None:
        rate = f"{rate}, ended at step {max(numbers)} of {steps}"
    return [
        contestant.title,
        f"{whole.rate():.1f}",
        rate,
        delay,
        ", ".join(parts),
        str(killed.repeated_steps()),
        str(killed.other_losses(whole)),
        f"{lost}, {doubled}",
    ]


def as_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two kills, 60 steps")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--write", action="store_true", help="write the table to its page")
    options = parser.parse_args()
    kills = options.kills
    steps = options.steps
    if options.quick:
        kills = 2
        steps = 60
    alignments = ["---", *["--:"] * (len(HEADER) - 1)]
    table = [as_line(HEADER), f"|{'|'.join(alignments)}|"]
    print("\n".join(table), flush=True)
    notes: list[str] = []
    for name in options.contestants.split(","):
        contestant = CONTESTANTS[name]
        if find_spec(contestant.package) is None:
            print(
                f'{name} is left out: it is not installed: pip install "torch-fabric[benchmarks]"'
            )
            continue
        whole = run(contestant, steps, kills=0)
        if whole.error is not None:
            raise RuntimeError(f"{name} without kills: {whole.error}")
        killed = run(contestant, steps, kills)
        table.append(as_line(row(contestant, whole, killed, steps)))
        print(table[-1], flush=True)
        if killed.error is not None:
            first_sentence, _, _ = killed.error.partition(". ")
            notes.append(f"{contestant.title} ended with `{first_sentence}`.")
    version, _, _ = torch.__version__.partition("+")
    cores = os.cpu_count() or 1
    notes.insert(
        0,
        f"Two ranks, {steps} steps, {kills} kills, torch {version}, {date.today():%-d %B %Y}; "
        f"{cores} cores, each wanted by {os.getloadavg()[0] / cores:.1f} processes in the last "
        "minute, these included.",
    )
    print(f"\n{' '.join(notes)}")
    if options.write:
        write("\n".join(table), "\n".join(notes))


def write(table: str, notes: str) -> None:
    """Write the table and its notes to the file of results, and between the marks of the page."""
    text = f"{table}\n\n{notes}\n"
    RESULTS.write_text(f"# Goodput under kills\n\n`python -m benchmarks.goodput`\n\n{text}")
    before, begin, marked = PAGE.read_text().partition(MARKERS[0])
    _, end, after = marked.partition(MARKERS[1])
    PAGE.write_text(f"{before}{begin}\n{text}{end}{after}")


if __name__ == "__main__":
    main()

"""The command ``fabric``, in real processes."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fabric.cli import main

DEADLINE = 90
BEGIN = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
"""
# The command imports no torch into its ranks, which takes them a second.
JOIN = f"""{BEGIN}
import torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method=os.environ.get("FABRIC_STORE", "env://"), rank=rank,
                        world_size=int(os.environ["WORLD_SIZE"]))
"""


def script(folder: Path, text: str, name: str = "train.py", begin: str = BEGIN) -> str:
    (folder / name).write_text(begin + textwrap.dedent(text))
    return name


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fabric", "run", *arguments]


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """Of the command: its temporary files go where the test can look for what is left of them."""
    (tmp_path / "tmp").mkdir()
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "tmp")}
    # It would write each piece of a line by itself, and the lines of two ranks would mix.
    variables.pop("PYTHONUNBUFFERED", None)
    return variables


@pytest.fixture
def fabric_run(tmp_path, environment) -> Iterator[object]:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments),
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )

    yield run
    assert os.listdir(tmp_path / "tmp") == [], "temporary files were left behind"


def test_options_and_arguments_reach_every_rank(tmp_path, fabric_run):
    (tmp_path / "neighbour.py").write_text("WORD = 'beside'")
    name = script(
        tmp_path,
        """
        import neighbour
        total = torch.ones(1)
        dist.all_reduce(total)
        options = [os.environ[f"FABRIC_{name}"] for name in ("DEVICES", "ACCELERATOR", "STRATEGY", "PRECISION")]
        print(f"rank {rank}", int(total), neighbour.WORD, __name__, *options, *sys.argv[1:])
        dist.destroy_process_group()
        """,
        begin=JOIN,
    )
    options = (
        "--devices",
        "2",
        "--accelerator",
        "cpu",
        "--strategy",
        "ddp",
        "--precision",
        "bf16-mixed",
    )
    run = fabric_run(*options, name, "--lr", "3", "--", "-m")
    assert run.returncode == 0, run.stderr
    expected = "2 beside __main__ 2 cpu ddp bf16-mixed --lr 3 -- -m"
    assert sorted(run.stdout.splitlines()) == [f"rank {rank} {expected}" for rank in (0, 1)]


def test_a_module_runs_as_main_and_ranks_share_the_cores(tmp_path, fabric_run, environment):
    del environment["OMP_NUM_THREADS"]
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    script(
        tmp_path / "package",
        "print(__name__, __package__, sys.argv[1:], os.environ['OMP_NUM_THREADS'])",
        "job.py",
    )
    run = fabric_run("--accelerator", "cpu", "-m", "package.job", "x")
    assert run.returncode == 0, run.stderr
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert run.stdout == f"__main__ package ['x'] {cores}\n"


def test_the_report_of_a_failure_ends_with_the_traceback_of_its_cause(tmp_path, fabric_run):
    name = script(
        tmp_path,
        """
        def train():
            raise ValueError("the cause")
        if rank == 1:
            train()
        dist.barrier()
        """,
        begin=JOIN,
    )
    run = fabric_run("--devices", "2", "--accelerator", "cpu", name)
    assert run.returncode == 1
    lines = run.stderr.strip().splitlines()
    assert lines[-1] == "ValueError: the cause"
    first = lines.index("rank 1 of 2 failed (exit code 1)")
    assert "runpy" not in "".join(lines[first:])
    assert len(lines) - first < 10


@pytest.mark.slow
def test_the_exit_code_of_the_script_is_passed_on(tmp_path, fabric_run):
    name = script(tmp_path, "if rank == 1: sys.exit(3)\ndist.barrier()", begin=JOIN)
    run = fabric_run("--devices", "2", "--accelerator", "cpu", "--main-address", "elsewhere", name)
    assert run.returncode == 3
    assert "rank 1 of 2 exited with exit code 3" in run.stderr
    assert "--main-address has no meaning on one machine" in run.stderr


@pytest.mark.slow
def test_a_restart_begins_with_fresh_ranks_and_tells_of_the_first_failure(tmp_path, fabric_run):
    name = script(
        tmp_path,
        """
        if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("only once")
        dist.barrier()
        print("done")
        dist.destroy_process_group()
        """,
        begin=JOIN,
    )
    run = fabric_run("--devices", "2", "--accelerator", "cpu", "--max-restarts", "1", name)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "done\ndone\n"
    assert "ValueError: only once" in run.stderr


def test_the_output_of_each_rank_is_in_a_file_for_each_start_and_whole_lines_of_it_are_shown(
    tmp_path, fabric_run
):
    name = script(
        tmp_path,
        """
        start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        for number in range(200):
            print("number", number)
        sys.stderr.write("\\rprogress 1\\rprogress 2\\nto be ")
        open(f"written-{start}-{rank}", "x").close()
        while not os.path.exists(f"written-{start}-{1 - rank}"):
            time.sleep(0.001)
        if start == 0 and rank == 0:
            raise ValueError("only once")
        if start == 0:
            os.kill(os.getpid(), 9)
        os.write(1, b"continued")
        """,
    )
    options = (
        "--devices",
        "2",
        "--accelerator",
        "cpu",
        "--max-restarts",
        "1",
        "--log-dir",
        "logs/a",
        "--tee",
    )
    run = fabric_run(*options, name)
    assert run.returncode == 0, run.stderr
    lines = [f"number {number}" for number in range(200)]
    shown = run.stdout.splitlines()
    for rank in (0, 1):
        started = [*lines, "progress 2", "to be ", *lines, "progress 2", "to be continued"]
        assert [line for line in shown if f"[rank{rank}]" in line] == [
            f"[rank{rank}]: {line}" for line in started
        ]
    logs = {
        path.name: path.read_text().splitlines() for path in (tmp_path / "logs" / "a").iterdir()
    }
    assert logs.keys() == {
        "rank-0.log",
        "rank-1.log",
        "rank-0.restart-1.log",
        "rank-1.restart-1.log",
    }
    assert all(log[:200] == lines for log in logs.values())
    assert "ValueError: only once" in logs["rank-0.log"][-1]
    assert "rank 1 was killed by SIGKILL" in logs["rank-1.log"][-1]
    assert logs["rank-1.restart-1.log"][-1] == "to be continued"
    assert "restart 1 of 1" in run.stderr


@pytest.mark.slow
def test_with_files_the_terminal_shows_what_fabric_says_and_a_file_is_continued(
    tmp_path, fabric_run
):
    name = script(tmp_path, "print('here', flush=True)\nraise ValueError('at last')")
    for times in (1, 2):
        run = fabric_run("--devices", "1", "--accelerator", "cpu", "--log-dir", "logs{}", name)
        assert (run.returncode, run.stdout) == (1, "")
        assert run.stderr.startswith("fabric run: the ranks write to logs{}/rank-*.log\n")
        assert run.stderr.count("ValueError: at last") == 1
        assert (tmp_path / "logs{}" / "rank-0.log").read_text().count("here\n\nTraceback") == times


# faults/test_parents.py sends the first two to a job that trains.
SLOW = [pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("number", [*SLOW, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_ends_the_command_and_all_ranks(tmp_path, environment, number):
    name = script(
        tmp_path,
        'print("up", os.getpid(), flush=True)\nsignal.pause() if rank else sys.stdin.read()',
    )
    with subprocess.Popen(
        command("--devices", "2", "--accelerator", "cpu", name),
        cwd=tmp_path, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as job:  # fmt: skip
        assert job.stdout is not None
        ranks = [psutil.Process(int(job.stdout.readline().split()[1])) for _ in range(2)]
        job.send_signal(number)
        code = job.wait(timeout=DEADLINE)
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    assert psutil.wait_procs(ranks, timeout=30)[1] == []
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.slow
def test_two_machines_make_one_job(tmp_path, environment):
    # Two commands on this one stand for them. The port was free a moment ago; a rival would have to
    # be quick.
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    name = script(
        tmp_path,
        """
        total = torch.ones(1)
        dist.all_reduce(total)
        print("FABRIC_STORE" in os.environ, os.environ["FABRIC_NUM_NODES"], os.environ["GROUP_RANK"], int(total))
        dist.destroy_process_group()
        """,
        begin=JOIN,
    )
    options = (
        "--num-nodes",
        "2",
        "--main-address",
        "127.0.0.1",
        "--main-port",
        port,
        "--accelerator",
        "cpu",
    )
    environment["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    machines = [
        subprocess.Popen(
            command(*options, "--node-rank", str(node), name),
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    for node, machine in enumerate(machines):
        out, err = machine.communicate(timeout=DEADLINE)
        assert machine.returncode == 0, err
        assert out == f"False 2 {node} 2\n"


REFUSED = {
    "no command": ([], "COMMAND"),
    "no script": (["run"], "script.py"),
    "unknown option": (["run", "--gpus", "2", "SCRIPT"], "--gpus"),
    "missing script": (["run", "nowhere.py"], "nowhere.py"),
    "folder": (["run", "."], "__main__.py"),
    "missing module": (["run", "-m", "nowhere.train"], "no module 'nowhere'"),
    "devices": (["run", "--accelerator", "cpu", "--devices", "0", "SCRIPT"], "number of processes"),
    "device list on the CPU": (
        ["run", "--accelerator", "cpu", "--devices", "0,2", "SCRIPT"],
        "number of processes",
    ),
    "accelerator": (["run", "--accelerator", "abacus", "SCRIPT"], "abacus"),
    "strategy": (["run", "--strategy", "dpp", "SCRIPT"], "dpp"),
    "precision": (["run", "--precision", "8", "SCRIPT"], "precision"),
    "nodes": (["run", "--num-nodes", "0", "SCRIPT"], "integer from 1"),
    "restarts": (["run", "--max-restarts", "many", "SCRIPT"], "many"),
    "node rank": (
        ["run", "--num-nodes", "2", "--node-rank", "2", "--main-address", "h", "SCRIPT"],
        "has no machine --node-rank 2",
    ),
    "tee": (["run", "--tee", "SCRIPT"], "--tee shows here what --log-dir writes"),
    "folder for output": (["run", "--log-dir", "train.py/logs", "SCRIPT"], "Not a directory"),
    "main address": (["run", "--num-nodes", "2", "SCRIPT"], "--main-address"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_usage_is_explained_before_any_process_starts(tmp_path, capsys, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    arguments, named = REFUSED[case]
    name = script(tmp_path, "raise AssertionError('this must not run')")
    assert main([name if argument == "SCRIPT" else argument for argument in arguments]) == 2
    text = capsys.readouterr().err
    assert named in text
    assert "Valid: " in text


@pytest.mark.parametrize(
    ("option", "shown"), [("--help", "run a script"), ("--version", "fabric ")]
)
def test_help_and_version(capsys, option, shown):
    with pytest.raises(SystemExit) as raised:
        main([option])
    assert raised.value.code == 0
    assert shown in capsys.readouterr().out


def test_called_as_a_function_it_leaves_this_process_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = script(tmp_path, "sys.exit(5 if os.environ['FABRIC_DEVICES'] == '1' else 0)")
    before = dict(os.environ), signal.getsignal(signal.SIGINT)
    assert main(["run", "--accelerator", "cpu", "--devices", "1", name]) == 5
    assert (dict(os.environ), signal.getsignal(signal.SIGINT)) == before

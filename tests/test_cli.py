"""The command ``fabric`` in real processes: no option is ignored, and no process left unused."""

import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn

import fabric as package
from fabric import Fabric
from fabric.cli import main
from fabric.strategies import SingleDeviceStrategy
from tests.ranks import in_another_process, outcome, run_in_ranks

DEADLINE = 150
BEGIN = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
"""
# The command imports no torch into its ranks, which takes them a second.
JOIN = f"""{BEGIN}
import torch
import torch.distributed as dist
dist.init_process_group(
    "gloo",
    init_method=os.environ.get("FABRIC_STORE", "env://"),
    rank=rank,
    world_size=int(os.environ["WORLD_SIZE"]),
)
"""
Process = subprocess.CompletedProcess[str]


def script(folder: Path, text: str, name: str = "train.py", begin: str = BEGIN) -> str:
    """Write a script into a folder, and return its name."""
    (folder / name).write_text(begin + textwrap.dedent(text))
    return name


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fabric", "run", *arguments]


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """Return the variables of the command, whose temporary files go to a folder of the test."""
    (tmp_path / "tmp").mkdir()
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "tmp")}
    # With this variable a rank writes each piece of a line by itself, and lines of two ranks mix.
    variables.pop("PYTHONUNBUFFERED", None)
    return variables


@pytest.fixture
def fabric_run(tmp_path, environment, monkeypatch, capfd) -> Iterator[Callable[..., Process]]:
    """Return a function that runs ``fabric run`` in this process, which has imported torch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", environment["TMPDIR"])
    for name in ("OMP_NUM_THREADS", "TMPDIR"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    def run(*arguments: str) -> Process:
        exit_code = main(["run", *arguments])
        output, errors = capfd.readouterr()
        return Process(arguments, exit_code, output, errors)

    yield run
    for name in os.listdir(tmp_path / "tmp"):
        # torch's compiler makes a folder for its cache when a fork server imports it.
        assert name.startswith("torchinductor"), f"temporary files were left behind: {name}"


def test_options_and_arguments_reach_every_rank(tmp_path, fabric_run):
    (tmp_path / "neighbour.py").write_text("WORD = 'beside'")
    name = script(
        tmp_path,
        """
        import neighbour
        names = ("DEVICES", "ACCELERATOR", "STRATEGY", "PRECISION")
        options = [os.environ[f"FABRIC_{name}"] for name in names]
        print(f"rank {rank}", neighbour.WORD, __name__, *options, *sys.argv[1:])
        """,
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
    expected = "beside __main__ 2 cpu ddp bf16-mixed --lr 3 -- -m"
    lines = sorted(run.stdout.splitlines())
    assert lines == [f"rank 0 {expected}", f"rank 1 {expected}"]


def test_a_module_runs_as_main_and_ranks_share_the_cores(tmp_path, fabric_run, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    script(
        tmp_path / "package",
        "print(__name__, __package__, sys.argv[1:], os.environ['OMP_NUM_THREADS'])",
        "job.py",
    )
    run = fabric_run("--accelerator", "cpu", "-m", "package.job", "x")
    assert run.returncode == 0, run.stderr
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    assert run.stdout == f"__main__ package ['x'] {cores}\n"


def test_a_script_that_does_not_mention_torch_starts_without_it(tmp_path, fabric_run):
    name = script(tmp_path, "print('to' 'rch' in sys.modules)")
    run = fabric_run("--devices", "2", "--accelerator", "cpu", name)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "False\nFalse\n"


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
def test_the_report_of_a_rank_that_ended_early_ends_with_this_cause(tmp_path, fabric_run):
    name = script(tmp_path, "if rank == 0: dist.barrier()", begin=JOIN)
    run = fabric_run("--devices", "2", "--accelerator", "cpu", name)
    assert run.returncode == 1
    last_line = run.stderr.rstrip().splitlines()[-1]
    assert "rank 1 of 2 exited with exit code 0: it ended early" in last_line


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
        # One write, so that the lines of two ranks do not mix.
        print("done\\n", end="")
        dist.destroy_process_group()
        """,
        begin=JOIN,
    )
    run = fabric_run("--devices", "2", "--accelerator", "cpu", "--max-restarts", "1", name)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "done\ndone\n"
    assert "ValueError: only once" in run.stderr


def test_the_output_of_a_rank_is_in_a_file_for_each_start_and_is_shown_in_complete_lines(
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
    numbers = [f"number {number}" for number in range(200)]
    expected = [*numbers, "progress 2", "to be ", *numbers, "progress 2", "to be continued"]
    shown: dict[str, list[str]] = {"[rank0]": [], "[rank1]": []}
    for line in run.stdout.splitlines():
        prefix, _, text = line.partition(": ")
        shown[prefix].append(text)
    assert shown["[rank0]"] == expected
    assert shown["[rank1]"] == expected
    logs = {}
    for path in (tmp_path / "logs" / "a").iterdir():
        logs[path.name] = path.read_text().splitlines()
    assert logs.keys() == {
        "rank-0.log",
        "rank-1.log",
        "rank-0.restart-1.log",
        "rank-1.restart-1.log",
    }
    for log in logs.values():
        assert log[:200] == numbers
    assert "ValueError: only once" in logs["rank-0.log"][-1]
    assert "rank 1 was killed by SIGKILL" in logs["rank-1.log"][-1]
    assert logs["rank-1.restart-1.log"][-1] == "to be continued"
    assert "restart 1 of 1" in run.stderr


def test_restarts_are_counted_in_the_window_that_the_option_gives(tmp_path, fabric_run):
    # The name of the variable makes each start an interpreter without torch.
    name = script(
        tmp_path, 'sys.exit("OMP_" and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 3)'
    )
    options = ("--devices", "1", "--accelerator", "cpu", "--max-restarts")
    run = fabric_run(*options, "1/0.000001s", name)
    assert run.returncode == 0, run.stderr
    assert "restart 3 of 1/0.000001s" in run.stderr
    run = fabric_run(*options, "1/1h", name)
    assert run.returncode == 1
    assert run.stderr.count("fabric run: restart") == 1


def test_output_that_nobody_reads_and_lines_without_an_end_stop_no_job(tmp_path, environment):
    name = script(
        tmp_path,
        """
        print("x" * 100_000, end="", flush=True)
        while not os.path.exists("nobody reads"):
            time.sleep(0.01)
        print("end")
        """,
    )
    options = ("--devices", "1", "--accelerator", "cpu", "--log-dir", "logs", "--tee")
    process = subprocess.Popen(
        command(*options, name),
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("[rank0]: xxx")
    process.stdout.close()
    (tmp_path / "nobody reads").touch()
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(DEADLINE) == 0
    assert "Traceback" not in errors
    assert (tmp_path / "logs" / "rank-0.log").read_text().endswith("xend\n")


@pytest.mark.slow
def test_with_files_the_terminal_shows_what_fabric_says_and_a_file_is_continued(
    tmp_path, fabric_run
):
    name = script(tmp_path, "print('here', flush=True)\nraise ValueError('at last')")
    for times in (1, 2):
        run = fabric_run("--devices", "1", "--accelerator", "cpu", "--log-dir", "logs{}", name)
        assert run.returncode == 1
        assert run.stdout == ""
        assert run.stderr.startswith("fabric run: the ranks write to logs{}/rank-*.log\n")
        assert run.stderr.count("ValueError: at last") == 1
        log = (tmp_path / "logs{}" / "rank-0.log").read_text()
        assert log.count("here\n\nTraceback") == times


def test_the_log_of_a_rank_that_the_command_has_killed_guesses_no_reason(tmp_path, fabric_run):
    name = script(
        tmp_path,
        """
        import os, signal, threading
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGTERM)
        threading.Event().wait(150)
        """,
    )
    run = fabric_run("--devices", "1", "--accelerator", "cpu", "--log-dir", "logs", name)
    assert run.returncode == 128 + signal.SIGTERM
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert log.endswith("rank 0 was killed by SIGKILL (exit code -9)\n")


def test_the_log_of_a_rank_that_a_signal_has_ended_says_so(tmp_path, fabric_run):
    # The rank handles the signal, which runs its `finally` blocks, and exits with 128 + n.
    name = script(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)\nsignal.pause()")
    run = fabric_run("--devices", "1", "--accelerator", "cpu", "--log-dir", "logs", name)
    assert run.returncode == 128 + signal.SIGTERM
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert log.endswith("rank 0 exited with exit code 143\n")


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [
        pytest.param(signal.SIGINT, 128 + signal.SIGINT, id="SIGINT", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 128 + signal.SIGTERM, id="SIGTERM"),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, id="SIGKILL"),
    ],
)
def test_a_signal_ends_the_command_and_all_ranks(tmp_path, environment, number, exit_code):
    name = script(
        tmp_path,
        """
        print("up", os.getpid(), flush=True)
        if rank == 0:
            sys.stdin.read()
        else:
            signal.pause()
        """,
    )
    with subprocess.Popen(
        command("--devices", "2", "--accelerator", "cpu", name),
        cwd=tmp_path,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as job:
        assert job.stdout is not None
        ranks = []
        for _ in range(2):
            _, pid = job.stdout.readline().split()
            ranks.append(psutil.Process(int(pid)))
        job.send_signal(number)
        code = job.wait(timeout=DEADLINE)
    assert code == exit_code
    _, alive = psutil.wait_procs(ranks, timeout=150)
    assert alive == []
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.slow
@pytest.mark.parametrize("describes", ["options", "Kubeflow"])
def test_two_machines_make_one_job(tmp_path, environment, describes):
    # Two commands on this machine pose as two machines. The port is free now, and another process
    # would have to be quick to take it.
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, port = server.getsockname()
    name = script(
        tmp_path,
        """
        total = torch.ones(1)
        dist.all_reduce(total)
        nodes = os.environ["FABRIC_NUM_NODES"]
        print("FABRIC_STORE" in os.environ, nodes, os.environ["GROUP_RANK"], int(total))
        dist.destroy_process_group()
        """,
        begin=JOIN,
    )
    options = ["--accelerator", "cpu", "--main-port", str(port)]
    if describes == "options":
        options += ["--num-nodes", "2", "--main-address", "127.0.0.1"]
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    if sys.platform == "darwin":
        environment["GLOO_SOCKET_IFNAME"] = "lo0"
    machines = []
    for node in range(2):
        options_of_node = []
        if describes == "options":
            options_of_node = ["--node-rank", str(node)]
        variables = dict(environment)
        if describes == "Kubeflow":
            variables["PET_NNODES"] = "2"
            variables["PET_NODE_RANK"] = str(node)
            variables["PET_MASTER_ADDR"] = "127.0.0.1"
            variables["PET_NPROC_PER_NODE"] = "1"
        machine = subprocess.Popen(
            command(*options, *options_of_node, name),
            cwd=tmp_path,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        machines.append(machine)
    for node, machine in enumerate(machines):
        output, errors = machine.communicate(timeout=DEADLINE)
        assert machine.returncode == 0, errors
        assert output == f"False 2 {node} 2\n"


def test_a_changing_number_of_machines_is_left_to_torchrun(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PET_NNODES", "1:4")
    assert main(["run", script(tmp_path, "")]) == 2
    assert "which only torchrun supports" in capsys.readouterr().err


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
    "window of restarts": (["run", "--max-restarts", "3/hour", "SCRIPT"], "or 3/1h"),
    "node rank": (
        ["run", "--num-nodes", "2", "--node-rank", "2", "--main-address", "h", "SCRIPT"],
        "has no machine --node-rank 2",
    ),
    "tee": (["run", "--tee", "SCRIPT"], "--tee shows here what --log-dir writes"),
    "folder for output": (["run", "--log-dir", "SCRIPT/logs", "SCRIPT"], "Not a directory"),
    "main address": (["run", "--num-nodes", "2", "SCRIPT"], "--main-address"),
}


@pytest.mark.parametrize(("arguments", "words"), REFUSED.values(), ids=REFUSED)
def test_wrong_usage_is_explained_before_any_process_starts(
    tmp_path, capsys, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "raise AssertionError('this must not run')", name="SCRIPT")
    assert main(arguments) == 2
    text = capsys.readouterr().err
    assert words in text
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
    name = script(tmp_path, "if os.environ['FABRIC_DEVICES'] == '1': sys.exit(5)")
    environment_before = dict(os.environ)
    handler_before = signal.getsignal(signal.SIGINT)
    assert main(["run", "--accelerator", "cpu", "--devices", "1", name]) == 5
    assert dict(os.environ) == environment_before
    assert signal.getsignal(signal.SIGINT) == handler_before


def freezes_objects(argv: list[str] | None) -> bool:
    """Use the command wrongly. Return whether garbage collections leave out older objects now."""
    sys.argv[1:] = ["nothing"]
    older_object = [0]
    assert main(argv) == 2
    return not any(candidate is older_object for candidate in gc.get_objects())


def test_as_a_program_it_ends_without_a_search_for_garbage() -> None:
    assert in_another_process(freezes_objects, None)
    assert not in_another_process(freezes_objects, ["nothing"])


# -- scripts that use fabric ----------------------------------------------------------------------


@pytest.fixture
def python_m(tmp_path: Path) -> Callable[..., Process]:
    """Return a function that runs a module in a folder where train.py is a script."""

    def run(text: str, *arguments: str, module: str = "fabric") -> Process:
        script(tmp_path, text, begin="")
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )

    return run


LAUNCHES = """
    from fabric import Fabric
    fabric = Fabric(accelerator="cpu")
    fabric.launch()
    print("trained")
"""


def test_options_after_the_script_that_nobody_reads_are_refused_with_the_right_order(
    tmp_path, fabric_run
) -> None:
    options = ("--devices=2", "--strategy", "ddp", "--accelerator", "cpu")
    run = fabric_run(script(tmp_path, LAUNCHES, begin=""), *options)
    assert run.returncode == 1
    assert run.stdout == ""
    assert "Write: fabric run --strategy=ddp --devices=2 script.py" in run.stderr


READS_OPTIONS = """
    import argparse
    from fabric import Fabric
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int)
    parser.add_argument('--precision')
    options = parser.parse_args()
    fabric = Fabric(accelerator="cpu", devices=options.devices)
    total = fabric.all_reduce(1, reduce_op="sum")
    fabric.print(fabric.precision.name, options.precision, total)
"""


def test_a_script_that_reads_its_options_and_never_launches_runs_in_the_processes_that_exist(
    tmp_path, fabric_run
) -> None:
    options = ("--devices", "2", "--precision", "mine")
    run = fabric_run("--devices", "2", script(tmp_path, READS_OPTIONS, begin=""), *options)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "32-true mine 2\n"


RANK_1_USES_NOTHING = """
    from fabric import Fabric
    fabric = Fabric(accelerator="cpu", timeout=2, watchdog=0.5)
    if fabric.global_rank == 0:
        fabric.device
"""


@pytest.mark.slow
def test_a_rank_that_waits_until_all_use_fabric_says_so(tmp_path, fabric_run) -> None:
    run = fabric_run("--devices", "2", script(tmp_path, RANK_1_USES_NOTHING, begin=""))
    assert run.returncode == 1
    report = "rank 0 of 2 waits for all to call fabric.launch() or to use Fabric\n"
    assert run.stderr.startswith(report)


@pytest.mark.slow
def test_a_script_without_launch_runs_under_torchrun(python_m) -> None:
    arguments = ("--standalone", "--nproc-per-node", "2", "train.py", "--devices", "2")
    run = python_m(READS_OPTIONS, *arguments, module="torch.distributed.run")
    assert run.returncode == 0, run.stderr
    assert run.stdout == "32-true None 2\n"


# Hydra gives each process an output folder of its own, unless the arguments name the folder.
UNDER_HYDRA = """
    import os, sys
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from fabric import Fabric

    @hydra.main(version_base=None, config_path=None)
    def main(config):
        folder = HydraConfig.get().runtime.output_dir
        fabric = Fabric(accelerator="cpu", devices=2)
        if "RANK" not in os.environ:
            print(folder, flush=True)
        fabric.launch()
        folders = fabric.gather(folder)
        if folders:
            print(*folders, config, sys.argv[1], sep="\\n")

    main()
"""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="run"),
        pytest.param(["--multirun"], id="sweep"),
    ],
)
@pytest.mark.slow
def test_under_hydra_all_ranks_get_the_folder_of_the_launching_process(
    options: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "it's"
    folder.mkdir()
    name = script(folder, UNDER_HYDRA, begin="")
    run = subprocess.run(
        [sys.executable, name, "+lr=1", *options],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    lines = [line for line in run.stdout.splitlines() if not line.startswith("[")]
    folder_of_launcher, folder_of_rank_0, folder_of_rank_1, *words = lines
    assert folder_of_rank_0 == folder_of_launcher, run.stderr
    assert folder_of_rank_1 == folder_of_launcher, run.stderr
    assert folder_of_launcher.startswith(str(folder))
    assert words == ["{'lr': 1}", "+lr=1"]


def train_alone(fabric: Fabric) -> tuple[str, float, int | None]:
    """Train in a job of one process inside a rank.

    Returns:
        The error of such a job without environment="none", the gradient of a job with it, and the
        rank of rank_zero_only.
    """
    strategy = SingleDeviceStrategy(device="cpu")
    error = outcome(lambda: Fabric(accelerator="cpu", strategy=strategy))
    with Fabric(accelerator="cpu", strategy=strategy, environment="none") as single:
        model = single.setup(nn.Linear(1, 1, bias=False))
        inputs = torch.full((1, 1), float(fabric.global_rank))
        single.backward(model(inputs).sum())
        [parameter] = model.parameters()
        assert parameter.grad is not None
        gradient = parameter.grad.item()
    fabric.barrier()
    return error, gradient, rank_zero_only.rank


def test_a_job_of_one_process_inside_of_a_rank_is_independent_of_the_job_of_the_rank() -> None:
    for rank, (error, gradient, rank_of_decorator) in enumerate(run_in_ranks(train_alone)):
        assert f"'single_device' with 2 processes on 1 node(s) by fabric (rank {rank})" in error
        assert gradient == rank
        assert rank_of_decorator == rank


def test_python_m_fabric_is_the_command_and_the_readme_says_so(python_m) -> None:
    run = python_m("", "--version")
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"fabric {version('torch-fabric')}\n"
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert "`python -m fabric run ...` is always this one" in readme


def checkout_without_metadata(folder: Path) -> dict[str, str]:
    """Make a folder a checkout of fabric. Return the variables for an interpreter that runs there.

    With them and the option -S, the interpreter has the installed packages but not the metadata of
    this one.
    """
    checkout = Path(package.__file__).parents[1]
    (folder / "fabric").symlink_to(checkout / "fabric")
    packages = folder / "packages"
    packages.mkdir()
    for path in Path(torch.__file__).parents[1].iterdir():
        if "fabric" not in path.name:
            (packages / path.name).symlink_to(path)
    return {**os.environ, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}


def run_in_checkout(folder: Path, *arguments: str) -> Process:
    """Run the command in a checkout of fabric without metadata."""
    return subprocess.run(
        [sys.executable, "-S", "-m", "fabric", *arguments],
        cwd=folder,
        env=checkout_without_metadata(folder),
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE,
    )


def test_the_command_knows_its_version_in_a_checkout_without_metadata(tmp_path: Path) -> None:
    run = run_in_checkout(tmp_path, "--version")
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"fabric {package.__version__}\n"


@pytest.mark.slow
def test_ranks_start_in_a_checkout_without_metadata(tmp_path: Path) -> None:
    text = """
        from importlib.metadata import PackageNotFoundError, version
        import torch, fabric
        try:
            version("torch-fabric")
        except PackageNotFoundError:
            job = fabric.Fabric()
            job.launch()
            total = job.all_reduce(torch.ones(()), reduce_op="sum")
            # In one write: the ranks share the stream.
            print(f"rank {rank}: {int(total)} ranks of {fabric.__version__}\\n", end="")
        """
    name = script(tmp_path, text)
    run = run_in_checkout(tmp_path, "run", "--devices", "2", "--accelerator", "cpu", name)
    assert run.returncode == 0, run.stderr
    lines = [f"rank {rank}: 2 ranks of {package.__version__}" for rank in range(2)]
    assert sorted(run.stdout.splitlines()) == lines

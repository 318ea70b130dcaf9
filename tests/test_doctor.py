"""``fabric doctor`` finds faults that are planted for real, names ranks, and ends in time."""

import os
import socket
import subprocess
import sys

import pytest

DEADLINE = 150
COMMAND = [
    sys.executable,
    "-P",
    "-m",
    "fabric",
    "doctor",
]  # as the command does, it looks into no current folder
# What the machine under the tests may lack.
OWN = ("/dev/shm", "open files", "GiB free")
SMALL = 'ulimit -n 128; mount -t tmpfs -o size=4m none /dev/shm; mount -t tmpfs -o size=64k none "$TMPDIR"; exec "$@"'


@pytest.fixture
def environment(tmp_path):
    for name in ("bin", "tmp", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin" / "fabric").write_text("from fabric.cli import main\n")
    (tmp_path / "bin" / "fabric").chmod(0o755)
    given = {
        name: os.environ[name]
        for name in os.environ
        if not name.startswith(("GLOO_", "NCCL_", "MASTER_"))
    }
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return given | {"PATH": path, "TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}


def start(tmp_path, environment, *command):
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=tmp_path / "work", env=environment, **pipe)


def finish(process):
    """Exit code and report."""
    try:
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert "Traceback" not in out + err, out + err
    return process.returncode, out


def failures(report, ignored=OWN):
    """Each with its remedy, which is not empty."""
    lines = report.splitlines()
    found = {
        line: lines[number + 1].strip()
        for number, line in enumerate(lines)
        if line.startswith("FAIL")
    }
    assert all(found.values())
    return {
        line: remedy
        for line, remedy in found.items()
        if not any(words in line for words in ignored)
    }


def test_a_sound_machine_has_a_report_that_a_bug_can_begin_with(tmp_path, environment):
    code, report = finish(start(tmp_path, environment, *COMMAND))
    assert failures(report) == {}
    assert code == bool(failures(report, ignored=()))
    first = report.splitlines()[0]
    assert first.startswith("torch-fabric ")
    assert "torch 2." in first
    assert all(
        f"ok    rank {rank} of 2 on {socket.gethostname()}: at 127.0.0.1" in report
        for rank in (0, 1)
    )
    assert (
        "ok    all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, scatter, gather on "
        in report
    )


def planted(environment, tmp_path):
    """Seven faults: names, installations, limits, folders and the network; returns what the report says of each."""
    (tmp_path / "work" / "fabric.py").touch()
    (tmp_path / "bin" / "fabric").write_text("from lightning.fabric.cli import _main\n")
    other = tmp_path / "other" / "torch-1.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    ssh = tmp_path / "other" / "fabric-3.2.2.dist-info"
    ssh.mkdir()
    (ssh / "METADATA").write_text("Metadata-Version: 2.1\nName: fabric\nVersion: 3.2.2\n")
    (ssh / "top_level.txt").write_text("fabric\n")
    environment |= {"PYTHONPATH": str(tmp_path / "other"), "GLOO_SOCKET_IFNAME": "nowhere0"}
    return {
        f"import fabric: {tmp_path / 'work' / 'fabric.py'} may be imported": "another name",
        "import fabric: fabric has the same name": "pip uninstall fabric torch-fabric",
        f"the command fabric: {tmp_path / 'bin' / 'fabric'}": "python -m fabric",
        "1.0 in": "uninstall torch",
        "open files: at most 128": "ulimit -n",
        f"scratch {environment['TMPDIR']}: [Errno 28] No space left": "TMPDIR",
        "shared memory /dev/shm: ": "--shm-size",
        ": process group: ": "GLOO_SOCKET_IFNAME",
    }


def mounts():
    """A command that runs another with folders of its own, where the system allows that."""
    ways = (["unshare", "-m"], ["unshare", "-rm"])
    return next(
        (way for way in ways if not subprocess.run([*way, "true"], capture_output=True).returncode),
        None,
    )


def test_planted_faults_are_all_found_in_one_report_with_a_remedy_each(tmp_path, environment):
    if sys.platform != "linux" or (way := mounts()) is None:
        pytest.skip("needs folders of its own")
    expected = planted(environment, tmp_path)
    command = [*way, "sh", "-c", SMALL, "sh", *COMMAND]
    code, report = finish(start(tmp_path, environment, *command))
    assert code == 1
    actual = failures(report, ignored=())
    for text, remedy in expected.items():
        assert [line for line in actual if text in line and remedy in actual[line]], (
            f"{text}\n{report}"
        )


def test_a_rank_that_does_not_arrive_is_named_and_says_itself_why(tmp_path, environment):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    environment |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}
    ranks = [
        start(tmp_path, environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": address}, *COMMAND,
              "--timeout", "3")
        for rank, address in enumerate(("127.0.0.1", "nowhere.invalid"))
    ]  # fmt: skip
    (code, first), (other_code, second) = map(finish, ranks)
    assert (code, other_code) == (1, 1)
    assert any("no sign of rank 1" in line for line in first.splitlines()), first
    assert any("rendezvous at nowhere.invalid" in line for line in failures(second)), second
    assert not any(line.startswith("ok") for line in second.splitlines())


def test_ranks_that_join_early_keep_the_store_of_rank_0(tmp_path, environment):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    job = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_PORT": str(port)}
    # Rank 0 waits for the late rank 2 while rank 1 already waits in the process group.
    late_command = ["sh", "-c", 'sleep 3; exec "$@"', "sh", *COMMAND]
    processes = []
    for rank, command in enumerate([COMMAND, COMMAND, late_command]):
        variables = job | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        processes.append(start(tmp_path, environment | variables, *command))
    for process in processes:
        _, report = finish(process)
        assert failures(report) == {}


# The interpreter runs this at its start; of the processes of the job, all but the first two are
# lost.
LOST = """
import os, sys, time
if "-c" in sys.orig_argv and "forkserver" not in str(sys.orig_argv):
    for number in range(9):
        try:
            os.close(os.open(os.path.join({folder!r}, str(number)), os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            pass
    if number >= {first}:
        {fate}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "fate", "expected"),
    [
        (1, "os._exit(7)", "exited with exit code 7"),
        (1, "time.sleep(600)", "no sign of rank"),
        pytest.param(0, "time.sleep(600)", "2 processes: not done after", marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_cannot_start_is_named(tmp_path, environment, first, fate, expected):
    (tmp_path / "other").mkdir()
    (tmp_path / "started").mkdir()
    text = LOST.format(folder=str(tmp_path / "started"), first=first, fate=fate)
    (tmp_path / "other" / "sitecustomize.py").write_text(text)
    environment["PYTHONPATH"] = str(tmp_path / "other")
    code, report = finish(start(tmp_path, environment, *COMMAND, "--timeout", "3"))
    assert code == 1
    assert expected in report
    assert "FAIL" in report


@pytest.mark.slow
def test_in_a_job_of_torchrun_it_is_a_rank_of_that(tmp_path, environment):
    launcher = [
        sys.executable,
        "-P",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    code, report = finish(start(tmp_path, environment, *launcher, "-m", "fabric", "doctor"))
    assert code == bool(failures(report, ignored=()))
    assert failures(report) == {}
    assert report.count("torch-fabric ") == 1
    assert "2 processes by torchrun" in report
    assert "ok    all_reduce" in report

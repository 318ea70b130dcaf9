"""``fabric doctor`` reports real faults with a remedy, names ranks, and ends in time."""

import os
import re
import socket
import subprocess
import sys

import pytest

DEADLINE = 150
# With -P, Python imports nothing from the current folder, like the command ``fabric``.
COMMAND = [sys.executable, "-P", "-m", "fabric", "doctor"]
# What the machine that runs the tests may lack.
LACKS_OF_MACHINE = ("/dev/shm", "open files", "GiB free")
WITH_SMALL_LIMITS = """
ulimit -n 128
mount -t tmpfs -o size=4m none /dev/shm
mount -t tmpfs -o size=64k none "$TMPDIR"
exec "$@"
"""


@pytest.fixture
def environment(tmp_path):
    for name in ("bin", "tmp", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin" / "fabric").write_text("from fabric.cli import main\n")
    (tmp_path / "bin" / "fabric").chmod(0o755)
    variables = dict(os.environ)
    for name in os.environ:
        if name.startswith(("GLOO_", "NCCL_", "MASTER_")):
            del variables[name]
    variables["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    variables["TMPDIR"] = str(tmp_path / "tmp")
    variables["OMP_NUM_THREADS"] = "1"
    return variables


def start(tmp_path, environment, *command):
    return subprocess.Popen(
        command,
        cwd=tmp_path / "work",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """Return the exit code and the report of a process."""
    try:
        output, errors = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert "Traceback" not in output, output
    assert "Traceback" not in errors, errors
    return process.returncode, output


def failures(report, ignored=LACKS_OF_MACHINE):
    """Return the remedies in a report by the lines of their failures.

    Failures that contain one of the ``ignored`` texts are left out.
    """
    remedies = {}
    lines = report.splitlines()
    for number, line in enumerate(lines):
        if not line.startswith("FAIL"):
            continue
        remedy = lines[number + 1].strip()
        assert remedy
        if not any(text in line for text in ignored):
            remedies[line] = remedy
    return remedies


def free_port():
    """Return a port that is free now. Another process would have to be quick to take it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, port = server.getsockname()
    return str(port)


def test_a_sound_machine_has_a_report_that_a_bug_can_begin_with(tmp_path, environment):
    code, report = finish(start(tmp_path, environment, *COMMAND))
    assert failures(report) == {}
    assert code == bool(failures(report, ignored=()))
    first_line = report.splitlines()[0]
    assert first_line.startswith("torch-fabric ")
    assert "torch 2." in first_line
    for rank in (0, 1):
        assert f"ok    rank {rank} of 2 on {socket.gethostname()}: at 127.0.0.1" in report
    operations = "all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, scatter, gather"
    assert f"ok    {operations} on " in report
    stages = r"import of torch .* s \(rank \d\), rendezvous .* s .*, process group .* s .*, "
    stages += r"collectives .* s .*, first batch .* s"
    assert re.search(rf"\nok    longest stages of the start: {stages}", report)


def write_metadata(folder, name, version):
    """Pretend that a distribution is installed in a folder."""
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "top_level.txt").write_text(f"{name}\n")


def plant_faults(environment, tmp_path):
    """Plant faults of names, installations, folders and the network.

    Returns:
        The text of every failure that the report has to hold, also of the small limits, with a
        text of its remedy.
    """
    (tmp_path / "work" / "fabric.py").touch()
    torch_in_folder = tmp_path / "work" / "torch" / "__init__.py"
    torch_in_folder.parent.mkdir()
    torch_in_folder.touch()
    (tmp_path / "bin" / "fabric").write_text("from lightning.fabric.cli import _main\n")
    packages = tmp_path / "packages"
    write_metadata(packages, "torch", "1.0")
    write_metadata(packages, "fabric", "3.2.2")
    environment["PYTHONPATH"] = str(packages)
    environment["GLOO_SOCKET_IFNAME"] = "nowhere0"
    return {
        f"import fabric: {tmp_path / 'work' / 'fabric.py'} may be imported": "another name",
        f"import torch: {torch_in_folder} may be imported": "another name",
        "import fabric: fabric has the same name": "pip uninstall fabric torch-fabric",
        f"the command fabric: {tmp_path / 'bin' / 'fabric'}": "python -m fabric",
        "1.0 in": "uninstall torch",
        "open files: at most 128": "ulimit -n",
        f"scratch {environment['TMPDIR']}: [Errno 28] No space left": "TMPDIR",
        "shared memory /dev/shm: ": "--shm-size",
        ": process group: ": "GLOO_SOCKET_IFNAME",
    }


def command_with_private_mounts():
    """Return a command that runs another with private mounts, or None if the system refuses."""
    if sys.platform != "linux":
        return None
    for command in (["unshare", "-m"], ["unshare", "-rm"]):
        process = subprocess.run([*command, "true"], capture_output=True, check=False)
        if process.returncode == 0:
            return command
    return None


def test_one_report_has_all_planted_faults_with_their_remedies(tmp_path, environment):
    private_mounts = command_with_private_mounts()
    if private_mounts is None:
        pytest.skip("needs private mounts")
    expected = plant_faults(environment, tmp_path)
    command = [*private_mounts, "sh", "-c", WITH_SMALL_LIMITS, "sh", *COMMAND]
    code, report = finish(start(tmp_path, environment, *command))
    assert code == 1
    remedies = failures(report, ignored=())
    for text, remedy in expected.items():
        remedies_of_fault = [remedies[line] for line in remedies if text in line]
        assert remedy in "\n".join(remedies_of_fault), f"{text}\n{report}"


def test_a_file_that_is_imported_in_place_of_torch_is_named_before_the_import_fails(
    tmp_path, environment
):
    shadow = tmp_path / "work" / "torch.py"
    shadow.touch()
    # Without -P, Python looks in the working folder first.
    command = [sys.executable, "-m", "fabric", "doctor", "--devices", "1"]
    code, report = finish(start(tmp_path, environment, *command))
    assert code == 1
    first, *others = failures(report)
    assert f"import torch: {shadow} may be imported in place of" in first
    assert any("import of torch: ImportError" in line for line in others)


@pytest.mark.slow
def test_a_rank_that_does_not_arrive_is_named_and_says_itself_why(tmp_path, environment):
    environment |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": free_port()}
    processes = []
    for rank, address in enumerate(("127.0.0.1", "nowhere.invalid")):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": address}
        # A loaded machine may need some seconds for the checks before the rendezvous.
        process = start(tmp_path, environment | variables, *COMMAND, "--timeout", "10")
        processes.append(process)
    (code, report), (code_of_rank_1, report_of_rank_1) = map(finish, processes)
    assert code == 1
    assert code_of_rank_1 == 1
    assert "no sign of rank 1" in report
    assert "rendezvous at nowhere.invalid" in "\n".join(failures(report_of_rank_1))
    assert "\nok" not in f"\n{report_of_rank_1}"


@pytest.mark.slow
def test_ranks_that_join_early_keep_the_store_of_rank_0(tmp_path, environment):
    job = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_PORT": free_port()}
    # Rank 0 waits for the late rank 2 while rank 1 already waits in the process group.
    late_command = ["sh", "-c", 'sleep 3; exec "$@"', "sh", *COMMAND]
    processes = []
    for rank, command in enumerate([COMMAND, COMMAND, late_command]):
        variables = job | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        processes.append(start(tmp_path, environment | variables, *command))
    for process in processes:
        _, report = finish(process)
        assert failures(report) == {}


# The interpreter runs this code at its start. The first processes of the job go on, and the
# processes after them meet their fate.
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
    packages = tmp_path / "packages"
    packages.mkdir()
    folder = tmp_path / "started"
    folder.mkdir()
    text = LOST.format(folder=str(folder), first=first, fate=fate)
    (packages / "sitecustomize.py").write_text(text)
    environment["PYTHONPATH"] = str(packages)
    code, report = finish(start(tmp_path, environment, *COMMAND, "--timeout", "6"))
    assert code == 1
    assert expected in report
    assert "FAIL" in report


@pytest.mark.slow
def test_under_torchrun_the_doctor_is_a_rank_of_the_job(tmp_path, environment):
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


@pytest.mark.slow
def test_under_fabric_run_the_doctor_measures_the_import_of_torch(tmp_path, environment):
    launcher = [sys.executable, "-P", "-m", "fabric", "run", "--accelerator=cpu", "--devices=2"]
    _, report = finish(start(tmp_path, environment, *launcher, "-m", "fabric", "doctor"))
    match = re.search(r"import of torch (?P<seconds>\d+\.\d+) s", report)
    assert match is not None, report
    # A process that is forked with torch loaded imports it in no time.
    assert float(match["seconds"]) > 0.1

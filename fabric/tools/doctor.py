"""The command ``fabric doctor``: looks for causes of failing jobs, and suggests remedies.

The command prints a report whatever is wrong. Each part of the report has a time limit, after which
the process names the part and exits. Code that imports torch runs in the ranks, since the import
may fail or hang. The ranks are new processes or, in a job, the processes of the job's launcher.
Rank 0 prints all findings, the other ranks print only failures. A rank that cannot continue exits
with its finding, and the launcher ends the other ranks.
"""

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import distributions, packages_distributions
from pathlib import Path
from signal import SIGTERM, raise_signal
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from fabric.diagnostics.tested_versions import read_table, untested_torch
from fabric.environments import Environment, detect
from fabric.errors import UsageError
from fabric.launchers import LAUNCHERS, LaunchSpec
from fabric.world import World, available_cores, read_variable

if TYPE_CHECKING:
    from torch.distributed import Store

    from fabric._fabric import Fabric

__all__ = ["doctor", "examine_rank"]

_GIB = 2**30
_MIB = 2**20
# Extra time for the import of torch, which is slow from some disks and on a busy machine.
_IMPORT_SECONDS = 30.0
_IMPORT_REMEDY = 'python -c "import torch, fabric"'
_PACKAGES = ("torch-fabric", "torch", "lightning-utilities")
# Prefixes of variables that affect a job, for the first lines of the report.
_VARIABLES = (
    "CUDA_",
    "FABRIC_",
    "GLOO_",
    "MASTER_",
    "NCCL_",
    "OMP_",
    "PYTHONPATH",
    "TMPDIR",
    "TORCH",
)


def doctor(processes: int, seconds: float) -> int:
    """Print a report of this machine and of the job, or of new processes outside of a job.

    Args:
        processes: how many new processes to start if no launcher started this one.
        seconds: the user's time limit. A part that waits for other ranks gets twice as long. After
            its limit a part ends the process with exit code 1.

    Returns:
        The exit code: 0 if nothing is wrong, else 1.
    """
    try:
        return _report(processes, seconds)
    except SystemExit as error:
        # If a part has failed, the code is the text of a finding. If a signal has ended the ranks,
        # the launcher raises the error with a number as its code.
        message = error if isinstance(error.code, str) else "ended by a signal"
        print(message, flush=True)
        return 1


def _report(processes: int, seconds: float) -> int:
    """Print the parts of the report, and return the exit code.

    See :func:`doctor` for the arguments.

    Raises:
        SystemExit: a part has failed, or the process was ended by a signal.
    """
    title = "the place of this process in its job"
    with _report_part(title, seconds, "start it as its launcher does"):
        # The result is None outside of a job. Then fabric starts new processes.
        detected = detect(os.environ)
        launcher, world = detected or (None, World(world_size=processes))
    if world.rank == 0:
        _print_versions(launcher, world)
    has_failed = False
    # The remedy is for a check that hangs, and so has not printed its line.
    remedy = "look at the check that would follow the last line of this report"
    with _report_part("this machine", 2 * seconds, remedy):
        # One rank on each machine is enough.
        if world.local_rank == 0:
            has_failed = _report_on_machine(prints_all=world.rank == 0)
    if launcher is not None:
        examine_rank(seconds)
    else:
        _start_and_examine(processes, seconds)
    return 1 if has_failed else 0


def _print_versions(launcher: Environment | None, world: World) -> None:
    """Print the versions, the job and the environment variables that affect it.

    Args:
        launcher: the launcher that started this process. None if fabric is going to start the job.
        world: the place of this process in its job.
    """
    versions: list[str] = []
    for name in _PACKAGES:
        for distribution in distributions(name=name):
            version = f"{distribution.name} {distribution.version}"
            # An editable installation is found twice, since its checkout has metadata, too.
            if version not in versions:
                versions.append(version)
    print(*versions, f"Python {platform.python_version()}", platform.platform(), sep=", ")
    _print_tested_versions()
    launcher_name = "fabric"
    # A job with a store in its world was started by ``fabric run``.
    if launcher is not None and not world.store:
        launcher_name = launcher.name
    print(
        f"{world.world_size} processes by {launcher_name} on {available_cores()} cores: "
        f"{sys.executable}"
    )
    variables: list[str] = []
    for name, value in os.environ.items():
        if name.startswith(_VARIABLES):
            variables.append(f"{name}={value}")
    print(*variables, flush=True)


def _print_tested_versions() -> None:
    """Print the tested releases, and a note if the installed torch is newer than those."""
    for run in read_table():
        print(
            f"tested on {run.date} with Python {run.python}, torch {run.torch} and the "
            f"{run.dependencies} packages: {run.passed} passed, {run.failed} failed, "
            f"{run.skipped} skipped"
        )
    note = untested_torch()
    if note:
        print(note)


def _report_on_machine(prints_all: bool) -> bool:
    """Print the findings about this machine, and return whether one of them is a failure.

    Args:
        prints_all: whether to print all findings, as rank 0 does, or only failures.
    """
    has_failed = False
    for finding in _examine_machine():
        is_failure = finding.startswith("FAIL")
        has_failed = has_failed or is_failure
        if prints_all or is_failure:
            print(finding, flush=True)
    return has_failed


def _start_and_examine(processes: int, seconds: float) -> None:
    """Start new processes that form a job, and run :func:`examine_rank` in each of them."""
    # The limits in examine_rank are 9 * seconds together, without _IMPORT_SECONDS. 60 seconds are
    # for the imports, first in this process and then in the ranks.
    limit = 60 + 9 * seconds
    with _report_part(f"{processes} processes", limit, _IMPORT_REMEDY, end=_end_by_signal):
        spec = LaunchSpec(num_processes=processes)
        is_new = True
        LAUNCHERS["spawn"].launch(examine_rank, (seconds, is_new), {}, spec)


def _end_by_signal(_: int) -> None:
    """End the process by SIGTERM. Unlike ``os._exit``, this lets the launcher end the ranks."""
    raise_signal(SIGTERM)


def _finding(text: str, remedy: str = "") -> str:
    """Return the lines of the report about a check, which has failed if there is a remedy."""
    if remedy:
        return f"FAIL  {text}\n      {remedy}"
    return f"ok    {text}"


@contextmanager
def _report_part(
    title: str, seconds: float, remedy: str, end: Callable[[int], object] = os._exit
) -> Iterator[None]:
    """Run a part of the report, with a time limit. An error or a timeout ends the process.

    Args:
        title: the name of the part.
        seconds: the time limit of the part.
        remedy: what to do if the part fails.
        end: ends the process when the time is over. The argument is the exit code. Called in the
            thread of a timer, since the main thread may hang in the part.

    Raises:
        SystemExit: the part raised an error. The message is the finding.
    """

    def expire() -> None:
        """Print the finding and end the process. Runs in the thread of the timer."""
        text = f"{title}: not done after {seconds:g} s, which --timeout sets"
        print(_finding(text, remedy), flush=True)
        end(1)

    timer = threading.Timer(seconds, expire)
    timer.start()
    try:
        yield
    # A SystemExit of an inner part is no Exception, so its finding is kept.
    except Exception as error:
        raise SystemExit(_finding(f"{title}: {type(error).__name__}: {error}", remedy)) from error
    finally:
        timer.cancel()


def _examine_machine() -> Iterator[str]:
    """Yield a finding for each check of this machine.

    A generator, so that each finding is printed before the next check, which may hang.
    """
    yield _examine_torch()
    yield from _examine_imports()
    yield _examine_command()
    yield _examine_open_files()
    if sys.platform == "linux":
        # Docker gives a container 64 MiB by default.
        remedy = "docker run --shm-size=8g; workers of loaders use it"
        yield _examine_space("shared memory", "/dev/shm", 256 * _MIB, remedy)
    scratch = read_variable(os.environ, "TMPDIR") or tempfile.gettempdir()
    yield _examine_space("scratch", scratch, _GIB, "export TMPDIR=<another folder>")
    remedy = "make room, or save checkpoints elsewhere"
    yield _examine_space("working folder", os.getcwd(), _GIB, remedy)


def _examine_torch() -> str:
    """Return a finding about the installations of torch on the import path.

    Only their metadata is read: an import may fail or take long.
    """
    installations: list[str] = []
    for distribution in distributions(name="torch"):
        folder = Path(str(distribution.locate_file("")))
        installations.append(f"{distribution.version} in {folder}")
    if not installations:
        return _finding("torch: not installed", "python -m pip install torch")
    text = f"torch: {' and '.join(installations)}"
    # A folder that is on the path twice yields the same installation twice.
    is_single = len(set(installations)) == 1
    if is_single:
        return _finding(text)
    return _finding(text, "leave one: python -m pip uninstall torch, or unset PYTHONPATH")


def _examine_imports() -> Iterator[str]:
    """Yield a failure for each file or package that may be imported in place of torch or fabric."""
    torch_folders: set[Path] = set()
    for distribution in distributions(name="torch"):
        folder = Path(str(distribution.locate_file("torch"))).resolve()
        # An editable installation, from a checkout of torch, has no such folder.
        if folder.exists():
            torch_folders.add(folder)
    if torch_folders:
        yield from _find_shadowing_paths("torch", torch_folders)
    yield from _find_shadowing_paths("fabric", {Path(__file__).resolve().parents[1]})
    # Another distribution may install a package named "fabric", such as the one for SSH on PyPI.
    conflicting = set(packages_distributions().get("fabric", ())) - {"torch-fabric"}
    if conflicting:
        names = " ".join(conflicting)
        # The distributions have written the same folder. So all are removed, and ours is installed
        # again.
        remedy = f"pip uninstall {names} torch-fabric; pip install torch-fabric"
        yield _finding(f"import fabric: {names} has the same name in this environment", remedy)


def _find_shadowing_paths(package: str, folders: set[Path]) -> Iterator[str]:
    """Yield a failure for each file or package that may be imported in place of a package.

    Args:
        package: the name of the package.
        folders: the folders of the package's installations, with links resolved.
    """
    # An ordered set: all values are None. Several entries of sys.path may lead to one file.
    shadowing_paths: dict[Path, None] = {}
    # The folder of a script comes first in its sys.path, and is often the working folder.
    for folder in (os.getcwd(), *sys.path):
        for name in (f"{package}.py", f"{package}/__init__.py"):
            path = Path(folder, name)
            if path.exists() and path.resolve().parent not in folders:
                shadowing_paths[path.resolve()] = None
    places = " or ".join(map(str, sorted(folders)))
    for path in shadowing_paths:
        text = f"import {package}: {path} may be imported in place of {places}"
        yield _finding(text, "give it another name, or start in another folder")


def _examine_command() -> str:
    """Return a finding about the command ``fabric``, which another package may have installed."""
    command = shutil.which("fabric")
    if command is None:
        # This is no failure, since python -m fabric works without the command.
        return _finding("the command fabric: not on PATH")
    text = f"the command fabric: {command}"
    # The script that pip generates for our entry point has this import.
    if "from fabric.cli " in Path(command).read_text(errors="replace"):
        return _finding(text)
    return _finding(text, "it is another package's: python -m fabric")


def _examine_open_files() -> str:
    """Return a finding about how many files a process may open. Workers and stores need many."""
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"open files: at most {limit}"
    # 1024 is the usual default on Linux. A negative number means that there is no limit.
    is_too_low = 0 <= limit < 1024
    if not is_too_low:
        return _finding(text)
    remedy = (
        f"ulimit -n 65536; beyond {hard_limit}: docker run --ulimit nofile=65536, "
        "or /etc/security/limits.conf"
    )
    return _finding(text, remedy)


def _examine_space(title: str, folder: str, needed: int, remedy: str) -> str:
    """Return a finding about the free space in a folder: a failure below ``needed`` bytes."""
    try:
        free = shutil.disk_usage(folder).free
        # A quota may forbid the use of free space. Only a write finds this out.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_MIB))
    except OSError as error:
        return _finding(f"{title} {folder}: {error}", remedy)
    text = f"{title} {folder}: {free / _GIB:.1f} GiB free"
    if free < needed:
        return _finding(text, remedy)
    return _finding(text)


def examine_rank(seconds: float, is_new: bool = False) -> None:
    """Check from one rank which other ranks it can reach, and run a collective of each kind.

    Collective. Rank 0 prints the findings.

    Args:
        seconds: the user's time limit. A part that waits for other ranks gets twice as long.
        is_new: whether doctor has started this process. Then it uses the CPU if there are too few
            devices for all ranks.

    Raises:
        SystemExit: something is wrong; its message says what.
    """
    stages = _StageTimes()
    # Without a launcher, this process is a job of its own.
    _, world = detect(os.environ) or (None, World())
    title = f"rank {world.rank} of {world.world_size} on {socket.gethostname()}"
    with _report_part(f"{title}: import of torch", _IMPORT_SECONDS + seconds, _IMPORT_REMEDY):
        device_count = _import_torch()
    stages.end("import of torch")
    remedy = (
        "MASTER_ADDR and MASTER_PORT: the host of rank 0, as all others reach it, "
        "and a free port there"
    )
    endpoint = world.store or f"{world.address}:{world.port}"
    # Opening the store and meeting the other ranks may each take ``seconds``.
    with _report_part(f"{title}: rendezvous at {endpoint}", 2 * seconds, remedy):
        # The variable keeps the store alive until this function ends: rank 0 may serve the store,
        # and the process group uses the same server.
        store = _open_store(world, seconds)
        descriptions = _meet_ranks(
            store, world, title=title, device_count=device_count, seconds=seconds
        )
    stages.end("rendezvous")
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    remedy = (
        "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME: the interface to the other ranks, one of "
        f"{interfaces}; NCCL_DEBUG=INFO"
    )
    with _report_part(f"{title}: process group", 2 * seconds, remedy):
        has_too_few_devices = device_count < world.world_size
        accelerator = "cpu" if is_new and has_too_few_devices else "auto"
        fabric = _connect(accelerator, seconds)
    stages.end("process group")
    # Leaving the context of ``fabric`` tears the process group down.
    with fabric:
        with _report_part(f"{title}: collectives on {fabric.device}", 2 * seconds, remedy):
            summary = _check_collectives(fabric, world)
        stages.end("collectives")
        with _report_part(f"{title}: first batch on {fabric.device}", 2 * seconds, remedy):
            _train_first_batch(fabric)
            stages.end("first batch")
            seconds_of_ranks = fabric.gather(stages.seconds)
    if seconds_of_ranks is not None:  # on rank 0
        for text in [*descriptions, summary, _describe_stages(seconds_of_ranks)]:
            print(_finding(text))
        sys.stdout.flush()


def _import_torch() -> int:
    """Import what a script imports before its first step, and return the number of devices.

    The imports are here, after the report on the machine, which may explain why they fail.
    """
    import torch

    from fabric._fabric import Fabric  # noqa: F401 - its time counts, too

    # The first optimizer of a process imports torch._dynamo, which takes as long as torch.
    torch.optim.SGD([torch.zeros(1)])
    return torch.accelerator.device_count()


def _connect(accelerator: str, seconds: float) -> "Fabric":
    """Return a Fabric whose processes are connected. Collective.

    Args:
        accelerator: the kind of hardware.
        seconds: how long the call and each collective may take.
    """
    from fabric._fabric import Fabric

    # No watchdog: this part of the report has its own time limit.
    fabric = Fabric(accelerator=accelerator, timeout=seconds, watchdog=0)
    fabric.launch()
    return fabric


def _train_first_batch(fabric: "Fabric") -> None:
    """Train a small model for a step, as a script does with its first batch. Collective."""
    import torch

    model = torch.nn.Linear(8, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.ones(4, 8, device=fabric.device)).mean()
    fabric.backward(loss)
    optimizer.step()
    loss.item()  # waits for the device


class _StageTimes:
    """The seconds that each stage of the start took on this rank.

    Attributes:
        seconds: seconds by the name of the stage. The waits for other ranks are included.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = monotonic()

    def end(self, stage: str) -> None:
        """Record the stage that ends now. The next one begins."""
        now = monotonic()
        self.seconds[stage] = now - self._began
        self._began = now


def _describe_stages(seconds_of_ranks: Sequence[dict[str, float]]) -> str:
    """Return a text with the seconds of each stage, on the rank where it took longest."""
    stages: list[str] = []
    for stage in seconds_of_ranks[0]:
        seconds_of_stage = [seconds[stage] for seconds in seconds_of_ranks]
        longest = max(seconds_of_stage)
        stages.append(f"{stage} {longest:.2f} s (rank {seconds_of_stage.index(longest)})")
    return f"longest stages of the start: {', '.join(stages)}"


def _open_store(world: World, seconds: float) -> "Store":
    """Return torch's store of the job, without waiting for the ranks that are missing.

    The timeout of a store that waits for all ranks would not say which ranks are missing. Rank 0
    serves the store, unless an agent of torchrun does.

    Args:
        world: the place of this process.
        seconds: the timeout of the store.
    """
    from torch.distributed import TCPStore

    from fabric.store import find_store

    timeout = timedelta(seconds=seconds)
    if not world.port:
        # The world is one process, or its store is in a file. find_store() then waits for no rank.
        return find_store(world, timeout)
    has_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        world.address,
        world.port,
        is_master=world.rank == 0 and not has_agent_store,
        timeout=timeout,
        wait_for_workers=False,
        # The process group opens a store at the same port later, and shares the server.
        multi_tenant=True,
    )


def _meet_ranks(
    store: "Store", world: World, *, title: str, device_count: int, seconds: float
) -> list[str]:
    """Meet the other ranks in a store, and return the description that each rank gives of itself.

    Rank 0 waits for all ranks, and returns all descriptions. The other ranks wait for rank 0 only.

    Args:
        store: the store of the job.
        world: the place of this process.
        title: the name of this process.
        device_count: the number of CUDA devices of this process.
        seconds: how long to wait.

    Raises:
        UsageError: a rank did not come in time.
    """
    from torch.distributed import PrefixStore

    from fabric.store import JobStore

    own_address, host_address = _addresses(world)
    job_store = JobStore(PrefixStore("doctor", store), world.rank, world.world_size)
    description = (
        f"{title}: at {own_address}, rank 0 at {host_address}, {device_count} CUDA devices"
    )
    job_store.publish("rank", description)
    awaited_ranks: Sequence[int] = [0]
    if world.rank == 0:
        awaited_ranks = range(world.world_size)
    # The result lacks the ranks that have not published in time.
    descriptions = job_store.read("rank", awaited_ranks, seconds)
    missing = set(awaited_ranks) - descriptions.keys()
    if missing:
        problem = (
            "it has not started, is slower than --timeout, or cannot reach this address: "
            "see what it printed"
        )
        raise UsageError(f"no sign of rank {', '.join(map(str, missing))}", problem=problem)
    return list(descriptions.values())


def _addresses(world: World) -> tuple[str, str]:
    """Return this process's address, and the address of rank 0's host.

    This process's address is the one of the network interface that leads to the host.

    Raises:
        OSError: the name of the host cannot be resolved, or no network leads to the host.
    """
    port = world.port or 1  # any port: nothing is sent
    candidates = socket.getaddrinfo(world.address, port, type=socket.SOCK_DGRAM)
    # The first candidate is the address that a connection would try first.
    family, _, _, _, host_endpoint = candidates[0]
    host_address = str(host_endpoint[0])
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing, and chooses the network interface.
        probe.connect(host_endpoint)
        own_address = probe.getsockname()[0]
    return own_address, host_address


class _Outcome(NamedTuple):
    """What a collective returned, and what it has to return."""

    actual: Any
    expected: Any


def _check_collectives(fabric: "Fabric", world: World) -> str:
    """Run a collective of each kind, and return a text about them. Collective.

    Raises:
        UsageError: a result is wrong.
    """
    began = monotonic()
    outcomes = _run_collectives(fabric, world.rank, world.world_size)
    wrong: dict[str, tuple[Any, Any]] = {}
    for name, outcome in outcomes.items():
        if outcome.actual != outcome.expected:
            wrong[name] = tuple(outcome)  # a plain tuple, which prints shorter
    if wrong:
        raise UsageError(f"not what was expected: {wrong}")
    names = ", ".join(outcomes)
    return f"{names} on {fabric.device}: right, in {monotonic() - began:.3f} s"


def _run_collectives(fabric: "Fabric", rank: int, size: int) -> dict[str, _Outcome]:
    """Run a collective of each kind, and return the outcomes by name. Collective.

    Each rank sends its own number. The results are read as Python numbers, which waits for the
    device.
    """
    import torch

    ranks = list(range(size))
    row = torch.tensor(ranks, device=fabric.device)
    # 8 MiB, in which each int64 is this rank's number. A large message shows whether packets are
    # too long for the network.
    large = row[rank].repeat(_MIB)
    sums = fabric.all_reduce(large, reduce_op="sum").unique().tolist()
    gathered = fabric.all_gather(row[rank]).tolist()
    # Each rank sends all numbers, so this rank gets its own number from every rank.
    scattered_sum = fabric.reduce_scatter(row, reduce_op="sum").item()
    exchanged = fabric.all_to_all(torch.full_like(row, rank)).tolist()
    # Rank 0 sends zeros, which replace the numbers of the other ranks.
    broadcast = fabric.broadcast(row * rank).tolist()
    ranks_on_destination = ranks if rank == 0 else None
    return {
        "all_reduce": _Outcome(sums, [sum(ranks)]),
        "all_gather": _Outcome(gathered, ranks),
        "reduce_scatter": _Outcome(scattered_sum, rank * size),
        "all_to_all": _Outcome(exchanged, ranks),
        "broadcast": _Outcome(broadcast, [0] * size),
        "scatter": _Outcome(fabric.scatter(ranks), rank),
        "gather": _Outcome(fabric.gather(rank), ranks_on_destination),
    }

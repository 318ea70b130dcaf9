"""The command ``fabric doctor``: looks for causes of failing jobs, and suggests remedies.

[Note: Doctor] There is always a report. Each part has a time limit, after which the process names the part and exits.
Code that imports torch runs in the ranks: new processes or, in a job, those of its launcher. Rank 0 prints all
findings, the other ranks only failures. A rank that cannot continue exits with its finding, and the launcher ends the
others.
"""

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import distributions, packages_distributions
from pathlib import Path
from signal import SIGTERM, raise_signal
from time import monotonic

from fabric.environments import detect
from fabric.errors import UsageError
from fabric.launchers import LAUNCHERS, LaunchSpec
from fabric.world import World, available_cores, read

__all__ = ["doctor", "examine_rank"]

_GIB = 2**30
_MIB = 2**20
_IMPORTING = 30.0  # extra seconds for the import of torch, from a slow disk or on a busy machine
_IMPORT = 'python -c "import torch, fabric"'
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
    """Print a report of this machine and of the job, or of new processes if no launcher started this one.

    Args:
        processes: how many new processes to start.
        seconds: time limit of each part, after which the process exits with 1.

    Returns:
        The exit code: 0 if nothing is wrong, else 1.
    """
    failures = 0
    try:
        with _part(
            "the place of this process in its job", seconds, "start it as its launcher does"
        ):
            launcher, world = detect(os.environ) or (None, World(world_size=processes))
        if world.rank == 0:
            versions = (
                f"{distribution.name} {distribution.version}"
                for name in _PACKAGES
                for distribution in distributions(name=name)
            )
            print(*versions, f"Python {platform.python_version()}", platform.platform(), sep=", ")
            by = launcher.name if launcher and not world.store else "fabric"
            print(
                f"{world.world_size} processes by {by} on {available_cores()} cores: {sys.executable}"
            )
            print(
                *(
                    f"{name}={value}"
                    for name, value in os.environ.items()
                    if name.startswith(_VARIABLES)
                ),
                flush=True,
            )
        with _part(
            "this machine", 2 * seconds, "what the line after the last one would have been about"
        ):
            for finding in _examine_machine() if world.local_rank == 0 else ():
                failures += finding.startswith("FAIL")
                if world.rank == 0 or finding.startswith("FAIL"):
                    print(finding, flush=True)
        if launcher:
            examine_rank(seconds)
        else:
            # The ranks may import torch twice, one after the other. On the signal the launcher ends them.
            with _part(
                f"{processes} processes", 60 + 7 * seconds, _IMPORT, lambda _: raise_signal(SIGTERM)
            ):
                LAUNCHERS["spawn"].launch(
                    examine_rank, (seconds, True), {}, LaunchSpec(num_processes=processes)
                )
        return min(1, failures)
    except SystemExit as error:
        print(error if isinstance(error.code, str) else "ended by a signal", flush=True)
        return 1


def _finding(text: str, remedy: str = "") -> str:
    return f"FAIL  {text}\n      {remedy}" if remedy else f"ok    {text}"


@contextmanager
def _part(
    title: str, seconds: float, remedy: str, end: Callable[[int], object] = os._exit
) -> Iterator[None]:
    """A part of the report: the process exits when the time is over, or with an error of the part as a finding."""

    def expire() -> None:
        print(
            _finding(f"{title}: not done after {seconds:g} s, which --timeout sets", remedy),
            flush=True,
        )
        end(1)

    timer = threading.Timer(seconds, expire)
    timer.start()
    try:
        yield
    except Exception as error:
        raise SystemExit(_finding(f"{title}: {type(error).__name__}: {error}", remedy)) from error
    finally:
        timer.cancel()


def _examine_machine() -> Iterator[str]:
    found = [
        f"{distribution.version} in {Path(str(distribution.locate_file('')))}"
        for distribution in distributions(name="torch")
    ]
    remedy = (
        "leave one: python -m pip uninstall torch, or unset PYTHONPATH"
        if found
        else "python -m pip install torch"
    )
    yield _finding(
        f"torch: {' and '.join(found) or 'not installed'}", "" if len({*found}) == 1 else remedy
    )

    own = Path(__file__).parents[1]
    places = [
        Path(folder, name)
        for folder in (os.getcwd(), *sys.path)
        for name in ("fabric.py", "fabric/__init__.py")
    ]
    for place in {
        each.resolve() for each in places if each.exists() and each.resolve().parent != own
    }:
        yield _finding(
            f"import fabric: {place} may be imported in place of {own}", "give it another name"
        )
    if others := {*packages_distributions().get("fabric", ())} - {"torch-fabric"}:
        remedy = f"pip uninstall {' '.join(others)} torch-fabric; pip install torch-fabric"
        yield _finding(
            f"import fabric: {' '.join(others)} has the same name in this environment", remedy
        )
    command = shutil.which("fabric")
    is_ours = command is None or "from fabric.cli " in Path(command).read_text(errors="replace")
    remedy = "" if is_ours else "it is another package's: python -m fabric"
    yield _finding(f"the command fabric: {command or 'not on PATH'}", remedy)

    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = f"ulimit -n 65536; beyond {most}: docker run --ulimit nofile=65536, or /etc/security/limits.conf"
    yield _finding(f"open files: at most {files}", remedy if 0 <= files < 1024 else "")
    if sys.platform == "linux":
        yield _space(
            "shared memory",
            "/dev/shm",
            256 * _MIB,
            "docker run --shm-size=8g; workers of loaders use it",
        )
    yield _space(
        "scratch",
        read(os.environ, "TMPDIR") or tempfile.gettempdir(),
        _GIB,
        "export TMPDIR=<another folder>",
    )
    yield _space("working folder", os.getcwd(), _GIB, "make room, or save checkpoints elsewhere")


def _space(title: str, folder: str, least: int, remedy: str) -> str:
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder) as file:  # a quota shows only here
            file.write(bytes(_MIB))
        return _finding(
            f"{title} {folder}: {free / _GIB:.1f} GiB free", remedy if free < least else ""
        )
    except OSError as error:
        return _finding(f"{title} {folder}: {error}", remedy)


def examine_rank(seconds: float, is_new: bool = False) -> None:
    """Check from one rank which other ranks it can reach, and run a collective of each kind. Collective.

    Args:
        seconds: time limit of each part.
        is_new: whether this process was started for the check, and may choose a device.

    Raises:
        SystemExit: something is wrong; its message says what.
    """
    world = (detect(os.environ) or (None, World()))[1]
    rank = world.rank
    size = world.world_size
    address = world.address
    port = world.port
    me = f"rank {rank} of {size} on {socket.gethostname()}"
    with _part(f"{me}: import of torch", _IMPORTING + seconds, _IMPORT):
        # After the report on the machine, which may explain why this import fails.
        import torch
        from torch.distributed import PrefixStore, TCPStore

        from fabric._fabric import Fabric
        from fabric.store import JobStore, find_store

        cards = torch.cuda.device_count()
    remedy = "MASTER_ADDR and MASTER_PORT: the host of rank 0, as all others reach it, and a free port there"
    with _part(f"{me}: rendezvous at {world.store or f'{address}:{port}'}", 2 * seconds, remedy):
        family, _, _, _, main = socket.getaddrinfo(address, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(main)  # sends nothing
            own = probe.getsockname()[0]
        # torch's store without waiting for all ranks, since its timeout would not say which ranks are missing.
        wait = timedelta(seconds=seconds)
        hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        base = (
            TCPStore(address, port, None, hosts, wait, False, True)
            if port
            else find_store(world, wait)
        )
        store = JobStore(PrefixStore("doctor", base), rank, size)
        store.publish("rank", f"{me}: at {own}, rank 0 at {main[0]}, {cards} CUDA devices")
        there = store.read("rank", awaited := range(size if rank == 0 else 1), seconds)
        if missing := {*awaited} - there.keys():
            problem = "it has not started, is slower than --timeout, or cannot reach this address: see what it printed"
            raise UsageError(f"no sign of rank {', '.join(map(str, missing))}", problem)
    names = ", ".join(name for _, name in socket.if_nameindex())
    remedy = f"GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME: of {names} the one that leads to the others; NCCL_DEBUG=INFO"
    with _part(f"{me}: process group", 2 * seconds, remedy):
        fabric = Fabric(
            accelerator="cpu" if is_new and cards < size else "auto", timeout=seconds, watchdog=0
        )
        fabric.launch()
    with _part(f"{me}: collectives on {fabric.device}", 2 * seconds, remedy), fabric:
        ranks = [*range(size)]
        began = monotonic()
        row = torch.tensor(ranks, device=fabric.device)
        results = {
            # A large message, which finds packets that are too long for the network.
            "all_reduce": (
                fabric.all_reduce(row[rank].repeat(_MIB), reduce_op="sum").unique().tolist(),
                [sum(ranks)],
            ),
            "all_gather": (fabric.all_gather(row[rank]).tolist(), ranks),
            "reduce_scatter": (fabric.reduce_scatter(row, reduce_op="sum").item(), rank * size),
            "all_to_all": (fabric.all_to_all(torch.full_like(row, rank)).tolist(), ranks),
            "broadcast": (fabric.broadcast(row * rank).tolist(), [0] * size),
            "scatter": (fabric.scatter(ranks), rank),
            "gather": (fabric.gather(rank), None if rank else ranks),
        }
        if wrong := {name: pair for name, pair in results.items() if pair[0] != pair[1]}:
            raise UsageError(f"not what was expected: {wrong}")
        took = f"{', '.join(results)} on {row.device}: right, in {monotonic() - began:.3f} s"
    if rank == 0:
        print(*map(_finding, [*there.values(), took]), sep="\n", flush=True)

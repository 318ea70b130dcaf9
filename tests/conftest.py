"""Fixtures that every test runs under: nothing is left behind, and seeds are fixed."""

import gc
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import hypothesis
import psutil
import pytest
import torch

from fabric import Fabric
from fabric.launchers import LAUNCHERS, fork_server
from tests.ranks import close_shared_ranks

pytest_plugins = ["fabric.testing.plugin"]
# Examples start processes and write files: how long one takes says nothing.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")
# A worker of `make test` runs the code of `python -c`, which no launcher can run again. The file of
# pytest stands in for it.
if not hasattr(sys.modules["__main__"], "__file__"):
    sys.modules["__main__"].__file__ = str(Path(pytest.__file__).with_name("__main__.py"))

# Every process that a test starts inherits this variable, even a process that lost its parent.
MARK = "FABRIC_TESTS_RUN"
# Python runs the sitecustomize.py of this folder in every process that has it in its search path.
REPLICA_CHECK = Path(__file__).with_name("check_replicas")
# Two caches live as long as this process: torch's compiler and multiprocessing's sockets have them.
CACHES = ("torchinductor_", "pymp-")
# Modules that fabric imports when they are needed, and modules of the tests. Each rank that is
# forked from the server would import them.
MODULES_OF_RANKS = (
    "fabric.checkpoint.full_tensors",
    "fabric.checkpoint.save_load",
    "fabric.diagnostics.replicas",
    "fabric.strategies.fsdp",
    "fabric.testing.pool",
    "hypothesis",
    "lightning_utilities.core.imports",
    "psutil",
    "pytest",
    "torch._dynamo.backends.common",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.experimental",
)
# Files whose few tests take long. `make test` begins with them, so that no worker gets one of them
# last, and works alone at the end.
LONG_FILES = (
    "test_launchers_debug.py",
    "test_model_parallel.py",
    "test_cli.py",
    "test_restarts.py",
    "test_dry_run.py",
    "test_watchdog.py",
    "test_sequence_parallel.py",
    "test_split_comparison.py",
    "test_fsdp_models.py",
    "test_launchers_failures.py",
    "test_notebook_cells.py",
    "test_parents.py",
    "test_doctor.py",
    "test_replicas.py",
    "test_cleared_gradients.py",
    "test_transformers.py",
)
# pytest names the running test in the first, and torch's compiler notes its cache in the second.
FOREIGN_VARIABLES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option with which any test looks for replicas that differ."""
    parser.addoption(
        "--check-replicas",
        type=int,
        metavar="N",
        help="compare replicas every N steps of each Fabric that is made with the default",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave out of all garbage collections what the modules of the tests have loaded.

    These are a million objects. A collection that goes through them takes a third of a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests of long files to the front."""
    items.sort(key=lambda item: item.path.name not in LONG_FILES)


@pytest.fixture(scope="session", autouse=True)
def replicas_are_checked_as_asked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Apply ``--check-replicas`` to this process, and to every process that a test starts."""
    interval = request.config.getoption("--check-replicas")
    if interval is None:
        yield
        return
    defaults = Fabric.__init__.__kwdefaults__
    assert defaults is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(defaults, "check_replicas", interval)
        patch.setenv("FABRIC_TESTS_CHECK_REPLICAS", str(interval))
        patch.setenv("PYTHONPATH", str(REPLICA_CHECK), prepend=os.pathsep)
        # A fork server gets its search path from here.
        patch.syspath_prepend(REPLICA_CHECK)
        yield


@pytest.fixture(scope="session", autouse=True)
def the_whole_run_leaves_nothing_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Check that no process and no temporary file is left, and that the environment is restored.

    The run has a temporary folder of its own, so that files of other programs are not counted.
    """
    # A shell that starts the tests in the background makes them, and their children, ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    variables = _variables()
    # pytest keeps its own folder on purpose: create it before the temporary folder changes.
    tmp_path_factory.getbasetemp()
    temporary = Path(tempfile.mkdtemp(prefix="run-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, secrets.token_hex(8))
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", str(temporary))
        yield
        close_shared_ranks()
        processes = _started_in_this_run(os.environ[MARK])
    files = []
    for path in temporary.iterdir():
        if not path.name.startswith(CACHES):
            files.append(path.name)
    shutil.rmtree(temporary)
    changed = {name for name, _ in variables.items() ^ _variables().items()}
    assert (processes, files, changed) == ([], [], set()), (
        "left behind: processes, files, variables"
    )


@pytest.fixture(scope="session", autouse=True)
def the_fork_server_has_imported_modules_of_ranks() -> Iterator[None]:
    """Have the fork server of this process import what ranks of tests import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "_fork_server_of_process", _fork_server_with_modules_of_ranks)
        yield


@pytest.fixture
def spawned_ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the ranks of "spawn" as those of "forkserver", which takes a tenth of the time.

    A test in test_launchers.py starts them in new interpreters.
    """
    monkeypatch.setitem(LAUNCHERS, "spawn", LAUNCHERS["forkserver"])


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves a process, an environment variable or a process group behind."""
    variables = _variables()
    before = set(psutil.pids())
    yield
    assert not torch.distributed.is_initialized(), "a process group was left behind"
    assert _variables() == variables, "an environment variable was left behind"
    # To list the children is costly, and after most tests there are no new processes.
    new = set(psutil.pids()) - before
    if new:
        alive = _wait_for_children(new)
        assert not alive, f"processes were left behind: {alive}"


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Seed the streams, and let torch compute in one thread."""
    torch.manual_seed(0)
    random.seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def _fork_server_with_modules_of_ranks(pid: int) -> fork_server.ForkServer:
    """Return the fork server of the process with this id, as fabric's own function does."""
    variables = {fork_server._MODULES_VARIABLE: " ".join(MODULES_OF_RANKS)}
    return fork_server.ForkServer(fork_server.forkserver_main, variables=variables)


def _variables() -> dict[str, str]:
    """Return the environment variables of this process that tests must leave alone."""
    return {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}


def _wait_for_children(pids: set[int]) -> list[psutil.Process]:
    """Wait for the children among some processes, and return the children that do not end."""
    children = []
    for process in psutil.Process().children(recursive=True):
        if process.pid in pids and not _is_warm_server(process):
            children.append(process)
    _, alive = psutil.wait_procs(children, timeout=30)
    return alive


def _started_in_this_run(mark: str) -> list[psutil.Process]:
    """Return the live processes of this run, wherever they are in the tree of processes."""
    processes = set(psutil.Process().children(recursive=True))
    for process in psutil.process_iter():
        if _environment(process).get(MARK) == mark:
            processes.add(process)
    processes.discard(psutil.Process())
    # Ranks have the command line of the server that forked them, but only the server is our child.
    for child in psutil.Process().children():
        if _is_warm_server(child):
            processes.discard(child)
    _, alive = psutil.wait_procs(processes, timeout=30)
    return alive


def _environment(process: psutil.Process) -> dict[str, str]:
    """Return the variables of a process; none if it has ended or belongs to another user."""
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _is_warm_server(process: psutil.Process) -> bool:
    """Say whether a process lives as long as this one by design: fork server, resource tracker."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "forkserver" in command or "resource_tracker" in command

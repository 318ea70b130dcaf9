"""Fixtures that every test runs under: nothing is left behind, and seeds are fixed."""

import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest
import torch

from tests.ranks import close_shared_ranks

pytest_plugins = ["fabric.testing.plugin"]
# Examples start processes and write files: how long one takes says nothing.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")
# A worker of `make test` runs code of `python -c`, which no launcher could run again; pytest itself is a script.
if not hasattr(sys.modules["__main__"], "__file__"):
    sys.modules["__main__"].__file__ = str(Path(pytest.__file__).with_name("__main__.py"))


MARK = "FABRIC_TESTS_RUN"  # inherited by every process that a test starts, also by one that lost its parent


@pytest.fixture(scope="session", autouse=True)
def the_whole_run_leaves_nothing_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After the last test no process is left, no file where temporary files go, and the environment is as it was.

    The run has a temporary folder of its own, so that nobody else's files are taken for ours.
    """
    # A shell that starts the tests in the background makes them ignore Ctrl-C, and all that they start after them.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    variables = _variables()
    tmp_path_factory.getbasetemp()  # pytest keeps it on purpose: settled while temporary files still go elsewhere
    temporary = Path(tempfile.mkdtemp(prefix="run-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, secrets.token_hex(8))
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", str(temporary))
        yield
        close_shared_ranks()
        processes = _started_in_this_run(os.environ[MARK])
    # Two caches that live as long as this process: of torch's compiler, and of multiprocessing for its sockets.
    files = [
        path.name
        for path in temporary.iterdir()
        if not path.name.startswith(("torchinductor_", "pymp-"))
    ]
    shutil.rmtree(temporary)
    changed = sorted(name for name, _ in variables.items() ^ _variables().items())
    assert (processes, files, changed) == ([], [], []), "left behind: processes, files or variables"


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """A test that leaves a process, an environment variable or a process group behind fails."""
    variables = _variables()
    before = set(psutil.pids())
    yield
    assert not torch.distributed.is_initialized(), "a process group was left behind"
    assert _variables() == variables, "an environment variable was left behind"
    # Whose children the new processes are is costly to find out, and after most tests there are none.
    new = set(psutil.pids()) - before
    ours = psutil.Process().children(recursive=True) if new else []
    left = [process for process in ours if process.pid in new and not _is_warm_server(process)]
    _, alive = psutil.wait_procs(left, timeout=5)
    assert not alive, f"processes were left behind: {alive}"


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    random.seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _variables() -> dict[str, str]:
    # pytest names the running test in one, and torch's compiler notes its cache folder in another when it is imported.
    foreign = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
    return {name: value for name, value in os.environ.items() if name not in foreign}


def _started_in_this_run(mark: str) -> list[psutil.Process]:
    """Those that still live, wherever in the tree of processes they are by now."""
    left = set(psutil.Process().children(recursive=True))
    left |= {
        process for process in psutil.process_iter() if _environment(process).get(MARK) == mark
    }
    # Ranks have the command line of the server that forked them; it is our child, they are not.
    ours = {process for process in psutil.Process().children() if _is_warm_server(process)}
    left -= {psutil.Process(), *ours}
    return psutil.wait_procs(left, timeout=30)[1]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}  # it has ended, or is another user's


def _is_warm_server(process: psutil.Process) -> bool:
    """The fork server and multiprocessing's resource tracker live as long as this process, by design."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "forkserver" in command or "resource_tracker" in command

"""Fixtures that every test runs under: nothing is left behind, and seeds are fixed."""

import os
import random
from collections.abc import Iterator

import psutil
import pytest
import torch

pytest_plugins = ["fabric.testing.plugin"]


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """A test that leaves a process, an environment variable or a process group behind fails."""
    variables = _variables()
    before = set(psutil.Process().children(recursive=True))
    yield
    assert not torch.distributed.is_initialized(), "a process group was left behind"
    assert _variables() == variables, "an environment variable was left behind"
    left = [
        process for process in set(psutil.Process().children(recursive=True)) - before if not _is_warm_server(process)
    ]
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


def _is_warm_server(process: psutil.Process) -> bool:
    """The fork server and multiprocessing's resource tracker live as long as this process, and what guards the files
    of a pool as long as the pool, by design.
    """
    try:
        arguments = process.cmdline()
    except psutil.Error:
        return False
    command = " ".join(arguments)
    return "forkserver" in command or "resource_tracker" in command or _guards_a_pool(arguments)


def _guards_a_pool(arguments: list[str]) -> bool:
    return "shutil.rmtree(sys.argv[1]" in " ".join(arguments) and os.path.exists(arguments[-1])

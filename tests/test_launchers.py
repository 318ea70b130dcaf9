"""Launchers of functions: results, environments, rendezvous, and functions that travel by value."""

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from fabric import Fabric
from fabric.errors import ArgumentTypeError, ConfigurationError, RankFailedError, UsageError
from fabric.launchers import LAUNCHERS, InlineLauncher, LaunchSpec
from fabric.launchers.fork_server import ForkServer, forkserver_main
from fabric.world import World

sys.path.insert(0, str(Path(__file__).parent / "scripts" / "launchers"))
import actions

TWO = LaunchSpec(num_processes=2)
ALL = LaunchSpec(num_processes=2, results="all")


# In `make test`, one test below runs spawn: every launch starts two interpreters that import torch.
@pytest.fixture(params=[pytest.param("spawn", marks=pytest.mark.slow), "fork", "forkserver"])
def launcher(request):
    return LAUNCHERS[request.param]


@pytest.fixture
def forkserver():
    return LAUNCHERS["forkserver"]


def report():
    return {
        "world": World.from_env(os.environ),
        "pid": os.getpid(),
        "directory": os.getcwd(),
        "colour": os.environ.get("COLOUR"),
        "interface": os.environ["GLOO_SOCKET_IFNAME"],
        "omp": os.environ["OMP_NUM_THREADS"],
        "path": list(sys.path),
        "arguments": sys.argv,
    }


def tensors():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    return {
        "loss": (weight * 3).sum(),
        "weight": weight,
        "view": torch.arange(1_000_000)[:3],
        "half": weight.bfloat16(),
    }


def test_ranks_meet_at_the_private_store(launcher):
    total = launcher.launch(actions.reduce, (), {"value": 10.0}, TWO)
    assert total == 21.0


def test_spawned_ranks_meet_at_the_private_store():
    totals = LAUNCHERS["spawn"].launch(actions.reduce, (), {"value": 10.0}, ALL)
    assert totals == [21.0, 21.0]


def test_all_results_come_back_by_rank(launcher):
    spec = LaunchSpec(num_processes=3, results="all")
    assert launcher.launch(actions.rank, (), {}, spec) == [0, 1, 2]


def test_no_result_is_none(launcher):
    spec = LaunchSpec(num_processes=2, results="none")
    assert launcher.launch(actions.rank, (), {}, spec) is None


def test_tensors_come_back_detached_by_value(launcher):
    result = launcher.launch(tensors, (), {}, TWO)
    assert result["loss"] == 12.0
    assert not result["loss"].requires_grad
    assert isinstance(result["weight"], torch.nn.Parameter)
    assert result["half"].dtype is torch.bfloat16
    assert result["view"].untyped_storage().nbytes() == 24
    assert not any(tensor.is_shared() for tensor in result.values())


def test_large_results_fit_through_the_pipe(forkserver):
    first, second = forkserver.launch(lambda: torch.ones(5_000_000), (), {}, ALL)
    assert first.sum() == 5_000_000
    assert second.sum() == 5_000_000


def add_one(model, values):
    with torch.no_grad():
        model[0].weight.add_(1.0)
    for value in values.values():
        value.add_(1)
    is_tied = model[0].weight is model[1].weight
    return is_tied, {"weight": model[1].weight, **values}


def test_tensors_travel_to_ranks_and_back_as_copies(forkserver):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    values = {
        "transposed": torch.arange(6).view(2, 3).T,
        "half": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64),
        "empty": torch.empty(0, 2),
    }
    before = copy.deepcopy((model.state_dict(), values))
    results = forkserver.launch(add_one, (model, values), {}, ALL)
    for is_tied, result in results:
        assert is_tied
        assert torch.equal(result["weight"], model[0].weight + 1)
        for name, value in values.items():
            assert torch.equal(result[name], value + 1)
            assert result[name].dtype is value.dtype
            assert result[name].stride() == value.stride()
    torch.testing.assert_close((model.state_dict(), values), before)


def test_closures_and_lambdas_travel(launcher):
    offset = 5
    result = launcher.launch(lambda value: value + offset, (1,), {}, TWO)
    assert result == 6


def test_an_instance_of_a_local_class_comes_back(forkserver):
    class Result:
        def __init__(self, value):
            self.value = value

    result = forkserver.launch(lambda: Result(4), (), {}, TWO)
    assert result.value == 4


def test_each_rank_is_a_new_process_that_knows_its_world(launcher):
    reports = launcher.launch(report, (), {}, ALL)
    assert len(reports) == 2
    for rank, report_of_rank in enumerate(reports):
        world = report_of_rank["world"]
        assert world.rank == rank
        assert world.local_rank == rank
        assert world.world_size == 2
        assert world.local_world_size == 2
        assert world.store.startswith("file:///")
    pids = {os.getpid(), reports[0]["pid"], reports[1]["pid"]}
    assert len(pids) == 3


def test_ranks_see_the_environment_of_this_moment(launcher, monkeypatch, tmp_path):
    launcher.launch(actions.rank, (), {}, TWO)
    monkeypatch.setenv("COLOUR", "green")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "argv", ["changed", "--x"])
    result = launcher.launch(report, (), {}, TWO)
    assert result["colour"] == "green"
    assert result["directory"] == str(tmp_path)
    assert os.getcwd() == str(tmp_path)
    assert str(tmp_path / "modules") in result["path"]
    assert result["arguments"] == ["changed", "--x"]


def test_settings_of_the_user_win(launcher, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    result = launcher.launch(report, (), {}, TWO)
    assert result["interface"] == "eth7"
    assert result["omp"] == "3"


def test_the_store_is_in_no_folder_and_goes_away(launcher, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def look():
        store = Path(os.environ["FABRIC_STORE"].removeprefix("file://"))
        return store, store.exists(), os.listdir(tmp_path)

    store, existed, files = launcher.launch(look, (), {}, TWO)
    assert existed
    assert files == []
    assert not store.exists()


def test_output_of_ranks_goes_where_that_of_the_parent_goes(forkserver, capfd):
    forkserver.launch(lambda: os.write(1, b"hello\n"), (), {}, TWO)
    output = capfd.readouterr().out
    assert output.split() == ["hello", "hello"]


def test_a_second_forkserver_launch_is_fast_and_uses_fresh_processes(forkserver):
    def mark():
        was_marked = hasattr(torch, "_a_mark_of_this_test")
        torch._a_mark_of_this_test = True
        return was_marked, os.getpid(), os.getppid()

    first_was_marked, first_pid, first_server = forkserver.launch(mark, (), {}, TWO)
    second_was_marked, second_pid, second_server = forkserver.launch(mark, (), {}, TWO)
    assert not first_was_marked
    assert not second_was_marked
    assert first_pid != second_pid
    assert first_server == second_server


def test_garbage_collections_of_a_served_rank_leave_out_what_the_server_loaded(forkserver):
    def count_objects():
        # The server collects no garbage while it loads modules.
        assert gc.isenabled()
        return gc.get_freeze_count(), len(gc.get_objects())

    frozen, tracked = forkserver.launch(count_objects, (), {}, TWO)
    assert frozen > 100_000
    assert tracked < 100_000


# In test_testing_pool.py, a fork server that was killed is replaced.
def test_a_fork_server_that_does_not_answer_in_time_is_ended(monkeypatch):
    server = ForkServer(forkserver_main)
    monkeypatch.setattr("fabric.launchers.function.fork_server", lambda: server)
    monkeypatch.setattr("fabric.launchers.fork_server._START_TIMEOUT", 0)
    children = psutil.Process().children()
    with pytest.raises(UsageError, match="the fork server does not start"):
        LAUNCHERS["forkserver"].launch(os.getpid, (), {}, TWO)
    assert psutil.Process().children() == children


def test_two_threads_may_launch_at_once(forkserver):
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(forkserver.launch, actions.reduce, (1.0,), {}, TWO)
        second = pool.submit(forkserver.launch, actions.reduce, (2.0,), {}, TWO)
        assert first.result() == 3.0
        assert second.result() == 5.0


def state_of_this_process():
    """Return the signal handlers, the blocked signals, and the number of frozen objects."""
    handlers = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        handlers.append(signal.getsignal(number))
    return handlers, signal.pthread_sigmask(signal.SIG_BLOCK, ()), gc.get_freeze_count()


def test_a_launch_leaves_the_launching_process_as_it_was():
    before = state_of_this_process()
    LAUNCHERS["fork"].launch(os.getpid, (), {}, TWO)
    assert state_of_this_process() == before


def test_fork_after_a_parallel_operation_does_not_deadlock():
    def multiply():
        product = torch.ones(900, 900) @ torch.ones(900, 900)
        return product[0, 0].item()

    torch.set_num_threads(4)
    assert multiply() == 900.0
    results = LAUNCHERS["fork"].launch(multiply, (), {}, ALL)
    assert results == [900.0, 900.0]


FORK_AFTER_BACKWARD = """
import torch
from fabric import Fabric

def gradient(fabric=None):
    weight = torch.ones(300, 300, requires_grad=True)
    (weight @ weight).sum().backward()
    return weight.grad[0, 0].item()

torch.set_num_threads(2)
print(gradient())
print(Fabric(accelerator="cpu", devices=2, strategy="ddp_fork").launch(gradient))
"""


def test_fork_after_a_backward_can_run_a_backward():
    # In a process of its own. Once torch has started threads for the gradients of some operators,
    # such as nested backward passes, it refuses any backward pass in a forked process.
    command = [sys.executable, "-c", FORK_AFTER_BACKWARD]
    process = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == ["600.0", "600.0"]


class Garbage:
    """An object in a cycle, which writes the process that collects it into a file."""

    def __init__(self, path):
        self.path = path
        self.cycle = self

    def __del__(self):
        self.path.write_text(str(os.getpid()))


def test_a_forked_rank_does_not_collect_the_garbage_of_its_parent(tmp_path):
    gc.collect()
    gc.disable()
    try:
        collected = tmp_path / "collected"
        Garbage(collected)
        LAUNCHERS["fork"].launch(gc.collect, (), {}, TWO)
        assert not collected.exists()
    finally:
        gc.enable()


def test_fork_needs_no_pickling():
    lock = threading.Lock()
    result = LAUNCHERS["fork"].launch(lambda: lock.locked(), (), {}, TWO)
    assert result is False


def generator():
    yield


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_an_argument_that_cannot_be_pickled_is_named(method):
    argument = {"deep": [1, generator()]}
    with pytest.raises(ArgumentTypeError, match=r"args\[0\]\['deep'\]\[1\] is a generator"):
        LAUNCHERS[method].launch(print, (argument,), {}, TWO)


def test_a_variable_of_a_function_that_cannot_be_pickled_is_named(forkserver):
    lock = threading.Lock()

    def under_lock():
        return [lock.locked() for _ in range(2)]

    with pytest.raises(ArgumentTypeError, match="lock, used by under_lock") as failure:
        forkserver.launch(lambda: under_lock(), (), {}, TWO)
    assert 'launcher="fork"' in str(failure.value)


def torch_settings():
    x = torch.ones(1, requires_grad=True)
    return (x + 1).requires_grad, x.dtype, torch.get_float32_matmul_precision()


def test_settings_of_torch_reach_the_ranks(launcher):
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    try:
        with torch.no_grad():
            assert launcher.launch(torch_settings, (), {}, TWO) == (False, torch.float64, "high")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
    assert launcher.launch(torch_settings, (), {}, TWO) == (True, torch.float32, "highest")


def test_a_result_that_cannot_be_pickled_is_named(launcher):
    with pytest.raises(RankFailedError, match=r"result\['deep'\]\[1\] is a generator") as failure:
        launcher.launch(lambda: {"deep": [1, generator()]}, (), {}, TWO)
    assert failure.value.exit_code == 1


def test_a_call_instead_of_a_function_is_refused(launcher):
    with pytest.raises(ArgumentTypeError, match=r"launch\(train, x\)"):
        launcher.launch(actions, (), {}, TWO)


def test_inline_runs_here_and_returns_the_very_object():
    inline = InlineLauncher()
    argument = object()
    result = inline.launch(lambda value: value, (argument,), {}, LaunchSpec(num_processes=1))
    assert result is argument
    assert inline.launch(None, (), {}, TWO) is None


def test_popen_does_not_launch_from_within_a_rank(monkeypatch):
    monkeypatch.setenv("FABRIC_STORE", "file:///nowhere/store")
    with pytest.raises(UsageError, match="without end"):
        LAUNCHERS["popen"].check(TWO)


def test_unknown_sizes_are_refused():
    with pytest.raises(ConfigurationError, match="num_processes >= 1"):
        LaunchSpec(num_processes=0)


def test_launch_spec_is_plain_data():
    assert pickle.loads(pickle.dumps(ALL)) == ALL


def test_launch_at_a_prompt_asks_for_a_function(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(UsageError, match=r"fabric\.launch\(train\)") as caught:
        Fabric(accelerator="cpu", devices=2).launch()
    assert "popen" not in str(caught.value)

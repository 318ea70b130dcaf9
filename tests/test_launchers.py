"""The launchers that run a function: results, environments, rendezvous, and functions that travel by value."""

import gc
import os
import pickle
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import torch

from fabric import Fabric
from fabric.errors import ArgumentTypeError, ConfigurationError, RankFailedError, UsageError
from fabric.launchers import LAUNCHERS, InlineLauncher, LaunchSpec
from fabric.world import World

sys.path.insert(0, str(Path(__file__).parent / "scripts" / "launchers"))
import actions

pytestmark = pytest.mark.timeout(60)
TWO = LaunchSpec(num_processes=2)
ALL = LaunchSpec(num_processes=2, results="all")


# One test below runs spawn in `make test`: it starts two interpreters that import torch, each time.
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
    assert launcher.launch(actions.reduce, (), {"value": 10.0}, TWO) == 21.0


def test_spawned_ranks_meet_at_the_private_store():
    assert LAUNCHERS["spawn"].launch(actions.reduce, (), {"value": 10.0}, ALL) == [21.0, 21.0]


def test_all_results_come_back_by_rank(launcher):
    assert launcher.launch(actions.rank, (), {}, LaunchSpec(num_processes=3, results="all")) == [
        0,
        1,
        2,
    ]


def test_no_result_is_none(launcher):
    assert (
        launcher.launch(actions.rank, (), {}, LaunchSpec(num_processes=2, results="none")) is None
    )


def test_tensors_come_back_detached_by_value(launcher):
    result = launcher.launch(tensors, (), {}, TWO)
    assert result["loss"] == 12.0
    assert not result["loss"].requires_grad
    assert isinstance(result["weight"], torch.nn.Parameter)
    assert result["half"].dtype is torch.bfloat16
    assert result["view"].untyped_storage().nbytes() == 24
    assert not any(tensor.is_shared() for tensor in result.values())


def test_large_results_fit_through_the_pipe(forkserver):
    ones = forkserver.launch(lambda: torch.ones(5_000_000), (), {}, ALL)
    assert [tensor.sum() for tensor in ones] == [5_000_000, 5_000_000]


def test_closures_and_lambdas_travel(launcher):
    offset = 5
    assert launcher.launch(lambda value: value + offset, (1,), {}, TWO) == 6


def test_an_instance_of_a_local_class_comes_back(forkserver):
    class Result:
        def __init__(self, value):
            self.value = value

    assert forkserver.launch(lambda: Result(4), (), {}, TWO).value == 4


def test_each_rank_knows_its_place(launcher):
    reports = launcher.launch(report, (), {}, ALL)
    assert [r["world"].rank for r in reports] == [r["world"].local_rank for r in reports] == [0, 1]
    assert (
        {r["world"].world_size for r in reports}
        == {r["world"].local_world_size for r in reports}
        == {2}
    )
    assert all(r["world"].store.startswith("file:///") for r in reports)
    assert len({r["pid"] for r in reports} | {os.getpid()}) == 3


def test_ranks_see_the_environment_of_this_moment(launcher, monkeypatch, tmp_path):
    launcher.launch(actions.rank, (), {}, TWO)
    monkeypatch.setenv("COLOUR", "green")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "argv", ["changed", "--x"])
    result = launcher.launch(report, (), {}, TWO)
    assert result["colour"] == "green"
    assert result["directory"] == os.getcwd() == str(tmp_path)
    assert str(tmp_path / "modules") in result["path"]
    assert result["arguments"] == ["changed", "--x"]


def test_settings_of_the_user_win(launcher, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    result = launcher.launch(report, (), {}, TWO)
    assert (result["interface"], result["omp"]) == ("eth7", "3")


def test_the_store_is_in_no_folder_and_goes_away(launcher, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def look():
        store = Path(os.environ["FABRIC_STORE"].removeprefix("file://"))
        return store, store.exists(), os.listdir(tmp_path)

    store, existed, files = launcher.launch(look, (), {}, TWO)
    assert (existed, files) == (True, [])
    assert not store.exists()


def test_output_of_ranks_goes_where_that_of_the_parent_goes(forkserver, capfd):
    forkserver.launch(lambda: os.write(1, b"hello\n"), (), {}, TWO)
    assert capfd.readouterr().out.split() == ["hello", "hello"]


def test_a_second_forkserver_launch_is_fast_and_uses_fresh_processes(forkserver):
    def mark():
        was_here = hasattr(torch, "_a_mark_of_this_test")
        torch._a_mark_of_this_test = True
        return was_here, os.getpid(), os.getppid()

    first, second = (forkserver.launch(mark, (), {}, TWO) for _ in range(2))
    assert not first[0]
    assert not second[0]
    assert first[1] != second[1]
    assert first[2] == second[2]


def test_garbage_collections_of_a_served_rank_leave_out_what_the_server_loaded(forkserver):
    frozen, seen = forkserver.launch(
        lambda: (gc.get_freeze_count(), len(gc.get_objects())), (), {}, TWO
    )
    assert frozen > 100_000 > seen


def test_a_killed_fork_server_is_replaced(forkserver):
    server = forkserver.launch(os.getppid, (), {}, TWO)
    process = psutil.Process(server)
    process.kill()
    assert forkserver.launch(os.getppid, (), {}, TWO) != server


def test_two_threads_may_launch_at_once(forkserver):
    results = []
    threads = [
        threading.Thread(
            target=lambda v=v: results.append(forkserver.launch(actions.reduce, (v,), {}, TWO))
        )
        for v in (1.0, 2.0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(results) == [3.0, 5.0]


def test_fork_after_a_parallel_operation_does_not_deadlock():
    torch.set_num_threads(4)
    (torch.rand(1000, 1000) @ torch.rand(1000, 1000)).sum().item()
    result = LAUNCHERS["fork"].launch(
        lambda: (torch.ones(900, 900) @ torch.ones(900, 900))[0, 0].item(), (), {}, ALL
    )
    assert result == [900.0, 900.0]


def test_fork_after_a_backward_can_run_a_backward():
    def gradient():
        weight = torch.ones(300, 300, requires_grad=True)
        (weight @ weight).sum().backward()
        return weight.grad[0, 0].item()

    torch.set_num_threads(2)
    assert gradient() == 600.0
    assert LAUNCHERS["fork"].launch(gradient, (), {}, TWO) == 600.0


class Garbage:
    """Reaches itself, and tells where it was collected."""

    def __init__(self, path):
        self.path = path
        self.itself = self

    def __del__(self):
        self.path.write_text(str(os.getpid()))


def test_a_forked_rank_does_not_collect_the_garbage_of_its_parent(tmp_path):
    gc.collect()
    gc.disable()
    try:
        Garbage(tmp_path / "collected")
        LAUNCHERS["fork"].launch(gc.collect, (), {}, TWO)
        assert not (tmp_path / "collected").exists()
    finally:
        gc.enable()


def test_fork_needs_no_pickling():
    lock = threading.Lock()
    assert LAUNCHERS["fork"].launch(lambda: lock.locked(), (), {}, TWO) is False


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_an_argument_that_cannot_be_pickled_is_named(method):
    with pytest.raises(ArgumentTypeError, match=r"args\[0\]\['deep'\]\[1\] is a generator"):
        LAUNCHERS[method].launch(print, ({"deep": [1, (x for x in ())]},), {}, TWO)


def test_a_result_that_cannot_be_pickled_is_named(launcher):
    with pytest.raises(RankFailedError, match=r"result\['deep'\]\[1\] is a generator") as failure:
        launcher.launch(lambda: {"deep": [1, (x for x in ())]}, (), {}, TWO)
    assert failure.value.exit_code == 1


def test_a_call_instead_of_a_function_is_refused(launcher):
    with pytest.raises(ArgumentTypeError, match=r"launch\(train, x\)"):
        launcher.launch(actions, (), {}, TWO)


def test_inline_runs_here_and_returns_the_very_object():
    thing = object()
    assert (
        InlineLauncher().launch(lambda value: value, (thing,), {}, LaunchSpec(num_processes=1))
        is thing
    )
    assert InlineLauncher().launch(None, (), {}, TWO) is None


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
    with pytest.raises(UsageError, match=r"fabric\.launch\(main") as caught:
        Fabric(accelerator="cpu", devices=2).launch()
    assert "popen" not in str(caught.value)

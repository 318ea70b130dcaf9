"""Paths, states and ranks with which saving and loading go wrong."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.errors import CheckpointError
from tests.judged_cases import (
    WAITS,
    batch,
    case,
    cases_of,
    judge,
    net,
    parallel_case,
    set_up_net,
    step,
    value_on,
)


@parallel_case(refused=True)
def an_object_store_without_its_package(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    fabric.save("s3://bucket/x.pt", {"model": model})


@parallel_case()
def a_file_by_its_url(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    path = f"file://{os.getcwd()}/x"
    fabric.save(path, {"model": model})
    fabric.load(path, {"model": model})
    assert os.path.exists("x")


@case(strategy="fsdp", refused=True)
def shards_in_the_memory_of_one_process(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    fabric.save("memory://a/b", {"model": model})


@parallel_case(refused=True)
def no_name(fabric: Fabric, rank: int) -> None:
    fabric.save("", {"a": 1})


@parallel_case(refused=True)
def a_name_that_is_too_long(fabric: Fabric, rank: int) -> None:
    fabric.save("x" * 300, {"a": 1})


@parallel_case(refused=True)
def a_list_that_holds_itself(fabric: Fabric, rank: int) -> None:
    ring: list[Any] = []
    ring.append(ring)
    fabric.save("x", {"ring": ring})


@case()
def a_bare_state_dict(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    fabric.save("x", model.state_dict())
    fabric.barrier()
    state_dict = torch.load("x", weights_only=True)
    nn.Sequential.load_state_dict(net(), state_dict)
    fabric.load_raw("x", model)


@case(strategy="fsdp")
def a_whole_state_dict(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    actual = fabric.get_state_dict(model)
    if rank > 0:
        return
    for name, expected in net().state_dict().items():
        assert torch.equal(actual[name], expected)


# -- ranks that differ, and files that are damaged ------------------------------------------------


@parallel_case(refused=True, waits=True)
def a_save_on_one_rank(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    if rank == 0:
        fabric.save("x", {"model": model})
        fabric.all_reduce(1, reduce_op="sum")


@parallel_case(refused=True, waits=True)
def a_load_on_one_rank(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    fabric.save("x", {"model": model})
    if rank == 0:
        fabric.load("x", {"model": model})
        fabric.all_reduce(1, reduce_op="sum")


@case(refused=True, strategy=WAITS["fsdp"])
def a_state_dict_on_one_rank(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    if rank == 0:
        fabric.get_state_dict(model)
    fabric.all_reduce({"loss": 1.0})


@case()
def other_names_in_the_state(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    name_on_rank = value_on(rank, "net", "model")
    fabric.save("x", {name_on_rank: model, "step": rank})
    # A single file always holds the state of rank 0.
    state = {"net": model, "step": -1}
    fabric.load("x", state)
    assert state["step"] == 0


@case(strategy="fsdp", refused=True)
def other_names_of_shards(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    name_on_rank = value_on(rank, "net", "model")
    fabric.save("x", {name_on_rank: model})


@parallel_case()
def other_paths(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    fabric.save(f"run-{rank}", {"model": model})
    fabric.barrier()
    # The path of rank 0 counts: scripts put the time into their paths.
    assert os.listdir(".") == ["run-0"]
    fabric.load("run-0", {"model": model})


@parallel_case(refused=True)
def paths_of_which_one_does_not_exist(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    fabric.save("x", {"model": model})
    path_on_rank = value_on(rank, "y", "x")
    fabric.load(path_on_rank, {"model": model})


@parallel_case(refused=True)
def other_names_that_are_loaded(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    fabric.save("x", {"model": model, "step": 1})
    name_on_rank = value_on(rank, "epoch", "step")
    fabric.load("x", {"model": model, name_on_rank: 0})


@parallel_case(refused=True)
def another_shape_on_one_rank(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    fabric.save("x", {"model": model, "table": torch.ones(3)})
    wider_net = nn.Sequential(
        nn.Linear(4, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )
    wider = fabric.setup(wider_net)
    before = [parameter.detach().clone() for parameter in wider.parameters()]
    try:
        fabric.load("x", {"model": wider})
    finally:
        assert all(map(torch.equal, before, wider.parameters()))


@parallel_case(refused=True)
def what_cannot_be_saved_on_one_rank(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    fabric.save("x", {"model": model, "step": 1})
    extra: Any = value_on(rank, 1, object())
    try:
        fabric.save("x", {"model": model, "extra": extra})
    finally:
        state = {"step": 0}
        fabric.load("x", state)
        assert state == {"step": 1}


@parallel_case()
def a_folder_where_no_rank_may_write(fabric: Fabric, rank: int) -> None:
    if rank == 0:
        Path("closed").write_text("a file")
    fabric.barrier()
    model = fabric.setup(net())
    try:
        fabric.save("closed/deep/x", {"model": model})
    except CheckpointError:
        return
    raise AssertionError("it was written")


@parallel_case()
def two_saves_beside_the_loop_at_once(fabric: Fabric, rank: int) -> None:
    _, model, optimizer = set_up_net(fabric)
    for number in range(3):
        fabric.save("x", {"model": model, "step": number}, async_=True)
        step(fabric, model, optimizer, batch(number))
    fabric.save("x", {"model": model, "step": 3})
    state = {"step": -1}
    fabric.load("x", state)
    assert state == {"step": 3}


@parallel_case()
def a_state_that_changes_while_it_is_saved(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    table = torch.zeros(100_000)
    log = [1]
    state = {"model": model, "table": table, "log": log}
    pending = fabric.save("x", state, async_=True)
    table.fill_(7)
    log.append(2)
    pending.wait()
    loaded_state = {"table": torch.ones(100_000), "log": []}
    fabric.load("x", loaded_state)
    assert not loaded_state["table"].any()
    assert loaded_state["log"] == [1]


@parallel_case(refused=True)
def a_file_that_was_cut(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    fabric.save("x", {"model": model})
    fabric.barrier()
    if rank == 0:
        path = Path("x")
        if path.is_dir():
            path = min(path.glob("rank-00000*"))
        path.write_bytes(path.read_bytes()[:-20])
    fabric.barrier()
    fabric.load("x", {"model": model})


@parallel_case()
def the_working_directory_is_gone(fabric: Fabric, rank: int) -> None:
    here = Path.cwd()
    working_directory = here / str(rank)
    working_directory.mkdir()
    os.chdir(working_directory)
    working_directory.rmdir()
    model = fabric.setup(net())
    fabric.save(here / "x", {"model": model})
    fabric.load(here / "x", {"model": model})
    try:
        fabric.save("x", {"model": model})
    except OSError:  # raised by Python itself
        return
    finally:
        os.chdir(here)
    raise AssertionError("it was written nowhere")


@parallel_case(refused=True)
def an_optimizer_that_is_loaded_into_another(fabric: Fabric, rank: int) -> None:
    module, model, optimizer = set_up_net(fabric, 2)
    fabric.save("x", {"model": model, "optimizer": optimizer})
    groups = [
        {"params": list(module[0].parameters())},
        {"params": list(module[2].parameters())},
    ]
    two_groups = torch.optim.SGD(groups, lr=0.3, momentum=0.9)
    two_groups = fabric.setup_optimizers(two_groups)
    fabric.load("x", {"model": model, "optimizer": two_groups})


@parallel_case()
def a_file_that_fabric_did_not_write(fabric: Fabric, rank: int) -> None:
    model = fabric.setup(net())
    if rank == 0:
        torch.save(net().state_dict(), "raw.pt")
        torch.save({"model": net()}, "code.pt")
        Path("text.pt").write_text("not a checkpoint")
        Path("none.pt").touch()
    fabric.barrier()
    fabric.load_raw("raw.pt", model)
    for name in ("code.pt", "text.pt", "none.pt"):
        try:
            fabric.load(name, {"model": model})
        except CheckpointError:
            continue
        raise AssertionError(f"{name} was loaded")


@pytest.mark.parametrize("name", cases_of(__name__, slow=6))
def test_a_case_ends_right_or_with_an_error_of_fabric_and_leaves_nothing(name: str) -> None:
    assert judge(name).problems == []

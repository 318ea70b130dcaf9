"""Async saves write the state of the moment of the call, one at a time, and lose no error."""

import copy
import gc
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.checkpoint import FullCheckpoint, ShardedCheckpoint
from fabric.checkpoint.async_save import StagingBuffers
from fabric.errors import ArgumentTypeError, CheckpointError
from fabric.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from tests.models import Net
from tests.ranks import outcome, run_in_ranks

# A path in a file system in which nobody can make a folder.
UNWRITABLE = Path("/proc/fabric/state.pt")


class Gated:
    """A format that writes nothing before its gate is open, and notes when saves begin and end."""

    gate: threading.Event  # set in the process that saves, since an event cannot be pickled

    def __init__(self) -> None:
        self.events: list[str] = []

    def save(self, state: Mapping[str, Any], path: Path) -> None:
        self.events.append(f"{path.stem} begins")
        assert self.gate.wait(150)
        FullCheckpoint().save(state, path)
        self.events.append(f"{path.stem} ends")

    def load(self, path: Path) -> dict[str, Any]:
        return FullCheckpoint().load(path)

    def remove(self, path: Path) -> None:
        FullCheckpoint().remove(path)

    def wait(self) -> None:
        self.events.append("all is on the disk")


class GatedShards(ShardedCheckpoint):
    """A format of shards, of which this rank writes none before its gate is open."""

    gate: threading.Event

    def save(
        self, state: Mapping[str, Any], path: Path, communicator: Any = None, per_rank: Any = None
    ) -> None:
        assert self.gate.wait(150)
        ShardedCheckpoint.save(self, state, path, communicator, per_rank)


def single(io: Any = None) -> Fabric:
    return Fabric(
        strategy=SingleDeviceStrategy(accelerator="cpu", checkpoint_io=io), environment="none"
    )


def trained(fabric: Fabric) -> tuple[Any, Any]:
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    model, optimizer = fabric.setup(net, optimizer)
    step(fabric, model, optimizer)
    return model, optimizer


def step(fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.ones(2, 4)).pow(2).mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def test_the_file_is_that_of_a_save_at_once_whatever_the_optimizer_does_meanwhile(
    tmp_path: Path,
) -> None:
    io = Gated()
    io.gate = threading.Event()
    with single(io) as fabric:
        model, optimizer = trained(fabric)
        state = {
            "model": model,
            "optimizer": optimizer,
            "notes": [torch.arange(6).view(2, 3).t(), {"best": 0.5}],
        }
        for name in ("first.pt", "second.pt"):
            FullCheckpoint().save({}, tmp_path / name)
            io.gate.clear()
            pending = fabric.save(tmp_path / name, state, async_=True)
            assert not pending.done()
            io.gate.set()
            fabric.save(tmp_path / "at_once.pt", state)
            assert pending.done()
            io.gate.clear()
            again = fabric.save(tmp_path / name, state, async_=True)
            step(fabric, model, optimizer)
            state["notes"][0].add_(1)
            state["notes"][1]["best"] += 1
            assert not again.done()
            io.gate.set()
            again.wait()
            assert (tmp_path / name).read_bytes() == (tmp_path / "at_once.pt").read_bytes()


def test_one_save_is_under_way_at_a_time_and_a_load_waits_for_it(tmp_path: Path) -> None:
    io = Gated()
    io.gate = threading.Event()
    with single(io) as fabric:
        first = fabric.save(tmp_path / "a.pt", {"step": 1}, async_=True)
        threading.Timer(0.1, io.gate.set).start()
        second = fabric.save(tmp_path / "b.pt", {"step": 2}, async_=True)
        assert first.done()
        assert fabric.load(tmp_path / "b.pt") == {"step": 2}
        assert second.done()
        assert second.exception() is None
        third = fabric.save(tmp_path / "c.pt", {"step": 3}, async_=True)
    assert third.done(), "the end of the job waits for the last save"
    expected = ["a begins", "a ends", "b begins", "b ends", "c begins", "c ends"]
    expected += ["all is on the disk"]  # the end of the job waits for a format that writes later
    assert io.events == expected
    assert FullCheckpoint().load(tmp_path / "c.pt")["step"] == 3


def fail(fabric: Fabric) -> Any:
    """Begin a save whose folder cannot be made, which is known when it is written."""
    return fabric.save(UNWRITABLE, {"step": 1}, async_=True)


def test_what_goes_wrong_is_raised_once_by_what_comes_next(tmp_path: Path) -> None:
    with single() as fabric:
        fabric.save(tmp_path / "s.pt", {"step": 1})
        for later in (
            lambda: fabric.save(tmp_path / "s.pt", {"step": 2}),
            lambda: fabric.load(tmp_path / "s.pt"),
            lambda: fabric.load_raw(tmp_path / "s.pt", nn.Linear(1, 1)),
        ):
            fail(fabric)
            text = outcome(later)
            assert "it could not be written" in text
            assert "began earlier" in text
            assert fabric.load(tmp_path / "s.pt") == {"step": 1}
        assert "it could not be written" in outcome(fail(fabric).wait)
        assert isinstance(fail(fabric).exception(), CheckpointError)
        fabric.save(tmp_path / "s.pt", {"step": 3})


def test_what_goes_wrong_last_is_raised_at_the_end_but_not_in_place_of_another_error() -> None:
    with pytest.raises(CheckpointError, match="could not be written"), single() as fabric:
        fail(fabric)
    # The block needs both statements.
    with pytest.raises(LookupError) as raised, single() as fabric:  # noqa: PT012
        fail(fabric)
        raise LookupError("of the user")
    assert "it could not be written" in raised.value.__notes__[0]


SCRIPT = """
import atexit, sys
atexit.register(print, "an exit handler", file=sys.stderr, flush=True)
from fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=1, environment="none")
fabric.save(sys.argv[1], {"step": 1}, async_=True)
fabric.save(sys.argv[2], {"step": 1}, async_=True)
"""


def run_script(first: Path, second: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(first), str(second)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_a_script_that_just_ends_finishes_its_save(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    completed = run_script(path, path)
    assert completed.returncode == 0
    assert completed.stderr == "an exit handler\n"
    assert FullCheckpoint().load(path)["step"] == 1


def test_a_script_that_just_ends_reports_that_its_save_failed(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    completed = run_script(path, UNWRITABLE)
    assert completed.returncode == 120
    assert "CheckpointError" in completed.stderr
    assert "it could not be written" in completed.stderr
    assert completed.stderr.count("an exit handler\n") == 1
    assert FullCheckpoint().load(path)["step"] == 1


def save_beside_the_loop(fabric: Fabric, path: Path) -> Any:
    io: Any = fabric.strategy.checkpoint_io
    io.gate = threading.Event()
    model, optimizer = trained(fabric)
    for number in range(2):
        io.gate.clear()
        before = copy.deepcopy(fabric.strategy.get_module_state_dict(model._fabric_prepared))
        state = {"model": model, "optimizer": optimizer, "step": number}
        pending = fabric.save(path, state, async_=True)
        step(fabric, model, optimizer)
        is_done_on_ranks = fabric.all_gather(torch.tensor(pending.done()))
        assert not is_done_on_ranks.any()
        io.gate.set()
        pending.wait()
        loaded = {"model": model, "optimizer": optimizer, "step": -1}
        fabric.load(path, loaded)
        assert loaded["step"] == number
        after = fabric.strategy.get_module_state_dict(model._fabric_prepared)
        for name, value in before.items():
            assert torch.equal(after[name], value)
        step(fabric, model, optimizer)
    background = fabric._ensure_session("").runtime.background_communicator
    return background("saves") is background("saves")


@pytest.mark.parametrize(
    "strategy",
    [
        DDPStrategy(checkpoint_io=Gated(), start_method="forkserver"),
        DDPStrategy(checkpoint_io=GatedShards(), start_method="forkserver"),
        FSDPStrategy(checkpoint_io=GatedShards()),
        FSDPStrategy(checkpoint_io=Gated()),
    ],
    ids=["full", "shards", "fsdp shards", "fsdp full"],
)
def test_ranks_train_and_talk_while_a_save_is_under_way_and_what_was_there_before_is_loaded(
    strategy: Any, tmp_path: Path
) -> None:
    is_checked = isinstance(strategy.checkpoint_io, GatedShards)
    results = run_in_ranks(
        save_beside_the_loop, tmp_path / "s", strategy=strategy, check_collectives=is_checked
    )
    assert results == [True, True]


def fail_in_ranks(fabric: Fabric, folder: Path) -> dict[str, str]:
    def fail_on_rank_1(name: str, value: Any) -> bool:
        if fabric.global_rank == 1:
            raise LookupError("no such prefix")
        return True

    texts = {}
    path = folder / "s.pt"
    fabric.save(path, {"step": 1})
    state = {"model": fabric.setup(Net())}
    filters = {"model": fail_on_rank_1}
    texts["filter"] = outcome(lambda: fabric.save(path, state, filter=filters, async_=True))
    pending = fail(fabric)
    # Rank 0 learns of the error from the handle, and rank 1 from the next call. Both ranks raise in
    # the next call.
    if fabric.global_rank == 0:
        texts["wait"] = outcome(pending.wait)
    texts["next save"] = outcome(lambda: fabric.save(path, {"step": 2}))
    assert fabric.load(path)["step"] == 1
    return texts


def test_every_rank_raises_what_goes_wrong_on_one(tmp_path: Path) -> None:
    first, second = run_in_ranks(fail_in_ranks, tmp_path)
    assert "it failed on rank 1 of 2: LookupError" in first["filter"]
    assert second["filter"].startswith("LookupError")
    assert "it could not be written" in first["wait"]
    assert "it failed on rank 1 of 2: CheckpointError" in first["next save"]
    assert "it failed on rank 0 of 2: CheckpointError" in second["next save"]


def test_a_staged_copy_keeps_the_kinds_of_tensors_and_plain_values() -> None:
    tensors = {
        "complex": torch.ones(2, dtype=torch.complex64).conj() * 1j,
        "conjugate": torch.tensor([1j]).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.empty(0, 3),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "leaf": torch.ones(1, requires_grad=True),
    }
    plain = [1, (2, {3}), b"4", torch.float16]
    parameter = nn.Parameter(torch.ones(2))
    state = {"tensors": tensors, "plain": plain, "parameter": parameter}
    copied = StagingBuffers().copy(state)
    assert copied["plain"] == plain
    assert isinstance(copied["parameter"], nn.Parameter)
    assert copied["tensors"]["leaf"].requires_grad
    for name, tensor in tensors.items():
        assert torch.equal(copied["tensors"][name].to_dense(), tensor.to_dense()), name


def test_a_staged_copy_does_not_change_with_the_state_and_keeps_tensors_tied() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = OrderedDict[str, Any](weight=base, tied=base, view=base[:, 1])
    vars(state)["_metadata"] = {"": {"version": 1}}  # as torch does
    copied = StagingBuffers().copy({"model": state})["model"]
    base.zero_()
    assert type(copied) is OrderedDict
    assert vars(copied) == vars(state)
    assert torch.equal(copied["view"], torch.tensor([1.0, 5.0, 9.0]))
    copied["weight"].zero_()
    assert not copied["tied"].any()
    assert not copied["view"].any()


def test_the_memory_of_a_staged_copy_is_kept_for_the_next_one_of_the_same_size() -> None:
    buffers = StagingBuffers()

    def copy_and_free(*sizes: int) -> set[int]:
        """Return the addresses of the copies of tensors of these sizes."""
        copies = buffers.copy({"x": [torch.ones(size) for size in sizes]})
        return {tensor.data_ptr() for tensor in copies["x"]}

    addresses = copy_and_free(1000, 1000, 3000)
    assert copy_and_free(1000, 1000, 3000) == addresses
    assert len(addresses & copy_and_free(1000, 2000, 3000)) == 2


def test_a_staged_copy_after_a_failed_one_has_the_present_values() -> None:
    class Uncopyable:
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            raise TypeError("it cannot be copied")

    buffers = StagingBuffers()
    tensor = torch.zeros(3)
    with pytest.raises(TypeError, match="it cannot be copied"):
        buffers.copy({"x": tensor, "object": Uncopyable()})
    tensor.fill_(1)
    assert torch.equal(buffers.copy({"x": tensor})["x"], torch.ones(3))


def test_a_staged_copy_is_freed_without_the_garbage_collector() -> None:
    tensor = torch.ones(2)
    copied = StagingBuffers().copy({"x": tensor})
    reference_to_tensor = weakref.ref(tensor)
    reference_to_copy = weakref.ref(copied["x"])
    gc.disable()
    try:
        del tensor, copied
        assert reference_to_tensor() is None
        assert reference_to_copy() is None
    finally:
        gc.enable()


def test_what_cannot_be_copied_or_saved_is_an_error_of_the_call_or_of_the_save(
    tmp_path: Path,
) -> None:
    with single(ShardedCheckpoint()) as fabric:
        with pytest.raises(NotImplementedError, match="meta"):
            fabric.save(tmp_path / "s", {"model": nn.Linear(2, 2, device="meta")}, async_=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            torch.optim.SGD([torch.ones(1)]), lambda step: 1.0
        )
        schedule.state_dict = lambda: {"schedule": schedule.lr_lambdas}
        pending = fabric.save(tmp_path / "s", {"schedule": schedule}, async_=True)
        with pytest.raises(ArgumentTypeError, match="schedule"):
            pending.wait()
        assert list(tmp_path.iterdir()) == []


def test_copies_of_several_conjugated_tensors_do_not_share_memory() -> None:
    state = {str(i): torch.full((1024,), complex(i, i + 1)).conj() for i in range(8)}
    copied = StagingBuffers().copy(state)
    for name, tensor in state.items():
        assert torch.equal(copied[name], tensor)

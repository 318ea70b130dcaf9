"""Checkpoints through the facade, on one and on several ranks: exact resuming, and errors."""

import copy
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric._torch import full_tensor, local_tensor
from fabric.checkpoint import FullCheckpoint, ShardedCheckpoint
from fabric.errors import ArgumentTypeError, CheckpointError
from fabric.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from tests.models import Net
from tests.ranks import outcome, run_in_ranks

# An epoch has 8 batches on one rank and 4 on two: both numbers are in the middle of an epoch.
STEPS = 13
SAVED_AT = 6


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Compare tensors bit for bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@dataclass
class Run:
    """The losses of one rank, and its state at the end. ``averages`` are those of gradients."""

    losses: list[float]
    rate: float
    parameters: list[Tensor]
    averages: list[Tensor]
    scaling: str
    stream: float


def training_state(fabric: Fabric, seed: int) -> dict[str, Any]:
    """Return the objects of a training loop, with dropout and a random stream for each rank."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(4, 8),
        nn.Dropout(0.5),
        nn.Linear(8, 1),
    )
    plain_optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    plain_scheduler = StepLR(plain_optimizer, 2, 0.5)
    model, optimizer, scheduler = fabric.setup(net, plain_optimizer, scheduler=plain_scheduler)
    generator = torch.Generator().manual_seed(3)
    dataset = TensorDataset(torch.randn(24, 4, generator=generator))
    plain_loader = DataLoader(dataset, batch_size=3, shuffle=True)
    loader = fabric.setup_dataloaders(plain_loader)
    fabric.seed_everything(seed, per_rank=True)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "step": 0,
    }


def train(fabric: Fabric, path: Path, resume: bool) -> Run:
    """Train to the last step, and save in the middle, or resume from there."""
    if resume:
        state = training_state(fabric, seed=9)
        fabric.load(path, state)
    else:
        state = training_state(fabric, seed=1)
    model = state["model"]
    optimizer = state["optimizer"]
    losses = []
    while state["step"] < STEPS:
        for [x] in state["loader"]:
            error = model(x) - 1
            loss = error.pow(2).mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            state["scheduler"].step()
            state["step"] += 1
            losses.append(loss.item())
            if state["step"] == SAVED_AT and not resume:
                fabric.save(path, state)
            if state["step"] == STEPS:
                break
    parameters = [full_tensor(parameter.detach()).clone() for parameter in model.parameters()]
    averages = []
    for parameter in optimizer.param_groups[0]["params"]:
        averages.append(full_tensor(optimizer.state[parameter]["exp_avg"]).clone())
    _, _, scaling = fabric.describe().partition("loss scale")
    return Run(
        losses=losses,
        rate=optimizer.param_groups[0]["lr"],
        parameters=parameters,
        averages=averages,
        scaling=scaling,
        stream=torch.rand(1).item(),
    )


SHARDED: dict[str, Any] = {"strategy": "fsdp"}
# From three ranks on, torch's DDP sums the gradients of its first step in another order than later
# ones, unless it looks for unused parameters.
UNUSED: dict[str, Any] = {"strategy": "ddp_find_unused_parameters_true"}


SOAK = [pytest.mark.slow, pytest.mark.soak]


@pytest.mark.parametrize(
    ("ranks", "options", "precision"),
    [
        (1, {}, "32-true"),
        (1, {}, "16-mixed"),
        (2, {}, "32-true"),
        (2, {}, "16-mixed"),
        (4, SHARDED, "32-true"),
        (2, SHARDED, "16-mixed"),
        (4, UNUSED, "32-true"),
        pytest.param(2, SHARDED, "32-true", marks=SOAK),
        pytest.param(4, SHARDED, "16-mixed", marks=SOAK),
        pytest.param(4, UNUSED, "16-mixed", marks=SOAK),
    ],
)
def test_a_resumed_run_continues_bit_for_bit_in_the_middle_of_an_epoch(
    ranks: int, options: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    options = {**options, "ranks": ranks, "precision": precision}
    full_runs = run_in_ranks(train, path, False, **options)
    resumed_runs = run_in_ranks(train, path, True, **options)
    assert path.is_dir() is (options.get("strategy") == "fsdp")
    for full, resumed in zip(full_runs, resumed_runs, strict=True):
        assert resumed.losses == full.losses[SAVED_AT:]
        assert resumed.rate == full.rate
        assert resumed.scaling == full.scaling
        assert resumed.stream == full.stream
        assert_equal(resumed.parameters, full.parameters)
        # A gradient that is rounded in another way often shows in these averages alone.
        assert_equal(resumed.averages, full.averages)
    streams = {run.stream for run in full_runs}
    assert len(streams) == ranks
    has_scale = full_runs[0].scaling != ""
    assert has_scale is (precision == "16-mixed")


def test_a_run_on_one_device_resumes_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    with single() as fabric:
        full = train(fabric, path, resume=False)
    with single() as fabric:
        resumed = train(fabric, path, resume=True)
    assert resumed.losses == full.losses[SAVED_AT:]
    assert_equal(resumed.parameters, full.parameters)


def single(**options: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, environment="none", **options)


def values(net: nn.Module) -> list[float]:
    return [parameter.sum().item() for parameter in net.parameters()]


class LoadedModel(NamedTuple):
    """The values of a model after a load, and whether the random stream is unchanged."""

    values: list[float]
    has_old_stream: bool


def load_alone(fabric: Fabric, path: Path) -> LoadedModel:
    net = Net()
    model = fabric.setup(net)
    torch.manual_seed(4)
    expected = torch.rand(1)
    torch.manual_seed(4)
    fabric.load(path, {"model": model}, strict=False)
    has_old_stream = torch.equal(torch.rand(1), expected)
    return LoadedModel(values(net), has_old_stream)


def save_model(fabric: Fabric, path: Path) -> list[float]:
    torch.manual_seed(1)
    net = Net()
    model = fabric.setup(net)
    fabric.save(path, {"model": model, "epoch": 2})
    return values(net)


def test_another_number_of_ranks_loads_the_model_and_the_random_streams_of_the_saved_ranks(
    tmp_path: Path,
) -> None:
    two_ranks = tmp_path / "two.pt"
    one_rank = tmp_path / "one.pt"
    expected, _ = run_in_ranks(save_model, two_ranks)
    [alone] = run_in_ranks(load_alone, two_ranks, ranks=1)
    assert alone == LoadedModel(expected, has_old_stream=False)
    with single() as fabric:
        save_model(fabric, one_rank)
    first, second = run_in_ranks(load_alone, one_rank)
    assert first == LoadedModel(expected, has_old_stream=False)
    assert second == LoadedModel(expected, has_old_stream=True)


def save_with_filter_that_fails_on_rank_1(fabric: Fabric, path: Path) -> str:
    module = Net()
    model = fabric.setup(module)

    def keep(name: str, value: Any) -> bool:
        if fabric.global_rank == 1:
            raise LookupError("no such prefix")
        return True

    fabric.save(path, {"model": model, "epoch": 1})
    second = {"model": model, "epoch": 2}
    text = outcome(lambda: fabric.save(path, second, filter={"model": keep}))
    state = {"epoch": 0}
    fabric.load(path, state)
    assert state["epoch"] == 1
    return text


def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_old_file_survives(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.pt"
    first, second = run_in_ranks(save_with_filter_that_fails_on_rank_1, path)
    assert first.startswith("CheckpointError")
    assert "on rank 0" in first
    assert "it failed on rank 1 of 2: LookupError: no such prefix" in first
    assert second.startswith("LookupError")
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


class Fickle:
    """An object whose state cannot be read, or loaded, on rank 1."""

    def __init__(self, fabric: Fabric, fails: str = "") -> None:
        self.fails = ""
        if fabric.global_rank == 1:
            self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        if self.fails == "save":
            raise LookupError("no state here")
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails == "load":
            raise LookupError("no such state")


def fail_between_modules(fabric: Fabric, path: Path) -> list[str]:
    def keep(name: str, value: Any) -> bool:
        if fabric.global_rank == 1:
            raise LookupError("no such prefix")
        return True

    module = Net()
    first = fabric.setup(module)
    last = fabric.setup(Net())
    state = {"first": first, "between": Fickle(fabric), "last": last}
    fabric.save(path, state)
    with torch.no_grad():
        for parameter in (*first.parameters(), *last.parameters()):
            parameter.fill_(7)
    cannot_be_read = {**state, "between": Fickle(fabric, "save")}
    cannot_be_loaded = {**state, "between": Fickle(fabric, "load")}
    texts = [
        outcome(lambda: fabric.save(path, state, filter={"first": keep})),
        outcome(lambda: fabric.save(path, cannot_be_read)),
        outcome(lambda: fabric.load(path, cannot_be_loaded)),
    ]
    for parameter in (*first.parameters(), *last.parameters()):
        assert (local_tensor(parameter) == 7).all()
    return texts


@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
def test_the_users_code_may_raise_on_one_rank_between_two_modules(
    state_dict_type: Any, tmp_path: Path
) -> None:
    # No rank that gathers full states waits for the rank that raised, and no module is changed.
    strategy = FSDPStrategy(state_dict_type=state_dict_type)
    first, second = run_in_ranks(fail_between_modules, tmp_path / "s", strategy=strategy)
    for text in first:
        assert text.startswith("CheckpointError:")
        assert "LookupError: no s" in text
    for text in second:
        assert text.startswith("LookupError: no s")


def writer_that_fails(fabric: Fabric, path: Path) -> str:
    path.mkdir(exist_ok=True)
    fabric.barrier()
    return outcome(lambda: fabric.save(path, {"epoch": 1}))


def test_a_file_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for text in run_in_ranks(writer_that_fails, tmp_path / "folder"):
        assert text.startswith("CheckpointError")
        assert "folder" in text


def load_elsewhere_on_rank_1(fabric: Fabric, path: Path) -> str:
    net = Net()
    model = fabric.setup(net)
    fabric.save(path, {"model": model})
    nn.init.zeros_(net.head.bias)
    if fabric.global_rank == 1:
        path = path.with_name("elsewhere.pt")
    text = outcome(lambda: fabric.load(path, {"model": model}))
    assert net.head.bias.item() == 0
    return text


def test_a_load_that_fails_on_one_rank_fails_on_all_and_changes_nothing(tmp_path: Path) -> None:
    first, second = run_in_ranks(load_elsewhere_on_rank_1, tmp_path / "state.pt")
    assert "it failed on rank 1 of 2: CheckpointNotFoundError" in first
    assert "elsewhere.pt" in first
    assert second.startswith("CheckpointNotFoundError")


def test_a_filter_keeps_entries_and_strict_off_loads_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"

    def is_outside_of_head(name: str, value: Any) -> bool:
        return not name.startswith("head")

    with single() as fabric:
        net = Net()
        model = fabric.setup(net)
        head = net.head.bias.item()
        encoder = net.encoder.weight.detach().clone()
        fabric.save(path, {"model": model}, filter={"model": is_outside_of_head})
        nn.init.zeros_(net.encoder.weight)
        with pytest.raises(CheckpointError, match=r"head\.weight"):
            fabric.load(path, {"model": model})
        assert not net.encoder.weight.any()
        fabric.load(path, {"model": model, "epoch": 3}, strict=False)
    assert torch.equal(net.encoder.weight, encoder)
    assert net.head.bias.item() == head


def test_entries_outside_of_the_state_are_returned_and_without_a_state_all_entries(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.pt"
    with single() as fabric:
        module = Net()
        model = fabric.setup(module)
        fabric.save(path, {"model": model, "epoch": 3, "best": [0.5, 1]})
        state = {"epoch": 0}
        unused_entries = fabric.load(path, state)
        assert state == {"epoch": 3}
        assert set(unused_entries) == {"model", "best"}
        all_entries = fabric.load(path)
        assert set(all_entries) == {"model", "best", "epoch"}


def test_random_streams_stay_without_rng(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    with single() as fabric:
        fabric.save(path, {"epoch": 1})
        number = torch.rand(1)
        fabric.load(path, {"epoch": 0}, rng=False)
        assert not torch.equal(torch.rand(1), number)
        fabric.load(path, {"epoch": 0})
        assert torch.equal(torch.rand(1), number)


def load_bare(fabric: Fabric, path: Path) -> list[float]:
    net = Net()
    model = fabric.setup(net)
    fabric.load_raw(path, model)
    return values(net)


def test_a_bare_state_dict_of_plain_torch_is_loaded_raw(tmp_path: Path) -> None:
    path = tmp_path / "bare.pt"
    net = Net()
    torch.save(net.state_dict(), path)
    expected = values(net)
    results = run_in_ranks(load_bare, path)
    assert results == [expected, expected]
    with single() as fabric:
        assert load_bare(fabric, path) == expected


def test_load_raw_refuses_other_targets_and_other_files(tmp_path: Path) -> None:
    bare = tmp_path / "bare.pt"
    with_entries = tmp_path / "entries.pt"
    net = Net()
    torch.save(net.state_dict(), bare)
    with single() as fabric:
        with pytest.raises(ArgumentTypeError, match="has no state_dict"):
            fabric.load_raw(bare, {})
        fabric.save(with_entries, {"model": net})
        with pytest.raises(CheckpointError, match="a checkpoint with entries"):
            fabric.load_raw(with_entries, net)


class SuffixedCheckpoint:
    """A format of the user: the format of fabric with another suffix and a list of saves."""

    def __init__(self) -> None:
        self.saved: list[str] = []

    def save(self, state: Mapping[str, Any], path: Path) -> None:
        self.saved.append(path.name)
        FullCheckpoint().save(state, path.with_suffix(".own"))

    def load(self, path: Path) -> dict[str, Any]:
        return FullCheckpoint().load(path.with_suffix(".own"))

    def remove(self, path: Path) -> None:
        FullCheckpoint().remove(path.with_suffix(".own"))

    def wait(self) -> None:
        pass


def save_and_load(fabric: Fabric, path: Path) -> list[str]:
    """Return the names of the files that this rank has saved."""
    fabric.save(path, {"epoch": 4})
    state = {"epoch": 0}
    fabric.load(path, state)
    assert state["epoch"] == 4
    return fabric.strategy.checkpoint_io.saved


def test_a_format_of_the_users_own_is_written_by_the_first_rank(tmp_path: Path) -> None:
    strategy = DDPStrategy(start_method="forkserver", checkpoint_io=SuffixedCheckpoint())
    saved_by_ranks = run_in_ranks(save_and_load, tmp_path / "two.pt", strategy=strategy)
    assert saved_by_ranks == [["two.pt"], []]
    strategy = SingleDeviceStrategy(checkpoint_io=SuffixedCheckpoint())
    with single(strategy=strategy) as fabric:
        assert save_and_load(fabric, tmp_path / "one.pt") == ["one.pt"]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"two.own", "one.own"}


def test_a_loss_scale_is_ignored_where_there_is_none_and_kept_where_the_file_has_none(
    tmp_path: Path,
) -> None:
    scaled = tmp_path / "scaled.pt"
    plain = tmp_path / "plain.pt"
    with single(precision="16-mixed") as fabric:
        fabric.save(scaled, {"epoch": 1})
    with single() as fabric:
        fabric.load(scaled, {"epoch": 0})
        fabric.save(plain, {"epoch": 1})
    with single(precision="16-mixed") as fabric:
        fabric.load(plain, {"epoch": 0})
        assert fabric.describe().endswith("65536")


def test_a_wrapper_of_the_users_own_stays_in_the_names(tmp_path: Path) -> None:
    path = tmp_path / "wrapped.pt"
    wrapped = nn.DataParallel(nn.Linear(1, 1))
    with Fabric(accelerator="cpu", devices=1) as fabric:
        model = fabric.setup_module(wrapped)
        fabric.save(path, {"model": model})
    content = torch.load(path)
    assert set(content["model"]) == {"module.weight", "module.bias"}


class FlatMomentum(torch.optim.SGD):
    """An optimizer whose momentum buffers are views of one tensor."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        parameters = self.param_groups[0]["params"]
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes))
        views = self.flat.split(sizes)
        for parameter, view in zip(parameters, views, strict=True):
            slots = self.state[parameter]
            slots["momentum_buffer"] = view.view_as(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = self.param_groups[0]["params"]
        saved_slots = state_dict["state"].values()
        for parameter, saved in zip(parameters, saved_slots, strict=True):
            slots = self.state[parameter]
            slots["momentum_buffer"].copy_(saved["momentum_buffer"])


def test_an_optimizer_that_copies_what_is_loaded_keeps_its_own_memory(tmp_path: Path) -> None:
    path = tmp_path / "flat.pt"
    layer = nn.Linear(2, 1)
    optimizer = FlatMomentum(layer.parameters())
    with Fabric(accelerator="cpu", devices=1) as fabric:
        optimizer.flat.fill_(3.0)
        fabric.save(path, {"optimizer": optimizer})
        optimizer.flat.zero_()
        fabric.load(path, {"optimizer": optimizer})
    address = optimizer.flat.untyped_storage().data_ptr()
    for slots in optimizer.state.values():
        storage = slots["momentum_buffer"].untyped_storage()
        assert storage.data_ptr() == address
    assert optimizer.flat.tolist() == [3.0, 3.0, 3.0]


class SparseMask(torch.optim.SGD):
    """An optimizer with a sparse mask, which it also holds outside of its state."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)
        self.mask = torch.eye(2).to_sparse()
        [parameter] = self.param_groups[0]["params"]
        self.state[parameter]["mask"] = self.mask

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        [saved] = state_dict["state"].values()
        self.mask.copy_(saved["mask"])


def test_an_optimizer_keeps_its_own_sparse_tensors(tmp_path: Path) -> None:
    path = tmp_path / "sparse.pt"
    optimizer = SparseMask([nn.Parameter(torch.zeros(2))])
    with Fabric(accelerator="cpu", devices=1) as fabric:
        fabric.save(path, {"optimizer": optimizer})
        optimizer.mask.mul_(0)
        fabric.load(path, {"optimizer": optimizer})
    [slots] = optimizer.state.values()
    assert slots["mask"] is optimizer.mask
    assert torch.equal(optimizer.mask.to_dense(), torch.eye(2))


# -- models with compiled blocks ------------------------------------------------------------------

STRATEGIES = {
    "ddp": DDPStrategy(),
    "ddp-folder": DDPStrategy(checkpoint_io=ShardedCheckpoint()),
    "fsdp": FSDPStrategy(),
    "fsdp-file": FSDPStrategy(state_dict_type="full"),
}


def full_state(fabric: Fabric, model: nn.Module) -> dict[str, Tensor]:
    return fabric.strategy.full_state(dict(model.state_dict()))


class Blocks(nn.Module):
    """Two blocks, compiled or not, of which the second is frozen."""

    def __init__(self, *, is_compiled: bool) -> None:
        super().__init__()
        block: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        frozen: Any = nn.Linear(4, 4).requires_grad_(False)
        if is_compiled:
            block = torch.compile(block, backend="eager")
            frozen = torch.compile(frozen, backend="eager")
        self.block = block
        self.frozen = frozen


class Pair(nn.Module):
    """A plain module around two that are set up."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__()
        self.blocks = fabric.setup(Blocks(is_compiled=True))
        self.linear = fabric.setup(nn.Linear(4, 4))


def assert_same_values(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare two states by the order of their values: compiled blocks have other names."""
    assert_equal(list(actual.values()), list(expected.values()))


def load_raw_into_blocks(fabric: Fabric, folder: Path) -> None:
    path = folder / "raw"
    if fabric.global_rank == 0:
        compiled = torch.compile(Blocks(is_compiled=True), backend="eager")
        torch.save(compiled.state_dict(), path)
    fabric.barrier()
    expected = torch.load(path, weights_only=True)
    for is_compiled in (True, False):
        module = Blocks(is_compiled=is_compiled)
        model = fabric.setup(module)
        fabric.load_raw(path, model)
        actual = full_state(fabric, model)
        assert_same_values(actual, expected)


def load_into_blocks(fabric: Fabric, path: Path, saves_compiled: bool) -> None:
    module = Blocks(is_compiled=saves_compiled)
    model = fabric.setup(module)
    expected = full_state(fabric, model)
    fabric.save(path, {"model": model})
    for is_compiled in (True, False):
        target = fabric.setup(Blocks(is_compiled=is_compiled))
        fabric.load(path, {"model": target})
        actual = full_state(fabric, target)
        assert_same_values(actual, expected)
    state: dict[str, Any] = {"model": None}
    fabric.load(path, state)
    plain_blocks = Blocks(is_compiled=False)
    assert list(state["model"]) == list(plain_blocks.state_dict())


def load_trainable_into_blocks(fabric: Fabric, path: Path, saves_compiled: bool) -> None:
    module = Blocks(is_compiled=saves_compiled)
    model = fabric.setup(module)
    expected = full_state(fabric, model)
    fabric.save(path, {"model": model}, trainable_only=True)
    for is_compiled in (True, False):
        target = fabric.setup(Blocks(is_compiled=is_compiled))
        fabric.load(path, {"model": target}, strict=False)
        actual = full_state(fabric, target)
        for name, expected_value in zip(actual, expected.values(), strict=True):
            is_loaded = torch.equal(actual[name], expected_value)
            is_frozen = "frozen" in name
            assert is_loaded is not is_frozen, name


def load_into_pair(fabric: Fabric, path: Path) -> None:
    pair = Pair(fabric)
    target = Pair(fabric)
    fabric.save(path, {"pair": pair})
    fabric.load(path, {"pair": target})
    actual = full_state(fabric, target)
    expected = full_state(fabric, pair)
    assert_same_values(actual, expected)


def load_compiled(fabric: Fabric, folder: Path) -> None:
    load_raw_into_blocks(fabric, folder)
    for saves_compiled in (True, False):
        path_of_all = folder / f"all-{saves_compiled}"
        load_into_blocks(fabric, path_of_all, saves_compiled)
        path_of_trainable = folder / f"trainable-{saves_compiled}"
        load_trainable_into_blocks(fabric, path_of_trainable, saves_compiled)
    load_into_pair(fabric, folder / "pair")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiled_blocks_and_modules_around_set_up_ones_load(strategy: str, tmp_path: Path) -> None:
    run_in_ranks(load_compiled, tmp_path, strategy=STRATEGIES[strategy])


# -- a load that fails late -----------------------------------------------------------------------


class Picky(nn.Module):
    """A module whose extra state is refused after its weights have been loaded."""

    def __init__(self, *, refuses: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.refuses = refuses
        self.register_buffer("mark", torch.zeros(()))

    def get_extra_state(self) -> Any:
        return {"kind": "picky"}

    def set_extra_state(self, state: Any) -> None:
        if self.refuses and self.mark.item() == 7:
            raise ValueError("not mine")

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class PickyObject:
    """An object that refuses the state of another version."""

    def __init__(self, version: int) -> None:
        self.version = version

    def state_dict(self) -> dict[str, Any]:
        # torchdata's loader makes an iterator here, and so draws random numbers.
        torch.rand(3)
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["version"] != self.version:
            raise ValueError("not mine")


def trained_state(fabric: Fabric, *, refuses: bool = False) -> dict[str, Any]:
    module = Picky(refuses=refuses)
    adam = torch.optim.Adam(module.parameters(), lr=0.5)
    model, optimizer = fabric.setup(module, adam)
    output = model(torch.ones(1, 2))
    loss = output.sum()
    fabric.backward(loss)
    optimizer.step()
    return {
        "plain": fabric.setup(nn.Linear(2, 2)),
        "model": model,
        "optimizer": optimizer,
        "scheduler": StepLR(optimizer, 1),
        "step": 0,
    }


def describe(fabric: Fabric, state: dict[str, Any]) -> str:
    """Return all values of a state as text. Collective."""
    content = {"step": state["step"]}
    for name in ("plain", "model", "optimizer", "scheduler"):
        rank_state = dict(state[name].state_dict())
        content[name] = fabric.strategy.full_state(rank_state)
    return repr(content)


def assert_load_fails_and_changes_nothing(
    fabric: Fabric, path: Path, state: dict[str, Any]
) -> None:
    torch.manual_seed(3 + fabric.global_rank)
    before = describe(fabric, state)
    random_state = torch.get_rng_state()
    text = outcome(lambda: fabric.load(path, state))
    assert "not mine" in text
    assert torch.equal(torch.get_rng_state(), random_state)
    assert describe(fabric, state) == before


def fail_late(fabric: Fabric, folder: Path) -> None:
    saved = trained_state(fabric)
    saved["model"].mark.fill_(7)
    saved["scheduler"].last_epoch = 3
    saved["step"] = 5
    saved_with_object = {**saved, "object": PickyObject(version=2)}
    fabric.save(folder / "module", saved)
    fabric.save(folder / "object", saved_with_object)
    fabric.barrier()
    for is_trained in (True, False):
        state = trained_state(fabric, refuses=fabric.global_rank == 1)
        if not is_trained:
            state["optimizer"].state.clear()
        assert_load_fails_and_changes_nothing(fabric, folder / "module", state)

        state = trained_state(fabric)
        state["object"] = PickyObject(version=1)
        if not is_trained:
            state["optimizer"].state.clear()
        assert_load_fails_and_changes_nothing(fabric, folder / "object", state)
    state = trained_state(fabric)
    fabric.load(folder / "module", state)
    assert describe(fabric, state) == describe(fabric, saved)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_load_that_fails_late_changes_nothing(strategy: str, tmp_path: Path) -> None:
    run_in_ranks(fail_late, tmp_path, strategy=STRATEGIES[strategy])


# -- collections that contain themselves ----------------------------------------------------------


class Holder:
    """An object whose state is a collection."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def state_dict(self) -> dict[str, Any]:
        return {"items": self.items}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = state["items"]


def save_rings(fabric: Fabric, path: Path) -> None:
    """Save a collection that contains itself on all ranks, and then only on rank 1."""
    ring: list[Any] = [1]
    ring.append(ring)
    items_of_rank: list[Any] = [1]
    if fabric.global_rank == 1:
        items_of_rank = ring
    for async_ in (False, True):
        module = nn.Linear(4, 4)
        model = fabric.setup(module)
        state = {"model": model, "x": ring}
        text = outcome(partial(fabric.save, path, state, async_=async_))
        assert text.startswith("ArgumentTypeError")
        assert "contains itself" in text

        model = fabric.setup(nn.Linear(4, 4))
        state = {"model": model, "x": Holder(items_of_rank)}
        text = outcome(partial(fabric.save, path, state, async_=async_))
        assert "contains itself" in text


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp-file", "ddp"])
def test_a_collection_that_contains_itself_is_refused_on_every_rank(
    strategy: str, tmp_path: Path
) -> None:
    run_in_ranks(save_rings, tmp_path / "run", strategy=STRATEGIES[strategy])
    assert list(tmp_path.iterdir()) == []


# -- full state dicts -----------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embedding(x)
        return self.head(embedded)


def get_state_dict(fabric: Fabric) -> None:
    module = Tied()
    model = fabric.setup(module)
    expected = copy.deepcopy(full_state(fabric, model))
    state = fabric.get_state_dict(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if fabric.global_rank > 0:
        assert state == {}
        return
    assert list(state) == list(expected)
    for name, value in state.items():
        assert torch.equal(value, expected[name])
        assert value.device.type == "cpu"
        assert not hasattr(value, "full_tensor")
        assert not value.requires_grad
    tied_weight = state["head.weight"]
    assert tied_weight.data_ptr() == state["embedding.weight"].data_ptr()
    Tied().load_state_dict(state)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_get_state_dict_returns_a_full_copy_on_rank_0(strategy: str) -> None:
    run_in_ranks(get_state_dict, strategy=STRATEGIES[strategy])


class SelfSaving(nn.Linear):
    """A module that writes its own weights, as models of transformers and adapters of PEFT do."""

    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor]) -> None:
        # An existing folder is an error: two ranks that write both reach this line.
        folder.mkdir()
        torch.save(state_dict, folder / "weights.pt")


def printed_recipe() -> str:
    """Return the lines of code in the docstring of ``get_state_dict``."""
    docstring = inspect.getdoc(Fabric.get_state_dict)
    assert docstring is not None
    _, _, text = docstring.partition("::\n\n")
    code, _, _ = text.partition("\n\nWithout")
    return textwrap.dedent(code)


def follow_printed_recipe(fabric: Fabric, path: Path) -> None:
    torch.manual_seed(0)
    model = fabric.setup(SelfSaving(3, 2))
    exec(printed_recipe(), {"fabric": fabric, "model": model, "path": path})
    # The barrier of the recipe: every rank finds the weights.
    loaded = torch.load(path / "weights.pt", weights_only=True)
    torch.manual_seed(0)
    expected = nn.Linear(3, 2).state_dict()
    torch.testing.assert_close(dict(loaded), dict(expected), rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_printed_recipe_writes_full_weights_on_rank_0_alone(
    strategy: str, tmp_path: Path
) -> None:
    path = tmp_path / "pretrained"
    run_in_ranks(follow_printed_recipe, path, strategy=STRATEGIES[strategy])


# -- state dicts without a container, and checkpoints of other toolkits ---------------------------


class NormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.norm(inputs))


def save_bare_state_dict(fabric: Fabric, folder: Path) -> list[str]:
    path = folder / "bare.pt"
    module = NormNet()
    model = fabric.setup(module)
    fabric.save(path, model.state_dict())
    handle = fabric.save(folder / "async.pt", model.state_dict(), async_=True)
    handle.wait()
    loaded_model = fabric.setup(NormNet())
    with torch.no_grad():
        loaded_model.out.weight.zero_()
    fabric.load_raw(path, loaded_model)
    assert torch.equal(loaded_model.out.weight, model.out.weight)
    entries = fabric.load(path)
    return list(entries)


def test_a_bare_state_dict_is_saved_as_a_state_dict(tmp_path: Path) -> None:
    state = NormNet().state_dict()
    for names in run_in_ranks(save_bare_state_dict, tmp_path):
        assert names == list(state)
    for name in ("bare.pt", "async.pt"):
        loaded = torch.load(tmp_path / name, weights_only=True)
        assert list(loaded) == list(state)
        assert loaded._metadata == state._metadata
        NormNet().load_state_dict(loaded)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_another_toolkit_names_a_way_that_loses_nothing(tmp_path: Path) -> None:
    """Load a folder that Lightning wrote: shards in torch's format, and a file of plain values."""
    net = NormNet()
    folder = tmp_path / "checkpoint"
    sharded_state = {"model": net.state_dict(), "epoch": 3}
    dcp.save(sharded_state, checkpoint_id=folder)
    torch.save({"step": 7}, folder / "meta.pt")
    with Fabric(accelerator="cpu", devices=1) as fabric:
        with pytest.raises(CheckpointError) as caught:
            fabric.load(folder)
        command, _, remark = str(caught.value.suggestion).partition("; ")
        module = "torch.distributed.checkpoint.format_utils"
        assert command == f"python -m {module} dcp_to_torch {folder} {folder}.pt"
        assert remark.startswith(f"the state outside of the shards is in {folder}/meta.pt;")
        converted = f"{folder}.pt"
        dcp_to_torch_save(folder, converted)
        model = fabric.setup(NormNet())
        assert fabric.load(converted, {"model": model}) == {"epoch": 3}
        assert fabric.load(folder / "meta.pt") == {"step": 7}
        assert torch.equal(model.out.weight, net.out.weight)


class MomentumOfRank(torch.optim.SGD):
    """An optimizer that shards its own state: each rank has the momentum of other rows."""

    def __init__(self, parameters: Any, rank: int) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.rank = rank

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for slots in self.state.values():
            slots["momentum_buffer"].mul_(self.rank)


def save_state_of_ranks(fabric: Fabric, folder: Path) -> list[str]:
    torch.manual_seed(0)
    plain = nn.Linear(4, 2)
    plain_optimizer = MomentumOfRank(plain.parameters(), fabric.global_rank)
    model, optimizer = fabric.setup(plain, plain_optimizer)
    state = {"model": model, "optimizer": optimizer}
    before = outcome(lambda: fabric.save(folder / "before", state))
    fabric.backward(model(torch.ones(3, 4)).mean())
    optimizer.step()
    after = outcome(lambda: fabric.save(folder / "after", state))
    # The way out that the error names.
    torch.save(optimizer.state_dict(), folder / f"optimizer-{fabric.global_rank}.pt")
    fabric.save(folder / "model", {"model": model})
    loaded = torch.load(folder / f"optimizer-{fabric.global_rank}.pt")
    assert loaded["state"][0]["momentum_buffer"].any().item() == bool(fabric.global_rank)
    return [before, after]


@pytest.mark.parametrize("checkpoint_io", [FullCheckpoint, ShardedCheckpoint])
def test_an_optimizer_whose_state_differs_between_ranks_is_not_saved(
    tmp_path: Path, checkpoint_io: Any
) -> None:
    strategy = DDPStrategy(checkpoint_io=checkpoint_io())
    for before, after in run_in_ranks(save_state_of_ranks, tmp_path, strategy=strategy):
        assert before == "fine"
        assert after.startswith("ReplicaDriftError")
        assert "momentum_buffer of weight of Linear in MomentumOfRank differs" in after
        assert "torch.save(optimizer.state_dict()" in after


class OptimizerOfShards(torch.optim.SGD):
    """An optimizer with a state that is no DTensor, made of this rank's shard of a gradient."""

    def __init__(self, parameters: Any, has_numbers: bool) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.has_numbers = has_numbers

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter, slots in self.state.items():
            slots["squares"] = local_tensor(parameter.grad).square()
            if self.has_numbers:
                slots["squares"] = slots["squares"].sum().item()


def save_state_of_shards(fabric: Fabric, folder: Path) -> list[str]:
    """Return the outcomes of saves of a tensor and of a number that differ between ranks."""
    errors: list[str] = []
    for has_numbers in (False, True):
        plain = nn.Linear(4, 2)
        model, optimizer = fabric.setup(plain, OptimizerOfShards(plain.parameters(), has_numbers))
        for _ in range(2):
            fabric.backward(model(torch.ones(3, 4)).square().mean())
            optimizer.step()
        state = {"model": model, "optimizer": optimizer}
        path = folder / f"{has_numbers}"
        errors.append(outcome(lambda path=path, state=state: fabric.save(path, state)))
        # The state that the checkpoint can have.
        fabric.save(path, {"model": model})
    return errors


@pytest.mark.parametrize("state_dict_type", ["sharded", "full"])
def test_a_state_of_shards_that_is_no_dtensor_is_not_saved(
    tmp_path: Path, state_dict_type: Any
) -> None:
    strategy = FSDPStrategy(state_dict_type=state_dict_type)
    # The comparisons of backward passes accept such a state, which need not be saved.
    options = {"strategy": strategy, "check_replicas": 1}
    for errors in run_in_ranks(save_state_of_shards, tmp_path, **options):
        for error in errors:
            assert error.startswith("ReplicaDriftError")
            assert "squares of weight of Linear in OptimizerOfShards differs" in error
            assert "torch.save(optimizer.state_dict()" in error


def prefixed(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in state.items()}


def file_contents(net: nn.Module) -> dict[str, Any]:
    """Return the contents of files of other tools, with the words of the line that loads each."""
    state = dict(net.state_dict())
    with_compiled_layer: dict[str, Tensor] = {}
    for name, value in prefixed(state, "model.").items():
        with_compiled_layer[name.replace("out.", "out._orig_mod.")] = value
    return {
        "fabric.load(path, {'model_state_dict': model})": {"model_state_dict": state, "epoch": 1},
        "fabric.load_raw(path, model)": state,
        "key.removeprefix('model.')": {"state_dict": prefixed(state, "model."), "epoch": 1},
        "key.removeprefix('module.')": {"model": prefixed(state, "module.")},
        "name.removeprefix('module.')": prefixed(state, "module."),
        # Of compiled modules.
        "fabric.load(path, {'net': model})": {"net": prefixed(state, "_orig_mod."), "epoch": 1},
        "load_raw(path, model)": prefixed(state, "_orig_mod."),
        "key.replace('_orig_mod.', '')": {"state_dict": with_compiled_layer, "epoch": 1},
        "rename=lambda name": prefixed(state, "_orig_mod.module."),
        "removeprefix('model.')": {"state_dict": prefixed(state, "model._orig_mod."), "epoch": 1},
        "removeprefix('module.')": {"model": prefixed(state, "_orig_mod.module.")},
    }


@pytest.mark.parametrize("strict", [True, False])
def test_the_error_of_a_file_of_other_names_shows_the_line_that_loads_it(
    tmp_path: Path, strict: bool
) -> None:
    saved = NormNet()
    path = tmp_path / "file.pt"
    for line, content in file_contents(saved).items():
        torch.save(content, path)
        with single() as fabric:
            model = fabric.setup(NormNet())
            with pytest.raises(CheckpointError) as caught:
                fabric.load(path, {"model": model}, strict=strict)
            suggestion = str(caught.value.suggestion)
            assert line in suggestion
            assert "strict=False" not in suggestion
            # The line works as it is written.
            exec(suggestion, {"fabric": fabric, "path": path, "model": model})
            torch.testing.assert_close(model.out.weight, saved.out.weight)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_names_of_a_compiled_module_load_into_one_that_is_not_compiled(
    prefix: str, tmp_path: Path
) -> None:
    saved = NormNet()
    entries = prefixed(saved.state_dict(), f"_orig_mod.{prefix}")
    path = tmp_path / "bare.pt"
    torch.save(entries, path)
    torch.save({"model": prefixed(saved.state_dict(), "_orig_mod.")}, tmp_path / "entries.pt")
    with single() as fabric:
        model = fabric.setup(NormNet())
        fabric.load(tmp_path / "entries.pt", {"model": model})
        torch.testing.assert_close(model.out.weight, saved.out.weight)
        model = fabric.setup(NormNet())
        if prefix:
            with pytest.raises(CheckpointError) as caught:
                fabric.load_raw(path, model)
            line = f"fabric.load_raw(path, model, {caught.value.suggestion})"
            exec(line, {"fabric": fabric, "path": path, "model": model})
        else:
            fabric.load_raw(path, model)
        torch.testing.assert_close(model.out.weight, saved.out.weight)


def test_a_load_by_name_that_would_leave_a_module_as_it_is_raises(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    with single() as fabric:
        fabric.save(path, {"model": nn.Linear(3, 2), "empty": nn.Identity(), "epoch": 4})
        model = fabric.setup(NormNet())
        with pytest.raises(CheckpointError, match="no name of the module is in the file"):
            fabric.load(path, {"model": model}, strict=False)
        with pytest.raises(CheckpointError, match="the file has no 'net'"):
            fabric.load(path, {"net": model}, strict=False)
        # So the error of a strict load does not suggest such a load.
        with pytest.raises(CheckpointError, match="the file has no 'net'") as caught:
            fabric.load(path, {"net": model})
        assert "strict=False to load" not in str(caught.value.suggestion)
        # Another module is loaded, and no entry of the file is meant for this one.
        state = {"model": nn.Linear(3, 2), "net": model, "epoch": 0}
        fabric.load(path, state, strict=False)
        assert state["epoch"] == 4
        fabric.load(path, {"step": 0}, strict=False)
        fabric.load(path, {"empty": model}, strict=False)


def save_sharded_state_dict(fabric: Fabric, folder: Path) -> bool:
    torch.manual_seed(0)
    model = fabric.setup(NormNet())
    fabric.save(folder / "bare.pt", model.state_dict())
    handle = fabric.save(folder / "async.pt", model.state_dict(), async_=True)
    assert handle is not None
    handle.wait()
    loaded_model = fabric.setup(NormNet())
    fabric.load_raw(folder / "bare.pt", loaded_model)
    weights = local_tensor(model.out.weight)
    return torch.equal(local_tensor(loaded_model.out.weight), weights)


def test_a_sharded_state_dict_is_saved_as_a_file_of_whole_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = NormNet().state_dict()
    assert run_in_ranks(save_sharded_state_dict, tmp_path, strategy="fsdp") == [True, True]
    for name in ("bare.pt", "async.pt"):
        loaded = torch.load(tmp_path / name, weights_only=True)
        torch.testing.assert_close(dict(loaded), dict(expected))
        NormNet().load_state_dict(loaded)


def save_nested_shards(fabric: Fabric, folder: Path) -> list[str]:
    """Return the errors of saves of shards in dicts and lists, and follow what they say."""
    torch.manual_seed(0)
    net = NormNet()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    fabric.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    weight = model.out.weight.detach()
    wrong_states = [
        {"model": model.state_dict(), "step": 1},
        {"optimizer": optimizer.state_dict()},
        {"weights": [weight]},
    ]
    texts: list[str] = []
    for state in wrong_states:
        texts.append(outcome(lambda state=state: fabric.save(folder / "wrong", state)))
    # On the second rank, it is empty.
    state_dict = fabric.get_state_dict(model)
    texts.append(outcome(lambda: fabric.save(folder / "first rank", {"model": state_dict})))
    full_weight = full_tensor(weight)
    state = {"model": model, "optimizer": optimizer, "weights": [full_weight]}
    fabric.save(folder / "right", state)
    loaded: dict[str, Any] = fabric.load(folder / "right")
    assert torch.equal(loaded["model"]["out.weight"], full_weight)
    assert torch.equal(loaded["weights"][0], full_weight)
    return texts


@pytest.mark.parametrize("state_dict_type", ["sharded", "full"])
def test_shards_within_an_entry_are_refused_with_the_object_to_save(
    tmp_path: Path, state_dict_type: Any
) -> None:
    strategy = FSDPStrategy(state_dict_type=state_dict_type)
    for *texts, text_of_state_dict in run_in_ranks(save_nested_shards, tmp_path, strategy=strategy):
        if state_dict_type == "sharded":
            assert '{"model": model}, in place of fabric.get_state_dict' in text_of_state_dict
        else:
            # Rank 0 writes the file.
            assert text_of_state_dict == "fine"
        for text, entry in zip(texts, ("model", "optimizer", "weights"), strict=True):
            assert f"save state['{entry}']" in text
            assert "this rank has a part of the tensor" in text
        assert "{'model': model}" in texts[0]
        assert "{'optimizer': optimizer}" in texts[1]
        assert "value.full_tensor(), on all ranks" in texts[2]

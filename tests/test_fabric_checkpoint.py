"""Checkpoints through the facade, on one and on several ranks: exact resuming, and errors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

pytestmark = pytest.mark.timeout(90)

# An epoch has 8 batches on one rank and 4 on two: both numbers are in the middle of an epoch.
STEPS = 13
SAVED_AT = 6


@dataclass
class Run:
    """The losses of one rank, and its state at the end."""

    losses: list[float]
    rate: float
    parameters: list[Tensor]
    scaling: str
    stream: float


def training_state(fabric: Fabric, seed: int) -> dict[str, Any]:
    """Return the objects of a training loop, with dropout and a random stream for each rank."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, optimizer, scheduler = fabric.setup(net, optimizer, scheduler=StepLR(optimizer, 2, 0.5))
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(data), batch_size=3, shuffle=True))
    fabric.seed_everything(seed, per_rank=True)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "step": 0,
    }


def train(fabric: Fabric, path: Path, resume: bool) -> Run:
    if resume:
        state = training_state(fabric, seed=9)
        fabric.load(path, state)
    else:
        state = training_state(fabric, seed=1)
    model = state["model"]
    optimizer = state["optimizer"]
    losses = []
    while state["step"] < STEPS:
        for (x,) in state["loader"]:
            loss = (model(x) - 1).pow(2).mean()
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
    scaling = fabric.describe().partition("loss scale")[2]
    return Run(losses, optimizer.param_groups[0]["lr"], parameters, scaling, torch.rand(1).item())


SHARDED: dict[str, Any] = {"strategy": "fsdp"}


@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (2, {}), (2, SHARDED)])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_resumed_run_continues_bit_for_bit_in_the_middle_of_an_epoch(
    ranks: int, options: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    options = {**options, "ranks": ranks, "precision": precision}
    full_runs = run_in_ranks(train, path, False, **options)
    resumed_runs = run_in_ranks(train, path, True, **options)
    assert path.is_dir() is ("strategy" in options)
    for full, resumed in zip(full_runs, resumed_runs, strict=True):
        assert resumed.losses == full.losses[SAVED_AT:]
        assert resumed.rate == full.rate
        assert resumed.scaling == full.scaling
        assert resumed.stream == full.stream
        assert all(map(torch.equal, resumed.parameters, full.parameters))
    assert len({run.stream for run in full_runs}) == ranks
    has_scale = full_runs[0].scaling != ""
    assert has_scale is (precision == "16-mixed")


def test_a_run_on_one_device_resumes_bit_for_bit(tmp_path: Path) -> None:
    with single() as fabric:
        full = train(fabric, tmp_path / "state.pt", resume=False)
    with single() as fabric:
        resumed = train(fabric, tmp_path / "state.pt", resume=True)
    assert resumed.losses == full.losses[SAVED_AT:]
    assert all(map(torch.equal, resumed.parameters, full.parameters))


def single(**options: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, environment="none", **options)


def values(net: nn.Module) -> list[float]:
    return [parameter.sum().item() for parameter in net.parameters()]


def load_alone(fabric: Fabric, path: Path) -> tuple[list[float], bool]:
    """Return the loaded values, and whether the random stream is unchanged."""
    net = Net()
    torch.manual_seed(4)
    expected = torch.rand(1)
    torch.manual_seed(4)
    fabric.load(path, {"model": fabric.setup(net)}, strict=False)
    return values(net), torch.equal(torch.rand(1), expected)


def save_model(fabric: Fabric, path: Path) -> list[float]:
    torch.manual_seed(1)
    net = Net()
    fabric.save(path, {"model": fabric.setup(net), "epoch": 2})
    return values(net)


def test_another_number_of_ranks_loads_the_model_and_the_random_streams_of_the_saved_ranks(
    tmp_path: Path,
) -> None:
    expected = run_in_ranks(save_model, tmp_path / "two.pt")[0]
    assert run_in_ranks(load_alone, tmp_path / "two.pt", ranks=1) == [(expected, False)]
    with single() as fabric:
        save_model(fabric, tmp_path / "one.pt")
    assert run_in_ranks(load_alone, tmp_path / "one.pt") == [(expected, False), (expected, True)]


def save_with_filter_that_fails_on_rank_1(fabric: Fabric, path: Path) -> str:
    model = fabric.setup(Net())

    def keep(name: str, value: Any) -> bool:
        if fabric.global_rank == 1:
            raise LookupError("no such prefix")
        return True

    fabric.save(path, {"model": model, "epoch": 1})
    text = outcome(lambda: fabric.save(path, {"model": model, "epoch": 2}, filter={"model": keep}))
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

    first = fabric.setup(Net())
    last = fabric.setup(Net())
    state = {"first": first, "between": Fickle(fabric), "last": last}
    fabric.save(path, state)
    with torch.no_grad():
        for parameter in (*first.parameters(), *last.parameters()):
            parameter.fill_(7)
    texts = [
        outcome(lambda: fabric.save(path, state, filter={"first": keep})),
        outcome(lambda: fabric.save(path, {**state, "between": Fickle(fabric, "save")})),
        outcome(lambda: fabric.load(path, {**state, "between": Fickle(fabric, "load")})),
    ]
    for parameter in (*first.parameters(), *last.parameters()):
        assert (local_tensor(parameter) == 7).all()
    return texts


@pytest.mark.parametrize("options", [{"state_dict_type": "full"}, {}], ids=["full", "sharded"])
def test_the_users_code_may_raise_on_one_rank_between_two_modules(
    options: dict[str, Any], tmp_path: Path
) -> None:
    # No rank that gathers full states waits for the one that raised, and no module is changed.
    strategy = FSDPStrategy(**options)
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
    path_on_rank = path if fabric.global_rank == 0 else path.with_name("elsewhere.pt")
    text = outcome(lambda: fabric.load(path_on_rank, {"model": model}))
    assert net.head.bias.item() == 0
    return text


def test_a_load_that_fails_on_one_rank_fails_on_all_and_changes_nothing(tmp_path: Path) -> None:
    first, second = run_in_ranks(load_elsewhere_on_rank_1, tmp_path / "state.pt")
    assert "it failed on rank 1 of 2: CheckpointNotFoundError" in first
    assert "elsewhere.pt" in first
    assert second.startswith("CheckpointNotFoundError")


def test_a_filter_keeps_entries_and_strict_off_loads_what_there_is(tmp_path: Path) -> None:
    with single() as fabric:
        net = Net()
        model = fabric.setup(net)
        head = net.head.bias.item()
        encoder = net.encoder.weight.detach().clone()
        fabric.save(
            tmp_path / "s.pt",
            {"model": model},
            filter={"model": lambda name, _: not name.startswith("head")},
        )
        nn.init.zeros_(net.encoder.weight)
        with pytest.raises(CheckpointError, match=r"head\.weight"):
            fabric.load(tmp_path / "s.pt", {"model": model})
        assert not net.encoder.weight.any()
        fabric.load(tmp_path / "s.pt", {"model": model, "epoch": 3}, strict=False)
    assert torch.equal(net.encoder.weight, encoder)
    assert net.head.bias.item() == head


def test_what_was_not_asked_for_is_returned_and_without_a_state_everything(tmp_path: Path) -> None:
    with single() as fabric:
        fabric.save(tmp_path / "s.pt", {"model": fabric.setup(Net()), "epoch": 3, "best": [0.5, 1]})
        state = {"epoch": 0}
        unused = fabric.load(tmp_path / "s.pt", state)
        assert state == {"epoch": 3}
        assert set(unused) == {"model", "best"}
        assert set(fabric.load(tmp_path / "s.pt")) == {"model", "best", "epoch"}


def test_random_streams_stay_when_asked(tmp_path: Path) -> None:
    with single() as fabric:
        fabric.save(tmp_path / "s.pt", {"epoch": 1})
        drawn = torch.rand(1)
        fabric.load(tmp_path / "s.pt", {"epoch": 0}, rng=False)
        assert not torch.equal(torch.rand(1), drawn)
        fabric.load(tmp_path / "s.pt", {"epoch": 0})
        assert torch.equal(torch.rand(1), drawn)


def load_bare(fabric: Fabric, path: Path) -> list[float]:
    net = Net()
    fabric.load_raw(path, fabric.setup(net))
    return values(net)


def test_a_bare_state_dict_of_plain_torch_is_loaded_raw(tmp_path: Path) -> None:
    net = Net()
    torch.save(net.state_dict(), tmp_path / "bare.pt")
    assert run_in_ranks(load_bare, tmp_path / "bare.pt") == [values(net)] * 2
    with single() as fabric:
        assert load_bare(fabric, tmp_path / "bare.pt") == values(net)
        with pytest.raises(ArgumentTypeError, match="has no state_dict"):
            fabric.load_raw(tmp_path / "bare.pt", {})
        fabric.save(tmp_path / "entries.pt", {"model": net})
        with pytest.raises(CheckpointError, match="a checkpoint with entries"):
            fabric.load_raw(tmp_path / "entries.pt", net)


class Suffixed:
    """A format of the user: that of fabric with another suffix and a list of saves."""

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


def save_and_load(fabric: Fabric, path: Path) -> tuple[int, int]:
    fabric.save(path, {"epoch": 4})
    state = {"epoch": 0}
    fabric.load(path, state)
    return state["epoch"], len(fabric.strategy.checkpoint_io.saved)


def test_a_format_of_the_users_own_is_written_by_the_first_rank(tmp_path: Path) -> None:
    strategy = DDPStrategy(start_method="forkserver", checkpoint_io=Suffixed())
    assert run_in_ranks(save_and_load, tmp_path / "s.pt", strategy=strategy) == [(4, 1), (4, 0)]
    with single(strategy=SingleDeviceStrategy(checkpoint_io=Suffixed())) as fabric:
        assert save_and_load(fabric, tmp_path / "t.pt") == (4, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.own", "t.own"]


def test_a_loss_scale_is_ignored_where_there_is_none_and_kept_where_the_file_has_none(
    tmp_path: Path,
) -> None:
    with single(precision="16-mixed") as fabric:
        fabric.save(tmp_path / "scaled.pt", {"epoch": 1})
    with single() as fabric:
        fabric.load(tmp_path / "scaled.pt", {"epoch": 0})
        fabric.save(tmp_path / "plain.pt", {"epoch": 1})
    with single(precision="16-mixed") as fabric:
        fabric.load(tmp_path / "plain.pt", {"epoch": 0})
        assert fabric.describe().endswith("65536")


def test_a_wrapper_of_the_users_own_stays_in_the_names(tmp_path: Path) -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        model = fabric.setup_module(nn.DataParallel(nn.Linear(1, 1)))
        fabric.save(tmp_path / "wrapped.pt", {"model": model})
    assert set(torch.load(tmp_path / "wrapped.pt")["model"]) == {"module.weight", "module.bias"}


class Flat(torch.optim.SGD):
    """An optimizer whose momentum buffers are views of one tensor."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        parameters = self.param_groups[0]["params"]
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes))
        for parameter, view in zip(parameters, self.flat.split(sizes), strict=True):
            self.state[parameter]["momentum_buffer"] = view.view_as(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = self.param_groups[0]["params"]
        for parameter, saved in zip(parameters, state_dict["state"].values(), strict=True):
            self.state[parameter]["momentum_buffer"].copy_(saved["momentum_buffer"])


def test_an_optimizer_that_copies_what_is_loaded_keeps_its_own_memory(tmp_path: Path) -> None:
    path = tmp_path / "flat.pt"
    optimizer = Flat(nn.Linear(2, 1).parameters())
    with Fabric(accelerator="cpu", devices=1) as fabric:
        optimizer.flat.fill_(3.0)
        fabric.save(path, {"optimizer": optimizer})
        optimizer.flat.zero_()
        fabric.load(path, {"optimizer": optimizer})
    address = optimizer.flat.untyped_storage().data_ptr()
    for slots in optimizer.state.values():
        assert slots["momentum_buffer"].untyped_storage().data_ptr() == address
    assert optimizer.flat.tolist() == [3.0] * 3


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
    for name, value in zip(actual, expected.values(), strict=True):
        assert torch.equal(actual[name], value), name


def load_raw_into_blocks(fabric: Fabric, folder: Path) -> None:
    if fabric.global_rank == 0:
        compiled = torch.compile(Blocks(is_compiled=True), backend="eager")
        torch.save(compiled.state_dict(), folder / "raw")
    fabric.barrier()
    expected = torch.load(folder / "raw", weights_only=True)
    for is_compiled in (True, False):
        model = fabric.setup(Blocks(is_compiled=is_compiled))
        fabric.load_raw(folder / "raw", model)
        assert_same_values(full_state(fabric, model), expected)


def load_into_blocks(fabric: Fabric, path: Path, saves_compiled: bool) -> None:
    model = fabric.setup(Blocks(is_compiled=saves_compiled))
    expected = full_state(fabric, model)
    fabric.save(path, {"model": model})
    for is_compiled in (True, False):
        target = fabric.setup(Blocks(is_compiled=is_compiled))
        fabric.load(path, {"model": target})
        assert_same_values(full_state(fabric, target), expected)
    state: dict[str, Any] = {"model": None}
    fabric.load(path, state)
    assert list(state["model"]) == list(Blocks(is_compiled=False).state_dict())


def load_trainable_into_blocks(fabric: Fabric, path: Path, saves_compiled: bool) -> None:
    model = fabric.setup(Blocks(is_compiled=saves_compiled))
    expected = full_state(fabric, model)
    fabric.save(path, {"model": model}, trainable_only=True)
    for is_compiled in (True, False):
        target = fabric.setup(Blocks(is_compiled=is_compiled))
        fabric.load(path, {"model": target}, strict=False)
        actual = full_state(fabric, target)
        for name, value in zip(actual, expected.values(), strict=True):
            is_loaded = torch.equal(actual[name], value)
            is_frozen = "frozen" in name
            assert is_loaded is not is_frozen, name


def load_into_pair(fabric: Fabric, path: Path) -> None:
    pair = Pair(fabric)
    target = Pair(fabric)
    fabric.save(path, {"pair": pair})
    fabric.load(path, {"pair": target})
    assert_same_values(full_state(fabric, target), full_state(fabric, pair))


def load_compiled(fabric: Fabric, folder: Path) -> None:
    load_raw_into_blocks(fabric, folder)
    for saves_compiled in (True, False):
        load_into_blocks(fabric, folder / f"all-{saves_compiled}", saves_compiled)
        load_trainable_into_blocks(fabric, folder / f"trainable-{saves_compiled}", saves_compiled)
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
        torch.rand(3)  # draws as torchdata's loader does, which makes an iterator
        return {"version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["version"] != self.version:
            raise ValueError("not mine")


def trained_state(fabric: Fabric, *, refuses: bool = False) -> dict[str, Any]:
    module = Picky(refuses=refuses)
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), lr=0.5))
    fabric.backward(model(torch.ones(1, 2)).sum())
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
        content[name] = fabric.strategy.full_state(dict(state[name].state_dict()))
    return repr(content)


def assert_load_fails_and_changes_nothing(
    fabric: Fabric, path: Path, state: dict[str, Any]
) -> None:
    torch.manual_seed(3 + fabric.global_rank)
    before = describe(fabric, state)
    random_state = torch.get_rng_state()
    assert "not mine" in outcome(lambda: fabric.load(path, state))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert describe(fabric, state) == before


def fail_late(fabric: Fabric, folder: Path) -> None:
    saved = trained_state(fabric)
    saved["model"].mark.fill_(7)
    saved["scheduler"].last_epoch = 3
    saved["step"] = 5
    fabric.save(folder / "module", saved)
    fabric.save(folder / "object", {**saved, "object": PickyObject(version=2)})
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
    ring: list[Any] = [1]
    ring.append(ring)
    items_of_rank = [1] if fabric.global_rank == 0 else ring
    for async_ in (False, True):
        state = {"model": fabric.setup(nn.Linear(4, 4)), "x": ring}
        text = outcome(lambda state=state, a=async_: fabric.save(path, state, async_=a))
        assert text.startswith("ArgumentTypeError")
        assert "contains itself" in text

        state = {"model": fabric.setup(nn.Linear(4, 4)), "x": Holder(items_of_rank)}
        text = outcome(lambda state=state, a=async_: fabric.save(path, state, async_=a))
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
        return self.head(self.embedding(x))


def get_state_dict(fabric: Fabric) -> None:
    model = fabric.setup(Tied())
    expected = {name: value.clone() for name, value in full_state(fabric, model).items()}
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
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    Tied().load_state_dict(state)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_get_state_dict_returns_a_full_copy_on_rank_0(strategy: str) -> None:
    run_in_ranks(get_state_dict, strategy=STRATEGIES[strategy])


# -- state dicts without a container, and checkpoints of other toolkits ---------------------------


class NormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.norm(inputs))


def save_bare_state_dict(fabric: Fabric, folder: Path) -> list[str]:
    model = fabric.setup(NormNet())
    fabric.save(folder / "bare.pt", model.state_dict())
    fabric.save(folder / "async.pt", model.state_dict(), async_=True).wait()
    loaded_model = fabric.setup(NormNet())
    with torch.no_grad():
        loaded_model.out.weight.zero_()
    fabric.load_raw(folder / "bare.pt", loaded_model)
    assert torch.equal(loaded_model.out.weight, model.out.weight)
    return list(fabric.load(folder / "bare.pt"))


def test_a_bare_state_dict_is_saved_as_a_state_dict(tmp_path: Path) -> None:
    state = NormNet().state_dict()
    assert run_in_ranks(save_bare_state_dict, tmp_path) == [list(state)] * 2
    for name in ("bare.pt", "async.pt"):
        loaded = torch.load(tmp_path / name, weights_only=True)
        assert list(loaded) == list(state)
        assert loaded._metadata == state._metadata
        NormNet().load_state_dict(loaded)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_another_toolkit_names_a_way_that_loses_nothing(tmp_path: Path) -> None:
    """Load a folder as Lightning writes it: shards in torch's format, and a file of plain values."""
    net = NormNet()
    folder = tmp_path / "checkpoint"
    dcp.save({"model": net.state_dict(), "epoch": 3}, checkpoint_id=folder)
    torch.save({"step": 7}, folder / "meta.pt")
    with Fabric(accelerator="cpu", devices=1) as fabric:
        with pytest.raises(CheckpointError) as caught:
            fabric.load(folder)
        command, _, remark = str(caught.value.suggestion).partition("; ")
        module = "torch.distributed.checkpoint.format_utils"
        assert command == f"python -m {module} dcp_to_torch {folder} {folder}.pt"
        assert remark.startswith(f"the state outside of the shards is in {folder}/meta.pt;")
        dcp_to_torch_save(folder, f"{folder}.pt")
        model = fabric.setup(NormNet())
        assert fabric.load(f"{folder}.pt", {"model": model}) == {"epoch": 3}
        assert fabric.load(folder / "meta.pt") == {"step": 7}
        assert torch.equal(model.out.weight, net.out.weight)

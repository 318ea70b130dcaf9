"""Folders of shards through the facade: what each rank reads, filters, and errors."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from fabric._torch import full_tensor, local_tensor
from fabric.checkpoint import FullCheckpoint, ShardedCheckpoint
from fabric.errors import CheckpointError, ConfigurationError
from fabric.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from tests.models import Net
from tests.ranks import outcome, run_in_ranks


def in_shards(function: Any, *args: Any, ranks: int = 2, **options: Any) -> list[Any]:
    strategy = FSDPStrategy(start_method="forkserver", **options)
    return run_in_ranks(function, *args, ranks=ranks, strategy=strategy)


def single(**options: Any) -> Fabric:
    strategy = SingleDeviceStrategy(**options)
    return Fabric(accelerator="cpu", devices=1, environment="none", strategy=strategy)


def full_values(*models: nn.Module) -> list[Tensor]:
    """Return all parameters and buffers of the models. Collective."""
    values = []
    for model in models:
        for value in (*model.parameters(), *model.buffers()):
            values.append(full_tensor(value.detach()).clone())
    return values


def are_equal(actual: list[Tensor], expected: list[Tensor]) -> bool:
    if len(actual) != len(expected):
        return False
    return all(map(torch.equal, actual, expected))


# -- several modules and optimizers ---------------------------------------------------------------


def make_pair(fabric: Fabric, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    generator = Net()
    average = Net()
    critic = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    fast = torch.optim.AdamW(generator.parameters(), lr=0.1)
    slow = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    generator, fast = fabric.setup(generator, fast)
    critic, slow = fabric.setup(critic, slow)
    return {
        "generator": generator,
        "critic": critic,
        "average": fabric.setup(average),
        "fast": fast,
        "slow": slow,
        "step": 0,
    }


def train(fabric: Fabric, state: dict[str, Any], steps: int) -> list[Tensor]:
    """Train on the same batch on all ranks, so that their number does not change the values."""
    for _ in range(steps):
        x = torch.full((3, 4), 1.0 + state["step"])
        for model_name, optimizer_name in (("generator", "fast"), ("critic", "slow")):
            loss = state[model_name](x).square().mean()
            fabric.backward(loss)
            state[optimizer_name].step()
            state[optimizer_name].zero_grad()
        state["step"] += 1
    return full_values(state["generator"], state["critic"], state["average"])


def save_in_the_middle(fabric: Fabric, path: Path) -> list[Tensor]:
    state = make_pair(fabric, seed=1)
    train(fabric, state, 2)
    fabric.save(path, state)
    return train(fabric, state, 2)


def go_on(fabric: Fabric, path: Path) -> list[Tensor]:
    state = make_pair(fabric, seed=2)
    fabric.load(path, state)
    return train(fabric, state, 2)


def test_several_modules_and_optimizers_go_on_from_one_folder_under_any_strategy(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state"
    expected = in_shards(save_in_the_middle, path)[0]
    on_two_ranks = in_shards(go_on, path)
    on_three_ranks = in_shards(go_on, path, ranks=3)
    under_ddp = run_in_ranks(go_on, path)
    for actual in (*on_two_ranks, *on_three_ranks, *under_ddp):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert are_equal(on_two_ranks[0], expected)
    with single() as fabric:
        torch.testing.assert_close(go_on(fabric, path), expected, rtol=1e-5, atol=1e-6)


# -- what a rank reads ----------------------------------------------------------------------------


def load_without_shards_of_the_other_rank(fabric: Fabric, path: Path) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
    model = fabric.setup(module)
    fabric.save(path, {"model": model, "large": torch.ones(6), "step": 3})
    copy_of_rank = path.with_name(f"of-rank-{fabric.global_rank}")
    shutil.copytree(path, copy_of_rank)
    other_rank = 1 - fabric.global_rank
    (shards_of_other_rank,) = copy_of_rank.glob(f"rank-{other_rank:05}-*.safetensors")
    shards_of_other_rank.unlink()
    with fabric.init_module(empty_init=True):
        empty = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
    loaded = fabric.setup(empty)
    assert fabric.load(copy_of_rank, {"model": loaded}) == {"step": 3}
    for parameter in loaded.parameters():
        assert local_tensor(parameter).shape[0] == 4
    assert are_equal(full_values(loaded), full_values(model))
    state = {"large": None}
    fabric.load(path, state)
    assert torch.equal(state["large"], torch.ones(6))


def test_a_rank_reads_its_own_shards_only_and_never_the_entries_that_nobody_named(
    tmp_path: Path,
) -> None:
    in_shards(load_without_shards_of_the_other_rank, tmp_path / "state")


# -- checkpoints without some of the entries ------------------------------------------------------


def without_head(name: str, value: Any) -> bool:
    return not name.startswith("head") and isinstance(value, Tensor)


def entries_of_model(path: Path) -> set[str]:
    io = ShardedCheckpoint() if path.is_dir() else FullCheckpoint()
    return set(io.load(path)["model"])


def save_trainable(fabric: Fabric, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    net = Net()
    net.encoder.requires_grad_(False)
    trainable = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(net, optimizer)
    loss = model(torch.ones(1, 4)).sum()
    fabric.backward(loss)
    optimizer.step()
    trained_values = full_values(model)
    state = {"model": model, "optimizer": optimizer}
    fabric.save(folder / "trainable", state, trainable_only=True)
    fabric.save(folder / "filtered", state, filter={"model": without_head}, trainable_only=True)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    text = outcome(lambda: fabric.load(folder / "trainable", state))
    assert text.startswith("CheckpointError")
    assert "encoder.weight, encoder.bias" in text

    fabric.load(folder / "trainable", state, strict=False)
    names = [name for name, _ in (*net.named_parameters(), *net.named_buffers())]
    for name, value, trained in zip(names, full_values(model), trained_values, strict=True):
        if name.startswith("encoder"):
            assert (value == 7).all()
        else:
            assert torch.equal(value, trained)
    fabric.barrier()
    entries = {"blocks.0.weight", "blocks.0.bias", "steps"}
    assert entries_of_model(folder / "filtered") == entries
    assert entries_of_model(folder / "trainable") == entries | {"head.weight", "head.bias"}


def test_frozen_parameters_can_be_left_out_and_stay_as_they_are_on_load(tmp_path: Path) -> None:
    with single() as fabric:
        save_trainable(fabric, tmp_path / "single")
    run_in_ranks(save_trainable, tmp_path / "ddp")
    in_shards(save_trainable, tmp_path / "fsdp")


# -- formats --------------------------------------------------------------------------------------


def save_count(fabric: Fabric, path: Path) -> bool:
    """Save and load a tensor; return whether the checkpoint is a folder."""
    fabric.save(path, {"count": torch.ones(3), "step": 1})
    state = {"count": None}
    fabric.load(path, state)
    assert torch.equal(state["count"], torch.ones(3))
    return path.is_dir()


def test_the_strategy_decides_what_is_written_and_a_chosen_format_wins(tmp_path: Path) -> None:
    assert in_shards(save_count, tmp_path / "sharded") == [True, True]
    assert in_shards(save_count, tmp_path / "full", state_dict_type="full") == [False, False]
    file_io = FullCheckpoint()
    assert in_shards(save_count, tmp_path / "file", checkpoint_io=file_io) == [False, False]
    ddp = DDPStrategy(start_method="forkserver", checkpoint_io=ShardedCheckpoint())
    results = run_in_ranks(save_count, tmp_path / "ddp", strategy=ddp)
    assert results == [True, True]
    with single(checkpoint_io=ShardedCheckpoint()) as fabric:
        assert save_count(fabric, tmp_path / "single")
        assert fabric.load(tmp_path / "full")["step"] == 1


def test_an_unknown_kind_of_checkpoint_is_refused_when_the_strategy_is_made() -> None:
    with pytest.raises(ConfigurationError, match="state_dict_type='local'") as raised:
        FSDPStrategy(state_dict_type="local")
    assert "'full'" in raised.value.expected


# -- errors ---------------------------------------------------------------------------------------


def deep(width: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])


def damage(path: Path) -> None:
    (shards,) = path.glob("rank-00001-*.safetensors")
    content = bytearray(shards.read_bytes())
    content[len(content) // 2] ^= 1
    shards.write_bytes(content)


class Stubborn:
    """An object that refuses its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"version": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise LookupError("not this version")


def load_with_mistakes(fabric: Fabric, folder: Path) -> dict[str, str]:
    torch.manual_seed(1)
    module = deep(6)
    wide = fabric.setup(module)
    net = fabric.setup(Net())
    model = fabric.setup(deep(4))
    fabric.save(folder / "wide", {"model": wide})
    fabric.save(folder / "net", {"model": net})
    fabric.save(folder / "damaged", {"model": wide, "stubborn": Stubborn()})
    fabric.save(folder / "fits", {"model": wide, "stubborn": Stubborn()})
    if fabric.global_rank == 0:
        damage(folder / "damaged")
        (folder / "foreign").mkdir()
        (folder / "file.pt").touch()
    fabric.barrier()
    name_on_rank = "wide" if fabric.global_rank == 0 else "fits"

    def load(name: str, model: nn.Module, **state: Any) -> str:
        return outcome(lambda: fabric.load(folder / name, {"model": model, **state}))

    def load_raw(name: str) -> str:
        return outcome(lambda: fabric.load_raw(folder / name, wide))

    before = full_values(wide, model, net)
    texts = {
        "shapes": load("wide", model),
        "another model": load("net", model),
        "damage": load("damaged", wide),
        "stubborn": load("fits", net, stubborn=Stubborn()),
        "raw": load_raw("wide"),
        "foreign folder": load("foreign", wide),
        "raw foreign folder": load_raw("foreign"),
        "two saves": load(name_on_rank, wide),
        "missing": load("widf", wide),
        "onto a file": outcome(lambda: fabric.save(folder / "file.pt", {"model": wide})),
    }
    assert are_equal(full_values(wide, model, net), before)
    return texts


def test_what_does_not_fit_is_refused_on_every_rank_and_leaves_the_module_as_it_was(
    tmp_path: Path,
) -> None:
    for texts in in_shards(load_with_mistakes, tmp_path):
        for name, text in texts.items():
            assert "Error" in text.partition(":")[0]
            if name not in ("stubborn", "onto a file"):
                assert "Valid:" in text
                assert "Write:" in text
        for layer in range(8):
            assert f"{layer}.weight is (6" in texts["shapes"]
            assert f"{layer}.bias is (6" in texts["shapes"]
        assert "not in the file: 0.weight" in texts["another model"]
        assert "checksum of rank-00001-" in texts["damage"]
        assert "fabric.load(" in texts["raw"]
        assert "without an index.json" in texts["foreign folder"]
        assert "'model': model" in texts["raw foreign folder"]
        assert "there is no rank-0000" in texts["two saves"]
        assert str(tmp_path / "wide") in texts["missing"]
        assert "there is a file of that name" in texts["onto a file"]
    assert (tmp_path / "file.pt").is_file()


def test_a_file_is_not_written_onto_a_folder_of_shards(tmp_path: Path) -> None:
    path = tmp_path / "state"
    ShardedCheckpoint().save({"step": 1}, path)
    with single() as fabric, pytest.raises(CheckpointError, match="folder of that name"):
        fabric.save(path, {"step": 2})
    assert ShardedCheckpoint().load(path)["step"] == 1

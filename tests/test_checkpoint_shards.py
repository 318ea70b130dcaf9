"""Folders of shards through the facade: who reads what, what may be left out, and refusals that change nothing."""

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

pytestmark = pytest.mark.timeout(120)


def in_shards(function: Any, *args: Any, ranks: int = 2, **options: Any) -> list[Any]:
    strategy = FSDPStrategy(start_method="forkserver", **options)
    return run_in_ranks(function, *args, ranks=ranks, strategy=strategy)


def single(**options: Any) -> Fabric:
    strategy = SingleDeviceStrategy(**options)
    return Fabric(accelerator="cpu", devices=1, environment="none", strategy=strategy)


def whole(*models: nn.Module) -> list[Tensor]:
    """Every value of the models, parameters and buffers. Collective."""
    return [
        full_tensor(value.detach()).clone()
        for model in models
        for value in (*model.parameters(), *model.buffers())
    ]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# -- several modules and optimizers -----------------------------------------------------------------------------------


def pair(fabric: Fabric, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    generator = Net()
    first = Net()
    critic = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    fast = torch.optim.AdamW(generator.parameters(), lr=0.1)
    slow = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    generator, fast = fabric.setup(generator, fast)
    critic, slow = fabric.setup(critic, slow)
    return {
        "generator": generator, "critic": critic, "average": fabric.setup(first), "fast": fast, "slow": slow, "step": 0,
    }  # fmt: skip


def train(fabric: Fabric, state: dict[str, Any], steps: int) -> list[Tensor]:
    """The same numbers on any number of ranks, since each sees the same batch."""
    for _ in range(steps):
        x = torch.full((3, 4), 1.0 + state["step"])
        for model, optimizer in (
            (state["generator"], state["fast"]),
            (state["critic"], state["slow"]),
        ):
            fabric.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        state["step"] += 1
    return whole(state["generator"], state["critic"], state["average"])


def save_in_the_middle(fabric: Fabric, path: Path) -> list[Tensor]:
    state = pair(fabric, seed=1)
    train(fabric, state, 2)
    fabric.save(path, state)
    return train(fabric, state, 2)


def go_on(fabric: Fabric, path: Path) -> list[Tensor]:
    state = pair(fabric, seed=2)
    fabric.load(path, state)
    return train(fabric, state, 2)


def test_several_modules_and_optimizers_go_on_from_one_folder_under_any_strategy(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state"
    expected = in_shards(save_in_the_middle, path)[0]
    jobs = [in_shards(go_on, path), in_shards(go_on, path, ranks=3), run_in_ranks(go_on, path)]
    for job in jobs:
        for actual in job:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert same(jobs[0][0], expected)
    with single() as fabric:
        torch.testing.assert_close(go_on(fabric, path), expected, rtol=1e-5, atol=1e-6)


# -- who reads what ---------------------------------------------------------------------------------------------------


def load_own_file(fabric: Fabric, path: Path) -> tuple[list[Tensor], list[int], list[Tensor]]:
    """Save, and load into a model without values where the other rank's shards are not there."""
    torch.manual_seed(1)
    model = fabric.setup(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)))
    expected = whole(model)
    fabric.save(path, {"model": model, "large": torch.ones(6), "step": 3})
    own = path.with_name(f"of-rank-{fabric.global_rank}")
    shutil.copytree(path, own)
    (other,) = own.glob(f"rank-{1 - fabric.global_rank:05}-*.safetensors")
    other.unlink()
    with fabric.init_module(empty_init=True):
        empty = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
    loaded = fabric.setup(empty)
    assert fabric.load(own, {"model": loaded}) == {"step": 3}
    shards = [local_tensor(parameter).shape[0] for parameter in loaded.parameters()]
    state = {"large": None}
    fabric.load(path, state)
    return [*expected, torch.ones(6)], shards, [*whole(loaded), state["large"]]


def test_a_rank_reads_its_own_shards_only_and_never_the_entries_that_nobody_named(
    tmp_path: Path,
) -> None:
    for expected, shards, loaded in in_shards(load_own_file, tmp_path / "state"):
        assert shards == [4, 4, 4, 4]
        assert same(loaded, expected)


# -- parts ------------------------------------------------------------------------------------------------------------


def partial(fabric: Fabric, folder: Path) -> tuple[set[str], set[str], str, list[bool]]:
    net = Net()
    net.encoder.requires_grad_(False)
    optimizer = torch.optim.SGD(
        [p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9
    )
    model, optimizer = fabric.setup(net, optimizer)
    fabric.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    trained = whole(model)
    state = {"model": model, "optimizer": optimizer}
    fabric.save(folder / "trainable", state, trainable_only=True)
    no_head = {
        "model": lambda name, value: not name.startswith("head") and isinstance(value, Tensor)
    }
    fabric.save(folder / "both", state, filter=no_head, trainable_only=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    refused = outcome(lambda: fabric.load(folder / "trainable", state))
    before = whole(model)
    fabric.load(folder / "trainable", state, strict=False)
    frozen = [
        name.startswith("encoder") for name, _ in (*net.named_parameters(), *net.named_buffers())
    ]
    restored = [
        torch.equal(now, (filled if was_frozen else saved))
        for now, filled, saved, was_frozen in zip(
            whole(model), before, trained, frozen, strict=True
        )
    ]
    fabric.barrier()
    names = [set(read(folder / name)["model"]) for name in ("trainable", "both")]
    return names[0], names[1], refused, restored


def read(path: Path) -> dict[str, Any]:
    return ShardedCheckpoint().load(path) if path.is_dir() else FullCheckpoint().load(path)


KEPT = {"blocks.0.weight", "blocks.0.bias", "head.weight", "head.bias", "steps"}


def test_frozen_parameters_can_be_left_out_and_stay_as_they_are_on_load(tmp_path: Path) -> None:
    with single() as fabric:
        (tmp_path / "single").mkdir()
        results = [partial(fabric, tmp_path / "single")]
    (tmp_path / "ddp").mkdir()
    results += run_in_ranks(partial, tmp_path / "ddp")
    (tmp_path / "fsdp").mkdir()
    results += in_shards(partial, tmp_path / "fsdp")
    for trainable, both, refused, restored in results:
        assert trainable == KEPT
        assert both == {"blocks.0.weight", "blocks.0.bias", "steps"}
        assert refused.startswith("CheckpointError")
        assert "encoder.weight, encoder.bias" in refused
        assert all(restored)


# -- which format -----------------------------------------------------------------------------------------------------


def save_count(fabric: Fabric, path: Path) -> bool:
    fabric.save(path, {"count": torch.ones(3), "step": 1})
    state = {"count": None}
    fabric.load(path, state)
    return path.is_dir() and torch.equal(state["count"], torch.ones(3))


def test_the_strategy_decides_what_is_written_and_a_chosen_format_wins(tmp_path: Path) -> None:
    assert in_shards(save_count, tmp_path / "sharded") == [True, True]
    assert in_shards(save_count, tmp_path / "full", state_dict_type="full") == [False, False]
    assert in_shards(save_count, tmp_path / "file", checkpoint_io=FullCheckpoint()) == [
        False,
        False,
    ]
    ddp = DDPStrategy(start_method="forkserver", checkpoint_io=ShardedCheckpoint())
    assert run_in_ranks(save_count, tmp_path / "ddp", strategy=ddp) == [True, True]
    with single(checkpoint_io=ShardedCheckpoint()) as fabric:
        assert save_count(fabric, tmp_path / "single")
        assert fabric.load(tmp_path / "full")["step"] == 1


def test_an_unknown_kind_of_checkpoint_is_refused_when_the_strategy_is_made() -> None:
    with pytest.raises(ConfigurationError, match="state_dict_type='local'") as raised:
        FSDPStrategy(state_dict_type="local")
    assert "'full'" in raised.value.expected


# -- refusals ---------------------------------------------------------------------------------------------------------


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


def refusals(fabric: Fabric, folder: Path) -> tuple[dict[str, str], bool]:
    first = fabric.global_rank == 0
    torch.manual_seed(1)
    wide = fabric.setup(deep(6))
    other = fabric.setup(Net())
    model = fabric.setup(deep(4))
    fabric.save(folder / "wide", {"model": wide})
    fabric.save(folder / "net", {"model": other})
    fabric.save(folder / "damaged", {"model": wide, "stubborn": Stubborn()})
    fabric.save(folder / "fits", {"model": wide, "stubborn": Stubborn()})
    if first:
        damage(folder / "damaged")
        (folder / "others").mkdir()
        (folder / "file.pt").touch()
    fabric.barrier()
    before = whole(wide, model, other)
    texts = {
        "shapes": outcome(lambda: fabric.load(folder / "wide", {"model": model})),
        "another model": outcome(lambda: fabric.load(folder / "net", {"model": model})),
        "damage": outcome(lambda: fabric.load(folder / "damaged", {"model": wide})),
        "stubborn": outcome(
            lambda: fabric.load(folder / "fits", {"model": other, "stubborn": Stubborn()})
        ),
        "raw": outcome(lambda: fabric.load_raw(folder / "wide", wide)),
        "other folder": outcome(lambda: fabric.load(folder / "others", {"model": wide})),
        "raw other folder": outcome(lambda: fabric.load_raw(folder / "others", wide)),
        "two saves": outcome(
            lambda: fabric.load(folder / ("wide" if first else "fits"), {"model": wide})
        ),
        "missing": outcome(lambda: fabric.load(folder / "widf", {"model": wide})),
        "onto a file": outcome(lambda: fabric.save(folder / "file.pt", {"model": wide})),
    }
    return texts, same(whole(wide, model, other), before)


def test_what_does_not_fit_is_refused_on_every_rank_and_leaves_the_module_as_it_was(
    tmp_path: Path,
) -> None:
    for texts, unchanged in in_shards(refusals, tmp_path):
        assert unchanged
        for name, text in texts.items():
            assert name in ("stubborn", "onto a file") or all(
                part in text for part in ("Valid:", "Write:")
            ), text
            assert "Error" in text.partition(":")[0]
        assert all(
            f"{i}.{kind} is (6" in texts["shapes"] for i in range(8) for kind in ("weight", "bias")
        )
        assert "not in the file: 0.weight" in texts["another model"]
        assert "checksum of rank-00001-" in texts["damage"]
        assert "fabric.load(" in texts["raw"]
        assert "without an index.json" in texts["other folder"]
        assert "'model': model" in texts["raw other folder"]
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

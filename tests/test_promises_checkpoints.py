"""Promises about checkpoints: compiled models, loads that fail late, odd paths, object stores, and whole weights."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import load_file
from torch import Tensor, nn

from fabric import Fabric
from fabric.checkpoint import FullCheckpoint, ShardedCheckpoint
from fabric.cli import main
from fabric.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from tests.models import Net
from tests.ranks import outcome, run_in_ranks

pytestmark = pytest.mark.timeout(90)

FORMATS = {"file": FullCheckpoint(), "folder": ShardedCheckpoint()}
STRATEGIES = {
    "ddp": DDPStrategy(),
    "ddp-folder": DDPStrategy(checkpoint_io=ShardedCheckpoint()),
    "fsdp": FSDPStrategy(),
    "fsdp-file": FSDPStrategy(state_dict_type="full"),
}


def single(io: Any) -> Fabric:
    return Fabric(
        strategy=SingleDeviceStrategy(accelerator="cpu", checkpoint_io=io), environment="none"
    )


def values(fabric: Fabric, model: nn.Module) -> dict[str, Tensor]:
    return fabric.strategy.full_state(copy.copy(dict(model.state_dict())))


# -- models with compiled blocks ------------------------------------------------------------------


class Blocks(nn.Module):
    """Blocks, of which one is compiled, with a frozen one and a buffer."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        block: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.block = torch.compile(block, backend="eager") if compiled else block
        frozen: Any = nn.Linear(4, 4).requires_grad_(False)
        self.frozen = torch.compile(frozen, backend="eager") if compiled else frozen


class Pair(nn.Module):
    """A plain module around two that are set up."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__()
        self.one = fabric.setup(Blocks(True))
        self.two = fabric.setup(nn.Linear(4, 4))


def compiled_or_not(fabric: Fabric, folder: Path) -> dict[str, bool]:
    found = {}
    if fabric.global_rank == 0:
        torch.save(torch.compile(Blocks(True), backend="eager").state_dict(), folder / "raw")
    fabric.barrier()
    raw = torch.load(folder / "raw", weights_only=True)
    for compiled in (True, False):
        model = fabric.setup(Blocks(compiled))
        fabric.load_raw(folder / "raw", model)
        pairs = zip(raw, raw.values(), values(fabric, model).values(), strict=True)
        found |= {f"{name} into {compiled}": torch.equal(one, two) for name, one, two in pairs}
    for saved in (True, False):
        model = fabric.setup(Blocks(saved))
        fabric.save(folder / f"{saved}", {"model": model})
        fabric.save(folder / f"trainable {saved}", {"model": model}, trainable_only=True)
        for loaded in (True, False):
            for name in (f"{saved}", f"trainable {saved}"):
                other = fabric.setup(Blocks(loaded))
                fabric.load(folder / name, {"model": other}, strict=name == f"{saved}")
                pairs = zip(
                    values(fabric, model).items(), values(fabric, other).values(), strict=True
                )
                for key, (one, two) in ((key, (one, two)) for (key, one), two in pairs):
                    is_left_out = "frozen" in key and name != f"{saved}"
                    found[f"{name} into {loaded}: {key}"] = torch.equal(one, two) is not is_left_out
    kept: dict[str, Any] = {"model": None}
    fabric.load(folder / "True", kept)
    found["names"] = list(kept["model"]) == list(Blocks(False).state_dict())
    pair = Pair(fabric)
    other = Pair(fabric)
    fabric.save(folder / "pair", {"pair": pair})
    fabric.load(folder / "pair", {"pair": other})
    for key, one in values(fabric, pair).items():
        found[f"pair: {key}"] = torch.equal(one, values(fabric, other)[key])
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiled_blocks_and_modules_around_set_up_ones_load(strategy: str, tmp_path: Path) -> None:
    for actual in run_in_ranks(compiled_or_not, tmp_path, strategy=STRATEGIES[strategy]):
        assert len(actual) > 50
        assert [name for name, is_right in actual.items() if not is_right] == []


# -- a load that fails late -----------------------------------------------------------------------


class Picky(nn.Module):
    """Its extra state is refused on one rank, when its weights have been loaded."""

    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.refuses = refuses
        self.register_buffer("seen", torch.zeros(()))

    def get_extra_state(self) -> Any:
        return {"kind": "picky"}

    def set_extra_state(self, state: Any) -> None:
        if self.refuses and self.seen.item() == 7:
            raise ValueError("not mine")

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Refuses:
    """An object that refuses its state."""

    def state_dict(self) -> dict[str, Any]:
        torch.rand(3)  # as torchdata's loader, which makes an iterator
        return {"x": 1}

    def load_state_dict(self, state: Any) -> None:
        if state["x"] == 2:
            raise ValueError("not mine")


class Second(Refuses):
    def state_dict(self) -> dict[str, Any]:
        return {"x": 2}


def trained(fabric: Fabric, refuses: bool) -> dict[str, Any]:
    module = Picky(refuses)
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), lr=0.5))
    fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    plain = fabric.setup(nn.Linear(2, 2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {
        "plain": plain,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "step": 0,
    }


def pictures(fabric: Fabric, state: dict[str, Any]) -> Any:
    kept: dict[str, Any] = {
        name: each for name, each in state.items() if not hasattr(each, "state_dict")
    }
    for name in ("plain", "model", "optimizer", "scheduler"):
        kept[name] = copy.deepcopy(fabric.strategy.full_state(dict(state[name].state_dict())))
    return repr(kept), repr(torch.get_rng_state().tolist())


def fail_late(fabric: Fabric, folder: Path) -> list[Any]:
    found: list[Any] = []
    state = trained(fabric, False)
    state["model"].seen.fill_(7)
    state["scheduler"].last_epoch = 3
    saved = {**state, "step": 5}
    fabric.save(folder / "module", saved)
    fabric.save(folder / "object", {**saved, "other": Second()})
    fabric.barrier()
    for name, extra in (("module", {}), ("object", {"other": Refuses()})):
        for is_trained in (True, False):
            state = {**trained(fabric, fabric.global_rank == 1 and name == "module"), **extra}
            if not is_trained:
                state["optimizer"].state.clear()
            torch.manual_seed(3 + fabric.global_rank)
            before = pictures(fabric, state)
            text = outcome(lambda name=name, state=state: fabric.load(folder / name, state))
            found.append((text, before == pictures(fabric, state)))
    state = {**trained(fabric, False)}
    fabric.load(folder / "module", state)
    found.append(("", pictures(fabric, state)[0] == pictures(fabric, saved)[0]))
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_load_that_fails_late_changes_nothing(strategy: str, tmp_path: Path) -> None:
    results = run_in_ranks(fail_late, tmp_path, strategy=STRATEGIES[strategy])
    for actual in results:
        assert all("not mine" in text for text, _ in actual[:-1])
        assert [is_same for _, is_same in actual] == [True] * 5


# -- collections that hold themselves -------------------------------------------------------------


class Holder(Refuses):
    def __init__(self, ring: Any) -> None:
        self.ring = ring

    def state_dict(self) -> dict[str, Any]:
        return {"ring": self.ring}


def rings(fabric: Fabric, path: Path) -> list[tuple[str, str]]:
    found = []
    ring: list[Any] = [1]
    ring.append(ring)
    for async_ in (False, True):
        for value in (ring, Holder(ring if fabric.global_rank else [1])):
            state = {"model": fabric.setup(nn.Linear(4, 4)), "x": value}
            text = outcome(
                lambda state=state, async_=async_: fabric.save(path, state, async_=async_)
            )
            found.append((type(value).__name__, text))
    return found


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp-file", "ddp"])
def test_a_collection_that_holds_itself_is_refused_on_every_rank(
    strategy: str, tmp_path: Path
) -> None:
    for actual in run_in_ranks(rings, tmp_path / "run", strategy=STRATEGIES[strategy]):
        assert all("contains itself" in text for _, text in actual)
        assert all(text.startswith("ArgumentTypeError") for kind, text in actual if kind == "list")
    assert os.listdir(tmp_path) == []


# -- odd paths ------------------------------------------------------------------------------------


KNOWN = (
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConfigurationError",
    "DamagedCheckpointError",
)


def odd_paths(fabric: Fabric, folder: Path) -> dict[str, str]:
    model = fabric.setup(nn.Linear(4, 4))
    kind = "folder" if fabric.strategy.saves_shards else "file"
    place = folder / kind
    if fabric.is_global_zero:
        for name in ("odd", "odd/rank-00001-bbbbbbbbbbbb.safetensors", "index/index.json", "pipes"):
            (place / name).mkdir(parents=True)
        (place / "foreign").mkdir()
        (place / "foreign" / "index.json").write_text('{\n  "weight_map": {}\n}')
        os.mkfifo(place / "odd" / "rank-00000-aaaaaaaaaaaa.safetensors")
        os.mkfifo(place / "odd" / ".index.json.aaaaaaaaaaaa.tmp")
        os.mkfifo(place / "pipes" / "index.json")
        os.mkfifo(place / "pipe")
    fabric.barrier()
    found = {}
    paths = {
        "empty": "",
        "null": "a\0b",
        "long": place / ("a" * 300),
        "slash": Path("s3://bucket/run"),
    }
    for name, path in (
        paths | {name: place / name for name in ("index", "foreign", "pipes", "pipe", "odd")}
    ).items():
        found[f"{name} saved"] = outcome(lambda path=path: fabric.save(path, {"model": model}))
        found[f"{name} loaded"] = outcome(lambda path=path: fabric.load(path, {"model": model}))
    return found


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp-file", "ddp"])
def test_odd_paths_are_refused_once_and_clearly(strategy: str, tmp_path: Path) -> None:
    first, second = run_in_ranks(odd_paths, tmp_path, strategy=STRATEGIES[strategy])
    said = {
        "empty": "it names no file", "null": "it names no file", "long": "longer than 255 bytes",
        "slash": "one slash behind its scheme",
    }  # fmt: skip
    for name, words in said.items():
        for texts in (first, second):
            assert texts[f"{name} saved"].startswith("ConfigurationError")
            assert words in texts[f"{name} saved"]
            assert words in texts[f"{name} loaded"]
    names = {"index": "there is a folder of that name", "pipe": "there is a", "pipes": "there is a"}
    for name, words in names.items():
        assert words in first[f"{name} saved"]
    if strategy == "fsdp":
        assert "index.json is not one that fabric wrote" in first["foreign saved"]
        assert first["odd saved"] == first["odd loaded"] == "fine"
    for texts in (first, second):
        assert all(
            "Error: " not in text or text.partition(":")[0] in KNOWN for text in texts.values()
        )


# -- paths with a scheme --------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_a_checkpoint_in_memory_is_replaced_as_a_whole(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"memory://c13-{form}/run"
    files = fsspec.filesystem("memory")
    with single(FORMATS[form]) as fabric:
        fabric.launch()
        model = fabric.setup(Net())
        for step in range(3):
            fabric.save(url, {"model": model, "step": step})
        pending = fabric.save(url, {"model": model, "step": 3}, async_=True)
        pending.wait()
        state = {"model": fabric.setup(Net()), "step": 0}
        fabric.load(url, state)
        assert state["step"] == 3
        assert all(
            map(torch.equal, model.state_dict().values(), state["model"].state_dict().values())
        )
        kept = files.find(f"/c13-{form}")
        assert len(kept) == (1 if form == "file" else 3)

        class Broken:
            def __reduce__(self) -> Any:
                raise ValueError("broken")

        with torch.serialization.safe_globals([Broken]):
            text = outcome(lambda: fabric.save(url, {"model": model, "x": Broken()}))
        assert ("CheckpointError" if form == "file" else "ArgumentTypeError") in text
        assert files.find(f"/c13-{form}") == kept
        assert "there is no such" in outcome(lambda: fabric.load(f"{url}-2", state))
        assert f"memory://c13-{form}/run" in outcome(lambda: fabric.load(f"{url}-2", state))
        FORMATS[form].remove(pending.path)
    assert files.find(f"/c13-{form}") == []
    assert os.listdir(tmp_path) == []


class Objects(LocalFileSystem):
    """As an object store: what is opened for writing is there once it is closed, and nothing can be renamed."""

    protocol = "objects"

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "auto_mkdir": True})

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("objects://"))

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise OSError("an object cannot be renamed")


def schemes(fabric: Fabric, folder: Path) -> dict[str, Any]:
    fsspec.register_implementation("objects", Objects, clobber=True)
    model = fabric.setup(Net())
    found = {}
    for scheme in ("file", "local", "objects"):
        url = f"{scheme}://{folder}/{scheme}"
        for step in range(2):
            fabric.save(url, {"model": model, "step": step}, async_=bool(step))
        state = {"model": fabric.setup(Net()), "step": -1}
        fabric.load(url, state)
        pairs = zip(
            values(fabric, model).values(), values(fabric, state["model"]).values(), strict=True
        )
        found[scheme] = state["step"] == 1 and all(torch.equal(one, two) for one, two in pairs)
    found["own"] = outcome(lambda: fabric.save(url, {"model": model, "x": object()}))
    found["filter"] = outcome(
        lambda: fabric.save(url, {"x": {"a": 1}}, filter={"x": lambda *_: 1 / fabric.global_rank})
    )
    fabric.load(url, state := {"step": -1})
    found["kept"] = state["step"]
    for url in ("memory://shared", "s3://bucket/run", "nonsense://bucket/run"):
        found[url] = outcome(lambda url=url: fabric.save(url, {"model": model}))
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_schemes_on_two_ranks(strategy: str, tmp_path: Path) -> None:
    for actual in run_in_ranks(schemes, tmp_path, strategy=STRATEGIES[strategy]):
        assert [actual[scheme] for scheme in ("file", "local", "objects")] == [True] * 3
        assert "builtins.object" in actual["own"]
        assert "ZeroDivisionError" in actual["filter"]
        assert actual["kept"] == 1
        assert actual["s3://bucket/run"].startswith("MissingDependencyError")
        assert "s3fs" in actual["s3://bucket/run"]
        assert "nonsense" in actual["nonsense://bucket/run"]
        is_refused = "a file system that all ranks share" in actual["memory://shared"]
        assert is_refused if strategy == "fsdp" else actual["memory://shared"] == "fine"
    assert sorted(os.listdir(tmp_path)) == ["file", "local", "objects"]
    if strategy == "fsdp":
        kinds = sorted(name.rpartition(".")[2] for name in os.listdir(tmp_path / "objects"))
        assert kinds == ["json"] * 3 + ["safetensors"] * 2, (
            "the index, and two files of each rank, of one save"
        )


# -- whole weights --------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


def whole(fabric: Fabric, folder: Path) -> Any:
    model = fabric.setup(Tied())
    expected = {name: value.clone() for name, value in values(fabric, model).items()}
    state = fabric.get_state_dict(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if fabric.global_rank:
        return state == {}
    assert list(state) == list(expected)
    assert all(
        torch.equal(state[name], value) and state[name].device.type == "cpu"
        for name, value in expected.items()
    )
    assert not any(hasattr(value, "full_tensor") or value.requires_grad for value in state.values())
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    Tied().load_state_dict(state)
    return True


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_get_state_dict_is_whole_on_rank_0_and_a_copy(strategy: str, tmp_path: Path) -> None:
    assert run_in_ranks(whole, tmp_path, strategy=STRATEGIES[strategy]) == [True, True]


@pytest.mark.parametrize(("limit", "files"), [("0.000001", 2), ("0.0000003", 5), ("5", 1)])
def test_consolidate_writes_a_folder_for_hugging_face(
    limit: str, files: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {f"layer.{number}": torch.randn(10, 10) for number in range(4)}
    weights["wide"] = torch.randn(2)
    ShardedCheckpoint().save({"model": weights, "step": 1}, tmp_path / "run")
    output = tmp_path / "run-weights"
    assert main(["consolidate", str(tmp_path / "run"), "--max-shard-gb", limit]) == 0
    names = sorted(os.listdir(output))
    actual = {}
    for name in (name for name in names if name.endswith(".safetensors")):
        part = load_file(output / name)
        assert sum(each.nbytes for each in part.values()) <= float(limit) * 1e9 or len(part) == 1
        actual |= dict.fromkeys(part, name)
        assert all(torch.equal(value, weights[key]) for key, value in part.items())
    assert actual.keys() == weights.keys()
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {}, "weight_map": actual}
    assert len(names) == files + 1
    assert f"model-00001-of-{files:05}.safetensors" in names
    assert main(["consolidate", str(tmp_path / "run"), "--max-shard-gb", "5"]) == 2
    assert "exists" in capsys.readouterr().err
    assert sorted(os.listdir(output)) == names

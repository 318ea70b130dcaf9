"""Checkpoints at unusual paths, and at paths with a scheme."""

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import nn

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.checkpoint import FullCheckpoint, ShardedCheckpoint
from fabric.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from tests.models import Net
from tests.ranks import outcome, run_in_ranks

FORMATS = {"file": FullCheckpoint(), "folder": ShardedCheckpoint()}
STRATEGIES = {
    "ddp": DDPStrategy(),
    "fsdp": FSDPStrategy(),
    "fsdp-file": FSDPStrategy(state_dict_type="full"),
}


def single(io: Any) -> Fabric:
    strategy = SingleDeviceStrategy(accelerator="cpu", checkpoint_io=io)
    return Fabric(strategy=strategy, environment="none")


def assert_equal_states(actual: nn.Module, expected: nn.Module) -> None:
    expected_state = expected.state_dict()
    for name, value in actual.state_dict().items():
        assert torch.equal(full_tensor(value), full_tensor(expected_state[name])), name


# -- unusual paths --------------------------------------------------------------------------------

ERRORS = (
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConfigurationError",
    "DamagedCheckpointError",
)


def make_unusual_files(folder: Path) -> None:
    for name in ("odd/rank-00001-bbbbbbbbbbbb.safetensors", "index/index.json", "pipes", "foreign"):
        (folder / name).mkdir(parents=True)
    (folder / "foreign" / "index.json").write_text('{\n  "weight_map": {}\n}')
    os.mkfifo(folder / "odd" / "rank-00000-aaaaaaaaaaaa.safetensors")
    os.mkfifo(folder / "odd" / ".index.json.aaaaaaaaaaaa.tmp")
    os.mkfifo(folder / "pipes" / "index.json")
    os.mkfifo(folder / "pipe")


def use_unusual_paths(fabric: Fabric, folder: Path) -> dict[str, str]:
    module = nn.Linear(4, 4)
    model = fabric.setup(module)
    if fabric.is_global_zero:
        make_unusual_files(folder)
    fabric.barrier()
    paths: dict[str, Any] = {
        "empty": "",
        "null": "a\0b",
        "long": folder / ("a" * 300),
        "slash": Path("s3://bucket/run"),
    }
    for name in ("index", "foreign", "pipes", "pipe", "odd"):
        paths[name] = folder / name
    texts = {}
    for name, path in paths.items():
        texts[f"{name} saved"] = outcome(lambda path=path: fabric.save(path, {"model": model}))
        texts[f"{name} loaded"] = outcome(lambda path=path: fabric.load(path, {"model": model}))
    return texts


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp-file", "ddp"])
def test_unusual_paths_are_refused_once_and_clearly(strategy: str, tmp_path: Path) -> None:
    first, second = run_in_ranks(use_unusual_paths, tmp_path, strategy=STRATEGIES[strategy])
    problems = {
        "empty": "it names no file",
        "null": "it names no file",
        "long": "longer than 255 bytes",
        "slash": "one slash behind its scheme",
    }
    for name, problem in problems.items():
        for texts in (first, second):
            assert texts[f"{name} saved"].startswith("ConfigurationError")
            assert problem in texts[f"{name} saved"]
            assert problem in texts[f"{name} loaded"]
    assert "there is a folder of that name" in first["index saved"]
    assert "there is a" in first["pipe saved"]
    assert "there is a" in first["pipes saved"]
    if strategy == "fsdp":
        assert "index.json is not one that fabric wrote" in first["foreign saved"]
        assert first["odd saved"] == "fine"
        assert first["odd loaded"] == "fine"
    for text in (*first.values(), *second.values()):
        if "Error: " in text:
            assert text.partition(":")[0] in ERRORS


def save_where_something_else_is(fabric: Fabric, folder: Path, obstacle: Path) -> list[str]:
    net = Net()
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    state = {"model": model}
    in_a_file = folder / "file" / "state"
    texts = [
        outcome(lambda: fabric.save(obstacle, state)),
        # The error is that of this call, and not of the next one.
        outcome(lambda: fabric.save(obstacle, state, async_=True)),
        outcome(lambda: fabric.save(in_a_file, state)),
    ]
    fabric.save(folder / "another", state)
    return texts


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp-file", "ddp"])
def test_a_path_that_cannot_be_replaced_is_refused_on_all_ranks_by_the_call_that_saves(
    strategy: str, tmp_path: Path
) -> None:
    obstacles = {"file": tmp_path / "file", "folder": tmp_path / "folder"}
    obstacles["file"].write_text("notes")
    obstacles["folder"].mkdir()
    kind = "file" if strategy == "fsdp" else "folder"
    texts_of_ranks = run_in_ranks(
        save_where_something_else_is, tmp_path, obstacles[kind], strategy=STRATEGIES[strategy]
    )
    for path, path_async, in_a_file in texts_of_ranks:
        assert f"there is a {kind} of that name" in path
        assert path_async == path
        assert f"{str(obstacles['file'])!r} is a file" in in_a_file
        for text in (path, path_async, in_a_file):
            assert text.startswith("CheckpointError: fabric.save(")
    assert obstacles["file"].read_text() == "notes"
    assert list(obstacles["folder"].iterdir()) == []
    assert sorted(os.listdir(tmp_path)) == ["another", "file", "folder"]


# -- paths with a scheme --------------------------------------------------------------------------


class Broken:
    """An object that fails when it is pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("broken")


@pytest.mark.parametrize(
    ("form", "files_of_a_save", "error_of_a_save"),
    [("file", 1, "CheckpointError"), ("folder", 3, "ArgumentTypeError")],
)
def test_a_checkpoint_in_memory_is_replaced_completely(
    form: str,
    files_of_a_save: int,
    error_of_a_save: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"memory://paths-{form}/run"
    file_system = fsspec.filesystem("memory")
    with single(FORMATS[form]) as fabric:
        fabric.launch()
        module = Net()
        model = fabric.setup(module)
        for step in range(3):
            fabric.save(url, {"model": model, "step": step})
        pending = fabric.save(url, {"model": model, "step": 3}, async_=True)
        pending.wait()
        state = {"model": fabric.setup(Net()), "step": 0}
        fabric.load(url, state)
        assert state["step"] == 3
        assert_equal_states(state["model"], model)
        files = file_system.find(f"/paths-{form}")
        assert len(files) == files_of_a_save

        with torch.serialization.safe_globals([Broken]):
            text = outcome(lambda: fabric.save(url, {"model": model, "x": Broken()}))
        assert error_of_a_save in text
        assert file_system.find(f"/paths-{form}") == files
        text = outcome(lambda: fabric.load(f"{url}-2", state))
        assert "there is no such" in text
        assert url in text
        FORMATS[form].remove(pending.path)
    assert file_system.find(f"/paths-{form}") == []
    assert os.listdir(tmp_path) == []


class Objects(LocalFileSystem):
    """An object store: a file appears once it is closed, and cannot be renamed."""

    protocol = "objects"

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "auto_mkdir": True})

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("objects://"))

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise OSError("an object cannot be renamed")


def use_schemes(fabric: Fabric, folder: Path) -> None:
    fsspec.register_implementation("objects", Objects, clobber=True)
    module = Net()
    model = fabric.setup(module)
    for scheme in ("file", "local", "objects"):
        url = f"{scheme}://{folder}/{scheme}"
        fabric.save(url, {"model": model, "step": 0})
        fabric.save(url, {"model": model, "step": 1}, async_=True)
        state = {"model": fabric.setup(Net()), "step": -1}
        fabric.load(url, state)
        assert state["step"] == 1
        assert_equal_states(state["model"], model)


def fail_to_use_schemes(fabric: Fabric, folder: Path) -> dict[str, str]:
    module = Net()
    model = fabric.setup(module)
    url = f"objects://{folder}/objects"

    def fail_on_rank_0(name: str, value: Any) -> bool:
        return bool(1 / fabric.global_rank)

    texts = {
        "object": outcome(lambda: fabric.save(url, {"model": model, "x": object()})),
        "filter": outcome(lambda: fabric.save(url, {"x": {"a": 1}}, filter={"x": fail_on_rank_0})),
    }
    state = {"step": -1}
    fabric.load(url, state)
    assert state["step"] == 1
    for url in ("memory://shared", "s3://bucket/run", "nonsense://bucket/run"):
        texts[url] = outcome(lambda url=url: fabric.save(url, {"model": model}))
    return texts


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_save_to_paths_with_a_scheme(strategy: str, tmp_path: Path) -> None:
    run_in_ranks(use_schemes, tmp_path, strategy=STRATEGIES[strategy])
    for texts in run_in_ranks(fail_to_use_schemes, tmp_path, strategy=STRATEGIES[strategy]):
        assert "builtins.object" in texts["object"]
        assert "ZeroDivisionError" in texts["filter"]
        assert texts["s3://bucket/run"].startswith("MissingDependencyError")
        assert "s3fs" in texts["s3://bucket/run"]
        assert "nonsense" in texts["nonsense://bucket/run"]
        if strategy == "fsdp":
            assert "a file system that all ranks share" in texts["memory://shared"]
        else:
            assert texts["memory://shared"] == "fine"
    assert sorted(os.listdir(tmp_path)) == ["file", "local", "objects"]
    if strategy == "fsdp":
        suffixes = [Path(name).suffix for name in os.listdir(tmp_path / "objects")]
        assert suffixes.count(".json") == 3, "the index, and the objects of each rank"
        assert suffixes.count(".safetensors") == 2
        assert len(suffixes) == 5

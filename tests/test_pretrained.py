"""Weights of Hugging Face's libraries: folders with an index, safetensors files and .bin files."""

import errno
import fcntl
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fabric import Fabric
from fabric._torch import local_tensor
from fabric.checkpoint import ShardedCheckpoint
from fabric.checkpoint.consolidate import consolidate
from fabric.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from fabric.strategies import FSDPStrategy, ModelParallelStrategy
from tests.ranks import outcome, run_in_ranks

INDEX = "model.safetensors.index.json"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(self.up(inputs).relu())


class Tied(nn.Module):
    """A model whose head has the weight of its embedding, with a large layer and a buffer."""

    tp_plan: ClassVar = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.large = nn.Linear(6, 3000)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) + self.large(hidden).mean()


def saved_weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return weights of the model as Hugging Face's libraries store them: a tied weight once."""
    generator = torch.Generator().manual_seed(5)
    weights: dict[str, Tensor] = {}
    for name, tensor in Tied().state_dict().items():
        if tensor.is_floating_point():
            weights[name] = torch.randn(tensor.shape, generator=generator).to(dtype)
    weights["steps"] = torch.tensor([3, 4])
    del weights["head.weight"]
    return weights


def write_folder(folder: Path, weights: dict[str, Tensor], suffix: str = ".safetensors") -> None:
    """Write weights to two files and an index, as ``transformers`` does."""
    folder.mkdir()
    names = sorted(weights)
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    weight_map: dict[str, str] = {}
    for number in (1, 2):
        group = {name: weights[name] for name in names[number - 1 :: 2]}
        file_name = f"{stem}-{number:05}-of-00002{suffix}"
        if suffix == ".safetensors":
            save_file(group, folder / file_name, metadata={"format": "pt"})
        else:
            torch.save(group, folder / file_name)
        weight_map.update(dict.fromkeys(group, file_name))
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / f"{stem}{suffix}.index.json").write_text(index)


def load_into_empty_model(fabric: Fabric, path: Path) -> dict[str, Tensor]:
    """Load weights into a model without values, and return its full state on rank 0."""
    with fabric.init_module(empty_init=True):
        module = Tied()
    model = fabric.setup(module)
    fabric.load_raw(path, model)
    assert (
        local_tensor(model.head.weight).data_ptr()
        == local_tensor(model.embedding.weight).data_ptr()
    )
    outputs = model(torch.tensor([[1, 2, 3]]))
    state = fabric.get_state_dict(model)
    if fabric.is_global_zero:
        state["outputs"] = outputs.detach()
    return state


def assert_loaded(state: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    module = Tied()
    full = {**weights, "head.weight": weights["embedding.weight"]}
    module.load_state_dict(full)
    expected = module.state_dict()
    expected["outputs"] = module(torch.tensor([[1, 2, 3]])).detach()
    outputs = state.pop("outputs")
    torch.testing.assert_close(outputs, expected.pop("outputs"))
    torch.testing.assert_close(state, dict(expected), rtol=0, atol=0)


def single() -> Fabric:
    return Fabric(accelerator="cpu", devices=1, environment="none")


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp", "ranks": 3},
    "hybrid": {"strategy": FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(1, 2))},
    "mesh": {"strategy": ModelParallelStrategy(tensor_parallel_size=2, tp_plan="auto")},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_folder_of_hugging_face_fills_an_empty_model(strategy: str, tmp_path: Path) -> None:
    # The model's parameters are in float32.
    weights = saved_weights(torch.bfloat16)
    folder = tmp_path / "weights"
    write_folder(folder, weights)
    states = run_in_ranks(load_into_empty_model, folder, **STRATEGIES[strategy])
    assert_loaded(states[0], weights)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_one_process_loads_files_with_an_index(suffix: str, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    write_folder(folder, saved_weights(), suffix)
    with single() as fabric:
        state = load_into_empty_model(fabric, folder)
    assert_loaded(state, saved_weights())


def test_one_process_loads_a_single_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(saved_weights(), path)
    torch.save(saved_weights(), tmp_path / "weights.pt")
    for location in (path, tmp_path, tmp_path / "weights.pt"):
        with single() as fabric:
            state = load_into_empty_model(fabric, location)
        assert_loaded(state, saved_weights())


def test_what_consolidate_writes_is_loaded(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    ShardedCheckpoint().save({"model": saved_weights()}, saved)
    consolidate(saved, output=tmp_path / "one.safetensors")
    consolidate(saved, output=tmp_path / "folder", max_shard_gb=1e-5)
    for location in (tmp_path / "one.safetensors", tmp_path / "folder"):
        with single() as fabric:
            state = load_into_empty_model(fabric, location)
        assert_loaded(state, saved_weights())


def test_a_tensor_may_begin_at_any_byte_of_a_file(tmp_path: Path) -> None:
    weight = torch.randn(2, 3)
    path = tmp_path / "model.safetensors"
    header = {"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    text = json.dumps(header).encode()
    # An odd length, as old releases of the library wrote it.
    text += b" " * (1 - len(text) % 2)
    values = struct.pack("<6f", *weight.flatten().tolist())
    path.write_bytes(struct.pack("<Q", len(text)) + text + values)
    module = nn.Linear(3, 2, bias=False)
    with single() as fabric:
        fabric.load_raw(path, module)
    assert torch.equal(module.weight, weight)


# -- what a rank reads ----------------------------------------------------------------------------


class ReadBytes(TorchDispatchMode):
    """A mode that counts the bytes of bfloat16 that operators read, which only the file has."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view:
            for argument in args:
                if isinstance(argument, Tensor) and argument.dtype is torch.bfloat16:
                    self.count += argument.nbytes
        return func(*args, **(kwargs or {}))


def count_read_bytes(fabric: Fabric, path: Path) -> int:
    with fabric.init_module(empty_init=True):
        module = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64))
    model = fabric.setup(module)
    with ReadBytes() as mode:
        fabric.load_raw(path, model)
    return mode.count


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_rank_reads_the_values_that_it_holds(strategy: str, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64)).bfloat16()
    path = tmp_path / "model.safetensors"
    save_file(module.state_dict(), path)
    total = sum(parameter.nbytes for parameter in module.parameters())
    expected = total // 2 if strategy == "fsdp" else total
    counts = run_in_ranks(count_read_bytes, path, strategy=strategy)
    assert counts == [expected, expected]


# -- names ----------------------------------------------------------------------------------------


def test_names_are_given_by_a_mapping_or_a_function(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    weight = torch.randn(2, 3)
    save_file({"old.weight": weight, "old.unused": torch.ones(1)}, path)

    def name_in_module(name: str) -> str | None:
        if name == "old.unused":
            return None
        return name.removeprefix("old.")

    mapping = {"old.weight": "weight", "old.unused": None}
    for rename in (mapping, name_in_module):
        module = nn.Linear(3, 2, bias=False)
        with single() as fabric:
            fabric.load_raw(path, module, rename=rename)
        assert torch.equal(module.weight, weight)


def test_the_names_of_a_file_of_torch_are_given_too(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    norm = nn.BatchNorm1d(3)
    saved = nn.Sequential(norm)
    saved(torch.randn(4, 3))
    torch.save(saved.state_dict(), path)
    module = nn.BatchNorm1d(3)
    with single() as fabric:
        fabric.load_raw(path, module, rename=lambda name: name.removeprefix("0."))
    torch.testing.assert_close(module.running_mean, norm.running_mean)
    assert module.num_batches_tracked == 1


def test_two_entries_of_one_name_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"first": torch.ones(2), "second": torch.ones(2)}, path)
    module = nn.Linear(2, 1)
    with single() as fabric:
        with pytest.raises(ConfigurationError, match="first and second are both renamed to bias"):
            fabric.load_raw(path, module, rename=lambda name: "bias")
        optimizer = torch.optim.SGD(module.parameters())
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        with pytest.raises(ConfigurationError, match="has no names to give"):
            fabric.load_raw(tmp_path / "optimizer.pt", optimizer, rename={})


def prefixed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in weights.items()}


@pytest.mark.parametrize("file_name", ["model.safetensors", "weights.pt"])
@pytest.mark.parametrize("is_prefix_in_file", [True, False])
def test_the_error_of_other_names_shows_how_to_rename_them(
    is_prefix_in_file: bool, file_name: str, tmp_path: Path
) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(3, 2)

    inner = nn.Linear(3, 2)
    weights = dict(inner.state_dict())
    module: nn.Module = Outer()
    if is_prefix_in_file:
        weights = prefixed(weights)
        module = nn.Linear(3, 2)
    path = tmp_path / file_name
    if file_name == "weights.pt":
        torch.save(weights, path)
    else:
        save_file(weights, path)
    with single() as fabric:
        with pytest.raises(CheckpointError) as caught:
            fabric.load_raw(path, module)
        # The remedy works as it is written.
        call = f"fabric.load_raw(path, module, {caught.value.suggestion})"
        exec(call, {"fabric": fabric, "path": path, "module": module})
    for loaded, expected in zip(module.parameters(), inner.parameters(), strict=True):
        assert torch.equal(loaded, expected)


def test_missing_and_unexpected_names_are_an_error_unless_not_strict(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    weight = torch.randn(2, 3)
    save_file({"weight": weight, "scale": torch.ones(1)}, path)
    module = nn.Linear(3, 2)
    before = module.bias.clone()
    with single() as fabric:
        with pytest.raises(CheckpointError) as caught:
            fabric.load_raw(path, module)
        assert "not in the file: bias" in str(caught.value)
        assert "only in the file: scale" in str(caught.value)
        fabric.load_raw(path, module, strict=False)
    assert torch.equal(module.weight, weight)
    assert torch.equal(module.bias, before)


# -- refusals -------------------------------------------------------------------------------------


def with_missing_file(folder: Path) -> None:
    write_folder(folder, saved_weights())
    (folder / "model-00002-of-00002.safetensors").unlink()


def with_short_file(folder: Path) -> None:
    write_folder(folder, saved_weights())
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def with_short_header(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"\xff\0\0\0\0\0\0\0{")


def with_file_outside(folder: Path) -> None:
    folder.mkdir()
    index = {"weight_map": {"large.weight": "../secret.safetensors"}}
    (folder / INDEX).write_text(json.dumps(index))


def with_wrong_index(folder: Path) -> None:
    write_folder(folder, saved_weights())
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["head.weight"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def with_integers(folder: Path) -> None:
    folder.mkdir()
    weights = saved_weights()
    weights["large.bias"] = weights["large.bias"].to(torch.int8)
    save_file(weights, folder / "model.safetensors")


def without_weights(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


REFUSALS: dict[str, Callable[[Path], None]] = {
    "there is no such file": with_missing_file,
    "ends within": with_short_file,
    "ends within its header": with_short_header,
    "is not the name of a file": with_file_outside,
    "head.weight is not in model-00001": with_wrong_index,
    "large.bias is torch.int8 in the file": with_integers,
    "has no weights in Hugging Face's format": without_weights,
}


@pytest.mark.parametrize("words", REFUSALS)
def test_a_folder_that_is_not_whole_changes_nothing(words: str, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    write = REFUSALS[words]
    write(folder)
    module = Tied()
    before = [tensor.clone() for tensor in module.state_dict().values()]
    with single() as fabric, pytest.raises(CheckpointError, match=words):
        fabric.load_raw(folder, module)
    assert all(map(torch.equal, module.state_dict().values(), before))


def test_the_errors_name_the_call_that_loads_what_is_there(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    write_folder(weights, saved_weights())
    shards = tmp_path / "shards"
    unindexed = tmp_path / "unindexed"
    unindexed.mkdir()
    save_file(saved_weights(), unindexed / "ema.safetensors")
    module = Tied()
    ShardedCheckpoint().save({"model": module.state_dict()}, shards)
    with single() as fabric:
        model = fabric.setup(module)
        calls = [
            lambda: fabric.load(weights, {"model": model}),
            lambda: fabric.load(unindexed / "ema.safetensors", {"model": model}),
            lambda: fabric.load_raw(shards, model),
            lambda: fabric.load_raw(unindexed, model),
        ]
        for call in calls:
            with torch.no_grad():
                model.large.bias.fill_(1)
            with pytest.raises(CheckpointError) as caught:
                call()
            line, _, _ = str(caught.value.suggestion).partition(" for ")
            exec(line, {"fabric": fabric, "model": model})
            assert not torch.equal(model.large.bias, torch.ones(3000))


def load_before_setup(fabric: Fabric, path: Path) -> None:
    with fabric.init_module(empty_init=True):
        module = Tied()
    with pytest.raises(CheckpointError) as caught:
        fabric.load_raw(path, module)
    assert "large.weight is a meta tensor" in str(caught.value)
    assert "fabric.setup(model)" in str(caught.value.suggestion)


def test_a_model_without_memory_is_set_up_before_the_load(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(saved_weights(), path)
    run_in_ranks(load_before_setup, path, strategy="fsdp")


def test_weights_hold_no_code_and_no_optimizer(tmp_path: Path) -> None:
    write_folder(tmp_path / "weights", saved_weights())
    module = Tied()
    optimizer = torch.optim.SGD(module.parameters())
    with single() as fabric:
        with pytest.raises(ConfigurationError, match="no code of theirs runs"):
            fabric.load_raw(tmp_path / "weights", module, weights_only=False)
        with pytest.raises(ArgumentTypeError, match="a SGD is not a module"):
            fabric.load_raw(tmp_path / "weights", optimizer)


# -- save_pretrained ------------------------------------------------------------------------------


class Config:
    """A config that writes itself, as those of transformers do."""

    def __init__(self) -> None:
        self.architectures: list[str] = []
        self.dtype = ""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(vars(self)))


class FailingConfig(Config):
    def save_pretrained(self, folder: Path) -> None:
        raise LookupError("no such config")


class Configured(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.load_state_dict(saved_weights(), strict=False)


def save_and_list(fabric: Fabric, folder: Path, max_shard_gb: float) -> list[str]:
    model = fabric.setup(Configured())
    fabric.save_pretrained(model, folder, max_shard_gb=max_shard_gb)
    return sorted(path.name for path in folder.iterdir())


def read_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        names.update(load_file(path))
    return names


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_saves_a_folder_that_is_read_back_equal(
    strategy: str, tmp_path: Path
) -> None:
    folder = tmp_path / "deep" / "weights"
    lists = run_in_ranks(save_and_list, folder, 5e-5, **STRATEGIES[strategy])
    assert lists[0] == lists[-1]
    assert INDEX in lists[0]
    assert len(lists[0]) == 5
    assert os.listdir(folder.parent) == ["weights"]
    # The tied weight is written once.
    assert read_names(folder) == set(saved_weights())
    config = json.loads((folder / "config.json").read_text())
    assert config == {"architectures": ["Configured"], "dtype": "float32"}
    with single() as fabric:
        state = load_into_empty_model(fabric, folder)
    assert_loaded(state, saved_weights())


def test_a_small_model_is_one_file_without_an_index(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    # An empty folder is replaced.
    folder.mkdir()
    with single() as fabric:
        names = save_and_list(fabric, folder, max_shard_gb=5)
        assert names == ["config.json", "model.safetensors"]
        fabric.save_pretrained(nn.Linear(3, 2), tmp_path / "linear")
    assert os.listdir(tmp_path / "linear") == ["model.safetensors"]


class Masked(nn.Module):
    """A module with a mask, which may be sparse."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)


def test_dense_and_sparse_weights_that_do_not_fit_are_no_damage(tmp_path: Path) -> None:
    dense = torch.eye(2)
    sparse = dense.to_sparse()
    for number, (saved, target) in enumerate([(dense, sparse), (sparse, dense)]):
        path = tmp_path / f"{number}.pt"
        torch.save(Masked(saved).state_dict(), path)
        with single() as fabric, pytest.raises(RuntimeError, match=r'copying .* named "mask"'):
            fabric.load_raw(path, Masked(target))


def save_with_full_disk(fabric: Fabric, folder: Path) -> str:
    """Save to a disk that is full on the last rank, and return the error."""
    model = fabric.setup(Configured())

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if fabric.global_rank == fabric.world_size - 1:
            patch.setattr(os, "fsync", refuse)
        return outcome(lambda: fabric.save_pretrained(model, folder, max_shard_gb=5e-5))


def test_a_rank_that_cannot_write_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    for text in run_in_ranks(save_with_full_disk, folder, strategy="fsdp"):
        assert text.startswith("CheckpointError")
        assert "No space left on device" in text
    assert os.listdir(tmp_path) == []


def save_with_failing_config(fabric: Fabric, folder: Path) -> str:
    module = Configured()
    module.config = FailingConfig()
    model = fabric.setup(module)
    return outcome(lambda: fabric.save_pretrained(model, folder))


def test_a_config_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    first, second = run_in_ranks(save_with_failing_config, tmp_path / "weights")
    assert "no such config" in first
    assert "no such config" in second
    assert os.listdir(tmp_path) == []


def test_what_is_at_the_path_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    model = nn.Linear(3, 2)
    with single() as fabric:
        fabric.save_pretrained(model, folder)
        with pytest.raises(CheckpointError, match="there is something of that name"):
            fabric.save_pretrained(nn.Linear(3, 2), folder)
        fabric.load_raw(folder, nn.Linear(3, 2))
        # The remedy of the error.
        shutil.rmtree(folder)
        fabric.save_pretrained(model, folder)


def test_a_file_in_place_of_the_folder_is_named_with_a_remedy_that_works(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.touch()
    model = nn.Linear(3, 2)
    with single() as fabric:
        with pytest.raises(CheckpointError, match="is a file"):
            fabric.save_pretrained(model, path / "folder")
        with pytest.raises(CheckpointError, match=r"os\.remove\(path\)"):
            fabric.save_pretrained(model, path)
        os.remove(path)
        fabric.save_pretrained(model, path)


def test_a_save_removes_what_killed_saves_to_the_path_left_behind(tmp_path: Path) -> None:
    abandoned = tmp_path / ".weights.0123456789ab.tmp"
    abandoned.mkdir()
    (abandoned / "model.safetensors").touch()
    running = tmp_path / ".weights.ba9876543210.tmp"
    running.mkdir()
    descriptor = os.open(running, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with single() as fabric:
        fabric.save_pretrained(nn.Linear(3, 2), tmp_path / "weights")
    os.close(descriptor)
    assert sorted(os.listdir(tmp_path)) == [running.name, "weights"]


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float64])
def test_a_dtype_that_the_format_lacks_is_an_error(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    module = nn.Linear(3, 2, dtype=dtype)
    with single() as fabric:
        text = outcome(lambda: fabric.save_pretrained(module, folder))
    assert ("no name for torch.complex128" in text) is dtype.is_complex
    assert folder.exists() is not dtype.is_complex


def save_before_setup(fabric: Fabric, folder: Path) -> None:
    with fabric.init_module(empty_init=True):
        module = Tied()
    with pytest.raises(ConfigurationError, match=r"large.weight is a meta tensor"):
        fabric.save_pretrained(module, folder)


def test_a_module_without_values_is_not_saved(tmp_path: Path) -> None:
    run_in_ranks(save_before_setup, tmp_path / "weights", strategy="fsdp")
    with single() as fabric:
        with pytest.raises(ConfigurationError, match="has no parameters"):
            fabric.save_pretrained(nn.ReLU(), tmp_path / "weights")
        with pytest.raises(ConfigurationError, match="max_shard_gb=0"):
            fabric.save_pretrained(nn.Linear(3, 2), tmp_path / "weights", max_shard_gb=0)

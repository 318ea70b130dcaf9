"""``fabric consolidate`` writes a sharded checkpoint into one file."""

import json
import math
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fabric import Fabric
from fabric.checkpoint import FullCheckpoint, ShardedCheckpoint
from fabric.checkpoint.consolidate import consolidate
from fabric.checkpoint.state import METADATA_KEY, pop_metadata
from fabric.cli import main
from fabric.errors import CheckpointError, ConfigurationError
from fabric.seed import rng_state
from fabric.tree import map_tensors
from tests.ranks import in_another_process, run_in_ranks
from tests.test_checkpoint_sharded import FSDP, assert_same, save_sharded


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step-100"


@pytest.fixture
def state() -> dict[str, Any]:
    weight = torch.randn(7, 5)
    return {
        "model": {
            "encoder": weight,
            "decoder": weight,
            "half": torch.ones(3, dtype=torch.bfloat16),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "empty": torch.empty(0, 2),
        "step": 17,
    }


def save(state: dict[str, Any], path: Path) -> None:
    ShardedCheckpoint().save({**state, METADATA_KEY: {"world_size": 1, "rng": [rng_state()]}}, path)


def test_the_file_holds_what_the_folder_holds(path, state):
    save(state, path)
    output = consolidate(path)
    assert output == path.with_name("step-100.pt")
    loaded = FullCheckpoint().load(output)
    assert_same(loaded, ShardedCheckpoint().load(path))
    assert_same({name: loaded[name] for name in state}, state)
    assert sorted(os.listdir(path.parent)) == ["step-100", "step-100.pt"]


def test_tied_weights_are_in_the_file_once(path):
    weight = torch.randn(10_000)
    save({"model": {"encoder": weight, "decoder": weight}}, path)
    assert consolidate(path).stat().st_size < 1.5 * weight.nbytes


def test_the_file_holds_full_values_of_what_ranks_saved_in_shards(path, capsys):
    saved = run_in_ranks(save_sharded, path, **FSDP)[0]
    assert main(["consolidate", str(path), "-o", str(path.parent / "deep" / "one.pt")]) == 0
    loaded = FullCheckpoint().load(path.parent / "deep" / "one.pt")
    assert_same({name: map_tensors(torch.clone, loaded[name]) for name in saved}, saved)
    assert len(pop_metadata(loaded)["rng"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "wrote" in shown.err


def test_fabric_loads_the_file(path):
    model = nn.Linear(3, 2)
    save({"model": model.state_dict(), "step": 5}, path)
    fabric = Fabric(accelerator="cpu", devices=1)
    with fabric:
        fabric.launch()
        module = nn.Linear(3, 2)
        target = fabric.setup(module)
        state = {"model": target, "step": 0}
        fabric.load(consolidate(path), state)
    assert state["step"] == 5
    assert_same(dict(target.state_dict()), dict(model.state_dict()))


def anonymous_memory() -> int:
    """Return the memory of this process that no file backs, in kB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError("the system does not say how much memory the process has")


def peak_of_consolidation(path: Path) -> int:
    """Return by how many kB this process grows while it consolidates 24 tensors of 4,096 kB."""
    # The first time imports modules.
    ShardedCheckpoint().save({"small": torch.ones(1)}, path)
    consolidate(path)
    tensors = {str(number): torch.ones(1 << 20) for number in range(24)}
    ShardedCheckpoint().save(tensors, path)
    del tensors
    before = anonymous_memory()
    growth: list[int] = []
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.wait(0.0005):
            growth.append(anonymous_memory() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    consolidate(path)
    is_done.set()
    watching.join()
    return max(growth)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and has posix_fallocate")
def test_memory_is_that_of_a_few_tensors_and_not_of_the_checkpoint(path: Path) -> None:
    peak = in_another_process(peak_of_consolidation, path)
    assert peak < 32_000, "kB, for a checkpoint of 100,000 kB in tensors of 4,000 kB"


# -- weights only ---------------------------------------------------------------------------------


def test_safetensors_hold_the_weights_of_the_model(path, state):
    save(state, path)
    output = consolidate(path, path.parent / "weights.safetensors")
    actual = load_file(output)
    assert_same({name: actual[name] for name in state["model"]}, state["model"])
    assert sorted(os.listdir(path.parent)) == ["step-100", "weights.safetensors"]


def test_the_model_is_chosen_by_key_where_there_are_several(path, state):
    save({**state, "critic": {"w": torch.ones(2)}}, path)
    output = path.parent / "weights.safetensors"
    with pytest.raises(ConfigurationError, match="2 can be a model; --key has to name") as raised:
        consolidate(path, output)
    assert raised.value.expected == "'model', 'critic'"
    with pytest.raises(ConfigurationError, match="--key names 'optimizer'"):
        consolidate(path, output, key="optimizer")
    with pytest.raises(ConfigurationError, match="--key names 'actor'"):
        consolidate(path, output, key="actor")
    consolidate(path, output, key="critic")
    assert output.stat().st_size < 1000


def test_safetensors_are_written_without_the_library(path, state, monkeypatch):
    save(state, path)
    with monkeypatch.context() as patch:
        for name in list(sys.modules):
            if name.partition(".")[0] == "safetensors":
                patch.setitem(sys.modules, name, None)
        assert main(["consolidate", str(path), "-o", str(path.parent / "w.safetensors")]) == 0
    assert set(load_file(path.parent / "w.safetensors")) == {"encoder", "decoder", "half"}


def test_a_parameter_whose_name_safetensors_keeps_for_itself_is_an_error(path):
    save({"model": {"__metadata__": torch.ones(2)}}, path)
    with pytest.raises(ConfigurationError, match="__metadata__"):
        consolidate(path, path.parent / "weights.safetensors")
    assert os.listdir(path.parent) == ["step-100"]


@pytest.mark.parametrize(("limit", "files"), [("0.000001", 2), ("0.0000003", 5), ("5", 1)])
def test_a_limit_writes_a_folder_of_weights_for_hugging_face(limit, files, tmp_path, capsys):
    weights = {f"layer.{number}": torch.randn(10, 10) for number in range(4)}
    weights["wide"] = torch.randn(2)
    ShardedCheckpoint().save({"model": weights, "step": 1}, tmp_path / "run")
    output = tmp_path / "run-weights"
    assert main(["consolidate", str(tmp_path / "run"), "--max-shard-gb", limit]) == 0
    names = sorted(os.listdir(output))
    assert len(names) == files + 1
    assert f"model-00001-of-{files:05}.safetensors" in names
    weight_map = {}
    for file in output.glob("*.safetensors"):
        tensors = load_file(file)
        if len(tensors) > 1:
            assert sum(tensor.nbytes for tensor in tensors.values()) <= float(limit) * 1e9
        for name, tensor in tensors.items():
            assert torch.equal(tensor, weights[name])
            weight_map[name] = file.name
    assert weight_map.keys() == weights.keys()
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {}, "weight_map": weight_map}
    assert main(["consolidate", str(tmp_path / "run"), "--max-shard-gb", "5"]) == 2
    assert "exists" in capsys.readouterr().err
    assert sorted(os.listdir(output)) == names


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, -1, math.nan])
def test_a_limit_that_is_no_size_is_an_error(path, limit):
    with pytest.raises(ConfigurationError, match="more than 0"):
        consolidate(path, max_shard_gb=limit)


def test_a_key_for_a_file_of_all_entries_is_an_error(path, state):
    save(state, path)
    with pytest.raises(ConfigurationError, match="weights alone"):
        consolidate(path, key="model")


@pytest.mark.parametrize("wrong", ["missing", "file", "empty"])
def test_what_is_no_sharded_checkpoint_is_refused_in_four_parts(tmp_path, capsys, wrong):
    if wrong == "file":
        (tmp_path / wrong).touch()
    elif wrong == "empty":
        (tmp_path / wrong).mkdir()
    assert main(["consolidate", str(tmp_path / wrong)]) == 2
    error = capsys.readouterr().err
    assert wrong in error
    assert "Valid:" in error
    assert "Write:" in error
    assert not (tmp_path / f"{wrong}.pt").exists()


def test_damage_leaves_the_file_of_an_earlier_run(path, state):
    save(state, path)
    output = consolidate(path)
    before = output.read_bytes()
    (shards,) = path.glob("*.safetensors")
    shards.write_bytes(shards.read_bytes()[: shards.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        consolidate(path)
    assert output.read_bytes() == before
    assert len(os.listdir(path.parent)) == 2


def test_a_folder_as_the_output_is_an_error(path, state):
    save(state, path)
    with pytest.raises(CheckpointError, match="folder"):
        consolidate(path, path)

"""One folder per checkpoint, written by all ranks: it survives crashes, fits any number of ranks, runs no code."""

import io as streams
import json
import os
import pickle
import random
import resource
import signal
import stat
import subprocess
import sys
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.checkpoint import CheckpointIO, FullCheckpoint
from fabric.checkpoint.directory import MANIFEST, Staging
from fabric.checkpoint.sharded import ShardedCheckpoint
from fabric.checkpoint.state import read_metadata, with_metadata
from fabric.errors import (
    ArgumentTypeError,
    CheckpointError,
    CheckpointNotFoundError,
    RankFailedError,
    UnsafeCheckpointError,
)
from fabric.tree import map_tensors
from tests.models import Net
from tests.ranks import outcome, run_in_ranks

pytestmark = pytest.mark.timeout(120)

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}

io = ShardedCheckpoint()


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def state() -> dict[str, Any]:
    return {"model": {"weight": torch.randn(7, 5), "count": torch.tensor(3)}, "step": 17, "name": "run"}


def data(path: Path) -> Path:
    (folder,) = [entry for entry in path.iterdir() if entry.is_dir()]
    return folder


def files(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


def assert_same(one: Any, other: Any) -> None:
    """Equal bit for bit, tensors by their values, collections by their types too."""
    if isinstance(one, Tensor):
        assert (one.dtype, one.layout) == (other.dtype, other.layout)
        assert torch.equal(one.to_dense(), other.to_dense())
    elif isinstance(one, dict | list | tuple):
        assert type(one) is type(other)
        assert len(one) == len(other)
        for key in one if isinstance(one, dict) else range(len(one)):
            assert_same(one[key], other[key])
    else:
        assert one == other


# -- what goes in comes out -------------------------------------------------------------------------------------------


def test_it_is_a_checkpoint_format():
    assert isinstance(io, CheckpointIO)


def test_values_of_every_kind_keep_their_type_and_order(path):
    original = {
        "model": nn.BatchNorm1d(3).state_dict(),
        "optimizer": {"state": {0: {"step": torch.tensor(2.0)}, 1: {}}, "param_groups": [{"lr": 0.1, "b": (0.9, 1)}]},
        "mixed": [1, (torch.ones(2), {"deep": [torch.zeros(1), None]}), {2, 3}, b"bytes", "text"],
        "strided": torch.arange(12.0).reshape(3, 4).t()[::2],
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(3).to_sparse(),
        "nothing": {},
    }  # fmt: skip
    io.save(original, path)
    loaded = io.load(path)
    assert list(loaded) == list(original)
    assert type(loaded["model"]) is OrderedDict
    assert vars(loaded["model"]) == vars(original["model"])
    for name in original:
        assert_same(loaded[name], original[name])


def test_names_that_read_alike_are_told_apart(path):
    original = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2), 0: torch.tensor(3), "0": torch.tensor(4)}}
    io.save(original, path)
    assert_same(io.load(path), original)


def test_tied_tensors_are_written_once_and_stay_tied(path):
    weight = torch.randn(1000, 10)
    io.save({"encoder": weight, "decoder": weight.detach(), "other": torch.randn(2)}, path)
    assert sum(file.stat().st_size for file in data(path).iterdir()) < 1.5 * weight.nbytes
    loaded = io.load(path)
    assert_same(loaded["decoder"], weight)
    loaded["encoder"].zero_()
    assert not loaded["decoder"].any()


def test_tied_tensors_load_into_separate_ones(path):
    weight = torch.randn(3)
    io.save({"m": {"encoder": weight, "decoder": weight}}, path)
    into = {"m": {"encoder": torch.zeros(3), "decoder": torch.zeros(3)}}
    io.load(path, into)
    assert_same(into, {"m": {"encoder": weight, "decoder": weight}})


def test_the_next_save_replaces_everything(path, state):
    io.save(state, path)
    io.save({"only": torch.ones(2)}, path)
    assert list(io.load(path)) == ["only"]
    assert len(list(path.iterdir())) == 2


def test_metadata_is_kept_as_in_one_file(path):
    stamp = {"world_size": 2, "rng": [{"torch": torch.get_rng_state()}], "loss_scaler": None}
    io.save(with_metadata({"x": torch.ones(1)}, stamp), path)
    kept = read_metadata(io.load(path, {"x": torch.zeros(1)}))
    assert kept["world_size"] == 2
    assert torch.equal(kept["rng"][0]["torch"], stamp["rng"][0]["torch"])


def test_modes_follow_the_umask(path, state):
    before = os.umask(0o027)
    try:
        io.save(state, path)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(entry.stat().st_mode) for entry in path.rglob("*") if entry.is_file()}
    assert modes == {0o640}
    assert stat.S_IMODE(data(path).stat().st_mode) == 0o750


def test_the_tensors_can_be_read_by_torch_alone(path):
    weight = torch.randn(4)
    io.save({"model": {"weight": weight}}, path)
    target = {"model.weight": torch.zeros(4)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(target, checkpoint_id=data(path))
    assert_same(target["model.weight"], weight)


# -- loading into tensors ---------------------------------------------------------------------------------------------


def test_loading_into_tensors_overwrites_them_in_place_and_reads_no_other_entry(path, state):
    io.save({**state, "large": torch.zeros(100_000)}, path)
    into = {"model": {"weight": torch.zeros(7, 5), "count": torch.tensor(0)}}
    read = []
    loaded = io.load(path, into, progress=read.append)
    assert loaded["model"]["weight"] is into["model"]["weight"]
    assert_same(into["model"], state["model"])
    assert "large" not in loaded
    assert sum(read) == 7 * 5 * 4 + 8


def test_where_there_is_no_tensor_yet_a_new_one_is_returned(path, state):
    io.save(state, path)
    loaded = io.load(path, {"model": {"weight": None, "count": torch.empty((), device="meta")}, "step": 0})
    assert_same(loaded["model"], state["model"])
    assert loaded["step"] == 17


def test_what_does_not_fit_is_named_all_at_once_and_nothing_changes(path, state):
    io.save(state, path)
    into = {"model": {"weight": torch.zeros(7, 4), "extra": torch.zeros(1)}, "other": 1}
    with pytest.raises(CheckpointError) as raised:
        io.load(path, into)
    text = str(raised.value)
    assert "model.weight is (7, 5) in the checkpoint and (7, 4) here" in text
    assert "only in the checkpoint: model.count" in text
    assert "not in the checkpoint: model.extra" in text
    assert "not in the checkpoint: other" in text
    assert not into["model"]["weight"].any()


def test_without_strict_what_fits_is_loaded(path, state):
    io.save(state, path)
    into = {"model": {"weight": torch.zeros(7, 5), "extra": torch.zeros(1)}, "other": 1}
    loaded = io.load(path, into, strict=False)
    assert_same(loaded, {"model": {"weight": state["model"]["weight"]}})
    with pytest.raises(CheckpointError, match=r"model\.weight is"):
        io.load(path, {"model": {"weight": torch.zeros(2)}}, strict=False)


def test_a_description_has_shapes_and_dtypes_and_reads_no_tensor(path, state):
    io.save(state, path)
    next(data(path).glob("*.distcp")).unlink()
    described = io.describe(path)
    assert described["step"] == 17
    assert (described["model"]["weight"].shape, described["model"]["weight"].dtype) == ((7, 5), torch.float32)
    assert described["model"]["weight"].is_meta


# -- damage and attacks -----------------------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_is_noticed_or_harmless(path, state):
    io.save(state, path)
    for file in [path / MANIFEST, *data(path).iterdir()]:
        content, noticed = file.read_bytes(), 0
        for position in range(0, len(content), max(1, len(content) // 60)):
            changed = bytearray(content)
            changed[position] ^= 1 << position % 8
            file.write_bytes(changed)
            into = {"model": {"weight": torch.zeros(7, 5), "count": torch.tensor(0)}, "step": 0, "name": ""}
            try:
                assert_same(io.load(path, into), state)
            except CheckpointError:
                noticed += 1
                assert not into["model"]["weight"].any()
        file.write_bytes(content)
        assert file.name == MANIFEST or noticed == len(range(0, len(content), max(1, len(content) // 60)))


def test_bytes_changed_anywhere_in_the_data_are_always_an_error_and_nothing_is_loaded(path, state):
    io.save(state, path)
    into = {"model": {"weight": torch.zeros(7, 5), "count": torch.tensor(0)}, "step": 0, "name": ""}
    (file,) = data(path).glob("*.distcp")
    content, chance = file.read_bytes(), random.Random(4)
    for _ in range(400):
        changed = bytearray(content)
        for _ in range(chance.choice([1, 1, 2, 8])):
            changed[chance.randrange(len(content))] ^= chance.randrange(1, 256)
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"checksum of __0_0\.distcp does not match"):
            io.load(path, into)
    assert not into["model"]["weight"].any()
    file.write_bytes(content)
    assert_same(io.load(path, into), state)


def test_truncated_and_missing_files_are_noticed(path, state):
    io.save(state, path)
    for file in [path / MANIFEST, *data(path).glob("*[!k]")]:
        content = file.read_bytes()
        for length in (len(content) // 2, len(content) - 2):
            file.write_bytes(content[:length])
            with pytest.raises(CheckpointError, match="checkpoint"):
                io.load(path)
        file.unlink()
        with pytest.raises(CheckpointError, match="checkpoint"):
            io.load(path)
        file.write_bytes(content)


def plant(path: Path, name: str, content: bytes) -> None:
    """Put another file into the data, with the checksum that it needs to be taken for ours."""
    (data(path) / name).write_bytes(content)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["crc32"][name] = zlib.crc32(content)
    (path / MANIFEST).write_text(json.dumps(manifest))


def replace_layout(path: Path, content: bytes) -> None:
    plant(path, ".metadata", content)


def test_a_payload_in_the_layout_is_refused_and_named(path, state, tmp_path):
    io.save(state, path)
    layout = pickle.loads((data(path) / ".metadata").read_bytes())
    for place in ("planner_data", "storage_meta", "version"):
        setattr(layout, place, Payload(tmp_path / "run"))
        replace_layout(path, pickle.dumps(layout))
        with pytest.raises(UnsafeCheckpointError, match=r"system"):
            io.load(path)
        setattr(layout, place, None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["builtins eval", "torch hub.load", "torch.serialization load", "pathlib Path"])
def test_a_layout_may_name_listed_classes_only(path, state, name):
    io.save(state, path)
    replace_layout(path, b"c" + name.replace(" ", "\n").encode() + b"\n.")
    with pytest.raises(UnsafeCheckpointError, match=name.split()[1]):
        io.load(path)


def test_a_layout_cannot_change_the_classes_that_it_names(path, state):
    io.save(state, path)
    # Gives the class Metadata itself a new attribute, as a pickle may.
    attack = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x07\x00\x00\x00plantedK\x01stb."
    replace_layout(path, attack)
    with pytest.raises(CheckpointError):
        io.load(path)
    assert not hasattr(dcp.Metadata, "planted")


def test_a_payload_in_a_byte_entry_is_never_unpickled(path, state, tmp_path):
    io.save(state, path)
    layout = pickle.loads((data(path) / ".metadata").read_bytes())
    stream = streams.BytesIO()
    torch.save(Payload(tmp_path / "run"), stream)
    plant(path, "planted", stream.getvalue())
    (index,) = [index for index in layout.storage_data if index.fqn == "model.count"]
    layout.storage_data[index].relative_path, layout.storage_data[index].offset = "planted", 0
    layout.storage_data[index].length = len(stream.getvalue())
    replace_layout(path, pickle.dumps(layout))
    with pytest.raises(UnsafeCheckpointError, match=r"model\.count.*system"):
        io.load(path)  # as the bytes of a tensor
    layout.state_dict_metadata["model.count"] = dcp.metadata.BytesStorageMetadata()
    replace_layout(path, pickle.dumps(layout))
    with pytest.raises(CheckpointError, match=r"no tensor there for 'model\.count'"):
        io.load(path)  # as an entry of bytes
    assert not (tmp_path / "run").exists()


def test_a_payload_in_the_skeleton_is_refused(path, state, tmp_path):
    io.save(state, path)
    stream = streams.BytesIO()
    torch.save({"skeleton": {"x": Payload(tmp_path / "run")}, "tensors": {}}, stream)
    plant(path, "skeleton.pt", stream.getvalue())
    with pytest.raises(UnsafeCheckpointError, match="system"):
        io.load(path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("elsewhere", ["../secret", "/etc/hostname", "..", ""])
def test_a_layout_cannot_reach_files_elsewhere(path, state, elsewhere):
    io.save(state, path)
    layout = pickle.loads((data(path) / ".metadata").read_bytes())
    next(iter(layout.storage_data.values())).relative_path = elsewhere
    replace_layout(path, pickle.dumps(layout))
    with pytest.raises(CheckpointError, match="is not a file in the folder"):
        io.load(path)


def test_a_layout_that_leaves_parts_out_is_refused(path, state):
    io.save(state, path)
    layout = pickle.loads((data(path) / ".metadata").read_bytes())
    layout.state_dict_metadata["model.weight"].chunks[0].sizes = torch.Size((3, 5))
    replace_layout(path, pickle.dumps(layout))
    with pytest.raises(CheckpointError, match=r"parts are missing of model\.weight"):
        io.load(path)


# -- files and folders ------------------------------------------------------------------------------------------------


def test_a_file_where_a_folder_is_meant_is_an_error_in_four_parts(path, state):
    FullCheckpoint().save(state, path)
    for action in (lambda: io.load(path), lambda: io.save(state, path), lambda: io.remove(path)):
        with pytest.raises(CheckpointError, match="file") as raised:
            action()
        assert all([raised.value.request, raised.value.problem, raised.value.expected, raised.value.suggestion])
    assert_same(FullCheckpoint().load(path), state)


def test_a_folder_where_a_file_is_meant_names_the_command_that_makes_one(path, state):
    io.save(state, path)
    for action in (FullCheckpoint().load, FullCheckpoint().remove):
        with pytest.raises(CheckpointError, match=f"fabric consolidate {path}"):
            action(path)
    with pytest.raises(CheckpointError, match="folder"):
        FullCheckpoint().save(state, path)


def test_folders_without_a_checkpoint_are_told_apart(path, state, tmp_path):
    io.save(state, tmp_path / "checkpoint-1")
    with pytest.raises(CheckpointNotFoundError, match="no such folder") as raised:
        io.load(path)
    assert "checkpoint-1" in raised.value.suggestion
    path.mkdir()
    with pytest.raises(CheckpointNotFoundError, match=MANIFEST):
        io.load(path)
    (path / "data-0123456789ab").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="ever finished"):
        io.load(path)
    (path / ".metadata").touch()
    with pytest.raises(CheckpointError, match="without fabric"):
        io.load(path)


def test_removal_leaves_what_is_not_of_the_checkpoint(path, state):
    io.save(state, path)
    (path / "notes.txt").touch()
    io.remove(path)
    assert files(path) == ["notes.txt"]
    io.save(state, path)
    (path / "notes.txt").unlink()
    io.remove(path)
    assert not path.exists()


def test_what_the_file_system_refuses_is_an_error_of_ours(path, state):
    path.touch()
    with pytest.raises(CheckpointError, match="NotADirectoryError"):
        io.save(state, path / "deeper" / "checkpoint")


def test_what_is_not_plain_is_refused_before_anything_is_written(path):
    ring: list[Any] = []
    ring.append(ring)
    for wrong in (object(), ring, torch.empty(2, device="meta")):
        with pytest.raises(ArgumentTypeError, match="wrong"):
            io.save({"fine": torch.ones(1), "wrong": wrong}, path)
    assert not path.exists()


# -- crashes ----------------------------------------------------------------------------------------------------------

CRASHES = """
import os, signal, sys
from pathlib import Path
import torch
from fabric.checkpoint.sharded import ShardedCheckpoint
import torch.distributed.checkpoint
torch.set_num_threads(1)
path, io = Path(sys.argv[1]), ShardedCheckpoint()

def kill_at(point):
    def hook(event, arguments):
        nonlocal point
        if any(str(argument).startswith(str(path)) for argument in arguments) or event == "fcntl.flock":
            point -= 1
            if point == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def save(value, point=0):
    child = os.fork()
    if child == 0:
        kill_at(point)
        io.save({"x": torch.full((1000,), float(value)), "step": value}, path)
        os._exit(0)
    return os.waitpid(child, 0)[1]

present, point, survived = 0, 1, []
assert save(0) == 0
while True:
    status = save(point, point)
    loaded = io.load(path)
    step = loaded["step"]
    assert step in (present, point) and (loaded["x"] == step).all(), (present, point, step)
    survived.append(step == point)
    present = step
    if status == 0:
        break
    point += 1
assert any(not new for new in survived) and survived[-1]
print(len(survived), sum(survived), len(list(path.iterdir())))
"""


def test_a_process_killed_at_any_point_of_a_save_leaves_the_old_or_the_new_data(path):
    done = subprocess.run(
        [sys.executable, "-c", CRASHES, str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr
    points, _, left = map(int, done.stdout.split())
    assert points > 20
    assert left == 2, "the last save has cleared what the killed ones left"


def test_what_another_living_process_is_filling_is_left_alone(path, state):
    other = Staging(path)
    io.save(state, path)
    assert other.folder.is_dir()
    other.close()
    assert not other.folder.exists()
    assert_same(io.load(path), state)


def test_a_damaged_manifest_keeps_the_next_save_from_clearing_anything_before_its_commit(path, state):
    io.save(state, path)
    content, before = (path / MANIFEST).read_text(), data(path)
    (path / MANIFEST).write_text(content[:20])
    staging = Staging(path)
    assert before.is_dir()
    staging.close()
    (path / MANIFEST).write_text(content)
    assert_same(io.load(path), state)


# -- ranks ------------------------------------------------------------------------------------------------------------


def communicator(fabric: Fabric) -> Any:
    return fabric.strategy.runtime.communicator


def trained(fabric: Fabric, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model sharded over all ranks (its head is too small for every rank to get a part) after two steps."""
    torch.manual_seed(seed)
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (fabric.world_size,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def parts(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}


def whole(state: Any) -> Any:
    return map_tensors(lambda tensor: full_tensor(tensor).clone(), state)


def save_sharded(fabric: Fabric, path: Path) -> Any:
    state = parts(*trained(fabric, seed=1))
    stamp = {"world_size": fabric.world_size, "rng": communicator(fabric).gather_objects(torch.get_rng_state())}
    io.save(with_metadata({**state, "step": 2}, stamp), path, communicator(fabric))
    return whole(state)


def load_sharded(fabric: Fabric, path: Path) -> Any:
    net, optimizer = trained(fabric, seed=2)
    loaded = io.load(path, {**parts(net, optimizer), "step": 0}, communicator(fabric))
    assert loaded["step"] == 2
    assert len(read_metadata(loaded)["rng"]) == read_metadata(loaded)["world_size"]
    set_model_state_dict(net, loaded["model"])
    set_optimizer_state_dict(net, optimizer, loaded["optimizer"])
    return whole(parts(net, optimizer))


@pytest.mark.parametrize("writers", [1, 2, 3])
def test_any_number_of_ranks_reads_what_any_other_wrote(path, writers):
    saved = run_in_ranks(save_sharded, path, ranks=writers)[0]
    assert_same({name: io.load(path)[name] for name in saved}, saved)
    for readers in {1, 2, 3} - {writers}:
        for loaded in run_in_ranks(load_sharded, path, ranks=readers):
            assert_same(loaded, saved)


def fail_in_turn(fabric: Fabric, path: Path) -> list[str]:
    """Saves that fail on rank 1 alone, each after one that worked."""
    io.save({"x": torch.ones(3), "step": 1}, path, communicator(fabric))
    first = fabric.global_rank == 0
    sharded = parts(*trained(fabric, seed=1))

    def save(**state: Any) -> str:
        return outcome(lambda: io.save(state, path, communicator(fabric)))

    found = [save(x=1 if first else object()), save(x=torch.ones(1), **({} if first else {"more": torch.ones(1)}))]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if not first:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    found.append(save(**sharded))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return found


def test_what_fails_on_one_rank_raises_on_all_and_leaves_the_old_data(path):
    first, second = run_in_ranks(fail_in_turn, path)
    assert second[0].startswith("ArgumentTypeError")
    assert "only on rank 1: more" in second[1]
    assert "untouched" in second[2]
    assert all(text.startswith("CheckpointError") and "failed on rank 1 of 2" in text for text in first)
    assert_same(io.load(path), {"x": torch.ones(3), "step": 1})
    assert len(list(path.iterdir())) == 2


def load_damaged(fabric: Fabric, path: Path) -> tuple[str, Tensor]:
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (fabric.world_size,)))
    state = get_model_state_dict(net)
    before = whole(state)
    text = outcome(lambda: io.load(path, {"model": state}, communicator(fabric)))
    return text, torch.stack([torch.equal(a, b) * torch.ones(()) for a, b in zip(
        before.values(), whole(state).values(), strict=True)])  # fmt: skip


def test_damage_that_one_rank_finds_keeps_all_from_changing_anything(path):
    run_in_ranks(save_sharded, path)
    (last,) = data(path).glob("__1_0.distcp")
    content = bytearray(last.read_bytes())
    position = content.index(b"data/0") + 80  # within the first tensor that rank 1 wrote
    content[position] ^= 1
    last.write_bytes(content)
    for text, unchanged in run_in_ranks(load_damaged, path):
        assert text.startswith("CheckpointError")
        assert unchanged.all()


def save_and_die(fabric: Fabric, path: Path) -> None:
    """Saves once; in the second save rank 1 is killed when it opens the file for its shards."""
    state = parts(*trained(fabric, seed=1))
    io.save({**state, "step": 1}, path, communicator(fabric))
    if fabric.global_rank == 1:
        before = data(path)

        def die(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and "__1_0" in str(arguments[0]) and before.name not in str(arguments[0]):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(die)
    io.save({**state, "step": 2}, path, communicator(fabric))


def test_a_rank_that_is_killed_while_it_writes_leaves_the_old_data_and_nothing_after_the_next_save(path):
    with pytest.raises(RankFailedError, match="rank 1"):
        run_in_ranks(save_and_die, path)
    assert io.load(path)["step"] == 1
    io.save({"step": 3}, path)
    assert len(list(path.iterdir())) == 2


def save_in_replicas(fabric: Fabric, path: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(1)
    net = Net()
    fully_shard(net, mesh=mesh)
    own = torch.full((2,), fabric.global_rank)
    io.save({"model": get_model_state_dict(net), "own": own}, path, communicator(fabric))
    return whole(get_model_state_dict(net))


def test_of_replicas_and_whole_tensors_the_lowest_rank_writes(path):
    saved = run_in_ranks(save_in_replicas, path, ranks=4)[0]
    loaded = io.load(path)
    assert_same(loaded["model"], saved)
    assert_same(loaded["own"], torch.zeros(2, dtype=torch.int64))
    filled = {file.name for file in data(path).glob("*.distcp") if file.stat().st_size}
    assert filled == {"__0_0.distcp", "__1_0.distcp"}


def load_without_agreement(fabric: Fabric, path: Path) -> tuple[Any, str]:
    """Every rank for itself; then into a model that has no values yet."""
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (fabric.world_size,)))
    state = get_model_state_dict(net)
    io.load(path, {"model": state})
    with torch.device("meta"):
        empty = Net()
    fully_shard(empty, mesh=init_device_mesh("cpu", (fabric.world_size,)))
    return whole(state), outcome(lambda: io.load(path, {"model": empty.state_dict()}))


def test_ranks_may_load_shards_each_for_itself_but_not_into_nothing(path):
    saved = run_in_ranks(save_sharded, path, ranks=1)[0]
    for loaded, text in run_in_ranks(load_without_agreement, path):
        assert_same(loaded, saved["model"])
        assert "encoder.weight is a sharded meta tensor: module.to_empty(device=...) it first" in text

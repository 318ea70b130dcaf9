"""A folder per checkpoint, written by all ranks, survives crashes and fits any number of ranks."""

import json
import os
import random
import resource
import signal
import stat
import struct
import subprocess
import sys
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from fabric import Fabric
from fabric._torch import full_tensor
from fabric.checkpoint import CheckpointIO, FullCheckpoint, ShardedCheckpoint
from fabric.checkpoint.state import METADATA_KEY, pop_metadata
from fabric.communicators import Collective, Communicator, LocalCommunicator, Operation
from fabric.errors import (
    ArgumentTypeError,
    CheckpointError,
    CheckpointNotFoundError,
    RankFailedError,
)
from fabric.testing import generators
from fabric.tree import map_tensors
from tests.models import Net
from tests.ranks import outcome, run_in_ranks

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}

io = ShardedCheckpoint()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture
def state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.randn(7, 5), "count": torch.tensor(3)},
        "step": 17,
        "name": "run",
    }


def files(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def tensor_bits(tensor: Tensor) -> Tensor:
    values = tensor.to_dense().resolve_conj().flatten()
    contiguous = values.new_empty(values.shape).copy_(values)
    return contiguous.view(torch.uint8)


def number_bits(number: complex) -> bytes:
    return struct.pack("<2d", number.real, number.imag)


def assert_same(actual: Any, expected: Any) -> None:
    """Compare two values bit for bit, and the types and the order of their collections."""
    assert type(actual) is type(expected)
    if isinstance(actual, Tensor):
        assert actual.dtype == expected.dtype
        assert actual.layout == expected.layout
        assert actual.shape == expected.shape
        assert torch.equal(tensor_bits(actual), tensor_bits(expected))
    elif isinstance(actual, dict):
        assert list(actual) == list(expected)
        if isinstance(actual, OrderedDict | Counter):
            assert vars(actual) == vars(expected)
        for key in actual:
            assert_same(actual[key], expected[key])
    elif isinstance(actual, list | tuple):
        assert len(actual) == len(expected)
        for actual_item, expected_item in zip(actual, expected, strict=True):
            assert_same(actual_item, expected_item)
    elif isinstance(actual, float | complex):
        assert number_bits(actual) == number_bits(expected)
    else:
        assert actual == expected


# -- values come back as they were saved ----------------------------------------------------------


def test_it_is_a_checkpoint_format():
    assert isinstance(io, CheckpointIO)


def test_values_of_every_kind_keep_their_type_and_order(path):
    original = {
        "model": nn.BatchNorm1d(3).state_dict(),
        "optimizer": {
            "state": {0: {"step": torch.tensor(2.0)}, 1: {}},
            "param_groups": [{"lr": 0.1, "b": (0.9, 1)}],
        },
        "mixed": [1, (torch.ones(2), {"deep": [torch.zeros(1), None]}), {2, 3}, b"bytes", "text"],
        "strided": torch.arange(12.0).reshape(3, 4).t()[::2],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "wide": torch.tensor([1 + 2j], dtype=torch.complex128),
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(3).to_sparse(),
        "nothing": {},
    }
    io.save(original, path)
    loaded = io.load(path)
    assert_same(loaded, original)
    assert vars(loaded["model"]) == vars(original["model"])


BITS = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(st.characters(), max_size=5),
    st.text("$\ud83d\ude00", max_size=3),
    st.binary(max_size=5),
    st.sampled_from([torch.float8_e5m2, torch.strided, torch.device("cuda:1"), torch.Size([2, 0])]),
)
PLAIN = st.recursive(
    st.one_of(
        HASHABLE,
        st.integers(0, 14).map(lambda digits: -(10 ** (300 * digits))),
        BITS,
        st.builds(complex, BITS, BITS),
        st.binary(max_size=5).map(bytearray),
        generators.tensors(),
    ),
    lambda values: st.one_of(
        st.lists(values, max_size=3),
        st.lists(values, max_size=3).map(tuple),
        st.sets(HASHABLE, max_size=3),
        st.dictionaries(st.one_of(HASHABLE, st.tuples(HASHABLE)), values, max_size=3),
        st.dictionaries(st.text(max_size=3), values, max_size=3).map(OrderedDict),
        st.dictionaries(HASHABLE, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(value=PLAIN)
def test_every_plain_value_comes_back_bit_for_bit(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("plain") / "checkpoint"
    io.save({"value": value}, path)
    assert_same(io.load(path)["value"], value)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_of_every_layout_come_back(path):
    eye = torch.eye(4)
    layouts = [
        eye.to_sparse_csr(),
        eye.to_sparse_csc(),
        eye.to_sparse_bsr((2, 2)),
        eye.to_sparse_bsc((2, 2)),
    ]
    io.save({"sparse": layouts}, path)
    assert_same(io.load(path)["sparse"], layouts)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_tensor_with_an_index_outside_of_its_shape_is_not_read(path):
    damaged = torch.sparse_csr_tensor([0, 1], [7], [1.0], size=(1, 2), check_invariants=False)
    io.save({"sparse": damaged}, path)
    with pytest.raises(CheckpointError, match="col_indices"):
        io.load(path)


def test_attributes_of_a_collection_are_kept(path):
    collection = OrderedDict(weight=torch.ones(2))
    vars(collection).update(_metadata=OrderedDict({"": {"version": 2}}), extra=torch.ones(2))
    io.save({"model": collection}, path)
    actual = vars(io.load(path)["model"])
    assert actual["_metadata"] == OrderedDict({"": {"version": 2}})
    assert torch.equal(actual["extra"], torch.ones(2))


def test_names_that_read_alike_are_told_apart(path):
    original = {
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2), 0: torch.tensor(3), "0": torch.tensor(4)},
    }
    io.save(original, path)
    assert_same(io.load(path), original)


def test_tied_tensors_are_written_once_and_stay_tied(path):
    weight = torch.randn(1000, 10)
    io.save({"encoder": weight, "decoder": weight.detach(), "other": torch.randn(2)}, path)
    assert sum(file.stat().st_size for file in path.iterdir()) < 1.5 * weight.nbytes
    loaded = io.load(path)
    assert_same(loaded["decoder"], weight)
    loaded["encoder"].zero_()
    assert not loaded["decoder"].any()


def test_tied_tensors_load_into_separate_ones(tmp_path):
    class Two(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = nn.Linear(2, 2)
            if tied:
                self.b.weight = self.a.weight

    tied = Two(True)
    separate = Two(False)
    strategy = {
        "strategy": "single_device",
        "accelerator": "cpu",
        "devices": 1,
        "environment": "none",
    }
    with Fabric(**strategy) as fabric:
        io.save({"model": tied.state_dict()}, tmp_path / "state")
        fabric.load(tmp_path / "state", {"model": fabric.setup(separate)})
    assert_same(dict(separate.state_dict()), dict(tied.state_dict()))


def test_the_next_save_replaces_everything(path, state):
    io.save(state, path)
    io.save({"only": torch.ones(2)}, path)
    assert list(io.load(path)) == ["only"]
    assert len(list(path.iterdir())) == 2


def test_metadata_is_kept_as_in_one_file(path):
    stamp = {
        "world_size": 2,
        "rng": [{"torch": torch.get_rng_state()}],
        "loss_scaler": None,
    }
    io.save({"x": torch.ones(1), METADATA_KEY: stamp}, path)
    metadata = pop_metadata(io.load(path))
    assert metadata["world_size"] == 2
    assert torch.equal(metadata["rng"][0]["torch"], stamp["rng"][0]["torch"])


def test_modes_follow_the_umask(path, state):
    before = os.umask(0o027)
    try:
        io.save(state, path)
    finally:
        os.umask(before)
    for entry in path.iterdir():
        assert stat.S_IMODE(entry.stat().st_mode) == 0o640
    assert stat.S_IMODE(path.stat().st_mode) == 0o750


def test_the_tensors_can_be_read_by_safetensors_and_what_it_cannot_name_is_bytes(path):
    wide = torch.tensor([[1 + 2j], [3j]], dtype=torch.complex128)
    model = {
        "weight": torch.randn(4, 3),
        "wide": wide,
        "scalar": torch.tensor(5),
    }
    io.save({"model": model, "step": 1}, path)
    loaded = io.load(path)["model"]
    (file,) = shards(path)
    with safe_open(file, "pt") as content:
        assert set(content.keys()) == {"model.weight", "model.wide", "model.scalar"}
        assert_same(content.get_tensor("model.weight"), loaded["weight"])
        assert_same(content.get_tensor("model.scalar"), loaded["scalar"])
        wide_bytes = content.get_tensor("model.wide")
        assert_same(wide_bytes.view(torch.complex128).reshape(2, 1), wide)


def test_entries_whose_names_meet_or_are_reserved_stay_apart(path):
    state = {
        "a.b#2": torch.ones(2),
        "a.b": torch.zeros(2),
        "a": {"b": torch.full((2,), 3.0)},
        "__metadata__": torch.full((2,), 4.0),
    }
    io.save(state, path)
    assert_same(io.load(path), state)
    with safe_open(shards(path)[0], "pt") as content:
        assert len(content.keys()) == 4


def test_a_tensor_and_its_conjugate_are_two(path):
    x = torch.tensor([1 + 2j])
    io.save({"x": x, "conjugate": x.conj()}, path)
    loaded = io.load(path)
    assert torch.equal(loaded["x"], x)
    assert torch.equal(loaded["conjugate"], x.conj())


WITHOUT_NUMPY = """
import sys, torch
from fabric import Fabric

def work(fabric, path):
    model = fabric.setup(torch.nn.Linear(2, 2))
    fabric.save(path, {"model": model, "step": 1})
    fabric.load(path, {"model": model, "step": 0})
    return fabric.all_gather("numpy" in sys.modules)

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="fsdp", launcher="fork")
    assert fabric.launch(work, sys.argv[1]) == [0, 0]
"""


@pytest.mark.slow
def test_two_ranks_save_and_load_without_numpy(path, tmp_path):
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('not installed here')")
    (tmp_path / "script.py").write_text(WITHOUT_NUMPY)
    search_path = str(tmp_path)
    if "PYTHONPATH" in os.environ:
        search_path += os.pathsep + os.environ["PYTHONPATH"]
    command = [sys.executable, str(tmp_path / "script.py"), str(path)]
    environment = {**ONE_THREAD, "PYTHONPATH": search_path}
    completed = subprocess.run(
        command, capture_output=True, text=True, timeout=150, check=False, env=environment
    )
    assert completed.returncode == 0, completed.stderr
    assert io.load(path)["step"] == 1


# -- damage and attacks ---------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_is_an_error_or_harmless(path, state):
    io.save(state, path)
    for file in path.iterdir():
        content = file.read_bytes()
        noticed = 0
        distance = max(1, len(content) // 60)
        positions = range(0, len(content), distance)
        for position in positions:
            changed = bytearray(content)
            changed[position] ^= 1 << position % 8
            file.write_bytes(changed)
            try:
                assert_same(io.load(path), state)
            except CheckpointError:
                noticed += 1
        file.write_bytes(content)
        assert noticed == len(positions)


def load_into(path: Path) -> tuple[str, bool]:
    """Return what loading raises, and whether the model is unchanged."""
    net = nn.Linear(5, 7)
    before = [parameter.clone() for parameter in net.parameters()]
    with Fabric(accelerator="cpu", devices=1, environment="none") as fabric:
        text = outcome(lambda: fabric.load(path, {"model": fabric.setup(net), "step": 0}))
    return text, all(map(torch.equal, before, net.parameters()))


def test_bytes_changed_anywhere_in_the_data_are_always_an_error_and_nothing_is_loaded(path):
    io.save({"model": nn.Linear(5, 7).state_dict(), "step": 17}, path)
    (file,) = shards(path)
    content = file.read_bytes()
    generator = random.Random(4)
    for number in range(400):
        changed = bytearray(content)
        for _ in range(generator.choice([1, 1, 2, 8])):
            mask = generator.randrange(1, 256)
            changed[generator.randrange(len(content))] ^= mask
        if changed == content:
            continue
        file.write_bytes(changed)
        with pytest.raises(
            CheckpointError, match=r"checksum of rank-00000-\w+\.safetensors does not match"
        ):
            io.load(path)
        if number % 100 == 0:
            text, unchanged = load_into(path)
            assert "checksum" in text
            assert unchanged
    file.write_bytes(content)
    assert io.load(path)["step"] == 17


def test_truncated_and_missing_files_are_noticed(path, state):
    io.save(state, path)
    for file in path.iterdir():
        content = file.read_bytes()
        for length in (0, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:length])
            with pytest.raises(CheckpointError, match="checkpoint"):
                io.load(path)
        file.unlink()
        with pytest.raises(CheckpointError, match="checkpoint"):
            io.load(path)
        file.write_bytes(content)


def change_index(path: Path, change: Any) -> None:
    """Change the index and its checksum, as an attacker does who can write to the folder."""
    index = json.loads((path / "index.json").read_text())
    change(index)
    header = {key: index.pop(key) for key in ("format", "version", "save")}
    text = json.dumps(index | {"crc32": None})
    body = text[1:].replace(', "crc32": null', "").encode()
    checksum_of_save = zlib.crc32(header["save"].encode())
    header["crc32"] = zlib.crc32(body, checksum_of_save)
    first_line = json.dumps(header)[:-1].encode()
    (path / "index.json").write_bytes(first_line + b",\n" + body)


def chunk_of_weight(index: Any) -> Any:
    ((_, chunks),) = index["files"].values()
    return chunks["model.weight"]


def add_entry(key: Any, value: Any) -> Callable[[Any], None]:
    return lambda index: index["state"].append([key, value])


def move_weight(file: str) -> Callable[[Any], None]:
    return lambda index: index.update(files={file: [0, {"model.weight": [[0, 0], [7, 5], 0]}]})


ATTACKS: dict[str, Any] = {
    "a class": add_entry("step", {"$object": "os.system"}),
    "a name of torch that is no dtype": add_entry("step", {"$dtype": "torch.save"}),
    "a tensor that is not there": add_entry("step", {"$tensor": "none"}),
    "a tensor as a name": add_entry({"$tensor": "model.weight"}, 1),
    "a file elsewhere": move_weight("../secret"),
    "an absolute file": move_weight("/etc/hosts"),
    "bytes behind the end": lambda index: chunk_of_weight(index).__setitem__(2, 10**6),
    "a negative size": lambda index: index["tensors"]["model.weight"].__setitem__(1, [-7, 5]),
    "parts left out": lambda index: chunk_of_weight(index).__setitem__(1, [3, 5]),
    "no state": lambda index: index.pop("state"),
    "a state that is a dict": lambda index: index.update(state={"step": 3}),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_index_that_was_tampered_with_is_refused(path, state, attack):
    io.save(state, path)
    change_index(path, lambda index: None)
    assert_same(io.load(path), state)
    change_index(path, ATTACKS[attack])
    with pytest.raises(CheckpointError, match="damaged"):
        io.load(path)


def test_a_format_of_another_version_is_said_to_be_one(path, state):
    io.save(state, path)
    change_index(path, lambda index: index.update(version=3))
    with pytest.raises(CheckpointError, match="newer release"):
        io.load(path)


# -- files and folders ----------------------------------------------------------------------------


def test_a_file_where_a_folder_is_meant_is_an_error(path, state):
    FullCheckpoint().save(state, path)
    for action in (lambda: io.load(path), lambda: io.save(state, path), lambda: io.remove(path)):
        with pytest.raises(CheckpointError, match="file"):
            action()
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
    with pytest.raises(CheckpointNotFoundError, match=r"index\.json"):
        io.load(path)
    (path / ".metadata").touch()
    with pytest.raises(CheckpointError, match="without fabric"):
        io.load(path)


def test_removal_leaves_what_is_not_of_the_checkpoint(path, state):
    io.save(state, path)
    (path / "notes.safetensors").touch()
    io.save(state, path)
    io.remove(path)
    assert files(path) == ["notes.safetensors"]
    io.save(state, path)
    (path / "notes.safetensors").unlink()
    io.remove(path)
    assert not path.exists()


def test_a_folder_cannot_be_saved_in_place_of_a_file_or_below_one(path, state):
    path.touch()
    with pytest.raises(CheckpointError, match="is a file"):
        io.save(state, path / "deeper" / "checkpoint")


RING: list[Any] = []
RING.append(RING)


@pytest.mark.parametrize("wrong", [object(), RING, torch.empty(2, device="meta")])
def test_what_has_no_place_in_it_is_refused_before_anything_is_written(path, wrong):
    with pytest.raises(ArgumentTypeError, match="wrong"):
        io.save({"fine": torch.ones(1), "wrong": wrong}, path)
    assert not path.exists()


def test_a_class_that_the_user_allows_is_refused_with_the_way_out(path):
    class Own:
        pass

    with (
        torch.serialization.safe_globals([Own]),
        pytest.raises(ArgumentTypeError, match="FullCheckpoint") as raised,
    ):
        io.save({"config": [Own()]}, path)
    assert "state['config'][0]" in str(raised.value)


# -- crashes --------------------------------------------------------------------------------------

CRASHES = """
import os, signal, sys
from pathlib import Path
import torch
from fabric.checkpoint import ShardedCheckpoint
torch.set_num_threads(1)
path, io = Path(sys.argv[1]), ShardedCheckpoint()

def kill_at(point):
    def hook(event, arguments):
        nonlocal point
        names_the_folder = any(str(argument).startswith(str(path)) for argument in arguments)
        if names_the_folder or event == "fcntl.flock":
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
assert not all(survived) and survived[-1]
kinds = sorted(entry.name.partition("-")[0] for entry in path.iterdir())
print(len(survived), *kinds)
"""


def test_a_process_killed_at_any_point_of_a_save_leaves_the_old_or_the_new_data(path):
    completed = subprocess.run(
        [sys.executable, "-c", CRASHES, str(path)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env=ONE_THREAD,
    )
    assert completed.returncode == 0, completed.stderr
    points, *kinds = completed.stdout.split()
    assert int(points) > 15
    assert kinds == ["index.json", "rank"], "the last save removes the files of the killed ones"


class Meanwhile(LocalCommunicator):
    """A communicator that runs an action between the data of a save and its commit."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__(torch.device("cpu"))
        self.action = action

    def run(self, collective: Collective) -> Any:
        if collective.operation is Operation.GATHER:
            self.action()
        return super().run(collective)


def test_what_another_living_process_is_writing_is_left_alone(path, state):
    def save_as_well() -> None:
        before = set(files(path))
        io.save(state, path)
        assert len(before) == 2
        assert before < set(files(path))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        io.save({"other": torch.ones(3)}, path, Meanwhile(save_as_well))
    assert len(files(path)) == 2
    assert_same(io.load(path), state)


@pytest.mark.parametrize("content", ["", '{"format": "torch-fa', '{"weight_map": {}}', "[1]"])
def test_an_index_that_is_damaged_or_somebody_elses_is_not_replaced(path, state, content):
    io.save(state, path)
    index = (path / "index.json").read_text()
    before = files(path)
    (path / "index.json").write_text(content)
    for action in (lambda: io.save({"x": torch.ones(1)}, path), lambda: io.remove(path)):
        with pytest.raises(CheckpointError, match=r"damaged|replaced"):
            action()
        assert files(path) == before
        assert (path / "index.json").read_text() == content
    (path / "index.json").write_text(index)
    assert_same(io.load(path), state)


def test_a_pipe_in_the_place_of_a_file_is_an_error_and_not_waited_for(path, state):
    io.save(state, path)
    (file,) = shards(path)
    file.unlink()
    os.mkfifo(file)
    os.mkfifo(path / ".index.json.0123456789ab.tmp")
    with pytest.raises(CheckpointError, match="there is no rank-00000"):
        io.load(path)
    io.save(state, path)
    assert_same(io.load(path), state)


# -- ranks ----------------------------------------------------------------------------------------


def communicator(fabric: Fabric) -> Any:
    return fabric.strategy.runtime.communicator


def trained_state(fabric: Fabric, seed: int) -> dict[str, Any]:
    """Return a model and its optimizer, sharded over all ranks, after two steps.

    The head of the model is too small for a shard on every rank.
    """
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    model, optimizer = fabric.setup(net, optimizer)
    for _ in range(2):
        loss = model(torch.randn(3, 4)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def full_content(state: dict[str, Any]) -> Any:
    """Return the full values of the state. Collective."""
    contents = {name: value.state_dict() for name, value in state.items()}
    return map_tensors(lambda tensor: full_tensor(tensor).clone(), contents)


def save_sharded(fabric: Fabric, path: Path) -> Any:
    state = trained_state(fabric, seed=1)
    fabric.save(path, {**state, "step": 2})
    return full_content(state)


FSDP: dict[str, Any] = {"strategy": "fsdp"}


def read_by_torch(path: Path, expected: dict[str, Tensor]) -> None:
    """Compare the values with those of torch's own reader and of its consolidation."""
    target = {name: torch.zeros_like(value) for name, value in expected.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(target, storage_reader=HuggingFaceStorageReader(str(path)))
    assert_same(target, expected)
    # The consolidation knows neither integers nor scalars.
    floats = {}
    for name, value in expected.items():
        if value.is_floating_point() and value.dim() > 0:
            floats[name] = value
    output = path.with_name("consolidated")
    output.mkdir()
    consolidate_safetensors_files(str(path), str(output), dict.fromkeys(floats, 1))
    (file,) = output.glob("*.safetensors")
    with safe_open(file, "pt") as content:
        assert_same({name: content.get_tensor(name) for name in floats}, floats)


def test_torch_reads_what_two_ranks_have_sharded(path):
    run_in_ranks(save_sharded, path, **FSDP)
    # The second save replaces the first one.
    saved = run_in_ranks(save_sharded, path, **FSDP)[0]
    loaded = io.load(path)
    assert_same({name: map_tensors(Tensor.clone, loaded[name]) for name in saved}, saved)
    metadata = pop_metadata(loaded)
    assert metadata["world_size"] == 2
    assert len(metadata["rng"]) == 2
    assert len(shards(path)) == 2
    expected = {f"model.{name}": value for name, value in loaded["model"].items()}
    for number, slots in loaded["optimizer"]["state"].items():
        for name, value in slots.items():
            expected[f"optimizer.state.{number}.{name}"] = value
    read_by_torch(path, expected)


def test_an_older_or_aborted_save_leaves_nothing_that_torch_reads(path, state):
    io.save({"other": torch.ones(3)}, path)
    before = shards(path)
    with pytest.raises(ArgumentTypeError):
        io.save({**state, "wrong": object()}, path)
    assert shards(path) == before
    io.save(state, path)
    assert not set(shards(path)) & set(before)
    read_by_torch(path, {"model.weight": state["model"]["weight"]})


def several_failures(fabric: Fabric, path: Path) -> list[str]:
    """Save the same state once, then fail to save on rank 1 alone, in three ways."""
    io.save({"x": torch.ones(3), "step": 1}, path, communicator(fabric))
    sharded = trained_state(fabric, seed=1)["model"].state_dict()
    is_second = fabric.global_rank == 1

    def save(state: dict[str, Any]) -> str:
        return outcome(lambda: io.save(state, path, communicator(fabric)))

    state_with_object: dict[str, Any] = {"x": 1}
    state_with_more = {"x": torch.ones(1)}
    if is_second:
        state_with_object = {"x": object()}
        state_with_more["more"] = torch.ones(1)
    texts = [save(state_with_object), save(state_with_more)]

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if is_second:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    texts.append(save({"model": sharded}))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)
    return texts


def test_what_fails_on_one_rank_raises_on_all_and_leaves_the_old_data(path):
    first, second = run_in_ranks(several_failures, path, **FSDP)
    assert second[0].startswith("ArgumentTypeError")
    assert "not both rank 0 and rank 1 have these tensors: more" in second[1]
    assert "untouched" in second[2]
    for text in first:
        assert text.startswith("CheckpointError")
        assert "failed on rank 1 of 2" in text
    assert_same(io.load(path), {"x": torch.ones(3), "step": 1})
    assert len(list(path.iterdir())) == 2


def load_damaged(fabric: Fabric, path: Path) -> tuple[str, bool]:
    state = trained_state(fabric, seed=2)
    before = str(full_content(state))
    text = outcome(lambda: fabric.load(path, state))
    return text, before == str(full_content(state))


def test_damage_that_one_rank_finds_keeps_all_from_changing_anything(path):
    run_in_ranks(save_sharded, path, **FSDP)
    last = shards(path)[-1]
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    for text, unchanged in run_in_ranks(load_damaged, path, **FSDP):
        assert text.startswith("DamagedCheckpointError")
        assert unchanged


def save_and_die(fabric: Fabric, path: Path) -> None:
    """Save once; then kill rank 1 when it opens the file for its shards of a second save."""
    state = trained_state(fabric, seed=1)
    fabric.save(path, {**state, "step": 1})
    if fabric.global_rank == 1:

        def die(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and "rank-00001" in str(arguments[0]):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(die)
    fabric.save(path, {**state, "step": 2})


def test_a_rank_that_is_killed_while_it_writes_leaves_the_old_data_and_nothing_after_the_next_save(
    path,
):
    with pytest.raises(RankFailedError, match="rank 1"):
        run_in_ranks(save_and_die, path, strategy="fsdp", launcher="forkserver")
    assert io.load(path)["step"] == 1
    io.save({"step": 3}, path)
    assert files(path) == ["index.json"]


def save_in_replicas(fabric: Fabric, path: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(1)
    net = Net()
    fully_shard(net, mesh=mesh)
    state = {"model": net.state_dict(), "rank": torch.full((2,), fabric.global_rank)}
    io.save(state, path, communicator(fabric))
    return {name: full_tensor(value) for name, value in net.state_dict().items()}


def test_the_lowest_rank_writes_replicas_and_full_tensors(path):
    saved = run_in_ranks(save_in_replicas, path, ranks=4)[0]
    loaded = io.load(path)
    assert_same(dict(loaded["model"]), saved)
    assert_same(loaded["rank"], torch.zeros(2, dtype=torch.int64))
    assert [file.name[:10] for file in shards(path)] == ["rank-00000", "rank-00001"]


class TwoPieces(Tensor):
    """A local tensor of four rows in two pieces of a table, as some libraries shard embeddings."""

    @staticmethod
    def __new__(cls, rows: Tensor) -> "TwoPieces":
        return Tensor._make_subclass(cls, rows)

    def pieces(self) -> list[tuple[list[int], Tensor]]:
        rows = self.as_subclass(Tensor)
        start = 2 * torch.distributed.get_rank()
        return [([start, 0], rows[:2]), ([start + 4, 0], rows[2:])]

    def __create_chunk_list__(self) -> list[Any]:
        return [chunk(offsets, piece) for offsets, piece in self.pieces()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for offsets, piece in self.pieces():
            if torch.Size(offsets) == index.offset:
                return piece
        raise AssertionError(f"no piece begins at {index.offset}")


def chunk(offsets: list[int], piece: Tensor) -> Any:
    return dcp.metadata.ChunkStorageMetadata(torch.Size(offsets), piece.shape)


def save_pieces(fabric: Fabric, path: Path) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    start = 2 * fabric.global_rank
    rows = torch.arange(24.0).reshape(8, 3)[[start, start + 1, start + 4, start + 5]]

    def state(rows: Tensor) -> dict[str, Any]:
        local = TwoPieces(rows.clone())
        return {"table": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}

    io.save(state(rows), path, communicator(fabric))
    target = state(torch.zeros(4, 3))
    stored = io.open(path, communicator(fabric))
    stored.prepare(target).fill()
    return torch.equal(target["table"].to_local().as_subclass(Tensor), rows)


def test_a_rank_may_hold_several_pieces_of_a_tensor(path):
    results = run_in_ranks(save_pieces, path)
    assert results == [True, True]
    expected = torch.arange(24.0).reshape(8, 3)
    assert_same(io.load(path)["table"], expected)
    assert len(shards(path)) == 4
    read_by_torch(path, {"table": expected})


class Counting(Communicator):
    """A communicator that counts the bytes of each operation of another one on this rank."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.bytes_of_operations = Counter[str]()
        self.rank = inner.rank
        self.size = inner.size
        self.device = inner.device

    def run(self, collective: Collective) -> Any:
        buffer = collective.buffer
        if isinstance(buffer, Tensor):
            size = buffer.nbytes
        else:
            size = len(buffer or b"")
        self.bytes_of_operations[collective.operation.value] += size
        return self.inner.run(collective)


def count_bytes_of_save(fabric: Fabric, path: Path) -> Counter[str]:
    counting = Counting(communicator(fabric))
    state = {"model": Net().state_dict(), "step": 1}
    io.save(state, path, counting, {"rng": torch.get_rng_state()})
    return counting.bytes_of_operations


def test_what_a_rank_exchanges_for_a_save_does_not_grow_with_the_number_of_ranks(path):
    of_two_ranks = run_in_ranks(count_bytes_of_save, path, ranks=2)
    of_four_ranks = run_in_ranks(count_bytes_of_save, path, ranks=4)
    assert of_two_ranks[1] == of_four_ranks[1]
    assert of_two_ranks[1] == of_four_ranks[3]
    assert set(of_two_ranks[1]) == {"all_reduce", "broadcast_object", "gather"}

"""One file per checkpoint: what goes in comes out, bit for bit, or an error says why not."""

import os
import pickle

import pytest
import torch

from fabric.checkpoint import CheckpointIO, FullCheckpoint, ShardedCheckpoint
from fabric.errors import CheckpointError, CheckpointNotFoundError, UnsafeCheckpointError
from tests.test_checkpoint_failures import limited

io = FullCheckpoint()
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint.pt"


@pytest.fixture
def state():
    return {
        "model": {"weight": torch.randn(7, 5), "count": torch.tensor(3)},
        "step": 17,
        "name": "run",
    }


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().untyped_storage())


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert bits(actual) == bits(expected)


def flip_bit(content: bytes, position: int, mask: int) -> bytes:
    """Return a copy of the content in which the bits of ``mask`` are flipped at one position."""
    changed = bytearray(content)
    changed[position] ^= mask
    return bytes(changed)


def test_it_is_a_checkpoint_format():
    assert isinstance(io, CheckpointIO)


@pytest.mark.parametrize("io", [io, ShardedCheckpoint()], ids=["file", "shards"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(path, dtype, io):
    random_bytes = torch.randint(0, 256, (3, 64), dtype=torch.uint8)
    if dtype is torch.bool:
        original = random_bytes.remainder(2).bool()
    else:
        original = random_bytes.view(dtype)
    io.save({"x": original, "scalar": original[0, 0].clone()}, path)
    loaded = io.load(path)
    assert_same_bits(loaded["x"], original)
    assert_same_bits(loaded["scalar"], original[0, 0].clone())


def test_plain_torch_reads_the_file(path, state):
    io.save(state, path)
    loaded = torch.load(path, weights_only=True)
    assert torch.equal(loaded["model"]["weight"], state["model"]["weight"])
    assert loaded["step"] == 17
    assert loaded["name"] == "run"


def test_strided_empty_and_infinite_values_come_back(path):
    base = torch.arange(24.0).reshape(4, 6)
    original = {
        "t": base.t(),
        "step": base[::2, 1::2],
        "empty": torch.empty(0, 3),
        "bad": torch.tensor([torch.nan, torch.inf]),
    }
    io.save(original, path)
    for name, tensor in io.load(path).items():
        torch.testing.assert_close(tensor, original[name], rtol=0, atol=0, equal_nan=True)


def test_tied_tensors_stay_tied_and_are_written_once(path):
    weight = torch.randn(1000, 10)
    io.save({"encoder": weight, "decoder": weight, "part": weight[:5]}, path)
    assert path.stat().st_size < 1.2 * weight.nbytes
    loaded = io.load(path)
    loaded["encoder"].zero_()
    assert not loaded["decoder"].any()
    assert not loaded["part"].any()


def test_loaded_tensors_can_be_written_to_without_touching_the_file(path, state):
    io.save(state, path)
    io.load(path)["model"]["weight"].zero_()
    assert torch.equal(io.load(path)["model"]["weight"], state["model"]["weight"])


def test_loaded_tensors_survive_the_next_save(path, state):
    io.save(state, path)
    loaded = io.load(path)
    io.save({"model": torch.zeros(1)}, path)
    assert torch.equal(loaded["model"]["weight"], state["model"]["weight"])


def test_files_of_the_format_before_torch_1_6_are_read(path, state):
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert torch.equal(io.load(path)["model"]["weight"], state["model"]["weight"])


def test_truncated_files_are_refused_at_any_length(path, state):
    io.save(state, path)
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"checkpoint\.pt"):
            io.load(path)


def test_a_flipped_bit_is_noticed_or_harmless(path, state):
    io.save(state, path)
    content = path.read_bytes()
    noticed = 0
    for position in range(0, len(content), 3):
        path.write_bytes(flip_bit(content, position, 4))
        try:
            loaded = io.load(path)
        except CheckpointError:
            noticed += 1
        else:
            assert_same_bits(loaded["model"]["weight"], state["model"]["weight"])
            assert loaded["model"]["count"] == 3
            assert loaded["step"] == 17
            assert loaded["name"] == "run"
    assert noticed > 100


def test_a_flipped_bit_in_a_weight_names_the_file_and_the_record(path, state):
    io.save(state, path)
    content = path.read_bytes()
    position = content.index(bits(state["model"]["weight"]))
    path.write_bytes(flip_bit(content, position, 1))
    with pytest.raises(CheckpointError, match="data/0") as raised:
        io.load(path)
    assert str(path) in str(raised.value)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", ["archive", "old torch", "pickle", "newer protocol"])
def test_code_in_a_file_is_named_and_not_run(path, tmp_path, kind):
    planted = {"model": torch.ones(2), "config": Payload(tmp_path / "ran")}
    if kind == "newer protocol":
        torch.save(planted, path, pickle_protocol=4)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(planted["config"], protocol=2))
    else:
        torch.save(planted, path, _use_new_zipfile_serialization=kind == "archive")
    with pytest.raises(UnsafeCheckpointError, match="system") as raised:
        io.load(path)
    assert str(path) in str(raised.value)
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_no_checkpoint_is_refused(path):
    for content in (b"", b"PK", b"hello, world\n" * 100, bytes(1000), b"\x80\x02}q\x00."):
        path.write_bytes(content)
        with pytest.raises(CheckpointError):
            io.load(path)


def test_a_file_that_holds_no_dict_is_refused(path):
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="list"):
        io.load(path)


def test_a_missing_file_is_named_with_similar_ones(tmp_path, state):
    io.save(state, tmp_path / "epoch-10.pt")
    with pytest.raises(CheckpointNotFoundError, match=r"epoch-10\.pt") as raised:
        io.load(tmp_path / "epoch-11.pt")
    assert isinstance(raised.value, FileNotFoundError)
    assert str(tmp_path / "epoch-11.pt") in str(raised.value)


@pytest.mark.parametrize("method", [io.load, io.remove])
def test_folders_and_missing_folders_are_refused(tmp_path, method):
    with pytest.raises(CheckpointError, match="folder"):
        method(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="does not exist") as raised:
        method(tmp_path / "nowhere" / "file.pt")
    assert raised.value.request
    assert raised.value.problem
    assert raised.value.expected
    assert raised.value.suggestion


def test_remove_deletes_the_file(path, state):
    io.save(state, path)
    io.wait()
    io.remove(path)
    assert not path.exists()


def test_a_failing_save_leaves_the_old_file(path, state):
    io.save(state, path)
    with pytest.raises(CheckpointError, match="lambda"):
        io.save({"model": torch.ones(3), "f": lambda: 0}, path)
    assert io.load(path)["step"] == 17
    assert os.listdir(path.parent) == [path.name]


def test_a_full_disk_leaves_the_old_file_and_no_litter(path, state):
    io.save(state, path)
    untouched = "what was there before is untouched"
    with limited(1 << 16), pytest.raises(CheckpointError, match=untouched):
        io.save({"x": torch.ones(1 << 20)}, path)
    assert io.load(path)["step"] == 17
    assert os.listdir(path.parent) == [path.name]


def test_saving_without_checksums_is_refused(path, state):
    torch.serialization.set_crc32_options(False)
    try:
        with pytest.raises(CheckpointError, match="set_crc32_options"):
            io.save(state, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert not path.exists()

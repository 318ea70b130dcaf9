"""Modules built in init_module() have the values of a plain build under every strategy."""

import copy
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import init

from fabric import Fabric
from fabric.errors import RankFailedError
from tests.ranks import in_another_process, outcome

LARGE = 128  # a matrix of 128 x 128 takes 64 KB, and tensors from that size on lie in files


@pytest.fixture
def fsdp() -> Iterator[Fabric]:
    with Fabric(accelerator="cpu", devices=1, strategy="fsdp") as fabric:
        fabric.launch()
        yield fabric


def tensors(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def mapped_files():
    """Return the ranges of addresses at which unnamed files are mapped into this process."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("(deleted)"):
            addresses, *_ = line.split()
            begin, end = addresses.split("-")
            ranges.append((int(begin, 16), int(end, 16)))
    return ranges


def in_a_file(tensor):
    address = tensor.data_ptr()
    return any(begin <= address < end for begin, end in mapped_files())


def assert_equal_to_the_plain_build(fabric, build, seed=3):
    torch.manual_seed(seed)
    plain = build()
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    with fabric.init_module():
        module = build()
    assert torch.equal(torch.get_rng_state(), state)
    expected = tensors(plain)
    actual = tensors(module)
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert type(actual[name]) is type(tensor), name
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].stride() == tensor.stride(), name
        assert actual[name].device == tensor.device, name
        assert actual[name].requires_grad == tensor.requires_grad, name
        assert torch.equal(actual[name], tensor), name
    return module


class Holder(nn.Module):
    """A weight that a function initializes, and a bias that is drawn after it."""

    def __init__(self, initialize, shape=(130, 140), dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype))
        initialize(self.weight)
        self.bias = nn.Parameter(torch.randn(3))


INITIALIZERS = {
    "uniform_": lambda w: init.uniform_(w, -1, 2),
    "normal_": lambda w: init.normal_(w, 1, 2),
    "trunc_normal_": lambda w: init.trunc_normal_(w, std=0.02),
    "trunc_normal_ with rejections": init.trunc_normal_,
    "trunc_normal_ in a tail": lambda w: init.trunc_normal_(w, a=1.5, b=3),
    "constant_": lambda w: init.constant_(w, 0.5),
    "eye_": init.eye_,
    "xavier_uniform_": init.xavier_uniform_,
    "xavier_normal_": init.xavier_normal_,
    "kaiming_uniform_": lambda w: init.kaiming_uniform_(w, a=5**0.5),
    "kaiming_normal_": lambda w: init.kaiming_normal_(w, mode="fan_out"),
    "orthogonal_": init.orthogonal_,
    "orthogonal_ of a view": lambda w: init.orthogonal_(w.t(), 1.5),
    "sparse_": lambda w: init.sparse_(w, 0.3),
}


@pytest.mark.parametrize("initialize", INITIALIZERS.values(), ids=INITIALIZERS)
def test_every_initializer_gives_the_values_of_the_plain_build(fsdp, initialize):
    module = assert_equal_to_the_plain_build(fsdp, lambda: Holder(initialize))
    assert in_a_file(module.weight)
    assert not in_a_file(module.bias)


@pytest.mark.parametrize(
    "name", ["trunc_normal_ with rejections", "normal_", "uniform_", "sparse_"]
)
def test_low_precision_gives_the_values_of_the_plain_build(fsdp, name):
    assert_equal_to_the_plain_build(
        fsdp, lambda: Holder(INITIALIZERS[name], (260, 140), torch.bfloat16)
    )


def generator_of_the_user(w):
    generator = torch.Generator().manual_seed(5)
    w.data.normal_(generator=generator)
    w.data += torch.rand(w.shape, generator=generator)


def in_place_without_grad(w):
    with torch.no_grad():
        w.normal_().mul_(0.5)[0].fill_(2.0)
        w[:, 1:3] = torch.rand(130, 2)


def replaced(w):
    w.data = torch.randn(140, 130).t() * 0.02


def replaced_by_a_real_one(w):
    w.data = torch.frombuffer(bytearray(130 * 140), dtype=torch.uint8).float().view(130, 140)


def scaled_by_a_number_that_was_read(w):
    w.data.normal_()
    scale = 1.0
    if w[0, 0] < 10:
        scale = w.detach().norm().item()
    w.data.div_(scale)


def masked(w):
    w.data.normal_()
    w.data[w > 0] = -1
    w.data[w.data.argmax(0).unique()] *= 3


def drawn_with_values(w):
    w.data.copy_(torch.poisson(torch.rand(130, 140) * 5) + torch.bernoulli(torch.rand(130, 140)))
    w.data += torch.normal(torch.rand(130, 140), 2.0)


def from_factories(w):
    w.data = torch.randn_like(w)
    w.data += torch.rand_like(w)
    w.data += torch.randint_like(w, 5)
    w.data += w.new_zeros(130, 140)
    w.data += torch.arange(18200).view(130, 140)
    w.data += torch.full_like(w, 2).double().float()
    rows = torch.stack([torch.randperm(18200), torch.linspace(0, 1, 18200)])
    w.data += rows.sum(0).view(130, 140)


def seeded_inside(w):
    torch.manual_seed(11)
    w.data.normal_()
    with torch.random.fork_rng():
        torch.manual_seed(12)
        w.data.add_(torch.rand(140))


def through_numpy(w):
    w.data.normal_()
    w.detach().numpy()[:] *= 2
    w.data.copy_(torch.from_numpy(w.detach().numpy() + 1))


def by_address(w):
    assert w.data_ptr() == w.untyped_storage().data_ptr()
    w.untyped_storage().fill_(1)


def through_a_sparse_tensor(w):
    w.data = torch.eye(130, 140).to_sparse().to_dense()


def shaped_on_meta(w):
    with torch.device("meta"):
        shape = nn.Linear(140, 130)(torch.empty(2, 140)).shape
    w.data.fill_(shape[0])


WAYS_TO_FILL_A_WEIGHT = [
    generator_of_the_user,
    in_place_without_grad,
    replaced,
    replaced_by_a_real_one,
    scaled_by_a_number_that_was_read,
    masked,
    drawn_with_values,
    from_factories,
    seeded_inside,
    through_numpy,
    by_address,
    through_a_sparse_tensor,
    shaped_on_meta,
]


@pytest.mark.parametrize("fill", WAYS_TO_FILL_A_WEIGHT)
def test_every_way_to_fill_a_weight_gives_the_values_of_the_plain_build(fsdp, fill):
    assert_equal_to_the_plain_build(fsdp, lambda: Holder(fill))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(150, LARGE)
        self.head = nn.Linear(LARGE, 150, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("position", torch.arange(20_000), persistent=False)
        self.register_buffer("mask", torch.ones(300, 300).tril() == 0)
        self.frozen = nn.Parameter(torch.randn(LARGE, LARGE) * 0.02, requires_grad=False)


def initialize(layer):
    if isinstance(layer, nn.Linear):
        init.trunc_normal_(layer.weight, std=0.5)
        init.zeros_(layer.bias)


def initialized_with_apply():
    block = nn.Sequential(nn.Linear(LARGE, LARGE), nn.LayerNorm(LARGE))
    return nn.Sequential(block, copy.deepcopy(block), nn.Linear(LARGE, 200)).apply(initialize)


def sized_by_a_dry_run():
    """Build with a forward pass that updates running statistics and gives the next width."""
    model = nn.Sequential(nn.Conv2d(1, 20, 3), nn.BatchNorm2d(20), nn.Flatten())
    _, width = model(torch.rand(2, 1, 12, 12)).shape
    return model.append(nn.Linear(width, 20))


def built_with_skip_init():
    layer = nn.utils.skip_init(nn.Linear, LARGE, 200)
    init.ones_(layer.weight)
    init.ones_(layer.bias)
    return layer


LAYERS = {
    "Transformer with its deep copies": lambda: nn.Transformer(
        LARGE, 2, 2, 2, LARGE, batch_first=True
    ),
    "LSTM": lambda: nn.LSTM(LARGE, LARGE, 2),
    "Embedding with padding": lambda: nn.Embedding(200, LARGE, padding_idx=1),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(LARGE, LARGE)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(LARGE, LARGE)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(LARGE, LARGE)),
    "moved and cast": lambda: nn.Linear(LARGE, 300, device="cpu").to("cpu").double().bfloat16(),
    "without elements": lambda: Holder(lambda w: None, (0, 3)),
    "tied": Tied,
    "initialized with apply": initialized_with_apply,
    "sized by a dry run": sized_by_a_dry_run,
    "built with skip_init": built_with_skip_init,
}


@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS)
def test_layers_of_torch_get_the_values_of_the_plain_build(fsdp, build):
    assert_equal_to_the_plain_build(fsdp, build)


SOME_LAYERS = st.sampled_from(
    [
        lambda: nn.Linear(LARGE, LARGE),
        lambda: nn.Conv1d(LARGE, 60, 3),
        lambda: nn.Embedding(7, 6),
        lambda: nn.GRU(6, LARGE),
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(LARGE, 2, 8), 2, enable_nested_tensor=False
        ),
        lambda: nn.Sequential(*[nn.Linear(LARGE, 6)] * 2),
        Tied,
        lambda: Holder(drawn_with_values),
    ]
)
MATRIX_INITIALIZERS = [None, *INITIALIZERS]
MATRIX_INITIALIZERS.remove("orthogonal_ of a view")


def initialize_matrices(layer, initializer):
    """Initialize the matrices of a layer again, unless the name of the initializer is None."""
    if initializer is None:
        return
    for parameter in layer.parameters():
        if parameter.dim() == 2:
            INITIALIZERS[initializer](parameter)


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    layers=st.lists(
        st.tuples(SOME_LAYERS, st.sampled_from(MATRIX_INITIALIZERS), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    initializer_of_model=st.sampled_from(MATRIX_INITIALIZERS),
    seed=st.integers(0, 2**31),
)
def test_any_composition_gives_the_values_of_the_plain_build(layers, initializer_of_model, seed):
    def build():
        model = nn.Sequential()
        for make_layer, initializer, is_copied in layers:
            layer = make_layer()
            initialize_matrices(layer, initializer)
            model.append(layer)
            if is_copied:
                model.append(copy.deepcopy(layer))
        initialize_matrices(model, initializer_of_model)
        return model

    with Fabric(accelerator="cpu", devices=1, strategy="fsdp") as fabric:
        fabric.launch()
        assert_equal_to_the_plain_build(fabric, build, seed)


# -- scratch space ---------------------------------------------------------------------------------


def test_files_are_gone_once_the_model_is_sharded_and_no_descriptor_stays(fsdp):
    descriptors = len(os.listdir("/proc/self/fd"))
    mapped_before = mapped_files()
    with fsdp.init_module():
        module = nn.Sequential(*(nn.Linear(LARGE, LARGE) for _ in range(50)))
    assert all(in_a_file(layer.weight) for layer in module)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    optimizer = torch.optim.SGD(module.parameters())
    fsdp.setup(module, optimizer)
    assert mapped_files() == mapped_before


def test_an_empty_build_takes_no_scratch_space_and_keeps_tables_and_constants(fsdp):
    torch.manual_seed(3)
    mapped_before = mapped_files()
    with fsdp.init_module(empty_init=True):
        module = copy.deepcopy(nn.Sequential(Tied(), nn.LSTM(LARGE, LARGE), nn.BatchNorm1d(3)))
    assert mapped_files() == mapped_before
    assert module[0].head.weight is module[0].embedding.weight
    assert module[1].weight_ih_l0.is_meta
    model = fsdp.setup(module).module
    for tensor in tensors(model).values():
        assert not tensor.is_meta
    assert model[0].head.weight is model[0].embedding.weight
    assert torch.equal(model[0].position, torch.arange(20_000))
    assert model[2].running_var.tolist() == [1.0] * 3


def test_leaving_by_an_error_ends_the_build(fsdp):
    with pytest.raises(KeyError), fsdp.init_module():
        raise KeyError
    assert not in_a_file(torch.ones(LARGE, LARGE))


def test_buffers_that_are_views_of_one_storage_stay_views(fsdp):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("table", torch.ones(40_000))
            self.register_buffer("first", self.table[:100])

    with fsdp.init_module():
        net = Views()
    fsdp.setup_module(net)
    net.table.zero_()
    assert net.first.sum() == 0
    assert not in_a_file(net.table)


def build_with_limit(fabric: Fabric, size: int) -> list[str]:
    """Build a module where files cannot exceed a size, and return what happens."""
    events = []
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def build() -> None:
        with fabric.init_module():
            events.append("building")
            nn.Linear(400, 400)

    events.append(outcome(build))
    return events


def build_with_limits(*sizes: int) -> list[list[str]]:
    with Fabric(accelerator="cpu", devices=1, strategy="fsdp") as fabric:
        fabric.launch()
        return [build_with_limit(fabric, size) for size in sizes]


def test_a_full_scratch_folder_is_an_error_that_names_it():
    # Files cannot exceed a size, as on a full disk. The smaller limit leaves no room at all. The
    # limit also counts for the file that pytest may be writing to, so another process has it.
    with_some_room, without_room = in_another_process(build_with_limits, 100_000, 1000)
    building, text = with_some_room
    assert building == "building"
    assert text.startswith("UsageError")
    assert "640,000 bytes" in text
    assert tempfile.gettempdir() in text
    assert "bytes free" in text
    assert "TMPDIR=" in text
    assert "rank0" in text
    # This error comes before the build.
    [text_without_room] = without_room
    assert text_without_room.startswith("UsageError")
    assert "TMPDIR=" in text_without_room


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="only Linux has this folder in memory")
def test_a_scratch_folder_in_memory_is_a_warning_before_the_build(fsdp, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    with pytest.warns(UserWarning, match="TMPDIR=/var/tmp"), fsdp.init_module():
        pass


def build_until_killed(folder):
    tempfile.tempdir = str(folder)
    fabric = Fabric(accelerator="cpu", devices=1, strategy="fsdp")
    fabric.launch()
    with fabric.init_module():
        model = nn.Linear(1000, 1000)
        assert f"{folder}/" in Path("/proc/self/maps").read_text(), model
        os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_of_a_build_that_is_killed(tmp_path):
    with pytest.raises(RankFailedError) as caught:
        in_another_process(build_until_killed, tmp_path)
    assert caught.value.exit_code == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


# -- other strategies ------------------------------------------------------------------------------


def single(**options):
    fabric = Fabric(accelerator="cpu", devices=1, **options)
    fabric.launch()
    return fabric


def test_modules_are_built_in_the_dtype_of_the_precision_also_after_an_error():
    with single(precision="64-true") as fabric:
        with pytest.raises(KeyError), fabric.init_module():
            raise KeyError
        assert torch.ones(1).dtype is torch.float32
        torch.manual_seed(3)
        with fabric.init_module(), fabric.init_module():
            inside = nn.Linear(4, 4)
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(3)
        plain = nn.Linear(4, 4)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(inside.weight, plain.weight)


def test_an_empty_build_draws_nothing_in_common_layers_and_fills_in_constants():
    with single() as fabric, fabric.init_module(empty_init=True):
        state = torch.get_rng_state()
        nn.Sequential(nn.Linear(4, 4), nn.Conv2d(2, 2, 3), nn.Embedding(4, 2), nn.LSTM(2, 2))
        assert torch.equal(torch.get_rng_state(), state)
        assert nn.BatchNorm1d(3).weight.tolist() == [1.0] * 3
        assert init.constant_(torch.empty(2), 5.0).tolist() == [5.0, 5.0]
        tensor = torch.full((2,), 3.0)
        assert init.normal_(tensor) is tensor
        assert init.normal_(tensor=tensor, std=2.0) is tensor
    assert tensor.isnan().all()

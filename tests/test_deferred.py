"""Modules built without memory get the values, and leave the generator, of the whole build on the CPU."""

import copy
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import init

from fabric.deferred import deferred, outlined
from fabric.errors import UsageError


def tensors(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def kind(tensor):
    return type(tensor), tensor.dtype, tensor.stride(), tensor.device, tensor.requires_grad


def replay(recording, module, keep):
    """Give a module what ``keep`` leaves of its values, in all places where a tensor is registered."""
    blank = tensors(module)
    registries = [registry for part in module.modules() for registry in (part._parameters, part._buffers)]
    for name, value in recording.values(blank):
        old, kept = blank[name], keep(name, value)
        if kept is not old and isinstance(old, nn.Parameter):
            kept = nn.Parameter(kept, requires_grad=old.requires_grad)
        for registry in registries:
            registry.update({own: kept for own, tensor in registry.items() if tensor is old})
        del value, kept


def built_deferred(build):
    """The module that ``build`` makes, filled by a replay, after checks that nothing of it was real before."""
    with deferred() as recording:
        module = build()
    assert all(tensor.is_meta for tensor in tensors(module).values())
    state = torch.get_rng_state()
    replay(recording, module, lambda name, value: value)
    assert torch.equal(torch.get_rng_state(), state), "the replay drew from the generator"
    return module


def assert_equal_to_the_plain_build(build, seed=3):
    torch.manual_seed(seed)
    plain, state = build(), torch.get_rng_state()
    torch.manual_seed(seed)
    module = built_deferred(build)
    assert torch.equal(torch.get_rng_state(), state)
    expected, found = tensors(plain), tensors(module)
    assert list(found) == list(expected)
    assert list(module.state_dict()) == list(plain.state_dict())
    for name, tensor in expected.items():
        assert kind(found[name]) == kind(tensor), name
        assert torch.equal(found[name], tensor), name


class Holder(nn.Module):
    """One weight of the given shape that was initialised by the given function; a bias that was drawn after it."""

    def __init__(self, initialise, shape=(12, 20), dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype))
        initialise(self.weight)
        self.bias = nn.Parameter(torch.randn(3))


INITIALISERS = {
    "uniform_": lambda w: init.uniform_(w, -1, 2),
    "normal_": lambda w: init.normal_(w, 1, 2),
    "trunc_normal_": lambda w: init.trunc_normal_(w, std=0.02),
    "trunc_normal_ with rejections": init.trunc_normal_,
    "trunc_normal_ in a tail": lambda w: init.trunc_normal_(w, a=1.5, b=3),
    "constant_": lambda w: init.constant_(w, 0.5),
    "ones_": init.ones_,
    "zeros_": init.zeros_,
    "eye_": init.eye_,
    "xavier_uniform_": init.xavier_uniform_,
    "xavier_normal_": init.xavier_normal_,
    "kaiming_uniform_": lambda w: init.kaiming_uniform_(w, a=5**0.5),
    "kaiming_normal_": lambda w: init.kaiming_normal_(w, mode="fan_out"),
    "orthogonal_": init.orthogonal_,
    "orthogonal_ of a tall view": lambda w: init.orthogonal_(w.t(), 1.5),
    "sparse_": lambda w: init.sparse_(w, 0.3),
}


@pytest.mark.parametrize("initialise", INITIALISERS.values(), ids=INITIALISERS)
def test_every_initialiser_gives_the_values_of_the_plain_build(initialise):
    assert_equal_to_the_plain_build(lambda: Holder(initialise))


@pytest.mark.parametrize("shape", [(4, 2, 3), (4, 2, 3, 3), (4, 2, 3, 3, 3)])
def test_dirac_gives_the_values_of_the_plain_build(shape):
    assert_equal_to_the_plain_build(lambda: Holder(lambda w: init.dirac_(w, groups=2), shape))


@pytest.mark.parametrize("name", ["trunc_normal_ with rejections", "normal_", "uniform_", "sparse_", "eye_"])
def test_low_precision_gives_the_values_of_the_plain_build(name):
    assert_equal_to_the_plain_build(lambda: Holder(INITIALISERS[name], dtype=torch.bfloat16))


def own_generator(w):
    generator = torch.Generator().manual_seed(5)
    w.data.normal_(generator=generator)
    w.data += torch.rand(w.shape, generator=generator)


def in_place_without_grad(w):
    with torch.no_grad():
        w.normal_().mul_(0.5)[0].fill_(2.0)
        w[:, 1:3] = torch.rand(12, 2)
        w[2, 2] = 7


def replaced(w):
    w.data = torch.randn(20, 12).t() * 0.02


def replaced_by_a_real_one(w):
    w.data = torch.frombuffer(bytearray(range(240)), dtype=torch.uint8).float().view(12, 20)


def copied_from_numbers(w):
    w.data.copy_(torch.tensor([float(i) for i in range(20)]))


def scaled_by_a_number_that_was_read(w):
    w.data.normal_()
    w.data.div_(w.detach().norm().item() if w[0, 0] < 10 else 1.0)


def masked(w):
    w.data.normal_()
    w.data[w > 0] = -1
    w.data += w[w < -1].sum()
    w.data[w.data.argmax(0).unique()] *= 3


def drawn_with_values(w):
    w.data.copy_(torch.poisson(torch.rand(12, 20) * 5) + torch.bernoulli(torch.rand(12, 20)))
    w.data += torch.normal(torch.rand(12, 20), 2.0)
    w.data[0, :2] = torch.multinomial(torch.rand(9), 2)


def drawn_like(w):
    w.data = torch.randn_like(w) + torch.rand_like(w) + torch.randint_like(w, 5)


def from_factories(w):
    w.data[:10, 0] = torch.arange(10) + torch.linspace(0, 1, 10) + torch.randperm(10)
    w.data[1] = torch.ones(20) * torch.full((20,), 2) + torch.empty(20).fill_(1) + torch.randint(3, (20,))
    w.data[2] = w.new_zeros(20) + torch.zeros_like(w[0]) + torch.Tensor(20).uniform_() + w.new_tensor(2.0)


def seeded_inside(w):
    torch.manual_seed(11)
    w.data.normal_()
    with torch.random.fork_rng():
        torch.manual_seed(12)
        w.data.add_(torch.rand(20))


def moved(w):
    w.data = (w.to("cpu").cpu().to(torch.zeros(1)).double() + torch.rand(12, 20)).float().to(w)


def rates_from_a_list(w):
    for row, rate in enumerate(torch.linspace(0, 0.5, 12).tolist()):
        w.data[row].fill_(rate)


CASES = [
    own_generator,
    in_place_without_grad,
    replaced,
    replaced_by_a_real_one,
    copied_from_numbers,
    scaled_by_a_number_that_was_read,
    masked,
    drawn_with_values,
    drawn_like,
    from_factories,
    seeded_inside,
    moved,
    rates_from_a_list,
]


@pytest.mark.parametrize("case", CASES)
def test_each_way_to_fill_a_weight_gives_the_values_of_the_plain_build(case):
    assert_equal_to_the_plain_build(lambda: Holder(case))


LAYERS = {
    "Transformer with its deep copies": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "LSTM": lambda: nn.LSTM(3, 4, 2),
    "Embedding with padding": lambda: nn.Embedding(5, 4, padding_idx=1),
    "BatchNorm": lambda: nn.BatchNorm2d(3),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
    "moved and cast": lambda: nn.Linear(3, 4, device="cpu").to("cpu").double().bfloat16(),
    "without elements": lambda: Holder(init.normal_, (0, 3)),
}


@pytest.mark.parametrize(
    "build", [pytest.param(build, id=name) for name, build in LAYERS.items() if "meta" not in name]
)
def test_layers_of_torch_get_the_values_of_the_plain_build(build):
    assert_equal_to_the_plain_build(build)


def test_a_tensor_said_to_be_on_meta_is_deferred_as_well():
    torch.manual_seed(3)
    module = built_deferred(lambda: nn.Linear(3, 4, device="meta"))
    torch.manual_seed(3)
    assert torch.equal(module.weight, nn.Linear(3, 4).weight)


def initialise(layer):
    if isinstance(layer, nn.Linear):
        init.trunc_normal_(layer.weight, std=0.5)
        init.zeros_(layer.bias)


def test_apply_and_deep_copies_give_the_values_of_the_plain_build():
    def build():
        block = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
        return nn.Sequential(block, copy.deepcopy(block), nn.Linear(6, 2)).apply(initialise)

    assert_equal_to_the_plain_build(build)


def test_another_default_dtype_is_that_of_the_replay():
    def build():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return nn.Sequential(nn.Linear(3, 3), Holder(lambda w: w.data.add_(torch.rand(20) + torch.arange(20) / 7)))
        finally:
            torch.set_default_dtype(before)

    assert_equal_to_the_plain_build(build)
    assert torch.get_default_dtype() is torch.float32


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("position", torch.arange(5), persistent=False)
        self.register_buffer("mask", torch.ones(3, 3).tril() == 0)
        self.frozen = nn.Parameter(torch.randn(2, 2), requires_grad=False)


def test_tied_weights_stay_tied_and_buffers_are_filled():
    assert_equal_to_the_plain_build(Tied)
    module = built_deferred(Tied)
    assert module.head.weight is module.embedding.weight


def test_a_dry_run_inside_the_context_updates_running_statistics():
    def build():
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten())
        width = model(torch.rand(2, 1, 5, 5)).shape[1]
        return model.append(nn.Linear(width, 2))

    assert_equal_to_the_plain_build(build)


def test_what_is_drawn_after_the_context_is_that_of_the_plain_build():
    torch.manual_seed(3)
    nn.Linear(4, 4)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with deferred() as recording:
        layer = nn.Linear(4, 4)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(3)
    assert torch.equal(recording.materialise(layer.weight), nn.Linear(4, 4).weight)


def test_a_generator_of_the_caller_advances_once():
    plain, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    torch.rand(5, generator=plain)
    with deferred() as recording:
        tensor = torch.rand(5, generator=other)
    recording.materialise(tensor)
    assert torch.equal(other.get_state(), plain.get_state())


def test_values_may_be_asked_for_again_and_in_any_order():
    with deferred() as recording:
        first, second = torch.randn(4), torch.randn(4)
    late = recording.materialise(second)
    early = recording.materialise(first)
    assert torch.equal(recording.materialise(second), late)
    torch.manual_seed(0)
    assert torch.equal(torch.randn(4), early)


def test_tensors_that_shared_memory_share_it_again():
    with deferred() as recording:
        whole = torch.randn(4, 4)
        parts = {"top": whole[:2], "bottom": whole[2:]}
    values = dict(recording.values(parts))
    assert values["top"].untyped_storage().data_ptr() == values["bottom"].untyped_storage().data_ptr()


def test_real_tensors_are_kept_by_reference_and_never_copied():
    real = torch.randn(3, 3)
    with deferred() as recording:
        module = Holder(lambda w: None)
        module.table = nn.Parameter(real)
        module.weight.data = real + torch.zeros(3)
    replay(recording, module, lambda name, value: value)
    assert module.table.data_ptr() == real.data_ptr()
    assert torch.equal(module.weight, real)


def test_a_real_tensor_that_is_written_to_gets_values_at_once():
    real = torch.zeros(3)
    with deferred():
        real.copy_(torch.arange(3))
    assert real.tolist() == [0, 1, 2]


def alive_while_replaying(build):
    """The largest number of values that were alive together, and how many there were."""
    with deferred() as recording:
        module = build()
    seen, most = [], 0

    def keep(name, value):
        nonlocal most
        seen.append(weakref.ref(value.untyped_storage()))
        most = max(most, sum(reference() is not None for reference in seen))
        return value[:1].clone()

    replay(recording, module, keep)
    return most, len(seen)


def test_full_tensors_are_freed_one_by_one():
    most, total = alive_while_replaying(lambda: nn.Transformer(8, 2, 3, 3, 16, batch_first=True).apply(initialise))
    assert total > 90
    assert most <= 2


def test_only_what_a_value_depends_on_is_computed():
    with deferred() as recording:
        layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    tape = recording._recorder.tape
    assert len(tape.closure([tape.slot(layers[7].weight).storage])) == 2


def test_nothing_real_is_kept_while_a_large_module_is_built():
    with deferred() as recording:
        huge = torch.zeros(1 << 20, 1 << 20)
        small = huge[:2, :2] + 1
    assert huge.is_meta
    assert recording._recorder.tape.slot(small) is not None


def test_reading_numbers_holds_no_more_than_the_last_answer_needs():
    with deferred() as recording:
        for _ in range(10):
            init.trunc_normal_(torch.empty(50, 50))
        held = recording._recorder._evaluation._memory
        assert sum(memory.nbytes() for memory in held.values()) < 10 * 50 * 50 * 4


MEMORY = {
    "numpy": lambda w: w.detach().numpy(),
    "data_ptr": lambda w: w.data_ptr(),
    "untyped_storage": lambda w: w.untyped_storage(),
    "numpy of something computed": lambda w: (w.detach() * 2).sum(0).numpy(),
}


@pytest.mark.parametrize("name", MEMORY)
def test_what_needs_memory_names_the_parameter_and_the_way_out(name):
    way_out = 'source="rank0"' if "numpy" in name else r"outside of fabric\.init_module"
    with deferred():
        layer = nn.Linear(3, 3)
        with pytest.raises(UsageError, match=rf"(?s)Linear\.weight.*{way_out}") as caught:
            MEMORY[name](layer.weight)
    assert all([caught.value.request, caught.value.problem, caught.value.expected, caught.value.suggestion])


def test_a_sparse_tensor_is_refused():
    with deferred(), pytest.raises(UsageError, match=r"outside of fabric\.init_module"):
        torch.ones(3, 3).to_sparse()


def test_values_inside_the_context_are_refused():
    with deferred() as recording:
        tensor = torch.ones(2)
        with pytest.raises(UsageError, match="inside"):
            recording.materialise(tensor)


def test_a_meta_tensor_from_elsewhere_is_refused_by_name_before_anything_changes():
    with deferred() as recording:
        module = nn.Sequential(nn.Linear(2, 2))
    module.append(nn.Linear(2, 2, device="meta"))
    with pytest.raises(UsageError, match=r"1\.weight, 1\.bias"):
        replay(recording, module, lambda name, value: value)
    assert module[0].weight.is_meta


def test_a_meta_tensor_from_elsewhere_is_refused_as_a_source():
    foreign = torch.empty(2, device="meta")
    with deferred(), pytest.raises(UsageError, match="outside"):
        torch.ones(2).copy_(foreign)


def test_numbers_said_to_be_on_meta_keep_their_values():
    with deferred() as recording:
        tensor = torch.tensor([1.0, 2.0], device="meta") + torch.ones(2, device="meta")
    assert recording.materialise(tensor).tolist() == [2, 3]


def test_initialising_after_the_context_is_refused_by_name():
    with deferred() as recording:
        layer = nn.Linear(2, 2)
    init.normal_(layer.bias)
    with pytest.raises(UsageError, match="bias"):
        replay(recording, layer, lambda name, value: value)


def test_a_real_tensor_that_changed_since_is_refused():
    real = torch.ones(2)
    with deferred() as recording:
        doubled = torch.zeros(2).copy_(real) * 2
    real.zero_()
    with pytest.raises(UsageError, match="clone"):
        recording.materialise(doubled)


def test_leaving_by_an_error_ends_the_recording():
    with pytest.raises(KeyError), deferred():
        raise KeyError
    assert not torch.ones(2).is_meta
    assert nn.Linear(2, 2).weight.device.type == "cpu"


SOME_LAYERS = st.sampled_from(
    [
        lambda: nn.Linear(6, 6),
        lambda: nn.Conv1d(6, 6, 3),
        lambda: nn.Embedding(7, 6),
        lambda: nn.LayerNorm(6),
        lambda: nn.GRU(6, 6),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8), 2, enable_nested_tensor=False),
        lambda: nn.Sequential(*[nn.Linear(6, 6)] * 2),
        Tied,
        lambda: Holder(drawn_with_values),
    ]
)
MATRICES = {name: function for name, function in INITIALISERS.items() if name != "orthogonal_ of a tall view"}


def reinitialised(layer, function):
    for parameter in layer.parameters():
        if parameter.dim() == 2:
            function(parameter)
    return layer


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    parts=st.lists(st.tuples(SOME_LAYERS, st.sampled_from([None, *MATRICES]), st.booleans()), min_size=1, max_size=4),
    last=st.sampled_from([None, *MATRICES]),
    seed=st.integers(0, 2**31),
)
def test_any_composition_gives_the_values_of_the_plain_build(parts, last, seed):
    def build():
        model = nn.Sequential()
        for make, name, twice in parts:
            layer = make() if name is None else reinitialised(make(), MATRICES[name])
            model.append(layer)
            if twice:
                model.append(copy.deepcopy(layer))
        return model if last is None else reinitialised(model, MATRICES[last])

    assert_equal_to_the_plain_build(build, seed)


# -- values that come from elsewhere ----------------------------------------------------------------------------------


def from_numpy(w):
    w.data.copy_(torch.from_numpy(w.detach().numpy() * 2))
    if w.sum() < 1e9:
        w.data.mul_(torch.rand(20))


@pytest.mark.parametrize("fill", [from_numpy, masked, drawn_with_values, own_generator])
def test_an_outline_has_the_shapes_of_the_plain_build_and_leaves_its_generator(fill):
    torch.manual_seed(3)
    plain, state = Holder(fill), torch.get_rng_state()
    torch.manual_seed(3)
    with outlined():
        module = Holder(fill)
    assert torch.equal(torch.get_rng_state(), state)
    assert [(n, t.shape, t.device.type) for n, t in tensors(module).items()] == [
        (n, t.shape, "meta") for n, t in tensors(plain).items()
    ]


def test_an_outline_keeps_no_real_tensor_and_no_tie_apart():
    kept = []

    def build():
        module, weight = nn.Module(), nn.Parameter(torch.frombuffer(bytearray(2**20), dtype=torch.float32))
        kept.append(weakref.ref(weight))
        module.first = module.second = weight
        weight.data.add_(1)
        return module

    with outlined():
        module = build()
        assert kept[0]() is None
    assert module.first is module.second
    assert module.first.is_meta


def test_values_of_an_outline_that_are_gone_are_refused():
    with outlined(), pytest.raises(UsageError, match="rank 0 alone"):
        Holder(lambda w: None, (512, 64)).weight.data.copy_(torch.from_numpy(np.ones((512, 64)))).sum().item()


def test_a_lazy_layer_and_a_context_within_another_are_refused():
    with deferred(), pytest.raises(UsageError, match=r"LazyLinear\.weight"):
        nn.LazyLinear(3)
    with deferred(), pytest.raises(UsageError, match="inside of another"), outlined():
        pass

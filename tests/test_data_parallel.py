"""Data parallelism in one process: replicas in threads give the numbers of one device."""

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.accelerators import CPUAccelerator, CUDAAccelerator
from fabric.errors import ConfigurationError
from fabric.strategies import DataParallelStrategy
from tests.loops import assert_same, fabric_loop, make_model, plain_loop
from tests.models import Net

CPU = torch.device("cpu")


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    """Two replicas on the CPU."""
    with make_fabric() as fabric:
        yield fabric


def make_fabric(devices: int = 2, **options: Any) -> Fabric:
    return Fabric(
        accelerator="cpu",
        strategy="dp",
        devices=devices,
        environment="none",
        **options,
    )


class Calls(nn.Module):
    """A module whose forward pass is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def replicated(function: Callable[..., Any], devices: int = 2) -> Any:
    strategy = DataParallelStrategy(parallel_devices=[CPU] * devices)
    strategy.setup_environment()
    return strategy.setup_module(Calls(function))


def assert_equal(actual: Any, expected: Any) -> None:
    assert_close(actual, expected, rtol=0, atol=0)


def mean_square(tensor: Tensor) -> Tensor:
    return tensor.pow(2).mean()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = mean_square(model(x))
    loss.backward()
    gradients = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradients.append(parameter.grad.clone())
    return gradients


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_an_uneven_or_small_batch_gives_the_gradients_of_one_device(
    devices: int, batch: int
) -> None:
    plain = Net().double()
    x = torch.randn(batch, 4, dtype=torch.float64)
    with make_fabric(devices, precision="64-true") as fabric:
        module = copy.deepcopy(plain)
        model = fabric.setup(module)
        assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)
        actual = gradients(model, x)
        expected = gradients(plain, x)
        assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_an_empty_batch_runs_on_one_replica(fabric: Fabric) -> None:
    module = Net()
    model = fabric.setup(module)
    output = model(torch.empty(0, 4))
    assert output.shape == (0, 1)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_two_runs_are_bit_identical(precision: str) -> None:
    def run() -> Any:
        with make_fabric(3, precision=precision) as fabric:
            return fabric.launch(fabric_loop, torch.float32, 1)

    first = run()
    for _ in range(5):
        assert_same(run(), first, 0.0)


def test_one_device_is_bit_identical_to_the_plain_loop() -> None:
    with make_fabric(1) as fabric:
        actual = fabric.launch(fabric_loop, torch.float32, 3)
    expected = plain_loop(torch.float32, None, False, 3)
    assert_same(actual, expected, 0.0)


def test_gradients_reach_the_input_and_its_source(fabric: Fabric) -> None:
    plain = Net().double()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    module = copy.deepcopy(plain)
    model = fabric.setup(module)
    expected_sum = plain(2 * x).sum()
    actual_sum = model(2 * x).sum()
    (expected,) = torch.autograd.grad(expected_sum, x)
    (actual,) = torch.autograd.grad(actual_sum, x)
    assert_close(actual, expected)


def test_tied_and_frozen_parameters_stay_tied_and_frozen(fabric: Fabric) -> None:
    first = nn.Linear(4, 4)
    tied = nn.Linear(4, 4)
    frozen = nn.Linear(4, 4)
    tied.weight = first.weight
    frozen.requires_grad_(False)
    plain = nn.Sequential(first, tied, frozen).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    module = copy.deepcopy(plain)
    model = fabric.setup(module)
    assert_close(gradients(model, x), gradients(plain, x))
    assert model.module[2].weight.grad is None


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.head = parametrizations.weight_norm(nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        return self.head(hidden)


def test_recurrent_and_parametrized_layers_work(fabric: Fabric) -> None:
    plain = Recurrent().double()
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    module = copy.deepcopy(plain)
    model = fabric.setup(module)
    assert_close(gradients(model, x), gradients(plain, x))


# -- the context of a replica ----------------------------------------------------------------------


class ReplicaContext(NamedTuple):
    thread: int
    has_grad: bool
    has_inference_mode: bool
    has_autocast: bool
    autocast_dtype: torch.dtype
    computed_dtype: torch.dtype


def contexts_of_replicas(devices: int = 2) -> list[ReplicaContext]:
    """Call a module on replicas and return the context of each call."""
    contexts = []
    barrier = threading.Barrier(devices, timeout=150)

    def record_context(x: Tensor) -> Tensor:
        product = x @ x.T
        context = ReplicaContext(
            thread=threading.get_ident(),
            has_grad=torch.is_grad_enabled(),
            has_inference_mode=torch.is_inference_mode_enabled(),
            has_autocast=torch.is_autocast_enabled("cpu"),
            autocast_dtype=torch.get_autocast_dtype("cpu"),
            computed_dtype=product.dtype,
        )
        contexts.append(context)
        # The barrier lets the replicas pass only if all run at one time, each in a thread.
        barrier.wait()
        return x

    model = replicated(record_context, devices)
    model(torch.ones(2 * devices, 4))
    return contexts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_replica_has_its_thread_and_the_callers_autocast(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype):
        contexts = contexts_of_replicas(3)
    threads = {context.thread for context in contexts}
    assert len(threads) == 3
    assert threading.get_ident() not in threads
    for context in contexts:
        assert context.has_grad
        assert not context.has_inference_mode
        assert context.has_autocast
        assert context.autocast_dtype == dtype
        assert context.computed_dtype == dtype


def test_replicas_have_no_autocast_outside_of_it() -> None:
    for context in contexts_of_replicas():
        assert not context.has_autocast


@pytest.mark.parametrize(
    ("context", "grad", "inference"),
    [
        (torch.no_grad, False, False),
        (torch.inference_mode, False, True),
        (torch.enable_grad, True, False),
    ],
)
def test_grad_mode_and_inference_mode_hold_in_the_replicas(
    context: Any, grad: bool, inference: bool
) -> None:
    with context():
        contexts = contexts_of_replicas()
    for context_of_replica in contexts:
        assert context_of_replica.has_grad == grad
        assert context_of_replica.has_inference_mode == inference


def record_dtypes(module: nn.Module) -> list[torch.dtype]:
    """Return a list to which each forward pass of a module adds the dtype of its output."""
    dtypes: list[torch.dtype] = []
    module.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    return dtypes


DTYPES_OF_MIXED_PRECISIONS = [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)]


@pytest.mark.parametrize(("precision", "dtype"), DTYPES_OF_MIXED_PRECISIONS)
def test_a_mixed_precision_computes_in_16_bits_and_returns_32(
    precision: str, dtype: torch.dtype
) -> None:
    with make_fabric(precision=precision) as fabric:
        module = Net()
        model = fabric.setup(module)
        dtypes = record_dtypes(model.head)
        output = model(torch.randn(5, 4))
    assert output.dtype == torch.float32
    assert dtypes == [dtype, dtype]


def test_evaluation_keeps_no_graph(fabric: Fabric) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    model = fabric.setup(plain).eval()
    for module in model.module.modules():
        assert not module.training
    x = torch.randn(5, 4)
    with torch.no_grad():
        output = model(x)
    assert not output.requires_grad
    assert torch.equal(output, model(x))


def test_no_thread_is_left_behind(fabric: Fabric) -> None:
    before = threading.active_count()
    module = Net()
    model = fabric.setup(module)
    model(torch.randn(5, 4))
    assert threading.active_count() <= before


# -- arguments and outputs -------------------------------------------------------------------------


class Arguments(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def scatter(*args: Any, devices: int = 2, **kwargs: Any) -> list[Arguments]:
    """Return the arguments of each replica."""
    wrapper = replicated(lambda: None, devices)
    args_of_replicas, kwargs_of_replicas = wrapper.scatter(args, kwargs, wrapper.device_ids)
    return list(map(Arguments, args_of_replicas, kwargs_of_replicas))


@pytest.mark.parametrize("batch", range(1, 9))
@pytest.mark.parametrize("devices", [2, 3, 5])
def test_a_batch_is_split_as_by_torch_chunk(batch: int, devices: int) -> None:
    x = torch.arange(batch)
    arguments_of_replicas = scatter(x, devices=devices)
    chunks = x.chunk(devices)
    for arguments, chunk in zip(arguments_of_replicas, chunks, strict=True):
        assert torch.equal(arguments.args[0], chunk)


class Pair(NamedTuple):
    x: Tensor
    name: str


def test_nested_arguments_are_split_and_others_shared() -> None:
    x = torch.arange(5)
    scale = torch.tensor(3.0)
    marker = object()
    arguments_of_replicas = scatter(
        {"x": [x]},
        Pair(x, "a"),
        scale,
        y=(x, 2),
        marker=marker,
        none=None,
    )
    for arguments, chunk in zip(arguments_of_replicas, x.chunk(2), strict=True):
        nested, pair, scale_of_replica = arguments.args
        kwargs = arguments.kwargs
        assert torch.equal(nested["x"][0], chunk)
        assert isinstance(pair, Pair)
        assert torch.equal(pair.x, chunk)
        assert pair.name == "a"
        assert scale_of_replica is scale
        assert torch.equal(kwargs["y"][0], chunk)
        assert kwargs["y"][1] == 2
        assert kwargs["marker"] is marker
        assert kwargs["none"] is None


def test_the_batch_of_a_replica_can_be_written_in_place() -> None:
    x = torch.ones(4, 2, requires_grad=True)
    triple = replicated(lambda chunk: chunk.mul_(3.0))
    output = triple(x * 2)
    output.sum().backward()
    expected = torch.full((4, 2), 6.0)
    assert torch.equal(x.grad, expected)


def test_outputs_are_joined_leaf_by_leaf() -> None:
    def forward(x: Tensor) -> Any:
        return {
            "x": [x, Pair(x + 1, "a")],
            "mean": x.mean(),
            "none": None,
            "count": 3,
        }

    x = torch.arange(5.0)
    model = replicated(forward)
    output = model(x)
    first, pair = output["x"]
    assert torch.equal(first, x)
    assert torch.equal(pair.x, x + 1)
    assert pair.name == "a"
    assert output["mean"].tolist() == [1.0, 3.5]
    assert output["none"] is None
    assert output["count"] == 3


def test_a_scalar_output_becomes_a_vector_with_an_entry_for_each_replica() -> None:
    mean = replicated(torch.mean, 3)
    means_of_three = mean(torch.arange(6.0))
    mean_of_one = mean(torch.arange(1.0))
    assert means_of_three.tolist() == [0.5, 2.5, 4.5]
    assert mean_of_one.tolist() == [0.0]


def test_a_call_without_a_batch_runs_once() -> None:
    model = replicated(lambda *args: torch.ones(3))
    assert model(7).shape == (3,)
    assert model().shape == (3,)


def test_a_batch_of_two_lengths_is_refused() -> None:
    model = replicated(lambda x, y: x)
    with pytest.raises(ConfigurationError) as caught:
        model(x=torch.ones(6), y=torch.ones(4, 2))
    assert "shapes (6,), (4, 2)" in str(caught.value)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: {"n": len(x)}, ["output['n']", "the replicas returned 2, 1"]),
        (lambda x: {len(x): x}, ["output[2]", "output[1]"]),
    ],
    ids=["numbers differ", "keys differ"],
)
def test_outputs_that_cannot_be_joined_are_refused(
    function: Callable[[Tensor], Any], words: list[str]
) -> None:
    model = replicated(function)
    with pytest.raises(ConfigurationError) as caught:
        model(x=torch.ones(3))
    for word in words:
        assert word in str(caught.value)


def test_an_error_in_a_replica_is_raised_and_names_it() -> None:
    def forward(x: Tensor) -> Tensor:
        if 5 in x:
            raise KeyError("sample 5")
        return x

    model = replicated(forward, 3)
    with pytest.raises(KeyError, match="sample 5") as caught:
        model(torch.arange(6))
    assert caught.value.__notes__ == ["replica 2 of 3 on cpu raised this"]


def test_the_first_replica_is_named_where_all_replicas_raise() -> None:
    model = replicated(lambda x: 1 // 0)
    with pytest.raises(ZeroDivisionError) as caught:
        model(torch.arange(2))
    [note] = caught.value.__notes__
    assert "replica 0 of 2" in note


# -- state -----------------------------------------------------------------------------------------


def test_buffers_are_those_of_replica_0(fabric: Fabric) -> None:
    plain = nn.BatchNorm1d(4)
    x = torch.randn(5, 4)
    module = copy.deepcopy(plain)
    model = fabric.setup(module)
    model(x)
    plain(x[:3])
    assert_equal(model.state_dict(), plain.state_dict())
    assert model.num_batches_tracked.item() == 1


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("assigned", torch.zeros(1))
        self.register_buffer("alias", self.assigned)
        self.register_buffer("nothing", None)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        assert self.alias is self.assigned
        self.assigned = self.assigned + len(x)
        self.calls += 1
        return x


def test_an_assigned_buffer_is_kept_and_an_attribute_is_not(fabric: Fabric) -> None:
    module = Counting()
    model = fabric.setup(module)
    model(torch.ones(5))
    assert model.assigned.item() == 3
    assert model.alias.item() == 0
    assert model.calls == 0


def test_hooks_run_once_for_each_replica(fabric: Fabric) -> None:
    module = Net()
    model = fabric.setup(module)
    calls = Counter()

    def hook(name: str) -> Callable[..., None]:
        return lambda *args: calls.update([name])

    model.register_forward_pre_hook(hook("forward pre"))
    model.encoder.register_forward_hook(hook("forward"))
    model.head.register_full_backward_hook(hook("backward"))
    output = model(torch.randn(5, 4))
    loss = output.sum()
    fabric.backward(loss)
    assert calls == {"forward pre": 2, "forward": 2, "backward": 2}


def test_a_gradient_hook_runs_once_on_the_sum(fabric: Fabric) -> None:
    module = Net()
    model = fabric.setup(module)
    sums = []

    def record_sum(parameter: Tensor) -> None:
        sums.append(parameter.grad.item())

    model.head.bias.register_post_accumulate_grad_hook(record_sum)
    output = model(torch.randn(5, 4))
    loss = output.sum()
    fabric.backward(loss)
    assert sums == [5.0]


def test_state_dicts_have_the_users_names(fabric: Fabric) -> None:
    plain = Net()
    module = copy.deepcopy(plain)
    model = fabric.setup(module)
    prepared = model._fabric_prepared
    state = fabric.strategy.get_module_state_dict(prepared)
    names = list(plain.state_dict())
    assert list(state) == names
    assert list(model.state_dict()) == names
    zeros = {name: torch.zeros_like(value) for name, value in state.items()}
    fabric.strategy.load_module_state_dict(prepared, zeros)
    for parameter in model.parameters():
        assert not parameter.any()


def test_a_checkpoint_of_two_replicas_loads_on_one_device(fabric: Fabric, tmp_path: Any) -> None:
    path = tmp_path / "checkpoint.pt"
    model, optimizer = fabric.setup(*make_model())
    output = model(torch.randn(5, 5, 4))
    output.sum().backward()
    optimizer.step()
    fabric.save(path, {"model": model, "optimizer": optimizer})
    with Fabric(accelerator="cpu", devices=1) as one_device:
        loaded, loaded_optimizer = one_device.setup(*make_model())
        one_device.load(path, {"model": loaded, "optimizer": loaded_optimizer})
    assert_equal(loaded.state_dict(), model.state_dict())


def test_a_copy_of_the_model_works(fabric: Fabric) -> None:
    module = Net()
    model = fabric.setup(module)
    x = torch.randn(5, 4)
    copied = copy.deepcopy(model)
    output = copied(x)
    assert torch.equal(output, model(x))
    output.sum().backward()
    assert model.head.weight.grad is None


def test_dropout_trains(fabric: Fabric) -> None:
    plain = nn.Sequential(
        nn.Linear(4, 8),
        nn.Dropout(0.5),
        nn.Linear(8, 1),
    )
    model = fabric.setup(plain)
    output = model(torch.randn(7, 4))
    loss = output.mean()
    fabric.backward(loss)
    for parameter in model.parameters():
        assert parameter.grad.isfinite().all()


# -- methods ---------------------------------------------------------------------------------------


class RecordsCalls(Net):
    """A module that records the replicas on which its method was called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[nn.Module] = []

    def score(self, x: Tensor) -> Tensor:
        self.called.append(self)
        return self(x)


def test_a_marked_method_runs_in_each_replica_on_its_batch(fabric: Fabric) -> None:
    plain = RecordsCalls()
    x = torch.randn(5, 4)
    model = fabric.setup(plain)
    model.mark_forward_method("score")
    assert torch.equal(model.score(x), model(x))
    assert len(plain.called) == 2
    assert plain not in plain.called
    assert "forward" not in vars(plain)


def test_other_methods_run_on_the_root_device_and_are_exact(fabric: Fabric) -> None:
    plain = Net()
    x = torch.randn(5, 4)
    module = copy.deepcopy(plain)
    model = fabric.setup(module)
    loss = model.loss(x)
    fabric.backward(loss)
    plain_loss = plain.loss(x)
    plain_loss.backward()
    for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(actual.grad, expected.grad)
    assert model.training_step(x).shape == (2,)


# -- the strategy ----------------------------------------------------------------------------------


def test_there_is_one_process(fabric: Fabric) -> None:
    assert fabric.world_size == 1
    assert fabric.global_rank == 0
    assert fabric.device == CPU
    strategy = fabric.strategy
    assert strategy.world_size == 1
    assert strategy.is_distributed is False
    assert strategy.distributed_sampler_kwargs is None
    assert strategy.reduce_boolean_decision(True)
    assert strategy.broadcast({"a": 1}) == {"a": 1}
    strategy.barrier("here")
    x = torch.ones(3)
    assert torch.equal(fabric.all_reduce(x), x)
    assert fabric.all_gather(x).shape == (1, 3)
    module = Net()
    model = fabric.setup(module)
    with fabric.no_backward_sync(model):
        pass


def test_loaders_yield_unsplit_batches(fabric: Fabric) -> None:
    dataset = TensorDataset(torch.arange(10))
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=5))
    [first], [second] = loader
    assert len(first) == 5
    assert len(second) == 5


def test_describe_shows_the_replicas(fabric: Fabric) -> None:
    module = Net()
    model = fabric.setup(module)
    text = fabric.describe()
    assert "replicas     2 of each module" in text
    assert "processes    1 on 1 node" in text
    assert f"{type(model.module).__name__} in ThreadedDataParallel" in text


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("mean", [2.0, 3.0]),
        ("avg", [2.0, 3.0]),
        ("sum", [4.0, 6.0]),
        ("min", [1.0, 2.0]),
        ("PRODUCT", [3.0, 8.0]),
    ],
)
def test_all_reduce_of_the_strategy_is_over_the_replicas(
    fabric: Fabric, op: str, expected: list[float]
) -> None:
    fabric.launch()
    gathered = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    collection = {
        "loss": [gathered],
        "scalar": torch.tensor(7.0),
        "name": "a",
        "count": 3,
    }
    reduced = fabric.strategy.all_reduce(collection, reduce_op=op)
    [loss] = reduced["loss"]
    assert loss.tolist() == expected
    assert reduced["scalar"].item() == 7.0
    assert reduced["name"] == "a"
    assert reduced["count"] == 3
    reduced_tensor = fabric.strategy.reduce(gathered, reduce_op=op)
    assert reduced_tensor.tolist() == expected


def test_all_reduce_takes_any_number_of_gathered_rows(fabric: Fabric) -> None:
    fabric.launch()
    for rows in (1, 3):
        gathered = torch.ones(rows, 2)
        reduced = fabric.strategy.all_reduce(gathered, reduce_op="sum")
        assert reduced.tolist() == [rows, rows]


def test_all_reduce_of_small_integers_over_the_replicas_is_exact_or_an_error(
    fabric: Fabric,
) -> None:
    fabric.launch()
    gathered = torch.tensor([[100], [100]], dtype=torch.int8)
    assert fabric.strategy.all_reduce(gathered // 2, reduce_op="sum").tolist() == [100]
    with pytest.raises(ConfigurationError, match="beyond the range of the dtype, from -128 to 127"):
        fabric.strategy.all_reduce(gathered, reduce_op="sum")


def test_all_reduce_keeps_dtypes_and_gradients(fabric: Fabric) -> None:
    fabric.launch()
    strategy = fabric.strategy
    integers = torch.tensor([3, 4], dtype=torch.int32)
    product = strategy.all_reduce(integers, reduce_op="product")
    assert product.dtype == torch.int32
    booleans = torch.tensor([True, False])
    maximum = strategy.all_reduce(booleans, reduce_op="max")
    assert maximum.item() is True
    losses = torch.tensor([1.0, 3.0], requires_grad=True)
    mean = strategy.all_reduce(losses)
    mean.backward()
    assert losses.grad.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("collection", "op", "words"),
    [
        (torch.ones(2), "median", ["'median'", "'mean'"]),
        ([torch.tensor([1, 2])], "mean", ["[0]"]),
    ],
)
def test_all_reduce_refuses_reductions_without_a_meaning(
    fabric: Fabric, collection: Any, op: str, words: list[str]
) -> None:
    fabric.launch()
    with pytest.raises(ConfigurationError) as caught:
        fabric.strategy.all_reduce(collection, reduce_op=op)
    for word in words:
        assert word in str(caught.value)


def compiled_layer() -> Any:
    return torch.compile(nn.Linear(4, 4), backend="eager")


def layer_compiled_in_place() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.compile(backend="eager")
    return layer


@pytest.mark.parametrize("make_layer", [compiled_layer, layer_compiled_in_place])
def test_a_compiled_module_is_refused_on_several_devices(
    fabric: Fabric, make_layer: Callable[[], nn.Module]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), make_layer())
    with pytest.raises(ConfigurationError, match=r"torch\.compile was applied to 1, and"):
        fabric.setup(model)
    model = nn.Sequential(nn.Linear(4, 4), make_layer())
    with make_fabric(1) as one_device:
        one_device.setup(model)


def test_several_nodes_and_devices_named_twice_are_refused() -> None:
    strategy = DataParallelStrategy()
    cpu_accelerator = CPUAccelerator()
    cpus = (CPU, CPU)
    strategy.check(accelerator=cpu_accelerator, devices=cpus, num_nodes=1)
    with pytest.raises(ConfigurationError, match="2 nodes"):
        strategy.check(accelerator=cpu_accelerator, devices=cpus, num_nodes=2)
    gpu = torch.device("cuda", 0)
    with pytest.raises(ConfigurationError, match="named twice"):
        strategy.check(accelerator=CUDAAccelerator(), devices=(gpu, gpu), num_nodes=1)


def test_a_strategy_without_fabric_refuses_to_be_one_of_several_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigurationError, match=r"2 processes \(this is rank 1\)"):
        DataParallelStrategy().setup_environment()


def test_a_strategy_works_without_fabric() -> None:
    strategy = DataParallelStrategy(CPUAccelerator(), [CPU, CPU, CPU])
    strategy.setup_environment()
    module = strategy.module_to_device(Net())
    wrapper = strategy.setup_module(module)
    assert isinstance(wrapper, nn.DataParallel)
    output = wrapper(torch.randn(4, 4))
    assert output.shape == (4, 1)
    strategy.teardown()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("precision", "dtype"), DTYPES_OF_MIXED_PRECISIONS)
def test_autocast_holds_in_replicas_on_gpus(precision: str, dtype: torch.dtype) -> None:
    fabric = Fabric(
        accelerator="cuda",
        devices=2,
        strategy="dp",
        precision=precision,
        environment="none",
    )
    with fabric:
        module = Net()
        model = fabric.setup(module)
        dtypes = record_dtypes(model.head)
        assert type(model._fabric_prepared).__mro__[1] is nn.DataParallel
        x = torch.randn(5, 4, device=fabric.device)
        output = model(x)
        loss = output.mean()
        fabric.backward(loss)
    assert dtypes == [dtype, dtype]

"""Clipping gives torch's own result, bit for bit, or changes nothing and says why."""

import math
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_ as clip_norm

from fabric import Fabric
from fabric.errors import ConfigurationError, NonFiniteGradientError, UsageError
from fabric.optim.clipping import clip_gradients
from fabric.strategies import FSDPStrategy, ModelParallelStrategy
from tests.models import Net
from tests.ranks import outcome, run_in_ranks

DEFAULTS = {
    "clip_val": None,
    "max_norm": None,
    "norm_type": 2.0,
    "error_if_nonfinite": True,
}


def model_with_gradients(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Make a model whose last layer has no gradients."""
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Linear(5, 7),
        nn.Linear(7, 3),
        nn.Linear(3, 3),
    )
    model.to(dtype)
    first_layers = model[:2]
    output = first_layers(torch.randn(2, 5, dtype=dtype))
    loss = output.square().sum()
    loss.backward()
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the gradients by the names of their parameters."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
    return gradients


def assert_equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare tensors bit for bit; values that are not a number are equal."""
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0, equal_nan=True)


def first_gradient(model: nn.Module) -> Tensor:
    first_parameter = next(model.parameters())
    assert first_parameter.grad is not None
    return first_parameter.grad


def clip_parameters(parameters: Iterable[Tensor], **options: Any) -> Tensor:
    return clip_gradients(parameters, **{**DEFAULTS, **options})


def clip(model: nn.Module, **options: Any) -> Tensor:
    return clip_parameters(model.parameters(), **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 0.5, 3, math.inf])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
def test_clipping_by_norm_equals_torch(dtype, norm_type, max_norm):
    ours = model_with_gradients(dtype)
    theirs = model_with_gradients(dtype)
    norm = clip(ours, max_norm=max_norm, norm_type=norm_type)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type)
    assert torch.equal(norm, expected)
    assert norm.shape == ()
    assert_equal(gradients(ours), gradients(theirs))


@pytest.mark.parametrize("clip_val", [1e-3, 0.5, 100])
def test_clipping_by_value_equals_torch_and_returns_the_norm(clip_val):
    ours = model_with_gradients()
    theirs = model_with_gradients()
    norm = clip(ours, clip_val=clip_val)
    nn.utils.clip_grad_value_(theirs.parameters(), clip_val)
    assert_equal(gradients(ours), gradients(theirs))
    unclipped = gradients(model_with_gradients())
    assert torch.equal(norm, nn.utils.get_total_norm(unclipped.values()))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("limit", [{"max_norm": 1.0}, {"clip_val": 1.0}])
def test_gradients_that_are_not_finite_raise_and_stay_as_they_are(value, limit):
    model = model_with_gradients()
    first_gradient(model)[0, 0] = value
    before = gradients(model)
    with pytest.raises(NonFiniteGradientError, match=r"error_if_nonfinite=False"):
        clip(model, **limit)
    assert_equal(gradients(model), before)


def test_the_error_names_parameters_that_are_not_a_number_as_the_cause():
    model = model_with_gradients()
    first_gradient(model)[0, 0] = math.nan
    with torch.no_grad():
        next(model.parameters())[0, 0] = math.nan
    with pytest.raises(NonFiniteGradientError, match="built with empty_init=True"):
        clip(model, max_norm=1.0)


def test_gradients_that_are_not_finite_can_be_clipped_as_torch_does():
    ours = model_with_gradients()
    theirs = model_with_gradients()
    first_gradient(ours)[0, 0] = math.inf
    first_gradient(theirs)[0, 0] = math.inf
    norm = clip(ours, max_norm=1.0, error_if_nonfinite=False)
    assert norm.item() == math.inf
    nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    assert_equal(gradients(ours), gradients(theirs))


@pytest.mark.parametrize("limit", [{"max_norm": 1.0}, {"clip_val": 1.0}])
def test_no_gradients_at_all_have_norm_zero(limit):
    norm_without_gradients = clip(nn.Linear(2, 2), **limit)
    norm_without_parameters = clip_parameters(iter([]), **limit)
    assert norm_without_gradients.item() == 0
    assert norm_without_parameters.item() == 0


def test_parameters_may_come_from_a_generator():
    model = model_with_gradients()
    generator = (parameter for parameter in model.parameters())
    clip_parameters(generator, max_norm=0.1)
    clipped = gradients(model)
    norm = nn.utils.get_total_norm(clipped.values())
    assert norm.item() == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"clip_val": 1.0, "max_norm": 1.0},
        {"clip_val": 0},
        {"clip_val": -1.0},
        {"max_norm": 0.0},
        {"max_norm": math.nan},
        {"clip_val": math.inf},
        {"max_norm": 1.0, "norm_type": 0},
        {"max_norm": 1.0, "norm_type": -math.inf},
        {"max_norm": 1.0, "norm_type": math.nan},
    ],
)
def test_limits_that_mean_nothing_are_refused(limits):
    model = model_with_gradients()
    with pytest.raises(ConfigurationError) as caught:
        clip(model, **limits)
    error = caught.value
    for name in ("clip_val", "max_norm", "norm_type"):
        value = limits.get(name, DEFAULTS[name])
        assert f"{name}={value!r}" in error.request
    assert error.expected
    unclipped = model_with_gradients()
    assert_equal(gradients(model), gradients(unclipped))


def clip_shards(fabric: Fabric) -> list[type]:
    """Check clipped shards against clipped full gradients; return the types of the norms."""
    mesh = init_device_mesh("cpu", (2,))

    def shard(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)])

    types = []
    limits = (
        {"max_norm": 0.5},
        {"clip_val": 0.1},
        {"max_norm": 0.1, "norm_type": math.inf},
    )
    for limit in limits:
        model = model_with_gradients(torch.float64)
        parameters = list(model.parameters())[:4]
        sharded_parameters = []
        for parameter in parameters:
            sharded = nn.Parameter(shard(parameter.detach()))
            sharded.grad = shard(parameter.grad)
            sharded_parameters.append(sharded)
        norm = clip_parameters(sharded_parameters, **limit)
        expected = clip(model, **limit)
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        for sharded, parameter in zip(sharded_parameters, parameters, strict=True):
            gradient = sharded.grad.full_tensor()
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-15)
        types.append(type(norm))
    return types


def test_sharded_gradients_are_clipped_by_the_norm_of_all_shards():
    fabric = Fabric(devices=2, strategy="ddp_forkserver")
    for types in fabric.launch(clip_shards, return_all=True):
        assert types == [Tensor, Tensor, Tensor]


def norm_under_fsdp(fabric: Fabric) -> Tensor:
    net = Net()
    adamw = torch.optim.AdamW(net.parameters(), lr=0.1)
    model, optimizer = fabric.setup(net, adamw)
    output = model(torch.ones(2, 4))
    loss = output.sum()
    fabric.backward(loss)
    return fabric.clip_gradients(model, optimizer, max_norm=1.0)


def test_fsdp_clipping_returns_one_norm_on_all_ranks():
    first, second = run_in_ranks(norm_under_fsdp, strategy="fsdp")
    assert type(first) is Tensor
    assert torch.equal(first, second)


def norms_without_an_optimizer(fabric: Fabric) -> list[float]:
    """Return the norm of the mean gradients, and the norm after clipping."""
    torch.manual_seed(0)
    net = Net()
    model = fabric.setup(net)
    scales = fabric.setup(nn.ParameterList([nn.Parameter(torch.ones(2))]))
    # The mean over two ranks with different samples equals the factor of a single process.
    factor = 1.5
    replicas = fabric.strategy._distinct_samples_communicator()
    if replicas.size == 2:
        factor = 1.0 + replicas.rank
    outputs = model(torch.ones(2, 4))
    loss = (outputs.sum() + scales[0].sum()) * factor
    fabric.backward(loss)
    norm = fabric.clip_gradients([model, scales, model], None, max_norm=0.5)
    clipped_norm = fabric.clip_gradients([model, scales], max_norm=0.5)
    return [norm.item(), clipped_norm.item()]


SPLIT_LAYERS = {"encoder": "colwise", "blocks.0": "rowwise"}
OPTIONS_WITHOUT_AN_OPTIMIZER: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "HYBRID_SHARD": {
        "strategy": FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(1, 2)),
    },
    "tensor parallel": {
        "strategy": ModelParallelStrategy(tp_plan=SPLIT_LAYERS, tensor_parallel_size=2),
    },
    "2 x 2": {
        "strategy": ModelParallelStrategy(
            tp_plan=SPLIT_LAYERS, data_parallel_size=2, tensor_parallel_size=2
        ),
        "ranks": 4,
    },
}


@pytest.mark.parametrize(
    "options", OPTIONS_WITHOUT_AN_OPTIMIZER.values(), ids=OPTIONS_WITHOUT_AN_OPTIMIZER
)
def test_gradients_are_clipped_without_an_optimizer(options: dict[str, Any]) -> None:
    [expected] = run_in_ranks(norms_without_an_optimizer, ranks=1, strategy="single_device")
    assert expected[1] == pytest.approx(0.5, abs=1e-5)
    for norms in run_in_ranks(norms_without_an_optimizer, **options):
        assert norms == pytest.approx(expected, abs=1e-5)


def test_gradients_of_replicas_are_clipped_without_an_optimizer() -> None:
    [expected] = run_in_ranks(norms_without_an_optimizer, ranks=1, strategy="single_device")
    with Fabric(accelerator="cpu", devices=2, strategy="dp") as fabric:
        assert norms_without_an_optimizer(fabric) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("precision", "is_weighted", "problem"),
    [
        ("16-mixed", False, "multiplied by the loss scale"),
        ("32-true", True, "divided by the loss weights"),
    ],
)
def test_unfinished_gradients_are_not_clipped_without_an_optimizer(
    precision: str, is_weighted: bool, problem: str
) -> None:
    with Fabric(accelerator="cpu", devices=1, precision=precision) as fabric:
        model, optimizer = set_up_net(fabric)
        backward(fabric, model, is_weighted)
        with pytest.raises(UsageError, match=problem) as caught:
            fabric.clip_gradients(model, max_norm=1.0)
        assert "fabric.clip_gradients(model, optimizer, max_norm=1.0)" in str(caught.value)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)


# -- torch's functions on gradients that are not those of the step ---------------------------------


def set_up_net(fabric: Fabric) -> tuple[Any, torch.optim.Optimizer]:
    net = Net()
    return fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))


def backward(fabric: Fabric, model: Any, is_weighted: bool) -> None:
    outputs = model(torch.ones(2, 4))
    if is_weighted:
        loss = outputs.sum()
        fabric.backward(loss, weight=2)
    else:
        loss = outputs.mean()
        fabric.backward(loss)


def clip_norm_by_torch(fabric: Fabric, is_weighted: bool) -> None:
    model, optimizer = set_up_net(fabric)
    backward(fabric, model, is_weighted)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def clip_values_by_torch(fabric: Fabric, is_weighted: bool) -> None:
    model, optimizer = set_up_net(fabric)
    backward(fabric, model, is_weighted)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()


def clip_under_another_name(fabric: Fabric, is_weighted: bool) -> None:
    model, optimizer = set_up_net(fabric)
    backward(fabric, model, is_weighted)
    clip_norm(model.parameters(), 1e-3)
    optimizer.step()


def clip_all(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clip_in_a_function(fabric: Fabric, is_weighted: bool) -> None:
    model, optimizer = set_up_net(fabric)
    backward(fabric, model, is_weighted)
    clip_all(model)
    optimizer.step()


CLIPPING_BY_TORCH = [
    clip_norm_by_torch,
    clip_values_by_torch,
    clip_under_another_name,
    clip_in_a_function,
]


def clip_after_fabric(fabric: Fabric, is_weighted: bool) -> None:
    model, optimizer = set_up_net(fabric)
    for _ in range(2):
        backward(fabric, model, is_weighted)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def mask_gradients(fabric: Fabric, is_weighted: bool) -> None:
    model, optimizer = set_up_net(fabric)
    for _ in range(2):
        backward(fabric, model, is_weighted)
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()


RIGHT_CHANGES = [mask_gradients, clip_after_fabric]


def clip_gradients_by_torch(fabric: Fabric, is_weighted: bool) -> tuple[list[str], list[str]]:
    """Return the outcomes of clipping by torch, and of changes that are right."""
    refusals = [outcome(partial(case, fabric, is_weighted)) for case in CLIPPING_BY_TORCH]
    right = [outcome(partial(case, fabric, is_weighted)) for case in RIGHT_CHANGES]
    return refusals, right


@pytest.mark.parametrize(
    ("options", "is_weighted"),
    [
        ({"ranks": 1}, True),
        ({"ranks": 1, "precision": "16-mixed"}, False),
        ({"strategy": "ddp"}, True),
        ({"strategy": "fsdp"}, True),
        ({"strategy": "fsdp", "precision": "16-mixed"}, True),
    ],
    ids=str,
)
def test_clipping_by_torch_before_gradients_are_complete_is_refused(
    options: dict[str, Any], is_weighted: bool
) -> None:
    state = "still multiplied by the loss scale"
    if is_weighted:
        state = "not divided by the loss weights yet"
    for refusals, right in run_in_ranks(clip_gradients_by_torch, is_weighted, **options):
        for text in refusals:
            assert text.startswith("UsageError: SGD.step() on rank")
            assert state in text
            assert "fabric.clip_gradients(model, optimizer, max_norm=1.0)" in text
        assert set(right) == {"fine"}


def test_an_overflow_is_not_taken_for_clipping_that_was_left_out() -> None:
    clips_by_torch = False
    with Fabric(accelerator="cpu", devices=1, precision="16-mixed") as fabric:
        model, optimizer = set_up_net(fabric)
        loss = model(torch.full((2, 4), math.nan)).mean()
        fabric.backward(loss)
        if clips_by_torch:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with warnings.catch_warnings():
            # The check of reads does not know that the branch is not taken.
            warnings.filterwarnings("ignore", ".*reads gradients of SGD")
            optimizer.step()
        assert fabric.step_was_skipped(optimizer)


def test_clipping_by_torch_of_complete_gradients_is_right() -> None:
    with Fabric(accelerator="cpu", devices=1) as fabric:
        clip_norm_by_torch(fabric, is_weighted=False)


# -- reading gradients that are not those of the step ----------------------------------------------


def total_norm(model: Any) -> float:
    return sum(parameter.grad.norm().item() ** 2 for parameter in model.parameters()) ** 0.5


def log_norm(fabric: Fabric, model: Any, optimizer: Any, is_weighted: bool) -> None:
    backward(fabric, model, is_weighted)
    norms = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            norms.append(parameter.grad.norm())
    optimizer.step()


def log_norm_in_a_function(fabric: Fabric, model: Any, optimizer: Any, is_weighted: bool) -> None:
    backward(fabric, model, is_weighted)
    total_norm(model)
    optimizer.step()


def log_norm_before_clipping(fabric: Fabric, model: Any, optimizer: Any, is_weighted: bool) -> None:
    backward(fabric, model, is_weighted)
    total_norm(model)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()


def log_norm_by_torch(fabric: Fabric, model: Any, optimizer: Any, is_weighted: bool) -> None:
    backward(fabric, model, is_weighted)
    nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    optimizer.step()


def step_after_log(model: nn.Module, optimizer: Any) -> None:
    total_norm(model)
    optimizer.step()
    optimizer.zero_grad()


def log_norm_beside_the_step(fabric: Fabric, model: Any, optimizer: Any, is_weighted: bool) -> None:
    backward(fabric, model, is_weighted)
    step_after_log(model, optimizer)


READS = [
    log_norm,
    log_norm_in_a_function,
    log_norm_before_clipping,
    log_norm_by_torch,
    log_norm_beside_the_step,
]


def log_complete_norm(fabric: Fabric, model: Any, optimizer: Any, is_weighted: bool) -> None:
    backward(fabric, model, is_weighted)
    norm = fabric.clip_gradients(model, optimizer, max_norm=math.inf)
    # Gradients are complete now.
    torch.testing.assert_close(norm.item(), total_norm(model))
    optimizer.step()


def log_norm_after_the_step(fabric: Fabric, model: Any, optimizer: Any, is_weighted: bool) -> None:
    backward(fabric, model, is_weighted)
    optimizer.step()
    total_norm(model)


def change_gradients(fabric: Fabric, model: Any, optimizer: Any, is_weighted: bool) -> None:
    backward(fabric, model, is_weighted)
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.requires_grad:
            parameter.grad.mul_(0.5)
            parameter.grad *= 2
            parameter.grad.nan_to_num_()
    optimizer.step()


def drop_and_repeat(fabric: Fabric, model: Any, optimizer: Any, is_weighted: bool) -> None:
    backward(fabric, model, is_weighted)
    for parameter in model.parameters():
        parameter.grad.data.zero_()
        parameter.grad = None
    backward(fabric, model, is_weighted)
    optimizer.step()


HARMLESS_USES = [
    log_complete_norm,
    log_norm_after_the_step,
    change_gradients,
    drop_and_repeat,
]


def warnings_of(case: Any, precision: Any, is_weighted: bool) -> list[str]:
    """Return the warnings of two steps of a loop."""
    with Fabric(accelerator="cpu", devices=1, precision=precision) as fabric:
        model, optimizer = set_up_net(fabric)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                case(fabric, model, optimizer, is_weighted)
                optimizer.zero_grad()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("precision", "is_weighted", "state"),
    [
        ("32-true", True, "not divided by the loss weights yet"),
        ("16-mixed", False, "still multiplied by the loss scale"),
    ],
)
@pytest.mark.parametrize("case", READS)
def test_the_line_that_reads_gradients_before_they_are_complete_is_named_once(
    case: Any, precision: str, is_weighted: bool, state: str
) -> None:
    (text,) = warnings_of(case, precision, is_weighted)
    line = int(text.partition(":")[2].partition(" ")[0])
    source = Path(__file__).read_text().splitlines()[line - 1]
    assert ".grad" in source
    assert state in text
    assert "norm = fabric.clip_gradients(model, optimizer, max_norm=math.inf)" in text


@pytest.mark.parametrize("case", READS)
def test_complete_gradients_may_be_read(case: Any) -> None:
    assert warnings_of(case, "32-true", is_weighted=False) == []


@pytest.mark.parametrize(("precision", "is_weighted"), [("32-true", True), ("16-mixed", False)])
@pytest.mark.parametrize("case", HARMLESS_USES)
def test_uses_of_gradients_that_do_no_harm_are_not_named(
    case: Any, precision: str, is_weighted: bool
) -> None:
    assert warnings_of(case, precision, is_weighted) == []

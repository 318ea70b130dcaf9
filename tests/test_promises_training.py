"""What trains, trains; what cannot be synchronized, is said."""

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fabric import Fabric
from fabric.errors import RankFailedError
from tests.models import Net, OneWeight
from tests.ranks import outcome, run_in_ranks

pytestmark = pytest.mark.timeout(90)

X = torch.ones(2, 4)


def sgd(parameters: Any, lr: float = 1e-4) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def step(fabric: Fabric, model: Any, *optimizers: torch.optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        fabric.backward(model(X + fabric.global_rank).sum())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def outcomes(fabric: Fabric, cases: list[Callable[[Fabric], Any]]) -> dict[str, str]:
    results = {}
    for case in cases:
        results[case.__name__] = outcome(lambda case=case: case(fabric))
        fabric.barrier(case.__name__)
    return results


def assert_said(results: list[dict[str, str]], cases: dict[Any, str]) -> None:
    for result in results:
        for case, text in cases.items():
            assert text in result[case.__name__], (case.__name__, result[case.__name__])


# -- parameters that were added after the setup ---------------------------------------------------


def trained(fabric: Fabric, net: nn.Module | None = None) -> tuple[Any, torch.optim.Optimizer]:
    net = Net() if net is None else net
    model, optimizer = fabric.setup(net, sgd(net.parameters()))
    step(fabric, model, optimizer, times=8)  # the first steps are watched
    return model, optimizer


def an_adapter(fabric: Fabric) -> None:
    model, optimizer = trained(fabric)
    model.adapter = nn.Linear(4, 1)
    optimizer.add_param_group({"params": model.adapter.parameters()})
    fabric.backward(model(X).sum() + model.adapter(X).sum())


def a_replaced_layer(fabric: Fabric) -> None:
    model, _ = trained(fabric)
    model.blocks[0] = nn.Linear(8, 8)
    step(fabric, model, sgd(model.parameters()))


def a_replaced_parameter(fabric: Fabric) -> None:
    model, _ = trained(fabric)
    model.head.weight = nn.Parameter(torch.ones(1, 8))
    step(fabric, model, sgd(model.parameters()))


def an_adapter_of_no_module(fabric: Fabric) -> None:
    model, optimizer = trained(fabric)
    scale = nn.Parameter(torch.ones(4))
    optimizer.add_param_group({"params": [scale]})
    found = [outcome(lambda: step(fabric, lambda x: model(x * scale), optimizer)) for _ in range(4)]
    assert found == ["fine"] * 4, found


def parameters_from_before(fabric: Fabric) -> None:
    net = Net()
    encoder = [*net.encoder.parameters()]
    model, optimizer = fabric.setup(net, sgd([*net.head.parameters(), *net.blocks.parameters()]))
    step(fabric, model, optimizer, times=8)
    optimizer.add_param_group({"params": encoder})
    step(fabric, model, optimizer)


def what_stays_allowed(fabric: Fabric) -> None:
    model, optimizer = trained(fabric)
    model.frozen = nn.Linear(4, 1).requires_grad_(False)
    model.again = model.blocks
    model.own = fabric.setup_module(nn.Linear(4, 1))
    step(fabric, model, optimizer)
    with torch.no_grad():
        model.head = nn.Linear(8, 2)
        model(X)


ADDED = "their gradients would not be synchronized: "
LATE = {
    an_adapter: ADDED + "adapter.weight, adapter.bias",
    a_replaced_layer: ADDED + "blocks.0.weight, blocks.0.bias",
    a_replaced_parameter: ADDED + "head.weight",
    an_adapter_of_no_module: "ranks 0 and 1 differ after it: parameter 6 of the optimizer, which no set-up",
    parameters_from_before: "the sharding: stepping changes nothing of encoder.weight, encoder.bias",
    what_stays_allowed: "fine",
}


def late(fabric: Fabric) -> dict[str, str]:
    return outcomes(fabric, [*LATE])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_parameters_that_are_added_after_the_setup_are_an_error_that_names_them(
    strategy: str,
) -> None:
    of_ddp = {parameters_from_before: "fine"}  # they are those of after it
    assert_said(
        run_in_ranks(late, strategy=strategy), {**LATE, **(of_ddp if strategy == "ddp" else {})}
    )


# -- optimizers that were not set up --------------------------------------------------------------


def none_set_up(fabric: Fabric) -> None:
    net = Net()
    step(fabric, fabric.setup(net), sgd(net.parameters()))


def one_of_two_set_up(fabric: Fabric) -> None:
    net = Net()
    model, first = fabric.setup(net, sgd(net.encoder.parameters()))
    step(fabric, model, first, times=5)
    step(fabric, model, sgd(net.head.parameters()))


def not_even_a_module(fabric: Fabric) -> None:
    fabric.launch()
    net = Net()
    step(fabric, net, sgd(net.parameters()))


def test_an_optimizer_that_was_not_set_up_never_steps_with_scaled_gradients() -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "precision": "16-mixed"}
    for case in (none_set_up, one_of_two_set_up, not_even_a_module):
        with Fabric(**options) as fabric:
            result = outcome(lambda case=case, fabric=fabric: case(fabric))
        assert (
            "it has not been set up, and steps with the gradients of the loss times its scale"
            in result
        )


def of_old_parameters(fabric: Fabric) -> None:
    net = Net()
    optimizer = sgd(net.parameters())
    step(fabric, fabric.setup(net), optimizer)


def before_the_head_was_replaced(fabric: Fabric) -> None:
    net = Net()
    optimizer = sgd(net.parameters())
    net.head = nn.Linear(8, 2)
    step(fabric, *fabric.setup(net, optimizer))


def before_the_head_was_replaced_and_not_set_up(fabric: Fabric) -> None:
    net = Net()
    head = net.head
    net.head = nn.Linear(8, 2)
    step(fabric, fabric.setup(net), sgd(head.parameters()))


REPLACED = "no optimizer has head.weight, head.bias of Net"
UNMOVED = {
    before_the_head_was_replaced: REPLACED,
    before_the_head_was_replaced_and_not_set_up: "of Net",
}


def of_what_is_not_sharded(fabric: Fabric) -> None:
    fabric.setup(Net())
    offset = nn.Parameter(torch.zeros(3))
    offset.sum().backward()
    torch.optim.Rprop([offset]).step()


def unmoved(fabric: Fabric) -> dict[str, str]:
    return outcomes(fabric, [of_old_parameters, of_what_is_not_sharded, *UNMOVED])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_parameters_that_no_step_would_move_are_an_error(strategy: str) -> None:
    stale = "it holds parameters from before the sharding" if strategy == "fsdp" else "fine"
    expected = {of_old_parameters: stale, of_what_is_not_sharded: "fine", **UNMOVED}
    assert_said(run_in_ranks(unmoved, strategy=strategy), expected)


# -- what each rank has for itself ----------------------------------------------------------------


def said(fabric: Fabric, action: Callable[[], object], times: int = 1) -> tuple[list[str], str]:
    """The warnings and the errors of what each rank does several times, together with the others."""
    results = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            results.append(outcome(action))
            fabric.barrier()
    told = [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
    return told, "".join(result for result in results if result != "fine") or "fine"


def no_module(fabric: Fabric, differ: bool) -> tuple[list[str], str]:
    torch.manual_seed(0)
    net = Net()
    optimizer = sgd(net.parameters())

    def step_alone() -> None:
        optimizer.zero_grad()
        net(X + fabric.global_rank * differ).sum().backward()
        optimizer.step()

    return said(fabric, step_alone, times=3)


@pytest.mark.parametrize("differ", [False, True])
def test_processes_without_a_module_that_is_set_up_are_warned_and_compared(differ: bool) -> None:
    first, second = run_in_ranks(no_module, differ)
    assert len(first[0]) == 1
    assert (
        "of 2 processes each has a model of its own: model, optimizer = fabric.setup(model, "
        in first[0][0]
    )
    assert second[0] == []
    assert all(
        ("the replicas of ranks 0 and 1 differ" in result) == differ
        for _, result in (first, second)
    )


def dropped_module(fabric: Fabric) -> tuple[list[str], str]:
    net = Net()
    fabric.setup(net, sgd(net.parameters()))
    del net
    gc.collect()
    return no_module(fabric, False)


def test_where_a_module_was_set_up_nobody_is_told_to_set_one_up() -> None:
    assert run_in_ranks(dropped_module) == [([], "fine")] * 2


def loaders(fabric: Fabric, kind: str) -> tuple[list[str], str]:
    torch.manual_seed(0)
    net = Net()
    data = TensorDataset(torch.ones(8, 4))
    model, optimizer = fabric.setup(net, sgd(net.parameters()))
    loader: Any = DataLoader(data, batch_size=2, shuffle=kind == "plain")
    if kind == "sampler":
        loader = DataLoader(
            data, batch_size=2, sampler=DistributedSampler(data, 2, fabric.global_rank)
        )
    elif kind == "set up":
        loader = fabric.setup_dataloaders(loader)

    def loop() -> None:
        for (x,) in loader:
            fabric.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()

    return said(fabric, loop)


def all_loaders(fabric: Fabric) -> dict[str, tuple[list[str], str]]:
    return {kind: loaders(fabric, kind) for kind in ("sampler", "plain", "set up")}


def test_a_loader_that_is_not_set_up_is_a_warning_on_the_first_rank() -> None:
    first, second = run_in_ranks(all_loaders)
    assert [len(told) for told, _ in first.values()] == [0, 1, 0]
    assert (
        "of 2 processes each reads the whole TensorDataset: loader = fabric.setup_"
        in first["plain"][0][0]
    )
    assert all(told == [] for told, _ in second.values())
    assert {result for results in (first, second) for _, result in results.values()} == {"fine"}


# -- models without values ------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5000)
        self.norm = nn.LayerNorm(5000)
        self.last = nn.Linear(5000, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def without_values(fabric: Fabric, path: str) -> dict[str, str]:
    filled = fabric.setup(Wide())
    fabric.save(path, {"model": filled})
    results = {}
    for kind in ("none", "checkpoint"):
        with fabric.init_module(empty_init=True):
            net = Wide()
        model, optimizer = fabric.setup(net, sgd(net.parameters()))
        if kind == "checkpoint":
            fabric.load(path, {"model": model})
        results[kind] = outcome(
            lambda model=model, optimizer=optimizer: step(fabric, model, optimizer)
        )
    return results


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_first_step_of_a_model_without_values_is_an_error_that_names_them(
    strategy: str, tmp_path: Path
) -> None:
    for results in run_in_ranks(without_values, str(tmp_path / "model"), strategy=strategy):
        assert (
            "these are not a number before the first step: first.weight, first.bias"
            in results["none"]
        )
        assert results["checkpoint"] == "fine"


# -- parameters without a forward pass ------------------------------------------------------------


class Agent(nn.Module):
    def __init__(self, actor: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"actor": actor, "critic": critic})


def bare(fabric: Fabric, path: str) -> tuple[list[float], list[float], Any]:
    log_alpha = nn.Parameter(torch.tensor(1.0 + fabric.global_rank))
    alpha, optimizer = fabric.setup(nn.ParameterList([log_alpha]), sgd([log_alpha], lr=1.0))
    actor, critic = (fabric.setup(Net()) for _ in range(2))
    both = fabric.setup_optimizers(sgd([*actor.parameters(), *critic.parameters()]))
    values = []
    norms = []
    for number in range(3):
        fabric.backward(log_alpha * (fabric.global_rank + 1))  # 1.5 on average
        with fabric.no_backward_sync([alpha, actor]):
            fabric.backward(log_alpha * 0.5 * fabric.global_rank)  # 0.25
        fabric.backward(actor(X).mean() + critic(X).mean())
        if number:
            norms.append(float(fabric.clip_gradients(alpha, optimizer, max_norm=100.0)))
        fabric.clip_gradients(Agent(actor, critic), both, max_norm=1.0)
        for each in (optimizer, both):
            each.step()
            each.zero_grad()
        values.append(float(log_alpha))
    fabric.save(path, {"alpha": alpha, "optimizer": optimizer})
    log_alpha.data.zero_()
    fabric.load(path, {"alpha": alpha, "optimizer": optimizer})
    optimizer.step()  # without a gradient on any rank
    return values, norms, float(log_alpha)


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "16-mixed"), ("fsdp", "32-true")])
def test_bare_parameters_are_set_up_in_a_list_and_synchronized(
    strategy: str, precision: str, tmp_path: Path
) -> None:
    for values, norms, loaded in run_in_ranks(
        bare, str(tmp_path / "saved"), strategy=strategy, precision=precision
    ):
        assert values == [1.0 - 1.75, 1.0 - 2 * 1.75, 1.0 - 3 * 1.75]
        assert norms == [1.75, 1.75]
        assert loaded == values[-1]


def bare_after_its_optimizer(fabric: Fabric) -> float:
    net = Net()
    weight = nn.Parameter(torch.tensor(1.0))
    _, optimizer = fabric.setup(net, sgd([*net.parameters(), weight], lr=1.0))
    fabric.setup(nn.ParameterList([weight]))
    fabric.backward(weight * fabric.global_rank)
    optimizer.step()
    return float(weight)


def test_bare_parameters_are_synchronized_also_when_they_are_set_up_after_their_optimizer() -> None:
    assert run_in_ranks(bare_after_its_optimizer, check_training=False) == [0.5, 0.5]


def bare_with_a_closure(fabric: Fabric) -> list[str]:
    weight = nn.Parameter(torch.tensor(1.0))
    kept, optimizer = fabric.setup(nn.ParameterList([weight]), torch.optim.LBFGS([weight]))
    loss = lambda: kept[0] * fabric.global_rank  # noqa: E731
    return [outcome(lambda: optimizer.step(loss)), outcome(lambda: optimizer.step(closure=loss))]


def test_a_closure_is_refused_for_bare_parameters_that_are_synchronized() -> None:
    for actual in run_in_ranks(bare_with_a_closure):
        assert all("LBFGS.step(closure) of an nn.ParameterList" in text for text in actual)


# -- ranks that do not do the same ----------------------------------------------------------------


def other_models(fabric: Fabric) -> dict[str, str]:
    rank = fabric.global_rank
    frozen = Net()
    frozen.encoder.requires_grad_(rank == 0)
    models = {
        "width": nn.Linear(4, 4 + rank),
        "layers": nn.Sequential(*(nn.Linear(4, 4) for _ in range(2 + rank))),
        "frozen": frozen,
        "dtype": nn.Linear(4, 4).to(torch.float64 if rank else torch.float32),
        "names": nn.ModuleDict({"own" if rank else "first": nn.Linear(4, 4)}),
        "untrained": nn.Linear(4, 4 + rank).requires_grad_(False),
    }
    return {
        name: outcome(lambda model=model: fabric.setup(model)) for name, model in models.items()
    }


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_models_that_differ_between_ranks_are_refused_on_every_rank(strategy: str) -> None:
    for actual in run_in_ranks(other_models, strategy=strategy):
        assert all(
            "it is another model on rank 1 than on rank 0" in text for text in actual.values()
        ), actual


def steps_of_one_rank(fabric: Fabric) -> None:
    net = Net()
    model, optimizer = fabric.setup(net, sgd(net.parameters()))
    for _ in range(2):
        fabric.backward(model(X).sum())
        if fabric.global_rank:
            optimizer.step()
        optimizer.zero_grad()
        fabric.barrier()


def options_of_their_own(fabric: Fabric) -> str:
    net = Net()
    model, optimizer = fabric.setup(net, sgd(net.parameters(), lr=0.1 + fabric.global_rank))
    text = outcome(lambda: step(fabric, model, optimizer))
    fabric.barrier()
    return text


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_steps_that_one_rank_makes_alone_or_otherwise_are_an_error(strategy: str) -> None:
    with pytest.raises(RankFailedError, match="rank 1 has made step 1, before this backward pass"):
        run_in_ranks(steps_of_one_rank, strategy=strategy)
    actual = run_in_ranks(options_of_their_own, strategy=strategy)
    assert any("differ after it: " in text for text in actual), actual


def other_loaders(fabric: Fabric) -> list[str]:
    first = fabric.is_global_zero
    data = TensorDataset(torch.ones(16, 4))
    shuffled = fabric.setup_dataloaders(DataLoader(data, batch_size=2, shuffle=first))
    peeked = fabric.setup_dataloaders(DataLoader(data, batch_size=2, shuffle=True))
    if first:
        next(iter(shuffled))
        next(iter(peeked))
    fabric.barrier()
    found = outcome(lambda: first or next(iter(shuffled)))
    return [found, outcome(lambda: [fabric.gather_for_metrics(x) for (x,) in peeked])]


def test_loaders_with_other_orders_on_other_ranks_are_an_error() -> None:
    (_, first), (order, second) = run_in_ranks(other_loaders)
    assert (
        "rank 0 draws its order anew in each iteration, as with shuffle=True, and rank 1" in order
    )
    for number, text in enumerate((first, second)):
        assert text.startswith("CollectiveMismatchError")
        assert f"of iteration {1 - number}" in text


# -- what else the ranks have to agree on -----------------------------------------------------------------------------


def scale_of(fabric: Fabric) -> str:
    return fabric.describe().rpartition("loss scale")[2].strip()


def accumulating(fabric: Fabric) -> list[str]:
    first = OneWeight()
    second = OneWeight()
    model, optimizer = fabric.setup(first, sgd(first.parameters()))
    other, waiting = fabric.setup(second, sgd(second.parameters()))
    scales = []
    for _ in range(3):
        with fabric.no_backward_sync(other):
            fabric.backward(other(X[0] * fabric.global_rank))  # its gradients are zero on rank 0
        scales.append(scale_of(fabric))
        fabric.backward(model(X[0] * float("inf")))
        optimizer.step()
        optimizer.zero_grad()
    waiting.zero_grad()
    return scales


def test_ranks_have_the_same_loss_scale_while_one_of_two_optimizers_accumulates() -> None:
    first, second = run_in_ranks(accumulating, precision="16-mixed")
    assert first == second == ["65536"] * 3


def one_iteration_more(fabric: Fabric, where: str) -> str:
    net = Net()
    model, optimizer = fabric.setup(net, sgd(net.parameters()))
    loader = fabric.setup_dataloaders(
        DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=2, shuffle=where != "in order")
    )
    if fabric.global_rank == 0 or where == "everywhere":
        next(iter(loader))
    for (x,) in loader:
        fabric.backward(model(x).sum())
        optimizer.step()
    return "fine"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_that_begin_different_numbers_of_iterations_train_on_no_common_order(
    strategy: str,
) -> None:
    for where in ("everywhere", "in order"):
        assert run_in_ranks(one_iteration_more, where, strategy=strategy) == ["fine"] * 2
    with pytest.raises(
        RankFailedError, match=r"in iteration \d over its loader and rank \d in iteration \d"
    ):
        run_in_ranks(one_iteration_more, "on rank 0", strategy=strategy)

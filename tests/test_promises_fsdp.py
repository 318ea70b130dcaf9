"""FSDP keeps what DDP keeps: hooks, running statistics, and parameters that cannot be sharded."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fabric import Fabric
from fabric._torch import DispatchMode, full_tensor, local_tensor
from fabric.strategies import FSDPStrategy
from tests.loops import Block
from tests.ranks import outcome, run_in_ranks

pytestmark = pytest.mark.timeout(90)

WIDTH = 8
Fsdp = partial(FSDPStrategy, start_method="forkserver")


class Clip(nn.Module):
    """Two towers, a temperature without a dimension as in CLIP, and a scale that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([Block(), Block()])
        self.logit_scale = nn.Parameter(torch.tensor(0.5))
        self.towers[0].scale = self.towers[1].scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        left, right = (tower(x) * tower.scale for tower in self.towers)
        return self.logit_scale.exp() * (left * right).mean(-1)


def batches(fabric: Fabric, number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(fabric.global_rank)
    return [torch.randn(3, 5, WIDTH, generator=generator) for _ in range(number)]


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(each.detach()).clone() for name, each in model.state_dict().items()}


def trained(fabric: Fabric, kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Clip()
    if kind == "frozen":
        net.logit_scale.requires_grad_(False)
    options = {"fused": {"fused": True}, "for-loop": {"foreach": False}}.get(
        kind, {"foreach": True}
    )
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1, **options))
    norms = []
    for number, batch in enumerate(batches(fabric, 6)):
        waits = kind == "accumulated" and number % 3 < 2
        with fabric.no_backward_sync(model, enabled=waits):
            fabric.backward(model(batch).sum())
        if not waits:
            norms.append(
                fabric.clip_gradients(
                    model, optimizer, max_norm=0.5, norm_type=[2.0, float("inf")][number % 2]
                )
            )
            optimizer.step()
            optimizer.zero_grad()
    assert type(model.logit_scale) is nn.Parameter or local_tensor(model.logit_scale).dim() == 0
    return {
        "norms": torch.stack(norms),
        **values(model),
        "logit_scale": model.logit_scale.exp().item(),
    }


KINDS = ["foreach", "fused", "for-loop", "accumulated", "frozen"]


def all_trained(fabric: Fabric) -> list[dict[str, Any]]:
    return [trained(fabric, kind) for kind in KINDS]


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(
        ours, theirs, rtol=1e-4, atol=1e-5
    )  # sums of several orders, and AdamW


@pytest.mark.parametrize(
    "options", [{}, {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 1)}], ids=str
)
def test_parameters_without_a_dimension_train_as_under_ddp(options: dict[str, Any]) -> None:
    expected = run_in_ranks(all_trained)
    close(run_in_ranks(all_trained, strategy=Fsdp(**options)), expected)


def test_ignored_parameters_are_replicated_and_trained() -> None:
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first = net[0].weight
    with Fabric(
        accelerator="cpu", devices=1, strategy=FSDPStrategy(ignored_params={first})
    ) as fabric:
        fabric.launch()
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
        before = values(model)
        fabric.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        assert local_tensor(net[0].weight).shape == (4, 4)
        assert net[0].weight.placements != net[1].weight.placements
        assert all((before[name] != value).any() for name, value in values(model).items())


# -- hooks and attributes of parameters -------------------------------------------------------------------------------


def hooked(fabric: Fabric) -> dict[str, Any]:
    """The weights after steps whose gradients hooks have changed, and what these hooks saw."""
    torch.manual_seed(0)
    net: Any = Clip()
    calls: list[Any] = []
    tagged: list[str] = []
    net.towers[0].mlp[0].weight.register_hook(lambda grad: grad * torch.arange(WIDTH))
    removed = net.towers[1].mlp[0].weight.register_hook(lambda grad: grad * 0)
    net.logit_scale.register_hook(lambda grad: calls.append(grad.shape))
    net.towers[0].norm.weight.no_decay = True
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    named = dict(model.named_parameters())
    named["towers.1.norm.bias"].register_hook(lambda grad: calls.append(grad.shape))
    named["towers.1.mlp.0.bias"].register_post_accumulate_grad_hook(
        lambda each: calls.append(each.shape)
    )
    removed.remove()
    for batch in batches(fabric, 2):
        output = model(batch)
        tagged = [
            name for name, each in model.named_parameters() if getattr(each, "no_decay", False)
        ]
        fabric.backward(output.mean())
        optimizer.step()
        optimizer.zero_grad()
    assert (tagged, len(calls)) == (["towers.0.norm.weight"], 6)
    return {**values(model), "calls": sorted(calls)}


def test_hooks_and_attributes_of_parameters_work_as_under_ddp() -> None:
    close(run_in_ranks(hooked, strategy=Fsdp()), run_in_ranks(hooked))


# -- running statistics -----------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(self.norm(x))
        return x


def statistics(fabric: Fabric, **ddp: Any) -> list[Any]:
    torch.manual_seed(0)
    net = Normed()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    seen: list[Any] = []

    def note() -> None:
        seen.append([buffer.clone() for buffer in model.buffers()])

    for number, batch in enumerate(batches(fabric, 6)):
        with fabric.no_backward_sync(model, enabled=number % 3 > 0):
            loss = model(batch).sum()
            _ = note()
            # A second forward pass before the backward pass.
            loss = loss + model(batch + 1).sum() if number == 0 else loss
            fabric.backward(loss)
    note()
    optimizer.zero_grad()
    model.eval()
    for batch in batches(fabric, 2):
        with torch.no_grad():
            seen.append(model(batch))
        note()
    return seen


def test_running_statistics_are_those_of_ddp() -> None:
    ours = run_in_ranks(statistics, strategy=Fsdp())
    close(ours, run_in_ranks(statistics, strategy="ddp"))


class Broadcasts(DispatchMode):
    """Counts messages from one rank to all."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += "c10d.broadcast" in str(func)
        return func(*args, **(kwargs or {}))


def messages(fabric: Fabric) -> list[int]:
    """How many there are in a forward pass with running statistics, and in one without."""
    counts = []
    for net in (Normed(), nn.Sequential(Block(), Block())):
        model = fabric.setup_module(net)
        for batch in batches(fabric, 3):
            with Broadcasts() as mode:
                model(batch)
        counts.append(mode.number)
    return counts


def test_one_message_has_all_statistics_and_none_is_sent_without_them() -> None:
    assert run_in_ranks(messages, strategy=Fsdp()) == [[1, 0]] * 2
    assert run_in_ranks(messages, strategy=Fsdp(broadcast_buffers=False)) == [[0, 0]] * 2


# -- checkpoints ------------------------------------------------------------------------------------------------------


def stepped(fabric: Fabric, folder: Path, load: str, save: str) -> dict[str, Any]:
    """The state after loading a checkpoint, if there is one, and then a step before another is saved."""
    torch.manual_seed(1 if load else 0)
    net = Clip()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    state = {"model": model, "optimizer": optimizer}
    if load:
        fabric.load(folder / load, state)
    loaded = {
        **values(model),
        "moments": [full_tensor(slots["exp_avg"]) for slots in optimizer.state.values()],
    }
    assert all(local_tensor(slots["step"]) is slots["step"] for slots in optimizer.state.values())
    if save:
        generator = torch.Generator().manual_seed(5)
        fabric.backward(model(torch.randn(3, 5, WIDTH, generator=generator)).mean())
        optimizer.step()
        fabric.save(folder / save, state)
    return loaded


SAVED = ["sharded", "full", "ddp"]


def loaded(fabric: Fabric, folder: Path, names: list[str]) -> list[dict[str, Any]]:
    return [stepped(fabric, folder, name, "") for name in names]


def test_checkpoints_with_them_load_into_every_strategy_and_number_of_ranks(
    tmp_path: Path,
) -> None:
    strategies = [Fsdp(), Fsdp(state_dict_type="full"), "ddp"]
    for strategy, name in zip(strategies, SAVED, strict=True):
        run_in_ranks(stepped, tmp_path, "", name, strategy=strategy)
    run_in_ranks(stepped, tmp_path, "sharded", "back", strategy=Fsdp(), ranks=1)
    [[*_, expected, other], _] = found = run_in_ranks(loaded, tmp_path, [*SAVED, "back"])
    found += run_in_ranks(loaded, tmp_path, [*SAVED, "back"], strategy=Fsdp())
    found += run_in_ranks(loaded, tmp_path, [*SAVED, "back"], strategy=Fsdp(), ranks=1)
    close(found, [[expected] * 3 + [other]] * 5)


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(fabric: Fabric) -> list[str]:
    convolution: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    convolution.to(memory_format=torch.channels_last)
    whole = nn.Sequential(Block(), Block())
    fabric.setup_module(whole)
    tied: Any = nn.Sequential(nn.Linear(4, 4))
    other = nn.Linear(4, 4)
    other.weight = tied[0].weight
    model = fabric.setup_module(tied)
    cases = [
        convolution,
        nn.Sequential(nn.Linear(2, 2), whole),
        nn.Sequential(model),
        whole[1],
        other,
    ]
    before = [[parameter.stride() for parameter in case.parameters()] for case in cases]
    found = [outcome(partial(fabric.setup_module, case)) for case in cases]
    assert before == [[parameter.stride() for parameter in case.parameters()] for case in cases]
    return found


def test_shared_nested_and_strided_modules_are_refused() -> None:
    for rank in run_in_ranks(refused, strategy=Fsdp()):
        strided, *shared = rank
        assert "not contiguous, as in channels_last: 0.weight, 1.weight" in strided
        assert "contiguous_format" in strided
        assert all(
            "belong to another model" in each and "one module around both" in each
            for each in shared
        ), shared
        assert "1.0.norm" in shared[0]


def refused_for_dtypes(fabric: Fabric) -> list[str]:
    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())

    cases = [nn.Sequential(block(), block()) for _ in range(3)]
    for name, parameter in cases[1].named_parameters():
        parameter.requires_grad_("1." not in name.partition(".")[2])
    for name, parameter in cases[2].named_parameters():
        parameter.data = parameter.float() if name.startswith("0") else parameter.bfloat16()
    return [outcome(partial(fabric.setup_module, case)) for case in cases]


def test_trained_parameters_of_several_dtypes_in_one_fsdp_module_are_refused_by_name() -> None:
    for mixed, *others in run_in_ranks(refused_for_dtypes, strategy=Fsdp()):
        assert (
            "torch.float32: ['0.0.weight', '0.0.bias'], torch.bfloat16: ['0.1.weight', '0.1.bias']"
            in mixed
        )
        assert "auto_wrap_policy={...}" in mixed
        assert others == ["fine", "fine"]
    [[converted, *_]] = run_in_ranks(
        refused_for_dtypes, strategy=Fsdp(), ranks=1, precision="bf16-true"
    )
    assert converted == "fine"


def test_ignored_parameters_of_another_model_are_warned_of() -> None:
    strategy = Fsdp(ignored_params={nn.Parameter(torch.ones(2, 2))})
    with pytest.warns(
        UserWarning, match=r"Linear: ignored_params are no parameters of it.*launch\(train, model\)"
    ):
        run_in_ranks(Fabric.setup_module, nn.Linear(2, 2), ranks=1, strategy=strategy)

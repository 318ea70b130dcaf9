"""What ``fabric.plan`` says beside what real ranks take, and what it refuses."""

import gc
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fabric
from fabric import Fabric
from fabric.cli import main
from fabric.communicators import ProcessGroupCommunicator
from fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from fabric.tools.dry_run import DryRun
from fabric.tree import flatten
from tests.ranks import outcome, run_in_ranks
from tests.sampling import sampled


class Residual(nn.Module):
    """A block of a perceptron."""

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias)
        self.down = nn.Linear(4 * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.mlp = Residual(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mlp(x + self.out(mixed.transpose(1, 2).flatten(2)))


class GPT(nn.Module):
    """A language model; its head may be its embedding."""

    def __init__(self, width: int = 32, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, width)
        self.position = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Attention(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, 96, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Convolutions(nn.Module):
    """A small residual network with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        layers = [
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
            for _ in range(3)
        ]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Mixture(nn.Module):
    """Every word goes to all of a few experts, which are weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 32)
        self.gate = nn.Linear(32, 3)
        self.experts = nn.ModuleList(Residual(32) for _ in range(3))
        self.head = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        weights = self.gate(x).softmax(-1)
        return self.head(
            sum(expert(x) * weights[..., n : n + 1] for n, expert in enumerate(self.experts))
        )


class PartlyFrozen(nn.Module):
    """Trained blocks behind frozen ones, and a scale without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(40) for _ in range(4))
        for block in self.blocks[:2]:
            block.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def stacked(width: int, depth: int, bias: bool = True) -> nn.Module:
    return nn.Sequential(*(Residual(width, bias) for _ in range(depth)))


def words(batch: int = 4, length: int = 16) -> Tensor:
    return torch.randint(0, 96, (batch, length))


# A model, its inputs, and the block that is computed again.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], type[nn.Module]]] = {
    "deep": (lambda: stacked(32, 12), lambda: torch.randn(16, 32), Residual),
    "wide": (lambda: stacked(96, 3), lambda: torch.randn(8, 96), Residual),
    "uneven": (lambda: stacked(37, 4, bias=False), lambda: torch.randn(24, 37), Residual),
    "long batches": (lambda: stacked(32, 4), lambda: torch.randn(512, 32), Residual),
    "linear": (lambda: nn.Linear(64, 32), lambda: torch.randn(16, 64), nn.Linear),
    "gpt": (GPT, words, Attention),
    "tied gpt": (lambda: GPT(tied=True), words, Attention),
    "wide gpt": (lambda: GPT(64, 2), lambda: words(2), Attention),
    "convolutions": (Convolutions, lambda: torch.randn(4, 3, 16, 16), nn.Sequential),
    "mixture": (Mixture, words, Residual),
    "partly frozen": (PartlyFrozen, lambda: torch.randn(32, 40), Residual),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 3),
        lambda: torch.randn(4, 12, 32),
        nn.TransformerEncoderLayer,
    ),
}
STRATEGIES: dict[str, Callable[[type[nn.Module]], Strategy]] = {
    "ddp": lambda block: DDPStrategy(bucket_cap_mb=0.05),
    "fsdp": lambda block: FSDPStrategy(),
    "SHARD_GRAD_OP": lambda block: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"),
    "HSDP": lambda block: FSDPStrategy(sharding_strategy="HYBRID_SHARD"),
    "recomputation": lambda block: FSDPStrategy(activation_checkpointing=block),
}

# How the layers of a model are split, where they can be.
PERCEPTRON = {"*.up": "colwise", "*.down": "rowwise"}
LANGUAGE = {f"blocks.*.mlp.{name.removeprefix('*.')}": style for name, style in PERCEPTRON.items()}
LANGUAGE |= {"embedding": "rowwise", "head": "colwise_rep"}
PLANS = {
    **dict.fromkeys(("deep", "wide", "uneven", "long batches"), PERCEPTRON),
    "linear": {"": "colwise_rep"},
    **dict.fromkeys(("gpt", "tied gpt", "wide gpt"), LANGUAGE),
    "convolutions": {"head": "colwise_rep"},
    "mixture": {f"experts.{name}": style for name, style in PERCEPTRON.items()},
    "partly frozen": {f"blocks.{name}": style for name, style in PERCEPTRON.items()},
    "encoder": {"layers.*.linear1": "colwise", "layers.*.linear2": "rowwise"},
}
ATTENDING = ("gpt", "tied gpt", "wide gpt")  # by scaled_dot_product_attention
# Norms whose work is divided by tokens, in models of sequences.
NORMS = {
    name: {"blocks.*.norm": "sequence_parallel", "blocks.*.mlp.norm": "sequence_parallel"}
    for name in ATTENDING
}
NORMS |= {"encoder": {"layers.*.norm1": "sequence_parallel", "layers.*.norm2": "sequence_parallel"}}
# Sizes of meshes; what they leave of the processes is data_parallel.
MESHES: dict[str, dict[str, Any]] = {
    "TP": {"tensor_parallel_size": 2},
    "copies x TP": {"tensor_parallel_size": 2, "data_parallel_size": 1, "replicate_size": 2},
    "TP, recomputation": {"tensor_parallel_size": 2},
    "sequence": {"sequence_parallel_size": 2},
    "sequence x TP": {"sequence_parallel_size": 2, "tensor_parallel_size": 2},
}


def build(fabric: Fabric, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = MODELS[name][0]()
    return model, torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad]
    )


def step(fabric: Fabric, name: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
    if "sequence" in (getattr(fabric.device_mesh, "mesh_dim_names", None) or ()):
        with fabric.sequence_parallel(MODELS[name][1]()) as part:
            fabric.backward(model(part).float().pow(2).mean())
    else:
        fabric.backward(model(MODELS[name][1]()).float().pow(2).mean())
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()


class Measured(TorchDispatchMode):
    """The live storages of real tensors, all of which are looked at after each operation; and the messages by axis."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.peak = 0
        self.messages = Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "_local_tensor") or hasattr(kind, "elem") for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            if type(each) in (Tensor, nn.Parameter):
                self.storages.add(each.untyped_storage())
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages))
        name = str(func).replace("_", "").removeprefix("c10d.").removeprefix("c10dfunctional.")
        places = {"allgather": 0, "reducescatter": 1, "allreduce": 0, "broadcast": 0, "alltoall": 0}
        for operation, passed in places.items():
            if "c10d" in str(func) and name.startswith(operation):
                axis = axis_of(args)
                self.messages[operation, axis, "calls"] += 1
                # The operators that DTensor calls return what they gather.
                buffers = (
                    args[passed]
                    if str(func).startswith("c10d.")
                    else made
                    if operation == "allgather"
                    else args[0]
                )
                self.messages[operation, axis, "bytes"] += sum(
                    each.nbytes for each in flatten(buffers)[0]
                )
        return made


def axis_of(args: tuple[Any, ...]) -> str:
    """The dimension of the mesh whose group is among the arguments of a collective."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            with suppress(RuntimeError):  # another object, such as the reduction
                return axis_name(dist.ProcessGroup.unbox(argument))
    return axis_name(
        dist.distributed_c10d._resolve_process_group(
            next(x for x in args[::-1] if isinstance(x, str))
        )
    )


def axis_name(group: dist.ProcessGroup) -> str:
    return (
        "world" if group.size() == dist.get_world_size() else group.group_desc.removeprefix("mesh_")
    )


def measure(fabric: Fabric, name: str) -> tuple[int, Counter[Any]]:
    """The lowest peak of some steps after the first: a thread of gloo may let go of a message at any later time."""
    peaks = []
    # A plan has the collectives of any backend; on gloo those that gather little are sent as
    # all-to-all.
    with (
        patch.object(ProcessGroupCommunicator, "_is_gathered_directly", lambda *_: False),
        Measured() as measured,
    ):
        model, optimizer = fabric.setup(*build(fabric, name))
        for _ in range(6):
            measured.peak = 0
            measured.messages.clear()
            gc.collect()  # what is in cycles goes at any time
            step(fabric, name, model, optimizer)
            peaks.append(measured.peak)
    return min(peaks[1:]), measured.messages


def of_plan(found: DryRun) -> tuple[int, Counter[Any]]:
    messages = Counter[Any]()
    for each in found.traffic:
        messages[each.operation.replace("_", ""), each.axis, "calls"] += each.calls
        messages[each.operation.replace("_", ""), each.axis, "bytes"] += each.nbytes
    return found.peak_bytes, messages


def planned(
    name: str = "gpt", strategy: Strategy | str = "fsdp", ranks: int = 2, **options: Any
) -> DryRun:
    options = {"accelerator": "cpu", **options}
    return fabric.plan(
        partial(build, name=name), partial(step_of, name), world=ranks, strategy=strategy, **options
    )


def step_of(name: str, fabric: Fabric, model: Any, optimizer: torch.optim.Optimizer) -> None:
    step(fabric, name, model, optimizer)


CASES = [(name, strategy, ranks) for name in MODELS for strategy in STRATEGIES for ranks in (2, 4)]
CASES += [
    (name, strategy, ranks)
    for name in PLANS
    for strategy in ("TP", "TP, recomputation")
    for ranks in (2, 4)
]
CASES += [(name, "copies x TP", 4) for name in PLANS]
CASES += [
    (name, *case)
    for name in ATTENDING
    for case in (("sequence", 2), ("sequence", 4), ("sequence x TP", 4))
]


def strategy_of(name: str, strategy: str, ranks: int) -> Strategy:
    if strategy == "HSDP":
        return FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, ranks // 2))
    if strategy in MESHES:
        options: dict[str, Any] = {} if strategy == "sequence" else {"tp_plan": PLANS[name]}
        if strategy == "TP, recomputation":
            options = {
                "tp_plan": PLANS[name] | NORMS.get(name, {}),
                "activation_checkpointing": MODELS[name][2],
            }
        return ModelParallelStrategy(**options, **MESHES[strategy])
    return STRATEGIES[strategy](MODELS[name][2])


@pytest.mark.filterwarnings("ignore:HYBRID_SHARD has one replica")
@pytest.mark.parametrize(
    ("name", "strategy", "ranks"),
    sampled(
        CASES, slow=11, quick=[("gpt", "fsdp", 2), ("partly frozen", "ddp", 2), ("gpt", "TP", 2)]
    ),
)
def test_a_rank_takes_what_was_planned_and_issues_these_collectives(name, strategy, ranks):
    made = [strategy_of(name, strategy, ranks) for _ in range(2)]
    peak, messages = run_in_ranks(
        measure, name, ranks=ranks, strategy=made[0], check_training=False
    )[0]
    expected, collectives = of_plan(planned(name, made[1], ranks))
    assert peak == pytest.approx(expected, rel=0.05)
    assert messages == collectives


def test_what_fits_is_found_and_said():
    needs = [planned("wide", strategy, 4).peak_bytes for strategy in ("ddp", "fsdp")]
    actual = planned("wide", "ddp", 4, memory=needs[1])
    assert needs[1] < needs[0] == actual.peak_bytes
    assert not actual.fits
    assert [*actual.alternatives] == [
        'FSDPStrategy(sharding_strategy="SHARD_GRAD_OP")',
        "FSDPStrategy()",
    ]
    assert [other.fits for other in actual.alternatives.values()] == [False, True]
    assert "ddp, 32-true, 4 rank(s) on 1 node(s): 4.5 MiB a rank, more than" in str(actual)
    assert "FSDPStrategy(): " in str(actual).splitlines()[-1]


def test_all_is_tried_where_nothing_fits():
    *_, last = planned("wide", memory="1KiB").alternatives
    assert (
        last == 'FSDPStrategy(activation_checkpointing=[Residual]), Fabric(precision="bf16-mixed")'
    )


def test_a_mesh_stays_where_other_options_are_tried():
    mesh = ModelParallelStrategy(tp_plan=PLANS["wide"], tensor_parallel_size=2)
    actual = planned("wide", mesh, 4, memory="1KiB")
    first, last = actual.alternatives.items()
    assert first[0] == "ModelParallelStrategy(..., activation_checkpointing=[Residual])"
    assert last[0] == f'{first[0]}, Fabric(precision="bf16-mixed")'
    assert actual.peak_bytes > first[1].peak_bytes > last[1].peak_bytes
    assert {each.axis for each in first[1].traffic} == {"data_parallel", "tensor_parallel", "world"}


def test_memory_is_told_by_kind_and_traffic_by_axis():
    actual = planned(strategy=FSDPStrategy(sharding_strategy="HYBRID_SHARD"), ranks=64, num_nodes=8)
    assert {each.axis: each.ranks for each in actual.traffic} == {"shards": 8, "replicas": 8}
    parameters = sum(parameter.numel() for parameter in GPT().parameters()) * 4
    assert actual.peak["parameters"] == pytest.approx(parameters / 8, rel=0.05)
    assert actual.peak["optimizer state"] == pytest.approx(2 * actual.peak["parameters"], rel=0.01)
    assert sum(actual.peak.values()) == actual.peak_bytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.0 B"),
        (1023, "1,023.0 B"),
        (1024, "1.0 KiB"),
        (2**50 - 2**40, "1,023.0 TiB"),
        (2**50, "1.0 PiB"),
        (2**70, "1,024.0 EiB"),
    ],
)
def test_bytes_of_any_size_are_shown_with_a_unit(nbytes, text):
    dry_run = DryRun(title="gpt", peak={"parameters": nbytes}, traffic=())
    assert str(dry_run).startswith(f"gpt: {text} a rank")


SCRIPT = """
from functools import partial
from fabric.strategies import FSDPStrategy, ModelParallelStrategy
from tests.test_dry_run import PLANS, build, step_of
build, step = partial(build, name="gpt"), partial(step_of, "gpt")
hybrid = FSDPStrategy(sharding_strategy="HYBRID_SHARD")
split = ModelParallelStrategy(tp_plan=PLANS["gpt"], tensor_parallel_size=2)
def build_of_size(fabric, size): raise AssertionError("it was called")
"""


def test_thousands_of_ranks_are_planned_from_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "planned_script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    many = ["--world", "4096", "--num-nodes", "512", "--memory", "80GiB"]
    for strategy, axis in (
        ("hybrid", "8 (shards)"),
        ("fsdp", "4096 (world)"),
        ("split", "2048 (data_parallel)"),
    ):
        start = time.process_time()
        assert main(["plan", "planned_script:build", *many, "--strategy", strategy]) == 0
        assert time.process_time() - start < 5
        assert f"over {axis}" in capsys.readouterr().out
    assert main(["plan", "planned_script:build_of_size"]) == 2
    assert "missing a required argument: 'size'" in (text := capsys.readouterr().err)
    assert "build(fabric)" in text
    assert main(["plan", "planned_script:build", "--memory", "1 kB"]) == 1
    assert "more than" in capsys.readouterr().out
    assert main(["plan", "planned_script:absent"]) == 2
    assert "no attribute 'absent'" in capsys.readouterr().err
    assert main(["plan", "planned_script"]) == 2
    assert "planned_script is of type module" in capsys.readouterr().err


def test_steps_read_values_skip_synchronization_and_build_as_in_a_job():
    seen = []

    def built(fabric: Fabric) -> Any:
        seen.append((fabric.world_size, fabric.global_rank, fabric.device.type))
        with fabric.init_module():
            model = nn.Sequential(*(deepcopy(Residual(32)) for _ in range(2)))
        return model, torch.optim.AdamW(model.parameters())

    def stepped(fabric: Fabric, model: Any, optimizer: torch.optim.Optimizer) -> None:
        for last in (False, True):
            with fabric.no_backward_sync(model, enabled=not last):
                loss = model(torch.randn(2, 32)).mean()
                fabric.backward(loss)
        seen.append(fabric.all_reduce(loss.detach()).item())
        optimizer.step()
        optimizer.zero_grad()

    for strategy, precision in (("ddp", "16-mixed"), ("fsdp", "bf16-mixed"), ("fsdp", "64-true")):
        found = fabric.plan(built, stepped, world=4, strategy=strategy, precision=precision)
        reduced = [each.calls for each in found.traffic if each.operation == "reduce_scatter"]
        assert reduced == ([] if strategy == "ddp" else [2])
        assert seen == [(4, 0, "cpu"), 1, 1, 1]
        seen.clear()


def test_a_dry_run_changes_nothing_in_the_process():
    before = torch.get_rng_state()
    planned()
    assert torch.equal(before, torch.get_rng_state())
    assert run_in_ranks(sum_over_ranks, ranks=1, strategy="ddp") == [1.0]


def sum_over_ranks(fabric: Fabric) -> float:
    return float(fabric.all_reduce(torch.ones(()), reduce_op="sum"))


def test_a_model_without_an_optimizer_is_planned_too():
    actual = fabric.plan(
        lambda fabric: stacked(32, 2), lambda fabric, model: model(torch.randn(4, 32)), world=2
    )
    assert actual.peak.keys() == {"parameters", "activations and others"}


def test_optimizers_of_gpus_take_more_memory():
    wide = [planned("wide", "ddp", accelerator=kind).peak_bytes for kind in ("cpu", "cuda")]
    assert wide[0] < wide[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": FSDPStrategy(cpu_offload=True)}, "cpu_offload"),
        ({"strategy": DDPStrategy(ddp_comm_hook=print)}, "ddp_comm_hook"),
        ({"ranks": 3, "num_nodes": 2}, "equally many"),
        ({"ranks": 0}, "contradict"),
        ({"memory": "much"}, "80GiB"),
        ({"accelerator": "cup"}, "cuda, gpu, mps, cpu"),
        ({"strategy": "fspd"}, "no strategy"),
        ({"strategy": "dp"}, "one process"),
    ],
    ids=["offload", "hook", "nodes", "no ranks", "memory", "accelerator", "name", "dp"],
)
def test_what_cannot_be_planned_is_said(options, words):
    assert words in outcome(lambda: planned(**options))

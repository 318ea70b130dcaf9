"""Replicas that drift apart raise at the next save, and within the steps of check_replicas."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.optim import ZeroRedundancyOptimizer

from fabric import Fabric
from fabric.checkpoint import FullCheckpoint
from fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from tests.conftest import REPLICA_CHECK
from tests.ranks import outcome, run_in_ranks

STEPS = 6
DRIFTING_STEP = 2


class Masked(nn.Module):
    """Two layers with a norm between them, whose output is multiplied by a mask."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = norm(8)
        self.second = nn.Linear(8, 4)
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        return self.second(hidden) * self.mask


class Loop:
    """A training loop, in which one rank does something else in one step."""

    def __init__(self, fabric: Fabric, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        torch.manual_seed(0)
        model = Masked(norm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.fabric = fabric
        self.model, self.optimizer = fabric.setup(model, optimizer)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.9)
        self.ema = fabric.ema(self.model)

    @property
    def mask(self) -> Tensor:
        return self.model.get_buffer("mask")

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "ema": self.ema}

    def run(self, drift: Callable[["Loop"], object] | None = None, steps: int = STEPS) -> None:
        """Train. One rank makes the step ``DRIFTING_STEP`` by calling ``drift``, if given."""
        # Of ranks in a mesh with two rows, the first one of the second row.
        drifting_rank = self.fabric.world_size // 2
        session = self.fabric._session
        assert session is not None
        for step in range(steps):
            torch.manual_seed(step + 100 * session.data_parallel_rank)
            loss = self.model(torch.randn(6, 4).to(self.fabric.device)).square().mean()
            self.fabric.backward(loss)
            is_drifting = step == DRIFTING_STEP and self.fabric.global_rank == drifting_rank
            if drift is not None and is_drifting:
                drift(self)
            else:
                self.step()
            self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.ema.update()


def local(tensor: Any) -> Tensor:
    """Return the part of a tensor on this rank."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def skip_scheduler(loop: Loop) -> None:
    loop.optimizer.step()
    loop.ema.update()


def clip_harder(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        local(parameter.grad).mul_(0.1)
    loop.step()


def leave_out_step(loop: Loop) -> None:
    loop.scheduler.step()
    loop.ema.update()


def step_twice(loop: Loop) -> None:
    loop.optimizer.step()
    loop.step()


def flip_bit(loop: Loop) -> None:
    loop.step()
    local(loop.model.first.weight).view(torch.int32).view(-1)[3] ^= 1 << 20


def use_own_gradients(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        local(parameter.grad).add_(torch.randn_like(local(parameter.grad)))
    loop.step()


def decay_more(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["weight_decay"] = 0.5
    loop.step()


def skip_average(loop: Loop) -> None:
    loop.optimizer.step()
    loop.scheduler.step()


def change_loss_scale(loop: Loop) -> None:
    session = loop.fabric._session
    assert session is not None
    assert session.scaler is not None
    loop.step()
    session.scaler.load_state_dict({**session.scaler.state_dict(), "scale": 4.0})


def change_parameter(loop: Loop) -> None:
    loop.step()
    local(loop.model.second.bias).mul_(1.5)


def change_all_parameters(loop: Loop) -> None:
    loop.step()
    for parameter in loop.model.parameters():
        local(parameter).mul_(1.5)


def change_state(loop: Loop) -> None:
    loop.step()
    for slots in loop.optimizer.state.values():
        local(slots["exp_avg"]).mul_(0.5)


def reset_state(loop: Loop) -> None:
    loop.optimizer.state.clear()
    loop.step()


# What one rank does, and a part of the error.
DRIFTS: Mapping[Callable[[Loop], object], str] = {
    skip_scheduler: "lr of AdamW differs: ",
    clip_harder: "have stepped with different gradients",
    leave_out_step: "the number of optimizer steps since then differs: ",
    step_twice: "the number of optimizer steps since then differs: ",
    flip_bit: "only element 3 of it differs",
    use_own_gradients: "have stepped with different gradients",
    decay_more: "weight_decay of AdamW differs: 0.01 on ",
    skip_average: "the number of updates of the averages of Masked differs: ",
    change_parameter: "no other parameter differs: it was changed outside of optimizer.step()",
    change_all_parameters: (
        "the state of the optimizer is equal: the parameters were changed outside"
    ),
    change_state: "exp_avg of first.weight of Masked in AdamW differs",
    reset_state: "the number of steps in the state of the optimizer differs: ",
}


def save_after_drift(
    fabric: Fabric, folder: Path, names: list[str], steps: int = STEPS
) -> dict[str, str]:
    """Return what happens to a run of each kind of drift, which saves at its end."""
    outcomes: dict[str, str] = {}
    drifts: dict[str, Callable[[Loop], object]] = {drift.__name__: drift for drift in DRIFTS}
    drifts["change_loss_scale"] = change_loss_scale
    # Tensor parallelism gives a norm between the split layers a part of the features.
    norm = nn.Identity
    if isinstance(fabric.strategy, DDPStrategy):
        norm = nn.BatchNorm1d
    for name in names:

        def run(name: str = name) -> None:
            loop = Loop(fabric, norm)
            loop.run(drifts.get(name), steps)
            fabric.save(folder / name, loop.state)

        outcomes[name] = outcome(run)
    return outcomes


def check_outcomes(outcomes_of_ranks: list[dict[str, str]], names: list[str]) -> None:
    texts = {drift.__name__: text for drift, text in DRIFTS.items()}
    texts["change_loss_scale"] = "loss scale differs: "
    for outcomes in outcomes_of_ranks:
        assert outcomes["no drift"] == "fine"
        for name in names:
            error = outcomes[name]
            assert error.startswith("ReplicaDriftError: "), f"{name}: {error}"
            assert texts[name] in error, f"{name}: {error}"


NAMES = [drift.__name__ for drift in DRIFTS]
# The values that a mesh splits, and an option of the optimizer for all that it does not split.
NAMES_ON_MESH = ["clip_harder", "flip_bit", "change_state", "decay_more"]


def test_a_save_names_each_kind_of_drift_under_ddp(tmp_path: Path) -> None:
    # The default, even with --check-replicas: a comparison in a step would come before the save.
    outcomes = run_in_ranks(
        save_after_drift, tmp_path, ["no drift", *NAMES], ranks=3, check_replicas=True
    )
    check_outcomes(outcomes, NAMES)
    error = outcomes[2]["decay_more"]
    assert "save" in error.splitlines()[0]
    assert "optimizer steps, on rank 2" in error.splitlines()[0]
    assert "first.weight of Masked differs: ranks 0, 2 agree; rank 1 differs\n" in error
    assert "weight_decay of AdamW differs: 0.01 on ranks 0, 2; 0.5 on rank 1\n" in error
    assert "all ranks agreed after 6 optimizer steps\n" in error
    assert list(tmp_path.iterdir()) == [tmp_path / "no drift"]  # nothing else was written


@pytest.mark.parametrize(
    ("interval", "drifts"),
    [
        # A save names the other kinds, in the test above.
        (2, NAMES_ON_MESH),
        pytest.param(100, NAMES, marks=pytest.mark.slow),
    ],
    ids=["2", "100"],
)
def test_a_backward_pass_names_each_kind_of_drift_within_the_interval(
    interval: int, drifts: list[str], tmp_path: Path
) -> None:
    names = ["no drift", *drifts]
    # The drift is in step 3, so the next comparison is within the interval after that.
    steps = 3 + interval
    outcomes = run_in_ranks(save_after_drift, tmp_path, names, steps, check_replicas=interval)
    check_outcomes(outcomes, drifts)
    for name in drifts:
        assert outcomes[0][name].startswith("ReplicaDriftError: fabric.backward(...), after ")


@pytest.mark.parametrize("check_replicas", [True, 2, pytest.param(100, marks=pytest.mark.slow)])
def test_another_loss_scale_on_one_rank_is_a_drift(tmp_path: Path, check_replicas: int) -> None:
    names = ["no drift", "change_loss_scale"]
    options = {"precision": "16-mixed", "check_replicas": check_replicas}
    steps = STEPS + int(check_replicas)
    outcomes = run_in_ranks(save_after_drift, tmp_path, names, steps, **options)
    check_outcomes(outcomes, ["change_loss_scale"])


SPLIT_AND_REPLICATED = ModelParallelStrategy(
    tp_plan={"first": "colwise", "second": "rowwise"},
    tensor_parallel_size=2,
    replicate_size=2,
)


@pytest.mark.parametrize(
    "strategy",
    [
        FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)),
        pytest.param(SPLIT_AND_REPLICATED, marks=pytest.mark.slow),
    ],
    ids=["hybrid", "mesh"],
)
def test_a_save_names_drifts_between_replicas_of_a_mesh(tmp_path: Path, strategy: Any) -> None:
    names = ["no drift", *NAMES_ON_MESH]
    outcomes = run_in_ranks(save_after_drift, tmp_path, names, ranks=4, strategy=strategy)
    check_outcomes(outcomes, NAMES_ON_MESH)


class Skipping(nn.Module):
    """Blocks of one shape, of which a pass leaves out one, and two layers of which it uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, x: Tensor, skipped: int, uses_left: bool) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = x + block(x)
        if uses_left:
            return self.left(x)
        return self.right(x)


def save_after_other_uses(fabric: Fabric, folder: Path) -> dict[str, str]:
    """Return what becomes of a save after passes of other blocks, or of another layer, by rank."""
    outcomes: dict[str, str] = {}
    for use in ("same", "blocks", "layers"):
        torch.manual_seed(0)
        model = Skipping()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(STEPS):
            is_first_rank = fabric.global_rank == 0
            differs = step == STEPS - 1 and is_first_rank
            skipped = int(use == "blocks" and differs)
            uses_left = step % 2 == 0 or (use == "layers" and differs)
            loss = model(torch.randn(2, 4), skipped, uses_left).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        state = {"model": model, "optimizer": optimizer}
        path = folder / use
        outcomes[use] = outcome(lambda path=path, state=state: fabric.save(path, state))
    return outcomes


def test_a_save_finds_ranks_that_used_other_blocks_or_layers_of_a_sharded_model(
    tmp_path: Path,
) -> None:
    options = {"strategy": "fsdp", "check_replicas": True}
    for outcomes in run_in_ranks(save_after_other_uses, tmp_path, **options):
        assert outcomes["same"] == "fine"
        for use in ("blocks", "layers"):
            assert outcomes[use].startswith("ReplicaDriftError: ")
            assert "the ranks have used different blocks or parameters" in outcomes[use]
        assert "the order in which forward passes have used the blocks" in outcomes["blocks"]
        assert "the set of parameters of Skipping with gradients" in outcomes["layers"]


def save_after_changes(fabric: Fabric, folder: Path) -> dict[str, str]:
    loop = Loop(fabric)
    loop.run()
    outcomes = {"statistics": outcome(lambda: fabric.save(folder / "equal", loop.state))}
    is_first = fabric.global_rank == 0
    if not is_first:
        loop.mask[2] = 0
    outcomes["buffer"] = outcome(lambda: fabric.save(folder / "buffer", loop.state))
    outcomes["background"] = outcome(
        lambda: fabric.save(folder / "background", loop.state, async_=True)
    )
    checkpoints = fabric.checkpoints(folder / "kept")
    outcomes["kept"] = outcome(lambda: checkpoints.save(1, loop.state))
    outcomes["newest"] = str(checkpoints.latest)
    loop.mask[2] = 1

    outcomes["resumed"] = outcome(lambda: save_after_resume(fabric, folder))
    outcomes["loaded"] = outcome(lambda: save_after_load_on_one_rank(fabric, folder, loop))
    return outcomes


def save_after_resume(fabric: Fabric, folder: Path) -> None:
    loop = Loop(fabric)
    fabric.load(folder / "equal", loop.state)
    loop.run(flip_bit)
    fabric.save(folder / "resumed", loop.state)


def save_after_load_on_one_rank(fabric: Fabric, folder: Path, trained: Loop) -> None:
    loop = Loop(fabric)
    if fabric.global_rank == 1:
        state = trained.optimizer.state_dict()["state"]
        loop.optimizer.load_state_dict({**loop.optimizer.state_dict(), "state": state})
    fabric.save(folder / "loaded", loop.state)


def test_a_save_names_buffers_and_states_of_single_ranks(tmp_path: Path) -> None:
    # The default, even with --check-replicas: a comparison in a step would come before the save.
    for outcomes in run_in_ranks(save_after_changes, tmp_path, check_replicas=True):
        assert outcomes["statistics"] == "fine"
        for kind in ("buffer", "background", "kept"):
            assert outcomes[kind].startswith("ReplicaDriftError")
            assert "the buffer mask of Masked differs: " in outcomes[kind]
        assert outcomes["newest"] == "None"
        assert "changed on rank 1" in outcomes["buffer"]
        assert "only element 3 of it differs" in outcomes["resumed"]
        assert "all ranks agreed after 6 optimizer steps" in outcomes["resumed"]
        assert "rank 0 without it" in outcomes["loaded"]
        assert "it was loaded on these ranks alone" in outcomes["loaded"]


# -- what a save publishes -------------------------------------------------------------------------


class OwnFormat(FullCheckpoint):
    """A format of the user, whose ``save`` writes and commits."""

    def save(self, state: Mapping[str, Any], path: Any) -> None:
        super().save(state, path)


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the content of all files in a folder and in the folders in it."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def save_in_each_way(fabric: Fabric, folder: Path) -> dict[str, str]:
    """Save equal replicas in each way, and then replicas of which one has a flipped bit."""
    loop = Loop(fabric, nn.Identity)
    loop.run()
    checkpoints = fabric.checkpoints(folder / "kept")
    ways: dict[str, Callable[[], object]] = {
        "at once": lambda: fabric.save(folder / "at once", loop.state),
        "background": lambda: fabric.save(folder / "background", loop.state, async_=True),
        "weights": lambda: fabric.save(folder / "weights", loop.model.state_dict()),
        "kept": lambda: checkpoints.save(1, loop.state, async_=False),
        "kept in background": lambda: checkpoints.save(2, loop.state),
    }
    for save in ways.values():
        save()
    newest = checkpoints.latest  # waits for the save in the background
    fabric.barrier()
    files = files_in(folder)
    fabric.barrier()
    if fabric.global_rank == 1:
        local(loop.model.first.weight).view(torch.int32).view(-1)[3] ^= 1 << 20

    outcomes = {name: outcome(save) for name, save in ways.items()}
    fabric.barrier()
    if files_in(folder) != files or checkpoints.latest != newest:
        outcomes["files"] = "the drifted state was published"
    # The job goes on with the next save.
    if fabric.global_rank == 1:
        local(loop.model.first.weight).view(torch.int32).view(-1)[3] ^= 1 << 20
    checkpoints.save(3, loop.state)
    outcomes["newest"] = str(checkpoints.latest)
    return outcomes


@pytest.mark.parametrize(
    "strategy",
    [
        DDPStrategy(),
        DDPStrategy(checkpoint_io=OwnFormat()),
        FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 1)),
        FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 1), state_dict_type="full"),
    ],
    ids=["ddp", "own format", "shards", "full"],
)
def test_no_kind_of_save_publishes_a_drifted_state(tmp_path: Path, strategy: Any) -> None:
    for outcomes in run_in_ranks(
        save_in_each_way, tmp_path, strategy=strategy, check_replicas=True
    ):
        newest = outcomes.pop("newest")
        assert newest.endswith("-step-3")
        assert list(outcomes) == ["at once", "background", "weights", "kept", "kept in background"]
        for name, error in outcomes.items():
            assert error.startswith("ReplicaDriftError: "), f"{name}: {error}"
            assert "first.weight of Masked differs: " in error, name
            assert "only element 3 of it differs, by bit 20" in error, name


def save_large_tensors(fabric: Fabric, folder: Path) -> list[str]:
    """Return what saves say for a flipped bit in each of three large tensors."""
    net = nn.Module()
    for name in ("first", "second", "third"):
        net.register_parameter(name, nn.Parameter(torch.zeros(5_000_000)))
    model = fabric.setup(net)
    outcomes: list[str] = []
    for parameter in model.parameters():
        bits = parameter.data.view(torch.int32)
        if fabric.global_rank == 1:
            bits[-1] ^= 1
        outcomes.append(outcome(lambda: fabric.save(folder / "model", {"model": model})))
        if fabric.global_rank == 1:
            bits[-1] ^= 1
    outcomes.append(outcome(lambda: fabric.save(folder / "model", {"model": model})))
    return outcomes


def test_a_save_finds_a_flipped_bit_in_each_of_several_large_tensors(tmp_path: Path) -> None:
    for *errors, last in run_in_ranks(save_large_tensors, tmp_path, check_replicas=True):
        for name, error in zip(("first", "second", "third"), errors, strict=True):
            assert f"{name} of Module differs: " in error
            assert "only element 4999999 of it differs, by bit 0" in error
        assert last == "fine"


# -- what is meant to differ -----------------------------------------------------------------------


def train_what_differs(fabric: Fabric, folder: Path) -> None:
    """Train with all that may differ between ranks, and compare in every step."""
    loop = Loop(fabric)
    # An option with a text may be anything.
    loop.optimizer.defaults["tag"] = None
    for group in loop.optimizer.param_groups:
        group["tag"] = (1, f"rank {fabric.global_rank}")
    # Each rank has other samples, and so other running statistics.
    probe = nn.Linear(4, 1)
    probe_optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    for step in range(6):
        torch.manual_seed(step + 100 * fabric.global_rank)
        is_accumulating = step % 2 == 0
        with fabric.no_backward_sync(loop.model, enabled=is_accumulating):
            fabric.backward(loop.model(torch.randn(6, 4)).square().mean())
        if not is_accumulating:
            loop.step()
            loop.optimizer.zero_grad()
        # A model of one rank alone, which is not set up.
        if fabric.global_rank == 1 and step > 3:
            fabric.backward(probe(torch.randn(2, 4)).mean())
            probe_optimizer.step()
    with fabric.join(loop.model):
        for _ in range(2 + fabric.global_rank):
            fabric.backward(loop.model(torch.randn(6, 4)).square().mean())
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    fabric.save(folder / "checkpoint", loop.state)


def train_with_sharded_state(fabric: Fabric) -> str:
    model = Masked(nn.LayerNorm)
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    model, optimizer = fabric.setup(model, sharded)
    for _ in range(4):
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
    return "fine"


def test_what_is_meant_to_differ_is_not_reported(tmp_path: Path) -> None:
    run_in_ranks(train_what_differs, tmp_path / "ddp", check_replicas=1)
    strategy = DDPStrategy(broadcast_buffers=False)
    run_in_ranks(train_what_differs, tmp_path / "local", strategy=strategy, check_replicas=1)
    assert run_in_ranks(train_with_sharded_state, check_replicas=1) == ["fine", "fine"]


def train_as_told(fabric: Fabric, folder: Path) -> str:
    loop = Loop(fabric)
    loop.run(use_own_gradients)
    return outcome(lambda: fabric.save(folder / "checkpoint", loop.state))


def test_no_replicas_are_compared_if_the_check_is_off_or_replicas_drift_on_purpose(
    tmp_path: Path,
) -> None:
    off = run_in_ranks(train_as_told, tmp_path / "off", check_replicas=False)
    assert off == ["fine", "fine"]
    state = PostLocalSGDState(
        process_group=None,
        subgroup=None,
        start_localSGD_iter=1,
        post_local_gradient_allreduce=False,
    )
    local_sgd = DDPStrategy(
        ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=4
    )
    options = {"strategy": local_sgd, "check_replicas": 1, "check_training": False}
    drifting = run_in_ranks(train_as_told, tmp_path / "drifting", **options)
    assert drifting == ["fine", "fine"]


@pytest.mark.parametrize("value", [-1, 1.5, "always", None])
def test_an_interval_that_is_no_number_of_steps_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="check_replicas="):
        Fabric(check_replicas=value)


@pytest.mark.slow
def test_the_option_of_the_tests_reaches_processes_that_they_start() -> None:
    code = "from fabric import Fabric; print(Fabric.__init__.__kwdefaults__['check_replicas'])"
    search_path = os.pathsep.join([str(REPLICA_CHECK), *sys.path])
    variables = {"PYTHONPATH": search_path, "FABRIC_TESTS_CHECK_REPLICAS": "3"}
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.stdout == "3\n", process.stderr

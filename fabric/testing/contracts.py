"""Conformance suites for a precision, accelerator, environment, launcher or checkpoint format.

The public functions ``check_*`` are the suites. All checks of a suite are private functions with
the same arguments. If a check raises, the suite raises an AssertionError with the docstring of the
check, so a docstring is a part of an error text.
"""

import copy
import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import TestCase

import torch
from torch import Tensor, nn

from fabric._fabric import Fabric
from fabric.accelerators import Accelerator
from fabric.checkpoint import CheckpointIO
from fabric.environments import Environment
from fabric.errors import (
    ArgumentTypeError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    RankFailedError,
)
from fabric.launchers import Launcher, LaunchSpec
from fabric.precision import Precision
from fabric.strategies import DDPStrategy
from fabric.testing.base import assert_same
from fabric.testing.conformance import assert_equivalent, failures_as_assertion_errors
from fabric.testing.pool import RankPool
from fabric.world import World

__all__ = [
    "check_accelerator",
    "check_checkpoint_io",
    "check_environment",
    "check_launcher",
    "check_precision",
]

_assert_raises = TestCase().assertRaises
_TIMEOUT = 120.0  # seconds for the runs of one suite on several ranks


# -- precision ------------------------------------------------------------------------------------


def check_precision(precision: Precision, device_type: str = "cpu", rtol: float = 1e-2) -> None:
    """Check that a precision behaves as :class:`fabric.precision.Precision` documents.

    A small model is trained on one rank and on two, under DDP and under FSDP.

    Args:
        precision: the precision. It must be picklable, and its class importable by the ranks.
        device_type: the type of the device to train on.
        rtol: the tolerance, relative and absolute, between the losses on one rank and on two.

    Raises:
        AssertionError: a check fails. The text names the check and the difference.
    """
    for check in (_check_precision_pickles, _check_conversion):
        with failures_as_assertion_errors(check):
            check(precision)
    with failures_as_assertion_errors(_check_forward_context):
        _check_forward_context(precision, device_type)
    assert_equivalent(
        _train_three_steps,
        strategies=("ddp", "fsdp"),
        world_sizes=(1, 2),
        precision=precision,
        accelerator=device_type,
        rtol=rtol,
        atol=rtol,
        timeout=_TIMEOUT,
    )


def _check_precision_pickles(precision: Precision) -> None:
    """Check that a precision can be pickled, and that its copy is equal to it."""
    pickled = pickle.dumps(precision)
    unpickled = pickle.loads(pickled)  # noqa: S301 - pickled just above
    assert unpickled == precision, "the copy is not equal"


def _check_conversion(precision: Precision) -> None:
    """Check that Precision.convert_module keeps the parameter objects.

    An optimizer that was made before the conversion holds these objects.
    """
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    parameters_before = dict(module.named_parameters())
    precision.convert_module(module)
    parameters_after = set(module.parameters())
    for name, parameter in parameters_before.items():
        assert parameter in parameters_after, f"{name} is another object"
        assert parameter.requires_grad, f"{name} no longer requires a gradient"


def _check_forward_context(precision: Precision, device_type: str) -> None:
    """Check that each Precision.forward_context is a new one and restores the modes of torch."""
    # A precision that returns one context object from all calls fails here: contexts are entered
    # one within another, and again.
    modes_before = _modes(device_type)
    for _ in range(2):
        with precision.forward_context(device_type), precision.forward_context(device_type):
            pass
        assert_same(_modes(device_type), modes_before)
        # The modes are restored after an error in the forward pass, too.
        with _assert_raises(KeyError), precision.forward_context(device_type):
            raise KeyError
        assert_same(_modes(device_type), modes_before)


def _modes(device_type: str) -> dict[str, Any]:
    """Return the modes of torch that a forward context may change, by name."""
    return {
        "autocast": torch.is_autocast_enabled(device_type),
        "autocast dtype": torch.get_autocast_dtype(device_type),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
    }


def _train_three_steps(fabric: Fabric) -> dict[str, Any]:
    """Return the losses of three training steps on a global batch, as means over the ranks.

    Collective. :func:`assert_equivalent` calls this function on each rank of jobs of several sizes,
    and compares the results. Every job has the same global batch, so the mean losses have to be the
    same.
    """
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    global_batch = torch.randn(8, 4)
    inputs = global_batch.chunk(fabric.world_size)[fabric.global_rank]
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    losses = []
    for _ in range(3):
        # The loss is computed in float32, since the output may have a low precision.
        loss = model(fabric.to_device(inputs)).float().square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").cpu())
    # The gather waits for all ranks, so that no rank ends before the others have finished.
    last_losses = fabric.all_gather(losses[-1])
    assert last_losses.isfinite().all(), f"the loss is {losses[-1]}"
    return {"losses": losses}


# -- accelerator ----------------------------------------------------------------------------------


def check_accelerator(accelerator: Accelerator) -> None:
    """Check that an accelerator behaves as :class:`fabric.accelerators.Accelerator` documents.

    Where the hardware is not available, only the checks that do not need it are made.

    Args:
        accelerator: the accelerator.

    Raises:
        AssertionError: a check fails. The text names the check and the difference.
    """
    checks: list[Callable[[Accelerator], None]] = [_check_hardware, _check_wrong_devices]
    if accelerator.is_available():
        checks += [_check_devices, _check_training_on_device]
    for check in checks:
        with failures_as_assertion_errors(check):
            check(accelerator)


def _check_hardware(accelerator: Accelerator) -> None:
    """Check that an accelerator is stateless, has a name of torch, and counts its devices."""
    # Called only for the error that torch raises for an unknown device type.
    torch.device(accelerator.name)
    count = accelerator.device_count()
    assert isinstance(count, int), f"device_count() is {count!r}"
    assert count >= 0, f"device_count() is {count}"
    # Two objects of a stateless class are equal.
    second_accelerator = type(accelerator)()
    expected = (accelerator.name, count)
    assert_same((second_accelerator.name, second_accelerator.device_count()), expected)
    assert_same(accelerator.is_available(), second_accelerator.is_available())
    if accelerator.is_available():
        assert count > 0, "is_available() is true, and device_count() is 0"


def _check_wrong_devices(accelerator: Accelerator) -> None:
    """Check that Accelerator.parse_devices refuses values that name no device."""
    for devices in (0, -2, "", "x", []):
        with _assert_raises(ConfigurationError):
            accelerator.parse_devices(devices)
    with _assert_raises(ArgumentTypeError):
        value_of_wrong_type: Any = object()
        accelerator.parse_devices(value_of_wrong_type)


def _check_devices(accelerator: Accelerator) -> None:
    """Check that Accelerator.parse_devices returns the same for a number and its text."""
    assert len(accelerator.parse_devices("auto")) >= 1, 'devices="auto" selects none'
    devices = accelerator.parse_devices(1)
    assert_same(len(devices), 1)
    assert_same(devices[0].type, accelerator.name)
    assert_same(accelerator.parse_devices("1"), devices)


def _check_training_on_device(accelerator: Accelerator) -> None:
    """Check that a step on one device of the accelerator gives the numbers of the CPU."""
    losses = []
    for accelerator_or_name in (accelerator, "cpu"):
        with Fabric(accelerator=accelerator_or_name, devices=1, strategy="single_device") as fabric:
            losses.append(_train_three_steps(fabric)["losses"])
    losses_on_device, losses_on_cpu = losses
    assert_same(losses_on_device, losses_on_cpu, rtol=1e-4, atol=1e-5)
    # These methods have no result to compare. The check is that they raise no error.
    accelerator.release()
    accelerator.return_freed_memory()


# -- environment ----------------------------------------------------------------------------------


def check_environment(environment: Environment, variables: Sequence[Mapping[str, str]]) -> None:
    """Check that an environment behaves as :class:`fabric.environments.Environment` documents.

    Args:
        environment: the environment.
        variables: the environment variables of all ranks of one job, by rank.

    Raises:
        AssertionError: a check fails. The text names the check and the difference.
    """
    with failures_as_assertion_errors(_check_purity):
        _check_purity(environment, variables)
    with failures_as_assertion_errors(_check_without_launcher):
        _check_without_launcher(environment)
    with failures_as_assertion_errors(_check_worlds):
        _check_worlds(environment, variables)


def _check_without_launcher(environment: Environment) -> None:
    """Check that Environment.detect returns None if its launcher did not start the process."""
    assert isinstance(environment.name, str), f"name is {environment.name!r}"
    variables_of_no_launcher = ({}, {"PATH": "/bin", "HOME": "/root"})
    for env in variables_of_no_launcher:
        assert_same(environment.detect(env), None)


def _check_worlds(environment: Environment, variables_by_rank: Sequence[Mapping[str, str]]) -> None:
    """Check that Environment.detect returns the ranks of the job, each once."""
    node_and_local_ranks = set()
    world_size = len(variables_by_rank)
    for rank, env in enumerate(variables_by_rank):
        world = environment.detect(env)
        assert isinstance(world, World), f"rank {rank}: detect() returned {world!r}"
        assert_same((world.rank, world.world_size), (rank, world_size))
        node_and_local_ranks.add((world.node_rank, world.local_rank))
        if world_size > 1:
            has_rendezvous = world.port is not None or world.store is not None
            assert has_rendezvous, f"rank {rank}: {world} has no port and no store to meet at"
    assert len(node_and_local_ranks) == world_size, (
        "two ranks have the same node_rank and local_rank"
    )


def _check_purity(environment: Environment, variables_by_rank: Sequence[Mapping[str, str]]) -> None:
    """Check that Environment.detect changes nothing and returns the same world each time."""
    process_variables = dict(os.environ)
    for env in variables_by_rank:
        passed_variables = dict(env)
        world = environment.detect(passed_variables)
        second_world = environment.detect(dict(env))
        assert world == second_world, f"detect() returned {world}, and then {second_world}"
        assert_same(passed_variables, dict(env))
    # The error does not print the variables, which may hold secrets.
    is_unchanged = dict(os.environ) == process_variables
    assert is_unchanged, "detect() changed os.environ"


# -- launcher -------------------------------------------------------------------------------------


def check_launcher(launcher: Launcher, num_processes: int = 2) -> None:
    """Check that a launcher of functions behaves as :class:`fabric.launchers.Launcher` documents.

    Args:
        launcher: the launcher.
        num_processes: the number of processes to start.

    Raises:
        AssertionError: a check fails. The text names the check and the difference.
        ConfigurationError: the launcher runs scripts, for which there is no suite.
    """
    if not launcher.runs_function:
        raise ConfigurationError(
            f"check_launcher({type(launcher).__name__})",
            problem="it runs a script again, and the suite launches functions",
        )
    checks = (_check_results, _check_processes, _check_failing_rank, _check_connected_ranks)
    for check in checks:
        with failures_as_assertion_errors(check):
            check(launcher, num_processes)


def _check_results(launcher: Launcher, size: int) -> None:
    """Check that Launcher.launch returns the results that LaunchSpec.results selects.

    Tensors are returned by value and without a graph. The argument of the caller does not change.
    """
    tensor = torch.ones(2, requires_grad=True)
    args = (tensor,)
    kwargs = {"factor": 2}
    doubled = torch.full((2,), 2.0)
    spec = LaunchSpec(num_processes=size, results="all")
    results = launcher.launch(_multiply_and_zero_argument, args, kwargs, spec)
    assert_same(results, [doubled] * size)
    assert not results[0].requires_grad, "a tensor of the results requires a gradient"
    spec = replace(spec, results="first")
    assert_same(launcher.launch(_multiply_and_zero_argument, args, kwargs, spec), doubled)
    spec = replace(spec, results="none")
    assert_same(launcher.launch(_multiply_and_zero_argument, args, kwargs, spec), None)
    assert_same(tensor.detach(), torch.ones(2))


def _multiply_and_zero_argument(tensor: Tensor, factor: int) -> Tensor:
    """Return ``tensor * factor``, and set ``tensor`` to 0. Runs in each launched process.

    The caller of the launch sees no change, since each process has its own copy of the tensor.
    """
    result = tensor * factor
    tensor.data.zero_()
    return result


def _check_processes(launcher: Launcher, size: int) -> None:
    """Check that every rank is a process in which World.from_env finds its rank."""
    spec = LaunchSpec(num_processes=size, results="all")
    worlds = launcher.launch(_world_of_process, (), {}, spec)
    process_ids = set()
    for rank, world in enumerate(worlds):
        assert_same((world["rank"], world["world_size"]), (rank, size))
        process_ids.add(world["process_id"])
    assert len(process_ids) == size, "two ranks share a process"


def _world_of_process() -> dict[str, int]:
    """Return the rank, the world size and the id of this process. Runs in each launched process.

    The rank and the world size are -1 if the environment variables do not tell them.
    """
    world = World.from_env(os.environ)
    if world is None:
        return {"rank": -1, "world_size": -1, "process_id": os.getpid()}
    return {"rank": world.rank, "world_size": world.world_size, "process_id": os.getpid()}


def _check_failing_rank(launcher: Launcher, size: int) -> None:
    """Check that a rank that raises ends the job with a RankFailedError of that rank."""
    spec = LaunchSpec(num_processes=size)
    with _assert_raises(RankFailedError) as caught:
        launcher.launch(_raise_in_last_rank, (), {}, spec)
    assert_same(caught.exception.rank, size - 1)
    text = str(caught.exception)
    assert "the last rank fails" in text, f"the error does not show the rank's exception: {text}"


def _raise_in_last_rank() -> None:
    """Raise a ValueError on the last rank, and wait on the others. Runs in each launched process.

    The wait ends after 30 seconds, in case the launcher does not end the other ranks.
    """
    world = World.from_env(os.environ) or World()
    if world.rank == world.world_size - 1:
        raise ValueError("the last rank fails")
    threading.Event().wait(timeout=30)


def _check_connected_ranks(launcher: Launcher, size: int) -> None:
    """Check that Fabric connects the ranks, and that its collectives work."""
    fabric = Fabric(
        accelerator="cpu", devices=size, strategy="ddp", launcher=launcher, timeout=_TIMEOUT
    )
    sums = fabric.launch(_sum_of_ranks, return_all=True)
    assert_same(sums, [sum(range(size))] * size)


def _sum_of_ranks(fabric: Fabric) -> int:
    """Return the sum of the numbers of all ranks. Collective."""
    return fabric.all_reduce(fabric.global_rank, reduce_op="sum")


# -- checkpoint format ----------------------------------------------------------------------------


def check_checkpoint_io(checkpoint_io: CheckpointIO, folder: Path) -> None:
    """Check that a format behaves as :class:`fabric.checkpoint.CheckpointIO` documents.

    Args:
        checkpoint_io: the format. It must be picklable.
        folder: an empty folder that the checks may write to.

    Raises:
        AssertionError: a check fails. The text names the check and the difference.
    """
    checks = (
        _check_round_trip,
        _check_replacement,
        _check_missing,
        _check_truncated,
        _check_load_runs_no_code,
        _check_fabric_saves,
    )
    for check in checks:
        with failures_as_assertion_errors(check):
            check(checkpoint_io, folder)


def _plain_state() -> dict[str, Any]:
    """Return a state with the types, dtypes, values and keys that are easily lost in a file."""
    weight = torch.arange(12.0).reshape(3, 4)
    special_values = torch.tensor([1.5, float("nan"), float("inf")])
    return {
        # The column shares the memory of the weight, and is not contiguous.
        "model": OrderedDict(weight=weight, column=weight[:, 1], empty=torch.empty(0, 3)),
        "dtypes": [
            special_values.to(dtype)
            for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        ],
        "integers": (torch.tensor(3), torch.tensor([2**62]), torch.tensor([True, False])),
        "complex": torch.tensor([1 + 2j]),
        "numbers": {1: 2**70, "pi": 3.141592653589793, "infinite": float("-inf"), "flag": True},
        "texts": ["", "ä\n", b"\x00\xff", None],
        "set": {1, 2},
    }


def _check_round_trip(checkpoint_io: CheckpointIO, folder: Path) -> None:
    """Check that CheckpointIO.load returns the types, bits and keys that save was given."""
    path = folder / "round-trip"
    state = _plain_state()
    expected = copy.deepcopy(state)
    checkpoint_io.save(state, path)
    checkpoint_io.wait()
    assert_same(state, expected)  # save() has not changed its argument
    loaded = checkpoint_io.load(path)
    assert_same(loaded, expected)
    # A format that maps the file into memory must not write changes of the tensor into the file.
    loaded["model"]["weight"].add_(1)
    assert_same(checkpoint_io.load(path), expected)


def _check_replacement(checkpoint_io: CheckpointIO, folder: Path) -> None:
    """Check that CheckpointIO.save replaces a checkpoint, and keeps the old one if it fails."""
    path = folder / "replaced"
    for number in range(2):
        checkpoint_io.save({"number": number}, path)
        checkpoint_io.wait()
        assert_same(checkpoint_io.load(path), {"number": number})
    # A lock cannot be saved. A format that saves in the background raises in wait().
    with _assert_raises(Exception):
        checkpoint_io.save({"number": 2, "lock": threading.Lock()}, path)
        checkpoint_io.wait()
    assert_same(checkpoint_io.load(path), {"number": 1})


def _check_missing(checkpoint_io: CheckpointIO, folder: Path) -> None:
    """Check that loading or removing a missing checkpoint raises a CheckpointNotFoundError."""
    path = folder / "missing"
    for action in (checkpoint_io.load, checkpoint_io.remove):
        with _assert_raises(CheckpointNotFoundError):
            action(path)
    checkpoint_io.save({"number": 1}, path)
    checkpoint_io.wait()
    checkpoint_io.remove(path)
    with _assert_raises(CheckpointNotFoundError):
        checkpoint_io.load(path)


def _check_truncated(checkpoint_io: CheckpointIO, folder: Path) -> None:
    """Check that loading a truncated checkpoint raises a CheckpointError."""
    path = folder / "truncated"
    paths_before = set(folder.rglob("*"))
    checkpoint_io.save({"tensor": torch.arange(1000.0)}, path)
    checkpoint_io.wait()
    # A checkpoint may be a file or a folder of files. The largest file has the tensor.
    new_files = filter(Path.is_file, set(folder.rglob("*")) - paths_before)
    largest_file = max(new_files, key=_size_of_file)
    os.truncate(largest_file, _size_of_file(largest_file) // 2)
    with _assert_raises(CheckpointError):
        checkpoint_io.load(path)


def _size_of_file(file: Path) -> int:
    """Return the size of a file in bytes."""
    return file.stat().st_size


class _MakesFolder:
    """An object whose unpickling makes a folder, to show that loading ran code."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.path,)


def _check_load_runs_no_code(checkpoint_io: CheckpointIO, folder: Path) -> None:
    """Check that CheckpointIO.load runs no code of the file. save may refuse such an object."""
    path = folder / "code"
    # This folder is made if the object is unpickled.
    evidence = folder / "code-has-run"
    try:
        checkpoint_io.save({"object": _MakesFolder(str(evidence))}, path)
        checkpoint_io.wait()
        checkpoint_io.load(path)
    except Exception:  # noqa: BLE001 - save and load may refuse the object by any error
        pass
    assert not evidence.exists(), "loading the checkpoint has run code"


def _check_fabric_saves(checkpoint_io: CheckpointIO, folder: Path) -> None:
    """Check that Fabric saves and loads a model and its optimizer on two ranks."""
    strategy = DDPStrategy(checkpoint_io=checkpoint_io)
    with RankPool(2, strategy=strategy, timeout=_TIMEOUT) as pool:
        pool.run(_save_and_load, str(folder / "fabric"))


def _save_and_load(fabric: Fabric, path: str) -> None:
    """Save a trained model and its optimizer, and load them into others. Collective.

    Raises:
        AssertionError: the loaded state is not the saved one.
    """
    model, optimizer = _train_model(fabric, seed=1)
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 7})
    other_model, other_optimizer = _train_model(fabric, seed=2)
    # load() returns the entries for which it was passed no object.
    remaining_entries = fabric.load(path, {"model": other_model, "optimizer": other_optimizer})
    assert_same(remaining_entries, {"step": 7})
    assert_same(dict(other_model.state_dict()), dict(model.state_dict()))
    assert_same(other_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


def _train_model(fabric: Fabric, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a set-up model after one step, and its optimizer, whose state is not empty."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    fabric.backward(model(torch.randn(4, 3)).mean())
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer

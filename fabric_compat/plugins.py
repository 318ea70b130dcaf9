"""Precisions, environments, checkpoint formats and collectives with Lightning's methods."""

import inspect
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import cached_property, partial
from inspect import BoundArguments, Signature
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision as MixedPrecisionConfig
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from fabric.checkpoint.file import FullCheckpoint
from fabric.checkpoint.storage import RemotePath, local_copy, locate
from fabric.precision import LossScale, parse_precision
from fabric.precision import Precision as FabricPrecision
from fabric.store import find_store
from fabric.tree import map_tensors
from fabric.world import World, read_variable
from fabric_compat.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
    _is_slurm_interactive_mode,
    find_free_network_port,
    rank_of_process,
)
from fabric_compat.missing import missing

CollectibleGroup = dist.ProcessGroup
default_pg_timeout = dist.default_pg_timeout
_PRECISION_INPUT_INT = Literal[64, 32, 16]
_PRECISION_INPUT_STR_ALIAS = Literal["64", "32", "16", "bf16"]
_PRECISION_INPUT_STR = Literal[
    "16-true", "16-mixed", "bf16-true", "bf16-mixed", "32-true", "64-true"
]
_PRECISION_INPUT = _PRECISION_INPUT_INT | _PRECISION_INPUT_STR | _PRECISION_INPUT_STR_ALIAS


__getattr__ = partial(missing, __name__)


class Precision(FabricPrecision):
    """A precision with Lightning's methods. The default is 32-bit."""

    _default: Any = "32-true"

    def __init__(self, precision: Any = None, *_: Any, **__: Any) -> None:
        parsed = parse_precision(precision or self._default)
        # The dataclass is frozen: an assignment would raise.
        vars(self).update(vars(parsed))

    @property
    def precision(self) -> str:
        return self.name

    def convert_module(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, module: nn.Module
    ) -> nn.Module:
        """Convert a module in place, and return it, as in Lightning."""
        super().convert_module(module)
        return module

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new tensors have the dtype of a ``*-true`` precision."""
        if self.param_dtype is None:
            return nullcontext()
        return _DtypeContextManager(self.param_dtype)

    module_init_context = tensor_init_context

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let a subclass define ``forward_context`` without arguments, as in Lightning."""
        super().__init_subclass__(**kwargs)
        override = cls.__dict__.get("forward_context")
        # The only parameter is self. fabric passes the type of the device.
        if override is not None and len(inspect.signature(override).parameters) == 1:
            cls.forward_context = lambda self, device_type="": override(self)

    def forward_context(self, device_type: str = "") -> AbstractContextManager[Any]:
        """Return autocast, or the default dtype of a ``*-true`` precision."""
        if self.param_dtype is not None:
            return self.tensor_init_context()
        if not device_type:
            device_type = "cuda" if torch.cuda.is_available() else "cpu"
        return super().forward_context(device_type)

    @property
    def has_own_context(self) -> bool:
        """Whether a class of the user overrides :meth:`forward_context`. Strategies read it."""
        return type(self).forward_context is not Precision.forward_context

    @property
    def input_dtype(self) -> torch.dtype:
        """The dtype to which the floating inputs of a module are cast."""
        return self.param_dtype or torch.float32

    @property
    def _desired_input_dtype(self) -> torch.dtype:
        """The name of :attr:`input_dtype` that subclasses of Lightning's classes read."""
        return self.input_dtype

    def convert_input(self, data: Any) -> Any:
        """Cast the floating tensors in the inputs of a module, except under ``"32-true"``."""
        if self.name == "32-true":
            return data
        return _convert_fp_tensor(data, self.input_dtype)

    def convert_output(self, data: Any) -> Any:
        """Cast the floating tensors in a module's outputs to the default dtype of torch.

        Under ``"32-true"``, the outputs do not change.
        """
        if self.name == "32-true":
            return data
        return _convert_fp_tensor(data, torch.get_default_dtype())

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        tensor.backward(*args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        return optimizer.step(**kwargs)

    def main_params(self, optimizer: Optimizer) -> Any:
        for group in optimizer.param_groups:
            yield from group["params"]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing. Subclasses may override the methods below.

        ``Fabric.clip_gradients`` and the optimizer's step unscale gradients. ``Fabric.save`` saves
        the loss scale.
        """

    pre_backward = _do_nothing
    post_backward = _do_nothing
    unscale_gradients = _do_nothing
    load_state_dict = _do_nothing
    teardown = _do_nothing


_MIXED_NAMES = ("16-mixed", "bf16-mixed")


class MixedPrecision(Precision):
    """``"16-mixed"`` or ``"bf16-mixed"``.

    The loss scale begins with the settings of ``scaler``. During training, fabric changes a loss
    scale of its own, and not this object.

    Raises:
        ValueError: The precision is not one of the two, or ``"bf16-mixed"`` has a scaler.
    """

    def __init__(
        self, precision: str = "16-mixed", device: str = "cuda", scaler: Any = None
    ) -> None:
        # fabric passes an object, and scripts pass a name. Lightning takes no alias, such as 16.
        if not isinstance(precision, FabricPrecision) and precision not in _MIXED_NAMES:
            raise ValueError(
                f"Passed `{type(self).__name__}({precision=})`. "
                "Precision must be '16-mixed' or 'bf16-mixed'"
            )
        super().__init__(precision)
        if scaler is not None and self.loss_scale is None:
            raise ValueError(
                f"`precision={self.name!r}` does not use a scaler, found {scaler}: leave it out"
            )
        # The dataclass is frozen: an assignment would raise.
        vars(self).update(device=device, _scaler=scaler)
        if scaler is not None:
            scale = LossScale(
                init_scale=scaler.get_scale(), growth_interval=scaler.get_growth_interval()
            )
            vars(self).update(loss_scale=scale)

    @property
    def scaler(self) -> Any:
        """The object with the settings of the loss scale, or None if there is no loss scale."""
        scaler = vars(self)["_scaler"]
        if scaler is None and self.loss_scale is not None:
            scaler = torch.amp.GradScaler(
                vars(self)["device"],
                init_scale=self.loss_scale.init_scale,
                growth_interval=self.loss_scale.growth_interval,
            )
            # Kept, so that each access returns the same object.
            vars(self).update(_scaler=scaler)
        return scaler

    @property
    def input_dtype(self) -> torch.dtype:
        return self.compute_dtype or torch.float32


class HalfPrecision(Precision):
    """``"16-true"`` or ``"bf16-true"``."""

    _default = "16-true"


class DoublePrecision(Precision):
    """``"64-true"``."""

    _default = "64-true"


class FSDPPrecision(Precision):
    """A precision under ``"fsdp"``.

    Raises:
        ValueError: The precision is ``"64-true"``, or there is a scaler, which Lightning refuses,
            too.
    """

    def __init__(self, precision: Any, scaler: Any = None) -> None:
        super().__init__(precision)
        if self.name == "64-true":
            raise ValueError(
                f"`{precision=}` is not supported in FSDP. `precision` must be one of: '32-true', "
                "'16-true', 'bf16-true', '16-mixed', 'bf16-mixed'. Fabric(precision='64-true') "
                "computes in float64"
            )
        if scaler is not None:
            raise ValueError(
                f"`{precision=}` does not use a scaler, found {scaler}: write "
                "plugins=MixedPrecision('16-mixed', scaler=...)"
            )

    @cached_property
    def scaler(self) -> ShardedGradScaler | None:
        """The object with the settings of the loss scale, as in :class:`MixedPrecision`."""
        if self.loss_scale is None:
            return None
        return ShardedGradScaler(
            "cuda" if torch.cuda.is_available() else "cpu",
            init_scale=self.loss_scale.init_scale,
            growth_interval=self.loss_scale.growth_interval,
        )

    @property
    def mixed_precision_config(self) -> MixedPrecisionConfig:
        """The dtypes of FSDP, which ``FSDPStrategy(mixed_precision=...)`` takes."""
        dtype = self.compute_dtype or self.param_dtype or torch.float32
        return MixedPrecisionConfig(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)


def precision_object(value: Any) -> "Precision":
    """Return a precision, given by name or as an object of fabric, with Lightning's methods."""
    if isinstance(value, Precision):
        return value
    precision: Any = parse_precision(value)
    # The "*-mixed" precisions have a compute_dtype, and the "*-true" precisions a param_dtype.
    if precision.name == "64-true":
        return DoublePrecision()
    if precision.compute_dtype:
        return MixedPrecision(precision, "cuda" if torch.cuda.is_available() else "cpu")
    if precision.param_dtype:
        return HalfPrecision(precision)
    return Precision(precision)


def _convert_fp_tensor(data: Any, dst_type: torch.dtype) -> Any:
    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dst_type) if tensor.is_floating_point() else tensor

    return map_tensors(convert, data)


@contextmanager
def _DtypeContextManager(dtype: torch.dtype) -> Iterator[None]:
    """Make ``dtype`` the default dtype of torch during the block."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def set_default_rank() -> None:
    """Set the rank that ``rank_zero_only`` reads to the rank in the environment, unless it is set.

    Lightning sets the rank when it is imported. Fabric sets it when the process joins a job, which
    a single process need not do.
    """
    vars(rank_zero_only).setdefault("rank", rank_of_process() or 0)


def accepted_keywords(function: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that a function accepts."""
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


class AsEnvironment:
    """A :class:`ClusterEnvironment` as an environment of fabric."""

    def __init__(self, cluster: ClusterEnvironment, devices: int, num_nodes: int) -> None:
        """Adapt ``cluster``. ``devices`` is the number of devices and of processes per node."""
        self._cluster = cluster
        self._size = devices * num_nodes
        self._devices = devices
        self.name = type(cluster).__name__

    def detect(self, env: Mapping[str, str]) -> World | None:
        """Return the place of this process in its job, or None if no launcher started it.

        The cluster environment is told the number of processes and the rank, as in Lightning.
        """
        if read_variable(env, "FABRIC_STORE"):
            return World.from_env(env)  # fabric's own launchers started this rank
        cluster = self._cluster
        if not cluster.creates_processes_externally:
            return None
        local_rank = cluster.local_rank()
        node_rank = cluster.node_rank()
        # Told first: a LightningEnvironment returns these numbers below. The environments of
        # launchers ignore them, and return those of their variables.
        cluster.set_world_size(self._size)
        cluster.set_global_rank(node_rank * self._devices + local_rank)
        return World(
            rank=cluster.global_rank(),
            local_rank=local_rank,
            node_rank=node_rank,
            world_size=cluster.world_size(),
            local_world_size=self._devices,
            address=cluster.main_address,
            port=cluster.main_port,
        )


class CheckpointIO(ABC):
    """The base class of users' formats of checkpoints."""

    @abstractmethod
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None: ...

    @abstractmethod
    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]: ...

    @abstractmethod
    def remove_checkpoint(self, path: Any) -> None: ...

    # Fabric calls the methods below, see fabric.checkpoint.CheckpointIO.
    def save(self, state: Mapping[str, Any], path: Path) -> None:
        self.save_checkpoint(dict(state), path)

    def load(self, path: Path, *, weights_only: bool = True) -> dict[str, Any]:
        options = accepted_keywords(self.load_checkpoint, {"weights_only": weights_only})
        return self.load_checkpoint(path, **options)

    def remove(self, path: Path) -> None:
        self.remove_checkpoint(path)

    def wait(self) -> None:
        """Do nothing, because ``save`` is synchronous."""


def with_storage_options(io: CheckpointIO, storage_options: Any) -> CheckpointIO:
    """Return a copy of a format that saves with ``storage_options``."""
    copied: Any = copy(io)
    copied.save_checkpoint = partial(io.save_checkpoint, storage_options=storage_options)
    return copied


class TorchCheckpointIO(CheckpointIO):
    """One file by ``torch.save``. A save replaces the file atomically.

    A path may have a scheme, such as ``s3://``.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise TypeError(
                "storage_options: TorchCheckpointIO has none; write a subclass of CheckpointIO"
            )
        FullCheckpoint().save(checkpoint, locate(path))

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return what a file holds.

        Args:
            path: the file.
            map_location: where the tensors go, see ``torch.load``. The default is the CPU.
            weights_only: False rebuilds any object, which runs the code that the file names.

        Raises:
            UnsafeCheckpointError: the file holds objects that only running code can rebuild.
        """
        refuses_code = weights_only is not False  # None means True
        # FullCheckpoint always loads to the CPU.
        if map_location is not None:
            with local_copy(locate(path)) as local_path:
                return torch.load(local_path, map_location, weights_only=refuses_code)
        return FullCheckpoint().load(locate(path), weights_only=refuses_code)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a file or a folder. A path without either is not an error."""
        location = locate(path)
        if isinstance(location, RemotePath):
            if location.exists():
                location.files.rm(location.path, recursive=True)
        elif location.is_dir():
            shutil.rmtree(location)
        else:
            location.unlink(missing_ok=True)


_PLUGIN_INPUT = Precision | ClusterEnvironment | CheckpointIO


def _always() -> bool:
    return True


def _do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing: a single process needs no process group."""


def _new_group(**_: Any) -> Any:
    """Return an object that stands for the group of a single process."""
    return object()


class Collective:
    """Collectives on tensors, over a group that the object owns.

    Subclasses replace the five functions below, which are for a single process.
    """

    is_available: Any = staticmethod(_always)
    is_initialized: Any = staticmethod(_always)
    init_group: Any = staticmethod(_do_nothing)
    destroy_group: Any = staticmethod(_do_nothing)
    new_group: Any = staticmethod(_new_group)

    def __init__(self) -> None:
        self._group: Any = None

    @property
    def group(self) -> Any:
        """The group that the object owns."""
        if self._group is None:
            raise RuntimeError(f"{type(self).__name__} owns no group: call create_group() first")
        return self._group

    def setup(self, **kwargs: Any) -> Self:
        """Start the communication of the job, unless it has started."""
        if not self.is_initialized():
            self.init_group(**kwargs)
        return self

    def create_group(self, **kwargs: Any) -> Self:
        """Create the group that this object owns. The arguments are those of ``new_group``."""
        if self._group is not None:
            raise RuntimeError(f"{type(self).__name__} owns a group already")
        self._group = self.new_group(**kwargs)
        return self

    def teardown(self) -> Self:
        """Destroy the group that this object owns.

        Raises:
            RuntimeError: This object owns no group.
        """
        if self._group is None:
            # Not self.group, which may be the group of the whole job: others use that, too.
            raise RuntimeError(f"{type(self).__name__} does not own a group to destroy")
        self.destroy_group(self._group)
        self._group = None
        return self


class SingleDeviceCollective(Collective):
    """The collectives of one process, which return what they are given."""

    rank = 0
    world_size = 1

    def _return_tensor(self, tensor: Any = None, *_: Any, **__: Any) -> Any:
        return tensor

    def _return_first(self, _: Any, tensors: Any, *__: Any, **___: Any) -> Any:
        # The first argument is the tensor that torch would fill.
        return tensors[0]

    broadcast = _return_tensor
    all_reduce = _return_tensor
    reduce = _return_tensor
    recv = _return_tensor
    barrier = _return_tensor
    send = _return_tensor
    scatter = _return_first
    reduce_scatter = _return_first
    all_to_all = _return_first

    def gather(self, tensor: Tensor, *_: Any, **__: Any) -> list[Tensor]:
        return [tensor]

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        return [tensor]


def _init_process_group(**kwargs: Any) -> None:
    """Call ``init_process_group``, by default with the ranks and the store of ``fabric run``."""
    world = World.from_env(os.environ)
    # Whether the user says how the processes find each other.
    has_rendezvous = not kwargs.keys().isdisjoint({"init_method", "store"})
    if world is not None and world.store is not None and not has_rendezvous:
        job_store = find_store(world, kwargs.get("timeout", default_pg_timeout))
        # A Fabric of the same processes uses other keys of the store.
        kwargs["store"] = dist.PrefixStore("fabric_compat", job_store)
        kwargs.setdefault("rank", world.rank)
        kwargs.setdefault("world_size", world.world_size)
    dist.init_process_group(**kwargs)


def _new_process_group(**kwargs: Any) -> Any:
    # torch's function is looked up here, so that a test may replace it.
    return dist.new_group(**kwargs)


class TorchCollective(Collective):
    """``torch.distributed`` over a group, or without :meth:`create_group` over the whole job."""

    is_available = staticmethod(dist.is_available)
    is_initialized = staticmethod(dist.is_initialized)
    init_group = staticmethod(_init_process_group)
    new_group = staticmethod(_new_process_group)

    @property
    def group(self) -> Any:
        """The group that the object owns, or the group of the whole job."""
        if self._group is None:
            return dist.group.WORLD
        return self._group

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)

    def setup(self, main_address: str | None = None, main_port: Any = None, **kwargs: Any) -> Self:
        """Start ``torch.distributed``, unless it has started.

        The variables ``MASTER_ADDR`` and ``MASTER_PORT`` are the same afterwards, so that a later
        job does not find the address of this one.

        Args:
            main_address: The address of rank 0, unless ``MASTER_ADDR`` is set.
            main_port: The port of rank 0, unless ``MASTER_PORT`` is set.
            **kwargs: The arguments of ``init_process_group``.
        """
        added_names: list[str] = []
        for name, value in (("MASTER_ADDR", main_address), ("MASTER_PORT", main_port)):
            if value is not None and name not in os.environ:
                os.environ[name] = str(value)
                added_names.append(name)
        try:
            return super().setup(**kwargs)
        finally:
            for name in added_names:
                del os.environ[name]

    @staticmethod
    def _convert_to_native_op(op: Any) -> Any:
        """Return a reduction of torch, given as it is or by its name.

        Raises:
            ValueError: there is no such reduction.
        """
        if not isinstance(op, str):
            # torch has two classes: dist.ReduceOp.SUM is a RedOpType, and a ReduceOp has a factor.
            if type(op).__name__ in ("ReduceOp", "RedOpType"):
                return op
            raise ValueError(f"Unsupported op {op!r} of type {type(op).__name__}")
        native_op = getattr(dist.ReduceOp, op.upper(), None)
        if native_op is None:
            raise ValueError(f"op {op!r} is not a member of `ReduceOp`")
        return native_op

    @staticmethod
    def destroy_group(group: Any) -> None:
        # A rank outside of the group has no group to destroy.
        if group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
            dist.destroy_process_group(group)


def _bind(signature: Signature, group: Any, args: Any, kwargs: Any) -> BoundArguments:
    """Bind arguments to a collective of torch. A reduction given as a string becomes a ReduceOp."""
    bound = signature.bind(*args, **kwargs, group=group)
    if "op" in bound.arguments:
        op = bound.arguments["op"]
        bound.arguments["op"] = TorchCollective._convert_to_native_op(op)
    return bound


def _barrier_method(name: str) -> Any:
    """Return a method that waits for the other ranks of the group, if this rank is in the group."""
    signature = inspect.signature(getattr(dist, name))

    def method(self: TorchCollective, *args: Any, **kwargs: Any) -> None:
        bound = _bind(signature, self.group, args, kwargs)
        if self.group != dist.GroupMember.NON_GROUP_MEMBER:
            # Looked up at each call, so that a test may replace torch's function.
            getattr(dist, name)(**bound.arguments)

    method.__name__ = name
    method.__doc__ = f"Call ``torch.distributed.{name}`` over the group."
    return method


def _collective_method(name: str, output_position: int) -> Any:
    """Return a method that calls a collective of torch and returns the argument that torch fills.

    ``output_position`` is the position of this argument in the signature of torch, from 0.
    """
    signature = inspect.signature(getattr(dist, name))

    def method(self: TorchCollective, *args: Any, **kwargs: Any) -> Any:
        bound = _bind(signature, self.group, args, kwargs)
        # Looked up at each call, so that a test may replace torch's function.
        getattr(dist, name)(**bound.arguments)
        return list(bound.arguments.values())[output_position]

    method.__name__ = name
    method.__doc__ = f"Call ``torch.distributed.{name}`` over the group, and return its output."
    return method


# Define the methods of TorchCollective that have the names of torch's functions.
for _name in ("barrier", "monitored_barrier"):
    setattr(TorchCollective, _name, _barrier_method(_name))
for _name in ("gather", "gather_object"):  # the list to fill comes after the tensor to send
    setattr(TorchCollective, _name, _collective_method(_name, output_position=1))
for _name in (
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "broadcast_object_list",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object_list",
    "send",
):
    setattr(TorchCollective, _name, _collective_method(_name, output_position=0))

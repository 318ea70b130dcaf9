"""Precisions, environments, checkpoint formats and collectives, as Lightning Fabric's objects."""

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.utils.distributed import get_free_port as find_free_network_port
from torch.optim import Optimizer

from fabric import environments as our_environments  # imports of environments find this file
from fabric.checkpoint.file import FullCheckpoint
from fabric.precision import LossScale, parse_precision
from fabric.precision import Precision as OurPrecision
from fabric.tree import map_tensors
from fabric.world import World, read, read_integer
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


class Precision(OurPrecision):
    """A precision of ours with the methods of Lightning's: 32-bit, unless a class below says otherwise."""

    _default: Any = "32-true"

    def __init__(self, precision: Any = None, *_: Any, **__: Any) -> None:
        vars(self).update(
            vars(parse_precision(precision or self._default))
        )  # the fields are frozen

    @property
    def precision(self) -> str:
        return self.name

    def convert_module(self, module: nn.Module) -> nn.Module:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().convert_module(module)
        return module

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.param_dtype is None else _DtypeContextManager(self.param_dtype)

    module_init_context = tensor_init_context

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let a subclass override ``forward_context`` without arguments, as in Lightning."""
        super().__init_subclass__(**kwargs)
        override = cls.__dict__.get("forward_context")
        if override is not None and len(inspect.signature(override).parameters) == 1:
            cls.forward_context = lambda self, device_type="": override(self)

    def forward_context(self, device_type: str = "") -> AbstractContextManager[Any]:
        if not device_type:
            device_type = "cuda" if torch.cuda.is_available() else "cpu"
        return super().forward_context(device_type)

    @property
    def has_own_context(self) -> bool:
        return type(self).forward_context is not Precision.forward_context

    def convert_input(self, data: Any) -> Any:
        return _convert_fp_tensor(data, self.param_dtype or torch.float32)

    def convert_output(self, data: Any) -> Any:
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

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """For subclasses: gradients are unscaled by ``clip_gradients`` and the step, the scale is in checkpoints."""

    pre_backward = post_backward = unscale_gradients = load_state_dict = teardown = _nothing


class MixedPrecision(Precision):
    """``"16-mixed"`` or ``"bf16-mixed"``; ``device`` and ``scaler`` are those of the Fabric."""

    def __init__(
        self, precision: str = "16-mixed", device: str = "cuda", scaler: Any = None
    ) -> None:
        super().__init__(precision)
        if scaler is not None and self.loss_scale is not None:
            scale = LossScale(
                init_scale=scaler.get_scale(), growth_interval=scaler.get_growth_interval()
            )
            vars(self).update(loss_scale=scale)


class HalfPrecision(Precision):
    """``"16-true"`` or ``"bf16-true"``."""

    _default = "16-true"


class DoublePrecision(Precision):
    """``"64-true"``."""

    _default = "64-true"


class FSDPPrecision(Precision):
    """Any precision, under ``"fsdp"``."""


def precision_object(value: Any) -> "Precision":
    """A precision by any of its names, or one of ours, as an object with Lightning's methods."""
    if isinstance(value, Precision):
        return value
    row = parse_precision(value)
    kind = MixedPrecision if row.compute_dtype else HalfPrecision if row.param_dtype else Precision
    return DoublePrecision() if row.name == "64-true" else kind(row)  # pyright: ignore[reportArgumentType]


def _convert_fp_tensor(data: Any, dst_type: torch.dtype) -> Any:
    return map_tensors(lambda each: each.to(dst_type) if each.is_floating_point() else each, data)


@contextmanager
def _DtypeContextManager(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


class ClusterEnvironment:
    """The rank of this process in its job, as fabric detects it; a subclass of the user may define its own."""

    _ours: ClassVar[Any] = None  # environments of ours; None is all of them

    def __init__(self, **_: Any) -> None:
        super().__init__()

    @classmethod
    def detect(cls) -> bool:
        return our_environments.detect(os.environ, cls._ours) is not None

    @property
    def _place(self) -> World:
        return (our_environments.detect(os.environ, self._ours) or (None, World()))[1]

    @property
    def creates_processes_externally(self) -> bool:
        return self.detect()

    @property
    def main_address(self) -> str:
        return self._place.address or "127.0.0.1"

    @property
    def main_port(self) -> int:
        return self._place.port or find_free_network_port()

    def world_size(self) -> int:
        return self._place.world_size

    def global_rank(self) -> int:
        return self._place.rank

    def local_rank(self) -> int:
        return self._place.local_rank

    def node_rank(self) -> int:
        return self._place.node_rank

    def _nothing(self, *args: Any) -> None:
        """For subclasses: does not change the variables."""

    set_world_size = set_global_rank = validate_settings = teardown = _nothing


class AsEnvironment:
    """A :class:`ClusterEnvironment` as an environment of ours."""

    def __init__(self, cluster: ClusterEnvironment, devices: int, num_nodes: int) -> None:
        self._cluster = cluster
        self._size = devices * num_nodes
        self._devices = devices
        self.name = type(cluster).__name__

    def detect(self, env: Mapping[str, str]) -> World | None:
        if read(env, "FABRIC_STORE"):
            return World.from_env(env)  # a rank of fabric's own launchers
        cluster = self._cluster
        if not cluster.creates_processes_externally:
            return None
        local = cluster.local_rank()
        node = cluster.node_rank()
        cluster.set_world_size(self._size)
        cluster.set_global_rank(node * self._devices + local)
        return World(
            rank=cluster.global_rank(), local_rank=local, node_rank=node, world_size=cluster.world_size(),
            local_world_size=self._devices, address=cluster.main_address, port=cluster.main_port,
        )  # fmt: skip


class LightningEnvironment(ClusterEnvironment):
    """Any launcher that fabric knows, or none."""


class TorchElasticEnvironment(ClusterEnvironment):
    """torchrun, and launchers that set its variables, such as Kubeflow."""

    _ours = (our_environments.TorchrunEnvironment(),)


KubeflowEnvironment = TorchElasticEnvironment


class SLURMEnvironment(ClusterEnvironment):
    """SLURM; ``auto_requeue`` and ``requeue_signal`` are for Lightning's Trainer."""

    _ours = (our_environments.SlurmEnvironment(),)

    @staticmethod
    def job_id() -> int | None:
        return read_integer(os.environ, "SLURM_JOB_ID")

    @staticmethod
    def job_name() -> str | None:
        return os.environ.get("SLURM_JOB_NAME")


def _is_slurm_interactive_mode() -> bool:
    return SLURMEnvironment.job_name() in ("bash", "interactive")


class MPIEnvironment(ClusterEnvironment):
    """Open MPI, MPICH and launchers that set their variables, such as LSF's ``jsrun``; no mpi4py."""

    _ours = (our_environments.OpenMPIEnvironment(), our_environments.MPICHEnvironment())


LSFEnvironment = MPIEnvironment


class CheckpointIO(ABC):
    """A format of checkpoints, for subclasses of the user."""

    @abstractmethod
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None: ...

    @abstractmethod
    def load_checkpoint(
        self, path: Any, map_location: Any = None, **kwargs: Any
    ) -> dict[str, Any]: ...

    @abstractmethod
    def remove_checkpoint(self, path: Any) -> None: ...

    # The names in fabric.
    def save(self, state: Mapping[str, Any], path: Path) -> None:
        self.save_checkpoint(dict(state), path)

    def load(self, path: Path) -> dict[str, Any]:
        return self.load_checkpoint(path)

    def wait(self) -> None:
        """Does nothing: this save is synchronous."""


class TorchCheckpointIO(CheckpointIO):
    """One file by ``torch.save``, replaced at once."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise TypeError(
                "storage_options: TorchCheckpointIO has none; write a CheckpointIO of your own"
            )
        FullCheckpoint().save(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, map_location: Any = None, **kwargs: Any) -> dict[str, Any]:
        return FullCheckpoint().load(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        FullCheckpoint().remove(Path(path))


_PLUGIN_INPUT = Precision | ClusterEnvironment | CheckpointIO


class Collective:
    """Collectives on tensors, over a group that the object owns."""

    is_available: Any = staticmethod(lambda: True)
    is_initialized: Any = is_available
    init_group: Any = staticmethod(lambda *_, **__: None)
    destroy_group: Any = init_group
    new_group: Any = staticmethod(lambda **_: object())

    def __init__(self) -> None:
        self._group: Any = None

    @property
    def group(self) -> Any:
        if self._group is None:
            raise RuntimeError(f"{type(self).__name__} owns no group: create_group() first")
        return self._group

    def setup(self, **kwargs: Any) -> Self:
        if not self.is_initialized():
            self.init_group(**kwargs)
        return self

    def create_group(self, **kwargs: Any) -> Self:
        if self._group is not None:
            raise RuntimeError(f"{type(self).__name__} owns a group already")
        self._group = self.new_group(**kwargs)
        return self

    def teardown(self) -> Self:
        self.destroy_group(self.group)
        self._group = None
        return self


class SingleDeviceCollective(Collective):
    """The identity, for one process."""

    rank = 0
    world_size = 1

    def _same(self, tensor: Any = None, *_: Any, **__: Any) -> Any:
        return tensor

    def _list(self, tensor: Tensor, *_: Any, **__: Any) -> list[Tensor]:
        return [tensor]

    def _only(self, _: Any, parts: Any, *__: Any, **___: Any) -> Any:
        return parts[0]

    broadcast = all_reduce = reduce = recv = barrier = send = _same
    gather = _list
    scatter = reduce_scatter = all_to_all = _only

    def all_gather(self, tensor_list: list[Tensor], tensor: Tensor) -> list[Tensor]:
        return [tensor]


class TorchCollective(Collective):
    """``torch.distributed`` over a group; the whole job without :meth:`create_group`."""

    is_available = staticmethod(dist.is_available)
    is_initialized = staticmethod(dist.is_initialized)
    init_group = staticmethod(dist.init_process_group)
    new_group = staticmethod(dist.new_group)

    @property
    def group(self) -> Any:
        return dist.group.WORLD if self._group is None else self._group

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self.group)

    def setup(self, main_address: str | None = None, main_port: Any = None, **kwargs: Any) -> Self:
        if main_address is not None and main_port is not None and "init_method" not in kwargs:
            os.environ.setdefault("MASTER_ADDR", main_address)
            os.environ.setdefault("MASTER_PORT", str(main_port))
        return super().setup(**kwargs)

    @staticmethod
    def destroy_group(group: Any) -> None:
        if group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
            dist.destroy_process_group(group)


def _of_torch(name: str, result: int) -> Any:
    function: Any = getattr(dist, name)
    signature = inspect.signature(function)

    def method(self: TorchCollective, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs, group=self.group)
        if isinstance(op := given.arguments.get("op"), str):
            given.arguments["op"] = getattr(dist.ReduceOp, op.upper())
        if "barrier" not in name or self.group != dist.GroupMember.NON_GROUP_MEMBER:
            function(*given.args, **given.kwargs)
        return None if "barrier" in name else [*given.arguments.values()][result]

    method.__name__ = name
    method.__doc__ = f"``torch.distributed.{name}`` over the group; returns what it has filled."
    return method


for _name in (
    "all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "monitored_barrier", "recv", "reduce", "reduce_scatter", "scatter",
    "scatter_object_list", "send",
):  # fmt: skip
    setattr(TorchCollective, _name, _of_torch(_name, int(_name.startswith("gather"))))

"""Utilities of Lightning Fabric that its clients use, under the names of all of its files."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from lightning_utilities.core import (
    rank_zero as _rank_zero,  # our own name: that of the module is taken by imports of it
)
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.enums import StrEnum as LightningEnum
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from fabric import seed as seeding
from fabric import tree
from fabric.launchers.base import is_interactive
from fabric.world import World
from fabric_compat.missing import refuse
from fabric_compat.plugins import find_free_network_port
from fabric_compat.throughput import Throughput, ThroughputMonitor, get_available_flops, measure_flops


def __getattr__(name: str) -> Any:
    if name.startswith(("_TORCH_GREATER_EQUAL_", "_TORCH_LESS_EQUAL_")):
        asked = tuple(int(part) for part in name.split("EQUAL_")[1].split("_") if part.isdecimal())
        here = tuple(int(part) for part in torch.__version__.split(".")[: len(asked)])
        return here >= asked if "GREATER" in name else here <= asked
    return getattr(_rank_zero, name) if hasattr(_rank_zero, name) else refuse(__name__, name)


# types
_PATH = str | Path
_DEVICE = torch.device | str | int
_MAP_LOCATION_TYPE = torch.device | str | Callable[..., Any] | dict[str, str] | None
_PARAMETERS = Iterator[Parameter]
ProcessGroup = dist.ProcessGroup
CollectibleGroup = dist.ProcessGroup
group = dist.group
_IS_WINDOWS, _IS_INTERACTIVE = sys.platform == "win32", is_interactive()


@runtime_checkable
class Optimizable(Protocol):
    """Has a state and makes steps."""

    param_groups: list[Any]
    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]
    step: Callable[..., Any]


Steppable = _Stateful = Optimizable


class MisconfigurationException(Exception):
    """Raised by nothing here: the errors are those of ``fabric.errors``."""


class PossibleUserWarning(UserWarning):
    """A warning that may be a false alarm."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Hide every :class:`PossibleUserWarning`, of which this package makes none."""
    import warnings

    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)


class AttributeDict(dict[str, Any]):
    """A dictionary whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    __setattr__ = dict.__setitem__

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        del self[name]

    def __repr__(self) -> str:
        width = max((len(str(name)) for name in self), default=0) + 1
        return "\n".join(f"{name + ':':<{width}} {value!r}" for name, value in self.items())


# seed


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed python, numpy and torch; without a seed that of ``PL_GLOBAL_SEED``, or 0.

    ``workers`` says whether loader workers get streams of their own, which they have in any case.

    Raises:
        ValueError: the seed, or the variable, is no integer from 0 below 2**32.
    """
    chosen = int(os.environ.get("PL_GLOBAL_SEED", 0) if seed is None else seed)
    if not 0 <= chosen < 2**32:
        raise ValueError(f"seed={chosen} is not from 0 to 2**32 - 1")
    if verbose:
        rank_zero_info(f"Seed set to {chosen}")
    os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"] = str(chosen), str(int(workers))
    return seeding.seed_everything(chosen)


def reset_seed() -> None:
    """Seed again with the last seed, if there was one."""
    if "PL_GLOBAL_SEED" in os.environ:
        seed_everything(workers=os.environ.get("PL_SEED_WORKERS") == "1", verbose=False)


def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """A ``worker_init_fn`` that gives the workers of each rank streams of their own."""
    seeding.WorkerSeeding(_get_rank() or 0 if rank is None else rank)(worker_id)


def _collect_rng_states(include_cuda: bool = True) -> dict[str, Any]:
    return seeding.rng_state()


def _set_rng_states(rng_state_dict: dict[str, Any]) -> None:
    seeding.set_rng_state(rng_state_dict)


# data


def move_data_to_device(batch: Any, device: _DEVICE) -> Any:
    """The tensors of a collection, and whatever has a method ``to``, on a device."""
    return tree.to_device(batch, torch.device(device))


def convert_to_tensors(data: Any, device: _DEVICE) -> Any:
    """The numbers of a collection as tensors on a device, and its tensors there."""
    numbers = apply_to_collection(data, (bool, int, float), torch.tensor)
    return tree.to_device(numbers, torch.device(device))


def convert_tensors_to_scalars(data: Any) -> Any:
    """The tensors of one element in a collection as numbers."""
    return apply_to_collection(data, Tensor, Tensor.item)


def _set_sampler_epoch(dataloader: Any, epoch: int) -> None:
    for sampler in (getattr(dataloader, "sampler", None), getattr(dataloader, "batch_sampler", None)):
        getattr(sampler, "set_epoch", bool)(epoch)


def has_iterable_dataset(dataloader: Any) -> bool:
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def sized_len(dataloader: Any) -> int | None:
    try:
        return len(dataloader)
    except (TypeError, NotImplementedError):
        return None


def has_len(dataloader: Any) -> bool:
    return sized_len(dataloader) is not None


def suggested_max_num_workers(local_world_size: int) -> int:
    """Cores of this machine for the workers of each of its processes.

    Raises:
        ValueError: there is no process.
    """
    if local_world_size < 1:
        raise ValueError(f"local_world_size={local_world_size} is less than 1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size - 1)


class DistributedSamplerWrapper(DistributedSampler[Any]):
    """A ``DistributedSampler`` over what a sampler yields; ``setup_dataloaders`` needs none."""

    def __init__(self, sampler: Sampler[Any], *args: Any, **kwargs: Any) -> None:
        self._sampler = sampler
        super().__init__(list(sampler), *args, **kwargs)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self.dataset: Any = list(self._sampler)
        return (self.dataset[index] for index in super().__iter__())


def _update_dataloader(dataloader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    from torch.utils.data import BatchSampler

    copied: Any = object.__new__(type(dataloader))
    batches = BatchSampler(sampler, dataloader.batch_size or 1, dataloader.drop_last)
    vars(copied).update({**vars(dataloader), "sampler": sampler, "batch_sampler": batches})
    return copied


# distributed


def _distributed_is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_shared_filesystem(strategy: Any, path: _PATH | None = None, timeout: int = 3) -> bool:
    """Whether all processes see the same folder at ``path``, the current one by default. Collective."""
    folder, mark = Path(Path.cwd() if path is None else path), None
    if strategy.world_size == 1 or strategy.runtime.world.num_nodes == 1:
        return True
    if strategy.is_global_zero:
        import tempfile

        with tempfile.NamedTemporaryFile(dir=folder, prefix=".shared-") as file:
            mark = strategy.broadcast(Path(file.name).name)
            return strategy.reduce_boolean_decision(True)
    mark = strategy.broadcast(mark)
    return strategy.reduce_boolean_decision((folder / str(mark)).exists())


def _get_default_process_group_backend_for_device(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _get_rank() -> int | None:
    place = World.from_env(os.environ)
    return None if place is None else place.rank


def _sync_ddp_if_available(result: Tensor, group: Any = None, reduce_op: Any = None) -> Tensor:
    if _distributed_is_initialized():
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        named = getattr(ReduceOp, reduce_op.upper(), ReduceOp.SUM) if isinstance(reduce_op, str) else reduce_op
        dist.all_reduce(result, ReduceOp.SUM if is_mean or named is None else named, group)
        if is_mean:
            result.div_(dist.get_world_size(group))
    return result


def _gather_all_tensors(result: Tensor, group: Any = None) -> list[Tensor]:
    size = dist.get_world_size(group)
    shapes: list[Any] = [None] * size
    dist.all_gather_object(shapes, tuple(result.shape), group)
    parts = [result.new_empty(shape) for shape in shapes]
    for rank, part in enumerate(parts):
        part.copy_(result) if rank == dist.get_rank(group) else None
        dist.broadcast(part, group=group, group_src=rank)
    return parts


# models, optimizers, checkpoints


def _optimizer_to_device(optimizer: Optimizer, device: _DEVICE) -> None:
    for parameter, state in optimizer.state.items():
        optimizer.state[parameter] = move_data_to_device(state, device)


def _optimizers_to_device(optimizers: Any, device: _DEVICE) -> None:
    for optimizer in optimizers:
        _optimizer_to_device(optimizer, device)


def _has_meta_device_parameters_or_buffers(obj: Any, recurse: bool = True) -> bool:
    if isinstance(obj, Optimizer):
        return any(each.is_meta for group in obj.param_groups for each in group["params"])
    return any(each.is_meta for each in (*obj.parameters(recurse), *obj.buffers(recurse)))


def _materialize(module: nn.Module, device: _DEVICE) -> None:
    module.to_empty(device=device, recurse=False)
    reset: Any = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise TypeError(f"{type(module).__name__} is on the meta device and has no reset_parameters() to fill it")
    reset()


def _materialize_meta_tensors(module: nn.Module, device: _DEVICE) -> None:
    for each in module.modules():
        if _has_meta_device_parameters_or_buffers(each, recurse=False):
            _materialize(each, device)


class _EmptyInit(torch.overrides.TorchFunctionMode):
    """Within, the functions of ``torch.nn.init`` leave tensors as they are."""

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self._enabled = enabled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._enabled and getattr(func, "__module__", None) == "torch.nn.init":
            return (kwargs or {}).get("tensor", args[0] if args else None)
        return func(*args, **(kwargs or {}))


def _load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """``torch.load`` of a path, a path with a scheme, or an open file; runs no code unless ``weights_only=False``."""
    is_safe = weights_only is not False
    if hasattr(path_or_url, "read") or "://" not in str(path_or_url):
        return torch.load(path_or_url, map_location, weights_only=is_safe)
    if str(path_or_url).startswith("http"):
        return torch.hub.load_state_dict_from_url(str(path_or_url), map_location=map_location, weights_only=is_safe)
    with get_filesystem(path_or_url).open(str(path_or_url), "rb") as file:
        return torch.load(file, map_location, weights_only=is_safe)


def _lazy_load(filename: _PATH) -> Any:
    """A checkpoint whose tensors are read from the file when they are used."""
    return torch.load(filename, map_location="cpu", mmap=True, weights_only=True)


def _materialize_tensors(collection: Any) -> Any:
    return tree.map_tensors(Tensor.clone, collection)


class _NotYetLoadedTensor(Tensor):
    """No tensor is one: those of :func:`_lazy_load` are plain ones, in memory that is the file."""


def get_filesystem(path: _PATH, **kwargs: Any) -> Any:
    """The fsspec file system of a path."""
    from fsspec.core import url_to_fs

    return url_to_fs(str(path), **kwargs)[0]


def _is_local_file_protocol(path: _PATH) -> bool:
    return "://" not in str(path) or str(path).startswith("file://")


def _is_dir(fs: Any, path: _PATH, strict: bool = False) -> bool:
    return fs.isdir(str(path))


def _atomic_save(checkpoint: dict[str, Any], filepath: _PATH) -> None:
    from fabric.checkpoint.file import FullCheckpoint

    FullCheckpoint().save(checkpoint, Path(filepath))


def _load_distributed_checkpoint(checkpoint_folder: Path) -> dict[str, Any]:
    import tempfile

    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(checkpoint_folder, Path(folder) / "file")
        content = torch.load(Path(folder) / "file", weights_only=True)
    extra = checkpoint_folder / "meta.pt"
    return content | (torch.load(extra, weights_only=True) if extra.exists() else {})


# loggers


def _convert_params(params: dict[str, Any] | Namespace | None) -> dict[str, Any]:
    return vars(params) if isinstance(params, Namespace) else params or {}


def _flatten_dict(params: MutableMapping[Any, Any], delimiter: str = "/", parent_key: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in params.items():
        key = f"{parent_key}{delimiter}{name}" if parent_key else str(name)
        value = vars(value) if isinstance(value, Namespace) else value
        flat |= _flatten_dict(value, delimiter, key) if isinstance(value, MutableMapping) else {key: value}
    return flat


def _sanitize_params(params: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value if isinstance(value, bool | int | float | str | Tensor) else str(value)
        for name, value in params.items()
    }


def _convert_json_serializable(params: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(params), default=str))


def _add_prefix(metrics: Mapping[str, float], prefix: str, separator: str) -> Mapping[str, float]:
    return {f"{prefix}{separator}{name}": value for name, value in metrics.items()} if prefix else metrics

"""The utilities that users of Lightning Fabric import, under all of Lightning's module names."""

import copy
import json
import logging
import os
import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, is_dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Self

import torch
import torch.distributed as dist

# Imported under another name, because lightning.fabric.utilities.rank_zero is this file.
from lightning_utilities.core import rank_zero as _rank_zero
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.enums import StrEnum as LightningEnum
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.checkpoint.stateful import Stateful as _Stateful
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from fabric import seed as seeding
from fabric import tree
from fabric.checkpoint import FullCheckpoint, ShardedCheckpoint
from fabric.checkpoint.storage import locate
from fabric.errors import ConfigurationError
from fabric.launchers.base import is_interactive
from fabric.strategies.init_module import SkipRandomInit
from fabric.world import available_cores
from fabric_compat.accelerators import CUDAAccelerator, MPSAccelerator
from fabric_compat.environments import rank_of_process
from fabric_compat.missing import missing
from fabric_compat.plugins import (
    ClusterEnvironment,
    CollectibleGroup,
    find_free_network_port,
    set_default_rank,
)
from fabric_compat.throughput import (
    Throughput,
    ThroughputMonitor,
    get_available_flops,
    measure_flops,
)


def __getattr__(name: str) -> Any:
    """Return a name that this file does not define: a version flag, or a name of ``rank_zero``.

    Python calls this function. A flag such as ``_TORCH_GREATER_EQUAL_2_1`` compares versions.
    """
    if name.startswith("_TORCH_GREATER_EQUAL_"):
        return torch.__version__ >= name.removeprefix("_TORCH_GREATER_EQUAL_").replace("_", ".")
    if not hasattr(_rank_zero, name):
        return missing(__name__, name)
    # Functions such as rank_zero_warn() read the rank. It is set here, and not when this file is
    # imported, because the variables of the rank may not be set yet at that time.
    set_default_rank()
    return getattr(_rank_zero, name)


# messages

# Scripts set the level of the logger of this name.
_log = logging.getLogger("lightning.fabric")


def _open_log() -> None:
    """Make messages visible, unless the program has configured the logger or the root logger."""
    if _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)
    if not _log.hasHandlers():
        _log.addHandler(logging.StreamHandler())
        # A root logger that is configured later would print the messages once more.
        _log.propagate = False


def rank_zero_info(*args: Any, **kwargs: Any) -> None:
    """Log a message on rank 0, by default on standard error."""
    set_default_rank()
    _log_on_rank_zero(logging.INFO, *args, **kwargs)


def rank_zero_debug(*args: Any, **kwargs: Any) -> None:
    """Log a message at the level DEBUG on rank 0."""
    set_default_rank()
    _log_on_rank_zero(logging.DEBUG, *args, **kwargs)


@_rank_zero.rank_zero_only
def _log_on_rank_zero(level: int, *args: Any, stacklevel: int = 4, **kwargs: Any) -> None:
    """Log a message. By default, its line is that of the caller of ``rank_zero_info``."""
    _open_log()
    _log.log(level, *args, stacklevel=stacklevel, **kwargs)


# types
_PATH = str | Path
_DEVICE = torch.device | str | int
_MAP_LOCATION_TYPE = torch.device | str | Callable[..., Any] | dict[str, str] | None
_PARAMETERS = Iterator[nn.Parameter]
group = dist.group
_IS_WINDOWS = sys.platform == "win32"
_IS_INTERACTIVE = is_interactive()
_TORCHMETRICS_GREATER_EQUAL_1_0_0 = RequirementCache("torchmetrics>=1.0.0")


Optimizable = Optimizer
Steppable = Optimizer


# The error of fabric for which Lightning has another name, so that a script catches it by either.
MisconfigurationException = ConfigurationError


class PossibleUserWarning(UserWarning):
    """A warning that may be a false alarm."""


class LightningDeprecationWarning(DeprecationWarning):
    """A warning of a name that Lightning will remove. This package emits none."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Hide every :class:`PossibleUserWarning`. This package emits none."""
    import warnings

    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)


class AttributeDict(dict[str, Any]):
    """A dictionary whose entries are also attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self[name]

    __setattr__ = dict.__setitem__

    __delattr__ = dict.__delitem__


# seed


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python, NumPy and torch, and return the seed.

    Args:
        seed: The seed. The default is the variable ``PL_GLOBAL_SEED``. Without the variable it is
            0, with a warning.
        workers: Whether the workers of loaders get random streams that differ by worker and by
            rank, in ``setup_dataloaders``.
        verbose: Whether rank 0 prints the seed, and warns.

    Raises:
        ValueError: The seed or the variable is not an integer from 0 to 2**32 - 1.
    """
    if seed is None:
        if verbose and "PL_GLOBAL_SEED" not in os.environ:
            set_default_rank()
            # The level makes the warning name the line that calls this function.
            _rank_zero.rank_zero_warn("No seed found, seed set to 0", stacklevel=5)
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
    seed = seeding.seed_everything(int(seed))
    if verbose:
        rank_zero_info(f"Seed set to {seed}")
    # Read by reset_seed(), by setup_dataloaders(), and by processes that this process starts.
    os.environ["PL_GLOBAL_SEED"] = str(seed)
    os.environ["PL_SEED_WORKERS"] = str(int(workers))
    return seed


def reset_seed() -> None:
    """Seed again with the last seed, if any."""
    if "PL_GLOBAL_SEED" in os.environ:
        seed_everything(workers=os.environ.get("PL_SEED_WORKERS") == "1", verbose=False)


def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """Seed a loader worker as Lightning does, with a stream for each worker and rank.

    ``setup_dataloaders`` uses this function after :func:`seed_everything` with ``workers=True``.
    DataLoader calls it in each worker.
    """
    if rank is None:
        rank = _get_rank() or 0
    # torch has seeded this worker with the base seed of the loader, plus its number.
    base_seed = torch.initial_seed() - worker_id
    seeds = _generate_seed_sequence(base_seed, worker_id, rank, count=3)
    torch.manual_seed(seeds[0])
    random.seed(seeds[1] << 32 | seeds[2])
    # numpy is optional. If the script does not use it, it need not be seeded.
    if "numpy" in sys.modules:
        import numpy

        sequence = numpy.random.SeedSequence([base_seed, worker_id, rank])
        numpy.random.seed(sequence.generate_state(4))


def _generate_seed_sequence(
    base_seed: int, worker_id: int, global_rank: int, count: int
) -> list[int]:
    """Return seeds of 64 bits that differ by worker and by rank.

    The last step of MurmurHash3 mixes the numbers, and Knuth's generator MMIX draws from the
    result. The constants are Lightning's, so that the random numbers are those of Lightning.
    """
    mask = 2**64 - 1  # the arithmetic is that of 64-bit integers
    state = (base_seed << 32) | (worker_id << 16) | global_rank
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        state ^= state >> 33
        state = (state * factor) & mask
    state ^= state >> 33
    seeds: list[int] = []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1) & mask
        seeds.append(state)
    return seeds


def _collect_rng_states(include_cuda: bool = True) -> dict[str, Any]:
    """Return the states of the random streams, under Lightning's names and fabric's.

    ``"torch.cuda"`` is the list of the states of all CUDA devices, which is empty as long as this
    process has used none. This function starts no device.
    """
    if not include_cuda:
        return seeding.RandomStreams(("python", "numpy", "torch")).state()
    states = seeding.rng_state()
    states["torch.cuda"] = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["torch.cuda"] = torch.cuda.get_rng_state_all()
    return states


def _set_rng_states(rng_state_dict: dict[str, Any]) -> None:
    """Restore the random streams to a result of :func:`_collect_rng_states`, or to Lightning's."""
    seeding.set_rng_state(rng_state_dict)
    if "torch.cuda" in rng_state_dict:
        torch.cuda.set_rng_state_all(rng_state_dict["torch.cuda"])


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Restore the random states after the block, which may draw numbers or set seeds."""
    states = _collect_rng_states(include_cuda)
    try:
        yield
    finally:
        _set_rng_states(states)


# data


def move_data_to_device(batch: Any, device: _DEVICE) -> Any:
    """Move the tensors of a collection, and its objects with a method ``to``, to a device."""
    return tree.to_device(batch, torch.device(device))


def convert_to_tensors(data: Any, device: _DEVICE) -> Any:
    """Convert the numbers and arrays of a collection to tensors, and move tensors to a device.

    Booleans become uint8, which has a sum, integers int64, and other numbers float32.
    """
    # bool is a subclass of int, and numpy.float64 of float.
    types: list[Any] = [bool, int, float]
    # numpy is optional. Before its import there are no arrays.
    if "numpy" in sys.modules:
        types.append(sys.modules["numpy"].ndarray)
    tensors = apply_to_collection(data, tuple(types), _to_tensor)
    return tree.to_device(tensors, torch.device(device))


def _to_tensor(value: Any) -> Tensor:
    """Convert a number or an array of numpy. See :func:`convert_to_tensors`."""
    if isinstance(value, bool):
        return torch.tensor(value, dtype=torch.uint8)
    if isinstance(value, int):
        return torch.tensor(value)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float32)
    return torch.from_numpy(value)


def convert_tensors_to_scalars(data: Any) -> Any:
    """Convert the tensors of a collection to numbers.

    Raises:
        ValueError: a tensor has no elements, or several.
    """
    return apply_to_collection(data, Tensor, _to_number)


def _to_number(tensor: Tensor) -> Any:
    if tensor.numel() != 1:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} does not contain a single element"
        )
    return tensor.item()


def _set_sampler_epoch(dataloader: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a loader's samplers that have this method.

    These are the sampler, the batch sampler, and the sampler of the batch sampler.
    """
    batch_sampler: Any = getattr(dataloader, "batch_sampler", None)
    samplers: list[Any] = [getattr(dataloader, "sampler", None), batch_sampler]
    inner_sampler = getattr(batch_sampler, "sampler", None)
    if inner_sampler is not samplers[0]:
        samplers.append(inner_sampler)
    for sampler in samplers:
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def has_iterable_dataset(dataloader: Any) -> bool:
    return isinstance(getattr(dataloader, "dataset", None), IterableDataset)


def sized_len(dataloader: Any) -> int | None:
    """Return the length of a loader, or None if it has no length."""
    try:
        return len(dataloader)
    except (TypeError, NotImplementedError):
        return None


def has_len(dataloader: Any) -> bool:
    """Return whether a loader has a length. A length of 0 is a warning."""
    length = sized_len(dataloader)
    if length == 0:
        set_default_rank()
        _rank_zero.rank_zero_warn(
            f"`{type(dataloader).__name__}` returned 0 length. Its dataset may be empty, or "
            "smaller than a batch under drop_last=True",
            stacklevel=5,
        )
    return length is not None


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return the number of loader workers that each process of this machine should have.

    Raises:
        ValueError: The number of processes, ``local_world_size``, is below 1.
    """
    if local_world_size < 1:
        raise ValueError(f"`local_world_size` should be >= 1, got {local_world_size}")
    return max(1, available_cores() // local_world_size - 1)


class DistributedSamplerWrapper(DistributedSampler[Any]):
    """A ``DistributedSampler`` that shares the indices of another sampler among the ranks.

    All ranks draw all indices when an iteration begins.
    """

    def __iter__(self) -> Iterator[Any]:
        # The "dataset" is a sampler: DistributedSampler reads only its length.
        order = list(self.dataset)  # type: ignore[arg-type]
        for position in super().__iter__():
            yield order[position]


def _distributed_sampler(
    dataloader: DataLoader[Any], sampler_kwargs: Mapping[str, int]
) -> DistributedSampler[Any]:
    """Return the sampler of this rank's share of the samples, in Lightning's order.

    Args:
        dataloader: The loader of all samples.
        sampler_kwargs: The arguments ``num_replicas`` and ``rank``.
    """
    is_shuffled = isinstance(dataloader.sampler, RandomSampler)
    if is_shuffled or isinstance(dataloader.sampler, SequentialSampler):
        # torch's own samplers need no wrapper: DistributedSampler shuffles the dataset itself.
        sampler_class = DistributedSampler
        samples: Any = dataloader.dataset
    else:
        sampler_class = DistributedSamplerWrapper
        samples = dataloader.sampler
    return sampler_class(
        samples,
        num_replicas=sampler_kwargs["num_replicas"],
        rank=sampler_kwargs["rank"],
        shuffle=is_shuffled,
        seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),
    )


def _update_dataloader(dataloader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Return a copy of a loader that takes its samples from another sampler."""
    copied = copy.copy(dataloader)
    batch_sampler: Any = copy.copy(dataloader.batch_sampler)
    if batch_sampler is not None:
        batch_sampler.sampler = sampler
    # DataLoader.__setattr__ refuses to replace the samplers.
    vars(copied).update(sampler=sampler, batch_sampler=batch_sampler)
    return copied


# distributed


def _distributed_is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_shared_filesystem(strategy: Any, path: _PATH | None = None, timeout: int = 3) -> bool:
    """Return whether all processes see the same file or folder at ``path``.

    The default of ``path`` is the current folder. A path with a scheme, such as ``s3://``, is
    shared. ``timeout`` has no effect. Collective: every rank must call it.

    Raises:
        FileNotFoundError: A process has no file or folder at ``path``.
        OSError: Rank 0 cannot create a file there. All ranks raise it.
    """
    if path is not None and not _is_local_file_protocol(path):
        return True
    if strategy.world_size == 1:
        return True
    folder = Path(path or ".").resolve()
    path_of_first_rank = strategy.broadcast(str(folder))
    if not strategy.reduce_boolean_decision(path_of_first_rank == str(folder)):
        return False
    if not strategy.reduce_boolean_decision(folder.exists()):
        raise FileNotFoundError(
            "Unable to determine if the path belongs to a shared filesystem. A process has no "
            f"{folder}: create it on every node first"
        )
    if folder.is_file():
        folder = folder.parent
    # Rank 0 creates a file, and each rank looks for it.
    with ExitStack() as stack:
        file_name = None
        problem = None
        if strategy.is_global_zero:
            try:
                file_name = stack.enter_context(NamedTemporaryFile(dir=folder)).name
            except OSError as error:
                problem = str(error)
        # Also after an error: the other ranks wait for this message.
        file_name, problem = strategy.broadcast((file_name, problem))
        if problem is not None:
            raise OSError(
                f"Unable to determine if {folder} is shared: the first rank cannot create a file "
                f"in it ({problem}). Pass a folder that can be written"
            )
        # Within the block, whose end removes the file: the call waits until all ranks have looked.
        return strategy.reduce_boolean_decision(Path(file_name).exists())


_get_default_process_group_backend_for_device = dist.get_default_backend_for_device


def _get_rank() -> int | None:
    return rank_of_process()


def name_of_reduction(reduce_op: Any) -> Any:
    """Return the name of a reduction, given as a name, a ``ReduceOp``, or None for the sum."""
    if reduce_op is None:
        return "sum"
    name = str(getattr(reduce_op, "name", reduce_op)).lower()
    if name == "avg":
        return "mean"
    return name


def _sync_ddp_if_available(result: Tensor, group: Any = None, reduce_op: Any = None) -> Tensor:
    """Reduce a tensor over the ranks in place, by default to the sum, and return it. Collective.

    Without a process group, the tensor is returned unchanged.
    """
    if not _distributed_is_initialized():
        return result
    name = name_of_reduction(reduce_op)
    # ReduceOp.AVG is not available for every backend.
    if name == "mean":
        dist.all_reduce(result, ReduceOp.SUM, group)
        return result.copy_(result / dist.get_world_size(group))
    dist.all_reduce(result, getattr(ReduceOp, name.upper()), group)
    return result


def _gather_all_tensors(result: Tensor, group: Any = None) -> list[Tensor]:
    """Return the tensors of all ranks, without gradients. Collective."""
    tensors: list[Any] = [None] * dist.get_world_size(group)
    # Gathered as objects, because the shapes may differ by rank.
    dist.all_gather_object(tensors, result.detach().cpu(), group)
    return [tensor.to(result.device) for tensor in tensors]


def _init_dist_connection(
    cluster_environment: ClusterEnvironment,
    torch_distributed_backend: str,
    global_rank: int | None = None,
    world_size: int | None = None,
    **kwargs: Any,
) -> None:
    """Start ``torch.distributed`` at the address of an environment, unless it has started.

    Collective. The default ranks are those of the environment. Programs that start their own
    processes call this function. ``Fabric`` does not.
    """
    if _distributed_is_initialized():
        return
    if global_rank is None:
        global_rank = cluster_environment.global_rank()
    if world_size is None:
        world_size = cluster_environment.world_size()
    dist.init_process_group(
        torch_distributed_backend,
        init_method=f"tcp://{cluster_environment.main_address}:{cluster_environment.main_port}",
        rank=global_rank,
        world_size=world_size,
        **kwargs,
    )


# devices


def _parse_gpu_ids(
    gpus: int | str | Sequence[int] | None, include_cuda: bool = False, include_mps: bool = False
) -> list[int] | None:
    """Return the indices of the GPUs that ``gpus`` selects, or None if it selects none.

    Args:
        gpus: a number of GPUs, -1 for all, a list of indices, or the spelling of these as a string.
        include_cuda: whether the GPUs are those of NVIDIA and AMD.
        include_mps: whether the GPU is that of a Mac, if ``include_cuda`` is false.

    Raises:
        MisconfigurationException: there are not so many GPUs.
        ValueError: no kind of GPU is included.
    """
    if gpus is None or str(gpus).strip() in ("0", "[]"):
        return None
    if include_cuda:
        accelerator = CUDAAccelerator()
    elif include_mps:
        accelerator = MPSAccelerator()
    else:
        raise ValueError(f"_parse_gpu_ids({gpus!r}): include_cuda=True or include_mps=True")
    return [device.index for device in accelerator.parse_devices(gpus)]


def _determine_root_gpu_device(gpus: Sequence[Any] | None) -> Any:
    """Return the first of the GPUs, or None if there are none."""
    if gpus is None:
        return None
    return gpus[0]


# models, optimizers, checkpoints


class _DeviceDtypeModuleMixin(nn.Module):
    """A module that knows its device and its dtype."""

    def __init__(self) -> None:
        super().__init__()
        # Moved and cast with the module, for a module without parameters.
        self._empty_tensor = torch.empty(0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the module. ``to()`` and methods such as ``half()`` call this method."""
        self._empty_tensor = fn(self._empty_tensor)
        return super()._apply(fn, recurse)

    @property
    def device(self) -> torch.device:
        """The device of the parameters. Without parameters, the device of the last ``to()``."""
        return next(self.parameters(), self._empty_tensor).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters. Without parameters, the dtype of the last ``to()``."""
        return next(self.parameters(), self._empty_tensor).dtype


def _optimizer_to_device(optimizer: Optimizer, device: _DEVICE) -> None:
    for parameter, state in optimizer.state.items():
        optimizer.state[parameter] = move_data_to_device(state, device)


def _optimizers_to_device(optimizers: Any, device: _DEVICE) -> None:
    for optimizer in optimizers:
        _optimizer_to_device(optimizer, device)


def _has_meta_device_parameters_or_buffers(obj: Any, recurse: bool = True) -> bool:
    """Return whether a module or an optimizer has tensors on the meta device."""
    if isinstance(obj, Optimizer):
        tensors = []
        for param_group in obj.param_groups:
            tensors.extend(param_group["params"])
    else:
        tensors = [*obj.parameters(recurse), *obj.buffers(recurse)]
    return any(tensor.is_meta for tensor in tensors)


def _materialize(module: nn.Module, device: _DEVICE) -> None:
    """Allocate the tensors of a module, without its submodules, and fill them."""
    module.to_empty(device=device, recurse=False)
    # An AttributeError is right here: without this method, nothing can fill the tensors.
    module.reset_parameters()  # type: ignore[operator]


def _materialize_meta_tensors(module: nn.Module, device: _DEVICE) -> None:
    """Materialize the submodules that have tensors on the meta device."""
    for child in module.modules():
        if _has_meta_device_parameters_or_buffers(child, recurse=False):
            _materialize(child, device)


def _EmptyInit(enabled: bool = True) -> Any:
    """Return a context that skips random initialization.

    Values that a checkpoint does not fill are nan.
    """
    return SkipRandomInit() if enabled else nullcontext()


def _load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Call ``torch.load`` with a path, a path with a scheme, or an open file.

    The checkpoint cannot run code unless ``weights_only=False``.
    """
    if hasattr(path_or_url, "read"):
        may_run_code = weights_only is False  # None does not allow it
        return torch.load(path_or_url, map_location, weights_only=not may_run_code)
    with get_filesystem(path_or_url).open(str(path_or_url), "rb") as file:
        return _load(file, map_location, weights_only)


def _lazy_load(filename: _PATH) -> Any:
    """Load a checkpoint whose tensors are read from the file when they are used."""
    return torch.load(filename, map_location="cpu", mmap=True, weights_only=True)


def _materialize_tensors(collection: Any) -> Any:
    return tree.map_tensors(Tensor.clone, collection)


class _NotYetLoadedTensor(Tensor):
    """A class without objects: :func:`_lazy_load` returns plain memory-mapped tensors."""


def get_filesystem(path: _PATH, **kwargs: Any) -> Any:
    """Return the fsspec file system of a path."""
    from fsspec.core import url_to_fs

    return url_to_fs(str(path), **kwargs)[0]


def _is_local_file_protocol(path: _PATH) -> bool:
    return "://" not in str(path) or str(path).startswith("file://")


def _is_dir(fs: Any, path: _PATH, strict: bool = False) -> bool:
    return fs.isdir(str(path))


def _move_state_into(
    source: MutableMapping[str, Any], destination: MutableMapping[str, Any], keys: Iterable[str]
) -> None:
    """Move entries of a checkpoint to the user's state. Objects with a state dict load theirs."""
    for key in list(keys):  # the keys may be those of source
        state = source.pop(key)
        if isinstance(destination.get(key), _Stateful):
            destination[key].load_state_dict(state)
        else:
            destination[key] = state


def _atomic_save(checkpoint: dict[str, Any], filepath: _PATH) -> None:
    FullCheckpoint().save(checkpoint, locate(filepath))


def _load_distributed_checkpoint(checkpoint_folder: Path) -> dict[str, Any]:
    return ShardedCheckpoint().load(checkpoint_folder)


# loggers


def _convert_params(params: dict[str, Any] | Namespace | None) -> dict[str, Any]:
    """Return hyperparameters as a dictionary. None stands for no parameters."""
    if isinstance(params, Namespace):
        return vars(params)
    return params or {}


def _flatten_dict(
    params: MutableMapping[Any, Any], delimiter: str = "/", parent_key: str = ""
) -> dict[str, Any]:
    """Return the values of nested dictionaries by their paths, such as ``"optimizer/lr"``.

    Dataclasses, namespaces and lists of dictionaries are flattened, too.

    Args:
        params: The dictionary.
        delimiter: The string between the keys of a path.
        parent_key: The path of ``params`` itself.
    """
    flat: dict[str, Any] = {}
    for name, value in params.items():
        key = str(name)
        if parent_key:
            key = f"{parent_key}{delimiter}{name}"
        content = _as_dict(value)
        if isinstance(content, MutableMapping):
            flat.update(_flatten_dict(content, delimiter, key))
        else:
            flat[key] = value
    return flat


def _as_dict(value: Any) -> Any:
    """Return a value that :func:`_flatten_dict` flattens as a dictionary, and others unchanged."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Namespace):
        return vars(value)
    if isinstance(value, list) and all(isinstance(item, MutableMapping) for item in value):
        return dict(enumerate(value))
    return value


def _sanitize_callable_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with text or results in place of classes and functions."""
    return {name: _sanitize_callable(value) for name, value in params.items()}


def _sanitize_callable(value: Any) -> Any:
    """Return the name of a class, the result of a function, and other values unchanged.

    A function that needs arguments, fails, or returns another function is replaced by its name.
    """
    if isinstance(value, type):
        return value.__name__
    if not callable(value):
        return value
    name = getattr(value, "__name__", None)
    try:
        result = value()
    except Exception:  # noqa: BLE001 - the function is the user's
        return name
    if callable(result):
        return name
    return result


def _sanitize_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with text in place of values that TensorBoard does not take."""
    sanitized: dict[str, Any] = {}
    for name, value in params.items():
        # Before the script has imported numpy, there are no scalars of numpy.
        if "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].generic):
            value = value.item()
        if not isinstance(value, bool | int | float | str | Tensor):
            value = str(value)
        sanitized[name] = value
    return sanitized


def _convert_json_serializable(params: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(params), default=str))


def _add_prefix(metrics: Mapping[str, float], prefix: str, separator: str) -> Mapping[str, float]:
    """Return metrics whose names begin with ``prefix`` and ``separator``, if there is a prefix."""
    if not prefix:
        return metrics
    return {f"{prefix}{separator}{name}": value for name, value in metrics.items()}

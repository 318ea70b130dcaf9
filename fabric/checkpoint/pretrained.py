"""Weights as Hugging Face's libraries store them: safetensors files, and folders with an index."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from fabric.checkpoint.adapters import ADAPTER_CONFIG, ADAPTER_FILES
from fabric.checkpoint.atomic import read_errors
from fabric.checkpoint.file import FullCheckpoint, require_file
from fabric.checkpoint.safetensors import map_safetensors
from fabric.checkpoint.sharded_reader import INDEX
from fabric.checkpoint.state import PlainState, State, plain_name
from fabric.checkpoint.storage import Location, local_copy
from fabric.errors import CheckpointError, ConfigurationError

__all__ = [
    "INDEX_OF_WEIGHTS",
    "WEIGHTS_FILES",
    "Rename",
    "add_tied_names",
    "check_shard_size",
    "drop_tied_names",
    "encode_index",
    "group_by_size",
    "holds_weights",
    "is_adapter",
    "map_weights",
    "rename_entries",
    "weights_name",
]

T = TypeVar("T")

# The name in the module by the name in the file, as a mapping or a function. None in place of a
# name leaves the entry out.
Rename = Mapping[str, str | None] | Callable[[str], str | None] | None

SUFFIX = ".safetensors"
INDEX_OF_WEIGHTS = "model.safetensors.index.json"
# The names of a file with all weights, or of the index of several files. The libraries read the
# first of these files that a folder has.
WEIGHTS_FILES = (
    "model.safetensors",
    INDEX_OF_WEIGHTS,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def holds_weights(location: Location) -> bool:
    """Return whether :func:`map_weights` should read a location: a folder or a safetensors file.

    A folder without weights counts, too. :func:`map_weights` then raises an error.
    """
    return location.name.endswith(SUFFIX) or location.is_dir()


def is_adapter(location: Location) -> bool:
    """Return whether a location is the folder of an adapter of PEFT."""
    return location.is_dir() and (location / ADAPTER_CONFIG).is_file()


def map_weights(
    request: str, location: Location, file_names: Sequence[str] = WEIGHTS_FILES
) -> dict[str, Any]:
    """Return the weights in a safetensors file or in a folder, mapped into memory, by name.

    Runs no code from the files. The values are read when they are used. A ``.bin`` file is verified
    first. A ``.bin`` file in torch's format before 1.6 is read into memory.

    Args:
        request: the user's request, a text for errors.
        location: the file or folder.
        file_names: the names to look for in a folder. The first file that exists is read.

    Raises:
        CheckpointNotFoundError: there is nothing at ``location``.
        CheckpointError: the folder has no weights, or a file is damaged.
    """
    if not location.is_dir():
        return _map_file(request, location)
    with read_errors(request):
        names = [name for name in file_names if (location / name).is_file()]
    if not names:
        raise _missing_weights_error(request, location, file_names)
    path = location / names[0]
    if path.name.endswith(".json"):
        return _map_indexed_files(request, path)
    return _map_file(request, path)


def _map_indexed_files(request: str, index: Location) -> dict[str, Any]:
    """Return the weights in the files that an index names, mapped into memory.

    ``request`` is the user's request, a text for errors.
    """
    files: dict[str, dict[str, Any]] = {}
    weights: dict[str, Any] = {}
    with read_errors(request):
        file_names = json.loads(index.read_bytes())["weight_map"]
        for name, file_name in file_names.items():
            # A forged index may name files outside of the folder, by a path with slashes.
            if Path(file_name).name != file_name:
                raise ValueError(f"{file_name!r} in its {index.name} is not the name of a file")
            if file_name not in files:
                files[file_name] = _map_file(request, index.parent / file_name)
            if name not in files[file_name]:
                raise ValueError(f"{name} is not in {file_name}, where its {index.name} says")
            weights[name] = files[file_name][name]
    return weights


def _map_file(request: str, path: Location) -> dict[str, Any]:
    """Return the weights in one file, mapped into memory.

    ``request`` is the user's request, a text for errors.
    """
    if not path.name.endswith(SUFFIX):
        # A ``.bin`` file is a state dict that torch.save() wrote.
        return FullCheckpoint().load(path)
    # Raises if there is no file at the path.
    require_file(request, path)
    # The mapping remains valid after the local copy of a remote file is removed.
    with read_errors(request), local_copy(path) as local_path:
        return dict(map_safetensors(local_path))


def _missing_weights_error(
    request: str, folder: Location, file_names: Sequence[str]
) -> CheckpointError:
    """Return the error for a folder without weights, with a suggestion that fits what is there.

    Args:
        request: the user's request, a text for errors.
        folder: the folder.
        file_names: the names of files, of which the folder should have one.
    """
    expected = f"a folder with {', '.join(file_names[:-1])} or {file_names[-1]}"
    if file_names == ADAPTER_FILES:
        return CheckpointError(
            request,
            problem="the folder has the config of an adapter, and not its weights",
            expected=expected,
            suggestion="a complete copy of the folder",
        )
    names = sorted(path.name for path in folder.iterdir())
    weights = [name for name in names if name.endswith(SUFFIX)]
    suggestion = (
        f"fabric.load({str(folder)!r}, {{'model': model}}) for a folder that fabric.save wrote; "
        "its error says how to convert a folder that torch wrote"
    )
    if ADAPTER_CONFIG in names:
        # A model with an adapter would have read ADAPTER_FILES.
        config = f"peft.PeftConfig.from_pretrained({str(folder)!r})"
        return CheckpointError(
            request,
            problem="the folder has an adapter of PEFT, and the model has no adapter",
            expected="a model with the adapter, before it is set up",
            suggestion=f"peft.get_peft_model(model, {config})",
        )
    if INDEX not in names and weights:
        suggestion = f"fabric.load_raw({str(folder / weights[0])!r}, model) for one of its files"
    return CheckpointError(
        request,
        problem="the folder has no weights in Hugging Face's format",
        expected=expected,
        suggestion=suggestion,
    )


def rename_entries(request: str, content: State, rename: Rename) -> PlainState:
    """Return content under the names that the user gives to its entries.

    Args:
        request: the user's request, a text for errors.
        content: the entries of a state dict.
        rename: the new name of each name, as a mapping or a function. Names that a mapping does not
            have stay as they are. An entry whose new name is None is left out. If ``rename`` itself
            is None, all names stay. A name that a compiled module has saved, such as
            ``_orig_mod.weight``, may be renamed as ``weight``, too.

    Raises:
        ConfigurationError: two entries get the same name.
    """
    # A shallow copy keeps the versions of layers that torch attaches to a state dict.
    renamed: Any = copy.copy(content)
    if rename is None:
        return renamed
    renamed.clear()  # of its entries
    # For the error: by new name, the name in ``content``.
    sources: dict[str, str] = {}
    for name, value in content.items():
        new_name = _new_name(name, rename)
        name_if_not_compiled = plain_name(name)
        if new_name == name and name_if_not_compiled != name:
            # ``rename`` does not have the name of the compiled module. It may have the name without
            # the part that torch.compile has added.
            new_name = _new_name(name_if_not_compiled, rename)
        if new_name is None:
            continue
        if new_name in renamed:
            problem = f"{sources[new_name]} and {name} are both renamed to {new_name}"
            raise ConfigurationError(request, problem, expected="one name for each entry")
        renamed[new_name] = value
        sources[new_name] = name
    return renamed


def _new_name(
    name: str, rename: Mapping[str, str | None] | Callable[[str], str | None]
) -> str | None:
    """Return the new name of an entry, or None to leave it out. See :func:`rename_entries`."""
    if isinstance(rename, Mapping):
        return rename.get(name, name)
    return rename(name)


def add_tied_names(module: nn.Module, content: State) -> PlainState:
    """Return a copy of the content in which a tied parameter has its value under all its names.

    Files of weights have a tied parameter once, under one of its names.

    Args:
        module: the module that is loaded, sharded or not.
        content: the values by name.
    """
    completed: Any = copy.copy(content)
    for names in _tied_names(module):
        stored_names = [name for name in names if name in content]
        if stored_names:
            for name in names:
                completed.setdefault(name, content[stored_names[0]])
    return completed


def drop_tied_names(module: nn.Module, state: Mapping[str, T]) -> dict[str, T]:
    """Return a module's state with one name for each tied parameter: the first one in the state.

    Args:
        module: the module, sharded or not.
        state: the values by name.
    """
    reduced = dict(state)
    for names in _tied_names(module):
        stored_names = [name for name in state if name in names]
        for name in stored_names[1:]:
            del reduced[name]
    return reduced


def _tied_names(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several names."""
    names_of_parameters: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of_parameters.setdefault(parameter, []).append(plain_name(name))
    return [names for names in names_of_parameters.values() if len(names) > 1]


def weights_name(number: int, count: int) -> str:
    """Return the name of one of several files of weights. The first file has the number 1."""
    return f"model-{number:05}-of-{count:05}{SUFFIX}"


def encode_index(file_names: Mapping[str, str], total_bytes: int | None = None) -> bytes:
    """Return the content of the index of several files of weights.

    Args:
        file_names: the file that holds a tensor, by the name of the tensor.
        total_bytes: the size of all tensors, which readers such as transformers show. None leaves
            it out.
    """
    metadata = {}
    if total_bytes is not None:
        metadata["total_size"] = total_bytes
    return json.dumps({"metadata": metadata, "weight_map": file_names}, indent=2).encode()


def check_shard_size(max_shard_gb: float) -> None:
    """Raise a ConfigurationError if the size of the largest file is not a number above 0."""
    if not max_shard_gb > 0:  # also for NaN
        raise ConfigurationError(
            f"max_shard_gb={max_shard_gb!r}", expected="a size in GB of more than 0"
        )


def group_by_size(tensors: Mapping[str, Tensor], max_bytes: float) -> list[dict[str, Tensor]]:
    """Split tensors into groups of at most ``max_bytes`` each. The order of the tensors stays.

    A tensor that is larger than ``max_bytes`` is a group of its own. Without tensors there is one
    empty group.
    """
    groups: list[dict[str, Tensor]] = [{}]
    size_of_last_group = 0
    for name, tensor in tensors.items():
        fits = size_of_last_group + tensor.nbytes <= max_bytes
        last_is_empty = not groups[-1]
        if not fits and not last_is_empty:
            groups.append({})
            size_of_last_group = 0
        groups[-1][name] = tensor
        size_of_last_group += tensor.nbytes
    return groups

"""The user's objects as plain state. Knows nothing of files, processes or strategies."""

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.serialization import get_safe_globals
from torch.utils.data import DataLoader

from fabric._torch import COMPILED_MODULE, has_custom_state_loading, is_dtensor
from fabric.checkpoint.encoding import (
    PLAIN_COLLECTIONS,
    KeyPath,
    has_pickled_items,
    to_json,
    unsupported,
)
from fabric.checkpoint.full_tensors import FullStateStrategy
from fabric.errors import ArgumentTypeError, CheckpointError, ConfigurationError
from fabric.seed import rng_state, set_rng_state
from fabric.tree import map_tensors

__all__ = [
    "FORMAT_VERSION",
    "METADATA_KEY",
    "CheckValue",
    "Filter",
    "MutableState",
    "PlainState",
    "ReadModule",
    "State",
    "StateDictStrategy",
    "StateDicts",
    "check_entries",
    "check_plain",
    "check_version",
    "is_stateful",
    "join_names",
    "plain_name",
    "pop_metadata",
    "select_content",
    "uncompiled_state",
]

METADATA_KEY = "__fabric__"
FORMAT_VERSION = 1

State = Mapping[str, Any]  # values, or objects that have a state, by name
MutableState = MutableMapping[str, Any]
PlainState = dict[str, Any]  # plain values by name, see [Note: plain state]
Filter = Mapping[str, Callable[[str, Any], bool]]  # see select_content()
ReadModule = Callable[[nn.Module], State]  # see StateDicts.read_module()
CheckValue = Callable[[str, Any], None]  # raises for an entry that is not saved, see check_plain()

_MAX_NAMES = 12  # names that an error gives in full before it only counts the others


class StateDictStrategy(FullStateStrategy, Protocol):
    """The part of a parallel strategy that reads and restores state dicts."""

    def get_module_state_dict(self, module: nn.Module, *, sharded: bool = False) -> PlainState:
        """Return the state dict of a prepared module. With ``sharded`` it has DTensors."""
        ...

    def load_module_state_dict(
        self, module: nn.Module, state_dict: State, strict: bool = True
    ) -> None:
        """Load a state dict, sharded or full, into a prepared module."""

    def load_optimizer_state_dict(self, optimizer: Optimizer, state_dict: State) -> None:
        """Load a state dict, sharded or full, into an optimizer."""


@dataclass(frozen=True)
class StateDicts:
    """The state dicts of a job's objects, with the names of the user's own modules.

    The names have no wrapper modules, such as those of ``torch.compile``.

    Attributes:
        strategy: reads and restores prepared modules and optimizers.
        prepared_module: returns the prepared module behind a set-up module.
    """

    strategy: StateDictStrategy
    prepared_module: Callable[[nn.Module], nn.Module]

    def read_module(self, module: nn.Module) -> State:
        """Return the names and values of a module, with shards as DTensors.

        The tensors are the module's own, so that writing into them loads the module.
        """
        prepared = self.prepared_module(module)
        return uncompiled_state(self.strategy.get_module_state_dict(prepared, sharded=True))

    def read_module_tensors(self, request: str, module: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of a module by name, with shards as DTensors.

        ``request`` is the user's request, a text for errors.

        Raises:
            ConfigurationError: the module has no tensors, or a meta tensor.
        """
        tensors: dict[str, Tensor] = {}
        for name, value in self.read_module(module).items():
            if not isinstance(value, Tensor):
                continue
            if value.is_meta:
                problem = f"{name} is a meta tensor, which has no values"
                raise ConfigurationError(request, problem, expected="a module with values")
            tensors[name] = value
        if not tensors:
            problem = f"{type(module).__name__} has no parameters and no buffers"
            raise ConfigurationError(request, problem)
        return tensors

    def load_module(self, module: nn.Module, content: State, strict: bool) -> None:
        """Load a state into a module.

        Args:
            module: the set-up module.
            content: the values by plain names. Tensors are full, or sharded as in
                :meth:`read_module`.
            strict: whether a name that is missing on either side is an error.
        """
        prepared = self.prepared_module(module)
        expected = self.strategy.get_module_state_dict(prepared, sharded=True)
        # A checkpoint has plain names. Here the values get the names of the prepared module, which
        # may contain wrapper modules of torch.compile.
        renamed = uncompiled_state(content, expected)
        self.strategy.load_module_state_dict(prepared, renamed, strict)

    def gather_shards(self, content: PlainState) -> PlainState:
        """Return content with full tensors in place of shards. Collective.

        It runs no code of the user, so that it does not fail on one rank alone.
        """
        return self.strategy.full_state(content)

    def read(self, state: State, check_value: CheckValue) -> PlainState:
        """Return the states of objects that have one, and other values unchanged.

        No tensor is copied.

        Args:
            state: names and objects.
            check_value: is called with the name and the value of each entry without a state.

        Raises:
            ArgumentTypeError: ``check_value`` has refused an entry, or an entry contains itself or
                is a ``DataLoader`` that is not set up.
            ConfigurationError: an entry is called ``"__fabric__"``.
        """
        check_entries(state, check_value)
        content = dict(state)
        for name, value in state.items():
            if isinstance(value, nn.Module):
                content[name] = self.read_module(value)
            elif is_stateful(value):
                content[name] = value.state_dict()
        # Called for its error: to_json() passes a collection that contains itself to
        # _refuse_loop(), which raises. gather_shards() would follow the loop forever.
        to_json(content, _refuse_loop)
        return content

    def back_up(self, state: MutableState, names: Iterable[str], undo: ExitStack) -> None:
        """Have ``undo`` restore entries to their present state, and the random states.

        Called before a load changes the entries, so that an error leaves them as they were. A
        module is copied only if a module has code of its own for loading, which may raise. torch's
        code does not raise for a state that :func:`check_fits` has accepted.

        Args:
            state: names and objects.
            names: the names of the entries that a load is going to change.
            undo: gets a callback for each of the entries.
        """
        random_states = rng_state()
        # ``undo`` runs the last callback first. So the random states are restored after the other
        # callbacks, which may draw random numbers.
        undo.callback(set_rng_state, random_states)
        modules = [value for value in state.values() if isinstance(value, nn.Module)]
        # All or none: if the load of one module raises, earlier modules have changed already.
        should_copy_modules = any(map(has_custom_state_loading, modules))
        for name in names:
            value: Any = state.get(name)
            if isinstance(value, nn.Module):
                if should_copy_modules:
                    copied = map_tensors(_clone_unless_lazy, self.read_module(value))
                    # The load is not strict, since a module may leave values out of its own state.
                    undo.callback(self.load_module, value, copied, strict=False)
            elif isinstance(value, Optimizer):
                # Not copied: a load gives the optimizer new tensors, and does not write into the
                # tensors of this state.
                undo.callback(value.load_state_dict, value.state_dict())
            elif is_stateful(value):
                undo.callback(value.load_state_dict, copy.deepcopy(value.state_dict()))
            elif name in state:
                # A plain value is replaced in the user's dict.
                undo.callback(operator.setitem, state, name, value)
        # The user's state_dict() may have drawn random numbers.
        set_rng_state(random_states)


def _clone_unless_lazy(tensor: Tensor) -> Tensor:
    # A lazy parameter has no values yet, and cannot be cloned.
    if is_lazy(tensor):
        return tensor
    return tensor.clone()


def select_content(
    state: State, content: PlainState, filter: Filter | None, trainable_only: bool
) -> PlainState:
    """Return the part of the content to save. No tensor is copied.

    Args:
        state: names and objects. They are not changed.
        content: their states, from :meth:`StateDicts.read`. It is not changed.
        filter: by name of an entry, a function ``keep(name, value)``. It returns whether to save
            an item of the entry's dict.
        trainable_only: whether to leave out the parameters of modules that do not require a
            gradient.

    Raises:
        ConfigurationError: ``filter`` names an entry that is missing or not a dict.
    """
    filters = {} if filter is None else filter
    for name in filters:
        if not isinstance(content.get(name), dict):
            problem = "state has no such entry, or the entry is not saved as a dict"
            names = join_names(map(repr, state))
            raise ConfigurationError(f"filter={{{name!r}: ...}}", problem, expected=names)
    selected = dict(content)
    for name, value in state.items():
        dropped_keys: set[str] = set()
        if trainable_only and isinstance(value, nn.Module):
            dropped_keys |= _frozen_names(value)
        if name in filters:
            dropped_keys |= _refused_keys(content[name], filters[name])
        if dropped_keys:
            # A shallow copy keeps the type, and the versions of layers that torch attaches to a
            # state dict.
            selected[name] = copy.copy(content[name])
            # Only the keys that exist: a module may have left a frozen parameter out of its state.
            for key in dropped_keys & selected[name].keys():
                del selected[name][key]
    return selected


def _refused_keys(items: Mapping[str, Any], should_keep: Callable[[str, Any], bool]) -> set[str]:
    """Return the keys of the items that a filter of the user does not keep."""
    refused_keys: set[str] = set()
    for key, item in items.items():
        if not should_keep(key, item):
            refused_keys.add(key)
    return refused_keys


def _frozen_names(module: nn.Module) -> set[str]:
    """Return the plain names of the parameters that do not require a gradient."""
    names = set()
    # A tied parameter has several names in a state dict.
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            names.add(plain_name(name))
    return names


def check_entries(state: State, check_value: CheckValue) -> None:
    """Raise unless ``state`` is a mapping of names to accepted values and objects with a state.

    Args:
        state: names and objects.
        check_value: is called with the name and the value of each entry without a state. Raises for
            a value that is not accepted.

    Raises:
        ArgumentTypeError: ``state`` is not a mapping, or an entry can neither be saved as a value
            nor restored in place.
        ConfigurationError: an entry has the name of fabric's metadata.
    """
    if not isinstance(state, Mapping):
        request = f"a checkpoint whose state is of type {type(state).__name__}"
        suggestion = "(path, {'model': model})"
        raise ArgumentTypeError(request, expected="a path, then a dict", suggestion=suggestion)
    if METADATA_KEY in state:
        problem = f"state[{METADATA_KEY!r}] is fabric's own entry"
        raise ConfigurationError("a checkpoint", problem, expected="any other name")
    for name, value in state.items():
        if not is_stateful(value):
            check_value(name, value)


def is_stateful(value: Any) -> bool:
    """Return whether a value has a state that a load restores in place.

    A load replaces any other value.

    Raises:
        ArgumentTypeError: the value is a ``DataLoader`` that is not set up.
    """
    has_methods = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    # A class such as nn.Linear has the methods, too, but no state.
    if has_methods and not isinstance(value, type):
        return True
    if isinstance(value, DataLoader):
        problem = "it does not know its position, so a resumed run would replay or skip samples"
        suggestion = "loader = fabric.setup_dataloaders(loader), and put the result into the state"
        request = "a DataLoader in a checkpoint"
        raise ArgumentTypeError(
            request, problem, expected="one with state_dict()", suggestion=suggestion
        )
    return False


def pop_metadata(content: PlainState) -> PlainState:
    """Remove fabric's own metadata from ``content``, and return a copy of the metadata.

    The result is empty if fabric did not write the checkpoint.

    Raises:
        CheckpointError: a newer release wrote the checkpoint.
    """
    metadata = content.pop(METADATA_KEY, {})
    # Only a mapping has a version. check_version() refuses None as a version that it does not know.
    version = None
    if isinstance(metadata, Mapping):
        version = metadata.get("format_version", 0)
    check_version("load a checkpoint", version)
    return dict(metadata)


def check_version(request: str, version: object) -> None:
    """Raise a CheckpointError for a format version that this release does not know.

    ``request`` is the user's request, a text for errors.
    """
    if not isinstance(version, int) or version > FORMAT_VERSION:
        problem = f"its format version is {version!r}: a newer release wrote it"
        raise CheckpointError(request, problem, suggestion="pip install --upgrade torch-fabric")


def join_names(names: Iterable[object]) -> str:
    """Join names, or numbers, for an error. The text is "nothing" without names.

    A long list is cut: the text has the first names, and how many more there are.
    """
    texts = list(map(str, names))
    if not texts:
        return "nothing"
    shown = texts[:_MAX_NAMES]
    if len(texts) > _MAX_NAMES:
        shown.append(f"and {len(texts) - _MAX_NAMES} more")
    return ", ".join(shown)


def plain_name(name: str) -> str:
    """Return the name of a parameter or buffer without the wrapper modules of ``torch.compile``.

    Checkpoints have these names, so that they load with and without ``torch.compile``.
    """
    components = str(name).split(".")
    return ".".join(component for component in components if component != COMPILED_MODULE)


def uncompiled_state(state: Any, expected: Iterable[str] = ()) -> Any:
    """Return a module's state under plain names, or under the names that another module expects.

    A plain name has no wrapper modules of ``torch.compile``: for ``_orig_mod.weight`` it is
    ``weight``.

    Args:
        state: the state dict of a module. It is not changed.
        expected: the names in the state dict of the module to load into. A value gets the expected
            name that has the same plain name. Without such a name, it gets its plain name.
    """
    expected_by_plain_name = {plain_name(name): name for name in expected}
    # A copy and not a new dict, since torch attaches the versions of layers to a state dict.
    renamed = copy.copy(state)
    renamed.clear()
    for name, value in state.items():
        new_name = plain_name(name)
        new_name = expected_by_plain_name.get(new_name, new_name)
        renamed[new_name] = value
    return renamed


def _refuse_loop(path: KeyPath, value: Any) -> None:
    # to_json() calls this function for what it cannot encode: tensors, unknown objects, and a
    # collection that contains itself. Only the collection is an error here.
    if type(value) in PLAIN_COLLECTIONS:
        raise unsupported(path, value)


# [Note: plain state]
# State is *plain* when `torch.load(weights_only=True)` can read it back: tensors, numbers, strings,
# bytes, `None`, dtypes, devices, and dicts, lists, tuples and sets of these. The types have to be
# exact, since a subclass is rebuilt by running its code. Any other value is refused when it is
# saved, and not only after the run, when it is loaded.
def check_plain(name: str, value: Any) -> None:
    """Raise an ArgumentTypeError unless an entry of a state is plain.

    Instances of classes in ``torch.serialization.add_safe_globals`` are accepted, except those of
    collections whose items torch cannot load.
    """
    allowed_classes: set[Any] = {Tensor, nn.Parameter}
    for entry in get_safe_globals():
        # An entry is a class, or a pair of a class and the name that files use for it.
        allowed_class = entry
        if isinstance(entry, tuple):
            allowed_class = entry[0]
        allowed_classes.add(allowed_class)

    def check(path: KeyPath, item: Any) -> None:
        """Raise an error unless the class of a value is allowed.

        ``to_json`` calls it for each value that is not a plain collection or scalar.
        """
        if type(item) not in allowed_classes or has_pickled_items(item):
            raise unsupported(path, item)
        if isinstance(item, Tensor):
            # A meta tensor has no values. torch itself allows DTensors, but a file cannot hold
            # their process group.
            if item.is_meta or is_dtensor(item):
                raise unsupported(path, item)
            # torch.save() writes the attributes that were set on a tensor, too.
            to_json(vars(item), check, (*path, "__dict__"))

    # Called for its errors: the JSON is not needed.
    to_json(value, check, (name,))

"""Adapters of PEFT: which tensors of a model belong to an adapter, and their names in its files."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fabric._torch import uncompiled
from fabric.checkpoint.state import PlainState, State, join_names
from fabric.errors import ConfigurationError

__all__ = ["ADAPTER_CONFIG", "ADAPTER_FILES", "adapter_names", "adapters_of", "names_to_load"]

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")


def adapters_of(user_module: nn.Module) -> list[str]:
    """Return the names of the adapters that PEFT has added to a model. Empty without PEFT."""
    configs: Any = getattr(uncompiled(user_module), "peft_config", None)
    if not isinstance(configs, Mapping):
        return []
    return list(configs)


def adapter_names(user_module: nn.Module, state: State, adapter: str) -> dict[str, str]:
    """Return a dict from the names of tensors in an adapter's file to their names in the model.

    PEFT selects the tensors of the adapter and gives them the names of the file. It does not
    communicate, even for a sharded model.

    Args:
        user_module: the user's own module.
        state: the names and values of the module, possibly as shards.
        adapter: the name of the adapter.

    Raises:
        ConfigurationError: the model has no tensors of the adapter, or PEFT computes new ones.
    """
    # Imported here, since PEFT is optional.
    from peft import get_peft_model_state_dict

    names_by_id: dict[int, str] = {}
    tensors: PlainState = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            names_by_id[id(value)] = name
            tensors[name] = value
    saved = get_peft_model_state_dict(uncompiled(user_module), tensors, adapter_name=adapter)
    names: dict[str, str] = {}
    for saved_name, value in saved.items():
        # PEFT returns the tensors themselves, so their ids lead back to the names in the model. A
        # tensor that PEFT has computed has no name in the model.
        if id(value) not in names_by_id:
            problem = f"PEFT computes {saved_name} from other tensors, which may be shards"
            raise ConfigurationError(f"the adapter {adapter!r}", problem)
        names[saved_name] = names_by_id[id(value)]
    if not names:
        problem = "the model has no tensors of this adapter"
        raise ConfigurationError(f"the adapter {adapter!r}", problem)
    return names


def names_to_load(request: str, user_module: nn.Module, state: State) -> dict[str, str]:
    """Return a dict from the names in an adapter's file to the names in the model to load into.

    If the model has several adapters, the file is loaded into the adapter called ``"default"``,
    which is the name that PEFT gives to an adapter if the user gives none.

    Args:
        request: the user's request, a text for the error.
        user_module: the user's own module. It has at least one adapter.
        state: the names and values of the module, possibly as shards.

    Raises:
        ConfigurationError: the model has several adapters, and none of them is ``"default"``.
    """
    adapters = adapters_of(user_module)
    if len(adapters) == 1:
        return adapter_names(user_module, state, adapters[0])
    if "default" not in adapters:
        problem = f"the model has the adapters {join_names(adapters)}"
        expected = 'one adapter, or one with the name "default"'
        raise ConfigurationError(request, problem, expected=expected)
    return adapter_names(user_module, state, "default")

"""Names of Lightning without a counterpart here, and what to use instead."""

from typing import Any

# What to use instead, by a part of the names.
INSTEAD = {
    "XLA": "there are no TPUs here; accelerator='cuda' or 'cpu'",
    "DeepSpeed": (
        "strategy='fsdp', which shards all states; FSDPStrategy(cpu_offload=True) offloads them"
    ),
    "Bitsandbytes": "quantize the model with bitsandbytes itself, before fabric.setup(model)",
    "TransformerEngine": (
        "precision='bf16-mixed', or te.fp8_autocast() around the forward pass in your own code"
    ),
}


class Missing(Exception):
    """The base of classes that a script may import, or name in ``except``, but not instantiate.

    Attributes:
        instead: what to use instead, for the error.
    """

    instead: str

    def __init__(self, *_: Any, **__: Any) -> None:
        name = type(self).__name__
        raise ImportError(
            f"{name} of Lightning has no counterpart in torch-fabric. Use instead: {self.instead}"
        )


def missing_class(name: str, instead: str) -> Any:
    """Return a class whose constructor says what to use instead."""
    return type(name, (Missing,), {"instead": instead})


def missing(module: str, name: str) -> Any:
    """Return what a name of Lightning stands for if fabric has nothing like it.

    Args:
        module: the module of Lightning that has the name, for the error.
        name: the name that is imported.

    Returns:
        False for ``*_AVAILABLE``; otherwise, a class whose constructor says what to use instead.

    Raises:
        AttributeError: Lightning Fabric has no such name, as far as this module knows.
    """
    for feature, instead in INSTEAD.items():
        if feature.lower() not in name.lower():
            continue
        if name.endswith("_AVAILABLE"):
            return False
        return missing_class(name, instead)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")

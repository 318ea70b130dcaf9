"""Names of Lightning Fabric without a counterpart here, and what to use instead."""

from typing import Any

_INSTEAD = {
    "XLA": "there are no TPUs here; accelerator='cuda' or 'cpu'",
    "DeepSpeed": "strategy='fsdp', which shards all states; FSDPStrategy(cpu_offload=True) offloads them",
    "Bitsandbytes": "quantize the model with bitsandbytes itself, before fabric.setup(model)",
    "TransformerEngine": "precision='bf16-mixed', or te.fp8_autocast() around the forward pass in your own code",
    "Spike": "compare the loss with a running mean in your loop",
}


class Missing(Exception):
    """A class that is imported and never made, or caught, by scripts that can do without."""

    instead: str

    def __init__(self, *_: Any, **__: Any) -> None:
        name = type(self).__name__
        raise ImportError(
            f"{name} of Lightning Fabric has no counterpart in torch-fabric. Use instead: {self.instead}"
        )


def missing(module: str, name: str) -> Any:
    """The object to import for a missing name: a class whose constructor says what to use instead.

    Raises:
        AttributeError: Lightning Fabric is not known to have it either.
    """
    for part, instead in _INSTEAD.items():
        if part.lower() in name.lower():
            return not name.endswith("_AVAILABLE") and type(name, (Missing,), {"instead": instead})
    raise AttributeError(f"module {module!r} has no attribute {name!r}")

"""What Lightning Fabric has and this package does not, and what to use instead."""

from typing import NoReturn

__all__ = ["refuse"]

_INSTEAD = {
    "XLA": "there are no TPUs here; accelerator='cuda' or 'cpu'",
    "DeepSpeed": "strategy='fsdp', which shards all states; FSDPStrategy(cpu_offload=True) offloads them",
    "Bitsandbytes": "quantize the model with bitsandbytes itself, before fabric.setup(model)",
    "TransformerEngine": "precision='bf16-mixed', or te.fp8_autocast() around the forward pass in your own code",
    "Spike": "compare the loss with a running mean in your loop",
}


def refuse(module: str, name: str) -> NoReturn:
    """Raise for a name of a module that is not here.

    Raises:
        ImportError: the name is known and has no counterpart; the text says what to use.
        AttributeError: Lightning Fabric is not known to have it either.
    """
    for part, instead in _INSTEAD.items():
        if part.lower() in name.lower():
            raise ImportError(f"{name} of Lightning Fabric has no counterpart in torch-fabric. Use instead: {instead}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")

"""BatchNorm layers that compute their statistics over all ranks, and the way back."""

from weakref import ref

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fabric.errors import ConfigurationError

__all__ = ["SyncedBatchNorms"]


class SyncedBatchNorms:
    """The BatchNorm layers that were replaced inside users' modules, so that they can be put back."""

    def __init__(self) -> None:
        # Weak, so that a model that the user drops is freed.
        self._replaced: list[tuple[ref[nn.Module], str, nn.Module]] = []

    def convert(self, module: nn.Module) -> None:
        """Replace every BatchNorm inside ``module`` by torch's SyncBatchNorm, which shares its parameters and buffers.

        Raises:
            ConfigurationError: ``module`` itself is a BatchNorm: there is no parent to replace it in.
        """
        if isinstance(module, _BatchNorm):
            raise ConfigurationError(
                f"sync_batchnorm=True for a module that is itself a {type(module).__name__}",
                "layers are replaced inside their parent, and this one has none",
                "a module that holds BatchNorm layers",
                "torch.nn.Sequential(batch_norm)",
            )
        found = [
            (parent, name, child)
            for parent in module.modules()
            for name, child in parent.named_children()
            if isinstance(child, _BatchNorm) and not isinstance(child, nn.SyncBatchNorm)
        ]
        for parent, name, child in found:
            setattr(parent, name, nn.SyncBatchNorm.convert_sync_batchnorm(child))
            self._replaced.append((ref(parent), name, child))

    def revert(self) -> None:
        """Put the original layers back, with the values that their replacements have now."""
        for reference, name, original in self._replaced:
            parent = reference()
            synced = None if parent is None else parent._modules.get(name)
            if parent is not None and isinstance(synced, nn.SyncBatchNorm):
                original._parameters, original._buffers = synced._parameters, synced._buffers
                original.training = synced.training
                setattr(parent, name, original)
        self._replaced.clear()

"""A check that users train modules in training mode."""

from collections.abc import Collection
from weakref import WeakSet

from torch import Tensor, nn

from fabric.communicators.call_site import warn_user
from fabric.contract import GradientContract

__all__ = ["EvaluationModeCheck"]

_DROPOUTS = (
    nn.AlphaDropout,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.FeatureAlphaDropout,
)


# [Note: Evaluation mode]
# Some libraries return a loaded model in evaluation mode, as `from_pretrained` does, and a loop may
# forget `model.train()`. The model then trains without dropout and with the old statistics of its
# batch normalization, and no error says so.
#
# The check warns if a module as a whole is in evaluation mode. A module in training mode with some
# layers in evaluation mode is meant: frozen batch normalization is trained like this.
class EvaluationModeCheck:
    """Warns if an optimizer trains a module in evaluation mode.

    Args:
        contracts: the contracts of the set-up modules. Later ones are seen, too.
    """

    def __init__(self, contracts: Collection[GradientContract]) -> None:
        self._contracts = contracts
        self._warned_modules: WeakSet[nn.Module] = WeakSet()

    def check(self, ids_with_gradient: set[int], request: str, turn_off: str) -> None:
        """Warn once of each module that is trained in evaluation mode.

        Args:
            ids_with_gradient: the ids of the parameters that the step of an optimizer changes.
            request: names the step, for the warning.
            turn_off: says how to turn the check off.
        """
        for contract in self._contracts:
            model = _without_wrappers(contract.module)
            if model.training or contract.module in self._warned_modules:
                continue
            parameters = contract.parameters().values()
            is_trained = any(id(parameter) in ids_with_gradient for parameter in parameters)
            if not is_trained:
                continue
            names = _names_of_layers_that_need_training_mode(model)
            if names:
                self._warned_modules.add(contract.module)
                warn_user(
                    f"{request} trains {contract.title} in evaluation mode, which changes what "
                    f"{len(names)} layer(s) compute, such as {names[0]}: model.train() before the "
                    "loop, since functions such as from_pretrained() return a model in evaluation "
                    f"mode; or {turn_off}"
                )


def _without_wrappers(module: nn.Module) -> nn.Module:
    """Return the model in modules that only wrap it and are in training mode, as those of PEFT.

    A wrapper has one child and no parameters of its own. PEFT makes wrappers in training mode, also
    of a model in evaluation mode.
    """
    while module.training:
        children = list(module.children())
        has_parameters = any(True for _ in module.parameters(recurse=False))
        if len(children) != 1 or has_parameters:
            break
        module = children[0]
    return module


def _names_of_layers_that_need_training_mode(model: nn.Module) -> list[str]:
    """Return names and classes of layers in evaluation mode whose outputs depend on the mode.

    Args:
        model: a module in evaluation mode.
    """
    names: list[str] = []
    for name, layer in model.named_modules():
        if not layer.training and _depends_on_mode(layer):
            class_name = type(layer).__name__
            names.append(f"{name} ({class_name})" if name else class_name)
    return names


def _depends_on_mode(layer: nn.Module) -> bool:
    """Return whether the output of a layer of torch depends on its mode."""
    if isinstance(layer, nn.RNNBase) and layer.num_layers == 1:
        return False  # the dropout is between the layers
    probability: object = 0.0
    if isinstance(layer, _DROPOUTS):
        probability = layer.p
    elif isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)):
        probability = layer.dropout
    # A subclass may have another object under this name.
    if isinstance(probability, int | float) and probability > 0:
        return True
    # Batch and instance normalization use running statistics in evaluation mode alone.
    return isinstance(getattr(layer, "running_mean", None), Tensor)

"""What diagnostics read of a strategy: how the gradients of a module are synchronized."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fabric._torch import HookSwitch

__all__ = ["GradientContract"]


def _nothing(error: BaseException) -> None:
    pass


@dataclass(frozen=True, eq=False, kw_only=True)
class GradientContract:
    """How the gradients of one prepared module become those of all ranks. A strategy makes it once, in setup.

    Attributes:
        module: the user's module, without what ``torch.compile`` put around it.
        parameters: the parameters of the module by the user's names, also while a forward pass has replaced them.
        synchronizes: whether a backward pass, now, would synchronize gradients. Called in every step.
        needs_forward: whether gradients are synchronized only after a forward pass through the prepared module.
        needs_all_gradients: whether gradients are right only if every parameter gets one.
        expects_unused: whether it was said that some parameters may take no part in the loss.
        gradients_differ: whether ranks step with different gradients, as of shards or of replicas that drift.
        replicated: the parameters, by the user's names, that are to be equal on all ranks after a step.
        unreduced: the parameters whose gradients were computed, and are not yet where a step sees them.
        is_sharded: whether the parameters are sharded over ranks.
        casts: whether the prepared module casts inputs and outputs, so that nobody else may.
        part_hooks: hooks on parts of the module that need not be called within its forward pass.
        explain: adds a note to an error of torch that tells what to do about it.
    """

    module: nn.Module
    parameters: Callable[[], Mapping[str, Tensor]]
    synchronizes: Callable[[], bool] = bool
    needs_forward: bool = False
    needs_all_gradients: bool = False
    expects_unused: bool = False
    gradients_differ: bool = False
    replicated: Callable[[], Mapping[str, Tensor]] = dict
    unreduced: Callable[[], Sequence[Tensor]] = list
    is_sharded: bool = False
    casts: bool = False
    part_hooks: HookSwitch | None = None
    explain: Callable[[BaseException], None] = _nothing

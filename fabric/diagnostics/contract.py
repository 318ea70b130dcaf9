"""The gradient contract, which diagnostics read of a strategy, and the hooks that call them. Data only.

[Note: Hooks] Each diagnostic is a layer: functions that are called around forward and backward passes. Setup lists the
layers once, and before and after each part they are called in the order of that list. The flight recorder is first, so
that what another layer raises cannot leave a phase open. Around an optimizer's step they are torch's own hooks, in the
same order.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

__all__ = ["GradientContract", "Hooks"]


def _no_explanation(error: BaseException) -> None:
    pass


@dataclass(frozen=True, eq=False, kw_only=True)
class GradientContract:
    """How the gradients of one prepared module become those of all ranks. A strategy makes it once, in setup.

    Attributes:
        module: the user's module, without what ``torch.compile`` put around it.
        title: the class of that, for errors.
        parameters: its parameters by the user's names, also while a forward pass has replaced them.
        synchronizes: whether a backward pass, now, would synchronize gradients. Called in every step.
        needs_forward: whether gradients are synchronized only after a forward pass through the prepared module.
        needs_all_gradients: whether gradients are right only if every parameter gets one.
        expects_unused: whether it was said that some parameters may take no part in the loss.
        gradients_differ: whether ranks step with different gradients, as of shards or of replicas that drift.
        replicated: the parameters, by the user's names, that are to be equal on all ranks after a step.
        unreduced: the parameters whose gradients were computed, and are not yet where a step sees them.
        is_sharded: whether the parameters are sharded over ranks.
        fsdp_modules: the parts that gather their parameters themselves.
        in_forward: whether a forward pass of the sharded module is running.
        casts: whether the prepared module casts inputs and outputs, so that nobody else may.
        join: a context in which ranks may run these prepared modules for different numbers of batches; None if there is
            nothing to do. Raises a UsageError where the strategy cannot do it.
        explain: adds a note to an error of torch that says what to do about it.
    """

    module: nn.Module
    title: str
    parameters: Callable[[], Mapping[str, Tensor]]
    join: Callable[[Sequence[nn.Module], bool], AbstractContextManager[Any] | None]
    synchronizes: Callable[[], bool] = bool
    needs_forward: bool = False
    needs_all_gradients: bool = False
    expects_unused: bool = False
    gradients_differ: bool = False
    replicated: Callable[[], Mapping[str, Tensor]] = dict
    unreduced: Callable[[], Sequence[Tensor]] = list
    is_sharded: bool = False
    fsdp_modules: Collection[nn.Module] = ()
    in_forward: Callable[[], bool] = bool
    casts: bool = False
    explain: Callable[[BaseException], None] = _no_explanation


@dataclass(frozen=True, eq=False, kw_only=True)
class Hooks:
    """One layer of ``[Note: Hooks]``. A function after a part is also called when the part raised.

    Attributes:
        before_forward: called as ``before_forward()``.
        after_forward: called as ``after_forward(output, error)``, one of which is None.
        before_backward: called as ``before_backward()``.
        after_backward: called as ``after_backward(loss, error)``; the error is None if there was none.
    """

    before_forward: Callable[[], object] | None = None
    after_forward: Callable[[Any, BaseException | None], object] | None = None
    before_backward: Callable[[], object] | None = None
    after_backward: Callable[[Tensor, BaseException | None], object] | None = None

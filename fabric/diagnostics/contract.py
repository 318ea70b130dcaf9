"""What diagnostics read of a strategy, and where they are called: the gradient contract, and hooks.

[Note: Hooks] Each diagnostic is a layer: functions that are called around forward passes, backward passes and optimizer
steps. Whoever sets something up lists the layers once, and before and after each part they are called in the order of
that list. The flight recorder comes first, so that what another layer raises cannot leave a phase open.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

__all__ = ["GradientContract", "Hooks", "calls"]


def _no_explanation(error: BaseException) -> None:
    pass


@dataclass(frozen=True, eq=False, kw_only=True)
class GradientContract:
    """How the gradients of one prepared module become those of all ranks. A strategy makes it once, in setup.

    Attributes:
        module: the user's module, without what ``torch.compile`` put around it.
        synchronizes: whether a backward pass, now, would synchronize gradients. Called in every step.
        needs_forward: whether gradients are synchronized only after a forward pass through the prepared module.
        needs_all_gradients: whether gradients are right only if every parameter gets one.
        expects_unused: whether it was said that some parameters may take no part in the loss.
        gradients_differ: whether ranks step with different gradients, as of shards or of replicas that drift.
        replicated: the parameters, by the user's names, that are to be equal on all ranks after a step.
        unreduced: the parameters whose gradients were computed, and are not yet where a step sees them.
        sharded: the sharded parameters by the user's names, which a forward pass replaces; None without sharding.
        fsdp_modules: the parts that gather their parameters themselves.
        in_forward: whether a forward pass of the sharded module is running.
        casts: whether the prepared module casts inputs and outputs, so that nobody else may.
        explain: adds a note to an error of torch that tells what to do about it.
    """

    module: nn.Module
    synchronizes: Callable[[], bool] = bool
    needs_forward: bool = False
    needs_all_gradients: bool = False
    expects_unused: bool = False
    gradients_differ: bool = False
    replicated: Callable[[], Mapping[str, Tensor]] = dict
    unreduced: Callable[[], Sequence[Tensor]] = list
    sharded: Mapping[str, Tensor] | None = None
    fsdp_modules: Collection[nn.Module] = ()
    in_forward: Callable[[], bool] = bool
    casts: bool = False
    explain: Callable[[BaseException], None] = _no_explanation

    @property
    def title(self) -> str:
        """The class of the user's module; torch puts "FSDP" in front of the name of what it shards."""
        return type(self.module).__name__.removeprefix("" if self.sharded is None else "FSDP")

    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters of the module by the user's names, also within a forward pass."""
        return dict(self.module.named_parameters()) if self.sharded is None else self.sharded


@dataclass(frozen=True, eq=False, kw_only=True)
class Hooks:
    """One layer of ``[Note: Hooks]``. A function after a part is also called when the part raised.

    Attributes:
        before_forward: called as ``before_forward()``.
        after_forward: called as ``after_forward(output, error)``, one of which is None.
        before_backward: called as ``before_backward()``.
        after_backward: called as ``after_backward(loss, error)``; the error is None if there was none.
        before_step: a hook of :meth:`torch.optim.Optimizer.register_step_pre_hook`.
        after_step: a hook of :meth:`torch.optim.Optimizer.register_step_post_hook`; not called after an error.
    """

    before_forward: Callable[[], object] | None = None
    after_forward: Callable[[Any, BaseException | None], object] | None = None
    before_backward: Callable[[], object] | None = None
    after_backward: Callable[[Tensor, BaseException | None], object] | None = None
    before_step: Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None] | None = None
    after_step: Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None] | None = None

    def attach(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Register the functions around the steps of an optimizer."""
        before = [] if self.before_step is None else [optimizer.register_step_pre_hook(self.before_step)]
        after = [] if self.after_step is None else [optimizer.register_step_post_hook(self.after_step)]
        return [*before, *after]


def calls(layers: Iterable[Hooks], moment: str) -> tuple[Callable[..., object], ...]:
    """The functions of the layers at a moment, such as ``"before_forward"``, in the order in which they are called."""
    return tuple(call for layer in layers if (call := getattr(layer, moment)) is not None)

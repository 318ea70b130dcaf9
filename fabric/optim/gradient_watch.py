"""Records which parameters get gradients, to find backward passes without ``Fabric.backward``."""

from collections import deque
from collections.abc import Collection
from contextlib import ExitStack
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from fabric.contract import GradientContract
from fabric.tree import parameters_of

__all__ = ["GradientWatch"]

# More parameters than one backward pass reaches.
_MAX_REACHED = 1_000_000


class GradientWatch:
    """Records which parameters of watched optimizers have got a gradient.

    Hooks of the parameters record this. Under FSDP, torch does not call the hooks in a backward
    pass inside of ``no_backward_sync``, whose gradients stay unreduced. The contracts of the
    modules count these passes.

    Args:
        contracts: the contracts of the set-up modules. Later ones are added to this collection.
        cleanup: the stack whose end removes the hooks of the parameters.
    """

    def __init__(self, contracts: Collection[GradientContract], cleanup: ExitStack) -> None:
        """Start without a watched optimizer."""
        self._contracts = contracts
        # For each optimizer, its parameters that have a hook, by id().
        self._watched: WeakKeyDictionary[Optimizer, dict[int, Tensor]] = WeakKeyDictionary()
        # The parameters that have got a gradient since the last backward pass of Fabric. It has a
        # limit, since a loop that never calls Fabric.backward would fill a list without end.
        self._reached: deque[Tensor] = deque(maxlen=_MAX_REACHED)
        # For each contract, the value of unreduced_passes() at the end of the last backward pass of
        # Fabric. A larger value later shows a pass without Fabric.
        self._unreduced_passes: WeakKeyDictionary[GradientContract, int] = WeakKeyDictionary()
        # Removes the hooks of the parameters when cleanup ends.
        self._hooks = cleanup.enter_context(ExitStack())
        # Frees the parameters, which the caller may keep alive through this object.
        cleanup.callback(self._reached.clear)

    def watch(self, optimizer: Optimizer) -> None:
        """Register hooks that record which parameters of an optimizer get gradients.

        Called again later, it adds the parameters that were added or unfrozen since.
        """
        watched = self._watched.setdefault(optimizer, {})
        for parameter in parameters_of(optimizer):
            if id(parameter) in watched or not parameter.requires_grad:
                continue
            watched[id(parameter)] = parameter
            # deque.append is written in C, so that the hook costs a backward pass no Python calls.
            handle = parameter.register_post_accumulate_grad_hook(self._reached.append)
            self._hooks.callback(handle.remove)

    def begin_pass(self) -> None:
        """Start the record of a backward pass of ``Fabric``.

        Passes without ``Fabric`` before it are forgotten. Call :meth:`has_unknown_pass` first.
        """
        self._reached.clear()

    def end_pass(self) -> set[int]:
        """End the record of a backward pass of ``Fabric``.

        Gradients that are recorded from now on come from passes without ``Fabric``.

        Returns:
            The ids of the parameters whose hooks were called in the pass.
        """
        reached_ids = set(map(id, self._reached))
        self._reached.clear()
        for contract in self._contracts:
            self._unreduced_passes[contract] = contract.unreduced_passes()
        return reached_ids

    def has_unknown_pass(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has got gradients since the last pass of ``Fabric``.

        ``Fabric`` does not know the weight of the loss of such a pass.
        """
        reached_ids = set(map(id, self._reached))
        # Under FSDP, a pass that leaves gradients unreduced calls no hooks. The strategy counts
        # these passes.
        for contract in self._contracts:
            if contract.unreduced_passes() > self._unreduced_passes.get(contract, 0):
                reached_ids.update(map(id, contract.unreduced()))
        return not reached_ids.isdisjoint(map(id, parameters_of(optimizer)))

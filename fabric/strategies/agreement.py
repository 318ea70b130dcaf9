"""The collectives in a function of the user that every rank calls while a model is set up.

[Note: Agreeing collectives] torch distributes the parameters of a layer with a collective. If
``parallelize_fn`` has a branch on the rank, ranks would wait for each other in different
collectives until the timeout, or exchange the values of different layers. So the ranks compare each
collective before it starts, through the store. The first rank to come to a collective writes what
it is about to do, and the other ranks read it. At the end of the function a rank writes that it has
ended. A rank that is about to do something else raises, and this ends the job.
"""

from typing import Any

from torch import Tensor, nn

from fabric._torch import DispatchMode, local_tensor
from fabric.errors import UsageError
from fabric.store import JobStore
from fabric.tree import flatten

__all__ = ["AgreeingCollectives"]

# The namespaces of torch's operators that communicate.
_COLLECTIVES = ("c10d", "_c10d_functional")


class AgreeingCollectives(DispatchMode):
    """A mode in which ranks raise before collectives that differ. See the note of this file.

    Args:
        name: identifies the call of the function. It is the same on all ranks.
        root: the model that the function changes.
        store: the store that the ranks share.
    """

    def __init__(self, name: str, root: nn.Module, store: JobStore) -> None:
        """Start without collectives. The mode is then entered around the function."""
        super().__init__()
        self._name = name
        self._root = root
        self._store = store
        self._collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, after a comparison if it is a collective.

        torch calls this method for every operator while the mode is entered.
        """
        if func.namespace in _COLLECTIVES:
            # The first argument of every collective has the tensors of this rank.
            leaves, _ = flatten(args[:1])
            shapes = [list(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
            self._compare(f"{func.__name__.split('.')[0].strip('_')} of {shapes}")
        return func(*args, **(kwargs or {}))

    def finish(self) -> None:
        """Raise if another rank goes on with a collective. Called at the end of the function.

        Raises:
            UsageError: the other rank has done so already. Otherwise that rank will raise.
        """
        self._compare("the end of the function")

    def _compare(self, action: str) -> None:
        """Raise a UsageError if the first rank to come here does something else."""
        key = f"{self._name}/{self._collectives}"
        self._collectives += 1
        content = self._store.set_if_absent(key, f"{self._store.rank} {action}".encode())
        rank, _, first_action = content.decode().partition(" ")
        if action == first_action:
            return
        on_mesh: list[str] = []
        for name, parameter in self._root.named_parameters():
            if local_tensor(parameter) is not parameter:
                on_mesh.append(name)
        raise UsageError(
            f"parallelize_fn({type(self._root).__name__}, mesh) on rank {self._store.rank}",
            problem=f"this rank comes to {action} where rank {rank} has come to {first_action}; "
            f"split here so far: {', '.join(on_mesh) or 'nothing'}",
            expected="the same layers, split in the same way and order on all ranks",
            suggestion="no branch on the rank in parallelize_fn",
        )

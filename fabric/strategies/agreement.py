"""The collectives in a function that every rank calls, and that runs code of the user."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fabric._torch import DispatchMode
from fabric.errors import UsageError
from fabric.store import JobStore
from fabric.tree import flatten

__all__ = ["AgreeingCollectives"]

# The namespaces of torch's operators that communicate.
_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")


# [Note: Agreeing collectives]
# torch distributes the parameters of a layer with a collective. If `parallelize_fn` has a branch on
# the rank, ranks would wait for each other in different collectives until the timeout, or exchange
# the values of different layers. Split layers communicate, too, and the comparison with the whole
# model calls them. So the ranks compare each collective before it starts, through the store. The
# first rank to come to a collective writes what it is about to do, and the other ranks read it. At
# the end of the function a rank writes that it has ended, or that it has raised. A rank that is
# about to do something else raises, and this ends the job.
class AgreeingCollectives(DispatchMode):
    """A mode in which ranks raise before collectives that differ, and do not hang in them.

    The mode is entered around a function with code of the user, which every rank calls. Each
    collective, and the end of the function, is an *action*. The first rank to come to action number
    n writes the action to the store, and the other ranks compare their own action number n with it.

    Args:
        name: identifies the call of the function. It is the same on the ranks that call it.
        store: the store that the ranks share.
        build_error: returns the error for a text that says what two ranks do.
    """

    def __init__(
        self, name: str, store: JobStore, build_error: Callable[[str], UsageError]
    ) -> None:
        """Keep the arguments. The mode starts when it is entered around the function."""
        super().__init__()
        self._name = name
        self._store = store
        self._build_error = build_error
        self._num_actions = 0
        # Whether this rank has raised because another rank does something else.
        self._has_raised_difference = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator of torch. If it is a collective, compare it between the ranks first.

        torch calls this method for every operator while the mode is entered.

        Raises:
            UsageError: another rank does something else.
        """
        if func.namespace in _COLLECTIVE_NAMESPACES:
            # The first argument of every collective has the tensors of this rank.
            leaves, _ = flatten(args[:1])
            shapes = [list(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
            # "broadcast" for the operator "broadcast_.default".
            name = func.__name__.split(".")[0].strip("_")
            self._compare(f"{name} of {shapes}")
        return func(*args, **(kwargs or {}))

    def finish(self) -> None:
        """Compare the end of the function between the ranks. Called if the function did not raise.

        Raises:
            UsageError: another rank has come to a collective here, or to an error.
        """
        self._compare("the end of the function")

    def fail(self, error: Exception) -> None:
        """Raise the error of the function, unless the other ranks have come to an error here, too.

        Called if the function raised. If this method returns, no rank waits in a collective, and
        the caller goes on in the same way on all ranks.

        Args:
            error: the error that has ended the function on this rank.
        """
        if self._has_raised_difference:
            # This error is about the difference already.
            raise error
        # All errors are the same action. The texts of the errors may differ between ranks.
        problem = self._find_difference("an error", f" ({type(error).__name__}: {error})")
        if problem is not None:
            error.add_note(str(self._build_error(problem)))
            raise error

    def _compare(self, action: str) -> None:
        """Raise a UsageError if the first rank to come here does something else."""
        problem = self._find_difference(action)
        if problem is not None:
            self._has_raised_difference = True
            raise self._build_error(problem)

    def _find_difference(self, action: str, details: str = "") -> str | None:
        """Return a text if the first rank to come here does something else. None otherwise.

        Args:
            action: what this rank does next. It is compared.
            details: more about the action, for the text. It is not compared.
        """
        key = f"{self._name}/{self._num_actions}"
        self._num_actions += 1
        # Only the details may have line breaks.
        message = f"{self._store.rank}\n{action}\n{details}"
        # Returns the message of the first rank that has set the key, or else this message.
        first_message = self._store.set_if_absent(key, message.encode())
        rank, first_action, first_details = first_message.decode().split("\n", maxsplit=2)
        if action == first_action:
            return None
        return (
            f"this rank comes to {action}{details} where rank {rank} has come to "
            f"{first_action}{first_details}"
        )

"""A communicator that compares what its ranks call before anything moves."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from fabric.communicators._callers import call_site, reason_to_leave
from fabric.communicators._calls import Call
from fabric.communicators._ledger import Ledger
from fabric.communicators.base import Announcement, Communicator, Reduce

__all__ = ["CheckedCommunicator"]


class CheckedCommunicator(Communicator):
    """Any communicator, with a check before each collective that all ranks of the group make the same.

    Each rank tells the others through a store what it is about to call: the operation, the reduction, the source, the
    shape and dtype, the user's collection, and the line of the user's call. Where they disagree, every rank that
    arrives raises; where a rank does not arrive, the others raise as soon as it has left, its process has ended, it
    waits for them elsewhere, or the timeout is over. A message is checked in the same way between its two ranks, so
    that :meth:`send` waits for its :meth:`recv`.

    After the first such error the ranks are out of step, and every further call raises.

    Every method but :meth:`announce` and :meth:`close` raises a
    :class:`fabric.errors.CollectiveMismatchError` for a disagreement.

    Args:
        inner: what carries the data.
        ledger: what the ranks of the job are calling, one for each process.
        name: the same on all members, and different for each group that shares ledgers.
        ranks: the members by their rank in the ledger, in the order of the group; None for all.
    """

    def __init__(
        self, inner: Communicator, ledger: Ledger, name: str = "job", ranks: Sequence[int] | None = None
    ) -> None:
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device
        self._inner, self._ledger, self._name = inner, ledger, name
        self._ranks = tuple(range(inner.size) if ranks is None else ranks)
        self._is_whole = ranks is None
        self._announced: tuple[str, str, str] | None = None

    @override
    def over(self, inner: Communicator, name: str, ranks: Sequence[int]) -> "CheckedCommunicator":
        return CheckedCommunicator(inner, self._ledger, name, [self._ranks[rank] for rank in ranks])

    @override
    def announce(self, call: Announcement) -> None:
        if self.size > 1:
            self._announced = (call.operation, call.describe(), call_site())
        self._inner.announce(call)

    @override
    def all_reduce(self, buffer: Tensor, op: Reduce) -> Tensor:
        return self._agreed("all_reduce", buffer, op=op.value).all_reduce(buffer, op)

    @override
    def all_gather(self, buffer: Tensor) -> Tensor:
        return self._agreed("all_gather", buffer).all_gather(buffer)

    @override
    def reduce_scatter(self, buffer: Tensor, op: Reduce) -> Tensor:
        return self._agreed("reduce_scatter", buffer, op=op.value).reduce_scatter(buffer, op)

    @override
    def all_to_all(self, buffer: Tensor) -> Tensor:
        return self._agreed("all_to_all", buffer).all_to_all(buffer)

    @override
    def broadcast(self, buffer: Tensor, src: int) -> Tensor:
        return self._agreed("broadcast", buffer, src=src).broadcast(buffer, src)

    @override
    def scatter(self, rows: Tensor | None, output: Tensor, src: int) -> Tensor:
        return self._agreed("scatter", output, src=src).scatter(rows, output, src)

    @override
    def gather(self, buffer: Tensor, dst: int) -> Tensor | None:
        return self._agreed("gather", buffer, dst=dst).gather(buffer, dst)

    @override
    def send(self, buffer: Tensor, dst: int) -> None:
        self.check_peer(dst, "send", "dst")
        self._agreed_peer("send", buffer, self.rank, dst).send(buffer, dst)

    @override
    def recv(self, buffer: Tensor, src: int) -> Tensor:
        self.check_peer(src, "recv", "src")
        return self._agreed_peer("recv", buffer, src, self.rank).recv(buffer, src)

    @override
    def barrier(self, name: str) -> None:
        self._agreed("barrier", name=repr(name)).barrier(name)

    @override
    def broadcast_object(self, value: Any, src: int) -> Any:
        return self._agreed("broadcast_object", src=src).broadcast_object(value, src)

    @override
    def gather_objects(self, value: Any) -> list[Any]:
        return self._agreed("gather_objects").gather_objects(value)

    @override
    def new_group(self, ranks: Sequence[int]) -> "CheckedCommunicator | None":
        self.check_members(ranks)
        members = sorted(ranks)
        number = self._meet("new_group", ranks=members)
        inner = self._inner.new_group(members)
        return None if inner is None else self.over(inner, f"{self._name}/{number}", members)

    @override
    def close(self) -> None:
        """Release what this owns; that of all ranks also tells the other ranks that this one makes no further calls."""
        if self._is_whole:
            self._ledger.leave(reason_to_leave())
        self._inner.close()

    def _agreed(self, operation: str, buffer: Tensor | None = None, **arguments: object) -> Communicator:
        """What carries the data, once all ranks make this call."""
        self._meet(operation, buffer, **arguments)
        return self._inner

    def _meet(self, operation: str, buffer: Tensor | None = None, **arguments: object) -> int:
        announced, data, where = self._announcement()
        facts = {"operation": announced, "collective": operation} if announced else {"operation": operation}
        facts |= {name: str(value) for name, value in arguments.items()} | _facts_of(buffer)
        return self._ledger.meet(self._name, self._ranks, Call(facts["operation"], where, facts, data))

    def _agreed_peer(self, operation: str, buffer: Tensor, src: int, dst: int) -> Communicator:
        """As :meth:`_agreed` for a message, whose two ranks call different operations."""
        _, data, where = self._announcement()
        facts = {"from": str(src), "to": str(dst)} | _facts_of(buffer)
        pair = (self._ranks[src], self._ranks[dst])
        self._ledger.meet(f"{self._name} {src}>{dst}", pair, Call(operation, where, facts, data))
        return self._inner

    def _announcement(self) -> tuple[str, str, str]:
        """What the user called, what they passed, and where; only the last of a call that was not announced."""
        announced, self._announced = self._announced, None
        return announced or ("", "", call_site())


def _facts_of(buffer: Tensor | None) -> dict[str, str]:
    if buffer is None:
        return {}
    return {"dtype": str(buffer.dtype).removeprefix("torch."), "shape": str(tuple(buffer.shape))}

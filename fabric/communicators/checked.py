"""Signatures of calls: every rank sees whether all ranks make the same call."""

import sys
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from typing_extensions import override

from fabric._torch import FakeTensor, current_transform
from fabric.communicators.base import Collective, Communicator, Operation, Reduce
from fabric.communicators.call_site import user_call
from fabric.communicators.process_group import fold
from fabric.errors import CollectiveMismatchError

__all__ = [
    "CheckedCommunicator",
    "PendingSignatures",
    "call_site",
    "checksums_agree",
]

_CPU = torch.device("cpu")
_MAX_SHOWN_CHARACTERS = 200  # of a call's text in an error
_MAX_PENDING = 256  # signatures that may stay on the device
# The checksum of a rank that cannot make its call. Every crc32 is smaller.
_CHECKSUM_OF_FAILED_CALL = 1 << 32
# The layout of a row: the checksum as an int64, padding up to byte 16, then the data, if it fits.
# At byte 16 the data is aligned for every dtype, including complex128.
_ROW_BYTES = 8192
_DATA_START = 16
# The largest buffer of tensors, in bytes, for which rows are kept for the next call.
_MAX_REUSED_BYTES = 512
_MAX_GATHERED_GROUP = 16  # larger groups reduce their checksums instead of gathering rows
_MAX_UNUSED_ROWS = 16  # that a communicator keeps for later calls
# The operations whose result each rank can compute from the data of all ranks.
_WITH_RESULT_FROM_ROWS = (Operation.ALL_REDUCE, Operation.ALL_GATHER)


class _PendingSignature(NamedTuple):
    """The checksums of one call, which were not read yet.

    Attributes:
        checksums: the checksum of each rank, or the largest and the negated least checksum.
        call_text: the call of this rank, for an error.
    """

    checksums: Tensor
    call_text: str


class PendingSignatures:
    """The signatures of this process that are on the device and were not read yet.

    Reading waits for the device. So :meth:`check` is called where the program waits anyway.
    """

    def __init__(self) -> None:
        self._pending: list[_PendingSignature] = []

    def add(self, checksums: Tensor, call_text: str) -> None:
        """Keep the checksums of all ranks until :meth:`check`.

        Args:
            checksums: the checksum of each rank, or the largest and the negated least one. They
                are copied, since they may be a view, which would keep the gathered rows in memory.
            call_text: the call of this rank, for an error.
        """
        self._pending.append(_PendingSignature(checksums.clone(), call_text))

    def __len__(self) -> int:
        return len(self._pending)

    def check(self) -> None:
        """Read all signatures that were not read yet.

        Raises:
            CollectiveMismatchError: the ranks made different calls. Each rank raises when it reads
                the signature.
        """
        pending = self._pending
        # Emptied first, so that an error is raised only once.
        self._pending = []
        for signature in pending:
            if not checksums_agree(signature.checksums):
                raise _mismatch_error(signature.call_text)


# See [Note: Signatures].
class _Rows:
    """The rows of the signed messages of one call, and views of them.

    A row has the checksum of a call, and then the data of the call if the data fits. A call in a
    loop uses its rows again, since making the views takes longer than copying a few numbers.

    Args:
        text: everything that must be the same on all ranks.
        buffer: a buffer with the dtype and device of the data.
        num_elements: the number of elements that a row carries. 0 if it carries no data.
        group_size: the number of ranks.

    Attributes:
        copies: the row of this rank, once for each rank, as 64-bit integers. A process group may
            send one copy to each rank, and would otherwise make the copies in every call.
        row: the first of the copies.
        copied_data: the view of the data in ``copies``, of shape ``(group_size, num_elements)``.
        received: the rows of all ranks, in rank order, as 64-bit integers.
        checksums: the view of the checksum of each rank in ``received``.
        data: the view of the data in ``received``, of shape ``(group_size, num_elements)``.
        data_by_rank: the views of the rows of ``data``.
    """

    def __init__(self, text: str, buffer: Tensor, num_elements: int, group_size: int) -> None:
        """Allocate rows with the checksum and without data. Not a collective.

        As 64-bit integers, each row has the checksum in column 0.
        """
        shape = (group_size, _ROW_BYTES // 8)
        # The column where the data begins if the rows are viewed in the dtype of the data.
        start = _DATA_START // buffer.itemsize
        # A tensor made in inference mode could not be written to by a later call outside of it.
        with torch.inference_mode(False):
            # The row to send, once for each receiver, and the views of its parts.
            self.copies = torch.zeros(shape, dtype=torch.int64, device=buffer.device)
            self.copies[:, 0].fill_(_checksum(text))
            self.row = self.copies[0]
            self.copied_data = self.copies.view(buffer.dtype).narrow(1, start, num_elements)
            # The rows that arrive, one from each rank, and the views of their parts.
            self.received = torch.empty_like(self.copies)
            self.checksums = self.received[:, 0]
            self.data = self.received.view(buffer.dtype).narrow(1, start, num_elements)
            self.data_by_rank = self.data.unbind()


# [Note: Signatures]
# The first message of a call carries a *signature*: a checksum of everything that must be the same
# on all ranks, such as operation, reduction, names, shapes and dtypes. The message is an all-gather
# of rows of one fixed length, since the backends abort or hang if lengths differ between ranks. If
# the data of a reduction or gather fits into the row after the checksum, the row carries the data,
# too, and each rank reduces the rows in rank order. Otherwise the call itself follows. In groups of
# more than 16 ranks, where the rows would take much memory, a max-reduction of the checksum and its
# negative precedes each call. Every rank sees whether all checksums agree, so either all ranks
# raise or none does. A rank that cannot make its call sends a checksum that no call has. On the CPU
# the rows of a call are kept for the next call with the same text, so that a call in a loop only
# copies its data.
#
# On an accelerator, reading a checksum waits for the device. So the checksums are kept in
# `PendingSignatures`, and are read where the program waits for the device anyway.
class CheckedCommunicator(Communicator):
    """A wrapper of any communicator that raises on all ranks if their calls differ.

    A *signature* is a checksum of everything that must be the same on all ranks. It travels in the
    *row* that each rank sends first, if possible together with the data of the call. Calls without
    a text to compare are passed on unchanged.

    Args:
        inner: the communicator that transfers the data.
        pending: the signatures that this process did not read yet. All its communicators share
            this object.
    """

    def __init__(self, inner: Communicator, pending: PendingSignatures) -> None:
        """Wrap the communicator ``inner``, which transfers the data. Not a collective."""
        self.rank = inner.rank
        self.size = inner.size
        self.device = inner.device
        self._inner = inner
        self._pending = pending
        # Reading a checksum waits for an accelerator, but not for the CPU.
        self._is_on_cpu = inner.device == _CPU
        # Rows of earlier calls, by the text of the call and the dtype and length of the data.
        self._unused_rows: dict[tuple[str, torch.dtype, int], _Rows] = {}

    @override
    def run(self, collective: Collective) -> Any:
        """Run a collective, and compare its signature with those of the other ranks.

        Raises:
            CollectiveMismatchError: the ranks made different calls. On an accelerator, the error
                may be raised later. See :class:`PendingSignatures`.
        """
        call = collective.call
        if call is None or call.signature_text is None:
            return self._inner.run(collective)
        if self.size > _MAX_GATHERED_GROUP:
            # A row from each rank would take much memory here. Two numbers are reduced instead.
            self._compare(collective, self._reduce_checksums(collective, call.signature_text))
            return self._inner.run(collective)
        return self._run_with_rows(collective, call.signature_text)

    @override
    def close(self) -> None:
        self._inner.close()

    def _run_with_rows(self, collective: Collective, text: str) -> Any:
        """Gather a row from each rank, compare the checksums, and return the collective's result.

        All rows have one length. A row has the checksum of the text, and then the data if it fits.
        If the rows carry the data, the result is computed from them. Otherwise the collective runs.

        Args:
            collective: the collective of this rank.
            text: everything that must be the same on all ranks.
        """
        buffer = collective.buffer
        has_result_from_rows = collective.operation in _WITH_RESULT_FROM_ROWS
        rows_carry_data = has_result_from_rows and buffer.nbytes <= _ROW_BYTES - _DATA_START
        num_elements = buffer.numel() if rows_carry_data else 0
        # Calls with this key have rows with the same checksum and the same place for the data, so a
        # call may use the rows of an earlier one.
        key = (text, buffer.dtype, num_elements)
        rows = None
        can_reuse_rows = self._can_reuse_rows(collective)
        if can_reuse_rows:
            # Removed while in use, since another thread may make the same call at the same time.
            rows = self._unused_rows.pop(key, None)
        if rows is None:
            rows = _Rows(text, buffer, num_elements, self.size)
        if rows_carry_data:
            rows.copied_data.copy_(buffer)
        gather = Collective(
            Operation.ALL_GATHER,
            rows.row,
            rows=rows.copies,
            output=rows.received,
            call=collective.call,
        )
        received = self._inner.run(gather)
        # The inner communicator may return a new tensor instead of writing to `output`.
        if received is not rows.received:
            rows.received.copy_(received)
        # Before the result: if the calls differ, the collective below could hang.
        self._compare(collective, rows.checksums)
        if not rows_carry_data:
            result = self._inner.run(collective)
        elif collective.reduce is None:
            # This is an all_gather. The result is a copy, since the rows are used again.
            result = rows.data.clone()
        else:
            result = fold(collective.reduce, rows.data_by_rank)
        # Not after an error, which leaves the rows to the garbage collector.
        if can_reuse_rows:
            # Bounds the memory of a program that makes many different calls.
            if len(self._unused_rows) == _MAX_UNUSED_ROWS:
                self._unused_rows.clear()
            self._unused_rows[key] = rows
        return result

    def _can_reuse_rows(self, collective: Collective) -> bool:
        """Return whether a call may take rows from ``_unused_rows``, and put them back afterwards.

        False is always safe: the call then makes rows of its own. True would be wrong if the rows
        were of no use to a later call, or in use by two calls at once.
        """
        buffer = collective.buffer
        if isinstance(buffer, FakeTensor):
            return False  # rows that are made in a dry run have no values
        # Kept rows save time for metrics: small tensors, or Python numbers, whose results are read
        # at once. For large tensors they would only take memory, which fabric.plan does not count.
        is_small = buffer.nbytes <= _MAX_REUSED_BYTES
        reads_result = collective.call is not None and collective.call.reads_result
        if not is_small and not reads_result:
            return False
        # On an accelerator, calls in several streams would use the rows at the same time.
        if not self._is_on_cpu:
            return False
        # A transform of torch.func cannot write to rows that were made outside of it.
        return current_transform() is None

    def _reduce_checksums(self, collective: Collective, text: str) -> Tensor:
        """Return the largest checksum of the ranks, and the negative of the least one.

        One reduction gives both. Their magnitudes are equal if all ranks have the same checksum.

        Args:
            collective: the collective of this rank.
            text: everything that must be the same on all ranks.
        """
        # torch.full() and not torch.tensor(), which would wait for an accelerator.
        checksums = torch.full((2,), _checksum(text), device=collective.buffer.device)
        checksums[1].neg_()
        reduction = Collective(Operation.ALL_REDUCE, checksums, Reduce.MAX, call=collective.call)
        return self._inner.run(reduction)

    def _compare(self, collective: Collective, checksums: Tensor) -> None:
        """Compare the checksums of all ranks, or keep them to be compared later.

        On the CPU they are compared at once. On an accelerator, where reading them waits for the
        device, they are compared at once only if this call waits for the device anyway, or if too
        many signatures are pending.

        Args:
            collective: the collective of this rank.
            checksums: the checksum of each rank, or the largest and the negated least checksum.

        Raises:
            CollectiveMismatchError: the checksums that were compared differ.
        """
        # In a dry run there are no other ranks, and the checksums have no values.
        if isinstance(checksums, FakeTensor):
            return
        # A shortcut, since making the text for an error takes longer than comparing. A mismatch on
        # the CPU is raised by check() below.
        if self._is_on_cpu and checksums_agree(checksums):
            return
        call = collective.call
        assert call is not None, "a signature without a call"
        text = (call.signature_text or "")[:_MAX_SHOWN_CHARACTERS]
        location = f"{call_site(collective)} (rank {self.rank} of {self.size})"
        self._pending.add(checksums, f"{text} at {location}")
        if self._is_on_cpu or call.reads_result or len(self._pending) > _MAX_PENDING:
            self._pending.check()


def call_site(collective: Collective) -> object:
    """Return where the user made a call, as an object whose ``str()`` is the text.

    The text is needed only for errors and reports, so it is not made here.
    """
    call = collective.call
    if call is not None and call.call_site is not None:
        return call.call_site
    # The search for a line of the user begins at the third caller, to save time: the nearer callers
    # are always functions of fabric. Without a line of the user this is a thread in which autograd
    # runs a backward pass.
    return user_call(sys._getframe(3)) or "a backward pass"


def checksums_agree(checksums: Tensor) -> bool:
    """Return whether all ranks sent the same checksum. Waits for the device.

    Args:
        checksums: the checksum of each rank or, after a max-reduction, the largest checksum and the
            negative of the least one. Checksums are never negative.
    """
    magnitudes = set(map(abs, checksums.tolist()))
    return len(magnitudes) == 1


def _checksum(text: str) -> int:
    """Return the checksum of a text. The empty text has a checksum that no other text has."""
    if not text:
        return _CHECKSUM_OF_FAILED_CALL
    # Names may contain lone surrogates, which strict UTF-8 refuses.
    return crc32(text.encode(errors="surrogatepass"))


def _mismatch_error(call_text: str) -> CollectiveMismatchError:
    """Return the error for ranks that make different calls.

    Args:
        call_text: the call of this rank, with the line of the user's code.
    """
    suggestion = "FABRIC_CHECK=1 python ... to see what the others call"
    # The usual mistake in an all_gather is a first dimension whose length differs between ranks.
    if call_text.startswith("all_gather"):
        ragged = "all_gather(x, ragged=True) or concat=True, where only first dimensions differ"
        suggestion = f"{ragged}; {suggestion}"
    return CollectiveMismatchError(
        call_text,
        problem="another rank of the group makes another call, or could not make its own",
        expected="the same operation and reduction on every rank, over the same names, shapes and "
        "dtypes",
        suggestion=suggestion,
    )

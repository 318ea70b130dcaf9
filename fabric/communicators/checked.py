"""Signatures of calls: every rank sees whether all ranks make the same call.

[Note: Signatures] The first message of a call carries a *signature*: a checksum of everything that
must be the same on all ranks, such as operation, reduction, names, shapes and dtypes. The message
is an all-gather of rows of one fixed length, since the backends abort or hang if lengths differ
between ranks. If the data of a reduction or gather fits into the row after the checksum, the row
carries the data, too, and each rank reduces the rows in rank order. Otherwise the call itself
follows. In groups of more than 16 ranks, where the rows would take much memory, a max-reduction of
the checksum and its negative precedes each call. Every rank sees whether all checksums agree, so
either all ranks raise or none does. A rank that cannot make its call sends a checksum that no call
has.

On an accelerator, reading a checksum waits for the device. So the checksums are kept in
:class:`PendingSignatures`, and are read where the program waits for the device anyway.
"""

import sys
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from fabric._torch import FakeTensor, real_tensors
from fabric.communicators.base import Collective, Communicator, Operation, Reduce
from fabric.communicators.process_group import fold
from fabric.diagnostics.call_site import user_call
from fabric.errors import CollectiveMismatchError

__all__ = [
    "CheckedCommunicator",
    "PendingSignatures",
    "SignedMessage",
    "call_site",
    "checksums_agree",
    "signed",
]

_CPU = torch.device("cpu")
_MAX_SHOWN_CHARACTERS = 200  # of a call's text in an error
_MAX_PENDING = 256  # signatures that may stay on the device
_FAILED = 1 << 32  # the checksum of a rank that cannot make its call. Every crc32 is smaller.
# The layout of a row: the checksum as an int64, padding up to 16 bytes that aligns complex128, and
# then the data, if it fits.
_ROW_BYTES = 8192
_DATA_START = 16
_MAX_GATHERED_GROUP = 16  # larger groups reduce their checksums instead of gathering rows


class SignedMessage(NamedTuple):
    """The first message of a call.

    Attributes:
        collective: the collective that carries the checksum.
        carries_data: whether the collective also carries the data of the call, so that no second
            collective is needed.
    """

    collective: Collective
    carries_data: bool


class _PendingSignature(NamedTuple):
    """A signature that was not read yet.

    Attributes:
        checksums: see :func:`checksums_agree`.
        call_text: the text of the call for an error.
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
            checksums: see :func:`checksums_agree`. They are copied, since a view would keep in
                memory the gathered rows, which also have the data of the ranks.
            call_text: the text of the call for an error.
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


class CheckedCommunicator(Communicator):
    """A wrapper of any communicator that raises on all ranks if their calls differ.

    See ``[Note: Signatures]``. Calls without a text to compare are passed on unchanged.

    Args:
        inner: the communicator that transfers the data.
        pending: the signatures of this process that were not read yet, of all its groups.
    """

    def __init__(self, inner: Communicator, pending: PendingSignatures) -> None:
        """Wrap the communicator ``inner``, which transfers the data. Not a collective."""
        self.rank = inner.rank
        self.size = inner.size
        self.device = inner.device
        self._inner = inner
        self._pending = pending

    @override
    def run(self, collective: Collective) -> Any:
        """Run a collective, and compare its signature with those of the other ranks.

        Raises:
            CollectiveMismatchError: the ranks made different calls. On an accelerator, the error
                may be raised later. See :class:`PendingSignatures`.
        """
        call = collective.call
        if call is None or call.text is None:
            return self._inner.run(collective)
        message = signed(collective, call.text, group_size=self.size)
        message_result = self._inner.run(message.collective)
        self._check(collective, call.text, message_result)
        if message.carries_data:
            return _result_from_rows(collective, rows=message_result)
        return self._inner.run(collective)

    @override
    def close(self) -> None:
        self._inner.close()

    def _check(self, collective: Collective, text: str, message_result: Tensor) -> None:
        """Compare the checksums of all ranks, or keep them to be compared later.

        On the CPU they are compared at once. On an accelerator, where reading them waits for the
        device, they are compared at once only if this call waits for the device anyway, or if too
        many signatures are pending. The comparison raises a CollectiveMismatchError.

        Args:
            collective: the collective of this rank.
            text: everything in which the ranks have to agree, for the error.
            message_result: the result of the signed message: one row per rank or, in a large group,
                the largest checksum and the negative of the least one.
        """
        has_rows = message_result.dim() > 1
        # Each row begins with the checksum of its rank.
        checksums = message_result.select(1, 0) if has_rows else message_result
        # In a dry run there are no other ranks, and the checksums have no values.
        if isinstance(checksums, FakeTensor):
            return
        is_on_cpu = self.device == _CPU
        # The usual case comes first, since making the text for an error takes longer than
        # comparing.
        if is_on_cpu and checksums_agree(checksums):
            return
        location = f"{call_site(collective)} (rank {self.rank} of {self.size})"
        self._pending.add(checksums, f"{text[:_MAX_SHOWN_CHARACTERS]} at {location}")
        waits_for_device = collective.call is not None and collective.call.reads_result
        if is_on_cpu or waits_for_device or len(self._pending) > _MAX_PENDING:
            self._pending.check()


def call_site(collective: Collective) -> object:
    """Return where the user made a call, as an object whose ``str()`` is the text.

    The text is needed only for errors and reports, so it is not made here.
    """
    call = collective.call
    if call is not None and call.call_site is not None:
        return call.call_site
    # user_call() returns None in the threads in which autograd runs backward passes: their stack
    # has no frame of user code.
    return user_call(sys._getframe(1)) or "a backward pass"


def signed(collective: Collective, text: str, group_size: int) -> SignedMessage:
    """Return the message that carries a call's checksum and, if it fits, the call's data.

    See ``[Note: Signatures]``.

    Args:
        collective: the call.
        text: everything in which the ranks have to agree. Empty if this rank cannot make its call.
        group_size: the number of ranks that make the call.

    Returns:
        An all-gather of one row per rank: the checksum and, if it fits, the data. In a group of
        more than 16 ranks, a max-reduction of the checksum and its negative, without the data.
    """
    buffer = collective.buffer
    # Names may contain lone surrogates, which strict UTF-8 refuses.
    checksum = crc32(text.encode(errors="surrogatepass")) if text else _FAILED
    row = _empty_row(checksum, buffer.device).clone()  # a copy, since the row is cached
    if group_size > _MAX_GATHERED_GROUP:
        # Under MAX, these become the largest checksum and the negative of the least one. They are
        # equal but for the sign if all checksums are equal.
        checksums = torch.stack([row[0], -row[0]])
        reduction = Collective(Operation.ALL_REDUCE, checksums, Reduce.MAX, call=collective.call)
        return SignedMessage(reduction, carries_data=False)
    # The operations whose result each rank can compute from the data of all ranks.
    has_result_from_rows = collective.operation in (Operation.ALL_REDUCE, Operation.ALL_GATHER)
    carries_data = has_result_from_rows and buffer.nbytes <= _ROW_BYTES - _DATA_START
    if carries_data:
        _data_of(row, buffer).copy_(buffer)
    gather = Collective(Operation.ALL_GATHER, row, call=collective.call)
    return SignedMessage(gather, carries_data)


def checksums_agree(checksums: Tensor) -> bool:
    """Return whether all ranks sent the same checksum. Waits for the device.

    Args:
        checksums: the checksum of each rank or, after a max-reduction, the largest checksum and the
            negative of the least one. Checksums are never negative.
    """
    magnitudes = {abs(checksum) for checksum in checksums.tolist()}
    return len(magnitudes) == 1


def _result_from_rows(collective: Collective, rows: Tensor) -> Tensor:
    """Return the result of a collective whose data came with the checksums.

    Args:
        collective: an all_reduce or all_gather of a flat buffer.
        rows: the gathered rows, as int64 of shape ``(ranks, row length)``. Each row has the
            checksum, the data of one rank, and padding.

    Returns:
        The reduced data or, for an all_gather, the data of each rank, of shape ``(ranks, length of
        the buffer)``.
    """
    data_by_rank = _data_of(rows, collective.buffer)
    if collective.reduce is None:
        # This is an all_gather. The result is a copy, since a view would keep the whole rows in
        # memory.
        return data_by_rank.clone()
    return fold(collective.reduce, data_by_rank.unbind())


def _data_of(rows: Tensor, buffer: Tensor) -> Tensor:
    """Return the data of a call in one row or in several rows, as a view.

    Args:
        rows: the rows, as int64. The last dimension is the length of a row.
        buffer: the buffer of the call, which is flat.
    """
    # torch allows this view, since the start of the data and the length of a row are multiples of
    # the size of every dtype.
    start = _DATA_START // buffer.itemsize
    return rows.view(buffer.dtype).narrow(-1, start, buffer.numel())


def _mismatch_error(call_text: str) -> CollectiveMismatchError:
    """Return the error for ranks that make different calls.

    Args:
        call_text: the call of this rank, with the line of the user's code.
    """
    suggestion = "FABRIC_CHECK=1 python ... to see what the others call"
    # The usual mistake in an all_gather are lengths that differ.
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


@lru_cache(maxsize=64)
def _empty_row(checksum: int, device: torch.device) -> Tensor:
    """Return a row of a signed message with a checksum and no data. Callers must not write to it.

    Rows are cached, since a loop makes the same calls again, and it is faster to copy a row on the
    device than to transfer a checksum from the CPU.
    """
    # Real tensors in a dry run, too: a call after the dry run may get the same row from the cache.
    with real_tensors():
        checksum_tensor = torch.tensor([checksum], device=device)
        num_elements = _ROW_BYTES // checksum_tensor.element_size()
        return pad(checksum_tensor, (0, num_elements - 1))

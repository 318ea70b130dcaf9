"""Signatures of calls: every rank sees whether all ranks make the same call.

[Note: Signatures] The first message of a call carries a checksum of everything that must be the
same on all ranks: operation, reduction, names, shapes, dtypes. The message is an all-gather of rows
of one fixed length, since the backends abort or hang if lengths differ between ranks. If the data
of a reduction or gather fits into the row after the checksum, the row carries the data, too, and
each rank reduces the rows in rank order. Otherwise the call itself follows. In large groups, where
the rows would take much memory, a max-reduction of the checksum and its negative precedes each
call. Every rank sees whether all checksums agree, so either all ranks raise or none does. A rank
that cannot make its call sends a checksum that matches no other.
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
_SHOWN_CHARACTERS = 200  # of a call's text in an error
_MOST_PENDING = 256  # signatures that may stay on the device
_FAILED = 1 << 32  # the checksum of a rank that cannot make its call; crc32 is below it
_ROW_BYTES = 8192
_CHECKSUM_BYTES = 16  # at the start of a row: the checksum, and padding that aligns complex128
_LARGEST_GATHERED_GROUP = 16  # larger groups reduce their checksums instead of gathering rows


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
    checksums: Tensor
    call: str


class PendingSignatures:
    """The signatures that are still on the device. They are read where the device is waited for."""

    def __init__(self) -> None:
        self._pending: list[_PendingSignature] = []

    def add(self, checksums: Tensor, call: str) -> None:
        """Keep the checksums of all ranks until :meth:`check`.

        Args:
            checksums: see :func:`checksums_agree`. They are copied.
            call: the text of the call for an error.
        """
        self._pending.append(_PendingSignature(checksums.clone(), call))

    def __len__(self) -> int:
        return len(self._pending)

    def check(self) -> None:
        """Read all signatures that are still on the device.

        Raises:
            CollectiveMismatchError: the ranks made different calls. Every rank raises when it reads
                the signature.
        """
        pending = self._pending
        self._pending = []
        for signature in pending:
            if not checksums_agree(signature.checksums):
                raise _mismatch_error(signature.call)


class CheckedCommunicator(Communicator):
    """A wrapper of any communicator that raises on all ranks if their calls differ.

    See ``[Note: Signatures]``. Calls without a description are passed on unchanged.

    Args:
        inner: the communicator that transfers the data.
        pending: the signatures of this process that have not been read yet.
    """

    def __init__(self, inner: Communicator, pending: PendingSignatures) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self.device = inner.device
        self._inner = inner
        self._pending = pending

    @override
    def run(self, collective: Collective) -> Any:
        call = collective.call
        if call is None or call.text is None:
            return self._inner.run(collective)
        message = signed(collective, call.text, self.size)
        result = self._inner.run(message.collective)
        self._check(collective, call.text, result)
        if message.carries_data:
            return _data_of(collective, result)
        return self._inner.run(collective)

    @override
    def close(self) -> None:
        self._inner.close()

    def _check(self, collective: Collective, text: str, result: Tensor) -> None:
        """Compare the checksums in a signed message's result, at once on the CPU, else later."""
        checksums = result[:, 0] if result.dim() > 1 else result
        if isinstance(checksums, FakeTensor):  # a dry run has no other ranks
            return
        on_cpu = self.device == _CPU
        if on_cpu and checksums_agree(checksums):
            return
        place = f"{call_site(collective)} (rank {self.rank} of {self.size})"
        self._pending.add(checksums, f"{text[:_SHOWN_CHARACTERS]} at {place}")
        waits_for_device = collective.call is not None and collective.call.reads_result
        if on_cpu or waits_for_device or len(self._pending) > _MOST_PENDING:
            self._pending.check()


def call_site(collective: Collective) -> object:
    """Return where the user made a call; ``str()`` of the result is the text."""
    call = collective.call
    if call is not None and call.call_site is not None:
        return call.call_site
    # In autograd's own threads no frame is user code.
    return user_call(sys._getframe(1)) or "a backward pass"


def signed(collective: Collective, text: str, group_size: int) -> SignedMessage:
    """Return the message that carries a call's checksum, and if it fits, the call's data.

    See ``[Note: Signatures]``.

    Args:
        collective: the call.
        text: everything in which the ranks have to agree. Empty if this rank cannot make its call.
        group_size: the number of ranks that make the call.
    """
    buffer = collective.buffer
    checksum = crc32(text.encode(errors="surrogatepass")) if text else _FAILED
    row = _empty_row(checksum, buffer.device).clone()
    if group_size > _LARGEST_GATHERED_GROUP:
        # Under MAX, these become the largest checksum and the negative of the least one. They are
        # equal but for the sign if all checksums are equal.
        checksums = torch.stack([row[0], -row[0]])
        reduction = Collective(Operation.ALL_REDUCE, checksums, Reduce.MAX, call=collective.call)
        return SignedMessage(reduction, carries_data=False)
    is_gathered = collective.operation in (Operation.ALL_REDUCE, Operation.ALL_GATHER)
    carries_data = is_gathered and buffer.nbytes <= _ROW_BYTES - _CHECKSUM_BYTES
    if carries_data:
        end = _CHECKSUM_BYTES + buffer.nbytes
        row.view(torch.uint8)[_CHECKSUM_BYTES:end] = buffer.view(torch.uint8)
    gather = Collective(Operation.ALL_GATHER, row, call=collective.call)
    return SignedMessage(gather, carries_data)


def checksums_agree(checksums: Tensor) -> bool:
    """Return whether all ranks sent the same checksum.

    Args:
        checksums: the checksum of each rank, or the largest one and the negative of the least one.
    """
    magnitudes = {abs(checksum) for checksum in checksums.tolist()}
    return len(magnitudes) == 1


def _data_of(collective: Collective, rows: Tensor) -> Tensor:
    """Return the result of a reduction or gather whose data came with the checksums.

    Args:
        collective: the reduction or gather.
        rows: the row of each rank: the checksum, the data, and padding.
    """
    buffer = collective.buffer
    end = _CHECKSUM_BYTES + buffer.nbytes
    data_bytes = rows.view(torch.uint8)[:, _CHECKSUM_BYTES:end]
    # The checksum's bytes and a row's bytes are multiples of the size of any dtype.
    data_by_rank = data_bytes.view(buffer.dtype)
    if collective.reduce is None:
        # This is a gather. The result is a copy, since a view would keep the whole rows in memory.
        return data_by_rank.clone()
    return fold(collective.reduce, data_by_rank.unbind())


def _mismatch_error(call: str) -> CollectiveMismatchError:
    suggestion = "FABRIC_CHECK=1 python ... to see what the others call"
    if call.startswith("all_gather"):
        ragged = "all_gather(x, ragged=True) or concat=True, where only first dimensions differ"
        suggestion = f"{ragged}; {suggestion}"
    return CollectiveMismatchError(
        call,
        problem="another rank of the group makes another call, or could not make its own",
        expected="the same operation and reduction on every rank, over the same names, shapes and "
        "dtypes",
        suggestion=suggestion,
    )


@lru_cache(maxsize=64)
def _empty_row(checksum: int, device: torch.device) -> Tensor:
    """Return a row of a signed message without data."""
    with real_tensors():  # in a dry run, too: later calls get the same tensor
        return pad(torch.tensor([checksum], device=device), (0, _ROW_BYTES // 8 - 1))

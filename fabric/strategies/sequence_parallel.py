"""Sequence parallelism: sequences split over ranks, with attention over all tokens.

[Note: Sequence parallelism] Each rank of the mesh dimension ``sequence`` has a contiguous part of
the tokens of each sequence. If the length is not divisible, the first parts have one token more.
Operations on single tokens need no change. Attention needs all tokens: if the number of heads is
divisible by the number of ranks, an all-to-all gives each rank some heads of all tokens, and a
second returns the outputs (Ulysses). Otherwise each rank gathers keys and values for its own
queries. The gradients are those of the sum of all ranks' losses, which the strategy averages.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import multi_head_attention_forward, pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from fabric.collectives import all_gather, all_to_all
from fabric.communicators import Communicator
from fabric.errors import CollectiveMismatchError, ConfigurationError, UsageError
from fabric.runtime import Runtime
from fabric.tree import flatten, leaf_paths, unflatten

__all__ = ["sequence_parallel"]

_BLOCK = "fabric.sequence_parallel(batch)"


@contextmanager
def sequence_parallel(runtime: Runtime, mesh: Any, batch: Any, dim: int) -> Iterator[Any]:
    """Split the sequences of a batch over ranks for the forward and backward pass in the block.

    Collective over the ranks that have parts of the same sequences, see ``[Note: Sequence
    parallelism]``. All of these ranks pass the same batch, as set-up loaders yield it. Within the
    block, ``scaled_dot_product_attention`` attends to the tokens of all these ranks, and random
    numbers differ between parts. Without a ``sequence`` dimension in the mesh, the batch is yielded
    unchanged::

        # A batch is a dict with "tokens", "labels" and "positions", of shape (batch, tokens).
        for batch in loader:
            with fabric.sequence_parallel(batch) as part:
                logits = model(part["tokens"], part["positions"]).flatten(0, 1)
                loss = cross_entropy(logits, part["labels"].flatten(), reduction="sum")
                fabric.backward(loss, weight=part["labels"].numel())
            optimizer.step()
            optimizer.zero_grad()

    Args:
        runtime: the runtime of this process.
        mesh: the mesh of the processes, or None.
        batch: any collection. It contains everything that depends on a token's position. Labels are
            already shifted.
        dim: the dimension along which tensors are split. Tensors without it are unchanged.

    Yields:
        The same collection with this rank's tokens.

    Raises:
        CollectiveMismatchError: the ranks pass different batches.
        ConfigurationError: tensors have different lengths, or fewer tokens than ranks. Within the
            block: attention to anything but the tokens of the batch, or with a mask that is neither
            ``(..., tokens of this rank, all tokens)`` nor a key mask, ``(..., 1, all tokens)`` or
            ``(..., 1, tokens of this rank)``.
        UsageError: no attention was computed by ``scaled_dot_product_attention``, or attention was
            computed by ``nn.MultiheadAttention``, which is not supported.
    """
    if mesh is None or "sequence" not in (mesh.mesh_dim_names or ()):
        yield batch
        return
    communicator = runtime.communicator_over(mesh.get_group("sequence"))
    lengths, local_batch = _split_batch(communicator, batch, dim)
    seed = int(torch.randint(1 << 62, ()))
    devices: list[torch.device] = []
    if runtime.device.type != "cpu":
        devices.append(runtime.device)
    # After the block, the ranks have the same random numbers again.
    with (
        torch.random.fork_rng(devices, device_type=runtime.device.type),
        _SequenceParallelAttention(communicator, lengths) as attention,
    ):
        torch.manual_seed(seed + communicator.rank)
        yield local_batch
    if not attention.calls:
        raise UsageError(
            _BLOCK,
            problem="scaled_dot_product_attention was not called: each rank has used its own "
            "tokens alone",
        )


def _split_batch(communicator: Communicator, batch: Any, dim: int) -> tuple[list[int], Any]:
    """Return the number of tokens of each rank, and the batch with this rank's tokens. Collective.

    Args:
        communicator: the ranks that have parts of the same sequences.
        batch: any collection.
        dim: the dimension of the tokens. Tensors without it are unchanged.
    """
    leaves, structure = flatten(batch)
    paths = leaf_paths(structure, "batch")
    sequences: dict[str, Tensor] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim():
            sequences[path] = leaf
    length_of_leaf = {path: sequence.shape[dim] for path, sequence in sequences.items()}
    length = _check_lengths(length_of_leaf, dim, communicator.size)
    _check_same_batch(communicator, sequences, length_of_leaf)

    lengths = _split_length(length, communicator.size)
    for index, path in enumerate(paths):
        if path in sequences:
            by_rank = sequences[path].split(lengths, dim)
            leaves[index] = by_rank[communicator.rank].contiguous()
    return lengths, unflatten(structure, leaves)


def _check_lengths(length_of_leaf: Mapping[str, int], dim: int, ranks: int) -> int:
    """Return the one length of all tensors that are split. Raise if there is none, or too few."""
    lengths = set(length_of_leaf.values())
    length = max(lengths, default=0)
    if lengths != {length} or length < ranks:
        raise ConfigurationError(
            f"{_BLOCK} with {dim=}",
            problem=f"the lengths are {dict(length_of_leaf)}",
            expected=f"one length of all tensors that have that dimension, of at least {ranks} "
            "tokens",
            suggestion="leave out others",
        )
    return length


def _check_same_batch(
    communicator: Communicator,
    sequences: Mapping[str, Tensor],
    length_of_leaf: Mapping[str, int],
) -> None:
    """Raise if the ranks pass different batches, whose parts would be combined. Collective.

    Only the bytes of tensors on the CPU are compared, since other tensors would have to be waited
    for.
    """
    checksums: list[int] = []
    for sequence in sequences.values():
        if sequence.is_cpu:
            checksum = sequence.contiguous().view(torch.uint8).sum()
            checksums.append(int(checksum))
    # The names and lengths are in the key, which has to be the same on all ranks.
    request = f"{_BLOCK} of {dict(length_of_leaf)}"
    message = torch.tensor(checksums or [0], device=communicator.device)
    by_rank = all_gather(communicator, {request: message})[request]
    if not checksums:
        return
    rows = by_rank.tolist()
    if rows.count(rows[0]) != len(rows):
        raise CollectiveMismatchError(
            request,
            problem=f"the bytes of these tensors have the sums {rows}, by rank of the group",
            expected="the same batch on all of them, as set-up loaders give it",
        )


def _split_length(length: int, ranks: int) -> list[int]:
    """Return the number of tokens of each rank. The first ranks have one more."""
    quotient, remainder = divmod(length, ranks)
    lengths = [quotient] * ranks
    for rank in range(remainder):
        lengths[rank] += 1
    return lengths


class _SequenceParallelAttention(TorchFunctionMode):
    """A mode in which ``scaled_dot_product_attention`` covers the tokens of all ranks.

    Args:
        communicator: the ranks that have parts of the same sequences.
        lengths: the number of tokens of each rank. The first is the largest.

    Attributes:
        calls: the number of calls of ``scaled_dot_product_attention``.
    """

    def __init__(self, communicator: Communicator, lengths: list[int]) -> None:
        super().__init__()
        self._communicator = communicator
        self._lengths = lengths
        self._length = lengths[communicator.rank]
        self._total = sum(lengths)
        self.calls = 0
        # Collectives are not part of a compiled graph.
        self._attend_outside_of_graphs = torch.compiler.disable(self._attend)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is multi_head_attention_forward:
            raise UsageError(
                _BLOCK,
                problem="nn.MultiheadAttention would compute attention over the tokens of this "
                "rank alone",
            )
        if func is scaled_dot_product_attention:
            return self._attend_outside_of_graphs(*args, **kwargs)
        if func is Tensor.backward:
            # Checkpointed modules recompute in the backward pass, which needs this mode. Given an
            # edge of the graph instead of the loss, torch does not call this method again.
            gradient = kwargs.pop("gradient")
            with self:
                return torch.autograd.backward(get_gradient_edge(args[0]), gradient, **kwargs)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Compute attention of this rank's queries to the keys of all ranks. Collective."""
        self.calls += 1
        self._check_inputs(query, key, value, attn_mask)
        options["dropout_p"] = dropout_p
        can_split_heads = attn_mask is None
        for tensor in (query, key, value):
            has_heads = tensor.dim() > 2
            if not has_heads or tensor.shape[-3] % self._communicator.size:
                can_split_heads = False
        if can_split_heads:
            return self._attend_by_heads(query, key, value, is_causal, options)
        return self._attend_to_gathered(query, key, value, attn_mask, is_causal, options)

    def _check_inputs(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
    ) -> None:
        """Raise unless attention is among the tokens of the batch, with a mask of known shape."""
        length = self._length
        total = self._total
        counts = [query.shape[-2], key.shape[-2], value.shape[-2]]
        is_mask_valid = True
        mask_shape: list[int] = []
        if attn_mask is not None:
            mask_shape = list(attn_mask.shape[-2:])
            is_mask_valid = mask_shape in ([length, total], [1, total], [1, length])
        if counts == [length] * 3 and is_mask_valid:
            return
        rank = self._communicator.rank
        raise ConfigurationError(
            f"attention in {_BLOCK} on rank {rank}, which has {length} of {total} tokens",
            problem=f"queries, keys and values have {counts} tokens, and the shape of the mask "
            f"ends in {mask_shape}",
            expected=f"{length} of each, and a mask of shape (..., {length}, {total}), (..., 1, "
            f"{total}) or (..., 1, {length})",
            suggestion="other attention outside of the block",
        )

    def _attend_by_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Compute attention for some heads of all tokens. Collective."""
        ranks = self._communicator.size
        # Of shape (ranks, ..., heads / ranks, tokens of a rank, width): one message to each rank.
        messages: list[Tensor] = []
        for tensor in (query, key, value):
            messages.append(self._pad(tensor).unflatten(-3, (ranks, -1)).movedim(-4, 0))
        query, key, value = map(self._join, all_to_all(self._communicator, messages))
        output = scaled_dot_product_attention(query, key, value, is_causal=is_causal, **options)
        outputs_by_rank = map(self._pad, output.split(self._lengths, -2))
        outputs = all_to_all(self._communicator, torch.stack([*outputs_by_rank]))
        return outputs[..., : self._length, :].movedim(0, -4).flatten(-4, -3)

    def _attend_to_gathered(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Compute attention of this rank's queries to gathered keys and values. Collective."""
        if attn_mask is not None and list(attn_mask.shape[-2:]) == [1, self._length]:
            # Transposed, so that tokens are in the same dimension as those of the keys.
            key, value, mask = self._gather([key, value, attn_mask.mT])
            attn_mask = mask.mT
        else:
            key, value = self._gather([key, value])
        if is_causal and attn_mask is None:
            # The keys end at this rank's last token. is_causal would align the first tokens.
            end = sum(self._lengths[: self._communicator.rank + 1])
            key = key[..., :end, :]
            value = value[..., :end, :]
            attn_mask = torch.ones(self._length, end, dtype=torch.bool, device=query.device)
            attn_mask = attn_mask.tril(end - self._length)
            is_causal = False
        return scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, **options
        )

    def _gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors with the tokens of all ranks, in one message. Collective."""
        padded = [self._pad(tensor) for tensor in tensors]
        gathered = all_gather(self._communicator, padded, sync_grads=True)
        return [self._join(tensor) for tensor in gathered]

    def _pad(self, tensor: Tensor) -> Tensor:
        """Pad the tokens of a rank to the largest number, since messages are of one size."""
        return pad(tensor, (0, 0, 0, self._lengths[0] - tensor.shape[-2]))

    def _join(self, tensors: Tensor) -> Tensor:
        """Concatenate the padded tokens of all ranks, which are in dimension 0, without padding."""
        sequences: list[Tensor] = []
        for tensor, length in zip(tensors, self._lengths, strict=True):
            sequences.append(tensor[..., :length, :])
        return torch.cat(sequences, -2)

"""Sequence parallelism: sequences split over ranks, with attention over all tokens."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import multi_head_attention_forward, pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from fabric._torch import trace_only_inside_of_graphs
from fabric.collectives import all_gather, all_to_all
from fabric.communicators import Communicator
from fabric.errors import CollectiveMismatchError, ConfigurationError, UsageError
from fabric.runtime import Runtime
from fabric.tree import flatten, leaf_paths, unflatten

__all__ = ["sequence_parallel"]

# The call, for errors.
_BLOCK = "fabric.sequence_parallel(batch)"


# [Note: Sequence parallelism]
# Each rank along the mesh dimension `sequence` has a contiguous part of the tokens of each
# sequence. If the length is not divisible, the first ranks have one token more. Operations on
# single tokens need no change. Attention needs all tokens, and there are two ways:
#
# - If the number of heads is divisible by the number of ranks, an all-to-all gives each rank some
#   heads of all tokens. A second all-to-all returns the outputs (Ulysses).
# - Otherwise each rank gathers all keys and values for its own queries.
#
# The gradients belong to the sum of all ranks' losses. The strategy averages them over the ranks.
@contextmanager
def sequence_parallel(runtime: Runtime, mesh: Any, batch: Any, dim: int) -> Iterator[Any]:
    """Split the sequences of a batch over ranks for the forward and backward pass in the block.

    Collective over the ranks that have parts of the same sequences. All of these ranks pass the
    same batch, as set-up loaders yield it. Within the block, ``scaled_dot_product_attention``
    attends to the tokens of all these ranks, and random numbers differ between ranks. Without a
    ``sequence`` dimension in the mesh, the batch is yielded unchanged::

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
        batch: any collection. All tensors that depend on the position of a token have to be in the
            collection. Labels have to be shifted already.
        dim: the dimension along which tensors are split. Tensors without this dimension are
            unchanged.

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
    # The mesh has the dimension only if its size is more than 1.
    if mesh is None or "sequence" not in (mesh.mesh_dim_names or ()):
        yield batch
        return
    communicator = runtime.communicator_over(mesh.get_group("sequence"))
    lengths, local_batch = _split_batch(communicator, batch, dim)
    # The ranks have the same random state here, and so they draw the same seed.
    seed = int(torch.randint(high=1 << 62, size=()))
    devices: list[torch.device] = []
    if runtime.device.type != "cpu":
        devices.append(runtime.device)
    # fork_rng restores the random state at the end, so that the ranks draw the same numbers again.
    with (
        torch.random.fork_rng(devices, device_type=runtime.device.type),
        _SequenceParallelAttention(communicator, lengths) as attention,
    ):
        torch.manual_seed(seed + communicator.rank)
        yield local_batch
    if attention.num_attentions == 0:
        raise UsageError(
            _BLOCK,
            problem="scaled_dot_product_attention was not called: each rank has used its own "
            "tokens alone",
        )


def _split_batch(communicator: Communicator, batch: Any, dim: int) -> tuple[list[int], Any]:
    """Split a batch over ranks. Collective, since the batches of the ranks are compared.

    Args:
        communicator: the ranks that have parts of the same sequences.
        batch: any collection.
        dim: the dimension of the tokens. Tensors without this dimension are unchanged.

    Returns:
        The number of tokens of each rank, and the batch with this rank's tokens.

    Raises:
        ConfigurationError: the tensors cannot be split.
        CollectiveMismatchError: the ranks pass different batches.
    """
    leaves, structure = flatten(batch)
    paths = leaf_paths(structure, "batch")
    sequences: dict[str, Tensor] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim():
            sequences[path] = leaf
    lengths_by_path = {path: sequence.shape[dim] for path, sequence in sequences.items()}
    length = _common_length(lengths_by_path, dim, communicator.size)
    _check_same_batch(communicator, sequences, lengths_by_path)

    lengths = _split_length(length, communicator.size)
    for index, path in enumerate(paths):
        if path in sequences:
            by_rank = sequences[path].split(lengths, dim)
            leaves[index] = by_rank[communicator.rank].contiguous()
    return lengths, unflatten(structure, leaves)


def _common_length(lengths_by_path: Mapping[str, int], dim: int, ranks: int) -> int:
    """Return the length that all tensors to split have in common.

    Args:
        lengths_by_path: the length of each tensor, by its path in the batch.
        dim: the dimension along which tensors are split, for the error.
        ranks: the number of ranks. Each needs at least one token.

    Raises:
        ConfigurationError: there are no tensors, their lengths differ, or there are too few tokens.
    """
    distinct_lengths = set(lengths_by_path.values())
    if len(distinct_lengths) == 1:
        length = distinct_lengths.pop()
        if length >= ranks:
            return length
    raise ConfigurationError(
        f"{_BLOCK} with {dim=}",
        problem=f"the lengths are {dict(lengths_by_path)}",
        expected=f"one length of all tensors that have that dimension, of at least {ranks} tokens",
        suggestion="fabric.sequence_parallel(batch) without the tensors of other lengths",
    )


def _check_same_batch(
    communicator: Communicator,
    sequences: Mapping[str, Tensor],
    lengths_by_path: Mapping[str, int],
) -> None:
    """Raise if the ranks pass different batches. Collective.

    The paths and lengths are compared, and for tensors on the CPU the sums of their bytes. The
    bytes of tensors on another device are not compared, since reading a sum would wait for the
    device.

    Args:
        communicator: the ranks that have parts of the same sequences.
        sequences: the tensors to split, by path in the batch.
        lengths_by_path: the length of each of these tensors.

    Raises:
        CollectiveMismatchError: the batches differ.
    """
    checksums: list[int] = []
    for sequence in sequences.values():
        if sequence.is_cpu:
            checksum = sequence.contiguous().view(torch.uint8).sum()
            checksums.append(int(checksum))
    # all_gather raises if the ranks pass different keys, and so compares the paths and lengths.
    key = f"{_BLOCK} of {dict(lengths_by_path)}"
    # A zero stands for no checksums, so that the keys are compared in any case.
    message = torch.tensor(checksums or [0], device=communicator.device)
    gathered = all_gather(communicator, {key: message})[key]
    if not checksums:
        return
    checksums_by_rank = gathered.tolist()
    are_equal = checksums_by_rank.count(checksums_by_rank[0]) == len(checksums_by_rank)
    if not are_equal:
        raise CollectiveMismatchError(
            key,
            problem=f"the bytes of these tensors have the sums {checksums_by_rank}, by rank of the "
            "group",
            expected="the same batch on all of them, as set-up loaders give it",
        )


def _split_length(length: int, ranks: int) -> list[int]:
    """Return the number of tokens of each rank. If they differ, the first ranks have one more."""
    quotient, remainder = divmod(length, ranks)
    lengths = [quotient] * ranks
    for rank in range(remainder):
        lengths[rank] += 1
    return lengths


class _SequenceParallelAttention(TorchFunctionMode):
    """A mode in which ``scaled_dot_product_attention`` covers the tokens of all ranks.

    Tensors are of shape ``(..., heads, tokens of this rank, width)``.

    Args:
        communicator: the ranks that have parts of the same sequences.
        lengths: the number of tokens of each rank. The first number is the largest.

    Attributes:
        calls: the number of calls of ``scaled_dot_product_attention`` so far.
    """

    def __init__(self, communicator: Communicator, lengths: list[int]) -> None:
        """Keep the lengths. The mode starts when it is entered."""
        super().__init__()
        self._communicator = communicator
        self._lengths = lengths  # the number of tokens of each rank
        self._local_length = lengths[communicator.rank]
        self._total_length = sum(lengths)
        # sequence_parallel() raises if no attention was computed in its block.
        self.num_attentions = 0
        # torch.compile cannot put the collectives of attention into a graph.
        self._attend_outside_of_graphs = torch.compiler.disable(self._attend)
        # Otherwise torch.compile would make a graph of this method for each kind of operation that
        # runs outside of graphs.
        trace_only_inside_of_graphs(_SequenceParallelAttention.__torch_function__)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, or the replacement of an attention function.

        torch calls this method for every function that is called under the mode.

        Raises:
            UsageError: the function is the attention of ``nn.MultiheadAttention``.
        """
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
            # A recomputation in the backward pass calls attention, too, and needs the mode.
            return self._run_backward(*args, **kwargs)
        return func(*args, **kwargs)

    def _run_backward(self, loss: Tensor, gradient: Tensor | None, **options: Any) -> None:
        """Run ``loss.backward(gradient, **options)`` under the mode.

        Checkpointed modules compute their attention again in the backward pass. But torch has
        switched the mode off while it runs :meth:`__torch_function__`, which calls this method.
        """
        with self:
            # An edge of the graph: for a tensor, torch would call __torch_function__ again.
            torch.autograd.backward(get_gradient_edge(loss), gradient, **options)

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
        """Compute attention of this rank's queries to the keys of all ranks. Collective.

        The parameters and the result are those of ``scaled_dot_product_attention``.
        """
        self.num_attentions += 1  # sequence_parallel() raises if it is still 0 after its block
        self._check_inputs(query, key, value, attn_mask)
        options["dropout_p"] = dropout_p
        # Heads are exchanged if possible. A mask may differ between heads and is not exchanged.
        can_split_heads = attn_mask is None
        for tensor in (query, key, value):
            has_heads = tensor.dim() > 2  # in dim -3
            if not has_heads or tensor.shape[-3] % self._communicator.size:
                can_split_heads = False
        if can_split_heads:
            return self._attend_by_heads(query, key, value, is_causal, options)
        return self._attend_to_gathered(query, key, value, attn_mask, is_causal, options)

    def _check_inputs(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
    ) -> None:
        """Raise unless attention is among the tokens of the batch, with a mask of a known shape.

        Raises:
            ConfigurationError: the queries, keys or values have another number of tokens than this
                rank's part of the batch, or the mask has another shape.
        """
        length = self._local_length
        total = self._total_length
        token_counts = [query.shape[-2], key.shape[-2], value.shape[-2]]
        is_mask_valid = True
        mask_shape: list[int] = []
        if attn_mask is not None:
            mask_shape = list(attn_mask.shape[-2:])
            is_mask_valid = mask_shape in ([length, total], [1, total], [1, length])
        if token_counts == [length] * 3 and is_mask_valid:
            return
        rank = self._communicator.rank
        raise ConfigurationError(
            f"attention in {_BLOCK} on rank {rank}, which has {length} of {total} tokens",
            problem=f"queries, keys and values have {token_counts} tokens, and the shape of the "
            f"mask ends in {mask_shape}",
            expected=f"{length} of each, and a mask of shape (..., {length}, {total}), (..., 1, "
            f"{total}) or (..., 1, {length})",
            suggestion="attention to other tokens outside of the block",
        )

    def _attend_by_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Compute attention for some heads of all tokens, and exchange the outputs. Collective.

        A rank has all heads of its own tokens. The ranks exchange the queries, keys and values, so
        that a rank has some of the heads of all tokens. The outputs are exchanged in the opposite
        direction.

        Args:
            query: this rank's queries, of shape ``(..., heads, tokens, width)``. The number of
                heads is divisible by the number of ranks.
            key: this rank's keys. The number of heads is divisible, too.
            value: this rank's values. The number of heads is divisible, too.
            is_causal: whether a query attends only to the tokens up to its own.
            options: other keyword arguments of ``scaled_dot_product_attention``.

        Returns:
            All heads of the output for this rank's queries.
        """
        ranks = self._communicator.size
        # Row n of a message goes to rank n. It has the n-th part of the heads, for this rank's
        # tokens. A message has the shape (ranks, ..., heads / ranks, padded tokens, width). The
        # tokens are padded, because messages of all ranks must have the same size.
        messages: list[Tensor] = []
        for tensor in (query, key, value):
            split_heads = self._pad(tensor).unflatten(-3, (ranks, -1))
            messages.append(split_heads.movedim(-4, 0))
        received = all_to_all(self._communicator, messages)
        # This rank's heads of all tokens, without padding.
        query, key, value = map(self._join, received)
        output = scaled_dot_product_attention(query, key, value, is_causal=is_causal, **options)
        # The outputs travel back: row n has the tokens of rank n for this rank's heads.
        # self._lengths has the number of tokens of each rank.
        outputs_by_rank = [self._pad(tokens) for tokens in output.split(self._lengths, -2)]
        # Row n has the heads of rank n, for this rank's queries.
        heads_by_rank = all_to_all(self._communicator, torch.stack(outputs_by_rank))
        without_padding = heads_by_rank[..., : self._local_length, :]
        return without_padding.movedim(0, -4).flatten(-4, -3)

    def _attend_to_gathered(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Compute attention of this rank's queries to gathered keys and values. Collective.

        Args:
            query: this rank's queries.
            key: this rank's keys.
            value: this rank's values.
            attn_mask: a mask for all keys, or for this rank's keys if the size of its dim -2 is 1.
                None for no mask.
            is_causal: whether a query attends only to the tokens up to its own.
            options: other keyword arguments of ``scaled_dot_product_attention``.

        Returns:
            The output for this rank's queries.
        """
        if attn_mask is not None and list(attn_mask.shape[-2:]) == [1, self._local_length]:
            # A mask of this rank's keys is gathered, too. It is transposed, because _gather joins
            # along dim -2, where keys and values have their tokens.
            key, value, transposed_mask = self._gather([key, value, attn_mask.mT])
            attn_mask = transposed_mask.mT
        else:
            key, value = self._gather([key, value])
        if is_causal and attn_mask is None:
            # With is_causal, torch takes the first query for the token of the first key. But this
            # rank's queries are the last tokens before `end`. So a mask replaces is_causal.
            end = sum(self._lengths[: self._communicator.rank + 1])
            key = key[..., :end, :]
            value = value[..., :end, :]
            attn_mask = torch.ones(self._local_length, end, dtype=torch.bool, device=query.device)
            attn_mask = attn_mask.tril(end - self._local_length)
            is_causal = False
        # torch raises its own error if the user has passed both a mask and is_causal.
        return scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, **options
        )

    def _gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors with the tokens of all ranks in dim -2, sent in one message. Collective.

        Gradients flow back to all ranks.
        """
        padded = [self._pad(tensor) for tensor in tensors]
        gathered = all_gather(self._communicator, padded, sync_grads=True)
        return [self._join(tensor) for tensor in gathered]

    def _pad(self, tensor: Tensor) -> Tensor:
        """Append zeros along dim -2 up to the largest number of tokens of a rank.

        The messages of all ranks must have the same size.
        """
        # The first rank has the most tokens.
        missing_tokens = self._lengths[0] - tensor.shape[-2]
        # The numbers of zeros before and after dim -1, and before and after dim -2.
        return pad(tensor, (0, 0, 0, missing_tokens))

    def _join(self, tensors: Tensor) -> Tensor:
        """Concatenate the tokens of all ranks along dim -2, without their padding.

        Args:
            tensors: one row per rank, of shape ``(ranks, ..., padded tokens, width)``.
        """
        sequences: list[Tensor] = []
        for tensor, length in zip(tensors, self._lengths, strict=True):
            sequences.append(tensor[..., :length, :])
        return torch.cat(sequences, -2)

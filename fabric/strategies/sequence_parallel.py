"""Sequence parallelism: sequences split over ranks, with attention over all tokens.

[Note: Sequence parallelism] Each rank of the mesh dimension ``sequence`` has a contiguous part of the tokens of each
sequence; if the length is not divisible, the first parts have one token more. Operations on single tokens need no
change. Attention needs all tokens: if the number of heads is divisible by the number of ranks, an all-to-all gives
each rank some heads of all tokens, and another returns the outputs (Ulysses); otherwise each rank gathers keys and
values for its own queries. The gradients are those of the sum of all ranks' losses, which the strategy averages.
"""

from collections.abc import Iterator
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
    """A context for the forward and backward pass of a batch whose sequences are split over ranks.

    Collective over the ranks that have parts of the same sequences, see ``[Note: Sequence parallelism]``. All of them
    pass the same batch, as set-up loaders yield it. Within, ``scaled_dot_product_attention`` attends to the tokens of
    all these ranks, and random numbers differ between parts. Without a ``sequence`` dimension in the mesh, the batch is
    yielded unchanged::

        for batch in loader:  # a dict with "tokens", "labels" and "positions", of shape (batch, tokens)
            with fabric.sequence_parallel(batch) as part:
                logits = model(part["tokens"], part["positions"])
                loss = cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum")
                fabric.backward(loss, weight=part["labels"].numel())
            optimizer.step()
            optimizer.zero_grad()

    Args:
        runtime: the runtime of this process.
        mesh: the mesh of the processes, or None.
        batch: any collection. It contains everything that depends on a token's position; labels are already shifted.
        dim: the dimension along which tensors are split; tensors without it are unchanged.

    Yields:
        The same collection with this rank's tokens.

    Raises:
        CollectiveMismatchError: the ranks pass different batches.
        ConfigurationError: tensors have different lengths, or fewer tokens than ranks; within, attention to anything
            but the tokens of the batch, or with a mask that is neither ``(..., tokens of this rank, all tokens)`` nor
            a key mask, ``(..., 1, all tokens)`` or ``(..., 1, tokens of this rank)``.
        UsageError: no such attention was computed; or by ``nn.MultiheadAttention``, which is not supported.
    """
    if "sequence" not in (getattr(mesh, "mesh_dim_names", None) or ()):
        yield batch
        return
    ranks = runtime.communicator_over(mesh.get_group("sequence"))
    leaves, structure = flatten(batch)
    tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    split = {place: leaf for place, leaf in tensors.items() if -leaf.dim() <= dim < leaf.dim()}
    found = {
        leaf_paths(structure, "batch")[place]: leaf.shape[dim] for place, leaf in split.items()
    }
    length = max(found.values(), default=0)
    if length < ranks.size or {*found.values()} != {length}:
        expected = (
            f"one length of all tensors that have that dimension, of at least {ranks.size} tokens"
        )
        raise ConfigurationError(
            f"{_BLOCK} with {dim=}", f"the lengths are {found}", expected, "leave out others"
        )
    # Otherwise parts of different batches would be combined into one.
    sums = [
        int(leaf.contiguous().view(torch.uint8).sum()) for leaf in split.values() if leaf.is_cpu
    ]
    name = f"{_BLOCK} of {found}"
    own = torch.tensor(sums or [0], device=ranks.device)
    seen = all_gather(ranks, {name: own})[name]
    if sums and len({*map(tuple, seen.tolist())}) > 1:
        problem = f"the bytes of these tensors have the sums {seen.tolist()}, by rank of the group"
        raise CollectiveMismatchError(
            name, problem, "the same batch on all of them, as set-up loaders give it"
        )
    lengths = [length // ranks.size + (rank < length % ranks.size) for rank in range(ranks.size)]
    for place, leaf in split.items():
        leaves[place] = leaf.split(lengths, dim)[ranks.rank].contiguous()
    seed = int(torch.randint(1 << 62, ()))
    devices = [] if runtime.device.type == "cpu" else [runtime.device]
    # After the block, the ranks have the same random numbers again.
    with (
        torch.random.fork_rng(devices, device_type=runtime.device.type),
        _Attention(ranks, lengths) as attention,
    ):
        torch.manual_seed(seed + ranks.rank)
        yield unflatten(structure, leaves)
    if not attention.calls:
        raise UsageError(
            _BLOCK,
            "scaled_dot_product_attention was not called: each rank has used its own tokens alone",
        )


class _Attention(TorchFunctionMode):
    """A mode in which ``scaled_dot_product_attention`` covers all tokens; ``lengths`` are those of the ranks' parts."""

    def __init__(self, ranks: Communicator, lengths: list[int]) -> None:
        super().__init__()
        self._ranks = ranks
        self._lengths = lengths
        self.calls = 0
        self._call = torch.compiler.disable(self._attend)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is multi_head_attention_forward:
            raise UsageError(
                _BLOCK,
                "nn.MultiheadAttention would compute attention over the tokens of this rank alone",
            )
        if func is Tensor.backward:
            # Checkpointed modules recompute in it. Given an edge instead of the loss, torch does not call this mode.
            with self:
                return torch.autograd.backward(
                    get_gradient_edge(args[0]), kwargs.pop("gradient"), **kwargs
                )
        return (self._call if func is scaled_dot_product_attention else func)(
            *args, **(kwargs or {})
        )

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, **options: Any,
    ) -> Tensor:  # fmt: skip
        self.calls += 1
        ranks = self._ranks
        lengths = self._lengths
        inputs = [query, key, value]
        own = lengths[ranks.rank]
        end = sum(lengths[: ranks.rank + 1])
        total = sum(lengths)
        counts = [each.shape[-2] for each in inputs]
        mask = [*getattr(attn_mask, "shape", ())][-2:]
        if counts != [own] * 3 or mask not in ([], [own, total], [1, total], [1, own]):
            request = (
                f"attention in {_BLOCK} on rank {ranks.rank}, which has {own} of {total} tokens"
            )
            problem = f"queries, keys and values have {counts} tokens, and the shape of the mask ends in {mask}"
            expected = f"{own} of each, and a mask of shape (..., {own}, {total}), (..., 1, {total}) or (..., 1, {own})"
            raise ConfigurationError(
                request, problem, expected, "other attention outside of the block"
            )
        options["dropout_p"] = dropout_p
        if not mask and all(each.dim() > 2 and each.shape[-3] % ranks.size == 0 for each in inputs):
            chunks = [
                self._pad(each).unflatten(-3, (ranks.size, -1)).movedim(-4, 0) for each in inputs
            ]
            query, key, value = map(self._join, all_to_all(ranks, chunks))
            whole = scaled_dot_product_attention(query, key, value, is_causal=is_causal, **options)
            heads = all_to_all(ranks, torch.stack([*map(self._pad, whole.split(lengths, -2))]))
            return heads[..., :own, :].movedim(0, -4).flatten(-4, -3)
        sent = [key, value] if mask != [1, own] else [key, value, attn_mask.mT]
        key, value, *masks = map(
            self._join, all_gather(ranks, [*map(self._pad, sent)], sync_grads=True)
        )
        attn_mask = masks[0].mT if masks else attn_mask
        if is_causal and attn_mask is None:
            attn_mask = torch.ones(own, end, dtype=torch.bool, device=query.device).tril(end - own)
            is_causal = False
            key = key[..., :end, :]
            value = value[..., :end, :]
        return scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, **options
        )

    def _pad(self, part: Tensor) -> Tensor:
        return pad(part, (0, 0, 0, self._lengths[0] - part.shape[-2]))  # to the longest part

    def _join(self, parts: Tensor) -> Tensor:
        return torch.cat(
            [part[..., :n, :] for part, n in zip(parts, self._lengths, strict=True)], -2
        )

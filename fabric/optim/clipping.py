"""Clipping of gradients, by value and by norm."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fabric._torch import full_tensor, local_tensor
from fabric.errors import ConfigurationError, NonFiniteGradientError

__all__ = ["clip_gradients"]


def clip_gradients(
    parameters: Iterable[Tensor],
    clip_val: float | None,
    max_norm: float | None,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Clip gradients in place, each value or their norm.

    Collective where the gradients are sharded: their norm is that of the whole gradient.

    Returns:
        The norm before clipping, a plain tensor of shape ``()`` on the gradients' device.

    Raises:
        ConfigurationError: not exactly one positive limit is given, or a norm type that is no norm.
        NonFiniteGradientError: the norm is infinite or not a number, and ``error_if_nonfinite``.
    """
    limits = [limit for limit in (clip_val, max_norm) if limit is not None]
    if len(limits) != 1 or not 0 < limits[0] < math.inf or not norm_type > 0:
        raise ConfigurationError(
            f"clip_gradients(clip_val={clip_val!r}, max_norm={max_norm!r}, norm_type={norm_type!r})",
            expected="clip_val > 0 (each value into [-clip_val, clip_val]) or max_norm > 0, with norm_type > 0 or inf",
        )
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    groups: dict[Any, list[Tensor]] = {}
    for parameter in with_grad:  # torch combines no tensors of several meshes
        groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norm = _total_norm([parameter.grad for parameter in with_grad], len(groups) > 1, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise NonFiniteGradientError(
            "clip_gradients(...)",
            f"the {norm_type}-norm of the gradients is {float(norm)}, so that clipping would spoil all of them",
            suggestion="error_if_nonfinite=False to clip all the same",
        )
    for group in groups.values():
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(group, max_norm, norm)
        elif clip_val is not None:
            nn.utils.clip_grad_value_(group, clip_val)
    return norm


def _total_norm(grads: Any, several_meshes: bool, norm_type: float) -> Tensor:
    sharded = [grad for grad in grads if local_tensor(grad) is not grad]
    splits = max(
        (sum(not placement.is_replicate() for placement in grad.placements) for grad in sharded),
        default=0,
    )
    if not sharded or (not several_meshes and splits < 2 and not math.isinf(norm_type)):
        return full_tensor(nn.utils.get_total_norm(grads, norm_type))
    # Not torch's: it has none for several meshes; a shard may be empty, which has no infinity norm; and a maximum over
    # ranks may lose what is not a number.
    device = sharded[0].device_mesh.device_type  # not that of gradients that are kept on the CPU
    if math.isinf(norm_type):
        local = [local_tensor(grad) for grad in grads]
        maxima = [
            tensor.abs().max() if tensor.numel() else tensor.new_zeros(()) for tensor in local
        ]
        largest = torch.stack([maximum.to(device) for maximum in maxima]).max()
        dist.all_reduce(
            largest := largest.nan_to_num(nan=math.inf, posinf=math.inf), dist.ReduceOp.MAX
        )
        return largest
    parts: dict[int, list[Tensor]] = {}
    for grad in grads:
        parts.setdefault(_number_of_shards(grad), []).append(local_tensor(grad))
    # Each power of a norm counts as often as there are ranks that have the same shards.
    norms = [
        number * nn.utils.get_total_norm(own, norm_type).to(device).double() ** norm_type
        for number, own in parts.items()
    ]
    dist.all_reduce(total := torch.stack(norms).sum())
    return (total / dist.get_world_size()).pow(1 / norm_type).to(grads[0].dtype)


def _number_of_shards(grad: Any) -> int:
    sizes = zip(
        getattr(grad, "placements", ()), getattr(grad, "device_mesh", grad).shape, strict=False
    )
    return math.prod(size for placement, size in sizes if not placement.is_replicate())

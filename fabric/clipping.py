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
    norm = _total_norm([parameter.grad for parameter in with_grad], norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise NonFiniteGradientError(
            "clip_gradients(...)",
            f"the {norm_type}-norm of the gradients is {float(norm)}, so that clipping would spoil all of them",
            suggestion="error_if_nonfinite=False to clip all the same",
        )
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm)
    elif clip_val is not None and with_grad:
        nn.utils.clip_grad_value_(with_grad, clip_val)
    return norm


def _total_norm(grads: Any, norm_type: float) -> Tensor:
    sharded = [grad for grad in grads if local_tensor(grad) is not grad]
    if not sharded or not math.isinf(norm_type):
        return full_tensor(nn.utils.get_total_norm(grads, norm_type))
    # A shard may be empty, which has no infinity norm; and a maximum over ranks may lose what is not a number.
    local = [local_tensor(grad) for grad in grads]
    maxima = [tensor.abs().max() if tensor.numel() else tensor.new_zeros(()) for tensor in local]
    device = sharded[0].device_mesh.device_type  # not that of gradients that are kept on the CPU
    largest = torch.stack([maximum.to(device) for maximum in maxima]).max().nan_to_num(nan=math.inf, posinf=math.inf)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest

"""Clipping of gradients, by value and by norm."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fabric._torch import full_tensor, has_nan, local_tensor
from fabric.errors import ConfigurationError, NonFiniteGradientError

__all__ = ["clip_gradients"]


def clip_gradients(
    parameters: Iterable[Tensor],
    clip_val: float | None,
    max_norm: float | None,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Clip gradients in place: each value, or their common norm.

    Collective if the gradients are sharded, since the norm is that of the unsharded gradients.

    Args:
        parameters: the parameters whose gradients are clipped.
        clip_val: the limit of the absolute value of each element. None if ``max_norm`` is given.
        max_norm: the limit of the norm of all gradients. Infinity changes no gradient. None if
            ``clip_val`` is given.
        norm_type: the norm, such as 2.0 or ``inf``.
        error_if_nonfinite: whether to raise if the norm is infinite or not a number.

    Returns:
        The norm before clipping, a plain tensor of shape ``()`` on the gradients' device.

    Raises:
        ConfigurationError: there are no limits or two, a number is not positive, or ``clip_val`` is
            infinite.
        NonFiniteGradientError: the norm is infinite or not a number, and ``error_if_nonfinite`` is
            true. The gradients have not changed.
    """
    _check_limits(clip_val, max_norm, norm_type)
    parameters = list(parameters)
    grads: list[Tensor] = []
    # A call of torch can clip only gradients of one mesh. The mesh of a plain tensor is None.
    parameters_by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grads.append(parameter.grad)
            mesh = getattr(parameter.grad, "device_mesh", None)
            parameters_by_mesh.setdefault(mesh, []).append(parameter)
    norm = _total_norm(grads, num_meshes=len(parameters_by_mesh), norm_type=norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        _raise_nonfinite(norm, norm_type, parameters)
    if clip_val is not None:
        for parameters_on_mesh in parameters_by_mesh.values():
            nn.utils.clip_grad_value_(parameters_on_mesh, clip_val)
    # An infinite limit changes no gradient. torch would multiply the gradients by max_norm / norm,
    # which is NaN if the norm is infinite, too.
    if max_norm is not None and max_norm != math.inf:
        for parameters_on_mesh in parameters_by_mesh.values():
            nn.utils.clip_grads_with_norm_(parameters_on_mesh, max_norm, norm)
    return norm


def _check_limits(clip_val: float | None, max_norm: float | None, norm_type: float) -> None:
    """Check the numbers of :func:`clip_gradients`.

    NaN is refused, since a comparison with NaN is false.

    Raises:
        ConfigurationError: there are no limits or two, a number is not positive, or ``clip_val`` is
            infinite.
    """
    if max_norm is None:
        has_valid_limit = clip_val is not None and 0 < clip_val < math.inf
    else:
        has_valid_limit = clip_val is None and max_norm > 0
    if has_valid_limit and norm_type > 0:
        return
    raise ConfigurationError(
        f"clip_gradients(clip_val={clip_val!r}, max_norm={max_norm!r}, norm_type={norm_type!r})",
        expected="a finite clip_val > 0 (each value into [-clip_val, clip_val]), or max_norm > 0, "
        "with norm_type > 0 or inf",
        suggestion="fabric.clip_gradients(model, optimizer, max_norm=1.0)",
    )


def _raise_nonfinite(norm: Tensor, norm_type: float, parameters: Sequence[Tensor]) -> NoReturn:
    """Raise the NonFiniteGradientError for gradients of this norm.

    Args:
        norm: the norm, infinite or not a number.
        norm_type: the kind of norm.
        parameters: the parameters of the gradients.
    """
    if any(map(has_nan, parameters)):
        # The usual cause of NaN parameters: empty_init=True has left them uninitialized, and no
        # checkpoint was loaded.
        raise NonFiniteGradientError(
            "clip_gradients(...)",
            problem=f"the {norm_type}-norm of the gradients is {float(norm)}, and parameters are "
            "not a number, either",
            expected="a checkpoint for a module that was built with empty_init=True, and steps "
            "with finite gradients",
            suggestion='fabric.load(path, {"model": model}) after fabric.setup(...); or '
            "fabric.init_module()",
        )
    raise NonFiniteGradientError(
        "clip_gradients(...)",
        problem=f"the {norm_type}-norm of the gradients is {float(norm)}, so that clipping "
        "would spoil all of them",
        suggestion="error_if_nonfinite=False to clip all the same",
    )


def _total_norm(grads: Sequence[Tensor], num_meshes: int, norm_type: float) -> Tensor:
    """Return the norm of the unsharded gradients. Collective if some gradients are sharded.

    Args:
        grads: the gradients: plain tensors and DTensors.
        num_meshes: the number of different meshes of the gradients. Plain tensors count as one.
        norm_type: the norm, such as 2.0 or ``inf``.
    """
    if _can_torch_compute_norm(grads, num_meshes, norm_type):
        # The norm of DTensors is a DTensor, too. full_tensor() reduces it over the ranks.
        return full_tensor(nn.utils.get_total_norm(grads, norm_type))
    if math.isinf(norm_type):
        return _maximum_norm(grads)
    return _power_norm(grads, norm_type)


def _can_torch_compute_norm(grads: Sequence[Any], num_meshes: int, norm_type: float) -> bool:
    """Return whether ``nn.utils.get_total_norm`` gives the right norm of the unsharded gradients.

    torch does so for plain tensors. For DTensors, torch has no norm of gradients

    - on several meshes,
    - that are sharded over several dimensions of a mesh,
    - of type ``inf``: an empty shard has none, and a maximum over ranks may lose NaN.
    """
    if not any(map(_is_dtensor, grads)):
        return True
    if num_meshes > 1 or math.isinf(norm_type):
        return False
    # A mix of plain tensors and DTensors has two meshes, so all gradients are DTensors here.
    return all(len(_sizes_of_sharded_dimensions(grad)) < 2 for grad in grads)


def _maximum_norm(grads: Sequence[Any]) -> Tensor:
    """Return the infinity norm of gradients of which some are sharded.

    Collective: all ranks of the job must call it.

    Args:
        grads: the gradients. At least one is a DTensor.

    Returns:
        The norm, the same on all ranks. It is infinite if a gradient is infinite or NaN.
    """
    device = _communication_device(grads)
    maxima: list[Tensor] = []
    for grad in grads:
        local = local_tensor(grad)
        # An empty shard has no maximum. Absolute values are at least 0.
        maximum = local.abs().max() if local.numel() else local.new_zeros(())
        maxima.append(maximum.to(device))
    # NaN becomes infinity, since a maximum over ranks may lose NaN. Infinity stays as it is:
    # without posinf, nan_to_num() would replace it by the largest finite number.
    largest = torch.stack(maxima).max().nan_to_num(nan=math.inf, posinf=math.inf)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest


def _power_norm(grads: Sequence[Any], norm_type: float) -> Tensor:
    """Return the norm of gradients of which some are sharded, for a finite norm type.

    Collective: all ranks of the job must call it. The ranks sum the powers of their local norms. If
    a gradient has n different shards, ``world_size / n`` ranks hold the same shard, and the sum
    counts the shard once for each of these ranks. So each power is multiplied by n, and the sum is
    divided by ``world_size``.

    Args:
        grads: the gradients. At least one is a DTensor.
        norm_type: the norm, such as 2.0.

    Returns:
        The norm, the same on all ranks.
    """
    device = _communication_device(grads)
    grads_by_number_of_shards: dict[int, list[Tensor]] = {}
    for grad in grads:
        number_of_shards = math.prod(_sizes_of_sharded_dimensions(grad))  # 1 if it is not sharded
        grads_by_number_of_shards.setdefault(number_of_shards, []).append(local_tensor(grad))
    powers: list[Tensor] = []
    for number_of_shards, local_grads in grads_by_number_of_shards.items():
        local_norm = nn.utils.get_total_norm(local_grads, norm_type)
        # In float64, since powers may overflow in a smaller dtype.
        power = local_norm.to(device).double() ** norm_type
        powers.append(number_of_shards * power)
    total = torch.stack(powers).sum()
    dist.all_reduce(total, dist.ReduceOp.SUM)
    norm = (total / dist.get_world_size()).pow(1 / norm_type)
    # Usually, all gradients have the same dtype. If not, the norm gets the dtype of the first.
    return norm.to(grads[0].dtype)


def _is_dtensor(grad: Any) -> bool:
    # local_tensor() returns a plain tensor itself.
    return local_tensor(grad) is not grad


def _communication_device(grads: Sequence[Any]) -> str:
    """Return the device type of the gradients' meshes, on which collectives run.

    The gradients themselves may be on another device: under ``cpu_offload`` they are on the CPU.

    Args:
        grads: the gradients. At least one is a DTensor.
    """
    return next(grad.device_mesh.device_type for grad in grads if _is_dtensor(grad))


def _sizes_of_sharded_dimensions(grad: Any) -> list[int]:
    """Return the sizes of the mesh dimensions over which a gradient is sharded.

    The product is the number of different shards. The list is empty for a plain tensor.
    """
    sizes: list[int] = []
    if _is_dtensor(grad):
        for placement, size in zip(grad.placements, grad.device_mesh.shape, strict=True):
            if not placement.is_replicate():
                sizes.append(size)
    return sizes

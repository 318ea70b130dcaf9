"""The gradients of an optimizer on this rank, and whether they have been cleared."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabric._torch import in_place_version, local_tensor

__all__ = [
    "cleared_empty_gradients",
    "gradient_fingerprint",
    "gradient_versions",
    "has_gradients",
    "is_cleared",
    "local_gradients",
    "mark_as_computed",
    "mark_first_gradient",
]


def local_gradients(*optimizers: Optimizer) -> list[list[Tensor]]:
    """Return this rank's gradients of optimizers as dense tensors, each gradient once.

    The tensors share the memory of the gradients, so that changes in place change the gradients.
    For a sharded gradient, the tensor is this rank's shard. For a sparse gradient, the tensor holds
    the values, and the parameter's gradient is replaced by its coalesced form.

    Args:
        optimizers: the optimizers, which may share parameters.

    Returns:
        One list for each device and dtype. No list is empty.
    """
    # By id(), since the hash of a tensor is a call of Python, and so slower.
    parameters: dict[int, Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameters[id(parameter)] = parameter
    grads: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter in parameters.values():
        grad = parameter.grad
        if grad is None:
            continue
        if grad.is_sparse:
            # Adds up the values of a repeated index. Callers look for overflows, and the sum may
            # overflow although the values do not.
            grad = grad.coalesce()
            parameter.grad = grad
            grad = grad._values()
        grads[grad.device, grad.dtype].append(local_tensor(grad))
    return list(grads.values())


def has_gradients(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has gradients on this rank that have not been cleared.

    Waits for the device if the optimizer has gradients.
    """
    for grads in local_gradients(optimizer):
        for grad in grads:
            if not is_cleared(grad).item():
                return True
    return False


# [Note: Cleared gradients]
# Users drop the gradients of earlier backward passes by `zero_grad()`, by `parameter.grad = None`,
# or in place, by `zero_()`. A gradient that a backward pass has computed may be zero, too, and
# users may change it in place without dropping it. The sign of zero tells the two apart: a cleared
# gradient is +0.0 in every element. After a backward pass, `mark_as_computed` makes a zero in the
# first element of a gradient a -0.0. This changes no result, since -0.0 is equal to 0.0, and a sum
# with -0.0 is exactly the other number.
#
# A shard without elements holds no sign. torch counts changes in place of most kinds, even of
# tensors without elements. So such a shard counts as cleared if the gradients with elements that
# were changed as it was are all cleared.
def is_cleared(grad: Tensor) -> Tensor:
    """Return whether every element of a gradient is +0.0, without waiting for the device.

    A gradient without elements counts as cleared.

    Args:
        grad: a dense tensor, which is no DTensor.

    Returns:
        A bool tensor without dimensions, on the device of the gradient.
    """
    if grad.is_complex():
        grad = torch.view_as_real(grad)
    has_nonzero_elements = grad.any()
    # mark_as_computed() writes -0.0 to mark a gradient of zeros as computed.
    has_minus_signs = grad.signbit().any()
    return ~(has_nonzero_elements | has_minus_signs)


def mark_as_computed(grad: Tensor) -> None:
    """Make a zero in the first element of a gradient a -0.0, without waiting for the device.

    A cleared gradient is +0.0 in every element. The -0.0 shows :func:`is_cleared` that a backward
    pass has computed this gradient, even if all of its values are zero.

    Args:
        grad: a dense tensor, which is no DTensor.
    """
    if grad.numel() == 0:
        return
    # ``data`` hides the change from autograd, which raises if a graph contains the gradient.
    first_element = grad.data[(0,) * grad.dim()]
    first_element.masked_fill_(first_element == 0, -0.0)


def mark_first_gradient(optimizer: Optimizer) -> bool:
    """Mark an optimizer's gradients as computed by a backward pass. See :func:`mark_as_computed`.

    The first gradient that has elements on this rank gets the mark. One mark is enough, since
    ``zero_grad()`` clears all gradients of the optimizer: the mark is then gone, too.

    Returns:
        Whether the optimizer has any gradients, even if none has elements on this rank.
    """
    grads_by_kind = local_gradients(optimizer)
    for grads in grads_by_kind:
        for grad in grads:
            if grad.numel() > 0:
                mark_as_computed(grad)
                return True
    return bool(grads_by_kind)


def gradient_versions(parameters: Iterable[Tensor]) -> dict[Tensor, object]:
    """Return a value for each parameter with a gradient that changes with a change in place.

    Changes through ``grad.data``, and of several DTensors in one call, do not change the value.
    """
    versions: dict[Tensor, object] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            versions[parameter] = _in_place_versions(parameter.grad)
    return versions


# See [Note: Cleared gradients].
def cleared_empty_gradients(
    versions: Mapping[Tensor, object], cleared: Collection[Tensor]
) -> list[Tensor]:
    """Return the parameters whose gradients have no elements on this rank and count as cleared.

    Such a gradient, an empty shard, has no values that show whether the user has cleared it. The
    user most likely clears all gradients in one way. So an empty gradient counts as cleared if the
    gradients with elements that look like it are all cleared: either all whose in-place versions
    have changed since the backward pass, or all whose versions have not. Does not wait for the
    device.

    Args:
        versions: the result of :func:`gradient_versions` after the backward pass.
        cleared: of these parameters, those with elements whose gradients the user has cleared.
    """
    # Whether each gradient with elements was cleared: first of the gradients whose version has
    # changed, then of the others.
    are_changed_cleared: list[bool] = []
    are_unchanged_cleared: list[bool] = []
    empty: list[Tensor] = []
    for parameter, version in versions.items():
        if local_tensor(parameter).numel() == 0:
            empty.append(parameter)
        elif _has_changed(parameter, version):
            are_changed_cleared.append(parameter in cleared)
        else:
            are_unchanged_cleared.append(parameter in cleared)
    cleared_empty: list[Tensor] = []
    for parameter in empty:
        if _has_changed(parameter, versions[parameter]):
            # A changed gradient counts as cleared even if no other gradient has changed.
            was_cleared = parameter.grad is None or all(are_changed_cleared)
        else:
            # Clearing through grad.data, for example, leaves the version as it was. This is assumed
            # only if it was done to at least one other gradient.
            was_cleared = bool(are_unchanged_cleared) and all(are_unchanged_cleared)
        if was_cleared:
            cleared_empty.append(parameter)
    return cleared_empty


def _has_changed(parameter: Tensor, version: object) -> bool:
    """Return whether a gradient is None, or was changed in place since it had this version."""
    return parameter.grad is None or _in_place_versions(parameter.grad) != version


def gradient_fingerprint(optimizer: Optimizer) -> object:
    """Return a value that changes when an optimizer's gradients are cleared or changed.

    The value consists of the identity of the optimizer's first gradient and of its two in-place
    versions: that of the tensor and that of its local part. It is None without gradients. This
    function does not wait for a device. Changes through ``grad.data`` do not change the value.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is not None:
                return id(grad), _in_place_versions(grad)
    return None


def _in_place_versions(grad: Tensor) -> tuple[int, int]:
    """Return the in-place versions of a gradient and of its local part.

    FSDP changes the local part of a DTensor in place, and ``zero_grad(set_to_none=False)`` changes
    the DTensor itself.
    """
    return in_place_version(grad), in_place_version(local_tensor(grad))

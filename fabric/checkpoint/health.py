"""The search for values in a state that training cannot go on from."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric._torch import local_tensor
from fabric.checkpoint.agreement import BadTensor
from fabric.checkpoint.state import PlainState, State, plain_name
from fabric.tree import PLAIN_TENSOR_TYPES, flatten, leaf_paths

__all__ = ["find_bad_tensor"]

_Tensors = dict[str, Tensor]  # the tensors of this rank by names for messages
# A dtype with two numbers in each element, for which torch has no arithmetic. The numbers cannot be
# NaN or infinite.
_PACKED_DTYPE = torch.float4_e2m1fn_x2


# [Note: bad values]
# In a trained parameter and in the state of an optimizer, NaN and infinity are bad: the next step
# spreads them. In a buffer and in a frozen parameter only NaN is bad: attention masks hold -inf on
# purpose. Tensors outside of modules and optimizers are the user's own, and are not searched.
def find_bad_tensor(state: State, content: PlainState, rank: int) -> BadTensor | None:
    """Return a tensor of this rank with bad values, or None.

    Of a DTensor, only the shard of this rank is searched. Not a collective.

    Args:
        state: the user's objects by name.
        content: their states, from ``StateDicts.read``.
        rank: this rank, for the result.
    """
    trained: _Tensors = {}
    # Buffers and frozen parameters.
    others: _Tensors = {}
    for name, target in state.items():
        if isinstance(target, nn.Module):
            trained_names = _trained_names(target)
            for key, value in content[name].items():
                if key in trained_names:
                    trained[f"{name}[{key!r}]"] = value
                else:
                    others[f"{name}[{key!r}]"] = value
        elif isinstance(target, Optimizer):
            leaves, structure = flatten(content[name])
            trained.update(zip(leaf_paths(structure, name), leaves, strict=True))
    bad_tensor = _find_first_bad(trained, _is_not_finite, rank)
    if bad_tensor is None:
        # Infinity is not bad in buffers: attention masks contain -inf.
        bad_tensor = _find_first_bad(others, torch.isnan, rank)
    return bad_tensor


def _trained_names(module: nn.Module) -> set[str]:
    """Return the plain names of the parameters that require a gradient."""
    names: set[str] = set()
    # A tied parameter has several names in a state dict.
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.add(plain_name(name))
    return names


def _is_not_finite(tensor: Tensor) -> Tensor:
    return ~tensor.isfinite()


def _find_first_bad(
    values: _Tensors, is_bad: Callable[[Tensor], Tensor], rank: int
) -> BadTensor | None:
    """Return the first tensor that has a bad element, or None.

    A tensor is searched only if its norm is not finite: a finite norm shows that all elements are
    finite, and takes a tenth of the time of a search. All norms are computed before the first one
    is read, so that this process waits for the device once.

    Args:
        values: the tensors by name. Integers and values other than plain tensors are left out.
        is_bad: returns for a tensor of floats which of its elements are bad.
        rank: this rank, for the result.
    """
    tensors: _Tensors = {}
    norms: list[Tensor] = []
    for name, value in values.items():
        tensor = _values_to_search(value)
        if tensor is None:
            continue
        tensors[name] = tensor
        norms.append(torch.linalg.vector_norm(_upcast_8_bit(tensor)))
    # The total norm is finite only if all norms are. So one number from the device answers for all.
    if nn.utils.get_total_norm(norms).isfinite():
        return None
    for (name, tensor), norm in zip(tensors.items(), norms, strict=True):
        if norm.isfinite():
            continue
        elements = _upcast_8_bit(tensor)
        bad_elements = elements[is_bad(elements)]
        # The norm of large finite elements may overflow, so there may be no bad element.
        if bad_elements.numel() > 0:
            return BadTensor(name, str(bad_elements[0].item()), rank)
    return None


def _values_to_search(value: object) -> Tensor | None:
    """Return the tensor of this rank to search, or None if there is nothing to search.

    Values that are not tensors are not searched, nor are integers, which cannot be NaN. Sparse
    tensors and tensors of another library's class may lack the operations, and are not searched.
    """
    if not isinstance(value, Tensor):
        return None
    local = local_tensor(value)
    if local.dtype is _PACKED_DTYPE:
        return None
    has_floats = local.dtype.is_floating_point or local.dtype.is_complex
    # False for a lazy parameter: it has a class of its own, and no values yet.
    is_dense = type(local) in PLAIN_TENSOR_TYPES and local.layout is torch.strided
    if has_floats and is_dense and not local.is_meta:
        return local.detach()
    return None


def _upcast_8_bit(tensor: Tensor) -> Tensor:
    """Return a tensor in a dtype for which torch can compute a norm. It cannot for 8-bit floats."""
    if tensor.dtype.itemsize == 1:
        return tensor.float()
    return tensor

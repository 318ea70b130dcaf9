"""How a loss reduces its terms, read from its autograd graph."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch import Tensor

from fabric._torch import saved_constant, saved_option

__all__ = ["LossReduction", "loss_reduction"]

# A node of the autograd graph. torch has no public class with the attributes of all nodes.
Node = Any

# The names of operations are those of their nodes, without "Backward0".
# Operations on a single number that do not change its size.
_IDENTITIES = {
    *("Alias", "Clone", "Neg", "Permute", "Reshape", "Squeeze", "ToCopy", "Unsqueeze"),
    *("UnsafeView", "View"),
}
_ADDITIONS = {"Add", "Sub", "Rsub"}
_LISTS = {"Cat", "Stack"}
# Operations on single elements, which neither add elements up nor mix the samples of a batch.
_ELEMENTWISE = {
    *_IDENTITIES,
    *_ADDITIONS,
    *_LISTS,
    *("Div", "Mul", "Pow", "Reciprocal", "Rsqrt", "Sqrt", "Xlogy"),
    *("Abs", "Clamp", "ClampMax", "ClampMin", "Maximum", "Minimum", "MaskedFill", "Where"),
    *("Cos", "Erf", "Exp", "Expm1", "Log", "Log1P", "LogSigmoid", "Sigmoid", "Sin", "Tanh"),
    *("Elu", "Gelu", "Hardtanh", "LeakyRelu", "Relu", "Silu", "Softplus"),
    *("Expand", "Index", "IndexSelect", "MaskedSelect", "Select", "Slice", "Split"),
    *("SplitWithSizes", "T", "Transpose", "Unbind"),
}
# Operations on single samples, below which the graph is not read.
_SAMPLE_OPERATIONS = {
    *("Convolution", "CtcLoss", "Embedding", "Gather", "LogSoftmax", "Softmax"),
    *("NativeBatchNorm", "NativeDropout", "NativeGroupNorm", "NativeLayerNorm"),
    # The outputs of a module under DDP.
    "_DDPSinkBackward",
}
# Operations that grow with the number of elements, beside the sum.
_NORMS = {"Logsumexp", "Norm", "LinalgVectorNorm"}
_MATRIX_PRODUCTS = {"Addmm", "Mm", "Linear"}
# Operations on a matrix of parameters before its product with samples.
_MATRIX_CONVERSIONS = {"T", "ToCopy", "Transpose", "Permute"}
_MAX_NODES = 300  # a larger part of a graph is not read, since that takes long
# Smaller factors may be one over a number of terms, and so make a mean of a sum. The first number
# is for one factor of all elements, the second one for the largest of several factors.
_MIN_FACTOR_OF_SUM = 0.5
_MIN_ELEMENT_OF_SUM = 0.25
# The values of the option "reduction", which loss functions of torch have.
_REDUCTION_MEAN = 1
_REDUCTION_SUM = 2


@dataclass(frozen=True)
class LossReduction:
    """What a loss does with its terms: it is their mean or sum, times a constant.

    Attributes:
        is_mean: whether the loss is a mean. Otherwise it is a sum.
        factor: the absolute value of the constant. 0 for a sum that is divided by a number of
            unknown meaning.
        num_terms: the number of terms. None if the graph does not say it.
    """

    is_mean: bool
    factor: float = 1.0
    num_terms: int | None = None

    @property
    def is_plain_mean(self) -> bool:
        """Whether the loss is a mean and not multiplied by a number of terms."""
        return self.is_mean and self.factor <= 1

    @property
    def is_plain_sum(self) -> bool:
        """Whether the loss is a sum and not divided by a number of terms."""
        return not self.is_mean and self.factor >= _MIN_FACTOR_OF_SUM


def loss_reduction(loss: Tensor, weight: float | None) -> LossReduction | None:
    """Return how a loss reduces its terms. None if its graph does not say so for certain.

    Call it before the backward pass, which frees the numbers in the graph.

    Args:
        loss: the loss, a tensor with one element.
        weight: the number of terms that the user has given. None if there is none.
    """
    if loss.grad_fn is None or loss.numel() != 1:
        return None
    return _LossGraph(weight).reduction_of(loss.grad_fn)


# [Note: Loss reduction]
# The graph of a loss tells a mean over the batch from a sum. The graph is read from the loss
# downwards, in two parts.
#
# From the loss to the reduction, only operations on single numbers are followed: a loss function
# with `reduction="mean"` or `"sum"`, `mean()`, `sum()`, and multiples and sums of such losses.
#
# Below the reduction, only operations on single elements are followed, up to a layer with
# parameters or another operation on single samples. A mean in this part may be the mean over the
# batch, and a sum may be a sum over the batch. Any operation that is not listed here may be
# anything.
#
# In each of these cases the result is None, so that a loss which is not understood is not reported.
# Numbers in the graph are read by hooks of saved tensors. These hooks cannot be added where the
# user has added some, as activation checkpointing does, so that nothing is recomputed.
class _LossGraph:
    """The autograd graph of one loss, read from the loss downwards.

    A node is an operation. This class reads nodes whose result is a single number. The *reduction*
    of the number says whether it is a mean or a sum of terms, and by which constant *factor* it is
    multiplied.

    Args:
        weight: the number of terms of the loss that the user has given. None if there is none.
    """

    def __init__(self, weight: float | None) -> None:
        self._weight = weight
        self._num_nodes = 0

    def reduction_of(self, node: Node) -> LossReduction | None:
        """Return the reduction of the number that a node computes. None if it is not known."""
        self._num_nodes += 1
        # To read a larger graph would take too long.
        if self._num_nodes > _MAX_NODES:
            return None
        operation = _operation(node)
        inputs = _inputs(node)
        if operation in _IDENTITIES:
            return self.reduction_of(inputs[0])
        if operation in _ADDITIONS:
            return self._common_reduction(inputs)
        # The other operand has no gradient, and so is a constant.
        if operation in ("Mul", "Div") and len(inputs) == 1:
            return self._scaled_reduction(node)
        if operation in ("Mean", "Sum"):
            return self._reduction_of_elements(node)
        reduction = saved_option(node, "reduction")
        if reduction in (_REDUCTION_MEAN, _REDUCTION_SUM):
            return _reduction_of_loss_function(node)
        return None

    def _common_reduction(self, nodes: Iterable[Node]) -> LossReduction | None:
        """Return the reduction of a sum of losses, with the largest of their factors.

        Return None if the losses are not all means or all sums.
        """
        common: LossReduction | None = None
        for node in nodes:
            reduction = self.reduction_of(node)
            if reduction is None:
                return None
            if common is None:
                common = reduction
            elif reduction.is_mean != common.is_mean:
                return None
            elif reduction.factor > common.factor:
                common = reduction
        return common

    def _scaled_reduction(self, node: Node) -> LossReduction | None:
        """Return the reduction of a number that is multiplied or divided by a constant."""
        reduction = self.reduction_of(_inputs(node)[0])
        factors = _constant_factors(node)
        if reduction is None or factors is None or factors.numel() != 1:
            return None
        factor = reduction.factor * factors.item()
        if reduction.is_mean:
            return replace(reduction, factor=factor)
        # A sum that is divided by the number of its terms is a mean. The graph may say this number,
        # and the user may have given it as the weight. The constant may be rounded.
        for num_terms in (reduction.num_terms, self._weight):
            if num_terms and math.isclose(factor * num_terms, 1, rel_tol=1e-3):
                return LossReduction(is_mean=True, num_terms=reduction.num_terms)
        if factor < _MIN_FACTOR_OF_SUM:
            # The sum is divided by a number of unknown meaning, such as the number of features or
            # micro-batches. A factor of 0 stays 0 if the result is multiplied again, so that the
            # loss is not taken for a plain sum.
            factor = 0.0
        return replace(reduction, factor=factor)

    def _reduction_of_elements(self, node: Node) -> LossReduction | None:
        """Return the reduction of a number that is the mean or the sum of a tensor.

        Return None if it is not certain, since the elements of the tensor may be sums or means.
        """
        inputs = _inputs(node)
        is_mean = _operation(node) == "Mean"
        shape = saved_option(node, "self_sym_sizes")  # of the tensor that is reduced
        num_terms = math.prod(shape)
        if num_terms == 1:
            # The mean or sum of a single element is the element.
            return self.reduction_of(inputs[0])
        if _operation(inputs[0]) in _LISTS:
            # The tensor may be a list of losses, such as those of several tasks. If their
            # reductions are not known, it is read like any other tensor.
            reduction = self._common_reduction(_inputs(inputs[0]))
            if reduction is not None and is_mean:
                return replace(reduction, factor=reduction.factor / num_terms)
            if reduction is not None:
                return reduction
        elements = _read_elements(inputs)
        if is_mean:
            # The user's weight is the number of terms. If it is the number of elements, they are
            # the terms.
            is_certain = elements.are_averaged or num_terms == self._weight
        else:
            is_certain = elements.are_summed_up
        if not is_certain:
            return None
        return LossReduction(is_mean, num_terms=num_terms)


def _reduction_of_loss_function(node: Node) -> LossReduction | None:
    """Return the reduction of a loss function of torch, such as ``cross_entropy``.

    Return None if its inputs may undo the reduction, as in a mean of sums over the batch.
    """
    is_mean = saved_option(node, "reduction") == _REDUCTION_MEAN
    elements = _read_elements(_inputs(node))
    may_be_undone = elements.has_sum if is_mean else elements.is_normalized
    if may_be_undone:
        return None
    return LossReduction(is_mean)


@dataclass(frozen=True)
class _Elements:
    """What is known about the elements of a tensor of which a loss takes the mean or the sum.

    Attributes:
        has_samples: whether elements belong to samples of the batch.
        is_known: whether all operations that compute the elements are known.
        is_normalized: whether elements may be means, or divided by their number.
        has_sum: whether elements may be sums.
    """

    has_samples: bool
    is_known: bool
    is_normalized: bool
    has_sum: bool

    @property
    def are_averaged(self) -> bool:
        """Whether the mean of the elements is certainly a mean, and not a multiple of a sum."""
        return self.is_known and not self.has_sum

    @property
    def are_summed_up(self) -> bool:
        """Whether the sum of the elements is certainly a sum over the batch."""
        return self.has_samples and self.is_known and not self.is_normalized


class _Role(Enum):
    """What an operation does with the elements of a tensor. The values are for readers only."""

    PARAMETER = "is a parameter, and no operation"
    SAMPLES = "computes samples, such as a layer"
    LOSS_FUNCTION = "is a loss function of torch"
    FACTOR = "multiplies elements by constants, or divides them"
    MEAN = "computes means"
    SUM = "computes sums, or something else that grows with the number of elements"
    NORM_OF_BATCH = "computes norms over the batch, which are neither means nor sums of samples"
    ELEMENTWISE = "computes each element by itself"
    UNKNOWN = "may do anything"


# The roles of operations below which the graph is not read.
_LAST_ROLES = {_Role.PARAMETER, _Role.SAMPLES, _Role.LOSS_FUNCTION, _Role.UNKNOWN}


def _role(node: Node) -> _Role:
    """Return what an operation does with the elements of a tensor."""
    operation = _operation(node)
    role = _Role.UNKNOWN
    if operation == "AccumulateGrad":
        role = _Role.PARAMETER
    elif operation in _SAMPLE_OPERATIONS or _is_layer(node):
        role = _Role.SAMPLES
    elif operation in ("Mul", "Div") and len(_inputs(node)) == 1:
        # The other operand has no gradient, and so is a constant.
        role = _Role.FACTOR
    elif saved_option(node, "reduction") is not None:
        role = _Role.LOSS_FUNCTION
    elif operation == "Mean":
        role = _Role.MEAN
    elif operation == "Sum":
        role = _Role.SUM
    elif operation in _NORMS:
        role = _Role.NORM_OF_BATCH if _reduces_batch(node) else _Role.SUM
    elif operation in _ELEMENTWISE:
        role = _Role.ELEMENTWISE
    return role


def _read_elements(nodes: Iterable[Node]) -> _Elements:
    """Return what is known about the elements of the tensors that some operations compute.

    The graph is read from these operations to the operations that compute their inputs, and so on.
    It is not read below parameters, layers, loss functions and unknown operations, which are those
    with one of ``_LAST_ROLES``.
    """
    roles: dict[Node, _Role] = {}
    is_known = True
    pending = [*nodes]
    while pending:
        node = pending.pop()
        if node in roles:
            continue
        if len(roles) == _MAX_NODES:
            # To read a larger graph would take too long.
            is_known = False
            break
        roles[node] = _role(node)
        if roles[node] not in _LAST_ROLES:
            pending.extend(_inputs(node))
    distinct_roles = set(roles.values())
    return _Elements(
        has_samples=not distinct_roles.isdisjoint({_Role.SAMPLES, _Role.LOSS_FUNCTION}),
        is_known=is_known and distinct_roles.isdisjoint({_Role.UNKNOWN, _Role.NORM_OF_BATCH}),
        is_normalized=any(_may_normalize(node, role) for node, role in roles.items()),
        has_sum=any(_may_sum(node, role) for node, role in roles.items()),
    )


def _may_normalize(node: Node, role: _Role) -> bool:
    """Return whether an operation may compute means, or divide elements by their number."""
    if role is _Role.FACTOR:
        return _may_divide_by_number(node)
    if role is _Role.LOSS_FUNCTION:
        return saved_option(node, "reduction") == _REDUCTION_MEAN
    if role is _Role.MEAN:
        return math.prod(saved_option(node, "self_sym_sizes")) > 1
    return False


def _may_sum(node: Node, role: _Role) -> bool:
    """Return whether an operation may compute sums."""
    if role is _Role.LOSS_FUNCTION:
        return saved_option(node, "reduction") == _REDUCTION_SUM
    return role in (_Role.SUM, _Role.NORM_OF_BATCH)


def _reduces_batch(node: Node) -> bool:
    """Return whether a reduction is over the first dimension, which is the batch."""
    dimensions = saved_option(node, "dim") or ()
    if isinstance(dimensions, int):
        dimensions = (dimensions,)
    # Without dimensions, all of them are reduced.
    return not dimensions or 0 in dimensions


def _operation(node: Node) -> str:
    """Return the name of the operation of a node, such as ``"Mul"`` for ``"MulBackward0"``."""
    name = node.name().removeprefix("torch::autograd::")
    # The names of the user's own functions end in "Backward" without a number, and are not changed.
    return re.sub(r"Backward\d+$", "", name)


def _inputs(node: Node) -> list[Node]:
    """Return the nodes of the inputs that have gradients. The others are constants."""
    return [function for function, _ in node.next_functions if function is not None]


def _is_layer(node: Node) -> bool:
    """Return whether an operation is a linear layer: a product with a matrix of parameters."""
    if _operation(node) not in _MATRIX_PRODUCTS:
        return False
    # The node that computes the matrix, which is the last operand. None for a constant.
    matrix = node.next_functions[-1][0]
    # The matrix may be transposed or cast before the product. Go on to what was converted.
    while matrix is not None and _operation(matrix) in _MATRIX_CONVERSIONS:
        matrix = matrix.next_functions[0][0]
    # In the graph, a parameter is a node that accumulates its gradient.
    return matrix is not None and _operation(matrix) == "AccumulateGrad"


def _may_divide_by_number(node: Node) -> bool:
    """Return whether constant factors of elements may make a mean of their sum.

    Return True if it is not known.
    """
    factors = _constant_factors(node)
    # An empty batch has no factors.
    if factors is None or factors.numel() == 0:
        return True
    if factors.numel() == 1:
        return factors.item() < _MIN_FACTOR_OF_SUM
    # The elements have different factors. They make a mean if they add up to one, or if all are
    # small, as after a division by the number of elements.
    finite_factors = factors.nan_to_num(posinf=0.0)
    largest = finite_factors.max().item()
    total = finite_factors.double().sum().item()
    add_up_to_one = total < 1.01  # the factors may be rounded
    return largest < _MIN_ELEMENT_OF_SUM or add_up_to_one


def _constant_factors(node: Node) -> Tensor | None:
    """Return the absolute values by which a constant multiplies elements. None if not known.

    Args:
        node: a multiplication or a division with one constant operand.
    """
    is_division = _operation(node) == "Div"
    # An operand without a node in the graph is a constant.
    is_first_constant = node.next_functions[0][0] is None
    if is_division and is_first_constant:
        return None  # the constant is divided by the elements, and is no factor of them
    # torch calls the first operand "self", and the second one "other".
    constant_name = "self" if is_first_constant else "other"
    constant = saved_constant(node, constant_name)
    if constant is None:
        return None
    factors = constant.detach().double().abs()
    if is_division:
        factors = factors.reciprocal()
    return factors

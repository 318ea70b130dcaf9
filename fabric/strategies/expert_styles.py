"""Styles of a plan for mixtures of experts, and for attention with latent keys and values.

This file is imported only with such a plan, since the DTensors that it needs take a second to
import.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from typing_extensions import override

__all__ = ["ExpertParallel", "LatentProjection"]

_ExpertForward = Callable[[Tensor, Tensor, Tensor], Tensor]


# [Note: Split experts]
# The experts of a module are parameters with a row for each expert. Each rank holds some of the
# rows and computes its own experts for all tokens. The output is a sum over ranks. A token that is
# routed to an expert of another rank gets a number that stands for no expert here, and the weight
# 0. The module has to skip this number, which is its number of experts, as the modules of
# transformers do.
@final
class ExpertParallel(ParallelStyle):
    """The style of a module whose parameters have a row for each expert.

    Each rank holds some of the rows, and computes these experts.
    """

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Split the rows of the parameters, and replace the forward method. Not a collective.

        torch calls this method for each module that has this style in the plan.
        """
        # A list, since the loop changes the parameters of the module.
        for name, parameter in list(module.named_parameters(recurse=False)):
            # Without a source rank, nothing is sent: each rank takes its rows from its own values.
            split = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(split, parameter.requires_grad))
        experts: Any = module
        # find_layers_to_split() has refused a number that the size of the mesh does not divide.
        experts.num_experts //= device_mesh.size()
        # With this flag, the fast kernels of transformers skip tokens that are routed to the number
        # num_experts, which stands for the experts of other ranks.
        if hasattr(experts, "_is_expert_parallel"):
            experts._is_expert_parallel = True
        experts.forward = partial(_sum_experts, module, device_mesh, experts.forward)
        return module


@final
class LatentProjection(ParallelStyle):
    """The style of a layer that computes a latent for all heads, and the rotated part of the keys.

    The layer is not split, but each rank uses the output for other heads, and so has other
    gradients of the output. The latent goes through a ``"colwise"`` layer, where torch sums the
    gradients over the ranks. The rotated part goes to the heads directly, and so this style sums
    the gradients of the rotated part.

    Args:
        rotated_width: the number of outputs of the layer that are the rotated part. They are the
            last outputs.
    """

    def __init__(self, rotated_width: int) -> None:
        super().__init__()
        self._rotated_width = rotated_width

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Register the hook that sums gradients. Not a collective.

        torch calls this method for each module that has this style in the plan. The module computes
        a latent for all heads, and the rotated part of the keys. Each rank uses the rotated part
        for its own heads, so the gradients of this part have to be summed over the ranks. torch
        sums those of the latent.
        """

        def sum_rotated_gradients(layer: Any, args: Any, output: Tensor) -> Tensor:
            """Return an equal output whose rotated part has summed gradients. A forward hook."""
            latent_width = output.shape[-1] - self._rotated_width
            latent, rotated = output.split([latent_width, self._rotated_width], dim=-1)
            return torch.cat([latent, _with_summed_gradient(rotated, device_mesh)], dim=-1)

        module.register_forward_hook(sum_rotated_gradients)
        return module


def _sum_experts(
    module: nn.Module,
    mesh: DeviceMesh,
    forward: _ExpertForward,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Return the weighted sum of the outputs of all experts. Collective over the mesh.

    This function replaces the forward method of a module with split experts.

    Args:
        module: the module with the experts.
        mesh: the ranks over which the experts are split.
        forward: the original forward method, which computes this rank's experts.
        hidden_states: the tokens, the same on all ranks.
        top_k_index: the numbers of the experts of each token.
        top_k_weights: the weights of these experts.
    """
    experts: Any = module
    # How many experts this rank has. Rank r has the experts from r * num_local on.
    num_local = experts.num_experts
    is_elsewhere = top_k_index // num_local != mesh.get_local_rank()
    # The number num_local stands for no expert, and the module skips it.
    local_index = (top_k_index % num_local).masked_fill(is_elsewhere, num_local)
    # This rank computes the gradients through its own experts, so they are summed over the ranks.
    local_weights = _with_summed_gradient(top_k_weights, mesh).masked_fill(is_elsewhere, 0.0)
    local_states = _with_summed_gradient(hidden_states, mesh)
    try:
        with _local_parameters(module) as local_parameters:
            partial_sum = forward(local_states, local_index, local_weights)
    except IndexError as error:
        error.add_note(
            f"{type(module).__name__} may not skip number {num_local}, which stands for the "
            'experts of other ranks. Write: experts_implementation="grouped_mm" for the model, or '
            "a plan without the lines of the experts"
        )
        raise
    if not partial_sum.requires_grad:
        # No token is routed to this rank's experts, and the sum depends on no tensor. With the sums
        # of empty tensors, which are 0, gradients are zero as in the whole module, and this rank
        # takes part in the collectives of the backward pass.
        for tensor in (local_states, local_weights, *local_parameters):
            partial_sum = partial_sum + tensor[:0].sum()
    # An all-reduce adds up the partial sums of the ranks.
    total = DTensor.from_local(partial_sum, mesh, [Partial()], run_check=False)
    return total.redistribute(placements=[Replicate()]).to_local()


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[list[Tensor]]:
    """Have a module compute with this rank's parts of its parameters in the block.

    The parts are plain tensors. During the block, attributes of the module hide the parameters of
    the same names, which are DTensors.

    Yields:
        The parts.
    """
    parts: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters(recurse=False):
        split_parameter: Any = parameter
        # In the graph, so that the parameter gets a gradient.
        parts[name] = split_parameter.to_local()
    attributes = vars(module)
    attributes.update(parts)
    try:
        yield list(parts.values())
    finally:
        for name in parts:
            del attributes[name]


def _with_summed_gradient(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a tensor with the same values, whose gradient is summed over the ranks.

    The sum is a collective of the backward pass. The tensor has to be equal on all ranks.
    """
    replicated = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return replicated.to_local(grad_placements=[Partial()])

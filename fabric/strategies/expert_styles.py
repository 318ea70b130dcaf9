"""Styles of a plan for mixtures of experts, and for attention with latent keys and values.

[Note: Split experts] The experts of a module are parameters with a row for each expert. Each rank
holds some of the rows and computes its own experts for all tokens. The output is a sum over ranks.
A token that is routed to an expert of another rank gets a number that stands for no expert here,
and the weight 0. The module has to skip this number, which is its number of experts, as the modules
of transformers do.

This file is imported only with such a plan, since the DTensors that it needs take a second to
import.
"""

from collections.abc import Callable
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


@final
class ExpertParallel(ParallelStyle):
    """The style of a module whose parameters have a row for each expert.

    See ``[Note: Split experts]``.
    """

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Split the rows of the parameters, and replace the forward method. Not a collective."""
        for name, parameter in list(module.named_parameters(recurse=False)):
            split = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(split, parameter.requires_grad))
        experts: Any = module
        experts.num_experts //= device_mesh.size()
        # The fast kernels of transformers skip the number of other ranks' experts only then.
        if hasattr(experts, "_is_expert_parallel"):
            experts._is_expert_parallel = True
        experts.forward = partial(_sum_experts, module, device_mesh, experts.forward)
        return module


@final
class LatentProjection(ParallelStyle):
    """The style of a layer that computes a latent for all heads, and the rotated part of the keys.

    A layer that is split ``"colwise"`` takes the latent, and sums its gradients over ranks. The
    rotated part goes straight to the heads. So its gradients are summed here.

    Args:
        rotated_width: the number of outputs that are the rotated part, the last ones.
    """

    def __init__(self, rotated_width: int) -> None:
        super().__init__()
        self._rotated_width = rotated_width

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Register the hook that sums gradients. Splits nothing. Not a collective."""

        def sum_rotated_gradients(layer: Any, args: Any, output: Tensor) -> Tensor:
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
    """Return the weighted outputs of all experts. The forward method of split experts. Collective.

    Args:
        module: the experts.
        mesh: the ranks over which they are split.
        forward: the method that computes this rank's experts.
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
    # Each rank has the gradients through its own experts alone, which are summed over the ranks.
    local_weights = _with_summed_gradient(top_k_weights, mesh).masked_fill(is_elsewhere, 0.0)
    attributes = vars(module)
    # For the call, attributes of the object hide the parameters: the method takes plain tensors.
    names = list(dict(module.named_parameters(recurse=False)))
    for name in names:
        attributes[name] = experts.get_parameter(name).to_local()
    try:
        partial_sum = forward(
            _with_summed_gradient(hidden_states, mesh), local_index, local_weights
        )
    finally:
        for name in names:
            del attributes[name]
    total = DTensor.from_local(partial_sum, mesh, [Partial()], run_check=False)
    return total.redistribute(placements=[Replicate()]).to_local()


def _with_summed_gradient(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a tensor that is equal on all ranks, and whose gradient is summed over the ranks."""
    replicated = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return replicated.to_local(grad_placements=[Partial()])

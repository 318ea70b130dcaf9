"""BatchNorm layers whose statistics are those of the batches of all ranks together."""

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from typing_extensions import override

from fabric.collectives.ops import all_reduce
from fabric.communicators import Communicator, Reduce
from fabric.errors import ConfigurationError, UsageError

__all__ = ["SyncBatchNorm", "has_sync_batch_norm", "synchronize_batch_norms"]


class _RanksOfLayers:
    """The ranks over which layers compute their statistics, until the job ends.

    A deep copy of a layer shares the ranks. A pickled layer has no ranks, because another process
    has other connections.
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        self.communicator = communicator

    def __deepcopy__(self, memo: object) -> "_RanksOfLayers":
        return self

    def __reduce__(self) -> tuple[type["_RanksOfLayers"], tuple[()]]:
        return _RanksOfLayers, ()

    def disconnect(self) -> None:
        """Forget the ranks at the end of the job."""
        self.communicator = None


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm over the batches of all ranks, on any device.

    In training mode, the output, the gradients and the running statistics equal those of one
    process with all batches. The batches may have different lengths, and may be empty on some
    ranks. In evaluation mode nothing is sent.

    torch's class of this name has kernels for GPUs only, and communicates over all ranks of the
    job. :func:`synchronize_batch_norms` chooses between the classes.
    """

    _ranks: _RanksOfLayers

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Normalize a batch of shape ``(samples, channels, ...)``. Collective in training mode.

        Raises:
            ValueError: all ranks together have a single value in each channel.
            UsageError: the layer comes from a pickle, and is not connected to the ranks of this
                job.
        """
        if not self.training:
            return super().forward(input)
        if torch.compiler.is_compiling():
            # Compiled code cannot contain the communicator, so the layer runs between two graphs.
            forward_outside_of_graphs: Any = torch.compiler.disable(self.forward)
            return forward_outside_of_graphs(input)
        communicator = self._ranks.communicator
        if communicator is None:
            # The job has ended, or the layer comes from a pickle. Raises if there are other ranks.
            self._check_single_process()
            return super().forward(input)
        self._check_input_dim(input)
        # Half-precision values are summed up in float32, as in torch's kernels.
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        return self._normalize(values, communicator).to(input.dtype)

    def _normalize(self, values: Tensor, communicator: Communicator) -> Tensor:
        """Normalize values by the statistics of all ranks, and update the running statistics.

        Collective.

        Args:
            values: the batch of this rank.
            communicator: the ranks.

        Raises:
            ValueError: all ranks together have a single value in each channel.
        """
        # All dimensions except dimension 1, the channels.
        dims = [0, *range(2, values.dim())]

        # The sum and the number of values in a channel travel in one message.
        local_count = values.numel() // values.size(1)
        local_sums = (values.sum(dims, keepdim=True), values.new_tensor(local_count))
        total, count = all_reduce(communicator, local_sums, Reduce.SUM)
        # Below, it only matters whether all ranks together have 0, 1 or more values. Reading their
        # count, by int(count), waits for the device and fails in a dry run. So it is read only if
        # this rank has fewer than two values. Otherwise the count of this rank is enough.
        min_count = local_count if local_count >= 2 else int(count)
        if min_count == 1:
            # All ranks raise, since each has at most one value, and so has read the count.
            # The words of torch's error.
            raise ValueError("Expected more than 1 value per channel when training, on all ranks")
        # If the batches of all ranks are empty, divide by 1 instead of 0. The output is empty, too.
        divisor = count.clamp(min=1)
        mean = total / divisor
        centered = values - mean
        local_squares = (centered * centered).sum(dims, keepdim=True)
        squares = all_reduce(communicator, local_squares, Reduce.SUM)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if min_count > 1:  # with no value at all, there are no statistics
                variance = squares / (count - 1)
                self._update_running_statistics(mean.flatten(), variance.flatten())

        scale = torch.rsqrt(squares / divisor + self.eps)
        return self._transform(centered, scale)

    def _transform(self, centered: Tensor, scale: Tensor) -> Tensor:
        """Scale centered values, and apply the weight and bias of the layer, if any.

        Args:
            centered: the values less the mean.
            scale: the inverse of the standard deviation of each channel, of shape
                ``(1, channels, ...)``.
        """
        if self.weight is not None:
            scale = scale * self.weight.view_as(scale)
        output = centered * scale
        if self.bias is None:
            return output
        return output + self.bias.view_as(scale)

    @override
    def _check_input_dim(self, input: Tensor) -> None:
        """Raise a ValueError if an input has no dimension of channels."""
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _check_single_process(self) -> None:
        """Raise a UsageError if a layer without ranks would not be synchronized in a job."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise UsageError(
                "a forward pass of SyncBatchNorm in training mode",
                problem="the layer comes from another process, and is not connected to this job",
                suggestion="fabric.sync_batchnorm(model)",
            )

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards the statistics of a batch.

        Args:
            mean: the mean of each channel over all ranks.
            variance: the variance of each channel over all ranks, divided by the number of values
                less 1.
        """
        assert self.num_batches_tracked is not None, "a layer without running statistics"
        assert self.running_mean is not None, "a layer that counts batches has no mean"
        assert self.running_var is not None, "a layer that counts batches has no variance"
        momentum = self.momentum
        if momentum is None:
            # None means averages over all batches so far.
            momentum = 1 / int(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


def synchronize_batch_norms(
    module: nn.Module, communicator: Communicator, device: torch.device, cleanup: ExitStack
) -> None:
    """Let the BatchNorm layers of a module compute their statistics over the ranks.

    Only the class of a layer changes, so that the layer keeps its parameters, buffers and hooks.
    torch's ``convert_sync_batchnorm`` replaces the layers. Nothing changes with a single rank.

    Args:
        module: the module. Changed in place.
        communicator: the ranks that have different batches.
        device: the device of this process.
        cleanup: the callbacks of the end of the job, which give the layers their classes back.

    Raises:
        ConfigurationError: a layer has a forward pass of its own, or has no parameters yet.
            Nothing was changed.
    """
    if communicator.size == 1:
        return
    # All layers are checked before the first one is changed.
    layers: list[_BatchNorm] = []
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            _check_layer(name, layer)
            layers.append(layer)
    ranks = _RanksOfLayers(communicator)
    cleanup.callback(ranks.disconnect)  # a layer that is used after the job then says so
    sync_class: type[_BatchNorm] = SyncBatchNorm
    # torch's class has kernels for GPUs only, and communicates over all ranks of the job.
    if device.type == "cuda" and communicator.size == dist.get_world_size():
        sync_class = nn.SyncBatchNorm
    for layer in layers:
        cleanup.callback(_restore_class, layer, type(layer))
        # fabric's SyncBatchNorm reads `_ranks`. torch's nn.SyncBatchNorm reads `process_group`, in
        # which None stands for all ranks. vars() is for type checkers: the class of the layer
        # declares neither attribute.
        vars(layer)["_ranks"] = ranks
        vars(layer)["process_group"] = None
        layer.__class__ = sync_class


def has_sync_batch_norm(module: nn.Module) -> bool:
    """Return whether a layer of a module computes statistics over several ranks."""
    return any(isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm) for layer in module.modules())


def _restore_class(layer: _BatchNorm, original_class: type[_BatchNorm]) -> None:
    """Give a layer its class back, unless another library has changed the class since."""
    layer_class: type[_BatchNorm] = type(layer)
    if layer_class in (SyncBatchNorm, nn.SyncBatchNorm):
        layer.__class__ = original_class


def _check_layer(name: str, layer: nn.Module) -> None:
    """Raise a ConfigurationError if the class of a BatchNorm layer cannot be replaced.

    Args:
        name: the name of the layer in the user's module.
        layer: the layer.
    """
    class_name = type(layer).__name__
    request = f"synchronized statistics of {name or 'the module'}, a {class_name}"
    if isinstance(layer, LazyModuleMixin):
        raise ConfigurationError(
            request,
            problem="it has no parameters before its first forward pass",
            suggestion="model(batch) once on each rank before, or nn.BatchNorm2d(channels)",
        )
    # The layer may have been synchronized before, by fabric or by torch.
    replaceable_passes = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
    if type(layer).forward not in replaceable_passes:
        raise ConfigurationError(
            request,
            problem="the class has a forward pass of its own, which would be lost",
            expected="nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d or nn.SyncBatchNorm",
        )

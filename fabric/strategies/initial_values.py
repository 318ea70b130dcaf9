"""Makes sure that every rank has the same model, and gives every rank rank 0's values of it."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fabric.communicators import Communicator
from fabric.errors import ConfigurationError, FabricError, UsageError
from fabric.strategies.init_module import EmptyParameter, MappedMemory

__all__ = ["check_same_model", "check_shardable", "receive_values"]


def check_shardable(root: nn.Module, has_values: bool) -> None:
    """Raise for parameters that cannot be sharded.

    Args:
        root: the model.
        has_values: whether the values of all ranks come from here, so that meta tensors cannot be set up.

    Raises:
        ConfigurationError: parameters that have no shape yet, or no dimension.
        UsageError: meta tensors.
    """
    title, parameters = type(root).__name__, dict(root.named_parameters())
    if names := [name for name, parameter in parameters.items() if is_lazy(parameter)]:
        raise ConfigurationError(
            f"setup({title}) with FSDP",
            f"these are lazy and have no shape before a first forward pass: {', '.join(names)}",
            "parameters that have a shape",
            "nn.Linear(in_features, out_features) in place of nn.LazyLinear, or one model(batch) before setup()",
        )
    if names := [name for name, parameter in parameters.items() if parameter.dim() == 0]:
        raise ConfigurationError(
            f"setup({title}) with FSDP",
            f"a single number cannot be sharded: {', '.join(names)}",
            "parameters of at least one dimension",
            "nn.Parameter(torch.ones(1)) in place of nn.Parameter(torch.ones(()))",
        )
    tensors = {**parameters, **dict(root.named_buffers())}
    names = [name for name, tensor in tensors.items() if tensor.is_meta and not isinstance(tensor, EmptyParameter)]
    if has_values and names:
        raise UsageError(
            f"setup({title}) with meta tensors",
            f"these have no values: {', '.join(names)}",
            "a model built in fabric.init_module(), which needs no more memory",
            "with fabric.init_module(): model = Model()  # in place of torch.device('meta')",
        )


def check_same_model(communicator: Communicator, root: nn.Module, error: FabricError | None) -> None:
    """Raise on every rank where any rank has an error, or another model. Collective.

    Args:
        communicator: all ranks.
        root: the model.
        error: why this rank cannot set it up; None if it can.

    Raises:
        FabricError: this rank's error.
        UsageError: that of another rank, or a difference between the models.
    """
    reports = communicator.gather_objects((str(error or ""), "" if error else _layout(root)))
    if error is not None:
        raise error
    request = f"setup({type(root).__name__}) on rank {communicator.rank}"
    for rank, (text, _) in enumerate(reports):
        if text:
            raise UsageError(request, f"rank {rank} cannot set it up: {text}")
    if different := [rank for rank, report in enumerate(reports) if report != reports[0]]:
        raise UsageError(
            request,
            f"it is another model on rank(s) {', '.join(map(str, different))} than on rank 0",
            "parameters and buffers of the same names, shapes and dtypes on every rank",
            "a build that does not depend on the rank",
        )


def receive_values(
    communicator: Communicator, module: nn.Module, tensors: Sequence[Tensor], memory: MappedMemory
) -> None:
    """Give tensors rank 0's values and memory on the communicator's device. Collective.

    An :class:`EmptyParameter` gets memory that is not initialized. A meta tensor is replaced, wherever the module has
    it; any other keeps its identity.

    Args:
        communicator: all ranks.
        module: the module that the tensors belong to.
        tensors: parameters and buffers, the same on every rank.
        memory: in which the module was built.
    """
    places = _places_on_meta(module)
    for tensor in tensors:
        if tensor.is_meta:
            value = torch.empty_like(tensor, device=communicator.device, requires_grad=False)
        else:
            # A parameter is about to be copied into its shard.
            copy = tensor in memory and not isinstance(tensor, nn.Parameter)
            value = tensor.detach().to(communicator.device, copy=copy).contiguous()
        if not isinstance(tensor, EmptyParameter):
            communicator.broadcast(value.view(-1).view(torch.uint8), 0)
        if isinstance(tensor, nn.Parameter) and tensor.is_meta:
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        for owner, name in places.get(tensor, ()):
            setattr(owner, name, value)
        if not tensor.is_meta:
            tensor.data = value
        memory.use(value)
    memory.release()


def _layout(root: nn.Module) -> str:
    """A digest of the names of parameters and buffers, which of them are one tensor, their shapes and dtypes."""
    numbers: dict[int, int] = {}
    layout = []
    for named in (root.named_parameters, root.named_buffers):
        for name, each in named(remove_duplicate=False):
            number = numbers.setdefault(id(each), len(numbers))
            is_empty = isinstance(each, EmptyParameter)
            layout.append((name, number, each.shape, each.dtype, each.requires_grad, is_empty))
    return hashlib.sha256(repr(layout).encode()).hexdigest()


def _places_on_meta(root: nn.Module) -> dict[Tensor, list[tuple[nn.Module, str]]]:
    """Where the meta tensors of a module are registered: the owner, and the name there."""
    places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in named(recurse=False, remove_duplicate=False):
                if tensor.is_meta:
                    places.setdefault(tensor, []).append((module, name))
    return places

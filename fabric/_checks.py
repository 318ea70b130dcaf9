"""What the facade refuses, each with the way out. Nothing here changes anything."""

from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric._torch import uncompiled
from fabric.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.module import FabricModule

__all__ = [
    "as_list",
    "check_function",
    "check_hook",
    "check_loggers",
    "check_module",
    "check_optimizers",
    "check_scheduler",
    "check_set_up",
    "refuse_after_teardown",
    "refuse_backward",
    "refuse_before_launch",
    "refuse_clipping",
]


def refuse_before_launch(asked: str, processes: int) -> NoReturn:
    """A job of several processes that are still to be made."""
    raise UsageError(
        f"fabric.{asked}",
        f"this Fabric is for {processes} processes, and they do not exist before launch()",
        "everything that needs a device or other ranks, after fabric.launch()",
        "fabric.launch() right after Fabric(...); or fabric.launch(main) with a function main(fabric)",
    )


def check_function(function: Any, has_arguments: bool, needs_function: bool, start_method: str) -> None:
    """``launch`` got something to run, and got the function rather than what it returned."""
    if function is None and has_arguments:
        raise UsageError(
            "fabric.launch(...) with arguments and no function",
            "there is nothing that would take them",
            "fabric.launch(), or a function and then its arguments",
            "fabric.launch(main, 1, 2), not fabric.launch(main(1, 2))",
        )
    if function is None and needs_function:
        raise UsageError(
            "fabric.launch()",
            f"the start method {start_method!r} runs a function in each process, and none was given",
            "a function that takes the fabric as its first argument",
            'fabric.launch(main); or strategy="ddp" with launcher="popen" to run the whole script in each process',
        )
    if function is not None and not callable(function):
        raise ArgumentTypeError(
            f"fabric.launch({function!r})",
            f"{type(function).__name__} is no function; was it called in the argument list?",
            "a function that takes the fabric as its first argument",
            "fabric.launch(main, 1, 2), not fabric.launch(main(1, 2))",
        )


def check_module(module: Any, known: Collection[nn.Module]) -> None:
    """A module that can be set up: a torch module, for the first time."""
    inner = uncompiled(module) if isinstance(module, nn.Module) else module
    if isinstance(inner, FabricModule) or (isinstance(inner, nn.Module) and inner in known):
        raise UsageError(
            f"setup({type(inner.module if isinstance(inner, FabricModule) else inner).__name__})",
            "this module has been set up already",
            "one setup for each module",
            "model = fabric.setup(model) once, and the result from then on",
        )
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"setup({type(module).__name__})",
            "it is no torch.nn.Module",
            "setup(module, *optimizers), setup_module(module), setup_optimizers(*optimizers)",
            "model, optimizer = fabric.setup(model, optimizer)",
        )


def check_optimizers(optimizers: Sequence[Any], known: Collection[Optimizer], modules: Sequence[nn.Module]) -> None:
    """Optimizers that can be set up: for the first time, each with parameters of a module that is set up."""
    parameters = {id(parameter) for module in modules for parameter in module.parameters()}
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(
                f"setup of {type(optimizer).__name__} as an optimizer",
                "it is no torch.optim.Optimizer" + ("; a scheduler?" if hasattr(optimizer, "optimizer") else ""),
                "optimizers of torch.optim or subclasses of its Optimizer; a scheduler as scheduler=",
                "fabric.setup(model, optimizer, scheduler=scheduler)",
            )
        if optimizer in known or any(optimizer is other for other in optimizers[:index]):
            raise UsageError(
                f"setup of {type(optimizer).__name__}",
                "this optimizer has been set up already",
                "one setup for each optimizer",
                "model, optimizer = fabric.setup(model, optimizer) once",
            )
        if not any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"]):
            raise UsageError(
                f"setup of {type(optimizer).__name__}",
                "none of its parameters belongs to a module that is set up",
                "the module first, or both together; and an optimizer made from that module's parameters",
                "model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))",
            )


def check_scheduler(scheduler: Any, optimizers: Sequence[Any]) -> None:
    """A scheduler of one of the optimizers that it comes with."""
    if scheduler is None:
        return
    if not callable(getattr(scheduler, "step", None)) or not any(
        getattr(scheduler, "optimizer", None) is optimizer for optimizer in optimizers
    ):
        raise ArgumentTypeError(
            f"scheduler={type(scheduler).__name__}",
            "it is no scheduler of an optimizer that is set up with it",
            "a scheduler of torch.optim.lr_scheduler for one of the optimizers in the same call",
            "fabric.setup(model, optimizer, scheduler=StepLR(optimizer, 10))",
        )


def check_set_up(asked: str, module: Any, instead: str) -> FabricModule:
    """A module that ``setup`` returned, whether it was compiled since or not; without what ``torch.compile`` added."""
    inner = uncompiled(module) if isinstance(module, nn.Module) else module
    if not isinstance(inner, FabricModule):
        raise ArgumentTypeError(
            f"{asked} with {type(module).__name__}",
            "it is no module that setup() returned",
            "the result of fabric.setup(...) or fabric.setup_module(...)",
            instead,
        )
    return inner


def refuse_backward(tensor: Any) -> NoReturn:
    """``backward`` got no tensor, or one that nothing can be computed through."""
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(
            f"fabric.backward({tensor!r})",
            f"it is of type {type(tensor).__name__}, no tensor",
            "the loss as the tensor that the model's output was turned into",
            "fabric.backward(loss), not fabric.backward(loss.item())",
        )
    reason = "it was computed under torch.no_grad()" if not torch.is_grad_enabled() else "it requires no gradient"
    raise ConfigurationError(
        f"fabric.backward(tensor of shape {tuple(tensor.shape)})",
        f"{reason}, or from detached tensors or frozen parameters only",
        "a tensor that requires a gradient",
        "loss = loss_function(model(batch), target); fabric.backward(loss), without no_grad() or detach() around it",
    )


def refuse_after_teardown(asked: str) -> NoReturn:
    """A job that is over."""
    raise UsageError(
        f"fabric.{asked}",
        "teardown() has closed this Fabric",
        "calls before teardown(), or inside the with block",
        "a new Fabric(...)",
    )


def refuse_clipping(optimizer: Any) -> NoReturn:
    """Gradients of an optimizer that is not set up."""
    raise UsageError(
        f"clip_gradients(..., {type(optimizer).__name__})",
        "this optimizer has not been set up, or is none",
        "an optimizer that went through setup() or setup_optimizers()",
        "model, optimizer = fabric.setup(model, optimizer)",
    )


def check_hook(callback: Any, name: str, hook: Any) -> None:
    """A callback's hook is a method."""
    if not callable(hook):
        raise ArgumentTypeError(
            f"fabric.call({name!r})",
            f"{type(callback).__name__}.{name} is of type {type(hook).__name__}",
            "a method of the callback",
            f"def {name}(self, ...): in {type(callback).__name__}",
        )


def as_list(objects: Any) -> list[Any]:
    """``callbacks`` or ``loggers`` as a list: None, one object, or several."""
    if objects is None:
        return []
    return list(objects) if isinstance(objects, list | tuple) else [objects]


def check_loggers(loggers: Sequence[Any]) -> None:
    """Objects with the logger protocol."""
    for logger in loggers:
        methods = ("log_metrics", "log_hyperparams", "close")
        missing = ", ".join(name for name in methods if not callable(getattr(logger, name, None)))
        if missing or isinstance(logger, type):
            raise ArgumentTypeError(
                f"Fabric(loggers={logger!r})",
                "it is a class, not an object"
                if isinstance(logger, type)
                else f"{type(logger).__name__} has no {missing}",
                "an object with log_metrics(metrics, step), log_hyperparams(params) and close()",
                "Fabric(loggers=fabric.loggers.CSVLogger())",
            )

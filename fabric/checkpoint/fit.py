"""Whether what a checkpoint holds fits the object that it is meant for."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fabric.checkpoint.failures import listed

__all__ = ["find_problems"]


def find_problems(
    target: Any, content: Any, module_state: Callable[[nn.Module], Mapping[str, Any]], strict: bool
) -> Iterator[str]:
    """Why ``content`` cannot be loaded into ``target``; nothing for objects that only they themselves understand.

    Only names and shapes are looked at, so that meta tensors and shards will do.

    Args:
        target: a module, an optimizer, or anything else.
        content: what a checkpoint has for it.
        module_state: names and values of a module.
        strict: whether names that one side lacks are a problem.
    """
    if isinstance(target, nn.Module | Optimizer) and not isinstance(content, Mapping):
        yield f"a value of type {type(content).__name__} is where the state of a {type(target).__name__} has to be"
    elif isinstance(target, nn.Module):
        yield from _module_problems(module_state(target), content, strict)
    elif isinstance(target, Optimizer):
        yield from _optimizer_problems(target, content)


def _module_problems(expected: Mapping[str, Any], content: Mapping[str, Any], strict: bool) -> Iterator[str]:
    missing = [name for name in expected if name not in content]
    unexpected = [name for name in content if name not in expected]
    for prefix in ("module.", "_orig_mod."):
        if missing and prefix + missing[0] in content:
            yield f"the names in the file begin with {prefix!r}: remove that from each name first"
    if strict and missing:
        yield f"not in the file: {listed(missing)}"
    if strict and unexpected:
        yield f"only in the file: {listed(unexpected)}"
    shapes = [
        f"{name} is {tuple(content[name].shape)} in the file and {tuple(value.shape)} in the module"
        for name, value in expected.items()
        if _has_shape(value) and _has_shape(content.get(name)) and value.shape != content[name].shape
    ]
    if shapes:
        # All of them: the one that tells what is wrong may be the last.
        yield f"other shapes: {', '.join(shapes)}"


def _has_shape(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_lazy(value)


def _optimizer_problems(optimizer: Optimizer, content: Mapping[str, Any]) -> Iterator[str]:
    if "state" not in content or "param_groups" not in content:
        yield f"the file has {listed(map(repr, content))} where an optimizer's 'state' and 'param_groups' have to be"
        return
    saved, present = (
        [len(group["params"]) for group in groups] for groups in (content["param_groups"], optimizer.param_groups)
    )
    if saved != present:
        yield (
            f"the groups of the {type(optimizer).__name__} hold {listed(map(str, present))} parameters, "
            f"those of the file {listed(map(str, saved))}"
        )

"""Layers of a model that are split over ranks by a plan, and random numbers for split computations.

[Note: Split layers] A layer that is split ``"colwise"`` computes some columns of its output, one that is split
``"rowwise"`` takes these for its input, and the sum over ranks is the same on all of them. What lies between the two,
such as attention over some of the heads, is computed in parts. There each rank has random numbers of its own, drawn
from the common stream, so that dropout differs between parts, and agrees everywhere else; where there are none, nothing
is drawn. A parameter there that is not split itself, such as a norm of each head, would get the gradient of one part:
the training checks see the difference.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh

from fabric._torch import local_tensor, real_tensors
from fabric.errors import ConfigurationError, UsageError

__all__ = ["PartStreams", "check_styles", "count_heads", "find_layers", "is_split", "torch_styles"]

# The second name of each is used by newer model libraries.
_WHOLE_OUTPUT = ("colwise_rep", "colwise_gather_output")
_WHOLE_INPUT = ("rowwise_rep", "rowwise_split_input")
_STYLES = ("colwise", "rowwise", *_WHOLE_OUTPUT, *_WHOLE_INPUT, "sequence_parallel")
# By kind of layer and style: the attribute with the split length, and the weight's rows or columns.
_LENGTHS = {
    nn.Linear: {"colwise": ("out_features", "rows"), "rowwise": ("in_features", "columns")},
    nn.Embedding: {"colwise": ("embedding_dim", "columns"), "rowwise": ("num_embeddings", "rows")},
}
_HEADS = re.compile(r"heads|nhead|(num|n)_((attention|key_value|kv|q|query)_)?heads?")


def check_styles(plan: Any) -> None:
    """Raise a ConfigurationError for a plan with an unknown style."""
    for style in plan.values() if isinstance(plan, Mapping) else ():
        if style not in _STYLES and (isinstance(style, str) or not hasattr(style, "_apply")):
            expected = f"{', '.join(_STYLES)}, or a ParallelStyle of torch"
            raise ConfigurationError(
                f"tp_plan={dict(plan)}", f"torch has no style {style!r}", expected
            )


def find_layers(root: nn.Module, plan: Mapping[str, Any] | str, parts: int) -> dict[nn.Module, Any]:
    """The layers that a plan splits, each with its style; see :class:`fabric.strategies.ModelParallelStrategy`.

    Raises:
        ConfigurationError: a pattern matches nothing, or layers cannot be split into this many parts.
    """
    request = f"tp_plan for {type(root).__name__}"
    is_own = plan == "auto"
    patterns: Any = (
        (getattr(root, "tp_plan", None) or getattr(root, "_tp_plan", None)) if is_own else plan
    )
    if not patterns:
        raise ConfigurationError(
            request, "the model has no plan of its own", suggestion='tp_plan={"*.up": "colwise"}'
        )
    check_styles(patterns)
    names = dict(root.named_modules())
    layers = dict[nn.Module, Any]()
    for pattern, style in patterns.items():
        fits = re.compile(re.escape(pattern).replace(r"\*", "[^.]+")).fullmatch
        fitting = {names[name]: style for name in names if fits(name)}
        if not (fitting or is_own):
            known = ", ".join(
                dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names if name)
            )
            raise ConfigurationError(
                request, f"no layer is called {pattern!r}", f"a pattern for {known}"
            )
        layers |= fitting
    problems = (
        [*_problems(root, layers, parts)] if layers else [f"no layer fits {', '.join(patterns)}"]
    )
    if problems:
        raise ConfigurationError(request, "; ".join(problems))
    return layers


def count_heads(
    root: nn.Module, layers: Mapping[nn.Module, Any]
) -> Iterator[tuple[str, nn.Module, str, list[Any]]]:
    """The head counts in modules with colwise layers: path, module, attribute, and these layers."""
    for path, owner in root.named_modules():
        own = [
            child
            for child in owner.children()
            if layers.get(child) == "colwise" and isinstance(child, nn.Linear)
        ]
        for attribute, value in vars(owner).items() if own else ():
            if _HEADS.fullmatch(attribute) and type(value) is int:
                yield path, owner, attribute, own


def torch_styles(layer: nn.Module, style: Any) -> list[Any]:
    """The torch styles, to be applied in this order, for a style of a plan."""
    from torch.distributed.tensor import Replicate, Shard, parallel  # takes a second to import

    if style == "sequence_parallel":
        before = parallel.PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1)
        )
        after = parallel.PrepareModuleOutput(
            output_layouts=Shard(1), desired_output_layouts=Replicate()
        )
        return [before, parallel.SequenceParallel(), after]
    if style == "colwise" or style in _WHOLE_OUTPUT:
        return [
            parallel.ColwiseParallel(output_layouts=None if style == "colwise" else Replicate())
        ]
    if style == "rowwise" and not isinstance(layer, nn.Embedding):  # that has whole tokens
        return [parallel.RowwiseParallel()]
    return [
        parallel.RowwiseParallel(input_layouts=Replicate()) if isinstance(style, str) else style
    ]


def is_split(parameter: Any, dim: int | None = None) -> bool:
    """Whether a parameter is split along ``tensor_parallel``, in its dimension ``dim`` if one is given."""
    mesh = getattr(parameter, "device_mesh", None)
    names = (mesh and mesh.mesh_dim_names) or ()
    return "tensor_parallel" in names and parameter.placements[
        names.index("tensor_parallel")
    ].is_shard(dim)


class PartStreams:
    """Hooks that give each part of a split computation its own random numbers; see ``[Note: Split layers]``.

    Args:
        root: the model, with split layers.
        mesh: that it is split on.
        ends: whether a split computation must end in a layer that is split ``"rowwise"``.
    """

    def __init__(self, root: nn.Module, mesh: DeviceMesh, ends: bool) -> None:
        self._part = mesh.get_local_rank("tensor_parallel")
        self._ends = ends
        # In a split computation: the states before, after the common draw, and at its start.
        self._saved: list[list[torch.Tensor]] = []
        device: Any = torch.get_device_module(mesh.device_type)
        own = (
            []
            if mesh.device_type == "cpu"
            else [device.default_generators[device.current_device()]]
        )
        self._generators = [torch.default_generator, *own]
        disable: Any = torch.compiler.disable
        enter = disable(self._enter)
        leave = disable(self._leave)
        for layer in root.modules():
            if isinstance(layer, nn.Linear) and is_split(layer.weight, 0):
                layer.register_forward_hook(enter)
            elif isinstance(layer, nn.Linear) and is_split(layer.weight):
                layer.register_forward_pre_hook(leave, prepend=True)
        root.register_forward_hook(disable(self._finish), always_call=True)

    def _enter(self, layer: Any, args: Any, output: Any) -> None:
        is_part = local_tensor(output) is output and output.shape[-1] < layer.out_features
        if is_part and layer.training and not self._saved:
            with real_tensors():  # in a dry run, too
                before = self._states()
                seed = int(torch.randint(1 << 62, ()))
                after = self._states()
                for generator in self._generators:
                    generator.manual_seed(seed + self._part)
                self._saved = [before, after, self._states()]

    def _finish(self, root: nn.Module, args: Any, output: Any) -> None:
        is_open = bool(self._saved)
        self._leave()
        if is_open and self._ends and output is not None:
            problem = 'the output of a layer that is split "colwise" went into none that is split "rowwise"'
            raise UsageError(
                f"{type(root).__name__}(...)",
                problem,
                suggestion='"colwise_rep" for the last layer',
            )

    def _leave(self, *_: Any) -> None:
        if self._saved:
            before, after, start = self._saved
            # If no random numbers were drawn within, undo the common draw too.
            with real_tensors():
                is_same = all(map(torch.equal, start, self._states()))
                for generator, state in zip(
                    self._generators, before if is_same else after, strict=True
                ):
                    generator.set_state(state)
            self._saved = []

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]


def _kind(style: Any) -> str:
    """``"colwise"``, ``"rowwise"`` or another word."""
    return (
        style.split("_")[0]
        if isinstance(style, str)
        else type(style).__name__.removesuffix("Parallel").lower()
    )


def _split(layer: nn.Module, style: Any) -> tuple[str, str]:
    """The attribute with a layer's split length, and the weight's rows or columns; empty strings if not split."""
    found = (
        styles.get(_kind(style)) for kind, styles in _LENGTHS.items() if isinstance(layer, kind)
    )
    return next(found, None) or ("", "")


def _problems(root: nn.Module, layers: Mapping[nn.Module, Any], parts: int) -> Iterator[str]:
    """Why layers cannot be split, with their names."""
    ways: dict[nn.Parameter, dict[str, str]] = {}
    for path, layer in root.named_modules():
        style = layers.get(layer, "")
        attribute, way = _split(layer, style)
        for name, parameter in layer.named_parameters(path, recurse=False):
            ways.setdefault(parameter, {})[name] = way
        if isinstance(layer, nn.MultiheadAttention) and not layers.keys().isdisjoint(
            layer.children()
        ):
            yield f"{path}: a MultiheadAttention uses the weights of its parts itself: write separate layers for it"
        if _kind(style) in ("colwise", "rowwise") and not attribute:
            yield f"{path}: {style!r} splits Linear and Embedding, and it is a {type(layer).__name__}"
        elif attribute and (rest := getattr(layer, attribute) % parts):
            yield f"{path}: {attribute} {getattr(layer, attribute)} / {parts} parts leaves {rest}"
    for path, owner, attribute, own in count_heads(root, layers):
        if rest := getattr(owner, attribute) % parts:
            yield f"{path}: {attribute} {getattr(owner, attribute)} / {parts} parts leaves {rest}"
        elif len(own) == 1 and own[0].out_features > own[0].in_features:
            yield f"{path}: one layer for queries, keys and values has no parts with some heads of each: write three"
    for path, owner in root.named_modules():
        linear = [
            (layers.get(part), name, part)
            for name, part in owner.named_children()
            if isinstance(part, nn.Linear)
        ]
        taken = max(
            (part.in_features for style, _, part in linear if style == "rowwise"), default=1 << 62
        )
        for name in (
            name for style, name, part in linear if style == "colwise" and part.out_features > taken
        ):
            yield f"{path}.{name}: a gate and what it gates in one layer have no parts with some of each: write two"
    for names in ways.values():
        if len(set(names.values())) > 1:
            yield f"{' and '.join(names)} are one tensor, and have to be split in one way"

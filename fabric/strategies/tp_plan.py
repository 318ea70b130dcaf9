"""Layers of a model that are split over ranks by a plan, and random numbers for split computations.

[Note: Split layers] A layer that is split ``"colwise"`` computes some columns of its output. A
layer that is split ``"rowwise"`` takes these columns for its input, and its output, a sum over
ranks, is the same on all of them. What lies between the two, such as attention over some of the
heads, is computed in parts. There each rank has random numbers of its own, drawn from the common
stream, so that dropout differs between parts, and agrees everywhere else; where a part uses no
random numbers, nothing is drawn. A parameter between the two that is not split itself, such as a
norm of each head, would get the gradient of one part: the training checks see the difference.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import DeviceMesh

from fabric._torch import local_tensor, real_tensors
from fabric.errors import ConfigurationError, UsageError

__all__ = [
    "HeadAttribute",
    "PartRandomStreams",
    "check_styles",
    "find_head_attributes",
    "find_layers",
    "is_split",
    "torch_styles",
]

# Newer model libraries use the second name of each style.
_WHOLE_OUTPUT = ("colwise_rep", "colwise_gather_output")
_WHOLE_INPUT = ("rowwise_rep", "rowwise_split_input")
_STYLES = ("colwise", "rowwise", *_WHOLE_OUTPUT, *_WHOLE_INPUT, "sequence_parallel")
_HEADS = re.compile(r"heads|nhead|(num|n)_((attention|key_value|kv|q|query)_)?heads?")


class _SplitDimension(NamedTuple):
    """What a style splits of a layer: the attribute with the length, and rows or columns."""

    attribute: str
    lines: str


_SPLIT_DIMENSIONS = {
    (nn.Linear, "colwise"): _SplitDimension("out_features", "rows"),
    (nn.Linear, "rowwise"): _SplitDimension("in_features", "columns"),
    (nn.Embedding, "colwise"): _SplitDimension("embedding_dim", "columns"),
    (nn.Embedding, "rowwise"): _SplitDimension("num_embeddings", "rows"),
}


class HeadAttribute(NamedTuple):
    """An attribute that holds the number of heads of a module with ``"colwise"`` layers.

    Attributes:
        path: the name of the module in the model.
        module: the module.
        attribute: the name of the attribute.
        value: the number of heads.
        layers: the layers of the module that are split ``"colwise"``.
    """

    path: str
    module: nn.Module
    attribute: str
    value: int
    layers: Sequence[nn.Linear]


# -- plans --------------------------------------------------------------------------------------


def check_styles(plan: Any) -> None:
    """Raise a ConfigurationError for a plan with an unknown style."""
    if not isinstance(plan, Mapping):
        return
    for style in plan.values():
        if style in _STYLES:
            continue
        is_torch_style = not isinstance(style, str) and hasattr(style, "_apply")
        if not is_torch_style:
            raise ConfigurationError(
                f"tp_plan={dict(plan)}",
                problem=f"torch has no style {style!r}",
                expected=f"{', '.join(_STYLES)}, or a ParallelStyle of torch",
            )


def find_layers(
    root: nn.Module, plan: Mapping[str, Any] | str, world_size: int
) -> dict[nn.Module, Any]:
    """Return the layers that a plan splits, each with its style.

    Args:
        root: the model.
        plan: a style for each pattern of names of layers, or ``"auto"`` for the model's own plan.
            See :class:`fabric.strategies.ModelParallelStrategy`.
        world_size: in how many parts layers are split.

    Raises:
        ConfigurationError: a pattern matches nothing, or layers cannot be split into this many
            parts.
    """
    request = f"tp_plan for {type(root).__name__}"
    is_of_model = plan == "auto"
    styles: Any = plan
    if is_of_model:
        styles = getattr(root, "tp_plan", None) or getattr(root, "_tp_plan", None)
    if not styles:
        raise ConfigurationError(
            request,
            problem="the model has no plan of its own",
            suggestion='tp_plan={"*.up": "colwise"}',
        )
    check_styles(styles)
    modules = dict(root.named_modules())
    layers: dict[nn.Module, Any] = {}
    for pattern, style in styles.items():
        matching = _match(pattern, modules)
        # The plan of a model may name layers that only some sizes of the model have.
        if not matching and not is_of_model:
            raise ConfigurationError(
                request,
                problem=f"no layer is called {pattern!r}",
                expected=f"a pattern for {', '.join(_patterns_of(modules))}",
            )
        layers.update(dict.fromkeys(matching, style))
    if not layers:
        raise ConfigurationError(request, problem=f"no layer fits {', '.join(styles)}")
    problems = [
        *_layer_problems(root, layers, world_size),
        *_head_problems(root, layers, world_size),
        *_fused_layer_problems(root, layers),
        *_shared_parameter_problems(root, layers),
    ]
    if problems:
        raise ConfigurationError(request, problem="; ".join(problems))
    return layers


def find_head_attributes(
    root: nn.Module, layers: Mapping[nn.Module, Any]
) -> Iterator[HeadAttribute]:
    """Yield the attributes with a number of heads, in modules whose layers are split colwise.

    Args:
        root: the model.
        layers: the layers to split, each with its style.
    """
    for path, module in root.named_modules():
        colwise: list[nn.Linear] = []
        for child in module.children():
            if isinstance(child, nn.Linear) and layers.get(child) == "colwise":
                colwise.append(child)
        if not colwise:
            continue
        for attribute, value in vars(module).items():
            if _HEADS.fullmatch(attribute) and type(value) is int:
                yield HeadAttribute(
                    path=path, module=module, attribute=attribute, value=value, layers=colwise
                )


def torch_styles(layer: nn.Module, style: Any) -> list[Any]:
    """Return the torch styles for a style of a plan, to be applied in this order."""
    from torch.distributed.tensor import Replicate, Shard, parallel  # takes a second to import

    if style == "sequence_parallel":
        split_input = parallel.PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1)
        )
        join_output = parallel.PrepareModuleOutput(
            output_layouts=Shard(1), desired_output_layouts=Replicate()
        )
        return [split_input, parallel.SequenceParallel(), join_output]
    if style == "colwise":
        return [parallel.ColwiseParallel()]
    if style in _WHOLE_OUTPUT:
        return [parallel.ColwiseParallel(output_layouts=Replicate())]
    if style == "rowwise" and not isinstance(layer, nn.Embedding):
        return [parallel.RowwiseParallel()]
    if isinstance(style, str):
        # The input is not split. The tokens of an Embedding never are.
        return [parallel.RowwiseParallel(input_layouts=Replicate())]
    return [style]


def is_split(parameter: Any, dim: int | None = None) -> bool:
    """Return whether a parameter is split along ``tensor_parallel``.

    Args:
        parameter: the parameter.
        dim: the dimension that has to be split. None stands for any.
    """
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.mesh_dim_names is None:
        return False
    if "tensor_parallel" not in mesh.mesh_dim_names:
        return False
    index = mesh.mesh_dim_names.index("tensor_parallel")
    return parameter.placements[index].is_shard(dim)


def _match(pattern: str, modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the modules whose name fits a pattern, in which ``*`` is any part without a dot."""
    expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
    return [module for name, module in modules.items() if expression.fullmatch(name)]


def _patterns_of(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the patterns that fit the modules below the root, with ``*`` for every number."""
    patterns: dict[str, None] = {}
    for name in modules:
        if name:
            patterns[re.sub(r"\b\d+\b", "*", name)] = None
    return list(patterns)


# -- layers that cannot be split ----------------------------------------------------------------


def _layer_problems(
    root: nn.Module, layers: Mapping[nn.Module, Any], world_size: int
) -> Iterator[str]:
    """Yield why single layers cannot be split."""
    for path, layer in root.named_modules():
        if isinstance(layer, nn.MultiheadAttention) and not layers.keys().isdisjoint(
            layer.children()
        ):
            yield (
                f"{path}: a MultiheadAttention uses the weights of its layers itself: write "
                "an attention with separate layers"
            )
        if layer not in layers:
            continue
        style = layers[layer]
        split = _split_dimension(layer, style)
        if split is not None:
            yield from _remainder_problems(path, layer, split.attribute, world_size)
        elif _direction(style) in ("colwise", "rowwise"):
            yield (
                f"{path}: {style!r} splits Linear and Embedding, and it is a {type(layer).__name__}"
            )


def _head_problems(
    root: nn.Module, layers: Mapping[nn.Module, Any], world_size: int
) -> Iterator[str]:
    """Yield why heads cannot be divided among ranks."""
    for heads in find_head_attributes(root, layers):
        if heads.value % world_size:
            yield from _remainder_problems(heads.path, heads.module, heads.attribute, world_size)
            continue
        layer = heads.layers[0]
        # A single layer that widens its input computes queries, keys and values together.
        is_fused = len(heads.layers) == 1 and layer.out_features > layer.in_features
        if is_fused:
            yield (
                f"{heads.path}: one layer for queries, keys and values cannot be split by heads: "
                "write three layers"
            )


def _fused_layer_problems(root: nn.Module, layers: Mapping[nn.Module, Any]) -> Iterator[str]:
    """Yield colwise layers with more outputs than the rowwise layer beside them has inputs."""
    for path, module in root.named_modules():
        colwise: dict[str, nn.Linear] = {}
        rowwise: list[nn.Linear] = []
        for name, child in module.named_children():
            if not isinstance(child, nn.Linear):
                continue
            style = layers.get(child)
            if style == "colwise":
                colwise[name] = child
            elif style == "rowwise":
                rowwise.append(child)
        if not rowwise:
            continue
        inputs = max(layer.in_features for layer in rowwise)
        for name, layer in colwise.items():
            if layer.out_features > inputs:
                yield (
                    f"{path}.{name}: a gate and what it gates cannot be split in one layer: "
                    "write two layers"
                )


def _shared_parameter_problems(root: nn.Module, layers: Mapping[nn.Module, Any]) -> Iterator[str]:
    """Yield parameters of several layers that would be split in several ways."""
    lines_by_name: dict[nn.Parameter, dict[str, str]] = {}
    for path, layer in root.named_modules():
        split = _split_dimension(layer, layers.get(layer, ""))
        lines = ""
        if split is not None:
            lines = split.lines
        for name, parameter in layer.named_parameters(path, recurse=False):
            lines_by_name.setdefault(parameter, {})[name] = lines
    for names in lines_by_name.values():
        if len(set(names.values())) > 1:
            yield f"{' and '.join(names)} are one tensor, and have to be split in one way"


def _remainder_problems(
    path: str, module: nn.Module, attribute: str, world_size: int
) -> Iterator[str]:
    """Yield a problem if an attribute of a module is not divisible by the number of parts."""
    value = getattr(module, attribute)
    remainder = value % world_size
    if remainder:
        yield f"{path}: {attribute} {value} / {world_size} parts leaves {remainder}"


def _direction(style: Any) -> str:
    """Return ``"colwise"`` or ``"rowwise"`` for the styles that split so, else another word."""
    if isinstance(style, str):
        return style.split("_")[0]
    return type(style).__name__.removesuffix("Parallel").lower()


def _split_dimension(layer: nn.Module, style: Any) -> _SplitDimension | None:
    """Return what a style splits of a layer. None if it splits nothing."""
    direction = _direction(style)
    for (layer_class, supported), split in _SPLIT_DIMENSIONS.items():
        if isinstance(layer, layer_class) and direction == supported:
            return split
    return None


# -- random numbers -----------------------------------------------------------------------------


class _SavedStreams(NamedTuple):
    """The states of all generators, at three times of a split computation.

    Attributes:
        before: before the common seed was drawn.
        after: after the common seed was drawn.
        start: at the start of the part, seeded for this rank.
    """

    before: list[torch.Tensor]
    after: list[torch.Tensor]
    start: list[torch.Tensor]


class PartRandomStreams:
    """Hooks that give each part of a split computation random numbers of its own.

    See ``[Note: Split layers]``.

    Args:
        root: the model, with split layers.
        mesh: the mesh that layers are split on.
        requires_rowwise: whether a split computation must end in a layer that is split
            ``"rowwise"``.
    """

    def __init__(self, root: nn.Module, mesh: DeviceMesh, requires_rowwise: bool) -> None:
        self._part = mesh.get_local_rank("tensor_parallel")
        self._requires_rowwise = requires_rowwise
        # None outside of a split computation.
        self._saved: _SavedStreams | None = None
        self._generators = [torch.default_generator]
        if mesh.device_type != "cpu":
            device: Any = torch.get_device_module(mesh.device_type)
            self._generators.append(device.default_generators[device.current_device()])
        disable: Any = torch.compiler.disable
        enter = disable(self._enter)
        leave = disable(self._leave)
        for layer in root.modules():
            if not isinstance(layer, nn.Linear):
                continue
            if is_split(layer.weight, 0):
                layer.register_forward_hook(enter)
            elif is_split(layer.weight):
                layer.register_forward_pre_hook(leave, prepend=True)
        root.register_forward_hook(disable(self._finish), always_call=True)

    def _enter(self, layer: Any, args: Any, output: Any) -> None:
        """Start a split computation behind a colwise layer."""
        is_part = local_tensor(output) is output and output.shape[-1] < layer.out_features
        if not is_part or not layer.training or self._saved is not None:
            return
        with real_tensors():  # in a dry run, too
            before = self._states()
            seed = int(torch.randint(1 << 62, ()))
            after = self._states()
            for generator in self._generators:
                generator.manual_seed(seed + self._part)
            self._saved = _SavedStreams(before, after, start=self._states())

    def _leave(self, *_: object) -> None:
        """End a split computation, if there is one, before a rowwise layer."""
        if self._saved is None:
            return
        with real_tensors():
            # If no random numbers were drawn within, the draw of the common seed is undone, too.
            is_unused = all(map(torch.equal, self._saved.start, self._states()))
            states = self._saved.before if is_unused else self._saved.after
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
        self._saved = None

    def _finish(self, root: nn.Module, args: Any, output: Any) -> None:
        """End a split computation at the end of the model, where it is an error."""
        is_open = self._saved is not None
        self._leave()
        has_raised = output is None
        if is_open and self._requires_rowwise and not has_raised:
            raise UsageError(
                f"{type(root).__name__}(...)",
                problem='the output of a layer that is split "colwise" went into no layer that is '
                'split "rowwise"',
                suggestion='"colwise_rep" for the last layer',
            )

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

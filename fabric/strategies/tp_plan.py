"""Plans that split the layers of a model over ranks, and random numbers for split computations."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh

from fabric._torch import hook_entry, is_dtensor, real_tensors, registered_parameters
from fabric.errors import ConfigurationError, UsageError
from fabric.tree import flatten

__all__ = [
    "HeadAttribute",
    "LatentStyle",
    "PartRandomStreams",
    "ancestors",
    "check_styles",
    "direction_of_split",
    "find_head_attributes",
    "find_layers_to_split",
    "find_modules",
    "find_partial_gradients",
    "generators_of",
    "has_whole_output",
    "is_split",
    "lines_of_plan",
    "pattern_of",
    "refuse_second_derivatives",
    "smallest_modules_around",
    "sum_over_parts",
    "sum_partial_dtensors",
    "torch_styles",
]

# Newer model libraries use the second name of each of these styles.
_WHOLE_OUTPUT_STYLES = ("colwise_rep", "colwise_gather_output")
_WHOLE_INPUT_STYLES = ("rowwise_rep", "rowwise_split_input")
# Other names of transformers. There, a "local_rowwise" layer leaves the sum over the ranks to a
# module around the layer, whose style is "gather". Here the layer sums its output itself, which
# gives the same.
_OTHER_NAMES = {
    "embedding_rowwise": "rowwise",
    "local_colwise": "colwise",
    "local_rowwise": "rowwise",
}
# The styles of transformers for modules around such layers. The modules themselves are not split.
_STYLES_AROUND_LAYERS = ("local", "gather")
# The style of layers that compute with this rank's heads. transformers uses this name, too.
_PARTIAL_GRADIENT_STYLE = "replicated_with_grad_allreduce"
# The styles of transformers for a module with experts, and for their parameters, which the line of
# the module splits. See expert_styles.py.
_EXPERTS_STYLE = "moe_tp_experts"
_PACKED_STYLE = "packed_colwise"
# The style of transformers for the projection to latent keys and values. See expert_styles.py.
_LATENT_STYLE = "mla_kv_a_proj"
# The attribute of the module around this layer with the width of the rotated part of the keys.
_ROTATED_WIDTH_ATTRIBUTE = "qk_rope_head_dim"
_STYLES = (
    "colwise",
    "rowwise",
    *_WHOLE_OUTPUT_STYLES,
    *_WHOLE_INPUT_STYLES,
    *_OTHER_NAMES,
    *_STYLES_AROUND_LAYERS,
    "sequence_parallel",
    _PARTIAL_GRADIENT_STYLE,
    _EXPERTS_STYLE,
    _PACKED_STYLE,
    _LATENT_STYLE,
)
# The names of attributes that count heads in the attention modules of common models.
_HEAD_ATTRIBUTES = re.compile(r"heads|nhead|(num|n)_((attention|key_value|kv|q|query)_)?heads?")
# The names of attributes that hold the width of a head there.
_HEAD_WIDTH_ATTRIBUTES = ("head_dim", "head_size", "attention_head_size", "d_head")


class _SplitDimension(NamedTuple):
    """The dimension of a layer that a style splits.

    Attributes:
        attribute: the attribute of the layer with the length of the dimension.
        lines: ``"rows"`` or ``"columns"`` of the weight, whichever are split.
    """

    attribute: str
    lines: str


_SPLIT_DIMENSIONS = {
    (nn.Linear, "colwise"): _SplitDimension("out_features", lines="rows"),
    (nn.Linear, "rowwise"): _SplitDimension("in_features", lines="columns"),
    (nn.Embedding, "colwise"): _SplitDimension("embedding_dim", lines="columns"),
    (nn.Embedding, "rowwise"): _SplitDimension("num_embeddings", lines="rows"),
}


class LatentStyle(NamedTuple):
    """The style ``"mla_kv_a_proj"`` of a layer.

    Attributes:
        rotated_width: the number of outputs of the layer that are the rotated part of the keys.
            They are the last outputs.
    """

    rotated_width: int


class HeadAttribute(NamedTuple):
    """An attribute that holds the number of heads of a module with ``"colwise"`` layers.

    Attributes:
        path: the name of the module in the model.
        module: the module.
        attribute: the name of the attribute.
        number_of_heads: the value of the attribute.
        colwise_layers: the layers of the module that are split ``"colwise"``, at least one.
    """

    path: str
    module: nn.Module
    attribute: str
    number_of_heads: int
    colwise_layers: Sequence[nn.Linear]


# -- plans --------------------------------------------------------------------------------------


def check_styles(plan: Any) -> None:
    """Raise a ConfigurationError for a plan without patterns or with an unknown style.

    Args:
        plan: a style for each pattern of names, at least one. ``"auto"`` and None have no styles to
            check.
    """
    if not isinstance(plan, Mapping):
        return
    if not plan:
        raise ConfigurationError(
            "tp_plan={}",
            problem="the plan has no pattern of layers, and so splits no layer",
            expected='a style for each pattern of layers, or "auto" for the plan of the model',
            suggestion='tp_plan={"*.up": "colwise", "*.down": "rowwise"}',
        )
    for pattern, style in plan.items():
        if style in _STYLES:
            continue
        # All subclasses of ParallelStyle have this method. Importing ParallelStyle takes a second.
        is_torch_style = hasattr(style, "_apply")
        if not is_torch_style:
            raise ConfigurationError(
                f"tp_plan={dict(plan)}",
                problem=f"torch has no style {style!r}, which is for {pattern!r}",
                expected=f"{', '.join(_STYLES)}, or a ParallelStyle of torch",
                suggestion=f"tp_plan= without {pattern!r}, which is then not split",
            )


def find_layers_to_split(
    root: nn.Module, plan: Mapping[str, Any] | str, num_parts: int
) -> dict[nn.Module, Any]:
    """Return the layers that a plan splits, each with its style. Changes nothing.

    Args:
        root: the model.
        plan: a style for each pattern of names of layers, or ``"auto"`` for the model's own plan.
            See :class:`fabric.strategies.ModelParallelStrategy`.
        num_parts: the number of parts into which layers are split.

    Raises:
        ConfigurationError: a pattern matches nothing, or layers cannot be split into this many
            parts.
    """
    request = f"tp_plan for {type(root).__name__}"
    styles = _styles_by_pattern(root, plan)
    if not styles:
        raise ConfigurationError(
            request,
            problem="the model has no plan of its own",
            suggestion='tp_plan={"*.up": "colwise"}',
        )
    check_styles(styles)
    # A model's own plan may name layers that only some sizes of the model have.
    layers = _styles_of_layers(request, root, styles, may_match_nothing=plan == "auto")
    if not layers:
        raise ConfigurationError(request, problem=f"no layer fits {', '.join(styles)}")
    problems = [
        *_layer_problems(root, layers, num_parts),
        *_head_problems(root, layers, num_parts),
        *_fused_layer_problems(root, layers),
        *_shared_parameter_problems(root, layers),
    ]
    if problems:
        raise ConfigurationError(request, problem="; ".join(problems))
    return layers


def _styles_of_layers(
    request: str, root: nn.Module, styles: Mapping[str, Any], *, may_match_nothing: bool
) -> dict[nn.Module, Any]:
    """Return the style of each layer whose name fits a pattern.

    Args:
        request: what the user asked for, for the error.
        root: the model.
        styles: the style for each pattern.
        may_match_nothing: whether a pattern may fit no layer.

    Raises:
        ConfigurationError: a pattern fits no layer.
    """
    modules = dict(root.named_modules())
    layers: dict[nn.Module, Any] = {}
    for pattern, style in styles.items():
        pattern_of_parent, _, _ = pattern.rpartition(".")
        if styles.get(pattern_of_parent) == _EXPERTS_STYLE:
            # This pattern is for a parameter of a module of experts. The style of the module splits
            # the parameter.
            continue
        matching_modules = _find_matching(pattern, modules)
        if not matching_modules and not may_match_nothing:
            raise ConfigurationError(
                request,
                problem=f"no layer is called {pattern!r}",
                expected=f"a pattern for {', '.join(_patterns_of(modules))}",
            )
        if style in _STYLES_AROUND_LAYERS:
            # The modules are not split. The plan has lines for the layers in them.
            continue
        if isinstance(style, str):
            style = _OTHER_NAMES.get(style, style)
        # If a layer fits several patterns, the last one decides.
        layers.update(dict.fromkeys(matching_modules, style))
    # The style of a latent projection needs a width from the module around the layer. Without it,
    # the style stays a name, and _layer_problems() refuses it.
    for path, module in modules.items():
        parent_path, _, _ = path.rpartition(".")
        rotated_width = getattr(modules[parent_path], _ROTATED_WIDTH_ATTRIBUTE, None)
        if layers.get(module) == _LATENT_STYLE and rotated_width is not None:
            layers[module] = LatentStyle(rotated_width)
    return layers


def lines_of_plan(root: nn.Module, plan: Mapping[str, Any] | str) -> dict[nn.Module, str]:
    """Return the line of a plan for each layer that the plan splits, for errors.

    An example of a line is ``"blocks.*.up": "colwise"``.

    Args:
        root: the model.
        plan: as for :func:`find_layers_to_split`, which has accepted the plan.
    """
    modules = dict(root.named_modules())
    lines: dict[nn.Module, str] = {}
    for pattern, style in _styles_by_pattern(root, plan).items():
        line = f'"{pattern}": {_name_of_style(style)}'
        lines.update(dict.fromkeys(_find_matching(pattern, modules), line))
    return lines


def has_whole_output(style: Any) -> bool:
    """Return whether the output of a layer with this style has the columns of all ranks."""
    return style in _WHOLE_OUTPUT_STYLES


def find_head_attributes(
    root: nn.Module, layers: Mapping[nn.Module, Any]
) -> Iterator[HeadAttribute]:
    """Yield the attributes that hold a number of heads, in modules with colwise children.

    The number has to be divided by the number of parts when the children are split.

    Args:
        root: the model.
        layers: the layers to split, each with its style.
    """
    for path, module in root.named_modules():
        colwise_layers = _colwise_children(module, layers)
        if not colwise_layers:
            continue
        for attribute in _head_attributes(module):
            yield HeadAttribute(
                path=path,
                module=module,
                attribute=attribute,
                number_of_heads=getattr(module, attribute),
                colwise_layers=colwise_layers,
            )


def find_partial_gradients(
    root: nn.Module, layers: Mapping[nn.Module, Any]
) -> Iterator[nn.Parameter]:
    """Yield the parameters whose gradient on each rank comes from this rank's heads alone.

    These are the parameters of layers with the style ``"replicated_with_grad_allreduce"``, and of
    norms that are applied to each head. Their gradients have to be added up over the ranks.

    Args:
        root: the model, whose numbers of heads are not divided yet.
        layers: the layers that the plan splits, each with its style.
    """
    for module in root.modules():
        if layers.get(module) == _PARTIAL_GRADIENT_STYLE:
            yield from module.parameters()
        head_width = _width_of_heads(module, layers)
        for child in module.children():
            is_norm = "norm" in type(child).__name__.lower()
            shapes = {parameter.shape for parameter in child.parameters()}
            # A norm of another width is applied to something else than a head. The gradients of a
            # layer in the plan are left to its style.
            has_width_of_heads = shapes == {(head_width,)}
            if is_norm and has_width_of_heads and child not in layers:
                yield from child.parameters()


def sum_over_parts(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Register hooks that sum the gradients of parameters over ranks, in each backward pass.

    Args:
        parameters: the parameters whose gradient on each rank comes from this rank's part of a
            split computation.
        mesh: the mesh of the ranks with the parts. It has one dimension.
    """
    group = mesh.get_group()

    def sum_gradient(grad: torch.Tensor) -> torch.Tensor:
        """Return the sum of a gradient over the ranks. A hook of a parameter. Collective."""
        # A copy, since a hook must not change its gradient in place.
        total = grad.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    for parameter in parameters:
        if parameter.requires_grad:
            _register_before_user_hooks(parameter, sum_gradient)


def refuse_second_derivatives(root: nn.Module) -> None:
    """Make a backward pass with ``create_graph=True`` through a split model an error.

    torch's collectives of split layers have no second derivatives. Gradients of gradients would
    silently be wrong.

    Args:
        root: the model whose layers are split. It gets a forward hook.
    """

    def check_gradient(_gradient: torch.Tensor) -> None:
        """Raise the UsageError if this backward pass records a graph. A hook of an output."""
        if torch.is_grad_enabled():
            raise UsageError(
                f"a backward pass with create_graph=True through {type(root).__name__}, whose "
                "layers are split",
                problem="torch's collectives of split layers have no second derivatives, and the "
                "gradients of these gradients would be wrong",
                expected="with tensor parallelism, a loss that is not computed from gradients",
                suggestion='Fabric(strategy="ddp")',
            )

    def watch_output(_root: nn.Module, _arguments: object, output: object) -> None:
        """Add the check to the output. A forward hook of the model."""
        # For a compiled graph, torch itself raises an error.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        leaves, _ = flatten(output)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(check_gradient)

    root.register_forward_hook(watch_output)


def sum_partial_dtensors(parameters: Iterable[Any]) -> None:
    """Register hooks that sum the gradients of replicated DTensors, in each backward pass.

    An example is the weight of a norm that is computed in parts of dim 1: each rank has a partial
    sum of the gradient. Called only for a model that FSDP does not shard, since FSDP adds up the
    partial sums itself.

    Args:
        parameters: the parameters of a model. Plain parameters and split parameters are left alone.
    """

    def redistribute(placements: Any, grad: Any) -> Any:
        """Return a gradient with these placements, summed over the ranks. A hook of a parameter.

        Collective, unless the gradient has these placements already, such as for the bias of a
        rowwise layer.
        """
        if grad.placements == placements:
            # redistribute() would do nothing here, but it takes time.
            return grad
        return grad.redistribute(placements=placements)

    for parameter in parameters:
        needs_gradient = parameter.requires_grad
        if is_dtensor(parameter) and needs_gradient and not is_split(parameter):
            _register_before_user_hooks(parameter, partial(redistribute, parameter.placements))


def _register_before_user_hooks(parameter: nn.Parameter, hook: Callable[[Any], Any]) -> None:
    """Register a hook of a parameter that runs before the user's hooks of the parameter.

    The user's hooks then get the gradient that this hook returns. torch calls the hooks of a tensor
    in the order of their dict.
    """
    entry = hook_entry(parameter.register_hook(hook))
    # Insert the other hooks again, one after another. move_to_end() would change the order only for
    # Python. torch's C++ code reads the order of insertion (seen in torch 2.13).
    for key in list(entry.hooks):
        if key != entry.key:
            entry.hooks[key] = entry.hooks.pop(key)


def smallest_modules_around(
    colwise: list[str], rowwise: list[str], uncalled: Collection[str] = ()
) -> dict[str, list[str]]:
    """Find for each colwise layer the smallest module around it that has a rowwise layer, too.

    Args:
        colwise: the names of the colwise layers.
        rowwise: the names of the rowwise layers.
        uncalled: the names of modules that are never called. They are left out.

    Returns:
        The names of the colwise layers by the name of the module.
    """
    with_rowwise: set[str] = set()
    for path in rowwise:
        with_rowwise.update(ancestors(path))
    with_rowwise.difference_update(uncalled)
    colwise_by_module: dict[str, list[str]] = {}
    for path in colwise:
        for ancestor in ancestors(path):  # from the smallest module to the root
            if ancestor in with_rowwise:
                colwise_by_module.setdefault(ancestor, []).append(path)
                break
    return colwise_by_module


def ancestors(path: str) -> list[str]:
    """Return the names of the modules around a module: ``["a.b", "a", ""]`` for ``"a.b.c"``."""
    names: list[str] = []
    while path:
        path = path.rpartition(".")[0]
        names.append(path)
    return names


def torch_styles(layer: nn.Module, style: Any) -> list[Any]:
    """Return the torch styles for a style of a plan.

    Args:
        layer: the layer that is to be split.
        style: one of the names in ``_STYLES``, a ``LatentStyle``, or a ``ParallelStyle`` of torch,
            which is returned as it is.

    Returns:
        The styles, to be applied by ``parallelize_module(layer, mesh, style)`` in this order. Each
        call adds hooks that run after the hooks of earlier calls.
    """
    from torch.distributed.tensor import Replicate, Shard, parallel  # takes a second to import

    from fabric.strategies import expert_styles  # imports torch.distributed.tensor, too

    if style == _PARTIAL_GRADIENT_STYLE:
        # The layer is not split. The hooks of sum_over_parts() sum its gradients over the ranks.
        return []
    if style == _EXPERTS_STYLE:
        return [expert_styles.ExpertParallel()]
    if isinstance(style, LatentStyle):
        return [expert_styles.LatentProjection(style.rotated_width)]
    if style == "sequence_parallel":
        # Only this layer computes parts of dim 1, the tokens. The layers before and after it
        # compute the whole dimension.
        split_input = parallel.PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1)
        )
        join_output = parallel.PrepareModuleOutput(
            output_layouts=Shard(1), desired_output_layouts=Replicate()
        )
        return [split_input, parallel.SequenceParallel(), join_output]
    if style == "colwise":
        return [parallel.ColwiseParallel()]
    if style in _WHOLE_OUTPUT_STYLES:
        return [parallel.ColwiseParallel(output_layouts=Replicate())]
    if style == "rowwise" and not isinstance(layer, nn.Embedding):
        return [parallel.RowwiseParallel()]
    if isinstance(style, str):
        # "rowwise" of an Embedding, or a name for a rowwise layer whose input is whole.
        return [parallel.RowwiseParallel(input_layouts=Replicate())]
    return [style]  # a ParallelStyle of torch


def is_split(parameter: Any, dim: int | None = None) -> bool:
    """Return whether a parameter is split along the mesh dimension ``tensor_parallel``.

    Args:
        parameter: the parameter. A plain tensor is not split.
        dim: the dimension of the parameter that has to be split. None stands for any.
    """
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.mesh_dim_names is None:
        return False
    if "tensor_parallel" not in mesh.mesh_dim_names:
        return False
    mesh_dim = mesh.mesh_dim_names.index("tensor_parallel")
    return parameter.placements[mesh_dim].is_shard(dim)


def direction_of_split(layer: nn.Module) -> str | None:
    """Return ``"colwise"`` or ``"rowwise"`` for a split linear layer. None for other layers."""
    # Not layer.weight: a parametrization would compute it, and spectral_norm would then change its
    # buffers.
    weight = registered_parameters(layer).get("weight")
    if not isinstance(layer, nn.Linear) or not is_split(weight):
        return None
    # The rows of the weight are the columns of the output.
    if is_split(weight, dim=0):
        return "colwise"
    return "rowwise"


def _width_of_heads(module: nn.Module, layers: Mapping[nn.Module, Any]) -> int | None:
    """Return the width of the heads that the colwise children of a module compute.

    Returns None if the module has no colwise children, or no attribute that gives the width or the
    number of heads.

    Args:
        module: the module, whose numbers of heads are not divided yet.
        layers: the layers that the plan splits, each with its style.
    """
    widths = [layer.out_features for layer in _colwise_children(module, layers)]
    if not widths:
        return None
    attributes = vars(module)
    for name in _HEAD_WIDTH_ATTRIBUTES:
        if name in attributes:
            return attributes[name]
    numbers_of_heads = [attributes[name] for name in _head_attributes(module)]
    if not numbers_of_heads:
        return None
    # The largest width and number are those of the queries. Keys and values may have fewer heads.
    return max(widths) // max(numbers_of_heads)


def _colwise_children(module: nn.Module, layers: Mapping[nn.Module, Any]) -> list[nn.Linear]:
    """Return the children of a module that are split ``"colwise"``."""
    colwise_layers: list[nn.Linear] = []
    for child in module.children():
        if isinstance(child, nn.Linear) and layers.get(child) == "colwise":
            colwise_layers.append(child)
    return colwise_layers


def _head_attributes(module: nn.Module) -> list[str]:
    """Return the names of the attributes of a module that hold a number of heads."""
    names: list[str] = []
    for name, value in vars(module).items():
        # type() and not isinstance(): True is an int, but not a number of heads.
        is_number = type(value) is int
        if is_number and _HEAD_ATTRIBUTES.fullmatch(name):
            names.append(name)
    return names


def _has_heads(module: nn.Module) -> bool:
    """Return whether a module has an attribute with the number or the width of its heads."""
    has_width = not vars(module).keys().isdisjoint(_HEAD_WIDTH_ATTRIBUTES)
    return has_width or bool(_head_attributes(module))


def _styles_by_pattern(root: nn.Module, plan: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """Return the style for each pattern of a plan.

    For the plan ``"auto"``, return the model's own plan. It is empty if the model has none.
    """
    if isinstance(plan, Mapping):
        return plan
    # Models of transformers have the second attribute.
    return getattr(root, "tp_plan", None) or getattr(root, "_tp_plan", None) or {}


def _name_of_style(style: Any) -> str:
    """Return a style as the user writes it."""
    if isinstance(style, str):
        return f'"{style}"'
    return f"{type(style).__name__}(...)"


def _find_matching(pattern: str, modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the modules whose name fits a pattern.

    Args:
        pattern: a name of a module, in which ``*`` stands for a part without a dot.
        modules: the modules by name.
    """
    expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
    return [module for name, module in modules.items() if expression.fullmatch(name)]


def find_modules(root: nn.Module, patterns: Collection[str], request: str) -> set[nn.Module]:
    """Return the modules of a model whose names fit patterns.

    Args:
        root: the model.
        patterns: names of modules, in which ``*`` stands for a part without a dot. The name of the
            model itself is empty.
        request: what the user asked for, for the error.

    Raises:
        ConfigurationError: a pattern fits no module.
    """
    modules = dict(root.named_modules())
    matching_modules: set[nn.Module] = set()
    for pattern in patterns:
        matching = _find_matching(pattern, modules)
        if not matching:
            raise ConfigurationError(
                request,
                problem=f"no module is called {pattern!r}",
                expected=f"a pattern for {', '.join(_patterns_of(modules))}",
            )
        matching_modules.update(matching)
    return matching_modules


def pattern_of(path: str) -> str:
    """Return the name of a module with ``*`` in place of every number."""
    return re.sub(r"\b\d+\b", "*", path)


def _patterns_of(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of modules with ``*`` in place of every number, for an error.

    The list has no duplicates, and no pattern for the root, whose name is empty.
    """
    patterns: dict[str, None] = {}  # the keys are an ordered set
    for name in modules:
        if name:
            patterns[pattern_of(name)] = None
    return list(patterns)


# -- layers that cannot be split ----------------------------------------------------------------


def _layer_problems(
    root: nn.Module, layers: Mapping[nn.Module, Any], num_parts: int
) -> Iterator[str]:
    """Yield the reasons why single layers cannot be split, as parts of an error message.

    Args:
        root: the model.
        layers: the layers to split, each with its style.
        num_parts: the number of parts.
    """
    for path, layer in root.named_modules():
        splits_child = not layers.keys().isdisjoint(layer.children())
        if isinstance(layer, nn.MultiheadAttention) and splits_child:
            yield (
                f"{path}: a MultiheadAttention uses the weights of its layers itself: write "
                "an attention with separate layers"
            )
        if layer not in layers:
            continue
        style = layers[layer]
        # None if the style splits no dimension of this class of layers.
        dimension = _split_dimension(layer, style)
        if style == _EXPERTS_STYLE:
            yield from _expert_problems(path, layer, num_parts)
        elif style == _PACKED_STYLE:
            yield (
                f"{path}: {style!r} is for the parameters of experts, whose own line is "
                f'"{path.rpartition(".")[0]}": "{_EXPERTS_STYLE}"'
            )
        elif style == _LATENT_STYLE:
            # With the attribute, find_layers_to_split() has replaced the style by a LatentStyle.
            yield (
                f"{path}: {style!r} needs the attribute {_ROTATED_WIDTH_ATTRIBUTE} of the module "
                "around it"
            )
        elif dimension is not None and "weight" not in registered_parameters(layer):
            yield (
                f"{path}: its weight is computed from other parameters, as by spectral_norm, and "
                "cannot be split: a plan without this layer"
            )
        elif dimension is not None:
            yield from _remainder_problems(path, layer, dimension.attribute, num_parts)
        elif _direction(style) in ("colwise", "rowwise"):
            yield (
                f"{path}: {style!r} splits Linear and Embedding, and not a {type(layer).__name__}"
            )


def _expert_problems(path: str, module: nn.Module, num_parts: int) -> Iterator[str]:
    """Yield the reasons why a module of experts cannot be split, as parts of an error message.

    Args:
        path: the name of the module in the model.
        module: the module.
        num_parts: the number of parts.
    """
    num_experts = getattr(module, "num_experts", None)
    # An entry is (n,) for a parameter with n rows, and () for a parameter without dimensions.
    first_lengths = {parameter.shape[:1] for parameter in module.parameters()}
    # The style splits the parameters of the module itself, and not those of inner modules.
    has_inner_parameters = any("." in name for name, _ in module.named_parameters())
    has_rows_of_experts = num_experts is not None and first_lengths == {(num_experts,)}
    if has_inner_parameters or not has_rows_of_experts:
        yield (
            f"{path}: {_EXPERTS_STYLE!r} splits parameters with num_experts rows, which this "
            f"{type(module).__name__} has not"
        )
        return
    yield from _remainder_problems(path, module, "num_experts", num_parts)


def _head_problems(
    root: nn.Module, layers: Mapping[nn.Module, Any], num_parts: int
) -> Iterator[str]:
    """Yield the reasons why heads cannot be divided among ranks, as parts of an error message.

    Args:
        root: the model.
        layers: the layers to split, each with its style.
        num_parts: the number of parts.
    """
    for heads in find_head_attributes(root, layers):
        if heads.number_of_heads % num_parts:
            yield from _remainder_problems(heads.path, heads.module, heads.attribute, num_parts)
            continue
        # If a module has heads and only one colwise layer, and this layer has more outputs than
        # inputs, it is taken for a layer that computes queries, keys and values together.
        first_layer = heads.colwise_layers[0]
        is_only_layer = len(heads.colwise_layers) == 1
        is_fused = is_only_layer and first_layer.out_features > first_layer.in_features
        if is_fused:
            yield (
                f"{heads.path}: one layer for queries, keys and values cannot be split by heads: "
                "write three layers"
            )


def _fused_layer_problems(root: nn.Module, layers: Mapping[nn.Module, Any]) -> Iterator[str]:
    """Yield error messages for colwise layers that compute a gate and its values together.

    The output of such a layer cannot be split into parts of columns: one rank would get the gate
    and another one the values. The layer has more outputs than the rowwise layers in the same
    module have inputs. In an attention, this proves nothing: each head may have more outputs than
    values, such as latent keys beside the values, or a gate. If the columns of a head are not
    neighbors, the comparison in the first forward pass finds it.

    Args:
        root: the model.
        layers: the layers to split, each with its style.
    """
    for path, module in root.named_modules():
        if _has_heads(module):
            continue
        colwise_layers: dict[str, nn.Linear] = {}
        rowwise_layers: list[nn.Linear] = []
        for name, child in module.named_children():
            if not isinstance(child, nn.Linear):
                continue
            style = layers.get(child)
            if style == "colwise":
                colwise_layers[name] = child
            elif style == "rowwise":
                rowwise_layers.append(child)
        if not rowwise_layers:
            continue
        most_inputs = max(layer.in_features for layer in rowwise_layers)
        for name, layer in colwise_layers.items():
            if layer.out_features > most_inputs:
                yield (
                    f"{path}.{name}: a gate and what it gates cannot be split in one layer: "
                    "write two layers"
                )


def _shared_parameter_problems(root: nn.Module, layers: Mapping[nn.Module, Any]) -> Iterator[str]:
    """Yield the parameters of several layers that the plan splits in different ways.

    Args:
        root: the model.
        layers: the layers to split, each with its style.
    """
    # For each parameter: for each of its names, whether the layer of this name splits the "rows" or
    # the "columns" of the parameter. "" if the layer splits neither.
    lines_by_parameter: dict[nn.Parameter, dict[str, str]] = {}
    for path, layer in root.named_modules():
        # An empty style, which splits nothing, stands for a layer that is not in the plan.
        dimension = _split_dimension(layer, layers.get(layer, ""))
        lines = ""
        if dimension is not None:
            lines = dimension.lines
        # The path is put in front of the names.
        for name, parameter in layer.named_parameters(prefix=path, recurse=False):
            lines_by_parameter.setdefault(parameter, {})[name] = lines
    for lines_by_name in lines_by_parameter.values():
        is_split_differently = len(set(lines_by_name.values())) > 1
        if is_split_differently:
            yield f"{' and '.join(lines_by_name)} are one tensor, and have to be split in one way"


def _remainder_problems(
    path: str, module: nn.Module, attribute: str, num_parts: int
) -> Iterator[str]:
    """Yield one problem if a number of a module is not divisible by the number of parts.

    Args:
        path: the name of the module in the model.
        module: the module.
        attribute: the attribute of the module that holds the number.
        num_parts: the number of parts.
    """
    value = getattr(module, attribute)
    remainder = value % num_parts
    if remainder:
        yield f"{path}: {attribute} {value} / {num_parts} parts leaves {remainder}"


def _direction(style: Any) -> str:
    """Return ``"colwise"`` or ``"rowwise"`` for a style that splits a layer this way.

    Other styles give another word. Examples of styles are the name ``"colwise_rep"`` and torch's
    ``ColwiseParallel()``.
    """
    if isinstance(style, str):
        return style.split("_")[0]
    return type(style).__name__.removesuffix("Parallel").lower()


def _split_dimension(layer: nn.Module, style: Any) -> _SplitDimension | None:
    """Return the dimension of a layer that a style splits. None if the style splits none."""
    direction = _direction(style)
    for (layer_class, supported_direction), dimension in _SPLIT_DIMENSIONS.items():
        if isinstance(layer, layer_class) and direction == supported_direction:
            return dimension
    return None


# -- random numbers -----------------------------------------------------------------------------


class _SavedStates(NamedTuple):
    """The states of the generators when a part began.

    Each list has one state for each generator.

    Attributes:
        before_seed: the states before the common seed was drawn.
        start_of_part: the states after the generators were seeded for this rank's part.
    """

    before_seed: list[torch.Tensor]
    start_of_part: list[torch.Tensor]


def generators_of(device_type: str) -> list[torch.Generator]:
    """Return the generators of torch on a rank: of the CPU, and of the current device."""
    generators = [torch.default_generator]
    if device_type != "cpu":
        device: Any = torch.get_device_module(device_type)
        generators.append(device.default_generators[device.current_device()])
    return generators


def _has_dropout(module: nn.Module) -> bool:
    """Return whether a module has a positive probability of dropout.

    A probability is an attribute such as ``dropout``, or ``p`` of a class such as ``Dropout``.
    """
    is_dropout = "drop" in type(module).__name__.lower()
    for name, value in vars(module).items():
        is_probability = "drop" in name or (is_dropout and name == "p")
        if is_probability and isinstance(value, float) and value > 0:
            return True
    return False


def _draw_seed() -> int:
    """Draw a seed from the stream that all ranks share."""
    return int(torch.randint(high=1 << 62, size=()))


# [Note: Split layers]
# A layer that is split `"colwise"` computes some columns of its output. A layer that is split
# `"rowwise"` takes these columns as its input. Its output is a sum over ranks, and the same on all
# ranks. The computation between the two layers, such as attention over some of the heads, is
# computed in parts, one on each rank. In a part, each rank has random numbers of its own, so that
# dropout differs between parts. Their seed is drawn from the stream that all ranks share.
# Everywhere else the random numbers of all ranks are equal. If a part uses no random numbers, no
# seed is drawn. A parameter between the two layers that is not split itself, such as a norm of each
# head, gets the gradient of one part only. For norms of heads, and for layers whose style is
# `"replicated_with_grad_allreduce"`, the gradients of all parts are added up.
class PartRandomStreams:
    """Hooks that give each rank random numbers of its own while layers are computed in parts.

    A *part* is what a rank computes from the output of a colwise layer, which has some of the
    columns, to the input of the rowwise layer behind it. Outside of parts, the random numbers of
    all ranks are equal.

    Args:
        mesh: the mesh along which layers are split. Its dimension ``tensor_parallel`` is used.
        requires_rowwise: whether each part must end at a layer that is split ``"rowwise"``.
    """

    def __init__(self, mesh: DeviceMesh, requires_rowwise: bool) -> None:
        """Choose the generators: the one of the CPU, and the one of the current device."""
        # The number of the part that this rank computes.
        self._part_number = mesh.get_local_rank("tensor_parallel")
        # Whether a part without a rowwise layer behind it is an error.
        self._requires_rowwise = requires_rowwise
        # The states of the generators from before the part. None outside of a part.
        self._saved_states: _SavedStates | None = None
        self._generators = generators_of(mesh.device_type)
        # Whether parts are known to draw random numbers, because the model has dropout, or because
        # an earlier part has drawn some.
        self._parts_draw_numbers = False
        # torch.compile cannot trace changes of generators.
        self._seed_outside_of_graphs: Any = torch.compiler.disable(self._seed)
        self._restore_outside_of_graphs: Any = torch.compiler.disable(self._restore)

    def register_hooks(self, root: nn.Module) -> None:
        """Register the hooks with a model whose layers are split. They stay as long as the model.

        A part begins after a colwise layer and ends before the next rowwise layer. If the model has
        dropout, ``torch.compile`` leaves out the modules around parts.
        """
        colwise: list[str] = []
        rowwise: list[str] = []
        for path, layer in root.named_modules():
            direction = direction_of_split(layer)
            if direction == "colwise":
                colwise.append(path)
                layer.register_forward_hook(self._start_part)
            elif direction == "rowwise":
                rowwise.append(path)
                # Prepended, so that the users' hooks run with the streams that all ranks share.
                layer.register_forward_pre_hook(self._end_part, prepend=True)
        self._parts_draw_numbers = any(map(_has_dropout, root.modules()))
        if self._parts_draw_numbers:
            for path in smallest_modules_around(colwise, rowwise):
                # A graph of torch.compile cannot switch to other random numbers.
                module: Any = root.get_submodule(path)
                module.forward = torch.compiler.disable(module.forward)
        # Called after an error, too, so that the next forward pass starts with the shared streams.
        root.register_forward_hook(self._end_forward, always_call=True)

    def _start_part(self, layer: Any, args: Any, output: Any) -> None:
        """Seed the generators for this rank's part. A forward hook of colwise layers.

        The part ends at the next rowwise layer. If several colwise layers precede a rowwise layer,
        the first one starts the part. Nothing is seeded in evaluation mode, in which no dropout
        draws random numbers.
        """
        is_in_part = self._saved_states is not None
        if is_in_part or not layer.training:
            return
        # A layer such as "colwise_rep" has a whole output, and starts no part.
        has_some_columns = not is_dtensor(output) and output.shape[-1] < layer.out_features
        if not has_some_columns:
            return
        if not torch.compiler.is_dynamo_compiling():
            self._seed()
        elif self._parts_draw_numbers:
            # Seeding breaks the graph of torch.compile. So compiled code seeds only if the model
            # has dropout, or if a part that was not compiled has drawn random numbers.
            self._seed_outside_of_graphs()

    def _seed(self) -> None:
        """Seed the generators for this rank's part, and keep their states from before."""
        # In a dry run, new tensors are fake. The seed and the states must have real values.
        with real_tensors():
            before_seed = self._generator_states()
            seed = _draw_seed()  # the same on all ranks
            for generator in self._generators:
                generator.manual_seed(seed + self._part_number)
            self._saved_states = _SavedStates(before_seed, start_of_part=self._generator_states())

    def _end_part(self, *_: object) -> None:
        """Restore the streams that all ranks share. A forward pre-hook of rowwise layers.

        Does nothing outside of a part.
        """
        if self._saved_states is None:
            return
        if torch.compiler.is_dynamo_compiling():
            self._restore_outside_of_graphs()
        else:
            self._restore()

    def _restore(self) -> None:
        """Restore the streams that all ranks share, at the end of a part.

        :meth:`_seed` has drawn a seed from these streams. If the part has drawn no random numbers,
        the streams continue as if no seed had been drawn, and so as in a single process.
        """
        saved = self._saved_states
        assert saved is not None
        with real_tensors():
            has_drawn = not all(map(torch.equal, saved.start_of_part, self._generator_states()))
            for generator, state in zip(self._generators, saved.before_seed, strict=True):
                generator.set_state(state)
            if has_drawn:
                # From now on, _start_part() seeds the parts of compiled code, too.
                self._parts_draw_numbers = True
                # The same draw as in _seed(), so that the next part gets another seed.
                _draw_seed()
        self._saved_states = None

    def _end_forward(self, root: nn.Module, args: Any, output: Any) -> None:
        """Restore the shared streams at the end of the model. A forward hook of the model.

        torch calls the hook after an exception, too, with None as the output.

        Raises:
            UsageError: no rowwise layer has ended the last part, but one is required.
        """
        is_in_part = self._saved_states is not None
        self._end_part()
        has_raised = output is None
        if is_in_part and self._requires_rowwise and not has_raised:
            raise UsageError(
                f"{type(root).__name__}(...)",
                problem='the output of a layer that is split "colwise" went into no layer that is '
                'split "rowwise"',
                suggestion='"colwise_rep" for the last layer',
            )

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

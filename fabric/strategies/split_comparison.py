"""The comparison of split layers with the model as it was before the split, in the first pass."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from fabric._torch import (
    full_tensor,
    gathered_for_recomputation,
    in_place_version,
    is_dtensor,
    is_fsdp_module,
    user_hooks,
    without_dispatch_modes,
)
from fabric.communicators import Communicator
from fabric.diagnostics.digest import digests
from fabric.errors import UsageError
from fabric.hooks import Hooks
from fabric.store import JobStore
from fabric.strategies.agreement import AgreeingCollectives
from fabric.strategies.fsdp.state import ParameterSlot, parameter_slots
from fabric.strategies.tp_plan import (
    ancestors,
    direction_of_split,
    generators_of,
    pattern_of,
    smallest_modules_around,
)
from fabric.tree import flatten, unflatten

__all__ = ["SplitComparison", "copy_without_values"]

R = TypeVar("R")

# The largest difference, as a part of the largest value. Another model differs by about 1.
_TOLERANCE = 1e-3
_TOLERANCE_OF_16_BITS = 5e-2
# The tolerance of float32 on a device that multiplies with fewer bits, as GPUs do on request.
_TOLERANCE_OF_FAST_MATMUL = 1e-2
# The number of passes after which a region is not compared any more whose rowwise weights are zero.
_MAX_PASSES = 20
# Arguments of these types cannot be changed by a forward pass.
_IMMUTABLE_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_REMEDIES_OF_OUTPUTS = (
    "view(batch, length, -1, width_of_a_head) in place of a number of heads; a layer for each of "
    'several concatenated outputs; "colwise_rep" and "rowwise_rep" around a cat or a softmax'
)
_REMEDIES_OF_GRADIENTS = (
    'the line "replicated_with_grad_allreduce" for a layer whose input is this rank\'s heads, such '
    'as a norm; the line "mla_kv_a_proj" for a projection to latent keys and values; a layer whose '
    "input is whole goes behind the rowwise layer"
)


def copy_without_values(root: nn.Module) -> nn.Module | None:
    """Return a copy of a model whose parameters are on the meta device, and so need no memory.

    The copy shares buffers and hooks with the model.

    Returns:
        The copy. None if the model cannot be copied.
    """
    # deepcopy uses the values of the memo in place of copies.
    memo: dict[int, Any] = {}
    for parameter in root.parameters():
        meta = torch.empty_like(parameter, device="meta", requires_grad=False)
        memo[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    for buffer in root.buffers():
        memo[id(buffer)] = buffer
    for module in root.modules():
        for hook in user_hooks(module):
            # deepcopy of a bound method would copy its object, which may be large.
            memo[id(hook)] = hook
    try:
        return deepcopy(root, memo)
    except Exception:  # noqa: BLE001 - the user's code may raise any error
        return None


@dataclass(eq=False)
class _Region:
    """A module with split layers whose input and output are whole.

    Attributes:
        path: the name of the module in the model.
        module: the module, whose layers are split.
        whole: a copy of the module from before the split, without values.
        rowwise_layers: the names of the layers in the module that are split ``"rowwise"``.
        lines: for each of these layers, the lines of the plan for this layer and for the colwise
            layers in front of it.
        is_called: whether a pass has called the module.
        has_called_layers: whether a pass has called one of the rowwise layers.
        has_zero_weights: whether all rowwise weights are zero, as some models initialize them. The
            outputs are then equal, however the region is split.
        is_compared: whether a pass with gradients has compared the region without a difference, or
            could not compare it because the ranks had different inputs.
    """

    path: str
    module: nn.Module
    whole: nn.Module
    rowwise_layers: list[str] = field(default_factory=list)
    lines: dict[str, list[str]] = field(default_factory=dict)
    is_called: bool = False
    has_called_layers: bool = False
    has_zero_weights: bool = False
    is_compared: bool = False

    @property
    def option_to_leave_out(self) -> str:
        """The option of the strategy that leaves out this region, and regions like it."""
        return f"ModelParallelStrategy(not_compared=[{pattern_of(self.path)!r}])"

    @property
    def all_plan_lines(self) -> list[str]:
        """The lines of the plan for all layers of the region."""
        lines: dict[str, None] = {}
        for lines_of_layer in self.lines.values():
            lines.update(dict.fromkeys(lines_of_layer))
        return list(lines)

    def note_layer(self, *_: object) -> None:
        """Note that a rowwise layer is called. A forward pre-hook of these layers."""
        self.has_called_layers = True

    def describe(self, name: str) -> str:
        """Return the name in the model of a layer or a parameter of the region."""
        return f"{self.path}.{name}".removeprefix(".")


@dataclass(eq=False)
class _ComparingPass:
    """A forward pass of the model in which regions are compared.

    Attributes:
        cleanup: removes the hooks of the pass, and lets ``torch.compile`` compile again.
        note_for_error: a note for the error of the pass. Empty unless a region raises because it is
            split.
        is_computing_region: whether a hook is computing a region, split or whole, to compare it.
    """

    cleanup: ExitStack = field(default_factory=ExitStack)
    note_for_error: str = ""
    is_computing_region: bool = False


class _Quantity(NamedTuple):
    """A tensor that a computation of a region yields.

    Attributes:
        name: what the tensor is, in words.
        tensor: the tensor.
        lines: the lines of the plan on which the tensor depends.
    """

    name: str
    tensor: Tensor
    lines: Sequence[str]


class _Difference(NamedTuple):
    """A difference between the split and the whole region.

    Attributes:
        text: what differs, in words.
        lines: the lines of the plan on which the different tensor depends.
        suggestion: what the user may write instead.
    """

    text: str
    lines: Sequence[str]
    suggestion: str


@dataclass(eq=False)
class _Computation:
    """One computation of a region, split or whole.

    Attributes:
        outputs: the outputs of the rowwise layers in the order of the calls, and of the region.
        gradient_inputs: the unsplit parameters and the inputs that require a gradient.
        result: the tensors in the output of the region.
    """

    outputs: list[_Quantity]
    gradient_inputs: list[_Quantity]
    result: list[Tensor]

    def gradients(self) -> list[_Quantity]:
        """Return the gradients of ``gradient_inputs`` for random gradients of the result.

        The random gradients are the same in every call, so that the split and the whole computation
        of a region can be compared.
        """
        differentiable = [tensor for tensor in self.result if tensor.requires_grad]
        if not self.gradient_inputs or not differentiable:
            return []
        output_gradients: list[Tensor] = []
        # On the CPU and in float64, so that the numbers depend on the shapes alone.
        generator = torch.Generator().manual_seed(0)
        for tensor in differentiable:
            gradient = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            output_gradients.append(gradient.to(tensor))
        gradients = torch.autograd.grad(
            differentiable,
            [quantity.tensor for quantity in self.gradient_inputs],
            output_gradients,
            # Zeros for inputs that the result does not depend on.
            allow_unused=True,
            materialize_grads=True,
        )
        quantities: list[_Quantity] = []
        for quantity, gradient in zip(self.gradient_inputs, gradients, strict=True):
            name = f"the gradient of {quantity.name}"
            quantities.append(_Quantity(name, gradient, quantity.lines))
        return quantities


class _Computations(NamedTuple):
    """The two computations of a region.

    Attributes:
        split: the computation of the region as it is.
        whole: the computation of the region as it was before the split.
        is_random: whether one of the computations has drawn random numbers.
    """

    split: _Computation
    whole: _Computation
    is_random: bool


# [Note: Split comparison]
# Split layers may compute another model without an error: a number of heads that was not divided, a
# layer whose columns belong together, a softmax over some of the columns. So the first forward pass
# of a model also computes, before each *region*, the region twice: as it is split, and whole, with
# the full parameters. A region is a smallest module that has a colwise layer and the rowwise layer
# behind it, such as an attention. Its input and its output are whole. If nothing calls this module,
# because the code around it calls the layers themselves, the next pass compares a module around it.
#
# Both computations have the same inputs, are in evaluation mode, so that dropout is off, and
# compare the outputs of the rowwise layers, the output of the region, the gradients of its inputs
# and the gradients of its parameters that are not split. They leave no trace: buffers, attributes
# and random states are restored, dispatch modes such as counters of FLOPs do not see the operators,
# and an activation checkpoint of the user does not see the saved tensors. FSDP modules inside of a
# region gather their parameters for the comparison. Memory for one whole region is needed at a
# time, and the time of one step.
#
# Where a difference would prove nothing, there is no comparison: the ranks have different inputs,
# as under sequence parallelism, the region draws random numbers in evaluation mode, it has hooks of
# the user, an object among its arguments cannot be copied, or it raises on all ranks in evaluation
# mode. If only the split region raises, the error of the forward pass itself gets a note with the
# lines of the plan. Where users mean a difference, they name the module in the strategy's option
# `not_compared`. An error on some of the ranks reaches the user. See [Note: Agreeing collectives]
# in agreement.py.
class SplitComparison:
    """Compares a split model with the whole one.

    A *region* is the smallest module around a colwise layer that has a rowwise layer, too, such as
    an attention. The first forward pass computes each region twice, in evaluation mode: *split*, as
    it is, and *whole*, as it was before the split, with the full parameters. The *ranks of a layer*
    are the ranks that hold the parts of a layer.

    Args:
        name: identifies the comparison among those of the job.
        root: the model, whose layers are split.
        whole: the result of :func:`copy_without_values` from before the split.
        communicator: the ranks that hold the parts of a layer.
        store: the store of the job.
        lines: the line of the plan for each split layer. Layers that ``parallelize_fn`` splits have
            none.
        whole_outputs: the colwise layers whose output has the columns of all ranks.
        not_compared: modules that are meant to compute something else when they are split. Regions
            in them are left out.
    """

    def __init__(
        self,
        name: str,
        root: nn.Module,
        whole: nn.Module,
        communicator: Communicator,
        store: JobStore,
        *,
        lines: Mapping[nn.Module, str],
        whole_outputs: set[nn.Module],
        not_compared: set[nn.Module],
    ) -> None:
        """Find the regions. The comparison starts in :meth:`add_to`."""
        self._root = root
        self._communicator = communicator
        self._store = store
        # For keys in the store. The ranks of a layer are consecutive, and the name has the first of
        # them, since each group of ranks with parts of a layer compares on its own.
        self._name = f"{name} from rank {store.rank - communicator.rank}"
        # The number of calls of _run_on_all_ranks(), for keys in the store.
        self._num_runs = 0
        self._generators = generators_of(communicator.device.type)
        self._find_regions = partial(
            _find_regions, root, whole, lines, whole_outputs, not_compared=not_compared
        )
        # The regions that are still to be compared.
        self._regions_to_compare = self._find_regions(uncalled=())
        # The names of all regions so far.
        self._paths_of_regions = {region.path for region in self._regions_to_compare}
        # The names of regions that a pass has not called although it has called their layers.
        self._uncalled_paths: set[str] = set()
        # The number of passes with gradients and comparisons so far.
        self._num_passes = 0
        # Whether a region has been compared, or a pass without an error has called no region. Then
        # passes without gradients compare nothing any more.
        self._has_compared = False
        # The running forward pass, if it compares regions. Otherwise None.
        self._comparing_pass: _ComparingPass | None = None
        # The hooks around forward passes, once the comparison has started.
        self._hooks_of_model = Hooks()

    def add_to(self, hooks: Hooks) -> None:
        """Compare the regions with whole layers in the next pass, if the model has regions.

        Args:
            hooks: the hooks around forward passes of the model.
        """
        if self._regions_to_compare:
            self._hooks_of_model = hooks
            hooks.before.append(self._before_forward)
            hooks.after.append(self._after_forward)
            hooks.is_needed_uncompiled.append(self._is_pass_to_compare)

    def _is_pass_to_compare(self) -> bool:
        """Return whether to compare in the next pass.

        A pass without gradients, such as one of validation, compares only outputs. It is compared
        only if nothing has been compared before.
        """
        return torch.is_grad_enabled() or not self._has_compared

    def _before_forward(self) -> None:
        """Add the hooks that compare the regions, which are the modules with split layers.

        Called before each forward pass of the model. :meth:`_after_forward` removes the hooks.
        """
        # The model may call itself. Only the outermost call is a pass.
        if self._comparing_pass is not None or not self._is_pass_to_compare():
            return
        comparing_pass = _ComparingPass()
        self._comparing_pass = comparing_pass
        for region in self._regions_to_compare:
            compare = partial(self._compare_region, comparing_pass, region)
            handle = region.module.register_forward_pre_hook(compare, with_kwargs=True)
            comparing_pass.cleanup.callback(handle.remove)
            for name in region.rowwise_layers:
                layer = region.module.get_submodule(name)
                handle = layer.register_forward_pre_hook(region.note_layer)
                comparing_pass.cleanup.callback(handle.remove)
        if "torch._dynamo" in sys.modules:
            # Otherwise the hooks would stay in the graphs that this pass compiles.
            comparing_pass.cleanup.enter_context(torch.compiler.set_stance("force_eager"))

    def _after_forward(self, output: Any, error: BaseException | None) -> None:
        """Remove the hooks of the regions, and end the comparison once no region is left.

        Called after each forward pass of the model, even if it raised. A region is a module with
        split layers. Hooks of this pass have compared the regions that were called.

        Args:
            output: what the forward pass returned. Not used.
            error: the error of the forward pass. None if it raised none.
        """
        comparing_pass = self._comparing_pass
        if comparing_pass is None:
            return
        self._comparing_pass = None
        # Removes the hooks of the regions, and lets torch.compile compile again.
        comparing_pass.cleanup.close()
        if error is not None and comparing_pass.note_for_error:
            error.add_note(comparing_pass.note_for_error)
        if error is None:
            self._has_compared = True  # for a pass that has called no region
        if torch.is_grad_enabled():
            self._num_passes += 1
        self._regions_to_compare = self._regions_of_next_pass(error)
        # Weights that stay zero must not make every pass of the job slower.
        if not self._regions_to_compare or self._num_passes >= _MAX_PASSES:
            self._regions_to_compare = []
            self._hooks_of_model.before.remove(self._before_forward)
            self._hooks_of_model.after.remove(self._after_forward)
            self._hooks_of_model.is_needed_uncompiled.remove(self._is_pass_to_compare)

    def _regions_of_next_pass(self, error: BaseException | None) -> list[_Region]:
        """Return the regions that the next forward pass has to compare, after a pass has ended.

        Args:
            error: the error of the pass that has ended. None if it raised none.
        """
        new_regions: list[_Region] = []
        if error is None:
            new_regions = self._regions_around_uncalled()
        if not torch.is_grad_enabled():
            # All regions stay, since a pass with gradients has to compare them.
            return [*self._regions_to_compare, *new_regions]
        remaining: list[_Region] = []
        for region in self._regions_to_compare:
            # An error has ended the pass before this region was compared, or is the error of its
            # comparison. If the user catches the error, the next pass compares the region.
            is_interrupted = error is not None and not region.is_compared
            # If weights are zero, the region is compared again once a step has changed them.
            if is_interrupted or region.has_zero_weights:
                remaining.append(region)
        return [*new_regions, *remaining]

    def _regions_around_uncalled(self) -> list[_Region]:
        """Return new regions around regions that the last pass has not called.

        A *region* is a module with split layers, which a forward pre-hook of the module compares
        with the module before the split. The hook never runs if the code of an outer module calls
        the layers of the region, and not the region itself. Then the outer module becomes a region.
        """
        uncalled: set[str] = set()
        for region in self._regions_to_compare:
            if region.has_called_layers and not region.is_called:
                uncalled.add(region.path)
        if not uncalled:
            return []
        self._uncalled_paths |= uncalled
        # Without the uncalled modules, the next module around the same layers is a region. The
        # other regions are found again, and are not new.
        new_regions: list[_Region] = []
        for region in self._find_regions(uncalled=self._uncalled_paths):
            if region.path not in self._paths_of_regions:
                new_regions.append(region)
        self._paths_of_regions.update(region.path for region in new_regions)
        return new_regions

    # -- one region -----------------------------------------------------------------------------

    def _compare_region(
        self,
        comparing_pass: _ComparingPass,
        region: _Region,
        module: nn.Module,
        args: Any,
        kwargs: Any,
    ) -> None:
        """Raise on all ranks of a layer if the split region computes something else than the whole.

        A forward pre-hook of the region. Collective among the ranks of a layer.

        Args:
            comparing_pass: the running forward pass of the model.
            region: a module with split layers, and its copy from before the split.
            module: the module of the region.
            args: the positional arguments of the call of the module.
            kwargs: the keyword arguments of the call.

        Raises:
            UsageError: an output or a gradient differs.
        """
        # The computations below call the hooks of the regions inside this region.
        if comparing_pass.is_computing_region:
            return
        comparing_pass.is_computing_region = True
        region.is_called = True
        # Whether the region is done. If it is not, and if this pass raises, the next pass compares
        # it again. A region whose inputs differ between ranks cannot be compared, and is done, too.
        is_done = True
        try:
            inputs, _ = flatten((args, kwargs))
            # Neither modes of the user, such as a counter of FLOPs, nor an activation checkpoint
            # around the region must see the computations. FSDP modules inside the region stay
            # gathered and prepare no backward pass, as in a recomputation.
            with (
                without_dispatch_modes(),
                saved_tensors_hooks(_unchanged, _unchanged),
                gathered_for_recomputation(_inner_fsdp_modules(region.module)),
            ):
                if self._has_same_inputs(inputs):
                    with self._restored_state(region):
                        is_done = self._compare_computations(comparing_pass, region, args, kwargs)
        finally:
            comparing_pass.is_computing_region = False
        self._has_compared = True
        # A pass without gradients compares only the outputs.
        region.is_compared = torch.is_grad_enabled() and is_done

    def _raise_on_all_ranks(self, region: _Region, difference: _Difference | None) -> None:
        """Raise a UsageError on all ranks of a layer if one of them passes a difference.

        Collective among the ranks of a layer.

        Args:
            region: the module with split layers that was compared, for the error.
            difference: a difference between the split and the whole region. None if there is none.
        """
        error = None
        if difference is not None:
            # torch puts "FSDP" in front of the class's name.
            title = type(self._root).__name__.removeprefix("FSDP")
            lines = ", ".join(difference.lines)
            error = UsageError(
                f"the first forward pass of {title}, whose layers are split",
                problem=f"{difference.text}; the layers are split by {lines}",
                expected="between a colwise and a rowwise layer, operations on each head or each "
                "column by itself",
                suggestion=f"{difference.suggestion}. {region.option_to_leave_out} if the split "
                f"{region.path or 'model'} is meant to be another model than the whole one",
            )
        self._communicator.gather_objects(None, error=error)  # raises the error of any rank

    def _has_same_inputs(self, inputs: Sequence[Any]) -> bool:
        """Return whether all ranks of a layer have the same inputs. Collective among them.

        Inputs without tensors count as different, and so do inputs with a DTensor or a sparse
        tensor.
        """
        tensors = [leaf for leaf in inputs if isinstance(leaf, Tensor) and leaf.numel()]
        checksums: list[int] = []
        if tensors and all(map(_is_plain_and_dense, tensors)):
            checksums = digests(tensors)
        checksums_by_rank = self._communicator.gather_objects(checksums)
        are_equal = checksums_by_rank.count(checksums) == len(checksums_by_rank)
        return bool(checksums) and are_equal

    @contextmanager
    def _restored_state(self, region: _Region) -> Iterator[None]:
        """Run the block in evaluation mode, and restore all state of the region after the block.

        The state includes the random states, and the attributes and buffers of all modules. The
        mode is the attribute ``training``, which is restored with the other attributes.
        """
        with ExitStack() as stack:
            for generator in self._generators:
                stack.callback(generator.set_state, generator.get_state())
            for module in (*region.module.modules(), *region.whole.modules()):
                stack.callback(_restore_attributes, module, dict(vars(module)))
            # The copy `whole` shares these buffers.
            for buffer in region.module.buffers():
                version = in_place_version(buffer)
                stack.callback(_restore_buffer, buffer, version, buffer.detach().clone())
            for module in (*region.module.modules(), *region.whole.modules()):
                module.training = False
            yield

    def _compare_computations(
        self, comparing_pass: _ComparingPass, region: _Region, args: Any, kwargs: Any
    ) -> bool:
        """Raise on all ranks of a layer if the split and the whole region differ.

        Collective among the ranks of a layer, which gather the full parameters.

        Args:
            comparing_pass: the running pass. It gets a note if only the split region raises.
            region: a module with split layers, and its copy from before the split.
            args: the positional arguments of the call of the module.
            kwargs: the keyword arguments of the call.

        Returns:
            Whether the region could be computed. False if it raised on all ranks.

        Raises:
            UsageError: an output differs, or else a gradient.
        """
        computations = self._run_on_all_ranks(
            _compute_both, region, self._generators, args, kwargs, region_of_error=region
        )
        if computations is None:
            # The split or the whole region has raised on all ranks.
            note = self._describe_error_of_split(region, args, kwargs)
            if note:
                comparing_pass.note_for_error = note
            return False
        split, whole, is_random = computations
        # If random numbers were drawn, or a layer was called more often in one of the two, the
        # outputs may differ without a mistake.
        is_comparable = not is_random and len(split.outputs) == len(whole.outputs)
        # All ranks skip the comparison if one has to, since the calls below are collective.
        if not all(self._communicator.gather_objects(is_comparable)):
            return True  # the region was computed, and is not compared again
        self._raise_on_all_ranks(region, self._compare_outputs(split, whole))
        gradients = self._run_on_all_ranks(_compute_gradients, split, whole, region_of_error=region)
        if gradients is None:  # computing them has raised on all ranks
            return False
        self._raise_on_all_ranks(region, _compare_gradients(gradients, _tolerance(split)))
        return True

    def _describe_error_of_split(self, region: _Region, args: Any, kwargs: Any) -> str:
        """Return a note for the error of this pass if only the split region raises.

        Collective among the ranks of a layer. Called once the split region has raised. The note is
        empty if the whole region raises, too.
        """
        whole = self._run_on_all_ranks(_compute_whole, region, args, kwargs, region_of_error=region)
        if whole is None:
            return ""
        lines = ", ".join(region.all_plan_lines)
        return (
            f"{region.path or 'the model'} raises this error because its layers are split by "
            f"{lines}. As a whole it raises none. Write: a plan without these layers"
        )

    def _run_on_all_ranks(
        self, function: Callable[..., R], *args: Any, region_of_error: _Region
    ) -> R | None:
        """Return the result of a function that runs the user's code and communicates.

        Collective among the ranks of a layer. ``AgreeingCollectives`` raises before a collective in
        which ranks would wait for each other forever, because they do different things.

        Args:
            function: the function.
            *args: the arguments of the function.
            region_of_error: the region that the function computes, for the error.

        Returns:
            The result. None if the function has raised on all ranks of a layer.

        Raises:
            Exception: the error of the function, if it has not raised on all ranks.
            UsageError: the function has raised on another rank, or communicates differently there.
        """
        # A name for the keys in the store. All ranks of a layer make the same runs.
        self._num_runs += 1
        name = f"{self._name}/{self._num_runs}"
        build_error = partial(self._build_error, region_of_error)
        with AgreeingCollectives(name, self._store, build_error) as agreement:
            try:
                result = function(*args)
            except Exception as error:  # noqa: BLE001 - the user's code raises any error
                agreement.fail(error)  # raises, unless the function has raised on all ranks
                return None
            agreement.finish()  # raises if the function has not returned on all ranks
        return result

    def _build_error(self, region: _Region, problem: str) -> UsageError:
        """Return the error for ranks that do different things while a region is computed."""
        return UsageError(
            f"{region.path or 'the model'} on rank {self._store.rank}, which the first forward "
            "pass computes in evaluation mode, split and whole",
            problem=problem,
            expected="the same computation on all ranks of a split layer",
            suggestion="no branch on the rank in the forward pass. "
            f"{region.option_to_leave_out} if ranks are meant to compute differently there",
        )

    def _compare_outputs(self, split: _Computation, whole: _Computation) -> _Difference | None:
        """Return a difference of the first output that differs. None if all are equal."""
        for split_output, whole_output in zip(split.outputs, whole.outputs, strict=True):
            expected = self._expected_part(whole_output.tensor, split_output.tensor)
            scale = _largest(expected)
            difference = _largest_difference(split_output.tensor, expected)
            if difference > _tolerance(split) * scale:
                text = (
                    f"{split_output.name} differs by {difference:.2g} from that of the model "
                    f"before the split, whose largest value is {scale:.2g}"
                )
                return _Difference(text, split_output.lines, _REMEDIES_OF_OUTPUTS)
        return None

    def _expected_part(self, whole: Tensor, split: Tensor) -> Tensor:
        """Return the part of a whole output that a split output has to equal.

        The outputs of some styles are split in one dimension on purpose. Otherwise the part is the
        whole output.
        """
        if split.dim() == whole.dim() and split.shape != whole.shape:
            for dim, length in enumerate(split.shape):
                if length * self._communicator.size == whole.shape[dim]:
                    return whole.chunk(self._communicator.size, dim)[self._communicator.rank]
        return whole


def _is_plain_and_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is neither a DTensor nor sparse. Only such tensors are compared."""
    return not is_dtensor(tensor) and tensor.layout is torch.strided


def _restore_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Give a module exactly these attributes again."""
    vars(module).clear()
    vars(module).update(attributes)


def _restore_buffer(buffer: Tensor, version: int, values: Tensor) -> None:
    """Write values to a buffer if it was changed since it had the given in-place version."""
    if in_place_version(buffer) != version:
        with torch.no_grad():
            buffer.copy_(values)


# -- regions ------------------------------------------------------------------------------------


def _find_regions(
    root: nn.Module,
    whole: nn.Module,
    lines: Mapping[nn.Module, str],
    whole_outputs: set[nn.Module],
    *,
    not_compared: set[nn.Module],
    uncalled: Collection[str],
) -> list[_Region]:
    """Return the regions of a model, inner before outer.

    A region is the smallest module around a colwise layer that has a rowwise layer, too. A module
    with hooks of the user is left out, since they could do anything. So is a module around FSDP
    modules that have regions inside: its parameters would take much memory.

    Args:
        root: the model.
        whole: its copy from before the split.
        lines: the line of the plan for each split layer.
        whole_outputs: the colwise layers whose output has the columns of all ranks.
        not_compared: modules that are left out, with all modules inside.
        uncalled: the names of modules that are never called, and so are no regions.
    """
    modules = dict(root.named_modules())
    # The paths of the colwise and of the rowwise layers.
    layers = _find_split_layers(modules, whole_outputs)
    not_regions = {*uncalled, *_paths_of_containers(modules)}
    # For each module that may be a region, the colwise layers for which it is the smallest module.
    colwise_by_path = smallest_modules_around(layers.colwise, layers.rowwise, not_regions)
    # Inner modules before outer modules.
    paths = sorted(colwise_by_path, key=_depth, reverse=True)
    # The innermost of these modules around each rowwise layer.
    path_of_rowwise = _first_modules_around(layers.rowwise, paths)
    # For each region, the lines of the plan for its layers. A rowwise layer counts for the
    # innermost module only.
    lines_by_path: dict[str, list[str]] = {}
    for path in paths:
        rowwise = [layer for layer in layers.rowwise if path_of_rowwise.get(layer) == path]
        # If inner modules have all the rowwise layers, the output of the colwise layers is taken to
        # be whole, and the module is no region.
        if rowwise:
            layers_of_module = [*colwise_by_path[path], *rowwise]
            lines_by_path[path] = _lines_of_layers(layers_of_module, modules, lines)
    # The modules of the regions, and the modules around them.
    modules_with_regions: set[nn.Module] = set()
    for path in lines_by_path:
        modules_with_regions.update(_modules_around(path, modules))
    regions: list[_Region] = []
    for path in lines_by_path:
        # The user may name the module itself, or a module around it.
        is_left_out = not not_compared.isdisjoint(_modules_around(path, modules))
        region = _Region(path, modules[path], whole.get_submodule(path))
        if is_left_out or not _is_comparable(region, modules_with_regions):
            continue
        for layer in layers.rowwise:
            if path in ancestors(layer):
                name = layer.removeprefix(path).removeprefix(".")
                region.rowwise_layers.append(name)
                region.lines[name] = lines_by_path[path_of_rowwise[layer]]
        regions.append(region)
    return regions


def _paths_of_containers(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the paths of the modules that only contain others, and are never called."""
    paths: list[str] = []
    for path, module in modules.items():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            paths.append(path)
    return paths


def _modules_around(path: str, modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the module at a path, and the modules around it.

    Args:
        path: the path of the module.
        modules: the modules of the model by name.
    """
    return [modules[outer_path] for outer_path in (path, *ancestors(path))]


def _is_comparable(region: _Region, modules_with_regions: set[nn.Module]) -> bool:
    """Return whether a region has no hooks of the user, and no regions inside of FSDP modules.

    Args:
        region: a module with split layers, which may be compared with its copy.
        modules_with_regions: the modules of all regions, and the modules around them.
    """
    # All hooks of the copy from before the split are the user's.
    has_user_hooks = any(map(user_hooks, region.whole.modules()))
    fsdp_modules = _inner_fsdp_modules(region.module)
    return not has_user_hooks and modules_with_regions.isdisjoint(fsdp_modules)


def _lines_of_layers(
    layers: Sequence[str], modules: Mapping[str, nn.Module], lines: Mapping[nn.Module, str]
) -> list[str]:
    """Return the lines of the plan for layers, each line once.

    Args:
        layers: the names of the layers.
        modules: the modules of the model by name.
        lines: the line of the plan for each layer. Layers that ``parallelize_fn`` splits have none.
    """
    distinct_lines: dict[str, None] = {}  # the keys are an ordered set
    for layer in layers:
        line = lines.get(modules[layer], f"{layer} of parallelize_fn")
        distinct_lines[line] = None
    return list(distinct_lines)


def _first_modules_around(layers: Sequence[str], paths: Sequence[str]) -> dict[str, str]:
    """Return for each layer the first of ``paths`` that is the path of a module around the layer.

    A layer without such a module is left out.
    """
    path_of_layer: dict[str, str] = {}
    for path in paths:
        for layer in layers:
            if path in ancestors(layer):
                path_of_layer.setdefault(layer, path)
    return path_of_layer


class _SplitLayers(NamedTuple):
    """The paths of the layers of a model that are split, in the order of the model."""

    colwise: list[str]
    rowwise: list[str]


def _find_split_layers(
    modules: Mapping[str, nn.Module], whole_outputs: set[nn.Module]
) -> _SplitLayers:
    """Return the paths of the split layers of a model, without the layers in ``whole_outputs``.

    Args:
        modules: the modules of the model, by path.
        whole_outputs: the colwise layers whose output has the columns of all ranks.
    """
    layers = _SplitLayers(colwise=[], rowwise=[])
    for path, module in modules.items():
        direction = direction_of_split(module)
        if direction == "rowwise":
            layers.rowwise.append(path)
        elif direction == "colwise" and module not in whole_outputs:
            layers.colwise.append(path)
    return layers


def _inner_fsdp_modules(module: nn.Module) -> list[nn.Module]:
    """Return the FSDP modules inside of a module, without the module itself."""
    return [inner for inner in module.modules() if is_fsdp_module(inner) and inner is not module]


def _unchanged(tensor: Tensor) -> Tensor:
    """Return a tensor as it is. As a hook for saved tensors, it replaces the hooks further out."""
    return tensor


def _depth(path: str) -> int:
    """Return how many modules are around a module."""
    return len(ancestors(path))


# -- computations -------------------------------------------------------------------------------


def _compute_both(
    region: _Region, generators: Sequence[torch.Generator], args: Any, kwargs: Any
) -> _Computations:
    """Compute a region as it is split, and as it was before the split.

    Collective among the ranks of a layer. The caller restores the random states and the attributes
    of both modules, which this function changes.
    """
    states = [generator.get_state() for generator in generators]
    forward = vars(region.module).get("forward")
    if isinstance(forward, MethodType) and forward.__self__ is region.module:
        # A method is bound in place of forward() for this pass, such as training_step(). The copy
        # has to run the same function.
        vars(region.whole)["forward"] = MethodType(forward.__func__, region.whole)
    split = _compute_split(region, args, kwargs)
    whole = _compute_whole(region, args, kwargs)
    # If the split computation has drawn random numbers, the whole one has drawn other numbers. The
    # caller then compares nothing.
    new_states = [generator.get_state() for generator in generators]
    is_random = not all(map(torch.equal, states, new_states))
    return _Computations(split, whole, is_random)


def _compute_gradients(
    split: _Computation, whole: _Computation
) -> list[tuple[_Quantity, _Quantity]]:
    """Return each gradient of the split region with the same gradient of the whole region.

    Collective among the ranks of a layer.

    Returns:
        The pairs (split, whole). Both computations list the same parameters and inputs in the same
        order. An empty list if the split region returned a part of the result, for which the
        gradients would differ.
    """
    split_shapes = [tensor.shape for tensor in split.result]
    whole_shapes = [tensor.shape for tensor in whole.result]
    if split_shapes != whole_shapes or not all(map(_is_plain_and_dense, split.result)):
        return []
    return list(zip(split.gradients(), whole.gradients(), strict=True))


def _compute_split(region: _Region, args: Any, kwargs: Any) -> _Computation:
    """Compute a region, which is a module with split layers, as it is split.

    Gradients are computed of the parameters that are not split, and of the inputs. The caller
    restores the attributes of the modules, which this function changes.
    """
    (new_args, new_kwargs), inputs = _copy_arguments(region, (args, kwargs))
    # So that the backward pass of this computation does not call the hooks of the running pass.
    _detach_replicated_parameters(region)
    gradient_inputs: list[_Quantity] = []
    for slot in _slots_with_gradient(region):
        tensor = _tensor_in_use(slot)
        gradient_inputs.append(_parameter_quantity(region, slot.parameter, tensor))
    with _recorded_outputs(region, region.module) as outputs:
        # Not region.module(...), which would run the hooks of the module. One of these hooks runs
        # this comparison.
        result = region.module.forward(*new_args, **new_kwargs)
    return _build_computation(region, result, outputs, [*gradient_inputs, *inputs])


def _compute_whole(region: _Region, args: Any, kwargs: Any) -> _Computation:
    """Compute a region, a module with split layers, as before the split, with full parameters.

    Collective among the ranks of a layer. Also records in ``region.has_zero_weights`` whether all
    rowwise weights are zero. The comparison then proves nothing, and later passes repeat it.
    """
    (new_args, new_kwargs), inputs = _copy_arguments(region, (args, kwargs))
    full_parameters: dict[nn.Parameter, Tensor] = {}
    for parameter in region.module.parameters():
        full_parameters[parameter] = full_tensor(parameter.detach())
    # The parameters and buffers to compute with, by name. A shared parameter has several names.
    tensors: dict[str, Tensor] = {}
    for name, parameter in region.module.named_parameters(remove_duplicate=False):
        tensors[name] = full_parameters[parameter]
    for name, buffer in region.module.named_buffers():
        tensors[name] = buffer.detach().clone()
    gradient_inputs: list[_Quantity] = []
    for slot in _slots_with_gradient(region):
        # In place, so that the tensor in `tensors` requires a gradient, too.
        full_parameter = full_parameters[slot.parameter].requires_grad_()
        gradient_inputs.append(_parameter_quantity(region, slot.parameter, full_parameter))
    weights = [tensors[f"{name}.weight"] for name in region.rowwise_layers]
    region.has_zero_weights = not any(weight.any() for weight in weights)
    with _recorded_outputs(region, region.whole) as outputs:
        result = functional_call(region.whole, tensors, new_args, new_kwargs)
    return _build_computation(region, result, outputs, [*gradient_inputs, *inputs])


def _slots_with_gradient(region: _Region) -> Iterator[ParameterSlot]:
    """Yield the slots of the parameters whose gradients are compared.

    A *slot* is a name under which a module holds a parameter. Both computations of a region go
    through these slots, so that their gradients are in the same order. A split parameter is a
    DTensor, and is left out.
    """
    for slot in parameter_slots(region.module):
        tensor = _tensor_in_use(slot)
        if tensor.requires_grad and _is_plain_and_dense(tensor):
            yield slot


def _detach_replicated_parameters(region: _Region) -> None:
    """Have a region compute with leaves in place of its replicated parameters.

    During a forward pass, an attribute with a plain tensor hides each replicated parameter. A hook
    of the plain tensor removes these attributes from all modules of the model at the end of a
    backward pass. Without leaves, the backward pass of the comparison would call the hook, in the
    middle of the forward pass. The plain tensors are put back at the end of the comparison.
    """
    leaves: dict[nn.Parameter, Tensor] = {}
    for slot in parameter_slots(region.module):
        attributes = vars(slot.module)
        plain = attributes.get(slot.name)
        if plain is None:
            continue
        if slot.parameter not in leaves:
            leaves[slot.parameter] = plain.detach().requires_grad_(plain.requires_grad)
        attributes[slot.name] = leaves[slot.parameter]


def _tensor_in_use(slot: ParameterSlot) -> Tensor:
    """Return the tensor that a module computes with for a parameter.

    During a forward pass, an attribute with a plain tensor hides a replicated parameter.
    """
    return vars(slot.module).get(slot.name, slot.parameter)


def _parameter_quantity(region: _Region, parameter: nn.Parameter, tensor: Tensor) -> _Quantity:
    """Return the tensor of a parameter of a region, with the name of the parameter."""
    for name, candidate in region.module.named_parameters():
        if candidate is parameter:
            return _Quantity(region.describe(name), tensor, region.all_plan_lines)
    raise AssertionError("the parameter is in the region")


def _copy_arguments(region: _Region, arguments: Any) -> tuple[Any, list[_Quantity]]:
    """Return a copy of arguments, which a computation may change, and the gradient inputs.

    The gradient inputs are the tensors of which gradients are computed. The copies depend on them.
    """
    leaves, structure = flatten(arguments)
    inputs: list[_Quantity] = []
    copies: list[Any] = []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, _IMMUTABLE_TYPES):
            copies.append(leaf)
            continue
        if not isinstance(leaf, Tensor):
            copies.append(deepcopy(leaf))
            continue
        gradient_input = leaf.detach().clone()
        if leaf.requires_grad and torch.is_grad_enabled():
            gradient_input.requires_grad_()
            name = f"input {number} of {region.path or 'the model'}"
            inputs.append(_Quantity(name, gradient_input, region.all_plan_lines))
        # A clone is not a leaf of the graph, and so the module may change it in place.
        copies.append(gradient_input.clone())
    return unflatten(structure, copies), inputs


@contextmanager
def _recorded_outputs(region: _Region, module: nn.Module) -> Iterator[list[_Quantity]]:
    """Record the outputs of the rowwise layers in ``module`` during the block.

    Args:
        region: a module with split layers, and its copy from before the split.
        module: one of these two, whose layers are called in the block.

    Yields:
        A list, which each call of a layer in the block extends by the output.
    """
    outputs: list[_Quantity] = []

    def record(name: str, layer: nn.Module, args: Any, output: Any) -> None:
        """Append the output of the rowwise layer called ``name``. A forward hook of the layer."""
        text = f"the output of {region.describe(name)}"
        outputs.append(_Quantity(text, output.detach(), region.lines[name]))

    with ExitStack() as stack:
        for name in region.rowwise_layers:
            layer = module.get_submodule(name)
            handle = layer.register_forward_hook(partial(record, name))
            stack.callback(handle.remove)
        yield outputs


def _build_computation(
    region: _Region, result: Any, outputs: list[_Quantity], gradient_inputs: list[_Quantity]
) -> _Computation:
    """Return the computation of a region that has this result.

    Args:
        region: the module with split layers, for the texts of errors.
        result: the output of the module or of its copy from before the split.
        outputs: the outputs of the rowwise layers. The tensors of the result are appended.
        gradient_inputs: the unsplit parameters and the inputs that require a gradient.
    """
    tensors: list[Tensor] = []
    result_leaves, _ = flatten(result)
    for leaf in result_leaves:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            tensors.append(leaf)
            text = f"the output of {region.path or 'the model'}"
            outputs.append(_Quantity(text, leaf.detach(), region.all_plan_lines))
    return _Computation(outputs=outputs, gradient_inputs=gradient_inputs, result=tensors)


# -- differences --------------------------------------------------------------------------------


def _tolerance(computation: _Computation) -> float:
    """Return how much a value may differ by rounding, as a fraction of the largest value."""
    device_type = computation.outputs[0].tensor.device.type
    has_16_bits = torch.is_autocast_enabled(device_type)
    for output in computation.outputs:
        if output.tensor.element_size() == 2:
            has_16_bits = True
    if has_16_bits:
        return _TOLERANCE_OF_16_BITS
    if device_type != "cpu" and torch.get_float32_matmul_precision() != "highest":
        return _TOLERANCE_OF_FAST_MATMUL
    return _TOLERANCE


def _compare_gradients(
    pairs: list[tuple[_Quantity, _Quantity]], tolerance: float
) -> _Difference | None:
    """Return a difference of the first gradient that differs. None if all are equal.

    Differences are measured by the largest value of all gradients. The largest value of a single
    gradient would be too small a measure for a gradient that should be zero and consists of
    rounding errors, such as that of the key bias in attention.

    Args:
        pairs: the result of :func:`_compute_gradients`.
        tolerance: the largest allowed difference, as a fraction of the scale.
    """
    scale = max((_largest(gradient.tensor) for _, gradient in pairs), default=0.0)
    for split_gradient, whole_gradient in pairs:
        difference = _largest_difference(split_gradient.tensor, whole_gradient.tensor)
        if difference > tolerance * scale:
            text = (
                f"{split_gradient.name} differs by {difference:.2g} from that of the model before "
                f"the split, whose largest value is {_largest(whole_gradient.tensor):.2g}: it is "
                "that of one part only, or counts a part several times"
            )
            return _Difference(text, split_gradient.lines, _REMEDIES_OF_GRADIENTS)
    return None


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor, and 0 if it has no elements."""
    if not tensor.numel():
        return 0.0
    return tensor.detach().abs().max().item()


def _largest_difference(split: Tensor, whole: Tensor) -> float:
    """Return the largest absolute difference of two tensors.

    Returns 0 if they cannot be compared, because their shapes differ, or because ``whole`` has NaN
    or infinity.
    """
    split = full_tensor(split)
    if split.shape != whole.shape or not whole.isfinite().all():
        return 0.0
    return _largest(split - whole)

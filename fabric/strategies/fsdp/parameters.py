"""The parameters of a sharded model, and what stands in their place in forward passes."""

from functools import partial
from operator import is_
from typing import Any

from torch import Tensor, nn

from fabric._torch import (
    fsdp_parameter_records,
    gathered_parameters,
    in_place_version,
    is_parameter_of_record,
)
from fabric.errors import UsageError
from fabric.strategies.fsdp.state import ParameterSlot, parameter_slots, shard_module_state

__all__ = ["ShardedParameters"]


class ShardedParameters:
    """The parameters of a sharded model, each of which is a shard or a replicated DTensor.

    A *slot* is a name under which a module holds a parameter. While FSDP2 has gathered parameters,
    the slots hold the gathered ones. A *record* is FSDP2's own object of a sharded parameter.

    Args:
        root: the user's module, which is sharded already, or an FSDP module in it.
        rank: the rank of this process, for errors.
        path: the name of an FSDP module in the model. Empty for the model.
    """

    def __init__(self, root: nn.Module, rank: int, path: str = "") -> None:
        """List the slots. Called right after sharding, while no slot holds a gathered parameter."""
        self._root = root
        self._rank = rank
        self._path = path
        self._slots = list(parameter_slots(root))
        # The fields of the slots, in the order of the slots. The checks of every forward pass go
        # over these lists with map() and functions in C, which is faster than a Python loop.
        self._parameters = [slot.parameter for slot in self._slots]
        self._parameter_dicts = [slot.parameters_of_module for slot in self._slots]
        self._names = [slot.name for slot in self._slots]
        # FSDP2's record of each sharded parameter, by the id of the parameter. FSDP2 may put
        # another sharded parameter into a record later. The key stays the id of the first one,
        # which is the parameter of a slot.
        self._records: dict[int, Any] = {}
        for record in fsdp_parameter_records(root):
            self._records[id(record.sharded_param)] = record
        # The parameters that forward passes have gathered so far.
        self._gathered: list[Tensor] = []
        # The sum of the in-place versions of the parameters at the last call of have_changed().
        self._sum_of_versions = 0

    def register_load_hooks(self) -> None:
        """Register hooks with which ``load_state_dict`` of the model accepts full tensors.

        The hook of a module replaces the full tensors of the module's parameters in the state dict
        by this rank's shards. The hooks are never removed.
        """
        shards_by_module: dict[nn.Module, dict[str, nn.Parameter]] = {}
        for slot in self._slots:
            shards_by_module.setdefault(slot.module, {})[slot.name] = slot.parameter
        for module, shards in shards_by_module.items():
            module.register_load_state_dict_pre_hook(partial(shard_module_state, shards))

    def have_changed(self) -> bool:
        """Return whether a parameter was changed in place since the last call.

        Optimizers and loading change parameters in place. torch counts these changes in the
        in-place version of each parameter, which never decreases.
        """
        sum_of_versions = sum(map(in_place_version, self._parameters))
        if sum_of_versions == self._sum_of_versions:
            return False
        self._sum_of_versions = sum_of_versions
        return True

    def are_gathered(self) -> bool:
        """Return whether some slot now holds something else than the sharded parameter.

        Usually that is the gathered parameter.
        """
        for slot in self._slots:
            if slot.parameters_of_module[slot.name] is not slot.parameter:
                return True
        return False

    def check_registered(self) -> None:
        """Check that the slots hold the sharded parameters, or what FSDP2 has gathered from them.

        Raises:
            UsageError: a slot holds another tensor. FSDP2 would compute with the sharded parameter,
                or would take the tensor for a shard.
        """
        # The usual case: every slot holds its sharded parameter.
        registered = map(dict.get, self._parameter_dicts, self._names)
        if all(map(is_, registered, self._parameters)):
            return
        substituted = self._substituted_slots()
        if not substituted:
            # The other slots hold gathered parameters, or stand-ins for replicated parameters.
            return
        is_inner_module = self._path != ""
        if is_inner_module:
            # A forward method of the model has called the inner FSDP module.
            remedy = (
                "auto_wrap_policy={Model} of the strategy, with the class whose forward makes the "
                "call, so that all parameters are gathered there"
            )
        else:
            remedy = (
                "functional_call(copy, fabric.broadcast(fabric.get_state_dict(model)), ...), where "
                "copy is a copy.deepcopy of the module from before setup"
            )
        raise UsageError(
            f"{self._path or 'model'}(...) on rank {self._rank}",
            problem="other tensors stand in for sharded parameters, as in "
            "torch.func.functional_call, and FSDP would not use them: "
            f"{', '.join(self._qualified_names(substituted))}",
            expected="the parameters that setup() has sharded",
            suggestion=f'strategy="ddp"; or {remedy}',
        )

    def check_gathered_unchanged(self) -> None:
        """Check that no gathered parameter has been changed in place. Called after forward passes.

        Raises:
            UsageError: a gathered parameter has been changed. FSDP2 would drop the change.
        """
        if len(self._gathered) < len(self._records):
            # The list grows until forward passes have reached all modules.
            self._gathered = gathered_parameters(self._records.values())
        # The version of a gathered parameter stays 0 when FSDP2 itself writes to it.
        if not any(map(in_place_version, self._gathered)):
            return
        changed: list[ParameterSlot] = []
        for slot in self._slots:
            record = self._records.get(id(slot.parameter))
            if record is not None and any(map(in_place_version, gathered_parameters([record]))):
                changed.append(slot)
        raise UsageError(
            f"model(...) on rank {self._rank}",
            problem="these parameters were changed in place within a forward pass, or between it "
            "and its backward pass. FSDP has gathered them there, and drops the change: "
            f"{', '.join(self._qualified_names(changed))}",
            expected="changes of parameters after the step, as by an optimizer",
            suggestion="optimizer.step(), and then with torch.no_grad(): weight.mul_(...); a "
            "buffer in place of a parameter that forward() changes",
        )

    def _substituted_slots(self) -> list[ParameterSlot]:
        """Return the slots that hold neither a sharded parameter nor its gathered parameter.

        A *slot* is a name under which a module holds a parameter.
        """
        substituted: list[ParameterSlot] = []
        for slot in self._slots:
            registered = slot.parameters_of_module.get(slot.name)
            if registered is slot.parameter:
                continue
            # FSDP2's own object of the sharded parameter, which knows the gathered parameter.
            record = self._records.get(id(slot.parameter))
            # A parameter without a record is replicated. A plain tensor may stand in for it.
            if record is not None and not is_parameter_of_record(registered, record):
                substituted.append(slot)
        return substituted

    def _qualified_names(self, slots: list[ParameterSlot]) -> list[str]:
        """Return the names of slots in the whole model, such as ``"blocks.0.up.weight"``."""
        path_of_module = {module: path for path, module in self._root.named_modules()}
        names: list[str] = []
        for slot in slots:
            # The path to the root, the path below it and the name. The paths may be empty.
            parts = (self._path, path_of_module.get(slot.module, ""), slot.name)
            names.append(".".join(filter(None, parts)))
        return names

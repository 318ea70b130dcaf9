"""Recording the build of a module on the meta device, with the right random values to come.

[Note: Recorder] Two of torch's modes work together. The dispatch mode sees each ATen operation: it runs it on meta
tensors and writes it on the tape. Code that asks which device a tensor is on would take another path there than on the
CPU (several functions of ``torch.nn.init`` return at once on meta tensors), so the function mode, which sees Python's
calls, answers that a recorded tensor is on the CPU. Random operations run at once as well, on memory that is dropped:
generators advance as in the whole build, and code between the build and the use of its values draws what it would.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fabric._torch import DispatchMode, operator_schema, tensor_property
from fabric.deferred.base import BUILT_WHOLE, Evaluation, Litter, Operation, Outside, Slot, Tape
from fabric.errors import UsageError
from fabric.tree import flatten, map_tensors, unflatten

__all__ = ["Recorder"]

_CPU, _META = torch.device("cpu"), torch.device("meta")
# Properties reach the function mode as the accessors of their descriptors.
_ON_CPU: dict[Callable[..., Any], Any] = {
    tensor_property("device").__get__: _CPU,
    tensor_property("is_meta").__get__: False,
    tensor_property("is_cpu").__get__: True,
}
_SET_DATA = tensor_property("data").__set__
# They hand out memory, or the identity of it, through which values could be read or changed unseen.
_READ_VALUES: frozenset[Callable[..., Any]] = frozenset(
    {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.__reduce_ex__}
)
_NEED_MEMORY = _READ_VALUES | {Tensor.data_ptr, Tensor.share_memory_, Tensor.storage, Tensor.untyped_storage}
_SMALL = 2**16  # bytes
_NO_MEMORY = "its values do not exist while the module is built: they are computed afterwards, a few at a time"
_BUILT_OUTSIDE = "the module built outside of fabric.init_module(), which takes memory for all of it on every rank"
_DATA_DEPENDENT = torch.Tag.data_dependent_output


class Recorder:
    """Writes on a tape what happens to tensors while :meth:`recording` is entered.

    Args:
        outline: whether values are to come from elsewhere: larger real tensors are not kept, those that are registered
            in a module are replaced by meta tensors, and what reads values gets a copy of what can be computed.

    Attributes:
        tape: what was recorded.
        active: whether operations are being recorded right now.
    """

    def __init__(self, outline: bool = False) -> None:
        self.tape = Tape()
        self._outline = outline
        self._twins = WeakTensorKeyDictionary()
        self.active = False
        self._evaluation = Evaluation(self.tape)
        self._litter = Litter()
        self._names: dict[int, str] = {}
        self._registered: list[weakref.ref[Tensor]] = []
        self._versions: dict[Slot, set[int]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what happens within this context, and refuse nothing but what needs memory."""
        with ExitStack() as stack:
            for register in (register_module_parameter_registration_hook, register_module_buffer_registration_hook):
                # A hook may return what is to be registered, which the stub leaves out.
                stack.callback(register(self._on_registration).remove)  # pyright: ignore[reportArgumentType]
            stack.enter_context(_Functions(self))
            # Entered later, so that the functions above see the device that it fills in.
            stack.enter_context(_CPU)
            stack.enter_context(_Operations(self))
            self.active = True
            try:
                yield
            finally:
                self.active = False
                self._evaluation = Evaluation(self.tape)
                self._note_versions()

    def changed_since(self, tensor: Tensor) -> bool:
        """Whether a registered tensor was written to after the context was left, which nothing recorded."""
        slot = self.tape.slot(tensor)
        return slot in self._versions and tensor._version not in self._versions[slot]

    def on_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call from Python of a function of torch, or of a property of a tensor."""
        if self.active and kwargs.get("device") is not None:
            kwargs["device"] = _true_device(kwargs["device"], kwargs.get("out"))
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if not self.active or first is None or is_lazy(first):
            return function(*args, **kwargs)
        with self.paused():
            slot = self.tape.slot(first)
            if function == Tensor.to:
                args, kwargs = self._moved(args, kwargs)
            elif slot is not None:
                if function in _ON_CPU:
                    return _ON_CPU[function]
                if function == Tensor.cpu:
                    return first
                if function == Tensor.tolist or (function in _READ_VALUES and self._outline):
                    return function(*self._values([slot]), *args[1:], **kwargs)
                if function in _NEED_MEMORY:
                    raise self._refusal(function.__name__, slot, reads=function in _READ_VALUES)
                if function == Tensor.new_tensor:
                    kwargs.setdefault("device", _CPU)
                elif function == _SET_DATA and self.tape.slot(args[1]) is None:
                    args = (first, self._lift(args[1]))
        return function(*args, **kwargs)

    def on_operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an ATen operation: on the tape where it concerns recorded tensors, for real elsewhere."""
        leaves, structure = flatten((args, {name: value for name, value in kwargs.items() if name != "pin_memory"}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        recorded = [tensor for tensor in tensors if self.tape.slot(tensor) is not None]
        if not recorded and not _creates(function, tensors, kwargs):
            result = function(*args, **kwargs)
            return self._lift(result.clone()) if function is torch.ops.aten.lift_fresh.default else result
        if function.overloadpacket is torch.ops.aten.set_ and len(tensors) == len(recorded):
            # It changes in which storage a tensor lies, which is read off the tensor whenever it is used.
            return function(*args, **kwargs)
        written = _written(function, args, kwargs)
        outside = [tensor for tensor in written if self.tape.slot(tensor) is None]
        if outside or _DATA_DEPENDENT in function.tags:
            if len(outside) < len(written):
                raise self._refusal(str(function), self.tape.slot(recorded[0]))
            return self._for_real(function, leaves, structure)
        return self._record(function, leaves, structure, written)

    def _record(self, function: Any, leaves: list[Any], structure: Any, written: list[Tensor]) -> Any:
        given = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
        generator, state = given or torch.default_generator, None
        if torch.Tag.nondeterministic_seeded in function.tags:
            state = generator.get_state()
            self._advance(function, leaves, structure, written)
        encoded = [self._encoded(leaf) for leaf in leaves]
        inputs = {leaf.storage for leaf in encoded if isinstance(leaf, Slot)}
        changed = {slot.storage for slot in map(self.tape.slot, written) if slot is not None}
        result = self._on_meta(function, leaves, structure)
        new = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
        outputs = [self.tape.admit(self._strided(leaf, function)) for leaf in new]
        made = {slot.storage for slot in outputs} - inputs
        if made or changed:
            entry = Operation(
                function,
                encoded,
                _hollow(structure, len(leaves)),
                outputs,
                frozenset(inputs | made),
                torch.get_default_dtype(),
                state,
                own_generator=given is not None,
            )
            self.tape.append(entry, made | changed)
        return result

    def _on_meta(self, function: Any, leaves: list[Any], structure: Any) -> Any:
        args, kwargs = unflatten(structure, [self._meta(leaf) for leaf in leaves])
        try:
            return function(*args, **kwargs)
        except NotImplementedError:
            # There is no meta kernel, often because the shape of the result depends on values: those are computed.
            result = self._on_values(function, leaves, structure)
            return map_tensors(lambda value: _twin(self._strided(value, function)), result)

    def _meta(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return None
        if isinstance(leaf, torch.device):
            return _META
        return _twin(leaf) if isinstance(leaf, Tensor) and self.tape.slot(leaf) is None else leaf

    def _advance(self, function: Any, leaves: list[Any], structure: Any, written: list[Tensor]) -> None:
        """Draw what this operation draws, so that the generator moves on; the values are dropped."""
        # What it overwrites, and what gives no more than a shape, may hold anything; the rest can decide how much is
        # drawn.
        shapes = leaves if operator_schema(function).name.endswith("_like") else written
        blank = [
            _twin(leaf, _CPU) if isinstance(leaf, Tensor) and any(leaf is other for other in shapes) else leaf
            for leaf in leaves
        ]
        drawn = self._on_values(function, blank, structure)
        self._litter.add(leaf.nbytes for leaf in flatten(drawn)[0] if isinstance(leaf, Tensor))

    def _for_real(self, function: Any, leaves: list[Any], structure: Any) -> Any:
        """Run on values now: what gives a number or changes a real tensor. New tensors are recorded as constants."""
        result = self._on_values(function, leaves, structure)
        return map_tensors(lambda new: new if any(new is leaf for leaf in leaves) else self._lift(new), result)

    def _on_values(self, function: Any, leaves: list[Any], structure: Any) -> Any:
        positions, slots = [], []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and (slot := self.tape.slot(leaf)) is not None:
                positions.append(position)
                slots.append(slot)
        values = dict(zip(positions, self._values(slots), strict=True))
        real = [values.get(position, _on_cpu(leaf)) for position, leaf in enumerate(leaves)]
        args, kwargs = unflatten(structure, real)
        return function(*args, **kwargs)

    def _values(self, slots: list[Slot]) -> list[Tensor]:
        # Cloned: the memory is kept for the next question, and must not change under it.
        return [value.clone() for value in self._evaluation.run(slots, resume=True)] if slots else []

    def _lift(self, tensor: Tensor) -> Tensor:
        """A meta tensor that stands for a copy of this real one, which the tape refers to."""
        twin = _twin(tensor)
        slot = self.tape.admit(twin)
        clone, structure, made = torch.ops.aten.clone.default, flatten(((None,), {}))[1], frozenset({slot.storage})
        source = [self._outside(tensor)]
        self.tape.append(Operation(clone, source, structure, [slot], made, torch.get_default_dtype()), made)
        return twin

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of ``Tensor.to`` as they have to read for a tensor that is on the CPU only by our word."""
        tensor, other = args[0], kwargs.get("other", args[1] if len(args) > 1 else None)
        recorded = self.tape.slot(tensor) is not None
        if isinstance(other, Tensor):
            kwargs = {name: value for name, value in kwargs.items() if name != "other"}
            device = _CPU if self.tape.slot(other) is not None else other.device
            args, kwargs = (tensor, *args[2:]), {**kwargs, "device": device, "dtype": other.dtype}
        if recorded:
            args = tuple(_META if _is_cpu(value) else value for value in args)
            kwargs = {name: _META if _is_cpu(value) else value for name, value in kwargs.items()}
        return args, kwargs

    def _encoded(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None if isinstance(leaf, torch.Generator) else _on_cpu(leaf)
        if not leaf.is_meta:
            return self._outside(leaf)
        if slot := self.tape.slot(leaf):
            return slot
        raise UsageError(
            f"a meta tensor of shape {tuple(leaf.shape)} as a source of values",
            "it was made outside the deferred() context, so it has none",
            "tensors made inside the context, and real ones",
            "make it inside the context",
        )

    def _outside(self, tensor: Tensor) -> Outside:
        return Outside.of(tensor, weakly=self._outline and tensor.nbytes > _SMALL)

    def _strided(self, tensor: Tensor, function: Any) -> Tensor:
        if tensor.layout is torch.strided:
            return tensor
        raise self._refusal(f"{function} gives a tensor of layout {tensor.layout}", None)

    def _on_registration(self, module: nn.Module, name: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if is_lazy(tensor):
            kind = type(module).__name__
            raise UsageError(
                f"{kind}.{name}, a lazy parameter, in a module that is built without memory",
                "it has no shape before the first forward pass, so there is nothing to record or to shard",
                "modules that are told their sizes",
                f"{kind.removeprefix('Lazy')}(...) with all of its sizes, in place of {kind}(...)",
            )
        with self.paused():
            replacement = self._twin_of(tensor) if self._outline and not tensor.is_meta else None
            registered = tensor if replacement is None else replacement
            slot = self.tape.slot(registered)
        if slot is not None:
            self._names[slot.storage] = f"{type(module).__name__}.{name}"
            self._registered.append(weakref.ref(registered))
        return replacement

    def _twin_of(self, tensor: Tensor) -> Tensor:
        """The meta tensor that is registered in place of a real one, under whatever names."""
        if tensor not in self._twins:
            twin = self._lift(tensor.detach())
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            vars(twin).update(vars(tensor))
            self._twins[tensor] = twin
        return self._twins[tensor]

    def _note_versions(self) -> None:
        for reference in self._registered:
            tensor = reference()
            if tensor is not None and (slot := self.tape.slot(tensor)) is not None:
                self._versions.setdefault(slot, set()).add(tensor._version)
        # Weak references to a tensor keep torch from exchanging it for another in place.
        self._registered.clear()

    def _refusal(self, what: str, slot: Slot | None, reads: bool = False) -> UsageError:
        reached = set() if slot is None else self.tape.reached_from({slot.storage})
        names = sorted({self._names[storage] for storage in reached if storage in self._names})
        # The tensor's own name says most; else those of the parameters that it was computed from.
        own = self._names.get(slot.storage) if slot is not None else None
        whose = own or ", ".join(names) or ("a new tensor" if slot is None else f"a tensor of shape {tuple(slot.size)}")
        return UsageError(
            f"{what} of {whose}, while the module is built without memory",
            _NO_MEMORY,
            "operations that give tensors, and single numbers read with .item(), .tolist() or in a condition",
            BUILT_WHOLE if reads and not self._outline else _BUILT_OUTSIDE,
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing and answer nothing within this context: for the recorder's own work."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before


class _Functions(TorchFunctionMode):
    """Shows the recorder the calls that Python makes."""

    def __init__(self, recorder: Recorder) -> None:
        TorchFunctionMode.__init__(self)
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._recorder.on_call(func, args, dict(kwargs or {}))


class _Operations(DispatchMode):
    """Shows the recorder the operations that reach torch's kernels."""

    def __init__(self, recorder: Recorder) -> None:
        DispatchMode.__init__(self)
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        recorder, kwargs = self._recorder, dict(kwargs or {})
        if not recorder.active:
            return func(*args, **kwargs)
        with recorder.paused():
            return recorder.on_operation(func, args, kwargs)


def _hollow(structure: Any, leaves: int) -> Any:
    """The same structure without a reference to the tensors that it was made of."""
    return flatten(unflatten(structure, [None] * leaves))[1]


def _creates(function: Any, tensors: list[Tensor], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation makes a tensor from nothing, on the CPU; meta is where C++ makes one like a recorded one."""
    device = kwargs.get("device")
    takes_device = any(argument.name == "device" for argument in operator_schema(function).arguments)
    return not tensors and takes_device and (device is None or device.type in ("cpu", "meta"))


def _written(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that an operation writes into."""
    written: list[Any] = []
    for position, argument in enumerate(operator_schema(function).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[position] if position < len(args) else kwargs.get(argument.name))
    if function is torch.ops.aten.native_batch_norm.default and args[5]:
        # Its declaration does not say that it updates the running statistics.
        written += args[3:5]
    return [leaf for leaf in flatten(written)[0] if isinstance(leaf, Tensor)]


def _twin(tensor: Tensor, device: torch.device = _META) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _on_cpu(leaf: Any) -> Any:
    return _CPU if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf


def _true_device(device: Any, out: Any) -> torch.device:
    """Where to make a tensor: as said, but on meta only into an output that is there, since values would be lost."""
    if isinstance(out, Tensor):
        return out.device
    # A tensor from numbers that is made on meta never shows them to the dispatch mode.
    chosen = torch.device(device)
    return _CPU if chosen.type == "meta" else chosen


def _is_cpu(value: Any) -> bool:
    return isinstance(value, (str, torch.device)) and torch.device(value).type == "cpu"

"""Pickling of a call for the ranks, and of its result for the launching process."""

import copyreg
import ctypes
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import CodeType, FunctionType, MethodType
from typing import Any, BinaryIO, ClassVar, NamedTuple

from fabric.errors import ArgumentTypeError, MissingDependencyError

__all__ = ["Call", "PickledCall", "dump_call", "dump_result", "has_cloudpickle", "load"]


# A function that returns what a pickler stores for an object.
_Reducer = Callable[[Any], Any]


class Call(NamedTuple):
    """A function with the arguments that each rank passes to it."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def bind(self) -> Callable[[], Any]:
        """Return the function with its arguments bound."""
        return partial(self.fn, *self.args, **self.kwargs)


class PickledCall(NamedTuple):
    """A pickled call.

    Attributes:
        data: the bytes, for :func:`load`.
        needs_main: whether ``__main__`` has to be imported before the bytes are loaded.
    """

    data: bytes
    needs_main: bool


# [Note: The file of tensors]
# A large pickle is slow: pickling a tensor copies its memory three times, and each rank gets the
# bytes through a pipe of its own, 64 KiB at a time. So the memory of tensors on the CPU is written
# to a file, which on Linux is in memory (see `private_file.py`), and the pickle contains the path
# of the file and a position in it. The pickle can be loaded by any process of the same user until
# the file is closed. It is loaded into memory of its own: a change of a received tensor changes no
# other process.
def dump_call(
    call: Call, *, main_is_importable: bool, by_name: bool = True, tensor_file: str | None = None
) -> PickledCall:
    """Pickle a call once, for all ranks.

    Functions and classes of importable modules and of a script are pickled by name. The ranks
    import the script, as with the standard library's ``multiprocessing``. Closures, lambdas and
    definitions of a notebook are pickled by value if ``cloudpickle`` is installed.

    Args:
        call: the function and its arguments.
        main_is_importable: whether a rank could import ``__main__``.
        by_name: whether to try the standard library's ``pickle`` first, which pickles functions and
            classes by name. Default: True.
        tensor_file: the path of a file for the memory of the tensors, which is faster than a
            pickle. None, the default, pickles the tensors, too.

    Raises:
        MissingDependencyError: a function has to be pickled by value and ``cloudpickle`` is not
            installed.
        ArgumentTypeError: a part of the call cannot be pickled. The text names the part.
    """
    if by_name:
        data_or_error = _try_dump(partial(_dump_by_name, tensor_file=tensor_file), call)
        if isinstance(data_or_error, bytes):
            # pickle stores the name of the module of every function and class. If the bytes do not
            # contain "__main__", loading them does not need this module.
            needs_main = b"__main__" in data_or_error
            if main_is_importable or not needs_main:
                return PickledCall(data_or_error, needs_main)
    # Either the user's definitions cannot be pickled by name, or the ranks could not import them.
    if not has_cloudpickle():
        # _call_error() pickles the parts one by one, to name the part that fails.
        raise _call_error(call, has_tried_cloudpickle=False)
    data_or_error = _try_dump(partial(_dump_by_value, tensor_file=tensor_file), call)
    if isinstance(data_or_error, bytes):
        return PickledCall(data_or_error, needs_main=False)
    raise _call_error(call, has_tried_cloudpickle=True)


def _call_error(
    call: Call, *, has_tried_cloudpickle: bool
) -> MissingDependencyError | ArgumentTypeError:
    """Return the error for a call that cannot be sent to the ranks.

    Args:
        call: the function and its arguments.
        has_tried_cloudpickle: whether ``cloudpickle`` is installed and has failed. If false,
            ``pickle`` has failed, or has pickled a name that a rank could not import.
    """
    function_name = getattr(call.fn, "__qualname__", call.fn)
    call_text = f"launch({function_name}, ...)"
    dump = _dump_by_value if has_tried_cloudpickle else pickle.dumps
    unpicklable = _find_unpicklable(call, dump)
    # Without an error, the call can be pickled by name. So a rank could not import the name.
    has_unimportable_name = unpicklable.error is None
    # cloudpickle pickles the code of a definition. Other objects it pickles as pickle does.
    is_definition = isinstance(unpicklable.value, FunctionType | MethodType | type)
    needs_cloudpickle = has_unimportable_name or is_definition
    if needs_cloudpickle and not has_tried_cloudpickle:
        return MissingDependencyError(
            call_text,
            problem="it is defined where another process cannot import it, and cloudpickle is not "
            "installed",
            suggestion='pip install cloudpickle, or "torch-fabric[notebook]" or '
            '"torch-fabric[testing]", which include it',
        )
    path = unpicklable.path.lstrip(".") or "the call"
    return ArgumentTypeError(
        call_text,
        problem=f"{path} is {unpicklable.description}",
        suggestion='build the object inside the function; or strategy="ddp_fork", or '
        'launcher="fork" with any strategy, whose ranks inherit the objects of this process',
    )


# See [Note: The file of tensors].
def dump_result(value: Any, tensor_file: str | None = None) -> bytes:
    """Pickle the result of a rank, with tensors detached, on the CPU, without shared memory.

    Args:
        value: the result.
        tensor_file: the path of a file for the memory of the tensors, which is faster than a
            pickle. None, the default, pickles the tensors, too.

    Raises:
        ArgumentTypeError: a part of the result cannot be pickled, or is a tensor of which this rank
            has only a shard. The text names the part.
    """
    data_or_error = _try_dump(partial(_dump_detached, tensor_file=tensor_file), value)
    if isinstance(data_or_error, bytes):
        return data_or_error
    # Without a file: a file changes where tensors are stored, and not which values can be pickled.
    unpicklable = _find_unpicklable(value, _dump_detached)
    suggestion = "return the values that you need; or None, or launch(..., return_result=False)"
    if isinstance(data_or_error, _ShardError):
        suggestion = (
            "return fabric.get_state_dict(model) for the weights of a model, or "
            "tensor.full_tensor() for a tensor, called on every rank; or fabric.save(path, ...)"
        )
    raise ArgumentTypeError(
        "what the function returned in a rank has to reach the launching process",
        problem=f"result{unpicklable.path} is {unpicklable.description}",
        expected="numbers, texts, tensors, state dicts, and collections of them",
        suggestion=suggestion,
    ) from data_or_error


def load(data: bytes) -> Any:
    """Unpickle the output of :func:`dump_call` or :func:`dump_result`."""
    # Unpickling is safe here: the bytes come from the parent or a child of this process, through a
    # pipe between the two.
    return pickle.loads(data)  # noqa: S301


def has_cloudpickle() -> bool:
    """Return whether functions can be pickled by value."""
    # This import takes 30 ms, and only processes that start ranks need it.
    from lightning_utilities.core.imports import RequirementCache

    return bool(RequirementCache("cloudpickle>=3.0"))


def _try_dump(dump: Callable[[Any], bytes], value: Any) -> bytes | Exception:
    """Return ``dump(value)``, or the error if the value cannot be pickled."""
    try:
        return dump(value)
    except Exception as error:  # noqa: BLE001 (a __reduce__ may raise anything; it is reported)
        return error


class _Unpicklable(NamedTuple):
    """A part of a call or result that cannot be pickled, for an error text.

    Attributes:
        path: where the part is in the whole, such as ``".args[0]"``. Empty for the whole itself.
        value: the part.
        error: the error of pickling the part. None if the whole can be pickled.
        variable: if the part is a function, the variable that cannot be pickled, such as ``"lock,
            used by train"``. None if no variable is known.
    """

    path: str
    value: Any
    error: Exception | None
    variable: str | None = None

    @property
    def description(self) -> str:
        """The type and the error, to follow the name of the value in a sentence."""
        text = f"a {type(self.value).__qualname__}, which cannot be pickled: {self.error}"
        if self.variable is not None:
            text += f" ({self.variable})"
        return text


def _find_unpicklable(value: Any, dump: Callable[[Any], bytes]) -> _Unpicklable:
    """Return the first leaf of a collection that ``dump`` cannot pickle, for an error text.

    If ``dump`` can pickle each leaf, return the whole collection. Its error is None if ``dump`` can
    pickle the collection, too.
    """
    from fabric.tree import flatten, leaf_paths  # imports torch, without which a rank starts faster

    leaves, structure = flatten(value)
    for path, leaf in zip(leaf_paths(structure), leaves, strict=True):
        outcome = _try_dump(dump, leaf)
        if isinstance(outcome, Exception):
            variable = _find_unpicklable_variable(leaf, dump)
            return _Unpicklable(path, value=leaf, error=outcome, variable=variable)
    outcome = _try_dump(dump, value)
    error = outcome if isinstance(outcome, Exception) else None
    return _Unpicklable(path="", value=value, error=error)


def _find_unpicklable_variable(value: Any, dump: Callable[[Any], bytes]) -> str | None:
    """Return the variable that makes it impossible to pickle a user's function by value.

    The variables of the functions that the user's function calls are searched, too.

    Args:
        value: the user's function or method. For any other object the result is None.
        dump: pickles an object by value. It has failed for ``value``.

    Returns:
        The variable and the function that uses the variable, for example ``"lock, used by train"``.
        None if each variable can be pickled by itself.
    """
    function = getattr(value, "__func__", value)  # a method has its function in this attribute
    if not isinstance(function, FunctionType):
        return None
    functions = [function]  # grows while the loop runs over it
    for searched_function in functions:
        for name, variable in _variables_of(searched_function).items():
            if not isinstance(_try_dump(dump, variable), Exception):
                continue
            if not isinstance(variable, FunctionType):
                return f"{name}, used by {searched_function.__name__}"
            # The variable is a function that cannot be pickled. Its own variables tell why.
            if variable not in functions:
                functions.append(variable)
    return None


def _variables_of(function: FunctionType) -> dict[str, Any]:
    """Return the global variables and the variables of enclosing functions that a function uses."""
    variables: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # A cell is empty if the enclosing function has not assigned the variable yet.
        with suppress(ValueError):
            variables[name] = cell.cell_contents
    codes = [function.__code__]  # grows while the loop runs over it
    for code in codes:
        for name in code.co_names:
            if name in function.__globals__:
                variables[name] = function.__globals__[name]
        # The code of lambdas, comprehensions and inner functions is among the constants.
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                codes.append(constant)
    return variables


def _dump_by_name(value: Any, tensor_file: str | None) -> bytes:
    """Pickle a value with the standard library's ``pickle``."""
    return _dump_with(pickle.Pickler, value, {}, tensor_file)


def _dump_detached(value: Any, tensor_file: str | None = None) -> bytes:
    """Pickle a value with detached copies of its tensors.

    If the standard library's ``pickle`` fails, as for closures, ``cloudpickle`` is used if it is
    installed.
    """
    reducers = _tensor_reducers()
    try:
        return _dump_with(pickle.Pickler, value, reducers, tensor_file)
    except Exception:  # a user's __reduce__ may raise any error
        if not has_cloudpickle():
            raise
        return _dump_by_value(value, reducers, tensor_file)


def _dump_by_value(
    value: Any,
    reducers: Mapping[type, _Reducer] | None = None,
    tensor_file: str | None = None,
) -> bytes:
    """Pickle a value with ``cloudpickle``, and keep the file names of its functions.

    ``cloudpickle`` 3.1.3 and later leaves out the file names of functions that are pickled by
    value. Without them, a traceback of a rank does not show the lines of a notebook cell.

    Args:
        value: the value.
        reducers: more reducers, see :func:`_dump_with`. Default: none.
        tensor_file: the path of a file for the tensors, see :func:`_dump_with`.
    """
    pickler_type = import_module("cloudpickle").Pickler  # an optional dependency
    reduce_code = partial(_reduce_code, pickler_type.dispatch_table[CodeType])
    all_reducers = {CodeType: reduce_code, **(reducers or {})}
    return _dump_with(pickler_type, value, all_reducers, tensor_file)


def _dump_with(
    pickler_type: Any, value: Any, reducers: dict[type, _Reducer], tensor_file: str | None
) -> bytes:
    """Pickle a value with a pickler class.

    Args:
        pickler_type: the ``Pickler`` of ``pickle`` or of ``cloudpickle``.
        value: the value.
        reducers: functions that return what is stored for an object, by the type of the object.
            They replace the pickler's own functions for these types.
        tensor_file: the path of a file for the memory of the tensors. Its content is replaced. None
            pickles the tensors, too.
    """
    torch = sys.modules.get("torch")
    if tensor_file is None or torch is None:  # without torch, the value has no tensors
        return _dump_with_reducers(pickler_type, value, reducers)
    with open(tensor_file, "wb") as file:
        # Every tensor pickles its storage as an object of this type.
        write_storage = partial(_write_storage, file, tensor_file)
        all_reducers = {torch.TypedStorage: write_storage, **reducers}
        return _dump_with_reducers(pickler_type, value, all_reducers)


def _dump_with_reducers(pickler_type: Any, value: Any, reducers: dict[type, _Reducer]) -> bytes:
    """Pickle a value with a pickler class, and ``reducers`` in addition to those of the class.

    See :func:`_dump_with` for the arguments.
    """

    class Pickler(pickler_type):
        # Set on a class, since the constructor reads the attribute, and ignores one that is set on
        # the object later. The ChainMap looks into `reducers` first.
        dispatch_table: ClassVar = ChainMap(reducers, _reducers_of(pickler_type))

    buffer = io.BytesIO()
    Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _reducers_of(pickler_type: Any) -> Any:
    """Return the reducers of a pickler class, by the type of the objects that they reduce."""
    # Read from an object, because the class pickle.Pickler has a descriptor of this name.
    pickler = pickler_type(io.BytesIO())
    return getattr(pickler, "dispatch_table", copyreg.dispatch_table)


def _write_storage(file: BinaryIO, path: str, storage: Any) -> Any:
    """Write the storage of a tensor to a file, and return what a pickler stores instead of it.

    The pickler calls this function for each storage, and stores the returned function with its
    arguments. Unpickling then calls ``_read_storage(path, position, size, dtype)``. A storage that
    is not on the CPU is pickled as usual.

    Args:
        file: the open file.
        path: the path by which other processes open the file.
        storage: the ``torch.TypedStorage``.
    """
    from fabric._torch import untyped_storage  # imports torch, without which a rank starts faster

    untyped = untyped_storage(storage)
    if untyped.device.type != "cpu":
        return storage.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    position = file.tell()
    file.write(_memory_of(untyped))
    return _read_storage, (path, position, untyped.nbytes(), storage.dtype)


def _read_storage(path: str, position: int, size: int, dtype: Any) -> Any:
    """Return a copy of the storage that ``_write_storage`` has written. Unpickling calls it.

    Args:
        path: the path of the file.
        position: where the storage begins, in bytes.
        size: the size of the storage, in bytes.
        dtype: the dtype of the elements of the storage.
    """
    from torch import UntypedStorage

    from fabric._torch import typed_storage

    untyped = UntypedStorage(size)
    with open(path, "rb") as file:
        file.seek(position)
        file.readinto(_memory_of(untyped))
    return typed_storage(untyped, dtype)


def _memory_of(storage: Any) -> Any:
    """Return the memory of an untyped storage on the CPU as a writable buffer.

    ctypes is used, because torch gives access to the bytes only through NumPy, which is optional.
    """
    size = storage.nbytes()
    if size == 0:
        return bytearray()
    return (ctypes.c_ubyte * size).from_address(storage.data_ptr())


def _reduce_code(default_reducer: _Reducer, code: CodeType) -> Any:
    """Return what a pickler stores for the code of a function, including the name of its file.

    Args:
        default_reducer: the function of ``cloudpickle``, which leaves out the name of the file.
        code: the code.
    """
    # A reducer returns a function and its arguments, which unpickling calls.
    build, arguments = default_reducer(code)
    return _build_code, (code.co_filename, build, arguments)


def _build_code(file_name: str, build: Callable[..., CodeType], arguments: Sequence[Any]) -> Any:
    """Return the code that ``_reduce_code`` has reduced. Unpickling calls this function."""
    return build(*arguments).replace(co_filename=file_name)


def _tensor_reducers() -> dict[type, _Reducer]:
    """Return the functions by which a pickler stores detached copies of tensors, by type."""
    # A value can have tensors only if torch is loaded. A rank without torch does not import torch.
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    reducers: dict[type, _Reducer] = {
        torch.Tensor: _reduce_tensor,
        torch.nn.Parameter: _reduce_tensor,
    }
    # Not imported, which would take a second: without the module there is no DTensor.
    dtensor_module = sys.modules.get("torch.distributed.tensor")
    if dtensor_module is not None:
        reducers[dtensor_module.DTensor] = _reduce_dtensor
    return reducers


def _reduce_tensor(tensor: Any) -> Any:
    """Return what a pickler stores for a tensor: the reduction of a detached copy on the CPU.

    A Parameter stays a Parameter, with its ``requires_grad``. A pickler calls this function in
    place of ``tensor.__reduce_ex__``.
    """
    import torch  # loaded already, as there is a tensor

    detached = tensor.detach().cpu()
    if detached.layout is torch.strided:  # sparse tensors have no storage
        storage_size = detached.untyped_storage().nbytes()
        # A view is cloned. Otherwise the whole storage of its base would be pickled.
        if storage_size != detached.nbytes:
            detached = detached.clone()
    # The pickler calls this function only for the types Tensor and Parameter. detach() turns a
    # Parameter into a plain Tensor.
    is_parameter = type(tensor) is not type(detached)
    if is_parameter:
        detached = type(tensor)(detached, tensor.requires_grad)
    return detached.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


class _ShardError(pickle.PicklingError):
    """An error for a tensor of which this rank has only a part."""


def _reduce_dtensor(tensor: Any) -> Any:
    """Return what a pickler stores for a DTensor: a plain tensor, if this rank has all of it.

    Raises:
        _ShardError: this rank has only a shard, or a part of a sum over ranks. The launching
            process would take the shard for the whole tensor.
    """
    if all(placement.is_replicate() for placement in tensor.placements):
        return _reduce_tensor(tensor.to_local())
    raise _ShardError(
        f"this rank has a part of the tensor of shape {tuple(tensor.shape)}, {tensor.placements}"
    )

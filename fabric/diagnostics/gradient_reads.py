"""The lines of the user's code between a backward pass and a step that use gradients."""

import dis
import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from fabric.communicators.call_site import CallSite, frame_locals, is_user_code, is_user_file

__all__ = ["CodePosition", "code_positions", "find_clipping_function", "find_gradient_read"]

# Functions of torch.nn.utils, also under the names that they had in older releases.
_CLIPPING_FUNCTIONS = {
    *("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"),
    *("clip_grad_norm", "clip_grad_value"),
}
# They read gradients, and change none if the norm is small.
_READING_FUNCTIONS = {*_CLIPPING_FUNCTIONS, "get_total_norm"}
# Methods in place that may be called before gradients are complete as well as after.
_HARMLESS_METHODS = {
    *("zero_", "detach_", "requires_grad_"),
    *("mul_", "div_", "nan_to_num_", "masked_fill_"),
}


class CodePosition(NamedTuple):
    """An instruction in the code of a function.

    Attributes:
        code: the code.
        offset: the offset of the instruction.
    """

    code: CodeType
    offset: int


def code_positions(frame: FrameType | None) -> list[CodePosition]:
    """Return the positions of the calls in the user's code that lead to a frame, outermost first.

    The positions hold no frames, and so keep no variables alive.
    """
    positions: list[CodePosition] = []
    for user_frame in _user_frames(frame):
        # f_lasti is the offset of the instruction that runs now: the call of the next function.
        positions.append(CodePosition(user_frame.f_code, user_frame.f_lasti))
    return positions


def _user_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of the user's code among a frame and its callers, outermost first."""
    frames: list[FrameType] = []
    while frame is not None:
        if is_user_code(frame):
            frames.append(frame)
        frame = frame.f_back
    frames.reverse()
    return frames


class _Segment(NamedTuple):
    """Instructions of code that run between two calls.

    Attributes:
        code: the code.
        instructions: the instructions, in order.
        values_by_name: the values of the names in the code, as far as they are known.
    """

    code: CodeType
    instructions: list[dis.Instruction]
    values_by_name: Mapping[str, Any]


# [Note: Gradient reads]
# torch does not note that `parameter.grad` is read. But Python knows where in its code a function
# calls `fabric.backward`, and where it then calls `step`. The instructions in between, and those of
# the user's functions that are named there, show whether an attribute `grad` is loaded, or a
# function of torch for norms of gradients. Loads that do no harm are left out: a comparison with
# None, clearing, and a mask or a factor in place.
def find_gradient_read(start: Sequence[CodePosition], frame: FrameType | None) -> CallSite | None:
    """Return a line of the user's code that reads a gradient between two calls. None without one.

    The two calls are that of ``fabric.backward`` and that of ``step``, for example.

    Args:
        start: where the user's code made the first call: its :func:`code_positions`.
        frame: the innermost frame of the second call.
    """
    for segment in _segments_between(start, frame):
        for index, instruction in enumerate(segment.instructions):
            name = _name_of_function(instruction, segment.values_by_name)
            if name in _READING_FUNCTIONS or _reads_gradient(segment.instructions, index):
                return CallSite(segment.code.co_filename, _line_of(instruction, segment.code))
    return None


def find_clipping_function(start: Sequence[CodePosition], frame: FrameType | None) -> str | None:
    """Return the function of torch for clipping that is named between two calls. None without one.

    The arguments are those of :func:`find_gradient_read`.
    """
    for segment in _segments_between(start, frame):
        for instruction in segment.instructions:
            name = _name_of_function(instruction, segment.values_by_name)
            if name in _CLIPPING_FUNCTIONS:
                return name
    return None


def _segments_between(start: Sequence[CodePosition], frame: FrameType | None) -> Iterator[_Segment]:
    """Yield the user's code that runs between two calls.

    This is, in the order in which it runs:

    - The rest of the functions that have made only the first call, and have returned since then.
    - The part between the two calls, in the innermost function that makes both.
    - The beginning of the functions that make only the second call, which has not returned.

    Functions that the last two parts name may be called there. Their code is yielded, too.

    Args:
        start: the :func:`code_positions` of the first call.
        frame: the innermost frame of the second call.
    """
    end_frames = _user_frames(frame)
    num_common = _num_common_functions(start, end_frames)
    if num_common == 0:
        return
    # The functions that have made only the first call: what comes after it. Their frames are gone,
    # so the values of their names are not known.
    for position in start[num_common:]:
        offsets = range(position.offset + 1, len(position.code.co_code))
        yield from _segments_in(position.code, offsets, values_by_name={}, follows_functions=False)
    # The innermost function that makes both calls: what is between them.
    common_frame = end_frames[num_common - 1]
    begin = start[num_common - 1].offset + 1
    offsets_of_frames = [(common_frame, range(begin, common_frame.f_lasti))]
    # The functions that make only the second call: what comes before it.
    inner_frames = end_frames[num_common:]
    for inner_frame in inner_frames:
        offsets_of_frames.append((inner_frame, range(inner_frame.f_lasti)))
    inner_code = {inner_frame.f_code for inner_frame in inner_frames}
    for end_frame, offsets in offsets_of_frames:
        values_by_name = {**end_frame.f_globals, **frame_locals(end_frame)}
        for segment in _segments_in(
            end_frame.f_code, offsets, values_by_name, follows_functions=True
        ):
            is_inner_function = segment.code in inner_code and segment.code is not end_frame.f_code
            # The functions on the way to the second call are named here, too. Only their code
            # before the call has run, and a later round of this loop yields it.
            if not is_inner_function:
                yield segment


def _num_common_functions(start: Sequence[CodePosition], end_frames: Sequence[FrameType]) -> int:
    """Return the number of functions that make two calls, themselves or through other functions.

    These functions come first in both lists, which may differ in length.

    Args:
        start: the :func:`code_positions` of the first call.
        end_frames: the frames of the user's code in the second call, outermost first.
    """
    num_common = 0
    for position, end_frame in zip(start, end_frames, strict=False):
        if position.code is not end_frame.f_code:
            break
        num_common += 1
    return num_common


def _segments_in(
    code: CodeType, offsets: range, values_by_name: Mapping[str, Any], *, follows_functions: bool
) -> Iterator[_Segment]:
    """Yield the instructions of code at some offsets, and the comprehensions and functions in them.

    Args:
        code: the code.
        offsets: the offsets of the instructions.
        values_by_name: the values of the names in the code.
        follows_functions: whether to yield the user's functions that the instructions name, too.
    """
    instructions: list[dis.Instruction] = []
    for instruction in dis.get_instructions(code):
        if instruction.offset in offsets:
            instructions.append(instruction)
    yield _Segment(code, instructions, values_by_name)
    for instruction in instructions:
        # A comprehension or an inner function.
        if isinstance(instruction.argval, CodeType):
            inner_code = instruction.argval
            offsets_of_all = range(len(inner_code.co_code))
            yield from _segments_in(
                inner_code, offsets_of_all, values_by_name, follows_functions=False
            )
        function = _named_function(instruction, values_by_name)
        if follows_functions and function is not None:
            code_of_function = function.__code__
            if is_user_file(code_of_function.co_filename):
                yield from _segments_in(
                    code_of_function,
                    range(len(code_of_function.co_code)),
                    function.__globals__,
                    follows_functions=False,
                )


def _reads_gradient(instructions: Sequence[dis.Instruction], index: int) -> bool:
    """Return whether an instruction loads an attribute ``grad``, and not for a harmless use.

    Some uses give the same result before and after gradients are complete: a comparison with None,
    an operator such as ``*=``, and the methods in ``_HARMLESS_METHODS``. The instructions around
    the load show the use.

    Args:
        instructions: the instructions that run between two calls, or in a whole function.
        index: the index of the instruction.
    """
    if not _loads_attribute(instructions[index]) or instructions[index].argval != "grad":
        return False
    # In "parameter.grad *= mask", the object is copied, since the attribute is stored later.
    is_changed_in_place = index > 0 and instructions[index - 1].opname == "COPY"
    # A harmless use takes at least two instructions after the load. With fewer, the instructions
    # end with a call, and the call gets the gradient as an argument.
    if index + 2 >= len(instructions):
        return True
    next_instruction = instructions[index + 1]
    # "parameter.grad.data" is the gradient, too: what follows it shows the use.
    if _loads_attribute(next_instruction) and next_instruction.argval == "data":
        next_instruction = instructions[index + 2]
    # "is None" and "is not None" compile to a jump, or load None to compare with it.
    is_compared_with_none = "NONE" in next_instruction.opname or (
        next_instruction.opname == "LOAD_CONST" and next_instruction.argval is None
    )
    has_harmless_method = (
        _loads_attribute(next_instruction) and next_instruction.argval in _HARMLESS_METHODS
    )
    return not (is_changed_in_place or is_compared_with_none or has_harmless_method)


def _loads_attribute(instruction: dis.Instruction) -> bool:
    return instruction.opname in ("LOAD_ATTR", "LOAD_METHOD")


def _line_of(instruction: dis.Instruction, code: CodeType) -> int:
    """Return the line of an instruction. The first line of the code if it is unknown."""
    if instruction.positions is None or instruction.positions.lineno is None:
        return code.co_firstlineno
    return instruction.positions.lineno


def _name_of_function(
    instruction: dis.Instruction, values_by_name: Mapping[str, Any]
) -> str | None:
    """Return the name that an instruction loads. For a function, the name that it was defined with.

    None if the instruction loads no name.
    """
    function = _named_function(instruction, values_by_name)
    if function is not None:
        return function.__name__
    if instruction.opname.startswith("LOAD_") and isinstance(instruction.argval, str):
        return instruction.argval
    return None


def _named_function(
    instruction: dis.Instruction, values_by_name: Mapping[str, Any]
) -> FunctionType | None:
    """Return the function that an instruction loads by name. None if it loads none.

    In a method, the name may be that of another method of the object.
    """
    if not isinstance(instruction.argval, str) or not instruction.opname.startswith("LOAD_"):
        return None
    if _loads_attribute(instruction):
        value = getattr(type(values_by_name.get("self")), instruction.argval, None)
    else:
        value = values_by_name.get(instruction.argval)
    if not isinstance(value, FunctionType):
        return None
    # Decorators such as torch.no_grad() keep the function that they wrap.
    return inspect.unwrap(value)

"""What ``devices`` means: the value and the number of devices in, indices or a count out, no hardware touched.

========================  ==============================  =============================
value                     devices with an index           a number of processes (CPU)
========================  ==============================  =============================
``2`` or ``"2"``          the first two: 0 and 1          two
``-1`` or ``"-1"``        all of them                     one per core
``"auto"``                all of them                     one
``[0, 2]`` or ``"0,2"``   those with index 0 and 2        an error
``[2]`` or ``"2,"``       the one with index 2            an error
========================  ==============================  =============================
"""

import operator
import re
from collections.abc import Sequence
from typing import Any

from fabric.errors import ArgumentTypeError, ConfigurationError

__all__ = ["parse_count", "parse_indices"]

_VALID_COUNTS = 'a number >= 1, -1 for one process per core, or "auto" for one'
_NUMBER = re.compile(r"-?[0-9]+")


def parse_indices(devices: int | str | Sequence[int], available: int, kind: str) -> tuple[int, ...]:
    """Which of ``available`` numbered devices are meant.

    Args:
        devices: what the user wrote.
        available: how many devices there are.
        kind: name of the accelerator, for the text of errors.

    Returns:
        Distinct indices in ``range(available)``, in the order written, at least one.

    Raises:
        ConfigurationError: more than there are, an index out of range or twice, 0, a negative number other than -1,
            an empty list, or a string that is none of these.
        ArgumentTypeError: not an integer, a string or a sequence of integers (``True`` and ``2.0`` included).
    """
    last = max(0, available - 1)
    valid = f'a number from 1 to {last + 1}, a list of distinct indices from 0 to {last}, -1 or "auto" for all'
    value = _parse(devices, valid)
    if available < 1:
        raise ConfigurationError(
            f"devices={devices!r} of accelerator {kind!r}",
            f"this process sees 0 devices of type {kind!r}",
            f"a machine with such a device, and an installation of torch that was built for {kind!r}",
            'accelerator="cpu"',
        )
    if value == "auto" or value == -1:
        return tuple(range(available))
    if isinstance(value, int):
        few = f"there {_are(available)} of type {kind!r}, fewer than {value}" if value > available else ""
        _refuse(devices, _wrong_count(value) or few, valid, f"devices={available}")
        return tuple(range(value))
    assert not isinstance(value, str)
    _refuse(devices, _wrong_list(value, available, kind), valid, "devices=[0]")
    return value


def parse_count(devices: int | str | Sequence[int], cores: int) -> int:
    """How many processes are meant, on hardware that has no numbered devices.

    Args:
        devices: what the user wrote.
        cores: number of cores that this process may use, the meaning of -1.

    Returns:
        A number >= 1; it may exceed ``cores``.

    Raises:
        ConfigurationError: 0, a negative number other than -1, a list of indices, or a string that is none of these.
        ArgumentTypeError: not an integer, a string or a sequence of integers (``True`` and ``2.0`` included).
    """
    value = _parse(devices, _VALID_COUNTS)
    if value == "auto":
        return 1
    if value == -1:
        return cores
    if isinstance(value, int):
        _refuse(devices, _wrong_count(value), _VALID_COUNTS, "devices=1")
        return value
    wrong = "on the CPU this is a number of processes: cores have no index to choose them by"
    raise ConfigurationError(f"devices={devices!r}", wrong, _VALID_COUNTS, f"devices={max(1, len(value))}")


def _parse(devices: object, valid: str) -> int | str | tuple[int, ...]:
    """Sort the spellings into ``"auto"``, a number and a list of indices, without judging the numbers."""
    if isinstance(devices, str):
        return _parse_text(devices, valid)
    number = _as_integer(devices)
    if number is not None:
        return number
    if isinstance(devices, Sequence) and not isinstance(devices, bytes | bytearray):
        indices = tuple(_as_integer(entry) for entry in devices)
        odd = [entry for entry, index in zip(devices, indices, strict=True) if index is None]
        if not odd:
            return tuple(index for index in indices if index is not None)
        wrong = f"{odd[0]!r} in it is of type {type(odd[0]).__name__}, not an integer"
        raise ArgumentTypeError(f"devices={devices!r}", wrong, valid, 'devices="auto"')
    raise ArgumentTypeError(
        f"devices={devices!r}", f"a {type(devices).__name__} does not name devices", valid, 'devices="auto"'
    )


def _parse_text(text: str, valid: str) -> int | str | tuple[int, ...]:
    if text.strip() == "auto":
        return "auto"
    fields = [field.strip() for field in text.split(",")]
    # "2" is a number of devices; the comma in "2," says that it is a list, as it does in Python.
    if len(fields) > 1 and not fields[-1]:
        fields.pop()
    odd = [field for field in fields if not _NUMBER.fullmatch(field)]
    if odd:
        raise ConfigurationError(f"devices={text!r}", f"{odd[0]!r} is not an integer", valid, 'devices="auto"')
    return tuple(map(int, fields)) if "," in text else int(fields[0])


def _as_integer(value: Any) -> int | None:
    # bool is a subclass of int; devices=True is far more often a slip than a wish for one device.
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _wrong_count(count: int) -> str:
    if count == 0:
        return "a job needs at least one device"
    return "a negative number is understood only as -1" if count < 0 else ""


def _wrong_list(indices: tuple[int, ...], available: int, kind: str) -> str:
    if not indices:
        return "the list is empty: a job needs at least one device"
    outside = [index for index in indices if not 0 <= index < available]
    if outside:
        last = available - 1
        return f"there {_are(available)} of type {kind!r}, with index 0 to {last}: {_listed(outside)} is none of them"
    twice = sorted({index for index in indices if indices.count(index) > 1})
    return f"index {_listed(twice)} is in it more than once" if twice else ""


def _refuse(devices: object, wrong: str, valid: str, instead: str) -> None:
    if wrong:
        raise ConfigurationError(f"devices={devices!r}", wrong, valid, instead)


def _are(available: int) -> str:
    return "is 1 device" if available == 1 else f"are {available} devices"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))

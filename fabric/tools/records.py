"""The files of a fingerprint: what is in them, how they are written and read.

The folder of a fingerprint has a file ``rank-R.jsonl`` for each rank. The first line is the
:class:`Header`. Each further line is an :class:`Entry`, in the order of the computation, or
``{"end": step}`` after the last entry of a step. Fields with their default values are left out.
Lines are written at the end of each step, so that a rank that is killed leaves all its finished
steps. A last line that is incomplete is ignored.

This module does not import torch, so that ``fabric diff`` starts at once.
"""

import json
import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from fabric.errors import ConfigurationError

__all__ = ["Digest", "Entry", "Header", "RankRecord", "file_of_rank", "has_records", "read_rank"]

# The beginning of each line but the first.
_LINE = re.compile(rb'\{"(?P<word>step|end)":(?P<step>\d+)[,}]')


# See [Note: Digests] in digest.py.
class Digest(NamedTuple):
    """The digest of a tensor, or of a shard of a tensor.

    Attributes:
        hash: the hash of the bits, from 0 to 2**64 - 1.
        square: the sum of the squared absolute values.
        sketch: the dot products with some random vectors.
    """

    hash: int
    square: float
    sketch: tuple[float, ...]

    @property
    def norm(self) -> float:
        """The Euclidean norm."""
        return math.sqrt(self.square)


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a rank has recorded, and under which settings.

    Attributes:
        rank: the rank.
        world_size: the number of ranks.
        data_rank: the index of the data-parallel replica. Ranks with the same batch share it.
        data_size: the number of data-parallel replicas.
        every: the steps whose numbers are divisible by it are recorded.
        detail: ``"modules"`` or ``"steps"``.
        settings: by name, the settings of the job and of torch that may change numbers.
    """

    rank: int
    world_size: int
    data_rank: int
    data_size: int
    every: int
    detail: str
    settings: dict[str, str]

    def to_json(self) -> str:
        """Return the first line of a file, which begins with the version of the format."""
        return json.dumps({"fabric_fingerprint": 1, **vars(self)})


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A value at one point of the computation.

    Attributes:
        step: the number of the step.
        kind: what the value is, such as ``"output"``.
        name: the name of the value among those of its kind.
        call_site: the line of the user's code.
        is_synchronized: whether all ranks should have the same value, or shards of the same value.
            Otherwise the value belongs to this rank.
        text: the value, if it is not a tensor.
        digest: the digest of a tensor or of a shard.
        dtype: the dtype of the tensor.
        shape: the shape of the whole tensor.
        shard: where the shard begins in the tensor, and its sizes. Empty for a whole tensor.
        reduction: ``"mean"`` or ``"sum"``: the loss of the whole batch is the mean or the sum of
            the losses of all ranks. Empty for values that are not losses.
        samples: a hash of each sample of a batch.
    """

    step: int
    kind: str
    name: str
    call_site: str = ""
    is_synchronized: bool = False
    text: str = ""
    digest: Digest | None = None
    dtype: str = ""
    shape: list[int] = field(default_factory=list)
    shard: str = ""
    reduction: str = ""
    samples: list[int] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the line of a file, without fields that have their default."""
        values: dict[str, Any] = {}
        for entry_field in fields(self):
            value = getattr(self, entry_field.name)
            # All defaults are false. The step has none, and may be 0.
            if value or entry_field.name == "step":
                values[entry_field.name] = value
        return json.dumps(values, separators=(",", ":"))


@dataclass(frozen=True)
class RankRecord:
    """The file of a rank. Its entries are read step by step, since a file may be large.

    Attributes:
        path: the file.
        header: the first line of the file.
        lines: by number of a step, the offsets in the file of the lines of its entries.
        finished: the numbers of the steps that have ended.
    """

    path: Path
    header: Header
    lines: dict[int, list[int]]
    finished: set[int]

    def read_step(self, step: int) -> list[Entry]:
        """Return the entries of a step in the order of the computation."""
        entries: list[Entry] = []
        with self.path.open("rb") as file:
            for offset in self.lines[step]:
                file.seek(offset)
                entries.append(self._parse(file.readline()))
        return entries

    def _parse(self, line: bytes) -> Entry:
        """Return the entry of a line.

        Raises:
            ConfigurationError: the line is not an entry.
        """
        try:
            values = json.loads(line)
            if "digest" in values:
                hash_of_bits, squared_norm, sketch = values["digest"]
                values["digest"] = Digest(
                    hash=hash_of_bits, square=squared_norm, sketch=tuple(sketch)
                )
            return Entry(**values)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the fingerprint {self.path}", problem=f"the line {line!r} is damaged: {error}"
            ) from error


def file_of_rank(folder: Path, rank: int) -> Path:
    """Return the path of the file of a rank."""
    return folder / f"rank-{rank}.jsonl"


def has_records(folder: Path) -> bool:
    """Return whether a folder has the file of any rank."""
    return any(folder.glob("rank-*.jsonl"))


def read_rank(folder: Path, rank: int) -> RankRecord:
    """Read the header of a rank's file, and find the lines of each step.

    Raises:
        ConfigurationError: there is no such file, or it is damaged.
    """
    path = file_of_rank(folder, rank)
    if not path.exists():
        raise ConfigurationError(
            f"the fingerprint {folder}",
            problem=f"the file of rank {rank} is missing: {path.name}",
            expected="a folder with the files of all ranks, as fabric.fingerprint writes it",
        )
    with path.open("rb") as file:
        record = RankRecord(path, _read_header(path, file.readline()), lines={}, finished=set())
        offset = file.tell()
        for line in file:
            # A rank that was killed may have left a part of a last line.
            if not line.endswith(b"\n"):
                break
            match = _LINE.match(line)
            if match is None:
                raise ConfigurationError(
                    f"the fingerprint {path}", problem=f"the line {line!r} is damaged"
                )
            step = int(match["step"])
            if match["word"] == b"end":
                record.finished.add(step)
            else:
                record.lines.setdefault(step, []).append(offset)
            offset += len(line)
    return record


def _read_header(path: Path, line: bytes) -> Header:
    """Return the header in the first line of a file.

    Raises:
        ConfigurationError: the line is no header, or has another version of the format.
    """
    try:
        values = json.loads(line)
        version = values.pop("fabric_fingerprint")
        if version == 1:
            return Header(**values)
        problem = f"its format is {version}, and this release reads format 1"
    except (AttributeError, KeyError, TypeError, ValueError):
        problem = "it does not begin with the line of a fingerprint"
    raise ConfigurationError(f"the fingerprint {path}", problem=problem)

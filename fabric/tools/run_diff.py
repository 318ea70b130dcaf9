"""The first difference between two runs, from the fingerprints that they have written."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from fabric.errors import ConfigurationError
from fabric.tools.records import Digest, Entry, RankRecord, file_of_rank, read_rank

__all__ = ["RunDiff", "compare_runs"]

# By kind, the words before and after the name of a value.
_WORDS = {
    "random state at the start": ("random state of", "at the start"),
    "parameter at the start": ("parameter", "at the start"),
    "optimizer state at the start": ("optimizer state", "at the start"),
    "buffer at the start": ("buffer", "at the start"),
    "batch": ("", "as the loader handed it out"),
    "random state at the batch": ("random state of", "when the loader handed the batch out"),
    "input": ("input", ""),
    "output": ("output of", ""),
    "loss": ("", ""),
    "loss weight": ("loss", ""),
    "gradient": ("gradient of", "after the backward pass"),
    "option": ("option", ""),
    "gradient at the step": ("gradient of", "at the step, after any clipping"),
    "parameter": ("parameter", "after the step"),
    "optimizer state": ("optimizer state", "after the step"),
    "buffer": ("buffer", "after the step"),
    "random state": ("random state of", "after the step"),
}
_MODULE_KINDS = {"input", "output"}
# All values of such a kind are recorded at one moment. Their order says nothing.
_SIMULTANEOUS_KINDS = {"option", "gradient at the step", "optimizer state", "parameter", "buffer"}
_RANDOM_KINDS = {"random state at the start", "random state at the batch", "random state"}
_BACKWARD_KINDS = {"gradient", "loss", "loss weight"}
# Options that choose an implementation, and only change the rounding.
_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")
# The precision of dtypes. Values of other dtypes are exact.
_PRECISIONS = {
    "float64": 2.0**-52,
    "complex128": 2.0**-52,
    "float32": 2.0**-23,
    "complex64": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}
_ROUNDINGS = 8  # times the precision of a dtype
_SHOWN_STEPS = 3
_SHOWN_INTERVALS = 8


class _Key(NamedTuple):
    """What identifies a value within a step of a rank.

    Attributes:
        kind: the kind of the entry.
        name: the name of the entry.
        occurrence: how many entries of this kind and name the step had before.
    """

    kind: str
    name: str
    occurrence: int

    def __str__(self) -> str:
        """Return the value in the words of the report, such as ``"parameter w after the step"``."""
        before, after = _WORDS[self.kind]
        words = [before, self.name, after]
        if self.occurrence:
            words.append(f"(number {self.occurrence + 1} in the step)")
        return " ".join(filter(None, words))


_Entries = Mapping[_Key, Entry]


@dataclass(frozen=True)
class _Run:
    """A run, as its ranks have recorded it.

    Attributes:
        name: the folder, as the user wrote it.
        records: what each rank has written, by rank.
    """

    name: str
    records: Sequence[RankRecord]

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps that all ranks have recorded, in order."""
        # The keys of `lines` are the numbers of the recorded steps.
        steps = set(self.records[0].lines)
        for record in self.records[1:]:
            steps &= set(record.lines)
        return sorted(steps)

    @property
    def data_size(self) -> int:
        """The number of data-parallel replicas."""
        return self.records[0].header.data_size

    def has_finished(self, step: int) -> bool:
        """Return whether all ranks have recorded a step to its end."""
        return all(step in record.finished for record in self.records)

    def read_step(self, step: int) -> "_Step":
        """Return what all ranks have recorded of a step."""
        entries_by_rank: list[_Entries] = []
        sample_hashes_by_rank: list[list[int]] = []
        for record in self.records:
            entries = record.read_step(step)
            entries_by_rank.append(_index_by_key(entries))
            sample_hashes: list[int] = []
            for entry in entries:
                sample_hashes += entry.samples
            sample_hashes_by_rank.append(sample_hashes)
        # All ranks of a data-parallel replica have the same batches and losses, so the first rank
        # of each replica stands for the replica.
        first_ranks: dict[int, int] = {}
        for rank, record in enumerate(self.records):
            first_ranks.setdefault(record.header.data_rank, rank)
        return _Step(
            number=step,
            entries=entries_by_rank,
            norms=[_norms_of_kinds(entries) for entries in entries_by_rank],
            replica_ranks=list(first_ranks.values()),
            sample_hashes=[sample_hashes_by_rank[rank] for rank in first_ranks.values()],
        )


def _index_by_key(entries: Iterable[Entry]) -> _Entries:
    """Return entries by key, in their order, without the entries that hold hashes of samples."""
    occurrences: Counter[tuple[str, str]] = Counter()
    by_key: dict[_Key, Entry] = {}
    for entry in entries:
        if entry.kind == "samples":
            continue
        occurrence = occurrences[entry.kind, entry.name]
        occurrences[entry.kind, entry.name] += 1
        key = _Key(entry.kind, entry.name, occurrence)
        by_key[key] = entry
    return by_key


def _norms_of_kinds(entries: _Entries) -> dict[str, float]:
    """Return the norm of all tensors of each kind."""
    norms: dict[str, float] = {}
    for key, entry in entries.items():
        norm = 0.0
        if entry.digest is not None:
            norm = entry.digest.norm
        norms[key.kind] = math.hypot(norms.get(key.kind, 0.0), norm)
    return norms


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step of a run.

    Attributes:
        number: the number of the step.
        entries: by rank, the entries by key.
        replica_ranks: the first rank of each data-parallel replica.
        sample_hashes: for each data-parallel replica, the hashes of its samples. Empty lists if the
            loader was not set up.
        norms: by rank and kind, the norm of all tensors of the kind.
    """

    number: int
    entries: Sequence[_Entries]
    norms: Sequence[Mapping[str, float]]
    replica_ranks: Sequence[int]
    sample_hashes: Sequence[Sequence[int]]

    def has_samples(self) -> bool:
        """Return whether the samples of the step are known. False if the loader was not set up."""
        return any(self.sample_hashes)

    def sample_counts(self) -> Counter[int]:
        """Return how often each sample occurs in the batches of all replicas, by its hash."""
        counts: Counter[int] = Counter()
        for hashes_of_replica in self.sample_hashes:
            counts.update(hashes_of_replica)
        return counts

    def num_micro_batches(self) -> int:
        """Return how many batches the first rank has read. 0 if the loader was not set up."""
        # The field `occurrence` numbers the batches of a step from 0.
        numbers = [key.occurrence for key in self.entries[0] if key.kind == "batch"]
        if not numbers:
            return 0
        return max(numbers) + 1

    def has_modules(self) -> bool:
        """Return whether the first rank has inputs or outputs of modules."""
        return any(key.kind in _MODULE_KINDS for key in self.entries[0])

    def batch_dtypes(self) -> set[str]:
        """Return the dtypes of the tensors in the batches."""
        dtypes: set[str] = set()
        for key, entry in self.entries[0].items():
            if key.kind == "batch":
                dtypes.add(entry.dtype)
        return dtypes

    def full_entry(self, key: _Key, rank: int) -> Entry:
        """Return a value of a rank. A shard is replaced by the full tensor.

        The digest of the full tensor is the sum of the digests of its shards.
        """
        entry = self.entries[rank][key]
        if not entry.shard:
            return entry
        # A shard that several ranks have counts once.
        digests_by_shard: dict[str, Digest] = {}
        for entries in self.entries:
            entry_of_rank = entries.get(key)
            if entry_of_rank is not None and entry_of_rank.digest is not None:
                digests_by_shard.setdefault(entry_of_rank.shard, entry_of_rank.digest)
        digest = _sum_of_digests(list(digests_by_shard.values()))
        return replace(entry, digest=digest, shard="")

    def values_of_ranks(self, key: _Key) -> list[Entry]:
        """Return a value as each rank has it, or once if it is sharded or a loss."""
        if key.kind == "loss":
            return [self._full_loss(key)]
        if self.entries[0][key].shard:
            return [self.full_entry(key, rank=0)]
        return [entries[key] for entries in self.entries if key in entries]

    def _full_loss(self, key: _Key) -> Entry:
        """Return the loss of the whole batch, from the losses of all data-parallel replicas."""
        total = 0.0
        for rank in self.replica_ranks:
            digest = self.entries[rank][key].digest
            # A loss on the meta device has no value that could be summed.
            if digest is None:
                return self.entries[rank][key]
            # The loss itself is not recorded. Its norm is its absolute value. The first number of
            # its sketch is the loss times a random number, which is the same in all runs. So the
            # sign of the sketch is the sign of the loss, or the opposite sign in both runs. In the
            # second case both totals are negated, which does not change their comparison.
            total += math.copysign(digest.norm, digest.sketch[0])
        entry = self.entries[0][key]
        if entry.reduction == "mean":
            total /= len(self.replica_ranks)
        # This digest has the form of a digest in a file, but not its hash and sketch. It is
        # compared only with the digest that this method makes of the other run's loss.
        digest = Digest(hash=hash(total), square=total**2, sketch=(total,))
        return replace(entry, digest=digest)


def _sum_of_digests(digests: Sequence[Digest]) -> Digest:
    """Return the digest of a tensor from the digests of its shards."""
    hashes, squares, sketches = zip(*digests, strict=True)
    sketch = tuple(map(math.fsum, zip(*sketches, strict=True)))
    return Digest(hash=sum(hashes) % 2**64, square=math.fsum(squares), sketch=sketch)


@dataclass(frozen=True)
class _Difference:
    """A value that differs between the runs.

    Attributes:
        step: the number of the step.
        position: the place of the value in the order of the computation; see
            :func:`_keys_with_positions`. -1 for the samples, which come first.
        rank: the rank on which the value differs. None if the value belongs to all ranks.
        key: what identifies the value.
        first: the value in the first run. None if the first run lacks it.
        second: the value in the second run. None if the second run lacks it.
    """

    step: int
    position: int
    rank: int | None
    key: _Key
    first: Entry | None
    second: Entry | None


def _sort_key(difference: _Difference) -> tuple[int, bool]:
    """Return the sort key of a difference within its step.

    At one position, a tensor that only one run has comes first, since it explains the other
    differences. For example, a gradient that is None in one run changes the norm by which all
    gradients are clipped.
    """
    first = difference.first
    second = difference.second
    is_tensor_in_both_or_neither = False
    if first is not None and second is not None:
        is_tensor_in_both_or_neither = (first.digest is None) == (second.digest is None)
    return difference.position, is_tensor_in_both_or_neither


@dataclass
class RunDiff:
    """What two runs have in common, and where they differ.

    Attributes:
        is_equal: whether no compared value differs.
        text: the report.
    """

    is_equal: bool
    text: str


# See [Note: Close].
def compare_runs(
    first: str | os.PathLike[str], second: str | os.PathLike[str], close: float | None = None
) -> RunDiff:
    """Compare two runs by their fingerprints.

    Args:
        first: the folder of a fingerprint.
        second: the folder of another one.
        close: the largest distance of two tensors in proportion to their norm. None compares bit by
            bit.

    Raises:
        ConfigurationError: a folder has no complete fingerprint, the runs have no step in common,
            or ``close`` is not positive.
    """
    if close is not None and not close > 0:
        raise ConfigurationError(
            f"fabric diff --close {close:g}", expected="a number above 0, such as 1e-6"
        )
    comparison = _Comparison(_read_run(first), _read_run(second), close)
    comparison.compare()
    return RunDiff(is_equal=comparison.first_difference is None, text=comparison.report())


def _read_run(folder: str | os.PathLike[str]) -> _Run:
    """Read a fingerprint: the records of all ranks of a run.

    Args:
        folder: the folder in which the run has written its fingerprint, a file for each rank.

    Raises:
        ConfigurationError: there is no fingerprint in the folder.
    """
    path = Path(folder)
    if not file_of_rank(path, 0).exists():
        raise ConfigurationError(
            f"the fingerprint {path}",
            problem="there is no such folder, or no fingerprint in it",
            expected='a folder that a run has written: with fabric.fingerprint("runs/a"): ...',
        )
    # The header of rank 0 says how many ranks the run had.
    records = [read_rank(path, 0)]
    for rank in range(1, records[0].header.world_size):
        records.append(read_rank(path, rank))
    return _Run(name=os.fspath(folder), records=records)


# [Note: Layouts]
# Two runs have the same *layout* if they have equally many ranks and data-parallel replicas. Their
# files are then compared rank by rank. Otherwise the runs are compared in what does not depend on
# the layout: parameters, gradients, optimizer states and options, whose shards are added up; the
# samples of all ranks together; and the mean or sum of the losses of all ranks. With `close`, a
# step in which the runs split the same samples into other numbers of micro-batches is compared in
# the same way.
@dataclass
class _Comparison:
    """A comparison of two runs, step by step, value by value.

    The *layout* of a run is its number of ranks and of data-parallel replicas. Runs of different
    layouts are compared only in what does not depend on it.

    Attributes:
        first: a run.
        second: another run.
        close: the tolerance, or None for a comparison of bits.
        first_difference: the first value that differs, in the order of the computation.
        differing_values: by step, the number of values of each kind that differ.
        compared_values: by step and kind, the number of values that were compared.
        notes: what was not compared.
        reordered_steps: the steps in which the runs have the same samples in another order.
        other_sample_steps: the steps in which the runs have other samples.
        excess_samples: by the hash of a sample, how often the first run has it in
            ``other_sample_steps``, minus how often the second run has it.
        steps_without_modules: the steps in which only one of the runs has inputs and outputs of
            modules. They are left out.
        has_other_micro_batches: whether the runs split the same samples of any step into other
            numbers of micro-batches.
    """

    first: _Run
    second: _Run
    close: float | None
    first_difference: _Difference | None = None
    differing_values: dict[int, Counter[str]] = field(default_factory=dict)
    compared_values: Counter[tuple[int, str]] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    reordered_steps: list[int] = field(default_factory=list)
    other_sample_steps: list[int] = field(default_factory=list)
    excess_samples: Counter[int] = field(default_factory=Counter)
    steps_without_modules: list[int] = field(default_factory=list)
    has_other_micro_batches: bool = False

    def compare(self) -> None:
        """Compare all steps that both runs have."""
        for number in self._common_steps():
            first_step = self.first.read_step(number)
            second_step = self.second.read_step(number)
            # This call may add the step to reordered_steps or other_sample_steps. These lists and
            # steps_without_modules decide in _differences_of_step() which values are compared.
            self._compare_samples(first_step, second_step)
            # A run has no inputs and outputs of modules if, for example, its model is compiled.
            if first_step.has_modules() != second_step.has_modules():
                self.steps_without_modules.append(number)
            differences = list(self._differences_of_step(first_step, second_step))
            if not differences:
                continue
            if self.first_difference is None:
                # Differences come rank by rank. The first one in the computation is reported.
                self.first_difference = min(differences, key=_sort_key)
            self.differing_values[number] = Counter(
                difference.key.kind for difference in differences
            )

    def _has_same_layout(self) -> bool:
        """Return whether the runs have equally many ranks and data-parallel replicas."""
        has_same_size = len(self.first.records) == len(self.second.records)
        return has_same_size and self.first.data_size == self.second.data_size

    def _common_steps(self) -> list[int]:
        """Return the steps that both runs have. Add the other steps to :attr:`notes`.

        Raises:
            ConfigurationError: the runs have no step in common.
        """
        first_steps = self.first.steps
        second_steps = self.second.steps
        common_steps = [step for step in first_steps if step in second_steps]
        if not common_steps:
            raise ConfigurationError(
                f"fabric diff {self.first.name} {self.second.name}",
                problem=f"no step is in both: the first has {_describe_steps(first_steps)}, "
                f"the second {_describe_steps(second_steps)}",
                expected="runs that count their steps alike; see first_step= and every= of "
                "fabric.fingerprint",
            )
        for run, steps in ((self.first, first_steps), (self.second, second_steps)):
            missing_steps = [step for step in steps if step not in common_steps]
            if missing_steps:
                self.notes.append(f"{_describe_steps(missing_steps)}, only in {run.name}")
            unfinished = [step for step in common_steps if not run.has_finished(step)]
            if unfinished:
                self.notes.append(
                    f"the end of {_describe_steps(unfinished)}, missing in {run.name}"
                )
        return common_steps

    def _compare_samples(self, first: _Step, second: _Step) -> None:
        """Note a step in which the runs have other samples, or the same ones in another order.

        Nothing is noted if the samples of a run are unknown or cannot be compared.
        """
        if first.sample_hashes == second.sample_hashes:
            return
        # Equal samples of different dtypes have different hashes.
        if first.batch_dtypes() != second.batch_dtypes():
            return
        if not first.has_samples() or not second.has_samples():
            return
        first_counts = first.sample_counts()
        second_counts = second.sample_counts()
        if first_counts != second_counts:
            self.other_sample_steps.append(first.number)
            self.excess_samples.update(first_counts)
            self.excess_samples.subtract(second_counts)
        elif self._has_same_layout():
            # In another layout, the replicas have other shares of a batch, which is no reordering.
            self.reordered_steps.append(first.number)

    def _differences_of_step(self, first: _Step, second: _Step) -> Iterator[_Difference]:
        """Yield the values of a step that differ."""
        has_other_micro_batches = self._differ_in_micro_batches(first, second)
        # For the report, which says so if this is true of any step.
        self.has_other_micro_batches |= has_other_micro_batches
        if has_other_micro_batches or not self._has_same_layout():
            yield from self._differences_across_layouts(first, second)
        else:
            yield from self._differences_by_rank(first, second)

    def _differences_by_rank(self, first: _Step, second: _Step) -> Iterator[_Difference]:
        """Yield the values that differ between the same ranks of both runs."""
        for rank in range(len(first.entries)):
            first_entries = first.entries[rank]
            second_entries = second.entries[rank]
            for position, key in _keys_with_positions(first_entries, second_entries):
                # None where the run has no such value.
                left = first_entries.get(key)
                right = second_entries.get(key)
                if self._is_left_out(first.number, key, left, right):
                    continue
                if left is not None and right is not None and left.shard != right.shard:
                    # The runs shard the tensor in different ways. Only the full tensors compare.
                    left = first.full_entry(key, rank)
                    right = second.full_entry(key, rank)
                self.compared_values[first.number, key.kind] += 1
                # The norm of the first run also serves for the second run: it only sets the scale
                # of rounding errors. It is missing if the first run has no value of the kind.
                norm_of_kind = first.norms[rank].get(key.kind, 0.0)
                if not self._are_close(left, right, norm_of_kind):
                    yield _Difference(
                        first.number, position, rank=rank, key=key, first=left, second=right
                    )

    def _differ_in_micro_batches(self, first: _Step, second: _Step) -> bool:
        """Return whether the runs split the same samples into other numbers of micro-batches.

        Always False for a comparison of bits, in which other micro-batches are a difference. Also
        False if the loader was not set up, since then the samples are unknown.
        """
        if self.close is None or first.num_micro_batches() == second.num_micro_batches():
            return False
        return first.has_samples() and first.sample_counts() == second.sample_counts()

    def _differences_across_layouts(self, first: _Step, second: _Step) -> Iterator[_Difference]:
        """Yield the values that differ among those that do not depend on the layout."""
        step = first.number
        samples_key = _Key("batch", "samples of all ranks", 0)
        self.compared_values[step, samples_key.kind] += 1
        if step in self.other_sample_steps:
            # The position -1 is before all values, which the samples explain.
            yield _Difference(
                step, position=-1, rank=None, key=samples_key, first=None, second=None
            )
        # Rank 0 of each run has every value that does not depend on the layout.
        first_entries = first.entries[0]
        second_entries = second.entries[0]
        dependent_kinds = _kinds_that_depend_on_layout(first_entries, second_entries)
        for position, key in _keys_with_positions(first_entries, second_entries):
            # None where the run has no such value.
            left = first_entries.get(key)
            right = second_entries.get(key)
            # Values that are not synchronized belong to one rank. Losses do, too, but
            # values_of_ranks() combines the losses of all ranks.
            belongs_to_one_rank = key.kind != "loss" and not _is_synchronized(left, right)
            if belongs_to_one_rank or key.kind in dependent_kinds:
                continue
            if self._is_left_out(step, key, left, right):
                continue
            self.compared_values[step, key.kind] += 1
            if left is None or right is None:
                yield _Difference(step, position, rank=None, key=key, first=left, second=right)
                continue
            # One rank is enough for the report of a value.
            pair = self._first_differing_pair(key, first, second)
            if pair is not None:
                yield _Difference(
                    step, position, rank=pair.rank, key=key, first=pair.first, second=pair.second
                )

    def _first_differing_pair(self, key: _Key, first: _Step, second: _Step) -> "_Pair | None":
        """Return a pair of values of the runs that differ. None if the values of all ranks agree.

        Args:
            key: what identifies the value. Rank 0 of both runs has it.
            first: the step of the first run.
            second: the step of the second run.
        """
        norm_of_kind = first.norms[0][key.kind]
        for pair in _pair_values(first.values_of_ranks(key), second.values_of_ranks(key)):
            if not self._are_close(pair.first, pair.second, norm_of_kind):
                return pair
        return None

    def _is_left_out(self, step: int, key: _Key, left: Entry | None, right: Entry | None) -> bool:
        """Return whether a value cannot be compared, or need not agree.

        Args:
            step: the number of the step.
            key: what identifies the value.
            left: the value of the first run. None if the first run lacks it.
            right: the value of the second run. None if the second run lacks it.
        """
        if key.kind in _MODULE_KINDS and step in self.steps_without_modules:
            return True
        # A run that was killed within the step lacks values that it would have recorded.
        first_ended_before = left is None and not self.first.has_finished(step)
        second_ended_before = right is None and not self.second.has_finished(step)
        if first_ended_before or second_ended_before:
            return True
        compares_bits = self.close is None
        if compares_bits:
            return False
        # From here on, values need only agree up to the tolerance.
        if key.kind in _RANDOM_KINDS:
            # Digests of random states can only be equal, not close.
            return True
        if key.kind == "option":
            # A name is, for example, "foreach of group 0 of AdamW". Implementations of an
            # optimizer, such as foreach, differ only in rounding.
            option, _, _ = key.name.partition(" ")
            return option in _IMPLEMENTATIONS
        if _is_synchronized(left, right):
            return False
        # A gradient that is not yet reduced is in the record under DDP. Under FSDP it is not, since
        # torch keeps it in an attribute of its own.
        if key.kind == "gradient" and self._strategies_differ():
            return True
        # With samples in another order, a rank has other values, and only sums over all ranks are
        # close.
        return step in self.reordered_steps

    def _strategies_differ(self) -> bool:
        """Return whether the runs have different strategies."""
        first_settings = self.first.records[0].header.settings
        second_settings = self.second.records[0].header.settings
        return first_settings.get("strategy") != second_settings.get("strategy")

    # [Note: Close]
    # `close` is the largest distance of two tensors, in proportion to their norm. The distance is
    # estimated from the sketches. Rounding errors are not in proportion to the tensor that they
    # change, but to the numbers from which it was computed. So a tensor may also differ by a few
    # times the precision of its dtype, in proportion to the norm of all tensors of its kind in the
    # step.
    def _are_close(self, first: Entry | None, second: Entry | None, norm_of_kind: float) -> bool:
        """Return whether two values are equal or, with a tolerance, close.

        Args:
            first: the value of the first run. None if the first run lacks it.
            second: the value of the second run. None if the second run lacks it.
            norm_of_kind: the norm of all tensors of this kind in the step. Rounding errors are in
                proportion to it.
        """
        if first is None or second is None:
            return False
        if first.digest is None or second.digest is None:
            return self._are_texts_close(first, second)
        if first.shape != second.shape:
            return False
        if self.close is None:
            return first.dtype == second.dtype and first.digest.hash == second.digest.hash
        distance = _estimate_distance(first.digest, second.digest)
        if math.isnan(distance):
            # A tensor has infinite or undefined numbers, which have no distance.
            return first.digest.hash == second.digest.hash
        precision = max(_PRECISIONS.get(first.dtype, 0), _PRECISIONS.get(second.dtype, 0))
        # Rounding errors in proportion to the norm of the kind are allowed, too, up to `close`.
        rounding = min(self.close, _ROUNDINGS * precision) * norm_of_kind
        norm = max(first.digest.norm, second.digest.norm)
        return distance <= max(self.close * norm, rounding)

    def _are_texts_close(self, first: Entry, second: Entry) -> bool:
        """Return whether two values are equal or close. At most one of them is a tensor.

        The ``text`` of a tensor is empty, and the ``digest`` of any other value is None.
        """
        if self.close is None:
            return first.text == second.text and first.digest == second.digest
        if first.text == second.text:
            return True
        # A tensor of zeros is close to None: some strategies set a gradient to None where others
        # set it to zero. No other tensor is close to a text.
        tensor_digest = first.digest or second.digest
        if tensor_digest is not None:
            is_other_none = "None" in (first.text, second.text)
            return tensor_digest.square == 0 and is_other_none
        try:
            numbers = [float(first.text), float(second.text)]
        except ValueError:
            return False
        return math.isclose(*numbers, rel_tol=self.close, abs_tol=0.0)

    def report(self) -> str:
        """Return the report, of several lines."""
        lines = [_describe_run(self.first), _describe_run(self.second)]
        lines += _settings_lines(self.first, self.second)
        lines += self._compared_lines()
        lines += self._sample_lines()
        if self.first_difference is None:
            lines.append("no difference")
            return "\n".join(lines)
        lines.append("")
        lines += self._difference_lines(self.first_difference)
        lines += self._spread_lines()
        return "\n".join(lines)

    def _compared_lines(self) -> list[str]:
        """Return lines about what was compared, and what was not."""
        steps = sorted({step for step, _ in self.compared_values})
        kinds: Counter[str] = Counter()
        for (_, kind), count in self.compared_values.items():
            kinds[kind] += count
        mode = "bit by bit"
        if self.close is not None:
            mode = f"to {self.close:g} of each norm"
        texts: list[str] = []
        for kind, count in kinds.items():
            texts.append(f"{kind} ({count})")
        lines = [f"compared {mode}: {_describe_steps(steps)}, {', '.join(texts)}"]
        notes = list(self.notes)
        if self.steps_without_modules:
            steps_without_modules = _describe_steps(self.steps_without_modules)
            notes.append(
                "inputs and outputs of modules, which only one of the runs has: "
                f"{steps_without_modules}"
            )
        if self.has_other_micro_batches or not self._has_same_layout():
            notes.append(
                "inputs and outputs of modules, buffers and random states, since the runs split "
                "their batches over other numbers of ranks or micro-batches"
            )
        elif self.close is not None:  # the note before names the random states, too
            notes.append("random states, since only numbers can be close")
        lines += [f"not compared: {note}" for note in notes]
        return lines

    def _sample_lines(self) -> list[str]:
        """Return lines about samples in another order, and about other samples."""
        lines: list[str] = []
        if self.reordered_steps:
            lines.append(f"same samples, other order from step {self.reordered_steps[0]}")
        if not self.other_sample_steps:
            return lines
        start = self.other_sample_steps[0]
        # Samples that move from one step to another cancel out in the sum over all steps.
        has_other_samples = any(self.excess_samples.values())
        if has_other_samples:
            lines.append(f"other samples from step {start}")
        else:
            lines.append(f"same samples, other order from step {start}, in other batches")
        return lines

    def _difference_lines(self, difference: _Difference) -> list[str]:
        """Return lines about the first difference."""
        rank_text = ""
        if difference.rank is not None:
            rank_text = f", rank {difference.rank}"
        lines = [f"first difference: step {difference.step}{rank_text}: {difference.key}"]
        for run, entry in ((self.first, difference.first), (self.second, difference.second)):
            if entry is not None:
                lines.append(f"  {run.name}: {_describe_value(entry)}  {entry.call_site}".rstrip())
            # Position -1 stands for the samples of the step, which are no entry.
            elif difference.position >= 0:
                lines.append(f"  {run.name}: does not have it")
        if difference.first is not None and difference.second is not None:
            lines += _distance_lines(difference.first, difference.second)
        lines.append("  everything that was compared before it is equal")
        return lines

    def _spread_lines(self) -> list[str]:
        """Return lines about the differences after the first one."""
        lines = ["then:"]
        for step in list(self.differing_values)[:_SHOWN_STEPS]:
            texts: list[str] = []
            for kind, count in self.differing_values[step].items():
                texts.append(f"{kind} ({count} of {self.compared_values[step, kind]})")
            lines.append(f"  step {step}: {', '.join(texts)}")
        later_steps = list(self.differing_values)[_SHOWN_STEPS:]
        if later_steps:
            lines.append(f"  and {_describe_steps(later_steps)}")
        return lines


def _keys_with_positions(first: _Entries, second: _Entries) -> list[tuple[int, _Key]]:
    """Return the keys of both runs, each with its position in the order of the computation.

    The position is how many values were recorded before in this step of the run. All values of one
    ``optimizer.step()``, such as the parameters, have the position of the first one. A key of both
    runs has the position of the first run.
    """
    positions: dict[_Key, int] = {}
    for entries in (first, second):
        position = 0
        kind_before = ""
        for count, key in enumerate(entries):
            is_at_same_moment = key.kind == kind_before and key.kind in _SIMULTANEOUS_KINDS
            if not is_at_same_moment:
                position = count
            kind_before = key.kind
            positions.setdefault(key, position)
    return [(position, key) for key, position in positions.items()]


def _is_synchronized(first: Entry | None, second: Entry | None) -> bool:
    """Return whether a value is synchronized over the ranks in each run that has the value."""
    entries = [entry for entry in (first, second) if entry is not None]
    return all(entry.is_synchronized for entry in entries)


def _kinds_that_depend_on_layout(first: _Entries, second: _Entries) -> set[str]:
    """Return the kinds whose values depend on the number of ranks or of micro-batches.

    Args:
        first: the entries of a rank of the first run, in one step.
        second: the entries of a rank of the second run, in the same step.
    """
    kinds: set[str] = set()
    # By kind, how many values the first run has more than the second run.
    excess_of_first = Counter(key.kind for key in first)
    excess_of_first.subtract(key.kind for key in second)
    for kind in _BACKWARD_KINDS:
        # The runs have made different numbers of backward passes, so a pass of one run has other
        # samples than the pass with the same number in the other run.
        if excess_of_first[kind] != 0:
            kinds.add(kind)
    has_weights = any(key.kind == "loss weight" for key in (*first, *second))
    if has_weights:
        # After a backward pass, the gradients of a weighted loss have a factor that depends on the
        # number of ranks. Clipping or the step removes it, so "gradient at the step" does compare.
        kinds.add("gradient")
    return kinds


class _Pair(NamedTuple):
    """A value of each run, which should be equal.

    Attributes:
        rank: the rank whose value is checked. None if the value belongs to all ranks.
        first: the value of the first run.
        second: the value of the second run.
    """

    rank: int | None
    first: Entry
    second: Entry


def _pair_values(first: Sequence[Entry], second: Sequence[Entry]) -> Iterator[_Pair]:
    """Yield pairs that are all equal only if all values of both runs are equal.

    The value of each rank is paired with the value of rank 0 of the other run.

    Args:
        first: a value on each rank of the first run, or a single value that belongs to all ranks.
        second: the same for the second run.
    """
    belongs_to_all_ranks = len(second) == 1
    for rank, entry in enumerate(second):
        rank_of_value = None if belongs_to_all_ranks else rank
        yield _Pair(rank_of_value, first=first[0], second=entry)
    # The loop above has compared the value of rank 0.
    for rank, entry in enumerate(first[1:], start=1):
        yield _Pair(rank, first=entry, second=second[0])


def _estimate_distance(first: Digest, second: Digest) -> float:
    """Return an estimate of the distance of two tensors. NaN if it is not finite.

    The distance is at least the difference of the norms. A number of a sketch is the dot product of
    the tensor with a random vector. So the difference of two such numbers is about as large as the
    norm of the difference of the tensors. The estimate is the largest of these differences.
    """
    distances = [abs(first.norm - second.norm)]
    for left, right in zip(first.sketch, second.sketch, strict=True):
        distances.append(abs(left - right))
    if not all(map(math.isfinite, distances)):
        return math.nan
    return max(distances)


def _describe_run(run: _Run) -> str:
    """Return a line about a run."""
    header = run.records[0].header
    strategy = header.settings.get("strategy", "")
    precision = header.settings.get("precision", "")
    ranks_text = f"{header.world_size} rank(s)"
    return f"{run.name}: {_describe_steps(run.steps)}, {ranks_text}, {strategy}, {precision}"


def _settings_lines(first: _Run, second: _Run) -> list[str]:
    """Return a line for each setting that differs between the same ranks of the runs.

    All ranks have most settings in common. So a difference that an earlier rank has, too, is left
    out. The line of a later rank names the rank.
    """
    lines: list[str] = []
    known_differences: set[str] = set()
    # Not strict: the runs may have other numbers of ranks.
    pairs = zip(first.records, second.records, strict=False)
    for rank, (first_record, second_record) in enumerate(pairs):
        first_settings = first_record.header.settings
        second_settings = second_record.header.settings
        for name in first_settings | second_settings:
            first_value = first_settings.get(name, "")
            second_value = second_settings.get(name, "")
            difference = f"{name}: {first_value}, then {second_value}"
            if first_value == second_value or difference in known_differences:
                continue
            known_differences.add(difference)
            place = ""
            if rank > 0:
                place = f" of rank {rank}"
            lines.append(f"other setting{place}: {difference}")
    return lines


def _describe_value(entry: Entry) -> str:
    """Return a text for a value. The text for a tensor is its norm, dtype and shape."""
    if entry.digest is None:
        return entry.text
    shape = "x".join(map(str, entry.shape)) or "scalar"
    return f"norm {entry.digest.norm:.9g}, {entry.dtype} {shape}"


def _distance_lines(first: Entry, second: Entry) -> list[str]:
    """Return a line about how far two values are apart, or no line if they have no distance."""
    if first.is_synchronized != second.is_synchronized:
        return ["  only one of the runs has it synchronized over the ranks"]
    if first.digest is None or second.digest is None or first.shape != second.shape:
        return []
    distance = _estimate_distance(first.digest, second.digest)
    if math.isnan(distance):
        return ["  infinite or undefined numbers have no distance: such tensors compare bit by bit"]
    norm = max(first.digest.norm, second.digest.norm)
    if norm == 0:
        # All elements are zeros. The tensors differ in the dtype, or in the signs of zeros.
        return []
    return [f"  they are about {distance / norm:.1g} of the norm apart"]


def _describe_steps(steps: Sequence[int]) -> str:
    """Return a text for the numbers of steps, in rising order: ``"steps 0 to 4, 8"``."""
    if not steps:
        return "no steps"
    # The first and the last step of each run of consecutive steps.
    intervals: list[list[int]] = []
    for step in steps:
        if intervals and step == intervals[-1][1] + 1:
            intervals[-1][1] = step
        else:
            intervals.append([step, step])
    texts: list[str] = []
    for begin, end in intervals[:_SHOWN_INTERVALS]:
        text = f"{begin} to {end}"
        if begin == end:
            text = str(begin)
        texts.append(text)
    if len(intervals) > _SHOWN_INTERVALS:
        texts.append(f"... {steps[-1]}")
    word = "step" if len(steps) == 1 else "steps"
    return f"{word} {', '.join(texts)}"

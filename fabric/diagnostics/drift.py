"""What the details of replicas that differ say: which ranks agree, and what may have happened."""

from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fabric.diagnostics.recorder import ranks_in_words

__all__ = [
    "Kind",
    "PositionSums",
    "RankDetails",
    "ReplicaDetails",
    "describe_drift",
    "position_sums",
]

# The elements that are converted to int64 at a time, to save memory.
_CHUNK_ELEMENTS = 1 << 20
# The integer type that views the bits of an element, by the bytes of the element. An element of 8
# bytes is two integers, so that an integer times its position fits into 64 bits.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
_MODULUS = 1 << 64

_MISSING = "missing"
_SAVE_BY_RANK = (
    "write: torch.save(optimizer.state_dict(), f'optimizer-{fabric.global_rank}.pt') on each rank, "
    "and leave the optimizer out of fabric.save"
)
# Also in the error of the first steps.
CALL_EVERY_BLOCK = (
    "a call of every block on every rank, such as x + keep * block(x), with keep = 0 on a rank "
    "that leaves the block out"
)


class Kind(IntEnum):
    """The kinds of replicas. If several replicas differ, an error names one of the lowest kind."""

    PASSES = 0  # of models, whose order explains other differences
    PARAMETER = 1
    BUFFER = 2
    STATE = 3  # of an optimizer
    AVERAGE = 4
    OPTION = 5  # of an optimizer
    LOSS_SCALE = 6
    USES = 7  # of blocks and parameters of a sharded model


class PositionSums(NamedTuple):
    """Sums from which a single element that differs is found, as :func:`position_sums` says.

    Attributes:
        total: the sum of the integers.
        first_moment: the sum of the integers, each times its position.
        second_moment: the sum of the integers, each times the square of its position.
        integers_per_element: the number of integers in an element of the tensor.
    """

    total: int
    first_moment: int
    second_moment: int
    integers_per_element: int


class ReplicaDetails(NamedTuple):
    """What a rank sends about a replica that may differ between ranks.

    A *replica* is a tensor or a number that should be equal on several ranks.

    Attributes:
        key: identifies the replica. It is the same on all ranks that hold it.
        name: the name for errors.
        kind: the kind.
        ranks: the ranks that should hold the same value.
        value: a number as text, or the digest of a tensor as text.
        sums: the result of :func:`position_sums`. None if the replica is no tensor.
        gradient: the digest of the gradient of a parameter. None without a gradient.
    """

    key: str
    name: str
    kind: Kind
    ranks: tuple[int, ...]
    value: str
    sums: PositionSums | None = None
    gradient: int | None = None


class RankDetails(NamedTuple):
    """What a rank sends about all of its replicas that may differ between ranks.

    Attributes:
        steps: the number of optimizer steps that the rank has made since the latest comparison.
        has_state: whether any optimizer of the rank has a state.
        replicas: some of the replicas that may differ.
        truncated_kinds: the kinds of which the rank has further replicas that may differ.
    """

    steps: int
    has_state: bool
    replicas: list[ReplicaDetails]
    truncated_kinds: list[Kind]


class _Difference(NamedTuple):
    """A replica that differs between ranks.

    Attributes:
        details: the details of the first rank that holds the replica. All ranks have the same key,
            name, kind and ranks in their details.
        values: the value of each rank as text. For a tensor, its digest. ``"missing"`` for a rank
            that does not hold the replica.
        by_rank: the details of each rank that holds the replica.
    """

    details: ReplicaDetails
    values: dict[int, str]
    by_rank: dict[int, ReplicaDetails]

    @property
    def is_tensor(self) -> bool:
        """Whether the replica is a tensor, and not a number."""
        return self.details.sums is not None

    @property
    def is_missing(self) -> bool:
        """Whether some rank does not hold the replica."""
        return _MISSING in self.values.values()

    @property
    def groups(self) -> list[list[int]]:
        """Groups of ranks that hold the same value, the largest group first."""
        groups = _ranks_by_value(self.values).values()
        return sorted(groups, key=len, reverse=True)


def describe_drift(ranks: Sequence[RankDetails], *, may_shard_states: bool) -> list[str]:
    """Return sentences about the first replica that differs, and what may have happened.

    Args:
        ranks: the details of all ranks.
        may_shard_states: whether an optimizer may keep only a part of its state on each rank. If
            so, states are not reported if every rank lacks the state of some parameter.

    Returns:
        The sentences. Empty if no replica differs.
    """
    differences = _find_differences(ranks)
    if may_shard_states:
        differences = _without_sharded_states(differences, len(ranks))
    if not differences:
        return []
    first = differences[0]
    description = f"{first.details.name} differs: {_describe_groups(first)}"
    return [description, *_explain(ranks, differences)]


def _find_differences(ranks: Sequence[RankDetails]) -> list[_Difference]:
    """Return the replicas that differ, ordered by their kinds."""
    # The shards of a DTensor have the same key, and are not compared with each other. Each shard
    # has its own ranks, so the ranks tell the shards apart.
    replicas: dict[tuple[str, tuple[int, ...]], dict[int, ReplicaDetails]] = {}
    for rank, details_of_rank in enumerate(ranks):
        for details in details_of_rank.replicas:
            replicas.setdefault((details.key, details.ranks), {})[rank] = details
    differences: list[_Difference] = []
    for details_by_rank in replicas.values():
        values = _values_of_ranks(details_by_rank, ranks)
        if len(set(values.values())) > 1:
            first_details = next(iter(details_by_rank.values()))
            differences.append(_Difference(first_details, values, details_by_rank))
    return sorted(differences, key=_kind_of)


def _values_of_ranks(
    details_by_rank: Mapping[int, ReplicaDetails], ranks: Sequence[RankDetails]
) -> dict[int, str]:
    """Return the value of a replica on each rank that should hold it, by rank.

    If a rank does not hold the replica, and this is the state of an optimizer, the value is
    ``"missing"``. Otherwise that rank is left out: the user may have dropped the model of the
    replica, which only that rank has collected as garbage so far.

    Args:
        details_by_rank: the details of the ranks that hold the replica.
        ranks: the details of all ranks.
    """
    details = next(iter(details_by_rank.values()))
    values: dict[int, str] = {}
    for rank in details.ranks:
        # A rank sends only some of its states. If it has left some out, it may hold this one.
        are_states_complete = Kind.STATE not in ranks[rank].truncated_kinds
        if rank in details_by_rank:
            values[rank] = details_by_rank[rank].value
        elif details.kind is Kind.STATE and are_states_complete:
            values[rank] = _MISSING
    return values


def _without_sharded_states(differences: list[_Difference], size: int) -> list[_Difference]:
    """Leave out the differences of states, if each of the ``size`` ranks lacks some state.

    An optimizer that shards its own state leaves each rank without the states of other ranks.
    """
    ranks_without_state: set[int] = set()
    without_states: list[_Difference] = []
    for difference in differences:
        if difference.details.kind is not Kind.STATE:
            without_states.append(difference)
        for rank, value in difference.values.items():
            if value == _MISSING:
                ranks_without_state.add(rank)
    if len(ranks_without_state) == size:
        return without_states
    return differences


def _kind_of(difference: _Difference) -> Kind:
    return difference.details.kind


def _describe_groups(difference: _Difference) -> str:
    """Return which ranks agree, such as ``"ranks 0, 1 agree; rank 2 differs"``.

    For a number, the text has the value of each group of ranks: ``"0.1 on rank 0; 0.2 on rank 1"``.
    """
    groups = difference.groups
    are_all_different = len(groups) == len(difference.values)
    if are_all_different and difference.is_tensor and not difference.is_missing:
        return f"{ranks_in_words(difference.values)} all hold other values"
    texts: list[str] = []
    for group in groups:
        words = ranks_in_words(group)
        value = difference.values[group[0]]
        if value == _MISSING:
            texts.append(f"{words} without it")
        elif not difference.is_tensor:
            texts.append(f"{value} on {words}")
        elif len(group) > 1:
            texts.append(f"{words} agree")
        else:
            texts.append(f"{words} differs")
    return "; ".join(texts)


def _explain(ranks: Sequence[RankDetails], differences: Sequence[_Difference]) -> list[str]:
    """Return sentences about what may have happened, as far as the details show it.

    Different numbers of steps or different options explain different tensors. So the tensors are
    explained only if the steps and options are equal.

    Args:
        ranks: the details of all ranks.
        differences: the replicas that differ. The text before these sentences has described the
            first of them.
    """
    described = differences[0]
    if described.details.kind is Kind.PASSES:
        return [
            "torch's collectives of different models have met, and the models have got the "
            "gradients or weights of each other"
        ]
    steps = {rank: str(details.steps) for rank, details in enumerate(ranks)}
    if len(set(steps.values())) > 1:
        return [f"the number of optimizer steps since then differs: {_describe_values(steps)}"]
    uses = _differences_of_kinds(differences, {Kind.USES})
    if uses:
        # One of them is enough.
        sentences = _describe_others(uses[:1], described)
        sentences.append(
            "the ranks have used different blocks or parameters of a sharded model, and FSDP has "
            f"mixed up their values or gradients (write: {CALL_EVERY_BLOCK})"
        )
        return sentences
    options = _differences_of_kinds(differences, {Kind.OPTION, Kind.LOSS_SCALE})
    if options:
        return _describe_others(options, described)
    explanation = _explain_tensors(differences, has_state=ranks[0].has_state)
    if not explanation:
        return []
    return [explanation]


def _describe_others(differences: Sequence[_Difference], described: _Difference) -> list[str]:
    """Return a sentence for each difference but the one that is described already."""
    sentences: list[str] = []
    for difference in differences:
        if difference is not described:
            values = _describe_values(difference.values)
            sentences.append(f"{difference.details.name} differs: {values}")
    return sentences


def _explain_tensors(differences: Sequence[_Difference], *, has_state: bool) -> str:
    """Return what may have happened to replicas that are tensors. Empty if nothing shows.

    Args:
        differences: the replicas that differ. No options are among them.
        has_state: whether any optimizer has a state.
    """
    parameters = _differences_of_kinds(differences, {Kind.PARAMETER})
    states = _differences_of_kinds(differences, {Kind.STATE})
    if any(difference.is_missing for difference in states):
        return (
            "only some ranks have the state of the optimizer: it was loaded on these ranks alone, "
            f"or the optimizer shards its own state ({_SAVE_BY_RANK})"
        )
    if states and not parameters:
        return (
            "the parameters are equal: the state was changed or loaded on some ranks alone, or the "
            f"optimizer shards its own state ({_SAVE_BY_RANK})"
        )
    if any(_counts_steps(difference) for difference in states):
        # The ranks have made equally many steps since the latest comparison.
        return (
            "the number of steps in the state of the optimizer differs: the state was reset or "
            "loaded on some ranks alone"
        )
    if any(_has_different_gradients(difference) for difference in parameters):
        return (
            "its gradient differs, too: it was not averaged over the ranks, or was changed on some "
            "ranks"
        )
    if states:
        return (
            f"{states[0].details.name} differs, too: the ranks have stepped with different "
            "gradients, which were not averaged, or changed on some ranks, as by another clipping"
        )
    if len(parameters) == 1:
        element = _find_single_element(parameters[0])
        if element is not None:
            return f"only element {element.position} of it differs{element.bit}"
        return "no other parameter differs: it was changed outside of optimizer.step()"
    if parameters and has_state:
        return (
            "the state of the optimizer is equal: the parameters were changed outside of "
            "optimizer.step()"
        )
    return ""


def _differences_of_kinds(
    differences: Sequence[_Difference], kinds: Collection[Kind]
) -> list[_Difference]:
    return [difference for difference in differences if difference.details.kind in kinds]


def _describe_values(values: Mapping[int, str]) -> str:
    """Return each value with its ranks, such as ``0.1 on ranks 0, 2; 0.05 on rank 1``."""
    groups = _ranks_by_value(values)
    texts: list[str] = []
    for value in sorted(groups, key=lambda value: len(groups[value]), reverse=True):
        texts.append(f"{value} on {ranks_in_words(groups[value])}")
    return "; ".join(texts)


def _ranks_by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks that hold each value, from the values by rank."""
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_by_value.setdefault(value, []).append(rank)
    return ranks_by_value


def _counts_steps(difference: _Difference) -> bool:
    """Return whether a replica is the number of steps that an optimizer of torch has counted."""
    return difference.details.name.startswith("step of ")


def _has_different_gradients(difference: _Difference) -> bool:
    """Return whether the gradients of a parameter differ between ranks that have one."""
    gradients: set[int] = set()
    for details in difference.by_rank.values():
        if details.gradient is not None:
            gradients.add(details.gradient)
    return len(gradients) > 1


class _Element(NamedTuple):
    """The only element of a tensor that differs between two groups of ranks.

    Attributes:
        position: its position in the flattened tensor, from 0. Of a DTensor, the part of the rank
            counts.
        bit: text about the only bit that differs. Empty if several bits differ.
    """

    position: int
    bit: str


def _find_single_element(difference: _Difference) -> _Element | None:
    """Return the only element that differs between two groups of ranks. None if there is none.

    If only the integer at position ``p`` differs, by ``d``, the three sums of
    :func:`position_sums` differ by ``d``, ``p * d`` and ``p * p * d``. If several integers differ,
    it is very unlikely that the sums differ in this way.
    """
    groups = difference.groups
    if len(groups) != 2 or not difference.is_tensor:
        return None
    # The first rank of a group stands for the group.
    first_group, second_group = groups
    sums = difference.by_rank[first_group[0]].sums
    other_sums = difference.by_rank[second_group[0]].sums
    assert sums is not None, "is_tensor says that the replica is a tensor"
    assert other_sums is not None, "the replica is a tensor on all ranks"
    delta = _signed_difference(sums.total, other_sums.total)
    first_moment = _signed_difference(sums.first_moment, other_sums.first_moment)
    second_moment = _signed_difference(sums.second_moment, other_sums.second_moment)
    if delta == 0 or first_moment % delta != 0:
        return None
    position = first_moment // delta
    if position < 1 or (second_moment - position * position * delta) % _MODULUS != 0:
        return None
    # Positions are counted from 1.
    index = position - 1
    magnitude = abs(delta)
    bit = ""
    is_power_of_two = magnitude & (magnitude - 1) == 0
    if is_power_of_two:
        # A single bit differs. Each integer of an element that has several is one of 32 bits.
        bits_before = 32 * (index % sums.integers_per_element)
        bit_number = bits_before + magnitude.bit_length() - 1
        bit = f", by bit {bit_number}: a bit may have flipped"
    return _Element(index // sums.integers_per_element, bit)


def _signed_difference(number: int, other_number: int) -> int:
    """Return the difference of two integers modulo 2**64, as a signed integer of 64 bits."""
    difference = (other_number - number) % _MODULUS
    if difference >= _MODULUS // 2:
        difference -= _MODULUS
    return difference


def position_sums(tensor: Tensor) -> PositionSums:
    """Return three sums from which :func:`describe_drift` finds a single element that differs.

    The bits of the tensor are read as integers. An integer ``n`` at position ``p``, counted from 1,
    adds ``n``, ``n * p`` and ``n * p * p`` to the sums, modulo 2**64.
    """
    # An element of more than 4 bytes is read as several integers.
    integer_type = _INTEGERS[tensor.element_size()]
    integers = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    integers = integers.view(integer_type)
    sums = torch.zeros(3, dtype=torch.int64, device=integers.device)
    first_position = 1
    for chunk in integers.split(_CHUNK_ELEMENTS):
        positions = torch.arange(
            first_position, first_position + chunk.numel(), device=integers.device
        )
        terms = chunk.to(torch.int64)
        sums[0] += terms.sum()
        terms = terms * positions
        sums[1] += terms.sum()
        sums[2] += (terms * positions).sum()
        first_position += chunk.numel()
    total, first_moment, second_moment = sums.tolist()
    return PositionSums(
        total=total,
        first_moment=first_moment,
        second_moment=second_moment,
        integers_per_element=tensor.element_size() // integers.element_size(),
    )

"""What the details of replicas that differ say: which ranks agree, and what may have happened."""

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from fabric.diagnostics.recorder import ranks_in_words

__all__ = ["Kind", "RankDetails", "ReplicaDetails", "describe_drift", "position_sums"]

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


class Kind(IntEnum):
    """The kinds of replicas. Of all that differ, an error names one of the first kind."""

    PARAMETER = 0
    BUFFER = 1
    STATE = 2  # of an optimizer
    AVERAGE = 3
    OPTION = 4  # of an optimizer
    LOSS_SCALE = 5


class ReplicaDetails(NamedTuple):
    """What a rank holds of a replica that differs between ranks.

    Attributes:
        key: identifies the replica. It is the same on all ranks that hold it.
        name: the name for errors.
        kind: the kind.
        ranks: the ranks that should hold the same.
        value: a number as text, or the digest of a tensor.
        sums: see :func:`position_sums`. Empty if the replica is no tensor.
        gradient: the digest of the gradient of a parameter. None if it has none.
    """

    key: str
    name: str
    kind: Kind
    ranks: tuple[int, ...]
    value: str
    sums: tuple[int, ...] = ()
    gradient: int | None = None


class RankDetails(NamedTuple):
    """The details that a rank sends.

    Attributes:
        steps: the number of optimizer steps that the rank has made since the latest comparison.
        has_state: whether an optimizer of the rank has a state.
        replicas: some of the replicas that may differ.
        truncated_kinds: the kinds of which the rank has more such replicas than it sends.
    """

    steps: int
    has_state: bool
    replicas: list[ReplicaDetails]
    truncated_kinds: list[Kind]


class _Difference(NamedTuple):
    """A replica that differs, with what each rank holds.

    Attributes:
        details: the details of the first rank that holds the replica.
        values: the digest, text or ``"missing"`` of each rank.
        by_rank: the details of each rank that holds the replica.
    """

    details: ReplicaDetails
    values: dict[int, str]
    by_rank: dict[int, ReplicaDetails]

    @property
    def groups(self) -> list[list[int]]:
        """The ranks that agree with each other, the largest group first."""
        ranks_of_value: dict[str, list[int]] = {}
        for rank, value in self.values.items():
            ranks_of_value.setdefault(value, []).append(rank)
        return sorted(ranks_of_value.values(), key=len, reverse=True)


def describe_drift(ranks: Sequence[RankDetails], *, may_shard_states: bool) -> list[str]:
    """Return sentences about the first replica that differs, and what may have happened.

    Args:
        ranks: the details of all ranks.
        may_shard_states: whether each rank may hold a part of an optimizer's state. If so, states
            are not reported if every rank lacks the state of some parameter.

    Returns:
        The sentences. Empty if no rank holds another value than a rank that should hold the same.
    """
    differences = _find_differences(ranks)
    if may_shard_states:
        differences = _without_sharded_states(differences, len(ranks))
    if not differences:
        return []
    first = differences[0]
    sentences = [f"{first.details.name} differs: {_describe_groups(first)}"]
    sentences.extend(_explain(ranks, differences))
    return sentences


def _find_differences(ranks: Sequence[RankDetails]) -> list[_Difference]:
    """Return the replicas that differ, in the order of their kinds and of the first rank."""
    # The shards of a tensor have the same key, but each shard belongs to other ranks. So the ranks
    # are a part of the identity: different shards are not compared.
    replicas: dict[tuple[str, tuple[int, ...]], dict[int, ReplicaDetails]] = {}
    for rank, details_of_rank in enumerate(ranks):
        for details in details_of_rank.replicas:
            replicas.setdefault((details.key, details.ranks), {})[rank] = details
    differences: list[_Difference] = []
    for details_by_rank in replicas.values():
        # All ranks that hold a replica give it the same key, name, kind and ranks.
        details = next(iter(details_by_rank.values()))
        values: dict[int, str] = {}
        for rank in details.ranks:
            if rank in details_by_rank:
                values[rank] = details_by_rank[rank].value
            # Only the state of an optimizer counts as missing. Any other replica may belong to a
            # model that the user has dropped, and that this rank's garbage collector has freed.
            elif details.kind is Kind.STATE and Kind.STATE not in ranks[rank].truncated_kinds:
                values[rank] = _MISSING
        if len(set(values.values())) > 1:
            differences.append(_Difference(details, values, details_by_rank))
    # The sort is stable, so that replicas of a kind stay in the order of the first rank.
    return sorted(differences, key=_kind_of)


def _without_sharded_states(differences: list[_Difference], size: int) -> list[_Difference]:
    """Return the differences without states, if each of the ``size`` ranks lacks some state."""
    lacking: set[int] = set()
    others: list[_Difference] = []
    for difference in differences:
        if difference.details.kind is not Kind.STATE:
            others.append(difference)
        for rank, value in difference.values.items():
            if value == _MISSING:
                lacking.add(rank)
    if len(lacking) == size:
        return others
    return differences


def _kind_of(difference: _Difference) -> Kind:
    return difference.details.kind


def _describe_groups(difference: _Difference) -> str:
    """Return which ranks agree, or the value of each group of ranks if it is a number."""
    groups = difference.groups
    are_all_different = len(groups) == len(difference.values)
    is_tensor = bool(difference.details.sums) and _MISSING not in difference.values.values()
    if are_all_different and is_tensor:
        return f"{ranks_in_words(difference.values)} all hold other values"
    texts: list[str] = []
    for group in groups:
        words = ranks_in_words(group)
        value = difference.values[group[0]]
        if value == _MISSING:
            texts.append(f"{words} without it")
        elif not difference.details.sums:
            texts.append(f"{value} on {words}")
        elif len(group) > 1:
            texts.append(f"{words} agree")
        else:
            texts.append(f"{words} differs")
    return "; ".join(texts)


def _explain(ranks: Sequence[RankDetails], differences: Sequence[_Difference]) -> Iterator[str]:
    """Yield sentences about what may have happened, as far as it shows."""
    steps = {rank: str(details.steps) for rank, details in enumerate(ranks)}
    if len(set(steps.values())) > 1:
        yield f"the number of optimizer steps since then differs: {_describe_values(steps)}"
        return
    has_other_option = False
    for difference in differences:
        if difference.details.kind in (Kind.OPTION, Kind.LOSS_SCALE):
            has_other_option = True
            if difference is not differences[0]:  # which is described before
                yield f"{difference.details.name} differs: {_describe_values(difference.values)}"
    if not has_other_option:
        explanation = _explain_tensors(differences, has_state=ranks[0].has_state)
        if explanation:
            yield explanation


def _explain_tensors(differences: Sequence[_Difference], *, has_state: bool) -> str:
    """Return what may have happened to the tensors of the replicas. Empty if nothing shows.

    Args:
        differences: the replicas that differ. No numbers are among them.
        has_state: whether optimizers have a state.
    """
    parameters = _differences_of_kind(differences, Kind.PARAMETER)
    states = _differences_of_kind(differences, Kind.STATE)
    if any(_MISSING in difference.values.values() for difference in states):
        return (
            "only some ranks have the state of the optimizer: it was loaded on these ranks alone, "
            f"or the optimizer shards its own state ({_SAVE_BY_RANK})"
        )
    if states and not parameters:
        return (
            "the parameters are equal: the state was changed or loaded on some ranks alone, or the "
            f"optimizer shards its own state ({_SAVE_BY_RANK})"
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


def _differences_of_kind(differences: Sequence[_Difference], kind: Kind) -> list[_Difference]:
    return [difference for difference in differences if difference.details.kind is kind]


def _describe_values(values: Mapping[int, str]) -> str:
    """Return each value with its ranks, such as ``0.1 on ranks 0, 2; 0.05 on rank 1``."""
    ranks_of_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of_value.setdefault(value, []).append(rank)
    groups = sorted(ranks_of_value.items(), key=_group_size, reverse=True)
    return "; ".join([f"{value} on {ranks_in_words(group)}" for value, group in groups])


def _group_size(group: tuple[str, list[int]]) -> int:
    return len(group[1])


def _has_different_gradients(difference: _Difference) -> bool:
    """Return whether the gradients of a parameter differ between ranks that have one."""
    gradients: set[int] = set()
    for details in difference.by_rank.values():
        if details.gradient is not None:
            gradients.add(details.gradient)
    return len(gradients) > 1


class _Element(NamedTuple):
    """The only element that differs.

    Attributes:
        position: its position in the flattened part of the tensor on this rank.
        bit: text about the only bit that differs, or an empty text.
    """

    position: int
    bit: str


def _find_single_element(difference: _Difference) -> _Element | None:
    """Return the only element that differs between the two groups of ranks, or None.

    If one integer at position ``p`` differs by ``d``, the sums differ by ``d``, ``p * d`` and
    ``p * p * d``. Other differences do not, or only by a strange accident.
    """
    groups = difference.groups
    if len(groups) != 2 or not difference.details.sums:
        return None
    sums = difference.by_rank[groups[0][0]].sums
    other_sums = difference.by_rank[groups[1][0]].sums
    delta, first_moment, second_moment = map(_signed_difference, sums[:3], other_sums[:3])
    if delta == 0 or first_moment % delta != 0:
        return None
    position = first_moment // delta
    if position < 1 or (second_moment - position * position * delta) % _MODULUS != 0:
        return None
    integers_per_element = sums[3]
    magnitude = abs(delta)
    bit = ""
    is_power_of_two = magnitude & (magnitude - 1) == 0
    if is_power_of_two:
        # A single bit differs. An element of several integers has 32 bits in each of them.
        offset = (position - 1) % integers_per_element
        bit = f", by bit {magnitude.bit_length() - 1 + 32 * offset}: a bit may have flipped"
    return _Element((position - 1) // integers_per_element, bit)


def _signed_difference(number: int, other_number: int) -> int:
    """Return the difference of two integers modulo 2**64, as a signed integer of 64 bits."""
    difference = (other_number - number) % _MODULUS
    if difference >= _MODULUS // 2:
        difference -= _MODULUS
    return difference


def position_sums(tensor: Tensor) -> tuple[int, ...]:
    """Return three sums of a tensor's bits as integers, and the integers of each element.

    The sums are those of the integers, of the integers times their positions from 1, and of the
    integers times the squares of their positions, modulo 2**64.
    """
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
    integers_per_element = tensor.element_size() // integers.element_size()
    return (*sums.tolist(), integers_per_element)

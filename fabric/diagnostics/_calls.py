"""What one rank calls, and where the calls of several ranks differ."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

__all__ = ["Call", "difference", "in_words", "table"]

_SHOWN = 160  # characters of what is passed that are shown with a call
_WINDOW = 60  # characters of a long text that are shown around the first difference
_NAMED = 8  # ranks that are named one by one
_SHOWN_OTHERWISE = ("operation", "collective", "dtype", "shape")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a collective on one rank.

    Attributes:
        operation: its name, as the user called it.
        where: file and line of the user's call.
        facts: what must be the same on every rank, by name, in the order in which differences are worth telling.
        data: what is passed, as text; must be the same on all ranks that tell it, and is empty on the others.
    """

    operation: str
    where: str
    facts: Mapping[str, str] = field(default_factory=dict)
    data: str = ""

    def __str__(self) -> str:
        passed = self.data if len(self.data) <= _SHOWN else f"{self.data[:_SHOWN]}..."
        if not passed:
            arguments = [f"{name}={value}" for name, value in self.facts.items() if name not in _SHOWN_OTHERWISE]
            buffer = [self.facts[name] for name in ("dtype", "shape") if name in self.facts]
            passed = ", ".join([*arguments, *([" ".join(buffer)] if buffer else [])])
        return f"{self.operation}({passed}) at {self.where}"


def difference(calls: Mapping[int, Call]) -> str:
    """Where the calls differ, a line for each fact; empty if they agree.

    Args:
        calls: by rank.
    """
    names = list(dict.fromkeys(name for call in calls.values() for name in call.facts))
    lines = []
    for name in names:
        values = {rank: call.facts.get(name, "none") for rank, call in calls.items()}
        if len(set(values.values())) > 1:
            lines.append(f"{name}: {_by_value(values)}")
    if lines and lines[0].startswith("operation"):  # what other operations are given says nothing more
        return lines[0]
    told = {rank: call.data for rank, call in calls.items() if call.data}
    if len(set(told.values())) > 1:  # and what the user passes says more than the buffers that it became
        return f"data: {_by_value(_around_the_difference(told))}"
    return "; ".join(lines)


def table(lines: Mapping[int, object]) -> str:
    """A line for each rank, in order."""
    return "".join(f"\n    rank {rank}: {line}" for rank, line in sorted(lines.items()))


def in_words(ranks: Collection[int]) -> str:
    """``rank 1``, or ``ranks 1, 2``."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) > _NAMED:
        names[_NAMED // 2 : -1] = [f"... ({len(names)} of them)"]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _by_value(values: Mapping[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {in_words(having)}" for value, having in ranks.items())


def _around_the_difference(texts: Mapping[int, str]) -> dict[int, str]:
    """The texts, of long ones the part where they begin to differ."""
    shortest = min(map(len, texts.values()))
    first = next((i for i in range(shortest) if len({text[i] for text in texts.values()}) > 1), shortest)
    return {rank: _window(text, first) for rank, text in texts.items()}


def _window(text: str, middle: int) -> str:
    start, end = max(0, middle - _WINDOW // 2), middle + _WINDOW // 2
    if len(text) <= _WINDOW:
        return text
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")

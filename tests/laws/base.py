"""What a law is about, how many examples it gets, and how hypothesis is told."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fabric import Fabric
from fabric.testing import World


@dataclass(frozen=True)
class Subject:
    """Worlds by size, and what has the collectives on a rank: its fabric, or something broken in its place."""

    world: Callable[[int], World]
    collectives: Callable[[Fabric], Any] = lambda fabric: fabric

    def run(self, size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        collectives = self.collectives
        return self.world(size).run(lambda fabric, *own: fn(collectives(fabric), *own), *args)


Draw = Callable[..., Any]
Law = Callable[[Subject, Draw], None]


def profile(examples: int) -> settings:
    """The same examples in every run; no deadline for one, since ranks share the machine; nothing written to disk."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=False,
        # Not explained: that costs as many examples again, and every failing one may cost new
        # processes.
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def check(law: Law, subject: Subject, examples: int) -> None:
    """Raise with the simplest counterexample that was found, unless the law holds."""

    @profile(examples)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        law(subject, data.draw)

    holds()

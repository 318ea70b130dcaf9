"""Laws of collectives, and their check by hypothesis."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fabric import Fabric
from fabric.testing import World


@dataclass(frozen=True)
class Subject:
    """The collectives that a law is about.

    Attributes:
        world: returns the world of a size, whose ranks run functions.
        collectives: returns the collectives of a rank, which are those of its fabric by default.
    """

    world: Callable[[int], World]
    collectives: Callable[[Fabric], Any] = lambda fabric: fabric

    def run(self, size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``fn(collectives, *args)`` on every rank, and return the results by rank."""
        collectives = self.collectives
        return self.world(size).run(
            lambda fabric, *rank_args: fn(collectives(fabric), *rank_args), *args
        )


Draw = Callable[..., Any]
Law = Callable[[Subject, Draw], None]


def profile(examples: int) -> settings:
    """Return settings with the same examples in every run, and nothing written to disk.

    An example has no deadline, since the ranks share the machine.
    """
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=False,
        # The phase "explain" is left out: it costs as many examples again, and every failing
        # example may cost new processes.
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def check(law: Law, subject: Subject, examples: int) -> None:
    """Raise AssertionError with the simplest counterexample, unless the law holds."""

    @profile(examples)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        law(subject, data.draw)

    holds()

"""torch's elastic agent for ``fabric run``, with the patience of fabric's own launchers."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from fabric._torch import elastic_agent, elastic_processes, elastic_restarts
from fabric.launchers._failures import RunDirectory, attempt_directory
from fabric.launchers._patience import ASK, COLLECT, INSISTING, INTERRUPT, SAVE, WIND_DOWN, await_ends

__all__ = ["MeetingPlace", "run_agent"]

_MEET = 900  # seconds for the machines to meet; torch's own default


@dataclass(frozen=True, kw_only=True)
class MeetingPlace:
    """Where the agents of a job meet; see ``torch.distributed.elastic.rendezvous``.

    Attributes:
        backend: name of a rendezvous handler of torch.
        endpoint: ``host:port``, or a path where ``backend`` takes one.
        configs: options of the handler.
        address: of this machine, where it must not be looked up.
        main: host name and port of machine 0, where they are given.
    """

    backend: str
    endpoint: str
    configs: Mapping[str, Any]
    address: str | None = None
    main: tuple[str, int] | tuple[None, None] = (None, None)


def run_agent(
    command: Sequence[str], place: MeetingPlace, *, nodes: int, processes: int, restarts: int, directory: Path
) -> dict[int, ProcessFailure]:
    """Run a command in ``processes`` processes of this machine, one of ``nodes``, and wait for them.

    Returns:
        By global rank, the failures of this machine; those first that ended the job. Empty when all is well.

    Raises:
        SignalException: a signal reached this process; the ranks have ended.
    """
    parameters = RendezvousParameters(
        backend=place.backend,
        endpoint=place.endpoint,
        run_id=f"fabric-{directory.name}" if nodes == 1 else "fabric",
        min_nodes=nodes,
        max_nodes=nodes,
        local_addr=place.address,
        timeout=_MEET,
        **place.configs,
    )
    spec = WorkerSpec(
        role="default_role",
        local_world_size=processes,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=restarts,
        monitor_interval=0.1,
        master_addr=place.main[0],
        master_port=place.main[1],
        local_addr=place.address,
    )
    overseer = _Overseer(directory)
    logs = DefaultLogsSpecs(log_dir=str(directory / "agent"))
    agent = elastic_agent(spec, logs, overseer.look, overseer.end)
    try:
        failures = agent.run().failures  # pyright: ignore[reportAttributeAccessIssue] - lost in a decorator
    finally:
        spec.rdzv_handler.shutdown()
    return {rank: failure for rank, failure in failures.items() if overseer.is_suspect(agent, rank)} or failures


class _Overseer:
    """Ends ranks as :class:`~fabric.launchers._supervision.Crew` does; torch's own agent gives them half a minute."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stopped: set[int] = set()
        self._stopped_at = 0.0

    def is_suspect(self, agent: LocalElasticAgent, rank: int) -> bool:
        """Whether a rank may have ended the job: it ended by itself, or was handling an error when it was stopped."""
        recorded = self._attempt(agent).read(rank)
        return rank not in self._stopped or (recorded is not None and recorded.time < self._stopped_at)

    def look(self, agent: LocalElasticAgent) -> None:
        """End the ranks if one has failed, before torch asks the others to end at once, and waits for them."""
        if not any(process.poll() for process in elastic_processes(agent).values()):
            return
        _pause(agent, COLLECT)
        self._attempt(agent).ask()
        _pause(agent, ASK)
        self._stopped, self._stopped_at = set(_alive(agent)), time.monotonic()
        self._close(agent, signal.SIGTERM, WIND_DOWN)

    def end(self, agent: LocalElasticAgent, number: signal.Signals) -> None:
        """End the ranks because of a signal, or because all is over."""
        saving = number == signal.SIGTERM and any(map(self._attempt(agent).is_saving, _alive(agent)))
        with _insistence(), contextlib.suppress(SignalException):  # an impatient one: torch's agent kills them next
            self._close(agent, number, SAVE if saving else INTERRUPT)

    def _close(self, agent: LocalElasticAgent, number: int, grace: float) -> None:
        for pid in _alive(agent).values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)
        attempt = self._attempt(agent)
        await_ends(
            lambda: _alive(agent),
            lambda rank: attempt.has_heard(rank, number),
            lambda seconds: _pause(agent, seconds),
            grace,
        )
        for pid in _alive(agent).values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _attempt(self, agent: LocalElasticAgent) -> RunDirectory:
        return attempt_directory(self._directory, elastic_restarts(agent))


def _alive(agent: LocalElasticAgent) -> dict[int, int]:
    return {rank: process.pid for rank, process in elastic_processes(agent).items() if process.poll() is None}


def _pause(agent: LocalElasticAgent, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while _alive(agent) and time.monotonic() < deadline:
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def _insistence() -> Iterator[None]:
    """Within, a signal interrupts if somebody insists; `timeout` and others send the same one twice at once."""
    began, before = time.monotonic(), {}

    def act(number: int, frame: FrameType | None) -> None:
        handler: Callable[..., Any] = before[number]
        if time.monotonic() - began > INSISTING:
            handler(number, frame)

    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if callable(handler):
            before[number] = handler
            signal.signal(number, act)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""torch's elastic agent for ``fabric run``, with the patience of fabric's own launchers."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from fabric.launchers._failures import RunDirectory, attempt_directory
from fabric.launchers._supervision import ASK, COLLECT, INSISTING, INTERRUPT, SAVE, WIND_DOWN

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
    agent = _Agent(spec, directory, alone=nodes == 1)
    try:
        failures = agent.run().failures  # pyright: ignore[reportAttributeAccessIssue] - lost in a decorator
    finally:
        spec.rdzv_handler.shutdown()
    return {rank: failure for rank, failure in failures.items() if agent.is_suspect(rank)} or failures


class _Agent(LocalElasticAgent):
    """Ends the ranks as :class:`~fabric.launchers._supervision.Crew` does; torch's own gives them half a minute."""

    def __init__(self, spec: WorkerSpec, directory: Path, *, alone: bool) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(directory / "agent")))
        self._directory, self._alone = directory, alone
        self._stopped: set[int] = set()
        self._stopped_at = 0.0

    def is_suspect(self, rank: int) -> bool:
        """Whether a rank may have ended the job: it ended by itself, or was handling an error when it was stopped."""
        recorded = self._attempt().read(rank)
        return rank not in self._stopped or (recorded is not None and recorded.time < self._stopped_at)

    def _monitor_workers(  # pyright: ignore[reportIncompatibleVariableOverride] - its type is lost in a decorator
        self, worker_group: WorkerGroup
    ) -> RunResult:
        # Before torch's looks: it would ask the others to end at once, and wait for them.
        if any(code for code in self._exit_codes().values()):
            self._wait_for_all(COLLECT)
            self._attempt().ask()
            self._wait_for_all(ASK)
            codes = self._exit_codes()
            self._stopped = {worker.global_rank for worker in worker_group.workers if codes[worker.local_rank] is None}
            self._stopped_at = time.monotonic()
            self._close(signal.SIGTERM, WIND_DOWN)
        return super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue] - likewise

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        with _insistence():
            try:
                self._close(death_sig, self._grace(death_sig))
            except SignalException:
                self._close(signal.SIGKILL, 1.0)

    def _grace(self, number: signal.Signals) -> float:
        # Ranks of several machines have no directory in which to note that they are saving.
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        saving = not self._alone or any(self._attempt().is_saving(rank) for rank in ranks)
        return SAVE if number == signal.SIGTERM and saving else INTERRUPT

    def _close(self, number: signal.Signals, grace: float) -> None:
        if self._pcontext is not None:
            self._pcontext.close(number, grace)  # pyright: ignore[reportArgumentType] - seconds, which it compares only

    def _attempt(self) -> RunDirectory:
        return attempt_directory(self._directory, self._worker_group.spec.max_restarts - self._remaining_restarts)

    def _exit_codes(self) -> dict[int, int | None]:
        assert isinstance(self._pcontext, SubprocessContext)
        return {rank: handler.proc.poll() for rank, handler in self._pcontext.subprocess_handlers.items()}

    def _wait_for_all(self, limit: float) -> None:
        deadline = time.monotonic() + limit
        while None in self._exit_codes().values() and time.monotonic() < deadline:
            time.sleep(0.02)


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

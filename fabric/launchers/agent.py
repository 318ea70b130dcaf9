"""The agent of one machine in a job of several machines, which start and restart together."""

import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from enum import Enum, IntEnum, auto
from pathlib import Path
from typing import NamedTuple, Self, final

import torch.distributed as dist

from fabric.errors import ConfigurationError
from fabric.launchers.rank import PREEMPTED
from fabric.launchers.script import ScriptEnd
from fabric.launchers.supervisor import StatField, Supervisor, read_stat
from fabric.store import JobStore

__all__ = ["AgentConfig", "Generation", "NodeAgent"]

# All times are in seconds.

# The time between two messages of an agent.
_INTERVAL = 0.1
# The longest lease of a machine; see [Note: Lost machines].
_MAX_LEASE = 30.0
# How long ranks may go on at most after the failure of another machine, if no restart is left. A
# rank of `fabric doctor` takes up to 40 s to say what it cannot reach.
_MAX_FAILURE_GRACE = 60.0
# How long an agent that was stopped by a signal waits until machine 0 has ended the job.
_CLOSE_TIME = 5.0
# How long machine 0 waits for its port, which the store of an earlier job may still hold.
_PORT_TIMEOUT = 10.0
# After this time the agents print which machines they wait for.
_NOTICE_TIME = 10.0
# The time for one attempt to reach machine 0.
_CONNECT_TIMEOUT = 2.0

RestartRule = Callable[[float, Sequence[float]], bool]
"""A function of the present time and the times of all restarts. Returns whether to restart."""


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """The place of a machine in its job, and the rules of the job.

    Attributes:
        node_rank: the number of this machine.
        num_nodes: the number of machines.
        num_processes: the number of ranks on each machine.
        address: the host name of machine 0.
        port: the port of machine 0 on which the agents meet.
        node_timeout: how long to wait for a machine that is missing, in seconds.
        restart_limit: how many restarts are allowed, as a text for messages.
        allows_restart: returns whether another restart is allowed. Only machine 0 calls it.
    """

    node_rank: int
    num_nodes: int
    num_processes: int
    address: str
    port: int
    node_timeout: float
    restart_limit: str
    allows_restart: RestartRule

    @property
    def lease(self) -> float:
        """The seconds without a message after which a machine counts as lost."""
        return min(_MAX_LEASE, self.node_timeout / 2)


class Generation(NamedTuple):
    """A start of the ranks on all machines.

    Attributes:
        number: how many generations came before.
        port: the port of the store on machine 0 through which the ranks connect.
    """

    number: int
    port: int


class _NodeEnd(NamedTuple):
    """How the ranks of one machine have ended.

    Attributes:
        exit_code: the exit code for ``fabric run``.
        is_interrupted: whether a signal to the command has ended the ranks.
        failure: the rank that failed and how, in words. Empty if no rank failed.
        is_secondary: whether the failure looks like the result of another rank's failure.
    """

    exit_code: int
    is_interrupted: bool = False
    failure: str = ""
    is_secondary: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether the ranks have neither finished nor been preempted."""
        return self.exit_code not in (0, PREEMPTED)


class _ProcessIdentity(NamedTuple):
    """What tells a process from every other process, also from one that gets its id later.

    Attributes:
        boot: the id of the host's latest boot.
        namespace: the namespace of process ids, which differs between containers.
        process_id: the process id.
        start_time: when the process started, in ticks since the boot.
    """

    boot: str
    namespace: str
    process_id: str
    start_time: str


@dataclass(frozen=True, kw_only=True)
class _NodeStatus:
    """What an agent publishes about itself. The coordinator reads it.

    Attributes:
        agent_id: the random id of the agent.
        host: the host name.
        process: the identity of the process of the agent: the fields of a
            :class:`_ProcessIdentity`, as a list, since JSON has no tuples. None if not on Linux.
        num_nodes: the number of machines that the agent expects.
        num_processes: the number of ranks that the agent starts.
        beat: changes with each message, which shows that the agent is alive.
        ended_agent: the id of the earlier agent of this machine, if this agent has seen that the
            process of the earlier agent has ended. Else empty.
        seen_generation: the generation in the latest :class:`_JobState` that the agent has read.
        generation: the latest generation that the agent has started. -1 before the first.
        is_running: whether the ranks of ``generation`` run, or are about to start.
        end: how the ranks of ``generation`` have ended: the fields of a :class:`_NodeEnd`, as a
            list, since JSON has no tuples. None as long as they have not ended.
        has_read_end: whether the agent knows how the job has ended.
    """

    agent_id: str
    host: str
    process: list[str] | None
    num_nodes: int
    num_processes: int
    beat: int = 0
    ended_agent: str = ""
    seen_generation: int = -1
    generation: int = -1
    is_running: bool = False
    end: list[object] | None = None
    has_read_end: bool = False

    def read_end(self) -> _NodeEnd | None:
        """Return how the ranks of the latest generation have ended. None if they have not ended."""
        if self.end is None:
            return None
        return _NodeEnd(*self.end)  # pyright: ignore[reportArgumentType] (the fields, in order)


@dataclass(frozen=True, kw_only=True)
class _JobState:
    """What the coordinator publishes for all agents.

    Attributes:
        beat: changes with each message, which shows that machine 0 is alive.
        generation: the number of the generation that runs, or that is to start next.
        port: the port of the ranks' store if the generation runs. None if it is still to start.
        notice: a text that every agent prints once. Empty if there is none.
        cause_node: the machine whose error has ended the last generation. None if no error has.
        exit_code: the exit code of the job. None while the job goes on.
    """

    beat: int = 0
    generation: int = 0
    port: int | None = None
    notice: str = ""
    cause_node: int | None = None
    exit_code: int | None = None


@dataclass
class _Node:
    """A machine, as the coordinator sees it.

    Attributes:
        last_seen: when the latest message arrived. Before the first, when the coordinator started.
        status: the latest status of the admitted agent. None if no agent has been admitted.
        newcomer: the id of the latest agent that has asked to be admitted. Empty before the first.
        newcomer_since: when the newcomer was noticed.
    """

    last_seen: float
    status: _NodeStatus | None = None
    newcomer: str = ""
    newcomer_since: float = 0.0

    def read_end(self) -> _NodeEnd | None:
        """Return how the latest ranks of this machine have ended. None if they have not ended."""
        if self.status is None:
            return None
        return self.status.read_end()


class _CauseKind(IntEnum):
    """The kind of a cause. A cause of a lower kind is more likely the root cause."""

    OWN_ERROR = 0
    """An error of a rank that no other rank has caused."""
    LOST_MACHINE = 1
    """A machine was lost, or its agent was replaced."""
    SECONDARY_ERROR = 2
    """An error that another machine may have caused."""


class _Cause(NamedTuple):
    """A reason for the end of a generation.

    Attributes:
        time: when the coordinator noticed the cause, on the monotonic clock.
        kind: how likely this is the root cause.
        exit_code: the exit code of the job if the job does not restart.
        text: what happened, in words.
        node_rank: the machine where it happened.
    """

    time: float
    kind: _CauseKind
    exit_code: int
    text: str
    node_rank: int


class _Phase(Enum):
    """What the coordinator waits for."""

    STARTING = auto()
    """All machines, to start the next generation. No machine has ranks."""
    RUNNING = auto()
    """The end of the generation that runs."""
    ENDING = auto()
    """The ends of the last ranks of a generation that has failed."""


# [Note: Generations]
# `fabric run` has an *agent* on each machine of a job. The ranks that all machines start together
# are a *generation*. The agents meet in a store that the agent of machine 0 serves. Each agent has
# a thread that publishes a `_NodeStatus` ten times a second, and reads the `_JobState`. The thread
# of machine 0 also runs the `_Coordinator`, the only writer of the state, so that two failures at
# once are one end of a generation:
#
# 1. The coordinator admits one agent for each machine. When all machines are ready, it opens a new
#    store for the ranks and publishes the port. Ranks of two generations never share a store.
# 2. A rank or a machine that fails ends the generation: the coordinator publishes the number of the
#    next one without a port. Every agent then ends its ranks. If no restart is left, the other
#    ranks get some time before that, to fail by themselves and say what they know.
# 3. When no machine has ranks any more, the coordinator counts one restart, and goes on with step 1
#    as soon as all machines are there.
@final
class _Coordinator:
    """The part of machine 0's agent that decides for all machines.

    A *generation* is the ranks that all machines start together. An agent is *admitted* when it
    becomes the agent of its machine. A machine is *lost* if its agent has not answered for the time
    of its *lease*. Only the thread of the agent uses the coordinator.

    Args:
        config: the place and the rules of machine 0.
        store: the store of the agents.
    """

    def __init__(self, config: AgentConfig, store: JobStore) -> None:
        """Publish the first state. :meth:`update` admits agents and lets them start."""
        self._config = config
        self._store = store
        now = time.monotonic()
        self._nodes = [_Node(last_seen=now) for _ in range(config.num_nodes)]
        self._state = _JobState()
        # The store of the ranks, which is served as long as this object refers to it.
        self._rank_store: dist.TCPStore | None = None
        # The reasons why the latest generation has to end, in the order in which they were noticed.
        # Empty while a generation runs without a failure, and while the next one is to start.
        self._causes: list[_Cause] = []
        self._restart_times: list[float] = []
        # Since when the coordinator waits for all machines, to start the next generation.
        self._waiting_since = now
        # The number of the latest generation that has started. -1 before the first.
        self._started_generation = -1
        # Published before any agent is admitted: an agent reads the state as soon as it is.
        self._publish_state()

    def update(self) -> None:
        """Read all messages, decide, and publish the state. Does not wait for any machine.

        The thread of the agent calls this method ten times a second.
        """
        now = time.monotonic()
        self._read_statuses(now)
        self._admit_newcomers(now)
        if self._state.exit_code is None:
            self._decide(now)
        self._publish_state()

    def _publish_state(self) -> None:
        """Publish the state with a new beat, which shows that machine 0 is alive."""
        self._state = replace(self._state, beat=self._state.beat + 1)
        self._store.publish("job", asdict(self._state))

    def is_done(self) -> bool:
        """Return whether the job has ended, and all agents that are not lost know how."""
        if self._state.exit_code is None:
            return False
        now = time.monotonic()
        for node in self._nodes:
            if node.status is None or self._is_lost(node, now):
                continue
            if not node.status.has_read_end:
                return False
        return True

    @property
    def _phase(self) -> _Phase:
        """What the coordinator waits for now."""
        # The port is published as long as a generation runs.
        if self._state.port is not None:
            return _Phase.RUNNING
        # The causes are cleared when the job restarts.
        if self._causes:
            return _Phase.ENDING
        return _Phase.STARTING

    def _is_lost(self, node: _Node, now: float) -> bool:
        """Return whether a machine has sent no message for the time of its lease.

        The ranks of a lost machine have ended: its agent ends them after half of this time.
        """
        return now - node.last_seen > self._config.lease

    def _title(self, node_rank: int) -> str:
        """Return the name of a machine for messages."""
        status = self._nodes[node_rank].status
        if status is None:
            return f"machine {node_rank}"
        return f"machine {node_rank} ({status.host})"

    def _read_statuses(self, now: float) -> None:
        """Read the statuses of the admitted agents."""
        for node_rank, content in self._store.read("agent", range(len(self._nodes))).items():
            status = _NodeStatus(**content)
            node = self._nodes[node_rank]
            # An agent that was replaced may still write. Its messages do not count.
            if node.status is None or node.status.agent_id != status.agent_id:
                continue
            # Each message has a new beat. Without one, the store returns the last message again.
            if node.status.beat != status.beat:
                node.last_seen = now
            node.status = status

    def _admit_newcomers(self, now: float) -> None:
        """Admit or refuse the agents that have asked to be the agent of their machine."""
        # The store keeps the latest request of each machine, also when it has been answered.
        for node_rank, content in self._store.read("newcomer", range(len(self._nodes))).items():
            newcomer = _NodeStatus(**content)
            current = self._nodes[node_rank].status
            is_admitted = current is not None and current.agent_id == newcomer.agent_id
            if not is_admitted:
                self._answer_newcomer(node_rank, newcomer, now)

    def _answer_newcomer(self, node_rank: int, newcomer: _NodeStatus, now: float) -> None:
        """Admit or refuse an agent that asks to be the agent of a machine, or let it wait.

        A newcomer replaces the current agent of its machine only if the current agent has ended or
        is lost. As long as this is not known, the newcomer gets no answer: it asks again, and
        :meth:`update` calls this method again. The newcomer reads the answer from the store, under
        ``member/`` or ``refused/``.
        """
        problem = self._find_problem(newcomer)
        if problem != "":
            self._store.set(f"refused/{newcomer.agent_id}", problem)
            return
        node = self._nodes[node_rank]
        is_first_request = node.newcomer != newcomer.agent_id
        if is_first_request:
            node.newcomer = newcomer.agent_id
            node.newcomer_since = now
        current = node.status
        if current is not None:
            # A newcomer on the same host has looked for the process of the current agent.
            has_current_ended = newcomer.ended_agent == current.agent_id
            if not has_current_ended and not self._is_lost(node, now):
                self._refuse_if_current_agent_is_alive(node_rank)
                return
            self._end_ranks_of_replaced_agent(node_rank, now)
        # The newcomer is admitted: it is now the agent of its machine.
        node.status = newcomer
        node.last_seen = now
        self._store.set(f"member/{node_rank}", newcomer.agent_id)

    def _refuse_if_current_agent_is_alive(self, node_rank: int) -> None:
        """Refuse the newcomer of a machine once the admitted agent is known to be alive.

        The admitted agent may have died just before the newcomer came. So it is known to be alive
        only if it sends a message later than one lease after the newcomer was noticed.
        """
        node = self._nodes[node_rank]
        if node.last_seen > node.newcomer_since + self._config.lease:
            text = f"{self._title(node_rank)} has a running command already"
            self._store.set(f"refused/{node.newcomer}", text)

    def _end_ranks_of_replaced_agent(self, node_rank: int, now: float) -> None:
        """End the generation, since the agent that had ranks of it is replaced by a newcomer.

        Does nothing if no generation runs, when no machine has ranks.
        """
        if self._phase is _Phase.STARTING:
            return
        cause = _Cause(
            time=now,
            kind=_CauseKind.LOST_MACHINE,
            exit_code=1,
            text=f"{self._title(node_rank)}: its command ended and was started again",
            node_rank=node_rank,
        )
        # With a cause and without a published port, the phase is ENDING; see _phase.
        self._causes.append(cause)
        # In the phase ENDING, the generation has been ended already.
        if self._phase is _Phase.RUNNING:
            self._end_generation()

    def _find_problem(self, newcomer: _NodeStatus) -> str:
        """Return why an agent cannot be part of this job, or an empty text."""
        config = self._config
        if newcomer.num_nodes != config.num_nodes:
            return (
                f"this machine has --num-nodes {newcomer.num_nodes}, and machine 0 "
                f"{config.num_nodes}"
            )
        if newcomer.num_processes != config.num_processes:
            return (
                f"this machine starts {newcomer.num_processes} processes, machine 0 "
                f"{config.num_processes}: write the same --devices on all machines"
            )
        return ""

    def _decide(self, now: float) -> None:
        """End the job, end the generation, or start the next one, if the messages require it."""
        for node_rank, node in enumerate(self._nodes):
            end = node.read_end()
            if end is not None and end.is_interrupted:
                self._end_job(end.exit_code, f"{self._title(node_rank)} was stopped by a signal")
                return
            if now - node.last_seen > self._config.node_timeout:
                self._end_job(1, f"{self._title(node_rank)} {self._describe_silence(node)}")
                return
        if self._phase is _Phase.RUNNING:
            # If this ends the generation, the agents first have to read that it has ended. So a
            # later call goes on with the phase ENDING.
            self._watch_generation(now)
            return
        if self._phase is _Phase.ENDING:
            # The phase becomes STARTING if no machine has ranks any longer, and the job restarts.
            self._finish_generation(now)
        if self._phase is _Phase.STARTING:
            self._start_generation(now)

    def _describe_silence(self, node: _Node) -> str:
        """Return what is known about a machine that has been missing for too long."""
        seconds = f"{self._config.node_timeout:g} s (--node-timeout)"
        if node.status is None:
            return f"has not joined within {seconds}"
        return f"has not answered for {seconds}"

    def _watch_generation(self, now: float) -> None:
        """End the generation if a machine has failed. End the job if all ranks have finished."""
        exit_codes: list[int] = []
        is_any_running = False
        for node_rank, node in enumerate(self._nodes):
            self._add_cause_if_failed(node_rank, now)
            if self._is_lost(node, now):
                # Its ranks have ended: an agent that reaches nobody ends them before the lease is
                # over. _add_cause_if_failed() has added the cause.
                continue
            end = self._end_in_this_generation(node)
            if end is None:
                is_any_running = True
            else:
                exit_codes.append(end.exit_code)
        if self._causes:
            if not is_any_running or self._should_end_other_ranks(now):
                self._end_generation()
        elif not is_any_running:
            # No machine has failed, so all codes are 0 or PREEMPTED, which is larger: the job was
            # preempted if any machine was.
            self._end_job(max(exit_codes), "")

    def _end_in_this_generation(self, node: _Node) -> _NodeEnd | None:
        """Return how the ranks of a machine have ended. None if they run, or are about to start."""
        status = node.status
        assert status is not None  # a generation starts when all machines are there
        # The status of an agent that has not started this generation yet is about the last one.
        has_started = status.generation == self._state.generation
        if not has_started or status.is_running:
            return None
        return status.read_end()

    def _should_end_other_ranks(self, now: float) -> bool:
        """Return whether the machines have to end their ranks, since another machine has failed.

        If the job is to restart, the ranks are ended at once. Otherwise the ranks may go on for a
        while, so that they fail by themselves: their errors may say more than the first error.
        """
        if self._config.allows_restart(now, self._restart_times):
            return True
        # A user who sets a short --node-timeout wants a failed job to end soon.
        grace = min(_MAX_FAILURE_GRACE, self._config.node_timeout)
        return now - self._causes[0].time > grace

    def _end_generation(self) -> None:
        """Have all agents end their ranks.

        The agents end ranks whose generation is not that of the published state. The caller has
        added a cause, so the phase is now ENDING.
        """
        next_generation = self._state.generation + 1
        self._state = replace(self._state, generation=next_generation, port=None)

    def _add_cause_if_failed(self, node_rank: int, now: float) -> None:
        """Add the failure of a machine to the causes, once in each generation.

        Does nothing if the machine has not failed.
        """
        node = self._nodes[node_rank]
        # The causes are cleared when the job restarts.
        is_known = any(cause.node_rank == node_rank for cause in self._causes)
        # None: the machine has not joined the job yet, and so cannot have failed.
        if is_known or node.status is None:
            return
        title = self._title(node_rank)
        end = node.status.read_end()
        # The end of an earlier generation is not a failure of this one. _state.generation is not
        # compared: in the phase ENDING it is the number of the next generation already.
        is_end_of_this_generation = node.status.generation == self._started_generation
        if self._is_lost(node, now):
            kind = _CauseKind.LOST_MACHINE
            exit_code = 1
            text = f"{title} has not answered for {self._config.lease:g} s"
        elif is_end_of_this_generation and end is not None and end.has_failed:
            kind = _CauseKind.SECONDARY_ERROR if end.is_secondary else _CauseKind.OWN_ERROR
            exit_code = end.exit_code
            text = f"{title}: {end.failure}"
        else:
            return
        cause = _Cause(time=now, kind=kind, exit_code=exit_code, text=text, node_rank=node_rank)
        self._causes.append(cause)

    def _finish_generation(self, now: float) -> None:
        """Restart or end the job, once no machine has ranks of the generation that has failed.

        As long as a machine may have such ranks, this method returns, and :meth:`update` calls it
        again a moment later.
        """
        for node_rank, node in enumerate(self._nodes):
            # Failures that were noticed after the end of the generation count, too.
            self._add_cause_if_failed(node_rank, now)
            if self._may_have_ranks(node, now):
                return
        # The most likely root cause. There is a cause in the phase ENDING. Of several causes of one
        # kind, min() returns the earliest.
        cause = min(self._causes, key=lambda cause: cause.kind)
        self._state = replace(self._state, cause_node=cause.node_rank)
        if self._config.allows_restart(now, self._restart_times):
            self._count_restart(cause, now)
        else:
            self._end_job(cause.exit_code, cause.text)

    def _may_have_ranks(self, node: _Node, now: float) -> bool:
        """Return whether a machine may still have ranks of the generation that has failed."""
        if node.status is None or self._is_lost(node, now):
            return False
        # The published state has the number of the next generation already. An agent that has not
        # seen this number may just be starting the ranks of the failed generation.
        has_seen_end = node.status.seen_generation == self._state.generation
        return node.status.is_running or not has_seen_end

    def _count_restart(self, cause: _Cause, now: float) -> None:
        """Count and announce a restart for ``cause``, and let the next generation start."""
        self._restart_times.append(now)
        count = f"restart {len(self._restart_times)} of {self._config.restart_limit}"
        self._state = replace(self._state, notice=f"{count}: {cause.text}")
        self._causes = []  # the phase is now STARTING
        self._waiting_since = now

    def _start_generation(self, now: float) -> None:
        """Start the next generation if all machines are there. Otherwise say which are missing.

        This method only changes the state. :meth:`update` publishes the state afterwards.
        """
        missing: list[str] = []
        for node_rank, node in enumerate(self._nodes):
            if not self._is_ready(node, now):
                missing.append(self._title(node_rank))
        if missing:
            if now - self._waiting_since > _NOTICE_TIME:
                names = ", ".join(missing[:8])  # enough for a line
                notice = f"waiting for {len(missing)} of {len(self._nodes)} machines: {names}"
                self._state = replace(self._state, notice=notice)
            return
        # The attribute has the only reference to the store of the last generation. So torch closes
        # that store when the new one replaces it. Port 0 means any port that is free.
        self._rank_store = _serve(self._config.address, 0)
        # The port in the published state makes the agents start their ranks.
        self._state = replace(self._state, port=self._rank_store.port)
        # The end of the last generation has already raised the number.
        self._started_generation = self._state.generation

    def _is_ready(self, node: _Node, now: float) -> bool:
        """Return whether the agent of a machine answers, and waits for the next generation."""
        if node.status is None or self._is_lost(node, now):
            return False
        # An agent that has seen the number of the next generation waits for its port.
        return node.status.seen_generation == self._state.generation

    def _end_job(self, exit_code: int, notice: str) -> None:
        """End the job on all machines, which print the notice unless it is empty."""
        if notice != "":
            notice = f"the job ends: {notice}"
        self._state = replace(self._state, port=None, notice=notice, exit_code=exit_code)


# See [Note: Generations].
@final
class NodeAgent:
    """This machine's agent, which tells ``fabric run`` when to start and end the ranks.

    The ranks that all machines start together are a *generation*. The agent is a context manager,
    which the main thread uses. While it is open, a thread of the agent exchanges messages with the
    *coordinator* of machine 0, which decides for all machines. On machine 0, the thread also runs
    the coordinator.

    Args:
        config: the place of this machine, and the rules of the job.

    Raises:
        ConfigurationError: the port is taken on machine 0.
    """

    def __init__(self, config: AgentConfig) -> None:
        """Serve the store of the agents, on machine 0. :meth:`__enter__` starts the thread."""
        self._config = config
        process = _read_process_identity()
        self._status = _NodeStatus(
            agent_id=uuid.uuid4().hex,
            host=socket.gethostname(),
            process=None if process is None else list(process),
            num_nodes=config.num_nodes,
            num_processes=config.num_processes,
        )
        self._status_lock = threading.Lock()  # guards _status
        self._state = _JobState()  # the latest state that the thread of the agent has read
        self._last_contact = time.monotonic()  # when machine 0 has last sent a new state
        self._fatal_problem = ""  # why this agent cannot go on, in words. Empty if it can.
        # The generation (a start of the ranks on all machines) that the main thread has to start
        # now. wait_for_generation() takes it and sets None.
        self._next_generation: Generation | None = None
        self._main_thread_wakeup = threading.Event()  # wakes the main thread
        self._agent_thread_wakeup = threading.Event()  # wakes the thread of the agent
        self._should_leave = False  # ends the thread of the agent
        self._printed_notice = ""  # the coordinator's notice that was printed last
        self._unprinted_report = ""  # the error of this machine's ranks, until it is printed
        # The coordinator and the store of the agents are None on other machines than machine 0.
        # _join_job() makes the coordinator, in the thread of the agent.
        self._coordinator: _Coordinator | None = None
        self._server: dist.TCPStore | None = None
        if config.node_rank == 0:
            self._server = _serve_when_free(config.address, config.port)
        self._thread = threading.Thread(target=self._run, name="fabric-agent", daemon=True)

    def __enter__(self) -> Self:
        """Start the thread of the agent."""
        self._thread.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Leave the job. An error, such as Ctrl-C, ends the job on all machines."""
        if error_type is not None:
            self._set_end(_NodeEnd(exit_code=128 + signal.SIGINT, is_interrupted=True))
        self._should_leave = True
        self._agent_thread_wakeup.set()
        # A thread that waits for a machine without an answer ends with this process.
        timeout = _CLOSE_TIME
        if self._coordinator is not None:
            # Other agents read the end of the job from this process. An agent that has not read it
            # within one lease is lost.
            timeout += self._config.lease
        self._thread.join(timeout)

    def wait_for_generation(self) -> Generation | None:
        """Wait until all machines start the next generation, or until the job has ended.

        Returns:
            The generation to start. None if the job has ended: then call :meth:`exit_code`.
        """
        # After a signal, the time at which this machine stops waiting for machine 0 to end the job.
        deadline: float | None = None
        # The supervisor has no ranks here. It records signals.
        with Supervisor() as supervisor:
            while True:
                # The thread of the agent sets this event. The loop looks for signals meanwhile.
                self._main_thread_wakeup.wait(_INTERVAL)
                self._main_thread_wakeup.clear()
                self._print_notice()
                if self._has_to_exit():
                    return None
                # A signal while ranks ran has set _is_interrupted already, through report().
                if supervisor.signals and not self._is_interrupted:
                    exit_code = 128 + supervisor.signals[0].number
                    self._set_end(_NodeEnd(exit_code, is_interrupted=True))
                if self._is_interrupted:
                    # Machine 0 reads the end of this machine, and publishes the exit code of the
                    # job, so that _has_to_exit() becomes true. If machine 0 does not do so in time,
                    # this machine ends alone.
                    if deadline is None:
                        deadline = time.monotonic() + _CLOSE_TIME
                    if time.monotonic() > deadline:
                        return None
                    continue
                # The thread of the agent sets the attribute when machine 0 starts a generation.
                generation = self._next_generation
                if generation is not None:
                    self._next_generation = None
                    return generation

    def _has_to_exit(self) -> bool:
        """Return whether the job has ended, or this agent cannot go on.

        The first call after machine 0 has been silent for too long sets ``_fatal_problem``.
        """
        if self._fatal_problem != "" or self._state.exit_code is not None:
            return True
        if self._is_silent_for(self._config.node_timeout):
            self._fatal_problem = (
                f"machine 0 ({self._config.address}:{self._config.port}) has not answered "
                f"for {self._config.node_timeout:g} s (--node-timeout)"
            )
            return True
        return False

    # [Note: Lost machines]
    # No two generations may have ranks at the same time, since both would write to the folder of
    # checkpoints. An agent without contact to machine 0 ends its ranks after half of the time after
    # which the coordinator counts the machine as lost (its lease). A new agent of a machine
    # replaces an earlier one when the lease is over, or at once if it runs on the same host and
    # sees that the process of the earlier agent has ended. The ranks of an agent end with the
    # agent.
    def should_end_ranks(self) -> bool:
        """Return whether the ranks of this machine have to end before they finish.

        This is so if the generation or the job has ended, or machine 0 has not answered for half a
        lease. The main thread calls this method repeatedly while ranks run.
        """
        # The coordinator ends a generation by publishing the number of the next one.
        has_generation_ended = self._state.generation != self._status.generation
        has_job_ended = self._state.exit_code is not None
        if has_generation_ended or has_job_ended or self._fatal_problem != "":
            return True
        return self._is_silent_for(self._config.lease / 2)

    def report(self, script_end: ScriptEnd) -> None:
        """Tell the coordinator how the ranks of this machine have ended."""
        failure = script_end.failure
        is_secondary = script_end.is_secondary
        if script_end.is_canceled:
            # Shown only if the coordinator knows of no failure that is more likely the cause.
            failure = "the ranks were ended after the contact to machine 0 was lost"
            is_secondary = True
        self._unprinted_report = script_end.report
        # A failure that another machine has probably caused is printed by _print_notice(), once it
        # is known whether it is the cause after all.
        if not is_secondary:
            self._print_report()
        end = _NodeEnd(
            exit_code=script_end.exit_code,
            is_interrupted=script_end.is_interrupted,
            failure=failure,
            is_secondary=is_secondary,
        )
        self._set_end(end)

    def exit_code(self) -> int:
        """Return the exit code of the job, once :meth:`wait_for_generation` has returned None.

        Prints the problem if this agent could not go on.
        """
        if self._fatal_problem != "":
            print(f"fabric run: {self._fatal_problem}", file=sys.stderr, flush=True)
            return 1
        end = self._status.read_end()
        # After a signal to this machine, the coordinator may not have ended the job yet.
        if end is not None and end.is_interrupted:
            return end.exit_code
        assert self._state.exit_code is not None
        return self._state.exit_code

    @property
    def _is_interrupted(self) -> bool:
        """Whether a signal to this machine has ended its ranks, or its wait for ranks."""
        end = self._status.read_end()
        return end is not None and end.is_interrupted

    def _print_notice(self) -> None:
        """Print the coordinator's notice once, after this machine's error if it matters.

        At a restart, only the machine whose error is the cause prints its error. At the end of the
        job, every machine does.
        """
        state = self._state
        if state.notice == self._printed_notice:
            return
        is_cause = state.cause_node == self._config.node_rank
        if is_cause or state.exit_code is not None:
            self._print_report()
        self._printed_notice = state.notice
        print(f"fabric run: {state.notice}", file=sys.stderr, flush=True)

    def _print_report(self) -> None:
        """Print the error of this machine's ranks, unless it has been printed."""
        if self._unprinted_report != "":
            print(f"\n{self._unprinted_report}", file=sys.stderr, flush=True)
        self._unprinted_report = ""

    def _is_silent_for(self, seconds: float) -> bool:
        """Return whether machine 0 has sent no new state for this time."""
        return time.monotonic() - self._last_contact > seconds

    def _set_end(self, end: _NodeEnd) -> None:
        """Have the thread of the agent publish how the ranks of this machine have ended."""
        with self._status_lock:
            self._status = replace(self._status, is_running=False, end=list(end))
        self._agent_thread_wakeup.set()

    # The methods below run in the thread of the agent. Its calls of the store may block for long,
    # if the network fails. The main thread does not wait for them.

    def _run(self) -> None:
        """Exchange messages until the job ends or this agent leaves.

        This is the main function of the thread.
        """
        store = self._join_job()
        if store is None:
            self._main_thread_wakeup.set()
            return
        try:
            has_read_end = False
            while not has_read_end and not self._should_leave:
                self._exchange(store)
                has_read_end = self._state.exit_code is not None
                # The main thread sets the event if it has something to publish at once.
                self._agent_thread_wakeup.wait(_INTERVAL)
                self._agent_thread_wakeup.clear()
            self._leave(store)
        except dist.DistError:
            self._fatal_problem = (
                f"machine 0 ({self._config.address}:{self._config.port}) has ended, and with it "
                "the job. Start the command again on all machines"
            )
        self._main_thread_wakeup.set()

    def _join_job(self) -> JobStore | None:
        """Try to connect to machine 0 until the coordinator admits this agent.

        Returns:
            The store of the agents. None if this agent is refused, or leaves before it is admitted.
        """
        config = self._config
        while not self._should_leave and self._fatal_problem == "":
            try:
                server = self._server
                if server is None:  # on other machines than machine 0
                    server = _connect(config.address, config.port)
                store = JobStore(server, config.node_rank, config.num_nodes)
                if self._server is not None:  # on machine 0
                    self._coordinator = _Coordinator(config, store)
                if self._ask_for_admission(store):
                    return store
                # If the store is that of an earlier job, which has just ended, try again.
            except (OSError, dist.DistError):
                pass  # machine 0 is not there yet, or has just ended an earlier job
            time.sleep(_INTERVAL)
        return None

    def _ask_for_admission(self, store: JobStore) -> bool:
        """Ask to be the agent of this machine, and wait for the answer of the coordinator.

        Returns:
            Whether this agent is admitted. Otherwise it was refused, which sets
            ``_fatal_problem``, or the job of this store has ended, or this agent leaves.
        """
        node_rank = self._config.node_rank
        agent_id = self._status.agent_id
        while not self._should_leave:
            # Published in each turn, since an earlier agent may end while this agent waits.
            request = replace(self._status, ended_agent=self._find_ended_agent(store))
            store.publish("newcomer", asdict(request))
            # On machine 0, this thread also runs the coordinator, which has to answer the request.
            if self._coordinator is not None:
                self._coordinator.update()
            if store.get_nowait(f"member/{node_rank}") == agent_id.encode():
                return True
            refusal = store.get_nowait(f"refused/{agent_id}")
            if refusal is not None:
                self._fatal_problem = f"machine 0 has refused this machine: {refusal.decode()}"
                return False
            state = self._read_state(store)
            if state is not None and state.exit_code is not None:
                return False
            time.sleep(_INTERVAL)
        return False

    def _find_ended_agent(self, store: JobStore) -> str:
        """Return the id of the earlier agent of this machine if its process has certainly ended.

        This agent may then replace the earlier agent at once. The text is empty if there is no
        earlier agent, or if it is not known to have ended.
        """
        node_rank = self._config.node_rank
        content = store.read("agent", [node_rank]).get(node_rank)
        if content is None:
            return ""
        earlier_status = _NodeStatus(**content)
        return earlier_status.agent_id if _has_process_ended(earlier_status) else ""

    def _read_state(self, store: JobStore) -> _JobState | None:
        """Return the coordinator's state. None if the coordinator has not published one yet.

        If the state is new, machine 0 is alive, so the time of the last contact is updated.
        """
        content = store.read("job", [0]).get(0)
        if content is None:
            return None
        state = _JobState(**content)
        if state.beat != self._state.beat:
            self._last_contact = time.monotonic()
        return state

    def _exchange(self, store: JobStore) -> None:
        """Publish this agent's status, read the state of the job, and act on it.

        On machine 0, the coordinator is updated in between.
        """
        self._publish_status(store)
        if self._coordinator is not None:  # on machine 0
            self._coordinator.update()
        state = self._read_state(store)
        assert state is not None  # the coordinator publishes a state before it admits an agent
        # The coordinator writes the id of the admitted agent of each machine to this key.
        node_rank = self._config.node_rank
        if store.get_nowait(f"member/{node_rank}") != self._status.agent_id.encode():
            self._fatal_problem = f"another command has become machine {node_rank} of this job"
            self._should_leave = True
        generation = self._follow_state(state)
        if generation is not None:
            # wait_for_generation() returns the generation to the main thread, which starts the
            # ranks. This comes last: from then on should_end_ranks() compares the generations of
            # the status and of the state, which _follow_state() has made equal.
            self._next_generation = generation
            self._main_thread_wakeup.set()

    def _publish_status(self, store: JobStore, *, has_read_end: bool = False) -> None:
        """Publish the status with a new beat, which shows that this agent is alive.

        ``has_read_end`` is whether this agent knows how the job has ended.
        """
        with self._status_lock:
            beat = self._status.beat + 1
            self._status = replace(self._status, beat=beat, has_read_end=has_read_end)
        store.publish("agent", asdict(self._status))

    def _follow_state(self, state: _JobState) -> Generation | None:
        """Store the new state of the job, and update the status, which the next message publishes.

        Returns:
            The generation that this machine has to start now. The status then says that its ranks
            are about to start. None if there is no generation to start.
        """
        generation: Generation | None = None
        with self._status_lock:
            status = replace(self._status, seen_generation=state.generation)
            is_new_generation = status.generation != state.generation
            # Until the generation has a port, not all machines are there. And the ranks of the last
            # generation may not have ended yet.
            if is_new_generation and state.port is not None and not status.is_running:
                generation = Generation(state.generation, state.port)
                status = replace(status, generation=state.generation, is_running=True, end=None)
            self._status = status
            self._state = state
        return generation

    def _leave(self, store: JobStore) -> None:
        """Publish that this agent knows that the job has ended. On machine 0, wait for the others.

        The store ends with machine 0. So machine 0 waits until each other agent knows that the job
        has ended, or is lost.
        """
        self._publish_status(store, has_read_end=True)
        self._main_thread_wakeup.set()
        coordinator = self._coordinator
        while coordinator is not None and not coordinator.is_done():
            coordinator.update()
            time.sleep(_INTERVAL)


def _serve(address: str, port: int) -> dist.TCPStore:
    """Return a new store that this process serves. Port 0 means any port that is free."""
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_PORT_TIMEOUT),
    )


def _serve_when_free(address: str, port: int) -> dist.TCPStore:
    """Return the store of the agents, once its port is free.

    Raises:
        ConfigurationError: the port does not become free in time.
    """
    deadline = time.monotonic() + _PORT_TIMEOUT
    while True:
        try:
            return _serve(address, port)
        except dist.DistNetworkError as error:
            if time.monotonic() < deadline:
                time.sleep(5 * _INTERVAL)
                continue
            raise ConfigurationError(
                f"port {port} of machine 0, where the machines of the job meet",
                problem=str(error).partition("\n")[0],
                expected=f"--main-address {address} is this machine, and no other process uses "
                "the port",
                suggestion="--main-port with another number, on every machine",
            ) from error


def _connect(address: str, port: int) -> dist.TCPStore:
    """Return a connection to the store of machine 0.

    Raises:
        OSError: machine 0 does not answer.
        torch.distributed.DistError: the store of machine 0 does not answer.
    """
    # A plain connection is tried first, since torch would print a warning if machine 0 does not
    # answer. The caller tries again until it does.
    socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT).close()
    # The time for one call of the store. After a longer wait, this machine would be lost anyway.
    timeout = timedelta(seconds=_MAX_LEASE)
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _read_process_identity(pid: str = "self") -> _ProcessIdentity | None:
    """Return the identity of a process that runs on this host, in the namespace of this process.

    Args:
        pid: the process id as a text. Default: this process.

    Returns:
        The identity. None if there is no such process, if it has ended and its parent has not
        noticed (a zombie), or if this is not Linux.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    stat = read_stat(pid)
    if not stat or stat[StatField.STATE] in "ZX":  # zombie, or dead
        return None
    return _ProcessIdentity(
        boot=boot,
        namespace=namespace,
        process_id=stat[StatField.PROCESS_ID],
        start_time=stat[StatField.START_TIME],
    )


def _has_process_ended(status: _NodeStatus) -> bool:
    """Return whether the process of an agent has certainly ended.

    This is certain if the process ran on this host, in the same container, and is not there any
    more. In any other case the result is false.

    Args:
        status: the latest status that the agent has published.
    """
    this_process = _read_process_identity()
    if status.process is None or this_process is None:
        return False  # not on Linux: nothing is known
    process = _ProcessIdentity(*status.process)
    if process.boot != this_process.boot or process.namespace != this_process.namespace:
        return False  # another host, or another container
    # The result is None if no process has the id. Another process that got the id later has
    # another start time.
    return _read_process_identity(process.process_id) != process

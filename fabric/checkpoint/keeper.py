"""The newest checkpoints of a run, and the best one, in a folder."""

import fcntl
import json
import math
import operator
import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, Protocol, final

from fabric.checkpoint.agreement import BadTensor, run_on_all_ranks
from fabric.checkpoint.async_save import PendingSave
from fabric.checkpoint.atomic import atomic_write, clear_temporaries, read_errors, write_errors
from fabric.checkpoint.file import CheckpointIO, FullCheckpoint
from fabric.checkpoint.save_load import CheckpointCoordinator, read_with_retries
from fabric.checkpoint.sharded import ShardedCheckpoint, clean, remove_folder
from fabric.checkpoint.sharded_reader import INDEX
from fabric.checkpoint.state import State, join_names
from fabric.checkpoint.storage import (
    Location,
    RemotePath,
    locate,
    path_type,
    require_folder,
)
from fabric.communicators import Communicator
from fabric.environments import RayEnvironment
from fabric.errors import (
    ArgumentTypeError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    DamagedCheckpointError,
    MissingDependencyError,
)
from fabric.loggers import metrics_as_floats

__all__ = ["Checkpoints"]

_Best = tuple[str, Literal["min", "max"]] | None  # see Checkpoints
_Metrics = dict[str, float]

_LOCK = ".lock"  # the name of the lock file of a folder
_TEXT_FILES = ("latest", "best")  # the names of the text files
_UNHEALTHY = "-unhealthy"
_NAME = rf"(?P<checkpoint>\d{{8}}-step-\d+(?:{_UNHEALTHY})?)"
# A checkpoint, its metrics, or a temporary file of one of these.
_FILE = re.compile(rf"\.?{_NAME}(?:\.json)?(?:\.[0-9a-f]{{12}}\.tmp)?")


class _Session(Protocol):
    """The part of a job's session that saves and loads checkpoints."""

    def checkpoint_coordinator(self, phase: str) -> AbstractContextManager[CheckpointCoordinator]:
        """Return a context with the coordinator that saves and loads the checkpoints of the job.

        ``phase`` is what is being done, for hang reports.
        """
        ...


class _FolderContent(NamedTuple):
    """The committed checkpoints of a folder, the oldest first.

    Attributes:
        metrics: the metrics of the healthy checkpoints by name.
        unhealthy: by name of each unhealthy checkpoint, a clause about its bad tensor.
        texts: the checkpoint that each text file names, by the name of the file.
    """

    metrics: dict[str, _Metrics]
    unhealthy: dict[str, str]
    texts: dict[str, str]


class _Step(NamedTuple):
    """The number of a step and its metrics, which the user has passed to a save."""

    number: int
    metrics: _Metrics


@final
class Checkpoints:
    """The newest ``keep`` checkpoints of a run, and the best one, in one folder.

    ``fabric.checkpoints`` makes this object. Its construction, :meth:`save` and :meth:`restore` are
    collective: every process must call them.

    A checkpoint is removed only after a newer one has been committed. A job that is killed at any
    moment leaves at least one checkpoint that loads, if there was one, and at most ``keep + 3``.
    Unhealthy checkpoints and those that :meth:`restore` has skipped do not count. The next job
    removes incomplete saves. Other files in the folder are not touched. Of several checkpoints of
    the same step the newest is kept. *Newest* means saved last, even if a run has gone back to an
    earlier step.

    The folder has two text files for shell scripts, ``latest`` and ``best``, with the names of
    these checkpoints. A checkpoint stays for one more save after a text file has stopped naming it.
    So a reader of the text has the time of a save to open the checkpoint.

    Args:
        running_session: returns the session of the job, which is started if necessary. The argument
            is the name of the user's call, for errors.
        folder: a folder for this run alone, which is created. May be a URL such as ``s3://...``.
        keep: how many checkpoints to keep, besides the best one.
        best: the name of a metric, and whether the best value is the least (``"min"``) or the
            largest (``"max"``). None keeps no best checkpoint.
        healthy: whether saves of NaN or infinite values are set apart, see :meth:`save`.

    Raises:
        ConfigurationError: ``keep`` or ``best`` is not valid.
        CheckpointError: another job saves into the folder, or the folder cannot be written.
    """

    def __init__(
        self,
        running_session: Callable[[str], _Session],
        folder: str | os.PathLike[str],
        keep: int,
        best: _Best,
        healthy: bool,
    ) -> None:
        """Lock the folder and remove what killed jobs left. ``fabric.checkpoints`` calls it.

        Collective. ``running_session(call)`` returns the session of the job. The other arguments
        are the user's: see the class.
        """
        # The user's call, for errors.
        self._request = f"fabric.checkpoints({str(folder)!r}, keep={keep!r}, best={best!r})"
        self._running_session = running_session
        self._num_to_keep = keep
        self._sets_unhealthy_apart = healthy
        # The last background save, which may be running.
        self._pending: PendingSave | None = None
        # The names of the checkpoints that the next _publish() removes.
        self._stale_names: list[str] = []
        # Names of checkpoints that restore() has skipped as damaged. They are not removed in this
        # run: what looks like damage may be a fault of this machine.
        self._skipped_names: set[str] = set()
        with running_session("checkpoints").checkpoint_coordinator(phase="setup") as coordinator:
            # A background save of another Checkpoints object may be writing to this folder.
            coordinator.join_pending()
            communicator = coordinator.communicator
            self._communicator = communicator
            self._io = coordinator.io
            # A stack of files that is closed at the end of the job.
            job_files = coordinator.saver.files

        # run_on_all_ranks() raises on every rank if its step fails on any rank.
        self._path = run_on_all_ranks(
            communicator, self._request, partial(_locate_checked, self._request, folder, keep, best)
        )
        # The metric that decides on the best checkpoint. None keeps no best checkpoint.
        self._best_metric: str | None = None
        # Whether the least value of this metric is the best, and not the largest.
        self._is_lower_better = False
        if best is not None:
            self._best_metric, mode = best
            self._is_lower_better = mode == "min"
        # Only rank 0 writes into the folder. On the other ranks self._folder is None.
        self._folder, content_on_first = run_on_all_ranks(
            communicator, self._request, partial(self._open_folder, job_files)
        )
        content: _FolderContent = communicator.broadcast_object(content_on_first, 0)
        # The metrics of each checkpoint by name, the oldest first. The same on all ranks.
        self._metrics_by_checkpoint = content.metrics
        # By name of each unhealthy checkpoint, a clause about its bad tensor. The next unhealthy
        # save removes all earlier ones. A killed job may have left two.
        self._unhealthy_reasons = content.unhealthy
        # The checkpoints that the text files name now, and the checkpoints that they named before
        # their last change. All of them stay: another process may have read such a name and not
        # opened the checkpoint yet.
        self._published_names = content.texts
        self._named_before_last_change: set[str] = set()
        self._last_save_number = _last_save_number(content)
        # Update the text files: a killed job may have left the names of older checkpoints.
        self._publish(communicator)

    def _open_folder(self, job_files: ExitStack) -> "tuple[_RunFolder | None, _FolderContent]":
        """Lock the folder on rank 0, and remove what killed jobs left.

        Args:
            job_files: is closed at the end of the job. The lock file is added to it.

        Returns:
            The folder, and its checkpoints. On other ranks None and no checkpoints.
        """
        if self._communicator.rank != 0:
            return None, _FolderContent(metrics={}, unhealthy={}, texts={})
        with write_errors(self._request):
            folder = _RunFolder(self._request, self._path, self._io, job_files)
            return folder, folder.recover()

    @property
    def latest(self) -> Location | None:
        """The path of the newest checkpoint, or None.

        Waits for a background save, like :meth:`PendingSave.wait`.
        """
        return self._path_of("latest")

    @property
    def best(self) -> Location | None:
        """The path of the checkpoint with the best metric, or None. Of equal ones the newest.

        Waits for a background save, like :meth:`PendingSave.wait`.
        """
        return self._path_of("best")

    def _path_of(self, title: str) -> Location | None:
        """Return the path of the checkpoint ``latest`` or ``best``, or None if there is none.

        ``title`` is ``"latest"`` or ``"best"``. A background save changes both at its end, so this
        method waits for a background save.
        """
        # is_raised is true if the save has ended and a caller has got its error, if any. wait()
        # would raise the error a second time.
        if self._pending is not None and not self._pending.is_raised:
            self._pending.wait()
        name = self._latest_and_best().get(title)
        if name is None:
            return None
        return self._path / name

    # -- save -----------------------------------------------------------------------------------

    def save(
        self, step: int, state: State, metrics: Mapping[str, Any] | None = None, async_: bool = True
    ) -> PendingSave | None:
        """Save ``state`` as :meth:`Fabric.save <fabric.Fabric.save>` does, then remove older ones.

        Collective. With ``async_`` both run in the background, and the next save, ``teardown`` and
        the end of the process wait for them.

        A state with bad values is *unhealthy*: a trained parameter or a tensor of an optimizer that
        is NaN or infinite on any process, or a buffer or frozen parameter that is NaN. With
        ``healthy`` it is saved beside the checkpoints, under a name that ends with ``-unhealthy``,
        and rank 0 warns. It removes no checkpoint but the last unhealthy one, and is neither
        :attr:`latest` nor :attr:`best`. :meth:`restore` passes over it; ``fabric.load`` loads it.

        Args:
            step: a number of at least 0, the same on every process. :meth:`restore` returns it.
            state: names and objects, as for ``Fabric.save``. Include what the loop needs to resume,
                such as its loaders. Random states and the loss scale are added.
            metrics: names, and numbers or tensors of one element. The values of rank 0 are kept.
                The metric that ``best`` names is required, and must be the same on every process.
                If it is NaN or infinite, the save is never the best one, and rank 0 warns. None for
                a save without metrics, which is never the best one.
            async_: return as soon as everything has been copied in memory.

        Raises:
            ConfigurationError: the step or a metric is not as described. Nothing has been written.
            CheckpointError: this save or the last one failed on a process. Earlier checkpoints are
                untouched.
        """
        request = f"checkpoints.save({step!r}, ...) on rank {self._communicator.rank}"
        with self._running_session("save").checkpoint_coordinator(phase="save") as coordinator:
            step_here = run_on_all_ranks(
                self._communicator, request, partial(self._parse_step, request, step, metrics)
            )
            # Rank 0 decides on the name and the metrics.
            step_on_first: _Step = self._communicator.broadcast_object(step_here, 0)
            self._warn_if_never_best(request, step_on_first.metrics)
            run_on_all_ranks(
                self._communicator,
                request,
                partial(self._check_same_on_ranks, request, step_here, step_on_first),
            )
            # A coordinator for this save alone, which may search the state for bad values.
            saving_coordinator = replace(coordinator, finds_bad_tensors=self._sets_unhealthy_apart)
            # If this save fails, its number is not used again. The thread of the last background
            # save may still run, until take_snapshot() waits for it. It does not use the number.
            self._last_save_number += 1
            name = f"{self._last_save_number:08}-step-{step_on_first.number}"
            snapshot = saving_coordinator.take_snapshot(self._path / name, state)
            # write() writes the checkpoint inside of the context ``commit``, which writes the
            # metrics before and removes older checkpoints after.
            bad_tensor = snapshot.bad_tensor
            if bad_tensor is None:
                commit = partial(self._commit, name, step_on_first.metrics)
            else:
                name += _UNHEALTHY
                self._warn_of_unhealthy_save(request, name, bad_tensor)
                snapshot = replace(snapshot, location=self._path / name)
                commit = partial(self._commit_unhealthy, name, bad_tensor)
            self._pending = saving_coordinator.write(snapshot, async_, commit)
        return self._pending

    def _warn_of_unhealthy_save(self, request: str, name: str, bad_tensor: BadTensor) -> None:
        """Warn on rank 0 that an unhealthy state is saved under ``name``.

        ``request`` is the user's call, for the warning.
        """
        if self._communicator.rank != 0:
            return
        # stacklevel=3 shows the user's line, which calls save(), which calls this method.
        warnings.warn(
            f"{request}: {bad_tensor}, so the state is saved as {name}, which is never the latest "
            "or best checkpoint and is not restored. To save any values alike: "
            "fabric.checkpoints(..., healthy=False)",
            stacklevel=3,
        )

    def _parse_step(self, request: str, step: int, metrics: Mapping[str, Any] | None) -> _Step:
        """Return a step as an int and its metrics as floats.

        ``request`` is the user's call, for the error.

        Raises:
            ArgumentTypeError: the step is not an integer.
            ConfigurationError: the step is negative, or ``metrics`` is not None and lacks the
                metric of the best checkpoint.
        """
        values: _Metrics = {}
        if metrics is not None:
            values = metrics_as_floats(metrics)
        try:
            number = operator.index(step)  # raises for a float, accepts an integer of numpy
        except TypeError as error:
            raise ArgumentTypeError(
                request, problem=f"the step is {step!r}", expected="an integer of at least 0"
            ) from error
        # A save without any metrics is allowed, and is never the best one.
        lacks_best_metric = (
            metrics is not None
            and self._best_metric is not None
            and self._best_metric not in values
        )
        if number < 0 or lacks_best_metric:
            problem = f"the step is {step}, the metrics are {values}"
            expected = (
                f"a step of at least 0, and a number for {self._best_metric!r}; or no metrics"
            )
            raise ConfigurationError(request, problem, expected=expected)
        return _Step(number, values)

    def _warn_if_never_best(self, request: str, metrics: _Metrics) -> None:
        """Warn on rank 0 if the metric of the best checkpoint is NaN or infinite.

        ``request`` is the user's call, for the warning.
        """
        if self._communicator.rank != 0 or self._best_metric is None:
            return
        value = metrics.get(self._best_metric)
        if value is None or math.isfinite(value):
            return
        # stacklevel=3 shows the user's line, which calls save(), which calls this method.
        warnings.warn(
            f"{request}: {self._best_metric} is {value}, so this checkpoint is never the best one",
            stacklevel=3,
        )

    def _check_same_on_ranks(self, request: str, step_here: _Step, step_on_first: _Step) -> None:
        """Raise a ConfigurationError if this rank saves another step or best metric than rank 0.

        With different values, the ranks would disagree on which checkpoints to keep. Metrics other
        than the best metric may differ.

        Args:
            request: the user's call, for the error.
            step_here: what the user has passed on this rank.
            step_on_first: what the user has passed on rank 0.
        """
        # The values of the best metric, as numbers to compare.
        score_here = self._score(step_here.metrics)
        score_on_first = self._score(step_on_first.metrics)
        if (step_here.number, score_here) == (step_on_first.number, score_on_first):
            return
        problem = (
            f"the step and the metrics are {step_here.number}, {step_here.metrics} here, and "
            f"{step_on_first.number}, {step_on_first.metrics} on rank 0"
        )
        suggestion = "metrics=fabric.all_reduce(metrics)"
        raise ConfigurationError(
            request, problem, expected="the same on all ranks", suggestion=suggestion
        )

    # See [Note: files of a run].
    @contextmanager
    def _commit(self, name: str, metrics: _Metrics, communicator: Communicator) -> Iterator[None]:
        """Write the metrics, have the block save a checkpoint, and then remove older checkpoints.

        Collective over ``communicator``. A background save enters this context on the thread that
        writes.

        Args:
            name: the name of the checkpoint.
            metrics: the metrics of rank 0. Empty if there are none.
            communicator: the ranks, in a group that no other thread uses.
        """
        metrics_files: dict[str, str] = {}
        if metrics:
            metrics_files[f"{name}.json"] = _metrics_as_json(metrics)
        # Called before the save to write the metrics files. The call also removes a checkpoint that
        # a killed job has left beyond the number to keep.
        self._rotate(communicator, metrics_files)
        with self._stale_unless_saved(name, communicator):
            yield
        self._metrics_by_checkpoint[name] = metrics
        self._rotate(communicator)
        values = {"step": _step_number(name), **metrics}
        # Collective in a job of Ray. Does nothing in other jobs.
        _report_to_ray(values, self._path / name, communicator.rank)

    @contextmanager
    def _commit_unhealthy(
        self, name: str, bad_tensor: BadTensor, communicator: Communicator
    ) -> Iterator[None]:
        """Have the block save an unhealthy state, and then remove earlier unhealthy checkpoints.

        Collective over ``communicator``. No healthy checkpoint is removed. A background save enters
        this context on the thread that writes.

        Args:
            name: the name of the checkpoint, which ends with ``-unhealthy``.
            bad_tensor: why the state is unhealthy. Written to the ``.json`` file of the checkpoint.
            communicator: the ranks, in a group that no other thread uses.
        """
        self._publish(communicator, {f"{name}.json": json.dumps(bad_tensor._asdict())})
        with self._stale_unless_saved(name, communicator):
            yield
        # The next _publish() removes the stale names: here, the earlier unhealthy checkpoints.
        self._stale_names.extend(self._unhealthy_reasons)
        self._unhealthy_reasons = {name: str(bad_tensor)}
        self._publish(communicator)
        # None in place of the path: Ray would restore the unhealthy checkpoint.
        _report_to_ray({"step": _step_number(name)}, None, communicator.rank)

    @contextmanager
    def _stale_unless_saved(self, name: str, communicator: Communicator) -> Iterator[None]:
        """Have the next save remove the checkpoint ``name`` if the block fails to save it.

        Collective over ``communicator``.
        """
        # If the block raises, the name stays in this list, which the next _publish() removes.
        self._stale_names.append(name)
        yield
        # A CheckpointIO of the user may write in the background. wait() raises the error of such a
        # write.
        run_on_all_ranks(communicator, self._request, self._io.wait)
        self._stale_names.remove(name)

    def _rotate(
        self, communicator: Communicator, metrics_files: Mapping[str, str] | None = None
    ) -> None:
        """Remove all checkpoints but the newest ``keep`` of different steps and the best one.

        Also updates the text files ``latest`` and ``best``. Collective. Checkpoints that
        :meth:`restore` has skipped stay, and so do those that a text file has just stopped naming.

        Args:
            communicator: all ranks.
            metrics_files: the content of metrics files by name, which are written before anything
                is removed. None, the default, writes no files.
        """
        # The names and metrics are the same on all ranks, so all ranks keep the same checkpoints.
        # The oldest checkpoint comes first. So of several checkpoints of the same step, the last
        # one, which is the newest, stays in newest_by_step.
        newest_by_step = {_step_number(name): name for name in self._metrics_by_checkpoint}
        # One checkpoint of each step, in the order of the saves.
        newest = [name for name in self._metrics_by_checkpoint if name in newest_by_step.values()]
        undamaged = [name for name in newest if name not in self._skipped_names]
        names_to_publish = self._latest_and_best()
        if names_to_publish != self._published_names:
            # The text files have named these checkpoints until now. They stay until the next save:
            # another process may have read a name, and not opened the checkpoint yet.
            self._named_before_last_change = set(self._published_names.values())
            self._published_names = names_to_publish
        retained = {
            *undamaged[-self._num_to_keep :],
            *self._skipped_names,
            *self._named_before_last_change,
        }
        best_checkpoint = self._best_checkpoint()
        if best_checkpoint is not None:
            retained.add(best_checkpoint)
        for name in list(self._metrics_by_checkpoint):
            if name not in retained:
                del self._metrics_by_checkpoint[name]
                self._stale_names.append(name)
        # Writes the files on rank 0, and removes the stale checkpoints.
        self._publish(communicator, metrics_files)

    def _publish(
        self, communicator: Communicator, metrics_files: Mapping[str, str] | None = None
    ) -> None:
        """Write ``latest`` and ``best``, and then remove the stale checkpoints. Collective.

        Rank 0 writes and removes. ``metrics_files`` has the content of metrics files by name. They
        are written first. None, the default, writes no metrics files.
        """

        def publish_on_first_rank() -> None:
            """Write and remove on rank 0, which alone has a ``_RunFolder``."""
            if self._folder is None:
                return
            if metrics_files is not None:
                self._folder.write(metrics_files)
            self._folder.publish(self._latest_and_best(), self._stale_names)

        # Raises on every rank if rank 0 fails. The names then stay in the list for the next call.
        run_on_all_ranks(communicator, self._request, publish_on_first_rank)
        self._stale_names.clear()

    def _latest_and_best(self) -> dict[str, str]:
        """Return the names of the checkpoints ``latest`` and ``best``, if there are any."""
        names: dict[str, str] = {}
        if self._metrics_by_checkpoint:
            # The newest checkpoint comes last.
            names["latest"] = next(reversed(self._metrics_by_checkpoint))
        best_checkpoint = self._best_checkpoint()
        if best_checkpoint is not None:
            names["best"] = best_checkpoint
        return names

    def _best_checkpoint(self) -> str | None:
        """Return the name of the checkpoint with the best metric. Of equal ones the newest.

        None if no best checkpoint is kept, or no checkpoint has the metric.
        """
        best_name = None
        best_score = -math.inf
        for name, metrics in self._metrics_by_checkpoint.items():
            score = self._score(metrics)
            # A later checkpoint replaces the best one so far even if they are equal.
            if score is not None and score >= best_score:
                best_name = name
                best_score = score
        return best_name

    def _score(self, metrics: _Metrics) -> float | None:
        """Return a number that is larger for a better checkpoint.

        The number is the value of the metric, negated if the least value is the best. None if no
        best checkpoint is kept, or the metric is missing, NaN or infinite.
        """
        if self._best_metric is None:
            return None
        value = metrics.get(self._best_metric, math.nan)
        if not math.isfinite(value):
            return None
        if self._is_lower_better:
            return -value
        return value

    # -- restore --------------------------------------------------------------------------------

    def restore(self, state: MutableMapping[str, Any]) -> int | None:
        """Restore ``state`` from the newest intact checkpoint, as ``Fabric.load`` does.

        Collective; all processes restore the same checkpoint. Damaged and unhealthy checkpoints
        (see :meth:`save`) are skipped, with a warning on rank 0. Damaged ones stay in the folder
        until the job ends. After this call, the restored checkpoint counts as the newest.

        Returns:
            The step of the checkpoint. None if there is no checkpoint.

        Raises:
            UnreadableCheckpointError: three attempts to read a checkpoint have failed with an error
                of the operating system. The checkpoint may be intact, so it is not skipped. Nothing
                has been changed.
            CheckpointError: there is no intact, healthy checkpoint, or the newest such checkpoint
                does not fit ``state``. Nothing has been changed.
        """
        # _load_newest() adds a sentence about each checkpoint that is skipped.
        problems: list[str] = []
        with self._running_session("load").checkpoint_coordinator(phase="load") as coordinator:
            # A background save may be writing the newest checkpoint. Its error is raised here.
            coordinator.join_pending()
            name = self._load_newest(coordinator, state, problems)
        if name is None:
            return None
        if problems and self._communicator.rank == 0:
            warnings.warn(f"{name} is restored; {join_names(problems)}", stacklevel=2)
        # Move the entry to the end of the dict, where the newest checkpoint has to be.
        self._metrics_by_checkpoint[name] = self._metrics_by_checkpoint.pop(name)
        # The text file ``latest`` gets the name of the restored checkpoint.
        self._publish(self._communicator)
        return _step_number(name)

    def _load_newest(
        self,
        coordinator: CheckpointCoordinator,
        state: MutableMapping[str, Any],
        problems: list[str],
    ) -> str | None:
        """Load the newest intact checkpoint, and return its name. Collective.

        Args:
            coordinator: loads a checkpoint on all ranks. For a damaged checkpoint, all ranks raise
                the same class of error, so that all ranks skip the same checkpoints.
            state: names and objects to restore.
            problems: gets a sentence about each newer checkpoint that is damaged or unhealthy.

        Returns:
            The name, or None if there is no checkpoint.

        Raises:
            CheckpointError: no checkpoint is intact and healthy, or the newest one does not fit.
        """
        # The dict has the newest checkpoint last.
        for name in reversed(list(self._metrics_by_checkpoint)):
            try:
                coordinator.load(self._path / name, state)
            # A checkpoint is not found if it is a link to a disk that is not mounted, for example.
            except (CheckpointNotFoundError, DamagedCheckpointError) as error:
                problems.append(f"{self._path / name} is passed over: {error.problem}")
                self._skipped_names.add(name)
                # Without its metrics, the checkpoint is never the best one.
                self._metrics_by_checkpoint[name] = {}
            else:
                # An earlier restore() may have skipped it while its disk was not mounted.
                self._skipped_names.discard(name)
                problems.extend(self._problems_of_unhealthy(newer_than=name))
                return name
        problems.extend(self._problems_of_unhealthy(newer_than=None))
        if problems:
            request = f"restore from {str(self._path)!r}"
            raise CheckpointError(
                request,
                problem=join_names(problems),
                expected="a checkpoint that is intact and healthy",
                suggestion="fabric.load(path, state) for one of them, or an empty folder to start "
                "again",
            )
        return None

    def _problems_of_unhealthy(self, newer_than: str | None) -> list[str]:
        """Return a sentence about each unhealthy checkpoint that is newer than ``newer_than``.

        An unhealthy checkpoint contains bad values, such as NaN, and is never restored.
        ``newer_than`` is the name of a checkpoint. If it is None, the result has a sentence about
        each unhealthy checkpoint.
        """
        problems: list[str] = []
        for name, reason in self._unhealthy_reasons.items():
            # The names begin with the number of the save, so a newer checkpoint has a larger name.
            if newer_than is None or name > newer_than:
                problems.append(f"{self._path / name} is passed over: {reason}")
        return problems


def _locate_checked(
    request: str, folder: str | os.PathLike[str], keep: int, best: _Best
) -> Location:
    """Check the arguments of :class:`Checkpoints`, and return the location of ``folder``.

    ``request`` is the user's call, for errors.
    """
    _check_arguments(request, keep, best)
    return locate(folder)


def _check_arguments(request: str, keep: int, best: _Best) -> None:
    """Raise a ConfigurationError if an argument of :class:`Checkpoints` is not valid.

    ``request`` is the user's call, for the error.
    """
    problem = None
    # The exact type, because True is an int, too.
    if type(keep) is not int or keep < 1:
        problem = f"{keep=} is not valid"
    if best is not None:
        is_pair = type(best) is tuple and len(best) == 2
        if not is_pair or best[1] not in ("min", "max"):
            problem = f"{best=} is not valid"
    if problem is not None:
        expected = (
            "keep=3, or any number of at least 1; best=('val_loss', 'min'), or 'max', or None"
        )
        raise ConfigurationError(request, problem, expected=expected)


def _metrics_as_json(metrics: _Metrics) -> str:
    """Return the text of a metrics file. NaN and infinities become null, since JSON lacks them."""
    values: dict[str, float | None] = {}
    for name, value in metrics.items():
        values[name] = value if math.isfinite(value) else None
    return json.dumps(values)


def _metrics_of_json(content: bytes) -> _Metrics:
    """Return the metrics of a metrics file, with NaN in place of null.

    Raises:
        ValueError: the content is not what :func:`_metrics_as_json` returns.
    """
    values = json.loads(content)
    if not isinstance(values, dict):
        raise ValueError(f"{values!r} has no names")
    metrics: _Metrics = {}
    for name, value in values.items():
        if value is not None and not isinstance(value, int | float):
            raise ValueError(f"{name} is {value!r}")
        metrics[name] = math.nan if value is None else float(value)
    return metrics


def _read_if_exists(path: Location) -> bytes | None:
    """Return the content of a file, or None if there is no file.

    Raises:
        UnreadableCheckpointError: the system has failed to read the file.
    """
    with read_errors(f"read {str(path)!r}"):
        if path_type(path) is None:
            return None
        return path.read_bytes()


def _step_number(name: str) -> int:
    """Return the step of a checkpoint from its name, such as ``00000017-step-3000``."""
    return int(name.split("-")[2])


def _last_save_number(content: _FolderContent) -> int:
    """Return the number of the last save in a folder. 0 if there is none.

    The name of each checkpoint begins with its number.
    """
    newest_name = max([*content.metrics, *content.unhealthy], default="0")
    number_text, _, _ = newest_name.partition("-")
    return int(number_text)


# [Note: files of a run]
# Each checkpoint has a unique name: `00000017-step-3000` is the 17th save. So no save overwrites
# another, and the names sort in the order of the saves even if a run goes back to an earlier step.
# A checkpoint is valid once `Fabric.save` has committed it. A save takes these steps:
#
# 1. The metrics are written to a file with the name of the checkpoint and `.json`.
# 2. The checkpoint is written and committed.
# 3. The text files `latest` and `best` get the names of these two checkpoints.
# 4. Older checkpoints are removed, each one before its metrics. The checkpoints that the text files
#    named before step 3 stay until the next save: another process may have read a name and not
#    opened the checkpoint yet.
#
# Whenever a job dies, the two text files name checkpoints that exist, and the next job knows from
# the names alone what to remove.
#
# The name of a save whose state has bad values ends with `-unhealthy`. In place of metrics, its
# `.json` has the bad tensor. The text files never name it.
class _RunFolder:
    """The files of a run, on rank 0.

    Args:
        request: the user's request, a text for errors.
        path: the folder. It is created and locked.
        io: the format of its checkpoints.
        job_files: closed at the end of the job, which releases the lock.
    """

    def __init__(
        self, request: str, path: Location, io: CheckpointIO, job_files: ExitStack
    ) -> None:
        """Create and lock the folder of a run until the end of the job.

        ``request`` is the user's request, a text for errors. ``io`` is the format of the
        checkpoints. ``job_files`` is closed at the end of the job, which releases the lock.
        """
        self._request = request
        self._path = path
        self._io = io
        # Whether the format is a CheckpointIO of the user. With fabric's formats, a checkpoint may
        # be a file or a folder, since a run may go on with another strategy.
        self._has_custom_io = not isinstance(io, FullCheckpoint | ShardedCheckpoint)
        # Raises if another job has locked the folder.
        self._lock = _FolderLock(request, path, job_files)
        # The content of each text file by its name, such as "best": the name of a checkpoint.
        self._text_contents: dict[str, str] = {}

    def recover(self) -> _FolderContent:
        """Remove what killed jobs left, and return the checkpoints of the folder.

        A killed job leaves temporary files, and saves that were not committed. Called once, before
        this job writes into the folder.
        """
        clear_temporaries(self._path, rf"(?:{'|'.join(_TEXT_FILES)}|{_NAME}(?:\.json)?)")
        # Each file of a checkpoint has the name of the checkpoint in its name. A killed job may
        # have left only some of the files.
        names: set[str] = set()
        for entry in self._path.iterdir():
            match = _FILE.fullmatch(entry.name)
            if match is not None:
                names.add(match["checkpoint"])
        # publish() compares these contents with the new ones, and writes only what differs.
        for title in _TEXT_FILES:
            path = self._path / title
            if path.is_file():
                self._text_contents[title] = path.read_bytes().decode(errors="replace").strip()
        content = _FolderContent(metrics={}, unhealthy={}, texts=dict(self._text_contents))
        # The order of the names is the order of the saves.
        for name in sorted(names):
            is_committed = self._finish_cleanup(name)
            if not is_committed:
                self._remove(name)
            elif name.endswith(_UNHEALTHY):
                content.unhealthy[name] = self._read_reason(name)
            else:
                content.metrics[name] = self._read_metrics(name)
        return content

    def _finish_cleanup(self, name: str) -> bool:
        """Finish the cleanup of an interrupted save, and return whether a checkpoint was committed.

        A file is committed if it exists, since it is renamed to its name when it is complete. A
        folder of the sharded format is committed if it has an index. What a CheckpointIO of the
        user has written is committed if it exists. The files of a checkpoint that was not committed
        stay, for the caller to remove.
        """
        path = self._path / name
        # A link is left where the user has moved the checkpoint to another disk. The disk may not
        # be mounted now. Nothing is cleaned up behind the link.
        if isinstance(path, Path) and path.is_symlink():
            return True
        type_of_path = path_type(path)
        if self._has_custom_io or type_of_path != "directory":
            return type_of_path is not None
        # Remove the temporary index of a killed save first: while the temporary index exists,
        # clean() does not remove the files of that save.
        clear_temporaries(path, re.escape(INDEX))
        # A damaged index is not reported here: a load of the checkpoint reports it.
        with suppress(DamagedCheckpointError):
            clean(path)
        return path_type(path / INDEX) == "file"

    def _read_metrics(self, name: str) -> _Metrics:
        """Return the saved metrics of a checkpoint. Empty if it was saved without metrics.

        If the metrics are damaged, this method warns and returns no metrics: the checkpoint itself
        may be intact. Without metrics it is never the best one.
        """
        path = self._path / f"{name}.json"
        content = read_with_retries(partial(_read_if_exists, path))
        if content is None:
            return {}
        try:
            return _metrics_of_json(content)
        except ValueError as error:
            warnings.warn(
                f"{self._request}: the metrics {str(path)!r} are damaged, so {name} is kept "
                f"without metrics: {error}",
                stacklevel=2,
            )
            return {}

    def _read_reason(self, name: str) -> str:
        """Return a clause about the bad tensor of an unhealthy checkpoint."""
        path = self._path / f"{name}.json"
        try:
            content = _read_if_exists(path) or b""
            return str(BadTensor(**json.loads(content)))
        # The file is missing or damaged, which is no error: it is only used for this clause.
        except (CheckpointError, ValueError, TypeError):
            return "its values are NaN or infinite"

    def write(self, contents: Mapping[str, str]) -> None:
        """Write files atomically. ``contents`` has the text of each file by name.

        Raises:
            CheckpointError: another owner has taken the folder.
        """
        self._lock.check_owner()
        for name, text in contents.items():
            # If the name is a link, the link is replaced, and not the file behind it.
            with atomic_write(self._path / name, follow_symlinks=False) as file:
                file.write(text.encode())

    def publish(self, texts: Mapping[str, str], stale_names: Iterable[str]) -> None:
        """Update the text files ``latest`` and ``best``, and then remove stale checkpoints.

        Args:
            texts: by the name of each text file, the name of the checkpoint to write into it. A
                text file that is not in ``texts`` is removed.
            stale_names: the names of the checkpoints to remove.

        Raises:
            CheckpointError: another owner has taken the folder.
        """
        changes: dict[str, str] = {}
        for title, name in texts.items():
            if name != self._text_contents.get(title):
                changes[title] = f"{name}\n"
        # Called even without changes: write() checks that this object still owns the folder.
        self.write(changes)
        for title in self._text_contents.keys() - texts.keys():
            (self._path / title).unlink()
        self._text_contents = dict(texts)
        for name in stale_names:
            self._remove(name)

    def _remove(self, name: str) -> None:
        """Delete a checkpoint, complete or not, and its metrics.

        A checkpoint or metrics that are missing are not an error: a killed job may have removed
        them, or not written them yet.
        """
        # Any: a CheckpointIO is declared to take a Path, and gets a RemotePath for a URL.
        path: Any = self._path / name
        with suppress(FileNotFoundError):
            if isinstance(path, Path) and path.is_symlink():
                # Removes the link. The checkpoint behind it is the user's.
                path.unlink()
            elif self._has_custom_io:
                self._io.remove(path)
            # The path tells the format of the checkpoint. self._io is the format of this job: the
            # job that saved the checkpoint may have used fabric's other format.
            elif path_type(path) == "directory":
                remove_folder(path)
            else:
                FullCheckpoint().remove(path)
        # The metrics go last, so that a kill in between leaves no checkpoint without its metrics.
        with suppress(FileNotFoundError):
            (self._path / f"{name}.json").unlink()


class _FolderLock:
    """The lock file of a folder, which names the one :class:`Checkpoints` object that saves there.

    The operating system's lock keeps other jobs out, if the file system has locks. The lock has two
    gaps. POSIX drops the lock as soon as the process closes any descriptor of the file, as a copy
    of the folder does. And the lock does not keep out a second object of the same process. So
    before each write into the folder, the owner checks that the file still names the owner.

    Args:
        request: the user's request, a text for errors.
        folder: the folder. It is created.
        job_files: closed at the end of the job. It gets the lock file.

    Raises:
        CheckpointError: another process has locked the folder.
    """

    def __init__(self, request: str, folder: Location, job_files: ExitStack) -> None:
        """Create and lock ``folder`` for one :class:`Checkpoints` object.

        ``request`` is the user's request, a text for errors. ``job_files`` gets the lock file. The
        lock ends when ``job_files`` is closed, at the end of the job.
        """
        self._request = request
        self._folder = folder
        self._process = f"process {os.getpid()} on {os.uname().nodename}"
        # The content of the lock file while this object owns the folder. The second line is a
        # random number, which tells the Checkpoints objects of one process apart.
        self._owner = f"{self._process}\n{secrets.token_hex(6)}".encode()
        if isinstance(folder, RemotePath):
            # An object store has no locks. The Checkpoints object that was made last owns the
            # folder. check_owner() of earlier Checkpoints objects raises.
            with atomic_write(folder / _LOCK) as file:
                file.write(self._owner)
            return
        require_folder(request, folder)
        folder.mkdir(parents=True, exist_ok=True)
        # The file stays open, and so locked, until the job ends. The mode "a" keeps the content:
        # the error below names the present owner. Without a buffer, other processes see the new
        # owner at once.
        self._file = open(folder / _LOCK, "a+b", buffering=0, opener=_open_no_link)  # noqa: SIM115
        job_files.enter_context(self._file)
        try:
            # Not flock(), whose lock would be kept by forked processes, such as the workers of a
            # loader, after this process has ended.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process has the lock: POSIX allows either of these errors.
        except (BlockingIOError, PermissionError) as error:
            process, _, _ = self._read_owner().decode().partition("\n")
            problem = f"{process} saves into it"
            raise CheckpointError(request, problem, expected="a folder for each job") from error
        except OSError as error:
            # The file system has no locks. The job goes on without one.
            text = f"{request}: no lock tells whether another job saves into it: {error}"
            warnings.warn(text, stacklevel=2)
        self._file.truncate(0)
        self._file.write(self._owner)

    def check_owner(self) -> None:
        """Raise a CheckpointError if another object or job has taken the folder."""
        owner = self._read_owner()
        if owner == self._owner:
            return
        process, _, _ = owner.decode(errors="replace").partition("\n")
        if process == self._process:
            raise CheckpointError(
                self._request,
                problem="a later call of fabric.checkpoints in this process saves into the folder",
                expected="one such object for a folder",
                suggestion="checkpoints.save(step, {'first': first, 'second': second}) of one "
                "object, or a folder for each",
            )
        raise CheckpointError(
            self._request,
            problem=f"another job has begun to save into the folder: {process}",
            expected="a folder for each job",
        )

    def _read_owner(self) -> bytes:
        """Return the content of the lock file."""
        if isinstance(self._folder, RemotePath):
            return (self._folder / _LOCK).read_bytes()
        # Not read_bytes(): to close a second descriptor of the file would drop the lock.
        return os.pread(self._file.fileno(), 1024, 0)


def _open_no_link(path: str, flags: int) -> int:
    """Return a descriptor of a file, as ``os.open`` does, or raise if ``path`` is a symbolic link.

    Used as ``opener`` of the lock file, which is truncated. Through a link, a file outside of the
    folder would be truncated.
    """
    return os.open(path, flags | os.O_NOFOLLOW, mode=0o666)


def _report_to_ray(metrics: dict[str, float], path: Location | None, rank: int) -> None:
    """Report metrics and a checkpoint to Ray Train, if this process is one of its workers.

    Collective: Ray waits for the report of every worker. The checkpoint stays where it is. Ray gets
    a folder with a ``checkpoint.json`` that contains its path.

    Args:
        metrics: the metrics, which Ray requires from every worker.
        path: the checkpoint, which rank 0 reports. None reports only metrics.
        rank: the rank of this process.
    """
    if RayEnvironment().detect(os.environ) is None:
        return
    request = "checkpoints.save in a worker of Ray Train"
    suggestion = 'pip install "torch-fabric[ray]", or unset RAY_JOB_ID'
    with MissingDependencyError.unless_installed(request, suggestion):
        from ray import train  # pyright: ignore[reportMissingImports]
    # report() copies the folder before it returns, so the folder is temporary.
    with TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0 and path is not None:
            Path(folder, "checkpoint.json").write_text(json.dumps({"path": str(path)}))
            checkpoint = train.Checkpoint.from_directory(folder)
        train.report(metrics, checkpoint=checkpoint)

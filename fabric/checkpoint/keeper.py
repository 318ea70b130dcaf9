"""Keeps the newest checkpoints of a run, and the best one, in a folder; restores the newest intact one.

[Note: files of a run] Each checkpoint has a unique name: ``00000017-step-3000`` is the 17th save. So no save overwrites
another, the names sort in the order of the saves even if a run goes back to an earlier step, and a checkpoint is valid
once :meth:`Fabric.save <fabric.Fabric.save>` has committed it. Its metrics are written before, to a file of the same
name with ``.json``. After the commit the text files ``latest`` and ``best`` get the names of these two checkpoints, and
only then are older checkpoints removed, each one before its metrics. Whenever a job dies, these two files name
checkpoints that exist, and the next job knows from the names alone what to remove.
"""

import fcntl
import json
import math
import operator
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, final

from fabric import errors
from fabric.checkpoint import atomic
from fabric.checkpoint.agreement import raise_on_any_rank_error as agreed
from fabric.checkpoint.async_save import PendingSave
from fabric.checkpoint.file import FullCheckpoint
from fabric.checkpoint.sharded import ShardedCheckpoint, clean, remove_folder
from fabric.checkpoint.sharded_reader import INDEX
from fabric.checkpoint.state import State, join_names
from fabric.checkpoint.storage import Location, RemotePath, locate
from fabric.communicators import Communicator
from fabric.environments import RayEnvironment
from fabric.errors import CheckpointError, ConfigurationError
from fabric.loggers import metrics_as_floats

__all__ = ["Checkpoints"]

_Best = tuple[str, Literal["min", "max"]] | None

_LOCK = ".lock"
_NAME = r"(\d{8}-step-\d+)"
_FILE = re.compile(rf"\.?{_NAME}(?:\.json)?(?:\.[0-9a-f]{{12}}\.tmp)?")


@final
class Checkpoints:
    """The newest ``keep`` checkpoints of a run, and the best one, in one folder; made by ``fabric.checkpoints``.

    A checkpoint is removed only after a newer one has been committed. A job that is killed at any moment leaves at
    least one that loads, if there was one, and at most ``keep + 2``; the next job removes everything else it leaves.
    Other files in the folder are not touched. Of several checkpoints of the same step the newest is kept. *Newest*
    means saved last, even if a run has gone back to an earlier step.

    The folder has two text files for shell scripts, ``latest`` and ``best``, with the names of these checkpoints.

    Collective, as are :meth:`save` and :meth:`restore`: every process must call them.

    Args:
        session: returns the session of the job, for a call of that name.
        folder: a folder for this run alone, which is created. May be a URL such as ``s3://...``.
        keep: how many to keep, besides the best one.
        best: the name of a metric, and whether the best value is the least (``"min"``) or the largest (``"max"``).

    Raises:
        ConfigurationError: ``keep`` or ``best`` is not valid.
        CheckpointError: another job saves into the folder, or it cannot be written.
    """

    def __init__(
        self, session: Callable[[str], Any], folder: str | os.PathLike[str], keep: int, best: _Best
    ) -> None:
        self._request = f"fabric.checkpoints({str(folder)!r}, keep={keep!r}, best={best!r})"
        self._session = session
        self._keep = keep
        self._best = best
        self._pending: PendingSave | None = None
        # text files by name; checkpoints to remove
        self._written = dict[str, str]()
        self._stale = list[str]()

        def check() -> Location:
            is_metric = best is None or (
                type(best) is tuple and len(best) == 2 and best[1] in ("min", "max")
            )
            if type(keep) is not int or keep < 1 or not is_metric:
                wrong = f"{keep=}" if is_metric else f"{best=}"
                expected = "keep=3, or any number of at least 1; best=('val_loss', 'min'), or 'max', or None"
                raise ConfigurationError(self._request, f"{wrong} is not valid", expected)
            return locate(folder)

        with session("checkpoints").checkpoints("setup") as checkpoints:
            checkpoints.join_pending()  # it may write to this folder
            self._communicator = checkpoints.communicator
            self._io = checkpoints.io
            files = checkpoints.saver.files
        self._is_own = isinstance(self._io, FullCheckpoint | ShardedCheckpoint)
        self._folder = agreed(self._communicator, self._request, check)
        is_first = self._communicator.rank == 0
        found = agreed(
            self._communicator, self._request, lambda: self._open(files) if is_first else {}
        )
        # By checkpoint, the oldest first; the same on all ranks.
        self._metrics: dict[str, dict[str, float]] = self._communicator.broadcast_object(found, 0)
        self._number = int(max(self._metrics, default="0").partition("-")[0])
        self._publish(self._communicator)

    @property
    def latest(self) -> Location | None:
        """The path of the newest checkpoint, or None. Waits for a background save, like :meth:`PendingSave.wait`."""
        return self._path("latest")

    @property
    def best(self) -> Location | None:
        """The path of the one with the best metric (the newest of equal ones), or None. Waits likewise."""
        return self._path("best")

    def save(
        self, step: int, state: State, metrics: Mapping[str, Any] | None = None, async_: bool = True
    ) -> PendingSave | None:
        """Save ``state`` as :meth:`Fabric.save <fabric.Fabric.save>` does, and then remove older checkpoints.

        Collective. With ``async_`` both run in the background, and the next save, ``teardown`` and the end of the
        process wait for them.

        Args:
            step: a number of at least 0, the same on every process; :meth:`restore` returns it.
            state: names and objects, as for ``Fabric.save``. Include what the loop needs to resume, such as its
                loaders; random states and the loss scale are added.
            metrics: names, and numbers or tensors of one element; those of rank 0 are kept. The metric that ``best``
                names is required, and must be the same on every process. None for a save without metrics, which is
                never the best one.
            async_: return as soon as everything has been copied in memory.

        Raises:
            ConfigurationError: the step or a metric is not as described; nothing has been written.
            CheckpointError: this save or the last one failed on a process; earlier checkpoints are untouched.
        """
        request = f"checkpoints.save({step!r}, ...) on rank {self._communicator.rank}"
        best = None if metrics is None or self._best is None else self._best[0]

        def check() -> tuple[int, float | None, dict[str, float]]:
            values = metrics_as_floats(metrics or {})
            value = None if best is None else values.get(best, math.nan)
            if operator.index(step) < 0 or value != value:
                expected = f"a step of at least 0, and a number for {best!r}; or no metrics"
                raise ConfigurationError(
                    request, f"the step is {step}, the metrics are {values}", expected
                )
            return operator.index(step), value, values

        def compare() -> None:
            checkpoints.check()
            if own[:2] != first[:2]:
                problem = f"the step and {best!r} are {own[:2]} here, and {first[:2]} on rank 0"
                expected = "the same on all ranks"
                suggestion = "metrics=fabric.all_reduce(metrics)"
                raise ConfigurationError(request, problem, expected, suggestion)

        with self._session("save").checkpoints("save") as checkpoints:
            own = agreed(self._communicator, request, check)
            first = self._communicator.broadcast_object(own, 0)
            self._number += 1
            name = f"{self._number:08}-step-{first[0]}"
            saver = replace(
                checkpoints, check=compare, commit=partial(self._commit, name, first[2])
            )
            self._pending = saver.save(self._folder / name, state, async_=async_)
        return self._pending

    def restore(self, state: MutableMapping[str, Any]) -> int | None:
        """Restore ``state`` from the newest intact checkpoint, as :meth:`Fabric.load <fabric.Fabric.load>` does.

        Collective; all processes restore the same one. Damaged ones are skipped, with a warning on rank 0; the restored
        one counts as the newest from then on.

        Returns:
            Its step; None if there is no checkpoint.

        Raises:
            CheckpointError: none is intact, or the newest intact one does not fit ``state``. Nothing has been changed.
        """
        passed: list[str] = []
        with self._session("load").checkpoints("load") as checkpoints:
            checkpoints.join_pending()
            for name in [*reversed(self._metrics)]:
                try:
                    checkpoints.load(self._folder / name, state)
                    break
                except (errors.CheckpointNotFoundError, errors.DamagedCheckpointError) as error:
                    passed.append(f"{self._folder / name} is passed over: {error.problem}")
                    self._metrics[name] = {}  # never the best one
            else:
                if passed:
                    raise CheckpointError(
                        f"restore from {str(self._folder)!r}",
                        join_names(passed),
                        "one that is whole",
                    )
                return None
        if passed and self._communicator.rank == 0:
            warnings.warn(f"{name} is restored; {join_names(passed)}", stacklevel=2)
        self._metrics[name] = self._metrics.pop(name)
        self._publish(self._communicator)
        return int(name.rpartition("-")[2])

    def _path(self, which: str) -> Location | None:
        if self._pending is not None and not self._pending.is_raised:
            self._pending.wait()
        name = self._names()[which]
        return None if name is None else self._folder / name

    def _names(self) -> dict[str, str | None]:
        """The checkpoints that the text files name."""
        metric, mode = self._best or ("", "min")
        values = {
            name: each.get(metric, math.nan) for name, each in reversed(self._metrics.items())
        }
        measured = (name for name in values if not math.isnan(values[name]))
        best = (max if mode == "max" else min)(measured, key=values.__getitem__, default=None)
        return {"latest": next(reversed(self._metrics), None), "best": best}

    @contextmanager
    def _commit(
        self, name: str, metrics: dict[str, float], communicator: Communicator
    ) -> Iterator[None]:
        """Rotation before and after a save, maybe in the background. Collective."""
        # Before the save too: a killed job may have left one checkpoint too many.
        self._rotate(communicator, {f"{name}.json": json.dumps(metrics)} if metrics else None)
        self._stale.append(name)  # in case it fails
        yield
        agreed(communicator, self._request, self._io.wait)
        self._stale.remove(name)
        self._metrics[name] = metrics
        self._rotate(communicator)
        step = int(name.rpartition("-")[2])
        _report_to_ray(self._folder / name, {"step": step, **metrics}, communicator.rank == 0)

    def _rotate(self, communicator: Communicator, texts: dict[str, str] | None = None) -> None:
        newest = {name.rpartition("-")[2]: name for name in self._metrics}.values()
        kept = {
            *[name for name in self._metrics if name in newest][-self._keep :],
            self._names()["best"],
        }
        self._stale += self._metrics.keys() - kept
        self._metrics = {name: each for name, each in self._metrics.items() if name in kept}
        self._publish(communicator, texts)

    def _publish(self, communicator: Communicator, texts: dict[str, str] | None = None) -> None:
        """Write the text files, ``latest`` and ``best`` among them, and then remove stale checkpoints. Collective."""

        def publish() -> None:
            if (
                isinstance(self._folder, RemotePath)
                and (self._folder / _LOCK).read_bytes() != self._owner
            ):
                raise CheckpointError(
                    self._request, "another job saves into it since", "a folder for each job"
                )
            for name, text in (self._names() | (texts or {})).items():
                if text is not None and text != self._written.get(name):
                    with atomic.atomic_write(self._folder / name) as target:
                        target.write(f"{text}\n".encode())
                    self._written[name] = text
            for name in self._stale:
                self._remove(name)

        agreed(communicator, self._request, publish if communicator.rank == 0 else bool)
        self._stale.clear()

    def _open(self, files: ExitStack) -> dict[str, dict[str, float]]:
        """Lock the folder, remove what killed jobs left in it, and return the metrics by checkpoint."""
        with atomic.write_errors(self._request):
            self._owner = _claim(self._request, self._folder, files)
            atomic.clear_temporaries(self._folder, rf"(?:latest|best|{_NAME}(?:\.json)?)")
            found = {
                match[1] for each in self._folder.iterdir() if (match := _FILE.fullmatch(each.name))
            }
            return {
                name: self._read(name)
                for name in sorted(found)
                if self._is_whole(name) or self._remove(name)
            }

    def _is_whole(self, name: str) -> bool:
        """Whether it was committed; finishes the cleanup of an interrupted save."""
        path = self._folder / name
        if not (self._is_own and path.is_dir()):
            return path.exists()
        atomic.clear_temporaries(path, re.escape(INDEX))
        with suppress(errors.DamagedCheckpointError):  # a damaged index, which a load reports
            clean(path)
        return (path / INDEX).is_file()

    def _remove(self, name: str) -> None:
        """Delete a checkpoint, complete or not, and then its metrics."""
        path: Any = self._folder / name
        remove = remove_folder if path.is_dir() else FullCheckpoint().remove
        with suppress(FileNotFoundError):
            (remove if self._is_own else self._io.remove)(path)
        with suppress(FileNotFoundError):
            (self._folder / f"{name}.json").unlink()

    def _read(self, name: str) -> dict[str, float]:
        path = self._folder / f"{name}.json"
        with atomic.read_errors(f"read {str(path)!r}"):
            return json.loads(path.read_bytes()) if path.exists() else {}


def _claim(request: str, folder: Location, files: ExitStack) -> bytes:
    """Lock a folder for this process; returns the new content of its lock file."""
    owner = f"process {os.getpid()} on {os.uname().nodename}".encode()
    if isinstance(
        folder, RemotePath
    ):  # no locks here: the last job owns it, and earlier ones notice
        with atomic.atomic_write(folder / _LOCK) as target:
            target.write(owner)
        return owner
    folder.mkdir(parents=True, exist_ok=True)
    lock = files.enter_context(open(folder / _LOCK, "a+b", 0))  # noqa: SIM115 - until the job ends
    try:
        # Not flock, whose locks forked processes, such as the workers of a loader, keep.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        lock.seek(0)
        raise CheckpointError(
            request, f"{lock.read().decode()} saves into it", "a folder for each job"
        ) from error
    except OSError as error:
        warnings.warn(
            f"{request}: no lock tells whether another job saves into it: {error}", stacklevel=2
        )
    lock.truncate(0)
    lock.write(owner)
    return owner


def _report_to_ray(path: Location, metrics: dict[str, float], is_first: bool) -> None:
    """Report a checkpoint and its metrics to Ray Train, if this is one of its workers. Collective.

    The checkpoint stays where it is: Ray's ``Result`` has a folder with a ``checkpoint.json`` that contains its path.
    """
    if RayEnvironment().detect(os.environ) is not None:
        suggestion = 'pip install "torch-fabric[ray]", or unset RAY_JOB_ID'
        with errors.MissingDependencyError.unless_installed(
            "checkpoints.save in a worker of Ray Train", suggestion
        ):
            from ray import train  # pyright: ignore[reportMissingImports]
        with TemporaryDirectory() as folder:
            Path(folder, "checkpoint.json").write_text(json.dumps({"path": str(path)}))
            train.report(
                metrics, checkpoint=train.Checkpoint.from_directory(folder) if is_first else None
            )

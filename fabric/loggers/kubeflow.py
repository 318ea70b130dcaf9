"""A logger that reports progress to Kubeflow Trainer.

The requests follow the guide "TrainJob Progress and Training Metrics" of Kubeflow Trainer 2.2.
"""

import json
import math
import os
import ssl
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any, final
from urllib.request import Request, urlopen

from fabric.errors import ConfigurationError

__all__ = ["KubeflowLogger"]

_INTERVAL = 5.0  # seconds between two requests; Kubeflow asks for no more requests than this
_REQUEST_TIMEOUT = 5.0  # seconds


@final
class KubeflowLogger:
    """A logger that reports progress and metrics to the status of a Kubeflow TrainJob.

    ``kubectl describe trainjob NAME`` then shows the percentage of the steps, the remaining time,
    and the latest value of each metric. Kubeflow Trainer 2.2 or newer is needed, with its feature
    gate ``TrainJobStatus``. Kubeflow then sets ``KUBEFLOW_TRAINER_SERVER_URL``. Where the variable
    is not set, as on a laptop, the logger does nothing.

    At most one request is sent in five seconds, by another thread, so that training does not wait.
    Only the first failed request causes a warning.

    Args:
        total_steps: the number of steps of the whole training. The ``step`` of a logged metric
            counts from 0 to this number.

    Raises:
        ConfigurationError: ``total_steps`` is less than one.
    """

    def __init__(self, total_steps: int) -> None:
        if total_steps < 1:
            raise ConfigurationError(
                f"KubeflowLogger(total_steps={total_steps})",
                problem="a training has one step at least",
            )
        self._total_steps = total_steps
        # None outside of Kubeflow: then the logger does nothing.
        self._url = os.environ.get("KUBEFLOW_TRAINER_SERVER_URL")
        self._values: dict[str, float] = {}  # the latest value of each metric
        self._step = 0
        # The first step that was logged, and when, on the monotonic clock. The remaining time is
        # estimated from the steps since then: a resumed job does not begin at step 0.
        self._first_step: int | None = None
        self._first_time = 0.0
        self._last_request_time = -math.inf
        # The thread that sends requests, and the last request that it was given.
        self._executor = ThreadPoolExecutor(max_workers=1)
        self._request: Future[None] | None = None
        self._has_warned = False

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record the values, and send the latest value of each metric if it is time.

        It is time if the last request was sent at least five seconds ago, and has ended.

        Args:
            metrics: the values by the names of the metrics.
            step: the training step. None keeps the progress as it is.
        """
        if self._url is None:
            return
        now = time.monotonic()
        self._values.update(metrics)
        if step is not None:
            self._step = step
            if self._first_step is None:
                self._first_step = step
                self._first_time = now
        is_sending = self._request is not None and not self._request.done()
        if is_sending or now - self._last_request_time < _INTERVAL:
            return
        self._last_request_time = now
        self._request = self._executor.submit(self._send, self._status(now))

    def finalize(self, status: str) -> None:
        """Send the last values, and wait for the request. Called at the end of the training.

        Args:
            status: ``"success"``, which is shown as 100 percent, or ``"failed"``.
        """
        if self._url is None:
            return
        if self._request is not None:
            self._request.result()
        if status == "success":
            self._step = self._total_steps
        # Sent by this thread, since no thread can be started while the interpreter exits.
        self._send(self._status(time.monotonic()))

    def _status(self, now: float) -> dict[str, Any]:
        """Return the ``trainerStatus`` of a request.

        Args:
            now: the time on the monotonic clock.
        """
        # A job may log more steps than it announced. The percentage must not be above 100.
        step = min(self._step, self._total_steps)
        metrics = [{"name": name, "value": str(value)} for name, value in self._values.items()]
        status: dict[str, Any] = {
            "progressPercentage": 100 * step // self._total_steps,
            "metrics": metrics,
            "lastUpdatedTime": datetime.now(UTC).isoformat(),
        }
        if self._first_step is not None and step > self._first_step:
            seconds_per_step = (now - self._first_time) / (step - self._first_step)
            remaining_steps = self._total_steps - step
            status["estimatedRemainingSeconds"] = round(remaining_steps * seconds_per_step)
        return status

    def _send(self, status: Mapping[str, Any]) -> None:
        """Send a status. Warn once if that fails."""
        try:
            # The variable holds the path of a file with the token. The file is read for each
            # request, since Kubernetes replaces the token from time to time.
            token_path = Path(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"])
            token = token_path.read_text(encoding="utf-8")
            request = Request(
                str(self._url),
                data=json.dumps({"trainerStatus": status}).encode(),
                headers={
                    "Authorization": f"Bearer {token.strip()}",
                    "Content-Type": "application/json",
                },
            )
            certificates = os.environ.get("KUBEFLOW_TRAINER_SERVER_CA_CERT")
            context = ssl.create_default_context(cafile=certificates)
            with urlopen(request, timeout=_REQUEST_TIMEOUT, context=context):
                pass
        # A KeyError means that the variable with the path of the token is not set.
        except (OSError, HTTPException, KeyError) as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"KubeflowLogger could not report the progress to {self._url}: {error!r}. "
                    "Training goes on, and later failures are not reported.",
                    stacklevel=2,
                )

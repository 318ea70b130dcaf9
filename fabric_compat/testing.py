"""The reasons for which tests of Lightning's clients are skipped."""

import operator
import os
import platform
import sys
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.imports import compare_version
from packaging.version import Version
from torch._dynamo.eval_frame import is_dynamo_supported


def _runif_reasons(
    *,
    min_cuda_gpus: int = 0,
    min_torch: str | None = None,
    max_torch: str | None = None,
    min_python: str | None = None,
    bf16_cuda: bool = False,
    tpu: bool = False,
    mps: bool | None = None,
    skip_windows: bool = False,
    standalone: bool = False,
    deepspeed: bool = False,
    dynamo: bool = False,
    linux_only: bool = False,
) -> tuple[list[str], dict[str, bool]]:
    """Return the reasons why a test is skipped, and the pytest markers that the options stand for.

    An option is a condition under which the test can run. The test runs if there is no reason.
    """
    has_mps = torch.backends.mps.is_available()
    is_alone = os.environ.get("PL_RUN_STANDALONE_TESTS", "0") == "1"
    # Whether there is a reason, by the reason.
    conditions: dict[str, bool] = {
        f"GPUs>={min_cuda_gpus}": torch.cuda.device_count() < min_cuda_gpus,
        **_conditions_of_versions(min_torch, max_torch, min_python),
        "CUDA device bf16": bf16_cuda and not _has_bf16_on_cuda(),
        "unimplemented on Windows": skip_windows and sys.platform == "win32",
        "TPU": tpu,
        "MPS": mps is True and not has_mps,
        "not MPS": mps is False and has_mps,
        "Standalone execution": standalone and not is_alone,
        "Deepspeed": deepspeed,
        "torch.dynamo": dynamo and not is_dynamo_supported(),
        "only linux": linux_only and sys.platform != "linux",
    }
    reasons = [reason for reason, is_reason in conditions.items() if is_reason]
    options = {"min_cuda_gpus": min_cuda_gpus, "tpu": tpu, "standalone": standalone}
    return reasons, {name: True for name, is_set in options.items() if is_set}


def _conditions_of_versions(
    min_torch: str | None, max_torch: str | None, min_python: str | None
) -> dict[str, bool]:
    """Return whether to skip a test, by the reason: the version that the test needs.

    A version that is None is no reason.
    """
    conditions: dict[str, bool] = {}
    # The version without a suffix such as ".dev", so that 2.14.0.dev is no older than 2.14.
    is_older = partial(compare_version, "torch", operator.lt, use_base_version=True)
    if min_torch is not None:
        reason = f"torch>={min_torch}, {torch.__version__} installed"
        conditions[reason] = is_older(min_torch)
    if max_torch is not None:
        reason = f"torch<{max_torch}, {torch.__version__} installed"
        conditions[reason] = not is_older(max_torch)
    if min_python is not None:
        python = Version(platform.python_version())
        conditions[f"python>={min_python}"] = python < Version(min_python)
    return conditions


def _has_bf16_on_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()

"""The laws of ``examples/testing`` find in other libraries what docs/testing.md says."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples" / "testing"
# The versions of the table in docs/testing.md, by the name of the file.
VERSIONS = {
    "torch": "2.13.0",
    "torchmetrics": "1.9.0",
    "lightning_fabric": "2.6.6",
    "accelerate": "1.15.0",
}
OUTCOMES = {
    "torch": "2 passed, 2 xfailed",
    "torchmetrics": "2 passed, 2 xfailed",
    "lightning_fabric": "4 passed, 4 xfailed",
    "accelerate": "4 passed, 6 xfailed",
}


@pytest.mark.slow
@pytest.mark.parametrize("library", OUTCOMES)
def test_the_laws_hold_except_where_the_page_says(library: str, tmp_path: Path) -> None:
    # The library is not imported here: some set environment variables.
    try:
        full_version = version(library.replace("_", "-"))
    except PackageNotFoundError:
        pytest.skip(f"{library} is not installed")
    # A build of torch has a suffix, such as +cpu.
    installed, _, _ = full_version.partition("+")
    if installed != VERSIONS[library]:
        pytest.skip(f"the page is about {library} {VERSIONS[library]}, and this is {installed}")
    file = EXAMPLES / f"test_{library}.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        capture_output=True,
        text=True,
        timeout=380,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert OUTCOMES[library] in done.stdout, done.stdout

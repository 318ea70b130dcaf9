"""`make test-engines`: install what the engines need, as root on Debian 12, and run the tests of each.

With arguments, of these engines alone. What cannot be installed, fails or is not done in time makes
the exit code 1.
"""

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LINES = [line.split() for line in (HERE / "packages.txt").read_text().splitlines()]
PACKAGES = {words[0]: words[1:] for words in LINES if words[0] != "#"}
# Seconds: all of it takes ten minutes on two cores that have nothing else to do, and a machine may
# be slow that day.
INSTALL = 480
ENGINE = 480
TOTAL = 1500
GRACE = 15
APT = ["apt-get", "-qq", "-o", "Acquire::Retries=5", "-o", "DPkg::Lock::Timeout=60"]
POLICY = Path(
    "/usr/sbin/policy-rc.d"
)  # whether a package may start its daemon; the tests start their own
VENV = ROOT / "build" / "engines"


def main(engines: list[str]) -> int:
    chosen = engines or list(PACKAGES)
    if unknown := set(chosen) - set(PACKAGES):
        print(
            f"test-engines: there is no {', '.join(sorted(unknown))}; ENGINES is some of: {' '.join(PACKAGES)}"
        )
        return 2
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # ends as by Ctrl-C, which removes what was made
    end = time.monotonic() + TOTAL
    if not install(
        sorted({package for engine in chosen for package in PACKAGES[engine]}),
        time.monotonic() + INSTALL,
    ):
        print(
            f"test-engines: could not install that. It takes root on Debian 12, and package servers.\n{__doc__}"
        )
        return 1
    failed = [engine for engine in chosen if not test(engine, min(end, time.monotonic() + ENGINE))]
    left_out = [engine for engine in PACKAGES if engine not in chosen]
    print(
        f"test-engines: failed: {', '.join(failed) or 'none'}; left out: {', '.join(left_out) or 'none'}",
        flush=True,
    )
    return int(bool(failed))


def install(packages: list[str], end: float) -> bool:
    """With apt-get, and what begins with a dot as an extra of this project; whether that succeeded."""
    extras = [package.strip(".[]") for package in packages if package.startswith(".")]
    debian = [
        *APT,
        "install",
        "--yes",
        "--no-install-recommends",
        *(name for name in packages if name[0] != "."),
    ]
    with _no_daemons():
        # What is there needs no network.
        is_there = _run(
            [*debian, "--no-download"], end, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if not is_there and not (_run([*APT, "update"], end) and _run(debian, end)):
            return False
    return not extras or _install_extras(extras, end)


@contextlib.contextmanager
def _no_daemons() -> Iterator[None]:
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


def _install_extras(extras: list[str], end: float) -> bool:
    """Into an environment over the project's, of which nothing is changed: torch stays as constraints.txt has it."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    if not _run([sys.executable, "-m", "venv", VENV], end):
        return False
    (packages,) = VENV.glob("lib/python*/site-packages")
    packages.joinpath("project.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    pip = [
        VENV / "bin" / "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints.txt",
    ]
    wanted = [requirement for extra in extras for requirement in declared[extra]]
    return _run([*pip, *os.environ.get("PIP_ARGS", "").split(), *wanted], end)


def test(engine: str, end: float) -> bool:
    """Whether the tests of an engine pass in time. All of their files go."""
    is_extra = any(package.startswith(".") for package in PACKAGES[engine])
    python = VENV / "bin" / "python" if is_extra else sys.executable
    seconds = max(1, int(end - time.monotonic()))
    print(f"test-engines: {engine}, in {seconds} s at most", flush=True)
    # A short name: sockets are in it, whose paths may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="e") as folder:
        # Ends with this process, whatever ends that.
        pytest = ["setpriv", "--pdeathsig", "INT", python, "-m", "pytest", "-v", "-m", "engines"]
        limits = [f"--session-timeout={seconds}", f"--basetemp={folder}/tests"]
        return _run(
            [*pytest, *limits, HERE / f"test_{engine}.py"],
            end + GRACE,
            env=os.environ | {"TMPDIR": folder},
        )


def _run(command: Sequence[object], end: float, **options: object) -> bool:
    """Whether a command succeeds before that time; then, or at Ctrl-C, it and all that it started are ended."""
    process = subprocess.Popen(
        [str(word) for word in command], cwd=ROOT, process_group=0, **options
    )
    try:
        return process.wait(max(0.0, end - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        print(f"test-engines: not done in time: {command}", flush=True)
        return False
    finally:
        for number in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(GRACE)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(128 + signal.SIGINT)

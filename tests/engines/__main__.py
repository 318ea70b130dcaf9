"""`make test-engines`: install what the engines need, as root on Debian 12, and run their tests.

With arguments, it runs only the tests of these engines. The exit code is 1 if an engine cannot be
installed, or if its tests fail or are not done in time.
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
# Limits in seconds. All tests take ten minutes on two idle cores, and a machine may be slow.
INSTALL = 480
ENGINE = 900
TOTAL = 2400
GRACE = 15
APT = ["apt-get", "-qq", "-o", "Acquire::Retries=5", "-o", "DPkg::Lock::Timeout=60"]
# This script says whether a package may start its daemon.
POLICY = Path("/usr/sbin/policy-rc.d")
VENV = ROOT / "build" / "engines"


def main(engines: list[str]) -> int:
    """Install and test these engines, or all of them; return the exit code."""
    packages = read_packages()
    chosen = engines or list(packages)
    unknown = ", ".join(sorted(set(chosen) - packages.keys()))
    if unknown:
        print(f"test-engines: there is no {unknown}; ENGINES is some of: {' '.join(packages)}")
        return 2
    # SIGTERM ends this process like Ctrl-C, and the context managers clean up.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end = time.monotonic() + TOTAL
    requirements: set[str] = set()
    for engine in chosen:
        requirements.update(packages[engine])
    if not install(sorted(requirements), time.monotonic() + INSTALL):
        print("test-engines: the installation failed.")
        print(f"It takes root on Debian 12, and package servers.\n{__doc__}")
        return 1
    failed = []
    for engine in chosen:
        python = sys.executable
        if has_extras(packages[engine]):
            python = str(VENV / "bin" / "python")
        if not test(engine, python, min(end, time.monotonic() + ENGINE)):
            failed.append(engine)
    left_out = [engine for engine in packages if engine not in chosen]
    failed_text = ", ".join(failed) or "none"
    left_out_text = ", ".join(left_out) or "none"
    print(f"test-engines: failed: {failed_text}; left out: {left_out_text}", flush=True)
    if failed:
        return 1
    return 0


def read_packages() -> dict[str, list[str]]:
    """Return the packages by engine. An extra of this project begins with a dot."""
    packages = {}
    for line in (HERE / "packages.txt").read_text().splitlines():
        engine, *names = line.split()
        if engine != "#":
            packages[engine] = names
    return packages


def has_extras(packages: list[str]) -> bool:
    return any(package.startswith(".") for package in packages)


def install(packages: list[str], end: float) -> bool:
    """Install Debian packages with apt-get and extras with pip; return whether that succeeded."""
    debian_packages = []
    extras = []
    for package in packages:
        if package.startswith("."):
            extras.append(package.strip(".[]"))
        else:
            debian_packages.append(package)
    with _no_daemons():
        if not _install_debian_packages(debian_packages, end):
            return False
    if not extras:
        return True
    return _install_extras(extras, end)


def _install_debian_packages(packages: list[str], end: float) -> bool:
    command = [*APT, "install", "--yes", "--no-install-recommends", *packages]
    # Packages that are installed need no network.
    offline = [*command, "--no-download"]
    if _run(offline, end, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        return True
    return _run([*APT, "update"], end) and _run(command, end)


@contextlib.contextmanager
def _no_daemons() -> Iterator[None]:
    """Forbid packages to start their daemons inside the block. The tests start the daemons."""
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
    """Install extras into an environment on top of the project's environment.

    The project's environment stays as it is, with the torch of constraints.txt.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = []
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    if not _run([sys.executable, "-m", "venv", VENV], end):
        return False
    [packages] = VENV.glob("lib/python*/site-packages")
    project_packages = sysconfig.get_path("purelib")
    add_folder = f"import site; site.addsitedir({project_packages!r})\n"
    (packages / "project.pth").write_text(add_folder)
    pip = [
        VENV / "bin" / "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints.txt",
    ]
    user_options = os.environ.get("PIP_ARGS", "").split()
    return _run([*pip, *user_options, *requirements], end)


def test(engine: str, python: str, end: float) -> bool:
    """Run the tests of an engine; return whether they pass in time. Their files are removed."""
    seconds = max(1, int(end - time.monotonic()))
    print(f"test-engines: {engine}, in {seconds} s at most", flush=True)
    # The name is short, because the folder holds sockets, whose paths may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="e") as folder:
        # With setpriv, pytest ends with this process, whatever ends this process.
        command = [
            "setpriv",
            "--pdeathsig",
            "INT",
            python,
            "-m",
            "pytest",
            "-v",
            "-m",
            "engines",
            "--timeout=600",
            f"--session-timeout={seconds}",
            f"--basetemp={folder}/tests",
            HERE / f"test_{engine}.py",
        ]
        return _run(command, end + GRACE, env=os.environ | {"TMPDIR": folder})


def _run(command: Sequence[object], end: float, **options: object) -> bool:
    """Return whether a command succeeds before this time.

    At this time, or at Ctrl-C, the command and its processes are ended.
    """
    words = [str(word) for word in command]
    process = subprocess.Popen(words, cwd=ROOT, process_group=0, **options)
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

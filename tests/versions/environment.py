"""An environment with one release of Python and torch."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

from tests.versions.stand_ins import replace_nvidia_packages

ROOT = Path(__file__).parents[2]
PINS = ROOT / "constraints.txt"
TORCH_PIN = re.compile(r"^torch==.*\n", re.MULTILINE)


class Versions(NamedTuple):
    """The versions of an environment.

    Attributes:
        python: such as ``"3.12"``.
        torch: such as ``"2.14"``, for the newest patch release of this version. ``"newest"`` stands
            for the newest release.
        dependencies: ``"pinned"``, for the versions in constraints.txt, or ``"newest"``.
    """

    python: str
    torch: str
    dependencies: str = "pinned"

    @property
    def name(self) -> str:
        """The name by which `make test-versions` knows the environment."""
        if self.dependencies == "newest":
            return "newest"
        return f"{self.python}-{self.torch}"


def oldest_torch() -> str:
    """Return the oldest release of torch that pyproject.toml allows, such as ``"2.12"``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [version] = re.findall(r"torch>=([\d.]+)", " ".join(project["dependencies"]))
    return version


def build_environment(versions: Versions, folder: Path) -> Path:
    """Create or update a virtual environment, and return its interpreter.

    The environment has the packages of `make install`, and this checkout.

    Args:
        versions: what to install.
        folder: the folder of the environment.

    Raises:
        SystemExit: this machine has no such Python.
        subprocess.CalledProcessError: an installation failed. It has printed the reason.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([find_python(versions.python), "-m", "venv", folder], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("")
    torch = f"torch=={versions.torch}.*"
    if versions.torch == "newest":
        torch = "torch"
    # Without its dependencies, of which some are replaced.
    pip_install(python, constraints, "--upgrade", "--no-deps", torch)
    [packages] = folder.glob("lib/python*/site-packages")
    replace_nvidia_packages(packages)
    pins = ""
    upgrade = ["--upgrade", "--upgrade-strategy=eager"]
    if versions.dependencies == "pinned":
        pins = TORCH_PIN.sub("", PINS.read_text())
        upgrade = []
    # The installed torch stays as it is.
    [information] = packages.glob("torch-*.dist-info")
    _, _, torch_version = information.stem.partition("-")
    constraints.write_text(f"{pins}torch=={torch_version}\n")
    pip_install(python, constraints, *upgrade, "-e", f"{ROOT}[dev]")
    return python


def pip_install(python: Path, constraints: Path, *arguments: str) -> None:
    """Install packages into the environment of an interpreter.

    Args:
        python: the interpreter.
        constraints: a file of constraints.
        arguments: the packages, and options of pip.
    """
    options = os.environ.get("PIP_ARGS", "").split()
    command = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    # This variable also replaces the constraints of pip's own configuration files, which may ask
    # for another torch.
    environment = os.environ | {"PIP_CONSTRAINT": str(constraints)}
    subprocess.run([*command, *options, *arguments], check=True, env=environment)


def find_python(version: str) -> str:
    """Return the path of a Python of this version, from PATH or from pyenv.

    Raises:
        SystemExit: this machine has no such Python.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = sorted(pyenv.glob(f"versions/{version}.*/bin/python"), reverse=True)
    in_path = shutil.which(f"python{version}")
    if in_path:
        candidates.insert(0, Path(in_path))
    for candidate in candidates:
        # A shim of pyenv is in PATH even if it leads to no Python.
        answer = subprocess.run([candidate, "-c", ""], capture_output=True)
        if answer.returncode == 0:
            return str(candidate)
    raise SystemExit(
        f"test-versions: there is no python{version} in PATH or under {pyenv}. Install it, as "
        f"with `pyenv install {version}` or `uv python install {version}`."
    )

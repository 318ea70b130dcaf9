"""Stand-ins for NVIDIA's packages, so that a CUDA build of torch imports without them.

On Linux, PyPI has only builds of torch that load NVIDIA's libraries, which take five times the disk
space of torch itself. Each function of a stand-in returns an error code, so that
``torch.cuda.is_available()`` is False.
"""

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

NVIDIA_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
NVIDIA_FUNCTION = re.compile(r"_*(cu|nv|nccl)")
# The line of torch/version.py that is None in a build for CPUs.
CUDA_VERSION = re.compile(r"(?<=^cuda: Optional\[str\] = )'.*'$", re.MULTILINE)
NVIDIA_REQUIREMENT = re.compile(r"^Requires-Dist: (cuda|nvidia|triton)\b.*\n", re.MULTILINE)
# A line of `readelf -d` about a library that has to be loaded.
NEEDED_LIBRARY = re.compile(r"NEEDED.*\[(?P<library>.*)\]")
# The lines of `readelf -V` about a library, and about a version that it has to define.
REQUIRED_VERSION = re.compile(r"File: (?P<library>\S+)|Name: (?P<version>\S+)")
# The library of functions whose symbols have no version. The other libraries have versions.
UNVERSIONED = "libnccl.so.2"
# cudaErrorInsufficientDriver
FUNCTION = "int {name}(void) {{ return 35; }}\n"

# The names of functions, by library and version.
Functions = Mapping[str, Mapping[str, Iterable[str]]]


def replace_nvidia_packages(packages: Path) -> None:
    """Remove torch's requirements of NVIDIA's packages, and build stand-ins for the libraries.

    Afterwards, torch claims to be a build for CPUs: it would warn that the package ``triton`` is
    missing. Does nothing if torch is a build for CPUs, or if this was done before.

    Args:
        packages: the ``site-packages`` folder of an environment with torch.
    """
    version_file = packages / "torch" / "version.py"
    version_text = version_file.read_text()
    if not CUDA_VERSION.search(version_text):
        return
    folder = packages / "torch" / "lib"
    libraries = sorted(folder.glob("*.so*"))
    with tempfile.TemporaryDirectory() as scratch:
        for name, functions in required_functions(libraries).items():
            build_library(folder / name, functions, Path(scratch))
    [metadata] = packages.glob("torch-*.dist-info/METADATA")
    metadata.write_text(NVIDIA_REQUIREMENT.sub("", metadata.read_text()))
    # Last, so that an interrupted call is done again.
    version_file.write_text(CUDA_VERSION.sub("None", version_text))


def required_functions(libraries: Iterable[Path]) -> Functions:
    """Return the functions that torch's libraries need of NVIDIA's, by library and version.

    Args:
        libraries: torch's own libraries.
    """
    functions: dict[str, dict[str, set[str]]] = {}
    library_of_version: dict[str, str] = {}
    own_names = {library.name for library in libraries}
    for library in libraries:
        for match in NEEDED_LIBRARY.finditer(output_of("readelf", "-dW", library)):
            name = match["library"]
            if NVIDIA_LIBRARY.match(name) and name not in own_names:
                functions.setdefault(name, defaultdict(set))
        library_of_version.update(required_versions(library))
    for version, name in list(library_of_version.items()):
        # A stand-in of an earlier call is not built again.
        if name not in functions:
            del library_of_version[version]
            continue
        # The loader looks for a version even if torch needs no function of it.
        functions[name][version] = set()
    for library in libraries:
        for line in output_of("nm", "-D", "--undefined-only", library).splitlines():
            symbol = line.split()[-1].replace("@@", "@")
            function, _, version = symbol.partition("@")
            if version in library_of_version:
                functions[library_of_version[version]][version].add(function)
            elif not version and NVIDIA_FUNCTION.match(function) and UNVERSIONED in functions:
                functions[UNVERSIONED][""].add(function)
    return functions


def required_versions(library: Path) -> dict[str, str]:
    """Return NVIDIA's library for each version of its symbols that a library of torch needs."""
    library_of_version: dict[str, str] = {}
    needed_library = ""
    for match in REQUIRED_VERSION.finditer(output_of("readelf", "-VW", library)):
        if match["library"]:
            needed_library = match["library"]
        elif NVIDIA_LIBRARY.match(needed_library):
            library_of_version[match["version"]] = needed_library
    return library_of_version


def build_library(path: Path, functions: Mapping[str, Iterable[str]], scratch: Path) -> None:
    """Build a library whose functions return an error code.

    Args:
        path: the file to write.
        functions: the names of the functions, by version.
        scratch: a folder for the sources.
    """
    source = scratch / "library.c"
    script = scratch / "library.map"
    definitions: list[str] = []
    versions: list[str] = []
    for version, names in functions.items():
        sorted_names = sorted(names)
        for name in sorted_names:
            definitions.append(FUNCTION.format(name=name))
        if version:
            exported = " ".join(f"{name};" for name in sorted_names)
            versions.append(f"{version} {{ global: {exported} }};\n")
    source.write_text("".join(definitions))
    script.write_text("".join(versions))
    command = ["gcc", "-w", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{path.name}"]
    if versions:
        command.append(f"-Wl,--version-script={script}")
    subprocess.run([*command, "-o", path, source], check=True)


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout

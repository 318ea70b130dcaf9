"""A check of `make wheel`: the sdist has all files of the repository; the wheel, both packages."""

import configparser
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("fabric", "fabric_compat")


def main(folder: Path) -> None:
    """Raise an error if one of the two archives in a folder is wrong."""
    [sdist] = folder.glob("*.tar.gz")
    [wheel] = folder.glob("*.whl")
    version = sdist.name.removesuffix(".tar.gz").partition("-")[2]
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    left_out = tracked() - packed
    assert not left_out, f"{sdist.name} lacks {sorted(left_out)}: see MANIFEST.in"

    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"torch_fabric-{version}.dist-info"
        metadata = message_from_bytes(archive.read(f"{info}/METADATA"))
        scripts = configparser.ConfigParser()
        scripts.read_string(archive.read(f"{info}/entry_points.txt").decode())
    folders = tuple(f"{package}/" for package in PACKAGES)
    # Names without a dot are folders.
    sources = {name for name in packed if name.startswith(folders) and "." in name}
    metadata_files = {name for name in names if name.startswith(info)}
    assert names == sources | metadata_files, sorted(names ^ sources)
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert f"{info}/licenses/LICENSE" in names
    assert dict(scripts["console_scripts"]) == {"fabric": "fabric.cli:main"}
    assert (metadata["Name"], metadata["Version"]) == ("torch-fabric", version)
    assert str(metadata.get_payload()).startswith("# torch-fabric")
    print(f"{sdist.name}: {len(packed)} files and folders; {wheel.name}: {len(names)} files")


def tracked() -> set[str]:
    """Return the files that git tracks. The set is empty outside a checkout."""
    if not (ROOT / ".git").exists():
        return set()
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))

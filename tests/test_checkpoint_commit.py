"""A file is the old one or the new one, whatever happens while it is written."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fabric.checkpoint.atomic import atomic_write
from fabric.errors import CheckpointError

WRITER = """
import sys
from fabric.checkpoint.atomic import atomic_write
with atomic_write(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


def start_writer(path: Path) -> subprocess.Popen[str]:
    """Start a process that writes one half of ``path``, and the other when its input is closed."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "writing\n"
    return writer


def write(path: Path, content: bytes) -> None:
    with atomic_write(path) as file:
        file.write(content)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_new_content_appears_under_the_name(tmp_path):
    write(tmp_path / "a" / "b" / "file", b"new")
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"new"
    assert names(tmp_path / "a" / "b") == ["file"]


def test_a_save_leaves_no_file_open(tmp_path):
    # A job that saves every hour would run out of descriptors.
    write(tmp_path / "file", b"old")
    descriptors = os.listdir("/proc/self/fd")
    write(tmp_path / "file", b"new")
    assert os.listdir("/proc/self/fd") == descriptors


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_error_while_writing_leaves_the_old_file_and_nothing_else(tmp_path, error):
    write(tmp_path / "file", b"old")
    with pytest.raises(error):  # noqa: PT012, SIM117 - the block is what is under test
        with atomic_write(tmp_path / "file") as file:
            file.write(b"half")
            raise error
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_readers_see_the_old_file_until_the_end(tmp_path):
    write(tmp_path / "file", b"old")
    with atomic_write(tmp_path / "file") as file:
        file.write(b"new")
        file.flush()
        assert (tmp_path / "file").read_bytes() == b"old"
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_mode_follows_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        write(tmp_path / "file", b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


def test_temporary_of_a_killed_process_is_cleared_by_the_next_save(tmp_path):
    write(tmp_path / "file", b"old")
    with start_writer(tmp_path / "file") as writer:
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=150)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert len(names(tmp_path)) == 2
    write(tmp_path / "file", b"new")
    assert names(tmp_path) == ["file"]


def test_temporary_of_a_living_process_is_left_alone(tmp_path):
    with start_writer(tmp_path / "file") as writer:
        write(tmp_path / "file", b"mine")
        assert len(names(tmp_path)) == 2
        assert writer.stdin is not None
        writer.stdin.close()
        assert writer.wait(timeout=150) == 0
    assert (tmp_path / "file").read_bytes() == b"half"
    assert names(tmp_path) == ["file"]


def test_files_of_similar_names_are_not_taken_for_stale_ones(tmp_path):
    similar_names = [".file.best.0123456789ab.tmp", ".file.tmp", ".file.notes.tmp", "file.tmp"]
    for name in similar_names:
        (tmp_path / name).touch()
    write(tmp_path / "file", b"new")
    assert names(tmp_path) == sorted([*similar_names, "file"])


def test_symbolic_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "file")
    for content in (b"one", b"two"):
        write(tmp_path / "link", content)
        assert (tmp_path / "disk" / "file").read_bytes() == content
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "disk") == ["file"]


def test_open_reader_keeps_the_file_that_it_opened(tmp_path):
    write(tmp_path / "file", b"old")
    with open(tmp_path / "file", "rb") as reader:
        write(tmp_path / "file", b"new")
        assert reader.read() == b"old"


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (".", "a folder"),
        ("taken/file", "could not be written"),
        ("n" * 300, "could not be written"),
    ],
    ids=["folder", "file as folder", "long name"],
)
def test_refusals_say_what_is_wrong_and_what_to_write(tmp_path, path, wrong):
    (tmp_path / "taken").touch()
    with pytest.raises(CheckpointError) as raised, atomic_write(tmp_path / path):
        pytest.fail("the block must not be entered")
    error = raised.value
    assert wrong in error.problem
    assert error.request
    assert names(tmp_path) == ["taken"]

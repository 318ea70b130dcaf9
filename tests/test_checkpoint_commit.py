"""A file is the old one or the new one, whatever happens while it is written."""

import os
import signal
import stat
from pathlib import Path

import pytest

from fabric.checkpoint.atomic import atomic_write
from fabric.errors import CheckpointError, RankFailedError
from tests.ranks import in_another_process


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


def test_the_content_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    # A rename may reach the disk before the content, and the power may fail in between.
    path = tmp_path / "file"
    flushed = []

    def record(descriptor: int) -> None:
        flushed.append((os.fstat(descriptor).st_size, path.read_bytes()))

    write(path, b"old")
    monkeypatch.setattr(os, "fsync", record)
    write(path, b"new content")
    assert flushed[0] == (len(b"new content"), b"old")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_mode_follows_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        write(tmp_path / "file", b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


def write_half_and_die(path: Path) -> None:
    with atomic_write(path) as file:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def test_temporary_of_a_killed_process_is_cleared_by_the_next_save(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, b"old")
    with pytest.raises(RankFailedError, match="was killed by SIGKILL"):
        in_another_process(write_half_and_die, path)
    assert path.read_bytes() == b"old"
    assert len(names(tmp_path)) == 2
    write(path, b"new")
    assert names(tmp_path) == ["file"]


def test_temporary_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_write(path) as file:
        file.write(b"half")
        file.flush()
        in_another_process(write, path, b"of the other process")
        assert path.read_bytes() == b"of the other process"
        assert len(names(tmp_path)) == 2
    assert path.read_bytes() == b"half"
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
        ("taken/file", "is a file"),
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

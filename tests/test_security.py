"""The promises of SECURITY.md: loading runs no code, and jobs open no ports and tell no secrets."""

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.checkpoint import ShardedCheckpoint
from fabric.cli import main
from fabric.errors import CheckpointError, ConfigurationError, UnsafeCheckpointError
from fabric.strategies import SingleDeviceStrategy
from tests.ranks import outcome

SCRIPT = Path(__file__).parent / "scripts" / "security" / "train.py"
SECRET = "hunter2-is-nobody's-business"


class Payload:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def fabric_with_format(checkpoint_io: Any) -> Fabric:
    strategy = SingleDeviceStrategy(accelerator="cpu", checkpoint_io=checkpoint_io)
    return Fabric(strategy=strategy)


@pytest.fixture
def ran(tmp_path) -> Path:
    """Return the path of the folder that a payload makes when it runs."""
    return tmp_path / "ran"


@pytest.fixture
def fabric():
    with Fabric(accelerator="cpu", devices=1) as fabric:
        fabric.launch()
        yield fabric


@pytest.fixture
def folder(tmp_path) -> Path:
    """Save a sharded checkpoint and return its path."""
    ShardedCheckpoint().save({"model": {"weight": torch.ones(2)}, "step": 3}, tmp_path / "folder")
    return tmp_path / "folder"


def planted(folder: Path, payload: Payload) -> Iterator[Path]:
    """Put a pickle that runs code in the place of each file of a copy of the folder, and beside."""
    shards = [file.name for file in folder.glob("rank-*")]
    for name in ["index.json", ".metadata", "skeleton.pt", *shards]:
        path = folder.parent / "attacked" / name
        if path.parent.exists():
            shutil.rmtree(path.parent)
        shutil.copytree(folder, path.parent)
        path.write_bytes(pickle.dumps(payload))
        yield path


def test_a_payload_in_a_folder_is_never_run(fabric, folder, ran, capsys):
    refused_files = 0
    for path in planted(folder, Payload(ran)):
        attacked = path.parent
        state = {"model": None, "step": None}
        text = outcome(lambda path=attacked, state=state: fabric.load(path, state))
        exit_code = main(["consolidate", str(attacked)])
        if text == "fine":
            assert exit_code == 0
        else:
            assert text.startswith(("CheckpointError", "DamagedCheckpointError"))
            assert exit_code == 2
            refused_files += 1
        # A folder of fabric never needs the option.
        assert "weights_only=False" not in text
        assert "weights_only=False" not in capsys.readouterr().err
        assert not ran.exists()
    # A file that is not of the checkpoint is never opened.
    assert refused_files == len(list(folder.iterdir()))


def test_a_file_behind_a_link_in_a_folder_is_used_only_with_the_checksum_of_the_index(
    fabric: Fabric, folder: Path, tmp_path: Path
) -> None:
    [shard] = folder.glob("rank-*")
    moved = tmp_path / "moved"
    shard.rename(moved)
    shard.symlink_to(moved)
    weight = fabric.load(folder)["model"]["weight"]
    assert weight.tolist() == [1.0, 1.0]
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for link in (shard, folder / "index.json"):
        for target in (secret, pipe):
            link.unlink()
            link.symlink_to(target)
            text = outcome(lambda: fabric.load(folder))
            assert text.startswith(("CheckpointNotFoundError", "DamagedCheckpointError"))
            assert SECRET not in text


def test_a_payload_in_a_file_runs_only_when_the_caller_trusts_it(fabric, tmp_path, ran):
    path = tmp_path / "file.pt"
    torch.save({"config": Payload(ran), "step": 3}, path)
    with pytest.raises(UnsafeCheckpointError, match=r"mkdir[\s\S]*weights_only=False"):
        fabric.load(path, weights_only=None)
    assert not ran.exists()
    assert fabric.load(path, weights_only=False)["step"] == 3
    assert ran.exists()


def test_a_format_of_the_user_may_hold_code_if_it_takes_the_trust(tmp_path, ran):
    class PlainFormat:
        """A format without code."""

        save = staticmethod(torch.save)

        def wait(self):
            """Do nothing: this test saves nothing in the background."""

        def load(self, path):
            return torch.load(path, weights_only=True)

    class CodeFormat(PlainFormat):
        """A format that runs code for a caller who trusts the file."""

        def load(self, path, *, weights_only=True):
            return torch.load(path, weights_only=weights_only)

    path = tmp_path / "file.pt"
    torch.save({"config": Payload(ran), "step": 3}, path)
    fabric = fabric_with_format(PlainFormat())
    with pytest.raises(ConfigurationError, match="PlainFormat: this format never holds code"):
        fabric.load(path, weights_only=False)
    with fabric_with_format(CodeFormat()) as fabric:
        with pytest.raises(pickle.UnpicklingError, match="mkdir"):
            fabric.load(path)
        assert not ran.exists()
        assert fabric.load(path, weights_only=False)["step"] == 3
    assert ran.exists()


def test_a_payload_in_a_bare_state_dict_runs_only_when_the_caller_trusts_it(fabric, tmp_path, ran):
    path = tmp_path / "file.pt"
    model = nn.Linear(2, 1)
    torch.save({**model.state_dict(), "_extra": Payload(ran)}, path)
    with pytest.raises(UnsafeCheckpointError, match="mkdir"):
        fabric.load_raw(path, nn.Linear(2, 1))
    assert not ran.exists()
    loaded = nn.Linear(2, 1)
    fabric.load_raw(path, loaded, strict=False, weights_only=False)
    assert torch.equal(loaded.weight, model.weight)


def test_trust_brings_objects_and_their_own_errors(fabric, tmp_path):
    path = tmp_path / "file.pt"
    torch.save({"model": nn.Linear(2, 1)}, path)
    assert isinstance(fabric.load(path, weights_only=False)["model"], nn.Linear)
    with pytest.raises(CheckpointError, match="model"):
        fabric.load(path, {"model": nn.Linear(2, 1)}, weights_only=False)
    torch.save({"missing": Payload(tmp_path / "no" / "such" / "folder")}, path)
    with pytest.raises(FileNotFoundError, match="such"):
        fabric.load(path, weights_only=False)


def test_trust_has_no_meaning_for_a_folder(fabric, folder):
    with pytest.raises(ConfigurationError, match="never holds code"):
        fabric.load(folder, weights_only=False)


@pytest.mark.parametrize(
    "launcher",
    [
        "fork",
        # These connect their ranks by the same code.
        pytest.param("fabric run", marks=pytest.mark.slow),
        pytest.param("spawn", marks=pytest.mark.slow),
        pytest.param("popen", marks=[pytest.mark.slow, pytest.mark.soak]),
        pytest.param("forkserver", marks=[pytest.mark.slow, pytest.mark.soak]),
    ],
)
def test_a_job_stays_on_its_machine_and_its_report_tells_no_secrets(launcher):
    if launcher == "fabric run":
        command = ["-m", "fabric", "run", "--devices", "2", "--accelerator", "cpu", str(SCRIPT)]
    else:
        command = [str(SCRIPT), launcher]
    completed = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TESTER": str(os.getpid()), "API_KEY": SECRET},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert completed.stderr.rstrip().endswith("ValueError: the cause")
    assert SECRET not in completed.stdout
    assert SECRET not in completed.stderr
    report = json.loads(completed.stdout.partition("ADDRESSES ")[2].splitlines()[0])
    for rank in report["ranks"]:
        assert report["used"][str(rank)], "the ranks talk through sockets"
    for addresses in report["used"].values():
        for host, *_ in addresses:
            assert ip_address(host).is_loopback


def test_the_check_of_addresses_sees_a_wide_socket():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        hosts = []
        for connection in psutil.Process().net_connections("inet"):
            if connection.laddr.port == port:
                hosts.append(connection.laddr.ip)
    (host,) = hosts
    assert not ip_address(host).is_loopback


def test_the_error_of_a_file_with_a_class_suggests_the_safe_way_first(tmp_path: Path) -> None:
    torch.save({"net": nn.Linear(2, 1)}, tmp_path / "net.pt")
    with Fabric(accelerator="cpu", devices=1) as fabric:
        text = outcome(lambda: fabric.load(tmp_path / "net.pt"))
    safe = text.find("add_safe_globals")
    unsafe = text.find("whose author you trust, weights_only=False")
    assert -1 < safe < unsafe

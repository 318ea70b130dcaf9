"""What SECURITY.md promises: loading runs no code, a job of one machine stays on it, and reports tell no secrets."""

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

import psutil
import pytest
import torch
from torch import nn

from fabric import Fabric
from fabric.checkpoint import ShardedCheckpoint
from fabric.cli import main
from fabric.errors import CheckpointError, ConfigurationError, UnsafeCheckpointError
from tests.ranks import outcome

SCRIPT = Path(__file__).parent / "scripts" / "security" / "train.py"
SECRET = "hunter2-is-nobody's-business"


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def ran(tmp_path) -> Path:
    """What is there once a payload has run."""
    return tmp_path / "ran"


@pytest.fixture
def fabric():
    with Fabric(accelerator="cpu", devices=1) as fabric:
        fabric.launch()
        yield fabric


@pytest.fixture
def folder(tmp_path) -> Path:
    """A sharded checkpoint."""
    ShardedCheckpoint().save({"model": {"weight": torch.ones(2)}, "step": 3}, tmp_path / "folder")
    return tmp_path / "folder"


def planted(folder: Path, payload: Payload) -> Iterator[Path]:
    """Pickles that run code, in place of each file of a folder and beside them."""
    for name in [
        "index.json",
        ".metadata",
        "skeleton.pt",
        *(file.name for file in folder.glob("rank-*")),
    ]:
        path = folder.parent / "attacked" / name
        if path.parent.exists():
            shutil.rmtree(path.parent)
        shutil.copytree(folder, path.parent)
        path.write_bytes(pickle.dumps(payload))
        yield path


def test_a_payload_in_a_folder_is_never_run(fabric, folder, ran, capsys):
    refused = 0
    for path in planted(folder, Payload(ran)):
        text = outcome(lambda: fabric.load(path.parent, {"model": None, "step": None}))  # noqa: B023 - called at once
        assert main(["consolidate", str(path.parent)]) == (0 if text == "fine" else 2)
        assert "weights_only=False" not in text + capsys.readouterr().err, (
            "a folder of fabric's never needs it"
        )
        refused += text.startswith(("CheckpointError", "DamagedCheckpointError"))
        assert not ran.exists()
    assert refused == len(list(folder.iterdir())), "what is not of the checkpoint is never opened"


def test_a_payload_in_a_file_runs_only_when_the_caller_trusts_it(fabric, tmp_path, ran):
    path = tmp_path / "file.pt"
    torch.save({"config": Payload(ran), "step": 3}, path)
    with pytest.raises(UnsafeCheckpointError, match=r"mkdir[\s\S]*weights_only=False"):
        fabric.load(path, weights_only=None)
    assert not ran.exists()
    assert fabric.load(path, weights_only=False)["step"] == 3
    assert ran.exists()


def test_a_bare_state_dict_is_read_likewise(fabric, tmp_path, ran):
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


# The slow ones connect their ranks by the same code.
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("fabric run", "spawn", "fork", "forkserver")
]


@pytest.mark.parametrize("launcher", ["popen", *SLOW])
def test_a_job_stays_on_its_machine_and_its_report_tells_no_secrets(tmp_path, launcher):
    command = ["-m", "fabric", "run", "--devices", "2", "--accelerator", "cpu", str(SCRIPT)]
    done = subprocess.run(
        [sys.executable, *(command if launcher == "fabric run" else [str(SCRIPT), launcher])],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TESTER": str(os.getpid()), "API_KEY": SECRET},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stderr.rstrip().endswith("ValueError: the cause")
    assert SECRET not in done.stdout + done.stderr
    told = json.loads(done.stdout.partition("ADDRESSES ")[2].splitlines()[0])
    assert all(told["used"][str(rank)] for rank in told["ranks"]), "the ranks talk through sockets"
    assert not [
        address
        for used in told["used"].values()
        for address in used
        if not ip_address(address[0]).is_loopback
    ]


def test_a_wide_socket_would_be_seen():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        (seen,) = [
            c.laddr.ip for c in psutil.Process().net_connections("inet") if c.laddr.port == port
        ]
    assert not ip_address(seen).is_loopback


def test_the_error_of_a_file_with_a_class_suggests_the_safe_way_first(tmp_path: Path) -> None:
    torch.save({"net": nn.Linear(2, 1)}, tmp_path / "net.pt")
    with Fabric(accelerator="cpu", devices=1) as fabric:
        text = outcome(lambda: fabric.load(tmp_path / "net.pt"))
    safe = text.find("add_safe_globals")
    unsafe = text.find("whose author you trust, weights_only=False")
    assert -1 < safe < unsafe

"""Two hosts on this machine: network namespaces with names and addresses, joined by a cable."""

import os
import subprocess
from pathlib import Path
from typing import Any

import psutil

__all__ = ["ADDRESSES", "Hosts"]

ADDRESSES = {"host-a": "10.77.0.1", "host-b": "10.77.0.2"}
# The hosts share a namespace of processes and of mounts, with a /run folder. The namespace ends
# with its first process, which ends with this process. The first process is a shell that waits for
# a command, and so collects the orphans of the namespace.
_SETUP = """
set -e
mount -t tmpfs run /run
mount --bind "$1" /etc/hosts
ip netns add host-a
ip netns add host-b
ip link add eth0 netns host-a type veth peer name eth0 netns host-b
ip -n host-a address add "$2/24" dev eth0
ip -n host-b address add "$3/24" dev eth0
for host in host-a host-b; do
    ip -n $host link set lo up
    ip -n $host link set eth0 up
done
sleep infinity &
echo ready
wait
"""
_ENTER = 'hostname "$0" && cd "$1" && shift && exec "$@"'


class Hosts:
    """Two hosts, until the block ends.

    The hosts share all files, and see the processes of each other.

    Args:
        folder: The folder for the file of host names.
    """

    def __init__(self, folder: Path) -> None:
        names = folder / "hosts"
        lines = ["127.0.0.1 localhost"]
        for host, address in ADDRESSES.items():
            lines.append(f"{address} {host}")
        names.write_text("\n".join(lines) + "\n")
        isolated = [
            "unshare",
            "--pid",
            "--mount",
            "--ipc",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        self._first = subprocess.Popen(
            [
                "setpriv",
                "--pdeathsig",
                "KILL",
                *isolated,
                "sh",
                "-c",
                _SETUP,
                "sh",
                names,
                *ADDRESSES.values(),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._first.stdout
        if self._first.stdout.readline() != "ready\n":
            _, errors = self._first.communicate()
            raise OSError(f"two hosts take root, and in docker --privileged: {errors}")
        [shell] = psutil.Process(self._first.pid).children()
        self._started: list[subprocess.Popen[str]] = []
        self._enter = [
            "nsenter",
            "--target",
            str(shell.pid),
            "--pid",
            "--mount",
            "--ipc",
            "ip",
            "netns",
            "exec",
        ]

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        self._first.kill()
        self._first.communicate(timeout=180)
        for process in self._started:
            process.communicate(timeout=180)

    def start(
        self, host: str, *command: object, cwd: object = os.curdir, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command on a host. The end of the block kills the command if it still runs."""
        enter = [
            *self._enter,
            host,
            "unshare",
            "--uts",
            "sh",
            "-c",
            _ENTER,
            host,
            os.path.abspath(str(cwd)),
        ]
        process = subprocess.Popen(
            [*enter, *map(str, command)], stdin=subprocess.DEVNULL, text=True, **options
        )
        self._started.append(process)
        return process

    def run(
        self, host: str, *command: object, seconds: int = 300, code: int = 0, **options: Any
    ) -> str:
        """Run a command on a host, and return what the command writes.

        Fail unless the command ends within so many seconds, with this exit code.
        """
        limit = ["timeout", "--kill-after", "5", seconds]
        process = self.start(
            host, *limit, *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
        )
        output, _ = process.communicate()
        failure = f"exit code {process.returncode} (124: not in time) of {command}:\n{output}"
        assert process.returncode == code, failure
        return output

    def kill(self, host: str) -> None:
        """Kill all processes of a host, until the host has none."""
        # A process of the list may end by itself before kill reaches it, which is no failure.
        kill_all = f"ip netns pids {host} | xargs --no-run-if-empty kill -9 || true"
        wait = f'while [ -n "$(ip netns pids {host})" ]; do {kill_all}; sleep 0.01; done'
        self.run("host-a", "sh", "-c", wait, seconds=60)

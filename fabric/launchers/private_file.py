"""A file of one launch, for what its processes do not send through a pipe."""

import os
import sys
import tempfile
from typing import Any

__all__ = ["PrivateFile"]


class PrivateFile:
    """A file that other users cannot open, and that the system removes when this process ends.

    Attributes:
        path: the path with which other processes of the same user open the file.
    """

    def __init__(self) -> None:
        self._file = self._open_file()
        if sys.platform == "linux":
            # The process id of /proc is not always that of os.getpid(): in a container, /proc may
            # show the ids of the host.
            process_id = os.readlink("/proc/self")
            self.path = f"/proc/{process_id}/fd/{self._file.fileno()}"
        else:
            self.path = self._file.name

    def _open_file(self) -> Any:
        """Return a new open file.

        On Linux the file has no name in the file system. Its path is in /proc/<pid>/fd, which other
        users cannot read.
        """
        if sys.platform != "linux":
            return tempfile.NamedTemporaryFile(prefix="fabric-")
        if hasattr(os, "memfd_create"):
            return open(os.memfd_create("fabric"), "rb")
        # Some interpreters, for example from conda, are built without memfd_create.
        return tempfile.TemporaryFile()

    def close(self) -> None:
        """Close the file, which removes it."""
        self._file.close()

"""A file of one launch, for what its processes do not send through a pipe."""

import os
import sys
import tempfile
from typing import Any

__all__ = ["PrivateFile"]


class PrivateFile:
    """A file that other users cannot open, and that disappears with this process, even if killed.

    Attributes:
        path: the path that processes of the same user open.
    """

    def __init__(self) -> None:
        self._file = self._open_file()
        if sys.platform == "linux":
            # os.getpid() is not used: in a container, /proc may show the process ids of an outer
            # namespace.
            self.path = f"/proc/{os.readlink('/proc/self')}/fd/{self._file.fileno()}"
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
        # Some interpreters, such as some of conda's, are built for a C library without
        # memfd_create.
        return tempfile.TemporaryFile()

    def close(self) -> None:
        """Close the file, which removes it."""
        self._file.close()

"""A file of one launch, for what its processes do not send through a pipe."""

import os
import sys
import tempfile
from typing import Any

__all__ = ["PrivateFile"]


class PrivateFile:
    """A file that other users cannot open, and that the system removes when this process ends.

    Args:
        is_named: whether the file has a name in the folder for temporary files, also on Linux. The
            path then belongs to no other file after :meth:`close`, but the file stays if this
            process is killed.

    Attributes:
        path: the path with which other processes of the same user open the file.
    """

    def __init__(self, *, is_named: bool = False) -> None:
        """Open a new file."""
        # Only Linux has a path in /proc for an open file.
        has_path_in_proc = sys.platform == "linux" and not is_named
        self._file = self._open_file(has_path_in_proc)
        if has_path_in_proc:
            # The process id of /proc is not always that of os.getpid(): in a container, /proc may
            # show the ids of the host.
            process_id = os.readlink("/proc/self")
            self.path = f"/proc/{process_id}/fd/{self._file.fileno()}"
        else:
            self.path = self._file.name

    def _open_file(self, has_path_in_proc: bool) -> Any:
        """Return a new open file.

        Args:
            has_path_in_proc: whether the file has no name in the file system. Its path is then in
                /proc/<pid>/fd, which other users cannot read.
        """
        if not has_path_in_proc:
            return tempfile.NamedTemporaryFile(prefix="fabric-")
        if hasattr(os, "memfd_create"):
            return open(os.memfd_create("fabric"), "rb")
        # Some interpreters, for example from conda, are built without memfd_create.
        return tempfile.TemporaryFile()

    def close(self) -> None:
        """Close the file, which removes it."""
        self._file.close()

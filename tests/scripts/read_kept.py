"""Read what the texts of a folder of checkpoints name, in a tight loop, while another process saves.

Prints the number of reads that failed although the text had moved by less than two saves.
"""

import sys
from pathlib import Path

from fabric.checkpoint import FullCheckpoint, ShardedCheckpoint
from fabric.errors import CheckpointError

FORMATS = {"file": FullCheckpoint(), "shards": ShardedCheckpoint()}


def named(text: Path) -> str:
    return text.read_text().strip()


def number_of(name: str) -> int:
    """Return the number of a save, with which the name of its checkpoint begins."""
    return int(name.partition("-")[0])


def main(folder: Path, form: str, reads: int) -> None:
    failures = 0
    print("ready", flush=True)
    for read in range(reads):
        text = folder / ("latest", "best")[read % 2]
        name = named(text)
        try:
            state = FORMATS[form].load(folder / name)
            assert state["step"] == int(name.rpartition("-")[2])
        except CheckpointError:
            # A reader that has slept for two saves comes too late.
            if number_of(named(text)) < number_of(name) + 2:
                failures += 1
    print(failures)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))

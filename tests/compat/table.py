"""The imports of Lightning Fabric that resolve.

``python -m tests.compat.table`` writes the table of docs/migrate/lightning-fabric.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from fabric_compat.missing import Missing

LIST = Path(__file__).parent / "imports.txt"
PAGE = Path(__file__).parents[2] / "docs" / "migrate" / "lightning-fabric.md"
BEGIN = "<!-- imports: begin -->\n"
END = "<!-- imports: end -->\n"
# Words in the names of hardware and libraries that are not supported, and of the Trainer's classes.
# These names say what to use.
UNSUPPORTED_WORDS = (
    "xla",
    "deepspeed",
    "bitsandbytes",
    "trainer",
    "earlystopping",
    "modelcheckpoint",
    "litlogger",
)


@dataclass
class Counts:
    """The numbers of imports in a row of the table.

    Attributes:
        imports: all imports.
        resolved: those that resolve.
        unsupported: those of hardware, libraries and classes that are not supported.
    """

    imports: int = 0
    resolved: int = 0
    unsupported: int = 0

    def add(self, module: str, name: str) -> None:
        """Count an import."""
        self.imports += 1
        if is_unsupported(module, name):
            self.unsupported += 1
        elif failure(module, name) is None:
            self.resolved += 1


def import_lines() -> Iterator[tuple[str, list[str]]]:
    """Yield the module and the names of each line of the list."""
    for line in LIST.read_text().splitlines():
        if not line.startswith("#"):
            module, *names = line.split()
            yield module, names


def imports() -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each import of the list."""
    for module, names in import_lines():
        for name in names:
            yield module, name


def is_unsupported(module: str, name: str) -> bool:
    text = f"{module} {name}".lower()
    return any(word in text for word in UNSUPPORTED_WORDS)


def failure(module_name: str, name: str) -> str | None:
    """Return why an import fails here, or None."""
    try:
        module = import_module(module_name)
    except ImportError as error:
        return str(error)
    value = getattr(module, name, None)
    if value is None or getattr(value, "__bases__", ()) == (Missing,):
        return f"{name} is missing"
    return None


def subpackage(module: str) -> str:
    """Return the subpackage of Lightning Fabric that a module is in, or its title in the table."""
    if "pytorch" in module:
        return "`lightning.pytorch`"
    names = module.replace("lightning_fabric", "lightning.fabric").split(".")
    if len(names) == 2 or module == "lightning":
        return "top level"
    return names[2]


def table() -> str:
    """Return the counts of each subpackage of Lightning Fabric, as Markdown."""
    import fabric_compat.installed  # noqa: F401

    rows: dict[str, Counts] = {}
    total = Counts()
    for module, name in imports():
        row = rows.setdefault(subpackage(module), Counts())
        row.add(module, name)
        total.add(module, name)
    rows["**all**"] = total
    lines = [
        "| part of `lightning.fabric` | imports | resolve "
        "| XLA, DeepSpeed, bitsandbytes, Trainer |",
        "|---|--:|--:|--:|",
    ]
    for title, row in rows.items():
        lines.append(f"| {title} | {row.imports} | {row.resolved} | {row.unsupported} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the table into the page."""
    before, _, text = PAGE.read_text().partition(BEGIN)
    _, _, after = text.partition(END)
    PAGE.write_text(before + BEGIN + table() + END + after)


if __name__ == "__main__":
    main()

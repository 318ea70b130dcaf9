"""Which imports of Lightning Fabric resolve: ``python -m tests.compat.table`` writes the table of the docs."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from fabric_compat.missing import Missing

LIST = Path(__file__).parent / "imports.txt"
PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
MARKS = ("<!-- imports: begin -->\n", "<!-- imports: end -->\n")
# Names that belong to hardware and libraries that are not supported: they say what to use instead.
ELSEWHERE = ("xla", "deepspeed", "bitsandbytes")


def imports() -> Iterator[tuple[str, str]]:
    """The module and the name of each import of the list."""
    for line in LIST.read_text().splitlines():
        if not line.startswith("#"):
            module, *names = line.split()
            yield from ((module, name) for name in names)


def failure(module: str, name: str) -> str | None:
    """Why an import fails here, or None."""
    try:
        found = import_module(module)
    except ImportError as error:
        return str(error)
    value = getattr(found, name, None)
    return (
        f"{name} is missing"
        if value is None or getattr(value, "__bases__", ()) == (Missing,)
        else None
    )


def table() -> str:
    """The numbers by part of Lightning Fabric, as Markdown."""
    import fabric_compat.installed  # noqa: F401

    rows: dict[str, list[int]] = {}
    for module, name in imports():
        parts = module.replace("lightning_fabric", "lightning.fabric").split(".")
        row = rows.setdefault(parts[2] if len(parts) > 2 else "top level", [0, 0, 0])
        is_elsewhere = any(word in f"{module} {name}".lower() for word in ELSEWHERE)
        row[0] += 1
        row[1] += not is_elsewhere and failure(module, name) is None
        row[2] += is_elsewhere
    rows["**all**"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    lines = [
        "| part of `lightning.fabric` | imports | resolve | XLA, DeepSpeed, bitsandbytes |",
        "|---|--:|--:|--:|",
    ]
    lines += [f"| {part} | {row[0]} | {row[1]} | {row[2]} |" for part, row in rows.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    PAGE.write_text(before + MARKS[0] + table() + MARKS[1] + after)


if __name__ == "__main__":
    main()

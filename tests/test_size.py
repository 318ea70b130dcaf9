"""The package stays small: whoever adds lines says what goes for them. A limit is only ever lowered."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import fabric
from fabric.strategies.base import Strategy

# What may not grow, with today's limit.
LIMITS = {
    "files": 91,
    "code lines": 12_664,
    "tokens": 133_368,
    "code lines of fabric_compat": 900,
    "tokens of fabric_compat": 9_380,
    "code lines of the core": 2_860,
    "tokens of the core": 28_266,
    "raw lines of a file": 450,
    "raw lines of _fabric.py": 900,
    "code lines of a class": 200,  # but Fabric, which is a line a method
    "own public members of Strategy": 36,
}
# The files that somebody reads in an evening to know how it works: a file, or all files of a package.
CORE = [
    "_fabric",
    "_session",
    "_plan",
    "module",
    "runtime",
    "strategies/base",
    "strategies/ddp",
    "collectives/ops",
    "collectives/buckets",
    "communicators",
    "data/loader",
    "checkpoint/save_load",
]

PACKAGE = Path(fabric.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_tokens(path: Path) -> list[tokenize.TokenInfo]:
    """The tokens of a file without comments, docstrings and layout."""
    source = path.read_text()
    prose = set(_docstring_lines(ast.parse(source)))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token for token in tokens if token.type not in LAYOUT and token.start[0] not in prose]


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def code_lines(tokens: list[tokenize.TokenInfo]) -> set[int]:
    """The numbers of the lines on which these tokens stand."""
    return {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}


def weigh(paths: list[Path]) -> tuple[int, int]:
    """Code lines and tokens of some files."""
    files = [code_tokens(path) for path in paths]
    return sum(len(code_lines(tokens)) for tokens in files), sum(map(len, files))


def class_sizes() -> Iterator[tuple[int, str]]:
    for path in FILES:
        lines = code_lines(code_tokens(path))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name != "Fabric":
                yield len(lines.intersection(range(node.lineno, (node.end_lineno or 0) + 1))), node.name


def raw_sizes(paths: list[Path]) -> Iterator[tuple[int, str]]:
    for path in paths:
        yield len(path.read_text().splitlines()), str(path.relative_to(PACKAGE))


def core_files() -> list[Path]:
    return [
        path
        for name in CORE
        for path in ((PACKAGE / name).glob("*.py"), [PACKAGE / f"{name}.py"])[not (PACKAGE / name).is_dir()]
    ]


def test_the_package_has_no_more_files() -> None:
    assert len(FILES) <= LIMITS["files"]


COMPAT = sorted((PACKAGE.parent / "fabric_compat").glob("*.py"))
PARTS = {"": FILES, " of the core": core_files(), " of fabric_compat": COMPAT}


@pytest.mark.parametrize(("suffix", "part"), PARTS.items(), ids=["package", "core", "fabric_compat"])
def test_neither_the_package_nor_its_core_grows(suffix: str, part: list[Path]) -> None:
    lines, tokens = weigh(part)
    assert lines <= LIMITS[f"code lines{suffix}"]
    assert tokens <= LIMITS[f"tokens{suffix}"], "shorter, not denser"


def test_no_file_is_too_long() -> None:
    facade = PACKAGE / "_fabric.py"
    assert max(raw_sizes([path for path in FILES if path != facade])) <= (LIMITS["raw lines of a file"], "~")
    assert max(raw_sizes([facade])) <= (LIMITS["raw lines of _fabric.py"], "~")


def test_no_class_is_too_long() -> None:
    assert max(class_sizes()) <= (LIMITS["code lines of a class"], "~")


def test_a_strategy_has_few_members_of_its_own() -> None:
    own = [name for name in vars(Strategy) if not name.startswith("_")]
    assert len(own) <= LIMITS["own public members of Strategy"], own

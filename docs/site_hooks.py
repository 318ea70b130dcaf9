"""What MkDocs has to know of this repository: links out of this folder, and roles in docstrings."""

import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

DOCS = Path(__file__).parent
LINK = re.compile(r"(?<=\]\()(?!\w+:)[\w./-]+")
ROLE = re.compile(
    r":(?:class|meth|func|mod|attr|data):<code>(?:([\w.]+) &lt;)?~?([\w.]+)(?:&gt;)?</code>"
)


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside of this folder that a page links to, which the site has under their own paths."""
    pages = list(files.documentation_pages())
    for page in pages:  # it grows
        for name in filter(
            None, (in_site(page, link) for link in LINK.findall(page.content_string))
        ):
            if files.get_file_from_path(name) is None:
                found = File.generated(config, name, abs_src_path=str(DOCS.parent / name))
                files.append(found)
                pages += [found] if found.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to where the files are in the site, and have searches find pages for readers first."""
    if page.file.generated_by or page.file.src_uri in (
        "reference/parts.md",
        "reference/strategies.md",
    ):
        page.meta["search"] = {"boost": 0.3}
    folder = os.path.dirname(page.file.src_uri) or "."

    def moved(link: re.Match[str]) -> str:
        name = in_site(page.file, link[0])
        return os.path.relpath(name, folder) if name else link[0]

    return LINK.sub(moved, markdown)


def in_site(page: File, link: str) -> str:
    """The path in the site of a file that a page links to; of what is no file of this repository nothing."""
    target = Path(page.abs_src_path or "").parent.joinpath(link).resolve()
    root = DOCS if target.is_relative_to(DOCS) else DOCS.parent
    return (
        target.relative_to(root).as_posix()
        if target.is_file() and target.is_relative_to(root)
        else ""
    )


def on_page_content(html: str, **_: Any) -> str:
    """Make links of the roles in docstrings; what has no entry in the reference is code."""

    def link(role: re.Match[str]) -> str:
        target = role[2] if "." in role[2] else f"fabric.Fabric.{role[2]}"
        return (
            f'<autoref optional identifier="{target}"><code>{role[1] or role[2]}</code></autoref>'
        )

    return ROLE.sub(link, html).replace("::</p>", ":</p>")

"""Hooks of MkDocs for links to files outside this folder, and for roles in docstrings."""

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
    """Add the files outside this folder that a page links to.

    The path of such a file in the site is its path in the repository.
    """
    pages = list(files.documentation_pages())
    for page in pages:  # the list grows by the added pages
        for link in LINK.findall(page.content_string):
            name = in_site(page, link)
            if not name or files.get_file_from_path(name) is not None:
                continue
            file = File.generated(config, name, abs_src_path=str(DOCS.parent / name))
            files.append(file)
            if file.is_documentation_page():
                pages.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change links to the paths in the site, and rank pages of tasks first in searches.

    A page of a task has the words that people search for. The pages for authors of plugins follow.
    The reference is last.
    """
    uri = page.file.src_uri
    if page.file.generated_by or uri.startswith("reference/"):
        page.meta["search"] = {"boost": 0.02}
    elif uri.startswith("how-to/write-"):
        page.meta["search"] = {"boost": 3}
    elif uri.startswith("how-to/"):
        page.meta["search"] = {"boost": 4}
    folder = os.path.dirname(page.file.src_uri) or "."

    def site_link(link: re.Match[str]) -> str:
        name = in_site(page.file, link[0])
        return os.path.relpath(name, folder) if name else link[0]

    return LINK.sub(site_link, markdown)


def in_site(page: File, link: str) -> str:
    """Return the path in the site of a linked file.

    The path is empty if the link does not lead to a file of this repository.
    """
    target = Path(page.abs_src_path or "").parent.joinpath(link).resolve()
    root = DOCS if target.is_relative_to(DOCS) else DOCS.parent
    if not target.is_file() or not target.is_relative_to(root):
        return ""
    return target.relative_to(root).as_posix()


def on_page_content(html: str, **_: Any) -> str:
    """Turn roles in docstrings into links, or into code if the reference has no entry."""

    def link(role: re.Match[str]) -> str:
        target = role[2] if "." in role[2] else f"fabric.Fabric.{role[2]}"
        text = role[1] or role[2]
        return f'<autoref optional identifier="{target}"><code>{text}</code></autoref>'

    return ROLE.sub(link, html).replace("::</p>", ":</p>")

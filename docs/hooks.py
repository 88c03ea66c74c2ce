"""Hooks of mkdocs: what lies outside of docs/ joins the site, and the pages keep the links that a code host follows.

README.md, SECURITY.md and their like stand at the root, where a reader of the repository looks for them, and the pages
link to them as `../README.md`. On the site they are pages like the others; this file moves the links along.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = {
    "README.md": "readme.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "CITATION.cff": "CITATION.cff",
    "LICENSE": "LICENSE.txt",
}
"""Files at the root of the repository -> where they are on the site."""

LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")
COMMENT = re.compile(r"^(<!--[^\n]*-->)\n(?=\S)", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the root."""
    for name, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page to where their targets are on the site."""
    inside = {uri: name for name, uri in OUTSIDE.items()}
    here = PurePosixPath(inside.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def moved(link: re.Match) -> str:
        target = os.path.normpath(here.parent / link[1])
        uri = OUTSIDE.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
        if uri is None or not (ROOT / target).is_file():
            return link[1]  # no file of the documentation: mkdocs warns if it was meant as one
        return os.path.relpath(uri, PurePosixPath(page.file.src_uri).parent)

    # A code host lets a table follow a comment at once; Python-Markdown wants an empty line between.
    return COMMENT.sub(r"\1\n\n", LINK.sub(moved, markdown))

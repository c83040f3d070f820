"""Lets pages of the site link to files outside docs/, by the same relative links that work in the repository.

mkdocs runs these hooks (`mkdocs.yml`). The notebooks of the project become pages outside the navigation and the search;
every other file that a page links to is copied to the site. A link to a file that does not exist fails the build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = ("notebook",)
"""Folders whose Markdown pages join the site."""
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_ELSEWHERE = re.compile(r"^(?:[a-z]+:|/)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages and files that lie outside docs/ to those of the site."""
    from mkdocs.structure.files import File, InclusionLevel

    def add(name: str) -> None:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name), inclusion=InclusionLevel.NOT_IN_NAV))

    for folder in PAGES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file():
                add(path.relative_to(ROOT).as_posix())
    for page in files.documentation_pages():
        source = Path(page.abs_src_path)
        for link in _LINK.finditer(source.read_text(encoding="utf-8")):
            target = _outside(source, link.group(2))
            if target and (ROOT / target).is_file() and files.get_file_from_path(target) is None:
                add(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrites links that leave docs/, or lead back into it, to the places that their targets have in the site."""
    source = Path(page.file.abs_src_path)
    here = os.path.dirname(page.file.src_uri)
    if not page.file.src_uri.startswith(tuple(f"{p}/" for p in PAGES)):
        return _LINK.sub(lambda link: _rewritten(link, source, here), markdown)
    page.meta.setdefault("search", {})["exclude"] = True
    return _LINK.sub(lambda link: _rewritten(link, source, here), markdown)


def _rewritten(link: re.Match[str], source: Path, here: str) -> str:
    before, target, after = link.groups()
    if _ELSEWHERE.match(target):
        return link.group(0)
    return before + os.path.relpath(_place(source, target), here or ".") + after


def _place(source: Path, target: str) -> str:
    """Where a file lies in the site: files of docs/ at its root, all others by their path in the repository."""
    path = os.path.relpath(os.path.normpath(source.parent / target), ROOT)
    return path.removeprefix("docs/")


def _outside(source: Path, target: str) -> str | None:
    """The path of a file outside docs/ in the repository, or None."""
    if _ELSEWHERE.match(target):
        return None
    path = os.path.relpath(os.path.normpath(source.parent / target), ROOT)
    return None if path.startswith(("docs/", "..")) else path

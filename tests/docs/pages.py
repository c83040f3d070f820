"""The fenced blocks of Markdown pages, and what an invisible comment above a block says about running it.

<!-- not run: REASON -->       the block is not run at all
<!-- parsed: REASON -->        kvrecall commands are parsed, options and all, and not started
<!-- run with: OPTIONS -->     kvrecall commands run with these options, which replace those of the page
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = ("python", "sh", "bash")
SHOWN = ("", "json", "toml", "text")
"""Languages of blocks that are only looked at; every other language is a mistake."""
_COMMENT = re.compile(r"<!-- (not run|parsed|run with): (.+) -->")


@dataclass(frozen=True)
class Block:
    """line: of the opening fence, from 1. mark, said: of the comment above it, or ""."""

    page: Path
    line: int
    language: str
    text: str
    mark: str
    said: str

    @property
    def place(self) -> str:
        """For messages: file and line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page, those in lists too; a fence that does not end is an AssertionError."""
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        fence = re.match(r"^(\s*)```([\w-]*)\s*$", lines[number])
        if not fence:
            assert not lines[number].lstrip().startswith("```"), f"{page}:{number + 1}: a fence that is not understood"
            number += 1
            continue
        indent = fence.group(1)
        end = next(i for i in range(number + 1, len(lines)) if lines[i].rstrip() == f"{indent}```")
        above = next((line.strip() for line in reversed(lines[:number]) if line.strip()), "")
        found = _COMMENT.fullmatch(above)
        text = "\n".join(line.removeprefix(indent) for line in lines[number + 1 : end])
        mark, said = (found.group(1), found.group(2)) if found else ("", "")
        yield Block(page, number + 1, fence.group(2), text, mark, said)
        number = end + 1


def commands(text: str) -> list[str]:
    """The commands of a block of shell, without comments; a line that ends with a backslash goes on."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = (re.sub(r"(^|\s)#.*$", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]

"""Prints the file list of notebook/architecture.md: each module with the first sentence of its docstring.

python scripts/architecture.py            # print
python scripts/architecture.py --write    # replace the list in notebook/architecture.md
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "notebook" / "architecture.md"
HEADING = "## Every file\n\n"


def lines() -> list[str]:
    """One Markdown line per Python file of the package and of the benchmarks."""
    package = ROOT / "src" / "kvrecall"
    named = [(path, path.relative_to(package)) for path in sorted(package.rglob("*.py"))]
    named += [(path, path.relative_to(ROOT)) for path in sorted((ROOT / "benchmarks").rglob("*.py"))]
    found = []
    for path, name in named:
        docstring = ast.get_docstring(ast.parse(path.read_text())) or "(package marker)"
        first = " ".join(docstring.split("\n\n")[0].split())
        found.append(f"* `{name}`: {first}")
    return found


def main() -> None:
    """Prints or writes."""
    text = "\n".join(lines()) + "\n"
    if "--write" in sys.argv:
        PAGE.write_text(PAGE.read_text().split(HEADING)[0] + HEADING + text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()

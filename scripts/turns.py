"""Prints turns of a conversation about a document: each asks for one of its paragraphs, by its beginning, and quotes it.

python scripts/turns.py src/kvrecall/data/harbour_log.md
"""

from __future__ import annotations

import sys
from pathlib import Path

TURNS = 12


def main() -> None:
    """Paragraphs from all over the document, in an order that jumps."""
    text = Path(sys.argv[1]).read_text()
    paragraphs = [p.strip() for p in text.split("\n\n") if len(p.split()) > 40]
    picked = [paragraphs[(7 * i * len(paragraphs) // TURNS + 3) % len(paragraphs)] for i in range(TURNS)]
    for paragraph in picked:
        words = paragraph.split()
        print(f'Question: How does the log go on after "{" ".join(words[:10])}"?\nAnswer: {" ".join(words)}\n')


if __name__ == "__main__":
    main()

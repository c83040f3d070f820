"""Draws the pictures of docs/how: boxes, arrows and words in SVG that follow the reader's light or dark theme.

python scripts/how_pictures.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2933 }
.small { font-size: 12px; fill: #52606d }
.line { stroke: #52606d; stroke-width: 1.6; fill: none }
.gpu { fill: #d3ece9; stroke: #00796b }
.host { fill: #fce5cd; stroke: #b45309 }
.plain { fill: #eef1f4; stroke: #7b8794 }
.hit { fill: #00796b; stroke: #00796b }
.on { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e9ee }
  .small { fill: #a9b4bf }
  .line { stroke: #a9b4bf }
  .gpu { fill: #12403b; stroke: #4db6ac }
  .host { fill: #4a3015; stroke: #f0a35e }
  .plain { fill: #2c353f; stroke: #7b8794 }
  .hit { fill: #4db6ac; stroke: #4db6ac }
  .on { fill: #0d1117 }
}
"""


class Picture:
    """An SVG of 720 units width that is put together from top to bottom."""

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height = title, height
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, kind: str, said: str = "", under: str = "") -> None:
        """A rectangle with words in its middle; kind: gpu, host, plain or hit."""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" class="{kind}"/>')
        middle = y + h / 2 + (5 if not under else -3)
        if said:
            self.text(x + w / 2, middle, said, "on" if kind == "hit" else "", "middle")
        if under:
            self.text(x + w / 2, middle + 17, under, "small", "middle")

    def text(self, x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> None:
        """A line of words; y is its base line."""
        self.parts.append(f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(said)}</text>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through points with a head at its end."""
        path = " L".join(f"{x} {y}" for x, y in points)
        self.parts.append(f'<path d="M{path}" class="line" marker-end="url(#head)"/>')

    def svg(self) -> str:
        """The file's text."""
        head = '<marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
        head += '<path d="M0 0 L9 4 L0 8" class="line"/></marker>'
        size = f'viewBox="0 0 720 {self.height}" width="720" height="{self.height}"'
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        return "\n".join([opening, f"<title>{escape(self.title)}</title>", f"<style>{STYLE}</style>", f"<defs>{head}</defs>",
                          *self.parts, "</svg>", ""])  # fmt: skip


def step() -> Picture:
    """One decode step."""
    p = Picture("One decode step: the query searches summaries on the GPU, a few rows come from the host", 210)
    p.text(10, 22, "GPU", "small")
    p.box(10, 30, 110, 50, "plain", "query")
    p.box(170, 30, 130, 50, "gpu", "summaries", "of all keys")
    p.box(350, 30, 110, 50, "hit", "100 ids")
    p.box(510, 30, 90, 50, "gpu", "attend")
    p.box(640, 30, 70, 50, "plain", "out")
    p.arrow((120, 55), (168, 55))
    p.text(144, 46, "search", "small", "middle")
    p.arrow((300, 55), (348, 55))
    p.arrow((600, 55), (638, 55))
    p.text(10, 142, "host memory", "small")
    p.box(10, 150, 590, 45, "host", "keys and values of every token")
    p.arrow((405, 80), (405, 148))
    p.arrow((555, 148), (555, 82))
    p.text(398, 120, "fetch", "small", "end")
    p.text(565, 120, "100 rows per KV head", "small")
    return p


def zones() -> Picture:
    """Zones of a sequence."""
    p = Picture("Zones of a sequence: sink, retrieval zone, local, buffer", 190)
    p.text(10, 24, "GPU", "small")
    p.box(10, 32, 70, 46, "gpu", "sink", "64")
    p.box(90, 44, 400, 22, "gpu", "summaries")
    p.box(500, 32, 110, 46, "gpu", "local", "256")
    p.box(620, 32, 90, 46, "gpu", "buffer", "0 to 64")
    p.text(10, 122, "host", "small")
    p.box(90, 110, 400, 46, "host", "retrieval zone", "all other tokens: keys and values")
    p.arrow((555, 80), (555, 133), (492, 133))
    p.text(565, 128, "oldest tokens move here", "small")
    p.text(565, 145, "when the buffer is full", "small")
    p.arrow((90, 178), (708, 178))
    p.text(10, 182, "position", "small")
    return p


def codes() -> Picture:
    """What is kept of a key."""
    p = Picture("A key of 128 numbers becomes 81 bytes: signs, magnitudes, weights and a norm", 230)
    p.box(10, 30, 130, 50, "host", "key", "128 numbers, 256 B")
    p.arrow((140, 55), (188, 55))
    p.box(190, 30, 170, 50, "plain", "centre, balance, rotate", "fixed for the model")
    p.arrow((360, 55), (408, 55))
    for i in range(16):
        p.box(410 + 18.5 * i, 30, 16, 50, "plain")
    p.text(558, 98, "16 blocks of 8 coordinates", "small", "middle")
    p.text(10, 140, "on the GPU, per token and KV head", "small")
    for x, w, said, under in ((10, 150, "signs", "16 B: 1 bit each"), (165, 290, "magnitudes", "48 B: 3 bits each"),
                              (460, 150, "weights", "16 B: one per block"), (615, 95, "norm", "1 B")):  # fmt: skip
        p.box(x, 150, w, 50, "gpu", said, under)
    p.text(85, 220, "search, stage I", "small", "middle")
    p.text(385, 220, "search, stage II", "small", "middle")
    return p


def search() -> Picture:
    """Two stages."""
    p = Picture("Search in two stages: from all keys to 3 percent of them to 100", 220)
    p.box(10, 30, 300, 46, "gpu", "131,072 keys: signs", "16 B each")
    p.arrow((160, 78), (160, 104))
    p.text(330, 50, "stage I: product of the query with every key's signs", "")
    p.text(330, 68, "whole numbers, so equal on every device", "small")
    p.box(85, 106, 150, 46, "gpu", "3,933 candidates", "all 81 B each")
    p.arrow((160, 154), (160, 178))
    p.text(330, 126, "stage II: estimate from signs, magnitudes, weights", "")
    p.text(330, 144, "3 % of the keys; the share falls with the length", "small")
    p.box(130, 180, 60, 30, "hit", "100")
    p.text(330, 200, "ids of the best; ties go to the lower position", "")
    return p


def fetch() -> Picture:
    """Rows from host blocks."""
    p = Picture("Fetch: the block table tells where rows lie; rows of the step before are used again", 240)
    p.text(10, 24, "GPU", "small")
    p.box(10, 32, 150, 46, "hit", "selected ids")
    p.box(230, 32, 170, 46, "gpu", "rows of this step")
    p.box(470, 32, 220, 46, "gpu", "rows of the step before")
    p.arrow((468, 55), (402, 55))
    p.text(435, 46, "half", "small", "middle")
    p.arrow((85, 78), (85, 148))
    p.text(95, 118, "block table", "small")
    p.text(10, 222, "host memory, page-locked", "small")
    for i in range(6):
        p.box(10 + 115 * i, 150, 105, 46, "host")
        p.text(62 + 115 * i, 170, f"block {(7, 2, 9, 4, 12, 3)[i]}", "", "middle")
        p.box(22 + 115 * i + (i * 37) % 74, 178, 8, 14, "hit")
    p.arrow((315, 148), (315, 80))
    p.text(325, 118, "the GPU reads single rows over the bus", "small")
    return p


def merge() -> Picture:
    """Partial attentions."""
    p = Picture("Merge: attention over three parts, joined by their log-sum-exp", 230)
    rows = (("sink, local, buffer", "exact, on the GPU", "gpu"), ("fetched rows", "exact, from the host", "host"),
            ("page means", "an estimate of all the rest", "gpu"))  # fmt: skip
    for i, (said, under, kind) in enumerate(rows):
        y = 14 + 70 * i
        p.box(10, y, 210, 50, kind, said, under)
        p.arrow((220, y + 25), (288, y + 25))
        p.box(290, y, 150, 50, "plain", "output, lse")
        p.arrow((440, y + 25), (500, y + 25), (500, 109), (538, 109))
    p.text(254, 30, "softmax", "small", "middle")
    p.box(540, 82, 170, 54, "hit", "output")
    p.text(625, 160, "Σ exp(lse) · output", "small", "middle")
    p.text(625, 178, "÷ Σ exp(lse)", "small", "middle")
    return p


def triggers() -> Picture:
    """When to search."""
    p = Picture("Triggers: a step searches where its query has turned, and holds the selection otherwise", 190)
    likeness = (0.97, 0.95, 0.96, 0.62, 0.94, 0.97, 0.93, 0.95, 0.58, 0.96)
    for i, cosine in enumerate(likeness):
        x, turned = 92 + 61 * i, cosine < 0.8
        p.box(x, 34, 50, 40, "hit" if turned else "plain", f"{cosine:.2f}")
        p.box(x, 108, 50, 34, "hit" if turned else "gpu", "search" if turned else "hold")
        p.arrow((x + 25, 76), (x + 25, 106))
    p.text(10, 52, "cosine with", "small")
    p.text(10, 68, "query before", "small")
    p.text(10, 129, "step", "small")
    p.text(92, 168, "LouisKV: below the threshold 0.8 the step searches, and a segment of generated tokens ends", "small")
    return p


def captured() -> Picture:
    """A graph and its slots."""
    p = Picture("Captured steps: one recorded graph serves the sequences in its slots, one replay per token", 230)
    p.box(10, 20, 180, 46, "plain", "host: one replay", "per token")
    p.arrow((190, 43), (248, 43))
    p.box(250, 20, 460, 46, "hit", "recorded graph: every kernel of every layer")
    p.arrow((480, 68), (480, 104))
    p.text(470, 92, "lengths, tables and flags", "small", "end")
    for i, said in enumerate(("sequence A", "sequence B", "empty", "empty")):
        kind = "gpu" if i < 2 else "plain"
        p.box(250 + 117 * i, 108, 109, 60, kind, said, ("its window" if i < 2 else "ignored"))
        p.text(304 + 117 * i, 190, f"slot {i}", "small", "middle")
    p.box(10, 116, 150, 44, "plain", "a new request")
    p.arrow((160, 138), (248, 138))
    p.text(204, 128, "joins", "small", "middle")
    p.text(250, 216, "sequences join and leave; addresses stay, so nothing is recorded again", "small")
    return p


DRAWN: dict[str, Callable[[], Picture]] = {
    f.__name__: f for f in (step, zones, codes, search, fetch, merge, triggers, captured)
}


def main(folder: Path = FIGURES) -> None:
    """Writes all pictures."""
    for name, draw in DRAWN.items():
        (folder / f"how_{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

"""Documents that are no plain text: what is read of them, and what is told of those that cannot be read."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from pathlib import Path

import pytest

from kvrecall.core.errors import InputFileError, MissingPackageError
from kvrecall.core.texts import read_text

PAGE = (
    "<html><head><title>T</title><script>var hidden = 1</script></head><body>"
    "<h1>Böte</h1><p>The <b>red</b> boat.</p></body></html>"
)
CELLS = [
    {"cell_type": "markdown", "metadata": {}, "source": ["# The harbour"]},
    {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": 1, "source": ["boats = 3"]},
]


def pdf(text: str) -> bytes:
    """A page with a line of text; none for an empty one."""
    drawn = f"BT /F1 24 Tf 72 700 Td ({text}) Tj ET" if text else ""
    parts = [
        "<< /Type /Catalog /Pages 2 0 R >>", "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]  # fmt: skip
    made, places = b"%PDF-1.4\n", []
    for number, part in enumerate(parts, 1):
        places.append(len(made))
        made += f"{number} 0 obj\n{part}\nendobj\n".encode()
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    return (
        made
        + f"xref\n0 6\n0000000000 65535 f \n{table}trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n{len(made)}\n%%EOF".encode()
    )


def docx(text: str) -> bytes:
    """A Word file with one paragraph."""
    types = "http://schemas.openxmlformats.org/package/2006/content-types"
    kind = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
    relations = "http://schemas.openxmlformats.org/package/2006/relationships"
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
    words = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w") as archive:
        overrides = f'<Override PartName="/word/document.xml" ContentType="{kind}"/>'
        default = '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        archive.writestr("[Content_Types].xml", f'<Types xmlns="{types}">{default}{overrides}</Types>')
        target = f'<Relationship Id="rId1" Type="{office}" Target="word/document.xml"/>'
        archive.writestr("_rels/.rels", f'<Relationships xmlns="{relations}">{target}</Relationships>')
        body = f"<w:body><w:p><w:r><w:t>{text}</w:t></w:r></w:p></w:body>"
        archive.writestr("word/document.xml", f'<w:document xmlns:w="{words}">{body}</w:document>')
    return into.getvalue()


FILES = {
    "a.pdf": pdf("The red boat left."), "b.DOCX": docx("The red boat left."), "c.html": PAGE.encode(), "d.htm": PAGE.encode(),
    "e.ipynb": json.dumps({"cells": CELLS, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}).encode(),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_its_text_is_read_and_nothing_else(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    text = read_text(tmp_path / name)
    if name.endswith("ipynb"):
        assert "# The harbour" in text and "boats = 3" in text and "cell_type" not in text
    elif name[0] in "cd":
        assert "# Böte" in text and "The **red** boat." in text and "hidden" not in text and "<p>" not in text
    else:
        assert text.strip() == "The red boat left."


@pytest.mark.parametrize("name", ["a.pdf", "b.docx", "e.ipynb"])
def test_a_broken_file_is_refused(name: str, tmp_path: Path) -> None:
    """And never read as if it were text."""
    (tmp_path / name).write_bytes(b"broken, but printable")
    with pytest.raises(InputFileError, match=r"cannot be converted to text .*Save it as text\."):
        read_text(tmp_path / name)


def test_a_document_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scan.pdf").write_bytes(pdf(""))
    with pytest.raises(InputFileError, match="has no text"):
        read_text(tmp_path / "scan.pdf")
    (tmp_path / "empty.pdf").write_bytes(b"")
    with pytest.raises(InputFileError, match="is empty"):
        read_text(tmp_path / "empty.pdf")


@pytest.mark.parametrize("name", FILES)
def test_without_the_package_the_extra_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "markitdown", None)
    (tmp_path / name).write_bytes(FILES[name])
    with pytest.raises(MissingPackageError, match=rf"markitdown, to read {name[1:].lower()} files.*documents"):
        read_text(tmp_path / name)


def test_other_files_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "page.txt").write_text(PAGE, encoding="utf-8")
    assert read_text(tmp_path / "page.txt") == PAGE

"""Texts of PDF and Word files, web pages and notebooks, as Markdown, by markitdown's converters (the extra `documents`).

Each converter is called by itself: markitdown's own choice takes what it cannot convert for plain text.
"""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path

from kvrecall.core.errors import InputFileError, MissingPackageError

_CONVERTERS = {
    ".pdf": "PdfConverter", ".docx": "DocxConverter", ".html": "HtmlConverter", ".htm": "HtmlConverter",
    ".ipynb": "IpynbConverter",
}  # fmt: skip
_PLAIN = "Save it as text."


def is_document(path: str | os.PathLike[str]) -> bool:
    """Whether a file is converted, by its suffix."""
    return Path(path).suffix.lower() in _CONVERTERS


def document_text(path: str | os.PathLike[str], data: bytes) -> str:
    """The text of a file that `is_document`. data: its content.

    Raises MissingPackageError without markitdown, and InputFileError for a file that it cannot convert.
    """
    suffix = Path(path).suffix.lower()
    try:
        from markitdown import StreamInfo, converters
    except ImportError as error:
        raise MissingPackageError(f"markitdown, to read {suffix} files", "documents", error.name) from None
    logging.getLogger("pdfminer").setLevel(logging.ERROR)  # it warns of every odd font
    info = StreamInfo(extension=suffix, charset="utf-8" if suffix in (".html", ".htm", ".ipynb") else None)
    try:
        text = getattr(converters, _CONVERTERS[suffix])().convert(io.BytesIO(data), info).markdown
    except Exception as error:  # of markitdown, or of one of the libraries that it uses
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InputFileError(path, f"cannot be converted to text ({reason[:200]})", _PLAIN) from None
    if not text.strip():
        raise InputFileError(path, "has no text, as scanned pages have none", _PLAIN)
    return text

"""Options that several verbs share, and parsers of their values: methods, counts, texts, and places for results.

All is checked before anything slow starts.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.core import texts
from kvrecall.core.errors import OutputFileError, ParameterError
from kvrecall.core.texts import whole

MODEL_HELP = "Known name, folder, .gguf file or hub repository."

Model = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
METHOD_HELP = "NAME, NAME:KEY=VALUE;KEY=VALUE or a method file, also with @BUDGET; `kvrecall info` lists the names."

MethodName = Annotated[str, typer.Option("--method", metavar="METHOD", help=METHOD_HELP)]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Parameter of the method, as JSON; may be repeated.")
]
DocumentModel = Annotated[
    str | None, typer.Option("--model", "-m", help=f"{MODEL_HELP} That of the session, else qwen2.5-coder-0.5b, if left out.")
]
DocumentMethod = Annotated[
    str | None, typer.Option("--method", metavar="METHOD", help=f"{METHOD_HELP} That of the session, or the recommended one.")
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep what was read, so that the next call with this file need not.")]
Stats = Annotated[bool, typer.Option("--stats", help="Tell all figures about an answer, not the three that matter most.")]
KeepLimit = Annotated[
    str,
    typer.Option(envvar="KVRECALL_SESSIONS_LIMIT", help="Bytes of all that is kept, such as 32g; the rest goes."),
]
Dtype = Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; the fastest if left out.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …; the best if left out.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens of the answer at most.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens per piece of prefill.")]
SuitedChunkTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens per piece of prefill; 8192 on a GPU, else 1024, if left out.")
]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Exact = Annotated[bool, typer.Option("--exact", help="Answer as full attention does: it checks what the method drafts.")]


class Rows(StrEnum):
    """How keys and values are stored."""

    PLAIN = "plain"
    FP8 = "fp8"


HostRows = Annotated[
    Rows, typer.Option("--host-rows", help="fp8 keeps keys and values in host memory in eight bits: half of it, at a loss.")
]


def check_plain(host_rows: Rows, where: str, remedy: str = "Leave it out.") -> None:
    """Raises ParameterError for rows in eight bits where they are not supported. where: who holds the rows."""
    if host_rows is not Rows.PLAIN:
        raise ParameterError("--host-rows", f"plain with {where}", host_rows.value, remedy)


class Engine(StrEnum):
    """The program that runs a model."""

    VLLM = "vllm"
    TRANSFORMERS = "transformers"


DEFAULT_MODEL = "qwen2.5-coder-0.5b"
DEFAULT_METHOD = "recommended"
"""`kvrecall.methods.recommended()`; not imported, so that help texts do not wait for torch."""
DEFAULT_KEEP_LIMIT = "32g"


def method_of(text: str, settings: list[str] | None) -> Any:
    """The method that a text names (`methods.spec`) with `--set` applied; raises the errors of names, settings and files."""
    from kvrecall.methods.spec import parse

    return parse(text).method(**settings_of(settings))


def settings_of(settings: list[str] | None) -> dict[str, Any]:
    """The values of `--set` by name; raises `ParameterError` unless each is KEY=VALUE."""
    from kvrecall.methods.settings import current
    from kvrecall.methods.spec import setting

    return current(dict(setting(text, "--set", remedy="For example --set top_k=200.") for text in settings or []))


_MOST_TOKENS = 1 << 40
"""Upper bound of token counts, so that bytes fit into 64 bits."""


def token_count(text: str, name: str = "--context") -> int:
    """Parses a number of tokens: 32768, 32_768, 32k (= 32,768) or 1m (= 1,048,576). name: of the option."""
    plain = text.strip().lower().replace("_", "").replace(",", "")
    factor = {"k": 1 << 10, "m": 1 << 20}.get(plain[-1:], 1)
    digits = plain[:-1] if factor > 1 else plain
    count = whole(digits) * factor
    if count < 1:
        raise ParameterError(name, "a count such as 32768, 32k or 1m, from 1 on", text, "Give a whole number of tokens.")
    if count > _MOST_TOKENS:
        raise ParameterError(name, f"at most {_MOST_TOKENS:,} tokens", text, "Give what a model can hold.")
    return count


def comma_separated(text: str) -> list[str]:
    """The parts of a list such as "a, b"; empty ones are left out."""
    return [part.strip() for part in text.split(",") if part.strip()]


def check_sampling(temperature: float, seed: int | None = None) -> None:
    """Raises ParameterError for a bad temperature, or a seed that torch does not accept."""
    if not 0 <= temperature < inf:
        raise ParameterError("--temperature", "a finite number >= 0", temperature, "0 takes the likeliest token each time.")
    texts.check_seed("--seed", seed)


def read_text(path: Path) -> str:
    """As `core.texts.read_text`; `-` reads standard input."""
    return texts.read_text(path, sys.stdin.buffer.read() if str(path) == "-" else None)


def read_texts(paths: list[Path]) -> str:
    """The files' texts, joined by blank lines."""
    return "\n\n".join(map(read_text, paths))


def non_empty(text: str, name: str) -> str:
    """Returns the text; raises `ParameterError` if it is empty."""
    if not text.strip():
        raise ParameterError(name, "some text", text, "Ask something.")
    return text


def writable(path: Path) -> Path:
    """Returns the path of a file of results; raises `OutputFileError` if it cannot be written.

    Tests it by opening the file. Existing content stays, and no file is left behind.
    """
    target = os.path.realpath(path)
    try:
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:  # must not be removed; opening a pipe without a reader would block
            os.close(os.open(target, os.O_WRONLY | (0 if sys.platform == "win32" else os.O_NONBLOCK)))
        else:
            os.close(descriptor)
            os.unlink(target)
    except OSError as error:
        raise OutputFileError(path, f"cannot be written ({error.strerror})") from None
    return path


def method_file(path: Path) -> Path:
    """Returns the path of a method file to write; raises `ParameterError` for another format, `OutputFileError`."""
    if path.suffix != ".json":
        raise ParameterError("--out", "a name ending in .json", str(path), "TOML is read, not written.")
    return writable(path)


def writable_folder(path: Path) -> Path:
    """Returns the path of a folder of results; raises `OutputFileError` if it cannot be made. Does not make it."""
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise OutputFileError(path, f"cannot be a folder for results ({nearest} is a file)")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OutputFileError(path, f"cannot be a folder for results ({nearest} may not be written to)")
    return path

"""`kvrecall chat FILE|SESSION`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.cli import options
from kvrecall.cli.ask import answer_told
from kvrecall.cli.document import Choices, Opened, opened
from kvrecall.cli.kept import disk_bytes
from kvrecall.cli.report import seconds, size
from kvrecall.cli.screen import printable, to_stdout
from kvrecall.cli.verb import Result, notes, verb
from kvrecall.core.errors import InputFileError, KVRecallError

INSTRUCTION = "Answer from the text above."
HELP = "Ask something. /save FOLDER saves document and conversation as a session, /quit ends."


@verb
def chat(
    source: Annotated[Path, typer.Argument(metavar="FILE|SESSION", help="Text file, UTF-8, or the folder of a saved session.")],
    keep: options.Keep = False,
    model: options.DocumentModel = None,
    method: options.DocumentMethod = None,
    settings: options.Settings = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    max_new_tokens: options.MaxNewTokens = 512,
    chunk_tokens: options.SuitedChunkTokens = None,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    keep_limit: options.KeepLimit = options.DEFAULT_KEEP_LIMIT,
    host_rows: options.HostRows = options.Rows.PLAIN,
    as_json: options.AsJson = False,
) -> Result:
    """Talk about a text file or a saved session; one question per line of standard input. /save FOLDER, /quit."""
    options.check_sampling(temperature, seed)
    choices = Choices(model, method, settings, dtype, device, chunk_tokens, keep, keep_limit, as_json, INSTRUCTION, host_rows)
    with opened([source], choices, lambda document: document.check(["?"], max_new_tokens)) as found:
        limits = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "chunk_tokens": chunk_tokens}
        told = _talk(found, source, as_json, limits)
    return told


def _talk(found: Opened, source: Path, as_json: bool, limits: dict[str, Any]) -> Result:
    from kvrecall.engine import Chat

    talk, asks = Chat(found.document), _in_terminal()
    turns: list[Result] = []
    saved: list[str] = []
    if asks:
        notes().print(HELP)
    while (line := _line(asks)) is not None:
        command, _, rest = line.partition(" ")
        if not line:
            continue
        if command == "/quit":
            break
        try:
            if command == "/save":
                folder = Path(rest.strip() or source)
                if not rest.strip() and not source.is_dir():
                    notes().print("note: /save needs a folder: /save notes.session")
                    continue
                info = talk.save(folder)
                saved.append(str(folder))
                notes().print(f"saved: {info.tokens:,} tokens, {size(disk_bytes(folder))} in {folder}", soft_wrap=True)
            elif command[:1] == "/":
                notes().print(f"note: {command} is unknown. {HELP}", soft_wrap=True)
            else:
                answer = talk.say(line, on_text=None if as_json else lambda text: to_stdout(printable(text)), **limits)
                turns.append(answer_told(answer))
                if not as_json:
                    to_stdout("\n")
                    rate = f"{len(answer.tokens) / answer.decode_seconds:.1f} tokens/s" if answer.decode_seconds else "—"
                    first = f"first token {seconds(answer.first_token_seconds)}"
                    notes().print(f"{first} · {rate} · {talk.tokens:,} tokens", style="dim")
        except KeyboardInterrupt:
            if not asks:
                raise
            notes().print("\nstopped; the conversation is as it was before this question")
        except (KVRecallError, OSError) as error:
            if not asks or isinstance(error, BrokenPipeError):
                raise
            notes().print(f"error: {error}", style="red", soft_wrap=True)  # a person can do something else
    return found.told() | {"answers": turns, "tokens": talk.tokens, "saved": saved}


def _in_terminal() -> bool:
    """Whether a person types the questions, who sees a prompt and may stop an answer."""
    return sys.stdin.isatty()


def _line(asks: bool) -> str | None:
    """The next line of standard input; None at its end."""
    try:
        return input("> " if asks else "").strip()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise InputFileError("standard input", f"is not UTF-8 text (byte {error.start:,})") from None

"""`kvrecall chat FILE|SESSION`"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.cli import options
from kvrecall.cli.ask import answer_told
from kvrecall.cli.kept import disk_bytes
from kvrecall.cli.screen import details, notes, printable, seconds, size, to_stdout
from kvrecall.cli.session import Choices, Opened, opened
from kvrecall.cli.verb import Result, verb
from kvrecall.core.errors import InputFileError, KVRecallError

INSTRUCTION = "Answer from the text above."
HELP = "Ask something. /save FOLDER saves document and conversation as a session, /quit ends."


@dataclass(frozen=True)
class ChatChoices(Choices):
    """Answers in a conversation may be longer."""

    max_new_tokens: options.MaxNewTokens = 512


@verb
def chat(
    source: Annotated[Path, typer.Argument(metavar="FILE|SESSION", help="Text file, UTF-8, or the folder of a saved session.")],
    choices: ChatChoices,
) -> Result:
    """Talk about a text file or a saved session; one question per line of standard input. /save FOLDER, /quit."""
    with opened([source], choices, lambda document: document.check(["?"], choices.max_new_tokens), INSTRUCTION) as found:
        told = _talk(found, source, choices.sampling() | {"chunk_tokens": choices.chunk_tokens})
    return told


def _talk(found: Opened, source: Path, limits: dict[str, Any]) -> Result:
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
                answer = talk.say(line, on_text=lambda text: to_stdout(printable(text)), **limits)
                turns.append(answer_told(answer))
                to_stdout("\n")
                rate = f"{len(answer.tokens) / answer.decode_seconds:.1f} tokens/s" if answer.decode_seconds else "—"
                first = f"first token {seconds(answer.first_token_seconds)}"
                details().print(f"{first} · {rate} · {talk.tokens:,} tokens", style="dim")
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

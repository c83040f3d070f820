"""Look-up and copying: `json-kv` (Liu et al. 2023, "Lost in the middle") and `copy:WORDS`.

Both ask for text that stands in the document once and cannot be guessed; copying does so for hundreds of tokens on end, so a
selection that goes stale while the answer grows shows as the place where the copy first goes wrong.
"""

from __future__ import annotations

import json
import random

from kvrecall.core.errors import ParameterError
from kvrecall.evaluate.tasks.base import Room, Task, Turn, copied_share, string_match_all
from kvrecall.evaluate.tasks.text import haystack, vocabulary


def json_kv(spec: str, digits: int) -> Task:
    """A JSON object of random keys and values as large as fits; the value of one key is asked for.

    digits: of each, in hex. Where all such keys are used, keys of a digit more follow.
    """

    def make(room: Room, draw: random.Random, _: float) -> tuple[str, tuple[Turn, ...]]:
        def word(digits: int) -> str:
            return f"{draw.getrandbits(4 * digits):0{digits}x}"

        pairs: dict[str, str] = {}
        tokens = 2
        width, left = digits, 16**digits
        while tokens <= room.document_tokens:
            if not left:
                width, left = width + 1, 16 ** (width + 1)
            key, value = word(width), word(digits)
            if key in pairs:
                continue
            left -= 1
            pairs[key] = value
            tokens += room.count(f'"{key}": "{value}",\n')
        text = json.dumps(pairs, indent=0)
        while room.count(text) > room.document_tokens:
            pairs.popitem()
            text = json.dumps(pairs, indent=0)
        if len(pairs) < 2:
            raise ParameterError("context", "room for two pairs or more", room.document_tokens, "Give --context more tokens.")
        key = draw.choice(list(pairs))
        return text, (Turn(f'What is the value of the key "{key}"?', (pairs[key],), f' The value of the key "{key}" is "'),)

    instruction = "The text above is a JSON object. Answer with the value alone."
    return Task(spec, make, string_match_all, 2 * digits + 8, instruction, question_tokens=64 + 4 * digits)


def copy(spec: str, words: int) -> Task:
    """Random words inside filler are to be repeated in order. words: how many."""

    def make(room: Room, draw: random.Random, _: float) -> tuple[str, tuple[Turn, ...]]:
        passage = " ".join(draw.choices(vocabulary(), k=words))
        document = haystack(draw, room.count, room.document_tokens, [(draw.random(), f"<copy> {passage} </copy>")])
        return document, (Turn("Repeat all the words between <copy> and </copy>, in order.", (passage,), " <copy>"),)

    instruction = "The text above has a list of words between <copy> and </copy>."
    return Task(spec, make, copied_share, 3 * words + 8, instruction)

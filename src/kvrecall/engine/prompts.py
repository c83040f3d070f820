"""Prompts as token ids: a document once, then any number of questions about it.

The pieces of a prompt (chat template, document, question) are tokenised separately and joined. So the document's tokens are the
same for every question, and one cache serves all. Text such as `<|im_end|>` inside a document or question stays text; only the
template's own markers become special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvrecall.core.errors import ContextLengthError, ParameterError

_DOCUMENT, _QUESTION = "\x02document\x02", "\x02question\x02"
_INTRODUCTION = "Here is a text.\n\n"
INSTRUCTION = "Answer with one short sentence, from the text above alone."


@dataclass(frozen=True)
class DocumentPrompt:
    """A document as the prefix of questions.

    prefix: token ids from the start to the document's end; the same for every question and in saved sessions.
    middle: ids between document and question, with the instruction. tail: ids that follow the question.
    """

    tokenizer: Any
    prefix: list[int]
    middle: list[int]
    tail: list[int]
    document_tokens: int

    @staticmethod
    def of(tokenizer: Any, document: str | Sequence[str], instruction: str = INSTRUCTION) -> DocumentPrompt:
        """Tokenises a document for questions; with the tokenizer's chat template if it has one, as plain text otherwise.

        document: one text, or several in order. Each is tokenised separately, so that adding one does not change earlier ids.
        instruction: how to answer, between document and question.
        """
        texts = [document] if isinstance(document, str) else list(document)
        head, middle, tail = _template(tokenizer, instruction)
        body = plain_ids(tokenizer, texts[0].rstrip())
        for text in texts[1:]:
            body += plain_ids(tokenizer, "\n\n") + plain_ids(tokenizer, text.rstrip())
        return DocumentPrompt(tokenizer, head + body, middle, tail, len(body))

    @staticmethod
    def behind(tokenizer: Any, held: list[int], instruction: str = INSTRUCTION, answered: bool = False) -> DocumentPrompt:
        """Questions after tokens that a cache holds: a document, or a conversation.

        After a conversation the question is the next turn, without the instruction. A conversation has the template's marker
        of an answer. answered: whether the model has decoded some of the tokens; needed if that marker is plain text, which a
        document may hold too.
        """
        _, middle, tail = _template(tokenizer, instruction)
        marked = answered or not set(tail).isdisjoint(tokenizer.all_special_ids)
        if marked and _contains(held, tail):
            middle, tail = _turn(tokenizer)
            if held[-1:] == middle[:1]:  # the model has ended its turn
                middle = middle[1:]
        return DocumentPrompt(tokenizer, held, middle, tail, len(held))

    def ask(self, question: str, *, max_new_tokens: int = 0, limit_tokens: int | None = None) -> list[int]:
        """Ids of the whole prompt for one question.

        Raises `ContextLengthError`, naming the document or the question, if prompt and answer exceed `limit_tokens`.
        """
        return self.prefix + self.question(question, max_new_tokens=max_new_tokens, limit_tokens=limit_tokens)

    def question(self, question: str, *, max_new_tokens: int = 0, limit_tokens: int | None = None) -> list[int]:
        """Ids after `prefix` for one question. Raises as `ask`."""
        question_ids = plain_ids(self.tokenizer, question.strip())
        if limit_tokens is not None:
            self._check(len(question_ids), max_new_tokens, limit_tokens)
        return self.middle + question_ids + self.tail

    def conversation(self, turns: Sequence[str]) -> list[int]:
        """Ids of the whole prompt for questions and answers in turn, the last one a question."""
        ids = self.ask(turns[0])
        for answer, question in zip(turns[1::2], turns[2::2], strict=True):
            ids = next_prompt(self.tokenizer, ids + plain_ids(self.tokenizer, answer), question)
        return ids

    def _check(self, question_tokens: int, max_new_tokens: int, limit_tokens: int) -> None:
        frame = len(self.prefix) - self.document_tokens + len(self.middle) + len(self.tail)
        room = limit_tokens - max_new_tokens - frame
        if room < 2:
            raise ParameterError(
                "max_new_tokens", f"less than {limit_tokens - frame:,}", max_new_tokens, "Prompt and answer share the context."
            )
        if self.document_tokens + question_tokens <= room:
            return
        if question_tokens > self.document_tokens:
            raise ContextLengthError("question", max(0, room - self.document_tokens), question_tokens)
        raise ContextLengthError("document", max(0, room - question_tokens), self.document_tokens)


def chat_prompt(tokenizer: Any, text: str) -> list[int]:
    """Ids of a single message in the tokenizer's chat template, or of the plain text if it has none."""
    split = _rendered(tokenizer, _QUESTION)
    if split is None:
        return raw_prompt(tokenizer, text)
    head, tail = split.split(_QUESTION)
    return _marked_ids(tokenizer, head) + plain_ids(tokenizer, text) + _marked_ids(tokenizer, tail)


def messages_prompt(tokenizer: Any, messages: Sequence[tuple[str, str]]) -> list[int]:
    """Ids of messages, (role, text) each, and of the beginning of the next answer, in the tokenizer's chat template.

    Raises ParameterError if there is no template, or if it refuses the messages or leaves one out.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ParameterError("messages", "a model with a chat template", "one without", "Ask for a completion of a prompt.")
    # The template gets a mark for each text, between blanks that show whether it strips texts.
    marks = [{"role": role, "content": f"\x1f\x02{number}\x02\x1f"} for number, (role, _) in enumerate(messages)]
    try:
        rendered = tokenizer.apply_chat_template(marks, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # of any class: templates are programs
        remedy = "Many templates want the user and the assistant in turn, and some no system message."
        raise ParameterError("messages", "what the model's chat template accepts", str(error), remedy) from error
    head, *rest = re.split("(\x1f?)\x02(\\d+)\x02(\x1f?)", rendered)
    ids, seen = _marked_ids(tokenizer, head), set[int]()
    for before, number, after, text in zip(*[iter(rest)] * 4, strict=True):
        seen.add(int(number))
        content = messages[int(number)][1]
        content = content if before else content.lstrip()
        ids += plain_ids(tokenizer, content if after else content.rstrip()) + _marked_ids(tokenizer, text)
    for number, (role, _) in enumerate(messages):
        if number not in seen:
            expected, remedy = "messages that the model's chat template shows", "Put its text into another message."
            raise ParameterError(f"messages[{number}]", expected, f"one of {role!r}, which it leaves out", remedy)
    return ids


def next_turn(tokenizer: Any, question: str) -> list[int]:
    """Ids between the end of an answer and the next answer: the chat template's turn with a question, or plain text."""
    join, tail = _turn(tokenizer)
    return join + plain_ids(tokenizer, question.strip()) + tail


def next_prompt(tokenizer: Any, said: list[int], question: str) -> list[int]:
    """Ids of a whole conversation with one more question. said: its ids until the end of the last answer."""
    join = next_turn(tokenizer, question)
    if said[-1] == join[0]:  # the model has ended its turn
        said = said[:-1]
    return said + join


def raw_prompt(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text to continue, with the model's start token, if any."""
    return _start_ids(tokenizer) + plain_ids(tokenizer, text)


def _template(tokenizer: Any, instruction: str) -> tuple[list[int], list[int], list[int]]:
    """Ids before the document, between document and question, and after the question."""
    between = f"\n\n{instruction}\nQuestion: "
    rendered = _rendered(tokenizer, _INTRODUCTION + _DOCUMENT + between + _QUESTION)
    if rendered is None:
        middle = plain_ids(tokenizer, between)
        return _start_ids(tokenizer) + plain_ids(tokenizer, _INTRODUCTION), middle, plain_ids(tokenizer, "\nAnswer:")
    head, rest = rendered.split(_DOCUMENT)
    middle, tail = rest.split(_QUESTION)
    return _marked_ids(tokenizer, head), _marked_ids(tokenizer, middle), _marked_ids(tokenizer, tail)


def _turn(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids between an answer and the next question, and after that question."""
    if _rendered(tokenizer, _QUESTION) is None:
        return plain_ids(tokenizer, "\nQuestion: "), plain_ids(tokenizer, "\nAnswer:")
    said = [("user", "a"), ("assistant", _DOCUMENT), ("user", _QUESTION)]
    messages = [{"role": role, "content": content} for role, content in said]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    join, tail = text.split(_DOCUMENT)[-1].split(_QUESTION)
    return _marked_ids(tokenizer, join), _marked_ids(tokenizer, tail)


def _contains(ids: list[int], part: list[int]) -> bool:
    """Whether `part` occurs in `ids`."""
    starts = (i for i, each in enumerate(ids) if part and each == part[0])
    return any(ids[i : i + len(part)] == part for i in starts)


def _rendered(tokenizer: Any, content: str) -> str | None:
    """The chat template around `content`; None if there is no template, or one that repeats or changes the content."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    message = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    whole = text.count(_QUESTION) == 1 and text.count(_DOCUMENT) == content.count(_DOCUMENT)
    return text if whole else None


def _marked_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of the template's own text, with its markers as special tokens."""
    return tokenizer(text, add_special_tokens=False)["input_ids"] if text else []


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a user's text: nothing in it becomes a special token."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] if text else []


def marked_prompt(tokenizer: Any, text: str) -> list[int]:
    """As `raw_prompt`, but special tokens in the text count as such."""
    return _start_ids(tokenizer) + _marked_ids(tokenizer, text)


def _start_ids(tokenizer: Any) -> list[int]:
    """Ids that the tokenizer puts before a text (not those after it)."""
    start = getattr(tokenizer, "bos_token_id", None)
    return [start] if start is not None and start in tokenizer("a")["input_ids"][:1] else []

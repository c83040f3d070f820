"""Requests of OpenAI's API, as far as they are served; everything else is refused by name.

A field that no class here has is accepted only where it asks for nothing: null, or a value of `_NEUTRAL`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from kvrecall.core.errors import ParameterError

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "echo": (False,), "frequency_penalty": (0,), "function_call": ("none", "auto"), "functions": ([],),
    "logit_bias": ({},), "logprobs": (False,), "metadata": ({},), "min_p": (0,), "modalities": (["text"],), "n": (1,),
    "parallel_tool_calls": (True, False), "presence_penalty": (0,), "repetition_penalty": (1,),
    "response_format": ({"type": "text"},), "service_tier": ("auto", "default"), "store": (False,), "suffix": ("",),
    "tool_choice": ("none", "auto"), "tools": ([],), "top_k": (-1, 0), "top_logprobs": (0,),
    "annotations": ([],), "tool_calls": ([],), "include_obfuscation": (False,),
}  # fmt: skip
"""Values of unsupported fields that change nothing."""


def _encodable(text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ParameterError("text", "characters", "half of a surrogate pair", "Send text in UTF-8.")
    return text


Text = Annotated[str, AfterValidator(_encodable)]
"""A text that a tokenizer takes."""


class _Fields(BaseModel):
    """An object whose unknown fields must ask for nothing."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_unknown(self) -> _Fields:
        for name, value in (self.model_extra or {}).items():
            neutral = _NEUTRAL.get(name, ())
            if value is None or any(type(value) is type(each) and value == each for each in neutral):
                continue
            if type(value) is float and value in [each for each in neutral if type(each) is int]:  # 0.0 is 0
                continue
            expected = " or ".join(map(repr, neutral)) or "no such field"
            raise ParameterError(name, expected, short(value), "This server does not support it: leave it out.")
        return self


class Message(_Fields):
    """A message of a conversation. content: its text; of parts, all of them texts, what they are together."""

    role: Literal["system", "user", "assistant"]
    content: Text

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        for part in content:
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                kind = part.get("type") if isinstance(part, dict) else part
                raise ParameterError("content", "parts of type 'text'", short(kind), "This server reads text alone.")
        return "".join(part["text"] for part in content)


class StreamOptions(_Fields):
    """How to stream. include_usage: a last event with the counts of tokens."""

    include_usage: bool = False


class Asking(_Fields):
    """What all requests have. Fields left out or null: the likeliest tokens, no seed, no stop strings, one answer at once."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """A name for the client's own books; it changes nothing."""
    kind: ClassVar[str]
    """The name of the response in OpenAI's API."""
    part_kind: ClassVar[str]
    """That of a part of a streamed one."""
    usual_tokens: ClassVar[int]
    """Tokens of an answer at most, if the request does not say."""

    @model_validator(mode="after")
    def _check(self) -> Asking:
        if self.max_tokens and self.max_completion_tokens not in (None, self.max_tokens):
            remedy = "They mean the same: give one of them."
            raise ParameterError("max_completion_tokens", f"max_tokens, {self.max_tokens}", self.max_completion_tokens, remedy)
        if self.stream_options is not None and not self.stream:
            raise ParameterError("stream_options", "none without stream", "some", "Leave it out, or set stream to true.")
        return self

    @property
    def answer_tokens(self) -> int | None:
        """Tokens of the answer at most; None if the request does not say."""
        return self.max_tokens or self.max_completion_tokens

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def choice(self, text: str, reason: str | None, part: Literal["whole", "first", "more"] = "whole") -> dict[str, Any]:
        """The answer, or a part of a streamed one, as OpenAI has it. reason: why it ended, if it has."""
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


class CompletionRequest(Asking):
    """Of /v1/completions. prompt: a text, whose special tokens count as such, or token ids."""

    prompt: Annotated[Text, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)]
    kind = part_kind = "text_completion"
    usual_tokens = 16


class ChatRequest(Asking):
    """Of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    kind, part_kind = "chat.completion", "chat.completion.chunk"
    usual_tokens = 1024

    def choice(self, text: str, reason: str | None, part: Literal["whole", "first", "more"] = "whole") -> dict[str, Any]:
        said = {} if part == "more" else {"role": "assistant"}
        said |= {} if part == "more" and reason else {"content": text}
        return {"index": 0, "message" if part == "whole" else "delta": said, "logprobs": None, "finish_reason": reason}


def short(value: Any) -> Any:
    """A value for a message: as it is, if it is short."""
    return value if len(repr(value)) < 80 else f"{type(value).__name__} of {len(repr(value))} characters"

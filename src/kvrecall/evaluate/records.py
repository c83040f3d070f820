"""Checks of a run's files, so that readers need not check again; unknown fields are allowed."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvrecall.core.whole_files import first_mistake

Whole = Annotated[int, Field(ge=0, le=2**53)]
Share = Annotated[float, Field(ge=0, le=1)]
Layer = Annotated[str, Field(pattern=r"^[0-9]{1,6}$")]


class _Checked(BaseModel):
    """Exact types, and finite numbers by default."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Seconds(_Checked):
    """Seconds of a sample: for reading the prompt and for decoding the answer."""

    prefill: Annotated[float, Field(ge=0)] = 0.0
    decode: Annotated[float, Field(ge=0)]


class Window(_Checked):
    """A window of a long generation; see `drift.Window`. kl may be infinite."""

    first_step: Whole
    steps: Whole = 1
    agreement: Share
    kl: Annotated[float, Field(ge=0, allow_inf_nan=True)]
    recall: Share | None = None


class Sample(_Checked):
    """A line of samples.jsonl. Identifying fields are required; older runs lack some of the others."""

    task: str
    condition: str
    context: Whole | None = None
    sample: Whole = 0
    attempt: Whole = 0
    method: str = ""
    budget: Whole | None = None
    depth: Share | None = None
    score: Share = 0.0
    scores: list[Share] = []
    answers: list[str] = []
    expected: list[list[str]] = []
    seconds: Seconds | None = None
    prompt_tokens: Whole = 0
    new_tokens: Whole = 0
    attended_tokens: Annotated[float, Field(ge=0)] | None = None
    estimated_units: Annotated[float, Field(ge=0)] | None = None
    windows: list[Window] = []
    layers: dict[Layer, Share] = {}

    @model_validator(mode="after")
    def _placed(self) -> Sample:
        if self.context is None and (self.windows or self.depth is not None):
            raise ValueError("context: expected a number of tokens with depth or windows")
        return self


class Configuration(_Checked):
    """The fields of config.json that are read."""

    tasks: list[str] = []
    contexts: list[Whole | None] = []
    conditions: dict[str, Any] | list[str] = {}


_MODELS: dict[str, type[BaseModel]] = {"sample": Sample, "configuration": Configuration}


def first_mistake_of(kind: str, held: Any) -> str | None:
    """The first mistake of a "sample" or "configuration": place, expected, given; None without one."""
    try:
        _MODELS[kind].model_validate(held)
    except ValidationError as error:
        return first_mistake(error)
    return None

"""One request between two calls of the model: its next inputs, its next tokens, its end.

transformers' `generate` prepares logits processors, stopping criteria, positions and arguments, also from the model's
generation config. It passes them to a decoding loop. That loop is this file's, because several requests share a step.
"""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation.configuration_utils import GenerationMode

from kvrecall.backends.transformers import RetrievalCache
from kvrecall.backends.transformers.cache_name import CACHE, cache_argument, output_with
from kvrecall.backends.transformers.multi_request import joinable
from kvrecall.core.errors import ParameterError

_SHARED = {"input_ids", "position_ids", "attention_mask", CACHE, "use_cache", "logits_to_keep"}
"""Arguments of a decode step that a joint step sets for all rows."""


class Decoding:
    """One request, from the last chunk of its prompt on, independent of other requests."""

    exact = False
    """Whether its tokens are those of full attention."""

    def __init__(
        self, model: PreTrainedModel, cache: RetrievalCache, input_ids: Tensor, mask: Tensor, config: GenerationConfig,
        seed: int | None, tokenizer: Any = None,
    ) -> None:  # fmt: skip
        """input_ids: the prompt `[B, T]`. mask: `[B, T]`, 0 for left padding. seed: of its own generator; None: torch's default
        one. tokenizer: for stop strings.

        Raises what `model.generate` raises for its arguments.
        """
        self.cache = cache
        self._prepare(model, input_ids, mask, config, tokenizer)
        self._prompt = input_ids.shape[1]
        self._ids = torch.zeros(input_ids.shape[0], self._most, dtype=torch.int64, device=input_ids.device)
        self._ids[:, : self._prompt] = input_ids
        self._written = self._prompt
        self._generator: torch.Generator | None = None
        if seed is not None and self._samples:
            self._generator = torch.Generator(input_ids.device).manual_seed(seed)
        self.steps: list[list[int]] = []
        """The answer: ids of each step, one per sequence; padding after a sequence's end."""
        self.ended = False
        self._unfinished = [True] * input_ids.shape[0]
        self._told = 0
        """Steps that the model's arguments include."""
        self._outputs: Any = None

    def _prepare(self, model: Any, input_ids: Tensor, mask: Tensor, config: GenerationConfig, tokenizer: Any) -> None:
        """Lets `generate` prepare everything, and takes over where its decoding loop would begin."""
        taken: dict[str, Any] = {}

        def take(model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> Tensor:
            taken.update(prepared, model=model)
            return input_ids

        # The cache is given, and transformers passes no tokenizer to a loop of one's own.
        replaced = {name: None for name in ("cache_implementation", "stop_strings") if getattr(model.generation_config, name)}
        model.generate(
            input_ids, attention_mask=mask, **cache_argument(self.cache), generation_config=config, custom_generate=take,
            **replaced,
        )  # fmt: skip
        made: Any = taken.pop("generation_config")
        self.model: Any = taken.pop("model")
        """The transformers model inside a wrapper."""
        self._processors = taken.pop("logits_processor")
        criteria = list(taken.pop("stopping_criteria"))
        self._arguments = taken
        self._samples = bool(made.do_sample)
        self._most: int = made.max_length
        ends: list[Tensor] = [each.eos_token_id for each in criteria if isinstance(each, EosTokenCriteria)]  # type: ignore[misc]
        self._ends = {token for each in ends for token in each.tolist()}
        self._pad: int | None = made.pad_token_id if ends else None
        self._criteria = [each for each in criteria if not isinstance(each, EosTokenCriteria | MaxLengthCriteria)]
        """Stopping criteria besides the length and end-of-sequence ids."""
        if stops := model.generation_config.stop_strings:
            self._criteria.append(StopStringCriteria(tokenizer, stops))
        self._take(made, ends)

    def _take(self, made: Any, ends: list[Tensor]) -> None:
        """Hook for subclasses: takes more from the prepared generation config and the ids that end a sequence."""

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn."""
        return self._samples

    @property
    def reserve_tokens(self) -> int:
        """Most further tokens per sequence."""
        return self._most - self._prompt - len(self.steps)

    @property
    def goes_on(self) -> bool:
        """Whether the next step may be launched before its tokens are checked: they are fed as chosen, and the cache can
        forget them if one ends the answer."""
        forgets = len(self.cache.retrieval_layers) == len(self.cache.layers)  # sliding windows cannot forget
        return forgets and self.reserve_tokens > 1 and all(self._unfinished)

    @property
    def stored(self) -> int:
        """Tokens per sequence that the cache holds between two steps."""
        return self._prompt + len(self.steps) - 1

    @property
    def sequences(self) -> Tensor:
        """Prompt and answer so far, int64 `[B, T]`; later steps do not change the view."""
        new = self.steps[self._written - self._prompt :]
        if new:
            end = self._written + len(new)
            self._ids[:, self._written : end] = torch.tensor(new, dtype=torch.int64, device="cpu").T.to(self._ids.device)
            self._written = end
        return self._ids[:, : self._written]

    @property
    def joinable(self) -> bool:
        """Whether a step needs only tokens and positions, so that it can share a call with other requests."""
        return joinable(self.cache) and self._plain

    @cached_property
    def _plain(self) -> bool:
        positions = self._arguments.get("position_ids")
        if positions is None or positions.ndim != 2 or positions.shape[0] != self._ids.shape[0]:
            return False
        self._last = positions[:, self._prompt - 1].tolist()
        return all(name in _SHARED or value is None for name, value in self._next_inputs().items())

    def positions(self) -> list[int]:
        """Positions of the next tokens, one per sequence; for joinable requests."""
        return [last + len(self.steps) for last in self._last]

    @property
    def missing(self) -> int:
        """Tokens of the prompt that the cache does not hold."""
        return self._prompt - self.cache.get_seq_length()

    def to_read(self) -> Tensor:
        """What `read` feeds, ids and their positions, int64 `[2, B, T]`; for joinable requests."""
        chunk = slice(self._prompt - self.missing, self._prompt)
        return torch.stack([x[:, chunk] for x in (self._ids, self._arguments["position_ids"])])

    def read(self) -> Tensor:
        """Feeds the tokens of the prompt that the cache does not hold; logits `[B, vocabulary]`."""
        missing = self.missing
        inputs = self.model.prepare_inputs_for_generation(
            self.sequences, next_sequence_length=missing, is_first_iteration=True, **self._arguments
        )
        # A single token searches, as in `model.generate`.
        with self.cache.reading_prompt() if missing > 1 or self.exact else nullcontext():
            return self._called(self.model(**inputs, return_dict=True))

    def step(self) -> Tensor:
        """Feeds the last tokens; logits `[B, vocabulary]`."""
        return self._called(self.model(**self._next_inputs(), return_dict=True))

    def _next_inputs(self) -> dict[str, Any]:
        """Arguments of a call that feeds the last tokens."""
        self._tell()
        return self.model.prepare_inputs_for_generation(self.sequences, next_sequence_length=1, **self._arguments)

    def _inputs_of(self, ids: Tensor, tokens: int, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a call that feeds the last of these ids `[B, T]` and gives logits of each."""
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=tokens, **arguments)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = tokens
        return inputs

    def _tell(self) -> None:
        """Updates the model's arguments to the last step."""
        behind = len(self.steps) - self._told
        if behind:
            outputs = self._outputs or output_with(self.cache)
            several = {"num_new_tokens": behind} if behind > 1 else {}  # after steps with tokens and positions only
            self._arguments = self.model._update_model_kwargs_for_generation(
                outputs, dict(self._arguments), is_encoder_decoder=False, **several
            )
            self._told, self._outputs = len(self.steps), None

    def _called(self, outputs: Any) -> Tensor:
        """The logits `[B, vocabulary]` of a call; keeps its outputs for the next arguments."""
        logits = outputs.logits[:, -1]
        outputs["logits"], self._outputs = None, outputs  # logits of the first call may cover a whole chunk
        return logits

    def choose(self, logits: Tensor) -> Tensor:
        """The next tokens int64 `[B]`, on the prompt's device, from logits `[B, vocabulary]`."""
        scores = logits.to(copy=True, dtype=torch.float32, device=self._ids.device)
        if self._processors:
            scores = self._processors(self.sequences, scores)
        return self._picked(scores)

    def _picked(self, scores: Tensor) -> Tensor:
        """A token int64 `[n]` from each row of fp32 `[n, vocabulary]`."""
        if not self._samples:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), 1, generator=self._generator).squeeze(1)

    def taken(self, chosen: list[int]) -> list[list[int]]:
        """The tokens of `choose` as steps of the answer, in order, each with one token per sequence."""
        return [chosen]

    def settle(self) -> None:
        """After the steps of a call were accepted: removes other tokens from the cache."""

    def take_back(self) -> None:
        """Removes drafts, which are not part of the answer, from the request and its cache."""

    def close(self) -> None:
        """Ends the request and restores settings of the cache."""
        self.stop_recording()

    def stop_recording(self) -> None:
        """Sliding windows of the cache keep no more than their tokens from the next step on."""
        for layer in self.cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False  # pyright: ignore[reportAttributeAccessIssue]

    def _padded(self, tokens: list[int]) -> list[int]:
        """The tokens of a step, with padding for finished sequences."""
        if self._pad is None:
            return tokens
        return [token if going else self._pad for token, going in zip(tokens, self._unfinished, strict=True)]

    def accept(self, tokens: list[int]) -> None:
        """Adds the chosen tokens; finished sequences get padding."""
        tokens = self._padded(tokens)
        self.steps.append(tokens)
        stops = [token in self._ends for token in tokens]
        if len(self.steps) >= self._most - self._prompt:
            stops = [True] * len(tokens)
        for criterion in self._criteria:
            ends = criterion(self.sequences, None).expand(len(tokens)).tolist()
            stops = [a or b for a, b in zip(stops, ends, strict=True)]
        self._unfinished = [going and not stop for going, stop in zip(self._unfinished, stops, strict=True)]
        self.ended = not any(self._unfinished)


def generation_config(
    model: Any, tokenizer: PreTrainedTokenizerBase | None, max_new_tokens: int, temperature: float, top_p: float,
    eos_token_id: int | list[int] | None, prompt_lookup_num_tokens: int | None = None,
) -> GenerationConfig:  # fmt: skip
    """The generation config for transformers; other settings come from the model's own generation config.

    prompt_lookup_num_tokens: None: the model's own setting. Raises ParameterError if the model's config asks for beams, several
    answers, or assisted generation.
    """
    known: Any = copy(model.generation_config)
    lookup, known.prompt_lookup_num_tokens = known.prompt_lookup_num_tokens, None
    lookup = lookup if prompt_lookup_num_tokens is None else prompt_lookup_num_tokens
    mode = known.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise _refused("generation_config", "greedy search or sampling", str(getattr(mode, "value", mode)))
    if (known.num_return_sequences or 1) != 1:
        raise _refused("num_return_sequences", "1", known.num_return_sequences)
    if known.use_cache is False:
        raise _refused("use_cache", "True", False)
    if known.stop_strings and tokenizer is None:
        raise ParameterError("tokenizer", "the model's, for the stop strings of its generation config", None, "Pass it.")
    eos = eos_token_id if eos_token_id is not None else getattr(known, "eos_token_id", None)
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    pad = getattr(known, "pad_token_id", None)
    if pad is None:
        pad = tokenizer.pad_token_id if tokenizer is not None and tokenizer.pad_token_id is not None else 0
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:  # top_k=0 is off; the default would sample from 50 tokens
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    guessing = {} if lookup is None else {"prompt_lookup_num_tokens": lookup}
    return GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=pad, **sampling, **guessing)


def check_guessed(model: Any, what: str) -> None:
    """Raises ParameterError for settings of the model's generation config that remember each token that they have seen, so that
    tokens which are taken back would stay. what: the argument that guesses tokens."""
    known = model.generation_config
    if known.guidance_scale not in (None, 1) or isinstance(known.watermarking_config, SynthIDTextWatermarkingConfig):
        name = "watermarking_config" if known.guidance_scale in (None, 1) else "guidance_scale"
        expected = f"{name} left out of model.generation_config, which cannot take back what {what} guesses"
        raise ParameterError(what, expected, getattr(known, name), f"Leave one of the two out: {name}, or {what}.")


def _refused(name: str, expected: str, got: object) -> ParameterError:
    remedy = "Change model.generation_config, or call model.generate inside kvrecall.attach."
    return ParameterError(name, f"{expected} in the model's generation config", got, remedy)


def answers(steps: list[list[int]], eos_token_id: int | list[int] | None) -> list[list[int]]:
    """The ids of each sequence up to and including its end."""
    ends = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    cut = []
    for row in map(list, zip(*steps, strict=True)):
        stop = next((i for i, token in enumerate(row) if token in ends), len(row))
        cut.append(row[: stop + 1])
    return cut

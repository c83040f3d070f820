"""Prompt look-up: guesses the next tokens from the text, and checks all of them in one call of the model.

1. The last tokens are looked up in the text; the tokens that followed there are the guess (`PromptLookupCandidateGenerator` of
   transformers).
2. One call feeds the last token and the guess. Each is a decode query: it finds what it would find alone.
3. A token is chosen from every row of logits. Right guesses are accepted, and the token after them.
4. The cache removes the others exactly, with everything that was learnt from them. A captured step always has as many tokens as
   a guess may have, and one more; those that are not taken leave nothing behind (`capture.graph`).

The first guess after the prompt is fed in a separate call, so that it is not part of the prompt. Random numbers are drawn as in
transformers' assisted decoding, one row of a step per fed token.
"""

from __future__ import annotations

import warnings
from functools import cache as once
from typing import Any

import torch
from torch import Tensor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from kvrecall.backends.base import MOST_QUERIES
from kvrecall.backends.transformers import RetrievalCache
from kvrecall.backends.transformers.cache_name import output_with
from kvrecall.backends.transformers.families import context_limit
from kvrecall.core.errors import ParameterError
from kvrecall.engine.decoding import Decoding

NAME = "prompt_lookup_num_tokens"


class LookupDecoding(Decoding):
    """A request of one sequence."""

    def _take(self, made: Any, ends: list[Tensor]) -> None:
        self._limit = context_limit(self.model.config)
        self._guess: list[int] = []
        self._taking: Any = None
        """The graph that made the last step, until its tokens are taken."""
        self._generator_of_guesses = PromptLookupCandidateGenerator(
            eos_token_id=torch.cat(ends) if ends else None, num_output_tokens=made.prompt_lookup_num_tokens,
            max_matching_ngram_size=made.max_matching_ngram_size or 2, max_length=self._most,
            logits_processor=self._processors, vocab_size=self.model.config.get_text_config().vocab_size,
        )  # fmt: skip

    @property
    def joinable(self) -> bool:
        return False

    @property
    def goes_on(self) -> bool:
        return False  # the host looks up the next guess

    def read(self) -> Tensor:
        """Logits `[1 + n, vocabulary]` after the prompt and after each of n guessed tokens."""
        logits = super().read()
        self._look_up()
        return torch.cat([logits, self._feed(0)]) if self._guess else logits

    def step(self) -> Tensor:
        """Logits `[1 + n, vocabulary]` after the last token and after each of n guessed tokens."""
        self._taking = None
        self._look_up()
        self._tell()
        return self._feed(1)

    def captured(self, steps: Any) -> Tensor | None:
        """As `step`, by `CapturedSteps` of several tokens; None if this step must be uncaptured."""
        self._taking = None
        self._look_up()
        last = self.steps[-1][0]
        if self._limit is not None and self.stored + steps.width > self._limit:
            steps.close()  # it would feed positions that the model does not have
            return None
        guess = steps.guess(last, self._guess, self.reserve_tokens)
        logits = None
        if guess is not None:
            self._guess = guess
            logits = steps.step(steps.padded([last, *guess]), self.reserve_tokens)
        if logits is None:
            if steps.refused:
                say_uncaptured(steps.reason)
            return None
        self._taking = steps.runner.graph
        return logits[0, : 1 + len(self._guess)]

    def choose(self, logits: Tensor) -> Tensor:
        """A token int64 `[1 + n]` from each row, given the guessed tokens before it."""
        scores = logits.to(copy=True, dtype=torch.float32, device=self._ids.device)
        if self._processors:
            ids = self._with_guess()
            start = ids.shape[1] - len(self._guess)
            rows = [self._processors(ids[:, : start + i], row[None]) for i, row in enumerate(scores)]
            scores = torch.cat(rows)
        return self._picked(scores)

    def taken(self, chosen: list[int]) -> list[list[int]]:
        right = 0
        while right < len(self._guess) and chosen[right] == self._guess[right]:
            right += 1
        return [[token] for token in chosen[: right + 1]]

    def settle(self) -> None:
        self._guess = []
        taking, self._taking = self._taking, None
        new = self.stored - self.cache.get_seq_length()
        if taking is None:
            self.cache.crop(new)
        else:
            taking.take(new)

    def _look_up(self) -> None:
        found, _ = self._generator_of_guesses.get_candidates(self.sequences)  # type: ignore[arg-type]
        guess = found[0, self.sequences.shape[1] :].tolist()
        room = len(guess) if self._limit is None else max(0, self._limit - self.sequences.shape[1])
        self._guess = guess[:room]

    def _with_guess(self) -> Tensor:
        guess = torch.tensor([self._guess], dtype=torch.int64, device=self._ids.device)
        return torch.cat([self.sequences, guess], 1)

    def _feed(self, known: int) -> Tensor:
        """Feeds the last `known` tokens and the guess: logits of each."""
        arguments, guessed = self._arguments, len(self._guess)
        if guessed:
            outputs = output_with(self.cache)
            arguments = self.model._update_model_kwargs_for_generation(
                outputs, dict(arguments), is_encoder_decoder=False, num_new_tokens=guessed
            )
        count = known + guessed
        inputs = self._inputs_of(self._with_guess(), count, arguments)
        self.cache.activate_past_recording()  # so that sliding windows can be cropped
        return self.model(**inputs, return_dict=True).logits[0, -count:]


def check_lookup(tokens: object, sequences: int, cache: RetrievalCache) -> None:
    """Raises ParameterError for requests that cannot use prompt look-up."""
    most = MOST_QUERIES - 1
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= most:
        remedy = "More tokens in one call would be attended densely."
        raise ParameterError(NAME, f"an integer from 1 to {most}", tokens, remedy)
    if sequences != 1:
        remedy = "Ask for each prompt in a request of its own; they are answered beside each other."
        raise ParameterError(NAME, "one prompt", f"{sequences} prompts", remedy)
    fixed = [number for number, layer in enumerate(cache.layers) if not getattr(layer, "is_croppable", True)]
    if fixed:
        got = f"one whose layer {fixed[0]} keeps a running state"
        raise ParameterError(NAME, "a model whose layers can remove tokens", got, f"Leave {NAME} out.")


@once
def say_uncaptured(reason: str) -> None:
    """Warns, once for each reason, that steps of such requests are not captured."""
    warnings.warn(f"decoding uncaptured, with {NAME}: {reason}", RuntimeWarning, stacklevel=2)

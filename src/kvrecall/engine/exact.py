"""Exact answers: decode steps with retrieval draft tokens, and full attention checks them.

1. Steps of the method draft some tokens. Each reads few rows.
2. One pass of full attention reads the last accepted token and the drafts, and all rows once. Drafts that it would have chosen
   itself are accepted up to the first other one; in its place comes the pass's own token, and behind the last draft one more.
3. The keys and values of the drafts are removed before the pass, and those of the pass stay. So the cache is the one that full
   attention makes, and no answer depends on what was drafted.

Greedy tokens are those of full attention. Sampled ones have its distribution (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", Algorithm 1): a token drafted with probability q is accepted with probability
min(1, p / q), where p is the pass's; in place of one that is not, a token is drawn from max(0, p - q). Drafts of several
sequences are accepted as far as those of all are right.

With prompt look-up the drafting steps guess tokens from the text. Sequences too short for a search are decoded by steps alone,
which attend to everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvrecall.backends.base import MOST_QUERIES
from kvrecall.backends.transformers import RetrievalCache
from kvrecall.core.errors import ParameterError
from kvrecall.engine.decoding import Decoding
from kvrecall.engine.lookup import LookupDecoding

MOST_DRAFTS = 32
"""Tokens that one pass checks at most, besides the last accepted one."""
_KEPT = 0.9
"""Share of what earlier checks say that each check keeps."""
_PASS_STEPS, _STREAMED_PER_STEP = 3, 4096
"""A pass takes about as long as this many steps, and on a GPU as one more for so many tokens whose rows are on the host."""


@dataclass
class Drafts:
    """What the checks of a request have said. checks: passes of full attention. drafted: tokens that they have checked.
    accepted: those of them that became tokens of the answer."""

    checks: int = 0
    drafted: int = 0
    accepted: int = 0


class DraftLength:
    """How many tokens to draft: as many as give the most tokens in a time, if drafts are as often right as lately. Depends on
    no clock, so that a seed gives the same tokens again."""

    def __init__(self, pass_steps: float) -> None:
        """pass_steps: drafting steps that a check takes as long as."""
        self._pass = pass_steps
        self._right, self._judged = 9.0, 10.0
        self.tokens = self._best()
        """Drafts before the next check."""

    def _best(self) -> int:
        p = self._right / self._judged
        coming = accumulate(p**i for i in range(MOST_DRAFTS + 1))
        gains = [tokens / (n + self._pass) for n, tokens in enumerate(coming)]
        return gains.index(max(gains[1:]), 1)

    def saw(self, right: int, drafted: int) -> None:
        """A check found the first `right` of `drafted` tokens right, and looked at one more if there was one."""
        self._right = _KEPT * self._right + right
        self._judged = _KEPT * self._judged + right + (right < drafted)
        self.tokens = self._best()


class ExactDecoding(Decoding):
    """A request whose answer is checked. Between two checks `steps` ends with the drafts, which the cache holds like others."""

    exact = True

    def _take(self, made: Any, ends: list[Tensor]) -> None:
        super()._take(made, ends)
        self.drafts = Drafts()
        self._whole_below = self.cache.method.full_everywhere_below() - MOST_QUERIES
        self._accepted = 0
        """Steps of the answer; those behind them are drafts."""
        self._end_drafted = False
        """Whether a draft ends a sequence."""
        self._drawn: Tensor | None = None
        """Probabilities of the last drafting step, fp32 `[steps, B, vocabulary]`, if tokens are drawn."""
        self._laws: list[Tensor] = []
        """Of each draft, those that it was drawn with, `[B, vocabulary]`."""
        self._drafting = self._checking = False
        """What the last tokens were chosen for; neither for tokens that need no check."""
        self._sure: tuple[dict[str, Any], int, Any] = dict(self._arguments), 0, None
        """What the model's arguments were when the last token was accepted."""
        self._mark = self.cache.mark()
        """What the cache was then."""
        self._length: DraftLength
        """Known with the prompt, as are layers that cannot remove tokens (`_fixed`)."""

    @property
    def drafted(self) -> int:
        """Drafts that are not checked."""
        return len(self.steps) - self._accepted

    @property
    def _searches(self) -> bool:
        """Whether a drafting step may search. Otherwise it attends to everything, and needs no check."""
        return self._accepted > 0 and self._prompt + self._accepted >= self._whole_below

    @property
    def _planned(self) -> int:
        """Drafts before the next check: with the token behind them the answer must not be too long."""
        return min(self._length.tokens, self._most - self._prompt - self._accepted - 1)

    @property
    def checks(self) -> bool:
        """Whether its next step is a check."""
        return self._searches and (self._end_drafted or self.drafted >= self._planned)

    @property
    def goes_on(self) -> bool:
        return super().goes_on and self._searches and not self._checking and self.drafted + 1 < self._planned

    def read(self) -> Tensor:
        return Decoding.read(self)  # nothing is guessed behind a prompt, because a guess would search

    def check(self) -> Tensor:
        """Feeds the last accepted token and n drafts to full attention; logits `[B, n + 1, vocabulary]`. The cache holds all of
        them until `settle`."""
        self.begin_check()
        return self._attend_whole(1 + self.drafted)

    def begin_check(self) -> None:
        """Removes the drafts from the cache: the next logits are a check's."""
        self._checking, self._drafting = True, False
        self.cache.return_to(self._mark)

    def to_check(self) -> Tensor:
        """What a check feeds, ids and their positions, int64 `[2, B, n + 1]`; for joinable requests."""
        ids = self.sequences[:, -1 - self.drafted :]
        ends = torch.tensor(self.positions(), dtype=torch.int64, device=ids.device).unsqueeze(1)
        return torch.stack([ids, ends + torch.arange(-self.drafted, 1, dtype=torch.int64, device=ids.device)])

    def _attend_whole(self, tokens: int) -> Tensor:
        """Feeds the last tokens to full attention; logits of each."""
        self._restore_arguments()
        self._tell()
        inputs = self._inputs_of(self.sequences, tokens, self._arguments)
        if not self._fixed:
            self.cache.activate_past_recording()  # so that sliding windows can be cropped
        with self.cache.reading_prompt():
            return self.model(**inputs, return_dict=True).logits[:, -tokens:]

    def choose(self, logits: Tensor) -> Tensor:
        """Of a check int64 `[(2 n + 1) B]`: a token for each row of logits, then for each draft whether it is right. Of other
        steps as usual."""
        return self._judge(logits) if self._checking else super().choose(logits)

    def _picked(self, scores: Tensor) -> Tensor:
        if self._samples:
            self._drawn = scores.softmax(-1).view(-1, self._ids.shape[0], scores.shape[-1])
        return super()._picked(scores)

    def _judge(self, logits: Tensor) -> Tensor:
        batch, rows, _ = logits.shape
        scores = logits.to(copy=True, dtype=torch.float32, device=self._ids.device).transpose(0, 1)
        if self._processors:
            ids, known = self.sequences, self._prompt + self._accepted
            scores = torch.stack([self._processors(ids[:, : known + i], row) for i, row in enumerate(scores)])
        drafts = torch.tensor(self.steps[self._accepted :], dtype=torch.int64, device="cpu").view(rows - 1, batch)
        drafts = drafts.to(scores.device)
        if not self._samples:
            tokens = scores.argmax(-1)
            return torch.cat([tokens.flatten(), (tokens[:-1] == drafts).long().flatten()])
        laws = scores.softmax(-1)
        drawn = torch.stack(self._laws).to(laws.device) if self._laws else laws[:0]
        p, q = (law.gather(-1, drafts.unsqueeze(-1)).squeeze(-1) for law in (laws[:-1], drawn))
        chances = torch.rand(drafts.shape, generator=self._generator, dtype=torch.float32, device=laws.device)
        right = chances * q < p
        rest = (laws[:-1] - drawn).clamp_min(0)
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, laws[:-1])  # equal laws refuse nothing but by rounding
        own = torch.multinomial(torch.cat([rest, laws[-1:]]).flatten(0, 1), 1, generator=self._generator).view(rows, batch)
        tokens = torch.cat([torch.where(right, drafts, own[:-1]), own[-1:]])
        return torch.cat([tokens.flatten(), right.long().flatten()])

    def taken(self, chosen: list[int]) -> list[list[int]]:
        """Of a check, the tokens that it accepts. Drafts are none yet."""
        if self._checking:
            return self._right(chosen)
        made = super().taken(chosen)
        self._drafting = self._searches
        if not self._drafting:
            return made
        for number, step in enumerate(made):
            self._end_drafted |= any(going and token in self._ends for token, going in zip(step, self._unfinished, strict=True))
            self.steps.append(self._padded(step))
            if self._drawn is not None:
                self._laws.append(self._drawn[number])
        return []

    def _right(self, chosen: list[int]) -> list[list[int]]:
        """The first right drafts of a check, and the token behind them."""
        batch, drafted = self._ids.shape[0], self.drafted
        rows = [chosen[i * batch : (i + 1) * batch] for i in range(2 * drafted + 1)]
        whole = [
            all(flag or not going for flag, going in zip(row, self._unfinished, strict=True)) for row in rows[drafted + 1 :]
        ]
        right = next((i for i, flag in enumerate(whole) if not flag), drafted)
        self._length.saw(right, drafted)
        self.drafts.checks += 1
        self.drafts.drafted += drafted
        self.drafts.accepted += right
        self._forget_drafts()
        return rows[: right + 1]

    def settle(self) -> None:
        super().settle()
        if self._drafting:
            return
        if not self._accepted:
            self._length = DraftLength(_pass_steps(self.cache, self._prompt))
            self._fixed = not all(getattr(layer, "is_croppable", True) for layer in self.cache.layers)
        if self._fixed and self.cache.get_seq_length() > self.stored:
            self._read_again()
        else:
            self.cache.crop(self.stored - self.cache.get_seq_length())  # 0 cuts windows that were recorded
        self.stop_recording()  # before transformers 5.24 a window can record one step only
        self.cache.tokens.answered_from(self._prompt)
        self._accepted, self._sure = len(self.steps), (dict(self._arguments), self._told, self._outputs)
        self._mark = self.cache.mark()

    def _read_again(self) -> None:
        """A running state cannot remove drafts: it goes back, and the accepted tokens but the last one are fed again."""
        self.cache.return_to(self._mark)
        last = self.steps.pop()
        self._written = min(self._written, self._prompt + len(self.steps))
        self._attend_whole(1 + len(self.steps) - self._accepted)
        self._restore_arguments()
        self.steps.append(last)

    def take_back(self) -> None:
        self._forget_drafts()
        if self.cache.get_seq_length() > self.stored:
            self.cache.return_to(self._mark)

    def _forget_drafts(self) -> None:
        del self.steps[self._accepted :]
        self._written = min(self._written, self._prompt + self._accepted)
        self._end_drafted = self._drafting = self._checking = False
        self._laws = []
        self._restore_arguments()

    def close(self) -> None:
        self.take_back()  # of a request that is cancelled
        super().close()

    def _restore_arguments(self) -> None:
        arguments, self._told, self._outputs = self._sure
        self._arguments = dict(arguments)


class ExactLookupDecoding(ExactDecoding, LookupDecoding):
    """As `ExactDecoding`, and the steps that draft guess tokens from the text."""

    def _look_up(self) -> None:
        super()._look_up()
        self._guess = self._guess[: max(0, self._planned - self.drafted - 1)]


def kind_of(cache: RetrievalCache, exact: bool, looks_up: bool) -> type[Decoding]:
    """How a request decodes. A method that never searches is exact by itself."""
    exact = exact and cache.has_index
    if looks_up:
        return ExactLookupDecoding if exact else LookupDecoding
    return ExactDecoding if exact else Decoding


def check_exact(cache: RetrievalCache) -> None:
    """Raises ParameterError for a cache whose answers cannot be exact."""
    if cache.rounded:
        remedy = "Leave host_rows out, or exact; a session that was saved with rows='fp8' must be read again from its text."
        raise ParameterError("exact", "keys and values that are not rounded", "rows of eight bits", remedy)
    if cache.rotary_kind == "dynamic":
        got, remedy = "a dynamic one, whose angles change with each token", "Leave exact out."
        raise ParameterError("exact", "a rotary embedding that gives a token the same angles in every call", got, remedy)


def _pass_steps(cache: RetrievalCache, tokens: int) -> float:
    """About how many drafting steps take as long as a check. tokens: of each sequence. Only layers that search have their rows
    in a GPU's host memory."""
    layers = cache.retrieval_layers
    streamed = sum(cache.method.searches(layer.number) for layer in layers) / len(layers)
    on_gpu = any(state.shape.device.type == "cuda" for state in cache.states)
    return _PASS_STEPS + on_gpu * streamed * tokens * cache.sequences / _STREAMED_PER_STEP

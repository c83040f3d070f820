"""Runs one family with and without kvrecall and says whether the answers are equal, refused, or different.

The budget covers everything, so retrieval must change nothing: batch of ragged, left-padded prompts, greedy answers, then a
second turn on the same cache. Then the same prompts in chunks by `engine.generate`, on a fork, and on a session that was saved
and loaded. A refusal must be a KVRecallError and leave the cache empty.
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, LogitsProcessor
from transformers.masking_utils import AttentionMaskInterface

import kvrecall
from kvrecall import engine
from kvrecall.backends.transformers.cache_name import CACHE, cache_argument
from kvrecall.backends.transformers.families import changing_rotary
from kvrecall.core.errors import InterruptedPassError, KVRecallError
from tests.zoo.tiny import SPECIAL_FROM, Family, tiny_model

PROMPT_TOKENS = (83, 30, 57)
"""Lengths of the prompts of a batch. Sinks and window hold at most 28 tokens, so every one has something to retrieve."""
ANSWER_TOKENS, MORE_TOKENS = 10, 6
CHUNK_TOKENS, FIRST_TOKENS = 30, 60
"""Of a chunk, and of what is read before a fork or a session; the shortest prompt is padding before them."""
ZONES: dict[str, Any] = {"sink_tokens": 4, "local_tokens": 16, "update_interval": 8, "full_attention_threshold": 0}
TOLERANCE = 1e-3
"""Of logits, relative to their standard deviation: fp32 sums in another order, through four layers."""
LEAST_EFFECT = 0.02
"""How far other tokens before the window must move the last logits, relative to their standard deviation."""

EQUAL, REFUSED, DIFFERENT, RAW, NOT_MADE = "equal", "refused", "DIFFERENT", "RAW ERROR", "not made"
FINE = {EQUAL, REFUSED, NOT_MADE}


@dataclass
class Outcome:
    """What one family did. faults: everything that must not be, besides the outcome itself."""

    name: str
    model_class: str
    outcome: str = NOT_MADE
    message: str = ""
    layers: str = ""
    """Layers that retrieve, and others by kind, such as `2 of 4; 2 sliding`."""
    deviation: float = 0.0
    """Largest difference of logits relative to their standard deviation."""
    effect: float = 0.0
    """How far the last logits move with the tokens before the window, relative to their standard deviation."""
    uses: str = ""
    """Of chunks, forks and sessions: those that are equal, and which are refused."""
    retrieved: int = 0
    """Tokens in the retrieval zone after the first answer, over all layers."""
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def fine(self) -> bool:
        return self.outcome in FINE and not self.faults


def compare(family: Family) -> Outcome:
    """Everything that is checked for one family."""
    found = Outcome(family.name, family.model_class)
    start = time.perf_counter()
    try:
        with torch.no_grad():
            _compare(family, found)
    finally:
        found.seconds = time.perf_counter() - start
    return found


def _compare(family: Family, found: Outcome) -> None:
    try:
        model = tiny_model(family)
        found.model_class = type(model).__name__
        ids, mask = prompts()
        # Some models remember the longest prompt they have seen (dynamic rope): every part begins with a fresh one.
        plain = turns(deepcopy(model), ids, mask)
        found.effect = effect_of_far_tokens(deepcopy(model), ids, mask)
    except Exception as error:
        found.message = shortened(error)
        return
    for part in (retrieving, plain_inside, other_uses):
        fresh = deepcopy(model)
        before = implementations(fresh)
        with judged(found):
            part(fresh, ids, mask, plain, found)
        what = part.__name__.replace("_", " ")
        if implementations(fresh) != before:
            found.faults.append(f"attention implementation not restored after {what}")
        if "kvrecall" in AttentionInterface._global_mapping or "kvrecall" in AttentionMaskInterface._global_mapping:
            found.faults.append(f"still registered after {what}")


def prompts() -> tuple[Tensor, Tensor]:
    """ids and mask `[B, T]`, padded on the left with 0."""
    draw = torch.Generator().manual_seed(3)
    longest = max(PROMPT_TOKENS)
    ids = torch.randint(3, SPECIAL_FROM, (len(PROMPT_TOKENS), longest), generator=draw)
    mask = torch.ones_like(ids)
    for row, length in enumerate(PROMPT_TOKENS):
        mask[row, : longest - length] = 0
    return ids * mask, mask


@dataclass
class Turn:
    """One call of generate."""

    sequences: Tensor
    logits: Tensor
    """`[B, answer tokens, vocabulary]`."""
    cache: Any
    again: Turn | None = None
    """The same where transformers goes on with its own cache, if that may give another answer."""


def turns(model: Any, ids: Tensor, mask: Tensor) -> list[Turn]:
    """An answer with transformers' own cache, and one to the first with more tokens behind it, read anew and with its own
    cache: not every family goes on rightly. Where the rotary embedding changes with the length, keys of a first turn differ."""
    first = answer(model, None, ids, mask)
    if model.config.is_encoder_decoder:
        return [first]
    ids, mask = longer(first.sequences, mask)
    if changing_rotary(model.config) == "dynamic":
        return [first, answer(model, first.cache, ids, mask)]
    second = answer(model, None, ids, mask)
    second.again = answer(model, first.cache, ids, mask, second)
    return [first, second]


def answer(model: Any, cache: Any, ids: Tensor, mask: Tensor, wanted: Turn | None = None, **given: Any) -> Turn:
    """A greedy answer. wanted: another whose tokens are taken, whatever the logits say, so that all steps can be compared.

    given: more arguments of `generate`, such as images."""
    torch.manual_seed(5)  # some families draw numbers in their forward pass
    given |= {} if cache is None else cache_argument(cache)
    if model.config.is_encoder_decoder:
        given |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=0,
        logits_processor=[] if wanted is None else [Follow(wanted.sequences)],
        return_dict_in_generate=True, output_logits=True, **given,
    )  # fmt: skip
    return Turn(out.sequences, torch.stack(out.logits, 1).float(), out.get(CACHE))


class Follow(LogitsProcessor):
    """Makes `generate` take the tokens of another answer. Without it a near-tie would end the comparison."""

    def __init__(self, sequences: Tensor) -> None:
        self.sequences = sequences

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        taken = self.sequences[:, input_ids.shape[1], None]
        return torch.full_like(scores, float("-inf")).scatter(1, taken, 0.0)


def longer(sequences: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """A second turn: what was said so far and `MORE_TOKENS` new tokens."""
    draw = torch.Generator().manual_seed(4)
    more = torch.randint(3, SPECIAL_FROM, (sequences.shape[0], MORE_TOKENS), generator=draw)
    ids = torch.cat([sequences, more], 1)
    return ids, torch.cat([mask, mask.new_ones(ids.shape[0], ids.shape[1] - mask.shape[1])], 1)


def effect_of_far_tokens(model: Any, ids: Tensor, mask: Tensor) -> float:
    """How far the last logits of the longest prompt move when the first half of it is another text, per standard deviation."""
    other = ids.clone()
    half = ids.shape[1] // 2
    other[0, :half] = ids[0, :half].flip(0)
    last = []
    for x in (ids, other):
        given = {"decoder_input_ids": x} if model.config.is_encoder_decoder else {}
        last.append(model(input_ids=x, attention_mask=mask, use_cache=False, **given).logits[0, -1].float())
    return difference(last[0], last[1])


def difference(got: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the standard deviation of what is wanted; infinite where only one is finite."""
    finite = wanted.isfinite()
    if got.shape != wanted.shape or not torch.equal(got.isfinite(), finite):
        return float("inf")
    return ((got - wanted)[finite].abs().max() / wanted[finite].std().clamp_min(1e-12)).item()


def retrieving(model: Any, ids: Tensor, mask: Tensor, plain: list[Turn], found: Outcome) -> None:
    """Both turns with a RetrievalCache."""
    cache = kvrecall.RetrievalCache(model.config, kvrecall.ParisKV(top_k=10_000, **ZONES))
    kinds = [type(layer).__name__.removesuffix("Layer") for layer in cache.layers]
    found.layers = ", ".join(f"{n} {kind}" for kind, n in Counter(kinds).items())
    for number, wanted in enumerate(plain):
        found.message = "second turn" if number else ""
        if number:
            ids, mask = longer(plain[0].sequences, mask)
        held = holdings(cache)
        try:
            with kvrecall.attach(model):
                got = answer(model, cache, ids, mask, wanted)
        except KVRecallError:
            if holdings(cache) != held:
                found.faults.append(f"refused after something was stored: {held} -> {holdings(cache)}")
            raise
        deviation = min(difference(got.logits, x.logits) for x in (wanted, wanted.again) if x is not None)
        found.deviation = max(found.deviation, deviation)
        if deviation > TOLERANCE:
            agree = (got.logits.argmax(-1) == wanted.logits.argmax(-1)).float().mean().item()
            first = difference(got.logits[:, 0], wanted.logits[:, 0])
            found.outcome = DIFFERENT
            found.message = (
                f"turn {number + 1}: {agree:.0%} of the tokens agree, "
                f"logits are off by {deviation:.1e}, the first by {first:.1e}"
            )
            return
        if not number:
            what_is_stored(cache, found)
    found.outcome, found.message = EQUAL, ""
    if found.effect < LEAST_EFFECT:
        found.faults.append(f"equality says nothing: far tokens move the logits by {found.effect:.1e} only")


def what_is_stored(cache: kvrecall.RetrievalCache, found: Outcome) -> None:
    """Every layer of ours must hold every real token once, and have some in the retrieval zone."""
    wanted = sum(PROMPT_TOKENS) + len(PROMPT_TOKENS) * (ANSWER_TOKENS - 1)
    reports = cache.stats().layers
    if len(reports) < len(cache.retrieval_layers):
        found.faults.append(f"{len(cache.retrieval_layers) - len(reports)} layers of ours store nothing")
    found.retrieved = sum(report.tokens["retrieval"] for report in reports)
    for report in reports:
        if (held := sum(report.tokens.values())) != wanted:
            found.faults.append(f"layer {report.layer} stores {held} tokens for {wanted}")
        if not report.tokens["retrieval"]:
            found.faults.append(f"layer {report.layer} has nothing to retrieve")


def holdings(cache: kvrecall.RetrievalCache) -> list[int]:
    """Tokens per layer, ours and transformers'; 1 for a layer with a state instead of tokens."""
    held = []
    for layer in cache.layers:
        try:
            held.append(int(layer.get_seq_length()))
        except (AttributeError, NotImplementedError, ValueError):
            held.append(int(any(getattr(layer, "has_previous_state", {}).values())))
    return held


def plain_inside(model: Any, ids: Tensor, mask: Tensor, plain: list[Turn], found: Outcome) -> None:
    """Without a cache of ours, an attached model must answer as it does outside, unless attaching itself is refused."""
    try:
        with kvrecall.attach(model):
            got = answer(model, None, ids, mask, plain[0])
    except Exception as error:
        if not (isinstance(error, KVRecallError) and found.outcome == REFUSED):
            found.faults.append(f"plain attention inside the block: {shortened(error)}")
        return
    deviation = difference(got.logits, plain[0].logits)
    if deviation > TOLERANCE:
        found.faults.append(f"plain attention inside the block differs by {deviation:.1e}")


def other_uses(model: Any, ids: Tensor, mask: Tensor, plain: list[Turn], found: Outcome) -> None:
    """Chunks, forks and sessions of a family that is equal so far."""
    if found.outcome != EQUAL:
        return
    method, wanted, told = kvrecall.ParisKV(top_k=10_000, **ZONES), plain[0], []

    def in_chunks() -> float:
        given = {"max_new_tokens": ANSWER_TOKENS, "chunk_tokens": CHUNK_TOKENS, "attention_mask": mask}
        made = engine.generate(model, None, ids, method, **given)
        return lost(made.sequences[:, ids.shape[1] :], wanted)

    def continued(cache: kvrecall.RetrievalCache) -> float:
        with kvrecall.attach(model):
            return difference(answer(model, cache, ids, mask, wanted).logits, wanted.logits)

    def first_part() -> kvrecall.RetrievalCache:
        cache, first = kvrecall.RetrievalCache(model.config, method), slice(0, FIRST_TOKENS)
        engine.prefill(model, ids[:, first], cache, chunk_tokens=CHUNK_TOKENS, attention_mask=mask[:, first])
        return cache

    def forked() -> float:
        cache = first_part()
        fork = cache.fork()
        return max(continued(fork), continued(cache))

    def saved() -> float:
        with tempfile.TemporaryDirectory() as folder:
            first_part().save(folder)
            return continued(kvrecall.RetrievalCache.load(folder, model.config, model=model))

    uses = {"chunks": in_chunks, "forks": forked, "sessions": saved}
    if changing_rotary(model.config) == "dynamic":  # a first part has the turns of its own length
        uses = {"chunks": in_chunks}
    for name, use in uses.items():
        try:
            deviation = use()
        except InterruptedPassError as error:
            found.faults.append(f"{name}: {shortened(error)}")
        except KVRecallError as error:
            told.append(f"no {name}: {shortened(error)}")
        except Exception as error:
            found.faults.append(f"{name}: {shortened(error)}")
        else:
            told.append(name)
            if deviation > TOLERANCE:
                found.faults.append(f"{name} differ by {deviation:.1e}")
    found.uses = ", ".join(told)


def lost(tokens: Tensor, wanted: Turn) -> float:
    """How much less than the best logit the first other token `[B, answer tokens]` has, per standard deviation; 0: none is."""
    worst = 0.0
    for row, own in zip(tokens, wanted.logits, strict=True):
        other = (row != own.argmax(-1)).nonzero().flatten().tolist()
        if other:
            logits = own[other[0]]
            finite = logits[logits.isfinite()]
            worst = max(worst, ((finite.max() - logits[row[other[0]]]) / finite.std().clamp_min(1e-12)).item())
    return worst


@contextmanager
def judged(found: Outcome) -> Iterator[None]:
    """A KVRecallError is a refusal, any other exception a raw error."""
    try:
        yield
    except Exception as error:
        where = f"{found.message}: " if found.message else ""
        found.outcome = REFUSED if isinstance(error, KVRecallError) else RAW
        if isinstance(error, InterruptedPassError):
            found.faults.append("told to repeat a call that nothing has interrupted")
        found.message = where + shortened(error)


def shortened(error: BaseException) -> str:
    """Class, first sentences and place of an error."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/kvrecall/" in f.filename and "/tests/" not in f.filename]
    place = (ours or frames or [None])[-1]
    at = "" if place is None or isinstance(error, KVRecallError) else f" ({Path(place.filename).name}:{place.lineno})"
    return f"{type(error).__name__}: {text[:300]}{at}"


def implementations(model: Any) -> dict[str, Any]:
    """Attention implementation of every module that has a config of its own, and of its sub-configs."""
    found = {}
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            found[name] = config._attn_implementation
    for name in getattr(model.config, "sub_configs", None) or {}:
        found[f"config.{name}"] = getattr(getattr(model.config, name, None), "_attn_implementation", None)
    return found

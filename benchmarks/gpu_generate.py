"""What a user of `engine.generate` waits for: whole calls one after another in one process, with their set-up.

    python -m benchmarks generate --context 128k --configs balanced,full --tokens 256 --calls 3 [--users 2] [--out FILE]

Weights and tokens are random. The model is made before the first call. The first call of a configuration compiles kernels that
are not in the cache on disk, and records the step; the others find both. `full` is `kvrecall.Full()`, whose rows stay on the
GPU. Several users call from a thread each, with prompts of their own, and share decode steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import kvrecall
from benchmarks.gpu_layer import in_eight_bits
from benchmarks.models import FULL, let_go, method_of, model_of
from kvrecall.cache.device_memory import free_device_bytes
from kvrecall.engine import generate


@dataclass(frozen=True)
class Row:
    """One round of calls, one per user. Seconds of a round are those of its slowest user."""

    shape: str
    layers: int
    context: int
    config: str
    users: int
    call: int
    """1 for the first of this configuration in the process."""
    new_tokens: int
    wall_s: float
    first_token_s: float
    """From the call to the first token: the prompt."""
    ms_per_token: float
    """From the first token to the return of the call, over the other tokens; the slowest user's."""
    median_ms: float
    """Between two tokens of a user."""
    longest_ms: float
    as_first: int
    """Tokens, up to the first that differs from the first call's, of the user with the fewest."""
    device_gib: float
    """In use on the GPU at the last token of a user, weights included; the most of all users."""


@dataclass
class _User:
    """A prompt, and what its last call made."""

    ids: Tensor
    began: float = 0.0
    at: list[float] = field(default_factory=list)
    ended: float = 0.0
    device_bytes: int = 0
    tokens: list[int] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)

    def call(self, model: LlamaForCausalLM, name: str, new_tokens: int, compiled: bool) -> None:
        self.at = []

        def told(count: int) -> None:
            self.at.append(time.perf_counter())
            if count == new_tokens and self.ids.is_cuda:
                self.device_bytes = torch.cuda.mem_get_info()[1] - free_device_bytes(self.ids.device)

        method = kvrecall.Full() if name == FULL else method_of(name, self.ids.shape[1])
        cache = kvrecall.RetrievalCache(model.config, method, host_rows="fp8") if in_eight_bits(name) else method
        self.began = time.perf_counter()
        made = generate(
            model, None, self.ids, cache, max_new_tokens=new_tokens, compiled=compiled, eos_token_id=[],
            on_token=told,
        )  # fmt: skip
        self.ended, self.tokens = time.perf_counter(), made.new_tokens[0]
        self.first_tokens = self.first_tokens or self.tokens

    @property
    def as_first(self) -> int:
        pairs = zip(self.tokens, self.first_tokens, strict=True)
        return next((n for n, (one, other) in enumerate(pairs) if one != other), len(self.tokens))


class _Session:
    """A model and its users; rounds are made in order."""

    def __init__(self, shape: str, layers: int | None, context: int, name: str, users: int, device: str) -> None:
        let_go()
        self.model = model_of(shape, layers, context, device)
        vocabulary = self.model.config.vocab_size
        self.users = [
            _User(torch.randint(vocabulary, (1, context), generator=torch.Generator().manual_seed(n)).to(device))
            for n in range(users)
        ]
        self.name, self.rounds = name, 0

    def round(self, new_tokens: int, compiled: bool) -> Sequence[_User]:
        """All users call at the same time."""
        self.rounds += 1
        with ThreadPoolExecutor(len(self.users)) as pool:
            for call in [pool.submit(user.call, self.model, self.name, new_tokens, compiled) for user in self.users]:
                call.result()
        return self.users


_session = lru_cache(maxsize=1)(_Session)


def measure(
    shape: str, layers: int | None, context: int, name: str, users: int, new_tokens: int, compiled: bool, call: int,
    device: str = "cuda",
) -> Row:  # fmt: skip
    """The next round of a configuration, whose number is `call`."""
    if call == 1:
        _session.cache_clear()
    session = _session(shape, layers, context, name, users, device)
    made = session.round(new_tokens, compiled)
    assert session.rounds == call
    steps = [(after - before) * 1e3 for user in made for before, after in pairwise(user.at)]
    wall = max(user.ended for user in made) - min(user.began for user in made)
    return Row(
        shape, session.model.config.num_hidden_layers, context, name + ("+compiled" if compiled else ""), users, call,
        new_tokens, wall, max(user.at[0] - user.began for user in made),
        max((user.ended - user.at[0]) * 1e3 / (new_tokens - 1) for user in made), median(steps), max(steps),
        min(user.as_first for user in made), max(user.device_bytes for user in made) / 2**30,
    )  # fmt: skip

"""An engine of one's own: sequences of any length decode together over blocks that they share, with retrieval.

    engine = ToyEngine(ToyModel(), {"method": "exact", "top_k": 32})
    answers = engine.generate([[3, 1, 4], [1, 5, 9, 2, 6]], 8)

What an engine hands to the step (`kvrecall.step`) are six things, marked (1) to (6) below. vLLM's backend
(`kvrecall.backends.vllm`) hands over the same; on a GPU they go to `step.device.DeviceLayer`, which reads lengths and block
tables from device memory. See docs/design/engine.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvrecall.core.structs import AttentionParams
from kvrecall.index.base import LayerShape
from kvrecall.step.paged import Batch, PagedLayer
from kvrecall.step.settings import Settings
from kvrecall.step.stream import RowBlocks
from kvrecall.step.summaries import width_of

HEADS, KV_HEADS, DIM, LAYERS, VOCABULARY = 4, 2, 32, 2, 50


class ToyModel:
    """Random weights: an embedding, attention layers, and logits by the embedding."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, HEADS * DIM, generator=draw)
        sizes = (HEADS + 2 * KV_HEADS) * DIM, HEADS * DIM
        self.layers = [torch.randn(2 * sum(sizes), HEADS * DIM, generator=draw) / 12 for _ in range(LAYERS)]

    def qkv(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[T, H_q, D]`, keys and values `[T, H_kv, D]` of hidden states `[T, H_q D]`."""
        made = (hidden @ self.layers[layer][: (HEADS + 2 * KV_HEADS) * DIM].T).unflatten(-1, (-1, DIM))
        q, k, v = made.split([HEADS, KV_HEADS, KV_HEADS], 1)
        return q, k, v

    def after(self, layer: int, hidden: Tensor, attention: Tensor) -> Tensor:
        """Hidden states after a layer's attention `[T, H_q, D]`."""
        added = hidden + attention.flatten(1) @ self.layers[layer][-HEADS * DIM :].T
        return added / added.norm(dim=-1, keepdim=True) * (HEADS * DIM) ** 0.5

    def logits(self, hidden: Tensor) -> Tensor:
        """`[T, vocabulary]`."""
        return hidden @ self.embedding.T


@dataclass
class Sequence:
    """tokens: prompt and answer. done: how many of them have been fed. blocks: its block table."""

    tokens: list[int]
    done: int = 0
    blocks: list[int] = field(default_factory=list)


class HostWindow:
    """(6) The recent tokens of every sequence. An engine on a GPU keeps them in device memory; here they are read from the rows
    on the host, where the step has just stored them."""

    def __init__(self, host: RowBlocks, batch: Batch) -> None:
        self._host, self._batch = host, batch

    def store(self, keys: Tensor, values: Tensor, tokens: slice) -> None:
        """Nothing is left to do."""

    def span(self, row: int, start: int, stop: int) -> Tensor:
        """Rows `[H_kv, stop - start, K|V, D]` of positions start .. stop - 1 of a sequence."""
        return torch.cat(list(self._host.pieces(self._batch.table(row, stop), stop)), 1)[:, start:]


class ToyEngine:
    """Block tables, a batch per pass, and one layer of kvrecall per layer of the model."""

    def __init__(
        self, model: ToyModel, settings: dict[str, Any], blocks: int = 64, block_size: int = 64, chunk: int = 50
    ) -> None:
        """settings: as under vLLM. chunk: most tokens of a prompt in one pass."""
        self.model, self.chunk, self.block_size = model, chunk, block_size
        self.settings = Settings.of({"kvrecall": settings})  # (1) the method; raises for one that needs more than blocks
        method, params = self.settings.method, AttentionParams(DIM**-0.5)
        shape = LayerShape(1, HEADS, KV_HEADS, DIM, torch.float32, torch.device("cpu"))  # (2) the shape of each layer
        width = width_of(self.settings.index, method.estimate_config(), shape) * KV_HEADS * block_size
        self.hosts = [RowBlocks(blocks, shape, block_size) for _ in range(LAYERS)]  # (3) memory by block: rows on the host,
        pages = [torch.zeros(blocks, width, dtype=torch.uint8) for _ in range(LAYERS)]  # and pages for summaries
        self.layers = [PagedLayer.over(i, shape, method, params, pages[i], self.hosts[i]) for i in range(LAYERS)]
        self.free, self.users = list(range(blocks)), [0] * blocks
        self.known: dict[tuple[int, ...], int] = {}  # whole blocks by all tokens up to their end

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Answers of `tokens` tokens each, greedily."""
        sequences = [Sequence(list(prompt)) for prompt in prompts]
        waiting = {id(x): len(x.tokens) + tokens for x in sequences}
        while running := [x for x in sequences if len(x.tokens) < waiting[id(x)]]:
            for sequence, token in zip(running, self.step(running), strict=True):
                if sequence.done == len(sequence.tokens):
                    sequence.tokens.append(token)
        for sequence in sequences:
            self.release(sequence)
        return [x.tokens[len(prompt) :] for x, prompt in zip(sequences, prompts, strict=True)]

    def step(self, running: list[Sequence]) -> list[int]:
        """One pass: a chunk of each prompt and the next token of each answer. The most likely token after each sequence."""
        begins, fed, prompts = [0], list[int](), list[bool]()
        for sequence in running:
            self.take_known_blocks(sequence)
            count = min(self.chunk, len(sequence.tokens) - sequence.done)
            fed += sequence.tokens[sequence.done : sequence.done + count]
            prompts.append(count > 1)
            sequence.done += count
            begins.append(len(fed))
            while len(sequence.blocks) * self.block_size < sequence.done:
                sequence.blocks.append(self.free.pop())
                self.users[sequence.blocks[-1]] += 1
        hidden, batch = self.model.embedding[fed], self.batch(running, begins, prompts)
        for number, layer in enumerate(self.layers):
            q, k, v = self.model.qkv(number, hidden)  # (5) queries, keys and values of the pass
            out = torch.empty_like(q)
            layer.forward(q, k, v, batch, HostWindow(self.hosts[number], batch), out)
            hidden = self.model.after(number, hidden, out)
        for sequence in running:
            self.remember(sequence)
        return self.model.logits(hidden[[end - 1 for end in begins[1:]]]).argmax(-1).tolist()

    def batch(self, running: list[Sequence], begins: list[int], prompts: list[bool]) -> Batch:
        """(4) Who is in the pass: tokens, lengths and block tables of the sequences, and a slot for every token."""
        size, slots = self.block_size, list[int]()
        for sequence, (begin, end) in zip(running, pairwise(begins), strict=True):
            slots += [sequence.blocks[p // size] * size + p % size for p in range(sequence.done - end + begin, sequence.done)]
        widest = max(len(x.blocks) for x in running)
        blocks = torch.tensor([x.blocks + [0] * (widest - len(x.blocks)) for x in running], dtype=torch.int32)
        return Batch(begins, [x.done for x in running], prompts, blocks, size, torch.tensor(slots))

    def take_known_blocks(self, sequence: Sequence) -> None:
        """Uses the blocks of earlier sequences that begin with the same tokens; the last token is always fed."""
        while sequence.done == len(sequence.blocks) * self.block_size < len(sequence.tokens) - self.block_size:
            block = self.known.get(tuple(sequence.tokens[: sequence.done + self.block_size]))
            if block is None:
                return
            sequence.blocks.append(block)
            self.users[block] += 1
            sequence.done += self.block_size

    def remember(self, sequence: Sequence) -> None:
        """Whole blocks can be shared: a summary depends on a key and its position alone."""
        for number, block in self.whole(sequence):
            self.known.setdefault(tuple(sequence.tokens[: (number + 1) * self.block_size]), block)

    def whole(self, sequence: Sequence) -> Iterator[tuple[int, int]]:
        """(number, block) of the blocks that are full."""
        return enumerate(sequence.blocks[: sequence.done // self.block_size])

    def release(self, sequence: Sequence) -> None:
        """Gives back blocks that no sequence uses and no later prompt can find."""
        kept = set(self.known.values())
        for block in sequence.blocks:
            self.users[block] -= 1
            if not self.users[block] and block not in kept:
                self.free.append(block)

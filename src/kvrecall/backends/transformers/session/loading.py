"""Makes a RetrievalCache again from the folder that it was saved to.

The index is checked -> the model and the method are compared -> an empty cache with the same blocks is made -> layers take over
what is theirs -> blocks are mapped or read.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from weakref import ref

import torch
from transformers import PretrainedConfig, PreTrainedModel

from kvrecall.backends.transformers.cache_state import CacheState
from kvrecall.backends.transformers.families import Heads, check_config, transformers_model
from kvrecall.backends.transformers.fingerprint import Fingerprint
from kvrecall.backends.transformers.layer import RetrievalLayer
from kvrecall.backends.transformers.session import parts
from kvrecall.backends.transformers.session.state import SavedState, WrittenBlock, WrittenMemory, check_model, method_of
from kvrecall.cache.block_rows import BlockRows
from kvrecall.cache.blocks import BlockPool, BlockTable
from kvrecall.cache.host_memory import available_host_bytes
from kvrecall.cache.session_files import OpenFiles, block_nbytes, fill_blocks, finish, reader_of, threads
from kvrecall.cache.session_folder import SavedPart, SavedSession, opened_files
from kvrecall.core.archive import Archive, Notes
from kvrecall.core.errors import HostMemoryError, KVRecallError, SessionError
from kvrecall.core.launch import cdiv
from kvrecall.core.structs import lasting_tensors
from kvrecall.core.typed_fields import UNFORESEEN
from kvrecall.index.base import LayerShape
from kvrecall.layer.saved import archive_layer
from kvrecall.layer.state import LayerState
from kvrecall.models.dtypes import as_device

_Cache = TypeVar("_Cache", bound=CacheState)
_LAYERS_AT_ONCE = 4
"""Layers whose memory is asked for at a time; the system gives it faster to several threads."""


def load(
    kind: type[_Cache], folder: str | Path, config: PretrainedConfig, *, model: PreTrainedModel | None,
    device: torch.device | str | None, verify: bool, options: dict[str, Any],
) -> _Cache:  # fmt: skip
    """See `RetrievalCache.load`."""
    check_config(config)
    model = None if model is None else transformers_model(model)
    given = None if device is None else as_device(device)
    with opened_files(folder) as (session, checksum, files), lasting_tensors(), torch.no_grad():
        path = files.folder.path.parent
        check_model(session, config, model)
        method = method_of(path, session)
        try:
            own = {"observe_queries": session.observe_queries, "host_rows": session.host_rows}
            cache = kind(config, method, **own | options)
            given = given or (None if model is None or model.device.type == "meta" else model.device)
            where = cache._device() if given is None else given
            _Load(cache, path, session, checksum, files, where, verify).run(model)
            cache.rounded |= "fp8" in (session.rows, session.host_rows, cache.host_rows)
            return cache
        except UNFORESEEN as error:
            if isinstance(error, KVRecallError):
                raise
            raise SessionError(path, "parts that fit together", f"others ({str(error)[:200]})") from error


class _Load:
    """Makes the cache of a session whose index has been checked."""

    def __init__(
        self, cache: CacheState, path: Path, session: SavedSession, checksum: str, files: OpenFiles, device: torch.device,
        verify: bool,
    ) -> None:  # fmt: skip
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._cache, self._session, self._files, self._device, self._verify = cache, session, files, device, verify
        self._dtype: torch.dtype = getattr(torch, session.dtype)
        model = session.model
        self._state = SavedState(
            str(path), checksum, Fingerprint(model.config, model.weights, model.fingerprint),
            {f.name: f.nbytes for f in session.files}, about=dict(session.about),
        )  # fmt: skip

    def run(self, model: PreTrainedModel | None) -> None:
        """Raises SessionError for what does not fit together."""
        cache, session = self._cache, self._session
        pool = BlockPool(session.block_size)
        cache.tables = pool.adopt(session.tables)
        cache._session = self._state
        own = self._reader(session.cache)
        self._state.rotaries = parts.archive_cache(cache, own, session.tokens, len(session.tables))
        own.done()
        if model is not None:
            cache.meet(model)
        layers = {layer.number: layer for layer in cache.retrieval_layers}
        if {str(number) for number in layers} != set(session.layers):
            raise SessionError("layers", f"those of the model ({len(layers)})", f"{len(session.layers)} others")
        self._check_windows(cache)
        readers = {number: self._reader(session.layers[str(number)]) for number in layers}
        self._hold(cache.tables, readers)
        for number, layer in layers.items():
            layer.state = self._state_of(layer, readers[number])
            layer.is_initialized = True
        with threads() as readers_pool, ThreadPoolExecutor(_LAYERS_AT_ONCE) as outer:
            finish([outer.submit(self._fill, number, readers[number].notes, readers_pool) for number in layers])
        for table in cache.tables:
            table.saved()

    def _check_windows(self, cache: CacheState) -> None:
        """Raises HostMemoryError for a method whose windows the host cannot hold."""
        tokens, sequences = cache.method.zone_sizes().resident_capacity, len(self._session.tables)
        heads, available = self._session.model, available_host_bytes()
        row = 2 * heads.kv_heads * heads.head_dim * self._dtype.itemsize
        need = row * tokens * sequences * len(cache.retrieval_layers)
        if self._device.type == "cpu" and need > available:
            raise HostMemoryError(need, available, tokens * sequences)

    def _reader(self, part: SavedPart) -> Archive:
        notes = Notes(dict(part.values))
        for name, tensor in part.tensors.items():
            place, dtype = self._session.place(tensor), getattr(torch, tensor.dtype)
            notes.tensors[name] = self._files.tensor(place, dtype, tensor.shape, self._verify)
        return Archive(self._device, notes)

    def _hold(self, tables: list[BlockTable], readers: dict[int, Archive]) -> None:
        """Tokens of each layer's zones, which the tables must have blocks for, and no more."""
        size, most = self._session.block_size, [0] * len(tables)
        for number, reader in readers.items():
            tokens = reader.integers("tokens", [], most=self._session.tokens, count=len(tables))
            for b, (table, count) in enumerate(zip(tables, tokens, strict=True)):
                table.lengths[number], most[b] = count, max(most[b], count)
        for b, (table, count) in enumerate(zip(tables, most, strict=True)):
            if len(table.blocks) != cdiv(count, size):
                raise SessionError(
                    f"tables.{b}", f"{cdiv(count, size):,} blocks for {count:,} tokens", f"{len(table.blocks):,}"
                )

    def _state_of(self, layer: RetrievalLayer, reader: Archive) -> LayerState:
        cache, tables, number = self._cache, self._cache.tables, layer.number
        heads = Heads.of(cache._config.get_text_config(decoder=True), number)
        known = cache.layer_statistics(number, heads.kv, heads.dim)
        shape = LayerShape(
            len(self._session.tables), heads.query, heads.kv, heads.dim, self._dtype, self._device, known,
            fp8_rows=cache.fp8_rows,
        )  # fmt: skip
        on_device = layer.rows_on_device(cache, shape, self._session.tokens)
        state = LayerState(number, shape, cache.method, cache.profile, cache.observe_queries, tables, on_device)
        archive_layer(state, reader)
        self._check_lengths(state)
        for name in self._session.layers[str(number)].blocks.keys() - reader.notes.memories.keys():
            raise SessionError(f"layer {number} {name}", "nothing of that name", "blocks")
        reader.done()
        return state

    def _check_lengths(self, state: LayerState) -> None:
        """Every layer holds the tokens that are no padding."""
        valid, tokens = self._cache.retrieval_layers[0]._valid, self._session.tokens
        for b in range(state.store.sequences):
            expected, held = tokens if valid is None else int(valid[b].sum()), state.store.zones(b).total
            if held != expected:
                raise SessionError(f"layer {state.layer}", f"{expected:,} tokens in sequence {b}", f"{held:,}")

    def _fill(self, number: int, notes: Notes, pool: ThreadPoolExecutor) -> None:
        """Maps or reads the blocks of a layer."""
        saved, size, tables = self._session.layers[str(number)].blocks, self._session.block_size, self._cache.tables
        assert tables is not None
        for name, (memory, tokens) in notes.memories.items():
            what = f"layer {number} {name}"
            if name not in saved:
                raise SessionError(what, "its blocks", "none")
            part = saved[name]
            forms = {self._session.rows, self._session.host_rows} if isinstance(memory, BlockRows) else {"plain"}
            if part.form not in forms:
                raise SessionError(what, f"blocks in the form {' or '.join(map(repr, sorted(forms)))}", repr(part.form))
            if part.nbytes != block_nbytes(memory, part.form):
                raise SessionError(what, f"blocks of {block_nbytes(memory, part.form):,} bytes", f"{part.nbytes:,}")
            places = self._session.places(part)
            for table, count in zip(tables, tokens, strict=True):
                if any(block not in places for block in table.blocks[: cdiv(count, size)]):
                    raise SessionError(what, f"blocks for {count:,} tokens", "fewer")
            written = {block: WrittenBlock(place, part.held[block]) for block, place in places.items()}
            self._state.memories[number, name] = WrittenMemory(ref(memory), part.form, written)
            if places:
                made, blocks = reader_of(memory, part.form), self._session.block_count
                fill_blocks(memory, blocks, places, self._files, pool, verify=self._verify, restored=made)

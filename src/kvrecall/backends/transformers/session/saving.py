"""Saves a RetrievalCache to a folder.

Layers are archived -> blocks that have changed and all tensors go to new files -> the index takes the old one's place -> files
that no index names are removed.

A block whose tokens are unchanged since the last save stays in its old file, unless the blocks of its layer lie in too many.
"""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from kvrecall.backends.transformers.cache_state import CacheState
from kvrecall.backends.transformers.fingerprint import Fingerprint, computation_of, fingerprint_of_config, read_fingerprint
from kvrecall.backends.transformers.owner import operation
from kvrecall.backends.transformers.session import parts
from kvrecall.backends.transformers.session.state import (
    SavedState,
    SessionInfo,
    WrittenBlock,
    WrittenMemory,
    check_heads,
    check_readable,
    info_of,
    registered_name,
)
from kvrecall.cache.session_files import NewFile, block_bytes, block_nbytes, form_of, write
from kvrecall.cache.session_folder import (
    DATA,
    VERSION,
    SavedBlocks,
    SavedFile,
    SavedModel,
    SavedPart,
    SavedSession,
    SavedTensor,
    checksum_of,
    clean,
    locked,
    write_index,
)
from kvrecall.core.archive import MOST, Archive, Notes
from kvrecall.core.errors import ParameterError, SessionError
from kvrecall.core.launch import cdiv
from kvrecall.core.private_folder import PrivateFolder
from kvrecall.core.structs import lasting_tensors
from kvrecall.core.whole_files import written_to
from kvrecall.layer.saved import archive_layer
from kvrecall.layer.state import LayerState
from kvrecall.methods.settings import settings_of

_MOST_FILES = 16
"""Files that the blocks of a layer may lie in; a layer in more of them is written whole."""
_FORMS = (
    '"fp8" is half as large, at a loss. A session without rows would have to read its documents again whenever it is loaded: '
    "keep their text instead."
)
"""Codes without rows were weighed in docs/design/sessions.md."""


@operation("save", recovers=False)
def save(cache: CacheState, folder: str | Path, rows: str = "plain", about: dict[str, Any] | None = None) -> SessionInfo:
    """See `RetrievalCache.save`."""
    if rows not in ("plain", "fp8"):
        raise ParameterError("rows", '"plain" or "fp8"', rows, _FORMS)
    cache.settle()
    states = cache.states
    if not cache.get_seq_length() or len(states) < len(cache.retrieval_layers) or cache.tables is None:
        raise SessionError("cache", "one that holds tokens", "an empty one", "Read a prompt first.")
    method = registered_name(cache.method)
    check_heads(cache._config, states)
    _check_about({} if about is None else about)
    known: SavedState | None = cache._session
    about = about if about is not None else {} if known is None else known.about
    fingerprint = _fingerprint(cache)
    notes = _archived(cache, states)
    with written_to(folder), locked(folder) as opened:
        path = opened.path
        before = known if known is not None and known.folder == str(path) and known.checksum == checksum_of(opened) else None
        new = _NewSession(cache, states[0].store.pool.block_size, rows, before)
        try:
            for part, noted in notes.items():
                new.add(part, noted)
            with PrivateFolder(DATA, within=opened, make=True) as data:
                data.close_to_others()
                write(data, new.files)
            session = new.index(method, fingerprint, str(states[0].shape.dtype).removeprefix("torch."), about)
            checksum = write_index(opened, session)
            opened.sync()
        finally:
            clean(opened)
    sizes = {file.name: file.nbytes for file in session.files}
    cache._session = SavedState(str(path), checksum, fingerprint, sizes, new.memories, about=about)
    if known is not None:
        cache._session.rotaries = known.rotaries
    for table in cache.tables:
        table.saved()
    return info_of(path, session, cache.tokens.ids())


def _fingerprint(cache: CacheState) -> Fingerprint:
    """What computed the cache's tokens. Raises SessionError if that is not known well enough to compare it with a model."""
    writer, model = cache._writer, None if cache._model is None else cache._model()
    if writer is None:
        found = fingerprint_of_config(cache._config) if cache._session is None else cache._session.fingerprint
    else:
        found = writer.fingerprint
        if model is not None and computation_of(model) is writer and read_fingerprint(model) != found:
            expected = "weights that stay as they are while a cache is filled"
            raise SessionError("model", expected, "some that were written through tensor.data", "Read the documents again.")
    check_readable("model", found)
    return found


def _archived(cache: CacheState, states: list[LayerState]) -> dict[str, Notes]:
    """What each layer and then the cache itself remember, by the part's name in the index. Nothing is copied."""
    noted, own = {}, Archive(torch.device("cpu"))
    with lasting_tensors(), torch.no_grad():
        parts.archive_cache(cache, own, cache.get_seq_length(), cache.sequences)
        for state in states:
            writer = Archive(state.shape.device)
            writer.integers("tokens", [zone.length for zone in state.store.host])
            archive_layer(state, writer)
            noted[f"{state.layer}"] = writer.notes
    return {**noted, "cache": own.notes}


def _check_about(about: dict[str, Any]) -> None:
    if not isinstance(about, dict):
        raise ParameterError("about", "a dict", about, "Give texts, counts and lists of texts by name.")
    for name, value in about.items():
        texts = value if isinstance(value, list) else [name] if isinstance(value, int) and 0 <= value <= MOST else [name, value]
        if not all(isinstance(text, str) for text in texts):
            raise ParameterError(f"about[{name!r}]", "a text, a count or a list of texts", value, "Say it in text.")


class _NewSession:
    """A session of a cache: `add` each part, write `files`, then ask for the `index`."""

    def __init__(self, cache: CacheState, block_size: int, rows: str, before: SavedState | None) -> None:
        """rows: the form of rows. before: the session in whose place this one comes, if the cache knows it."""
        assert cache.tables is not None
        self._cache, self._size, self._rows, self._before = cache, block_size, rows, before
        self._order: dict[int, int] = {}
        for table in cache.tables:
            for block in table.blocks[: cdiv(max(table.lengths.values()), block_size)]:
                self._order.setdefault(block, len(self._order))
        earlier = [int(name.split("-")[0], 16) for name in before.sizes] if before is not None else []
        self._random, self._generation = secrets.token_hex(8), (max(earlier, default=-1) + 1) % 2**32
        self.files: list[NewFile] = []
        self.memories: dict[tuple[int, str], WrittenMemory] = {}
        """Which blocks lie where; complete once there is an index."""
        self._tensors: dict[str, list[tuple[str, Tensor, NewFile, int]]] = {}
        self._new: list[tuple[dict[int, WrittenBlock], int, NewFile, int, int]] = []
        self._values: dict[str, dict[str, Any]] = {}

    def add(self, part: str, notes: Notes) -> None:
        """What an archive noted of a part: a layer, by its number, or the cache."""
        file = NewFile(f"{self._generation:08x}-{part}-{self._random}.bin")
        self.files.append(file)
        self._values[part] = dict(notes.values)
        for name, (memory, tokens) in notes.memories.items():
            self._add_blocks(int(part), name, memory, tokens, file)
        file.begin_run()
        self._tensors[part] = [
            (name, tensor, file, file.add(tensor.nbytes, tensor.cpu)) for name, tensor in notes.tensors.items()
        ]

    def _add_blocks(self, layer: int, name: str, memory: Any, tokens: list[int], file: NewFile) -> None:
        form = form_of(memory, self._rows)
        held = self._held(layer, tokens)
        written = self._kept(layer, name, memory, form, held)
        left = held.keys() - written.keys()
        file.begin_run()
        for block in sorted(left, key=self._order.__getitem__):
            place, end, _ = held[block]
            get = partial(block_bytes, memory, block, place, end, form)
            number = file.add(block_nbytes(memory, form), get, aligned=False)
            self._new.append((written, block, file, number, end))
        self.memories[layer, name] = WrittenMemory(ref(memory), form, written)

    def _held(self, layer: int, tokens: list[int]) -> dict[int, tuple[int, int, int]]:
        """Of each block that holds something: its number in its sequence, up to which token it does, and how many of the
        sequence's first tokens are unchanged; of the sequence that has most in it."""
        found: dict[int, tuple[int, int, int]] = {}
        assert self._cache.tables is not None
        for table, count in zip(self._cache.tables, tokens, strict=True):
            unchanged = table.unchanged.get(layer, 0)
            for place in range(cdiv(count, self._size)):
                end, block = min(count, (place + 1) * self._size), table.blocks[place]
                if block not in found or end > found[block][1]:
                    found[block] = place, end, unchanged
        return found

    def _kept(
        self, layer: int, name: str, memory: Any, form: str, held: dict[int, tuple[int, int, int]]
    ) -> dict[int, WrittenBlock]:
        """Blocks that stay in the files of the session before."""
        known = None if self._before is None else self._before.memories.get((layer, name))
        if known is None or known.memory() is not memory or known.form != form:
            return {}
        kept = {
            block: known.blocks[block]
            for block, (_, end, unchanged) in held.items()
            if block in known.blocks and unchanged >= end <= known.blocks[block].tokens
        }
        return kept if len({written.place.file for written in kept.values()}) < _MOST_FILES else {}

    def index(self, method: str, fingerprint: Fingerprint, dtype: str, about: dict[str, Any]) -> SavedSession:
        """The index, once all files are written."""
        for written, block, file, number, end in self._new:
            written[block] = WrittenBlock(file.place(number), end)
        cache, sizes = self._cache, {file.name: file.size for file in self.files}
        assert cache.tables is not None
        used = {written.place.file for memory in self.memories.values() for written in memory.blocks.values()}
        sizes = {**({} if self._before is None else self._before.sizes), **sizes}
        names = sorted(used | {file.name for file in self.files})
        numbers = {name: number for number, name in enumerate(names)}
        parts = {part: self._part(part, numbers) for part in self._values}
        signature = cache.signature
        return SavedSession(
            format="kvrecall-session", version=VERSION, method=method, settings=settings_of(cache.method),
            model=SavedModel(
                type=signature.model_type, layers=signature.layers, query_heads=signature.query_heads,
                kv_heads=signature.kv_heads, head_dim=signature.head_dim, config=fingerprint.config,
                weights=fingerprint.weights, fingerprint=fingerprint.version,
            ),
            dtype=dtype, rows=self._rows, tokens=cache.get_seq_length(), block_size=self._size,  # pyright: ignore
            observe_queries=cache.observe_queries, host_rows=cache.host_rows, about=about,  # pyright: ignore
            tables=[[self._order[b] for b in t.blocks[: cdiv(max(t.lengths.values()), self._size)]] for t in cache.tables],
            files=[SavedFile(name=name, nbytes=sizes[name]) for name in names], cache=parts.pop("cache"), layers=parts,
        )  # fmt: skip

    def _part(self, part: str, numbers: dict[str, int]) -> SavedPart:
        tensors = {}
        for name, tensor, file, number in self._tensors[part]:
            place = file.place(number)
            dtype: Any = str(tensor.dtype).removeprefix("torch.")
            where = {"file": numbers[place.file], "offset": place.offset, "crc": place.crc}
            tensors[name] = SavedTensor(dtype=dtype, shape=list(tensor.shape), **where)
        blocks = {name: self._blocks(memory, numbers) for (layer, name), memory in self.memories.items() if str(layer) == part}
        return SavedPart(values=self._values[part], tensors=tensors, blocks=blocks)

    def _blocks(self, memory: WrittenMemory, numbers: dict[str, int]) -> SavedBlocks:
        found = [memory.blocks.get(block) for block in self._order]
        form: Any = memory.form
        return SavedBlocks(
            form=form, nbytes=block_nbytes(memory.memory(), form), held=[0 if w is None else w.tokens for w in found],
            files=[-1 if w is None else numbers[w.place.file] for w in found],
            offsets=[0 if w is None else w.place.offset for w in found],
            crcs=[0 if w is None else w.place.crc for w in found],
        )  # fmt: skip

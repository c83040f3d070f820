"""Saves a RetrievalCache to a folder and makes it again; the format is on docs/design/sessions.md.

Saving:  layers are archived -> blocks that have changed and all tensors go to new files -> the index takes the old one's place
         -> files that no index names are removed.
Loading: the index is checked -> the model and the method are compared -> an empty cache with the same blocks is made -> layers
         take over what is theirs -> blocks are mapped or read.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from kvrecall.backends.transformers import saved_parts
from kvrecall.backends.transformers.families import Heads
from kvrecall.backends.transformers.fingerprint import Fingerprint, fingerprint_of, fingerprint_of_config
from kvrecall.backends.transformers.layer import RetrievalLayer
from kvrecall.backends.transformers.saved_parts import LateRotary
from kvrecall.backends.transformers.signature import ModelSignature
from kvrecall.cache.block_rows import BlockRows
from kvrecall.cache.blocks import BlockPool, BlockTable
from kvrecall.cache.host_memory import available_host_bytes
from kvrecall.cache.session_files import FILE_NAME, NewFile, OpenFiles, Place, fill_blocks, finish, sync_folder, threads, write
from kvrecall.cache.session_index import (
    NAME,
    VERSION,
    SavedBlocks,
    SavedFile,
    SavedModel,
    SavedPart,
    SavedSession,
    SavedTensor,
    checksum_of,
    read_index,
    write_index,
)  # fmt: skip
from kvrecall.cache.session_rows import compact, compact_bytes, restored
from kvrecall.core.archive import Notes, Reader, Writer
from kvrecall.core.errors import HostMemoryError, KVRecallError, ParameterError, SessionError
from kvrecall.core.launch import cdiv
from kvrecall.core.structs import lasting_tensors
from kvrecall.core.whole_files import written_to
from kvrecall.index.base import LayerShape
from kvrecall.layer.saved import archive_layer
from kvrecall.layer.state import LayerState
from kvrecall.methods.base import Method
from kvrecall.methods.registry import name_of
from kvrecall.methods.settings import UNFORESEEN, from_settings, settings_of

if TYPE_CHECKING:
    from kvrecall.backends.transformers.cache import RetrievalCache

_DATA, _LOCK = "data", ".lock"
_DRAFT = re.compile(r"\.\d+-[0-9a-f]{8}\.draft")
_MOST_FILES = 16
"""Files that the blocks of a layer may lie in; a layer in more of them is written whole."""
_LAYERS_AT_ONCE = 4
"""Layers whose memory is asked for at a time; the system gives it faster to several threads."""


@dataclass(frozen=True)
class SessionInfo:
    """What a folder holds. tokens: of each sequence, padding included. nbytes: of all its files. ids: int64 `[B, tokens]`, None
    where they are not known. settings: what differs from the method's defaults. about: what `save` was given."""

    folder: Path
    model: str
    method: str
    settings: dict[str, Any]
    tokens: int
    sequences: int
    dtype: str
    rows: str
    nbytes: int
    files: int
    ids: Tensor | None
    about: dict[str, Any]


@dataclass(frozen=True)
class _Written:
    """A block in a file. tokens: of the sequence, up to the end of what the block holds of it."""

    place: Place
    tokens: int


@dataclass
class SavedState:
    """What a cache knows of the session that it was last saved to or loaded from.

    blocks: by layer and memory, that memory, the form, and each block in its file. fingerprint: of the model. rotaries: those
    that wait for the model, by layer. about: what it says of itself.
    """

    folder: str
    checksum: str
    fingerprint: Fingerprint
    sizes: dict[str, int]
    blocks: dict[tuple[int, str], tuple[Callable[[], Any], str, dict[int, _Written]]] = field(default_factory=dict)
    rotaries: dict[int, LateRotary] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    _met: Callable[[], PreTrainedModel | None] = lambda: None

    def meet(self, model: PreTrainedModel) -> bool:
        """The model that is to use a loaded cache; returns whether it is seen for the first time. Raises SessionError where it
        is another one."""
        if self._met() is model:
            return False
        _compare("model", self.fingerprint, fingerprint_of(model))
        saved_parts.meet(self.rotaries, model)
        self._met = ref(model)
        return True


def save(cache: RetrievalCache, folder: str | Path, rows: str = "plain", about: dict[str, Any] | None = None) -> SessionInfo:
    """See `RetrievalCache.save`."""
    if rows not in ("plain", "fp8"):
        raise ParameterError("rows", '"plain" or "fp8"', rows, '"fp8" is half as large, at a loss.')
    cache._check_idle("save")
    cache.settle()
    states = [layer.state for layer in cache.retrieval_layers if layer.state is not None]
    if not cache.get_seq_length() or len(states) < len(cache.retrieval_layers) or cache.tables is None:
        raise SessionError("cache", "one that holds tokens", "an empty one", "Read a prompt first.")
    try:
        method = name_of(cache.method)
    except KVRecallError as error:
        remedy = "Give the class a name by kvrecall.methods.registry.register."
        raise SessionError("method", "one that is registered", type(cache.method).__name__, remedy) from error
    _check_heads(cache, states)
    model = None if cache._model is None else cache._model()
    known = cache._session
    _check_about(about or {})
    about = about if about is not None else {} if known is None else known.about
    if model is not None:
        fingerprint = fingerprint_of(model)
    else:
        fingerprint = fingerprint_of_config(cache._config) if known is None else known.fingerprint
    parts, own = {}, Writer(torch.device("cpu"))
    with lasting_tensors(), torch.no_grad():
        saved_parts.archive_cache(cache, own)
        for state in states:
            writer = Writer(state.shape.device)
            tokens = [zone.length for zone in state.store.host]
            writer.integers("tokens", tokens)
            archive_layer(state, writer)
            parts[state.layer] = writer.notes
    with written_to(folder), _locked(Path(folder)) as path:
        files = path / _DATA
        before = known if known is not None and known.folder == str(path) and known.checksum == checksum_of(path) else None
        save_ = _Save(cache, states[0].store.pool.block_size, rows, before)
        try:
            for number, notes in parts.items():
                save_.add(f"{number}", notes)
            save_.add("cache", own.notes)
            write(files, save_.new_files)
            session = save_.session(method, fingerprint, str(states[0].shape.dtype).removeprefix("torch."), about)
            checksum = write_index(path, session)
            sync_folder(path)
        finally:
            _clean(path)
    sizes = {file.name: file.nbytes for file in session.files}
    cache._session = SavedState(str(path), checksum, fingerprint, sizes, save_.written, about=about)
    cache._session._met = (lambda: None) if model is None else ref(model)
    if known is not None:
        cache._session.rotaries = known.rotaries
    for table in cache.tables:
        table.saved()
    return _info(path, session, cache.tokens.ids())


class _Save:
    """New files, and where everything lies once they are written."""

    def __init__(self, cache: RetrievalCache, block_size: int, rows: str, before: SavedState | None) -> None:
        assert cache.tables is not None
        self._cache, self._size, self._rows, self._before = cache, block_size, rows, before
        self._order: dict[int, int] = {}
        for table in cache.tables:
            for block in table.blocks[: cdiv(max(table.lengths.values()), block_size)]:
                self._order.setdefault(block, len(self._order))
        self._random, self._generation = secrets.token_hex(8), _generation(before)
        self.new_files: list[NewFile] = []
        self.written: dict[tuple[int, str], tuple[Callable[[], Any], str, dict[int, _Written]]] = {}
        self._tensors: dict[str, list[tuple[str, Tensor, NewFile, int]]] = {}
        self._new: list[tuple[dict[int, _Written], int, NewFile, int, int]] = []
        self._values: dict[str, dict[str, Any]] = {}

    def add(self, part: str, notes: Notes) -> None:
        """What an archive noted of a layer, or of the cache."""
        file = NewFile(f"{self._generation:08x}-{part}-{self._random}.bin")
        self.new_files.append(file)
        self._values[part] = dict(notes.values)
        for name, (memory, tokens) in notes.memories.items():
            self._add_blocks(int(part), name, memory, tokens, file)
        file.begin_run()
        self._tensors[part] = [
            (name, tensor, file, file.add(tensor.nbytes, partial(_on_host, tensor))) for name, tensor in notes.tensors.items()
        ]

    def _add_blocks(self, layer: int, name: str, memory: Any, tokens: list[int], file: NewFile) -> None:
        form = self._rows if isinstance(memory, BlockRows) else "plain"
        known: dict[int, _Written] = {}
        if self._before is not None and (layer, name) in self._before.blocks:
            of, kind, places = self._before.blocks[layer, name]
            if of() is memory and kind == form:
                known = places
        held = self._held(layer, tokens)
        kept = {
            block: known[block]
            for block, (_, end, same) in held.items()
            if block in known and same >= end <= known[block].tokens
        }
        if len({written.place.file for written in kept.values()}) >= _MOST_FILES:
            kept = {}
        file.begin_run()
        written = dict(kept)
        for block in sorted(held.keys() - kept.keys(), key=self._order.__getitem__):
            place, end, _ = held[block]
            get, nbytes = partial(_block_bytes, memory, block, place, end, form), _block_nbytes(memory, form)
            number = file.add(nbytes, get, aligned=False)
            self._new.append((written, block, file, number, end))
        self.written[layer, name] = ref(memory), form, written

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

    def session(self, method: str, fingerprint: Fingerprint, dtype: str, about: dict[str, Any]) -> SavedSession:
        """The index, once all files are written."""
        for written, block, file, number, end in self._new:
            written[block] = _Written(file.place(number), end)
        cache, sizes = self._cache, {file.name: file.size for file in self.new_files}
        assert cache.tables is not None
        used = {w.place.file for _, _, places in self.written.values() for w in places.values()}
        sizes = {**({} if self._before is None else self._before.sizes), **sizes}
        names = sorted(used | {file.name for file in self.new_files})
        numbers = {name: number for number, name in enumerate(names)}
        parts = {part: self._part(part, numbers) for part in self._values}
        signature = cache.signature
        return SavedSession(
            format="kvrecall-session", version=VERSION, method=method, settings=settings_of(cache.method),
            model=SavedModel(
                type=signature.model_type, layers=signature.layers, query_heads=signature.query_heads,
                kv_heads=signature.kv_heads, head_dim=signature.head_dim, config=fingerprint.config,
                weights=fingerprint.weights,
            ),
            dtype=dtype, rows=self._rows, tokens=cache.get_seq_length(), block_size=self._size,  # pyright: ignore
            observe_queries=cache.observe_queries, about=about,
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
        blocks = {}
        for (layer, name), (of, form, written) in self.written.items():
            if str(layer) == part:
                blocks[name] = self._blocks(of(), form, written, numbers)
        return SavedPart(values=self._values[part], tensors=tensors, blocks=blocks)

    def _blocks(self, memory: Any, form: Any, written: dict[int, _Written], numbers: dict[str, int]) -> SavedBlocks:
        found = [written.get(block) for block in self._order]
        return SavedBlocks(
            form=form, nbytes=_block_nbytes(memory, form), held=[0 if w is None else w.tokens for w in found],
            files=[-1 if w is None else numbers[w.place.file] for w in found],
            offsets=[0 if w is None else w.place.offset for w in found],
            crcs=[0 if w is None else w.place.crc for w in found],
        )  # fmt: skip


def load(
    kind: type[RetrievalCache], folder: str | Path, config: PretrainedConfig, *, model: PreTrainedModel | None,
    device: torch.device | str | None, verify: bool, options: dict[str, Any],
) -> RetrievalCache:  # fmt: skip
    """See `RetrievalCache.load`."""
    path = Path(os.path.realpath(folder))
    for tries in range(8):
        session, checksum = read_index(path)
        method = _check(path, session, config, model)
        try:
            with lasting_tensors(), torch.no_grad(), _opened(path, session) as files:
                cache = kind(config, method, observe_queries=session.observe_queries, **options)
                where = torch.device(device) if device is not None else cache._device() if model is None else model.device
                return _Load(cache, path, session, checksum, files, where, verify).run(model)
        except UNFORESEEN as error:
            if isinstance(error, KVRecallError):
                raise
            raise SessionError(path, "parts that fit together", f"others ({str(error)[:200]})") from error
        except FileNotFoundError as error:  # another process may have saved meanwhile
            if tries == 7 or checksum_of(path) == checksum:
                name = Path(str(error.filename)).name
                raise SessionError(name, "a file of the session", "none") from None
    raise AssertionError


class _Load:
    """Makes the cache of a session whose index has been checked."""

    def __init__(
        self, cache: RetrievalCache, path: Path, session: SavedSession, checksum: str, files: OpenFiles, device: torch.device,
        verify: bool,
    ) -> None:  # fmt: skip
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._cache, self._session, self._files, self._device, self._verify = cache, session, files, device, verify
        self._dtype: torch.dtype = getattr(torch, session.dtype)
        model = session.model
        self._state = SavedState(
            str(path), checksum, Fingerprint(model.config, model.weights), {f.name: f.nbytes for f in session.files},
            about=dict(session.about),
        )  # fmt: skip

    def run(self, model: PreTrainedModel | None) -> RetrievalCache:
        """Raises SessionError for what does not fit together."""
        cache, session = self._cache, self._session
        pool = BlockPool(session.block_size)
        cache.tables = pool.adopt(session.tables)
        cache._session = self._state
        own = self._reader(session.cache)
        self._state.rotaries = saved_parts.archive_cache(cache, own, session.tokens, len(session.tables))
        own.done()
        if model is not None:
            self._state.meet(model)
            cache._model = ref(model)
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
        return cache

    def _check_windows(self, cache: RetrievalCache) -> None:
        """Raises HostMemoryError for a method whose windows the host cannot hold."""
        tokens, sequences = cache.method.zone_sizes().resident_capacity, len(self._session.tables)
        heads, available = self._session.model, available_host_bytes()
        row = 2 * heads.kv_heads * heads.head_dim * self._dtype.itemsize
        need = row * tokens * sequences * len(cache.retrieval_layers)
        if self._device.type == "cpu" and need > available:
            raise HostMemoryError(need, available, tokens * sequences)

    def _reader(self, part: SavedPart) -> Reader:
        notes = Notes(dict(part.values))
        for name, tensor in part.tensors.items():
            held = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
            self._files.read(self._session.place(tensor), held, self._verify)
            notes.tensors[name] = held
        return Reader(self._device, notes)

    def _hold(self, tables: list[BlockTable], readers: dict[int, Reader]) -> None:
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

    def _state_of(self, layer: RetrievalLayer, reader: Reader) -> LayerState:
        cache, tables, number = self._cache, self._cache.tables, layer.number
        heads = Heads.of(cache._config.get_text_config(decoder=True), number)
        known = None if cache.calibration is None else cache.calibration.layer(number, heads.kv, heads.dim)
        shape = LayerShape(len(self._session.tables), heads.query, heads.kv, heads.dim, self._dtype, self._device, known)
        near = layer._rows_on_device(shape, cache.method, self._session.tokens)
        state = LayerState(number, shape, cache.method, cache.profile, cache.observe_queries, tables, near)
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
        saved, size, tables = self._session.layers[str(number)].blocks, self._session.block_size, self._cache.tables
        assert tables is not None
        for name, (memory, tokens) in notes.memories.items():
            what = f"layer {number} {name}"
            if name not in saved:
                raise SessionError(what, "its blocks", "none")
            part = saved[name]
            if part.form != (self._session.rows if isinstance(memory, BlockRows) else "plain"):
                raise SessionError(what, f"blocks in the form {self._session.rows!r}", repr(part.form))
            if part.nbytes != _block_nbytes(memory, part.form):
                raise SessionError(what, f"blocks of {_block_nbytes(memory, part.form):,} bytes", f"{part.nbytes:,}")
            places = self._session.places(part)
            for table, count in zip(tables, tokens, strict=True):
                if any(block not in places for block in table.blocks[: cdiv(count, size)]):
                    raise SessionError(what, f"blocks for {count:,} tokens", "fewer")
            written = {block: _Written(place, part.held[block]) for block, place in places.items()}
            self._state.blocks[number, name] = ref(memory), part.form, written
            if places:
                made = (
                    partial(restored, shape=memory.tensor.shape[1:], dtype=memory.tensor.dtype) if part.form == "fp8" else None
                )
                blocks = self._session.block_count
                fill_blocks(memory, blocks, places, self._files, pool, verify=self._verify, restored=made)


def read_info(folder: str | Path) -> SessionInfo:
    """What a folder holds, without loading it. Raises SessionError."""
    path = Path(os.path.realpath(folder))
    session, _ = read_index(path)
    ids = None
    if (held := session.cache.tensors.get("tokens.ids")) is not None and held.dtype == "int64":
        name = session.files[held.file]
        with OpenFiles.of(path / _DATA, {name.name: name.nbytes}) as files:
            ids = torch.empty(held.shape, dtype=torch.int64)
            files.read(session.place(held), ids, True)
    return _info(path, session, ids)


def _info(path: Path, session: SavedSession, ids: Tensor | None) -> SessionInfo:
    nbytes = sum(file.nbytes for file in session.files)
    return SessionInfo(
        path, session.model.type, session.method, dict(session.settings), session.tokens, len(session.tables), session.dtype,
        session.rows, nbytes, len(session.files), ids, dict(session.about),
    )  # fmt: skip


def _check(path: Path, session: SavedSession, config: PretrainedConfig, model: PreTrainedModel | None) -> Method:
    """The method of a session, if the session is of this model."""
    saved, signature = session.model, ModelSignature.of(config)
    held = ModelSignature(saved.type, saved.layers, saved.query_heads, saved.kv_heads, saved.head_dim)
    remedy = "Load it with the model that read the documents, or read them again with this one."
    if held != signature:
        raise SessionError("model", f"the one that it was saved with ({held})", str(signature), remedy)
    _compare("config", Fingerprint(saved.config, None), fingerprint_of_config(config))
    if model is not None and str(model.dtype).removeprefix("torch.") != session.dtype:
        raise SessionError(
            "dtype", f"a model in {session.dtype}", str(model.dtype).removeprefix("torch."), "Load it in that dtype."
        )
    try:
        return from_settings(session.method, session.settings)
    except KVRecallError as error:
        raise SessionError(f"{path.name} method", "a method of this release with its settings", str(error)) from None


def _compare(name: str, expected: Fingerprint, got: Fingerprint) -> None:
    if not expected.fits(got):
        part = "config" if expected.config != got.config else "weights"
        hashes = [str(getattr(one, part))[:16] for one in (expected, got)]
        remedy = "Load it with the model that read the documents, or read them again with this one."
        raise SessionError(name, f"the model that it was saved with ({part} {hashes[0]}…)", f"another ({hashes[1]}…)", remedy)


def _check_heads(cache: RetrievalCache, states: list[LayerState]) -> None:
    text = cache._config.get_text_config(decoder=True)
    for state in states:
        heads, shape = Heads.of(text, state.layer), state.shape
        if (shape.query_heads, shape.kv_heads) != (heads.query, heads.kv):
            got = f"{shape.query_heads} and {shape.kv_heads}, as a process of a tensor-parallel model has"
            expected = f"all heads of the model ({heads.query} and {heads.kv})"
            raise SessionError(f"layer {state.layer}", expected, got, "Load the model in one process.")


def _check_about(about: dict[str, Any]) -> None:
    for name, value in about.items():
        texts = value if isinstance(value, list) else [name] if isinstance(value, int) and value >= 0 else [name, value]
        if not all(isinstance(text, str) for text in texts):
            raise ParameterError(f"about[{name!r}]", "a text, a count or a list of texts", value, "Say it in text.")


def _generation(before: SavedState | None) -> int:
    names = [] if before is None else [int(name.split("-")[0], 16) for name in before.sizes]
    return (max(names, default=-1) + 1) % 2**32


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _block_nbytes(memory: Any, form: str) -> int:
    block = memory.tensor.shape[1:]
    return compact_bytes(tuple(block)) if form == "fp8" else block.numel() * memory.tensor.element_size()


def _block_bytes(memory: Any, block: int, place: int, tokens: int, form: str) -> Tensor:
    held = memory.cleared(block, place, tokens)
    return compact(held) if form == "fp8" else held


@contextmanager
def _opened(path: Path, session: SavedSession) -> Iterator[OpenFiles]:
    with OpenFiles.of(path / _DATA, {file.name: file.nbytes for file in session.files}) as files:
        yield files


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """The folder, which is made if need be; nobody else saves to it meanwhile. Raises SessionError where other files are in it,
    and where another process saves."""
    path = Path(os.path.realpath(folder))
    path.mkdir(parents=True, exist_ok=True)
    others = [name for name in os.listdir(path) if name not in (NAME, _DATA, _LOCK) and not _DRAFT.fullmatch(name)]
    if others or (not (path / NAME).exists() and (path / _DATA).is_dir() and _strangers(path / _DATA)):
        remedy = "Give a new folder, or one that holds a session."
        raise SessionError(path, "an empty folder or a saved session", f"other files ({', '.join(sorted(others)[:3])})", remedy)
    try:
        with FileLock(path / _LOCK, timeout=0):
            (path / _DATA).mkdir(exist_ok=True)
            yield path
    except Timeout:
        remedy = "Wait for it, or give another folder."
        raise SessionError(path, "a folder that nobody else saves to", "one that is being written", remedy) from None


def _strangers(data: Path) -> list[str]:
    return [name for name in os.listdir(data) if not FILE_NAME.fullmatch(name)]


def _clean(path: Path) -> None:
    """Removes files that the folder's index does not name: of an older session, or of a save that came to no end."""
    with suppress(OSError, SessionError):
        used = {file.name for file in read_index(path)[0].files} if (path / NAME).exists() else set[str]()
        for name in os.listdir(path / _DATA):
            if name not in used and FILE_NAME.fullmatch(name):
                (path / _DATA / name).unlink()
        for name in os.listdir(path):
            if _DRAFT.fullmatch(name):
                (path / name).unlink()

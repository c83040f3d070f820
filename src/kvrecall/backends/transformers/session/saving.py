"""Saves a RetrievalCache to a folder.

Layers are archived -> blocks that have changed and all tensors go to new files -> the index takes the old one's place -> files
that no index names are removed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvrecall.backends.transformers.cache_state import CacheState
from kvrecall.backends.transformers.fingerprint import (
    Fingerprint,
    computation_of,
    fingerprint_of_config,
    read_fingerprint,
)
from kvrecall.backends.transformers.owner import operation
from kvrecall.backends.transformers.session import parts
from kvrecall.backends.transformers.session.info import SessionInfo, info_of
from kvrecall.backends.transformers.session.match import check_heads, check_readable, registered_name
from kvrecall.backends.transformers.session.new_session import NewSession
from kvrecall.backends.transformers.session.state import SavedState
from kvrecall.cache.session_files import write
from kvrecall.cache.session_folder import DATA, clean, locked
from kvrecall.cache.session_index import checksum_of, write_index
from kvrecall.core.archive import MOST, Notes, Writer
from kvrecall.core.errors import ParameterError, SessionError
from kvrecall.core.private_folder import PrivateFolder
from kvrecall.core.structs import lasting_tensors
from kvrecall.core.whole_files import written_to
from kvrecall.layer.saved import archive_layer
from kvrecall.layer.state import LayerState

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
    states = [layer.state for layer in cache.retrieval_layers if layer.state is not None]
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
        new = NewSession(cache, states[0].store.pool.block_size, rows, before)
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
    noted, own = {}, Writer(torch.device("cpu"))
    with lasting_tensors(), torch.no_grad():
        parts.archive_cache(cache, own)
        for state in states:
            writer = Writer(state.shape.device)
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

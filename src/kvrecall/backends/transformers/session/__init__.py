"""Saves a RetrievalCache to a folder and makes it again; the format is on docs/design/sessions.md.

`saving` writes and `loading` reads; both archive a cache by the same lines (`parts`, `layer.saved`). `match` says what a
session and a model must share, `state` what a cache knows of its session, `info` what a session tells without being loaded.
"""

from kvrecall.backends.transformers.session.info import SessionInfo, read_info
from kvrecall.backends.transformers.session.loading import load
from kvrecall.backends.transformers.session.saving import save
from kvrecall.backends.transformers.session.state import SavedState

__all__ = ["SavedState", "SessionInfo", "load", "read_info", "save"]

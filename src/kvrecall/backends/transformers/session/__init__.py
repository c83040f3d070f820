"""Saves a RetrievalCache to a folder and makes it again; the format is on docs/design/sessions.md.

`saving` writes and `loading` reads; both archive a cache by the same lines (`parts`, `layer.saved`). `state` says what a cache
knows of its session, what a session tells without being loaded, and what it must share with a model.
"""

from kvrecall.backends.transformers.session.loading import load
from kvrecall.backends.transformers.session.saving import save
from kvrecall.backends.transformers.session.state import SavedState, SessionInfo, read_info

__all__ = ["SavedState", "SessionInfo", "load", "read_info", "save"]

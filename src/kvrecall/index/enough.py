"""How much of a text statistics of keys need. The command line's help says so, and it does not wait for torch."""

from __future__ import annotations

ENOUGH_TOKENS = 4096
"""Tokens that statistics are gathered from; more of them change no map by more than its noise."""
